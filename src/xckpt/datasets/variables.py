"""xarray variables of tensors: dask-backed, with attributes and encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import dask.array as da
import numpy as np
import xarray as xr
from xarray.core.indexing import ExplicitlyIndexed

from xckpt.arrays.graph import is_stored, read_small, slice_stored
from xckpt.arrays.keys import normalize
from xckpt.labels.grids import member_names

if TYPE_CHECKING:
    from xckpt.arrays.keys import Chunks

__all__ = ["LazyVariable", "StackMember", "StackRecord", "preferred_chunks"]


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

    # xarray copies each variable of a checkpoint, or of results, twice on the way to the user.
    # Should it stop calling this method, nothing breaks: it takes longer.
    def _copy(self, deep: bool = True, data: Any = None, memo: Any = None) -> Self:  # noqa: FBT001, FBT002
        if deep or data is not None or not isinstance(self._data, da.Array | np.ndarray):
            return super()._copy(deep=deep, data=data, memo=memo)
        attrs = None if self._attrs is None else dict(self._attrs)
        return self.of(self._dims, self._data, attrs, dict(self._encoding or {}))

    @property
    def values(self) -> Any:
        """The elements as a numpy array."""
        array: Any = self._data
        small = read_small(array) if is_stored(array) else None
        return super().values if small is None else small

    @values.setter
    def values(self, values: Any) -> None:
        self.data = values

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


class StackMember(NamedTuple):
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
        The names of the members; see `xckpt.labels.grids.Stack`.
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
    members : sequence of StackMember
        What each was, the last dimension fastest; none of something computed.
    present : frozenset of tuple of int, optional
        The indices of the members, where there are places without one; see
        `xckpt.labels.grids.Stack`.
    """

    template: tuple[str | int | None, ...]
    dims: tuple[str, ...]
    suffix: str = ""
    indices: tuple[tuple[int, ...], ...] = ()
    shared_attrs: tuple[str, ...] = ()
    array: str | None = None
    members: Sequence[StackMember | None] = ()
    present: frozenset[tuple[int, ...]] | None = None

    def names(self, indices: tuple[tuple[int, ...], ...]) -> list[str | None]:
        """Return the names of the members with some indices, and None for places without one."""
        names: list[str | None] = [n + self.suffix for n in member_names(self.template, indices)]
        if self.present is None:
            return names
        if any(map(set.difference, map(set, indices), map(set, self.indices))):
            raise ValueError(
                f"along {', '.join(self.dims)} there are other numbers than when it was stacked, "
                "and some tensors were absent: unstack before the coordinates are changed"
            )
        places = product(*indices)
        return [n if at in self.present else None for n, at in zip(names, places, strict=True)]

    # xarray copies encodings deeply with their Dataset; this never changes.
    def __deepcopy__(self, memo: Any) -> Self:
        return self


def preferred_chunks(dims: tuple[Any, ...], chunks: Chunks) -> dict[Any, int]:
    """Return the encoding of the same name: the size of a chunk along each dimension."""
    return {dim: sizes[0] or 1 for dim, sizes in zip(dims, chunks, strict=True)}
