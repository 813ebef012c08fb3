"""What a file says of each tensor, in three encodings; checked is only that it is in the file."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from xckpt.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.cursor import Cursor

__all__ = ["BINCODE", "COMPACT", "Entry", "indexed_entries", "inline_entries"]

_MOST_AXES = 64  # numpy's limit
_ID_NBYTES = 16

# The same fields in the same order; they differ in how lengths and counts are written.
COMPACT, BINCODE = Struct("<I"), Struct("<Q")

# By number of axes: the extents, element type, flag, offset where there is one, size in bytes.
_INDEXED = [Struct(f"<{rank}QIBQQ") for rank in range(_MOST_AXES + 1)]
_INLINE = [Struct(f"<{rank}QIBQ") for rank in range(_MOST_AXES + 1)]


class Entry(NamedTuple):
    """One tensor as the file describes it.

    Parameters
    ----------
    at : int
        Where the description begins in the file.
    name : str
        Name of the tensor.
    stored_id : int
        Its base id; 0 where none is stored.
    shape : tuple of int
        Its shape, each extent below 2 to the 64th.
    tag : int
        Number of the element type.
    flag : int
        The byte that says whether it requires a gradient.
    offset : int
        Where its data begin.
    nbytes : int
        Their size in bytes.
    """

    at: int
    name: str
    stored_id: int
    shape: tuple[int, ...]
    tag: int
    flag: int
    offset: int
    nbytes: int


def indexed_entries(cursor: Cursor, lengths: Struct, *, ids: bool) -> Iterator[Entry]:
    """Read the index of a file of version 2, which the cursor has entered.

    Parameters
    ----------
    cursor : Cursor
        At the start of the index.
    lengths : struct.Struct
        `COMPACT` or `BINCODE`. The latter must fill the index; what follows the former's last
        entry is ignored, as it is upstream.
    ids : bool
        Whether base ids are stored.

    Yields
    ------
    Entry
        Each tensor in the order of the file.

    Raises
    ------
    FormatError
        If an entry is not inside the index (rule Truncated) or its name is not UTF-8 (Name).
    UnsupportedError
        If a tensor has more axes than an array can have.
    """
    smallest = 2 * lengths.size + _INDEXED[0].size + (_ID_NBYTES if ids else 0)
    for _ in range(_checked_count(cursor, lengths, smallest)):
        at = cursor.at
        name = _name(cursor, lengths)
        stored_id = int.from_bytes(cursor.take(_ID_NBYTES, "a base id"), "little") if ids else 0
        *shape, tag, flag, offset, nbytes = _rest(cursor, lengths, _INDEXED, name)
        yield Entry(at, name, stored_id, tuple(shape), tag, flag, offset, nbytes)
    if lengths is BINCODE and cursor.left:
        raise FormatError(
            f"{cursor.left} bytes follow the last entry of the index",
            offset=cursor.at,
            rule="IndexLength",
        )


def inline_entries(cursor: Cursor) -> Iterator[Entry]:
    """Read the records of a file of version 1, in which each tensor's data follow its description.

    Parameters
    ----------
    cursor : Cursor
        At the number of records.

    Yields
    ------
    Entry
        Each tensor in the order of the file.

    Raises
    ------
    FormatError
        If a record is not inside the file (rule Truncated) or its name is not UTF-8 (Name).
    UnsupportedError
        If a tensor has more axes than an array can have.
    """
    smallest = 2 * COMPACT.size + _INLINE[0].size
    for _ in range(_checked_count(cursor, COMPACT, smallest)):
        at = cursor.at
        name = _name(cursor, COMPACT)
        *shape, tag, flag, nbytes = _rest(cursor, COMPACT, _INLINE, name)
        offset = cursor.at
        try:
            cursor.skip(nbytes, "data")
        except FormatError as error:
            raise error.located(tensor=name) from None
        yield Entry(at, name, 0, tuple(shape), tag, flag, offset, nbytes)


def _checked_count(cursor: Cursor, lengths: Struct, smallest: int) -> int:
    at = cursor.at
    count = cursor.number(lengths, "number of tensors")
    if count * smallest > cursor.left:
        raise FormatError(
            f"{count} tensor(s) need {count * smallest} bytes or more, but {cursor.left} are left",
            offset=at,
            rule="TensorCount",
        )
    return count


def _name(cursor: Cursor, lengths: Struct) -> str:
    size = cursor.number(lengths, "length of a name")
    at = cursor.at
    try:
        return cursor.take(size, "name of a tensor").decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"a name is not UTF-8: {error}", offset=at, rule="Name") from error


def _rest(cursor: Cursor, lengths: Struct, by_rank: list[Struct], name: str) -> tuple[int, ...]:
    """Read what follows the name and the id: the number of axes, on which the rest depends."""
    at = cursor.at
    rank = cursor.number(lengths, "number of axes")
    if rank > _MOST_AXES:
        cursor.skip(8 * rank, "a shape")
        raise UnsupportedError(
            f"{rank} axes are more than the {_MOST_AXES} that arrays can have",
            offset=at,
            tensor=name,
            rule="Rank",
        )
    fields = by_rank[rank]
    return fields.unpack(cursor.take(fields.size, "a description"))
