# SPDX-License-Identifier: Apache-2.0
"""Carries a loading plan out: positioned reads of the planned bytes and of nothing else.

Files are read with ``preadv`` rather than mapped. A mapped page counts as this process's memory and hides
from the operating system's read counters; the bytes read here can be held against ``/proc/self/io``.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from threading import Lock

import torch

from omni_ep.errors import ConfigurationError
from omni_ep.loading.headers import DTYPE_BITS
from omni_ep.loading.placement import Destination, Placement
from omni_ep.loading.plan import LoadingPlan, Read
from omni_ep.loading.runs import Piece, batches, bytes_of, runs

WINDOW_BYTES = 192 * 2**20
"""Bytes that may be read ahead of the model; one larger tensor without a placement passes alone."""

_BOUNCE_BYTES = 32 * 2**20
_FINITE_CHECK_BYTES = 32 * 2**20

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""torch's dtypes by safetensors' names."""


class PlannedReader:
    """Iterates over ``(name, tensor)`` of a plan; tensors are on CPU.

    Reads that have a placement are not handed out: after the last of the others they are read straight into
    their parameters.

    Attributes:
        bytes_read: what the operating system delivered so far.

    Args:
        plan: what to read, in which order.
        threads: reads that run at the same time.
        check_finite: refuse NaN and Inf.
        progress: told the bytes of each finished tensor.
        placements: where reads go that are not handed out, by name.
        placed: told each of those that is in place.
    """

    def __init__(
        self,
        plan: LoadingPlan,
        *,
        threads: int = 1,
        check_finite: bool = False,
        progress: Callable[[int], object] = lambda count: None,
        placements: Mapping[str, Placement] | None = None,
        placed: Callable[[Placement], object] = lambda placement: None,
    ) -> None:
        self.plan = plan
        self.placements = placements or {}
        self.placed = placed
        self.threads = max(1, threads)
        self.check_finite = check_finite
        self.progress = progress
        self.bytes_read = 0
        self._lock = Lock()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields in plan order, then fills what has a placement.

        Raises:
            ConfigurationError: a file is unreadable, ends early, or holds NaN or Inf.
        """
        descriptors: dict[Path, int] = {}
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="omni-ep-read")
        try:
            for file in sorted({read.header.file for read in self.plan.reads}):
                descriptors[file] = _open(file)
            yield from self._in_order(pool, descriptors)
            self._place_all(pool, descriptors)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _in_order(
        self, pool: ThreadPoolExecutor, descriptors: dict[Path, int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        waiting = deque(batches(read for read in self.plan.reads if read.name not in self.placements))
        running: deque[tuple[list[Read], int, Future[list[torch.Tensor]]]] = deque()
        ahead = 0
        while waiting or running:
            while waiting and (not running or ahead + bytes_of(waiting[0]) <= WINDOW_BYTES):
                batch = waiting.popleft()
                task = pool.submit(self._read, descriptors[batch[0].header.file], batch)
                running.append((batch, bytes_of(batch), task))
                ahead += bytes_of(batch)
            batch, size, task = running.popleft()
            tensors = task.result()
            # The task holds the tensors as well, and would keep them while the model copies the next.
            del task
            tensors.reverse()
            for read in batch:
                self.progress(read.nbytes)
                # Nor may this frame keep one that the model is done with.
                yield read.name, tensors.pop()
            ahead -= size

    def _read(self, descriptor: int, batch: Sequence[Read]) -> list[torch.Tensor]:
        # Pages of a buffer that no range touches are never backed by memory.
        buffers = [
            torch.empty(prod(read.shape) * DTYPE_BITS[read.header.dtype] // 8, dtype=torch.uint8)
            for read in batch
        ]
        views = [_memory_of(buffer) for buffer in buffers]
        pieces = [
            Piece(read, read.offset + start, view[start:stop])
            for read, view in zip(batch, views, strict=True)
            for start, stop in read.ranges
        ]
        self._fill(descriptor, pieces)
        return [
            buffer.view(TORCH_DTYPES[read.header.dtype]).view(read.shape)
            for read, buffer in zip(batch, buffers, strict=True)
        ]

    def _place_all(self, pool: ThreadPoolExecutor, descriptors: dict[Path, int]) -> None:
        # One view per parameter: tensors are slow to cut into an expert's bytes.
        memory: dict[int, memoryview] = {}
        for placement in self.placements.values():
            for part in placement.parts:
                if id(part.target) not in memory and part.target.device.type == "cpu":
                    memory[id(part.target)] = _memory_of(part.target)
        tasks = list(batches(read for read in self.plan.reads if read.name in self.placements))
        futures = [
            pool.submit(self._place, descriptors[batch[0].header.file], batch, memory) for batch in tasks
        ]
        for batch, future in zip(tasks, futures, strict=True):
            future.result()
            self.progress(bytes_of(batch))
            for read in batch:
                self.placed(self.placements[read.name])

    def _place(self, descriptor: int, batch: Sequence[Read], memory: Mapping[int, memoryview]) -> None:
        pieces: list[Piece] = []
        for read in batch:
            dtype = TORCH_DTYPES[read.header.dtype]
            for part in self.placements[read.name].parts:
                if part.holds(dtype):
                    first = part.first * dtype.itemsize
                    view = memory[id(part.target)][first : first + part.stop - part.start]
                    pieces.append(Piece(read, read.offset + part.start, view))
                else:
                    self._bounce(descriptor, read, part, dtype)
        self._fill(descriptor, pieces)

    def _bounce(self, descriptor: int, read: Read, part: Destination, dtype: torch.dtype) -> None:
        """Fill a target of another device or dtype, a bounded buffer at a time."""
        target = part.target.detach().view(-1)
        buffer = torch.empty(min(_BOUNCE_BYTES, part.stop - part.start), dtype=torch.uint8)
        for start in range(part.start, part.stop, _BOUNCE_BYTES):
            piece = buffer[: min(_BOUNCE_BYTES, part.stop - start)]
            self._fill(descriptor, [Piece(read, read.offset + start, _memory_of(piece))])
            values = piece.view(dtype)
            first = part.first + (start - part.start) // dtype.itemsize
            target[first : first + len(values)].copy_(values)

    def _fill(self, descriptor: int, pieces: Sequence[Piece]) -> None:
        for run in runs(pieces):
            self._fill_run(descriptor, run)
        if self.check_finite:
            for piece in pieces:
                dtype = TORCH_DTYPES[piece.read.header.dtype]
                if dtype.is_floating_point:
                    _refuse_non_finite(piece.view, dtype, piece.read)

    def _fill_run(self, descriptor: int, run: Sequence[Piece]) -> None:
        offset, views = run[0].start, [piece.view for piece in run]
        while views:
            try:
                count = os.preadv(descriptor, views, offset)
            except OSError as error:
                raise _unread(run, offset, "cannot be read", error.strerror) from None
            if count == 0:
                raise _unread(run, offset, "ends", None)
            offset += count
            with self._lock:
                self.bytes_read += count
            # The system may deliver less than was asked for.
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]


def _unread(run: Sequence[Piece], offset: int, what: str, why: str | None) -> ConfigurationError:
    piece = next(piece for piece in run if offset < piece.stop)
    return ConfigurationError(
        f"{piece.read.header.file} {what} at byte {offset}{f' ({why})' if why else ''}, "
        f"{piece.stop - offset} more bytes of {piece.read.name} were expected; "
        f"{'check the disk' if why else 'it became shorter while it was read'}"
    )


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on CPU."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read ({error.strerror}), a safetensors shard was expected; check its "
            "permissions"
        ) from None


def _refuse_non_finite(view: memoryview, dtype: torch.dtype, read: Read) -> None:
    for start in range(0, len(view), _FINITE_CHECK_BYTES):
        part = torch.frombuffer(view[start : start + _FINITE_CHECK_BYTES], dtype=dtype)
        if dtype.itemsize == 1:
            part = part.float()
        if not bool(torch.isfinite(part).all()):
            raise non_finite(read.name, str(read.header.file), part)


def non_finite(name: str, where: str, values: torch.Tensor) -> ConfigurationError:
    """The error for a tensor with values that are not finite."""
    kind = "NaN" if bool(torch.isnan(values).any()) else "Inf"
    return ConfigurationError(
        f"{where} holds {kind} in {name}, finite numbers were expected; download the file again"
    )


def refuse_non_finite(
    weights: Iterator[tuple[str, torch.Tensor]], where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass on what someone else has read, checked.

    Raises:
        ConfigurationError: a weight holds NaN or Inf.
    """
    for name, tensor in weights:
        # Formats of one byte have no such test of their own.
        values = tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise non_finite(name, where, values)
        yield name, tensor
