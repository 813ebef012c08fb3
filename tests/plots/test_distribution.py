"""Histograms: shares of elements, colours of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.patches import StepPatch

from tests.plots.pictures import legend_texts
from xckpt.plots import Plots


def steps(ax: Any) -> list[Any]:
    return [patch.get_data() for patch in ax.patches if isinstance(patch, StepPatch)]


def test_shares_of_elements(flat: xr.Dataset) -> None:
    ax = Plots(flat).histogram(["embed", "m.layers.0.attn.w"], bins=[-2.0, 0.0, 2.0])
    shares, edges, _ = steps(ax)[0]
    embed = flat["embed"].values
    expected = [((embed >= -2) & (embed < 0)).sum(), ((embed >= 0) & (embed <= 2)).sum()]
    assert shares == pytest.approx(np.array(expected) / sum(expected))
    assert list(edges) == [-2, 0, 2]
    assert legend_texts(ax) == ["embed", "m.layers.0.attn.w"]
    assert ax.get_yscale() == "log"


def test_many_numbered_tensors_have_the_colour_of_their_number(flat: xr.Dataset) -> None:
    ax = Plots(flat).histogram("*.up", scale="symlog", log=False)
    assert len(steps(ax)) == 18
    assert ax.get_legend() is None
    colours = [patch.get_edgecolor() for patch in ax.patches]
    assert len(set(colours)) == 6
    assert colours[0] == colours[1] == colours[2]
    (bar,) = [each for each in ax.figure.axes if each is not ax]
    assert bar.get_ylabel() == "layers"
    assert (ax.get_xscale(), ax.get_yscale()) == ("symlog", "linear")


def test_empty_bins_are_no_lines_at_the_bottom() -> None:
    ds = xr.Dataset({"w": ("x", np.array([0.0, 0.0, 9.0]))})
    ((shares, _, _),) = steps(Plots(ds).histogram(bins=9))
    assert shares[0] == pytest.approx(2 / 3)
    assert np.isnan(shares[1:-1]).all()
    assert shares[-1] == pytest.approx(1 / 3)


def test_nothing_to_draw(flat: xr.Dataset) -> None:
    with (
        pytest.warns(UserWarning, match="matches none"),
        pytest.raises(ValueError, match="no tensor is called"),
    ):
        Plots(flat).histogram("nothing")
