"""What explains a difference: causes that the place of a tensor in its model admits.

A relation that holds for every element is not always an explanation. It has to be one that a
conversion makes of this tensor (`Places`), the numbers have to be rounded as real numbers are
(`doubt`), and the siblings of a tensor in other layers have to be changed in the same way
(`unlike_siblings`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from xckpt.comparison.arrangements import Padded
from xckpt.comparison.explaining.causes import Elementwise
from xckpt.comparison.explaining.names import role_of
from xckpt.comparison.explaining.rounding import FRACTION_BITS
from xckpt.formatting import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.explaining.causes import Relation
    from xckpt.comparison.explaining.outcome import Case, Explanation
    from xckpt.comparison.explaining.rounding import Transform
    from xckpt.comparison.explaining.verification import Link
    from xckpt.structure.families import Place
    from xckpt.structure.model import Structure

    #: Verifies, for each pair of a case and steps, whether its elements are related by the steps.
    #: The result is None if they do not lead to the shape of the second tensor.
    Verify = Callable[[Sequence[tuple[int, tuple[Step, ...]]]], Sequence[bool | None]]

__all__ = ["TURNED_SLOTS", "Places", "doubt", "unlike_siblings"]

#: Slots that rotary embeddings turn, with the axes of their heads.
TURNED_SLOTS = {"attention.query": "head", "attention.key": "head_kv"}
_ROTARY_ROLES = frozenset({"query", "key"})
# Slots and kinds of modules whose weights have one order of axes in all libraries.
_UPRIGHT = frozenset({"token_embedding", "norm"})
# Family whose embeddings a conversion scales: conversion/jais.py of llama.cpp.
_SCALED_FAMILY, _SCALED_SLOTS = "jais", frozenset({"token_embedding", "output"})
# The least number of siblings that show how a tensor should have been changed.
_FEWEST_SIBLINGS = 4
# Numbers in names, which siblings do not have in common.
_NUMBER = re.compile(r"_?[0-9]+")
# A larger share of elements does not stay equal when real numbers are quantised.
_MOST_EQUAL = 0.5


class Places:
    """The places of the tensors of both sides in their models."""

    def __init__(self, ours: Structure, theirs: Structure) -> None:
        # A side that does not state its type has the type of the other one.
        types = [side.facts.types for side in (ours, theirs)]
        self.structures = tuple(
            side.with_facts(replace(side.facts, types=other)) if other and not own else side
            for side, own, other in zip((ours, theirs), types, types[::-1], strict=True)
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
        numbers = tuple([number for _, number in place.indices])
        return place.component, place.slot, place.param, numbers

    def agree(self, a: str, b: str) -> bool:
        """Return whether two tensors are known to have the same place."""
        key = self.key(0, a)
        return key is not None and key == self.key(1, b)

    def are_turned(self, names: tuple[str, str]) -> bool:
        """Return whether the axes of the outputs of two weights are known, and differ."""
        first, second = (
            structure.channels(name) if name in structure else None
            for structure, name in zip(self.structures, names, strict=True)
        )
        if first is None or second is None:
            return False
        return first.are_known and second.are_known and first.rows != second.rows

    def heads(self, names: tuple[str, str]) -> list[int]:
        """Return the numbers of the heads of a query or a key that either side states."""
        numbers: dict[int, None] = {}
        for structure, place in zip(self.structures, self.both(names), strict=True):
            axis = TURNED_SLOTS.get(place.slot) if place is not None else None
            if place is None or axis is None:
                continue
            stated = structure.sizes_of(place.component, axis, "head")
            numbers |= dict.fromkeys([heads for heads in stated if heads][:1])
        return list(numbers)

    def offset(self, names: tuple[str, str]) -> float | None:
        """Return the number that a conversion may have added to a norm; None for none."""
        adds = [place.adds_one for place in self.both(names) if place is not None]
        return 1.0 if True in adds else None

    def admits_steps(self, steps: Sequence[Step], names: tuple[str, str]) -> bool:
        """Return whether a conversion may arrange the elements of a tensor like this."""
        is_turned = any(step.cause == "transposed" for step in steps)
        # More zeros than numbers are the place of other tensors.
        is_small = any(
            2 * n <= m
            for step in steps
            if isinstance(step, Padded)
            for n, m in zip(step.before, step.after, strict=True)
        )
        return not is_small and (not is_turned or self.may_be_turned(names))

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
    different = counts.count - counts.measures.equal
    if not different:
        return ""
    size = f", by {'up to ' if different > 1 else ''}{counts.measures.largest:.4g}"
    verb = "differs" if different == 1 else "differ"
    return f"{different:,} of {counted(counts.count, 'element')} {verb}{size}"


# --- siblings -------------------------------------------------------------------------------------


class _Siblings:
    """Groups of tensors that a conversion treats alike, by the numbers of their cases."""

    def __init__(self, cases: Sequence[Case], explanations: Mapping[int, Explanation]) -> None:
        self.cases, self.explanations = cases, explanations
        self.numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for n, case in enumerate(cases):
            for side, tensor in enumerate((case.match.ours, case.match.theirs)):
                if tensor is not None and case.status:
                    self.numbers[side][tensor.name] = n

    def groups(
        self, places: Places, forms_of: Callable[[Structure, str], Iterable[object]]
    ) -> dict[object, list[int]]:
        """Return the cases of each side and form; a pair is on both sides."""
        groups: dict[object, list[int]] = defaultdict(list)
        for side, numbers in enumerate(self.numbers):
            structure = places.structures[side]
            for name, n in numbers.items():
                match = self.cases[n].match
                tensor = match.theirs if side else match.ours
                if name in structure and tensor is not None:
                    for form in forms_of(structure, name):
                        groups[side, form, len(tensor.array.shape)].append(n)
        return groups

    def explained(self, members: Sequence[int]) -> list[int]:
        """Return the members in `a`, and the joints of both sides, that a layout explains."""
        return [
            n
            for n in members
            if (own := self.explanations.get(n)) is not None
            and own.has_layout
            and (own.joint or self.cases[n].match.ours is not None)
        ]

    def unmatched(self, members: Sequence[int]) -> int:
        """Count the members without a partner."""
        outcomes = [self.explanations[n].outcome for n in members if n in self.explanations]
        return outcomes.count("unmatched")

    def partners(self, n: int) -> list[int]:
        """Return the cases of the tensors of the other side that explain one."""
        side = self.cases[n].status == "only_b"
        numbers = self.numbers[not side]
        return [numbers[name] for name in self.explanations[n].other_names if name in numbers]


def _template(structure: Structure, name: str) -> list[object]:
    return [structure.siblings_key(name).template]


def _one_number(_: Structure, name: str) -> list[object]:
    """Return what a name has in common with names that differ in one number."""
    words, numbers = _NUMBER.sub("", name), _NUMBER.findall(name)
    return [(words, n, *numbers[:n], *numbers[n + 1 :]) for n in range(len(numbers))]


def _convolution(structure: Structure, name: str) -> list[object]:
    is_kernel = structure.module_type(name) == "convolution"
    return [structure.param(name)] if is_kernel else []


def unlike_siblings(
    cases: Sequence[Case],
    explanations: Mapping[int, Explanation],
    places: Places,
    verify: Verify,
) -> dict[int, Explanation]:
    """Return new explanations of tensors that were not arranged as most of their siblings were."""
    siblings = _Siblings(cases, explanations)
    unlike: dict[int, Explanation] = {}
    judged: set[int] = set()
    for forms_of in (_template, _one_number, _convolution):
        groups = siblings.groups(places, forms_of)
        of_case = {n: members for members in groups.values() for n in members}
        suspects: list[_Suspect] = []
        for members in groups.values():
            explained = [n for n in siblings.explained(members) if n not in judged]
            if len(explained) >= _FEWEST_SIBLINGS:
                judged.update(explained)
                suspects += _suspects(explained, explanations)
            if forms_of is not _convolution:
                unlike |= _alone(siblings, members, of_case)
        tried = [s for s in suspects if not s.usual.joint]
        holds = verify([(s.case, s.usual.steps) for s in tried])
        for suspect, is_like in zip(tried, holds, strict=True):
            differs = suspect.usual.offset != explanations[suspect.case].offset
            # Convolutions may be of several kinds.
            is_comparable = is_like is not None or forms_of is not _convolution
            if (not is_like and is_comparable) or differs:
                unlike |= _accused(siblings, suspect)
        for suspect in suspects:
            if suspect.usual.joint:
                unlike |= _out_of_order(siblings, suspect)
    return unlike | _exchanged(siblings)


class _Suspect(NamedTuple):
    """A tensor that is explained in another way than most of its siblings."""

    case: int
    usual: Explanation
    #: Number of these siblings.
    siblings: int


def _suspects(members: Sequence[int], explanations: Mapping[int, Explanation]) -> list[_Suspect]:
    layouts = Counter([explanations[n].layout for n in members])
    layout, count = layouts.most_common(1)[0]
    if 2 * count <= len(members):
        return []
    usual = next(explanations[n] for n in members if explanations[n].layout == layout)
    return [_Suspect(n, usual, count) for n in members if explanations[n].layout != layout]


def _accused(siblings: _Siblings, suspect: _Suspect) -> dict[int, Explanation]:
    n, own = suspect.case, siblings.explanations[suspect.case]
    text = f"unlike its {suspect.siblings:,} siblings, it was {_contrast(own, suspect.usual)}"
    unlike = {n: replace(own, text=text, holds=False, causes=("changed",))}
    for partner in siblings.partners(n):
        unlike[partner] = replace(unlike[n], other_names=(siblings.cases[n].match.name,))
    return unlike


def _out_of_order(siblings: _Siblings, suspect: _Suspect) -> dict[int, Explanation]:
    """Return new explanations of a joint with the parts of its siblings in another order."""
    own = siblings.explanations[suspect.case]
    usual, count = suspect.usual, suspect.siblings
    if sorted(own.joint[1:]) != sorted(usual.joint[1:]):
        return {}
    moved = [
        name
        for name, part, other in zip(own.other_names, own.joint[1:], usual.joint[1:], strict=True)
        if part != other or own.joint[0] != usual.joint[0]
    ]
    side = siblings.cases[suspect.case].status == "only_b"
    parts = [siblings.numbers[not side][name] for name in moved]
    wholes = [whole for part in parts for whole in siblings.partners(part)]
    numbers = dict.fromkeys([suspect.case, *parts, *wholes])
    return _doubted(siblings, list(numbers), f"unlike its {count:,} siblings")


def _alone(
    siblings: _Siblings, members: Sequence[int], of_case: Mapping[int, Sequence[int]]
) -> dict[int, Explanation]:
    """Return new explanations of tensors that have a partner though most of their siblings fail."""
    held = [n for n in members if n in siblings.explanations and siblings.explanations[n].verified]
    missed = siblings.unmatched(members)
    unlike: dict[int, Explanation] = {}
    if len(held) >= missed or len(held) + missed < _FEWEST_SIBLINGS:
        return unlike
    for n in held:
        partners = [p for p in siblings.partners(n) if p != n]
        failed = min([siblings.unmatched(of_case.get(p, ())) for p in partners], default=0)
        count = min(missed, failed)
        if count > len(held) and count + len(held) >= _FEWEST_SIBLINGS:
            unlike |= _doubted(siblings, [n, *partners], f"not so for {count:,} of its siblings")
    return unlike


def _doubted(siblings: _Siblings, numbers: Sequence[int], reason: str) -> dict[int, Explanation]:
    unlike = {}
    for n in numbers:
        own = siblings.explanations[n]
        causes = ("misplaced", *[cause for cause in own.causes if cause != "misplaced"])
        unlike[n] = replace(own, text=f"{own.text}; {reason}", holds=False, causes=causes)
    return unlike


def _exchanged(siblings: _Siblings) -> dict[int, Explanation]:
    """Return new explanations of tensors whose partner has the number that other siblings have.

    A number may be the only difference between kinds, such as in ``cell/vars/1``.
    """
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    for name, n in siblings.numbers[0].items():
        own = siblings.explanations.get(n)
        if own is not None and own.verified and "renamed" in own.causes:
            groups[_NUMBER.sub("", name)][n] = own.other_names[0]
    usual: dict[str, tuple[str, str]] = {}
    for form, partners in groups.items():
        ends = Counter([_end_of(partner) for partner in partners.values()])
        end, count = ends.most_common(1)[0]
        if len(partners) >= _FEWEST_SIBLINGS and 2 * count > len(partners):
            usual[form] = end
    unlike: dict[int, Explanation] = {}
    for form, partners in groups.items():
        for n, partner in partners.items():
            end = _end_of(partner)
            if form in usual and end != usual[form] and end in usual.values():
                numbers = [n, *siblings.partners(n)]
                reason = f"its siblings are numbered {usual[form][1]} at the end of their names"
                unlike |= _doubted(siblings, numbers, reason)
    return unlike


def _end_of(name: str) -> tuple[str, str]:
    """Return a name without its numbers, and the last number."""
    return _NUMBER.sub("", name), next(iter(re.findall(r"[0-9]+", name)[::-1]), "")


def _contrast(own: Explanation, usual: Explanation) -> str:
    """Return what happened to a tensor in contrast to its siblings."""
    done = [step.done for step in own.steps]
    done += [f"given an offset of {own.offset:+.4g}"] if own.offset else []
    if done:
        return " and ".join(done)
    missing = [step.done for step in usual.steps]
    missing += [f"given an offset of {usual.offset:+.4g}"] if usual.offset else []
    return f"not {' and '.join(missing)}"
