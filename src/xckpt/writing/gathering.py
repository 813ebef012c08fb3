"""The tensors of an xarray object, with stored bytes for unchanged variables.

Data variables become tensors, and so do coordinates with numbers; the `Arrangement` lists them.
Coordinates of stacks are part of the names of tensors. An unchanged variable is the tensor that its
file describes, and is copied as it is stored. For a computed or changed variable, the encoding
has the old type, layout and order. Variables computed from a stack are unstacked as well if their
coordinates name the modules.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr
from dask.highlevelgraph import HighLevelGraph

from xckpt.arrays.dense import DenseArray, OnePartArray
from xckpt.arrays.graph import TensorLayer, lazy_of
from xckpt.arrays.lazy import UnreadableArray
from xckpt.datasets.tensors import OpenTensors
from xckpt.errors import UnsupportedError
from xckpt.formats.plan import WantedPart
from xckpt.index import Arrangement, Tensor
from xckpt.labels import AxisNamer, explicit_name
from xckpt.storage.source import files_of
from xckpt.upstream.xarray_variables import ExplicitlyIndexed, data_of, is_in_memory
from xckpt.writing.casting import densified, element_type, is_sparse, sparse_parts
from xckpt.writing.data import Gathered, Payload, stored_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from xckpt.arrays import LazyArray
    from xckpt.arrays.parts import PartReader
    from xckpt.storage import Source
    from xckpt.writing.fitting import Changes

__all__ = [
    "Computed",
    "Stored",
    "array_of",
    "gather",
    "listed",
    "source_files",
    "untouched",
]

_SPARSE = ("sparse_csr", "sparse_csc", "sparse_coo", "sparse_bsr", "sparse_bsc", "sparse_hybrid")


class Stored(NamedTuple):
    """A tensor that is in a file, unchanged; `values` makes a dense array of one that is not."""

    tensor: Tensor
    readers: Mapping[str, PartReader]
    values: Callable[[], Any] | None = None

    @property
    def name(self) -> str:
        """Name in the new file."""
        return self.tensor.name

    def payload(self) -> Payload:
        """Return the tensor to be written with its stored bytes."""
        return stored_payload(*self)


class Computed(NamedTuple):
    """A tensor that is in no file, with the type and layout it is stored in."""

    name: str
    array: Any
    dtype: str
    is_sparse: bool
    encoding: Mapping[Any, Any]
    about: dict[str, Any]

    def payload(self) -> Payload:
        """Return the tensor in the type and layout that it is stored in."""
        name, array, stored, is_stored_sparse, encoding, about = self
        if is_stored_sparse:
            is_coo = _layout(encoding) == "sparse_coo" or array.ndim != 2
            layout: Any = "sparse_coo" if is_coo else "sparse_csr"
            parts, arrays = sparse_parts(array, layout, stored, name)
            values = partial(densified, array)
            return Payload(
                name, stored, array.shape, parts, layout, **about, data=arrays, values=values
            )
        compression, digest = encoding.get("stored_compression"), encoding.get("digest")
        offset = encoding.get("offset", 0)
        part = WantedPart.of(stored, array.shape, compression, digest, offset)
        order: Any = encoding.get("stored_order", "C")
        data = {"data": array}
        return Payload(name, stored, array.shape, {"data": part}, order=order, **about, data=data)


def gather(obj: Any, changes: Changes, format: str | None = None) -> Gathered:
    """List the tensors and attributes of an xarray object."""
    obj = _as_dataset(obj)
    tensors, coords = listed(obj, changes, format)
    payloads = [each.payload() for each in tensors]
    modules: dict[str, Any] = {}
    if isinstance(obj, xr.DataTree):
        modules = {
            node.path: node.attrs
            for node in obj.descendants
            # No tensor says that an empty one is there.
            if node.attrs
            or not any(
                each.data_vars or each.to_dataset(inherit=False).variables for each in node.subtree
            )
        }
    whole = obj.root if isinstance(obj, xr.DataTree) else obj
    attrs = {str(name): value for name, value in obj.attrs.items()}
    # The order of a file is no order of its own.
    ordered = "format" not in whole.encoding or whole.encoding.get("ordered", False)
    order = [payload.name for payload in payloads] if ordered else ()
    arrangement = Arrangement(tuple(coords), tuple(order), modules)
    return Gathered(payloads, attrs, arrangement, obj.encoding.get("attr_types", {}))


def listed(
    obj: Any, changes: Changes, format: str | None = None
) -> tuple[Iterator[Stored | Computed], list[str]]:
    """List the tensors of an xarray object, and name those that are coordinates."""
    obj = _as_dataset(obj)
    variables, coords = _named_variables(obj, changes)
    whole = obj.root if isinstance(obj, xr.DataTree) else obj
    again = format is not None and whole.encoding.get("format") == format
    return _listed(variables, changes, again=again), coords


def _as_dataset(obj: Any) -> xr.Dataset | xr.DataTree:
    if isinstance(obj, xr.DataArray):
        if obj.name is None:
            raise ValueError("a DataArray is saved under its name: .rename('weight')")
        return obj.to_dataset(promote_attrs=False)
    if not isinstance(obj, xr.Dataset | xr.DataTree):
        text = "expected a Dataset, a DataTree, a DataArray or a mapping of names to arrays, got "
        hint = "; xckpt.convert writes a file in another format"
        text += f"{type(obj).__name__}{hint if isinstance(obj, str | os.PathLike) else ''}"
        raise TypeError(text)
    return obj


def source_files(payloads: Iterable[Payload]) -> Iterator[Source]:
    """Return the files that values are read, or computed, from."""
    found: dict[Source, None] = {}
    for payload in payloads:
        for array in payload.data.values():
            if isinstance(array, OnePartArray):
                found[array.source] = None
                continue
            graph = getattr(array, "dask", None)
            for layer in graph.layers.values() if isinstance(graph, HighLevelGraph) else ():
                if isinstance(layer, TensorLayer):
                    found |= dict.fromkeys(layer.lazy.sources)
    for source in found:
        yield from files_of(source)


# --- variables by the names of tensors ------------------------------------------------------------


def _named_variables(
    obj: xr.Dataset | xr.DataTree, changes: Changes
) -> tuple[dict[str, xr.Variable], list[str]]:
    """List the variables that become tensors, and the names of coordinates among them."""
    tensors = OpenTensors(obj)
    variables = tensors.unstacked()
    for name in variables:
        if not isinstance(name, str):
            raise TypeError(f"the names of tensors are text, unlike that of the variable {name!r}")
    dims = {dim for variable in variables.values() for dim in variable.dims}
    coords = []
    for name, coord in tensors.coord_tensors(dims).items():
        if element_type(coord.dtype) is None:
            changes.add("coordinates without numbers are not written", name)
        elif name not in variables:
            variables[name] = coord.to_base_variable()
            coords.append(name)
    return variables, coords


# --- unchanged variables --------------------------------------------------------------------


def untouched(variable: xr.Variable) -> LazyArray | None:
    """Return the stored array of an unchanged variable; None for others."""
    return lazy_of(data_of(variable))


def _listed(
    variables: Mapping[str, xr.Variable], changes: Changes, *, again: bool
) -> Iterator[Stored | Computed]:
    """List the tensors of all variables; parts that make a whole tensor become that again."""
    wholes = _wholes(variables)
    whole_of = {part: whole for whole, parts in wholes.items() for part in parts.values()}
    for name, variable in variables.items():
        whole = whole_of.get(name)
        if whole is None:
            yield _tensor(name, variable, changes, again=again)
        elif whole in wholes:
            parts = wholes.pop(whole)
            lazy: dict[str, Any] = {
                role: untouched(variables[each]) for role, each in parts.items()
            }
            role, first = next(iter(parts.items()))
            tensor, shown_as = lazy[role].origin.tensor, variables[first]
            path = tensor.path if "path" in shown_as.encoding else None
            readers = {role: each.readers["data"] for role, each in lazy.items()}
            named = replace(tensor, name=whole, attrs=shown_as.attrs, path=path)
            yield Stored(named, readers)


def _wholes(variables: Mapping[str, xr.Variable]) -> dict[str, dict[str, str]]:
    """Return tensors of which all parts are unchanged: their variables by role."""
    found: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    roles: dict[tuple[str, str, str], list[str]] = {}
    for name, variable in variables.items():
        lazy = untouched(variable)
        origin = None if lazy is None else lazy.origin
        if origin is None or origin.role is None:
            continue
        tensor, part = origin.tensor.name, f":{origin.role}"
        # Colons are added to names that are taken; who renames a part may rename the whole.
        renamed = re.fullmatch(f"({re.escape(tensor)}|.+?){re.escape(part)}:*", name, re.DOTALL)
        if renamed is not None and renamed[1] not in variables:
            key = (renamed[1], tensor, str(variable.encoding.get("source")))
            found[key][origin.role] = name
            roles[key] = list(origin.tensor.parts)
    wholes: dict[str, dict[str, str]] = {}
    for key, parts in found.items():
        if parts.keys() == set(roles[key]):
            wholes.setdefault(key[0], {role: parts[role] for role in roles[key]})
    return wholes


def _tensor(
    name: str, variable: xr.Variable, changes: Changes, *, again: bool
) -> Stored | Computed:
    lazy: Any = untouched(variable)
    if isinstance(lazy, UnreadableArray):
        raise lazy.problem.located(path=lazy.source.name, tensor=name)
    common: dict[str, Any] = {
        "attrs": variable.attrs,
        "dims": _dims(name, variable, again=again),
        "path": variable.encoding.get("path"),
    }
    origin = None if lazy is None else lazy.origin
    if origin is not None and origin.role is None:
        tensor = replace(origin.tensor.named(name), **common)
        if origin.tensor.stored is not None and tensor.stored is None:
            changes.add("quantised tensors that are called otherwise are written dense", name)
            return _computed(name, variable, common)
        is_dense = tensor.layout in {"dense", "chunked"}
        values = None if is_dense else lambda: densified(variable.data)
        return Stored(tensor, lazy.readers, values)
    if isinstance(lazy, DenseArray):
        part = lazy.reader.part
        tensor = Tensor(name, part.dtype, lazy.shape, {"data": part}, strict=lazy.strict, **common)
        return Stored(tensor, lazy.readers)
    if _layout(variable.encoding) in {"quantized", "blocks"}:
        changes.add("quantised tensors whose values were computed are written dense", name)
    return _computed(name, variable, common)


def _dims(name: str, variable: xr.Variable, *, again: bool) -> tuple[str | None, ...] | None:
    """Return the names of axes, as the file stated them if they were shown otherwise."""
    stated = variable.encoding.get("axes", {})
    dims = []
    for dim in variable.dims:
        # None is not a name of the file: the role of the tensor in its module gave the one shown.
        is_stated = dim in stated and (again or stated[dim] is not None)
        dims.append(stated[dim] if is_stated else explicit_name(dim))
    # In other Datasets every name is the user's, also one that looks like ours.
    if "layout" not in variable.encoding and None in dims:
        shown = _shown_dims(variable.shape, tuple(dims))
        if shown != variable.dims or not {name, name.rpartition(".")[2]}.isdisjoint(shown):
            return tuple(map(str, variable.dims))
    return tuple(dims) if any(dims) else None


@lru_cache
def _shown_dims(shape: tuple[int, ...], stated: tuple[str | None, ...]) -> tuple[str, ...]:
    """Return the names of axes after opening a file that has names for some of them."""
    return AxisNamer().name_axes("", shape, stated)


# --- computed variables ---------------------------------------------------------------------------


def _computed(name: str, variable: xr.Variable, about: dict[str, Any]) -> Computed:
    array = array_of(variable)
    dtype = element_type(array.dtype)
    if dtype is None:
        hint = "Leave it out: ds.drop_vars(name), or put it into ds.attrs"
        if array.dtype.kind in "mM":
            hint = "Convert it: ds['t'].astype('int64') counts its units"
        raise UnsupportedError(
            f"{array.dtype} values have no place in a checkpoint, which holds numbers",
            tensor=name,
            rule="Dtype",
            hint=hint,
        )
    encoding = variable.encoding if "layout" in variable.encoding else {}
    layout, before = _layout(encoding), encoding.get("stored_dtype")
    is_stored_sparse = bool(array.ndim) and (is_sparse(array) or layout in _SPARSE)
    # What was decoded gets the type back that it was stored with.
    if layout in {"dense", "chunked", *_SPARSE} and isinstance(before, np.dtype):
        stored = element_type(before) or dtype
        # Booleans of 32 bits are shown as what numpy has for them.
        dtype = "bool32" if (dtype, stored) == ("bool", "uint32") else stored
    return Computed(name, array, dtype, is_stored_sparse, encoding, about)


def _layout(encoding: Mapping[Any, Any]) -> Any:
    """Return the layout in which a variable was stored; a single part is dense."""
    return "dense" if "part" in encoding else encoding.get("layout")


def array_of(variable: xr.Variable) -> Any:
    """Return the array of a variable; lazy arrays of other engines become dask arrays."""
    # `_in_memory` is false of sparse arrays too, and adapters may have what is in memory.
    is_adapter = isinstance(data_of(variable), ExplicitlyIndexed)
    if is_adapter and not is_in_memory(variable):
        variable = variable.chunk(dict.fromkeys(variable.dims, "auto"))
    return variable.data
