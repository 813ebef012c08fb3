"""Selections of scattered elements in local files: bytes read and memory used."""

from __future__ import annotations

import errno
import os
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from tests.conftest import with_peak_memory
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader
from xckpt.index import Part
from xckpt.storage import open_source

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
        keys += [inside, st.lists(inside, max_size=12)]
    return st.one_of(keys)


# Arrays of less than a block, and of several, with gaps that are skipped, and those that are not.
LARGE_SHAPES = [
    *[(7, 200_000), (200_000, 7), (300, 4500), (3, 700, 640), (1200, 2, 600), (5, 40_000, 7)],
    (5, 4, 3, 20_000),
]
KEYED: list[tuple[st.SearchStrategy[tuple[int, ...]], int]] = [
    (array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6), 60),
    (st.sampled_from(LARGE_SHAPES), 150),
]


@pytest.mark.parametrize(("shapes", "examples"), KEYED, ids=["small", "large"])
def test_indexing_equals_numpy(
    tmp_path: Path, shapes: st.SearchStrategy[tuple[int, ...]], examples: int
) -> None:
    arrays: dict[Any, DenseArray] = {}

    @settings(max_examples=examples)
    @given(shapes, st.sampled_from("CF"), st.sampled_from(["little", "big"]), st.data())
    def check(shape: tuple[int, ...], order: Any, byteorder: Any, data: st.DataObject) -> None:
        values = np.arange(prod(shape), dtype="<u4").astype("<i2").reshape(shape)
        case = shape, order, byteorder
        if case not in arrays:
            stored = values.byteswap() if byteorder == "big" else values
            path = tmp_path / str(len(arrays))
            arrays[case] = array_in(path, stored, order, byteorder=byteorder)
        key = tuple(data.draw(axis_keys(length)) for length in shape)
        expected = values
        # Arrays act on their own axes each; from the last one, so that integers move none.
        for axis in reversed(range(len(shape))):
            index = np.array(key[axis], int) if isinstance(key[axis], list) else key[axis]
            expected = expected[(slice(None),) * axis + (index,)]
        out = np.full(expected.shape, -1, values.dtype, order)
        np.testing.assert_array_equal(arrays[case][key], expected)
        arrays[case].read_into(out, key)
        np.testing.assert_array_equal(out, expected)

    check()


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
    actual, peak = with_peak_memory(lambda: lazy[key])
    np.testing.assert_array_equal(actual, expected)
    assert counted.nbytes <= most_read
    assert peak <= most_memory


def test_conversion_needs_no_second_buffer(tmp_path: Path) -> None:
    codes = np.arange(16 * MIB // 2, dtype=np.uint16)
    lazy = array_in(tmp_path / "half", codes, dtype="bfloat16")
    values, peak = with_peak_memory(lambda: lazy[:])
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
