r"""MLCP: the checkpoints of ml-framework, in one file or in several.

All integers are little-endian and have a sign; *string* is a text that begins with its length in
groups of 7 bits, the lowest first. ``PREFIX.checkpoint``::

    "PCLM"                               i32 0x4D4C4350
    version                              string
    length i32, metadata                 JSON
    for each shard:
        number of tensors i32
        for each tensor:
            length i32, name             UTF-8
            data type                    string
            number of axes i32           then an i64 for each
            size of the data i64

``PREFIX.metadata.json`` has the same metadata alone, and with them the only list of tensors; the
data are in a file for each shard, see `xckpt.formats.mlcp.companions`.

The number of shards in a ``.checkpoint`` is that in its metadata, where these list shards, else
they go on to the end of the file.

**The data are nowhere**: upstream writes a ``.checkpoint`` like this and no more. Readers and
writers after it have added them in several ways (`xckpt.formats.mlcp.payload`), which the size of
the file tells apart; the custom field ``payload`` may say it, and another, ``xckpt.dims``, the
names of axes. Where no data are found, nor files
beside the checkpoint that have them, tensors are listed, and their values are missing.

Upstream's reader ignores what follows the last record and does not compare records with metadata,
lets counts below zero pass for zero, and replaces what is not UTF-8.

References: src/MLFramework/Checkpointing of github.com/werwedc/ml-framework at bff32d6.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from xckpt.errors import FormatError, PayloadMissingError, UnsupportedError, shown
from xckpt.formats import Can, Format
from xckpt.formats.kit import DIMS_KEY, with_dims
from xckpt.formats.mlcp.companions import (
    CHECKPOINT_MAGIC,
    METADATA_SUFFIX,
    MOVING,
    SHARD_MAGIC,
    candidates,
    look_beside,
    metadata_name,
)
from xckpt.formats.mlcp.cursor import NetCursor
from xckpt.formats.mlcp.metadata import FIELDS, parse
from xckpt.formats.mlcp.payload import find_payload, read_as
from xckpt.formats.mlcp.plan import FILE_ATTRS, TENSOR_ATTRS, WRITES, plan
from xckpt.formats.mlcp.records import DATA_TYPES, same_tensors
from xckpt.formats.mlcp.tensors import ListedShard, make_tensors, variable_name
from xckpt.index import Index

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.formats import Readable
    from xckpt.formats.mlcp.metadata import Metadata, ShardMetadata
    from xckpt.formats.mlcp.payload import Body
    from xckpt.index import Shard

__all__ = ["WRITES", "Mlcp", "detect", "plan", "read", "variable_name"]

Payload = Literal["none", "inline", "per_shard", "tail", "companion"]

_OBJECT = re.compile(rb"[ \t\r\n]*\{")
# What other metadata are unlikely to have.
_OWN_FIELDS = ("worldSize", "ddpRank", "shardingStrategy", "shards", "sharding")
_OWN_FIELD = re.compile(rf'"(?:{"|".join(_OWN_FIELDS)})"[ \t\r\n]*:'.encode())
_LARGEST_JSON = 1 << 30


class _Data(NamedTuple):
    """Where the data of a checkpoint are, shard by shard."""

    where: Payload
    shards: Sequence[ListedShard]
    files: Mapping[str, Shard] = {}
    warnings: Sequence[str] = ()


def detect(head: bytes, size: int, name: str) -> bool:
    """Return whether a file is a checkpoint or the metadata of one."""
    if head.startswith((CHECKPOINT_MAGIC, SHARD_MAGIC)):
        return True
    if not _is_named(name) or _OBJECT.match(head) is None:
        return False
    # Where its fields may be further behind, or escaped, `read` finds out.
    unsure = size > len(head) or b"\\u" in head
    return unsure or _OWN_FIELD.search(head) is not None


def _is_named(name: str) -> bool:
    """Return whether a file has the name of metadata."""
    path = name.partition("?")[0] if "://" in name else name
    return path.lower().endswith(METADATA_SUFFIX)


def read(source: Readable, *, payload: Payload | None = None) -> Index:
    """Read the index of a checkpoint: metadata and records, no data."""
    if payload is not None and payload not in get_args(Payload):
        known = ", ".join(map(repr, get_args(Payload)))
        raise ValueError(f"payload={payload!r} is not one of {known}")
    magic = bytes(source.read(0, min(4, source.size)))
    if magic == CHECKPOINT_MAGIC:
        return _read_checkpoint(source, payload)
    if magic == SHARD_MAGIC:
        metadata = metadata_name(source.name)
        raise UnsupportedError(
            "this is one shard of a checkpoint, without the names and shapes of its tensors",
            offset=0,
            rule="Shard",
            hint=f"Open {metadata!r}, or PREFIX.checkpoint, beside it",
        )
    if _OBJECT.match(source.read(0, min(64, source.size))):
        return _read_metadata(source, payload)
    reason = f"the file begins {magic!r}, expected {CHECKPOINT_MAGIC!r} or metadata in JSON"
    hint = "The magic is written as a little-endian integer" if magic == b"MLCP" else None
    raise FormatError(reason, offset=0, rule="Magic", hint=hint)


def _read_checkpoint(source: Readable, payload: Payload | None) -> Index:
    cursor = NetCursor(source, len(CHECKPOINT_MAGIC))
    version = cursor.string("version")
    length = cursor.count("metadata")
    at = cursor.at
    metadata = parse(cursor.take(length, "metadata"), at)
    wanted = payload or _marker(metadata)
    body = _find_body(source, cursor.at, metadata, wanted)
    if body.rest and payload != "none":
        reason = f"{body.rest} bytes follow the last record, but the data should be {wanted}"
        raise FormatError(reason, offset=source.size - body.rest, rule="Payload")
    shards = _shards(metadata, body)
    data = _Data(body.reading, shards)
    if body.reading == "none":
        data = _look_for_data(source, shards, wanted, expected=wanted == "companion")
    return _index(source, version, metadata, data, body.rest)


def _find_body(source: Readable, start: int, metadata: Metadata, wanted: Payload | None) -> Body:
    # No shards listed is as good as none known: upstream's own tests write such files.
    count = len(metadata.shards) or None
    if wanted is None:
        return find_payload(source, start, count, [said.records for said in metadata.shards])
    return read_as("none" if wanted == "companion" else wanted, source, start, count)


def _marker(metadata: Metadata) -> Payload | None:
    """Return where the custom fields say the data are."""
    return next((known for known in get_args(Payload) if known == metadata.marker), None)


def _shards(metadata: Metadata, body: Body) -> list[ListedShard]:
    """Bring records and metadata of each shard together."""
    said: Sequence[ShardMetadata | None] = metadata.shards or [None] * len(body.blocks)
    ranks = [shard.rank for shard in metadata.shards]
    if len(set(ranks)) < len(body.blocks):
        ranks = list(range(len(body.blocks)))
    offsets = body.offsets or [[]] * len(body.blocks)
    return list(map(ListedShard, ranks, body.blocks, said, offsets))


def _read_metadata(source: Readable, payload: Payload | None) -> Index:
    if payload not in {None, "none", "companion"}:
        raise ValueError(f"payload={payload!r}: metadata alone have their data in other files")
    if source.size > _LARGEST_JSON:
        reason = f"metadata of {source.size} bytes are larger than {_LARGEST_JSON}"
        raise FormatError(reason, offset=0, rule="Metadata")
    metadata = parse(bytes(source.read(0, source.size)), 0)
    _check_is_metadata(metadata.fields, source.name)
    wanted = payload if metadata.shards else "none"
    data = _look_for_data(source, _listed(metadata), wanted, expected=True)
    return _index(source, metadata.version, metadata, data)


def _check_is_metadata(fields: Mapping[str, Any], name: str) -> None:
    """Refuse JSON that is something else: what `detect` says of a file is true here too."""
    # Of a file with another name somebody has said what it is.
    known = _OWN_FIELDS if _is_named(name) else FIELDS
    if (fields or _is_named(name)) and fields.keys().isdisjoint(known):
        raise FormatError(
            f"this is not metadata of a checkpoint, which have {', '.join(known)}",
            offset=0,
            rule="Metadata",
        )


def _listed(metadata: Metadata) -> list[ListedShard]:
    shards = [ListedShard(said.rank, said.records or [], said) for said in metadata.shards]
    if not shards and metadata.records:
        shards = [ListedShard(0, metadata.records)]
    if len({shard.rank for shard in shards}) < len(shards):
        raise FormatError("two shards have one rank", offset=0, rule="Rank")
    for _, records, *_ in shards:
        times = Counter(record.name for record in records)
        for name, number in times.items():
            if number > 1:
                reason = f"{number} tensors of one shard have this name"
                raise FormatError(reason, offset=0, tensor=name, rule="DuplicateName")
    return shards


def _look_for_data(
    source: Readable, shards: Sequence[ListedShard], wanted: Payload | None, *, expected: bool
) -> _Data:
    """Look for data in files beside, and say why a tensor has none."""
    if wanted != "none":
        placed, files, warnings = look_beside(source, shards)
        if expected or any(shard.file for shard in placed):
            is_there = any(shard.problem is None for shard in placed)
            return _Data("companion" if is_there else "none", placed, files, warnings)
    problem = _nowhere(source, shards, looked=wanted != "none")
    return _Data("none", [shard._replace(problem=problem) for shard in shards])


def _nowhere(
    source: Readable, shards: Sequence[ListedShard], *, looked: bool
) -> PayloadMissingError:
    reason = "the checkpoint has names, types and shapes of tensors, but no values"
    hint = None
    if looked and shards:
        names = ", ".join(map(shown, candidates(source.name, shards[0].rank, shards[0].said)))
        hint = f"Nor are they in a file beside it: for the first shard, one of {names}"
    return PayloadMissingError(reason, hint=hint)


def _index(source: Readable, version: str, metadata: Metadata, data: _Data, rest: int = 0) -> Index:
    warnings = _warnings(metadata, data.shards, rest)
    return Index(
        format=Mlcp.name,
        version=version,
        tensors=with_dims(make_tensors(data.shards), metadata.custom_field(DIMS_KEY)),
        attrs={**metadata.fields, "payload": data.where, "metadata_json": metadata.text},
        source=source.name,
        nbytes=source.size,
        shards=data.files,
        warnings=(*warnings, *data.warnings),
    )


def _warnings(metadata: Metadata, shards: Sequence[ListedShard], rest: int) -> list[str]:
    texts = [
        f"the metadata have the field {shown(name)} several times: the last counts"
        for name in dict.fromkeys(metadata.repeated)
    ]
    if any(said.checksum == MOVING for said in metadata.shards):
        texts.append(
            "another process is saving it, or was ended while it did: the checkpoint is complete, "
            "but its shards have names that only readers of filePath find. Save it again"
        )
    count = metadata.shard_count
    if not metadata.shards and count not in {None, len(shards)}:
        texts.append(f"the metadata say {count} shards, but there are {len(shards)}")
    for number, (rank, records, said, *_) in enumerate(shards):
        if said is not None and said.rank != rank:
            texts.append(f"the metadata of shard {number} have rank {said.rank}, as others do")
        if said is not None and said.records and not same_tensors(said.records, records):
            texts.append(f"the metadata of shard {number} list other tensors than its records")
        wrong = [record.name for record in records if not record.fits]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            texts.append(f"tensor {shown(wrong[0])}{more}: the size is not what the shape makes")
    if rest:
        texts.append(f"{rest} bytes follow the last record, and are not read")
    return texts


class Mlcp(Format):
    """MLCP, in one file (``.checkpoint``) or with a file for each shard (``.metadata.json``)."""

    name = "mlcp"
    description = "MLCP checkpoints"
    suffixes = (".checkpoint", METADATA_SUFFIX)
    shared_suffixes = (METADATA_SUFFIX,)
    types = DATA_TYPES
    can = Can(types=WRITES, tensor_attrs=TENSOR_ATTRS, file_attrs=FILE_ATTRS)

    detect = staticmethod(detect)
    read = staticmethod(read)
    plan = staticmethod(plan)
