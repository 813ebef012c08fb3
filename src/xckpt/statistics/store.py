"""Sketches that are kept between calls: a second scan of a file reads only what is missing.

There is a file for each checkpoint, named by a digest of its path and identity, in the folder
``stats-1`` of the cache of this user (see `xckpt.storage.cache`). It is a sequence of records, each
with a length and a checksum; what is not as it should be, such as a record that was being written
when the machine stopped, ends the file. A record has the sketches that were written together: their
number, keys and lengths, then all of them in one zstd frame. Sketches that cannot be true of their
tensor are not believed (see `xckpt.statistics.plausible`). Nothing here is needed: any of it may be
deleted at any time, and where it cannot be written nothing is kept.
"""

from __future__ import annotations

import struct
import time
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.statistics.plausible import require
from xckpt.storage import cache
from xckpt.storage.far import is_of_one_opening

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from xckpt.statistics.accumulate import Accumulator
    from xckpt.statistics.readers import Reader

FOLDER = "stats-1"

_MAGIC = b"xckpt sketches 2"
_HEAD = struct.Struct("<16sIQ")  # key, length and checksum of a record
_COUNT = struct.Struct("<I")
_KEY_NBYTES = 16
LARGEST_RECORD = 64 << 20
LARGEST_FILE = 256 << 20
LARGEST_FOLDER = 1 << 30
# Written together, but no less often than this.
_PENDING_NBYTES = 1 << 20
_PENDING_SECONDS = 5.0
# File systems tell times to some milliseconds: a file that was written just now may be written
# again without another time.
_SETTLED_NS = 50_000_000


@contextmanager
def open_stores(
    readers: Sequence[Reader], operation: type[Accumulator], *, enabled: bool
) -> Iterator[list[Store | None]]:
    """Open what is kept of some tensors."""
    files: dict[CheckpointVersion, Store] = {}
    stores: list[Store | None] = []
    folder = cache.folder(FOLDER) if enabled else None
    for origin in origins_of(readers):
        if folder is None or origin is None:
            stores.append(None)
            continue
        if origin not in files:
            files[origin] = Store(folder, origin, operation)
        stores.append(files[origin])
    try:
        yield stores
    finally:
        written = [store.flush() for store in files.values()]
        if folder is not None and any(written):
            cache.make_room(folder, LARGEST_FOLDER)


class Store:
    """What is kept of one checkpoint, which is known by its path or URL and its identity."""

    def __init__(
        self, folder: Path, origin: CheckpointVersion, operation: type[Accumulator]
    ) -> None:
        self._path = folder / digest_of(*origin).hex()
        self._operation = operation
        self._data, records = read_records(self._path)
        self._size = len(self._data)
        self._good = _end_of(records.values()) if self._data else 0
        #: By key: in which frame a sketch is, and where in that once it is decompressed.
        self._places: dict[bytes, tuple[tuple[int, int], int, int]] = {}
        for record in records.values():
            self._places |= dict(_places(self._data, record))
        self._frames: dict[tuple[int, int], bytes] = {}
        self._pending: dict[bytes, bytes] = {}
        self._pending_nbytes = 0
        self._written_at = time.monotonic()

    def get(self, reader: Reader, stretch: tuple[int, int]) -> Accumulator | None:
        """Return what is kept of a stretch of a tensor; None if nothing is that can be true."""
        place = self._places.get(_key(reader, stretch)) if self._places else None
        if place is None:
            return None
        frame, start, stop = place
        try:
            if frame not in self._frames:
                if sum(map(len, self._frames.values())) > LARGEST_RECORD:
                    self._frames.clear()
                self._frames[frame] = _decompressed(self._data[slice(*frame)])
            kept = self._operation.unpack(self._frames[frame][start:stop], reader)
            with np.errstate(all="ignore"):
                require(kept, reader, stretch)
        except Exception:  # noqa: BLE001  whatever is wrong with it, it can be made again
            return None
        return kept

    def put(self, reader: Reader, stretch: tuple[int, int], kept: Accumulator) -> None:
        """Keep what was found in a stretch of a tensor."""
        data = kept.pack()
        if self._size + len(data) > LARGEST_FILE or len(data) > LARGEST_RECORD // 2:
            return
        self._pending[_key(reader, stretch)] = data
        self._pending_nbytes += len(data)
        waited = time.monotonic() - self._written_at
        if self._pending_nbytes > _PENDING_NBYTES or waited > _PENDING_SECONDS:
            self.flush()

    def flush(self) -> bool:
        """Write what is pending; say whether there was any."""
        if not self._pending:
            return False
        import zstandard

        lengths = np.array([len(data) for data in self._pending.values()], "<u4").tobytes()
        head = _COUNT.pack(len(self._pending)) + b"".join(self._pending) + lengths
        frame = zstandard.ZstdCompressor(level=1).compress(b"".join(self._pending.values()))
        self._pending, self._pending_nbytes = {}, 0
        self._written_at = time.monotonic()
        data = _record(digest_of(head), head + frame)
        self._size += len(data)
        self._good = _append(self._path, data, self._good)
        return True


def _places(data: bytes, record: tuple[int, int]) -> Iterator[tuple[bytes, tuple[Any, int, int]]]:
    """Return where the sketches of a record are; of one that is something else, nothing."""
    first, end = record
    count = _COUNT.unpack_from(data, first)[0] if end - first >= _COUNT.size else 0
    keys = first + _COUNT.size
    lengths = keys + _KEY_NBYTES * count
    frame = lengths + 4 * count, end
    if frame[0] > end:
        return
    stops = np.cumsum(np.frombuffer(data, "<u4", count, lengths), dtype=np.int64).tolist()
    start = 0
    for at, stop in zip(range(keys, lengths, _KEY_NBYTES), stops, strict=True):
        yield data[at : at + _KEY_NBYTES], (frame, start, stop)
        start = stop


def _decompressed(frame: bytes) -> bytes:
    import zstandard

    # The size that a frame states is allocated, whatever limit is given with it.
    if not 0 < zstandard.frame_content_size(frame) <= LARGEST_RECORD:
        raise ValueError("not a record of sketches")
    return zstandard.ZstdDecompressor().decompress(frame)


class CheckpointVersion(NamedTuple):
    """Which checkpoint a tensor is of: its path or URL, and what tells that it is the same."""

    name: str
    version: Any


def origins_of(readers: Sequence[Reader]) -> list[CheckpointVersion | None]:
    """Say which checkpoint each tensor is of; None if it may not be the same the next time."""
    known: dict[Any, CheckpointVersion | None] = {None: None}
    origins = []
    for reader in readers:
        files = None
        if reader.identity is not None:
            files = tuple([(name, version) for _, name, version, *_ in reader.identity[0]])
        if files is not None and files not in known:
            is_known = all(_is_lasting(*file) for file in files)
            known[files] = CheckpointVersion(*files[0]) if is_known else None
        origins.append(known[files])
    return origins


def _is_lasting(name: str, version: Any) -> bool:
    """Return whether a file is known by its name and version; bytes in memory are not."""
    if name.startswith("<") or is_of_one_opening(version):
        return False
    if "://" in name or not isinstance(version, tuple):
        return True
    times = [number for number in version if isinstance(number, int)]
    return len(times) != 4 or time.time_ns() - times[1] >= _SETTLED_NS


def digest_of(*about: Any) -> bytes:
    """Return what a file or a record is known by."""
    return blake2b(repr(about).encode(), digest_size=16).digest()


def _key(reader: Reader, stretch: tuple[int, int]) -> bytes:
    return digest_of(reader.kind.name, reader.identity, stretch)


# --- files of records ----------------------------------------------------------------------------


def read_records(path: Path) -> tuple[bytes, dict[bytes, tuple[int, int]]]:
    """Return what a file has, and where the payload of each record is in it."""
    data = _read(path)
    return data, dict(_records(data))


def append_record(path: Path, key: bytes, payload: bytes) -> bool:
    """Add a record to a file, unless it becomes too large; return whether it was written."""
    with suppress(OSError):
        if path.stat().st_size + len(payload) > LARGEST_FILE:
            return False
    return len(payload) <= LARGEST_RECORD and _append(path, _record(key, payload)) > 0


def _record(key: bytes, payload: bytes) -> bytes:
    return _HEAD.pack(key, len(payload), _checksum(payload)) + payload


def _read(path: Path) -> bytes:
    data = cache.read(path, LARGEST_FILE + LARGEST_RECORD)
    return data if data is not None and data.startswith(_MAGIC) else b""


def _records(data: bytes) -> Iterator[tuple[bytes, tuple[int, int]]]:
    at = len(_MAGIC)
    while at + _HEAD.size <= len(data):
        key, length, checksum = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size
        stop = start + length
        if stop > len(data) or _checksum(data[start:stop]) != checksum:
            return
        yield key, (start, stop)
        at = stop


def _end_of(places: Iterable[tuple[int, int]]) -> int:
    return max([len(_MAGIC), *(stop for _, stop in places)])


def _append(path: Path, data: bytes, known: int = 0) -> int:
    """Add records at the end, after cutting off what cannot be read.

    All up to the byte `known` was read or written before; so is all up to the one that is
    returned, 0 if nothing could be written.
    """
    size, good, existing = -1, known, b""
    with suppress(OSError):
        size = path.stat().st_size
    if not known or size != known:
        existing = _read(path)
        size, good = len(existing), _end_of(dict(_records(existing)).values())
    if size == good:
        # One write, so that records of two processes do not mix.
        is_written = cache.append(path, data)
    else:
        is_written = cache.write(path, (existing[:good] or _MAGIC) + data)
    return good + len(data) if is_written else 0


def _checksum(data: bytes) -> int:
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(data)
