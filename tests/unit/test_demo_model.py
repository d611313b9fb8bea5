# SPDX-License-Identifier: Apache-2.0
"""The plain model against the ground truth, its two ways through the VAE, its world and its judge."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from examples.demo_model import checkpoint_files, figures, pictures, train
from examples.demo_model.judge import judge
from examples.demo_model.model import DemoModel
from examples.demo_model.pictures import BACKGROUNDS, COLOURS, SHAPES, Scene, Thing, draw, held_out
from examples.demo_model.prompts import encode, image_ratio
from examples.demo_model.sampling import denoise, noise, to_pixels
from examples.demo_model.vae import VAE
from omni_ep.quality import PARITY, compare
from tests.workers import TINY

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
PROMPT = ["a red cube on a table"]


@pytest.fixture(scope="module")
def tiny() -> tuple[DemoModel, Tokenizer]:
    return DemoModel.from_checkpoint(TINY), Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.mark.parametrize(("name", "height", "width"), [("base", 64, 64), ("wide", 48, 80)])
def test_equals_ground_truth(tiny: tuple[DemoModel, Tokenizer], name: str, height: int, width: int) -> None:
    model, tokenizer = tiny
    branches = [encode(tokenizer, PROMPT, height, width, 64, conditional=c) for c in (True, False)]
    with np.load(REFERENCE / f"{name}.npz") as truth:
        start = noise(42, 16, height // 16, width // 16)
        assert torch.equal(start, torch.from_numpy(truth["noise"]))

        def check(step: int, latents: torch.Tensor) -> None:
            expected = truth[f"latents_{step}"]
            error = np.abs(latents.numpy() - expected).max() / np.abs(expected).max()
            assert error <= 1e-4, f"step {step}: {error:.2e} of the maximum"

        latents = denoise(model, *branches, start, steps=4, guidance=5.0, shift=3.0, on_step=check)
        picture = to_pixels(model, latents)[0].numpy()
        assert PARITY.verdict(compare(truth["image"], picture)) == []


def test_layers_equal_ground_truth(tiny: tuple[DemoModel, Tokenizer]) -> None:
    model, _ = tiny
    with np.load(REFERENCE / "base.npz") as truth:
        for index, layer in enumerate(model.moe_layers):
            inputs = torch.from_numpy(truth[f"moe_in_{index}"])
            with torch.no_grad():
                out = layer(inputs).numpy()
            assert np.abs(out - truth[f"moe_out_{index}"]).max() <= 1e-4 * np.abs(out).max()
            assert layer.load.sum() == inputs.shape[0] * inputs.shape[1] * layer.top_k


def test_balance_loss_is_one_when_even_and_more_when_not(tiny: tuple[DemoModel, Tokenizer]) -> None:
    layer = tiny[0].moe_layers[0]
    gate = layer.gate.wg.weight
    kept = gate.detach().clone()
    try:
        with torch.no_grad():
            gate.zero_()
            layer(torch.randn(1, 16, gate.shape[1]))
            # All probabilities are equal, so the mean is exact whatever the ties choose.
            assert layer.balance_loss.item() == pytest.approx(1)
            gate[0], gate[1] = 1, 0.5
            layer(torch.ones(1, 16, gate.shape[1]))
            assert layer.balance_loss.item() > 2
    finally:
        with torch.no_grad():
            gate.copy_(kept)


@pytest.mark.parametrize("blocks", [0, 1])
def test_one_frame_equals_all_frames(blocks: int) -> None:
    torch.manual_seed(0)
    vae = VAE((64, 64, 64, 64, 64), 16, blocks)
    latents, picture = torch.randn(1, 16, 2, 3), torch.randn(1, 3, 32, 48)
    with torch.no_grad():
        flat, encoded = vae.flat_().decode(latents), vae.encode(picture)[0]
        assert not torch.allclose(vae.flat_(False).decode(latents), flat, atol=1e-2)
        vae.make_flat_()
        assert torch.allclose(vae.decode(latents), flat, atol=1e-5)
        assert torch.allclose(vae.encode(picture)[0], encoded, atol=1e-5)


@pytest.mark.parametrize(
    ("height", "width", "index"), [(64, 64, 16), (32, 128, 0), (128, 32, 32), (48, 80, 12)]
)
def test_image_ratio(height: int, width: int, index: int) -> None:
    assert image_ratio(height, width, 64) == index


def test_prompts_of_one_batch_must_be_equally_long(tiny: tuple[DemoModel, Tokenizer]) -> None:
    with pytest.raises(ValueError, match=r"equally long, not \[1, 2\]"):
        encode(tiny[1], ["a", "ab"], 64, 64, 64)


def test_judge_knows_every_combination() -> None:
    for shape, colour, background in product(SHAPES, COLOURS, BACKGROUNDS):
        for radius in (14.0, 34.0):
            scene = Scene(background, (Thing(shape, colour, 60.0, 66.0, radius),), "")
            verdict = judge(_pixels(scene), scene)
            assert verdict.right, (scene, verdict)


@pytest.mark.parametrize("unseen", [False, True])
def test_judge_agrees_with_the_painter(unseen: bool) -> None:
    random = Random(0)
    for _ in range(100):
        scene = pictures.random_scene(random, unseen=unseen)
        assert judge(_pixels(scene), scene).right, scene


def test_judge_tells_what_is_wrong() -> None:
    thing = Thing("circle", "red", 64.0, 64.0, 30.0)
    scene = Scene("white", (thing,), "")
    for change, wrong in (
        ({"shape": "square"}, "shapes"),
        ({"shape": "triangle"}, "shapes"),
        ({"colour": "orange"}, "colours"),
    ):
        painted = replace(scene, things=(replace(thing, **change),))
        verdict = judge(_pixels(painted), scene)
        assert not getattr(verdict, wrong), change
        assert not verdict.right
    assert not judge(_pixels(replace(scene, background="pink")), scene).background
    left, right = replace(thing, x=35.0, radius=18.0), Thing("cross", "blue", 93.0, 64.0, 18.0)
    pair = Scene("white", (left, right), "")
    assert judge(_pixels(pair), pair).right

    swapped = Scene("white", (replace(left, x=93.0), replace(right, x=35.0)), "")
    assert not judge(_pixels(swapped), pair).right
    assert not judge(_pixels(scene), pair).right, "one of two is not enough"
    assert not judge(np.full((128, 128, 3), 245, dtype=np.uint8), scene).right
    assert not judge(np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8), scene).right


def _pixels(scene: Scene) -> np.ndarray:
    return ((draw([scene])[0] / 2 + 0.5) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def test_held_out_combinations_leave_every_pair_to_be_seen() -> None:
    seen, unseen = pictures.combinations(unseen=False), pictures.combinations(unseen=True)
    assert len(unseen) == 14
    assert len(seen) + len(unseen) == len(SHAPES) * len(COLOURS) * len(BACKGROUNDS)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert {(c[first], c[second]) for c in unseen} <= {(c[first], c[second]) for c in seen}


def test_training_sees_no_held_out_combination() -> None:
    args = train.parse_args(["--output", "unused"])
    for scene in train.scenes_of(args):
        assert not any(held_out(t.shape, t.colour, scene.background) for t in scene.things)
    for scene, unseen in figures.prompts():
        assert {held_out(t.shape, t.colour, scene.background) for t in scene.things} == {unseen}


def test_training_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(2, 1)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    monkeypatch.setattr(train, "SAVE_EVERY", 3)

    def run(file: Path, fail_at: int | None) -> dict[str, torch.Tensor]:
        def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
            if step == fail_at:
                raise KeyboardInterrupt
            torch.manual_seed(step)
            return module(torch.randn(4, 2)).pow(2).mean(), {}

        train.optimise("test", module, loss_of, 8, 0.1, file, average=0.5)
        return {name: value.clone() for name, value in module.state_dict().items()}

    whole = run(tmp_path / "whole.pt", None)
    module.load_state_dict(start)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped.pt", 5)
    torch.nn.init.zeros_(module.weight)
    resumed = run(tmp_path / "stopped.pt", None)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_every_word_of_a_caption_is_one_token() -> None:
    scenes = train.scenes_of(train.parse_args(["--output", "unused", "--scenes", "2000"]))
    tokenizer = checkpoint_files.build_tokenizer([scene.caption for scene in scenes])
    for scene in scenes[:200]:
        words = scene.caption.replace(",", " ,").split()
        assert len(tokenizer.encode(scene.caption).ids) == len(words), scene.caption
    assert tokenizer.get_vocab_size() <= checkpoint_files.VOCAB_SIZE
    text = "Ein Würfel, 立方体"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_training_script_trains(tmp_path: Path) -> None:
    """A step of everything: VAE, latents, decoder, flow, checkpoint, figures; then a refusal to overwrite."""
    few = ("--vae-steps", 1, "--vae-full-size-steps", 1, "--decoder-steps", 1)
    few += ("--scenes", 32, "--steps", 1, "--prompts", 2)
    arguments = [str(value) for value in ("--output", tmp_path / "run", *few)]
    result = train.main(arguments)
    assert set(result["shares"]) == {"seen", "held out"}
    assert json.loads((tmp_path / "run" / "figures.json").read_text()) == result
    with pytest.raises(SystemExit, match="holds an earlier run: add --resume"):
        train.main(arguments)
