"""Where parts go in a new file: one behind the other, each at a multiple of the alignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.plan import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.index import Part
    from xckpt.plan import Written

__all__ = ["aligned", "end_of", "placed"]


def aligned(offset: int, alignment: int) -> int:
    """Return the next multiple of an alignment.

    Parameters
    ----------
    offset, alignment : int
        In bytes.

    Returns
    -------
    int
        `offset` itself where it is one.

    Examples
    --------
    >>> aligned(65, 64), aligned(64, 64)
    (128, 64)
    """
    return -(-offset // alignment) * alignment


def placed(
    parts: Iterable[tuple[str, str, Part]], start: int, alignment: int
) -> tuple[Extent, ...]:
    """Place parts as far as sizes are known: up to the first compressed one.

    Parameters
    ----------
    parts : iterable of tuple
        Tensor, role and part, in file order.
    start : int
        The first byte that is free.
    alignment : int
        In bytes.

    Returns
    -------
    tuple of Extent
        In the same order.
    """
    extents = []
    end: int | None = start
    for name, role, part in parts:
        offset = None if end is None else aligned(end, alignment)
        extents.append(Extent(name, role, part, offset))
        end = None if offset is None or part.encoding is not None else offset + part.nbytes
    return tuple(extents)


def end_of(written: Mapping[tuple[str, str], Written], start: int) -> int:
    """Return where written parts end.

    Parameters
    ----------
    written : mapping of tuple to Written
        All parts of the file.
    start : int
        Where the first could begin.

    Returns
    -------
    int
        The first byte behind them.
    """
    return max([start, *(each.offset + each.nbytes for each in written.values())])
