# SPDX-License-Identifier: Apache-2.0
"""The judge: HunyuanImage-3's MoE block in plain float32, every expert on one device.

Written from the model's definition, with none of vLLM's or omni-ep's code.
"""

from dataclasses import dataclass

import torch


@dataclass
class MoEWeights:
    """Shapes: E experts, H hidden, I expert intermediate, S shared intermediate."""

    gate_EH: torch.Tensor
    w1_EIH: torch.Tensor
    """Gate projection of each expert."""
    w3_EIH: torch.Tensor
    """Up projection of each expert."""
    w2_EHI: torch.Tensor
    shared_w1_SH: torch.Tensor
    shared_w3_SH: torch.Tensor
    shared_w2_HS: torch.Tensor

    @staticmethod
    def random(experts: int, hidden: int, intermediate: int, shared: int, seed: int = 0) -> "MoEWeights":
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        return MoEWeights(
            gate_EH=normal(experts, hidden),
            w1_EIH=normal(experts, intermediate, hidden),
            w3_EIH=normal(experts, intermediate, hidden),
            w2_EHI=normal(experts, hidden, intermediate),
            shared_w1_SH=normal(shared, hidden),
            shared_w3_SH=normal(shared, hidden),
            shared_w2_HS=normal(hidden, shared),
        )


def swiglu(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate = x @ w1.T
    return ((gate * torch.sigmoid(gate)) * (x @ w3.T)) @ w2.T


def dense_moe(x_TH: torch.Tensor, weights: MoEWeights, top_k: int, *, with_shared: bool) -> torch.Tensor:
    """Softmax over all experts, keep the top k, renormalise if k > 1, add up token by token."""
    out_TH = torch.zeros_like(x_TH)
    probabilities_TE = torch.softmax(x_TH @ weights.gate_EH.T, dim=-1)
    for token in range(x_TH.shape[0]):
        kept, experts = torch.topk(probabilities_TE[token], top_k)
        if top_k > 1:
            kept = kept / kept.sum()
        x = x_TH[token : token + 1]
        for weight, expert in zip(kept, experts.tolist(), strict=True):
            expert_out = swiglu(x, weights.w1_EIH[expert], weights.w3_EIH[expert], weights.w2_EHI[expert])
            out_TH[token] += weight * expert_out[0]
    if with_shared:
        out_TH += swiglu(x_TH, weights.shared_w1_SH, weights.shared_w3_SH, weights.shared_w2_HS)
    return out_TH
