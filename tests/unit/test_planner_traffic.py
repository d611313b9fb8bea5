# SPDX-License-Identifier: Apache-2.0
"""Bytes on the wire, against countings that do not use the planner's formulas."""

import itertools
from fractions import Fraction

import pytest

from omni_ep.layout import ParallelLayout
from omni_ep.planner import Workload
from omni_ep.planner.traffic import (
    MoELayer,
    all_reduce_bytes,
    all_to_all_bytes,
    allgather_bytes,
    chance_of_visit,
    layer_traffic,
)

LAYER = MoELayer(hidden_size=16, num_experts=6, top_k=2, activation_bytes=2)


def ring_all_reduce_by_simulation(size: int, ranks: int) -> int:
    """Bytes that rank 0 receives when chunks travel round the ring, twice."""
    chunk = size // ranks
    return sum(chunk for _phase in range(2) for _step in range(ranks - 1))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_all_reduce_is_a_ring(ranks: int) -> None:
    assert all_reduce_bytes(240 * ranks, ranks) == ring_all_reduce_by_simulation(240 * ranks, ranks)


def test_allgather_message_by_message() -> None:
    counts = [7, 3, 0, 10]
    for rank, mine in enumerate(counts):
        received = 0
        for other, tokens in enumerate(counts):
            if other != rank:
                received += tokens * (16 * 2 + 2 * 4 + 2 * 4)  # activation, weights, ids
                received += mine * 16 * 2  # that rank's partial sums of my tokens
        assert allgather_bytes(LAYER, counts, rank, tp=1) == received
        reduced = received + all_reduce_bytes(mine * 32, 2)
        assert allgather_bytes(LAYER, counts, rank, tp=2) == reduced


@pytest.mark.parametrize("local", [0, 1, 2, 3, 5, 6])
def test_chance_of_visit_over_every_routing(local: int) -> None:
    routings = list(itertools.combinations(range(6), 2))
    visits = sum(any(expert < local for expert in routing) for routing in routings)
    assert chance_of_visit(LAYER, local) == Fraction(visits, len(routings))


def test_all_to_all_averaged_over_every_routing() -> None:
    """One token per routing on each of three ranks: what rank 0 receives is then no expectation but exact."""
    ranks, per_rank = 3, 2
    routings = list(itertools.combinations(range(6), 2))
    received = 2 * 4 * (ranks - 1)  # token counts, there and back
    for other in range(1, ranks):
        for routing in routings:
            if any(expert // per_rank == 0 for expert in routing):
                received += LAYER.token_bytes + LAYER.top_k * 8  # a token of `other` reaches rank 0
            if any(expert // per_rank == other for expert in routing):
                received += LAYER.token_bytes  # `other` returns its sum for a token of rank 0
    assert all_to_all_bytes(LAYER, len(routings), ranks, ep_size=3, tp=1) == received


def test_all_to_all_never_moves_more_than_allgather_and_counts() -> None:
    for tp, dispatch in itertools.product((1, 2), (1, 2, 3)):
        if 6 % (tp * dispatch) == 0:
            moved = all_to_all_bytes(LAYER, 100, dispatch, ep_size=tp * dispatch, tp=tp)
            assert moved - 8 * (dispatch - 1) <= allgather_bytes(LAYER, [100] * dispatch, 0, tp)


def test_one_rank_is_silent() -> None:
    assert set(layer_traffic(LAYER, ParallelLayout(), 100).values()) == {0}


def test_without_tp_only_ep_talks() -> None:
    traffic = layer_traffic(LAYER, ParallelLayout(cfg=2), 10)
    assert traffic["tp_without_ep"] == 0
    assert traffic["allgather_reducescatter"] == 10 * (32 + 16) + 10 * 32


def test_impossible_ep_has_no_figure() -> None:
    traffic = layer_traffic(LAYER, ParallelLayout(tp=4), 10, fits_ep=False)
    assert (traffic["allgather_reducescatter"], traffic["all_to_all"]) == (None, None)
    assert traffic["tp_without_ep"] == 2 * 3 * 320 // 4


@pytest.mark.parametrize(
    ("sizes", "first", "later"),
    [
        ({}, 2 * (25 + 18), 2 * 17),
        ({"tp": 2}, 2 * (25 + 18), 2 * 17),
        ({"cfg": 2}, 25 + 18, 17),
        ({"sp": 2}, 2 * (25 + 9), 2 * 9),
        ({"cfg": 2, "sp": 2}, 25 + 9, 9),
        ({"sp": 4}, 2 * (25 + 5), 2 * 5),
        ({"dp": 2}, 2 * (25 + 18), 2 * 17),
    ],
)
def test_tokens_of_a_rank(sizes: dict[str, int], first: int, later: int) -> None:
    """64x64 pixels are 16 tokens; 21 letters of prompt; as logged from running ranks."""
    work, layout = Workload(height=64, width=64, prompt_tokens=21), ParallelLayout(**sizes)
    assert work.first_step(layout).total == first
    assert work.later_step(layout).total == later


def test_without_guidance_there_is_one_sequence() -> None:
    work = Workload(height=64, width=64, prompt_tokens=21, guidance=False, batch=3)
    assert work.later_step(ParallelLayout(cfg=2)).total == 3 * 17
    assert work.later_step(ParallelLayout()).total == 3 * 17
