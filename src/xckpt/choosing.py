"""Choosing tensors by the numbers of their modules: ``ds.ckpt.sel(layers=17, experts=3)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from xckpt.errors import shown
from xckpt.labels.stacking import numbered, numbered_bases
from xckpt.tensors import Flat, flatten, rebuild

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    import xarray as xr

__all__ = ["select_modules"]


def select_modules(
    obj: xr.Dataset | xr.DataTree, indexers: Mapping[Any, Any], *, by_position: bool = False
) -> Any:
    """Keep the tensors that are in certain modules, stacked or not."""
    flat = flatten(obj)
    places = {name: _places(name, flat) for name in flat.variables}
    known = _known(places, flat)
    for module in indexers:
        if module not in known:
            there = ", ".join(map(shown, sorted(known))) or "none"
            raise KeyError(
                f"no tensor is in numbered modules {shown(str(module))}; there are {there}"
            )
    chosen = {m: _chosen(known[m], m, key, by_position=by_position) for m, key in indexers.items()}
    variables: dict[Any, xr.Variable] = {}
    keys: dict[str, dict[Hashable, Any]] = {}
    for name, variable in flat.variables.items():
        node = flat.nodes[name]
        taken = _taken(places[name], chosen, flat.indexes(node))
        if taken is not None:
            variables[name] = variable.isel(_along(variable, taken))
            keys.setdefault(node, {}).update(taken)
    if not variables:
        told = ", ".join(f"{module}={key!r}" for module, key in indexers.items())
        raise KeyError(f"no tensor has {told}")
    # Nodes inherit the coordinates of those above them.
    inherited: dict[str, dict[Hashable, Any]] = {}
    for node, here in keys.items():
        path = node
        while path not in inherited or not here.items() <= inherited[path].items():
            inherited.setdefault(path, {}).update(here)
            path = path.rpartition("/")[0] or "/"
    coords = {
        path: {n: v.isel(_along(v, inherited.get(path, {}))) for n, v in here.items()}
        for path, here in flat.coords.items()
    }
    return rebuild(obj, Flat(variables, {}, coords))


def _taken(
    places: Mapping[str, list[Any]],
    chosen: Mapping[str, tuple[list[int], bool]],
    indexes: Mapping[Any, xr.Variable],
) -> dict[Hashable, Any] | None:
    """Return what to take along each dimension of a variable; None if it is left out."""
    taken: dict[Hashable, Any] = {}
    for module, (numbers, is_one) in chosen.items():
        for axis in places.get(module, [None]):
            if axis is None or isinstance(axis, int):
                if axis not in numbers:
                    return None
                continue
            along = np.atleast_1d(indexes[axis].values).tolist()
            order = {number: at for at, number in enumerate(along)}
            at = [order[number] for number in numbers if number in order]
            if not at:
                return None
            taken[axis] = at[0] if is_one else at
    return taken


def _along(variable: xr.Variable, keys: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    return {dim: key for dim, key in keys.items() if dim in variable.dims}


def _places(name: Any, flat: Flat) -> dict[str, list[Any]]:
    """Return, for each numbered module that a variable is in, a dimension or its number."""
    found: dict[str, list[Any]] = {}
    record = flat.variables[name].encoding.get("stack")
    if record is None:
        _, bases, indices = numbered(str(name).split("."))
        for base, number in zip(bases, indices, strict=True):
            found.setdefault(base, []).append(int(number))
        return found
    for base, dim in zip(numbered_bases(record.template), record.dims, strict=True):
        if dim in flat.indexes(flat.nodes[name]):
            found.setdefault(base, []).append(dim)
    # Of modules that were left apart, the numbers are still in the template.
    _, bases, indices = numbered([part or "" for part in record.template if isinstance(part, str)])
    for base, number in zip(bases, indices, strict=True):
        found.setdefault(base, []).append(int(number))
    return found


def _known(places: Mapping[Any, Mapping[str, list[Any]]], flat: Flat) -> dict[str, list[int]]:
    """List the numbers that each module has anywhere."""
    numbers: dict[str, set[int]] = {}
    seen: set[tuple[str, Any]] = set()
    for name, modules in places.items():
        node = flat.nodes[name]
        for module, axes in modules.items():
            for axis in axes:
                if isinstance(axis, int):
                    numbers.setdefault(module, set()).add(axis)
                elif (node, axis) not in seen:
                    seen.add((node, axis))
                    along = np.atleast_1d(flat.indexes(node)[axis].values)
                    numbers.setdefault(module, set()).update(along.tolist())
    return {module: sorted(found) for module, found in numbers.items()}


def _chosen(
    known: list[int], module: str, key: Any, *, by_position: bool
) -> tuple[list[int], bool]:
    """Return the numbers that an indexer means, and whether it is one number."""
    index = pd.Index(known)
    if by_position:
        found = index[key]
    elif isinstance(key, slice):
        found = index[index.slice_indexer(key.start, key.stop, key.step)]
    else:
        wanted = np.asarray(key)
        if wanted.dtype == bool or wanted.dtype.kind not in "iu" or wanted.ndim > 1:
            raise TypeError(f"{module} takes a number, a list of numbers or a slice, not {key!r}")
        found = wanted
    numbers = np.atleast_1d(found).tolist()
    missing = [number for number in numbers if number not in index]
    if missing:
        raise KeyError(f"no tensor has {module}={missing[0]}; there are {known[0]} to {known[-1]}")
    return numbers, np.ndim(found) == 0
