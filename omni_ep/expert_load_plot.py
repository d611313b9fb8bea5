# SPDX-License-Identifier: Apache-2.0
"""Expert load as a picture: a heat map of layers × experts, and the ranks along the steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from omni_ep.expert_load import ExpertLoad
from omni_ep.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLAG = "--plot-expert-load"

#: From dark blue over grey to yellow: lightness rises throughout, and no step is between red and green.
_COLORMAP = "cividis"
#: Okabe and Ito's colours, which people with any colour vision tell apart; purple for their pale yellow.
_RANK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#5D3A9B", "#999999")
_MARKERS = "os^Dv<>P"
_LARGEST_WITH_NUMBERS = (12, 16)
"""Layers and experts up to which the cells have room for a number."""


def plot_expert_load(load: ExpertLoad, file: Path, *, title: str) -> None:
    """Save the heat map and, where experts are spread over ranks, the load of the ranks.

    Args:
        file: picture to write; the suffix (.png, .svg, .pdf) chooses the format.

    Raises:
        ConfigurationError: if matplotlib is not installed or does not know the suffix.
    """
    spread = load.placement.ep_size > 1
    height = 1.9 + min(max(0.32 * len(load.layers), 1.4), 8.0)
    figure = new_figure(file, flag=FLAG, size=(10, height + (3.2 if spread else 0)))
    if spread:
        above, below = figure.subplots(2, 1, height_ratios=(height, 3.2))
        _draw_ranks(below, load)
    else:
        above = figure.subplots()
    _draw_experts(figure, above, load)
    figure.suptitle(title)
    figure.savefig(file, dpi=120)


def _draw_experts(figure: Figure, axes: Axes, load: ExpertLoad) -> None:
    relative = load.relative
    top = max(float(relative.max()), 1.0)
    image = axes.imshow(relative, aspect="auto", cmap=_COLORMAP, vmin=0.0, vmax=top, interpolation="nearest")
    num_layers, num_experts = relative.shape
    axes.set_ylabel("layer")
    axes.set_yticks(_ticks(num_layers), [str(load.layers[row]) for row in _ticks(num_layers)])
    axes.set_xlabel("expert")
    axes.set_xticks(_ticks(num_experts))
    if num_layers <= _LARGEST_WITH_NUMBERS[0] and num_experts <= _LARGEST_WITH_NUMBERS[1]:
        for (row, expert), tokens in np.ndenumerate(load.per_layer):
            dark = relative[row, expert] < 0.55 * top
            color = "white" if dark else "black"
            axes.text(expert, row, f"{tokens:,}", ha="center", va="center", fontsize=8, color=color)
    figure.colorbar(image, ax=axes, label="tokens, multiple of\nthe layer's mean", pad=0.01)
    # With a rank for every expert the borders would hide the cells.
    if 1 < load.placement.ep_size <= num_experts // 2:
        for rank in range(1, load.placement.ep_size):
            axes.axvline(rank * load.placement.num_local - 0.5, color="white", linewidth=2)
    if 1 < load.placement.ep_size <= 16:
        ranks = axes.secondary_xaxis("top")
        middles = (np.arange(load.placement.ep_size) + 0.5) * load.placement.num_local - 0.5
        ranks.set_xticks(middles, [f"rank {rank}" for rank in range(load.placement.ep_size)])
        ranks.tick_params(length=0)


def _draw_ranks(axes: Axes, load: ExpertLoad) -> None:
    steps = np.arange(1, len(load.counts) + 1)
    marked = len(steps) <= 30
    if load.placement.ep_size <= len(_RANK_COLORS):
        for rank, (color, marker) in enumerate(zip(_RANK_COLORS, _MARKERS, strict=True)):
            if rank < load.placement.ep_size:
                axes.plot(
                    *(steps, load.rank_relative[:, rank]),
                    color=color,
                    marker=marker if marked else None,
                    markersize=4,
                    label=f"rank {rank}",
                )
    else:
        low, high = load.rank_relative.min(axis=1), load.rank_relative.max(axis=1)
        axes.fill_between(steps, low, high, color=_RANK_COLORS[4], alpha=0.5, label="all ranks")
        axes.plot(steps, high, color=_RANK_COLORS[0], label="busiest rank")
    axes.plot(
        *(steps, load.layer_by_layer),
        color="black",
        linestyle="--",
        label="busiest rank of each layer",
    )
    axes.axhline(1.0, color="#999999", linewidth=1, zorder=0)
    axes.set_xlabel("denoising step (the first also runs the prompt)")
    axes.set_xticks(_ticks(len(steps)) + 1)
    axes.set_xlim(0.5, len(steps) + 0.5)
    axes.set_ylabel("tokens, multiple of\nthe ranks' mean")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False, fontsize=9)


def _ticks(count: int) -> np.ndarray:
    """At most 16 positions from 0 on, in whole steps people read easily."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 50, 100, count) if count <= 16 * step)
    return np.arange(0, count, step)
