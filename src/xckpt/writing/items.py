"""Parts and where they go, and which of them are written by one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xckpt.index import Part
from xckpt.plan import Extent
from xckpt.writing.data import LiteralData
from xckpt.writing.hashing import stated_digest
from xckpt.writing.stored_data import StoredData, VerbatimData

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.plan import Literal
    from xckpt.writing.data import Data

__all__ = ["LITERAL", "Item", "groups", "is_copy", "literal_item"]

#: The key of what a format itself knows.
LITERAL = ("", "")

# Below this, parts are gathered and written several at a time.
_SMALL_NBYTES = 1 << 20
_GATHERED_NBYTES = 8 << 20

Key = tuple[str, str]


class Item(NamedTuple):
    """An extent and what is written there.

    Parameters
    ----------
    extent : Extent
        Of the plan.
    data : Data or None
        Its bytes; None where they are in the file already, written by the tasks of a graph.
    level : int or None
        Of compression.
    """

    extent: Extent
    data: Data | None
    level: int | None = None

    @property
    def key(self) -> Key:
        """What a plan calls it."""
        return self.extent.tensor, self.extent.role

    @property
    def is_compressed(self) -> bool:
        """Whether it has to be compressed, so that its stored size is not known yet."""
        return self.extent.part.encoding is not None and not isinstance(self.data, VerbatimData)

    @property
    def nbytes(self) -> int:
        """Stored size of what is not to be compressed."""
        return self.extent.part.nbytes if self.data is None else self.data.nbytes

    @property
    def is_hashed(self) -> bool:
        """Whether its bytes have to be seen in order, to make a digest or to check one."""
        return self.extent.part.digest is not None or stated_digest(self.data) is not None


def literal_item(literal: Literal) -> Item:
    """Make an item of bytes that a format knows, so that they are written with their neighbours."""
    nbytes = len(literal.data)
    part = Part("uint8", (nbytes,), 0, nbytes)
    return Item(Extent(*LITERAL, part, literal.offset), LiteralData(literal.data))


def is_copy(item: Item) -> bool:
    """Return whether the bytes are a range of a file, which nothing has to look at."""
    data = item.data
    if not isinstance(data, StoredData) or item.is_compressed or item.is_hashed:
        return False
    if not data.nbytes:  # nor does anything have to be there
        return False
    return data.reader.part.encoding is None and data.reader.part.inline is None


def groups(items: Sequence[Item]) -> Iterator[tuple[list[Item], bool]]:
    """Join neighbours that are written by one call, and tell whether that is a copy."""
    gathered: list[Item] = []
    for run in _runs(items):
        size = sum([item.nbytes for item in run]) if len(run) > 1 else run[0].nbytes
        if size < _SMALL_NBYTES and _is_gathered(run[0]):
            if gathered and not _are_gathered(gathered, run[-1]):
                yield gathered, False
                gathered = []
            gathered += run
            continue
        if gathered:
            yield gathered, False
            gathered = []
        yield run, len(run) > 1
    if gathered:
        yield gathered, False


def _runs(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Join stored parts that follow each other."""
    run: list[Item] = []
    for item in items:
        if run and not _are_copied_together(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _are_copied_together(last: Item, item: Item) -> bool:
    """Return whether a stored part follows another one in the old file as in the new one."""
    if not (is_copy(last) and is_copy(item)):
        return False
    if last.extent.offset is None or item.extent.offset is None:
        return False
    before, after = last.data.reader, item.data.reader  # type: ignore[union-attr]
    return (
        before.source == after.source
        and before.part.offset + last.nbytes == after.part.offset
        and last.extent.offset + last.nbytes == item.extent.offset
    )


def _are_gathered(group: list[Item], item: Item) -> bool:
    """Return whether a small part is near enough to others."""
    first, last = group[0].extent.offset, item.extent.offset
    if first is None or last is None:
        return False
    return last + item.nbytes - first <= _GATHERED_NBYTES


def _is_gathered(item: Item) -> bool:
    return item.data is not None and not item.is_compressed
