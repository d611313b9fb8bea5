# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint tensors a rank needs, reading those only, and knowing what is missing.

Everything but ``reader`` is plain Python without torch, so that damage is found before a rank starts.
"""

from omni_ep.loading.expectations import check_against_config
from omni_ep.loading.headers import Checkpoint, TensorHeader, read_checkpoint, read_headers
from omni_ep.loading.plan import LoadingPlan, RankRole, Read, plan_loading
from omni_ep.loading.settings import LoadingSettings

__all__ = [
    "Checkpoint",
    "LoadingPlan",
    "LoadingSettings",
    "RankRole",
    "Read",
    "TensorHeader",
    "check_against_config",
    "plan_loading",
    "read_checkpoint",
    "read_headers",
]
