"""Writers of small zTensor files of every version, for tests.

A tensor is its entry in the manifest, with a `Stored` in place of each byte range. The writers lay
out the stored bytes and fill in the ranges.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cbor2
import pytest
import xxhash

from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

V0_MAGIC = b"ZTEN0001"
V1_MAGIC = b"ZTEN1000"
V2_MAGIC = b"\x89ZT2\r\n\x1a\n"


def read(data: bytes, name: str = "memory") -> Any:
    """Read the index of a file."""
    return formats.get("ztensor").read(CountingSource(data, name))


def error_of(data: bytes) -> FormatError:
    """Return the error of a malformed file; it has an offset."""
    with pytest.raises(FormatError) as caught:
        read(data)
    assert caught.value.offset is not None
    return caught.value


@dataclass
class Stored:
    """Bytes of a file, with the fields of the manifest that describe them."""

    data: bytes
    fields: dict[str, Any] = field(default_factory=dict)


def stored(data: bytes, **fields: Any) -> Stored:
    """Make a `Stored` with the fields of its component, part or entry."""
    return Stored(data, fields)


def v0_file(*entries: Mapping[str, Any]) -> bytes:
    """Write version 0.1; an entry has its `Stored` under ``data``."""
    heap = _Heap(V0_MAGIC, 64)
    placed = []
    for entry in entries:
        blob = entry["data"]
        offset = heap.add(blob.data)
        fields = {key: value for key, value in entry.items() if key != "data"}
        placed.append({**fields, "offset": offset, "size": len(blob.data), **blob.fields})
    return v0_container(cbor2.dumps(placed), heap.data)


def v1_file(tensors: Mapping[str, Any], **root: Any) -> bytes:
    """Write version 1.0, with the fields of the root given."""
    return v1_container(*_with_manifest(V1_MAGIC, {"version": "1.0", **root}, "tensors", tensors))


def v12_file(objects: Mapping[str, Any], **root: Any) -> bytes:
    """Write version 1.2, with the fields of the root given."""
    return v12_container(
        *_with_manifest(V1_MAGIC, {"version": "1.2.0", **root}, "objects", objects)
    )


def v2_file(objects: Mapping[str, Any], **root: Any) -> bytes:
    """Write version 2, with the fields of the root given."""
    heap = _Heap(V2_MAGIC, 4096)
    placed = _placed(
        objects, heap, lambda offset, blob: {"blob": [offset, len(blob.data)], **blob.fields}
    )
    return v2_container(cbor2.dumps({**root, "objects": placed}, canonical=True), heap.data)


def v0_container(manifest: bytes, body: bytes = V0_MAGIC) -> bytes:
    """Put a manifest in a file of version 0.1."""
    return body + manifest + struct.pack("<Q", len(manifest))


def v1_container(manifest: bytes, body: bytes = V1_MAGIC) -> bytes:
    """Put a manifest in a file of version 1.0."""
    return body + manifest + struct.pack("<Q", len(manifest))


def v12_container(manifest: bytes, body: bytes = V1_MAGIC) -> bytes:
    """Put a manifest in a file of version 1.1 or 1.2."""
    return body + manifest + struct.pack("<Q", len(manifest)) + V1_MAGIC


def v2_container(manifest: bytes, body: bytes = V2_MAGIC) -> bytes:
    """Put a manifest in a file of version 2, or append a generation to one."""
    body = _aligned(body, 4096)
    digest = xxhash.xxh3_64_intdigest(manifest)
    footer = struct.pack("<QQQII", len(body), len(manifest), digest, 2, 0)
    return body + manifest + footer + V2_MAGIC


def v2_data_shard(*blobs: bytes) -> bytes:
    """Write a shard without a manifest."""
    heap = _Heap(V2_MAGIC, 4096)
    for blob in blobs:
        heap.add(blob)
    return heap.data + struct.pack("<QQQII", 0, 0, 0, 2, 0) + V2_MAGIC


def dense_v1(data: bytes, shape: Sequence[int], dtype: str, **fields: Any) -> dict[str, Any]:
    """Describe a dense tensor for version 1.0."""
    return {
        "dtype": dtype,
        "shape": list(shape),
        "format": "dense",
        "components": {"data": stored(data, **fields)},
    }


def dense_v12(data: bytes, shape: Sequence[int], dtype: str, **fields: Any) -> dict[str, Any]:
    """Describe a dense tensor for versions 1.1 and 1.2."""
    return {
        "shape": list(shape),
        "format": "dense",
        "components": {"data": stored(data, dtype=dtype, **fields)},
    }


def dense_v2(data: bytes, shape: Sequence[int], dtype: str, **fields: Any) -> dict[str, Any]:
    """Describe a dense tensor for version 2."""
    return {
        "shape": list(shape),
        "layout": "dense",
        "parts": {"data": stored(data, dtype=dtype, **fields)},
    }


class _Heap:
    """Aligned blobs, one after the other."""

    def __init__(self, magic: bytes, alignment: int) -> None:
        self.data = magic
        self.alignment = alignment

    def add(self, blob: bytes) -> int:
        self.data = _aligned(self.data, self.alignment)
        offset = len(self.data)
        self.data += blob
        return offset


def _aligned(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def _with_manifest(
    magic: bytes, root: dict[str, Any], key: str, tensors: Mapping[str, Any]
) -> tuple[bytes, bytes]:
    heap = _Heap(magic, 64)
    placed = _placed(
        tensors,
        heap,
        lambda offset, blob: {"offset": offset, "length": len(blob.data), **blob.fields},
    )
    return cbor2.dumps({**root, key: placed}), heap.data


def _placed(value: Any, heap: _Heap, describe: Callable[[int, Stored], Any]) -> Any:
    if isinstance(value, Stored):
        return describe(heap.add(value.data), value)
    if isinstance(value, dict):
        return {key: _placed(item, heap, describe) for key, item in value.items()}
    return value
