"""Tensors that one side has under another name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xckpt.comparison.explaining.low_rank import NEAR, low_ranks
from xckpt.comparison.explaining.names import Rules, are_other_roles, conventions, likeness, spelled
from xckpt.comparison.explaining.outcome import Explanation, both, changed, quoted, related, unlike
from xckpt.comparison.explaining.search import ALIKE, StepChain, arrangements, partners
from xckpt.comparison.explaining.sketches import groups_of
from xckpt.comparison.explaining.work import ALIGNED, ALONE
from xckpt.comparison.pairs import pair_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.explaining.sketches import Sketched
    from xckpt.comparison.explaining.verification import Link
    from xckpt.comparison.explaining.work import Explanations, Work

_Pair = tuple["Sketched", "Sketched"]
# A pair that its names suggest, and the best link between its numbers.
_Failed = tuple["Sketched", "Sketched", "Link", tuple["Step", ...]]


def renamed(work: Work) -> Explanations:
    """Explain tensors of one side whose numbers have a name that only the other side has."""
    sides = [list(work.sketch(work.alone(side), side).values()) for side in (0, 1)]
    candidates = partners(*sides)
    results = work.try_arrangements([
        (n, a, b, [chain for chain in arrangements(a, b) if chain.score >= ALIKE])
        for n, (a, b, *_) in enumerate(candidates)
    ])  # fmt: skip
    verified = {n: candidates[n] for n, (link, _) in results.items() if link.relation is not None}
    rules = Rules([*_known_pairs(work), *((a.name, b.name) for a, b, *_ in verified.values())])
    shapes: dict[str, object] = {b.name: b.shape for _, b, *_ in verified.values()}
    # Include explained tensors, whose names may still be the expected ones.
    names_of_a, names_of_b = (
        {case.match.name for case in work.cases if case.status == status} for status in ALONE
    )
    keeps_numbers = any(
        spelled(case.match.name).numbers
        for case in work.cases
        if case.match.theirs is not None and case.match.ours is not None and not case.other_name
    )
    names = [[tensor.name for tensor in side] for side in sides]
    broken = rules.broken(
        names_of_a, names_of_b, shapes, conventions(*names), keeps_numbers=keeps_numbers
    )
    broken = {
        a.name: broken[a.name]
        for a, b, *_ in verified.values()
        if a.name in broken and not work.places.agree(a.name, b.name)
    }
    explanations: Explanations = {}
    for n, (a, b, *_) in verified.items():
        link, steps = results[n]
        if a.name in broken:
            explanations |= _misplaced(a, b, broken[a.name])
        elif link.relation is not None:
            explanations |= work.settled(
                both(a, b, related(work.places, link, link.relation, steps))
            )
    return explanations


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
    ours, theirs = (list(work.sketch(work.alone(side), side).values()) for side in (0, 1))
    rules, by_name = Rules(_known_pairs(work)), {tensor.name: tensor for tensor in theirs}
    pairs: list[_Pair] = []
    for a in ours:
        match = rules.expected(a.name, by_name)
        if match is not None:
            pairs.append((a, by_name.pop(match[0])))
    paired_names = {tensor.name for pair in pairs for tensor in pair}
    keys = [
        {
            work.places.key(side, tensor.name): tensor
            for tensor in tensors
            if tensor.name not in paired_names
        }
        for side, tensors in enumerate((ours, theirs))
    ]
    pairs += [
        (keys[0][key], keys[1][key])
        for key in keys[0]
        if key is not None and key in keys[1] and keys[0][key].shape == keys[1][key].shape
    ]
    for find in (_constants, _nearly_equal, _alike_by_name):
        paired = {id(tensor) for pair in pairs for tensor in pair}
        unpaired = ([tensor for tensor in side if id(tensor) not in paired]
                    for side in (ours, theirs))  # fmt: skip
        pairs += find(*unpaired)
    described = work.descriptions.keys()
    pairs = [(a, b) for a, b in pairs if not {a.number, b.number} & described]
    results = work.try_arrangements([(n, a, b, _ways(a, b)) for n, (a, b) in enumerate(pairs)])
    explanations: Explanations = {}
    failed: list[_Failed] = []
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


def _constants(ours: Sequence[Sketched], theirs: Sequence[Sketched]) -> list[_Pair]:
    """Pair equal constants in file order, if both sides have the same number of them."""
    constants = ([tensor for tensor in side if tensor.is_constant] for side in (ours, theirs))
    return [
        (a, b)
        for ours_of_key, theirs_of_key in groups_of(constants, lambda t: (t.shape, t.sketch.low))
        if len(ours_of_key) == len(theirs_of_key)
        for a, b in zip(ours_of_key, theirs_of_key, strict=True)
        if not are_other_roles(a.name, b.name)
    ]


def _nearly_equal(ours: Sequence[Sketched], theirs: Sequence[Sketched]) -> list[_Pair]:
    """Pair tensors with nearly the same sums, which were renamed and then changed."""
    candidates = partners(ours, theirs, extended=False)
    return [(a, b) for a, b, _, arrangement in candidates if arrangement.score >= ALIGNED]


def _alike_by_name(ours: Sequence[Sketched], theirs: Sequence[Sketched]) -> list[_Pair]:
    """Pair constants whose names resemble each other more than any other names."""
    constants = ([tensor for tensor in side if tensor.is_constant] for side in (ours, theirs))
    pairs = []
    for tensors, tensors_of_b in groups_of(constants, lambda tensor: tensor.shape):
        table = np.array([[likeness(a.name, b.name) for b in tensors_of_b] for a in tensors])
        for n, m in np.argwhere(table > 0).tolist():
            alternatives = np.concatenate([np.delete(table[n], m), np.delete(table[:, m], n)])
            if table[n, m] > alternatives.max(initial=0):
                pairs.append((tensors[n], tensors_of_b[m]))
    return pairs


def _changed(work: Work, failed: Sequence[_Failed]) -> Explanations:
    """Describe pairs that belong together, and whose numbers differ."""
    explanations: Explanations = {}
    for a, b, *_ in failed:
        explanations |= both(a, b, changed({}, f"{a.shape} and {b.shape}"))
    same = [entry for entry in failed if entry[0].shape == entry[1].shape]
    near = {
        n: (a.reader, b.reader)
        for n, (a, b, link, steps) in enumerate(same)
        if link.likely is None and not steps and link.correlation >= NEAR
    }
    low = low_ranks(near, work.bar)
    pairs = [pair_of(a.reader, b.reader, a.name) for a, b, *_ in same]
    for n, (entry, measures) in enumerate(zip(same, work.compare(pairs), strict=True)):
        a, b, link, steps = entry
        explanation = low.get(n, changed(measures))
        if link.likely is not None:
            explanation = Explanation(("changed",), unlike(link, steps), holds=False)
        explanations |= both(a, b, explanation)
    return explanations
