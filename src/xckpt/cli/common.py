"""Common parts of the commands: options, input files, tables, messages and JSON."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from xckpt.errors import CheckpointError, CheckpointWarning, shown
from xckpt.formats import names
from xckpt.formatting import printable
from xckpt.index import Index, StoredList

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from xckpt.datasets.tensors import OpenTensors
    from xckpt.notebook.documents import Block
    from xckpt.storage import Source

#: Exit statuses.
DAMAGED, FAILED = 1, 2

_DEEPEST_VALUE = 100
_LONGEST_INTEGER_BITS = 4096
# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileInput:
    """The options for reading a file: its format, a selection of tensors, storage options."""

    engine: str | None  # the format; None detects it from the content
    storage_options: dict[str, Any] | None  # for fsspec
    tensors: tuple[str, ...] = ()  # globs of names; empty for all tensors
    exclude: tuple[str, ...] = ()
    only: str | None = None
    progress: bool | None = None
    cache: bool = True

    @property
    def scanning(self) -> dict[str, Any]:
        """The options of functions that read elements."""
        # Progress bars appear on standard error.
        is_terminal = bool(sys.stderr and sys.stderr.isatty())
        progress = is_terminal if self.progress is None else self.progress
        return {"progress": progress, "cache": self.cache}

    @property
    def selection(self) -> dict[str, Any]:
        """The options of `xckpt.options.SelectOptions`."""
        globs = list(self.tensors) or None
        return {"tensors": globs, "exclude": list(self.exclude) or None, "only": self.only}

    def index(self, file: str, *, silent: bool = False) -> Index:
        """Return the index of a file with the selected tensors."""
        return self.indexes(file, silent=silent)[1]

    def indexes(self, file: str, *, silent: bool = False) -> tuple[Index, Index]:
        """Return the index of a file, and the one with the selected tensors."""
        source, index = self._open(file, silent=silent)
        source.close()
        return index, self._selected(file, index)

    def contents(self, file: str, keys: Sequence[str] | None = None) -> OpenTensors:
        """Open the selected tensors of a file, or of a run if the keys of groups have its steps."""
        from xckpt.datasets.options import OpenOptions
        from xckpt.datasets.tensors import FileTensors, OpenTensors
        from xckpt.opening.steps import has_steps
        from xckpt.storage import Location

        if "step" in (keys or ()):
            return OpenTensors(self.steps([file]))
        try:
            source, index = self._open(file)
        except IsADirectoryError as error:
            if keys is not None and has_steps(Location.of(file, self.storage_options)):
                by = ",".join(["step", *keys])
                raise click.UsageError(f"{file} has several checkpoints: --by {by}") from error
            raise
        self._selected(file, index)
        options = OpenOptions(**self.selection, storage_options=self.storage_options)
        return FileTensors(source, index, options)

    def _open(self, file: str, *, silent: bool = False) -> tuple[Source, Index]:
        from xckpt.opening import open_index

        return open_index(
            file,
            self.engine,
            storage_options=self.storage_options,
            silent=silent,
            missing="ignore",
        )

    def _selected(self, file: str, index: Index) -> Index:
        """Return the index of the selected tensors; raise an error in usage if there are none."""
        from xckpt.labels.filters import combined, select, suggest_filters, warn_of_exclusions
        from xckpt.structure import structure_of

        chosen = combined(**self.selection, structures=lambda: [structure_of(index)])
        if chosen is None:
            return index
        warn_of_exclusions(index.tensors, chosen)
        selected = {name: index.tensors[name] for name in select(index.tensors, chosen)}
        if not selected:
            hint = suggest_filters(index.tensors, list(self.tensors))
            globs = " ".join(map(shown, self.tensors or ("*",)))
            raise click.UsageError(f"--tensors {globs} matches no tensor in {file}{hint}")
        return replace(index, tensors=selected)

    def steps(self, files: Sequence[str]) -> xr.Dataset:
        """Open the steps of a training run: a folder, a glob, or several files."""
        from xckpt.opening.steps import open_steps

        return open_steps(
            files[0] if len(files) == 1 else list(files),
            self.engine,
            **self.selection,
            storage_options=self.storage_options,
        )

    def attrs(self, file: str) -> dict[str, Any]:
        """Return the attributes of a file, long lists included."""
        from xckpt.arrays import read_later
        from xckpt.storage.source import sources_of

        source, index = self._open(file)
        with closing(source):
            attrs = read_later(index.attrs, sources_of(source, index.shards))
            return {
                key: value.tolist() if isinstance(index.attrs[key], StoredList) else value
                for key, value in attrs.items()
            }

    def dataset(self, file: str) -> xr.Dataset:
        """Open the selected tensors of a file as a Dataset."""
        import xarray as xr

        index = self.index(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # `index` has shown them
            return xr.open_dataset(
                file,
                engine=index.format,
                **self.selection,
                storage_options=self.storage_options,
            )


# --- messages ------------------------------------------------------------------------------------


def complain(message: str) -> None:
    """Print a message to standard error, with unprintable characters escaped."""
    message = _OPEN_IN_PYTHON.sub(r"'xckpt \1'", _IN_PYTHON.sub(_as_option, message))
    message = _STORAGE_OPTIONS.sub(_as_storage_options, message)
    message = message.replace("skip_unreadable=True", "--skip-unreadable")
    message = message.replace("explain=True", "--explain")
    message = message.replace("dtype=, ds.drop_encoding() writes", "--dtype, xckpt writes")
    message = message.replace("pass step=[...]", "rename it, as checkpoint-500")
    message = _STEPS_IN_PYTHON.sub(r"'xckpt steps \1'", message)
    click.echo(f"xckpt: {printable(message)}", err=True)


# Python code in the advice of messages, to be replaced by options of the command line.
_OPEN_IN_PYTHON = re.compile(r"\bxckpt\.open\('([^']*)'\)")
_STEPS_IN_PYTHON = re.compile(r"\bxckpt\.open_steps\('([^']*)'\)")
_IN_PYTHON = re.compile(
    rf"\b(cast|names|engine|version)='(exact|allow|never|auto|[0-9.]+|{'|'.join(names())})'"
)

_STORAGE_OPTIONS = re.compile(r"\bstorage_options=\{(.*?)\}")
_STORAGE_OPTION = re.compile(r"'(\w+)': '?([^',]+)'?(?:, )?")


def _as_storage_options(match: re.Match[str]) -> str:
    options = dict(_STORAGE_OPTION.findall(match[1]))
    return " ".join(
        f"--storage-option {key}={'true' if value == 'True' else value}"
        for key, value in options.items()
    )


def _as_option(match: re.Match[str]) -> str:
    keyword, value = match.groups()
    return f"--option version={value}" if keyword == "version" else f"--{keyword} {value}"


@contextmanager
def usage_errors(file: str = "", *, output: str = "") -> Iterator[None]:
    """Report invalid arguments, and an `output` that exists, as errors in usage."""
    try:
        yield
    except CheckpointError:
        raise
    except FileExistsError as error:
        if not output:
            raise
        raise click.UsageError(f"{output} already exists; replace it with --overwrite") from error
    except ValueError as error:
        raise click.UsageError(f"{file}: {error}" if file else str(error)) from error


def one_line(error: BaseException) -> str:
    """Return the message of an error in the style of shells."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__


def print_text(text: str) -> None:
    """Print lines to standard output, in its own encoding."""
    # click replaces ASCII by UTF-8 unless the file is given.
    click.echo(text, file=sys.stdout)


def print_blocks(blocks: Sequence[Block]) -> None:
    """Print blocks: laid out in a terminal, or in ``COLUMNS``, otherwise with all columns."""
    from xckpt.notebook.text import UNLIMITED, to_text

    if not blocks:
        return
    stated = os.environ.get("COLUMNS", "")
    width = int(stated) if stated.isdecimal() and int(stated) else UNLIMITED
    width = get_terminal_size().columns if sys.stdout.isatty() else width
    print_text(to_text(blocks, width, is_terminal=sys.stdout.isatty()))


def renaming(
    rename: tuple[tuple[str, str], ...], names: str | None, *, can_match: bool = True
) -> Any:
    """Return the keyword `names` from --rename and --names, which may be auto if it can match."""
    if names is not None:
        if rename:
            raise click.UsageError("--rename and --names exclude each other")
        return names if can_match and names == "auto" else _read_names(names)
    for pattern, _ in rename:
        try:
            re.compile(pattern)
        except re.error as error:
            reason = f"--rename: {pattern!r} is not a regular expression: {error}"
            hint = "; it takes REGEX NEW, where .* stands for the * of globs"
            raise click.UsageError(reason + hint) from error
    return rename or None


def _read_names(file: str) -> dict[str, str]:
    """Read a JSON object that maps old names of tensors to new ones."""
    try:
        with open(file, encoding="utf-8") as opened:  # noqa: PTH123  a path that a user typed
            names = json.load(opened)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--names {file}: not a JSON file: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(new, str) for new in names.values()):
        message = 'must be an object that maps old names to new ones, such as {"old": "new"}'
        raise click.UsageError(f"--names {file}: {message}")
    return names


def require_rules(ignore: Sequence[str]) -> None:
    """Raise an error in usage for a rule of findings that does not exist."""
    if not ignore:
        return
    from xckpt.health.examining import ignored_rules

    try:
        ignored_rules(ignore)
    except ValueError as error:
        raise click.UsageError(f"--{error}") from error


def calls_for_action(findings: pd.DataFrame) -> bool:
    """Return whether any finding is an error or a warning."""
    return bool((findings["severity"] != "info").any())


# --- documents -----------------------------------------------------------------------------------


def print_document(document: Mapping[str, Any]) -> None:
    """Print one strict JSON document in ASCII."""
    print_text(json_text(document))


def json_text(value: Any) -> str:
    """Return a value as strict JSON in ASCII."""
    return json.dumps(_plain(value), allow_nan=False)


def without_nan(value: Any) -> Any:
    """Return a value for JSON, None for NaN."""
    return value if value == value else None  # noqa: PLR0124  NaN is not equal to itself


def json_rows(frame: pd.DataFrame, *, index: str | None = "name") -> list[dict[str, Any]]:
    """Return the rows of a table as JSON objects, with null for NaN; `index` names its index."""
    records = [
        {key: without_nan(value) for key, value in row.items()} for row in frame.to_dict("records")
    ]
    if index is None:
        return records
    return [{index: label, **row} for label, row in zip(frame.index, records, strict=True)]


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


# --- tables ---------------------------------------------------------------------------------------

_MOST_ROWS = 20
# Attributes of groups that the document has.
_NOTES = ("outside", "lacking", "missing", "unknown")


@dataclass(frozen=True, slots=True)
class TableInput:
    """The options for a table: its columns, its rows, and the keys of groups."""

    columns: Sequence[str] | None
    sort: str | None
    ascending: bool | None
    limit: int | None
    keys: Sequence[str]  # empty for a row for each tensor

    def choose(
        self, existing: Sequence[str], default: Iterable[str], extra: Iterable[str] = ()
    ) -> list[str]:
        """Return the columns to print, with the one to sort by, before a pass of an hour."""
        from xckpt.statistics.tables import NAMES_OF_ROWS, column_meant

        listed = existing if self.columns == ["all"] else self.columns or default
        sort = [self.sort] if self.sort and self.sort not in self.keys else []
        chosen = [n for n in dict.fromkeys([*listed, *extra, *sort]) if n not in NAMES_OF_ROWS]
        for column in chosen:
            if column not in existing:
                similar = get_close_matches(column, existing, n=1)
                hint = f"; did you mean {similar[0]!r}?" if similar else ""
                hint = column_meant(column) if "nbytes" in existing and not similar else hint
                reason = f"there is no column {column!r}, only {', '.join(existing)}"
                raise click.UsageError(reason + hint)
        return chosen

    def arrange(self, frame: pd.DataFrame, limit: int | None = None) -> pd.DataFrame:
        """Return the rows of a table in their order."""
        from xckpt.statistics.tables import arranged

        return arranged(frame, sort=self.sort, ascending=self.ascending, limit=limit)

    @property
    def most(self) -> int | None:
        """Number of rows to print; in a terminal twenty unless the user states another."""
        return _MOST_ROWS if self.limit is None and sys.stdout.isatty() else self.limit

    def print(self, frame: pd.DataFrame, columns: Sequence[str], preferred: Sequence[str]) -> None:
        """Print columns of a table, in a narrow terminal the preferred ones."""
        from xckpt.statistics import frame_table

        top = self.arrange(frame, self.most)
        print_blocks([frame_table(top, columns, wanted=[self.sort or "", *preferred])])

    def print_groups(
        self,
        result: Any,
        columns: Iterable[str] | None,
        preferred: Sequence[str],
        document: dict[str, Any] | None,
        **options: Any,
    ) -> None:
        """Print columns, by default all, of the groups that have tensors, or a JSON document."""
        from xckpt.statistics import frame_table, group_notes

        keys = list(self.keys)
        with usage_errors():
            groups = result.ckpt.by(*keys, **options)
            frame = self.arrange(groups.ckpt.table(), self.limit).reset_index()
        notes = {key: groups.attrs[key] for key in _NOTES if key in groups.attrs}
        if document is not None:
            rows = json_rows(frame, index=None)
            print_document({**document, "by": keys, "groups": rows, **notes})
            return
        columns = frame if columns is None else columns
        listed = [n for n in dict.fromkeys([*keys, "tensors", *columns]) if n in frame]
        print_blocks([frame_table(frame, listed, keys=keys, wanted=[self.sort or "", *preferred])])
        for note in group_notes(notes, keys):
            complain(note)
