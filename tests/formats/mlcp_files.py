"""A writer of small MLCP checkpoints for tests, valid or with any wrong statement."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    Shards = Sequence[Sequence["Tensor"]]

NUMBERS = {
    "Float16": 0,
    "Float32": 1,
    "Float64": 2,
    "Int8": 3,
    "Int16": 4,
    "Int32": 5,
    "Int64": 6,
    "UInt8": 7,
    "UInt16": 8,
    "UInt32": 9,
    "UInt64": 10,
    "Bool": 11,
    "BFloat16": 12,
}
NUMPY = {"Bool": "bool", "BFloat16": "bfloat16"} | {
    name: name.lower() for name in NUMBERS if name not in {"Bool", "BFloat16"}
}
_NAMES = {numpy: name for name, numpy in NUMPY.items()}


@dataclass(frozen=True)
class Tensor:
    """A tensor: its data, and fields of the file that contradict them."""

    name: str | bytes
    shape: Sequence[int]
    data: bytes
    dtype: str = "Float32"
    nbytes: int | None = None

    @property
    def stated_nbytes(self) -> int:
        """The size that the file gives."""
        return len(self.data) if self.nbytes is None else self.nbytes

    @property
    def record(self) -> bytes:
        """The record of the tensor in a checkpoint of one file."""
        name = self.name if isinstance(self.name, bytes) else self.name.encode()
        sizes = struct.pack(
            f"<i{len(self.shape)}qq", len(self.shape), *self.shape, self.stated_nbytes
        )
        return struct.pack("<i", len(name)) + name + string(self.dtype) + sizes

    def entry(self, offset: int) -> dict[str, Any]:
        """Give what metadata have of it."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dataType": NUMBERS[self.dtype],
            "offset": offset,
            "size": self.stated_nbytes,
        }


def tensor(name: str, array: np.ndarray, **stated: Any) -> Tensor:
    """Describe an array."""
    return Tensor(name, array.shape, array.tobytes(), _NAMES[array.dtype.name], **stated)


def string(text: str | bytes) -> bytes:
    """Write a text after its length in groups of 7 bits."""
    data = text if isinstance(text, bytes) else text.encode()
    remaining, length = len(data), bytearray()
    while remaining >= 0x80:
        length.append(remaining & 0x7F | 0x80)
        remaining >>= 7
    return bytes([*length, remaining]) + data


def shard_entry(
    tensors: Sequence[Tensor], rank: int, *, cumulative: bool = True, **stated: Any
) -> dict[str, Any]:
    """Describe a shard as metadata do."""
    entries: list[dict[str, Any]] = []
    offset = 0
    for tensor in tensors:
        entries.append(tensor.entry(offset if cumulative else 0))
        offset += len(tensor.data)
    entry = {"rank": rank, "filePath": "", "fileSize": 0, "tensors": entries, "checksum": None}
    return entry | stated


def fields(shards: Shards, /, **stated: Any) -> dict[str, Any]:
    """Make metadata with upstream's fields, in its order."""
    sharding = {
        "strategy": "fsdp",
        "shardCount": len(shards),
        "precision": "fp32",
        "strategySpecificInfo": {"zero_stage": 3},
    }
    return {
        "version": "1.0.0",
        "timestamp": "2024-01-08T12:30:45Z",
        "worldSize": len(shards),
        "ddpRank": 0,
        "sharding": sharding,
        "shards": [shard_entry(tensors, rank) for rank, tensors in enumerate(shards)],
        "training": None,
        "customFields": None,
        "format": None,
        "shardingStrategy": sharding,
        "tensorInfos": None,
    } | stated


def checkpoint(
    shards: Shards,
    /,
    payload: str = "none",
    *,
    metadata: dict[str, Any] | bytes | None = None,
    version: str | bytes = "1.0.0",
    tail: bytes = b"",
    **stated: Any,
) -> bytes:
    """Write a checkpoint in one file; `metadata` is JSON text or an object."""
    text = metadata
    if not isinstance(text, bytes):
        stated = fields(shards, **stated) if text is None else text
        text = json.dumps(stated, indent=2).encode()
    head = b"PCLM" + string(version) + struct.pack("<i", len(text)) + text
    return head + body(shards, payload) + tail


def body(shards: Shards, payload: str = "none") -> bytes:
    """Write the records, with the data as a reading has them."""
    written: list[bytes] = []
    payloads: list[bytes] = []
    for tensors in shards:
        written.append(struct.pack("<i", len(tensors)))
        for tensor in tensors:
            written.append(tensor.record)
            if payload == "inline":
                written.append(tensor.data)
        data = [tensor.data for tensor in tensors]
        if payload == "per_shard":
            written += data
        elif payload == "tail":
            payloads += data
    return b"".join(written + payloads)


def shard_file(
    tensors: Sequence[Tensor],
    rank: int = 0,
    *,
    checksum: str = "",
    count: int | None = None,
    width: int = 4,
    tail: bytes = b"",
) -> bytes:
    """Write the file of a shard."""
    data = b"".join(tensor.data for tensor in tensors)
    head = struct.pack("<ii", rank, len(checksum)) + checksum.encode()
    number = struct.pack("<i", len(tensors) if count is None else count)
    return b"RAHS" + head + number + len(data).to_bytes(width, "little") + data + tail


def write_set(folder: Path, shards: Shards, /, *, suffix: str = ".shard", **stated: Any) -> Path:
    """Write metadata ``m.metadata.json`` and the files of its shards, and return its path."""
    for rank, tensors in enumerate(shards):
        data = b"".join(tensor.data for tensor in tensors)
        content = shard_file(tensors, rank) if suffix == ".shard" else data
        (folder / f"m_shard_{rank}{suffix}").write_bytes(content)
    path = folder / "m.metadata.json"
    path.write_text(json.dumps(fields(shards, **stated), indent=2), "utf-8")
    return path
