"""Sparse arrays as the parts of a tensor: coordinates or row pointers, and values.

A sparse dask array is computed once to count its stored elements, and again for the parts, in
blocks of rows. A dense array that was sparse in its old file becomes sparse again, with all
elements whose bits are not zero, such as -0.0. Elements without order, or with duplicates, are
sorted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.converted import is_sparse
from xckpt.arrays.sparse import COOArray, CSRArray, SparseArray
from xckpt.errors import FormatError, UnsupportedError, locating
from xckpt.formats.plan import WantedPart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.arrays.parts import PartReader
    from xckpt.index import Tensor
    from xckpt.typing import Array

# Element type of indices; formats convert it to their own.
_INDEX = "int64"

_ARRAYS = {"sparse_csr": CSRArray, "sparse_coo": COOArray}


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
    """Return the wanted parts, with the arrays of their values."""
    parts = {}
    for role, part in arrays.items():
        dtype = stored if role == "values" else _INDEX
        parts[role] = WantedPart.of(dtype, part.shape)
    return parts, arrays


def stored_elements(block: Any, name: str) -> tuple[Array, Array]:
    """Return coordinates and values, sorted by position."""
    if not is_sparse(block):
        block = np.asarray(block)
        bits = np.ascontiguousarray(block).view(np.uint8)
        bits = bits.reshape(*block.shape, block.itemsize)
        coords = np.nonzero(bits.any(axis=-1))
        return np.stack(coords).astype(np.int64), block[coords]
    import sparse

    coo = sparse.COO(block) if not isinstance(block, sparse.COO) else block
    if np.asarray(coo.fill_value).tobytes().strip(b"\0"):
        raise UnsupportedError(
            f"the fill value of the array is {coo.fill_value}, but in a checkpoint it is zero",
            tensor=name,
            rule="LayoutData",
            hint="Save its dense values: array.todense()",
        )
    return np.asarray(coo.coords, np.int64), np.asarray(coo.data)


def _row_pointers(rows: Array, count: int) -> Array:
    """Return the position of the first element of each row, and of the end of the last row."""
    return np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))]).astype(np.int64)


def _of_dask(array: Any, layout: str, name: str) -> dict[str, Any]:
    """Return the parts of a dask array, each computed by blocks of rows."""
    array = array.rechunk(dict.fromkeys(range(1, array.ndim), -1))

    def part(role: str, chunks: tuple[Any, ...], dtype: Any, **by_block: list[int]) -> Any:
        return array.map_blocks(
            _share,
            role=role,
            tensor=name,
            by_block=by_block,
            chunks=chunks,
            # The axis of the blocks stays, and is the last one.
            drop_axis=list(range(1, array.ndim)),
            new_axis=[0] if len(chunks) == 2 else None,
            dtype=dtype,
            meta=np.empty((0,) * len(chunks), dtype),
        )

    counts = part("count", ((1,) * array.numblocks[0],), np.int64).compute().tolist()
    by_block = {
        "counts": counts,
        "starts": np.cumsum([0, *counts]).tolist(),
        "rows": np.cumsum([0, *array.chunks[0]]).tolist(),
    }
    along = (tuple(counts),)
    values = part("values", along, array.dtype, **by_block)
    if layout == "sparse_coo":
        return {
            "values": values,
            "coords": part("coords", ((array.ndim,), *along), np.int64, **by_block),
        }
    first, *others = array.chunks[0]
    return {
        "values": values,
        "indices": part("indices", along, np.int64, **by_block),
        "indptr": part("indptr", ((first + 1, *others),), np.int64, **by_block),
    }


def _share(
    block: Any, *, role: str, tensor: str, by_block: dict[str, list[int]], block_id: tuple[int, ...]
) -> Array:
    """Return the share of a block of rows in a part."""
    coords, values = stored_elements(block, tensor)
    if role == "count":
        return np.array([len(values)], np.int64)
    block_row = block_id[-1]
    if len(values) != by_block["counts"][block_row]:
        raise UnsupportedError(
            "it was computed twice, and did not store as many elements both times",
            tensor=tensor,
            hint="Compute it first, or make it reproducible: a random generator needs a seed",
        )
    first = by_block["rows"][block_row] if role == "coords" else 0
    before = by_block["starts"][block_row]
    moved = [coords[0] + first, *coords[1:]]
    return _of_role(role, moved, values, block.shape[0], before, is_first=block_row == 0)


def _of_role(
    role: str,
    coords: Sequence[Array],
    values: Array,
    rows: int,
    before: int,
    *,
    is_first: bool,
) -> Array:
    """Return the share of elements of some rows in a part, with the number of elements before."""
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
        blocks = [(block.start, block.stop, len(block.values)) for block in lazy.blocks()]
    if lazy.reads_whole:
        blocks = [(0, lazy.shape[0], sum(count for _, _, count in blocks))]
    return _wanted(_sorted(lazy, blocks), tensor.parts["values"].dtype)


def _sorted(lazy: SparseArray, blocks: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Return dask arrays of the parts, which read the elements again by blocks of rows."""
    import dask
    import dask.array as da

    read = dask.delayed(_read_share, pure=False, traverse=False)
    pieces: dict[str, list[Any]] = {role: [] for role in lazy.readers}
    before = 0
    for start, stop, count in blocks:
        shapes = {"coords": (lazy.ndim, count), "indptr": (stop - start + (start == 0),)}
        for role, arrays in pieces.items():
            dtype = lazy.dtype if role == "values" else np.dtype(np.int64)
            task = read(lazy, role, start, stop, before)
            arrays.append(da.from_delayed(task, shapes.get(role, (count,)), dtype))
        before += count
    return {role: da.concatenate(arrays, axis=-1) for role, arrays in pieces.items()}


def _read_share(lazy: SparseArray, role: str, start: int, stop: int, before: int) -> Any:
    """Read the share of some rows in a part."""
    with locating(path=lazy.source.name, tensor=lazy.name):
        stored = lazy.stored(start, stop)
    coords = (stored.coords[0] - start,) if role == "indptr" else stored.coords
    return _of_role(role, coords, stored.values, stop - start, before, is_first=start == 0)
