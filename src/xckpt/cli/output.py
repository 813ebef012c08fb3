"""What commands print: documents for programs, tables for people, complaints on standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from xckpt.notebook.formatting import columns, printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

__all__ = [
    "Column",
    "complain",
    "figure",
    "is_terminal",
    "json_rows",
    "one_line",
    "print_document",
    "print_table",
    "print_text",
    "require_columns",
]

_DEEPEST_VALUE = 100
_LONGEST_INTEGER_BITS = 4096
_LARGEST_EXACT = 10.0**15
_NARROWEST_NAME = 24
# One long name would make every row as wide.
_WIDEST_CELL = 120
_GAP = "  "


class Column(NamedTuple):
    """A column of a table.

    Parameters
    ----------
    title : str
        Its head.
    right : bool
        Whether it is of numbers, which are aligned at their ends.
    styles : mapping of str to str
        Colours of some values, in a terminal.
    """

    title: str
    right: bool = False
    styles: Mapping[str, str] = {}


def complain(message: str) -> None:
    """Print a message on standard error, with everything unprintable escaped."""
    click.echo(f"xckpt: {printable(message)}", err=True)


def is_terminal() -> bool:
    """Return whether somebody sees standard error, where bars of progress are."""
    return bool(sys.stderr and sys.stderr.isatty())


def one_line(error: BaseException) -> str:
    """Say what went wrong, as shells do."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__


def print_text(text: str) -> None:
    """Print lines on standard output, in the encoding that it has."""
    # click would take ASCII for a mistake, and print UTF-8 all the same.
    click.echo(text, file=sys.stdout)


def figure(value: float) -> str:
    """Write a number with four significant digits."""
    if math.isnan(value):
        return "-"
    if float(value).is_integer() and abs(value) < _LARGEST_EXACT:
        return str(int(value))
    return f"{value:.4g}"


def require_columns(wanted: Iterable[str], known: Sequence[str]) -> None:
    """Refuse columns that there are not."""
    for column in wanted:
        if column not in known:
            raise click.UsageError(f"no column {column!r}; there are {', '.join(known)}")


# --- tables --------------------------------------------------------------------------------------


def print_table(head: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn for a terminal, else as plain text with all rows and columns."""
    cells = [[shortened(printable(text), _WIDEST_CELL) for text in row] for row in rows]
    if sys.stdout.isatty():
        _draw(head, cells)
    else:
        _write(head, cells)


def _write(head: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    widths = _widths(head, cells)
    for row in [[column.title for column in head], *cells]:
        padded = [
            " " * (width - columns(text)) + text if column.right else _padded(text, width)
            for column, text, width in zip(head, row, widths, strict=True)
        ]
        print_text(_GAP.join(padded).rstrip())


def _padded(text: str, width: int) -> str:
    return text + " " * (width - columns(text))


def _widths(head: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[int]:
    texts = zip([column.title for column in head], *cells, strict=True)
    return [max(map(columns, each)) for each in texts]


def _draw(head: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    widths = _widths(head, cells)
    shown, room = _fitting(widths, console.width)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in head[:shown]:
        justify: Any = "right" if column.right else "left"
        table.add_column(Text(column.title), justify=justify, no_wrap=True)
    for row in cells:
        styled = [
            Text(text, column.styles.get(text, ""))
            for column, text in zip(head[1:shown], row[1:shown], strict=True)
        ]
        # Rich would cut the end of a name, which tells most.
        table.add_row(Text(shortened(row[0], room)), *styled)
    console.print(table)
    if shown < len(head):
        hidden = ", ".join(column.title for column in head[shown:])
        complain(f"the terminal is too narrow for {hidden}")


def _fitting(widths: Sequence[int], width: int) -> tuple[int, int]:
    """Say how many columns fit into a width, and how much of it is left for the names."""
    least = min(widths[0], _NARROWEST_NAME)
    shown = len(widths)
    while shown > 1 and least + sum(widths[1:shown]) + len(_GAP) * (shown - 1) > width:
        shown -= 1
    return shown, max(least, width - sum(widths[1:shown]) - len(_GAP) * (shown - 1))


# --- documents -----------------------------------------------------------------------------------


def print_document(document: Mapping[str, Any]) -> None:
    """Print one JSON document that any reader of JSON takes, in ASCII."""
    print_text(json.dumps(_plain(document), allow_nan=False))


def json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as objects of JSON, which has null for what is not a number."""
    rows = zip(frame.index, frame.to_dict("records"), strict=True)
    return [
        {"name": name, **{key: _known(value) for key, value in row.items()}} for name, row in rows
    ]


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST_VALUE:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER_BITS:
        return hex(value)  # Python refuses to write more than 4300 digits
    return value if value is None or isinstance(value, str | int | float) else str(value)
