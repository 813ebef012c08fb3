"""What is to be written of an xarray object: its tensors, with stored bytes where nothing changed.

A variable that was opened by us and not touched is copied
as it is stored; of one that was computed or changed, the encoding says how it was stored.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.graph import is_stored
from xckpt.arrays.lazy import UnreadableArray
from xckpt.arrays.quantized import QuantizedArray
from xckpt.arrays.sparse import COOArray, CSRArray
from xckpt.dtypes import nbytes_of
from xckpt.errors import UnsupportedError
from xckpt.index import Part, Tensor
from xckpt.writing.casting import element_type
from xckpt.writing.entries import ArrayPart, Contents, Entry
from xckpt.writing.naming import named_variables
from xckpt.writing.sparse_parts import densified, is_sparse, sparse_parts
from xckpt.writing.stored import stored_entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.arrays import LazyArray
    from xckpt.writing.fitting import Notes

__all__ = ["read_contents"]

_SPARSE = ("sparse_csr", "sparse_coo")
# Names that we or xarray give to axes that have none.
_NO_NAME = re.compile(r"(d\d+(_\d+)?|dim_\d+)")


def read_contents(obj: Any, notes: Notes) -> Contents:
    """List what is to be written of an xarray object.

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree or xarray.DataArray
        Opened by us, computed, or made in memory.
    notes : Notes
        Collects what is not written.

    Returns
    -------
    Contents
        Nothing is computed yet.

    Raises
    ------
    TypeError
        If it is none of these.
    UnsupportedError
        If a variable has no numbers.
    ValueError
        If two variables of a tree are called the same when it is flat.
    """
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
    return Contents(list(_entries(variables, notes)), _attrs(obj, notes))


def _attrs(obj: xr.Dataset | xr.DataTree, notes: Notes) -> dict[str, Any]:
    """Give the attributes of the file: those of the root."""
    if isinstance(obj, xr.DataTree):
        for node in obj.descendants:
            if node.attrs:
                notes.add("attributes of modules are not written", node.path)
    return {str(name): value for name, value in obj.attrs.items()}


def _entries(variables: Mapping[str, xr.Variable], notes: Notes) -> Iterator[Entry]:
    """Make the entries of all variables; parts that make a whole tensor become that again."""
    wholes = _wholes(variables)
    part_of = {part: whole for whole, parts in wholes.items() for part in parts.values()}
    for name, variable in variables.items():
        whole = part_of.get(name)
        if whole is None:
            yield _entry(name, variable, notes)
        elif whole in wholes:
            parts = wholes.pop(whole)
            yield _whole(whole, {role: variables[part] for role, part in parts.items()})


def _wholes(variables: Mapping[str, xr.Variable]) -> dict[str, dict[str, str]]:
    """Find the tensors all parts of which are there untouched, as variables of their own.

    Variables may be renamed, all parts of a tensor alike.
    """
    found: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name, variable in variables.items():
        role = str(variable.encoding.get("part"))
        whole = name.removesuffix(f":{role}")
        if whole not in {name, ""} and isinstance(untouched(variable), DenseArray):
            key = (whole, variable.encoding["tensor"], variable.encoding["source"])
            found[key][role] = name
    roles = {
        key: variables[next(iter(parts.values()))].encoding["whole"]["roles"]
        for key, parts in found.items()
    }
    return {
        key[0]: {role: parts[role] for role in roles[key]}
        for key, parts in found.items()
        if parts.keys() == set(roles[key]) and key[0] not in variables
    }


def _whole(name: str, variables: Mapping[str, xr.Variable]) -> Entry:
    readers = {}
    for role, variable in variables.items():
        lazy = untouched(variable)
        if not isinstance(lazy, DenseArray):
            raise TypeError(f"part {role!r} of {name!r} is a {type(lazy).__name__}")
        readers[role] = lazy.reader
    role, first = next(iter(variables.items()))
    said = first.encoding["whole"]
    path = first.encoding.get("path")
    if path is not None:
        path = (*path[:-1], path[-1].removesuffix(f":{role}"))
    tensor = Tensor(
        name,
        said["dtype"],
        said["shape"],
        {role: reader.part for role, reader in readers.items()},
        first.encoding["layout"],
        attrs=first.attrs,
        dims=said["dims"],
        path=path,
        quantization=said["quantization"],
    )
    return stored_entry(tensor, readers)


def _entry(name: str, variable: xr.Variable, notes: Notes) -> Entry:
    lazy = untouched(variable)
    if isinstance(lazy, UnreadableArray):
        raise lazy.problem.located(path=lazy.source.name, tensor=name)
    dims = tuple(None if _NO_NAME.fullmatch(str(dim)) else str(dim) for dim in variable.dims)
    common: dict[str, Any] = {
        "attrs": variable.attrs,
        "dims": dims if any(dims) else None,
        "path": variable.encoding.get("path"),
    }
    if isinstance(lazy, DenseArray):
        part = lazy.reader.part
        tensor = Tensor(
            name,
            part.dtype,
            lazy.shape,
            {"data": part},
            order=_order(lazy.order),
            strict=lazy.strict,
        )
        return stored_entry(replace(tensor, **common), {"data": lazy.reader})
    if isinstance(lazy, CSRArray | COOArray | QuantizedArray):
        return _untouched_composite(name, variable, lazy, common)
    if _layout(variable.encoding) == "quantized":
        notes.add("quantised tensors whose values were computed are written dense", name)
    return _computed(name, variable, common)


def _order(order: str) -> Any:
    return order


def _untouched_composite(
    name: str,
    variable: xr.Variable,
    lazy: CSRArray | COOArray | QuantizedArray,
    common: dict[str, Any],
) -> Entry:
    layout: Any = variable.encoding["layout"]
    parts = {role: reader.part for role, reader in lazy.readers.items()}
    dtype = variable.encoding["dtype"].name
    scheme = lazy.quantization if isinstance(lazy, QuantizedArray) else None
    strict = False if isinstance(lazy, QuantizedArray) else lazy.strict
    if layout != "quantized":
        dtype = parts["values"].dtype
    tensor = Tensor(
        name, dtype, lazy.shape, parts, layout, quantization=scheme, strict=strict, **common
    )
    return stored_entry(tensor, lazy.readers, lambda: densified(variable.data))


def _computed(name: str, variable: xr.Variable, common: dict[str, Any]) -> Entry:
    array = _array(variable)
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
        0,
        nbytes_of(stored, variable.size),
        encoding.get("compression"),
        digest=None if digest is None else digest.partition(":")[0],
    )
    order: Any = encoding.get("order", "C")
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
    """Give the layout that the values of a variable were stored in; a part is dense by itself."""
    return "dense" if "part" in encoding else encoding.get("layout")


def _stored_type(encoding: Mapping[Any, Any], dtype: str) -> str:
    """Give the element type that a dense variable was stored with, if it was."""
    before = encoding.get("dtype")
    if _layout(encoding) not in {"dense", *_SPARSE} or not isinstance(before, np.dtype):
        return dtype
    name = element_type(before)
    # Booleans of 32 bits are shown as what numpy has for them.
    if dtype == "bool" and name == "uint32":
        return "bool32"
    return dtype if name is None else name


def _array(variable: xr.Variable) -> Any:
    """Give the array of a variable without loading what is lazy."""
    if variable.chunks is None and not variable._in_memory:  # noqa: SLF001  .data would load it
        variable = variable.chunk(dict.fromkeys(variable.dims, "auto"))
    return variable.data


def _advice(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "mM":
        return "Convert it: ds['t'].astype('int64') counts its units"
    return "Leave it out: ds.drop_vars(name), or put it into ds.attrs"


def untouched(variable: xr.Variable) -> LazyArray | None:
    """Give the stored array that a variable shows, if nothing was done to it.

    Parameters
    ----------
    variable : xarray.Variable
        Any.

    Returns
    -------
    LazyArray or None
        None for computed values and arrays of others; what only some elements are shown of is an
        array of another kind.
    """
    data: Any = variable._data  # noqa: SLF001  `data` would load what is not dask's
    return data.dask.lazy if is_stored(data) else None
