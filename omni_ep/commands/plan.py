# SPDX-License-Identifier: Apache-2.0
"""`omni-ep plan`: memory per rank and traffic of a layout, or of all layouts of N devices."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omni_ep.commands.layout_flags import HelpFormatter, add_layout_flags, add_picture_flags, run_request
from omni_ep.config import RunRequest
from omni_ep.errors import ConfigurationError
from omni_ep.layout import require_positive_int
from omni_ep.layout_names import layout_name
from omni_ep.planner import PRECISIONS, PRESETS, Settings, Workload, load_model, make_plan, precision_of
from omni_ep.planner.cost import Rates
from omni_ep.planner.enumerate import Candidate, Dropped, enumerate_layouts
from omni_ep.planner.model import PlannedModel
from omni_ep.planner.plan import Plan
from omni_ep.planner.precision import TORCH_NAMES
from omni_ep.planner.report import best_text, candidates_text, command_line, dropped_text, heading, plan_text
from omni_ep.planner.rules import check_layout
from omni_ep.units import format_bytes, parse_bytes

DEFAULT_MODEL = "hunyuan-image-3"
_PLOTTED = 12

_EPILOG = """\
examples:
  # HunyuanImage-3.0 on four 80 GiB devices, experts spread over all of them
  omni-ep plan hunyuan-image-3 --tensor-parallel-size 2 --cfg-parallel-size 2 \\
      --enable-expert-parallel --device-memory 80GiB

  # which layout of eight devices?
  omni-ep plan --devices 8 --device-memory 80GiB --plot memory.png

Sizes: 80GiB is 80 x 2^30 bytes, 80GB is 80 x 10^9 bytes.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="memory per rank and traffic of a layout, before renting devices",
        description="Memory per rank and bytes on the wire of a layout. With --devices, of every layout.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "positional_model",
        nargs="?",
        metavar="MODEL",
        default=None,
        help=f"checkpoint folder, config.json, or preset: {', '.join(PRESETS)} (None: {DEFAULT_MODEL})",
    )
    model.add_argument("--model", "--preset", metavar="MODEL", help="the same, as a flag")
    model.add_argument(
        "--dtype",
        "--quantization",
        choices=(*PRECISIONS, *TORCH_NAMES),
        help="number format of the transformer's weights (None: the checkpoint's)",
    )
    add_layout_flags(parser)
    picture = add_picture_flags(parser)
    picture.add_argument(
        "--batch", "--num-images-per-prompt", type=int, default=1, metavar="N", help="pictures at a time"
    )
    picture.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="tokens of the prompt")
    picture.add_argument(
        "--tokens", type=int, metavar="N", help="tokens per sequence, where no picture size gives them"
    )
    picture.add_argument("--vae-use-tiling", action="store_true", help="decode the picture tile by tile")
    device = parser.add_argument_group("devices")
    device.add_argument("--device-memory", metavar="SIZE", help="memory of one device, such as 80GiB")
    device.add_argument("--devices", type=int, metavar="N", help="rank every layout of N devices")
    device.add_argument("--cpu", action="store_true", help="ranks on CPU: the VAE is kept in float32")
    device.add_argument(
        "--device-tflops", type=float, default=400.0, metavar="X", help="TFLOP/s a device sustains, to rank"
    )
    device.add_argument(
        "--link-bandwidth", type=float, default=200.0, metavar="X", help="GB/s a device receives, to rank"
    )
    device.add_argument(
        "--plot", type=Path, metavar="FILE", help="save memory per rank as stacked bars (extra: plot)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan.

    Raises:
        ConfigurationError: for what no run would accept, and if no layout of ``--devices`` fits.
    """
    if args.positional_model and args.model:
        raise ConfigurationError(
            f"two models were given, {args.positional_model!r} and --model {args.model!r}; give one"
        )
    model = load_model(args.positional_model or args.model or DEFAULT_MODEL)
    request = _request(args, model)
    settings = Settings(
        model=model,
        precision=precision_of(args.dtype or model.dtype),
        workload=_workload(args, model, request),
        device_memory=None if args.device_memory is None else parse_bytes(args.device_memory),
        on_cpu=args.cpu,
        vae_tiling=args.vae_use_tiling,
    )
    if args.devices is not None:
        return _rank_layouts(args, settings, request)
    check_layout(model, request)
    plan = make_plan(settings, request.layout, expert_parallel=request.enable_expert_parallel)
    if args.json:
        print(json.dumps(plan.to_dict()))
    else:
        print(heading(settings), plan_text(plan), sep="\n\n")
    _plot(args.plot, [(layout_name(request), plan)], quiet=args.json)
    return 0


def _request(args: argparse.Namespace, model: PlannedModel) -> RunRequest:
    base = model.config.get("image_base_size") or 1024
    return run_request(args, base, num_images_per_prompt=args.batch)


def _workload(args: argparse.Namespace, model: PlannedModel, request: RunRequest) -> Workload:
    rows = (model.config.get("vae_downsample_factor") or (16, 16))[0]
    if args.tokens is not None:
        require_positive_int("--tokens", args.tokens)
    return Workload(
        height=request.height,
        width=request.width,
        pixels_per_token=rows * (model.config.get("patch_size") or 1) if model.is_hunyuan_image3 else 16,
        prompt_tokens=args.prompt_tokens,
        batch=args.batch,
        guidance=request.guidance_scale > 1 and not model.config.get("cfg_distilled"),
        image_tokens_override=args.tokens,
    )


def _rank_layouts(args: argparse.Namespace, settings: Settings, request: RunRequest) -> int:
    require_positive_int("--devices", args.devices)
    for flag, value in (("--device-tflops", args.device_tflops), ("--link-bandwidth", args.link_bandwidth)):
        if not value > 0:
            raise ConfigurationError(f"{flag} must be greater than 0, got {value:g}")
    rates = Rates(flops_per_s=args.device_tflops * 1e12, bytes_per_s=args.link_bandwidth * 1e9)
    candidates, dropped = enumerate_layouts(settings, request, args.devices, rates)
    if args.json:
        print(json.dumps(_ranking(candidates, dropped, settings)))
    else:
        print(heading(settings), end="\n\n")
        if candidates:
            print(candidates_text(candidates, rates), end="\n\n")
        print(dropped_text(dropped))
    plans = [(candidate.name, candidate.plan) for candidate in candidates]
    too_big = [(drop.name, drop.plan) for drop in dropped if drop.plan is not None]
    _plot(args.plot, [*plans, *too_big][:_PLOTTED], quiet=args.json)
    if not candidates:
        raise ConfigurationError(_nothing_fits(args.devices, dropped, settings))
    if not args.json:
        print(f"\n{best_text(candidates[0], settings)}")
    return 0


def _nothing_fits(devices: int, dropped: list[Dropped], settings: Settings) -> str:
    smallest = next((drop for drop in dropped if drop.plan is not None), None)
    if smallest is None or smallest.plan is None:
        return f"no layout of {devices} devices can run {settings.model.name}; the reasons are above"
    return (
        f"no layout of {devices} devices fits {format_bytes(settings.device_memory or 0)} each: the "
        f"smallest, {smallest.name}, needs {format_bytes(smallest.plan.total_bytes)} per rank; use more "
        "devices, larger ones, or a smaller --dtype"
    )


def _ranking(candidates: list[Candidate], dropped: list[Dropped], settings: Settings) -> dict[str, Any]:
    """The JSON of ``--devices``; costs in seconds, sizes in bytes."""
    name = settings.model.name
    return {
        "candidates": [
            {
                "layout": candidate.name,
                "cost": asdict(candidate.cost),
                "left_bytes": candidate.plan.left_bytes,
                "command": command_line(name, candidate.request, settings.precision.name),
                **candidate.plan.to_dict(),
            }
            for candidate in candidates
        ],
        "dropped": [{"layout": drop.name, "reason": drop.reason} for drop in dropped],
    }


def _plot(file: Path | None, plans: list[tuple[str, Plan]], *, quiet: bool) -> None:
    if file is None or not plans:
        return
    from omni_ep.planner.plot import plot_memory

    settings = plans[0][1].settings
    plot_memory(plans, file, title=f"{settings.model.name} in {settings.precision.name}: memory per rank")
    if not quiet:
        print(f"\nsaved {file}")
