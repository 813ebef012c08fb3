"""The places of tensors in both models, and the causes of a difference that a place admits.

A relation that holds for every element is not always an explanation. It has to be one that a
conversion makes of this tensor (`Places`), the numbers have to be rounded as real numbers are
(`doubt`), and the siblings of a tensor in other layers have to be changed in the same way
(`explaining.siblings`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from xckpt.comparison.arrangements import HalvesExchanged, Padded, RopePermuted, Step
from xckpt.comparison.names import are_other_inputs, are_other_roles, role_of
from xckpt.comparison.relations.causes import FRACTION_BITS, Elementwise, Relation, Transform
from xckpt.formatting import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from xckpt.comparison.relations.verification import Link
    from xckpt.comparison.sketches import Sketched
    from xckpt.structure.families import Place
    from xckpt.structure.model import Structure

#: Slots that rotary embeddings turn, with the axes of their heads.
TURNED_SLOTS = {"attention.query": "head", "attention.key": "head_kv"}
_ROTARY_ROLES = frozenset({"query", "key"})
# Slots and kinds of modules whose weights have one order of axes in all libraries.
_UPRIGHT = frozenset({"token_embedding", "position_embedding", "norm"})
# Family whose embeddings a conversion scales: conversion/jais.py of llama.cpp.
_SCALED_FAMILY, _SCALED_SLOTS = "jais", frozenset({"token_embedding", "output"})
# Index of the stages of a network, which some families number from the last to the first.
_STAGE = "stage"
# Agreement of two tensors that are known to have one place.
_CERTAIN = 4
# A larger share of elements does not stay equal when real numbers are quantised.
_MOST_EQUAL = 0.5


class Places:
    """The places of the tensors of both sides in their models."""

    def __init__(self, ours: Structure, theirs: Structure) -> None:
        # A side that does not state its type has the type of the other one.
        types = [side.facts.types for side in (ours, theirs)]
        self.structures = tuple(
            side.with_facts(replace(side.facts, types=fallback))
            if fallback and not stated
            else side
            for side, stated, fallback in zip((ours, theirs), types, types[::-1], strict=True)
        )
        self.types = {*types[0], *types[1]}
        self._places: dict[tuple[int, str], Place | None] = {}

    def place(self, side: int, name: str) -> Place | None:
        """Return the place of a tensor of a side in its family; None if it is unknown."""
        if (side, name) not in self._places:
            structure = self.structures[side]
            self._places[side, name] = structure.place(name) if name in structure else None
        return self._places[side, name]

    def both(self, names: tuple[str, str]) -> tuple[Place | None, Place | None]:
        """Return the places of a tensor of each side."""
        return self.place(0, names[0]), self.place(1, names[1])

    def is_rotary(self, side: int, name: str) -> bool | None:
        """Return whether rotary embeddings turn the outputs of a tensor; None if it is unknown."""
        place = self.place(side, name)
        if place is not None and place.slot:
            return place.is_rotary and place.slot.startswith("attention.")
        role = role_of(name)
        return None if role is None else role in _ROTARY_ROLES

    def note(self, side: int, tensor: Sketched) -> None:
        """Note what the place of a tensor shows."""
        tensor.is_rotary = self.is_rotary(side, tensor.name)
        tensor.place = self.key(side, tensor.name)

    def may_be_turned(self, names: tuple[str, str]) -> bool:
        """Return whether libraries store a tensor with its axes in different orders."""
        kinds = {
            kind
            for structure, name in zip(self.structures, names, strict=True)
            if name in structure
            for kind in (structure.module_type(name), structure.slot(name))
        }
        return not kinds & _UPRIGHT

    def key(self, side: int, name: str) -> tuple[object, ...] | None:
        """Return the place of a tensor as both sides describe it; None if it is unknown."""
        place = self.place(side, name)
        if place is None or not place.slot:
            return None
        numbers = [numbers_of[_slot_of(place)] for numbers_of in self._numbers]
        indices = self._indices(side, place)
        if not (numbers[0] <= numbers[1] or numbers[1] <= numbers[0]):
            # The sides count from different numbers: count both from their first one.
            ours, theirs = (set(map(partial(_less, _first(n)), n)) for n in numbers)
            if ours != theirs:
                return None
            indices = _less(_first(numbers[side]), indices)
        return *_slot_of(place), indices

    @cached_property
    def _numbers(self) -> list[dict[tuple[str, ...], set[tuple[int, ...]]]]:
        """The numbers of the tensors in each slot, of each side."""
        sides = []
        for side, structure in enumerate(self.structures):
            numbers: dict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
            for place in filter(None, [self.place(side, name) for name in structure]):
                numbers[_slot_of(place)].add(self._indices(side, place))
            sides.append(numbers)
        return sides

    def _indices(self, side: int, place: Place) -> tuple[int, ...]:
        """Return the numbers of a place, with stages counted from the first."""
        top = self._last_stages[side]
        return tuple([
            top - number if place.is_backwards and index == _STAGE else number
            for index, number in place.indices
        ])  # fmt: skip

    @cached_property
    def _last_stages(self) -> list[int]:
        """The highest number of the stages of each side that are numbered from the last one."""
        tops = []
        for side, structure in enumerate(self.structures):
            places = filter(None, [self.place(side, name) for name in structure])
            indices = [dict(place.indices) for place in places if place.is_backwards]
            tops.append(max([numbers.get(_STAGE, 0) for numbers in indices], default=0))
        return tops

    def agree(self, a: str, b: str) -> bool:
        """Return whether two tensors are known to have the same place."""
        key = self.key(0, a)
        return key is not None and key == self.key(1, b) and not are_other_inputs(a, b)

    def likelihood(self, a: str, b: str) -> int:
        """Return how well the places of two tensors agree; 0 if they are unknown."""
        if self.agree(a, b):
            return _CERTAIN
        slots, kinds, ndims = zip(
            *[self._facts(side, n) for side, n in enumerate((a, b))], strict=True
        )
        # A stack is of another kind, and a convolution of patches may be stored as a linear layer.
        are_kinds = ndims[0] == ndims[1] and {*kinds} != {"linear", "convolution"}
        facts = [slots, kinds] if are_kinds else [slots]
        points = [1 if first == second else -1 for first, second in facts if first and second]
        return sum(points) - are_other_roles(a, b)

    def _facts(self, side: int, name: str) -> tuple[str, str, int]:
        """Return the slot of a tensor, the kind of its module, and its number of axes.

        The slot and the kind are empty if they are unknown.
        """
        structure = self.structures[side]
        if name not in structure:
            return "", "", 0
        slot, ndim = structure.slot(name), len(structure.described(name).shape)
        # Unknown families have slots in attention and feed-forward layers only.
        is_known = "." in slot or structure.place(name) is not None
        return slot if is_known else "", structure.module_type(name), ndim

    def are_turned(self, names: tuple[str, str]) -> bool:
        """Return whether the axes of the outputs of two weights are known, and differ."""
        first, second = (
            structure.channels(name) if name in structure else None
            for structure, name in zip(self.structures, names, strict=True)
        )
        if first is None or second is None:
            return False
        return first.are_known and second.are_known and first.rows != second.rows

    def other_outputs(self, names: tuple[str, str], *, is_turned: bool) -> tuple[int, int] | None:
        """Return a side, and the axis of its outputs that follows from the other file and a turn.

        None unless exactly one file states the axes of the matrix, as graphs do.
        """
        stated = [
            structure.channels(name)
            if name in structure and any(structure.described(name).axes)
            else None
            for structure, name in zip(self.structures, names, strict=True)
        ]
        known = [n for n, channels in enumerate(stated) if channels and channels.are_known]
        if len(known) != 1 or (channels := stated[known[0]]) is None:
            return None
        return 1 - known[0], int((channels.rows != (0,)) != is_turned)

    def heads(self, names: tuple[str, str]) -> list[int]:
        """Return the numbers of the heads of a query or a key that either side states."""
        numbers: dict[int, None] = {}
        rotary = [p for p in self.both(names) if p is not None and p.slot in TURNED_SLOTS]
        for structure in self.structures if rotary else ():
            stated = structure.sizes_of(rotary[0].component, TURNED_SLOTS[rotary[0].slot], "head")
            numbers |= dict.fromkeys([heads for heads in stated if heads][:1])
        return list(numbers)

    def offset(self, names: tuple[str, str]) -> float | None:
        """Return the number that a conversion may have added to a norm; None for none."""
        adds = [place.adds_one for place in self.both(names) if place is not None]
        return 1.0 if True in adds else None

    def exchanges_halves(self, names: tuple[str, str]) -> bool:
        """Return whether one side has shifts before scales, and the other one scales first."""
        ours, theirs = self.both(names)
        if ours is None or theirs is None or ours.slot != theirs.slot:
            return False
        return ours.is_shift_first != theirs.is_shift_first

    def admits_steps(
        self, steps: Sequence[Step], names: tuple[str, str], *, are_parts: bool = False
    ) -> bool:
        """Return whether a conversion may arrange the elements of a tensor, or a part, like this.

        A part, such as that of a rank, has fewer heads than the model states.
        """
        if any(step.cause == "transposed" for step in steps) and not self.may_be_turned(names):
            return False
        is_exchanged = any(isinstance(step, HalvesExchanged) for step in steps)
        if is_exchanged != self.exchanges_halves(names):
            return False
        stated = [] if are_parts else self.heads(names)
        for step in steps:
            if isinstance(step, RopePermuted) and stated and step.heads not in stated:
                return False
            # More zeros than numbers are the place of other tensors.
            if isinstance(step, Padded) and any(
                2 * n <= m for n, m in zip(step.before, step.after, strict=True)
            ):
                return False
        return True

    def admits(self, transform: Transform, names: tuple[str, str], *, backwards: bool) -> bool:
        """Return whether a conversion of the family transforms the numbers like this."""
        places = self.both(names)
        slots = {place.slot for place in places if place is not None}
        if transform.scale != 1.0:
            return _SCALED_FAMILY in self.types and bool(slots & _SCALED_SLOTS)
        if transform.offset not in {1.0, -1.0} or self.offset(names) is None:
            return False
        # The side whose modules add one stores one less.
        stored, added = places[::-1] if backwards != (transform.offset < 0) else places
        return (stored is None or stored.adds_one is not False) and (
            added is None or added.adds_one is not True or stored is not None
        )


def _first(numbers: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the lowest number of each index."""
    return tuple([min(of_index) for of_index in zip(*numbers, strict=False)])


def _less(first: tuple[int, ...], numbers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([n - m for m, n in zip(first, numbers, strict=False)])


def _slot_of(place: Place) -> tuple[str, str, str]:
    return place.component, place.slot, place.param


# --- numbers --------------------------------------------------------------------------------------


def doubt(link: Link, relation: Relation) -> str:
    """Return why a relation that holds is not believed; empty if it is.

    Rounding changes nearly all real numbers. If nearly all numbers are on the grid already, the
    others were damaged.
    """
    counts = link.evidence
    if counts is None:
        return ""
    if isinstance(relation, Elementwise):
        bits = [FRACTION_BITS[name] for name in relation.transform.types]
        is_coarser = bool(bits and link.grid) and FRACTION_BITS[link.grid] > min(bits)
        is_damaged = (
            bool(link.grid) and not is_coarser and counts.off_grid[int(relation.backwards)] > 0
        )
    else:
        is_damaged = counts.equal > _MOST_EQUAL * counts.filled and counts.equal < counts.count
    if not is_damaged:
        return ""
    different = link.different
    if not different:
        return ""
    size = f", by {'up to ' if different > 1 else ''}{link.measures['max_abs']:.4g}"
    verb = "differs" if different == 1 else "differ"
    return f"{different:,} of {counted(counts.count, 'element')} {verb}{size}"
