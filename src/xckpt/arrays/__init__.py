"""Arrays: from the parts of a tensor to lazy arrays, and from these to dask arrays.

`lazy_arrays` says which arrays a tensor is shown as; `xckpt.arrays.graph` makes them dask arrays
(kept apart: it imports dask).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.chunked import ChunkedArray
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.lazy import LazyArray, UnreadableArray
from xckpt.arrays.parts import PartReader, decoded_shape
from xckpt.arrays.quantized import quantized_array
from xckpt.arrays.sparse import COOArray, CSCArray, CSRArray
from xckpt.elements import BLOCK_TYPES, ELEMENT_TYPES, decoded_dtype, stored_dtype
from xckpt.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Tensor
    from xckpt.storage import Source

__all__ = ["LazyArray", "ReadOptions", "lazy_arrays"]


# What a variable of an element type that is not known is shown with; its values cannot be had.
_UNKNOWN = np.dtype("V1")
# Decoded at most, while opening, of a part whose size neither the file nor its zstd frames state.
_COUNTED_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How values are to be read."""

    # Whether to return types that numpy computes well with and composite tensors as a whole, or the
    # stored types and the parts.
    decode: bool = True
    # Return sparse tensors as `sparse.COO` chunks instead of dense ones.
    sparse: bool = False
    # When digests are checked; see `PartReader`.
    verify: bool | None = None


def lazy_arrays(
    tensor: Tensor, sources: Mapping[str | None, Source], options: ReadOptions
) -> dict[str | None, LazyArray]:
    """Return the arrays that a tensor is shown as."""
    arrays = _arrays(tensor, sources, options)
    return {role: lazy.of(tensor, role) for role, lazy in arrays.items()}


def _arrays(
    tensor: Tensor, sources: Mapping[str | None, Source], options: ReadOptions
) -> dict[str | None, LazyArray]:
    if tensor.problem is not None:
        dtype = np.dtype(np.float32) if tensor.dtype in BLOCK_TYPES else _UNKNOWN
        dtype = decoded_dtype(tensor.dtype) if tensor.dtype in ELEMENT_TYPES else dtype
        problem = tensor.problem
        return {None: UnreadableArray(tensor.name, sources[None], tensor.shape, dtype, problem)}
    readers = {
        role: PartReader(sources[part.shard], part, options.verify)
        for role, part in tensor.parts.items()
    }
    if tensor.layout == "dense":
        how: dict[str, Any] = {"decode": options.decode, "strict": tensor.strict}
        data = readers["data"]
        return {None: DenseArray(tensor.name, data, tensor.shape, order=tensor.order, **how)}
    if tensor.layout == "chunked":
        return {None: ChunkedArray(tensor, readers, decode=options.decode)}
    if tensor.layout == "structural" or not options.decode:
        return {role: _part(tensor, role, readers) for role in tensor.parts}
    if tensor.layout == "blocks":
        return {None: BlockArray(tensor.name, readers["data"], tensor.shape, tensor.dtype)}
    if tensor.layout == "sparse_csr":
        return {None: CSRArray(tensor, readers, sparse=options.sparse)}
    if tensor.layout == "sparse_csc":
        return {None: CSCArray(tensor, readers, sparse=options.sparse)}
    if tensor.layout == "sparse_coo":
        return {None: COOArray(tensor, readers, sparse=options.sparse)}
    return {None: quantized_array(tensor, readers)}


def _part(tensor: Tensor, role: str, readers: Mapping[str, PartReader]) -> LazyArray:
    """Return a part as an array; one whose length cannot be found out is listed, and not read."""
    reader = readers[role]
    try:
        shape = decoded_shape(tensor, role, reader, _COUNTED_NBYTES)
    except CheckpointError as problem:
        dtype = stored_dtype(reader.part.dtype)
        located = problem.with_traceback(None).located(path=reader.source.name, tensor=tensor.name)
        return UnreadableArray(tensor.name, reader.source, (reader.part.nbytes,), dtype, located)
    return DenseArray(tensor.name, reader, shape, decode=False, strict=tensor.strict)
