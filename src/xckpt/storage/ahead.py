"""Ranges of files that are requested before they are asked for.

Whoever knows what is read next says so (`reading_ahead`): ranges that are near each other make one
request, long ones make several, and up to 32 requests are under way at a time. The first ones are
for less, each for no less than the one before: all of those under way share the line, so that equal
ones would end together, and the line be idle until those after them are answered. What a request
brings is there as it comes, not when it ends. What has come and is not taken yet is at most 256 MiB
in this process, or what ``xckpt.read-ahead`` of dask's configuration says. Reads that nobody
announced are requests of their own, as are those of what was taken before.

Of local files nothing is held here: as they are read, the operating system is asked for what comes
next, so that the disk is never idle. It has its own reading ahead, which several threads in one
file confuse.
"""

from __future__ import annotations

import os
import sys
import threading
from bisect import bisect_right
from collections import defaultdict, deque
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from xckpt.errors import CheckpointError
from xckpt.storage.requests import Cancellation
from xckpt.storage.source import empty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from xckpt.storage.source import Source

    #: A file, and where some of its bytes begin, and how many they are.
    Range = tuple[Source, int, int]
    #: A file, ranges of it with how often they are wanted, and where they end.
    _Wanted = tuple[Source, list[tuple[int, int, int]], int]

T = TypeVar("T")

#: What one request is for, where there is so much.
REQUEST_NBYTES = 8 << 20
#: How many requests are under way at a time, at most.
IN_FLIGHT = 32
_GAP = 1 << 20
# Requests for neighbours fill one memory, which is given away with the values in it.
_LARGEST_RUN = 64 << 20
_ALIGNMENT = 64
# How far the disk is ahead of who reads, and what it is asked for at a time.
_DISK_NBYTES = 64 << 20
_PIECE_NBYTES = 8 << 20
# Ranges that are no farther from each other are one.
_PAGE_NBYTES = 4096
_DEFAULT_NBYTES = 256 << 20

_WAITING, _COMING, _THERE, _GONE = range(4)


class _Run:
    """Memory that one request or several fill."""

    __slots__ = ("given", "held", "left", "memory", "once", "start", "stop")

    def __init__(self, start: int, stop: int, once: set[tuple[int, int]]) -> None:
        self.start, self.stop = start, stop
        # Ranges in it, most of it, that are wanted once and overlap no other.
        self.once = {each for each in once if 2 * (each[1] - each[0]) >= stop - start}
        self.given: list[tuple[int, int]] = []  # of these, what others have now
        self.left = 0  # of its requests, how many are not done with
        self.held = 0  # what counts as memory until then
        self.memory: memoryview | None = None

    def lends(self, start: int, stop: int, *, shared: bool) -> bool:
        """Return whether a range can be had where it is: to be looked at, or for good."""
        if shared:  # what somebody looks at is not given away
            self.once = {each for each in self.once if each[1] <= start or stop <= each[0]}
            return True
        if (start - self.start) % _ALIGNMENT or (start, stop) not in self.once:
            return False
        self.once.discard((start, stop))
        self.given.append((start, stop))
        return True


class _Span:
    """Bytes that one request brings."""

    __slots__ = (
        "at",
        "awaited",
        "done",
        "error",
        "left",
        "run",
        "source",
        "start",
        "state",
        "stop",
    )

    def __init__(
        self, source: Source, start: int, stop: int, wanted: int, run: _Run, *, at: int
    ) -> None:
        self.source, self.start, self.stop, self.run = source, start, stop, run
        self.left = wanted  # of what is announced, as often as it is
        self.at = at  # among all that is announced
        self.state = _WAITING
        self.done = 0  # how many of its bytes have come
        self.awaited = sys.maxsize  # how many of them somebody waits for
        self.error: BaseException | None = None
        run.left += 1

    @property
    def memory(self) -> memoryview:
        """The memory that is filled."""
        run = self.run
        if run.memory is None:
            run.memory = empty(run.stop - run.start)
        return run.memory[self.start - run.start : self.stop - run.start]


class _Memory:
    """What has come, or is coming, and is not taken yet, in bytes."""

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        # One lock for all, as room that one gives up is what others wait for.
        lock = threading.Lock()
        self.changed = threading.Condition(lock)  # what there is to do
        self.arrived = threading.Condition(lock)  # what has come
        self.held = 0
        #: Who reads ahead of each file.
        self.ahead: dict[Source, list[_Ahead]] = {}
        #: Who asks the disk for what comes next in each file, by its path.
        self.on_disk: dict[str, tuple[_OnDisk, ...]] = {}


_memory = _Memory()


@contextmanager
def reading_ahead(ranges: Iterable[Range]) -> Iterator[None]:
    """Request ranges, in about this order, before they are asked for.

    On leaving, requests that are under way are ended, and what they brought is forgotten.
    """
    far, near = _by_distance(ranges)
    on_disk = _OnDisk(near) if len(near) > 1 else None
    spans = _spans(far)
    # One request for one range is made by who wants it.
    ahead = _Ahead(spans) if len(spans) > 1 or len(far) > 1 else None
    try:
        yield
    finally:
        if on_disk is not None:
            on_disk.close()
        if ahead is not None:
            ahead.close()


def is_being_read(path: str, nbytes: int) -> None:
    """Ask the disk for what follows what is read now, if anybody said what does."""
    for each in _memory.on_disk.get(path, ()):
        each.advance(nbytes)


def is_read_ahead(source: Source) -> bool:
    """Return whether somebody reads ahead of a file."""
    return bool(_memory.ahead) and source in _memory.ahead


def take(
    source: Source,
    offset: int,
    nbytes: int,
    memory: memoryview | None = None,
    *,
    shared: bool = False,
) -> memoryview | None:
    """Return a range of what is read ahead; None where it is not.

    It is in the memory that is given, or else in memory of its own; what is `shared` is not to be
    written to, and may be kept for a moment.
    """
    # Most reads are of files that nobody reads ahead of.
    for each in _memory.ahead.get(source, ()) if _memory.ahead else ():
        found = each.take(source, offset, nbytes, memory, shared=shared)
        if found is not None:
            return found
    return None


def _by_distance(
    ranges: Iterable[Range],
) -> tuple[dict[Range, int], list[tuple[Source, int, int]]]:
    """Return the ranges of files that take a request for each, and how often each is wanted.

    Then the pieces that those of local files make: file, start and stop.
    """
    known: dict[int, tuple[Source | None, Source | None]] = {}
    found: dict[Range, int] = {}
    pieces: list[tuple[Source, int, int]] = []
    for source, offset, nbytes in ranges:
        if id(source) not in known:
            known[id(source)] = None, None
            with suppress(OSError, CheckpointError):  # reading it tells
                known[id(source)] = source.far, source.near
        far, near = known[id(source)]
        if far is not None and nbytes and offset + nbytes <= far.size:
            found[far, offset, nbytes] = found.get((far, offset, nbytes), 0) + 1
        elif near is not None and nbytes:
            at, stop = offset, min(offset + nbytes, near.size)
            if pieces and pieces[-1][0] is near and 0 <= at - pieces[-1][2] <= _PAGE_NBYTES:
                at = pieces.pop()[1]
            while at < stop:
                pieces.append((near, at, min(stop, at + _PIECE_NBYTES)))
                at = pieces[-1][2]
    return found, pieces


class _OnDisk:
    """Asks the disk for pieces of files, in their order, as others are read."""

    def __init__(self, pieces: list[tuple[Source, int, int]]) -> None:
        self._pieces = pieces
        self._next = 0
        self._asked = self._read = 0
        self._lock = threading.Lock()
        self._paths = {source.name for source, _, _ in pieces}
        with _memory.changed:
            for path in self._paths:
                _memory.on_disk[path] = (*_memory.on_disk.get(path, ()), self)
        self.advance(0)

    def close(self) -> None:
        with _memory.changed:
            for path in self._paths:
                others = tuple(o for o in _memory.on_disk.get(path, ()) if o is not self)
                _memory.on_disk[path] = others
                if not others:
                    del _memory.on_disk[path]

    def advance(self, nbytes: int) -> None:
        """Take it that so many bytes are read."""
        self._read += nbytes  # a hint: nothing is wrong if two threads lose some
        # Who finds another thread asking has something better to do.
        while self._asked < self._read + _DISK_NBYTES and self._lock.acquire(blocking=False):
            try:
                if self._next == len(self._pieces):
                    return
                source, start, stop = self._pieces[self._next]
                self._next += 1
                self._asked += stop - start
                source.expect(start, stop - start)
            finally:
                self._lock.release()


def _spans(ranges: Mapping[Range, int]) -> list[_Span]:
    """Make requests of ranges; only ranges that are wanted at about the same time are joined."""
    runs: list[_Wanted] = []
    for near in _groups(ranges, lambda each: each[2], REQUEST_NBYTES):
        runs += _joined({each: ranges[each] for each in near})
    spans: list[_Span] = []
    at = 0
    for window in _groups(runs, _extent, 16 * REQUEST_NBYTES):
        for run in _small_ones_joined(window):
            spans += _cut(*run, at)
            at += _extent(run)
    return spans


def _groups(items: Iterable[T], nbytes_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Return what follows each other, in groups that have so many bytes with their last item."""
    group: list[T] = []
    nbytes = 0
    for item in items:
        group.append(item)
        nbytes += nbytes_of(item)
        if nbytes >= most:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _extent(run: _Wanted) -> int:
    _, members, stop = run
    return stop - members[0][0]


def _small_ones_joined(window: list[_Wanted]) -> list[_Wanted]:
    """Join small runs with neighbours that are wanted later: to keep these costs less than to ask.

    Those of the layers of a model are often next to each other, and wanted layer by layer.
    """
    first: dict[tuple[Source, int], int] = {}
    small: dict[Range, int] = {}
    placed: list[tuple[int, _Wanted]] = []
    for place, (source, members, stop) in enumerate(window):
        if stop - members[0][0] >= REQUEST_NBYTES // 8:
            placed.append((place, (source, members, stop)))
            continue
        for start, end, times in members:
            first[source, start] = place
            small[source, start, end - start] = times
    placed += [(min(first[run[0], each[0]] for each in run[1]), run) for run in _joined(small)]
    return [run for _, run in sorted(placed, key=lambda each: each[0])]


def _joined(ranges: Mapping[Range, int]) -> Iterator[_Wanted]:
    by_file: dict[Source, list[tuple[int, int, int]]] = defaultdict(list)
    for (source, offset, nbytes), count in ranges.items():
        by_file[source].append((offset, offset + nbytes, count))
    for source, wanted in by_file.items():
        wanted.sort()
        run: list[tuple[int, int, int]] = []
        end = nbytes = 0
        for each in wanted:
            # What is not wanted is at most as much as what is.
            if run and each[0] - end > min(_GAP, nbytes):
                yield source, run, end
                run, nbytes = [], 0
            run.append(each)
            nbytes += each[1] - each[0]
            end = max(end, each[1]) if len(run) > 1 else each[1]
        yield source, run, end


def _cut(source: Source, members: list[tuple[int, int, int]], end: int, at: int) -> Iterator[_Span]:
    """Make requests for some ranges and what is between them; `at` bytes come before."""
    # What is long begins memory of its own, which is given away with its values.
    groups: list[list[tuple[int, int, int]]] = [[]]
    reach, has_long = 0, False
    for each in members:
        is_long = each[1] - each[0] >= REQUEST_NBYTES // 2
        if is_long and has_long and each[0] >= reach:
            groups.append([])
        groups[-1].append(each)
        reach, has_long = max(reach, each[1]), has_long or is_long
    for group, stop in zip(groups, [*(each[0][0] for each in groups[1:]), end], strict=True):
        start = group[0][0]
        bounds = [start]
        while bounds[-1] < stop:
            left = stop - bounds[-1]
            nbytes = REQUEST_NBYTES // 2 + at // IN_FLIGHT
            count = max(1, round(left / min(REQUEST_NBYTES, nbytes)))
            bounds.append(bounds[-1] + left // count)
            at += left // count
        run = None
        if stop - start <= _LARGEST_RUN:
            apart = all(one[1] <= other[0] for one, other in pairwise(group))
            once = {(one, last) for one, last, times in group if apart and times == 1}
            run = _Run(start, stop, once)
        for first, last in pairwise(bounds):
            taken = (max(0, min(b, last) - max(a, first)) * times for a, b, times in group)
            place = at - (stop - first)
            yield _Span(source, first, last, sum(taken), run or _Run(first, last, set()), at=place)


class _Ahead:
    """Requests some spans in their order, on threads of its own."""

    def __init__(self, spans: list[_Span]) -> None:
        import dask
        from dask.utils import parse_bytes

        self._most = int(parse_bytes(dask.config.get("xckpt.read-ahead", _DEFAULT_NBYTES)))
        self._spans = spans
        self._next = 0
        self._waiting = len(spans)
        self._asked: deque[_Span] = deque()  # what is waited for
        self._kept: deque[_Span] = deque()  # in the order in which they came
        self._horizon = 0  # how far what was taken has come
        self._limit = float(IN_FLIGHT)
        self._in_flight = 0
        self._closed = False
        self._of_file: dict[Source, tuple[list[int], list[_Span]]] = {}
        by_file: dict[Source, list[_Span]] = defaultdict(list)
        for span in spans:
            by_file[span.source].append(span)
        for source, some in by_file.items():
            some.sort(key=lambda span: span.start)
            self._of_file[source] = [span.start for span in some], some
        with _memory.changed:
            for source in by_file:
                _memory.ahead.setdefault(source, []).append(self)
        count = min(IN_FLIGHT, len(spans))
        self._cancellations = [Cancellation(self._be_gentle, count) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._work, args=(each,), name="xckpt-ahead", daemon=True)
            for each in self._cancellations
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all requests."""
        with _memory.changed:
            self._closed = True
            for source in self._of_file:
                others = [each for each in _memory.ahead.get(source, ()) if each is not self]
                if others:
                    _memory.ahead[source] = others
                else:
                    _memory.ahead.pop(source, None)
            for span in self._spans:
                self._forget(span)
            _memory.changed.notify_all()
            _memory.arrived.notify_all()
        for each in self._cancellations:
            each.cancel()
        for thread in self._threads:
            thread.join()

    def take(
        self,
        source: Source,
        offset: int,
        nbytes: int,
        memory: memoryview | None = None,
        *,
        shared: bool = False,
    ) -> memoryview | None:
        """Return a range if spans are all of it, waiting for what is to come; see `take`."""
        stop = offset + nbytes
        needed = self._covering(source, offset, stop)
        with _memory.changed:
            if not needed or any(span.state == _GONE for span in needed):
                return None
            run = needed[0].run
            if any(at < stop and offset < end for span in needed for at, end in span.run.given):
                return None
            waiting = [span for span in needed if span.state == _WAITING]
            if waiting:
                self._asked.extend(waiting)
                _memory.changed.notify_all()
            is_there = memory is None and needed[-1].run is run
            is_copied = not is_there or not run.lends(offset, stop, shared=shared)
            if not is_copied:
                needed[0].memory  # noqa: B018  it is made
                memory = memoryview(run.memory or b"")[offset - run.start : stop - run.start]
        if memory is None:
            memory = empty(nbytes)
        for span in needed:
            first, last = max(offset, span.start), min(stop, span.stop)
            data = self._arrived(span, last - span.start)
            if data is None:
                return None
            if is_copied:
                memory[first - offset : last - offset] = data[first - span.start :][: last - first]
            with _memory.changed:
                span.left -= last - first
                self._horizon = max(self._horizon, span.at)
                if span.left <= 0:
                    self._forget(span)
                    _memory.changed.notify_all()
        return memory.toreadonly() if shared and not is_copied else memory

    def _arrived(self, span: _Span, nbytes: int) -> memoryview | None:
        """Wait for the first bytes of a span; None where they do not come."""
        with _memory.arrived:
            while span.state == _WAITING or (span.state == _COMING and span.done < nbytes):
                if self._closed:
                    return None
                span.awaited = min(span.awaited, nbytes)
                if span.done < nbytes:
                    _memory.arrived.wait()
            if span.error is not None:
                raise span.error
            return None if span.state == _GONE else span.memory

    def _covering(self, source: Source, start: int, stop: int) -> list[_Span]:
        starts, spans = self._of_file[source]
        at = bisect_right(starts, start) - 1
        found: list[_Span] = []
        while start < stop and 0 <= at < len(spans) and spans[at].start <= start < spans[at].stop:
            found.append(spans[at])
            start = spans[at].stop
            at += 1
        return found if start >= stop else []

    def _work(self, cancellation: Cancellation) -> None:
        cancellation.begin()
        while True:
            with _memory.changed:
                span = self._wait_for_work()
                if span is None:
                    return
                span.state = _COMING
                self._waiting -= 1
                self._in_flight += 1
                _memory.held += span.stop - span.start
                span.run.held += span.stop - span.start
                memory = span.memory
            error = None
            try:
                span.source.fetch_into(span.start, memory, partial(_came, span))
            except BaseException as raised:  # noqa: BLE001  it is raised where it is waited for
                error = raised
            del memory
            with _memory.changed:
                self._in_flight -= 1
                if span.state == _GONE or error is not None:  # or forgotten meanwhile
                    # That it was ended is no error of those who wait: they read for themselves.
                    span.state, span.error = _GONE, None if self._closed else error
                    _release(span)
                else:
                    span.state, span.done = _THERE, span.stop - span.start
                    self._kept.append(span)
                    self._limit = min(IN_FLIGHT, self._limit + 1 / self._limit)
                _memory.changed.notify_all()
                _memory.arrived.notify_all()

    def _wait_for_work(self) -> _Span | None:
        """Return what is to be requested next; None when there is nothing left."""
        while self._waiting and not self._closed:
            if self._in_flight < self._limit:
                while self._asked:
                    span = self._asked.popleft()
                    if span.state == _WAITING:
                        return span
                following = self._following()
                if following is not None:
                    nbytes = following.stop - following.start
                    if _memory.held + nbytes <= self._most:
                        return following
                    if self._forget_what_was_left():
                        continue
            _memory.changed.wait()
        return None

    def _following(self) -> _Span | None:
        while self._next < len(self._spans):
            span = self._spans[self._next]
            # What readers have left far behind is requested when it is asked for.
            if span.state == _WAITING and span.at >= self._horizon - self._most:
                return span
            self._next += 1
        return None

    def _forget_what_was_left(self) -> bool:
        """Give up what came long ago and was never taken; return whether there was anything."""
        held = _memory.held
        while self._kept and (
            self._kept[0].state == _GONE or self._kept[0].at < self._horizon - self._most
        ):
            self._forget(self._kept.popleft())
        return _memory.held < held

    def _forget(self, span: _Span) -> None:
        before, span.state = span.state, _GONE
        self._waiting -= before == _WAITING
        if before in {_WAITING, _THERE}:  # what is coming is let go when it has come
            _release(span)

    def _be_gentle(self) -> None:
        """Have fewer requests under way."""
        with _memory.changed:
            self._limit = max(1.0, self._limit / 2)


def _came(span: _Span, nbytes: int) -> None:
    """Tell who waits for it that so much of a span is there."""
    span.done = max(span.done, nbytes)
    if nbytes >= span.awaited:
        with _memory.arrived:
            span.awaited = sys.maxsize
            _memory.arrived.notify_all()


def _release(span: _Span) -> None:
    """Let go of the memory of a span, when those that share it are done with."""
    run = span.run
    run.left -= 1
    if not run.left:
        _memory.held -= run.held
        run.memory, run.held = None, 0
