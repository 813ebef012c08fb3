"""A check that attributes are preserved or mentioned in a warning."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import xarray as xr

from xckpt.errors import CheckpointWarning
from xckpt.index import StoredList

if TYPE_CHECKING:
    from collections.abc import Collection

    from xckpt.index import Index

# Of a component of zTensor 1.2; in version 2 it is the type of the part itself.
MOVED = {"type"}


def missing(old: Index, new: Index, message: str, moved: Collection[str] = ()) -> list[str]:
    """Return the attributes that a conversion lost without a warning.

    Parameters
    ----------
    old, new : Index
        Indexes of the files.
    told : str
        What the warnings said.
    moved : collection of str
        Attributes that the old file stated of itself.
    """
    lost = [_of("the file", _attrs(old), _attrs(new), message, moved)]
    lost += [
        _of(repr(name), tensor.attrs, new.tensors[name].attrs, message, moved)
        for name, tensor in old.tensors.items()
        if name in new.tensors
    ]
    return [line for lines in lost for line in lines]


def _attrs(index: Index) -> Any:
    """Return attributes with what is left in the file."""
    if not any(isinstance(value, StoredList) for value in index.attrs.values()):
        return index.attrs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        attrs = xr.open_dataset(index.source, engine=index.format).attrs
    return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in attrs.items()}


def _of(owner: str, old: Any, new: Any, message: str, moved: Collection[str]) -> list[str]:
    return [
        f"{name!r} of {owner} was {value!r} and is {new.get(name)!r}"
        for name, value in old.items()
        if name not in moved and repr(name) not in message
        if name not in new or not _is_same(value, new[name])
    ]


def _is_same(old: Any, new: Any) -> bool:
    """Return whether a value is the same, its JSON text, or a mapping that includes it."""
    if isinstance(new, str) and not isinstance(old, str):
        new = json.loads(new)
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and _is_same(value, new[key]) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        if {*map(type, old)} == {int, float} and {*map(type, new)} == {float}:
            return old == new  # a list of GGUF has one type, which holds the same numbers
        return len(old) == len(new) and all(map(_is_same, old, new))
    return repr(old) == repr(new)  # of NaN too
