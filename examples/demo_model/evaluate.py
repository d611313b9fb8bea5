# SPDX-License-Identifier: Apache-2.0
"""Paint the demo model's prompts with vLLM-Omni in several layouts, and judge the pixels.

The first layout is the reference: of every other one it is said in how many pictures the same objects
stand, and how far its pictures are from the reference's.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from examples.demo_model import figures
from examples.demo_model.checkpoint_files import CHECKPOINT, GUIDANCE, STEPS
from examples.demo_model.judge import look
from examples.demo_model.pictures import SIDE
from examples.text_to_image.text_to_image import quieten
from omni_ep.commands.layout_flags import HelpFormatter
from omni_ep.config import RunRequest
from omni_ep.errors import ConfigurationError
from omni_ep.layout_names import parse_layouts
from omni_ep.painting import Painter, PaintingError
from omni_ep.quality import compare

EXAMPLES = """examples:
  # the figures of the model card
  %(prog)s --layouts 1 --prompts 200

  # does every layout paint the same objects?
  %(prog)s --layouts "1,tp2,tp2+ep,cfg2+ep,sp2+ep,tp2*cfg2+ep,cfg2*sp2+ep,dp2+ep,tp2*sp2+ep" --prompts 20
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo_model.evaluate",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="checkpoint folder")
    parser.add_argument("--layouts", default="1", help="names such as 1,tp2+ep,cfg2*sp2+ep; 1 is one rank")
    parser.add_argument("--prompts", type=int, default=20, help="how many; every second one is held out")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise; prompt i uses seed + i")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="number format")
    parser.add_argument("--steps", type=int, default=STEPS, help="denoising steps")
    parser.add_argument("--guidance-scale", type=float, default=GUIDANCE, help="classifier-free guidance")
    parser.add_argument("--pictures", type=Path, default=None, metavar="DIR", help="save every picture here")
    parser.add_argument("--report", type=Path, default=None, metavar="FILE", help="write the figures as JSON")
    return parser.parse_args(argv)


def paint(
    args: argparse.Namespace, name: str, fields: dict[str, Any], prompts: Sequence[str]
) -> list[np.ndarray]:
    """One picture per prompt by vLLM-Omni; picture i starts from `args.seed` + i."""
    request = RunRequest(
        height=SIDE,
        width=SIDE,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance_scale,
        **fields,
    )
    with Painter(str(args.model), request, dtype=args.dtype) as painter:
        pictures = [
            np.asarray(painter.paint(prompt, args.seed + index).image)
            for index, prompt in enumerate(tqdm(prompts, desc=name, unit="picture"))
        ]
    return pictures


def save(pictures: list[np.ndarray], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / f"{index:03}.png")


def objects(picture: np.ndarray) -> tuple[str, list[tuple[str, str | None]]]:
    background, seen = look(picture)
    return background, [(found.colour, found.shape) for found in seen]


def against(reference: list[np.ndarray], pictures: list[np.ndarray]) -> dict[str, float]:
    """Share of pictures with the same objects, and means of PSNR (identical counts as 100 dB) and SSIM."""
    qualities = [compare(a, b) for a, b in zip(reference, pictures, strict=True)]
    return {
        "same_objects": mean(objects(a) == objects(b) for a, b in zip(reference, pictures, strict=True)),
        "psnr_db": mean(min(quality.psnr_db, 100.0) for quality in qualities),
        "min_psnr_db": min(min(quality.psnr_db, 100.0) for quality in qualities),
        "ssim": mean(quality.ssim for quality in qualities),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    asked = figures.prompts(args.prompts)
    layouts = parse_layouts(args.layouts)
    report: dict[str, Any] = {
        "dtype": args.dtype,
        "prompts": args.prompts,
        "steps": args.steps,
        "layouts": {},
    }
    reference: list[np.ndarray] | None = None
    for name, fields in layouts.items():
        pictures = paint(args, name, fields, [scene.caption for scene, _ in asked])
        if args.pictures is not None:
            save(pictures, args.pictures / name)
        shares = figures.count(asked, pictures)
        print(f"\n{name}, {args.dtype}, {args.prompts} prompts, {args.steps} steps")
        print(figures.table(shares))
        entry: dict[str, Any] = {"right": shares}
        if reference is None:
            reference = pictures
        else:
            entry["against_first"] = against(reference, pictures)
            print(
                "against {first}: same objects in {same_objects:.1%}, PSNR {psnr_db:.1f} dB in the mean "
                "({min_psnr_db:.1f} at least), SSIM {ssim:.4f}".format(
                    first=next(iter(layouts)), **entry["against_first"]
                ),
                flush=True,
            )
        report["layouts"][name] = entry
        if args.report is not None:
            args.report.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    quieten(verbose=False)
    try:
        run(args)
    except (ConfigurationError, PaintingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
