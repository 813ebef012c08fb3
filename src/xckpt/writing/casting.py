"""Element types of what is written: which one is chosen, and conversions that tell what they lose.

``cast="exact"`` converts what comes out bit for bit when it is converted back, NaN and signs of
zeros included; ``"allow"`` rounds; ``"never"`` is exact, and replaces no type that a format does
not have by another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xckpt.elements import ELEMENT_TYPES, stored_dtype
from xckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cast", "convert", "element_type", "holds"]

Cast = Literal["exact", "allow", "never"]

Array = np.ndarray[Any, np.dtype[Any]]

# Exponent bits of the types whose NaN are those of IEEE 754: all payloads, and infinities.
_EXPONENT_BITS = {
    row.name: row.precision.exponent_bits
    for row in ELEMENT_TYPES.values()
    if row.kind == "float" and row.precision and row.precision.exponent_bits
}


def element_type(dtype: np.dtype[Any]) -> str | None:
    """Name the element type of a numpy dtype."""
    name = dtype.name
    return name if name in ELEMENT_TYPES and dtype.names is None else None


def holds(wide: str, narrow: str) -> bool:
    """Return whether every value of a type is one of another type."""
    w, n = ELEMENT_TYPES[wide], ELEMENT_TYPES[narrow]
    if wide == narrow:
        return True
    # The small ones hold no values but their own: they have no infinities, no zero, or two bits.
    if w.kind == "float" and (w.bits < 16 or wide not in _EXPONENT_BITS):
        return False
    if n.kind == "complex" and w.kind != "complex":
        return False
    if n.kind == "bool":
        return True
    if n.range is not None and w.range is not None:
        return w.range[0] <= n.range[0] and n.range[1] <= w.range[1]
    if w.precision is None:
        return False
    if n.range is not None:
        return n.range[1] <= 1 << min(w.precision.bits, w.precision.largest)
    return n.precision is not None and (
        w.precision.bits >= n.precision.bits
        and w.precision.least <= n.precision.least
        and w.precision.largest >= n.precision.largest
    )


def convert(
    values: Array, name: str, cast: Cast, *, tensor: str = "", origin: Sequence[int] = ()
) -> Array:
    """Convert a block of elements to another type; `values` itself where nothing is to be done.

    The result is of the type as it is stored, in little-endian order. An element that would not
    survive is an `UnsupportedError`, integers that are out of range always. `origin` is where the
    block begins in the `tensor`, for messages; by default at its start.
    """
    values = np.asarray(values)  # what is selected of an array without axes is a scalar
    native = values.dtype.newbyteorder("=")
    stored = stored_dtype(name)
    if native == stored:
        return _little(values)
    values = values.astype(native, copy=False)
    if name == "bfloat16" and native == np.float32:
        # The upper half of a float32; several times faster than ml_dtypes' cast and a check.
        codes = values.view(np.uint32)
        if not (codes & 0xFFFF).any():
            return _little((codes >> 16).astype(np.uint16).view(stored))
    converted = _converted(values, stored)
    source = element_type(native)
    if source is None or not holds(name, source):
        lost = _lost(values, converted, name, cast)
        if lost.any():
            where = np.unravel_index(int(np.argmax(lost)), lost.shape)
            position = [int(i) + o for i, o in zip(where, origin or lost.ndim * [0], strict=True)]
            hint = "cast='allow' rounds; ds.drop_encoding() writes the values as they are"
            if cast == "allow":
                hint = "Convert it with .astype(...) first"
            reason = f"element {position} is {values[where]}, which {name} cannot hold"
            raise UnsupportedError(reason, tensor=tensor, rule="Cast", hint=hint)
    return _little(converted)


def _little(values: Array) -> Array:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def _converted(values: Array, stored: np.dtype[Any]) -> Array:
    """Convert as numpy does, but round to integers, and keep the payloads of NaN."""
    if stored.kind == "c":
        converted = np.zeros(values.shape, stored)
        converted.real = _converted(values.real, converted.real.dtype)
        if values.dtype.kind == "c":
            converted.imag = _converted(values.imag, converted.imag.dtype)
        return converted
    if values.dtype.kind == "c":
        return _converted(values.real, stored)
    if stored.kind in "iu" and values.dtype.kind not in "iub":
        values = np.rint(values)
    with np.errstate(all="ignore"):
        converted = values.astype(stored)
    if values.dtype.name in _EXPONENT_BITS and stored.name in _EXPONENT_BITS:
        with np.errstate(invalid="ignore"):  # that of ml_dtypes warns of NaN
            nan = np.isnan(values)
        if nan.any():
            converted[nan] = _nan_like(values[nan], stored)
    return converted


def _nan_like(values: Array, stored: np.dtype[Any]) -> Array:
    """Return NaN of another type with the sign and the leading payload bits of these."""
    from_bits, to_bits = values.dtype.itemsize * 8, stored.itemsize * 8
    from_payload = from_bits - 1 - _EXPONENT_BITS[values.dtype.name]
    to_payload = to_bits - 1 - _EXPONENT_BITS[stored.name]
    codes = values.view(f"u{from_bits // 8}").astype(np.uint64)
    sign = codes >> np.uint64(from_bits - 1)
    payload = codes & np.uint64((1 << from_payload) - 1)
    if to_payload >= from_payload:
        payload <<= np.uint64(to_payload - from_payload)
    else:
        payload >>= np.uint64(from_payload - to_payload)
        payload[payload == 0] = 1 << (to_payload - 1)  # no payload at all would be infinity
    exponent = np.uint64(((1 << _EXPONENT_BITS[stored.name]) - 1) << to_payload)
    whole = (sign << np.uint64(to_bits - 1)) | exponent | payload
    nan: Array = whole.astype(f"u{to_bits // 8}").view(stored)
    return nan


def _lost(values: Array, converted: Array, name: str, cast: Cast) -> Array:
    """Return which elements are not what they must still be."""
    lost = np.zeros(values.shape, bool)
    limits = ELEMENT_TYPES[name].range
    if limits is not None:  # wrapped integers come back as they were
        rounded = values
        if values.dtype.kind not in "iub":
            rounded = np.rint(values.real.astype(np.float64))
        lost = ~((rounded >= limits[0]) & (rounded < limits[1]))
    if cast == "allow":
        return lost
    lost |= _differ(_converted(converted, values.dtype), values)
    if values.dtype.kind in "iu" and ELEMENT_TYPES[name].kind == "float":
        # What is rounded up to the end of the range comes back clipped, or as anything else.
        lost |= converted.astype(np.float64) >= float(np.iinfo(values.dtype).max + 1)
    return lost


def _differ(a: Array, b: Array) -> Array:
    """Compare bit by bit."""
    if a.dtype.kind == "c":
        return _differ(a.real, b.real) | _differ(a.imag, b.imag)
    code = f"u{a.dtype.itemsize}"
    differ: Array = np.asarray(a.view(code) != b.view(code))
    return differ
