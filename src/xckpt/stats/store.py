"""Sketches that are kept between calls: a second scan of a file reads only what is missing.

There is a file for each checkpoint, named by a digest of its path and identity, in the folder
``stats-1`` of the cache of this user: ``$XCKPT_CACHE_DIR``, by default ``$XDG_CACHE_HOME/xckpt``
(``~/.cache/xckpt``), ``~/Library/Caches/xckpt`` on macOS, ``%LOCALAPPDATA%\\xckpt`` on Windows. It
is a sequence of records, each with a length and a checksum; what is not as it should be, such as
a record that was being written when the machine stopped, ends the file. Nothing here is needed:
any of it may be deleted at any time, and where it cannot be written nothing is kept.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.stats.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Store", "TensorStore", "cache_folder", "open_stores", "packed", "unpacked"]

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

_NUMBERS = ("nan", "inf", "zero", "negative_zero", "total", "implied", "row", "dead")


def cache_folder() -> Path:
    """Return the folder of sketches; it need not exist."""
    chosen = os.environ.get("XCKPT_CACHE_DIR")
    if chosen:
        return Path(chosen) / "stats-1"
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "xckpt" / "stats-1"


@contextmanager
def open_stores(
    readers: Sequence[Any], *, enabled: bool, kind: type[Store] | None = None
) -> Iterator[list[TensorStore | None]]:
    """Open what is kept of some tensors.

    Parameters
    ----------
    readers : sequence of Reader
        Of the tensors.
    enabled : bool
        Whether anything is to be kept at all.
    kind : type, optional
        A subclass of `Store` for what is kept; by default sketches are.

    Yields
    ------
    list of TensorStore or None
        One for each tensor; None for what has no identity that lasts.
    """
    files: dict[tuple[Any, Any], Store] = {}
    stores: list[TensorStore | None] = []
    for reader in readers:
        identity = getattr(reader, "identity", None)
        origin = _origin(identity) if enabled else None
        if origin is None:
            stores.append(None)
            continue
        if origin not in files:
            files[origin] = (kind or Store)(origin)
        stores.append(TensorStore(files[origin], (reader.kind.name, identity)))
    try:
        yield stores
    finally:
        written = [store.flush() for store in files.values()]
        if any(written):
            _prune(cache_folder())


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

    def __init__(self, origin: tuple[Any, Any]) -> None:
        name = blake2b(repr(origin).encode(), digest_size=16).hexdigest()
        self.path = cache_folder() / name
        self._data = _read(self.path)
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
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append(self.path, data)
        return True


class TensorStore:
    """What is kept of one tensor.

    Parameters
    ----------
    store : Store
        Of its checkpoint.
    identity : tuple
        What tells the tensor and the way it is read from others.
    """

    __slots__ = ("_base", "_store")

    def __init__(self, store: Store, identity: tuple[Any, ...]) -> None:
        self._store = store
        self._base = repr(identity)

    def get(self, stretch: tuple[int, int]) -> Any:
        """Return what is kept of a stretch of the tensor; None if nothing is."""
        return self._store.get(self._key(stretch))

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
    """Tell whether a file is known by its name and version; bytes in memory are not."""
    if name.startswith("<"):
        return False
    if "://" in name or not isinstance(version, tuple):
        return True
    times = [number for number in version if isinstance(number, int)]
    return len(times) != 3 or time.time_ns() - times[1] >= _SETTLED_NS


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + _LARGEST_RECORD)
        os.utime(path)  # the least recently used are deleted first
    except OSError:
        return b""
    return data if data.startswith(_MAGIC) else b""


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
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_bytes((existing[:good] or _MAGIC) + data)
    temporary.replace(path)


def _prune(folder: Path) -> None:
    """Delete the least recently used files until the others fit."""
    with contextlib.suppress(OSError):
        found = [(path.stat(), path) for path in folder.iterdir()]
        found.sort(key=lambda pair: pair[0].st_mtime, reverse=True)
        total = 0
        for status, path in found:
            total += status.st_size
            if total > _LARGEST_FOLDER:
                path.unlink(missing_ok=True)


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

    limit = _LARGEST_RECORD * 4
    fields = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(data, max_output_size=limit))
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
