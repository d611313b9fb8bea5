# SPDX-License-Identifier: Apache-2.0
"""Paints prompts of seen and held-out combinations with the plain model and counts what is right."""

from collections import defaultdict
from collections.abc import Iterator
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer

from examples.demo_model.judge import Verdict, judge
from examples.demo_model.model import VAE_FACTOR, DemoModel
from examples.demo_model.pictures import SIDE, Scene, random_scene
from examples.demo_model.prompts import encode
from examples.demo_model.sampling import denoise, noise, to_pixels

PROMPTS = 200
_SEED = 20_000_000
"""Scenes of their own, not those of training."""


def prompts(number: int = PROMPTS) -> list[tuple[Scene, bool]]:
    """Scenes to ask for, and whether each is a held-out combination; every second one is."""
    return [
        (random_scene(Random(_SEED + index), unseen=index % 2 == 1), index % 2 == 1)
        for index in range(number)
    ]


def paint(
    model: DemoModel,
    tokenizer: Tokenizer,
    scenes: list[Scene],
    *,
    steps: int,
    guidance: float,
    shift: float,
    seed: int = 0,
) -> list[np.ndarray]:
    """A picture for every scene, in batches of prompts of one length; picture i starts from seed + i."""
    side = SIDE // VAE_FACTOR
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, scene in enumerate(scenes):
        by_length[len(tokenizer.encode(scene.caption).ids)].append(index)
    pictures: dict[int, np.ndarray] = {}
    for group in by_length.values():
        for batch in _chunks(group, 16):
            captions = [scenes[index].caption for index in batch]
            start = torch.cat(
                [noise(seed + index, model.config.latent_channels, side, side) for index in batch]
            )
            wanted, unwanted = (
                encode(tokenizer, captions, SIDE, SIDE, SIDE, conditional=c) for c in (True, False)
            )
            latents = denoise(model, wanted, unwanted, start, steps=steps, guidance=guidance, shift=shift)
            pictures.update(zip(batch, to_pixels(model, latents).numpy(), strict=True))
    return [pictures[index] for index in range(len(scenes))]


def _chunks(values: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def count(asked: list[tuple[Scene, bool]], pictures: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """Shares of right backgrounds, colours, shapes and of all three, for seen and held-out combinations."""
    verdicts: dict[str, list[Verdict]] = {"seen": [], "held out": []}
    for (scene, unseen), picture in zip(asked, pictures, strict=True):
        verdicts["held out" if unseen else "seen"].append(judge(picture, scene))
    return {
        kind: {
            part: sum(getattr(verdict, part) for verdict in some) / len(some)
            for part in ("background", "colours", "shapes", "right")
        }
        for kind, some in verdicts.items()
        if some
    }


def table(shares: dict[str, dict[str, float]]) -> str:
    """`count`'s result as text."""
    lines = [f"{'':10}background  colours   shapes  all right"]
    for kind, parts in shares.items():
        numbers = "  ".join(f"{value:8.1%}" for value in parts.values())
        lines.append(f"{kind:10}{numbers}")
    return "\n".join(lines)
