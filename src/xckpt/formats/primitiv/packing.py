"""MessagePack objects in the forms that primitiv's own writer gives them."""

from __future__ import annotations

from struct import pack
from typing import TYPE_CHECKING

from xckpt.formats.primitiv.scan import ARRAY, FLOAT32, STR, UINT32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.formats.primitiv.scan import Kind

__all__ = ["packed_float32", "packed_length", "packed_shape", "packed_text", "packed_uint32"]


def packed_uint32(number: int) -> bytes:
    """Write an integer, always in 5 bytes."""
    return pack(">BI", UINT32, number)


def packed_float32(number: float) -> bytes:
    """Write a number, always in 5 bytes."""
    return pack(">Bf", FLOAT32, number)


def packed_length(kind: Kind, length: int) -> bytes:
    """Write the length that an object begins with, in the shortest form."""
    if length < len(kind.short):
        return bytes([kind.short[length]])
    code, width = next((c, w) for c, w in kind.long.items() if length < 1 << 8 * w)
    return bytes([code]) + length.to_bytes(width, "big")


def packed_text(text: str) -> bytes:
    """Write a text."""
    data = text.encode("utf-8", "surrogateescape")
    return packed_length(STR, len(data)) + data


def packed_shape(dims: Sequence[int], batch: int) -> bytes:
    """Write a Shape."""
    numbers = b"".join(map(packed_uint32, (*dims, batch)))
    return packed_length(ARRAY, len(dims)) + numbers
