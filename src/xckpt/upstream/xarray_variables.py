"""Private parts of xarray: variables without their constructor, and data that are not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import xarray as xr
from xarray.core import indexing
from xarray.core.indexing import ExplicitlyIndexed

from xckpt.upstream import IS_PLAIN

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = [
    "IS_FAST",
    "ExplicitlyIndexed",
    "data_of",
    "indexing",
    "is_in_memory",
    "make_variable",
]

V = TypeVar("V", bound=xr.Variable)


def _is_known_xarray() -> bool:
    """Return whether a variable has only the attributes that `make_variable` sets."""
    slots = {slot for kind in xr.Variable.__mro__ for slot in getattr(kind, "__slots__", ())}
    return slots - {"__weakref__"} == {"_dims", "_data", "_attrs", "_encoding"}


# Nothing of xarray may be called yet: it remembers which kinds of arrays there are.
IS_FAST = not IS_PLAIN and _is_known_xarray()


def make_variable(
    cls: type[V],
    dims: tuple[Hashable, ...],
    data: Any,
    attrs: dict[Any, Any] | None,
    encoding: dict[Any, Any],
) -> V:
    """Return a variable of parts that fit together, which are not copied."""
    if IS_FAST:
        variable = object.__new__(cls)
        variable._dims = dims
        variable._data = data
        variable._attrs = attrs
        variable._encoding = encoding
        return variable
    return cls(dims, data, attrs, encoding, fastpath=True)


def data_of(variable: xr.Variable) -> Any:
    """Return the data of a variable as they are: nothing is read."""
    return variable._data if hasattr(variable, "_data") else variable.data  # noqa: SLF001


def is_in_memory(variable: xr.Variable) -> bool:
    """Return whether the data of a variable are in memory, also where another engine read them."""
    return bool(getattr(variable, "_in_memory", False))
