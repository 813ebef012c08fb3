"""A file of a sharded checkpoint, opened when its bytes are first needed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FileChangedError, FormatError, MissingShardError
from xckpt.storage.local import LocalSource
from xckpt.storage.pool import Pool
from xckpt.storage.source import Source

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from xckpt.index import Shard

__all__ = ["ShardSource", "ShardedSource", "files_of", "sources_of"]

# Files that this process found for shards that came to it by pickle, without the file.
_files: Pool[Source] = Pool(limit=1024)


def sources_of(source: Source, shards: Mapping[str, Shard]) -> dict[str | None, Source]:
    """Return the files that parts are in: the shards by the names that `Part.shard` uses."""
    found: dict[str | None, Source] = {n: source.shard(n, shard) for n, shard in shards.items()}
    if found and isinstance(source, LocalSource):
        # Who replaces shards replaces the file that refers to them first: what is found now is
        # not newer than this file.
        source.check()
    found[None] = source
    return found


def files_of(source: Source) -> list[Source]:
    """Return the files that a source reads, but for shards: those that refer to these."""
    if isinstance(source, ShardSource):
        return files_of(source.root)
    if isinstance(source, ShardedSource):
        return [file for each in source.files.values() for file in files_of(each)]
    return [source]


class ShardSource(Source):
    """The bytes of a shard; absent shards are noticed when they are read, not when listed.

    A shard without a digest is looked for at once: what is computed from it must have another
    name when it is another file.

    Parameters
    ----------
    root : Source
        The file that refers to the shard.
    shard : Shard
        Its size and where it may lie.
    label : str
        What the referring file calls it.
    """

    __slots__ = ("_found", "label", "root", "shard_entry")

    def __init__(self, root: Source, shard: Shard, label: str) -> None:
        self.root = root
        self.shard_entry = shard
        self.label = label
        self.name = f"{root.name} (shard {label})"
        self.size = shard.size
        self._found: Source | None = None
        version: Hashable = shard.digest
        if version is None:
            self._found = self._present()
            version = None if self._found is None else self._found.identity
        self.identity = (root.name, root.identity, label, shard.size, version)

    def __reduce__(self) -> tuple[Any, ...]:
        told = (self.root, self.shard_entry, self.label, self.identity, self._found)
        return _restored, told

    @property
    def worth_skipping(self) -> int | None:
        """See `Source.worth_skipping`."""
        return self.found.worth_skipping

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes; see `Source.read`."""
        with self._file() as file:
            return file.read(offset, nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of bytes without a copy where the shard is mapped; see `Source.view`."""
        with self._file() as file:
            return file.view(offset, nbytes)

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Read a range of bytes into given memory; see `Source.read_into`."""
        with self._file() as file:
            file.read_into(offset, memory)

    def read_pieces(self, offsets: Sequence[int], nbytes: int, memory: memoryview) -> None:
        """Read ranges of equal length; see `Source.read_pieces`."""
        with self._file() as file:
            file.read_pieces(offsets, nbytes, memory)

    def blocks(self, offset: int, nbytes: int, block_nbytes: int = 1 << 20) -> Iterator[memoryview]:
        """Read a range of bytes block by block; see `Source.blocks`."""
        with self._file() as file:
            yield from file.blocks(offset, nbytes, block_nbytes)

    def check(self) -> None:
        """Look at the referring file, and at the shard; see `Source.check`."""
        self.root.check()
        if self._found is not None:
            self._found.check()

    def sibling(self, name: str) -> Source:
        """Open another file beside the referring one."""
        return self.root.sibling(name)

    def close(self) -> None:
        """Let go of the file; see `Source.close`."""
        if self._found is not None:
            self._found.close()

    @property
    def found(self) -> Source:
        """The file itself."""
        if self._found is None:
            self._found = _files.get(self.identity, self._find)
        return self._found

    @contextmanager
    def _file(self) -> Iterator[Source]:
        try:
            yield self.found
        except FileChangedError:
            _files.discard(self.identity)
            raise

    def _present(self) -> Source | None:
        try:
            return self._find()
        except (OSError, CheckpointError):
            return None

    def _find(self) -> Source:
        shard = self.shard_entry
        for candidate in shard.candidates:
            try:
                found = self.root.sibling(candidate)
            except FileNotFoundError:
                continue
            if found.size != shard.size:
                raise FormatError(
                    f"shard {self.label!r} has {found.size} bytes, but {self.root.name} says "
                    f"{shard.size}",
                    path=found.name,
                    rule="ShardIdentity",
                )
            return found
        places = ", ".join(shard.candidates)
        raise MissingShardError(
            f"shard {self.label!r} is missing",
            path=self.root.name,
            hint=f"Looked beside it for: {places}",
        )


def _restored(
    root: Source, shard: Shard, label: str, identity: Hashable, found: Source | None
) -> ShardSource:
    source = object.__new__(ShardSource)
    source.root, source.shard_entry, source.label = root, shard, label
    source.name = f"{root.name} (shard {label})"
    source.size, source.identity = shard.size, identity
    source._found = found
    return source


class ShardedSource(Source):
    """Several files that are one checkpoint: all bytes are in the shards.

    Parameters
    ----------
    name : str
        Of all of them, for messages.
    files : mapping of str to Source
        By the names that `Part.shard` uses.
    """

    __slots__ = ("files",)

    def __init__(self, name: str, files: Mapping[str, Source]) -> None:
        self.name = name
        self.files = dict(files)
        self.size = sum(file.size for file in files.values())
        self.identity = tuple([(label, f.name, f.identity) for label, f in files.items()])

    def read(self, offset: int, nbytes: int) -> memoryview:
        """There are no bytes but those of the shards."""
        raise FormatError(
            f"no {nbytes} bytes at {offset}: these are several files, and data are in each",
            path=self.name,
        )

    def check(self) -> None:
        """Look at all files; see `Source.check`."""
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
        """Let go of all files; see `Source.close`."""
        for file in self.files.values():
            file.close()
