# SPDX-License-Identifier: Apache-2.0
"""Ranks, coordinates and groups: examples by hand, properties over many layouts, and vLLM-Omni's own
generator."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ep.errors import ConfigurationError
from omni_ep.layout import AXES, Coordinates, ParallelLayout

sizes = st.integers(1, 4)
layouts = st.builds(ParallelLayout, tp=sizes, sp=sizes, pp=st.integers(1, 3), cfg=st.integers(1, 2), dp=sizes)


def test_requirement_example() -> None:
    """TP=2, CFG=2, DP=4: one EP group of 16, attention tensor-parallel inside 8 groups of 2."""
    layout = ParallelLayout(tp=2, sp=1, cfg=2, dp=4)
    assert (layout.world_size, layout.ep_size) == (16, 16)
    assert layout.ep_groups() == [list(range(16))]
    assert layout.tp_groups() == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert layout.dispatch_groups() == [list(range(0, 16, 2)), list(range(1, 16, 2))]


def test_pipeline_stages_do_not_mix() -> None:
    layout = ParallelLayout(tp=2, pp=2, cfg=2)
    assert layout.ep_size == 4
    assert layout.ep_groups() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert layout.dispatch_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [layout.stage(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.ep_rank(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [layout.dispatch_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_order_is_tp_sp_pp_cfg_dp_with_tp_fastest() -> None:
    layout = ParallelLayout(tp=2, sp=3, pp=2, cfg=2, dp=2)
    assert layout.coordinates(1) == Coordinates(tp=1, sp=0, pp=0, cfg=0, dp=0)
    assert layout.coordinates(2) == Coordinates(tp=0, sp=1, pp=0, cfg=0, dp=0)
    assert layout.coordinates(6) == Coordinates(tp=0, sp=0, pp=1, cfg=0, dp=0)
    assert layout.coordinates(12) == Coordinates(tp=0, sp=0, pp=0, cfg=1, dp=0)
    assert layout.coordinates(24) == Coordinates(tp=0, sp=0, pp=0, cfg=0, dp=1)


@settings(deadline=None)
@given(layouts)
def test_coordinates_round_trip(layout: ParallelLayout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))
    assert len(set(places)) == layout.world_size


@settings(deadline=None)
@given(layouts)
def test_every_rank_is_in_exactly_one_ep_group_of_its_stage(layout: ParallelLayout) -> None:
    groups = layout.ep_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert len(groups) == layout.pp
    for stage, group in enumerate(groups):
        assert len(group) == layout.ep_size
        assert {layout.stage(rank) for rank in group} == {stage}
        assert [layout.ep_rank(rank) for rank in group] == list(range(layout.ep_size))


@settings(deadline=None)
@given(layouts)
def test_ep_rank_is_vllms_after_folding_sp_into_dp(layout: ParallelLayout) -> None:
    """vLLM computes ``dp_rank * tp_size + tp_rank`` with its DP group being the dispatch group."""
    for group in layout.dispatch_groups():
        for dp_rank, rank in enumerate(group):
            assert layout.dispatch_rank(rank) == dp_rank
            assert layout.ep_rank(rank) == dp_rank * layout.tp + layout.coordinates(rank).tp


@settings(deadline=None)
@given(layouts)
def test_dispatch_groups_share_stage_and_tp(layout: ParallelLayout) -> None:
    groups = layout.dispatch_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        assert len(group) == layout.sp * layout.cfg * layout.dp
        assert len({(layout.stage(rank), layout.coordinates(rank).tp) for rank in group}) == 1


@pytest.fixture(scope="module")
def rank_generator() -> Any:
    """vLLM-Omni's own class; its import takes long, so only the tests that need it pay."""
    from vllm_omni.diffusion.distributed.parallel_state import RankGenerator

    return RankGenerator


@pytest.mark.parametrize(
    "axes", ["tp-sp-cfg-dp", "sp-cfg-dp", "tp", "sp", "pp", "cfg", "dp", "cfg-dp", "tp-sp-pp-cfg-dp"]
)
@settings(deadline=None, max_examples=50)
@given(layout=layouts)
def test_groups_equal_vllm_omnis(rank_generator: Any, axes: str, layout: ParallelLayout) -> None:
    generator = rank_generator(
        layout.tp, layout.sp, layout.pp, layout.cfg, layout.dp, order="tp-sp-pp-cfg-dp"
    )
    assert layout.groups(*axes.split("-")) == generator.get_ranks(axes)
    assert layout.groups(*reversed(axes.split("-"))) == generator.get_ranks(axes)


def test_large_worlds_need_no_devices() -> None:
    layout = ParallelLayout(tp=8, sp=4, cfg=2, dp=64)
    assert layout.world_size == layout.ep_size == 4096
    assert layout.ep_rank(4095) == 4095
    assert len(layout.dispatch_groups()) == 8


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
def test_sizes_must_be_whole_and_positive(axis: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as error:
        ParallelLayout(**{axis: value})
    assert f"the {axis} size of a parallel layout must be a whole number of at least 1, got {value!r}" in str(
        error.value
    )


def test_from_flags() -> None:
    layout = ParallelLayout.from_flags(
        tensor_parallel_size=2,
        ulysses_degree=3,
        ring_degree=4,
        pipeline_parallel_size=5,
        cfg_parallel_size=2,
        data_parallel_size=7,
    )
    assert layout == ParallelLayout(tp=2, sp=12, pp=5, cfg=2, dp=7)


def test_from_flags_names_the_flag() -> None:
    """Two negative degrees would multiply to a size that looks fine."""
    with pytest.raises(ConfigurationError, match=r"--ulysses-degree must be .* at least 1, got -2"):
        ParallelLayout.from_flags(ulysses_degree=-2, ring_degree=-2)


def test_describe() -> None:
    assert ParallelLayout(tp=2, cfg=2).describe() == "EP=4 = TP 2 x SP 1 x CFG 2 x DP 1 (1 pipeline stage)"
    assert ParallelLayout(sp=2, pp=2).describe() == "EP=2 = TP 1 x SP 2 x CFG 1 x DP 1 (2 pipeline stages)"


def test_table() -> None:
    assert ParallelLayout(tp=2, pp=2).table(num_experts=64).splitlines() == [
        "rank  tp  sp  pp  cfg  dp  EP group  EP rank  dispatch group  experts",
        "   0   0   0   0    0   0         0        0               0     0-31",
        "   1   1   0   0    0   0         0        1               1    32-63",
        "   2   0   0   1    0   0         1        0               2     0-31",
        "   3   1   0   1    0   0         1        1               3    32-63",
    ]
    assert ParallelLayout().table().splitlines()[0].endswith("dispatch group")
    assert ParallelLayout(dp=2).table(num_experts=2).splitlines()[-1].split()[-1] == "1"


@settings(deadline=None)
@given(layouts)
def test_table_names_groups_by_their_index(layout: ParallelLayout) -> None:
    rows = [line.split() for line in layout.table().splitlines()[1:] if not line.startswith("...")]
    for row in rows:
        rank, ep_group, dispatch_group = int(row[0]), int(row[6]), int(row[8])
        assert rank in layout.ep_groups()[ep_group]
        assert rank in layout.dispatch_groups()[dispatch_group]


def test_long_tables_leave_out_the_middle() -> None:
    lines = ParallelLayout(dp=40).table().splitlines()
    assert [line.split()[0] for line in lines[1:17]] == [str(rank) for rank in range(16)]
    assert lines[17] == "... 8 more ranks ..."
    assert [line.split()[0] for line in lines[18:]] == [str(rank) for rank in range(24, 40)]
    assert len(ParallelLayout(dp=32).table().splitlines()) == 33


def test_table_refuses_experts_that_do_not_fit() -> None:
    with pytest.raises(ConfigurationError, match="8 experts cannot be divided equally among EP=3"):
        ParallelLayout(dp=3).table(num_experts=8)


def test_to_dict_survives_json() -> None:
    content = json.loads(json.dumps(ParallelLayout(tp=2, cfg=2).to_dict()))
    assert {axis: content[axis] for axis in AXES} == {"tp": 2, "sp": 1, "pp": 1, "cfg": 2, "dp": 1}
    assert (content["world_size"], content["ep_size"]) == (4, 4)
    assert content["ep_groups"] == [[0, 1, 2, 3]]
    assert content["dispatch_groups"] == [[0, 2], [1, 3]]
    assert content["tp_groups"] == [[0, 1], [2, 3]]
    assert content["ranks"][3] == {"rank": 3, "coordinates": {"tp": 1, "sp": 0, "pp": 0, "cfg": 1, "dp": 0}}


def test_outside_is_refused() -> None:
    layout = ParallelLayout(tp=2)
    for rank in (-1, 2):
        with pytest.raises(IndexError, match=f"rank {rank} is not in 0..1"):
            layout.coordinates(rank)
    with pytest.raises(IndexError, match=r"sp=1 is not in 0\.\.0"):
        layout.rank(Coordinates(tp=0, sp=1, pp=0, cfg=0, dp=0))
    with pytest.raises(ValueError, match="unknown parallel axes"):
        layout.groups("ep")
