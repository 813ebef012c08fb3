"""One pass over many tensors, on the threads of this machine or on a cluster.

A task reads its bytes once, and gives back small values that are merged by their position in the
tensor, never by the time of their arrival. What is kept of an earlier pass is not read again.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np

from xckpt.arrays.sparse import dense_values
from xckpt.errors import CheckpointError, locating
from xckpt.index import paused_collector
from xckpt.progress import Progress
from xckpt.scan.accumulators import BLOCK_NBYTES
from xckpt.scan.cluster import on_cluster, waiting_client
from xckpt.scan.kinds import magnitudes
from xckpt.scan.readers import ChunkedTensor
from xckpt.scan.statistics_cache import key_of, open_records
from xckpt.scan.trees import LEAF
from xckpt.storage import reading_ahead
from xckpt.storage.limits import cpu_count
from xckpt.storage.requests import IN_FLIGHT, REQUEST_NBYTES
from xckpt.storage.source import empty_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from xckpt.scan.accumulators import Accumulator
    from xckpt.scan.readers import Reader
    from xckpt.scan.statistics_cache import Records
    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range

# What is kept of an interrupted scan of one tensor: 1 GiB of float32 at a time; whole leaves.
_STRETCH = 1 << 28
# Whole leaves of every type, and a power of two of them: one node of the tree of moments.
_TASK_NBYTES = 16 << 20
_CLUSTER_TASK_NBYTES = 64 << 20
# Of an object store: what as many requests as are under way at a time bring in four turns.
_FAR_TASK_NBYTES = 4 * IN_FLIGHT * REQUEST_NBYTES
# Tensors that share a task, so that progress is seen; and how many make a task of small ones.
_MOST_CUTS = 256
_MOST_FAR_CUTS = 4096
_MANY = 64
# Small tensors of a local file that are read at once: what is between them, and all of them.
_LARGEST_GAP = 4096
_TOGETHER_NBYTES = 1 << 20
_ALIGNMENT = 64

Array = np.ndarray[Any, np.dtype[Any]]

_thread = threading.local()


def gather(
    readers: Sequence[Reader],
    operation: type[Accumulator],
    finish: Callable[[int, Any], Any],
    progress: Progress | None = None,
    *,
    arguments: Sequence[Any] | None = None,
    cache: bool = False,
    stretched: bool = False,
    shortcut: Callable[[list[int]], Iterable[tuple[int, Any]]] | None = None,
) -> list[Any]:
    """Return what `finish` makes of what is found in each tensor.

    Each is known by its number; `arguments` are for the operation. A `stretched` scan keeps long
    tensors in stretches. A `shortcut` may find some of those that are not kept without a pass.
    """
    with open_records(readers, operation.record, enabled=cache) as records:
        found = _Outcome(readers, operation, records, finish)
        with paused_collector():
            found.take_what_is_kept(stretched=stretched)
        if shortcut is not None:
            for number, whole in shortcut([n for n, some in enumerate(found.wanted) if some]):
                found.receive(number, 0, whole)
                found.wanted[number].clear()
        cuts = [
            Cut(number, at, readers[number], arguments and arguments[number], *stretch)
            for number, some in enumerate(found.wanted)
            for at, stretch in enumerate(some)
        ]
        progress = progress or Progress(False, "")  # noqa: FBT003  nobody is told
        progress.expect(sum(cut.nbytes for cut in cuts))
        _scan(cuts, operation, found.receive, progress.advance)
    return found.results


def kept(readers: Sequence[Reader], operation: type[Accumulator]) -> list[Any]:
    """Return what is kept of a stretched scan of each tensor, None if that is not all of it."""
    with open_records(readers, operation.record, enabled=True) as records:
        found = _Outcome(readers, operation, records, lambda _, whole: whole)
        found.take_what_is_kept(stretched=True)
    return found.results


class _Outcome:
    """What is found of tensors by and by, and what still has to be read."""

    def __init__(
        self,
        readers: Sequence[Reader],
        operation: type[Accumulator],
        records: Sequence[Records | None],
        finish: Callable[[int, Any], Any],
    ) -> None:
        self.readers = readers
        self.operation = operation
        self.records = records
        self.finish = finish
        self.results: list[Any] = [None] * len(readers)
        #: Of each tensor: how many stretches are missing, and those to be read.
        self.missing: list[int] = []
        self.wanted: list[list[tuple[int, int]]] = []
        self.wholes: dict[int, Accumulator] = {}
        self.parts: dict[tuple[int, int], Accumulator | None] = {}

    def take_what_is_kept(self, *, stretched: bool) -> None:
        """Find out what has to be read."""
        for number, reader in enumerate(self.readers):
            stretches = _stretches(reader) if stretched else [(0, reader.size)]
            self.missing.append(len(stretches))
            self.wanted.append([])
            for stretch in stretches:
                kept = self._cached(number, stretch)
                if kept is not None:
                    self._add(number, kept)
                    continue
                self.parts[number, len(self.wanted[-1])] = None
                self.wanted[-1].append(stretch)

    def receive(self, number: int, stretch: int, part: Accumulator) -> None:
        """Take what was found in a part of a stretch of a tensor."""
        if (number, stretch) not in self.parts:
            return  # another chunk without elements, of a tensor that has none
        total = _merged(self.parts[number, stretch], part)
        start, stop = self.wanted[number][stretch]
        if total.count < stop - start:
            self.parts[number, stretch] = total
            return
        del self.parts[number, stretch]
        records = self.records[number]
        if records is not None:
            records.put(key_of(self.readers[number], (start, stop)), total.pack())
        self._add(number, total)

    def _cached(self, number: int, stretch: tuple[int, int]) -> Accumulator | None:
        records, reader = self.records[number], self.readers[number]
        value = None if records is None else records.get(key_of(reader, stretch))
        if value is None:
            return None
        try:
            return self.operation.unpack(value, reader)
        except LookupError:  # a sketch without channels
            return None

    def _add(self, number: int, found: Accumulator) -> None:
        self.missing[number] -= 1
        whole = _merged(self.wholes.pop(number, None), found)
        if self.missing[number]:
            self.wholes[number] = whole
        else:
            self.results[number] = self.finish(number, whole)


def _merged(total: Accumulator | None, part: Accumulator) -> Accumulator:
    if total is None:
        return part
    total.merge(part)
    return total


def _stretches(reader: Reader) -> list[tuple[int, int]]:
    size = reader.size
    if isinstance(reader, ChunkedTensor) or reader.whole or size <= _STRETCH:
        return [(0, size)]
    return [(start, min(start + _STRETCH, size)) for start in range(0, size, _STRETCH)]


class Cut(NamedTuple):
    """Elements of a tensor, by its number and that of the stretch, that one task reads."""

    number: int
    stretch: int
    reader: Any
    argument: Any
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Share of what there is to read."""
        nbytes: int = self.reader.share(self.start, self.stop)
        return nbytes


def _scan(
    cuts: Sequence[Cut],
    operation: type[Accumulator],
    receive: Callable[[int, int, Any], None],
    report: Callable[[int], None],
) -> None:
    client = waiting_client()
    chunked = [cut for cut in cuts if isinstance(cut.reader, ChunkedTensor)]
    others = [cut for cut in cuts if not isinstance(cut.reader, ChunkedTensor)]
    here = [cut for cut in others if client is None or cut.reader.local]
    there = [cut for cut in others if client is not None and not cut.reader.local]

    def deliver_all(task: list[Cut], results: list[Any]) -> None:
        for cut, result in zip(task, results, strict=True):
            receive(cut.number, cut.stretch, result)
        report(sum(cut.nbytes for cut in task))

    if there:
        _run_on_cluster(client, there, operation, deliver_all)
    if here:
        tasks = list(_tasks(here, _TASK_NBYTES, _TASK_NBYTES, _MOST_CUTS))
        _run_on_threads(tasks, operation, deliver_all)
    if chunked:
        _run_chunks(client, chunked, operation, receive, report)


def _tasks(cuts: Sequence[Cut], piece: int, target: int, most: int) -> Iterator[list[Cut]]:
    """Cut tensors in the order of the file, and put small pieces together."""
    task: list[Cut] = []
    nbytes = 0
    for cut in sorted(cuts, key=lambda cut: (cut.reader.place, cut.number, cut.stretch)):
        reader, stop = cut.reader, cut.stop
        # Many small files share a task; what begins a large one waits for the rest of that.
        if nbytes > target // 8 and reader.place[0] != task[-1].reader.place[0]:
            yield task
            task, nbytes = [], 0
        step = max(LEAF, piece // reader.kind.itemsize)
        if reader.whole:
            step = max(1, stop - cut.start)
        for at in range(cut.start, max(stop, cut.start + 1), step):
            end = min(at + step, stop)
            task.append(cut._replace(start=at, stop=end) if step < stop - cut.start else cut)
            nbytes += task[-1].nbytes
            if nbytes >= target or len(task) >= most:
                yield task
                task, nbytes = [], 0
    if task:
        yield task


def _ranges(cuts: Iterable[Cut]) -> Iterator[Range]:
    return chain.from_iterable(cut.reader.ranges(cut.start, cut.stop) for cut in cuts)


def scan_cuts(task: list[Cut], operation: type[Accumulator], stop: Any) -> list[Any]:
    """Do one task."""
    if not hasattr(_thread, "buffer"):
        _thread.buffer = empty_array(BLOCK_NBYTES)
    found: list[Any] = []
    for some in _neighbours(task):
        memory = _read_together(some) if len(some) > 1 else None
        first = some[0].reader.place[1]
        for cut in some:
            blocks = None
            if memory is not None:
                start = cut.reader.place[1] - first
                values = memory[start : start + cut.reader.nbytes].view(cut.reader.block_dtype)
                blocks = [(0, values)] if cut.stop else []
            found.append(_scan_cut(cut, blocks, operation, stop))
    return found


def _neighbours(task: list[Cut]) -> Iterator[list[Cut]]:
    """Cut a task so that whole small tensors that are next to each other in a file are together."""
    some: list[Cut] = []
    source, start, end = None, 0, 0
    for cut in task:
        own, at = cut.reader.shared_source, cut.reader.place[1]
        is_whole = own is not None and cut.stop - cut.start == cut.reader.size
        is_next = is_whole and own is source and 0 <= at - end <= _LARGEST_GAP
        if some and not (is_next and at + cut.reader.nbytes - start <= _TOGETHER_NBYTES):
            yield some
            some = []
        if not some:
            start = at
        source, end = own if is_whole else None, at + cut.reader.nbytes
        some.append(cut)
    if some:
        yield some


def _read_together(some: list[Cut]) -> Array | None:
    """Read small tensors at once; None if that fails: read one by one, an error names its own."""
    reader = some[-1].reader
    first = some[0].reader.place[1]
    # As far from an aligned place as in the file, of which elements are multiples.
    start = first % _ALIGNMENT
    memory: Array = _thread.buffer[start : start + reader.place[1] + reader.nbytes - first]
    with suppress(OSError, CheckpointError):
        reader.shared_source.read_into(first, memory.data)
        return memory
    return None


def _scan_cut(
    cut: Cut,
    blocks: Iterable[tuple[int, Any]] | None,
    operation: type[Accumulator],
    stop: Any,
) -> Accumulator:
    """Describe a cut; its blocks are read unless they are there."""
    reader = cut.reader
    found = operation.begin(reader, cut.argument)
    with locating(path=reader.place[0] or None, tensor=reader.name):
        if not reader.sparse:
            if blocks is None:
                blocks = reader.blocks(cut.start, cut.stop, _thread.buffer)
            for at, values in blocks:
                found.update(at, values)
                if stop.is_set():
                    break
            return found.close()
        dead = 0
        for at, values, dead_rows in reader.rows():
            if len(values):
                found.update(at, values)
            dead += dead_rows
            if stop.is_set():
                break
        found.close()
        found.imply(reader.size - found.count, reader.row, dead)
        return found


def _run_on_threads(
    tasks: Sequence[list[Cut]],
    operation: type[Accumulator],
    deliver: Callable[[list[Cut], list[Any]], None],
) -> None:
    stop = threading.Event()
    one_at_a_time = threading.Lock()

    def work(task: list[Cut]) -> list[Any]:
        # Of small tensors most time is spent in the interpreter, where threads that take turns
        # are slower than one alone.
        with one_at_a_time if len(task) > _MANY else nullcontext():
            return scan_cuts(task, operation, stop)

    threads = cpu_count()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="xckpt-stats")
    try:
        # Ended before the threads are: nobody waits for what is no longer wanted.
        with reading_ahead(_ranges(chain.from_iterable(tasks))):
            left = iter(tasks)
            # Few more than can run: results are merged as they come.
            running = {pool.submit(work, task): task for task in islice(left, 2 * threads)}
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    deliver(running.pop(future), future.result())
                for task in islice(left, len(done)):
                    running[pool.submit(work, task)] = task
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


# --- a cluster -----------------------------------------------------------------------------------


def _run_on_cluster(
    client: Any,
    cuts: Sequence[Cut],
    operation: type[Accumulator],
    deliver: Callable[[list[Cut], list[Any]], None],
) -> None:
    target, most = _CLUSTER_TASK_NBYTES, _MOST_CUTS
    sources = {id(source): source for source, _, _ in _ranges(cuts)}
    if any(map(_is_far, sources.values())):
        # A worker reads ahead within a task, and at the end of each it waits for a request.
        threads = sum(client.nthreads().values())
        share = sum(cut.nbytes for cut in cuts) // max(1, threads)
        target = max(REQUEST_NBYTES, min(share, _FAR_TASK_NBYTES))
        most = _MOST_FAR_CUTS
    tasks = list(_tasks(cuts, _CLUSTER_TASK_NBYTES, target, most))

    def place(task: list[Cut]) -> tuple[str, int]:
        return task[0].reader.place[0], sum(cut.nbytes for cut in task)

    on_cluster(client, tasks, partial(_scan_ahead, operation=operation), deliver, place)


def _is_far(source: Source) -> bool:
    with suppress(OSError, CheckpointError):  # reading it tells
        return source.far is not None
    return False


def _scan_ahead(task: list[Cut], operation: type[Accumulator]) -> list[Any]:
    """Do one task on a worker, which reads ahead for itself."""
    with reading_ahead(_ranges(task)):
        return scan_cuts(task, operation, _Never())


class _Never:
    """Stands for an event that nobody sets: the cluster cancels tasks itself."""

    def is_set(self) -> bool:
        return False


# --- chunks of dask arrays -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ChunkTask:
    """What is done with a chunk; pickles."""

    operation: type[Accumulator]
    reader: Reader
    argument: Any
    start: int

    def __call__(self, block: Any) -> Accumulator:
        values = dense_values(block).reshape(-1)
        if values.dtype.kind == "c":
            values = magnitudes(values)
        found = self.operation.begin(self.reader, self.argument)
        if values.size:
            found.update(self.start, values)
        return found.close()


def _run_chunks(
    client: Any,
    cuts: Sequence[Cut],
    operation: type[Accumulator],
    receive: Callable[[int, int, Any], None],
    report: Callable[[int], None],
) -> None:
    """Do something with all chunks of some arrays."""
    import dask
    from dask._task_spec import Task, TaskRef

    arrays = dask.optimize(*(cut.reader.array for cut in cuts))
    graph: dict[Any, Any] = {}
    for array in arrays:
        graph.update(array.__dask_graph__())
    token = f"xckpt-stats-{uuid4().hex}"
    sizes = {}
    for number, (cut, array) in enumerate(zip(cuts, arrays, strict=True)):
        about = copy(cut.reader)
        about.array = None  # which is the graph
        for position, start, stop in cut.reader.chunks():
            key = (token, number, *position)
            work = _ChunkTask(operation, about, cut.argument, start)
            graph[key] = Task(key, work, TaskRef((array.name, *position)))
            sizes[key] = cut.reader.share(start, stop)

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
    from distributed import as_completed

    completed: Any = as_completed  # untyped
    futures = client.get(graph, list(sizes), sync=False)
    try:
        for future, result in completed(futures, with_results=True):
            done(future.key, result)
    finally:
        client.cancel(futures)
