"""New names of tensors: ``names=`` as a mapping, a function, or as `re.sub` replaces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from xckpt.errors import shown
from xckpt.labels.selection import similar

__all__ = ["Renaming", "renamed"]

#: How old names become new ones.
Renaming = Mapping[str, str] | Callable[[str], str] | tuple[str | re.Pattern[str], str]


def renamed(names: Iterable[str], how: Renaming | None, *, unique: bool = False) -> dict[str, str]:
    """Return the new name of each tensor; if `unique`, two that become one are a ValueError."""
    names = list(names)
    rename = _function(how, names)
    new: dict[str, str] = {}
    old: dict[str, str] = {}
    for name in names:
        found: Any = rename(name)
        if not isinstance(found, str):
            raise TypeError(f"names gives {shown(name)} the name {found!r}, which is not a text")
        if unique and old.setdefault(found, name) != name:
            raise ValueError(
                f"names makes {shown(found)} of both {shown(old[found])} and {shown(name)}: "
                "tensors of one file need names of their own"
            )
        new[name] = found
    return new


def _function(how: Any, names: list[str]) -> Callable[[str], Any]:
    if how is None:
        return lambda name: name
    if isinstance(how, Mapping):
        _require_known(how, names)
        return lambda name: how.get(name, name)
    if callable(how):
        function: Callable[[str], Any] = how
        return function
    is_pair = isinstance(how, tuple | list) and len(how) == 2
    if is_pair and isinstance(how[0], str | re.Pattern) and isinstance(how[1], str):
        pattern, replacement = how
        try:
            compiled = re.compile(pattern)
            compiled.sub(replacement, "")
        except (re.error, IndexError) as error:
            what = f"{pattern!r} and {replacement!r} are not a regular expression and a replacement"
            raise ValueError(f"{what}: {error}") from error
        return lambda name: compiled.sub(replacement, name)
    raise TypeError(
        "names takes a mapping, a function of a name, or a pair of a regular expression and its "
        f"replacement, not {how!r}; only xckpt.compare takes 'auto' as well"
    )


def _require_known(how: Mapping[Any, Any], names: list[str]) -> None:
    known = set(names)
    unknown = [name for name in how if name not in known]
    if not unknown:
        return
    first = unknown[0]
    if not isinstance(first, str):
        raise TypeError(f"names maps names to names, and {first!r} is not a text")
    more = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
    raise ValueError(
        f"names has {shown(first)}{more}, which no tensor is called{similar(names, first)}"
    )
