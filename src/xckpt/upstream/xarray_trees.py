"""Datasets and trees of modules, built without xarray's copies and checks of each variable.

`DataTree.from_dict` copies each node and aligns it with its parents, and `xarray.open_datatree`
then does both again to look for missing indexes: for 18,000 tensors, 20 times the time of
`open_dataset`. The Datasets of modules fit together by construction, so the nodes are made
directly, without the second pass.

This relies on private parts of xarray: `Dataset._construct_direct` and the indexes of a Dataset,
`Dataset._indexes`; `DataTree._set_node_data` and the attributes `_name`, `_parent` and `_children`;
and the call ``tree.map_over_datasets(_maybe_create_default_indexes)`` in `open_datatree`. If one of
them changes, the public functions are used.
"""

# ruff: noqa: SLF001

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from xarray.backends import api

from xckpt.upstream import IS_PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NO_COORDS = xr.Dataset()


def assemble_dataset(variables: Mapping[Any, xr.Variable], coords: Mapping[Any, Any]) -> xr.Dataset:
    """Return a Dataset of variables whose dimensions have the same sizes in all of them."""
    construct: Any = getattr(xr.Dataset, "_construct_direct", None)
    has_index = any(dim in variables for v in variables.values() for dim in v.dims)
    if construct is None or IS_PLAIN or has_index or not variables.keys().isdisjoint(coords):
        return xr.Dataset(variables, coords)
    # A Dataset of coordinates takes longer than all else, and most modules have none.
    base = xr.Dataset(coords=coords) if coords else _NO_COORDS
    names, indexes = set(base.variables), dict(base._indexes)
    dataset: xr.Dataset = construct({**variables, **base.variables}, names, indexes=indexes)
    return dataset


def make_tree(modules: Mapping[str, xr.Dataset]) -> xr.DataTree:
    """Return the tree of Datasets by their paths, which include ``"/"``."""
    tree = _build_tree(modules) if _is_known_xarray() else None
    if tree is None:
        tree = xr.DataTree.from_dict(modules)
        tree.set_close(modules["/"].close)  # from_dict drops this function
    return tree


class _OpenedTree(xr.DataTree):
    """The root of a tree that has all its indexes."""

    __slots__ = ()

    def map_over_datasets(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a plain DataTree with the same nodes if `open_datatree` adds missing indexes."""
        if func is not getattr(api, "_maybe_create_default_indexes", None):
            return super().map_over_datasets(func, *args, **kwargs)
        root = _node(xr.DataTree, self.to_dataset(inherit=False))
        root._children, self._children = self._children, {}
        for child in root._children.values():
            child._parent = root
        return root


def _build_tree(modules: Mapping[str, xr.Dataset]) -> xr.DataTree | None:
    """Return the tree; None if nodes share an index, or a variable has the name of a child."""
    root = _node(_OpenedTree, modules["/"])
    nodes: dict[str, Any] = {"": root}
    # Sorted as in `DataTree.from_dict`, for the same order of children.
    for path in sorted(modules, key=lambda path: path.count("/")):
        if path == "/":
            continue
        missing, parent = [path], path.rpartition("/")[0]
        while parent not in nodes:
            missing.append(parent)
            parent = parent.rpartition("/")[0]
        for node_path in reversed(missing):
            parent, _, name = node_path.rpartition("/")
            if name in modules.get(parent or "/", ()):
                return None
            node = _node(
                xr.DataTree, modules[path] if node_path == path else assemble_dataset({}, {})
            )
            node._name, node._parent = name, nodes[parent]
            nodes[parent]._children[name] = nodes[node_path] = node
    return None if _has_inherited_indexes(modules) else root


def _node(kind: type[xr.DataTree], module: xr.Dataset) -> Any:
    node: Any = object.__new__(kind)
    node._set_node_data(module)
    node._name, node._parent, node._children = None, None, {}
    return node


def _has_inherited_indexes(modules: Mapping[str, Any]) -> bool:
    """Return whether a node has the same index as one of its parents."""
    indexes = {path.rstrip("/"): module._indexes for path, module in modules.items()}
    for path, names in indexes.items():
        parent = path
        while names and parent:
            parent = parent.rpartition("/")[0]
            if not names.keys().isdisjoint(indexes.get(parent, ())):
                return True
    return False


@cache
def _is_known_xarray() -> bool:
    """Return whether `_build_tree` makes the same tree as this version of xarray."""
    if IS_PLAIN:
        return False
    modules = {
        "/": xr.Dataset({"w": ("x", np.arange(2))}, {"x": [1, 2]}, {"a": 1}),
        "/b/c": assemble_dataset({"w": xr.Variable(("x",), np.arange(2))}, {}),
    }
    try:
        tree = _build_tree(modules)
        return tree is not None and tree.identical(xr.DataTree.from_dict(modules))
    except (AttributeError, TypeError):
        return False
