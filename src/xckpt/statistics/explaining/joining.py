"""Tensors that consist of several of the other side: fused, or split."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.statistics.explaining.arrangements import (
    Padded,
    arranged,
    part_of,
    stacked,
    undone,
    unstacked,
)
from xckpt.statistics.explaining.joints import Joint, Member, joints
from xckpt.statistics.explaining.names import Order, analogous, out_of_order
from xckpt.statistics.explaining.outcome import Explanation, quoted
from xckpt.statistics.explaining.verification import Link, Side, examine
from xckpt.statistics.explaining.wording import related, unlike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.statistics.explaining.sketches import Sketched
    from xckpt.statistics.explaining.work import Explanations, Work

_SIDES = ("a", "b")
_NOT_IN_ORDER = "not in the order of its siblings"


def joined(work: Work) -> Explanations:
    """Explain tensors that consist of several of the other side, and their parts."""
    # A whole may have a namesake of another shape, which is one of its parts.
    shaped = [n for n in work.open if work.cases[n].status == "shape"]
    found: Explanations = {}
    for side in (1, 0):
        wholes = [n for n in [*work.alone(side), *shaped] if n not in found]
        parts = [n for n in work.alone(1 - side) if n not in found]
        if len(parts) < 2 or not wholes:
            continue
        ours, theirs = work.sketch(wholes, side), work.sketch(parts, 1 - side)
        likely = joints(list(ours.values()), list(theirs.values()), are_larger=not side)
        found |= _explained(work, likely, side)
        found |= _explained(
            work,
            _by_analogy(
                work,
                [each for n, each in ours.items() if n not in found],
                [each for n, each in theirs.items() if n not in found],
                side,
            ),
            side,
        )
    return found


def _explained(work: Work, likely: Sequence[Joint], side: int) -> Explanations:
    links = [[_link(work, joint, member, side) for member in joint.members] for joint in likely]
    examine(list(chain.from_iterable(links)), work.bar)
    orders = [
        Order(joint.whole.name, tuple([member.part.name for member in joint.members]))
        for joint in likely
    ]
    known = [order for at, _, order in work.joints if at == side]
    broken = out_of_order([*known, *orders])
    found: Explanations = {}
    for at, (joint, some, order) in enumerate(zip(likely, links, orders, strict=True)):
        if any(link.relation is not None for link in some):
            found |= _explanations(work, joint, some, side, is_broken=at + len(known) in broken)
        whole = found.get(joint.whole.number)
        if whole is not None and whole.verified:
            work.joints.append((side, joint, order))
    return found


def _link(work: Work, joint: Joint, member: Member, side: int) -> Link:
    """Return a link between a part and its place in the whole, in the order of either."""
    whole, part = joint.whole, member.part
    start, shape = [0] * len(whole.shape), _place(joint, member)
    start[joint.axis] = member.start
    place = part_of(arranged(whole.reader.array, joint.steps), tuple(start), shape)
    is_run = joint.axis == 0 and not joint.steps
    run = member.start * prod(whole.shape[1:]) if is_run else None
    in_whole, in_part = Side(place, (whole.reader,), run), Side.whole(part.reader)
    view = arranged(part.reader.array, member.steps)
    if _is_padded(joint, member) and side:
        padded = Padded(tuple(view.shape), shape).view(view)
        orders = [(Side(padded, (part.reader,)), in_whole)]
    else:
        back: Any = undone(unstacked(place) if joint.is_stack else place, member.steps)
        at_part = Side(back, (whole.reader,), None if member.steps else run)
        if not _is_padded(joint, member):
            like = stacked(view) if joint.is_stack else view
            orders = [(Side.of(like, part.reader), in_whole), (in_part, at_part)]
        elif all(n <= m for n, m in zip(back.shape, part.shape, strict=True)):
            padded = Padded(tuple(back.shape), part.shape).view(back)
            orders = [(in_part, Side(padded, (whole.reader,)))]
        else:
            orders = []  # numbers were left out
    names = (part.name, whole.name)
    if not side:
        orders, names = [order[::-1] for order in orders], names[::-1]
    is_padded = _is_padded(joint, member)
    return Link(names, orders, work.architecture.offset(names), is_padded)


def _place(joint: Joint, member: Member) -> tuple[int, ...]:
    """Return the shape of the place of a part."""
    shape = list(joint.whole.shape)
    shape[joint.axis] = member.stop - member.start
    return tuple(shape)


def _is_padded(joint: Joint, member: Member) -> bool:
    """Whether a part and its place differ in size."""
    view = arranged(member.part.reader.array, member.steps)
    return not joint.is_stack and tuple(view.shape) != _place(joint, member)


@dataclass
class _Whole:
    """What the parts of a tensor tell of it."""

    causes: list[str]
    facts: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    parts: list[Explanation] = field(default_factory=list)

    def add(self, one: Explanation) -> None:
        """Add an explained part."""
        kept = [cause for cause in one.causes if cause != "equal"]
        self.causes += [cause for cause in kept if cause not in self.causes]
        if kept and one.text not in self.facts:
            self.facts.append(one.text)
        self.parts.append(one)


def _explanations(
    work: Work, joint: Joint, links: Sequence[Link], side: int, *, is_broken: bool
) -> Explanations:
    cause, whole = "fused" if side else "split", joint.whole
    lines = {0: "rows", 1: "columns"}.get(joint.axis, f"axis {joint.axis}")
    how = "stacked" if joint.is_stack else f"one after the other along the {lines}"
    head = f"part of {quoted([whole.name])} of {_SIDES[side]}, {how}"
    order = f"; {_NOT_IN_ORDER}" if is_broken else ""
    fault = ("misplaced",) if is_broken else ()
    about, found = _Whole([cause, *fault]), {}
    for member, link in zip(joint.members, links, strict=True):
        part = member.part
        if link.relation is None:
            about.different.append(part.name)
            causes, text = (cause, "changed"), f"{head}; {unlike(link)}"
            found[part.number] = Explanation(causes, text, holds=False, other_names=(whole.name,))
            continue
        one = related(work, link, link.relation, (*joint.steps, *member.steps))
        if _is_padded(joint, member):
            text = "equal after adding zeros" if one.causes == ("equal",) else one.text
            one = replace(one, causes=("padded", *one.causes), text=text)
        about.add(one)
        kept = tuple([each for each in one.causes if each != "equal"])
        text = head + (f"; {one.text}" if kept else "") + order
        found[part.number] = replace(
            one, causes=(cause, *fault, *kept), text=text, other_names=(whole.name,),
            holds=not is_broken,
        )  # fmt: skip
    names = tuple([member.part.name for member in joint.members])
    text = "; ".join([f"{quoted(names)} of {_SIDES[1 - side]}, {how}", *about.facts[:2]]) + order
    if about.different:
        about.causes.append("changed")
        text += f"; different from {quoted(about.different)}"
    heads = {each.heads for each in about.parts} - {None}
    is_known = all(each.is_known for each in about.parts if {"offset", "scaled"} & set(each.causes))
    found[whole.number] = Explanation(
        tuple(about.causes),
        text,
        holds=not about.different and not is_broken,
        is_known=is_known,
        heads=heads.pop() if len(heads) == 1 else None,
        other_names=names,
    )
    return found


def _by_analogy(
    work: Work, wholes: Sequence[Sketched], parts: Sequence[Sketched], side: int
) -> list[Joint]:
    """Return the joints that others like them lead to expect, as of biases that are all zero."""
    free, found = {part.name: part for part in parts}, []
    for whole in wholes:
        for at, joint, order in work.joints:
            names = analogous(order, whole.name) if at == side else None
            if names is None or not all(name in free for name in names):
                continue
            like = _like(joint, whole, [free[name] for name in names])
            if like is not None:
                found.append(like)
                for name in names:
                    del free[name]
                break
    return found


def _like(joint: Joint, whole: Sketched, parts: Sequence[Sketched]) -> Joint | None:
    """Return parts one after the other as in another joint; None if they do not fit."""
    axis = min(joint.axis, len(whole.shape) - 1)
    at, members = 0, []
    for part, known in zip(parts, joint.members, strict=True):
        steps = known.steps if len(part.shape) == len(known.part.shape) else ()
        shape = tuple(arranged(part.reader.array, steps).shape)
        if len(shape) != len(whole.shape) - joint.is_stack:
            return None
        length = 1 if joint.is_stack else shape[axis]
        members.append(Member(part, at, at + length, steps, 0.0))
        at += length
    fits = at == whole.shape[axis]
    return Joint(whole, axis, tuple(members), is_stack=joint.is_stack) if fits else None
