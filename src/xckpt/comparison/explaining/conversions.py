"""The pass that explains known conversions: layouts that the places of the tensors admit.

`layouts` and `division` suggest conversions. Here each piece is verified on every element.
"""

from __future__ import annotations

from functools import partial
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from xckpt.comparison.arrangements import Cropped, Reshaped, Shape, Step, arranged, undone
from xckpt.comparison.division import divisions
from xckpt.comparison.explaining.outcome import (
    ALONE,
    Share,
    SideTensor,
    both,
    of_joint,
    related,
    tensors_of,
    unlike,
)
from xckpt.comparison.layouts import Conversion, Layouts, Piece
from xckpt.comparison.names import spelled
from xckpt.comparison.recurrent import recurrent_joints
from xckpt.comparison.relations.verification import Attempt, Link, Side, examine_in_turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xckpt.comparison.explaining.passes import Explanations, Work

# The most layouts to verify for a tensor.
_MOST_TRIED = 24


def converted(work: Work) -> Explanations:
    """Explain tensors in the layouts of known conversions."""
    layouts = Layouts(work.places.structures)
    explanations = _pairs(work, layouts)
    for side in (1, 0):
        numbers = [n for n in work.open if n not in explanations]
        wholes = tensors_of(work.cases, numbers, side, {ALONE[side], "shape"})
        parts = tensors_of(work.cases, numbers, 1 - side, {ALONE[1 - side]})
        explanations |= _recurrent(work, wholes, numbers, side)
        if wholes and parts:
            shapes = _shapes(wholes)
            fused = partial(_fused, layouts, side, shapes)
            joints = divisions(_arrays(wholes), _arrays(parts), fused)
            joints |= layouts.joints(side, shapes, _shapes(parts))
            for attempt in _verified(work, joints.values(), wholes, parts, side):
                described = _described(work, attempt, wholes, parts, side)
                if attempt.holds:
                    explanations |= described
                elif attempt.held * 2 >= len(attempt.links):
                    work.partly_held.append(described)
    return explanations


def _recurrent(
    work: Work, wholes: Mapping[str, SideTensor], numbers: Sequence[int], side: int
) -> Explanations:
    """Explain recurrent layers of a graph; pairs by name are verified as a whole."""
    parts = tensors_of(work.cases, numbers, 1 - side, {ALONE[1 - side], "shape"})
    graph, module = work.places.structures[side], work.places.structures[1 - side]
    joints = recurrent_joints(graph, _shapes(wholes), module, _shapes(parts))
    explanations: Explanations = {}
    for attempt in _verified(work, joints.values(), wholes, parts, side) if joints else ():
        described = _described(work, attempt, wholes, parts, side)
        names = {name for piece in attempt.suggestion.pieces for name in piece[:2]}
        matches = [work.cases[n].match for n in described]
        pairs = [{x.name for x in (m.ours, m.theirs) if x is not None} for m in matches]
        if attempt.holds and all(pair <= names for pair in pairs):
            explanations |= described
    return explanations


def partly_converted(work: Work) -> Explanations:
    """Describe known conversions with pieces that differ, unless a search explains them."""
    for described in work.partly_held:
        earlier = [work.explanations[n] for n in described if n in work.explanations]
        if not any(explanation.verified for explanation in earlier):
            work.explanations |= described
    return {}


def _fused(layouts: Layouts, side: int, shapes: Mapping[str, Shape], name: str) -> list[int]:
    return layouts.fused_rows(side, name, shapes[name])


def _shapes(tensors: Mapping[str, SideTensor]) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _arrays(tensors: Mapping[str, SideTensor]) -> dict[str, Any]:
    return {name: tensor.stream.array for name, tensor in tensors.items()}


def _pairs(work: Work, layouts: Layouts) -> Explanations:
    """Explain pairs of tensors, by name or by their places."""
    alone = [tensors_of(work.cases, work.open, side, {ALONE[side]}) for side in (0, 1)]
    suggestions = layouts.pairs(_shapes(alone[0]), _shapes(alone[1]))
    for n in work.open:
        case = work.cases[n]
        ours, theirs = case.match.ours, case.match.theirs
        if case.status in {"changed", "shape"} and ours is not None and theirs is not None:
            both_shapes = tuple(ours.array.shape), tuple(theirs.array.shape)
            chains = layouts.chains(ours.name, theirs.name, both_shapes)
            if chains and not work.is_aligned(n):
                alone[0][ours.name] = SideTensor(n, ours)
                alone[1][theirs.name] = SideTensor(n, theirs)
                suggestions.append((ours.name, theirs.name, chains))
    conversions = [
        [Conversion((Piece(a, b, steps),), key=(steps,)) for steps in chains]
        for a, b, chains in suggestions
    ]
    explanations: Explanations = {}
    for conversion, [link] in _verified(work, conversions, alone[0], alone[1], 0):
        if link.relation is not None:
            [piece] = conversion.pieces
            a, b = alone[0][piece.whole], alone[1][piece.part]
            explanation = related(work.places, link, link.relation, piece.steps)
            same = {a.number: explanation}
            explanations |= same if a.number == b.number else both(a, b, explanation)
    return work.settled(explanations)


def _verified(
    work: Work,
    suggestions: Iterable[Sequence[Conversion]],
    wholes: Mapping[str, SideTensor],
    parts: Mapping[str, SideTensor],
    side: int,
) -> Iterable[Attempt[Conversion]]:
    """Return the best conversion of each suggestion, after verifying them in turn."""

    def links_of(conversion: Conversion) -> list[Link]:
        return [_link(work, piece, wholes, parts, side) for piece in conversion.pieces]

    limited = {n: conversions[:_MOST_TRIED] for n, conversions in enumerate(suggestions)}
    return examine_in_turn(limited, links_of, work.bar, attrgetter("key")).values()


def _link(
    work: Work,
    piece: Piece,
    wholes: Mapping[str, SideTensor],
    parts: Mapping[str, SideTensor],
    side: int,
) -> Link:
    """Return a link between the elements of a piece in both tensors, readable in either order."""
    combined, part = wholes[piece.whole].stream, parts[piece.part].stream
    view = arranged(combined.array, piece.steps)
    run = _run_of(tuple(combined.array.shape), piece.steps)
    of_part = arranged(part.array, piece.of_part)
    run_of_part = _run_of(tuple(part.array.shape), piece.of_part)
    orders = [(Side(view, combined, run), Side(of_part, part, run_of_part))]
    cut = max([n for n, step in enumerate(piece.steps, 1) if isinstance(step, Cropped)], default=0)
    back = undone(of_part, piece.steps[cut:])
    if back is not None and cut < len(piece.steps):
        place = arranged(combined.array, piece.steps[:cut])
        run = _run_of(tuple(combined.array.shape), piece.steps[:cut])
        orders.append((Side(place, combined, run), Side.of(back, part)))
    names = (piece.whole, piece.part)
    if side:
        orders, names = [order[::-1] for order in orders], names[::-1]
    return Link(names, orders, work.places.offset(names))


def _run_of(shape: tuple[int, ...], steps: Sequence[Step]) -> int | None:
    """Return the first position of the elements after some steps if they are contiguous."""
    start = 0
    for step in steps:
        if isinstance(step, Cropped):
            sizes = list(zip(step.after, shape, strict=True))
            first = next((n for n, (extent, _) in enumerate(sizes) if extent > 1), len(sizes))
            if any(extent != n for extent, n in sizes[first + 1 :]):
                return None
            start += sum([at * prod(shape[n + 1 :]) for n, at in enumerate(step.start)])
        elif not isinstance(step, Reshaped):
            return None
        shape = step.shape(shape)
    return start


def _described(
    work: Work,
    attempt: Attempt[Conversion],
    wholes: Mapping[str, SideTensor],
    parts: Mapping[str, SideTensor],
    side: int,
) -> Explanations:
    """Explain the tensors of a conversion; a piece that does not hold is a change."""
    conversion = attempt.suggestion
    shares = []
    for piece, link in zip(conversion.pieces, attempt.links, strict=True):
        steps = [step for step in piece.steps if step.cause == "transposed"]
        explanation = related(work.places, link, link.relation, steps) if link.relation else None
        problem = "" if explanation else unlike(link)
        tensors = wholes[piece.whole], parts[piece.part]
        shares.append(Share(*tensors, explanation, problem, spelled(piece.part).template))
    causes = ("regrouped",) if conversion.is_regrouped else ()
    return of_joint(
        shares,
        conversion.words,
        side,
        is_in_order=conversion.is_in_order,
        is_pair=len({piece.part for piece in conversion.pieces}) == 1,
        causes=causes,
    )
