"""The files of this user's cache, and the headers of remote files in it.

The folders are in ``xckpt`` in the cache folder of the platform (``~/.cache`` on Linux), or in the
folder that the environment variable ``XCKPT_CACHE_DIR`` names. If the variable is empty, or the
user has no home, nothing is cached. Only their owner can access the folders and files. Files that
another user owns or may write to are not read: a checksum does not prove their origin.

Headers are read with few requests, and cached between sessions. The name of a cache file is a hash
of the URL, the version according to the server, and the options. The file has the bytes as they
were read, before any parsing. All files together have at most 512 MiB::

    msgpack: ["XCKPTHD2", name and identity, [[offset, bytes], ...]]
    BLAKE2b-128 of the bytes before
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from bisect import bisect_right, insort
from contextlib import contextmanager
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.interrupts import uninterrupted
from xckpt.storage.partial import alone
from xckpt.storage.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def folder(name: str) -> Path | None:
    """Return the folder for one kind of files, which may not exist; None if caching is off."""
    chosen = os.environ.get("XCKPT_CACHE_DIR")
    if chosen is None:
        from platformdirs import user_cache_path

        try:
            base = user_cache_path("xckpt", appauthor=False, opinion=False)
        except RuntimeError:  # the user has no home
            return None
        # Without a home, the path is "~/.cache", in a folder that is called "~".
        return base / name if base.is_absolute() else None
    try:
        return Path(chosen).expanduser() / name if chosen else None
    except RuntimeError:  # the "~" at its beginning cannot be expanded
        return None


def read(path: Path, most: int) -> bytes | None:
    """Return the content of a file; None if others may write it, or it exceeds `most` bytes."""
    try:
        if not _is_private(path.parent.stat()):
            return None
        with os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
            status = os.fstat(file.fileno())
            if not (stat.S_ISREG(status.st_mode) and _is_private(status)):
                return None
            content = file.read(most + 1)
        os.utime(path)  # `make_room` removes the least recently used files
    except (OSError, ValueError):
        return None
    return content if len(content) <= most else None


def write(path: Path, content: bytes) -> bool:
    """Create or replace a file atomically, and return whether it was possible."""
    try:
        with uninterrupted():
            _make_private(path.parent)
            descriptor, name = tempfile.mkstemp(dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
    except (OSError, ValueError):
        return False
    return True


def append(path: Path, content: bytes) -> bool:
    """Append to an existing file by one write, and return whether all bytes were written."""
    with contextlib.suppress(OSError), uninterrupted():
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | _FLAGS)
        try:
            if _is_private(os.fstat(descriptor)):
                return os.write(descriptor, content) == len(content)
        finally:
            os.close(descriptor)
    return False


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Lock a file against other writers, in all processes and threads, while the block runs."""
    _make_private(path.parent)
    with alone(str(path)):
        yield


def make_room(folder: Path, most: int) -> None:
    """Remove the least recently used files until at most `most` bytes remain."""
    with contextlib.suppress(OSError):
        files = [(path.stat(), path) for path in folder.iterdir()]
        files.sort(key=lambda pair: pair[0].st_mtime, reverse=True)
        total = 0
        for status, path in files:
            total += status.st_size
            if total > most:
                path.unlink(missing_ok=True)


def _make_private(folder: Path) -> None:
    if not folder.parent.is_dir():
        _make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if not _is_private(status):
        raise PermissionError(f"others may write to {folder}")
    if hasattr(os, "geteuid") and status.st_mode & 0o077:
        folder.chmod(0o700)


def _is_private(status: os.stat_result) -> bool:
    """Return whether this user owns a file or folder, and is the only one who may write to it."""
    if not hasattr(os, "geteuid"):
        return True  # Windows: the folder is in the user's profile
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


#: Number of bytes that are read from the beginning of a file when it is opened.
FIRST_NBYTES = 1 << 16

# A read near the end fetches the whole tail, because footers often refer to headers before them.
_NEAR_END, _TAIL_NBYTES = 1 << 16, 1 << 19
# Reads that continue where the last one ended, or shortly after, fetch more each time: 1 MiB, then
# 16. If a format does not state the length of its header, three requests fetch 17 MiB.
_SMALLEST_AHEAD, _AHEAD, _LARGEST_AHEAD = 1 << 16, 1 << 20, 16 << 20
_GROWTH = 16
_NEAR = 1 << 20
# Most bytes that stay in memory, to save a second request for the same range.
_MOST_KEPT = 64 << 20

_ENTRY_MAGIC = "XCKPTHD2"
_DIGEST_NBYTES = 16
_MOST_NBYTES = 512 << 20
_LARGEST_ENTRY = 64 << 20

# Attributes that identify content reliably, unlike times with a resolution of one second.
_STRONG = {"ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "sha"}


@contextmanager
def reading_header(
    source: Source, first: memoryview, options: Mapping[str, Any], *, ahead: int = _AHEAD
) -> Iterator[Source]:
    """Return a source for reading the header of a remote file with few requests."""
    # `first` has the beginning of the file. If reads continue from there, the next one fetches
    # `ahead` bytes.
    identity: Any = source.identity
    is_sure = any(key in _STRONG and not v.startswith("W/") for key, v in identity[1:])
    path = folder("headers") if is_sure else None
    cached = None
    if path is not None:
        label = repr((source.name, identity, sorted(options.items())))
        path /= blake2b(label.encode(), digest_size=20).hexdigest() + ".header"
        cached = _load(path, source, first)
    header = HeaderSource(source, ahead)
    for segment in [Segment(0, first)] if cached is None else cached:
        header.keep(segment)
    yield header
    is_new = header.requests and header.complete
    if path is not None and is_new and header.kept_nbytes <= _LARGEST_ENTRY:
        import msgpack

        version = repr((source.name, identity))
        entry = msgpack.packb((_ENTRY_MAGIC, version, header.segments))
        # A failed write is not an error: the next session reads the header again.
        if write(path, entry + blake2b(entry, digest_size=_DIGEST_NBYTES).digest()):
            make_room(path.parent, _MOST_NBYTES)


class Segment(NamedTuple):
    """A range of a file, whose bytes are in memory."""

    start: int
    data: memoryview

    @property
    def stop(self) -> int:
        """Offset of the first byte after it."""
        return self.start + len(self.data)


def _load(path: Path, source: Source, first: memoryview) -> list[Segment] | None:
    """Return the cached segments of a file; None if they do not begin with `first`."""
    content = read(path, 2 * _LARGEST_ENTRY)
    if content is None:
        return None
    import msgpack

    entry, digest = memoryview(content)[:-_DIGEST_NBYTES], content[-_DIGEST_NBYTES:]
    if blake2b(entry, digest_size=_DIGEST_NBYTES).digest() != digest:
        return None
    magic, version, segments = msgpack.unpackb(entry)
    if (magic, version) != (_ENTRY_MAGIC, repr((source.name, source.identity))):
        return None
    cached = [Segment(start, memoryview(data)) for start, data in segments]
    shared = min(len(cached[0].data), len(first))
    is_same = cached[0].start == 0 and cached[0].data[:shared] == first[:shared]
    return cached if is_same else None


_START = attrgetter("start")


class HeaderSource(Source):
    """A remote file with read-ahead, whose bytes stay in memory once they are read."""

    __slots__ = ("_ahead", "_last", "complete", "requests", "segments", "source")

    def __init__(self, source: Source, ahead: int = _AHEAD) -> None:
        self.source = source
        self.name, self.size, self.identity = source.name, source.size, source.identity
        self.segments: list[Segment] = []
        self.requests = 0  # number of requests so far
        self.complete = True  # whether all bytes that were read are still in memory
        self._ahead = ahead // _GROWTH
        self._last = 0

    @property
    def kept_nbytes(self) -> int:
        """Number of bytes in memory."""
        return sum(len(segment.data) for segment in self.segments)

    def keep(self, segment: Segment) -> None:
        """Keep a segment in memory; it must not overlap the segments in memory."""
        if not len(segment.data):
            return
        insort(self.segments, segment, key=_START)
        while self.kept_nbytes > _MOST_KEPT and len(self.segments) > 1:
            # Keep later ranges: reads usually continue forwards.
            self.segments.pop(0 if self.segments[0] is not segment else 1)
            self.complete = False

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Read ranges of bytes into given memory; see `Source.read_into`."""
        nbytes, done = len(memory) // len(offsets), 0
        for offset in offsets:
            self.check_range(offset, nbytes)
            position, stop = offset, offset + nbytes
            while position < stop:
                start, data = self._segment_at(position, stop)
                overlap = data[position - start : stop - start]
                memory[done : done + len(overlap)] = overlap
                position += len(overlap)
                done += len(overlap)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read several ranges of bytes with few requests, without read-ahead."""
        missing: list[tuple[int, int]] = []
        end = 0
        for start, nbytes in sorted(ranges):
            if nbytes and start >= end and not self._overlaps(start, start + nbytes):
                missing.append((start, nbytes))
                end = start + nbytes
        for (start, _), data in zip(missing, self.source.read_ranges(missing), strict=True):
            self.keep(Segment(start, memoryview(bytes(data))))
        self.requests += len(missing)
        return [self.read(start, nbytes) for start, nbytes in ranges]

    def _overlaps(self, start: int, stop: int) -> bool:
        number = bisect_right(self.segments, start, key=_START)
        neighbours = self.segments[max(number - 1, 0) : number + 1]
        return any(segment.start < stop and start < segment.stop for segment in neighbours)

    def sibling(self, name: str) -> Source:
        """Open another file next to this one, to read its header; see `Source.sibling`."""
        return HeaderSource(self.source.sibling(name))

    def folders(self) -> tuple[str, ...]:
        """Return the names of the folders next to this file; see `Source.folders`."""
        return self.source.folders()

    def close(self) -> None:
        """Close the file; see `Source.close`."""
        self.source.close()

    def _segment_at(self, position: int, stop: int) -> Segment:
        """Return the segment with a position; if it is missing, read up to `stop` or further."""
        number = bisect_right(self.segments, position, key=_START)
        before = self.segments[number - 1].stop if number else 0
        if position < before:
            return self.segments[number - 1]
        after = self.size if number == len(self.segments) else self.segments[number].start
        start, end = self._widen(position, min(stop, after), before, after)
        segment = Segment(start, self.source.read(start, end - start))
        self.requests += 1
        self._last = end
        self.keep(segment)
        return segment

    def _widen(self, start: int, stop: int, before: int, after: int) -> tuple[int, int]:
        """Widen a range by read-ahead, between the ends of the segments around it."""
        if self.size - start <= _NEAR_END:
            return max(before, self.size - _TAIL_NBYTES), after
        # If values lie between headers, each header costs one small request.
        is_near = 0 <= start - self._last <= _NEAR
        self._ahead = min(_GROWTH * self._ahead, _LARGEST_AHEAD) if is_near else _SMALLEST_AHEAD
        return start, min(max(stop, start + self._ahead), after)
