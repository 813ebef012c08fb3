"""The parts of one new file, streamed into it in file order.

Raw parts are read, converted and written in parallel, compressed ones one after another. Small
neighbours are written by one call. Unchanged parts are copied by the operating system, holes as
holes. Digests are computed, and digests of the old file compared, while the bytes pass.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from xckpt.arrays.converted import BLOCK_NBYTES, StoredBytes, thread_buffer
from xckpt.errors import IntegrityError, locating
from xckpt.formats.plan import PlannedPart, Written
from xckpt.storage import Source, reading_ahead
from xckpt.storage.digests import Hasher
from xckpt.storage.local import LocalSource, OpenFile
from xckpt.storage.seekable import DEFAULT_LEVEL, new_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xckpt.arrays.parts import PartReader
    from xckpt.index import Part
    from xckpt.progress import Progress
    from xckpt.storage.sink import Sink

Key = tuple[str, str]

#: The key of bytes that belong to no tensor.
NO_TENSOR = ("", "")

# Smaller parts are gathered and written by one call.
_SMALL_NBYTES = 1 << 20
_GATHERED_NBYTES = 8 << 20
# Largest part that one thread compresses in memory, several at a time.
_COMPRESSED_WHOLE_NBYTES = 32 << 20
# Size of ranges that one thread copies; the kernel copies them, and skips holes.
_COPIED_NBYTES = 64 << 20
# Size of a copy by one call: Ctrl-C and errors of other threads wait for it.
_STEP_NBYTES = 16 << 20
_THREADS = min(16, max(4, os.cpu_count() or 1))
# The kernel cannot copy, or the error does not show which file is at fault.
_CANNOT = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
_CANNOT |= {errno.EIO, errno.ESTALE}


# `PlannedPart.data` is a `ByteStream` here, or None if the tasks of a graph have written the bytes.


def _is_verbatim(planned: PlannedPart) -> bool:
    """Return whether a compressed part is copied as it is stored."""
    return isinstance(planned.data, StoredBytes) and planned.data.is_verbatim


def is_compressed(planned: PlannedPart) -> bool:
    """Return whether a part has to be compressed, so that its stored size is not known yet."""
    return planned.part.compression is not None and not _is_verbatim(planned)


def _is_compressed_whole(planned: PlannedPart) -> bool:
    """Return whether one thread compresses a part in memory."""
    return is_compressed(planned) and planned.part.nbytes <= _COMPRESSED_WHOLE_NBYTES


def stored_nbytes(planned: PlannedPart) -> int:
    """Return the stored size of a part that is not compressed."""
    nbytes: int = planned.part.nbytes if planned.data is None else planned.data.size
    return nbytes


def _copied(planned: PlannedPart) -> PartReader | None:
    """Return the range of a file that a part is, if nothing has to look at the bytes."""
    data = planned.data
    if not isinstance(data, StoredBytes) or not data.is_range:
        return None
    is_seen = data.whole or planned.part.algorithm is not None
    return None if is_compressed(planned) or is_seen else data.reader


def stream(
    parts: Sequence[PlannedPart], sink: Sink, alignment: int, progress: Progress
) -> tuple[dict[Key, Written], int]:
    """Write parts to a file; return their places, and the end of the last one."""
    with ThreadPoolExecutor(_THREADS, "xckpt-write") as threads:
        streaming = _Streaming(sink, threads, progress)
        streams = (planned.data for planned in parts if planned.data is not None)
        ranges = (data.ranges(0, data.size) for data in streams)
        try:
            with reading_ahead(chain.from_iterable(ranges)):
                return streaming.run(parts, alignment)
        except BaseException:
            streaming.stopped = True
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def _groups(parts: Sequence[PlannedPart]) -> Iterator[list[PlannedPart]]:
    """Group small neighbours that are written by one call."""
    gathered: list[PlannedPart] = []
    for planned in parts:
        nbytes = stored_nbytes(planned)
        is_small = nbytes < _SMALL_NBYTES and planned.data is not None
        is_small &= not is_compressed(planned) and planned.offset is not None
        if gathered:
            span = (planned.offset or 0) + nbytes - (gathered[0].offset or 0)
            if not is_small or span > _GATHERED_NBYTES:
                yield gathered
                gathered = []
        if is_small:
            gathered.append(planned)
        else:
            yield [planned]
    if gathered:
        yield gathered


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

    def run(self, parts: Sequence[PlannedPart], alignment: int) -> tuple[dict[Key, Written], int]:
        position = end = 0
        compressed = self._compress_ahead(list(filter(_is_compressed_whole, parts)))
        for group in _groups(parts):
            planned, offset = group[0], group[0].offset
            if offset is None:  # at the next multiple of the alignment
                offset = -(-(position + planned.gap) // alignment) * alignment
            if is_compressed(planned):
                position = self._put_compressed(planned, offset, compressed)
            elif len(group) == 1:
                self._put(planned, offset)
                position = offset + stored_nbytes(planned)
            else:
                spans = [(part, part.offset or 0) for part in group]
                self._submit(self._put_gathered, spans)
                last, begin = spans[-1]
                position = begin + stored_nbytes(last)
            end = max(end, position)
        while self._pending:
            self._pending.popleft().result()
        self._written.pop(NO_TENSOR, None)
        return self._written, end

    def _put_compressed(self, planned: PlannedPart, offset: int, compressed: Iterator[Any]) -> int:
        """Write a part that is compressed, and return where it ends."""
        end = offset
        if _is_compressed_whole(planned):
            pieces, digest = next(compressed)
            stored = b"".join(pieces)
            self._submit(self._sink.write, stored, offset)
            end += len(stored)
        else:

            def emit(block: Any, at: int) -> None:
                nonlocal end
                self._sink.write(block, offset + at)
                end = offset + at + len(block)

            digest = self._encode(planned, emit, threads=_THREADS)
        self._written[planned.tensor, planned.role] = Written(offset, end - offset, digest)
        return end

    def _put(self, planned: PlannedPart, offset: int) -> None:
        """Begin to write an uncompressed part."""
        reader, nbytes = _copied(planned), stored_nbytes(planned)
        if reader is not None:
            for start in range(0, nbytes, _COPIED_NBYTES):
                place = reader.part.offset + start, offset + start
                self._submit(self._copy, reader.source, *place, min(_COPIED_NBYTES, nbytes - start))
        elif planned.part.algorithm is not None or _is_verbatim(planned):
            self._submit(self._put_in_order, planned, offset)
            return
        elif planned.data is not None:
            for cut in planned.data.cuts(0, nbytes, BLOCK_NBYTES):
                self._submit(self._put_cut, planned, offset, *cut)
        self._wrote(planned, offset)

    def _wrote(self, planned: PlannedPart, offset: int, digest: str | None = None) -> None:
        key = planned.tensor, planned.role
        self._written[key] = Written(offset, stored_nbytes(planned), digest)

    def _put_cut(self, planned: PlannedPart, offset: int, start: int, stop: int) -> None:
        """Write a range of the bytes of a part."""
        with _naming(planned):
            for position, (block,) in planned.data.blocks(start, stop, thread_buffer()):
                self._check_stopped()
                self._sink.write(block, offset + position)
                self._progress.advance(len(block))

    def _put_in_order(self, planned: PlannedPart, offset: int) -> None:
        def emit(block: Any, at: int) -> None:
            if planned.data is not None:
                self._sink.write(block, offset + at)

        self._wrote(planned, offset, self._encode(planned, emit, offset))

    def _put_gathered(self, spans: list[tuple[PlannedPart, int]]) -> None:
        """Write small parts by one call."""
        self._check_stopped()
        origin = spans[0][1]
        last, begin = spans[-1]
        gathered = memoryview(bytearray(begin + stored_nbytes(last) - origin))
        copied: dict[Source, list[tuple[PlannedPart, int, Part]]] = defaultdict(list)
        for planned, offset in spans:
            reader = _copied(planned)
            if reader is not None:
                copied[reader.source].append((planned, offset, reader.part))
                continue

            def emit(block: Any, at: int, base: int = offset - origin) -> None:
                gathered[base + at : base + at + len(block)] = block

            self._wrote(planned, offset, self._encode(planned, emit))
        for source, chosen in copied.items():
            blocks = source.read_ranges([(part.offset, part.nbytes) for _, _, part in chosen])
            for (planned, offset, _), block in zip(chosen, blocks, strict=True):
                gathered[offset - origin :][: len(block)] = block
                self._wrote(planned, offset)
            self._progress.advance(sum(map(len, blocks)))
        self._sink.write(gathered, origin)

    def _copy(self, source: Source, start: int, offset: int, nbytes: int) -> None:
        """Copy a range of a file; its target is still zero."""
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
        """Copy within the kernel; return the number of bytes, 0 if the kernel cannot copy."""
        if descriptor is None or not self._kernel_copies:
            return 0
        try:
            with self._sink.place.named():
                return os.copy_file_range(
                    descriptor.fileno, self._sink.opened().fileno, nbytes, start, offset
                )
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            self._kernel_copies = False
            return 0

    # --- encoding ---

    def _compress_ahead(self, parts: list[PlannedPart]) -> Iterator[tuple[list[bytes], str | None]]:
        """Compress parts in memory, a few of them in advance."""
        ahead: deque[Future[tuple[list[bytes], str | None]]] = deque()
        for planned in parts:
            ahead.append(self._threads.submit(self._compress_whole, planned))
            if len(ahead) > _THREADS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _compress_whole(self, planned: PlannedPart) -> tuple[list[bytes], str | None]:
        pieces: list[bytes] = []
        digest = self._encode(planned, lambda block, _: pieces.append(bytes(block)))
        return pieces, digest

    def _encode(
        self,
        planned: PlannedPart,
        emit: Callable[[Any, int], None],
        offset: int = 0,
        *,
        threads: int = 1,
    ) -> str | None:
        """Emit the stored bytes of a part; return the requested digest."""
        part, data = planned.part, planned.data
        hasher = None if part.algorithm is None else Hasher(part.algorithm)
        covers_decoded = part.digest_of == "decoded" and part.compression is not None
        raw_hasher = hasher if covers_decoded and is_compressed(planned) else None
        stored_hasher = None if covers_decoded else hasher
        position = 0
        with _naming(planned):
            for block in self._stored_blocks(planned, offset, raw_hasher, threads):
                if stored_hasher is not None:
                    stored_hasher.update(block)
                emit(block, position)
                position += len(block)
            if isinstance(data, StoredBytes) and _is_verbatim(planned):
                data.hash_decoded(hasher if covers_decoded else None)
        return None if hasher is None else f"{hasher.algorithm}:{hasher.value().hex()}"

    def _stored_blocks(
        self, planned: PlannedPart, offset: int, raw_hasher: Hasher | None, threads: int
    ) -> Iterator[Any]:
        """Yield the stored bytes of a part, compressed if requested; hash those before that."""
        part, data = planned.part, planned.data
        encoder = None
        if is_compressed(planned):
            level = DEFAULT_LEVEL if part.level is None else part.level
            encoder = new_encoder(str(part.compression), part.nbytes, level=level, threads=threads)
        blocks = (
            self._read_back(offset, stored_nbytes(planned)) if data is None else data.memories()
        )
        for block in blocks:
            self._check_stopped()
            if raw_hasher is not None:
                raw_hasher.update(block)
            yield block if encoder is None else encoder.add(block)
            self._progress.advance(len(block))
        if encoder is not None:
            yield encoder.end()

    def _read_back(self, offset: int, nbytes: int) -> Iterator[bytes]:
        for start in range(offset, offset + nbytes, BLOCK_NBYTES):
            yield self._sink.place.read(start, min(BLOCK_NBYTES, offset + nbytes - start))

    def _submit(self, function: Callable[..., Any], *args: Any) -> None:
        while len(self._pending) >= 2 * _THREADS:
            self._pending.popleft().result()
        self._pending.append(self._threads.submit(function, *args))

    def _check_stopped(self) -> None:
        if self.stopped:
            raise _Stopped


@contextmanager
def _naming(planned: PlannedPart) -> Iterator[None]:
    """Add the old file and the tensor to errors, and a hint to errors of damage."""
    data = planned.data
    path = data.reader.source.name if isinstance(data, StoredBytes) else None
    try:
        with locating(path=path, tensor=planned.tensor):
            yield
    except IntegrityError as error:
        error.hint = error.hint or "xckpt.verify lists all that is damaged"
        raise


def _next_data(descriptor: OpenFile | None, start: int, nbytes: int) -> tuple[int, int]:
    """Return the size of the hole that begins here, and of the data after it to copy."""
    if descriptor is None or not hasattr(os, "SEEK_DATA"):
        return 0, min(_STEP_NBYTES, nbytes)
    try:
        data = os.lseek(descriptor.fileno, start, os.SEEK_DATA)
        stop = os.lseek(descriptor.fileno, data, os.SEEK_HOLE)
    except OSError as error:
        # The rest is a hole, or the file system does not report holes.
        return (nbytes, 0) if error.errno == errno.ENXIO else (0, min(_STEP_NBYTES, nbytes))
    hole = min(nbytes, data - start)
    return hole, min(_STEP_NBYTES, nbytes - hole, stop - data)
