"""Explanations of the variables of a comparison, as attributes, measures and sums."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.comparison.explaining.outcome import Case, explained_attrs, sentence
from xckpt.comparison.explaining.passes import explain
from xckpt.comparison.measure import (
    MEASURES,
    PAIR_COLUMNS,
    PAIR_SUMS,
    compare_pairs,
    measures_of_pairs,
    summed,
)
from xckpt.comparison.pairs import pair_of
from xckpt.comparison.relations.verification import Link, sides_after
from xckpt.statistics.tables import STATUSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xckpt.arrays.streams import ChunkedZip, Zip
    from xckpt.comparison.classify import Places
    from xckpt.comparison.explaining.outcome import Explanation
    from xckpt.comparison.merges import Merges
    from xckpt.comparison.pairs import Match
    from xckpt.comparison.variables import ComparedVariable
    from xckpt.progress import ProgressOption
    from xckpt.typing import Array


def add_links(variables: Iterable[ComparedVariable], places: Places) -> None:
    """Link both sides of each match, to be examined in the pass that measures them."""

    def link(match: Match) -> Link | None:
        ours, theirs, partner = match.ours, match.theirs, match.partner
        if match.measured is None or ours is None or theirs is None or not match.size:
            return None
        names = match.name, partner.name if partner else match.name
        return Link(names, [sides_after(ours, theirs, match.steps)], places.offset(names))

    for variable in variables:
        variable.links = [*map(link, variable.matches)]


def add_explanations(
    variables: Sequence[ComparedVariable],
    places: Places,
    sums: dict[str, tuple[float, ...]],
    progress: ProgressOption,
    merges: Merges | None,
) -> dict[str, str]:
    """Add explanations to the attributes of variables; return the sentence about all of them."""
    cases = []
    for variable in variables:
        table = variable.values.reshape(len(MEASURES), -1).T
        measured = table[list(variable.places)].tolist()
        for match, link, numbers in zip(variable.matches, variable.links, measured, strict=True):
            status = "" if isnan(numbers[0]) else STATUSES[int(numbers[0])]
            cases.append(Case(match, status, dict(zip(MEASURES, numbers, strict=True)), link))

    def measure(pairs: Sequence[Zip | ChunkedZip]) -> list[dict[str, float]]:
        rows = compare_pairs(pairs, progress=False, cache=False)
        return [dict(zip(MEASURES, row, strict=True)) for row in rows.tolist()]

    explanations = explain(cases, places, measure, progress, merges)
    related = _related_sums(cases, explanations)
    columns = [PAIR_COLUMNS.index(name) for name in PAIR_SUMS]
    sums |= {cases[n].match.name: tuple(row[columns].tolist()) for n, row in related.items()}
    rows = np.array([*related.values()]).reshape(-1, len(PAIR_COLUMNS))
    measures = dict(zip(related, measures_of_pairs(rows), strict=True))
    first = 0
    for variable in variables:
        numbers = range(first, first := first + len(variable.matches))
        by_place = variable.by_place([explanations[n] for n in numbers])
        variable.attrs |= explained_attrs(by_place, is_stacked=bool(variable.entry.dims))
        for n, place in zip(numbers, variable.places, strict=True):
            if n in measures:  # of the elements that belong together; the status stays
                variable.values.reshape(len(MEASURES), -1)[1:, place] = measures[n][1:]
    return {"explanation": sentence(cases, explanations)}


def _related_sums(
    cases: Sequence[Case], explanations: Sequence[Explanation | None]
) -> dict[int, Array]:
    """Return `PAIR_COLUMNS` of the elements that belong together, by the number of the case.

    Others are measured already, element by element at their own places.
    """
    partners = {case.match.name: case.match.theirs for case in cases if case.status == "only_b"}
    related: dict[int, Array] = {}
    pairs: dict[int, Any] = {}
    for n, (case, explanation) in enumerate(zip(cases, explanations, strict=True)):
        if explanation is None or case.status == "only_b":
            continue
        partner = partners.get(", ".join(explanation.other_names))
        is_moved = bool(explanation.steps) or case.status == "only_a"
        if is_moved and explanation.is_admitted and explanation.measures is not None:
            related[n] = np.array(explanation.measures, np.float64)
        elif (
            case.match.ours is not None
            and partner is not None
            and case.match.ours.array.shape == partner.array.shape
        ):
            pairs[n] = pair_of(case.match.ours, partner, case.match.name)
    in_place = summed(list(pairs.values()), progress=False, cache=False)
    return related | dict(zip(pairs, in_place, strict=True))
