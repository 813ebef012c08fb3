"""Compression of new parts, by the names of their encodings."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Protocol

from xckpt.errors import UnsupportedError, shown
from xckpt.storage.seekable import SeekableEncoder

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_LEVEL = 3


class Encoder(Protocol):
    """Compressor for one part."""

    def add(self, data: Any) -> bytes:
        """Compress more bytes, and return the bytes of the stream that are ready."""

    def end(self) -> bytes:
        """Finish the stream, and return its remaining bytes."""


def new_encoder(
    encoding: str, nbytes: int, *, level: int = DEFAULT_LEVEL, threads: int = 1
) -> Encoder:
    """Return an encoder for a part of `nbytes` bytes."""
    if encoding == "zstd":
        import zstandard

        # Worker threads cost memory and time to start, and change the compressed bytes.
        compressor = zstandard.ZstdCompressor(level=level, threads=threads if threads > 1 else 0)
        # One frame with its content size, because many readers require it.
        return _StreamEncoder(compressor.compressobj(size=nbytes))
    if encoding == "deflate":
        return _StreamEncoder(zlib.compressobj(min(level, 9), wbits=-zlib.MAX_WBITS))
    if encoding == "zstd-seekable":
        return SeekableEncoder(level, threads)
    raise UnsupportedError(
        f"the compression {shown(encoding)} is unsupported",
        rule="Encoding",
        hint="Supported are zstd, zstd-seekable and deflate",
    )


class _StreamEncoder:
    def __init__(self, compressor: Any) -> None:
        self.add: Callable[[Any], bytes] = compressor.compress
        self.end: Callable[[], bytes] = compressor.flush
