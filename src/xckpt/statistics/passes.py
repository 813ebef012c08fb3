"""One pass over many tensors, wherever their elements come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xckpt.index import paused_collector
from xckpt.progress import Progress
from xckpt.statistics import chunked, scan
from xckpt.statistics.chunked import ChunkedTensor
from xckpt.statistics.reader import share
from xckpt.statistics.sketch import Sketch, SketchSum
from xckpt.statistics.store import open_stores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xckpt.statistics.blocks import Sketcher
    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.reader import Reader
    from xckpt.statistics.scan import Operation
    from xckpt.statistics.workspace import Workspace

__all__ = ["Member", "one_pass", "sketches"]

# What is kept of an interrupted scan of one tensor: 1 GiB of float32 at a time; whole leaves.
_STRETCH = 1 << 28


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor that is described on its own.

    Parameters
    ----------
    name : str
        Its own name in the file.
    reader : Reader or ChunkedTensor
        Its elements.
    """

    name: str
    reader: Reader | ChunkedTensor


class SketchPass:
    """The operation that makes sketches."""

    def start(
        self, kind: Kind, size: int, row: int, argument: Any, workspace: Workspace
    ) -> Sketcher:
        """Begin with some elements of a tensor."""
        from xckpt.statistics.blocks import Sketcher

        return Sketcher(kind, size, row, workspace)


def sketches(
    members: Sequence[Member],
    finish: Callable[[int, Sketch], Any] | None = None,
    *,
    progress: Progress | None = None,
    cache: bool = True,
) -> list[Any]:
    """Sketch tensors, those that are kept from an earlier scan without reading them."""
    results: list[Any] = [None] * len(members)
    with open_stores([member.reader for member in members], enabled=cache) as stores:
        wanted: list[list[tuple[int, int]]] = []
        parts: dict[tuple[int, int], _Part] = {}
        totals: dict[int, SketchSum] = {}
        missing: list[int] = []

        def add(number: int, sketch: Sketch) -> None:
            reader = members[number].reader
            total = totals.pop(number, None) or SketchSum(reader.kind, reader.size)
            total.add(sketch)
            missing[number] -= 1
            if missing[number]:
                totals[number] = total
                return
            whole = total.result()
            results[number] = whole if finish is None else finish(number, whole)

        def receive(number: int, stretch: int, sketch: Sketch) -> None:
            part = parts.get((number, stretch))
            finished = part.add(sketch) if part is not None else None
            if finished is None:
                return
            del parts[number, stretch]
            store = stores[number]
            if store is not None:
                store.put(wanted[number][stretch], finished)
            add(number, finished)

        with paused_collector():
            for number, (member, store) in enumerate(zip(members, stores, strict=True)):
                stretches = _stretches(member.reader)
                missing.append(len(stretches))
                wanted.append([])
                for stretch in stretches:
                    kept = store.get(stretch) if store is not None else None
                    if kept is not None:
                        add(number, kept)
                        continue
                    parts[number, len(wanted[-1])] = _Part(member.reader, *stretch)
                    wanted[-1].append(stretch)
        nothing = [None] * len(members)
        progress = progress or Progress(False, "")  # noqa: FBT003  nobody is told
        one_pass(members, SketchPass(), nothing, receive, progress=progress, wanted=wanted)
    return results


class _Part:
    """Waits for all sketches of one stretch of a tensor."""

    __slots__ = ("_missing", "_reader", "_total")

    def __init__(self, reader: Reader | ChunkedTensor, start: int, stop: int) -> None:
        self._reader = reader
        self._missing = stop - start
        self._total: SketchSum | None = None

    def add(self, sketch: Sketch) -> Sketch | None:
        """Add a sketch; give that of the whole stretch if it was the last one."""
        self._missing -= sketch.count
        if self._total is None:
            if self._missing <= 0:
                return sketch
            self._total = SketchSum(self._reader.kind, self._reader.size)
        self._total.add(sketch)
        return self._total.result() if self._missing <= 0 else None


def one_pass(
    members: Sequence[Member],
    operation: Operation,
    arguments: Sequence[Any],
    receive: Callable[[int, int, Any], None],
    *,
    progress: Progress,
    wanted: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> None:
    """Do something with all elements of some tensors."""
    if wanted is None:
        wanted = [_stretches(member.reader) for member in members]
    jobs: list[scan.Job] = []
    numbers: list[int] = []
    arrays: list[tuple[ChunkedTensor, Any]] = []
    places: list[int] = []
    for number, (member, argument) in enumerate(zip(members, arguments, strict=True)):
        if not wanted[number]:
            continue
        if isinstance(member.reader, ChunkedTensor):
            arrays.append((member.reader, argument))
            places.append(number)
        else:
            jobs.append(scan.Job(member.name, member.reader, argument, wanted[number]))
            numbers.append(number)
    progress.expect(
        sum(share(members[n].reader, *each) for n in (*numbers, *places) for each in wanted[n])
    )
    if jobs:
        scan.run(jobs, operation, lambda n, s, r: receive(numbers[n], s, r), progress.advance)
    chunked.run(arrays, operation, lambda n, r: receive(places[n], 0, r), progress.advance)


def _stretches(reader: Reader | ChunkedTensor) -> list[tuple[int, int]]:
    size = reader.size
    if isinstance(reader, ChunkedTensor) or reader.whole or size <= _STRETCH:
        return [(0, size)]
    return [(start, min(start + _STRETCH, size)) for start in range(0, size, _STRETCH)]
