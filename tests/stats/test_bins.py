"""Histograms from sketches: every element is in exactly the bin that holds its value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.stats.checkpoints import model, write
from tests.stats.reference import dtype_of
from xckpt.arrays.kinds import kind_named
from xckpt.scan.entries import contents_of, entries_of
from xckpt.statistics import histogram
from xckpt.statistics.histograms import bin_edges, distributions, edges_on_grid

if TYPE_CHECKING:
    from pathlib import Path


def counts(values: Any, **options: Any) -> xr.Dataset:
    return histogram(xr.Dataset({"x": ("a", values)}), **options)


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16", "int32", "int8"])
@pytest.mark.parametrize("bins", [3, 10, 101])
def test_the_symmetric_scale_is_exact(name: str, bins: int) -> None:
    values = (np.random.default_rng(0).standard_normal(20_000) * 20).astype(dtype_of(name))
    values[:50] = 0
    h = counts(values, bins=bins)
    edges = np.append(h["bin_left"], h["bin_right"][-1])
    expected, _ = np.histogram(values.astype(np.float64), edges)
    np.testing.assert_array_equal(h["x"], expected)
    assert h["x"].sum() == 20_000
    assert h["x"].dtype == np.int64
    assert 3 <= h.sizes["bin"] <= bins
    assert (h["bin_left"] < h["bin"]).all()
    assert (h["bin"] < h["bin_right"]).all()


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "uint64", "bfloat16", "int8"])
@pytest.mark.parametrize("scale", ["symlog", "linear"])
@pytest.mark.parametrize("bins", [1, 2, 50])
def test_the_outer_edges_are_the_extremes(name: str, scale: Any, bins: int) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(5000) * 40).astype(dtype_of(name))
    if name.startswith("u"):
        values = rng.integers(1 << 20, 1 << 40, 5000, name)
    h = counts(values, bins=bins, scale=scale)
    wide = values.astype(np.float64)
    assert h["bin_right"][-1] == wide.max()
    if not name.startswith("u") or scale == "linear":
        assert h["bin_left"][0] == wide.min()
    assert h["x"].sum() == 5000


def test_extremes_at_the_edge_of_the_bin_around_zero_are_counted() -> None:
    for sign in (1, -1):
        assert counts(sign * np.array([-1.0, 0.0, 9.98e-9]))["x"].sum() == 3


def test_the_bin_around_zero_has_the_zeros() -> None:
    h = counts(np.array([0.0, -0.0, 0, 1e-3, -5, 7]))
    zero = h.where((h["bin_left"] < 0) & (h["bin_right"] > 0), drop=True)
    assert zero["x"].item() == 3


def test_the_linear_scale() -> None:
    values = np.random.default_rng(0).integers(-100, 101, 5000).astype(np.int8)
    h = counts(values, bins=10, scale="linear")
    expected, edges = np.histogram(values, 10)
    np.testing.assert_array_equal(h["x"], expected)
    np.testing.assert_allclose(h["bin_left"], edges[:-1])


def test_given_edges_and_values_beyond_them() -> None:
    h = counts(np.array([-1, 0, 1, 2, 3, 4, np.nan, np.inf], np.float16), bins=[0, 2, 3])
    assert h["x"].values.tolist() == [2, 2]
    for wrong in ([1], [2, 1], [1, 1]):
        with pytest.raises(ValueError, match="ascend"):
            counts(np.ones(3), bins=wrong)


@pytest.mark.parametrize(
    "values", [np.zeros(5), np.full(5, 3.0), np.empty(0), np.full(3, np.nan), np.array([-2.0, -2])]
)
@pytest.mark.parametrize("scale", ["symlog", "linear"])
def test_few_different_values(values: Any, scale: Any) -> None:
    h = counts(values, scale=scale)
    assert h["x"].sum() == np.isfinite(values).sum()


def test_values_of_one_sign() -> None:
    for sign in (1, -1):
        values = sign * np.random.default_rng(0).random(1000) + sign
        assert counts(values)["x"].sum() == 1000


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="'symlog' or 'linear'"):
        counts(np.ones(3), scale="log")
    with pytest.raises(ValueError, match="at least one bin"):
        counts(np.ones(3), bins=0)


def test_tensors_share_bins_and_stacked_dimensions_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", model())
    h = histogram(xr.open_dataset(path, engine="safetensors", stack=True), bins=20)
    assert h["layers.w"].dims == ("bin", "layers")
    assert h["layers.w"].sum("bin").values.tolist() == [48 * 32] * 3
    assert h["layers"].values.tolist() == [0, 1, 2]
    assert h["none"].sum() == 0


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float32", "float64"])
@pytest.mark.parametrize(("mean", "std"), [(1.0, 0.1), (0.0, 0.5), (-2.0, 0.2)])
def test_densities_on_the_grid_of_a_type_have_no_comb_and_no_step(
    name: str, mean: float, std: float
) -> None:
    values = np.random.default_rng(0).normal(mean, std, 200_000).astype(dtype_of(name))
    (distribution,) = distributions(entries_of(contents_of(xr.Dataset({"x": ("a", values)}))))
    edges = edges_on_grid(distribution.kind, bin_edges(200, "linear", [distribution.span]))
    counts = distribution.counts(edges)
    assert counts.sum() == distribution.count == 200_000
    assert edges[0] <= distribution.low
    assert edges[-1] >= distribution.high
    cumulated = np.array([math.erf((edge - mean) / std / math.sqrt(2)) / 2 for edge in edges])
    expected = 200_000 * np.diff(cumulated)
    many = expected > 1000
    assert many.sum() > (4 if "float8" in name else 20)
    # Five standard deviations of the random counts.
    assert (np.abs(counts - expected)[many] < 5 * np.sqrt(expected[many]) + 1).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e5m2", "int8", "uint8", "bool"])
def test_a_bin_on_the_grid_has_a_number_of_the_type(name: str) -> None:
    every = np.unique(kind_named(name).values)
    every = every[np.isfinite(every)]
    ends = (every[0], every[-1])
    for low, high in [(0.0, 1.0), (np.clip(-1.0, *ends), 1.0), ends, (1.0, 1.0)]:
        edges = edges_on_grid(kind_named(name), np.linspace(low, high + 1e-9, 500))
        inside = every[(every > edges[0]) & (every < edges[-1])]
        assert np.histogram(inside, edges)[0].min() >= 1
        assert low >= edges[0]
        assert high <= edges[-1]


@pytest.mark.parametrize("span", [(0, 0), (-3, 5), (0, 255), (-1000, -400), (250, 70_000)])
def test_bins_of_integers_are_between_integers(span: tuple[int, int]) -> None:
    edges = edges_on_grid(kind_named("int32"), np.linspace(*span, 2000))
    assert (edges % 1 == 0.5).all()
    assert edges[0] <= span[0] <= span[1] <= edges[-1]
    values = np.arange(span[0], span[1] + 1, dtype=np.int32)
    (distribution,) = distributions(entries_of(contents_of(xr.Dataset({"x": ("a", values)}))))
    counts = distribution.counts(edges)
    assert counts.sum() == len(values)
    assert counts[1:-1].tolist() == np.diff(edges)[1:-1].tolist()


def test_a_distribution_has_extremes_and_a_nonfinite_count() -> None:
    values = np.array([3.0, np.nan, -1.0, np.inf, 0.0, 0.25], np.float32)
    ds = xr.Dataset({"x": ("a", values), "nan": ("b", values[[1]])})
    distribution, nothing = distributions(entries_of(contents_of(ds)))
    assert (distribution.name, distribution.count, distribution.other) == ("x", 4, 2)
    assert (distribution.low, distribution.high) == (-1, 3)
    assert distribution.smallest == pytest.approx(0.25, rel=2**-8)
    assert distribution.mean == pytest.approx(0.5625, rel=2**-8)
    assert (nothing.count, nothing.other) == (0, 1)


def test_bins_are_checked_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xckpt.statistics.histograms.gather", None)
    with pytest.raises(ValueError, match="at least one bin, not 0"):
        counts(np.ones(3), bins=0)
    with pytest.raises(ValueError, match="ascend"):
        counts(np.ones(3), bins=[1, 1])
