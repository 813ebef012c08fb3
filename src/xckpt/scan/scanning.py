"""One pass over many tensors, on the threads of this machine or on a cluster.

Streams are cut, and a task reads some cuts, each once, in the order of the file. It returns an
`Accumulator` for each cut. Those of a tensor are merged in the order of its elements, whenever they
arrive. Values that an earlier pass cached are not read again.

What is added up in floating point consists of leaves of `LEAF` elements. Neighbours are merged as
in a binary tree: a node covers ``2**level`` leaves and begins at a multiple of that number.
Therefore results depend on the elements only, not on cuts, blocks, threads or workers.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar
from uuid import uuid4

from xckpt.arrays.streams import ChunkedStream, columns_of, whole_leaves
from xckpt.errors import CheckpointError, locating
from xckpt.index import paused_collector
from xckpt.progress import Progress
from xckpt.scan.cluster import on_cluster, results_of, waiting_client
from xckpt.scan.statistics_cache import Records, key_of, open_records
from xckpt.storage import reading_ahead
from xckpt.storage.limits import cpu_count
from xckpt.storage.requests import IN_FLIGHT, REQUEST_NBYTES
from xckpt.storage.source import empty_array
from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from xckpt.arrays.streams import Block, ElementStream
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

    # Takes a tensor, a stretch of it, the first element of a part, and its accumulator.
    Receive = Callable[[int, int, int, Any], None]
    # Takes the cuts of a task, and the accumulator of each.
    Deliver = Callable[[list["Cut"], list[Any]], None]

#: Size of a block to read, in bytes; several leaves, so that compiled loops are called seldom.
BLOCK_NBYTES = 4 << 20
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
# Limits on small tensors of a local file that are read together: bytes between two of them, and
# bytes of all.
_LARGEST_GAP = 4096
_TOGETHER_NBYTES = 1 << 20
_ALIGNMENT = 64

_thread = threading.local()


def gather(
    streams: Sequence[ElementStream],
    operation: type[Accumulator],
    # From the position of a tensor among the streams and its accumulator to its result.
    finish: Callable[[int, Any], Any],
    progress: Progress | None = None,
    *,
    # Arguments of the operation, one for each tensor.
    arguments: Sequence[Any] | None = None,
    cache: bool = False,
    # Whether to cache stretches of long tensors, so that an interrupted scan resumes in them.
    stretched: bool = False,
    # From the positions of uncached tensors to those that need no pass, with accumulators.
    shortcut: Callable[[list[int]], Iterable[tuple[int, Any]]] | None = None,
) -> list[Any]:
    """Scan tensors, and return a result for each, in order."""
    with open_records(streams, operation.record, enabled=cache) as records:
        outcome = _Outcome(streams, operation, records, finish)
        with paused_collector():
            outcome.plan_reads(stretched=stretched)
        if shortcut is not None:
            missing = [n for n, stretches in enumerate(outcome.uncached) if stretches]
            for tensor, accumulator in shortcut(missing):
                outcome.receive(tensor, 0, 0, accumulator)
                outcome.uncached[tensor].clear()
        cuts = [
            Cut(tensor, stretch, streams[tensor], arguments and arguments[tensor], start, stop)
            for tensor, stretches in enumerate(outcome.uncached)
            for stretch, (start, stop) in enumerate(stretches)
        ]
        progress = progress or Progress(False, "")  # noqa: FBT003  it shows nothing
        progress.expect(sum(cut.nbytes for cut in cuts))
        _scan(cuts, operation, outcome.receive, progress.advance)
    return outcome.results


def load_cached(
    streams: Sequence[Any],
    operation: type[Accumulator],
    finish: Callable[[int, Any], Any] = lambda _, accumulator: accumulator,
) -> list[Any]:
    """Return the results of stretched scans that are cached for each tensor, or None."""
    with open_records(streams, operation.record, enabled=True) as records:
        outcome = _Outcome(streams, operation, records, finish)
        outcome.plan_reads(stretched=True)
    return outcome.results


def _scan(
    cuts: Sequence[Cut],
    operation: type[Accumulator],
    receive: Receive,
    report: Callable[[int], None],
) -> None:
    client = waiting_client()
    chunked = [cut for cut in cuts if isinstance(cut.stream, ChunkedStream)]
    unchunked = [cut for cut in cuts if not isinstance(cut.stream, ChunkedStream)]
    thread_cuts = [cut for cut in unchunked if client is None or cut.stream.local]
    cluster_cuts = [cut for cut in unchunked if client is not None and not cut.stream.local]

    def deliver_all(task: list[Cut], results: list[Any]) -> None:
        for cut, result in zip(task, results, strict=True):
            receive(cut.tensor, cut.stretch, cut.start, result)
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
    deliver: Deliver,
) -> None:
    stopped: list[bool] = []
    one_at_a_time = threading.Lock()

    def work(task: list[Cut]) -> list[Any]:
        if len(task) <= _MANY:
            return scan_cuts(task, operation, stopped)
        # Small tensors keep the interpreter busy, so that several threads are slower than one.
        with one_at_a_time:
            return scan_cuts(task, operation, stopped)

    count = cpu_count()
    with Threads(count, "xckpt-stats") as threads, ExitStack() as stack:
        # Stop reading ahead before the threads, so that none waits for a cancelled read.
        stack.callback(stopped.append, True)  # noqa: FBT003
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


# --- cuts and tasks -------------------------------------------------------------------------------


class Cut(NamedTuple):
    """Elements of a tensor that a task reads."""

    #: Position of the tensor among the streams, and of the stretch among its uncached ones.
    tensor: int
    stretch: int
    stream: Any
    argument: Any
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        nbytes: int = self.stream.share(self.start, self.stop)
        return nbytes


def tasks_of(cuts: Sequence[Cut], piece: int, target: int, most: int) -> Iterator[list[Cut]]:
    """Cut large tensors and join small ones to tasks, in the order of the file."""
    # A cut of a large tensor has `piece` bytes, a task `target` bytes and at most `most` cuts.
    task: list[Cut] = []
    nbytes = 0
    for cut in sorted(cuts, key=lambda cut: (cut.stream.place, cut.tensor, cut.stretch)):
        stream, stop = cut.stream, cut.stop
        # Many small files share a task. The first tensors of a large file wait for its others.
        if nbytes > target // 8 and stream.place[0] != task[-1].stream.place[0]:
            yield task
            task, nbytes = [], 0
        for start, end in stream.cuts(cut.start, stop, piece):
            is_part = end - start < stop - cut.start
            task.append(cut._replace(start=start, stop=end) if is_part else cut)
            nbytes += task[-1].nbytes
            if nbytes >= target or len(task) >= most:
                yield task
                task, nbytes = [], 0
    if task:
        yield task


def ranges_of(cuts: Iterable[Cut]) -> Iterator[Range]:
    """Return the byte ranges of cuts, to read ahead."""
    return chain.from_iterable(cut.stream.ranges(cut.start, cut.stop) for cut in cuts)


def scan_cuts(
    task: list[Cut], operation: type[Accumulator], stopped: Sequence[Any] = ()
) -> list[Any]:
    """Return an accumulator for each cut of a task; end early once `stopped` has an item."""
    if not hasattr(_thread, "buffer"):
        _thread.buffer = empty_array(BLOCK_NBYTES)
    accumulators: list[Any] = []
    for group in _neighbours(task):
        memory = _read_together(group) if len(group) > 1 else None
        first = group[0].stream.place[1]
        for cut in group:
            blocks = None
            if memory is not None:
                start = cut.stream.place[1] - first
                values = memory[start : start + cut.stream.nbytes].view(cut.stream.block_dtype)
                blocks = [(0, (values,))] if cut.stop else []
            accumulators.append(_scan_cut(cut, blocks, operation, stopped))
    return accumulators


def _scan_cut(
    cut: Cut,
    blocks: Iterable[Block] | None,
    operation: type[Accumulator],
    stopped: Sequence[Any],
) -> Accumulator:
    """Return an accumulator for a cut; its blocks are read unless they are given."""
    stream = cut.stream
    accumulator = operation.begin(stream, cut.argument)
    with locating(path=stream.place[0] or None, tensor=stream.tensor or stream.name):
        if blocks is None:
            blocks = stream.blocks(cut.start, cut.stop, _thread.buffer)
            if operation.leaf > 1 and stream.step(_thread.buffer) % stream.leaf:
                blocks = whole_leaves(blocks, stream.leaf)
        update = accumulator.update
        for start, columns in blocks:
            update(start, *columns)
            if stopped:
                break
        accumulator.close()
        if stream.sparse:
            accumulator.imply(stream.size - accumulator.count, stream.row, stream.dead)
        return accumulator


def _neighbours(task: list[Cut]) -> Iterator[list[Cut]]:
    """Group whole small tensors that are next to each other in a file; others are alone."""
    group: list[Cut] = []
    group_source, start, end = None, 0, 0
    for cut in task:
        source, offset = cut.stream.shared_source, cut.stream.place[1]
        is_whole = source is not None and cut.stop - cut.start == cut.stream.size
        is_next = is_whole and source is group_source and 0 <= offset - end <= _LARGEST_GAP
        if group and not (is_next and offset + cut.stream.nbytes - start <= _TOGETHER_NBYTES):
            yield group
            group = []
        if not group:
            start = offset
        group_source, end = source if is_whole else None, offset + cut.stream.nbytes
        group.append(cut)
    if group:
        yield group


def _read_together(group: list[Cut]) -> Array | None:
    """Read small tensors at once, or return None, so that an error is raised for one tensor."""
    stream = group[-1].stream
    first = group[0].stream.place[1]
    # Elements are aligned in memory if they are aligned in the file.
    start = first % _ALIGNMENT
    memory: Array = _thread.buffer[start : start + stream.place[1] + stream.nbytes - first]
    with suppress(OSError, CheckpointError):
        stream.shared_source.read_into([first], memory.data)
        return memory
    return None


# --- results --------------------------------------------------------------------------------------


class _Outcome:
    """Results of tensors as their accumulators arrive, and the stretches that must be read."""

    def __init__(
        self,
        streams: Sequence[ElementStream],
        operation: type[Accumulator],
        records: Sequence[Records | None],
        finish: Callable[[int, Any], Any],
    ) -> None:
        self.streams = streams
        self.operation = operation
        self.records = records
        self.finish = finish
        self.results: list[Any] = [None] * len(streams)
        #: Per tensor: the number of stretches that have not arrived, and the uncached stretches.
        self.missing: list[int] = []
        self.uncached: list[list[tuple[int, int]]] = []
        #: Accumulators of incomplete tensors, by tensor; of incomplete stretches, by tensor and
        #: position among the uncached ones.
        self.wholes: dict[int, _Joined] = {}
        self.parts: dict[tuple[int, int], _Joined] = {}

    def plan_reads(self, *, stretched: bool) -> None:
        """Take cached accumulators, and list the stretches without one."""
        for tensor, stream in enumerate(self.streams):
            stretches = [(0, stream.size)]
            is_divisible = not (isinstance(stream, ChunkedStream) or stream.whole)
            if stretched and is_divisible and stream.size > _STRETCH:
                starts = range(0, stream.size, _STRETCH)
                stretches = [(start, min(start + _STRETCH, stream.size)) for start in starts]
            self.missing.append(len(stretches))
            self.uncached.append([])
            for bounds in stretches:
                accumulator = self._cached(tensor, bounds)
                if accumulator is not None:
                    self._add(tensor, bounds[0], accumulator)
                    continue
                self.parts[tensor, len(self.uncached[-1])] = _Joined(bounds[0])
                self.uncached[-1].append(bounds)

    def receive(self, tensor: int, stretch: int, start: int, part: Accumulator) -> None:
        """Take the accumulator of a part of a stretch, which begins at an element."""
        joined = self.parts.get((tensor, stretch))
        if joined is None:
            return  # another empty chunk of an empty tensor
        joined.add(start, part)
        bounds = self.uncached[tensor][stretch]
        total = joined.total
        if total is None or joined.stop < bounds[1]:
            return
        del self.parts[tensor, stretch]
        records = self.records[tensor]
        if records is not None:
            records.put(key_of(self.streams[tensor], bounds), total.pack())
        self._add(tensor, bounds[0], total)

    def _cached(self, tensor: int, bounds: tuple[int, int]) -> Accumulator | None:
        records, stream = self.records[tensor], self.streams[tensor]
        value = None if records is None else records.get(key_of(stream, bounds))
        if value is None:
            return None
        try:
            return self.operation.unpack(value, stream)
        except LookupError:  # a sketch without channels
            return None

    def _add(self, tensor: int, start: int, part: Accumulator) -> None:
        """Take the accumulator of a stretch."""
        self.missing[tensor] -= 1
        joined = self.wholes.pop(tensor, None) or _Joined(0)
        joined.add(start, part)
        if self.missing[tensor]:
            self.wholes[tensor] = joined
        else:
            self.results[tensor] = self.finish(tensor, joined.total)


class _Joined:
    """The accumulator of a run of elements, to which those of its parts are added in order."""

    def __init__(self, start: int) -> None:
        #: The element up to which all parts have arrived.
        self.stop = start
        self.total: Accumulator | None = None
        self._waiting: dict[int, Accumulator] = {}

    def add(self, start: int, part: Accumulator) -> None:
        """Add a part, unless it has to wait for the one before."""
        self._waiting[start] = part
        while (following := self._waiting.pop(self.stop, None)) is not None:
            self.stop += following.count
            if self.total is None:
                self.total = following
            else:
                self.total.merge(following)


# --- accumulators ---------------------------------------------------------------------------------


class Accumulator:
    """A partial result over a run of elements; it pickles, and is small once it is closed."""

    #: Kind of the records in the cache; empty if results are not cached.
    record = ""
    #: Elements of a leaf; 1 if results do not depend on how elements are cut into runs.
    leaf = 1
    #: Number of elements.
    count: int
    tree: MergeTree[Any]

    @classmethod
    def begin(cls, stream: Any, argument: Any) -> Accumulator:
        """Return an empty accumulator for a tensor; `argument` has options of this tensor."""
        raise NotImplementedError

    @classmethod
    def unpack(cls, data: bytes, stream: Any) -> Accumulator:
        """Return the accumulator from the bytes of `pack`."""
        raise NotImplementedError

    def pack(self) -> bytes:
        """Return the accumulator as bytes, for the cache."""
        raise NotImplementedError

    def update(self, start: int, *columns: Array) -> None:
        """Add the next elements, or pairs in two columns: whole leaves, but for the last."""
        raise NotImplementedError

    def close(self) -> Self:
        """Release the memory of this thread after the last element."""
        return self

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Add the zeros that a sparse tensor does not store, after its last stored element."""
        self.count += zeros

    def merge(self, other: Self) -> None:
        """Add the accumulator of the elements that follow."""
        self.count += other.count
        for node in other.tree.nodes:
            self.tree.add(*node)


Node = TypeVar("Node")


class MergeTree(Generic[Node]):
    """The nodes of a binary tree so far, merged as far as possible; they are added in order."""

    __slots__ = ("empty", "merged", "nodes")

    def __init__(self, merged: Callable[[Node, Node], Node], empty: Node) -> None:
        self.merged = merged
        self.empty = empty
        #: Nodes, each after its level and its position within the level.
        self.nodes: list[tuple[int, int, Node]] = []

    def add(self, level: int, position: int, node: Node) -> None:
        """Add a node that follows the others, and merge it with its neighbours."""
        nodes = self.nodes
        while position & 1 and nodes:
            level_before, position_before, node_before = nodes[-1]
            if (level_before, position_before) != (level, position - 1):
                break
            nodes.pop()
            node = self.merged(node_before, node)
            level, position = level + 1, position >> 1
        nodes.append((level, position, node))

    def total(self) -> Node:
        """Return the merged value of all elements, once all leaves were added."""
        total = self.empty
        for _, _, node in reversed(self.nodes):
            total = self.merged(node, total)
        return total


def runs(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Cut a range of leaves into the largest nodes of the tree: their levels and positions."""
    while count:
        level = count.bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)
        yield level, first >> level
        first += 1 << level
        count -= 1 << level


# --- a cluster ------------------------------------------------------------------------------------


def _run_on_cluster(
    client: Any,
    cuts: Sequence[Cut],
    operation: type[Accumulator],
    deliver: Deliver,
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
        return task[0].stream.place[0], sum(cut.nbytes for cut in task)

    on_cluster(client, tasks, partial(_scan_ahead, operation=operation), deliver, file_and_size)


def _scan_ahead(task: list[Cut], operation: type[Accumulator]) -> list[Any]:
    """Run a task on a worker, with its own reading ahead."""
    with reading_ahead(ranges_of(task)):
        return scan_cuts(task, operation)  # the cluster cancels tasks itself


# --- chunks of dask arrays ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ChunkTask:
    """The task of a chunk; it pickles."""

    operation: type[Accumulator]
    stream: ElementStream
    argument: Any
    start: int

    def __call__(self, values: Array) -> Accumulator:
        accumulator = self.operation.begin(self.stream, self.argument)
        if values.size:
            accumulator.update(self.start, *columns_of(values))
        return accumulator.close()


def _run_chunks(
    client: Any,
    cuts: Sequence[Cut],
    operation: type[Accumulator],
    receive: Receive,
    report: Callable[[int], None],
) -> None:
    """Scan all chunks of dask arrays, in one run of a scheduler."""
    import dask

    arrays = dask.optimize(*(cut.stream.flat(operation.leaf) for cut in cuts))
    graph: dict[Any, Any] = {}
    for array in arrays:
        graph.update(array.__dask_graph__())
    token = f"xckpt-stats-{uuid4().hex}"
    places = {}
    for cut, array in zip(cuts, arrays, strict=True):
        stream = copy(cut.stream)
        stream.array = None  # the array holds the whole graph
        start = 0
        for chunk, size in enumerate(array.chunks[0]):
            key = (token, cut.tensor, chunk)
            work = _ChunkTask(operation, stream, cut.argument, start)
            graph[key] = (work, (array.name, chunk))
            places[key] = start, cut.stream.share(start, start + size)
            start += size

    def done(key: Any, result: Any, *_: Any) -> None:
        if key in places:
            start, nbytes = places[key]
            _, tensor, _ = key
            receive(tensor, 0, start, result)
            report(nbytes)

    if client is None:
        import dask.threaded
        from dask.base import get_scheduler
        from dask.callbacks import Callback

        get = get_scheduler() or dask.threaded.get
        with Callback(posttask=done):
            get(graph, list(places))
        return
    for future, result in results_of(client, client.get(graph, list(places), sync=False)):
        done(future.key, result)
