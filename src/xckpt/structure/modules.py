"""Which numbers in names are indices of repeated modules.

A number is an index only if it repeats modules of the model: most members of its container have
the same parts as another member. ``layers``, ``blocks`` and other words of frameworks name
containers of modules, whatever is in them. A numbered tensor is no module: ``vars/0`` and
``vars/1`` are variables of one layer, and numbers of values in a graph are no indices.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from xckpt.structure.numbering import ParsedName, names_repeated_modules, numbered_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Template = tuple[str | None, ...]
    # Parts of a member: the rest of the names of its tensors, with their numbers of axes.
    Parts = frozenset[tuple[Template, int]]

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
        kept = self.kept(parsed.template)
        if all(kept):
            return parsed
        pieces, remaining = [], iter(zip(parsed.indices, kept, strict=True))
        for piece in parsed.template:
            index, is_kept = next(remaining) if piece is None else (piece, True)
            pieces.append(None if piece is None and is_kept else index)
        chosen = [number for number, is_kept in enumerate(kept) if is_kept]
        return ParsedName(
            tuple(pieces),
            tuple([parsed.modules[number] for number in chosen]),
            tuple([parsed.indices[number] for number in chosen]),
        )

    def kept(self, template: Template) -> tuple[bool, ...]:
        """Return whether each number in a template is the index of a repeated module."""
        kept = self._kept.get(template)
        if kept is None:
            positions = [place for place, piece in enumerate(template) if piece is None]
            kept = tuple([self._keeps(template, position) for position in positions])
            self._kept[template] = kept
        return kept

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
            others = (other for place, other in enumerate(members) if place != number)
            with_twin += any(_are_alike(parts, other) for other in others)
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
