# SPDX-License-Identifier: Apache-2.0
"""Run a function on several real gloo ranks, with a deadline.

Ranks come from omni-ep's fork server, so that a test session imports vLLM-Omni once. A rank
that raises, dies or hangs fails the test with a sentence; every rank is reaped.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from omni_ep.platforms.cpu import forkserver
from omni_ep.platforms.cpu.executor import end_processes


class RankFailure(AssertionError):
    """What went wrong on which rank."""


def _body(function: Callable[..., Any], rank: int, arguments: tuple[Any, ...], writer: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        writer.send((True, function(rank, *arguments)))
    except BaseException:
        writer.send((False, traceback.format_exc()))
    writer.close()
    # Groups may be half destroyed after a failure; leave without waiting for peers.
    os._exit(0)


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120.0
) -> list[Any]:
    """``function(rank, *arguments)`` on every rank; the results in rank order.

    Args:
        function: importable from a module, since ranks are other processes.
        timeout_s: deadline for all ranks together, after which they are killed.
    """
    forkserver.start()
    context = forkserver.context()
    processes: list[multiprocessing.process.BaseProcess] = []
    readers: dict[Any, int] = {}
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_body, args=(function, rank, arguments, writer), daemon=True)
        process.start()
        writer.close()
        processes.append(process)
        readers[reader] = rank
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while readers:
            ready = wait(list(readers), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailure(f"ranks {sorted(readers.values())} did not finish within {timeout_s:.0f} s")
            for reader in ready:
                rank = readers.pop(reader)
                try:
                    succeeded, value = reader.recv()
                except EOFError:
                    raise RankFailure(f"rank {rank} died without a word") from None
                if not succeeded:
                    raise RankFailure(f"rank {rank} failed:\n{value}")
                results[rank] = value
    finally:
        end_processes(processes, grace_s=2.0 if len(results) == world_size else 0.0)
    return [results[rank] for rank in range(world_size)]
