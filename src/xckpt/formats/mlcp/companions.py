r"""Files that hold the data of one shard each, beside the file that has the metadata.

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
any more: the file is looked for by the last component of it, beside the metadata and nowhere else.

Upstream's reader knows no path but ``PREFIX_shard_RANK.shard``. While we replace such files, the
metadata refer to the new ones by other names, and have a checksum that no file has (`MOVING`):
upstream refuses these shards then, rather than to take old ones for them.
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from xckpt.errors import CheckpointError, FormatError, MissingShardError, PayloadMissingError, shown
from xckpt.formats.mlcp.cursor import NetCursor
from xckpt.index import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.formats import Readable
    from xckpt.formats.mlcp.metadata import ShardMetadata
    from xckpt.formats.mlcp.records import Record
    from xckpt.formats.mlcp.tensors import ListedShard

__all__ = [
    "CHECKPOINT_MAGIC",
    "METADATA_SUFFIX",
    "MOVING",
    "SHARD_MAGIC",
    "candidates",
    "look_beside",
    "metadata_name",
]

CHECKPOINT_MAGIC = b"PCLM"
SHARD_MAGIC = b"RAHS"
METADATA_SUFFIX = ".metadata.json"
MOVING = "xckpt: this shard is about to get its name"

_SHARD_FILE = re.compile(r"(.+)_shard_-?\d+\.(?:shard|bin)", re.DOTALL)
_SUFFIXES = (".checkpoint", METADATA_SUFFIX)


class ShardFile(NamedTuple):
    """A file with the data of a shard.

    Parameters
    ----------
    name : str
        Its name, beside the file with the metadata.
    size : int
        Its size in bytes.
    start : int
        Where its data begin.
    checksum : str or None
        As its header has it; None if it has no header.
    """

    name: str
    size: int
    start: int
    checksum: str | None

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return self.size - self.start


def metadata_name(path: str) -> str:
    """Guess the name of the file that has the metadata of a shard."""
    found = _SHARD_FILE.fullmatch(_file_name(path))
    return f"{found[1] if found else 'PREFIX'}{METADATA_SUFFIX}"


def candidates(path: str, rank: int, said: ShardMetadata | None = None) -> tuple[str, ...]:
    """Return the names that the file of a shard may have."""
    own = _file_name(path)
    prefix = own
    for suffix in _SUFFIXES:
        if own.lower().endswith(suffix):
            prefix = own[: -len(suffix)]
    written = "" if said is None else re.split(r"[/\\]", said.file_path)[-1]
    names = (written, f"{prefix}_shard_{rank}.shard", f"{prefix}_shard_{rank}.bin")
    return tuple(dict.fromkeys(name for name in names if name not in {"", ".", "..", own}))


def _file_name(path: str) -> str:
    if "://" in path:
        path = path.partition("?")[0]
    return re.split(r"[/\\]", path)[-1]


def look_beside(
    source: Readable, shards: Sequence[ListedShard]
) -> tuple[list[ListedShard], dict[str, Shard], list[str]]:
    """Look for the files of all shards, and read their headers."""
    found: list[ListedShard] = []
    files: dict[str, Shard] = {}
    warnings: list[str] = []
    for shard in shards:
        names = candidates(source.name, shard.rank, shard.said)
        file = _find(source, names, shard)
        if file is None:
            size = 0 if shard.said is None else shard.said.file_size
            files.setdefault(names[0], Shard(size, None, names))
            found.append(shard._replace(problem=_missing(names)))
            continue
        if file.name in files:
            reason = f"the file {shown(file.name)} is that of two shards"
            raise FormatError(reason, path=source.name, rule="ShardFile")
        files[file.name] = Shard(file.size, None, (file.name,))
        found.append(_placed(shard, file))
        warnings += _disagreements(file, shard.said)
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
            return ShardFile(name, file.size, 0, None)
        try:
            return _read_header(name, file, shard.rank, len(shard.records))
        except FormatError as error:
            raise error.located(path=file.name) from None
    return None


def _missing(names: Sequence[str]) -> MissingShardError:
    places = ", ".join(map(shown, names))
    reason = "the file with the data of this shard is missing"
    return MissingShardError(reason, hint=f"Looked beside the metadata for {places}")


def _read_header(name: str, file: Readable, rank: int, count: int) -> ShardFile:
    cursor = NetCursor(file)
    if cursor.take(4, "magic") != SHARD_MAGIC:
        raise FormatError(f"the file does not begin {SHARD_MAGIC!r}", offset=0, rule="Magic")
    found = cursor.integer("rank")
    if found != rank:
        raise FormatError(f"the shard of rank {found}, expected {rank}", offset=4, rule="Rank")
    checksum = cursor.text(cursor.count("checksum"), "checksum")
    at = cursor.at
    found = cursor.integer("number of tensors")
    if found != count:
        reason = f"the shard has {found} tensors, expected {count}"
        raise FormatError(reason, offset=at, rule="TensorCount")
    return ShardFile(name, file.size, _data_start(file, cursor.at), checksum)


def _data_start(file: Readable, at: int) -> int:
    for width in (4, 8):
        start = at + width
        if start <= file.size:
            length = int.from_bytes(file.read(at, width), "little")
            if start + length == file.size:
                return start
    reason = f"the length of the data is not that of what follows in a file of {file.size} bytes"
    raise FormatError(reason, offset=at, rule="DataLength")


def _disagreements(file: ShardFile, said: ShardMetadata | None) -> Iterator[str]:
    if said is None:
        return
    # Upstream means the file, or its data.
    if said.file_size not in {0, file.size, file.nbytes}:
        yield f"{file.name}: {file.size} bytes, but the metadata say {said.file_size}"
    is_comparable = said.checksum not in {"", MOVING, file.checksum}
    if file.checksum is not None and is_comparable:
        stated = f"the checksum {shown(file.checksum)}, but in the metadata {shown(said.checksum)}"
        yield f"{file.name}: {stated}"


def _placed(shard: ListedShard, file: ShardFile) -> ListedShard:
    try:
        offsets = _offsets(shard, file)
    except CheckpointError as problem:
        return shard._replace(file=file.name, problem=problem)
    return shard._replace(file=file.name, offsets=offsets)


def _offsets(shard: ListedShard, file: ShardFile) -> list[int]:
    """Find where the data of each tensor begin in the file."""
    records, offsets = shard.records, _stated_offsets(shard)
    if any(offsets):
        _check_ranges(records, offsets, file.nbytes)
    else:
        *offsets, total = accumulate([record.nbytes for record in records], initial=0)
        if total != file.nbytes:
            raise PayloadMissingError(
                f"{shown(file.name)} has {file.nbytes} bytes of data: not the values of its "
                f"tensors, which have {total}",
                rule="DataLength",
            )
    return [file.start + offset for offset in offsets]


def _stated_offsets(shard: ListedShard) -> list[int]:
    """Return the offsets that the metadata have, if they list the same tensors as the records."""
    if shard.said is None or shard.said.records is None:
        return []
    stated = dict(zip(shard.said.records, shard.said.offsets, strict=True))
    if any(record not in stated for record in shard.records):
        return []
    return [stated[record] for record in shard.records]


def _check_ranges(records: Sequence[Record], offsets: Sequence[int], nbytes: int) -> None:
    ranges = []
    for (name, _, _, size), offset in zip(records, offsets, strict=True):
        if not 0 <= offset <= offset + size <= nbytes:
            reason = f"bytes {offset} to {offset + size} of the {nbytes} that the shard has"
            raise FormatError(reason, tensor=name, rule="Bounds")
        if size:
            ranges.append((offset, offset + size, name))
    for (start, stop, _), (later, end, name) in pairwise(sorted(ranges)):
        # Equal ranges are shared on purpose.
        if later < stop and (start, stop) != (later, end):
            reason = f"the data at {later} overlap those before, which end at {stop}"
            raise FormatError(reason, tensor=name, rule="Overlap")
