"""Labels, legends and colours, and the error without matplotlib."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from matplotlib import pyplot as plt

from tests.hostile_names import HOSTILE
from tests.plots.pictures import legend_texts
from xckpt.plots import Plots
from xckpt.plots.axes import add_heading, add_legend, line_styles, name_the_ends, number_colours

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def hostile() -> xr.Dataset:
    values = np.random.default_rng(0).normal(size=(4, 5))
    return xr.Dataset(dict.fromkeys((*HOSTILE, "x" * 300), (("$a$", "b\x1b_{"), values)))


def test_hostile_names_are_texts_in_every_picture(hostile: xr.Dataset) -> None:
    ax = Plots(hostile).histogram()
    labels = legend_texts(ax)
    assert labels[: len(HOSTILE)] == [
        "[bold red]w[/]",
        r"\x1b[31mred\x1b[2J",
        r"abc\u202etxt.w",
        r"line\nbreak\r\x07",
        "<img src=x onerror=alert(1)>",
        r"$\frac{a}{b}$_{c",
        ":smile: %s {0}",
        "_hidden",
    ]
    assert len(labels[-1]) <= 56
    Plots(hostile).treemap()
    for name in HOSTILE:
        ax = Plots(hostile).heatmap(name)
        assert not ax.title.get_parse_math()
        assert ax.get_ylabel() == r"\$a\$"
        ax.figure.canvas.draw()  # a formula would fail here
    layers = {f"{name}.{n}.w": ("x", [n, 2 * n + 1]) for name in HOSTILE for n in (0, 1)}
    ax = Plots(xr.Dataset(layers)).layers("max", x=HOSTILE[5])
    assert ax.get_xlabel() == r"\$\frac{a}{b}\$_{c"


def test_missing_matplotlib(flat: xr.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    plots = Plots(flat)
    pictures: list[Callable[[], object]] = [
        plots.layers,
        plots.histogram,
        plots.treemap,
        lambda: plots.heatmap("embed"),
    ]
    with monkeypatch.context() as patch:
        patch.delattr("matplotlib.pyplot")
        patch.setitem(sys.modules, "matplotlib.pyplot", None)
        for draw in pictures:
            with pytest.raises(ImportError, match=r"pip install 'xckpt\[plot\]'"):
                draw()


def test_kinds_are_listed(flat: xr.Dataset) -> None:
    kinds = [name for name in vars(Plots) if not name.startswith("_")]
    assert repr(Plots(flat)) == f"<Plots: {', '.join(kinds)}>"


def test_a_legend_of_many_is_beside_the_picture_and_cut() -> None:
    _, ax = plt.subplots(layout="constrained")
    for number in range(40):
        ax.plot([number])
    add_legend(ax, ax.get_lines(), [f"w{number}" for number in range(40)])
    legend = ax.get_legend()
    assert legend is not None
    shown = len(legend.get_texts())
    assert 15 < shown < 30
    assert legend.get_title().get_text() == f"the first {shown} of 40"
    ax.figure.canvas.draw()
    assert legend.get_window_extent().y0 > 0
    assert legend.get_window_extent().y1 < ax.figure.bbox.y1
    assert legend.get_window_extent().x0 > ax.get_window_extent().x1


def test_lines_differ_in_colour_or_dashes() -> None:
    styles = line_styles(25)
    assert len({(style["color"], style["linestyle"]) for style in styles}) == 25


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_colours_of_numbers_are_seen_on_any_background(style: str) -> None:
    from xckpt.plots.axes import luminance

    with plt.style.context(style):
        _, ax = plt.subplots()
        colours = number_colours(ax, range(9), "layers")
        ground = luminance(ax.get_facecolor())
    assert len(set(colours.values())) == 9
    assert min(abs(luminance(colour) - ground) for colour in colours.values()) > 0.15


@pytest.mark.parametrize("linthresh", [None, 1e-6])
@pytest.mark.parametrize(("low", "high"), [(-1.37, 2.61), (0.731, 1.19), (-4e-3, 1e-4), (0.0, 5.5)])
def test_ticks_name_zero_and_the_true_ends(low: float, high: float, linthresh: float) -> None:
    _, ax = plt.subplots(layout="constrained")
    ax.plot([low, high], [0, 1])
    name_the_ends(ax, low, high, linthresh=linthresh)
    ax.figure.canvas.draw()
    ticks = ax.get_xticks()
    assert {low, high} <= set(ticks)
    assert (0.0 in ticks) == (low <= 0 <= high and (high > -low / 9 or linthresh is not None))
    boxes = [text.get_window_extent() for text in ax.get_xticklabels() if text.get_text()]
    assert 3 <= len(boxes) < 12
    for box, next_box in itertools.pairwise(boxes):
        assert box.x1 < next_box.x0
    # After zooming in, ticks are where the picture is.
    ax.set_xlim(low + (high - low) / 3, low + (high - low) / 2)
    assert all(low < tick < high for tick in ax.get_xticks())


@pytest.mark.parametrize("columns", [1, 2])
def test_headings_stay_in_the_picture(columns: int) -> None:
    figure, axes = plt.subplots(1, columns, figsize=(8, 4), layout="constrained", squeeze=False)
    add_heading(axes[0, 0], "layers." * 30, *["a note that takes some room"] * 6)
    figure.canvas.draw()
    right = axes[0, 1].get_window_extent().x0 if columns == 2 else figure.bbox.x1
    note = axes[0, 0].texts[0]
    assert note.get_text().count("a note") == 6
    title = axes[0, 0].title.get_window_extent()
    assert title.x1 < right
    assert note.get_window_extent().x1 < right
    assert title.y0 >= note.get_window_extent().y1 - 1
    assert title.y1 <= figure.bbox.y1


def test_axes_are_checked_before_reading(unreadable: xr.Dataset) -> None:
    plots = Plots(unreadable)
    _, axes = plt.subplots(1, 2)
    pictures: list[Callable[..., object]] = [
        plots.layers,
        plots.histogram,
        plots.treemap,
        partial(plots.heatmap, "embed"),
        partial(plots.compare, unreadable),
    ]
    for draw in pictures:
        with pytest.raises(TypeError, match=r"ax is one matplotlib.axes.Axes, not ndarray"):
            draw(ax=axes)
        if draw != plots.treemap:
            with pytest.raises(AttributeError, match="colr"):
                draw(colr="red")
    wrong: list[dict[str, Any]]
    wrong = [{"statistic": "stdd"}, {"tensors": "*.atn.w"}, {"x": "layer"}, {"hue": "expert"}]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"there is no|matches none|none of 25 tensors"):
            plots.layers(**arguments)
    with pytest.raises(ValueError, match="similar names: 'std'"):
        plots.layers("stdd")
    wrong = [{"bins": 0}, {"bins": [1, 0]}, {"scale": "log"}, {"tensors": "nothing"}]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"at least one bin|ascend|scale is|matches none"):
            plots.histogram(**arguments)
    with pytest.raises(ValueError, match="similar names: 'rel_l2'"):
        plots.compare(unreadable, "rel_12")
    with pytest.raises(ValueError, match="at least one row, or 'all'"):
        plots.heatmap("embed", rows="every")  # type: ignore[arg-type]
    assert len(plt.get_fignums()) == 1
