"""The tensors of an object as pictures need them: by the names that they have in the file."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
from xckpt.labels import select
from xckpt.labels.selection import closest
from xckpt.notebook.folding import Row
from xckpt.tensors import flatten, member_names, member_variables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import xarray as xr

    from xckpt.labels import TensorFilter

__all__ = ["tensor_rows", "tensor_variable"]


def tensor_rows(obj: xr.Dataset | xr.DataTree, names: TensorFilter | None = None) -> list[Row]:
    """List the tensors of an object.

    Parameters
    ----------
    obj : xarray.Dataset or xarray.DataTree
        Flat or stacked.
    names : TensorFilter, optional
        Which of them.

    Returns
    -------
    list of Row
        In the order of the object.

    Raises
    ------
    ValueError
        If there is none.
    """
    rows = {}
    for name, variable, indexes in _variables(obj):
        record = variable.encoding.get("stack")
        members = _members(name, variable, indexes)
        along = record.dims if record is not None and members != [name] else ()
        shape = tuple(n for dim, n in variable.sizes.items() if dim not in along)
        dtype = str(variable.encoding.get("stored_dtype", variable.dtype))
        nbytes = variable.encoding.get("nbytes", variable.nbytes) // (
            len(record.members) if record else 1
        )
        for member in members:
            rows[member] = Row(member, dtype, tuple(map(int, shape)), nbytes, prod(shape))
    chosen = select(rows, names)
    if not chosen:
        raise ValueError(f"no tensor is called {names!r}" if rows else "there are no tensors")
    return [rows[name] for name in chosen]


def tensor_variable(obj: xr.Dataset | xr.DataTree, name: str) -> xr.Variable:
    """Find a tensor, also one that is stacked, or else a variable.

    Parameters
    ----------
    obj : xarray.Dataset or xarray.DataTree
        Flat or stacked.
    name : str
        As in the file.

    Returns
    -------
    xarray.Variable
        Lazy if the object is.

    Raises
    ------
    KeyError
        If there is none; the message has similar names.
    """
    known = []
    for flat_name, variable, indexes in _variables(obj):
        if flat_name == name:
            return variable
        members = _members(flat_name, variable, indexes)
        if name in members and "stack" in variable.encoding:
            return member_variables(flat_name, variable, indexes)[name]
        known += members
    alike = ", ".join(map(shown, closest(known, [str(name)])))
    hint = f"; similar names: {alike}" if alike else ""
    raise KeyError(f"no tensor {name!r} among {len(known)}{hint}")


def _variables(
    obj: xr.Dataset | xr.DataTree,
) -> Iterator[tuple[str, xr.Variable, Mapping[Any, xr.Variable]]]:
    flat = flatten(obj)
    indexes = {path: flat.indexes(path) for path in flat.coords}
    for name, variable in flat.variables.items():
        yield str(name), variable, indexes[flat.nodes[name]]


def _members(name: str, variable: xr.Variable, indexes: Mapping[Any, xr.Variable]) -> list[str]:
    """Name the tensors of a variable; itself where nothing tells which are left."""
    try:
        return member_names(name, variable, indexes)
    except ValueError:
        return [name]
