"""What is said of a tensor, and of all of them in one sentence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xckpt.errors import some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.statistics.explaining.relations import Relation
    from xckpt.statistics.pairs import Match
    from xckpt.statistics.readers import Reader

#: What may be said of a tensor; several are joined by "+", in this order.
CAUSES = (
    *("renamed", "fused", "split", "transposed", "rope_permuted", "rows_permuted"),
    *("padded", "cut", "offset", "scaled", "pruned", "low_rank", "quantised", "rounded"),
    *("equal", "changed", "only_a", "only_b"),
)
#: The columns that explain; which of them are texts.
COLUMNS = (
    *("cause", "explanation", "verified", "offset", "scale", "rank", "heads"),
    "other_names",
)
TEXTS = frozenset({"cause", "explanation", "other_names"})
_MOST_NAMES = 4
_MOST_KINDS = 8
_KEEPING = frozenset({*CAUSES[: CAUSES.index("padded")], "padded", "offset", "equal"})
_UNEXPLAINED = frozenset({"changed", "only_a", "only_b"})


@dataclass(frozen=True, slots=True)
class Case:
    """A tensor of either side, or two of one name, and how much they differ."""

    match: Match
    #: One of `STATUSES`; empty if it was not compared.
    status: str
    measures: dict[str, float]

    @property
    def other_name(self) -> str:
        """The name of the other tensor of a pair, if it is another one."""
        partner = self.match.partner
        return partner.name if partner and partner.rule != "name" else ""

    @property
    def alone(self) -> Reader | None:
        """The tensor, if only one side has it."""
        return {"only_a": self.match.ours, "only_b": self.match.theirs}.get(self.status)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a tensor differs from the one it is compared with."""

    causes: tuple[str, ...]
    text: str
    #: Whether it holds for every element.
    verified: bool = True
    offset: float | None = None
    scale: float | None = None
    rank: int | None = None
    heads: int | None = None
    #: Of the tensors on the other side.
    other_names: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """Return the causes as one word."""
        return "+".join(sorted(self.causes, key=CAUSES.index))

    @property
    def explanation(self) -> str:
        """Return the sentence."""
        return self.text if self.verified else f"looks like: {self.text}"

    def after(self, causes: Sequence[str], text: str, **more: Any) -> Explanation:
        """Return an explanation with something that was done before."""
        kept = tuple(each for each in self.causes if each != "equal")
        told = text if not kept else f"{text}; {self.text}"
        return replace(self, causes=(*causes, *kept), text=told, **more)


def quoted(names: Sequence[str]) -> str:
    """Write the first of the names of some tensors."""
    return some(names, "", _MOST_NAMES)


def related(relation: Relation, count: int, held: int, zeros: int) -> Explanation:
    """Write what relates the elements of two tensors."""
    of, to = ("b", "a") if relation.backwards else ("a", "b")
    transform = relation.transform
    causes: list[str] = []
    told = of
    if transform.offset:
        causes.append("offset")
        told = f"{of} {'-' if transform.offset < 0 else '+'} {abs(transform.offset):.9g}"
    if transform.scale != 1.0:
        causes.append("scaled")
        told = f"{transform.scale:.9g} * {of}"
    types = list(transform.types)
    if causes:
        # What is computed in need not be said where it is not the coarsest type.
        types = [name for name in types if name not in {"float32", "float64"}] or types[:1]
    if relation.rounds and types:
        causes.append("rounded")
        told += f" rounded to {' and then to '.join(types)}"
    if relation.masked:
        causes.append("pruned")
        share = zeros / max(count, 1)
        told += f" where {to} is not 0, which {_percent(share)} of its elements are"
    if relation.block:
        causes.append("quantised")
        told = (
            f"the nearest of evenly spaced levels to {of}, in blocks of {relation.block} elements"
        )
    text = f"{to} is {told}"
    if held < count:
        text += f" for {_percent(held / count)} of the elements"
    return Explanation(
        tuple(causes),
        text,
        held == count,
        offset=transform.offset or None,
        scale=transform.scale if transform.scale != 1.0 else None,
    )


def heads_of(count: int) -> str:
    """Write how many heads there are."""
    return "1 head" if count == 1 else f"{count:,} heads"


def _percent(share: float) -> str:
    text = f"{100 * share:.4g}"
    if text == "100" and share < 1:
        text = "more than 99.99"
    return f"{text} %"


def changed(measures: dict[str, float], shapes: str = "") -> Explanation:
    """Write how much a tensor changed for which there is no other cause."""
    if shapes:
        return Explanation(("changed",), f"the shapes {shapes} differ, and the numbers do")
    facts = [f"{_percent(1 - measures['equal_fraction'])} of the elements differ"]
    facts += [f"{name} {measures[name]:.4g}" for name in ("rel_l2", "cosine")]
    return Explanation(("changed",), ", ".join(facts))


def explained_attrs(found: Sequence[Explanation | None], *, is_stacked: bool) -> dict[str, Any]:
    """Return the attributes of a variable: one value, or a list for stacked tensors."""
    told: dict[str, Any] = {}
    for column in COLUMNS:
        values = [_value(one, column) for one in found]
        if column in _ALWAYS or any(value == value and value != "" for value in values):  # noqa: PLR0124  NaN
            told[column] = values if is_stacked else values[0]
    return told


def _value(one: Explanation | None, column: str) -> Any:
    """Return what attributes of files can hold: text, a number, NaN for none."""
    value = "" if one is None and column in TEXTS else getattr(one, column, None)
    if column == "other_names":
        return ", ".join(value or ())
    if value is None:
        return float("nan")
    return int(value) if column == "verified" else value


_ALWAYS = frozenset(COLUMNS[:3])


# --- all tensors --------------------------------------------------------------------------------


def sentence(cases: Sequence[Case], found: Sequence[Explanation | None]) -> str:
    """Say in one sentence what became of the tensors of `a`, and what only `b` has."""
    told = [(case, one) for case, one in zip(cases, found, strict=True) if one is not None]
    ours = [one for case, one in told if case.status != "only_b"]
    theirs = [one for case, one in told if case.status == "only_b"]
    if not ours or not (theirs or any(e.cause != "only_a" for e in ours)):
        return f"a and b share nothing: a has {_tensors(len(ours))} and b {_tensors(len(theirs))}"
    groups = Counter(_short(each) for each in ours)
    equal = groups.pop("equal", 0)
    facts = [(text, n) for text, n in groups.most_common() if text not in _UNEXPLAINED]
    changes = [f"{n:,} {text}" for text, n in facts[:_MOST_KINDS]]
    if len(facts) > _MOST_KINDS:
        changes.append(f"{sum(n for _, n in facts[_MOST_KINDS:]):,} of other causes")
    open_ = {cause: groups[cause] for cause in ("changed", "only_a") if groups[cause]}
    added = sum(each.cause == "only_b" for each in theirs)
    explained = len(ours) - sum(open_.values())
    if not explained and not changes and set(open_) == {"only_a"} and added == len(theirs):
        return (
            f"a and b share nothing: no name and no numbers of the {_tensors(len(ours))} of a "
            f"and the {_tensors(len(theirs))} of b"
        )
    if not changes and not open_:
        text = f"all {_tensors(len(ours))} are equal"
    elif not open_:
        # Every number is there, unless something was done to the numbers.
        kept = all(_KEEPING.issuperset(each.causes) for each in ours)
        how = "equal after" if kept else "explained"
        counts = [*changes, f"{equal:,} equal as they are"] if equal else changes
        text = f"all {_tensors(len(ours))} are {how}: {', '.join(counts)}"
    else:
        counts = ([f"{equal:,} equal"] if equal else []) + changes
        words = {"changed": "changed", "only_a": "only in a"}
        counts += [f"{count:,} {words[cause]}" for cause, count in open_.items()]
        text = f"{_tensors(len(ours))}: {', '.join(counts)}"
    return f"{text}; {added:,} only in b" if added else text


def _tensors(count: int) -> str:
    return f"{count:,} tensor" if count == 1 else f"{count:,} tensors"


def _short(one: Explanation) -> str:
    """Say why one tensor differs, alike for those that differ alike."""
    if one.cause in _UNEXPLAINED or one.cause == "equal":
        return one.cause
    facts = []
    if one.offset is not None:
        facts.append(f"{one.offset:+.4g}")
    if one.scale is not None:
        facts.append(f"* {one.scale:.4g}")
    if one.heads is not None:
        facts.append(heads_of(one.heads))
    if one.rank is not None:
        facts.append(f"rank {one.rank}")
    if not one.verified:
        facts.append("likely")
    return f"{one.cause} ({', '.join(facts)})" if facts else one.cause
