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
braces stands for omitted members.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from xckpt.elements import ELEMENT_TYPES
from xckpt.formatting import columns, printable, shortened
from xckpt.labels import scales_of_codes
from xckpt.labels.roles import PARAMETERS, Role, roles_of
from xckpt.structure.numbering import is_index, parse_name, strip_separator
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


def families_of(rows: Iterable[Row]) -> list[Family]:
    """Group tensors of one kind whose names differ only in the numbers of their modules."""
    columns: Any = list(zip(*rows, strict=True)) or [()] * len(Row._fields)
    names, dtypes, shapes, nbytes, storages = columns
    # With zeros for all digits, a deep model has a few dozen names, whose components begin at the
    # same positions. This avoids splitting each of 100,000 names.
    places_by_kind: dict[Hashable, list[int]] = defaultdict(list)
    # Mask all names at once, because this takes longer than anything else.
    masked = _with_zeros("\n".join(names)).split("\n")
    if len(masked) != len(names):  # a name contains the separator
        masked = list(map(_with_zeros, names))
    for place, kind in enumerate(zip(masked, dtypes, shapes, storages, strict=True)):
        places_by_kind[kind].append(place)
    families: dict[tuple[Any, ...], Family] = {}
    indices: dict[tuple[Any, ...], list[set[str]]] = {}
    for places in places_by_kind.values():
        cuts, spelled = _cut(names[places[0]])
        # Separate words whose digits are not indices, such as `w1` and `w2`.
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for place in places if spelled else ():
            groups[tuple([names[place][cut] for cut in spelled])].append(place)
        for group in groups.values() or [places]:
            start = group[0]
            first = names[start]
            template = parse_name(first).template
            properties = (dtypes[start], shapes[start], storages[start])
            key = (template, *properties)
            if key not in families:
                families[key] = Family((), *properties, first, start)
                indices[key] = [set() for _ in cuts]
            family = families[key]
            family.count += len(group)
            family.places += group
            family.nbytes += sum([nbytes[place] for place in group])
            spellings = [names[place] for place in group] if cuts else []
            for cut, values in zip(cuts, indices[key], strict=True):
                values.update(map(itemgetter(cut), spellings))
    for key, family in families.items():
        sets = map(frozenset, indices[key])
        family.components = tuple([next(sets) if part is None else part for part in key[0]])
    return sorted(families.values(), key=lambda family: family.place)


def _with_zeros(text: str) -> str:
    # Translate UTF-8, which is ten times as fast as translating a str.
    encoded = text.encode("utf-8", "surrogatepass").translate(_ANY_DIGIT)
    return encoded.decode("utf-8", "surrogatepass")


def _cut(name: str) -> tuple[list[slice], list[slice]]:
    """Return the slices of the indices in a name, and of other pieces with digits."""
    cuts, spelled, start = [], [], 0
    parsed = parse_name(name)
    for part, piece in zip(parsed.template, parsed.pieces, strict=True):
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
    return families


def _all_but(position: int, family: Family) -> Hashable:
    """Return a key that families share if they can be united at a position; else a unique key."""
    components = family.components
    if position >= len(components) or not isinstance(word := components[position], str):
        return id(family)
    mark = None
    if len(components) == 1:  # without other words, unite only names such as w1, w2, w3
        mark = word.rstrip("0123456789") if word[-1:].isdigit() else word
    return (
        *(family.dtype, family.storage, family.shape, family.count),
        *(*components[:position], mark, *components[position + 1 :]),
    )


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


# --- roles ---------------------------------------------------------------------------------------


def count_parameters(families: Sequence[Family]) -> list[Role]:
    """Count the trainable elements of each family, and return its role."""
    by_name: dict[str, list[int]] = {}
    for place, family in enumerate(families):
        by_name.setdefault(_name_with_zeros(family), []).append(place)
    # If a name has several types, scales belong to the codes, which have the smallest type.
    roles = [Role.WEIGHT] * len(families)
    smallest = {n: min(places, key=lambda p: _bits(families[p])) for n, places in by_name.items()}
    tensors = [(name, families[p].dtype, families[p].shape) for name, p in smallest.items()]
    for name, role in roles_of(tensors).items():
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
    """Return rows with the word for codes in the storage of codes."""
    codes = scales_of_codes({row.name: row.dtype for row in rows})
    if not codes:
        return list(rows)
    return [
        row._replace(storage=_storage(row.storage)) if row.name in codes else row for row in rows
    ]


def mark_codes(families: Iterable[Family]) -> None:
    """Mark families of codes in their storage, which is faster than marking all rows."""
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
