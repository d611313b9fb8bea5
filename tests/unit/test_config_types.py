# SPDX-License-Identifier: Apache-2.0
"""A config.json with a value of the wrong kind ends in a sentence, whichever command meets it first."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from omni_ep import cli
from omni_ep.config_types import KINDS, NULLABLE, check_types
from omni_ep.errors import ConfigurationError

MODEL = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"


def _with(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(config))
    *parents, key = path.split(".")
    place = changed
    for parent in parents:
        place = place[parent]
    place[key] = value
    return changed


@pytest.fixture
def config() -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
    return contents


def test_a_good_one_passes(config: dict[str, Any]) -> None:
    check_types(config, "config.json")
    check_types({}, "config.json")


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("value", ["x", -1, 1.5, True, [None]])
def test_wrong_kinds_are_named(config: dict[str, Any], path: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_types(_with(config, path, value), "here/config.json")
    assert f"here/config.json: {path} must be {KINDS[path][1]}, got {value!r}" in str(error.value)


@pytest.mark.parametrize("path", KINDS)
def test_null_counts_where_there_is_a_default(config: dict[str, Any], path: str) -> None:
    changed = _with(config, path, None)
    if path in NULLABLE:
        check_types(changed, "config.json")
    else:
        with pytest.raises(ConfigurationError, match=f"{path} must be"):
            check_types(changed, "config.json")


def test_another_familys_keys_are_its_own(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A VAE named by its path, say, is nothing that the planner asks of other models."""
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({**config, "architectures": ["OtherMoE"], "vae": "vae", "patch_size": [1, 2, 2]})
    )
    assert cli.main(["plan", str(file)]) == 0
    file.write_text(json.dumps({**config, "vae": "vae"}))
    assert cli.main(["plan", str(file)]) == 2
    assert "vae must be a JSON object, got 'vae'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "value"), [("vocab_size", "many"), ("vae.latent_channels", None), ("moe_layer_num_skipped", "x")]
)
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_commands_say_it_in_a_sentence(
    command: str,
    path: str,
    value: object,
    config: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "config.json").write_text(json.dumps(_with(config, path, value)))
    assert cli.main([command, str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("omni-ep: error: ")
    assert path in said
    assert repr(value) in said
