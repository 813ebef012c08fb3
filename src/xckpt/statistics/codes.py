"""Statistics of quantised tensors: use of their codes, outliers cut off, scales at their limits.

Codes are counted as they are stored, without scales. Elements of at most 8 bits are codes, too.
Blocks of GGUF are included if their codes have 4 or 8 bits, in bytes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import nan, prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.keys import normalize
from xckpt.arrays.lazy import LazyArray, dense_values
from xckpt.arrays.scaled import CodebookArray, QuantizedArray
from xckpt.arrays.streams import TURNED_NBYTES, ArrayStream, ElementStream, of_tensor
from xckpt.elements import BLOCK_TYPES, ELEMENT_TYPES, code_values
from xckpt.scan.scanning import gather
from xckpt.statistics.counts import Sketch
from xckpt.statistics.describe import elements_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xckpt.progress import Progress
    from xckpt.statistics.definitions import Groups
    from xckpt.typing import Array

#: The statistics, of a tensor that has codes.
USE_OF_CODES = ("saturated", "unused")


class _Coded(NamedTuple):
    """The codes of a tensor, and the value of each code before scaling."""

    stream: ElementStream
    values: Array
    #: Whether a byte holds two codes.
    paired: bool = False


@dataclass(frozen=True, slots=True)
class Boxes:
    """Bytes that a function reads box by box, from the first position of each axis to the last."""

    read: Callable[[tuple[int, ...], tuple[int, ...]], Array]
    shape: tuple[int, ...]
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)

    def __getitem__(self, key: Any) -> Array:
        """Return the bytes of a box, with all axes."""
        spelled_out: Any = normalize(key, self.shape)
        starts = tuple([e.start if isinstance(e, slice) else e for e in spelled_out])
        stops = tuple([e.stop if isinstance(e, slice) else e + 1 for e in spelled_out])
        return self.read(starts, stops)


def use_of_codes(streams: Sequence[ElementStream], progress: Progress, *, cache: bool) -> Array:
    """Return a row of `USE_OF_CODES` for each tensor, NaN for those that have no codes."""
    shares = np.full((len(streams), len(USE_OF_CODES)), nan)
    coded = {n: codes for n, stream in enumerate(streams) if (codes := _coded(stream)) is not None}
    tensors = list(coded.values())

    def finish(position: int, sketch: Sketch) -> tuple[float, float]:
        codes, counts = sketch.counted()
        if tensors[position].paired:
            codes, counts = np.concatenate([codes & 15, codes >> 4]), np.tile(counts, 2)
        total = int(counts.sum())
        if not total:
            return nan, nan
        values = tensors[position].values
        finite = np.isfinite(values)
        # 0 and -0 are one value.
        distinct, of_code = np.unique(np.where(finite, values, 0.0), return_inverse=True)
        uses = np.bincount(of_code[codes], counts * finite[codes], len(distinct))
        if not (values[finite] == 0).any():
            distinct, uses = distinct[distinct != 0], uses[distinct != 0]
        # Symmetric codes leave the lowest out: -128 where the largest is 127.
        lowest = int(len(distinct) > 2 and not uses[0] and distinct[1] == -distinct[-1])
        ends = uses[lowest] + (uses[-1] if len(distinct) > 1 else 0)
        return float(ends / total), float(np.count_nonzero(uses == 0) / len(distinct))

    code_streams = [codes.stream for codes in tensors]
    rows = gather(code_streams, Sketch, finish, progress, cache=cache, stretched=True)
    for tensor, row in zip(coded, rows, strict=True):
        shares[tensor] = row
    return shares


def _coded(stream: ElementStream) -> _Coded | None:
    lazy = stream.array
    if isinstance(lazy, CodebookArray) or (
        isinstance(lazy, QuantizedArray) and lazy.quantization.bits <= 8
    ):
        is_turned = isinstance(lazy, QuantizedArray) and lazy.is_turned
        codes = _code_stream(stream, Boxes(lazy.codes, lazy.shape))
        if is_turned:
            codes.read_rows(TURNED_NBYTES)
        return _Coded(codes, lazy.code_values)
    if isinstance(lazy, BlockArray):
        block = BLOCK_TYPES[lazy.block_type]
        place = block.codes
        if place is None:
            return None
        stored = lazy.stored_blocks
        boxes = Boxes(
            lambda starts, stops: stored[starts[0] : stops[0], place.start : place.stop],
            (stored.shape[0], place.stop - place.start),
        )
        bits = ELEMENT_TYPES[place.dtype].bits
        values = code_values(place.dtype)[: 1 << bits] - place.zero
        return _Coded(_code_stream(stream, boxes), values, paired=bits == 4)
    kind = stream.kind
    if isinstance(lazy, DenseArray) and kind.exact and kind.bits <= 8:
        if kind.dtype.kind == "b":
            return None
        return _Coded(stream, kind.values[: 1 << kind.bits])
    return None


def _code_stream(stream: ElementStream, boxes: Boxes) -> ArrayStream:
    codes = ArrayStream(boxes, stream.nbytes)
    codes.name, codes.place = stream.name, stream.place
    if stream.identity is not None:
        codes.identity = (stream.identity[0], "codes", *stream.identity[1:])
    return codes


# --- beside an original ---------------------------------------------------------------------------


#: The statistics, of a tensor that has codes: elements of the original beyond `OUTLYING`, the share
#: of them that was cut off, scales, and the share of them at the limits of their type.
OF_CLIPPING = ("outliers", "clipped", "scales", "scale_limits")
#: All statistics of codes in a comparison.
OF_CODES = (*USE_OF_CODES, *OF_CLIPPING, "gain_db")
#: Magnitude beyond which elements are outliers, in root mean squares of the tensor.
OUTLYING = 4.0

# Codes of the blocks of GGUF that begin with the only scale, a float16.
_BLOCK_CODES = {"q4_0": range(-8, 8), "q5_0": range(-16, 16), "q8_0": range(-127, 128)}
# Classes of elements.
_OUTLIER, _CLIPPED = 1, 2


def clipping(
    pairs: Sequence[tuple[ElementStream, ElementStream]],
    sizes: Sequence[float],
    progress: Progress,
    *,
    cache: bool,
) -> Array:
    """Return a row of `OF_CLIPPING` for each pair of an original and its quantised tensor."""
    # `sizes` has the root mean square of each original, NaN if it is unknown.
    rows = np.full((len(pairs), len(OF_CLIPPING)), np.nan)
    classes = {
        row: stream
        for row, (pair, size) in enumerate(zip(pairs, sizes, strict=True))
        if (stream := _class_stream(*pair, OUTLYING * size)) is not None
    }

    def count_classes(_: int, sketch: Sketch) -> tuple[float, float]:
        codes, counts = sketch.counted()
        outliers, clipped = (int(counts[codes >= code].sum()) for code in (_OUTLIER, _CLIPPED))
        return outliers, clipped / outliers if outliers else np.nan

    def count_scales(_: int, sketch: Sketch) -> tuple[float, float]:
        float_format = sketch.kind.element.float_format
        if float_format is None or not sketch.count:
            return sketch.count, np.nan
        low, high = float_format.smallest_normal, float_format.largest
        scales = elements_of([sketch])
        at_limit = scales.count_where(lambda x: (np.abs(x) < low) | (np.abs(x) >= high))
        share = (at_limit + scales.nan + scales.inf) / sketch.count
        return sketch.count, float(share[0])

    class_streams = list(classes.values())
    tables = gather(class_streams, Sketch, count_classes, progress, cache=cache, stretched=True)
    for row, table in zip(classes, tables, strict=True):
        rows[row, :2] = table
    scales: dict[int, ElementStream] = {}
    for row, (_, quantised) in enumerate(pairs):
        lazy = quantised.array
        if isinstance(lazy, QuantizedArray):
            part_reader = lazy.readers["scales"]
            shape = part_reader.part.shape or (prod(lazy.stored_grid),)
            scales[row] = of_tensor(DenseArray(lazy.name, part_reader, shape), lazy.name)
    scale_streams = list(scales.values())
    tables = gather(scale_streams, Sketch, count_scales, progress, cache=cache, stretched=True)
    for row, table in zip(scales, tables, strict=True):
        rows[row, 2:] = table
    return rows


def _class_stream(
    ours: ElementStream, theirs: ElementStream, threshold: float
) -> ElementStream | None:
    """Return a stream of the class of each element; None if the codes are not supported."""
    lazy, kind = theirs.array, theirs.kind
    if isinstance(lazy, BlockArray):
        values: Any = list(_BLOCK_CODES.get(lazy.block_type, ()))
    elif isinstance(lazy, QuantizedArray) and lazy.quantization.bits <= 8:
        values = lazy.code_values
    elif isinstance(lazy, DenseArray) and kind.exact and kind.bits <= 8:
        values = kind.values[: 1 << kind.bits]
    else:
        return None
    ends = np.unique(np.array(values, np.float64))
    ends = ends[np.isfinite(ends)]
    if np.isnan(threshold) or ours.complex or len(lazy.shape) < 2 or len(ends) < 2:
        return None
    read = partial(_classes, (ours.array, lazy), ends, threshold)
    stream = ArrayStream(Boxes(read, lazy.shape), ours.nbytes + theirs.nbytes)
    stream.name, stream.place, stream.whole_rows = theirs.name, theirs.place, True
    # Arrays in memory are not sent to a cluster.
    stream.local = not isinstance(ours.array, LazyArray)
    if ours.identity is not None and theirs.identity is not None:
        files = ours.identity[0] + theirs.identity[0]
        stream.identity = (files, "clipping", threshold, ours.identity[1:], theirs.identity[1:])
    return stream


def _classes(
    sides: tuple[Any, Any],
    ends: Array,
    threshold: float,
    starts: tuple[int, ...],
    stops: tuple[int, ...],
) -> Array:
    """Return the class of each element in a box."""
    box = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
    original, decoded = (dense_values(side[box]).astype(np.float64) for side in sides)
    # Symmetric codes leave the lowest out: -128 where the largest is 127.
    low = ends[1] if ends[1] == -ends[-1] else ends[0]
    with np.errstate(all="ignore"):  # scales and elements are whatever the files have
        scales, codes = _scales_and_codes(sides[1], decoded, starts, stops)
        # Clipped: the code is at an end, and the original is farther out by more than half the
        # distance to the next code.
        error = (original - decoded) / scales
        above = (codes == ends[-1]) & (error > (ends[-1] - ends[-2]) / 2)
        below = (codes <= low) & (error < (ends[0] - ends[1]) / 2)
        is_outlier = np.abs(original) > threshold
    classes: Array = is_outlier.astype(np.uint8) + (is_outlier & (above | below))
    return classes


def _scales_and_codes(
    lazy: Any, decoded: Array, starts: tuple[int, ...], stops: tuple[int, ...]
) -> tuple[Any, Array]:
    """Return the scale of each element in a box of whole rows, and the value of its code."""
    if isinstance(lazy, QuantizedArray):
        return lazy.scales(starts, stops), lazy.code_values[lazy.codes(starts, stops)]
    if isinstance(lazy, DenseArray):
        return 1.0, decoded
    block = BLOCK_TYPES[lazy.block_type]
    of_row = prod(lazy.shape[1:]) // block.size
    heads = np.ascontiguousarray(lazy.stored_blocks[starts[0] * of_row : stops[0] * of_row, :2])
    scales = heads.view("<f2").astype(np.float64).repeat(block.size).reshape(decoded.shape)
    return scales, np.rint(decoded / scales)


# --- groups --------------------------------------------------------------------------------------


def gain_of(share: Array) -> Array:
    """Return the decibels that one more bit adds to the sqnr, from a share of squared errors."""
    # A bit halves the errors of these elements.
    gain: Array = -10 / np.log(10) * np.log1p(-0.75 * share)
    return gain


def _merge_gains(groups: Groups) -> Array:
    shares = -np.expm1(-groups["gain_db"] * np.log(10) / 10) / 0.75
    return gain_of(groups.sum(np.nan_to_num(shares)).clip(0.0, 1.0))


def _weighted(name: str, weight: str) -> Callable[[Groups], Array]:
    """Return a function that merges shares of a number of things; NaN shares do not count."""

    def merge(groups: Groups) -> Array:
        weights = np.where(np.isnan(groups[name]), 0.0, groups[weight])
        return groups.sum(np.nan_to_num(groups[name]) * weights) / groups.sum(weights)

    return merge


def _added(name: str) -> Callable[[Groups], Array]:
    return lambda groups: groups.sum(np.nan_to_num(groups[name]))


#: How the statistics of codes merge.
MERGES: dict[str, Callable[[Groups], Array]] = {
    "saturated": _weighted("saturated", "count"),
    "outliers": _added("outliers"),
    "clipped": _weighted("clipped", "outliers"),
    "scales": _added("scales"),
    "scale_limits": _weighted("scale_limits", "scales"),
    "gain_db": _merge_gains,
}
