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
    """Return the next multiple of an alignment."""
    return -(-offset // alignment) * alignment


def placed(
    parts: Iterable[tuple[str, str, Part]], start: int, alignment: int
) -> tuple[Extent, ...]:
    """Place parts as far as sizes are known: up to the first compressed one."""
    extents = []
    end: int | None = start
    for name, role, part in parts:
        offset = None if end is None else aligned(end, alignment)
        extents.append(Extent(name, role, part, offset))
        end = None if offset is None or part.encoding is not None else offset + part.nbytes
    return tuple(extents)


def end_of(written: Mapping[tuple[str, str], Written], start: int) -> int:
    """Return where written parts end."""
    return max([start, *(each.offset + each.nbytes for each in written.values())])
