"""The metadata of a new checkpoint: what its source had, and the shards that there are now."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats.mlcp.metadata import check_fields, parse
from xckpt.formats.mlcp.net_json import Verbatim, to_json
from xckpt.formats.mlcp.records import DATA_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.formats.mlcp.records import Record
    from xckpt.index import Tensor

__all__ = ["NewShard", "new_metadata"]

_NUMBERS = {dtype: number for number, dtype in enumerate(DATA_TYPES.values())}
# What reading adds to the fields of metadata.
_ADDED = ("payload", "metadata_json")
_FORMATS = ("single_file", "multishard")
# In the order in which .NET declares them, with what absent ones are.
_SHARDING = {"strategy": "", "shardCount": 0, "precision": "", "strategySpecificInfo": {}}
_TRAINING = {
    "epoch": 0,
    "step": 0,
    "learningRate": 0,
    "optimizerType": None,
    "optimizerState": None,
}
# As System.Text.Json takes it, which is stricter than Python.
_TIMESTAMP = re.compile(
    r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d{1,16})?)?(Z|[+-](0\d|1[0-3]):[0-5]\d)?)?", re.ASCII
)


class NewShard(NamedTuple):
    """A shard that is written.

    Parameters
    ----------
    rank : int
        Unique in the checkpoint.
    records : list of Record
        What is said of each tensor.
    tensors : list of Tensor
        The tensors, in the same order.
    file_path : str
        Name of a file of its own; empty if it has none.
    file_size : int
        Size of that file, or of the data.
    checksum : str or None
        Upstream's reader compares it with one inside of the file, and its verifier with one of the
        whole file: no checksum but none satisfies both.
    """

    rank: int
    records: list[Record]
    tensors: list[Tensor]
    file_path: str = ""
    file_size: int = 0
    checksum: str | None = None

    @property
    def offsets(self) -> list[int]:
        """Where the data of each tensor begin, in those of the shard."""
        return list(accumulate([record.nbytes for record in self.records], initial=0))[:-1]

    @property
    def nbytes(self) -> int:
        """Size of all data."""
        return sum([record.nbytes for record in self.records])


def new_metadata(
    attrs: Mapping[str, Any], shards: Sequence[NewShard], custom: Mapping[str, str | None]
) -> bytes:
    """Write metadata with the fields that upstream's classes have, in their order."""
    try:
        check_fields(attrs)
        fields = _fields(attrs, shards, custom)
        text = to_json(fields)
        # Numbers as keys, tuples, and what is nested too deep do not come back.
        if parse(text, 0).fields != fields:
            raise _unwritable("something else would come back")
    except (FormatError, TypeError, ValueError, RecursionError) as error:
        reason = error.reason if isinstance(error, FormatError) else str(error)
        raise _unwritable(reason) from error
    return text


def _unwritable(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"the attributes cannot be metadata: {reason}",
        rule="Metadata",
        hint="Correct or remove the attribute",
    )


def _fields(
    attrs: Mapping[str, Any], shards: Sequence[NewShard], custom: Mapping[str, str | None]
) -> dict[str, Any]:
    sharding = _sharding(attrs, len(shards))
    has_files = any(shard.file_path for shard in shards)
    infos = attrs.get("tensorInfos")
    known = {
        "version": attrs.get("version", "1.0.0"),
        "timestamp": _timestamp(attrs.get("timestamp")),
        "worldSize": attrs.get("worldSize", len(shards)),
        "ddpRank": attrs.get("ddpRank", 0),
        "sharding": sharding,
        "shards": [_shard(shard) for shard in shards],
        "training": _completed(attrs.get("training"), _TRAINING),
        "customFields": _custom_fields(attrs.get("customFields"), custom),
        "format": _format(attrs.get("format", _FORMATS[0]), has_files=has_files),
        "shardingStrategy": sharding,
        "tensorInfos": infos and [info for shard in shards for info in _tensors(shard)],
    }
    more = {key: attrs[key] for key in attrs if key not in {*known, *_ADDED}}
    return known | more


def _sharding(attrs: Mapping[str, Any], count: int) -> dict[str, Any] | None:
    """Complete what is known of sharding, of whose two names the last counts."""
    names = [name for name in attrs if name in {"sharding", "shardingStrategy"}]
    known = _completed(attrs[names[-1]] if names else {}, _SHARDING)
    return None if known is None else {**known, "shardCount": count}


def _completed(value: Mapping[str, Any] | None, absent: dict[str, Any]) -> dict[str, Any] | None:
    if value is None:
        return None
    known = {name: value.get(name, default) for name, default in absent.items()}
    return known | {name: value[name] for name in value if name not in known}


def _custom_fields(
    value: Mapping[str, Any] | None, custom: Mapping[str, str | None]
) -> dict[str, Any] | None:
    kept = {**(value or {}), **custom}
    found = {name: text for name, text in kept.items() if name not in custom or text is not None}
    return found or (None if value is None or custom.keys() & value.keys() else {})


def _format(value: str | None, *, has_files: bool) -> str | None:
    return _FORMATS[has_files] if value in _FORMATS else value


def _timestamp(value: str | None) -> Verbatim:
    if value is None:
        return Verbatim(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    if _TIMESTAMP.fullmatch(value) is None or not _is_a_time(value):
        raise UnsupportedError(
            f"the attribute timestamp is {shown(value)}: no time that upstream takes",
            rule="Timestamp",
            hint="Write it like 2024-01-08T12:30:45Z, or remove it: the time is now then",
        )
    return Verbatim(value)


def _is_a_time(value: str) -> bool:
    try:
        datetime.fromisoformat(re.sub(r"\.\d+", "", value))
    except ValueError:
        return False
    return True


def _shard(shard: NewShard) -> dict[str, Any]:
    return {
        "rank": shard.rank,
        "filePath": shard.file_path,
        "fileSize": shard.file_size,
        "tensors": _tensors(shard),
        "checksum": shard.checksum,
    }


def _tensors(shard: NewShard) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "shape": list(shape),
            "dataType": _NUMBERS[dtype],
            "offset": offset,
            "size": nbytes,
        }
        for (name, dtype, shape, nbytes), offset in zip(shard.records, shard.offsets, strict=True)
    ]
