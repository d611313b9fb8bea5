# SPDX-License-Identifier: Apache-2.0
"""The picture of the expert load: what is on it, and the sentences where it cannot be drawn."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_ep import expert_load_plot
from omni_ep.errors import ConfigurationError
from omni_ep.expert_load import ExpertLoad
from omni_ep.expert_load_plot import plot_expert_load
from omni_ep.placement import ExpertPlacement


def load(steps: int, layers: int, experts: int, ep_size: int) -> ExpertLoad:
    counts = np.random.default_rng(0).integers(50, 100, (steps, layers, experts))
    counts[:, 0, 1] = 1000
    counts[:, 1, 0] = 0
    placement = ExpertPlacement.linear(experts, ep_size)
    return ExpertLoad(counts=counts, layers=tuple(range(layers)), placement=placement)


def _texts(svg: Path, *, of: set[str]) -> set[str]:
    """Labels of an SVG drawn with text as text."""
    content = svg.read_text()
    return {text for text in of if f">{text}<" in content}


@pytest.fixture(autouse=True)
def text_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")


def test_colours(tmp_path: Path) -> None:
    """The ends of the colour map and the lines of both ranks are there."""
    from matplotlib import colormaps

    ends = [tuple(map(int, colormaps["cividis"](end, bytes=True)[:3])) for end in (0.0, 1.0)]
    file = tmp_path / "load.png"
    plot_expert_load(load(8, 2, 8, 2), file, title="title")
    picture = Image.open(file).convert("RGB")
    colors = {color for count, color in picture.getcolors(2**24) if count > 100}
    # An expert without a token, the busiest one, and the two ranks.
    assert {*ends, (0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)} <= colors


def test_labels(tmp_path: Path) -> None:
    measured = load(8, 2, 8, 2)
    plot_expert_load(measured, tmp_path / "load.svg", title="model and layout")
    expected = {"model and layout", "layer", "expert", "rank 0", "rank 1", "busiest rank of each layer"}
    expected |= {f"{tokens:,}" for tokens in measured.per_layer.flat}
    assert _texts(tmp_path / "load.svg", of=expected) == expected


def test_without_ranks_there_is_the_heat_map_alone(tmp_path: Path) -> None:
    plot_expert_load(load(8, 2, 8, 1), tmp_path / "load.svg", title="model")
    assert _texts(tmp_path / "load.svg", of={"expert", "rank 0", "busiest rank of each layer"}) == {"expert"}


def test_many_ranks_are_a_band(tmp_path: Path) -> None:
    plot_expert_load(load(50, 32, 64, 32), tmp_path / "load.svg", title="model")
    assert _texts(tmp_path / "load.svg", of={"all ranks", "busiest rank", "rank 31"}) == {
        "all ranks",
        "busiest rank",
    }


@pytest.mark.parametrize("count", [1, 16, 17, 64, 128, 700, 5000])
def test_ticks_never_crowd(count: int) -> None:
    ticks = expert_load_plot._ticks(count)
    assert 1 <= len(ticks) <= 16
    assert ticks[0] == 0
    assert ticks[-1] < count


def test_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--plot-expert-load cannot write 'load.txt'.*use .png"):
        plot_expert_load(load(1, 2, 8, 2), tmp_path / "load.txt", title="")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"--plot-expert-load needs matplotlib.*omni-ep\[plot\]"):
        plot_expert_load(load(1, 2, 8, 2), tmp_path / "load.png", title="")
