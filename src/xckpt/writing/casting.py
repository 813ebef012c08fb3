"""Element types of what is written: which one is chosen, and conversions that tell what they lose.

``cast="exact"`` converts what comes out bit for bit when it is converted back, NaN and signs of
zeros included; ``"allow"`` rounds; ``"never"`` is exact, and replaces no type that a format does
not have by another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from xckpt.dtypes import ELEMENT_TYPES, stored_dtype
from xckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cast", "check_cast", "choose_type", "convert", "element_type"]

Cast = Literal["exact", "allow", "never"]

Array = np.ndarray[Any, np.dtype[Any]]


class _Float(NamedTuple):
    """Bits of the significand with the hidden one, exponents of the least and the largest value."""

    precision: int
    least: int
    largest: int


_FLOATS = {
    "float64": _Float(53, -1074, 1023),
    "float32": _Float(24, -149, 127),
    "float16": _Float(11, -24, 15),
    "bfloat16": _Float(8, -133, 127),
    "float8_e4m3fn": _Float(4, -9, 8),
    "float8_e4m3fnuz": _Float(4, -10, 7),
    "float8_e5m2": _Float(3, -16, 15),
    "float8_e5m2fnuz": _Float(3, -17, 15),
    "float8_e8m0fnu": _Float(1, -127, 127),
    "float4_e2m1fn": _Float(2, -1, 2),
}
# Exponent bits of the types whose NaN are those of IEEE 754: all payloads, and infinities.
_EXPONENT_BITS = {"float64": 11, "float32": 8, "float16": 5, "bfloat16": 8, "float8_e5m2": 5}
# The others hold no values but their own: they have no infinities, no zero, or two bits.
_WIDE = ("float64", "float32", "float16", "bfloat16")
_COMPLEX = {"complex128": "float64", "complex64": "float32"}
_BOOLEANS = ("bool", "bool32")
_INTEGERS = {
    f"{sign}int{bits}": (0, 2**bits) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    for bits in (8, 16, 32, 64)
    for sign in ("", "u")
}


def check_cast(cast: str) -> None:
    """Refuse what is no way to convert."""
    if cast not in get_args(Cast):
        raise ValueError(f"cast must be 'exact', 'allow' or 'never', not {cast!r}")


def element_type(dtype: np.dtype[Any]) -> str | None:
    """Name the element type of a numpy dtype."""
    name = dtype.name
    return name if name in ELEMENT_TYPES and dtype.names is None else None


def choose_type(name: str, writes: Sequence[str], cast: Cast, *, tensor: str) -> str:
    """Choose what element type a tensor is written as."""
    if name in writes:
        return name
    if cast != "never":
        holding = [other for other in writes if _holds(other, name)]
        if holding:
            return min(holding, key=lambda other: (_kind(other) != _kind(name), _bits(other)))
    if cast == "allow":
        alike = [other for other in writes if _kind(other) == _kind(name)]
        alike = alike or [other for other in writes if _kind(other) == "float"]
        if alike and _kind(name) != "complex":
            return max(alike, key=_bits)
    raise UnsupportedError(
        f"{name} elements have no place in this format, which has {', '.join(writes)}",
        tensor=tensor,
        rule="Dtype",
        hint=_hint(cast),
    )


def _hint(cast: Cast) -> str:
    if cast == "allow":
        return "Convert it with .astype(...), or leave it out"
    return "Convert it with .astype(...), or pass cast='allow' to lose some precision"


def _bits(name: str) -> int:
    return ELEMENT_TYPES[name].bits


def _kind(name: str) -> str:
    if name in _FLOATS:
        return "float"
    if name in _INTEGERS:
        return "integer"
    return "complex" if name in _COMPLEX else "bool"


def _holds(wide: str, narrow: str) -> bool:
    """Return whether every value of a type is one of another type."""
    if wide == narrow:
        return True
    if wide in _FLOATS and wide not in _WIDE:
        return False
    if wide in _COMPLEX:
        return _holds(_COMPLEX[wide], _COMPLEX.get(narrow, narrow))
    if narrow in _COMPLEX:
        return False
    if narrow in _BOOLEANS:
        return True
    if narrow in _INTEGERS:
        return _holds_integers(wide, *_INTEGERS[narrow])
    if wide not in _FLOATS:
        return False
    w, n = _FLOATS[wide], _FLOATS[narrow]
    return w.precision >= n.precision and w.least <= n.least and w.largest >= n.largest


def _holds_integers(wide: str, low: int, end: int) -> bool:
    if wide in _INTEGERS:
        return _INTEGERS[wide][0] <= low and end <= _INTEGERS[wide][1]
    return wide in _FLOATS and end <= 2 ** min(_FLOATS[wide].precision, _FLOATS[wide].largest)


def convert(
    values: Array, name: str, cast: Cast, *, tensor: str = "", origin: Sequence[int] = ()
) -> Array:
    """Convert a block of elements to another type.

    Parameters
    ----------
    values : numpy.ndarray
        Of any dtype that has an element type.
    name : str
        The wanted element type.
    cast : {"exact", "allow", "never"}
        What may be lost.
    tensor : str
        Which tensor it is a block of, for messages.
    origin : sequence of int
        Where the block begins in the tensor, for messages; by default at its start.

    Returns
    -------
    numpy.ndarray
        Of the type as it is stored, in little-endian order; `values` itself where nothing is to
        be done.

    Raises
    ------
    UnsupportedError
        If an element would not survive. Integers that are out of range never do.
    """
    values = np.asarray(values)  # what is selected of an array without axes is none
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
    if source is None or not _holds(name, source):
        lost = _lost(values, converted, name, cast)
        if lost.any():
            where = np.unravel_index(int(np.argmax(lost)), lost.shape)
            position = [int(i) + o for i, o in zip(where, origin or lost.ndim * [0], strict=True)]
            raise _lossy(f"element {position} is {values[where]}", name, cast, tensor)
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
    # Wrapped integers come back as they were.
    lost = _outside(values, name)
    if cast == "allow":
        return lost
    lost |= _differ(_converted(converted, values.dtype), values)
    if values.dtype.kind in "iu" and name in _FLOATS:
        # What is rounded up to the end of the range comes back clipped, or as anything else.
        lost |= converted.astype(np.float64) >= float(_INTEGERS[values.dtype.name][1])
    return lost


def _outside(values: Array, name: str) -> Array:
    """Return which elements are out of the range of an integer type."""
    if name not in _INTEGERS:
        return np.zeros(values.shape, bool)
    low, end = _INTEGERS[name]
    if values.dtype.kind not in "iub":
        values = np.rint(values.real.astype(np.float64))
    outside: Array = ~((values >= low) & (values < end))
    return outside


def _differ(a: Array, b: Array) -> Array:
    """Compare bit by bit."""
    if a.dtype.kind == "c":
        return _differ(a.real, b.real) | _differ(a.imag, b.imag)
    code = f"u{a.dtype.itemsize}"
    differ: Array = np.asarray(a.view(code) != b.view(code))
    return differ


def _lossy(what: str, name: str, cast: Cast, tensor: str) -> UnsupportedError:
    hint = "cast='allow' rounds; ds.drop_encoding() writes the values as they are"
    if cast == "allow":
        hint = "Convert it with .astype(...) first"
    reason = f"{what}, which {name} cannot hold"
    return UnsupportedError(reason, tensor=tensor, rule="Cast", hint=hint)
