"""Quantised tensors as float32, computed from codes, scales and the other parts of a scheme."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.dense import DenseArray, elements
from xckpt.arrays.keys import (
    AxisKey,
    Chunks,
    chunks_along_slowest,
    contiguous_run,
    cut_along,
    positions,
    result_shape,
    take,
)
from xckpt.arrays.lazy import LazyArray
from xckpt.elements import ELEMENT_TYPES, stored_dtype
from xckpt.errors import FormatError
from xckpt.index import Codebook, Quantization, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from xckpt.arrays.parts import PartReader
    from xckpt.storage import Source
    from xckpt.typing import Array

Shape = tuple[int, ...]
# Elements between the selected ones that may be decoded as well.
_LARGEST_WASTE = 1 << 22
_NOTHING = np.empty((0, 0), np.float32)


def quantized_array(
    tensor: Tensor, readers: Mapping[str, PartReader]
) -> QuantizedArray | CodebookArray:
    """Return the array of numbers that a quantised tensor represents."""
    if isinstance(tensor.quantization, Codebook):
        return CodebookArray(tensor, readers)
    return QuantizedArray(tensor, readers)


class _Box(NamedTuple):
    """A half-open range along each axis."""

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    def along(self, axes: Sequence[int]) -> tuple[slice, ...]:
        """Return the box as an index of an array whose axes are in another order."""
        return tuple([slice(self.start[axis], self.stop[axis]) for axis in axes])


class _OfParts(LazyArray):
    """A float32 array computed from several parts, which may be in different files."""

    __slots__ = ("quantization", "readers", "strict")

    scheme: type[Quantization | Codebook]
    quantization: Quantization | Codebook

    def __init__(self, tensor: Tensor, readers: Mapping[str, PartReader]) -> None:
        if not isinstance(tensor.quantization, self.scheme):
            missing = self.scheme.__name__.lower()
            raise ValueError(f"tensor {tensor.name!r} has no {missing}")  # noqa: TRY004
        self.quantization = tensor.quantization
        self.strict = tensor.strict
        super().__init__(tensor.name, readers["data"].source, tensor.shape, np.dtype(np.float32))
        self.readers = dict(readers)

    @property
    def sources(self) -> Collection[Source]:
        """Files of all parts."""
        return dict.fromkeys(reader.source for reader in self.readers.values())

    @property
    def part_readers(self) -> Collection[PartReader]:
        """Readers of the parts that values depend on; see `LazyArray.part_readers`."""
        unused = {"shape", "state"}
        if isinstance(self.quantization, Quantization) and self.quantization.zero is not None:
            unused.add("zeros")
        return [reader for role, reader in self.readers.items() if role not in unused]


class QuantizedArray(_OfParts):
    """A quantised tensor with a grid of scales; selecting decodes the box around the selection."""

    __slots__ = ()

    scheme = Quantization
    quantization: Quantization

    @property
    def is_turned(self) -> bool:
        """Whether codes are stored in another order of axes, so that rows are not contiguous."""
        axes = self.quantization.axes
        return axes != tuple(sorted(axes))

    @property
    def code_values(self) -> Array:
        """Values of all codes of at most 8 bits, minus the zero point if it is one number."""
        scheme, dtype = self.quantization, self.readers["data"].part.dtype
        is_unpacked = scheme.word_bits == scheme.bits
        bits = ELEMENT_TYPES[dtype].bits if is_unpacked else scheme.bits
        return _values(dtype if is_unpacked else scheme.code, bits) - (scheme.zero or 0)

    def codes(self, start: Shape, stop: Shape) -> Array:
        """Return the codes in a box, which have at most 8 bits, as they are stored."""
        return self._codes(_Box(start, stop))[1]

    def scales(self, start: Shape, stop: Shape) -> Array:
        """Return the scale of every element in a box."""
        entries, grid = self._entries_and_grid(_Box(start, stop))
        scales: Array = self._scales(grid)[_places_in(grid, entries)]
        factor = self.quantization.factor
        return scales if factor is None else scales * np.float32(factor)

    def biases(self, start: Shape, stop: Shape) -> Array:
        """Return the stored number that is added to every element in a box."""
        entries, grid = self._entries_and_grid(_Box(start, stop))
        biases: Array = self._grid("biases", grid)[_places_in(grid, entries)]
        return biases

    def chunks(self, target: int) -> Chunks:
        """Return chunks along the slowest axis of the stored codes; see `LazyArray.chunks`."""
        axes = self.quantization.axes or tuple(range(self.ndim))
        stored = tuple([self.shape[axis] for axis in axes])
        chunks = chunks_along_slowest(stored, self.dtype.itemsize, target)
        return tuple([chunks[axes.index(axis)] for axis in range(self.ndim)])

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        shape = result_shape(self.shape, key)
        runs = [contiguous_run((n,), (entry,)) for n, entry in zip(self.shape, key, strict=True)]
        if 0 in shape or any(run.shape == (0,) for run in runs):
            return self.empty(shape)
        if prod(n for run in runs for n in run.shape) > _LARGEST_WASTE + 4 * prod(shape):
            return self._select_halves(key, [run.shape[0] for run in runs])
        starts = tuple([run.start for run in runs])
        stops = tuple([run.start + run.shape[0] for run in runs])
        return take(self._numbers(_Box(starts, stops)), [run.key[0] for run in runs])

    def _select_halves(self, key: tuple[AxisKey, ...], extents: Sequence[int]) -> Array:
        """Make a scattered selection in two steps, cut along the axis with the largest gaps."""
        chosen = [positions(entry, size) for entry, size in zip(key, self.shape, strict=True)]
        spacing = [extent / len(along) for extent, along in zip(extents, chosen, strict=True)]
        axis = spacing.index(max(spacing))
        half = -(-len(chosen[axis]) // 2)
        halves = [self.select(part) for _, part in cut_along(axis, half, self.shape, key)]
        return np.concatenate(halves, axis=len(result_shape(self.shape[:axis], key[:axis])))

    def _numbers(self, box: _Box) -> Array:
        scheme = self.quantization
        entries, grid = self._entries_and_grid(box)
        if scheme.bits > 8 or scheme.wide:
            return self._numbers_by_numpy(box, grid, entries)
        table, codes = self._codes(box)
        zeros = _NOTHING
        if scheme.zero is None:
            zeros = self._zeros(grid)
        elif scheme.zero:
            table = table - scheme.zero
        with np.errstate(all="ignore"):  # scales are whatever the file has
            scales = self._scales(grid)
        biases = self._grid("biases", grid) if scheme.biases else _NOTHING
        rows = np.zeros(1, np.int64)
        for axis, along in enumerate(entries[:-1]):
            rows = np.add.outer(rows * grid.shape[axis], along - grid.start[axis]).reshape(-1)
        columns = entries[-1] - grid.start[-1]
        starts = np.flatnonzero(np.diff(columns, prepend=-1))
        ends = np.append(starts, len(columns))
        grids = zeros, scales, biases
        numbers = _scaled(codes, table, grids, rows=rows, starts=ends, columns=columns[starts])
        if scheme.factor is not None:
            numbers *= np.float32(scheme.factor)
        return numbers

    def _numbers_by_numpy(self, box: _Box, grid: _Box, entries: Sequence[Array]) -> Array:
        """Compute numbers from codes that need more than float32 or a table of 256 values."""
        scheme, block = self.quantization, _places_in(grid, entries)
        if scheme.bits > 8:
            codes = self._dense("data", self.shape)[box.along(tuple(range(self.ndim)))]
        else:
            table, places = self._codes(box)
            codes = table[places]
        if scheme.zero is None:
            numbers = codes.astype(np.float32) - self._zeros(grid)[block]
        else:
            wide = codes.astype(np.int64) if scheme.bits > 8 else codes
            numbers = (wide - scheme.zero).astype(np.float32)
        with np.errstate(all="ignore"):  # scales are whatever the file has
            products: Array = (numbers * self._scales(grid)[block]).astype(np.float32)
        return products

    def _entries_and_grid(self, box: _Box) -> tuple[list[Array], _Box]:
        """Return the positions in the grid along each axis, and the box around them."""
        entries = [self._entries(axis, box) for axis in range(self.ndim)]
        starts = tuple([int(along.min()) for along in entries])
        return entries, _Box(starts, tuple([int(along.max()) + 1 for along in entries]))

    def _entries(self, axis: int, box: _Box) -> Array:
        """Return the position in the grid of each position along an axis."""
        scheme, start, stop = self.quantization, box.start[axis], box.stop[axis]
        entries = np.arange(start, stop) // scheme.block[axis]
        if axis != scheme.index_axis:
            return entries
        index: Array = self._dense("index", (self.shape[axis],))[:].astype(np.int64)
        if not self.strict and (index == -1).all():
            return entries
        count = -(-self.shape[axis] // scheme.block[axis])
        wrong = np.flatnonzero((index < 0) | (index >= count))
        if wrong.size:
            first = int(wrong[0])
            reason = (
                f"entry {first} of the index of groups is {index[first]}, but there are {count}"
            )
            raise FormatError(reason, offset=self.readers["index"].part.offset, rule="GroupIndex")
        return index[start:stop]

    def _dense(self, role: str, shape: Shape) -> DenseArray:
        return DenseArray(self.name, self.readers[role], shape)

    def _codes(self, box: _Box) -> tuple[Array, Array]:
        """Return the values of all codes, and the codes in a box."""
        scheme, reader = self.quantization, self.readers["data"]
        axes = scheme.axes or tuple(range(self.ndim))
        if scheme.word_bits == scheme.bits:
            stored = tuple([self.shape[axis] for axis in axes])
            codes = DenseArray(self.name, reader, stored, decode=False)[box.along(axes)]
            table = _values(reader.part.dtype, ELEMENT_TYPES[reader.part.dtype].bits)
            return table, np.transpose(codes.view(np.uint8), np.argsort(axes))
        table = _values(scheme.code, scheme.bits)
        codes = _unpack(
            reader, scheme, box, name=self.name, shape=self.shape, axes=axes, axis=scheme.axis
        )
        return table, codes

    def _zeros(self, grid: _Box) -> Array:
        """Return stored zero points."""
        scheme = self.quantization
        if not scheme.packed_zeros:
            return self._grid("zeros", grid) + np.float32(scheme.zero_add)
        axis = scheme.axis if scheme.zero_axis is None else scheme.zero_axis
        axes = scheme.scale_axes or tuple(range(self.ndim))
        codes = _unpack(
            self.readers["zeros"],
            scheme,
            grid,
            name=self.name,
            shape=self.stored_grid,
            axes=axes,
            axis=axis,
            add=scheme.zero_add,
        )
        return _values(scheme.code, scheme.bits)[codes]

    def _scales(self, grid: _Box) -> Array:
        scheme = self.quantization
        scales = self._grid("scales", grid, np.float64 if scheme.wide else np.float32)
        if scheme.reciprocal:
            scales = np.float32(1) / scales
        if scheme.global_scale:
            global_scale = self._dense("global", (1,))[:].astype(np.float32)
            scales = scales / global_scale if scheme.global_divides else global_scale * scales
        return scales

    @property
    def stored_grid(self) -> Shape:
        """Shape of stored grids, with the axes of the tensor."""
        scheme = self.quantization
        blocks = zip(self.shape, scheme.block, strict=True)
        return scheme.stored_grid or tuple([-(-size // block) for size, block in blocks])

    def _grid(self, role: str, grid: _Box, dtype: type = np.float32) -> Array:
        """Return entries of a stored grid as a type of floats, with the axes of the tensor."""
        axes = self.quantization.scale_axes or tuple(range(self.ndim))
        stored = self._dense(role, tuple([self.stored_grid[axis] for axis in axes]))
        return np.transpose(stored[grid.along(axes)].astype(dtype), np.argsort(axes))


class CodebookArray(_OfParts):
    """A tensor of codes whose values are in a table; see `xckpt.index.Codebook`."""

    __slots__ = ()

    scheme = Codebook
    quantization: Codebook

    @property
    def code_values(self) -> Array:
        """Values of all codes."""
        table: Array = self._flat("table", 16)[:]
        return table

    def codes(self, start: Shape, stop: Shape) -> Array:
        """Return the codes of a box that is a run of elements."""
        first = np.ravel_multi_index(start, self.shape) if start else 0
        count = prod(b - a for a, b in zip(start, stop, strict=True))
        return self._codes(int(first), int(first) + count)

    def _codes(self, start: int, stop: int) -> Array:
        return _unpack(
            self.readers["data"],
            _NIBBLES,
            _Box((start,), (stop,)),
            name=self.name,
            shape=(prod(self.shape),),
            axes=(0,),
            axis=0,
        )

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        shape = result_shape(self.shape, key)
        if 0 in shape:
            return self.empty(shape)
        run = contiguous_run(self.shape, key)
        size = prod(run.shape)
        return take(self._numbers(run.start, run.start + size).reshape(run.shape), run.key)

    def _numbers(self, start: int, stop: int) -> Array:
        """Return a range of elements of the flat tensor."""
        book, count = self.quantization, prod(self.shape)
        codes = self._codes(start, stop)
        first, last = start // book.block, (stop - 1) // book.block + 1
        blocks = np.arange(last - first)
        starts = np.clip((blocks + first) * book.block - start, 0, None)
        with np.errstate(all="ignore"):  # scales are whatever the file has
            scales = self._scales(first, last, -(-count // book.block))
        grids, table = (_NOTHING, scales[None], _NOTHING), self._flat("table", 16)[:]
        ends, rows = np.append(starts, stop - start), np.zeros(1, np.int64)
        return _scaled(codes, table, grids, rows=rows, starts=ends, columns=blocks)

    def _scales(self, first: int, last: int, count: int) -> Array:
        book = self.quantization
        scales: Array = self._flat("scales", count)[first:last]
        if book.scale_block is None:
            return scales.astype(np.float32)
        blocks = np.arange(first, last) // book.scale_block
        outer = self._flat("scale_scales", -(-count // book.scale_block))
        factors = outer[int(blocks[0]) : int(blocks[-1]) + 1][blocks - blocks[0]]
        values: Array = self._flat("scale_table", 256)[:][scales] * factors
        return values + np.float32(book.offset)

    def _flat(self, role: str, count: int) -> DenseArray:
        return DenseArray(self.name, self.readers[role], (count,))


def _places_in(grid: _Box, entries: Sequence[Array]) -> tuple[Array, ...]:
    """Return the index of positions along each axis in a part of the grid."""
    return np.ix_(*(along - start for along, start in zip(entries, grid.start, strict=True)))


# Packing of the codes of a codebook.
_NIBBLES = Quantization((1,), "uint8", 4, 8, 0, msb_first=True)


@lru_cache(maxsize=64)
def _values(code: str, bits: int) -> Array:
    """Return the values of all codes as float32."""
    codes = np.arange(1 << bits, dtype=np.uint8)
    if code == "uint8":
        return codes.astype(np.float32)
    if code == "int8":
        # Move the sign bit to the top, then let an arithmetic shift extend it.
        return ((codes << (8 - bits)).view(np.int8) >> (8 - bits)).astype(np.float32)
    if code in ELEMENT_TYPES:
        return elements(codes.data, code, decode=True)
    # Floats of six bits are not an element type: they always share words.
    return codes.view(stored_dtype(code)).astype(np.float32)


@lru_cache(maxsize=256)
def _packing(scheme: Quantization) -> tuple[int, int, Array]:
    """Return the codes and the words of a period, and the pieces of `unpack_pieces`."""
    bits, word_bits = scheme.bits, scheme.word_bits
    places: list[list[tuple[int, int]]] = []  # of each code: bits before it in a period, and width
    if scheme.planes:
        codes, words, before = 32, bits * 32 // word_bits, 0
        places = [[] for _ in range(codes)]
        for width in scheme.planes:
            for code in range(codes):
                places[code].append((before + code * width, width))
            before += codes * width
    elif scheme.stream:
        codes, words = word_bits // gcd(bits, word_bits), bits // gcd(bits, word_bits)
        places = [[(code * bits, bits)] for code in range(codes)]
    else:
        codes, words = word_bits // bits, 1
        order = scheme.order or range(codes)
        positions_in_word = [codes - 1 - n for n in order] if scheme.msb_first else order
        places = [[(position * bits, bits)] for position in positions_in_word]
    pieces = np.zeros((codes, 2 * max(map(len, places)), 5), np.int64)
    for code, runs in enumerate(places):
        shift = number = 0
        for begin, width in runs:
            bit, end = begin, begin + width
            while bit < end:
                # A piece does not cross the end of a byte.
                count = min(end, bit // 8 * 8 + 8) - bit
                address = bit // word_bits, bit % word_bits // 8, bit % 8
                pieces[code, number] = (*address, (1 << count) - 1, shift)
                shift, number, bit = shift + count, number + 1, bit + count
    most = int((pieces[..., 3] > 0).sum(axis=1).max())
    return codes, words, np.ascontiguousarray(pieces[:, :most])


def _unpack(
    reader: PartReader,
    scheme: Quantization,
    box: _Box,
    *,
    name: str,
    shape: Shape,
    axes: Shape,
    axis: int,
    add: int = 0,
) -> Array:
    """Return the codes in a box; codes along `axis` share words, and lines begin a new word."""
    from xckpt.arrays.code_loops import unpack_pieces

    (period, period_words, pieces), nbytes = _packing(scheme), scheme.word_bits // 8
    place = axes.index(axis)
    # Number of words for the codes of a line.
    periods, remainder = divmod(shape[axis], period)
    words = periods * period_words
    if remainder:
        stream_words = -(-remainder * scheme.bits // scheme.word_bits)
        words += stream_words if scheme.stream else period_words
    before = box.start[axis] // period
    after = -(-box.stop[axis] // period)
    stored = [words if number == axis else shape[number] for number in axes]
    key = list(box.along(axes))
    key[place] = slice(before * period_words, min(after * period_words, words))
    raw = replace(reader, part=replace(reader.part, dtype="uint8"))
    data = DenseArray(name, raw, (*stored, nbytes), decode=False)[tuple(key)]
    sizes = [box.shape[number] for number in axes]
    outer, inner = prod(sizes[:place]), prod(sizes[place + 1 :])
    lines = np.ascontiguousarray(data).reshape(outer, -1, inner, nbytes)
    codes = np.empty((outer, sizes[place], inner), np.uint8)
    first, mask = box.start[axis] - before * period, (1 << scheme.bits) - 1
    unpack_pieces(lines, pieces, period_words, first, add, mask, codes)
    return np.transpose(codes.reshape(sizes), np.argsort(axes))


def _scaled(
    codes: Array,
    table: Array,
    grids: tuple[Array, Array, Array],
    *,
    rows: Array,
    starts: Array,
    columns: Array,
) -> Array:
    """Compute numbers from codes; see `scale_codes`."""
    from xckpt.arrays.code_loops import scale_codes, turn

    turned = np.swapaxes(codes, -1, -2) if codes.ndim > 1 else codes
    if turned.flags.c_contiguous and not codes.flags.c_contiguous:
        # numpy is slow to swap the last two axes.
        codes = np.empty(codes.shape, np.uint8)
        for index in np.ndindex(codes.shape[:-2]):
            turn(turned[index], codes[index])
    lines = np.ascontiguousarray(codes).reshape(-1, codes.shape[-1])
    out = np.empty(lines.shape, np.float32)
    flat = [
        np.ascontiguousarray(grid, np.float32).reshape(prod(grid.shape[:-1]), grid.shape[-1])
        for grid in grids
    ]
    table = np.ascontiguousarray(table, np.float32)
    scale_codes(lines, table, *flat, rows, starts, columns, out)
    return out.reshape(codes.shape)
