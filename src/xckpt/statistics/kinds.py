"""Kinds of elements: how they are counted, and which numbers the counted codes stand for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_NUMPY_NAMES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)

# Sign, exponent and seven bits of the fraction of a float64, as the upper half of a float32 has.
_WIDE_BITS = 19


@dataclass(frozen=True, slots=True)
class Kind:
    """How the elements of a type are counted."""

    #: Name of the type in numpy or ml_dtypes.
    name: str
    #: Bits of an element; below 8 the others of its byte mean nothing.
    bits: int
    #: Bits of a code: all bits of an element of 8 or 16 bits; sign, exponent and seven bits of the
    #: fraction of a larger one.
    code_bits: int
    #: Whether a code stands for one value.
    exact: bool
    #: Whether elements are integers of 32 or 64 bits.
    integer: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that blocks are given to the kernels in."""
        return _dtype(self.name)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in memory."""
        return self.dtype.itemsize

    @property
    def unsigned(self) -> np.dtype[Any]:
        """The type of bit patterns."""
        return np.dtype(f"u{self.itemsize}")

    @property
    def has_negative_zero(self) -> bool:
        """Whether the sign bit alone is a zero."""
        if not self.exact:
            return not self.integer
        return bool(self.values[1 << (self.bits - 1)] == 0)

    @property
    def has_zero(self) -> bool:
        """Whether a pattern without any bit is a zero; the scales of microscaling have none."""
        return not self.exact or bool(self.values[0] == 0)

    @property
    def magnitude(self) -> int:
        """The bits of a pattern of which none is set in a zero."""
        return (1 << (self.bits - 1 if self.has_negative_zero else self.bits)) - 1

    @property
    def values(self) -> Array:
        """The value of each code of an exact kind, as float64."""
        return _values(self.name)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with all bits of its fraction; 0 of a kind that has no other."""
        return 0.0 if self.exact or self.integer else _smallest_normal(self.name)

    @property
    def landmarks(self) -> Array:
        """The codes of 0.0, what is next to it, infinity, NaN; then of the same below zero."""
        return _landmarks(self.code_bits)

    def middles(self, codes: Array) -> Array:
        """Return the number in the middle of those with each code, of a kind that is not exact."""
        if self.name == "float32":
            middles: Array = _float32_middles().take(codes, mode="wrap")
            return middles
        patterns = codes.astype(np.uint64) << np.uint64(45) | np.uint64(1 << 44)
        return patterns.view(np.float64)


@cache
def _smallest_normal(name: str) -> float:
    return float(np.finfo(_dtype(name)).smallest_normal)


@cache
def _landmarks(code_bits: int) -> Array:
    sign, infinity = 1 << (code_bits - 1), 0x7F80 if code_bits == 16 else 0x7FF << 7
    half = (0, 1, infinity, infinity + 1)
    return np.array([*half, *(sign + code for code in half)], np.uint32)


@cache
def _float32_middles() -> Array:
    patterns = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(1 << 15)
    with np.errstate(invalid="ignore"):  # signalling NaN
        middles: Array = patterns.view(np.float32).astype(np.float64)
    return middles


def kind_of(dtype: np.dtype[Any]) -> Kind | None:
    """Find how the elements of an array are counted."""
    name = dtype.name
    if dtype.kind == "f" and dtype.itemsize > 8:
        name = "float64"  # the extended precision of this machine is no type of any file
    try:
        return kind_named(name)
    except KeyError:
        return None


def require_numbers(dtype: np.dtype[Any]) -> Kind:
    """Find how the elements of an array, or the magnitudes of complex ones, are counted."""
    kind = kind_of(np.dtype(np.float64) if dtype.kind == "c" else dtype)
    if kind is None:
        raise TypeError(f"elements of type {dtype} are not numbers")
    return kind


def magnitudes(values: Array) -> Array:
    """Return the magnitudes of complex numbers, which can leave the range of their own type."""
    with np.errstate(over="ignore", invalid="ignore"):
        sizes: Array = np.abs(values.astype(np.complex128))
    return sizes


@cache
def kind_named(name: str) -> Kind:
    """Find a kind by the name of its type."""
    dtype = _dtype(name)
    if name in {"float32", "float64", "int32", "int64", "uint32", "uint64"}:
        code_bits = 16 if name == "float32" else _WIDE_BITS
        return Kind(name, 8 * dtype.itemsize, code_bits, exact=False, integer=dtype.kind in "iu")
    return Kind(name, _bits(dtype), 8 * dtype.itemsize, exact=True, integer=False)


def _bits(dtype: np.dtype[Any]) -> int:
    if dtype.kind != "V" and dtype.name in _NUMPY_NAMES:
        return 8 * dtype.itemsize
    import ml_dtypes

    info = ml_dtypes.iinfo if "int" in dtype.name else ml_dtypes.finfo
    return int(info(dtype).bits)


@cache
def _dtype(name: str) -> np.dtype[Any]:
    if name in _NUMPY_NAMES:
        return np.dtype(name)
    import ml_dtypes

    extension = getattr(ml_dtypes, name, None)
    if not isinstance(extension, type):
        raise KeyError(name)
    return np.dtype(extension)


@cache
def _values(name: str) -> Array:
    dtype = _dtype(name)
    bits = 8 * dtype.itemsize
    codes = np.arange(1 << bits, dtype=f"u{dtype.itemsize}")
    if dtype.kind == "b":
        return np.minimum(codes, 1).astype(np.float64)
    # Of types with fewer bits than a byte the others do not count: ml_dtypes ignores them.
    with np.errstate(invalid="ignore"):  # signalling NaN
        return codes.view(dtype).astype(np.float64)
