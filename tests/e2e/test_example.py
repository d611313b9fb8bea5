# SPDX-License-Identifier: Apache-2.0
"""The example, tried as a new user would: run it, misuse it, interrupt it, kill its ranks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from examples.text_to_image import text_to_image
from omni_ep.checkpoint import CheckpointSpec, inventory, make_checkpoint
from omni_ep.layout import ParallelLayout
from omni_ep.planner import Workload
from tests.shards import INDEX, damaged_expert

EXAMPLE = Path(text_to_image.__file__)
START_TIMEOUT_S = 240.0
TWO_RANKS = ("--tensor-parallel-size", 2, "--enable-expert-parallel")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example") / "model"
    make_checkpoint(path, CheckpointSpec())
    return path


def _plain_environment() -> dict[str, str]:
    """Without what the test session has set for its own engines."""
    quiet = ("VLLM_LOGGING_LEVEL", "TRANSFORMERS_VERBOSITY", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in quiet}


class Run:
    """The example in a session of its own, so that every process it starts can be found."""

    def __init__(self, folder: Path, *arguments: object, **environment: str) -> None:
        self.output = folder / "output.txt"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLE), *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**_plain_environment(), **environment},
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not re.search(pattern, self.text()):
            assert self.process.poll() is None, f"ended before {pattern!r}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} in {START_TIMEOUT_S} s:\n{self.text()}"
            time.sleep(0.2)

    def members(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        """Processes that the fork server has forked."""
        found = self.members()
        server = {process.pid for process in found if "forkserver" in " ".join(process.cmdline())}
        return [process for process in found if process.ppid() in server]

    def ends_within(self, seconds: float) -> int:
        """The exit code; fails when the command or any process of its session is still there."""
        deadline = time.monotonic() + seconds
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.text()[-2000:]}")
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.members() == []
        return code

    def reap(self) -> None:
        for process in self.members():
            process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: object, **environment: str) -> Run:
        runs.append(Run(tmp_path, *arguments, **environment))
        return runs[-1]

    yield begin
    for run in runs:
        run.reap()


def _with_stray_tensor(model: Path, folder: Path) -> Path:
    """A copy of the checkpoint with a tensor that the model does not ask for."""
    shutil.copytree(model, folder)
    save_file({"model.stray": torch.zeros(8)}, folder / "stray.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.stray"] = "stray.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.engine
def test_picture_proof_and_report(start: Callable[..., Run], tmp_path: Path, model: Path) -> None:
    """Two ranks, the baseline, and every promised figure; also without a compiler on the machine."""
    run = start(
        "--model",
        _with_stray_tensor(model, tmp_path / "model"),
        *(*TWO_RANKS, "--compare-baseline"),
        *("--num-inference-steps", 4, "--num-images-per-prompt", 2, "--report", "report.json"),
        *("--plot-expert-load", "load.png"),
        CXX="/bin/false",
        CC="/bin/false",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )
    assert run.ends_within(START_TIMEOUT_S) == 0, run.text()
    text = run.text()
    assert "EP=2 = TP 2" in text
    assert len(re.findall(r"denoising: 100%", text)) >= 4  # two pictures, each with its baseline
    assert text.count("against one rank:") == 2
    stray = r"^warning: .* 1 tensor\(s\) that the model does not ask for; they are not read: model.stray$"
    assert len(re.findall(stray, text, re.MULTILINE)) == 1
    assert text.count("does not ask for") == 1
    for name in ("output.png", "output_1.png", "output_comparison.png", "output_comparison_1.png"):
        assert (tmp_path / name).stat().st_size > 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["layout"]["ep_size"] == 2
    assert report["timings"]["startup_s"] > 0
    assert report["timings"]["per_step_s"] > 0
    whole = inventory(CheckpointSpec()).expert_parameters * 4  # float32 on CPU
    assert [entry["expert_bytes"] for entry in report["memory"]] == [whole // 2, whole // 2]
    for rank, entry in enumerate(report["memory"]):
        assert set(entry) == {"rank", "expert_bytes", "parameter_bytes", "peak_rss_bytes"}
        assert entry["rank"] == rank
        assert entry["peak_rss_bytes"] > entry["parameter_bytes"] > entry["expert_bytes"]
    assert set(report["quality"]) == {"identical", "psnr_db", "ssim", "mean_abs", "p99_abs", "max_abs"}
    assert report["quality"]["identical"] or report["quality"]["psnr_db"] >= 60
    assert {"omni-ep", "vllm", "vllm-omni", "torch"} <= set(report["versions"])
    _check_expert_load(report["expert_load"], text, tmp_path)
    assert "Traceback" not in text


def _check_expert_load(load: dict[str, Any], text: str, folder: Path) -> None:
    """Two pictures of four steps on two ranks."""
    assert load["file"] == "load.png"
    assert (folder / "load.png").stat().st_size > 10_000
    assert (load["pictures"], load["steps"], len(load["layers"])) == (2, 4, CheckpointSpec().num_layers)
    # The checkpoint's tokenizer makes one token of a byte.
    size = CheckpointSpec().image_base_size
    work = Workload(height=size, width=size, prompt_tokens=len(text_to_image.PROMPT))
    tokens = [work.first_step(ParallelLayout()).total, *[work.later_step(ParallelLayout()).total] * 3]
    routed = [2 * count * CheckpointSpec().top_k for count in tokens]
    for layer in load["layers"]:
        assert sum(layer["tokens_per_expert"]) == sum(routed)
    for step, expected in zip(load["per_step"], routed, strict=True):
        assert sum(step["tokens_per_rank"]) == expected * CheckpointSpec().num_layers
        assert 1 <= step["max_over_mean"] <= step["layer_by_layer"] <= 2
    busiest = load["busiest_expert"]
    assert f"expert load: busiest expert {busiest['over_mean']:.2f}x the mean" in text
    assert "saved load.png" in text


LONG = ("--num-inference-steps", 1000, *TWO_RANKS)


@pytest.mark.engine
def test_killed_rank_is_an_error_soon(start: Callable[..., Run], model: Path) -> None:
    run = start("--model", model, *LONG)
    run.wait_for(r"denoising:\s+\d+%.*[1-9]\d*/1000")
    os.kill(run.ranks()[1].pid, signal.SIGKILL)
    assert run.ends_within(15) == 1
    assert "error: the picture was not finished" in run.text()
    assert "Traceback" not in run.text(), run.text()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ["--check-weights"],
            "the engine did not start: rank 1 failed to start: /.* holds NaN in .*experts.6",
        ),
        (["--compare-baseline"], "the picture holds NaN where colours were expected; .*--check-weights"),
    ],
)
def test_nan_ends_in_one_sentence(
    flags: list[str], error: str, tmp_path: Path, start: Callable[..., Run]
) -> None:
    """No traceback of any rank or thread, and no proof from two pictures that are black."""
    model = damaged_expert(tmp_path / "model", 6, b"\xc0\x7f")
    run = start("--model", model, "--num-inference-steps", 2, *TWO_RANKS, *flags)
    assert run.ends_within(START_TIMEOUT_S) == 1
    text = run.text()
    assert re.search(rf"^error: {error}.*\Z", text.rstrip(), re.MULTILINE), text
    assert "Traceback" not in text
    assert "against one rank" not in text
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("moment", ["starting", "painting"])
def test_interrupt_ends_everything(start: Callable[..., Run], model: Path, moment: str) -> None:
    run = start("--model", model, *LONG)
    run.wait_for("starting 2 rank" if moment == "starting" else r"denoising:\s+\d+%.*[1-9]\d*/1000")
    if moment == "starting":
        time.sleep(2.0)
    run.process.send_signal(signal.SIGINT)
    assert run.ends_within(10) == 130
    assert run.text().rstrip().endswith("interrupted"), run.text()[-2000:]
    assert "Traceback" not in run.text()


@pytest.mark.engine
def test_killed_command_leaves_no_rank(start: Callable[..., Run], model: Path) -> None:
    run = start("--model", model, *LONG)
    run.wait_for(r"denoising:\s+\d+%.*[1-9]\d*/1000")
    run.process.kill()
    run.ends_within(15)


def test_help_shows_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        text_to_image.main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for expected in ("(default: 42)", "(default: output.png)", "examples:", "--vae-use-tiling"):
        assert expected in text


def _edit_config(model: Path, target: Path, **changes: Any) -> Path:
    target.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file)
    config = {**json.loads((model / "config.json").read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


#: what the user types, changes to the model's config, what the sentence must say.
REFUSED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "experts not divisible": (
        ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
        {"num_experts": 9},
        r"9 experts.*EP=2",
    ),
    "more ranks than experts": (
        ["--data-parallel-size", "16", "--enable-expert-parallel"],
        {},
        r"EP=16 is larger than the number of experts \(8\)",
    ),
    "dense model": (
        ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
        {"num_experts": 1},
        r"needs a mixture-of-experts model.*1 routed expert",
    ),
    "unknown expert key": (
        ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
        {"num_experts": None, "n_experts_total": 8},
        r"n_experts_total",
    ),
    "heads": (
        ["--tensor-parallel-size", "2"],
        {"num_attention_heads": 3, "num_key_value_heads": 1},
        r"3 attention heads",
    ),
    "kv heads": (["--tensor-parallel-size", "2"], {"num_key_value_heads": 3}, r"3 KV heads"),
    "hsdp": (["--enable-expert-parallel", "--use-hsdp"], {}, r"--use-hsdp"),
    "ring": (
        ["--ring-degree", "2", "--cfg-parallel-size", "2", "--enable-expert-parallel"],
        {},
        r"ring attention",
    ),
    "pipeline stages": (["--pipeline-parallel-size", "2"], {}, r"pipeline stages"),
    "height": (["--height", "40"], {}, r"--height is 40.*multiple of 16"),
    "size not painted": (["--height", "96", "--width", "96"], {}, r"96x96 is not a size"),
    "output folder": (
        ["--output", "missing/x.png"],
        {},
        r"--output is missing/x.png, which cannot be written",
    ),
    "output format": (["--output", "x.gif"], {}, r"does not end in .png"),
    "report folder": (["--report", "missing/r.json"], {}, r"--report is missing/r.json"),
    "plot folder": (
        ["--plot-expert-load", "missing/x.png"],
        {},
        r"--plot-expert-load is missing/x.png, which cannot be written",
    ),
    "plot format": (["--plot-expert-load", "x.txt"], {}, r"--plot-expert-load cannot write 'x.txt'"),
    "plot over the picture": (
        ["--plot-expert-load", "output.png"],
        {},
        r"--output and --plot-expert-load are both output.png; name two files",
    ),
    "plot over a numbered picture": (
        ["--plot-expert-load", "output_1.png", "--num-images-per-prompt", "2"],
        {},
        r"--plot-expert-load is output_1.png, where a picture of --output output.png is saved",
    ),
    "report over the comparison": (
        ["--report", "output_comparison.png", "--compare-baseline"],
        {},
        r"--report is output_comparison.png, where a picture",
    ),
    "plot of tokens split without EP": (
        ["--plot-expert-load", "x.png", "--ulysses-degree", "2"],
        {},
        r"--plot-expert-load on 2 ranks.*needs --enable-expert-parallel",
    ),
    "plot of a dense model": (
        ["--plot-expert-load", "x.png"],
        {"num_experts": 1},
        r"--plot-expert-load needs a mixture-of-experts model",
    ),
    "seed": (["--seed", str(2**70)], {}, r"--seed is \d+, which does not fit"),
    "malformed config": ([], {"vae_downsample_factor": 16}, r"vae_downsample_factor must be two whole"),
    "steps": (["--num-inference-steps", "0"], {}, r"--num-inference-steps.*got 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_starts(
    case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one sentence, from the parent, with no child process started."""
    arguments, changes, sentence = REFUSED[case]
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    folder = _edit_config(model, tmp_path / "model", **changes)
    assert text_to_image.main(["--model", str(folder), *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert re.search(sentence, error), error
    assert {child.pid for child in psutil.Process().children(recursive=True)} == children


@pytest.mark.parametrize(
    "missing", ["config.json", "generation_config.json", "tokenizer.json", "model-0002-of-0003.safetensors"]
)
def test_incomplete_folder_is_named(
    missing: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _edit_config(model, tmp_path / "model")
    (folder / missing).unlink()
    assert text_to_image.main(["--model", str(folder)]) == 2
    assert missing in capsys.readouterr().err


def test_refusal_as_a_command(start: Callable[..., Run], model: Path) -> None:
    run = start("--model", model, "--height", 40)
    assert run.process.wait(60) == 2
    assert run.text().count("\n") == 1
    assert "Traceback" not in run.text()


def test_more_ranks_than_cores_is_one_warning(model: Path) -> None:
    from omni_ep.config import check_checkpoint_folder, validate

    args = text_to_image.parse_args(
        ["--model", str(model), "--tensor-parallel-size", "2", "--cfg-parallel-size", "2"]
    )
    config = check_checkpoint_folder(model)
    text_to_image.fill_in_from_checkpoint(args, str(model))
    [warning] = validate(text_to_image.run_request(args, config), config, device_count=2, device_kind="cpu")
    assert warning == "4 ranks share 2 CPU cores, so each step takes longer."
