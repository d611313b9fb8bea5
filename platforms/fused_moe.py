# SPDX-License-Identifier: Apache-2.0
"""vLLM's FusedMoE as omni-ep's platforms build it: they differ in nothing but the device."""

from typing import TYPE_CHECKING, Any

from omni_ep.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


def build_fused_moe(
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
    """vLLM's `MoERunner`, set up for diffusion by vLLM-Omni's adapter. Call it after the op's runtime is
    prepared.

    Its forward maps `hidden_states` (tokens, hidden_size) and `router_logits` (tokens, num_experts) to
    (tokens, hidden_size), reduced over TP, with the shared experts added once.

    Args:
        num_experts: experts of the layer over all ranks.
        intermediate_size: of one whole expert.
        shared_experts: applied to every local token.
        kwargs: further arguments of vLLM's `FusedMoEFactory`.

    Raises:
        ConfigurationError: a `pcp_size` other than 1 is passed.
    """
    # omni_ep.groups folds SP into vLLM's DP group. A PCP size beside it would count the SP ranks twice.
    pcp_size = kwargs.pop("pcp_size", 1)
    if pcp_size != 1:
        raise ConfigurationError(
            f"pcp_size={pcp_size} passed to the experts {prefix!r}; needed 1, because sequence parallelism "
            f"is folded into vLLM's DP group. Leave the argument out."
        )
    from vllm_omni.diffusion.layers.fused_moe import FusedMoE

    return FusedMoE(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        renormalize=renormalize,
        shared_experts=shared_experts,
        quant_config=quant_config,
        prefix=prefix,
        pcp_size=1,
        **kwargs,
    )
