"""Records: what a checkpoint says of a tensor, and what can be said of it at all."""

from __future__ import annotations

from math import prod
from struct import Struct, pack
from typing import TYPE_CHECKING, NamedTuple

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import FormatError, shown
from xckpt.formats.kit import is_oversized
from xckpt.formats.mlcp.cursor import written_string

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.formats.mlcp.cursor import NetCursor

__all__ = [
    "DATA_TYPES",
    "MOST_AXES",
    "Record",
    "check_shape",
    "read_block",
    "same_tensors",
    "size_error",
    "written_block",
]

#: In the order of their numbers in metadata.
DATA_TYPES = {
    "Float16": "float16",
    "Float32": "float32",
    "Float64": "float64",
    "Int8": "int8",
    "Int16": "int16",
    "Int32": "int32",
    "Int64": "int64",
    "UInt8": "uint8",
    "UInt16": "uint16",
    "UInt32": "uint32",
    "UInt64": "uint64",
    "Bool": "bool",
    "BFloat16": "bfloat16",
}
#: numpy's.
MOST_AXES = 64

_SPELLED = {dtype: name for name, dtype in DATA_TYPES.items()}
_NBYTES = {name: ELEMENT_TYPES[name].bits // 8 for name in DATA_TYPES.values()}
_EXTENTS_AND_SIZE = [Struct(f"<{axes + 1}q") for axes in range(MOST_AXES + 1)]
_SMALLEST_RECORD = 17


class Record(NamedTuple):
    """What a checkpoint says of a tensor.

    Parameters
    ----------
    name : str
        Its name, unique in its shard.
    dtype : str
        Element type, a key of `xckpt.elements.ELEMENT_TYPES`.
    shape : tuple of int
        Its shape.
    nbytes : int
        Size of its data, which need not be what the shape makes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def expected(self) -> int:
        """Size of the data that the shape makes."""
        return prod(self.shape) * _NBYTES[self.dtype]

    @property
    def fits(self) -> bool:
        """Whether the size is that."""
        return self.nbytes == prod(self.shape) * _NBYTES[self.dtype]


def read_block(cursor: NetCursor, *, inline: bool = False) -> tuple[list[Record], list[int]]:
    """Read the records of a shard."""
    records: dict[str, Record] = {}
    offsets = []
    for _ in range(cursor.count("the records of a shard", _SMALLEST_RECORD)):
        at = cursor.at
        record = _read_record(cursor)
        name = record.name
        if name in records:
            reason = "another tensor of this shard has this name"
            raise FormatError(reason, offset=at, tensor=name, rule="DuplicateName")
        records[name] = record
        if inline:
            if not record.fits:
                raise size_error(record)
            offsets.append(cursor.at)
            cursor.skip(record.nbytes, "data")
    return list(records.values()), offsets


def _read_record(cursor: NetCursor) -> Record:
    name = cursor.text(cursor.count("the name of a tensor"), "the name of a tensor")
    at = cursor.at
    try:
        dtype = _read_dtype(cursor)
        at = cursor.at
        extents = _EXTENTS_AND_SIZE[_read_rank(cursor)]
        *shape, nbytes = extents.unpack(cursor.take(extents.size, "shape and size"))
        check_shape(dtype, shape, nbytes)
    except FormatError as error:
        error.offset = at if error.offset is None else error.offset
        raise error.located(tensor=name) from None
    return Record(name, dtype, tuple(shape), nbytes)


def _read_dtype(cursor: NetCursor) -> str:
    spelled = cursor.string("data type")
    dtype = DATA_TYPES.get(spelled)
    if dtype is None:
        known = ", ".join(DATA_TYPES)
        raise FormatError(f"the data type {shown(spelled)} is not one of {known}", rule="DataType")
    return dtype


def _read_rank(cursor: NetCursor) -> int:
    axes = cursor.count("the shape", 8)
    if axes > MOST_AXES:
        reason = f"a tensor of {axes} axes; numpy has at most {MOST_AXES}"
        raise FormatError(reason, rule="Shape")
    return axes


def written_block(records: Sequence[Record]) -> bytes:
    """Write the records of a shard."""
    written = [pack("<i", len(records))]
    for name, dtype, shape, nbytes in records:
        encoded = name.encode()
        axes = len(shape)
        extents = _EXTENTS_AND_SIZE[axes].pack(*shape, nbytes)
        written += [pack("<i", len(encoded)), encoded, written_string(_SPELLED[dtype])]
        written += [pack("<i", axes), extents]
    return b"".join(written)


def check_shape(dtype: str, shape: Sequence[int], nbytes: int) -> None:
    """Check that there can be a tensor like this."""
    if shape and min(shape) < 0:
        raise FormatError(f"the shape {list(shape)} has an extent below zero", rule="Shape")
    if is_oversized(shape, dtype):
        reason = f"the shape {list(shape)} is larger than an array can be"
        raise FormatError(reason, rule="Shape")
    if nbytes < 0:
        raise FormatError(f"the size {nbytes} is below zero", rule="Size")


def same_tensors(some: Sequence[Record], others: Sequence[Record]) -> bool:
    """Return whether two lists have the same tensors in the same order, whatever their sizes."""
    return [record[:3] for record in some] == [record[:3] for record in others]


def size_error(record: Record) -> FormatError:
    """Make the error for a tensor of which the size is not what its shape makes."""
    reason = f"the size {record.nbytes}: expected {record.expected} for {record.dtype} of shape "
    return FormatError(f"{reason}{record.shape}", tensor=record.name, rule="Size")
