"""Statistics of the channels of a tensor, which are its rows and its columns."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.scan.readers import ArrayReader, ChunkedTensor
from xckpt.statistics import block_loops
from xckpt.statistics.counts import Sketch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.scan.kinds import Kind
    from xckpt.statistics.counts import Tables

Array = np.ndarray[Any, np.dtype[Any]]

# Found in the pass that makes its sketch. A row is as in `Rows`: a slice along the axis that is
# stored slowest; its positions are the columns. Where such a slice has too many, as that of stacked
# experts, or is all there is, rows run along the last axis. Of each row and column the largest
# magnitude is kept, as a bit pattern: it says whether there is anything but zeros, and how far it
# stands out. Tensors without such rows, and sparse ones, have none.

#: The statistics that follow from it, after all others.
OF_CHANNELS = (
    *("at_ends", "spare_bits", "dead_columns", "dead_block"),
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
    if kind.is_float and not kind.exact:
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
