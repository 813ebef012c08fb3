"""Parts into a file, in file order: raw ones in parallel, compressed ones one after another."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from xckpt.errors import locating
from xckpt.plan import Written
from xckpt.storage.encodings.compress import DEFAULT_LEVEL, new_encoder
from xckpt.writing.copying import Copier
from xckpt.writing.data import PIECE_NBYTES
from xckpt.writing.hashing import Hashing
from xckpt.writing.items import LITERAL, groups, is_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from xckpt.progress import Progress
    from xckpt.storage import Source
    from xckpt.storage.sink import Sink
    from xckpt.writing.items import Item

__all__ = ["stream"]

Key = tuple[str, str]

# Compressed by one thread each, several at a time, in memory; larger ones by several threads.
_COMPRESSED_WHOLE_NBYTES = 32 << 20
# Copied by one thread without a look at the bytes: the kernel does it, and skips holes.
_COPIED_NBYTES = 64 << 20
_THREADS = min(16, max(4, os.cpu_count() or 1))


def stream(
    items: Sequence[Item], sink: Sink, alignment: int, progress: Progress
) -> tuple[dict[Key, Written], int]:
    """Write parts to a file."""
    with ThreadPoolExecutor(_THREADS, "xckpt-write") as threads:
        streaming = _Streaming(sink, threads, progress)
        try:
            return streaming.run(items, alignment)
        except BaseException:
            streaming.stopped = True
            threads.shutdown(wait=True, cancel_futures=True)
            raise


class _Stopped(Exception):  # noqa: N818  never seen outside
    """Another thread failed."""


class _Streaming:
    def __init__(self, sink: Sink, threads: ThreadPoolExecutor, progress: Progress) -> None:
        self.stopped = False
        self._sink = sink
        self._threads = threads
        self._progress = progress
        self._copier = Copier(sink)
        self._pending: deque[Future[Any]] = deque()
        self._written: dict[Key, Written] = {}

    def run(self, items: Sequence[Item], alignment: int) -> tuple[dict[Key, Written], int]:
        position = end = 0
        compressed = self._compress_ahead([item for item in items if _is_compressed_whole(item)])
        for group, is_run in groups(items):
            extent = group[0].extent
            offset = extent.offset
            if offset is None:
                offset = _aligned(position + extent.gap, alignment)
            if group[0].is_compressed:
                position = self._put_compressed(group[0], offset, compressed)
            else:
                position = self._put(group, offset, is_run=is_run)
            end = max(end, position)
        while self._pending:
            self._wait()
        self._written.pop(LITERAL, None)
        return self._written, end

    def _put_compressed(self, item: Item, offset: int, compressed: Iterator[Any]) -> int:
        """Write a part that is compressed, and give where it ends."""
        if _is_compressed_whole(item):
            pieces, digest = next(compressed)
            stored = b"".join(pieces)
            self._submit(self._sink.write, stored, offset)
            nbytes = len(stored)
        else:
            nbytes, digest = self._compress(item, offset)
        self._written[item.key] = Written(offset, nbytes, digest)
        return offset + nbytes

    def _put(self, group: list[Item], offset: int, *, is_run: bool) -> int:
        """Begin to write a group of raw parts, and give where the last one ends."""
        # Only what has offsets is grouped.
        spans = [(group[0], offset), *((each, each.extent.offset or 0) for each in group[1:])]
        if is_run:
            self._put_copy(spans)
        elif len(group) == 1:
            self._put_raw(group[0], offset)
        else:
            self._submit(self._put_gathered, spans)
        last, begin = spans[-1]
        return begin + last.nbytes

    def _put_raw(self, item: Item, offset: int) -> None:
        if item.data is None and not item.is_hashed:
            self._written[item.key] = Written(offset, item.nbytes)
        elif item.is_hashed or item.data is None:
            self._submit(self._put_in_order, item, offset)
        elif is_copy(item):
            self._put_copy([(item, offset)])
        else:
            pieces = item.data.pieces()
            if pieces is None:
                self._submit(self._put_in_order, item, offset)
                return
            for piece in pieces:
                self._submit(self._put_piece, piece.read, offset + piece.start)
            self._written[item.key] = Written(offset, item.nbytes)

    def _put_copy(self, spans: list[tuple[Item, int]]) -> None:
        """Copy stored parts that lie next to each other, in the old file as in the new one."""
        reader = spans[0][0].data.reader  # type: ignore[union-attr]  # it is a StoredData
        first, total = spans[0][1], sum(item.nbytes for item, _ in spans)
        for done in range(0, total, _COPIED_NBYTES):
            count = min(_COPIED_NBYTES, total - done)
            start = reader.part.offset + done
            self._submit(self._copy, reader.source, start, first + done, count)
        for item, offset in spans:
            self._written[item.key] = Written(offset, item.nbytes)

    def _copy(self, source: Any, start: int, offset: int, nbytes: int) -> None:
        self._check_stopped()
        self._copier.copy(source, start, offset, nbytes)
        self._progress.advance(nbytes)

    def _put_piece(self, read: Callable[[], memoryview], offset: int) -> None:
        self._check_stopped()
        data = read()
        self._sink.write(data, offset)
        self._progress.advance(len(data))

    def _put_gathered(self, spans: list[tuple[Item, int]]) -> None:
        """Write small parts by one call."""
        self._check_stopped()
        origin = spans[0][1]
        last, begin = spans[-1]
        gathered = memoryview(bytearray(begin + last.nbytes - origin))
        copied: dict[Source, list[tuple[Item, int]]] = defaultdict(list)
        for item, offset in spans:
            if is_copy(item):
                copied[item.data.reader.source].append((item, offset))  # type: ignore[union-attr]
                continue

            def emit(block: Any, at: int, base: int = offset - origin) -> None:
                gathered[base + at : base + at + len(block)] = block

            self._written[item.key] = Written(offset, item.nbytes, self._encode(item, emit))
        for source, chosen in copied.items():
            parts = [item.data.reader.part for item, _ in chosen]  # type: ignore[union-attr]
            blocks = source.read_ranges([(part.offset, part.nbytes) for part in parts])
            for (item, offset), block in zip(chosen, blocks, strict=True):
                gathered[offset - origin :][: len(block)] = block
                self._written[item.key] = Written(offset, item.nbytes)
            self._progress.advance(sum(map(len, blocks)))
        self._sink.write(gathered, origin)

    def _put_in_order(self, item: Item, offset: int) -> None:
        def emit(block: Any, at: int) -> None:
            if item.data is not None:
                self._sink.write(block, offset + at)

        self._written[item.key] = Written(offset, item.nbytes, self._encode(item, emit, offset))

    def _compress(self, item: Item, offset: int) -> tuple[int, str | None]:
        """Compress a large part by several threads, and write it as it comes."""
        end = 0

        def emit(block: Any, at: int) -> None:
            nonlocal end
            self._sink.write(block, offset + at)
            end = at + len(block)

        digest = self._encode(item, emit, threads=_THREADS)
        return end, digest

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
        blocks = self._read_back(offset, item.nbytes) if item.data is None else item.data.blocks()
        hashing = Hashing(item.data, item.extent.part)
        encoder = None
        if item.is_compressed:
            level = DEFAULT_LEVEL if item.level is None else item.level
            part = item.extent.part
            encoder = new_encoder(str(part.encoding), part.nbytes, level=level, threads=threads)
        at = 0
        with locating(tensor=item.extent.tensor):
            for block in blocks:
                self._check_stopped()
                hashing.add_raw(block)
                stored = block if encoder is None else encoder.add(block)
                hashing.add_stored(stored)
                emit(stored, at)
                at += len(stored)
                self._progress.advance(len(block))
            if encoder is not None:
                stored = encoder.end()
                hashing.add_stored(stored)
                emit(stored, at)
            return hashing.finish()

    def _read_back(self, offset: int, nbytes: int) -> Iterator[bytes]:
        for start in range(offset, offset + nbytes, PIECE_NBYTES):
            yield self._sink.read(start, min(PIECE_NBYTES, offset + nbytes - start))

    def _submit(self, function: Callable[..., Any], *args: Any) -> None:
        while len(self._pending) >= 2 * _THREADS:
            self._wait()
        self._pending.append(self._threads.submit(function, *args))

    def _wait(self) -> None:
        self._pending.popleft().result()

    def _check_stopped(self) -> None:
        if self.stopped:
            raise _Stopped


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _is_compressed_whole(item: Item) -> bool:
    return item.is_compressed and item.extent.part.nbytes <= _COMPRESSED_WHOLE_NBYTES
