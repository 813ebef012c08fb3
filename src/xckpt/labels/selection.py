"""What callers say of names: ``tensors=`` chooses some, ``names=`` gives them new ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import translate
from itertools import islice
from typing import Any

from xckpt.errors import shown

__all__ = [
    "Renaming",
    "TensorFilter",
    "renamed",
    "select",
    "select_some",
    "similar",
    "similar_filter",
    "suggest",
]

# Names that are searched for similar ones, which takes time quadratic in their length.
_SAMPLE = 5000
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
        hint = similar_filter(names, wanted)
        raise ValueError(f"tensors={wanted!r} matches none of the {len(names)} tensors{hint}")
    return chosen


def similar(names: Iterable[str], wanted: Iterable[str]) -> str:
    """Return the end of a message: names that resemble one that is missing, or several, if any."""
    missing = [wanted] if isinstance(wanted, str) else list(wanted)
    sample = list(islice(names, _SAMPLE))
    close = [each for name in missing for each in get_close_matches(name, sample, 3, cutoff=0.5)]
    return f"; similar names: {', '.join(map(shown, close[:3]))}" if close else ""


def similar_filter(names: Iterable[str], wanted: TensorFilter) -> str:
    """Return the end of a message: filters in place of one without a match, or similar names."""
    if isinstance(wanted, re.Pattern) or callable(wanted):
        return ""
    globs = [wanted] if isinstance(wanted, str) else list(wanted)
    sample = list(islice(names, _SAMPLE))
    suggestions = [text for glob in globs if (text := _suggestion(glob, sample))]
    if not suggestions:
        return similar(sample, globs)
    return f"; did you mean {', '.join(map(shown, suggestions))}?"


def suggest(word: str, synonyms: Mapping[str, str], known: Iterable[str] = ()) -> str | None:
    """Return the key whose words have this one among them, or the known word that resembles it."""
    for meant, words in synonyms.items():
        if word in words.split():
            return meant
    return next(iter(get_close_matches(word, known, n=1)), None)


def _suggestion(glob: str, names: Sequence[str]) -> str | None:
    """Return a glob that matches, if one resembles what was given."""
    respelled = _respelled(glob, names)
    if any(mark in glob for mark in "*?["):
        return respelled if select(names, respelled) else None
    if respelled in names:  # which `similar` lists
        return None
    return _containing(glob, names) or _containing(respelled, names)


def _containing(text: str, names: Iterable[str]) -> str | None:
    """Return a glob for the names in a module or, in any case, for those that contain a text."""
    contained = re.compile(re.escape(text), re.IGNORECASE)
    matches = [match for name in names if (match := contained.search(name))]
    if not matches or not text:
        return None
    spelled = matches[0].group()
    is_module = any(match.string.startswith(f"{spelled}.") for match in matches)
    return f"{spelled}.*" if is_module else f"*{spelled}*"


def _respelled(glob: str, names: Sequence[str]) -> str:
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
