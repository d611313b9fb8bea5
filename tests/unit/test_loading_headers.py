# SPDX-License-Identifier: Apache-2.0
"""Damage is found from the headers alone, each kind with one sentence that names file and expectation."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from omni_ep.config import check_checkpoint_folder
from omni_ep.errors import ConfigurationError
from omni_ep.loading import check_against_config, read_checkpoint, read_headers
from omni_ep.loading.expectations import expert_tensors
from tests.shards import DAMAGES, EXPERT, INDEX, SHARD, TINY, copy_of_tiny, entries, header_of, put_shard

CONFIG = json.loads((TINY / "config.json").read_text())


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_against_config(read_checkpoint(folder), json.loads((folder / "config.json").read_text()))
    return str(caught.value)


def test_sound_checkpoint() -> None:
    checkpoint = read_checkpoint(TINY)
    check_against_config(checkpoint, json.loads((TINY / "config.json").read_text()))
    assert len(checkpoint.tensors) == 320
    # Nothing of a file is unaccounted for.
    assert checkpoint.nbytes + checkpoint.header_bytes == sum(
        file.stat().st_size for file in TINY.glob("*.safetensors")
    )
    header, _ = header_of(TINY / SHARD)
    name = next(name for name in header if name != "__metadata__")
    tensor = checkpoint.tensors[name]
    assert (tensor.dtype, list(tensor.shape)) == (header[name]["dtype"], header[name]["shape"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage(damage: str, tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "model")
    do, text = DAMAGES[damage]
    do(folder)
    said = refusal(folder)
    assert re.search(text, said), said
    assert str(folder) in said
    assert "\n" not in said


@pytest.fixture
def traversable_copy() -> Iterator[Path]:
    """A copy that another user could reach, unlike pytest's own folders."""
    parent = Path(tempfile.mkdtemp(prefix="omni-ep-test-"))
    parent.chmod(0o755)
    yield copy_of_tiny(parent / "model")
    shutil.rmtree(parent)


def test_unreadable_permissions(traversable_copy: Path) -> None:
    (traversable_copy / SHARD).chmod(0)
    user = os.geteuid()
    if user == 0:
        # Root reads everything; act as somebody else.
        os.seteuid(65534)
    try:
        said = refusal(traversable_copy)
    finally:
        os.seteuid(user)
    assert f"{SHARD} cannot be read (Permission denied), a safetensors shard was expected" in said
    assert said.endswith("give this user read permission")


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere cannot be read .*a folder with"):
        read_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("header", "data", "text"),
    [
        (b"{" + b" " * 20, b"", r"a JSON object was expected \(.*truncated"),
        (b"[]", b"", r"a JSON object was expected \(.*got `array`"),
        (b'{"a": ' + b"[" * 9999, b"", r"a JSON object was expected \(.*recursion"),
        (b'{"a": "\xff"}', b"", "a JSON object was expected"),
        (
            b'{"a": {"dtype": "\xff", "shape": [1], "data_offsets": [0, 1]}}',
            b"x",
            "a JSON object was expected .*utf-8",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}',
            b"x",
            r"were expected for a, got {.*Expected `int`, got `bool` - at `\$.shape\[0\]`",
        ),
        (b'{"a": {"dtype": "F32"}}', b"", "dtype, shape and data_offsets were expected for a"),
        (
            b'{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}',
            b"x",
            "dtype, shape and data_offsets were expected for a",
        ),
        (b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}', b"x", "holds a as F4, one of BOOL"),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
            b"1234",
            r"a \(F32, shape \[2\]\) needs 8 bytes, it gives it 4",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}',
            b"12",
            r"a starts at byte \d+ of the file, byte \d+ was expected",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
            b' "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}',
            b"123",
            "b starts at byte",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},'
            b' "a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
            b"",
            "names a twice",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},'
            b' "\\u0061": {"dt\\u0079pe": "U8", "sh\\u0061pe": [0], "data_\\u006fffsets": [0, 0]}}',
            b"",
            "names a twice",
        ),
        (
            b'{"a":null,"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            b"",
            "names a twice",
        ),
        (
            b'{"__metadata__":{},"__metadata__":{},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            b"",
            "names __metadata__ twice",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [%s], "data_offsets": [0, 1]}}'
            % b",".join([b"%d" % 2**62] * 400),
            b"x",
            "needs over 2.64 bytes, it gives it 1",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [0, 100000000000000000000], "data_offsets": [0, 0]}}',
            b"",
            "were expected for a, got",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [1], "shape": [0], "data_offsets": [0, 0]}}',
            b"",
            "names shape twice",
        ),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"12", "were expected from its"),
    ],
)
def test_headers_that_cannot_be(header: bytes, data: bytes, text: str, tmp_path: Path) -> None:
    put_shard(tmp_path / "a.safetensors", header, data)
    with pytest.raises(ConfigurationError, match=text) as caught:
        read_headers([tmp_path / "a.safetensors"])
    assert "a.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is truncated: 8 bytes were expected for the length of its header, it has 0"),
        ((2**60).to_bytes(8, "little") + b"{}", "it gives its length as"),
    ],
)
def test_files_without_a_header(content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ConfigurationError, match=text):
        read_headers([tmp_path / "a.safetensors"])


def test_a_header_as_the_library_writes_it_needs_no_second_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"b": torch.zeros(3), "a": torch.zeros(2, 2)}, tmp_path / "a.safetensors", {"format": "pt"})
    monkeypatch.setattr("omni_ep.loading.headers.json.loads", pytest.fail)
    assert sorted(read_headers([tmp_path / "a.safetensors"]).tensors) == ["a", "b"]


def test_ten_thousand_names_of_which_one_comes_twice(tmp_path: Path) -> None:
    entry = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    names = [*range(10000), 9999]
    put_shard(tmp_path / "a.safetensors", b"{%s}" % b",".join(b'"%d":%s' % (name, entry) for name in names))
    with pytest.raises(ConfigurationError, match="names 9999 twice"):
        read_headers([tmp_path / "a.safetensors"])


def test_a_pipe_in_place_of_a_shard(tmp_path: Path) -> None:
    """Opening it would wait for somebody to write."""
    os.mkfifo(tmp_path / "a.safetensors")
    # Where it is opened all the same, this test is to fail rather than to wait.
    writer = os.open(tmp_path / "a.safetensors", os.O_RDWR)
    try:
        os.write(writer, bytes(1000))
        with pytest.raises(
            ConfigurationError, match=r"a.safetensors is not a regular file, a safetensors shard was"
        ):
            read_checkpoint(tmp_path)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[" * 100_000, "is not valid JSON .*recursion"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git-LFS pointer of 42 bytes, a JSON index was"),
        (b'{"weight_map": {"a": "%s"}}' % (b"x" * 300), r"cannot be read \(File name too long\)"),
    ],
)
def test_an_index_that_cannot_be(content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ConfigurationError, match=text):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_nested_json_is_a_sentence_for_the_commands(name: str, tmp_path: Path) -> None:
    (copy_of_tiny(tmp_path / "model") / name).write_bytes(b"[" * 100_000)
    with pytest.raises(ConfigurationError, match=f"{name} is not valid JSON"):
        check_checkpoint_folder(tmp_path / "model")


@pytest.mark.parametrize("weight_map", [[1], "x", {"a": ["x"]}, {"a": 1, "b": None}])
def test_an_index_of_another_kind_is_left_to_the_reader_of_headers(weight_map: Any, tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "model")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    check_checkpoint_folder(folder)
    with pytest.raises(ConfigurationError, match=f"{INDEX} must hold a weight_map from"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "alias",
    [
        "draft.layers.0.mlp.experts.5.down_proj.weight",
        "model.layers.00.mlp.experts.5.down_proj.weight",
        "model.layers.0.mlp.experts.05.down_proj.weight",
        "model.layers.0.mlp.experts.\u0665.down_proj.weight",
        "model.layers.0.mlp.experts.5.down_proj.weight\n",
        f"model.layers.0.mlp.experts.{'9' * 5000}.down_proj.weight",
    ],
)
def test_another_name_is_not_the_expert(alias: str, tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "model")
    (folder / INDEX).unlink()
    header, data = header_of(folder / SHARD)
    put_shard(
        folder / SHARD, {alias if name == EXPERT else name: entry for name, entry in header.items()}, data
    )
    checkpoint = read_checkpoint(folder)
    assert alias in checkpoint.tensors
    with pytest.raises(ConfigurationError, match=rf"layer 0, expert 5: no shard of .* holds {EXPERT}"):
        check_against_config(checkpoint, CONFIG)


def test_an_expert_alone_and_among_all(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "model")
    (folder / INDEX).unlink()
    name = "model.layers.0.mlp.experts.down_proj.weight"
    header, size = entries({name: ("BF16", (8, 128, 64))})
    put_shard(folder / "more.safetensors", header, bytes(size))
    with pytest.raises(ConfigurationError, match=rf"holds {name}, .*: expert 0 of layer 0 comes twice"):
        check_against_config(read_checkpoint(folder), CONFIG)


def test_rows_without_bytes_are_not_counted_up(tmp_path: Path) -> None:
    """A header may claim any number of them."""
    header, _ = entries({"model.layers.0.mlp.experts.foo": ("BF16", (10**5, 0))})
    put_shard(tmp_path / "a.safetensors", header)
    assert len(expert_tensors(read_checkpoint(tmp_path), 8)) == 2 * 8


def test_scalars_empty_tensors_and_metadata(tmp_path: Path) -> None:
    header, size = entries({"scalar": ("F32", ()), "empty": ("U8", (0, 4)), "rows": ("BF16", (3, 2))})
    put_shard(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, **header}, bytes(size))
    tensors = read_headers([tmp_path / "a.safetensors"]).tensors
    assert {name: (tensor.nbytes, tensor.row_bytes) for name, tensor in tensors.items()} == {
        "scalar": (4, 4),
        "empty": (0, 0),
        "rows": (12, 4),
    }


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_index_without_a_weight_map(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ConfigurationError, match="must hold a weight_map"):
        read_checkpoint(tmp_path)


def _config(**changes: Any) -> dict[str, Any]:
    return {**json.loads((TINY / "config.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": 640}, r"model.wte.weight with shape \[320, 128\], config.json expects \[640, 128\]"),
        ({"num_hidden_layers": 3, "moe_topk": 2, "moe_intermediate_size": 64, "num_shared_expert": 1},
         r"has no tensor model.layers.2.input_layernorm.weight in any shard, config.json expects it"),
        ({"torch_dtype": "float32"}, r"experts.0.gate_and_up_proj.weight as BF16, F32 was expected"),
    ],
)  # fmt: skip
def test_config_of_another_model(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        check_against_config(read_checkpoint(TINY), _config(**changes))


def test_quantized_checkpoints_are_held_to_their_experts_only() -> None:
    quantized = _config(vocab_size=640, quantization_config={"quant_method": "fp8"})
    check_against_config(read_checkpoint(TINY), quantized)
    with pytest.raises(ConfigurationError, match="layer 0, expert 8: no shard"):
        check_against_config(read_checkpoint(TINY), {**quantized, "num_experts": 9})
