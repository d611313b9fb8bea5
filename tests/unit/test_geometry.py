# SPDX-License-Identifier: Apache-2.0
"""Configs of several model families, as their config.json spells them, give the same few numbers."""

from typing import Any

import pytest

from omni_ep.errors import ConfigurationError
from omni_ep.geometry import MoEGeometry

BASE = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 100}
MOE = {**BASE, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def hunyuan(**changes: Any) -> dict[str, Any]:
    """HunyuanImage-3.0's own numbers."""
    config = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "intermediate_size": 3072,
        "num_experts": 64,
        "moe_topk": [8] * 32,
        "moe_intermediate_size": [3072] * 32,
        "num_shared_expert": [1] * 32,
        "use_mixed_mlp_moe": True,
        "moe_layer_num_skipped": 0,
    }
    return config | changes


def test_hunyuan_image3() -> None:
    geometry = MoEGeometry.from_config(hunyuan())
    assert geometry.is_moe
    assert geometry.moe_layers == tuple(range(32))
    assert (geometry.num_experts, geometry.top_k[0], geometry.hidden_size) == (64, 8, 4096)
    assert (geometry.num_shared_experts[31], geometry.shared_intermediate_size[31]) == (1, 3072)
    assert (geometry.num_attention_heads, geometry.num_key_value_heads, geometry.head_dim) == (32, 8, 128)
    assert geometry.expert_parameter_count == (37_748_736,) * 32
    # 77.3 billion, the routed experts' share that the model card gives.
    assert geometry.routed_parameters == 77_309_411_328


def test_shared_experts_follow_hunyuans_switch() -> None:
    two = MoEGeometry.from_config(hunyuan(num_shared_expert=2, intermediate_size=1000))
    assert two.shared_intermediate_size == (2000,) * 32
    off = MoEGeometry.from_config(hunyuan(use_mixed_mlp_moe=False))
    assert off.num_shared_experts == off.shared_intermediate_size == (0,) * 32


def test_qwen_moe_expert_bytes() -> None:
    """256 experts of 2048 x 512 in 30 layers: 45 GiB in fp16, 11.25 GiB on each of 4 ranks."""
    config = {
        "num_hidden_layers": 30,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    geometry = MoEGeometry.from_config(config)
    assert geometry.routed_parameters * 2 / 4 == 11.25 * 2**30
    assert geometry.num_shared_experts == (1,) * 30
    assert geometry.shared_intermediate_size == (512,) * 30


def test_deepseek_leaves_its_first_layers_dense() -> None:
    geometry = MoEGeometry.from_config(
        {**MOE, "n_routed_experts": 16, "first_k_dense_replace": 1, "n_shared_experts": 2}
    )
    assert geometry.moe_layers == (1, 2, 3)
    assert geometry.top_k == (2, 2, 2)
    assert geometry.shared_intermediate_size == (64, 64, 64)
    assert geometry.routed_parameters == 16 * 3 * (3 * 64 * 32)


def test_per_layer_lists_are_read_at_the_moe_layers() -> None:
    geometry = MoEGeometry.from_config(
        hunyuan(
            num_hidden_layers=3,
            moe_layer_num_skipped=1,
            moe_topk=[9, 1, 2],
            moe_intermediate_size=[7, 8, 9],
            num_shared_expert=[9, 0, 1],
        )
    )
    assert geometry.moe_layers == (1, 2)
    assert geometry.top_k == (1, 2)
    assert geometry.intermediate_sizes == (8, 9)
    assert geometry.num_shared_experts == (0, 1)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"moe_layer_freq": 2}, (0, 2)),
        ({"moe_layer_freq": [0, 1, 1, 0]}, (1, 2)),
    ],
)
def test_single_dense_layers(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert MoEGeometry.from_config({**MOE, "num_experts": 8, **changes}).moe_layers == layers


@pytest.mark.parametrize(
    "key", ["num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts"]
)
@pytest.mark.parametrize("value", [8, [8, 8, 8, 8]])
def test_expert_count_keys(key: str, value: Any) -> None:
    geometry = MoEGeometry.from_config({**MOE, key: value})
    assert (geometry.num_experts, geometry.moe_layers) == (8, (0, 1, 2, 3))


@pytest.mark.parametrize(
    "key", ["moe_topk", "num_experts_per_tok", "moe_top_k", "top_k", "num_activated_experts"]
)
def test_top_k_keys(key: str) -> None:
    geometry = MoEGeometry.from_config({**BASE, "num_experts": 8, key: 3})
    assert geometry.top_k == (3, 3, 3, 3)
    assert geometry.intermediate_sizes == (100, 100, 100, 100)


def test_expert_list_may_name_dense_layers() -> None:
    geometry = MoEGeometry.from_config({**MOE, "num_experts": [1, 8, 8, 1]})
    assert (geometry.num_experts, geometry.moe_layers) == (8, (1, 2))


def test_text_config_is_looked_into() -> None:
    geometry = MoEGeometry.from_config({"text_config": {**MOE, "num_experts": 8}, "hidden_size": 1})
    assert (geometry.num_experts, geometry.hidden_size) == (8, 64)


def test_heads_default_to_plain_attention() -> None:
    geometry = MoEGeometry.from_config(BASE)
    assert (geometry.num_key_value_heads, geometry.head_dim) == (8, 8)


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 0), ({"num_experts": 0}, 0), ({"num_experts": 1}, 1), ({"num_experts": None}, 0)],
)
def test_dense_models(changes: dict[str, Any], count: int) -> None:
    geometry = MoEGeometry.from_config({**BASE, **changes})
    assert not geometry.is_moe
    assert geometry.num_experts == count
    assert geometry.moe_layers == geometry.top_k == geometry.expert_parameter_count == ()
    assert geometry.routed_parameters == 0


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {**BASE, "n_experts_total": 8},
            "mentions experts under n_experts_total but gives their number under none of the known keys "
            "num_experts, num_local_experts, n_routed_experts, num_routed_experts",
        ),
        ({**BASE, "expert_counts": [4, 4]}, "under expert_counts but"),
        ({**MOE, "num_experts": [8, 8, 4, 4]}, "gives different layers 4 and 8 experts"),
        ({**MOE, "num_experts": [8, 8]}, "num_experts lists 2 values for 4 layers"),
        ({**MOE, "num_experts": "8"}, "num_experts must hold whole numbers, got '8'"),
        ({**MOE, "num_experts": [8, None, 8, 8]}, "must hold whole numbers, got None"),
        ({**BASE, "num_experts": 8}, "none of the keys moe_topk, num_experts_per_tok"),
        (
            {**MOE, "num_experts": 8, "num_experts_per_tok": 9},
            "top-k=9 of 8 experts; top-k must be between 1 and 8",
        ),
        ({"num_experts": 8}, "none of the keys num_hidden_layers"),
        ({**BASE, "hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
    ],
)
def test_refusals(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        MoEGeometry.from_config(config)
    assert text in str(error.value)


def test_flags_named_after_experts_are_not_counts() -> None:
    """A true/false setting must not be taken for an unknown number of experts."""
    assert not MoEGeometry.from_config({**BASE, "use_expert_bias": True}).is_moe
