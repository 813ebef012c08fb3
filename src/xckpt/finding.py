"""Choosing variables of an open Dataset or tree: ``ds.ckpt.find()``."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import parse_bytes

from xckpt.dtypes import ELEMENT_TYPES, stored_dtype
from xckpt.errors import CheckpointWarning, shown
from xckpt.flat import Flat, flatten, rebuild
from xckpt.labels import TensorFilter, select
from xckpt.labels.selection import closest

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["find"]


def find(
    obj: xr.Dataset | xr.DataTree,
    names: TensorFilter | None = None,
    *,
    dtype: Any = None,
    min_bytes: int | str = 0,
) -> Any:
    """Choose variables by name, element type and size, in time proportional to their number."""
    flat = flatten(obj)
    dtypes = None if dtype is None else _dtypes(dtype)
    least = parse_bytes(min_bytes)
    known = {str(name): name for name in flat.variables}
    matching = select(known, names)
    if not matching and known and names is not None:
        _warn(known, names)
    chosen = {}
    for text in matching:
        variable = flat.variables[known[text]]
        if _stored_nbytes(variable) >= least and (dtypes is None or _stored(variable) in dtypes):
            chosen[known[text]] = variable
    return rebuild(obj, Flat(chosen, {}, flat.coords))


def _dtypes(wanted: Any) -> set[np.dtype[Any]]:
    return {
        stored_dtype(each) if each in ELEMENT_TYPES else np.dtype(each)
        for each in (wanted if isinstance(wanted, list | tuple | set) else [wanted])
    }


def _stored(variable: xr.Variable) -> Any:
    return variable.encoding.get("stored_dtype", variable.dtype)


def _stored_nbytes(variable: xr.Variable) -> int:
    nbytes: int = variable.encoding.get("nbytes", variable.nbytes)
    return nbytes


def _warn(known: dict[str, Any], names: TensorFilter) -> None:
    alike = ", ".join(shown(name) for name in closest(known, names))
    hint = f"; similar names: {alike}" if alike else ""
    text = f"{names!r} matches none of the {len(known)} variables{hint}"
    warnings.warn(text, CheckpointWarning, stacklevel=4)
