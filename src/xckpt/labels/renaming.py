"""Edits of a copy: new names for tensors, and other attributes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from xckpt.errors import shown
from xckpt.index import StoredList
from xckpt.labels.filters import suggest_names

#: New names by old ones, a function of the old name, or a regular expression and its replacement.
Renaming = Mapping[str, str] | Callable[[str], str] | tuple[str | re.Pattern[str], str]


def new_names(
    names: Iterable[str], renaming: Renaming | None, *, unique: bool = False
) -> dict[str, str]:
    """Return the new name of each tensor by its old one; if `unique`, raise if two are the same."""
    names = list(names)
    rename = _function_of(renaming, names)
    new_by_old: dict[str, str] = {}
    old_by_new: dict[str, str] = {}
    for old in names:
        new: Any = rename(old)
        if not isinstance(new, str):
            raise TypeError(f"names maps {shown(old)} to {new!r}, which is not a string")
        if unique and old_by_new.setdefault(new, old) != old:
            raise ValueError(
                f"names maps both {shown(old_by_new[new])} and {shown(old)} to {shown(new)}; "
                "tensors in a file need different names"
            )
        new_by_old[old] = new
    return new_by_old


def _function_of(renaming: Any, names: list[str]) -> Callable[[str], Any]:
    """Return a function from old names to new ones."""
    if renaming is None:
        return lambda name: name
    if isinstance(renaming, Mapping):
        existing = set(names)
        missing = [name for name in renaming if name not in existing]
        if missing:
            first = missing[0]
            if not isinstance(first, str):
                raise TypeError(f"names maps old names to new ones, and {first!r} is not a string")
            more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            hint = suggest_names(names, first)
            raise ValueError(f"names has {shown(first)}{more}, but no tensor is called that{hint}")
        return lambda name: renaming.get(name, name)
    if callable(renaming):
        function: Callable[[str], Any] = renaming
        return function
    is_pair = isinstance(renaming, tuple | list) and len(renaming) == 2
    if is_pair and isinstance(renaming[0], str | re.Pattern) and isinstance(renaming[1], str):
        pattern, replacement = renaming
        try:
            compiled = re.compile(pattern)
            compiled.sub(replacement, "")
        except (re.error, IndexError) as error:
            raise ValueError(
                f"names={renaming!r} is not a regular expression and its replacement: {error}"
            ) from error
        return lambda name: compiled.sub(replacement, name)
    raise TypeError(
        "names takes a mapping, a function of a name, or a pair of a regular expression and its "
        f"replacement, not {renaming!r}; only xckpt.compare also takes 'auto'"
    )


def edited_attrs(
    attrs: Mapping[str, Any], changes: Mapping[str, Any] | None, unset: Iterable[str] | None
) -> dict[str, Any]:
    """Return attributes with some set and others removed; a number stays a number of its kind."""
    removed = [unset] if isinstance(unset, str) else list(unset or ())
    edited = dict(attrs)
    for key in removed:
        if key in (changes or ()):
            raise ValueError(f"the attribute {shown(key)} cannot be both set and unset")
        if edited.pop(key, removed) is removed:
            hint = suggest_names(map(str, attrs), key)
            raise ValueError(f"unset_attrs has {shown(key)}, but no attribute is called that{hint}")
    for key, value in (changes or {}).items():
        if not isinstance(key, str):
            raise TypeError(f"set_attrs maps names to values, and {key!r} is not a string")
        edited[key] = _of_same_kind(key, value, attrs.get(key))
    return edited


def _of_same_kind(key: str, value: Any, old: Any) -> Any:
    """Return a value for an attribute; raise if the old value is of another kind of numbers."""
    if type(old) is float and type(value) is int:
        return float(value)
    kinds = {bool: "true or false", int: "a whole number", float: "a number"}
    is_list = isinstance(old, list | StoredList)
    if (type(old) in kinds and type(value) is not type(old)) or is_list > isinstance(value, list):
        expected = "a list" if is_list else kinds[type(old)]
        raise ValueError(f"the attribute {shown(key)} is {expected}, and {value!r} is not")
    return value


def attr_of_text(key: str, text: str, old: Any) -> Any:
    """Parse the new value of an attribute: text if it has been text, otherwise JSON or text."""
    if isinstance(old, str):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return _of_same_kind(key, value, old)
