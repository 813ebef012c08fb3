"""Statistics along named dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.stats.reference import (
    FLOATS,
    LARGE_INTEGERS,
    NAMES,
    SMALL_INTEGERS,
    dtype_of,
    exact_stats,
)
from xckpt.statistics import QUANTILES, stats

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]

# Statistics that are approximate for whole tensors of 32- and 64-bit types: quantiles. Statistics
# that use `count_where` belong here, too.
APPROXIMATE = {name for name in NAMES if name.startswith("q")}


def dataset() -> xr.Dataset:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 5, 40))
    values[2, 3, :] = 0
    values[1, 1, 7] = np.nan
    values[1, 2, 7] = -np.inf
    values[0, 0, :] = np.nan
    return xr.Dataset(
        {
            "x": (("layer", "row", "column"), values),
            "lazy": (("layer", "row", "column"), da.from_array(values, chunks=(2, 5, 11))),
            "other": (("layer",), np.arange(6)),
        },
        {"layer": [0, 1, 2, 5, 6, 7]},
    )


@pytest.mark.parametrize("dim", ["row", "column", ("layer", "column"), ("layer", "row")])
@pytest.mark.parametrize("small", [False, True])
def test_each_row_is_described_alone(
    dim: Any, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:  # rows are long then, and sketched like tensors; or a few at a time
        monkeypatch.setattr("xckpt.scan.entries.LONGEST_ROW", 64)
    ds = dataset()
    st = stats(ds, dim=dim)
    reduced = (dim,) if isinstance(dim, str) else dim
    dims = [d for d in ("layer", "row", "column") if d not in reduced]
    assert st["x"].dims == ("statistic", *dims)
    assert ("other" in st) == ("layer" in reduced)
    rows = ds["x"].transpose(*dims, ...).values
    for position in np.ndindex(*rows.shape[: len(dims)]):
        expected = exact_stats(rows[position])
        row = dict(zip(st["statistic"].values, st["x"].values[:, *position], strict=True))
        for name in ("count", "nan", "inf", "zero", "min", "max", "absmax"):
            np.testing.assert_equal(row[name], expected[name])
        for name in ("mean", "std", "rms", "l2", "skew", "kurtosis"):
            np.testing.assert_allclose(row[name], expected[name], rtol=1e-11, atol=1e-13)
        for quantile in QUANTILES:
            name = f"q{quantile:g}"
            np.testing.assert_allclose(row[name], expected[name], rtol=2.0**-8)
    np.testing.assert_allclose(st["lazy"], st["x"], rtol=1e-13)


def test_rows_have_the_same_bits_in_every_memory_order_and_in_chunks() -> None:
    values = np.random.default_rng(0).standard_normal((70, 900))
    orders = {"c": values, "f": np.asfortranarray(values), "d": da.from_array(values, (20, 300))}
    ds = xr.Dataset({name: (("row", "column"), array) for name, array in orders.items()})
    for dim in ("row", "column"):
        st = stats(ds, dim=dim)
        np.testing.assert_array_equal(st["f"].values, st["c"].values)
        np.testing.assert_array_equal(st["d"].values, st["c"].values)


def test_bits_of_a_row_of_integers_do_not_depend_on_other_rows() -> None:
    small = np.random.default_rng(0).integers(-50, 50, (1, 333))
    both = np.concatenate([small, np.full((1, 333), 1 << 60)])
    alone, together = (stats({"w": array}, dim=-1)["w"].values[:, 0] for array in (small, both))
    np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
@pytest.mark.parametrize("dim", [0, 1])
def test_variables_without_elements_have_empty_rows(shape: tuple[int, int], dim: int) -> None:
    st = stats({"w": np.zeros(shape, np.float32)}, dim=dim)
    assert st["w"].shape == (len(st["statistic"]), shape[1 - dim])
    assert (st["w"].sel(statistic="count") == 0).all()


def test_coordinates_of_kept_dimensions_stay() -> None:
    st = stats(dataset(), dim=["row", "column"])
    assert st["layer"].values.tolist() == [0, 1, 2, 5, 6, 7]


def test_distinct_values_are_counted_of_small_types() -> None:
    ds = xr.Dataset({"i": (("a", "b"), np.array([[1, 1, 2], [3, 3, 3]], np.int8))})
    assert stats(ds, dim="b")["i"].sel(statistic="unique").values.tolist() == [2, 1]
    wide = stats(ds.astype(np.float32), dim="b")["i"]
    assert wide.sel(statistic="unique").isnull().all()


def test_an_unknown_dimension() -> None:
    with pytest.raises(ValueError, match="no variable has the dimension 'z'"):
        stats(dataset(), dim="z")


@st.composite
def tables(draw: Callable[[Any], Any]) -> Array:
    """Draw a table of any element type, with elements anywhere in its range."""
    name = draw(st.sampled_from([*FLOATS, *SMALL_INTEGERS, *LARGE_INTEGERS]))
    dtype, shape = dtype_of(name), (draw(st.integers(1, 3)), draw(st.integers(1, 8)))
    count = shape[0] * shape[1]
    if name == "float64":
        numbers = st.floats(width=64)
        exponent = draw(st.sampled_from([-1074, -700, -1, 0, 512, 1000]))
        near = st.integers(-(2**23), 2**23).map(lambda number: float(np.ldexp(number, exponent)))
        return np.array(draw(st.lists(numbers | near, min_size=count, max_size=count))).reshape(
            shape
        )
    codes = st.integers(0, 2 ** (8 * dtype.itemsize) - 1)
    low = draw(codes)
    near = st.integers(max(0, low - 9), low)
    chosen = draw(st.lists(draw(st.sampled_from([codes, near])), min_size=count, max_size=count))
    patterns = np.array(chosen, f"u{dtype.itemsize}").reshape(shape)
    if name == "bool":
        return (patterns & 1).astype(np.bool_)
    table: Array = patterns.view(dtype)
    # Unused bits of a byte mean nothing.
    is_short = name in {"float6_e2m3fn", "float4_e2m1fn", "int4", "uint4"}
    return table.astype(np.float32).astype(dtype) if is_short else table


@given(tables())
@settings(max_examples=80)
@example(np.array([[1e200, 2e200], [3e200, 4e200]]))
@example(np.array([[1e-200, 2e-200, np.nan], [3e-200, 4e-200, np.inf]]))
@example(np.array([[1.7976931348623157e308, -1.7976931348623157e308, 1.7976931348623157e308]]))
@example(np.array([[5e-324, 0.0, -1.5e-323, 1e-310]]))
@example(np.array([[2**63 - 1, 2**63 - 2, 2**63 - 3], [-(2**63), 0, 2**63 - 1]]))
@example(np.array([[2**64 - 1, 2**64 - 3, 2**64 - 3], [0, 1, 2**64 - 1]], np.uint64))
def test_rows_and_whole_tensors_agree_with_exact_arithmetic(table: Array) -> None:
    ds = xr.Dataset({"x": (("row", "column"), table)})
    along = stats(ds, dim="column", cache=False)["x"].values
    of_tensor = stats(ds, cache=False)["x"].values
    every = stats(ds, dim=("row", "column"), cache=False)["x"].values
    for statistics, elements in (
        *zip(along.T, table, strict=True),
        (of_tensor, table),
        (every, table),
    ):
        exact = exact_stats(elements)
        for name, number in zip(NAMES, statistics, strict=True):
            expected, most = exact[name], exact["absmax"]
            if name in APPROXIMATE and statistics is of_tensor:
                continue
            if name == "mean":
                np.testing.assert_allclose(number, expected, 1e-15, 1e-15 * most + 1e-323)
            elif name in {"skew", "kurtosis"}:
                np.testing.assert_allclose(number, expected, rtol=1e-10, atol=1e-10, err_msg=name)
            elif name in APPROXIMATE:
                np.testing.assert_array_equal(number, expected, err_msg=name)
            elif name == "l2" and not expected < 0.999 * np.finfo(np.float64).max:
                assert number > 0.998 * np.finfo(np.float64).max
            else:
                np.testing.assert_allclose(number, expected, 1e-12, 1e-323, err_msg=name)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_magnitudes_of_complex_numbers_are_float64(dtype: Any) -> None:
    largest = np.finfo(dtype).max / (1 if dtype == np.complex64 else 2)
    numbers = np.array([[largest * (1 + 1j), 1 + 1j], [0, largest]], dtype)
    ds = xr.Dataset({"z": (("row", "column"), numbers)})
    exact = np.abs(numbers.astype(np.clongdouble)).astype(np.float64)
    for obj in (ds, ds.chunk(row=1)):
        statistics = stats(obj, cache=False)["z"]
        assert statistics.sel(statistic="inf") == 0
        np.testing.assert_allclose(statistics.sel(statistic="absmax"), exact.max(), rtol=1e-15)
        np.testing.assert_allclose(
            statistics.sel(statistic="l2"), np.hypot.reduce(exact, axis=None)
        )
        along = stats(obj, dim=("row", "column"), cache=False)["z"]
        np.testing.assert_allclose(along, statistics, rtol=1e-14)
