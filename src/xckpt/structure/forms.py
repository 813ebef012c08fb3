"""Names that differ only in the indices of modules, grouped without taking each name apart."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from xckpt.structure.numbering import parse_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

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
