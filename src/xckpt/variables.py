"""From an Index to xarray variables: dask-backed, labelled, with attributes and encoding."""

from __future__ import annotations

import warnings
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import dask.array as da
import xarray as xr
from xarray.core.indexing import ExplicitlyIndexed

from xckpt.arrays import LazyArray, lazy_arrays
from xckpt.arrays.chunks import Chunks, target_nbytes
from xckpt.arrays.graph import tensor_array
from xckpt.dtypes import ELEMENT_TYPES, stored_dtype
from xckpt.errors import CheckpointWarning, shown
from xckpt.labels import AxisNames, TensorFilter, select
from xckpt.labels.selection import closest
from xckpt.storage.shard import ShardSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Index, Part, Tensor
    from xckpt.options import OpenOptions
    from xckpt.storage import Source

__all__ = ["LazyVariable", "make_variables"]


_DATA: Any = xr.Variable.__dict__["data"]


class LazyVariable(xr.Variable):
    """A variable that stays dask-backed when `xarray.open_dataset` hands it on.

    xarray wraps what an engine returns in copy-on-write and caching adapters
    (``xarray.backends.api._protect_dataset_variables_inplace``). Around a dask array they protect
    nothing and hide it: ``ds.chunks`` is empty and ``ds.compute()`` leaves dask arrays behind. So
    the setter leaves out exactly such wrappers.
    """

    __slots__ = ()

    @classmethod
    def of(
        cls,
        dims: tuple[Any, ...],
        data: Any,
        attrs: dict[Any, Any] | None,
        encoding: dict[Any, Any],
    ) -> Self:
        """Make a variable of what is known to fit together.

        ``Variable.__init__`` checks it, and asks the array for its shape half a dozen times.
        """
        variable = object.__new__(cls)
        variable._dims = dims
        variable._data = data
        variable._attrs = attrs
        variable._encoding = encoding
        return variable

    # xarray copies each variable twice on the way from the engine to the user. Should it stop
    # calling this method, nothing breaks: opening takes longer.
    def _copy(self, deep: bool = True, data: Any = None, memo: Any = None) -> Self:  # noqa: FBT001, FBT002
        if deep or data is not None or not isinstance(self._data, da.Array):
            return super()._copy(deep=deep, data=data, memo=memo)
        attrs = None if self._attrs is None else dict(self._attrs)
        return self.of(self._dims, self._data, attrs, dict(self._encoding or {}))

    @property
    def data(self) -> Any:
        """The array: dask's until it is loaded."""
        return super().data

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, ExplicitlyIndexed):
            _DATA.fset(self, value)


class _Listed(NamedTuple):
    """An array that becomes a variable, and the tensor (and part of it) that it shows."""

    lazy: LazyArray
    tensor: Tensor
    role: str | None


def make_variables(
    source: Source, index: Index, options: OpenOptions, *, for_tree: bool = False
) -> dict[str, xr.Variable]:
    """Make the variables of a checkpoint.

    Parameters
    ----------
    source : Source
        The file.
    index : Index
        What it holds.
    options : OpenOptions
        Which variables, and how.
    for_tree : bool
        Whether the variables go into a tree, under the last components of their names: no axis
        is then named like one of these.

    Returns
    -------
    dict of str to xarray.Variable
        By variable name, in file order.

    Raises
    ------
    ValueError
        If the caller's `dims` do not fit.
    """
    listed = _list_arrays(source, index, options)
    leaves = {_leaf(name, *each[1:]) for name, each in listed.items()} if for_tree else set()
    reserved = leaves | listed.keys()
    names = AxisNames(options.dims, reserved)
    target = target_nbytes()
    token = _token(source, options, target)
    metas: dict[tuple[Any, ...], Any] = {}
    variables: dict[str, xr.Variable] = {}
    for name, (lazy, tensor, role) in listed.items():
        suggested = tensor.dims if role is None else None
        dims = names.of(name, lazy.shape, suggested)
        chunks = lazy.chunks(target)
        kind = (type(lazy), lazy.dtype, lazy.ndim)
        meta = metas.get(kind)
        if meta is None:
            meta = metas[kind] = lazy.empty((0,) * lazy.ndim)
        variables[name] = LazyVariable.of(
            dims,
            tensor_array(lazy, f"{name}-{token}", chunks, meta),
            dict(tensor.attrs) if tensor.attrs else None,
            _encoding(tensor, role, source.name, dims, chunks),
        )
    return variables


def _list_arrays(source: Source, index: Index, options: OpenOptions) -> dict[str, _Listed]:
    """List what becomes a variable, by variable name; nothing is built for what is left out."""
    dropped = options.drop_variables
    drop = {dropped} if isinstance(dropped, str) else set(dropped or ())
    sources: dict[str | None, Source] = {
        label: ShardSource(source, shard, label) for label, shard in index.shards.items()
    }
    sources[None] = source
    listed: dict[str, _Listed] = {}
    reading = options.reading
    composite: list[tuple[Tensor, dict[str | None, LazyArray]]] = []
    for name in _chosen(index, options.tensors):
        if name in drop:
            continue
        tensor = index.tensors[name]
        arrays = lazy_arrays(tensor, sources, reading)
        if None in arrays:
            listed[name] = _Listed(arrays[None], tensor, None)
        else:
            composite.append((tensor, arrays))
    for tensor, arrays in composite:
        for role, lazy in arrays.items():
            variable = _part_name(tensor.name, str(role), listed)
            if variable not in drop:
                listed[variable] = _Listed(lazy, tensor, role)
    return listed


def _chosen(index: Index, wanted: TensorFilter | None) -> list[str]:
    chosen = select(index.tensors, wanted)
    if wanted is not None and not chosen and index.tensors:
        alike = ", ".join(shown(name) for name in closest(index.tensors, wanted))
        hint = f"; similar names: {alike}" if alike else ""
        text = f"tensors={wanted!r} matches none of the {len(index.tensors)} tensors{hint}"
        warnings.warn(f"{index.source}: {text}", CheckpointWarning, stacklevel=6)
    return chosen


def _part_name(tensor: str, role: str, taken: Mapping[str, Any]) -> str:
    """Name the variable of a part; tensors have their exact names, so parts give way to them."""
    name = f"{tensor}:{role}"
    while name in taken:
        name = f"{name}:"
    return name


def _leaf(variable: str, tensor: Tensor, role: str | None) -> str:
    """Give the name that a variable has in its node of a tree."""
    if tensor.path is None:
        return variable.rpartition(".")[2]
    return tensor.path[-1] if role is None else f"{tensor.path[-1]}:{role}"


def _token(source: Source, options: OpenOptions, target: int) -> str:
    """Give a text that differs wherever the values or chunks of equally named tensors may."""
    own = sorted(options.format_options.items())
    told = (source.name, source.identity, options.reading, own, target)
    return blake2b(repr(told).encode(), digest_size=8).hexdigest()


def _encoding(
    tensor: Tensor, role: str | None, source: str, dims: tuple[str, ...], chunks: Chunks
) -> dict[str, Any]:
    """Say how a variable is stored."""
    encoding: dict[str, Any] = {
        "tensor": tensor.name,
        "layout": tensor.layout,
        "source": source,
        "preferred_chunks": {d: c[0] or 1 for d, c in zip(dims, chunks, strict=True)},
    }
    readable = tensor.problem is None
    part = tensor.parts.get(role or "data") if tensor.layout == "dense" or role else None
    if part is not None and readable:
        encoding |= _part_encoding(part)
        if tensor.order != "C":
            encoding["order"] = tensor.order
    else:
        known = tensor.dtype in ELEMENT_TYPES
        encoding["dtype"] = stored_dtype(tensor.dtype) if known else tensor.dtype
        encoding["nbytes"] = tensor.nbytes
        if readable:
            encoding["parts"] = {r: _part_encoding(part) for r, part in tensor.parts.items()}
    if role is not None:
        encoding["part"] = role
    if tensor.path is not None:
        encoding["path"] = (*tensor.path[:-1], _leaf("", tensor, role))
    return encoding


def _part_encoding(part: Part) -> dict[str, Any]:
    encoding: dict[str, Any] = {
        "dtype": stored_dtype(part.dtype),
        "offset": part.offset,
        "nbytes": part.nbytes,
    }
    if part.encoding is not None:
        encoding["compression"] = part.encoding
    if part.digest is not None:
        encoding["digest"] = part.digest
    if part.byteorder != "little":
        encoding["byteorder"] = part.byteorder
    if part.shard is not None:
        encoding["shard"] = part.shard
    return encoding
