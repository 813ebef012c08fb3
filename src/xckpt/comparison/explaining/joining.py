"""Joints: tensors that consist of several tensors of the other side, fused or split.

Along the axis of a joint, the sums of the joined tensor (the *whole*) are the concatenated sums of
its parts. The search walks along these sums and looks for the next part at the end of each part.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, permutations
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xckpt.comparison.arrangements import (
    Layer,
    Padded,
    RopePermuted,
    Transposed,
    arranged,
    part_of,
    undone,
)
from xckpt.comparison.explaining.names import Order, analogous, likeness, out_of_order
from xckpt.comparison.explaining.outcome import Explanation, quoted, related, unlike
from xckpt.comparison.explaining.search import SURE, inverse_orders, rope_orders, standardised
from xckpt.comparison.explaining.verification import Link, Side, examine
from xckpt.comparison.explaining.work import ALONE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.explaining.sketches import Sketched
    from xckpt.comparison.explaining.work import Explanations, Work
    from xckpt.typing import Array

Shape = tuple[int, ...]

_SIDES = ("a", "b")
_NOT_IN_ORDER = "not in the order of its siblings"

# The least agreement of the sums of a part with its place, by the least number of sums: short sums
# agree by chance.
_JOINED = {32: 0.7, 16: 0.85, 0: 0.9}
# Margin of agreement by which another arrangement has to be better.
_CLEARLY = 1e-3


class JointPart(NamedTuple):
    """A part of a joint, and its place along the axis of the joint.

    The place and the part may differ in size; the additional elements of either must be zero.
    """

    part: Sketched
    start: int
    stop: int
    #: Steps that arrange the part as in its place.
    steps: tuple[Step, ...]
    #: Agreement of the sums; 0 for a part that only fills a gap.
    score: float

    @property
    def is_alike(self) -> bool:
        """True if the sums agree; False for a part that only fills a gap."""
        return self.score > 0


class Joint(NamedTuple):
    """A tensor that consists of several tensors of the other side."""

    whole: Sketched
    axis: int
    members: tuple[JointPart, ...]
    #: Steps applied to the whole before it is cut into the parts.
    steps: tuple[Step, ...] = ()
    #: Whether the parts are stacked along a new axis.
    is_stack: bool = False

    @property
    def order(self) -> Order:
        """The names of the tensors."""
        return Order(self.whole.name, tuple([member.part.name for member in self.members]))

    @property
    def score(self) -> float:
        """The mean agreement of the sums, less a small penalty for each step."""
        steps = sum(len(member.steps) for member in self.members) + len(self.steps)
        mean = sum(member.score for member in self.members) / len(self.members)
        return mean - 0.01 * steps / len(self.members)


def joined(work: Work) -> Explanations:
    """Explain tensors that consist of several tensors of the other side, and their parts."""
    # The name of a joined tensor may be the name of one of its parts.
    shaped = [n for n in work.open if work.cases[n].status == "shape"]
    explanations: Explanations = {}
    for side in (1, 0):
        wholes = [n for n in [*work.alone(side), *shaped] if n not in explanations]
        parts = [n for n in work.alone(1 - side) if n not in explanations]
        if len(parts) < 2 or not wholes:
            continue
        ours, theirs = work.sketch(wholes, side), work.sketch(parts, 1 - side)
        likely = _joints(list(ours.values()), list(theirs.values()), parts_are_padded=not side)
        explanations |= _explained(work, likely, side)
        explanations |= _explained(
            work,
            _by_analogy(
                work,
                [sketch for n, sketch in ours.items() if n not in explanations],
                [sketch for n, sketch in theirs.items() if n not in explanations],
                side,
            ),
            side,
        )
    return explanations


def _explained(work: Work, likely: Sequence[Joint], side: int) -> Explanations:
    links = [[_link(work, joint, member, side) for member in joint.members] for joint in likely]
    examine(list(chain.from_iterable(links)), work.bar)
    earlier = [joint for number, joint in work.joints if number == side]
    names = {case.match.name for case in work.cases if case.status != ALONE[1 - side]}
    broken = out_of_order([joint.order for joint in (*earlier, *likely)], names)
    explanations: Explanations = {}
    for number, (joint, of_parts) in enumerate(zip(likely, links, strict=True)):
        if any(link.relation is not None for link in of_parts):
            explanations |= _explanations(
                work, joint, of_parts, side, is_broken=number + len(earlier) in broken
            )
        whole = explanations.get(joint.whole.number)
        if whole is not None and whole.verified:
            work.joints.append((side, joint))
    return explanations


def _link(work: Work, joint: Joint, member: JointPart, side: int) -> Link:
    """Return a link between a part and its place in the joined tensor, readable in either order."""
    whole, part = joint.whole, member.part
    start, shape = [0] * len(whole.shape), _place(joint, member)
    start[joint.axis] = member.start
    place = part_of(arranged(whole.reader.array, joint.steps), tuple(start), shape)
    run = member.start * prod(whole.shape[1:]) if joint.axis == 0 and not joint.steps else None
    in_whole, in_part = Side(place, whole.reader, run), Side.whole(part.reader)
    steps = (*member.steps, Layer()) if joint.is_stack else member.steps
    view, back = arranged(part.reader.array, steps), undone(place, steps)
    is_padded = _is_padded(joint, member)
    if not is_padded:
        at_part = Side(back, whole.reader, None if member.steps else run)
        orders = [(Side.of(view, part.reader), in_whole), (in_part, at_part)]
    elif side:
        padded = arranged(view, [Padded(tuple(view.shape), shape)])
        orders = [(Side(padded, part.reader), in_whole)]
    elif back is not None and all(n <= m for n, m in zip(back.shape, part.shape, strict=True)):
        padded = arranged(back, [Padded(tuple(back.shape), part.shape)])
        orders = [(in_part, Side(padded, whole.reader))]
    else:
        orders = []  # numbers are missing
    names = (part.name, whole.name)
    if not side:
        orders, names = [order[::-1] for order in orders], names[::-1]
    return Link(names, orders, work.architecture.offset(names), is_padded)


def _place(joint: Joint, member: JointPart) -> tuple[int, ...]:
    """Return the shape of the place of a part."""
    shape = list(joint.whole.shape)
    shape[joint.axis] = member.stop - member.start
    return tuple(shape)


def _is_padded(joint: Joint, member: JointPart) -> bool:
    """Return whether a part and its place differ in size."""
    view = arranged(member.part.reader.array, member.steps)
    return not joint.is_stack and tuple(view.shape) != _place(joint, member)


def _explanations(
    work: Work, joint: Joint, links: Sequence[Link], side: int, *, is_broken: bool
) -> Explanations:
    cause, whole = "fused" if side else "split", joint.whole
    lines = {0: "rows", 1: "columns"}.get(joint.axis, f"axis {joint.axis}")
    layout = "stacked" if joint.is_stack else f"one after the other along the {lines}"
    head = f"part of {quoted([whole.name])} of {_SIDES[side]}, {layout}"
    order = f"; {_NOT_IN_ORDER}" if is_broken else ""
    fault = ("misplaced",) if is_broken else ()
    explanations: Explanations = {}
    parts: list[Explanation] = []
    different: list[str] = []
    for member, link in zip(joint.members, links, strict=True):
        name, number = member.part.name, member.part.number
        if link.relation is None:
            different.append(name)
            causes, text = (cause, "changed"), f"{head}; {unlike(link)}"
            explanations[number] = Explanation(causes, text, holds=False, other_names=(whole.name,))
            continue
        explanation = related(work, link, link.relation, (*joint.steps, *member.steps))
        if _is_padded(joint, member):
            is_equal = explanation.causes == ("equal",)
            text = "equal after adding zeros" if is_equal else explanation.text
            explanation = replace(explanation, causes=("padded", *explanation.causes), text=text)
        parts.append(explanation)
        explanations[number] = replace(
            explanation,
            causes=(cause, *fault, *explanation.changes),
            text=head + (f"; {explanation.text}" if explanation.changes else "") + order,
            holds=not is_broken,
            other_names=(whole.name,),
        )
    names = joint.order.parts
    causes_of_parts = dict.fromkeys(change for part in parts for change in part.changes)
    texts = dict.fromkeys(part.text for part in parts if part.changes)
    text = f"{quoted(names)} of {_SIDES[1 - side]}, {layout}"
    text = "; ".join([text, *list(texts)[:2]]) + order
    if different:
        text += f"; different from {quoted(different)}"
    heads = {part.heads for part in parts} - {None}
    is_known = all(part.is_known for part in parts if {"offset", "scaled"} & set(part.causes))
    explanations[whole.number] = Explanation(
        (cause, *fault, *causes_of_parts, *(("changed",) if different else ())),
        text,
        holds=not different and not is_broken,
        is_known=is_known,
        heads=heads.pop() if len(heads) == 1 else None,
        other_names=names,
    )
    return explanations


def _by_analogy(
    work: Work, wholes: Sequence[Sketched], parts: Sequence[Sketched], side: int
) -> list[Joint]:
    """Return joints with the names of verified siblings, such as of biases that are all zero."""
    free, analogies = {part.name: part for part in parts}, []
    for whole in wholes:
        for joint_side, joint in work.joints:
            names = analogous(joint.order, whole.name) if joint_side == side else None
            if names is None or not all(name in free for name in names):
                continue
            analogy = _analogy(joint, whole, [free[name] for name in names])
            if analogy is not None:
                analogies.append(analogy)
                for name in names:
                    del free[name]
                break
    return analogies


def _analogy(joint: Joint, whole: Sketched, parts: Sequence[Sketched]) -> Joint | None:
    """Join parts in the same way as another joint; None if the sizes do not fit."""
    axis = min(joint.axis, len(whole.shape) - 1)
    start, members = 0, []
    for part, sibling in zip(parts, joint.members, strict=True):
        steps = sibling.steps if part.shape == sibling.part.shape else ()
        shape = tuple(arranged(part.reader.array, steps).shape)
        if len(shape) != len(whole.shape) - joint.is_stack:
            return None
        length = 1 if joint.is_stack else shape[axis]
        members.append(JointPart(part, start, start + length, steps, 0.0))
        start += length
    fits = start == whole.shape[axis]
    return Joint(whole, axis, tuple(members), is_stack=joint.is_stack) if fits else None


# --- the search for joints ------------------------------------------------------------------------


class _Oriented(NamedTuple):
    """A part with its axes in the order of the whole, and its sums along the axis of the joint."""

    part: Sketched
    sums: Array
    steps: tuple[Step, ...]
    #: Whether trailing zeros were removed.
    is_trimmed: bool = False


def _joints(
    wholes: Sequence[Sketched], parts: Sequence[Sketched], *, parts_are_padded: bool
) -> list[Joint]:
    """Find tensors of one side that consist of several of the other; no part belongs to two.

    With `parts_are_padded`, the parts may have been padded with zeros; otherwise the whole.
    """
    chosen_joints: list[Joint] = []
    free = {id(part): part for part in parts if part.size > 1}
    best: dict[int, Joint | None] = {}
    remaining = list(wholes)
    while remaining:
        for whole in remaining:
            likeliest = best.get(id(whole))
            is_stale = likeliest is not None and any(
                id(member.part) not in free for member in likeliest.members
            )
            if id(whole) not in best or is_stale:
                likely = _joints_of(whole, list(free.values()), parts_are_padded=parts_are_padded)
                best[id(whole)] = max(likely, key=lambda joint: joint.score, default=None)
        ranked = [joint for whole in remaining if (joint := best[id(whole)]) is not None]
        if not ranked:
            break
        # Best agreement first: short sums agree by chance.
        chosen = max(ranked, key=lambda joint: joint.score)
        chosen_joints.append(chosen)
        for member in chosen.members:
            free.pop(id(member.part), None)
        remaining = [whole for whole in remaining if whole is not chosen.whole]
    return chosen_joints


def _joints_of(
    whole: Sketched, parts: list[Sketched], *, parts_are_padded: bool
) -> Iterator[Joint]:
    shape = whole.shape
    if len(shape) == 3 and whole.rows is not None:
        oriented = [layer for part in parts for layer in _layers(part, shape)]
        candidates = _Parts(oriented, 0, are_permuted=True) if len(oriented) > 1 else None
        members = _walk(whole.rows, candidates) if candidates else []
        if members:
            rows = shape[1]
            places = [m._replace(start=m.start // rows, stop=m.stop // rows) for m in members]
            yield Joint(whole, 0, tuple(places), is_stack=True)
    for axis in range(len(shape)):
        along = whole.along[axis]
        if along is None:
            continue
        oriented = [
            slab
            for part in parts
            for slab in _slabs(part, shape, axis, parts_are_padded=parts_are_padded)
        ]
        if len(oriented) < 2:
            continue
        members = _walk(along, _Parts(oriented, axis, are_permuted=True))
        if members:
            yield Joint(whole, axis, tuple(members))
            continue
        plain = _Parts(oriented, axis, are_permuted=False)
        for (heads, is_undone), order in rope_orders(len(along)).items():
            members = _walk(along[order], plain)
            if members and all(member.is_alike for member in members):
                step = RopePermuted(axis, heads, is_undone)
                yield Joint(whole, axis, tuple(members), (step,))
                break


def _layers(part: Sketched, shape: Shape) -> Iterator[_Oriented]:
    """Yield a matrix as a layer of a stack, as stored and transposed, if its shape fits."""
    if part.shape == shape[1:] and part.rows is not None:
        yield _Oriented(part, part.rows, ())
    if part.shape == shape[:0:-1] and part.columns is not None:
        yield _Oriented(part, part.columns, (Transposed((1, 0)),))


def _slabs(
    part: Sketched, shape: Shape, axis: int, *, parts_are_padded: bool
) -> Iterator[_Oriented]:
    """Yield a tensor as a part along an axis, once for each order of its axes that fits."""
    if len(part.shape) != len(shape):
        return
    for axes in permutations(range(len(shape))):
        extents = tuple([part.shape[k] for k in axes])
        sums = part.along[axes[axis]]
        sizes = [(n, m) for k, (n, m) in enumerate(zip(extents, shape, strict=True)) if k != axis]
        fits = all(n >= m if parts_are_padded else n <= m for n, m in sizes)
        if not fits or sums is None:
            continue
        filled = np.flatnonzero(sums)
        if parts_are_padded and len(filled):
            sums = sums[: filled[-1] + 1]
        if len(sums) < shape[axis]:
            is_plain = axes == tuple(range(len(shape)))
            is_trimmed = len(sums) < extents[axis]
            yield _Oriented(part, sums, () if is_plain else (Transposed(axes),), is_trimmed)


def _walk(sums: Array, parts: _Parts) -> list[JointPart]:
    """Find the parts that cover the sums of a whole, in order; empty if no chain of parts does."""
    parts.used.clear()
    members: list[JointPart] = []
    start = 0
    while start < len(sums):
        member = parts.at(sums, start)
        if member is not None:
            parts.used.add(id(member.part))
            members.append(member)
        elif members and (zeros := _zeros(sums, start)):
            members[-1] = members[-1]._replace(stop=members[-1].stop + zeros)
        elif gap := parts.gap(sums, start):
            # Any part holds the place of the gap, until `_filled` replaces it.
            members.append(JointPart(parts.oriented[0].part, start, start + gap, (), 0.0))
        else:
            return []
        start = members[-1].stop
    matched = [member for member in members if member.is_alike]
    if len(matched) < 2 or 2 * len(matched) < len(members):
        return []
    return _filled(members, parts.oriented, parts.used)


class _Parts:
    """Candidates for the parts of a joint along an axis, grouped by length."""

    def __init__(self, oriented: list[_Oriented], axis: int, *, are_permuted: bool) -> None:
        self.oriented = oriented
        self.axis = axis
        self.are_permuted = are_permuted
        #: Ids of the parts that have a place.
        self.used: set[int] = set()
        lengths = sorted({len(part.sums) for part in oriented}, reverse=True)
        self.groups = {n: [part for part in oriented if len(part.sums) == n] for n in lengths}
        self.tables = {
            n: standardised([part.sums for part in group], n) for n, group in self.groups.items()
        }

    def at(self, sums: Array, place: int) -> JointPart | None:
        """Return the free part whose sums agree best with the sums from a place on, if any do."""
        best: JointPart | None = None
        for n, group in self.groups.items():
            required = next(score for fewest, score in _JOINED.items() if n >= fewest)
            is_free = np.array([id(oriented.part) not in self.used for oriented in group])
            if place + n > len(sums) or not is_free.any():
                continue
            segment = standardised([sums[place : place + n]], n)[0]
            # Permuting the part is the same as permuting its place inversely, which is cheaper.
            steps: list[tuple[Step, ...]] = [()]
            segments = segment[None]
            if self.are_permuted:
                steps += [(RopePermuted(self.axis, *key),) for key in rope_orders(n)]
                segments = segment[inverse_orders(n)] if len(steps) > 1 else segments
            scores = np.where(is_free[:, None], self.tables[n] @ segments.T, -1.0)
            scores[[oriented.is_trimmed for oriented in group], 1:] = -1.0
            # Prefer the part without a permutation.
            plain = float(scores[:, 0].max())
            row, order = divmod(int(np.argmax(scores)), len(steps))
            if plain >= SURE or plain > float(scores[row, order]) - _CLEARLY:
                row, order = int(np.argmax(scores[:, 0])), 0
            score = float(scores[row, order])
            if score >= required and (best is None or score > best.score + _CLEARLY):
                part, _, own_steps, _ = group[row]
                best = JointPart(part, place, place + n, (*own_steps, *steps[order]), score)
        return best

    def gap(self, sums: Array, place: int) -> int:
        """Return the length of a gap that ends at another part or at the end, else 0."""
        for n in self.groups:
            stop = place + n
            if stop == len(sums) or (stop < len(sums) and self.at(sums, stop) is not None):
                return n
        return 0


def _zeros(sums: Array, start: int) -> int:
    """Count the zeros in the sums that follow a place directly."""
    nonzero = np.flatnonzero(sums[start:])
    return len(sums) - start if not len(nonzero) else int(nonzero[0])


def _filled(members: list[JointPart], parts: list[_Oriented], used: set[int]) -> list[JointPart]:
    """Fill gaps with the free parts whose names are most like the names of the other members.

    The result is empty if no free part has the length of a gap.
    """
    names = [member.part.name for member in members if member.is_alike]
    steps = next((member.steps for member in members if member.is_alike), ())
    complete = []
    for member in members:
        if member.is_alike:
            complete.append(member)
            continue
        length = member.stop - member.start
        free = [p for p in parts if id(p.part) not in used and len(p.sums) == length]
        if not free:
            return []
        best = max(free, key=lambda candidate: sum(likeness(candidate.part.name, n) for n in names))
        used.add(id(best.part))
        complete.append(member._replace(part=best.part, steps=best.steps or steps))
    return complete
