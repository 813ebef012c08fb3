"""The pass that explains joints: tensors that consist of several tensors of the other side.

Sums suggest them. The elements of each part are compared with its place in the whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain, permutations
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.comparison.arrangements import (
    Layer,
    Padded,
    RopePermuted,
    Step,
    Transposed,
    arranged,
    lines_along,
    part_of,
    undone,
)
from xckpt.comparison.explaining.outcome import ALONE, Share, of_joint, related, unlike
from xckpt.comparison.explaining.work import Joint, JointPart
from xckpt.comparison.names import Order, analogous, begun_alike, likeness, out_of_order, spelled
from xckpt.comparison.relations.verification import Link, Side, examine
from xckpt.comparison.sketches import (
    SURE,
    Sketched,
    groups_of,
    inverse_orders,
    rope_orders,
    standardised,
)
from xckpt.formatting import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.comparison.explaining.work import Explanations, Work
    from xckpt.typing import Array

# Pairs of wholes and parts up to which the parts of every whole are searched, and wholes beyond it.
_MOST_PAIRS, _MOST_SEARCHED = 50_000, 16
_MOST_SIBLINGS = 4  # of a whole, whose analogy is tried


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
        twins = {
            tensor.number
            for group in groups_of([ours.values(), theirs.values()], attrgetter("content"))
            if len(group[0]) == len(group[1]) == 1
            for tensor in (*group[0], *group[1])
        }
        varied = [
            [t for t in tensors.values() if not t.is_constant and t.number not in twins]
            for tensors in (ours, theirs)
        ]
        likely = joints_between(_representatives(*varied), varied[1], parts_are_padded=not side)
        explanations |= _explained(work, likely, side)
        for find in (_by_analogy, _in_stacks):
            wholes_of_side, parts_of_side = (
                [sketch for n, sketch in tensors.items() if n not in explanations]
                for tensors in (ours, theirs)
            )
            likely = find(work, wholes_of_side, parts_of_side, side)
            explanations |= _explained(work, likely, side)
    return explanations


def _representatives(wholes: list[Sketched], parts: list[Sketched]) -> list[Sketched]:
    """Return the wholes whose parts are searched; analogy finds the parts of their siblings."""
    if len(wholes) * len(parts) <= _MOST_PAIRS:
        return wholes
    by_form: dict[str, list[Sketched]] = defaultdict(list)
    for combined in wholes:
        by_form[spelled(combined.name).template].append(combined)
    return [combined for form in by_form.values() for combined in form[:2]][:_MOST_SEARCHED]


def _explained(work: Work, likely: Sequence[Joint], side: int) -> Explanations:
    links = [[_link(work, joint, member, side) for member in joint.members] for joint in likely]
    examine(list(chain.from_iterable(links)), work.bar)
    earlier = [joint for number, joint in work.joints if number == side]
    names = {case.match.name for case in work.cases if case.status != ALONE[1 - side]}
    broken = out_of_order([joint.order for joint in (*earlier, *likely)], names)
    explanations: Explanations = {}
    for number, (joint, of_parts) in enumerate(zip(likely, links, strict=True)):
        if any(link.relation is not None for link in of_parts):
            along = f"one after the other along the {lines_along(joint.axis)}"
            explanations |= of_joint(
                list(_shares(work, joint, of_parts)),
                "stacked" if joint.is_stack else along,
                side,
                is_in_order=number + len(earlier) not in broken,
            )
        explanation = explanations.get(joint.whole.number)
        if explanation is not None and explanation.verified:
            work.joints.append((side, joint))
    return explanations


def _link(work: Work, joint: Joint, member: JointPart, side: int) -> Link:
    """Return a link between a part and its place in the joined tensor, readable in either order."""
    combined, part = joint.whole, member.part
    start, shape = [0] * len(combined.shape), _place(joint, member)
    start[joint.axis] = member.start
    place = part_of(arranged(combined.stream.array, joint.steps), tuple(start), shape)
    run = member.start * prod(combined.shape[1:]) if joint.axis == 0 and not joint.steps else None
    in_whole, in_part = Side(place, combined.stream, run), Side.whole(part.stream)
    steps = (*member.steps, Layer()) if joint.is_stack else member.steps
    view, back = arranged(part.stream.array, steps), undone(place, steps)
    is_padded = _is_padded(joint, member)
    if not is_padded:
        at_part = Side(back, combined.stream, None if member.steps else run)
        orders = [(Side.of(view, part.stream), in_whole), (in_part, at_part)]
    elif side:
        padded = arranged(view, [Padded(tuple(view.shape), shape)])
        orders = [(Side(padded, part.stream), in_whole)]
    elif back is not None and all(n <= m for n, m in zip(back.shape, part.shape, strict=True)):
        padded = arranged(back, [Padded(tuple(back.shape), part.shape)])
        orders = [(in_part, Side(padded, combined.stream))]
    else:
        orders = []  # numbers are missing
    names = (part.name, combined.name)
    if not side:
        orders, names = [order[::-1] for order in orders], names[::-1]
    return Link(names, orders, work.places.offset(names), is_padded)


def _place(joint: Joint, member: JointPart) -> tuple[int, ...]:
    """Return the shape of the place of a part."""
    shape = list(joint.whole.shape)
    shape[joint.axis] = member.stop - member.start
    return tuple(shape)


def _kind(member: JointPart) -> str:
    """Return the form of the name of a part, and what was done before it was joined."""
    done = [step.done for step in member.steps]
    return "\n".join([spelled(member.part.name).template, *done])


def _is_padded(joint: Joint, member: JointPart) -> bool:
    """Return whether a part and its place differ in size."""
    view = arranged(member.part.stream.array, member.steps)
    return not joint.is_stack and tuple(view.shape) != _place(joint, member)


def _shares(work: Work, joint: Joint, links: Sequence[Link]) -> Iterator[Share]:
    """Yield the parts of a joint with the relations of their elements."""
    # Parts of one kind are joined in one way.
    steps_of: dict[str, Counter[tuple[Step, ...]]] = defaultdict(Counter)
    for member in joint.members:
        steps_of[spelled(member.part.name).template][member.steps] += 1
    for member, link in zip(joint.members, links, strict=True):
        usual = steps_of[spelled(member.part.name).template].most_common(1)[0][0]
        if member.steps != usual:
            problem = "unlike the others, it was rearranged"
            yield Share(joint.whole, member.part, None, problem, _kind(member))
        elif link.relation is None:
            yield Share(joint.whole, member.part, None, unlike(link), _kind(member))
        else:
            explanation = related(work.places, link, link.relation, (*joint.steps, *member.steps))
            if _is_padded(joint, member):
                is_equal = explanation.causes == ("equal",)
                text = "equal after adding zeros" if is_equal else explanation.text
                causes = ("padded", *explanation.causes)
                explanation = replace(explanation, causes=causes, text=text)
            yield Share(joint.whole, member.part, explanation, "", _kind(member))


def _by_analogy(
    work: Work, wholes: Sequence[Sketched], parts: Sequence[Sketched], side: int
) -> list[Joint]:
    """Return joints with the names of verified siblings, such as of biases that are all zero."""
    free, analogies = {part.name: part for part in parts}, []
    siblings: dict[str, list[Joint]] = defaultdict(list)
    for joint_side, joint in work.joints:
        if joint_side == side:
            siblings[_stem(joint.whole.name)].append(joint)
    for combined in wholes:
        for joint in siblings[_stem(combined.name)][:_MOST_SIBLINGS]:
            names = analogous(joint.order, combined.name)
            if names is None or not all(name in free for name in names):
                continue
            analogy = _analogy(joint, combined, [free[name] for name in names])
            if analogy is not None:
                analogies.append(analogy)
                for name in names:
                    del free[name]
                break
    return analogies


def _in_stacks(
    work: Work, wholes: Sequence[Sketched], parts: Sequence[Sketched], side: int
) -> list[Joint]:
    """Return stacks whose names begin like those of verified stacks, such as of norms."""
    free = {part.name: part for part in parts}
    orders = [joint.order for number, joint in work.joints if number == side and joint.is_stack]
    for n, explanation in work.explanations.items():
        match = work.cases[n].match
        if explanation.verified and explanation.joint[:1] == ("stacked",):
            stream = match.theirs if side else match.ours
            orders += [Order(stream.name, explanation.other_names)] if stream is not None else []
    stacks = []
    for combined in wholes:
        for order in orders:
            names = begun_alike(order, combined.name) or ()
            members = [free[name] for name in names if name in free]
            shapes = {member.shape for member in members}
            if len(members) == len(order.parts) and {(len(members), *s) for s in shapes} == {
                combined.shape
            }:
                places = [JointPart(part, k, k + 1, (), 0.0) for k, part in enumerate(members)]
                stacks.append(Joint(combined, 0, tuple(places), is_stack=True))
                free = {name: part for name, part in free.items() if name not in names}
                break
    return stacks


def _stem(name: str) -> str:
    return spelled(name).template.rpartition(".")[0]


def _analogy(joint: Joint, combined: Sketched, parts: Sequence[Sketched]) -> Joint | None:
    """Join parts in the same way as another joint; None if the sizes do not fit."""
    axis = min(joint.axis, len(combined.shape) - 1)
    start, members = 0, []
    for part, sibling in zip(parts, joint.members, strict=True):
        steps = sibling.steps if part.shape == sibling.part.shape else ()
        shape = tuple(arranged(part.stream.array, steps).shape)
        if len(shape) != len(combined.shape) - joint.is_stack:
            return None
        length = 1 if joint.is_stack else shape[axis]
        members.append(JointPart(part, start, start + length, steps, 0.0))
        start += length
    fits = start == combined.shape[axis]
    return Joint(combined, axis, tuple(members), is_stack=joint.is_stack) if fits else None


# --- the search for joints ------------------------------------------------------------------------

# Along the axis of a joint, the sums of the joined tensor (the *whole*) are the concatenated sums
# of its parts. The search walks along them and looks for the next part at the end of each part.

Shape = tuple[int, ...]

# The least agreement of the sums of a part with its place, by the least number of sums: short sums
# agree by chance.
_JOINED = {32: 0.7, 16: 0.85, 0: 0.9}
# The largest difference of the sums of a vector and a row, as a share of the norm of a row.
_NEAR = 0.05
# Margin of agreement by which another arrangement has to be better.
_CLEARLY = 1e-3


class _Oriented(NamedTuple):
    """A part with its axes in the order of the whole, and its sums along the axis of the joint."""

    part: Sketched
    sums: Array
    steps: tuple[Step, ...]
    #: Whether trailing zeros were removed.
    is_trimmed: bool = False


def joints_between(
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
        candidates = _Candidates(list(free.values()), parts_are_padded=parts_are_padded)
        for whole in remaining:
            likeliest = best.get(id(whole))
            is_stale = likeliest is not None and any(
                id(member.part) not in free for member in likeliest.members
            )
            if id(whole) not in best or is_stale:
                likely = _joints_of(whole, candidates)
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


class _Candidates:
    """The tensors that may be parts, arranged for each shape of a joined tensor."""

    def __init__(self, parts: list[Sketched], *, parts_are_padded: bool) -> None:
        self._parts = parts
        self._parts_are_padded = parts_are_padded
        self._along: dict[tuple[Shape, int], _Parts] = {}

    def vectors(self, size: int) -> list[Sketched]:
        """Return the vectors of a size."""
        return [part for part in self._parts if part.shape == (size,)]

    def along(self, shape: Shape, axis: int) -> _Parts:
        """Return the parts along an axis of a tensor; axis -1 is a new axis of stacked layers."""
        if (shape, axis) not in self._along:
            oriented = [
                slab
                for part in self._parts
                for slab in (
                    _layers(part, shape)
                    if axis < 0
                    else _slabs(part, shape, axis, parts_are_padded=self._parts_are_padded)
                )
            ]
            self._along[shape, axis] = _Parts(oriented, max(axis, 0))
        return self._along[shape, axis]


def _joints_of(whole: Sketched, candidates: _Candidates) -> Iterator[Joint]:
    shape = whole.shape
    if len(shape) == 3 and whole.rows is not None:
        members = _walk(whole.rows, candidates.along(shape, -1))
        if members:
            rows = shape[1]
            places = [m._replace(start=m.start // rows, stop=m.stop // rows) for m in members]
            yield Joint(whole, 0, tuple(places), is_stack=True)
    if len(shape) == 2 and whole.rows is not None:
        yield from _stacks_of_vectors(whole, whole.rows, candidates.vectors(shape[1]))
    for axis, along in enumerate(whole.along):
        if along is None:
            continue
        parts = candidates.along(shape, axis)
        members = _walk(along, parts)
        if members:
            yield Joint(whole, axis, tuple(members))
            continue
        orders = rope_orders(len(along)) if whole.is_rotary and len(parts.oriented) > 1 else {}
        for (heads, is_undone), order in orders.items():
            members = _walk(along[order], parts, are_permuted=False)
            if members and all(member.is_alike for member in members):
                step = RopePermuted(axis, heads, is_undone)
                yield Joint(whole, axis, tuple(members), (step,))
                break


def _stacks_of_vectors(whole: Sketched, rows: Array, vectors: list[Sketched]) -> Iterator[Joint]:
    """Yield a stack of the vectors whose sums are nearest to those of the rows."""
    if len(rows) < 2 or len(vectors) < len(rows):
        return
    sums = np.array([vector.sketch.totals[0] for vector in vectors])
    distances = np.abs(rows[:, None] - sums)
    nearest = distances.argmin(axis=1)
    norm = float(np.sqrt(whole.sketch.totals[1] / len(rows)))
    if len({*nearest.tolist()}) == len(rows) and (distances.min(axis=1) <= _NEAR * norm).all():
        score = max(_JOINED.values())
        places = [JointPart(vectors[n], k, k + 1, (), score) for k, n in enumerate(nearest)]
        yield Joint(whole, 0, tuple(places), is_stack=True)


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


def _walk(sums: Array, parts: _Parts, *, are_permuted: bool = True) -> list[JointPart]:
    """Find the parts that cover the sums of a whole, in order; empty if no chain of parts does.

    With `are_permuted`, the rows of parts may be permuted as for rotary embeddings.
    """
    if len(parts.oriented) < 2:
        return []
    parts.begin(are_permuted=are_permuted)
    members: list[JointPart] = []
    start = 0
    while start < len(sums):
        member = parts.at(sums, start)
        if member is not None:
            parts.used.add(id(member.part))
            members.append(member)
        elif members and (zeros := _zeros(sums, start)) and not parts.has_room(zeros):
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

    def __init__(self, oriented: list[_Oriented], axis: int) -> None:
        self.oriented = oriented
        self.axis = axis
        self.are_permuted = True
        #: Ids of the parts that have a place.
        self.used: set[int] = set()
        lengths = sorted({len(part.sums) for part in oriented}, reverse=True)
        self.groups = {n: [part for part in oriented if len(part.sums) == n] for n in lengths}
        self.tables = {
            n: standardised([part.sums for part in group], n) for n, group in self.groups.items()
        }
        #: Masks of the parts whose rows may be permuted as for rotary embeddings.
        self.turned = {
            n: np.array([bool(o.part.is_rotary) and not o.is_trimmed for o in group])
            for n, group in self.groups.items()
        }

    def begin(self, *, are_permuted: bool) -> None:
        """Free all parts, and choose whether their rows may be permuted."""
        self.used.clear()
        self.are_permuted = are_permuted

    def at(self, sums: Array, place: int) -> JointPart | None:
        """Return the free part whose sums agree best with the sums from a place on, if any do."""
        best: JointPart | None = None
        for n, group in self.groups.items():
            required = next(score for fewest, score in _JOINED.items() if n >= fewest)
            if place + n > len(sums):
                continue
            is_free = np.ones(len(group), np.bool_)
            if self.used:
                is_free[:] = [id(oriented.part) not in self.used for oriented in group]
            if not is_free.any():
                continue
            segment = standardised([sums[place : place + n]], n)[0]
            scores = np.where(is_free, self.tables[n] @ segment, -1.0)
            row = int(np.argmax(scores))
            steps: tuple[Step, ...] = ()
            score = float(scores[row])
            turned = np.flatnonzero(self.turned[n] & is_free)
            is_permuted = self.are_permuted and score < SURE and len(turned)
            if is_permuted and (orders := list(rope_orders(n))):
                # Permuting the part is the same as permuting its place inversely, which is cheaper.
                segments = segment[inverse_orders(n)[1:]]
                of_orders = self.tables[n][turned] @ segments.T
                position, order = divmod(int(np.argmax(of_orders)), len(orders))
                # Prefer the part without a permutation.
                if score <= float(of_orders[position, order]) - _CLEARLY:
                    row, score = int(turned[position]), float(of_orders[position, order])
                    steps = (RopePermuted(self.axis, *orders[order]),)
            if score >= required and (best is None or score > best.score + _CLEARLY):
                part, _, own_steps, _ = group[row]
                best = JointPart(part, place, place + n, (*own_steps, *steps), score)
        return best

    def has_room(self, zeros: int) -> bool:
        """Return whether zeros may be in the place of a free part, which was lost."""
        return any(
            n <= zeros and any(id(oriented.part) not in self.used for oriented in group)
            for n, group in self.groups.items()
        )

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
    return _in_name_order(complete)


def _in_name_order(members: list[JointPart]) -> list[JointPart]:
    """Give parts with equal numbers their places in the order of their names."""
    places: dict[Any, list[int]] = defaultdict(list)
    for place, member in enumerate(members):
        part = member.part
        sums = [None if sums is None else sums.tobytes() for sums in part.along]
        places[part.content, *sums].append(place)
    ordered = list(members)
    for group in places.values():
        parts = sorted([members[n].part for n in group], key=lambda part: natural_key(part.name))
        for place, part in zip(group, parts, strict=True):
            ordered[place] = members[place]._replace(part=part)
    return ordered
