"""Encodings of parts: decoders of stored bytes.

Streams may be hostile, so the sizes that they claim are never trusted: the caller passes the
expected number of bytes, and no more are decoded. All errors are `FormatError` with
``rule="Encoding"``, except `TooLargeError` for data that does not fit in memory.

``deflate`` is a stream of RFC 1951 without a header, as in zip files.

``fletcher32``, ``zlib``, ``lzf`` and ``shuffle4`` (or another size of elements), joined by ``+``
in the order of decoding, are the filters of chunks in HDF5; ``gzip`` and ``zlib`` also compress
chunks of zarr. The checksum follows the data.

``zstd`` is a Zstandard stream: any number of frames, some of them skippable, with or without a
content size. A frame (RFC 8878, section 3.1.1) is a header, which may state the size of its
content; blocks; and, if the header has a flag for it, 4 bytes of a checksum::

    block         3 bytes, little-endian: bit 0 marks the last one, bits 1 and 2 are its type, the
                  rest its size; of type 1 (one byte, repeated) that byte alone is stored
    skippable     50 2A 4D 18 to 5F 2A 4D 18, size u32, so many bytes

``varint4`` (or another size of elements) is a sequence of numbers of protobuf: seven bits per byte,
the lowest first, at most ten bytes, and a set high bit in all bytes but the last. An element has
the lowest bits of its number.

``zstd-seekable`` is described in `xckpt.storage.seekable`.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from xckpt.errors import FormatError, IntegrityError
from xckpt.storage.limits import require_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from xckpt.storage.digests import PassingBytes

    Stored = memoryview | bytes | PassingBytes

_COUNTING_NBYTES = 1 << 18  # block size for decoded bytes that are dropped


class LongStreamError(FormatError):
    """A stream decodes to more bytes than the limit."""


def malformed(reason: str, offset: int | None = None) -> FormatError:
    """Return the error for a stream that does not decode."""
    return FormatError(reason, offset=offset, rule="Encoding")


class StreamDecoder(ABC):
    """Decoder for the first bytes of a stream that can only be decoded from its start."""

    name: ClassVar[str]
    #: Bounds of the decoded size: a factor of the stored size, and bytes to add.
    densest: ClassVar[tuple[int, int]]

    def __init__(self, stored: Stored, nbytes: int, *, is_whole: bool) -> None:
        # With `is_whole`, the stream must end after `nbytes` bytes.
        if nbytes > self.most(len(stored)):
            raise malformed(f"{len(stored)} bytes of {self.name} cannot decode to {nbytes}")
        self._nbytes = nbytes
        self._begin(stored, is_whole=is_whole)

    @classmethod
    def most(cls, stored_nbytes: int) -> int:
        """Return an upper bound of the number of bytes that a stream decodes to."""
        factor, extra = cls.densest
        return stored_nbytes * factor + extra

    @abstractmethod
    def _begin(self, stored: Stored, *, is_whole: bool) -> None:
        """Open the stream."""

    @abstractmethod
    def _fill(self, memory: NDArray[np.uint8]) -> int:
        """Decode into memory and return the number of bytes; fewer than fit end the stream."""

    @abstractmethod
    def _expect_end(self) -> None:
        """Raise an error if the stream does not end here."""

    def _take(self, memory: NDArray[np.uint8]) -> None:
        count = self._fill(memory)
        if count < len(memory):
            short = len(memory) - count
            raise malformed(
                f"a {self.name} stream ends {short} bytes too early: it decodes to fewer than "
                f"{self._nbytes}, or is cut short"
            )

    def _skip(self, nbytes: int) -> None:
        scratch = np.empty(min(nbytes, _COUNTING_NBYTES), np.uint8)
        for start in range(0, nbytes, _COUNTING_NBYTES):
            self._take(scratch[: nbytes - start])

    @classmethod
    def decompress(
        cls, stored: Stored, nbytes: int, out: NDArray[np.uint8] | None = None
    ) -> memoryview:
        """Decode a whole stream of exactly `nbytes` bytes, into `out` if it is given."""
        stream = cls(stored, nbytes, is_whole=True)
        decoded = allocate(nbytes) if out is None else out
        stream._take(decoded)
        stream._expect_end()
        return decoded.data

    @classmethod
    def decompress_range(
        cls, stored: Stored, start: int, stop: int, total: int | None = None
    ) -> memoryview:
        """Decode a stream from its beginning, and return the bytes from `start` to `stop`."""
        del total  # the size of all decoded bytes, if known: for decoders of whole chunks
        stream = cls(stored, stop, is_whole=False)
        decoded = allocate(stop - start)
        stream._skip(start)
        stream._take(decoded)
        return decoded.data

    @classmethod
    def decompressed_blocks(
        cls, stored: Stored, nbytes: int, block_nbytes: int, skip: int | None = None
    ) -> Iterator[memoryview]:
        """Yield `nbytes` decoded bytes after the first `skip`, in blocks that share memory."""
        stream = cls(stored, (skip or 0) + nbytes, is_whole=skip is None)
        stream._skip(skip or 0)
        buffer = np.empty(min(block_nbytes, nbytes), np.uint8)
        for start in range(0, nbytes, block_nbytes):
            block = buffer[: nbytes - start]
            stream._take(block)
            yield block.data
        if skip is None:
            stream._expect_end()


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Return memory to decode into; raise if it would exceed the limit."""
    require_memory(nbytes)
    return np.empty(nbytes, np.uint8)


class DeflateDecoder(StreamDecoder):
    """Decoder for a deflate stream."""

    name = "deflate"
    densest = 1032, 1024  # 258 bytes for each pair of bits, after a few bytes for its codes
    # Block sizes. They are small because each call of zlib copies its remaining input.
    _STORED_NBYTES, _DECODED_NBYTES = 1 << 16, 1 << 20

    def _begin(self, stored: Stored, *, is_whole: bool) -> None:
        del is_whole  # a deflate stream marks its end
        self._blocks: Iterator[memoryview] = (
            iter([memoryview(stored).cast("B")])
            if isinstance(stored, memoryview | bytes)
            else iter(stored)
        )
        self._block = memoryview(b"")
        self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)

    def _fill(self, memory: NDArray[np.uint8]) -> int:
        done, view = 0, memory.data
        while done < len(view) and not self._zlib.eof:
            data = self._zlib.unconsumed_tail
            if not data:
                if not self._block:
                    self._block = next(self._blocks, self._block)
                data = bytes(self._block[: self._STORED_NBYTES])
                self._block = self._block[self._STORED_NBYTES :]
            try:
                block = self._zlib.decompress(data, min(len(view) - done, self._DECODED_NBYTES))
            except zlib.error as error:
                raise malformed(f"a deflate stream does not decode: {error}") from error
            if not data and not block:
                break
            view[done : done + len(block)] = block
            done += len(block)
        return done

    def _expect_end(self) -> None:
        if self._fill(np.empty(1, np.uint8)) or not self._zlib.eof:
            raise malformed(f"a deflate stream does not end after {self._nbytes} bytes")


class ZstdDecoder(StreamDecoder):
    """Decoder for a Zstandard stream."""

    name = "zstd"
    densest = 1 << 15, 0  # a block of four bytes for 128 KiB of one value
    # A stream that is truncated between two blocks does not raise an error in libzstd. Therefore, a
    # frame with this content is appended to a stream that must end, and must follow the bytes.
    END = bytes.fromhex("6f1c93d25ae84b07b6390dfe728145ac")

    def _begin(self, stored: Stored, *, is_whole: bool) -> None:
        import zstandard

        # The end frame is fed in two halves: if a buffer ends within a header, libzstd looks for
        # the frame at the start of the next buffer, and would accept a whole frame there.
        frame = self.end_frame() if is_whole else b""
        parts: tuple[Stored, ...] = (stored, frame[:12], frame[12:])
        # One buffer per part: if one buffer has the whole frame, and the frame a content size,
        # libzstd decodes it straight into the destination, without a window in between.
        listed = ([part] if isinstance(part, memoryview | bytes) else part for part in parts)
        buffers = filter(len, chain.from_iterable(listed))
        chained: Any = SimpleNamespace(read=lambda _: next(buffers, b""))
        self._stream = zstandard.ZstdDecompressor().stream_reader(
            chained, read_size=max(1, *map(len, parts)), read_across_frames=True
        )

    @classmethod
    @cache
    def end_frame(cls) -> bytes:
        """Return the frame that marks the end of a stream."""
        import zstandard

        return zstandard.ZstdCompressor(write_checksum=True).compress(cls.END)

    def _fill(self, memory: NDArray[np.uint8]) -> int:
        done = 0
        with _decoding():
            while done < len(memory) and (count := self._stream.readinto(memory[done:])):
                done += count
        return done

    def _expect_end(self) -> None:
        with _decoding():
            tail = self._stream.read(len(self.END) + 1)
        if len(tail) > len(self.END):
            raise malformed(f"a zstd stream decodes to more than {self._nbytes} bytes")
        if tail != self.END:
            raise malformed(
                f"a zstd stream decodes to fewer than {self._nbytes} bytes, or is cut short"
            )

    def count(self, limit: int) -> int:
        """Count the decoded bytes in constant memory; raise `LongStreamError` above `limit`."""
        buffer = np.empty(_COUNTING_NBYTES, np.uint8)
        total, tail, end = 0, b"", self.END
        while count := self._fill(buffer):
            total += count
            tail = (tail + buffer[max(0, count - len(end)) : count].tobytes())[-len(end) :]
            if total > limit + len(end):
                reason = f"a zstd stream decodes to more than {limit} bytes"
                raise LongStreamError(reason, rule="Encoding")
        if tail != end:
            raise malformed("a zstd stream is cut short")
        return total - len(end)


class FilteredDecoder(StreamDecoder):
    """Decoder for a chunk of HDF5, which several filters have encoded as a whole."""

    densest = 1032, 1024  # of zlib; lzf makes at most 264 bytes of three
    filters: ClassVar[tuple[str, ...]]  # in the order of decoding

    def _begin(self, stored: Stored, *, is_whole: bool) -> None:
        del is_whole
        blocks = [stored] if isinstance(stored, memoryview | bytes) else stored
        data = b"".join(bytes(block) for block in blocks)
        for name in self.filters:
            if name == "fletcher32":
                data = _without_fletcher32(data)
            elif name == "zlib":
                data = _inflated(data, self._nbytes, zlib.MAX_WBITS)
            elif name == "gzip":
                data = _inflated(data, self._nbytes, 16 + zlib.MAX_WBITS)
            elif name == "lzf":
                data = _without_lzf(data, self._nbytes)
            else:
                data = _unshuffled(data, int(name.removeprefix("shuffle")))
        self._decoded = np.frombuffer(data, np.uint8)

    def _fill(self, memory: NDArray[np.uint8]) -> int:
        count = min(len(memory), len(self._decoded))
        memory[:count] = self._decoded[:count]
        self._decoded = self._decoded[count:]
        return count

    def _expect_end(self) -> None:
        if len(self._decoded):
            raise malformed(f"a chunk decodes to more than {self._nbytes} bytes")

    @classmethod
    def decompress_range(
        cls, stored: Stored, start: int, stop: int, total: int | None = None
    ) -> memoryview:
        """Decode the whole chunk, of `total` bytes, and return a part of it."""
        return cls.decompress(stored, stop if total is None else total)[start:stop]


class VarintDecoder(StreamDecoder):
    """Decoder for numbers of protobuf, which become little-endian elements."""

    width: ClassVar[int]  # bytes of an element
    _STORED_NBYTES, _LONGEST = 1 << 20, 10

    def _begin(self, stored: Stored, *, is_whole: bool) -> None:
        del is_whole
        views = [stored] if isinstance(stored, memoryview | bytes) else stored
        self._blocks = (
            np.frombuffer(view, np.uint8)[start : start + self._STORED_NBYTES]
            for view in views
            for start in range(0, len(view), self._STORED_NBYTES)
        )
        self._begun = np.empty(0, np.uint8)  # the beginning of a number
        self._decoded = np.empty(0, np.uint8)

    def _fill(self, memory: NDArray[np.uint8]) -> int:
        done = 0
        while done < len(memory):
            if not len(self._decoded) and not self._decode_block():
                break
            count = min(len(memory) - done, len(self._decoded))
            memory[done : done + count] = self._decoded[:count]
            self._decoded = self._decoded[count:]
            done += count
        return done

    def _decode_block(self) -> bool:
        """Decode the next block; return False at the end of the stream."""
        for block in self._blocks:
            data = np.concatenate([self._begun, block])
            stops = np.flatnonzero(data < 0x80) + 1
            end = int(stops[-1]) if len(stops) else 0
            lengths = np.diff(stops, prepend=0)
            self._begun = data[end:]
            if max(lengths.max(initial=0), len(self._begun)) > self._LONGEST:
                raise malformed(f"a number has more than {self._LONGEST} bytes")
            if not len(stops):
                continue
            starts, values = stops - lengths, np.zeros(len(stops), np.uint64)
            for place in range(int(lengths.max())):
                longer = lengths > place
                bits = data[starts[longer] + place].astype(np.uint64) & np.uint64(0x7F)
                values[longer] |= bits << np.uint64(7 * place)
            elements = values.astype(f"<u{self.width}")
            self._decoded = elements.view(np.uint8)
            return True
        return False

    def _expect_end(self) -> None:
        if len(self._decoded) or len(self._begun) or self._decode_block():
            raise malformed(f"the numbers do not end after {self._nbytes} bytes of elements")


def _varint(width: int) -> type[VarintDecoder]:
    options = {"name": f"varint{width}", "width": width, "densest": (width, 0)}
    return type("VarintDecoder", (VarintDecoder,), options)


def _without_fletcher32(data: bytes) -> bytes:
    """Verify and remove the checksum after the data: sums of words of 16 bits, modulo 65535."""
    if len(data) < 4:
        raise malformed("a chunk is too short for its checksum")
    content, expected = data[:-4], int.from_bytes(data[-4:], "little")
    words = np.frombuffer(content + b"\0" * (len(content) % 2), ">u2")
    first = second = 0
    for start in range(0, len(words), 1 << 20):
        block = words[start : start + (1 << 20)].astype(np.uint64)
        weights = np.arange(len(block), 0, -1, dtype=np.uint64)
        second = (second + len(block) * first + int((block * weights).sum())) % 65535
        first = (first + int(block.sum())) % 65535

    def is_same(sum_: int, stated: int) -> bool:
        return sum_ % 65535 == stated % 65535

    if not (is_same(first, expected & 0xFFFF) and is_same(second, expected >> 16)):
        raise IntegrityError(f"a chunk does not have the checksum {expected:08x}", rule="Checksum")
    return content


def _inflated(data: bytes, nbytes: int, bits: int) -> bytes:
    stream = zlib.decompressobj(bits)
    try:
        decoded = stream.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise malformed(f"a zlib stream does not decode: {error}") from error
    if len(decoded) <= nbytes and not stream.eof:
        raise malformed("a zlib stream is cut short")
    return decoded


def _without_lzf(data: bytes, nbytes: int) -> bytes:
    """Decode LZF: runs of up to 32 bytes, and copies of up to 264 of the last 8192 bytes."""
    decoded, at, end = bytearray(), 0, len(data)
    try:
        while at < end and len(decoded) <= nbytes:
            control = data[at]
            at += 1
            if control < 32:
                decoded += data[at : at + control + 1]
                at += control + 1
                continue
            length = control >> 5
            if length == 7:
                length += data[at]
                at += 1
            distance = (control & 31) << 8 | data[at]
            at += 1
            start, length = len(decoded) - distance - 1, length + 2
            if start < 0:
                raise malformed("a copy in an lzf stream begins before it")
            piece = decoded[start : start + length]
            decoded += (piece * -(-length // len(piece)))[:length]
    except IndexError as error:
        raise malformed("an lzf stream is cut short") from error
    return bytes(decoded)


def _unshuffled(data: bytes, width: int) -> bytes:
    """Put the bytes of each element together; bytes after the last element follow."""
    octets = np.frombuffer(data, np.uint8)
    count = len(octets) // width
    elements = octets[: count * width].reshape(width, count).T.reshape(-1)
    return np.concatenate([elements, octets[count * width :]]).tobytes()


def _filtered(*filters: str) -> type[FilteredDecoder]:
    name = "+".join(filters)
    return type("FilteredDecoder", (FilteredDecoder,), {"name": name, "filters": filters})


#: Encodings that can only be decoded from their start.
STREAMS: dict[str | None, type[StreamDecoder]] = {
    "deflate": DeflateDecoder,
    "zstd": ZstdDecoder,
    "gzip": _filtered("gzip"),
    **{f"varint{width}": _varint(width) for width in (1, 2, 4, 8)},
    **{
        decoder.name: decoder
        for check in ((), ("fletcher32",))
        for packed in ((), ("zlib",), ("lzf",))
        for shuffle in ((), *((f"shuffle{width}",) for width in (2, 4, 8, 16)))
        for decoder in [_filtered(*check, *packed, *shuffle)]
        if decoder.filters
    },
}


@contextmanager
def _decoding() -> Iterator[None]:
    from zstandard import ZstdError

    try:
        yield
    except ZstdError as error:
        raise malformed(f"a zstd stream is corrupt or cut short: {error}") from error


def decompressed_nbytes(stored: Stored, limit: int) -> int:
    """Count the bytes that a zstd stream decodes to; raise `LongStreamError` above `limit`."""
    return ZstdDecoder(stored, 0, is_whole=True).count(limit)


_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_LONGEST_HEADER = 18
_UNKNOWN = (1 << 64) - 1


def stated_nbytes(head: memoryview | bytes, nbytes: int) -> int | None:
    """Return the decoded size of a zstd stream from its frame headers; None if unknown."""
    import zstandard

    total = position = 0
    while position < nbytes:
        if len(head) < min(nbytes, position + _LONGEST_HEADER):
            return None
        if int.from_bytes(head[position : position + 4], "little") in _SKIPPABLE:
            position += 8 + int.from_bytes(head[position + 4 : position + 8], "little")
            continue
        header = head[position : position + _LONGEST_HEADER]
        with _decoding():
            parameters = zstandard.get_frame_parameters(header)
            header_nbytes = zstandard.frame_header_size(header)
        if parameters.content_size == _UNKNOWN:
            return None
        total += parameters.content_size
        end = _end_of_blocks(head, position + header_nbytes)
        if end is None:
            break
        position = end + 4 * bool(parameters.has_checksum)
    if total > ZstdDecoder.most(nbytes):
        raise malformed(f"{nbytes} bytes of zstd cannot decode to {total}")
    return total


def _end_of_blocks(head: memoryview | bytes, position: int) -> int | None:
    """Return the end of the blocks that begin at a position; None if it is after the head."""
    while position + 3 <= len(head):
        block = int.from_bytes(head[position : position + 3], "little")
        position += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
        if block & 1:
            return position
    return None
