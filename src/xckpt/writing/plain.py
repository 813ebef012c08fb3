"""``ds.ckpt.plain()``: the same data with names, attributes and types that netCDF and zarr hold."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from xckpt.arrays.lazy import UnreadableArray
from xckpt.arrays.stacked import StackedArray
from xckpt.writing.casting import choose_type, convert, element_type
from xckpt.writing.contents import array_of, untouched
from xckpt.writing.fitting import Notes
from xckpt.writing.holding import NUMBERS, fitting, held_attrs, held_name, is_text
from xckpt.writing.sparse_parts import densified, is_sparse

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["plain"]

_ELEMENT_TYPES = (*NUMBERS, "bool")
_COMPLEX = {"complex64": "float32", "complex128": "float64"}

# What we say of a variable: its name, its dimensions and its element type.
_NAME, _DIMS, _DTYPE = "xckpt_name", "xckpt_dims", "xckpt_dtype"
# Stands for the type of texts that became JSON texts.
_JSON_TEXTS = "json"

# Encodings that say something about each axis.
_BY_AXIS = ("preferred_chunks", "chunks", "shards", "chunksizes", "original_shape")


class _Node(NamedTuple):
    """A Dataset, alone or in a tree, and the names of the nodes below it."""

    ds: xr.Dataset
    children: tuple[str, ...]


def plain(obj: xr.Dataset | xr.DataTree) -> Any:
    """Make an object that xarray writes to netCDF and zarr as it is; warn once of what changed."""
    notes = Notes()
    nodes = _nodes(obj)
    dims = _dims(nodes)
    for dim, new in dims.items():
        if new != dim:
            notes.add("dimensions have other names", str(dim))
    pair = fitting({None: "complex"}, {*dims.values(), *_all_names(nodes)})[None]
    made: dict[str, xr.Dataset] = {}
    paths = {"/": "/"}
    said: dict[str, dict[str, Any]] = {"/": {}}
    for path, node in nodes.items():
        names = _names(node, dims)
        made[paths[path]] = _dataset(node.ds, _Renamed(names, dims, pair), said[path], notes)
        for child in node.children:
            below = _joined(path, child)
            paths[below] = _joined(paths[path], names[child])
            said[below] = {} if names[child] == child else {_NAME: child}
            if said[below]:
                notes.add("modules have other names", below)
    notes.warn("plain()", stacklevel=3)
    if isinstance(obj, xr.Dataset):
        return made["/"]
    return xr.DataTree.from_dict(made, name=obj.name)


def _nodes(obj: xr.Dataset | xr.DataTree) -> dict[str, _Node]:
    """List Datasets by their paths below the object, those above others first."""
    if isinstance(obj, xr.Dataset):
        return {"/": _Node(obj, ())}
    return {
        "/" + node.path.removeprefix(obj.path).lstrip("/"): _Node(
            # The root has what it inherits: nothing above it is written.
            node.to_dataset(inherit=node is obj),
            tuple(node.children),
        )
        for node in obj.subtree
    }


def _all_names(nodes: Mapping[str, _Node]) -> set[str]:
    return {str(name) for n in nodes.values() for name in (*n.ds.variables, *n.children)}


def _joined(path: str, name: str) -> str:
    return f"{path.rstrip('/')}/{name}"


def _dims(nodes: Mapping[str, _Node]) -> dict[Any, str]:
    """Name dimensions, which are the same in a whole tree."""
    found: dict[Any, None] = {}
    refused: set[Any] = set()
    for node in nodes.values():
        here = [dim for variable in node.ds.variables.values() for dim in variable.dims]
        found |= dict.fromkeys(here)
        # In an HDF5 file a dimension is an object beside the groups.
        refused.update(set(here).intersection(node.children))
    wanted = {dim: f"{held_name(dim)}_" if dim in refused else held_name(dim) for dim in found}
    return fitting(wanted, _all_names(nodes))


def _names(node: _Node, dims: Mapping[Any, str]) -> dict[Any, str]:
    """Name the variables of a Dataset and its children."""
    # xarray lists coordinates in one text, with spaces between them.
    listed = {name for name, coord in node.ds.coords.variables.items() if coord.dims != (name,)}
    own = {name: dims[name] for name in node.ds.variables if name in dims}
    wanted: dict[Any, str] = {
        name: held_name(name, no_spaces=name in listed)
        for name in (*node.ds.variables, *node.children)
        if name not in own
    }
    return fitting(wanted, dims.values()) | own


# --- variables -----------------------------------------------------------------------------------


class _Renamed(NamedTuple):
    """What things are called in one Dataset."""

    names: Mapping[Any, str]
    dims: Mapping[Any, str]
    #: The dimension that has the real and the imaginary part.
    pair: str


def _dataset(
    ds: xr.Dataset, renamed: _Renamed, said: Mapping[str, Any], notes: Notes
) -> xr.Dataset:
    coords = ds.coords.variables
    new: dict[bool, dict[str, xr.Variable]] = {False: {}, True: {}}
    for name, variable in ds.variables.items():
        if _is_unreadable(variable):
            notes.add("variables were left out, as they cannot be read", str(name))
            continue
        new[name in coords][renamed.names[name]] = _variable(name, variable, renamed, notes)
    made = xr.Dataset(new[False], new[True], held_attrs(ds.attrs, said, notes))
    made.encoding = dict(ds.encoding)
    return made


def _is_unreadable(variable: xr.Variable) -> bool:
    """Return whether any value is an error, and its type perhaps none that arrays have."""
    lazy = untouched(variable)
    if isinstance(lazy, StackedArray):
        lazy = lazy.members[0]  # all are of one kind
    return isinstance(lazy, UnreadableArray)


def _variable(name: Any, old: xr.Variable, renamed: _Renamed, notes: Notes) -> xr.Variable:
    dims = tuple([renamed.dims[dim] for dim in old.dims])
    said: dict[str, Any] = {}
    if renamed.names[name] != name:
        said[_NAME] = name
        notes.add("variables have other names", str(name))
    if dims != old.dims:
        said[_DIMS] = list(old.dims)
    new = _held_variable(old, dims, renamed.pair)
    if _has_odd_texts(old):
        said[_DTYPE] = _JSON_TEXTS
        notes.add("texts became JSON texts", str(name))
    elif new.dtype != old.dtype:
        said[_DTYPE] = old.dtype.name
        notes.add("element types became wider ones", str(name))
    if is_sparse(old._data):  # noqa: SLF001  `data` would load what is lazy
        notes.add("sparse chunks become dense", str(name))
    new.encoding = _encoding(old, new, renamed.dims)
    if old.attrs or said:
        new.attrs = held_attrs(old.attrs, said, notes)
    return new


def _encoding(old: xr.Variable, new: xr.Variable, dims: Mapping[Any, str]) -> dict[Any, Any]:
    encoding = dict(old.encoding)
    if new.ndim > old.ndim:
        for key in _BY_AXIS:
            encoding.pop(key, None)
    elif "preferred_chunks" in encoding:
        by_dim = encoding["preferred_chunks"].items()
        encoding["preferred_chunks"] = {dims.get(dim, dim): size for dim, size in by_dim}
    if new.dtype.kind == "f":
        # No value is one that is missing, whatever its bits.
        encoding = {"_FillValue": None, "fill_value": 0.0} | encoding
    return encoding


def _held_variable(old: xr.Variable, dims: tuple[str, ...], pair: str) -> xr.Variable:
    """Return a variable with values of a type that is held, and without an encoding."""
    if _has_odd_texts(old):
        texts = [json.dumps(value) for value in old.values.ravel().tolist()]
        return xr.Variable(dims, np.array(texts, object).reshape(old.shape))
    kind = element_type(old.dtype)
    data = old._data  # noqa: SLF001  `data` would load what is lazy
    is_held = kind is None or kind in _ELEMENT_TYPES
    # An index has one axis.
    if (is_held and not is_sparse(data)) or (
        kind in _COMPLEX and isinstance(old, xr.IndexVariable)
    ):
        new = old.copy(deep=False)
        new.dims = dims
        return new
    array = densified(array_of(old))
    if kind in _COMPLEX:
        dims, array = (*dims, pair), _of_blocks(array, _pairs, _COMPLEX[kind], (2,))
    elif not is_held:
        wide = choose_type(str(kind), _ELEMENT_TYPES, "exact", tensor=str(dims))
        array = _of_blocks(array, partial(convert, name=wide, cast="exact"), wide)
    return xr.Variable(dims, array)


def _has_odd_texts(variable: xr.Variable) -> bool:
    """Return whether there are texts in memory that netCDF does not hold."""
    if variable.dtype.kind not in "UO" or not variable._in_memory:  # noqa: SLF001  loads nothing
        return False
    values = variable.values.ravel().tolist()
    texts = [value for value in values if isinstance(value, str)]
    return len(texts) == len(values) and not all(map(is_text, texts))


def _of_blocks(array: Any, function: Any, dtype: str, more: tuple[int, ...] = ()) -> Any:
    """Apply a function that adds axes at the end, lazily to what is lazy."""
    if not hasattr(array, "dask"):
        return function(array)
    ndim = array.ndim + len(more)
    return array.map_blocks(
        function,
        dtype=dtype,
        chunks=(*array.chunks, *((n,) for n in more)),
        new_axis=list(range(array.ndim, ndim)) or None,
        meta=np.empty((0,) * ndim, dtype),
    )


def _pairs(values: Any) -> np.ndarray[Any, Any]:
    """Return the real and the imaginary part of each value, bit for bit."""
    whole = np.ascontiguousarray(values)
    pairs: np.ndarray[Any, Any] = whole.view(whole.real.dtype).reshape(*np.shape(values), 2)
    return pairs
