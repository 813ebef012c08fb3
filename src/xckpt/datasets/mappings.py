"""Datasets from a mapping of names to arrays, such as a state dict, or from a single array."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.arrays.lazy import Opened
from xckpt.datasets.variables import mapped_arrays, mapped_variable
from xckpt.elements import ELEMENT_TYPES, stored_dtype
from xckpt.errors import shown, some, warn
from xckpt.index import Index
from xckpt.labels import AxisNamer
from xckpt.structure.dims import infer_dims

if TYPE_CHECKING:
    from xckpt.typing import Array

#: Key of the encoding of a Dataset of arrays in memory: names of types that numpy calls no numbers,
#: such as bfloat16, which means and other reductions of xarray leave out.
NO_NUMBERS = "no_numbers"
_SCALARS = (str, int, float, bool, type(None))
# A bound, because a mapping may contain itself.
_DEEPEST = 100


def as_dataset(obj: Any) -> Any:
    """Turn a mapping of names to arrays into a Dataset; return other objects unchanged."""
    # Dots join the keys of nested mappings; scalars and texts become attributes. Arrays of numpy,
    # dask and xarray, and tensors in main memory, are not copied.
    opened = xr.Dataset | xr.DataTree | xr.DataArray | Index
    if not isinstance(obj, Mapping) or isinstance(obj, opened):
        return obj
    arrays: dict[str, Any] = {}
    attrs: dict[str, Any] = {}
    skipped: list[str] = []
    for name, value in _flattened(obj, ()):
        has_values = hasattr(value, "__array__") or hasattr(value, "__dlpack__")
        if isinstance(value, _SCALARS):
            attrs[name] = value
        elif not (has_values and hasattr(value, "shape") and hasattr(value, "dtype")):
            skipped.append(name)
        elif name in arrays:
            raise ValueError(f"two arrays are called {shown(name)}; rename one of them")
        else:
            arrays[name] = value
    if obj and not arrays:
        kinds = ", ".join(sorted({type(value).__name__ for value in obj.values()}))
        raise TypeError(f"expected a mapping of names to arrays; its values are of type {kinds}")
    if skipped:
        warn(f"{some(skipped, 'values')} of the mapping left out: neither arrays nor numbers")
    names = AxisNamer(None, arrays.keys())
    dims = infer_dims({name: tuple(value.shape) for name, value in arrays.items()}, attrs)
    names.survey(arrays, dims)
    mapping = Opened("a mapping", tuple(arrays))
    variables = {
        name: _variable(name, value, names, dims.get(name), mapping)
        for name, value in arrays.items()
    }
    _tie(variables, arrays)
    return xr.Dataset(variables, attrs=attrs)


def _tie(variables: Mapping[str, xr.Variable], arrays: Mapping[str, Any]) -> None:
    """Note which arrays are the memory of an earlier one, as of tied weights in a state dict."""
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in arrays.items():
        memory = _memory(value)
        if not memory or not mapped_arrays(variables[name]):
            continue
        owner = owners.setdefault((*memory, str(value.dtype), tuple(value.shape)), name)
        if owner != name:
            variables[name].encoding["shares"] = owner
            variables[owner].encoding["tensor"] = owner


def _memory(value: Any) -> tuple[Any, ...]:
    """Return the address of an array and its strides; empty if they are not known."""
    if isinstance(value, np.ndarray):
        return (value.ctypes.data, value.strides) if value.size else ()
    if hasattr(value, "data_ptr") and value.data_ptr():  # of PyTorch
        return value.data_ptr(), value.stride(), str(value.device)
    return ()


def note_no_numbers(ds: xr.Dataset) -> None:
    """Note the variables that reductions of a Dataset of arrays in memory leave out."""
    names = tuple(
        name
        for name, variable in ds.variables.items()
        if mapped_arrays(variable)
        and not np.issubdtype(variable.dtype, np.number)
        and variable.dtype != bool
    )
    if names:
        ds.encoding[NO_NUMBERS] = names


def as_dataset_of_one(array: xr.DataArray) -> xr.Dataset:
    """Return a Dataset of one array, with its coordinates and the name of its file."""
    name = "data" if array.name is None else array.name
    coords = array.drop_vars([name]).coords if name in array.coords else array.coords
    ds = xr.Dataset({name: array.variable}, coords)
    ds.encoding = {key: array.encoding[key] for key in ("source",) if key in array.encoding}
    return ds


def _flattened(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays and other values in nested mappings and sequences, with their names."""
    if len(path) > _DEEPEST:
        raise ValueError(f"the mapping is nested more than {_DEEPEST} levels deep")
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(position), inner) for position, inner in enumerate(value)]
    else:
        yield ".".join(path), value
        return
    for key, inner in items:
        yield from _flattened(inner, (*path, key))


def _variable(
    name: str, value: Any, names: AxisNamer, dims: tuple[str | None, ...] | None, opened: Opened
) -> xr.Variable:
    if isinstance(value, xr.DataArray | xr.Variable):
        return xr.as_variable(value)
    # Keep arrays that xarray can compute with, such as arrays of dask and sparse.
    if not hasattr(value, "__array_function__"):
        try:
            value = _as_numpy(value)
        except Exception as error:
            kind = type(value)
            text = f"{shown(name)} is a {kind.__module__}.{kind.__name__} that numpy cannot read"
            raise TypeError(f"{text}: {error}") from error
    axes = names.name_axes(name, value.shape, dims)
    if isinstance(value, np.ndarray):
        return mapped_variable(axes, value, opened, name)
    return xr.Variable(axes, value)


def _as_numpy(value: Any) -> Array:
    """Return the elements of a tensor of another library; bfloat16 becomes `ml_dtypes.bfloat16`."""
    for method in ("detach", "cpu"):  # methods of PyTorch
        if hasattr(value, method):
            value = getattr(value, method)()
    element_type = str(value.dtype).rpartition(".")[2]
    if not isinstance(value.dtype, np.dtype) and element_type in ELEMENT_TYPES:
        stored = stored_dtype(element_type)
        if stored.isbuiltin != 1:  # a type that PyTorch and MLX cannot convert to numpy
            library = sys.modules[type(value.dtype).__module__]
            integers = getattr(library, f"int{stored.itemsize * 8}")
            return np.asarray(value.view(integers)).view(stored)
    if hasattr(value, "__array__"):
        return np.asarray(value)
    return np.from_dlpack(value)
