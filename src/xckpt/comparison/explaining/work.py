"""The state of a search for explanations: its cases, and the results so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xckpt.comparison.arrangements import Padded, Transposed, arranged, undone
from xckpt.comparison.explaining.sketches import Sketched, sketched
from xckpt.comparison.explaining.verification import (
    Link,
    Side,
    examine,
    examine_in_turn,
    sides_after,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.arrays.streams import ChunkedZip, Zip
    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.classify import Places
    from xckpt.comparison.explaining.joints import Joint
    from xckpt.comparison.explaining.outcome import Case, Explanation
    from xckpt.comparison.explaining.search import StepChain
    from xckpt.progress import Progress

    #: Compares pairs of tensors, and returns their measures.
    Compare = Callable[[Sequence[Zip | ChunkedZip]], Sequence[Mapping[str, float]]]

Explanations = dict[int, "Explanation"]

#: Correlation from which on elements are in the same places, so that the search stops.
ALIGNED = 0.9
#: Statuses of tensors that only one side has, by side.
ALONE = ("only_a", "only_b")
#: Names of the sides in sentences.
SIDES = ("a", "b")
# The most arrangements to verify for a pair.
_MOST_TRIED = 4


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
    #: Joints that are explained, by the side of the whole.
    joints: list[tuple[int, Joint]] = field(default_factory=list)
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

    def is_aligned(self, n: int) -> bool:
        """Return whether the elements of both tensors are in the same positions."""
        link = self.in_place.get(n)
        return link is not None and link.correlation >= ALIGNED

    def sketch(self, numbers: Iterable[int], side: int) -> dict[int, Sketched]:
        """Return the sketches of tensors of one side, after computing the missing ones."""
        sketches = self.sketches[side]
        matches = {n: self.cases[n].match for n in numbers}
        sides = {n: match.theirs if side else match.ours for n, match in matches.items()}
        readers = {n: reader for n, reader in sides.items() if reader is not None}
        missing = {n: reader for n, reader in readers.items() if n not in sketches}
        new = sketched(missing, self.bar)
        for sketch in new.values():
            sketch.is_rotary = self.places.is_rotary(side, sketch.name)
        sketches |= new
        return {n: sketches[n] for n in readers if n in sketches}

    def sketch_pairs(self, numbers: Sequence[int]) -> dict[int, tuple[Sketched, Sketched]]:
        """Return the sketches of both tensors of cases, without those that cannot be sketched."""
        ours, theirs = (self.sketch(numbers, side) for side in (0, 1))
        return {n: (ours[n], theirs[n]) for n in numbers if n in ours and n in theirs}

    def link(self, a: Sketched, b: Sketched, steps: Sequence[Step]) -> Link:
        """Return a link between two whole tensors, readable in the order of either."""
        ours, theirs = a.reader, b.reader
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
        return Link(names, orders, self.places.offset(names), is_padded)

    def verify(self, tried: Sequence[tuple[int, tuple[Step, ...]]]) -> list[bool]:
        """Return, for cases and steps, whether the steps relate all elements of the tensors."""
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
        return [n in links and links[n].relation is not None for n in range(len(tried))]

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
