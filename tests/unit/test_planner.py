# SPDX-License-Identifier: Apache-2.0
"""The planner's memory figures: published cases, the checkpoint's own inventory, and split rules by hand."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from omni_ep.checkpoint import CheckpointSpec, inventory
from omni_ep.checkpoint.config_files import model_config
from omni_ep.config import RunRequest
from omni_ep.errors import ConfigurationError
from omni_ep.layout import ParallelLayout
from omni_ep.planner import PRESETS, Part, Plan, Settings, Workload, load_model, make_plan, precision_of
from omni_ep.planner.weights import PARAMETER_PARTS, Split, Weight
from omni_ep.units import format_bytes, parse_bytes

GIB = 2**30
TINY = Path(__file__).parents[1] / "data" / "hunyuan_image3_tiny"


def plan(model: str, *, ep: bool = False, dtype: str | None = None, **settings: Any) -> Plan:
    sizes = {axis: settings.pop(axis) for axis in ("tp", "sp", "pp", "cfg", "dp") if axis in settings}
    loaded = load_model(model)
    chosen = Settings(
        model=loaded,
        precision=precision_of(dtype or loaded.dtype),
        workload=settings.pop("workload", Workload()),
        **settings,
    )
    return make_plan(chosen, ParallelLayout(**sizes), expert_parallel=ep)


def test_published_case_of_the_override() -> None:
    """Qwen3.6-35B-A3B in fp16: 22.5 GiB of experts per card at TP=2, 11.25 GiB at EP=4."""
    assert plan("qwen3.6-35b-a3b-moe", tp=2).parts[Part.ROUTED_EXPERTS] == 22.5 * GIB
    assert plan("qwen3.6-35b-a3b-moe", tp=4, ep=True).parts[Part.ROUTED_EXPERTS] == 11.25 * GIB
    # Its formula, written out.
    assert 11.25 * GIB == 64 * (2 * 512 * 2048 + 2048 * 512) * 2 * 30


def test_hunyuan_image3_as_published_and_measured() -> None:
    whole = plan("hunyuan-image-3")
    assert whole.parts[Part.ROUTED_EXPERTS] == pytest.approx(154.6e9, rel=1e-3)
    # Routed experts are 95.5 % of the transformer with its embeddings.
    parts = (Part.SHARED_EXPERTS, Part.ROUTER, Part.ATTENTION, Part.EMBEDDINGS, Part.ROUTED_EXPERTS)
    transformer = sum(whole.parts[part] for part in parts)
    assert whole.parts[Part.ROUTED_EXPERTS] / transformer == pytest.approx(0.955, abs=5e-4)
    # About 79 GiB per rank at TP2+EP2 is what users saw loaded.
    assert plan("hunyuan-image-3", tp=2, ep=True).parameter_bytes / GIB == pytest.approx(79, abs=0.5)


@pytest.mark.parametrize(
    ("name", "billions"), [("deepseek-v2", 236), ("mixtral-8x7b", 46.7), ("lingbot-video-moe", 29.2)]
)
def test_presets_add_up_to_the_models_names(name: str, billions: float) -> None:
    parameters = sum(weight.elements for weight in load_model(name).weights)
    assert parameters / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_where_it_comes_from(name: str) -> None:
    notes = load_model(name).notes
    assert any(note.startswith("source: ") for note in notes)
    assert any(note.startswith("not checked: ") for note in notes)


SPECS = [
    CheckpointSpec(),
    CheckpointSpec(
        num_layers=3,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_experts=12,
        num_shared_experts=2,
        patch_embed_hidden_dim=96,
        vae_block_channels=(32, 64, 64, 128, 128),
        vae_layers_per_block=2,
    ),
    CheckpointSpec(num_shared_experts=0, vae_latent_channels=8, dtype="fp32"),
]


@pytest.mark.parametrize("spec", SPECS)
def test_one_rank_holds_what_the_checkpoint_holds(spec: CheckpointSpec, tmp_path: Path) -> None:
    """The inventory lists checkpoint tensors, the planner vLLM's parameters: independent countings."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(model_config(spec)))
    planned, stored = plan(str(file)), inventory(spec)
    assert planned.settings.precision.name == spec.dtype
    assert planned.parameter_bytes == stored.bytes
    assert planned.parts[Part.ROUTED_EXPERTS] == stored.expert_bytes


def local_elements(weight: Weight, *, ep: bool = False, **sizes: int) -> int:
    count, rows, columns = weight.local(ParallelLayout(**sizes), expert_parallel=ep)
    return count * rows * columns


@pytest.mark.parametrize(
    ("split", "fields", "sizes", "ep", "expected"),
    [
        (Split.REPLICATED, {"rows": 8, "columns": 4}, {"tp": 4}, False, 32),
        (Split.ROWS, {"rows": 8, "columns": 4}, {"tp": 4, "sp": 2}, False, 8),
        (Split.COLUMNS, {"rows": 8, "columns": 4}, {"tp": 4}, False, 8),
        # 2 KV heads on 4 TP ranks: each keeps one, half of the rows, not a quarter.
        (Split.KV_ROWS, {"rows": 8, "columns": 4, "heads": 2}, {"tp": 4}, False, 16),
        (Split.KV_ROWS, {"rows": 8, "columns": 4, "heads": 8}, {"tp": 4}, False, 8),
        # 100 rows are padded to 128, then halved.
        (Split.VOCAB_ROWS, {"rows": 100, "columns": 4}, {"tp": 2}, False, 256),
        (Split.VOCAB_ROWS, {"rows": 100, "columns": 4}, {}, False, 512),
        # 16 experts: whole ones over EP = 2 x 2 x 2, or halves of all over TP.
        (Split.EXPERT_ROWS, {"rows": 8, "columns": 4, "count": 16}, {"tp": 2, "sp": 2, "cfg": 2}, True, 64),
        (Split.EXPERT_ROWS, {"rows": 8, "columns": 4, "count": 16}, {"tp": 2, "sp": 2}, False, 256),
        (Split.EXPERT_COLUMNS, {"rows": 8, "columns": 4, "count": 16}, {"tp": 2, "dp": 2}, False, 256),
        (Split.EXPERT_COLUMNS, {"rows": 8, "columns": 4, "count": 16}, {"dp": 4}, True, 128),
    ],
)
def test_split_rules_by_hand(
    split: Split, fields: dict[str, int], sizes: dict[str, int], ep: bool, expected: int
) -> None:
    weight = Weight(part=Part.ATTENTION, split=split, **fields)
    assert local_elements(weight, ep=ep, **sizes) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bf16", 2 * 6 * 32),
        ("fp32", 4 * 6 * 32),
        ("fp8", 6 * 32 + 4),
        ("int8", 6 * 32 + 6 * 4),
        ("nvfp4", 6 * 32 // 2 + 6 * 2 + 4),
    ],
)
def test_quantised_bytes_with_scales(dtype: str, expected: int) -> None:
    assert precision_of(dtype).matrix_bytes(rows=6, columns=32) == expected


def test_quantisation_leaves_the_rest_alone() -> None:
    bf16, fp8 = plan("hunyuan-image-3"), plan("hunyuan-image-3", dtype="fp8")
    for part in PARAMETER_PARTS:
        smaller = part in (Part.ROUTED_EXPERTS, Part.SHARED_EXPERTS, Part.ATTENTION)
        ratio = fp8.parts[part] / bf16.parts[part] if bf16.parts[part] else 1
        assert ratio == pytest.approx(0.5 if smaller else 1, abs=1e-3), part


def test_vae_is_float32_on_cpu() -> None:
    accelerator, cpu = plan(str(TINY)), plan(str(TINY), on_cpu=True)
    assert cpu.parts[Part.VAE] == 2 * accelerator.parts[Part.VAE]
    assert cpu.parameter_bytes - accelerator.parameter_bytes == accelerator.parts[Part.VAE]


def test_every_rank_is_listed_with_the_keys_of_the_contract() -> None:
    told = plan("hunyuan-image-3", tp=2, cfg=2, ep=True, device_memory=80 * GIB).to_dict()
    assert set(told) == {"ep_size", "ranks", "traffic", "fits"}
    assert told["ep_size"] == 4
    assert told["fits"] is True
    layout = ParallelLayout(tp=2, cfg=2)
    for rank, entry in enumerate(told["ranks"]):
        assert set(entry) == {
            "rank",
            "coordinates",
            "routed_experts_bytes",
            "parameter_bytes",
            "total_bytes",
        }
        assert entry["rank"] == rank
        assert entry["coordinates"] == asdict(layout.coordinates(rank))
        assert entry["routed_experts_bytes"] == 36 * GIB
        assert entry["routed_experts_bytes"] < entry["parameter_bytes"] < entry["total_bytes"]


def test_fits_is_about_the_total() -> None:
    asked = {"tp": 2, "ep": True}
    total = plan("hunyuan-image-3", **asked).total_bytes
    assert plan("hunyuan-image-3", **asked).fits is None
    assert plan("hunyuan-image-3", device_memory=total, **asked).fits is True
    assert plan("hunyuan-image-3", device_memory=total - 1, **asked).fits is False


def test_activations_by_hand() -> None:
    """tiny, one rank, 64x64, no prompt: 2 x (4 + 1 + 18) tokens; experts outweigh attention; no VAE."""
    work = Workload(height=64, width=64, prompt_tokens=1)
    tiny = plan(str(TINY), workload=work)
    tokens, hidden, inner, top_k, width = 2 * (5 + 18), 128, 64, 2, 2
    residual = 2 * tokens * hidden * width
    experts = tokens * (top_k * (hidden + hidden) + hidden) * width
    attention = 4 * tokens * 4 * 32 * width + 2 * 23**2
    prompt = 2 * 2 * 2 * 5 * 2 * 32 * width
    decode = 3 * 64 * 64 * 4 * 32 * width
    assert max(inner, hidden) == hidden
    assert tiny.parts[Part.ACTIVATIONS] == max(residual + max(experts, attention), decode) + prompt
    assert tiny.parts[Part.COMMUNICATION] == 0


def test_bigger_pictures_take_more_and_tiling_takes_it_back() -> None:
    sizes = [
        plan("hunyuan-image-3", workload=Workload(height=side, width=side)) for side in (512, 1024, 2048)
    ]
    activations = [each.parts[Part.ACTIVATIONS] for each in sizes]
    assert activations == sorted(activations)
    big = {"workload": Workload(height=2048, width=2048)}
    tiled = plan("hunyuan-image-3", vae_tiling=True, **big)
    assert tiled.parts[Part.ACTIVATIONS] < activations[2]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ep_never_changes_anything_but_experts_and_buffers(tp: int) -> None:
    for cfg, dp in itertools.product((1, 2), (1, 2)):
        off = plan("hunyuan-image-3", tp=tp, cfg=cfg, dp=dp)
        on = plan("hunyuan-image-3", tp=tp, cfg=cfg, dp=dp, ep=True)
        for part in PARAMETER_PARTS:
            share = cfg * dp if part is Part.ROUTED_EXPERTS else 1
            assert on.parts[part] * share == off.parts[part]


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("32 GB", 32 * 10**9), ("1.5 TiB", 3 * 2**39), ("512b", 512), ("1KiB", 1024)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "GiB", "80 gigs", "-1GiB", ""])
def test_sizes_without_number_or_unit_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write a number and a unit, such as 80GiB"):
        parse_bytes(text)


def test_sizes_are_written() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 3 * 2**19, 72 * GIB, -GIB)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 MiB",
        "72.00 GiB",
        "-1.00 GiB",
    ]


def test_unknown_models_are_told_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'flux' is neither a checkpoint folder.*mixtral-8x7b"):
        load_model("flux")
    with pytest.raises(ConfigurationError, match=r"config\.json is missing"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is not valid JSON"):
        load_model(str(tmp_path))
    config = json.loads((TINY / "config.json").read_text())
    del config["vae"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="lacks what the planner needs: 'vae'"):
        load_model(str(tmp_path))


def test_what_the_config_does_not_settle_is_said() -> None:
    notes = " ".join(load_model("qwen3.6-35b-a3b-moe").notes)
    assert "not counted: attention, embeddings" in notes
    assert plan("qwen3.6-35b-a3b-moe").parts[Part.ATTENTION] == 0


def test_request_defaults_match_the_workload() -> None:
    assert (Workload().height, Workload().width) == (RunRequest().height, RunRequest().width)
