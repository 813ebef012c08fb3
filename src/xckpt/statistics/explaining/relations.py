"""What may hold of each pair of elements: rounding, ``+ c``, ``* s``, zeros, levels of codes.

A few elements say what may hold; whether it does is found out from all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.compiling import compiled, inlined, within
from xckpt.statistics.accumulate import Accumulator
from xckpt.statistics.comparison import as_floats
from xckpt.statistics.explaining.fingerprints import Transform
from xckpt.statistics.kinds import kind_named
from xckpt.statistics.moments import LEAF
from xckpt.statistics.pairs import ChunkedPair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.statistics.pairs import PairReader

Array = np.ndarray[Any, np.dtype[Any]]

#: Kinds whose numbers are not all float64.
INEXACT = frozenset({"int64", "uint64", "complex128"})
#: A relation that holds for fewer of the elements is not worth a word.
LIKELY = 0.9

# Types that numbers are rounded to on the way, coarse ones first.
_COARSE = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
FRACTION_BITS = {
    "float64": 52,
    "float32": 23,
    "float16": 10,
    "bfloat16": 7,
    "float8_e4m3fn": 3,
    "float8_e5m2": 2,
}
_SAMPLED = 4 * LEAF
# Fewer say nothing about a number that was found from them.
_FEWEST = 4
# In steps of the type: the median of ratios is one of them, and itself rounded.
_NEAR = 64
_PIECE = 1 << 16
# Of the sample, to rule relations out; and the relations that are tried on all of it.
_FEW = 2048
_TRIED = 8
_LOOKED_AT = 32
# Elements whose difference, or ratio, is looked at.
_PROBED = 256
_BLOCKS = (256, 128, 64, 32, 16)
# Of the sample, to find the blocks.
_LEVELLED = 4096
# Large blocks are preferred to small ones that fit little better.
_BETTER = 0.005


@dataclass(frozen=True, slots=True)
class Relation:
    """Each element of `b` is what a transform makes of that of `a`."""

    transform: Transform
    #: Or it is zero.
    masked: bool = False
    #: It is `a` that is made of `b`.
    backwards: bool = False
    #: Or it is the nearest of evenly spaced levels, in blocks of so many elements.
    block: int = 0
    #: Bits of the fraction that the levels are stored with.
    digits: int = 21
    #: Whether the types are coarser than that of what is transformed.
    rounds: bool = False

    def held(self, x: Array, y: Array) -> int:
        """Return of how many pairs it holds: of equal numbers, and of NaN."""
        if self.backwards:
            x, y = y, x
        if self.block:
            # The loop is compiled for one type, not for all pairs of them.
            x, y = (np.ascontiguousarray(each, np.float64) for each in (x, y))
            levelled: int = _count_levels(x, y, self.block, 2.0**-self.digits)
            return levelled
        x = self.transform(x)
        same = x == y
        if self.masked:
            same |= y == 0
        count = int(np.count_nonzero(same))
        if count < len(x):
            count += int(np.count_nonzero(np.isnan(x) & np.isnan(y)))
        return count


class Evidence(Accumulator):
    """For how many pairs each of some relations holds."""

    def __init__(self, kinds: tuple[str, str], relations: tuple[Relation, ...]) -> None:
        self.kinds = kinds
        self.relations = relations
        self.count = 0
        self.held = np.zeros(len(relations), np.int64)
        #: How many elements are zeros that are made of others.
        self.zeros = 0

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> Evidence:
        """Return one for pairs of elements; the argument is the relations."""
        return cls(reader.kinds, argument)

    def update(self, start: int, values: Any) -> None:
        """Add pairs."""
        sides = [values[name] for name in "ab"]
        self.count += len(sides[0])
        for at in range(0, len(sides[0]), _PIECE):
            x, y = (
                as_floats(side[at : at + _PIECE], kind)
                for side, kind in zip(sides, self.kinds, strict=True)
            )
            if any(relation.masked for relation in self.relations):
                made = x if self.relations[0].backwards else y
                self.zeros += int(np.count_nonzero(made == 0))
            with np.errstate(all="ignore"):
                for number, relation in enumerate(self.relations):
                    count = relation.held(x, y)
                    if count == len(x):
                        # What follows is more lenient.
                        self.held[number:] += count
                        break
                    self.held[number] += count

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Add pairs of zeros that neither side stores."""
        self.count += zeros
        self.zeros += zeros
        nothing = np.zeros(1, np.float32)
        for number, relation in enumerate(self.relations):
            self.held[number] += zeros * relation.held(nothing, nothing)

    def merge(self, other: Evidence) -> None:
        """Add what another one found in other pairs."""
        self.count += other.count
        self.held += other.held
        self.zeros += other.zeros


def sample(pair: PairReader | ChunkedPair) -> tuple[Array, Array]:
    """Return some pairs of elements as floats, from the beginning and from the middle."""
    found: list[Any] = []
    if isinstance(pair, ChunkedPair):
        first = pair.array.blocks[(0,) * pair.array.ndim]
        found.append(np.asarray(first.compute()).reshape(-1)[:_SAMPLED])
    else:
        buffer = np.empty(_SAMPLED * 16, np.uint8)
        middle = pair.size // 2 // LEAF * LEAF
        for start in [0, middle] if middle >= _SAMPLED and not pair.whole else [0]:
            _, block = next(pair.blocks(start, min(start + _SAMPLED, pair.size), buffer))
            found.append({side: block[side][:_SAMPLED].copy() for side in "ab"})
    x, y = (
        np.concatenate([as_floats(np.ascontiguousarray(each[side]), kind) for each in found])
        for side, kind in zip("ab", pair.kinds, strict=True)
    )
    return x, y


# --- what may hold ---------------------------------------------------------------------------


def likely(x: Array, y: Array, kinds: tuple[str, str]) -> tuple[Relation, ...]:
    """Return the relations that hold for all, or else for most, of some elements; best first."""
    # Few of them rule out nearly all relations.
    few = slice(None, None, max(1, len(x) // _FEW))
    u, v = x[few].copy(), y[few].copy()
    with np.errstate(all="ignore"):
        both = _likely(u, v, kinds)
        if not any(share == 1.0 for share, _ in both):
            turned = _likely(v, u, kinds[::-1])
            both += [(share, replace(relation, backwards=True)) for share, relation in turned]
        certain = [relation for share, relation in both if share == 1.0]
        certain = [each for each in certain[:_TRIED] if each.held(x, y) == len(x)]
    if certain:
        first = certain[0]
        # There may be zeros elsewhere.
        return (first,) if first.masked or first.block else (first, replace(first, masked=True))
    plain = float(np.mean(u == v))
    best = max(both, key=lambda one: one[0], default=(0.0, None))
    if best[1] is None or best[0] < LIKELY or best[0] < (1 + plain) / 2:
        return ()
    return (best[1],)


def _likely(x: Array, y: Array, kinds: tuple[str, str]) -> list[tuple[float, Relation]]:
    """Return relations from `x` to `y`, and of which share of the elements they hold."""
    chains = list(_chains(y, kinds))
    has_zeros = bool(np.any((y == 0) & (x != 0)) and np.any(y))
    tried = [Relation(Transform(types=types)) for types in chains]
    used = np.isfinite(x) & np.isfinite(y)
    if has_zeros:
        used &= y != 0
    if np.count_nonzero(used) >= _FEWEST:
        u, v = x[used].astype(np.float64), y[used].astype(np.float64)
        for types in chains:
            # Computed in float32 if not in float64, as all libraries do.
            own = (kinds[1],) if kinds[1] in FRACTION_BITS else ()
            exact = types or own
            exact = exact if y.dtype == np.float64 else ("float32", *exact)
            spacing = spacing_of(v, min(exact, key=lambda n: FRACTION_BITS[n], default="float64"))
            tried += [Relation(Transform(1.0, c, exact)) for c in _offsets(u, v, spacing)]
            tried += [Relation(Transform(s, 0.0, exact)) for s in _scales(u, v, spacing)]
    found = []
    own_bits = FRACTION_BITS.get(kinds[0], FRACTION_BITS["float32"])
    if kinds[1] == "float64":
        own_bits = FRACTION_BITS["float64"]
    for relation in tried:
        transform = relation.transform
        is_coarser = any(FRACTION_BITS[name] < own_bits for name in transform.types)
        is_cast = transform.scale == 1.0 and not transform.offset
        relation = replace(relation, rounds=is_coarser or is_cast)  # noqa: PLW2901
        share = relation.held(x, y) / len(x)
        trivial = transform == Transform()
        if not trivial:
            found.append((share, relation))
        if has_zeros and share < 1:
            masked = replace(relation, masked=True)
            found.append((masked.held(x, y) / len(x), masked))
    return found


def _chains(y: Array, kinds: tuple[str, str]) -> Iterator[tuple[str, ...]]:
    """Return the types that numbers may have been rounded to one after the other."""
    yield ()
    own = kinds[1]
    bits = FRACTION_BITS.get(own, 0)
    is_coarser = bits < FRACTION_BITS.get(kinds[0], 99)
    last = (own,) if is_coarser and own in FRACTION_BITS else ()
    if last:
        yield last
    elif "float" in own and kind_named(own).exact and own != kinds[0]:
        last = (own,)
        yield last
    finite = y[np.isfinite(y)]
    for name in _COARSE:
        coarse = FRACTION_BITS[name]
        if coarse < bits and coarse < FRACTION_BITS.get(kinds[0], 99):
            start = finite[:_LOOKED_AT].astype(kind_named(name).dtype).astype(finite.dtype)
            if not np.array_equal(start, finite[:_LOOKED_AT]):
                continue
            there = finite.astype(kind_named(name).dtype).astype(finite.dtype)
            if len(finite) and np.array_equal(there, finite) and np.any(finite):
                yield (name, *last)


def spacing_of(values: Array, name: str) -> Array:
    """Return how far numbers are from the next ones of a type."""
    bits = FRACTION_BITS.get(name, 23)
    found: Array = np.ldexp(1.0, np.frexp(values)[1] - 1 - bits)
    return found


def _offsets(x: Array, y: Array, spacing: Array) -> list[float]:
    """Return the numbers that may have been added: where little was rounded they are seen."""
    at = np.argsort(spacing, kind="stable")[:_PROBED]
    difference = y[at] - x[at]
    middle = float(np.median(difference))
    if not middle or np.mean(np.abs(difference - middle) <= 2 * spacing[at]) < LIKELY:
        return []
    finest = float(difference[0])
    found = [round(middle, digits) for digits in range(9)]
    found += [float(f"{finest:.6g}"), finest, float(np.float32(finest)), middle]
    return [c for c in dict.fromkeys(found) if c and abs(c - middle) <= 2 * spacing[at].max()]


def _scales(x: Array, y: Array, spacing: Array) -> list[float]:
    """Return the numbers that may have been multiplied by."""
    some = np.flatnonzero(x)
    if len(some) < _FEWEST or len(np.unique(np.abs(x[some[:_PROBED]]))) < 2:
        return []
    ratio = y[some] / x[some]
    error = spacing[some] / 2 / np.abs(x[some])
    probed = slice(0, _PROBED)
    middle = float(np.median(ratio[probed]))
    if middle in {0.0, 1.0} or not np.isfinite(middle):
        return []
    # Of numbers that are not related it is far off for nearly all.
    if np.mean(np.abs(ratio - middle)[probed] <= _NEAR * error[probed]) < LIKELY:
        return []
    at = np.argsort(error / np.abs(ratio), kind="stable")[:_PROBED]
    middle = float(np.median(ratio[at]))
    if np.mean(np.abs(ratio[at] - middle) <= 4 * error[at]) < LIKELY:
        return []
    close = np.abs(ratio - middle) <= 4 * error
    low = float(np.max((ratio - error)[close]))
    high = float(np.min((ratio + error)[close]))
    if low > high:
        low = high = middle
    return scales_between(low, high)


def scales_between(low: float, high: float) -> list[float]:
    """Return numbers between two that are nearly equal: those of few digits first."""
    middle = (low + high) / 2
    if not _SMALLEST < abs(middle) < 1 / _SMALLEST:
        return []
    slack = (high - low) / 2 + abs(middle) * 2**-50
    found = [float(f"{middle:.{digits}g}") for digits in range(1, 9)]
    found += [1 / float(f"{1 / middle:.{digits}g}") for digits in range(1, 5)]
    found = [s for s in found if abs(s - middle) <= slack][:2]
    narrow = np.float32(middle)
    found += [float(s) for s in (narrow, *(np.nextafter(narrow, np.float32(t)) for t in _ENDS))]
    return [s for s in dict.fromkeys([*found, middle]) if s not in {0.0, 1.0}]


_ENDS = (-np.inf, np.inf)
_SMALLEST = 2.0**-100


def correlation(x: Array, y: Array) -> float:
    """Return about the correlation of some pairs; NaN if one side is constant."""
    few = slice(None, None, max(1, len(x) // (2 * _FEW)))
    x, y = x[few], y[few]
    both = np.isfinite(x) & np.isfinite(y)
    u, v = x[both].astype(np.float64), y[both].astype(np.float64)
    if len(u) < 2:
        return float("nan")
    with np.errstate(all="ignore"):
        u -= u.mean()
        v -= v.mean()
        return float(np.vdot(u, v) / np.sqrt(np.vdot(u, u) * np.vdot(v, v)))


# --- levels ----------------------------------------------------------------------------------


def levels(x: Array, y: Array, kinds: tuple[str, str]) -> Relation | None:
    """Find in which blocks elements of `y` are the nearest of a few evenly spaced levels."""
    x, y = x[:_LEVELLED], y[:_LEVELLED]
    with np.errstate(all="ignore"):
        best: tuple[float, Relation] | None = None
        for backwards in (False, True):
            digits = min(21, FRACTION_BITS.get(kinds[not backwards], 21))
            for block in _BLOCKS:
                size = len(x) // block * block
                if size < 2 * block:
                    continue
                relation = Relation(Transform(), backwards=backwards, block=block, digits=digits)
                share = relation.held(x[:size], y[:size]) / size
                if share >= LIKELY and (best is None or share > best[0] + _BETTER):
                    best = share, relation
    return best[1] if best else None


# So few that they can be codes.
_MOST_LEVELS = 256


@inlined
def _smallest_gap(y: Any, noise: Any, ordered: Any) -> Any:
    """Return the smallest distance between numbers that is more than noise."""
    count = 0
    for i in range(y.size):
        value = y[i]
        at = count
        while at > 0 and ordered[at - 1] > value:
            at -= 1
        if at > 0 and ordered[at - 1] == value:
            continue
        for k in range(count, at, -1):
            ordered[k] = ordered[k - 1]
        ordered[at] = value
        count += 1
    gap = math.inf
    for k in range(1, count):
        distance = ordered[k] - ordered[k - 1]
        if noise < distance < gap:
            gap = distance
    return gap


@within
def _count_off(x: Any, y: Any, low: Any, unit: Any, noise: Any) -> Any:
    """Count numbers whose level is not one of those of a unit, and those that are not near it."""
    per_unit = 1.0 / unit
    uneven, near = max(0.02, 4 * noise * per_unit), unit * 0.502 + noise
    off, far = np.int32(0), np.int32(0)
    for i in range(x.size):
        steps = (y[i] - low) * per_unit
        off = np.int32(off + np.int32(not abs(steps - np.rint(steps)) <= uneven))
    for i in range(x.size):
        error = abs(x[i] - y[i])
        far = np.int32(far + np.int32(not error <= near))
    return off, far


@compiled
def _count_levels(x: Any, y: Any, block: Any, spacing: Any) -> Any:  # noqa: C901  one of three ways
    """Count pairs where `y` is the nearest of the evenly spaced levels of its block to `x`.

    The levels are stored with a relative spacing. They are so few that they can be codes,
    and so far apart that rounding is not what makes them.
    """
    held = 0
    ordered = np.empty(block)
    steps_of_span, steps_of_top = 0.0, 0.0
    for start in range(0, x.size, block):
        a, b = x[start : start + block], y[start : start + block]
        if a.size == 1:
            held += 1  # one number is a level
            continue
        low = high = b[0]
        for i in range(b.size):
            # A NaN is passed over.
            low = b[i] if b[i] < low else low  # noqa: FURB136
            high = b[i] if b[i] > high else high  # noqa: FURB136
        span, top = high - low, max(abs(low), abs(high))
        if not span < math.inf:
            continue
        if span == 0:
            for i in range(a.size):
                held += a[i] == b[i]
            continue
        noise = top * spacing
        # The block before tells how many levels there may be: from end to end, or from zero.
        is_found = False
        for guess in (steps_of_span, np.rint(span * steps_of_top / top)):
            unit = span / guess if 0 < guess < _MOST_LEVELS else 0.0
            if not is_found and noise < unit / 8:
                off, far = _count_off(a, b, low, unit, noise)
                is_found = off == 0 and far == 0
        if is_found:
            held += a.size
            continue
        gap = _smallest_gap(b, noise, ordered)
        best = 0
        for parts in (1, 2, 3):
            # Of the whole span, where what was rounded off matters least.
            steps = np.rint(span * parts / gap)
            if not 0 < steps < _MOST_LEVELS or best == a.size:
                continue
            unit = span / steps
            off, far = _count_off(a, b, low, unit, noise)
            if off == 0 and noise < unit / 8 and a.size - far > best:
                best = a.size - far
                steps_of_span, steps_of_top = steps, np.rint(top / unit)
        held += best
    return held
