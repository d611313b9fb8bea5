# SPDX-License-Identifier: Apache-2.0
"""`omni-ep make-checkpoint`: a random checkpoint in the real layout, with sizes to choose."""

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from omni_ep.checkpoint import CheckpointSpec, inventory, make_checkpoint
from omni_ep.checkpoint.spec import DTYPE_BYTES

_EPILOG = """\
example, 16 experts of which each token visits 4, weights in float32:
  omni-ep make-checkpoint ./tiny --num-experts 16 --top-k 4 --dtype fp32
"""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the example's line breaks."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand; every field of `CheckpointSpec` is an option."""
    parser = subparsers.add_parser(
        "make-checkpoint",
        help="make a random checkpoint in the HunyuanImage-3.0 layout",
        description="Make a random checkpoint in the HunyuanImage-3.0 layout. A complete one is left alone.",
        epilog=_EPILOG,
        formatter_class=_Formatter,
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    for setting in fields(CheckpointSpec):
        kind: dict[str, Any] = {"type": int, "metavar": "N"}
        if setting.name == "dtype":
            kind = {"choices": list(DTYPE_BYTES)}
        elif isinstance(setting.default, tuple):
            kind = {"type": _integers, "metavar": "N,N,..."}
        parser.add_argument(
            f"--{setting.name.replace('_', '-')}",
            default=_as_typed(setting.default),
            help=setting.metadata["help"],
            **kind,
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Makes the checkpoint and says what is in it; 0 also if it was there already."""
    spec = CheckpointSpec(**{setting.name: getattr(args, setting.name) for setting in fields(CheckpointSpec)})
    totals = inventory(spec)
    with tqdm(
        total=totals.bytes, unit="B", unit_scale=True, desc="weights", disable=args.out.exists(), leave=False
    ) as bar:
        made = make_checkpoint(args.out, spec, bar.update)
    files = {file.name: file.stat().st_size for file in sorted(args.out.iterdir())}
    if args.json:
        print(json.dumps({"path": str(args.out), "made": made, "files": files, **asdict(totals)}))
    else:
        print(f"{'made' if made else 'already there:'} {args.out}")
        rows = {
            **{name: f"{size:,} bytes" for name, size in files.items()},
            "parameters": f"{totals.parameters:,} in {totals.bytes:,} bytes",
            "of routed experts": f"{totals.expert_parameters:,} in {totals.expert_bytes:,} bytes",
        }
        width = max(map(len, rows))
        for name, value in rows.items():
            print(f"  {name:<{width}}  {value}")
    return 0


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers separated by commas") from None


def _as_typed(default: Any) -> Any:
    """A default as a user would type it; argparse converts it back and `--help` shows it."""
    return ",".join(map(str, default)) if isinstance(default, tuple) else default
