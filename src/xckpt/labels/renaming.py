"""Edits of a copy: new names for tensors, and other attributes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xckpt.errors import shown, warn
from xckpt.index import StoredList
from xckpt.labels.filters import suggest_names

_Pair = tuple[str | re.Pattern[str], str]
#: New names by old ones, a function of the old name, or a regular expression and its replacement;
#: several such pairs apply in order.
Renaming = Mapping[str, str] | Callable[[str], str] | _Pair | Sequence[_Pair]


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
    if isinstance(renaming, tuple | list):
        pairs = [renaming] if _is_pair(renaming) else renaming
        if pairs and all(map(_is_pair, pairs)):
            renamed = names
            for pair in pairs:
                renamed = _replaced(renamed, *pair)
            return dict(zip(names, renamed, strict=True)).__getitem__
    raise TypeError(
        "names takes a mapping, a function of a name, or a pair of a regular expression and its "
        f"replacement, or several pairs, not {renaming!r}; only xckpt.compare also takes 'auto'"
    )


def _is_pair(value: Any) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return isinstance(value[0], str | re.Pattern) and isinstance(value[1], str)


def _replaced(names: list[str], pattern: str | re.Pattern[str], replacement: str) -> list[str]:
    """Replace what a regular expression matches; warn if it matches nothing, usually a typo."""
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, IndexError) as error:
        pair = (pattern, replacement)
        raise ValueError(
            f"names={pair!r} is not a regular expression and its replacement: {error}"
        ) from error
    if names and not any(map(compiled.search, names)):
        text = f"the regular expression {shown(compiled.pattern)} matches none of the names of the "
        warn(f"{text}{len(names):,} tensors: it renames nothing")
    return [compiled.sub(replacement, name) for name in names]


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
