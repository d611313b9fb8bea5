# SPDX-License-Identifier: Apache-2.0
"""Which reads share a system call: those whose bytes follow one another in a file.

An expert's tensors, and often neighbouring experts, lie side by side in a shard and apart in memory. One
``preadv`` per stretch of file, with a buffer per tensor, spares a call and a task per tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from omni_ep.loading.plan import Read

BATCH_BYTES = 32 * 2**20
"""Reads up to this many bytes are one task; a larger read is one alone."""

_MAX_VIEWS = os.sysconf("SC_IOV_MAX")


class Piece(NamedTuple):
    """Some bytes of a file and the memory they belong in.

    Attributes:
        read: whose bytes they are, for messages.
        start: byte of the file.
        view: as many bytes of memory.
    """

    read: Read
    start: int
    view: memoryview

    @property
    def stop(self) -> int:
        """The byte of the file after the last."""
        return self.start + len(self.view)


def runs(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in the order given, those together that follow one another in the file.

    Pieces without bytes are left out, and no run is longer than one system call takes.
    """
    run: list[Piece] = []
    for piece in pieces:
        if not len(piece.view):
            continue
        if run and (piece.start != run[-1].stop or len(run) == _MAX_VIEWS):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def bytes_of(reads: Iterable[Read]) -> int:
    """Bytes that these read together."""
    return sum(read.nbytes for read in reads)


def batches(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Reads in the order given, as many together as are of one file and at most ``BATCH_BYTES``."""
    batch: list[Read] = []
    size = 0
    for read in reads:
        if batch and (read.header.file != batch[0].header.file or size + read.nbytes > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.nbytes
    if batch:
        yield batch
