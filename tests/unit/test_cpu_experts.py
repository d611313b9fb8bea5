# SPDX-License-Identifier: Apache-2.0
"""The CPU experts compute the pairs of their own experts, no others, and add them up in float32."""

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)

from omni_ep.placement import ExpertPlacement
from omni_ep.platforms.cpu.experts import (
    CpuUnquantizedFusedMoEMethod,
    GroupedCpuExperts,
    local_pairs_by_expert,
)
from tests.reference_moe import MoEWeights, dense_moe

EXPERTS, HIDDEN, INTERMEDIATE = 8, 32, 24

#: Three tokens, two slots each; slot n of the flattened table is token n // 2.
IDS = [[3, 0], [1, 3], [0, 2]]


@pytest.mark.parametrize(
    ("ids", "expert_map", "num_local", "pairs", "counts"),
    [
        pytest.param(IDS, None, 4, [1, 4, 2, 5, 0, 3], [2, 1, 1, 2], id="every expert is local"),
        pytest.param(IDS, [0, 1, -1, -1], 2, [1, 4, 2], [2, 1], id="first half"),
        pytest.param(IDS, [-1, -1, 0, 1], 2, [5, 0, 3], [1, 2], id="second half"),
        pytest.param(IDS, [-1, 1, -1, 0], 2, [0, 3, 2], [2, 1], id="slots in another order than ids"),
        pytest.param([[3, 0], [3, 0]], None, 4, [1, 3, 0, 2], [2, 0, 0, 2], id="experts without a token"),
        pytest.param([[3, 0], [3, 0]], [-1, 0, 1, -1], 2, [], [0, 0], id="no token for this rank"),
        pytest.param([[0], [0], [0]], None, 1, [0, 1, 2], [3], id="one expert"),
        pytest.param([[2, -1], [-1, 3]], None, 4, [0, 3], [0, 0, 1, 1], id="slots without an expert"),
        pytest.param([[2, -1], [-1, 3]], [-1, -1, 0, 1], 2, [0, 3], [1, 1], id="the same under a map"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_pairs_by_hand(
    ids: list[list[int]],
    expert_map: list[int] | None,
    num_local: int,
    pairs: list[int],
    counts: list[int],
    dtype: torch.dtype,
) -> None:
    placed = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    got = local_pairs_by_expert(torch.tensor(ids, dtype=dtype), placed, num_local)
    assert (got[0].tolist(), got[1]) == (pairs, counts)


@pytest.mark.parametrize("expert_map", [None, torch.tensor([0, -1, 1])], ids=["no map", "map"])
def test_zero_tokens_have_no_pairs(expert_map: torch.Tensor | None) -> None:
    pairs, counts = local_pairs_by_expert(torch.empty(0, 2, dtype=torch.long), expert_map, 2)
    assert (pairs.tolist(), counts) == ([], [0, 0])


def test_a_map_of_other_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="routed to local expert 3") as error:
        local_pairs_by_expert(torch.tensor([[0, 3]]), torch.tensor([0, 1, 2, 3]), 2)
    assert str(error.value) == (
        "a slot is routed to local expert 3, but this rank holds 2; "
        "the expert map does not belong to these weights"
    )


def moe_config(activation: MoEActivation = MoEActivation.SILU) -> FusedMoEConfig:
    return FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=2,
        hidden_dim=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=activation,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.float32,
    )


def run(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> tuple[torch.Tensor, int]:
    """The experts' output, written over garbage, and the number of pairs computed for it."""
    experts = GroupedCpuExperts(moe_config(), FUSED_MOE_UNQUANTIZED_CONFIG)
    output = torch.full_like(x_TH, float("nan"))
    unused: Any = torch.empty(0)
    experts.apply(
        output,
        x_TH,
        w13,
        w2,
        topk_weights,
        topk_ids,
        MoEActivation.SILU,
        topk_ids.max().item() + 1 if topk_ids.numel() else 0,
        expert_map,
        None,
        None,
        unused,
        unused,
        None,
        apply_router_weight_on_input,
    )
    return output, experts.pairs_computed


def routed(tokens: int, top_k: int) -> tuple[MoEWeights, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, tokens, and the slots that HunyuanImage-3's router gives them."""
    weights = MoEWeights.random(EXPERTS, HIDDEN, INTERMEDIATE, shared=8)
    x_TH = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    topk_weights, topk_ids = torch.softmax(x_TH @ weights.gate_EH.T, dim=-1).topk(top_k)
    if top_k > 1:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    return weights, x_TH, topk_weights, topk_ids


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_ranks_add_up_to_the_reference(tokens: int, ep_size: int, top_k: int) -> None:
    """Partial outputs of all EP ranks sum to the dense reference, and their pairs to tokens × top-k."""
    weights, x_TH, topk_weights, topk_ids = routed(tokens, top_k)
    w13 = torch.cat([weights.w1_EIH, weights.w3_EIH], dim=1)
    placement = ExpertPlacement.linear(EXPERTS, ep_size)
    total, pairs = torch.zeros_like(x_TH), 0
    for rank in range(ep_size):
        mine = list(placement.local_experts(rank))
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        output, computed = run(
            x_TH,
            w13[mine],
            weights.w2_EHI[mine],
            topk_weights,
            topk_ids,
            expert_map=expert_map if ep_size > 1 else None,
        )
        assert computed == sum(expert in mine for expert in topk_ids.flatten().tolist())
        foreign = ~torch.isin(topk_ids, torch.tensor(mine)).any(dim=1)
        assert torch.all(output[foreign] == 0), "a token without a local expert must contribute nothing"
        total += output
        pairs += computed
    assert pairs == tokens * top_k
    want = dense_moe(x_TH, weights, top_k, with_shared=False)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-6)


def test_slots_are_added_in_float32() -> None:
    """256 + 8 × 1 is 264, also in bf16; but bf16's spacing at 256 is 2, so added one by one it stays 256."""
    slots, one = 9, torch.ones(1, 1, dtype=torch.bfloat16)
    # silu(64) is 64 and the up projection 1/64: every expert's hidden value is exactly 1.
    w13 = torch.tensor([64.0, 1 / 64], dtype=torch.bfloat16).view(1, 2, 1).repeat(slots, 1, 1)
    w2 = torch.ones(slots, 1, 1, dtype=torch.bfloat16)
    w2[0] = 256
    output, _ = run(one, w13, w2, torch.ones(1, slots), torch.arange(slots).view(1, slots))
    assert output.dtype == torch.bfloat16
    assert output.item() == 264


def test_a_slot_is_weighted_in_float32() -> None:
    """256 × 1.003 - 256 is 0.768; in bf16, 1.003 itself is 1 and nothing is left."""
    w13 = torch.tensor([64.0, 1 / 64], dtype=torch.bfloat16).view(1, 2, 1).repeat(2, 1, 1)
    w2 = torch.tensor([256.0, -256.0], dtype=torch.bfloat16).view(2, 1, 1)
    weights = torch.tensor([[1.003, 1.0]])
    output, _ = run(torch.ones(1, 1, dtype=torch.bfloat16), w13, w2, weights, torch.tensor([[0, 1]]))
    assert output.item() == pytest.approx(0.768, rel=0.01)


def test_router_weight_on_the_input_is_not_applied_again() -> None:
    """vLLM has then scaled the tokens before the experts see them."""
    weights, x_TH, _, topk_ids = routed(5, 1)
    w13 = torch.cat([weights.w1_EIH, weights.w3_EIH], dim=1)
    half = torch.full((5, 1), 0.5)
    arguments = (x_TH, w13, weights.w2_EHI)
    unweighted, _ = run(*arguments, torch.ones(5, 1), topk_ids)
    on_input, _ = run(*arguments, half, topk_ids, apply_router_weight_on_input=True)
    on_output, _ = run(*arguments, half, topk_ids)
    torch.testing.assert_close(on_input, unweighted)
    torch.testing.assert_close(on_output, unweighted / 2)


def test_method_uses_these_experts_and_refuses_what_they_cannot_do() -> None:
    with set_current_vllm_config(VllmConfig()):
        assert CpuUnquantizedFusedMoEMethod(moe_config()).experts_cls is GroupedCpuExperts
        with pytest.raises(NotImplementedError, match=r"CPU experts cannot run this MoE layer: .*(?i:gelu)"):
            CpuUnquantizedFusedMoEMethod(moe_config(MoEActivation.GELU))
