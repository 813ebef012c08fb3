"""``encoding=``: how a user wants tensors to be stored."""

from __future__ import annotations

import re
from difflib import get_close_matches
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from xckpt.dtypes import ELEMENT_TYPES
from xckpt.errors import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Requests"]

_KEYS = ("compression", "level", "digest", "dtype", "layout")
_LEVELS = range(1, 23)


class Requests:
    """What is asked for each tensor.

    Parameters
    ----------
    encoding : mapping of str to mapping, optional
        Globs of tensor names to what is wanted of those: ``compression`` (a name or None),
        ``level`` (1 to 22), ``digest`` (an algorithm or None), ``dtype`` (an element type),
        ``layout`` (``"dense"``). Where several match, later ones have the last word.

    Raises
    ------
    TypeError
        If it is no mapping of mappings.
    ValueError
        If a key or a value is not known.
    """

    def __init__(self, encoding: Mapping[str, Mapping[str, Any]] | None) -> None:
        self._requests = [
            (glob, re.compile(translate(glob)).match, _parsed(glob, wanted))
            for glob, wanted in (encoding or {}).items()
        ]

    def of(self, name: str) -> dict[str, Any]:
        """Return what is asked for a tensor."""
        wanted: dict[str, Any] = {}
        for glob, matches, request in self._requests:
            # A name with brackets in it means itself first of all.
            if glob == name or matches(name):
                wanted |= request
        return wanted

    def check_used(self, names: Iterable[str]) -> None:
        """Refuse what asks for no tensor, which is a slip of the pen."""
        names = list(names)
        for glob, matches, _ in self._requests:
            if glob != "*" and not any(glob == name or matches(name) for name in names):
                alike = ", ".join(map(shown, get_close_matches(glob, names, n=3)))
                hint = f"; similar names: {alike}" if alike else ""
                raise ValueError(f"encoding: {shown(glob)} matches no tensor{hint}")


def _parsed(glob: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    if not hasattr(wanted, "items"):
        raise TypeError("encoding maps globs of tensor names to mappings")
    for key in wanted:
        if key not in _KEYS:
            alike = get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {alike[0]!r}?" if alike else f"known are {', '.join(_KEYS)}"
            raise ValueError(f"encoding[{shown(glob)}]: {key!r} is not known; {hint}")
    request = dict(wanted)
    if "dtype" in request:
        request["dtype"] = _element_type(glob, request["dtype"])
    if request.get("layout", "dense") != "dense":
        raise ValueError(f"encoding[{shown(glob)}]: the only layout to ask for is 'dense'")
    level = request.get("level")
    if level is not None and level not in _LEVELS:
        raise ValueError(f"encoding[{shown(glob)}]: level {level!r} is not in 1 to 22")
    return request


def _element_type(glob: str, dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if name is None:
        name = getattr(dtype, "__name__", str(dtype))
    if name not in ELEMENT_TYPES:
        known = ", ".join(ELEMENT_TYPES)
        raise ValueError(f"encoding[{shown(glob)}]: {dtype!r} is no element type; known: {known}")
    return str(name)
