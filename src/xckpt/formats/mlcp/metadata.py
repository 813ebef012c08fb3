"""The metadata of a checkpoint: JSON as System.Text.Json takes it, with fields of known types.

::

    version, timestamp, format                        text
    worldSize, ddpRank                                32-bit integers
    sharding, shardingStrategy (the same, twice)      strategy, shardCount, precision,
                                                      strategySpecificInfo (any)
    shards                                            list of: rank, filePath, fileSize, checksum,
                                                      tensors (list)
    training                                          epoch, step, learningRate, optimizerType,
                                                      optimizerState (any)
    customFields                                      text to text
    tensorInfos                                       list of tensors

A tensor has ``name``, ``shape``, ``dataType`` (a number, or the name that records have), ``offset``
and ``size``. All but numbers may be null, everything may be absent, and what is not known is
ignored. Names of fields are case-sensitive. Of equal names the last counts.

What is written has all of these fields, in the order in which upstream's classes declare them,
and is byte for byte what System.Text.Json writes: indented, in ASCII, with nothing in it that
HTML gives meaning.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.formats.mlcp.records import (
    DATA_TYPES,
    Record,
    ShardMetadata,
    check_shape,
    element_type,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEEPEST = 64
_NUMBERED = tuple(DATA_TYPES.values())
_NUMBERS = {dtype: number for number, dtype in enumerate(_NUMBERED)}
_PYTHON_TYPES = {"text": str, "object": dict, "array": list}
_LARGEST = {"int32": 1 << 31, "int64": 1 << 63}

#: Of the root, with their types.
FIELDS = {
    "version": "text",
    "timestamp": "text",
    "worldSize": "int32",
    "ddpRank": "int32",
    "sharding": "object",
    "shards": "array",
    "training": "object",
    "customFields": "object",
    "format": "text",
    "shardingStrategy": "object",
    "tensorInfos": "array",
}
# With what absent ones are, in the order in which .NET declares them.
_SHARDING: dict[str, tuple[str, Any]] = {
    "strategy": ("text", ""),
    "shardCount": ("int32", 0),
    "precision": ("text", ""),
    "strategySpecificInfo": ("object", {}),
}
_TRAINING: dict[str, tuple[str, Any]] = {
    "epoch": ("int32", 0),
    "step": ("int64", 0),
    "learningRate": ("number", 0),
    "optimizerType": ("text", None),
    "optimizerState": ("object", None),
}
_NESTED = {"sharding": _SHARDING, "shardingStrategy": _SHARDING, "training": _TRAINING}
_SHARD = {
    "rank": "int32",
    "filePath": "text",
    "fileSize": "int64",
    "tensors": "array",
    "checksum": "text",
}
# What reading adds to the fields of metadata.
ADDED = ("payload", "metadata_json")
_FORMATS = ("single_file", "multishard")
# As System.Text.Json takes it, which is stricter than Python.
_TIMESTAMP = re.compile(
    r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d{1,16})?)?(Z|[+-](0\d|1[0-3]):[0-5]\d)?)?", re.ASCII
)


class Metadata(NamedTuple):
    """The metadata of a checkpoint: the text and what it says.

    `shards` may be empty, and `records` are those that are listed once more for all shards.
    """

    text: str
    fields: dict[str, Any]
    shards: list[ShardMetadata]
    records: list[Record]
    repeated: list[str]

    @property
    def version(self) -> str:
        """The version of the format; null is none, and absent is the first."""
        return self.fields.get("version", "1.0.0") or ""

    @property
    def shard_count(self) -> int | None:
        """How many shards there should be, if it is said; of the two places the last counts."""
        names = [name for name in self.fields if name in {"sharding", "shardingStrategy"}]
        found: int | None = (self.fields[names[-1]] or {}).get("shardCount") if names else None
        return found

    def custom_field(self, name: str) -> str | None:
        """Return a custom field, if it is there."""
        found: str | None = (self.fields.get("customFields") or {}).get(name)
        return found


# --- reading --------------------------------------------------------------------------------------


def parse(data: bytes, at: int) -> Metadata:
    """Read metadata, which are at a byte of their file."""
    repeated: list[str] = []
    shards: list[ShardMetadata] = []
    try:
        what = "the metadata"
        fields = kit.decode_json(data, what, deepest=_DEEPEST, repeated=repeated.append)
        _check_fields(fields)
        for number, value in enumerate(fields.get("shards") or ()):
            where = f"shards[{number}]"
            entry = _object(value, where)
            _check(entry, _SHARD, f"{where}.")
            listed = entry.get("tensors")
            own, offsets = (None, []) if listed is None else _tensors(listed, f"{where}.tensors")
            path, size = entry.get("filePath") or "", entry.get("fileSize", 0)
            checksum = entry.get("checksum") or None
            shards.append(ShardMetadata(entry.get("rank", 0), own, offsets, path, size, checksum))
        records, _ = _tensors(fields.get("tensorInfos") or (), "tensorInfos")
    except FormatError as error:
        error.offset = at
        raise
    return Metadata(data.decode(), fields, shards, records, repeated)


def _check_fields(fields: Any) -> None:
    """Check that the fields of metadata have the types that upstream's classes have."""
    if type(fields) is not dict:
        raise FormatError("the metadata are not a JSON object", rule="Metadata")
    _check(fields, FIELDS, "")
    for name, known in _NESTED.items():
        types = {field: expected for field, (expected, _) in known.items()}
        _check(fields.get(name) or {}, types, f"{name}.")
    custom = fields.get("customFields") or {}
    _check(custom, dict.fromkeys(custom, "text"), "customFields.")


def _check(fields: Mapping[str, Any], types: Mapping[str, str], where: str) -> None:
    for name, expected in types.items():
        value = fields.get(name)
        if expected in _PYTHON_TYPES:
            fits = value is None or type(value) is _PYTHON_TYPES[expected]
        elif name not in fields:
            fits = True
        elif expected == "number":
            fits = type(value) in {int, float}
        else:
            bound = _LARGEST[expected]
            fits = type(value) is int and -bound <= value < bound
        if not fits:
            raise _mistyped(where + name, expected, value)


def _tensors(values: Sequence[Any], where: str) -> tuple[list[Record], list[int]]:
    records, offsets = [], []
    for number, value in enumerate(values):
        here = f"{where}[{number}]"
        entry = _object(value, here)
        name, shape = entry.get("name", ""), entry.get("shape", [])
        if type(name) is not str:
            raise _mistyped(f"{here}.name", "text", name)
        if type(shape) is not list or len(shape) > kit.MOST_AXES:
            raise _mistyped(f"{here}.shape", f"at most {kit.MOST_AXES} integers", shape)
        nbytes, offset = entry.get("size", 0), entry.get("offset", 0)
        for integer in (*shape, nbytes, offset):
            if type(integer) is not int:
                raise _mistyped(f"{here}: shape, size and offset", "integers", integer)
        dtype = entry.get("dataType", 0)
        is_number = type(dtype) is int and 0 <= dtype < len(_NUMBERED)
        dtype = _NUMBERED[dtype] if is_number else element_type(str(dtype), f"{here}: the")
        try:
            check_shape(dtype, shape, nbytes)
        except FormatError as error:
            raise error.located(tensor=name) from None
        records.append(Record(name, dtype, tuple(shape), nbytes))
        offsets.append(offset)
    return records, offsets


def _object(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _mistyped(where, "object", value)
    return value


def _mistyped(where: str, expected: str, value: Any) -> FormatError:
    reason = f"the field {shown(where)}: expected {expected}, found {shown(str(value))}"
    return FormatError(reason, rule="Metadata")


# --- writing --------------------------------------------------------------------------------------


def write(
    attrs: Mapping[str, Any], shards: Sequence[ShardMetadata], custom: Mapping[str, str | None]
) -> bytes:
    """Write what the source of a checkpoint had, the shards that there are now, and some fields."""
    try:
        _check_fields(attrs)
        fields = _fields(attrs, shards, custom)
        text = to_json(fields)
        # Numbers as keys, tuples, and what is nested too deep do not come back.
        if parse(text, 0).fields != fields:
            raise ValueError("something else would come back")  # noqa: TRY301
    except (FormatError, TypeError, ValueError, RecursionError) as error:
        reason = error.reason if isinstance(error, FormatError) else str(error)
        reason = f"the attributes cannot be metadata: {reason}"
        hint = "Correct or remove the attribute"
        raise UnsupportedError(reason, rule="Metadata", hint=hint) from error
    return text


def _fields(
    attrs: Mapping[str, Any], shards: Sequence[ShardMetadata], custom: Mapping[str, str | None]
) -> dict[str, Any]:
    # Of the two names of sharding the last counts.
    names = [name for name in attrs if name in {"sharding", "shardingStrategy"}]
    sharding = _completed(attrs[names[-1]] if names else {}, _SHARDING)
    if sharding is not None:
        sharding["shardCount"] = len(shards)
    given = attrs.get("customFields")
    kept = {**(given or {}), **custom}
    texts = {name: text for name, text in kept.items() if name not in custom or text is not None}
    is_none = not texts and (given is None or custom.keys() & given.keys())
    form, infos = attrs.get("format", _FORMATS[0]), attrs.get("tensorInfos")
    has_files = any(shard.file_path for shard in shards)
    known = {
        "version": attrs.get("version", "1.0.0"),
        "timestamp": _timestamp(attrs.get("timestamp")),
        "worldSize": attrs.get("worldSize", len(shards)),
        "ddpRank": attrs.get("ddpRank", 0),
        "sharding": sharding,
        "shards": [
            {
                "rank": shard.rank,
                "filePath": shard.file_path,
                "fileSize": shard.file_size,
                "tensors": _entries(shard),
                "checksum": shard.checksum,
            }
            for shard in shards
        ],
        "training": _completed(attrs.get("training"), _TRAINING),
        "customFields": None if is_none else texts,
        "format": _FORMATS[has_files] if form in _FORMATS else form,
        "shardingStrategy": sharding,
        "tensorInfos": infos and [entry for shard in shards for entry in _entries(shard)],
    }
    return known | {key: attrs[key] for key in attrs if key not in {*known, *ADDED}}


def _completed(
    value: Mapping[str, Any] | None, known_fields: Mapping[str, tuple[str, Any]]
) -> dict[str, Any] | None:
    """Return fields in their order, and those that are not known after them."""
    if value is None:
        return None
    known = {name: value.get(name, default) for name, (_, default) in known_fields.items()}
    return known | {name: value[name] for name in value if name not in known}


def _timestamp(value: str | None) -> str:
    if value is None:
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        if _TIMESTAMP.fullmatch(value):
            datetime.fromisoformat(re.sub(r"\.\d+", "", value))
            return value
    except ValueError:
        pass
    reason = f"the attribute timestamp is {shown(value)}: not a time that upstream takes"
    hint = "Write it like 2024-01-08T12:30:45Z, or remove it: the time is now then"
    raise UnsupportedError(reason, rule="Timestamp", hint=hint)


def _entries(shard: ShardMetadata) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "shape": list(shape),
            "dataType": _NUMBERS[dtype],
            "offset": offset,
            "size": nbytes,
        }
        for (name, dtype, shape, nbytes), offset in zip(
            shard.records or (), shard.offsets, strict=True
        )
    ]


# Where .NET writes something else than Python: an exponent begins with E, and all text but the
# date has more escapes. Most lines have nothing of that.
_IS_UNLIKE = re.compile(r"[\\&'+<>`]|\de").search
_UNLIKE = re.compile(r'(?<=^  "timestamp": )("[^"]*")|"[^"\\]*(?:\\.[^"\\]*)*"|(?<=\d)e')
_ESCAPED = re.compile(r"\\u....|\\.|[&'+<>`]")


def to_json(value: Any) -> bytes:
    """Write JSON as .NET does, with two spaces for each level."""
    lines = json.dumps(value, indent=2, allow_nan=False).split("\n")
    written = [_UNLIKE.sub(_as_net, line) if _IS_UNLIKE(line) else line for line in lines]
    return "\n".join(written).encode()


def _as_net(match: re.Match[str]) -> str:
    if match[0] == "e":
        return "E"
    return match[0] if match[1] else f'"{_ESCAPED.sub(_escape, match[0][1:-1])}"'


def _escape(match: re.Match[str]) -> str:
    found = match[0]
    if found.startswith("\\u"):
        return "\\u" + found[2:].upper()
    is_short = found.startswith("\\") and found != '\\"'
    return found if is_short else f"\\u{ord(found[-1]):04X}"
