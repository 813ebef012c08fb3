"""Records, which say what a tensor is, and where the data of a single-file checkpoint are.

The records do not say that. A reading is an assumption that either makes the file end exactly
where it does, or not::

    reading      bytes after the metadata                                   written by
    none         records of shard 0, of shard 1, ...                        upstream
    inline       every record is followed by its data                       -
    per_shard    the records of a shard are followed by their data          -
    tail         the records of all shards are followed by all data         this package

Data are in the order of the records, without gaps.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, Literal, NamedTuple

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import FormatError, shown
from xckpt.formats import kit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.formats import Readable

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
_SPELLED = {dtype: name for name, dtype in DATA_TYPES.items()}
_NBYTES = {name: ELEMENT_TYPES[name].bits // 8 for name in DATA_TYPES.values()}

I32 = Struct("<i")
_LARGEST_I32 = (1 << 31) - 1
_SIZES = [Struct(f"<{axes + 1}q") for axes in range(kit.MOST_AXES + 1)]
_SMALLEST_RECORD = 17

# Where no metadata say how many there are: a file of zeros would be a quarter as many.
_MOST_SHARDS = 1 << 16

Reading = Literal["none", "inline", "per_shard", "tail"]
Payload = Literal[Reading, "companion"]


class NetCursor(kit.Cursor):
    """Reads what .NET's ``BinaryWriter`` wrote."""

    __slots__ = ()

    def count(self, what: str, size: int = 1) -> int:
        """Read how many things follow, each of so many bytes or more."""
        at = self.at
        found = self.number(I32, what)
        if found < 0:
            raise FormatError(f"{what}: {found} is below zero", offset=at, rule="Negative")
        if found * size > self.left:
            self._require(found * size, what)
        return found

    def string(self, what: str) -> str:
        """Read a text that begins with its length in groups of 7 bits, the lowest first."""
        at, length, shift = self.at, 0, 0
        while (byte := self.take(1, what)[0]) >= 0x80 and shift < 28:
            length |= (byte & 0x7F) << shift
            shift += 7
        length |= (byte & 0x7F) << shift
        if byte >= 0x80 or length > _LARGEST_I32:
            reason = f"{what}: its length is not one of 31 bits in at most 5 bytes"
            raise FormatError(reason, offset=at, rule="StringLength")
        return self.text(length, what)


def written_string(text: str) -> bytes:
    """Write a text after its length in groups of 7 bits, the lowest first."""
    data = text.encode()
    left, length = len(data), bytearray()
    while left >= 0x80:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*length, left]) + data


# --- records --------------------------------------------------------------------------------------


class Record(NamedTuple):
    """What a checkpoint says of a tensor; the size need not be what the shape makes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def fits(self) -> bool:
        """Whether the size is what the shape makes."""
        return self.nbytes == prod(self.shape) * _NBYTES[self.dtype]

    def size_error(self, offset: int | None = None) -> FormatError:
        """Make the error for a size that is not that."""
        expected = prod(self.shape) * _NBYTES[self.dtype]
        reason = f"the size {self.nbytes}: expected {expected} for {self.dtype} of shape "
        reason += str(self.shape)
        return FormatError(reason, offset=offset, tensor=self.name, rule="Size")


def read_block(cursor: NetCursor, *, inline: bool = False) -> tuple[list[Record], list[int]]:
    """Read the records of a shard, and where their data are."""
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
                raise record.size_error(at)
            offsets.append(cursor.at)
            cursor.skip(record.nbytes, "data")
    return list(records.values()), offsets


def _read_record(cursor: NetCursor) -> Record:
    name = cursor.text(cursor.count("the name of a tensor"), "the name of a tensor")
    at = cursor.at
    try:
        dtype = element_type(cursor.string("data type"))
        at = cursor.at
        *shape, nbytes = cursor.fields(_sizes(cursor), "shape and size")
        check_shape(dtype, shape, nbytes)
    except FormatError as error:
        error.offset = at if error.offset is None else error.offset
        raise error.located(tensor=name) from None
    return Record(name, dtype, tuple(shape), nbytes)


def _sizes(cursor: NetCursor) -> Struct:
    axes = cursor.count("the shape", 8)
    if axes > kit.MOST_AXES:
        reason = f"a tensor of {axes} axes; numpy has at most {kit.MOST_AXES}"
        raise FormatError(reason, rule="Shape")
    return _SIZES[axes]


def written_block(records: Sequence[Record]) -> bytes:
    """Write the records of a shard."""
    written = [I32.pack(len(records))]
    for name, dtype, shape, nbytes in records:
        encoded, axes = name.encode(), len(shape)
        written += [I32.pack(len(encoded)), encoded, written_string(_SPELLED[dtype])]
        written += [I32.pack(axes), _SIZES[axes].pack(*shape, nbytes)]
    return b"".join(written)


def element_type(spelled: str, where: str = "the") -> str:
    """Return the element type that a data type is."""
    dtype = DATA_TYPES.get(spelled)
    if dtype is None:
        reason = f"{where} data type {shown(spelled)} is not one of {', '.join(DATA_TYPES)}"
        raise FormatError(reason, rule="DataType")
    return dtype


def check_shape(dtype: str, shape: Sequence[int], nbytes: int) -> None:
    """Check that there can be a tensor like this."""
    if shape and min(shape) < 0:
        raise FormatError(f"the shape {list(shape)} has an extent below zero", rule="Shape")
    if kit.is_oversized(shape, dtype):
        reason = f"the shape {list(shape)} is larger than an array can be"
        raise FormatError(reason, rule="Shape")
    if nbytes < 0:
        raise FormatError(f"the size {nbytes} is below zero", rule="Size")


def same_tensors(some: Sequence[Record], others: Sequence[Record]) -> bool:
    """Whether two lists have the same tensors in the same order, whatever their sizes."""
    return [record[:3] for record in some] == [record[:3] for record in others]


def places(records: Sequence[Record], start: int = 0) -> list[int]:
    """Return where the data of each begin if they follow each other, and where all end."""
    return [*accumulate([record.nbytes for record in records], initial=start)]


# --- data -----------------------------------------------------------------------------------------


class Body(NamedTuple):
    """What follows the metadata, in one reading: records of each shard, and where their data are.

    Only the reading "none" has no offsets, and can leave a rest of so many bytes.
    """

    reading: Reading
    blocks: list[list[Record]]
    offsets: list[list[int]]
    rest: int = 0


def find_body(
    source: Readable, start: int, count: int | None, listed: Sequence[list[Record] | None] = ()
) -> Body:
    """Find the reading that explains every byte of the file, of `count` shards if that is known."""
    readings: list[Reading] = ["per_shard", "inline"]
    fits: list[Body] = []
    failure = None
    try:
        body = read_body("none", source, start, count)
        if not body.rest:
            return body
        fits.append(_with_tail(body, source.size))
        if count == 1:
            readings.remove("per_shard")  # the same
    except FormatError as error:
        failure = error
    for reading in readings:
        try:
            fits.append(read_body(reading, source, start, count))
        except FormatError as error:
            failure = failure or error
    agreeing = [
        body
        for body in fits
        # Writers leave lists empty that they do not fill.
        if all(
            not tensors or same_tensors(tensors, records)
            for records, tensors in zip(body.blocks, listed, strict=False)
        )
    ]
    if not agreeing and failure:
        raise failure
    if not agreeing:
        reading = fits[0].reading
        reason = f"with the data {reading}, records are other tensors than the metadata list"
        hint = f"payload={reading!r} reads them"
        raise FormatError(reason, offset=start, rule="Payload", hint=hint)
    if any(body[1:] != agreeing[0][1:] for body in agreeing):
        readings = [body.reading for body in agreeing]
        reason = f"the data can be {' or '.join(readings)}: the sizes fit each of them"
        hint = "payload= says which it is"
        raise FormatError(reason, offset=start, rule="Ambiguous", hint=hint)
    return agreeing[0]


def read_body(reading: Reading, source: Readable, start: int, count: int | None) -> Body:
    """Read the records of a file of which it is known where the data are.

    Where the number of shards is known, that many are read. Else they go on to the end of the
    file, or to where data would fill it.
    """
    cursor = NetCursor(source, start)
    blocks: list[list[Record]] = []
    offsets: list[list[int]] = []
    tail = 0
    while cursor.left > tail if count is None else len(blocks) < count:
        records, found = read_block(cursor, inline=reading == "inline")
        if reading == "per_shard":
            *found, end = _consecutive(records, cursor.at)
            cursor.skip(end - cursor.at, "the data of a shard")
        elif reading == "tail" and count is None:
            tail += places(records)[-1]
        blocks.append(records)
        offsets.append(found)
        if count is None and len(blocks) > _MOST_SHARDS:
            reason = f"there are more than {_MOST_SHARDS} shards"
            raise FormatError(reason, offset=cursor.at, rule="Shards")
    if reading == "none":
        return Body("none", blocks, [], cursor.left)
    if reading == "tail":
        return _with_tail(Body("none", blocks, [], cursor.left), source.size)
    if cursor.left:
        raise _unexplained(cursor.at, cursor.left)
    return Body(reading, blocks, offsets)


def _with_tail(body: Body, size: int) -> Body:
    start = size - body.rest
    expected = sum([places(records)[-1] for records in body.blocks])
    if expected != body.rest:
        data = f", and the data of all tensors are {expected}"
        raise _unexplained(start, body.rest, data)
    offsets = []
    for records in body.blocks:
        *found, start = _consecutive(records, start)
        offsets.append(found)
    return Body("tail", body.blocks, offsets)


def _consecutive(records: Sequence[Record], start: int) -> list[int]:
    """Return places of data, each of the size that the shape makes."""
    for record in records:
        if not record.fits:
            raise record.size_error(start)
    return places(records, start)


def _unexplained(at: int, nbytes: int, data: str = "") -> FormatError:
    reason = f"{nbytes} bytes follow the last record{data}"
    hint = "payload='none' lists the tensors, without values"
    return FormatError(reason, offset=at, rule="Payload", hint=hint)
