"""Passes that explain why tensors differ, in the order of `PASSES`.

A pass is a function that returns explanations of tensors that are still unexplained. Cheap passes
come first. A relation is reported as a fact only after it was verified on every element. `outcome`
decides the outcome of each explanation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.comparison.arrangements import arranged
from xckpt.comparison.classify import unlike_siblings
from xckpt.comparison.explaining.conversions import converted, partly_converted
from xckpt.comparison.explaining.describing import described, misplaced, tied
from xckpt.comparison.explaining.joining import joined
from xckpt.comparison.explaining.outcome import Explanation, related, unreadable
from xckpt.comparison.explaining.renaming import expected, renamed
from xckpt.comparison.explaining.search import ALIKE, arrangements
from xckpt.comparison.explaining.verification import Link, Side, examine, sides_after
from xckpt.comparison.explaining.work import Work
from xckpt.comparison.layouts import tiled
from xckpt.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xckpt.comparison.classify import Places
    from xckpt.comparison.explaining.outcome import Case
    from xckpt.comparison.explaining.work import Compare, Explanations
    from xckpt.comparison.merges import Merges
    from xckpt.progress import ProgressOption


def explain(
    cases: Sequence[Case],
    places: Places,
    compare: Compare,
    progress: ProgressOption,
    merges: Merges | None = None,
) -> list[Explanation | None]:
    """Return an explanation for each case; None if it was not compared."""
    with Progress(progress, "explanation") as bar:
        work = Work(cases, places, compare, bar)
        if merges is not None:
            # Before all others: a tensor that is equal on both sides is not merged.
            work.explanations |= merges.explain(cases, bar)
        for find in PASSES:
            for n, explanation in find(work).items():
                work.explanations.setdefault(n, explanation)
        work.explanations |= unlike_siblings(cases, work.explanations, places, work.verify)
    return [_named(case, work.explanations.get(n)) for n, case in enumerate(cases)]


def _named(case: Case, explanation: Explanation | None) -> Explanation | None:
    """Add the name of the tensor in `b` to an explanation, if it differs."""
    partner = case.other_name
    if explanation is None or not partner or explanation.other_names:
        return explanation
    return explanation.renamed(partner, "b")


def equal(work: Work) -> Explanations:
    """Explain tensors whose elements are all equal."""
    return {
        n: Explanation(("equal",), f"all {case.measures['count']:,.0f} elements are equal")
        for n, case in enumerate(work.cases)
        if case.status == "same"
    }


def unread(work: Work) -> Explanations:
    """Explain tensors that cannot be read on one side by the error of their file."""
    problems = [(n, case.match.problem) for n, case in enumerate(work.cases)]
    return {n: unreadable(problem) for n, problem in problems if problem is not None}


def in_place(work: Work) -> Explanations:
    """Explain tensors whose elements keep their positions: rounded, quantised, with an offset."""
    for n in work.open:
        case = work.cases[n]
        ours, theirs = case.match.ours, case.match.theirs
        if case.match.measured is not None and ours is not None and theirs is not None:
            if not case.match.size:
                continue
            names = (case.match.name, case.other_name or case.match.name)
            order = sides_after(ours, theirs, case.match.steps)
            work.in_place[n] = Link(names, [order], work.places.offset(names))
    examine(list(work.in_place.values()), work.bar)
    by_tiles = {n: link for n in work.in_place if (link := _by_tiles(work, n)) is not None}
    examine(list(by_tiles.values()), work.bar, certain=True)
    work.in_place |= {n: link for n, link in by_tiles.items() if link.relation is not None}
    return work.settled({
        n: related(work.places, link, link.relation, work.cases[n].match.steps)
        for n, link in work.in_place.items()
        if link.relation is not None
    })  # fmt: skip


def _by_tiles(work: Work, n: int) -> Link | None:
    """Return a link between tiles with one scale each; None for explained or other tensors."""
    link = work.in_place[n]
    steps = tiled(tuple(link.orders[0][0].view.shape))
    if link.relation is not None or not steps or not work.is_aligned(n):
        return None
    ours, theirs = (Side(arranged(side.view, steps), side.tensor) for side in link.orders[0])
    return Link(link.names, [(ours, theirs)], link.offset)


def moved(work: Work) -> Explanations:
    """Explain pairs whose elements have moved: transposed, permuted, padded."""
    numbers = [
        n
        for n in work.open
        if work.cases[n].status in {"changed", "shape"} and not work.is_aligned(n)
    ]
    pairs = []
    for n, (a, b) in work.sketch_pairs(numbers).items():
        chains = [chain for chain in arrangements(a, b) if chain.score >= ALIKE / 2]
        pairs.append((n, a, b, [chain for chain in chains if chain.steps and not chain.is_cut]))
    return work.settled({
        n: related(work.places, link, link.relation, steps)
        for n, (link, steps) in work.try_arrangements(pairs).items()
        if link.relation is not None
    })  # fmt: skip


#: All passes, in order.
PASSES: tuple[Callable[[Work], Explanations], ...] = (
    unread,
    # tensors that have a partner by name
    equal,
    in_place,
    converted,
    moved,
    # tensors that only one side has
    joined,
    partly_converted,
    renamed,
    expected,
    # faults, and descriptions of unexplained tensors
    misplaced,
    described,
    tied,
)
