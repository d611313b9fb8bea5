# SPDX-License-Identifier: Apache-2.0
"""Memory per rank of several layouts as stacked bars, by matplotlib (extra ``plot``), imported when used."""

from collections.abc import Sequence
from pathlib import Path

from omni_ep.figures import new_figure
from omni_ep.planner.plan import Plan
from omni_ep.planner.weights import Part
from omni_ep.units import format_bytes

_COLORS = {
    Part.ROUTED_EXPERTS: "#1f5fa8",
    Part.SHARED_EXPERTS: "#6baed6",
    Part.ROUTER: "#c6dbef",
    Part.ATTENTION: "#e6550d",
    Part.DENSE_MLP: "#fdae6b",
    Part.EMBEDDINGS: "#756bb1",
    Part.IMAGE_HEAD: "#bcbddc",
    Part.VAE: "#31a354",
    Part.VIT: "#a1d99b",
    Part.ACTIVATIONS: "#7f7f7f",
    Part.COMMUNICATION: "#c7c7c7",
}
_GIB = 2**30


def plot_memory(plans: Sequence[tuple[str, Plan]], file: Path, *, title: str) -> None:
    """Save one bar per (name, plan), and the device's size as a line.

    Args:
        file: picture to write; the suffix (.png, .svg, .pdf) chooses the format.

    Raises:
        ConfigurationError: if matplotlib is not installed or does not know the suffix.
    """
    figure = new_figure(file, flag="--plot", size=(10, 1.6 + 0.42 * len(plans)))
    axes = figure.subplots()
    names = [name for name, _ in plans]
    base = [0.0] * len(plans)
    for part in Part:
        sizes = [plan.parts[part] / _GIB for _, plan in plans]
        if any(sizes):
            axes.barh(names, sizes, left=base, color=_COLORS[part], label=part.value, height=0.7)
            base = [start + size for start, size in zip(base, sizes, strict=True)]
    for name, plan in plans:
        axes.annotate(
            format_bytes(plan.total_bytes),
            (plan.total_bytes / _GIB, name),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    memory = plans[0][1].settings.device_memory
    widest = max(base)
    if memory is not None:
        axes.axvline(memory / _GIB, color="#c00000", linestyle="--", label=f"device, {format_bytes(memory)}")
        widest = max(widest, memory / _GIB)
    axes.set_xlim(0, widest * 1.14)
    axes.invert_yaxis()
    axes.set_xlabel("GiB per rank (activations and communication buffers are estimates)")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    figure.savefig(file, dpi=120)
