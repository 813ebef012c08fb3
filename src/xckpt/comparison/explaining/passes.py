"""Passes that explain why tensors differ. Read `explain` first, which is at the end.

Merges of adapters come before all `PASSES`, and `DOUBTS` raised by similar tensors after them. A
pass is a function that returns explanations of tensors that are still unexplained. Cheap passes
come first. A relation is reported as a fact only after it was verified on every element. `outcome`
decides the outcome of each explanation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.lazy import dense_values
from xckpt.comparison.arrangements import Padded, Truncated, arranged, part_of
from xckpt.comparison.explaining.conversions import converted, folded, partly_converted
from xckpt.comparison.explaining.joining import joined
from xckpt.comparison.explaining.low_rank import NEAR, low_ranks, zero_rows
from xckpt.comparison.explaining.naming_votes import fitting_worse
from xckpt.comparison.explaining.outcome import (
    ALONE,
    SIDES,
    Explanation,
    both,
    changed,
    quoted,
    related,
    unlike,
    unreadable,
)
from xckpt.comparison.explaining.siblings import (
    claimed_twice,
    turned_alone,
    unlike_few_siblings,
    unlike_module,
    unlike_norms,
    unlike_siblings,
)
from xckpt.comparison.explaining.work import Explanations, Work, tensors_by_content
from xckpt.comparison.layouts import tiled
from xckpt.comparison.match import Candidate, by_content, by_names
from xckpt.comparison.measure import Comparison
from xckpt.comparison.names import Rules, conventions, spelled
from xckpt.comparison.pairs import pair_of
from xckpt.comparison.relations.causes import Elementwise
from xckpt.comparison.relations.quantisers import TILES
from xckpt.comparison.relations.verification import Link, Side, begins_quantised, examine
from xckpt.comparison.sketches import ALIKE, Sketched, StepChain, arrangements
from xckpt.progress import Progress
from xckpt.scan.scanning import gather
from xckpt.statistics.tables import TIED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.classify import Places
    from xckpt.comparison.explaining.outcome import Case
    from xckpt.comparison.explaining.work import Compare
    from xckpt.comparison.merges import Merges
    from xckpt.progress import ProgressOption

# Smaller tensors may have the numbers of another tensor by chance.
_SMALLEST = 8
# A larger share of the rows is zero on purpose.
_FEW_ROWS = 0.1
# A model may tie the weights of these slots, so that a file stores one of them.
_TIED_SLOTS = (
    ["output", "token_embedding"],
    ["token_embedding", "token_embedding"],
    ["output", "output"],
    ["embedding", "linear"],  # if the slots are unknown
)
# The biases of recurrent layers of PyTorch, by each other.
_TWO_BIASES = {"bias_ih": "bias_hh", "bias_hh": "bias_ih"}
_LARGEST_BIAS = 1 << 20
# The most tensors of one shape that are tested for equality with a tensor.
_MOST_OWNERS = 8


def unread(work: Work) -> Explanations:
    """Explain tensors that cannot be read on one side by the error of their file."""
    problems = [(n, case.match.problem) for n, case in enumerate(work.cases)]
    return {n: unreadable(problem) for n, problem in problems if problem is not None}


def equal(work: Work) -> Explanations:
    """Explain tensors whose elements are all equal."""
    return {
        n: Explanation(("equal",), f"all {case.measures['count']:,.0f} elements are equal")
        for n, case in enumerate(work.cases)
        if case.status == "same"
    }


def in_place(work: Work) -> Explanations:
    """Explain tensors whose elements keep their positions: rounded, quantised, with an offset."""
    for n in work.open:
        case = work.cases[n]
        if case.link is not None:
            case.link.known = case.measures
            work.in_place[n] = case.link
    examine(list(work.in_place.values()), work.bar)
    by_tiles = [(n, link) for n in work.in_place for link in _by_tiles(work, n)]
    examine([link for _, link in by_tiles], work.bar, certain=True)
    work.in_place |= {n: link for n, link in by_tiles if link.relation is not None}
    return work.settled({
        n: related(work.places, link, link.relation, work.cases[n].match.steps)
        for n, link in work.in_place.items()
        if link.relation is not None
    })  # fmt: skip


def _by_tiles(work: Work, n: int) -> Iterator[Link]:
    """Yield links between tiles with one scale each, for unexplained tensors.

    Only quantisers depend on the order of the elements.
    """
    link = work.in_place[n]
    if link.relation is not None or not work.is_aligned(n):
        return
    for size in TILES:
        steps = tiled(tuple(link.orders[0][0].view.shape), size)
        if steps:
            sides = [Side(arranged(side.view, steps), side.tensor) for side in link.orders[0]]
            order = sides[0], sides[1]
            if begins_quantised(link.names, order, size**2):
                yield Link(link.names, [order], link.offset, known=link.known)


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


# --- tensors that only one side has ---------------------------------------------------------------


def renamed(work: Work) -> Explanations:
    """Explain tensors of one side whose numbers have a name that only the other side has."""
    return _of_content(work, by_content(*work.alone_of_sides()))


def resized(work: Work) -> Explanations:
    """Explain tensors of one side whose numbers are in a tensor of another name and size."""
    return _of_content(work, by_content(*work.alone_of_sides(), are_resized=True))


def _of_content(work: Work, candidates: Sequence[Candidate]) -> Explanations:
    """Explain pairs of tensors with the same numbers, unless their names contradict."""
    work.note_contested([c for c in candidates if c.is_contested])
    candidates = [c for c in candidates if not c.is_contested]
    verified = _equal(work, candidates)
    attempts = work.try_arrangements([
        (n, c.a, c.b, [chain for chain in arrangements(c.a, c.b) if chain.score >= ALIKE])
        for n, c in enumerate(candidates)
        if n not in verified
    ])  # fmt: skip
    for n, (link, steps) in attempts.items():
        if link.relation is not None:
            verified[n] = related(work.places, link, link.relation, steps)
    pairs = [(candidates[n].a, candidates[n].b, verified[n]) for n in sorted(verified)]
    broken = _broken(work, [(a, b) for a, b, _ in pairs]) if pairs else {}
    explanations: Explanations = {}
    for a, b, explanation in pairs:
        if a.name in broken and not work.places.agree(a.name, b.name):
            explanations |= _misplaced(a, b, broken[a.name])
        else:
            explanations |= work.settled(both(a, b, explanation))
    return explanations


def _equal(work: Work, candidates: Sequence[Candidate]) -> Explanations:
    """Explain the candidates whose elements are all equal, by their positions in the list."""
    pairs = {
        n: pair_of(c.a.stream, c.b.stream, c.a.name)
        for n, c in enumerate(candidates)
        if c.is_exact and not c.steps
    }
    finish = lambda _, comparison: comparison  # noqa: E731
    comparisons = gather(list(pairs.values()), Comparison, finish, work.bar)
    return {
        n: Explanation(
            ("equal",),
            "all elements are equal",
            holds=work.places.admits_steps((), (candidates[n].a.name, candidates[n].b.name)),
            measures=tuple(comparison.row()),
        )
        for n, comparison in zip(pairs, comparisons, strict=True)
        if comparison.equal == comparison.count
    }


def _broken(work: Work, pairs: Sequence[tuple[Sketched, Sketched]]) -> dict[str, str]:
    """Return the expected names of the pairs that contradict the names of most pairs."""
    rules = Rules([*_known_pairs(work), *((a.name, b.name) for a, b in pairs)])
    shapes: dict[str, object] = {b.name: b.shape for _, b in pairs}
    # Include explained tensors, whose names may still be the expected ones.
    names_of_a, names_of_b = (
        {case.match.name for case in work.cases if case.status == status} for status in ALONE
    )
    keeps_numbers = any(
        spelled(case.match.name).numbers
        for case in work.cases
        if case.match.theirs is not None and case.match.ours is not None and not case.other_name
    )
    names = [[tensor.name for tensor in side] for side in work.alone_of_sides()]
    return rules.broken(
        names_of_a, names_of_b, shapes, conventions(*names), keeps_numbers=keeps_numbers
    )


def _known_pairs(work: Work) -> list[tuple[str, str]]:
    """Return the names in `a` and `b` of explained pairs whose names differ."""
    pairs = []
    for n, explanation in work.explanations.items():
        case = work.cases[n]
        is_renamed = "renamed" in explanation.causes and len(explanation.other_names) == 1
        if explanation.outcome == "explained" and case.status == "only_a" and is_renamed:
            pairs.append((case.match.name, explanation.other_names[0]))
        elif explanation.outcome == "explained" and case.other_name:
            pairs.append((case.match.name, case.other_name))
    return pairs


def _misplaced(a: Sketched, b: Sketched, name: str) -> Explanations:
    reason = f"where its siblings lead to expect {quoted([name])}" if name else "another role"
    texts = (
        f"its numbers are those of {quoted([b.name])} of b, {reason}",
        f"its numbers are those of {quoted([a.name])} of a, which its name does not lead to expect",
    )
    return {
        tensor.number: Explanation(("misplaced",), text, holds=False, other_names=(partner.name,))
        for tensor, partner, text in ((a, b, texts[0]), (b, a, texts[1]))
    }


def expected(work: Work) -> Explanations:
    """Explain tensors of one side by the partner that other renamed tensors suggest."""
    suggestions = by_names(*work.alone_of_sides(), _known_pairs(work))
    described = work.descriptions.keys()
    pairs = [(a, b) for a, b, _ in suggestions if not {a.number, b.number} & described]
    results = work.try_arrangements([(n, a, b, _ways(a, b)) for n, (a, b) in enumerate(pairs)])
    explanations: Explanations = {}
    failed: list[tuple[Sketched, Sketched, Link, tuple[Step, ...]]] = []
    for n, (a, b) in enumerate(pairs):
        if n not in results:
            explanations |= both(a, b, changed({}, f"{a.shape} and {b.shape}"))
            continue
        link, steps = results[n]
        if link.relation is None:
            failed.append((a, b, link, steps))
        else:
            explanations |= both(a, b, related(work.places, link, link.relation, steps))
    return work.settled(explanations) | _changed(work, failed)


def _ways(a: Sketched, b: Sketched) -> list[StepChain]:
    """Return the arrangements to try for a pair that belongs together by name, identity first."""
    likely = [chain for chain in arrangements(a, b) if not chain.is_cut]
    if a.shape == b.shape:
        return [StepChain(1.0, ()), *[chain for chain in likely if chain.steps]]
    return likely


def _changed(
    work: Work, failed: Sequence[tuple[Sketched, Sketched, Link, tuple[Step, ...]]]
) -> Explanations:
    """Describe pairs that belong together, and whose numbers differ."""
    explanations: Explanations = {}
    for a, b, *_ in failed:
        explanations |= both(a, b, changed({}, f"{a.shape} and {b.shape}"))
    same = [entry for entry in failed if entry[0].shape == entry[1].shape]
    near = {
        n: (a.stream, b.stream)
        for n, (a, b, link, steps) in enumerate(same)
        if link.likely is None and not steps and link.correlation >= NEAR
    }
    low = low_ranks(near, work.bar) if near else {}
    groups = [tensors_by_content(sketches.values()) for sketches in work.sketches]
    pairs = [pair_of(a.stream, b.stream, a.name) for a, b, *_ in same]
    for n, (entry, measures) in enumerate(zip(same, work.compare(pairs), strict=True)):
        a, b, link, steps = entry
        explanation = low.get(n, changed(measures))
        if link.likely is not None:
            explanation = Explanation(("unknown",), unlike(link, steps), holds=False, steps=steps)
        for tensor, side, of_side in zip((a, b), SIDES, groups, strict=True):
            twins = [t.name for t in of_side[tensor.content] if t is not tensor]
            if twins and not tensor.is_constant:
                text = f"{explanation.text}; {quoted([tensor.name, *twins])} of {side} are copies"
                explanation = replace(explanation, text=text)
        explanations |= both(a, b, explanation)
    return explanations


# --- faults and descriptions ----------------------------------------------------------------------


def misplaced(work: Work) -> Explanations:
    """Find tensors whose numbers are under another name that both sides have."""
    numbers = [n for n in work.open if not work.is_aligned(n)]
    siblings = _explained_siblings(work, numbers)
    (ours, theirs), (their_siblings, our_siblings) = (
        [list(work.sketch(chosen, side).values()) for side in sides]
        for chosen, sides in ((numbers, (0, 1)), (siblings, (1, 0)))
    )
    candidates = [
        candidate
        for pair in ((ours, theirs), (ours, their_siblings), (our_siblings, theirs))
        for candidate in by_content(*pair)
        if candidate.a.number != candidate.b.number
        and candidate.a.size >= _SMALLEST
        and not candidate.is_contested
    ]
    pairs = [(n, c.a, c.b, [StepChain(c.score, c.steps)]) for n, c in enumerate(candidates)]
    explanations: Explanations = {}
    for n, (link, steps) in work.try_arrangements(pairs).items():
        if link.relation is None:
            continue
        done = related(work.places, link, link.relation, steps)
        if done.outcome != "explained":
            continue
        detail = "" if done.causes == ("equal",) else f" ({done.text})"
        # The tensor of `a` takes precedence where a case has two tensors.
        for tensor, owner, side in ((candidates[n].a, candidates[n].b, "b"),
                                  (candidates[n].b, candidates[n].a, "a")):  # fmt: skip
            status = work.cases[tensor.number].status
            text = f"its numbers are those of {quoted([owner.name])} of {side}{detail}"
            explanation = Explanation(("misplaced",), text, holds=False, other_names=(owner.name,))
            if status in ALONE:
                explanation = Explanation((status,), text, holds=False)
            if side == "b":
                explanations[tensor.number] = explanation
            else:
                explanations.setdefault(tensor.number, explanation)
    return explanations


def _explained_siblings(work: Work, numbers: Iterable[int]) -> list[int]:
    """Return the explained pairs whose names differ from the names of others in numbers only."""
    forms = {n: (spelled(case.match.name).template, case.match.size)
             for n, case in enumerate(work.cases) if case.status not in ALONE}  # fmt: skip
    changed_forms = {forms[n] for n in numbers if n in forms}
    return [n for n, form in forms.items() if form in changed_forms and n in work.explanations]


def described(work: Work) -> Explanations:
    """Describe changed tensors by a likely cause, or by the size of the difference."""
    explanations = {
        n: _of_zero_rows(work, n) or work.descriptions[n]
        for n in work.open
        if n in work.descriptions
    }
    unexplained = [
        n for n in work.open if n not in explanations and work.cases[n].status not in ALONE
    ]
    near: dict[int, tuple[ElementStream, ElementStream]] = {}
    for n in unexplained:
        link, pair = work.in_place.get(n), work.cases[n].match.both
        if link is not None and link.likely is not None:
            explanations[n] = Explanation(("unknown",), unlike(link), holds=False)
        elif pair is not None and (link is None or link.correlation >= NEAR):
            near[n] = pair
    if near:
        explanations |= low_ranks(near, work.bar)
    explanations |= _extended(work, [n for n in unexplained if n not in explanations])
    for n in unexplained:
        case = work.cases[n]
        explanations.setdefault(n, changed(case.measures, case.match.shapes))
    return explanations


def _of_zero_rows(work: Work, n: int) -> Explanation | None:
    """Describe a tensor with a few rows of zeros, which look like pruning; None for others."""
    link, pair = work.in_place.get(n), work.cases[n].match.both
    relation = None if link is None else link.relation
    if pair is None or not isinstance(relation, Elementwise) or not relation.masked:
        return None
    side = int(not relation.backwards)
    rows, count = zero_rows(pair[1 - side], pair[side]), pair[side].array.shape[0]
    if not rows or len(rows) > max(1, count * _FEW_ROWS):
        return None
    verb = "is" if len(rows) == 1 else "are"
    text = f"{len(rows):,} of {count:,} rows {verb} zero in {SIDES[side]}, such as row {rows[0]}"
    text += f"; otherwise, {replace(relation, masked=False).words(0.0)}"
    return Explanation(("unknown",), text, holds=False)


def _extended(work: Work, numbers: Sequence[int]) -> Explanations:
    """Describe pairs in which one tensor is the beginning of the other."""
    numbers = [n for n in numbers if work.cases[n].status == "shape"]
    links: list[tuple[int, Link, tuple[Step, ...]]] = []
    for n, (a, b) in work.sketch_pairs(numbers).items():
        best = next(iter(arrangements(a, b)), None)
        if best is None or best.score < ALIKE:
            continue
        for position, step in enumerate(best.steps):
            if isinstance(step, Truncated):
                links.append((n, work.link(a, b, best.steps), best.steps))
            elif isinstance(step, Padded):
                view = arranged(a.stream.array, best.steps[:position])
                place = part_of(b.stream.array, (0,) * len(b.shape), tuple(view.shape))
                order = (Side.of(view, a.stream), Side(place, b.stream))
                added = replace(step, is_zero=False)
                links.append((n, Link((a.name, b.name), [order]), (*best.steps[:position], added)))
    examine([link for _, link, _ in links], work.bar)
    return {
        n: replace(related(work.places, link, link.relation, steps), holds=False)
        for n, link, steps in links
        if link.relation is not None
    }


def tied(work: Work) -> Explanations:
    """Describe tensors that only one side has: copies of another of its tensors, or unmatched."""
    owners: dict[Any, list[tuple[int, ElementStream]]] = defaultdict(list)
    unmatched = [n for n in work.open if work.cases[n].status in ALONE]
    for n in set(range(len(work.cases))).difference(unmatched):
        for side, stream in enumerate(work.cases[n].match[1:3]):
            if stream is not None and stream.size > 1:
                owners[side, stream.array.shape].append((n, stream))
    links: list[tuple[int, int, Link]] = []
    for n in unmatched:
        side, stream = ALONE.index(work.cases[n].status), work.cases[n].alone
        candidates = owners[side, stream.array.shape] if stream is not None else []
        for owner, owner_stream in candidates if len(candidates) <= _MOST_OWNERS else []:
            if stream is not None:
                order = (Side.whole(owner_stream), Side.whole(stream))
                links.append((n, owner, Link((owner_stream.name, stream.name), [order])))
    examine([link for *_, link in links], work.bar, certain=True)
    explanations = {n: _spare(work, n) or _unmatched(work, n) for n in unmatched}
    for n, owner, link in links:
        if link.relation is not None and not link.relation.causes and not link.is_constant:
            explanations[n] = _tied(work, n, owner, link)
    return explanations


def _spare(work: Work, n: int) -> Explanation | None:
    """Explain zeros that are one of two biases of a recurrent layer, which most libraries add.

    The other one has to be explained, and so has every tensor of the other side.
    """
    side, stream = ALONE.index(work.cases[n].status), work.cases[n].alone
    if stream is None or stream.size > _LARGEST_BIAS or stream.problem is not None:
        return None
    kinds = [kind for kind in _TWO_BIASES if kind in stream.name]
    others = [m for m, case in enumerate(work.cases) if case.status == ALONE[1 - side]]
    verified = [m for m in others if m in work.explanations and work.explanations[m].verified]
    if len(kinds) != 1 or len(verified) < len(others):
        return None
    twin = stream.name.replace(kinds[0], _TWO_BIASES[kinds[0]])
    streams = (case.match.theirs if side else case.match.ours for case in work.cases)
    number = next((m for m, x in enumerate(streams) if x is not None and x.name == twin), None)
    explanation = None if number is None else work.explanations.get(number)
    if (
        explanation is None
        or not explanation.verified
        or np.any(dense_values(stream.array[(slice(None),) * len(stream.array.shape)]) != 0)
    ):
        return None
    text = f"zeros, which add nothing to {quoted([twin])}: {SIDES[1 - side]} has one bias"
    return Explanation(("padded",), text)


def _unmatched(work: Work, n: int) -> Explanation:
    """Describe a tensor that only one side has."""
    text = "no tensor with these numbers was found"
    if n in work.copies:
        sides = zip(work.copies[n], SIDES, strict=True)
        texts = [f"{quoted(names)} of {side}" for names, side in sides]
        text = f"{' and '.join(texts)} have the same numbers: a copy replaces another tensor"
    return Explanation((work.cases[n].status,), text, holds=False)


def _tied(work: Work, n: int, owner: int, link: Link) -> Explanation:
    """Explain a copy of another tensor, which a side need not store if a model ties the two."""
    status, explanation, names = work.cases[n].status, work.explanations.get(owner), link.names
    side = ALONE.index(status)
    structure = work.places.structures[side]
    described = [name for name in names if name in structure]
    slots = sorted([structure.slot(name) or structure.module_type(name) for name in described])
    keys = {work.places.key(side, name) for name in names}
    stored = {order.tensor.identity for order in link.orders[0]}
    # Several embeddings, or an output layer; two names of one place; two names of the same bytes.
    is_tied = slots in _TIED_SLOTS or any(len(x) == 1 and None not in x for x in (keys, stored))
    if is_tied and explanation is not None and explanation.verified:
        text = f"tied to {quoted(names[:1])} of {status[-1]}, which has the same numbers"
        other_names = explanation.other_names or names[:1]
        return Explanation(("tied",), text, other_names=other_names)
    text = f"its numbers are those of {quoted(names[:1])} of {status[-1]}"
    return Explanation((status,), text, holds=False)


# --- all passes -----------------------------------------------------------------------------------


#: All passes, in order.
PASSES: tuple[Callable[[Work], Explanations], ...] = (
    unread,
    # tensors that have a partner by name
    equal,
    in_place,
    folded,
    converted,
    moved,
    # tensors that only one side has
    renamed,
    joined,
    partly_converted,
    resized,
    expected,
    # faults, and descriptions of unexplained tensors
    misplaced,
    described,
    tied,
)

#: Reasons to doubt explanations, in order. The next ones do not count a tensor in doubt.
DOUBTS: tuple[Callable[[Work], Explanations], ...] = (
    # It shares its partner with another tensor, while one of its shape is left without a partner.
    claimed_twice,
    # A tensor without a partner fits its place better.
    fitting_worse,
    # Most of its siblings have another order of elements, or an offset.
    unlike_siblings,
    # It is transposed and other matrices are not, or the reverse.
    turned_alone,
    # Most norms of the model have an offset, unlike it.
    unlike_norms,
    # The rows of the bias or the weight of its module are in another order.
    unlike_module,
    # Its siblings are too few to show which of several orders is right.
    unlike_few_siblings,
)


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
        for doubt in DOUBTS:
            work.explanations |= doubt(work)
    return [_named(case, work.explanations.get(n)) for n, case in enumerate(cases)]


def _named(case: Case, explanation: Explanation | None) -> Explanation | None:
    """Add the name of the tensor in `b` to an explanation, if it differs."""
    name, partner = case.other_name, case.match.partner
    if explanation is None or not name or explanation.other_names:
        return explanation
    with_name = explanation.renamed(name, "b")
    if partner is not None and partner.rule == TIED:
        return replace(with_name, causes=(TIED, *explanation.changes))
    return with_name
