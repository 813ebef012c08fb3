"""Arrangements: the same numbers in other places, as lazy views of arrays.

A step of an arrangement moves numbers: it transposes axes, permutes rows as for rotary embeddings,
or adds zeros at the end. A view applies a step to an array when it is indexed, and reads only the
requested elements, so that tensors of any size are compared piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.lazy import dense_values
from xckpt.datasets.adapter_updates import rotary_order
from xckpt.formatting import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

Shape = tuple[int, ...]
Box = tuple[slice, ...]

#: Widths of heads to try if nothing states them, the usual ones first.
USUAL_WIDTHS = (128, 64, 256, 96, 80, 112, 32, 16, 8, 4)


# --- steps ----------------------------------------------------------------------------------------


class Step:
    """A way to arrange the numbers of an array, and the cause that it stands for."""

    __slots__ = ()
    cause = ""

    @property
    def words(self) -> str:
        """The change in words, to follow "after"."""
        raise NotImplementedError

    @property
    def done(self) -> str:
        """The result in words: "transposed"."""
        return self.cause

    @property
    def is_across(self) -> bool:
        """True if the elements of neighbouring rows may be scattered over the array."""
        return False

    def inverse(self) -> Step | None:
        """Return the step back; None if the step cannot be undone."""
        return None

    def shape(self, before: Shape) -> Shape:
        """Return the shape of the result."""
        return before

    def read(self, array: Any, box: Box) -> Array:
        """Read a box of the result."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Transposed(Step):
    """The axes are in another order."""

    axes: Shape
    cause = "transposed"

    @property
    def words(self) -> str:
        is_plain = self.axes == (1, 0)
        return "transposing" if is_plain else f"transposing (axes {', '.join(map(str, self.axes))})"

    @property
    def is_across(self) -> bool:
        return True

    def inverse(self) -> Transposed:
        return Transposed(tuple(np.argsort(self.axes).tolist()))

    def shape(self, before: Shape) -> Shape:
        return tuple([before[axis] for axis in self.axes])

    def read(self, array: Any, box: Box) -> Array:
        places = np.argsort(self.axes)
        return read_box(array, tuple([box[place] for place in places])).transpose(self.axes)


class Permutation(Step):
    """Rows or columns in another order."""

    __slots__ = ()
    axis: int

    def positions(self, length: int) -> Array:
        """Return the original position of each row."""
        raise NotImplementedError

    @property
    def lines(self) -> str:
        """The word for what is permuted."""
        return "rows" if self.axis == 0 else "columns"

    @property
    def is_across(self) -> bool:
        return self.axis > 0

    def read(self, array: Any, box: Box) -> Array:
        rows = self.positions(array.shape[self.axis])[box[self.axis]]
        if not len(rows):
            return read_box(array, box)
        first, stop = int(rows.min()), int(rows.max()) + 1
        before, after = box[: self.axis], box[self.axis + 1 :]
        if stop - first > 2 * len(rows) and not isinstance(array, View):
            return _loaded(array[(*before, rows, *after)])
        values = read_box(array, (*before, slice(first, stop), *after))
        return np.take(values, rows - first, self.axis)


@dataclass(frozen=True, slots=True)
class RopePermuted(Permutation):
    """Rows are permuted as for rotary embeddings: the halves of each head are interleaved."""

    axis: int
    heads: int
    undone: bool = False
    cause = "rope_permuted"

    @property
    def words(self) -> str:
        change = "interleaving undone" if self.undone else "halves interleaved"
        heads = counted(self.heads, "head")
        return f"permuting {self.lines} as for rotary embeddings ({heads}, {change})"

    @property
    def done(self) -> str:
        heads = counted(self.heads, "head")
        return f"{self.lines} permuted as for rotary embeddings ({heads})"

    def positions(self, length: int) -> Array:
        return rotary_order(length, self.heads, is_undone=self.undone)

    def inverse(self) -> RopePermuted:
        return RopePermuted(self.axis, self.heads, not self.undone)


@dataclass(frozen=True, slots=True)
class HalvesExchanged(Permutation):
    """The halves of the rows changed places: shifts and scales of a modulation."""

    axis: int = 0
    cause = "regrouped"

    @property
    def words(self) -> str:
        return "exchanging the halves of the rows, shifts and scales"

    @property
    def done(self) -> str:
        return "halves exchanged"

    def positions(self, length: int) -> Array:
        return np.roll(np.arange(length), length // 2)

    def inverse(self) -> HalvesExchanged | None:
        return self


@dataclass(frozen=True, slots=True)
class Permuted(Permutation):
    """Rows are in an arbitrary order, which describes a difference without explaining it."""

    axis: int
    order: tuple[int, ...]
    cause = "rows_permuted"

    @property
    def words(self) -> str:
        count = len(self.order)
        moved = int(np.count_nonzero(np.asarray(self.order) != np.arange(count)))
        return f"permuting {self.lines} ({moved:,} of {count:,} moved)"

    @property
    def is_across(self) -> bool:
        return True

    def positions(self, length: int) -> Array:
        return np.asarray(self.order)

    def inverse(self) -> Permuted:
        return Permuted(self.axis, tuple(np.argsort(self.order).tolist()))


@dataclass(frozen=True, slots=True)
class Padded(Step):
    """Zeros, or other irrelevant numbers, are added at the end of some axes.

    It has no inverse: removing numbers does not prove that they are zero.
    """

    before: Shape
    after: Shape
    is_zero: bool = True
    cause = "padded"

    @property
    def words(self) -> str:
        more = [b - a for a, b in zip(self.before, self.after, strict=True)]
        return f"adding {_counts(more)} {'of zeros' if self.is_zero else 'that are not zeros'}"

    def shape(self, before: Shape) -> Shape:
        return self.after

    def read(self, array: Any, box: Box) -> Array:
        inside = tuple([slice(min(s.start, n), min(s.stop, n))
                        for s, n in zip(box, array.shape, strict=True)])  # fmt: skip
        missing = [
            (b.stop - b.start) - (s.stop - s.start) for b, s in zip(box, inside, strict=True)
        ]
        padded: Array = np.pad(read_box(array, inside), [(0, n) for n in missing])
        return padded


@dataclass(frozen=True, slots=True)
class Cropped(Step):
    """A box of the array."""

    start: Shape
    after: Shape

    def shape(self, before: Shape) -> Shape:
        return self.after

    def read(self, array: Any, box: Box) -> Array:
        moved = [slice(s.start + n, s.stop + n) for s, n in zip(box, self.start, strict=True)]
        return read_box(array, tuple(moved))


@dataclass(frozen=True, slots=True)
class Truncated(Step):
    """Only the beginning remains, which describes a difference without explaining it."""

    before: Shape
    after: Shape
    cause = "cut"

    @property
    def words(self) -> str:
        return f"cutting {_counts([a - b for a, b in zip(self.before, self.after, strict=True)])}"

    def shape(self, before: Shape) -> Shape:
        return self.after

    def read(self, array: Any, box: Box) -> Array:
        return read_box(array, box)


@dataclass(frozen=True, slots=True)
class Reshaped(Step):
    """The same elements, in C order, with other axes."""

    before: Shape
    after: Shape
    cause = "reshaped"

    @property
    def words(self) -> str:
        return f"reshaping {self.before} to {self.after}"

    def inverse(self) -> Reshaped:
        return Reshaped(self.after, self.before)

    def shape(self, before: Shape) -> Shape:
        return self.after

    def read(self, array: Any, box: Box) -> Array:
        groups = list(_groups_of_axes(self.before, self.after))
        runs = [_Run.of(self.before[a], self.after[b], box[b]) for a, b in groups]
        key: list[Any] = [part for run in runs for part in run.box]
        # If one axis becomes several, read only the selected positions of it.
        is_split = not isinstance(array, View) and len(key) == len(runs)
        for axis, run in enumerate(runs):
            if is_split and run.positions is not None and run.size > 2 * len(run.positions):
                key[axis] = run.positions
                runs[axis] = replace(
                    run, size=len(run.positions), inner=slice(None), positions=None
                )
                break
        values = read_box(array, tuple(key)).reshape([run.size for run in runs])
        for axis, run in enumerate(runs):
            if run.positions is not None:
                values = np.take(values, run.positions - run.start, axis)
            else:
                inner = (*[slice(None)] * axis, run.inner)
                values = values[inner]
        return values.reshape([s.stop - s.start for s in box])


def _groups_of_axes(before: Shape, after: Shape) -> Iterator[tuple[slice, slice]]:
    """Yield the smallest groups of neighbouring axes that have equally many elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        n = m = 1
        is_begun = False
        while n != m or not is_begun:
            is_begun = True
            if (n <= m and i < len(before)) or j >= len(after):
                n, i = n * before[i], i + 1
            else:
                m, j = m * after[j], j + 1
        yield slice(first, i), slice(second, j)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of elements of a group of axes that covers a box of the group after reshaping."""

    box: Box
    #: First element of the run and their number.
    start: int
    size: int
    #: Part of the run, if the box is contiguous; else the positions of its elements.
    inner: slice
    positions: Array | None

    @classmethod
    def of(cls, before: Shape, after: Shape, box: Box) -> _Run:
        """Return the shortest run of whole rows that covers a box."""
        extents = [s.stop - s.start for s in box]
        low = _ravel([s.start for s in box], after)
        high = _ravel([s.stop - 1 for s in box], after) + 1
        source: list[slice] = []
        first, last, start, weight = low, high - 1, 0, prod(before)
        for extent in before:
            weight //= extent
            i, j = first // weight, last // weight
            source.append(slice(i, j + 1))
            start += i * weight
            if i != j:
                source += [slice(0, n) for n in before[len(source) :]]
                break
            first, last = first - i * weight, last - j * weight
        size = prod([s.stop - s.start for s in source])
        positions = None
        if prod(extents) != high - low:
            grids = np.ix_(*[np.arange(s.start, s.stop) for s in box])
            flat: Any = np.ravel_multi_index(grids, after)
            positions = flat.reshape(-1)
        return cls(tuple(source), start, size, slice(low - start, high - start), positions)


def _ravel(index: Sequence[int], shape: Shape) -> int:
    position = 0
    for n, extent in zip(index, shape, strict=True):
        position = position * extent + n
    return position


@dataclass(frozen=True, slots=True)
class Regrouped(Permutation):
    """Queries, keys and values of groups of heads, one group after the other, are separated."""

    axis: int
    groups: int
    #: Rows of the queries, keys and values of a group.
    rows: tuple[int, ...]
    is_undone: bool = False
    cause = "regrouped"

    @property
    def words(self) -> str:
        order = "into groups" if self.is_undone else "out of groups"
        return f"ordering queries, keys and values {order} of heads ({self.groups} groups)"

    @property
    def done(self) -> str:
        return f"{self.cause} ({self.groups} groups of heads)"

    @property
    def is_across(self) -> bool:
        return True

    def positions(self, length: int) -> Array:
        table = np.arange(length).reshape(self.groups, sum(self.rows))
        bounds = np.cumsum((0, *self.rows)).tolist()
        order = np.concatenate([table[:, a:b].reshape(-1) for a, b in pairwise(bounds)])
        return np.argsort(order) if self.is_undone else order

    def inverse(self) -> Regrouped:
        return replace(self, is_undone=not self.is_undone)


def cropped(shape: Shape, axis: int, start: int, stop: int) -> Cropped:
    """Return the step to a range of an axis."""
    at = [0] * len(shape)
    at[axis] = start
    return Cropped(tuple(at), (*shape[:axis], stop - start, *shape[axis + 1 :]))


def lines_along(axis: int) -> str:
    """Return the word for what lies one after the other along an axis."""
    return {0: "rows", 1: "columns"}.get(axis, f"axis {axis}")


class Layer(Step):
    """A new axis of length 1 in front."""

    __slots__ = ()

    def inverse(self) -> Unstacked:
        return Unstacked()

    def shape(self, before: Shape) -> Shape:
        return (1, *before)

    def read(self, array: Any, box: Box) -> Array:
        return read_box(array, box[1:])[None][box[0].start : box[0].stop]


class Unstacked(Step):
    """The array without its first axis, which has length 1."""

    __slots__ = ()

    def shape(self, before: Shape) -> Shape:
        return before[1:]

    def read(self, array: Any, box: Box) -> Array:
        values: Array = read_box(array, (slice(0, 1), *box))[0]
        return values


def _counts(sizes: Sequence[int]) -> str:
    """Describe the numbers of rows, columns or elements, such as "2 rows and 1 column"."""
    names = {1: ("elements",), 2: ("rows", "columns")}.get(len(sizes), ())
    counts = []
    for axis, n in enumerate(sizes):
        name = names[axis] if names else f"along axis {axis}"
        if n:
            counts.append(f"{n:,} {name.removesuffix('s') if n == 1 and names else name}")
    return " and ".join(counts)


def arranged(array: Any, steps: Sequence[Step]) -> Any:
    """Apply steps to an array, as a view."""
    for step in steps:
        array = View(array, step)
    return array


def undone(array: Any, steps: Sequence[Step]) -> Any | None:
    """Undo steps of an arranged array, as a view; None if a step cannot be undone."""
    for step in reversed(steps):
        back = step.inverse()
        if back is None:
            return None
        array = View(array, back)
    return array


def part_of(array: Any, start: Shape, shape: Shape) -> Any:
    """Return a view of a box of an array, or the array itself if the box is all of it."""
    return array if shape == tuple(array.shape) else View(array, Cropped(start, shape))


# --- views ----------------------------------------------------------------------------------------


class View:
    """An array to which a step is applied when it is indexed."""

    def __init__(self, array: Any, step: Step) -> None:
        self.array, self.step = array, step
        self.shape, self.dtype = step.shape(tuple(array.shape)), array.dtype

    def __getitem__(self, key: Any) -> Array:
        """Read a box. Keys are integers and slices without steps, for the first axes or all."""
        keys = () if key is ... else key if isinstance(key, tuple) else (key,)
        box = []
        for axis, size in enumerate(self.shape):
            entry = keys[axis] if axis < len(keys) else slice(None)
            box.append(slice(*entry.indices(size)[:2]) if isinstance(entry, slice)
                       else slice(int(entry), int(entry) + 1))  # fmt: skip
        values = self.step.read(self.array, tuple(box))
        squeezed = [slice(None) if isinstance(entry, slice) else 0 for entry in keys]
        return values[tuple(squeezed)]

    def loaded(self) -> View:
        """Return the view of the array in memory."""
        array = self.array
        in_memory = array.loaded() if isinstance(array, View) else dense_values(array[...])
        return View(in_memory, self.step)

    def ranges(self, key: Any) -> Iterator[Range]:
        """Yield the byte ranges of the array, if they are known in advance."""
        if hasattr(self.array, "ranges"):
            yield from self.array.ranges(...)


def read_box(array: Any, box: Box) -> Array:
    """Read a box of an array; a dask array stays lazy."""
    return array.step.read(array.array, box) if isinstance(array, View) else _loaded(array[box])


def _loaded(values: Any) -> Array:
    return values if hasattr(values, "dask") else dense_values(values)


def parts_of_view(view: Any) -> tuple[Any, list[Step]]:
    """Return the array under a view of any depth, and the steps of the view."""
    steps: list[Step] = []
    while isinstance(view, View):
        steps.append(view.step)
        view = view.array
    return view, steps[::-1]
