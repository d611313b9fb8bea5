# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-3.0's names for expert tensors, one per expert or all experts in one tensor."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

#: As a checkpoint writes it: one spelling per number, so that no two names mean the same tensor.
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_EXPERTS = rf"(?P<layer>model\.layers\.(?P<index>{_NUMBER}))\.mlp\.experts"
_PER_EXPERT = re.compile(_EXPERTS + rf"\.(?P<expert>{_NUMBER})\.(?P<leaf>[A-Za-z_].*)")
_FUSED = re.compile(_EXPERTS + r"\.(?P<leaf>[A-Za-z_][^.\n]*(?:\..+)?)")
_LAYER = re.compile(rf"model\.layers\.({_NUMBER})\.")


class ExpertName(NamedTuple):
    """What an expert tensor's name says.

    Attributes:
        stem: the name up to ``experts``, such as ``model.layers.3.mlp.experts``.
        expert: global expert id; ``None`` when the tensor holds all experts, ``[num_experts, ...]``.
        leaf: the rest, such as ``down_proj.weight``.
    """

    stem: str
    layer: int
    expert: int | None
    leaf: str

    def of_expert(self, expert: int) -> str:
        """The name that one expert's part has in a checkpoint with one tensor per expert."""
        # Fused checkpoints often leave the last part out: they hold parameters, not modules.
        leaf = self.leaf if "." in self.leaf else f"{self.leaf}.weight"
        return f"{self.stem}.{expert}.{leaf}"

    @property
    def is_scale(self) -> bool:
        """A quantization scale rather than a weight."""
        return "scale" in self.leaf.rsplit(".", 1)[-1]


# Several passes over the same names; a large checkpoint has some ten thousand.
@lru_cache(maxsize=2**16)
def parse_expert(name: str) -> ExpertName | None:
    """The parts of an expert tensor's name, ``None`` for every other tensor."""
    if match := _PER_EXPERT.fullmatch(name):
        expert: int | None = int(match["expert"])
    elif match := _FUSED.fullmatch(name):
        expert = None
    else:
        return None
    return ExpertName(f"{match['layer']}.mlp.experts", int(match["index"]), expert, match["leaf"])


def parse_layer(name: str) -> int | None:
    """The transformer layer a tensor belongs to, ``None`` outside the transformer's layers."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None
