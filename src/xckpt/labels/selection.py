"""Which tensors are meant: ``tensors=`` as a glob, globs, a regular expression or a callable."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import translate
from typing import Any

__all__ = ["TensorFilter", "select"]

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


def closest(names: Iterable[str], wanted: TensorFilter) -> list[str]:
    """Find names that resemble a filter that matched nothing, for a message."""
    globs = [wanted] if isinstance(wanted, str) else wanted
    if isinstance(globs, re.Pattern) or callable(globs):
        return []
    # Closeness is quadratic in the length of names: a sample of a huge file is enough for a hint.
    sample = [name for name, _ in zip(names, range(5000), strict=False)]
    found = [get_close_matches(glob, sample, n=3, cutoff=0.5) for glob in globs]
    return [name for close in found for name in close][:3]
