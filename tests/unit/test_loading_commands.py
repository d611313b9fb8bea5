# SPDX-License-Identifier: Apache-2.0
"""The example refuses damage before a rank starts; `omni-ep inspect` shows what is there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omni_ep import cli
from omni_ep.errors import ConfigurationError
from omni_ep.loading import LoadingSettings
from tests.shards import DAMAGES, INDEX, TINY, copy_of_tiny, entries, put_shard

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_to_image" / "text_to_image.py"

#: Runs the example on each folder in one process and says whether the engine was even imported.
PROGRAM = """
import contextlib, io, json, multiprocessing, runpy, sys
example = runpy.run_path(sys.argv[1], run_name="example")
for folder in sys.argv[2:]:
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        code = example["main"](["--model", folder, "--enable-expert-parallel", "--tensor-parallel-size", "2"])
    print(json.dumps([folder, code, text.getvalue(), multiprocessing.active_children(),
                      "vllm_omni.diffusion" in sys.modules]))
"""


def test_the_example_refuses_damage_before_a_rank_starts(tmp_path: Path) -> None:
    folders = {}
    for number, (do, text) in enumerate(DAMAGES.values()):
        do(folder := copy_of_tiny(tmp_path / str(number)))
        folders[str(folder)] = text
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(EXAMPLE), *folders], capture_output=True, text=True, timeout=120
    )
    answers = [json.loads(line) for line in output.stdout.splitlines() if line.startswith("[")]
    assert [answer[0] for answer in answers] == list(folders), output.stderr
    for folder, code, said, children, engine_imported in answers:
        assert code == 2, said
        assert re.search(folders[folder], said), said
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert children == []
        assert not engine_imported


def test_inspect_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--tensor-parallel-size", "2", "--cfg-parallel-size", "2", "--enable-expert-parallel"]
    assert cli.main(["inspect", str(TINY), *layout, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layers"], report["moe_layers"], report["experts"]) == (2, 2, 8)
    assert report["bytes_by_part"]["routed experts"] == 2 * 8 * 3 * 128 * 64 * 2
    assert report["bytes_by_dtype"] == {"BF16": report["bytes"]}
    assert sum(report["bytes_by_part"].values()) == report["bytes"]
    assert [rank["experts"] for rank in report["ranks"]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    skipped_experts = 2 * 6 * 3 * 128 * 64 * 2
    # Half of qkv (2 layers of 256 x 128), of the shared gate and up (128 x 128) and of wte (320 x 128).
    skipped_rows = (2 * 256 * 128 + 2 * 128 * 128 + 320 * 128) * 2 // 2
    for rank in report["ranks"]:
        assert rank["bytes_skipped"] == skipped_experts + skipped_rows
        assert rank["bytes_needed"] + rank["bytes_skipped"] == report["bytes"]


def test_inspect_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(TINY), "--data-parallel-size", "2", "--enable-expert-parallel"]) == 0
    shown = capsys.readouterr().out
    assert "2 layers, 2 of them with 8 experts each" in shown
    assert re.search(r"routed experts +786,432 +13\.3%", shown)
    assert re.search(r"1  4-7 +5,541,654", shown)


def test_inspect_without_ep_says_what_stock_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(TINY), "--tensor-parallel-size", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [rank["bytes_needed"] for rank in report["ranks"]] == [report["bytes"]] * 2
    assert [rank["experts"] for rank in report["ranks"]] == [list(range(8))] * 2
    assert report["ep_size"] == 1


def test_inspect_lists_what_no_rank_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign module, an expert and a layer too many; a bias may belong to the model."""
    folder = copy_of_tiny(tmp_path / "model")
    (folder / INDEX).unlink()
    foreign = ["layers.0.foo.weight", "layers.0.mlp.experts.8.down_proj.weight", "layers.0.mlp.weight"]
    foreign = [f"model.{name}" for name in (*foreign, "layers.2.input_layernorm.weight")]
    bias = "model.layers.0.self_attn.qkv_proj.bias"
    put_shard(
        folder / "more.safetensors", entries(dict.fromkeys([*foreign, bias], ("BF16", (3,))))[0], bytes(30)
    )
    layout = ["--tensor-parallel-size", "2", "--enable-expert-parallel"]
    assert cli.main(["inspect", str(TINY), *layout, "--json"]) == 0
    sound = json.loads(capsys.readouterr().out)
    assert cli.main(["inspect", str(folder), *layout, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (sound["unasked"], report["unasked"]) == ([], sorted(foreign))
    for rank, other in zip(report["ranks"], sound["ranks"], strict=True):
        assert rank["bytes_needed"] == other["bytes_needed"] + 6
    assert cli.main(["inspect", str(folder), *layout]) == 0
    assert f"does not ask for them: {', '.join(sorted(foreign))}" in capsys.readouterr().out


def test_inspect_refuses_what_a_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--tensor-parallel-size", "3", "--enable-expert-parallel"]
    assert cli.main(["inspect", str(TINY), *layout]) == 2
    assert "8 experts cannot be divided equally among EP=3" in capsys.readouterr().err
    assert cli.main(["inspect", str(TINY), "--cfg-parallel-size", "3"]) == 2
    assert "guidance has two branches" in capsys.readouterr().err
    do, text = DAMAGES["truncated shard"]
    do(copy_of_tiny(tmp_path / "model"))
    assert cli.main(["inspect", str(tmp_path / "model")]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_inspect_imports_no_torch() -> None:
    program = (
        "import sys; from omni_ep.cli import main; main(['inspect', sys.argv[1]]); "
        "print({'torch', 'vllm'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, str(TINY)], capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines()[-1] == "set()"


def test_settings_are_checked() -> None:
    assert LoadingSettings.from_additional_config(None) == LoadingSettings()
    assert LoadingSettings.from_additional_config({"omni_ep": {"check_weights": True}, "x": 1}).check_weights
    with pytest.raises(ConfigurationError, match="has no setting 'check_weigths'; it has check_weights and"):
        LoadingSettings.from_additional_config({"omni_ep": {"check_weigths": True}})
    with pytest.raises(ConfigurationError, match=r"must map check_weights and filter_weights .*, got True"):
        LoadingSettings.from_additional_config({"omni_ep": True})
    with pytest.raises(
        ConfigurationError, match=r'\["omni_ep"\]\["check_weights"\] must be true or false, got'
    ):
        LoadingSettings.from_additional_config({"omni_ep": {"check_weights": "yes"}})
