"""Bytes to elements: byte order, booleans, 4-bit codes, types that numpy cannot compute with."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from xckpt.elements import ELEMENT_TYPES, decoded_dtype, stored_dtype
from xckpt.errors import FormatError

__all__ = ["elements", "unpack_codes"]

Array = np.ndarray[Any, np.dtype[Any]]


def elements(
    data: memoryview, dtype: str, *, decode: bool, byteorder: str = "little", strict: bool = False
) -> Array:
    """Return the elements that bytes hold, as a flat array."""
    if dtype == "bool":
        return _booleans(np.frombuffer(data, np.uint8), strict=strict)
    stored = stored_dtype(dtype)
    if byteorder == "big":
        # The cast to native order copies, as it must.
        array = np.frombuffer(data, stored.newbyteorder(">")).astype(stored)
    else:
        array = np.frombuffer(data, stored)
    if decode and ELEMENT_TYPES[dtype].decoded != dtype:
        return _decoded(array, dtype, strict=strict)
    # Unaligned arrays are legal in numpy but slow everywhere and refused by compiled kernels.
    return array if array.flags.aligned else array.copy()


def _booleans(codes: Array, *, strict: bool) -> Array:
    if strict and codes.size and codes.max() > 1:
        where = int(np.argmax(codes > 1))
        raise FormatError(
            f"element {where} is {codes[where]}, but a boolean is 0 or 1", rule="LayoutData"
        )
    return np.not_equal(codes, 0)


def _decoded(array: Array, dtype: str, *, strict: bool) -> Array:
    if ELEMENT_TYPES[dtype].decoded == "bool":
        return _booleans(array, strict=strict)
    if dtype == "bfloat16":
        # bfloat16 is the upper half of a float32: a shift keeps every bit, NaN payloads too, and
        # is several times faster than ml_dtypes' element-wise cast.
        shifted: Array = np.left_shift(array.view(np.uint16), 16, dtype=np.uint32)
        return shifted.view(np.float32)
    return np.take(_float_table(dtype), array.view(np.uint8))


@cache
def _float_table(dtype: str) -> Array:
    """All values of an 8-bit (or unpacked 4-bit) float type, indexed by bit pattern."""
    count = 1 << ELEMENT_TYPES[dtype].bits
    codes = np.arange(count, dtype=np.uint8)
    table = codes.view(stored_dtype(dtype)).astype(decoded_dtype(dtype))
    if dtype == "float8_e5m2":
        # The only one of them whose NaN have payloads; ml_dtypes' cast gives all the same one.
        nan = np.isnan(table)
        bits = codes[nan].astype(np.uint32)
        table[nan] = ((bits & 0x80) << 24 | 0x7F800000 | (bits & 3) << 21).view(np.float32)
    return table


def unpack_codes(
    data: memoryview | Array, bits: int, *, word_bits: int = 8, msb_first: bool = False
) -> Array:
    """Unpack small codes that share little-endian words."""
    raw = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data
    words = raw.view(f"<u{word_bits // 8}")
    shifts = np.arange(word_bits // bits, dtype=words.dtype) * bits
    if msb_first:
        shifts = shifts[::-1]
    codes = (words[..., None] >> shifts) & words.dtype.type((1 << bits) - 1)
    unpacked: Array = codes.astype(np.uint8).reshape(*raw.shape[:-1], -1)
    return unpacked
