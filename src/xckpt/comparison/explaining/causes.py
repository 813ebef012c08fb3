"""Relations between numbers at the same places: one class for each kind of cause.

A relation derives `b` from `a`, or `a` from `b`, element by element. Each class suggests relations
from a sample, counts the elements for which they hold, and describes them in words:

=================  ===========================================================================
`Elementwise`      equal, rounded, offset, scaled, or pruned (zeros for some elements)
`Requantised`      a deterministic quantiser reproduces the numbers exactly
`WithinScales`     each element is within the distance that its block's stored scales allow
`Levelled`         each element is the nearest of the evenly spaced levels of its block
=================  ===========================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.comparison.explaining.levels import count_levels
from xckpt.comparison.explaining.quantisers import OF_BLOCKS, REPEATED, scheme_name
from xckpt.comparison.explaining.rounding import (
    FRACTION_BITS,
    UNCHANGED,
    Transform,
    rounding_chains,
    spacing_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Array = np.ndarray[Any, np.dtype[Any]]

#: Relations that hold for a smaller share of the elements are not reported.
LIKELY = 0.9

# The least number of elements from which an offset or a scale is inferred.
_FEWEST = 4
# Tolerance of a ratio, in steps of the type; generous, because the median is itself rounded.
_NEAR = 64
# Elements of a first sample that rules relations out, and relations to test on the whole sample.
_FEW = 2048
_TRIED = 8
# Elements from which differences and ratios are estimated.
_PROBED = 256
# Number of rounding chains that are tried after an offset or a scale.
_MOVED_CHAINS = 4
# Types that numbers are rounded to before they are quantised.
_ROUNDED_TO = ("float16", "bfloat16", "float8_e4m3fn")
# Elements of the sample whose correlation is computed.
_CORRELATED = 4096
# Below this correlation, one side is not a quantised copy of the other.
_RELATED = 0.5
# Elements of the sample that are quantised again, in blocks.
_IN_BLOCKS = 2048
_LEVELS_BLOCKS = (256, 128, 64, 32, 16)
# Elements of the sample in which evenly spaced levels are searched for.
_LEVELLED = 4096
# The least number of distinct values that shows a type other than the stored one.
_FEWEST_VALUES = 3
# Margin by which a smaller block has to fit better than a larger one.
_BETTER = 0.005


@dataclass(frozen=True, slots=True)
class SampledPairs:
    """Pairs of numbers at sampled positions, and the names of their types."""

    x: Array
    y: Array
    kinds: tuple[str, str]
    #: The type of blocks that either side is stored in, if any.
    blocks: tuple[str, str] = ("", "")
    #: Elements in a row of the tensor.
    row: int = 1

    @property
    def reverse(self) -> SampledPairs:
        """The sample with its sides exchanged."""
        return replace(self, x=self.y, y=self.x, kinds=self.kinds[::-1], blocks=self.blocks[::-1])

    def first(self, count: int) -> tuple[Array, Array]:
        """Return the first elements of both sides, which are contiguous in the tensor."""
        return self.x[:count], self.y[:count]


# --- element by element ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Each element of `b` is a transform of the same element of `a`, without new infinities."""

    transform: Transform
    #: Whether elements of `b` may also be zero.
    masked: bool = False
    #: Whether `a` is derived from `b`.
    backwards: bool = False
    #: Whether the types are coarser than the type of the input.
    rounds: bool = False
    block = 0

    def count_matches(self, x: Array, y: Array) -> int:
        """Count the pairs for which the relation holds, NaN on both sides included."""
        expected = self.transform(x)
        same = expected == y
        if self.masked:
            same |= y == 0
        count = int(np.count_nonzero(same))
        if count < len(x):
            count += int(np.count_nonzero(np.isnan(x) & np.isnan(y)))
        if self.rounds and not math.isfinite(float(np.abs(expected).sum(dtype=np.float64))):
            count -= int(np.count_nonzero(same & np.isfinite(x) & ~np.isfinite(expected)))
        return count

    @property
    def causes(self) -> tuple[str, ...]:
        """Names of the causes in the relation, in the order of `CAUSES`."""
        transform = self.transform
        is_rounded = self.rounds and transform.types
        applies = {
            "offset": transform.offset,
            "scaled": transform.scale != 1.0,
            "pruned": self.masked,
            "rounded": is_rounded,
        }
        return tuple([cause for cause, applies_here in applies.items() if applies_here])

    def words(self, zeros: float) -> str:
        """Describe how one side derives from the other; `zeros` is the share of zeros in it."""
        source, result = ("b", "a") if self.backwards else ("a", "b")
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

    @staticmethod
    def suspected(sample: SampledPairs) -> Iterator[tuple[float, Elementwise]]:  # noqa: C901  one search
        """Yield relations from `a` to `b`, each with the share of elements for which it holds."""
        x, y, kinds = sample.x, sample.y, sample.kinds
        chains = list(rounding_chains(y, kinds))
        has_zeros = bool(np.any((y == 0) & (x != 0)) and np.any(y))
        source_bits = FRACTION_BITS.get(kinds[0], FRACTION_BITS["float32"])
        if kinds[1] == "float64":
            source_bits = FRACTION_BITS["float64"]

        def shares(transform: Transform) -> Iterator[tuple[float, Elementwise]]:
            is_coarser = any(FRACTION_BITS[name] < source_bits for name in transform.types)
            is_cast = transform.scale == 1.0 and not transform.offset and transform.types
            relation = Elementwise(transform, rounds=is_coarser or bool(is_cast))
            share = relation.count_matches(x, y) / len(x)
            yield share, relation
            if has_zeros and share < 1:
                masked = replace(relation, masked=True)
                yield masked.count_matches(x, y) / len(x), masked

        for types in chains:
            for share, relation in shares(Transform(types=types)):
                yield share, relation
                if share == 1.0 and not relation.masked:
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
    ratio = y[nonzero] / x[nonzero]
    error = spacing[nonzero] / 2 / np.abs(x[nonzero])
    probed = slice(0, _PROBED)
    middle = float(np.median(ratio[probed]))
    if middle in {0.0, 1.0} or not np.isfinite(middle):
        return []
    # Most ratios of unrelated numbers are far from the median.
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


# --- quantised ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Before:
    """A change of numbers before they were quantised."""

    transform: Transform = UNCHANGED
    #: Scheme of an earlier quantiser, if any.
    scheme: str = ""

    def __call__(self, x: Array) -> Array:
        """Apply the change to whole blocks."""
        values = self.transform(x)
        return OF_BLOCKS[self.scheme].round_trip(values) if self.scheme else values

    @property
    def block(self) -> int:
        """Elements in a block of the first quantiser, 0 without one."""
        return OF_BLOCKS[self.scheme].block if self.scheme else 0

    @property
    def words(self) -> str:
        """The change in words, to precede "quantised"."""
        transform, text = self.transform, ""
        if transform.offset:
            text = f" {'-' if transform.offset < 0 else '+'} {abs(transform.offset):.9g}"
        types = [name for name in transform.types if name not in {"float32", "float64"}]
        if types:
            text += f" rounded to {' and then to '.join(types)} and"
        return text + (f" quantised to {scheme_name(self.scheme)} and then" if self.scheme else "")


_NOTHING_BEFORE = Before()


@dataclass(frozen=True, slots=True)
class Requantised:
    """A quantiser makes each block of `b` from `a`, with the same codes and scales."""

    scheme: str
    #: The change before quantisation, and the types that the result was rounded to.
    before: Before = _NOTHING_BEFORE
    after: tuple[str, ...] = ()
    backwards: bool = False
    causes = ("quantised",)
    masked = False

    @property
    def block(self) -> int:
        """Elements of a block."""
        return max(OF_BLOCKS[self.scheme].block, self.before.block)

    def count_matches(self, x: Array, y: Array) -> int:
        """Count the pairs in whole blocks for which the relation holds."""
        quantiser, values = OF_BLOCKS[self.scheme], self.before(x)
        if self.after:
            rounded = Transform(types=self.after)(quantiser.round_trip(values))
            return int(np.count_nonzero(rounded == y))
        return int(np.count_nonzero(quantiser.holds(values, y)))

    def words(self, zeros: float) -> str:
        """Write how one side follows from the other."""
        source, result = ("b", "a") if self.backwards else ("a", "b")
        text = f"{result} is {source}{self.before.words} quantised to {scheme_name(self.scheme)}"
        if self.after:
            text += f" and rounded to {' and then to '.join(self.after)}"
        return f"{text}, with the codes that its quantiser makes"

    @staticmethod
    def suspected(sample: SampledPairs, before: Iterable[Before]) -> Iterator[Requantised]:
        """Yield the quantisers that reproduce the whole sample."""
        stored = sample.blocks[1]
        names = [stored] if stored in OF_BLOCKS else [] if stored else [q.name for q in REPEATED]
        ends = [()] if stored else _endings(sample.kinds[1])
        for name in names:
            for first in before:
                relations = [Requantised(name, first, after) for after in ends]
                block = relations[0].block if relations else 1
                size = min(len(sample.x), _IN_BLOCKS) // block * block
                x, y = sample.first(size)
                for relation in relations if size else ():
                    if relation.count_matches(x[:block], y[:block]) == block and (
                        relation.count_matches(x, y) == size
                    ):
                        yield relation


@dataclass(frozen=True, slots=True)
class WithinScales:
    """Each element of `a` is within the distance that the stored scales of `b` allow."""

    scheme: str
    before: Before = _NOTHING_BEFORE
    backwards: bool = False
    causes = ("quantised",)
    masked = False

    @property
    def block(self) -> int:
        """Elements in a block of the first quantiser, 0 without one."""
        return self.before.block

    def count_matches(self, x: Array, y: Array) -> int:
        """Count the pairs for which the relation holds; `y` has the dtype `GRADED`."""
        expected = self.before(x)
        difference = expected - y["value"]
        return int(np.count_nonzero((difference <= y["above"]) & (-difference <= y["below"])))

    def words(self, zeros: float) -> str:
        """Write how one side follows from the other."""
        source, result = ("b", "a") if self.backwards else ("a", "b")
        text = f"{result} is {source}{self.before.words} quantised to {scheme_name(self.scheme)}"
        return f"{text}: every element is within the bound of its block's scales"


@dataclass(frozen=True, slots=True)
class Levelled:
    """Each element of `b` is the evenly spaced level of its block that is nearest to `a`."""

    block: int
    #: Bits of the fraction with which the levels are stored.
    digits: int = 21
    backwards: bool = False
    causes = ("quantised",)
    masked = False

    def count_matches(self, x: Array, y: Array) -> int:
        """Count the pairs for which the relation holds."""
        # One type, so that the loop is compiled only once.
        x, y = (np.ascontiguousarray(values, np.float64) for values in (x, y))
        count: int = count_levels(x, y, self.block, 2.0**-self.digits)
        return count

    def words(self, zeros: float) -> str:
        """Write how one side follows from the other."""
        source, result = ("b", "a") if self.backwards else ("a", "b")
        levels = f"the nearest of evenly spaced levels to {source}"
        return f"{result} is {levels}, in blocks of {self.block} elements"

    @staticmethod
    def suspected(sample: SampledPairs) -> tuple[float, Levelled] | None:
        """Return the best size of blocks, after the share of the sample that it explains."""
        x, y = sample.first(_LEVELLED)
        digits = min(21, FRACTION_BITS.get(sample.kinds[1], 21))
        best: tuple[float, Levelled] | None = None
        for block in _LEVELS_BLOCKS:
            size = len(x) // block * block
            # A single block may have levels by chance.
            if size < 2 * block:
                continue
            relation = Levelled(block, digits)
            share = relation.count_matches(x[:size], y[:size]) / size
            if share >= LIKELY and (best is None or share > best[0] + _BETTER):
                best = share, relation
        return best


Relation = Elementwise | Requantised | WithinScales | Levelled


def _endings(kind: str) -> list[tuple[str, ...]]:
    """Return the types that the results of a quantiser may be rounded to."""
    if kind in {"float16", "bfloat16"}:
        return [(kind,)]
    return [(), ("float16",), ("bfloat16",)] if kind == "float32" else []


# --- relations that a sample suggests -------------------------------------------------------------


def suspect(
    sample: SampledPairs, graded: SampledPairs | None = None, offset: float | None = None
) -> tuple[Relation, ...]:
    """Return the relations that hold for the whole sample, or else one that holds for most of it.

    `graded` is the sample with the distances that the stored scales of one side allow. `offset` is
    the number that the architecture is known to add to this tensor.
    """
    thinned = slice(None, None, max(1, len(sample.x) // _FEW))
    thin = replace(sample, x=sample.x[thinned].copy(), y=sample.y[thinned].copy())
    with np.errstate(all="ignore"):
        shares = [*Elementwise.suspected(thin)]
        if not any(share == 1.0 for share, _ in shares):
            shares += [(share, replace(relation, backwards=True))
                       for share, relation in Elementwise.suspected(thin.reverse)]  # fmt: skip
        shares = [(share, relation) for share, relation in shares if _is_shown(relation, thin)]
        certain = [relation for share, relation in shares if share == 1.0][:_TRIED]
        certain = [entry for entry in certain if _holds(entry, sample)]
        plain = [entry for entry in certain if not entry.masked]
        if plain:
            # Elements outside the sample may have been set to zero.
            return plain[0], replace(plain[0], masked=True)
        is_related = not correlation(thin.x, thin.y) < _RELATED
        quantised = _suspect_quantised(sample, graded, offset) if is_related else None
        if quantised is not None and _is_shown(quantised, sample):
            return (quantised,)
        if certain:
            return (certain[0],)
        equal = float(np.mean(thin.x == thin.y))
        share, best = max(shares, key=lambda entry: entry[0], default=(0.0, None))
        levels = _suspect_levels(sample)
        if levels is not None and levels[0] > share and _is_shown(levels[1], sample):
            share, best = levels  # type: ignore[assignment]  # another class of relation
    if best is None or share < LIKELY or share < (1 + equal) / 2:
        return ()
    return (best,)


def _holds(relation: Relation, sample: SampledPairs) -> bool:
    x, y = (sample.y, sample.x) if relation.backwards else (sample.x, sample.y)
    return relation.count_matches(x, y) == len(x)


def _is_shown(relation: Relation, sample: SampledPairs) -> bool:
    """Return whether types or varied numbers support a relation; a constant fits any type."""
    side = sample.reverse if relation.backwards else sample
    is_stated = False
    if isinstance(relation, Elementwise):
        is_stated = {"float32", "float64", side.kinds[1]}.issuperset(relation.transform.types)
    elif isinstance(relation, Requantised | WithinScales):
        before = relation.before
        is_in_blocks = relation.scheme == side.blocks[1] or isinstance(relation, WithinScales)
        is_stated = is_in_blocks and not before.scheme and not before.transform.types
    return is_stated or len(np.unique(side.y)) >= _FEWEST_VALUES


def _suspect_quantised(
    sample: SampledPairs, graded: SampledPairs | None, offset: float | None
) -> Relation | None:
    for side, backwards in ((sample, False), (sample.reverse, True)):
        before = list(_before_quantisers(side, offset))
        for relation in Requantised.suspected(side, before):
            return replace(relation, backwards=backwards)
    if graded is not None:
        backwards = graded.y.dtype.names is None
        side = graded.reverse if backwards else graded
        scheme = graded.blocks[not backwards] or "codes with scales"
        for first in _before_quantisers(side, offset):
            within = WithinScales(scheme, first, backwards)
            size = len(side.x) // (within.block or 1) * (within.block or 1)
            if size and within.count_matches(side.x[:size], side.y[:size]) == size:
                return within
    levels = _suspect_levels(sample)
    return levels[1] if levels is not None and levels[0] == 1.0 else None


def _suspect_levels(sample: SampledPairs) -> tuple[float, Levelled] | None:
    best: tuple[float, Levelled] | None = None
    for side, backwards in ((sample, False), (sample.reverse, True)):
        candidate = None if any(sample.blocks) else Levelled.suspected(side)
        if candidate is not None and (best is None or candidate[0] > best[0]):
            best = candidate[0], replace(candidate[1], backwards=backwards)
    return best


def _before_quantisers(sample: SampledPairs, offset: float | None) -> Iterator[Before]:
    """Yield changes that may precede quantisation, likely ones first."""
    source_bits = FRACTION_BITS.get(sample.kinds[0], 23)
    coarser = [name for name in _ROUNDED_TO if FRACTION_BITS[name] < source_bits]
    chains = [(), *((name,) for name in coarser), *permutations(coarser, 2)]
    for added in (0.0, *([offset] if offset else [])):
        for chain in chains:
            yield Before(Transform(1.0, added, ("float32", *chain) if added else chain))
    for quantiser in REPEATED:
        yield Before(scheme=quantiser.name)


def percent(share: float) -> str:
    """Format a share as a percentage."""
    text = f"{100 * share:.4g}"
    if text == "100" and share < 1:
        text = "more than 99.99"
    return f"{text} %"


def correlation(x: Array, y: Array) -> float:
    """Estimate the correlation of two vectors from a few pairs; NaN if one side is constant."""
    few = slice(None, None, max(1, len(x) // _CORRELATED))
    x, y = x[few], y[few]
    both = np.isfinite(x) & np.isfinite(y)
    u, v = x[both].astype(np.float64), y[both].astype(np.float64)
    if len(u) < 2:
        return float("nan")
    with np.errstate(all="ignore"):
        u -= u.mean()
        v -= v.mean()
        return float(np.vdot(u, v) / np.sqrt(np.vdot(u, u) * np.vdot(v, v)))
