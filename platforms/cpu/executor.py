# SPDX-License-Identifier: Apache-2.0
"""Starts CPU ranks from the fork server and never leaves one behind.

vLLM-Omni takes an executor's class path as ``distributed_executor_backend``
(``diffusion/executor/abstract.py:65``).
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, cast

from vllm.logger import init_logger
from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor
from vllm_omni.diffusion.worker import WorkerProc

from omni_ep.errors import ConfigurationError, WorkerStartError
from omni_ep.platforms.cpu import forkserver

logger = init_logger(__name__)

#: Seconds a rank gets to finish by itself, then from SIGTERM to SIGKILL. A rank that waits in
#: a collective for a rank that is gone does not see SIGTERM.
_GRACE_S = 4.0
_KILL_AFTER_S = 2.0

#: Exit codes of a rank that was told to end, by us or by the operating system's user.
_ASKED_TO_END = (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def _run_rank(environment: dict[str, str], rank: int, writer: Connection, arguments: tuple[Any, ...]) -> None:
    """The body of one rank: vLLM-Omni's worker in the parent's environment."""
    os.environ.update(environment)
    # Ctrl-C in a terminal goes to the parent alone, which takes its ranks down in order.
    os.setpgid(0, 0)
    threading.Thread(target=_exit_with_parent, daemon=True, name="parent-watch").start()
    od_config, *rest = arguments
    try:
        WorkerProc.worker_main(rank, od_config, writer, *rest)
    except ConfigurationError as exc:
        # A sentence for the user, which the parent says; where it was raised helps nobody.
        logger.debug("rank %d failed", rank, exc_info=True)
        _report_failure(writer, str(exc))
    except Exception as exc:
        logger.exception("rank %d failed", rank)
        _report_failure(writer, f"{type(exc).__name__}: {exc}")


def _report_failure(writer: Connection, error: str) -> NoReturn:
    # A parent that has stopped listening knows already.
    with contextlib.suppress(OSError):
        writer.send({"status": "failed", "error": error})
    raise SystemExit(1)


def _exit_with_parent() -> None:
    """End this rank when the engine's process is gone, even inside a collective."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        time.sleep(_GRACE_S)
        os._exit(1)


def end_processes(processes: Sequence[BaseProcess], grace_s: float) -> None:
    """Wait, then terminate, then kill; returns when every process is gone."""
    for action, patience in ((None, grace_s), ("terminate", _KILL_AFTER_S), ("kill", _KILL_AFTER_S)):
        alive = [process for process in processes if process.is_alive()]
        if action is not None:
            for process in alive:
                getattr(process, action)()
        deadline = time.monotonic() + patience
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))


class ForkserverDiffusionExecutor(MultiprocDiffusionExecutor):
    """vLLM-Omni's multi-process executor whose ranks share one set of imports."""

    def _launch_workers(self, broadcast_handle: Any, wake_events: list[Any]) -> tuple[list[Any], list[Any]]:
        """Start one process per rank and wait until each is ready.

        Raises:
            WorkerStartError: a rank failed or died; the others are ended first.
        """
        forkserver.start()
        context = forkserver.context()
        # Upstream's events belong to its spawn context and cannot cross into this one.
        wake_events[:] = [context.Event() for _ in wake_events]
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        processes: list[BaseProcess] = []
        readers: list[Connection] = []
        try:
            for rank in range(cast(int, self.od_config.num_gpus)):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_rank,
                    args=(
                        environment,
                        rank,
                        writer,
                        (
                            self.od_config,
                            broadcast_handle,
                            wake_events[rank],
                            self.od_config.worker_extension_cls,
                            self.od_config.custom_pipeline_args,
                        ),
                    ),
                    name=f"DiffusionWorker-{rank}",
                    daemon=True,
                )
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
            handles = [handle for _, handle in sorted(_wait_until_ready(readers, processes).items())]
        except BaseException:
            end_processes(processes, grace_s=0.0)
            raise
        finally:
            for reader in readers:
                reader.close()
        threading.Thread(
            target=self._end_peers_of_a_dead_rank, args=(processes,), daemon=True, name="rank-watch"
        ).start()
        return processes, handles

    def _end_peers_of_a_dead_rank(self, processes: Sequence[BaseProcess]) -> None:
        # Upstream's monitor reports the death and then waits 15 s for ranks that may hang in a
        # collective with the dead one; a user waits for that as well.
        wait([process.sentinel for process in processes])
        if self._closed:
            return
        for rank, process in enumerate(processes):
            if not process.is_alive() and process.exitcode not in _ASKED_TO_END:
                logger.critical("rank %d ended unexpectedly (exit code %s)", rank, process.exitcode)
        # Not SIGTERM: upstream turns it into an exception wherever the rank happens to be.
        for process in processes:
            process.kill()

    def shutdown(self) -> None:
        """End every rank within seconds, also one that is in the middle of a step."""
        ranks = list(self._processes)
        ender = threading.Thread(target=end_processes, args=(ranks, _GRACE_S), daemon=True, name="rank-ender")
        ender.start()
        super().shutdown()
        ender.join()


def _wait_until_ready(readers: Sequence[Connection], processes: Sequence[BaseProcess]) -> dict[int, Any]:
    """Collect every rank's result-queue handle, by rank."""
    handles: dict[int, Any] = {}
    pending = dict(zip(readers, range(len(readers)), strict=True))
    while pending:
        for reader in wait(list(pending)):
            reader = cast(Connection, reader)
            rank = pending.pop(reader)
            try:
                message = reader.recv()
            except EOFError:
                processes[rank].join(_KILL_AFTER_S)
                raise WorkerStartError(
                    f"rank {rank} ended before it was ready (exit code {processes[rank].exitcode})"
                ) from None
            if message["status"] != "ready":
                raise WorkerStartError(
                    f"rank {rank} failed to start: {message.get('error', message['status'])}"
                )
            handles[rank] = message["result_handle"]
    return handles
