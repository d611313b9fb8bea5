# SPDX-License-Identifier: Apache-2.0
"""`omni-ep parity`: one baseline, several layouts, one report."""

import argparse
import json
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from omni_ep.commands.layout_flags import HelpFormatter, add_picture_flags, run_request
from omni_ep.commands.outputs import check_writable
from omni_ep.config import RunRequest, check_checkpoint_folder, validate
from omni_ep.errors import ConfigurationError
from omni_ep.layout_names import parse_layouts
from omni_ep.loading import check_against_config, read_checkpoint

DEFAULT_LAYOUTS = "tp2+ep,cfg2+ep,cfg2*sp2+ep"

_EPILOG = """\
Layouts are factors joined by "*": tp (tensor), sp (Ulysses), ring, cfg (guidance), dp (data), pp (stages);
+ep switches expert parallelism on.

exit code: 0 if every layout passes, 1 if one does not, 2 if a layout or setting is impossible.

example:
  omni-ep parity --model ./tiny --layouts "tp2+ep,cfg2+ep,cfg2*sp2+ep" --output parity.html
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "parity",
        help="paint with several layouts and compare each with one device",
        description="Paint on one device, then with every layout, and write one HTML report and its JSON.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint folder (None: a small random one, made once)")
    parser.add_argument("--layouts", default=DEFAULT_LAYOUTS, help="names, separated by commas")
    picture = add_picture_flags(parser)
    picture.add_argument("--prompt", action="append", help="what to paint; may be given several times")
    picture.add_argument("--seed", type=int, default=42, help="seed of the noise; prompt i uses seed + i")
    picture.add_argument("--num-inference-steps", type=int, default=8, metavar="N", help="denoising steps")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto: float32 on CPU, bfloat16 elsewhere",
    )
    parser.add_argument(
        "--preset",
        choices=("parity", "lossy"),
        help="thresholds (None: parity for float32, lossy for bfloat16)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let code of the checkpoint run")
    parser.add_argument("--vae-use-tiling", action="store_true", help="decode the picture tile by tile")
    parser.add_argument(
        "--output", type=Path, default=Path("parity.html"), metavar="FILE", help="report; JSON goes beside it"
    )
    parser.add_argument("--verbose", action="store_true", help="show the engine's log")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Refuses what is impossible, paints, writes the report.

    Raises:
        ConfigurationError: before any rank starts.
    """
    if args.output.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(f"--output is {args.output}; it must end in .html, the JSON goes beside it")
    check_writable("--output", args.output)
    layouts = parse_layouts(args.layouts)
    if not args.verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        # Ranks that are killed leave semaphores, which Python then cleans up by itself.
        os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if args.model is None:
        from omni_ep.checkpoint import default_checkpoint

        args.model = str(default_checkpoint())
    config = check_checkpoint_folder(args.model)
    requests = _requests(args, config, layouts)
    # The core imports no platform, see docs/design: a command puts the layers together by name.
    selection = import_module("omni_ep.platforms.selection")
    platform = selection.check_platform_request()
    device_count, device_kind = _devices(platform, selection.CPU_PLATFORM)
    for name, request in requests.items():
        try:
            warnings = validate(request, config, device_count=device_count, device_kind=device_kind)
        except ConfigurationError as error:
            raise ConfigurationError(f"layout {name}: {error}") from None
        for warning in warnings:
            print(f"warning: {name}: {warning}", file=sys.stderr)
    check_against_config(read_checkpoint(args.model), config)
    if platform == selection.CPU_PLATFORM:
        # The process that all ranks are forked from imports while this one does.
        import_module("omni_ep.platforms.cpu.forkserver").start()
    return _paint_and_write(args, requests, device_kind)


def _requests(
    args: argparse.Namespace, config: dict[str, Any], layouts: dict[str, dict[str, Any]]
) -> dict[str, RunRequest]:
    base = int(config.get("image_base_size") or 1024)
    return {
        name: run_request(args, base, num_inference_steps=args.num_inference_steps, **fields)
        for name, fields in layouts.items()
    }


def _devices(platform: str | None, cpu_platform: str) -> tuple[int, str]:
    if platform == cpu_platform:
        return len(os.sched_getaffinity(0)), "cpu"
    import torch

    return torch.accelerator.device_count(), (platform or "x.accelerator.X").rsplit(".", 2)[-2]


def _paint_and_write(args: argparse.Namespace, requests: dict[str, RunRequest], device_kind: str) -> int:
    from omni_ep import parity, quality
    from omni_ep.painting import PaintingError
    from omni_ep.parity_html import to_html

    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if device_kind == "cpu" else "bfloat16"
    preset = args.preset or ("parity" if dtype == "float32" else "lossy")
    prompts = args.prompt or ["a red cube on a table"]
    first = next(iter(requests.values()))
    settings = {
        "size": f"{first.height}x{first.width} pixels",
        "steps": first.num_inference_steps,
        "guidance": first.guidance_scale,
        "seed": args.seed,
        "dtype": dtype,
        "device": device_kind,
        "prompts": prompts,
    }
    try:
        result = parity.run_parity(
            args.model,
            requests,
            prompts,
            args.seed,
            thresholds=quality.PRESETS[preset],
            settings=settings,
            options={
                "dtype": dtype,
                "trust_remote_code": args.trust_remote_code,
                "vae_use_tiling": args.vae_use_tiling,
            },
            tell=lambda line: print(line, flush=True),
        )
    except PaintingError as error:
        print(f"omni-ep: error: {error}", file=sys.stderr)
        return 1
    data = args.output.with_suffix(".json")
    args.output.write_text(to_html(result), encoding="utf-8")
    data.write_text(json.dumps(parity.to_dict(result), indent=2) + "\n", encoding="utf-8")
    print(f"saved {args.output} and {data}")
    return 0 if result.passed else 1
