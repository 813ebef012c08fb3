"""Statistics of the channels of a tensor: its rows and its columns.

Rows are output channels and columns are input channels, if the axes of a weight are known; all
positions of the kernel of a convolution are within a channel. Otherwise a row is a slice along the
axis that is stored slowest, as in `counts.Rows`, and the positions in it are the columns; if such a
slice has too many elements, as for stacked experts, or is the whole tensor, rows run along the last
axis. The pass that makes the sketch of a tensor also records
the largest magnitude of each row and column, as a bit pattern. It shows dead channels and outliers.
Sparse tensors, and tensors without such rows, have no statistics of channels.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics import block_loops
from xckpt.statistics.counts import Sketch, Tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.arrays.kinds import Kind
    from xckpt.typing import Array

#: Names of the statistics of channels; they follow all others.
OF_CHANNELS = (
    "at_ends", "spare_bits", "dead_columns", "dead_block", "faint_rows", "faint_row",
    "outlier_rows", "outlier_columns", "top_row", "top_column", "row_count", "column_count",
    "empty_rows", "first_empty_row", "first_dead_column", "next_largest", "equal_rows",
    "repeated_rows", "product_l2",
)  # fmt: skip
#: Magnitude beyond which elements are outliers, in standard deviations.
OUTLYING = 20.0
#: A row is faint if its largest element is below this share of the median row's largest element.
FAINT = 0.01

_FEWEST_COLUMNS = 8
_MOST_COLUMNS = 1 << 16
_MOST_ROWS = 1 << 22
# Elements that usually suffice to show that all low bits are used.
_TRIED = 4096
# Common sizes of attention heads.
_BLOCKS = (256, 192, 128, 96, 80, 64, 48, 32, 16)


class ChannelSketch(Sketch):
    """A sketch with the largest magnitude in each row and column, and a mask of the used bits."""

    def __init__(self, kind: Kind, row: int = 0, width: int = 0) -> None:
        super().__init__(kind, row)
        #: Elements in a row; 0 for a tensor without channels.
        self.width = width
        self.columns: Array = np.zeros(width, kind.unsigned)
        #: First rows of runs of rows, with the largest magnitude in each row of the run.
        self.spans: list[tuple[int, Array]] = []
        #: Bits that are set in any element.
        self.bits = 0

    @classmethod
    def begin(cls, stream: Any, argument: Any) -> ChannelSketch:
        """Return an empty sketch for a tensor; the argument is its `width_of`."""
        if stream.sparse:
            return cls(stream.kind)
        return cls(stream.kind, stream.row, argument)

    def _add_block(self, tables: Tables, start: int, values: Array) -> None:
        super()._add_block(tables, start, values)
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
        """Add the sketch of other elements of the same tensor."""
        super().merge(other)
        if isinstance(other, ChannelSketch):
            np.maximum(self.columns, other.columns, out=self.columns)
            self.spans += other.spans
            self.bits |= other.bits

    def rows_of_channels(self) -> Array:
        """Return the largest magnitude in each row, as a pattern."""
        rows = np.zeros(-(-self.count // self.width) if self.width else 0, self.kind.unsigned)
        for first, run in self.spans:
            part = rows[first : first + len(run)]
            np.maximum(part, run, out=part)
        return rows

    def _fields(self) -> dict[str, Any]:
        spans = [[first, rows.tobytes()] for first, rows in self.spans]
        channels = {"width": self.width, "columns": self.columns.tobytes(), "spans": spans}
        return super()._fields() | channels | {"bits": str(self.bits)}

    def _restore(self, fields: Mapping[str, Any], stream: Any) -> None:
        super()._restore(fields, stream)
        self.width = fields["width"]
        unsigned = self.kind.unsigned
        self.columns = np.frombuffer(fields["columns"], unsigned).copy()
        self.spans = [(first, np.frombuffer(rows, unsigned)) for first, rows in fields["spans"]]
        self.bits = int(fields["bits"])


def width_of(stream: Any) -> int:
    """Return the number of elements in a row of a tensor; 0 for a tensor without channels."""
    if stream.sparse or stream.complex or not stream.kind.has_zero or not stream.row:
        return 0
    width = stream.row
    if not stream.is_turned and (width > _MOST_COLUMNS or width == stream.size):
        width = stream.array.shape[-1]
    few = _FEWEST_COLUMNS <= width <= _MOST_COLUMNS and stream.size // width <= _MOST_ROWS
    return width if few else 0


def _used_bits(values: Array, patterns: Array, mask: int) -> int:
    """Add the bits that are set in any element to a mask; stop once it has one of the low bits."""
    spare = 29 if values.itemsize == 8 else 13
    for part, bits in ((values[:_TRIED], patterns[:_TRIED]), (values, patterns)):
        if mask & ((1 << spare) - 1):
            return mask
        mask |= int(np.bitwise_or.reduce(bits))
        if values.itemsize == 8:
            with np.errstate(over="ignore", invalid="ignore"):
                back = part.astype(np.float32).astype(np.float64)
            if not np.array_equal(back, part, equal_nan=True):
                return mask | 1
    return mask


def channel_statistics(sketch: ChannelSketch, std: float, stream: Any) -> list[float]:
    """Return the statistics `OF_CHANNELS`, in order; NaN if one does not apply."""
    statistics = dict.fromkeys(OF_CHANNELS, np.nan)
    kind = sketch.kind
    if not sketch.count:
        return list(statistics.values())
    if kind.is_float and not kind.exact:
        lowest = (sketch.bits & -sketch.bits).bit_length() - 1
        statistics["spare_bits"] = float(lowest if sketch.bits else kind.bits)
    if kind.exact and kind.bits <= 8 and kind.dtype.kind != "b":
        statistics["at_ends"] = count_at_ends(sketch)
    if sketch.width:
        patterns = _sides(sketch, stream)
        statistics["row_count"], statistics["column_count"] = map(float, map(len, patterns))
        statistics["empty_rows"] = float(np.count_nonzero(patterns[0] == 0))
        statistics["dead_columns"] = float(np.count_nonzero(patterns[1] == 0))
        statistics["dead_block"] = float(max(map(_block, patterns)))
        if not kind.exact:
            most, number = _equal(patterns[0])
            statistics["equal_rows"], statistics["repeated_rows"] = float(most), float(number)
        rows, columns = (_magnitudes(side, kind) for side in patterns)
        alive = rows[rows > 0]
        # `numpy.median` would double the duration of this function.
        middle = np.partition(alive, len(alive) // 2)[len(alive) // 2] if len(alive) else 0.0
        faint = (rows > 0) & (rows < FAINT * middle)
        statistics["faint_rows"] = float(np.count_nonzero(faint))
        statistics["faint_row"] = float(np.argmax(faint)) if faint.any() else np.nan
        statistics["first_empty_row"] = _first(patterns[0] == 0)
        statistics["first_dead_column"] = _first(patterns[1] == 0)
        if len(alive) and len(columns):
            # A matrix of rank 1 is the product of the two, divided by their largest number.
            largest = float(rows.max())
            sides = float(np.linalg.norm(rows / largest)), float(np.linalg.norm(columns / largest))
            statistics["product_l2"] = sides[0] * sides[1] * largest
        if kind.is_float and std > 0:
            statistics["outlier_rows"] = float(np.count_nonzero(rows > OUTLYING * std))
            statistics["outlier_columns"] = float(np.count_nonzero(columns > OUTLYING * std))
            statistics["top_row"] = float(np.argmax(rows))
            statistics["top_column"] = float(np.argmax(columns)) if len(columns) else np.nan
            statistics["next_largest"] = float(max(_second(rows), _second(columns)))
    return list(statistics.values())


def _first(mask: Array) -> float:
    return float(np.argmax(mask)) if mask.any() else np.nan


def _second(values: Array) -> float:
    """Return the second largest value; 0 for fewer than two."""
    return float(np.partition(values, -2)[-2]) if len(values) > 1 else 0.0


def _equal(patterns: Array) -> tuple[int, int]:
    """Return how many rows have the same largest element, and how many have that of an earlier one.

    Rows of zeros are left out.
    """
    alive = np.sort(patterns[patterns > 0])
    if not len(alive):
        return 0, 0
    starts = np.flatnonzero(np.diff(alive, prepend=0))
    return int(np.diff(np.append(starts, len(alive))).max()), len(alive) - len(starts)


def _sides(sketch: ChannelSketch, stream: Any) -> list[Array]:
    """Return the largest magnitudes of rows and columns, as patterns."""
    shape = stream.array.shape
    turned = stream.is_turned
    stored = shape[::-1] if turned else shape
    patterns = [sketch.rows_of_channels(), sketch.columns]
    split = 1 if sketch.width == stream.row else len(stored) - 1
    channels = stream.channels
    if channels is None or len(stored) != len(shape):
        return patterns[::-1] if turned else patterns
    sides = []
    for axes in (channels.rows, channels.columns):
        places = [len(shape) - 1 - axis if turned else axis for axis in axes]
        # The last axis decides where axes are on both sides; the others are within a channel.
        is_behind = bool(places) and places[-1] >= split
        if not places:
            sides.append(patterns[0][:0])
            continue
        extents = stored[split:] if is_behind else stored[:split]
        own = sorted([p - split * is_behind for p in places if (p >= split) == is_behind])
        grid = patterns[is_behind].reshape(extents)
        sides.append(grid.max(axis=tuple([a for a in range(len(extents)) if a not in own])).ravel())
    return sides


def count_at_ends(sketch: Sketch) -> float:
    """Count the elements that are the smallest or the largest number of their type."""
    codes, counts = sketch.counted()
    return float(counts[_ends(sketch.kind)[codes]].sum())


@cache
def _ends(kind: Kind) -> Array:
    values = kind.values
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    # For int8, -127 is an end like 127, because symmetric quantisers do not use -128.
    ends: Array = (values <= max(low, -high) if low < 0 else values == low) | (values == high)
    return ends & np.isfinite(values)


def _magnitudes(patterns: Array, kind: Kind) -> Array:
    """Return the magnitudes that patterns encode; zero for infinities and NaN."""
    if not kind.is_float:
        return patterns.astype(np.float64)  # only zeros matter for integers
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = kind.values[patterns] if kind.exact else patterns.view(kind.dtype).astype(float)
    return np.where(np.isfinite(values), np.abs(values), 0.0)


def _block(largest: Array) -> int:
    """Return the size of the aligned blocks that the dead channels fill exactly, else 0."""
    dead = largest == 0
    if not dead.any() or dead.all():
        return 0
    for size in _BLOCKS:
        if len(dead) % size == 0 and len(dead) > size:
            blocks = dead.reshape(-1, size)
            if (blocks.all(axis=1) == blocks.any(axis=1)).all():
                return size
    return 0
