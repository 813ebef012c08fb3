"""Hashes of rows and columns: equal for equal numbers, whatever stores them, and for no others."""

from __future__ import annotations

from typing import Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import xarray as xr

from tests.stats.checkpoints import model, write
from xckpt.statistics.entries import contents_of
from xckpt.statistics.explaining.fingerprints import Fingerprint, Transform, fingerprints

Array = np.ndarray[Any, np.dtype[Any]]


def values() -> Array:
    found = np.random.default_rng(0).standard_normal((60, 30)).astype(np.float32)
    found[3, 4], found[5, 5] = -0.0, np.nan
    return found


def hashed(array: Any, transform: Transform | None = None) -> Fingerprint:
    dims = [f"d{axis}" for axis in range(array.ndim)]
    (entry,) = contents_of(xr.Dataset({"x": (dims, array)})).entries()
    (found,) = fingerprints(entry.readers, transforms=[transform], columns=True)
    assert found is not None
    return found


def same(first: Any, second: Any) -> bool:
    return first is not None and second is not None and np.array_equal(first, second)


@pytest.mark.parametrize(
    "stored",
    [
        values().astype(np.float64),
        np.where(values() == 0, np.float32(0), values()),
        da.from_array(values(), chunks=(7, 30)),
        da.from_array(values(), chunks=(11, 13)),
        np.asfortranarray(values()),
    ],
    ids=["float64", "zero", "rows", "tiles", "F"],
)
def test_equal_numbers_have_equal_hashes(stored: Any) -> None:
    first, second = hashed(values()), hashed(stored)
    assert first.contents == second.contents
    assert same(first.rows, second.rows)
    assert same(first.columns, second.columns)


def test_the_order_of_the_axes_in_the_file_does_not_matter(tmp_path: Any) -> None:
    import xckpt

    array = values()
    xckpt.save(xr.Dataset({"x": (("a", "b"), array)}), tmp_path / "c.safetensors")
    (entry,) = contents_of(tmp_path / "c.safetensors").entries()
    (stored,) = fingerprints(entry.readers)
    assert stored is not None
    assert stored.contents == hashed(array).contents


def test_columns_are_the_rows_of_the_transpose() -> None:
    square = values()[:30]
    first, second = hashed(square), hashed(square.T.copy())
    assert same(first.rows, second.columns)
    assert same(first.columns, second.rows)
    assert first.elements == second.elements
    assert first.digest != second.digest


def test_padding_with_zeros_changes_no_hash() -> None:
    padded = hashed(np.pad(values(), ((0, 5), (0, 7))))
    assert padded.rows is not None
    assert same(padded.rows[:60], hashed(values()).rows)
    assert not padded.rows[60:].any()
    assert padded.elements == hashed(values()).elements


def test_what_is_rounded_first_is_hashed_as_it_is_then() -> None:
    rounded = hashed(values(), Transform(types=("bfloat16",)))
    assert rounded.contents == hashed(values().astype(ml_dtypes.bfloat16)).contents
    assert rounded.contents != hashed(values()).contents
    moved = hashed(values(), Transform(offset=1.0, types=("float32",)))
    assert moved.contents == hashed(values() + np.float32(1)).contents


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_that_of_the_types(name: str) -> None:
    wanted = np.dtype(getattr(ml_dtypes, name, name))
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    # Around the middles between two numbers of each type, where it is to even.
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        numbers = (upper | np.uint32(lower)).view(np.float32)
        with np.errstate(all="ignore"):
            rounded = numbers.astype(wanted).astype(np.float32)
        np.testing.assert_array_equal(Transform(types=(name,))(numbers), rounded)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_numbers_that_are_no_float32_differ(dtype: str) -> None:
    base = np.array([5, 2**52 + 1, 7], dtype)
    assert hashed(base).contents != hashed(base + np.array([0, 1, 0], dtype)).contents
    assert hashed(base).contents == hashed(base.copy()).contents


def test_one_bit_anywhere_changes_them() -> None:
    first = hashed(values())
    rng = np.random.default_rng(1)
    for _ in range(20):
        other = values()
        row, column = rng.integers(60), rng.integers(30)
        other.view(np.uint32)[row, column] ^= np.uint32(1 << rng.integers(23))
        found = hashed(other)
        if np.array_equal(other, values(), equal_nan=True):
            continue
        assert found.digest != first.digest
        assert found.rows is not None
        assert first.rows is not None
        assert np.flatnonzero(found.rows != first.rows).tolist() == [row]


def test_all_tensors_of_a_file(tmp_path: Any) -> None:
    path = write(tmp_path / "m.safetensors", model())
    readers = [reader for entry in contents_of(path).entries() for reader in entry.readers]
    found = fingerprints(readers)
    assert len({one.contents for one in found if one is not None}) == len(readers)
