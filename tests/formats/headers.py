"""Headers of files of all formats as nested values that tests can change and write back."""

from __future__ import annotations

import json
import struct
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import cbor2
import msgpack
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A value of each type that headers have, and numbers that are not sizes.
STRANGERS: tuple[Any, ...] = (
    [],
    [[1]],
    {},
    {"a": 1},
    None,
    True,
    0.5,
    float("nan"),
    10**25,
    (1 << 64) - 1,
    -1,
    "",
    "x\0\ud800",
    b"\xff",
)
Path = tuple[Any, ...]


class Header(NamedTuple):
    """The header of a file as a nested value, and a function that writes the file with another."""

    value: Any
    rebuilt: Callable[[Any], bytes]


def header_of(data: bytes) -> Header | None:
    """Return the header of a file of any format, or None if it cannot be parsed."""
    magic = data[:8]
    if magic in {b"ZTEN0001", b"ZTEN1000"}:
        footer = 16 if data.endswith(b"ZTEN1000") else 8
        return _ztensor(data, footer)
    if magic == b"\x89ZT2\r\n\x1a\n":
        return _ztensor_2(data)
    if magic.startswith(b"NRUB"):
        return _burnpack(data)
    if magic == b"GPTRSCHK":
        return _sized_json(data, 12, "<I")
    if magic.startswith(b"PCLM"):
        return _sized_json(data, 5 + data[4], "<i") if data[4] < 0x80 else None
    if magic.startswith(b"\xce\0\0\0\0"):
        return _messages(data)
    if magic.startswith(b"{"):
        return Header(json.loads(data), lambda value: json.dumps(value).encode())
    return _sized_json(data, 0, "<Q") if data[8:9] == b"{" else None


def _ztensor(data: bytes, footer: int) -> Header:
    end = len(data) - footer
    (length,) = struct.unpack_from("<Q", data, end)

    def rebuilt(value: Any) -> bytes:
        manifest = cbor2.dumps(value)
        return b"".join(
            [data[: end - length], manifest, struct.pack("<Q", len(manifest)), data[end + 8 :]]
        )

    return Header(cbor2.loads(data[end - length : end]), rebuilt)


def _ztensor_2(data: bytes) -> Header:
    offset, length = struct.unpack("<QQ", data[-40:-24])

    def rebuilt(value: Any) -> bytes:
        manifest = cbor2.dumps(value, canonical=True)
        digest = xxhash.xxh3_64_intdigest(manifest)
        footer = struct.pack("<QQQ", offset, len(manifest), digest)
        return data[:offset] + manifest + footer + data[-16:]

    return Header(cbor2.loads(data[offset : offset + length]) if length else {}, rebuilt)


def _burnpack(data: bytes) -> Header:
    (length,) = struct.unpack_from("<I", data, 6)
    body = data[-(-(10 + length) // 256) * 256 :]

    def rebuilt(value: Any) -> bytes:
        metadata = cbor2.dumps(value)
        head = data[:6] + struct.pack("<I", len(metadata)) + metadata
        return head + bytes(-len(head) % 256) + body

    return Header(cbor2.loads(data[10 : 10 + length]), rebuilt)


def _sized_json(data: bytes, at: int, length: str) -> Header:
    start = at + struct.calcsize(length)
    (size,) = struct.unpack_from(length, data, at)

    def rebuilt(value: Any) -> bytes:
        text = json.dumps(value).encode()
        return data[:at] + struct.pack(length, len(text)) + text + data[start + size :]

    return Header(json.loads(data[start : start + size]), rebuilt)


def _messages(data: bytes) -> Header:
    """Return the objects of a MessagePack file; unchanged ones stay encoded bytes."""
    unpacker = msgpack.Unpacker(BytesIO(data), raw=True)
    objects = []
    while unpacker.tell() < len(data):
        start = unpacker.tell()
        unpacker.skip()
        objects.append(_Packed(data[start : unpacker.tell()]))

    def rebuilt(value: Any) -> bytes:
        return b"".join(
            item if isinstance(item, _Packed) else msgpack.packb(item) for item in value
        )

    return Header(objects, rebuilt)


class _Packed(bytes):
    """An object that is encoded already."""


def changed(value: Any) -> Iterator[tuple[Path, Any]]:
    """Give a value with each of its parts replaced by each stranger, and where that was."""
    for path in _paths(value):
        for stranger in STRANGERS:
            yield path, _with(value, path, stranger)


def _paths(value: Any, at: Path = ()) -> Iterator[Path]:
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[key], (*at, key))


def _with(value: Any, path: Path, stranger: Any) -> Any:
    if not path:
        return stranger
    copied = value.copy()
    copied[path[0]] = _with(value[path[0]], path[1:], stranger)
    return copied
