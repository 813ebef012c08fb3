"""Requests for ranges that are read soon: in parallel, each byte once, in bounded memory.

Code that knows its next reads announces them (`reading_ahead`). Ranges near each other share a
request, long ones take several. Bytes that have arrived or are in flight, and are not read yet,
take at most 256 MiB in this process, or as much as ``xckpt.read-ahead`` in dask's configuration.

Local files are not held here: as they are read, the operating system is asked to load what comes
next, so that the disk is never idle.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from xckpt.errors import CheckpointError
from xckpt.storage.requests import IN_FLIGHT, REQUEST_NBYTES, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from xckpt.storage.source import Source

    #: A file, the offset of a range of its bytes, and their number.
    Range = tuple[Source, int, int]

T = TypeVar("T")

# Ranges that are announced close to each other are put in the order of the file.
_WINDOW = 16  # requests
# Bytes between two ranges that are requested with them, at most.
_GAP = 1 << 20
_DEFAULT_NBYTES = 256 << 20
# How far the disk is ahead of the reader, and how much it is asked for at a time.
_DISK_NBYTES = 64 << 20
_PIECE_NBYTES = 16 << 20
_PAGE_NBYTES = 4096


class _Span:
    """Bytes of one request."""

    __slots__ = ("future", "is_released", "order", "source", "start", "stop", "unread")

    def __init__(self, source: Source, start: int, stop: int, parts: Sequence[_Announced]) -> None:
        self.source, self.start, self.stop = source, start, stop
        self.order = min(part.order for part in parts)
        # Announced bytes in it, each as often as it is announced.
        self.unread = sum((min(stop, p.stop) - max(start, p.start)) * p.times for p in parts)
        self.future: Future[memoryview] | None = None
        self.is_released = False


class _Shared:
    """The prefetchers of this process and their memory; a forked child begins with none."""

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        self.lock = threading.RLock()
        self.held = 0  # bytes requested and not released
        self.by_file: dict[Source, list[_Prefetcher]] = {}
        self.on_disk: dict[str, tuple[_Disk, ...]] = {}


_shared = _Shared()


@contextmanager
def reading_ahead(ranges: Iterable[Range]) -> Iterator[None]:
    """Request ranges, in about this order, before they are read; release their bytes on leaving."""
    # After that, threads that still read the ranges request them on their own, unless an error or
    # Ctrl-C is the reason: then their reads end with a `CancelledError`.
    far, near = _by_distance(ranges)
    disk = _Disk(near) if len(near) > 1 else None
    prefetcher = _Prefetcher(_plan(far)) if far else None
    try:
        yield
    except BaseException:
        if prefetcher is not None:
            prefetcher.is_failed = True
        raise
    finally:
        if disk is not None:
            disk.close()
        if prefetcher is not None:
            prefetcher.close()


def is_active(source: Source) -> bool:
    """Return whether ranges of a file are requested ahead."""
    return bool(_shared.by_file) and source in _shared.by_file


def view(source: Source, offset: int, nbytes: int) -> memoryview | None:
    """Return a range that was announced, if it came by one request."""
    return _first(source, lambda prefetcher: prefetcher.view(source, offset, offset + nbytes))


def fill(source: Source, offset: int, memory: memoryview) -> bool:
    """Fill memory with a range that was announced; return whether it was."""
    return _first(source, lambda prefetcher: prefetcher.fill(source, offset, memory)) is not None


def _first(source: Source, read: Callable[[_Prefetcher], T | None]) -> T | None:
    """Return the result of the first prefetcher that has one; of several one may have failed."""
    cancelled = None
    for prefetcher in tuple(_shared.by_file.get(source, ())):
        try:
            result = read(prefetcher)
        except CancelledError as error:
            cancelled = error
        else:
            if result is not None:
                return result
    if cancelled is not None:
        raise cancelled
    return None


def is_being_read(path: str, nbytes: int) -> None:
    """Ask the disk for the bytes that follow those that are read now."""
    for disk in _shared.on_disk.get(path, ()):
        disk.advance(nbytes)


class _Prefetcher:
    """Requests spans in their order, as far as memory allows."""

    def __init__(self, spans: list[_Span]) -> None:
        import dask
        from dask.utils import parse_bytes

        self._most = int(parse_bytes(dask.config.get("xckpt.read-ahead", _DEFAULT_NBYTES)))
        self.is_failed = False
        self._spans = spans
        self._next = 0
        self._of_file: dict[Source, tuple[list[int], list[_Span]]] = {}
        by_file: dict[Source, list[_Span]] = defaultdict(list)
        for span in spans:
            by_file[span.source].append(span)
        with _shared.lock:
            for source, members in by_file.items():
                members.sort(key=lambda span: span.start)
                self._of_file[source] = [span.start for span in members], members
                _shared.by_file.setdefault(source, []).append(self)
            self.advance()

    def close(self) -> None:
        """Release all spans."""
        with _shared.lock:
            for source in self._of_file:
                others = [p for p in _shared.by_file.get(source, ()) if p is not self]
                if others:
                    _shared.by_file[source] = others
                else:
                    _shared.by_file.pop(source, None)
            self._next = len(self._spans)
            for span in self._spans:
                _release(span)
            _advance_all()

    def view(self, source: Source, start: int, stop: int) -> memoryview | None:
        """Wait for a range and return it; None if it is not here, or in several spans."""
        with _shared.lock:
            spans = self._covering(source, start, stop)
        return self._read(spans[0], start, stop) if len(spans) == 1 else None

    def fill(self, source: Source, start: int, memory: memoryview) -> memoryview | None:
        """Wait for a range, and fill memory with it; None if it is not here."""
        target, stop = np.frombuffer(memory, np.uint8), start + len(memory)
        with _shared.lock:
            spans = self._covering(source, start, stop)
        for span in spans:
            first, last = max(start, span.start), min(stop, span.stop)
            data = self._read(span, first, last)
            if data is None:
                return None
            # Other threads run meanwhile.
            np.copyto(target[first - start : last - start], np.frombuffer(data, np.uint8))
        return memory if spans else None

    def _read(self, span: _Span, start: int, stop: int) -> memoryview | None:
        """Wait for bytes of a span, and count them as read; None if the span was released."""
        with _shared.lock:
            if span.is_released:
                return None
            future = span.future or self._request(span, is_urgent=True)
        try:
            data = wait_for(future)[start - span.start : stop - span.start]
        except CancelledError:  # another thread has closed this
            if self.is_failed:
                raise
            return None
        with _shared.lock:
            span.unread -= stop - start
            if span.unread <= 0:
                _release(span)
                _advance_all()
        return data

    def _covering(self, source: Source, start: int, stop: int) -> list[_Span]:
        """Return the spans that contain a range, if all are here; the lock is held."""
        starts, spans = self._of_file[source]
        at = bisect_right(starts, start) - 1
        covering: list[_Span] = []
        while start < stop and 0 <= at < len(spans) and spans[at].start <= start < spans[at].stop:
            if spans[at].is_released:
                return []
            covering.append(spans[at])
            start = spans[at].stop
            at += 1
        return covering if start >= stop else []

    def advance(self) -> None:
        """Request the next spans, as far as there is room; the lock is held."""
        while self._next < len(self._spans):
            span = self._spans[self._next]
            if span.future is None and not span.is_released:
                nbytes = span.stop - span.start
                if _shared.held > 0 and _shared.held + nbytes > self._most:
                    return
                self._request(span)
            self._next += 1

    def _request(self, span: _Span, *, is_urgent: bool = False) -> Future[memoryview]:
        nbytes = span.stop - span.start
        span.future = span.source.request(span.start, nbytes, is_urgent=is_urgent)
        _shared.held += nbytes
        return span.future


def _advance_all() -> None:
    for prefetcher in {
        id(p): p for prefetchers in _shared.by_file.values() for p in prefetchers
    }.values():
        prefetcher.advance()


def _release(span: _Span) -> None:
    """Give up the bytes of a span; those in flight count as held until they arrive."""
    if span.is_released:
        return
    span.is_released = True
    future, span.future = span.future, None
    if future is not None:
        nbytes = span.stop - span.start

        def uncharge(_: Any) -> None:
            with _shared.lock:
                _shared.held -= nbytes

        future.cancel()
        future.add_done_callback(uncharge)


# --- from ranges to requests ---------------------------------------------------------------------


class _DiskPiece(NamedTuple):
    """A range of a local file that the disk is asked for at once."""

    file: Source
    start: int
    stop: int


def _by_distance(ranges: Iterable[Range]) -> tuple[Counter[Range], list[_DiskPiece]]:
    """Return ranges of far files with how often each is announced, and pieces of local files."""
    files: dict[int, tuple[Source, bool] | None] = {}
    far: Counter[Range] = Counter()
    near: list[_DiskPiece] = []
    for source, offset, nbytes in ranges:
        if id(source) not in files:
            files[id(source)] = None
            with suppress(OSError, CheckpointError):  # raised when it is read
                files[id(source)] = source.file, source.file.is_far
        place = files[id(source)]
        if place is None or not nbytes:
            continue
        file, is_far = place
        if is_far and offset + nbytes <= file.size:
            far[file, offset, nbytes] += 1
        elif file.is_near:
            first, stop = offset, min(offset + nbytes, file.size)
            if near and near[-1].file is file and 0 <= first - near[-1].stop <= _PAGE_NBYTES:
                first = near.pop().start
            starts = range(first, stop, _PIECE_NBYTES)
            near += [_DiskPiece(file, start, min(stop, start + _PIECE_NBYTES)) for start in starts]
    return far, near


class _Announced(NamedTuple):
    """A range of a file."""

    start: int
    stop: int
    times: int  # it is announced
    order: int  # its place among the announced ranges


def _plan(ranges: Counter[Range]) -> list[_Span]:
    """Cut ranges into requests, ordered by the range in them that is announced first."""
    # Ranges are merged that are announced in the same window and near each other in the file, with
    # nothing between them that is announced in another window.
    windows: dict[tuple[int, Source], list[_Announced]] = defaultdict(list)
    starts: dict[Source, list[int]] = defaultdict(list)
    total = 0
    for order, ((source, offset, nbytes), times) in enumerate(ranges.items()):
        window = total // (_WINDOW * REQUEST_NBYTES)
        windows[window, source].append(_Announced(offset, offset + nbytes, times, order))
        starts[source].append(offset)
        total += nbytes
    for offsets in starts.values():
        offsets.sort()
    spans: list[_Span] = []
    position = 0
    for (_, source), announced in windows.items():
        for run in _runs(sorted(announced), starts[source]):
            for span in _cut(source, run, position):
                spans.append(span)
                position += span.stop - span.start
    return sorted(spans, key=lambda span: span.order)


def _runs(announced: list[_Announced], starts: list[int]) -> Iterator[list[_Announced]]:
    """Group ranges near each other; each group has one long range at most."""
    run: list[_Announced] = []
    stop = nbytes = 0
    has_long = False
    for part in announced:
        is_long = part.stop - part.start >= REQUEST_NBYTES // 2
        # Not more than half of the bytes of a request are superfluous.
        is_far = part.start - stop > min(_GAP, nbytes)
        is_far = is_far or bisect_left(starts, stop) < bisect_left(starts, part.start)
        if run and (is_far or (is_long and has_long and part.start >= stop)):
            yield run
            run, stop, nbytes, has_long = [], 0, 0, False
        run.append(part)
        stop, nbytes = max(stop, part.stop), nbytes + part.stop - part.start
        has_long |= is_long
    yield run


def _cut(source: Source, run: list[_Announced], position: int) -> Iterator[_Span]:
    """Cut a run into requests of similar size."""
    start, stop = run[0].start, max(part.stop for part in run)
    while start < stop:
        # The first requests of all are smaller: requests that share the line and are equally long
        # end at the same time, and the line is idle until the next ones are answered.
        most = min(REQUEST_NBYTES, REQUEST_NBYTES // 2 + position // IN_FLIGHT)
        end = start + (stop - start) // max(1, round((stop - start) / most))
        parts = [part for part in run if part.start < end and start < part.stop]
        if parts:
            yield _Span(source, start, end, parts)
        position += end - start
        start = end


# --- local files ---------------------------------------------------------------------------------


class _Disk:
    """Asks the disk for pieces of files, in their order, as others are read."""

    def __init__(self, pieces: list[_DiskPiece]) -> None:
        self._pieces = pieces
        self._next = self._asked = self._read = 0
        self._lock = threading.Lock()
        self._paths = {piece.file.name for piece in pieces}
        with _shared.lock:
            for path in self._paths:
                _shared.on_disk[path] = (*_shared.on_disk.get(path, ()), self)
        self.advance(0)

    def close(self) -> None:
        with _shared.lock:
            for path in self._paths:
                others = tuple(d for d in _shared.on_disk.get(path, ()) if d is not self)
                _shared.on_disk[path] = others
                if not others:
                    del _shared.on_disk[path]

    def advance(self, nbytes: int) -> None:
        """Count bytes as read, and ask for more."""
        self._read += nbytes  # a hint: nothing is wrong if two threads lose some
        # Another thread may be asking already.
        while self._asked < self._read + _DISK_NBYTES and self._lock.acquire(blocking=False):
            try:
                if self._next == len(self._pieces):
                    return
                file, start, stop = self._pieces[self._next]
                self._next += 1
                self._asked += stop - start
                file.expect(start, stop - start)
            finally:
                self._lock.release()
