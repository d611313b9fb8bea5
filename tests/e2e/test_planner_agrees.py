# SPDX-License-Identifier: Apache-2.0
"""The plan against running ranks: parameters to the byte, traffic as counted around the collectives."""

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_ep.checkpoint import CheckpointSpec, make_checkpoint
from omni_ep.planner import Part, Plan, Settings, Workload, load_model, make_plan, precision_of
from omni_ep.planner.traffic import ALLGATHER, TP_WITHOUT_EP, attention_bytes
from tests.e2e.engines import ranks
from tests.topologies import TOPOLOGIES, run_request
from tests.workers import TINY

pytestmark = pytest.mark.engine

PROMPT_TOKENS = len("a red cube on a table")
"""The checkpoints' tokenizer makes one token of a byte."""

#: Nothing is as in the tiny checkpoint: heads, KV heads, experts, top-k, shared experts, VAE, patch layers.
OTHER = CheckpointSpec(
    num_layers=3,
    hidden_size=96,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    num_experts=12,
    top_k=3,
    moe_intermediate_size=48,
    num_shared_experts=2,
    patch_embed_hidden_dim=64,
    vae_block_channels=(32, 64, 64, 64, 64),
    vae_latent_channels=16,
    vae_layers_per_block=2,
)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planner") / "other"
    make_checkpoint(folder, OTHER)
    return folder


def _plan(model: Path, request: Any, *, height: int = 64, width: int = 64) -> Plan:
    settings = Settings(
        model=load_model(str(model)),
        precision=precision_of("bf16"),
        workload=Workload(height=height, width=width, prompt_tokens=PROMPT_TOKENS),
        on_cpu=True,
    )
    return make_plan(settings, request.layout, expert_parallel=request.enable_expert_parallel)


def _check_parameters(plan: Plan, memory: list[dict[str, int]]) -> None:
    planned = [
        (entry["rank"], entry["parameter_bytes"], entry["routed_experts_bytes"])
        for entry in plan.to_dict()["ranks"]
    ]
    assert planned == [(entry["rank"], entry["parameter_bytes"], entry["expert_bytes"]) for entry in memory]


def _check_traffic(plan: Plan, received: list[dict[str, list[list[int]]]]) -> None:
    """Every rank, step and layer on its own, not just their sums."""
    backend = ALLGATHER if plan.expert_parallel else TP_WITHOUT_EP
    geometry, work = plan.settings.model.geometry, plan.settings.workload
    assert len(received) == plan.layout.world_size
    for rank in received:
        first, *later = rank["mlp"]
        assert first == [plan.traffic.first_per_layer[backend]] * geometry.num_layers
        assert sum(first) == plan.traffic.first_per_step[backend]
        assert later
        for step in later:
            assert step == [plan.traffic.per_layer[backend]] * geometry.num_layers
            assert sum(step) == plan.traffic.per_step[backend]
        first, *later = rank["self_attn"]
        tokens = work.first_step(plan.layout)
        assert first == [attention_bytes(geometry, plan.layout, tokens, 2)] * geometry.num_layers
        assert [sum(step) for step in later] == [plan.traffic.attention_per_step] * len(later)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_plan_equals_reality(topology: str, other: Path) -> None:
    request = run_request(topology)
    with ranks(request, dtype=torch.bfloat16, worker_extension_cls="tests.e2e.wire.WireExtension") as live:
        _check_parameters(_plan(TINY, request), live.call("omni_ep_report")["memory"])
        for height, width in ((64, 64), (48, 80)):
            sampling = {
                "height": height,
                "width": width,
                "num_inference_steps": 3,
                "guidance_scale": 5.0,
                "seed": 42,
            }
            plan = _plan(TINY, request, height=height, width=width)
            _check_traffic(plan, live.call("received", sampling))

        plan = _plan(other, request)
        _check_parameters(plan, live.call("other_checkpoint", str(other))["memory"])
        sampling = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 5.0, "seed": 1}
        _check_traffic(plan, live.call("received", sampling))
    assert plan.parts[Part.VAE] > 0
