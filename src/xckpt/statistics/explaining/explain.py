"""Find why tensors differ: cheap tests first, and nothing is said for sure before all is read."""

from __future__ import annotations

import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.progress import Progress
from xckpt.statistics.explaining.fingerprints import Transform
from xckpt.statistics.explaining.low_rank import low_ranks
from xckpt.statistics.explaining.relations import (
    INEXACT,
    LIKELY,
    Evidence,
    Relation,
    correlation,
    levels,
    likely,
    sample,
)
from xckpt.statistics.explaining.search import Search
from xckpt.statistics.explaining.wording import Case, Explanation, changed, quoted, related
from xckpt.statistics.pairs import pair_of
from xckpt.statistics.scan import gather
from xckpt.storage.limits import cpu_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.progress import ProgressOption
    from xckpt.statistics.pairs import ChunkedPair, PairReader
    from xckpt.statistics.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]

# From here on two tensors have their elements in the same places.
_ALIGNED = 0.5
_ALIKE = 0.9
# Of what is compared to find out which tensors are alike: elements, and tensors of one shape.
_HEAD = 1024
_MOST_ALIKE = 2048
# Statuses of what only `a`, and what only `b` has.
_ALONE = ("only_a", "only_b")
# Of a shape: tied weights are few.
_MOST_OWNERS = 8


def explain(cases: Sequence[Case], progress: ProgressOption) -> list[Explanation | None]:
    """Explain each of the differences; None for those that were not compared."""
    found: list[Explanation | None] = []
    for case in cases:
        same = Explanation(("equal",), f"all {case.measures['count']:,.0f} elements are equal")
        found.append(same if case.status == "same" else None)
    with Progress(progress, "explanation") as bar:
        left = [n for n, case in enumerate(cases) if case.status not in {"same", ""}]
        pairs = {n: pair for n in left if (pair := cases[n].match.pair) is not None}
        told, alike = _aligned(pairs, bar)
        facts = {n: one for n, one in told.items() if one.verified}
        # Where rows moved, as many may have stayed: heads that changed places.
        turned = [n for n in left if n not in facts and alike.get(n, 0.0) < _ALIKE]
        search = Search({n: (cases[n].match.ours, cases[n].match.theirs) for n in turned}, bar)
        facts |= search.run()
        # What is left over on both sides, and alike.
        renamed = _alike(cases, [n for n in turned if n not in facts])
        new, _ = _aligned({n: pair for n, (_, pair, _) in renamed.items()}, bar)
        aligned = [n for n in pairs if n not in facts and n not in told]
        ranked = {n: n for n in aligned if alike[n] >= _ALIGNED}
        ranked |= {n: other for n, (other, _, _) in renamed.items() if n not in new}
        sides = {
            n: (a, b)
            for n, other in ranked.items()
            if (a := cases[n].match.ours) is not None
            and (b := cases[other].match.theirs) is not None
        }
        for n, low in low_ranks(sides, bar).items():
            (new if n in renamed else facts)[n] = low
        for n, (other, _, alike_by) in renamed.items():
            related = new.get(n)
            if alike_by >= _ALIKE or (related is not None and related.verified):
                facts |= _renamed(cases, n, other, related)
        alone = [n for n in left if cases[n].status in _ALONE and n not in facts and n not in told]
        told |= _tied(cases, alone, bar)
    for n in left:
        case = cases[n]
        one: Explanation | None = facts.get(n) or told.get(n)
        if one is None and case.status in _ALONE:
            one = Explanation((case.status,), "nothing on the other side has its name or numbers")
        found[n] = one or changed(case.measures, case.match.shapes)
    return [one and _with_names(case, one) for case, one in zip(cases, found, strict=True)]


def _with_names(case: Case, one: Explanation) -> Explanation:
    """Say the other name of a tensor that was compared under it."""
    if not case.other_name or one.other_names:
        return one
    causes = ("renamed",) if one.causes == ("equal",) else ("renamed", *one.causes)
    text = f"{quoted([case.other_name])} of b; {one.text}"
    return replace(one, causes=causes, text=text, other_names=(case.other_name,))


def _aligned(
    pairs: Mapping[int, PairReader | ChunkedPair], bar: Progress
) -> tuple[dict[int, Explanation], dict[int, float]]:
    """Say what holds element by element; and how much the elements in one place are alike."""
    numbers = [n for n, p in pairs.items() if p.size and not INEXACT & set(p.kinds)]
    with ThreadPoolExecutor(cpu_count(), "xckpt-explain") as threads:
        looks = dict(zip(numbers, threads.map(_look, [pairs[n] for n in numbers]), strict=True))
    tested = {n: pairs[n] for n in numbers if looks[n][0]}
    found = {}
    for n, one in _evidence(tested, [looks[n][0] for n in tested], bar):
        held = one.held.tolist()
        best = max(range(len(held)), key=lambda at: (held[at], -at))
        if held[best] >= LIKELY * one.count:
            relation = one.relations[best]
            found[n] = related(relation, one.count, held[best], one.zeros)
    return found, {n: looks[n][1] for n in numbers} | {n: 1.0 for n in pairs if n not in looks}


def _evidence(
    pairs: Mapping[int, PairReader | ChunkedPair],
    relations: Sequence[tuple[Relation, ...]],
    bar: Progress,
) -> Iterator[tuple[int, Evidence]]:
    """Count for how many elements of each pair its relations hold."""
    found = gather(list(pairs.values()), Evidence, lambda _, one: one, bar, arguments=relations)
    return zip(pairs, found, strict=True)


def _look(pair: PairReader | ChunkedPair) -> tuple[tuple[Relation, ...], float]:
    """Return what may hold, from a few elements, and their correlation."""
    x, y = sample(pair)
    relations = likely(x, y, pair.kinds)
    alike = correlation(x, y)
    if math.isnan(alike):
        alike = 1.0 if relations else 0.0
    if not relations and alike >= _ALIKE:
        found = levels(x, y, pair.kinds)
        relations = (found,) if found else ()
    return relations, alike


def _alike(
    cases: Sequence[Case], left: Sequence[int]
) -> dict[int, tuple[int, PairReader | ChunkedPair, float]]:
    """Find tensors of one shape that only one side has, whose first elements are alike."""
    groups: dict[tuple[int, ...], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for n in left:
        reader = cases[n].alone
        if reader is not None and reader.size > 1:
            groups[reader.array.shape][cases[n].status == "only_b"].append(n)
    found = {}
    for ours, theirs in groups.values():
        if not ours or not theirs or len(ours) + len(theirs) > _MOST_ALIKE:
            continue
        first = _heads([cases[n].match.ours for n in ours])
        second = _heads([cases[n].match.theirs for n in theirs])
        table = first @ second.T
        for at, n in enumerate(ours):
            to = int(np.argmax(table[at]))
            a, b = cases[n].match.ours, cases[theirs[to]].match.theirs
            is_best = table[at, to] >= _ALIGNED and int(np.argmax(table[:, to])) == at
            if is_best and a is not None and b is not None:
                found[n] = theirs[to], pair_of(a, b, a.name), float(table[at, to])
    return found


def _tied(cases: Sequence[Case], alone: Sequence[int], bar: Progress) -> dict[int, Explanation]:
    """Say what is equal to a tensor of its own side that has a partner, as tied weights are."""
    owners: dict[tuple[str, tuple[int, ...]], list[Reader]] = defaultdict(list)
    for n in set(range(len(cases))).difference(alone):
        match = cases[n].match
        for status, reader in zip(_ALONE, (match.ours, match.theirs), strict=True):
            if reader is not None and reader.size > 1:
                owners[status, reader.array.shape].append(reader)
    pairs, names = {}, {}
    for n in alone:
        reader = cases[n].alone
        if reader is None:
            continue
        some = owners.get((cases[n].status, reader.array.shape), ())
        for owner in some if len(some) <= _MOST_OWNERS else ():
            pair = pair_of(owner, reader)
            x, y = sample(pair)
            if np.array_equal(x, y) and x.min() < x.max():
                pairs[n], names[n] = pair, quoted([owner.name])
                break
    equal = (Relation(Transform()),)
    told = {}
    for n, one in _evidence(pairs, [equal] * len(pairs), bar):
        if one.held[0] == one.count:
            status = cases[n].status
            text = f"its numbers are those of {names[n]} of {status[-1]}"
            told[n] = Explanation((status,), text)
    return told


def _heads(readers: Sequence[Reader | None]) -> Array:
    """Return the first elements of tensors, standardised."""
    rows = []
    for reader in readers:
        if reader is None:
            continue
        x, _ = sample(pair_of(reader, reader))
        head = np.nan_to_num(x[:_HEAD].astype(np.float64), posinf=0.0, neginf=0.0)
        head -= head.mean()
        norm = np.linalg.norm(head)
        rows.append(head / norm if norm else head)
    return np.array(rows)


def _renamed(
    cases: Sequence[Case],
    n: int,
    other: int,
    one: Explanation | None,
) -> dict[int, Explanation]:
    """Say of two tensors of different names what relates them."""
    names = cases[n].match.name, cases[other].match.name
    if one is None:
        one = Explanation(("changed",), "the first elements are alike", verified=False)
    told = {}
    for number, name, side in ((n, names[1], "b"), (other, names[0], "a")):
        text = f"{quoted([name])} of {side}"
        told[number] = replace(one.after(("renamed",), text), other_names=(name,))
    return told
