"""Datasets of the modules of a checkpoint, by their paths in a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import xarray as xr

from xckpt.datasets.listing import Listed, list_arrays
from xckpt.datasets.making import GroupMaker, encoding_of_dataset
from xckpt.errors import shown
from xckpt.labels import child_nodes, tree_paths
from xckpt.labels.filters import suggest_names
from xckpt.structure.dims import axes_of
from xckpt.upstream.xarray_trees import assemble_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from xckpt.datasets.options import OpenOptions
    from xckpt.index import Index
    from xckpt.storage import Source

    Axes = tuple[str | None, ...]
    Shapes = Mapping[str, tuple[int, ...]]
    AxisNamesOfModule = Callable[[Shapes], Mapping[str, Axes]]


def make_groups(
    source: Source,
    index: Index,
    options: OpenOptions,
    axis_names: AxisNamesOfModule | None = None,
) -> dict[str, xr.Dataset]:
    """Make the Datasets of the modules of a checkpoint."""
    listing = list_arrays(source, index, options, for_tree=True)
    arrays = {array.name: array for array in listing.arrays}
    nodes: dict[str, dict[str, Listed]] = {"/": {}}
    paths = tree_paths({name: array.path for name, array in arrays.items()})
    for name, (path, leaf) in paths.items():
        nodes.setdefault(path, {})[leaf] = arrays[name]
    leaves = {leaf for node in nodes.values() for leaf in node}
    reserved = leaves | arrays.keys()
    groups = GroupMaker.of(source, index, options, listing, axes_of, reserved=reserved)
    top = groups.top
    repeated = _repeated_below(nodes) if index.arrangement.coords else set()
    modules = _modules(index, arrays)
    dropped_attrs: dict[str, list[str]] = {}
    datasets: dict[str, xr.Dataset] = {}
    # Children have precedence over coordinates of stacks with the same name.
    children = child_nodes(nodes) if any(array.stacked for array in listing.arrays) else {}
    # Parents come first: the names of their axes keep their sizes in children. Modules without an
    # open tensor count, so that names do not depend on the tensors that are opened.
    namers = {"": top}  # by path without a slash at the end
    for path in sorted({*nodes, *modules}, key=len):
        key, node, module = path.rstrip("/"), nodes.get(path, {}), modules.get(path, {})
        above = key.rpartition("/")[0]
        while above not in namers:  # the root is the empty path, which is always there
            above = above.rpartition("/")[0]
        # Nodes inherit the indexes of their parents: no other variable may have such a name.
        free = {leaf: array for leaf, array in node.items() if (key, leaf) not in repeated}
        names = namers[key] = groups.names_below(namers[above], free)
        in_module = _suggested_in(module, groups.suggested, None if top.by_size else axis_names)
        names.survey({member.name: member for member in module.values()}, in_module)
        if path in nodes:
            used_names = {*node, *children.get(path, ())}
            group = groups.make(node, used_names, names, in_module)
            datasets[path] = assemble_dataset(group.variables, group.coords)
            dropped_attrs |= group.dropped_attrs
    top.warn_of_refused(source.name)
    # The order of nodes is not the order of the file.
    encoding = encoding_of_dataset(listing, dropped_attrs)
    datasets["/"].encoding = {"file_order": listing.file_order, **encoding}
    in_order = {path: datasets[path] for path in nodes}
    _add_attrs(in_order, index.arrangement.modules)
    return in_order


class _Member(NamedTuple):
    """A tensor in a module of a tree, or a stack under the name of its first tensor."""

    name: str
    shape: tuple[int, ...]


def _modules(index: Index, arrays: Mapping[str, Listed]) -> dict[str, dict[str, _Member]]:
    """Return the tensors in each module of the whole file, by their names there."""
    stacks = [array for array in arrays.values() if array.stacked is not None]
    # Each stack is in one module, in which its tensors have the names of its first one.
    stacked = {name for array in stacks for name in array.members}
    paths = {name: t.path for name, t in index.tensors.items() if name not in stacked}
    paths |= {array.name: array.path for array in stacks}
    modules: dict[str, dict[str, _Member]] = {}
    for name, (path, leaf) in tree_paths(paths).items():
        tensor = index.tensors[name] if name in index.tensors else arrays[name].tensor
        modules.setdefault(path, {})[leaf] = _Member(tensor.name, tensor.shape)
    return modules


def _repeated_below(nodes: Mapping[str, Collection[str]]) -> set[tuple[str, str]]:
    """Return the nodes, as paths without a slash at the end, and names of variables below them."""
    below = set()
    for path, leaves in nodes.items():
        for leaf in leaves:
            key = path.rstrip("/")
            while key:
                key = key.rpartition("/")[0]
                if (key, leaf) in below:
                    break  # the nodes above have it, too
                below.add((key, leaf))
    return below


def _suggested_in(
    module: Mapping[str, _Member],
    suggested: Mapping[str, Axes],
    axis_names: AxisNamesOfModule | None,
) -> dict[str, Axes]:
    """Return the names of the axes in a module, also those that its tensors lead to together."""
    by_module: dict[str, Axes] = {}
    if axis_names is not None:
        axes = axis_names({leaf: member.shape for leaf, member in module.items()})
        by_module = {module[leaf].name: names for leaf, names in axes.items()}
    return {
        member.name: _either(suggested.get(member.name), by_module.get(member.name))
        for member in module.values()
        if member.name in suggested or member.name in by_module
    }


def _either(first: Axes | None, second: Axes | None) -> Axes:
    """Return the first names of axes, and the second ones of axes without a first."""
    if first is None or second is None:
        return first or second or ()
    return tuple([a or b for a, b in zip(first, second, strict=True)])


def _add_attrs(datasets: dict[str, xr.Dataset], modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the attributes of all modules, with or without tensors."""
    for path, attrs in sorted(modules.items()):
        parent, slash, leaf = path.rpartition("/")
        if path in datasets:
            datasets[path].attrs = dict(attrs)
        elif slash and leaf not in {"", ".", ".."}:
            above = datasets.get(parent or "/") if parent != "/" else None
            if above is not None and leaf not in above.variables:
                datasets[path] = xr.Dataset(attrs=attrs)


def rooted(datasets: Mapping[str, xr.Dataset], group: str, source: str) -> dict[str, xr.Dataset]:
    """Return the Datasets of a module and below it, by their paths from there.

    Raise `ValueError` if the file has no such module.
    """
    top = f"/{group.strip('/')}".rstrip("/")
    below = {
        path[len(top) :] or "/": ds
        for path, ds in datasets.items()
        if f"{path.rstrip('/')}/".startswith(f"{top}/")
    }
    if not below:
        modules = [path.lstrip("/") for path in datasets]
        hint = suggest_names(modules, group.strip("/"))
        raise ValueError(f"{source}: no module is {shown(group)}{hint}")
    return {"/": xr.Dataset(), **below}
