"""Byte ranges that are read together: near ones become one request, and are cut apart again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Span", "merge", "split"]

# Requests do not grow beyond this by merging, so that several can be under way at a time.
_LARGEST_MERGED = 64 << 20


@dataclass(slots=True)
class Span:
    """Ranges that are read as one.

    Parameters
    ----------
    start, stop : int
        Half-open range in the file.
    members : list of int
        Which of the ranges asked for lie in it.
    """

    start: int
    stop: int
    members: list[int]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


def merge(ranges: Sequence[tuple[int, int]], gap: int) -> list[Span]:
    """Join ranges that are near each other."""
    spans: list[Span] = []
    for member in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, nbytes = ranges[member]
        stop = start + nbytes
        last = spans[-1] if spans else None
        if last is not None and (stop <= last.stop or _near(last, start, stop, gap)):
            last.stop = max(last.stop, stop)
            last.members.append(member)
        else:
            spans.append(Span(start, stop, [member]))
    return spans


def _near(last: Span, start: int, stop: int, gap: int) -> bool:
    return start - last.stop <= gap and stop - last.start <= _LARGEST_MERGED


def split(
    ranges: Sequence[tuple[int, int]], spans: Sequence[Span], blocks: Sequence[memoryview]
) -> list[memoryview]:
    """Cut the ranges out of the spans that were read."""
    pieces = [memoryview(b"")] * len(ranges)
    for span, block in zip(spans, blocks, strict=True):
        for member in span.members:
            offset, nbytes = ranges[member]
            pieces[member] = block[offset - span.start :][:nbytes]
    return pieces
