# SPDX-License-Identifier: Apache-2.0
"""`hunyuan_fused_moe` on CUDA and ROCm GPUs: vLLM's FusedMoE."""

from typing import Any

from torch import nn

from omni_ep.platforms.fused_moe import build_fused_moe


class GpuHunyuanFusedMoE:
    """Constructing it returns vLLM's `MoERunner`, so that the model's parameters are the runner's own.

    Arguments, shapes and errors: `build_fused_moe`.
    """

    def __new__(cls, **kwargs: Any) -> nn.Module:  # type: ignore[misc]
        return build_fused_moe(**kwargs)
