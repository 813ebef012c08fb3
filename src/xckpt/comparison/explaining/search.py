"""The search for arrangements: tensors with the same numbers, possibly in other places.

Sums of rows and columns (`sketches`), which rounding and quantisation hardly change, suggest
arrangements. `verification` tests the suggestions.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xckpt.comparison.arrangements import (
    Padded,
    Permuted,
    RopePermuted,
    Transposed,
    Truncated,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    if id(b) not in a.arrangements:
        likely = []
        if len(a.shape) == len(b.shape) and 0 < len(a.shape) <= _MOST_AXES:
            has_heads = are_rotary(a.is_rotary, b.is_rotary)
            chains = (
                _along_axes(a, b, axes, has_heads=has_heads)
                for axes in permutations(range(len(a.shape)))
            )
            likely = [chain for chain in chains if chain is not None]
        a.arrangements[id(b)] = sorted(likely, key=lambda chain: -chain.score)
    return a.arrangements[id(b)]


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
