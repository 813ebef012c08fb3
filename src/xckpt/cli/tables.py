"""Tables of tensors and of groups, with the rows and columns that a user asks for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

from xckpt.cli.common import complain, json_rows, print_blocks, print_document, usage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

__all__ = ["TableInput"]

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
