"""Deterministic quantisers, and the levels that stored scales allow.

`REPEATED` has quantisers that always make the same codes: if a conversion used one, quantising the
original again gives an equal result. The formulas of GGUF's types are from ``quantize_row_*_ref``
in ggml-quants.c (github.com/ggml-org/ggml at d99724f).

Quantisers that search for their scales, such as K-quants, cannot be repeated. `graded` reads a
stored tensor with the largest distance that each element may have from the original: half a step
between two levels of its block, or a whole step for IQ4, which does not choose its codes again
after the search. The search may sacrifice extreme numbers, so these may exceed the last level by
`_BEYOND` times the sum of one step and the range that rounding the scales takes away.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.compiling import compiled
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.dequantize import decode
from xckpt.arrays.kinds import kind_named
from xckpt.arrays.scaled import QuantizedArray
from xckpt.arrays.streams import ArrayStream
from xckpt.comparison.relations.causes import FRACTION_BITS, spacing_of
from xckpt.elements import BLOCK_TYPES, ELEMENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xckpt.typing import Array

F32 = np.float32

#: How far an element may exceed the last level, in steps, after a search for scales.
# Twice the largest excess measured with ggml's quantisers, with and without importance weights.
_BEYOND = {"q2_k": 8.0}
_USUALLY_BEYOND = 4.0
# Arithmetic in another order changes the last digits of a float32.
_SLACK = 1e-6
# Errors of float32 arithmetic, relative to the farthest level: numbers this close to the middle of
# two levels may be rounded to either.
_TIE = 2.0**-21
# Errors of scales that are quantised to 8 bits, and of their products in bfloat16, relative.
_RESCALED, _ROUNDED = 2.0**-6, 2.0**-7


# --- deterministic quantisers ---------------------------------------------------------------------


class Quantiser(NamedTuple):
    """A quantiser of blocks, as a function of rows that are one block each."""

    name: str
    block: int
    repeat: Callable[[Array], tuple[Array, Array, Array]]
    #: Steps between levels from zero, or else from the lowest number, to the farthest number.
    steps: int
    is_from_zero: bool = True

    def holds(self, x: Array, y: Array) -> Array:
        """Return a mask of the elements of whole blocks that quantising `x` turns into `y`."""
        blocks = np.ascontiguousarray(x, F32).reshape(-1, self.block)
        with np.errstate(all="ignore"):
            codes, scale, low = self.repeat(blocks)
            values = np.ascontiguousarray(y, F32).reshape(blocks.shape)
            is_held = np.empty(blocks.shape, np.bool_)
            if _mark_held(codes, scale, low, values, is_held) < is_held.size:
                # Arithmetic in another order may lead to the other side of a tie.
                nearest = np.rint(codes)
                distance = np.abs(np.abs(codes - nearest) - 0.5)
                ties = np.nonzero(distance < _TIE * (1 + np.abs(codes)))
                step, first = scale[ties[0], 0], low[ties[0], 0]
                codes, nearest, values = codes[ties], nearest[ties], values[ties]
                other_code = nearest + np.where(codes < nearest, F32(-1), F32(1))
                is_tie_held = is_held[ties] | (values == step * other_code + first)
                is_exact = distance[ties] == 0
                is_tie_held[is_exact] = _ties_held(
                    codes[is_exact], values[is_exact], step[is_exact], first[is_exact]
                )
                is_held[ties] = is_tie_held
        flat: Array = is_held.reshape(-1)
        return flat

    def round_trip(self, x: Array) -> Array:
        """Quantise whole blocks, and return the decoded numbers."""
        blocks = np.ascontiguousarray(x, F32).reshape(-1, self.block)
        with np.errstate(all="ignore"):
            codes, scale, low = self.repeat(blocks)
            numbers: Array = (scale * np.rint(codes) + low).reshape(-1)
        return numbers


def _ties_held(codes: Array, values: Array, scale: Array, low: Array) -> Array:
    """Return a mask of exact ties that follow one rule; implementations have different ones."""
    rules = (np.rint(codes), np.floor(codes + F32(0.5)), np.ceil(codes - F32(0.5)),
             np.copysign(np.floor(np.abs(codes) + F32(0.5)), codes))  # fmt: skip
    masks = [values == scale * rounded + low for rounded in rules]
    best: Array = max(masks, key=np.count_nonzero)
    return best


def _half(values: Array) -> Array:
    return values.astype(np.float16).astype(F32)


def _extreme(choose: Callable[[Array, Array], Array], blocks: Array) -> Array:
    """Return the largest or smallest number of each block; sizes are powers of two."""
    # Halving takes a tenth of the time of reducing short rows.
    while blocks.shape[1] > 1:
        blocks = choose(blocks[:, ::2], blocks[:, 1::2])
    return blocks


def _magnitude(blocks: Array) -> Array:
    """Return the largest magnitude in each block; NaN if there is one."""
    bits = np.empty((len(blocks), 1), np.uint32)
    _find_largest(np.ascontiguousarray(blocks, F32).view(np.uint32), bits)
    return bits.view(F32)


@compiled
def _find_largest(bits: Any, out: Any) -> None:
    """Find the largest magnitude of each row; magnitudes of floats ascend with their bits."""
    for row in range(bits.shape[0]):
        largest = np.uint32(0)
        for value in bits[row]:
            magnitude = np.uint32(value & np.uint32(0x7FFFFFFF))
            largest = max(largest, magnitude)
        out[row, 0] = largest


@compiled
def _mark_held(codes: Any, scale: Any, low: Any, values: Any, is_held: Any) -> Any:
    """Mark the values that their nearest codes decode to, and return their number."""
    count = 0
    for row in range(codes.shape[0]):
        step, first = scale[row, 0], low[row, 0]
        for column in range(codes.shape[1]):
            equal = values[row, column] == step * np.rint(codes[row, column]) + first
            is_held[row, column] = equal
            count += equal
    return count


def _largest(blocks: Array) -> Array:
    """Return the number farthest from zero in each block, with its sign; the first of a tie."""
    at = np.argmax(np.abs(blocks), axis=1)[:, None]
    return np.take_along_axis(blocks, at, axis=1)


def _inverse(scale: Array) -> Array:
    return np.where(scale == 0, F32(0), F32(1) / scale).astype(F32)


def _signed(half: int) -> Callable[[Array], tuple[Array, Array, Array]]:
    """Return the quantiser of Q4_0 and Q5_0: the number farthest from zero has the lowest code."""

    def repeat(blocks: Array) -> tuple[Array, Array, Array]:
        scale = _largest(blocks) / F32(-half)
        codes = np.clip(blocks * _inverse(scale), -half, half - 1)
        return codes, _half(scale), F32(0) * scale

    return repeat


def _spanning(most: int) -> Callable[[Array], tuple[Array, Array, Array]]:
    """Return the quantiser of Q4_1 and Q5_1: codes span the smallest to the largest number."""

    def repeat(blocks: Array) -> tuple[Array, Array, Array]:
        low = _extreme(np.minimum, blocks)
        scale = (_extreme(np.maximum, blocks) - low) / F32(most)
        codes = np.clip((blocks - low) * _inverse(scale), 0, most)
        return codes, _half(scale), _half(low)

    return repeat


def _symmetric(most: int) -> Callable[[Array], tuple[Array, Array, Array]]:
    """Return the quantiser of Q8_0, TQ1_0 and TQ2_0: its range is symmetric around zero."""

    def repeat(blocks: Array) -> tuple[Array, Array, Array]:
        scale = _magnitude(blocks) / F32(most)
        return blocks * _inverse(scale), _half(scale), F32(0) * scale

    return repeat


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
_E2M1_MIDDLES = (_E2M1[1:] + _E2M1[:-1]) / 2


def _microscaled(blocks: Array) -> tuple[Array, Array, Array]:
    """Quantise as MXFP4, with a power of two for a scale; the codes are doubled 4-bit floats."""
    largest = _magnitude(blocks)
    exponent = np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2
    scale = np.exp2(np.clip(exponent, -127, 127)).astype(F32)
    codes = blocks / scale
    # A number in the middle of two levels gets the smaller one.
    levels = np.copysign(_E2M1[np.searchsorted(_E2M1_MIDDLES, np.abs(codes))], codes)
    # Twice a level is a whole number.
    return 2 * levels, scale / 2, F32(0) * scale


class TableQuantiser(Quantiser):
    """A quantiser whose levels are the numbers of a table, times the scale of a block."""

    @property
    def table(self) -> Array:
        """The levels for a scale of 1."""
        return _TABLES[self.name.partition("/")[0]]

    @property
    def is_rescaled(self) -> bool:
        """True if the scales may be quantised as well, and the last level is 1."""
        return self.name.startswith("nf4")

    def round_trip(self, x: Array) -> Array:
        """Quantise whole blocks, and return the decoded numbers."""
        blocks = np.ascontiguousarray(x, F32).reshape(-1, self.block)
        with np.errstate(all="ignore"):
            levels, scale, _ = self.repeat(blocks)
            numbers: Array = (scale * levels).reshape(-1)
        return numbers

    def holds_after(self, x: Array, y: Array, rounded: Callable[[Array], Array]) -> Array:
        """Return a mask of the elements that quantising `x`, and then rounding, turns into `y`."""
        blocks = np.ascontiguousarray(x, F32).reshape(-1, self.block)
        values = np.ascontiguousarray(y, F32).reshape(blocks.shape)
        with np.errstate(all="ignore"):
            levels, scale, _ = self.repeat(blocks)
            exact = rounded((scale * levels).reshape(-1)).reshape(blocks.shape)
            is_held = values == exact
            if not is_held.all():
                if self.is_rescaled and np.count_nonzero(is_held.all(axis=1)) < len(blocks) / 2:
                    # The scales are quantised, too; the farthest number of each block is its scale.
                    new = _magnitude(values)
                    is_near = np.abs(new - scale) <= _RESCALED * scale
                    distance = np.abs(values - new * levels)
                    is_like_others = values == _usual_numbers(levels, values)
                    is_held |= is_near & (distance <= _ROUNDED * np.abs(values)) & is_like_others
                # Numbers in the middle of two levels may be rounded to either.
                table, inverse = self.table, _inverse(scale)
                chosen = table[_nearest(table, values * inverse)]
                decoded = rounded((scale * chosen).reshape(-1)).reshape(blocks.shape)
                codes = blocks * inverse
                error, least = np.abs(codes - chosen), np.abs(codes - levels)
                is_held |= (values == decoded) & (error <= least + _TIE * np.abs(codes))
        flat: Array = is_held.reshape(-1)
        return flat


def _usual_numbers(levels: Array, values: Array) -> Array:
    """Return the median number of all elements that have the same level in the same block."""
    order = np.lexsort((values, levels))
    in_order, numbers = (np.take_along_axis(x, order, axis=1) for x in (levels, values))
    is_first = np.ones(levels.shape, bool)
    is_first[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    starts = np.flatnonzero(is_first)
    counts = np.diff(starts, append=levels.size)
    medians = np.repeat(numbers.reshape(-1)[starts + counts // 2], counts)
    usual = np.empty_like(values)
    np.put_along_axis(usual, order, medians.reshape(values.shape), axis=1)
    return usual


def _nearest(table: Array, values: Array) -> Array:
    return np.searchsorted((table[1:] + table[:-1]) / 2, values)


def _of_table(name: str) -> Callable[[Array], tuple[Array, Array, Array]]:
    """Return a quantiser that maps the number farthest from zero to the largest level."""

    def repeat(blocks: Array) -> tuple[Array, Array, Array]:
        table = _TABLES[name.partition("/")[0]]
        scale = _magnitude(blocks) / table[-1]
        levels = table[_nearest(table, np.where(scale == 0, F32(0), blocks / scale))]
        return levels, scale, F32(0) * scale

    return repeat


def _float8_values() -> Array:
    values = np.arange(256, dtype=np.uint8).view(kind_named("float8_e4m3fn").dtype).astype(F32)
    return np.unique(values[np.isfinite(values)])


_TABLES = {
    # The quantiles of a normal distribution; QLoRA, appendix E (arxiv.org/abs/2305.14314).
    "nf4": np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ],
        F32,
    ),
    "float8_e4m3fn": _float8_values(),
}
#: Rows and columns of the blocks of float8 that have one scale.
TILES = (128, 64, 32)
#: Quantisers of single floats with a scale for each block, most levels last. A block of float8 is
#: a tile, in the order of `layouts.tiled`.
BY_TABLE = (
    *(
        TableQuantiser(name, n, _of_table("nf4"), 16)
        for name, n in (("nf4", 64), ("nf4/32", 32), ("nf4/128", 128))
    ),
    *(TableQuantiser(f"float8_e4m3fn/{n}", n * n, _of_table("float8_e4m3fn"), 256) for n in TILES),
)
REPEATED = (
    Quantiser("q8_0", 32, _symmetric(127), 127),
    Quantiser("q4_0", 32, _signed(8), 8),
    Quantiser("q5_0", 32, _signed(16), 16),
    Quantiser("q4_1", 32, _spanning(15), 15, is_from_zero=False),
    Quantiser("q5_1", 32, _spanning(31), 31, is_from_zero=False),
    Quantiser("tq2_0", 256, _symmetric(1), 1),
    # The farthest number is 8 or 12 steps from zero; with 24, all numbers are whole in both cases.
    Quantiser("mxfp4", 32, _microscaled, 24),
)
#: Quantisers by type of block. TQ1_0 has the numbers of TQ2_0 in fewer bits.
OF_BLOCKS = {quantiser.name: quantiser for quantiser in (*REPEATED, *BY_TABLE)} | {
    "tq1_0": REPEATED[5]
}

# Elements of the shortest block, which show whether numbers are evenly spaced.
_SHORTEST = 32
_STEPS = np.array([[quantiser.steps] for quantiser in REPEATED])
_IS_FROM_ZERO = np.array([[quantiser.is_from_zero] for quantiser in REPEATED])
# Smallest normal number of float16; smaller ones have an absolute error.
_SMALLEST_NORMAL = 2.0**-14


def possible_quantisers(y: Array, rounded_to: str) -> list[str]:
    """Return the quantisers whose levels the first numbers may be, after rounding to a type."""
    # Much cheaper than to quantise, and numbers that were not quantised hardly ever pass.
    error = 2.0 ** -(FRACTION_BITS[rounded_to] + 1) + _SLACK
    block = y[:_SHORTEST].astype(np.float64)
    with np.errstate(all="ignore"):
        low = np.where(_IS_FROM_ZERO, 0.0, block.min())
        step = np.abs(block - low).max(axis=1, keepdims=True) / _STEPS
        codes = (block - low) / step
        # The number, the lowest one and the step were rounded.
        size = np.maximum(np.abs(block), _SMALLEST_NORMAL)
        allowed = error * (2 * size + 4 * np.abs(low)) / step
        is_uneven = np.any(np.abs(codes - np.rint(codes)) > allowed, axis=1)
    tables = [quantiser.name for quantiser in BY_TABLE if _has_few_levels(y, quantiser)]
    return tables + [
        quantiser.name for quantiser, uneven in zip(REPEATED, is_uneven, strict=True) if not uneven
    ]


def _has_few_levels(y: Array, quantiser: Quantiser) -> bool:
    """Return whether the first block has as few distinct numbers as a quantiser has levels."""
    block = y[: quantiser.block]
    return len(block) == quantiser.block and len(np.unique(block)) <= quantiser.steps


# --- levels of stored scales ----------------------------------------------------------------------

#: A decoded element, and how far below and above it the original may be.
GRADED = np.dtype([("value", F32), ("below", F32), ("above", F32)])


class _Levels(NamedTuple):
    """The evenly spaced levels of each block."""

    #: Level of the lowest code.
    low: Array
    #: Distance between two levels.
    step: Array
    #: Highest code, counted from the lowest.
    most: int
    #: Range that rounding the scale takes away.
    loss: Array


def _at(blocks: Array, offset: int) -> Array:
    return blocks[:, offset : offset + 2].copy().view(np.float16).astype(F32)


def _with_minimum(at: int, codes: tuple[int, int, int], blocks: Array) -> _Levels:
    """Return the levels of Q4_K and Q5_K: 6-bit scales and minima, in units of two float16."""
    d, least = _at(blocks, at), _at(blocks, at + 2)
    first, second, most = codes
    s = blocks[:, first:second]
    scales = np.concatenate([s[:, :4] & 63, s[:, 8:] & 15 | (s[:, :4] >> 6) << 4], axis=1)
    minima = np.concatenate([s[:, 4:8] & 63, s[:, 8:] >> 4 | (s[:, 4:8] >> 6) << 4], axis=1)
    loss = (np.abs(d) * most + np.abs(least)) / 2
    return _Levels(-(least * minima.astype(F32)), d * scales.astype(F32), most, loss)


def _q2_k(blocks: Array) -> _Levels:
    d, least, s = _at(blocks, 80), _at(blocks, 82), blocks[:, :16]
    loss = (np.abs(d) * 3 + np.abs(least)) / 2
    return _Levels(-(least * (s >> 4).astype(F32)), d * (s & 15).astype(F32), 3, loss)


def _q3_k(blocks: Array) -> _Levels:
    d, s, at = _at(blocks, 108), blocks[:, 96:108], np.arange(16)
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1).astype(np.int16)
    scales = (low | (s[:, 8 + at % 4] >> 2 * (at // 4) & 3).astype(np.int16) << 4) - 32
    step = d * scales.astype(F32)
    return _Levels(-4 * step, step, 7, np.abs(d) * F32(3.5))


def _q6_k(blocks: Array) -> _Levels:
    d = _at(blocks, 208)
    step = d * blocks[:, 192:208].view(np.int8).astype(F32)
    return _Levels(-32 * step, step, 63, np.abs(d) * F32(31.5))


_OF_SEARCH: dict[str, Callable[[Array], _Levels]] = {
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": lambda blocks: _with_minimum(0, (4, 16, 15), blocks),
    "q5_k": lambda blocks: _with_minimum(0, (4, 16, 31), blocks),
    "q6_k": _q6_k,
}
# The unevenly spaced levels of IQ4_NL and IQ4_XS, in units of a scale.
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F32)


def _iq4_scale(name: str, blocks: Array) -> Array:
    d = _at(blocks, 0)
    if name == "iq4_nl":
        return d
    at = np.arange(8)
    high = blocks[:, 2:4].copy().view(np.uint16) >> (2 * at).astype(np.uint16) & 3
    low = blocks[:, 4 + at // 2] >> (4 * (at % 2)).astype(np.uint8) & 15
    return d * ((low | high << 4).astype(F32) - 32)


class _GradedBlocks:
    """Elements of blocks with the dtype `GRADED`, as a flat lazy array."""

    dtype = GRADED

    def __init__(self, array: BlockArray, start: int, size: int) -> None:
        self.array, self.start, self.shape = array, start, (size,)
        block = BLOCK_TYPES[array.block_type]
        self.block = block.size
        raw = replace(array.reader, part=replace(array.reader.part, dtype="uint8"))
        count = prod(array.shape) // self.block
        self.raw = DenseArray(array.name, raw, (count, block.nbytes), decode=False)

    def __getitem__(self, key: Any) -> Array:
        begin, end, _ = (key[0] if isinstance(key, tuple) else key).indices(self.shape[0])
        begin, end = begin + self.start, end + self.start
        first, last = begin // self.block, -(-end // self.block)
        blocks = np.ascontiguousarray(self.raw[first:last])
        grades = _grade(self.array.block_type, blocks, self.array.reader.part.byteorder)
        return grades[begin - first * self.block : end - first * self.block]


def _grade(name: str, blocks: Array, byteorder: str) -> Array:
    size = BLOCK_TYPES[name].size
    values = np.empty((len(blocks), size), F32)
    decode(name, blocks, values, byteorder)
    grades = np.empty(values.shape, GRADED)
    grades["value"] = values
    beyond = F32(_BEYOND.get(name, _USUALLY_BEYOND))
    with np.errstate(all="ignore"):
        if name in _OF_SEARCH:
            levels = _OF_SEARCH[name](blocks)
            low, step = np.broadcast_arrays(levels.low, levels.step)
            groups = values.reshape(len(blocks), low.shape[1], -1)
            ends = np.stack([low, low + step * levels.most])[..., None]
            step, allowed = np.abs(step)[..., None], beyond * (
                np.abs(step) + levels.loss
            )[..., None]  # fmt: skip
            slack = _SLACK * (np.abs(groups) + np.abs(ends).max(axis=0))
            middle = step / 2
            is_low = groups <= ends.min(axis=0) + slack
            is_high = groups >= ends.max(axis=0) - slack
        else:
            scale = _iq4_scale(name, blocks)[..., None]
            groups = values.reshape(len(blocks), scale.shape[1], -1)
            return _grade_by_table(grades, groups, scale, _IQ4, (beyond, F32(1), beyond))
    grades["below"] = (np.where(is_low, allowed, middle) + slack).reshape(values.shape)
    grades["above"] = (np.where(is_high, allowed, middle) + slack).reshape(values.shape)
    return grades.reshape(-1)


def _grade_by_table(
    grades: Array, groups: Array, scale: Array, table: Array, allowed: tuple[Any, Any, Any]
) -> Array:
    """Grade elements whose levels are the values of a table times a scale.

    `allowed` has three shares of the distance to the next level: below the first level of the
    table, between levels, and above the last one.
    """
    first, within, last = allowed
    codes = groups / np.where(scale == 0, F32(1), scale)
    at = np.clip(np.searchsorted((table[1:] + table[:-1]) / 2, codes), 0, len(table) - 1)
    gaps = np.diff(table)
    size = np.abs(scale)
    below = np.concatenate([[first * gaps[0]], within * gaps]).astype(F32)[at] * size
    above = np.concatenate([within * gaps, [last * gaps[-1]]]).astype(F32)[at] * size
    # A negative scale reverses the levels.
    below, above = np.where(scale < 0, above, below), np.where(scale < 0, below, above)
    slack = _SLACK * (np.abs(groups) + size * np.abs(table).max())
    grades["below"] = (below + slack).reshape(grades.shape)
    grades["above"] = (above + slack).reshape(grades.shape)
    return grades.reshape(-1)


def _rounding_error(values: Array, kind: str) -> Array:
    """Return the largest error of numbers that were rounded to a type."""
    form = ELEMENT_TYPES[kind].float_format
    spacing = np.where(values == 0, 0.0, spacing_of(values, kind))
    largest: Array = np.maximum(spacing, form.smallest if form else 0.0).astype(F32) / 2
    return largest


class _GradedCodes:
    """Elements of codes with a grid of scales, with the dtype `GRADED`, as a lazy array."""

    dtype = GRADED

    def __init__(self, array: QuantizedArray) -> None:
        self.array, self.shape = array, array.shape

    def __getitem__(self, key: Any) -> Array:
        keys = key if isinstance(key, tuple) else (key,)
        missing = [slice(None)] * (len(self.shape) - len(keys))
        ranges = [
            entry.indices(size)[:2] if isinstance(entry, slice) else (entry, entry + 1)
            for entry, size in zip((*keys, *missing), self.shape, strict=True)
        ]
        start, stop = zip(*ranges, strict=True)
        values = self.array[tuple([slice(*bounds) for bounds in ranges])]
        scale = np.broadcast_to(self.array.scales(start, stop), values.shape)
        grades = np.empty(values.shape, GRADED)
        grades["value"] = values
        codes = self.array.code_values
        table = np.unique(codes[np.isfinite(codes)]).astype(F32)
        scheme, last = self.array.quantization, F32(0.5)
        rounding = np.zeros((), F32)
        if scheme.code.startswith("float"):
            # Quantisers round the scales to the type of activations before they divide by them.
            rounding = np.abs(values) * F32(2**-8)
        elif scheme.biases:
            # MLX gives zero a code, so that the last level may be a step below the largest number,
            # and rounds scales and biases to their type after it has chosen the codes.
            low = self.array.biases(start, stop)
            values, last = values - low, F32(1)
            with np.errstate(all="ignore"):
                counts = np.where(scale == 0, F32(0), np.abs(values / scale))
            kind = self.array.readers["scales"].part.dtype
            rounding = _rounding_error(low, kind) + counts * _rounding_error(scale, kind)
        allowed = F32(0.5), F32(0.5), last
        graded = _grade_by_table(grades, values, scale, table, allowed).reshape(values.shape)
        graded["below"] += rounding
        graded["above"] += rounding
        return graded


class _GradedStream(ArrayStream):
    """A stream of elements with the dtype `GRADED`."""

    def __init__(self, graded: Any, nbytes: int, size: int) -> None:
        self.array, self.shape = graded, graded.shape
        self.complex, self.row = False, 0
        self.kind = kind_named("float32")
        self.size, self.nbytes = size, nbytes
        self.piece_nbytes = 4 << 20


def graded(stream: Any, start: int = 0, size: int | None = None) -> ArrayStream | None:
    """Return a stream of a run of elements with the dtype `GRADED`; None if it is unsupported."""
    lazy = stream.array
    count = prod(lazy.shape) if size is None else size
    grading: _GradedBlocks | _GradedCodes
    if isinstance(lazy, BlockArray):
        is_supported = lazy.block_type in {*_OF_SEARCH, "iq4_nl", "iq4_xs"}
        if not is_supported or lazy.reader.part.byteorder != "little":
            return None
        grading = _GradedBlocks(lazy, start, count)
    elif isinstance(lazy, QuantizedArray) and size is None:
        scheme = lazy.quantization
        # Every number is a code times a scale, and a bias.
        if scheme.bits > 8 or scheme.zero is None:
            return None
        grading = _GradedCodes(lazy)
    else:
        return None
    graded_stream = _GradedStream(grading, stream.nbytes, count)
    graded_stream.place, graded_stream.name = stream.place, stream.name
    return graded_stream
