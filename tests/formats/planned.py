"""Files built in memory from a `Plan` and the bytes of its parts."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import google_crc32c
import xxhash
import zstandard

from tests.formats.indexes import drafted
from xckpt.formats.plan import Draft, LiteralBytes, Plan, PlannedPart, WantedTensor, Written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.index import Index, Part

Key = tuple[str, str]

FRAME_NBYTES = 1 << 20


def draft_and_data(index: Index, file: bytes) -> tuple[Draft, dict[Key, bytes]]:
    """Return what is wanted of a copy of a file in the order of its index, and all raw bytes."""
    data: dict[Key, bytes] = {}
    draft = drafted(index)
    tensors: dict[str, WantedTensor] = {}
    for name, tensor in draft.tensors.items():
        parts = {}
        for role, part in tensor.parts.items():
            raw = data[name, role] = raw_bytes(index.tensors[name].parts[role], file)
            parts[role] = part._replace(source_offset=0, nbytes=len(raw))
        tensors[name] = replace(tensor, parts=parts)
    return replace(draft, tensors=tensors), data


def raw_bytes(part: Part, file: bytes) -> bytes:
    """Return the decoded bytes of a part."""
    assert part.shard is None
    if part.inline is not None:
        return part.inline
    stored = file[part.offset : part.offset + part.nbytes]
    if part.encoding is None:
        return stored
    if part.encoding == "deflate":
        decoded = zlib.decompress(stored, -15)
        return decoded[part.skip :][: part.decoded_nbytes]
    with zstandard.ZstdDecompressor().stream_reader(stored, read_across_frames=True) as stream:
        return stream.read()


def materialize(
    plan: Plan,
    data: Mapping[Key, bytes],
    old: bytes = b"",
    stored: Mapping[Key, bytes] | None = None,
) -> bytes:
    """Write the file of a plan; `data` has the raw bytes of every (tensor, role).

    With `old`, that file is written over, as appending does. With `stored`, parts that are
    compressed are there as they are stored.
    """
    return materialize_all(plan, data, old, stored)[""]


def materialize_all(
    plan: Plan,
    data: Mapping[Key, bytes],
    old: bytes = b"",
    stored: Mapping[Key, bytes] | None = None,
) -> dict[str, bytes]:
    """Write the file of a plan, by the name ``""``, and its companions by theirs."""
    writing = _Writing(data, stored or {})
    files = {"": bytearray(old)}
    for name, companion in plan.companions.items():
        files[name] = bytearray()
        writing.put_parts(companion, files[name])
    writing.put_parts(plan, files[""])
    for name, file_plan in (*plan.companions.items(), ("", plan)):
        for literal in file_plan.finish(writing.written):
            _put(files[name], literal)
        if file_plan.nbytes is not None:
            assert len(files[name]) <= file_plan.nbytes
            files[name].extend(bytes(file_plan.nbytes - len(files[name])))
    return {name: bytes(file) for name, file in files.items()}


class _Writing:
    """Where the parts of a checkpoint went."""

    def __init__(self, data: Mapping[Key, bytes], stored: Mapping[Key, bytes]) -> None:
        self.written: dict[Key, Written] = {}
        self._data = data
        self._stored = stored

    def put_parts(self, plan: Plan, file: bytearray) -> None:
        for literal in plan.literals:
            _put(file, literal)
        for planned in plan.parts:
            key = (planned.tensor, planned.role)
            assert key not in self.written
            self.written[key] = self._put_part(file, planned, plan.alignment)

    def _put_part(self, file: bytearray, planned: PlannedPart, alignment: int) -> Written:
        key, part = (planned.tensor, planned.role), planned.part
        raw = stored = self._data[key]
        assert len(raw) == part.nbytes, (planned, len(raw))
        if part.compression is not None:
            stored = self._stored[key] if self._stored else _ENCODERS[part.compression](raw)
        offset = planned.offset
        if offset is None:
            offset = -(-(len(file) + planned.gap) // alignment) * alignment
        _put(file, LiteralBytes(offset, stored))
        digest = None
        if part.algorithm is not None:
            covered = stored if part.digest_of == "stored" else raw
            digest = f"{part.algorithm}:{_DIGESTS[part.algorithm](covered)}"
        return Written(offset, len(stored), digest)


def _put(file: bytearray, literal: LiteralBytes) -> None:
    offset = len(file) if literal.offset is None else literal.offset
    file.extend(bytes(max(0, offset - len(file))))
    file[offset : offset + len(literal.data)] = literal.data


def _zstd(raw: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    return compressor.compress(raw) + compressor.flush()


def _zstd_seekable(raw: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    pieces = [raw[at : at + FRAME_NBYTES] for at in range(0, len(raw), FRAME_NBYTES)]
    frames = [compressor.compress(piece) for piece in pieces]
    entries = b"".join(
        len(number).to_bytes(4, "little")
        for frame, piece in zip(frames, pieces, strict=True)
        for number in (frame, piece)
    )
    footer = len(frames).to_bytes(4, "little") + b"\0" + (0x8F92EAB1).to_bytes(4, "little")
    head = (0x184D2A5E).to_bytes(4, "little") + (len(entries) + len(footer)).to_bytes(4, "little")
    return b"".join((*frames, head, entries, footer))


_ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "deflate": lambda raw: zlib.compress(raw, wbits=-15),
    "zstd": _zstd,
    "zstd-seekable": _zstd_seekable,
}

_DIGESTS: Mapping[str, Callable[[bytes], str]] = {
    "crc32": lambda data: f"{zlib.crc32(data):08x}",
    "crc32c": lambda data: f"{google_crc32c.value(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "xxh3": xxhash.xxh3_64_hexdigest,
}
