"""Exact quantiles of large types."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.stats.checkpoints import write
from xckpt.statistics import stats

if TYPE_CHECKING:
    from pathlib import Path

QUANTILES = (0.0, 0.001, 0.1, 0.25, 0.5, 0.7501, 0.99, 1.0)


def quantiles_of(values: Any, **options: Any) -> np.ndarray[Any, Any]:
    ds = xr.Dataset({"x": ("a", values)})
    statistics = stats(ds, quantiles=QUANTILES, **options)["x"]
    result: np.ndarray[Any, Any] = statistics.sel(statistic=[f"q{q:g}" for q in QUANTILES]).values
    return result


def nearest(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    finite = values[np.isfinite(values)]
    quantiles: np.ndarray[Any, Any] = np.quantile(finite, np.array(QUANTILES), method="nearest")
    return quantiles.astype(np.float64)


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "uint32", "int64", "uint64"])
def test_exact_quantiles_equal_those_of_numpy(name: str) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(50_000) * 1e6).astype(name)
    if name.startswith("u"):
        values = rng.integers(0, np.iinfo(name).max, 50_000, name, endpoint=True)
    if name.startswith("float"):
        values[:4] = [np.nan, np.inf, 0.0, -0.0]
    np.testing.assert_array_equal(quantiles_of(values, exact_quantiles=True), nearest(values))
    np.testing.assert_allclose(quantiles_of(values), nearest(values), rtol=2.0**-8)
    lazily = da.from_array(values, chunks=7000)
    np.testing.assert_array_equal(quantiles_of(lazily, exact_quantiles=True), nearest(values))


@given(arrays(np.float32, st.integers(1, 30), elements=st.floats(width=32, allow_nan=False)))
@settings(max_examples=60)
def test_exact_quantiles_of_any_float32(values: np.ndarray[Any, Any]) -> None:
    if np.isfinite(values).any():
        np.testing.assert_array_equal(quantiles_of(values, exact_quantiles=True), nearest(values))


@given(arrays(np.int64, st.integers(1, 30)))
@settings(max_examples=60)
def test_exact_quantiles_of_any_int64(values: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(quantiles_of(values, exact_quantiles=True), nearest(values))


def floats(width: Literal[32, 64], smallest: float) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Return arrays of any floats, and of subnormal ones."""
    subnormal = st.integers(-9999, 9999).map(lambda number: number * smallest)
    elements = st.floats(width=width, allow_nan=False) | subnormal
    return arrays(np.dtype(f"f{width // 8}"), st.integers(1, 30), elements=elements)


@given(floats(32, 2.0**-149) | floats(64, 2.0**-1074))
@settings(max_examples=80)
def test_approximate_quantiles_stay_within_their_bound(values: np.ndarray[Any, Any]) -> None:
    if np.isfinite(values).any():
        np.testing.assert_allclose(quantiles_of(values), nearest(values), rtol=2.0**-8)


def test_quantiles_of_subnormal_numbers_are_cached(tmp_path: Path) -> None:
    values = (np.arange(1, 3000) * np.finfo(np.float32).smallest_subnormal).astype(np.float32)
    path = tmp_path / "m.zt"
    write(path, {"w": values, "v": np.ones(9, np.float32)})
    os.utime(path, (1, 1))  # as if it had been there for a while
    first = stats(path, quantiles=QUANTILES)
    names = [f"q{q:g}" for q in QUANTILES]
    np.testing.assert_array_equal(first["w"].sel(statistic=names), nearest(values))
    passes: list[tuple[int, int]] = []
    again = stats(
        path, quantiles=QUANTILES, progress=lambda done, total: passes.append((done, total))
    )
    xr.testing.assert_identical(first, again)
    assert passes == [(0, 0)]


def test_approximate_quantiles_of_the_largest_numbers() -> None:
    largest = np.finfo(np.float32).max
    values = np.linspace(largest * 0.9, largest, 1001, dtype=np.float32)
    np.testing.assert_allclose(quantiles_of(values), nearest(values), rtol=2.0**-8)


def test_exact_quantiles_of_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {f"w{i}": rng.standard_normal((200, 30)).astype(np.float32) for i in range(4)}
    path = write(tmp_path / "m.safetensors", tensors)
    for _ in range(2):
        statistics = stats(path, quantiles=[0.5], exact_quantiles=True)
        for name, values in tensors.items():
            expected = np.quantile(values, np.array(0.5), method="nearest")
            assert statistics[name].sel(statistic="q0.5") == expected
