"""What is in each channel of a tensor, and what differs between two in each channel or block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import shown
from xckpt.labels.filters import suggest_names
from xckpt.statistics import block_loops
from xckpt.statistics.accumulate import Sketch
from xckpt.statistics.comparison import Comparison, as_floats, compare_cells
from xckpt.statistics.moments import LEAF, Tree
from xckpt.statistics.pairs import ChunkedPair, PairReader, in_c_order
from xckpt.statistics.readers import ArrayReader, ChunkedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.statistics.accumulate import Tables
    from xckpt.statistics.entries import Described
    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]

# --- of a tensor ---------------------------------------------------------------------------------

# Found in the pass that makes its sketch. A row is as in `Rows`: a slice along the axis that is
# stored slowest; its positions are the columns. Where such a slice has too many, as that of stacked
# experts, or is all there is, rows run along the last axis. Of each row and column the largest
# magnitude is kept, as a bit pattern: it says whether there is anything but zeros, and how far it
# stands out. Tensors without such rows, and sparse ones, have none.

#: The statistics that follow from it, after all others.
OF_CHANNELS = (
    *("subnormal", "at_ends", "spare_bits", "dead_columns", "dead_block"),
    *("faint_rows", "faint_row", "outlier_rows", "outlier_columns", "top_row", "top_column"),
)
#: Magnitudes from which an element of a channel is an outlier, in standard deviations.
OUTLYING = 20.0
#: A row is faint if its largest element is less than this part of that of the median row.
FAINT = 0.01

_FEWEST_COLUMNS = 8
_MOST_COLUMNS = 1 << 16
_MOST_ROWS = 1 << 22
# Elements that nearly always show that no low bits are spare.
_TRIED = 4096
# Sizes of heads.
_BLOCKS = (256, 192, 128, 96, 80, 64, 48, 32, 16)


class ChannelSketch(Sketch):
    """A sketch, with the largest magnitude in each row and column, and the bits that are used."""

    def __init__(self, kind: Kind, size: int, row: int = 0, width: int = 0) -> None:
        super().__init__(kind, size, row)
        #: Elements of a row; 0 where they are not looked at.
        self.width = width
        self.columns: Array = np.zeros(width, kind.unsigned)
        #: Numbers of first rows, and what is in these and the following ones.
        self.spans: list[tuple[int, Array]] = []
        #: The bits that any element has.
        self.bits = 0

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> ChannelSketch:
        """Return one for elements of a tensor, whose `width_of` is given."""
        if reader.sparse:
            return cls(reader.kind, -1)
        return cls(reader.kind, reader.size, reader.row, argument)

    def _add_block(self, tables: Tables, start: int, values: Array, *, is_whole: bool) -> None:
        super()._add_block(tables, start, values, is_whole=is_whole)
        patterns = values.view(self.kind.unsigned)
        if not (self.kind.exact or self.kind.integer):
            self.bits |= _used_bits(values, patterns, self.bits)
        if self.width:
            first, last = start // self.width, (start + len(values) - 1) // self.width
            rows = np.zeros(last - first + 1, self.kind.unsigned)
            magnitude = self.kind.unsigned.type(self.kind.magnitude)
            block_loops.largest_of_channels(
                patterns, magnitude, start, self.width, self.columns, rows
            )
            self.spans.append((first, rows))

    def merge(self, other: Sketch) -> None:
        """Add what another one found in other elements."""
        super().merge(other)
        if isinstance(other, ChannelSketch):
            np.maximum(self.columns, other.columns, out=self.columns)
            self.spans += other.spans
            self.bits |= other.bits

    def rows_of_channels(self) -> Array:
        """Return the largest magnitude in each row, as a pattern."""
        rows = np.zeros(-(-self.count // self.width) if self.width else 0, self.kind.unsigned)
        for first, some in self.spans:
            part = rows[first : first + len(some)]
            np.maximum(part, some, out=part)
        return rows

    def _fields(self) -> dict[str, Any]:
        spans = [[first, rows.tobytes()] for first, rows in self.spans]
        channels = {"width": self.width, "columns": self.columns.tobytes(), "spans": spans}
        return super()._fields() | channels | {"bits": str(self.bits)}

    def _restore(self, fields: Mapping[str, Any], reader: Any) -> None:
        super()._restore(fields, reader)
        self.width = fields["width"]
        unsigned = self.kind.unsigned
        self.columns = np.frombuffer(fields["columns"], unsigned).copy()
        self.spans = [(first, np.frombuffer(rows, unsigned)) for first, rows in fields["spans"]]
        self.bits = int(fields["bits"])


def width_of(reader: Any) -> int:
    """Return how many elements a row of a tensor has; 0 where rows are not looked at."""
    if reader.sparse or reader.complex or not reader.kind.has_zero or not reader.row:
        return 0
    width = reader.row
    if not is_turned(reader) and (width > _MOST_COLUMNS or width == reader.size):
        width = reader.array.shape[-1]
    few = _FEWEST_COLUMNS <= width <= _MOST_COLUMNS and reader.size // width <= _MOST_ROWS
    return width if few else 0


def is_turned(reader: Any) -> bool:
    """Return whether the rows of a tensor are stored as columns."""
    known = isinstance(reader, ArrayReader | ChunkedTensor)
    return not known and getattr(reader.array, "order", "C") == "F"


def _used_bits(values: Array, patterns: Array, known: int) -> int:
    """Return the bits that any element has, or some of them if these are the lowest already."""
    spare = 29 if values.itemsize == 8 else 13
    for some, bits in ((values[:_TRIED], patterns[:_TRIED]), (values, patterns)):
        if known & ((1 << spare) - 1):
            return known
        known |= int(np.bitwise_or.reduce(bits))
        if values.itemsize == 8:
            with np.errstate(over="ignore", invalid="ignore"):
                back = some.astype(np.float32).astype(np.float64)
            if not np.array_equal(back, some, equal_nan=True):
                return known | 1
    return known


def channel_statistics(sketch: ChannelSketch, std: float, *, turned: bool) -> list[float]:
    """Return the statistics `OF_CHANNELS`; NaN where they have no meaning."""
    found = dict.fromkeys(OF_CHANNELS, np.nan)
    kind = sketch.kind
    if not sketch.count:
        return list(found.values())
    if kind.is_float:
        codes, counts = sketch.counted()
        if kind.exact:
            found["subnormal"] = float(counts[_subnormal(kind)[codes]].sum())
        else:
            # Seven bits of the fraction are in a code, and no bit of the exponent is set.
            tiny = codes & ((1 << (kind.code_bits - 1)) - 1) < 1 << 7
            found["subnormal"] = float(counts[tiny].sum()) - sketch.zero
        if not kind.exact:
            lowest = (sketch.bits & -sketch.bits).bit_length() - 1
            found["spare_bits"] = float(lowest if sketch.bits else kind.bits)
    if kind.exact and kind.bits <= 8 and kind.dtype.kind != "b":
        found["at_ends"] = count_at_ends(sketch)
    if sketch.width:
        patterns = [sketch.rows_of_channels(), sketch.columns]
        if turned:
            patterns.reverse()
        found["dead_columns"] = float(np.count_nonzero(patterns[1] == 0))
        found["dead_block"] = float(max(map(_block, patterns)))
        rows, columns = (_magnitudes(each, kind) for each in patterns)
        alive = rows[rows > 0]
        # `numpy.median` takes a tenth of a millisecond, as long as all else here.
        middle = np.partition(alive, len(alive) // 2)[len(alive) // 2] if len(alive) else 0.0
        faint = (rows > 0) & (rows < FAINT * middle)
        found["faint_rows"] = float(np.count_nonzero(faint))
        found["faint_row"] = float(np.argmax(faint)) if faint.any() else np.nan
        if kind.is_float and std > 0:
            found["outlier_rows"] = float(np.count_nonzero(rows > OUTLYING * std))
            found["outlier_columns"] = float(np.count_nonzero(columns > OUTLYING * std))
            found["top_row"], found["top_column"] = (
                float(np.argmax(rows)),
                float(np.argmax(columns)),
            )
    return list(found.values())


def count_at_ends(sketch: Sketch) -> float:
    """Count the elements of a small type that are the smallest or the largest it has."""
    codes, counts = sketch.counted()
    return float(counts[_ends(sketch.kind)[codes]].sum())


@cache
def _ends(kind: Kind) -> Array:
    values = kind.values
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    # Of integers, -127 is an end as 127 is: scales are the same on both sides of zero.
    ends: Array = (values <= max(low, -high) if low < 0 else values == low) | (values == high)
    return ends & np.isfinite(values)


@cache
def _subnormal(kind: Kind) -> Array:
    """Return which codes of an exact kind of floats are subnormal numbers."""
    if kind.element.float_format is None:
        raise TypeError(f"{kind.name} is not a float")
    magnitudes = np.abs(kind.values)
    subnormal: Array = (magnitudes > 0) & (magnitudes < kind.element.float_format.smallest_normal)
    return subnormal


def _magnitudes(patterns: Array, kind: Kind) -> Array:
    """Return the magnitudes that patterns encode; zero where they are not finite."""
    if not kind.is_float:
        return patterns.astype(np.float64)  # of integers, only the zeros matter
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = kind.values[patterns] if kind.exact else patterns.view(kind.dtype).astype(float)
    return np.where(np.isfinite(values), np.abs(values), 0.0)


def _block(largest: Array) -> int:
    """Return the size of aligned blocks that dead channels fill; 0 if they do not."""
    dead = largest == 0
    if not dead.any() or dead.all():
        return 0
    for size in _BLOCKS:
        if len(dead) % size == 0 and len(dead) > size:
            blocks = dead.reshape(-1, size)
            if (blocks.all(axis=1) == blocks.any(axis=1)).all():
                return size
    return 0


# --- of two tensors ------------------------------------------------------------------------------

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
