"""Chunks cover the shape, are contiguous, and no larger than requested."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from xckpt.arrays.keys import chunks_along_slowest


@given(
    array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3000),
    st.sampled_from("CF"),
)
def test_chunks(shape: tuple[int, ...], itemsize: int, target: int, order: Any) -> None:
    chunks = chunks_along_slowest(shape, itemsize, target, order)
    assert tuple(map(sum, chunks)) == shape
    if 0 in shape:
        return
    largest = [sizes[0] for sizes in chunks]
    assert prod(largest) * itemsize <= max(target, itemsize)
    block = np.zeros(shape, order=order)[tuple(slice(0, n) for n in largest)]
    assert block.flags.c_contiguous if order == "C" else block.flags.f_contiguous


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 10**9)])
def test_arrays_without_elements_are_one_chunk(shape: tuple[int, ...]) -> None:
    assert chunks_along_slowest(shape, 4, 10) == tuple((n,) for n in shape)


def test_chunks_have_the_requested_size() -> None:
    assert chunks_along_slowest((1000, 1000), 4, 400_000) == ((100,) * 10, (1000,))


def test_a_claimed_shape_makes_a_bounded_number_of_chunks() -> None:
    for shape in ((1 << 62, 1 << 62), (1 << 62,), (3, 1 << 50)):
        chunks = chunks_along_slowest(shape, 8, 1 << 27)
        assert tuple(map(sum, chunks)) == shape
        assert prod(map(len, chunks)) < 1 << 19
