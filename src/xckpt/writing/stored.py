"""Tensors as they are in a file, with their stored bytes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.parts import decoded_shape
from xckpt.arrays.sparse import COOArray, CSRArray
from xckpt.dtypes import nbytes_of
from xckpt.errors import FormatError, locating
from xckpt.index import Part
from xckpt.writing.entries import Entry, StoredPart
from xckpt.writing.sparse_parts import as_parts, row_pointers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xckpt.arrays.parts import PartReader
    from xckpt.arrays.sparse import SparseArray
    from xckpt.index import Tensor
    from xckpt.writing.entries import ArrayPart

__all__ = ["raw_nbytes", "stored_entry"]

_SPARSE = {"sparse_csr": CSRArray, "sparse_coo": COOArray}


def stored_entry(
    tensor: Tensor, readers: Mapping[str, PartReader], values: Callable[[], Any] | None = None
) -> Entry:
    """Make an entry of a tensor as it is in a file."""
    if tensor.problem is not None:
        raise tensor.problem.located(tensor=tensor.name)
    if tensor.layout in _SPARSE and not tensor.strict:
        entry = _canonical(tensor, readers, values)
        if entry is not None:
            return entry
    shapes = {role: decoded_shape(tensor, role, readers[role]) for role in tensor.parts}
    wanted = {role: _wanted(tensor.parts[role], shapes[role]) for role in tensor.parts}
    parts: dict[str, StoredPart | ArrayPart] = {
        role: StoredPart(
            readers[role], shapes[role], _order(tensor, role), tensor.strict, tensor.name
        )
        for role in tensor.parts
    }
    return Entry(replace(tensor, parts=wanted, strict=False), parts, values)


def raw_nbytes(tensor: Tensor, role: str, reader: PartReader) -> int:
    """Return the decoded size of a part, which is decoded to find out where nothing states it."""
    return nbytes_of(reader.part.dtype, prod(decoded_shape(tensor, role, reader)))


def _order(tensor: Tensor, role: str) -> str:
    return tensor.order if tensor.layout == "dense" and role == "data" else "C"


def _wanted(part: Part, shape: tuple[int, ...]) -> Part:
    algorithm = None if part.digest is None else part.digest.partition(":")[0]
    nbytes = nbytes_of(part.dtype, prod(shape))
    return Part(part.dtype, shape, part.offset, nbytes, part.encoding, digest=algorithm)


def _canonical(
    tensor: Tensor, readers: Mapping[str, PartReader], values: Callable[[], Any] | None
) -> Entry | None:
    """Make an entry of sorted and unique elements; None if they are stored like that already."""
    lazy: SparseArray = _SPARSE[tensor.layout](replace(tensor, strict=True), readers)
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
    parts, data = as_parts(_sorted(lazy, blocks), tensor.parts["values"].dtype, tensor.name)
    return Entry(replace(tensor, parts=parts), data, values)


def _sorted(lazy: SparseArray, blocks: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Make dask arrays of the parts, which read the elements again, block of rows by block."""
    import dask
    import dask.array as da

    read = dask.delayed(_stored_part, pure=False, traverse=False)
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


def _stored_part(lazy: SparseArray, role: str, start: int, stop: int, before: int) -> Any:
    """Read what some rows give to a part; so many elements are `before` them."""
    with locating(path=lazy.source.name, tensor=lazy.name):
        stored = lazy.stored(start, stop)
    if role == "values":
        return stored.values
    if role == "coords":
        return np.stack(stored.coords)
    if role == "indices":
        return stored.coords[1]
    pointers = row_pointers(stored.coords[0] - start, stop - start) + before
    return pointers if start == 0 else pointers[1:]
