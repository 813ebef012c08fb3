"""xarray variables of tensors: dask-backed, with attributes and encoding."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import ml_dtypes  # noqa: F401  so that numpy knows "bfloat16": ds.astype("bfloat16")
import numpy as np
import xarray as xr

from xckpt.arrays.derived import Selection, lazies_in, noting, with_sources
from xckpt.arrays.graph import is_stored, read_small, slice_stored
from xckpt.arrays.keys import Chunks, normalize
from xckpt.errors import shown
from xckpt.formatting import base_name
from xckpt.labels import explicit_name
from xckpt.structure import Described, Structure
from xckpt.upstream.dask_arrays import is_dask_array
from xckpt.upstream.xarray_variables import (
    IS_FAST,
    ExplicitlyIndexed,
    data_of,
    indexing,
    make_variable,
)

if TYPE_CHECKING:
    from xckpt.arrays import LazyArray
    from xckpt.arrays.lazy import Opened
    from xckpt.typing import Array


#: Beginning of the names of layers of integers that are widened for arithmetic.
WIDENED = "xckpt-widened-"
_DATA: Any = xr.Variable.data  # the property


#: Key of the encoding of arrays of a mapping, and of results that are computed from them.
_MAPPED = "mapped"


class Mapped(NamedTuple):
    """An array of a mapping."""

    opened: Opened
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    #: Whether an operation gave axes to what was computed from it.
    is_broadcast: bool = False


def mapped_arrays(variable: Any) -> tuple[Mapped, ...]:
    """Return the arrays of mappings that a variable is or is computed from."""
    encoding = variable.encoding if isinstance(variable, xr.Variable) else {}
    mapped = encoding.get(_MAPPED, ())
    return tuple([entry for entry in mapped if isinstance(entry, Mapped)])


class LazyVariable(xr.Variable):
    """A variable that stays dask-backed when `xarray.open_dataset` returns it."""

    __slots__ = ()

    @classmethod
    def of(
        cls,
        dims: tuple[Any, ...],
        data: Any,
        attrs: dict[Any, Any] | None,
        encoding: dict[Any, Any],
    ) -> Self:
        """Return a variable without the checks of the constructor."""
        return make_variable(cls, dims, data, attrs, encoding)

    def __getitem__(self, key: Any) -> Self:
        """Index as xarray does, but slice stored arrays lazily instead of adding dask tasks."""
        # Selections call `isel`, and alignment calls this method with arrays of positions.
        return self._select(key, is_aligned=True)

    def isel(
        self, indexers: Any = None, missing_dims: Any = "raise", **indexers_kwargs: Any
    ) -> Self:
        """Select as xarray does; positions that are not selected are no loss."""
        chosen: Mapping[Any, Any] = {**(indexers or {}), **indexers_kwargs}
        if not chosen.keys() <= set(self.dims):
            return super().isel(chosen, missing_dims)
        return self._select(tuple([chosen.get(dim, slice(None)) for dim in self.dims]))

    def _select(self, key: Any, *, is_aligned: bool = False) -> Self:
        array: Any = data_of(self)
        basic = _basic_key(key, self.dims) if is_stored(array) else None
        if basic is None:
            entries = key if isinstance(key, tuple) and is_dask_array(array) else ()
            selections = [
                Selection(str(dim), size, positions, is_aligned=is_aligned)
                for dim, size, entry in zip(self.dims, self.shape, entries, strict=False)
                if (positions := _positions(entry, size)) is not None
            ]
            with noting(selections):
                return super().__getitem__(key)
        entries = normalize(basic, array.shape)
        pairs = zip(self.dims, entries, strict=True)
        dims = tuple([dim for dim, entry in pairs if isinstance(entry, slice)])
        return self.of(dims, slice_stored(array, entries), dict(self.attrs), dict(self.encoding))

    # xarray converts the result of an index with numpy integers to a base variable, whose
    # selections would be dask tasks.
    def to_base_variable(self) -> xr.Variable:
        """Return the variable as a data variable, keeping its class if it is stored."""
        return self.copy(deep=False) if is_stored(data_of(self)) else super().to_base_variable()

    to_variable = to_base_variable

    # A fast path, because xarray copies each variable twice before the user gets it. If xarray
    # stops calling this method, copying takes longer.
    def _copy(self, deep: bool = True, data: Any = None, memo: Any = None) -> Self:  # noqa: FBT001, FBT002
        stored = self._data
        is_array = IS_FAST and (isinstance(stored, np.ndarray) or is_dask_array(stored))
        if not is_array or deep or data is not None:
            return super()._copy(deep=deep, data=data, memo=memo)
        attrs = None if self._attrs is None else dict(self._attrs)
        encoding = dict(self._encoding or {})
        return make_variable(type(self), self._dims, stored, attrs, encoding)

    # xarray makes an outer product of a tensor with named axes and its copy without. Results stay
    # in this class, so that this holds for them, too.
    def _binary_op(self, other: Any, f: Any, reflexive: bool = False) -> Any:  # noqa: FBT001, FBT002
        first: xr.Variable = self
        is_torch = type(other).__module__.partition(".")[0] == "torch"
        if is_torch and is_dask_array(data_of(self)):
            raise TypeError(
                "tensors of torch are opened before they are combined with those of a file, "
                "a + xckpt.open(state_dict), and a factor is float(tensor)"
            )
        if isinstance(other, xr.Variable):
            first, other = _matched(self, other)
        operands = (first, other)
        first, other = _single(first), _single(other)
        if f in _OVERFLOWING and not _is_float(first) and not _is_float(other):
            first, other = _widened(first), _widened(other)
        result = xr.Variable._binary_op(first, other, f, reflexive)  # noqa: SLF001
        result = _lazy(result) if type(result) is xr.Variable else result
        if is_dask_array(data_of(result)):
            arrays = [data_of(v) for v in (first, other) if isinstance(v, xr.Variable)]
            result.data = with_sources(data_of(result), arrays)
        mapped = {
            entry._replace(is_broadcast=entry.is_broadcast or operand.ndim < result.ndim): None
            for operand in operands
            for entry in mapped_arrays(operand)
        }
        if mapped:
            result.encoding = {_MAPPED: tuple(mapped)}
        return result

    def _inplace_binary_op(self, other: Any, f: Any) -> Any:
        if isinstance(other, xr.Dataset):
            raise TypeError("cannot add a Dataset to a Variable in-place")
        result = self._binary_op(other, f)
        if result.dims != self.dims:
            raise ValueError("dimensions cannot change for in-place operations")
        self.data, self.encoding = data_of(result), result.encoding
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Assign as xarray does, but keep integers that the type cannot hold for an error."""
        if not _fits(value, self.dtype):
            self.data = data_of(_widened(self))
        super().__setitem__(key, value)  # type: ignore[no-untyped-call]

    def _unary_op(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        variable = _widened(self) if f is operator.neg else self
        return xr.Variable._unary_op(variable, f, *args, **kwargs)  # noqa: SLF001

    @property
    def values(self) -> Any:
        """The elements as a numpy array."""
        small = read_small(data_of(self))
        return super().values if small is None else small

    @values.setter
    def values(self, values: Any) -> None:
        self.data = values

    @property
    def data(self) -> Any:
        """The array: a dask array until it is loaded."""
        return super().data

    # xarray wraps the variables of an engine in copy-on-write and caching adapters
    # (``xarray.backends.api._protect_dataset_variables_inplace``). Around a dask array, these
    # protect nothing and hide the array: ``ds.chunks`` is empty, and ``ds.compute()`` leaves dask
    # arrays behind.
    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, ExplicitlyIndexed):
            _DATA.fset(self, value)


def _reflected(name: str, operation: Any) -> Any:
    # Python asks the right operand first if its class overrides the method of the left one's.
    def method(self: LazyVariable, other: Any) -> Any:
        if isinstance(other, xr.Variable):
            return operation(_lazy(other), self)
        return getattr(xr.Variable, name)(self, other)

    return method


for _name, _operation in {
    "__radd__": operator.add,
    "__rsub__": operator.sub,
    "__rmul__": operator.mul,
    "__rtruediv__": operator.truediv,
    "__rfloordiv__": operator.floordiv,
    "__rmod__": operator.mod,
    "__rpow__": operator.pow,
    "__rand__": operator.and_,
    "__ror__": operator.or_,
    "__rxor__": operator.xor,
}.items():
    setattr(LazyVariable, _name, _reflected(_name, _operation))


# numpy computes these in the type of integers, where they wrap around, and has no differences of
# truth values.
_OVERFLOWING = [operator.add, operator.sub, operator.mul, operator.pow]
_OVERFLOWING += [operator.iadd, operator.isub, operator.imul, operator.ipow]


def _widened(variable: Any) -> Any:
    """Return integers of up to 32 bits and truth values as int64; other operands unchanged."""
    array: Any = data_of(variable) if isinstance(variable, xr.Variable) else None
    is_mapped = isinstance(array, np.ndarray) and bool(mapped_arrays(variable))
    if (
        not (is_mapped or is_dask_array(array))
        or array.dtype.kind not in "biu"
        or array.dtype.itemsize > 4
    ):
        return variable
    if is_mapped:
        return variable._replace(data=_as_wide(array))
    name = f"{WIDENED}{array.name}"
    wide = array.map_blocks(_as_wide, dtype=np.int64, name=name)
    return variable._replace(data=wide)


def _is_float(operand: Any) -> bool:
    """Return whether an operand is an array of floats, which do not wrap around."""
    return isinstance(operand, xr.Variable) and operand.dtype.kind == "f"


def _fits(value: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether a type is known to hold all integers of a value; True for other values."""
    array: Any = data_of(value) if isinstance(value, xr.Variable) else value
    if not is_dask_array(array):
        array = np.asarray(array)
    if array.dtype.kind not in "iu" or np.can_cast(array.dtype, dtype):
        return True
    return isinstance(array, np.ndarray) and bool((array.astype(dtype) == array).all())


def _single(variable: Any) -> Any:
    """Return small floats of a mapping as float32, as files show theirs; others unchanged."""
    array: Any = data_of(variable) if mapped_arrays(variable) else None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fV" or array.itemsize > 2:
        return variable
    return variable._replace(data=array.astype(np.float32))


def _as_wide(block: Any) -> Any:
    return block.astype(np.int64)


def _lazy(variable: xr.Variable) -> LazyVariable:
    """Return a variable as a `LazyVariable` that shares its data."""
    if isinstance(variable, LazyVariable):
        return variable
    return LazyVariable.of(
        variable.dims, data_of(variable), dict(variable.attrs), dict(variable.encoding)
    )


def _matched(first: xr.Variable, second: xr.Variable) -> tuple[xr.Variable, xr.Variable]:
    """Give an axis without a name the one in the other array of this shape, by position."""
    if first.shape != second.shape:
        require_positions(first, second)
        return first, second
    if set(first.dims) == set(second.dims):
        return first, second
    names = []
    for a, b in zip(first.dims, second.dims, strict=True):
        if a != b and explicit_name(a) is not None and explicit_name(b) is not None:
            return first, second
        names.append(a if explicit_name(a) is not None else explicit_name(b) or a)
    if len(set(names)) < len(names):
        return first, second
    return first._replace(dims=names), second._replace(dims=names)


def require_positions(first: xr.Variable, second: xr.Variable) -> None:
    """Raise if two files have the same axes in another order, and no names but their sizes.

    xarray would match an axis of each size with that of the same size elsewhere.
    """
    is_turned = first.shape != second.shape and set(first.dims) == set(second.dims)
    if not is_turned or any(map(explicit_name, first.dims)):
        return
    operands = []
    for variable in (first, second):
        # Axes that the user turned, or named, are in no file.
        sources: list[tuple[LazyArray | Mapped, str]] = [
            *[(lazy, lazy.source.name) for lazy in lazies_in(data_of(variable)).values()],
            *[(array, array.opened.source) for array in mapped_arrays(variable)],
        ]
        stored = [source for source in sources if source[0].shape == variable.shape]
        if not stored:
            return
        array, path = stored[0]
        name = f"{shown(array.name)} of {base_name(path)}"
        operands.append(f"{name} has the shape {list(variable.shape)}")
    raise ValueError(
        f"{' and '.join(operands)}: axes that are named by their size are matched by position; "
        "transpose one of them (.T), or name the axes (open(..., dims=...), .rename)"
    )


def _basic_key(key: Any, dims: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return an index as a tuple; None if it has anything but integers and forward slices."""
    if isinstance(key, Mapping):
        if not key.keys() <= set(dims):
            return None
        entries = tuple([key.get(dim, slice(None)) for dim in dims])
    else:
        entries = key if isinstance(key, tuple) else (key,)
    # Before 2025.10, xarray turns numpy integers into arrays without dimensions.
    entries = tuple([e[()] if isinstance(e, np.ndarray) and not e.ndim else e for e in entries])
    return entries if all(map(_is_basic, entries)) else None


def _is_basic(entry: Any) -> bool:
    if isinstance(entry, slice):
        return entry.step is None or entry.step > 0
    if entry is Ellipsis:
        return True
    return isinstance(entry, int | np.integer) and not isinstance(entry, bool)


def _positions(entry: Any, size: int) -> Any:
    """Return the positions of an array, or of a slice backwards; None for other keys."""
    if isinstance(entry, slice):
        return np.arange(size)[entry] if (entry.step or 1) < 0 else None
    array = entry.values if isinstance(entry, xr.Variable) else entry
    if not isinstance(array, np.ndarray | list):
        return None
    array = np.asarray(array)
    return np.arange(size)[array] if array.ndim == 1 and array.dtype.kind in "bi" else None


class TensorArray(xr.backends.BackendArray):
    """A tensor of a file as a lazy array of xarray."""

    __slots__ = ("dtype", "lazy", "shape")

    def __init__(self, lazy: LazyArray) -> None:
        self.lazy, self.shape, self.dtype = lazy, lazy.shape, lazy.dtype

    def __getitem__(self, key: Any) -> Any:
        outer = indexing.IndexingSupport.OUTER
        return indexing.explicit_indexing_adapter(key, self.shape, outer, self.lazy.__getitem__)

    async def async_getitem(self, key: Any) -> Any:
        """Read a selection in a thread, while others are read."""
        return await asyncio.to_thread(self.__getitem__, key)


def mapped_variable(dims: tuple[Any, ...], array: Array, opened: Opened, name: str) -> LazyVariable:
    """Return a variable over an array of a mapping."""
    mapped = Mapped(opened, name, array.dtype, array.shape)
    return LazyVariable(dims, array, encoding={_MAPPED: (mapped,)})


def xarray_variable(
    dims: tuple[Any, ...], lazy: LazyArray, attrs: dict[Any, Any] | None, encoding: dict[Any, Any]
) -> xr.Variable:
    """Return a variable over a lazy array of xarray."""
    data = indexing.LazilyIndexedArray(TensorArray(lazy))
    return make_variable(xr.Variable, dims, data, attrs, encoding)


def structure_of_variables(variables: Mapping[Any, xr.Variable]) -> Structure:
    """Return the structure of unstacked variables, by name."""
    return Structure(
        [
            Described(
                str(name),
                str(variable.encoding.get("stored_dtype", variable.dtype)),
                variable.shape,
                variable.encoding.get("declared"),
            )
            for name, variable in variables.items()
        ]
    )


def preferred_chunks(dims: tuple[Any, ...], chunks: Chunks) -> dict[Any, int]:
    """Return ``encoding["preferred_chunks"]``: the size of a chunk along each dimension."""
    return {dim: sizes[0] or 1 for dim, sizes in zip(dims, chunks, strict=True)}
