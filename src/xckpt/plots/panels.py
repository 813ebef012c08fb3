"""Panels of `plot.layers`, and the positions of tensors along their axes."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from xckpt.notebook.folding import ascending
from xckpt.plots.series import groups_of, numbers_of, outermost
from xckpt.structure import Role, Structure
from xckpt.structure.numbering import parse_name, split_words

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
    stages: list[str]  # by position; empty if positions are the numbers themselves


def positions_of(names: Sequence[str], along: str | None) -> Positions | None:
    """Return the positions of tensors, or None if no names have numbers."""
    base = along or outermost(names)
    if base is None:
        return None
    mine = [name for name in names if base in numbers_of(name)]
    if not mine or along is not None:
        return Positions(base, {name: name for name in mine}, []) if mine else None
    places = {name: _split_stage(name) for name in mine if parse_name(name).modules[0] == base}
    insides = {_template(inside) for _, inside in places.values()}
    for name in names:
        if name not in places and base not in numbers_of(name):
            place = _other_stage(name, insides)
            places |= {name: place} if place is not None else {}
    stages = list(dict.fromkeys(stage for stage, _ in places.values()))
    modules = {(parse_name(stage).modules or (stage,))[-1] for stage in stages}
    # The layers of an encoder and of a decoder have the same numbers.
    if len(modules) < 2 or len(places) < len(mine):
        return Positions(base, {name: name for name in mine}, [])
    ordered = sorted(stages)
    ordered = [ordered[at] for at in ascending(ordered)]
    numbers = {stage: number for number, stage in enumerate(ordered)}
    renamed = {n: f"{_STAGE}.{numbers[stage]}{inside}" for n, (stage, inside) in places.items()}
    return Positions(_STAGE, renamed, ordered)


def _split_stage(name: str) -> tuple[str, str]:
    """Split a name after its first number."""
    stage = parse_name(name).outermost
    return stage, name.removeprefix(stage)


def _other_stage(name: str, insides: set[str]) -> tuple[str, str] | None:
    """Split a name where a tensor that stages repeat begins, after a number or one word."""
    parts = parse_name(name)
    if parts.indices:
        stage, inside = _split_stage(name)
        if _template(inside) in insides:
            return stage, inside
    first = parts.pieces[0]
    inside = name.removeprefix(first)
    return (first, inside) if inside and _template(inside) in insides else None


def _template(inside: str) -> str:
    return "".join("*" if part is None else part for part in parse_name(inside).template)


# --- panels --------------------------------------------------------------------------------------


def panels_of(
    rows: Iterable[Row], structure: Structure, originals: Mapping[str, str]
) -> list[list[str]]:
    """Divide tensors into panels by their kinds, and by their modules if they are many.

    `originals` has the names of the tensors in the file.
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
        parts = _by_module(panels[place])
        if 1 < len(parts) <= MOST_PANELS - len(panels) + 1:
            panels[place : place + 1] = parts
        else:
            place += 1
    return panels


def _by_module(names: list[str]) -> list[list[str]]:
    """Divide tensors by the first word in which their names differ, but not into single lines."""
    templates = {group.template: split_words(group.template) for group in groups_of(names)}
    columns = enumerate(zip(*templates.values(), strict=False))
    depth = next((at for at, column in columns if len(set(column)) > 1), None)
    if depth is None or len(templates) <= _FEW_LINES:
        return [names]
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(templates[parse_name(name).template][depth], []).append(name)
    counts = {module: len(groups_of(members)) for module, members in modules.items()}
    several = [members for module, members in modules.items() if counts[module] > 1]
    single = [name for module in modules if counts[module] == 1 for name in modules[module]]
    return [*several, *([single] if single else [])] if several else [names]
