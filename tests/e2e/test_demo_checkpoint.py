# SPDX-License-Identifier: Apache-2.0
"""The trained checkpoint in the pipeline: the plain model's latents and the same objects, in every layout."""

from functools import cache
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from examples.demo_model import figures
from examples.demo_model.checkpoint_files import CHECKPOINT, FLOW_SHIFT, GUIDANCE, STEPS
from examples.demo_model.evaluate import objects
from examples.demo_model.judge import judge
from examples.demo_model.model import DemoModel
from examples.demo_model.pictures import SIDE, Scene
from examples.demo_model.prompts import encode
from examples.demo_model.sampling import denoise, noise, to_pixels
from omni_ep.quality import PARITY, compare
from tests.e2e.capture import max_error
from tests.e2e.engines import Ranks, ranks
from tests.topologies import run_request

pytestmark = pytest.mark.engine

SAMPLING = {"height": SIDE, "width": SIDE, "num_inference_steps": STEPS, "guidance_scale": GUIDANCE}
SEED = 7
CLEAR = 1e-6
"""Of a router's probability. Float32 rounding moves it by some 1e-7: closer choices may fall either way."""


@cache
def plain() -> tuple[DemoModel, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return DemoModel.from_checkpoint(CHECKPOINT), tokenizer


@cache
def scenes(number: int) -> list[Scene]:
    """Prompts of seen and held-out combinations that the plain model paints right, as it does most."""
    model, tokenizer = plain()
    asked = [scene for scene, _ in figures.prompts(2 * number)]
    settings = {"steps": STEPS, "guidance": GUIDANCE, "shift": FLOW_SHIFT}
    pictures = figures.paint(model, tokenizer, asked, seed=SEED, **settings)
    right = [scene for scene, picture in zip(asked, pictures, strict=True) if judge(picture, scene).right]
    assert len(right) >= 0.75 * len(asked), f"{len(right)} of {len(asked)} pictures are right"
    return right[:number]


@cache
def closest_choice(prompt: str) -> float:
    """Least gap, on the plain model's way, between the last chosen expert's probability and the next."""
    gaps: list[float] = []

    def look(top_k: int, logits_TE: torch.Tensor) -> None:
        chosen_TK, next_T1 = logits_TE.softmax(-1).topk(top_k + 1).values.split([top_k, 1], dim=-1)
        gaps.append(float((chosen_TK[:, -1:] - next_T1).min()))

    layers = plain()[0].moe_layers
    hooks = [
        layer.gate.wg.register_forward_hook(lambda _, __, logits, top_k=layer.top_k: look(top_k, logits))
        for layer in layers
    ]
    try:
        denoised(prompt)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(gaps) == STEPS * len(layers) * 2, "one choice per step, layer and branch of the guidance"
    return min(gaps)


@cache
def clear_scenes(number: int) -> list[Scene]:
    """Scenes of which no router's choice is within rounding: picking experts jumps where two are level."""
    clear = [scene for scene in scenes(16) if closest_choice(scene.caption) > CLEAR]
    assert len(clear) >= number, f"{len(clear)} of 16 scenes are clear"
    return clear[:number]


@cache
def plain_steps(prompt: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Latents after every step and the picture, by the plain model in float32."""
    steps, latents = denoised(prompt)
    return steps, to_pixels(plain()[0], latents)[0].numpy()


def denoised(prompt: str) -> tuple[list[np.ndarray], torch.Tensor]:
    """Latents after every step, and the last ones as the VAE takes them."""
    model, tokenizer = plain()
    branches = [encode(tokenizer, [prompt], SIDE, SIDE, SIDE, conditional=c) for c in (True, False)]
    steps: list[np.ndarray] = []
    latents = denoise(
        model,
        *branches,
        noise(SEED, model.config.latent_channels, SIDE // 16, SIDE // 16),
        steps=STEPS,
        guidance=GUIDANCE,
        shift=FLOW_SHIFT,
        on_step=lambda _, latents: steps.append(latents.numpy().copy()),
    )
    return steps, latents


def paint(live: Ranks, scene: Scene) -> dict[str, Any]:
    return live.paint(scene.caption, **SAMPLING, seed=SEED)


@pytest.mark.parametrize("topology", ["one rank", "tp2+ep", "cfg2*sp2+ep"])
def test_float32_equals_the_plain_model(topology: str) -> None:
    with ranks(run_request(topology), model=CHECKPOINT, dtype=torch.float32) as live:
        for scene in clear_scenes(2):
            painted = paint(live, scene)
            steps, picture = plain_steps(scene.caption)
            for step, (latents, expected) in enumerate(zip(painted["latents"], steps, strict=True)):
                error = max_error(latents, expected)
                assert error <= 1e-4, f"{scene.caption}, step {step}: {error:.2e} of the maximum"
            assert PARITY.verdict(compare(picture, painted["image"])) == []
            assert objects(painted["image"]) == objects(picture)


def test_bf16_paints_the_same_objects() -> None:
    with ranks(run_request("one rank"), model=CHECKPOINT, dtype=torch.bfloat16) as live:
        alone = [paint(live, scene)["image"] for scene in scenes(4)]
    with ranks(run_request("tp2+ep"), model=CHECKPOINT, dtype=torch.bfloat16) as live:
        together = [paint(live, scene)["image"] for scene in scenes(4)]
    qualities = [compare(a, b) for a, b in zip(alone, together, strict=True)]
    assert mean(min(quality.psnr_db, 100) for quality in qualities) >= 30
    assert mean(quality.ssim for quality in qualities) >= 0.97
    assert [objects(picture) for picture in together] == [objects(picture) for picture in alone]
