"""Where a checkpoint is written to and as what, and how it gets there: complete, or not at all.

Dask arrays are computed first, each chunk once and straight into its place: in one graph, so that
what several of them need is computed once. Chunks come in any order and may be cut along any axis;
the tasks open the file by its path, so that any scheduler and any machine that sees it can run
them. What they cannot be written to directly (parts that are compressed) they are computed into a
temporary file for. Then everything else is streamed in file order, and the files get their names
(`xckpt.storage.sink.publish`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from difflib import get_close_matches
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np

from xckpt import formats
from xckpt.arrays.parts import PartReader
from xckpt.elements import ELEMENT_TYPES, nbytes_of, stored_dtype
from xckpt.errors import CheckpointError, UnsupportedError
from xckpt.index import Part
from xckpt.opening.sharding import INDEX_SUFFIX
from xckpt.progress import Progress, report
from xckpt.storage import is_remote, local_path, new_file
from xckpt.storage.sink import publish, write_at
from xckpt.storage.source import components
from xckpt.writing.data import ArrayData, LiteralData, SpooledData, StoredData, as_bytes
from xckpt.writing.fitting import TENSOR_OPTIONS, Requests, check_cast, fit, tell_stated
from xckpt.writing.streaming import Item, item_at, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    from xckpt.formats.plan import Extent, Literal, Plan, Written
    from xckpt.index import Index
    from xckpt.storage import Source
    from xckpt.storage.sink import Place, Sink
    from xckpt.writing.casting import Cast
    from xckpt.writing.data import Gathered, Payload
    from xckpt.writing.fitting import Changes

__all__ = ["Destination"]

# Those that all formats have.
_OPTIONS = (
    *("encoding", "cast", "compute", "overwrite", "progress", "storage_options"),
    *("tensors", "names", "verify", "source_engine"),
)
# Shorter runs are not worth a system call each: they are written through a memory map.
_SHORTEST_RUN = 1 << 12


# --- where to, and as what -----------------------------------------------------------------------


class _Target(NamedTuple):
    """Where a file is written, from whatever process."""

    path: str
    overwrite: bool
    storage_options: dict[str, Any] | None

    def companion(self, name: str) -> str:
        """Return the path of another file of the same checkpoint."""
        folder, slash, _ = self.path.rpartition("/")
        return folder + slash + "/".join(components(name))

    def open(self, name: str | None = None) -> Sink:
        """Begin the companion of that name, or the file itself for None."""
        path = self.path if name is None else self.companion(name)
        return new_file(path, overwrite=self.overwrite, storage_options=self.storage_options)


class Destination:
    """A file that is to be written, and what a user asked for; see `save`."""

    def __init__(
        self,
        path: str | PathLike[str],
        engine: str | None = None,
        *,
        encoding: Mapping[str, Mapping[str, Any]] | None = None,
        cast: Cast = "exact",
        overwrite: bool = False,
        storage_options: dict[str, Any] | None = None,
        format_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_cast(cast)
        target = os.fspath(path)
        self.writer = formats.writable(engine or _format_of(target))
        self._options = format_options or {}
        has = tuple(self.writer.write_options)
        for option in self._options:
            if option not in has:
                alike = get_close_matches(option, (*_OPTIONS, *has), n=1)
                hint = (
                    f"did you mean {alike[0]!r}?" if alike else f"it has {', '.join(has) or 'none'}"
                )
                if option in TENSOR_OPTIONS:
                    hint = f"tensors have it: encoding={{'*': {{{option!r}: ...}}}}"
                name = self.writer.name
                raise TypeError(f"format {name!r} has no option {option!r} for writing; {hint}")
        path = target if is_remote(target) else local_path(target)
        self.target = _Target(path, overwrite, storage_options)
        self._requests = Requests(encoding)
        self._cast = cast

    @property
    def path(self) -> str:
        """Path or URL of the file, of several the one to open."""
        return self.target.path

    def job(
        self,
        gathered: Gathered,
        changes: Changes,
        *,
        sources: Iterable[Source],
        before: Callable[[], Index | None] = lambda: None,
        plan: Callable[..., Plan] | None = None,
        grown: Source | None = None,
    ) -> WriteJob:
        """Lay the file out; nothing is written yet.

        `before` returns the index of what is written anew, if it has the same format. `grown` is
        the file that the plan adds to.
        """
        try:
            draft, fitted = fit(
                gathered,
                self.path,
                writer=self.writer,
                requests=self._requests,
                cast=self._cast,
                changes=changes,
            )
            planned = (plan or self.writer.plan)(draft, **self._options)
            how: Any = {"given": self._options, "before": before, "grown": grown}
            tell_stated(draft, planned, self.writer, changes, **how)
            label = os.path.basename(self.path)  # noqa: PTH119  it may be a URL
            paths = [self.path, *map(self.target.companion, planned.companions)]
            superseded = None
            if planned.suffix:
                self.target.open().abort()  # an existing file is an error, though it is not written
                superseded = label if self.target.overwrite else None
                self.target = self.target._replace(path=self.path + planned.suffix)
                paths.append(self.path)
            elif not is_remote(self.path) and os.path.lexists(self.path + INDEX_SUFFIX):
                changes.add(
                    "readers may prefer what is next to it; remove it", label + INDEX_SUFFIX
                )
            targets = {_resolved(path) for path in paths if self.target.overwrite}
            replaced = [each for each in sources if _resolved(each.name) in targets]
            old = None
            if grown is not None:
                reader = PartReader(grown, Part("uint8", (grown.size,), 0, grown.size))
                old = item_at(0, StoredData(reader, grown.size, (grown.size,)))
            return WriteJob(
                planned,
                fitted,
                self._cast,
                self.target,
                label,
                before=old,
                replaced=replaced,
                superseded=superseded,
            )
        except CheckpointError as error:
            raise error.located(path=self.path) from error.__cause__


def _resolved(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(os.path.expanduser(path))  # noqa: PTH111


def _format_of(path: str) -> str:
    """Find the format that a file name ends like."""
    name = path.partition("?")[0].lower() if is_remote(path) else path.lower()
    named = [known for known in formats.names() if name.endswith(formats.suffixes(known))]
    every = [formats.get(known) for known in named]
    found = {
        each.name: suffix
        for each in every
        if each.can.types
        for suffix in each.suffixes
        if name.endswith(suffix)
    }
    if len(found) > 1:
        own = {each.name: each.own_suffixes for each in every}
        found = {each: s for each, s in found.items() if s in own[each]} or found
    shared = [s for each in every for s in each.shared_suffixes]
    # Of one word, like .bin: who writes it may mean the format of another program.
    is_common = any(s in shared and s.count(".") == 1 for s in found.values())
    if len(found) == 1 and not is_common:
        return next(iter(found))
    for each in every:
        if not found and name.endswith(each.own_suffixes):
            formats.writable(each.name)  # says which formats are
    hint, engines = "", ", ".join(map(repr, found))
    if not found:
        known = [each for each in map(formats.get, formats.names()) if each.can.types]
        suffixes = [suffix for each in known for suffix in each.suffixes]
        ending = os.path.splitext(name)[1]  # noqa: PTH122
        for alike in get_close_matches(ending, suffixes, n=1, cutoff=0.88):
            hint = f" (did you mean {alike!r}?)"
        engines = ", ".join(repr(each.name) for each in known)
    which = "several programs use" if found else "no format that is written has"
    raise ValueError(
        f"{which} the ending of {os.path.basename(path)!r}{hint}; pass engine=, one of {engines}"  # noqa: PTH119
    )


# --- into files ----------------------------------------------------------------------------------


class _File(NamedTuple):
    """One file of a checkpoint: its name if it is a companion, its plan and the data."""

    name: str | None
    plan: Plan
    items: list[Item]


class WriteJob:
    """All that is known of a save before a byte is written.

    `label` is shown with the progress, `before` is what the file begins with, and `replaced` are
    files that are read and replaced: nobody else may have changed them in the meantime.
    `superseded` is the name of a file in the same folder that the new ones stand for, and that is
    removed when they are there.
    """

    def __init__(
        self,
        plan: Plan,
        payloads: Mapping[str, Payload],
        cast: Cast,
        target: _Target,
        label: str,
        *,
        before: Item | None = None,
        replaced: Sequence[Source] = (),
        superseded: str | None = None,
    ) -> None:
        self._target, self._label, self._replaced = target, label, replaced
        self._superseded = superseded
        #: Names of the tensors that are written.
        self.tensors = tuple(payloads)
        # Dask arrays, which of the files they are computed into, and where in it.
        self._stores: list[tuple[ArrayData, int, int]] = []
        self._spooled = 0
        # Companions first, so that a file refers to nothing that is not there.
        plans: list[tuple[str | None, Plan]] = [*plan.companions.items(), (None, plan)]
        self._files = []
        for number, (name, each) in enumerate(plans):
            items = [
                self._item(extent, payloads[extent.tensor], cast, number, spool=len(plans))
                for extent in each.extents
            ]
            items += [item_at(at, LiteralData(literal)) for at, literal in each.literals]
            items += [before] if before is not None and name is None else []
            # What has no offset keeps its order, after all that has one.
            items.sort(key=lambda item: inf if item.extent.offset is None else item.extent.offset)
            self._files.append(_File(name, each, items))
        # The ranges that are written to by memory maps.
        self._reserved = [
            (file, offset, prod(data.array.shape) * stored_dtype(data.dtype).itemsize)
            for data, file, offset in self._stores
            if _is_scattered(data)
        ]

    def __getstate__(self) -> dict[str, Any]:
        # Who makes and finishes the files needs no arrays: their tasks are sent by themselves.
        return self.__dict__ | {"_stores": []}

    def _item(self, extent: Extent, payload: Payload, cast: Cast, file: int, *, spool: int) -> Item:
        data = payload.data(extent.role, extent.part, cast)
        if not isinstance(data, ArrayData) or not data.is_dask:
            return Item(extent, data, payload.level)
        if data.array.size == 0:
            return Item(extent, LiteralData(b""), payload.level)
        packed = ELEMENT_TYPES[data.dtype].bits < 8
        if extent.offset is not None and extent.part.compression is None and not packed:
            self._stores.append((data, file, extent.offset))
            return Item(extent, None)
        spooled = SpooledData(self._spooled, data.array.size, data.dtype)
        self._stores.append((data, spool, self._spooled))
        self._spooled += data.array.size * stored_dtype(data.dtype).itemsize
        return Item(extent, spooled, payload.level)

    def run(self, progress: Any = None) -> int:
        """Write everything now, and return how many bytes; after an error nothing is left."""
        total = sum([item.extent.part.nbytes for file in self._files for item in file.items])
        with Progress(progress, self._label, total) as bar:
            sinks = self._begin()
            try:
                if self._stores:
                    import dask

                    tasks = [
                        _store(data, sinks[file].place, offset, bar.name)
                        for data, file, offset in self._stores
                    ]
                    dask.compute(*tasks)
                return self._finish(sinks, (), bar)
            finally:
                _abort(sinks)

    def delayed(self) -> Any:
        """Make the tasks that write everything; the last one returns nothing."""
        import dask

        sinks = dask.delayed(self._begin, pure=False)()
        count = len(self._files) + (self._spooled > 0)
        places = [dask.delayed(_place_of, pure=True)(sinks, number) for number in range(count)]
        tasks = [
            task
            for data, file, offset in self._stores
            for task in _store_delayed(data, places[file], offset)
        ]
        return dask.delayed(self._end, pure=False)(sinks, tasks)

    def _begin(self) -> list[Sink]:
        """Make the temporary files with all that is known beforehand; the last is the spool."""
        sinks: list[Sink] = []
        try:
            for file in self._files:
                sinks.append(self._target.open(file.name))
                known = file.plan.nbytes
                if known is None:
                    ends = [
                        item.extent.offset + item.nbytes
                        for item in file.items
                        if item.extent.offset is not None and not item.is_compressed
                    ]
                    known = max(ends, default=0)
                sinks[-1].resize(known)
            if self._spooled:
                sinks.append(sinks[-1].another())
                sinks[-1].resize(self._spooled)
            for number, offset, nbytes in self._reserved:
                sinks[number].reserve(offset, nbytes)
        except BaseException:
            _abort(sinks)
            raise
        return sinks

    def _end(self, sinks: list[Sink], tasks: Any) -> None:
        self._finish(sinks, tasks)

    def _finish(self, sinks: list[Sink], _: Any, bar: Progress | None = None) -> int:
        """Stream what is not written yet, and give the files their names."""
        bar = bar or Progress(False, "")  # noqa: FBT003  no bar
        written: dict[tuple[str, str], Written] = {}
        ends = []
        for file, sink in zip(self._files, sinks, strict=False):
            items = [
                item._replace(data=replace(item.data, place=sinks[-1].place))
                if isinstance(item.data, SpooledData)
                else item
                for item in file.items
            ]
            done, end = stream(items, sink, file.plan.alignment, bar)
            written |= done
            ends.append(end)
        nbytes = 0
        for file, sink, end in zip(self._files, sinks, ends, strict=False):
            nbytes += _complete(file.plan, sink, end, written)
        named = {file.name or "": sink for file, sink in zip(self._files, sinks, strict=False)}
        main = named.pop("")
        plan = self._files[-1].plan

        def referring(names: Mapping[str, str]) -> Sink:
            """Write the main file as it is when companions have other names."""
            if plan.renamed is None or plan.extents:
                text = "a plan with companions leaves all parts to them, and can rename them"
                raise TypeError(text)
            renamed = plan.renamed(names)
            sink = main.another()
            try:
                _complete(renamed, sink, _put(renamed.literals, sink, 0), written)
            except BaseException:
                sink.abort()
                raise
            return sink

        publish(
            main,
            named,
            replaced=self._replaced,
            referring=referring,
            superseded=self._superseded,
        )
        return nbytes


def _abort(sinks: Iterable[Sink]) -> None:
    for sink in sinks:
        sink.abort()


def _place_of(sinks: list[Sink], number: int) -> Place:
    return sinks[number].place


def _put(literals: Iterable[Literal], sink: Sink, end: int) -> int:
    """Write literals, and return where the last of all that is written ends."""
    for literal in literals:
        offset = end if literal.offset is None else literal.offset
        sink.write(literal.data, offset)
        end = max(end, offset + len(literal.data))
    return end


def _complete(plan: Plan, sink: Sink, end: int, written: dict[tuple[str, str], Written]) -> int:
    """Write what depends on where the parts went; return the size of the file."""
    end = _put(plan.finish(written), sink, end)
    nbytes = end if plan.nbytes is None else plan.nbytes
    sink.resize(nbytes)
    return nbytes


# --- dask arrays into their places ---------------------------------------------------------------


class _ArrayTarget(NamedTuple):
    """Where a dask array goes in a file, and as what: all that its tasks are told."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    cast: Cast
    tensor: str  # for messages
    order: str
    starts: tuple[tuple[int, ...], ...]  # of chunks, along each axis
    observer: str  # is told of the progress

    @classmethod
    def of(cls, data: ArrayData, offset: int, observer: str = "") -> _ArrayTarget:
        chunks = data.array.chunks
        if any(np.isnan(size) for sizes in chunks for size in sizes):
            raise UnsupportedError(
                "the sizes of its chunks are not known before it is computed",
                tensor=data.tensor,
                hint="Call .compute_chunk_sizes() on the dask array, or compute it",
            )
        starts = tuple(tuple(np.cumsum((0, *sizes[:-1])).tolist()) for sizes in chunks)
        shape = data.array.shape
        return cls(offset, shape, data.dtype, data.cast, data.tensor, data.order, starts, observer)


def _store(data: ArrayData, place: Place, offset: int, observer: str) -> Any:
    """Make a dask array whose chunks write those of another to a file that is there."""
    array = data.array
    return array.map_blocks(
        _store_block,
        place=place,
        region=_ArrayTarget.of(data, offset, observer),
        chunks=tuple((1,) * len(sizes) for sizes in array.chunks),
        dtype=np.int64,
        meta=np.empty((0,) * array.ndim, np.int64),
        name=f"xckpt-write-{array.name}-{uuid4().hex}",
    )


def _store_delayed(data: ArrayData, place: Any, offset: int) -> list[Any]:
    """Make tasks, one for each chunk, that write to a file that another task makes."""
    # Not by map_blocks: it runs what a delayed argument depends on once more for itself.
    import dask

    region = _ArrayTarget.of(data, offset)
    write = dask.delayed(_store_block, pure=False, traverse=False)
    blocks = data.array.to_delayed(optimize_graph=False)
    return [
        write(blocks[where], place=place, region=region, block_id=where)
        for where in np.ndindex(blocks.shape)
    ]


def _store_block(
    block: Any, *, place: Place, region: _ArrayTarget, block_id: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Convert a chunk and write it where it goes; return how many bytes that were."""
    block = np.asarray(block)
    origin = [along[i] for along, i in zip(region.starts, block_id, strict=True)]
    data = ArrayData(block, region.dtype, region.cast, region.tensor, region.order, origin)
    first = origin[::-1] if region.order == "F" else origin
    with place.named():
        fileno = os.open(place.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            # In small runs, so that conversions need little memory besides the chunk.
            for key, _ in data.runs():
                where = tuple(at + run.start for at, run in zip(first, key, strict=True))
                _write_run(place.path, fileno, region, data.converted(key), where)
        finally:
            os.close(fileno)
    nbytes = nbytes_of(region.dtype, block.size)
    report(region.observer, nbytes)
    return np.full((1,) * block.ndim, nbytes, np.int64)


def _write_run(
    path: str,
    fileno: int,
    region: _ArrayTarget,
    block: np.ndarray[Any, Any],
    where: tuple[int, ...],
) -> None:
    """Write a block whose axes have the order of the file."""
    shape = region.shape[::-1] if region.order == "F" else region.shape
    split, run = _longest_run(shape, block.shape)
    if split and run * block.itemsize < _SHORTEST_RUN and prod(block.shape[:split]) > 1:
        target = np.memmap(path, block.dtype, "r+", region.offset, shape)
        target[tuple(slice(w, w + n) for w, n in zip(where, block.shape, strict=True))] = block
        return
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for position in np.ndindex(block.shape[:split]):
        inside = (*position, *(0 for _ in shape[split:]))
        first = sum((w + i) * s for w, i, s in zip(where, inside, strides, strict=True))
        write_at(fileno, as_bytes(block[position]), region.offset + first * block.itemsize)


def _longest_run(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, int]:
    """Return the first axis from which on a block is contiguous in the array, and so many elements.

    Examples
    --------
    >>> _longest_run((10, 4, 8), (2, 3, 8))
    (1, 24)
    """
    split = len(shape)
    while split and block[split:] == shape[split:]:
        split -= 1
    return split, prod(block[split:])


def _is_scattered(data: ArrayData) -> bool:
    """Return whether some chunks are written in runs so short that a memory map is used."""
    turned = data.order == "F"
    shape = data.array.shape[::-1] if turned else data.array.shape
    chunks = tuple(min(sizes) if sizes else 0 for sizes in data.array.chunks)
    split, run = _longest_run(shape, chunks[::-1] if turned else chunks)
    return split > 0 and run * stored_dtype(data.dtype).itemsize < _SHORTEST_RUN
