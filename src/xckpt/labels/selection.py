"""What callers say of names: ``tensors=`` chooses some, ``names=`` gives them new ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import translate
from itertools import islice
from typing import Any

from xckpt.errors import shown

__all__ = ["Renaming", "TensorFilter", "renamed", "select", "select_some", "similar"]

# Between the words of a name or a glob, each of which is a piece as well.
_SEPARATORS = re.compile(r"([./:*?\[\]!]+)")

TensorFilter = str | re.Pattern[str] | Callable[[str], bool] | Iterable[str]


def select(names: Iterable[str], wanted: TensorFilter | None) -> list[str]:
    """Choose names."""
    if wanted is None:
        return list(names)
    matches = _predicate(wanted)
    return [name for name in names if matches(name)]


def _predicate(wanted: Any) -> Callable[[str], Any]:
    if isinstance(wanted, str):
        return re.compile(translate(wanted)).match
    if isinstance(wanted, re.Pattern):
        return wanted.search
    if callable(wanted):
        chosen: Callable[[str], Any] = wanted
        return chosen
    globs: list[Any] = list(wanted) if isinstance(wanted, Iterable) else [wanted]
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            "tensors takes a glob, a list of globs, a compiled regular expression or a function "
            f"of the name, not {wanted!r}"
        )
    if not globs:
        return lambda _: False
    return re.compile("|".join(translate(glob) for glob in globs)).match


def select_some(names: Iterable[str], wanted: TensorFilter | None) -> list[str]:
    """Choose names; a filter that none of them matches is a ValueError."""
    names = list(names)
    chosen = select(names, wanted)
    if wanted is not None and names and not chosen:
        hint = similar(names, wanted)
        raise ValueError(f"tensors={wanted!r} matches none of the {len(names)} tensors{hint}")
    return chosen


def similar(names: Iterable[str], wanted: TensorFilter) -> str:
    """Return the end of a message: names that resemble a filter that matched nothing, if any."""
    globs = [wanted] if isinstance(wanted, str) else wanted
    if isinstance(globs, re.Pattern) or callable(globs):
        return ""
    # Closeness is quadratic in the length of names: a sample of a huge file is enough for a hint.
    sample = list(islice(names, 5000))
    meant = [_respelled(glob, sample) for glob in globs if any(mark in glob for mark in "*?[")]
    if any(select(sample, glob) for glob in meant):
        return f"; did you mean {', '.join(map(shown, meant))}?"
    found = [each for glob in globs for each in get_close_matches(glob, sample, n=3, cutoff=0.5)]
    return f"; similar names: {', '.join(map(shown, found[:3]))}" if found else ""


def _respelled(glob: str, names: Iterable[str]) -> str:
    """Put for each word of a glob the closest one of all names."""
    words = {word for name in names for word in _SEPARATORS.split(name)[::2]}
    pieces = _SEPARATORS.split(glob)
    for at in range(0, len(pieces), 2):
        if pieces[at] not in words and pieces[at].strip("0123456789-"):
            pieces[at : at + 1] = get_close_matches(pieces[at], words, n=1) or [pieces[at]]
    return "".join(pieces)


# --- new names -----------------------------------------------------------------------------------

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
