# SPDX-License-Identifier: Apache-2.0
"""The sparse MoE block on real gloo ranks against the plain dense reference, in float32."""

from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.topologies import TOPOLOGIES, run_request

EXPERTS, HIDDEN, INTERMEDIATE, SHARED = 16, 32, 24, 40
MAX_RELATIVE_ERROR = 1e-5

#: (top-k, shared expert) of the cases that every topology runs.
VARIANTS = [(1, True), (2, True), (8, True), (1, False), (2, False), (8, False)]

#: tokens that each dispatch rank brings, cut to the topology's number of dispatch ranks.
TOKEN_COUNTS = {
    "equal": [6, 6, 6, 6],
    "uneven": [7, 3, 10, 1],
    "one rank empty": [5, 0, 2, 9],
    "none": [0, 0, 0, 0],
}


def _block(top_k: int, with_shared: bool, prefix: str) -> Any:
    from transformers import PretrainedConfig

    from omni_ep.models.hunyuan_image3.moe import HunyuanSparseMoeBlock

    config = PretrainedConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        moe_topk=[top_k],
        moe_intermediate_size=[INTERMEDIATE],
        intermediate_size=SHARED,
        num_shared_expert=[1],
        use_mixed_mlp_moe=with_shared,
        hidden_act="silu",
    )
    return HunyuanSparseMoeBlock(config, layer_id=0, prefix=prefix)


def _load(block: Any, weights: Any, tp_rank: int, tp_size: int) -> None:
    """Put the reference's weights where the block's sharding table says they belong."""
    experts = block.experts.routed_experts
    placed = experts.expert_map
    local = range(EXPERTS) if placed is None else (placed >= 0).nonzero().flatten().tolist()
    expert_tp = experts.w2_weight.shape[-1] != INTERMEDIATE  # EP off: experts are split by TP
    for global_id in local:
        slot = global_id if placed is None else int(placed[global_id])
        w1, w3, w2 = weights.w1_EIH[global_id], weights.w3_EIH[global_id], weights.w2_EHI[global_id]
        if expert_tp:
            w1, w3 = (w.chunk(tp_size, 0)[tp_rank] for w in (w1, w3))
            w2 = w2.chunk(tp_size, 1)[tp_rank]
        experts.w13_weight.data[slot] = torch.cat([w1, w3])
        experts.w2_weight.data[slot] = w2
    block.gate.weight.data.copy_(weights.gate_EH)
    if block.shared_mlp is not None:
        rows = [w.chunk(tp_size, 0)[tp_rank] for w in (weights.shared_w1_SH, weights.shared_w3_SH)]
        block.shared_mlp.gate_up_proj.weight.data.copy_(torch.cat(rows))
        block.shared_mlp.down_proj.weight.data.copy_(weights.shared_w2_HS.chunk(tp_size, 1)[tp_rank])


def _tokens(dispatch_rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 + dispatch_rank))


def _compare_every_case(rank: int, od_config: Any, request: Any) -> dict[str, Any]:
    from vllm.forward_context import set_forward_context

    from tests.reference_moe import MoEWeights, dense_moe
    from tests.workers import worker

    layout = request.layout
    errors: dict[str, float] = {}
    with torch.no_grad(), worker(rank, od_config) as live:
        weights = MoEWeights.random(EXPERTS, HIDDEN, INTERMEDIATE, SHARED)
        local_experts = pairs = None
        for top_k, with_shared in VARIANTS:
            previous = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            block = _block(top_k, with_shared, prefix=f"layers.0.mlp.{top_k}.{with_shared}")
            torch.set_default_dtype(previous)
            experts = block.experts.routed_experts
            local_experts = experts.w13_weight.shape[0]
            _load(block, weights, layout.coordinates(rank).tp, layout.tp)
            for module in block.modules():
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
            for case, counts in TOKEN_COUNTS.items():
                mine = layout.dispatch_rank(rank)
                x = _tokens(mine, counts[mine])
                with set_forward_context(None, live.vllm_config):
                    got = block(x.clone())
                want = dense_moe(x, weights, top_k, with_shared=with_shared)
                scale = want.abs().max() if want.numel() else torch.tensor(1.0)
                difference = (got - want).abs().max() if want.numel() else torch.tensor(float(got.numel()))
                errors[f"top-{top_k}, shared {with_shared}, {case}"] = float(difference / scale)
            pairs = experts.quant_method.moe_kernel.fused_experts.pairs_computed
        return {"errors": errors, "local_experts": local_experts, "pairs": pairs}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_block_equals_dense_reference(topology: str) -> None:
    from tests.workers import diffusion_config

    request = run_request(topology)
    od_config = diffusion_config(request, dtype=torch.float32)
    results = run_on_ranks(_compare_every_case, request.layout.world_size, od_config, request)
    for rank, result in enumerate(results):
        assert len(result["errors"]) == len(VARIANTS) * len(TOKEN_COUNTS)
        worst = max(result["errors"], key=result["errors"].get)
        assert result["errors"][worst] <= MAX_RELATIVE_ERROR, (
            f"rank {rank}, {worst}: {result['errors'][worst]:.2e}"
        )
        expected = EXPERTS // request.layout.ep_size if request.enable_expert_parallel else EXPERTS
        assert result["local_experts"] == expected
    if request.enable_expert_parallel:
        # Each (token, slot) pair is computed by exactly one rank of those that see the token.
        tokens = sum(
            sum(counts[: request.layout.ep_size // request.layout.tp]) for counts in TOKEN_COUNTS.values()
        )
        assert sum(result["pairs"] for result in results) == tokens * VARIANTS[-1][0]
