"""One pass over many tensors, on the threads of this machine or on a cluster.

A task returns an accumulator for each of its cuts. Accumulators are merged by their position in
the tensor, never by the time of their arrival. Values that an earlier pass cached are not read
again.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from xckpt.arrays.streams import ChunkedStream, columns_of
from xckpt.index import paused_collector
from xckpt.progress import Progress
from xckpt.scan.cluster import on_cluster, results_of, waiting_client
from xckpt.scan.cuts import Cut, ranges_of, scan_cuts, tasks_of
from xckpt.scan.statistics_cache import key_of, open_records
from xckpt.storage import reading_ahead
from xckpt.storage.limits import cpu_count
from xckpt.storage.requests import IN_FLIGHT, REQUEST_NBYTES
from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.scan.accumulators import Accumulator
    from xckpt.scan.statistics_cache import Records
    from xckpt.typing import Array

# Elements of a stretch of a long tensor, which has its own record: 1 GiB of float32; whole leaves.
_STRETCH = 1 << 28
# Whole leaves of every type, and a power of two of them: one node of the tree of moments. Larger
# tasks cost less, but each thread should have several of them.
_TASK_NBYTES = 16 << 20
_LARGEST_TASK_NBYTES = 64 << 20
_TASKS_PER_THREAD = 8
_CLUSTER_TASK_NBYTES = 64 << 20
# For object stores: four times the bytes of all requests in flight.
_FAR_TASK_NBYTES = 4 * IN_FLIGHT * REQUEST_NBYTES
# Cuts of a task are limited so that progress is visible. Tasks with more than `_MANY` cuts run one
# at a time.
_MOST_CUTS = 256
_MOST_FAR_CUTS = 4096
_MANY = 64


def gather(
    readers: Sequence[ElementStream],
    operation: type[Accumulator],
    # From the number of a tensor and its accumulator to its result.
    finish: Callable[[int, Any], Any],
    progress: Progress | None = None,
    *,
    # Arguments of the operation, one for each tensor.
    arguments: Sequence[Any] | None = None,
    cache: bool = False,
    # Whether to cache stretches of long tensors, so that an interrupted scan resumes in them.
    stretched: bool = False,
    # From the numbers of uncached tensors to numbers and accumulators of those that need no pass.
    shortcut: Callable[[list[int]], Iterable[tuple[int, Any]]] | None = None,
) -> list[Any]:
    """Scan tensors, and return a result for each, in order."""
    with open_records(readers, operation.record, enabled=cache) as records:
        outcome = _Outcome(readers, operation, records, finish)
        with paused_collector():
            outcome.plan_reads(stretched=stretched)
        if shortcut is not None:
            missing = [n for n, stretches in enumerate(outcome.uncached) if stretches]
            for number, accumulator in shortcut(missing):
                outcome.receive(number, 0, accumulator)
                outcome.uncached[number].clear()
        cuts = [
            Cut(number, position, readers[number], arguments and arguments[number], *bounds)
            for number, stretches in enumerate(outcome.uncached)
            for position, bounds in enumerate(stretches)
        ]
        progress = progress or Progress(False, "")  # noqa: FBT003  it shows nothing
        progress.expect(sum(cut.nbytes for cut in cuts))
        _scan(cuts, operation, outcome.receive, progress.advance)
    return outcome.results


def load_cached(
    readers: Sequence[Any],
    operation: type[Accumulator],
    finish: Callable[[int, Any], Any] = lambda _, accumulator: accumulator,
) -> list[Any]:
    """Return the results of stretched scans that are cached for each tensor, or None."""
    with open_records(readers, operation.record, enabled=True) as records:
        outcome = _Outcome(readers, operation, records, finish)
        outcome.plan_reads(stretched=True)
    return outcome.results


class _Outcome:
    """Results of tensors as their accumulators arrive, and the stretches that must be read."""

    def __init__(
        self,
        readers: Sequence[ElementStream],
        operation: type[Accumulator],
        records: Sequence[Records | None],
        finish: Callable[[int, Any], Any],
    ) -> None:
        self.readers = readers
        self.operation = operation
        self.records = records
        self.finish = finish
        self.results: list[Any] = [None] * len(readers)
        #: Per tensor: the number of stretches that have not arrived, and the uncached stretches.
        self.missing: list[int] = []
        self.uncached: list[list[tuple[int, int]]] = []
        #: Accumulators of incomplete tensors, by number; of incomplete stretches, by number and
        #: position among the uncached ones.
        self.wholes: dict[int, Accumulator] = {}
        self.parts: dict[tuple[int, int], Accumulator | None] = {}

    def plan_reads(self, *, stretched: bool) -> None:
        """Take cached accumulators, and list the stretches without one."""
        for number, reader in enumerate(self.readers):
            stretches = [(0, reader.size)]
            is_divisible = not (isinstance(reader, ChunkedStream) or reader.whole)
            if stretched and is_divisible and reader.size > _STRETCH:
                starts = range(0, reader.size, _STRETCH)
                stretches = [(start, min(start + _STRETCH, reader.size)) for start in starts]
            self.missing.append(len(stretches))
            self.uncached.append([])
            for bounds in stretches:
                accumulator = self._cached(number, bounds)
                if accumulator is not None:
                    self._add(number, accumulator)
                    continue
                self.parts[number, len(self.uncached[-1])] = None
                self.uncached[-1].append(bounds)

    def receive(self, number: int, position: int, part: Accumulator) -> None:
        """Take the accumulator of a part of a stretch."""
        if (number, position) not in self.parts:
            return  # another empty chunk of an empty tensor
        total = _merged(self.parts[number, position], part)
        start, stop = self.uncached[number][position]
        if total.count < stop - start:
            self.parts[number, position] = total
            return
        del self.parts[number, position]
        records = self.records[number]
        if records is not None:
            records.put(key_of(self.readers[number], (start, stop)), total.pack())
        self._add(number, total)

    def _cached(self, number: int, bounds: tuple[int, int]) -> Accumulator | None:
        records, reader = self.records[number], self.readers[number]
        value = None if records is None else records.get(key_of(reader, bounds))
        if value is None:
            return None
        try:
            return self.operation.unpack(value, reader)
        except LookupError:  # a sketch without channels
            return None

    def _add(self, number: int, total: Accumulator) -> None:
        """Take the accumulator of a stretch."""
        self.missing[number] -= 1
        whole = _merged(self.wholes.pop(number, None), total)
        if self.missing[number]:
            self.wholes[number] = whole
        else:
            self.results[number] = self.finish(number, whole)


def _merged(total: Accumulator | None, part: Accumulator) -> Accumulator:
    if total is None:
        return part
    total.merge(part)
    return total


def _scan(
    cuts: Sequence[Cut],
    operation: type[Accumulator],
    receive: Callable[[int, int, Any], None],
    report: Callable[[int], None],
) -> None:
    client = waiting_client()
    chunked = [cut for cut in cuts if isinstance(cut.reader, ChunkedStream)]
    unchunked = [cut for cut in cuts if not isinstance(cut.reader, ChunkedStream)]
    thread_cuts = [cut for cut in unchunked if client is None or cut.reader.local]
    cluster_cuts = [cut for cut in unchunked if client is not None and not cut.reader.local]

    def deliver_all(task: list[Cut], results: list[Any]) -> None:
        for cut, result in zip(task, results, strict=True):
            receive(cut.number, cut.position, result)
        report(sum(cut.nbytes for cut in task))

    if cluster_cuts:
        _run_on_cluster(client, cluster_cuts, operation, deliver_all)
    if thread_cuts:
        share = sum(cut.nbytes for cut in thread_cuts) // (_TASKS_PER_THREAD * cpu_count())
        nbytes = _TASK_NBYTES
        while nbytes < min(share, _LARGEST_TASK_NBYTES):
            nbytes *= 2
        tasks = list(tasks_of(thread_cuts, nbytes, nbytes, _MOST_CUTS))
        _run_on_threads(tasks, operation, deliver_all)
    if chunked:
        _run_chunks(client, chunked, operation, receive, report)


def _run_on_threads(
    tasks: Sequence[list[Cut]],
    operation: type[Accumulator],
    deliver: Callable[[list[Cut], list[Any]], None],
) -> None:
    stop = threading.Event()
    one_at_a_time = threading.Lock()

    def work(task: list[Cut]) -> list[Any]:
        # Small tensors keep the interpreter busy, so that several threads are slower than one.
        with one_at_a_time if len(task) > _MANY else nullcontext():
            return scan_cuts(task, operation, stop)

    count = cpu_count()
    with Threads(count, "xckpt-stats") as threads, ExitStack() as stack:
        # Stop reading ahead before the threads, so that none waits for a cancelled read.
        stack.callback(stop.set)
        stack.enter_context(reading_ahead(ranges_of(chain.from_iterable(tasks))))
        remaining = iter(tasks)
        # Few more tasks than threads, because finished results wait in memory.
        running = {threads.submit(work, task): task for task in islice(remaining, 2 * count)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                deliver(running.pop(future), future.result())
            for task in islice(remaining, len(done)):
                running[threads.submit(work, task)] = task


# --- a cluster -----------------------------------------------------------------------------------


def _run_on_cluster(
    client: Any,
    cuts: Sequence[Cut],
    operation: type[Accumulator],
    deliver: Callable[[list[Cut], list[Any]], None],
) -> None:
    target, most = _CLUSTER_TASK_NBYTES, _MOST_CUTS
    sources = {id(source): source for source, _, _ in ranges_of(cuts)}
    if any(source.is_far for source in sources.values()):
        # A worker reads ahead only within a task, so that short tasks wait for each request.
        threads = sum(client.nthreads().values())
        share = sum(cut.nbytes for cut in cuts) // max(1, threads)
        target = max(REQUEST_NBYTES, min(share, _FAR_TASK_NBYTES))
        most = _MOST_FAR_CUTS
    tasks = list(tasks_of(cuts, _CLUSTER_TASK_NBYTES, target, most))

    def file_and_size(task: list[Cut]) -> tuple[str, int]:
        return task[0].reader.place[0], sum(cut.nbytes for cut in task)

    on_cluster(client, tasks, partial(_scan_ahead, operation=operation), deliver, file_and_size)


def _scan_ahead(task: list[Cut], operation: type[Accumulator]) -> list[Any]:
    """Run a task on a worker, with its own reading ahead."""
    with reading_ahead(ranges_of(task)):
        return scan_cuts(task, operation, threading.Event())  # the cluster cancels tasks itself


# --- chunks of dask arrays -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ChunkTask:
    """The task of a chunk; it pickles."""

    operation: type[Accumulator]
    reader: ElementStream
    argument: Any
    start: int

    def __call__(self, values: Array) -> Accumulator:
        accumulator = self.operation.begin(self.reader, self.argument)
        if values.size:
            accumulator.update(self.start, *columns_of(values))
        return accumulator.close()


def _run_chunks(
    client: Any,
    cuts: Sequence[Cut],
    operation: type[Accumulator],
    receive: Callable[[int, int, Any], None],
    report: Callable[[int], None],
) -> None:
    """Scan all chunks of dask arrays, in one run of a scheduler."""
    import dask

    arrays = dask.optimize(*(cut.reader.flat(operation.leaf) for cut in cuts))
    graph: dict[Any, Any] = {}
    for array in arrays:
        graph.update(array.__dask_graph__())
    token = f"xckpt-stats-{uuid4().hex}"
    sizes = {}
    for number, (cut, array) in enumerate(zip(cuts, arrays, strict=True)):
        reader = copy(cut.reader)
        reader.array = None  # the array holds the whole graph
        start = 0
        for position, size in enumerate(array.chunks[0]):
            key = (token, number, position)
            work = _ChunkTask(operation, reader, cut.argument, start)
            graph[key] = (work, (array.name, position))
            sizes[key] = cut.reader.share(start, start + size)
            start += size

    def done(key: Any, result: Any, *_: Any) -> None:
        if key in sizes:
            receive(cuts[key[1]].number, 0, result)
            report(sizes[key])

    if client is None:
        import dask.threaded
        from dask.base import get_scheduler
        from dask.callbacks import Callback

        get = get_scheduler() or dask.threaded.get
        with Callback(posttask=done):
            get(graph, list(sizes))
        return
    for future, result in results_of(client, client.get(graph, list(sizes), sync=False)):
        done(future.key, result)
