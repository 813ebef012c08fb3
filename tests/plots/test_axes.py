"""Labels, legends, colours; and what is said where matplotlib is missing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr
from matplotlib import pyplot as plt

from tests.hostile_names import HOSTILE
from tests.plots.pictures import legend_texts
from xckpt.plots import Plots
from xckpt.plots.axes import add_legend, common_path, line_styles, number_colours

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
    assert len(labels[-1]) <= 50
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
    assert repr(Plots(flat)).startswith("<Plots: layers, histogram, treemap, heatmap")


def test_a_legend_of_many_is_beside_the_picture_and_cut() -> None:
    _, ax = plt.subplots(layout="constrained")
    for number in range(40):
        ax.plot([number])
    add_legend(ax, ax.get_lines(), [f"w{number}" for number in range(40)])
    legend = ax.get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 23
    assert legend.get_title().get_text() == "the first 23 of 40"
    ax.figure.canvas.draw()
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


def test_names_share_whole_modules_only() -> None:
    assert common_path(["a.b.weight", "a.bc.weight"]) == ("a.", ["b.weight", "bc.weight"])
    assert common_path(["a.b", "a.b"]) == ("a.", ["b", "b"])
    assert common_path(["a", "a.b"]) == ("", ["a", "a.b"])
    assert common_path(["a.b"]) == ("", ["a.b"])
