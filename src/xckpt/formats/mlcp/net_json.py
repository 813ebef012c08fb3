"""JSON as System.Text.Json writes it: indented, in ASCII, nothing in it that HTML gives meaning."""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Verbatim", "to_json"]

# All but the printable characters of ASCII without " & ' + < > \ `.
_ESCAPED = re.compile(r"[^ !#-%(-*,-;=?-\[\]-_a-~]")
_SHORT = {"\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_CONSTANTS = {None: "null", True: "true", False: "false"}


class Verbatim(str):
    """A text of printable ASCII that is written without escapes: a date."""

    __slots__ = ()


def to_json(value: Any) -> bytes:
    """Write JSON as .NET does, with two spaces for each level."""
    return "".join(_pieces(value, "\n")).encode("ascii")


def _pieces(value: Any, line: str) -> Iterator[str]:
    """Return the text of a value piece by piece; `line` begins a line of its level."""
    if isinstance(value, dict) and value:
        yield "{"
        yield from _members(value, line + "  ")
        yield line + "}"
    elif isinstance(value, list) and value:
        yield "["
        comma = ""
        for item in value:
            yield f"{comma}{line}  "
            yield from _pieces(item, line + "  ")
            comma = ","
        yield line + "]"
    else:
        yield _scalar(value)


def _members(value: dict[Any, Any], line: str) -> Iterator[str]:
    comma = ""
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r} is not text")
        yield f"{comma}{line}{_text(key)}: "
        yield from _pieces(item, line)
        comma = ","


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return _CONSTANTS[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        if not isfinite(value):
            raise ValueError(f"{value} is no number in JSON")
        return float.__repr__(value).replace("e", "E")
    if isinstance(value, dict | list):
        return "{}" if isinstance(value, dict) else "[]"
    raise TypeError(f"{value!r} of type {type(value).__name__} is not JSON")


def _text(value: str) -> str:
    if isinstance(value, Verbatim):
        return f'"{value}"'
    return f'"{_ESCAPED.sub(_escape, value)}"'


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character in _SHORT:
        return _SHORT[character]
    units = character.encode("utf-16-be").hex().upper()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
