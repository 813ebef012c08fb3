"""Names of variables and their places in a tree, from keys that are lists of any texts.

A key is its elements as text, where a byte that is not UTF-8 is a lone surrogate, as Python's
error handler "surrogateescape" makes it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "is_utf8",
    "key_and_stat",
    "key_and_stat_at",
    "stat_path",
    "value_path",
    "variable_name",
]

_BYTES = re.compile("[\udc80-\udcff]")
_IN_ELEMENT = re.compile("[%.:\udc80-\udcff]")
_IN_STAT = re.compile("[%\udc80-\udcff]")
_IN_LEAF = re.compile("[%:]")
_ESCAPE = re.compile("%([0-9A-F]{2})")
_ERRORS = "surrogateescape"
# Longer keys state no path: a tree then splits their names, which it does up to a depth.
_DEEPEST = 64


def variable_name(key: Sequence[str], stat: str | None = None) -> str:
    """Join the elements of a parameter's key, so that no two keys get one name."""
    if "" in key or _IN_ELEMENT.search("".join(key)) is not None:
        key = [_IN_ELEMENT.sub(_escaped, element) or "%" for element in key]
    name = ".".join(key)
    return name if stat is None else f"{name}:{_IN_STAT.sub(_escaped, stat)}"


def value_path(key: Sequence[str]) -> tuple[str, ...] | None:
    """Return the place of a parameter's value in a tree."""
    if len(key) > _DEEPEST:
        return None
    return (*key[:-1], _IN_LEAF.sub(_escaped, key[-1]))


def stat_path(path: tuple[str, ...] | None, stat: str) -> tuple[str, ...] | None:
    """Return the place of a statistic in a tree: beside its parameter."""
    return None if path is None else (*path[:-1], f"{path[-1]}:{stat}")


def key_and_stat(name: str) -> tuple[list[str], str | None] | None:
    """Take the name of a variable apart, as `variable_name` joined it."""
    joined, colon, escaped = name.partition(":")
    key = ["" if element == "%" else _unescaped(element) for element in joined.split(".")]
    stat = _unescaped(escaped) if colon else None
    if variable_name(key, stat) != name or not all(map(_comes_back, (*key, stat or ""))):
        return None
    return key, stat


def key_and_stat_at(path: Sequence[str]) -> tuple[list[str], str | None]:
    """Take a place in a tree apart, as `value_path` and `stat_path` made it."""
    own, colon, stat = path[-1].partition(":")
    return [*path[:-1], _unescaped(own)], stat if colon else None


def is_utf8(text: str) -> bool:
    """Return whether a text has no bytes that are not UTF-8."""
    return _BYTES.search(text) is None


def _escaped(match: re.Match[str]) -> str:
    # The low byte of a lone surrogate is the byte that it stands for.
    return f"%{ord(match[0]) & 0xFF:02X}"


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: bytes.fromhex(match[1]).decode("ascii", _ERRORS), text)


def _comes_back(text: str) -> bool:
    """Return whether reading gives the text back: not if its single bytes make up a character."""
    try:
        return text.encode("utf-8", _ERRORS).decode("utf-8", _ERRORS) == text
    except UnicodeEncodeError:
        return False
