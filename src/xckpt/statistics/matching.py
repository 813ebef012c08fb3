"""Which tensors of two checkpoints belong together: by name, by content, by names that are known.

Content comes first where names differ: who renamed, transposed or permuted a tensor did not change
its numbers, and names can mislead. It says nothing of tensors that are rounded, nor of constants,
such as the norms of a model that was not trained: there known spellings of names tell.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from xckpt.errors import shown
from xckpt.index import paused_collector
from xckpt.labels.conventions import same_tensors
from xckpt.labels.selection import renamed, select
from xckpt.progress import Progress
from xckpt.statistics.entries import Described, Subject
from xckpt.statistics.explaining.fingerprints import fingerprints
from xckpt.statistics.pairs import Match, Partner, pair_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from xckpt.labels import TensorFilter
    from xckpt.labels.selection import Renaming
    from xckpt.progress import ProgressOption
    from xckpt.statistics.explaining.fingerprints import Fingerprint
    from xckpt.statistics.readers import Reader

Prints = dict[str, "Fingerprint"]


def matched(
    entries: Sequence[Described],
    others: Sequence[Described],
    names: Renaming | Literal["auto"] | None,
    tensors: TensorFilter | None,
    progress: ProgressOption,
) -> tuple[list[Described], list[list[Match]], ProgressOption]:
    """Find tensors that belong together, by variables; return what is told of the rest, too."""
    if isinstance(names, str) and names == "auto":
        ours, theirs = (
            {r.name: r for each in side for r in each.readers} for side in (entries, others)
        )
        chosen = set(select(ours, tensors))
        left = {n: r for n, r in theirs.items() if n not in ours or n in chosen}
        with Progress(progress, "matching") as bar:
            partners = _partners({name: ours[name] for name in ours if name in chosen}, left, bar)
        if callable(progress):
            call = progress  # bytes that were read for this count on
            progress = lambda done, total: call(bar.done + done, bar.done + total)  # noqa: E731
    else:
        new = renamed([reader.name for each in entries for reader in each.readers], names)
        partners = {n: Partner(o, "name" if n == o else "names") for n, o in new.items()}
    with paused_collector():
        return *_rows_of(entries, others, partners, tensors), progress


def _rows_of(
    entries: Sequence[Described],
    others: Sequence[Described],
    partners: Mapping[str, Partner],
    tensors: TensorFilter | None,
) -> tuple[list[Described], list[list[Match]]]:
    """Return the variables that are compared, and their tensors; those that only `b` has last."""
    theirs: dict[str, Reader] = {}
    for member in (member for other in others for member in other.readers):
        if theirs.setdefault(member.name, member) is not member:
            raise ValueError(f"two tensors of b are called {shown(member.name)}")
    ours = [member.name for entry in entries for member in entry.readers]
    chosen = set(select([*ours, *theirs], tensors))

    def match(reader: Reader) -> Match:
        if reader.name not in chosen:
            return Match(reader.name)
        partner = partners.get(reader.name)
        other = theirs.get(partner.name) if partner else None
        if other is None:
            return Match(reader.name, reader)
        is_pair = reader.array.shape == other.array.shape
        pair = pair_of(reader, other, reader.name) if is_pair else None
        return Match(reader.name, reader, other, partner, pair)

    used = {partners[name].name for name in ours if name in partners}
    found = [entry for entry in entries if any(each.name in chosen for each in entry.readers)]
    rows = [[match(reader) for reader in entry.readers] for entry in found]
    taken = {entry.name for entry in found}
    for name, member in theirs.items():
        if name not in used and name in chosen:
            own = name
            while own in taken:
                own += " (b)"
            taken.add(own)
            encoding = {"tensor": name}
            variable = xr.Variable((), np.nan, encoding=encoding)
            subject = Subject({own: variable}, {}, "")
            found.append(Described(own, (), (), (member,), encoding, subject))
            rows.append([Match(name, theirs=member)])
    return found, rows


# --- by names and content ------------------------------------------------------------------------


def _partners(
    ours: Mapping[str, Reader], theirs: Mapping[str, Reader], progress: Progress
) -> dict[str, Partner]:
    """Find for tensors of one side those of the other; values are read where names differ."""
    found = {name: Partner(name, "name") for name in ours if name in theirs}
    left = {name: reader for name, reader in ours.items() if name not in found}
    right = {name: reader for name, reader in theirs.items() if name not in found}

    def take(name: str, other: str, rule: str) -> None:
        if name in left and other in right:
            found[name] = Partner(other, rule)
            del left[name], right[other]

    # Those are hashed that have as many elements as one of the other side has.
    sizes = {reader.size for reader in left.values()} & {reader.size for reader in right.values()}
    sides = [{n: r for n, r in each.items() if r.size in sizes} for each in (left, right)]
    readers = [reader for side in sides for reader in side.values()]
    every = iter(fingerprints(readers, columns=True, progress=progress))
    prints = [
        {name: one for name, one in zip(side, every, strict=False) if one is not None}
        for side in sides
    ]

    def known() -> list[Prints]:
        """Return the hashes of what is left."""
        both = zip(prints, (left, right), strict=True)
        return [{name: one for name, one in some.items() if name in side} for some, side in both]

    for rule, key in _KEYS:
        for name, other in _equal(key, *known()):
            take(name, other, rule)
    for name, other, rule in same_tensors(left, right):
        # What is fused has the name of a part.
        small, large = sorted((ours[name].size, theirs[other].size))
        if rule == "prefix" or large < 2 * small or small == large:
            take(name, other, rule)
    # Constants, and what is there several times: any of them has the same values.
    for name, other in _in_order(*known()):
        take(name, other, "values")
    return found


def _equal(
    keys: Callable[[Fingerprint], list[Hashable]], first: Prints, second: Prints
) -> Iterator[tuple[str, str]]:
    """Find tensors that are not constant and have a key in common, which no others have."""
    sides: list[dict[Hashable, set[str]]] = [defaultdict(set), defaultdict(set)]
    for side, prints in zip(sides, (first, second), strict=True):
        for name, each in prints.items():
            for key in keys(each) if each.low < each.high else ():
                side[key].add(name)
    for key, names in sides[0].items():
        others = sides[1].get(key, set())
        if len(names) == len(others) == 1:
            yield min(names), min(others)


def _in_order(first: Prints, second: Prints) -> Iterator[tuple[str, str]]:
    """Pair tensors of equal values in the order of the files, if there are as many of them."""
    counts = [Counter(each.contents for each in side.values()) for side in (first, second)]
    others = defaultdict(list)
    for name, each in second.items():
        others[each.contents].append(name)
    for name, each in first.items():
        if counts[0][each.contents] == counts[1][each.contents]:
            yield name, others[each.contents].pop(0)


# --- what is equal of two tensors that belong together -------------------------------------------


def _hashes(one: Fingerprint, fewest: int, order: Callable[[Any], Any]) -> list[Hashable]:
    """Return digests of the rows and of the columns, if there are so many, in some order."""
    sides = [each for each in (one.rows, one.columns) if each is not None and len(each) >= fewest]
    digests = [blake2b(order(each).tobytes(), digest_size=16).digest() for each in sides]
    return [(one.elements, digest) for digest in digests]


_KEYS: tuple[tuple[str, Callable[[Fingerprint], list[Hashable]]], ...] = (
    ("values", lambda one: [one.contents]),
    ("transposed", lambda one: _hashes(one, 0, np.asarray)),
    ("rows", lambda one: _hashes(one, 2, np.sort)),
    ("elements", lambda one: [(one.elements, one.count)]),
)
