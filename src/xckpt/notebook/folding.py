"""Folding of tensor names into a few patterns.

A deep model repeats its modules, so ten lines describe the names of 25,000 tensors::

    model.layers.{0..63}.mlp.experts.{0..255}.{gate,up,down}_proj.weight   x 49,152

Two steps make a pattern:

1. The numbers of modules become sets of indices, ``{0..63}`` or ``{0..2,5}``. Rows that differ only
   in these numbers are a family.
2. Families that differ in one word and have the same index sets and number of tensors are united:
   ``{q,k,v,o}_proj``.

All tensors of a pattern have the same shape, element type and way of storing, so that a pattern
never mixes a vocabulary with a width, or weights with biases.

In a pattern, braces that are part of a name, and commas inside them, have a backslash; ``…`` in
braces stands for omitted members.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from xckpt.elements import ELEMENT_TYPES
from xckpt.formatting import columns, printable, shortened
from xckpt.labels import scales_of_codes
from xckpt.labels.numbering import is_index, parse_name, strip_separator
from xckpt.labels.roles import PARAMETERS, Role, roles_of
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
_ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")

# A piece of a name, the alternatives of a merged one, or the indices (in digits) of a module.
_Component = str | tuple[str, ...] | frozenset[str]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Tensors with similar names, and what they have in total."""

    text: str  # the names in short, printable, at most 120 columns
    count: int
    grid: int  # how many names the braces stand for: more than `count` where some are missing
    shape: tuple[int, ...]
    dtype: str
    storage: str
    nbytes: int
    size: int
    first: str  # the name of the first tensor
    parameters: int = 0  # trainable elements, tied ones left out


@dataclass(slots=True)
class Family:
    """Tensors of one kind whose names differ in whole numbers only, or several such families."""

    components: tuple[_Component, ...]
    dtype: str
    shape: tuple[int, ...]
    storage: str
    first: str = ""  # the name of the first tensor, and its place
    place: int = 0
    count: int = 0
    nbytes: int = 0
    parameters: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.count * Row("", self.dtype, self.shape, 0).size

    @property
    def template(self) -> tuple[str | None, ...]:
        """The pieces of the names, None where an index stands."""
        return tuple([part if isinstance(part, str) else None for part in self.components])

    @property
    def indices(self) -> list[frozenset[str]]:
        """The indices that stand in each of these places."""
        return [part for part in self.components if isinstance(part, frozenset)]

    def pattern(self) -> Pattern:
        """Return what a summary shows."""
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


def one_by_one(rows: Iterable[Row]) -> list[Pattern]:
    """Return a pattern for each tensor."""
    return [family.pattern() for row in rows for family in families_of([row])]


def ascending(names: Sequence[str]) -> list[int]:
    """Return the order in which numbers ascend, ``h.2`` before ``h.10``; else that of the file."""
    # A name is texts with numbers between them. Texts rank by where they come first after the
    # same texts, so that words keep the order of the file.
    ranks: dict[tuple[int, str], int] = {}
    keys = []
    for name in names:
        key, rank = [], -1
        for at, piece in enumerate(_NUMBER.split(name)):
            if at % 2:
                # The longer of two numbers without zeros in front is the larger one.
                number = piece.lstrip("0")
                key.append((len(number), number))
            else:
                rank = ranks.setdefault((rank, piece), len(ranks))
                key.append((rank, ""))
        keys.append(key)
    return sorted(range(len(names)), key=keys.__getitem__)


def families_of(rows: Iterable[Row]) -> list[Family]:
    """Group tensors of one kind whose names differ in the numbers of their modules only."""
    columns: Any = list(zip(*rows, strict=True)) or [()] * len(Row._fields)
    names, dtypes, shapes, nbytes, storages = columns
    # With zeros for all digits the names of a deep model are some dozens, and their components
    # begin in the same places: nothing is split for each of 100,000 tensors.
    alike: dict[Hashable, list[int]] = defaultdict(list)
    # All at once, as this takes longer than anything else; a name may have the separator in it.
    masked = _with_zeros("\n".join(names)).split("\n")
    if len(masked) != len(names):
        masked = list(map(_with_zeros, names))
    for place, kind in enumerate(zip(masked, dtypes, shapes, storages, strict=True)):
        alike[kind].append(place)
    families: dict[tuple[Any, ...], Family] = {}
    indices: dict[tuple[Any, ...], list[set[str]]] = {}
    for places in alike.values():
        cuts, spelled = _cut(names[places[0]])
        # By their words with digits, such as `w1` and `w2`.
        words: dict[Hashable, list[int]] = defaultdict(list)
        for place in places if spelled else ():
            words[tuple([names[place][cut] for cut in spelled])].append(place)
        for some in words.values() or [places]:
            first = names[some[0]]
            template = parse_name(first).template
            of = (dtypes[some[0]], shapes[some[0]], storages[some[0]])
            key = (template, *of)
            if key not in families:
                families[key] = Family((), *of, first, some[0])
                indices[key] = [set() for _ in cuts]
            family = families[key]
            family.count += len(some)
            family.nbytes += sum([nbytes[place] for place in some])
            spellings = [names[place] for place in some] if cuts else []
            for cut, values in zip(cuts, indices[key], strict=True):
                values.update(map(itemgetter(cut), spellings))
    for key, family in families.items():
        found = map(frozenset, indices[key])
        family.components = tuple([next(found) if part is None else part for part in key[0]])
    return sorted(families.values(), key=lambda family: family.place)


def _with_zeros(text: str) -> str:
    # UTF-8, as translating a str takes ten times as long.
    encoded = text.encode("utf-8", "surrogatepass").translate(_ANY_DIGIT)
    return encoded.decode("utf-8", "surrogatepass")


def _cut(name: str) -> tuple[list[slice], list[slice]]:
    """Return where indices stand, and pieces that have digits otherwise."""
    cuts, spelled, start = [], [], 0
    found = parse_name(name)
    for part, piece in zip(found.template, found.pieces, strict=True):
        cut = slice(start, start + len(piece))
        if part is None:
            cuts.append(cut)
        elif _NUMBER.search(piece):
            spelled.append(cut)
        start += len(piece)
    return cuts, spelled


def united(families: Sequence[Family]) -> list[Family]:
    """Unite families that differ in one word, from the last component to the first."""
    families = list(families)
    depth = max([len(family.components) for family in families], default=0)
    for position in reversed(range(min(depth, _DEEPEST_MERGE))):
        groups: dict[Hashable, list[Family]] = {}
        for family in families:
            groups.setdefault(_all_but(position, family), []).append(family)
        for first, *others in groups.values():
            if others:
                words = [str(family.components[position]) for family in (first, *others)]
                before, after = first.components[:position], first.components[position + 1 :]
                first.components = (*before, tuple(words), *after)
            for other in others:
                first.count += other.count
                first.nbytes += other.nbytes
                first.parameters += other.parameters
        families = [group[0] for group in groups.values()]
    return families


def _all_but(position: int, family: Family) -> Hashable:
    """Return what families must share to be united at a position; unique where they cannot be."""
    components = family.components
    if position >= len(components) or not isinstance(word := components[position], str):
        return id(family)
    mark = None
    if len(components) == 1:  # nothing else is shared, so that only w1, w2, w3 are alike
        mark = word.rstrip("0123456789") if word[-1:].isdigit() else word
    return (
        *(family.dtype, family.storage, family.shape, family.count),
        *(*components[:position], mark, *components[position + 1 :]),
    )


def indices_text(indices: Iterable[str]) -> str:
    """Write whole numbers in short, as in a pattern."""
    return _component_text(frozenset(indices))


def _text(components: Sequence[_Component]) -> str:
    parts = list(map(_component_text, components))
    text = "".join(parts) or '""'
    if columns(text) <= _LONGEST_TEXT:
        return text
    # Cutting through braces would turn "{0..63}.{0..63}" into "{0…63}": leave out whole words.
    words: list[str] = []
    for part in parts:
        if not words or part.startswith((".", "/")):
            words.append(part)
        else:
            words[-1] += part
    for kept in range(min(len(words) - 1, _LONGEST_TEXT), 1, -1):
        text = "".join([*words[: kept // 2], ".…", *words[kept // 2 - kept :]])
        if columns(text) <= _LONGEST_TEXT:
            return text
    return shortened(text, _LONGEST_TEXT)


def _component_text(component: _Component) -> str:
    if isinstance(component, str):
        return _literal(component)
    if isinstance(component, frozenset):
        return str(*component) if len(component) == 1 else _braced(_ranges(component))
    bare = list(map(strip_separator, component))
    fronts = {word.removesuffix(text) for word, text in zip(component, bare, strict=True)}
    front = fronts.pop() if len(fronts) == 1 else ""
    head, members, tail = _stripped(bare if front else component)
    listed = _ranges(members) if all(map(is_index, members)) else members
    return front + _literal(head) + _braced(listed) + _literal(tail)


def _literal(word: str, also: str = "") -> str:
    """Escape what a reader could take for the notation of a pattern."""
    if word.isidentifier():
        return word
    for special in "\\{}" + also:
        word = word.replace(special, "\\" + special)
    return printable(word)


def _stripped(words: Sequence[str]) -> tuple[str, Sequence[str], str]:
    """Split words into the head and tail that all share and what differs between them."""
    ends = _shared_start([word[::-1] for word in words])[::-1]
    joints = [at for joint in _JOINTS if (at := ends.find(joint)) >= 0]
    tail = ends[min(joints) :] if joints else ""
    members = [word.removesuffix(tail) for word in words]
    if not all(members):
        tail, members = "", list(words)
    head = _common_head(members)
    return head, [member[len(head) :] for member in members], tail


def _shared_start(words: Sequence[str]) -> str:
    return commonprefix(list(words))  # noqa: RUF071 (character by character is what is meant)


def _common_head(words: Sequence[str]) -> str:
    head = _shared_start(words)
    stem = head.rstrip("0123456789")
    if all(word[len(stem) :].isdigit() for word in words):
        return stem
    head = head[: max(map(head.rfind, _JOINTS)) + 1]
    return "" if head in words else head


def _ranges(numbers: Iterable[str]) -> list[str]:
    """List whole numbers as they are written, with runs of three or more as ``first..last``."""
    runs: list[list[str]] = []
    for text in sorted(numbers, key=lambda text: (int(text), len(text))):
        first = runs[-1][0] if runs else ""
        # A range must be clear about leading zeros: 08..11 and 8..11 are, 08..100 is not.
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
    """List members, of many or long ones only the first few and the last."""
    kept = len(members) if len(members) <= _MOST_MEMBERS else 3
    while kept > 1 and sum(map(len, members[:kept])) > _LONGEST_MEMBERS:
        kept -= 1
    if kept < len(members) - 1:
        members = [*members[:kept], "…", members[-1]]
    return "{" + ",".join([_literal(member, ",") for member in members]) + "}"


# --- roles ---------------------------------------------------------------------------------------


def count_parameters(families: Sequence[Family]) -> list[Role]:
    """Count the trainable elements of each family, and return its role."""
    by_name: dict[str, list[int]] = {}
    for place, family in enumerate(families):
        by_name.setdefault(_name_with_zeros(family), []).append(place)
    # Of several types under one name, the smallest has the codes that scales belong to.
    roles = [Role.WEIGHT] * len(families)
    smallest = {n: min(places, key=lambda p: _bits(families[p])) for n, places in by_name.items()}
    named = [(name, families[p].dtype, families[p].shape) for name, p in smallest.items()]
    for name, role in roles_of(named).items():
        for place in by_name[name]:
            family, is_smallest = families[place], place == smallest[name]
            alone = (name, family.dtype, family.shape)
            roles[place] = role if is_smallest else roles_of([alone])[name]
    for family, role in zip(families, roles, strict=True):
        is_counted = role in PARAMETERS and TIED not in family.storage.split()
        family.parameters = family.size if is_counted else 0
    return roles


def _name_with_zeros(family: Family) -> str:
    return "".join(["0" if part is None else part for part in family.template])


def _bits(family: Family) -> int:
    element = ELEMENT_TYPES.get(family.dtype)
    return 64 if element is None else element.bits


# --- codes of quantised weights ------------------------------------------------------------------

# If a format defines how codes are decoded, its tensors have the values of the weights. Otherwise
# only the name of a second tensor identifies codes: ``w.weight`` of 8 bits, ``w.weight_scale``.
# The summary marks such codes, because statistics of them do not describe the weights.

#: The word for codes in `Row.storage` and in patterns.
CODES = "codes"


def marked(rows: Sequence[Row]) -> list[Row]:
    """Return rows in which the storage of codes names them as such."""
    codes = scales_of_codes({row.name: row.dtype for row in rows})
    if not codes:
        return list(rows)
    return [
        row._replace(storage=_storage(row.storage)) if row.name in codes else row for row in rows
    ]


def mark_codes(families: Iterable[Family]) -> None:
    """Set the storage of families of codes, which is faster than marking all rows."""
    templates: dict[str, list[Family]] = {}
    for family in families:
        templates.setdefault(_name_with_zeros(family), []).append(family)
    # A name may have several types, for example if the first layers are not quantised.
    smallest = {name: min(members, key=_bits).dtype for name, members in templates.items()}
    for name, scale in scales_of_codes(smallest).items():
        scale_indices = [family.indices for family in templates[scale]]
        with_scale = [frozenset().union(*sets) for sets in zip(*scale_indices, strict=False)]
        for family in templates[name]:
            pairs = zip(family.indices, with_scale, strict=False)
            is_covered = all(indices <= scaled for indices, scaled in pairs)
            if is_covered and scales_of_codes({name: family.dtype, scale: smallest[scale]}):
                family.storage = _storage(family.storage)


def _storage(storage: str) -> str:
    return storage if CODES in storage.split() else f"{CODES} {storage}".rstrip()
