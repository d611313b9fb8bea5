# SPDX-License-Identifier: Apache-2.0
"""Counts on a rank how many tokens the router sends to each expert, by hooks that are absent until asked for.

vLLM's router hands the ids it has chosen to a callback (``fused_moe/router/base_router.py:247``), before
dispatch: they are those of the rank's own tokens. Which of these another rank counts as well is known one
level up, where the decoder layers learn how the sequence was split.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm_omni.diffusion.forward_context import get_forward_context

from omni_ep.layout import ParallelLayout


def counted_positions(length: int, *, shard: int, padding: int, sp_rank: int, sp_size: int) -> slice:
    """Positions of a rank's sequence that are counted there and nowhere else.

    The sequence is ``<prompt> <shard of the image part>``; every SP rank has the same prompt, and the last
    shards end in padding (``hunyuan_image3_transformer.py:2500-2572``).

    Args:
        length: tokens of one sequence on this rank.
        shard: tokens of the image part on each rank, padding included.
        padding: tokens of padding on all ranks together.
    """
    if sp_size == 1:
        return slice(0, length)
    prompt = length - shard
    real = min(max(shard * sp_size - padding - sp_rank * shard, 0), shard)
    return slice(0 if sp_rank == 0 else prompt, prompt + real)


class ExpertLoadCounter:
    """Hooks in the decoder layers and routers of one rank; counts from construction on.

    Args:
        layers: decoder layers; those without routed experts are passed over.
        layout: of the running groups.
        rank: this process.
        branches_split: asked in every step; whether CFG ranks run different branches of guidance.

    Raises:
        NotImplementedError: a layer's kernel chooses experts by itself, so that no router can be asked.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        layout: ParallelLayout,
        rank: int,
        branches_split: Callable[[], bool],
    ) -> None:
        runners: dict[int, Any] = {
            number: layer.mlp.experts for number, layer in enumerate(layers) if hasattr(layer.mlp, "experts")
        }
        for number, runner in runners.items():
            if runner.is_monolithic or not hasattr(runner.router, "set_capture_fn"):
                raise NotImplementedError(
                    f"tokens per expert cannot be counted: the kernel of layer {number} chooses the experts "
                    "without vLLM's router"
                )
        self.layers = tuple(runners)
        self.num_experts = next(iter(runners.values())).router.global_num_experts if runners else 0
        self._sp_size = layout.sp
        self._place = layout.coordinates(rank)
        self._branches_split = branches_split
        self._steps: list[torch.Tensor] = []
        #: Of the running step: [layer, expert], [sequences, tokens] on this rank, and which tokens count.
        self._current: tuple[torch.Tensor, torch.Size, slice] | None = None
        layers[0].register_forward_pre_hook(self._begin_step, with_kwargs=True)
        for row, runner in enumerate(runners.values()):
            runner.router.set_capture_fn(partial(self._count, row))

    def counts(self) -> np.ndarray | None:
        """int64 [step, layer, expert], summed over pictures; ``None`` if this rank has counted nothing."""
        return torch.stack(self._steps).cpu().numpy() if self._steps else None

    def _counts_now(self) -> bool:
        """Whether no other rank counts these tokens, which TP, DP and idle CFG ranks have as well."""
        place = self._place
        return place.tp == 0 and place.dp == 0 and (place.cfg == 0 or self._branches_split())

    def _begin_step(self, _layer: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        step = get_forward_context().denoise_step_idx
        # Outside the denoising loop vLLM-Omni runs the model for the cache of attention only.
        if step is None or not self._counts_now():
            self._current = None
            return
        hidden_states = kwargs["hidden_states"]
        while len(self._steps) <= step:
            self._steps.append(
                torch.zeros(
                    len(self.layers), self.num_experts, dtype=torch.int64, device=hidden_states.device
                )
            )
        positions = counted_positions(
            hidden_states.shape[1],
            shard=kwargs["shard_image_size"],
            padding=kwargs["shard_padding_size"],
            sp_rank=self._place.sp,
            sp_size=self._sp_size,
        )
        self._current = (self._steps[step], hidden_states.shape[:2], positions)

    def _count(self, row: int, topk_ids: torch.Tensor) -> None:
        """Add up ``topk_ids``, [tokens, top-k], of one layer."""
        if self._current is None:
            return
        counts_LE, sequences, positions = self._current
        if len(topk_ids) != sequences.numel():
            raise RuntimeError(
                f"the router of layer {self.layers[row]} was given {len(topk_ids)} tokens, but this rank has "
                f"{sequences.numel()}; tokens per expert cannot be counted where tokens are gathered first"
            )
        ids = topk_ids.view(*sequences, -1)[:, positions].reshape(-1).long()
        # Not bincount: on an accelerator it waits for the largest id.
        counts_LE[row].scatter_add_(0, ids, torch.ones_like(ids))
