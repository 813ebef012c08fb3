"""Tensors that are stored alike: whether they have the same bytes, before any is decoded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.dense import DenseArray, QuantizedArray
from xckpt.arrays.sparse import SparseArray
from xckpt.statistics.comparison import Comparison
from xckpt.statistics.kinds import kind_named
from xckpt.statistics.pairs import PairReader, array_of
from xckpt.statistics.reader import Reader
from xckpt.statistics.readers import RawReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.arrays.parts import PartReader
    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.workspace import Workspace

__all__ = ["BytesPass", "StoredReader", "stored_pair"]

Array = np.ndarray[Any, np.dtype[Any]]


def stored_pair(pair: Any) -> PairReader | None:
    """Return the stored bytes of two tensors, where these mean the same if they are the same."""
    if not isinstance(pair, PairReader) or pair.identity is None:
        return None
    if isinstance(pair.first, RawReader) or isinstance(pair.second, RawReader):
        return None
    ours, theirs = (_parts(array_of(each)) for each in (pair.first, pair.second))
    if (
        ours is None
        or theirs is None
        or _meaning(pair.first, ours) != _meaning(pair.second, theirs)
    ):
        return None
    readers = [StoredReader(list(parts.values())) for parts in (ours, theirs)]
    if readers[0].size != readers[1].size:
        return None
    return PairReader(*readers)


class StoredReader(Reader):
    """The bytes of all parts of a tensor, one part after the other.

    Parameters
    ----------
    parts : sequence of PartReader
        The parts; none is decoded.
    """

    kind = kind_named("uint8")
    row = 0

    def __init__(self, parts: Sequence[PartReader]) -> None:
        self.parts = parts
        self.size = self.nbytes = sum(_nbytes(each) for each in parts)
        self.place = (parts[0].source.name, parts[0].part.offset)

    def blocks(self, start: int, stop: int, workspace: Workspace) -> Iterator[tuple[int, Array]]:
        """Read some of the bytes; see `Reader.blocks`."""
        first = 0
        for each in self.parts:
            end = min(first + _nbytes(each), stop)
            step = len(workspace.buffer)
            for at in range(max(first, start), end, step):
                memory = workspace.buffer[: min(step, end - at)]
                _read_into(each, at - first, memory)
                yield at, memory
            first += _nbytes(each)


class BytesPass:
    """The operation that tells whether bytes are the same."""

    def start(
        self, kind: Kind, size: int, row: int, argument: Any, workspace: Workspace
    ) -> _SameBytes:
        """Begin with some bytes of two tensors."""
        return _SameBytes()


class _SameBytes:
    """Looks at bytes until there is a difference."""

    def __init__(self) -> None:
        self.count = 0
        self.are_same = True

    def update(self, start: int, values: Any) -> None:
        """Add bytes."""
        a, b = values["a"], values["b"]
        self.count += len(a)
        if not self.are_same:
            return
        # Eight at a time.
        words = len(a) // 8 * 8
        self.are_same = np.array_equal(a[words:], b[words:]) and np.array_equal(
            a[:words].view(np.uint64), b[:words].view(np.uint64)
        )

    def result(self, implied: int = 0) -> Comparison:
        """Return what was found: all are equal, or who knows how many."""
        return Comparison(self.count, self.count if self.are_same else 0)


def _parts(lazy: Any) -> dict[str, PartReader] | None:
    """Return the parts of an array by their roles; None if it is not made of parts."""
    if isinstance(lazy, DenseArray):
        return {"data": lazy.reader}
    if isinstance(lazy, QuantizedArray | SparseArray):
        return dict(lazy.readers)
    return None


def _meaning(reader: Any, parts: Mapping[str, PartReader]) -> Any:
    """Return what the values depend on besides the bytes; nothing where bytes are not enough."""
    if any(each.verify for each in parts.values()):
        return reader  # a digest that disagrees is to be an error
    lazy = array_of(reader)
    stored = {
        role: replace(each.part, offset=0, digest=None, shard=None, inline=None)
        for role, each in parts.items()
    }
    how = [getattr(lazy, name, None) for name in ("order", "quantization", "strict", "decode")]
    return type(lazy), lazy.shape, stored, how


def _nbytes(part: PartReader) -> int:
    inline = part.part.inline
    return part.part.nbytes if inline is None else len(inline)


def _read_into(part: PartReader, start: int, memory: Array) -> None:
    if part.part.inline is not None:
        memory[:] = np.frombuffer(part.part.inline, np.uint8)[start : start + len(memory)]
        return
    part.source.read_into(part.part.offset + start, memory.data)
