"""Pairs of tensors of two checkpoints: by name, by content, or by naming conventions.

Where names differ, content comes first: a conversion that renames, transposes or permutes keeps the
numbers, and names can mislead. Rounded tensors and constants, such as the norms of an untrained
model, are paired by the naming conventions of known projects.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xckpt.comparison.arrangements import Transposed
from xckpt.comparison.explaining.names import Rules, are_other_roles, conventions
from xckpt.comparison.explaining.search import partners
from xckpt.comparison.explaining.sketches import groups_of, sketched
from xckpt.comparison.pairs import Match, Partner, pair_of
from xckpt.errors import shown
from xckpt.index import paused_collector
from xckpt.labels.conventions import match_names
from xckpt.labels.filters import select
from xckpt.labels.renaming import new_names
from xckpt.progress import Progress
from xckpt.scan.entries import Described
from xckpt.statistics.tables import TIED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.classify import Places
    from xckpt.comparison.explaining.search import Candidate
    from xckpt.comparison.explaining.sketches import Sketched
    from xckpt.labels import TensorFilter
    from xckpt.labels.renaming import Renaming
    from xckpt.progress import ProgressOption


def matched(
    entries: Sequence[Described],
    entries_of_b: Sequence[Described],
    names: Renaming | Literal["auto"] | None,
    tensors: TensorFilter | None,
    *,
    progress: ProgressOption,
    attrs: Sequence[Mapping[Any, Any]],
    places: Places,
) -> tuple[list[Described], list[list[Match]], ProgressOption]:
    """Pair the tensors of all variables; `attrs` of both sides may name tied tensors.

    Returns the variables of the result, the matches of each, and the progress option for the
    comparison, which continues the count of bytes.
    """
    if isinstance(names, str) and names == "auto":
        ours, theirs = (
            {reader.name: reader for entry in side for reader in entry.readers}
            for side in (entries, entries_of_b)
        )
        chosen = set(select(ours, tensors))
        candidates = {n: r for n, r in theirs.items() if n not in ours or n in chosen}
        with Progress(progress, "matching") as bar:
            partners = _partners({n: ours[n] for n in ours if n in chosen}, candidates, places, bar)
        if callable(progress):
            call = progress  # continue after the bytes that matching has read
            progress = lambda done, total: call(bar.done + done, bar.done + total)  # noqa: E731
    else:
        new = new_names([reader.name for entry in entries for reader in entry.readers], names)
        partners = {n: Partner(o, "name" if n == o else "names") for n, o in new.items()}
    with paused_collector():
        sides = [
            {reader.name for entry in side for reader in entry.readers}
            for side in (entries, entries_of_b)
        ]
        only_a = [n for n in sides[0] if n not in partners or partners[n].name not in sides[1]]
        partners |= _tied(only_a, sides[1], attrs[1])
        only_b = sides[1].difference(partner.name for partner in partners.values())
        owners = _tied(only_b, sides[0], attrs[0])
        return *_rows_of(entries, entries_of_b, partners, owners, tensors), progress


def _tied(
    missing: Iterable[str], present: Collection[str], attrs: Mapping[Any, Any]
) -> dict[str, Partner]:
    """Pair tensors that a file lacks with those that it states to be the same.

    `safetensors.torch.save_model` writes one of several tied tensors, and the names of the others
    into the metadata: ``{"lm_head.weight": "wte.weight"}``.
    """
    owners = {name: attrs.get(name) for name in missing}
    return {
        name: Partner(owner, TIED)
        for name, owner in owners.items()
        if isinstance(owner, str) and owner in present
    }


def _rows_of(
    entries: Sequence[Described],
    entries_of_b: Sequence[Described],
    partners: Mapping[str, Partner],
    owners: Mapping[str, Partner],  # in `a`, of tensors that only `b` has
    tensors: TensorFilter | None,
) -> tuple[list[Described], list[list[Match]]]:
    """Return the variables to compare and their matches; tensors only in `b` come last."""
    theirs: dict[str, ElementStream] = {}
    for reader in (reader for entry in entries_of_b for reader in entry.readers):
        if theirs.setdefault(reader.name, reader) is not reader:
            raise ValueError(f"two tensors of b are called {shown(reader.name)}")
    ours = {reader.name: reader for entry in entries for reader in entry.readers}
    chosen = set(select([*ours, *theirs], tensors))

    def match(reader: ElementStream) -> Match:
        if reader.name not in chosen:
            return Match(reader.name)
        partner = partners.get(reader.name)
        counterpart = theirs.get(partner.name) if partner else None
        if counterpart is None:
            return Match(reader.name, reader)
        return pair(reader.name, reader, counterpart, partner)

    def pair(
        name: str, reader: ElementStream, counterpart: ElementStream, partner: Partner | None
    ) -> Match:
        is_readable = reader.problem is None and counterpart.problem is None
        is_pair = is_readable and reader.array.shape == counterpart.array.shape
        both = pair_of(reader, counterpart, name) if is_pair else None
        return Match(name, reader, counterpart, partner, both)

    paired = {partners[name].name for name in ours if name in partners}
    variables = [
        entry for entry in entries if any(reader.name in chosen for reader in entry.readers)
    ]
    rows = [[match(reader) for reader in entry.readers] for entry in variables]
    variable_names = {entry.name for entry in variables}
    for name, reader in theirs.items():
        if name not in paired and name in chosen:
            variable_name = name
            while variable_name in variable_names:
                variable_name += " (b)"
            variable_names.add(variable_name)
            encoding = {"tensor": name}
            variables.append(Described(variable_name, (), (), (reader,), encoding))
            owner = owners.get(name)
            alone = Match(name, theirs=reader)
            rows.append([alone if owner is None else pair(name, ours[owner.name], reader, owner)])
    shown_rows = [
        (variable, matches)
        for variable, matches in zip(variables, rows, strict=True)
        if not all(match.is_beyond for match in matches)
    ]
    return [variable for variable, _ in shown_rows], [matches for _, matches in shown_rows]


# --- by names and content ------------------------------------------------------------------------


def _partners(  # noqa: C901  the rules in their order
    ours: Mapping[str, ElementStream],
    theirs: Mapping[str, ElementStream],
    places: Places,
    progress: Progress,
) -> dict[str, Partner]:
    """Pair tensors of two sides, after reading the numbers of tensors without a namesake."""
    pairs = {name: Partner(name, "name") for name in ours if name in theirs}
    free_a, free_b = (
        {name: reader for name, reader in side.items() if name not in pairs}
        for side in (ours, theirs)
    )
    usual = conventions(free_a, free_b)

    def take(name: str, name_of_b: str, rule: str, steps: tuple[Step, ...] = ()) -> None:
        if name in free_a and name_of_b in free_b:
            pairs[name] = Partner(name_of_b, rule, steps)
            del free_a[name], free_b[name_of_b]

    # Read only tensors whose number of elements occurs on both sides.
    sides = [[r for r in side.values() if r.problem is None] for side in (free_a, free_b)]
    sizes = set.intersection(*({reader.size for reader in side} for side in sides))
    readers = {id(reader): reader for side in sides for reader in side if reader.size in sizes}
    sketches = sketched(readers, progress)
    for number, side in enumerate(sides):
        for reader in side:
            if id(reader) in sketches:
                sketches[id(reader)].is_rotary = places.is_rotary(number, reader.name)

    def unmatched() -> list[list[Sketched]]:
        """Return the sketches of unmatched tensors."""
        sketches_of_sides = (map(sketches.get, map(id, s.values())) for s in (free_a, free_b))
        return [list(filter(None, side)) for side in sketches_of_sides]

    exact = _same_values(unmatched())
    shapes: dict[str, object] = {r.name: r.array.shape for r in free_b.values()}
    rules = Rules((name, partner.name) for name, partner in exact.items())
    broken = rules.broken(free_a, free_b, shapes, usual)
    for name, partner in exact.items():
        if name not in broken or places.agree(name, partner.name):
            take(name, *partner)
    for name, name_of_b, rule in match_names(free_a, free_b):
        # Reject a pair of a joined tensor and one of its parts.
        both = ours[name], theirs[name_of_b]
        small, large = sorted([reader.size for reader in both])
        is_unknown = any(reader.problem is not None for reader in both)
        if rule == "prefix" or large < 2 * small or small == large or is_unknown:
            take(name, name_of_b, rule)
    # Constants and copies, whose values alone are ambiguous.
    for a, b in _in_order(unmatched(), Rules(_renamed(pairs)), frozenset(free_b)):
        take(a.name, b.name, "values")
    for name, name_of_b in _nearly_equal(unmatched(), _renamed(pairs), shapes, usual):
        take(name, name_of_b, "alike")
    return pairs


# The least agreement of sums after quantisation to few bits.
_ALIKE = 0.8


def _nearly_equal(
    sides: Sequence[Sequence[Sketched]],
    renamed: Sequence[tuple[str, str]],
    shapes: dict[str, object],
    usual: Mapping[str, str],
) -> list[tuple[str, str]]:
    """Pair rounded and quantised tensors, whose sums are nearly the same."""
    likely = [
        (candidate.a.name, candidate.b.name)
        for candidate in partners(*sides, extended=False)
        if candidate.arrangement.score >= _ALIKE and not candidate.is_exact
    ]
    names = [{tensor.name for tensor in side} for side in sides]
    broken = Rules([*renamed, *likely]).broken(names[0], names[1], shapes, usual)
    return [pair for pair in likely if pair[0] not in broken]


def _renamed(pairs: Mapping[str, Partner]) -> list[tuple[str, str]]:
    """Return the names of matching tensors that differ."""
    return [(name, partner.name) for name, partner in pairs.items() if partner.name != name]


def _same_values(sides: Sequence[Sequence[Sketched]]) -> dict[str, Partner]:
    """Pair tensors with the same numbers, if each side has them once, by their names in `a`."""
    groups = chain.from_iterable(groups_of(sides, attrgetter("content")))
    copies = {id(tensor) for group in groups if len(group) > 1 for tensor in group}
    pairs = {}
    for candidate in partners(*sides, extended=False):
        if candidate.is_exact and not {id(candidate.a), id(candidate.b)} & copies:
            rule, steps = _rule_of(candidate), candidate.arrangement.steps
            is_known = rule == "transposed" and all(isinstance(s, Transposed) for s in steps)
            pairs[candidate.a.name] = Partner(candidate.b.name, rule, steps if is_known else ())
    return pairs | _same_elements(sides, {*pairs, *(partner.name for partner in pairs.values())})


def _rule_of(candidate: Candidate) -> str:
    """Return the name of the rule that pairs two tensors with the same numbers."""
    causes = [step.cause for step in candidate.arrangement.steps]
    if candidate.arrangement.score < _SAME:
        is_rows = candidate.b.shape in {candidate.a.shape, candidate.a.shape[::-1]}
        return "rows" if is_rows else "elements"
    return "rows" if "rope_permuted" in causes else "transposed" if causes else "values"


_SAME = 1 - 1e-9


def _same_elements(sides: Sequence[Sequence[Sketched]], paired: set[str]) -> dict[str, Partner]:
    """Pair tensors with the same numbers in any order, if no other tensor has them."""
    unpaired = ([t for t in side if not t.is_constant and t.name not in paired] for side in sides)
    groups = groups_of(unpaired, lambda t: (t.size, t.sketch.low, t.sketch.high))
    return {
        a[0].name: Partner(b[0].name, _rule_of_elements(a[0], b[0]))
        for a, b in groups
        if len(a) == len(b) == 1 and a[0].is_like(b[0])
    }


def _rule_of_elements(a: Sketched, b: Sketched) -> str:
    """Return the name of the rule for equal numbers in another order: rows or elements."""
    for x in (a.rows, a.columns):
        for y in (b.rows, b.columns):
            if x is not None and y is not None and len(x) == len(y) > 1 and len(a.shape) > 1:
                scale = float(np.abs(x).max()) or 1.0
                if np.abs(np.sort(x) - np.sort(y)).max() <= _NEARLY * scale:
                    return "rows"
    return "elements"


_NEARLY = 1e-9


def _in_order(
    sides: Sequence[Sequence[Sketched]], rules: Rules, names: Collection[str]
) -> Iterator[tuple[Sketched, Sketched]]:
    """Pair equal tensors by rules of names, else in file order, if their counts are equal."""
    for copies, equals in groups_of(sides, attrgetter("content")):
        if len(copies) != len(equals):
            continue
        copies_of_b = {copy.name: copy for copy in equals}
        unexpected = []
        for copy in copies:
            match = rules.expected(copy.name, names)
            if match is None:
                unexpected.append(copy)
            elif match[0] in copies_of_b:
                yield copy, copies_of_b.pop(match[0])
        for copy, copy_of_b in zip(unexpected, copies_of_b.values(), strict=False):
            if not are_other_roles(copy.name, copy_of_b.name):
                yield copy, copy_of_b
