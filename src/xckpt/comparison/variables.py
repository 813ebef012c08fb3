"""The variables of a comparison: matches of tensors, and the layout of their statistics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import nan, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.comparison.measure import MEASURES
from xckpt.scan.entries import deferred, laid
from xckpt.statistics.tables import STATUSES, TIED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from xckpt.comparison.cells import ChannelGrid
    from xckpt.comparison.pairs import Match
    from xckpt.comparison.relations.verification import Link
    from xckpt.scan.entries import Entry
    from xckpt.typing import Array


@dataclass(slots=True)
class ComparedVariable:
    """A variable of the result: the matches of its tensors, their statistics and attributes."""

    entry: Entry
    matches: Sequence[Match]
    grid: ChannelGrid | None = None  # None if it is compared as a whole
    links: Sequence[Link | None] = ()  # of the matches; empty if none are examined
    values: Any = None  # statistics come first
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a statistic: the stack, and then the channels."""
        return (*self.entry.shape, *(self.grid.extents if self.grid else ()))

    @property
    def laid_entry(self) -> Entry:
        """The variable with the dimensions of the statistics."""
        dims = (*self.entry.dims, *(self.grid.dims if self.grid else ()))
        return self.entry._replace(dims=dims, shape=self.shape)

    @property
    def places(self) -> Sequence[int]:
        """Places of the matches in the stack, which may lack tensors."""
        gone = self.entry.gone
        return range(len(self.matches)) if gone is None else np.flatnonzero(~gone.ravel()).tolist()

    def by_place(self, results: Sequence[Any]) -> Sequence[Any]:
        """Return one result for each place of the stack; None where a tensor is missing."""
        if self.entry.gone is None:
            return results
        of_place = dict(zip(self.places, results, strict=True))
        return [of_place.get(place) for place in range(self.entry.gone.size)]

    def add_texts(self, key: str, texts: Iterable[str | None]) -> None:
        """Add an attribute with a text for each match: a list if they are stacked."""
        by_place = [text or "" for text in self.by_place(list(texts))]
        self.attrs[key] = by_place if self.entry.dims else by_place[0]


def deferred_values(
    find: Callable[..., list[Array]], variables: Sequence[ComparedVariable]
) -> list[Any]:
    """Return dask arrays of the statistics, whose graphs hold no opened object."""
    shapes = [(len(MEASURES), *variable.shape) for variable in variables]
    alone = [replace(v, entry=v.entry._replace(tensors=None, streams=())) for v in variables]
    return deferred(find, alone, shapes)


def by_variable(
    variables: Sequence[ComparedVariable],
    statistics: Iterable[Sequence[float]],
    unread: Callable[[Match], Sequence[float]],
) -> list[Array]:
    """Return the array of each variable, from a row for each pair; `unread` makes other rows."""
    remaining = iter(statistics)
    arrays = []
    for variable in variables:
        shape, gone = variable.entry.shape, variable.entry.gone
        extents = () if variable.grid is None else variable.grid.extents
        cells = prod(extents)
        rows = [
            np.repeat(unread(match), cells) if match.measured is None else next(remaining)
            for match in variable.matches
        ]
        # The number of columns, which an empty tensor without cells does not show.
        width = len(unread(variable.matches[0]))
        columns = laid(np.array(rows, np.float64), shape, gone).reshape(width, cells, *shape)
        arrays.append(np.moveaxis(columns, 1, -1).reshape(len(columns), *shape, *extents))
    return arrays


def unread(row: Match) -> list[float]:
    """Return the statistics of a match without a pair: status and count, or only NaN."""
    statistics: dict[str, float] = {}
    if row.status:
        statistics = {"status": STATUSES.index(row.status), "count": row.size}
    return [statistics.get(measure, nan) for measure in MEASURES]


def add_attrs(variables: Sequence[ComparedVariable], *, has_names: bool) -> None:
    """Add the attributes of each variable: shapes that differ, names in `b`, and steps."""
    all_matches = [match for variable in variables for match in variable.matches]
    has_names |= any(match.partner and match.partner.rule == TIED for match in all_matches)
    has_steps = any(match.steps for match in all_matches)
    for variable in variables:
        matches = variable.matches
        shapes = [f"{match.name}: {match.shapes}" for match in matches if match.shapes]
        if shapes:
            variable.attrs["shapes"] = "; ".join(shapes)
        if has_names:
            partners = [match.partner for match in matches]
            variable.add_texts("other_name", (p and p.name for p in partners))
            variable.add_texts("matched_by", (p and p.rule for p in partners))
        if has_steps:
            variable.add_texts("relation", (match.relation for match in matches))
