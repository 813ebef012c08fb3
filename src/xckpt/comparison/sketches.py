"""Sketches: the sums of the rows and columns of a tensor, in one pass over its numbers.

The sum of a row hardly changes when its numbers are rounded or quantised, and it does not depend on
the order of the columns. Therefore

- permuting rows permutes the sums of rows, and keeps the sums of columns,
- transposing a matrix exchanges the sums of rows and the sums of columns,
- joining tensors along the rows joins their sums,
- padding with rows of zeros appends sums of zero.

Sketches suggest how numbers are arranged, and `arrangements` lists the suggestions. They prove
nothing: `verification` tests them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property, lru_cache
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.compiling import compiled
from xckpt.comparison.arrangements import (
    USUAL_WIDTHS,
    Padded,
    Permuted,
    Reshaped,
    RopePermuted,
    Transposed,
    Truncated,
)
from xckpt.comparison.measure import as_floats
from xckpt.comparison.pairs import in_c_order
from xckpt.scan.scanning import Accumulator, gather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.comparison.arrangements import Step
    from xckpt.progress import Progress
    from xckpt.typing import Array

Shape = tuple[int, ...]

# One-dimensional tensors up to this size have a row for each element.
_MOST_SINGLE = 1 << 16
# Limit on the sums in memory, over all tensors of a search, of 8 bytes each. Small tensors come
# first; tensors beyond the limit have only extremes and a total.
_MOST_LINES = 12 << 20
_MOST_COLUMNS = 1 << 18
_PIECE = 1024
#: The least agreement of the sums of two tensors that may have the same numbers.
ALIKE = 0.5
#: Agreement from which on the search for other orders of the rows stops.
SURE = 0.95
_MOST_AXES = 4
_SMALLEST_HEAD = 4
# Score of rows in an arbitrary order, and the numbers of rows for which it is searched.
_SHUFFLED = 0.9
_FEWEST_ROWS, _MOST_ROWS = 8, 1 << 16
_EQUAL = 1 - 1e-7
_LONGEST_HEADS = 1 << 17


class MatrixSums(Accumulator):
    """Sums over the rows, over the columns, and over all numbers of a tensor, read as a matrix.

    Infinities and NaN count as zero.
    """

    def __init__(self, kind: str, shape: tuple[int, int], *, has_lines: bool) -> None:
        self.kind = kind
        self.shape = shape
        self.count = 0
        self.low, self.high = np.inf, -np.inf
        #: Sum, and sum of squares.
        self.totals = np.zeros(2)
        rows, columns = shape
        has_columns = has_lines and 1 < columns <= _MOST_COLUMNS
        self.rows: Array | None = np.zeros(rows) if has_lines else None
        self.columns: Array | None = np.zeros(columns) if has_columns else None

    @classmethod
    def begin(cls, stream: Any, argument: Any) -> MatrixSums:
        """Return empty sums; the argument is a shape, and whether to sum its rows and columns."""
        shape, has_lines = argument
        return cls(stream.kind.name, shape, has_lines=has_lines)

    def update(self, start: int, *columns: Array) -> None:
        """Add a run of elements."""
        (values,) = columns
        self.count += len(values)
        if not len(values):
            return
        floats = np.ascontiguousarray(as_floats(values, self.kind))
        low, high = float(floats.min()), float(floats.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            low, high = float(np.fmin.reduce(floats)), float(np.fmax.reduce(floats))
            floats = np.where(np.isfinite(floats), floats, floats.dtype.type(0))
        self.low, self.high = min(self.low, low), max(self.high, high)
        width = self.shape[1]
        first, column = divmod(start, width)
        rows = np.zeros((start + len(values) - 1) // width + 1 - first)
        sums = np.zeros(0) if self.columns is None else self.columns
        _add_lines(floats, width, column, rows, sums, self.totals)
        if self.rows is not None:
            self.rows[first : first + len(rows)] += rows

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Add zeros that a sparse tensor does not store."""
        self.count += zeros
        self.low, self.high = min(self.low, 0.0), max(self.high, 0.0)

    def merge(self, other: MatrixSums) -> None:
        """Add the sums of other elements of the same tensor."""
        self.count += other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.totals += other.totals
        if self.rows is not None and other.rows is not None:
            self.rows += other.rows
        if self.columns is not None and other.columns is not None:
            self.columns += other.columns


@compiled
def _add_lines(  # noqa: PLR0917
    x: Any, width: Any, column: Any, rows: Any, columns: Any, totals: Any
) -> None:
    """Add a run of elements that begins in a column to the sums of rows, columns, and all numbers.

    Separate loops with several independent sums, which LLVM vectorises.
    """
    at, line = 0, 0
    while at < x.size:
        part = x[at : at + min(width - column, _PIECE)]
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        p, q, r, s = 0.0, 0.0, 0.0, 0.0
        for i in range(0, part.size - 3, 4):
            u, v = np.float64(part[i]), np.float64(part[i + 1])
            w, z = np.float64(part[i + 2]), np.float64(part[i + 3])
            a += u
            b += v
            c += w
            d += z
            p += u * u
            q += v * v
            r += w * w
            s += z * z
        for i in range(part.size // 4 * 4, part.size):
            u = np.float64(part[i])
            a += u
            p += u * u
        rows[line] += (a + b) + (c + d)
        totals[0] += (a + b) + (c + d)
        totals[1] += (p + q) + (r + s)
        if columns.size:
            sums = columns[column : column + part.size]
            for i in range(part.size):
                sums[i] += np.float64(part[i])
        at += part.size
        column += part.size
        if column == width:
            line += 1
            column = 0


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return the shape of the matrix to sum a tensor as."""
    if len(shape) == 1:
        return (shape[0], 1) if shape[0] <= _MOST_SINGLE else (1, shape[0])
    if len(shape) == 3:
        # Stacked matrices: the rows of all of them.
        return shape[0] * shape[1], shape[2]
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


class Sketched:
    """A tensor with its sketch, as vectors of sums along each of its axes."""

    def __init__(self, number: int, stream: ElementStream, sketch: MatrixSums) -> None:
        self.number = number
        self.stream = stream
        self.sketch = sketch
        self.name = stream.name
        self.shape: Shape = tuple(stream.array.shape)
        self.size = prod(self.shape)
        #: Whether rotary embeddings turn its rows; None if it is unknown.
        self.is_rotary: bool | None = None
        #: Its place in the model as both sides describe it; None if it is unknown.
        self.place: tuple[object, ...] | None = None
        #: Sums of the rows of the matrix, or None; rows are the first axis, or the first two.
        self.rows = sketch.rows
        #: Sums of the columns of the matrix, or None.
        self.columns = sketch.columns
        #: The arrangements to other tensors that were searched.
        self.arrangements: dict[Sketched, list[StepChain]] = {}

    @cached_property
    def is_constant(self) -> bool:
        """True if all elements are equal."""
        return not self.sketch.low < self.sketch.high

    @cached_property
    def along(self) -> list[Array | None]:
        """One vector of sums for each axis, over all other axes; None if not computed."""
        rows, columns, shape = self.rows, self.columns, self.shape
        if len(shape) == 1:
            return [columns if self.sketch.shape[0] == 1 and shape[0] > 1 else rows]
        if len(shape) == 3:
            front = None if rows is None else rows.reshape(shape[:2])
            firsts = [None, None] if front is None else [front.sum(1), front.sum(0)]
            return [*firsts, columns]
        if columns is None:
            return [rows, *[None] * (len(shape) - 1)]
        inner_sums = columns.reshape(shape[1:])
        axes = range(inner_sums.ndim)
        return [rows, *[inner_sums.sum(tuple([k for k in axes if k != axis])) for axis in axes]]

    @cached_property
    def ordered(self) -> list[Array | None]:
        """The vectors `along` each axis, each in ascending order."""
        return [None if sums is None else np.sort(sums) for sums in self.along]

    @cached_property
    def content(self) -> tuple[Any, ...]:
        """Numbers that all tensors with equal elements in equal places share."""
        totals = [round(total, 12) for total in self.sketch.totals.tolist()]
        return self.shape, self.sketch.low, self.sketch.high, *totals

    def has_sums_of(self, other: Sketched) -> bool:
        """Return whether all sums along all axes are equal."""
        return all(
            x is not None and y is not None and np.array_equal(x, y)
            for x, y in zip(self.along, other.along, strict=True)
        )

    def is_like(self, other: Sketched) -> bool:
        """Return whether both may have the same numbers, in any order: all totals match."""
        a, b = self.sketch, other.sketch
        if self.size != other.size or a.low != b.low or a.high != b.high:
            return False
        (total, squares), (total_of_b, squares_of_b) = a.totals.tolist(), b.totals.tolist()
        return (
            squares == squares_of_b or abs(squares - squares_of_b) <= 1e-9 * squares_of_b
        ) and abs(total - total_of_b) <= 1e-9 * math.sqrt(squares * self.size)


def groups_of(
    sides: Iterable[Iterable[Sketched]], key: Callable[[Sketched], Any]
) -> list[tuple[list[Sketched], list[Sketched]]]:
    """Return the tensors of both sides that share a key, for each key."""
    groups: dict[Any, tuple[list[Sketched], list[Sketched]]] = defaultdict(lambda: ([], []))
    for number, tensors in enumerate(sides):
        for tensor in tensors:
            groups[key(tensor)][number].append(tensor)
    return list(groups.values())


def sketched(streams: Mapping[int, ElementStream], progress: Progress) -> dict[int, Sketched]:
    """Sketch tensors in one pass, except complex and empty tensors."""
    ordered = {
        number: in_c_order(stream)
        for number, stream in streams.items()
        if stream.array.dtype.kind != "c" and stream.size
    }
    shapes = {n: matrix_shape(tuple(stream.array.shape)) for n, stream in ordered.items()}
    has_lines: dict[int, bool] = {}
    line_count = 0
    for number in sorted(shapes, key=lambda number: sum(shapes[number])):
        line_count += sum(shapes[number])
        has_lines[number] = line_count <= _MOST_LINES
    arguments = [(shape, has_lines[number]) for number, shape in shapes.items()]
    sums = gather(list(ordered.values()), MatrixSums, lambda _, sums: sums, progress,
                  arguments=arguments)  # fmt: skip
    sketches = zip(ordered, sums, strict=True)
    return {number: Sketched(number, streams[number], sketch) for number, sketch in sketches}


# --- arrangements -------------------------------------------------------------------------------


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
    if b not in a.arrangements:
        is_squeezed = len(a.shape) != len(b.shape)
        ours, theirs = (_Lines.of(tensor, is_squeezed=is_squeezed) for tensor in (a, b))
        likely = []
        if len(ours.shape) == len(theirs.shape) and 0 < len(ours.shape) <= _MOST_AXES:
            has_heads = are_rotary(a.is_rotary, b.is_rotary)
            chains = [
                _along_axes(ours, theirs, axes, has_heads=has_heads)
                for axes in permutations(range(len(ours.shape)))
            ]
            likely = [
                StepChain(chain.score, _with_unit_axes(a.shape, ours, chain.steps, theirs, b.shape))
                for chain in chains
                if chain is not None
            ]
        a.arrangements[b] = sorted(likely, key=lambda chain: -chain.score)
    return a.arrangements[b]


class _Lines(NamedTuple):
    """The sums along axes of a tensor."""

    tensor: Sketched
    axes: Shape

    @classmethod
    def of(cls, tensor: Sketched, *, is_squeezed: bool) -> _Lines:
        """Return the sums along all axes, or those that have more than one position."""
        extents = enumerate(tensor.shape)
        return cls(tensor, tuple([n for n, extent in extents if extent > 1 or not is_squeezed]))

    @property
    def shape(self) -> Shape:
        return tuple([self.tensor.shape[axis] for axis in self.axes])

    def along(self, axis: int) -> Array | None:
        """Return the sums along an axis; None if they were not computed."""
        return self.tensor.along[self.axes[axis]]

    def ordered(self, axis: int) -> Array | None:
        """Return the sums along an axis in ascending order."""
        return self.tensor.ordered[self.axes[axis]]


def _with_unit_axes(
    before: Shape, ours: _Lines, steps: tuple[Step, ...], theirs: _Lines, after: Shape
) -> tuple[Step, ...]:
    """Return steps between tensors whose axes of one position were left out."""
    if not steps and ours.shape == theirs.shape:
        return () if before == after else (Reshaped(before, after),)
    first = () if before == ours.shape else (Reshaped(before, ours.shape),)
    last = () if after == theirs.shape else (Reshaped(theirs.shape, after),)
    return (*first, *steps, *last)


def _along_axes(a: _Lines, b: _Lines, axes: Shape, *, has_heads: bool) -> StepChain | None:
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
    a: _Lines, b: _Lines, axis_of_a: int, axis: int, *, has_heads: bool
) -> tuple[float, list[Step], list[Step]]:
    """Return the agreement of sums, and permutations before and after padding with zeros."""
    x, y = a.along(axis_of_a), b.along(axis)
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
        first, second = a.ordered(axis_of_a), b.ordered(axis)
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
    ordered = dict.fromkeys([*(size for size in USUAL_WIDTHS if size in sizes), *sizes])
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
