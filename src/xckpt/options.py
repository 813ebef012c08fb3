"""Options that several functions share, each declared once with its text and default.

A function states ``**options: Unpack[ScanOptions]``, for type checkers, and has the decorator
`takes`, which shows the options one by one in its signature and docstring, fills in defaults, and
refuses other keywords with a suggestion. `Forwarded` makes methods of such functions, and the
commands take their ``--help`` from `text_of`.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cached_property, wraps
from inspect import Parameter, cleandoc, signature
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
)

from xckpt.errors import deprecated_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from xckpt.labels import TensorFilter
    from xckpt.progress import ProgressOption

__all__ = [
    "Forwarded",
    "ScanOptions",
    "SelectOptions",
    "Selecting",
    "TransferOptions",
    "described",
    "documented",
    "renamed",
    "suggest_option",
    "takes",
    "text_of",
]

P = ParamSpec("P")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
F = TypeVar("F", bound="Callable[..., Any]")

_PARAMETERS = "\nParameters\n----------\n"

# --- the options ---------------------------------------------------------------------------------


_TEXTS = """
Parameters
----------
tensors : str, iterable of str, re.Pattern or callable, optional
    Tensors to select, by their whole names; all by default. A glob, several globs, a regular
    expression to search for, or a function from a name to a bool.
exclude : str, iterable of str, re.Pattern or callable, optional
    Tensors to leave out, by their whole names. In the same forms as `tensors`.
only : {"weights"}, optional
    Select the tensors of the model itself: no averages of weights, and no state of an optimizer or
    of the training.
skip_unreadable : bool, default False
    Leave out tensors that cannot be read, because a shard is missing or a file is damaged, or that
    the format cannot store; a warning lists them. Otherwise they are an error.
overwrite : bool, default False
    Replace an existing file.
progress : bool or callable, optional
    Whether to show a progress bar; by default it appears after a moment in a terminal or notebook.
    A function is called as ``f(done, total)``, with numbers of bytes: `done` never decreases, and
    `total` grows if more passes are needed.
cache : bool, default True
    Keep the results for unchanged files in the user's cache, in the folder of ``XCKPT_CACHE_DIR``
    if that is set. A second call then reads nothing, and an interrupted call resumes.
storage_options : dict, optional
    Credentials, time limits and other options of URLs, such as ``{"anon": True}``.
"""


class SelectOptions(TypedDict, total=False):
    """Options that select tensors, besides a positional `tensors`."""

    exclude: TensorFilter | None
    only: Literal["weights"] | None


class TransferOptions(SelectOptions, total=False):
    """Options of functions that read whole tensors."""

    progress: ProgressOption
    storage_options: dict[str, Any] | None


class ScanOptions(SelectOptions, total=False):
    """Options of functions that compute results of tensors."""

    progress: ProgressOption
    cache: bool
    storage_options: dict[str, Any] | None


_DEFAULTS: Mapping[str, Any] = {"cache": True}

# Names that people try, by the option that does the work.
_INSTEAD = {
    "tensors": "names name glob globs pattern filter include select keys match subset variables",
    "exclude": "without skip drop ignore_tensors drop_variables omit",
    "only": "preset roles role",
    "dim": "axis dims axes",
    "dtype": "type precision torch_dtype to_dtype",
    "engine": "format fmt framework",
    "overwrite": "force replace exist_ok clobber",
    "progress": "verbose show_progress progress_bar tqdm quiet",
    "cache": "use_cache no_cache",
    "names": "rename renames mapping name_map",
    "encoding": "compression level digest compress",
    "quantiles": "q quantile percentiles",
    "bins": "nbins num_bins",
    "storage_options": "fs_options backend_kwargs credentials token",
}


def suggest_option(name: str, allowed: Collection[str]) -> str:
    """Return the end of an error message about an unknown option, with the one that is meant."""
    meant = [option for option in allowed if name in _INSTEAD.get(option, "").split()]
    meant += get_close_matches(name, allowed, n=1)
    return f"did you mean {meant[0]!r}?" if meant else f"it has {', '.join(allowed)}"


# Calls that have options which functions of checkpoints lack.
_ELSEWHERE = {
    "by": "its result has it: result.ckpt.by({value!r})",
    **dict.fromkeys(("layers", "experts", "blocks"), "select first: ds.ckpt.sel({name}={value!r})"),
    **dict.fromkeys(
        ("sort", "ascending", "limit", "columns"), "result.ckpt.table({name}={value!r}) has it"
    ),
}


# --- functions with options ----------------------------------------------------------------------


def takes(group: type, **elsewhere: str) -> Callable[[F], F]:
    """Show the options of a group, which ``**options`` of a function has, one by one.

    `elsewhere` has the calls with options that the function lacks, by option.
    """

    def decorate(function: F) -> F:
        stated = signature(function)
        fixed = [p for p in stated.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        stated_names = {parameter.name for parameter in fixed}
        options = [name for name in group.__annotations__ if name not in stated_names]
        added = [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=_DEFAULTS.get(name),
                annotation=group.__annotations__[name],
            )
            for name in options
        ]
        defaults = {name: _DEFAULTS.get(name) for name in options}
        shown_signature = stated.replace(parameters=[*fixed, *added])
        allowed = [
            name for name in shown_signature.parameters if name not in {"self", "obj", "a", "b"}
        ]

        positional = [p for p in fixed if p.kind is Parameter.POSITIONAL_OR_KEYWORD]

        @wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            if len(args) > len(positional):
                extra = args[len(positional)]
                text = f"{function.__name__}() takes {len(positional)} positional arguments"
                is_glob = isinstance(extra, str) and "*" in extra and "tensors" in allowed
                hint = (
                    f"pass {extra!r} by name, as tensors={extra!r}" if is_glob else "name the rest"
                )
                raise TypeError(f"{text}, not {len(args)}: {hint}")
            for keyword, value in keywords.items():
                if keyword not in shown_signature.parameters:
                    known = elsewhere.get(keyword, _ELSEWHERE.get(keyword, ""))
                    hint = known.format(name=keyword, value=value) or suggest_option(
                        keyword, allowed
                    )
                    raise TypeError(f"{function.__name__}() has no option {keyword!r}; {hint}")
            return function(*args, **(defaults | keywords))

        checked.__signature__ = shown_signature  # type: ignore[attr-defined]
        checked.__doc__ = described(function.__doc__ or "", shown_signature.parameters)
        return checked  # type: ignore[return-value]

    return decorate


def documented(function: F) -> F:
    """Add the texts of shared options to the docstring of a function that states them."""
    function.__doc__ = described(function.__doc__ or "", signature(function).parameters)
    return function


def renamed(old: str, new: str) -> Callable[[F], F]:
    """Accept the old name of a parameter for one release."""

    def decorate(function: F) -> F:
        @wraps(function)
        def called(*args: Any, **keywords: Any) -> Any:
            if old in keywords:
                deprecated_name(f"{old}=", f"{new}=", since="0.3")
                keywords[new] = keywords.pop(old)
            return function(*args, **keywords)

        return called  # type: ignore[return-value]

    return decorate


def text_of(option: str) -> str:
    """Return the first sentence on an option without markup, for a command."""
    description = _split_entries(_TEXTS)[1][option].partition("\n")[2]
    text = re.sub(r"\s+", " ", description).replace("`", "").strip()
    return re.split(r"(?<=[^.])\. ", text)[0].rstrip(".") + "."


def described(docstring: str, names: Iterable[str], source: str = _TEXTS) -> str:
    """Add the texts of options that a docstring lacks, from another one, in the given order."""
    head, entries, remainder = _split_entries(docstring)
    order, texts = list(names), _split_entries(source)[1]
    pending = {name: texts[name] for name in order if name in texts and name not in entries}
    listed: list[str] = []
    for key, entry in entries.items():
        listed.append(entry)
        last = key.split(",")[-1].strip("* ")
        for name in order[order.index(last) + 1 :] if last in order else ():
            if name not in pending:
                break
            listed.append(pending.pop(name))
    return f"{head}{_PARAMETERS}" + "\n".join([*listed, *pending.values()]) + remainder


def _split_entries(docstring: str) -> tuple[str, dict[str, str], str]:
    """Split a numpydoc docstring into its head, its parameters, and the remainder."""
    head, _, tail = ("\n" + cleandoc(docstring)).partition(_PARAMETERS)
    section, blank, remainder = tail.partition("\n\n")
    entries = re.split(r"\n(?=\S)", section) if section else []
    return (
        head.lstrip("\n"),
        {entry.split(" :")[0].strip(): entry for entry in entries},
        blank + remainder,
    )


# --- methods -------------------------------------------------------------------------------------


class Forwarded(Generic[P, R]):
    """A method with the signature and docstring of the function that it calls with the object."""

    _object = "_given"  # the attribute of the accessor

    def __init__(
        self,
        load: Callable[[], Callable[Concatenate[Any, P], R]],
        without: str = "",
        after: Callable[..., None] | None = None,
        instead: Callable[..., R] | None = None,
    ) -> None:
        # Returns the function; called on first use, because functions import heavy packages.
        self._load = load
        # Parameters that only a path needs, besides the first one.
        self._without = without.split()
        # Called with the accessor, the result and the arguments of the call.
        self._after = after
        # Called with the accessor and the arguments, instead of the function.
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, accessor: object, owner: type) -> Callable[P, R]:
        method: Any = self._method if accessor is None else MethodType(self._method, accessor)
        return method  # type: ignore[no-any-return]

    @cached_property
    def _method(self) -> Callable[..., R]:
        function, after, instead = self._load(), self._after, self._instead
        self_object = self._object

        def method(self: Any, *args: Any, **options: Any) -> R:
            if instead is not None:
                return instead(self, *args, **options)
            result = function(getattr(self, self_object), *args, **options)
            if after is not None:
                after(self, result, *args, **options)
            return result

        stated = signature(function)
        first, *others = stated.parameters.values()
        parameters = [p for p in others if p.name not in self._without]
        method.__signature__ = stated.replace(  # type: ignore[attr-defined]
            parameters=[first.replace(name="self", annotation=first.empty), *parameters]
        )
        method.__doc__ = _without(function.__doc__ or "", [first.name, *self._without])
        method.__name__, method.__module__ = self._name, self._owner.__module__
        method.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
        return method


class _Accessor(Protocol[T_co]):
    @property
    def _obj(self) -> T_co: ...


class Selecting(Forwarded[P, Any]):
    """A method that returns an object of the same kind as the one of the accessor."""

    _object = "_obj"

    def __get__(self, accessor: _Accessor[T_co], owner: type) -> Callable[P, T_co]:  # type: ignore[override]
        return super().__get__(accessor, owner)


def _without(docstring: str, names: list[str]) -> str:
    """Remove parameters from a numpydoc docstring."""
    head, entries, remainder = _split_entries(docstring)
    selected = [entry for name, entry in entries.items() if name not in names]
    section = _PARAMETERS + "\n".join(selected) if selected else ""
    return f"{head}{section}{remainder}"
