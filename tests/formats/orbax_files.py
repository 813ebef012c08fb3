"""Checkpoints of Orbax, written byte by byte."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import zstandard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MANIFEST, NODE = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")
NOWHERE = (1 << 64) - 1
DATA = "d/" + "f" * 32
ROOT = "d/" + "0" * 32


def varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def column(*values: int) -> bytes:
    return b"".join(map(varint, values))


def frame(magic: bytes, body: bytes, compression: int = 0) -> bytes:
    """Wrap a body, which zstd compresses for compression 1."""
    body = zstandard.compress(body) if compression else body
    data = magic + bytes(8) + b"\0" + bytes([compression]) + body
    data = data[:4] + struct.pack("<Q", len(data) + 4) + data[12:]
    return data + struct.pack("<I", google_crc32c.value(data))


def files(*paths: str) -> bytes:
    names = [path.encode() for path in paths]
    lengths = column(*[len(name) for name in names])
    bases = column(*[0 for _ in names])
    return varint(len(names)) + bytes(max(0, len(names) - 1)) + lengths + bases + b"".join(names)


def manifest(root: tuple[int, int] | None, *, compression: int = 1, height: int = 0) -> bytes:
    """Write a manifest with one version, whose root node is at (offset, size)."""
    offset, nbytes = root or (NOWHERE, NOWHERE)
    body = bytes(16) + column(0, 1024, 100_000_000) + b"\4" + column(1) + bytes(4)
    body += files(ROOT) + varint(1) + varint(1) + bytes([height])
    body += column(0, offset, nbytes, 1, 0, 0) + bytes(8) + varint(0)
    return frame(MANIFEST, body, compression)


def leaf(
    values: Sequence[tuple[bytes, bytes | tuple[int, int]]],
    compression: int = 1,
    data: str = DATA,
) -> bytes:
    """Write a leaf; values are bytes, or (offset, size) in the file of data."""
    keys = [key for key, _ in values]
    stored = [value for _, value in values if isinstance(value, tuple)]
    sizes = [value[1] if isinstance(value, tuple) else len(value) for _, value in values]
    body = b"\0" + files(data) + varint(len(keys)) + bytes(len(keys) - 1)
    body += column(*map(len, keys)) + b"".join(keys) + column(*sizes)
    body += bytes(isinstance(value, tuple) for _, value in values)
    body += column(*[0 for _ in stored], *[offset for offset, _ in stored])
    body += b"".join(value for _, value in values if isinstance(value, bytes))
    return frame(NODE, body, compression)


def zarray(array: Any, chunks: Sequence[int] | None = None, **fields: Any) -> bytes:
    """Write the document of an array in version 2."""
    document: dict[str, Any] = {
        "zarr_format": 2,
        "shape": array.shape,
        "chunks": array.shape if chunks is None else chunks,
        "dtype": array.dtype.str,
        "compressor": None,
        "order": "C",
        "filters": None,
        "fill_value": None,
    }
    return json.dumps(document | fields).encode()


def write(
    folder: Path, arrays: Mapping[str, Any], *, inline: int = 100, compress: bool = False
) -> Path:
    """Write a database with an array in one chunk each, and return its manifest."""
    entries: dict[bytes, bytes | tuple[int, int]] = {}
    data = bytearray()
    tree = {}
    for name, array in arrays.items():
        compressor = {"id": "zstd", "level": 1} if compress else None
        entries[f"{name}/.zarray".encode()] = zarray(array, compressor=compressor)
        chunk = np.ascontiguousarray(array).tobytes()
        chunk = zstandard.compress(chunk) if compress else chunk
        place = (len(data), len(chunk))
        data += chunk if len(chunk) > inline else b""
        key = f"{name}/{'.'.join('0' * array.ndim) or '0'}".encode()
        entries[key] = place if len(chunk) > inline else chunk
        keys = [{"key": part, "key_type": 2} for part in name.split(".")]
        value = {"value_type": "jax.Array", "skip_deserialize": False}
        tree[str(tuple(name.split(".")))] = {"key_metadata": keys, "value_metadata": value}
    node = leaf(sorted(entries.items()))
    folder.mkdir(exist_ok=True)
    (folder / "d").mkdir()
    (folder / DATA).write_bytes(data)
    (folder / ROOT).write_bytes(node)
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_zarr3": False}))
    path = folder / "manifest.ocdbt"
    path.write_bytes(manifest((0, len(node))))
    return path
