"""Stacking an open object, and the inverse; choosing tensors by the numbers of their modules.

A stacked variable has a record of its members; see `xckpt.datasets.stack_records`.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from xarray.core.indexing import ExplicitlyIndexed

from xckpt.arrays.graph import TensorGraph, is_stored, tensor_array
from xckpt.arrays.keys import target_nbytes
from xckpt.arrays.lazy import UnreadableArray
from xckpt.arrays.stacked import AbsentArray, StackedArray, can_be_absent
from xckpt.datasets.listing import require_join, stacked_modules, warn_of_unknown_modules
from xckpt.datasets.making import add_coords
from xckpt.datasets.stack_records import (
    StackMarks,
    StackMember,
    StackMembers,
    StackRecord,
    member_variables,
    record_stack,
    stack_of,
)
from xckpt.datasets.tensors import Flat, Obj, flatten, rebuild
from xckpt.datasets.variables import LazyVariable
from xckpt.errors import shown
from xckpt.labels import tree_paths
from xckpt.labels.attributes import stack_attrs
from xckpt.labels.grids import Stack, find_stacks, find_stacks_in_tree
from xckpt.labels.numbering import drop_indices, is_index, module_indices, parse_name, split_words

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence


__all__ = ["NumberSet", "number_sets", "select_modules", "stack_modules", "unstack_modules"]


def stack_modules(
    obj: Obj,
    modules: Literal[True] | str | Collection[str] = True,  # noqa: FBT002  one of three kinds
    join: Literal["exact", "outer"] = "exact",
) -> Obj:
    """Make numbered modules dimensions."""
    only = stacked_modules(modules)
    require_join(join)
    flat = flatten(obj)
    warn_of_unknown_modules([n for n in flat.variables if isinstance(n, str)], only)
    new, dropped = _stacked(obj, flat, _stacks(obj, flat, only, join))
    result: Obj = rebuild(obj, new)
    if len(new.variables) < len(flat.variables):
        order = obj.encoding.get("flat_order", tuple(flat.variables))
        before = obj.encoding.get("dropped_attrs", {})
        result.encoding |= {"flat_order": order, "dropped_attrs": before | dropped}
    return result


def unstack_modules(obj: Obj) -> Obj:
    """Return every stacked tensor a variable of its own again, the inverse of `stack_modules`."""
    flat = flatten(obj)
    if not any(map(stack_of, flat.variables.values())):
        copied: Obj = rebuild(obj, flat)
        return copied
    new = Flat({}, {}, flat.coords)
    stacked_dims: set[str] = set()
    for name, variable in flat.variables.items():
        record = stack_of(variable)
        if record is not None:
            stacked_dims.update(record.dims)
        members = member_variables(name, variable, flat.indexes(flat.nodes[name]))
        for member, unstacked in members.items():
            if member in new.variables:
                raise ValueError(f"{shown(member)} is a variable, and stacked in {shown(name)} too")
            new.variables[member] = unstacked
    order = {name: at for at, name in enumerate(obj.encoding.get("flat_order", ()))}
    in_order = sorted(new.variables, key=lambda name: order.get(name, len(order)))
    coords = {
        path: {n: v for n, v in here.items() if n not in stacked_dims or v.dims}
        for path, here in flat.coords.items()
    }
    in_file = {name: new.variables[name] for name in in_order}
    result: Obj = rebuild(obj, Flat(in_file, {}, coords))
    for key in ("flat_order", "dropped_attrs"):
        result.encoding.pop(key, None)
    return result


# --- which numbers there are ---------------------------------------------------------------------


class NumberSet(NamedTuple):
    """Numbers that a module has, and the tensors that have just these.

    Parameters
    ----------
    module : str
        Its path without other numbers: ``model.layers``.
    numbers : tuple of int
        Ascending.
    dim : str or None
        The dimension that has them, None where they are not stacked.
    variables : tuple of str
        Names of the tensors without their numbers: ``model.layers.mlp.w``.
    """

    module: str
    numbers: tuple[int, ...]
    dim: str | None
    variables: tuple[str, ...]


def number_sets(obj: xr.Dataset | xr.DataTree) -> list[NumberSet]:
    """List which sets of numbers each module has, the largest first, and which tensors have them.

    A module with several sets is why stacking makes several dimensions of it, or, in an outer
    join, why members are absent.
    """
    flat = flatten(obj)
    indexes = {path: flat.indexes(path) for path in flat.coords}
    # By a name without numbers: the numbers along each index, by module, position and dimension.
    names: dict[str, dict[tuple[str, int, str | None], set[int]]] = {}
    known: dict[tuple[str | int | None, ...], tuple[str, list[str]]] = {}
    for name, variable in flat.variables.items():
        record = stack_of(variable)
        if record is None:
            apart = parse_name(str(name))
            template: tuple[str | int | None, ...] = apart.template
            each: list[tuple[str | None, set[int]]] = [(None, {int(n)}) for n in apart.indices]
        else:
            try:
                members = StackMembers(str(name), variable, indexes[flat.nodes[name]])
            except ValueError:  # it cannot be told which are left
                continue
            left = zip(record.dims, map(set, members.along), strict=True)
            pieces = [p for p in record.template if not isinstance(p, str) or is_index(p)]
            each = [(None, {int(p)}) if isinstance(p, str) else next(left) for p in pieces]
            template = tuple(
                [None if isinstance(p, str) and is_index(p) else p for p in record.template]
            )
        if template not in known:
            at = [place for place, piece in enumerate(template) if not isinstance(piece, str)]
            modules = [drop_indices(template[: place + 1]) or "index" for place in at]
            known[template] = drop_indices(template), modules
        plain, modules = known[template]
        for axis, (module, (dim, numbers)) in enumerate(zip(modules, each, strict=True)):
            names.setdefault(plain, {}).setdefault((module, axis, dim), set()).update(numbers)
    sets: dict[tuple[str, tuple[int, ...], str | None], list[str]] = {}
    for plain, of in names.items():
        for (module, _, dim), numbers in of.items():
            sets.setdefault((module, tuple(sorted(numbers)), dim), []).append(plain)
    found = [NumberSet(*each, tuple(variables)) for each, variables in sets.items() if each[1]]
    order = {each.module: at for at, each in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda each: (order[each.module], -len(each.numbers)))


# --- stacking ------------------------------------------------------------------------------------


def _stacks(obj: Any, flat: Flat, only: Collection[str] | None, join: str) -> list[Stack]:
    kinds, others = {}, []
    for name, variable in flat.variables.items():
        if isinstance(name, str) and stack_of(variable) is None:
            kinds[name] = _kind(variable)
        else:
            others.append(str(name))
    stated = {name: flat.variables[name].encoding.get("path") for name in kinds}
    paths = {name: path for name, path in stated.items() if path is not None}
    reserved = {str(dim) for variable in flat.variables.values() for dim in variable.dims}
    reserved |= {str(name) for coords in flat.coords.values() for name in coords}
    reserved |= set(others)

    def outer(name: str) -> bool:
        variable = flat.variables[name]
        data: Any = variable._data  # noqa: SLF001  see `_kind`
        if "part" in variable.encoding or (
            is_stored(data) and isinstance(data.dask.lazy, UnreadableArray)
        ):
            return False
        is_elsewhere = isinstance(data, ExplicitlyIndexed)
        meta = np.empty(0, variable.dtype) if is_elsewhere else getattr(data, "_meta", data)
        return can_be_absent(meta)

    may_be_absent = outer if join == "outer" else None
    if isinstance(obj, xr.DataTree):
        return find_stacks_in_tree(
            kinds, only, paths=paths, reserved=reserved, others=others, may_be_absent=may_be_absent
        )
    return find_stacks(kinds, only, paths=paths, reserved=reserved, may_be_absent=may_be_absent)


def _kind(variable: xr.Variable) -> tuple[Any, ...]:
    """Return all that the members of a stack have in common."""
    data = variable._data  # noqa: SLF001  `data` would load what is not dask's
    told = ("layout", "stored_dtype", "stored_order", "part")
    stored = [str(variable.encoding.get(key)) for key in told]
    kinds = (type(data), type(getattr(data, "_meta", None)))
    return (variable.dims, variable.shape, variable.dtype, *kinds, *stored)


def _stacked(obj: Any, flat: Flat, stacks: Sequence[Stack]) -> tuple[Flat, dict[str, list[str]]]:
    """Put stacks in the places of their first members; list the attributes that are lost."""
    members = {name for each in stacks for name in each.members}
    order = {name: at for at, name in enumerate(flat.variables)}
    firsts = {min(each.members, key=order.__getitem__): each for each in stacks}
    variables: dict[str, xr.Variable] = {}
    coords = {path: dict(here) for path, here in flat.coords.items()}
    dropped: dict[str, list[str]] = {}
    marks = StackMarks()
    places = _places(obj, flat, stacks, members)
    for name, variable in flat.variables.items():
        each = firsts.get(name)
        if each is None:
            if name not in members:
                variables[name] = variable
            continue
        attrs = stack_attrs([*each.arrange([flat.variables[n].attrs for n in each.members])])
        variables[each.name] = _stack_variable(each, flat, attrs.shared)
        path, leaf = places[each.name]
        record = StackRecord(each.template, each.dims, indices=each.indices, present=each.present)
        marks.add(each.name, record)
        add_coords(coords.setdefault(path, {}), leaf, each, attrs, flat.variables, marks=marks)
        if attrs.dropped:
            dropped[each.name] = attrs.dropped
    return Flat(variables, {}, coords), dropped


def _places(
    obj: Any, flat: Flat, stacks: Sequence[Stack], members: Collection[str]
) -> dict[str, tuple[str, str]]:
    """Say where stacks are: the path of the node, and the name in it."""
    if isinstance(obj, xr.Dataset):
        return {each.name: ("/", each.name) for each in stacks}
    paths = {n: v.encoding.get("path") for n, v in flat.variables.items() if n not in members}
    for each in stacks:
        stated = "path" in flat.variables[each.members[0]].encoding
        paths[each.name] = split_words(each.template) if stated else None
    return tree_paths(paths)


def _stack_variable(each: Stack, flat: Flat, shared: dict[str, Any]) -> xr.Variable:
    variables = [flat.variables[name] for name in each.members]
    first = variables[0]
    data = _stack_arrays(each, [_array(variable) for variable in variables])
    keys = ("layout", "source", "stored_dtype", "stored_order", "part")
    encoding = {key: first.encoding[key] for key in keys if key in first.encoding}
    encoding["nbytes"] = sum(v.encoding.get("nbytes", v.nbytes) for v in variables)
    encoding["original_shape"] = data.shape
    shares = {n: flat.variables[n].encoding.get("shares") for n in each.members}
    if any(shares.values()):
        encoding["shares"] = {name: owner for name, owner in shares.items() if owner}
    if "path" in first.encoding:
        encoding["path"] = split_words(each.template)
    record = StackRecord(
        each.template,
        each.dims,
        "",
        each.indices,
        tuple(shared),
        getattr(data, "name", None),
        tuple(each.arrange([_as_member(variable) for variable in variables])),
        each.present,
    )
    record_stack(encoding, record)
    return LazyVariable.of((*each.dims, *first.dims), data, shared or None, encoding)


def _array(variable: xr.Variable) -> Any:
    """Return the array of a variable without reading what another engine left lazy."""
    if isinstance(variable._data, ExplicitlyIndexed):  # noqa: SLF001  `data` would read it
        return variable.chunk().data
    return variable.data


def _as_member(variable: xr.Variable) -> StackMember:
    """Say what a variable was; values in memory are not kept twice."""
    data = variable._data  # noqa: SLF001
    lazy = data if isinstance(data, da.Array) and isinstance(data.dask, TensorGraph) else None
    return StackMember(dict(variable.attrs), dict(variable.encoding), lazy)


def _stack_arrays(each: Stack, arrays: list[Any]) -> Any:
    """Stack arrays along the grid; lazy ones of tensors stay one chunk or several each."""
    first = arrays[0]
    places: list[Any] = list(each.arrange(arrays))
    if all(isinstance(array, da.Array) and isinstance(array.dask, TensorGraph) for array in arrays):
        absent = AbsentArray(each.name, first.shape, first.dtype)
        members = [absent if array is None else array.dask.lazy for array in places]
        lazy = StackedArray(each.name, members, each.shape)
        told = "\0".join([each.name, *("" if array is None else array.name for array in places)])
        token = blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        chunks = lazy.chunks(target_nbytes())
        return tensor_array(lazy, f"{each.name}-{token}", chunks, lazy.empty((0,) * lazy.ndim))
    if each.present is not None:
        of = next((array for array in arrays if isinstance(array, da.Array)), first)
        absent = (da if isinstance(of, da.Array) else np).full_like(of, np.nan)
        places = [absent if array is None else array for array in places]
    if not any(isinstance(array, da.Array) for array in arrays):
        return np.stack(places).reshape((*each.shape, *first.shape))
    for count in reversed(each.shape):
        rows = range(0, len(places), count)
        places = [da.stack(places[row : row + count]) for row in rows]
    return places[0]


def select_modules(obj: Obj, indexers: Mapping[Any, Any], *, by_position: bool = False) -> Obj:
    """Keep the tensors that are in certain modules, stacked or not."""
    flat = flatten(obj)
    indexes = {path: flat.indexes(path) for path in flat.coords}
    of = {name: indexes[node] for name, node in flat.nodes.items()}
    places = {name: _numbers_of(str(name), v, of[name]) for name, v in flat.variables.items()}
    known = _known(places, of)
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
        taken = _taken(places[name], chosen, of[name])
        if taken is not None and _has_any(variable, taken, of[name]):
            variables[name] = variable.isel(_keys_of(variable, taken))
            keys.setdefault(flat.nodes[name], {}).update(taken)
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
        path: {n: v.isel(_keys_of(v, inherited.get(path, {}))) for n, v in here.items()}
        for path, here in flat.coords.items()
    }
    selected: Obj = rebuild(obj, Flat(variables, {}, coords))
    return selected


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


def _has_any(
    variable: xr.Variable, taken: Mapping[Hashable, Any], indexes: Mapping[Any, xr.Variable]
) -> bool:
    """Return whether a variable has a member among what is taken of its stack."""
    record = stack_of(variable)
    if record is None or record.present is None:
        return True
    left = []
    for dim in record.dims:
        along = np.atleast_1d(indexes[dim].values)
        left.append(set(np.atleast_1d(along[taken.get(dim, slice(None))]).tolist()))
    return any(all(map(set.__contains__, left, numbers)) for numbers in record.present)


def _keys_of(variable: xr.Variable, keys: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    return {dim: key for dim, key in keys.items() if dim in variable.dims}


def _numbers_of(
    name: str, variable: xr.Variable, indexes: Mapping[Any, xr.Variable]
) -> dict[str, list[Any]]:
    """Return, for each numbered module that a variable is in, a dimension or its number."""
    found: dict[str, list[Any]] = {}
    record = stack_of(variable)
    if record is None:
        plain = parse_name(name)
        for base, index in zip(plain.modules, plain.indices, strict=True):
            found.setdefault(base, []).append(int(index))
        return found
    dims = iter(record.dims)
    # Of modules that were left apart, the numbers are still in the template.
    for base, number in module_indices(record.template):
        place: Any = int(number) if isinstance(number, str) else next(dims)
        if isinstance(place, int) or place in indexes:
            found.setdefault(base, []).append(place)
    return found


def _known(
    places: Mapping[Any, Mapping[str, list[Any]]], of: Mapping[Any, Mapping[Any, xr.Variable]]
) -> dict[str, list[int]]:
    """List the numbers that each module has anywhere."""
    numbers: dict[str, set[int]] = {}
    seen: set[tuple[str, int]] = set()
    for name, modules in places.items():
        for module, axes in modules.items():
            known = numbers.setdefault(module, set())
            for axis in axes:
                if isinstance(axis, int):
                    known.add(axis)
                elif (module, id(of[name][axis])) not in seen:
                    seen.add((module, id(of[name][axis])))
                    known.update(np.atleast_1d(of[name][axis].values).tolist())
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
