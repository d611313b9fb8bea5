# SPDX-License-Identifier: Apache-2.0
"""Tensors read straight into parameters: same bytes, nothing doubled, bounded buffers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_ep.errors import ConfigurationError
from omni_ep.loading import reader as reader_module
from omni_ep.loading.placement import Destination, Placement
from omni_ep.loading.plan import LoadingPlan
from omni_ep.loading.reader import PlannedReader
from omni_ep.models.hunyuan_image3.placing import expert_placement, large_placement
from tests.unit.test_loading_reader import EXPERTS, plan_of, tensors

FUSED = f"{EXPERTS}.3.gate_and_up_proj.weight"
PLACE = "model.layers.0.mlp.experts.routed_experts"


def experts_module(dtype: torch.dtype = torch.bfloat16, tp_size: int = 1) -> Any:
    """Two local experts, global 2 and 3, in vLLM's layout."""
    return SimpleNamespace(
        w13_weight=torch.nn.Parameter(torch.zeros(2, 8, 8, dtype=dtype)),
        w2_weight=torch.nn.Parameter(torch.zeros(2, 8, 4, dtype=dtype)),
        moe_config=SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=tp_size)),
        expert_map_manager=SimpleNamespace(map_global_to_local=lambda expert: expert - 2),
    )


def placements_of(plan: LoadingPlan, module: Any) -> dict[str, Placement]:
    """Those of all experts' tensors."""
    placements = {}
    for read in plan.reads:
        if ".experts." in read.name:
            expert, leaf = read.name.split(".experts.")[1].split(".", 1)
            placement = expert_placement(read, int(expert), leaf, PLACE, module)
            assert placement is not None
            placements[read.name] = placement
    return placements


def test_experts_go_straight_to_their_slots(tmp_path: Path) -> None:
    stored, module = tensors(), experts_module()
    plan = plan_of(tmp_path, stored)
    placements = placements_of(plan, module)
    placed: list[Placement] = []
    reader = PlannedReader(plan, threads=2, placements=placements, placed=placed.append)
    handed_out = dict(reader)
    assert not handed_out.keys() & placements.keys()
    assert len(handed_out) + len(placements) == len(plan.reads)
    assert reader.bytes_read == plan.bytes_needed
    for slot, expert in enumerate((2, 3)):
        up, gate = stored[f"{EXPERTS}.{expert}.gate_and_up_proj.weight"].chunk(2)
        assert torch.equal(module.w13_weight[slot], torch.cat([gate, up]))
        assert torch.equal(module.w2_weight[slot], stored[f"{EXPERTS}.{expert}.down_proj.weight"])
    calls = [call for placement in placed for call in placement.loads]
    assert sorted(calls) == sorted(
        [(f"{PLACE}.w13_weight", e, s) for e in (2, 3) for s in ("w1", "w3")]
        + [(f"{PLACE}.w2_weight", e, "w2") for e in (2, 3)]
    )


@pytest.mark.parametrize("module", [experts_module(torch.float32), experts_module(tp_size=2)])
def test_what_does_not_fit_byte_by_byte_stays_with_the_weight_loader(module: Any, tmp_path: Path) -> None:
    read = plan_of(tmp_path, tensors()).read_by_name[FUSED]
    assert expert_placement(read, 3, "gate_and_up_proj.weight", PLACE, module) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_embedding_goes_in_pieces_and_pads_with_zeros(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_BOUNCE_BYTES", 64)
    stored = {"model.wte.weight": torch.randn(100, 8).bfloat16()}
    plan = plan_of(tmp_path, stored, tp_rank=1, tp_size=2)
    parameter = torch.nn.Parameter(torch.ones(64, 8, dtype=dtype), requires_grad=False)
    placement = large_placement(plan.reads[0], {"model.embed_tokens.weight": parameter})
    assert placement is not None
    assert list(PlannedReader(plan, placements={"model.wte.weight": placement})) == []
    assert torch.equal(parameter[:36], stored["model.wte.weight"][64:].to(dtype))
    assert not parameter[36:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_destination_fills_its_own_elements_only(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_BOUNCE_BYTES", 48)
    stored = tensors()
    target = torch.zeros(3, 8, 8, dtype=dtype)
    halves = (Destination(0, 64, target, first=96), Destination(64, 128, target, first=64))
    placements = {FUSED: Placement(parts=halves, loads=())}
    list(PlannedReader(plan_of(tmp_path, stored), placements=placements))
    up, gate = stored[FUSED].chunk(2)
    assert torch.equal(target[1], torch.cat([gate, up]).to(dtype))
    assert not target[0].any()
    assert not target[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_is_refused_in_place_too(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = tensors()
    stored[FUSED][7, 7] = float("nan")
    plan = plan_of(tmp_path, stored)
    target = torch.zeros(8, 8, dtype=dtype)
    whole = Destination(start=0, stop=128, target=target)
    reader = PlannedReader(plan, check_finite=True, placements={FUSED: Placement(parts=(whole,), loads=())})
    with pytest.raises(ConfigurationError, match=f"holds NaN in {FUSED}"):
        list(reader)


def test_a_file_that_ends_while_it_is_read_in_place(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, tensors())
    whole = Destination(start=0, stop=128, target=torch.zeros(8, 8, dtype=torch.bfloat16))
    counted: list[Placement] = []
    reader = PlannedReader(
        plan, placements={FUSED: Placement(parts=(whole,), loads=())}, placed=counted.append
    )
    handed_out = iter(reader)
    next(handed_out)
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"a.safetensors ends at byte"):
        list(handed_out)
    assert counted == []
