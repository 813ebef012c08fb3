"""Groups of tensors, for ``--by`` of ``xckpt stats``, ``spectrum`` and ``compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.cli.common import (
    complain,
    json_rows,
    print_blocks,
    print_document,
    usage_errors,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

__all__ = ["grouped_table", "print_groups"]

# Attributes of groups that the document has.
_NOTES = ("outside", "lacking", "missing", "unknown")


def grouped_table(
    result: Any, keys: Sequence[str], order: dict[str, Any], **options: Any
) -> pd.DataFrame:
    """Return a result by layer, role, ..., with a row for each group that has tensors."""
    # The attributes of the groups, and "by" with the keys, are attributes of the table.
    with usage_errors():
        grouped = result.ckpt.by(*keys, **options)
        frame: pd.DataFrame = grouped.ckpt.table(**order).reset_index()
    frame.attrs = {"by": list(keys), **grouped.attrs}
    return frame


def print_groups(
    frame: pd.DataFrame,
    chosen: Sequence[str],
    document: dict[str, Any] | None,
    most_wanted: Sequence[str] = (),
) -> None:
    """Print groups as a table of the chosen columns, or as a part of a JSON document."""
    from xckpt.statistics import frame_table, group_notes

    notes = {key: frame.attrs[key] for key in _NOTES if key in frame.attrs}
    keys = frame.attrs["by"]
    if document is not None:
        print_document({**document, "by": keys, "groups": json_rows(frame, index=None), **notes})
        return
    columns = [*keys, "tensors", *[n for n in chosen if n in frame and n not in {*keys, "tensors"}]]
    print_blocks([frame_table(frame, columns, keys=keys, wanted=most_wanted)])
    for note in group_notes(notes, keys):
        complain(note)
