"""Relations between numbers and quantised numbers; see `causes`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.compiling import compiled, inlined, within
from xckpt.comparison.relations.causes import (
    FRACTION_BITS,
    LIKELY,
    UNCHANGED,
    Relation,
    SampledPairs,
    Transform,
)
from xckpt.comparison.relations.quantisers import (
    OF_BLOCKS,
    REPEATED,
    TableQuantiser,
    possible_quantisers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.typing import Array

# Types that numbers are rounded to before they are quantised.
_ROUNDED_TO = ("float16", "bfloat16", "float8_e4m3fn")
# Types that the results of a quantiser may be rounded to, by the stored type, the coarsest last.
_ENDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "float16": (("float16",),),
    "bfloat16": (("bfloat16",),),
    "float32": ((), ("float16",), ("bfloat16",)),
}
# Elements of the sample that are quantised again, in blocks.
_IN_BLOCKS = 2048
_LEVELS_BLOCKS = (256, 128, 64, 32, 16)
# Elements of the sample in which evenly spaced levels are searched for.
_LEVELLED = 4096
# Elements, in blocks of every size, that rule most tensors out.
_FEW_LEVELLED = 512
# Codes of at most eight bits.
_MOST_LEVELS = 256
# Margin by which a smaller block has to fit better than a larger one.
_BETTER = 0.005


@dataclass(frozen=True, slots=True)
class Quantised(Relation):
    """Blocks of `b` are quantised from `a`, after a change of its numbers."""

    scheme: str
    #: The change of single numbers before they were quantised.
    transform: Transform = UNCHANGED
    #: Scheme of an earlier quantiser, if any.
    earlier: str = ""
    backwards: bool = False

    @property
    def block(self) -> int:  # type: ignore[override]  # read-only here
        """Elements of a block of the earlier quantiser, 1 without one."""
        return OF_BLOCKS[self.earlier].block if self.earlier else 1

    @property
    def done(self) -> str:
        """The change in a few words."""
        offset = f"{self.transform.offset:+.9g}, " if self.transform.offset else ""
        return f"{offset}quantised to {self.scheme.upper()}"

    def before(self, x: Array) -> Array:
        """Apply the changes that precede the quantiser to whole blocks."""
        values = self.transform(x)
        return OF_BLOCKS[self.earlier].round_trip(values) if self.earlier else values

    def words(self, zeros: float) -> str:
        """Describe how one side derives from the other."""
        source, result = self.sides
        transform, text = self.transform, f"{result} is {source}"
        if transform.offset:
            text += f" {'-' if transform.offset < 0 else '+'} {abs(transform.offset):.9g}"
        types = [name for name in transform.types if name not in {"float32", "float64"}]
        if types:
            text += f" rounded to {' and then to '.join(types)} and"
        if self.earlier:
            text += f" quantised to {self.earlier.upper()} and then"
        return f"{text} quantised to {self.scheme.upper()}"


@dataclass(frozen=True, slots=True)
class Requantised(Quantised):
    """A quantiser makes each block of `b` from `a`, with the same codes and scales."""

    #: The types that the result was rounded to.
    after: tuple[str, ...] = ()

    @property
    def block(self) -> int:  # type: ignore[override]
        """Elements of the larger block of both quantisers."""
        return max(OF_BLOCKS[name].block for name in (self.scheme, self.earlier) if name)

    def count_matches(self, x: Array, y: Array) -> int:
        """Count the pairs in whole blocks for which the relation holds."""
        quantiser, values = OF_BLOCKS[self.scheme], self.before(x)
        if isinstance(quantiser, TableQuantiser):
            matches = quantiser.holds_after(values, y, Transform(types=self.after))
            return int(np.count_nonzero(matches))
        if self.after:
            rounded = Transform(types=self.after)(quantiser.round_trip(values))
            return int(np.count_nonzero(rounded == y))
        return int(np.count_nonzero(quantiser.holds(values, y)))

    def words(self, zeros: float) -> str:
        """Describe how one side derives from the other."""
        text = Quantised.words(self, zeros)
        if self.after:
            text += f" and rounded to {' and then to '.join(self.after)}"
        return f"{text}, with the codes that its quantiser makes"

    @staticmethod
    def suspected(sample: SampledPairs, offset: float | None) -> Iterator[Requantised]:
        """Yield the quantisers that reproduce the whole sample."""
        stored = sample.blocks[1]
        ends = ((),) if stored else _ends(sample)
        if stored:
            names = [stored] if stored in OF_BLOCKS else []
        elif not ends or not len(sample.y):
            names = []
        else:
            names = possible_quantisers(sample.y, ends[-1][-1] if ends[-1] else "float32")
        if not names:
            return
        for name, change, after in product(names, _before_quantisers(sample, offset), ends):
            relation = Requantised(name, *change, after=after)
            block = relation.block
            x, y = sample.first(max(_IN_BLOCKS, block), block)
            # The first block rules most quantisers out.
            is_possible = len(x) and relation.count_matches(x[:block], y[:block]) == block
            if is_possible and relation.count_matches(x, y) == len(x):
                yield relation


@dataclass(frozen=True, slots=True)
class WithinScales(Quantised):
    """Each element of `a` is within the distance that the stored scales of `b` allow."""

    def count_matches(self, x: Array, y: Array) -> int:
        """Count the pairs for which the relation holds; `y` has the dtype `GRADED`."""
        expected = self.before(x)
        difference = expected - y["value"]
        return int(np.count_nonzero((difference <= y["above"]) & (-difference <= y["below"])))

    def words(self, zeros: float) -> str:
        """Describe how one side derives from the other."""
        text = Quantised.words(self, zeros)
        return f"{text}: every element is within the bound of its block's scales"


@dataclass(frozen=True, slots=True)
class Levelled(Relation):
    """Each element of `b` is the evenly spaced level of its block that is nearest to `a`."""

    block: int
    #: Bits of the fraction with which the levels are stored.
    digits: int = 21
    backwards: bool = False

    def count_matches(self, x: Array, y: Array) -> int:
        """Count the pairs for which the relation holds."""
        # One type, so that the loop is compiled only once.
        x, y = (np.ascontiguousarray(values, np.float64) for values in (x, y))
        count: int = _count_levels(x, y, self.block, 2.0**-self.digits)
        return count

    def words(self, zeros: float) -> str:
        """Describe how one side derives from the other."""
        source, result = self.sides
        levels = f"the nearest of evenly spaced levels to {source}"
        return f"{result} is {levels}, in blocks of {self.block} elements"

    @staticmethod
    def suspected(sample: SampledPairs) -> tuple[float, Levelled] | None:
        """Return the best size of blocks, after the share of the sample that it explains."""
        digits = min(21, FRACTION_BITS.get(sample.kinds[1], 21))
        best: tuple[float, Levelled] | None = None
        for block in _LEVELS_BLOCKS:
            x, y = sample.first(_LEVELLED, block)
            # A single block may have levels by chance.
            if len(x) < 2 * block:
                continue
            relation = Levelled(block, digits)
            few = slice(0, _FEW_LEVELLED)
            if len(x[few]) - relation.count_matches(x[few], y[few]) > (1 - LIKELY) * len(x):
                continue  # too many differ already
            share = relation.count_matches(x, y) / len(x)
            if share >= LIKELY and (best is None or share > best[0] + _BETTER):
                best = share, relation
        return best


# --- relations that a sample suggests -------------------------------------------------------------


def suspect_quantised(
    sample: SampledPairs, graded: SampledPairs | None, offset: float | None
) -> Relation | None:
    """Return a relation of quantised numbers that holds for the whole sample, strictest first."""
    for side, backwards in ((sample, False), (sample.reverse, True)):
        for relation in Requantised.suspected(side, offset):
            return replace(relation, backwards=backwards)
    if graded is not None:
        backwards = graded.y.dtype.names is None
        side = graded.reverse if backwards else graded
        scheme = graded.blocks[not backwards] or "codes with scales"
        for change in _before_quantisers(side, offset):
            within = WithinScales(scheme, *change, backwards)
            x, y = side.first(len(side.x), within.block)
            if len(x) and within.count_matches(x, y) == len(x):
                return within
    return None


def suspect_levels(sample: SampledPairs) -> tuple[float, Levelled] | None:
    """Return the best evenly spaced levels, after the share of the sample that they explain."""
    best: tuple[float, Levelled] | None = None
    for side, backwards in ((sample, False), (sample.reverse, True)):
        candidate = None if any(sample.blocks) else Levelled.suspected(side)
        if candidate is not None and (best is None or candidate[0] > best[0]):
            best = candidate[0], replace(candidate[1], backwards=backwards)
    return best


def _ends(sample: SampledPairs) -> list[tuple[str, ...]]:
    """Return the types that the numbers of `b` may have been rounded to after a quantiser."""
    y = sample.y[:_IN_BLOCKS]
    ends = _ENDS.get(sample.kinds[1], ())
    return [types for types in ends if np.array_equal(Transform(types=types)(y), y)]


def _before_quantisers(
    sample: SampledPairs, offset: float | None
) -> Iterator[tuple[Transform, str]]:
    """Yield changes that may precede quantisation, likely ones first."""
    source_bits = FRACTION_BITS.get(sample.kinds[0], 23)
    coarser = [name for name in _ROUNDED_TO if FRACTION_BITS[name] < source_bits]
    chains = [(), *((name,) for name in coarser), *permutations(coarser, 2)]
    for added in (0.0, *([offset] if offset else [])):
        for chain in chains:
            yield Transform(1.0, added, ("float32", *chain) if added else chain), ""
    for quantiser in REPEATED:
        yield UNCHANGED, quantiser.name


# --- evenly spaced levels in blocks ---------------------------------------------------------------


@inlined
def _smallest_gap(y: Any, noise: Any, enough: Any, ordered: Any) -> Any:
    """Return the smallest distance that exceeds the noise, or any such distance below `enough`."""
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
        below = value - ordered[at - 1] if at > 0 else math.inf
        above = ordered[at + 1] - value if at + 1 < count else math.inf
        distance = min(below, above)
        if noise < distance < enough:
            return distance
    gap = math.inf
    for k in range(1, count):
        distance = ordered[k] - ordered[k - 1]
        if noise < distance < gap:
            gap = distance
    return gap


@within
def _count_off(x: Any, y: Any, low: Any, unit: Any, noise: Any) -> Any:
    """Count the `y` that are not whole units above `low`, and the `x` far from their `y`."""
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

    `spacing` is the relative rounding error of stored levels. Levels have to be few enough for
    codes, and so far apart that rounding alone cannot produce them.
    """
    matches = 0
    ordered = np.empty(block)
    steps_of_span, steps_of_top = 0.0, 0.0
    for start in range(0, x.size, block):
        a, b = x[start : start + block], y[start : start + block]
        if a.size == 1:
            matches += 1  # one number is a level
            continue
        low = high = b[0]
        for i in range(b.size):
            # These comparisons skip NaN.
            low = b[i] if b[i] < low else low  # noqa: FURB136
            high = b[i] if b[i] > high else high  # noqa: FURB136
        span, top = high - low, max(abs(low), abs(high))
        if not span < math.inf:
            continue
        if span == 0:
            for i in range(a.size):
                matches += a[i] == b[i]
            continue
        noise = top * spacing
        # Try the number of levels of the previous block, over the span or from zero, first.
        is_level = False
        for guess in (steps_of_span, np.rint(span * steps_of_top / top)):
            unit = span / guess if 0 < guess < _MOST_LEVELS else 0.0
            if not is_level and noise < unit / 8:
                off, far = _count_off(a, b, low, unit, noise)
                is_level = off == 0 and far == 0
        if is_level:
            matches += a.size
            continue
        gap = _smallest_gap(b, noise, span / (2 * _MOST_LEVELS), ordered)
        best = 0
        for parts in (1, 2, 3):
            # Divide the whole span, which rounding changes least.
            steps = np.rint(span * parts / gap)
            if not 0 < steps < _MOST_LEVELS or best == a.size:
                continue
            unit = span / steps
            off, far = _count_off(a, b, low, unit, noise)
            if off == 0 and noise < unit / 8 and a.size - far > best:
                best = a.size - far
                steps_of_span, steps_of_top = steps, np.rint(top / unit)
        matches += best
    return matches
