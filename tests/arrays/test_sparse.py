"""Sparse tensors equal their dense form, block by block; bad indices never get through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sparse
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.sources import CountingSource
from xckpt.arrays.parts import PartReader
from xckpt.arrays.sparse import COOArray, CSRArray
from xckpt.errors import FormatError, UnsupportedError
from xckpt.index import Part, Tensor

U8 = np.dtype("<u8")


def tensor_of(
    layout: Any,
    shape: tuple[int, ...],
    arrays: dict[str, np.ndarray],
    *,
    strict: bool = False,
    compress: bool = False,
) -> Any:
    """Make a sparse array over a file that holds these parts one after the other."""
    parts, data = {}, b""
    for role, array in arrays.items():
        payload = array.tobytes()
        stored = zstandard.compress(payload) if compress else payload
        parts[role] = Part(
            array.dtype.name,
            None if compress and role != "indptr" else array.shape,
            len(data),
            len(stored),
            "zstd" if compress else None,
        )
        data += stored
    dtype = arrays["values"].dtype.name
    tensor = Tensor("t", dtype, shape, parts, layout=layout, strict=strict)
    source = CountingSource(data)
    readers = {role: PartReader(source, part) for role, part in parts.items()}
    kind = CSRArray if layout == "sparse_csr" else COOArray
    return kind(tensor, readers)


def csr(dense: np.ndarray, **kwargs: bool) -> Any:
    """Store a matrix as CSR."""
    rows, cols = np.nonzero(dense)
    indptr = np.searchsorted(rows, np.arange(dense.shape[0] + 1)).astype(U8)
    parts = {"values": dense[rows, cols], "indices": cols.astype(U8), "indptr": indptr}
    return tensor_of("sparse_csr", dense.shape, parts, **kwargs)


def coo(dense: np.ndarray, **kwargs: bool) -> Any:
    """Store an array as COO."""
    coords = np.array(np.nonzero(dense)).astype(U8)
    parts = {"values": dense[tuple(coords.astype(int))], "coords": coords}
    return tensor_of("sparse_coo", dense.shape, parts, **kwargs)


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


def test_a_row_of_csr_reads_its_own_elements() -> None:
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
def test_row_pointers_that_make_no_sense(indptr: list[int], reason: str) -> None:
    parts = {
        "values": np.ones(2, "<f4"),
        "indices": np.zeros(2, U8),
        "indptr": np.array(indptr, U8),
    }
    with pytest.raises(FormatError, match=reason):
        tensor_of("sparse_csr", (2, 3), parts)[:]


def test_a_hostile_last_row_pointer_allocates_nothing() -> None:
    parts = {
        "values": np.ones(1, "<f4"),
        "indices": np.zeros(1, U8),
        "indptr": np.array([0, 2**60], U8),
    }
    with pytest.raises(FormatError, match="more than the matrix has elements"):
        tensor_of("sparse_csr", (1, 3), parts, compress=True)[:]


def test_a_shape_that_no_memory_holds_is_an_error_not_a_hang() -> None:
    parts = {"values": np.ones(1, "<f4"), "coords": np.zeros((2, 1), U8)}
    lazy = tensor_of("sparse_coo", (1 << 62, 1 << 62), parts)
    assert lazy.chunks(1 << 27)
    with pytest.raises(UnsupportedError, match="too many"):
        lazy[0]
