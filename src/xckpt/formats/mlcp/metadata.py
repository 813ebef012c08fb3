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
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import FormatError, shown
from xckpt.formats.kit import decode_json
from xckpt.formats.mlcp.records import DATA_TYPES, MOST_AXES, Record, check_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FIELDS", "Metadata", "ShardMetadata", "check_fields", "parse"]

_DEEPEST = 64
_NUMBERED = tuple(DATA_TYPES.values())
_NUMBER = {"int32": 1 << 31, "int64": 1 << 63}

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
_SHARDING = {
    "strategy": "text",
    "shardCount": "int32",
    "precision": "text",
    "strategySpecificInfo": "object",
}
_TRAINING = {
    "epoch": "int32",
    "step": "int64",
    "learningRate": "number",
    "optimizerType": "text",
    "optimizerState": "object",
}
_SHARD = {
    "rank": "int32",
    "filePath": "text",
    "fileSize": "int64",
    "tensors": "array",
    "checksum": "text",
}
_PYTHON_TYPES = {"text": str, "object": dict, "array": list}


class ShardMetadata(NamedTuple):
    """What metadata say of a shard.

    Parameters
    ----------
    rank : int
        Of the process that wrote it.
    file_path : str
        Where it was written, empty if nowhere of its own.
    file_size : int
        Size of the file or of its data, 0 if not known.
    records : list of Record or None
        Its tensors, None where they are not listed.
    offsets : list of int
        Where the data of each begin, in the data of the shard.
    checksum : str
        Opaque; empty if there is none.
    """

    rank: int
    file_path: str
    file_size: int
    records: list[Record] | None
    offsets: list[int]
    checksum: str


class Metadata(NamedTuple):
    """The metadata of a checkpoint.

    Parameters
    ----------
    text : str
        As in the file.
    fields : dict
        The same, parsed.
    shards : list of ShardMetadata
        Empty where they are not listed.
    records : list of Record
        All tensors, where they are listed once more for all shards.
    repeated : list of str
        Names that an object has more than once.
    """

    text: str
    fields: dict[str, Any]
    shards: list[ShardMetadata]
    records: list[Record]
    repeated: list[str]

    @property
    def version(self) -> str:
        """Of the format; null is none, and absent is the first."""
        return self.fields.get("version", "1.0.0") or ""

    @property
    def shard_count(self) -> int | None:
        """How many shards there should be, if it is said; of the two places the last counts."""
        for name in reversed(self.fields):
            if name in {"sharding", "shardingStrategy"}:
                found: int | None = (self.fields[name] or {}).get("shardCount")
                return found
        return None

    @property
    def marker(self) -> str | None:
        """Where the data are, if it is said."""
        return self.custom_field("payload")

    def custom_field(self, name: str) -> str | None:
        """Return a custom field, if it is there."""
        found: str | None = (self.fields.get("customFields") or {}).get(name)
        return found


def parse(data: bytes, at: int) -> Metadata:
    """Parse metadata."""
    try:
        text, fields, repeated = _decoded(data)
        check_fields(fields)
        shards = _shards(fields)
        records, _ = _tensors(fields.get("tensorInfos") or (), "tensorInfos")
    except FormatError as error:
        error.offset = at
        raise
    return Metadata(text, fields, shards, records, repeated)


def _decoded(data: bytes) -> tuple[str, dict[str, Any], list[str]]:
    repeated: list[str] = []
    value = decode_json(data, "the metadata", deepest=_DEEPEST, repeated=repeated.append)
    if type(value) is not dict:
        raise FormatError("the metadata are no JSON object", rule="Metadata")
    return data.decode(), value, repeated


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check that the fields of metadata have the types that upstream's classes have."""
    _check(fields, FIELDS, "")
    for name in ("sharding", "shardingStrategy"):
        _check(fields.get(name) or {}, _SHARDING, f"{name}.")
    _check(fields.get("training") or {}, _TRAINING, "training.")
    custom = fields.get("customFields") or {}
    _check(custom, dict.fromkeys(custom, "text"), "customFields.")


def _shards(fields: Mapping[str, Any]) -> list[ShardMetadata]:
    shards = []
    for number, value in enumerate(fields.get("shards") or ()):
        where = f"shards[{number}]"
        entry = _object(value, where)
        _check(entry, _SHARD, f"{where}.")
        listed = entry.get("tensors")
        records, offsets = (None, []) if listed is None else _tensors(listed, f"{where}.tensors")
        shard = ShardMetadata(
            entry.get("rank", 0),
            entry.get("filePath") or "",
            entry.get("fileSize", 0),
            records,
            offsets,
            entry.get("checksum") or "",
        )
        shards.append(shard)
    return shards


def _tensors(values: Sequence[Any], where: str) -> tuple[list[Record], list[int]]:
    records, offsets = [], []
    for number, value in enumerate(values):
        record, offset = _tensor(value, f"{where}[{number}]")
        records.append(record)
        offsets.append(offset)
    return records, offsets


def _tensor(value: Any, where: str) -> tuple[Record, int]:
    entry = _object(value, where)
    name, shape = entry.get("name", ""), entry.get("shape", [])
    if type(name) is not str:
        raise _mistyped(f"{where}.name", "text", name)
    if type(shape) is not list or len(shape) > MOST_AXES:
        raise _mistyped(f"{where}.shape", f"at most {MOST_AXES} integers", shape)
    nbytes, offset = entry.get("size", 0), entry.get("offset", 0)
    for number in (*shape, nbytes, offset):
        if type(number) is not int:
            raise _mistyped(f"{where}: shape, size and offset", "integers", number)
    dtype = _dtype(entry.get("dataType", 0), where)
    try:
        check_shape(dtype, shape, nbytes)
    except FormatError as error:
        raise error.located(tensor=name) from None
    return Record(name, dtype, tuple(shape), nbytes), offset


def _dtype(value: Any, where: str) -> str:
    if type(value) is int and 0 <= value < len(_NUMBERED):
        return _NUMBERED[value]
    if type(value) is str and value in DATA_TYPES:
        return DATA_TYPES[value]
    reason = f"{where}: the data type {shown(str(value))} is not one of "
    raise FormatError(reason + ", ".join(DATA_TYPES), rule="DataType")


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
            bound = _NUMBER[expected]
            fits = type(value) is int and -bound <= value < bound
        if not fits:
            raise _mistyped(where + name, expected, value)


def _object(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _mistyped(where, "object", value)
    return value


def _mistyped(where: str, expected: str, value: Any) -> FormatError:
    reason = f"the field {shown(where)}: expected {expected}, found {shown(str(value))}"
    return FormatError(reason, rule="Metadata")
