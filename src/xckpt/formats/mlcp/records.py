"""Records of tensors, and the position of a checkpoint's data.

The records of a single file do not state where the data are. A *reading* is an assumption, which is
valid if all bytes of the file are accounted for::

    reading      bytes after the metadata                                   written by
    none         records of shard 0, of shard 1, ...                        upstream
    inline       every record is followed by its data                       -
    per_shard    the records of a shard are followed by their data          -
    tail         the records of all shards are followed by all data         this package

Data are in the order of the records, without gaps. Alternatively, each shard has a file for its
data next to the metadata::

    PREFIX_shard_RANK.shard                                PREFIX_shard_RANK.bin
    "RAHS"                                                 data
    rank i32
    length i32, checksum (UTF-8)
    number of tensors i32
    length i32 (or i64, as a draft had it), data

Neither has names or shapes. The metadata have the offset of each tensor in the data; most of
upstream's writers set all offsets to 0, and tensors are then consecutive.

The metadata have the path that a file was written to, which is wrong after a checkpoint has been
moved. The reader uses its last component, and looks only in the folder of the metadata.

Upstream's reader accepts only the path ``PREFIX_shard_RANK.shard``. While xckpt replaces such
files, the metadata refer to the new ones by temporary names, with a checksum that no file has
(`MOVING`), so that upstream refuses these shards instead of reading the old ones.
"""

from __future__ import annotations

import re
from itertools import accumulate
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, Literal, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.errors import CheckpointError, FormatError, MissingShardError, PayloadMissingError, shown
from xckpt.formats import kit
from xckpt.index import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.readable import Readable


#: Element types by data type, in the order of their numbers in metadata.
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

CHECKPOINT_MAGIC = b"PCLM"
SHARD_MAGIC = b"RAHS"
METADATA_SUFFIX = ".metadata.json"
MOVING = "xckpt: this shard is about to get its name"

# Without a checksum: magic, rank, its length, number of tensors, length of the data.
HEADER = Struct("<4s4i")

_SHARD_FILE = re.compile(r"(.+)_shard_-?\d+\.(?:shard|bin)", re.DOTALL)
I32 = Struct("<i")
_LARGEST_I32 = (1 << 31) - 1
_SIZES = [Struct(f"<{axes + 1}q") for axes in range(kit.MOST_AXES + 1)]
_SMALLEST_RECORD = 17

# A limit if the metadata do not state the number: a file of zeros has a shard every four bytes.
_MOST_SHARDS = 1 << 16

Reading = Literal["none", "inline", "per_shard", "tail"]
Payload = Literal[Reading, "companion"]


class NetCursor(kit.Cursor):
    """A reader of fields that .NET's ``BinaryWriter`` wrote."""

    __slots__ = ()

    def count(self, label: str, size: int = 1) -> int:
        """Read the number of following items of at least `size` bytes each."""
        at = self.at
        number = self.number(I32, label)
        if number < 0:
            raise FormatError(f"{label}: {number} is negative", offset=at, rule="Negative")
        if number * size > self.left:
            self.require(number * size, label)
        return number

    def string(self, label: str) -> str:
        """Read a text after its length in groups of 7 bits, the lowest first."""
        at, length = self.at, self.varint(label, longest=5, rule="StringLength")
        if length > _LARGEST_I32:
            raise FormatError(f"{label}: {length} bytes", offset=at, rule="StringLength")
        return self.text(length, label)


def written_string(text: str) -> bytes:
    """Encode a text after its length in groups of 7 bits, the lowest first."""
    data = text.encode()
    remaining, length = len(data), bytearray()
    while remaining >= 0x80:
        length.append(remaining & 0x7F | 0x80)
        remaining >>= 7
    return bytes([*length, remaining]) + data


# --- records --------------------------------------------------------------------------------------


class Record(NamedTuple):
    """An entry for a tensor; `nbytes` is stated in the file, and may not fit the shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def fits(self) -> bool:
        """True if the stated size matches the shape."""
        return self.nbytes == nbytes_of(self.dtype, prod(self.shape))

    def size_error(self, offset: int | None = None) -> FormatError:
        """Return the error for a size that does not fit the shape."""
        expected = nbytes_of(self.dtype, prod(self.shape))
        reason = f"the size is {self.nbytes}, expected {expected} for {self.dtype} of shape "
        reason += str(self.shape)
        return FormatError(reason, offset=offset, tensor=self.name, rule="Size")


def read_block(cursor: NetCursor, *, inline: bool = False) -> tuple[list[Record], list[int]]:
    """Read the records of a shard, and the offsets of their data if these are `inline`."""
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
        raise error.located(tensor=name, offset=at) from None
    return Record(name, dtype, tuple(shape), nbytes)


def _sizes(cursor: NetCursor) -> Struct:
    axes = cursor.count("the shape", 8)
    if axes > kit.MOST_AXES:
        reason = f"a tensor has {axes} axes, more than {kit.MOST_AXES}"
        raise FormatError(reason, rule="Shape")
    return _SIZES[axes]


def written_block(records: Sequence[Record]) -> bytes:
    """Encode the records of a shard."""
    written = [I32.pack(len(records))]
    for name, dtype, shape, nbytes in records:
        encoded, axes = name.encode(), len(shape)
        written += [I32.pack(len(encoded)), encoded, written_string(_SPELLED[dtype])]
        written += [I32.pack(axes), _SIZES[axes].pack(*shape, nbytes)]
    return b"".join(written)


def element_type(spelled: str, place: str = "the") -> str:
    """Return the element type of a data type."""
    dtype = DATA_TYPES.get(spelled)
    if dtype is None:
        reason = f"{place} data type {shown(spelled)} is not one of {', '.join(DATA_TYPES)}"
        raise FormatError(reason, rule="DataType")
    return dtype


def check_shape(dtype: str, shape: Sequence[int], nbytes: int) -> None:
    """Raise `FormatError` if a shape or a size is impossible."""
    if shape and min(shape) < 0:
        raise FormatError(f"the shape {list(shape)} has a negative extent", rule="Shape")
    if kit.is_oversized(shape, dtype):
        raise FormatError(f"the shape {list(shape)} is too large", rule="Shape")
    if nbytes < 0:
        raise FormatError(f"the size {nbytes} is negative", rule="Size")


def same_tensors(first: Sequence[Record], second: Sequence[Record]) -> bool:
    """Return whether two lists have the same tensors in the same order, except for sizes."""
    return [record[:3] for record in first] == [record[:3] for record in second]


def places(records: Sequence[Record], start: int = 0) -> list[int]:
    """Return the offsets of consecutive data, and the offset of their end."""
    return [*accumulate([record.nbytes for record in records], initial=start)]


# --- data -----------------------------------------------------------------------------------------


class Body(NamedTuple):
    """The bytes after the metadata, in one reading: records and offsets of data for each shard."""

    reading: Reading
    blocks: list[list[Record]]
    offsets: list[list[int]]  # empty for the reading "none"
    unread_nbytes: int = 0  # after the last record, only for the reading "none"


def find_body(
    source: Readable,
    start: int,
    count: int | None,  # of shards; None if it is unknown
    listed: Sequence[list[Record] | None] = (),  # tensors of shards in the metadata
) -> Body:
    """Return the reading that accounts for every byte of the file."""
    readings: list[Reading] = ["per_shard", "inline"]
    fits: list[Body] = []
    failure = None
    try:
        body = read_body("none", source, start, count)
        if not body.unread_nbytes:
            return body
        fits.append(_with_tail(body, source.size))
        if count == 1:
            readings.remove("per_shard")  # the same as "tail" for a single shard
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
        # An empty list in the metadata has no meaning.
        if all(
            not tensors or same_tensors(tensors, records)
            for records, tensors in zip(body.blocks, listed, strict=False)
        )
    ]
    if not agreeing and failure:
        raise failure
    if not agreeing:
        reading = fits[0].reading
        reason = f"the records, with the data {reading}, differ from the tensors in the metadata"
        hint = f"Pass payload={reading!r} to read the records"
        raise FormatError(reason, offset=start, rule="Payload", hint=hint)
    if any(body[1:] != agreeing[0][1:] for body in agreeing):
        readings = [body.reading for body in agreeing]
        reason = f"the position of the data is ambiguous: it can be {' or '.join(readings)}"
        hint = "Choose one with payload="
        raise FormatError(reason, offset=start, rule="Ambiguous", hint=hint)
    return agreeing[0]


def read_body(reading: Reading, source: Readable, start: int, count: int | None) -> Body:
    """Read the records of a file in one reading."""
    # If the number of shards, `count`, is None, they continue to the end of the file, or until the
    # data of the shards so far would fill it.
    cursor = NetCursor(source, start)
    blocks: list[list[Record]] = []
    offsets: list[list[int]] = []
    tail = 0
    while cursor.left > tail if count is None else len(blocks) < count:
        records, block_offsets = read_block(cursor, inline=reading == "inline")
        if reading == "per_shard":
            *block_offsets, end = _consecutive(records, cursor.at)
            cursor.skip(end - cursor.at, "the data of a shard")
        elif reading == "tail" and count is None:
            tail += places(records)[-1]
        blocks.append(records)
        offsets.append(block_offsets)
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
    start = size - body.unread_nbytes
    expected = sum([places(records)[-1] for records in body.blocks])
    if expected != body.unread_nbytes:
        data = f", but the data of all tensors have {expected}"
        raise _unexplained(start, body.unread_nbytes, data)
    offsets = []
    for records in body.blocks:
        *block_offsets, start = _consecutive(records, start)
        offsets.append(block_offsets)
    return Body("tail", body.blocks, offsets)


def _consecutive(records: Sequence[Record], start: int) -> list[int]:
    """Return the offsets of consecutive data, after checking their sizes."""
    for record in records:
        if not record.fits:
            raise record.size_error(start)
    return places(records, start)


def _unexplained(at: int, nbytes: int, data: str = "") -> FormatError:
    reason = f"{nbytes} bytes follow the last record{data}"
    hint = "Pass payload='none' to list the tensors without values"
    return FormatError(reason, offset=at, rule="Payload", hint=hint)


# --- data in files next to the metadata -----------------------------------------------------------


class ShardMetadata(NamedTuple):
    """An entry for a shard in the metadata."""

    rank: int
    records: list[Record] | None  # None without a list of tensors
    offsets: list[int]  # from the beginning of the shard's data
    file_path: str = ""  # "" if it is unknown
    file_size: int = 0  # 0 if it is unknown
    # xckpt writes no checksum: upstream's reader compares it with one inside of the file, and its
    # verifier with one of the whole file, and no value satisfies both.
    checksum: str | None = None


class ListedShard(NamedTuple):
    """The tensors of a shard, its entry in the metadata, and the offsets of the data."""

    rank: int
    records: Sequence[Record]
    stated: ShardMetadata | None = None
    offsets: Sequence[int] = ()
    file: str | None = None  # None for the file of the metadata
    problem: CheckpointError | None = None  # the reason why there are no data


class ShardFile(NamedTuple):
    """A file with the data of a shard from byte `start` on; without a header, `start` is 0."""

    name: str
    size: int
    start: int = 0
    checksum: str | None = None


def metadata_name(path: str) -> str:
    """Return the likely name of the file with the metadata of a shard."""
    match = _SHARD_FILE.fullmatch(kit.file_name(path))
    return f"{match[1] if match else 'PREFIX'}{METADATA_SUFFIX}"


def candidates(path: str, rank: int, stated: ShardMetadata | None = None) -> tuple[str, ...]:
    """Return possible names for the file of a shard, most likely first."""
    prefix = kit.file_stem(path, ".checkpoint", METADATA_SUFFIX)
    written = "" if stated is None else kit.file_name(stated.file_path)
    names = (written, f"{prefix}_shard_{rank}.shard", f"{prefix}_shard_{rank}.bin")
    invalid = {"", ".", "..", kit.file_name(path)}
    return tuple(dict.fromkeys(name for name in names if name not in invalid))


def look_beside(
    source: Readable, shards: Sequence[ListedShard]
) -> tuple[list[ListedShard], dict[str, Shard], list[str]]:
    """Return the shards with their offsets or problems, the files with headers, and warnings."""
    located: list[ListedShard] = []
    files: dict[str, Shard] = {}
    warnings: list[str] = []
    for shard in shards:
        names = candidates(source.name, shard.rank, shard.stated)
        file = _find(source, names, shard)
        if file is None:
            size = 0 if shard.stated is None else shard.stated.file_size
            files.setdefault(names[0], Shard(size, None, names))
            reason = "the file with the data of this shard is missing"
            hint = f"Looked next to the metadata for {', '.join(map(shown, names))}"
            located.append(shard._replace(problem=MissingShardError(reason, hint=hint)))
            continue
        if file.name in files:
            reason = f"two shards have the file {shown(file.name)}"
            raise FormatError(reason, path=source.name, rule="ShardFile")
        files[file.name] = Shard(file.size, None, (file.name,))
        with_file = shard._replace(file=file.name)
        try:
            located.append(with_file._replace(offsets=_offsets(shard, file)))
        except CheckpointError as problem:
            located.append(with_file._replace(problem=problem))
        warnings += _disagreements(file, shard.stated)
    return located, files, warnings


def _find(source: Readable, names: Sequence[str], shard: ListedShard) -> ShardFile | None:
    for name in names:
        try:
            file = source.sibling(name)
        # A missing file or permission, an invalid name, or bytes in memory.
        except (OSError, CheckpointError):
            continue
        magic = kit.first_bytes(file, 4)
        if magic == CHECKPOINT_MAGIC:
            continue  # a checkpoint in one file, perhaps this one
        if magic != SHARD_MAGIC and not name.lower().endswith(".shard"):
            return ShardFile(name, file.size)
        with kit.locating(path=file.name):
            return _read_header(name, file, shard)
    return None


def _read_header(name: str, file: Readable, shard: ListedShard) -> ShardFile:
    cursor = NetCursor(file)
    if cursor.take(4, "magic") != SHARD_MAGIC:
        raise FormatError(f"the file does not begin {SHARD_MAGIC!r}", offset=0, rule="Magic")
    rank = cursor.number(I32, "rank")
    if rank != shard.rank:
        reason = f"the shard has rank {rank}, expected {shard.rank}"
        raise FormatError(reason, offset=4, rule="Rank")
    checksum = cursor.text(cursor.count("checksum"), "checksum")
    at = cursor.at
    count = cursor.number(I32, "number of tensors")
    if count != len(shard.records):
        reason = f"the shard has {count} tensors, expected {len(shard.records)}"
        raise FormatError(reason, offset=at, rule="TensorCount")
    at = cursor.at
    for width in (4, 8):
        start = at + width
        if start <= file.size:
            length = int.from_bytes(file.read(at, width), "little")
            if start + length == file.size:
                return ShardFile(name, file.size, start, checksum)
    reason = f"the length of the data does not fit a file of {file.size} bytes"
    raise FormatError(reason, offset=at, rule="DataLength")


def _disagreements(file: ShardFile, stated: ShardMetadata | None) -> Iterator[str]:
    if stated is None:
        return
    # Upstream states the size of the file, or of its data.
    if stated.file_size not in {0, file.size, file.size - file.start}:
        yield f"{file.name}: {file.size} bytes, but {stated.file_size} in the metadata"
    is_different = stated.checksum not in {None, MOVING, file.checksum}
    if file.checksum is not None and is_different:
        expected = shown(stated.checksum or "")
        yield f"{file.name}: the checksum is {shown(file.checksum)}, but {expected} in the metadata"


def _offsets(shard: ListedShard, file: ShardFile) -> list[int]:
    """Return the offset of each tensor's data in the file."""
    records, stated, nbytes = shard.records, shard.stated, file.size - file.start
    # Offsets of the metadata count if they list the same tensors as the records.
    listed = dict(zip(stated.records or (), stated.offsets, strict=True)) if stated else {}
    offsets = [listed.get(record, 0) for record in records]
    if any(offsets) and all(record in listed for record in records):
        ranges = []
        for (name, _, _, size), offset in zip(records, offsets, strict=True):
            if not 0 <= offset <= offset + size <= nbytes:
                reason = f"bytes {offset} to {offset + size} exceed the {nbytes} bytes of the shard"
                raise FormatError(reason, tensor=name, rule="Bounds")
            ranges.append((offset, offset + size, name))
        for at, name, overlapped in kit.find_overlaps(ranges, shared=True):
            reason = f"the data at byte {at} overlap the data of {shown(overlapped)}"
            raise FormatError(reason, tensor=name, rule="Overlap")
    else:
        *offsets, total = places(records)
        if total != nbytes:
            reason = f"{shown(file.name)} has {nbytes} bytes of data, but its tensors need {total}"
            raise PayloadMissingError(reason, rule="DataLength")
    return [file.start + offset for offset in offsets]
