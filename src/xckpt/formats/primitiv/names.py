"""Names of variables and their places in a tree, from keys that are lists of any texts.

A byte of a key that is not UTF-8 is a lone surrogate in the text of its element, as Python's
error handler "surrogateescape" makes it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.formats.plan import WantedTensor

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
    """Return the place of a parameter's value in a tree; its statistics are next to it."""
    if len(key) > _DEEPEST:
        return None
    return (*key[:-1], _IN_LEAF.sub(_escaped, key[-1]))


def key_and_stat(tensor: WantedTensor) -> tuple[tuple[str, ...], str | None]:
    """Return the key of a parameter, and which of its statistics a tensor is."""
    if tensor.path:
        own, colon, stat = tensor.path[-1].partition(":")
        key = (*tensor.path[:-1], _unescaped(own))
        placed = key, stat if colon else None
        # Where both should agree and do not, the variable was renamed.
        if "key" not in tensor.attrs or variable_name(*placed) == tensor.name:
            return placed
    return _taken_apart(tensor.name) or (whole_key(tensor), None)


def whole_key(tensor: WantedTensor) -> tuple[str, ...]:
    """Return the key of a tensor whose name means nothing here."""
    return tuple(tensor.path or tensor.name.split("."))


def _taken_apart(name: str) -> tuple[tuple[str, ...], str | None] | None:
    """Take the name of a variable apart, as `variable_name` joined it."""
    joined, colon, escaped = name.partition(":")
    elements = joined.split(".")
    key = tuple(["" if element == "%" else _unescaped(element) for element in elements])
    stat = _unescaped(escaped) if colon else None
    if variable_name(key, stat) != name or not all(map(_comes_back, (*key, stat or ""))):
        return None
    return key, stat


def _escaped(match: re.Match[str]) -> str:
    # The low byte of a lone surrogate is the byte that it stands for.
    return f"%{ord(match[0]) & 0xFF:02X}"


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: bytes.fromhex(match[1]).decode("ascii", _ERRORS), text)


def _comes_back(text: str) -> bool:
    """Whether reading returns the text: not if its single bytes make up a character."""
    try:
        return text.encode("utf-8", _ERRORS).decode("utf-8", _ERRORS) == text
    except UnicodeEncodeError:
        return False
