"""Sparse arrays as the parts of CSR and COO tensors.

Of a dask array the stored elements are counted first, which computes it once; then each of its
blocks of rows gives its share of every part. What is dense in memory, but was sparse in the file
it came from, becomes sparse again: all elements whose bits are not zero, -0.0 among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.dtypes import nbytes_of
from xckpt.errors import UnsupportedError
from xckpt.index import Part
from xckpt.writing.entries import ArrayPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.writing.entries import StoredPart

__all__ = ["as_parts", "densified", "is_sparse", "row_pointers", "sparse_parts"]

# What indices are made as; a format says what it wants.
_INDEX = "int64"


def is_sparse(array: Any) -> bool:
    """Return whether an array, or each chunk of a dask array, is one of pydata/sparse."""
    kind = type(getattr(array, "_meta", array))
    return kind.__module__.partition(".")[0] == "sparse"


def densified(array: Any) -> Any:
    """Return the values of a sparse array as a dense one, lazily if it is lazy."""
    if not is_sparse(array):
        return array
    if hasattr(array, "dask"):
        meta = np.empty((0,) * array.ndim, array.dtype)
        return array.map_blocks(_todense, dtype=array.dtype, meta=meta)
    return array.todense()


def _todense(block: Any) -> np.ndarray[Any, Any]:
    dense: np.ndarray[Any, Any] = block.todense() if is_sparse(block) else np.asarray(block)
    return dense


def sparse_parts(
    array: Any, layout: str, stored: str, name: str
) -> tuple[dict[str, Part], dict[str, StoredPart | ArrayPart]]:
    """Take a sparse array apart."""
    arrays = _of_dask(array, layout, name) if hasattr(array, "dask") else None
    if arrays is None:
        coords, values = _stored_elements(array, name)
        arrays = {"values": values, **_whole_indices(coords, layout, array.shape)}
    return as_parts(arrays, stored, name)


def as_parts(
    arrays: Mapping[str, Any], stored: str, name: str
) -> tuple[dict[str, Part], dict[str, StoredPart | ArrayPart]]:
    """Say of the arrays of a sparse tensor what is wanted of each part."""
    parts = {}
    for role, part in arrays.items():
        dtype = stored if role == "values" else _INDEX
        parts[role] = Part(dtype, part.shape, 0, nbytes_of(dtype, part.size))
    return parts, {role: ArrayPart(part, name) for role, part in arrays.items()}


def _stored_elements(block: Any, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return coordinates and values, sorted by position."""
    if not is_sparse(block):
        block = np.asarray(block)
        bits = np.ascontiguousarray(block).view(np.uint8)
        bits = bits.reshape(*block.shape, block.itemsize)
        where = np.nonzero(bits.any(axis=-1))
        return np.stack(where).astype(np.int64), block[where]
    import sparse

    coo = sparse.COO(block) if not isinstance(block, sparse.COO) else block
    if np.asarray(coo.fill_value).tobytes().strip(b"\0"):
        raise UnsupportedError(
            f"what the array does not store is {coo.fill_value}, but in a checkpoint it is zero",
            tensor=name,
            rule="LayoutData",
            hint="Save its dense values: array.todense()",
        )
    return np.asarray(coo.coords, np.int64), np.asarray(coo.data)


def _whole_indices(
    coords: np.ndarray[Any, Any], layout: str, shape: tuple[int, ...]
) -> dict[str, np.ndarray[Any, Any]]:
    if layout == "sparse_coo":
        return {"coords": coords}
    return {"indices": coords[1], "indptr": row_pointers(coords[0], shape[0])}


def row_pointers(rows: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Return where the elements of each row begin, and where the last ones end."""
    return np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))]).astype(np.int64)


def _of_dask(array: Any, layout: str, name: str) -> dict[str, Any]:
    """Make the parts of a dask array, block of rows by block of rows."""
    array = array.rechunk(dict.fromkeys(range(1, array.ndim), -1))
    blocks = _Blocks(array, name)
    ones = ((1,) * array.numblocks[0],)
    counts = blocks.part("count", ones, np.int64).compute().tolist()
    known = {
        "counts": counts,
        "starts": np.cumsum([0, *counts]).tolist(),
        "rows": np.cumsum([0, *array.chunks[0]]).tolist(),
    }
    along = (tuple(counts),)
    values = blocks.part("values", along, array.dtype, **known)
    if layout == "sparse_coo":
        coords = blocks.part("coords", ((array.ndim,), *along), np.int64, **known)
        return {"values": values, "coords": coords}
    first, *others = array.chunks[0]
    return {
        "values": values,
        "indices": blocks.part("indices", along, np.int64, **known),
        "indptr": blocks.part("indptr", ((first + 1, *others),), np.int64, **known),
    }


class _Blocks(NamedTuple):
    """A dask array that is chunked along its first axis only."""

    array: Any
    name: str

    def part(self, role: str, chunks: tuple[Any, ...], dtype: Any, **known: list[int]) -> Any:
        """Make an array of what each block gives for a part."""
        ndim = len(chunks)
        return self.array.map_blocks(
            _share,
            role=role,
            tensor=self.name,
            known=known,
            chunks=chunks,
            # The axis of the blocks stays, and is the last one.
            drop_axis=list(range(1, self.array.ndim)),
            new_axis=[0] if ndim == 2 else None,
            dtype=dtype,
            meta=np.empty((0,) * ndim, dtype),
        )


def _share(
    block: Any, *, role: str, tensor: str, known: dict[str, list[int]], block_id: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Return what a block of rows has of a part."""
    coords, values = _stored_elements(block, tensor)
    if role == "count":
        return np.array([len(values)], np.int64)
    number = block_id[-1]
    if len(values) != known["counts"][number]:
        raise UnsupportedError(
            "it was computed twice, and did not store as many elements both times",
            tensor=tensor,
            hint="Compute it first, or make it reproducible: a random generator needs a seed",
        )
    if role == "values":
        return values
    if role == "indices":
        indices: np.ndarray[Any, Any] = coords[1]
        return indices
    if role == "coords":
        first = coords[:1] + known["rows"][number]
        return np.concatenate([first, coords[1:]])
    pointers = row_pointers(coords[0], block.shape[0]) + known["starts"][number]
    return pointers if number == 0 else pointers[1:]
