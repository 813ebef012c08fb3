"""Attributes of a stack, combined from the attributes of its members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.typing import Array

_MISSING = object()
# Longer texts stay objects: a fixed-width array takes the memory of the longest for each member.
_MAX_TEXT = 64


class StackedAttrs(NamedTuple):
    """Attributes of the members of a stack."""

    #: Attributes that all members have with the same value.
    shared: dict[str, Any]
    #: Attributes that all members have with different values: one value per position, flat; NaN or
    #: an empty text at positions without a member.
    varying: dict[str, Array]
    #: Names of all other attributes.
    dropped: list[str]


def stack_attrs(positions: Sequence[Mapping[str, Any] | None]) -> StackedAttrs:
    """Combine the attributes of the members of a stack; None is a position without a member."""
    stacked = StackedAttrs({}, {}, [])
    if not any(positions):
        return stacked
    members = [attrs for attrs in positions if attrs is not None]
    for name in dict.fromkeys(name for attrs in members for name in attrs):
        values = [attrs.get(name, _MISSING) for attrs in members]
        if all(_is_same(value, values[0]) for value in values[1:]):
            stacked.shared[name] = values[0]
            continue
        if len(members) < len(positions):
            # Whole numbers and booleans have no value for "missing", and are dropped.
            fill = {str: "", float: np.nan}.get(type(values[0]), _MISSING)
            values = [fill if attrs is None else attrs.get(name, _MISSING) for attrs in positions]
        array = _as_array(values)
        if array is None:
            stacked.dropped.append(name)
        else:
            stacked.varying[name] = array
    return stacked


def _is_same(a: Any, b: Any) -> bool:
    # 1, 1.0 and True are equal, but not the same value in a file.
    if a is b:
        return True
    return type(a) is type(b) and not isinstance(a, np.ndarray) and bool(a == b)


def _as_array(values: list[Any]) -> Array | None:
    """Return scalars of one type as an array, or None if they are anything else."""
    types = {type(value) for value in values}
    if len(types) != 1 or not types <= {bool, int, float, str}:
        return None
    if types == {str}:
        return np.array(values, None if max(map(len, values)) <= _MAX_TEXT else object)
    array = np.array(values)
    return None if array.dtype == object else array
