# SPDX-License-Identifier: Apache-2.0
"""Every refusal, with the numbers its sentence must name, and what may go on with a warning."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from omni_ep.config import PictureSizes, RunRequest, check_checkpoint_folder, check_vision_tower, validate
from omni_ep.errors import ConfigurationError

SMALL: dict[str, Any] = {
    "architectures": ["HunyuanImage3ForCausalMM"],
    "vocab_size": 320,
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": [64, 64],
    "moe_topk": [2, 2],
    "num_experts": 8,
    "num_shared_expert": [1, 1],
    "use_mixed_mlp_moe": True,
    "moe_layer_num_skipped": 0,
    "image_base_size": 64,
    "vae_downsample_factor": [16, 16],
    "patch_size": 1,
}
REAL: dict[str, Any] = SMALL | {
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts": 64,
    "intermediate_size": 3072,
    "moe_intermediate_size": 3072,
    "image_base_size": 1024,
}
EP = {"enable_expert_parallel": True}


def run(
    config: dict[str, Any] = SMALL, *, device_count: int = 64, device_kind: str = "cuda", **changes: Any
) -> list[str]:
    request = RunRequest(**({"height": 64, "width": 64} | changes))
    return validate(request, config, device_count=device_count, device_kind=device_kind)


def refusal(config: dict[str, Any] = SMALL, **changes: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        run(config, **changes)
    text = str(error.value)
    assert "\n" not in text
    assert ". " not in text
    assert not text.endswith(".")
    return text


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"tensor_parallel_size": 2},
        EP,
        {"tensor_parallel_size": 2, **EP},
        {"cfg_parallel_size": 2, **EP},
        {"ulysses_degree": 2, **EP},
        {"tensor_parallel_size": 2, "cfg_parallel_size": 2, **EP},
        {"cfg_parallel_size": 2, "ulysses_degree": 2, **EP},
        {"data_parallel_size": 2, **EP},
        {"tensor_parallel_size": 2, "ulysses_degree": 2, **EP},
        {"num_inference_steps": 1},
        {"num_inference_steps": 1000},
        {"height": 48, "width": 80},
        {"height": 32, "width": 128},
        {"use_hsdp": True},
        {"guidance_scale": 0.0},
    ],
)
def test_what_runs_is_let_through_without_a_word(flags: dict[str, Any]) -> None:
    assert run(**flags) == []


def test_real_model_on_a_full_node() -> None:
    assert run(REAL, height=1024, width=1024, device_count=8, tensor_parallel_size=8, **EP) == []
    assert (
        run(REAL, height=720, width=1280, device_count=8, tensor_parallel_size=4, cfg_parallel_size=2) == []
    )


# Expert parallelism


def test_experts_not_divisible() -> None:
    assert refusal(data_parallel_size=3, **EP) == (
        "8 experts cannot be divided equally among EP=3 ranks; EP sizes that fit: 1, 2, 4, 8 "
        "(EP=3 = TP 1 x SP 1 x CFG 1 x DP 3 (1 pipeline stage))"
    )


def test_more_ranks_than_experts() -> None:
    text = refusal(tensor_parallel_size=2, data_parallel_size=8, **EP)
    assert "EP=16 is larger than the number of experts (8), so some ranks would hold none" in text
    assert "EP=16 = TP 2 x SP 1 x CFG 1 x DP 8" in text


@pytest.mark.parametrize(("count", "found"), [(0, "0 routed experts"), (1, "1 routed expert ")])
def test_dense_model(count: int, found: str) -> None:
    text = refusal(SMALL | {"num_experts": count}, **EP)
    assert "--enable-expert-parallel needs a mixture-of-experts model, but this one has " + found in text
    assert run(SMALL | {"num_experts": count}) == []


def test_unknown_expert_count_key() -> None:
    config = {key: value for key, value in SMALL.items() if key not in ("num_experts", "num_shared_expert")}
    text = refusal(config | {"n_experts_total": 8}, **EP)
    assert (
        "mentions experts under n_experts_total but gives their number under none of the known keys" in text
    )


def test_hsdp_with_expert_parallelism() -> None:
    assert "--enable-expert-parallel cannot be combined with --use-hsdp" in refusal(use_hsdp=True, **EP)


def test_without_ep_experts_are_split_over_tp() -> None:
    config = SMALL | {"moe_intermediate_size": 66, "num_attention_heads": 4, "num_key_value_heads": 4}
    assert "the intermediate size of the routed experts, split over the TP ranks" in refusal(
        config, tensor_parallel_size=4
    )
    assert "is 66, which is not divisible by it; sizes that fit: 1, 2, 3, 6" in refusal(
        config, tensor_parallel_size=4
    )
    assert run(config, tensor_parallel_size=4, **EP) == []


def test_more_tp_ranks_than_experts() -> None:
    text = refusal(SMALL | {"num_experts": 2}, tensor_parallel_size=4)
    assert "--tensor-parallel-size is 4 but HunyuanImage3 allows no more TP ranks than experts (2)" in text


def test_shared_expert_is_split_over_tp() -> None:
    text = refusal(SMALL | {"intermediate_size": 66}, tensor_parallel_size=4, **EP)
    assert "--tensor-parallel-size is 4 but the intermediate size of the shared expert is 66" in text


# Attention


def test_attention_heads() -> None:
    text = refusal(SMALL | {"num_experts": 9}, tensor_parallel_size=3, **EP)
    assert "--tensor-parallel-size is 3 but the model has 4 attention heads" in text
    assert text.endswith("sizes that fit: 1, 2, 4")


def test_key_value_heads() -> None:
    config = REAL | {"num_attention_heads": 24, "num_key_value_heads": 6}
    text = refusal(config, height=1024, width=1024, tensor_parallel_size=4)
    assert (
        "--tensor-parallel-size is 4 but the model has 6 KV heads, which can be neither divided nor" in text
    )
    assert text.endswith("sizes that fit: 1, 2, 3, 6, 12, 24")


def test_key_value_heads_may_be_replicated() -> None:
    assert run(tensor_parallel_size=4, **EP) == []
    assert run(SMALL | {"num_key_value_heads": 1}, tensor_parallel_size=4, **EP) == []


def test_ulysses_splits_the_heads_of_a_tp_rank() -> None:
    text = refusal(tensor_parallel_size=2, ulysses_degree=4, **EP)
    assert "--ulysses-degree is 4 but a rank has 2 attention heads (4 over TP 2)" in text
    assert text.endswith("degrees that fit: 1, 2")


def test_ulysses_is_not_limited_by_key_value_heads() -> None:
    assert run(SMALL | {"num_key_value_heads": 1}, ulysses_degree=4, **EP) == []


def test_ring() -> None:
    text = refusal(ring_degree=2, cfg_parallel_size=2, **EP)
    assert "--ring-degree is 2 but vLLM-Omni's ring attention takes no attention mask" in text
    assert "use --ulysses-degree instead" in text


# Layout and devices


def test_pipeline_stages() -> None:
    text = refusal(pipeline_parallel_size=2)
    assert "--pipeline-parallel-size is 2 but vLLM-Omni's HunyuanImage3 cannot be split into" in text


def test_cfg_size() -> None:
    assert refusal(cfg_parallel_size=3) == (
        "--cfg-parallel-size is 3 but guidance has two branches; set it to 1 or 2"
    )


@pytest.mark.parametrize(
    "flag",
    [
        "tensor_parallel_size",
        "ulysses_degree",
        "ring_degree",
        "pipeline_parallel_size",
        "cfg_parallel_size",
        "data_parallel_size",
        "num_inference_steps",
        "num_images_per_prompt",
        "height",
        "width",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_must_be_whole_and_positive(flag: str, value: Any) -> None:
    name = "--" + flag.replace("_", "-")
    assert refusal(**{flag: value}) == f"{name} must be a whole number of at least 1, got {value!r}"


def test_more_ranks_than_devices() -> None:
    text = refusal(tensor_parallel_size=2, cfg_parallel_size=2, device_count=3)
    assert (
        "this layout needs 4 ranks (TP 2 x SP 1 x PP 1 x CFG 2 x DP 1) but there are 3 cuda devices" in text
    )
    assert "there is 1 npu device;" in refusal(tensor_parallel_size=2, device_count=1, device_kind="npu")


def test_cpu_cores_may_be_shared() -> None:
    many = {"tensor_parallel_size": 2, "cfg_parallel_size": 2, "device_kind": "cpu"}
    assert run(**many, device_count=2) == ["4 ranks share 2 CPU cores, so each step takes longer."]
    assert run(**many, device_count=4) == []


@pytest.mark.parametrize("guidance", [0.0, 1.0])
def test_cfg_ranks_without_guidance(guidance: float) -> None:
    (warning,) = run(cfg_parallel_size=2, guidance_scale=guidance)
    assert f"--cfg-parallel-size 2 saves no time because --guidance-scale {guidance:g} switches" in warning
    assert run(cfg_parallel_size=2, guidance_scale=1.01) == []


def test_cfg_ranks_with_distilled_guidance() -> None:
    (warning,) = run(SMALL | {"cfg_distilled": True}, cfg_parallel_size=2)
    assert "guidance distilled into it" in warning


# Steps, guidance, picture size


def test_more_steps_than_the_schedule() -> None:
    assert "--num-inference-steps is 1001 but the noise schedule has 1000" in refusal(
        num_inference_steps=1001
    )


@pytest.mark.parametrize("guidance", [math.nan, math.inf, -1.0])
def test_guidance(guidance: float) -> None:
    assert f"--guidance-scale must be a finite number of at least 0, got {guidance}" in refusal(
        guidance_scale=guidance
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"height": 50},
            "--height is 50 but must be a multiple of 16 (VAE factor x patch size), such as 48 or 64",
        ),
        ({"width": 8}, "--width is 8 but must be a multiple of 16 (VAE factor x patch size), such as 16"),
        (
            {"height": 96, "width": 96},
            "height x width 96x96 is not a size this model paints (image_base_size 64; it would paint 64x64 "
            "instead); nearest sizes: 64x64,",
        ),
        ({"height": 48, "width": 64}, "it would paint 768x1024 instead); nearest sizes: 48x80, 64x64, 80x48"),
        ({"height": 16384, "width": 16384}, "it would paint 896x896 instead"),
    ],
)
def test_picture_sizes_that_come_out_otherwise(changes: dict[str, int], text: str) -> None:
    assert text in refusal(**changes)


def test_patch_size_counts() -> None:
    assert "--height is 48 but must be a multiple of 32" in refusal(
        SMALL | {"patch_size": 2}, height=48, width=80
    )


@pytest.fixture(scope="module")
def resolution_group() -> Any:
    """vLLM-Omni's own size logic; its import takes long, so only the tests that need it pay."""
    from vllm_omni.diffusion.models.hunyuan_image3.hunyuan_image3_transformer import (
        get_cached_resolution_group,
    )

    return get_cached_resolution_group


@pytest.mark.parametrize("base", [64, 128, 1024])
def test_painted_sizes_equal_vllm_omnis(resolution_group: Any, base: int) -> None:
    sizes = PictureSizes(base_size=base, height_step=16, width_step=16)
    asked = [
        (height, width) for height in range(16, 2 * base + 65, 16) for width in range(16, 2 * base + 65, 16)
    ]
    if base > 128:
        asked = asked[::37]
    for height, width in [*asked, *sizes.paintable()]:
        upstream_width, upstream_height = resolution_group(base).get_target_size(width, height)
        assert sizes.bucket_for(height, width) == (upstream_height, upstream_width)


def test_paintable_sizes_by_hand() -> None:
    """Base 64: steps of 4 between 32x128 and 128x32, of which 16-pixel tokens leave these, and the extras."""
    upright = [(80, 48), (96, 32), (112, 32), (128, 32), (1024, 768), (1280, 720)]
    square = [(side, side) for side in (64, 512, 640, 768, 896)]
    expected = sorted([*upright, *square, *((width, height) for height, width in upright)])
    assert PictureSizes.from_config(SMALL).paintable() == expected
    assert PictureSizes.from_config(SMALL).bucket_for(61, 68) == (60, 68)


def test_every_paintable_size_is_accepted() -> None:
    for height, width in PictureSizes.from_config(SMALL).paintable():
        assert run(height=height, width=width) == []


# The checkpoint folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(b"")
    return tmp_path


def folder_refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as error:
        check_checkpoint_folder(path)
    return str(error.value)


def test_complete_folder(folder: Path) -> None:
    assert check_checkpoint_folder(folder) == SMALL
    assert check_checkpoint_folder(str(folder)) == SMALL
    (folder / "model.safetensors.index.json").unlink()
    assert check_checkpoint_folder(folder) == SMALL


def test_no_folder(folder: Path) -> None:
    assert "does not exist; name a folder of this machine" in folder_refusal(folder / "absent")
    assert "is not a folder; name the folder that holds config.json" in folder_refusal(folder / "config.json")
    with pytest.raises(ConfigurationError, match="folder is empty; name the folder"):
        check_checkpoint_folder("")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert folder_refusal(folder) == f"{folder / name} is missing; download the checkpoint again"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_broken_json(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    assert f"{folder / name} is not valid JSON" in folder_refusal(folder)
    (folder / name).write_text("[]")
    assert f"{folder / name} must hold a JSON object" in folder_refusal(folder)


def test_missing_shards_are_named(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    text = folder_refusal(folder)
    assert "names 2 weight files of which 1 is missing (model-2.safetensors)" in text


def test_no_weights(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    assert "holds no *.safetensors file" in folder_refusal(folder)


@pytest.mark.parametrize(
    ("architectures", "found"), [(["LlamaForCausalLM"], "LlamaForCausalLM"), (None, "no named architecture")]
)
def test_other_architecture(folder: Path, architectures: list[str] | None, found: str) -> None:
    (folder / "config.json").write_text(json.dumps(SMALL | {"architectures": architectures}))
    assert f"is for {found}; supported: HunyuanImage3ForCausalMM" in folder_refusal(folder)


def test_vision_tower_must_be_divisible() -> None:
    tower = {"vit": {"num_attention_heads": 2, "intermediate_size": 128}}
    with pytest.raises(
        ConfigurationError,
        match=r"--tensor-parallel-size is 4 but the vision tower's num_attention_heads is 2, .* that fit: 1",
    ):
        check_vision_tower(RunRequest(tensor_parallel_size=4), tower)
    check_vision_tower(RunRequest(tensor_parallel_size=2), tower)
    check_vision_tower(RunRequest(tensor_parallel_size=4), {})
