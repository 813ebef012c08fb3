"""Attributes of stacked tensors: what they share, and what differs along the stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["StackedAttrs", "stacked_attrs"]

_MISSING = object()
# Longer texts as a fixed-width array would take the longest one's memory for every tensor.
_LONGEST_TEXT = 64


class StackedAttrs(NamedTuple):
    """Attributes of the members of a stack.

    Parameters
    ----------
    shared : dict
        Those that all members have, with one value.
    along : dict of str to array
        Those that all members have, with different values that fit an array: one for each
        member, flat.
    dropped : list of str
        Names of the others.
    """

    shared: dict[str, Any]
    along: dict[str, np.ndarray[Any, Any]]
    dropped: list[str]


def stacked_attrs(members: Sequence[Mapping[str, Any]]) -> StackedAttrs:
    """Split the attributes of the members of a stack."""
    found = StackedAttrs({}, {}, [])
    if not any(members):
        return found
    names = dict.fromkeys(name for attrs in members for name in attrs)
    for name in names:
        values = [attrs.get(name, _MISSING) for attrs in members]
        if all(_equal(value, values[0]) for value in values[1:]):
            found.shared[name] = values[0]
            continue
        array = _as_array(values)
        if array is None:
            found.dropped.append(name)
        else:
            found.along[name] = array
    return found


def _equal(a: Any, b: Any) -> bool:
    # 1, 1.0 and True are equal, but not the same value in a file.
    if a is b:
        return True
    return type(a) is type(b) and not isinstance(a, np.ndarray) and bool(a == b)


def _as_array(values: list[Any]) -> np.ndarray[Any, Any] | None:
    """Make an array of scalars of one type; None if they are none."""
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {bool, int, float, str}:
        return None
    if kinds == {str}:
        return np.array(values, None if max(map(len, values)) <= _LONGEST_TEXT else object)
    array = np.array(values)
    return None if array.dtype == object else array
