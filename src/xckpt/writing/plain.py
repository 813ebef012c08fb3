"""``ds.ckpt.plain()``: the same data with names, attributes and types that netCDF and zarr hold.

What they hold as it is, stays. All else is replaced by something that says what it was, in
attributes of its own; so nothing that JSON has is lost.
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

from xckpt.arrays.lazy import UnreadableArray
from xckpt.arrays.stacked import StackedArray
from xckpt.upstream.xarray_variables import data_of, is_in_memory
from xckpt.writing.casting import convert, densified, element_type, is_sparse
from xckpt.writing.fitting import Changes, choose_type
from xckpt.writing.gathering import array_of, untouched

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    # Datasets and the names of the nodes below them, by path.
    _Nodes = dict[str, tuple[xr.Dataset, tuple[str, ...]]]

__all__ = ["plain"]

_INTEGERS = tuple([f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)])
# Element types that both hold, but for booleans.
_NUMBERS = ("float64", "float32", *_INTEGERS)
_ELEMENT_TYPES = (*_NUMBERS, "bool")

_COMPLEX = {"complex64": "float32", "complex128": "float64"}

# What we say of a variable: its name, its dimensions and its element type.
_NAME, _DIMS, _DTYPE = "xckpt_name", "xckpt_dims", "xckpt_dtype"
# Stands for the type of texts that became JSON texts.
_JSON_TEXTS = "json"
# What we say of attributes: their names by their new ones, and which are JSON now.
_ATTRS, _JSON = "xckpt_attrs", "xckpt_json"

# Of a netCDF name the C library refuses control characters, slashes, spaces at the end, and most
# of ASCII at the beginning, and normalises the rest; it has a prefix of its own. zarr takes a
# backslash for a slash.
_NOT_IN_A_NAME = re.compile(r"[\x00-\x1f\x7f/\\\ud800-\udfff]| (?= *\Z)|_(?=nc4_non_coord_)")
_NOT_IN_A_TEXT = re.compile(r"[\0\ud800-\udfff]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_BEGINS_WELL = re.compile(r"[A-Za-z0-9_]|[^\x00-\x7f]")
# In bytes; most file systems and netCDF stop at 255.
_LONGEST_NAME = 240
# These mean something to xarray, or to the libraries that it writes with.
_TAKEN_ATTR = re.compile(
    "_.*|CLASS|NAME|REFERENCE_LIST|DIMENSION_LIST|DIMENSION_LABELS|missing_value|scale_factor"
    "|add_offset|dtype|coordinates"
)
_UNIT_OF_TIME = re.compile(r"(?s).*\bsince\b.*|((nano|micro|milli)?second|minute|hour|day|week)s?")

# Encodings that say something about each axis.
_BY_AXIS = ("preferred_chunks", "chunks", "shards", "chunksizes", "original_shape")


def plain(obj: xr.Dataset | xr.DataTree) -> Any:
    """Make an object that xarray writes to netCDF and zarr as it is; warn once of what changed."""
    changes = Changes()
    nodes: _Nodes = {"/": (obj, ())} if isinstance(obj, xr.Dataset) else {}
    for node in obj.subtree if isinstance(obj, xr.DataTree) else ():  # those above others first
        path = "/" + node.path.removeprefix(obj.path).lstrip("/")
        # The root has what it inherits: nothing above it is written.
        nodes[path] = node.to_dataset(inherit=node is obj), tuple(node.children)
    taken = {str(name) for ds, below in nodes.values() for name in (*ds.variables, *below)}
    dims = _dims(nodes, taken)
    for dim, new in dims.items():
        if new != dim:
            changes.add("dimensions have other names", str(dim))
    pair = _distinct({None: "complex"}, {*dims.values(), *taken})[None]
    made: dict[str, xr.Dataset] = {}
    paths = {"/": "/"}
    said: dict[str, dict[str, Any]] = {"/": {}}
    for path, (ds, children) in nodes.items():
        names = _names(ds, children, dims)
        made[paths[path]] = _dataset(ds, _Renamed(names, dims, pair), said[path], changes)
        for child in children:
            below = f"{path.rstrip('/')}/{child}"
            paths[below] = f"{paths[path].rstrip('/')}/{names[child]}"
            said[below] = {} if names[child] == child else {_NAME: child}
            if said[below]:
                changes.add("modules have other names", below)
    changes.warn("plain()")
    if isinstance(obj, xr.Dataset):
        return made["/"]
    return xr.DataTree.from_dict(made, name=obj.name)


def _dims(nodes: _Nodes, taken: set[str]) -> dict[Any, str]:
    """Name dimensions, which are the same in a whole tree."""
    found: dict[Any, None] = {}
    refused: set[Any] = set()
    for ds, children in nodes.values():
        here = [dim for variable in ds.variables.values() for dim in variable.dims]
        found |= dict.fromkeys(here)
        # In an HDF5 file a dimension is an object next to the groups.
        refused.update(set(here).intersection(children))
    wanted = {dim: f"{_held_name(dim)}_" if dim in refused else _held_name(dim) for dim in found}
    return _distinct(wanted, taken)


def _names(ds: xr.Dataset, children: tuple[str, ...], dims: Mapping[Any, str]) -> dict[Any, str]:
    """Name the variables of a Dataset and its children."""
    # xarray lists coordinates in one text, with spaces between them.
    listed = {name for name, coord in ds.coords.variables.items() if coord.dims != (name,)}
    own = {name: dims[name] for name in ds.variables if name in dims}
    wanted: dict[Any, str] = {
        name: _held_name(name, no_spaces=name in listed)
        for name in (*ds.variables, *children)
        if name not in own
    }
    return _distinct(wanted, dims.values()) | own


# --- variables -----------------------------------------------------------------------------------


class _Renamed(NamedTuple):
    """What things are called in one Dataset."""

    names: Mapping[Any, str]
    dims: Mapping[Any, str]
    #: The dimension that has the real and the imaginary part.
    pair: str


def _dataset(
    ds: xr.Dataset, renamed: _Renamed, said: Mapping[str, Any], changes: Changes
) -> xr.Dataset:
    coords = ds.coords.variables
    new: dict[bool, dict[str, xr.Variable]] = {False: {}, True: {}}
    for name, variable in ds.variables.items():
        lazy = untouched(variable)
        # Any value is an error, and the type perhaps not one that arrays have. The members of a
        # stack are all of one kind.
        first = lazy.first if isinstance(lazy, StackedArray) else lazy
        if isinstance(first, UnreadableArray):
            changes.add("variables were left out, as they cannot be read", str(name))
            continue
        new[name in coords][renamed.names[name]] = _variable(name, variable, renamed, changes)
    made = xr.Dataset(new[False], new[True], _held_attrs(ds.attrs, said, changes))
    made.encoding = dict(ds.encoding)
    return made


def _variable(name: Any, old: xr.Variable, renamed: _Renamed, changes: Changes) -> xr.Variable:
    dims = tuple([renamed.dims[dim] for dim in old.dims])
    said: dict[str, Any] = {}
    if renamed.names[name] != name:
        said[_NAME] = name
        changes.add("variables have other names", str(name))
    if dims != old.dims:
        said[_DIMS] = list(old.dims)
    new = _held_variable(old, dims, renamed.pair)
    if _has_odd_texts(old):
        said[_DTYPE] = _JSON_TEXTS
        changes.add("texts became JSON texts", str(name))
    elif new.dtype != old.dtype:
        said[_DTYPE] = old.dtype.name
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
    # No value is one that is missing, whatever its bits.
    no_fill = {"_FillValue": None, "fill_value": 0.0} if new.dtype.kind == "f" else {}
    new.encoding = no_fill | encoding
    if old.attrs or said:
        new.attrs = _held_attrs(old.attrs, said, changes)
    return new


def _held_variable(old: xr.Variable, dims: tuple[str, ...], pair: str) -> xr.Variable:
    """Return a variable with values of a type that is held, and without an encoding."""
    if _has_odd_texts(old):
        texts = [json.dumps(value) for value in old.values.ravel().tolist()]
        return xr.Variable(dims, np.array(texts, object).reshape(old.shape))
    kind = element_type(old.dtype)
    data = data_of(old)
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
    if variable.dtype.kind not in "UO" or not is_in_memory(variable):
        return False
    values = variable.values.ravel().tolist()
    texts = [value for value in values if isinstance(value, str)]
    return len(texts) == len(values) and not all(map(_is_text, texts))


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


# --- names ---------------------------------------------------------------------------------------


def _distinct(wanted: Mapping[Any, str], taken: Collection[str]) -> dict[Any, str]:
    """Return every name that must change one that no other has."""
    used = {*taken, *(name for name, new in wanted.items() if new == name)}
    counts: dict[str, int] = {}
    found: dict[Any, str] = {}
    for name, new in wanted.items():
        found[name] = new
        while new != name and found[name] in used:
            counts[new] = counts.get(new, 1) + 1
            found[name] = f"{new}_{counts[new]}"
        used.add(found[name])
    return found


def _held_name(name: Any, *, no_spaces: bool = False) -> str:
    """Return the name itself where netCDF and zarr hold it, else one with ``%2F`` and the like."""
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
    return "".join([f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass")])


# --- attributes ----------------------------------------------------------------------------------


def _held_attrs(
    attrs: Mapping[Any, Any], said: Mapping[str, Any], changes: Changes
) -> dict[str, Any]:
    """Return attributes that are held; `said` is what else was replaced, in our own words."""
    words = set(said)
    if not all(map(_is_held, (*attrs.values(), *said.values()))):
        words.add(_JSON)
    if any(_attr_name(name, value, words) != name for name, value in attrs.items()):
        words |= {_ATTRS, _JSON}
    wanted = {name: _attr_name(name, value, words) for name, value in attrs.items()}
    names = _distinct(wanted, words)
    found = {new: attrs[name] for name, new in names.items()} | dict(said)
    renamed = {new: name for name, new in names.items() if new != name}
    if renamed:
        found[_ATTRS] = renamed
    for name in renamed.values():
        changes.add("attributes have other names", str(name))
    as_json = []
    for name, value in list(found.items()):
        if _is_held(value):
            continue
        what, text = _as_json(value)
        if name not in words:
            changes.add(what, str(renamed.get(name, name)))
        if text is None:
            del found[name]
        else:
            found[name] = text
            as_json.append(name)
    if as_json:
        found[_JSON] = _as_json(as_json)[1]
    return found


def _attr_name(name: Any, value: Any, words: Collection[str]) -> str:
    text = _held_name(name)
    is_time = text == "units" and isinstance(value, str) and _UNIT_OF_TIME.fullmatch(value)
    if text in words or _TAKEN_ATTR.fullmatch(text) or is_time:
        return f"attr_{text}"
    return text


def _is_held(value: Any) -> bool:
    """Return whether netCDF and zarr give a value back: text, a number, or several of one type."""
    if isinstance(value, str):
        return _is_text(value)
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.size > 1 and value.dtype.name in _NUMBERS
    if isinstance(value, np.generic):
        return value.dtype.name in _NUMBERS
    if isinstance(value, list | tuple):
        # One number alone comes back without its list.
        return len(value) > 1 and len({*map(type, value)}) == 1 and all(map(_is_number, value))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is float


def _is_text(value: str) -> bool:
    """Return whether netCDF and zarr hold a text."""
    return _NOT_IN_A_TEXT.search(value) is None


def _as_json(value: Any) -> tuple[str, str | None]:
    """Say what becomes of a value, and give its text; None where it has none."""
    lost: list[Any] = []
    try:
        simple = _simple(value, lost)
        text = json.dumps(simple, ensure_ascii=False)
    except RecursionError:
        return "attributes that are nested too deeply were left out", None
    if not _is_text(text):
        text = json.dumps(simple)
    if lost:
        return "attributes became JSON text, which does not have all of their values", text
    return "attributes became JSON text", text


def _simple(value: Any, lost: list[Any]) -> Any:
    """Return what JSON has for a value; `lost` collects what it has nothing for."""
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
