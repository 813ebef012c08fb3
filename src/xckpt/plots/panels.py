"""Panels of `plot.layers`, and the positions of tensors along their axes."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from xckpt.notebook.folding import ascending
from xckpt.plots.series import groups_of, outermost
from xckpt.structure import Role, Structure
from xckpt.structure.numbering import ParsedName, split_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xckpt.tensor_rows import Row


#: Lines of a panel whose labels can be read, and panels of a figure.
MOST_LINES_OF_PANEL, MOST_PANELS = 8, 6
# So many lines of one kind share a panel, whatever modules they are in.
_FEW_LINES = 4

# --- positions along the axis --------------------------------------------------------------------

# Replaces the names of stages, such as `layer1.0`.
_STAGE = "stage"


class Positions(NamedTuple):
    """Positions of tensors along the axis, and their names there."""

    # The numbers of a module are its positions. Where a model repeats the same tensors in modules
    # of several names (``layer1.0``, ``layer2.0``; ``down_blocks``, ``mid_block``), these follow
    # each other, and ``stage.{position}`` replaces the name of the stage in the names of tensors.

    along: str
    names: dict[str, str]  # on the axis, by the names of the file
    parsed: dict[str, ParsedName]  # names on the axis, taken apart
    stages: list[str]  # by position; empty if positions are the numbers themselves


def positions_of(
    names: Sequence[str], along: str | None, hue: str | None, structure: Structure
) -> Positions | None:
    """Return the positions of tensors, or None if no names have numbers.

    The caller may name numbered modules that the model does not repeat, in `along` and `hue`.
    """
    base = along or outermost(map(structure.parse, names))
    if base is None:
        return None
    parsed = {name: structure.siblings_key(name) for name in names}
    if named := {module for module in (along, hue) if module is not None}:
        only = named.union(structure.repeated_modules())
        parsed = {name: structure.parse(name, only) for name in names}
    mine = {name: parts for name, parts in parsed.items() if base in parts.modules}
    if not mine or along is not None:
        return Positions(base, {name: name for name in mine}, mine, []) if mine else None
    places = {n: _split_stage(parts) for n, parts in mine.items() if parts.modules[0] == base}
    insides = {place.inside.template for place in places.values()}
    for name, parts in parsed.items():
        if name not in mine:
            place = _other_stage(parts, insides)
            places |= {name: place} if place is not None else {}
    stages = list(dict.fromkeys(place.stage for place in places.values()))
    # The layers of an encoder and of a decoder have the same numbers.
    if len({place.module for place in places.values()}) < 2 or len(places) < len(mine):
        return Positions(base, {name: name for name in mine}, mine, [])
    ordered = sorted(stages)
    ordered = [ordered[at] for at in ascending(ordered)]
    numbers = {stage: str(number) for number, stage in enumerate(ordered)}
    renamed = {name: place.renamed(numbers[place.stage]) for name, place in places.items()}
    new_names = {name: "".join(parts.pieces) for name, parts in renamed.items()}
    return Positions(
        _STAGE, new_names, {new_names[name]: parts for name, parts in renamed.items()}, ordered
    )


class _Place(NamedTuple):
    """A tensor in one of several stages with the same tensors."""

    stage: str
    module: str  # the word of the stage
    inside: ParsedName  # the rest of the name

    def renamed(self, number: str) -> ParsedName:
        """Return the name with a number for the stage."""
        template, modules, indices = self.inside
        return ParsedName((f"{_STAGE}.", None, *template), (_STAGE, *modules), (number, *indices))


def _split_stage(parts: ParsedName) -> _Place:
    """Split a name after its first number."""
    depth = parts.template.index(None) + 1
    inside = ParsedName(parts.template[depth:], parts.modules[1:], parts.indices[1:])
    return _Place(parts.outermost, parts.modules[0], inside)


def _other_stage(parts: ParsedName, insides: set[tuple[str | None, ...]]) -> _Place | None:
    """Split a name where a tensor that stages repeat begins, after a number or one word."""
    if parts.indices and (place := _split_stage(parts)).inside.template in insides:
        return place
    first = parts.template[0]
    if first is None or not parts.template[1:] or parts.template[1:] not in insides:
        return None
    return _Place(first, first, parts._replace(template=parts.template[1:]))


# --- panels --------------------------------------------------------------------------------------


def panels_of(
    rows: Iterable[Row],
    structure: Structure,
    originals: Mapping[str, str],
    parsed: Mapping[str, ParsedName],
) -> list[list[str]]:
    """Divide tensors into panels by their kinds, and by their modules if they are many.

    `originals` has the names of the tensors in the file, and `parsed` the names taken apart.
    """
    # Weights come first, then gains of norms, biases, and other roles.
    rows = list(rows)
    norms, roles = structure.norms, structure.roles
    kinds: dict[tuple[int, str], list[str]] = {}
    order = list(Role)
    for row in rows:
        original = originals[row.name]
        role = roles[original]
        is_vector = sum([size != 1 for size in row.shape]) <= 1
        kind = "norm" if original in norms else "vector" if is_vector else "matrix"
        rank = order.index(role) * 3 + ["matrix", "norm", "vector"].index(kind)
        kinds.setdefault((rank, kind), []).append(row.name)
    panels = [names for _, names in sorted(kinds.items())]
    panels = [*panels[: MOST_PANELS - 1], list(chain(*panels[MOST_PANELS - 1 :]))]
    panels = [names for names in panels if names]
    place = 0
    while place < len(panels):
        parts = _by_module({name: parsed[name] for name in panels[place]})
        if 1 < len(parts) <= MOST_PANELS - len(panels) + 1:
            panels[place : place + 1] = parts
        else:
            place += 1
    return panels


def _by_module(parsed: Mapping[str, ParsedName]) -> list[list[str]]:
    """Divide tensors by the first word in which their names differ, but not into single lines."""
    templates = {group.template: split_words(group.template) for group in groups_of(parsed)}
    columns = enumerate(zip(*templates.values(), strict=False))
    depth = next((at for at, column in columns if len(set(column)) > 1), None)
    if depth is None or len(templates) <= _FEW_LINES:
        return [list(parsed)]
    modules: dict[str, list[str]] = {}
    for name, parts in parsed.items():
        modules.setdefault(templates[parts.template][depth], []).append(name)
    counts = {
        module: len({parsed[name].template for name in members})
        for module, members in modules.items()
    }
    several = [members for module, members in modules.items() if counts[module] > 1]
    single = [name for module in modules if counts[module] == 1 for name in modules[module]]
    return [*several, *([single] if single else [])] if several else [list(parsed)]
