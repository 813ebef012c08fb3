"""A readable file: its name, size, identity, and random access to its bytes.

Shards that another file refers to, and several files as one checkpoint, are sources too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from xckpt.errors import CheckpointError, FileChangedError, FormatError, MissingShardError, shown
from xckpt.index import Shard, is_file_name
from xckpt.storage.limits import Pool

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence
    from concurrent.futures import Future


# Ranges closer than `_GAP` are merged, up to a total size that is worth several requests.
_GAP = 1 << 20
_LARGEST_MERGED = 64 << 20
# Size of a huge page, in bytes.
_HUGE = 2 << 20


def components(name: str) -> list[str]:
    """Split a relative path from a file; raise `FormatError` if it leads out of the folder."""
    # Symbolic links belong to the user and are followed: the caches of Hugging Face, git-annex and
    # DVC consist of links that lead out of the folder.
    parts = name.split("/")
    if not all(map(is_file_name, parts)):
        reason = f"{shown(name)} is not the name of a file in the same folder"
        raise FormatError(reason, rule="FileName")
    return parts


def empty(nbytes: int) -> memoryview:
    """Allocate memory to read into, without zeroing it first as `bytearray` does."""
    return empty_array(nbytes).data


def empty_array(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate memory to read into as an array."""
    wasted = -nbytes % _HUGE
    if nbytes < 2 * _HUGE or wasted > nbytes >> 4:
        return np.empty(nbytes, np.uint8)
    # From here on numpy asks for huge pages. Memory that does not begin with one has 512 small ones
    # at its ends, and each has to be faulted in: a quarter of the time of reading 8 MiB.
    memory = np.empty(nbytes + _HUGE, np.uint8)
    start = -memory.__array_interface__["data"][0] % _HUGE
    return memory[start : start + nbytes]


#: Part of the identity of a file without a version.
OPENING = "opening"


def is_of_one_opening(identity: Any) -> bool:
    """Return whether an identity, or a part of it, is valid for one opening of a file only."""
    return isinstance(identity, tuple) and (
        identity[:1] == (OPENING,) or any(map(is_of_one_opening, identity))
    )


class Source(ABC):
    """The bytes of one file, local or remote; pickles by path or URL and identity."""

    # Open descriptors and memory maps belong to the process; all sources with equal names and
    # identities, and therefore equal bytes, share them.
    __slots__ = ("identity", "name", "size")

    #: Whether `check` costs no request.
    is_free_to_check: ClassVar[bool] = False
    #: Whether the file is on a disk that `expect` can prepare.
    is_near = False

    # Absolute path or URL, for messages and for ``encoding["source"]``; an `Address` if the URL has
    # secrets.
    name: str
    size: int  # in bytes, when it was opened
    identity: Hashable  # of this version of the file: size, time, inode, or ETag

    @property
    def is_far(self) -> bool:
        """Whether reads are requests to another machine, which `request` makes in advance."""
        return False

    @property
    def worth_skipping(self) -> int | None:
        """Number of bytes that cost as much as one more read; None if reads are never split."""
        return None

    @property
    def file(self) -> Source:
        """The file that has the bytes: this one, except for a shard."""
        return self

    def request(self, offset: int, nbytes: int, *, is_urgent: bool = False) -> Future[memoryview]:
        """Request a range of bytes of a far file on another thread."""
        raise NotImplementedError

    def expect(self, offset: int, nbytes: int) -> None:  # noqa: B027  a hint
        """Ask the disk to load bytes that are read soon; errors are left to the read."""

    @abstractmethod
    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Fill memory with a range of bytes, or several of equal length, one after another."""

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes into new memory."""
        self.check_range(offset, nbytes)
        memory = empty(nbytes)
        self.read_into([offset], memory)
        return memory

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of bytes without a copy where the file is mapped, else read it."""
        return self.read(offset, nbytes)

    def blocks(self, offset: int, nbytes: int, block_nbytes: int = 1 << 20) -> Iterator[memoryview]:
        """Yield a range of bytes block by block; a block is valid until the next one."""
        self.check_range(offset, nbytes)
        buffer = empty(min(nbytes, block_nbytes))
        for start in range(0, nbytes, block_nbytes):
            memory = buffer[: nbytes - start]
            self.read_into([offset + start], memory)
            yield memory

    def blocks_in(self, memory: memoryview, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Read a range of bytes block by block into given memory, from its beginning each time."""
        # For readers of all blocks: the last one may be the only one that is yielded after a check
        # of the file.
        self.check_range(offset, nbytes)
        for start in range(0, nbytes, len(memory)):
            block = memory[: nbytes - start]
            self.read_into([offset + start], block)
            yield block

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read several ranges of bytes with few requests."""
        for offset, nbytes in ranges:
            self.check_range(offset, nbytes)
        spans = _merged(ranges, self.worth_skipping or _GAP)
        pieces = [memoryview(b"")] * len(ranges)
        with self.reading_ahead([(span.offset, span.nbytes) for span in spans]):
            blocks = [self.view(span.offset, span.nbytes) for span in spans]
        for span, block in zip(spans, blocks, strict=True):
            for position in span.positions:
                offset, nbytes = ranges[position]
                pieces[position] = block[offset - span.offset :][:nbytes]
        return pieces

    def reading_ahead(self, ranges: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
        """Request ranges of a far file before they are read; see `xckpt.storage.prefetch`."""
        del ranges
        return nullcontext()

    def check(self) -> None:  # noqa: B027  bytes in memory do not change
        """Raise `FileChangedError` if the file is no longer the one that was opened."""

    def close(self) -> None:  # noqa: B027  nothing is open for bytes in memory
        """Close the file in this process. The next read reopens it."""

    def reading_header(self) -> AbstractContextManager[Source]:
        """Return a context with the source to read the header of the file from."""
        return nullcontext(self)

    @abstractmethod
    def sibling(self, name: str) -> Source:
        """Open another file by its path relative to the folder of this one."""

    def folders(self) -> tuple[str, ...]:
        """Return the names of the folders next to this file; none if they cannot be listed."""
        return ()

    def leads_out_of(self, other: Source) -> bool:
        """Whether this file is, through links, outside of the folder of another one."""
        return False

    def shard(self, label: str, shard: Shard) -> Source:
        """Return a shard that this file refers to, under the label that it has there."""
        return ShardSource(self, shard, label)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Source) or type(self) is not type(other):
            return NotImplemented
        return (self.name, self.identity) == (other.name, other.identity)

    def __hash__(self) -> int:
        return hash((self.name, self.identity))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def check_range(self, offset: int, nbytes: int) -> None:
        """Raise `FormatError` if a range of bytes is not in the file."""
        if not 0 <= offset <= offset + nbytes <= self.size:
            raise FormatError(
                f"the {nbytes} bytes from here on are not in the file, which has {self.size}",
                path=self.name,
                offset=offset,
            )


class _Span(NamedTuple):
    """A range of bytes to read, and the positions of the requested ranges inside."""

    offset: int
    nbytes: int
    positions: list[int]


def _merged(ranges: Sequence[tuple[int, int]], gap: int) -> list[_Span]:
    """Merge ranges near each other."""
    # `fsspec.utils.merge_offset_ranges` does not return which ranges a merged one has.
    spans: list[_Span] = []
    for position in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, nbytes = ranges[position]
        stop = start + nbytes
        if spans:
            last = spans[-1]
            end = last.offset + last.nbytes
            if stop <= end or (start - end <= gap and stop - last.offset <= _LARGEST_MERGED):
                last.positions.append(position)
                spans[-1] = last._replace(nbytes=max(end, stop) - last.offset)
                continue
        spans.append(_Span(start, nbytes, [position]))
    return spans


# Files of shards that were unpickled in this process: a pickle does not contain the file.
_files: Pool[Source] = Pool(limit=1024)


class ShardSource(Source):
    """The bytes of a shard. A missing shard is an error when it is read, not when it is listed."""

    __slots__ = ("_file", "label", "root", "shard_entry")

    def __init__(self, root: Source, shard: Shard, label: str) -> None:
        self.root = root
        self.shard_entry = shard
        self.label = label  # its name in the referring file
        self.name = f"{root.name} (shard {label})"
        self.size = shard.size
        self._file: Source | None = None
        version: Hashable = shard.digest
        if version is None:  # the identity has to change with the file
            with suppress(OSError, CheckpointError):
                self._file = self._find()
            version = None if self._file is None else self._file.identity
        self.identity = (root.name, root.identity, label, shard.size, version)

    @property
    def worth_skipping(self) -> int | None:
        """See `Source.worth_skipping`."""
        return self.file.worth_skipping

    @property
    def is_far(self) -> bool:
        """See `Source.is_far`."""
        return self.root.is_far

    @property
    def file(self) -> Source:
        """The shard itself; see `Source.file`."""
        if self._file is None:
            self._file = _files.get(self.identity, self._find)
        return self._file

    @contextmanager
    def _reading(self) -> Iterator[Source]:
        try:
            yield self.file
        except FileChangedError:
            _files.discard(self.identity)
            raise

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Read ranges of bytes into given memory; see `Source.read_into`."""
        with self._reading() as file:
            file.read_into(offsets, memory)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes; see `Source.read`."""
        with self._reading() as file:
            return file.read(offset, nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of bytes without a copy where the shard is mapped; see `Source.view`."""
        with self._reading() as file:
            return file.view(offset, nbytes)

    def blocks(self, offset: int, nbytes: int, block_nbytes: int = 1 << 20) -> Iterator[memoryview]:
        """Read a range of bytes block by block; see `Source.blocks`."""
        with self._reading() as file:
            yield from file.blocks(offset, nbytes, block_nbytes)

    def blocks_in(self, memory: memoryview, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Read a range of bytes block by block into given memory; see `Source.blocks_in`."""
        with self._reading() as file:
            yield from file.blocks_in(memory, offset, nbytes)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read several ranges of bytes; see `Source.read_ranges`."""
        with self._reading() as file:
            return file.read_ranges(ranges)

    def check(self) -> None:
        """Look at the referring file, and at the shard; see `Source.check`."""
        self.root.check()
        if self._file is not None:
            self._file.check()

    def sibling(self, name: str) -> Source:
        """Open another file next to the referring one."""
        return self.root.sibling(name)

    def close(self) -> None:
        """Close the file; see `Source.close`."""
        if self._file is not None:
            self._file.close()

    def _find(self) -> Source:
        shard = self.shard_entry
        for candidate in shard.candidates:
            try:
                file = self.root.sibling(candidate)
            except FileNotFoundError:
                continue
            leads_out = shard.is_confined and file.leads_out_of(self.root)
            if leads_out and not self.root.leads_out_of(self.root):
                reason = f"{shown(candidate)} is a link that leads out of the folder"
                raise FormatError(reason, path=self.root.name, rule="FileName")
            if file.size != shard.size:
                raise FormatError(
                    f"shard {self.label!r} has {file.size} bytes, but {self.root.name} states "
                    f"{shard.size}",
                    path=file.name,
                    rule="ShardIdentity",
                )
            return file
        places = ", ".join(shard.candidates)
        raise MissingShardError(
            f"shard {self.label!r} is missing",
            path=self.root.name,
            hint=f"Looked next to it for: {places}",
        )


class ShardedSource(Source):
    """Several files, by the names that `Part.shard` uses, that are one checkpoint."""

    __slots__ = ("files",)

    def __init__(self, name: str, files: Mapping[str, Source]) -> None:
        self.name = name
        self.files = dict(files)
        self.size = sum(file.size for file in files.values())
        self.identity = tuple([(label, f.name, f.identity) for label, f in files.items()])

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Raise `FormatError`: only the shards have bytes."""
        raise FormatError(
            f"no {len(memory)} bytes at {offsets[0]}: these are several files with their own bytes",
            path=self.name,
        )

    def check(self) -> None:
        """Check all files; see `Source.check`."""
        for file in self.files.values():
            file.check()

    def sibling(self, name: str) -> Source:
        """Return one of the files; see `Source.sibling`."""
        try:
            return self.files[name]
        except KeyError:
            raise FileNotFoundError(f"{name} is not one of the files of {self.name}") from None

    def shard(self, label: str, shard: Shard) -> Source:
        """Return one of the files, which is open; see `Source.shard`."""
        return self.files[label] if label in self.files else super().shard(label, shard)

    def close(self) -> None:
        """Close all files; see `Source.close`."""
        for file in self.files.values():
            file.close()


def first_file(source: Source) -> Source:
    """Return a source, or the first of the files that it consists of."""
    while isinstance(source, ShardedSource):
        source = next(iter(source.files.values()))
    return source


def sources_of(source: Source, shards: Mapping[str, Shard]) -> dict[str | None, Source]:
    """Return the files that contain parts, by `Part.shard`; None is the source itself."""
    sources: dict[str | None, Source] = {n: source.shard(n, shard) for n, shard in shards.items()}
    if sources and source.is_free_to_check:
        # Writers replace the referring file before its shards. If it is unchanged, the shards that
        # were just opened are not newer.
        source.check()
    sources[None] = source
    return sources


def files_of(source: Source) -> list[Source]:
    """Return the files that a source reads; a shard counts as the file that refers to it."""
    if isinstance(source, ShardSource):
        return files_of(source.root)
    if isinstance(source, ShardedSource):
        return [file for shard in source.files.values() for file in files_of(shard)]
    return [source]
