"""Figures and file-borne text for the eye: sizes, counts, shares, and names made safe to print."""

from __future__ import annotations

import unicodedata
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "base_name",
    "binary_size",
    "columns",
    "counted",
    "printable",
    "share",
    "short_count",
    "shortened",
]

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COUNT_UNITS = ("", "K", "M", "B", "T")
_LONGEST_FILE_NAME = 80


def printable(text: str) -> str:
    r"""Escape what would not show as itself: control, bidirectional and other invisible characters.

    Parameters
    ----------
    text : str
        Any text, also with lone surrogates.

    Returns
    -------
    str
        The same text, or one with backslash escapes.

    Examples
    --------
    >>> print(printable("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else _escape(c) for c in text])


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def columns(text: str) -> int:
    """Count the columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    return len(text) + sum([unicodedata.east_asian_width(c) in "WF" for c in text])


def shortened(text: str, width: int) -> str:
    """Replace the middle of a text that is too wide by an ellipsis."""
    if columns(text) <= width:
        return text
    if width < 1:
        return ""
    tail = width // 2
    head = width - 1 - tail
    return f"{_fitting(text, head)}…{_fitting(text[::-1], tail)[::-1]}"


def _fitting(text: str, width: int) -> str:
    text = text[:width]
    while columns(text) > width:
        text = text[:-1]
    return text


def base_name(source: str) -> str:
    """Return the last component of a path or URL: no folders, hosts, credentials or signatures."""
    if "://" in source:
        source = _url_path(source)
    name = source.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return shortened(printable(name), _LONGEST_FILE_NAME)


def _url_path(source: str) -> str:
    """Return host and path of the first URL in a chain, without what may be secret."""
    url = next(link for link in source.split("::") if "://" in link)
    location = url.partition("://")[2]
    for mark in "?#":
        location = location.partition(mark)[0]
    host, slash, path = location.partition("/")
    return host.rpartition("@")[2] + slash + path


def binary_size(nbytes: int) -> str:
    """Write a number of bytes with a binary unit."""
    return _scaled(nbytes, 1024, _BINARY_UNITS)


def short_count(count: int) -> str:
    """Write a large number as people say numbers of parameters."""
    return _scaled(count, 1000, _COUNT_UNITS)


def _scaled(value: int, base: int, units: Sequence[str]) -> str:
    if value < base:
        return f"{value} {units[0]}".rstrip()
    # Integers throughout: a hostile file can claim more elements than a float can hold.
    divisor = 1
    for unit in units[1:]:
        divisor *= base
        tenths = (value * 10 + divisor // 2) // divisor
        if tenths < base * 10:
            return f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{Decimal(value):.1e} {units[0]}".rstrip()


def share(part: int, whole: int) -> str:
    """Write a part of a whole as a percentage that never rounds to nothing or everything."""
    if not whole:
        return ""
    if part in (0, whole):
        return "100 %" if part else "0 %"
    tenths = (part * 2000 + whole) // (2 * whole)
    if tenths == 0:
        return "<0.1 %"
    return f"{tenths // 10}.{tenths % 10} %" if tenths < 1000 else ">99.9 %"


def counted(count: int, noun: str) -> str:
    """Write a number of things with the noun in its right form."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
