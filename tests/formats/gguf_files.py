"""GGUF files, written byte by byte."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def text(value: str | bytes) -> bytes:
    """Write a text as a value."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<IQ", 8, len(data)) + data


def listed(kind: int, entries: Sequence[bytes]) -> bytes:
    """Write a list as a value."""
    return struct.pack("<IIQ", 9, kind, len(entries)) + b"".join(entries)


def gguf_file(
    attrs: Mapping[str, bytes],
    tensors: Sequence[tuple[str, Sequence[int], int, int]],
    data: bytes,
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Write a file; a tensor is a name, extents (the fastest first), a type and an offset.

    Entries are given as in version 3; version 1 shortens their lengths, also those in values.
    """
    count = "<I" if version == 1 else "<Q"

    def number(value: int) -> bytes:
        return struct.pack(count, value & ((1 << 32) - 1 if version == 1 else (1 << 64) - 1))

    def value_of(value: bytes) -> bytes:
        if version > 1:
            return value
        kind = int.from_bytes(value[:4], "little")
        if kind == 8 and len(value) >= 12:
            return value[:8] + value[12:]
        if kind == 9 and value[4:8] == b"\x08\0\0\0":
            entries = value[16:]
            size = 8 + int.from_bytes(entries[:8], "little")  # all are of one length
            if size <= len(entries):
                results = [entries[at : at + size] for at in range(0, len(entries), size)]
                return value[:12] + b"".join([item[:4] + item[8:] for item in results])
        return value

    head = b"GGUF" + struct.pack("<I", version) + number(len(tensors)) + number(len(attrs))
    for key, value in attrs.items():
        head += number(len(key.encode())) + key.encode() + value_of(value)
    for name, extents, kind, offset in tensors:
        head += number(len(name.encode())) + name.encode() + struct.pack("<I", len(extents))
        head += b"".join(map(number, extents)) + struct.pack("<IQ", kind, offset)
    return head + bytes(-len(head) % alignment) + data
