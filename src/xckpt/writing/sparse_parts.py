"""Sparse arrays as the parts of CSR and COO tensors.

Of a dask array the stored elements are counted first, which computes it once; then each of its
blocks of rows gives its share of every part. What is dense in memory, but was sparse in the file
it came from, becomes sparse again: all elements whose bits are not zero, -0.0 among them. What a
file has in any order, and perhaps twice, is sorted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.sparse import COOArray, CSRArray
from xckpt.errors import FormatError, UnsupportedError, locating
from xckpt.formats.plan import WantedPart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.arrays.parts import PartReader
    from xckpt.arrays.sparse import SparseArray
    from xckpt.index import Tensor

__all__ = ["canonical_parts", "densified", "is_sparse", "sparse_parts", "stored_elements"]

# What indices are made as; a format says what it wants.
_INDEX = "int64"

_ARRAYS = {"sparse_csr": CSRArray, "sparse_coo": COOArray}


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
        return array.map_blocks(densified, dtype=array.dtype, meta=meta)
    return array.todense()


def sparse_parts(
    array: Any, layout: str, stored: str, name: str
) -> tuple[dict[str, WantedPart], dict[str, Any]]:
    """Take a sparse array apart, with the values as the element type `stored`."""
    if hasattr(array, "dask"):
        return _wanted(_of_dask(array, layout, name), stored)
    coords, values = stored_elements(array, name)
    if layout == "sparse_coo":
        return _wanted({"values": values, "coords": coords}, stored)
    pointers = _row_pointers(coords[0], array.shape[0])
    return _wanted({"values": values, "indices": coords[1], "indptr": pointers}, stored)


def _wanted(arrays: dict[str, Any], stored: str) -> tuple[dict[str, WantedPart], dict[str, Any]]:
    """Say what is wanted of each part."""
    parts = {}
    for role, part in arrays.items():
        dtype = stored if role == "values" else _INDEX
        parts[role] = WantedPart.of(dtype, part.shape)
    return parts, arrays


def stored_elements(block: Any, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
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


def _row_pointers(rows: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Return where the elements of each row begin, and where the last ones end."""
    return np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))]).astype(np.int64)


def _of_dask(array: Any, layout: str, name: str) -> dict[str, Any]:
    """Make the parts of a dask array, block of rows by block of rows."""
    array = array.rechunk(dict.fromkeys(range(1, array.ndim), -1))

    def part(role: str, chunks: tuple[Any, ...], dtype: Any, **known: list[int]) -> Any:
        return array.map_blocks(
            _share,
            role=role,
            tensor=name,
            known=known,
            chunks=chunks,
            # The axis of the blocks stays, and is the last one.
            drop_axis=list(range(1, array.ndim)),
            new_axis=[0] if len(chunks) == 2 else None,
            dtype=dtype,
            meta=np.empty((0,) * len(chunks), dtype),
        )

    counts = part("count", ((1,) * array.numblocks[0],), np.int64).compute().tolist()
    known = {
        "counts": counts,
        "starts": np.cumsum([0, *counts]).tolist(),
        "rows": np.cumsum([0, *array.chunks[0]]).tolist(),
    }
    along = (tuple(counts),)
    values = part("values", along, array.dtype, **known)
    if layout == "sparse_coo":
        return {
            "values": values,
            "coords": part("coords", ((array.ndim,), *along), np.int64, **known),
        }
    first, *others = array.chunks[0]
    return {
        "values": values,
        "indices": part("indices", along, np.int64, **known),
        "indptr": part("indptr", ((first + 1, *others),), np.int64, **known),
    }


def _share(
    block: Any, *, role: str, tensor: str, known: dict[str, list[int]], block_id: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Return what a block of rows has of a part."""
    coords, values = stored_elements(block, tensor)
    if role == "count":
        return np.array([len(values)], np.int64)
    number = block_id[-1]
    if len(values) != known["counts"][number]:
        raise UnsupportedError(
            "it was computed twice, and did not store as many elements both times",
            tensor=tensor,
            hint="Compute it first, or make it reproducible: a random generator needs a seed",
        )
    first = known["rows"][number] if role == "coords" else 0
    before = known["starts"][number]
    moved = [coords[0] + first, *coords[1:]]
    return _of_role(role, moved, values, block.shape[0], before, is_first=number == 0)


def _of_role(
    role: str,
    coords: Sequence[np.ndarray[Any, Any]],
    values: np.ndarray[Any, Any],
    rows: int,
    before: int,
    *,
    is_first: bool,
) -> np.ndarray[Any, Any]:
    """Return what the elements of some rows are in a part; so many elements are `before` them."""
    if role == "values":
        return values
    if role == "coords":
        return np.asarray(coords)
    if role == "indices":
        return coords[1]
    pointers = _row_pointers(coords[0], rows) + before
    return pointers if is_first else pointers[1:]


def canonical_parts(
    tensor: Tensor, readers: Mapping[str, PartReader]
) -> tuple[dict[str, WantedPart], dict[str, Any]] | None:
    """Sort the elements of a tensor of a file; None if it is not sparse, or they are sorted."""
    if tensor.layout not in _ARRAYS or tensor.strict:
        return None
    lazy: SparseArray = _ARRAYS[tensor.layout](replace(tensor, strict=True), readers)
    with locating(path=lazy.source.name, tensor=tensor.name):
        try:
            for _ in lazy.blocks():
                pass
        except FormatError:
            lazy.strict = False
        else:
            return None
        blocks = [(each.start, each.stop, len(each.values)) for each in lazy.blocks()]
    if lazy.reads_whole:
        blocks = [(0, lazy.shape[0], sum(count for _, _, count in blocks))]
    return _wanted(_sorted(lazy, blocks), tensor.parts["values"].dtype)


def _sorted(lazy: SparseArray, blocks: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Make dask arrays of the parts, which read the elements again, block of rows by block."""
    import dask
    import dask.array as da

    read = dask.delayed(_read_share, pure=False, traverse=False)
    pieces: dict[str, list[Any]] = {role: [] for role in lazy.readers}
    before = 0
    for start, stop, count in blocks:
        shapes = {"coords": (lazy.ndim, count), "indptr": (stop - start + (start == 0),)}
        for role, each in pieces.items():
            dtype = lazy.dtype if role == "values" else np.dtype(np.int64)
            task = read(lazy, role, start, stop, before)
            each.append(da.from_delayed(task, shapes.get(role, (count,)), dtype))
        before += count
    return {role: da.concatenate(each, axis=-1) for role, each in pieces.items()}


def _read_share(lazy: SparseArray, role: str, start: int, stop: int, before: int) -> Any:
    """Read what some rows give to a part."""
    with locating(path=lazy.source.name, tensor=lazy.name):
        stored = lazy.stored(start, stop)
    coords = (stored.coords[0] - start,) if role == "indptr" else stored.coords
    return _of_role(role, coords, stored.values, stop - start, before, is_first=start == 0)
