# SPDX-License-Identifier: Apache-2.0
"""Is it the same picture? Metrics, named thresholds, and a picture of the difference.

Expert parallelism must not change what is painted, so every run can be judged against a single-device run of
the same prompt and seed. PSNR and SSIM come from scikit-image, imported only when used because it is slow to
import.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from omni_ep.errors import ConfigurationError

Picture: TypeAlias = Image.Image | NDArray[np.uint8]
"""A PIL image (converted to RGB) or a uint8 array [height, width, 3]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How far a picture is from its reference.

    Differences are absolute, per colour value, on a 0..1 scale.
    """

    identical: bool
    psnr_db: float
    """Peak signal-to-noise ratio in dB; infinite for identical pictures."""
    ssim: float
    """Structural similarity, 1 for identical pictures."""
    mean_abs: float
    p99_abs: float
    """99th percentile of the differences."""
    max_abs: float

    def to_dict(self) -> dict[str, bool | float | None]:
        """JSON-able, with exactly the field names as keys; ``psnr_db`` is None where it is infinite."""
        return {**asdict(self), "psnr_db": self.psnr_db if math.isfinite(self.psnr_db) else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What a comparison must reach; ``why`` says for which runs."""

    name: str
    min_psnr_db: float
    min_ssim: float | None
    why: str

    def verdict(self, quality: Quality) -> list[str]:
        """The thresholds missed, one sentence each; empty when the picture passes."""
        failures = []
        # Written as "not >=" so that NaN fails.
        if not quality.psnr_db >= self.min_psnr_db:
            failures.append(
                f"PSNR {quality.psnr_db:.1f} dB is below the {self.min_psnr_db:g} dB of {self.name}."
            )
        if self.min_ssim is not None and not quality.ssim >= self.min_ssim:
            failures.append(f"SSIM {quality.ssim:.4f} is below the {self.min_ssim:g} of {self.name}.")
        return failures


PARITY = Thresholds(
    name="parity",
    min_psnr_db=60.0,
    min_ssim=None,
    why="float32, or bf16 with top-1 routing: only the order of summation differs, so hardly a colour value "
    "may move; one expert zeroed in one layer leaves no more than 20 dB",
)
LOSSY = Thresholds(
    name="lossy",
    min_psnr_db=35.0,
    min_ssim=0.97,
    why="bf16: partial sums of different layouts round differently and flip near-ties of the router, which a "
    "person does not see",
)


PRESETS = {preset.name: preset for preset in (PARITY, LOSSY)}
"""Thresholds by name."""


def compare(reference: Picture, image: Picture) -> Quality:
    """Judge ``image`` by ``reference``.

    The SSIM window is 7 pixels, or the largest odd number that fits a smaller picture.

    Raises:
        ConfigurationError: if the sizes differ.
        ValueError: if an array is not uint8 of shape [height, width, 3].
    """
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

    a, b = _pair(reference, image)
    difference = np.abs(a - b)
    identical = not difference.any()
    side = min(a.shape[:2])
    window = min(7, side if side % 2 else side - 1)
    ssim = structural_similarity(
        a, b, win_size=window, data_range=1.0, channel_axis=-1, use_sample_covariance=window > 1
    )
    return Quality(
        identical=identical,
        psnr_db=math.inf if identical else float(peak_signal_noise_ratio(a, b, data_range=1.0)),
        ssim=float(ssim),
        mean_abs=float(difference.mean()),
        p99_abs=float(np.percentile(difference, 99)),
        max_abs=float(difference.max()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Colour values whose difference lies in ``first..last`` levels of 255, both included."""

    first: int
    last: int
    values: int
    """How many there are."""
    share: float
    """Of all colour values of the picture, 0..1."""


BIN_EDGES = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 256)
"""First level of each bin, doubling, and one past the last."""


def histogram(reference: Picture, image: Picture) -> list[Bin]:
    """How many colour values differ by how much, in ten bins; their counts add up to all colour values.

    Raises:
        ConfigurationError: if the sizes differ.
    """
    a, b = _pair(reference, image)
    levels = np.rint(np.abs(a - b) * 255).astype(np.int64)
    counts, _ = np.histogram(levels, bins=BIN_EDGES)
    return [
        Bin(first=first, last=end - 1, values=int(count), share=float(count / levels.size))
        for first, end, count in zip(BIN_EDGES[:-1], BIN_EDGES[1:], counts, strict=True)
    ]


def sentence(quality: Quality) -> str:
    """One line for people."""
    if quality.identical:
        return "identical to the single-device picture"
    return (
        f"PSNR {quality.psnr_db:.1f} dB, SSIM {quality.ssim:.4f}, difference mean {quality.mean_abs:.5f}, "
        f"p99 {quality.p99_abs:.5f}, maximum {quality.max_abs:.5f} (on a 0..1 scale)"
    )


def side_by_side(reference: Picture, image: Picture, amplify: float | None = None) -> Image.Image:
    """Three labelled panels of equal width: reference, image, amplified difference.

    The difference is shown in grey, the largest of the three colours per pixel. ``amplify`` is the factor it
    is multiplied by; left out, the largest difference becomes white. Pictures under 256 pixels are enlarged
    by a whole factor, pixels kept sharp.

    Raises:
        ConfigurationError: if the sizes differ.
    """
    a, b = _pair(reference, image)
    grey, label = _difference(a, b, amplify)
    return _strip([a, b, grey], ["reference", "image", label])


def difference_map(
    reference: Picture, image: Picture, amplify: float | None = None
) -> tuple[Image.Image, str]:
    """The third panel of ``side_by_side`` alone, at the pictures' size, and its label.

    Raises:
        ConfigurationError: if the sizes differ.
    """
    grey, label = _difference(*_pair(reference, image), amplify)
    return Image.fromarray(np.rint(grey * 255).astype(np.uint8)), label


def _difference(
    a: NDArray[np.float64], b: NDArray[np.float64], amplify: float | None
) -> tuple[NDArray[np.float64], str]:
    difference = np.abs(a - b).max(axis=-1)
    largest = float(difference.max())
    if amplify is None:
        amplify = 1.0 / largest if largest else 1.0
    label = f"difference x {amplify:.4g}" if largest else "no difference"
    grey = np.clip(difference * amplify, 0.0, 1.0)
    return np.repeat(grey[..., None], 3, axis=-1), label


def _strip(panels: list[NDArray[np.float64]], labels: list[str]) -> Image.Image:
    gap, background, ink = 8, (40, 40, 40), (255, 255, 255)
    font = ImageFont.load_default(size=14)
    height, width = panels[0].shape[:2]
    scale = max(1, 256 // max(height, width))
    column = max(width * scale, *(math.ceil(font.getlength(label)) for label in labels))
    top = 14 + 2 * gap
    sheet = Image.new("RGB", (3 * column + 4 * gap, height * scale + top + gap), background)
    draw = ImageDraw.Draw(sheet)
    for number, (panel, label) in enumerate(zip(panels, labels, strict=True)):
        left = gap + number * (column + gap)
        picture = Image.fromarray(np.rint(panel * 255).astype(np.uint8))
        draw.text((left, gap), label, fill=ink, font=font)
        sheet.paste(picture.resize((width * scale, height * scale), Image.Resampling.NEAREST), (left, top))
    return sheet


def _pair(reference: Picture, image: Picture) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both pictures as float64 [height, width, 3] on a 0..1 scale."""
    a, b = _pixels(reference), _pixels(image)
    if a.shape != b.shape:
        raise ConfigurationError(
            f"pictures of different sizes cannot be compared: the reference is {a.shape[0]}x{a.shape[1]} and "
            f"the image {b.shape[0]}x{b.shape[1]} (height x width)"
        )
    return a / 255.0, b / 255.0


def _pixels(picture: Picture) -> NDArray[np.uint8]:
    if isinstance(picture, Image.Image):
        return np.asarray(picture.convert("RGB"))
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
        raise ValueError(
            f"a picture must be uint8 [height, width, 3], got {picture.dtype} {list(picture.shape)}"
        )
    return picture
