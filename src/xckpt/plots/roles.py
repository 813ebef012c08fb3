"""Which tensors a picture is of, what they have in common, and what is said of each of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, product, starmap, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.datasets.tensors import OpenTensors
from xckpt.labels import scales_of_codes, suggest_filters
from xckpt.labels.numbering import (
    drop_indices,
    parse_name,
    split_leaf,
    split_name,
    split_words,
    strip_separator,
)
from xckpt.notebook.folding import Row, families_of, fold, united
from xckpt.notebook.formatting import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from xckpt.labels import TensorFilter

#: More lines than this cannot be told apart, and become bands.
MOST_LINES = 12

_LONGEST_LABEL = 48


# --- which tensors -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tensors of a picture: all of them are weights, or all of them are codes."""

    tensors: OpenTensors
    names: list[str]
    #: The scales of codes, if these are drawn.
    scales: dict[str, str]
    #: What is left out.
    note: str

    @property
    def ndims(self) -> dict[str, int]:
        """How many axes each tensor has."""
        return {row.name: len(row.shape) for row in self.tensors.rows}

    @property
    def of_codes(self) -> str:
        """What is said of numbers that are none of weights."""
        return " of codes" if self.scales else ""

    @property
    def codes_note(self) -> str:
        """That the numbers are codes, if they are."""
        return codes_drawn(next(iter(self.scales.values()), None))


def choose(obj: Any, names: TensorFilter | None) -> Chosen:
    """Choose the tensors of a picture; codes are never on an axis with weights."""
    tensors = OpenTensors(obj)
    chosen = tensors.select(names)
    require_any(chosen, [row.name for row in tensors.rows], names)
    codes = codes_of(tensors)
    weights = [name for name in chosen if name not in codes]
    if not weights:
        return Chosen(tensors, chosen, {name: codes[name] for name in chosen}, "")
    return Chosen(tensors, weights, {}, codes_left_out([n for n in chosen if n in codes], codes))


def require_any(
    chosen: Collection[str], known: Collection[str], names: TensorFilter | None
) -> None:
    """Refuse names that no tensor has."""
    if not chosen and (names is None or not known):
        raise ValueError("there are no tensors")
    if not chosen:
        raise ValueError(f"no tensor is called {names!r}{suggest_filters(known, names or ())}")


def codes_of(tensors: OpenTensors) -> dict[str, str]:
    """Return the tensors that have codes, and the names of their scales."""
    return scales_of_codes({row.name: row.dtype for row in tensors.rows})


def codes_drawn(scales: str | None) -> str:
    """Say that the numbers of a picture are codes; nothing if they are not."""
    return f"codes, whose scales are in {split_leaf(scales)[2]}" if scales else ""


def codes_left_out(names: Sequence[str], scales: dict[str, str]) -> str:
    """Say that tensors of codes are not drawn; nothing if there are none."""
    if not names:
        return ""
    their = "its scales are" if len(names) == 1 else "their scales are"
    leaf = split_leaf(scales[names[0]])[2]
    return f"without {counted(len(names), 'tensor')} of codes; {their} in {leaf}"


# --- roles ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Role:
    """Tensors whose names differ in the numbers of their modules, or in little more."""

    label: str
    names: list[str]
    #: Words that all names have.
    shared: frozenset[str]

    @classmethod
    def of(cls, label: str, groups: Sequence[_Siblings]) -> Role:
        """Make a role of tensors."""
        names = [name for group in groups for name in group.names]
        every = [frozenset(split_words(group.template)) for group in groups]
        return cls(label, names, frozenset.intersection(*every))

    @property
    def bare(self) -> str:
        """The first name without numbers."""
        return drop_indices(parse_name(self.names[0]).template)

    def place(self, name: str) -> str:
        """Say which of them a tensor is: ``layer 17, expert 3``."""
        found = parse_name(name)
        places = zip(found.modules, found.indices, strict=True)
        own = [word for word in split_words(found.template) if word not in self.shared]
        # One of several is called so where it is English.
        told = [
            f"{base[:-1] if len(base) > 2 and base[-1] == 's' != base[-2] else base} {at}"
            for base, at in places
        ]
        return ", ".join([*told, *own]) or name


class _Siblings(NamedTuple):
    """Tensors whose names differ in numbers only."""

    template: tuple[str | None, ...]
    names: list[str]


def groups_of(names: Iterable[str]) -> list[_Siblings]:
    """Group tensors by their names without numbers."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(parse_name(name).template, []).append(name)
    return list(starmap(_Siblings, groups.items()))


def roles_of(
    names: Iterable[str], most: int = MOST_LINES, ndims: Mapping[str, int] | None = None
) -> tuple[str, list[Role]]:
    """Group tensors by their names without numbers; return what all share, and the roles.

    Where there are more than `most`, those are united whose names differ in one word, as the
    summary does it, and the smallest of what is left.
    """
    bundles = [[group] for group in groups_of(names)]
    if len(bundles) > most:
        bundles = _united([group for (group,) in bundles], ndims or {})
    is_cut = len(bundles) > most
    if is_cut:
        bundles.sort(key=lambda some: -sum(len(group.names) for group in some))
        rest = [group for some in bundles[most - 1 :] for group in some]
        bundles = [*bundles[: most - 1], rest]
    title, labels = title_and_labels(bundles)
    if is_cut:
        labels[-1] = "all others"
    return title, list(map(Role.of, labels, bundles))


def _united(groups: Sequence[_Siblings], ndims: Mapping[str, int]) -> list[list[_Siblings]]:
    """Unite groups whose names differ in one word, but not weights with biases or gains."""
    # A row stands for each group.
    rows = {
        Row("".join("0" if part is None else part for part in template), kind, (), 0): at
        for at, (template, names) in enumerate(groups)
        for kind in [f"{template[-1]} {ndims.get(names[0])}"]
    }
    bundles = []
    for family in united(families_of(rows)):
        pieces = ([part] if isinstance(part, str) else part for part in family.components)
        spelled = (Row("".join(name), family.dtype, (), 0) for name in product(*pieces))
        bundles.append(sorted(rows[row] for row in spelled))
    return [[groups[at] for at in some] for some in sorted(bundles)]


# --- names ---------------------------------------------------------------------------------------


def title_and_labels(bundles: Sequence[Sequence[_Siblings]]) -> tuple[str, list[str]]:
    """Return the pattern of what all names share, and that of each bundle without it.

    ``layers.{0..23}.*``, and ``attn.w`` and ``experts.{0..7}.w``; for one bundle its pattern.
    """
    if len(bundles) == 1:
        text = _label(bundles[0], 0)
        return text, [_end(text)]
    every = [group for bundle in bundles for group in bundle]
    columns = zip(*(group.template[:-1] for group in every), strict=False)
    depth = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, columns))
    labels = [_end(_label(bundle, depth)) for bundle in bundles]
    names = [name for group in every for name in group.names]
    if not depth:
        return counted(len(names), "tensor"), labels
    starred = []
    for name in names:
        rest = _inside(name, depth)
        starred.append(name.removesuffix(strip_separator(rest)) + "*")
    return _patterns(starred)[0], labels


def _label(bundle: Sequence[_Siblings], depth: int) -> str:
    """Write the pattern of names without the modules that all share; one name as it is."""
    names = [strip_separator(_inside(n, depth)) for group in bundle for n in group.names]
    if len(names) == 1:
        return names[0]
    found = _patterns(names)
    if len(found) > 1:  # as of dense layers and mixtures of experts, which are not as many
        starred = [["*" if p is None else p for p in group.template[depth:]] for group in bundle]
        found = _patterns(strip_separator("".join(pieces)) for pieces in starred)
    return " | ".join(found)


def _inside(name: str, depth: int) -> str:
    """Return a name without its first pieces."""
    return "".join(parse_name(name).pieces[depth:])


def _patterns(names: Iterable[str]) -> list[str]:
    return [pattern.text for pattern in fold(Row(name, "", (), 0) for name in names)]


def _end(text: str) -> str:
    """Leave out the outer modules of a long name."""
    starts = [0]
    for start in accumulate([len(word) + 1 for word in split_name(text)[:-1]]):
        # Not inside of a range, where two dots are, and not at one.
        short = text[start:]
        if short.count("{") == short.count("}") and not short.startswith("{"):
            starts.append(start)
    fitting = [start for start in starts[:-1] if len(text) - start <= _LONGEST_LABEL]
    start = fitting[0] if fitting else starts[-2:][0]
    return f"…{text[start:]}" if start else text


def numbers_of(name: str) -> dict[str, int]:
    """Return the numbers of the modules that a tensor is in, of equal ones the outermost."""
    found = parse_name(name)
    pairs = zip(reversed(found.modules), reversed(found.indices), strict=True)
    return {base: int(index) for base, index in pairs}


def outermost(names: Iterable[str]) -> str | None:
    """Return the module that most tensors are numbered in first."""
    first = Counter(next(iter(parse_name(name).modules), None) for name in names)
    first.pop(None, None)
    return first.most_common(1)[0][0] if first else None
