# SPDX-License-Identifier: Apache-2.0
"""`hunyuan_fused_moe` on CUDA and ROCm GPUs: vLLM's FusedMoE."""

from typing import TYPE_CHECKING, Any

from omni_ep.platforms.fused_moe import build_fused_moe

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class GpuHunyuanFusedMoE:
    """Constructing it returns vLLM's `MoERunner`, so that the model's parameters are the runner's own.

    Arguments, shapes and errors: `build_fused_moe`.
    """

    def __new__(  # type: ignore[misc]
        cls,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        renormalize: bool,
        shared_experts: "nn.Module | None",
        quant_config: "QuantizationConfig | None" = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> "nn.Module":
        return build_fused_moe(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            renormalize=renormalize,
            shared_experts=shared_experts,
            quant_config=quant_config,
            prefix=prefix,
            **kwargs,
        )
