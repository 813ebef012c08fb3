"""Pairs of tensors of two checkpoints, by one list of rules.

A rule pairs tensors that no earlier rule has paired. Content comes first, because a conversion
keeps the numbers, and names can mislead; names decide about rounded tensors, copies and constants,
such as the norms of an untrained model. Pairs whose numbers are equal, but which contradict the
names of most pairs (`Rules.broken`), are misplaced tensors.

`matched` reads the numbers once for ``names="auto"``. `explain` applies `by_content` and then
`by_names` to tensors without a namesake, and verifies their pairs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain, product
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from xckpt.comparison.arrangements import Step, Transposed
from xckpt.comparison.names import (
    Rules,
    are_other_roles,
    conventions,
    first_numbers,
    likeness,
    stem_of,
)
from xckpt.comparison.pairs import Match, Partner, pair_of
from xckpt.comparison.sketches import (
    ALIKE,
    are_rotary,
    arrangements,
    groups_of,
    rope_orders,
    sketched,
    standardised,
)
from xckpt.errors import shown
from xckpt.index import paused_collector
from xckpt.labels.conventions import match_names
from xckpt.labels.filters import select
from xckpt.labels.renaming import Renaming, new_names
from xckpt.progress import Progress
from xckpt.scan.entries import Entry
from xckpt.statistics.tables import TIED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.comparison.classify import Places
    from xckpt.comparison.sketches import Sketched
    from xckpt.labels import TensorFilter
    from xckpt.progress import ProgressOption

Shape = tuple[int, ...]
_Pair = tuple["Sketched", "Sketched"]
_Shapes = dict[Shape, list["Sketched"]]

# The least agreement of sums after quantisation to few bits.
_ALIKE = 0.8
# The least agreement of the sums of tensors that were renamed and then changed.
_NEAR = 0.9
_SAME, _NEARLY = 1 - 1e-9, 1e-9
# The most sums per axis in the screening of all pairs of tensors.
_SCREENED = 512
# The most candidates per tensor that pass the screening.
_CLOSER = 6
# The most pairs of tensors of one shape that are screened together.
_MOST_PAIRS = 1 << 20
_FEWEST = 3


def matched(
    entries: Sequence[Entry],
    entries_of_b: Sequence[Entry],
    names: Renaming | Literal["auto"] | None,
    tensors: TensorFilter | None,
    *,
    progress: ProgressOption,
    ties: Sequence[Mapping[Any, Any]],
    places: Places,
) -> tuple[list[Entry], list[list[Match]], ProgressOption]:
    """Pair the tensors of all variables; `ties` has the owners in each side of tied tensors.

    Returns the variables of the result, the matches of each, and the progress option for the
    comparison, which continues the count of bytes.
    """
    if isinstance(names, str) and names == "auto":
        ours, theirs = (
            {stream.name: stream for entry in side for stream in entry.streams}
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
        new = new_names([stream.name for entry in entries for stream in entry.streams], names)
        partners = {n: Partner(o, "name" if n == o else "names") for n, o in new.items()}
    with paused_collector():
        sides = [
            {stream.name for entry in side for stream in entry.streams}
            for side in (entries, entries_of_b)
        ]
        only_a = [n for n in sides[0] if n not in partners or partners[n].name not in sides[1]]
        partners |= _tied(only_a, sides[1], ties[1])
        only_b = sides[1].difference(partner.name for partner in partners.values())
        owners = _tied(only_b, sides[0], ties[0])
        return *_rows_of(entries, entries_of_b, partners, owners, tensors), progress


def _tied(
    missing: Iterable[str], present: Collection[str], ties: Mapping[Any, Any]
) -> dict[str, Partner]:
    """Pair tensors that a file lacks with those that it states to be the same.

    `safetensors.torch.save_model` writes one of several tied tensors, and the names of the others
    into the metadata: ``{"lm_head.weight": "wte.weight"}``.
    """
    owners = {name: ties.get(name) for name in missing}
    return {
        name: Partner(owner, TIED)
        for name, owner in owners.items()
        if isinstance(owner, str) and owner in present
    }


def _rows_of(
    entries: Sequence[Entry],
    entries_of_b: Sequence[Entry],
    partners: Mapping[str, Partner],
    owners: Mapping[str, Partner],  # in `a`, of tensors that only `b` has
    tensors: TensorFilter | None,
) -> tuple[list[Entry], list[list[Match]]]:
    """Return the variables to compare and their matches; tensors only in `b` come last."""
    theirs: dict[str, ElementStream] = {}
    for stream in (stream for entry in entries_of_b for stream in entry.streams):
        if theirs.setdefault(stream.name, stream) is not stream:
            raise ValueError(f"two tensors of b are called {shown(stream.name)}")
    ours = {stream.name: stream for entry in entries for stream in entry.streams}
    chosen = set(select([*ours, *theirs], tensors))

    def match(stream: ElementStream) -> Match:
        if stream.name not in chosen:
            return Match(stream.name)
        partner = partners.get(stream.name)
        counterpart = theirs.get(partner.name) if partner else None
        if counterpart is None:
            return Match(stream.name, stream)
        return pair(stream.name, stream, counterpart, partner)

    def pair(
        name: str, stream: ElementStream, counterpart: ElementStream, partner: Partner | None
    ) -> Match:
        is_readable = stream.problem is None and counterpart.problem is None
        is_pair = is_readable and stream.array.shape == counterpart.array.shape
        both = pair_of(stream, counterpart, name) if is_pair else None
        return Match(name, stream, counterpart, partner, both)

    paired = {partners[name].name for name in ours if name in partners}
    variables = [
        entry for entry in entries if any(stream.name in chosen for stream in entry.streams)
    ]
    rows = [[match(stream) for stream in entry.streams] for entry in variables]
    variable_names = {entry.name for entry in variables}
    for name, stream in theirs.items():
        if name not in paired and name in chosen:
            variable_name = name
            while variable_name in variable_names:
                variable_name += " (b)"
            variable_names.add(variable_name)
            encoding = {"tensor": name}
            variables.append(Entry(variable_name, (), (), (stream,), encoding))
            owner = owners.get(name)
            alone = Match(name, theirs=stream)
            rows.append([alone if owner is None else pair(name, ours[owner.name], stream, owner)])
    shown_rows = [
        (variable, matches)
        for variable, matches in zip(variables, rows, strict=True)
        if not all(match.is_beyond for match in matches)
    ]
    return [variable for variable, _ in shown_rows], [matches for _, matches in shown_rows]


# --- by names and content ------------------------------------------------------------------------


def _partners(
    ours: Mapping[str, ElementStream],
    theirs: Mapping[str, ElementStream],
    places: Places,
    progress: Progress,
) -> dict[str, Partner]:
    """Pair tensors of two sides, after reading the numbers of tensors without a namesake."""
    pairs = {name: Partner(name, "name") for name in ours if name in theirs}
    free_a, free_b = (
        {name: stream for name, stream in side.items() if name not in pairs}
        for side in (ours, theirs)
    )
    sketches = _sketched((free_a, free_b), places, progress)

    def unmatched() -> list[list[Sketched]]:
        """Return the sketches of unmatched tensors."""
        sketches_of_sides = (map(sketches.get, map(id, s.values())) for s in (free_a, free_b))
        return [list(filter(None, side)) for side in sketches_of_sides]

    def take(partners: Iterable[tuple[str, Partner]]) -> None:
        for name, partner in partners:
            if name in free_a and partner.name in free_b:
                pairs[name] = partner
                del free_a[name], free_b[partner.name]

    shapes: dict[str, object] = {r.name: r.array.shape for r in free_b.values()}
    usual = conventions(free_a, free_b)

    def unbroken(partners: dict[str, Partner]) -> Iterator[tuple[str, Partner]]:
        """Yield the pairs that the names of most pairs do not contradict."""
        renamed = [*_renamed(pairs), *((name, partner.name) for name, partner in partners.items())]
        broken = Rules(renamed).broken(free_a, free_b, shapes, usual)
        for name, partner in partners.items():
            if name not in broken or places.agree(name, partner.name):
                yield name, partner

    take(unbroken(_same_values(unmatched())))
    take(
        (name, Partner(name_of_b, rule))
        for name, name_of_b, rule in match_names(free_a, free_b)
        if rule == "prefix" or not _is_part(ours[name], theirs[name_of_b])
    )
    take(
        unbroken(
            {
                c.a.name: Partner(c.b.name, "alike")
                for c in by_content(*unmatched())
                if c.score >= _ALIKE and not c.is_exact and not c.is_contested
            }
        )
    )
    unnamed, unnamed_of_b = unmatched()
    remaining = _beside_pairs(by_names(unnamed, unnamed_of_b, _renamed(pairs)), pairs, ours, theirs)
    take(unbroken({a.name: Partner(b.name, rule) for a, b, rule in remaining}))
    return pairs


def _beside_pairs(
    remaining: Collection[tuple[Sketched, Sketched, str]],
    pairs: Mapping[str, Partner],
    *sides: Iterable[str],
) -> Iterator[tuple[Sketched, Sketched, str]]:
    """Yield pairs, without constants in modules whose further tensors are not paired.

    Biases of zeros are equal in all modules, and belong together if their weights do.
    """
    constants = {t.name for a, b, _ in remaining for t in (a, b) if a.is_constant}
    modules = {(stem_of(name), stem_of(partner.name)) for name, partner in pairs.items()}
    modules |= {(stem_of(a.name), stem_of(b.name)) for a, b, _ in remaining if not a.is_constant}
    varied = [{stem_of(name) for name in side if name not in constants} for side in sides]
    for a, b, rule in remaining:
        stems = stem_of(a.name), stem_of(b.name)
        is_alone = stems[0] not in varied[0] and stems[1] not in varied[1]
        if not a.is_constant or is_alone or stems in modules or rule in {"siblings", "place"}:
            yield a, b, rule


def _sketched(
    sides: Sequence[Mapping[str, ElementStream]], places: Places, progress: Progress
) -> dict[int, Sketched]:
    """Sketch the tensors whose number of elements occurs on both sides, by the ids of streams."""
    readable = [[r for r in side.values() if r.problem is None] for side in sides]
    sizes = set.intersection(*({stream.size for stream in side} for side in readable))
    streams = {id(stream): stream for side in readable for stream in side if stream.size in sizes}
    sketches = sketched(streams, progress)
    for number, side in enumerate(readable):
        for stream in side:
            if id(stream) in sketches:
                places.note(number, sketches[id(stream)])
    return sketches


def _is_part(ours: ElementStream, theirs: ElementStream) -> bool:
    """Return whether one tensor may be a part of the other, from their sizes."""
    small, large = sorted([ours.size, theirs.size])
    return large >= 2 * small and small != large and ours.problem is theirs.problem is None


def _renamed(pairs: Mapping[str, Partner]) -> list[tuple[str, str]]:
    """Return the names of matching tensors that differ."""
    return [(name, partner.name) for name, partner in pairs.items() if partner.name != name]


def _same_values(sides: Sequence[Sequence[Sketched]]) -> dict[str, Partner]:
    """Pair tensors with the same numbers, if each side has them once, by their names in `a`."""
    groups = chain.from_iterable(groups_of(sides, attrgetter("content")))
    copies = {id(tensor) for group in groups if len(group) > 1 for tensor in group}
    pairs = {}
    for candidate in by_content(*sides):
        if candidate.is_exact and not {id(candidate.a), id(candidate.b)} & copies:
            rule, steps = _rule_of(candidate), candidate.steps
            is_known = rule == "transposed" and all(isinstance(s, Transposed) for s in steps)
            pairs[candidate.a.name] = Partner(candidate.b.name, rule, steps if is_known else ())
    return pairs | _same_elements(sides, {*pairs, *(partner.name for partner in pairs.values())})


def _rule_of(candidate: Candidate) -> str:
    """Return the name of the rule that pairs two tensors with the same numbers."""
    causes = [step.cause for step in candidate.steps]
    if candidate.score < _SAME:
        is_rows = candidate.b.shape in {candidate.a.shape, candidate.a.shape[::-1]}
        return "rows" if is_rows else "elements"
    if "rope_permuted" in causes:
        return "rows"
    return "transposed" if "transposed" in causes else "elements" if causes else "values"


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


# --- by content ----------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """Two tensors that may have the same numbers."""

    a: Sketched
    b: Sketched
    #: Whether all totals are equal, which excludes rounding.
    is_exact: bool
    #: The agreement of their sums after steps.
    score: float
    steps: tuple[Step, ...]
    #: Whether a copy of one of them may be in the place of a tensor that has no partner.
    is_contested: bool = False


def by_content(
    ours: Sequence[Sketched], theirs: Sequence[Sketched], *, are_resized: bool = False
) -> list[Candidate]:
    """Pair tensors of two sides by their numbers, regardless of names; no tensor has two partners.

    With `are_resized`, one tensor of each pair has the numbers of the other one and more.
    """
    return _paired(_candidates(ours, theirs, is_extended=are_resized), (ours, theirs))


def _paired(candidates: list[Candidate], sides: Sequence[Sequence[Sketched]]) -> list[Candidate]:
    """Choose the best candidates; places and names decide between tensors with equal numbers."""

    def rank(candidate: Candidate) -> tuple[bool, float, bool, int, int]:
        names, place = (candidate.a.name, candidate.b.name), candidate.a.place
        is_placed = place is not None and place == candidate.b.place
        score = round(candidate.score, 2)
        return candidate.is_exact, score, is_placed, likeness(*names), first_numbers(*names)

    used: set[int] = set()
    chosen = []
    for candidate in sorted(candidates, key=rank, reverse=True):
        if id(candidate.a) not in used and id(candidate.b) not in used:
            used |= {id(candidate.a), id(candidate.b)}
            chosen.append(candidate)
    copies = [Counter(tensor.content for tensor in side) for side in sides]
    lonely = [{_extents(t.shape) for t in side if id(t) not in used} for side in sides]

    def is_contested(a: Sketched, b: Sketched) -> bool:
        ours, theirs = copies[0][a.content], copies[1][b.content]
        return (
            ours != theirs and _extents((a if ours < theirs else b).shape) in lonely[ours > theirs]
        )

    return [c._replace(is_contested=is_contested(c.a, c.b)) for c in chosen]


def _candidates(
    ours: Sequence[Sketched], theirs: Sequence[Sketched], *, is_extended: bool
) -> list[Candidate]:
    sides = [[t for t in s if not t.is_constant and t.size >= _FEWEST] for s in (ours, theirs)]
    candidates: list[Candidate] = []
    if not is_extended:
        # Screening compares all pairs of tensors: leave out those with a single equal tensor.
        groups = groups_of(sides, attrgetter("content"))
        twins = [(a[0], b[0]) for a, b in groups if len(a) == len(b) == 1]
        candidates += [
            Candidate(a, b, is_exact=True, score=1.0, steps=())
            for a, b in twins
            if a.has_sums_of(b)
        ]
        candidates += _likely((a, b) for a, b in twins if not a.has_sums_of(b))
        paired = {id(tensor) for candidate in candidates for tensor in candidate[:2]}
        sides = [[tensor for tensor in side if id(tensor) not in paired] for side in sides]
    by_shape: tuple[_Shapes, _Shapes] = (defaultdict(list), defaultdict(list))
    for side, tensors_of_shape in zip(sides, by_shape, strict=True):
        for tensor in side:
            tensors_of_shape[tensor.shape].append(tensor)
    shapes_of_b: dict[Shape, list[Shape]] = defaultdict(list)
    for shape in by_shape[1]:
        shapes_of_b[(len(shape),) if is_extended else _extents(shape)].append(shape)
    for shape, tensors in by_shape[0].items():
        for shape_of_b in shapes_of_b[(len(shape),) if is_extended else _extents(shape)]:
            extents = [sorted(s) if is_extended else _extents(s) for s in (shape, shape_of_b)]
            sizes = list(zip(*extents, strict=True))
            # One shape fits into the other one, in some order of the axes.
            fits = all(n <= m for n, m in sizes) or all(n >= m for n, m in sizes)
            is_permuted = all(n == m for n, m in sizes)
            if fits and is_permuted != is_extended:
                theirs_of_shape = by_shape[1][shape_of_b]
                candidates += _likely(_screened(tensors, theirs_of_shape, is_extended=is_extended))
    return candidates


def _extents(shape: Shape) -> Shape:
    """Return the extents of a shape in order, without axes of one position."""
    return tuple(sorted([extent for extent in shape if extent > 1]))


def _likely(pairs: Iterable[tuple[Sketched, Sketched]]) -> Iterator[Candidate]:
    """Yield the pairs of tensors whose sums agree in some arrangement."""
    for a, b in pairs:
        best = next(iter(arrangements(a, b)), None)
        if best is not None and best.score >= ALIKE:
            yield Candidate(a, b, a.is_like(b), *best)


def _screened(
    ours: list[Sketched], theirs: list[Sketched], *, is_extended: bool
) -> Iterator[tuple[Sketched, Sketched]]:
    """Yield pairs whose sums along some axis agree in order."""
    first, second = ours[0].shape, theirs[0].shape
    if len(ours) * len(theirs) > _MOST_PAIRS and not is_extended:
        yield from _nearest(ours, theirs)
        return
    scores = np.full((len(ours), len(theirs)), -1.0)
    for n, m in product(range(len(first)), range(len(second))):
        sizes = first[n], second[m]
        if (sizes[0] != sizes[1] and not is_extended) or min(sizes) < _FEWEST:
            continue
        length = min(*sizes, _SCREENED)
        x, y = (standardised([t.along[k] for t in side], length)
                for side, k in ((ours, n), (theirs, m)))  # fmt: skip
        np.maximum(scores, x @ y.T, out=scores)
        if len(first) == 1 and are_rotary(*(t.is_rotary or None for t in (*ours, *theirs))):
            x = standardised([t.along[0] for t in ours], min(sizes))
            y = standardised([t.along[0] for t in theirs], min(sizes))
            for order in rope_orders(min(sizes)).values():
                np.maximum(scores, x[:, order] @ y.T, out=scores)
    # Keep several candidates, because equal tensors are indistinguishable here.
    closest = np.argsort(-scores, axis=1, kind="stable")[:, :_CLOSER].tolist()
    for a, row, columns in zip(ours, scores, closest, strict=True):
        yield from ((a, theirs[column]) for column in columns if row[column] >= ALIKE)
    for b, row, column in zip(theirs, scores.argmax(axis=0).tolist(), scores.T, strict=True):
        if column[row] >= ALIKE:
            yield ours[row], b


def _nearest(ours: list[Sketched], theirs: list[Sketched]) -> Iterator[tuple[Sketched, Sketched]]:
    """Yield pairs with similar sums of squares, which rounding and permutations hardly change."""
    ordered = sorted(theirs, key=lambda tensor: float(tensor.sketch.totals[1]))
    squares = np.array([tensor.sketch.totals[1] for tensor in ordered])
    for a in ours:
        place = int(np.searchsorted(squares, a.sketch.totals[1]))
        for b in ordered[max(0, place - _CLOSER) : place + _CLOSER]:
            yield a, b


# --- by names ------------------------------------------------------------------------------------


def by_names(
    ours: Iterable[Sketched],
    theirs: Iterable[Sketched],
    renamed: Iterable[tuple[str, str]],
) -> list[tuple[Sketched, Sketched, str]]:
    """Pair tensors that belong together though their numbers may differ; name the rules.

    `renamed` has the names of pairs that follow the rules of a conversion.
    """
    rules = Rules(renamed)
    free = dict.fromkeys(ours), dict.fromkeys(theirs)
    pairs: list[tuple[Sketched, Sketched, str]] = []

    def take(name: str, rule: Callable[[list[Sketched], list[Sketched]], Iterable[_Pair]]) -> None:
        for a, b in rule(*map(list, free)):
            if a in free[0] and b in free[1]:
                pairs.append((a, b, "values" if a.content == b.content else name))
                del free[0][a], free[1][b]

    take("siblings", lambda a, b: _siblings(a, b, rules))
    take("place", _placed)
    take("values", _equal_sets)
    take("alike", _nearly_equal)
    take("names", _resembling)
    return pairs


def _siblings(
    ours: Iterable[Sketched], theirs: Iterable[Sketched], rules: Rules
) -> Iterator[_Pair]:
    """Pair tensors by the names that other pairs lead to expect."""
    by_name = {tensor.name: tensor for tensor in theirs}
    for a in ours:
        match = rules.expected(a.name, by_name) or rules.analogous(a.name, by_name)
        if match is not None:
            yield a, by_name.pop(match[0])


def _placed(ours: Iterable[Sketched], theirs: Iterable[Sketched]) -> Iterator[_Pair]:
    """Pair tensors of one shape that both structures describe as one place of a model."""
    by_place = {tensor.place: tensor for tensor in theirs}
    for place, a in {tensor.place: tensor for tensor in ours}.items():
        if place is not None and place in by_place and by_place[place].shape == a.shape:
            yield a, by_place[place]


def _equal_sets(ours: Iterable[Sketched], theirs: Iterable[Sketched]) -> Iterator[_Pair]:
    """Pair constants and copies in the order of the files, if both sides have as many."""
    for copies, copies_of_b in groups_of((ours, theirs), attrgetter("content")):
        if len(copies) == len(copies_of_b):
            for a, b in zip(copies, copies_of_b, strict=True):
                if not are_other_roles(a.name, b.name):
                    yield a, b


def _nearly_equal(ours: Sequence[Sketched], theirs: Sequence[Sketched]) -> Iterator[_Pair]:
    """Pair tensors with nearly the same sums, unless a side has several of them."""
    counts = [Counter(tensor.content for tensor in side) for side in (ours, theirs)]
    for a, b, _, score, *_ in by_content(ours, theirs):
        if score >= _NEAR and counts[0][a.content] == counts[1][b.content] == 1:
            yield a, b


def _resembling(ours: Iterable[Sketched], theirs: Iterable[Sketched]) -> Iterator[_Pair]:
    """Pair constants whose names resemble each other more than any other names."""
    constants = ([tensor for tensor in side if tensor.is_constant] for side in (ours, theirs))
    for tensors, tensors_of_b in groups_of(constants, lambda tensor: tensor.shape):
        table = np.array([[likeness(a.name, b.name) for b in tensors_of_b] for a in tensors])
        for n, m in np.argwhere(table > 0).tolist():
            alternatives = np.concatenate([np.delete(table[n], m), np.delete(table[:, m], n)])
            if table[n, m] > alternatives.max(initial=0):
                yield tensors[n], tensors_of_b[m]
