# SPDX-License-Identifier: Apache-2.0
"""Text to image with HunyuanImage-3 on vLLM-Omni, its experts spread over several ranks.

Without ``--model`` it paints with the small trained checkpoint beside it (``examples/demo_model``), which
knows flat shapes; point ``--model`` at the HunyuanImage-3.0 folder to paint with the real one.
"""

import argparse
import json
import logging
import os
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

from omni_ep.commands.layout_flags import HelpFormatter
from omni_ep.commands.outputs import check_writable
from omni_ep.config import RunRequest, check_checkpoint_folder, validate
from omni_ep.errors import ConfigurationError, malformed
from omni_ep.expert_load import ExpertLoad, check_countable
from omni_ep.expert_load_plot import FLAG as PLOT_FLAG
from omni_ep.expert_load_plot import plot_expert_load
from omni_ep.figures import new_figure
from omni_ep.geometry import MoEGeometry
from omni_ep.layout import ParallelLayout
from omni_ep.loading import check_against_config, read_checkpoint
from omni_ep.painting import Painter, Painting, PaintingError, single_rank, versions
from omni_ep.platforms.selection import CPU_PLATFORM, check_platform_request
from omni_ep.quality import compare as quality_of
from omni_ep.quality import sentence, side_by_side

AUTO_DTYPE = {"cpu": "float32"}
DEMO_CHECKPOINT = Path(__file__).parents[1] / "demo_model" / "checkpoint"
PROMPT = "a red circle to the left of a blue square on a white background"
STEPS, GUIDANCE = 50, 5.0
"""Of HunyuanImage-3.0, for a checkpoint that does not say."""

EXAMPLES = """examples:
  # two ranks, each with half of the experts, and the proof against one rank
  %(prog)s --tensor-parallel-size 2 --enable-expert-parallel --compare-baseline

  # four ranks: guidance over two, the image's tokens over two
  %(prog)s --cfg-parallel-size 2 --ulysses-degree 2 --enable-expert-parallel

  # HunyuanImage-3.0 on eight accelerators
  %(prog)s --model /path/to/HunyuanImage-3.0 --tensor-parallel-size 4 --cfg-parallel-size 2 \\
      --enable-expert-parallel --height 1024 --width 1024 --num-inference-steps 50
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=HelpFormatter)
    picture = parser.add_argument_group("picture")
    picture.add_argument("--prompt", default=PROMPT, help="what to paint")
    picture.add_argument(
        "--negative-prompt", default=None, help="not used by HunyuanImage-3; accepted and ignored"
    )
    picture.add_argument("--seed", type=int, default=42, help="seed of the noise; picture i uses seed + i")
    picture.add_argument("--height", type=int, default=None, help="pixels (None: the model's base size)")
    picture.add_argument("--width", type=int, default=None, help="pixels (None: the model's base size)")
    picture.add_argument(
        "--num-inference-steps", type=int, default=None, help="denoising steps (None: the checkpoint's own)"
    )
    picture.add_argument(
        "--guidance-scale",
        type=float,
        default=None,
        help="classifier-free guidance; 1 or less: none (None: the checkpoint's own)",
    )
    picture.add_argument("--num-images-per-prompt", type=int, default=1, help="pictures to paint")
    picture.add_argument(
        "--output", type=Path, default=Path("output.png"), help="PNG to write; picture i > 0 gets _i"
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default=None, help="checkpoint folder (None: the trained one of the examples)"
    )
    model.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto is float32 on CPU, else bfloat16",
    )
    model.add_argument(
        "--trust-remote-code", action="store_true", help="let Python code of the checkpoint run"
    )
    model.add_argument(
        "--check-weights", action="store_true", help="refuse weights that hold NaN or Inf while loading"
    )
    model.add_argument("--vae-use-tiling", action="store_true", help="decode the picture tile by tile")

    layout = parser.add_argument_group("layout")
    layout.add_argument(
        "--enable-expert-parallel", action="store_true", help="spread the experts over all ranks"
    )
    layout.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="ranks that split attention heads"
    )
    layout.add_argument(
        "--cfg-parallel-size", type=int, default=1, help="ranks that split the guidance branches"
    )
    layout.add_argument("--ulysses-degree", type=int, default=1, help="ranks that split the image's tokens")
    layout.add_argument("--ring-degree", type=int, default=1, help="ring sequence parallelism")
    layout.add_argument(
        "--data-parallel-size", type=int, default=1, help="replicas of the rest of the layout"
    )
    layout.add_argument("--pipeline-parallel-size", type=int, default=1, help="pipeline stages")
    layout.add_argument(
        "--use-hsdp", action="store_true", help="shard weights with FSDP2; not with expert parallelism"
    )

    proof = parser.add_argument_group("proof")
    proof.add_argument("--compare-baseline", action="store_true", help="also paint on one rank and compare")
    proof.add_argument("--report", type=Path, default=None, metavar="FILE", help="write the figures as JSON")
    proof.add_argument(
        PLOT_FLAG,
        type=Path,
        default=None,
        metavar="FILE",
        help="draw the tokens each expert got over all pictures (.png, .svg, .pdf; None: do not count)",
    )
    proof.add_argument("--verbose", action="store_true", help="show the engine's log")
    return parser.parse_args(argv)


def quieten(verbose: bool) -> None:
    """Keep the engine's log away unless it is asked for; what ends a run is said in a sentence."""
    if verbose:
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Ranks that are killed on Ctrl-C leave semaphores, which Python then cleans up by itself.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def devices(platform: str | None) -> tuple[int, str]:
    """How many ranks have hardware of their own, and what hardware that is."""
    if platform == CPU_PLATFORM:
        return len(os.sched_getaffinity(0)), "cpu"
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count(), accelerator.type if accelerator is not None else "accelerator"


def fill_in_from_checkpoint(args: argparse.Namespace, model: str) -> None:
    """Steps and guidance that were not asked for: what `generation_config.json` recommends."""
    file = Path(model) / "generation_config.json"
    with malformed("generation_config.json"):
        recommended = json.loads(file.read_text()) if file.is_file() else {}
        if args.num_inference_steps is None:
            args.num_inference_steps = int(recommended.get("diff_infer_steps", STEPS))
        if args.guidance_scale is None:
            args.guidance_scale = float(recommended.get("diff_guidance_scale", GUIDANCE))


def run_request(args: argparse.Namespace, config: dict[str, Any]) -> RunRequest:
    base = int(config.get("image_base_size") or 1024)
    return RunRequest(
        tensor_parallel_size=args.tensor_parallel_size,
        ulysses_degree=args.ulysses_degree,
        ring_degree=args.ring_degree,
        pipeline_parallel_size=args.pipeline_parallel_size,
        cfg_parallel_size=args.cfg_parallel_size,
        data_parallel_size=args.data_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        use_hsdp=args.use_hsdp,
        height=base if args.height is None else args.height,
        width=base if args.width is None else args.width,
        num_inference_steps=args.num_inference_steps,
        num_images_per_prompt=args.num_images_per_prompt,
        guidance_scale=args.guidance_scale,
    )


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse before painting what could not be saved after it."""
    if args.output.suffix.lower() != ".png":
        raise ConfigurationError(f"--output is {args.output}, which does not end in .png; name a PNG file")
    if args.plot_expert_load is not None:
        new_figure(args.plot_expert_load, flag=PLOT_FLAG)
    outputs = (("--output", args.output), ("--report", args.report), (PLOT_FLAG, args.plot_expert_load))
    for flag, file in outputs:
        if file is not None:
            check_writable(flag, file)
    last_seed = args.seed + args.num_images_per_prompt - 1
    if not -(2**63) <= args.seed <= last_seed < 2**64:
        raise ConfigurationError(f"--seed is {args.seed}, which does not fit 64 bits; use a smaller one")
    named = [(flag, file) for flag, file in outputs if file is not None]
    for (flag, file), (other_flag, other) in combinations(named, 2):
        if file.absolute() == other.absolute():
            raise ConfigurationError(f"{flag} and {other_flag} are both {file}; name two files")
    for flag, file in named[1:]:
        if is_picture(args, file):
            raise ConfigurationError(
                f"{flag} is {file}, where a picture of --output {args.output} is saved; name another file"
            )


def is_picture(args: argparse.Namespace, file: Path) -> bool:
    """Whether a numbered picture or a comparison will be saved as `file`."""
    output: Path = args.output
    if (file.absolute().parent, file.suffix) != (output.absolute().parent, output.suffix):
        return False
    name = re.fullmatch(rf"{re.escape(output.stem)}(_comparison)?(?:_([1-9]\d*))?", file.stem)
    if name is None or (name[1] and not args.compare_baseline):
        return False
    return int(name[2] or 0) < args.num_images_per_prompt


def paint_and_save(painter: Painter, args: argparse.Namespace) -> list[Painting]:
    """Every picture is saved as soon as it is painted, so that a later failure loses none."""
    paintings = []
    for index in range(args.num_images_per_prompt):
        paintings.append(painter.paint(args.prompt, args.seed + index))
        paintings[-1].image.save(numbered(args.output, index))
        print(f"saved   {numbered(args.output, index)}")
    return paintings


def numbered(path: Path, index: int) -> Path:
    return path if index == 0 else path.with_stem(f"{path.stem}_{index}")


def run(args: argparse.Namespace) -> int:
    """Validate, paint, compare, report. Everything that can be refused is refused before a rank starts."""
    check_outputs(args)
    platform = check_platform_request()
    model = str(DEMO_CHECKPOINT) if args.model is None else args.model
    with malformed("config.json"):
        config = check_checkpoint_folder(model)
        fill_in_from_checkpoint(args, model)
        request = run_request(args, config)
        device_count, device_kind = devices(platform)
        warnings = validate(request, config, device_count=device_count, device_kind=device_kind)
        check_against_config(read_checkpoint(model), config)
        if args.plot_expert_load is not None:
            check_countable(request, config, flag=PLOT_FLAG)
    if args.negative_prompt:
        warnings.append("vLLM-Omni's HunyuanImage-3 takes no negative prompt; --negative-prompt is ignored.")
    if platform == CPU_PLATFORM:
        from omni_ep.platforms.cpu import forkserver

        # The process that all ranks are forked from imports while this one does.
        forkserver.start()

    layout = request.layout
    experts = MoEGeometry.from_config(config).num_experts
    print(f"model   {model}")
    print(
        f"layout  {layout.describe()}"
        + ("" if args.enable_expert_parallel else "; expert parallelism is off")
    )
    print(layout.table(num_experts=experts if args.enable_expert_parallel else None))
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"starting {layout.world_size} rank(s) on {device_kind} ...", flush=True)

    options = {
        "dtype": AUTO_DTYPE.get(device_kind, "bfloat16") if args.dtype == "auto" else args.dtype,
        "trust_remote_code": args.trust_remote_code,
        "vae_use_tiling": args.vae_use_tiling,
        "check_weights": args.check_weights,
    }
    with Painter(model, request, **options) as painter:
        if warning_of_loading := painter.loading_warning():
            print(f"warning: {warning_of_loading}", file=sys.stderr)
        if args.plot_expert_load is not None:
            painter.count_expert_load()
        paintings = paint_and_save(painter, args)
        expert_load = painter.expert_load() if args.plot_expert_load is not None else None
        memory = painter.memory()
        loading = painter.loading()
        startup_s = painter.startup_s
    per_step_s = paintings[0].per_step_s
    print(f"time    {startup_s:.1f} s to start" + (f", {per_step_s:.3f} s per step" if per_step_s else ""))
    for entry in memory:
        print(
            f"rank {entry['rank']}  {entry['expert_bytes']:,} bytes of experts, "
            f"{entry['parameter_bytes']:,} of parameters, "
            f"peak memory {entry['peak_rss_bytes'] / 2**20:,.0f} MiB"
        )
    for entry in loading:
        print(
            f"rank {entry['rank']}  read {entry['bytes_read']:,} bytes, skipped {entry['bytes_skipped']:,}, "
            f"in {entry['seconds']:.2f} s"
        )

    report: dict[str, Any] = {
        "layout": {**layout.to_dict(), "enable_expert_parallel": args.enable_expert_parallel},
        "timings": {"startup_s": startup_s, "per_step_s": per_step_s},
        "memory": memory,
        "loading": loading,
        "quality": None,
        "versions": versions(),
    }
    if expert_load is not None:
        report["expert_load"] = show_expert_load(args, expert_load, model, layout)
    # Before the baseline too: a machine that cannot hold the model on one rank keeps its figures.
    write_report(args.report, report)
    if args.compare_baseline:
        report["quality"] = compare_with_one_rank(args, model, request, paintings, options)
        write_report(args.report, report)
    if args.report is not None:
        print(f"report  {args.report}")
    return 0


def show_expert_load(
    args: argparse.Namespace, load: ExpertLoad, model: str, layout: ParallelLayout
) -> dict[str, Any]:
    """Draw and say how evenly the experts were loaded; returns the figures."""
    steps, pictures = args.num_inference_steps, args.num_images_per_prompt
    where = layout.describe() if args.enable_expert_parallel else "without expert parallelism"
    plot_expert_load(
        load,
        args.plot_expert_load,
        title=f"Tokens per expert: {Path(model).resolve().name}, {steps} step{'s' if steps > 1 else ''}, "
        f"{pictures} picture{'s' if pictures > 1 else ''}\n{where}",
    )
    print(f"expert load: {load.sentence()}; saved {args.plot_expert_load}")
    return {"file": str(args.plot_expert_load), "pictures": pictures, **load.to_dict()}


def write_report(file: Path | None, report: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n")


def compare_with_one_rank(
    args: argparse.Namespace,
    model: str,
    request: RunRequest,
    paintings: list[Painting],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Paint the same on one rank and say how close the pictures are; returns the worst figures."""
    print("starting 1 rank for the baseline ...", flush=True)
    with Painter(model, single_rank(request), **options) as painter:
        baseline = [painter.paint(args.prompt, args.seed + index) for index in range(len(paintings))]
    qualities = []
    for index, (painting, reference) in enumerate(zip(paintings, baseline, strict=True)):
        quality = quality_of(reference.image, painting.image)
        comparison = numbered(args.output.with_stem(f"{args.output.stem}_comparison"), index)
        side_by_side(reference.image, painting.image).save(comparison)
        print(f"against one rank: {sentence(quality)}; saved {comparison}")
        qualities.append(quality)
    return min(qualities, key=lambda quality: quality.psnr_db).to_dict()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    quieten(args.verbose)
    try:
        return run(args)
    except ConfigurationError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except (PaintingError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
