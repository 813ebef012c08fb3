"""Tensors as they are in a file, with their stored bytes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.arrays.chunks import target_nbytes
from xckpt.arrays.sparse import COOArray, CSRArray
from xckpt.dtypes import nbytes_of
from xckpt.errors import FormatError
from xckpt.index import Part
from xckpt.writing.data import block_keys
from xckpt.writing.entries import Entry, StoredPart, lazy_dask_array
from xckpt.writing.sparse_parts import sparse_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.arrays.lazy import LazyArray
    from xckpt.arrays.parts import PartReader
    from xckpt.index import Tensor
    from xckpt.writing.entries import ArrayPart

__all__ = ["raw_nbytes", "stored_entry"]

_SPARSE = {"sparse_csr": CSRArray, "sparse_coo": COOArray}


def stored_entry(
    tensor: Tensor, readers: Mapping[str, PartReader], values: Callable[[], Any] | None = None
) -> Entry:
    """Make an entry of a tensor as it is in a file.

    Parameters
    ----------
    tensor : Tensor
        With its parts as they are stored.
    readers : mapping of str to PartReader
        Their bytes, by role.
    values : callable, optional
        Gives all values as a dense array.

    Returns
    -------
    Entry
        The same tensor.

    Raises
    ------
    CheckpointError
        If its values cannot be read, or a part of unknown size cannot be decoded.
    """
    if tensor.problem is not None:
        raise tensor.problem.located(tensor=tensor.name)
    if tensor.layout in _SPARSE and not tensor.strict and not _is_canonical(tensor, readers):
        return _canonical(tensor, readers, values)
    shapes = {role: _shape(tensor, role, readers) for role in tensor.parts}
    wanted = {role: _wanted(tensor.parts[role], shapes[role]) for role in tensor.parts}
    parts: dict[str, StoredPart | ArrayPart] = {
        role: StoredPart(
            readers[role], shapes[role], _order(tensor, role), tensor.strict, tensor.name
        )
        for role in tensor.parts
    }
    return Entry(replace(tensor, parts=wanted, strict=False), parts, values)


def raw_nbytes(tensor: Tensor, role: str, readers: Mapping[str, PartReader]) -> int:
    """Give the decoded size of a part of a tensor.

    Parameters
    ----------
    tensor : Tensor
        From an index.
    role : str
        Which part.
    readers : mapping of str to PartReader
        Of all parts.

    Returns
    -------
    int
        What its element type and shape say; where it has none, what it decodes to.

    Raises
    ------
    FormatError
        If it has to be decoded and cannot be.
    """
    return nbytes_of(tensor.parts[role].dtype, prod(_shape(tensor, role, readers)))


def _order(tensor: Tensor, role: str) -> str:
    return tensor.order if tensor.layout == "dense" and role == "data" else "C"


def _wanted(part: Part, shape: tuple[int, ...]) -> Part:
    algorithm = None if part.digest is None else part.digest.partition(":")[0]
    nbytes = nbytes_of(part.dtype, prod(shape))
    return Part(part.dtype, shape, 0, nbytes, part.encoding, digest=algorithm)


def _shape(tensor: Tensor, role: str, readers: Mapping[str, PartReader]) -> tuple[int, ...]:
    """Give the shape of a part; one that states none is decoded to count its elements."""
    part = tensor.parts[role]
    if tensor.layout == "dense" and role == "data":
        return tensor.shape
    if part.shape is not None:
        return part.shape
    size = nbytes_of(part.dtype, 1)
    lines = tensor.ndim if role == "coords" else 1
    limit = max(tensor.size * lines * size, 1024 * part.nbytes)
    nbytes = readers[role].count_nbytes(limit)
    count, left = divmod(nbytes, size * lines)
    if left:
        reason = f"part {role!r} decodes to {nbytes} bytes, which is no whole number of elements"
        raise FormatError(reason, tensor=tensor.name, offset=part.offset, rule="Encoding")
    return (lines, count) if role == "coords" else (count,)


def _sparse_array(tensor: Tensor, readers: Mapping[str, PartReader]) -> LazyArray:
    return _SPARSE[tensor.layout](tensor, readers, sparse=True)


def _is_canonical(tensor: Tensor, readers: Mapping[str, PartReader]) -> bool:
    """Tell whether a sparse tensor keeps to the rules of formats that have strict ones."""
    lazy = _sparse_array(replace(tensor, strict=True), readers)
    try:
        for key, _ in block_keys(lazy.shape, lazy.dtype.itemsize, target_nbytes()):
            lazy[key]
    except FormatError:
        return False
    return True


def _canonical(
    tensor: Tensor, readers: Mapping[str, PartReader], values: Callable[[], Any] | None
) -> Entry:
    """Sort the stored elements, and add up those that are given more than once."""
    array = lazy_dask_array(_sparse_array(tensor, readers))
    parts, data = sparse_parts(array, tensor.layout, tensor.parts["values"].dtype, tensor.name)
    return Entry(replace(tensor, parts=parts), data, values)
