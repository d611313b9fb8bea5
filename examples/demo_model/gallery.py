# SPDX-License-Identifier: Apache-2.0
"""Paint a few prompts with vLLM-Omni in several layouts, as one picture: a row for every layout."""

import argparse
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from examples.demo_model.checkpoint_files import CHECKPOINT, GUIDANCE, STEPS
from examples.demo_model.evaluate import paint
from examples.text_to_image.text_to_image import quieten
from omni_ep.commands.layout_flags import HelpFormatter
from omni_ep.errors import ConfigurationError
from omni_ep.layout_names import parse_layouts
from omni_ep.painting import PaintingError

PROMPTS = (
    "a red circle to the left of a blue square on a white background",
    "a drawing of a large green triangle, pink background",
    "black background, small yellow circle at the top right",
    "a gray picture with a large red cross",
    "a purple triangle above a yellow square on a black background",
    "a large blue square at the bottom left on a gray background",
)
EXAMPLES = """examples:
  # the picture of the README
  %(prog)s --layouts "1,tp2+ep,cfg2*sp2+ep" --output docs/images/gallery.png

  # other prompts
  %(prog)s --prompt "a green cross on a white background" --prompt "a small red circle on a black background"
"""
_GAP, _LABEL = 8, 18
"""Pixels between pictures, and of the line above each row."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo_model.gallery",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="checkpoint folder")
    parser.add_argument("--layouts", default="1,tp2+ep", help="names such as 1,tp2+ep; 1 is one rank")
    parser.add_argument(
        "--prompt",
        action="append",
        dest="prompts",
        help=f"what to paint; may be given several times (None: {len(PROMPTS)} of its own)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise; prompt i uses seed + i")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="number format")
    parser.add_argument("--steps", type=int, default=STEPS, help="denoising steps")
    parser.add_argument("--guidance-scale", type=float, default=GUIDANCE, help="classifier-free guidance")
    parser.add_argument("--output", type=Path, default=Path("gallery.png"), metavar="FILE", help="PNG")
    return parser.parse_args(argv)


def grid(rows: dict[str, list[np.ndarray]]) -> Image.Image:
    """Pictures `[height, width, 3]` of one size, a labelled row for every key."""
    pictures = next(iter(rows.values()))
    height, width = pictures[0].shape[:2]
    size = (_GAP + len(pictures) * (width + _GAP), len(rows) * (_LABEL + height + _GAP))
    sheet = Image.new("RGB", size, "white")
    write = ImageDraw.Draw(sheet)
    for row, (label, pictures) in enumerate(rows.items()):
        top = row * (_LABEL + height + _GAP)
        write.text((_GAP, top + 3), label, fill="black")
        for column, picture in enumerate(pictures):
            sheet.paste(Image.fromarray(picture), (_GAP + column * (width + _GAP), top + _LABEL))
    return sheet


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    quieten(verbose=False)
    prompts = args.prompts or list(PROMPTS)
    try:
        rows = {
            "one rank" if name == "1" else name: paint(args, name, fields, prompts)
            for name, fields in parse_layouts(args.layouts).items()
        }
        grid(rows).save(args.output)
    except (ConfigurationError, PaintingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    for column, prompt in enumerate(prompts, start=1):
        print(f"{column}  {prompt}")
    print(f"saved {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
