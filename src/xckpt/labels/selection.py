"""Which tensors are meant: ``tensors=`` as a glob, globs, a regular expression or a callable."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import translate
from itertools import islice
from typing import Any

from xckpt.errors import shown

__all__ = ["TensorFilter", "select", "select_some", "similar"]

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
