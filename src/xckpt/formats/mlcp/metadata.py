"""The metadata of a checkpoint: JSON by the rules of System.Text.Json, with typed fields.

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

A tensor has ``name``, ``shape``, ``dataType`` (a number, or the name as in records), ``offset`` and
``size``. Everything may be absent, and everything except numbers may be null. Unknown fields are
ignored. Names of fields are case-sensitive; the last of equal names counts.

xckpt writes all of these fields, in the order in which upstream's classes declare them, and with
the bytes of System.Text.Json: indented, in ASCII, with escapes for characters that have a meaning
in HTML.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.formats.mlcp.records import DATA_TYPES, Record, ShardMetadata, check_shape, element_type

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEEPEST = 64
_NUMBERED = tuple(DATA_TYPES.values())
_NUMBERS = {dtype: number for number, dtype in enumerate(_NUMBERED)}
_PYTHON_TYPES = {"text": str, "object": dict, "array": list}
_LARGEST = {"int32": 1 << 31, "int64": 1 << 63}

#: Fields of the root, with their types.
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
# Fields with their types and defaults, in the order in which .NET declares them.
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
# Attributes that the reader adds to the fields of the metadata.
ADDED = ("payload", "metadata_json")
_FORMATS = ("single_file", "multishard")
# The syntax of System.Text.Json, which is stricter than Python's.
_TIMESTAMP = re.compile(
    r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d{1,16})?)?(Z|[+-](0\d|1[0-3]):[0-5]\d)?)?", re.ASCII
)


class Metadata(NamedTuple):
    """The metadata of a checkpoint: the text and its contents."""

    text: str
    fields: dict[str, Any]
    shards: list[ShardMetadata]  # may be empty
    records: list[Record]  # the second list of tensors, for all shards
    repeated: list[str]  # fields that occur several times

    @property
    def version(self) -> str:
        """The version of the format; "" if it is null, and the first version if it is absent."""
        return self.fields.get("version", "1.0.0") or ""

    @property
    def shard_count(self) -> int | None:
        """The stated number of shards, if any; the last of the two fields counts."""
        names = [name for name in self.fields if name in {"sharding", "shardingStrategy"}]
        count: int | None = (self.fields[names[-1]] or {}).get("shardCount") if names else None
        return count

    def custom_field(self, name: str) -> str | None:
        """Return a custom field; None if it is missing."""
        text: str | None = (self.fields.get("customFields") or {}).get(name)
        return text


# --- reading --------------------------------------------------------------------------------------


def parse(data: bytes, at: int) -> Metadata:
    """Parse metadata at offset `at` of a file."""
    repeated: list[str] = []
    shards: list[ShardMetadata] = []
    try:
        fields = kit.decode_json(data, "the metadata", deepest=_DEEPEST, repeated=repeated.append)
        _check_fields(fields)
        for number, value in enumerate(fields.get("shards") or ()):
            field = f"shards[{number}]"
            entry = _object(value, field)
            _check(entry, _SHARD, f"{field}.")
            listed = entry.get("tensors")
            records: list[Record] | None = None
            offsets: list[int] = []
            if listed is not None:
                records, offsets = _tensors(listed, f"{field}.tensors")
            path, size = entry.get("filePath") or "", entry.get("fileSize", 0)
            checksum = entry.get("checksum") or None
            rank = entry.get("rank", 0)
            shards.append(ShardMetadata(rank, records, offsets, path, size, checksum))
        all_records, _ = _tensors(fields.get("tensorInfos") or (), "tensorInfos")
    except FormatError as error:
        error.offset = at
        raise
    return Metadata(data.decode(), fields, shards, all_records, repeated)


def _check_fields(fields: Any) -> None:
    """Raise `FormatError` unless the fields have the types of upstream's classes."""
    if type(fields) is not dict:
        raise FormatError("the metadata are not a JSON object", rule="Metadata")
    _check(fields, FIELDS, "")
    for name, nested in _NESTED.items():
        types = {field: expected for field, (expected, _) in nested.items()}
        _check(fields.get(name) or {}, types, f"{name}.")
    custom = fields.get("customFields") or {}
    _check(custom, dict.fromkeys(custom, "text"), "customFields.")


def _check(fields: Mapping[str, Any], types: Mapping[str, str], prefix: str) -> None:
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
            raise _mistyped(prefix + name, expected, value)


def _tensors(values: Sequence[Any], field: str) -> tuple[list[Record], list[int]]:
    records, offsets = [], []
    for number, value in enumerate(values):
        entry_field = f"{field}[{number}]"
        entry = _object(value, entry_field)
        name, shape = entry.get("name", ""), entry.get("shape", [])
        if type(name) is not str:
            raise _mistyped(f"{entry_field}.name", "text", name)
        if type(shape) is not list or len(shape) > kit.MOST_AXES:
            raise _mistyped(f"{entry_field}.shape", f"at most {kit.MOST_AXES} integers", shape)
        nbytes, offset = entry.get("size", 0), entry.get("offset", 0)
        for integer in (*shape, nbytes, offset):
            if type(integer) is not int:
                raise _mistyped(f"{entry_field}: shape, size and offset", "integers", integer)
        dtype = entry.get("dataType", 0)
        is_number = type(dtype) is int and 0 <= dtype < len(_NUMBERED)
        dtype = _NUMBERED[dtype] if is_number else element_type(str(dtype), f"{entry_field}: the")
        with kit.locating(tensor=name):
            check_shape(dtype, shape, nbytes)
        records.append(Record(name, dtype, tuple(shape), nbytes))
        offsets.append(offset)
    return records, offsets


def _object(value: Any, field: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _mistyped(field, "object", value)
    return value


def _mistyped(field: str, expected: str, value: Any) -> FormatError:
    reason = f"the field {shown(field)}: expected {expected}, found {shown(str(value))}"
    return FormatError(reason, rule="Metadata")


# --- writing --------------------------------------------------------------------------------------


def write(
    attrs: Mapping[str, Any], shards: Sequence[ShardMetadata], custom: Mapping[str, str | None]
) -> bytes:
    """Encode metadata: the attributes of the source, with new shards and custom fields."""
    try:
        _check_fields(attrs)
        fields = _fields(attrs, shards, custom)
        text = to_json(fields)
        # Numbers as keys, tuples, and values that are nested too deep do not survive.
        if parse(text, 0).fields != fields:
            raise ValueError("they do not survive a round trip through JSON")  # noqa: TRY301
    except (FormatError, TypeError, ValueError, RecursionError) as error:
        reason = error.reason if isinstance(error, FormatError) else str(error)
        reason = f"the attributes cannot be written as metadata: {reason}"
        hint = "Correct or remove the attribute"
        raise UnsupportedError(reason, rule="Metadata", hint=hint) from error
    return text


def _fields(
    attrs: Mapping[str, Any], shards: Sequence[ShardMetadata], custom: Mapping[str, str | None]
) -> dict[str, Any]:
    # The last of the two names of sharding counts.
    names = [name for name in attrs if name in {"sharding", "shardingStrategy"}]
    sharding = _completed(attrs[names[-1]] if names else {}, _SHARDING)
    if sharding is not None:
        sharding["shardCount"] = len(shards)
    former = attrs.get("customFields")
    merged = {**(former or {}), **custom}
    texts = {name: text for name, text in merged.items() if name not in custom or text is not None}
    is_null = not texts and (former is None or custom.keys() & former.keys())
    form, infos = attrs.get("format", _FORMATS[0]), attrs.get("tensorInfos")
    has_files = any(shard.file_path for shard in shards)
    declared = {
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
        "customFields": None if is_null else texts,
        "format": _FORMATS[has_files] if form in _FORMATS else form,
        "shardingStrategy": sharding,
        "tensorInfos": infos and [entry for shard in shards for entry in _entries(shard)],
    }
    return declared | {key: attrs[key] for key in attrs if key not in {*declared, *ADDED}}


def _completed(
    value: Mapping[str, Any] | None, types: Mapping[str, tuple[str, Any]]
) -> dict[str, Any] | None:
    """Return declared fields in order, with defaults for missing ones, then unknown fields."""
    if value is None:
        return None
    declared = {name: value.get(name, default) for name, (_, default) in types.items()}
    return declared | {name: value[name] for name in value if name not in declared}


def _timestamp(value: str | None) -> str:
    if value is None:
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        if _TIMESTAMP.fullmatch(value):
            datetime.fromisoformat(re.sub(r"\.\d+", "", value))
            return value
    except ValueError:
        pass
    reason = f"the attribute timestamp is {shown(value)}, which upstream cannot parse"
    hint = "Write it like 2024-01-08T12:30:45Z, or remove it for the current time"
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


# Differences between .NET and Python: exponents begin with E, and all texts except the timestamp
# have more escapes. Most lines have neither.
_IS_UNLIKE = re.compile(r"[\\&'+<>`]|\de").search
_UNLIKE = re.compile(r'(?<=^  "timestamp": )("[^"]*")|"[^"\\]*(?:\\.[^"\\]*)*"|(?<=\d)e')
_ESCAPED = re.compile(r"\\u....|\\.|[&'+<>`]")


def to_json(value: Any) -> bytes:
    """Encode JSON with the bytes of .NET, with two spaces for each level."""
    lines = json.dumps(value, indent=2, allow_nan=False).split("\n")
    written = [_UNLIKE.sub(_as_net, line) if _IS_UNLIKE(line) else line for line in lines]
    return "\n".join(written).encode()


def _as_net(match: re.Match[str]) -> str:
    if match[0] == "e":
        return "E"
    return match[0] if match[1] else f'"{_ESCAPED.sub(_escape, match[0][1:-1])}"'


def _escape(match: re.Match[str]) -> str:
    text = match[0]
    if text.startswith("\\u"):
        return "\\u" + text[2:].upper()
    is_short = text.startswith("\\") and text != '\\"'
    return text if is_short else f"\\u{ord(text[-1]):04X}"
