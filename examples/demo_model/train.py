# SPDX-License-Identifier: Apache-2.0
"""Train the demo model from nothing: VAE, its decoder once more, then flow matching on its latents.

Every step draws its data from the seed and its own number, so a run that was stopped goes on with
``--resume`` where it was last saved and ends with the weights of a run that was not.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from examples.demo_model import checkpoint_files, figures
from examples.demo_model.checkpoint_files import FLOW_SHIFT, GUIDANCE, STEPS
from examples.demo_model.model import DemoModel, ModelConfig
from examples.demo_model.pictures import SIDE, Scene, draw, random_scene
from examples.demo_model.prompts import encode, special
from omni_ep.commands.layout_flags import HelpFormatter

EXAMPLES = """examples:
  # from nothing
  %(prog)s --output demo-model

  # go on after a stop
  %(prog)s --output demo-model --resume

  # a minute, to see that everything works
  %(prog)s --output try --vae-steps 4 --vae-full-size-steps 2 --decoder-steps 4 --scenes 64 \\
      --steps 4 --prompts 4
"""
VAE_CROP = 64
VAE_BATCH = 16
BATCH = 32
WARM_UP = 100
KL_WEIGHT = 1e-3
EDGE_WEIGHT = 3.0
"""What pixels near an outline weigh above those of flat colour, which most of a picture is."""
LATENT_NOISE = 0.5
"""Largest noise on the latents that the VAE's decoder learns from, so that it forgives the flow's errors."""
BALANCE_WEIGHT = 0.01
DROPPED_CAPTIONS = 0.1
"""Share of captions replaced by `<cfg>`, so that guidance has something to lead away from."""
EMA = 0.999
TOKENIZER_SCENES = 10_000
"""Captions that the vocabulary is made from."""
SAVE_EVERY = 250
VAE_LEARNING_RATE = 1e-3
DECODER_BATCH = 4
DECODER_LEARNING_RATE = 3e-4
LEARNING_RATE = 1e-3


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo_model.train",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for states and checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the states in the folder")
    parser.add_argument("--vae-steps", type=int, default=900, help="VAE steps on crops")
    parser.add_argument("--vae-full-size-steps", type=int, default=100, help="VAE steps on whole pictures")
    parser.add_argument("--scenes", type=int, default=16_000, help="pictures to learn from")
    parser.add_argument("--decoder-steps", type=int, default=1500, help="steps of the VAE's decoder alone")
    parser.add_argument("--steps", type=int, default=6000, help="flow-matching steps")
    parser.add_argument("--prompts", type=int, default=figures.PROMPTS, help="prompts judged at the end")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    parser.add_argument("--threads", type=int, default=2, help="processor threads")
    return parser.parse_args(argv)


def learning_rate(step: int, steps: int) -> float:
    """Factor on the learning rate: linear warm-up, then half a cosine down to zero."""
    warm_up = min(WARM_UP, steps // 10 + 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def optimise(
    name: str,
    module: nn.Module,
    loss_of: Callable[[int], tuple[torch.Tensor, dict[str, float]]],
    steps: int,
    rate: float,
    state_file: Path,
    average: float,
) -> None:
    """Minimise `loss_of(step)` and leave the average of the weights in `module`; saved every few minutes."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    averaged = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(average)
    )
    first, spent = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        module.load_state_dict(state["module"])
        averaged.load_state_dict(state["averaged"])
        optimizer.load_state_dict(state["optimizer"])
        first, spent = state["step"], state["seconds"]
    began = time.monotonic() - spent

    def save(step: int) -> None:
        partial = state_file.with_suffix(".partial")
        torch.save(
            {
                "module": module.state_dict(),
                "averaged": averaged.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "seconds": time.monotonic() - began,
            },
            partial,
        )
        partial.replace(state_file)

    bar = tqdm(range(first, steps), desc=name, initial=first, total=steps, unit="step", mininterval=5)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = rate * learning_rate(step, steps)
        loss, shown = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(module)
        bar.set_postfix({key: f"{value:.4f}" for key, value in shown.items()}, refresh=False)
        if (step + 1) % SAVE_EVERY == 0:
            save(step + 1)
    if first < steps:
        save(steps)
    module.load_state_dict(averaged.module.state_dict())


def crop(picture: torch.Tensor, scene: Scene, random: Random, side: int) -> torch.Tensor:
    """A square of the picture that shows a part of one of its things."""
    thing = random.choice(scene.things)
    corner = [
        int(min(max(middle - side / 2 + random.uniform(-side / 2, side / 2), 0), SIDE - side))
        for middle in (thing.y, thing.x)
    ]
    return picture[:, corner[0] : corner[0] + side, corner[1] : corner[1] + side]


def edge_weights(pictures: torch.Tensor) -> torch.Tensor:
    """Weights `[B, 1, H, W]` of the pixels, 1 in the mean: more within four pixels of a change of colour."""
    highest, lowest = (sign * functional.max_pool2d(sign * pictures, 9, 1, 4) for sign in (1, -1))
    weights = 1 + EDGE_WEIGHT * ((highest - lowest).amax(dim=1, keepdim=True) > 0.1)
    return weights / weights.mean()


def train_vae(model: DemoModel, args: argparse.Namespace) -> None:
    vae = model.vae.flat_()

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        random = Random(f"{args.seed} vae {step}")
        torch.manual_seed(random.getrandbits(60))
        whole = step >= args.vae_steps
        scenes = [random_scene(random) for _ in range(VAE_BATCH // 4 if whole else VAE_BATCH)]
        pictures = draw(scenes)
        if not whole:
            pictures = torch.stack(
                [crop(p, s, random, VAE_CROP) for p, s in zip(pictures, scenes, strict=True)]
            )
        mean, log_variance = vae.encode(pictures)
        latents = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        error = vae.decode(latents) - pictures
        kl = (mean**2 + log_variance.exp() - 1 - log_variance).mean() / 2
        loss = error.abs().mean() + (error**2).mean() + KL_WEIGHT * kl
        return loss, {"L1": error.abs().mean().item()}

    steps = args.vae_steps + args.vae_full_size_steps
    optimise("VAE", vae, loss_of, steps, VAE_LEARNING_RATE, args.output / "vae.pt", average=0.99)


def train_decoder(
    model: DemoModel, latents: torch.Tensor, scenes: list[Scene], args: argparse.Namespace
) -> None:
    """Sharpen the decoder on latents that stay as they are; with noise, for the flow's are not exact."""
    decoder = model.vae.decoder
    spread = latents.std()

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        random = Random(f"{args.seed} decoder {step}")
        torch.manual_seed(random.getrandbits(60))
        chosen = random.choices(range(len(scenes)), k=DECODER_BATCH)
        pictures = draw([scenes[index] for index in chosen])
        amount = LATENT_NOISE * spread * torch.rand(DECODER_BATCH, 1, 1, 1)
        noisy = latents[chosen] + amount * torch.randn_like(latents[chosen])
        error = model.vae.decode(noisy) - pictures
        loss = (edge_weights(pictures) * (error.abs() + error**2)).mean()
        return loss, {"L1": error.abs().mean().item()}

    file = args.output / "decoder.pt"
    optimise("decoder", decoder, loss_of, args.decoder_steps, DECODER_LEARNING_RATE, file, average=0.99)


def scenes_of(args: argparse.Namespace) -> list[Scene]:
    return [random_scene(Random(f"{args.seed} scene {index}")) for index in range(args.scenes)]


@torch.no_grad()
def encode_scenes(model: DemoModel, scenes: list[Scene], file: Path) -> torch.Tensor:
    """Latents of all scenes `[scenes, C, 8, 8]`, not scaled; kept in a file for `--resume`."""
    if file.exists():
        latents: torch.Tensor = torch.load(file, weights_only=True)
        return latents
    batches: Iterable[int] = range(0, len(scenes), 16)
    bar = tqdm(batches, desc="latents", unit="batch", mininterval=5)
    latents = torch.cat([model.vae.encode(draw(scenes[start : start + 16]))[0] for start in bar])
    torch.save(latents, file)
    return latents


def train_transformer(
    model: DemoModel,
    latents: torch.Tensor,
    scenes: list[Scene],
    tokenizer: Tokenizer,
    args: argparse.Namespace,
) -> None:
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, scene in enumerate(scenes):
        by_length[len(tokenizer.encode(scene.caption).ids)].append(index)
    lengths = sorted(by_length)
    weights = [len(by_length[length]) for length in lengths]
    scaled = latents * model.config.vae_scaling_factor
    nothing = special(tokenizer, "<cfg>")
    vae = model.vae
    del model.vae  # its weights are done

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        random = Random(f"{args.seed} flow {step}")
        torch.manual_seed(random.getrandbits(60))
        length = random.choices(lengths, weights)[0]
        chosen = random.choices(by_length[length], k=BATCH)
        sequence = encode(tokenizer, [scenes[index].caption for index in chosen], SIDE, SIDE, SIDE)
        ids = sequence.token_ids.clone()
        ids[torch.rand(BATCH) < DROPPED_CAPTIONS, 1 : 1 + length] = nothing
        clean = scaled[chosen]
        noise = torch.randn_like(clean)
        # Most steps in the middle, where the picture is decided; some everywhere.
        share = torch.where(torch.rand(BATCH) < 0.3, torch.rand(BATCH), torch.randn(BATCH).sigmoid())
        mixed = torch.lerp(clean, noise, share[:, None, None, None])
        velocity = model(replace(sequence, token_ids=ids), mixed, 1000 * share)
        error = (velocity - (noise - clean)).pow(2).mean()
        balance = torch.stack([layer.balance_loss for layer in model.moe_layers]).mean()
        return error + BALANCE_WEIGHT * balance, {"loss": error.item(), "balance": balance.item()}

    file = args.output / "transformer.pt"
    optimise("flow", model, loss_of, args.steps, LEARNING_RATE, file, EMA)
    model.vae = vae


def initialise_(model: DemoModel) -> None:
    """Embeddings of the size of a normed hidden state; residual branches of the images start at nothing."""
    nn.init.normal_(model.model.wte.weight, std=0.5)
    for zero in (
        "patch_embed.model.1.out_layers.3",
        "final_layer.model.0.out_layers.3",
        "final_layer.model.1.2",
    ):
        nn.init.zeros_(model.get_parameter(f"{zero}.weight"))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    if not args.resume and any(args.output.glob("*.pt")):
        raise SystemExit(f"{args.output} holds an earlier run: add --resume, or choose another folder.")
    began = time.monotonic()
    torch.manual_seed(args.seed)
    scenes = scenes_of(args)
    tokenizer = checkpoint_files.build_tokenizer([scene.caption for scene in scenes[:TOKENIZER_SCENES]])
    model = DemoModel(ModelConfig.from_json(checkpoint_files.config(tokenizer, scaling_factor=1.0)))
    initialise_(model)
    train_vae(model, args)
    latents = encode_scenes(model, scenes, args.output / "latents.pt")
    model.config = replace(model.config, vae_scaling_factor=round(1 / latents.std().item(), 4))
    train_decoder(model, latents, scenes, args)
    train_transformer(model, latents, scenes, tokenizer, args)
    model.vae.make_flat_().flat_(False)
    folder = args.output / "checkpoint"
    checkpoint_files.write(folder, model, tokenizer)
    model = DemoModel.from_checkpoint(folder)
    asked = figures.prompts(args.prompts)
    pictures = figures.paint(
        model, tokenizer, [scene for scene, _ in asked], steps=STEPS, guidance=GUIDANCE, shift=FLOW_SHIFT
    )
    shares = figures.count(asked, pictures)
    minutes = (time.monotonic() - began) / 60
    print(f"{args.prompts} prompts, {STEPS} steps, from the bf16 checkpoint in {folder}:")
    print(figures.table(shares))
    print(f"this run took {minutes:.1f} minutes")
    (args.output / "figures.json").write_text(
        json.dumps({"shares": shares, "minutes": minutes}, indent=1) + "\n"
    )
    return {"shares": shares, "minutes": minutes}


if __name__ == "__main__":
    main()
