"""Histograms: shares of elements, and colours by layer number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.patches import StepPatch

from tests.plots.pictures import legend_texts, notes
from tests.stats.reference import dtype_of
from xckpt.plots import Plots

MINUS = "\N{MINUS SIGN}"


def steps(ax: Any) -> list[Any]:
    return [patch.get_data() for patch in ax.patches if isinstance(patch, StepPatch)]


def test_densities_of_elements(flat: xr.Dataset) -> None:
    ax = Plots(flat).histogram(["embed", "m.layers.0.attn.w"], bins=[-2.0, 0.0, 2.0])
    densities, edges, _ = steps(ax)[0]
    embed = flat["embed"].values
    expected = [((embed >= -2) & (embed < 0)).sum(), ((embed >= 0) & (embed <= 2)).sum()]
    assert densities == pytest.approx(np.array(expected) / embed.size / 2)
    assert list(edges) == [-2, 0, 2]
    assert legend_texts(ax) == ["embed", "m.layers.0.attn.w"]
    assert (ax.get_yscale(), ax.get_ylabel(), ax.get_title()) == ("log", "density", "2 tensors")


@pytest.mark.parametrize("scale", ["linear", "symlog"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_the_area_is_one_without_a_comb(dtype: str, scale: str) -> None:
    values = np.random.default_rng(0).normal(1, 0.1, 100_000)
    values = (values * 60 if dtype == "int8" else values).astype(dtype_of(dtype))
    ax = Plots(xr.Dataset({"w": ("x", values)})).histogram(scale=scale, bins=300)
    ((densities, edges, _),) = steps(ax)
    along = edges if scale == "linear" else ax.transScale.transform([(e, 1) for e in edges])[:, 0]
    if scale == "symlog":
        transform: Any = ax.xaxis.get_transform()
        along = along / transform.linthresh
    assert np.nansum(densities * np.diff(along)) == pytest.approx(1, rel=1e-6)
    top = np.flatnonzero(densities > 0.5 * np.nanmax(densities))
    peak = densities[top[0] : top[-1] + 1]
    assert len(peak) > 10
    assert (np.abs(np.log(peak[1:] / peak[:-1])) < 0.3).all()  # a comb has half, or twice as much
    ticks = ax.get_xticks()
    assert {float(values.min()), float(values.max())} <= {*ticks.tolist()}


def test_some_numbered_tensors_have_the_colour_of_their_number(flat: xr.Dataset) -> None:
    ax = Plots(flat).histogram("*.attn.w", scale="symlog", log=False)
    assert len(steps(ax)) == 6
    assert ax.get_legend() is None
    assert len({patch.get_edgecolor() for patch in ax.patches}) == 6
    (bar,) = [axes for axes in ax.figure.axes if axes is not ax]
    assert bar.get_ylabel() == "layers"
    assert (ax.get_xscale(), ax.get_yscale()) == ("symlog", "linear")
    assert ax.get_title() == "m.layers.{0..5}.attn.w"


def test_one_role_in_two_layers_has_two_labels(flat: xr.Dataset) -> None:
    names = ["m.layers.3.attn.w", "m.layers.5.attn.w"]
    ax = Plots(flat).histogram(names)
    assert legend_texts(ax) == ["layer 3", "layer 5"]
    assert ax.get_title() == "m.layers.*.attn.w"


def test_labels_of_long_names_differ() -> None:
    values = np.random.default_rng(0).normal(size=99)
    ends = ["attention.projection.of.queries.keys.and.values.together.weight", "bias"]
    names = [f"encoder.{side}.{part}.{ends[0]}" for side in "ab" for part in "xyz"]
    names += [f"{'very.' * 20}long.{end}" for end in ends]
    ax = Plots(xr.Dataset(dict.fromkeys(names, ("x", values)))).histogram()
    labels = legend_texts(ax)
    assert len(set(labels)) == len(labels) == len(names)


def test_many_tensors_are_bands_and_the_outlier_has_a_name() -> None:
    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{layer}.experts.{expert}.{role}": ("x", rng.normal(0, 0.02, 500))
        for layer in range(4)
        for expert in range(8)
        for role in ("up", "down")
    }
    tensors["layers.2.experts.5.up"][1][7] = -3.0
    tensors["layers.1.experts.0.down"] = ("x", np.full(500, 1e-6))
    ax = Plots(xr.Dataset(tensors)).histogram()
    key = legend_texts(ax)
    assert key[0] == "up  ×32"
    assert key[1].startswith(f"layer 2, expert 5: {MINUS}3 to 0.0")
    assert key[3] == "down  ×32"
    assert key[5] == f"layer 1, expert 0: 1e{MINUS}06 to 1e{MINUS}06"
    assert ax.get_title() == "layers.{0..3}.experts.{0..7}.*"
    assert notes(ax) == "lines: medians; bands: 5 to 95 %, and all"
    assert -3.0 in ax.get_xticks()
    filled = {patch.get_facecolor()[:3] for patch in ax.patches if patch.get_fill()}
    assert len(filled) == 2


def test_many_roles_are_merged() -> None:
    rng = np.random.default_rng(0)
    words = ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "up", "down")
    tensors = {
        f"layers.{layer}.{word}.{leaf}": ("x", rng.normal(size=9))
        for word in words
        for leaf in ("weight", "bias")
        for layer in range(3)
    }
    tensors["layers.1.gate.bias"][1][3] = 1e4
    ax = Plots(xr.Dataset(tensors)).histogram()
    key = legend_texts(ax)
    assert key[0] == "{q_proj,k_proj,v_proj,…,down}.weight  ×21"
    assert key[3] == "{q_proj,k_proj,v_proj,…,down}.bias  ×21"
    assert key[4].startswith("layer 1, gate: ")


def test_codes_do_not_share_an_axis_with_weights() -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": ("x", rng.integers(-127, 128, 99).astype(np.int8)),
        "a.weight_scale": ("y", np.ones(1)),
        "b.weight": ("x", rng.normal(size=99)),
    }
    plots = Plots(xr.Dataset(tensors))
    ax = plots.histogram("*.weight")
    assert len(steps(ax)) == 1
    assert ax.get_title() == "b.weight"
    assert notes(ax) == "without 1 tensor of codes; its scales are in weight_scale"
    ax = plots.histogram("a.weight")
    assert ax.get_xlabel() == "code"
    assert notes(ax) == "codes, whose scales are in weight_scale"


def test_nonfinite_elements_are_mentioned() -> None:
    values = np.array([1.0, np.nan, 2.0, np.inf])
    ds = xr.Dataset({"w": ("x", values), "nothing": ("x", values * np.nan)})
    assert notes(Plots(ds).histogram("w")) == "without 2 NaN or infinite in w"
    ax = Plots(ds).histogram()
    assert notes(ax) == "without 6 NaN or infinite in 2 tensors"
    with pytest.raises(ValueError, match="none of 1 tensor have a finite element"):
        Plots(ds).histogram("nothing")


def test_spectra_of_tensors_that_are_not_finite_are_errors(flat: xr.Dataset) -> None:
    flat = flat.copy(deep=True)
    flat["embed"][1, 1] = np.nan
    with pytest.raises(ValueError, match="'embed' has elements that are NaN or infinite"):
        Plots(flat).spectrum("embed")


def test_a_spectrum_of_less_than_full_rank_has_the_known_values() -> None:
    ds = xr.Dataset({"w": (("out", "in"), np.outer(np.arange(1, 9), np.ones(4)).astype("f4"))})
    (values,) = (np.asarray(line.get_ydata()) for line in Plots(ds).spectrum("w").lines[:1])
    np.testing.assert_allclose(values, [np.sqrt(4 * 204)])


def test_a_spectrum_has_the_whole_name_in_its_title(flat: xr.Dataset) -> None:
    name = "model.layers.31.mlp.experts.117.down_proj.weight"
    flat = flat.rename({"embed": name})
    ax = Plots(flat).spectrum(name, minus=flat * 2)
    assert ax.get_title() == name
    assert notes(ax).startswith("of the difference · stable rank")
    ax.figure.canvas.draw()
    side = ax.figure.axes[1]
    assert side.get_window_extent().x0 - ax.get_window_extent().x1 < 30


def test_empty_bins_are_no_lines_at_the_bottom() -> None:
    ds = xr.Dataset({"w": ("x", np.array([0.0, 0.0, 9.0]))})
    ((densities, edges, _),) = steps(Plots(ds).histogram(bins=9))
    shares = densities * np.diff(edges)
    assert shares[0] == pytest.approx(2 / 3)
    assert np.isnan(shares[1:-1]).all()
    assert shares[-1] == pytest.approx(1 / 3)


def test_nothing_to_draw(flat: xr.Dataset) -> None:
    with pytest.raises(ValueError, match="tensors='nothing' matches none of the"):
        Plots(flat).histogram("nothing")
    with pytest.raises(ValueError, match="the object has no tensors"):
        Plots(xr.Dataset()).histogram()
