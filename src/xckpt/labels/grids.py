"""Grids of tensors whose names differ only in the indices of modules: each is a `Stack`.

``layers.0.w``, ``layers.1.w``, ... of the same shape and type become the variable ``layers.w`` with
the dimension ``layers``, whose coordinate has the indices.

- A dimension has the name of the numbered module, or ``layers_1``, ... if that name is taken.
- An index that all members share stays in the name of the variable.
- Leading zeros are part of the template if all indices along an axis have the same width.
- A tensor is a member of at most one stack, at one position. All others keep their own names.
- A stack is a full grid of indices. In an outer join, its axes have all indices that its modules
  have anywhere, so that positions can be empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from xckpt.labels.paths import tree_paths
from xckpt.structure.numbering import (
    drop_indices,
    has_words,
    module_indices,
    numbered_modules,
    split_words,
)

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Hashable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from xckpt.structure import Structure
    from xckpt.typing import Array

_Item = TypeVar("_Item")
# The words of a name.
_Path = tuple[str, ...]
# The indices of a member as its name spells them, with leading zeros.
_Spelling = tuple[str, ...]
# The indices of a member.
_Position = tuple[int, ...]
# The indices along each axis of a grid.
_Axes = tuple[tuple[int, ...], ...]
# Pieces of a name: None for an index, or the width of all its indices if some have leading zeros.
_Template = tuple[str | int | None, ...]
# Positions per member in an outer join. A hostile file can make grids that are almost empty; their
# tensors get full grids instead.
_MAX_POSITIONS_PER_MEMBER = 64


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors that are one array with more axes."""

    #: Name of the variable: the members' name without its indices.
    name: str
    template: _Template
    #: Dimension of each index that varies, outermost first.
    dims: tuple[str, ...]
    #: Indices along each dimension, ascending.
    indices: _Axes
    #: Names of the tensors, in C order of the grid.
    members: tuple[str, ...]
    #: Indices of the members, if the grid has empty positions.
    present: frozenset[_Position] | None = None

    @property
    def index_dims(self) -> tuple[str | None, ...]:
        """Dimension of each index in the members' names, None for one that all members share."""
        dims = iter(self.dims)
        return tuple(
            None if isinstance(index, str) else next(dims)
            for _, index in module_indices(self.template)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of indices along each dimension."""
        return tuple(map(len, self.indices))

    def arrange(self, items: Iterable[_Item]) -> Iterator[_Item | None]:
        """Yield the item of the member at each position of the grid, None for empty ones."""
        if self.present is None:
            return iter(items)
        remaining = iter(items)
        return (
            next(remaining) if position in self.present else None
            for position in product(*self.indices)
        )


def find_stacks(
    kinds: Mapping[str, Hashable],
    structure: Structure,
    modules: Collection[str] | None = None,
    *,
    paths: Mapping[str, _Path] | None = None,
    reserved: Collection[str] = (),
    for_tree: bool = False,
    others: Collection[str] = (),
    preferred_dims: Mapping[str, tuple[str | None, ...]] | None = None,
    may_be_absent: Callable[[str], bool] | None = None,
) -> list[Stack]:
    """Group tensors of one kind whose names differ only in the indices of modules."""
    # `kinds` has the kind of each tensor by name, in file order; `structure` may describe more
    # tensors. `modules` are the numbered modules to stack, by default the repeated ones. `paths`
    # has the words of names that dots and slashes do not separate, `reserved` names that no
    # dimension may have. `for_tree` asks for dimensions that a tree can have; `others` has its
    # variables that are not in `kinds`. `preferred_dims` are `Stack.index_dims` of tensors in a
    # larger file, whose dimensions keep their names. `may_be_absent` asks for an outer join:
    # whether a tensor may have empty positions next to it.
    families = list(_families(kinds, structure, modules, paths or {}))
    grids: list[_Grid] = []
    if may_be_absent is not None:
        grids, families = _outer_grids(families, may_be_absent)
    for family in families:
        for indices in _full_grids(list(family.members)):
            members = tuple([family.members[position] for position in product(*indices)])
            grids.append(_Grid(family.template, indices, members))
    grids = [_fix_shared_indices(grid) for grid in grids if len(grid.members) > 1]
    order = {name: position for position, name in enumerate(kinds)}
    refused = set(reserved)
    while True:
        stacks = _named_stacks(grids, order, refused, preferred_dims or {})
        clashes = _clashing_dims(stacks, [*kinds, *others], paths or {}) if for_tree else set()
        if not clashes:
            return stacks
        refused |= clashes


def member_names(template: Iterable[str | int | None], indices: _Axes) -> list[str]:
    """Return the names of the members of a full stack, in C order."""
    pattern = "".join(map(_format_piece, template))
    return [pattern % position for position in product(*indices)]


def _format_piece(piece: str | int | None) -> str:
    """Return a piece of a template as part of a %-format."""
    if isinstance(piece, str):
        return piece.replace("%", "%%")
    return "%d" if piece is None else f"%0{piece}d"


def _clashing_dims(
    stacks: list[Stack], names: Iterable[str], paths: Mapping[str, _Path]
) -> set[str]:
    """Return dimensions with the name of a variable, or of a node below the stack."""
    # Their coordinates cannot be in the tree: children inherit the coordinates of a node.
    members = {name for stack in stacks for name in stack.members}
    path_of: dict[str, _Path | None] = {
        name: paths.get(name) for name in names if name not in members
    }
    for stack in stacks:
        has_path = stack.members[0] in paths
        path_of[stack.name] = split_words(stack.template) if has_path else None
    nodes_and_leaves = tree_paths(path_of)
    dims = {dim for stack in stacks for dim in stack.dims}
    nodes_below: dict[str, set[str]] = defaultdict(set)  # at any depth
    for path in {node for node, _ in nodes_and_leaves.values()}:
        nodes = path.split("/")[1:]
        for depth, node in enumerate(nodes):
            if node in dims:
                for ancestor in range(depth + 1):
                    nodes_below["/" + "/".join(nodes[:ancestor])].add(node)
    clashes = dims & {leaf for _, leaf in nodes_and_leaves.values()}
    for stack in stacks:
        node, _ = nodes_and_leaves[stack.name]
        clashes |= nodes_below.get(node, set()).intersection(stack.dims)
    return clashes


# --- families ------------------------------------------------------------------------------------


class _Numbered(NamedTuple):
    """Tensors of one kind with the same template, by their indices."""

    template: _Template
    members: dict[_Position, str]


def _families(
    kinds: Mapping[str, Hashable],
    structure: Structure,
    modules: Collection[str] | None,
    paths: Mapping[str, _Path],
) -> Iterator[_Numbered]:
    """Yield all families of two or more tensors."""
    groups = _numbered(kinds, structure, modules, paths)
    for (template, _), members in groups.items():
        if len(members) > 1 and template.count(None) and has_words(template):
            for family in _split_by_width(template, members):
                if len(family.members) > 1:
                    yield family


def _numbered(
    kinds: Mapping[str, Hashable],
    structure: Structure,
    modules: Collection[str] | None,
    paths: Mapping[str, _Path],
) -> dict[tuple[_Template, Hashable], list[tuple[_Spelling, str]]]:
    """Return names, each after its indices, by template and kind."""
    # Names whose words are stated, because dots and slashes do not separate them.
    stated = {n: p for n, p in paths.items() if ".".join(p) != n or any(map(_has_separator, p))}
    groups: dict[tuple[_Template, Hashable], list[tuple[_Spelling, str]]] = defaultdict(list)
    for template, members in structure.numbered(modules):
        by_kind: dict[Hashable, list[tuple[_Spelling, str]]] = defaultdict(list)
        for spelling, name in members:
            if name in kinds and name not in stated:
                by_kind[kinds[name]].append((spelling, name))
        for kind, of_kind in by_kind.items():
            groups[template, kind] += of_kind
    for name, path in stated.items():
        parsed = structure.parse(name, modules, path)
        # A template cannot restore a name that does not join its words with dots.
        if parsed.indices and name in kinds and ".".join(path) == name:
            groups[parsed.template, kinds[name]].append((parsed.indices, name))
    return groups


def _has_separator(word: str) -> bool:
    return "." in word or "/" in word


def _split_by_width(
    template: _Template, members: Sequence[tuple[_Spelling, str]]
) -> Iterator[_Numbered]:
    """Split tensors into families whose template can spell all indices along each axis."""
    # ``1`` and ``01`` are the same number, and so are never in one family.
    columns = list(zip(*[spelling for spelling, _ in members], strict=True))
    # Many members share few indices: each is converted once.
    values = [{index: int(index) for index in set(column)} for column in columns]
    if not any(_padded_width(index) for column in values for index in column):
        axes = [[value[index] for index in col] for value, col in zip(values, columns, strict=True)]
        names = [name for _, name in members]
        yield _Numbered(template, dict(zip(zip(*axes, strict=True), names, strict=True)))
        return
    groups: dict[tuple[int, ...], list[tuple[_Spelling, str]]] = defaultdict(list)
    for spelling, name in members:
        groups[tuple(map(_padded_width, spelling))].append((spelling, name))
    if len(groups) > 1:
        # In 08, 09, 10, the last index has no leading zero, but the same width.
        widths = tuple(map(max, zip(*groups, strict=True)))
        if all(_has_widths(spelling, widths) for spelling, _ in members):
            groups = {widths: list(members)}
    for widths, group in groups.items():
        remaining = iter(widths)
        padded = tuple((next(remaining) or None) if piece is None else piece for piece in template)
        yield _Numbered(padded, {tuple(map(int, spelling)): name for spelling, name in group})


def _padded_width(index: str) -> int:
    """Return the number of digits of an index with leading zeros, 0 for other indices."""
    return len(index) if index[0] == "0" and index != "0" else 0


def _has_widths(spelling: _Spelling, widths: tuple[int, ...]) -> bool:
    return all(
        len(index) == width if _padded_width(index) else len(index) >= width
        for index, width in zip(spelling, widths, strict=True)
    )


# --- grids ---------------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """Members of a family that are a stack, with `present` as in `Stack`."""

    template: _Template
    indices: _Axes
    members: tuple[str, ...]
    present: frozenset[_Position] | None = None


def _full_grids(positions: list[_Position]) -> list[_Axes]:
    """Partition positions into few full grids; return the indices along the axes of each."""
    indices = tuple(tuple(sorted(set(column))) for column in zip(*positions, strict=True))
    if prod(map(len, indices)) == len(positions):
        return [indices]
    # Rows with the same grids along the inner axes are one grid.
    inner_positions: dict[int, list[_Position]] = defaultdict(list)
    for first, *inner in positions:
        inner_positions[first].append(tuple(inner))
    rows: dict[_Axes, list[int]] = defaultdict(list)
    for first, inner_row in sorted(inner_positions.items()):
        for grid in _full_grids(inner_row) if inner_row[0] else [()]:
            rows[grid].append(first)
    return [(tuple(firsts), *grid) for grid, firsts in rows.items()]


def _outer_grids(
    families: Iterable[_Numbered], may_be_absent: Callable[[str], bool]
) -> tuple[list[_Grid], list[_Numbered]]:
    """Put families on all indices of their modules; return their grids, and the other families."""
    joined: list[_Numbered] = []
    remaining: list[_Numbered] = []
    for family in families:
        first = next(iter(family.members.values()))
        (joined if may_be_absent(first) else remaining).append(family)
    while True:
        # Without families that are too sparse, modules can have fewer indices.
        candidates, joined, grids = joined, [], []
        # The template up to an index names its module, because ``encoder.layers`` and
        # ``decoder.layers`` are different modules.
        numbers_by_module: dict[_Template, set[int]] = defaultdict(set)
        for family in candidates:
            columns = zip(*family.members, strict=True)
            for module, column in zip(_module_prefixes(family.template), columns, strict=True):
                numbers_by_module[module].update(column)
        indices_by_module = {m: tuple(sorted(n)) for m, n in numbers_by_module.items()}
        for family in candidates:
            modules = _module_prefixes(family.template)
            indices = tuple(indices_by_module[module] for module in modules)
            size = prod(map(len, indices))
            if size > _MAX_POSITIONS_PER_MEMBER * len(family.members):
                remaining.append(family)
                continue
            joined.append(family)
            members = tuple(family.members[position] for position in sorted(family.members))
            present = None if size == len(members) else frozenset(family.members)
            grids.append(_Grid(family.template, indices, members, present))
        if len(joined) == len(candidates):
            return grids, remaining


def _module_prefixes(template: _Template) -> list[_Template]:
    """Return the pieces before each index of a template."""
    return [
        template[:position] for position, piece in enumerate(template) if not isinstance(piece, str)
    ]


def _fix_shared_indices(grid: _Grid) -> _Grid:
    """Make indices that all members share part of the name, so that no axis has length one."""
    if all(len(indices) > 1 for indices in grid.indices):
        return grid
    template: list[str | int | None] = []
    axes = iter(grid.indices)
    for piece in grid.template:
        indices = () if isinstance(piece, str) else next(axes)
        template.append(_format_piece(piece) % indices if len(indices) == 1 else piece)
    varying = [axis for axis, indices in enumerate(grid.indices) if len(indices) > 1]
    present = None
    if grid.present is not None:
        present = frozenset(tuple(position[axis] for axis in varying) for position in grid.present)
    return _Grid(
        tuple(template),
        tuple(grid.indices[axis] for axis in varying),
        grid.members,
        present,
    )


# --- names of variables and dimensions -----------------------------------------------------------


class _Dimension(NamedTuple):
    """Identity of a dimension: stacks with the same axis share it."""

    name: str  # the preferred one
    occurrence: int  # among axes of this name in the same stack
    indices: tuple[int, ...]


def _named_stacks(
    grids: list[_Grid],
    order: Mapping[str, int],
    reserved: Collection[str],
    preferred_dims: Mapping[str, tuple[str | None, ...]],
) -> list[Stack]:
    """Name the variables and dimensions of grids so that none has the name of a tensor."""
    # Larger stacks choose their names first.
    grids = sorted(grids, key=lambda grid: (-len(grid.members), order[grid.members[0]]))
    unused = _UnusedNames(order)
    names = [unused.take(drop_indices(grid.template)) for grid in grids]
    dimensions = [_dimensions_of(grid, preferred_dims) for grid in grids]
    unused = _UnusedNames({*order, *reserved, *names})
    dim_names = _name_dimensions({dim for dims in dimensions for dim in dims}, unused)
    stacks = [
        Stack(
            name=name,
            template=grid.template,
            dims=tuple(dim_names[dim] for dim in dims),
            indices=grid.indices,
            members=grid.members,
            present=grid.present,
        )
        for name, grid, dims in zip(names, grids, dimensions, strict=True)
    ]
    return sorted(stacks, key=lambda stack: order[stack.members[0]])


def _dimensions_of(
    grid: _Grid, preferred_dims: Mapping[str, tuple[str | None, ...]]
) -> list[_Dimension]:
    """Return the dimensions of a grid, named after its modules unless its members prefer others."""
    names = modules = numbered_modules(grid.template)
    preferred = {preferred_dims.get(name) for name in grid.members} if preferred_dims else {None}
    index_dims = preferred.pop() if len(preferred) == 1 else None
    if index_dims:
        indices = [index for _, index in module_indices(grid.template)]
        dims = [d for d, i in zip(index_dims, indices, strict=True) if not isinstance(i, str)]
        names = [dim or module for dim, module in zip(dims, modules, strict=True)]
    occurrences: Counter[str] = Counter()
    dimensions = []
    for name, axis_indices in zip(names, grid.indices, strict=True):
        dimensions.append(_Dimension(name, occurrences[name], axis_indices))
        occurrences[name] += 1
    return dimensions


def _name_dimensions(
    dimensions: Iterable[_Dimension], unused: _UnusedNames
) -> dict[_Dimension, str]:
    """Name dimensions; if several prefer the same name, the longest gets it."""
    by_name: dict[str, list[_Dimension]] = defaultdict(list)
    for dimension in sorted(dimensions):
        by_name[dimension.name].append(dimension)
    # Preferred names first: layers_1 can be the preferred name of one, and the next of another.
    longest = [
        max(group, key=lambda dim: (len(dim.indices), -dim.occurrence, dim.indices))
        for group in by_name.values()
    ]
    names = {dimension: unused.take(dimension.name) for dimension in longest}
    for group in by_name.values():
        for dimension in group:
            if dimension not in names:
                names[dimension] = unused.take(dimension.name)
    return names


class _UnusedNames:
    """Names that are not taken yet, with a number appended where necessary."""

    def __init__(self, names: Iterable[str]) -> None:
        self._taken = set(names)
        # Where the last search ended: a hostile file can prefer one name ten thousand times.
        self._last_numbers: Counter[str] = Counter()

    def take(self, preferred: str) -> str:
        """Take the preferred name, or ``name_1``, ``name_2``, ..., and return it."""
        name = preferred
        while name in self._taken:
            self._last_numbers[preferred] += 1
            name = f"{preferred}_{self._last_numbers[preferred]}"
        self._taken.add(name)
        return name


# --- attributes of a stack ------------------------------------------------------------------------

_MISSING = object()
# Longer texts stay objects: a fixed-width array takes the memory of the longest for each member.
_MAX_TEXT = 64


class StackedAttrs(NamedTuple):
    """Attributes of the members of a stack."""

    #: Attributes that all members have with the same value.
    shared: dict[str, Any]
    #: Attributes that all members have with different values: one value per position, flat; NaN or
    #: an empty text at positions without a member.
    varying: dict[str, Array]
    #: Names of all other attributes.
    dropped: list[str]


def stack_attrs(positions: Sequence[Mapping[str, Any] | None]) -> StackedAttrs:
    """Combine the attributes of the members of a stack; None is a position without a member."""
    stacked = StackedAttrs({}, {}, [])
    if not any(positions):
        return stacked
    members = [attrs for attrs in positions if attrs is not None]
    for name in dict.fromkeys(name for attrs in members for name in attrs):
        values = [attrs.get(name, _MISSING) for attrs in members]
        if all(_is_same(value, values[0]) for value in values[1:]):
            stacked.shared[name] = values[0]
            continue
        if len(members) < len(positions):
            # Whole numbers and booleans have no value for "missing", and are dropped.
            fill = {str: "", float: np.nan}.get(type(values[0]), _MISSING)
            values = [fill if attrs is None else attrs.get(name, _MISSING) for attrs in positions]
        array = _as_array(values)
        if array is None:
            stacked.dropped.append(name)
        else:
            stacked.varying[name] = array
    return stacked


def _is_same(a: Any, b: Any) -> bool:
    # 1, 1.0 and True are equal, but not the same value in a file.
    if a is b:
        return True
    return type(a) is type(b) and not isinstance(a, np.ndarray) and bool(a == b)


def _as_array(values: list[Any]) -> Array | None:
    """Return scalars of one type as an array, or None if they are anything else."""
    types = {type(value) for value in values}
    if len(types) != 1 or not types <= {bool, int, float, str}:
        return None
    if types == {str}:
        return np.array(values, None if max(map(len, values)) <= _MAX_TEXT else object)
    array = np.array(values)
    return None if array.dtype == object else array
