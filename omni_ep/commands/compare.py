# SPDX-License-Identifier: Apache-2.0
"""`omni-ep compare`: are these pictures the reference picture?"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omni_ep.commands.layout_flags import HelpFormatter
from omni_ep.errors import ConfigurationError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
"""Files that count as pictures inside a folder."""

_EPILOG = """\
exit code: 0 if every picture passes (or no threshold was given), 1 if one does not, 2 if something cannot be
compared.

examples:
  # the picture of an expert-parallel float32 run against the one-device picture
  omni-ep compare baseline.png tp2_ep.png --preset parity --side-by-side difference.png

  # two folders of bf16 pictures with equal names
  omni-ep compare baseline/ tp2_ep/ --preset lossy --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two files to compare; ``name`` is how the result is called."""

    name: str
    reference: Path
    image: Path


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "compare",
        help="how far pictures are from a reference",
        description="PSNR, SSIM and differences against a reference. Folders are matched by file name.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("reference", metavar="REFERENCE", type=Path, help="picture, or folder of pictures")
    parser.add_argument(
        "images", metavar="IMAGE", type=Path, nargs="+", help="pictures, or folders if REFERENCE is one"
    )
    parser.add_argument(
        "--preset",
        choices=("parity", "lossy"),
        help="thresholds: parity for float32 (PSNR 60 dB), lossy for bf16 (PSNR 35 dB, SSIM 0.97)",
    )
    parser.add_argument(
        "--min-psnr", type=float, metavar="DB", help="least PSNR in dB, in place of the preset's"
    )
    parser.add_argument(
        "--min-ssim", type=float, metavar="X", help="least SSIM, up to 1, in place of the preset's"
    )
    parser.add_argument(
        "--side-by-side",
        type=Path,
        metavar="FILE",
        help="save reference, image and amplified difference; with several pictures, a folder",
    )
    parser.add_argument(
        "--amplify", type=float, metavar="X", help="factor of the difference (None: the largest is white)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compares, and says whether the thresholds hold.

    Raises:
        ConfigurationError: for files that are missing, unreadable, unmatched, or of different sizes.
    """
    from omni_ep import quality

    thresholds = _thresholds(args)
    if args.amplify is not None and not (math.isfinite(args.amplify) and args.amplify > 0):
        raise ConfigurationError(f"--amplify must be a finite number above 0, got {args.amplify:g}")
    pairs = list(_pairs(args.reference, args.images))
    if args.side_by_side is not None:
        _keep_inputs(args.side_by_side, pairs)
    results: list[dict[str, Any]] = []
    for pair in pairs:
        reference, image = _read(pair.reference), _read(pair.image)
        try:
            measured = quality.compare(reference, image)
        except ConfigurationError as error:
            raise ConfigurationError(f"{pair.reference} and {pair.image}: {error}") from None
        bins = quality.histogram(reference, image)
        failures = thresholds.verdict(measured) if thresholds else []
        result = {
            "name": pair.name,
            "reference": str(pair.reference),
            "image": str(pair.image),
            **measured.to_dict(),
            "histogram": [asdict(entry) for entry in bins],
            "failures": failures,
            "passed": None if thresholds is None else not failures,
        }
        if args.side_by_side is not None:
            file = _picture_file(args.side_by_side, pair, several=len(pairs) > 1)
            _save(quality.side_by_side(reference, image, args.amplify), file)
            result["side_by_side"] = str(file)
        results.append(result)
        if not args.json:
            print(_text(result, measured, bins))
    passed = None if thresholds is None else all(result["passed"] for result in results)
    if args.json:
        named = None if thresholds is None else {**asdict(thresholds)}
        if named is not None and not math.isfinite(named["min_psnr_db"]):
            named["min_psnr_db"] = None
        print(json.dumps({"passed": passed, "thresholds": named, "comparisons": results}))
    elif len(results) > 1 and passed is not None:
        print(f"{sum(result['passed'] for result in results)} of {len(results)} pictures pass")
    return 1 if passed is False else 0


def _keep_inputs(side_by_side: Path, pairs: list[Pair]) -> None:
    compared = {file.resolve() for pair in pairs for file in (pair.reference, pair.image)}
    for pair in pairs:
        file = _picture_file(side_by_side, pair, several=len(pairs) > 1)
        if file.resolve() in compared:
            raise ConfigurationError(
                f"--side-by-side would write over {file}, which is to be compared; name another file"
            )


def _thresholds(args: argparse.Namespace) -> Any:
    from omni_ep.quality import PRESETS, Thresholds

    for flag, value in (("--min-psnr", args.min_psnr), ("--min-ssim", args.min_ssim)):
        if value is not None and math.isnan(value):
            raise ConfigurationError(f"{flag} must be a number, got {value}")
    if args.min_ssim is not None and args.min_ssim > 1:
        raise ConfigurationError(f"--min-ssim is {args.min_ssim:g} but SSIM never exceeds 1")
    if args.preset is None and args.min_psnr is None and args.min_ssim is None:
        return None
    base = PRESETS[args.preset] if args.preset else None
    if base is not None and args.min_psnr is None and args.min_ssim is None:
        return base
    return Thresholds(
        name=f"{base.name}, changed by flags" if base else "the flags",
        min_psnr_db=next(
            value
            for value in (args.min_psnr, base.min_psnr_db if base else None, -math.inf)
            if value is not None
        ),
        min_ssim=args.min_ssim if args.min_ssim is not None else base.min_ssim if base else None,
        why="given on the command line",
    )


def _pairs(reference: Path, images: list[Path]) -> Iterator[Pair]:
    for path in (reference, *images):
        if not path.exists():
            raise ConfigurationError(f"{path} does not exist")
    for image in images:
        if reference.is_dir() != image.is_dir():
            kinds = ("a folder", "a file") if reference.is_dir() else ("a file", "a folder")
            raise ConfigurationError(
                f"{reference} is {kinds[0]} but {image} is {kinds[1]}; give two folders or two files"
            )
        if reference.is_dir():
            yield from _matched(reference, image, prefix=f"{image}/" if len(images) > 1 else "")
        else:
            yield Pair(name=str(image), reference=reference, image=image)


def _matched(reference: Path, image: Path, *, prefix: str) -> Iterator[Pair]:
    wanted, found = _picture_names(reference), _picture_names(image)
    if not wanted:
        raise ConfigurationError(f"{reference} holds no picture ({', '.join(SUFFIXES)})")
    missing = sorted(wanted - found)
    if missing:
        raise ConfigurationError(
            f"{image} lacks {len(missing)} of the {len(wanted)} pictures in {reference}, among them "
            f"{', '.join(missing[:3])}; folders are matched by file name"
        )
    extra = sorted(found - wanted)
    if extra:
        print(f"warning: {image} has pictures without a reference: {', '.join(extra[:3])}", file=sys.stderr)
    for name in sorted(wanted):
        yield Pair(name=prefix + name, reference=reference / name, image=image / name)


def _picture_names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file()}


def _read(file: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(file) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigurationError(f"{file} cannot be read as a picture ({error})") from None


def _picture_file(target: Path, pair: Pair, *, several: bool) -> Path:
    if not several:
        return target
    return target / f"{pair.name.strip('/').replace('/', '_')}.comparison.png"


def _save(picture: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        picture.save(file)
    except ValueError as error:
        raise ConfigurationError(f"{file} cannot be written as a picture ({error}); use .png") from None


def _text(result: dict[str, Any], measured: Any, bins: list[Any]) -> str:
    psnr = "infinite" if measured.identical else f"{measured.psnr_db:.2f} dB"
    lines = [
        result["name"],
        f"  PSNR {psnr}, SSIM {measured.ssim:.5f}" + (", identical" if measured.identical else ""),
        f"  difference in levels of 255: mean {measured.mean_abs * 255:.3f}, 99th percentile "
        f"{measured.p99_abs * 255:.1f}, maximum {measured.max_abs * 255:.0f}",
    ]
    for entry in bins:
        if entry.values:
            levels = str(entry.first) if entry.first == entry.last else f"{entry.first}-{entry.last}"
            bar = "#" * math.ceil(entry.share * 40)
            lines.append(
                f"  {levels:>8} levels  {entry.share * 100:7.3f} %  {entry.values:>10,} values  {bar}"
            )
    if "side_by_side" in result:
        lines.append(f"  saved {result['side_by_side']}")
    if result["passed"] is not None:
        lines.append("  passes" if result["passed"] else f"  fails: {' '.join(result['failures'])}")
    return "\n".join(lines)
