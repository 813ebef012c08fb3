"""Chunked tensors, joined from chunks in several files or archives."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.index import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Shape = tuple[int, ...]


def check_cover(name: str, size: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise `FormatError` unless chunks, as (origin, extents), cover each element exactly once."""
    for origin, extents in chunks:
        if any(at + n > most for at, n, most in zip(origin, extents, size, strict=True)):
            reason = f"at {list(origin)} exceeds its shape {list(size)}"
            raise _broken(f"a chunk of {shown(name)} {reason}")
    if sum([prod(extents) for _, extents in chunks]) != prod(size) or not chunks:
        raise _broken(f"the chunks of {shown(name)} do not cover its shape {list(size)}")
    if len(chunks) == 1:
        return
    # Sweep along the axis with the most chunks, where the fewest chunks overlap at any position.
    axis = max(range(len(size)), key=lambda axis: len({origin[axis] for origin, _ in chunks}))
    unfinished: list[tuple[Shape, Shape]] = []
    for origin, extents in sorted(chunks, key=lambda chunk: chunk[0][axis]):
        ends = tuple([at + n for at, n in zip(origin, extents, strict=True)])
        unfinished = [chunk for chunk in unfinished if chunk[1][axis] > origin[axis]]
        for begin, end in unfinished:
            if all(a < d and c < b for a, b, c, d in zip(begin, end, origin, ends, strict=True)):
                positions = f"{list(begin)} and {list(origin)}"
                raise _broken(f"chunks of {shown(name)} at {positions} overlap")
        unfinished.append((origin, ends))


def joined(name: str, size: Shape, chunks: Mapping[Shape, Tensor]) -> Tensor:
    """Return the chunked tensor of dense chunks, by the positions of their first elements."""
    first = next(iter(chunks.values()))
    if any(
        chunk.dtype != first.dtype or chunk.parts.keys() != {"data"} for chunk in chunks.values()
    ):
        problem = UnsupportedError("its chunks are not all dense with one type", rule="Chunks")
        return Tensor(name, first.dtype, size, {}, problem=problem)
    parts: dict[str, Any] = {}
    for number, (origin, chunk) in enumerate(chunks.items()):
        part = chunk.parts["data"]
        if chunk.order == "F":
            steps = tuple([prod(chunk.shape[:axis]) for axis in range(chunk.ndim)])
            part = replace(part, strides=steps, digest=None)
        parts[str(number)] = replace(part, origin=origin)
    return Tensor(name, first.dtype, size, parts, "chunked", attrs=first.attrs)


def _broken(reason: str) -> FormatError:
    return FormatError(reason, rule="Chunks")
