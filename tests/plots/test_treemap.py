"""Treemaps: areas in proportion to bytes, and nothing read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from tests.plots.pictures import legend_texts
from xckpt.plots import Plots
from xckpt.plots.treemap import Tile, squarify

sizes = st.lists(st.integers(1, 10**12), min_size=1, max_size=40)


@given(sizes, st.floats(0.01, 100), st.floats(0.01, 100))
def test_areas_are_in_proportion_and_fill_the_box(
    sizes: list[int], width: float, height: float
) -> None:
    sizes.sort(reverse=True)
    boxes = squarify(sizes, Tile(3, 4, width, height))
    areas = np.array([box.width * box.height for box in boxes])
    assert areas / areas.sum() == pytest.approx(np.array(sizes) / sum(sizes), abs=1e-9)
    assert areas.sum() == pytest.approx(width * height)
    for box in boxes:
        assert -1e-9 <= box.x - 3 <= box.x + box.width - 3 <= width * (1 + 1e-9)
        assert -1e-9 <= box.y - 4 <= box.y + box.height - 4 <= height * (1 + 1e-9)


@given(sizes)
def test_boxes_do_not_overlap(sizes: list[int]) -> None:
    boxes = squarify(sorted(sizes, reverse=True), Tile(0, 0, 3, 2))
    for at, box in enumerate(boxes):
        for later in boxes[at + 1 :]:
            wide = min(box.x + box.width, later.x + later.width) - max(box.x, later.x)
            high = min(box.y + box.height, later.y + later.height) - max(box.y, later.y)
            assert min(wide, high) < 1e-9


def test_the_example_of_the_paper() -> None:
    # Bruls, Huizing and van Wijk (2000), figures 4 and 5: 6 and 6, then 4 and 3, then 2.
    boxes = squarify([6, 6, 4, 3, 2, 2, 1], Tile(0, 0, 6, 4))
    sizes = [(round(box.width, 2), round(box.height, 2)) for box in boxes]
    assert sizes[:5] == [(3, 2), (3, 2), (1.71, 2.33), (1.29, 2.33), (1.2, 1.67)]


def rectangles(ax: Any) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def texts(ax: Any) -> str:
    return "\n".join(text.get_text() for text in ax.texts)


@pytest.mark.parametrize("kind", ["flat", "stacked"])
def test_numbered_modules_are_one(kind: str, request: Any) -> None:
    ds = request.getfixturevalue(kind)
    ax = Plots(ds).treemap()
    assert len(rectangles(ax)) == 3
    assert "×18  9.0 KiB" in texts(ax)
    assert "×6  1.5 KiB" in texts(ax)
    assert ax.get_title() == "11.8 KiB in 25 tensors"
    areas = sorted(patch.get_width() * patch.get_height() for patch in rectangles(ax))
    assert areas[2] / areas[1] == pytest.approx(6)


def test_colours_are_stored_types() -> None:
    ds = xr.Dataset({"a": ("x", np.zeros(4, "f4")), "b": ("x", np.zeros(4, "i1"))})
    ax = Plots(ds).treemap()
    assert len({patch.get_facecolor() for patch in rectangles(ax)}) == 2
    key = legend_texts(ax)
    assert key == ["float32  16 B  80.0 %", "int8  4 B  20.0 %"]


@pytest.mark.parametrize(("count", "marks"), [(55_000, ("1", "2")), (3000, ("·", "·"))])
def test_narrow_areas_are_listed(count: int, marks: tuple[str, str]) -> None:
    value = np.zeros(4_000_000, np.float32)
    names = {f"layers.0.{name}_proj": ("a", value) for name in ("gate", "up", "down")}
    names |= {f"layers.0.{name}_norm": (name, value[:count]) for name in ("first", "second")}
    ax = Plots(xr.Dataset(names)).treemap()
    (listed,) = [text.get_text() for text in ax.texts if "first_norm" in text.get_text()]
    assert [line.split()[:2] for line in listed.splitlines()] == [
        [marks[0], "first_norm"],
        [marks[1], "second_norm"],
    ]
    assert (set(marks) <= set(texts(ax).splitlines())) == (marks[0] == "1")


def test_nothing_is_read(unreadable: xr.Dataset) -> None:
    Plots(unreadable).treemap()


def test_many_tensors_are_few_rectangles() -> None:
    value = np.zeros(4, np.float32)
    names = [f"layers.{n}.experts.{e}.{r}" for n in range(40) for e in range(60) for r in "abc"]
    ds = xr.Dataset(dict.fromkeys(names, ("x", value)))
    assert len(rectangles(Plots(ds).treemap())) == 3


def test_nothing_to_draw(flat: xr.Dataset) -> None:
    with pytest.raises(ValueError, match="tensors='nothing' matches none of the"):
        Plots(flat).treemap("nothing")
    with pytest.raises(ValueError, match="all tensors are empty"):
        Plots(xr.Dataset({"w": ("x", np.zeros(0))})).treemap()
