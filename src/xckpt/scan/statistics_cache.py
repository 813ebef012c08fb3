"""The cache of statistics: one file per checkpoint, with sketches and finished rows of its tensors.

A file is in the folder ``statistics`` of the user's cache (see `xckpt.storage.cache`). Its name is
a digest of the checkpoint's path or URL and its identity::

    magic, 16 bytes
    records: group (16 bytes), length of the payload (u32), checksum (u64), payload

A group is a digest of `VERSION`, the kind of values, and the options that they depend on. A payload
has the number of values (u32), a key of 16 bytes for each, the length of each (u32), and all values
in one zstd frame. A key is a digest of the identity of a tensor.

Records with a wrong checksum, records of unknown groups or versions, and everything after a damaged
length are ignored, and their values computed again. One process appends at a time, and replaces a
file whose end is damaged. Any file may be deleted at any time. If no file can be written, rows stay
in the memory of this process.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from xckpt.index import paused_collector
from xckpt.storage import cache
from xckpt.storage.source import is_of_one_opening

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from xckpt.arrays.kinds import Kind
    from xckpt.typing import Array

#: Increment this whenever results for the same bytes, or the packing of values, change.
VERSION = 3

FOLDER = "statistics"

_MAGIC = b"xckpt statistics"
_HEAD = struct.Struct("<16sIQ")  # group, length and checksum of a record
_COUNT = struct.Struct("<I")
_KEY_NBYTES = 16
_ROW = "row"

# The path or URL of a checkpoint, and the version of its content.
_Checkpoint = tuple[str, Any]

_LARGEST_RECORD = 64 << 20
_LARGEST_FILE = 256 << 20
# Space reserved for rows, which are written last and make a repeated call fast.
_ROOM_FOR_ROWS = 64 << 20
_LARGEST_FOLDER = 1 << 30
_LARGEST_SESSION = 64 << 20

# Values are written when they reach this size in bytes or this age in seconds.
_PENDING_NBYTES = 1 << 20
_PENDING_SECONDS = 5.0
# File systems round times to milliseconds, so that a file may change twice within one time stamp.
_SETTLED_NS = 50_000_000

# Rows that could not be written, by file and group; the most recently used ones come last.
_session: OrderedDict[tuple[Path, bytes], dict[bytes, bytes]] = OrderedDict()


class Cacheable(Protocol):
    """A tensor with an identity: its files, and everything else that its values depend on."""

    @property
    def kind(self) -> Kind:
        """Kind of the elements."""

    @property
    def identity(self) -> tuple[Any, ...] | None:
        """Identity that begins with roles, names and versions of files; None if it may change."""


@contextmanager
def open_records(
    streams: Sequence[Cacheable], kind: str, *options: Any, enabled: bool
) -> Iterator[list[Records | None]]:
    """Open the cached values of one kind for each tensor; None for tensors without a cache."""
    folder = cache.folder(FOLDER) if enabled else None
    group = digest_of(VERSION, kind, *options)
    are_rows = kind == _ROW
    files: dict[_Checkpoint, Records] = {}
    records: list[Records | None] = []
    for checkpoint in _checkpoints_of(streams):
        if folder is None or checkpoint is None:
            records.append(None)
            continue
        if checkpoint not in files:
            path = folder / digest_of(*checkpoint).hex()
            files[checkpoint] = Records(path, group, are_rows=are_rows)
        records.append(files[checkpoint])
    try:
        yield records
    finally:
        written = [file.flush() for file in files.values()]
        if folder is not None and any(written):
            cache.make_room(folder, _LARGEST_FOLDER)


@contextmanager
def open_rows(
    streams: Sequence[Cacheable],
    # Name of the rows, and the options that they depend on.
    options: tuple[Any, ...],
    width: int,
    *,
    enabled: bool,
) -> Iterator[CachedRows]:
    """Open the cached rows of tensors, of `width` numbers each; the caller adds missing ones."""
    with open_records(streams, _ROW, *options, width, enabled=enabled) as records:
        yield CachedRows(streams, records, width)


class CachedRows:
    """A row of numbers for each tensor: the cached ones, and those that are added."""

    def __init__(
        self, streams: Sequence[Cacheable], records: Sequence[Records | None], width: int
    ) -> None:
        self._streams, self._records = streams, records
        #: The rows; NaN where they are missing.
        self.values: Array = np.full((len(streams), width), np.nan)
        cached: dict[int, bytes] = {}
        with paused_collector():
            for tensor, (stream, file) in enumerate(zip(streams, records, strict=True)):
                value = None if file is None else file.get(_key_of_row(stream))
                if value is not None and len(value) == 8 * width:
                    cached[tensor] = value
        self.values[list(cached)] = np.frombuffer(b"".join(cached.values()), "<f8").reshape(
            len(cached), width
        )
        #: Positions of the tensors without a cached row.
        self.missing = [tensor for tensor in range(len(streams)) if tensor not in cached]

    def add(self, rows: Iterable[Sequence[float] | Array]) -> None:
        """Add the missing rows, in the order of `missing`, and cache them."""
        for tensor, row in zip(self.missing, rows, strict=True):
            self.values[tensor] = row
        for tensor in self.missing:
            file = self._records[tensor]
            if file is not None:
                value = self.values[tensor].astype("<f8").tobytes()
                file.put(_key_of_row(self._streams[tensor]), value)


def _key_of_row(stream: Cacheable) -> bytes:
    channels = getattr(stream, "channels", None)
    return key_of(stream) if channels is None else key_of(stream, channels)


class Records:
    """Cached values of one group in the file of one checkpoint, by key."""

    def __init__(self, path: Path, group: bytes, *, are_rows: bool) -> None:
        self._path = path
        self._group = group
        self._are_rows = are_rows
        self._data = _read(path)
        records = list(_records(self._data))
        #: End of the last intact record that this process knows; 0 without a file.
        self._end = _end_of(records) if self._data else 0
        #: The frame of each value, and the place of the value in the decompressed frame, by key.
        self._places: dict[bytes, tuple[_Range, int, int]] = {}
        for record_group, payload in records:
            if record_group == group:
                self._places |= dict(_places(self._data, payload))
        self._frames: dict[_Range, bytes] = {}
        self._pending: dict[bytes, bytes] = {}
        self._pending_nbytes = 0
        self._written_at = time.monotonic()

    def get(self, key: bytes) -> bytes | None:
        """Return a cached value, or None."""
        if key not in self._places:
            return _session.get((self._path, self._group), {}).get(key)
        frame, start, stop = self._places[key]
        if frame not in self._frames:
            import zstandard

            if sum(map(len, self._frames.values())) > _LARGEST_RECORD:
                self._frames.clear()
            self._frames[frame] = zstandard.ZstdDecompressor().decompress(self._data[slice(*frame)])
        return self._frames[frame][start:stop]

    def put(self, key: bytes, value: bytes) -> None:
        """Cache a value, unless the file is full. Several values are written together."""
        room = _LARGEST_FILE - self._end - self._pending_nbytes
        if not self._are_rows:
            room = min(room - _ROOM_FOR_ROWS, _LARGEST_RECORD // 2)
        if len(value) > room:
            return
        self._pending[key] = value
        self._pending_nbytes += len(value)
        age = time.monotonic() - self._written_at
        if self._pending_nbytes > _PENDING_NBYTES or age > _PENDING_SECONDS:
            self.flush()

    def flush(self) -> bool:
        """Write pending values, and return whether the file grew."""
        if not self._pending:
            return False
        pending, self._pending, self._pending_nbytes = self._pending, {}, 0
        self._end = _append(self._path, _packed(self._group, pending), self._end)
        self._written_at = time.monotonic()
        if not self._end and self._are_rows:
            _session.setdefault((self._path, self._group), {}).update(pending)
            _session.move_to_end((self._path, self._group))
            sizes = [sum(map(len, rows.values())) for rows in _session.values()]
            while sum(sizes) > _LARGEST_SESSION:
                _session.popitem(last=False)
                sizes.pop(0)
        return self._end > 0


# --- keys ----------------------------------------------------------------------------------------


def key_of(stream: Cacheable, *parts: Any) -> bytes:
    """Return the key of a tensor, or of a part of it."""
    return digest_of(stream.kind.name, stream.identity, *parts)


def digest_of(*values: Any) -> bytes:
    """Return a digest of values by their reprs."""
    return blake2b(repr(values).encode(), digest_size=_KEY_NBYTES).digest()


def _checkpoints_of(streams: Sequence[Cacheable]) -> list[_Checkpoint | None]:
    """Return the checkpoint of each tensor; None if its content may change under its identity."""
    by_files: dict[Any, _Checkpoint | None] = {None: None}
    checkpoints = []
    for stream in streams:
        files = None
        if stream.identity is not None:
            files = tuple([(name, version) for _, name, version, *_ in stream.identity[0]])
        if files is not None and files not in by_files:
            are_lasting = all(is_lasting(*file) for file in files)
            by_files[files] = files[0] if are_lasting else None
        checkpoints.append(by_files[files])
    return checkpoints


def is_lasting(name: str, version: Any) -> bool:
    """Return whether a name and a version identify a file; bytes in memory have no lasting name."""
    if name.startswith("<") or is_of_one_opening(version):
        return False
    if "://" in name or not isinstance(version, tuple):
        return True
    times = [number for number in version if isinstance(number, int)]
    return len(times) != 4 or time.time_ns() - times[1] >= _SETTLED_NS


# --- files ---------------------------------------------------------------------------------------

_Range = tuple[int, int]


def _read(path: Path) -> bytes:
    data = cache.read(path, _LARGEST_FILE + _LARGEST_RECORD)
    return data if data is not None and data.startswith(_MAGIC) else b""


def _records(data: bytes) -> Iterator[tuple[bytes, _Range]]:
    """Yield the intact records of a file: their groups, and the places of their payloads."""
    offset = len(_MAGIC)
    memory = memoryview(data)
    while offset + _HEAD.size <= len(data):
        group, length, checksum = _HEAD.unpack_from(data, offset)
        start = offset + _HEAD.size
        offset = start + length
        if offset <= len(data) and _checksum(group, memory[start:offset]) == checksum:
            yield group, (start, offset)


def _end_of(records: Iterable[tuple[bytes, _Range]]) -> int:
    return max((stop for _, (_, stop) in records), default=len(_MAGIC))


def _places(data: bytes, payload: _Range) -> Iterator[tuple[bytes, tuple[_Range, int, int]]]:
    """Yield the keys of a payload, with the frame of each value and its place in the frame."""
    (count,) = _COUNT.unpack_from(data, payload[0])
    keys = payload[0] + _COUNT.size
    lengths = keys + _KEY_NBYTES * count
    frame = lengths + 4 * count, payload[1]
    stops = np.cumsum(np.frombuffer(data, "<u4", count, lengths), dtype=np.int64).tolist()
    start = 0
    for position, stop in zip(range(keys, lengths, _KEY_NBYTES), stops, strict=True):
        yield data[position : position + _KEY_NBYTES], (frame, start, stop)
        start = stop


def _packed(group: bytes, values: dict[bytes, bytes]) -> bytes:
    """Return a record."""
    import zstandard

    lengths = np.array([len(value) for value in values.values()], "<u4").tobytes()
    frame = zstandard.ZstdCompressor(level=1).compress(b"".join(values.values()))
    payload = b"".join([_COUNT.pack(len(values)), *values, lengths, frame])
    return _HEAD.pack(group, len(payload), _checksum(group, payload)) + payload


def _append(path: Path, record: bytes, end: int) -> int:
    """Append a record, and return the new end of the file; 0 if it could not be written."""
    # `end` is the size of the file when this process last saw it intact. A file of another size is
    # read again, and replaced if its end is damaged.
    with suppress(OSError), cache.writing(path):
        size = path.stat().st_size if path.exists() else 0
        data = b""
        if not end or size != end:
            data = _read(path)
            end = _end_of(_records(data)) if data else 0
        if end + len(record) > _LARGEST_FILE:
            return 0
        if end and size == end:
            is_written = cache.append(path, record)
        else:
            data = data[:end] or _MAGIC
            end = len(data)
            is_written = cache.write(path, data + record)
        if is_written:
            return end + len(record)
    return 0


def _checksum(group: bytes, payload: bytes | memoryview) -> int:
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(payload, int.from_bytes(group[:8], "little"))
