# SPDX-License-Identifier: Apache-2.0
"""Safetensors files and checkpoints written by hand, sound and damaged."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from omni_ep.loading import read_checkpoint

TINY = Path(__file__).parent / "data" / "hunyuan_image3_tiny"
INDEX = "model.safetensors.index.json"
#: The shard of the tiny checkpoint that most damages are done to.
SHARD = "model-0001-of-0003.safetensors"
EXPERT = "model.layers.0.mlp.experts.5.down_proj.weight"

_BYTES = {"BF16": 2, "I16": 2, "F32": 4, "BOOL": 1, "U8": 1, "F8_E4M3": 1}


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a shard."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_shard(file: Path, header: Mapping[str, Any] | bytes, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entries(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Any], int]:
    """A header for tensors ``name → (dtype, shape)`` one after the other, and the bytes of their data."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return header, end


def copy_of_tiny(folder: Path) -> Path:
    shutil.copytree(TINY, folder)
    return folder


def damaged_expert(folder: Path, expert: int, word: bytes) -> Path:
    """A copy of the tiny checkpoint with one value of one expert overwritten."""
    copy_of_tiny(folder)
    name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
    header = read_checkpoint(folder).tensors[name]
    with header.file.open("r+b") as file:
        file.seek(header.offset + 10)
        file.write(word)
    return folder


def _truncate(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 100)


def _cut_header(folder: Path) -> None:
    os.truncate(folder / SHARD, 64)


def _corrupt_header(folder: Path) -> None:
    with (folder / SHARD).open("r+b") as file:
        file.seek(8)
        file.write(b"[[[[")


def _absent_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    header, data = header_of(folder / SHARD)
    change(header)
    put_shard(folder / SHARD, header, data)


def _absent_tensor(folder: Path) -> None:
    _rewrite(folder, lambda header: header.update({"other": header.pop(EXPERT)}))


def _nowhere(folder: Path) -> None:
    _absent_tensor(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["other"] = index["weight_map"].pop(EXPERT)
    (folder / INDEX).write_text(json.dumps(index))


def _wrong_shape(folder: Path) -> None:
    _rewrite(folder, lambda header: header[EXPERT].update(shape=header[EXPERT]["shape"][::-1]))


def _wrong_dtype(folder: Path) -> None:
    _rewrite(folder, lambda header: header[EXPERT].update(dtype="F16"))


def _duplicate(folder: Path) -> None:
    other = folder / "model-0002-of-0003.safetensors"
    header, data = header_of(other)
    extra, size = entries({EXPERT: ("BF16", (128, 64))})
    extra[EXPERT]["data_offsets"] = [len(data), len(data) + size]
    put_shard(other, {**header, **extra}, data + bytes(size))


def _empty_folder(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()


def _lfs_pointer(folder: Path) -> None:
    (folder / SHARD).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 1919696\n"
    )


#: name → (what is done to a copy of the tiny checkpoint, the text of the error).
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated shard": (_truncate, rf"{SHARD} is truncated: 1919696 bytes were expected .* it has 1919596"),
    "truncated header": (_cut_header, rf"{SHARD} is truncated: \d+ bytes were expected for its header"),
    "corrupt header": (_corrupt_header, rf"{SHARD} has a corrupt header: a JSON object was expected"),
    "absent shard": (_absent_shard, rf"{SHARD}"),
    "absent tensor": (_absent_tensor, rf"{SHARD} does not hold the tensor {EXPERT}, .*index.json expects it"),
    "tensor in no shard": (
        _nowhere,
        rf"layer 0, expert 5: no shard of .* holds {EXPERT} \(layer 0 is in {SHARD}\), config.json expects",
    ),
    "wrong shape": (_wrong_shape, rf"{SHARD} holds {EXPERT} with shape \[64, 128\], .* expects \[128, 64\]"),
    "wrong dtype": (_wrong_dtype, rf"{SHARD} holds {EXPERT} as F16, BF16 was expected"),
    "duplicate tensor": (
        _duplicate,
        rf"model-0002-of-0003.safetensors holds the tensor {EXPERT} that {SHARD} holds too, one was expected",
    ),
    "empty folder": (_empty_folder, r"holds no \*.safetensors file"),
    "Git-LFS pointer": (_lfs_pointer, rf"{SHARD} is a Git-LFS pointer of \d+ bytes, a safetensors shard was"),
}
