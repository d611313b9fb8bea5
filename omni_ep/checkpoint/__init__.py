# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints in the real HunyuanImage-3.0 layout, to run without its 158 GB of weights."""

from omni_ep.checkpoint.cache import DEMONSTRATION, default_checkpoint, default_checkpoint_path
from omni_ep.checkpoint.inventory import Inventory, inventory, tensors
from omni_ep.checkpoint.make import make_checkpoint, missing_from
from omni_ep.checkpoint.spec import CheckpointSpec

__all__ = [
    "DEMONSTRATION",
    "CheckpointSpec",
    "Inventory",
    "default_checkpoint",
    "default_checkpoint_path",
    "inventory",
    "make_checkpoint",
    "missing_from",
    "tensors",
]
