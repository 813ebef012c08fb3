"""A plan and the data of its parts become files: complete, or absent.

Dask arrays are computed first, all in one graph, straight into their places. What they cannot be
written to directly (parts that are compressed) they are computed into a temporary file for. Then
everything else is streamed in file order, and the files get their names
(`xckpt.storage.sink.publish`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.dtypes import ELEMENT_TYPES, stored_dtype
from xckpt.progress import Progress
from xckpt.storage.sink import publish
from xckpt.writing.data import DaskData, LiteralData, SpooledData
from xckpt.writing.items import Item, literal_item
from xckpt.writing.regions import is_scattered, store, store_delayed
from xckpt.writing.streaming import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.plan import Extent, Literal, Plan, Written
    from xckpt.storage import Source
    from xckpt.storage.sink import Place, Sink
    from xckpt.writing.casting import Cast
    from xckpt.writing.entries import Entry
    from xckpt.writing.fitting import Fitted

__all__ = ["Job"]


class _File(NamedTuple):
    """One file of a checkpoint: its name if it is a companion, its plan and the data."""

    name: str | None
    plan: Plan
    items: list[Item]


class _Store(NamedTuple):
    """A dask array and where it is computed into: which of the files, and where in it."""

    data: DaskData
    file: int
    offset: int


class _Begun(NamedTuple):
    """The temporary files: one for each file, and last the spool, if there is one."""

    sinks: list[Sink]

    def abort(self) -> None:
        for sink in self.sinks:
            sink.abort()


class Job:
    """All that is known of a save before a byte is written.

    Parameters
    ----------
    plan : Plan
        Of the format.
    fitted : Fitted
        The tensors and their data.
    cast : {"exact", "allow", "never"}
        What conversions may lose.
    open_sink : callable
        ``open_sink(name)`` begins the companion of that name, or the file itself for None. It
        must pickle if another process is to write.
    label : str
        Of the file, for the progress bar.
    before : Item, optional
        What the file begins with, ahead of all that is planned.
    replaced : sequence of Source
        Files that are read and replaced: nobody else may have changed them in the meantime.
    """

    def __init__(
        self,
        plan: Plan,
        fitted: Fitted,
        cast: Cast,
        open_sink: Callable[[str | None], Sink],
        label: str,
        *,
        before: Item | None = None,
        replaced: Sequence[Source] = (),
    ) -> None:
        self._label = label
        self._cast = cast
        self._stores: list[_Store] = []
        self._spooled = 0
        self._spool = 1 + len(plan.companions)
        # Companions first, so that a file refers to nothing that is not there.
        plans: list[tuple[str | None, Plan]] = [*plan.companions.items(), (None, plan)]
        files = []
        for number, (name, each) in enumerate(plans):
            items = [self._item(e, fitted.entries[e.tensor], number) for e in each.extents]
            items += [literal_item(literal) for literal in each.literals]
            items += [before] if before is not None and name is None else []
            files.append(_File(name, each, sorted(items, key=_position)))
        self._files = _Files(files, open_sink, self._spooled, self._reserved(), replaced)

    def run(self, progress: Any = None) -> None:
        """Write everything now; after an error nothing is left."""
        with Progress(progress, self._label, self._files.nbytes) as bar:
            begun = self._files.begin()
            try:
                if self._stores:
                    import dask

                    tasks = [
                        store(data, begun.sinks[file].place, offset, bar.name)
                        for data, file, offset in self._stores
                    ]
                    dask.compute(*tasks)
                self._files.finish(begun, (), bar)
            finally:
                begun.abort()

    def delayed(self) -> Any:
        """Make the tasks that write everything."""
        import dask

        begun = dask.delayed(self._files.begin, pure=False)()
        count = len(self._files.files) + (self._spooled > 0)
        places = [dask.delayed(_place_of, pure=True)(begun, number) for number in range(count)]
        tasks = [
            task
            for data, file, offset in self._stores
            for task in store_delayed(data, places[file], offset)
        ]
        return dask.delayed(self._files.finish, pure=False)(begun, tasks)

    def _item(self, extent: Extent, entry: Entry, file: int) -> Item:
        order = entry.tensor.order if entry.tensor.layout == "dense" else "C"
        data = entry.parts[extent.role].data(
            extent.part, order, self._cast, recompress=entry.level is not None
        )
        if not isinstance(data, DaskData):
            return Item(extent, data, entry.level)
        if data.array.size == 0:
            return Item(extent, LiteralData(b""), entry.level)
        packed = ELEMENT_TYPES[data.dtype].bits < 8
        if extent.offset is not None and extent.part.encoding is None and not packed:
            self._stores.append(_Store(data, file, extent.offset))
            return Item(extent, None)
        spooled = SpooledData(self._spooled, data.array.size, data.dtype)
        self._stores.append(_Store(data, self._spool, self._spooled))
        self._spooled += data.array.size * stored_dtype(data.dtype).itemsize
        return Item(extent, spooled, entry.level)

    def _reserved(self) -> list[tuple[int, int, int]]:
        """List the ranges that are written to by memory maps."""
        return [
            (file, offset, prod(data.array.shape) * stored_dtype(data.dtype).itemsize)
            for data, file, offset in self._stores
            if is_scattered(data)
        ]


def _place_of(begun: _Begun, number: int) -> Place:
    return begun.sinks[number].place


class _Files:
    """The files of a checkpoint, without what dask computes into them: it goes to workers."""

    def __init__(
        self,
        files: list[_File],
        open_sink: Callable[[str | None], Sink],
        spooled: int,
        reserved: list[tuple[int, int, int]],
        replaced: Sequence[Source],
    ) -> None:
        self.files = files
        self._replaced = replaced
        self._open_sink = open_sink
        self._spooled = spooled
        self._reserved = reserved

    @property
    def nbytes(self) -> int:
        """Raw size of all parts."""
        return sum([item.extent.part.nbytes for file in self.files for item in file.items])

    def begin(self) -> _Begun:
        """Make the temporary files, with all that is known beforehand."""
        begun = _Begun([])
        try:
            for file in self.files:
                sink = self._open_sink(file.name)
                begun.sinks.append(sink)
                sink.resize(_known_nbytes(file))
            if self._spooled:
                begun.sinks.append(begun.sinks[-1].another())
                begun.sinks[-1].resize(self._spooled)
            for number, offset, nbytes in self._reserved:
                begun.sinks[number].reserve(offset, nbytes)
        except BaseException:
            begun.abort()
            raise
        return begun

    def finish(self, begun: _Begun, _: Any, bar: Progress | None = None) -> None:
        """Stream what is not written yet, and give the files their names."""
        bar = bar or Progress(False, "")  # noqa: FBT003  no bar
        written: dict[tuple[str, str], Written] = {}
        ends = []
        for file, sink in zip(self.files, begun.sinks, strict=False):
            items = [self._bound(item, begun.sinks[-1].path) for item in file.items]
            done, end = stream(items, sink, file.plan.alignment, bar)
            written |= done
            ends.append(end)
        for file, sink, end in zip(self.files, begun.sinks, ends, strict=False):
            _finish(file.plan, sink, end, written)
        sinks = {file.name or "": sink for file, sink in zip(self.files, begun.sinks, strict=False)}
        main = sinks.pop("")
        plan = self.files[-1].plan

        def referring(names: Mapping[str, str]) -> Sink:
            return _referring(plan, names, main, written)

        publish(main, sinks, replaced=self._replaced, referring=referring)

    def _bound(self, item: Item, spool: str) -> Item:
        if isinstance(item.data, SpooledData):
            return item._replace(data=replace(item.data, path=spool))
        return item


def _referring(
    plan: Plan, names: Mapping[str, str], main: Sink, written: dict[tuple[str, str], Written]
) -> Sink:
    """Write the main file as it is when companions have other names."""
    if plan.renamed is None or plan.extents:
        raise TypeError("a plan with companions leaves all parts to them, and can rename them")
    renamed = plan.renamed(names)
    sink = main.another()
    try:
        _finish(renamed, sink, _put(renamed.literals, sink, 0), written)
    except BaseException:
        sink.abort()
        raise
    return sink


def _position(item: Item) -> float:
    # What has no offset keeps its order, behind all that has one.
    return float("inf") if item.extent.offset is None else item.extent.offset


def _known_nbytes(file: _File) -> int:
    """Return the size of a file, or of as much of it as is known before compression."""
    if file.plan.nbytes is not None:
        return file.plan.nbytes
    known = [item for item in file.items if item.extent.offset is not None]
    raw = [item for item in known if not item.is_compressed]
    return max([(item.extent.offset or 0) + item.nbytes for item in raw], default=0)


def _put(literals: Iterable[Literal], sink: Sink, end: int) -> int:
    """Write literals, and return where the last of all that is written ends."""
    for literal in literals:
        offset = end if literal.offset is None else literal.offset
        sink.write(literal.data, offset)
        end = max(end, offset + len(literal.data))
    return end


def _finish(plan: Plan, sink: Sink, end: int, written: dict[tuple[str, str], Written]) -> None:
    """Write what depends on where the parts went."""
    end = _put(plan.finish(written), sink, end)
    sink.resize(end if plan.nbytes is None else plan.nbytes)
