# SPDX-License-Identifier: Apache-2.0
"""Every expert has exactly one home, and an impossible division is refused with what would fit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ep.errors import ConfigurationError
from omni_ep.placement import ExpertPlacement


def test_linear_by_hand() -> None:
    placement = ExpertPlacement.linear(8, 4)
    assert placement.num_local == 2
    assert [list(placement.local_experts(rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placement.owner(5) == (2, 1)


@settings(deadline=None)
@given(ep_size=st.integers(1, 64), num_local=st.integers(1, 16))
def test_owner_inverts_local_experts(ep_size: int, num_local: int) -> None:
    placement = ExpertPlacement.linear(ep_size * num_local, ep_size)
    homes = [
        (expert, rank, slot)
        for rank in range(ep_size)
        for slot, expert in enumerate(placement.local_experts(rank))
    ]
    assert [expert for expert, _, _ in homes] == list(range(ep_size * num_local))
    assert all(placement.owner(expert) == (rank, slot) for expert, rank, slot in homes)


@pytest.mark.parametrize(
    ("experts", "ep", "text"),
    [
        (8, 3, "8 experts cannot be divided equally among EP=3 ranks; EP sizes that fit: 1, 2, 4, 8"),
        (
            8,
            16,
            "EP=16 is larger than the number of experts (8), so some ranks would hold none; "
            "EP sizes that fit: 1, 2, 4, 8",
        ),
        (0, 1, "at least one expert and one rank, got num_experts=0 and EP=1"),
        (8, 0, "at least one expert and one rank, got num_experts=8 and EP=0"),
    ],
)
def test_refusals(experts: int, ep: int, text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        ExpertPlacement.linear(experts, ep)
    assert text in str(error.value)


def test_outside_is_an_index_error() -> None:
    placement = ExpertPlacement.linear(8, 4)
    for number in (-1, 8):
        with pytest.raises(IndexError, match=f"expert {number} is not in 0..7"):
            placement.owner(number)
    for rank in (-1, 4):
        with pytest.raises(IndexError, match=f"EP rank {rank} is not in 0..3"):
            placement.local_experts(rank)
