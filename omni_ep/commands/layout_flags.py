# SPDX-License-Identifier: Apache-2.0
"""Flags that several commands share: vLLM-Omni's names for the layout and the picture."""

import argparse
from typing import Any

from omni_ep.config import RunRequest
from omni_ep.layout_names import FACTORS

_WHAT = {
    "tensor_parallel_size": "ranks that split attention heads",
    "ulysses_degree": "ranks that split the image's tokens",
    "ring_degree": "ring sequence parallelism",
    "pipeline_parallel_size": "pipeline stages",
    "cfg_parallel_size": "ranks that split the guidance branches",
    "data_parallel_size": "replicas of the rest of the layout",
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the examples' line breaks."""


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per factor of a layout, and ``--enable-expert-parallel``."""
    group = parser.add_argument_group("layout")
    for field in FACTORS.values():
        group.add_argument(
            f"--{field.replace('_', '-')}", type=int, default=1, metavar="N", help=_WHAT[field]
        )
    group.add_argument(
        "--enable-expert-parallel", action="store_true", help="spread the experts over all ranks of a stage"
    )


def add_picture_flags(parser: argparse.ArgumentParser) -> Any:
    """Size, number of pictures and guidance; returns the group for more."""
    group = parser.add_argument_group("picture")
    group.add_argument("--height", type=int, metavar="PIXELS", help="None: the model's base size")
    group.add_argument("--width", type=int, metavar="PIXELS", help="None: the model's base size")
    group.add_argument(
        "--guidance-scale", type=float, default=5.0, metavar="X", help="guidance; 1 or less: none"
    )
    return group


def run_request(args: argparse.Namespace, base_size: int, **fields: Any) -> RunRequest:
    """The request that the flags describe; ``fields`` go on top."""
    request = {
        "height": base_size if args.height is None else args.height,
        "width": base_size if args.width is None else args.width,
        "guidance_scale": args.guidance_scale,
    }
    for field in (*FACTORS.values(), "enable_expert_parallel"):
        if hasattr(args, field):
            request[field] = getattr(args, field)
    return RunRequest(**{**request, **fields})
