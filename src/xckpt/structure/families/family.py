"""A family: the models in a checkpoint, their sizes, and the places of their tensors."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import TYPE_CHECKING, NamedTuple

from xckpt.structure.conventions import repeated_module
from xckpt.structure.facts import ModelFacts, sizes_in
from xckpt.structure.families.tables import LOCAL_AXES, evaluate, plain, shorten, stated_sizes
from xckpt.structure.forms import masked
from xckpt.structure.numbering import is_index, split_leaf

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from xckpt.structure.families.tables import Axes, NameRow, NameTable, NumberedWord, RowMatch

    Shape = tuple[int, ...]
    Kind = tuple[str, Shape]
    Positions = tuple[tuple[int, NumberedWord], ...]

# Share of the tensors with an axis that have the same extent, for it to be a size of the model.
AGREEING = 0.9
# Places that a family remembers, and the length of their names.
_MOST, _LONGEST = 1 << 14, 512
# Wrappers of a model with its head.
_ABOVE_HEADS = frozenset({"module", "_orig_mod", "language_model", "base_model", "state_dict"})
# Numbers that are words of a name.
_NUMBERS = re.compile(r"(?<![^.])[0-9]+(?![^.])")


class Place(NamedTuple):
    """The place of a tensor in the architecture of a family."""

    component: str
    slot: str
    #: Empty if the tensor belongs to no module of a known kind.
    module_type: str
    param: str
    #: Names of the axes; None without a name. None if even their number is unknown.
    axes: tuple[str | None, ...] | None
    indices: tuple[tuple[str, int], ...]
    #: Axes of the outputs and inputs of a weight; None for other tensors.
    outputs: int | None
    inputs: int | None
    #: Axes along which ranks of tensor parallelism may divide it.
    cuts: tuple[int, ...]
    #: Whether rotary position embeddings turn the outputs.
    is_rotary: bool
    #: Whether rows of the two halves of each rotary head alternate, unlike in transformers; None if
    #: that is unknown.
    alternates: bool | None
    #: Whether the module multiplies by one more than the weight; None if the type is unknown.
    adds_one: bool | None
    #: Whether fused parts alternate, head by head.
    is_interleaved: bool
    #: Whether shifts come before scales in the outputs of a modulation.
    is_shift_first: bool
    #: Whether stages are numbered from the last to the first.
    is_backwards: bool
    #: Whether it is another name of a tied tensor.
    is_alias: bool
    #: Name of the table, and the pattern in it.
    table: str
    pattern: str

    @property
    def reason(self) -> str:
        """Table and pattern."""
        return f"{self.table}: {self.pattern}"


class ShapedForm(NamedTuple):
    """Tensors of one shape whose names differ in numbers only."""

    name: str
    key: str
    shape: tuple[int, ...]
    #: Number of the tensors.
    total: int


@dataclass
class Root:
    """One model in a checkpoint: the text before its names, and its table."""

    prefix: str
    table: NameTable
    #: Type of the model that is stated, in small letters only; empty if there is none.
    model_type: str
    #: Forms that the table explains, with the rows that fit them, best first.
    matches: dict[ShapedForm, list[RowMatch]]
    component: str = ""
    #: Name of the family; several tables may have it.
    family: str = ""
    #: Whether it is one of the models of an ensemble, which the numbers in the prefix tell apart.
    is_member: bool = False

    @cached_property
    def indices(self) -> tuple[tuple[str, int], ...]:
        """Indices of the model in an ensemble: 1 for ``models.1.``."""
        words = self.prefix.split(".") if self.is_member else []
        pairs = pairwise(words)
        return tuple((repeated_module(word), int(n)) for word, n in pairs if is_index(n))

    @cached_property
    def prefixes(self) -> tuple[tuple[str, str], ...]:
        """The prefix, and those of heads, longest first, each with zeros for its numbers."""
        starts = accumulate(self.prefix.split(".")[:-1], lambda a, b: f"{a}.{b}")
        prefixes = ["", *[f"{start}." for start in starts]]
        keys = [shorten(key) for key in masked(prefixes)]
        return tuple(reversed(list(zip(prefixes, keys, strict=True))))

    @property
    def prefix_of_heads(self) -> str:
        """The words in front of the model that has the heads: ``language_model.``, ``module.``."""
        words = takewhile(_ABOVE_HEADS.__contains__, self.prefix.split("."))
        return "".join([f"{word}." for word in words])

    def component_of(self, row: NameRow) -> str:
        """Return the component of a row."""
        return row.component if row.is_head and row.component else self.component or row.component

    def matches_of(self, name: str, key: str, ndim: int | None) -> list[RowMatch]:
        """Return the rows of a tensor by its whole name."""
        for prefix, start in self.prefixes:
            if not name.startswith(prefix):
                continue
            matches = self.table.matches(name[len(prefix) :], key[len(start) :], ndim)
            if prefix != self.prefix:
                matches = [match for match in matches if match.row.is_head]
            if matches:
                return matches
        return []

    def varies(self, key: str) -> bool:
        """Return whether the row of a name depends on more than its form."""
        has_number = "0" in self.prefixes[0][1]
        return has_number or any(self.table.varies(key[len(s) :]) for _, s in self.prefixes)

    def trait(self, trait: str, row: NameRow) -> bool | None:
        """Return whether a row has a trait; None if that depends on an unknown type."""
        return self.table.trait(trait, row, self.model_type)


class Family:
    """The family of a checkpoint, with one root for each model in it."""

    def __init__(
        self,
        name: str,
        roots: Collection[Root],
        shapes: Mapping[str, Shape],
        facts: ModelFacts,
        kinds: Sequence[Kind],
    ) -> None:
        self.name = name
        self.roots = tuple(sorted(roots, key=lambda root: -len(root.prefix)))
        self._shapes = shapes
        self._facts = facts
        # Names with zeros for digits, and shapes.
        self._kinds = kinds
        self._sizes: dict[str, dict[str, int]] = {}
        # Places by names with zeros for their numbers, and shapes.
        self._places: dict[tuple[str, Shape | None], tuple[Place | None, Positions]] = {}
        for root in roots:
            self._measure(root)

    @property
    def components(self) -> dict[str, str]:
        """Family of each component, those with most tensors first."""
        components: dict[str, str] = {}
        for root in sorted(self.roots, key=lambda root: -len(root.matches)):
            rows = [match.row for matches in root.matches.values() for match in matches]
            for component in dict.fromkeys(map(root.component_of, rows)):
                components.setdefault(component, "" if root.family == "gguf" else root.family)
        return components

    # --- sizes -----------------------------------------------------------------------------------

    def _measure(self, root: Root) -> None:
        """Find the sizes of a model, from facts about it and from the extents of its axes."""
        rows = [match.row for matches in root.matches.values() for match in matches]
        for component in {root.component_of(row) for row in rows} | {root.component}:
            stated = self._stated_sizes(root, component)
            axes = {axis for row in rows for axis in row.axes if axis is not None}
            products = {axis: evaluate(axis, stated) for axis in axes}
            sizes = {axis: value for axis, value in products.items() if value is not None}
            self._sizes.setdefault(component, {}).update({**stated, **sizes})
        certain = {form: rows[0] for form, rows in root.matches.items() if len(rows) == 1}
        self._vote(root, certain)
        # Rows of one name differ in their axes, such as norms of a head or of all heads.
        chosen = {f: self._fitting(root, f.shape, r) for f, r in root.matches.items() if len(r) > 1}
        self._vote(root, chosen)

    def _stated_sizes(self, root: Root, component: str) -> dict[str, int]:
        """Return the sizes that facts state about a component of a model."""
        # Beside other models, the one without a component is the language model.
        nested = self._facts.config.get(f"{component or 'text'}_config")
        if isinstance(nested, dict) and (component or len(self.roots) > 1):
            return stated_sizes(root.table, nested, sizes_in(nested))
        if len(self.roots) > 1:
            return {}
        return stated_sizes(root.table, self._facts.config, self._facts.sizes)

    def _vote(self, root: Root, matches: Mapping[ShapedForm, RowMatch]) -> None:
        """Find the sizes that are still unknown by the extents on which tensors agree."""
        votes: dict[tuple[str, str], Counter[int]] = {}
        for form, match in matches.items():
            component = root.component_of(match.row)
            for axis, extent in zip(match.axes or (), form.shape, strict=False):
                if axis is not None and axis not in LOCAL_AXES:
                    votes.setdefault((component, axis), Counter())[extent] += form.total
        for (component, axis), extents in votes.items():
            extent, count = extents.most_common(1)[0]
            if count >= AGREEING * extents.total():
                self._sizes[component].setdefault(axis, extent)

    def _fitting(self, root: Root, shape: Shape | None, matches: Sequence[RowMatch]) -> RowMatch:
        """Return the first row whose axes have the sizes of the model, or unknown sizes."""
        unknown = []
        for match in matches if shape is not None and len(matches) > 1 else ():
            sizes = self._sizes[root.component_of(match.row)]
            pairs = zip(match.axes or (), shape or (), strict=False)
            equal = [sizes.get(axis) == extent for axis, extent in pairs if axis in sizes]
            sized = [axis for axis in match.axes or () if axis not in {None, *LOCAL_AXES}]
            if all(equal) and len(equal) == len(sized):
                return match
            if all(equal):
                unknown.append(match)
        return unknown[0] if unknown else matches[0]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model; with its component if components differ: ``vision.embd``."""
        sizes: dict[str, int] = {}
        for axis in dict.fromkeys(axis for local in self._sizes.values() for axis in local):
            values = {c: local[axis] for c, local in self._sizes.items() if axis in local}
            if len(set(values.values())) == 1:
                sizes[axis] = next(iter(values.values()))
            else:
                sizes |= {f"{c}.{axis}" if c else axis: value for c, value in values.items()}
        return sizes

    # --- names of dimensions ---------------------------------------------------------------------

    @cached_property
    def dims(self) -> dict[str, Axes]:
        """Names for the axes of the tensors that the family has.

        Places have them, without the component before a size that differs by component.
        """
        # A model of 100,000 tensors has a few dozen kinds.
        axes: dict[Kind, Axes | None] = {}
        varied = set()
        for kind, name in dict(zip(self._kinds, self._shapes, strict=True)).items():
            if any(root.varies(shorten(kind[0])) for root in self.roots):
                varied.add(kind)
            else:
                axes[kind] = self._dims(name, kind[1])
        names = zip(self._shapes, map(axes.get, self._kinds), strict=True)
        dims = {name: axes_of_kind for name, axes_of_kind in names if axes_of_kind is not None}
        for name, kind in zip(self._shapes, self._kinds, strict=True) if varied else ():
            own_axes = self._dims(name, kind[1]) if kind in varied else None
            if own_axes is not None:
                dims[name] = own_axes
        return dims

    def _dims(self, name: str, shape: Shape) -> Axes | None:
        place = self.describe(name, shape)
        if place is None or place.axes is None or not any(place.axes):
            return None
        component = place.component
        return tuple([axis and self._dim(component, axis) for axis in place.axes])

    def _dim(self, component: str, axis: str) -> str:
        return f"{component}.{axis}" if component and axis in self._differing else axis

    @cached_property
    def _differing(self) -> frozenset[str]:
        """Axes of tensors whose sizes differ by component."""
        extents: dict[str, set[int]] = {}
        for root in self.roots:
            for form, matches in root.matches.items():
                match = self._fitting(root, form.shape, matches)
                sizes = self._sizes[root.component_of(match.row)]
                for axis, extent in zip(match.axes or (), form.shape, strict=False):
                    if axis is not None and sizes.get(axis) == extent:
                        extents.setdefault(axis, set()).add(extent)
        return frozenset([axis for axis, sizes in extents.items() if len(sizes) > 1])

    # --- places ----------------------------------------------------------------------------------

    def describe(self, name: str, shape: Shape | None = None) -> Place | None:
        """Return the place of a tensor; None if the family does not have its name.

        With a shape, only those axes have names whose extents are the sizes of the model.
        """
        dotted = plain(name)
        form = _NUMBERS.sub("0", dotted), shape
        if form in self._places:
            place, positions = self._places[form]
            if place is None or not positions:
                return place
            return place._replace(indices=_indices(dotted.split("."), positions))
        key = shorten(masked([dotted])[0])
        place, positions = self._place(name, dotted, key, shape)
        is_short = len(self._places) < _MOST and len(name) <= _LONGEST
        if is_short and not any(root.varies(key) for root in self.roots):
            self._places[form] = place, positions
        return place

    def name_beside(self, name: str, slot: str) -> str | None:
        """Return the name of a weight without numbers in the model of another tensor, by its slot.

        None if the model has no such slot.
        """
        place = self.describe(name)
        for root in self.roots:
            is_of_root = place is not None and root.table.name == place.table
            if not is_of_root or not name.startswith(root.prefix):
                continue
            for row in root.table.rows:
                if row.slot == slot and not row.param and "{" not in row.pattern:
                    prefix = root.prefix_of_heads if row.is_head else root.prefix
                    return f"{prefix}{row.pattern}.weight"
        return None

    def _place(
        self, name: str, dotted: str, key: str, shape: Shape | None
    ) -> tuple[Place | None, Positions]:
        """Return the place of a tensor, and the words of its name that have indices."""
        for root in self.roots:
            matches = root.matches_of(dotted, key, None if shape is None else len(shape))
            if not matches:
                continue
            match = self._fitting(root, shape, self._of_module(name, matches))
            row, component = match.row, root.component_of(match.row)
            place = Place(
                component=component,
                slot=row.slot,
                module_type=row.module_type,
                param=match.param,
                axes=self._named(match.axes, component, shape),
                indices=root.indices + match.indices,
                outputs=match.outputs,
                inputs=match.inputs,
                cuts=match.cuts,
                is_rotary="rotary" in row.flags and root.trait("not_rotary", row) is not True,
                alternates=root.table.alternates(row, [root.model_type]),
                adds_one=root.trait("add_one", row) if match.param == "weight" else False,
                is_interleaved="interleaved" in row.flags,
                is_shift_first="shift_first" in row.flags,
                is_backwards=root.trait("backwards", row) is True,
                is_alias="alias" in row.flags,
                table=root.table.name,
                pattern=row.pattern,
            )
            start = dotted.count(".") + (1 if row.param else 0) - len(row.words)
            indexed = enumerate(row.words, start)
            return place, tuple([(n, word) for n, word in indexed if not isinstance(word, str)])
        return None, ()

    def _of_module(self, name: str, matches: list[RowMatch]) -> list[RowMatch]:
        """Return the rows of a bias that have as many axes as the weight of its module."""
        path, separator, _ = split_leaf(name)
        weight = self._shapes.get(f"{path}{separator}weight") if len(matches) > 1 else None
        if weight is None:
            return matches
        return [match for match in matches if len(match.row.axes) == len(weight)] or matches

    def _named(self, axes: Axes | None, component: str, shape: Shape | None) -> Axes | None:
        """Return the names of the axes whose extents are the sizes of the model."""
        if axes is None or shape is None:
            return axes
        sizes = self._sizes[component]
        pairs = zip(axes, shape, strict=True)
        return tuple([a if a in LOCAL_AXES or _is(sizes, a, n) else None for a, n in pairs])


def _is(sizes: Mapping[str, int], axis: str | None, extent: int) -> bool:
    return axis is not None and sizes.get(axis) == extent


def _indices(words: Sequence[str], positions: Positions) -> tuple[tuple[str, int], ...]:
    """Return the indices in the words of a name."""
    return tuple(
        [
            (index.name, int(words[position][len(index.before) :].removesuffix(index.after)))
            for position, index in positions
        ]
    )
