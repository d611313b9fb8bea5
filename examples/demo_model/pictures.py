# SPDX-License-Identifier: Apache-2.0
"""The world the demo model paints: one or two flat shapes on a flat background, and words for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

SIDE = 128
"""Pixels along each side of a picture."""

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 30, 40),
    "orange": (245, 135, 20),
    "yellow": (250, 220, 50),
    "green": (30, 150, 60),
    "blue": (40, 70, 220),
    "purple": (130, 40, 170),
}
BACKGROUNDS = {
    "white": (245, 245, 245),
    "black": (20, 20, 20),
    "gray": (128, 128, 128),
    "pink": (250, 170, 200),
}
SIZES = {"small": (15.0, 18.0), "large": (28.0, 32.0)}
"""Ranges of the radius in pixels."""
POSITIONS = ("center", "top left", "top right", "bottom left", "bottom right")
ARRANGEMENTS = ("beside", "above")
"""Two objects: the first to the left of the second, or above it."""

_CENTRE = SIDE / 2
_JITTER = 2.0
_CORNER_OFFSET = {"small": 32.0, "large": 25.0}
_PAIR_OFFSET = 29.0
_PAIR_RADII = (17.0, 21.0)


@dataclass(frozen=True)
class Thing:
    """One object: centre `x`, `y` and `radius` in pixels, y downwards."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """A picture and the caption that asks for it."""

    background: str
    things: tuple[Thing, ...]
    caption: str


def held_out(shape: str, colour: str, background: str) -> bool:
    """Whether training never sees this combination; 14 of the 96, every pair of properties is seen."""
    code = 2 * SHAPES.index(shape) + 3 * list(COLOURS).index(colour) + 5 * list(BACKGROUNDS).index(background)
    return code % 7 == 0


def combinations(*, unseen: bool) -> list[tuple[str, str, str]]:
    """All (shape, colour, background) that are held out, or all that are not."""
    return [
        (shape, colour, background)
        for shape in SHAPES
        for colour in COLOURS
        for background in BACKGROUNDS
        if held_out(shape, colour, background) == unseen
    ]


def random_scene(random: Random, *, unseen: bool = False, pair_share: float = 0.25) -> Scene:
    """A scene whose objects are all held-out combinations (`unseen`) or all seen ones.

    `pair_share` is the share of scenes with two objects; they differ in colour.
    """
    allowed = combinations(unseen=unseen)
    shape, colour, background = random.choice(allowed)
    partners = [(s, c) for s, c, b in allowed if b == background and c != colour]
    if partners and random.random() < pair_share:
        return _pair(random, background, ((shape, colour), random.choice(partners)))
    return _single(random, background, shape, colour)


def _single(random: Random, background: str, shape: str, colour: str) -> Scene:
    size = random.choice(tuple(SIZES))
    position = random.choice(POSITIONS) if random.random() < 0.6 else "center"
    names_size, names_position = random.random() < 0.5, position != "center" or random.random() < 0.4
    dx, dy = 0.0, 0.0
    if position != "center":
        offset = _CORNER_OFFSET[size]
        dx = -offset if "left" in position else offset
        dy = -offset if "top" in position else offset
    thing = Thing(
        shape,
        colour,
        _CENTRE + dx + random.uniform(-_JITTER, _JITTER),
        _CENTRE + dy + random.uniform(-_JITTER, _JITTER),
        random.uniform(*SIZES[size]),
    )
    what = f"{size} {colour} {shape}" if names_size else f"{colour} {shape}"
    where = f" at the {position}" if names_position else ""
    wordings = (
        f"a {what}{where} on a {background} background",
        f"a {background} picture with a {what}{where}",
        f"{background} background, {what}{where}",
        f"a drawing of a {what}{where}, {background} background",
    )
    return Scene(background, (thing,), random.choice(wordings))


def _pair(random: Random, background: str, what: Sequence[tuple[str, str]]) -> Scene:
    arrangement = random.choice(ARRANGEMENTS)
    things = []
    for (shape, colour), side in zip(what, (-1, 1), strict=True):
        along, across = _CENTRE + side * _PAIR_OFFSET, _CENTRE
        x, y = (along, across) if arrangement == "beside" else (across, along)
        x, y = x + random.uniform(-_JITTER, _JITTER), y + random.uniform(-_JITTER, _JITTER)
        things.append(Thing(shape, colour, x, y, random.uniform(*_PAIR_RADII)))
    first, second = (f"{colour} {shape}" for shape, colour in what)
    relation = "to the left of" if arrangement == "beside" else "above"
    wordings = (
        f"a {first} {relation} a {second} on a {background} background",
        f"a {background} picture with a {first} {relation} a {second}",
        f"{background} background, {first} {relation} a {second}",
        f"a drawing of a {first} {relation} a {second}, {background} background",
    )
    return Scene(background, tuple(things), random.choice(wordings))


def draw(scenes: Sequence[Scene], side: int = SIDE) -> torch.Tensor:
    """Antialiased pictures of the scenes, `[scenes, 3, side, side]` in -1..1."""
    pixel = torch.arange(side) + 0.5
    pictures = torch.stack([torch.tensor(BACKGROUNDS[scene.background]) for scene in scenes]).float()
    pictures = pictures[:, :, None, None].repeat(1, 1, side, side)
    for index, scene in enumerate(scenes):
        for thing in scene.things:
            distance = signed_distance(
                thing.shape, pixel[None, :] - thing.x, pixel[:, None] - thing.y, thing.radius
            )
            coverage = (0.5 - distance).clamp(0, 1)
            colour = torch.tensor(COLOURS[thing.colour]).float()[:, None, None]
            pictures[index] = pictures[index] * (1 - coverage) + colour * coverage
    return pictures / 127.5 - 1


def signed_distance(shape: str, x: torch.Tensor, y: torch.Tensor, radius: float) -> torch.Tensor:
    """Distance in pixels to the outline of a shape around 0, 0, negative inside; near it, exact enough."""
    ax, ay = x.abs(), y.abs()
    if shape == "circle":
        return torch.hypot(x, y) - radius
    if shape == "square":
        return torch.maximum(ax, ay) - 0.86 * radius
    if shape == "cross":
        arm = 0.3 * radius
        upright = torch.maximum(ax - arm, ay - radius)
        return torch.minimum(upright, torch.maximum(ax - radius, ay - arm))
    if shape == "triangle":
        # Apex at (0, -radius), base at y = 0.8 radius, 1.9 radius wide; normals of the legs by Pythagoras.
        height, half = 1.8 * radius, 0.95 * radius
        leg = (height * ax - half * (y + radius)) / (height**2 + half**2) ** 0.5
        return torch.maximum(leg, y - 0.8 * radius)
    raise ValueError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")
