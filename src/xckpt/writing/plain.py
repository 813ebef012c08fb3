"""``ds.ckpt.plain()``: the same data with names, attributes and types for netCDF and zarr.

Supported data stays unchanged. Unsupported names, types and attributes are replaced, and extra
attributes record the originals, so that no value of JSON is lost.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from xckpt.arrays.converted import cast_block, densified, element_type, is_sparse
from xckpt.arrays.lazy import UnreadableArray
from xckpt.arrays.stacked import StackedArray
from xckpt.upstream.xarray_variables import data_of, is_in_memory
from xckpt.writing.fitting import Changes, choose_type
from xckpt.writing.gathering import array_of, unmodified_array

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from xckpt.typing import Array

    # Datasets and the names of the nodes below them, by path.
    _Nodes = dict[str, tuple[xr.Dataset, tuple[str, ...]]]

_INTEGERS = tuple([f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)])
# Element types that both netCDF and zarr support, except booleans.
_NUMBERS = ("float64", "float32", *_INTEGERS)
_ELEMENT_TYPES = (*_NUMBERS, "bool")

_COMPLEX = {"complex64": "float32", "complex128": "float64"}

# Attributes that record the name, dimensions and element type of a variable.
_NAME, _DIMS, _DTYPE = "xckpt_name", "xckpt_dims", "xckpt_dtype"
# Recorded type of texts that became JSON texts.
_JSON_TEXTS = "json"
# Attributes that record the names of attributes by their new names, and the list of JSON values.
_ATTRS, _JSON = "xckpt_attrs", "xckpt_json"

# The C library of netCDF refuses names with control characters, slashes, spaces at the end, and
# most of ASCII at the beginning. It normalises other characters, and reserves a prefix. zarr treats
# a backslash as a slash.
_NOT_IN_A_NAME = re.compile(r"[\x00-\x1f\x7f/\\\ud800-\udfff]| (?= *\Z)|_(?=nc4_non_coord_)")
_NOT_IN_A_TEXT = re.compile(r"[\0\ud800-\udfff]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_BEGINS_WELL = re.compile(r"[A-Za-z0-9_]|[^\x00-\x7f]")
# In bytes; most file systems and netCDF stop at 255.
_LONGEST_NAME = 240
# Reserved by xarray, or by the libraries that it writes with.
_TAKEN_ATTR = re.compile(
    "_.*|CLASS|NAME|REFERENCE_LIST|DIMENSION_LIST|DIMENSION_LABELS|missing_value|scale_factor"
    "|add_offset|dtype|coordinates"
)
_UNIT_OF_TIME = re.compile(r"(?s).*\bsince\b.*|((nano|micro|milli)?second|minute|hour|day|week)s?")

# Encodings with one value per axis.
_BY_AXIS = ("preferred_chunks", "chunks", "shards", "chunksizes", "original_shape")


def plain(obj: xr.Dataset | xr.DataTree) -> Any:
    """Return the same data with names, attributes and types that netCDF and zarr can store.

    Names that these formats do not allow (``a/b``) are replaced (``a%2Fb``). Attributes other
    than text and numbers become JSON text. Element types that netCDF lacks become wider ones,
    and sparse chunks become dense. Nothing is read or computed.

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree or xarray.DataArray
        Object to convert.

    Returns
    -------
    xarray.Dataset or xarray.DataTree
        Same kind as the object. Attributes hold the originals: ``xckpt_name``, ``xckpt_dims``
        and ``xckpt_dtype`` of a variable, ``xckpt_attrs`` (old names of attributes by new name)
        and ``xckpt_json`` (names of attributes that are JSON text now).

    Warns
    -----
    CheckpointWarning
        If anything was replaced or left out.

    Examples
    --------
    >>> ds = xr.open_dataset("model.bin", engine="gptrs")
    >>> ds.ckpt.plain().to_netcdf("model.nc")
    """
    changes = Changes()
    nodes: _Nodes = {"/": (obj, ())} if isinstance(obj, xr.Dataset) else {}
    for node in obj.subtree if isinstance(obj, xr.DataTree) else ():  # parents before children
        path = "/" + node.path.removeprefix(obj.path).lstrip("/")
        # Nodes above the root are not written, so it needs a copy of inherited coordinates.
        nodes[path] = node.to_dataset(inherit=node is obj), tuple(node.children)
    reserved = {str(name) for ds, children in nodes.values() for name in (*ds.variables, *children)}
    dims = _rename_dims(nodes, reserved)
    for dim, new in dims.items():
        if new != dim:
            changes.add("dimensions have other names", str(dim))
    pair = _distinct({None: "complex"}, {*dims.values(), *reserved})[None]
    datasets: dict[str, xr.Dataset] = {}
    new_paths = {"/": "/"}
    records: dict[str, dict[str, Any]] = {"/": {}}
    for path, (ds, children) in nodes.items():
        names = _rename_variables(ds, children, dims)
        renamed = _Renamed(names, dims, pair)
        datasets[new_paths[path]] = _plain_dataset(ds, renamed, records[path], changes)
        for child in children:
            child_path = f"{path.rstrip('/')}/{child}"
            new_paths[child_path] = f"{new_paths[path].rstrip('/')}/{names[child]}"
            records[child_path] = {} if names[child] == child else {_NAME: child}
            if records[child_path]:
                changes.add("modules have other names", child_path)
    changes.warn("plain()")
    if isinstance(obj, xr.Dataset):
        return datasets["/"]
    return xr.DataTree.from_dict(datasets, name=obj.name)


def _rename_dims(nodes: _Nodes, reserved: set[str]) -> dict[Any, str]:
    """Return new names of all dimensions, which a tree shares; changed names avoid `reserved`."""
    dims: dict[Any, None] = {}
    ambiguous: set[Any] = set()
    for ds, children in nodes.values():
        node_dims = [dim for variable in ds.variables.values() for dim in variable.dims]
        dims |= dict.fromkeys(node_dims)
        # HDF5 has dimensions and groups in one namespace.
        ambiguous.update(set(node_dims).intersection(children))
    names = {dim: f"{_plain_name(dim)}_" if dim in ambiguous else _plain_name(dim) for dim in dims}
    return _distinct(names, reserved)


def _rename_variables(
    ds: xr.Dataset, children: tuple[str, ...], dims: Mapping[Any, str]
) -> dict[Any, str]:
    """Return new names of the variables of a Dataset and of its children."""
    # xarray writes the names of these coordinates into one attribute, separated by spaces.
    listed = {name for name, coord in ds.coords.variables.items() if coord.dims != (name,)}
    indexes = {name: dims[name] for name in ds.variables if name in dims}
    names: dict[Any, str] = {
        name: _plain_name(name, no_spaces=name in listed)
        for name in (*ds.variables, *children)
        if name not in indexes
    }
    return _distinct(names, dims.values()) | indexes


# --- variables -----------------------------------------------------------------------------------


class _Renamed(NamedTuple):
    """New names of the variables and dimensions of a Dataset."""

    names: Mapping[Any, str]
    dims: Mapping[Any, str]
    #: Dimension of the real and imaginary parts of complex numbers.
    pair: str


def _plain_dataset(
    ds: xr.Dataset, renamed: _Renamed, record: Mapping[str, Any], changes: Changes
) -> xr.Dataset:
    """Return a plain Dataset; `record` has additional attributes for it."""
    coords = ds.coords.variables
    variables: dict[bool, dict[str, xr.Variable]] = {False: {}, True: {}}  # by "is a coordinate"
    for name, variable in ds.variables.items():
        lazy = unmodified_array(variable)
        # If one member of a stack is unreadable, all are.
        first = lazy.first if isinstance(lazy, StackedArray) else lazy
        if isinstance(first, UnreadableArray):
            changes.add("variables were left out, as they cannot be read", str(name))
            continue
        new = _plain_variable(name, variable, renamed, changes)
        variables[name in coords][renamed.names[name]] = new
    attrs = _plain_attrs(ds.attrs, record, changes)
    plain_ds = xr.Dataset(variables[False], variables[True], attrs)
    plain_ds.encoding = dict(ds.encoding)
    return plain_ds


def _plain_variable(
    name: Any, old: xr.Variable, renamed: _Renamed, changes: Changes
) -> xr.Variable:
    """Return a plain variable, with attributes that record its old name, dimensions and type."""
    dims = tuple([renamed.dims[dim] for dim in old.dims])
    record: dict[str, Any] = {}
    if renamed.names[name] != name:
        record[_NAME] = name
        changes.add("variables have other names", str(name))
    if dims != old.dims:
        record[_DIMS] = list(old.dims)
    new = _with_plain_values(old, dims, renamed.pair)
    if _has_odd_texts(old):
        record[_DTYPE] = _JSON_TEXTS
        changes.add("texts became JSON texts", str(name))
    elif new.dtype != old.dtype:
        record[_DTYPE] = old.dtype.name
        changes.add("element types became wider ones", str(name))
    if is_sparse(data_of(old)):
        changes.add("sparse chunks become dense", str(name))
    encoding = dict(old.encoding)
    if new.ndim > old.ndim:
        for key in _BY_AXIS:
            encoding.pop(key, None)
    elif "preferred_chunks" in encoding:
        by_dim = encoding["preferred_chunks"].items()
        encoding["preferred_chunks"] = {renamed.dims.get(dim, dim): size for dim, size in by_dim}
    # No bit pattern means "missing".
    no_fill = {"_FillValue": None, "fill_value": 0.0} if new.dtype.kind == "f" else {}
    new.encoding = no_fill | encoding
    if old.attrs or record:
        new.attrs = _plain_attrs(old.attrs, record, changes)
    return new


def _with_plain_values(old: xr.Variable, dims: tuple[str, ...], pair: str) -> xr.Variable:
    """Return a variable with new dimensions and dense values of a supported type."""
    if _has_odd_texts(old):
        texts = [json.dumps(value) for value in old.values.ravel().tolist()]
        return xr.Variable(dims, np.array(texts, object).reshape(old.shape))
    kind = element_type(old.dtype)
    data = data_of(old)
    is_supported = kind is None or kind in _ELEMENT_TYPES
    # An index must have one axis, so a complex one cannot get another for its parts.
    if (is_supported and not is_sparse(data)) or (
        kind in _COMPLEX and isinstance(old, xr.IndexVariable)
    ):
        new = old.copy(deep=False)
        new.dims = dims
        return new
    array = densified(array_of(old))
    if kind in _COMPLEX:
        dims, array = (*dims, pair), _map_blocks(array, _pairs, _COMPLEX[kind], (2,))
    elif not is_supported:
        wide = choose_type(str(kind), _ELEMENT_TYPES, "exact", tensor=str(dims))
        array = _map_blocks(array, partial(cast_block, name=wide, cast="exact"), wide)
    return xr.Variable(dims, array)


def _has_odd_texts(variable: xr.Variable) -> bool:
    """Return whether a variable in memory has texts that netCDF does not support."""
    if variable.dtype.kind not in "UO" or not is_in_memory(variable):
        return False
    values = variable.values.ravel().tolist()
    texts = [value for value in values if isinstance(value, str)]
    return len(texts) == len(values) and not all(map(_is_plain_text, texts))


def _map_blocks(array: Any, function: Any, dtype: str, new_axes: tuple[int, ...] = ()) -> Any:
    """Apply a function that adds axes of some lengths at the end; lazily for dask arrays."""
    if not hasattr(array, "dask"):
        return function(array)
    ndim = array.ndim + len(new_axes)
    return array.map_blocks(
        function,
        dtype=dtype,
        chunks=(*array.chunks, *((n,) for n in new_axes)),
        new_axis=list(range(array.ndim, ndim)) or None,
        meta=np.empty((0,) * ndim, dtype),
    )


def _pairs(values: Any) -> Array:
    """Return the real and imaginary parts of complex values along a new last axis, bit for bit."""
    array = np.ascontiguousarray(values)
    pairs: Array = array.view(array.real.dtype).reshape(*np.shape(values), 2)
    return pairs


# --- names ---------------------------------------------------------------------------------------


def _distinct(proposed: Mapping[Any, str], reserved: Collection[str]) -> dict[Any, str]:
    """Return new names by old names, with a number after changed names that are in use."""
    used = {*reserved, *(name for name, new in proposed.items() if new == name)}
    counts: dict[str, int] = {}
    names: dict[Any, str] = {}
    for name, new in proposed.items():
        names[name] = new
        while new != name and names[name] in used:
            counts[new] = counts.get(new, 1) + 1
            names[name] = f"{new}_{counts[new]}"
        used.add(names[name])
    return names


def _plain_name(name: Any, *, no_spaces: bool = False) -> str:
    """Return a name for netCDF and zarr, with ``%2F`` and the like for unsupported characters."""
    text = _NOT_IN_A_NAME.sub(_percent, str(name))
    if no_spaces:
        text = text.replace(" ", "%20")
    if unicodedata.normalize("NFC", text) != text:
        text = _NOT_ASCII.sub(_percent, text)
    if _BEGINS_WELL.match(text) is None or text == "zarr.json":
        text = f"_{text}"
    encoded = text.encode()
    if len(encoded) > _LONGEST_NAME:
        digest = blake2b(encoded, digest_size=8).hexdigest()
        text = f"{encoded[: _LONGEST_NAME - 17].decode(errors='ignore')}_{digest}"
    return text


def _percent(match: re.Match[str]) -> str:
    """Return the percent-encoded bytes of a match."""
    return "".join([f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass")])


# --- attributes ----------------------------------------------------------------------------------


def _plain_attrs(
    attrs: Mapping[Any, Any], record: Mapping[str, Any], changes: Changes
) -> dict[str, Any]:
    """Return attributes with supported names and values; `record` has attributes to add."""
    reserved = set(record)
    if not all(map(_is_plain, (*attrs.values(), *record.values()))):
        reserved.add(_JSON)
    if any(_attr_name(name, value, reserved) != name for name, value in attrs.items()):
        reserved |= {_ATTRS, _JSON}
    proposed = {name: _attr_name(name, value, reserved) for name, value in attrs.items()}
    names = _distinct(proposed, reserved)
    plain_attrs = {new: attrs[name] for name, new in names.items()} | dict(record)
    renamed = {new: name for name, new in names.items() if new != name}
    if renamed:
        plain_attrs[_ATTRS] = renamed
    for name in renamed.values():
        changes.add("attributes have other names", str(name))
    json_names = []
    for name, value in list(plain_attrs.items()):
        if _is_plain(value):
            continue
        change, text = _as_json(value)
        if name not in reserved:
            changes.add(change, str(renamed.get(name, name)))
        if text is None:
            del plain_attrs[name]
        else:
            plain_attrs[name] = text
            json_names.append(name)
    if json_names:
        plain_attrs[_JSON] = _as_json(json_names)[1]
    return plain_attrs


def _attr_name(name: Any, value: Any, reserved: Collection[str]) -> str:
    """Return a supported name of an attribute, prefixed if xarray would interpret it."""
    text = _plain_name(name)
    is_time = text == "units" and isinstance(value, str) and _UNIT_OF_TIME.fullmatch(value)
    if text in reserved or _TAKEN_ATTR.fullmatch(text) or is_time:
        return f"attr_{text}"
    return text


def _is_plain(value: Any) -> bool:
    """Return whether netCDF and zarr preserve a value: text, a number, or numbers of one type."""
    if isinstance(value, str):
        return _is_plain_text(value)
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.size > 1 and value.dtype.name in _NUMBERS
    if isinstance(value, np.generic):
        return value.dtype.name in _NUMBERS
    if isinstance(value, list | tuple):
        # A list of one number is read as the number.
        return len(value) > 1 and len({*map(type, value)}) == 1 and all(map(_is_number, value))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is float


def _is_plain_text(value: str) -> bool:
    """Return whether netCDF and zarr support a text."""
    return _NOT_IN_A_TEXT.search(value) is None


def _as_json(value: Any) -> tuple[str, str | None]:
    """Return a description of the change, and the value as JSON text; None if it is impossible."""
    lost: list[Any] = []
    try:
        simple = _simple(value, lost)
        text = json.dumps(simple, ensure_ascii=False)
    except RecursionError:
        return "attributes that are nested too deeply were left out", None
    if not _is_plain_text(text):
        text = json.dumps(simple)
    if lost:
        return "attributes became JSON text, which does not have all of their values", text
    return "attributes became JSON text", text


def _simple(value: Any, lost: list[Any]) -> Any:
    """Return the closest value that JSON can represent; `lost` collects unsupported values."""
    if isinstance(value, dict):
        lost += [key for key in value if not isinstance(key, str)]
        return {str(key): _simple(inner, lost) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_simple(inner, lost) for inner in value]
    if hasattr(value, "tolist"):
        return _simple(value.tolist(), lost)
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if value is None or isinstance(value, str | int | float):
        return value
    lost.append(value)
    return str(value)
