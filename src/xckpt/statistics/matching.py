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

__all__ = ["matched"]

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
        partners, progress = _found(entries, others, tensors, progress)
    else:
        new = renamed([reader.name for each in entries for reader in each.readers], names)
        partners = {n: Partner(o, "name" if n == o else "names") for n, o in new.items()}
    with paused_collector():
        return *_rows_of(entries, others, partners, tensors), progress


def _found(
    entries: Sequence[Described],
    others: Sequence[Described],
    tensors: TensorFilter | None,
    progress: ProgressOption,
) -> tuple[dict[str, Partner], ProgressOption]:
    """Find partners by names and content."""
    ours, theirs = (
        {r.name: r for each in side for r in each.readers} for side in (entries, others)
    )
    chosen = set(select(ours, tensors))
    left = {n: r for n, r in theirs.items() if n not in ours or n in chosen}
    with Progress(progress, "matching") as bar:
        found = _partners({name: ours[name] for name in ours if name in chosen}, left, bar)
    if callable(progress):
        call = progress  # bytes that were read for this count on
        return found, lambda done, total: call(bar.done + done, bar.done + total)
    return found, progress


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

    def take(pairs: Iterator[tuple[str, str, str]]) -> None:
        for name, other, rule in pairs:
            if name in left and other in right:
                found[name] = Partner(other, rule)
                del left[name], right[other]

    first, second = _hashed(left, right, progress)
    for rule, key in _KEYS:
        take(_equal(rule, key, _varied(first, left), _varied(second, right)))
    named = same_tensors(left, right)
    take(one for one in named if _is_one_tensor(*one, ours, theirs))
    # Constants, and what is there several times: any of them has the same values.
    take(_in_order(_known(first, left), _known(second, right)))
    return found


def _is_one_tensor(
    name: str, other: str, rule: str, ours: Mapping[str, Reader], theirs: Mapping[str, Reader]
) -> bool:
    """Return whether names of projects mean one tensor: what is fused has the name of a part."""
    small, large = sorted((ours[name].size, theirs[other].size))
    return rule == "prefix" or large < 2 * small or small == large


def _hashed(
    left: Mapping[str, Reader], right: Mapping[str, Reader], progress: Progress
) -> tuple[Prints, Prints]:
    """Hash tensors that have as many elements as one of the other side has."""
    sizes = {reader.size for reader in left.values()} & {reader.size for reader in right.values()}
    sides = [{n: r for n, r in each.items() if r.size in sizes} for each in (left, right)]
    readers = [reader for side in sides for reader in side.values()]
    every = iter(fingerprints(readers, columns=True, progress=progress))
    prints: list[Prints] = [
        {name: one for name, one in zip(side, every, strict=False) if one is not None}
        for side in sides
    ]
    return prints[0], prints[1]


def _known(prints: Prints, left: Mapping[str, Any]) -> Prints:
    return {name: each for name, each in prints.items() if name in left}


def _varied(prints: Prints, left: Mapping[str, Any]) -> Prints:
    return {name: each for name, each in _known(prints, left).items() if each.low < each.high}


def _equal(
    rule: str, keys: Callable[[Fingerprint], list[Hashable]], first: Prints, second: Prints
) -> Iterator[tuple[str, str, str]]:
    """Find tensors that have a key in common, which no others have."""
    sides: list[dict[Hashable, set[str]]] = [defaultdict(set), defaultdict(set)]
    for side, prints in zip(sides, (first, second), strict=True):
        for name, each in prints.items():
            for key in keys(each):
                side[key].add(name)
    for key, names in sides[0].items():
        others = sides[1].get(key, set())
        if len(names) == len(others) == 1:
            yield min(names), min(others), rule


def _in_order(first: Prints, second: Prints) -> Iterator[tuple[str, str, str]]:
    """Pair tensors of equal values in the order of the files, if there are as many of them."""
    counts = [Counter(each.contents for each in side.values()) for side in (first, second)]
    others = defaultdict(list)
    for name, each in second.items():
        others[each.contents].append(name)
    for name, each in first.items():
        if counts[0][each.contents] == counts[1][each.contents]:
            yield name, others[each.contents].pop(0), "values"


# --- what is equal of two tensors that belong together -------------------------------------------


def _transposed(one: Fingerprint) -> list[Hashable]:
    return [(one.elements, _digest(each)) for each in (one.rows, one.columns) if each is not None]


def _rows(one: Fingerprint) -> list[Hashable]:
    sides = [each for each in (one.rows, one.columns) if each is not None and len(each) > 1]
    return [(one.elements, _digest(np.sort(each))) for each in sides]


def _digest(hashes: np.ndarray[Any, Any]) -> bytes:
    return blake2b(hashes.tobytes(), digest_size=16).digest()


_KEYS: tuple[tuple[str, Callable[[Fingerprint], list[Hashable]]], ...] = (
    ("values", lambda one: [one.contents]),
    ("transposed", _transposed),
    ("rows", _rows),
    ("elements", lambda one: [(one.elements, one.count)]),
)
