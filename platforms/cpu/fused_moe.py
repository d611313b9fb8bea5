# SPDX-License-Identifier: Apache-2.0
"""``hunyuan_fused_moe`` on CPU."""

from typing import Any

from torch import nn

from omni_ep.platforms.cpu.layers import register_native_layers
from omni_ep.platforms.fused_moe import build_fused_moe


class CpuHunyuanFusedMoE:
    """Builds vLLM's FusedMoE, whose experts are then omni-ep's grouped CPU experts."""

    def __new__(cls, **kwargs: Any) -> nn.Module:  # type: ignore[misc]
        register_native_layers()
        return build_fused_moe(**kwargs)
