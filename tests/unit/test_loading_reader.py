# SPDX-License-Identifier: Apache-2.0
"""The reader delivers the planned bytes and touches no others; completeness sees every gap."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from omni_ep.errors import ConfigurationError
from omni_ep.loading import RankRole, plan_loading, read_headers
from omni_ep.loading.completeness import LoadCounter, check_complete
from omni_ep.loading.plan import LoadingPlan
from omni_ep.loading.reader import PlannedReader, refuse_non_finite
from tests.unit.test_loading_plan import GEOMETRY, LAYER

EXPERTS = f"{LAYER}.mlp.experts"


def tensors() -> dict[str, torch.Tensor]:
    made = {
        f"{EXPERTS}.{expert}.{part}.weight": torch.randn(shape).bfloat16()
        for expert in range(4)
        for part, shape in (("gate_and_up_proj", (8, 8)), ("down_proj", (8, 4)))
    }
    made[f"{LAYER}.self_attn.qkv_proj.weight"] = torch.randn(16, 8).bfloat16()
    made["vae.scalar"] = torch.tensor(1.5)
    made["vae.count"] = torch.arange(5)
    return made


def plan_of(folder: Path, stored: dict[str, torch.Tensor], **tp: int) -> LoadingPlan:
    save_file(stored, folder / "a.safetensors")
    role = RankRole.linear(GEOMETRY, ep_rank=1, ep_size=2, **tp)
    return plan_loading(read_headers([folder / "a.safetensors"]), GEOMETRY, role)


@pytest.mark.parametrize("threads", [1, 4])
def test_reads_what_was_planned(threads: int, tmp_path: Path) -> None:
    stored = tensors()
    plan = plan_of(tmp_path, stored)
    seen: list[int] = []
    reader = PlannedReader(plan, threads=threads, progress=seen.append)
    read = dict(reader)
    assert sorted(read) == sorted(
        name for name in stored if ".experts.0" not in name and ".experts.1" not in name
    )
    for name, tensor in read.items():
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(tensor, stored[name])
    assert reader.bytes_read == sum(seen) == plan.bytes_needed


def test_reads_only_the_rows_of_its_tp_rank(tmp_path: Path) -> None:
    stored = tensors()
    name = f"{LAYER}.self_attn.qkv_proj.weight"
    reader = PlannedReader(plan_of(tmp_path, {name: stored[name]}, tp_rank=1, tp_size=2))
    [(_, tensor)] = list(reader)
    assert torch.equal(tensor[8:], stored[name][8:])
    assert reader.bytes_read == stored[name].nbytes // 2


def test_fused_experts_become_single_ones(tmp_path: Path) -> None:
    fused = torch.randn(4, 8, 8)
    read = dict(PlannedReader(plan_of(tmp_path, {f"{EXPERTS}.gate_and_up_proj": fused})))
    assert list(read) == [f"{EXPERTS}.{expert}.gate_and_up_proj.weight" for expert in (2, 3)]
    assert torch.equal(torch.stack(list(read.values())), fused[2:])


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "Inf")])
def test_nan_and_inf_are_refused_when_asked(value: float, kind: str, tmp_path: Path) -> None:
    stored = tensors()
    name = f"{EXPERTS}.3.down_proj.weight"
    stored[name][7, 3] = value
    plan = plan_of(tmp_path, stored)
    assert len(dict(PlannedReader(plan))) == len(plan.reads)
    text = rf"a.safetensors holds {kind} in {name}, finite numbers were expected"
    with pytest.raises(ConfigurationError, match=text):
        list(PlannedReader(plan, check_finite=True))
    with pytest.raises(ConfigurationError, match=f"folder holds {kind} in {name}"):
        list(refuse_non_finite(iter(stored.items()), "folder"))


def test_a_foreign_expert_is_not_checked(tmp_path: Path) -> None:
    stored = tensors()
    stored[f"{EXPERTS}.0.down_proj.weight"].fill_(float("nan"))
    assert list(PlannedReader(plan_of(tmp_path, stored), check_finite=True))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, tensors())
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[:-300])
    with pytest.raises(ConfigurationError, match=r"a.safetensors ends at byte \d+, \d+ more bytes of"):
        list(PlannedReader(plan, threads=4))


class Parameter:
    """Stands for a parameter whose weight loader takes what vLLM's take."""

    def __init__(self) -> None:
        self.weight_loader = lambda parameter, tensor, *arguments, **options: True


class PropertyParameter:
    """As vLLM's newer parameters (``vllm/model_executor/parameter.py:69``)."""

    def __init__(self) -> None:
        self._loader: Any = Parameter().weight_loader

    @property
    def weight_loader(self) -> Any:
        return self._loader

    @weight_loader.setter
    def weight_loader(self, loader: Any) -> None:
        self._loader = loader


W13, W2 = (
    "model.layers.0.mlp.experts.routed_experts.w13_weight",
    "model.layers.0.mlp.experts.routed_experts.w2_weight",
)


def load_all(skip: Any = None, twice: Any = None) -> tuple[LoadCounter, dict[str, Any]]:
    parameters: dict[str, Any] = {
        W13: Parameter(),
        W2: Parameter(),
        "x.gate_up_proj.weight": PropertyParameter(),
    }
    counter = LoadCounter()
    calls = [(W13, e, s) for e in (2, 3) for s in ("w1", "w3")] + [(W2, e, "w2") for e in (2, 3)]
    calls += [("x.gate_up_proj.weight", None, part) for part in (0, 1)]
    with counter.watching(parameters):
        for name, expert, shard in [call for call in calls if call != skip] + ([twice] if twice else []):
            load = parameters[name].weight_loader
            if expert is None:
                load(parameters[name], None, shard)
            else:
                load(parameters[name], None, name, shard_id=shard, expert_id=expert, return_success=True)
    return counter, parameters


def complete(plan: LoadingPlan, counter: LoadCounter, parameters: Any, loaded: Any = None) -> None:
    check_complete(
        plan,
        counter,
        experts={0: [2, 3]},
        parameters=parameters,
        loaded=parameters if loaded is None else loaded,
        where="folder",
    )


def test_a_complete_load_passes(tmp_path: Path) -> None:
    complete(plan_of(tmp_path, tensors()), *load_all())


@pytest.mark.parametrize(
    ("skip", "twice", "text"),
    [
        (
            (W13, 3, "w1"),
            None,
            r"layer 0, expert 3: the gate half of .*experts.3.gate_and_up_proj.weight \(in ",
        ),
        ((W13, 2, "w3"), None, r"layer 0, expert 2: the up half of .*a.safetensors\) was not loaded"),
        ((W2, 2, "w2"), None, r"layer 0, expert 2: model.layers.0.mlp.experts.2.down_proj.weight"),
        (None, (W2, 3, "w2"), r"expert 3: .*down_proj.weight .* was loaded 2 times, once was expected"),
        (("x.gate_up_proj.weight", None, 1), None, r"part 1 of x.gate_up_proj.weight .* was not loaded"),
        (None, ("x.gate_up_proj.weight", None, 0), r"part 0 of x.gate_up_proj.weight .* loaded 2 times"),
    ],
)
def test_gaps_and_doubles_are_named(skip: Any, twice: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=text):
        complete(plan_of(tmp_path, tensors()), *load_all(skip, twice))


def test_a_parameter_that_got_nothing(tmp_path: Path) -> None:
    counter, parameters = load_all()
    with pytest.raises(
        ConfigurationError, match=r"the parameter x.gate_up_proj.weight \(in folder\) was not"
    ):
        complete(plan_of(tmp_path, tensors()), counter, parameters, loaded=[W13, W2])


def test_weight_loaders_are_put_back() -> None:
    parameter = Parameter()
    before = parameter.weight_loader
    with LoadCounter().watching({"a": parameter, "b": torch.nn.Parameter(torch.zeros(1))}):
        assert parameter.weight_loader is not before
    assert parameter.weight_loader is before
