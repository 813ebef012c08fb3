"""A file of a sharded checkpoint, opened when its bytes are first needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.errors import FormatError, MissingShardError
from xckpt.storage.source import Source

if TYPE_CHECKING:
    from xckpt.index import Shard

__all__ = ["ShardSource"]


class ShardSource(Source):
    """The bytes of a shard; absent shards are noticed when they are read, not when listed.

    Parameters
    ----------
    root : Source
        The file that refers to the shard.
    shard : Shard
        Its size and where it may lie.
    label : str
        What the referring file calls it.
    """

    __slots__ = ("_found", "label", "root", "shard")

    def __init__(self, root: Source, shard: Shard, label: str) -> None:
        self.root = root
        self.shard = shard
        self.label = label
        self.name = f"{root.name} (shard {label})"
        self.size = shard.size
        self.identity = (root.name, root.identity, label)
        self._found: Source | None = None

    def __reduce__(self) -> tuple[type[ShardSource], tuple[Source, Shard, str]]:
        return ShardSource, (self.root, self.shard, self.label)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes; see `Source.read`."""
        return self._file().read(offset, nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Give a range of bytes without a copy where the shard is mapped; see `Source.view`."""
        return self._file().view(offset, nbytes)

    def sibling(self, name: str) -> Source:
        """Open another file beside the referring one."""
        return self.root.sibling(name)

    def _file(self) -> Source:
        if self._found is None:
            self._found = self._find()
        return self._found

    def _find(self) -> Source:
        for candidate in self.shard.candidates:
            try:
                found = self.root.sibling(candidate)
            except FileNotFoundError:
                continue
            if found.size != self.shard.size:
                raise FormatError(
                    f"shard {self.label!r} has {found.size} bytes, but {self.root.name} says "
                    f"{self.shard.size}",
                    path=found.name,
                    rule="ShardIdentity",
                )
            return found
        places = ", ".join(self.shard.candidates)
        raise MissingShardError(
            f"shard {self.label!r} is missing",
            path=self.root.name,
            hint=f"Looked beside it for: {places}",
        )
