"""Descriptions of unexplained tensors: misplaced numbers, and likely causes of differences."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.comparison.arrangements import Padded, Truncated, arranged, part_of
from xckpt.comparison.explaining.low_rank import NEAR, low_ranks
from xckpt.comparison.explaining.outcome import Explanation, changed, quoted, related, unlike
from xckpt.comparison.explaining.search import ALIKE, arrangements, partners
from xckpt.comparison.explaining.verification import Link, Side, examine
from xckpt.comparison.explaining.work import ALONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.explaining.work import Explanations, Work

# Smaller tensors may have the numbers of another tensor by chance.
_SMALLEST = 8
# The most tensors of one shape that are tested for equality with a tensor.
_MOST_OWNERS = 8


def misplaced(work: Work) -> Explanations:
    """Find tensors whose numbers are under another name that both sides have."""
    numbers = [n for n in work.open if not work.is_aligned(n)]
    sides = [list(work.sketch(numbers, side).values()) for side in (0, 1)]
    candidates = [
        candidate
        for candidate in partners(*sides, extended=False)
        if candidate.a.number != candidate.b.number and candidate.a.size >= _SMALLEST
    ]
    pairs = [(n, a, b, [chain]) for n, (a, b, _, chain) in enumerate(candidates)]
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


def described(work: Work) -> Explanations:
    """Describe changed tensors by a likely cause, or by the size of the difference."""
    explanations = {n: work.descriptions[n] for n in work.open if n in work.descriptions}
    unexplained = [
        n for n in work.open if n not in explanations and work.cases[n].status not in ALONE
    ]
    near: dict[int, tuple[ElementStream, ElementStream]] = {}
    for n in unexplained:
        link, pair = work.in_place.get(n), work.cases[n].match.both
        if link is not None and link.likely is not None:
            explanations[n] = Explanation(("changed",), unlike(link), holds=False)
        elif pair is not None and (link is None or link.correlation >= NEAR):
            near[n] = pair
    explanations |= low_ranks(near, work.bar)
    explanations |= _extended(work, [n for n in unexplained if n not in explanations])
    for n in unexplained:
        case = work.cases[n]
        explanations.setdefault(n, changed(case.measures, case.match.shapes))
    return explanations


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
                view = arranged(a.reader.array, best.steps[:position])
                place = part_of(b.reader.array, (0,) * len(b.shape), tuple(view.shape))
                order = (Side.of(view, a.reader), Side(place, b.reader))
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
    owners: dict[Any, list[ElementStream]] = defaultdict(list)
    unmatched = [n for n in work.open if work.cases[n].status in ALONE]
    for n in set(range(len(work.cases))).difference(unmatched):
        for side, reader in zip(ALONE, work.cases[n].match[1:3], strict=True):
            if reader is not None and reader.size > 1:
                owners[side, reader.array.shape].append(reader)
    links: list[tuple[int, str, Link]] = []
    for n in unmatched:
        reader = work.cases[n].alone
        candidates = owners[work.cases[n].status, reader.array.shape] if reader is not None else []
        for owner in candidates if len(candidates) <= _MOST_OWNERS else []:
            if reader is not None:
                order = (Side.whole(owner), Side.whole(reader))
                links.append((n, owner.name, Link((owner.name, reader.name), [order])))
    examine([link for *_, link in links], work.bar, certain=True)
    names = {
        n: name
        for n, name, link in links
        if link.relation is not None and not link.relation.causes and not link.is_constant
    }
    explanations: Explanations = {}
    for n in unmatched:
        status, text = work.cases[n].status, "no tensor with these numbers was found"
        if n in names:
            text = f"its numbers are those of {quoted([names[n]])} of {status[-1]}"
        explanations[n] = Explanation((status,), text, holds=False)
    return explanations
