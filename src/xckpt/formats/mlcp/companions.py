r"""Files that hold the data of one shard each, next to the file that has the metadata.

::

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
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from xckpt.errors import CheckpointError, FormatError, MissingShardError, PayloadMissingError, shown
from xckpt.formats import kit
from xckpt.formats.mlcp.records import I32, NetCursor, Record, places
from xckpt.index import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.formats import Readable
    from xckpt.formats.mlcp.metadata import ShardMetadata

CHECKPOINT_MAGIC = b"PCLM"
SHARD_MAGIC = b"RAHS"
METADATA_SUFFIX = ".metadata.json"
MOVING = "xckpt: this shard is about to get its name"

# Without a checksum: magic, rank, its length, number of tensors, length of the data.
HEADER = Struct("<4s4i")

_SHARD_FILE = re.compile(r"(.+)_shard_-?\d+\.(?:shard|bin)", re.DOTALL)


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
    prefix = own = kit.file_name(path)
    for suffix in (".checkpoint", METADATA_SUFFIX):
        if own.lower().endswith(suffix):
            prefix = own[: -len(suffix)]
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
        _check_ranges(records, offsets, nbytes)
    else:
        *offsets, total = places(records)
        if total != nbytes:
            reason = f"{shown(file.name)} has {nbytes} bytes of data: not the values of its "
            reason += f"tensors, which have {total}"
            raise PayloadMissingError(reason, rule="DataLength")
    return [file.start + offset for offset in offsets]


def _check_ranges(records: Sequence[Record], offsets: Sequence[int], nbytes: int) -> None:
    # Equal ranges are shared on purpose.
    ranges: dict[tuple[int, int], str] = {}
    for (name, _, _, size), offset in zip(records, offsets, strict=True):
        if not 0 <= offset <= offset + size <= nbytes:
            reason = f"bytes {offset} to {offset + size} of the {nbytes} that the shard has"
            raise FormatError(reason, tensor=name, rule="Bounds")
        ranges.setdefault((offset, offset + size), name)
    for at, name, other in kit.overlaps(
        (start, end, name) for (start, end), name in ranges.items()
    ):
        reason = f"the data at {at} overlap those of {shown(other)}"
        raise FormatError(reason, tensor=name, rule="Overlap")
