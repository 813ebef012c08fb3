"""The shared state of the passes that explain differences: cases, results, sketches and links."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.comparison.arrangements import Padded, Transposed, arranged, undone
from xckpt.comparison.explaining.outcome import ALONE, Explanation
from xckpt.comparison.names import Order
from xckpt.comparison.relations.verification import (
    Link,
    Side,
    examine,
    examine_in_turn,
    sides_after,
)
from xckpt.comparison.sketches import sketched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.arrays.streams import ChunkedZip, ElementStream, Zip
    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.classify import Places
    from xckpt.comparison.explaining.outcome import Case
    from xckpt.comparison.match import Candidate
    from xckpt.comparison.sketches import Sketched, StepChain
    from xckpt.progress import Progress

    #: Compares pairs of tensors, and returns their measures.
    Compare = Callable[[Sequence[Zip | ChunkedZip]], Sequence[Mapping[str, float]]]

Explanations = dict[int, Explanation]

#: Correlation from which on elements are in the same places, so that the search stops.
ALIGNED = 0.9
# The most arrangements to verify for a pair.
_MOST_TRIED = 4


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


@dataclass
class Work:
    """The cases of a comparison and the results so far, keyed by the numbers of the cases."""

    cases: Sequence[Case]
    places: Places
    compare: Compare
    bar: Progress
    explanations: Explanations = field(default_factory=dict)
    #: Descriptions of changed tensors: relations that hold, but have causes that are not admitted.
    descriptions: Explanations = field(default_factory=dict)
    #: Links between the elements at the same positions of two tensors.
    in_place: dict[int, Link] = field(default_factory=dict)
    #: Sketches of the tensors of each side.
    sketches: tuple[dict[int, Sketched], dict[int, Sketched]] = field(
        default_factory=lambda: ({}, {})
    )
    #: Links between whole tensors after steps, which several passes may try.
    links: dict[tuple[ElementStream, ElementStream, tuple[Step, ...]], Link] = field(
        default_factory=dict
    )
    #: Joints that are explained, by the side of the whole.
    joints: list[tuple[int, Joint]] = field(default_factory=list)
    #: Names of the tensors of each side with the same numbers, by the numbers of their cases.
    copies: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    #: Explanations of known conversions of which some pieces differ.
    partly_held: list[Explanations] = field(default_factory=list)

    @property
    def open(self) -> list[int]:
        """Numbers of the cases that differ and have no explanation."""
        return [
            n for n, case in enumerate(self.cases) if case.status and n not in self.explanations
        ]

    def alone(self, side: int) -> list[int]:
        """Return the numbers of the open cases that only one side has."""
        return [n for n in self.open if self.cases[n].status == ALONE[side]]

    def alone_of_sides(self) -> tuple[list[Sketched], list[Sketched]]:
        """Return the sketches of the open tensors that only one side has, of each side."""
        ours, theirs = (list(self.sketch(self.alone(side), side).values()) for side in (0, 1))
        return ours, theirs

    def is_aligned(self, n: int) -> bool:
        """Return whether the elements of both tensors are in the same positions."""
        link = self.in_place.get(n)
        return link is not None and link.correlation >= ALIGNED

    def sketch(self, numbers: Iterable[int], side: int) -> dict[int, Sketched]:
        """Return the sketches of tensors of one side, after computing the missing ones."""
        sketches = self.sketches[side]
        matches = {n: self.cases[n].match for n in numbers}
        sides = {n: match.theirs if side else match.ours for n, match in matches.items()}
        streams = {n: stream for n, stream in sides.items() if stream is not None}
        missing = {n: stream for n, stream in streams.items() if n not in sketches}
        new = sketched(missing, self.bar)
        for sketch in new.values():
            self.places.note(side, sketch)
        sketches |= new
        return {n: sketches[n] for n in streams if n in sketches}

    def sketch_pairs(self, numbers: Sequence[int]) -> dict[int, tuple[Sketched, Sketched]]:
        """Return the sketches of both tensors of cases, without those that cannot be sketched."""
        ours, theirs = (self.sketch(numbers, side) for side in (0, 1))
        return {n: (ours[n], theirs[n]) for n in numbers if n in ours and n in theirs}

    def link(self, a: Sketched, b: Sketched, steps: tuple[Step, ...]) -> Link:
        """Return a link between two whole tensors, readable in the order of either."""
        ours, theirs = a.stream, b.stream
        if (ours, theirs, steps) in self.links:
            return self.links[ours, theirs, steps]
        orders = [sides_after(ours, theirs, steps)]
        undone_view = undone(theirs.array, steps) if steps else None
        if undone_view is not None:
            orders.append((Side.whole(ours), Side.of(undone_view, theirs)))
        elif steps and isinstance(steps[0], Transposed):
            # Zeros were added before the axes were transposed.
            turn = steps[0].inverse()
            turned = arranged(ours.array, [*steps, turn]), arranged(theirs.array, [turn])
            orders.append((Side(turned[0], ours), Side(turned[1], theirs)))
        names = (a.name, b.name)
        is_padded = any(isinstance(step, Padded) for step in steps)
        link = Link(names, orders, self.places.offset(names), is_padded)
        self.links[ours, theirs, steps] = link
        return link

    def verify(self, tried: Sequence[tuple[int, tuple[Step, ...]]]) -> list[bool | None]:
        """Return, for cases and steps, whether the steps relate all elements of the tensors.

        The result is None if the steps do not fit the shapes.
        """
        links: dict[int, Link] = {}
        names = {case.match.name: case for case in self.cases if case.status == ALONE[1]}
        for number, (n, steps) in enumerate(tried):
            case = self.cases[n]
            partner = names.get(next(iter(self.explanations[n].other_names), ""))
            ours, theirs = case.match.ours, case.match.theirs
            theirs = partner.match.theirs if theirs is None and partner is not None else theirs
            if ours is None or theirs is None:
                continue
            order = sides_after(ours, theirs, steps)
            if tuple(order[0].view.shape) == tuple(theirs.array.shape):
                pair_names = ours.name, theirs.name
                links[number] = Link(pair_names, [order], self.places.offset(pair_names))
        examine(list(links.values()), self.bar, certain=True)
        return [links[n].relation is not None if n in links else None for n in range(len(tried))]

    def note_contested(self, candidates: Sequence[Candidate]) -> None:
        """Store the copies among the tensors that only one side has."""
        groups = list(map(tensors_by_content, self.alone_of_sides())) if candidates else []
        for a, b, *_ in candidates:
            ours, theirs = groups[0][a.content], groups[1][b.content]
            names = [t.name for t in ours], [t.name for t in theirs]
            self.copies |= dict.fromkeys([t.number for t in (*ours, *theirs)], names)

    def settled(self, explanations: Explanations) -> Explanations:
        """Return the explanations, and store those that only describe a change for a later pass."""
        for n, explanation in explanations.items():
            if explanation.outcome != "explained":
                self.descriptions.setdefault(n, explanation)
        return {
            n: explanation
            for n, explanation in explanations.items()
            if explanation.outcome == "explained"
        }

    def try_arrangements(
        self, pairs: Sequence[tuple[Any, Sketched, Sketched, Sequence[StepChain]]]
    ) -> dict[Any, tuple[Link, tuple[Step, ...]]]:
        """Verify the arrangements of pairs, best first, until one holds.

        Returns, by the key of each pair, a link and its steps. The link holds for all elements if
        possible, else for most of them.
        """
        suggestions = {
            key: [(a, b, chain.steps) for chain in untried[:_MOST_TRIED]]
            for key, a, b, untried in pairs
        }
        attempts = examine_in_turn(suggestions, lambda tried: [self.link(*tried)], self.bar)
        chosen = {key: attempts[key] for key in suggestions if key in attempts}
        return {key: (tried.links[0], tried.suggestion[2]) for key, tried in chosen.items()}


def tensors_by_content(tensors: Iterable[Sketched]) -> dict[Any, list[Sketched]]:
    """Group tensors of one side by their numbers."""
    groups: dict[Any, list[Sketched]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.content].append(tensor)
    return groups
