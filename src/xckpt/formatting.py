"""Numbers, shapes, values and names from a file: short text that is safe to print, and order."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

TIMES = "×"
#: The element type of a tensor in a file that is missing.
UNKNOWN = "unknown"

_NUMBERS = re.compile("([0-9]+)")
_COUNT, _LARGEST_COUNT = re.compile(r"(\d{1,13})([kK]?)"), 1 << 40
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kmgt]?)(?P<binary>i?)b?", re.IGNORECASE)
_PARENTHESES = re.compile(r"\([^()]{,60}\)")
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COUNT_UNITS = ("", "K", "M", "B", "T")
_LONGEST_FILE_NAME = 80
_FEWEST_BYTES = 10**6  # of a size that has no unit
_WIDEST_WORD = 32
_WIDEST_SHAPE = 24
_LONGEST_STRING = 40
_LONGEST_LIST = 40
_LONGEST_INTEGER_BITS = 256
_LARGEST_EXACT = 10.0**15
_NARROWEST_LINE, _WIDEST_LINE = 80, 120


def printable(text: str) -> str:
    """Escape unprintable characters, such as control and bidirectional characters."""
    if text.isprintable():
        return text
    return "".join(
        [c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text]
    )


def columns(text: str) -> int:
    """Return the width of a text in a terminal, in columns."""
    if text.isascii():
        return len(text)
    return len(text) + sum([unicodedata.east_asian_width(c) in "WF" for c in text])


def line_width() -> int:
    """Return the width of the terminal, limited to 80 to 120 columns; 120 without a terminal."""
    width = get_terminal_size((_WIDEST_LINE, 24)).columns
    return max(_NARROWEST_LINE, min(width, _WIDEST_LINE))


def wrapped(text: str, width: int, most_lines: int, indent: str = "  ") -> list[str]:
    """Break a sentence between words into lines; all but the first have the indent."""
    # Parentheses, often arguments in code, stay in one line. Printable text has no \xa0.
    text = _PARENTHESES.sub(lambda match: match[0].replace(" ", "\xa0"), text)
    limits: Any = {"max_lines": most_lines, "placeholder": " …"}
    lines = wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, **limits)
    # `wrap` counts wide characters once.
    return [shortened(line.replace("\xa0", " "), width) for line in lines]


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
        url = next(link for link in source.split("::") if "://" in link)
        location = url.partition("://")[2].partition("?")[0].partition("#")[0]
        host, slash, path = location.partition("/")
        source = host.rpartition("@")[2] + slash + path
    name = source.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return shortened(printable(name), _LONGEST_FILE_NAME)


def natural_key(text: str) -> tuple[Any, ...]:
    """Return a key that sorts numbers in texts by their values, however many digits they have."""
    pieces: list[tuple[int, str, str]] = []
    for position, piece in enumerate(_NUMBERS.split(text)):
        digits = piece.lstrip("0")
        pieces.append((len(digits), digits, piece) if position % 2 else (-1, piece, ""))
    return tuple(pieces)


def binary_size(nbytes: int) -> str:
    """Write a number of bytes with a binary unit."""
    return _scaled(nbytes, 1024, _BINARY_UNITS)


def parse_size(name: str, value: Any) -> int:
    """Parse a size in bytes, given as a number or as text such as ``"5GB"``."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    nbytes = value
    if match is not None:
        base = 1024 if match["binary"] else 1000
        nbytes = int(float(match["number"]) * base ** " kmgt".index(match["unit"].lower() or " "))
    if type(nbytes) is not int or nbytes < 1:
        expected = "a number of bytes, or a text such as '5GB' or '500MiB'"
        raise ValueError(f"{name} must be {expected}, not {value!r}")
    if match is not None and value[-1].isdigit() and nbytes < _FEWEST_BYTES:
        raise ValueError(f"{name}={value} has no unit: did you mean '{value}GB'?")
    return nbytes


def parse_count(name: str, value: Any) -> int:
    """Parse a number of tokens, given as a number or as text such as ``"8k"``."""
    match = _COUNT.fullmatch(value) if isinstance(value, str) else None
    return checked_count(
        name, value if match is None else int(match[1]) * (1024 if match[2] else 1)
    )


def checked_count(name: str, count: Any) -> int:
    """Return a positive number of things; raise `ValueError` for anything else."""
    if type(count) is not int or not 0 < count <= _LARGEST_COUNT:
        raise ValueError(f"{name} must be a number from 1 to {_LARGEST_COUNT}, not {count!r}")
    return count


def short_count(count: int) -> str:
    """Write a large number with a unit of thousands, as is usual for parameters: ``7.2 B``."""
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


def share(part: int, total: int) -> str:
    """Write a part of a whole as a percentage that never rounds to nothing or everything."""
    if not total:
        return ""
    if part in (0, total):
        return "100 %" if part else "0 %"
    tenths = (part * 2000 + total) // (2 * total)
    if tenths == 0:
        return "<0.1 %"
    return f"{tenths // 10}.{tenths % 10} %" if tenths < 1000 else ">99.9 %"


def counted(count: int, noun: str) -> str:
    """Write a number of things with the noun in its right form."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def figure(value: float, digits: int = 4) -> str:
    """Write a number with four significant digits, but a whole number in full."""
    if math.isnan(value):
        return "-"
    if float(value).is_integer() and abs(value) < _LARGEST_EXACT:
        return str(int(value))
    return f"{value:.{digits}g}"


def word(text: str, width: int = _WIDEST_WORD) -> str:
    """Make a word from a file printable and short."""
    return shortened(printable(text), width)


def shape_text(shape: tuple[int, ...], dtype: str = "") -> str:
    """Write a shape; "unknown" for a tensor in a missing file, whose type is unknown as well."""
    if not shape and dtype == UNKNOWN:
        return UNKNOWN
    return shortened(TIMES.join(map(str, shape)) or "scalar", _WIDEST_SHAPE)


def value_text(value: Any) -> str:
    """Write the value of an attribute; of a long value, its kind and length."""
    if isinstance(value, str):
        quoted = repr(value[:_LONGEST_STRING])
        return quoted if len(value) <= _LONGEST_STRING else f"{quoted}…"
    if isinstance(value, bytes):
        return counted(len(value), "byte")
    if isinstance(value, Mapping):
        return f"{{{counted(len(value), 'key')}}}"
    if isinstance(value, list | tuple):
        simple = str | int | float | None
        if len(value) <= _LONGEST_LIST // 3 and all(isinstance(item, simple) for item in value):
            text = f"[{', '.join(map(value_text, value))}]"
            if columns(text) <= _LONGEST_LIST:
                return text
        return f"[{counted(len(value), 'item')}]"
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER_BITS:
        return f"integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    if hasattr(value, "__len__"):
        return f"[{counted(len(value), 'item')}]"
    return type(value).__name__
