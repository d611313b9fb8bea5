# SPDX-License-Identifier: Apache-2.0
"""How many tokens each expert got, and how evenly that loads experts and ranks.

A token of the picture is counted once, whatever the layout: not again where tensor parallelism routes it on
several ranks, sequence parallelism repeats the prompt, or data parallelism paints a second copy; padding is
not counted. So every layout reports the same numbers, and only their sums per rank differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_ep.config import RunRequest
from omni_ep.errors import ConfigurationError
from omni_ep.geometry import MoEGeometry
from omni_ep.placement import ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoad:
    """Tokens per expert, summed over the pictures of a run.

    Attributes:
        counts: int64, [step, layer, expert]. A token counts once for each of its top-k experts.
        layers: the model's number of each counted layer.
        placement: which rank holds which expert; one rank where experts are not spread.

    Raises:
        ValueError: if the shapes disagree or a count is negative.
    """

    counts: np.ndarray
    layers: tuple[int, ...]
    placement: ExpertPlacement

    def __post_init__(self) -> None:
        expected = (len(self.layers), self.placement.num_experts)
        if self.counts.ndim != 3 or self.counts.shape[1:] != expected or self.counts.dtype != np.int64:
            raise ValueError(
                f"counts must be int64 of shape [steps, {expected[0]} layers, {expected[1]} experts], got "
                f"{self.counts.dtype} of shape {list(self.counts.shape)}"
            )
        if (self.counts < 0).any():
            raise ValueError("a count of tokens is negative")

    @property
    def per_layer(self) -> np.ndarray:
        """Tokens over all steps, [layer, expert]."""
        total: np.ndarray = self.counts.sum(axis=0)
        return total

    @property
    def relative(self) -> np.ndarray:
        """``per_layer`` as a multiple of the layer's mean, [layer, expert]; all 1 is perfect balance."""
        return over_mean(self.per_layer)

    @property
    def rank_tokens(self) -> np.ndarray:
        """Tokens of each EP rank's experts, [step, layer, rank]."""
        shape = (*self.counts.shape[:2], self.placement.ep_size, self.placement.num_local)
        # Placement is linear: a rank's experts are neighbours.
        tokens: np.ndarray = self.counts.reshape(shape).sum(axis=3)
        return tokens

    @property
    def rank_relative(self) -> np.ndarray:
        """Tokens of each rank over all layers, as a multiple of the ranks' mean, [step, rank]."""
        return over_mean(self.rank_tokens.sum(axis=1))

    @property
    def rank_max_over_mean(self) -> np.ndarray:
        """The busiest rank of each step, over all layers, as a multiple of the ranks' mean, [step]."""
        busiest: np.ndarray = self.rank_relative.max(axis=1)
        return busiest

    @property
    def layer_by_layer(self) -> np.ndarray:
        """The busiest rank of each layer, added up over the layers, as a multiple of the mean, [step].

        A layer ends when its busiest rank does, so this bounds what better balance could save: layers that
        load different ranks do not make up for one another.
        """
        tokens = self.rank_tokens
        busiest, mean = tokens.max(axis=2).sum(axis=1), tokens.mean(axis=2).sum(axis=1)
        ratio: np.ndarray = np.divide(busiest, mean, out=np.ones_like(mean), where=mean > 0)
        return ratio

    @property
    def busiest_expert(self) -> tuple[int, int, float]:
        """``(layer, expert, multiple of the layer's mean)`` over all steps; the first one of equals."""
        relative = self.relative
        row, expert = np.unravel_index(int(relative.argmax()), relative.shape)
        return self.layers[row], int(expert), float(relative[row, expert])

    @property
    def busiest_rank(self) -> tuple[int, float]:
        """``(EP rank, multiple of the ranks' mean)`` over all steps and layers; the first one of equals."""
        relative = over_mean(self.rank_tokens.sum(axis=(0, 1)))
        return int(relative.argmax()), float(relative.max())

    def sentence(self) -> str:
        """One line for people."""
        layer, expert, of_expert = self.busiest_expert
        text = f"busiest expert {of_expert:.2f}x the mean (layer {layer}, expert {expert})"
        if self.placement.ep_size == 1:
            return f"{text}; one rank holds all experts"
        rank, of_rank = self.busiest_rank
        return f"{text}; busiest rank {of_rank:.2f}x the mean (rank {rank})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: totals per layer, and per step what the ranks got."""
        layer, expert, of_expert = self.busiest_expert
        rank, of_rank = self.busiest_rank
        of_layer = self.relative.max(axis=1)
        return {
            "steps": len(self.counts),
            "layers": [
                {
                    "layer": number,
                    "tokens_per_expert": tokens.tolist(),
                    "max_over_mean": float(ratio),
                }
                for number, tokens, ratio in zip(self.layers, self.per_layer, of_layer, strict=True)
            ],
            "busiest_expert": {"layer": layer, "expert": expert, "over_mean": of_expert},
            "busiest_rank": {"rank": rank, "over_mean": of_rank},
            "per_step": [
                {
                    "tokens_per_rank": tokens.tolist(),
                    "max_over_mean": float(total),
                    "layer_by_layer": float(waiting),
                }
                for tokens, total, waiting in zip(
                    self.rank_tokens.sum(axis=1), self.rank_max_over_mean, self.layer_by_layer, strict=True
                )
            ],
        }


def over_mean(values: np.ndarray) -> np.ndarray:
    """Values as multiples of their mean along the last axis; 1 where there is nothing to share out."""
    mean = np.broadcast_to(values.mean(axis=-1, keepdims=True), values.shape)
    ratio: np.ndarray = np.divide(values, mean, out=np.ones(values.shape), where=mean > 0)
    return ratio


def check_countable(request: RunRequest, config: Mapping[str, Any], *, flag: str) -> None:
    """Refuse a run whose tokens per expert cannot be counted.

    Raises:
        ConfigurationError: the model has no routed experts, or ranks without expert parallelism split tokens.
    """
    if not MoEGeometry.from_config(config).is_moe:
        raise ConfigurationError(
            f"{flag} needs a mixture-of-experts model, and this one has no routed experts; leave it out"
        )
    layout = request.layout
    # Without expert parallelism vLLM gathers tokens before the router, in an order of its own.
    if not request.enable_expert_parallel and layout.world_size != layout.tp:
        raise ConfigurationError(
            f"{flag} on {layout.world_size} ranks of which only {layout.tp} hold the same tokens needs "
            "--enable-expert-parallel; add it, or use tensor parallelism alone"
        )
