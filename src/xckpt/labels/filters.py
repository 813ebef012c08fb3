"""Filters of tensors by name and role, from ``tensors=``, ``exclude=`` and ``only=``.

The suggestions at the end complete error messages about names and filters without a match.

The globs of ``structure=`` correct what tensors are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import translate
from itertools import islice
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown, warn
from xckpt.structure import OF_TRAINING, Role, Structure

if TYPE_CHECKING:
    from xckpt.index import Index

#: A glob, several globs, a compiled regular expression, or a predicate of the name.
TensorFilter = str | re.Pattern[str] | Callable[[str], bool] | Iterable[str]

# Similar names are searched among the first ones only, because comparing names takes long.
_MAX_COMPARED = 5000
# Separators between the words of a name or a glob; splitting keeps them.
_SEPARATORS = re.compile(r"([./:*?\[\]!]+)")


class Selection:
    """A filter with exceptions: a predicate of names for `tensors`, `exclude` and `only`."""

    def __init__(
        self,
        tensors: TensorFilter | None,
        exclude: TensorFilter | None,
        only: str | None,
        structures: Callable[[], Iterable[Structure]],
    ) -> None:
        # Several structures describe the two sides of a comparison. Finding roles takes long.
        self.tensors = reusable(tensors)
        self.exclude = reusable(exclude)
        self._is_selected = _predicate("*" if tensors is None else self.tensors)
        self._is_excluded = _predicate(() if exclude is None else self.exclude)
        self._only = only
        self.is_checked = False  # for exceptions without a match
        self._omitted = _of_no_model(structures()) if only is not None else frozenset()

    def __call__(self, name: str) -> bool:
        """Return whether a name is selected."""
        return bool(self._is_selected(name)) and not self.excludes(name)

    def excludes(self, name: str) -> bool:
        """Return whether a name is an exception."""
        return name in self._omitted or bool(self._is_excluded(name))

    def __repr__(self) -> str:
        options = {"exclude": self.exclude, "only": self._only}
        texts = [f"{key}={value!r}" for key, value in options.items() if value is not None]
        return ", ".join([repr(self.tensors or "*"), *texts])


def combined(
    tensors: TensorFilter | None,
    exclude: TensorFilter | None = None,
    only: str | None = None,
    structures: Callable[[], Iterable[Structure]] = lambda: (),
) -> TensorFilter | None:
    """Return one filter for the options of `xckpt.options.SelectOptions`."""
    require_only(only)
    if exclude is None and only is None:
        name_filter: TensorFilter | None = reusable(tensors)
        return name_filter
    return Selection(tensors, exclude, only, structures)


def require_only(only: str | None) -> None:
    """Raise if the option `only` is invalid."""
    if only not in {None, "weights"}:
        raise ValueError(f"only={only!r}: expected 'weights'; tensors={only!r} selects by name")


def reusable(name_filter: TensorFilter | None) -> Any:
    """Return a filter that can be applied several times."""
    return tuple(name_filter) if isinstance(name_filter, Iterator) else name_filter


def _of_no_model(structures: Iterable[Structure]) -> frozenset[str]:
    """Return the names of averages, and of tensors that an optimizer or a training loop keeps."""
    omitted: set[str] = set()
    for structure in structures:
        omitted |= structure.averaged
        omitted |= {name for name, role in structure.roles.items() if role in OF_TRAINING}
    return frozenset(omitted)


def select(names: Iterable[str], name_filter: TensorFilter | None) -> list[str]:
    """Return the names that a filter matches, in their order; None matches all."""
    if name_filter is None:
        return list(names)
    matches = _predicate(name_filter)
    return [name for name in names if matches(name)]


def select_members(homes: Mapping[str, str], name_filter: TensorFilter | None) -> list[str]:
    """Return the tensors that a filter matches by their names or those of their variables."""
    # `homes` has the variable of each tensor. Exceptions hold for both names.
    name_filter = reusable(name_filter)
    matches = set(select_or_raise(dict.fromkeys([*homes, *homes.values()]), name_filter))
    if not isinstance(name_filter, Selection):
        return [name for name, home in homes.items() if name in matches or home in matches]
    excluded = {name for name in {*homes, *homes.values()} if name_filter.excludes(name)}
    return [
        name
        for name, home in homes.items()
        if (name in matches or home in matches) and excluded.isdisjoint((name, home))
    ]


def has_match(names: Iterable[str], name_filter: TensorFilter) -> bool:
    """Return whether a filter matches any name."""
    return any(map(_predicate(name_filter), names))


def _predicate(name_filter: Any) -> Callable[[str], Any]:
    if isinstance(name_filter, str):
        return re.compile(translate(name_filter)).match
    if isinstance(name_filter, re.Pattern):
        return name_filter.search
    if callable(name_filter):
        predicate: Callable[[str], Any] = name_filter
        return predicate
    globs: list[Any] = list(name_filter) if isinstance(name_filter, Iterable) else [name_filter]
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            "tensors takes a glob, a list of globs, a compiled regular expression or a function "
            f"of the name, not {name_filter!r}"
        )
    if not globs:
        return lambda _: False
    return re.compile("|".join(translate(glob) for glob in globs)).match


def select_or_raise(names: Iterable[str], name_filter: TensorFilter | None) -> list[str]:
    """Return the names that a filter matches, as `select` does; raise if it matches none."""
    names = list(names)
    selected = select(names, name_filter)
    if name_filter is not None and names and not selected:
        raise ValueError(no_match(names, name_filter))
    warn_of_exclusions(names, name_filter)
    return selected


def warn_of_exclusions(names: Collection[str], name_filter: TensorFilter | None) -> None:
    """Warn if exceptions of a filter match nothing; this is usually a typo."""
    if not isinstance(name_filter, Selection) or name_filter.is_checked:
        return
    name_filter.is_checked, exclude = True, name_filter.exclude
    if exclude is not None and names and not has_match(names, exclude):
        warn(no_match(names, exclude).replace("tensors=", "exclude=", 1))


def no_match(names: Collection[str], name_filter: TensorFilter) -> str:
    """Return the message that a filter matches no name, with a suggestion."""
    hint = suggest_filters(names, name_filter)
    return f"tensors={name_filter!r} matches none of the {len(names)} tensors{hint}"


# --- suggestions ---------------------------------------------------------------------------------


def suggest_word(
    word: str, synonyms: Mapping[str, str], candidates: Iterable[str] = ()
) -> str | None:
    """Return the word that an unknown one stands for, or the most similar candidate, or None."""
    # `synonyms` has other words by the word to use instead, separated by spaces.
    for replacement, words in synonyms.items():
        if word in words.split():
            return replacement
    return next(iter(get_close_matches(word, candidates, n=1)), None)


def suggest_names(names: Iterable[str], missing: str | Iterable[str]) -> str:
    """Return the end of an error message: names similar to those that are missing, if any."""
    targets = [missing] if isinstance(missing, str) else missing
    candidates = list(islice(names, _MAX_COMPARED))
    similar = [
        name for target in targets for name in get_close_matches(target, candidates, 3, cutoff=0.5)
    ]
    return f"; similar names: {', '.join(map(shown, similar[:3]))}" if similar else ""


def suggest_filters(names: Iterable[str], name_filter: TensorFilter) -> str:
    """Return the end of an error message: globs that do match, or similar names."""
    if isinstance(name_filter, Selection) and name_filter.tensors is not None:
        name_filter = "" if has_match(names, name_filter.tensors) else name_filter.tensors
    if not name_filter or isinstance(name_filter, re.Pattern) or callable(name_filter):
        return ""
    globs = [name_filter] if isinstance(name_filter, str) else list(name_filter)
    candidates = list(islice(names, _MAX_COMPARED))
    suggestions: list[str] = []
    for glob in globs:
        suggestion: str | None = None
        corrected = _correct_words(glob, candidates)
        if any(wildcard in glob for wildcard in "*?["):
            suggestion = corrected if select(candidates, corrected) else None
        elif corrected not in candidates:  # otherwise a name, which suggest_names lists
            suggestion = _glob_around(glob, candidates) or _glob_around(corrected, candidates)
        if suggestion:
            suggestions.append(suggestion)
    if not suggestions:
        return suggest_names(candidates, globs)
    return f"; did you mean {', '.join(map(shown, suggestions))}?"


def _correct_words(glob: str, names: Iterable[str]) -> str:
    """Replace each word of a glob that is in no name by the most similar word of the names."""
    words = {word for name in names for word in _SEPARATORS.split(name)[::2]}
    pieces = _SEPARATORS.split(glob)
    for position in range(0, len(pieces), 2):
        word = pieces[position]
        if word not in words and word.strip("0123456789-"):
            similar = get_close_matches(word, words, n=1)
            pieces[position] = similar[0] if similar else word
    return "".join(pieces)


def _glob_around(text: str, names: Iterable[str]) -> str | None:
    """Return a glob for the tensors of a module, or else for all names that contain a text."""
    pattern = re.compile(re.escape(text), re.IGNORECASE)
    matches = [match for name in names if (match := pattern.search(name))]
    if not matches or not text:
        return None
    spelling = matches[0].group()
    is_module = any(match.string.startswith(f"{spelling}.") for match in matches)
    return f"{spelling}.*" if is_module else f"*{spelling}*"


# --- corrections ----------------------------------------------------------------------------------

#: Fields of `xckpt.structure.TensorInfo` that users can set.
FIELDS = ("role", "component", "module_type", "slot")


def correct(index: Index, corrections: Any) -> Index:
    """Return an Index whose tensors have the facts that the user states."""
    checked = _checked(corrections)
    facts: dict[str, dict[str, str]] = {}
    for glob, fields in checked.items():
        names = select(index.tensors, glob)
        if not names:
            hint = suggest_filters(index.tensors, glob)
            text = f"{index.source}: structure[{glob!r}] matches no tensor{hint}"
            warn(text)
        for name in names:
            facts[name] = facts.get(name, {}) | fields
    tensors = dict(index.tensors)
    for name, fields in facts.items():
        declared = {**(tensors[name].declared or {}), "user": fields}
        tensors[name] = replace(tensors[name], declared=declared)
    return replace(index, tensors=tensors)


def _checked(corrections: Any) -> dict[str, dict[str, str]]:
    """Return corrections, or raise unless they map globs to fields of a `TensorInfo`."""
    if not isinstance(corrections, Mapping):
        raise TypeError(
            "structure maps globs of tensor names to what they are, such as "
            f"{{'*.window': {{'role': 'constant'}}}}, not {corrections!r:.80}"
        )
    checked = {}
    for glob, fields in corrections.items():
        if not isinstance(glob, str) or not isinstance(fields, Mapping):
            raise TypeError(f"structure[{glob!r}] is {fields!r:.80}, not a mapping of fields")
        for field, value in fields.items():
            if field not in FIELDS:
                hint = suggest_names(FIELDS, str(field)) or f"; fields are {', '.join(FIELDS)}"
                raise ValueError(f"structure[{glob!r}]: unknown field {field!r}{hint}")
            if not isinstance(value, str):
                raise TypeError(f"structure[{glob!r}][{field!r}] is a text, not {value!r:.80}")
        role = fields.get("role")
        if role is not None and role not in set(Role):
            roles = [known.value for known in Role]
            hint = suggest_names(roles, role) or f"; roles are {', '.join(roles)}"
            raise ValueError(f"structure[{glob!r}]: unknown role {shown(role)}{hint}")
        checked[glob] = {str(field): str(value) for field, value in fields.items()}
    return checked
