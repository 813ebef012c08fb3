"""Pictures on light and on dark backgrounds."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text

from xckpt.plots import Plots
from xckpt.plots.axes import COLOURS, INK, SCALE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import xarray as xr
    from matplotlib.axes import Axes

# White, and the grounds of JupyterLab and VS Code in the dark.
GROUNDS = ("#ffffff", "#111111", "#1e1e1e")


def contrast(foreground: str, background: str) -> float:
    """Return the contrast ratio of the Web Content Accessibility Guidelines."""

    def luminance(colour: str) -> float:
        parts = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
        ]
        return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))

    low, high = sorted([luminance(foreground), luminance(background)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", GROUNDS)
def test_colours_have_contrast(ground: str) -> None:
    assert contrast(INK, ground) > 3.9
    assert min(contrast(colour, ground) for colour in (*COLOURS, *SCALE)) > 3


PICTURES: dict[str, Callable[[Plots, xr.Dataset], Axes]] = {
    "layers": lambda plots, _: plots.layers("std"),
    "hue": lambda plots, _: plots.layers("std", "*.up", hue="experts"),
    "histogram": lambda plots, _: plots.histogram(),
    "treemap": lambda plots, _: plots.treemap(),
    "heatmap": lambda plots, _: plots.heatmap("embed"),
    "spectrum": lambda plots, _: plots.spectrum("embed"),
    "compare": lambda plots, ds: plots.compare(ds * 2),
    "error": lambda plots, ds: plots.error(ds.round(2)),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_new_figures_are_transparent_and_have_no_black_or_white_text(
    kind: str, flat: xr.Dataset
) -> None:
    ax = PICTURES[kind](Plots(flat), flat)
    figure: Any = ax.get_figure(root=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=50)  # after the style is as before
    pixels = plt.imread(io.BytesIO(buffer.getvalue()))
    assert pixels[0, 0, 3] == 0
    texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    on_tiles = {"#000000", "#ffffff"} if kind == "treemap" else set()
    colours = {to_hex(text.get_color()) for text in texts}
    assert INK in colours
    assert not (colours & {"#000000", "#ffffff"}) - on_tiles


@pytest.mark.parametrize("kind", PICTURES)
def test_notebooks_paint_no_ground_behind_transparent_figures(kind: str, flat: xr.Dataset) -> None:
    inline = pytest.importorskip("matplotlib_inline.backend_inline")
    figure = PICTURES[kind](Plots(flat), flat).get_figure(root=True)
    assert inline._fetch_figure_metadata(figure) is None


@pytest.mark.parametrize("kind", ["layers", "heatmap"])
def test_a_style_of_the_user_is_kept(kind: str, flat: xr.Dataset) -> None:
    with plt.style.context("dark_background"):
        ax = PICTURES[kind](Plots(flat), flat)
        assert to_hex(ax.get_figure(root=True).get_facecolor()) == "#000000"  # type: ignore[union-attr]
        assert to_hex(ax.title.get_color()) == "#ffffff"


def test_given_axes_are_not_changed(flat: xr.Dataset) -> None:
    figure, ax = plt.subplots()
    Plots(flat).layers("std", ax=ax)
    assert to_hex(figure.get_facecolor()) == "#ffffff"
    assert to_hex(ax.xaxis.get_ticklabels()[0].get_color()) == "#000000"
    assert plt.rcParams["text.color"] == "black"


@pytest.mark.parametrize("is_report", [False, True], ids=["picture", "report"])
def test_the_backend_of_notebooks_stays_interactive_if_it_is_loaded_while_drawing(
    is_report: bool, flat: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subplots = plt.subplots

    def load_and_draw(*args: Any, **options: Any) -> Any:
        monkeypatch.setitem(plt.rcParams, "interactive", value=True)
        return subplots(*args, **options)

    monkeypatch.setitem(plt.rcParams, "interactive", value=False)
    monkeypatch.setattr(plt, "subplots", load_and_draw)
    if is_report:
        flat.ckpt.report(tmp_path / "report.html")
    else:
        Plots(flat).layers("std")
    assert plt.isinteractive()


def test_no_label_of_a_spectrum_is_cut_or_hidden(flat: xr.Dataset) -> None:
    ax = Plots(flat).spectrum("embed")
    figure: Any = ax.get_figure(root=True)
    figure.canvas.draw()
    drawn, size = figure.get_tightbbox(), figure.get_size_inches()
    assert drawn.x0 >= 0
    assert drawn.y0 >= 0
    assert drawn.x1 <= size[0]
    assert drawn.y1 <= size[1]
    boxes = []
    for axes in figure.axes:
        low, high = axes.get_xlim()
        places = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        boxes += [label.get_window_extent() for at, label in places if low <= at <= high]
    boxes.sort(key=lambda box: box.x0)
    assert all(label_box.x1 <= next_box.x0 for label_box, next_box in pairwise(boxes))
