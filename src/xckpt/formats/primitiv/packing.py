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
    """Write an integer, always in 5 bytes.

    Parameters
    ----------
    number : int
        From 0 to 2 to the 32nd - 1.

    Returns
    -------
    bytes
        Type byte and number.

    Examples
    --------
    >>> packed_uint32(1).hex()
    'ce00000001'
    """
    return pack(">BI", UINT32, number)


def packed_float32(number: float) -> bytes:
    """Write a number, always in 5 bytes.

    Parameters
    ----------
    number : float
        Rounded to the nearest float32.

    Returns
    -------
    bytes
        Type byte and number.

    Raises
    ------
    OverflowError
        If it is finite and no float32 is.
    """
    return pack(">Bf", FLOAT32, number)


def packed_length(kind: Kind, length: int) -> bytes:
    """Write the length that an object begins with, in the shortest form.

    Parameters
    ----------
    kind : Kind
        What begins.
    length : int
        Below 2 to the 32nd.

    Returns
    -------
    bytes
        Type byte and length.

    Examples
    --------
    >>> packed_length(ARRAY, 2).hex(), packed_length(ARRAY, 16).hex()
    ('92', 'dc0010')
    """
    if length < len(kind.short):
        return bytes([kind.short[length]])
    code, width = next((c, w) for c, w in kind.long.items() if length < 1 << 8 * w)
    return bytes([code]) + length.to_bytes(width, "big")


def packed_text(text: str) -> bytes:
    """Write a text.

    Parameters
    ----------
    text : str
        With lone surrogates for bytes that are not UTF-8.

    Returns
    -------
    bytes
        Length and text.

    Raises
    ------
    UnicodeEncodeError
        If it has other lone surrogates.
    """
    data = text.encode("utf-8", "surrogateescape")
    return packed_length(STR, len(data)) + data


def packed_shape(dims: Sequence[int], batch: int) -> bytes:
    """Write a Shape.

    Parameters
    ----------
    dims : sequence of int
        Without the trailing ones that are 1.
    batch : int
        Number of samples.

    Returns
    -------
    bytes
        An array and an integer.
    """
    numbers = b"".join(map(packed_uint32, (*dims, batch)))
    return packed_length(ARRAY, len(dims)) + numbers
