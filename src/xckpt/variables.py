"""xarray variables of tensors: dask-backed, with attributes and encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import dask.array as da
import numpy as np
import xarray as xr
from xarray.core.indexing import ExplicitlyIndexed

from xckpt.arrays.chunks import Chunks, target_nbytes
from xckpt.arrays.graph import is_stored, slice_stored, tensor_array
from xckpt.arrays.selection import normalize
from xckpt.dtypes import ELEMENT_TYPES, stored_dtype
from xckpt.labels.stacking import flat_names

if TYPE_CHECKING:
    from xckpt.arrays import LazyArray
    from xckpt.arrays.stacked import TensorArrays
    from xckpt.dataset import Listed
    from xckpt.index import Part, Tensor
    from xckpt.options import OpenOptions
    from xckpt.storage import Source

__all__ = ["LazyVariable", "Member", "StackRecord", "VariableMaker", "preferred_chunks"]


# What all members of a stack have in common.
_COMMON = ("layout", "source", "stored_dtype", "stored_order", "part")
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
        """Make a variable of what is known to fit together."""
        variable = object.__new__(cls)
        variable._dims = dims
        variable._data = data
        variable._attrs = attrs
        variable._encoding = encoding
        return variable

    def __getitem__(self, key: Any) -> Self:
        """Index as xarray does; integers and slices of what is stored are no tasks of their own."""
        array: Any = self._data
        basic = _basic_key(key, self.dims) if is_stored(array) else None
        if basic is None:
            return super().__getitem__(key)
        entries = normalize(basic, array.shape)
        kept = zip(self.dims, entries, strict=True)
        dims = tuple([dim for dim, entry in kept if isinstance(entry, slice)])
        return self._finalize_indexing_result(dims, slice_stored(array, entries))

    # Where an index is a numpy integer, xarray makes a base variable of the result, and whatever
    # is selected of that would be dask's.
    def to_base_variable(self) -> xr.Variable:
        """Return a variable that is no coordinate: this one."""
        return self._copy(deep=False) if is_stored(self._data) else super().to_base_variable()

    to_variable = to_base_variable

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


def _basic_key(key: Any, dims: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return an index as a tuple, None if it has more than integers and forward slices."""
    if isinstance(key, Mapping):
        if not key.keys() <= set(dims):
            return None
        entries = tuple([key.get(dim, slice(None)) for dim in dims])
    else:
        entries = key if isinstance(key, tuple) else (key,)
    return entries if all(map(_is_basic, entries)) else None


def _is_basic(entry: Any) -> bool:
    if isinstance(entry, slice):
        return entry.step is None or entry.step > 0
    if entry is Ellipsis:
        return True
    return isinstance(entry, int | np.integer) and not isinstance(entry, bool)


class Member(NamedTuple):
    """What a stacked tensor was, or would be, as a variable of its own.

    Parameters
    ----------
    attrs : dict
        What the file says of it.
    encoding : dict
        How it is stored.
    data : dask.array.Array or None
        Its lazy array, None where there is none besides the stack.
    """

    attrs: dict[Any, Any]
    encoding: dict[Any, Any]
    data: da.Array | None


@dataclass(frozen=True, slots=True)
class StackRecord:
    """How a variable was stacked, and what its members were: ``encoding["stack"]``.

    Parameters
    ----------
    template : tuple of (str, int or None)
        The names of the members; see `xckpt.labels.stacking.Stack`.
    dims : tuple of str
        The dimensions that stacking made.
    suffix : str
        What names of members have after the template: the part that is shown.
    indices : tuple of tuple of int
        The indices along each dimension when it was stacked.
    shared_attrs : tuple of str
        Names of the attributes that all members had in common.
    array : str or None
        Name of the dask array that was made; another array is a selection or a result.
    members : sequence of Member
        What each was, the last dimension fastest; none of something computed.
    """

    template: tuple[str | int | None, ...]
    dims: tuple[str, ...]
    suffix: str = ""
    indices: tuple[tuple[int, ...], ...] = ()
    shared_attrs: tuple[str, ...] = ()
    array: str | None = None
    members: Sequence[Member] = ()

    def names(self, indices: tuple[tuple[int, ...], ...]) -> list[str]:
        """Return the names of the members with some indices."""
        return [name + self.suffix for name in flat_names(self.template, indices)]

    # xarray copies encodings deeply with their Dataset; this never changes.
    def __deepcopy__(self, memo: Any) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class VariableMaker:
    """Makes the variables of one opened file.

    Parameters
    ----------
    source : str
        Name of the file.
    token : str
        Differs wherever the values or chunks of equally named tensors may.
    target : int
        Wanted size of a chunk, in bytes.
    """

    source: str
    token: str
    target: int

    @classmethod
    def of(cls, source: Source, sources: Mapping[str | None, Source], options: OpenOptions) -> Self:
        """Make one for a file, and all that have parts of it, read with some options."""
        target = target_nbytes()
        own = sorted(options.format_options.items())
        files = [(file.name, file.identity) for file in sources.values()]
        told = (files, options.reading, own, target)
        return cls(source.name, _digest(told), target)

    def variable(
        self, listed: Listed, dims: tuple[str, ...], axes: dict[str, str | None]
    ) -> LazyVariable:
        """Make the variable of a listed array that is not stacked."""
        array = self.array(listed.name, listed.lazy)
        encoding = _encoding(listed.tensor, listed.role, self.source, listed.suffix)
        if axes:
            encoding["axes"] = axes
        encoding["preferred_chunks"] = preferred_chunks(dims, array.chunks)
        attrs = dict(listed.tensor.attrs) if listed.tensor.attrs else None
        return LazyVariable.of(dims, array, attrs, encoding)

    def stack(
        self,
        listed: Listed,
        dims: tuple[str, ...],
        attrs: dict[str, Any],
        axes: dict[str, str | None],
    ) -> LazyVariable:
        """Make the variable of a stack; `attrs` are what its members have in common."""
        if listed.stacked is None:
            raise ValueError(f"{listed.name} is not stacked")
        stack, members = listed.stacked
        # Other tensors of the same file may be stacked under the same name.
        array = self.array(listed.name, listed.lazy, _digest((stack.template, stack.indices)))
        encoding = _stacked_encoding(members.tensors, listed.role, self.source)
        encoding["preferred_chunks"] = preferred_chunks(dims, array.chunks)
        encoding["stack"] = StackRecord(
            stack.template,
            stack.dims,
            listed.suffix,
            stack.indices,
            tuple(attrs),
            array.name,
            OpenedMembers(self, members, listed.suffix, axes),
        )
        return LazyVariable.of(dims, array, attrs or None, encoding)

    def array(self, name: str, lazy: LazyArray, more: str = "") -> da.Array:
        """Make a dask array over a lazy array."""
        meta = lazy.empty((0,) * lazy.ndim)
        return tensor_array(lazy, f"{name}-{self.token}{more}", lazy.chunks(self.target), meta)


class OpenedMembers(Sequence[Member]):
    """The members of a stack of an opened file, each made when it is asked for.

    Parameters
    ----------
    maker : VariableMaker
        Of the file.
    arrays : TensorArrays
        The tensors.
    suffix : str
        What names of variables have behind those of the tensors.
    axes : dict of str to (str or None)
        What the file calls dimensions that have another name in the stack.
    """

    __slots__ = ("arrays", "axes", "maker", "suffix")

    def __init__(
        self,
        maker: VariableMaker,
        arrays: TensorArrays,
        suffix: str,
        axes: dict[str, str | None],
    ) -> None:
        self.maker = maker
        self.arrays = arrays
        self.suffix = suffix
        self.axes = axes

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return tuple([self[at] for at in range(len(self))[position]])
        tensor, role = self.arrays.tensors[position], self.arrays.role
        array = self.maker.array(f"{tensor.name}{self.suffix}", self.arrays[position])
        encoding = _encoding(tensor, role, self.maker.source, self.suffix)
        if self.axes:
            encoding["axes"] = self.axes
        return Member(dict(tensor.attrs), encoding, array)


def _digest(told: Any) -> str:
    return blake2b(repr(told).encode(), digest_size=8).hexdigest()


def preferred_chunks(dims: tuple[Any, ...], chunks: Chunks) -> dict[Any, int]:
    """Return the encoding of the same name: the size of a chunk along each dimension."""
    return {dim: sizes[0] or 1 for dim, sizes in zip(dims, chunks, strict=True)}


def _stacked_encoding(tensors: Sequence[Tensor], role: str | None, source: str) -> dict[str, Any]:
    """Say how a stack is stored: what all its members have in common, and their size in sum."""
    first = _encoding(tensors[0], role, source)
    encoding = {key: first[key] for key in _COMMON if key in first}
    roles = [role] if role is not None else list(tensors[0].parts)
    parts = [tensor.parts[each] for tensor in tensors for each in roles if each in tensor.parts]
    encoding["nbytes"] = sum([part.nbytes for part in parts])
    compressions = {part.encoding for part in parts}
    if len(compressions) == 1:
        (compression,) = compressions
        if compression is not None:
            encoding["stored_compression"] = compression
    return encoding


def _encoding(tensor: Tensor, role: str | None, source: str, suffix: str = "") -> dict[str, Any]:
    """Say how a variable is stored."""
    encoding: dict[str, Any] = {
        "tensor": tensor.name,
        "layout": tensor.layout,
        "source": source,
    }
    readable = tensor.problem is None
    part = tensor.parts.get(role or "data") if tensor.layout == "dense" or role else None
    if part is not None and readable:
        encoding |= _part_encoding(part)
        if tensor.order != "C":
            encoding["stored_order"] = tensor.order
    else:
        known = tensor.dtype in ELEMENT_TYPES
        encoding["stored_dtype"] = stored_dtype(tensor.dtype) if known else tensor.dtype
        encoding["nbytes"] = tensor.nbytes
        if readable:
            encoding["parts"] = {r: _part_encoding(part) for r, part in tensor.parts.items()}
    if role is not None:
        encoding["part"] = role
    if tensor.path is not None:
        encoding["path"] = (*tensor.path[:-1], f"{tensor.path[-1]}{suffix}")
    return encoding


def _part_encoding(part: Part) -> dict[str, Any]:
    encoding: dict[str, Any] = {
        "stored_dtype": stored_dtype(part.dtype),
        "offset": part.offset,
        "nbytes": part.nbytes,
    }
    if part.encoding is not None:
        encoding["stored_compression"] = part.encoding
    if part.digest is not None:
        encoding["digest"] = part.digest
    if part.byteorder != "little":
        encoding["stored_byteorder"] = part.byteorder
    if part.shard is not None:
        encoding["shard"] = part.shard
    return encoding
