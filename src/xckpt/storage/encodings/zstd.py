"""Zstandard streams of unknown origin, decoded whole, in part, or only counted.

A stream is any number of frames, some of them skippable, with or without a content size. Sizes
that a stream claims are never trusted: the caller says how many bytes there must be, and no
more are decoded. All errors are `FormatError` with ``rule="Encoding"``.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = [
    "allocate",
    "decompress",
    "decompress_into",
    "decompress_prefix",
    "decompressed_blocks",
    "decompressed_nbytes",
    "malformed",
]

# The densest block there is: four bytes for 128 KiB of one value.
_HIGHEST_RATIO = 1 << 15

_COUNTING_NBYTES = 1 << 18

# Ends every stream that is decoded to its end, see `_closed`.
_END = bytes.fromhex("6f1c93d25ae84b07b6390dfe728145ac")


def decompress(stored: memoryview | bytes, nbytes: int) -> memoryview:
    """Decode a whole stream.

    Parameters
    ----------
    stored : memoryview or bytes
        All of the stream.
    nbytes : int
        How many bytes it must decode to.

    Returns
    -------
    memoryview
        The decoded bytes, in memory of their own.

    Raises
    ------
    FormatError
        If it is corrupt, cut short, or decodes to fewer or more bytes.
    """
    decoded = allocate(stored, nbytes)
    decompress_into(stored, decoded)
    return decoded.data


def decompress_prefix(stored: memoryview | bytes, nbytes: int) -> memoryview:
    """Decode the beginning of a stream, and no more of it.

    Parameters
    ----------
    stored : memoryview or bytes
        All of the stream.
    nbytes : int
        How many bytes to decode.

    Returns
    -------
    memoryview
        The first decoded bytes, in memory of their own.

    Raises
    ------
    FormatError
        If it is corrupt there, or ends before.
    """
    decoded = allocate(stored, nbytes)
    with _decoding():
        found = _fill(_stream(stored), decoded)
    if found < nbytes:
        raise malformed(f"a zstd stream ends after {found} of {nbytes} bytes")
    return decoded.data


def decompressed_nbytes(stored: memoryview | bytes, limit: int) -> int:
    """Count the bytes that a stream decodes to, in memory of constant size.

    Parameters
    ----------
    stored : memoryview or bytes
        All of the stream.
    limit : int
        The largest count that makes sense.

    Returns
    -------
    int
        The exact count.

    Raises
    ------
    FormatError
        If it is corrupt, cut short, or decodes to more than `limit` bytes.
    """
    buffer = np.empty(_COUNTING_NBYTES, np.uint8)
    total, tail = 0, b""
    with _decoding():
        stream = _closed(stored)
        while count := stream.readinto(buffer):
            total += count
            tail = (tail + buffer[max(0, count - len(_END)) : count].tobytes())[-len(_END) :]
            if total > limit + len(_END):
                raise malformed(f"a zstd stream decodes to more than {limit} bytes")
    if tail != _END:
        raise malformed("a zstd stream is cut short")
    return total - len(_END)


def decompressed_blocks(
    stored: memoryview | bytes, nbytes: int, block_nbytes: int
) -> Iterator[memoryview]:
    """Decode a whole stream block by block, in memory of constant size.

    Parameters
    ----------
    stored : memoryview or bytes
        All of the stream.
    nbytes : int
        How many bytes it must decode to.
    block_nbytes : int
        Size of the blocks; the last may be smaller.

    Yields
    ------
    memoryview
        The next decoded bytes, in memory of their own.

    Raises
    ------
    FormatError
        If it is corrupt, cut short, or decodes to fewer or more bytes; the blocks before it have
        been given by then.
    """
    stream = _closed(stored)
    for start in range(0, nbytes, block_nbytes):
        block = np.empty(min(block_nbytes, nbytes - start), np.uint8)
        with _decoding():
            found = _fill(stream, block)
        if found < len(block):
            raise malformed(f"a zstd stream decodes to fewer than {nbytes} bytes")
        yield block.data
    _expect_end(stream, nbytes)


def decompress_into(stored: memoryview | bytes, decoded: NDArray[np.uint8]) -> None:
    """Decode a whole stream that must fill an array exactly.

    Parameters
    ----------
    stored : memoryview or bytes
        All of the stream.
    decoded : numpy.ndarray of uint8
        Where the decoded bytes go.

    Raises
    ------
    FormatError
        If it is corrupt, cut short, or decodes to fewer or more bytes.
    """
    nbytes = len(decoded)
    with _decoding():
        stream = _closed(stored)
        _fill(stream, decoded)
    _expect_end(stream, nbytes)


def _expect_end(stream: Any, nbytes: int) -> None:
    """Check that a stream that was opened by `_closed` ends here."""
    with _decoding():
        tail = stream.read(len(_END) + 1)
    if len(tail) > len(_END):
        raise malformed(f"a zstd stream decodes to more than {nbytes} bytes")
    if tail != _END:
        raise malformed(f"a zstd stream decodes to fewer than {nbytes} bytes, or is cut short")


def allocate(stored: memoryview | bytes, nbytes: int) -> NDArray[np.uint8]:
    """Allocate memory for the decoded bytes of a stream, if it can have so many.

    Parameters
    ----------
    stored : memoryview or bytes
        All of the stream.
    nbytes : int
        How many bytes it is said to decode to.

    Returns
    -------
    numpy.ndarray of uint8
        Of undefined content.

    Raises
    ------
    FormatError
        If no stream of this size decodes to so many bytes.
    """
    if nbytes > len(stored) * _HIGHEST_RATIO:
        raise malformed(f"{len(stored)} bytes of zstd cannot decode to {nbytes}")
    return np.empty(nbytes, np.uint8)


def malformed(reason: str, offset: int | None = None) -> FormatError:
    """Make the error of all encodings.

    Parameters
    ----------
    reason : str
        What is wrong.
    offset : int, optional
        Where in the file.

    Returns
    -------
    FormatError
        With ``rule="Encoding"``, to be raised.
    """
    return FormatError(reason, offset=offset, rule="Encoding")


class _Chain:
    """Buffers one after another, as the file object that zstandard reads from."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: memoryview | bytes) -> None:
        self._parts = [part for part in reversed(parts) if len(part)]

    def read(self, size: int) -> memoryview | bytes:
        return self._parts.pop() if self._parts else b""


def _stream(*parts: memoryview | bytes) -> Any:
    import zstandard

    # Each part is handed over whole: a frame that lies in one buffer, with its content size, is
    # decoded straight into the destination, without a window in between.
    size = max(1, *map(len, parts))
    decompressor = zstandard.ZstdDecompressor()
    chain: Any = _Chain(*parts)
    return decompressor.stream_reader(chain, read_size=size, read_across_frames=True)


@cache
def _end_frame() -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(_END)


def _closed(stored: memoryview | bytes) -> Any:
    """Read a stream with a known frame after it.

    zstandard does not tell whether a stream ends between frames or inside one. If and only if it
    ends between them, what follows it is a frame of its own, and the output ends with `_END`.
    """
    # In two halves: where a header is cut in two by the end of a buffer, libzstd looks for the
    # frame at the start of the next buffer, and would find a whole one there.
    frame = _end_frame()
    return _stream(stored, frame[:12], frame[12:])


@contextmanager
def _decoding() -> Iterator[None]:
    from zstandard import ZstdError

    try:
        yield
    except ZstdError as error:
        raise malformed(f"a zstd stream is corrupt or cut short: {error}") from error


def _fill(stream: Any, decoded: NDArray[np.uint8]) -> int:
    done = 0
    while done < len(decoded) and (count := stream.readinto(decoded[done:])):
        done += count
    return done
