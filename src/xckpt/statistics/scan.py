"""The scan: spans of elements in file order, on the threads of this machine or on a cluster.

A task reads its bytes once, and gives back small values that are merged by tree position, never
by time of arrival.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from xckpt.errors import locating
from xckpt.statistics import cluster
from xckpt.statistics.moments import LEAF
from xckpt.statistics.reader import share
from xckpt.statistics.readers import SparseReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.reader import Reader
    from xckpt.statistics.workspace import Workspace

__all__ = ["Accumulator", "Job", "Operation", "Span", "Task", "cpu_count", "run", "scan_spans"]

# Whole leaves of every type, and a power of two of them: one node of the tree of moments.
_TASK_NBYTES = 16 << 20
_CLUSTER_TASK_NBYTES = 64 << 20
# Tensors that share a task, so that progress is seen; and how many make a task of small ones.
_MOST_SPANS = 256
_MANY = 64


class Accumulator(Protocol):
    """Takes blocks of elements, gives a small result."""

    def update(self, start: int, values: np.ndarray[Any, Any]) -> None:
        """Add elements."""

    def result(self, implied: int = 0) -> Any:
        """Return what was found, with some more zeros that are not stored."""


class Operation(Protocol):
    """What is done with elements; pickles."""

    def start(
        self, kind: Kind, size: int, row: int, argument: Any, workspace: Workspace
    ) -> Accumulator:
        """Begin with some elements of a tensor: their kind, their number, and that in a row."""


@dataclass(frozen=True, slots=True)
class Job:
    """A tensor to scan.

    Parameters
    ----------
    name : str
        Of the tensor, for messages.
    reader : Reader
        Its elements.
    argument : object
        What the operation wants to know of this tensor.
    stretches : sequence of (int, int)
        Half-open ranges of elements that are to be scanned.
    """

    name: str
    reader: Reader
    argument: Any
    stretches: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of a tensor that one task reads.

    Parameters
    ----------
    job, stretch : int
        Number of the job, and of the stretch in it.
    name : str
        Of the tensor.
    reader : Reader
        Its elements.
    argument : object
        See `Job`.
    start, stop : int
        Half-open range.
    """

    job: int
    stretch: int
    name: str
    reader: Reader
    argument: Any
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Share of what there is to read."""
        return share(self.reader, self.start, self.stop)


Task = list[Span]


def run(
    jobs: Sequence[Job],
    operation: Operation,
    receive: Callable[[int, int, Any], None],
    report: Callable[[int], object],
) -> None:
    """Scan tensors."""
    client = cluster.active_client()
    here = [n for n, job in enumerate(jobs) if client is None or job.reader.local]
    there = [n for n, job in enumerate(jobs) if not (client is None or job.reader.local)]

    def deliver(task: Task, results: list[Any]) -> None:
        for span, result in zip(task, results, strict=True):
            receive(span.job, span.stretch, result)
        report(sum(span.nbytes for span in task))

    if there:
        tasks = _tasks(jobs, there, _CLUSTER_TASK_NBYTES)
        cluster.run(client, tasks, operation, deliver)
    if here:
        _run_on_threads(_tasks(jobs, here, _TASK_NBYTES), operation, deliver)


def scan_spans(task: Task, operation: Operation, workspace: Workspace, stop: Any) -> list[Any]:
    """Do one task."""
    return [_scan_span(span, operation, workspace, stop) for span in task]


def _scan_span(span: Span, operation: Operation, workspace: Workspace, stop: Any) -> Any:
    reader = span.reader
    sparse = isinstance(reader, SparseReader)
    # How many values are stored is known once repeated ones are added up.
    size, row = (-1, 0) if sparse else (reader.size, reader.row)
    accumulator = operation.start(reader.kind, size, row, span.argument, workspace)
    with locating(path=reader.place[0] or None, tensor=span.name):
        if isinstance(reader, SparseReader):
            return _scan_sparse(reader, accumulator, stop)
        for at, values in reader.blocks(span.start, span.stop, workspace):
            accumulator.update(at, values)
            if stop.is_set():
                break
    return accumulator.result()


def _scan_sparse(reader: SparseReader, accumulator: Accumulator, stop: Any) -> Any:
    stored = dead = 0
    for at, values, dead_rows in reader.rows():
        if len(values):
            accumulator.update(at, values)
        stored, dead = at + len(values), dead + dead_rows
        if stop.is_set():
            break
    result = accumulator.result(reader.size - stored)
    return result.closed(stored, reader.row, dead) if hasattr(result, "closed") else result


def _tasks(jobs: Sequence[Job], chosen: Sequence[int], target: int) -> Iterator[Task]:
    """Cut tensors, and put small ones together."""
    task: Task = []
    nbytes = 0
    for number in sorted(chosen, key=lambda number: jobs[number].reader.place):
        for span in _spans(number, jobs[number], target):
            task.append(span)
            nbytes += span.nbytes
            if nbytes >= target or len(task) >= _MOST_SPANS:
                yield task
                task, nbytes = [], 0
    if task:
        yield task


def _spans(number: int, job: Job, target: int) -> Iterator[Span]:
    reader = job.reader
    step = max(LEAF, target // reader.kind.itemsize)
    for stretch, (start, stop) in enumerate(job.stretches):
        length = max(1, stop - start) if reader.whole else step
        for at in range(start, max(stop, start + 1), length):
            end = min(at + length, stop)
            yield Span(number, stretch, job.name, reader, job.argument, at, end)


def _run_on_threads(
    tasks: Iterator[Task], operation: Operation, deliver: Callable[[Task, list[Any]], None]
) -> None:
    from xckpt.statistics.workspace import Workspace

    local = threading.local()
    stop = threading.Event()
    one_at_a_time = threading.Lock()

    def work(task: Task) -> list[Any]:
        if not hasattr(local, "workspace"):
            local.workspace = Workspace()
        # Of small tensors most time is spent in the interpreter, where threads that take turns
        # are slower than one alone.
        with one_at_a_time if len(task) > _MANY else nullcontext():
            return scan_spans(task, operation, local.workspace, stop)

    threads = cpu_count()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="xckpt-stats")
    try:
        # Few more than can run: a file of any size has a bounded number of tasks.
        running = {pool.submit(work, task): task for task in islice(tasks, 2 * threads)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                deliver(running.pop(future), future.result())
            for task in islice(tasks, len(done)):
                running[pool.submit(work, task)] = task
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def cpu_count() -> int:
    """Return how many threads to use: dask's ``num_workers``, else what this process may use."""
    import dask
    from dask.system import CPU_COUNT

    return int(dask.config.get("num_workers", None) or CPU_COUNT)
