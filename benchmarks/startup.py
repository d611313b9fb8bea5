# SPDX-License-Identifier: Apache-2.0
"""How long until N CPU ranks are ready, with omni-ep's executor and with vLLM-Omni's own.

`ForkserverDiffusionExecutor` forks every rank from one process that has imported vLLM-Omni;
`MultiprocDiffusionExecutor` spawns every rank, which imports for itself. Both start the same workers, with
the same random checkpoint loaded and EP=N: one rank, TP=2, or TP=2 with CFG=2.

Each configuration runs in a new Python process, which starts N ranks twice:

first start     from the creation of that process until every rank is ready. It includes the process's own
                imports and, for omni-ep, those of the fork server, which run side by side.
second start    the same executor again in the same process, after the first was shut down: the parent's
                imports are done and the fork server is up.

Figures are comparable within one run only, on a machine that does nothing else.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

EXECUTORS = {
    "forkserver": "omni_ep.platforms.cpu.executor.ForkserverDiffusionExecutor",
    "spawn": "vllm_omni.diffusion.executor.multiproc_executor.MultiprocDiffusionExecutor",
}
GOAL = 1.5
"""First start of 4 ranks, as a multiple of the first start of 1, with omni-ep's executor."""


class MeasurementError(RuntimeError):
    """A configuration failed or took too long; the message holds the end of its log."""


def start_ranks(executor: str, ranks: int, model: str, created: float) -> dict[str, float]:
    """Body of the measured process.

    Args:
        executor: key of `EXECUTORS`.
        created: `time.monotonic()` of the parent when it created this process.

    Returns:
        Seconds: ``imports_s`` (until this process could start ranks), ``first_s``, ``second_s``.
    """
    if executor == "forkserver":
        # As the text_to_image example does: the server imports while this process does.
        from omni_ep.platforms.cpu import forkserver

        forkserver.start()
    else:
        # Upstream's executor makes its events before it chooses spawn itself; in the engine, its process
        # has been spawned and the choice is made.
        multiprocessing.set_start_method("spawn")
    import torch
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.utils.network_utils import get_open_port
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig

    from omni_ep import plugin

    plugin.register()
    executor_class = resolve_obj_by_qualname(EXECUTORS[executor])
    tensor_parallel = min(ranks, 2)

    def start() -> Any:
        config = OmniDiffusionConfig(
            model=model,
            model_class_name="HunyuanImage3ForCausalMM",
            num_gpus=ranks,
            master_port=get_open_port(),
            enforce_eager=True,
            enable_multithread_weight_load=True,
            dtype=torch.float32,
            parallel_config=DiffusionParallelConfig(
                tensor_parallel_size=tensor_parallel,
                cfg_parallel_size=ranks // tensor_parallel,
                enable_expert_parallel=ranks > 1,
            ),
        )
        config.enrich_config()
        return executor_class(config)

    imported = time.monotonic()
    running = start()
    first = time.monotonic()
    running.shutdown()
    again = time.monotonic()
    running = start()
    second = time.monotonic()
    running.shutdown()
    return {"imports_s": imported - created, "first_s": first - created, "second_s": second - again}


def measure(executor: str, ranks: int, model: Path, timeout_s: float) -> dict[str, float]:
    """Run one configuration in a process of its own; nothing of it is left when this returns."""
    with tempfile.TemporaryDirectory(prefix="omni-ep-startup-") as scratch:
        answer, log = Path(scratch, "answer.json"), Path(scratch, "log")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "TRANSFORMERS_VERBOSITY": "error",
        }
        command = [sys.executable, os.path.abspath(__file__), "--measure", executor, str(ranks), str(model)]
        with log.open("w") as output:
            created = time.monotonic()
            process = subprocess.Popen(
                [*command, repr(created), str(answer)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise MeasurementError(
                    f"{executor} with {ranks} ranks took more than {timeout_s:.0f} s:\n{_end_of(log)}"
                ) from None
        if code != 0:
            raise MeasurementError(f"{executor} with {ranks} ranks failed:\n{_end_of(log)}")
        seconds: dict[str, float] = json.loads(answer.read_text())
        return seconds


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each executor's times as multiples of its own with the fewest ranks."""
    found = []
    for executor in EXECUTORS:
        own = sorted((row for row in rows if row["executor"] == executor), key=lambda row: row["ranks"])
        for row in own[1:]:
            found.append(
                {
                    "executor": executor,
                    "ranks": row["ranks"],
                    "over_ranks": own[0]["ranks"],
                    "first_start": row["first_s"] / own[0]["first_s"],
                    "second_start": row["second_s"] / own[0]["second_s"],
                }
            )
    return found


def run(args: argparse.Namespace) -> int:
    from omni_ep.checkpoint import CheckpointSpec, make_checkpoint

    spec = CheckpointSpec()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="omni-ep-startup-model-") as folder:
        model = Path(folder, "model")
        make_checkpoint(model, spec)
        for ranks in args.ranks:
            for executor in args.executors:
                samples = []
                for _ in range(args.repeats):
                    load = os.getloadavg()[0]
                    print(f"{executor}, {ranks} rank(s), load average {load:.1f} ...", flush=True)
                    sample = measure(executor, ranks, model, args.timeout) | {"load_average_1m": load}
                    print(
                        f"  first start {sample['first_s']:.1f} s (imports of the parent "
                        f"{sample['imports_s']:.1f} s), second start {sample['second_s']:.1f} s",
                        flush=True,
                    )
                    samples.append(sample)
                medians = {name: median(sample[name] for sample in samples) for name in samples[0]}
                rows.append({"executor": executor, "ranks": ranks, **medians, "samples": samples})

    print(f"\n{'executor':>10}  {'ranks':>5}  {'first start s':>13}  {'second start s':>14}")
    for row in rows:
        print(f"{row['executor']:>10}  {row['ranks']:>5}  {row['first_s']:>13.1f}  {row['second_s']:>14.1f}")
    compared = ratios(rows)
    for entry in compared:
        own_goal = entry["executor"] == "forkserver" and (entry["ranks"], entry["over_ranks"]) == (4, 1)
        goal = f" (goal: at most {GOAL})" if own_goal else ""
        print(
            f"{entry['executor']}: {entry['ranks']} ranks take {entry['first_start']:.2f} times what "
            f"{entry['over_ranks']} takes{goal}; second start {entry['second_start']:.2f} times"
        )
    if args.report is not None:
        report = {
            "settings": {"repeats": args.repeats, "timeout_s": args.timeout},
            "starts": rows,
            "ratios": compared,
            "goal": {"executor": "forkserver", "ranks": 4, "over_ranks": 1, "first_start": GOAL},
            "machine": {"cores": len(os.sched_getaffinity(0))},
            "versions": {name: version(name) for name in ("omni-ep", "vllm", "vllm-omni", "torch")},
        }
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults in the option list, line breaks in the description."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4], help="numbers of ranks"
    )
    parser.add_argument(
        "--executors", nargs="+", choices=list(EXECUTORS), default=list(EXECUTORS), help="which to measure"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each configuration; the median counts"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        help="seconds one configuration may take, both starts together",
    )
    parser.add_argument("--report", type=Path, default=None, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--measure", nargs=5, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.measure is not None:
        executor, ranks, model, created, answer = args.measure
        Path(answer).write_text(json.dumps(start_ranks(executor, int(ranks), model, float(created))))
        return 0
    try:
        return run(args)
    except MeasurementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
