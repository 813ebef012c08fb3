"""New names for tensors, from the keyword ``names=``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from xckpt.errors import shown
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
