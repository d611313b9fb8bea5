# SPDX-License-Identifier: Apache-2.0
"""From noise to pictures with the plain model, on the timesteps vLLM-Omni uses."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from examples.demo_model.model import DemoModel, Sequence


def noise(seed: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Latents `[1, channels, height, width]` that the pipeline starts from for a seed: drawn in bf16."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, channels, height, width)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16).float()


@torch.no_grad()
def denoise(
    model: DemoModel,
    conditional: Sequence,
    unconditional: Sequence,
    latents: torch.Tensor,
    *,
    steps: int,
    guidance: float,
    shift: float,
    on_step: Callable[[int, torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """Latents after the last step, scaled; `on_step` is given each step's number and latents."""
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    for index, timestep in enumerate(scheduler.timesteps):
        timesteps = timestep.repeat(len(latents))
        wanted = model(conditional, latents, timesteps)
        if guidance > 1:
            unwanted = model(unconditional, latents, timesteps)
            wanted = unwanted + guidance * (wanted - unwanted)
        latents = scheduler.step(wanted, timestep, latents, return_dict=False)[0]
        if on_step is not None:
            on_step(index, latents)
    return latents


@torch.no_grad()
def to_pixels(model: DemoModel, latents: torch.Tensor) -> torch.Tensor:
    """uint8 pictures `[B, height, width, 3]` of scaled latents."""
    pictures = model.vae.decode(latents / model.config.vae_scaling_factor)
    return ((pictures / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
