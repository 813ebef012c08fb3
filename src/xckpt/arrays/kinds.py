"""Kinds of elements: the codes by which statistics count each element type, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.elements import ELEMENT_TYPES, ElementType, code_values, stored_dtype

if TYPE_CHECKING:
    from xckpt.typing import Array

# Bits of the sign, the exponent and seven bits of the fraction, of a float32 and a float64.
_FLOAT32_CODE_BITS, _FLOAT64_CODE_BITS = 16, 19


@dataclass(frozen=True)
class Kind:
    """An element type as statistics count it: by codes, which are the leading bits of elements."""

    #: A key of `xckpt.elements.ELEMENT_TYPES`.
    name: str
    #: Bits of an element. In memory, the remaining bits of its byte have no meaning.
    bits: int
    #: Bits of a code. Codes of small types are whole elements. Larger floats have codes of sign,
    #: exponent and seven bits of the fraction, and so have integers, after rounding to float64.
    code_bits: int
    #: Whether every code has a single value.
    exact: bool
    #: Whether elements are integers of 32 or 64 bits.
    integer: bool

    @cached_property
    def element(self) -> ElementType:
        """The row of the table of element types."""
        return ELEMENT_TYPES[self.name]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of elements in memory."""
        return stored_dtype(self.name)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element in memory."""
        return self.dtype.itemsize

    @cached_property
    def unsigned(self) -> np.dtype[Any]:
        """The dtype of bit patterns."""
        return np.dtype(f"u{self.itemsize}")

    @cached_property
    def is_float(self) -> bool:
        """True if elements are real floating-point numbers."""
        return self.element.kind == "float"

    @cached_property
    def has_negative_zero(self) -> bool:
        """True if the sign bit alone encodes a zero."""
        return self.element.zeros == 2

    @cached_property
    def has_zero(self) -> bool:
        """True if the pattern with no bit set encodes a zero."""
        return self.element.zeros > 0

    @cached_property
    def magnitude(self) -> int:
        """Mask of the bits that are all unset in a zero of either sign."""
        return (1 << (self.bits - 1 if self.has_negative_zero else self.bits)) - 1

    @cached_property
    def values(self) -> Array:
        """The value of each code of an exact kind, as float64."""
        return code_values(self.name)

    @cached_property
    def smallest_normal(self) -> float:
        """The smallest normal number; 0 for exact kinds and integers."""
        float_format = None if self.exact else self.element.float_format
        return 0.0 if float_format is None else float_format.smallest_normal

    @property
    def landmarks(self) -> Array:
        """The codes of 0.0, the smallest number, infinity and NaN; then the negative ones."""
        return _landmarks(self.code_bits)

    def middles(self, codes: Array) -> Array:
        """Return the middle of the numbers that share each code, for a kind that is not exact."""
        if self.name == "float32":
            return _float32_middles().take(codes, mode="wrap")
        patterns = codes.astype(np.uint64) << np.uint64(45) | np.uint64(1 << 44)
        # Codes up to 255 are single integers. Beyond, rounding the middle costs no accuracy.
        return np.trunc(patterns.view(np.float64)) if self.integer else patterns.view(np.float64)


@cache
def _landmarks(code_bits: int) -> Array:
    sign = 1 << (code_bits - 1)
    infinity = 0x7F80 if code_bits == _FLOAT32_CODE_BITS else 0x7FF << 7
    positive = (0, 1, infinity, infinity + 1)
    return np.array([*positive, *(sign + code for code in positive)], np.uint32)


@cache
def _float32_middles() -> Array:
    patterns = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(1 << 15)
    with np.errstate(invalid="ignore"):  # signalling NaN
        middles: Array = patterns.view(np.float32).astype(np.float64)
    return middles


@lru_cache(maxsize=256)
def kind_of(dtype: np.dtype[Any] | str) -> Kind | None:
    """Return the kind of the elements of an array; None if they are not real numbers."""
    name = dtype if isinstance(dtype, str) else dtype.name
    if not isinstance(dtype, str) and dtype.kind == "f" and dtype.itemsize > 8:
        name = "float64"  # extended precision occurs only in memory
    try:
        return kind_named(name)
    except KeyError:
        return None


def require_numbers(dtype: np.dtype[Any]) -> Kind:
    """Return the kind of real numbers, or of the magnitudes of complex ones; raise for others."""
    kind = kind_of(np.dtype(np.float64) if dtype.kind == "c" else dtype)
    if kind is None:
        raise TypeError(f"elements of type {dtype} are not numbers")
    return kind


def magnitudes(values: Array) -> Array:
    """Return the magnitudes of complex numbers as float64, where they do not overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        sizes: Array = np.abs(values.astype(np.complex128))
    return sizes


def prepared(values: Array, kind: Kind) -> Array:
    """Return values, or magnitudes, as the compiled loops need them: contiguous and writable."""
    dtype = kind.unsigned if kind.exact else kind.dtype
    if values.dtype != dtype:
        if values.dtype.kind == "c":
            values = magnitudes(values)
        elif kind.exact and values.dtype.itemsize == dtype.itemsize:
            values = values.view(dtype)
        else:
            values = values.astype(dtype)
    flags = values.flags
    if not (flags.c_contiguous and flags.aligned and flags.writeable):
        values = values.copy()
    if kind.bits < 8 and kind.dtype.kind == "V":
        values = values & np.uint8((1 << kind.bits) - 1)
    return values


@cache
def kind_named(name: str) -> Kind:
    """Return the kind of a type; raise KeyError unless arrays of real numbers can have it."""
    element = ELEMENT_TYPES[name]
    if element.kind == "complex" or element.carrier is not None:
        raise KeyError(name)
    if element.bits <= 16:
        code_bits = 8 * stored_dtype(name).itemsize
        return Kind(name, element.bits, code_bits, exact=True, integer=False)
    code_bits = _FLOAT32_CODE_BITS if name == "float32" else _FLOAT64_CODE_BITS
    is_integer = element.kind == "integer"
    return Kind(name, element.bits, code_bits, exact=False, integer=is_integer)
