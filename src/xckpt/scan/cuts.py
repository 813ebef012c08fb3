"""Cuts of tensors, the tasks that they are put into, and the work of one task.

A task reads its bytes once, in the order of the file. Small tensors that are next to each other in
a local file are read together.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.arrays.streams import whole_leaves
from xckpt.errors import CheckpointError, locating
from xckpt.scan.accumulators import BLOCK_NBYTES
from xckpt.storage.source import empty_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from xckpt.arrays.streams import Block
    from xckpt.scan.accumulators import Accumulator
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

# Limits on small tensors of a local file that are read together: bytes between two of them, and
# bytes of all.
_LARGEST_GAP = 4096
_TOGETHER_NBYTES = 1 << 20
_ALIGNMENT = 64

_thread = threading.local()


class Cut(NamedTuple):
    """Elements of a tensor that a task reads."""

    #: Number of the tensor, and position of the stretch among its uncached ones.
    number: int
    position: int
    reader: Any
    argument: Any
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        nbytes: int = self.reader.share(self.start, self.stop)
        return nbytes


def tasks_of(cuts: Sequence[Cut], piece: int, target: int, most: int) -> Iterator[list[Cut]]:
    """Cut large tensors and join small ones to tasks, in the order of the file."""
    # A cut of a large tensor has `piece` bytes, a task `target` bytes and at most `most` cuts.
    task: list[Cut] = []
    nbytes = 0
    for cut in sorted(cuts, key=lambda cut: (cut.reader.place, cut.number, cut.position)):
        reader, stop = cut.reader, cut.stop
        # Many small files share a task. The first tensors of a large file wait for its others.
        if nbytes > target // 8 and reader.place[0] != task[-1].reader.place[0]:
            yield task
            task, nbytes = [], 0
        for start, end in reader.cuts(cut.start, stop, piece):
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
    return chain.from_iterable(cut.reader.ranges(cut.start, cut.stop) for cut in cuts)


def scan_cuts(task: list[Cut], operation: type[Accumulator], stop: Any) -> list[Any]:
    """Return an accumulator for each cut of a task; end early once the event `stop` is set."""
    if not hasattr(_thread, "buffer"):
        _thread.buffer = empty_array(BLOCK_NBYTES)
    accumulators: list[Any] = []
    for group in _neighbours(task):
        memory = _read_together(group) if len(group) > 1 else None
        first = group[0].reader.place[1]
        for cut in group:
            blocks = None
            if memory is not None:
                start = cut.reader.place[1] - first
                values = memory[start : start + cut.reader.nbytes].view(cut.reader.block_dtype)
                blocks = [(0, (values,))] if cut.stop else []
            accumulators.append(_scan_cut(cut, blocks, operation, stop))
    return accumulators


def _neighbours(task: list[Cut]) -> Iterator[list[Cut]]:
    """Group whole small tensors that are next to each other in a file; others are alone."""
    group: list[Cut] = []
    group_source, start, end = None, 0, 0
    for cut in task:
        source, offset = cut.reader.shared_source, cut.reader.place[1]
        is_whole = source is not None and cut.stop - cut.start == cut.reader.size
        is_next = is_whole and source is group_source and 0 <= offset - end <= _LARGEST_GAP
        if group and not (is_next and offset + cut.reader.nbytes - start <= _TOGETHER_NBYTES):
            yield group
            group = []
        if not group:
            start = offset
        group_source, end = source if is_whole else None, offset + cut.reader.nbytes
        group.append(cut)
    if group:
        yield group


def _read_together(group: list[Cut]) -> Array | None:
    """Read small tensors at once, or return None, so that an error is raised for one tensor."""
    reader = group[-1].reader
    first = group[0].reader.place[1]
    # Elements are aligned in memory if they are aligned in the file.
    start = first % _ALIGNMENT
    memory: Array = _thread.buffer[start : start + reader.place[1] + reader.nbytes - first]
    with suppress(OSError, CheckpointError):
        reader.shared_source.read_into([first], memory.data)
        return memory
    return None


def _scan_cut(
    cut: Cut,
    blocks: Iterable[Block] | None,
    operation: type[Accumulator],
    stop: Any,
) -> Accumulator:
    """Return an accumulator for a cut; its blocks are read unless they are given."""
    stream = cut.reader
    accumulator = operation.begin(stream, cut.argument)
    with locating(path=stream.place[0] or None, tensor=stream.name):
        if blocks is None:
            blocks = stream.blocks(cut.start, cut.stop, _thread.buffer)
            if stream.step(_thread.buffer) % operation.leaf:
                blocks = whole_leaves(blocks, operation.leaf)
        update, is_stopped = accumulator.update, stop.is_set
        for start, columns in blocks:
            update(start, *columns)
            if is_stopped():
                break
        accumulator.close()
        if stream.sparse:
            accumulator.imply(stream.size - accumulator.count, stream.row, stream.dead)
        return accumulator
