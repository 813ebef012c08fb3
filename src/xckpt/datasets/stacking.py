"""Stacking and unstacking of open objects, and selection of tensors by the numbers of modules.

A stacked variable has a record of its members; see `xckpt.datasets.stack_records`.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from xckpt.arrays.derived import reopened
from xckpt.arrays.graph import is_stored, lazy_of, tensor_array
from xckpt.arrays.keys import target_nbytes
from xckpt.arrays.lazy import Opened, UnreadableArray
from xckpt.arrays.stacked import AbsentArray, StackedArray, can_be_absent
from xckpt.datasets.listing import warn_of_unknown_modules
from xckpt.datasets.making import add_coords
from xckpt.datasets.options import require_join, stacked_modules
from xckpt.datasets.stack_records import (
    StackMarks,
    StackMember,
    StackMembers,
    StackRecord,
    is_made_by_stacking,
    record_stack,
    stack_of,
    unstacked_variables,
)
from xckpt.datasets.tensors import Flat, Obj, OpenTensors, flatten, rebuild
from xckpt.datasets.variables import LazyVariable
from xckpt.errors import shown, warn
from xckpt.labels import tree_paths
from xckpt.labels.grids import Stack, find_stacks, stack_attrs
from xckpt.structure.numbering import (
    drop_indices,
    is_index,
    module_indices,
    parse_name,
    split_words,
)
from xckpt.upstream.dask_arrays import is_dask_array
from xckpt.upstream.xarray_variables import ExplicitlyIndexed, data_of

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

_NO_RECORD = (
    "no record of the stack along {} is left, as zarr, netCDF and a coordinate that replaces the "
    "one of the stack keep none (unstack the checkpoint before it is written or computed)"
)
# Keys of the encoding that all members of a stack have in common.
_COMMON = ("layout", "stored_dtype", "stored_order", "part", "declared")


def stack_modules(
    obj: Obj,
    modules: Literal[True] | str | Collection[str] = True,  # noqa: FBT002  one of three kinds
    join: Literal["exact", "outer"] = "exact",
) -> Obj:
    """Turn numbered modules into dimensions."""
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
    """Turn every stacked tensor into a separate variable again."""
    tensors = OpenTensors(obj)
    flat = flatten(obj)._replace(variables=tensors.variables)
    if not any(map(stack_of, flat.variables.values())):
        text, names = lost_stacks(tensors)
        if names:
            warn(f"nothing is unstacked: {text}")
        copied: Obj = rebuild(obj, flat)
        return copied
    order = obj.encoding.get("flat_order", ())
    variables = unstacked_variables(flat.variables, lambda n: flat.indexes(flat.nodes[n]), order)
    # A sum with a stacked object shows by these arrays that the other one was not.
    separate = cache(lambda opened: Opened(opened.source, opened.names, shared=opened.shared))
    for name, variable in flat.variables.items():
        array: Any = data_of(variable)
        if name in variables and is_dask_array(array):
            variables[name] = variable._replace(data=reopened(array, separate))
    records = filter(None, map(stack_of, flat.variables.values()))
    stacked_dims = {dim for record in records for dim in record.dims}
    coords = {
        path: {n: v for n, v in node_coords.items() if n not in stacked_dims or v.dims}
        for path, node_coords in flat.coords.items()
    }
    result: Obj = rebuild(obj, Flat(variables, {}, coords))
    for key in ("flat_order", "dropped_attrs"):
        result.encoding.pop(key, None)
    return result


def lost_stacks(tensors: OpenTensors) -> tuple[str, list[str]]:
    """Return why stacks have no record, and the names of their tensors."""
    # They have a dimension with the name of a module and its numbers, which stacking did not make.
    dims = {
        str(dim)
        for dim, coord in tensors.coords.items()
        if coord.dtype.kind in "iu" and not is_made_by_stacking(coord)
    }
    of_dims: dict[str, None] = {}
    names = []
    for name, variable in tensors.variables.items() if dims else ():
        own = [d for d in map(str, variable.dims) if d in dims and d in str(name).split(".")[:-1]]
        of_dims |= dict.fromkeys(own)
        names += [str(name)] if own else []
    return _NO_RECORD.format(", ".join(map(repr, of_dims))), names


def replace_tensors(obj: Obj, changed: Mapping[str, xr.Variable]) -> Obj:
    """Return an object with other variables for some tensors, also for members of its stacks.

    New tensors follow the others.
    """
    flat = flatten(obj)
    variables: dict[Any, xr.Variable] = {}
    new = dict(changed)
    for name, variable in flat.variables.items():
        members = None
        if stack_of(variable) is not None:
            members = StackMembers(str(name), variable, flat.indexes(flat.nodes[name]))
        if members is None or changed.keys().isdisjoint(members.numbers):
            variables[name] = new.pop(name, variable)
            continue
        for number in members.numbers:
            new.pop(number, None)
        separate = {n: changed[n] if n in changed else members.variable(n) for n in members.numbers}
        if len({member.shape for member in separate.values()}) > 1:
            variables |= separate
            continue
        stack = members.as_stack(str(name))
        stacked = _stack_variable(stack, separate, dict(variable.attrs))
        record = stack_of(stacked)
        if record is not None:
            record_stack(stacked.encoding, replace(record, run=members.record.run))
        dropped = {dim: 0 for dim in stack.dims if dim not in variable.dims}
        variables[name] = stacked.isel(dropped).transpose(*variable.dims)
    result: Obj = rebuild(obj, flat._replace(variables=variables | new))
    return result


# --- numbers of modules --------------------------------------------------------------------------


class NumberSet(NamedTuple):
    """Numbers of a module, and the tensors that have exactly these numbers."""

    module: str  # path without other numbers: ``model.layers``
    numbers: tuple[int, ...]  # ascending
    dim: str | None  # stacked dimension, None without one
    variables: tuple[str, ...]  # names of the tensors without their numbers: ``model.layers.mlp.w``


def number_sets(obj: xr.Dataset | xr.DataTree) -> list[NumberSet]:
    """List the sets of numbers of each module with their tensors, the largest set first."""
    # Stacking turns a module with several sets into several dimensions, or, in an outer join, into
    # one dimension with absent members.
    flat, structure = flatten(obj), OpenTensors(obj).structure
    indexes = {path: flat.indexes(path) for path in flat.coords}
    # The numbers by module, position and dimension, for each name without numbers.
    names: dict[str, dict[tuple[str, int, str | None], set[int]]] = {}
    modules_by_template: dict[tuple[str | int | None, ...], tuple[str, list[str]]] = {}
    for name, variable in flat.variables.items():
        record = stack_of(variable)
        if record is None:
            parsed = structure.parse(str(name))
            template: tuple[str | int | None, ...] = parsed.template
            axes: list[tuple[str | None, set[int]]] = [(None, {int(n)}) for n in parsed.indices]
        else:
            try:
                members = StackMembers(str(name), variable, indexes[flat.nodes[name]])
            except ValueError:  # the coordinates do not identify the members
                continue
            left = zip(record.dims, map(set, members.along), strict=True)
            pieces = [p for p in record.template if not isinstance(p, str) or is_index(p)]
            axes = [(None, {int(p)}) if isinstance(p, str) else next(left) for p in pieces]
            template = tuple(
                [None if isinstance(p, str) and is_index(p) else p for p in record.template]
            )
        if template not in modules_by_template:
            places = [place for place, piece in enumerate(template) if not isinstance(piece, str)]
            modules = [drop_indices(template[: place + 1]) or "index" for place in places]
            modules_by_template[template] = drop_indices(template), modules
        plain, modules = modules_by_template[template]
        for axis, (module, (dim, numbers)) in enumerate(zip(modules, axes, strict=True)):
            names.setdefault(plain, {}).setdefault((module, axis, dim), set()).update(numbers)
    sets: dict[tuple[str, tuple[int, ...], str | None], list[str]] = {}
    for plain, numbers_by_axis in names.items():
        for (module, _, dim), numbers in numbers_by_axis.items():
            sets.setdefault((module, tuple(sorted(numbers)), dim), []).append(plain)
    result = [NumberSet(*key, tuple(variables)) for key, variables in sets.items() if key[1]]
    order = {item.module: position for position, item in reversed(list(enumerate(result)))}
    return sorted(result, key=lambda item: (order[item.module], -len(item.numbers)))


# --- stacking ------------------------------------------------------------------------------------


def _stacks(obj: Any, flat: Flat, only: Collection[str] | None, join: str) -> list[Stack]:
    structure = OpenTensors(obj).structure
    kinds, others = {}, []
    for name, variable in flat.variables.items():
        if isinstance(name, str) and stack_of(variable) is None:
            data = data_of(variable)
            # All that the members of a stack have in common.
            kinds[name] = (
                variable.dims,
                variable.shape,
                variable.dtype,
                type(data),
                type(getattr(data, "_meta", None)),
                *(str(variable.encoding.get(key)) for key in _COMMON),
            )
        else:
            others.append(str(name))
    stated = {name: flat.variables[name].encoding.get("path") for name in kinds}
    paths = {name: path for name, path in stated.items() if path is not None}
    reserved = {str(dim) for variable in flat.variables.values() for dim in variable.dims}
    reserved |= {str(name) for coords in flat.coords.values() for name in coords}
    reserved |= set(others)

    def outer(name: str) -> bool:
        variable = flat.variables[name]
        data: Any = data_of(variable)
        if "part" in variable.encoding or (isinstance(lazy_of(data), UnreadableArray)):
            return False
        is_adapter = isinstance(data, ExplicitlyIndexed)
        meta = np.empty(0, variable.dtype) if is_adapter else getattr(data, "_meta", data)
        return can_be_absent(meta)

    return find_stacks(
        kinds,
        structure,
        only,
        paths=paths,
        reserved=reserved,
        for_tree=isinstance(obj, xr.DataTree),
        others=others,
        may_be_absent=outer if join == "outer" else None,
    )


def _stacked(obj: Any, flat: Flat, stacks: Sequence[Stack]) -> tuple[Flat, dict[str, list[str]]]:
    """Put stacks in the places of their first members; return the attributes that were dropped."""
    members = {name for stack in stacks for name in stack.members}
    order = {name: position for position, name in enumerate(flat.variables)}
    by_first = {min(stack.members, key=order.__getitem__): stack for stack in stacks}
    variables: dict[str, xr.Variable] = {}
    coords = {path: dict(node_coords) for path, node_coords in flat.coords.items()}
    dropped: dict[str, list[str]] = {}
    marks = StackMarks()
    places = _places(obj, flat, stacks, members)
    for name, variable in flat.variables.items():
        stack = by_first.get(name)
        if stack is None:
            if name not in members:
                variables[name] = variable
            continue
        attrs = stack_attrs([*stack.arrange([flat.variables[n].attrs for n in stack.members])])
        variables[stack.name] = _stack_variable(stack, flat.variables, attrs.shared)
        path, leaf = places[stack.name]
        marks.add(stack.name, variables[stack.name])
        add_coords(coords.setdefault(path, {}), leaf, stack, attrs, flat.variables, marks=marks)
        if attrs.dropped:
            dropped[stack.name] = attrs.dropped
    return Flat(variables, {}, coords), dropped


def _places(
    obj: Any, flat: Flat, stacks: Sequence[Stack], members: Collection[str]
) -> dict[str, tuple[str, str]]:
    """Return the path of the node of each stack, and its name in the node."""
    if isinstance(obj, xr.Dataset):
        return {stack.name: ("/", stack.name) for stack in stacks}
    paths = {n: v.encoding.get("path") for n, v in flat.variables.items() if n not in members}
    for stack in stacks:
        is_stated = "path" in flat.variables[stack.members[0]].encoding
        paths[stack.name] = split_words(stack.template) if is_stated else None
    return tree_paths(paths)


def _stack_variable(
    stack: Stack, by_name: Mapping[Any, xr.Variable], shared: dict[str, Any]
) -> xr.Variable:
    variables = [by_name[name] for name in stack.members]
    first = variables[0]
    arrays: list[Any] = []
    members = []
    for variable in variables:
        data = data_of(variable)
        # Do not read what another engine left lazy.
        is_adapter = isinstance(data, ExplicitlyIndexed)
        arrays.append(variable.chunk().data if is_adapter else variable.data)
        before: Any = data if is_dask_array(data) else None
        members.append(StackMember(dict(variable.attrs), dict(variable.encoding), before))
    data = _stack_arrays(stack, arrays)
    keys = (*_COMMON, "source")
    encoding = {key: first.encoding[key] for key in keys if key in first.encoding}
    encoding["nbytes"] = sum(v.encoding.get("nbytes", v.nbytes) for v in variables)
    encoding["original_shape"] = data.shape
    shares = {n: by_name[n].encoding.get("shares") for n in stack.members}
    if any(shares.values()):
        encoding["shares"] = {name: owner for name, owner in shares.items() if owner}
    if "path" in first.encoding:
        encoding["path"] = split_words(stack.template)
    record = StackRecord(
        stack.template,
        stack.dims,
        "",
        stack.indices,
        tuple(shared),
        getattr(data, "name", None),
        tuple(stack.arrange(members)),
        stack.present,
        name=stack.name,
    )
    record_stack(encoding, record)
    return LazyVariable.of((*stack.dims, *first.dims), data, shared or None, encoding)


def _stack_arrays(stack: Stack, arrays: list[Any]) -> Any:
    """Stack arrays along the grid; lazy arrays of tensors keep their chunks."""
    first = arrays[0]
    places: list[Any] = list(stack.arrange(arrays))
    if all(map(is_stored, arrays)):
        absent = AbsentArray(stack.name, first.shape, first.dtype)
        members = [absent if array is None else array.dask.lazy for array in places]
        lazy = StackedArray(stack.name, members, stack.shape)
        key = "\0".join([stack.name, *("" if array is None else array.name for array in places)])
        token = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        chunks = lazy.chunks(target_nbytes())
        return tensor_array(lazy, f"{stack.name}-{token}", chunks, lazy.empty((0,) * lazy.ndim))
    like = next(filter(is_dask_array, arrays), first)
    if stack.present is not None:
        absent = np.full_like(like, np.nan)
        places = [absent if array is None else array for array in places]
    if not is_dask_array(like):
        return np.stack(places).reshape((*stack.shape, *first.shape))
    import dask.array as da

    for count in reversed(stack.shape):
        rows = range(0, len(places), count)
        places = [da.stack(places[row : row + count]) for row in rows]
    return places[0]


def select_modules(obj: Obj, indexers: Mapping[Any, Any], *, by_position: bool = False) -> Obj:
    """Select tensors by the numbers of their modules, stacked or not."""
    flat = flatten(obj)
    indexes = {path: flat.indexes(path) for path in flat.coords}
    indexes_of = {name: indexes[node] for name, node in flat.nodes.items()}
    only = frozenset(map(str, indexers))
    places = {
        name: _numbers_of(str(name), v, indexes_of[name], only)
        for name, v in flat.variables.items()
    }
    numbers = _numbers_by_module(places, indexes_of)
    for module in indexers:
        if module not in numbers:
            existing = {*numbers, *OpenTensors(obj).structure.repeated_modules()}
            modules = ", ".join(map(shown, sorted(existing))) or "none"
            similar = get_close_matches(str(module), sorted(existing), n=1)
            hint = f"did you mean {shown(similar[0])}?" if similar else f"there are {modules}"
            raise KeyError(f"no tensor is in numbered modules {shown(str(module))}; {hint}")
    selected_numbers = {
        module: _select_numbers(numbers[module], module, key, by_position=by_position)
        for module, key in indexers.items()
    }
    variables: dict[Any, xr.Variable] = {}
    keys: dict[str, dict[Hashable, Any]] = {}
    for name, variable in flat.variables.items():
        positions = _positions(places[name], selected_numbers, indexes_of[name])
        if positions is not None and _has_any(variable, positions, indexes_of[name]):
            variables[name] = variable.isel(_keys_of(variable, positions))
            keys.setdefault(flat.nodes[name], {}).update(positions)
    if not variables:
        requested = ", ".join(f"{module}={key!r}" for module, key in indexers.items())
        raise KeyError(f"no tensor has {requested}")
    # Nodes inherit the coordinates of their parents.
    inherited: dict[str, dict[Hashable, Any]] = {}
    for node, node_keys in keys.items():
        path = node
        while path not in inherited or not node_keys.items() <= inherited[path].items():
            inherited.setdefault(path, {}).update(node_keys)
            path = path.rpartition("/")[0] or "/"
    coords = {
        path: {n: v.isel(_keys_of(v, inherited.get(path, {}))) for n, v in node_coords.items()}
        for path, node_coords in flat.coords.items()
    }
    selected: Obj = rebuild(obj, Flat(variables, {}, coords))
    return selected


def _positions(
    places: Mapping[str, list[Any]],
    selected: Mapping[str, tuple[list[int], bool]],
    indexes: Mapping[Any, xr.Variable],
) -> dict[Hashable, Any] | None:
    """Return the selected positions along each dimension of a variable; None to leave it out."""
    positions: dict[Hashable, Any] = {}
    for module, (numbers, is_one) in selected.items():
        for axis in places.get(module, [None]):
            if axis is None or isinstance(axis, int):
                if axis not in numbers:
                    return None
                continue
            along = np.atleast_1d(indexes[axis].values).tolist()
            order = {number: position for position, number in enumerate(along)}
            matches = [order[number] for number in numbers if number in order]
            if not matches:
                return None
            positions[axis] = matches[0] if is_one else matches
    return positions


def _has_any(
    variable: xr.Variable, positions: Mapping[Hashable, Any], indexes: Mapping[Any, xr.Variable]
) -> bool:
    """Return whether a stack has a member at some of the positions."""
    record = stack_of(variable)
    if record is None or record.present is None:
        return True
    left = []
    for dim in record.dims:
        along = np.atleast_1d(indexes[dim].values)
        left.append(set(np.atleast_1d(along[positions.get(dim, slice(None))]).tolist()))
    return any(all(map(set.__contains__, left, numbers)) for numbers in record.present)


def _keys_of(variable: xr.Variable, keys: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    return {dim: key for dim, key in keys.items() if dim in variable.dims}


def _numbers_of(
    name: str,
    variable: xr.Variable,
    indexes: Mapping[Any, xr.Variable],
    only: Collection[str],
) -> dict[str, list[Any]]:
    """Return the dimensions or numbers of the modules in `only` that a variable is in."""
    places: dict[str, list[Any]] = {}
    record = stack_of(variable)
    if record is None:
        parsed = parse_name(name, only)
        for module, index in zip(parsed.modules, parsed.indices, strict=True):
            places.setdefault(module, []).append(int(index))
        return places
    dims = iter(record.dims)
    # The template contains the numbers of modules that are not stacked.
    for module, number in module_indices(record.template):
        place: Any = int(number) if isinstance(number, str) else next(dims)
        if isinstance(place, int) or place in indexes:
            places.setdefault(module, []).append(place)
    return places


def _numbers_by_module(
    places: Mapping[Any, Mapping[str, list[Any]]],
    indexes_of: Mapping[Any, Mapping[Any, xr.Variable]],
) -> dict[str, list[int]]:
    """Return all numbers of each module."""
    numbers: dict[str, set[int]] = {}
    visited: set[tuple[str, int]] = set()
    for name, modules in places.items():
        for module, axes in modules.items():
            of_module = numbers.setdefault(module, set())
            for axis in axes:
                if isinstance(axis, int):
                    of_module.add(axis)
                    continue
                coord = indexes_of[name][axis]
                if (module, id(coord)) not in visited:
                    visited.add((module, id(coord)))
                    of_module.update(np.atleast_1d(coord.values).tolist())
    return {module: sorted(of_module) for module, of_module in numbers.items()}


def _select_numbers(
    available: list[int], module: str, key: Any, *, by_position: bool
) -> tuple[list[int], bool]:
    """Return the numbers that an indexer selects, and whether it is a single number."""
    index = pd.Index(available)
    if by_position:
        selected = index[key]
    elif isinstance(key, slice):
        selected = index[index.slice_indexer(key.start, key.stop, key.step)]
    else:
        selected = np.asarray(key)
        if selected.dtype.kind not in "iu" or selected.ndim > 1:
            raise TypeError(f"{module} takes a number, a list of numbers or a slice, not {key!r}")
    numbers = np.atleast_1d(selected).tolist()
    missing = [number for number in numbers if number not in index]
    if missing:
        reason = f"no tensor has {module}={missing[0]}"
        raise KeyError(f"{reason}; there are {available[0]} to {available[-1]}")
    return numbers, np.ndim(selected) == 0
