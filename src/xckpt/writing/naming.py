"""The variables of an object by the names of tensors: trees flat, stacks taken apart.

Data variables become tensors. So do coordinates with numbers, but not those that stacking made:
these are in the names of the tensors. What was computed from a stack is taken apart too, as long
as the coordinates tell which modules it is of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
from xckpt.tensors import flatten, member_variables
from xckpt.writing.casting import element_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

    from xckpt.tensors import Flat
    from xckpt.writing.fitting import Notes

__all__ = ["named_variables"]


def named_variables(obj: xr.Dataset | xr.DataTree, notes: Notes) -> dict[str, xr.Variable]:
    """List what becomes a tensor."""
    flat = flatten(obj)
    found: dict[str, xr.Variable] = {}
    for name, variable in _apart(flat).items():
        if not isinstance(name, str):
            raise TypeError(f"the names of tensors are text, unlike that of the variable {name!r}")
        found[name] = variable
    known = obj.encoding.get("file_order", obj.encoding.get("flat_order", ()))
    order = {name: at for at, name in enumerate(known)}
    if order:
        found = {name: found[name] for name in sorted(found, key=_position_in(order))}
    _add_coords(found, flat, notes)
    return found


def _position_in(order: Mapping[str, int]) -> Any:
    return lambda name: order.get(name, len(order))


def _apart(flat: Flat) -> dict[Any, xr.Variable]:
    """Take stacks apart."""
    marks = {
        name: mark
        for coords in flat.coords.values()
        for coord in coords.values()
        for name, mark in coord.encoding.get("stack", {}).items()
    }
    found: dict[Any, xr.Variable] = {}
    for name, variable in flat.variables.items():
        members = {name: variable}
        indexes = flat.indexes(flat.nodes[name]) if marks or "stack" in variable.encoding else {}
        if "stack" in variable.encoding:
            members = member_variables(name, variable, indexes)
        elif name in marks and _has_indices(variable, marks[name].dims, indexes):
            marked = variable.copy(deep=False)
            marked.encoding["stack"] = marks[name]
            members = member_variables(name, marked, indexes)
        for member, unstacked in members.items():
            if member in found:
                raise ValueError(f"{shown(member)} is a variable, and stacked in {shown(name)} too")
            found[member] = unstacked
    return found


def _has_indices(
    variable: xr.Variable, dims: tuple[str, ...], indexes: Mapping[Any, xr.Variable]
) -> bool:
    """Return whether something computed still has what names the tensors it came from."""
    for dim in dims:
        coord = indexes.get(dim)
        if coord is None or "stack" not in coord.encoding:
            return False
        if (coord.dims == (dim,)) != (dim in variable.dims):
            return False
    return True


def _add_coords(found: dict[str, xr.Variable], flat: Flat, notes: Notes) -> None:
    """Add the coordinates with numbers, except those that are in the names of tensors."""
    used = {dim for variable in found.values() for dim in variable.dims}
    for path, coords in flat.coords.items():
        for name, coord in coords.items():
            if "stack" in coord.encoding and (coord.dims != (name,) or name not in used):
                continue
            full = ".".join([*(part for part in path.split("/") if part), str(name)])
            if element_type(coord.dtype) is None:
                notes.add("coordinates without numbers are not written", full)
            elif full not in found:
                found[full] = coord.to_base_variable()
