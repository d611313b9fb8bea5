# SPDX-License-Identifier: Apache-2.0
"""Says from the pixels alone, by palette and outline, what a picture shows; nothing here is trained."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import ndimage

from examples.demo_model.pictures import BACKGROUNDS, COLOURS, SHAPES, Scene, signed_distance

_PALETTE = {**BACKGROUNDS, **COLOURS}
_NAMES = list(_PALETTE)
_MIN_AREA = 150
"""Pixels; the smallest cross that is ever drawn covers 200."""
_MIN_OVERLAP = 0.7
"""Intersection over union with the best outline, below which an object has no shape."""
_BORDER = 3


@dataclass(frozen=True)
class Seen:
    """An object found: its colour, its best shape or None, and its centre in pixels."""

    colour: str
    shape: str | None
    x: float
    y: float


@dataclass(frozen=True)
class Verdict:
    """What of a scene a picture shows."""

    background: bool
    colours: bool
    shapes: bool

    @property
    def right(self) -> bool:
        return self.background and self.colours and self.shapes


def look(picture: np.ndarray) -> tuple[str, list[Seen]]:
    """Background and objects of a uint8 picture `[height, width, 3]`, objects from left to right."""
    palette = np.array(list(_PALETTE.values()), dtype=np.float32)
    nearest = ((picture[:, :, None, :].astype(np.float32) - palette) ** 2).sum(-1).argmin(-1)
    inner = (slice(_BORDER, -_BORDER),) * 2
    frame = np.ones(nearest.shape, dtype=bool)
    frame[inner] = False
    background = _most_common(nearest[frame], range(len(BACKGROUNDS)))
    backdrop = palette[_NAMES.index(background)]
    # Half way between the backdrop and its nearest colour, an edge pixel belongs to neither.
    foreground = np.linalg.norm(picture.astype(np.float32) - backdrop, axis=-1) > 60
    labels, count = ndimage.label(foreground)
    found = []
    for label in range(1, count + 1):
        mask = labels == label
        if mask.sum() < _MIN_AREA:
            continue
        core = ndimage.binary_erosion(mask, iterations=2)
        pixels = nearest[core if core.any() else mask]
        colour = _most_common(pixels, range(len(BACKGROUNDS), len(_NAMES)))
        y, x = ndimage.center_of_mass(mask)
        found.append(Seen(colour, _shape(mask), float(x), float(y)))
    return background, sorted(found, key=lambda seen: seen.x)


def _most_common(values: np.ndarray, among: range) -> str:
    counts = np.bincount(values.ravel(), minlength=len(_NAMES))
    return _NAMES[max(among, key=lambda index: counts[index])]


def _shape(mask: np.ndarray) -> str | None:
    """The shape whose outline, fitted into the object's bounding box, overlaps it best."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    best, overlap = None, _MIN_OVERLAP
    for shape in SHAPES:
        outline = _outline(shape, *box.shape)
        common = (outline & box).sum() / (outline | box).sum()
        if common > overlap:
            best, overlap = shape, common
    return best


def _outline(shape: str, height: int, width: int) -> np.ndarray:
    """The shape stretched over a box, `[height, width]`."""
    left, right, top, bottom = {
        "circle": (-1.0, 1.0, -1.0, 1.0),
        "square": (-0.86, 0.86, -0.86, 0.86),
        "triangle": (-0.95, 0.95, -1.0, 0.8),
        "cross": (-1.0, 1.0, -1.0, 1.0),
    }[shape]
    x = left + (torch.arange(width) + 0.5) / width * (right - left)
    y = top + (torch.arange(height) + 0.5) / height * (bottom - top)
    inside: np.ndarray = (signed_distance(shape, x[None, :], y[:, None], 1.0) <= 0).numpy()
    return inside


def judge(picture: np.ndarray, scene: Scene) -> Verdict:
    """Compare a picture with the scene that was asked for: the same objects, in the same order."""
    background, seen = look(picture)
    things = list(scene.things)
    if len(things) == 2 and abs(things[0].x - things[1].x) < abs(things[0].y - things[1].y):
        seen = sorted(seen, key=lambda found: found.y)
    same_number = len(seen) == len(things)
    return Verdict(
        background == scene.background,
        same_number and all(s.colour == t.colour for s, t in zip(seen, things, strict=True)),
        same_number and all(s.shape == t.shape for s, t in zip(seen, things, strict=True)),
    )
