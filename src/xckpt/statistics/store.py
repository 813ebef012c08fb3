"""Sketches that are kept between calls: a second scan of a file reads only what is missing.

There is a file for each checkpoint, named by a digest of its path and identity, in the folder
``stats-1`` of the cache of this user (see `xckpt.storage.cache`). It is a sequence of records, each
with a length and a checksum; what is not as it should be, such as a record that was being written
when the machine stopped, ends the file. Records that cannot be true of their tensor are not
believed (see `xckpt.statistics.plausible`). Nothing here is needed: any of it may be deleted at any
time, and where it cannot be written nothing is kept.
"""

from __future__ import annotations

import struct
import threading
import time
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.plausible import require_sketch
from xckpt.statistics.sketch import Sketch
from xckpt.storage import cache
from xckpt.storage.remote import is_of_one_opening

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["FOLDER", "Store", "TensorStore", "open_stores", "packed", "unpacked"]

FOLDER = "stats-1"

_MAGIC = b"xckpt sketches 1"
_HEAD = struct.Struct("<16sIQ")  # key, length and checksum of a record
_LARGEST_RECORD = 64 << 20
_LARGEST_FILE = 256 << 20
_LARGEST_FOLDER = 1 << 30
# Written together, but no less often than this.
_PENDING_NBYTES = 1 << 20
_PENDING_SECONDS = 5.0
# File systems tell times to some milliseconds: a file that was written just now may be written
# again without another time.
_SETTLED_NS = 50_000_000

_thread = threading.local()

_NUMBERS = ("nan", "inf", "zero", "negative_zero", "total", "implied", "row", "dead")


@contextmanager
def open_stores(
    readers: Sequence[Any], *, enabled: bool, kind: type[Store] | None = None
) -> Iterator[list[TensorStore | None]]:
    """Open what is kept of some tensors."""
    files: dict[tuple[Any, Any], Store] = {}
    stores: list[TensorStore | None] = []
    folder = cache.folder(FOLDER) if enabled else None
    for reader in readers:
        origin = None if folder is None else _origin(getattr(reader, "identity", None))
        if origin is None:
            stores.append(None)
            continue
        if origin not in files:
            files[origin] = (kind or Store)(origin)
        stores.append(TensorStore(files[origin], reader))
    try:
        yield stores
    finally:
        written = [store.flush() for store in files.values()]
        if folder is not None and any(written):
            cache.make_room(folder, _LARGEST_FOLDER)


class Store:
    """What is kept of one checkpoint.

    Parameters
    ----------
    origin : tuple
        Path or URL, and identity.
    """

    # What is kept; those of other things than sketches are other classes.
    @staticmethod
    def _packed(kept: Any) -> bytes:
        return packed(kept)

    @staticmethod
    def _unpacked(data: bytes) -> Any:
        return unpacked(data)

    @staticmethod
    def require(kept: Any, reader: Any, stretch: tuple[int, int]) -> None:
        """Raise an error if this cannot be what was kept of a stretch of a tensor."""
        require_sketch(kept, reader, stretch)

    def __init__(self, origin: tuple[Any, Any]) -> None:
        name = blake2b(repr(origin).encode(), digest_size=16).hexdigest()
        folder = cache.folder(FOLDER)
        self._path = None if folder is None else folder / name
        self._data = _read(self._path)
        self._records = dict(_records(self._data))
        self._size = len(self._data)
        self._pending: list[bytes] = []
        self._pending_nbytes = 0
        self._written_at = time.monotonic()

    def get(self, key: bytes) -> Any:
        """Return what is kept under a key; None if nothing that can be read is."""
        if key not in self._records:
            return None
        start, stop = self._records[key]
        try:
            return self._unpacked(self._data[start:stop])
        except Exception:  # noqa: BLE001  whatever is wrong with it, it can be made again
            return None

    def put(self, key: bytes, kept: Any) -> None:
        """Keep a sketch, or whatever else."""
        payload = self._packed(kept)
        if self._size + len(payload) > _LARGEST_FILE or len(payload) > _LARGEST_RECORD:
            return
        record = _HEAD.pack(key, len(payload), _checksum(payload)) + payload
        self._pending.append(record)
        self._pending_nbytes += len(record)
        self._size += len(record)
        waited = time.monotonic() - self._written_at
        if self._pending_nbytes > _PENDING_NBYTES or waited > _PENDING_SECONDS:
            self.flush()

    def flush(self) -> bool:
        """Write what is pending; say whether there was any."""
        if not self._pending:
            return False
        data = b"".join(self._pending)
        self._pending, self._pending_nbytes = [], 0
        self._written_at = time.monotonic()
        if self._path is not None:
            _append(self._path, data)
        return True


class TensorStore:
    """What is kept of one tensor.

    Parameters
    ----------
    store : Store
        Of its checkpoint.
    reader : Reader
        Its elements; they have an identity.
    """

    __slots__ = ("_base", "_reader", "_store")

    def __init__(self, store: Store, reader: Any) -> None:
        self._store = store
        self._reader = reader
        self._base = repr((reader.kind.name, reader.identity))

    def get(self, stretch: tuple[int, int]) -> Any:
        """Return what is kept of a stretch of the tensor; None if nothing is that can be true."""
        kept = self._store.get(self._key(stretch))
        if kept is None:
            return None
        try:
            with np.errstate(all="ignore"):
                self._store.require(kept, self._reader, stretch)
        except Exception:  # noqa: BLE001  whatever is wrong with it, it can be made again
            return None
        return kept

    def put(self, stretch: tuple[int, int], kept: Any) -> None:
        """Keep what was found in a stretch of the tensor."""
        self._store.put(self._key(stretch), kept)

    def _key(self, stretch: tuple[int, int]) -> bytes:
        return blake2b(f"{self._base}{stretch}".encode(), digest_size=16).digest()


def _origin(identity: tuple[Any, ...] | None) -> tuple[Any, Any] | None:
    """Say which checkpoint a tensor is of; None if it may not be the same the next time."""
    if identity is None:
        return None
    parts = identity[0]
    if not all(_is_lasting(name, version) for _, name, version, *_ in parts):
        return None
    _, name, version, *_ = parts[0]
    return name, version


def _is_lasting(name: str, version: Any) -> bool:
    """Return whether a file is known by its name and version; bytes in memory are not."""
    if name.startswith("<") or is_of_one_opening(version):
        return False
    if "://" in name or not isinstance(version, tuple):
        return True
    times = [number for number in version if isinstance(number, int)]
    return len(times) != 4 or time.time_ns() - times[1] >= _SETTLED_NS


def _read(path: Path | None) -> bytes:
    data = None if path is None else cache.read(path, _LARGEST_FILE + _LARGEST_RECORD)
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


def _append(path: Path, data: bytes) -> None:
    """Add records at the end, after cutting off what cannot be read."""
    existing = _read(path)
    good = max([len(_MAGIC), *(stop for _, (_, stop) in _records(existing))])
    if existing and len(existing) == good:
        # One write, so that records of two processes do not mix.
        cache.append(path, data)
    else:
        cache.write(path, (existing[:good] or _MAGIC) + data)


def _checksum(data: bytes) -> int:
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(data)


def packed(sketch: Sketch) -> bytes:
    """Write a sketch, without elements of leaves that are not complete; see `unpacked`."""
    import msgpack
    import zstandard

    fields: dict[str, Any] = {name: str(getattr(sketch, name)) for name in _NUMBERS}
    fields |= {
        "kind": sketch.kind,
        "count": str(sketch.count),
        "codes": np.diff(sketch.codes, prepend=sketch.codes.dtype.type(0)).tobytes(),
        "counts": sketch.counts.tobytes(),
        "extremes": [_number_text(sketch.low), _number_text(sketch.high)],
        "nodes": [[*place, *node] for place, node in sketch.nodes],
        "open": [[row, *seen] for row, seen in sketch.open.items()],
    }
    data: bytes = zstandard.ZstdCompressor(level=1).compress(msgpack.packb(fields))
    return data


def unpacked(data: bytes) -> Sketch:
    """Read what `packed` has written."""
    import msgpack
    import zstandard

    if not hasattr(_thread, "decompressor"):
        _thread.decompressor = zstandard.ZstdDecompressor()
    # The size that a frame states is allocated, whatever limit is given with it.
    if not 0 < zstandard.frame_content_size(data) <= _LARGEST_RECORD * 4:
        raise ValueError("not a record of a sketch")
    fields = msgpack.unpackb(_thread.decompressor.decompress(data))
    codes = np.cumsum(np.frombuffer(fields["codes"], np.uint32), dtype=np.uint32)
    low, high = (_number(text) for text in fields["extremes"])
    numbers: dict[str, Any] = {name: int(fields[name]) for name in _NUMBERS}
    return Sketch(
        kind=fields["kind"],
        count=int(fields["count"]),
        codes=codes,
        counts=np.frombuffer(fields["counts"], np.int64),
        low=low,
        high=high,
        nodes=tuple(((node[0], node[1]), tuple(node[2:])) for node in fields["nodes"]),
        open={row: (seen, alive) for row, seen, alive in fields["open"]},
        **numbers,
    )


def _number_text(value: float | None) -> str:
    return value.hex() if isinstance(value, float) else repr(value)


def _number(text: str) -> float | int | None:
    if text == "None":
        return None
    return float.fromhex(text) if "x" in text else int(text)
