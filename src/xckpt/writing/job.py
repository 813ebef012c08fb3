"""From a plan to files, which are there complete, or not at all.

Dask arrays are computed first, each chunk once and straight into its place (`xckpt.writing.data`):
in one graph, so that what several of them need is computed once. What they cannot be written to
directly (parts that are compressed) they are computed into a temporary file for. Then everything
else is streamed in file order, raw parts in parallel, compressed ones one after another. Neighbours
that are small are written by one call, and what follows each other in the old file as in the new
one is copied by one: by the operating system, holes as holes. Last the files get their names
(`xckpt.storage.sink.publish`).
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.arrays.parts import PartReader
from xckpt.elements import ELEMENT_TYPES, stored_dtype
from xckpt.errors import IntegrityError, locating
from xckpt.formats.plan import Extent, WantedPart, Written
from xckpt.index import Part
from xckpt.progress import Progress
from xckpt.storage import new_file, reading_ahead
from xckpt.storage.digests import Hasher
from xckpt.storage.encodings import DEFAULT_LEVEL, new_encoder
from xckpt.storage.local import LocalSource
from xckpt.storage.sink import publish
from xckpt.storage.source import components
from xckpt.writing.data import (
    PIECE_NBYTES,
    ArrayData,
    LiteralData,
    SpooledData,
    StoredData,
    VerbatimData,
    is_scattered,
    store,
    store_tasks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from xckpt.formats.plan import LiteralBytes, Plan
    from xckpt.storage import Source
    from xckpt.storage.local import OpenFile
    from xckpt.storage.sink import Place, Sink
    from xckpt.writing.casting import Cast
    from xckpt.writing.data import PartData, Payload

__all__ = ["Target", "WriteJob"]

Key = tuple[str, str]

# The key of bytes that belong to no tensor.
_NO_TENSOR = ("", "")

# Below this, parts are gathered and written several at a time.
_SMALL_NBYTES = 1 << 20
_GATHERED_NBYTES = 8 << 20
# Compressed by one thread each, several at a time, in memory; larger ones by several threads.
_COMPRESSED_WHOLE_NBYTES = 32 << 20
# Copied by one thread without a look at the bytes: the kernel does it, and skips holes.
_COPIED_NBYTES = 64 << 20
# By one call, so that Ctrl-C and errors of other threads need not wait for long.
_STEP_NBYTES = 16 << 20
_THREADS = min(16, max(4, os.cpu_count() or 1))
# Where the kernel cannot copy, or cannot say which of the two files is at fault.
_CANNOT = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
_CANNOT |= {errno.EIO, errno.ESTALE}


class Item(NamedTuple):
    """An extent of a plan and what is written there."""

    extent: Extent
    data: PartData | None  # None where tasks of a graph have written the bytes
    level: int | None = None  # of compression

    @property
    def is_compressed(self) -> bool:
        """Whether it has to be compressed, so that its stored size is not known yet."""
        return self.extent.part.compression is not None and not isinstance(self.data, VerbatimData)

    @property
    def is_compressed_whole(self) -> bool:
        """Whether one thread compresses it in memory."""
        return self.is_compressed and self.extent.part.nbytes <= _COMPRESSED_WHOLE_NBYTES

    @property
    def nbytes(self) -> int:
        """Stored size of what is not to be compressed."""
        return self.extent.part.nbytes if self.data is None else self.data.nbytes

    @property
    def is_hashed(self) -> bool:
        """Whether its bytes have to be seen in order, to make a digest or to check one."""
        if self.extent.part.algorithm is not None:
            return True
        return isinstance(self.data, StoredData | VerbatimData) and self.data.is_checked

    @property
    def copied(self) -> StoredData | None:
        """The range of a file that it is, if nothing has to look at the bytes."""
        data = self.data
        if not isinstance(data, StoredData) or self.is_compressed or self.is_hashed:
            return None
        # Of no bytes, nothing has to be there.
        return data if data.nbytes and data.reader.is_raw else None


def item_at(offset: int | None, data: PartData) -> Item:
    """Make an item of bytes that belong to no tensor."""
    part = WantedPart("uint8", (data.nbytes,), data.nbytes)
    return Item(Extent(*_NO_TENSOR, part, offset), data)


class Target(NamedTuple):
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


class _FileToWrite(NamedTuple):
    """One file of a checkpoint: its name if it is a companion, its plan and the data."""

    name: str | None
    plan: Plan
    items: list[Item]


class WriteJob:
    """All that is known of a save before a byte is written.

    `label` is shown with the progress, `grown` is the file that it begins with, and `replaced` are
    files that are read and replaced: nobody else may have changed them in the meantime.
    `superseded` is the name of a file in the same folder that the new ones stand for, and that is
    removed when they are there.
    """

    def __init__(
        self,
        plan: Plan,
        payloads: Mapping[str, Payload],
        cast: Cast,
        target: Target,
        label: str,
        *,
        grown: Source | None = None,
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
            if grown is not None and name is None:
                whole = PartReader(grown, Part("uint8", (grown.size,), 0, grown.size))
                items.append(item_at(0, StoredData(whole, grown.size, (grown.size,))))
            # What has no offset keeps its order, after all that has one.
            items.sort(key=lambda item: inf if item.extent.offset is None else item.extent.offset)
            self._files.append(_FileToWrite(name, each, items))
        # The ranges that are written to by memory maps.
        self._reserved = [
            (file, offset, prod(data.array.shape) * stored_dtype(data.dtype).itemsize)
            for data, file, offset in self._stores
            if is_scattered(data)
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
                        store(data, sinks[file].place, offset, bar.name)
                        for data, file, offset in self._stores
                    ]
                    dask.compute(*tasks)
                return self._finish(sinks, bar)
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
            for task in store_tasks(data, places[file], offset)
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

    def _end(self, sinks: list[Sink], _tasks: Any) -> None:
        self._finish(sinks, Progress(False, ""))  # noqa: FBT003  no bar

    def _finish(self, sinks: list[Sink], bar: Progress) -> int:
        """Stream what is not written yet, and give the files their names."""
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


def _put(literals: Iterable[LiteralBytes], sink: Sink, end: int) -> int:
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


# --- streaming ------------------------------------------------------------------------------------


def stream(
    items: Sequence[Item], sink: Sink, alignment: int, progress: Progress
) -> tuple[dict[Key, Written], int]:
    """Write parts to a file; return where they went, and where the last of them ends."""
    with ThreadPoolExecutor(_THREADS, "xckpt-write") as threads:
        streaming = _Streaming(sink, threads, progress)
        wanted = (item.data.ranges() for item in items if item.data is not None)
        try:
            with reading_ahead(chain.from_iterable(wanted)):
                return streaming.run(items, alignment)
        except BaseException:
            streaming.stopped = True
            threads.shutdown(wait=True, cancel_futures=True)
            raise


# --- which of them are written by one call -------------------------------------------------------


def _groups(items: Sequence[Item]) -> Iterator[tuple[list[Item], bool]]:
    """Join neighbours that are written by one call, with whether that is a copy."""
    gathered: list[Item] = []
    for run in _runs(items):
        nbytes = sum([item.nbytes for item in run]) if len(run) > 1 else run[0].nbytes
        is_small = nbytes < _SMALL_NBYTES and run[0].data is not None and not run[0].is_compressed
        if gathered:
            start, last = gathered[0].extent.offset, run[-1].extent.offset
            is_placed = start is not None and last is not None
            nbytes = (last or 0) + run[-1].nbytes - (start or 0)
            if not (is_small and is_placed and nbytes <= _GATHERED_NBYTES):
                yield gathered, False
                gathered = []
        if is_small:
            gathered += run
        else:
            yield run, len(run) > 1
    if gathered:
        yield gathered, False


def _runs(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Join stored parts that follow each other, in the old file as in the new one."""
    run: list[Item] = []
    for item in items:
        if run and not _follows(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _follows(last: Item, item: Item) -> bool:
    before, after = last.copied, item.copied
    if before is None or after is None:
        return False
    if last.extent.offset is None or item.extent.offset is None:
        return False
    return (
        before.reader.source == after.reader.source
        and before.reader.part.offset + last.nbytes == after.reader.part.offset
        and last.extent.offset + last.nbytes == item.extent.offset
    )


# --- writing them --------------------------------------------------------------------------------


class _Stopped(Exception):  # noqa: N818  never seen outside
    """Another thread failed."""


class _Streaming:
    def __init__(self, sink: Sink, threads: ThreadPoolExecutor, progress: Progress) -> None:
        self.stopped = False
        self._sink = sink
        self._threads = threads
        self._progress = progress
        self._kernel_copies = hasattr(os, "copy_file_range")
        self._pending: deque[Future[Any]] = deque()
        self._written: dict[Key, Written] = {}

    def run(self, items: Sequence[Item], alignment: int) -> tuple[dict[Key, Written], int]:
        position = end = 0
        compressed = self._compress_ahead([item for item in items if item.is_compressed_whole])
        for group, is_run in _groups(items):
            item, offset = group[0], group[0].extent.offset
            if offset is None:  # at the next multiple of the alignment
                offset = -(-(position + item.extent.gap) // alignment) * alignment
            if item.is_compressed:
                position = self._put_compressed(item, offset, compressed)
            else:
                # Only what has offsets is grouped.
                spans = [(item, offset), *((each, each.extent.offset or 0) for each in group[1:])]
                self._put(spans, is_run=is_run)
                last, begin = spans[-1]
                position = begin + last.nbytes
            end = max(end, position)
        while self._pending:
            self._pending.popleft().result()
        self._written.pop(_NO_TENSOR, None)
        return self._written, end

    def _put_compressed(self, item: Item, offset: int, compressed: Iterator[Any]) -> int:
        """Write a part that is compressed, and return where it ends."""
        end = offset
        if item.is_compressed_whole:
            pieces, digest = next(compressed)
            stored = b"".join(pieces)
            self._submit(self._sink.write, stored, offset)
            end += len(stored)
        else:

            def emit(block: Any, at: int) -> None:
                nonlocal end
                self._sink.write(block, offset + at)
                end = offset + at + len(block)

            digest = self._encode(item, emit, threads=_THREADS)
        self._written[item.extent.tensor, item.extent.role] = Written(offset, end - offset, digest)
        return end

    def _put(self, spans: list[tuple[Item, int]], *, is_run: bool) -> None:
        """Begin to write what is not compressed, a group or one."""
        item, offset = spans[0]
        if is_run or (len(spans) == 1 and item.copied is not None):
            self._put_copy(spans)
        elif len(spans) > 1:
            self._submit(self._put_gathered, spans)
        elif item.data is None and not item.is_hashed:
            self._wrote(item, offset)
        else:
            pieces = None if item.data is None or item.is_hashed else item.data.pieces()
            if pieces is None:
                self._submit(self._put_in_order, item, offset)
                return
            for start, read in pieces:
                self._submit(self._put_piece, item, read, offset + start)
            self._wrote(item, offset)

    def _wrote(self, item: Item, offset: int, digest: str | None = None) -> None:
        key = item.extent.tensor, item.extent.role
        self._written[key] = Written(offset, item.nbytes, digest)

    def _put_piece(self, item: Item, read: Callable[[], memoryview], offset: int) -> None:
        self._check_stopped()
        with _naming(item):
            data = read()
        self._sink.write(data, offset)
        self._progress.advance(len(data))

    def _put_in_order(self, item: Item, offset: int) -> None:
        def emit(block: Any, at: int) -> None:
            if item.data is not None:
                self._sink.write(block, offset + at)

        self._wrote(item, offset, self._encode(item, emit, offset))

    def _put_gathered(self, spans: list[tuple[Item, int]]) -> None:
        """Write small parts by one call."""
        self._check_stopped()
        origin = spans[0][1]
        last, begin = spans[-1]
        gathered = memoryview(bytearray(begin + last.nbytes - origin))
        copied: dict[Source, list[tuple[Item, int, Part]]] = defaultdict(list)
        for item, offset in spans:
            stored = item.copied
            if stored is not None:
                copied[stored.reader.source].append((item, offset, stored.reader.part))
                continue

            def emit(block: Any, at: int, base: int = offset - origin) -> None:
                gathered[base + at : base + at + len(block)] = block

            self._wrote(item, offset, self._encode(item, emit))
        for source, chosen in copied.items():
            blocks = source.read_ranges([(part.offset, part.nbytes) for _, _, part in chosen])
            for (item, offset, _), block in zip(chosen, blocks, strict=True):
                gathered[offset - origin :][: len(block)] = block
                self._wrote(item, offset)
            self._progress.advance(sum(map(len, blocks)))
        self._sink.write(gathered, origin)

    # --- copies ---

    def _put_copy(self, spans: list[tuple[Item, int]]) -> None:
        """Copy stored parts that lie next to each other, in the old file as in the new one."""
        stored, first = spans[0][0].copied, spans[0][1]
        if stored is None:
            raise TypeError(spans[0][0])
        reader, total = stored.reader, sum(item.nbytes for item, _ in spans)
        for done in range(0, total, _COPIED_NBYTES):
            count = min(_COPIED_NBYTES, total - done)
            start = reader.part.offset + done
            self._submit(self._copy, reader.source, start, first + done, count)
        for item, offset in spans:
            self._wrote(item, offset)

    def _copy(self, source: Source, start: int, offset: int, nbytes: int) -> None:
        """Copy a range of a file to where nothing has been written yet."""
        self._check_stopped()
        descriptor = source.descriptor() if isinstance(source, LocalSource) else None
        done = 0
        while done < nbytes:
            hole, count = _next_data(descriptor, start + done, nbytes - done)
            done += hole
            if count:
                copied = self._copied_by_kernel(descriptor, start + done, offset + done, count)
                if not copied:
                    self._sink.write(source.read(start + done, count), offset + done)
                done += copied or count
        source.view(start, 0)  # checks that the file is still the same
        self._progress.advance(nbytes)

    def _copied_by_kernel(
        self, descriptor: OpenFile | None, start: int, offset: int, nbytes: int
    ) -> int:
        """Copy within the kernel, and return how much was; 0 where it cannot."""
        if descriptor is None or not self._kernel_copies:
            return 0
        try:
            with self._sink.place.named():
                return os.copy_file_range(
                    descriptor.fileno, self._sink.fileno, nbytes, start, offset
                )
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            self._kernel_copies = False
            return 0

    # --- encoding ---

    def _compress_ahead(self, items: list[Item]) -> Iterator[tuple[list[bytes], str | None]]:
        """Compress parts in memory, some of them before they are asked for."""
        ahead: deque[Future[tuple[list[bytes], str | None]]] = deque()
        for item in items:
            ahead.append(self._threads.submit(self._compress_whole, item))
            if len(ahead) > _THREADS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _compress_whole(self, item: Item) -> tuple[list[bytes], str | None]:
        pieces: list[bytes] = []
        digest = self._encode(item, lambda block, _: pieces.append(bytes(block)))
        return pieces, digest

    def _encode(
        self, item: Item, emit: Callable[[Any, int], None], offset: int = 0, *, threads: int = 1
    ) -> str | None:
        """Emit the bytes of a part as they are to be stored; return the digest it asks for."""
        part, data = item.extent.part, item.data
        blocks = self._read_back(offset, item.nbytes) if data is None else data.blocks()
        encoder = None
        if item.is_compressed:
            level = DEFAULT_LEVEL if item.level is None else item.level
            encoder = new_encoder(str(part.compression), part.nbytes, level=level, threads=threads)
        hasher = None if part.algorithm is None else Hasher(part.algorithm)
        covers_decoded = part.digest_of == "decoded" and part.compression is not None
        of_raw = hasher if covers_decoded and encoder is not None else None
        of_stored = None if covers_decoded else hasher
        at = 0

        def put(stored: Any) -> None:
            nonlocal at
            if of_stored is not None:
                of_stored.update(stored)
            emit(stored, at)
            at += len(stored)

        with _naming(item):
            for block in blocks:
                self._check_stopped()
                if of_raw is not None:
                    of_raw.update(block)
                put(block if encoder is None else encoder.add(block))
                self._progress.advance(len(block))
            if encoder is not None:
                put(encoder.end())
            if isinstance(data, VerbatimData):
                data.hash_decoded(hasher if covers_decoded else None)
        return None if hasher is None else f"{hasher.algorithm}:{hasher.value().hex()}"

    def _read_back(self, offset: int, nbytes: int) -> Iterator[bytes]:
        for start in range(offset, offset + nbytes, PIECE_NBYTES):
            yield self._sink.place.read(start, min(PIECE_NBYTES, offset + nbytes - start))

    def _submit(self, function: Callable[..., Any], *args: Any) -> None:
        while len(self._pending) >= 2 * _THREADS:
            self._pending.popleft().result()
        self._pending.append(self._threads.submit(function, *args))

    def _check_stopped(self) -> None:
        if self.stopped:
            raise _Stopped


@contextmanager
def _naming(item: Item) -> Iterator[None]:
    """Name the tensor in errors, and say what to do about damage."""
    try:
        with locating(tensor=item.extent.tensor):
            yield
    except IntegrityError as error:
        error.hint = error.hint or "xckpt.verify lists all that is damaged"
        raise


def _next_data(descriptor: OpenFile | None, start: int, nbytes: int) -> tuple[int, int]:
    """Return how many bytes from here on are in a hole, and how many after it are to be copied."""
    if descriptor is None or not hasattr(os, "SEEK_DATA"):
        return 0, min(_STEP_NBYTES, nbytes)
    try:
        data = os.lseek(descriptor.fileno, start, os.SEEK_DATA)
        stop = os.lseek(descriptor.fileno, data, os.SEEK_HOLE)
    except OSError as error:
        # There is nothing but a hole, or the file system cannot tell.
        return (nbytes, 0) if error.errno == errno.ENXIO else (0, min(_STEP_NBYTES, nbytes))
    hole = min(nbytes, data - start)
    return hole, min(_STEP_NBYTES, nbytes - hole, stop - data)
