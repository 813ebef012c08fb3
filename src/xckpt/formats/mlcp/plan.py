"""Where each byte of a new checkpoint goes: one file, or metadata and a file for each shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from struct import pack
from typing import TYPE_CHECKING, Any

from xckpt.elements import nbytes_of
from xckpt.errors import UnsupportedError
from xckpt.formats.kit import DIMS_KEY, dims_text
from xckpt.formats.mlcp.companions import (
    CHECKPOINT_MAGIC,
    METADATA_SUFFIX,
    MOVING,
    SHARD_MAGIC,
    candidates,
)
from xckpt.formats.mlcp.cursor import written_string
from xckpt.formats.mlcp.new_metadata import NewShard, new_metadata
from xckpt.formats.mlcp.records import DATA_TYPES, Record, written_block
from xckpt.formats.mlcp.tensors import variable_name
from xckpt.plan import Extent, Literal, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.index import Index, Tensor

__all__ = ["FILE_ATTRS", "TENSOR_ATTRS", "WRITES", "plan"]

#: All that have a name. Of equally wide ones that hold a value the first is better.
WRITES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    *(dtype for dtype in DATA_TYPES.values() if "float" not in dtype),
)
TENSOR_ATTRS = ("rank", "name")
FILE_ATTRS = None

_BOUND_I32 = 1 << 31
# Magic, rank, length of an empty checksum, number of tensors, length of the data.
_SHARD_HEADER = 20


def plan(index: Index, *, multi_shard: bool | None = None) -> Plan:
    """Plan a checkpoint."""
    is_named = index.source.lower().endswith(METADATA_SUFFIX)
    if multi_shard and not is_named:
        raise ValueError(
            f"multi_shard=True: the file to be opened is a PREFIX{METADATA_SUFFIX}, "
            f"not {index.source!r}"
        )
    shards = _shards(index)
    dims = dims_text(_as_read(shards))
    if multi_shard or (multi_shard is None and is_named):
        return _in_several(index, shards, dims)
    return _in_one(index, shards, dims)


def _shards(index: Index) -> list[NewShard]:
    """Group tensors by rank, in the order of the shards that the source had."""
    grouped: dict[int, dict[str, Tensor]] = {rank: {} for rank in _listed_ranks(index.attrs)}
    for tensor in index.tensors.values():
        _check(tensor)
        rank = tensor.attrs.get("rank", 0)
        name = _own_name(tensor, rank)
        group = grouped.setdefault(rank, {})
        if group.setdefault(name, tensor) is not tensor:
            reason = f"another tensor of rank {rank} has the name {name!r}"
            hint = "Rename one of them, or remove its attribute 'name'"
            raise UnsupportedError(reason, tensor=tensor.name, rule="DuplicateName", hint=hint)
    return [_shard(rank, group) for rank, group in (grouped or {0: {}}).items()]


def _listed_ranks(attrs: Mapping[str, Any]) -> list[int]:
    """Return the ranks of shards that the attributes list, also of those without tensors."""
    listed = attrs.get("shards")
    entries = listed if isinstance(listed, list) else []
    ranks = [entry.get("rank", 0) for entry in entries if isinstance(entry, dict)]
    return [rank for rank in ranks if _is_i32(rank)]


def _is_i32(value: Any) -> bool:
    return type(value) is int and -_BOUND_I32 <= value < _BOUND_I32


def _check(tensor: Tensor) -> None:
    name = tensor.name
    if tensor.layout != "dense":
        reason, rule = f"the layout {tensor.layout!r}: MLCP has dense tensors only", "Layout"
        hint = "Convert it to a dense array, or leave it out"
    elif tensor.dtype not in WRITES:
        reason, rule = f"{tensor.dtype} values: MLCP has no such type", "DataType"
        hint = f"Convert it to one of {', '.join(WRITES)} before, or leave it out"
    elif not _is_i32(tensor.attrs.get("rank", 0)):
        reason, rule = f"the attribute rank is {tensor.attrs['rank']!r}", "Rank"
        hint = "Make it an integer of 32 bits, or remove it"
    elif any("\ud800" <= character <= "\udfff" for character in name):
        reason, rule = "half of a surrogate pair in the name is no text", "Name"
        hint = "Rename it"
    else:
        return
    raise UnsupportedError(reason, tensor=name, rule=rule, hint=hint)


def _own_name(tensor: Tensor, rank: int) -> str:
    """Return the name that a tensor has in its shard, unless its variable was renamed since."""
    name = tensor.attrs.get("name")
    is_that = isinstance(name, str) and tensor.name == variable_name(name, rank, repeated=True)
    return str(name) if is_that else tensor.name


def _shard(rank: int, tensors: Mapping[str, Tensor]) -> NewShard:
    records = [
        Record(name, tensor.dtype, tensor.shape, nbytes_of(tensor.dtype, tensor.size))
        for name, tensor in tensors.items()
    ]
    return NewShard(rank, records, list(tensors.values()))


def _as_read(shards: Sequence[NewShard]) -> dict[str, Tensor]:
    """Return all tensors under the names of the variables that reading makes of them."""
    times = Counter(record.name for shard in shards for record in shard.records)
    return {
        variable_name(record.name, shard.rank, repeated=times[record.name] > 1): tensor
        for shard in shards
        for record, tensor in zip(shard.records, shard.tensors, strict=True)
    }


def _in_one(index: Index, shards: Sequence[NewShard], dims: str | None) -> Plan:
    shards = [shard._replace(file_size=shard.nbytes) for shard in shards]
    custom = {"payload": "tail", DIMS_KEY: dims}
    metadata = new_metadata(index.attrs, shards, custom)
    _check_i32(len(metadata), "metadata")
    head = [
        CHECKPOINT_MAGIC,
        written_string(index.attrs.get("version") or "1.0.0"),
        pack("<i", len(metadata)),
        metadata,
        *(written_block(shard.records) for shard in shards),
    ]
    written = b"".join(head)
    offset = len(written)
    extents: list[Extent] = []
    for shard in shards:
        extents += _extents(shard, offset)
        offset += shard.nbytes
    return Plan((Literal(0, written),), tuple(extents), nbytes=offset)


def _in_several(index: Index, shards: Sequence[NewShard], dims: str | None) -> Plan:
    shards = [
        shard._replace(
            file_path=candidates(index.source, shard.rank)[0],
            file_size=_SHARD_HEADER + shard.nbytes,
        )
        for shard in shards
    ]

    def renamed(names: Mapping[str, str]) -> Plan:
        moving = [s._replace(file_path=names[s.file_path], checksum=MOVING) for s in shards]
        return _metadata(index, moving, dims)

    companions = {shard.file_path: _shard_file(shard) for shard in shards}
    return replace(_metadata(index, shards, dims), companions=companions, renamed=renamed)


def _metadata(index: Index, shards: Sequence[NewShard], dims: str | None) -> Plan:
    metadata = new_metadata(index.attrs, shards, {"payload": None, DIMS_KEY: dims})
    return Plan((Literal(0, metadata),), (), nbytes=len(metadata))


def _shard_file(shard: NewShard) -> Plan:
    for extent in _extents(shard, 0):
        end = (extent.offset or 0) + extent.part.nbytes
        _check_i32(end, f"the data of rank {shard.rank} up to here", extent.tensor)
    numbers = pack("<iiii", shard.rank, 0, len(shard.records), shard.nbytes)
    return Plan(
        (Literal(0, SHARD_MAGIC + numbers),),
        tuple(_extents(shard, _SHARD_HEADER)),
        nbytes=shard.file_size,
    )


def _extents(shard: NewShard, start: int) -> list[Extent]:
    return [
        Extent(tensor.name, "data", tensor.parts["data"], start + offset)
        for tensor, offset in zip(shard.tensors, shard.offsets, strict=True)
    ]


def _check_i32(nbytes: int, what: str, tensor: str | None = None) -> None:
    if nbytes >= _BOUND_I32:
        raise UnsupportedError(
            f"{what} have {nbytes} bytes, but their length has 31 bits",
            tensor=tensor,
            rule="Length",
            hint="Write one .checkpoint, whose data have no such limit, or more ranks"
            if tensor is not None
            else "Write several checkpoints",
        )
