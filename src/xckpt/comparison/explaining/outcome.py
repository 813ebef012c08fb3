"""The outcome of each tensor in words, and the sentence about all tensors.

=============  ===================================================================================
`explained`    a chain of admitted causes holds for every element
`changed`      both sides have the tensor, and no admitted causes relate the two
`unmatched`    only one side has the tensor
`unreadable`   the tensor cannot be read on one side
=============  ===================================================================================

Admitted causes are the changes that a conversion is supposed to make. Other causes only describe a
changed tensor, however exactly they hold: a damaged row looks like an update of rank 1, and zeroed
bytes look like pruning.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from math import nan
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.comparison.arrangements import HalvesExchanged, RopePermuted, Shape, Step
from xckpt.comparison.classify import Places, doubt
from xckpt.comparison.relations.causes import Relation, percent
from xckpt.comparison.relations.quantised_causes import Quantised
from xckpt.errors import CheckpointError, shown, some
from xckpt.formatting import counted
from xckpt.statistics.tables import EXPLANATION_COLUMNS, EXPLANATION_TEXTS, cause_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.comparison.pairs import Match
    from xckpt.comparison.relations.verification import Link

Outcome = Literal["explained", "changed", "unmatched", "unreadable"]

#: Causes that explain a tensor. Offsets and scales are admitted only for architectures that are
#: known to apply them.
ADMITTED = frozenset(
    {
        *("equal", "renamed", "tied", "fused", "split", "transposed", "rope_permuted", "padded"),
        *("reshaped", "regrouped"),
        *("merged", "folded", "quantised", "rounded"),
    }
)
_ADMITTED_IF_KNOWN = frozenset({"offset", "scaled"})
#: Statuses of tensors that only one side has, by side.
ALONE = ("only_a", "only_b")
#: Names of the sides in sentences.
SIDES = ("a", "b")

#: All causes; several are joined by "+", in this order.
CAUSES = (
    *("renamed", "tied", "misplaced", "fused", "split", "reshaped", "transposed"),
    *("regrouped", "rope_permuted", "rows_permuted"),
    *("padded", "cut", "offset", "scaled", "pruned", "low_rank"),
    *("merged", "folded", "quantised"),
    *("rounded", "equal", "unknown", "only_a", "only_b", "unreadable"),
)
_ALWAYS = frozenset(EXPLANATION_COLUMNS[:4])
# Causes that keep every number.
_KEEPING = frozenset({*CAUSES[: CAUSES.index("cut")], "equal"}) - {"misplaced", "rows_permuted"}
# Below this correlation, elements at the same positions are of other tensors or in another order.
_RELATED = 0.5
# With so many changes expected, one part in a thousand has zero.
_EXPECTED = 7
_MOST_NAMES = 4
_MOST_KINDS = 8
_AT_FACTOR = (
    "{0:.6g} times the scale that the adapter states: "
    "xckpt.compare(base.ckpt.merge(adapter, scale={0:.6g}), merged) verifies it"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A tensor of one side or a pair of tensors of both, with the measures of their difference."""

    match: Match
    #: One of `STATUSES`; empty if it was not compared.
    status: str
    measures: dict[str, float]
    #: A link between the elements that were measured; None if it was not measured.
    link: Link | None

    @property
    def other_name(self) -> str:
        """Name of the tensor in `b`, if it differs from the name in `a`; else empty."""
        partner = self.match.partner
        return partner.name if partner and partner.name != self.match.name else ""

    @property
    def alone(self) -> ElementStream | None:
        """The tensor, if only one side has it."""
        return {"only_a": self.match.ours, "only_b": self.match.theirs}.get(self.status)


class SideTensor(NamedTuple):
    """A tensor of one side, and the number of its case."""

    number: int
    stream: ElementStream

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.stream.name

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return tuple(self.stream.array.shape)


def tensors_of(
    cases: Sequence[Case], numbers: Iterable[int], side: int, statuses: set[str]
) -> dict[str, SideTensor]:
    """Return the readable tensors of one side whose cases have one of some statuses, by name."""
    tensors = {}
    for n in numbers:
        stream = cases[n].match.theirs if side else cases[n].match.ours
        if cases[n].status in statuses and stream is not None and stream.problem is None:
            tensors[stream.name] = SideTensor(n, stream)
    return tensors


@dataclass(frozen=True, slots=True)
class Explanation:
    """The relation of a tensor to the other side."""

    causes: tuple[str, ...]
    text: str
    #: Whether the causes were verified on every element.
    holds: bool = True
    #: Whether the architecture is known to apply the offset or the scale.
    is_known: bool = False
    offset: float | None = None
    scale: float | None = None
    #: Number by which the update of an adapter is multiplied, if that explains a change.
    factor: float | None = None
    rank: int | None = None
    heads: int | None = None
    #: Names of the tensors on the other side.
    other_names: tuple[str, ...] = ()
    #: The relation in a few words: "transposed, rounded to bfloat16".
    relation: str = ""
    #: Steps from the elements of `a` to the elements of `b`.
    steps: tuple[Step, ...] = ()
    #: The layout of a tensor that consists of several, the forms of their names, and their steps.
    joint: tuple[str, ...] = ()
    #: The `PAIR_COLUMNS` of the elements that belong together; None if they were not compared.
    measures: tuple[float, ...] | None = None
    #: Whether all elements are equal, which any order of them explains.
    is_constant: bool = False
    #: Types that numbers were rounded to on the way, which only the numbers show.
    types_between: tuple[str, ...] = ()
    #: Whether the elements of a changed tensor at the same positions do not even correlate.
    is_unrelated: bool = False

    @property
    def is_admitted(self) -> bool:
        """True if conversions arrange elements by these steps."""
        return all(step.cause in {"", *ADMITTED} for step in self.steps)

    @property
    def has_no_layout(self) -> bool:
        """True if no layout that conversions make is known for the tensor."""
        return self.outcome == "unmatched" or self.is_unrelated or not self.is_admitted

    @property
    def layout(self) -> tuple[str, ...]:
        """The changes that siblings have in common, in contrast to rounding."""
        offset = f"{self.offset:+.9g}" if self.offset else ""
        # Places show which tensors have their halves exchanged; siblings do not.
        of_order = [] if self.is_constant else [
            step for step in self.steps if not isinstance(step, HalvesExchanged)
        ]  # fmt: skip
        steps = [step.words if step.cause == "transposed" else step.done for step in of_order]
        return (*steps, offset, *self.joint)

    @property
    def is_part(self) -> bool:
        """True if the tensor is only explained as a part of another tensor."""
        return bool({"fused", "split", "merged", "folded"} & set(self.causes)) and not self.joint

    @property
    def has_layout(self) -> bool:
        """True if the tensor is explained by itself, and not as a part of another tensor."""
        return self.verified and not self.is_part

    @property
    def outcome(self) -> Outcome:
        """Outcome of the tensor, from its causes."""
        return _outcome_of(self.causes, self.holds, self.is_known)

    @property
    def verified(self) -> bool:
        """True if the tensor is explained."""
        return self.outcome == "explained"

    @property
    def changes(self) -> tuple[str, ...]:
        """The causes besides equality."""
        return tuple([cause for cause in self.causes if cause != "equal"])

    @property
    def cause(self) -> str:
        """The causes joined by "+", in the order of `CAUSES`."""
        return "+".join(sorted(set(self.causes), key=CAUSES.index))

    @property
    def explanation(self) -> str:
        """The sentence."""
        return self.text

    def renamed(self, partner: str, side: str) -> Explanation:
        """Return the explanation of a tensor that has another name on the other side."""
        text = f"{quoted([partner])} of {side}"
        if self.causes == ("equal",):
            text = f"equal to {text}"
        elif self.changes:
            text = f"{text}; {self.text}"
        return replace(self, causes=("renamed", *self.changes), text=text, other_names=(partner,))


@lru_cache(maxsize=1024)
def _outcome_of(causes: tuple[str, ...], holds: bool, is_known: bool) -> Outcome:  # noqa: FBT001
    if not {*ALONE}.isdisjoint(causes):
        return "unmatched"
    if "unreadable" in causes:
        return "unreadable"
    admitted = ADMITTED | (_ADMITTED_IF_KNOWN if is_known else frozenset())
    return "explained" if holds and admitted.issuperset(causes) else "changed"


_ByOutcome = dict[str, list[tuple[str, Explanation]]]


def quoted(names: Sequence[str]) -> str:
    """List the first of some names, quoted."""
    return some(names, "", _MOST_NAMES)


def explained_attrs(
    explanations: Sequence[Explanation | None], *, is_stacked: bool
) -> dict[str, Any]:
    """Return the attributes of a variable: one value, or a list for stacked tensors."""
    attrs: dict[str, Any] = {}
    for column in EXPLANATION_COLUMNS:
        values = [_value(explanation, column) for explanation in explanations]
        if column in _ALWAYS or any(value == value and value != "" for value in values):  # noqa: PLR0124  NaN
            attrs[column] = values if is_stacked else values[0]
    return attrs


def _value(explanation: Explanation | None, column: str) -> Any:
    """Return a field as an attribute that files can hold: a text or a number, NaN if missing."""
    value = (
        ""
        if explanation is None and column in EXPLANATION_TEXTS
        else getattr(explanation, column, None)
    )
    if column == "other_names":
        return ", ".join(value or ())
    if value is None:
        return float("nan")
    return int(value) if column == "verified" else value


# --- words ---------------------------------------------------------------------------------------


def related(
    places: Places, link: Link, relation: Relation, steps: Sequence[Step] = ()
) -> Explanation:
    """Explain a link by a relation that holds for all elements, after steps that moved them."""
    evidence = link.evidence
    if doubtful := doubt(link, relation):
        return after(Explanation(("unknown",), doubtful, holds=False), steps)
    zeros = 0.0 if evidence is None else evidence.zeros / max(evidence.count, 1)
    text = relation.words(zeros)
    if evidence is not None and isinstance(relation, Quantised):
        text += f"; signal to noise {link.measures['sqnr_db']:.3g} dB"
    measures = None if evidence is None else evidence.measures
    done = filter(None, [*(step.done for step in steps), relation.done])
    are_parts = any(side.size < side.tensor.size for side in link.orders[0])
    explanation = Explanation(
        relation.causes or ("equal",),
        text,
        holds=places.admits_steps(steps, link.names, are_parts=are_parts),
        relation=", ".join(done),
        measures=None if measures is None else tuple(measures.row()),
        is_constant=link.is_constant,
        types_between=_types_between(link, relation),
    )
    moved = relation.transform
    if moved.offset or moved.scale != 1.0:
        cause = "offset" if moved.offset else "scaled"
        explanation = replace(
            explanation,
            causes=tuple(dict.fromkeys([cause, *explanation.causes])),
            is_known=places.admits(moved, link.names, backwards=relation.backwards),
            offset=moved.offset or None,
            scale=moved.scale if moved.scale != 1.0 else None,
        )
    return after(explanation, steps)


def _types_between(link: Link, relation: Relation) -> tuple[str, ...]:
    """Return the types that numbers were rounded to on the way, and that are not stored."""
    stored = {"float32", "float64"} | {link.pair.kinds[not relation.backwards] if link.pair else ""}
    # A quantiser hides whether few numbers were rounded to float16.
    stored |= {"float16"} if isinstance(relation, Quantised) else set()
    return tuple([name for name in relation.transform.types if name not in stored])


def after(explanation: Explanation, steps: Sequence[Any]) -> Explanation:
    """Add the steps that precede the comparison of the numbers to an explanation."""
    if not steps:
        return explanation
    heads = next((s.heads for s in reversed(steps) if isinstance(s, RopePermuted)), None)
    done = " and ".join(step.words for step in steps)
    text = f"{explanation.text}, after {done}" if explanation.changes else f"equal after {done}"
    causes = (*dict.fromkeys(step.cause for step in steps), *explanation.changes)
    return replace(explanation, causes=causes, text=text, heads=heads, steps=tuple(steps))


def both(a: Any, b: Any, explanation: Explanation) -> dict[int, Explanation]:
    """Return the explanations of two tensors of different names, by the numbers of their cases."""
    return {
        tensor.number: explanation.renamed(partner.name, side)
        for tensor, partner, side in ((a, b, "b"), (b, a, "a"))
    }


class Share(NamedTuple):
    """A part of a joined tensor, or elements of it, and the relation to their place."""

    whole: Any
    part: Any
    #: None if no relation holds, for a reason.
    explanation: Explanation | None
    problem: str
    #: The form of the name of the part, and what was done before it was joined.
    kind: str


def of_joint(
    shares: Sequence[Share],
    words: str,
    side: int,
    *,
    is_in_order: bool,
    is_pair: bool = False,
    causes: tuple[str, ...] = (),
) -> dict[int, Explanation]:
    """Return the explanations of joined tensors of a side and of their parts, by their cases.

    A pair has one part, which is the whole in another order.
    """
    fault = () if is_in_order else ("misplaced",)
    order = "" if is_in_order else "; not in the order of its siblings"
    cause = "renamed" if is_pair else "fused" if side else "split"
    shares = _rounded_alike(shares)
    shares_of: dict[tuple[int, bool], list[Share]] = defaultdict(list)
    for share in shares:
        shares_of[share.part.number, True].append(share)
        shares_of[share.whole.number, False].append(share)
    explanations: dict[int, Explanation] = {}
    for (number, is_part), entries in shares_of.items():
        kinds = {(e.whole if is_part else e.part).name: e.kind for e in entries}
        head = f"{quoted(list(kinds))} of {SIDES[side if is_part else 1 - side]}, {words}"
        verified = [e.explanation for e in entries if e.explanation is not None]
        failed = [e for e in entries if e.explanation is None]
        changes = dict.fromkeys(change for e in verified for change in e.changes)
        texts = list(dict.fromkeys(e.text for e in verified if e.changes))[:2]
        if failed:
            difference = f"different from {quoted([e.part.name for e in failed])}"
            texts.append(failed[0].problem if is_part else difference)
        heads = {explanation.heads for explanation in verified} - {None}
        is_known = all(e.is_known for e in verified if {"offset", "scaled"} & set(e.causes))
        one_number = heads.pop() if len(heads) == 1 else None
        several = Explanation((), "", is_known=is_known, heads=one_number)
        unknown = ("unknown",) if failed else ()
        place = "part of " if is_part and not is_pair else ""
        joined = (cause, *fault, *causes, *changes, *unknown)
        explanations[number] = replace(
            verified[0] if is_part and len(entries) == len(verified) == 1 else several,
            causes=tuple(dict.fromkeys(joined)),
            text="; ".join([place + head, *texts]) + order,
            holds=not failed and is_in_order,
            other_names=tuple(kinds),
            joint=() if is_part or is_pair else (words, *kinds.values()),
        )
    return explanations


def _rounded_alike(shares: Sequence[Share]) -> list[Share]:
    """Return shares, without explanations of parts that were rounded unlike most of their whole."""
    varied: dict[int, list[Explanation]] = defaultdict(list)
    for share in shares:
        if share.explanation is not None and not share.explanation.is_constant:
            varied[share.whole.number].append(share.explanation)
    usual = {number: _usual_types(parts) for number, parts in varied.items() if _tell_types(parts)}
    checked = []
    for share in shares:
        explanation, types = share.explanation, usual.get(share.whole.number)
        if explanation and not explanation.is_constant and types not in {
            None, explanation.types_between
        }:  # fmt: skip
            verb = "was" if explanation.types_between else "was not"
            between = explanation.types_between or types or ()
            problem = f"unlike the others, it {verb} rounded to {' and then to '.join(between)}"
            share = share._replace(explanation=None, problem=problem)  # noqa: PLW2901
        checked.append(share)
    return checked


def _usual_types(parts: Sequence[Explanation]) -> tuple[str, ...]:
    """Return the types that most parts were rounded to on the way."""
    counts = Counter(part.types_between for part in parts)
    return max(counts, key=lambda types: (counts[types], -len(types)))


def _tell_types(parts: Sequence[Explanation]) -> bool:
    """Return whether rounding would have changed numbers of every part.

    Types with less exponents change only the smallest numbers, which a small part may not have.
    """
    rows = [
        (part.measures[0], part.measures[1], part.types_between) for part in parts if part.measures
    ]
    moved = sum(count - equal for count, equal, types in rows if types)
    total = sum(count for count, *_ in rows)
    smallest = min([count for count, _, types in rows if not types], default=total)
    return moved * smallest >= _EXPECTED * total


def changed(measures: Mapping[str, float], shapes: str = "") -> Explanation:
    """Describe a change of unknown cause by its size."""
    is_unrelated = measures.get("cosine", nan) < _RELATED
    if shapes:
        text = f"the shapes {shapes} differ, and the numbers do"
    else:
        count, share = int(measures["count"]), 1 - measures["equal_fraction"]
        facts = [_not_finite(int(measures["nan"]), int(measures["inf"]))]
        facts += [f"{round(share * count):,} of {count:,} elements differ ({percent(share)})"]
        facts += [f"{name} {measures[name]:.4g}" for name in ("rel_l2", "cosine")]
        text = ", ".join(filter(None, facts))
    return Explanation(("unknown",), text, holds=False, is_unrelated=is_unrelated)


def unreadable(problem: CheckpointError) -> Explanation:
    """Describe a tensor that cannot be read on one side."""
    text = f"it cannot be read: {CheckpointError(problem.reason, rule=problem.rule)}"
    return Explanation(("unreadable",), text, holds=False)


def unlike(link: Link, steps: Sequence[Step] = ()) -> str:
    """Describe the relation that holds for most elements of a changed tensor, if any."""
    if link.likely is None:
        return "the numbers differ"
    share, relation = link.likely
    damage = ""
    if link.evidence is not None:
        measures, count = link.measures, link.evidence.count
        off = count - round(share * count)
        damage = f", and not for {off:,} of {count:,}"
        nonfinite = _not_finite(int(measures["nan"]), int(measures["inf"]))
        damage += f"; {nonfinite}" if nonfinite else ""
    done = f", after {' and '.join(step.words for step in steps)}," if steps else ""
    return f"looks like: {relation.words(0.0)}{done} for {percent(share)} of the elements{damage}"


def _not_finite(nan: int, inf: int) -> str:
    """Return the numbers of elements that are NaN or infinite on one side; empty without any."""
    counts = [(nan, "NaN"), (inf, "infinite")]
    return " and ".join(
        [f"{n:,} {'is' if n == 1 else 'are'} {t} on one side" for n, t in counts if n]
    )


# --- all tensors ----------------------------------------------------------------------------------


def sentence(cases: Sequence[Case], explanations: Sequence[Explanation | None]) -> str:
    """Summarise the tensors of `a` and the tensors only in `b` in a sentence, exceptions first."""
    sides: tuple[_ByOutcome, _ByOutcome] = (defaultdict(list), defaultdict(list))
    for case, explanation in zip(cases, explanations, strict=True):
        if explanation is not None:
            entry = case.match.name, explanation
            sides[case.status == "only_b"][explanation.outcome].append(entry)
    ours, theirs = sides
    changed = []
    for name, explanation in ours["changed"]:
        other_names = explanation.other_names if "renamed" in explanation.causes else ()
        changed.append(shown(name) + (f" ({quoted(other_names)} in b)" if other_names else ""))
    partners = {name for _, explanation in ours["changed"] for name in explanation.other_names}
    changed += [shown(name) for name, _ in theirs["changed"] if name not in partners]
    missing, added = ([name for name, _ in side["unmatched"]] for side in sides)
    unread = [name for side in sides for name, _ in side["unreadable"]]
    explained = [explanation for _, explanation in ours["explained"]]
    total = counted(sum(map(len, ours.values())), "tensor")
    is_alone = not (unread or explained or changed)
    if is_alone and len(added) == sum(map(len, theirs.values())):
        return _nothing_shared(total, missing, added)
    facts = []
    if changed:
        verb = "differs" if len(changed) == 1 else "differ"
        facts.append(f"{len(changed):,} of {total} {verb}: {_listed(changed)}")
    if unread:
        facts.append(f"{len(unread):,} cannot be read: {quoted(unread)}")
    if missing:
        of_total = "" if changed else f" of {total}"
        facts.append(f"{len(missing):,}{of_total} {_be(missing)} only in a: {quoted(missing)}")
    merged = [name for name, explanation in theirs["explained"] if "merged" in explanation.causes]
    for names, words in ((added, "only in b"), (merged, "only in b, from the adapter")):
        facts += [f"{len(names):,} {_be(names)} {words}: {quoted(names)}"] if names else []
    if explained:
        facts.append(_summary(explained, is_all=len(explained) == sum(map(len, ours.values()))))
    return "; ".join([*facts, *_factors([explanation for _, explanation in ours["changed"]])])


def _factors(changed: Sequence[Explanation]) -> Iterator[str]:
    """Yield the factor of an adapter that explains changes, if there is one."""
    factors = [explanation.factor for explanation in changed if explanation.factor is not None]
    if factors:
        verb = "fits" if len(factors) == 1 else "fit"
        yield f"{len(factors):,} {verb} {_AT_FACTOR.format(factors[0])}"


def _nothing_shared(total: str, missing: Sequence[str], added: Sequence[str]) -> str:
    if not missing and not added:
        return "a and b share nothing: both are empty"
    total_of_b = counted(len(added), "tensor")
    if not missing or not added:
        return f"a and b share nothing: a has {total}, b {total_of_b}"
    counts = f"{total} of a and the {total_of_b} of b"
    return f"a and b share nothing: no name, and no numbers were found, of the {counts}"


def _be(items: Sequence[object]) -> str:
    return "is" if len(items) == 1 else "are"


def _listed(texts: Sequence[str]) -> str:
    """List the first of some texts."""
    if len(texts) <= _MOST_NAMES:
        return ", ".join(texts)
    return f"{', '.join(texts[:_MOST_NAMES])} and {len(texts) - _MOST_NAMES:,} more"


def _summary(explained: Sequence[Explanation], *, is_all: bool) -> str:
    facts = [(e.offset, e.scale, e.heads) for e in explained]
    groups = Counter(
        cause_text(explanation.cause, *[nan if number is None else number for number in numbers])
        for explanation, numbers in zip(explained, facts, strict=True)
    )
    equal = groups.pop("equal", 0)
    count = len(explained)
    subject = f"all {counted(count, 'tensor')}" if is_all else f"{count:,}"
    verb = _be(explained)
    if is_all and count == 1:
        subject = "the only tensor"
    if not groups:
        return f"{subject} {verb} equal"
    changes = [f"{n:,} {text}" for text, n in groups.most_common(_MOST_KINDS)]
    others_count = sum(groups.values()) - sum(n for _, n in groups.most_common(_MOST_KINDS))
    if others_count:
        changes.append(f"{others_count:,} of other causes")
    if equal:
        changes.append(f"{equal:,} equal as {'it is' if equal == 1 else 'they are'}")
    keeps = all(_KEEPING.issuperset(explanation.causes) for explanation in explained)
    verdict = "equal after" if keeps else "explained"
    return f"{subject} {verb} {verdict}: {', '.join(changes)}"
