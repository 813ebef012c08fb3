"""Which tensors of two checkpoints belong together, and what is known of them before reading."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan, nan, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.errors import shown
from xckpt.labels.selection import select
from xckpt.statistics.comparison import MEASURES, STATUSES
from xckpt.statistics.entries import Entry
from xckpt.statistics.pairs import ChunkedPair, PairReader, pair_of, shape_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from xckpt.labels import TensorFilter
    from xckpt.statistics.passes import Member

__all__ = [
    "Renaming",
    "Row",
    "by_position",
    "differing_shapes",
    "have_no_names_in_common",
    "matched",
    "renaming",
]

#: How names of `a` become those of `b`.
Renaming = Mapping[str, str] | Callable[[str], str] | tuple[str | re.Pattern[str], str]


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of either side, or a pair.

    Parameters
    ----------
    name : str
        Of the tensor, in `a` if it is there.
    known : list of float
        All measures, where nothing has to be read for them.
    pair : PairReader, ChunkedPair or None
        What has to be read.
    shapes : str
        Both, where they differ.
    """

    name: str
    known: list[float]
    pair: PairReader | ChunkedPair | None = None
    shapes: str = ""


def renaming(names: Any) -> Callable[[str], str]:
    """Make a function of what says how names of `a` become those of `b`."""
    if names is None:
        return lambda name: name
    if isinstance(names, Mapping):
        return lambda name: names.get(name, name)
    if callable(names):
        renamed: Callable[[str], str] = names
        return renamed
    if isinstance(names, tuple | list) and len(names) == 2:
        pattern, replacement = names
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return lambda name: compiled.sub(replacement, name)
    raise TypeError(
        "names takes a mapping, a function of a name, or a pair of a regular expression and its "
        f"replacement, not {names!r}"
    )


def by_position(entries: Sequence[Entry], others: Sequence[Entry]) -> Callable[[str], str]:
    """Return the function between names that leads from each tensor to the one at its place."""
    pairs = [
        (ours.name, theirs.name)
        for entry, other in zip(entries, others, strict=False)
        for ours, theirs in zip(entry.members, other.members, strict=False)
    ]
    return renaming(dict(pairs))


def matched(
    entries: Sequence[Entry],
    others: Sequence[Entry],
    rename: Callable[[str], str],
    tensors: TensorFilter | None,
) -> tuple[list[Entry], list[list[Row]]]:
    """Find tensors that belong together."""
    theirs: dict[str, Member] = {}
    for member in (member for other in others for member in other.members):
        if theirs.setdefault(member.name, member) is not member:
            raise ValueError(f"two tensors of b are called {shown(member.name)}")
    ours = [member.name for entry in entries for member in entry.members]
    chosen = set(select([*ours, *theirs], tensors))
    found: list[Entry] = []
    rows: list[list[Row]] = []
    used: set[str] = set()
    for entry in entries:
        partners = [rename(member.name) for member in entry.members]
        used.update(partners)
        if not any(member.name in chosen for member in entry.members):
            continue
        found.append(entry)
        rows.append(
            [
                _row(member, theirs.get(partner), member.name in chosen)
                for member, partner in zip(entry.members, partners, strict=True)
            ]
        )
    taken = {entry.name for entry in found}
    for name, member in theirs.items():
        if name not in used and name in chosen:
            found.append(_entry_of_b(member, taken))
            rows.append([Row(name, _unread("only_b", member.reader.size))])
    return found, rows


def _row(ours: Member, theirs: Member | None, is_chosen: bool) -> Row:  # noqa: FBT001  of a loop
    if not is_chosen:
        return Row(ours.name, [nan] * len(MEASURES))
    if theirs is None:
        return Row(ours.name, _unread("only_a", ours.reader.size))
    shape, other = shape_of(ours.reader), shape_of(theirs.reader)
    if shape != other:
        return Row(ours.name, _unread("shape", prod(shape)), shapes=f"{shape} and {other}")
    return Row(ours.name, [], pair_of(ours.reader, theirs.reader))


def _unread(status: str, count: int) -> list[float]:
    known: dict[str, float] = {"status": STATUSES.index(status), "count": count}
    return [known.get(measure, nan) for measure in MEASURES]


def _entry_of_b(member: Member, taken: set[Hashable]) -> Entry:
    """Return a tensor that only `b` has a variable of its own."""
    name = member.name
    while name in taken:
        name += " (b)"
    taken.add(name)
    variable = xr.Variable((), np.nan, encoding={"tensor": member.name})
    return Entry(name, (), (), (member,), variable)


def differing_shapes(rows: Sequence[Row]) -> str:
    """Say which shapes differ."""
    return "; ".join(f"{row.name}: {row.shapes}" for row in rows if row.shapes)


def have_no_names_in_common(rows: Sequence[Sequence[Row]]) -> bool:
    """Return whether each side has tensors, and none of them is on the other."""
    every = [row for some in rows for row in some]
    known = {row.known[0] for row in every if row.known and not isnan(row.known[0])}
    strangers = {float(STATUSES.index(status)) for status in ("only_a", "only_b")}
    return known == strangers and not any(row.pair for row in every)
