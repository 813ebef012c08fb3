"""What the commands share: options, the files that they open, and how they print."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from xckpt.errors import CheckpointError, CheckpointWarning, deprecated_name, shown
from xckpt.formats import names
from xckpt.formatting import columns, printable, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pandas as pd
    import xarray as xr

    from xckpt.index import Index

__all__ = [
    "COLOURS",
    "DAMAGED",
    "FAILED",
    "Column",
    "FileInput",
    "calls_for_action",
    "complain",
    "engine_type",
    "ignore_option",
    "is_terminal",
    "json_option",
    "json_rows",
    "one_line",
    "pairs",
    "print_document",
    "print_findings",
    "print_table",
    "print_text",
    "read_names",
    "reading_options",
    "reading_options_beside_output",
    "require_columns",
    "require_rules",
    "usage_errors",
]

#: Exit statuses.
DAMAGED, FAILED = 1, 2

_DEEPEST_VALUE = 100
_LONGEST_INTEGER_BITS = 4096
_NARROWEST_NAME = 24
# One long name would make every row as wide.
_WIDEST_CELL = 120
_GAP = "  "
#: By severity.
COLOURS = {"error": "red", "warning": "yellow", "info": "blue"}

engine_type = click.Choice(names())

ignore_option = click.option(
    "--ignore",
    multiple=True,
    metavar="RULE[:GLOB]",
    help="With --findings, leave out a rule, perhaps for tensors that match only. May be repeated.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")

# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileInput:
    """What of a file is read, and how."""

    engine: str | None  # the format; None detects it from the content
    tensors: tuple[str, ...]  # globs of names; none for all
    storage_options: dict[str, Any] | None  # for fsspec

    @property
    def wanted(self) -> list[str] | None:
        """The globs, None for all tensors."""
        return list(self.tensors) or None

    def index(self, file: str) -> Index:
        """Return the index of a file, with the chosen tensors only."""
        from xckpt.labels.filters import select, suggest_filters
        from xckpt.opening import open_index

        source, index = open_index(file, self.engine, storage_options=self.storage_options)
        source.close()
        if not self.tensors:
            return index
        chosen = {name: index.tensors[name] for name in select(index.tensors, self.wanted)}
        if not chosen:
            hint = suggest_filters(index.tensors, list(self.tensors))
            globs = " ".join(map(shown, self.tensors))
            raise click.UsageError(f"--tensors {globs} matches no tensor in {file}{hint}")
        return replace(index, tensors=chosen)

    def dataset(self, file: str) -> xr.Dataset:
        """Open the chosen tensors of a file."""
        import xarray as xr

        index = self.index(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # they were shown just now
            return xr.open_dataset(
                file,
                engine=index.format,
                tensors=self.wanted,
                storage_options=self.storage_options,
            )


def reading_options(command: Callable[..., Any]) -> Any:
    """Add the options that make a `FileInput`, which the command gets as ``reading``."""
    # Hidden, until -o is --output in all commands.
    old_spelling = click.option(
        "-o", "old_storage_options", multiple=True, hidden=True, callback=_storage_options
    )
    return old_spelling(reading_options_beside_output(command))


def reading_options_beside_output(command: Callable[..., Any]) -> Any:
    """Add the same options to a command with the option ``-o, --output``."""

    @click.option(
        "--engine",
        type=engine_type,
        help="Format of the file; by default it is detected from the content.",
    )
    @click.option(
        "--tensors",
        multiple=True,
        metavar="GLOB",
        help="Only tensors whose names match. May be repeated.",
    )
    @click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_storage_options,
        help="Option for fsspec where FILE is a URL, such as anon=true. A VALUE that is JSON is "
        "parsed. May be repeated.",
    )
    @wraps(command)
    def with_reading(
        engine: str | None,
        tensors: tuple[str, ...],
        storage_options: dict[str, Any],
        old_storage_options: dict[str, Any] | None = None,
        **others: Any,
    ) -> Any:
        options = {**(old_storage_options or {}), **storage_options}
        return command(reading=FileInput(engine, tensors, options or None), **others)

    return with_reading


def _storage_options(
    _context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, Any]:
    """Read ``KEY=VALUE``; values that are JSON are parsed, and others stay as they are."""
    if texts and parameter.name == "old_storage_options":
        deprecated_name("-o KEY=VALUE", "--storage-option KEY=VALUE", since="0.2")
    values: dict[str, Any] = {}
    for key, text in pairs(texts).items():
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Split texts at their first equals sign."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise click.BadParameter(f"{text!r} is not KEY=VALUE")
        found[key.strip()] = value
    return found


# --- tables and messages -------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of a table."""

    title: str
    right: bool = False  # for numbers, which are aligned at their ends
    styles: Mapping[str, str] = {}  # colours of some values, in a terminal


def complain(message: str) -> None:
    """Print a message on standard error, with unprintable characters escaped."""
    message = _OPEN_IN_PYTHON.sub(r"'xckpt \1'", _IN_PYTHON.sub(_as_option, message))
    click.echo(f"xckpt: {printable(message)}", err=True)


# What messages advise, as somebody writes it in Python.
_OPEN_IN_PYTHON = re.compile(r"\bxckpt\.open\('([^']*)'\)")
_IN_PYTHON = re.compile(
    rf"\b(cast|names|engine|version)='(exact|allow|never|auto|[0-9.]+|{'|'.join(names())})'"
)


def _as_option(found: re.Match[str]) -> str:
    keyword, value = found.groups()
    return f"--option version={value}" if keyword == "version" else f"--{keyword} {value}"


def is_terminal() -> bool:
    """Return whether somebody sees standard error, where progress bars are."""
    return bool(sys.stderr and sys.stderr.isatty())


@contextmanager
def usage_errors(file: str = "", *, output: str = "") -> Iterator[None]:
    """Report what an argument cannot be, and an `output` that exists, as mistakes of the caller."""
    try:
        yield
    except CheckpointError:
        raise
    except FileExistsError as error:
        if not output:
            raise
        raise click.UsageError(f"{output} already exists; --overwrite replaces it") from error
    except ValueError as error:
        raise click.UsageError(f"{file}: {error}" if file else str(error)) from error


def one_line(error: BaseException) -> str:
    """Say what went wrong, as shells do."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__


def print_text(text: str) -> None:
    """Print lines on standard output, in the encoding that it has."""
    # click would take ASCII for a mistake, and print UTF-8 all the same.
    click.echo(text, file=sys.stdout)


def read_names(file: str) -> dict[str, str]:
    """Read new names of tensors by their old ones: a JSON object."""
    try:
        with open(file, encoding="utf-8") as opened:  # noqa: PTH123  of what a user typed
            names = json.load(opened)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--names {file}: not a JSON file: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(new, str) for new in names.values()):
        message = 'must be an object of old names with their new ones, such as {"old": "new"}'
        raise click.UsageError(f"--names {file}: {message}")
    return names


def require_columns(wanted: Iterable[str], known: Sequence[str]) -> None:
    """Refuse columns that do not exist."""
    for column in wanted:
        if column not in known:
            alike = get_close_matches(column, known, n=1)
            hint = f"; did you mean {alike[0]!r}?" if alike else ""
            raise click.UsageError(f"there is no column {column!r}, only {', '.join(known)}{hint}")


def require_rules(ignore: Sequence[str]) -> None:
    """Refuse rules of findings that do not exist."""
    from xckpt.health.examining import ignored_rules

    try:
        ignored_rules(ignore)
    except ValueError as error:
        raise click.UsageError(f"--{error}") from error


def calls_for_action(found: pd.DataFrame) -> bool:
    """Return whether anything was found that is more than information."""
    return bool((found["severity"] != "info").any())


def print_findings(found: pd.DataFrame) -> None:
    """Print a line for each finding."""
    for tensor, rule, _, severity, explanation in found.itertuples(index=False):
        kind = click.style(severity, COLOURS[severity], bold=True)
        name = shown(shortened(tensor, _WIDEST_CELL))
        text = shortened(printable(f"tensor {name}: {explanation}"), 2 * _WIDEST_CELL)
        print_text(f"  {kind}: {text} [{rule}]")


def print_table(head: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn for a terminal, else as plain text with all rows and columns."""
    cells = [[shortened(printable(text), _WIDEST_CELL) for text in row] for row in rows]
    titles = [column.title for column in head]
    widths = [max(map(columns, each)) for each in zip(titles, *cells, strict=True)]
    if sys.stdout.isatty():
        _draw(head, cells, widths)
        return
    for row in [titles, *cells]:
        line = []
        for column, text, width in zip(head, row, widths, strict=True):
            padding = " " * (width - columns(text))
            line.append(padding + text if column.right else text + padding)
        print_text(_GAP.join(line).rstrip())


def _draw(head: Sequence[Column], cells: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    # Columns that do not fit are left out; names get what is left.
    least = min(widths[0], _NARROWEST_NAME)
    count = len(widths)
    while count > 1 and least + sum(widths[1:count]) + len(_GAP) * (count - 1) > console.width:
        count -= 1
    room = max(least, console.width - sum(widths[1:count]) - len(_GAP) * (count - 1))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in head[:count]:
        justify: Any = "right" if column.right else "left"
        table.add_column(Text(column.title), justify=justify, no_wrap=True)
    for row in cells:
        styled = [
            Text(text, column.styles.get(text, ""))
            for column, text in zip(head[1:count], row[1:count], strict=True)
        ]
        # Rich would cut the end of a name, which tells most.
        table.add_row(Text(shortened(row[0], room)), *styled)
    console.print(table)
    if count < len(head):
        hidden = ", ".join(column.title for column in head[count:])
        complain(f"the terminal is too narrow for {hidden}")


# --- documents -----------------------------------------------------------------------------------


def print_document(document: Mapping[str, Any]) -> None:
    """Print one JSON document that any parser accepts, in ASCII."""
    print_text(json.dumps(_plain(document), allow_nan=False))


def json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as objects of JSON, which has null for what is not a number."""
    rows = zip(frame.index, frame.to_dict("records"), strict=True)
    # A number is not itself if it is NaN.
    return [
        {"name": name, **{k: v if v == v else None for k, v in row.items()}}  # noqa: PLR0124
        for name, row in rows
    ]


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
