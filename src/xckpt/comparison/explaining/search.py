"""The search for arrangements: tensors with the same numbers, possibly in other places.

Sums of rows and columns (`sketches`), which rounding and quantisation hardly change, suggest
arrangements. `verification` tests the suggestions.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import chain, permutations, product
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.comparison.arrangements import (
    Padded,
    Permuted,
    RopePermuted,
    Transposed,
    Truncated,
)
from xckpt.comparison.explaining.names import likeness
from xckpt.comparison.explaining.sketches import groups_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.explaining.sketches import Sketched
    from xckpt.typing import Array

Shape = tuple[int, ...]

#: The least agreement of the sums of two tensors that may have the same numbers.
ALIKE = 0.5
#: Agreement from which on the search for other orders of the rows stops.
SURE = 0.95
# The most sums per axis in the screening of all pairs of tensors.
_SCREENED = 512
# The most candidates per tensor that pass the screening.
_CLOSER = 6
# The most pairs of tensors of one shape that are screened together.
_MOST_PAIRS = 1 << 20
_MOST_AXES = 4
# Sizes of heads to try first; similar rows may fit several.
_USUAL_HEADS = (128, 64, 256, 80, 96, 32, 16)
_SMALLEST_HEAD = 4
# Score of rows in an arbitrary order, and the numbers of rows for which it is searched.
_SHUFFLED = 0.9
_FEWEST_ROWS, _MOST_ROWS = 8, 1 << 16
_EQUAL = 1 - 1e-7
_LONGEST_HEADS = 1 << 17
_FEWEST = 3


class StepChain(NamedTuple):
    """Steps from a tensor of `a` to one of `b`, and the agreement of their sums."""

    score: float
    steps: tuple[Step, ...]

    @property
    def is_cut(self) -> bool:
        """True if numbers are left out, which explains nothing."""
        return any(isinstance(step, Truncated) for step in self.steps)


def arrangements(a: Sketched, b: Sketched) -> list[StepChain]:
    """Return arrangements that may turn `a` into `b`, best first.

    Rows are permuted as for rotary embeddings only in queries and keys.
    """
    likely = []
    if len(a.shape) == len(b.shape) and 0 < len(a.shape) <= _MOST_AXES:
        has_heads = are_rotary(a.is_rotary, b.is_rotary)
        chains = (
            _along_axes(a, b, axes, has_heads=has_heads)
            for axes in permutations(range(len(a.shape)))
        )
        likely = [chain for chain in chains if chain is not None]
    return sorted(likely, key=lambda chain: -chain.score)


def _along_axes(a: Sketched, b: Sketched, axes: Shape, *, has_heads: bool) -> StepChain | None:
    shape = tuple([a.shape[axis] for axis in axes])
    sizes = list(zip(shape, b.shape, strict=True))
    is_padded = all(n <= m for n, m in sizes)
    if not is_padded and not all(n >= m for n, m in sizes):
        return None
    before: list[Step] = []
    after: list[Step] = []
    total = weights = 0.0
    for axis, (n, m) in enumerate(sizes):
        if min(n, m) < 2:
            continue
        score, early, late = _along_axis(a, b, axes[axis], axis, has_heads=has_heads)
        if np.isnan(score):
            continue
        # Only one axis has heads.
        has_heads = has_heads and not any(isinstance(s, RopePermuted) for s in (*early, *late))
        before += early
        after += late
        weight = float(min(n, m, 64))
        total, weights = total + weight * score, weights + weight
    steps: list[Step] = []
    if axes != tuple(range(len(axes))):
        steps.append(Transposed(axes))
    steps += before
    if shape != b.shape:
        steps.append(Padded(shape, b.shape) if is_padded else Truncated(shape, b.shape))
    return StepChain(total / weights if weights else 0.0, (*steps, *after))


def _along_axis(
    a: Sketched, b: Sketched, axis_of_a: int, axis: int, *, has_heads: bool
) -> tuple[float, list[Step], list[Step]]:
    """Return the agreement of sums, and permutations before and after padding with zeros."""
    x, y = a.along[axis_of_a], b.along[axis]
    if x is None or y is None:
        return float("nan"), [], []
    n, m = len(x), len(y)
    score = agreement(x, y[:n]) if n <= m else agreement(x[:m], y)
    if np.isnan(score):
        # Equal sums carry no information.
        return score, [], []
    best: tuple[float, list[Step], list[Step]] = (score, [], [])
    if has_heads and n <= m and score < SURE:
        steps, score = permuted(x, y[:n], axis)
        if score > best[0]:
            best = score, steps, []
    if has_heads and n < m and best[0] < SURE:
        steps, score = permuted(np.pad(x, (0, m - n)), y, axis)
        if score > best[0]:
            return score, [], steps
    if n == m and best[0] < _SHUFFLED and _FEWEST_ROWS <= n <= _MOST_ROWS:
        first, second = a.ordered[axis_of_a], b.ordered[axis]
        if first is not None and second is not None and agreement(first, second) >= _EQUAL:
            return _SHUFFLED, [Permuted(axis, _order(x, y))], []
    if n < m and best[0] > 0:
        # The added sums should be zero.
        excess = float(np.abs(y[n:]).mean()) / max(float(np.abs(y[:n]).mean()), 1e-300)
        best = best[0] * (1 - min(excess, 1.0) / 2), *best[1:]
    return best


def _order(x: Array, y: Array) -> tuple[int, ...]:
    """Return the order of the rows of `x` in which their sums ascend with the sums of `y`."""
    first, second = np.argsort(x, kind="stable"), np.argsort(y, kind="stable")
    order = np.empty(len(x), np.int64)
    order[second] = first
    return tuple(order.tolist())


def agreement(x: Array, y: Array) -> float:
    """Return the correlation of two vectors; NaN if neither varies, 0 if one does not."""
    u, v = x - x.mean(), y - y.mean()
    first, second = float(np.vdot(u, u)), float(np.vdot(v, v))
    tiny = 1e-20
    is_flat = [first <= tiny * float(np.vdot(x, x)), second <= tiny * float(np.vdot(y, y))]
    if any(is_flat):
        return float("nan") if all(is_flat) else 0.0
    return float(np.vdot(u, v) / np.sqrt(first * second))


def permuted(x: Array, y: Array, axis: int) -> tuple[list[Step], float]:
    """Return the permutation for rotary embeddings that agrees best, and the agreement."""
    orders = rope_orders(len(x))
    if not orders:
        return [], -1.0
    [first, second] = standardised([x, y], len(x))
    scores = [float(first[order] @ second) for order in orders.values()]
    best = int(np.argmax(scores))
    return [RopePermuted(axis, *list(orders)[best])], scores[best]


def are_rotary(*sides: bool | None) -> bool:
    """Return whether tensors may be queries or keys, from what is known of each."""
    return any(sides) and False not in sides


@lru_cache(maxsize=64)
def inverse_orders(length: int) -> Array:
    """Return the inverses of `rope_orders`, after the identity."""
    orders = [np.arange(length), *rope_orders(length).values()]
    return np.array([np.argsort(order) for order in orders])


@lru_cache(maxsize=64)
def rope_orders(length: int) -> Mapping[tuple[int, bool], Array]:
    """Return the permutations of a number of rows, by heads and whether they undo interleaving."""
    if length > _LONGEST_HEADS:
        return {}
    sizes = [size for size in range(_SMALLEST_HEAD, length + 1, 2) if length % size == 0]
    ordered = dict.fromkeys([*(size for size in _USUAL_HEADS if size in sizes), *sizes])
    return {
        (length // size, is_undone): RopePermuted(0, length // size, is_undone).positions(length)
        for size in ordered
        for is_undone in (False, True)
        if not is_undone or size > _SMALLEST_HEAD
    }


# --- partners -------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """Two tensors that may have the same numbers."""

    a: Sketched
    b: Sketched
    #: Whether all totals are equal, which excludes rounding.
    is_exact: bool
    arrangement: StepChain


def partners(
    ours: Sequence[Sketched], theirs: Sequence[Sketched], *, extended: bool = True
) -> list[Candidate]:
    """Pair tensors of two sides by their numbers, regardless of names; no tensor has two partners.

    With `extended`, padded and cut tensors are paired too, after tensors of equal size.
    """
    candidates = _paired(_candidates(ours, theirs, is_extended=False))
    if extended:
        used = {id(side) for candidate in candidates for side in candidate[:2]}
        unmatched = [[t for t in side if id(t) not in used] for side in (ours, theirs)]
        candidates += _paired(_candidates(*unmatched, is_extended=True))
    return candidates


def _paired(candidates: list[Candidate]) -> list[Candidate]:
    """Choose the best candidates; names decide between tensors with equal numbers."""

    def rank(candidate: Candidate) -> tuple[bool, float, int]:
        likely = likeness(candidate.a.name, candidate.b.name)
        return candidate.is_exact, round(candidate.arrangement.score, 2), likely

    used: set[int] = set()
    chosen = []
    for candidate in sorted(candidates, key=rank, reverse=True):
        if id(candidate.a) not in used and id(candidate.b) not in used:
            used |= {id(candidate.a), id(candidate.b)}
            chosen.append(candidate)
    return chosen


def _candidates(
    ours: Sequence[Sketched], theirs: Sequence[Sketched], *, is_extended: bool
) -> list[Candidate]:
    sides = [[t for t in s if not t.is_constant and t.size >= _FEWEST] for s in (ours, theirs)]
    candidates: list[Candidate] = []
    if not is_extended:
        # Screening compares all pairs of tensors: leave out those with a single equal tensor.
        groups = groups_of(sides, attrgetter("content"))
        candidates += _likely((a[0], b[0]) for a, b in groups if len(a) == len(b) == 1)
        paired = {id(tensor) for candidate in candidates for tensor in candidate[:2]}
        sides = [[tensor for tensor in side if id(tensor) not in paired] for side in sides]
    by_shape: tuple[dict[Shape, list[Sketched]], ...] = (defaultdict(list), defaultdict(list))
    for side, tensors_of_shape in zip(sides, by_shape, strict=True):
        for tensor in side:
            tensors_of_shape[tensor.shape].append(tensor)
    kinds: tuple[dict[Shape, list[Shape]], ...] = (defaultdict(list), defaultdict(list))
    for shapes_of_kind, group in zip(kinds, by_shape, strict=True):
        for shape in group:
            shapes_of_kind[(len(shape),) if is_extended else tuple(sorted(shape))].append(shape)
    for shape, shape_of_b in chain.from_iterable(
        product(shapes, kinds[1].get(kind, ())) for kind, shapes in kinds[0].items()
    ):
        ours_of_shape, theirs_of_shape = by_shape[0][shape], by_shape[1][shape_of_b]
        is_permuted = sorted(shape) == sorted(shape_of_b)
        if len(shape) != len(shape_of_b) or is_permuted == is_extended:
            continue
        sizes = list(zip(sorted(shape), sorted(shape_of_b), strict=True))
        if not (all(n <= m for n, m in sizes) or all(n >= m for n, m in sizes)):
            continue  # neither shape fits into the other, in any order of the axes
        candidates += _likely(_screened(ours_of_shape, theirs_of_shape, is_extended=is_extended))
    return candidates


def _likely(pairs: Iterable[tuple[Sketched, Sketched]]) -> Iterator[Candidate]:
    """Yield the pairs of tensors whose sums agree in some arrangement."""
    for a, b in pairs:
        best = next(iter(arrangements(a, b)), None)
        if best is not None and best.score >= ALIKE:
            yield Candidate(a, b, a.is_like(b), best)


def _screened(  # noqa: C901
    ours: list[Sketched], theirs: list[Sketched], *, is_extended: bool
) -> Iterator[tuple[Sketched, Sketched]]:
    """Yield pairs whose sums along some axis agree in order."""
    first, second = ours[0].shape, theirs[0].shape
    if len(ours) * len(theirs) > _MOST_PAIRS and not is_extended:
        yield from _nearest(ours, theirs)
        return
    scores = np.full((len(ours), len(theirs)), -1.0)
    for n, m in ((n, m) for n in range(len(first)) for m in range(len(second))):
        sizes = first[n], second[m]
        if (sizes[0] != sizes[1] and not is_extended) or min(sizes) < _FEWEST:
            continue
        length = min(*sizes, _SCREENED)
        x, y = (standardised([t.along[k] for t in side], length)
                for side, k in ((ours, n), (theirs, m)))  # fmt: skip
        scores = np.maximum(scores, x @ y.T)
        if len(first) == 1:
            x = standardised([t.along[0] for t in ours], min(sizes))
            y = standardised([t.along[0] for t in theirs], min(sizes))
            for order in rope_orders(min(sizes)).values():
                scores = np.maximum(scores, x[:, order] @ y.T)
    for row, a in enumerate(ours):
        # Keep several candidates, because equal tensors are indistinguishable here.
        for at in np.argsort(-scores[row], kind="stable")[:_CLOSER].tolist():
            if scores[row, at] >= ALIKE:
                yield a, theirs[at]
    for column, b in enumerate(theirs):
        at = int(np.argmax(scores[:, column]))
        if scores[at, column] >= ALIKE:
            yield ours[at], b


def _nearest(ours: list[Sketched], theirs: list[Sketched]) -> Iterator[tuple[Sketched, Sketched]]:
    """Yield pairs with similar sums of squares, which rounding and permutations hardly change."""
    ordered = sorted(theirs, key=lambda tensor: float(tensor.sketch.totals[1]))
    squares = np.array([tensor.sketch.totals[1] for tensor in ordered])
    for a in ours:
        place = int(np.searchsorted(squares, a.sketch.totals[1]))
        for b in ordered[max(0, place - _CLOSER) : place + _CLOSER]:
            yield a, b


def standardised(vectors: Sequence[Array | None], length: int) -> Array:
    """Return the first entries of vectors, with zero mean and unit norm, as rows of a table."""
    table = np.zeros((len(vectors), length))
    for row, vector in zip(table, vectors, strict=True):
        if vector is not None:
            row[:] = vector[:length]
    table -= table.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(table, axis=1, keepdims=True)
    normalised: Array = np.divide(table, norms, out=table, where=norms > 0)
    return normalised
