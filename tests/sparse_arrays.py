"""Sparse arrays over files in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from tests.sources import CountingSource
from xckpt.arrays.parts import PartReader
from xckpt.arrays.sparse import COOArray, CSCArray, CSRArray
from xckpt.index import Part, Tensor

U8 = np.dtype("<u8")


def tensor_of(
    layout: Any,
    shape: tuple[int, ...],
    arrays: dict[str, np.ndarray],
    *,
    strict: bool = False,
    compress: bool = False,
    sparse: bool = False,
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
    kinds: dict[str, Any] = {"sparse_csr": CSRArray, "sparse_csc": CSCArray, "sparse_coo": COOArray}
    return kinds[layout](tensor, readers, sparse=sparse)


def csr(dense: np.ndarray, **kwargs: bool) -> Any:
    """Store a matrix as CSR."""
    rows, cols = np.nonzero(dense)
    indptr = np.searchsorted(rows, np.arange(dense.shape[0] + 1)).astype(U8)
    parts = {"values": dense[rows, cols], "indices": cols.astype(U8), "indptr": indptr}
    return tensor_of("sparse_csr", dense.shape, parts, **kwargs)


def coo(dense: np.ndarray, *, shuffle: bool = False, **kwargs: bool) -> Any:
    """Store an array as COO, in any order."""
    coords = np.array(np.nonzero(dense)).astype(U8)
    if shuffle:
        coords = np.random.default_rng(0).permutation(coords, axis=1)
    parts = {"values": dense[tuple(coords.astype(int))], "coords": coords}
    return tensor_of("sparse_coo", dense.shape, parts, **kwargs)
