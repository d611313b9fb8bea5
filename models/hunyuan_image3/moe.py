# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-3's sparse MoE block under expert parallelism."""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm_omni.diffusion.models.hunyuan_image3.hunyuan_image3_transformer import HunYuanMLP

from omni_ep.ops import HUNYUAN_FUSED_MOE, resolve_op


class HunyuanFusedMoE:
    """Routed and shared experts of one layer, built by the current platform.

    ``HunyuanFusedMoE(...)`` returns the platform's module for the op ``hunyuan_fused_moe``
    after the platform has prepared its runtime (the EP and dispatch groups).
    """

    def __new__(cls, **kwargs: Any) -> nn.Module:  # type: ignore[misc]
        return resolve_op(HUNYUAN_FUSED_MOE)(**kwargs)


def _of_layer(value: int | list[int], layer_id: int) -> int:
    """Per-layer lists and plain numbers both occur in HunyuanImage-3 configs."""
    return value[layer_id] if isinstance(value, list) else value


class HunyuanSparseMoeBlock(nn.Module):
    """Replicated gate, experts spread over the EP group, shared expert.

    Sharding of the weights:

    | weight | shape | where |
    |---|---|---|
    | ``gate`` | [experts, hidden] | every rank |
    | ``experts.routed_experts.w13_weight`` | [experts / EP, 2 × intermediate, hidden] | its EP rank, whole |
    | ``experts.routed_experts.w2_weight`` | [experts / EP, hidden, intermediate] | its EP rank, whole |
    | ``shared_mlp`` | [2 × intermediate, hidden], [hidden, intermediate] | split by TP |

    The gate scores this rank's own tokens; dispatch gathers tokens, weights and expert ids
    over SP×CFG×DP, each rank computes its own experts, and combine reduce-scatters the partial
    sums back. The shared expert runs on the rank's own tokens as a TP partial and joins before
    the one reduction over TP, so it counts once whatever the topology.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        quant_config: QuantizationConfig | None = None,
        layer_id: int = -1,
        prefix: str = "",
        enable_eplb: bool = False,
    ) -> None:
        super().__init__()
        if enable_eplb:
            raise ValueError("dynamic expert load balancing (EPLB) is not available for diffusion stages")
        top_k = _of_layer(config.moe_topk, layer_id)
        intermediate_size = _of_layer(
            config.moe_intermediate_size
            if config.moe_intermediate_size is not None
            else config.intermediate_size,
            layer_id,
        )
        self.gate = ReplicatedLinear(
            config.hidden_size,
            config.num_experts,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate",
        )
        self.shared_mlp: HunYuanMLP | None = None
        if config.use_mixed_mlp_moe > 0:
            self.shared_mlp = HunYuanMLP(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size * _of_layer(config.num_shared_expert, layer_id),
                hidden_act=config.hidden_act,
                quant_config=quant_config,
                reduce_results=False,
                prefix=f"{prefix}.shared_mlp",
            )
        self.experts = HunyuanFusedMoE(
            num_experts=config.num_experts,
            top_k=top_k,
            hidden_size=config.hidden_size,
            intermediate_size=intermediate_size,
            # One slot keeps its softmax weight; several are renormalised to sum to one.
            renormalize=top_k > 1,
            shared_experts=self.shared_mlp,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` in and out; ranks may bring different numbers of tokens, or none."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        router_logits, _ = self.gate(tokens)
        output: torch.Tensor = self.experts(hidden_states=tokens, router_logits=router_logits)
        return output.view(hidden_states.shape)
