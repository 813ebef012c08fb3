"""Sparse tensors equal their dense form, block by block, and invalid indices are errors."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import dask
import numpy as np
import pytest
import sparse
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.sources import CountingSource
from tests.sparse_arrays import U8, coo, csr, tensor_of
from xckpt.arrays.parts import PartReader
from xckpt.errors import FormatError, TooLargeError, UnsupportedError


def random_matrix(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Make an array of a few small numbers among zeros."""
    rng = np.random.default_rng(seed)
    return (rng.integers(-9, 9, shape) * (rng.random(shape) < 0.3)).astype("<f4")


@given(
    st.integers(0, 2**32),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_csr_equals_dense(
    seed: int, shape: tuple[int, int], compress: bool, strict: bool, data: st.DataObject
) -> None:
    dense = random_matrix(seed, shape)
    lazy = csr(dense, compress=compress, strict=strict)
    rows = data.draw(st.slices(shape[0]))
    np.testing.assert_array_equal(lazy[rows], dense[rows])
    np.testing.assert_array_equal(lazy[:, ::-1], dense[:, ::-1])
    lazy.sparse = True
    block = lazy[rows]
    assert isinstance(block, sparse.COO)
    np.testing.assert_array_equal(block.todense(), dense[rows])


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.data(),
)
def test_coo_equals_dense(
    seed: int, shape: tuple[int, ...], compress: bool, data: st.DataObject
) -> None:
    dense = random_matrix(seed, shape)
    lazy = coo(dense, compress=compress, strict=True)
    rows = data.draw(st.slices(shape[0]))
    np.testing.assert_array_equal(lazy[rows], dense[rows])
    lazy.sparse = True
    np.testing.assert_array_equal(lazy[rows].todense(), dense[rows])


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Draw an index: an integer, a slice or an array for each axis."""
    key: list[Any] = []
    for size in shape:
        indices: st.SearchStrategy[Any] = st.slices(size)
        if size:
            positions = st.lists(st.integers(-size, size - 1), max_size=4)
            indices |= st.integers(-size, size - 1) | positions.map(lambda p: np.array(p, int))
        key.append(draw(indices))
    return tuple(key)


def picked(dense: np.ndarray, key: tuple[Any, ...]) -> np.ndarray:
    """Apply each entry to its own axis."""
    for axis in range(dense.ndim - 1, -1, -1):
        dense = dense[(slice(None),) * axis + (key[axis],)]
    return dense


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.data(),
)
def test_any_selection_equals_that_of_the_dense_array(
    seed: int, shape: tuple[int, ...], compress: bool, data: st.DataObject
) -> None:
    dense = random_matrix(seed, shape)
    arrays = [coo(dense, compress=compress)]
    if len(shape) == 2:
        arrays.append(csr(dense, compress=compress))
    key = data.draw(keys(shape))
    expected = picked(dense, key)
    for lazy in arrays:
        for lazy.sparse in (False, True):
            values = lazy[key]
            if isinstance(values, sparse.COO):
                assert (np.diff(values.linear_loc()) > 0).all()
                values = values.todense()
            np.testing.assert_array_equal(values, expected)
            assert values.dtype == dense.dtype


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (300_000, 7), (3, 700_000), (2000, 1500), (600_000,)])
def test_the_blocks_of_stored_elements_make_up_the_array(
    shape: tuple[int, ...], compress: bool
) -> None:
    dense = random_matrix(0, shape)
    dense[len(dense) // 3 : len(dense) // 2] = 0  # and blocks without elements
    arrays = [coo(dense, compress=compress)]
    if len(shape) == 2:
        arrays.append(csr(dense, compress=compress))
    for lazy in arrays:
        blocks = list(lazy.blocks())
        assert [b.start for b in blocks] == [0, *(b.stop for b in blocks[:-1])]
        assert blocks[-1].stop == shape[0]
        coords = [np.concatenate(along) for along in zip(*(b.coords for b in blocks), strict=True)]
        np.testing.assert_array_equal(np.stack(coords), np.nonzero(dense))
        values = np.concatenate([b.values for b in blocks])
        np.testing.assert_array_equal(values, dense[dense != 0])
        # Sorted, a list of coordinates is one block; rows are at most 256 Ki elements, or one.
        if lazy is not arrays[0]:
            assert all(len(b.values) <= 1 << 18 or b.stop == b.start + 1 for b in blocks)


def test_a_csr_row_reads_only_its_elements() -> None:
    dense = np.eye(1000, dtype="<f8")
    lazy = csr(dense)
    np.testing.assert_array_equal(lazy[500], dense[500])
    # Two row pointers, the last one, one column index, one value.
    assert lazy.source.nbytes_read == 16 + 8 + 8 + 8


def test_repeated_elements_add_up_unless_forbidden() -> None:
    parts = {
        "values": np.array([1, 2, 4], "<f4"),
        "indices": np.array([2, 0, 2], U8),
        "indptr": np.array([0, 3], U8),
    }
    lazy = tensor_of("sparse_csr", (1, 3), parts)
    np.testing.assert_array_equal(lazy[:], [[2, 0, 5]])
    with pytest.raises(FormatError, match="increase"):
        tensor_of("sparse_csr", (1, 3), parts, strict=True)[:]
    coords = {"values": np.array([1, 2], "<f4"), "coords": np.array([[1, 1]], U8)}
    np.testing.assert_array_equal(tensor_of("sparse_coo", (2,), coords)[:], [0, 3])
    with pytest.raises(FormatError, match="more than once"):
        tensor_of("sparse_coo", (2,), coords, strict=True)[:]


@pytest.mark.parametrize("value", [3, 2**63, 2**64 - 1])
def test_indices_outside_their_axis(value: int) -> None:
    parts = {
        "values": np.ones(1, "<f4"),
        "indices": np.array([value], U8),
        "indptr": np.array([0, 1], U8),
    }
    with pytest.raises(FormatError, match=f"index {value} in 'indices'"):
        tensor_of("sparse_csr", (1, 3), parts)[:]
    coords = {"values": np.ones(1, "<f4"), "coords": np.array([[0], [value]], U8)}
    with pytest.raises(FormatError, match=f"index {value} in 'coords'"):
        tensor_of("sparse_coo", (1, 3), coords)[:]


def test_signed_indices_below_zero() -> None:
    parts = {
        "values": np.ones(1, "<f4"),
        "indices": np.array([-1], "<i4"),
        "indptr": np.array([0, 1], "<i4"),
    }
    with pytest.raises(FormatError, match="index -1"):
        tensor_of("sparse_csr", (1, 3), parts)[:]


@pytest.mark.parametrize(
    ("indptr", "reason"),
    [
        ([1, 1, 2], "first row pointer is 1"),
        ([0, 2, 1], "last row pointer is 1"),
        ([0, 3, 2], "decrease"),
        ([0, 1, 9], "last row pointer is 9"),
        ([0, 2**63, 2], "decrease"),
    ],
)
def test_invalid_row_pointers(indptr: list[int], reason: str) -> None:
    parts = {
        "values": np.ones(2, "<f4"),
        "indices": np.zeros(2, U8),
        "indptr": np.array(indptr, U8),
    }
    with pytest.raises(FormatError, match=reason):
        tensor_of("sparse_csr", (2, 3), parts)[:]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_matrices_without_elements_are_checked(shape: tuple[int, int]) -> None:
    parts = {"values": np.ones(0, "<f4"), "indices": np.zeros(0, U8)}
    for layout, count in (("sparse_csr", shape[0]), ("sparse_csc", shape[1])):
        lazy = tensor_of(layout, shape, parts | {"indptr": np.zeros(count + 1, U8)})
        assert lazy[:].shape == shape
    pointers = np.zeros(shape[0] + 1, U8)
    pointers[-1] = 2**60
    with pytest.raises(FormatError, match="row pointer is 1152921504606846976"):
        tensor_of("sparse_csr", shape, parts | {"indptr": pointers})[:]


def test_a_hostile_last_row_pointer_allocates_nothing() -> None:
    parts = {
        "values": np.ones(1, "<f4"),
        "indices": np.zeros(1, U8),
        "indptr": np.array([0, 2**60], U8),
    }
    with pytest.raises(FormatError, match="more than the matrix has elements"):
        tensor_of("sparse_csr", (1, 3), parts, compress=True)[:]


def test_a_shape_beyond_memory_raises_without_a_hang() -> None:
    parts = {"values": np.ones(1, "<f4"), "coords": np.zeros((2, 1), U8)}
    lazy = tensor_of("sparse_coo", (1 << 62, 1 << 62), parts)
    assert lazy.chunks(1 << 27)
    with pytest.raises(UnsupportedError, match="too many"):
        lazy[0]


HUGE = {"values": np.array([1.5], "<f4"), "coords": np.array([[0], [7]], U8)}
LONG = {"values": HUGE["values"], "indices": np.array([7], U8), "indptr": np.array([0, 1, 1], U8)}


def huge(**options: Any) -> list[Any]:
    """Make tensors of a shape that no memory holds, with one element stored."""
    return [
        tensor_of("sparse_coo", (1 << 30, 1 << 30), HUGE, **options),
        tensor_of("sparse_csr", (2, 1 << 40), LONG, **options),
    ]


@pytest.mark.parametrize("compress", [False, True])
def test_columns_are_selected_before_rows_are_allocated(compress: bool) -> None:
    with dask.config.set({"xckpt.memory-limit": "1 MiB"}):
        for lazy in huge(compress=compress):
            np.testing.assert_array_equal(lazy[0:1, 6:9], [[0, 1.5, 0]])
            np.testing.assert_array_equal(lazy[0, 9:5:-1], [0, 0, 1.5, 0])
            np.testing.assert_array_equal(lazy[[1, 0], [7, 8, 7]], [[0, 0, 0], [1.5, 0, 1.5]])
            assert lazy[0, 7] == 1.5
            assert lazy[1, -1] == 0


def test_tensors_larger_than_memory_are_refused_with_a_remedy() -> None:
    for lazy in huge():
        with pytest.raises(TooLargeError, match=r"^memory: tensor 't': \d+ bytes \(.*B\) of"):
            lazy[...]
        with (
            dask.config.set({"xckpt.memory-limit": "1 MiB"}),
            pytest.raises(MemoryError, match=r"sparse=True.*xckpt\.memory-limit"),
        ):
            lazy[0:2]
    assert huge(sparse=True)[0][...].nnz == 1


@pytest.mark.parametrize("shape", [(1 << 30, 1 << 30), (1, 1 << 60), (1 << 60, 1), (1 << 40,)])
def test_a_shape_is_cut_into_few_chunks(shape: tuple[int, ...]) -> None:
    coords = np.zeros((len(shape), 1), U8)
    lazy = tensor_of("sparse_coo", shape, {"values": HUGE["values"], "coords": coords})
    assert prod(map(len, lazy.chunks(1 << 27))) <= 1024
    # Real tensors have the chunks that they would have if they were dense.
    lazy = tensor_of("sparse_coo", (100, 1000), {**HUGE, "coords": coords[:2].repeat(2, 0)[:2]})
    assert lazy.chunks(40_000) == ((10,) * 10, (1000,))


def test_a_list_of_coordinates_is_read_and_sorted_once_for_all_chunks() -> None:
    rng = np.random.default_rng(0)
    dense = (rng.random((500, 20)) < 0.2).astype("<f4")
    coords = rng.permutation(np.argwhere(dense)).T.astype(U8)
    parts = {"values": dense[tuple(coords.astype(int))], "coords": coords}
    for compress in (False, True):
        lazy = tensor_of("sparse_coo", dense.shape, parts, compress=compress)
        values = [lazy[row : row + 5] for row in range(0, 500, 5)]
        np.testing.assert_array_equal(np.concatenate(values), dense)
        # Compressed parts also have headers that are looked at.
        assert lazy.source.nbytes_read <= 2 * lazy.source.size


def test_rows_compressed_together_are_decoded_once_for_all_chunks() -> None:
    dense = random_matrix(3, (400, 30))
    lazy = csr(dense, compress=True)
    values = [lazy[row : row + 4] for row in range(0, 400, 4)]
    np.testing.assert_array_equal(np.concatenate(values), dense)
    assert lazy.source.nbytes_read <= 3 * lazy.source.size


def test_a_selection_does_not_change_the_cache() -> None:
    lazy = coo(random_matrix(5, (6, 6)), sparse=True)
    before = lazy[...].todense()
    lazy[...].data[:] = 99
    np.testing.assert_array_equal(lazy[...].todense(), before)


def test_large_tensors_are_not_kept() -> None:
    count = 15 << 20  # of nine bytes: more than 128 MiB
    coords = np.arange(count, dtype=U8)[None]
    lazy = tensor_of("sparse_coo", (count,), {"values": np.ones(count, "u1"), "coords": coords})
    for _ in range(2):
        np.testing.assert_array_equal(lazy[3:9], np.ones(6))
    assert lazy.source.nbytes_read == 2 * lazy.source.size
    # A chunk is at least as large as the bytes that are read for it.
    assert lazy.chunks(1 << 20) == ((count,),)


def test_positions_beyond_64_bits() -> None:
    coords = np.array([[9, 1 << 61, 9, 0], [1 << 61, 3, 1 << 61, 5]], U8)
    parts = {"values": np.array([1, 2, 4, 8], "<f4"), "coords": coords}
    lazy = tensor_of("sparse_coo", (1 << 62, 1 << 62), parts)
    (block,) = lazy.blocks()
    assert block.values.tolist() == [8, 5, 2]
    assert block.coords[0].tolist() == [0, 9, 1 << 61]
    assert lazy[9, 1 << 61] == 5
    with pytest.raises(FormatError, match="more than once"):
        next(tensor_of("sparse_coo", (1 << 62, 1 << 62), parts, strict=True).blocks())


def test_any_number_of_axes() -> None:
    shape = (2,) * 50
    coords = np.ones((50, 1), U8)
    lazy = tensor_of("sparse_coo", shape, {"values": HUGE["values"], "coords": coords})
    assert lazy[(1,) * 50] == 1.5
    assert lazy[(1,) * 48].tolist() == [[0, 0], [0, 1.5]]


def test_running_out_of_memory_is_a_package_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = csr(np.eye(3, dtype="<f4"))

    def zeros(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(np, "zeros", zeros)
    with pytest.raises(TooLargeError, match=r"^memory: tensor 't': memory ran out: no more"):
        lazy[:]


def test_stored_elements_that_do_not_fit_in_memory() -> None:
    dense = np.ones((1, 1 << 19), "<f4")
    with dask.config.set({"xckpt.memory-limit": "16 MiB"}):
        for lazy in (csr(dense), coo(dense), csr(dense, compress=True), coo(dense, compress=True)):
            with pytest.raises(TooLargeError, match="have to be in memory together"):
                list(lazy.blocks())
        # Row by row there is room.
        rows = csr(np.ones((128, 1 << 12), "<f4"))
        assert sum(len(block.values) for block in rows.blocks()) == 1 << 19


@pytest.mark.parametrize("kind", ["short indptr", "short values", "long indices", "corrupt"])
def test_blocks_of_compressed_rows_that_are_damaged(kind: str) -> None:
    lazy = csr(random_matrix(7, (40, 40)), compress=True)
    role = {"short indptr": "indptr", "long indices": "indices"}.get(kind, "values")
    part = lazy.readers[role].part
    stored = lazy.source.data[part.offset : part.offset + part.nbytes]
    data = zstandard.decompress(stored)
    data = data[:-8] if kind.startswith("short") else data + bytes(8)
    stored = b"no zstd" if kind == "corrupt" else zstandard.compress(data)
    source = CountingSource(lazy.source.data + stored)
    damaged = replace(part, offset=lazy.source.size, nbytes=len(stored))
    lazy.readers[role] = PartReader(source, damaged)
    with pytest.raises(FormatError) as caught:
        list(lazy.blocks())
    assert caught.value.offset == damaged.offset
