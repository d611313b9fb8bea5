# SPDX-License-Identifier: Apache-2.0
"""The `omni-ep` command: runs a subcommand and turns user errors into one sentence and an exit code."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from omni_ep.commands import compare, inspect, make_checkpoint, parity, plan
from omni_ep.errors import ConfigurationError

COMMANDS = (compare, inspect, make_checkpoint, parity, plan)
"""Modules with `add_parser(subparsers)`, which sets `run`, a function from parsed arguments to an exit code.

They are imported even for `--help`: what is slow to import (torch, vLLM) belongs inside their `run`.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="omni-ep", description="Expert parallelism for diffusion pipelines on vLLM-Omni."
    )
    parser.add_argument("--version", action="version", version=f"omni-ep {version('omni-ep')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `omni-ep`.

    Returns:
        0 for success, 2 for a setting that cannot work (as argparse itself exits), 1 for what the operating
        system refused, 130 after Ctrl-C.
    """
    args = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except ConfigurationError as error:
        print(f"omni-ep: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"omni-ep: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
