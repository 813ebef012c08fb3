"""Parts into a file, in file order: raw ones in parallel, compressed ones one after another.

Neighbours that are small are written by one call, and what follows each other in the old file as
in the new one is copied by one: by the operating system, holes as holes.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import IntegrityError, locating
from xckpt.formats.plan import Extent, WantedPart, Written
from xckpt.storage import reading_ahead
from xckpt.storage.digests import Hasher
from xckpt.storage.encodings import DEFAULT_LEVEL, new_encoder
from xckpt.storage.local import LocalSource
from xckpt.writing.data import PIECE_NBYTES, StoredData, VerbatimData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from xckpt.index import Part
    from xckpt.progress import Progress
    from xckpt.storage import Source
    from xckpt.storage.local import OpenFile
    from xckpt.storage.sink import Sink
    from xckpt.writing.data import PartData

__all__ = ["Item", "item_at", "stream"]

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
        if gathered and not (is_small and _is_near(gathered[0], run[-1])):
            yield gathered, False
            gathered = []
        if is_small:
            gathered += run
        else:
            yield run, len(run) > 1
    if gathered:
        yield gathered, False


def _is_near(first: Item, last: Item) -> bool:
    start, stop = first.extent.offset, last.extent.offset
    if start is None or stop is None:
        return False
    return stop + last.nbytes - start <= _GATHERED_NBYTES


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
