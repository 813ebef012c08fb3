"""Positions of headers in files, and their replacement.

A `Frame` is a byte range of a file that can be replaced. The lengths, offsets and checksums around
it are adapted, so that readers get as far as the faults inside.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import google_crc32c
import zstandard

from tests.formats.orbax_files import MANIFEST, NODE, frame
from tests.formats.ztensor_files import V2_MAGIC, v2_container
from torture.grammars import BINARY, CBOR, JSON, MSGPACK, PICKLE, Grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Frame", "frames"]

# Archives with larger members are only changed as bytes.
_MOST_INFLATED = 1 << 20


@dataclass(frozen=True)
class Frame:
    """A byte range of a file, and a function that makes the file with another one in its place."""

    grammar: Grammar
    data: bytes
    put: Callable[[bytes], bytes]


def frames(data: bytes) -> list[Frame]:
    """Return the frames of a file; none if it is too damaged to be split."""
    try:
        return [frame for frame in _frames(data) if frame.data]
    except Exception:  # noqa: BLE001  broken archives raise many types
        return []


def _frames(data: bytes) -> Iterator[Frame]:
    split = next((split_ for magic, split_ in _BY_MAGIC.items() if data.startswith(magic)), None)
    if split is not None:
        yield from split(data)
    elif data[8:9] == b"{":
        yield _sized(JSON, data, 0, 8)


def _whole(grammar: Grammar, data: bytes) -> Iterator[Frame]:
    yield Frame(grammar, data, bytes)


def _sized(grammar: Grammar, data: bytes, offset: int, width: int = 4) -> Frame:
    """Return the frame after a length."""
    start = offset + width
    stop = start + int.from_bytes(data[offset:start], "little")

    def put(new: bytes) -> bytes:
        return (
            data[:offset]
            + (len(new) % (1 << 8 * width)).to_bytes(width, "little")
            + new
            + data[stop:]
        )

    return Frame(grammar, data[start:stop], put)


def _rest(data: bytes, start: int) -> Frame:
    return Frame(BINARY, data[start:], lambda new: data[:start] + new)


def _ocdbt(data: bytes) -> Iterator[Frame]:
    """Return the body of a manifest or node; a reference to the node has its size."""
    body = data[14:-4]
    is_compressed = data[13] == 1

    def put(new: bytes) -> bytes:
        if not is_compressed:
            return frame(data[:4], new)
        stored = zstandard.compress(new)
        missing = len(body) - len(stored) - 8
        if missing >= 0:
            stored += b"\x50\x2a\x4d\x18" + missing.to_bytes(4, "little") + bytes(missing)
        block = frame(data[:4], stored)[:-4]
        block = block[:13] + b"\1" + block[14:]
        crc: int = google_crc32c.value(block)
        return block + crc.to_bytes(4, "little")

    if is_compressed:
        with zstandard.ZstdDecompressor().stream_reader(body) as stream:
            content = stream.read(_MOST_INFLATED + 1)
        if len(content) <= _MOST_INFLATED:
            yield Frame(BINARY, content, put)
    else:
        yield Frame(BINARY, body, put)


def _burnpack(data: bytes) -> Iterator[Frame]:
    stop = 10 + int.from_bytes(data[6:10], "little")

    def put(new: bytes) -> bytes:
        head = data[:6] + struct.pack("<I", len(new)) + new
        # Data are at a multiple of 256, or in old files right after the metadata.
        aligned = stop + -stop % 256
        if not any(data[stop:aligned]) and aligned <= len(data):
            return head + bytes(-len(head) % 256) + data[aligned:]
        return head + data[stop:]

    yield Frame(CBOR, data[10:stop], put)


def _ztensor(data: bytes) -> Iterator[Frame]:
    after = 16 if data.endswith(b"ZTEN1000") and len(data) > 24 else 8
    end = len(data) - after
    start = end - int.from_bytes(data[end : end + 8], "little")
    if 8 <= start <= end:
        magic = data[end + 8 :]
        yield Frame(
            CBOR,
            data[start:end],
            lambda new: data[:start] + new + struct.pack("<Q", len(new)) + magic,
        )


def _ztensor_2(data: bytes) -> Iterator[Frame]:
    start, nbytes = struct.unpack_from("<QQ", data, len(data) - 40)
    yield Frame(CBOR, data[start : start + nbytes], lambda new: v2_container(new, data[:start]))


def _mlcp(data: bytes) -> Iterator[Frame]:
    offset = 5 + data[4]
    yield _sized(JSON, data, offset)
    yield _rest(data, offset + 4 + int.from_bytes(data[offset : offset + 4], "little"))


def _gptrs(data: bytes) -> Iterator[Frame]:
    stop = 12
    if data.startswith(b"GPTRSCHK"):
        yield _sized(JSON, data, 12)
        stop = 16 + int.from_bytes(data[12:16], "little")
    yield _rest(data, stop)
    if int.from_bytes(data[stop : stop + 4], "little") < len(data):
        yield _sized(BINARY, data, stop)


def _npy(data: bytes) -> Iterator[Frame]:
    yield _sized(JSON, data, 8, 2 if data[6:7] == b"\1" else 4)


def _zip(data: bytes) -> Iterator[Frame]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()[:64]
        if sum(info_.file_size for info_ in infos) > _MOST_INFLATED:
            return
        members = {info_: archive.read(info_) for info_ in infos}
    for info, content in members.items():
        if not content.startswith(b"PK\3\4"):
            put = partial(_zipped, members, info)
            for frame in _frames(content):
                yield Frame(frame.grammar, frame.data, partial(_both, put, frame.put))


def _both(outer: Callable[[bytes], bytes], inner: Callable[[bytes], bytes], new: bytes) -> bytes:
    return outer(inner(new))


def _zipped(members: dict[zipfile.ZipInfo, bytes], changed: zipfile.ZipInfo, new: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for info, content in members.items():
            entry = zipfile.ZipInfo(info.filename, (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.comment = info.compress_type, info.comment
            archive.writestr(entry, new if info is changed else content)
    return file.getvalue()


_BY_MAGIC: dict[bytes, Callable[[bytes], Iterator[Frame]]] = {
    b"NRUB": _burnpack,
    b"ZTEN0001": _ztensor,
    b"ZTEN1000": _ztensor,
    V2_MAGIC: _ztensor_2,
    b"PCLM": _mlcp,
    b"GPTRSCHK": _gptrs,
    b"GPTRSTEN": _gptrs,
    **dict.fromkeys((MANIFEST, NODE), _ocdbt),
    b"\x89HDF": lambda data: iter([_rest(data, 8)]),
    b"GGUF": lambda data: iter([_rest(data, 8)]),
    b"RAHS": lambda data: iter([_rest(data, 4)]),
    b"PK\3\4": _zip,
    b"\x93NUMPY": _npy,
    b"\x08": partial(_whole, BINARY),  # ONNX
    b"\x80": partial(_whole, PICKLE),
    b"\xce": partial(_whole, MSGPACK),
    b"{": partial(_whole, JSON),
    b"[": partial(_whole, JSON),
    # Maps of msgpack, with which files of Flax begin; the map without entries begins a pickle.
    **{bytes([code]): partial(_whole, MSGPACK) for code in (*range(0x81, 0x90), 0xDE, 0xDF)},
}
