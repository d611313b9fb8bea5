# SPDX-License-Identifier: Apache-2.0
"""The denoising loop: one progress bar per picture, step times, and float32 latents on request."""

import os
import time
from typing import Any, TextIO

import torch
import torch.distributed as dist
from tqdm import tqdm
from vllm_omni.diffusion.models.hunyuan_image3.hunyuan_image3_transformer import (
    HunyuanImage3Text2ImagePipeline,
)


class StepBar(tqdm):
    """A progress bar that also remembers how long every step took, in seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_seconds: list[float] = []
        self._last_step = time.perf_counter()

    def update(self, n: float | None = 1) -> bool | None:
        now = time.perf_counter()
        self.step_seconds.append(now - self._last_step)
        self._last_step = now
        return super().update(n)


def _terminal() -> TextIO:
    # The worker's sys.stderr prefixes every write with a process name, which tears a bar apart.
    return os.fdopen(os.dup(2), "w")


class EpText2ImagePipeline(HunyuanImage3Text2ImagePipeline):
    """vLLM-Omni's loop, observed.

    Attributes:
        float32: keep the latents in float32. The noise is drawn in bf16 all the same, so that
            a seed means the same noise in either dtype.
        step_seconds: wall time of each step of the last picture.
        has_nan: whether the last picture held NaN before it became colours.
    """

    float32: bool = False
    has_nan: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        # Inf becomes black or white as any colour out of range does; NaN makes what it touches black.
        self.has_nan = bool(torch.isnan(output[0]).any())
        return output

    def prepare_latents(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        latents = super().prepare_latents(*args, **kwargs)
        return latents.float() if self.float32 else latents

    def progress_bar(self, iterable: Any = None, total: int | None = None) -> StepBar:
        """One bar for the picture, drawn by the first rank."""
        first_rank = not dist.is_initialized() or dist.get_rank() == 0
        self._bar = StepBar(
            iterable,
            total=total,
            desc="denoising",
            unit="step",
            file=_terminal() if first_rank else None,
            disable=not first_rank,
            dynamic_ncols=True,
        )
        return self._bar

    @property
    def step_seconds(self) -> list[float]:
        bar = getattr(self, "_bar", None)
        return list(bar.step_seconds) if bar is not None else []
