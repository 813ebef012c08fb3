"""Rounding to smaller types, optionally after a scale and an offset."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.compiling import compiled
from xckpt.arrays.kinds import kind_named
from xckpt.elements import ELEMENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.typing import Array

#: Bits of the fraction of the types that numbers are rounded to.
FRACTION_BITS = {
    name: ELEMENT_TYPES[name].fraction_bits
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}
# Types that numbers are rounded to on the way, coarse ones first.
_COARSE = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32")
# Elements that quickly show that a type does not fit.
_PROBED = 32
_MOST_BETWEEN = 2


@dataclass(frozen=True, slots=True)
class Transform:
    """A function of numbers: ``scale * x + offset``, rounded to one type after the other."""

    scale: float = 1.0
    offset: float = 0.0
    types: tuple[str, ...] = ()

    def __call__(self, values: Array) -> Array:
        """Transform float32 or float64, and return one of these types."""
        if self.scale != 1.0 or self.offset:
            if values.dtype == np.float32 and self.types[:1] == ("float32",):
                moved = np.empty(len(values), np.float32)
                _move(np.ascontiguousarray(values), self.scale, self.offset, moved)
                values = moved
            else:
                values = values * np.float64(self.scale) + self.offset
        for name in self.types:
            # Results stay float64 only if they are rounded to that type.
            if values.dtype == np.float32 and name == "bfloat16":
                patterns = np.ascontiguousarray(values).view(np.uint32)
                values = np.empty(len(patterns), np.float32)
                _round_bfloat16(patterns, values.view(np.uint32))
            elif values.dtype == np.float32 and name in _SMALL:
                fine, values = np.ascontiguousarray(values), np.empty(len(values), np.float32)
                _round_small(fine, *_SMALL[name], values)
            else:
                values = values.astype(kind_named(name).dtype, copy=False)
                values = values if values.dtype.char in "fd" else values.astype(np.float32)
        return values


#: The identity.
UNCHANGED = Transform()


class _Rounding(NamedTuple):
    """Constants for rounding float32 to a type with a shorter fraction."""

    #: 1.5 times the number of float32 steps in one step of the type.
    scale: np.float32
    smallest_normal: np.float32
    largest: np.float32
    #: Result for larger numbers: infinity or NaN.
    beyond: np.float32


def _rounding(name: str) -> _Rounding:
    form = ELEMENT_TYPES[name].float_format
    if form is None:
        raise ValueError(f"{name} has no fractions")
    scale = 1.5 * 2.0 ** (FRACTION_BITS["float32"] - form.fraction_bits)
    beyond = np.inf if form.is_ieee else np.nan
    return _Rounding(*map(np.float32, (scale, form.smallest_normal, form.largest, beyond)))


_SMALL = {name: _rounding(name) for name in ("float16", "float8_e4m3fn", "float8_e5m2")}
_MAGNITUDE, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC00000)


@compiled
def _move(x: Any, scale: Any, offset: Any, out: Any) -> None:
    """Multiply and add in float64, and round to float32."""
    for i in range(x.size):
        out[i] = np.float32(np.float64(x[i]) * scale + offset)


@compiled
def _round_bfloat16(x: Any, out: Any) -> None:
    """Round the bits of float32 to the nearest bfloat16, and ties to even."""
    for i in range(x.size):
        bits = x[i]
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = (bits + half) & np.uint32(0xFFFF0000)
        out[i] = _NAN if bits & _MAGNITUDE > _INFINITY else rounded


@compiled
def _round_small(  # noqa: PLR0917
    x: Any, scale: Any, smallest: Any, largest: Any, beyond: Any, out: Any
) -> None:
    """Round float32 to the nearest number of a type, and larger numbers to `beyond`.

    Separate loops, because LLVM does not vectorise the steps together.
    """
    highest = np.float32(2.0**64)  # or the sum is infinite
    bits, powers = x.view(np.uint32), out.view(np.uint32)
    for i in range(x.size):
        powers[i] = bits[i] & _INFINITY
    for i in range(x.size):
        # Adding a much larger number leaves only the digits that the type has.
        large = min(max(out[i], smallest), highest) * scale
        out[i] = (x[i] + large) - large
    for i in range(x.size):
        out[i] = np.copysign(beyond, out[i]) if abs(out[i]) > largest else out[i]


def spacing_of(values: Array, name: str) -> Array:
    """Return the distance from each number to the next one of a type."""
    bits = FRACTION_BITS.get(name, 23)
    spacing: Array = np.ldexp(1.0, np.frexp(values)[1] - 1 - bits)
    return spacing


def is_lossy(source: str, kind: str) -> bool:
    """Return whether a type lacks numbers of another one: digits, or very small numbers."""
    ours, theirs = (ELEMENT_TYPES[name].float_format if name in FRACTION_BITS else None
                    for name in (source, kind))  # fmt: skip
    if ours is None or theirs is None:
        return True
    return theirs.fraction_bits < ours.fraction_bits or theirs.smallest > ours.smallest


def rounding_chains(y: Array, kinds: tuple[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield tuples of types to which numbers may have been rounded in turn."""
    yield ()
    source, kind = kinds
    bits = FRACTION_BITS.get(kind, 0)
    source_bits = FRACTION_BITS.get(source, 99)
    last: tuple[str, ...] = ()
    if (kind in FRACTION_BITS and is_lossy(source, kind)) or (
        "float" in kind and kind_named(kind).exact and kind != source
    ):
        last = (kind,)
        yield last
    finite = y[np.isfinite(y)]
    between = []
    for name in _COARSE:
        if FRACTION_BITS[name] < bits and is_lossy(source, name) and _has_only(finite, name):
            between.append(name)
            yield (name, *last)
    # An intermediate type shows in the direction in which ties were rounded.
    final = [last] if last else []
    for end in [*final, *[(name, *last) for name in between]]:
        coarsest = min(FRACTION_BITS.get(name, 0) for name in end)
        finer = [n for n in _COARSE if coarsest < FRACTION_BITS[n] < min(source_bits, 23)]
        for count in range(1, _MOST_BETWEEN + 1):
            for names in permutations(finer, count):
                yield (*names, *end)


def _has_only(finite: Array, name: str) -> bool:
    """Return whether a type represents all numbers exactly, and some are not zero."""
    dtype = kind_named(name).dtype
    start = finite[:_PROBED]
    if not np.array_equal(start.astype(dtype).astype(start.dtype), start):
        return False
    rounded = finite.astype(dtype).astype(finite.dtype)
    return bool(len(finite) and np.array_equal(rounded, finite) and np.any(finite))
