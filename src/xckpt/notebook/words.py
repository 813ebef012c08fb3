"""The words of a summary that all its renderings share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xckpt.notebook.formatting import (
    binary_size,
    columns,
    counted,
    printable,
    short_count,
    shortened,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.notebook.folding import Pattern
    from xckpt.notebook.summary import Finding, Summary

__all__ = [
    "TIMES",
    "count_text",
    "findings_text",
    "format_text",
    "kind_text",
    "rest_text",
    "shape_text",
    "shapes_text",
    "value_text",
    "word",
]

TIMES = "×"
_WIDEST_SHAPE = 24
_WIDEST_KIND = 28
_WIDEST_WORD = 32
_WIDEST_VERSION = 16
_WIDEST_TENSOR = 72
_LONGEST_STRING = 40
_LONGEST_LIST = 40
_LONGEST_INTEGER_BITS = 256
_MOST_RULES = 4


def word(text: str, width: int = _WIDEST_WORD) -> str:
    """Make a word from a file printable and short."""
    return shortened(printable(text), width)


def format_text(summary: Summary) -> str:
    """Name the format and its version."""
    return f"{word(summary.format)} {word(summary.version, _WIDEST_VERSION)}".strip()


def count_text(pattern: Pattern) -> str:
    """Say how many tensors a pattern has, and of how many places if some are empty."""
    if pattern.grid > pattern.count:
        places = f"{pattern.grid:,}" if pattern.grid < 10**6 else short_count(pattern.grid)
        return f"{pattern.count:,} of {places}"
    return f"{pattern.count:,}"


def kind_text(pattern: Pattern) -> str:
    """Name the element type and the way of storing."""
    return word(f"{pattern.dtype} {pattern.storage}".rstrip(), _WIDEST_KIND)


def shapes_text(shapes: Sequence[tuple[int, ...]]) -> str:
    """Write the shape that all tensors of a pattern have, or how many there are."""
    return shape_text(shapes[0]) if len(shapes) == 1 else counted(len(shapes), "shape")


def shape_text(shape: tuple[int, ...]) -> str:
    """Write a shape."""
    return shortened(TIMES.join(map(str, shape)) or "scalar", _WIDEST_SHAPE)


def rest_text(patterns: Sequence[Pattern]) -> str:
    """Say what patterns that are not shown have in sum."""
    count = sum([pattern.count for pattern in patterns])
    size = binary_size(sum([pattern.nbytes for pattern in patterns]))
    if count == len(patterns):
        return f"{counted(count, 'more tensor')}, {size}"
    return f"{counted(len(patterns), 'more pattern')}: {counted(count, 'tensor')}, {size}"


def findings_text(findings: Sequence[Finding]) -> tuple[str, str]:
    """Write how many findings there are, and then what they are and where the first is."""
    if not findings:
        return "no findings", ""
    rules = Counter(finding.rule for finding in findings).most_common()
    listed = [f"{count:,} {word(rule).replace('_', ' ')}" for rule, count in rules[:_MOST_RULES]]
    listed += ["…"] if len(rules) > _MOST_RULES else []
    first = findings[0]
    where = word(first.tensor, _WIDEST_TENSOR)
    what = f"{word(first.rule).replace('_', ' ')} {first.value:.6g}"
    return counted(len(findings), "finding"), f"{', '.join(listed)}; first {where} ({what})"


# --- values of attributes ------------------------------------------------------------------------


def value_text(value: Any) -> str:
    """Write a value, or what it is where it is long."""
    if isinstance(value, str):
        quoted = repr(value[:_LONGEST_STRING])
        return quoted if len(value) <= _LONGEST_STRING else f"{quoted}…"
    if isinstance(value, bytes):
        return counted(len(value), "byte")
    if isinstance(value, Mapping):
        return f"{{{counted(len(value), 'key')}}}"
    if isinstance(value, list | tuple):
        return _list(value)
    return _scalar(value)


def _list(values: Sequence[Any]) -> str:
    if len(values) <= _LONGEST_LIST // 3 and all(
        isinstance(value, str | int | float | None) for value in values
    ):
        text = f"[{', '.join(map(value_text, values))}]"
        if columns(text) <= _LONGEST_LIST:
            return text
    return f"[{counted(len(values), 'item')}]"


def _scalar(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER_BITS:
        return f"integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    return type(value).__name__
