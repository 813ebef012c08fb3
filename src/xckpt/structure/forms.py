"""Names of the tensors of a model seen together: forms, repeated modules, and pieces of tensors.

Names that differ only in the indices of modules have one form, and are grouped without taking each
name apart. A number is an index only if it repeats modules of the model: most members of its
container have the same parts as another member. ``layers``, ``blocks`` and other words of
frameworks name containers of modules, whatever is in them. A numbered tensor is not a module:
``vars/0`` and ``vars/1`` are variables of one layer, and numbers of values in a graph are no
indices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.structure.numbering import (
    ParsedName,
    names_repeated_modules,
    numbered_modules,
    parse_name,
    split_leaf,
    split_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    Template = tuple[str | None, ...]
    Parts = frozenset[tuple[Template, int]]

_ANY_DIGIT = bytes.maketrans(b"0123456789", b"0000000000")


@dataclass(slots=True)
class Form:
    """Tensors of one kind whose names differ only in the indices of modules."""

    #: Pieces of the names, None for each index.
    template: tuple[str | None, ...]
    kind: Any
    #: Positions of the tensors, not in order.
    places: list[int]
    #: Indices of each tensor as they are spelled, for each position of the template.
    columns: tuple[list[str], ...]

    @property
    def indices(self) -> tuple[set[str], ...]:
        """Indices at each position of the template."""
        return tuple(map(set, self.columns))


def forms_of(names: Sequence[str], kinds: Iterable[Hashable]) -> list[Form]:
    """Group names of one kind by their templates, in the order of their first names."""
    return forms_of_groups(names, grouped(masked(names), kinds))


def grouped(*columns: Iterable[Hashable]) -> dict[Any, list[int]]:
    """Return the positions of equal entries of several columns, by those entries."""
    places: dict[Any, list[int]] = defaultdict(list)
    for place, key in enumerate(zip(*columns, strict=True)):
        places[key].append(place)
    return places


def forms_of_groups(names: Sequence[str], groups: Mapping[Any, list[int]]) -> list[Form]:
    """Return the forms of names from the positions of each mask and kind."""
    # With zeros for all digits, a deep model has a few dozen names, whose components begin at the
    # same positions. This avoids splitting each of 100,000 names.
    forms: dict[Hashable, Form] = {}
    for (_, kind), places in groups.items():
        cuts, spelled = _cut(names[places[0]])
        # Separate words whose digits are not indices, such as `w1` and `w2`.
        subgroups: dict[Hashable, list[int]] = defaultdict(list)
        for place in places if spelled else ():
            subgroups[tuple([names[place][cut] for cut in spelled])].append(place)
        for group in subgroups.values() or [places]:
            template = parse_name(names[group[0]]).template
            form = forms.get((template, kind))
            if form is None:
                form = Form(template, kind, [], tuple([[] for _ in cuts]))
                forms[template, kind] = form
            form.places += group
            spellings = [names[place] for place in group] if cuts else []
            for cut, column in zip(cuts, form.columns, strict=True):
                column.extend(map(itemgetter(cut), spellings))
    return sorted(forms.values(), key=lambda form: form.places[0])


def masked(names: Sequence[str]) -> list[str]:
    """Return names with zeros for all digits."""
    # All names at once, because this takes longer than anything else.
    texts = _with_zeros("\n".join(names)).split("\n") if names else []
    if len(texts) != len(names):  # a name contains the separator
        return list(map(_with_zeros, names))
    return texts


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
        elif any(character in _DIGITS for character in piece):
            spelled.append(cut)
        start += len(piece)
    return cuts, spelled


_DIGITS = frozenset("0123456789")


# --- repeated modules -----------------------------------------------------------------------------

# Share of the parts of the smaller of two modules that the larger one has, too.
_SHARED = 0.5


class RepeatedModules:
    """The containers of repeated modules, by the pieces of names before an index."""

    def __init__(
        self, forms: Callable[[], Iterable[tuple[Template, int, Sequence[set[str]]]]]
    ) -> None:
        self._forms = forms
        self._is_repeated: dict[Template, bool] = {}
        self._kept: dict[Template, tuple[bool, ...]] = {}

    @cached_property
    def _parts(self) -> dict[Template, dict[str, set[tuple[Template, int]]]]:
        """Parts of each member of a container; not needed for containers with a usual name."""
        parts: dict[Template, dict[str, set[tuple[Template, int]]]] = {}
        for template, ndim, indices in self._forms():
            positions = [place for place, piece in enumerate(template) if piece is None]
            for position, values in zip(positions, indices, strict=True):
                members = parts.setdefault(template[:position], {})
                part = template[position + 1 :], ndim
                for index in values:
                    members.setdefault(index, set()).add(part)
        return parts

    def restrict(self, parsed: ParsedName) -> ParsedName:
        """Turn all numbers in a name into text that are not indices of repeated modules."""
        if not parsed.indices:
            return parsed
        return parsed.restricted(self.kept(parsed.template))

    def kept(self, template: Template) -> tuple[bool, ...]:
        """Return whether each number in a template is the index of a repeated module."""
        mask = self._kept.get(template)
        if mask is None:
            positions = [place for place, piece in enumerate(template) if piece is None]
            mask = tuple([self._keeps(template, position) for position in positions])
            self._kept[template] = mask
        return mask

    def _keeps(self, template: Template, position: int) -> bool:
        if not any(piece for piece in template[position + 1 :] if piece):
            return False  # the number of a tensor
        container = template[:position]
        if container not in self._is_repeated:
            self._is_repeated[container] = self._repeats(container)
        return self._is_repeated[container]

    def _repeats(self, container: Template) -> bool:
        if names_repeated_modules(numbered_modules((*container, None))[-1]):
            return True
        members = [
            frozenset(parts)
            for parts in self._parts.get(container, {}).values()
            if any(template for template, _ in parts)
        ]
        with_twin = 0
        for number, parts in enumerate(members):
            siblings = (sibling for place, sibling in enumerate(members) if place != number)
            with_twin += any(_are_alike(parts, sibling) for sibling in siblings)
            if number >= _MOST_MEMBERS:
                break
        return with_twin > 1 and 2 * with_twin > min(len(members), _MOST_MEMBERS + 1)


# Members of a container that are compared with all others.
_MOST_MEMBERS = 200


def _are_alike(parts: Parts, other: Parts) -> bool:
    """Return whether two modules have the same parts, or one has most of the parts of the other."""
    if parts == other:
        return True
    # Leaf modules, such as a convolution and a norm, both have a weight and a bias.
    inner = {part for part in parts & other if len(part[0]) > 1}
    return len(inner) > _SHARED * min(len(parts), len(other))


# --- pieces ---------------------------------------------------------------------------------------

_RANK = re.compile(
    r"(?:(?P<stem>\w+?)[_-])??(?:(?:mp|tp|dp|fsdp)[_-]?)?(?:rank|tp|mp|shard|part)[_-]?(?P<rank>[0-9]{1,5})",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[0-9]{1,5}")
_FLAT = re.compile(r"_?flat_param(?:_[0-9]{1,5})?")
# Wrappers of modules that only names of FSDP and `torch.compile` have.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module"})
_MOST_WORDS = 64


class PieceName(NamedTuple):
    """The name of a tensor without a word for its rank, and the number of the rank."""

    name: str
    rank: int


@lru_cache(maxsize=1 << 14)
def on_ranks(name: str) -> tuple[PieceName, ...]:
    """Return the ways to read a word of a name as the number of a rank, the likeliest first."""
    # A number without a word is one of a rank only if nothing else has the remaining name.
    words = split_name(name)
    if len(words) > _MOST_WORDS:
        return ()
    separator = split_leaf(name)[1] or "."
    by_word: list[PieceName] = []
    by_number: list[PieceName] = []
    for position, word in enumerate(words):
        match = _RANK.fullmatch(word)
        remaining = [*words[:position], *words[position + 1 :]]
        if match is not None:
            if match["stem"]:
                remaining.insert(position, match["stem"])
            by_word.append(PieceName(separator.join(remaining), int(match["rank"])))
        elif _NUMBER.fullmatch(word):
            by_number.append(PieceName(separator.join(remaining), int(word)))
    return (*by_word, *by_number[::-1])


def module_of_flat(name: str) -> str | None:
    """Return the path of the module of a flat parameter of FSDP; None for other tensors."""
    *modules, last = split_name(name)
    if _FLAT.fullmatch(last) is None:
        return None
    return without_wrappers(".".join(modules))


def without_wrappers(name: str) -> str:
    """Return a name with dots, and without the wrappers of FSDP."""
    return ".".join([word for word in split_name(name) if word not in _WRAPPERS])


def layer_of(name: str) -> tuple[int, ...]:
    """Return the numbers in a name, the one of its layer first; empty without any."""
    return tuple(map(int, parse_name(name).indices))


def form_in_layer(name: str) -> tuple[Template, tuple[str, ...]]:
    """Return a name without the number of its layer, the outermost one."""
    parsed = parse_name(name)
    return parsed.template, parsed.indices[1:]


def are_in_order(names: Iterable[str]) -> bool:
    """Return whether layers follow one another, each with its tensors in the same order."""
    layers: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    last: dict[Any, tuple[int, ...]] = {}
    for name in names:
        parsed = parse_name(name)
        numbers = layer_of(name)
        if numbers < last.get(parsed.template, ()):
            return False
        last[parsed.template] = numbers
        layers[parsed.indices[:1]].append(form_in_layer(name))
    layers.pop((), None)
    orders: dict[frozenset[Any], set[tuple[Any, ...]]] = defaultdict(set)
    for members in layers.values():
        orders[frozenset(members)].add(tuple(members))
    return all(len(orders_of_kind) == 1 for orders_of_kind in orders.values())
