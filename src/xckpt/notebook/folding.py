"""Folding of tensor names into a few patterns.

A deep model repeats its modules, so that ten lines describe the names of 25,000 tensors::

    model.layers.{0..63}.mlp.experts.{0..255}.{gate,up,down}_proj.weight   x 49,152

Two steps make a pattern:

1. Collect the numbers of modules in sets of indices, ``{0..63}`` or ``{0..2,5}``. Tensors that
   differ only in these numbers are a family.
2. Unite families that differ in one word, and have the same sets of indices and number of tensors:
   ``{q,k,v,o}_proj``.

All tensors of a pattern have the same shape, element type and way of storing, so that a pattern
never mixes a vocabulary with a width, or weights with biases.

In a pattern, braces that are part of a name, and commas inside them, have a backslash; ``…`` in
braces stands for omitted members, and ``=`` for the number in the word before, as Keras repeats the
names of its layers: ``conv1d_{0..9}/conv1d_{=}/kernel``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from math import prod
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from xckpt.formatting import columns, printable, shortened
from xckpt.structure import PARAMETERS, Role, Structure
from xckpt.structure.forms import forms_of
from xckpt.structure.numbering import is_index, strip_separator
from xckpt.tensor_rows import TIED, Row

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

_LONGEST_TEXT = 120
_MOST_MEMBERS = 6
_LONGEST_MEMBERS = 48
_LONGEST_LISTED_RUN = 2
_DEEPEST_MERGE = 16
_JOINTS = "_-:/."
_NUMBER = re.compile(r"([0-9]+)")
_NUMBERED = re.compile(r"[./]?(.*[^0-9])?([0-9]+)", re.DOTALL)


class _Same(str):
    """A word that has the number of the word before it."""

    __slots__ = ("word",)
    #: The word as it is spelled.
    word: str


# A piece of a name, the alternatives of a united piece, or the indices of a module as digits.
_Component = str | tuple[str, ...] | frozenset[str]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Tensors with similar names, and their totals."""

    text: str  # the names in short, printable, at most 120 columns
    count: int
    grid: int  # number of names that the braces stand for; above `count` if some are missing
    shape: tuple[int, ...]
    dtype: str
    storage: str
    nbytes: int
    size: int
    first: str  # the name of the first tensor
    parameters: int = 0  # trainable elements, without tied tensors


@dataclass(slots=True)
class Family:
    """Tensors of one kind whose names differ only in indices, or several such families united."""

    components: tuple[_Component, ...]
    dtype: str
    shape: tuple[int, ...]
    storage: str
    first: str = ""  # the name of the first tensor, and its place
    place: int = 0
    count: int = 0
    nbytes: int = 0
    parameters: int = 0
    places: list[int] = field(default_factory=list)  # of all rows
    role: Role | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.count * Row("", self.dtype, self.shape, 0).size

    @property
    def template(self) -> tuple[str | None, ...]:
        """The pieces of the names, None for indices."""
        return tuple([part if isinstance(part, str) else None for part in self.components])

    @property
    def indices(self) -> list[frozenset[str]]:
        """The sets of indices, in the order of the template."""
        return [part for part in self.components if isinstance(part, frozenset)]

    def pattern(self) -> Pattern:
        """Return the pattern of the family."""
        return Pattern(
            text=_text(self.components),
            count=self.count,
            grid=prod([1 if isinstance(part, str) else len(part) for part in self.components]),
            shape=self.shape,
            dtype=self.dtype,
            storage=self.storage,
            nbytes=self.nbytes,
            size=self.size,
            first=self.first,
            parameters=self.parameters,
        )


def fold(rows: Iterable[Row]) -> list[Pattern]:
    """Fold tensors into patterns."""
    return [family.pattern() for family in united(families_of(rows))]


def fold_names(names: Iterable[str]) -> list[str]:
    """Return the texts of the patterns of names."""
    return [pattern.text for pattern in fold(Row(name, "", (), 0) for name in names)]


def one_by_one(rows: Iterable[Row]) -> list[Pattern]:
    """Return a pattern for each tensor."""
    return [family.pattern() for row in rows for family in families_of([row])]


def ascending(names: Sequence[str]) -> list[int]:
    """Return positions that sort names by their numbers, and keep the order of words in the file.

    ``h.2`` comes before ``h.10``.
    """
    # Names are split into texts and numbers. A text ranks by its first occurrence after the same
    # texts.
    ranks: dict[tuple[int, str], int] = {}
    keys = []
    for name in names:
        key, rank = [], -1
        for position, piece in enumerate(_NUMBER.split(name)):
            if position % 2:
                # Without leading zeros, the longer number is the larger one.
                number = piece.lstrip("0")
                key.append((len(number), number))
            else:
                rank = ranks.setdefault((rank, piece), len(ranks))
                key.append((rank, ""))
        keys.append(key)
    return sorted(range(len(names)), key=keys.__getitem__)


def families_of(rows: Iterable[Row], structure: Structure | None = None) -> list[Family]:
    """Group tensors of one kind whose names differ only in the numbers of their modules.

    With the structure of the tensors, families have one role each, and their parameters counted.
    """
    rows = list(rows)
    columns: Any = list(zip(*rows, strict=True)) or [()] * len(Row._fields)
    names, dtypes, shapes, nbytes, storages, _ = columns
    roles: Iterable[str | None] = repeat(None)
    packed: Iterable[int | None] = repeat(None)
    if structure is not None and structure.special_roles:
        special = structure.special_roles
        roles = [special[name].value if name in special else None for name in names]
    if structure is not None and structure.packed:
        packed = map(structure.packed.get, names)
    families = []
    for form in forms_of(names, zip(dtypes, shapes, storages, roles, packed, strict=False)):
        dtype, shape, storage, _, elements = form.kind
        role = None if structure is None else structure.role(names[form.places[0]])
        indices = iter(form.indices)
        pieces = [frozenset(next(indices)) if p is None else p for p in form.template]
        place, count = form.places[0], len(form.places)
        size = sum([nbytes[place] for place in form.places])
        family = Family(tuple(pieces), dtype, shape, storage, names[place], place, count, size)
        family.places, family.role = form.places, role
        if role in PARAMETERS and TIED not in storage.split():
            family.parameters = family.size if elements is None else count * elements
        families.append(family)
    return families


def united(families: Sequence[Family]) -> list[Family]:
    """Unite families that differ in one word, from the last component to the first."""
    families = list(families)
    for family in families:
        family.components = _with_repeated_numbers(family.components)
    depth = max([len(family.components) for family in families], default=0)
    for position in reversed(range(min(depth, _DEEPEST_MERGE))):
        groups: dict[Hashable, list[Family]] = {}
        for family in families:
            groups.setdefault(_all_but(position, family), []).append(family)
        for first, *siblings in groups.values():
            if siblings:
                words = [str(family.components[position]) for family in (first, *siblings)]
                before, after = first.components[:position], first.components[position + 1 :]
                first.components = (*before, tuple(words), *after)
            for sibling in siblings:
                first.count += sibling.count
                first.places += sibling.places
                first.nbytes += sibling.nbytes
                first.parameters += sibling.parameters
        families = [group[0] for group in groups.values()]
    for family in families:
        family.components = _with_spelled_numbers(family.components)
    return families


def _with_repeated_numbers(components: tuple[_Component, ...]) -> tuple[_Component, ...]:
    """Replace numbers that repeat the number of the word before."""
    linked: list[_Component] = list(components)
    for position, (before, word) in enumerate(pairwise(components), 1):
        if not (isinstance(before, str) and isinstance(word, str)):
            continue
        match = _NUMBERED.fullmatch(before)
        is_linked = isinstance(linked[position - 1], _Same)
        if match is None or not match[1] or is_linked:
            continue
        separator = word[: len(word) - len(strip_separator(word))]
        rest = word.removeprefix(f"{separator}{match[1]}{match[2]}")
        if len(rest) < len(word) and not rest[:1].isdigit():
            same = _Same(f"{_literal(separator + match[1])}{{=}}{_literal(rest)}")
            same.word = word
            linked[position] = same
    return tuple(linked)


def _with_spelled_numbers(components: tuple[_Component, ...]) -> tuple[_Component, ...]:
    """Return components with words in full that repeat a single number."""
    spelled = [
        part.word if isinstance(part, _Same) and isinstance(components[position - 1], str) else part
        for position, part in enumerate(components)
    ]
    return tuple(spelled)


def _all_but(position: int, family: Family) -> Hashable:
    """Return a key that families share if they can be united at a position; else a unique key."""
    components = family.components
    if position >= len(components) or not isinstance(word := components[position], str):
        return id(family)
    if isinstance(word, _Same):
        return id(family)
    mark = None
    if len(components) == 1:  # without other words, unite only names such as w1, w2, w3, or 4_q
        has_one = len(_NUMBER.findall(word)) == 1
        mark = word.rstrip("0123456789") if word[-1:].isdigit() else word
        mark = _NUMBER.sub("0", word) if has_one else mark
    key = family.dtype, family.storage, family.shape, family.count
    return *key, *components[:position], mark, *components[position + 1 :]


def indices_text(indices: Iterable[str]) -> str:
    """Write indices in short, as in a pattern."""
    return _component_text(frozenset(indices))


def numbered_path(family: Family) -> str:
    """Return the pattern up to the first indices: ``model.layers``; empty without indices."""
    position = next((n for n, p in enumerate(family.components) if isinstance(p, frozenset)), 0)
    return _text(family.components[:position]).rstrip(_JOINTS) if position else ""


def phrase(family: Family, *, is_short: bool = False) -> str:
    """Write the pattern of several modules in words: ``mlp of model.layers 24 to 31``.

    `is_short` leaves out the path to the modules: ``mlp of layers 24 to 31``.
    """
    path = numbered_path(family)
    position = next((n for n, p in enumerate(family.components) if isinstance(p, frozenset)), 0)
    numbers = family.components[position]
    if not path or isinstance(numbers, str) or len(numbers) == 1:
        return _text(family.components)
    ranges = _ranges(numbers)
    is_listed = len(ranges) <= _MOST_MEMBERS
    listed = ", ".join(ranges).replace("..", " to ") if is_listed else _braced(ranges)
    modules = re.split(r"[./]", path)[-1] if is_short and "{" not in path else path
    inner = _text(family.components[position + 1 :]) if family.components[position + 1 :] else ""
    inner = strip_separator(inner)
    return f"{inner} of {modules} {listed}" if inner else f"{modules} {listed}"


def _text(components: Sequence[_Component]) -> str:
    parts = list(map(_component_text, components))
    text = "".join(parts) or '""'
    if columns(text) <= _LONGEST_TEXT:
        return text
    # Omit whole words, because a cut through braces turns "{0..63}.{0..63}" into "{0…63}".
    words: list[str] = []
    for part in parts:
        if not words or part.startswith((".", "/")):
            words.append(part)
        else:
            words[-1] += part
    for count in range(min(len(words) - 1, _LONGEST_TEXT), 1, -1):
        text = "".join([*words[: count // 2], ".…", *words[count // 2 - count :]])
        if columns(text) <= _LONGEST_TEXT:
            return text
    return shortened(text, _LONGEST_TEXT)


def _component_text(component: _Component) -> str:
    if isinstance(component, str):
        return str(component) if isinstance(component, _Same) else _literal(component)
    if isinstance(component, frozenset):
        return str(*component) if len(component) == 1 else _braced(_ranges(component))
    bare = list(map(strip_separator, component))
    fronts = {word.removesuffix(text) for word, text in zip(component, bare, strict=True)}
    front = fronts.pop() if len(fronts) == 1 else ""
    head, members, tail = _stripped(bare if front else component)
    listed = _ranges(members) if all(map(is_index, members)) else members
    return front + _literal(head) + _braced(listed) + _literal(tail)


def _literal(word: str, also: str = "") -> str:
    """Escape characters of a word that have a meaning in patterns."""
    if word.isidentifier():
        return word
    for special in "\\{}" + also:
        word = word.replace(special, "\\" + special)
    return printable(word)


def _stripped(words: Sequence[str]) -> tuple[str, Sequence[str], str]:
    """Split words into a shared head, the parts that differ, and a shared tail."""
    ends = _shared_start([word[::-1] for word in words])[::-1]
    joints = [at for joint in _JOINTS if (at := ends.find(joint)) >= 0]
    tail = ends[min(joints) :] if joints else ""
    members = [word.removesuffix(tail) for word in words]
    if not all(members):
        tail, members = "", list(words)
    head = _common_head(members)
    return head, [member[len(head) :] for member in members], tail


def _shared_start(words: Sequence[str]) -> str:
    return commonprefix(list(words))  # noqa: RUF071  these are not paths


def _common_head(words: Sequence[str]) -> str:
    head = _shared_start(words)
    stem = head.rstrip("0123456789")
    if all(word[len(stem) :].isdigit() for word in words):
        return stem
    head = head[: max(map(head.rfind, _JOINTS)) + 1]
    return "" if head in words else head


def _ranges(numbers: Iterable[str]) -> list[str]:
    """List indices as they are written, with runs of three or more as ``first..last``."""
    runs: list[list[str]] = []
    for text in sorted(numbers, key=lambda text: (int(text), len(text))):
        first = runs[-1][0] if runs else ""
        # Leading zeros must be unambiguous: 08..11 and 8..11 are, 08..100 is not.
        is_clear = len(first) == len(text) or first[:1] != "0" or first == "0"
        if runs and int(text) == int(runs[-1][-1]) + 1 and is_clear:
            runs[-1].append(text)
        else:
            runs.append([text])
    listed: list[str] = []
    for run in runs:
        listed += run if len(run) <= _LONGEST_LISTED_RUN else [f"{run[0]}..{run[-1]}"]
    return listed


def _braced(members: Sequence[str]) -> str:
    """Write members in braces; only the first few and the last if they are many or long."""
    count = len(members) if len(members) <= _MOST_MEMBERS else 3
    while count > 1 and sum(map(len, members[:count])) > _LONGEST_MEMBERS:
        count -= 1
    if count < len(members) - 1:
        members = [*members[:count], "…", members[-1]]
    return "{" + ",".join([_literal(member, ",") for member in members]) + "}"


# --- codes of quantised weights ------------------------------------------------------------------

# If a format defines how codes are decoded, its tensors have the values of the weights. Otherwise
# the summary marks codes, because statistics of them do not describe the weights.

#: The word for codes in `Row.storage` and in patterns.
CODES = "codes"


def marked(rows: Sequence[Row], structure: Structure) -> list[Row]:
    """Return rows with the word for codes in the storage of codes."""
    codes = structure.scales
    if not codes:
        return list(rows)
    return [
        row._replace(storage=_storage(row.storage)) if row.name in codes else row for row in rows
    ]


def _storage(storage: str) -> str:
    return storage if CODES in storage.split() else f"{CODES} {storage}".rstrip()
