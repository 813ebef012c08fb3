"""Selections of scattered elements in local files: bytes read and memory used."""

from __future__ import annotations

import errno
import os
import tracemalloc
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from xckpt.arrays import dense
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.keys import groups, leading_axes, normalize, positions
from xckpt.arrays.parts import PartReader
from xckpt.index import Part
from xckpt.storage import local, open_source

if TYPE_CHECKING:
    from pathlib import Path

START = 3


def array_in(
    path: Path, values: np.ndarray[Any, Any], order: Any = "C", **part_fields: Any
) -> DenseArray:
    """Write values to a file, and make a lazy array of them."""
    path.write_bytes(bytes(START) + values.tobytes(order))
    part = Part(
        part_fields.pop("dtype", values.dtype.name),
        values.shape,
        START,
        values.nbytes,
        **part_fields,
    )
    return DenseArray("t", PartReader(open_source(path), part), values.shape, order=order)


def axis_keys(length: int) -> st.SearchStrategy[Any]:
    """Draw an index of an axis: an integer, a slice, or positions in any order."""
    keys: list[st.SearchStrategy[Any]] = [st.slices(length)]
    if length:
        inside = st.integers(-length, length - 1)
        keys += [inside, st.lists(inside, max_size=2 * length)]
    return st.one_of(keys)


@pytest.mark.parametrize(("block", "skip"), [(2, 0), (8, 0), (8, 4), (8, 10**6), (40, 16)])
@given(data=st.data(), order=st.sampled_from("CF"), byteorder=st.sampled_from(["little", "big"]))
def test_indexing_equals_numpy(
    tmp_path_factory: pytest.TempPathFactory,
    block: int,
    skip: int,
    data: st.DataObject,
    order: Any,
    byteorder: Any,
) -> None:
    shape = data.draw(array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6))
    values = np.arange(prod(shape), dtype="<i2").reshape(shape)
    stored = values.byteswap() if byteorder == "big" else values
    path = tmp_path_factory.getbasetemp() / "scattered"
    lazy = array_in(path, stored, order, byteorder=byteorder)
    key = tuple(data.draw(axis_keys(length)) for length in shape)
    expected = values
    # Arrays act on their own axes each; from the last one, so that integers move none.
    for axis in reversed(range(len(shape))):
        index = np.array(key[axis], int) if isinstance(key[axis], list) else key[axis]
        expected = expected[(slice(None),) * axis + (index,)]
    out = np.full(expected.shape, -1, values.dtype, order)
    # So that whatever takes more than a few bytes is read in blocks and pieces.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_BLOCK_NBYTES", block)
        patch.setattr(local, "_WORTH_SKIPPING", skip)
        np.testing.assert_array_equal(lazy[key], expected)
        lazy.read_into(out, key)
    np.testing.assert_array_equal(out, expected)


@given(st.integers(0, 40), st.data(), st.integers(1, 7))
def test_groups_of_an_entry(length: int, data: st.DataObject, size: int) -> None:
    (entry,) = normalize(
        data.draw(axis_keys(length).filter(lambda k: not isinstance(k, int))), [length]
    )
    chosen = list(positions(entry, length))
    cut = [list(positions(group, length)) for group in groups(entry, length, size)]
    assert [position for part in cut for position in part] == chosen
    assert all(len(part) <= size for part in cut)


def test_axes_that_are_read_one_by_one() -> None:
    every, index = slice(0, 100, 1), 5
    assert leading_axes((100, 1000), (every, index), 10) == 1
    assert leading_axes((100, 1000), (every, index), 2000) == 0
    assert leading_axes((100, 100, 1000), (every, slice(0, 2, 1), index), 10) == 2
    assert leading_axes((100, 100, 10), (every, slice(0, 2, 1), index), 30) == 1
    assert leading_axes((100, 1000), (index, every), 0) == 0


class Counted:
    """Counts the bytes that are read from files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not hasattr(os, "preadv"):
            pytest.skip("reads are counted at preadv")
        self.nbytes = self.calls = 0
        self.preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.read)

    def read(self, fileno: int, buffers: Any, offset: int) -> int:
        self.calls += 1
        count = self.preadv(fileno, buffers, offset)
        self.nbytes += count
        return count


MIB = 1 << 20
WIDE = (64, 1 << 18)  # rows of 1 MiB
NARROW = (1 << 18, 64)  # rows of 256 bytes


@pytest.mark.parametrize(
    ("shape", "key", "most_read", "most_memory"),
    [
        (WIDE, (slice(None), 5), 300, MIB),
        (WIDE, (slice(None), slice(5, 1029)), 64 * 4096, 2 * MIB),
        (WIDE, ([3, 50], slice(None)), 2 * MIB, 4.5 * MIB),
        (WIDE, (slice(None, None, 9), slice(None, None, 1 << 17)), 8 * MIB, 3 * MIB),
        (WIDE, (5, slice(None)), MIB, 1.5 * MIB),
        (NARROW, (slice(None), 5), 64 * MIB, 4 * MIB),
        (NARROW, (5, slice(None)), 256, MIB),
        ((8, 1 << 15, 64), (slice(None), 5, 7), 100, MIB),
        ((8, 1 << 15, 64), (slice(None), slice(None), 7), 64 * MIB, 4 * MIB),
        ((1 << 13, 8, 256), (slice(None), 2, slice(None)), 64 * MIB, 10 * MIB),
        ((256, 64, 1 << 10), (slice(None), 2, slice(0, 9)), 256 * 36, MIB),
    ],
)
def test_scattered_reads_are_close_to_the_selection(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: Any,
    key: Any,
    most_read: int,
    most_memory: float,
) -> None:
    values = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    lazy = array_in(tmp_path / "wide", values)
    expected = values[key].copy()
    counted = Counted(monkeypatch)
    tracemalloc.start()
    try:
        actual = lazy[key]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(actual, expected)
    assert counted.nbytes <= most_read
    assert peak <= most_memory


def test_conversion_needs_no_second_buffer(tmp_path: Path) -> None:
    codes = np.arange(16 * MIB // 2, dtype=np.uint16)
    lazy = array_in(tmp_path / "half", codes, dtype="bfloat16")
    tracemalloc.start()
    try:
        values = lazy[:]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(values.view(np.uint32), codes.astype(np.uint32) << 16)
    assert peak < values.nbytes + 8 * MIB


def test_an_error_of_the_system_names_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, "preadv"):
        pytest.skip("no preadv on this system")
    lazy = array_in(tmp_path / "m", np.arange(5))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=r"reading 40 bytes at 3 \(tensor 't'\): '.*m'") as caught:
        lazy[:]
    assert caught.value.errno == errno.EIO
