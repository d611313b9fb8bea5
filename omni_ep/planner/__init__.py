# SPDX-License-Identifier: Apache-2.0
"""Memory per rank and bytes on the wire, for any model and layout, on a machine without an accelerator.

Pure Python: nothing here imports torch, vLLM or numpy.
"""

from omni_ep.planner.model import PlannedModel, load_model
from omni_ep.planner.plan import Plan, Settings, make_plan
from omni_ep.planner.precision import PRECISIONS, precision_of
from omni_ep.planner.presets import PRESETS
from omni_ep.planner.weights import Part
from omni_ep.planner.workload import Workload

__all__ = [
    "PRECISIONS",
    "PRESETS",
    "Part",
    "Plan",
    "PlannedModel",
    "Settings",
    "Workload",
    "load_model",
    "make_plan",
    "precision_of",
]
