"""The files of this user's cache, and the headers of remote files in it.

The folders are in ``xckpt`` in the cache folder of the platform (``~/.cache`` on Linux), or in what
the environment variable ``XCKPT_CACHE_DIR`` names. Where that is empty, or the user has no home,
nothing is kept. Folders and files are open to their owner alone. What another user owns or may
write to is not read: a checksum says that a file is whole, and not who made it.

Headers are read with few requests, and kept from one session to the next, each in a file that is
named by the URL, the version as the server tells it, and the options. Bytes are kept as they were
read, not what was made of them. There are at most 512 MiB in total::

    msgpack: ["XCKPTHD2", name and identity, [[offset, bytes], ...]]
    BLAKE2b-128 of all before
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from bisect import bisect_right
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xckpt.interrupts import uninterrupted
from xckpt.storage.partial import alone
from xckpt.storage.source import Source, empty

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def folder(name: str) -> Path | None:
    """Return the folder of one kind of files, which need not exist; None if nothing is kept."""
    chosen = os.environ.get("XCKPT_CACHE_DIR")
    if chosen is None:
        from platformdirs import user_cache_path

        try:
            base = user_cache_path("xckpt", appauthor=False, opinion=False)
        except RuntimeError:  # no home
            return None
        # Without a home this is "~/.cache", which would be a folder called "~".
        return base / name if base.is_absolute() else None
    try:
        return Path(chosen).expanduser() / name if chosen else None
    except RuntimeError:  # it begins with a "~" that stands for nothing
        return None


def read(path: Path, most: int) -> bytes | None:
    """Return what a file has, if it has at most so many bytes and only this user can write it."""
    try:
        if not _is_private(path.parent.stat()):
            return None
        with os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
            status = os.fstat(file.fileno())
            if not (stat.S_ISREG(status.st_mode) and _is_private(status)):
                return None
            content = file.read(most + 1)
        os.utime(path)  # what was used least recently makes room first
    except (OSError, ValueError):
        return None
    return content if len(content) <= most else None


def write(path: Path, content: bytes) -> bool:
    """Make or replace a file, whole or not at all; return whether that could be done."""
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
    """Add to the end of a file that was read before, by one write; return whether it was done."""
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
    """Keep other processes and threads from writing a file while the block runs."""
    _make_private(path.parent)
    with alone(str(path)):
        yield


def make_room(folder: Path, most: int) -> None:
    """Remove the files that were not used for longest, until the others have at most `most`."""
    with contextlib.suppress(OSError):
        found = [(path.stat(), path) for path in folder.iterdir()]
        found.sort(key=lambda pair: pair[0].st_mtime, reverse=True)
        total = 0
        for status, path in found:
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
    """Return whether this user owns a file or folder, and nobody else may write to it."""
    if not hasattr(os, "geteuid"):
        return True  # Windows: the folder is in the user's profile
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


#: What is read of the beginning of a file as it is opened.
FIRST_NBYTES = 1 << 16

# A read near the end brings the end: footers say where headers are, which often lie before them.
_NEAR_END, _TAIL_NBYTES = 1 << 16, 1 << 19
# Reads that go on where the last one ended, or not far after, bring more each time: 1 MiB, then
# 16. A format that does not say how long its header is has 17 MiB of it in three requests.
_SMALLEST_AHEAD, _AHEAD, _LARGEST_AHEAD = 1 << 16, 1 << 20, 16 << 20
_GROWTH = 16
_NEAR = 1 << 20
# Kept in memory, so that what is read twice is requested once.
_MOST_KEPT = 64 << 20

_ENTRY_MAGIC = "XCKPTHD2"
_DIGEST_NBYTES = 16
_MOST_NBYTES = 512 << 20
_LARGEST_ENTRY = 64 << 20

# What identifies content, as opposed to times with a resolution of a second.
_STRONG = {"ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "sha"}


@contextmanager
def reading_header(
    source: Source, first: memoryview, options: Mapping[str, Any], *, ahead: int = _AHEAD
) -> Iterator[Source]:
    """Return a source for reading the header of a remote file with few requests.

    `first` is what is there of its beginning; where reads go on from there, the next brings `ahead`
    bytes.
    """
    identity: Any = source.identity
    is_sure = any(key in _STRONG and not v.startswith("W/") for key, v in identity[1:])
    path = folder("headers") if is_sure else None
    known = None
    if path is not None:
        told = repr((source.name, identity, sorted(options.items())))
        path /= blake2b(told.encode(), digest_size=20).hexdigest() + ".header"
        known = _load(path, source, first)
    header = HeaderSource(source, ahead)
    for start, data in [(0, first)] if known is None else known:
        header.keep(start, data)
    yield header
    nbytes = sum(len(data) for _, data in header.segments)
    is_new = header.requests and header.complete
    if path is not None and is_new and nbytes <= _LARGEST_ENTRY:
        import msgpack

        version = repr((source.name, identity))
        entry = msgpack.packb((_ENTRY_MAGIC, version, header.segments))
        # That it cannot be kept is not an error.
        if write(path, entry + blake2b(entry, digest_size=_DIGEST_NBYTES).digest()):
            make_room(path.parent, _MOST_NBYTES)


def _load(path: Path, source: Source, first: memoryview) -> list[tuple[int, memoryview]] | None:
    """Return what is kept of a file: offsets and bytes; None if it does not begin with `first`."""
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
    found = [(start, memoryview(data)) for start, data in segments]
    start, data = found[0]
    shared = min(len(data), len(first))
    return found if start == 0 and data[:shared] == first[:shared] else None


class HeaderSource(Source):
    """A remote file that is read ahead, and remembers what it read.

    Where values lie between headers, each header costs a request of 64 KiB; where they are less
    than 1 MiB apart, the file is read through in requests of up to 16 MiB.
    """

    __slots__ = ("_ahead", "_last", "complete", "requests", "segments", "source")

    def __init__(self, source: Source, ahead: int = _AHEAD) -> None:
        self.source = source
        self.name, self.size, self.identity = source.name, source.size, source.identity
        self.segments: list[tuple[int, memoryview]] = []
        self.requests = 0  # how many were made
        self.complete = True  # whether all that was read is still there
        self._ahead = ahead // _GROWTH
        self._last = 0

    def keep(self, start: int, data: memoryview) -> None:
        """Remember a range, which must not overlap what is remembered."""
        if not len(data):
            return
        self.segments.append((start, data))
        self.segments.sort(key=lambda segment: segment[0])
        while sum(len(each) for _, each in self.segments) > _MOST_KEPT and len(self.segments) > 1:
            # Whoever reads on needs what comes after.
            drop = 0 if self.segments[0][0] != start else 1
            self.segments.pop(drop)
            self.complete = False

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes; see `Source.read`."""
        self._check_range(offset, nbytes)
        memory = empty(nbytes)
        at = offset
        while at < offset + nbytes:
            start, data = self._segment_at(at, offset + nbytes)
            piece = data[at - start : offset + nbytes - start]
            memory[at - offset : at - offset + len(piece)] = piece
            at += len(piece)
        return memory.toreadonly()

    def read_ranges(
        self, ranges: Sequence[tuple[int, int]], *, gap: int | None = None
    ) -> list[memoryview]:
        """Read several ranges of bytes with few requests, and remember these alone."""
        missing: list[tuple[int, int]] = []
        end = 0
        for start, nbytes in sorted(ranges):
            if nbytes and start >= end and not self._has_some(start, start + nbytes):
                missing.append((start, nbytes))
                end = start + nbytes
        for (start, _), data in zip(
            missing, self.source.read_ranges(missing, gap=gap), strict=True
        ):
            self.keep(start, memoryview(bytes(data)))
        self.requests += len(missing)
        return [self.read(*each) for each in ranges]

    def _has_some(self, start: int, stop: int) -> bool:
        place = bisect_right(self.segments, start, key=lambda segment: segment[0])
        near = self.segments[max(place - 1, 0) : place + 1]
        return any(first < stop and start < first + len(data) for first, data in near)

    def sibling(self, name: str) -> Source:
        """Open another file next to this one, to read its header; see `Source.sibling`."""
        return HeaderSource(self.source.sibling(name))

    def close(self) -> None:
        """Let go of the file; see `Source.close`."""
        self.source.close()

    def _segment_at(self, at: int, stop: int) -> tuple[int, memoryview]:
        """Return the segment that has a byte; bytes up to `stop` are wanted after it."""
        place = bisect_right(self.segments, at, key=lambda segment: segment[0])
        if place:
            start, data = self.segments[place - 1]
            if at < start + len(data):
                return start, data
        before = 0 if not place else self.segments[place - 1][0] + len(self.segments[place - 1][1])
        after = self.size if place == len(self.segments) else self.segments[place][0]
        start, end = self._widened(at, min(stop, after), before, after)
        data = self.source.read(start, end - start)
        self.requests += 1
        self._last = end
        self.keep(start, data)
        return start, data

    def _widened(self, start: int, stop: int, before: int, after: int) -> tuple[int, int]:
        """Widen a range to what may be wanted next, between what is there already."""
        if self.size - start <= _NEAR_END:
            return max(before, self.size - _TAIL_NBYTES), after
        near = 0 <= start - self._last <= _NEAR
        self._ahead = min(_GROWTH * self._ahead, _LARGEST_AHEAD) if near else _SMALLEST_AHEAD
        return start, min(max(stop, start + self._ahead), after)
