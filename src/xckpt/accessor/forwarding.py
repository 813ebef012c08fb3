"""Methods of ``ds.ckpt`` that call a function of the package with the open object."""

from __future__ import annotations

import re
from functools import cached_property
from inspect import cleandoc, signature
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Forwarded"]

P = ParamSpec("P")
R = TypeVar("R")

_PARAMETERS = "\nParameters\n----------\n"


class Forwarded(Generic[P, R]):
    """A method with the signature and docstring of the function that it calls with the object."""

    def __init__(
        self,
        load: Callable[[], Callable[Concatenate[Any, P], R]],
        without: str = "",
        after: Callable[..., None] | None = None,
    ) -> None:
        # Returns the function; called on first use, because functions import heavy packages.
        self._load = load
        # Parameters that only a path needs, besides the first one.
        self._without = without.split()
        # Called with the accessor, the result and the keyword arguments of the call.
        self._after = after

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, accessor: object, owner: type) -> Callable[P, R]:
        method: Any = self._method if accessor is None else MethodType(self._method, accessor)
        return method  # type: ignore[no-any-return]

    @cached_property
    def _method(self) -> Callable[..., R]:
        function, after = self._load(), self._after

        def method(self: Any, *args: Any, **options: Any) -> R:
            result = function(self._given, *args, **options)
            if after is not None:
                after(self, result, **options)
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


def _without(docstring: str, names: list[str]) -> str:
    """Remove parameters from a numpydoc docstring."""
    head, _, tail = cleandoc(docstring).partition(_PARAMETERS)
    entries, blank, rest = tail.partition("\n\n")
    selected = [e for e in re.split(r"\n(?=\S)", entries) if e.split(" :")[0] not in names]
    section = _PARAMETERS + "\n".join(selected) if selected else ""
    return f"{head}{section}{blank}{rest}"
