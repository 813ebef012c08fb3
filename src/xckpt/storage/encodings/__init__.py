"""Encodings of parts: how stored bytes become decoded ones. The input may be anything."""

from __future__ import annotations

from xckpt.storage.encodings.seekable import (
    SeekTable,
    read_frames,
    read_seek_table,
    read_seekable,
)
from xckpt.storage.encodings.zstd import (
    decompress,
    decompress_prefix,
    decompressed_blocks,
    decompressed_nbytes,
)

__all__ = [
    "SeekTable",
    "decompress",
    "decompress_prefix",
    "decompressed_blocks",
    "decompressed_nbytes",
    "read_frames",
    "read_seek_table",
    "read_seekable",
]
