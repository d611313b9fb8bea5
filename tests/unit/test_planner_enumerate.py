# SPDX-License-Identifier: Apache-2.0
"""All layouts of N devices: complete, each with a reason or a rank, and ranked by the stated cost."""

import pytest

from omni_ep.config import RunRequest
from omni_ep.errors import ConfigurationError
from omni_ep.layout import ParallelLayout
from omni_ep.layout_names import layout_flags, layout_name, parse_layout, parse_layouts
from omni_ep.planner import Settings, Workload, load_model, make_plan, precision_of
from omni_ep.planner.cost import Rates, cost_of, step_flops
from omni_ep.planner.diagram import draw
from omni_ep.planner.enumerate import Candidate, Dropped, enumerate_layouts
from tests.topologies import TOPOLOGIES

GIB = 2**30


def ranking(
    model: str = "hunyuan-image-3",
    devices: int = 8,
    *,
    memory: int | None = 80 * GIB,
    dtype: str = "bf16",
    rates: Rates | None = None,
) -> tuple[list[Candidate], list[Dropped]]:
    settings = Settings(
        model=load_model(model), precision=precision_of(dtype), workload=Workload(), device_memory=memory
    )
    return enumerate_layouts(settings, RunRequest(), devices, rates or Rates())


def test_every_layout_is_ranked_or_dropped_once() -> None:
    candidates, dropped = ranking()
    names = [each.name for each in (*candidates, *dropped)]
    assert len(names) == len(set(names))
    # 8 = 2^3 over six sizes: C(3 + 5, 5) = 56 ways, with EP and without.
    assert len(names) == 2 * 56


def test_candidates_fit_and_dropped_ones_say_why() -> None:
    candidates, dropped = ranking()
    assert all(candidate.plan.fits for candidate in candidates)
    assert all(candidate.plan.layout.world_size == 8 for candidate in candidates)
    reasons = {drop.name: drop.reason for drop in dropped}
    assert reasons["sp8"].startswith("needs 157.62 GiB per rank but a device has 80.00 GiB")
    assert reasons["pp2*cfg2*dp2"].startswith("--pipeline-parallel-size is 2")
    assert reasons["ring8+ep"].startswith("--ring-degree is 8")
    assert reasons["cfg8"].startswith("--cfg-parallel-size is 8")


def test_experts_that_cannot_be_divided_drop_ep_only() -> None:
    candidates, dropped = ranking(devices=3, memory=None)
    assert [candidate.name for candidate in candidates] == ["dp3"]
    reasons = {drop.name: drop.reason for drop in dropped}
    assert "64 experts cannot be divided equally among EP=3 ranks" in reasons["dp3+ep"]
    assert "32 attention heads" in reasons["sp3"]


def test_vision_tower_limits_tp() -> None:
    """16 heads and a width of 4304 = 16 x 269: 32 ranks cannot share the vision tower."""
    _, dropped = ranking(devices=32)
    reasons = {drop.name: drop.reason for drop in dropped}
    assert "the vision tower's num_attention_heads is 16" in reasons["tp32+ep"]


def test_best_first() -> None:
    candidates, _ = ranking()
    costs = [candidate.cost.seconds for candidate in candidates]
    assert costs == sorted(costs)


def test_order_of_the_published_measurement() -> None:
    """vLLM-Omni's recipes, 4 x H100, FP8, seconds per picture: tp2_cfg2 10.0, tp2_sp2 12.1, tp4 13.7."""
    candidates, _ = ranking(devices=4, dtype="fp8")
    order = [candidate.name for candidate in candidates]
    measured = ["tp2*cfg2", "tp2*sp2", "tp4"]
    assert [name for name in order if name in measured] == measured


def test_data_parallel_ranks_repeat_each_other() -> None:
    candidates, _ = ranking(devices=4, memory=None)
    by_name = {candidate.name: candidate.cost for candidate in candidates}
    assert by_name["dp4"].replication == pytest.approx(4)
    assert by_name["sp2*dp2+ep"].replication == pytest.approx(2, rel=1e-2)
    assert by_name["tp2*cfg2+ep"].replication == pytest.approx(1, rel=1e-2)


def test_cost_is_its_formula() -> None:
    settings = Settings(model=load_model("mixtral-8x7b"), precision=precision_of("bf16"), workload=Workload())
    rates = Rates(flops_per_s=1e12, bytes_per_s=1e9)
    plan = make_plan(settings, ParallelLayout(tp=2, dp=2), expert_parallel=True)
    cost = cost_of(plan, rates)
    wire = (plan.traffic.per_step["allgather_reducescatter"] or 0) + plan.traffic.attention_per_step
    assert cost.wire_s == wire / 1e9
    assert cost.compute_s == step_flops(plan, plan.layout, expert_parallel=True) / 1e12
    assert cost.seconds == cost.compute_s + cost.wire_s


def test_scarce_memory_doubles_the_cost() -> None:
    def cost(memory: int | None) -> float:
        settings = Settings(
            model=load_model("mixtral-8x7b"),
            precision=precision_of("bf16"),
            workload=Workload(),
            device_memory=memory,
        )
        plan = make_plan(settings, ParallelLayout(), expert_parallel=False)
        return cost_of(plan, Rates()).seconds

    settings = Settings(model=load_model("mixtral-8x7b"), precision=precision_of("bf16"), workload=Workload())
    total = make_plan(settings, ParallelLayout(), expert_parallel=False).total_bytes
    assert cost(total) == pytest.approx(2 * cost(None))
    assert cost(total * 10 // 9 + 10) == pytest.approx(cost(None))
    assert cost(total * 20 // 19) == pytest.approx(1.5 * cost(None))


def test_flops_of_a_token_are_two_per_active_parameter() -> None:
    """HunyuanImage-3 activates 13 billion parameters; attention scores come on top."""
    settings = Settings(
        model=load_model("hunyuan-image-3"),
        precision=precision_of("bf16"),
        workload=Workload(guidance=False, prompt_tokens=1, height=16, width=16),
    )
    plan = make_plan(settings, ParallelLayout(), expert_parallel=False)
    tokens = settings.workload.later_step(ParallelLayout()).total
    per_token = step_flops(plan, ParallelLayout(), expert_parallel=False) / tokens
    # 2.2 of the 13 billion are embeddings, vision tower and patch layers, which are not linear in tokens.
    assert per_token / 2 == pytest.approx(12.2e9, rel=0.02)


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name != "one rank"])
def test_names_of_the_tests_topologies(name: str) -> None:
    assert parse_layout(name) == TOPOLOGIES[name]


@pytest.mark.parametrize("name", ["1", "tp2", "tp2*sp4*cfg2+ep", "ring2*dp3", "pp2", "1+ep"])
def test_names_read_back(name: str) -> None:
    assert layout_name(RunRequest(**parse_layout(name))) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp2*tp2", "gives tp twice"),
        ("tp0", "has the piece 'tp0'"),
        ("tp", "has the piece 'tp'"),
        ("ep2", "has the piece 'ep2'"),
        ("tp2+tp4", "only \\+ep is known"),
        (" , ", "no layout was given"),
    ],
)
def test_malformed_names_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_layouts(text)


def test_flags_leave_out_what_is_default() -> None:
    assert layout_flags(parse_layout("tp2*sp4+ep")) == [
        *("--tensor-parallel-size", "2", "--ulysses-degree", "4", "--enable-expert-parallel")
    ]
    assert layout_flags({}) == []


def test_diagram_of_the_requirements_example() -> None:
    """TP=2, CFG=2, DP=4: one EP group of 16, eight TP groups of two."""
    lines = draw(ParallelLayout(tp=2, cfg=2, dp=4), num_experts=64, expert_parallel=True).splitlines()
    assert lines[0] == "one EP group of 16 ranks, 4 of 64 experts each"
    rows = [line for line in lines if "[" in line]
    assert len(rows) == 8
    assert rows[0] == "cfg 0 dp 0 [ rank 0: experts 0-3    | rank 1: experts 4-7    ]"
    assert rows[-1] == "cfg 1 dp 3 [ rank 14: experts 56-59 | rank 15: experts 60-63 ]"


def test_diagram_leaves_out_the_middle() -> None:
    text = draw(ParallelLayout(sp=4, dp=4), num_experts=64, expert_parallel=True)
    assert "... 8 more rows ..." in text
    assert "rank 15: experts 60-63" in text
