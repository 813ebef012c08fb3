"""What differs between two tensors in each channel or block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.comparison.measures import Comparison, as_floats, compare_cells
from xckpt.comparison.pairs import ChunkedPair, PairReader, in_c_order
from xckpt.errors import shown
from xckpt.labels.filters import suggest_names
from xckpt.scan.readers import ChunkedTensor
from xckpt.scan.trees import LEAF, Tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.scan.entries import Described
    from xckpt.scan.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]

# An axis that is reduced is one block of its whole length, one that stays has blocks of one
# element. So each element belongs to a cell of a grid, and a run of elements along the last axis to
# one cell.

#: Dimensions to reduce: names, positions, or either with the number of neighbours to reduce to one.
Reduced = Hashable | Iterable[Hashable] | Mapping[Hashable, int | None]

# Columns of a table: numbers of elements, sums, and last the largest difference.
_COLUMNS = 10
#: Bytes of what is known of a cell, while tables are merged.
CELL_NBYTES = 4 * 8 * _COLUMNS


@dataclass(frozen=True, slots=True)
class ChannelGrid:
    """How the elements of a tensor are divided into cells."""

    shape: tuple[int, ...]
    #: Extent of a cell along each axis.
    blocks: tuple[int, ...]
    #: Names and sizes of what is left.
    dims: tuple[Hashable, ...]
    extents: tuple[int, ...]

    def runs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and blocks with as few axes as can be: neighbours alike are one."""
        shape, blocks = [1], [1]
        for size, block in zip(self.shape, self.blocks, strict=True):
            alike = blocks[-1] == 1 == block or (blocks[-1] == shape[-1] and block == size)
            if alike:
                shape[-1] *= size
                blocks[-1] *= block
            else:
                shape.append(size)
                blocks.append(block)
        return tuple(shape), tuple(blocks)


def wanted_lengths(dim: Reduced, entries: Sequence[Described]) -> dict[Hashable, int | None]:
    """Return what is to be reduced, with the number of neighbours; None for all of them."""
    if isinstance(dim, Mapping):
        lengths: dict[Hashable, int | None] = dict(dim)
        for key, length in lengths.items():
            is_number = isinstance(length, int) and not isinstance(length, bool)
            if length is not None and not (is_number and length >= 1):
                text = "a number of neighbours is a whole number of at least 1, or None for all"
                raise ValueError(f"dim={{{key!r}: {length!r}}}: {text}")
    elif isinstance(dim, Iterable) and not isinstance(dim, str):
        lengths = dict.fromkeys(dim)
    else:
        lengths = {dim: None}
    stacked = {str(each) for entry in entries for each in entry.dims}
    known = {str(each) for entry in entries for each in entry.variable.dims} - stacked
    for key in lengths:
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise TypeError(f"dim takes names and positions of dimensions, not {key!r}")
        if isinstance(key, int) or key in known:
            continue
        if key in stacked:
            raise ValueError(f"tensors are stacked along {shown(key)}, and are compared one by one")
        hint = suggest_names(sorted(known | stacked), key)
        raise ValueError(f"no variable has the dimension {shown(key)}{hint}")
    return lengths


def grid_of(entry: Described, lengths: Mapping[Hashable, int | None]) -> ChannelGrid | None:
    """Divide the tensors of a variable; None if they have none of the dimensions."""
    own = [dim for dim in entry.variable.dims if dim not in entry.dims]
    shape = tuple([entry.variable.sizes[dim] for dim in own])
    wanted: dict[int, int | None] = {}
    for key, length in lengths.items():
        if isinstance(key, int):
            if -len(own) <= key < len(own):
                wanted[key % len(own)] = length
        elif key in own:
            wanted[own.index(key)] = length
    if not wanted:
        return None
    blocks, dims, extents = [], [], []
    for axis, size in enumerate(shape):
        length = wanted.get(axis, 1)
        blocks.append(max(1, size if length is None else min(length, size)))
        if length is not None:
            dims.append(f"{own[axis]}_block" if axis in wanted else own[axis])
            extents.append(-(-size // blocks[-1]))
    return ChannelGrid(shape, tuple(blocks), tuple(dims), tuple(extents))


def pair_in_order(first: Reader, second: Reader, name: str) -> PairReader | ChunkedPair:
    """Return two tensors of one shape, read in C order."""
    first, second = in_c_order(first), in_c_order(second)
    is_chunked = isinstance(first, ChunkedTensor) or isinstance(second, ChunkedTensor)
    pair = ChunkedPair(first, second) if is_chunked else PairReader(first, second)
    pair.name = name
    return pair


class Channels(Comparison):
    """What is known of pairs of elements, by the cell that they are in."""

    #: Many elements to a table, which may be large.
    leaf = 32 * LEAF

    def __init__(self, kinds: tuple[str, str], size: int, grid: ChannelGrid) -> None:
        super().__init__(kinds, size)
        self.shape, self.blocks = grid.runs()
        self.cells = prod(grid.extents)
        extents = [-(-n // block) for n, block in zip(self.shape, self.blocks, strict=True)]
        self.strides = [prod(extents[axis + 1 :]) for axis in range(len(extents))]
        self.tree: Tree[Any] = Tree(_joined, (0, np.zeros((0, _COLUMNS))))

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> Channels:
        """Return one for pairs of elements; the argument is a `ChannelGrid`."""
        return cls(reader.kinds, reader.size, argument)

    def table(self) -> Array:
        """Return what is known of each cell, once all elements are there."""
        first, found = self.tree.total()
        table = np.zeros((self.cells, _COLUMNS))
        table[first : first + len(found)] = found
        return table

    def _complete(self, start: int, columns: tuple[Array, ...]) -> None:
        for at in range(0, len(columns[0]), self.leaf):
            some = [column[at : at + self.leaf] for column in columns]
            with np.errstate(invalid="ignore", over="ignore"):
                node = self._node(start + at, *some)
            self.tree.add(0, (start + at) // self.leaf, node)

    def _node(self, start: int, a: Array, b: Array) -> tuple[int, Array]:
        """Describe the cells that a leaf has elements of."""
        size, block = self.shape[-1], self.blocks[-1]
        (line, along), (last, end) = divmod(start, size), divmod(start + len(a) - 1, size)
        left = np.arange(line, last + 1)
        bases = np.zeros(len(left), np.int64)
        for axis in reversed(range(len(self.shape) - 1)):
            left, at = np.divmod(left, self.shape[axis])
            bases += at // self.blocks[axis] * self.strides[axis]
        low, high = (along // block, end // block) if line == last else (0, (size - 1) // block)
        first = int(bases.min()) + low
        table = np.zeros((int(bases.max()) + high + 1 - first, _COLUMNS))
        compare_cells(*self._numbers(a, b), along, size, block, bases - first, table)
        return first, table

    def _numbers(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Return both sides as floats of one type."""
        x, y = (as_floats(each, kind) for each, kind in zip((a, b), self.kinds, strict=True))
        return (x, y) if x.dtype == y.dtype else (x.astype(np.float64), y.astype(np.float64))


def _joined(one: tuple[int, Array], other: tuple[int, Array]) -> tuple[int, Array]:
    """Add up two tables."""
    parts = [each for each in (one, other) if len(each[1])]
    if len(parts) < 2:
        return parts[0] if parts else one
    first = min(start for start, _ in parts)
    table = np.zeros((max(start + len(each) for start, each in parts) - first, _COLUMNS))
    for start, each in parts:
        rows = table[start - first : start - first + len(each)]
        rows[:, :-1] += each[:, :-1]
        np.maximum(rows[:, -1], each[:, -1], out=rows[:, -1])
    return first, table


def measures_of(table: Array) -> Array:
    """Compute all statistics of each cell: a column for each of `differences.MEASURES`."""
    count, equal, finite, nan, inf, d, a, b, product, largest = table.T
    with np.errstate(divide="ignore", invalid="ignore"):
        nmse = np.where(d > 0, d / a, 0.0)
        cosine = np.clip(product / (np.sqrt(a) * np.sqrt(b)), -1.0, 1.0)
        cosine = np.where(d == 0, 1.0, cosine)
        sqnr = -10 * np.log10(nmse)
        found = [largest, np.sqrt(d / finite), np.sqrt(nmse), cosine, sqnr, nmse]
        # Of cells without elements all are equal.
        head = [equal < count, count, np.where(count, equal / count, 1.0), nan, inf]
    nothing = (finite == 0) & (equal < count)
    rest = np.where(nothing, np.nan, np.stack(found))
    rest[1] = np.where(equal == count, 0.0, rest[1])
    return np.stack([*head, *rest]).T
