"""Which tensors of two checkpoints belong together: by name, by content, by names that are known.

Content comes first where names differ: who renamed, transposed or permuted a tensor did not change
its numbers, and names can mislead. It says nothing of tensors that are rounded, nor of constants,
such as the norms of a model that was not trained: there known spellings of names tell.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xckpt.comparison.explaining.names import Rules, are_other_roles, conventions
from xckpt.comparison.explaining.search import partners
from xckpt.comparison.explaining.sketches import sketched
from xckpt.comparison.pairs import Match, Partner, pair_of
from xckpt.errors import shown
from xckpt.index import paused_collector
from xckpt.labels.conventions import match_names
from xckpt.labels.filters import select
from xckpt.labels.renaming import new_names
from xckpt.progress import Progress
from xckpt.scan.entries import Described

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.comparison.explaining.search import Candidate
    from xckpt.comparison.explaining.sketches import Sketched
    from xckpt.labels import TensorFilter
    from xckpt.labels.renaming import Renaming
    from xckpt.progress import ProgressOption
    from xckpt.scan.readers import Reader


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
        new = new_names([reader.name for each in entries for reader in each.readers], names)
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
            found.append(Described(own, (), (), (member,), encoding))
            rows.append([Match(name, theirs=member)])
    return found, rows


# --- by names and content ------------------------------------------------------------------------


def _partners(
    ours: Mapping[str, Reader], theirs: Mapping[str, Reader], progress: Progress
) -> dict[str, Partner]:
    """Pair tensors of two sides; numbers are read where names differ."""
    found = {name: Partner(name, "name") for name in ours if name in theirs}
    sides = [
        {name: reader for name, reader in side.items() if name not in found}
        for side in (ours, theirs)
    ]
    left, right = sides
    usual = conventions(left, right)

    def take(name: str, other: str, rule: str) -> None:
        if name in left and other in right:
            found[name] = Partner(other, rule)
            del left[name], right[other]

    # Those are read that have as many elements as one of the other side has.
    sizes = {reader.size for reader in left.values()} & {reader.size for reader in right.values()}
    readers = [r for side in sides for r in side.values() if r.size in sizes]
    sketches = {id(r): each for r, each in zip(readers, sketched(readers, progress), strict=True)}

    def remaining() -> list[list[Sketched]]:
        """Return the sketches of unmatched tensors."""
        return [[s for r in side.values() if (s := sketches.get(id(r)))] for side in sides]

    copies = _copies(remaining())
    alike = [each for each in partners(*remaining(), extended=False) if each.is_exact]
    exact = [
        (each.a.name, each.b.name, _rule_of(each))
        for each in alike
        if not {id(each.a), id(each.b)} & copies
    ]
    exact += _same_elements(remaining(), {name for pair in exact for name in pair[:2]})
    shapes: dict[str, object] = {r.name: r.array.shape for r in right.values()}
    rules = Rules((name, other) for name, other, _ in exact)
    broken = rules.broken(right, shapes, usual)
    for name, other, rule in exact:
        if name not in broken:
            take(name, other, rule)
    for name, other, rule in match_names(left, right):
        # A tensor that consists of others has the name of a part.
        small, large = sorted((ours[name].size, theirs[other].size))
        if rule == "prefix" or large < 2 * small or small == large:
            take(name, other, rule)
    known = [(name, partner.name) for name, partner in found.items() if partner.name != name]
    # Constants, and copies: any of them has the same values.
    unmatched = remaining()
    for a, b in _in_order(unmatched[0], unmatched[1], Rules(known), [*right]):
        take(a.name, b.name, "values")
    for name, other in _alike(remaining(), known, shapes, usual):
        take(name, other, "alike")
    return found


# Sums of numbers that were quantised to few bits agree at least this much.
_ALIKE = 0.8


def _alike(
    sides: Sequence[Sequence[Sketched]],
    known: Sequence[tuple[str, str]],
    shapes: dict[str, object],
    usual: Mapping[str, str],
) -> list[tuple[str, str]]:
    """Pair tensors that were rounded or quantised: they have nearly the same sums."""
    rest = [
        (each.a.name, each.b.name)
        for each in partners(*sides, extended=False)
        if each.arrangement.score >= _ALIKE and not each.is_exact
    ]
    broken = Rules([*known, *rest]).broken({each.name for each in sides[1]}, shapes, usual)
    return [pair for pair in rest if pair[0] not in broken]


def _rule_of(candidate: Candidate) -> str:
    """Return the rule by which two tensors of the same numbers belong together."""
    causes = [step.cause for step in candidate.arrangement.steps]
    if candidate.arrangement.score < _SAME:
        is_rows = candidate.a.shape == candidate.b.shape or _is_turned(candidate)
        return "rows" if is_rows else "elements"
    return "rows" if "rope_permuted" in causes else "transposed" if causes else "values"


_SAME = 1 - 1e-9


def _is_turned(candidate: Candidate) -> bool:
    return candidate.a.shape == candidate.b.shape[::-1]


def _same_elements(
    sides: Sequence[Sequence[Sketched]], taken: set[str]
) -> list[tuple[str, str, str]]:
    """Pair tensors with the same numbers in any order, if there is one on either side."""
    groups: tuple[dict[Any, list[Sketched]], ...] = (defaultdict(list), defaultdict(list))
    for side, group in zip(sides, groups, strict=True):
        for each in side:
            if not each.is_constant and each.name not in taken:
                group[each.size, each.sketch.low, each.sketch.high].append(each)
    return [
        (some[0].name, other[0].name, _rule_of_elements(some[0], other[0]))
        for key, some in groups[0].items()
        if len(some) == len(other := groups[1].get(key, [])) == 1 and some[0].is_like(other[0])
    ]


def _rule_of_elements(a: Sketched, b: Sketched) -> str:
    """Return the rule for equal numbers in another order: by rows, or by elements."""
    for x in (a.rows, a.columns):
        for y in (b.rows, b.columns):
            if x is not None and y is not None and len(x) == len(y) > 1 and len(a.shape) > 1:
                scale = float(np.abs(x).max()) or 1.0
                if np.abs(np.sort(x) - np.sort(y)).max() <= _NEARLY * scale:
                    return "rows"
    return "elements"


_NEARLY = 1e-9


def _copies(sides: Sequence[Sequence[Sketched]]) -> set[int]:
    """Return the ids of tensors that are there several times on one side."""
    found: set[int] = set()
    for side in sides:
        groups: dict[Any, list[int]] = defaultdict(list)
        for each in side:
            groups[_contents(each)].append(id(each))
        found.update(number for some in groups.values() if len(some) > 1 for number in some)
    return found


def _contents(each: Sketched) -> Any:
    totals = tuple(np.round(each.sketch.totals, 12).tolist())
    return each.shape, each.sketch.low, each.sketch.high, totals


def _in_order(
    ours: Sequence[Sketched], theirs: Sequence[Sketched], rules: Rules, names: Sequence[str]
) -> Iterator[tuple[Sketched, Sketched]]:
    """Pair tensors of equal values by the rules, or in the order of the files, if all have one."""
    groups: tuple[dict[Any, list[Sketched]], ...] = (defaultdict(list), defaultdict(list))
    for side, group in zip((ours, theirs), groups, strict=True):
        for each in side:
            group[_contents(each)].append(each)
    for key, copies in groups[0].items():
        others = {other.name: other for other in groups[1].get(key, [])}
        if len(copies) != len(others):
            continue
        unexpected = []
        for copy in copies:
            match = rules.expected(copy.name, names)
            if match is None:
                unexpected.append(copy)
            elif match[0] in others:
                yield copy, others.pop(match[0])
        for copy, other in zip(unexpected, others.values(), strict=False):
            if not are_other_roles(copy.name, other.name):
                yield copy, other
