r"""MLCP, the checkpoints of ml-framework: one file, or one for each shard.

All integers are little-endian and signed; *string* is a text after its length in groups of 7 bits,
the lowest first. ``PREFIX.checkpoint``::

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

``PREFIX.metadata.json`` has only the metadata, with the list of tensors; each shard has a file for
its data, see `xckpt.formats.mlcp.records`.

If the metadata of a ``.checkpoint`` list shards, there are as many; otherwise shards continue to
the end of the file.

**The data are missing**: upstream writes a ``.checkpoint`` without them. Other readers and writers
have added data in several ways (`xckpt.formats.mlcp.records`), which the size of the file
distinguishes. The custom field ``payload`` may state the way, and ``xckpt.dims`` the names of axes.
Without data in the file or in files next to it, tensors are listed, and their values are missing.

Upstream's reader ignores bytes after the last record and differences between records and metadata,
treats negative counts as zero, and replaces invalid UTF-8.

A name is unique only within its shard, since the ranks of a run have copies, or slices, of the same
parameters. xckpt writes data after the last record, or a file for each shard if the path ends in
``.metadata.json``.

Specification: src/MLFramework/Checkpointing of github.com/werwedc/ml-framework at bff32d6.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from xckpt.elements import nbytes_of
from xckpt.errors import CheckpointError, FormatError, PayloadMissingError, UnsupportedError, shown
from xckpt.formats import Can, Format, Readable, kit
from xckpt.formats.mlcp import metadata
from xckpt.formats.mlcp.metadata import FIELDS, Metadata
from xckpt.formats.mlcp.records import (
    CHECKPOINT_MAGIC,
    DATA_TYPES,
    HEADER,
    I32,
    METADATA_SUFFIX,
    MOVING,
    SHARD_MAGIC,
    ListedShard,
    NetCursor,
    Payload,
    Record,
    ShardMetadata,
    candidates,
    find_body,
    look_beside,
    metadata_name,
    places,
    read_body,
    same_tensors,
    written_block,
    written_string,
)
from xckpt.formats.plan import Draft, Plan, PlannedPart, WantedTensor, place_parts, plan_main_file
from xckpt.index import Index, Part, Shard, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_OBJECT = re.compile(rb"[ \t\r\n]*\{")
# Fields that other metadata are unlikely to have.
_OWN_FIELDS = ("worldSize", "ddpRank", "shardingStrategy", "shards", "sharding")
_OWN_FIELD = re.compile(rf'"(?:{"|".join(_OWN_FIELDS)})"[ \t\r\n]*:'.encode())
_LARGEST_JSON = 1 << 30
_BOUND_I32 = 1 << 31
_RANK_SUFFIX = re.compile(r"@rank_-?[0-9]+\Z")
# The largest number of dots at which a tree splits names; the rank is one more level.
_DEEPEST = 63


class Mlcp(Format):
    """MLCP, in one file (``.checkpoint``) or with a file for each shard (``.metadata.json``)."""

    name = "mlcp"
    description = "MLCP checkpoints"
    shared_suffixes = (METADATA_SUFFIX,)
    types = DATA_TYPES
    storage_attrs = (
        *(name for name in FIELDS if name not in {"training", "customFields"}),
        *metadata.ADDED,
        "rank",
        "name",
    )
    can = Can(
        # The first of several types with the same width is preferred.
        types=(
            "float32",
            "float64",
            "float16",
            "bfloat16",
            *(dtype for dtype in DATA_TYPES.values() if "float" not in dtype),
        ),
        tensor_attrs=("rank", "name"),
        file_attrs=None,
        stated_attrs=(*FIELDS, *metadata.ADDED),
        arrangement=True,
    )

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file is a checkpoint or the metadata of one."""
        if head.startswith((CHECKPOINT_MAGIC, SHARD_MAGIC)):
            return True
        if not _is_named(name) or _OBJECT.match(head) is None:
            return False
        # If fields may be beyond the head, or escaped, `read` decides.
        is_uncertain = size > len(head) or b"\\u" in head
        return is_uncertain or _OWN_FIELD.search(head) is not None

    def read(self, source: Readable, *, payload: Payload | None = None) -> Index:
        """Read metadata and records, but no data.

        Parameters
        ----------
        source : Readable
            A ``.checkpoint``, or a ``.metadata.json`` with the files of its shards next to it.
        payload : {"none", "inline", "per_shard", "tail", "companion"}, optional
            Position of the data: missing, after each record, after each shard, after all shards, or
            in files next to the checkpoint. By default it follows from the sizes.

        Returns
        -------
        Index
            All tensors, with a `problem` if their data are missing. The attributes are the fields
            of the metadata, ``payload`` (the position of the data) and ``metadata_json`` (the text
            of the metadata).
        """
        kit.check_option("payload", payload, get_args(Payload))
        magic = kit.first_bytes(source, 4)
        if magic == CHECKPOINT_MAGIC:
            listed = _read_checkpoint(source, payload)
        elif magic == SHARD_MAGIC:
            reason = "the file is one shard of a checkpoint, without names and shapes of tensors"
            hint = f"Open {metadata_name(source.name)!r}, or PREFIX.checkpoint, next to it"
            raise UnsupportedError(reason, offset=0, rule="Shard", hint=hint)
        elif _OBJECT.match(kit.first_bytes(source, 64)):
            listed = _read_metadata(source, payload)
        else:
            reason = f"the file begins {magic!r}, expected {CHECKPOINT_MAGIC!r} or metadata in JSON"
            note = "The magic is written as a little-endian integer" if magic == b"MLCP" else None
            raise FormatError(reason, offset=0, rule="Magic", hint=note)
        stated, position, shards = listed.stated, listed.payload, listed.shards
        warnings = _warnings(stated, shards, listed.unread_nbytes)
        files: dict[str, Shard] = {}
        if position == "none":
            position, shards, files = _look_for_data(source, shards, listed.expected, warnings)
        attrs = {**stated.fields, "payload": position, "metadata_json": stated.text}
        size, notes, tensors = source.size, tuple(warnings), _tensors(shards)
        index = Index(self.name, listed.version, tensors, attrs, source.name, size, files, notes)
        keys = (kit.DIMS_KEY, kit.ARRANGEMENT_KEY)
        return kit.with_arrangement(index, {key: stated.custom_field(key) for key in keys})

    def plan(self, draft: Draft, *, multi_shard: bool | None = None) -> Plan:
        """Plan a checkpoint in one file, or metadata and a file for each shard.

        Parameters
        ----------
        draft : Draft
            Contents of the checkpoint. The attribute ``rank`` of a tensor selects its shard, rank 0
            by default. The attribute ``name`` has its name in the shard if several shards use it.
        multi_shard : bool, optional
            Write ``PREFIX.metadata.json`` and a ``PREFIX_shard_RANK.shard`` for each rank, instead
            of one file. By default, if the path ends in ``.metadata.json``.
        """
        is_named = draft.path.lower().endswith(METADATA_SUFFIX)
        if multi_shard and not is_named:
            reason = f"the path must end in {METADATA_SUFFIX}, unlike {draft.path!r}"
            raise ValueError(f"multi_shard=True: {reason}")
        self.check(draft)
        ranks = _ranks(draft)
        shards = []
        for rank, group in ranks.items():
            records = [
                Record(name, tensor.dtype, tensor.shape, nbytes_of(tensor.dtype, tensor.size))
                for name, tensor in group.items()
            ]
            *offsets, nbytes = places(records)
            shards.append(ShardMetadata(rank, records, offsets, "", nbytes))
        times = Counter(name for group in ranks.values() for name in group)
        as_read = {
            variable_name(name, rank, repeated=times[name] > 1): tensor
            for rank, group in ranks.items()
            for name, tensor in group.items()
        }
        none = dict.fromkeys((kit.DIMS_KEY, kit.ARRANGEMENT_KEY))
        custom = none | kit.arrangement_texts(draft, as_read)
        tensors = [list(group.values()) for group in ranks.values()]
        if multi_shard or (multi_shard is None and is_named):
            return _in_several(draft, shards, tensors, custom)
        text = metadata.write(draft.attrs, shards, {"payload": "tail", **custom})
        _check_i32(len(text), "metadata")
        version = written_string(draft.attrs.get("version") or "1.0.0")
        head = CHECKPOINT_MAGIC + version + I32.pack(len(text)) + text
        head += b"".join([written_block(shard.records or []) for shard in shards])
        offset = len(head)
        planned: list[PlannedPart] = []
        for shard, in_shard in zip(shards, tensors, strict=True):
            planned += place_parts(in_shard, shard.offsets, offset)
            offset += shard.file_size
        return Plan.headed(head, planned, offset)


def _is_named(path: str) -> bool:
    """Return whether a path ends in the suffix of metadata."""
    return kit.file_name(path).lower().endswith(METADATA_SUFFIX)


def variable_name(name: str, rank: int, *, repeated: bool) -> str:
    """Return a unique name for a tensor of a rank."""
    return f"{name}@rank_{rank}" if repeated or _RANK_SUFFIX.search(name) else name


# --- reading --------------------------------------------------------------------------------------


class _Checkpoint(NamedTuple):
    """The contents of a file: metadata, shards, and the position of the data."""

    version: str
    stated: Metadata
    payload: Payload
    shards: list[ListedShard]
    expected: Payload | None  # according to the metadata or the user
    unread_nbytes: int = 0  # after the last record


def _read_checkpoint(source: Readable, payload: Payload | None) -> _Checkpoint:
    cursor = NetCursor(source, len(CHECKPOINT_MAGIC))
    version = cursor.string("version")
    length = cursor.count("metadata")
    at = cursor.at
    stated = metadata.parse(cursor.take(length, "metadata"), at)
    marker = stated.custom_field("payload")
    expected = payload or next((p for p in get_args(Payload) if p == marker), None)
    # An empty list of shards has no meaning: upstream's own tests write such files.
    count = len(stated.shards) or None
    if expected is None:
        body = find_body(source, cursor.at, count, [shard.records for shard in stated.shards])
    else:
        reading = "none" if expected == "companion" else expected
        body = read_body(reading, source, cursor.at, count)
    if body.unread_nbytes and payload != "none":
        reason = f"{body.unread_nbytes} bytes follow the last record, but payload={expected!r}"
        raise FormatError(reason, offset=source.size - body.unread_nbytes, rule="Payload")
    listed: Sequence[ShardMetadata | None] = stated.shards or [None] * len(body.blocks)
    ranks = [shard.rank for shard in stated.shards]
    if len(set(ranks)) < len(body.blocks):
        ranks = list(range(len(body.blocks)))
    offsets = body.offsets or [[]] * len(body.blocks)
    shards = list(map(ListedShard, ranks, body.blocks, listed, offsets))
    return _Checkpoint(version, stated, body.reading, shards, expected, body.unread_nbytes)


def _read_metadata(source: Readable, payload: Payload | None) -> _Checkpoint:
    if payload not in {None, "none", "companion"}:
        raise ValueError(f"payload={payload!r}: the data of {METADATA_SUFFIX} are in other files")
    if source.size > _LARGEST_JSON:
        reason = f"the metadata have {source.size} bytes, more than {_LARGEST_JSON}"
        raise FormatError(reason, offset=0, rule="Metadata")
    stated = metadata.parse(bytes(source.read(0, source.size)), 0)
    fields, is_named = stated.fields.keys(), _is_named(source.name)
    # A file with the suffix must have fields that `detect` looks for; for others the user has named
    # the format, so that any field is enough.
    typical = _OWN_FIELDS if is_named else FIELDS
    if (fields or is_named) and fields.isdisjoint(typical):
        reason = "the file is not the metadata of a checkpoint: it has none of the fields "
        reason += ", ".join(typical)
        raise FormatError(reason, offset=0, rule="Metadata")
    shards = [ListedShard(shard.rank, shard.records or [], shard) for shard in stated.shards]
    if not shards and stated.records:
        shards = [ListedShard(0, stated.records)]
    if len({shard.rank for shard in shards}) < len(shards):
        raise FormatError("two shards have the same rank", offset=0, rule="Rank")
    for shard in shards:
        for name, times in Counter(record.name for record in shard.records).items():
            if times > 1:
                reason = f"{times} tensors of one shard have this name"
                raise FormatError(reason, offset=0, tensor=name, rule="DuplicateName")
    expected: Payload = "companion" if stated.shards and payload != "none" else "none"
    return _Checkpoint(stated.version, stated, "none", shards, expected)


def _look_for_data(
    source: Readable, shards: list[ListedShard], expected: Payload | None, warnings: list[str]
) -> tuple[Payload, list[ListedShard], dict[str, Shard]]:
    """Look for data in other files; shards without data get a problem."""
    if expected != "none":
        located, files, texts = look_beside(source, shards)
        if expected == "companion" or any(shard.file for shard in located):
            warnings += texts
            has_data = any(shard.problem is None for shard in located)
            return "companion" if has_data else "none", located, files
    reason, hint = "the checkpoint has names, types and shapes of tensors, but no values", None
    if expected != "none" and shards:
        names = candidates(source.name, shards[0].rank, shards[0].stated)
        hint = "The file with the values of the first shard is missing; it should be next to the "
        hint += f"checkpoint as {' or '.join(map(shown, names))}"
    problem = PayloadMissingError(reason, hint=hint)
    return "none", [shard._replace(problem=problem) for shard in shards], {}


def _warnings(stated: Metadata, shards: Sequence[ListedShard], unread_nbytes: int) -> list[str]:
    texts = [
        f"the metadata have the field {shown(name)} several times: the last counts"
        for name in dict.fromkeys(stated.repeated)
    ]
    if any(shard.checksum == MOVING for shard in stated.shards):
        texts.append(
            "saving the checkpoint was interrupted, or has not finished: it is complete, but its "
            "shards have temporary names that other readers do not find. Save it again"
        )
    count = stated.shard_count
    if not stated.shards and count not in {None, len(shards)}:
        texts.append(f"the metadata state {count} shards, but there are {len(shards)}")
    notes = kit.Notes()
    for number, shard in enumerate(shards):
        rank, listed = shard.rank, shard.stated
        if listed and listed.rank != rank:
            reason = f"have rank {listed.rank}, which another shard has too"
            texts.append(f"the metadata of shard {number} {reason}")
        if listed and listed.records and not same_tensors(listed.records, shard.records):
            texts.append(f"the metadata of shard {number} list other tensors than its records")
        for record in shard.records:
            if not record.fits:
                notes.add("the size is not what the shape makes", f"tensor {shown(record.name)}")
    texts += notes.warnings()
    if unread_nbytes:
        texts.append(f"{unread_nbytes} bytes follow the last record, and are not read")
    return texts


def _tensors(shards: Sequence[ListedShard]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint from the records of all shards."""
    times = Counter(record.name for shard in shards for record in shard.records)
    in_groups = len(times) < times.total()
    tensors = {}
    for shard in shards:
        attrs = {"rank": shard.rank}
        for number, record in enumerate(shard.records):
            name, dtype, shape, nbytes = record
            variable = variable_name(name, shard.rank, repeated=times[name] > 1)
            problem: CheckpointError | None = None if record.fits else record.size_error()
            if nbytes or problem:
                problem = shard.problem or problem
            parts = {}
            if not problem:
                has_data = shard.problem is None  # a tensor without elements needs none
                offset = shard.offsets[number] if has_data else 0
                file = shard.file if has_data else None
                parts = {"data": Part(dtype, shape, offset, nbytes, shard=file)}
            tensors[variable] = Tensor(
                variable,
                dtype,
                shape,
                parts,
                attrs=attrs if variable == name else {**attrs, "name": name},
                problem=problem,
                path=(f"rank_{shard.rank}", *name.split(".", _DEEPEST)) if in_groups else None,
            )
    return tensors


# --- writing --------------------------------------------------------------------------------------


def _ranks(draft: Draft) -> dict[int, dict[str, WantedTensor]]:
    """Group tensors by rank and by name in the shard, in the former order of the shards."""
    # Shards without tensors are included.
    stated = draft.attrs.get("shards")
    entries = stated if isinstance(stated, list) else []
    listed = [entry.get("rank", 0) for entry in entries if isinstance(entry, dict)]
    ranks: dict[int, dict[str, WantedTensor]] = {rank: {} for rank in listed if _is_i32(rank)}
    for tensor in draft.tensors.values():
        kit.check_text("the name", tensor.name, tensor.name)
        rank = tensor.attrs.get("rank", 0)
        if not _is_i32(rank):
            reason = f"the attribute rank is {rank!r}"
            hint = "Set it to an integer of 32 bits, or remove it"
            raise UnsupportedError(reason, tensor=tensor.name, rule="Rank", hint=hint)
        # The attribute is outdated if the variable was renamed.
        former = tensor.attrs.get("name")
        is_current = isinstance(former, str) and tensor.name == variable_name(
            former, rank, repeated=True
        )
        name = str(former) if is_current else tensor.name
        group = ranks.setdefault(rank, {})
        if group.setdefault(name, tensor) is not tensor:
            reason = f"another tensor of rank {rank} has the name {name!r}"
            hint = "Rename one of them, or remove its attribute 'name'"
            raise UnsupportedError(reason, tensor=tensor.name, rule="DuplicateName", hint=hint)
    return ranks or {0: {}}


def _is_i32(value: Any) -> bool:
    return type(value) is int and -_BOUND_I32 <= value < _BOUND_I32


def _in_several(
    draft: Draft,
    shards: Sequence[ShardMetadata],
    tensors: list[list[WantedTensor]],
    custom: Mapping[str, str | None],
) -> Plan:
    files, listed = {}, []
    for shard, group in zip(shards, tensors, strict=True):
        path = candidates(draft.path, shard.rank)[0]
        planned = place_parts(group, shard.offsets, HEADER.size)
        for part in planned:
            end = (part.offset or 0) - HEADER.size + part.part.nbytes
            _check_i32(end, f"the data of rank {shard.rank} up to here", part.tensor)
        head = HEADER.pack(SHARD_MAGIC, shard.rank, 0, len(group), shard.file_size)
        size = HEADER.size + shard.file_size
        files[path] = Plan.headed(head, planned, size)
        listed.append(shard._replace(file_path=path, file_size=size))

    def with_names(names: Mapping[str, str]) -> bytes:
        renamed = [
            shard
            if names[shard.file_path] == shard.file_path
            else shard._replace(file_path=names[shard.file_path], checksum=MOVING)
            for shard in listed
        ]
        return metadata.write(draft.attrs, renamed, {"payload": None, **custom})

    return plan_main_file(files, with_names)


def _check_i32(nbytes: int, label: str, tensor: str | None = None) -> None:
    if nbytes >= _BOUND_I32:
        hint = "Write several checkpoints"
        if tensor is not None:
            hint = "Write one .checkpoint, whose data have no such limit, or more ranks"
        reason = f"{label} have {nbytes} bytes, but their length has 31 bits"
        raise UnsupportedError(reason, tensor=tensor, rule="Length", hint=hint)
