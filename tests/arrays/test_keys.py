"""Selections through their contiguous hull equal numpy's and read no more than necessary."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from xckpt.arrays.keys import contiguous_run, normalize, result_shape, take


def select(array: np.ndarray, key: Any) -> tuple[np.ndarray, int]:
    """Select by way of a run; give the result and the number of elements read."""
    chosen = normalize(key, array.shape)
    shape = result_shape(array.shape, chosen)
    if 0 in shape:
        return np.empty(shape, array.dtype), 0
    run = contiguous_run(array.shape, chosen)
    flat = array.ravel()[run.start : run.start + prod(run.shape)]
    return take(flat.reshape(run.shape), run.key), flat.size


@given(st.data())
def test_basic_indices_equal_numpy(data: st.DataObject) -> None:
    shape = data.draw(array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    array = np.arange(prod(shape)).reshape(shape)
    key = data.draw(basic_indices(shape, allow_newaxis=False))
    got, _ = select(array, key)
    np.testing.assert_array_equal(got, array[key])


@given(st.data())
def test_arrays_select_orthogonally(data: st.DataObject) -> None:
    shape = data.draw(array_shapes(min_dims=1, max_dims=3, max_side=6))
    array = np.arange(prod(shape)).reshape(shape)
    key = tuple(
        np.array(data.draw(st.lists(st.integers(-n, n - 1), max_size=5)), dtype=np.int64)
        for n in shape
    )
    got, _ = select(array, key)
    np.testing.assert_array_equal(got, array[np.ix_(*key)])


def test_boolean_array() -> None:
    array = np.arange(12).reshape(3, 4)
    got, read = select(array, ([False, True, False], slice(None)))
    np.testing.assert_array_equal(got, array[[1]])
    assert read == 4


@pytest.mark.parametrize(
    ("key", "read"),
    [
        (5, 40),
        ((5, 2), 10),
        ((5, 2, 3), 1),
        ((5, slice(1, 3)), 20),
        (slice(2, 9, 3), 7 * 40),
        ((slice(None, None, -1), 0), 400),
        ((slice(7, 8), slice(3, 4), slice(None, None, 2)), 9),
    ],
)
def test_selections_read_their_hull(key: Any, read: int) -> None:
    array = np.arange(400).reshape(10, 4, 10)
    got, count = select(array, key)
    np.testing.assert_array_equal(got, array[key])
    assert count == read


@pytest.mark.parametrize(
    "key", [10, -11, (0, 0, 0, 0), "a", 1.5, ([0, 10],), ([[0]],), ([True, False],)]
)
def test_bad_indices(key: Any) -> None:
    with pytest.raises(IndexError):
        normalize(key, (10, 4, 10))
