"""Elements as the bytes of another file: in its element type, its order, and little-endian.

`bytes_of` makes a stream of them: `StoredBytes` if the part of the old file has these bytes, else
`Converted`. Manifests hash the streams, `verify` compares the hashes, and `save` and `convert`
write them. Positions count bytes. All bytes at once are compared with the digest of the old file
while they pass.

``cast="exact"`` permits conversions that can be reversed bit for bit, including NaN and signs of
zeros; ``"allow"`` rounds; ``"never"`` is exact, and raises if a format does not support a type.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.dense import DenseArray, OnePartArray
from xckpt.arrays.kinds import kind_named
from xckpt.arrays.lazy import LazyArray
from xckpt.arrays.parts import PartReader, has_byte_each
from xckpt.arrays.streams import ArrayStream, ElementStream, StoredStream, Transposed, raw_blocks
from xckpt.elements import ELEMENT_TYPES, WIDE_FLOATS, nbytes_of, stored_dtype
from xckpt.errors import UnsupportedError
from xckpt.storage.encodings import STREAMS
from xckpt.storage.limits import require_memory
from xckpt.storage.source import empty_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xckpt.arrays.streams import Block
    from xckpt.storage.digests import Hasher
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

Cast = Literal["exact", "allow", "never"]

#: Size of the blocks of a stream of bytes, and of its cuts: large enough for disks, small enough
#: for caches and for several threads to have one each.
BLOCK_NBYTES = 8 << 20
# Largest tensor whose axes are turned in memory as a whole.
_TURNED_NBYTES = 64 << 20

# Relative difference of a computed number from an integer that is no rounding.
_NOISE = 1e-6

_NOTHING = np.zeros(0, np.bool_)

_thread = threading.local()


def thread_buffer() -> Array:
    """Return the memory of this thread for the blocks of one stream."""
    if not hasattr(_thread, "buffer"):
        _thread.buffer = empty_array(BLOCK_NBYTES)
    buffer: Array = _thread.buffer
    return buffer


class ByteStream(ElementStream):
    """The bytes of an array in the form of another file; positions count bytes."""

    array: Any = None

    def __init__(self, name: str, size: int) -> None:
        self.name, self.kind = name, kind_named("uint8")
        self.size = self.nbytes = size

    def memories(self) -> Iterator[memoryview]:
        """Return all bytes in order, in blocks that are valid until the next one."""
        return (block.data for _, (block,) in self.blocks(0, self.size, thread_buffer()))


class LiteralStream(ByteStream):
    """Bytes in memory, such as a header."""

    def __init__(self, data: bytes) -> None:
        super().__init__("", len(data))
        self.data = data

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Return a range of the bytes."""
        if start < stop:
            yield start, (np.frombuffer(self.data, np.uint8)[start:stop],)


class StoredBytes(ByteStream):
    """The bytes of a part of a file: decoded, or as they are stored (`is_verbatim`)."""

    def __init__(self, array: OnePartArray, *, is_verbatim: bool = False) -> None:
        part = array.reader.part
        super().__init__(array.name, part.nbytes if is_verbatim else array.part_nbytes)
        self.array = array.passing()
        self.reader: PartReader = self.array.reader
        self.is_verbatim = is_verbatim
        self.is_checked = self.reader.is_checked
        self.whole = is_verbatim or self.is_checked or part.encoding in STREAMS
        self.place = (self.reader.source.name, part.offset)

    @property
    def is_range(self) -> bool:
        """True if the bytes are a range of the file."""
        is_little = self.reader.part.byteorder == "little"
        return self.reader.is_raw and is_little and self.size > 0

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return the byte range that is read; see `ElementStream.ranges`."""
        if not self.is_range:
            yield from self.reader.ranges() if start == 0 else ()
        elif start < stop:
            yield self.reader.source, self.reader.part.offset + start, stop - start

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Read a range of the bytes; raw ones into the buffer."""
        if self.whole:
            size = len(buffer)
            data = self.reader.compared_blocks() if self.is_verbatim else self.array.stored(size)
            for block in data:
                yield start, (np.frombuffer(block, np.uint8),)
                start += len(block)
            return
        self.reader.check(self.array.part_nbytes)
        if self.is_range:
            source, offset = self.reader.source, self.reader.part.offset + start
            for block in source.blocks_in(buffer.data, offset, stop - start):
                yield start, (buffer[: len(block)],)
                start += len(block)
            return
        for first in range(start, stop, len(buffer)):
            block = self.array.stored_range(first, min(first + len(buffer), stop))
            yield first, (np.frombuffer(block, np.uint8),)

    def hash_decoded(self, hasher: Hasher | None) -> None:
        """Decode all bytes if a digest covers them: a new one, or the one that the file states."""
        reader = self.reader
        is_due = self.is_checked and reader.part.digest_of == "decoded"
        if not is_due:
            reader = replace(reader, verify=False)
        decoded = reader.blocks(self.array.part_nbytes, BLOCK_NBYTES, compare=True)
        for block in decoded if is_due or hasher is not None else ():
            if hasher is not None:
                hasher.update(block)


class Converted(ByteStream):
    """The elements of an array of any kind as bytes: in another type, in C or Fortran order."""

    def __init__(
        self,
        array: Any,
        dtype: str,
        cast: Cast,
        order: str = "C",
        name: str = "",
        *,
        # Whether elements of fewer than eight bits share bytes.
        is_packed: bool = False,
    ) -> None:
        size = prod(array.shape)
        self.dtype, self.cast, self.order = dtype, cast, order
        self.is_packed = is_packed and ELEMENT_TYPES[dtype].bits < 8
        stored = size * stored_dtype(dtype).itemsize
        super().__init__(name, nbytes_of(dtype, size) if self.is_packed else stored)
        self.array = array
        #: Whether the file has the elements in the other order.
        self.is_turned = is_turned(array, order)
        #: Whether chunks are computed by a scheduler, in any order.
        self.is_dask = hasattr(array, "dask")
        #: Whether its axes are turned in memory, rather than by reading rows of the other order.
        self.is_small = stored <= _TURNED_NBYTES
        self.whole = self.is_dask
        #: Numbers of elements that conversions lost, a block at a time; see `count_lost`.
        self.lost: list[int] = []
        #: How many elements became zero, less those that did not; see `excess_zeros`.
        self.zeroed: list[int] = []
        if isinstance(array, DenseArray):
            is_late = self.is_small if self.is_turned else array.reader.is_checked
            self.whole = array.is_stream or is_late

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Read and convert a range of the elements."""
        per_byte, itemsize = (2, 1) if self.is_packed else (1, stored_dtype(self.dtype).itemsize)
        count = prod(self.array.shape)
        first, last = start * per_byte // itemsize, min(stop * per_byte // itemsize, count)
        blocks = self._converted(first, last, buffer)
        for block in _packed(blocks) if self.is_packed else blocks:
            data = np.frombuffer(as_bytes(block), np.uint8)
            yield start, (data,)
            start += len(data)

    def _converted(self, first: int, last: int, buffer: Array) -> Iterator[Array]:
        for at, (values,) in self.elements(first, last, buffer):
            position = self._counted(at)
            block = cast_block(values, self.dtype, self.cast, tensor=self.name, position=position)
            if self.cast == "allow":
                self.lost.append(count_lost(values, block))
                self.zeroed.append(excess_zeros(values, block))
            yield block

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return the byte ranges of the whole array with its first bytes, if they are known."""
        if start == 0 and isinstance(self.array, LazyArray):
            yield from self.array.ranges(...)

    def elements(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Return elements before their conversion, in the order of the bytes."""
        array = self.array
        if isinstance(array, LazyArray):
            array.require_expansion()
        if self.is_dask:
            return self._computed_elements()
        if self.is_turned or self.order == "F":
            return self._turned_elements().blocks(start, stop)
        if isinstance(array, DenseArray):
            return self._stored_elements(array, start, stop, buffer)
        stream = StoredStream(array) if isinstance(array, BlockArray) else ArrayStream(array)
        return stream.blocks(start, stop, buffer)

    def _computed_elements(self) -> Iterator[Block]:
        """Compute all elements of a dask array, a row of chunks at a time."""
        start = 0
        for rows in rows_of_chunks(self.array if self.order == "C" else self.array.T):
            for position, columns in ArrayStream(rows).blocks(0, rows.size):
                yield start + position, columns
            start += rows.size

    def _turned_elements(self) -> ArrayStream:
        """Return the elements in the other order than the stored one, or the one in memory."""
        array = self.array
        if self.is_turned:
            array = array.verified()
            if self.whole:
                require_memory(array.nbytes, "It has to be turned as a whole")
                array = array[...]
        if self.order == "F":
            array = Transposed(array, range(len(array.shape))[::-1])
        stream = ArrayStream(array)
        stream.piece_nbytes = BLOCK_NBYTES
        return stream

    def _stored_elements(
        self, array: DenseArray, start: int, stop: int, buffer: Array
    ) -> Iterator[Block]:
        """Read elements in the order of the file."""
        flat = array.passing().flattened()
        if self.whole:
            blocks = flat.stream(BLOCK_NBYTES, compare=True)
        elif array.is_raw and flat.dtype == stored_dtype(array.reader.part.dtype):
            return raw_blocks(flat, flat.dtype, start, stop, buffer)
        else:
            blocks = flat.blocks_in(buffer, start, stop)
        return ((position, (values,)) for position, values in blocks)

    def _counted(self, first: int) -> Callable[[int], list[int]]:
        """Return a function from the number of an element in a block to its position."""

        def position(number: int) -> list[int]:
            order: Any = self.order
            places = np.unravel_index(first + number, self.array.shape, order)
            return [int(place) for place in places]

        return position


def bytes_of(
    array: Any, dtype: str, cast: Cast, order: str = "C", name: str = "", *, is_packed: bool = False
) -> ByteStream:
    """Return the bytes of an array in a type and order; see `Converted`."""
    if isinstance(array, DenseArray) and not is_turned(array, order):
        part = array.reader.part
        is_stored = part.dtype == dtype != "bool" and part.byteorder == "little"
        if is_stored and (is_packed or ELEMENT_TYPES[dtype].bits >= 8) and not has_byte_each(part):
            return StoredBytes(array)
    return Converted(array, dtype, cast, order, name, is_packed=is_packed)


def is_turned(array: Any, order: str) -> bool:
    """Return whether a tensor of a file has its elements in the other order."""
    is_stored = isinstance(array, DenseArray) and array.order != order
    return is_stored and sum(n > 1 for n in array.shape) > 1


def rows_of_chunks(array: Any) -> Iterator[Any]:
    """Compute a dask array by rows of chunks, each chunk once; an array in memory is one row."""
    if not hasattr(array, "dask"):
        yield array
    elif not array.ndim:
        yield array.compute()
    else:
        for start, stop in pairwise(accumulate(array.chunks[0], initial=0)):
            yield array[start:stop].compute()


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of an array in C order, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _packed(blocks: Iterator[Array]) -> Iterator[Array]:
    """Pack 4-bit codes; only the last byte may have one code."""
    pending = np.empty(0, np.uint8)
    for block in blocks:
        codes = np.concatenate([pending, block.reshape(-1).view(np.uint8)])
        count = len(codes) // 2 * 2
        pending = codes[count:]
        yield packed_codes(codes[:count])
    if len(pending):
        yield packed_codes(pending)


def packed_codes(codes: Array) -> Array:
    """Pack two 4-bit codes into each byte, the first one into the low half."""
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(0))
    packed: Array = (codes[::2] & 0xF | codes[1::2] << 4).astype(np.uint8)
    return packed


# --- values --------------------------------------------------------------------------------------


def element_type(dtype: np.dtype[Any]) -> str | None:
    """Name the element type of a numpy dtype."""
    name = dtype.name
    return name if name in ELEMENT_TYPES and dtype.names is None else None


def holds(wide: str, narrow: str) -> bool:
    """Return whether every value of a type is one of another type."""
    w, n = ELEMENT_TYPES[wide], ELEMENT_TYPES[narrow]
    if wide == narrow:
        return True
    # Small floats hold no other type: they lack infinities or a zero, or have too few bits.
    if w.kind == "float" and wide not in WIDE_FLOATS:
        return False
    if n.kind == "complex" and w.kind != "complex":
        return False
    if n.kind == "bool":
        return True
    if n.range is not None and w.range is not None:
        return w.range[0] <= n.range[0] and n.range[1] <= w.range[1]
    if w.float_format is None:
        return False
    if n.range is not None:
        return n.range[1] <= 1 << w.float_format.fraction_bits + 1
    return n.float_format is not None and (
        w.float_format.fraction_bits >= n.float_format.fraction_bits
        and w.float_format.smallest <= n.float_format.smallest
        and w.float_format.largest >= n.float_format.largest
    )


def cast_block(
    values: Array,
    name: str,
    cast: Cast,
    *,
    # For messages: the name of the tensor, and from the number of an element to its position.
    tensor: str = "",
    position: Callable[[int], Sequence[int]] | None = None,
) -> Array:
    """Return a block of elements in the dtype that stores a type, little-endian."""
    # Raise for an element that would not survive, and always for an integer out of range.
    values = np.asarray(values)  # a selection of an array without axes is a scalar
    native = values.dtype.newbyteorder("=")
    stored = stored_dtype(name)
    if native == stored:
        return _little(values)
    values = values.astype(native, copy=False)
    if name == "bfloat16" and native == np.float32:
        # The upper half of a float32; several times faster than ml_dtypes' cast and a check.
        codes = values.view(np.uint32)
        if not (codes & 0xFFFF).any():
            return _little((codes >> 16).astype(np.uint16).view(stored))
    converted = _converted(values, stored)
    lost = _lost(values, converted, name, cast) if _can_lose(native, name, cast) else _NOTHING
    if lost.any():
        number = int(np.argmax(lost))
        index = np.unravel_index(number, lost.shape)
        place = list(map(int, index)) if position is None else list(position(number))
        hint = (
            f"pass cast='allow' to round to {name}; "
            "without dtype=, ds.drop_encoding() writes values as they are"
        )
        if cast == "allow":
            hint = "Convert it with .astype(...) first"
            if native.kind == "f":  # a counter becomes an integer of this type again
                hint = "Replace the value, or leave the tensor out: ds.drop_vars(name)"
        reason = f"element {place} is {values[index]}, which {name} cannot hold"
        raise UnsupportedError(reason, tensor=tensor, rule="Cast", hint=hint)
    return _little(converted)


def _little(values: Array) -> Array:
    if sys.byteorder == "little" and values.dtype.isnative:
        return values
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


@lru_cache
def _can_lose(dtype: np.dtype[Any], name: str, cast: Cast) -> bool:
    """Return whether the elements have to be checked for some that a conversion loses."""
    source = element_type(dtype)
    if source is not None and holds(name, source):
        return False
    return cast != "allow" or _range(name) is not None


def _range(name: str) -> tuple[int, int] | None:
    """Return the range of a type of integers or truth values, without its end; None for others."""
    element = ELEMENT_TYPES[name]
    return (0, 2) if element.kind == "bool" else element.range


def count_lost(values: Array, converted: Array) -> int:
    """Return how many finite elements became infinite or NaN, or were rounded to integers."""
    limit = _limit(values.dtype, converted.dtype)
    if limit is None or not values.size:
        return 0
    if converted.dtype.kind in "iub":
        difference = np.abs(values - np.rint(values))
        return int(np.count_nonzero(difference > _NOISE * np.maximum(1, np.abs(values))))
    with np.errstate(all="ignore"):  # ml_dtypes warns of NaN
        if max(float(values.max()), -float(values.min())) <= limit:  # False if there are NaN
            return 0
        return int(np.count_nonzero(np.isfinite(values) & ~np.isfinite(converted)))


def excess_zeros(values: Array, converted: Array) -> int:
    """Return how many floats became zero in a smaller type, less those that did not."""
    if not _can_vanish(values.dtype, converted.dtype):
        return 0
    is_half = converted.dtype.name == "float16"  # which numpy compares slowly
    nonzeros = int(np.count_nonzero(converted.view("u2") << 1 if is_half else converted))
    return -nonzeros if nonzeros == values.size else int(np.count_nonzero(values)) - 2 * nonzeros


@lru_cache
def _can_vanish(wide: np.dtype[Any], narrow: np.dtype[Any]) -> bool:
    before, after = (ELEMENT_TYPES.get(dtype.name) for dtype in (wide, narrow))
    if before is None or after is None or "complex" in {before.kind, after.kind}:
        return False
    if before.float_format is None or after.float_format is None:
        return False
    return before.float_format.smallest < after.float_format.smallest


def count_nonfinite(values: Array) -> tuple[int, int]:
    """Return how many floats are NaN, and how many infinite."""
    if values.dtype.kind != "f" or not values.size:
        return 0, 0
    if np.isfinite(values.min()) and np.isfinite(values.max()):
        return 0, 0
    return int(np.count_nonzero(np.isnan(values))), int(np.count_nonzero(np.isinf(values)))


@lru_cache
def _limit(wide: np.dtype[Any], narrow: np.dtype[Any]) -> float | None:
    """Return the largest number of a type; None if it holds all finite numbers of another."""
    before, after = ELEMENT_TYPES.get(wide.name), ELEMENT_TYPES.get(narrow.name)
    if before is None or after is None or "complex" in {before.kind, after.kind}:
        return None
    if (limits := _range(after.name)) is not None:
        return None if before.float_format is None else float(limits[1])
    if after.float_format is None:
        return None
    largest = before.float_format.largest if before.float_format else max(before.range or (0,))
    return after.float_format.largest if largest > after.float_format.largest else None


@lru_cache
def _has_payloads(*dtypes: np.dtype[Any]) -> bool:
    """Return whether all types are of IEEE 754, so that the payloads of NaN are kept."""
    types = [ELEMENT_TYPES.get(dtype.name) for dtype in dtypes]
    return all(element is not None and element.is_ieee_float for element in types)


def _converted(values: Array, stored: np.dtype[Any]) -> Array:
    """Convert as numpy does, but round to integers, and keep the payloads of NaN."""
    if stored.kind == "c":
        converted = np.zeros(values.shape, stored)
        converted.real = _converted(values.real, converted.real.dtype)
        if values.dtype.kind == "c":
            converted.imag = _converted(values.imag, converted.imag.dtype)
        return converted
    if values.dtype.kind == "c":
        return _converted(values.real, stored)
    if stored.kind in "iub" and values.dtype.kind not in "iub":
        values = np.rint(values)
    with np.errstate(all="ignore"):  # ml_dtypes warns of NaN
        converted = values.astype(stored)
        nan = np.isnan(values) if _has_payloads(values.dtype, stored) else _NOTHING
    if nan.any():
        converted[nan] = _nan_like(values[nan], stored)
    return converted


def _nan_like(values: Array, stored: np.dtype[Any]) -> Array:
    """Return NaN of another IEEE 754 type with the signs and leading payload bits of NaN values."""
    from_bits, to_bits = values.dtype.itemsize * 8, stored.itemsize * 8
    from_payload = ELEMENT_TYPES[values.dtype.name].fraction_bits
    to_payload = ELEMENT_TYPES[stored.name].fraction_bits
    codes = values.view(f"u{from_bits // 8}").astype(np.uint64)
    sign = codes >> np.uint64(from_bits - 1)
    payload = codes & np.uint64((1 << from_payload) - 1)
    if to_payload >= from_payload:
        payload <<= np.uint64(to_payload - from_payload)
    else:
        payload >>= np.uint64(from_payload - to_payload)
        payload[payload == 0] = 1 << (to_payload - 1)  # no payload at all would be infinity
    exponent = np.uint64((1 << to_bits - 1) - (1 << to_payload))
    pattern = (sign << np.uint64(to_bits - 1)) | exponent | payload
    nan: Array = pattern.astype(f"u{to_bits // 8}").view(stored)
    return nan


def _lost(values: Array, converted: Array, name: str, cast: Cast) -> Array:
    """Return a mask of the elements that a conversion loses."""
    lost = np.zeros(values.shape, bool)
    limits = _range(name)
    if limits is not None:  # wrapped integers come back as they were
        rounded = values
        if values.dtype.kind not in "iub":
            rounded = np.rint(values.real.astype(np.float64))
        lost = ~((rounded >= limits[0]) & (rounded < limits[1]))
    if cast == "allow":
        return lost
    lost |= _differ(_converted(converted, values.dtype), values)
    if values.dtype.kind in "iu" and ELEMENT_TYPES[name].kind == "float":
        # Values that are rounded up to the end of the range do not come back reliably.
        lost |= converted.astype(np.float64) >= float(np.iinfo(values.dtype).max + 1)
    return lost


def _differ(a: Array, b: Array) -> Array:
    """Compare bit by bit."""
    if a.dtype.kind == "c":
        return _differ(a.real, b.real) | _differ(a.imag, b.imag)
    code = f"u{a.dtype.itemsize}"
    differ: Array = np.asarray(a.view(code) != b.view(code))
    return differ


def is_sparse(array: Any) -> bool:
    """Return whether an array, or each chunk of a dask array, is one of pydata/sparse."""
    kind = type(getattr(array, "_meta", array))
    return kind.__module__.partition(".")[0] == "sparse"


def densified(array: Any) -> Any:
    """Return the values of a sparse array as a dense one, lazily if it is lazy."""
    if not is_sparse(array):
        return array
    if hasattr(array, "dask"):
        meta = np.empty((0,) * array.ndim, array.dtype)
        return array.map_blocks(densified, dtype=array.dtype, meta=meta)
    return array.todense()
