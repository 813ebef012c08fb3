"""Arrays: from the parts of a tensor to lazy arrays, and from these to dask arrays.

`lazy_arrays` says which arrays a tensor is shown as; `xckpt.arrays.graph` makes them dask arrays
(kept apart: it imports dask).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.lazy import LazyArray, UnreadableArray
from xckpt.arrays.parts import PartReader
from xckpt.arrays.quantized import QuantizedArray
from xckpt.arrays.sparse import COOArray, CSRArray
from xckpt.dtypes import ELEMENT_TYPES, decoded_dtype, nbytes_of
from xckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Tensor
    from xckpt.storage import Source

__all__ = ["LazyArray", "ReadOptions", "lazy_arrays"]


# What a variable of an element type that is not known is shown with; its values cannot be had.
_UNKNOWN = np.dtype("V1")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How values are to be read.

    Parameters
    ----------
    decode : bool
        Give types that numpy computes well with and composite tensors as a whole, or the stored
        types and the parts.
    sparse : bool
        Give sparse tensors as `sparse.COO` chunks instead of dense ones.
    verify : bool or None
        When digests are checked; see `PartReader`.
    """

    decode: bool = True
    sparse: bool = False
    verify: bool | None = None


def lazy_arrays(
    tensor: Tensor, sources: Mapping[str | None, Source], options: ReadOptions
) -> dict[str | None, LazyArray]:
    """Give the arrays that a tensor is shown as.

    Parameters
    ----------
    tensor : Tensor
        From an index.
    sources : mapping of (str or None) to Source
        The file under None, its shards under their names.
    options : ReadOptions
        How to read values.

    Returns
    -------
    dict of (str or None) to LazyArray
        One array under None where the tensor is shown as a whole, else one for each part under
        its role.
    """
    if tensor.problem is not None:
        dtype = decoded_dtype(tensor.dtype) if tensor.dtype in ELEMENT_TYPES else _UNKNOWN
        problem = tensor.problem
        return {None: UnreadableArray(tensor.name, sources[None], tensor.shape, dtype, problem)}
    readers = {
        role: PartReader(sources[part.shard], part, options.verify)
        for role, part in tensor.parts.items()
    }
    if tensor.layout == "dense":
        return {None: _dense(tensor, readers["data"], options)}
    if tensor.layout == "structural" or not options.decode:
        return {role: _part(tensor, role, readers) for role in tensor.parts}
    if tensor.layout == "sparse_csr":
        return {None: CSRArray(tensor, readers, sparse=options.sparse)}
    if tensor.layout == "sparse_coo":
        return {None: COOArray(tensor, readers, sparse=options.sparse)}
    return {None: QuantizedArray(tensor, readers)}


def _dense(tensor: Tensor, reader: PartReader, options: ReadOptions) -> DenseArray:
    return DenseArray(
        tensor.name,
        reader,
        tensor.shape,
        order=tensor.order,
        decode=options.decode,
        strict=tensor.strict,
    )


def _part(tensor: Tensor, role: str, readers: Mapping[str, PartReader]) -> DenseArray:
    reader = readers[role]
    shape = reader.part.shape
    if shape is None:
        shape = _decoded_shape(tensor, role, readers)
    return DenseArray(tensor.name, reader, shape, decode=False, strict=tensor.strict)


def _decoded_shape(tensor: Tensor, role: str, readers: Mapping[str, PartReader]) -> tuple[int, ...]:
    """Find the shape of a compressed part that states none, by decoding what tells it.

    Only sparse and structural tensors have such parts. It reads while opening, which nothing else
    does; sparse ones need it only where their parts are asked for (``decode=False``).
    """
    part = readers[role].part
    size = nbytes_of(part.dtype, 1)
    lines = tensor.ndim if role == "coords" else 1
    # A sparse tensor has at most as many stored elements as it has positions. Of a structural one
    # nothing is known; real data do not compress a thousandfold.
    limit = max(tensor.size * lines * size, 1024 * part.nbytes)
    nbytes = readers[role].count_nbytes(limit)
    count, left = divmod(nbytes, size * lines)
    if left:
        raise FormatError(
            f"part {role!r} decodes to {nbytes} bytes, which is not a whole number of elements",
            path=readers[role].source.name,
            tensor=tensor.name,
            offset=part.offset,
            rule="Encoding",
        )
    return (lines, count) if role == "coords" else (count,)
