# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a checkpoint one rank needs, decided from headers before any weight is read.

| tensor | what a rank reads |
|---|---|
| one expert's weight | its own experts whole, others not at all |
| all experts in one, ``[num_experts, ...]`` | its own experts' slices, one by one |
| an expert's scale, at most ``SMALL_SCALE_BYTES`` | every expert's: some kernels need their maximum |
| ``qkv_proj``, ``gate_and_up_proj`` of dense and shared MLPs, ``wte`` | the rows of its TP rank |
| ``o_proj``, ``down_proj`` | whole: TP splits their second dimension, which is not contiguous |
| ``lm_head``, gate, norms, VAE, vision, embedders | whole: every rank holds them whole |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from omni_ep.errors import ConfigurationError
from omni_ep.geometry import MoEGeometry
from omni_ep.loading.headers import Checkpoint, TensorHeader
from omni_ep.loading.names import ExpertName, parse_expert, parse_layer
from omni_ep.placement import ExpertPlacement

SMALL_SCALE_BYTES = 64 * 1024
"""Scales up to this size per expert are read for all experts."""

VOCABULARY_PADDING = 64
"""Rows that vLLM pads an embedding to before it splits it (vocab_parallel_embedding.py:35)."""

LARGE_TENSOR_BYTES = 64 * 2**20
"""Tensors from this size on are read first, largest first, while little of the model is in memory yet."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRole:
    """What one rank holds.

    Attributes:
        experts: global ids of its experts, by MoE layer.
        tp_rank, tp_size: its place in the tensor-parallel group; size 1 reads dense weights whole.
    """

    experts: Mapping[int, Collection[int]]
    tp_rank: int = 0
    tp_size: int = 1

    @classmethod
    def linear(
        cls, geometry: MoEGeometry, *, ep_rank: int, ep_size: int, tp_rank: int = 0, tp_size: int = 1
    ) -> RankRole:
        """The role under linear placement, the same experts in every layer."""
        local = ExpertPlacement.linear(geometry.num_experts, ep_size).local_experts(ep_rank)
        return cls(experts=dict.fromkeys(geometry.moe_layers, local), tp_rank=tp_rank, tp_size=tp_size)


class Read(NamedTuple):
    """One tensor to hand to the model.

    Attributes:
        name: the name the model sees; for a slice of a fused tensor, the per-expert name.
        header: the stored tensor.
        offset: byte of the file where the handed-out tensor begins.
        shape: of the handed-out tensor.
        ranges: ``(start, stop)`` bytes of it that are read, ascending. The rest is left unset: the
            tensor-parallel weight loaders of vLLM cut these very rows out of the full shape.
    """

    name: str
    header: TensorHeader
    offset: int
    shape: tuple[int, ...]
    ranges: Ranges

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        total = 0
        for start, stop in self.ranges:
            total += stop - start
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingPlan:
    """What a rank reads of a checkpoint.

    Attributes:
        reads: in reading order.
        unasked: names of tensors that nothing in the model asks for; they are not read.
        bytes_needed: of all reads.
        bytes_skipped: of the checkpoint's tensors, the rest.
    """

    reads: tuple[Read, ...]
    unasked: tuple[str, ...]
    bytes_needed: int
    bytes_skipped: int

    @property
    def read_by_name(self) -> dict[str, Read]:
        """Reads by the name the model sees."""
        return {read.name: read for read in self.reads}


def plan_loading(
    checkpoint: Checkpoint,
    geometry: MoEGeometry,
    role: RankRole,
    *,
    has_home: Callable[[str], bool] = lambda name: True,
    split_dense: bool = True,
) -> LoadingPlan:
    """Decide what a rank reads.

    Args:
        checkpoint: the headers.
        geometry: of the model.
        role: what the rank holds.
        has_home: whether the model has a place for a tensor of this name.
        split_dense: read only a TP rank's rows of dense weights; off for quantized checkpoints, whose
            rows may be packed.

    Raises:
        ConfigurationError: a tensor of all experts does not have a row for each of them.
    """
    reads: list[Read] = []
    unasked: list[str] = []
    for header in checkpoint.tensors.values():
        expert = parse_expert(header.name)
        known = _in_known_layer(header.name, geometry) if expert is None else _is_known(expert, geometry)
        if not known or not has_home(header.name):
            unasked.append(header.name)
        elif expert is not None:
            reads += _expert_reads(header, expert, geometry, role)
        else:
            ranges = _dense_ranges(header, geometry, role) if split_dense else None
            reads.append(_read(header, ranges=ranges))
    reads.sort(key=_reading_order)
    needed = sum(read.nbytes for read in reads)
    return LoadingPlan(
        reads=tuple(reads),
        unasked=tuple(sorted(unasked)),
        bytes_needed=needed,
        bytes_skipped=checkpoint.nbytes - needed,
    )


def _is_known(name: ExpertName, geometry: MoEGeometry) -> bool:
    in_range = name.expert is None or name.expert < geometry.num_experts
    return in_range and name.layer in geometry.moe_layers


def _in_known_layer(name: str, geometry: MoEGeometry) -> bool:
    layer = parse_layer(name)
    return layer is None or layer < geometry.num_layers


def _reading_order(read: Read) -> tuple[int, str, int]:
    size = read.nbytes
    return (-size if size >= LARGE_TENSOR_BYTES else 0, read.header.file.name, read.offset)


def _read(header: TensorHeader, *, ranges: Ranges | None = None) -> Read:
    return Read(
        name=header.name,
        header=header,
        offset=header.offset,
        shape=header.shape,
        ranges=((0, header.nbytes),) if ranges is None else ranges,
    )


def _expert_reads(
    header: TensorHeader, name: ExpertName, geometry: MoEGeometry, role: RankRole
) -> Iterator[Read]:
    local = role.experts[name.layer]
    if name.expert is not None:
        if name.expert in local or (name.is_scale and header.nbytes <= SMALL_SCALE_BYTES):
            yield _read(header)
        return
    if not header.shape or header.shape[0] != geometry.num_experts:
        raise ConfigurationError(
            f"{header.file} holds {header.name} with shape {list(header.shape)}, one row for each of "
            f"{geometry.num_experts} experts was expected; use the config.json that belongs to these weights"
        )
    small_scale = name.is_scale and header.row_bytes <= SMALL_SCALE_BYTES
    for expert in range(geometry.num_experts):
        if expert in local or small_scale:
            yield Read(
                name=name.of_expert(expert),
                header=header,
                offset=header.offset + expert * header.row_bytes,
                shape=header.shape[1:],
                ranges=((0, header.row_bytes),),
            )


def _dense_ranges(header: TensorHeader, geometry: MoEGeometry, role: RankRole) -> Ranges | None:
    """Byte ranges of the rows of this TP rank; ``None`` to read the tensor whole."""
    if role.tp_size == 1 or len(header.shape) != 2:
        return None
    rows: list[tuple[int, int]] | None = None
    if header.name == "model.wte.weight":
        rows = _embedding_rows(header.shape[0], role)
    elif header.name.startswith("model.layers.") and header.name.endswith(".gate_and_up_proj.weight"):
        rows = _gate_and_up_rows(header.shape[0], role)
    elif header.name.startswith("model.layers.") and header.name.endswith(".self_attn.qkv_proj.weight"):
        rows = _interleaved_qkv_rows(geometry, role)
    if rows is None:
        return None
    size = header.row_bytes
    return tuple((start * size, stop * size) for start, stop in _merged(rows))


def _embedding_rows(rows: int, role: RankRole) -> list[tuple[int, int]] | None:
    padded = -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
    if padded % role.tp_size:
        return None
    share = padded // role.tp_size
    start = min(role.tp_rank * share, rows)
    return [(start, min(start + share, rows))]


def _gate_and_up_rows(rows: int, role: RankRole) -> list[tuple[int, int]] | None:
    half = rows // 2
    if rows % 2 or half % role.tp_size:
        return None
    share = half // role.tp_size
    return [(base + role.tp_rank * share, base + (role.tp_rank + 1) * share) for base in (0, half)]


def _interleaved_qkv_rows(geometry: MoEGeometry, role: RankRole) -> list[tuple[int, int]] | None:
    """Rows of a rank's heads; the tensor holds, per KV head, its query heads, one key and one value head."""
    heads, kv_heads, width = geometry.num_attention_heads, geometry.num_key_value_heads, geometry.head_dim
    tp = role.tp_size
    if heads % tp or heads % kv_heads or max(kv_heads, tp) % min(kv_heads, tp):
        return None
    group = heads // kv_heads
    block = group + 2
    share = heads // tp
    queries = range(role.tp_rank * share, (role.tp_rank + 1) * share)
    if kv_heads >= tp:
        keys = range(role.tp_rank * (kv_heads // tp), (role.tp_rank + 1) * (kv_heads // tp))
    else:
        # Each KV head is replicated on tp / kv_heads consecutive ranks.
        keys = range(role.tp_rank * kv_heads // tp, role.tp_rank * kv_heads // tp + 1)
    head_slots = [query // group * block + query % group for query in queries]
    head_slots += [key * block + group + part for key in keys for part in (0, 1)]
    return [(slot * width, (slot + 1) * width) for slot in sorted(head_slots)]


def _merged(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Touching ranges joined, empty ones dropped; ``rows`` ascend."""
    merged: list[tuple[int, int]] = []
    for start, stop in rows:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return merged
