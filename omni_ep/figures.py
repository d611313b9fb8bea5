# SPDX-License-Identifier: Apache-2.0
"""Figures by matplotlib (extra ``plot``), which is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omni_ep.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(file: Path, *, flag: str, size: tuple[float, float] = (10, 6)) -> Figure:
    """An empty figure that can be saved as ``file``.

    Args:
        file: where it will be saved; the suffix (.png, .svg, .pdf) chooses the format.
        flag: what the user has asked for the figure with, for the errors.
        size: inches.

    Raises:
        ConfigurationError: if matplotlib is not installed or does not know the suffix.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            f"{flag} needs matplotlib, which is not installed; install it with pip install 'omni-ep[plot]'"
        ) from None
    figure = Figure(figsize=size, layout="constrained")
    if file.suffix.lstrip(".").lower() not in FigureCanvasAgg(figure).get_supported_filetypes():
        raise ConfigurationError(
            f"{flag} cannot write {file.name!r}: its suffix names no picture format; use .png, .svg or .pdf"
        )
    return figure
