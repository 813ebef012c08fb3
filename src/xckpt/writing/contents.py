"""What is to be written of an xarray object: its tensors, with stored bytes where nothing changed.

A variable that was opened by us and not touched is the tensor that its file describes, copied as
it is stored; of one that was computed or changed, the encoding says how it was stored.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from dask.highlevelgraph import HighLevelGraph
from xarray.core.indexing import ExplicitlyIndexed

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.graph import TensorLayer, is_stored
from xckpt.arrays.lazy import UnreadableArray
from xckpt.dtypes import nbytes_of
from xckpt.errors import UnsupportedError
from xckpt.index import Part, Tensor
from xckpt.labels import stated_name
from xckpt.storage.shard import files_of
from xckpt.writing.casting import element_type
from xckpt.writing.entries import ArrayPart, Contents, Entry, StoredPart
from xckpt.writing.naming import named_variables
from xckpt.writing.sparse_parts import densified, is_sparse, sparse_parts
from xckpt.writing.stored import stored_entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.arrays import LazyArray
    from xckpt.arrays.lazy import Origin
    from xckpt.arrays.parts import PartReader
    from xckpt.storage import Source
    from xckpt.writing.fitting import Notes

__all__ = ["array_of", "read_contents", "read_sources", "untouched"]

_SPARSE = ("sparse_csr", "sparse_coo")


def read_contents(obj: Any, notes: Notes, format: str | None = None) -> Contents:
    """List what is to be written of an xarray object."""
    if isinstance(obj, xr.DataArray):
        if obj.name is None:
            raise ValueError("a DataArray is saved under its name: .rename('weight')")
        obj = obj.to_dataset(promote_attrs=False)
    if not isinstance(obj, xr.Dataset | xr.DataTree):
        raise TypeError(
            f"expected a Dataset, a DataTree or a DataArray, got {type(obj).__name__}; "
            "a mapping of arrays is a Dataset by xr.Dataset({name: (dims, array)})"
        )
    variables = named_variables(obj, notes)
    whole = obj.root if isinstance(obj, xr.DataTree) else obj
    again = format is not None and whole.encoding.get("format") == format
    return Contents(list(_entries(variables, notes, again=again)), _attrs(obj, notes))


def read_sources(contents: Contents) -> Iterator[Source]:
    """Find the files that values are read from, also those that something is computed from."""
    found: dict[Source, None] = {}
    for entry in contents.entries:
        for part in entry.parts.values():
            if isinstance(part, StoredPart):
                found[part.reader.source] = None
                continue
            graph = getattr(part.array, "dask", None)
            for layer in graph.layers.values() if isinstance(graph, HighLevelGraph) else ():
                if isinstance(layer, TensorLayer):
                    found |= dict.fromkeys(layer.lazy.sources)
    for source in found:
        yield from files_of(source)


def _attrs(obj: xr.Dataset | xr.DataTree, notes: Notes) -> dict[str, Any]:
    """Return the attributes of the file: those of the root."""
    if isinstance(obj, xr.DataTree):
        for node in obj.descendants:
            if node.attrs:
                notes.add("attributes of modules are not written", node.path)
    return {str(name): value for name, value in obj.attrs.items()}


def _entries(variables: Mapping[str, xr.Variable], notes: Notes, *, again: bool) -> Iterator[Entry]:
    """Make the entries of all variables; parts that make a whole tensor become that again."""
    wholes = _wholes(variables)
    part_of = {part: whole for whole, parts in wholes.items() for part in parts.values()}
    for name, variable in variables.items():
        whole = part_of.get(name)
        if whole is None:
            yield _entry(name, variable, notes, again=again)
        elif whole in wholes:
            parts = wholes.pop(whole)
            yield _whole(whole, {role: variables[part] for role, part in parts.items()})


def _wholes(variables: Mapping[str, xr.Variable]) -> dict[str, dict[str, str]]:
    """Find the tensors all parts of which are there untouched, as variables of their own."""
    found: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    roles: dict[tuple[str, str, str], list[str]] = {}
    for name, variable in variables.items():
        origin = _origin(variable)
        if origin is None or origin.role is None:
            continue
        whole = _name_of_whole(name, origin.tensor.name, origin.role)
        if whole is not None and whole not in variables:
            key = (whole, origin.tensor.name, str(variable.encoding.get("source")))
            found[key][origin.role] = name
            roles[key] = list(origin.tensor.parts)
    wholes: dict[str, dict[str, str]] = {}
    for key, parts in found.items():
        if parts.keys() == set(roles[key]):
            wholes.setdefault(key[0], {role: parts[role] for role in roles[key]})
    return wholes


def _name_of_whole(name: str, tensor: str, role: str) -> str | None:
    """Tell from the name of a part what the whole is called, None if it does not say."""
    part = f":{role}"
    if name.startswith(tensor + part) and not name[len(tensor + part) :].strip(":"):
        return tensor
    renamed = re.fullmatch(f"(.+?){re.escape(part)}:*", name, re.DOTALL)
    return None if renamed is None else renamed[1]


def _whole(name: str, variables: Mapping[str, xr.Variable]) -> Entry:
    """Make the entry of a tensor that is open as its parts."""
    first = next(iter(variables.values()))
    origin = _origin(first)
    if origin is None:
        raise TypeError(f"parts of {name!r} are not those of a file")
    readers = {role: _readers(variable)["data"] for role, variable in variables.items()}
    path = origin.tensor.path if "path" in first.encoding else None
    tensor = replace(origin.tensor, name=name, attrs=first.attrs, path=path)
    return stored_entry(tensor, readers)


def _entry(name: str, variable: xr.Variable, notes: Notes, *, again: bool) -> Entry:
    lazy = untouched(variable)
    if isinstance(lazy, UnreadableArray):
        raise lazy.problem.located(path=lazy.source.name, tensor=name)
    common: dict[str, Any] = {
        "attrs": variable.attrs,
        "dims": _dims(variable, again=again),
        "path": variable.encoding.get("path"),
    }
    origin = _origin(variable)
    if origin is not None and origin.role is None:
        tensor = replace(origin.tensor, name=name, **common)
        values = None if tensor.layout == "dense" else lambda: densified(variable.data)
        return stored_entry(tensor, _readers(variable), values)
    if isinstance(lazy, DenseArray):
        part = lazy.reader.part
        tensor = Tensor(name, part.dtype, lazy.shape, {"data": part}, strict=lazy.strict, **common)
        return stored_entry(tensor, _readers(variable))
    if _layout(variable.encoding) == "quantized":
        notes.add("quantised tensors whose values were computed are written dense", name)
    return _computed(name, variable, common)


def _origin(variable: xr.Variable) -> Origin | None:
    lazy = untouched(variable)
    return None if lazy is None else lazy.origin


def _readers(variable: xr.Variable) -> dict[str, PartReader]:
    """Return the parts of an untouched variable by role; a dense one, or one part, is ``data``."""
    lazy: Any = untouched(variable)
    return {"data": lazy.reader} if isinstance(lazy, DenseArray) else lazy.readers


def _dims(variable: xr.Variable, *, again: bool) -> tuple[str | None, ...] | None:
    """Name the axes: as the file did where that could not be shown, else as they are shown."""
    stated = variable.encoding.get("axes", {})
    dims = []
    for dim in variable.dims:
        # None is no name of the file: the role of the tensor in its module gave the one shown.
        is_stated = dim in stated and (again or stated[dim] is not None)
        dims.append(stated[dim] if is_stated else stated_name(dim))
    return tuple(dims) if any(dims) else None


def _computed(name: str, variable: xr.Variable, common: dict[str, Any]) -> Entry:
    array = array_of(variable)
    dtype = element_type(array.dtype)
    if dtype is None:
        raise UnsupportedError(
            f"{array.dtype} values have no place in a checkpoint, which holds numbers",
            tensor=name,
            rule="Dtype",
            hint=_advice(array.dtype),
        )
    encoding = variable.encoding if "layout" in variable.encoding else {}
    if array.ndim and (is_sparse(array) or _layout(encoding) in _SPARSE):
        return _computed_sparse(name, array, encoding, common)
    stored = _stored_type(encoding, dtype)
    digest = encoding.get("digest")
    part = Part(
        stored,
        array.shape,
        encoding.get("offset", 0),
        nbytes_of(stored, variable.size),
        encoding.get("stored_compression"),
        digest=None if digest is None else digest.partition(":")[0],
    )
    order: Any = encoding.get("stored_order", "C")
    tensor = Tensor(name, stored, array.shape, {"data": part}, order=order, **common)
    return Entry(tensor, {"data": ArrayPart(array, name)})


def _computed_sparse(
    name: str, array: Any, encoding: Mapping[Any, Any], common: dict[str, Any]
) -> Entry:
    """Make the entry of what is sparse, or was when it was opened."""
    before = _layout(encoding)
    layout: Any = before if before in _SPARSE else "sparse_csr" if array.ndim == 2 else "sparse_coo"
    if layout == "sparse_csr" and array.ndim != 2:
        layout = "sparse_coo"
    stored = _stored_type(encoding, array.dtype.name)
    parts, data = sparse_parts(array, layout, stored, name)
    tensor = Tensor(name, stored, array.shape, parts, layout, **common)
    return Entry(tensor, data, lambda: densified(array))


def _layout(encoding: Mapping[Any, Any]) -> Any:
    """Return the layout that the values of a variable were stored in; a part is dense by itself."""
    return "dense" if "part" in encoding else encoding.get("layout")


def _stored_type(encoding: Mapping[Any, Any], dtype: str) -> str:
    """Return the element type that a dense variable was stored with, if it was."""
    before = encoding.get("stored_dtype")
    if _layout(encoding) not in {"dense", *_SPARSE} or not isinstance(before, np.dtype):
        return dtype
    name = element_type(before)
    # Booleans of 32 bits are shown as what numpy has for them.
    if dtype == "bool" and name == "uint32":
        return "bool32"
    return dtype if name is None else name


def array_of(variable: xr.Variable) -> Any:
    """Return the array of a variable without loading what another engine left lazy."""
    # `_in_memory` is false of sparse arrays too, and adapters may have what is in memory.
    is_adapter = isinstance(variable._data, ExplicitlyIndexed)  # noqa: SLF001  .data would load it
    if is_adapter and not variable._in_memory:  # noqa: SLF001
        variable = variable.chunk(dict.fromkeys(variable.dims, "auto"))
    return variable.data


def _advice(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "mM":
        return "Convert it: ds['t'].astype('int64') counts its units"
    return "Leave it out: ds.drop_vars(name), or put it into ds.attrs"


def untouched(variable: xr.Variable) -> LazyArray | None:
    """Return the stored array that a variable shows, if nothing was done to it."""
    data: Any = variable._data  # noqa: SLF001  `data` would load what is not dask's
    return data.dask.lazy if is_stored(data) else None
