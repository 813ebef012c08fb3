"""The pass that explains joints: tensors that consist of several tensors of the other side.

`joints` suggests them. Here the elements of each part are compared with its place in the whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING

from xckpt.comparison.arrangements import Layer, Padded, arranged, lines_along, part_of, undone
from xckpt.comparison.explaining.joints import Joint, JointPart, joints_between
from xckpt.comparison.explaining.outcome import ALONE, Share, of_joint, related, unlike
from xckpt.comparison.names import Order, analogous, begun_alike, out_of_order, spelled
from xckpt.comparison.relations.verification import Link, Side, examine
from xckpt.comparison.sketches import Sketched, groups_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.explaining.passes import Explanations, Work

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
