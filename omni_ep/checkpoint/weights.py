# SPDX-License-Identifier: Apache-2.0
"""Random values for the tensors of a checkpoint, and the safetensors files that hold them.

The files are written here rather than by the safetensors library because its NumPy side has no bfloat16 and
takes a whole shard in memory; the format (a length, a JSON header, little-endian data) is fixed and short.
"""

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import prod, sqrt
from pathlib import Path

import numpy as np

from omni_ep.checkpoint.inventory import Shape, Tensor
from omni_ep.checkpoint.spec import DTYPE_BYTES, CheckpointSpec

_SAFETENSORS_DTYPE = {"bf16": "BF16", "fp32": "F32"}


def tensor_bytes(name: str, shape: Shape, spec: CheckpointSpec) -> bytes:
    """The tensor's data, little-endian in `spec.dtype`; no other tensor or call has a part in it."""
    digest = sha256(f"{spec.seed}\0{name}".encode()).digest()
    values = np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(shape, dtype=np.float32)
    mean, deviation = _moments(name, shape, spec)
    values *= np.float32(deviation)
    values += np.float32(mean)
    if spec.dtype == "fp32":
        return values.astype("<f4").tobytes()
    return _bfloat16_words(values).astype("<u2").tobytes()


def _moments(name: str, shape: Shape, spec: CheckpointSpec) -> tuple[float, float]:
    """Mean and standard deviation that keep activations near 1 from the first layer to the picture."""
    if name.endswith(".bias"):
        # Not zero: a loader that forgot a bias would go unseen.
        return 0.0, 0.02
    if len(shape) == 1:
        # Norm weights; not exactly one for the same reason.
        return 1.0, 0.05
    if name == "model.wte.weight":
        return 0.0, 1.0
    gain = 1.0
    if ".mlp.experts." in name and ".down_proj." in name:
        # A token averages top_k independent experts and SwiGLU shrinks each: without this gain the residual
        # would drown the routed sum, and a misplaced expert would hardly show in the picture.
        gain = sqrt(2 * spec.top_k)
    return 0.0, gain / sqrt(prod(shape[1:]))


def _bfloat16_words(values: np.ndarray) -> np.ndarray:
    """float32 to the upper 16 bits, rounded to nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def split_into_shards(tensors: Sequence[Tensor], num_shards: int) -> list[list[Tensor]]:
    """Cuts the sequence, order kept, into exactly `num_shards` non-empty runs of about equal size."""
    total = sum(prod(shape) for _, shape in tensors)
    shards: list[list[Tensor]] = [[]]
    done = 0
    for index, tensor in enumerate(tensors):
        shards_left = num_shards - len(shards)
        must_cut = len(tensors) - index <= shards_left
        if shards[-1] and shards_left and (must_cut or done * num_shards >= total * len(shards)):
            shards.append([])
        shards[-1].append(tensor)
        done += prod(tensor[1])
    return shards


def write_shard(
    path: Path, tensors: Sequence[Tensor], spec: CheckpointSpec, progress: Callable[[int], object] | None
) -> None:
    """Writes one safetensors file, one tensor in memory at a time; `progress` is told the bytes of each."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        end = offset + prod(shape) * DTYPE_BYTES[spec.dtype]
        header[name] = {
            "dtype": _SAFETENSORS_DTYPE[spec.dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, shape in tensors:
            data = tensor_bytes(name, shape, spec)
            file.write(data)
            if progress is not None:
                progress(len(data))
