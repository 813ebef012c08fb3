"""Dense arrays in C or Fortran order, raw or compressed, in one part of a file or in blocks."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from xckpt.arrays.keys import (
    AxisKey,
    Chunks,
    chunks_along_slowest,
    contiguous_run,
    cut_along,
    is_all,
    leading_axes,
    normalize,
    positions,
    result_shape,
    take,
)
from xckpt.arrays.lazy import LazyArray
from xckpt.arrays.parts import PartReader, has_byte_each, nbytes_of_elements, strided_chunks
from xckpt.elements import ELEMENT_TYPES, decoded_dtype, nbytes_of, stored_dtype
from xckpt.errors import FormatError
from xckpt.index import Part, Tensor
from xckpt.storage.encodings import STREAMS
from xckpt.storage.source import empty_array

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

# Size of blocks that are read for a few of their elements; they stay in the second-level cache.
_BLOCK_NBYTES = 1 << 20


class OnePartArray(LazyArray):
    """An array that is stored in one part."""

    __slots__ = ("reader",)

    #: Whether the elements are real numbers whose bytes in the file are those in memory.
    is_raw = False
    #: Whether the elements can only be decoded from the first one on.
    is_stream = False

    def __init__(
        self, name: str, reader: PartReader, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        super().__init__(name, reader.source, shape, dtype)
        self.reader = reader

    @property
    def readers(self) -> dict[str, PartReader]:
        """The part by its role, as arrays of several parts have them."""
        return {"data": self.reader}

    @property
    def part_readers(self) -> Collection[PartReader]:
        """See `LazyArray.part_readers`."""
        return (self.reader,)

    @property
    def part_nbytes(self) -> int:
        """Decoded size of the part, in bytes."""
        return nbytes_of_elements(self.reader.part, prod(self.shape))

    def _select_c_order(self, shape: tuple[int, ...], key: tuple[AxisKey, ...]) -> Array:
        """Return a selection of the elements, as an array of a shape in C order."""
        run = contiguous_run(shape, key)
        size = prod(run.shape)
        is_large = size * self.dtype.itemsize > _BLOCK_NBYTES
        is_wasteful = is_large and size > 2 * prod(result_shape(shape, key))
        gathered = self._gathered(shape, key) if is_wasteful else None
        if gathered is not None:
            return gathered
        flat = self._elements(run.start, run.start + size)
        selected: Array = take(flat.reshape(run.shape), run.key)
        # A copy releases the memory of the other elements; a memory map has none to release.
        return selected.copy() if is_wasteful and flat.flags.writeable else selected

    def _gathered_by_rows(
        self, shape: tuple[int, ...], key: tuple[AxisKey, ...], *, one_by_one: bool
    ) -> Array:
        """Read a few positions at a time of the first axis that has several."""
        run = contiguous_run(shape, key)
        axis = next(axis for axis, length in enumerate(run.shape) if length > 1)
        count = len(positions(key[axis], shape[axis]))
        nbytes = prod(run.shape) * self.dtype.itemsize // count
        step = 1 if one_by_one else max(1, min(_BLOCK_NBYTES // nbytes, count // 2))
        out = np.empty(result_shape(shape, key), self.dtype)
        for place, part_key in cut_along(axis, step, shape, key):
            out[place] = self._select_c_order(shape, part_key)
        return out

    @abstractmethod
    def _gathered(self, shape: tuple[int, ...], key: tuple[AxisKey, ...]) -> Array | None:
        """Return a selection with large gaps, read in pieces; None if that is not cheaper."""

    @abstractmethod
    def _elements(self, start: int, stop: int) -> Array:
        """Return a range of the elements in stored order."""

    @property
    def undecoded(self) -> OnePartArray:
        """The array with its elements in their stored types, except for booleans."""
        return self

    @property
    def undecoded_dtype(self) -> np.dtype[Any]:
        """The dtype of `undecoded`."""
        return self.dtype

    @abstractmethod
    def flattened(self) -> OnePartArray:
        """Return all elements as one axis, in the order in which they are stored."""

    def flat_ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return the byte ranges of elements in stored order; of all, if cuts have no own ones."""
        ranges = list(self.flattened().ranges(slice(start, stop)))
        return iter(ranges) if ranges or start else self.ranges(...)

    def blocks_in(self, buffer: Array, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        """Read elements of an array with one axis, in blocks that lie in a buffer of bytes."""
        memory = buffer[: buffer.nbytes // self.dtype.itemsize * self.dtype.itemsize]
        memory = memory.view(self.dtype)
        for position in range(start, stop, len(memory)):
            block = memory[: stop - position]
            self.read_into(block, slice(position, position + len(block)))
            yield position, block

    def stored(self, block_nbytes: int) -> Iterator[memoryview]:
        """Read the decoded part block by block, and compare its digest; see `PartReader.blocks`."""
        return self.reader.blocks(self.part_nbytes, block_nbytes, compare=True)

    def stored_range(self, start: int, stop: int) -> memoryview:
        """Read a range of bytes of the decoded part."""
        reader = self.reader
        if not reader.is_raw:
            return reader.read(start, stop, self.part_nbytes)
        # A view of mapped bytes would be checked for changes only before they are read.
        reader.check(self.part_nbytes)
        return reader.source.read(reader.part.offset + start, stop - start)

    def verified(self) -> Self:
        """Return the array with its digest checked before first use, unless that is disabled."""
        return self._with(replace(self.reader, verify=self.reader.verify is not False))

    def passing(self) -> Self:
        """Return the array with its digest compared while all bytes pass, and not before."""
        return self._with(replace(self.reader, verify=None)) if self.reader.verify else self

    def _with(self, reader: PartReader) -> Self:
        array = copy(self)
        array.reader = reader
        return array


class DenseArray(OnePartArray):
    """A dense tensor, or one part of a composite one."""

    __slots__ = ("decode", "order", "strict")

    def __init__(
        self,
        name: str,
        reader: PartReader,
        shape: tuple[int, ...],
        *,
        order: str = "C",
        decode: bool = True,
        strict: bool = False,
    ) -> None:
        element_type = reader.part.dtype
        dtype = decoded_dtype(element_type) if decode else stored_dtype(element_type)
        super().__init__(name, reader, shape, dtype)
        self.order = order
        # Whether to return types that numpy computes well with, instead of the stored types.
        self.decode = decode
        self.strict = strict  # whether values that the format forbids are errors

    @property
    def is_raw(self) -> bool:  # type: ignore[override]  # it depends on the part
        """See `OnePartArray.is_raw`."""
        part = self.reader.part
        is_number = self.dtype.kind != "c" and ELEMENT_TYPES[part.dtype].decoded != "bool"
        return self._is_wide and part.byteorder == "little" and is_number

    @property
    def is_stream(self) -> bool:  # type: ignore[override]  # it depends on the part
        """See `OnePartArray.is_stream`."""
        return self.reader.part.encoding in STREAMS

    def flat_ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return the byte ranges of elements in stored order; see `OnePartArray.flat_ranges`."""
        if not self._is_wide:
            return super().flat_ranges(start, stop)
        part = self.reader.part
        first, nbytes = (nbytes_of(part.dtype, count) for count in (start, stop - start))
        return iter([(self.reader.source, part.offset + first, nbytes)])

    @property
    def undecoded(self) -> DenseArray:
        """See `OnePartArray.undecoded`."""
        return DenseArray(
            self.name,
            self.reader,
            self.shape,
            order=self.order,
            decode=self._is_bool,
            strict=self.strict,
        )

    @property
    def undecoded_dtype(self) -> np.dtype[Any]:
        """See `OnePartArray.undecoded_dtype`."""
        return (decoded_dtype if self._is_bool else stored_dtype)(self.reader.part.dtype)

    @property
    def _is_bool(self) -> bool:
        return ELEMENT_TYPES[self.reader.part.dtype].decoded == "bool"

    def flattened(self) -> DenseArray:
        """Return all elements as one axis; see `OnePartArray.flattened`."""
        shape = (prod(self.shape),)
        return DenseArray(self.name, self.reader, shape, decode=self.decode, strict=self.strict)

    def chunks(self, target: int) -> Chunks:
        """Return chunks that are runs of bytes; see `LazyArray.chunks`."""
        if self.reader.part.encoding in STREAMS:
            # It decodes from its start only: cut up, it would be decoded once for each chunk.
            return tuple((size,) for size in self.shape)
        strides = self.reader.part.strides
        if strides is not None and self.is_expanded:
            return tuple((size,) for size in self.shape)
        if strides is not None and len(strides) == self.ndim:
            return strided_chunks(self.shape, strides, self.dtype.itemsize, target)
        return chunks_along_slowest(self.shape, self.dtype.itemsize, target, self.order)

    def ranges(self, key: Any) -> Iterator[Range]:
        """Return the byte range of a selection if it is contiguous; see `LazyArray.ranges`."""
        if not self._is_wide:
            yield from super().ranges(key)
            return
        shape, full_key = self.shape, normalize(key, self.shape)
        if self.order == "F":
            shape, full_key = shape[::-1], full_key[::-1]
        run = contiguous_run(shape, full_key)
        if is_all(run):
            part = self.reader.part
            first, nbytes = (nbytes_of(part.dtype, n) for n in (run.start, prod(run.shape)))
            yield self.reader.source, part.offset + first, nbytes

    def allocate(self, order: Any = None) -> Array:
        """Return memory for the whole array, by default in the order of the file."""
        return super().allocate(order or self.order)

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        shape = result_shape(self.shape, key)
        if 0 in shape:
            if 0 in self.shape and self.reader.part.shape is not None:
                self.reader.check(0)
            elif 0 in self.shape:
                self.reader.read(0, 0, 0)  # raises if the stream has elements
            return self.empty(shape)
        if self.reader.is_arranged and self.reader.part.shape == self.shape and self.order == "C":
            selected = self.reader.select(key)
            data = selected.reshape(-1).view(np.uint8).data
            return self.decoded(data, 0).reshape(selected.shape)
        if self.order == "F":
            # An array in Fortran order is the transpose of an array in C order.
            return self._select_c_order(self.shape[::-1], key[::-1]).T
        return self._select_c_order(self.shape, key)

    def select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        """Read a selection into an array; see `LazyArray.select_into`."""
        memory, shape, c_key = out, self.shape, key
        if self.order == "F":
            memory, shape, c_key = out.T, shape[::-1], key[::-1]
        run = contiguous_run(shape, c_key)
        if self._is_wide and out.size and is_all(run) and memory.flags.c_contiguous:
            self._read_run(run.start, memory.reshape(-1))
        else:
            out[...] = self.select(key)

    @property
    def _is_wide(self) -> bool:
        """True if elements are stored raw, each in whole bytes."""
        return self.reader.is_raw and ELEMENT_TYPES[self.reader.part.dtype].bits >= 8

    @property
    def _is_copied(self) -> bool:
        """Whether raw elements are copied into memory of this process, at little other cost."""
        return self.reader.source.worth_skipping is not None and self._is_wide

    def _gathered(self, shape: tuple[int, ...], key: tuple[AxisKey, ...]) -> Array | None:
        """Read scattered elements, in little more memory than the result needs."""
        if not self._is_copied:
            return None
        part, source = self.reader.part, self.reader.source
        self.reader.check(nbytes_of(part.dtype, prod(shape)))
        itemsize = nbytes_of(part.dtype, 1)
        split = leading_axes(shape, key, (source.worth_skipping or 0) // itemsize)
        run = contiguous_run(shape[split:], key[split:])
        nbytes = prod(run.shape) * itemsize
        count = prod(result_shape(shape[:split], key[:split]))
        if count == 1 or nbytes > _BLOCK_NBYTES:
            return self._gathered_by_rows(shape, key, one_by_one=count > 1)
        starts = np.full(1, run.start)
        for axis in range(split):
            along = np.asarray(positions(key[axis], shape[axis])) * prod(shape[axis + 1 :])
            starts = np.add.outer(starts, along).reshape(-1)
        out = np.empty((count, *result_shape(run.shape, run.key)), self.dtype)
        step = _BLOCK_NBYTES // nbytes
        buffer = np.empty(min(step, count) * nbytes, np.uint8)
        for number in range(0, count, step):
            offsets = part.offset + starts[number : number + step] * itemsize
            memory = buffer[: len(offsets) * nbytes].data
            source.read_into(offsets.tolist(), memory)
            pieces = self.decoded(memory, 0).reshape(-1, *run.shape)
            out[number : number + step] = take(pieces, (slice(None), *run.key))
        return out.reshape(result_shape(shape, key))

    def _elements(self, start: int, stop: int) -> Array:
        source, itemsize = self.reader.source, self.dtype.itemsize
        nbytes, is_copied = (stop - start) * itemsize, self._is_copied
        if self._is_native and (is_copied or (self._is_wide and source.is_far)):
            self.reader.check(self.part_nbytes)
            memory = source.read(self.reader.part.offset + start * itemsize, nbytes)
            return np.frombuffer(memory, self.dtype)
        if is_copied:  # and decoded block by block
            flat = empty_array(nbytes).view(self.dtype)
            self._read_run(start, flat)
            return flat
        bits = self._bits
        data = self.reader.read(start * bits // 8, (stop * bits + 7) // 8, self.part_nbytes)
        return self._unpacked(data, start, stop) if bits < 8 else self.decoded(data, start)

    def _read_run(self, start: int, flat: Array) -> None:
        """Fill a flat array with elements from position `start`."""
        part, source = self.reader.part, self.reader.source
        self.reader.check(self.part_nbytes)
        offset = part.offset + nbytes_of(part.dtype, start)
        if self._is_native:
            source.read_into([offset], flat.view(np.uint8).data)
            return
        count = 0
        for block in source.blocks(offset, nbytes_of(part.dtype, flat.size), _BLOCK_NBYTES):
            values = self.decoded(block, start + count)
            flat[count : count + len(values)] = values
            count += len(values)

    @property
    def _is_native(self) -> bool:
        """Whether elements have the same bytes in memory and in the file."""
        part = self.reader.part
        return (
            part.byteorder == "little"
            and part.dtype != "bool"
            and self.dtype == stored_dtype(part.dtype)
        )

    @property
    def _bits(self) -> int:
        """Bits of an element in the decoded part."""
        part = self.reader.part
        return 8 if has_byte_each(part) else ELEMENT_TYPES[part.dtype].bits

    def decoded(self, data: memoryview, start: int) -> Array:
        """Return the elements in bytes of the part; `start` is the position of the first one."""
        part, bits = self.reader.part, self._bits
        if bits < 8:
            stop = start + len(data) * 8 // bits
            return self._unpacked(data, start, min(stop, prod(self.shape)))
        return elements(
            data, part.dtype, decode=self.decode, byteorder=part.byteorder, strict=self.strict
        )

    def stream(
        self, block_nbytes: int = _BLOCK_NBYTES, *, compare: bool = False
    ) -> Iterator[tuple[int, Array]]:
        """Yield all elements in stored order, in blocks with the positions of their first ones."""
        # A block is valid until the next one. `compare`: see `PartReader.blocks`.
        position = 0
        for data in self.reader.blocks(self.part_nbytes, block_nbytes, compare=compare):
            block = self.decoded(data, position)
            yield position, block
            position += len(block)

    def check(self) -> None:
        """Check booleans, and the padding after the last element."""
        element, size = ELEMENT_TYPES[self.reader.part.dtype], prod(self.shape)
        if self._bits < 8 and size:
            self._elements(size - 1, size)
        elif element.decoded == "bool":
            for _ in self.stream():
                pass

    def _unpacked(self, data: memoryview, start: int, stop: int) -> Array:
        """Return elements that share bytes, the lowest bits first."""
        dtype = self.reader.part.dtype
        bits = ELEMENT_TYPES[dtype].bits
        codes = unpack_codes(data, bits)
        first = start % (8 // bits)
        padding = codes[first + stop - start :]
        if self.strict and stop == prod(self.shape) and padding.any():
            raise FormatError("padding bits after the last element are not zero", rule="LayoutData")
        return elements(codes[first : first + stop - start].data, dtype, decode=self.decode)


def stored_bytes(reader: PartReader, name: str) -> DenseArray:
    """Return the bytes of a part as they are stored, without comparing its digest."""
    part = reader.part
    nbytes = part.nbytes if part.inline is None else len(part.inline)
    raw = Part("uint8", (nbytes,), part.offset, nbytes, inline=part.inline)
    return DenseArray(name, replace(reader, part=raw, verify=False), (nbytes,), decode=False)


def dense_array(tensor: Tensor, reader: PartReader, *, decode: bool) -> DenseArray:
    """Return the array of a dense tensor."""
    return DenseArray(
        tensor.name,
        reader,
        tensor.shape,
        order=tensor.order,
        decode=decode,
        strict=tensor.strict,
    )


def elements(
    data: memoryview, dtype: str, *, decode: bool, byteorder: str = "little", strict: bool = False
) -> Array:
    """Return the elements in bytes as a flat array."""
    if dtype == "bool":
        return _booleans(np.frombuffer(data, np.uint8), strict=strict)
    stored, bits = stored_dtype(dtype), ELEMENT_TYPES[dtype].bits
    if bits < 8:
        # The remaining bits of a byte have no meaning.
        array = (np.frombuffer(data, np.uint8) & np.uint8((1 << bits) - 1)).view(stored)
    elif byteorder == "big":
        array = np.frombuffer(data, stored.newbyteorder(">")).astype(stored)
    else:
        array = np.frombuffer(data, stored)
    if not decode or ELEMENT_TYPES[dtype].decoded == dtype:
        # numpy is slow with unaligned arrays, and compiled loops do not accept them.
        return array if array.flags.aligned else array.copy()
    if ELEMENT_TYPES[dtype].decoded == "bool":
        return _booleans(array, strict=strict)
    if dtype == "bfloat16":
        # bfloat16 is the upper half of a float32: a shift keeps the payloads of NaN, and is several
        # times faster than the cast of ml_dtypes.
        shifted: Array = np.left_shift(array.view(np.uint16), 16, dtype=np.uint32)
        return shifted.view(np.float32)
    return np.take(_value_table(dtype), array.view(f"u{array.itemsize}"))


def _booleans(codes: Array, *, strict: bool) -> Array:
    if strict and codes.size and codes.max() > 1:
        position = int(np.argmax(codes > 1))
        reason = f"element {position} is {codes[position]}, but a boolean is 0 or 1"
        raise FormatError(reason, rule="LayoutData")
    return np.not_equal(codes, 0)


@cache
def _value_table(dtype: str) -> Array:
    """All values of a type of at most 16 bits, indexed by bit pattern."""
    element = ELEMENT_TYPES[dtype]
    bits = element.bits
    codes = np.arange(1 << bits, dtype=np.uint16 if bits > 8 else np.uint8)
    table = codes.view(stored_dtype(dtype)).astype(decoded_dtype(dtype))
    if element.is_ieee_float:
        # Casts change the payloads of NaN: ml_dtypes replaces them, and some processors set a bit.
        nan, payload_bits = np.isnan(table), element.fraction_bits
        patterns = codes[nan].astype(np.uint32)
        signs, payloads = patterns >> (bits - 1) << 31, patterns & ((1 << payload_bits) - 1)
        table[nan] = (signs | 0x7F800000 | payloads << (23 - payload_bits)).view(np.float32)
    return table


def unpack_codes(data: memoryview | Array, bits: int) -> Array:
    """Unpack small codes that share bytes, the lowest bits first."""
    raw = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data
    codes = raw[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    return codes.reshape(*raw.shape[:-1], -1)


class ChunkedArray(LazyArray):
    """A tensor in blocks; a selection reads its share of each block."""

    __slots__ = ("blocks", "origins")

    def __init__(
        self, tensor: Tensor, readers: Mapping[str, PartReader], *, decode: bool = True
    ) -> None:
        self.origins = {role: part.origin or () for role, part in tensor.parts.items()}
        self.blocks = {
            role: DenseArray(tensor.name, reader, reader.part.shape or (), decode=decode)
            for role, reader in readers.items()
        }
        first = next(iter(self.blocks.values()))
        super().__init__(tensor.name, first.source, tensor.shape, first.dtype)

    @property
    def readers(self) -> dict[str, PartReader]:
        """The parts by their roles."""
        return {role: block.reader for role, block in self.blocks.items()}

    @property
    def sources(self) -> Collection[Source]:
        """All files that blocks are in."""
        return {block.source for block in self.blocks.values()}

    @property
    def stored_nbytes(self) -> int:
        """Size of all blocks in their files."""
        return sum([block.reader.part.nbytes for block in self.blocks.values()])

    def narrowed(self, key: tuple[AxisKey, ...]) -> tuple[LazyArray, tuple[AxisKey, ...]]:
        """Return the blocks that are needed; see `LazyArray.narrowed`."""
        needed = {role for role, _, _ in self._shares(key)}
        fewer = copy(self.bare())
        if needed:
            fewer.blocks = {role: self.blocks[role] for role in needed}
            fewer.origins = {role: self.origins[role] for role in needed}
        return fewer, key

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        out = np.empty(result_shape(self.shape, key), self.dtype)
        self.select_into(key, out)
        return out

    def select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        """Read a selection into an array; see `LazyArray.select_into`."""
        for role, outer, inner in self._shares(key):
            block = self.blocks[role]
            if all(isinstance(entry, slice) for entry in outer):
                block.read_into(out[(*outer, ...)], inner)  # a view, also of one element
            else:
                out[np.ix_(*outer)] = block[inner]

    def _shares(
        self, key: tuple[AxisKey, ...]
    ) -> Iterator[tuple[str, tuple[Any, ...], tuple[AxisKey, ...]]]:
        """Yield the blocks with selected elements, their places in the result, and their keys."""
        for role, block in self.blocks.items():
            outer: list[Any] = []
            inner: list[AxisKey] = []
            along = zip(key, self.shape, self.origins[role], block.shape, strict=True)
            for entry, length, low, extent in along:
                if isinstance(entry, int):
                    if not low <= entry < low + extent:
                        break
                    inner.append(entry - low)
                    continue
                places, block_entry = _within(entry, length, low, low + extent)
                if not len(places):
                    break
                outer.append(places)
                inner.append(block_entry)
            else:
                if all(isinstance(places, range) for places in outer):
                    outer = [slice(places.start, places.stop) for places in outer]
                yield role, tuple(outer), tuple(inner)


def _within(entry: AxisKey, length: int, low: int, high: int) -> tuple[Any, AxisKey]:
    """Return the places in the result of positions from `low` to `high`, and their own key."""
    # The key counts from `low`. Places are a range for slices with a positive step, else an array.
    steps = positions(entry, length)
    if isinstance(steps, range) and steps.step > 0:
        first, stop = (max(0, -((steps.start - bound) // steps.step)) for bound in (low, high))
        stop = min(stop, len(steps))
        if first >= stop:
            return range(0), slice(0, 0, 1)
        begin, last = steps[first] - low, steps[stop - 1] - low
        return range(first, stop), slice(begin, last + 1, steps.step)
    selected = np.asarray(steps)
    places = np.flatnonzero((selected >= low) & (selected < high))
    return places, selected[places] - low
