"""The tree of a checkpoint's modules, made without xarray's copies and checks of each node.

`DataTree.from_dict` copies each node and aligns it with its parents, and `xarray.open_datatree`
then does both again to look for missing indexes: for 18,000 tensors, 20 times the time of
`open_dataset`. The Datasets of modules fit together by construction, so the nodes are made
directly, and the second pass is left out.

The private parts of xarray that this relies on: `Dataset._construct_direct`;
`DataTree._set_node_data` and the attributes `_name`, `_parent` and `_children`; and that
`open_datatree` looks for indexes with ``tree.map_over_datasets(_maybe_create_default_indexes)``.
If one of them changes, the public way is used.
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

__all__ = ["make_module", "make_tree"]


def make_module(variables: dict[str, xr.Variable], coords: Mapping[str, xr.Variable]) -> xr.Dataset:
    """Return a Dataset of variables whose dimensions have the same sizes in all of them."""
    construct: Any = getattr(xr.Dataset, "_construct_direct", None)
    if coords or construct is None or IS_PLAIN:
        return xr.Dataset(variables, coords)
    module: xr.Dataset = construct(variables, set())
    return module


def make_tree(modules: Mapping[str, xr.Dataset]) -> xr.DataTree:
    """Return the tree of Datasets by their paths, one of which is ``"/"``."""
    tree = _made_directly(modules) if _is_known_xarray() else None
    if tree is None:
        tree = xr.DataTree.from_dict(modules)
        tree.set_close(modules["/"].close)  # of the file, which from_dict forgets
    return tree


class _OpenedTree(xr.DataTree):
    """The root of a tree that has all its indexes."""

    __slots__ = ()

    def map_over_datasets(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Hand the nodes over to an ordinary tree where `open_datatree` asks for all indexes."""
        if func is not getattr(api, "_maybe_create_default_indexes", None):
            return super().map_over_datasets(func, *args, **kwargs)
        root = _node(xr.DataTree, self.to_dataset(inherit=False))
        root._children, self._children = self._children, {}
        for child in root._children.values():
            child._parent = root
        return root


def _made_directly(modules: Mapping[str, xr.Dataset]) -> xr.DataTree | None:
    """Return the tree; None where nodes share an index, or a variable has the name of a child."""
    root = _node(_OpenedTree, modules["/"])
    nodes: dict[str, Any] = {"": root}
    # In the order that `DataTree.from_dict` gives to the children of a node.
    for path in sorted(modules, key=lambda path: path.count("/")):
        if path == "/":
            continue
        missing, above = [path], path.rpartition("/")[0]
        while above not in nodes:
            missing.append(above)
            above = above.rpartition("/")[0]
        for place in reversed(missing):
            above, _, name = place.rpartition("/")
            if name in modules.get(above or "/", ()):
                return None
            node = _node(xr.DataTree, modules[path] if place == path else make_module({}, {}))
            node._name, node._parent = name, nodes[above]
            nodes[above]._children[name] = nodes[place] = node
    return None if _has_inherited_indexes(modules) else root


def _node(kind: type[xr.DataTree], module: xr.Dataset) -> Any:
    node: Any = object.__new__(kind)
    node._set_node_data(module)
    node._name, node._parent, node._children = None, None, {}
    return node


def _has_inherited_indexes(modules: Mapping[str, Any]) -> bool:
    """Return whether a node has an index that one of its parents has as well."""
    indexes = {path.rstrip("/"): module._indexes for path, module in modules.items()}
    for path, names in indexes.items():
        above = path
        while names and above:
            above = above.rpartition("/")[0]
            if not names.keys().isdisjoint(indexes.get(above, ())):
                return True
    return False


@cache
def _is_known_xarray() -> bool:
    """Return whether a tree that is made directly is the one that xarray makes."""
    if IS_PLAIN:
        return False
    modules = {
        "/": xr.Dataset({"w": ("x", np.arange(2))}, {"x": [1, 2]}, {"a": 1}),
        "/b/c": make_module({"w": xr.Variable(("x",), np.arange(2))}, {}),
    }
    try:
        tree = _made_directly(modules)
        return tree is not None and tree.identical(xr.DataTree.from_dict(modules))
    except (AttributeError, TypeError):
        return False
