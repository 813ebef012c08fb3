"""Arrangements: the same numbers in other places, as lazy views of arrays.

A step of an arrangement moves numbers: it transposes axes, permutes rows as for rotary embeddings,
or adds zeros at the end. A view applies steps to an array when it is indexed, and reads only the
requested elements, so that tensors of any size are compared piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.lazy import dense_values
from xckpt.comparison.measures import as_floats
from xckpt.comparison.pairs import TURNED_NBYTES, in_c_order, is_sliceable
from xckpt.scan.kinds import kind_of
from xckpt.scan.readers import ArrayReader, ChunkedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xckpt.scan.readers import Reader
    from xckpt.storage.prefetch import Range

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]
Box = tuple[slice, ...]


# --- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transposed:
    """The axes are in another order."""

    axes: Shape
    cause = "transposed"
    heads = None

    def view(self, array: Any) -> Any:
        """Return the array with its axes in this order."""
        return _Transposition(array, self.axes)

    def inverse(self, shape: Shape) -> Transposed:
        """Return the step back."""
        return Transposed(tuple(np.argsort(self.axes).tolist()))

    @property
    def words(self) -> str:
        """The change in words, to follow "after"."""
        is_plain = self.axes == tuple(range(len(self.axes)))[::-1] and len(self.axes) == 2
        return "transposing" if is_plain else f"transposing (axes {', '.join(map(str, self.axes))})"


@dataclass(frozen=True, slots=True)
class RopePermuted:
    """Rows are permuted as for rotary embeddings: the halves of each head are interleaved."""

    axis: int
    heads: int
    undone: bool = False
    cause = "rope_permuted"

    def order(self, length: int) -> Array:
        """Return the original position of each row."""
        halves = np.arange(length).reshape(self.heads, 2, length // self.heads // 2)
        order = halves.swapaxes(1, 2).reshape(-1)
        return np.argsort(order) if self.undone else order

    def view(self, array: Any) -> Any:
        """Return the array with its rows permuted."""
        return _Permutation(array, self.axis, self.order(array.shape[self.axis]))

    def inverse(self, shape: Shape) -> RopePermuted:
        """Return the step back."""
        return RopePermuted(self.axis, self.heads, not self.undone)

    @property
    def words(self) -> str:
        """The change in words, to follow "after"."""
        lines = "rows" if self.axis == 0 else "columns"
        change = "interleaving undone" if self.undone else "halves interleaved"
        return f"permuting {lines} as for rotary embeddings ({heads_text(self.heads)}, {change})"


@dataclass(frozen=True, slots=True)
class Padded:
    """Zeros, or other irrelevant numbers, are added at the end of some axes."""

    before: Shape
    after: Shape
    is_zero: bool = True
    cause = "padded"
    heads = None

    def view(self, array: Any) -> Any:
        """Return the array with zeros at its ends."""
        return _Padding(array, self.after)

    def inverse(self, shape: Shape) -> None:
        """Return None: removing numbers does not prove that they are zero."""
        return

    @property
    def words(self) -> str:
        """The change in words, to follow "after"."""
        more = [b - a for a, b in zip(self.before, self.after, strict=True)]
        return f"adding {_counts(more)} {'of zeros' if self.is_zero else 'that are not zeros'}"


@dataclass(frozen=True, slots=True)
class Permuted:
    """Rows are in an arbitrary order, which describes a difference without explaining it."""

    axis: int
    order: tuple[int, ...]
    cause = "rows_permuted"
    heads = None

    def view(self, array: Any) -> Any:
        """Return the array with its rows permuted."""
        return _Permutation(array, self.axis, np.asarray(self.order))

    def inverse(self, shape: Shape) -> Permuted:
        """Return the step back."""
        return Permuted(self.axis, tuple(np.argsort(self.order).tolist()))

    @property
    def words(self) -> str:
        """The change in words, to follow "after"."""
        moved = int(np.count_nonzero(np.asarray(self.order) != np.arange(len(self.order))))
        lines = "rows" if self.axis == 0 else "columns"
        return f"permuting {lines} ({moved:,} of {len(self.order):,} moved)"


@dataclass(frozen=True, slots=True)
class Truncated:
    """Only the beginning remains, which describes a difference without explaining it."""

    before: Shape
    after: Shape
    cause = "cut"
    heads = None

    def view(self, array: Any) -> Any:
        """Return the beginning of the array."""
        return part_of(array, (0,) * len(self.after), self.after)

    def inverse(self, shape: Shape) -> None:
        """Return None: the removed numbers are unknown."""
        return

    @property
    def words(self) -> str:
        """The change in words, to follow "after"."""
        return f"cutting {_counts([a - b for a, b in zip(self.before, self.after, strict=True)])}"


Step = Transposed | RopePermuted | Padded | Permuted | Truncated


def _counts(sizes: Sequence[int]) -> str:
    """Describe the numbers of rows, columns or elements, such as "2 rows and 1 column"."""
    names = {1: ("elements",), 2: ("rows", "columns")}.get(len(sizes), ())
    counts = []
    for axis, n in enumerate(sizes):
        name = names[axis] if names else f"along axis {axis}"
        if n:
            counts.append(f"{n:,} {name.removesuffix('s') if n == 1 and names else name}")
    return " and ".join(counts)


def heads_text(count: int) -> str:
    """Format a number of attention heads."""
    return "1 head" if count == 1 else f"{count:,} heads"


def arranged(array: Any, steps: Sequence[Step]) -> Any:
    """Apply steps to an array, as a view."""
    for step in steps:
        array = step.view(array)
    return array


def undone(array: Any, steps: Sequence[Step]) -> Any | None:
    """Undo steps of an arranged array, as a view; None if a step cannot be undone."""
    for step in reversed(steps):
        back = step.inverse(array.shape)
        if back is None:
            return None
        array = back.view(array)
    return array


def part_of(array: Any, start: Shape, shape: Shape) -> Any:
    """Return a view of a box of an array, or the array itself if the box is all of it."""
    return array if shape == tuple(array.shape) else _PartView(array, start, shape)


def joined(arrays: Sequence[Any], axis: int) -> Any:
    """Return a view of arrays concatenated along an axis."""
    return _JoinedView(arrays, axis)


def stacked(array: Any) -> Any:
    """Return a view of an array with a new axis in front."""
    return _Layer(array)


def unstacked(array: Any) -> Any:
    """Return a view of an array without its first axis, which has length 1."""
    return _UnstackedView(array)


# --- views ----------------------------------------------------------------------------------------


class View:
    """An array that is computed from other arrays when it is indexed."""

    shape: Shape
    dtype: np.dtype[Any]
    arrays: tuple[Any, ...]

    def __getitem__(self, key: Any) -> Array:
        """Read a box. Keys are integers and slices without steps, for the first axes or all."""
        keys = () if key is ... else key if isinstance(key, tuple) else (key,)
        box = []
        for axis, size in enumerate(self.shape):
            entry = keys[axis] if axis < len(keys) else slice(None)
            box.append(slice(*entry.indices(size)[:2]) if isinstance(entry, slice)
                       else slice(int(entry), int(entry) + 1))  # fmt: skip
        values = self.read(tuple(box))
        squeezed = [slice(None) if isinstance(entry, slice) else 0 for entry in keys]
        return values[tuple(squeezed)]

    def read(self, box: Box) -> Array:
        """Read a box, with as many axes as the view."""
        raise NotImplementedError

    def dask(self, arrays: Sequence[Any]) -> Any:
        """Return the same view as an operation on dask arrays."""
        raise NotImplementedError

    def of(self, arrays: Sequence[Any]) -> View:
        """Return the same view of other arrays."""
        raise NotImplementedError


class _Transposition(View):
    def __init__(self, array: Any, axes: Shape) -> None:
        self.arrays, self.axes = (array,), axes
        self.shape, self.dtype = tuple([array.shape[axis] for axis in axes]), array.dtype

    def read(self, box: Box) -> Array:
        places = np.argsort(self.axes)
        return _read(self.arrays[0], tuple([box[place] for place in places])).transpose(self.axes)

    def dask(self, arrays: Sequence[Any]) -> Any:
        return arrays[0].transpose(self.axes)

    def of(self, arrays: Sequence[Any]) -> View:
        return _Transposition(arrays[0], self.axes)


class _Permutation(View):
    def __init__(self, array: Any, axis: int, order: Array) -> None:
        self.arrays, self.axis, self.order = (array,), axis, order
        self.shape, self.dtype = tuple(array.shape), array.dtype

    def read(self, box: Box) -> Array:
        rows = self.order[box[self.axis]]
        if not len(rows):
            return _read(self.arrays[0], box)
        first = int(rows.min())
        near = slice(first, int(rows.max()) + 1)
        values = _read(self.arrays[0], (*box[: self.axis], near, *box[self.axis + 1 :]))
        return np.take(values, rows - first, self.axis)

    def dask(self, arrays: Sequence[Any]) -> Any:
        import dask.array as da

        return da.take(arrays[0], self.order, self.axis)

    def of(self, arrays: Sequence[Any]) -> View:
        return _Permutation(arrays[0], self.axis, self.order)


class _Padding(View):
    def __init__(self, array: Any, shape: Shape) -> None:
        self.arrays, self.shape, self.dtype = (array,), shape, array.dtype

    def read(self, box: Box) -> Array:
        inner = self.arrays[0].shape
        inside = tuple([slice(min(s.start, n), min(s.stop, n))
                        for s, n in zip(box, inner, strict=True)])  # fmt: skip
        values = np.zeros([s.stop - s.start for s in box], self.dtype)
        if all(s.start < s.stop for s in inside):
            values[tuple([slice(0, s.stop - s.start) for s in inside])] = _read(
                self.arrays[0], inside
            )
        return values

    def dask(self, arrays: Sequence[Any]) -> Any:
        import dask.array as da

        more = [(0, n - m) for n, m in zip(self.shape, arrays[0].shape, strict=True)]
        return da.pad(arrays[0], more)

    def of(self, arrays: Sequence[Any]) -> View:
        return _Padding(arrays[0], self.shape)


class _PartView(View):
    def __init__(self, array: Any, start: Shape, shape: Shape) -> None:
        self.arrays, self.start, self.shape, self.dtype = (array,), start, shape, array.dtype

    def read(self, box: Box) -> Array:
        moved = [slice(s.start + n, s.stop + n) for s, n in zip(box, self.start, strict=True)]
        return _read(self.arrays[0], tuple(moved))

    def dask(self, arrays: Sequence[Any]) -> Any:
        ends = zip(self.start, self.shape, strict=True)
        return arrays[0][tuple([slice(start, start + n) for start, n in ends])]

    def of(self, arrays: Sequence[Any]) -> View:
        return _PartView(arrays[0], self.start, self.shape)


class _Layer(View):
    def __init__(self, array: Any) -> None:
        self.arrays, self.shape, self.dtype = (array,), (1, *array.shape), array.dtype

    def read(self, box: Box) -> Array:
        return _read(self.arrays[0], box[1:])[None][box[0].start : box[0].stop]

    def dask(self, arrays: Sequence[Any]) -> Any:
        return arrays[0][None]

    def of(self, arrays: Sequence[Any]) -> View:
        return _Layer(arrays[0])


class _UnstackedView(View):
    def __init__(self, array: Any) -> None:
        self.arrays, self.shape, self.dtype = (array,), tuple(array.shape[1:]), array.dtype

    def read(self, box: Box) -> Array:
        values: Array = _read(self.arrays[0], (slice(0, 1), *box))[0]
        return values

    def dask(self, arrays: Sequence[Any]) -> Any:
        return arrays[0][0]

    def of(self, arrays: Sequence[Any]) -> View:
        return _UnstackedView(arrays[0])


class _JoinedView(View):
    def __init__(self, arrays: Sequence[Any], axis: int) -> None:
        self.arrays, self.axis = tuple(arrays), axis
        lengths = [array.shape[axis] for array in arrays]
        self.starts = np.cumsum([0, *lengths])
        shape = list(arrays[0].shape)
        shape[axis] = int(self.starts[-1])
        self.shape = tuple(shape)
        kinds = [kind_of(np.dtype(array.dtype)) for array in arrays]
        narrow = all(kind and (kind.name == "float32" or kind.exact) for kind in kinds)
        self.dtype = np.dtype(np.float32 if narrow else np.float64)

    def read(self, box: Box) -> Array:
        span, pieces = box[self.axis], []
        for array, start, stop in zip(self.arrays, self.starts, self.starts[1:], strict=False):
            low, high = max(span.start, start) - start, min(span.stop, stop) - start
            if low < high:
                inner = slice(int(low), int(high))
                values = _read(array, (*box[: self.axis], inner, *box[self.axis + 1 :]))
                pieces.append(self._as_floats(values))
        if not pieces:
            return np.zeros([s.stop - s.start for s in box], self.dtype)
        return np.concatenate(pieces, self.axis)

    def _as_floats(self, values: Array) -> Array:
        kind = kind_of(values.dtype)
        flat = as_floats(np.ascontiguousarray(values).reshape(-1), kind.name if kind else "float64")
        return flat.astype(self.dtype, copy=False).reshape(values.shape)

    def dask(self, arrays: Sequence[Any]) -> Any:
        import dask.array as da

        return da.concatenate([array.astype(self.dtype) for array in arrays], self.axis)

    def of(self, arrays: Sequence[Any]) -> View:
        return _JoinedView(arrays, self.axis)


def _read(array: Any, box: Box) -> Array:
    if isinstance(array, View):
        return array.read(box)
    return np.asarray(dense_values(array[box]))


# --- readers of views -----------------------------------------------------------------------------


class _ArrangedReader(ArrayReader):
    """The elements of a view in C order."""

    def __init__(self, view: View, nbytes: int, *, loads: bool) -> None:
        super().__init__(view, nbytes)
        self.whole = self.loads = loads

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Yield blocks of elements of the view, each after its first position."""
        if not self.loads:
            yield from super().blocks(start, stop, buffer)
            return
        # Load arrays that are slow to read in pieces.
        in_memory = _rebuilt(self.array, lambda leaf: np.asarray(dense_values(leaf[...])))
        yield from ArrayReader(in_memory).blocks(start, stop, buffer)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the byte ranges of all elements, if they are known in advance."""
        if start == 0 and stop:
            for leaf in leaves(self.array):
                if hasattr(leaf, "ranges"):
                    yield from leaf.ranges(...)


def reader_of_view(view: Any, readers: Sequence[Reader], name: str) -> Reader:
    """Return a reader of a view, whose arrays belong to some readers."""
    if len(readers) == 1 and view is readers[0].array:
        return in_c_order(readers[0])
    if any(isinstance(reader, ChunkedTensor) for reader in readers):
        import dask.array as da

        reader_of_all: Reader = ChunkedTensor(_as_dask(view))
        reader_of_all = in_c_order(reader_of_all)
        # Blocks lie within rows, so that each row has to be in one chunk.
        if (
            isinstance(reader_of_all, ChunkedTensor)
            and reader_of_all.array.ndim > 1
            and not reader_of_all.row
        ):
            reader_of_all = ChunkedTensor(da.rechunk(reader_of_all.array, {1: -1}))
    else:
        turns = _turns(view)
        loads = any(r.whole or (turns and not is_sliceable(in_c_order(r))) for r in readers)
        reader_of_all = _ArrangedReader(view, sum(reader.nbytes for reader in readers), loads=loads)
        reader_of_all.local = all(reader.local for reader in readers)
        reader_of_all.place = readers[0].place
        if turns:
            reader_of_all.piece_nbytes = TURNED_NBYTES
    reader_of_all.name = name
    return reader_of_all


def leaves(array: Any) -> Iterator[Any]:
    """Yield the arrays under a view, of any depth."""
    if not isinstance(array, View):
        yield array
        return
    for inner in array.arrays:
        yield from leaves(inner)


def _turns(array: Any) -> bool:
    """Return whether a row of a view is scattered over its arrays."""
    if not isinstance(array, View):
        return False
    is_across = isinstance(array, _Transposition) or getattr(array, "axis", 0) > 0
    return is_across or any(map(_turns, array.arrays))


def _rebuilt(array: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(array, View):
        return array.of([_rebuilt(inner, change) for inner in array.arrays])
    return change(array)


def _as_dask(array: Any) -> Any:
    import dask.array as da

    if isinstance(array, View):
        return array.dask([_as_dask(inner) for inner in array.arrays])
    return array if hasattr(array, "dask") else da.from_array(array)
