# SPDX-License-Identifier: Apache-2.0
"""Safetensors headers: what every shard says it holds, and whether the files can be what they say.

A shard is 8 bytes of header length (little-endian), that many bytes of JSON, then the data. Reading the
headers of 158 GB takes a few MB, so damage is found before any rank starts. Plain Python: neither torch nor
the safetensors library, whose errors name neither the file nor what was expected.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from omni_ep.errors import ConfigurationError

DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64"), 64),
}
"""Bits per element of every safetensors dtype that omni-ep can read."""

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct):
    """A tensor's entry as it is written."""

    dtype: str
    shape: tuple[_Whole, ...]
    data_offsets: tuple[_Whole, _Whole]


_decode_entry = msgspec.json.Decoder(_Entry).decode

_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_AGAIN = "download the file again"


# A named tuple, as are the other records of which a checkpoint has ten thousand: every rank makes them all,
# and a frozen dataclass takes longer to make.
class TensorHeader(NamedTuple):
    """One tensor of one shard.

    Attributes:
        dtype: safetensors' name, such as ``BF16``.
        offset: first byte of the data, counted from the start of the file.
        nbytes: bytes of the data.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension; of the whole tensor if it is a scalar."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All tensors of a checkpoint by name, and the bytes that had to be read to know them."""

    files: tuple[Path, ...]
    tensors: dict[str, TensorHeader]
    header_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not included."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def where(self) -> str:
        """The folder, for messages."""
        return str(self.files[0].parent)


def read_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a folder's shards and hold them against its index.

    Raises:
        ConfigurationError: the folder or a shard is missing, unreadable or damaged, or the index and the
            shards disagree; one sentence that names the file.
    """
    path = Path(folder)
    try:
        present = sorted(file for file in path.iterdir() if file.name.endswith(".safetensors"))
    except OSError as error:
        raise _unreadable(path, "a folder with *.safetensors files", error) from None
    index = path / "model.safetensors.index.json"
    if not index.exists():
        if not present:
            raise ConfigurationError(
                f"{path} holds no *.safetensors file, at least one was expected; download the checkpoint "
                "again"
            )
        return read_headers(present)
    placed = _read_index(index)
    for name in sorted(set(placed.values())):
        if not _exists(path / name):
            raise ConfigurationError(f"{path / name} is missing, {index.name} names it; {_AGAIN}")
    checkpoint = read_headers([path / name for name in sorted(set(placed.values()))])
    for tensor, shard in placed.items():
        found = checkpoint.tensors.get(tensor)
        if found is None:
            raise ConfigurationError(
                f"{path / shard} does not hold the tensor {tensor}, {index.name} expects it there; {_AGAIN}"
            )
        if found.file.name != shard:
            raise ConfigurationError(
                f"{found.file} holds the tensor {tensor}, {index.name} expects it in {shard}; download the "
                "checkpoint again"
            )
    return checkpoint


def read_headers(files: Sequence[str | os.PathLike[str]]) -> Checkpoint:
    """Read the headers of these shards.

    Raises:
        ConfigurationError: a shard is unreadable or damaged, or two hold the same tensor.
    """
    tensors: dict[str, TensorHeader] = {}
    header_bytes = 0
    paths = tuple(Path(file) for file in files)
    for file in paths:
        found, size = _read_shard(file)
        header_bytes += size
        for tensor in found:
            if tensor.name in tensors:
                raise ConfigurationError(
                    f"{file} holds the tensor {tensor.name} that {tensors[tensor.name].file.name} holds too, "
                    "one was expected; remove the shard that does not belong to this checkpoint"
                )
            tensors[tensor.name] = tensor
    return Checkpoint(files=paths, tensors=tensors, header_bytes=header_bytes)


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:
        # A name that no file can have.
        raise _unreadable(file, "a safetensors shard", error) from None


def _read_index(index: Path) -> dict[str, str]:
    try:
        text = index.read_bytes()
        if text.startswith(_LFS_POINTER):
            raise _pointer(index, len(text), "a JSON index")
        content = json.loads(text)
    except OSError as error:
        raise _unreadable(index, "a JSON index", error) from None
    except ConfigurationError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{index} is not valid JSON ({error}); {_AGAIN}") from None
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(placed, dict)
        or not placed
        or not all(isinstance(shard, str) and shard for shard in placed.values())
    ):
        raise ConfigurationError(f"{index} must hold a weight_map from tensor names to shard files; {_AGAIN}")
    return placed


def _read_shard(file: Path) -> tuple[list[TensorHeader], int]:
    """The tensors in file order, and the bytes read."""
    try:
        # Opening a pipe would wait for somebody to write into it.
        if not stat.S_ISREG(file.stat().st_mode):
            raise ConfigurationError(
                f"{file} is not a regular file, a safetensors shard was expected; {_AGAIN}"
            )
        with file.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(_LENGTH_BYTES) or b""
            length = _header_length(file, prefix, size, stream.read)
            text = _read_exactly(stream, length)
    except OSError as error:
        raise _unreadable(file, "a safetensors shard", error) from None
    if len(text) < length:
        raise _truncated(file, _LENGTH_BYTES + length, _LENGTH_BYTES + len(text), "its header")
    start = _LENGTH_BYTES + length
    tensors = _parse(file, text, start)
    _check_data(file, tensors, start, size)
    return tensors, start


def _header_length(file: Path, prefix: bytes, size: int, read: Any) -> int:
    if size >= _LENGTH_BYTES and (prefix + (read(64) or b""))[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise _pointer(file, size, "a safetensors shard")
    if len(prefix) < _LENGTH_BYTES:
        raise _truncated(file, _LENGTH_BYTES, size, "the length of its header")
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise _corrupt(file, f"it gives its length as {length} bytes, 2 to {MAX_HEADER_BYTES} were expected")
    if _LENGTH_BYTES + length > size:
        raise _truncated(file, _LENGTH_BYTES + length, size, "its header")
    return length


def _read_exactly(stream: Any, length: int) -> bytes:
    stream.seek(_LENGTH_BYTES)
    parts = []
    while length > 0 and (part := stream.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _parse(file: Path, text: bytes, start: int) -> list[TensorHeader]:
    try:
        content = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        _refuse_repeated_keys(file, text, content)
        content.pop("__metadata__", None)
    except ConfigurationError:
        raise
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"a JSON object was expected ({error})") from None
    tensors = [_tensor(file, name, entry, start) for name, entry in content.items()]
    return sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes))


def _refuse_repeated_keys(file: Path, text: bytes, content: Mapping[str, msgspec.Raw]) -> None:
    """JSON readers keep one of two equal keys and say nothing."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        kept = dict(pairs)
        if len(kept) < len(pairs):
            [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise _corrupt(file, f"it names {twice} twice, once was expected")
        return kept

    # A hook is a call per tensor. As the safetensors library writes a header, without spaces or escapes, a
    # tensor that came twice shows in the length and a key of an entry in how often it is written.
    entries = len(content) - ("__metadata__" in content)
    length = 1 + sum(len(name) + len(entry) + len('"":,') for name, entry in content.items())
    written = {text.count(b'"%s"' % key) for key in (b"dtype", b"shape", b"data_offsets")}
    if not text.isascii() or b"\\" in text or written != {entries} or len(text.rstrip()) != length:
        json.loads(text, object_pairs_hook=once)


def _tensor(file: Path, name: str, raw: msgspec.Raw, start: int) -> TensorHeader:
    try:
        entry = _decode_entry(raw)
    except (ValueError, RecursionError) as error:
        got = bytes(raw).decode(errors="replace")
        raise _corrupt(
            file, f"dtype, shape and data_offsets were expected for {name}, got {got:.80} ({error})"
        ) from None
    dtype, shape, (first, end) = entry.dtype, entry.shape, entry.data_offsets
    if dtype not in DTYPE_BITS:
        raise ConfigurationError(
            f"{file} holds {name} as {dtype}, one of {', '.join(DTYPE_BITS)} was expected; use a checkpoint "
            "in one of these formats"
        )
    expected = prod(shape) * DTYPE_BITS[dtype] // 8
    if end - first != expected:
        # Python refuses to write out numbers of thousands of digits.
        needed = str(expected) if expected < 2**64 else "over 2^64"
        raise _corrupt(
            file, f"{name} ({dtype}, shape {list(shape)}) needs {needed} bytes, it gives it {end - first}"
        )
    return TensorHeader(name=name, file=file, dtype=dtype, shape=shape, offset=start + first, nbytes=expected)


def _check_data(file: Path, tensors: Iterable[TensorHeader], start: int, size: int) -> None:
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            raise _corrupt(
                file, f"{tensor.name} starts at byte {tensor.offset} of the file, byte {end} was expected"
            )
        end += tensor.nbytes
    if size < end:
        raise _truncated(file, end, size, "its tensors")
    if size > end:
        raise ConfigurationError(f"{file} has {size} bytes, {end} were expected from its header; {_AGAIN}")


def _pointer(file: Path, size: int, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"{file} is a Git-LFS pointer of {size} bytes, {expected} was expected; run `git lfs pull` in its "
        "folder"
    )


def _truncated(file: Path, expected: int, found: int, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{file} is truncated: {expected} bytes were expected for {what}, it has {found}; {_AGAIN}"
    )


def _corrupt(file: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"{file} has a corrupt header: {why}; {_AGAIN}")


def _unreadable(path: Path, expected: str, error: OSError) -> ConfigurationError:
    fix = "give this user read permission" if isinstance(error, PermissionError) else "check the path"
    return ConfigurationError(f"{path} cannot be read ({error.strerror}), {expected} was expected; {fix}")
