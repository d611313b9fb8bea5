# SPDX-License-Identifier: Apache-2.0
"""Ranks that load only their own: same bits, few bytes, little memory, and no silence about damage."""

import concurrent.futures
import ctypes
import json
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_ep.checkpoint import CheckpointSpec, make_checkpoint, tensors
from omni_ep.config import RunRequest
from omni_ep.errors import ConfigurationError, WorkerStartError
from omni_ep.geometry import MoEGeometry
from omni_ep.loading import RankRole, plan_loading, read_checkpoint
from omni_ep.placement import ExpertPlacement
from tests.e2e.engines import ranks
from tests.ranks import run_on_ranks
from tests.shards import DAMAGES, INDEX, copy_of_tiny, damaged_expert, entries, header_of, put_shard
from tests.topologies import TOPOLOGIES, run_request
from tests.workers import TINY, diffusion_config, worker

pytestmark = pytest.mark.engine

EP_TOPOLOGIES = [name for name, sizes in TOPOLOGIES.items() if sizes.get("enable_expert_parallel")]
NEEDS_MORE_HEADS = "tp2*sp2+ep"
MAX_OVERHEAD = 1.01
MEMORY_ALLOWANCE = 512 * 2**20


def bytes_planned(model: Path, request: RunRequest) -> list[int]:
    """What ``omni-ep inspect`` predicts for each rank."""
    geometry = MoEGeometry.from_config(json.loads((model / "config.json").read_text()))
    layout = request.layout
    return [
        plan_loading(
            read_checkpoint(model),
            geometry,
            RankRole.linear(
                geometry,
                ep_rank=layout.ep_rank(rank),
                ep_size=layout.ep_size,
                tp_rank=layout.coordinates(rank).tp,
                tp_size=layout.tp,
            ),
        ).bytes_needed
        for rank in range(layout.world_size)
    ]


@pytest.mark.parametrize("topology", ["one rank", *EP_TOPOLOGIES])
def test_filtered_loading_paints_the_same_bits(topology: str, tmp_path: Path) -> None:
    request = run_request(topology, enable_expert_parallel=True)
    model = TINY
    if topology == NEEDS_MORE_HEADS:
        model = tmp_path / "model"
        make_checkpoint(model, CheckpointSpec(num_attention_heads=8, num_key_value_heads=4, head_dim=16))
    with ranks(request, model=model, dtype=torch.bfloat16) as live:
        ours = live.paint()
        live.call("reload", {"check_weights": True}, False)
        single_thread = live.paint()
        live.call("reload", {"filter_weights": False}, True)
        upstream = live.paint()
    assert upstream["loading"] == []
    for painted in (ours, single_thread):
        assert np.array_equal(painted["latents"][-1], upstream["latents"][-1])
        assert np.array_equal(painted["image"], upstream["image"])
        loading = painted["loading"]
        assert [entry["bytes_needed"] for entry in loading] == bytes_planned(model, request)
        whole = read_checkpoint(model).nbytes
        for entry in loading:
            assert entry["bytes_needed"] < entry["bytes_read"] <= MAX_OVERHEAD * entry["bytes_needed"]
            assert entry["bytes_needed"] + entry["bytes_skipped"] == whole
            assert entry["seconds"] > 0


def sparse_checkpoint(folder: Path) -> int:
    """One shard of about 1.5 GB that occupies no disk: its weights are zeros; returns its bytes."""
    spec = CheckpointSpec(
        num_layers=2, hidden_size=1024, num_experts=32, moe_intermediate_size=3584, num_shards=1
    )
    make_checkpoint(folder, CheckpointSpec(num_shards=1))
    config = json.loads((folder / "config.json").read_text())
    config.update(hidden_size=1024, num_experts=32, moe_intermediate_size=3584, intermediate_size=3584)
    config["vit_aligner"]["n_embed"] = 1024
    (folder / "config.json").write_text(json.dumps(config))
    header, size = entries({name: ("BF16", shape) for name, shape in tensors(spec)})
    [shard] = folder.glob("*.safetensors")
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(shard, 8 + len(text) + size)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(header, shard.name)}))
    return size


def _status(key: str) -> int:
    """A ``kB`` figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _rchar() -> int:
    """Bytes this process has asked the system for through read calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load_and_measure(rank: int, od_config: Any) -> dict[str, int]:
    with worker(rank, od_config) as instance:
        # Makes the high-water mark start again from what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before, read_before = _status("VmRSS"), _rchar()
        instance.load_model()
        pipeline = instance.model_runner.pipeline
        return {
            "peak": _status("VmHWM") - before,
            "own": sum(parameter.nbytes for parameter in pipeline.parameters()),
            "os_read": _rchar() - read_before,
            **(pipeline.loading_report or {}),
        }


def test_bytes_and_memory_of_a_load(tmp_path: Path) -> None:
    size = sparse_checkpoint(tmp_path / "model")
    request = run_request("tp2+ep")
    config = diffusion_config(request, model=tmp_path / "model", dtype=torch.bfloat16)
    for measured in run_on_ranks(load_and_measure, 2, config):
        # The operating system's own counter; it holds the tokenizer and the configs as well.
        assert measured["os_read"] <= MAX_OVERHEAD * measured["bytes_needed"]
        assert measured["bytes_needed"] < 0.55 * size
        # A shard held whole would not fit below this.
        assert size > measured["own"] + MEMORY_ALLOWANCE
        assert measured["peak"] <= measured["own"] + MEMORY_ALLOWANCE, f"{measured}"


def test_nan_in_one_expert_ends_the_start(tmp_path: Path) -> None:
    request = run_request("tp2+ep")
    # Expert 6 belongs to the second rank; the first sees nothing wrong.
    assert ExpertPlacement.linear(8, 2).owner(6)[0] == 1
    folder = damaged_expert(tmp_path / "model", 6, b"\xc0\x7f")
    text = r"rank 1 failed to start: /.*safetensors holds NaN in model.layers.1.mlp.experts.6"
    started = time.monotonic()
    with (
        pytest.raises(WorkerStartError, match=text),
        ranks(request, model=folder, additional_config={"omni_ep": {"check_weights": True}}),
    ):
        pass
    assert time.monotonic() - started < 90
    assert not [child for child in multiprocessing.active_children() if "DiffusionWorker" in child.name]


def test_what_the_parent_did_not_see_the_rank_refuses(tmp_path: Path) -> None:
    """Ranks check headers too: not every engine is started by the example."""
    folder = copy_of_tiny(tmp_path / "model")
    shard = folder / "model-0003-of-0003.safetensors"
    header, _ = header_of(shard)
    name = "vision_aligner.layers.0.weight"
    assert name in header
    text = shard.read_bytes()
    shape, flipped = (json.dumps(header[name]["shape"][::step], separators=(",", ":")) for step in (1, -1))
    old = text[: text.index(b'"data_offsets"', text.index(name.encode()))]
    start = old.rindex(name.encode())
    new = old[:start] + old[start:].replace(shape.encode(), flipped.encode())
    if new == old:
        shape, flipped = shape.replace(",", ", "), flipped.replace(",", ", ")
        new = old[:start] + old[start:].replace(shape.encode(), flipped.encode())
    assert new != old
    shard.write_bytes(new + text[len(old) :])
    with (
        pytest.raises(WorkerStartError, match=rf"{shard.name} holds {name} with shape .* the model expects"),
        ranks(run_request("one rank", enable_expert_parallel=True), model=folder),
    ):
        pass


VISION = "vision_model.encoder.layers.0."
LAYER = "model.layers.0."

#: What is taken out of a sound checkpoint or put into it, and what its rank says; ``None`` for nothing.
ODDITIES: dict[str, tuple[str | None, dict[str, tuple[str, tuple[int, ...]]], str | None]] = {
    "a part of a stacked weight is missing": (
        f"{VISION}self_attn.v_proj.weight",
        {},
        r"part 'v' of .*qkv_proj.weight .* was not loaded, once was expected",
    ),
    "a part of a stacked bias is missing": (
        f"{VISION}self_attn.v_proj.bias",
        {},
        r"part 'v' of .*qkv_proj.bias .* was not loaded, once was expected",
    ),
    "a part comes besides the whole": (
        None,
        {f"{LAYER}self_attn.q_proj.weight": ("BF16", (128, 128))},
        r"self_attn.qkv_proj.weight .* was loaded 2 times, once was expected",
    ),
    "the model's own name besides the checkpoint's": (
        None,
        {"model.norm.weight": ("BF16", (128,))},
        r"holds model.norm.weight, .* holds model.ln_f.weight, and both fill model.norm.weight; one was",
    ),
    "truth values where numbers belong": (
        "vae.decoder.conv_in.bias",
        {"vae.decoder.conv_in.bias": ("BOOL", (32,))},
        r"holds vae.decoder.conv_in.bias as BOOL, a floating-point format was expected",
    ),
    "whole numbers in a stacked weight": (
        f"{VISION}self_attn.q_proj.weight",
        {f"{VISION}self_attn.q_proj.weight": ("I16", (64, 64))},
        r"holds .*q_proj.weight as I16, a floating-point format was expected",
    ),
    "more rows than a weight loader cuts out": (
        f"{VISION}self_attn.q_proj.weight",
        {f"{VISION}self_attn.q_proj.weight": ("BF16", (128, 64))},
        r"holds .*q_proj.weight with shape \[128, 64\], the model expects \[64, 64\]",
    ),
    "another shape for a weight loader": (
        f"{VISION}mlp.fc1.bias",
        {f"{VISION}mlp.fc1.bias": ("BF16", (2, 64))},
        r"holds .*fc1.bias with shape \[2, 64\], the model expects \[128\]",
    ),
    "a weight loader stumbles": (
        None,
        {f"{LAYER}self_attn.q_proj.weight": ("BF16", (3, 5))},
        r"holds .*q_proj.weight as BF16 with shape \[3, 5\], which the model does not take",
    ),
    "nobody asks for them": (
        None,
        {
            f"{LAYER}mlp.experts.3.foo.weight": ("BF16", (2,)),
            f"{LAYER}mlp.experts.3.down_proj.weight_scale": ("F32", ()),
            f"{LAYER}self_attn.o_proj.weight_scale": ("F32", ()),
            "vae.logit_scale": ("F32", ()),
            "rescale.weight": ("BF16", (2,)),
        },
        None,
    ),
}


def odd_checkpoint(folder: Path, without: str | None, more: dict[str, tuple[str, tuple[int, ...]]]) -> Path:
    """A copy of the tiny checkpoint without a tensor and with others, of zeros."""
    copy_of_tiny(folder)
    (folder / INDEX).unlink()
    if without is not None:
        file = read_checkpoint(folder).tensors[without].file
        rest = load_file(file)
        del rest[without]
        save_file(rest, file)
    header, size = entries(more)
    put_shard(folder / "more.safetensors", header, bytes(size))
    return folder


def what_a_rank_says(rank: int, od_config: Any, folders: list[Path]) -> list[tuple[str | None, str | None]]:
    """The error and the warning of loading each folder in one worker."""
    answers: list[tuple[str | None, str | None]] = []
    with worker(rank, od_config) as instance:
        context = instance.vllm_config.compilation_config
        for folder in folders:
            od_config.model = str(folder)
            context.static_forward_context.clear()
            context.static_all_moe_layers.clear()
            try:
                instance.load_model()
            except ConfigurationError as error:
                answers.append((str(error), None))
            else:
                answers.append((None, instance.model_runner.pipeline.loading_warning))
    return answers


def test_what_only_the_modules_can_tell(tmp_path: Path) -> None:
    """Each would paint another picture, or end in an upstream error that names no file."""
    folders = [
        odd_checkpoint(tmp_path / str(number), without, more)
        for number, (without, more, _) in enumerate(ODDITIES.values())
    ]
    config = diffusion_config(run_request("one rank", enable_expert_parallel=True), dtype=torch.bfloat16)
    [answers] = run_on_ranks(what_a_rank_says, 1, config, [TINY, *folders])
    assert answers[0] == (None, None)
    for (oddity, (_, more, text)), (error, warning) in zip(ODDITIES.items(), answers[1:], strict=True):
        if text is not None:
            assert error is not None, oddity
            assert re.search(text, error), f"{oddity}: {error}"
        else:
            assert error is None, f"{oddity}: {error}"
            assert warning is not None
            assert all(name in warning for name in more), warning


def test_any_engine_refuses_damage_before_a_rank_starts(tmp_path: Path) -> None:
    """vLLM-Omni asks for the pipeline's preprocessing in the engine's process, before the workers."""
    from omni_ep.models.hunyuan_image3.pipeline import get_hunyuan_image_3_pre_process_func

    folder = copy_of_tiny(tmp_path / "model")
    config = diffusion_config(run_request("tp2+ep"), model=folder)
    get_hunyuan_image_3_pre_process_func(config)
    do, text = DAMAGES["truncated shard"]
    do(folder)
    with pytest.raises(ConfigurationError, match=text):
        get_hunyuan_image_3_pre_process_func(config)


def test_an_engine_finds_the_executor_of_the_platform() -> None:
    """And keeps the one that somebody chose."""
    from vllm_omni.diffusion.executor.abstract import DiffusionExecutor

    from omni_ep.models.hunyuan_image3.pipeline import get_hunyuan_image_3_pre_process_func
    from omni_ep.platforms.cpu.executor import ForkserverDiffusionExecutor

    config = diffusion_config(run_request("tp2+ep"))
    stock = DiffusionExecutor.get_class(config)
    assert stock is not ForkserverDiffusionExecutor, "vLLM-Omni asks the platform by itself now"
    get_hunyuan_image_3_pre_process_func(config)
    assert DiffusionExecutor.get_class(config) is ForkserverDiffusionExecutor
    config.distributed_executor_backend = "mp"
    get_hunyuan_image_3_pre_process_func(config)
    assert DiffusionExecutor.get_class(config) is stock


def test_an_engine_refuses_a_setting_it_does_not_know() -> None:
    from omni_ep.models.hunyuan_image3.pipeline import get_hunyuan_image_3_pre_process_func

    config = diffusion_config(run_request("one rank"), additional_config={"omni_ep": {"check_weigths": True}})
    with pytest.raises(ConfigurationError, match="has no setting 'check_weigths'"):
        get_hunyuan_image_3_pre_process_func(config)


def give_up_roots_override() -> None:
    """Root writes even where permissions forbid it; from here on this process does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of <linux/capability.h>, this process
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << 1 | 1 << 2)  # effective CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, data) == 0


def load_from_read_only(rank: int, od_config: Any) -> bool:
    give_up_roots_override()
    folder = Path(od_config.model)
    with pytest.raises(PermissionError):
        (folder / "probe").touch()
    os.chdir(folder)
    with worker(rank, od_config) as instance:
        instance.load_model()
        return bool(instance.model_runner.pipeline.loading_report)


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    """The tiny checkpoint; ends by checking that nobody wrote to it."""
    folder = copy_of_tiny(tmp_path / "model")
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_ranks_load_from_a_read_only_folder(read_only_folder: Path) -> None:
    """Also as their current folder."""
    config = diffusion_config(run_request("tp2+ep"), model=read_only_folder, dtype=torch.bfloat16)
    assert run_on_ranks(load_from_read_only, 2, config) == [True, True]


def test_two_engines_load_the_same_folder(read_only_folder: Path) -> None:
    request = run_request("one rank", enable_expert_parallel=True)

    def paint() -> np.ndarray:
        with ranks(request, model=read_only_folder, dtype=torch.bfloat16) as live:
            image: np.ndarray = live.paint()["image"]
            return image

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: paint(), range(2))
    assert np.array_equal(first, second)
