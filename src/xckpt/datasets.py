"""From an Index to Datasets: the variables of all tensors, with coordinates and encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import xarray as xr

from xckpt.labels import AxisNames, child_nodes, stated_name, tree_paths
from xckpt.labels.attributes import StackedAttrs, stacked_attrs
from xckpt.listing import Listed, Listing, free_name, list_arrays
from xckpt.variables import VariableMaker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from xckpt.index import Index
    from xckpt.labels.stacking import Stack
    from xckpt.options import OpenOptions
    from xckpt.storage import Source

    Shapes = Mapping[str, tuple[int, ...]]
    AxisNamesOfModule = Callable[[Shapes], Mapping[str, tuple[str | None, ...]]]

__all__ = ["StackMarks", "add_coords", "make_dataset", "make_groups", "stack_mark"]


class StackMarks(dict[str, dict[str, Any]]):
    """What is stacked in an object, by name of the variable; see `add_coords`."""

    __slots__ = ()

    # xarray copies encodings deeply with their Dataset; these do not change.
    def __deepcopy__(self, memo: Any) -> Self:
        return self


class _Group(NamedTuple):
    """What becomes one Dataset."""

    variables: dict[str, xr.Variable]
    coords: dict[str, xr.Variable]
    dropped_attrs: dict[str, list[str]]


def make_dataset(source: Source, index: Index, options: OpenOptions) -> xr.Dataset:
    """Make the flat Dataset of a checkpoint."""
    listing = list_arrays(source, index, options)
    names = AxisNames(options.dims, {each.name for each in listing.arrays})
    _claim(names, listing.arrays)
    maker = VariableMaker.of(source, listing.sources, options)
    arrays = {each.name: each for each in listing.arrays}
    group = _group(arrays, arrays, maker, names, marks=StackMarks())
    ds = xr.Dataset(group.variables, group.coords)
    ds.encoding = _stack_encoding(listing, group.dropped_attrs)
    if listing.file_order != listing.flat_order:
        ds.encoding["file_order"] = listing.file_order
    return ds


def make_groups(
    source: Source,
    index: Index,
    options: OpenOptions,
    axis_names: AxisNamesOfModule | None = None,
) -> dict[str, xr.Dataset]:
    """Make the Datasets of the modules of a checkpoint."""
    listing = list_arrays(source, index, options, for_tree=True)
    nodes = _placed(listing.arrays)
    leaves = {leaf for node in nodes.values() for leaf in node}
    reserved = leaves.union(each.name for each in listing.arrays)
    maker = VariableMaker.of(source, listing.sources, options)
    top = AxisNames(options.dims, reserved)
    _claim(top, listing.arrays)
    names = {"": top}
    dropped: dict[str, list[str]] = {}
    marks = StackMarks()
    datasets: dict[str, xr.Dataset] = {}
    children = child_nodes(nodes)
    # A node comes after those above it, whose names keep their sizes below.
    for path in sorted(nodes, key=len):
        above = names[_nearest(path, names)]
        names[path.rstrip("/")] = AxisNames(options.dims, reserved, above)
        roles = {} if axis_names is None else axis_names(_shapes(nodes[path]))
        taken = {*nodes[path], *children.get(path, ())}
        group = _group(nodes[path], taken, maker, names[path.rstrip("/")], roles, marks=marks)
        datasets[path] = xr.Dataset(group.variables, group.coords)
        dropped |= group.dropped_attrs
    # Nodes have an order of their own.
    order = {"file_order": listing.file_order}
    datasets["/"].encoding = order | _stack_encoding(listing, dropped)
    return {path: datasets[path] for path in nodes}


def _placed(arrays: Iterable[Listed]) -> dict[str, dict[str, Listed]]:
    """Place arrays in a tree: by node and name in it."""
    by_name = {each.name: each for each in arrays}
    nodes: dict[str, dict[str, Listed]] = {"/": {}}
    for name, (path, leaf) in tree_paths({n: e.path for n, e in by_name.items()}).items():
        nodes.setdefault(path, {})[leaf] = by_name[name]
    return nodes


def _claim(names: AxisNames, arrays: Iterable[Listed]) -> None:
    """Keep the names of stacked dimensions, which are those of their coordinates too."""
    for each in arrays:
        for dim, size in zip(each.stacked_dims, each.lazy.shape, strict=False):
            names.claim(dim, size)


def _nearest(path: str, names: Mapping[str, AxisNames]) -> str:
    """Find the nearest node above a path that has names; the empty path always has."""
    above = path.rpartition("/")[0]
    while above not in names:
        above = above.rpartition("/")[0]
    return above


def _shapes(node: Mapping[str, Listed]) -> dict[str, tuple[int, ...]]:
    return {leaf: each.lazy.shape[len(each.stacked_dims) :] for leaf, each in node.items()}


def _group(
    arrays: Mapping[str, Listed],
    taken: Collection[str],
    maker: VariableMaker,
    names: AxisNames,
    roles: Mapping[str, tuple[str | None, ...]] | None = None,
    *,
    marks: StackMarks,
) -> _Group:
    """Make the variables of one Dataset from arrays by their names in it."""
    group = _Group({}, {}, {})
    for leaf, each in arrays.items():
        suggested = each.suggested
        if roles and leaf in roles:
            suggested = _first_names(suggested, roles[leaf])
        dims = names.of(each.name, each.lazy.shape, suggested, each.stacked_dims, each.tensor.name)
        axes = _file_names(each, dims, suggested, names)
        if each.stacked is None:
            group.variables[leaf] = maker.variable(each, dims, axes)
            continue
        attrs = stacked_attrs([tensor.attrs for tensor in each.stacked.members.tensors])
        group.variables[leaf] = maker.stack(each, dims, attrs.shared, axes)
        marks[each.name] = stack_mark(each.stacked.stack, each.suffix)
        add_coords(group.coords, leaf, each.stacked.stack, attrs, taken, marks=marks)
        if attrs.dropped:
            group.dropped_attrs[each.name] = attrs.dropped
    return group


def _file_names(
    each: Listed,
    dims: tuple[str, ...],
    suggested: tuple[str | None, ...] | None,
    names: AxisNames,
) -> dict[str, str | None]:
    """Say what the file calls the axes that are shown under names of neither it nor the caller."""
    if suggested is None:
        return {}
    inner = dims[len(each.stacked_dims) :]
    callers = names.callers(each.name) or names.callers(each.tensor.name) or ()
    stated = each.suggested or (None,) * len(inner)
    return {
        dim: name
        for dim, name in zip(inner, stated, strict=True)
        if name != stated_name(dim) and dim not in callers
    }


def _first_names(
    first: tuple[str | None, ...] | None, second: tuple[str | None, ...]
) -> tuple[str | None, ...]:
    return tuple([a or b for a, b in zip(first or second, second, strict=True)])


def add_coords(
    coords: dict[Any, xr.Variable],
    name: str,
    stack: Stack,
    attrs: StackedAttrs,
    taken: Collection[Any],
    *,
    marks: StackMarks,
) -> None:
    """Add what a stack has along its dimensions: indices, and attributes that differ."""
    encoding = {"stack": marks}
    for dim, indices in zip(stack.dims, stack.indices, strict=True):
        if dim not in coords:
            values = np.array(indices, np.int64)
            coords[dim] = xr.IndexVariable(dim, values, encoding=encoding)
    for attr, along in attrs.along.items():
        coord = free_name(f"{name}:{attr}", {*taken, *coords})
        coords[coord] = xr.Variable(stack.dims, along.reshape(stack.shape), encoding=encoding)


def stack_mark(stack: Stack, suffix: str = "") -> dict[str, Any]:
    """Say what it takes to name the members of a stack, as ``encoding["stack"]`` does."""
    return {"template": stack.template, "dims": stack.dims, "suffix": suffix}


def _stack_encoding(listing: Listing, dropped_attrs: dict[str, list[str]]) -> dict[str, Any]:
    if all(each.stacked is None for each in listing.arrays):
        return {}
    return {"flat_order": listing.flat_order, "dropped_attrs": dropped_attrs}
