"""Records, which say what a tensor is, and where the data of a checkpoint are.

Those of a single file do not say that. A reading is an assumption that either makes the file end
exactly where it does, or not::

    reading      bytes after the metadata                                   written by
    none         records of shard 0, of shard 1, ...                        upstream
    inline       every record is followed by its data                       -
    per_shard    the records of a shard are followed by their data          -
    tail         the records of all shards are followed by all data         this package

Data are in the order of the records, without gaps. Or they are in files next to the one that has
the metadata, each with those of a shard::

    PREFIX_shard_RANK.shard                                PREFIX_shard_RANK.bin
    "RAHS"                                                 data
    rank i32
    length i32, checksum (UTF-8)
    number of tensors i32
    length i32 (or i64, as a draft had it), data

Neither has names or shapes. Metadata say where in the data a tensor begins; most of upstream's
writers leave that at 0 for all tensors, which then follow each other.

Metadata have the path that a file was written to, which a checkpoint that was moved does not have
any more: the file is looked for by the last component of it, next to the metadata and nowhere else.

Upstream's reader knows no path but ``PREFIX_shard_RANK.shard``. While we replace such files, the
metadata refer to the new ones by other names, and have a checksum that no file has (`MOVING`):
upstream refuses these shards then, rather than to take old ones for them.
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
        return self.nbytes == nbytes_of(self.dtype, prod(self.shape))

    def size_error(self, offset: int | None = None) -> FormatError:
        """Make the error for a size that is not that."""
        expected = nbytes_of(self.dtype, prod(self.shape))
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


# --- data in files next to the metadata -----------------------------------------------------------


class ShardMetadata(NamedTuple):
    """What metadata say of a shard.

    A path and a size of "" and 0 are not known, and None are tensors that are not listed. The
    offsets count from the beginning of the shard's data.
    """

    rank: int
    records: list[Record] | None
    offsets: list[int]
    file_path: str = ""
    file_size: int = 0
    # Upstream's reader compares it with one inside of the file, and its verifier with one of the
    # whole file: no checksum but none satisfies both.
    checksum: str | None = None


class ListedShard(NamedTuple):
    """The tensors of a shard, what metadata say of it, and where the data of each begin.

    They are in a file of their own, or in the one that has the metadata, unless there is a problem.
    """

    rank: int
    records: Sequence[Record]
    stated: ShardMetadata | None = None
    offsets: Sequence[int] = ()
    file: str | None = None
    problem: CheckpointError | None = None


class ShardFile(NamedTuple):
    """A file with the data of a shard from byte `start` on; it may have no header, and checksum."""

    name: str
    size: int
    start: int = 0
    checksum: str | None = None


def metadata_name(path: str) -> str:
    """Guess the name of the file that has the metadata of a shard."""
    found = _SHARD_FILE.fullmatch(kit.file_name(path))
    return f"{found[1] if found else 'PREFIX'}{METADATA_SUFFIX}"


def candidates(path: str, rank: int, stated: ShardMetadata | None = None) -> tuple[str, ...]:
    """Return the names that the file of a shard may have."""
    own, prefix = kit.file_name(path), kit.file_stem(path, ".checkpoint", METADATA_SUFFIX)
    written = "" if stated is None else kit.file_name(stated.file_path)
    names = (written, f"{prefix}_shard_{rank}.shard", f"{prefix}_shard_{rank}.bin")
    return tuple(dict.fromkeys(name for name in names if name not in {"", ".", "..", own}))


def look_beside(
    source: Readable, shards: Sequence[ListedShard]
) -> tuple[list[ListedShard], dict[str, Shard], list[str]]:
    """Look for the files of all shards, and read their headers; return what to warn of too."""
    found: list[ListedShard] = []
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
            found.append(shard._replace(problem=MissingShardError(reason, hint=hint)))
            continue
        if file.name in files:
            reason = f"the file {shown(file.name)} is that of two shards"
            raise FormatError(reason, path=source.name, rule="ShardFile")
        files[file.name] = Shard(file.size, None, (file.name,))
        placed = shard._replace(file=file.name)
        try:
            found.append(placed._replace(offsets=_offsets(shard, file)))
        except CheckpointError as problem:
            found.append(placed._replace(problem=problem))
        warnings += _disagreements(file, shard.stated)
    return found, files, warnings


def _find(source: Readable, names: Sequence[str], shard: ListedShard) -> ShardFile | None:
    for name in names:
        try:
            file = source.sibling(name)
        # No such file, or no permission; a name that no file here can have; bytes in memory.
        except (OSError, CheckpointError):
            continue
        magic = bytes(file.read(0, min(4, file.size)))
        if magic == CHECKPOINT_MAGIC:
            continue  # where the shard was written is a checkpoint in one file, perhaps this one
        if magic != SHARD_MAGIC and not name.lower().endswith(".shard"):
            return ShardFile(name, file.size)
        try:
            return _read_header(name, file, shard)
        except FormatError as error:
            raise error.located(path=file.name) from None
    return None


def _read_header(name: str, file: Readable, shard: ListedShard) -> ShardFile:
    cursor = NetCursor(file)
    if cursor.take(4, "magic") != SHARD_MAGIC:
        raise FormatError(f"the file does not begin {SHARD_MAGIC!r}", offset=0, rule="Magic")
    rank = cursor.number(I32, "rank")
    if rank != shard.rank:
        reason = f"the shard of rank {rank}, expected {shard.rank}"
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
    reason = f"the length of the data is not that of what follows in a file of {file.size} bytes"
    raise FormatError(reason, offset=at, rule="DataLength")


def _disagreements(file: ShardFile, stated: ShardMetadata | None) -> Iterator[str]:
    if stated is None:
        return
    # Upstream means the file, or its data.
    if stated.file_size not in {0, file.size, file.size - file.start}:
        yield f"{file.name}: {file.size} bytes, but the metadata say {stated.file_size}"
    is_comparable = stated.checksum not in {None, MOVING, file.checksum}
    if file.checksum is not None and is_comparable:
        both = f"{shown(file.checksum)}, but in the metadata {shown(stated.checksum or '')}"
        yield f"{file.name}: the checksum {both}"


def _offsets(shard: ListedShard, file: ShardFile) -> list[int]:
    """Find where the data of each tensor begin in the file."""
    records, stated, nbytes = shard.records, shard.stated, file.size - file.start
    # Offsets of the metadata count if they list the same tensors as the records.
    listed = dict(zip(stated.records or (), stated.offsets, strict=True)) if stated else {}
    offsets = [listed.get(record, 0) for record in records]
    if any(offsets) and all(record in listed for record in records):
        ranges = []
        for (name, _, _, size), offset in zip(records, offsets, strict=True):
            if not 0 <= offset <= offset + size <= nbytes:
                reason = f"bytes {offset} to {offset + size} of the {nbytes} that the shard has"
                raise FormatError(reason, tensor=name, rule="Bounds")
            ranges.append((offset, offset + size, name))
        for at, name, other in kit.overlaps(ranges, shared=True):
            reason = f"the data at {at} overlap those of {shown(other)}"
            raise FormatError(reason, tensor=name, rule="Overlap")
    else:
        *offsets, total = places(records)
        if total != nbytes:
            reason = f"{shown(file.name)} has {nbytes} bytes of data: not the values of its "
            reason += f"tensors, which have {total}"
            raise PayloadMissingError(reason, rule="DataLength")
    return [file.start + offset for offset in offsets]
