# SPDX-License-Identifier: Apache-2.0
"""The `omni-ep` command as a user meets it: help, output, errors and exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omni_ep import cli
from omni_ep.checkpoint import CheckpointSpec, inventory
from omni_ep.commands import make_checkpoint as command


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omni_ep.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_shows_defaults_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["make-checkpoint", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert exit_.value.code == 0
    assert "--num-experts N routed experts per layer (default: 8)" in text
    assert "(default: 32,32,32,32,32)" in text
    assert "(default: bf16)" in text
    assert "omni-ep make-checkpoint ./tiny --num-experts 16 --top-k 4" in text


def test_help_lists_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    assert "make-checkpoint" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.split() == ["omni-ep", cli.version("omni-ep")]


def test_help_imports_nothing_slow() -> None:
    probe = "import sys, omni_ep.cli; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["make-checkpoint", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"made {tmp_path / 'out'}\n")
    rows = dict(line.strip().split("  ", 1) for line in printed.out.splitlines()[1:])
    assert {file.name for file in (tmp_path / "out").iterdir()} < set(rows)
    assert rows["parameters"].strip() == "2,967,435 in 5,934,870 bytes"
    assert rows["of routed experts"].strip() == "393,216 in 786,432 bytes"
    assert "5.93M" in printed.err

    assert cli.main(["make-checkpoint", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("already there: ")
    assert printed.err == ""


def test_json_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--num-experts",
        "4",
        "--vae-block-channels",
        "32,32,32,64,64",
        "--dtype",
        "fp32",
        "--num-shards",
        "2",
    ]
    assert cli.main(["make-checkpoint", str(tmp_path / "out"), *sizes, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    totals = inventory(
        CheckpointSpec(num_experts=4, vae_block_channels=(32, 32, 32, 64, 64), dtype="fp32", num_shards=2)
    )
    assert told["made"] is True
    assert told["path"] == str(tmp_path / "out")
    assert told["files"] == {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()}
    assert (told["parameters"], told["bytes"]) == (totals.parameters, totals.bytes)
    assert (told["expert_parameters"], told["expert_bytes"]) == (
        totals.expert_parameters,
        totals.expert_bytes,
    )
    assert len(list((tmp_path / "out").glob("model-*-of-0002.safetensors"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-k", "9"], "omni-ep: error: top_k (9) must not exceed num_experts (8).\n"),
        (["--num-shards", "999"], "omni-ep: error: num_shards (999) must not exceed the 320 tensors.\n"),
    ],
)
def test_impossible_sizes_exit_2_with_one_sentence(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run("make-checkpoint", tmp_path / "out", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith(message)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_malformed_arguments_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--vae-block-channels", "32;32"], ["--dtype", "fp16"], ["--seed", "x"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["make-checkpoint", str(tmp_path / "out"), *arguments])
        assert exit_.value.code == 2
    assert "'32;32' is not whole numbers separated by commas" in capsys.readouterr().err


def test_no_command_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_folder_in_the_way_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert cli.main(["make-checkpoint", str(tmp_path)]) == 2
    assert "is not a complete checkpoint" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_unwritable_place_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["make-checkpoint", str(tmp_path / "file" / "out")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("omni-ep: error: ")


def test_ctrl_c_exits_130_quietly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_ep.cli", "make-checkpoint", tmp_path / "out", "--num-layers", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    # The progress bar shows that the weights are being written.
    begun = process.stderr.read(8)
    os.kill(process.pid, signal.SIGINT)
    out, rest = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in begun + rest
    assert not list(tmp_path.iterdir())


def test_every_size_is_an_option() -> None:
    parsed = cli.build_parser().parse_args(["make-checkpoint", "out"])
    assert CheckpointSpec(
        **{name: getattr(parsed, name) for name in CheckpointSpec.__dataclass_fields__}
    ) == (CheckpointSpec())
    assert parsed.run is command.run
