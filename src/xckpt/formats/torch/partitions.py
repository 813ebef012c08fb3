"""Tensors in the flat vectors of an optimizer, which are partitioned over ranks (ZeRO).

A group of parameters is one flat float32 vector. In stages 1 and 2 it has the parameters one after
another, and is cut into one piece for each rank; the end is padded to twice the number of ranks. In
stage 3 each parameter is cut by itself, into pieces of equal length, the last one padded; a rank
has its pieces of all groups one after another. The moments of an optimizer are vectors of the same
layout.

Specification: deepspeed/utils/zero_to_fp32.py of github.com/deepspeedai/DeepSpeed, 0.19.8.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats.pickles.records import spelled
from xckpt.index import Part, Tensor, runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Shapes = dict[str, tuple[int, ...]]
    # The flat vectors of each rank, by group.
    Flats = Sequence[Sequence[Part]]


class Slot(NamedTuple):
    """The shape of a parameter, and its first element in its vector, or in each rank's vector."""

    shape: tuple[int, ...]
    group: int = 0
    start: int = 0


def share_of(shape: tuple[int, ...], count: int) -> int:
    """Return the number of elements of a parameter on each of the ranks in stage 3."""
    return -(-prod(shape) // count)


@dataclass(frozen=True, slots=True)
class Partitions:
    """The slots of parameters in the vectors; in stage 3 each parameter is cut by itself."""

    slots: Mapping[str, Slot]
    is_cut: bool

    @classmethod
    def joined(cls, shapes: Sequence[Shapes], flats: Flats, gaps: Any) -> Partitions:
        """Return the layout of stages 1 and 2; `gaps` has the padding after each parameter."""
        slots: dict[str, Slot] = {}
        if len(shapes) != len(flats[0]):
            reason = f"it has {len(shapes)} groups, but the optimizer has {len(flats[0])}"
            raise FormatError(reason, rule="Groups")
        for group, named in enumerate(shapes):
            paddings = gaps[group] if type(gaps) is list and group < len(gaps) else [0] * len(named)
            if (
                type(paddings) is not list
                or len(paddings) != len(named)
                or any(type(padding) is not int or padding < 0 for padding in paddings)
            ):
                reason = f"group {group} has {len(named)} parameters, but {spelled(paddings)} gaps"
                raise FormatError(reason, rule="Alignment")
            size, start = sum([size_of(rank[group]) for rank in flats]), 0
            for (name, shape), padding in zip(named.items(), paddings, strict=True):
                slots[name] = Slot(shape, group, start)
                end = start + prod(shape)
                _require_room(name, end, size)
                start = end + padding
            _require_size(start, size, 2 * len(flats))
        return cls(slots, is_cut=False)

    @classmethod
    def cut(cls, shapes: Sequence[Shapes], flats: Flats) -> Partitions:
        """Return the layout of stage 3; all ranks have vectors of the same lengths."""
        slots: dict[str, Slot] = {}
        size, start = sum([size_of(part) for part in flats[0]]), 0
        for named in shapes:
            for name, shape in named.items():
                slots[name] = Slot(shape, 0, start)
                start += share_of(shape, len(flats))
                _require_room(name, start, size)
        _require_size(start, size, 1)
        return cls(slots, is_cut=True)

    def tensors(self, flats: Flats, prefix: str = "", suffix: str = "") -> dict[str, Tensor]:
        """Return the parameters in vectors, under their names with a prefix and a suffix."""
        # In stage 3 a vector for each rank, otherwise for each group.
        rows = flats if self.is_cut else list(zip(*flats, strict=True))
        vectors = [_Vector(row) for row in rows]
        names = {name: f"{prefix}{name}{suffix}" for name in self.slots}
        return {
            names[name]: _tensor(names[name], slot.shape, self._pieces(vectors, slot))
            for name, slot in self.slots.items()
        }

    def _pieces(self, vectors: Sequence[_Vector], slot: Slot) -> Iterator[_Piece]:
        start, remaining = slot.start, prod(slot.shape)
        if not self.is_cut:
            yield from vectors[slot.group].pieces(start, start + remaining)
            return
        share = share_of(slot.shape, len(vectors))
        for vector in vectors:
            if remaining <= 0:
                break
            yield from vector.pieces(start, start + min(share, remaining))
            remaining -= share


class _Piece(NamedTuple):
    """A range of elements of a flat vector."""

    part: Part
    first: int
    length: int


class _Vector:
    """Flat vectors one after another."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate([size_of(part) for part in parts])]

    def pieces(self, start: int, stop: int) -> Iterator[_Piece]:
        """Return the pieces of a range, which is within the vectors."""
        vector = bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[vector + 1])
            if start < end:
                yield _Piece(self._parts[vector], start - self._starts[vector], end - start)
            start, vector = end, vector + 1


def size_of(part: Part) -> int:
    """Return the number of elements of a flat vector."""
    return prod(part.shape or ())


def _require_room(name: str, end: int, size: int) -> None:
    """Raise if a parameter ends after its flat vector."""
    if end > size:
        reason = f"it ends at element {end} of its flat vector, which has {size}"
        raise FormatError(reason, tensor=name, rule="Flat")


def _require_size(end: int, size: int, alignment: int) -> None:
    """Raise if the flat vectors do not end with the last parameter and its padding."""
    if -(-end // alignment) != -(-size // alignment):
        reason = f"the parameters take {end} elements, but the flat vectors have {size}"
        raise FormatError(reason, rule="Flat")


def _tensor(name: str, shape: tuple[int, ...], pieces: Iterator[_Piece]) -> Tensor:
    """Join the pieces of a tensor, which are ranges of its elements, as blocks of it."""
    blocks: list[Part] = []
    position = 0
    for part, first, length in pieces:
        offset = part.offset + nbytes_of(part.dtype, first)
        for key in runs_of(shape, position, position + length):
            extents = tuple([entry.stop - entry.start for entry in key])
            nbytes = nbytes_of(part.dtype, prod(extents))
            # A checksum covers the whole vector, which begins with this block.
            within = part if part.digest is not None and offset == part.offset else None
            block = replace(
                part,
                shape=extents,
                offset=offset,
                nbytes=nbytes,
                digest=None,
                within=within,
                origin=tuple([entry.start for entry in key]),
            )
            blocks.append(block)
            offset += nbytes
        position += length
    blocks = blocks or [Part("float32", shape, 0, 0)]
    dtype = blocks[0].dtype
    if any(block.dtype != dtype for block in blocks):
        problem = UnsupportedError("its pieces have several element types", rule="DType")
        return Tensor(name, dtype, shape, {}, problem=problem)
    if len(blocks) == 1:
        return Tensor(name, dtype, shape, {"data": replace(blocks[0], origin=None)})
    parts = {str(position): block for position, block in enumerate(blocks)}
    return Tensor(name, dtype, shape, parts, "chunked")
