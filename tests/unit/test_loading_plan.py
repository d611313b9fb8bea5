# SPDX-License-Identifier: Apache-2.0
"""What a rank reads, against tables derived by hand."""

from math import prod
from pathlib import Path
from typing import Any

import pytest

from omni_ep.errors import ConfigurationError
from omni_ep.geometry import MoEGeometry
from omni_ep.loading import Checkpoint, RankRole, TensorHeader, plan_loading

#: 4 query heads over 2 KV heads of width 2: qkv rows are q0 q1 k0 v0 q2 q3 k1 v1, two rows each.
GEOMETRY = MoEGeometry(
    num_layers=1,
    moe_layers=(0,),
    num_experts=4,
    top_k=(2,),
    hidden_size=8,
    intermediate_sizes=(4,),
    num_shared_experts=(1,),
    shared_intermediate_size=(4,),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
)
LAYER = "model.layers.0"


def checkpoint(**shapes: tuple[int, ...]) -> Checkpoint:
    """BF16 tensors in one file, by name with ``/`` for dots."""
    tensors: dict[str, TensorHeader] = {}
    offset = 100
    for key, shape in shapes.items():
        name = key.replace("/", ".")
        tensors[name] = TensorHeader(
            name=name, file=Path("a"), dtype="BF16", shape=shape, offset=offset, nbytes=2 * prod(shape)
        )
        offset += 2 * prod(shape)
    return Checkpoint(files=(Path("a"),), tensors=tensors, header_bytes=100)


def role(ep_rank: int = 0, ep_size: int = 2, **tp: int) -> RankRole:
    return RankRole.linear(GEOMETRY, ep_rank=ep_rank, ep_size=ep_size, **tp)


def test_foreign_experts_are_skipped_whole() -> None:
    names = {f"{LAYER}.mlp.experts.{expert}.down_proj.weight": (8, 4) for expert in range(4)}
    plan = plan_loading(checkpoint(**names), GEOMETRY, role(ep_rank=1))
    assert [(read.name, read.offset, read.ranges) for read in plan.reads] == [
        (f"{LAYER}.mlp.experts.2.down_proj.weight", 228, ((0, 64),)),
        (f"{LAYER}.mlp.experts.3.down_proj.weight", 292, ((0, 64),)),
    ]
    assert (plan.bytes_needed, plan.bytes_skipped) == (128, 128)


def test_any_placement_is_followed() -> None:
    names = {f"{LAYER}.mlp.experts.{expert}.down_proj.weight": (8, 4) for expert in range(4)}
    plan = plan_loading(checkpoint(**names), GEOMETRY, RankRole(experts={0: [3, 0]}))
    assert sorted(plan.read_by_name) == [f"{LAYER}.mlp.experts.{e}.down_proj.weight" for e in (0, 3)]


@pytest.mark.parametrize("leaf", ["gate_and_up_proj", "gate_and_up_proj.weight"])
def test_fused_experts_are_read_by_slice(leaf: str) -> None:
    plan = plan_loading(checkpoint(**{f"{LAYER}.mlp.experts.{leaf}": (4, 8, 8)}), GEOMETRY, role(ep_rank=1))
    # One expert is 8 x 8 x 2 = 128 bytes; experts 2 and 3 begin 256 and 384 bytes into the tensor.
    assert [(read.name, read.offset, read.shape, read.ranges) for read in plan.reads] == [
        (f"{LAYER}.mlp.experts.2.gate_and_up_proj.weight", 356, (8, 8), ((0, 128),)),
        (f"{LAYER}.mlp.experts.3.gate_and_up_proj.weight", 484, (8, 8), ((0, 128),)),
    ]
    assert (plan.bytes_needed, plan.bytes_skipped) == (256, 256)


def test_small_scales_of_every_expert_are_kept() -> None:
    names = {
        f"{LAYER}.mlp.experts.{expert}.down_proj.{leaf}": shape
        for expert in range(4)
        for leaf, shape in (("weight", (8, 4)), ("weight_scale", (8,)), ("block_scale", (40_000,)))
    }
    names[f"{LAYER}.mlp.experts.down_proj.input_scale"] = (4, 1)
    plan = plan_loading(checkpoint(**names), GEOMETRY, role(ep_rank=0))
    by_leaf: dict[str, list[int]] = {}
    for name in plan.read_by_name:
        *_, expert, _, leaf = name.split(".")
        by_leaf.setdefault(leaf, []).append(int(expert))
    assert {leaf: sorted(found) for leaf, found in by_leaf.items()} == {
        "weight": [0, 1],
        "weight_scale": [0, 1, 2, 3],
        "block_scale": [0, 1],
        "input_scale": [0, 1, 2, 3],
    }


@pytest.mark.parametrize(
    ("name", "shape", "tp_size", "rows"),
    [
        # Rows by hand, one list of (start, stop) per TP rank.
        ("wte/weight", (192, 8), 2, [[(0, 96)], [(96, 192)]]),
        ("wte/weight", (190, 8), 3, [[(0, 64)], [(64, 128)], [(128, 190)]]),
        ("layers/0/self_attn/qkv_proj/weight", (16, 8), 2, [[(0, 8)], [(8, 16)]]),
        # Four ranks share two KV heads: one query head each, and the head it belongs to.
        (
            "layers/0/self_attn/qkv_proj/weight",
            (16, 8),
            4,
            [[(0, 2), (4, 8)], [(2, 8)], [(8, 10), (12, 16)], [(10, 16)]],
        ),
        ("layers/0/mlp/shared_mlp/gate_and_up_proj/weight", (8, 8), 2, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        ("layers/0/mlp/shared_mlp/down_proj/weight", (8, 4), 2, [[(0, 8)], [(0, 8)]]),
        ("layers/0/self_attn/o_proj/weight", (8, 8), 2, [[(0, 8)], [(0, 8)]]),
        ("layers/0/mlp/gate/wg/weight", (4, 8), 2, [[(0, 4)], [(0, 4)]]),
    ],
)
def test_rows_of_a_tp_rank(
    name: str, shape: tuple[int, ...], tp_size: int, rows: list[list[tuple[int, int]]]
) -> None:
    held = checkpoint(**{f"model/{name}": shape})
    for tp_rank, expected in enumerate(rows):
        plan = plan_loading(held, GEOMETRY, role(tp_rank=tp_rank, tp_size=tp_size))
        [read] = plan.reads
        row_bytes = 2 * shape[1]
        assert read.shape == shape
        assert [(start / row_bytes, stop / row_bytes) for start, stop in read.ranges] == expected
    whole = plan_loading(held, GEOMETRY, role(tp_rank=0, tp_size=tp_size), split_dense=False)
    assert whole.bytes_needed == held.nbytes


def test_what_nobody_asks_for_is_not_read() -> None:
    held: dict[str, Any] = {
        "model/layers/1/input_layernorm/weight": (8,),
        "model/layers/0/mlp/experts/4/down_proj/weight": (8, 4),
        "vae/extra": (8,),
        "vae/kept": (8,),
    }
    plan = plan_loading(checkpoint(**held), GEOMETRY, role(), has_home=lambda name: name != "vae.extra")
    assert [read.name for read in plan.reads] == ["vae.kept"]
    assert plan.unasked == tuple(sorted(name.replace("/", ".") for name in held if name != "vae/kept"))
    assert plan.bytes_needed + plan.bytes_skipped == checkpoint(**held).nbytes


@pytest.mark.parametrize("shape", [(), (3, 8), (0, 3)])
def test_a_tensor_of_all_experts_has_a_row_for_each(shape: tuple[int, ...]) -> None:
    """Rows beyond its end would be the next tensor's bytes."""
    held = checkpoint(**{f"{LAYER}.mlp.experts.down_proj.input_scale": shape})
    with pytest.raises(ConfigurationError, match=r"input_scale with shape \[.*one row for each of 4 experts"):
        plan_loading(held, GEOMETRY, role())


def test_large_tensors_come_first_then_file_order() -> None:
    held = checkpoint(a=(4,), big=(40 * 2**20,), b=(4,), bigger=(80 * 2**20,))
    assert [read.name for read in plan_loading(held, GEOMETRY, role()).reads] == ["bigger", "big", "a", "b"]


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_ranks_together_read_every_expert_once(ep_size: int) -> None:
    names = {f"{LAYER}.mlp.experts.{expert}.down_proj.weight": (8, 4) for expert in range(4)}
    held = checkpoint(**names)
    read = [
        name
        for ep_rank in range(ep_size)
        for name in plan_loading(held, GEOMETRY, role(ep_rank=ep_rank, ep_size=ep_size)).read_by_name
    ]
    assert sorted(read) == sorted(names)
