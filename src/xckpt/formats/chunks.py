"""Chunked tensors, joined from chunks in several files or archives."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.elements import nbytes_of
from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.index import Tensor, span_of, strides_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    Shape = tuple[int, ...]

# Chunks of a grid that are not stored, beyond twice as many as those that are.
_MOST_MISSING = 4096


def check_cover(name: str, shape: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise `FormatError` unless chunks, as (origin, extents), cover each element exactly once."""
    for origin, extents in chunks:
        if any(end > size for end, size in zip(_ends(origin, extents), shape, strict=True)):
            reason = f"at {list(origin)} exceeds its shape {list(shape)}"
            raise _cover_error(f"a chunk of {shown(name)} {reason}")
    if sum([prod(extents) for _, extents in chunks]) != prod(shape) or not chunks:
        raise _cover_error(f"the chunks of {shown(name)} do not cover its shape {list(shape)}")
    if len(chunks) == 1:
        return
    # Sweep along the axis with the most chunks, where the fewest chunks overlap at any position.
    axis = max(range(len(shape)), key=lambda axis: len({origin[axis] for origin, _ in chunks}))
    unfinished: list[tuple[Shape, Shape]] = []
    for origin, extents in sorted(chunks, key=lambda chunk: chunk[0][axis]):
        ends = _ends(origin, extents)
        unfinished = [chunk for chunk in unfinished if chunk[1][axis] > origin[axis]]
        for begin, end in unfinished:
            if _overlap((begin, end), (origin, ends)):
                positions = f"{list(begin)} and {list(origin)}"
                raise _cover_error(f"chunks of {shown(name)} at {positions} overlap")
        unfinished.append((origin, ends))


def clipped(origin: Shape, chunk: Shape, shape: Shape) -> Shape:
    """Return the extents of a chunk of a regular grid, without its elements beyond the shape."""
    return tuple([min(n, end - at) for at, n, end in zip(origin, chunk, shape, strict=True)])


def missing(shape: Shape, chunk: Shape, stored: Collection[Shape]) -> Iterator[tuple[Shape, Shape]]:
    """Yield the origins and extents of the chunks of a regular grid that are not stored."""
    if not stored:  # then the whole tensor is one chunk
        yield (0,) * len(shape), shape
        return
    grid = [range(0, n, step) for n, step in zip(shape, chunk, strict=True)]
    count = prod([len(axis) for axis in grid]) - len(stored)
    if count > 2 * len(stored) + _MOST_MISSING:
        raise UnsupportedError(f"{count} of its chunks are not stored", rule="Chunks")
    for origin in product(*grid) if count else ():
        if origin not in stored:
            yield origin, clipped(origin, chunk, shape)


def _ends(origin: Shape, extents: Shape) -> Shape:
    return tuple([start + extent for start, extent in zip(origin, extents, strict=True)])


def _overlap(first: tuple[Shape, Shape], second: tuple[Shape, Shape]) -> bool:
    """Return whether two boxes, as pairs of first corner and ends, have an element in common."""
    corners = zip(*first, *second, strict=True)
    return all(start < other_end and other_start < end
               for start, end, other_start, other_end in corners)  # fmt: skip


def joined(name: str, shape: Shape, chunks: Mapping[Shape, Tensor]) -> Tensor:
    """Join dense chunks, by the positions of their first elements, into a chunked tensor."""
    first = next(iter(chunks.values()))
    problem = next((chunk.problem for chunk in chunks.values() if chunk.problem is not None), None)
    if problem is not None:
        return Tensor(name, first.dtype, shape, {}, problem=problem)
    if any(
        chunk.dtype != first.dtype or chunk.parts.keys() != {"data"} for chunk in chunks.values()
    ):
        mixed = UnsupportedError("its chunks are not all dense with one type", rule="Chunks")
        return Tensor(name, first.dtype, shape, {}, problem=mixed)
    parts: dict[str, Any] = {}
    for number, (origin, chunk) in enumerate(chunks.items()):
        part = chunk.parts["data"]
        if chunk.order == "F":
            part = replace(part, strides=strides_of(chunk.shape, "F"), digest=None)
        parts[str(number)] = replace(part, origin=origin)
    return Tensor(name, first.dtype, shape, parts, "chunked", attrs=first.attrs)


def sliced(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    """Return a dense tensor between two positions along an axis, which has the same bytes."""
    shape = tuple([stop - start if a == axis else n for a, n in enumerate(tensor.shape)])
    if tensor.problem is not None:
        return replace(tensor, shape=shape)
    part = tensor.parts["data"]
    itemsize = nbytes_of(part.dtype, 1)
    if nbytes_of(part.dtype, 2) < 2 * itemsize:
        reason = f"elements of {shown(tensor.name)} share bytes"
        raise UnsupportedError(reason, tensor=tensor.name, rule="Chunks")
    strides = part.strides or strides_of(tensor.shape, tensor.order)
    is_run = part.strides is None and strides[axis] == max(strides)
    first, nbytes = start * strides[axis] * itemsize, span_of(shape, strides) * itemsize
    # A digest covers all bytes of the tensor, and is checked with the slice that begins them.
    within = part.within or (None if part.digest is None else part)
    piece = replace(
        part,
        shape=shape,
        digest=None,
        within=None if first else within,
        strides=None if is_run else strides,
    )
    if part.encoding is not None:
        piece = replace(piece, skip=(part.skip or 0) + first, decoded_nbytes=nbytes)
    elif part.inline is not None:
        piece = replace(piece, inline=part.inline[first : first + nbytes], nbytes=nbytes)
    else:
        piece = replace(piece, offset=part.offset + first, nbytes=nbytes)
    order = tensor.order if is_run else "C"
    return replace(tensor, shape=shape, parts={"data": piece}, order=order)


def _cover_error(reason: str) -> FormatError:
    return FormatError(reason, rule="Chunks")
