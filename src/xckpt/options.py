"""Options that several functions share, each declared once with its text and default.

A function states ``**options: Unpack[ScanOptions]``, for type checkers, and has the decorator
`takes`, which shows the options one by one in its signature and docstring, fills in defaults, and
refuses other keywords with a suggestion. `Forwarded` makes methods of such functions, and the
commands take their ``--help`` from `text_of`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields
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
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from xckpt.labels import TensorFilter
    from xckpt.progress import ProgressOption

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
columns : str or iterable of str, optional
    Columns to list, or ``"all"``. All by default; commands choose some.
sort : str, optional
    Column to sort by, largest first, or ``"tensor"`` for names; by default in the order of the
    result.
ascending : bool, optional
    Sort from the smallest to the largest. By default only names and keys of groups are, from A to
    Z, and measures that are larger for a smaller change: ``cosine``, ``equal_fraction``,
    ``sqnr_db``.
limit : int, optional
    Largest number of rows. All by default.
ignore : str or iterable of str, optional
    Rules to leave out: a rule such as ``"constant"``, or a rule, a colon and a glob of tensors,
    ``"dead_rows:*.delta"``. ``"*"`` stands for all rules.
quantiles : sequence of float
    Quantiles to compute, between 0 and 1; the statistic ``q0.5`` is the median.
exact_quantiles : bool
    Compute exact quantiles of float32, float64 and integers of 32 and 64 bits, at the cost of one
    to four extra passes. By default, these quantiles have a relative error of at most 2**-8, and
    are exact if subnormal. Quantiles of smaller types are always exact.
explain : bool
    Find out why tensors differ (rounded, transposed, renamed, quantised, ...), in one or two more
    passes over the tensors that differ.
ax : matplotlib.axes.Axes, optional
    Where to draw; by default in a new figure.
"""


class SelectOptions(TypedDict, total=False):
    """Options that select tensors, besides a positional `tensors`."""

    exclude: TensorFilter | None
    only: Literal["weights"] | None


class StepKeywords(SelectOptions, total=False):
    """Options of opening the files of a run, of `xckpt.datasets.options.OpenOptions`."""

    drop_variables: str | Iterable[str] | None
    dims: Mapping[str, Sequence[str | None]] | Literal["size"] | None
    stack: bool | str | Sequence[str]
    decode: bool
    sparse: bool
    verify: bool | None
    mmap: bool
    missing: Literal["warn", "raise"]
    join_ranks: bool | Literal["auto"]
    structure: Mapping[str, Mapping[str, str]] | None
    storage_options: dict[str, Any] | None


class OpenKeywords(StepKeywords, total=False):
    """Options of `xckpt.datasets.options.OpenOptions`, for functions that open one checkpoint."""

    join: Literal["exact", "outer"]
    group: str | None
    dask: bool


class TransferOptions(SelectOptions, total=False):
    """Options of functions that read whole tensors."""

    progress: ProgressOption
    storage_options: dict[str, Any] | None


class ScanOptions(SelectOptions, total=False):
    """Options of functions that compute results of tensors."""

    progress: ProgressOption
    cache: bool
    storage_options: dict[str, Any] | None


class TableOptions(TypedDict, total=False):
    """Options that arrange the rows of a result."""

    sort: str | None
    ascending: bool | None
    limit: int | None


_DEFAULTS: Mapping[str, Any] = {"cache": True}

# Names that people try, by the option that does the work.
_INSTEAD = {
    "tensors": "names name glob globs pattern filter include select keys match subset variables",
    "exclude": "without skip drop ignore_tensors drop_variables omit",
    "only": "preset roles",
    "dim": "axis dims axes",
    "dtype": "type precision torch_dtype to_dtype",
    "to": "format engine fmt",
    "engine": "format fmt framework",
    "overwrite": "force replace exist_ok clobber",
    "progress": "verbose show_progress progress_bar tqdm quiet",
    "cache": "use_cache no_cache",
    "names": "rename renames mapping name_map",
    "encoding": "compress",
    "quantiles": "q quantile percentiles",
    "bins": "nbins num_bins",
    "sort": "sort_by order order_by key",
    "ascending": "reverse asc descending",
    "limit": "top head n k rows max_rows most nlargest count",
    "columns": "column cols fields",
    "by": "group groupby group_by per",
    "fail_above": "tolerance atol rtol tol threshold eps",
    "findings": "check health lint",
    "output": "out o path file",
    "explain": "why reasons causes",
    "storage_options": "fs_options backend_kwargs credentials token",
    "storage_option": "storage_options anon token",
}


def option_meant(name: str, allowed: Collection[str], *, exactly: bool = False) -> str:
    """Return the option that another name for it means; empty if the name is unknown."""
    meant = [option for option in allowed if name in _INSTEAD.get(option, "").split()]
    meant += [] if exactly else get_close_matches(name, allowed, n=1)
    return meant[0] if meant else ""


def suggest_option(name: str, allowed: Collection[str]) -> str:
    """Return the end of an error message about an unknown option, with the one that is meant."""
    meant = option_meant(name, allowed)
    return f"did you mean {meant!r}?" if meant else f"it has {', '.join(allowed)}"


#: Calls that arrange a DataFrame.
OF_FRAMES: dict[str, Any] = {
    "sort": "the result is a DataFrame: .sort_values({value!r})",
    "limit": "the result is a DataFrame: .head({value!r})",
}
#: What other options that rename are answered with.
RENAMING = (
    "did you mean 'names'? It takes a mapping, a function, or pairs of a regular expression and "
    "its replacement: names=('^model[.]', '')"
)
# Calls that have options which functions of checkpoints lack.
_ELSEWHERE = {
    "by": "its result has it: result.ckpt.by({value!r})",
    **dict.fromkeys(("layers", "experts", "blocks"), "select first: ds.ckpt.sel({name}={value!r})"),
    **dict.fromkeys(
        ("sort", "ascending", "limit", "columns"), "result.ckpt.table({name}={value!r}) has it"
    ),
}


# --- functions with options ----------------------------------------------------------------------


def takes(
    group: type | None = None, *, declared: Any = None, is_open: bool = False, **elsewhere: str
) -> Callable[[F], F]:
    """Show the options of a group, which ``**options`` of a function has, one by one.

    Without a group, or with `is_open`, other keywords of a function belong to another package.
    `declared` is a dataclass with the defaults and texts of the options, and `elsewhere` has the
    calls with options that the function lacks, by option.
    """
    values = _DEFAULTS
    options = {} if group is None else group.__annotations__
    if declared is not None:
        values = {field.name: field.default for field in fields(declared)}
        options = {name: options[name] for name in values if name in options}

    def decorate(function: F) -> F:
        stated = signature(function)
        parameters = list(stated.parameters.values())
        fixed = [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
        foreign = parameters[len(fixed) :] if is_open or group is None else []
        defaults = {name: values.get(name) for name in options if name not in stated.parameters}
        added = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=options[name])
            for name, default in defaults.items()
        ]
        most = sum(p.kind in _BY_PLACE for p in fixed)
        if any(p.kind is Parameter.VAR_POSITIONAL for p in fixed):
            most = sys.maxsize
        allowed = [
            p.name
            for p in (*fixed, *added)
            if p.name not in _SUBJECTS and p.kind is not Parameter.VAR_POSITIONAL
        ]
        calls = _ELSEWHERE | elsewhere

        @wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            name = function.__name__
            if len(args) > most:
                raise TypeError(_too_many(name, args, most, allowed))
            for keyword, value in keywords.items():
                if keyword in stated.parameters or keyword in defaults:
                    continue
                hint = _hint_at(keyword, value, allowed, calls, is_open=bool(foreign))
                if hint:
                    called = name.removeprefix("draw_")
                    raise TypeError(f"{called}() has no option {keyword!r}; {hint}")
            return function(*args, **(defaults | keywords))

        shown_signature = stated.replace(parameters=[*fixed, *added, *foreign])
        checked.__signature__ = shown_signature  # type: ignore[attr-defined]
        texts = _TEXTS if declared is None else declared.__doc__
        checked.__doc__ = described(function.__doc__ or "", shown_signature.parameters, texts)
        return checked  # type: ignore[return-value]

    return decorate


_BY_PLACE = {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
# Parameters other than options: the objects that a function is called with.
_SUBJECTS = {"self", "obj", "a", "b", "source"}


def _too_many(name: str, args: Sequence[Any], most: int, allowed: Collection[str]) -> str:
    """Return the error message for a call with too many positional arguments."""
    extra, hint = args[most], "name the rest"
    if isinstance(extra, str) and "*" in extra and "tensors" in allowed:
        hint = f"pass {extra!r} by name, as tensors={extra!r}"
    return f"{name}() takes {most} positional arguments, not {len(args)}: {hint}"


def _hint_at(
    keyword: str, value: Any, allowed: Collection[str], calls: Mapping[str, str], *, is_open: bool
) -> str:
    """Return a hint at the option or the call that is meant; empty for one of another package."""
    name = keyword
    if keyword not in calls and not option_meant(keyword, allowed):
        name = option_meant(keyword, calls, exactly=True)
    hint = calls.get(keyword, calls.get(name, "")).format(name=name, value=value)
    if hint or (is_open and not option_meant(keyword, allowed, exactly=True)):
        return hint
    return suggest_option(keyword, allowed)


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


def texts_of_options() -> dict[str, str]:
    """Return the first sentence on each shared option."""
    texts = {}
    for option, entry in _split_entries(_TEXTS)[1].items():
        text = re.sub(r"\s+", " ", entry.partition("\n")[2]).strip()
        texts[option] = re.split(r"(?<=[^.])\. ", text)[0].rstrip(".") + "."
    return texts


def text_of(option: str) -> str:
    """Return the first sentence on an option without markup, for a command."""
    return texts_of_options()[option].replace("`", "")


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
        first, *following = stated.parameters.values()
        parameters = [p for p in following if p.name not in self._without]
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
