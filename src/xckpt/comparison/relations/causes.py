"""Relations between numbers at the same places: one class for each kind of cause.

A relation derives `b` from `a`, or `a` from `b`, element by element. Each class suggests relations
from a sample, counts the elements for which they hold, and describes them in words:

=================  ===========================================================================
`Elementwise`      equal, rounded, offset, scaled, or pruned (zeros for some elements)
`Requantised`      a deterministic quantiser reproduces the numbers exactly
`WithinScales`     each element is within the distance that its block's stored scales allow
`Levelled`         each element is the nearest of the evenly spaced levels of its block
=================  ===========================================================================

All but the first are in `quantised_causes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.compiling import compiled
from xckpt.arrays.kinds import kind_named
from xckpt.elements import ELEMENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.typing import Array

# --- rounding -------------------------------------------------------------------------------------

#: Bits of the fraction of the types that numbers are rounded to.
FRACTION_BITS = {
    name: ELEMENT_TYPES[name].fraction_bits
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}
# Types that numbers are rounded to on the way, coarse ones first.
_COARSE = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32")
# Elements that quickly show that a type does not fit.
_PROBED_TYPES = 32
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
    start = finite[:_PROBED_TYPES]
    if not np.array_equal(start.astype(dtype).astype(start.dtype), start):
        return False
    rounded = finite.astype(dtype).astype(finite.dtype)
    return bool(len(finite) and np.array_equal(rounded, finite) and np.any(finite))


# --- relations ------------------------------------------------------------------------------------

#: Relations that hold for a smaller share of the elements are not reported.
LIKELY = 0.9

# The least number of elements from which an offset or a scale is inferred.
_FEWEST = 4
# Tolerance of a ratio, in steps of the type; generous, because the median is itself rounded.
_NEAR = 64
# Elements from which differences and ratios are estimated.
_PROBED = 256
# Number of rounding chains that are tried after an offset or a scale.
_MOVED_CHAINS = 4


@dataclass(frozen=True, slots=True)
class SampledPairs:
    """Pairs of numbers at sampled positions, and the names of their types."""

    x: Array
    y: Array
    kinds: tuple[str, str]
    #: The type of blocks that either side is stored in, if any.
    blocks: tuple[str, str] = ("", "")

    @property
    def reverse(self) -> SampledPairs:
        """The sample with its sides exchanged."""
        return replace(self, x=self.y, y=self.x, kinds=self.kinds[::-1], blocks=self.blocks[::-1])

    def first(self, most: int, block: int) -> tuple[Array, Array]:
        """Return the first elements of both sides, at most so many, in whole blocks."""
        size = min(len(self.x), most) // block * block
        return self.x[:size], self.y[:size]


class Relation:
    """A relation between the numbers of `a` and `b` at the same places."""

    __slots__ = ()
    #: Whether `a` is derived from `b`.
    backwards: bool
    #: Whether elements of the derived side may also be zero.
    masked = False
    #: Elements of a block, within which numbers depend on each other.
    block = 1
    #: The change of single numbers.
    transform = UNCHANGED

    @property
    def causes(self) -> tuple[str, ...]:
        """Names of the causes in the relation, in the order of `CAUSES`."""
        return ("quantised",)

    @property
    def sides(self) -> tuple[str, str]:
        """The side that numbers are derived from, and the derived side."""
        return ("b", "a") if self.backwards else ("a", "b")

    def count_matches(self, x: Array, y: Array) -> int:
        """Count the pairs, in whole blocks, for which `y` is derived from `x`."""
        raise NotImplementedError

    def count_in(self, x: Array, y: Array) -> int:
        """Count the pairs of elements of `a` and `b`, in whole blocks, that fit the relation."""
        return self.count_matches(y, x) if self.backwards else self.count_matches(x, y)

    def words(self, zeros: float) -> str:
        """Describe how one side derives from the other; `zeros` is the share of zeros in it."""
        raise NotImplementedError

    @property
    def done(self) -> str:
        """The change in a few words, such as "rounded to bfloat16"; empty for equal numbers."""
        return "quantised"


# --- element by element ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elementwise(Relation):
    """Each element of `b` is a transform of the same element of `a`, without new infinities."""

    transform: Transform
    masked: bool = False
    backwards: bool = False
    #: Whether the types are coarser than the type of the input.
    rounds: bool = False

    def count_matches(self, x: Array, y: Array) -> int:
        """Count the pairs for which the relation holds, NaN on both sides included."""
        expected = self.transform(x)
        same = expected == y
        if self.masked:
            same |= y == 0
        count = int(np.count_nonzero(same))
        if count < len(x):
            count += int(np.count_nonzero(np.isnan(x) & np.isnan(y)))
        extremes = [expected.min(initial=0.0), expected.max(initial=0.0)] if self.rounds else []
        if not all(map(math.isfinite, extremes)):
            count -= int(np.count_nonzero(same & np.isfinite(x) & ~np.isfinite(expected)))
        return count

    @property
    def causes(self) -> tuple[str, ...]:
        """Names of the causes in the relation, in the order of `CAUSES`."""
        transform = self.transform
        applies = {
            "offset": transform.offset,
            "scaled": transform.scale != 1.0,
            "pruned": self.masked,
            "rounded": self.rounds and transform.types,
        }
        return tuple([cause for cause, does_apply in applies.items() if does_apply])

    def words(self, zeros: float) -> str:
        """Describe how one side derives from the other; `zeros` is the share of zeros in it."""
        source, result = self.sides
        transform, text = self.transform, source
        if transform.offset:
            text = f"{source} {'-' if transform.offset < 0 else '+'} {abs(transform.offset):.9g}"
        if transform.scale != 1.0:
            text = f"{transform.scale:.9g} * {source}"
        types = list(transform.types)
        if text != source:
            # Omit the type of the computation unless the result has no coarser one.
            types = [name for name in types if name not in {"float32", "float64"}] or types[:1]
        if self.rounds and types:
            text += f" rounded to {' and then to '.join(types)}"
        if self.masked:
            share = f", which {percent(zeros)} of its elements are" if zeros else ""
            text += f" where {result} is not 0{share}"
        return f"{result} is {text}" if text != source else f"{result} is equal to {source}"

    @property
    def done(self) -> str:
        """The change in a few words, such as "rounded to bfloat16"; empty for equal numbers."""
        transform = self.transform
        facts = [f"{transform.offset:+.9g}"] if transform.offset else []
        facts += [f"* {transform.scale:.9g}"] if transform.scale != 1.0 else []
        facts += ["pruned"] if self.masked else []
        facts += [f"rounded to {transform.types[-1]}"] if "rounded" in self.causes else []
        return ", ".join(facts)

    @staticmethod
    def suspected(sample: SampledPairs) -> Iterator[tuple[float, Elementwise]]:  # noqa: C901  one search
        """Yield relations from `a` to `b`, each with the share of elements for which it holds."""
        x, y, kinds = sample.x, sample.y, sample.kinds
        chains = list(rounding_chains(y, kinds))
        has_zeros = bool(np.any((y == 0) & (x != 0)) and np.any(y))
        source = kinds[0] if kinds[0] in FRACTION_BITS else "float32"
        source = "float64" if kinds[1] == "float64" else source

        def shares(transform: Transform) -> Iterator[tuple[float, Elementwise]]:
            is_coarser = any(is_lossy(source, name) for name in transform.types)
            is_cast = transform.scale == 1.0 and not transform.offset and transform.types
            relation = Elementwise(transform, rounds=is_coarser or bool(is_cast))
            share = relation.count_matches(x, y) / len(x)
            yield share, relation
            if has_zeros and share < 1:
                masked = replace(relation, masked=True)
                yield masked.count_matches(x, y) / len(x), masked

        is_equal = False
        for types in chains:
            for share, relation in shares(Transform(types=types)):
                yield share, relation
                if share == 1.0 and not relation.masked:
                    # Of equal numbers, each coarse type fits: the whole tensor decides.
                    if types and (not is_equal or len(types) > 1):
                        return
                    # Elements outside the sample may have been rounded.
                    is_equal = True
        if is_equal:
            return
        used = np.isfinite(x) & np.isfinite(y)
        if has_zeros:
            used &= y != 0
        if np.count_nonzero(used) < _FEWEST:
            return
        u, v = x[used].astype(np.float64), y[used].astype(np.float64)
        for types in chains[:_MOVED_CHAINS]:
            # Libraries compute in float32 unless the numbers are float64.
            target_type = (kinds[1],) if kinds[1] in FRACTION_BITS else ()
            exact = types or target_type
            exact = exact if y.dtype == np.float64 else ("float32", *exact)
            coarsest = min(exact, key=lambda n: FRACTION_BITS[n], default="float64")
            spacing = spacing_of(v, coarsest)
            for c in offsets(u, v, spacing):
                yield from shares(Transform(1.0, c, exact))
            for s in scales(u, v, spacing):
                yield from shares(Transform(s, 0.0, exact))


def offsets(x: Array, y: Array, spacing: Array) -> list[float]:
    """Return candidates for an added number, from the elements that were rounded least."""
    few = y[:_PROBED] - x[:_PROBED]
    if np.mean(np.abs(few - np.median(few)) <= 2 * spacing[:_PROBED]) < 1 - LIKELY:
        return []  # hardly any two differences are alike
    at = np.argsort(spacing, kind="stable")[:_PROBED]
    difference = y[at] - x[at]
    middle = float(np.median(difference))
    if not middle or np.mean(np.abs(difference - middle) <= 2 * spacing[at]) < LIKELY:
        return []
    finest = float(difference[0])
    candidates = [round(middle, digits) for digits in range(9)]
    candidates += [float(f"{finest:.6g}"), finest, float(np.float32(finest)), middle]
    return [c for c in dict.fromkeys(candidates) if c and abs(c - middle) <= 2 * spacing[at].max()]


def scales(x: Array, y: Array, spacing: Array) -> list[float]:
    """Return candidates for a factor."""
    nonzero = np.flatnonzero(x)
    if len(nonzero) < _FEWEST or len(np.unique(np.abs(x[nonzero[:_PROBED]]))) < 2:
        return []
    few = nonzero[:_PROBED]
    middle = float(np.median(y[few] / x[few]))
    if middle in {0.0, 1.0} or not np.isfinite(middle):
        return []
    # Most ratios of unrelated numbers are far from the median.
    far = np.abs(y[few] / x[few] - middle) > _NEAR * (spacing[few] / 2 / np.abs(x[few]))
    if np.mean(far) > 1 - LIKELY:
        return []
    ratio = y[nonzero] / x[nonzero]
    error = spacing[nonzero] / 2 / np.abs(x[nonzero])
    at = np.argsort(error / np.abs(ratio), kind="stable")[:_PROBED]
    middle = float(np.median(ratio[at]))
    if np.mean(np.abs(ratio[at] - middle) <= 4 * error[at]) < LIKELY:
        return []
    close = np.abs(ratio - middle) <= 4 * error
    low = float(np.max((ratio - error)[close]))
    high = float(np.min((ratio + error)[close]))
    if low > high:
        low = high = middle
    return _scales_between(low, high)


def _scales_between(low: float, high: float) -> list[float]:
    """Return numbers in a narrow interval, those with few digits first."""
    middle = (low + high) / 2
    if not _SMALLEST < abs(middle) < 1 / _SMALLEST:
        return []
    slack = (high - low) / 2 + abs(middle) * 2**-50
    candidates = [float(f"{middle:.{digits}g}") for digits in range(1, 9)]
    candidates += [1 / float(f"{1 / middle:.{digits}g}") for digits in range(1, 5)]
    candidates = [s for s in candidates if abs(s - middle) <= slack][:2]
    narrow = np.float32(middle)
    candidates += [
        float(s) for s in (narrow, *(np.nextafter(narrow, np.float32(t)) for t in _ENDS))
    ]
    return [s for s in dict.fromkeys([*candidates, middle]) if s not in {0.0, 1.0}]


_ENDS = (-np.inf, np.inf)
_SMALLEST = 2.0**-100


def percent(share: float) -> str:
    """Format a share as a percentage."""
    text = f"{100 * share:.4g}"
    if text == "100" and share < 1:
        text = "more than 99.99"
    return f"{text} %"
