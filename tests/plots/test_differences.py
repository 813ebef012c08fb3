"""Bars of the largest changes, and a title for the remaining tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

import xckpt.statistics
from tests.hostile_names import HOSTILE
from tests.plots.pictures import notes
from xckpt.plots import Plots


@pytest.fixture
def base() -> xr.Dataset:
    rng = np.random.default_rng(0)
    return xr.Dataset({f"l.{n}.w": (("a", "b"), rng.normal(size=(5, 6))) for n in range(6)})


@pytest.fixture
def tuned(base: xr.Dataset) -> xr.Dataset:
    tuned = base.copy(deep=True).drop_vars("l.5.w")
    tuned["l.1.w"] *= 1.5
    tuned["l.3.w"] *= 1.01
    tuned["new"] = ("a", np.ones(5))
    return tuned


def labels(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_yticklabels()]


def widths(ax: Any) -> list[float]:
    return [bar.get_width() for bar in ax.patches]


def test_the_largest_change_is_at_the_top(base: xr.Dataset, tuned: xr.Dataset) -> None:
    ax = Plots(base).compare(tuned)
    ax.figure.canvas.draw()
    assert labels(ax) == ["l.3.w", "l.1.w"]
    assert widths(ax) == pytest.approx([0.01, 0.5])
    assert ax.get_title() == "7 tensors: 3 same, 2 changed, 1 only here, 1 only in the other"
    assert (ax.get_xlabel(), ax.get_xscale()) == ("rel_l2", "linear")


def test_few_bars_another_statistic_and_some_tensors(base: xr.Dataset, tuned: xr.Dataset) -> None:
    ax = Plots(base).compare(tuned, "max_abs", ["l.1.*", "l.2.*"], most=1, color="red")
    assert widths(ax) == pytest.approx([float(abs(base["l.1.w"]).max() / 2)])
    assert ax.get_title() == "2 tensors: 1 same, 1 changed"
    both = Plots(base).compare(tuned, most=1)
    assert notes(both) == "the 1 most changed"


def test_an_existing_comparison_is_reused(
    base: xr.Dataset, tuned: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = xckpt.compare(base, tuned)
    monkeypatch.setattr("xckpt.compare", None, raising=False)
    assert len(Plots(base).compare(comparison, tensors="l.*").patches) == 2
    ax = Plots(base).layers("rel_l2", stats=comparison)
    (line,) = ax.get_lines()
    assert np.asarray(line.get_ydata())[:4] == pytest.approx([0, 0.5, 0, 0.01])


def test_infinite_changes_have_a_label_and_no_bar(base: xr.Dataset) -> None:
    zero = xr.zeros_like(base)
    ax = Plots(zero).compare(base)
    assert set(widths(ax)) == {0}
    assert {text.get_text() for text in ax.texts} == {"inf"}


def test_a_wide_span_is_logarithmic(base: xr.Dataset, tuned: xr.Dataset) -> None:
    tuned["l.3.w"] = base["l.3.w"] * (1 + 1e-6)
    assert Plots(base).compare(tuned).get_xscale() == "log"


def test_a_title_of_many_counts_has_several_lines_inside_the_picture(
    base: xr.Dataset, tuned: xr.Dataset
) -> None:
    long = "model.layers.31.self_attn.some_projection.of_many"
    counts = xr.Dataset({f"more.{n}": ("c", np.ones(2)) for n in range(1200)})
    ours = base.rename({"l.1.w": long}).merge(counts)
    theirs = tuned.rename({"l.1.w": long}).merge(counts.isel(c=[0])).assign(u=("a", np.ones(5)))
    ax = Plots(ours).compare(theirs)
    ax.figure.canvas.draw()
    title = (
        "1,208 tensors: 3 same, 2 changed, 1 only here, 2 only in the other, 1,200 of another shape"
    )
    assert ax.get_title().split() == title.split()
    assert "\n" in ax.get_title()
    assert ax.title.get_window_extent().x1 < ax.figure.bbox.x1


def test_elements_that_are_not_finite_are_named(base: xr.Dataset, tuned: xr.Dataset) -> None:
    tuned["l.2.w"] = base["l.2.w"].copy()
    tuned["l.2.w"][1, 2:4] = np.nan
    ax = Plots(base).compare(tuned)
    tuned["l.3.w"] = base["l.3.w"] * (1 + 1e-6)
    wide = Plots(base).compare(tuned)
    assert wide.get_xscale() == "symlog"
    for axes in (ax, wide):
        axes.figure.canvas.draw()
        (label,) = (t for t in axes.texts if t.get_text() == "0, 2 elements not finite")
        box = label.get_window_extent()
        assert axes.bbox.x0 <= box.x0 < box.x1 <= axes.figure.bbox.x1


def test_nothing_changed(base: xr.Dataset) -> None:
    ax = Plots(base).compare(base.copy(deep=True))
    assert not ax.patches
    assert ax.get_title() == "6 tensors: 6 same"
    assert [text.get_text() for text in ax.texts] == ["All tensors are equal."]
    assert not len(ax.get_xticks())


def test_identical_common_tensors_draw_no_bars(base: xr.Dataset) -> None:
    few = base.drop_vars("l.5.w")
    (text,) = Plots(base).compare(few).texts
    assert text.get_text() == "No tensor that is in both has changed."
    with pytest.warns(xckpt.CheckpointWarning):
        (text,) = Plots(base).compare(xr.Dataset({"other": ("x", [1.0])})).texts
    assert text.get_text() == "No tensor is in both with the same shape."


def test_codes_do_not_share_an_axis_with_weights() -> None:
    codes = np.arange(-20, 20, dtype=np.int8).reshape(8, 5)
    base = xr.Dataset({"a.weight": (("x", "y"), codes), "a.weight_scale": ("x", np.ones(8))})
    base["b.weight"] = ("x", "y"), codes / 100
    tuned = base.copy(deep=True)
    tuned["a.weight"] = (base["a.weight"] // 2).astype(np.int8)
    tuned["b.weight"] = base["b.weight"] * 2
    ax = Plots(base).compare(tuned)
    assert labels(ax) == ["b.weight"]
    assert notes(ax) == "without 1 tensor of codes; its scales are in weight_scale"
    ax = Plots(base).compare(tuned, "max_abs", "a.*")
    assert (labels(ax), ax.get_xlabel()) == (["a.weight"], "max_abs of codes")


def test_hostile_names_are_texts() -> None:
    ds = xr.Dataset({name: ("x", [1.0, 2.0]) for name in HOSTILE})
    ax = Plots(ds).compare(ds + 1, most=30)
    ax.figure.canvas.draw()
    assert r"\$\frac{a}{b}\$_{c" in labels(ax)
    assert r"\x1b[31mred\x1b[2J" in labels(ax)


def test_wrong_arguments(base: xr.Dataset, tuned: xr.Dataset) -> None:
    with pytest.raises(ValueError, match="no statistic 'rel', only count"):
        Plots(base).compare(tuned, "rel")
    with pytest.raises(ValueError, match="at least one bar"):
        Plots(base).compare(tuned, most=0)
