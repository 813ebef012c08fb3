"""Sketches: the sums of the rows and columns of a tensor, in one pass over its numbers.

The sum of a row hardly changes when its numbers are rounded or quantised, and it does not depend on
the order of the columns. Therefore

- permuting rows permutes the sums of rows, and keeps the sums of columns,
- transposing a matrix exchanges the sums of rows and the sums of columns,
- joining tensors along the rows joins their sums,
- padding with rows of zeros appends sums of zero.

Sketches suggest how numbers are arranged. They prove nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.compiling import compiled
from xckpt.comparison.measure import as_floats
from xckpt.comparison.pairs import in_c_order
from xckpt.scan.scanning import Accumulator, gather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from xckpt.arrays.streams import ElementStream
    from xckpt.comparison.explaining.search import StepChain
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
    def begin(cls, reader: Any, argument: Any) -> MatrixSums:
        """Return empty sums; the argument is a shape, and whether to sum its rows and columns."""
        shape, has_lines = argument
        return cls(reader.kind.name, shape, has_lines=has_lines)

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

    def __init__(self, number: int, reader: ElementStream, sketch: MatrixSums) -> None:
        self.number = number
        self.reader = reader
        self.sketch = sketch
        self.name = reader.name
        self.shape: Shape = tuple(reader.array.shape)
        self.size = prod(self.shape)
        #: Whether rotary embeddings turn its rows; None if it is unknown.
        self.is_rotary: bool | None = None
        #: Sums of the rows of the matrix, or None; rows are the first axis, or the first two.
        self.rows = sketch.rows
        #: Sums of the columns of the matrix, or None.
        self.columns = sketch.columns
        #: The arrangements to other tensors that were searched, by their ids.
        self.arrangements: dict[int, list[StepChain]] = {}

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


def sketched(readers: Mapping[int, ElementStream], progress: Progress) -> dict[int, Sketched]:
    """Sketch tensors in one pass, except complex and empty tensors."""
    ordered = {
        number: in_c_order(reader)
        for number, reader in readers.items()
        if reader.array.dtype.kind != "c" and reader.size
    }
    shapes = {n: matrix_shape(tuple(reader.array.shape)) for n, reader in ordered.items()}
    has_lines: dict[int, bool] = {}
    line_count = 0
    for number in sorted(shapes, key=lambda number: sum(shapes[number])):
        line_count += sum(shapes[number])
        has_lines[number] = line_count <= _MOST_LINES
    arguments = [(shape, has_lines[number]) for number, shape in shapes.items()]
    sums = gather(list(ordered.values()), MatrixSums, lambda _, sums: sums, progress,
                  arguments=arguments)  # fmt: skip
    sketches = zip(ordered, sums, strict=True)
    return {number: Sketched(number, readers[number], sketch) for number, sketch in sketches}
