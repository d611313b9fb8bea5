# SPDX-License-Identifier: Apache-2.0
"""Reads that share a system call: what joins, what does not, and that every byte still finds its place."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from omni_ep.errors import ConfigurationError
from omni_ep.loading import runs as runs_module
from omni_ep.loading.headers import TensorHeader
from omni_ep.loading.plan import Read
from omni_ep.loading.reader import PlannedReader
from omni_ep.loading.runs import BATCH_BYTES, Piece, batches, bytes_of, runs
from tests.unit.test_loading_placement import experts_module, placements_of
from tests.unit.test_loading_reader import EXPERTS, plan_of, tensors


def read(name: str, nbytes: int, file: str = "a.safetensors") -> Read:
    header = TensorHeader(name=name, file=Path(file), dtype="U8", shape=(nbytes,), offset=0, nbytes=nbytes)
    return Read(name=name, header=header, offset=0, shape=(nbytes,), ranges=((0, nbytes),))


def piece(start: int, size: int) -> Piece:
    return Piece(read=read(f"at {start}", size), start=start, view=memoryview(bytearray(size)))


def starts(pieces: Sequence[Piece]) -> list[list[int]]:
    return [[piece.start for piece in run] for run in runs(pieces)]


def test_only_neighbours_join() -> None:
    assert starts([piece(0, 4), piece(4, 2), piece(7, 1), piece(8, 3)]) == [[0, 4], [7, 8]]
    assert starts([piece(4, 2), piece(0, 4)]) == [[4], [0]]
    assert starts([piece(0, 4), piece(0, 4)]) == [[0], [0]]
    assert starts([]) == []


def test_pieces_without_bytes_are_left_out() -> None:
    assert starts([piece(0, 0), piece(0, 4), piece(4, 0), piece(4, 1)]) == [[0, 4]]


def test_a_run_is_no_longer_than_a_system_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_MAX_VIEWS", 2)
    assert starts([piece(start, 1) for start in range(5)]) == [[0, 1], [2, 3], [4]]


def test_a_batch_is_of_one_file_and_bounded() -> None:
    half = BATCH_BYTES // 2
    reads = [read("0", half), read("1", half), read("2", 1), read("3", 1, "b"), read("4", 3 * half, "b")]
    found = [[one.name for one in batch] for batch in batches(reads)]
    assert found == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [bytes_of(batch) for batch in batches(reads)] == [BATCH_BYTES, 1, 1, 3 * half]
    assert list(batches([])) == []


@pytest.mark.parametrize("at_most", [1, 7, 100, 10**6])
@pytest.mark.parametrize("max_views", [1, 2, 1024])
def test_the_system_may_deliver_less_than_was_asked_for(
    at_most: int, max_views: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "_MAX_VIEWS", max_views)
    preadv = os.preadv

    def short(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        buffer = bytearray(min(at_most, sum(map(len, views))))
        done = preadv(descriptor, [buffer], offset)
        left = memoryview(buffer)[:done]
        for view in views:
            view[: len(left)] = left[: len(view)]
            left = left[len(view) :]
        return done

    monkeypatch.setattr(os, "preadv", short)
    stored, module = tensors(), experts_module()
    plan = plan_of(tmp_path, stored)
    reader = PlannedReader(plan, placements=placements_of(plan, module))
    for name, tensor in reader:
        assert torch.equal(tensor, stored[name])
    assert reader.bytes_read == plan.bytes_needed
    for slot, expert in enumerate((2, 3)):
        up, gate = stored[f"{EXPERTS}.{expert}.gate_and_up_proj.weight"].chunk(2)
        assert torch.equal(module.w13_weight[slot], torch.cat([gate, up]))
        assert torch.equal(module.w2_weight[slot], stored[f"{EXPERTS}.{expert}.down_proj.weight"])


def test_neighbours_share_a_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        calls.append(len(views))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", counted)
    plan = plan_of(tmp_path, tensors())
    list(PlannedReader(plan, placements=placements_of(plan, experts_module())))
    # safetensors sorts by name: down and gate_and_up of experts 2 and 3 are one stretch of the file.
    assert 6 in calls
    assert len(calls) < len(plan.reads)


def test_progress_counts_what_goes_straight_into_place(tmp_path: Path) -> None:
    counts: list[int] = []
    plan = plan_of(tmp_path, tensors())
    placements = placements_of(plan, experts_module())
    list(PlannedReader(plan, placements=placements, progress=counts.append))
    assert placements
    assert sum(counts) == plan.bytes_needed


@pytest.mark.parametrize("where", ["inside", "between"])
def test_the_tensor_that_the_file_ends_in_is_named(where: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, tensors())
    shard = tmp_path / "a.safetensors"
    for broken in sorted(plan.reads, key=lambda read: -read.offset):
        end = broken.offset + (broken.nbytes // 3 if where == "inside" else 0)
        os.truncate(shard, end)
        left = broken.offset + broken.nbytes - end
        text = f"a.safetensors ends at byte {end}, {left} more bytes of {broken.name} were expected"
        with pytest.raises(ConfigurationError, match=text):
            list(PlannedReader(plan))
