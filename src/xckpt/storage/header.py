"""The headers of remote files: read with few requests, and kept from one session to the next.

What is kept of a file is a file in the cache (`xckpt.storage.cache`), named by the URL, the version
as the server tells it, and the options. Bytes are kept as they were read, not what was made of
them::

    msgpack: ["XCKPTHD2", name and identity, [[offset, bytes], ...]]
    BLAKE2b-128 of all before

There are at most 512 MiB in total.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from xckpt.storage import cache
from xckpt.storage.limits import empty
from xckpt.storage.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["FIRST_NBYTES", "HeaderSource", "reading_header"]

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
    path = cache.folder("headers") if is_sure else None
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
        if cache.write(path, entry + blake2b(entry, digest_size=_DIGEST_NBYTES).digest()):
            cache.make_room(path.parent, _MOST_NBYTES)


def _load(path: Path, source: Source, first: memoryview) -> list[tuple[int, memoryview]] | None:
    """Return what is kept of a file: offsets and bytes; None if it does not begin with `first`."""
    content = cache.read(path, 2 * _LARGEST_ENTRY)
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
