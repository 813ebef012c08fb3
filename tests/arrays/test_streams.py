"""Streams of elements: blocks of any sizes become whole leaves, and pairs keep in step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.arrays.streams import LEAF, ArrayStream, ChunkedStream, Zip, of_array, whole_leaves

VALUES = np.arange(1000)


@given(st.lists(st.integers(0, len(VALUES)), max_size=8).map(sorted), st.integers(1, 400))
def test_blocks_cut_anywhere_become_whole_leaves(cuts: list[int], leaf: int) -> None:
    bounds = pairwise([0, *cuts, len(VALUES)])
    blocks = [(start, (VALUES[start:stop], -VALUES[start:stop])) for start, stop in bounds]
    end = 0
    for position, (values, negatives) in whole_leaves(blocks, leaf):
        assert position == end
        assert position % leaf == 0
        end += len(values)
        assert end % leaf == 0 or end == len(VALUES)
        np.testing.assert_array_equal(values, VALUES[position:end])
        np.testing.assert_array_equal(negatives, -values)
    assert end == len(VALUES)


def test_whole_leaves_are_not_copied() -> None:
    blocks = [(0, (VALUES[:400],)), (400, (VALUES[400:],))]
    for _, (values,) in whole_leaves(blocks, 100):
        assert np.shares_memory(values, VALUES)


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 20])
def test_both_sides_of_pairs_have_the_same_elements(nbytes: int) -> None:
    rows = np.arange(3 * LEAF, dtype=np.float64).reshape(-1, 96)
    pair = Zip(ArrayStream(rows), ArrayStream(rows.reshape(-1, 1024)))
    end = 0
    for position, (first, second) in pair.blocks(0, rows.size, np.empty(nbytes, np.uint8)):
        assert position == end
        np.testing.assert_array_equal(first, second)
        end += len(first)
    assert end == rows.size


def test_cuts_are_whole_leaves() -> None:
    stream = of_array(np.zeros((7, LEAF)), "w")
    cuts = list(stream.cuts(0, stream.size, 3 * LEAF * 8 + 5))
    assert cuts == [(0, 3 * LEAF), (3 * LEAF, 6 * LEAF), (6 * LEAF, 7 * LEAF)]
    assert list(stream.cuts(0, 0, 1 << 20)) == [(0, 0)]


@pytest.mark.parametrize("chunks", [(10, 10), (3, 100), (100, 7)])
def test_chunks_of_dask_arrays_become_whole_leaves(chunks: tuple[int, int]) -> None:
    da: Any = pytest.importorskip("dask.array")
    values = np.arange(10_000).reshape(100, 100)
    stream = of_array(da.from_array(values, chunks), "w")
    assert isinstance(stream, ChunkedStream)
    flat = stream.flat(1000)
    assert all(size % 1000 == 0 for size in flat.chunks[0])
    np.testing.assert_array_equal(flat.compute(), values.ravel())
