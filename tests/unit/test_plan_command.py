# SPDX-License-Identifier: Apache-2.0
"""`omni-ep plan` as a user meets it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from omni_ep import cli
from omni_ep.planner import PRESETS

TINY = Path(__file__).parents[1] / "data" / "hunyuan_image3_tiny"
EP4 = ["--tensor-parallel-size", "2", "--cfg-parallel-size", "2", "--enable-expert-parallel"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_json_has_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(run(capsys, "hunyuan-image-3", *EP4, "--device-memory", "80GiB", "--json"))
    assert set(told) == {"ep_size", "ranks", "traffic", "fits"}
    assert (told["ep_size"], told["fits"], len(told["ranks"])) == (4, True, 4)
    assert set(told["traffic"]) == {"allgather_reducescatter", "all_to_all", "tp_without_ep"}
    for figures in told["traffic"].values():
        assert figures["bytes_per_rank_per_step"] == 32 * figures["bytes_per_rank_per_layer"]


def test_figures_have_units(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "hunyuan-image-3", *EP4, "--device-memory", "80GiB")
    assert "routed experts                    38,654,705,664 B   36.00 GiB" in text
    assert "rank 3: experts 48-63" in text
    assert "\nfits\n" in text
    for line in text.partition("memory of each rank")[2].splitlines():
        for number in re.findall(r"(?<![\w./-])\d[\d,.]*(?= |$)", line):
            assert re.search(rf"{re.escape(number)} (B|KiB|MiB|GiB)", line), line


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8", "int8", "nvfp4"])
def test_every_preset_in_every_format(name: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(run(capsys, "--preset", name, "--dtype", dtype, "--json", "--cfg-parallel-size", "2"))
    assert told["ranks"][1]["routed_experts_bytes"] > 2**30
    assert told["fits"] is None


def test_folder_and_config_file_agree(capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(capsys, "--model", str(TINY), "--json")
    assert folder == run(capsys, str(TINY / "config.json"), "--json")


def test_the_base_size_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert "request   64x64 pixels = 16 image tokens" in run(capsys, str(TINY))
    assert "request   48x80 pixels = 15 image tokens" in run(
        capsys, str(TINY), "--height", "48", "--width", "80"
    )
    assert "request   4,000 tokens" in run(capsys, "mixtral-8x7b", "--tokens", "4000")


def test_devices_ranks_and_prints_a_command_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--devices", "4", "--device-memory", "80GiB")
    assert "layouts fit, best first" in text
    assert "--ring-degree is 2 but" in text
    command = text.rstrip().splitlines()[-1].strip()
    assert command.startswith("python examples/text_to_image/text_to_image.py --model ")
    told = json.loads(run(capsys, "--devices", "4", "--device-memory", "80GiB", "--json"))
    best = told["candidates"][0]
    assert f"best: {best['layout']}" in text
    words = shlex.split(best["command"])[2:]
    # The flags are the planner's own too: planning them again gives the same figures.
    flags = [word for word in words if word not in ("--model", "hunyuan-image-3")]
    again = json.loads(run(capsys, "hunyuan-image-3", *flags, "--device-memory", "80GiB", "--json"))
    assert again == {key: best[key] for key in ("ep_size", "ranks", "traffic", "fits")}


def test_nothing_fits_is_an_error_with_the_smallest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--devices", "2", "--device-memory", "40GiB"]) == 2
    error = capsys.readouterr().err
    assert "no layout of 2 devices fits 40.00 GiB each: the smallest, " in error
    assert "needs 82.40 GiB per rank" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' is neither a checkpoint folder"),
        (["mixtral-8x7b", "--model", "deepseek-v2"], "two models were given"),
        (["--device-memory", "80"], "'80' is not an amount of memory"),
        (["--tensor-parallel-size", "3"], "32 attention heads"),
        (["--ring-degree", "2"], "--ring-degree is 2"),
        (["--height", "1000"], "--height is 1000"),
        (["--devices", "0"], "--devices must be a whole number"),
        (["--devices", "2", "--link-bandwidth", "0"], "--link-bandwidth must be greater than 0"),
        (["mixtral-8x7b", "--data-parallel-size", "16", "--enable-expert-parallel"], "EP=16 is larger"),
        (["mixtral-8x7b", "--tokens", "0"], "--tokens must be a whole number"),
    ],
)
def test_impossible_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("omni-ep: error: ")
    assert message in error


def test_plot_shows_bars_and_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.png"
    assert f"saved {file}" in run(capsys, "--devices", "4", "--device-memory", "80GiB", "--plot", str(file))
    picture = Image.open(file).convert("RGB")
    colors = {color for count, color in picture.getcolors(2**24) if count > 200}
    assert {(0x1F, 0x5F, 0xA8), (0x31, 0xA3, 0x54), (0xC0, 0, 0)} <= colors


def test_plot_refuses_an_unknown_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--plot", str(tmp_path / "memory.txt")]) == 2
    assert "its suffix names no picture format" in capsys.readouterr().err


def test_plot_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["plan", "--plot", str(tmp_path / "memory.png")]) == 2
    assert "pip install 'omni-ep[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "--devices", "16"], ["compare", "--help"]])
def test_starts_under_a_second_without_torch(arguments: list[str]) -> None:
    """Processor time, so that a busy machine does not fail it."""
    program = f"""
import sys, time
from omni_ep import cli
try:
    cli.main({arguments!r})
except SystemExit:
    pass
heavy = sorted({{"torch", "vllm", "vllm_omni", "transformers", "matplotlib"}} & set(sys.modules))
print(heavy, file=sys.stderr)
print(time.process_time(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy, seconds = done.stderr.splitlines()[-2:]
    assert heavy == "[]"
    assert float(seconds) < 1.0
