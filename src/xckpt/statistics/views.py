"""Results as blocks: a heading, then sentences about a large comparison, or rows of the table."""

from __future__ import annotations

from math import isnan
from posixpath import dirname
from typing import TYPE_CHECKING, Any

from xckpt.formatting import base_name, counted, printable, shape_text, shortened
from xckpt.index import paused_collector
from xckpt.notebook.changes import FEW_TENSORS, MOST_LINES, ChangeLine, TensorChange, change_lines
from xckpt.notebook.documents import Block, Cell, Field, Heading, Sentence, Share, Table, more
from xckpt.statistics.tables import (
    MAIN_COLUMNS,
    has_channels,
    has_groups,
    named_tensors,
    table,
    tensor_names,
)
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd
    import xarray as xr


_MOST_ROWS, _MOST_COLUMNS = 10, 12
_MOST_ATTRIBUTES, _WIDEST_CHANGE = 3, 160
_TABLE = ".ckpt.table()"
#: Kinds of columns other than numbers.
_KINDS = {
    **dict.fromkeys(("dtype", "shape", "outcome", "cause", "name_b", "other_names"), "word"),
    "status": "status",
    "explanation": "text",
}
#: Statistics of groups that have a bar, the first one that there is.
_DRAWN = ("rel_l2", "affected", "std", "spectral_norm")
_STEPS = 10**6  # of a bar
#: Numbers of tensors in a group that come first.
_COUNTS = ("affected", "changed", "only_a", "only_b")


def result_blocks(result: xr.Dataset) -> list[Block] | None:
    """Return the view of a result; None for another Dataset."""
    if has_groups(result):
        return _groups(result)
    kind = _kind_of(result)
    if kind is None:
        return None
    stated = [result.attrs.get("source"), result.attrs.get("compared_with")]
    files = [str(file).rstrip("/") for file in stated if file]
    names = [base_name(file) for file in files]
    if len(set(names)) < len(set(files)):
        names = [f"{base_name(dirname(file))}/{base_name(file)}" for file in files]
    title = " with ".join(names)
    noun = f"{kind} of" if title else kind
    unit = "channel" if has_channels(result) else "tensor"
    tensors = counted(len(tensor_names(result)), unit)
    if kind == "Histogram":
        return [Heading(title, noun, [tensors, f"{result.sizes['bin']} bins"])]
    if any(hasattr(data_of(variable), "dask") for variable, _ in named_tensors(result)):
        return [Heading(title, noun, [tensors, "not computed yet"])]
    frame = table(result)
    fact = f"{len(result['statistic'])} statistics"
    if "status" in frame:
        counts = frame["status"].value_counts()
        statuses = [f"{count:,} {status}" for status, count in counts.items() if count]
        fact = ", ".join(statuses) or "none in common"
    blocks: list[Block] = [Heading(title, noun, [f"{tensors}: {fact}"])]
    if conclusion := str(result.attrs.get("explanation", "")):
        blocks.append(Sentence("lead", conclusion))
    if attributes := attribute_sentence(result):
        blocks.append(Sentence("", attributes))
    if "status" in frame and len(frame) > FEW_TENSORS and not has_channels(result):
        lines = comparison_lines(frame, MOST_LINES - 3 * len(blocks[1:]))
        blocks += [Sentence("exception" if n.is_exception else "", str(n)) for n in lines]
        return [*blocks, Sentence("hint", f"every tensor: {_TABLE}")]
    columns = [name for name in MAIN_COLUMNS if name in frame] or list(frame)
    return [*blocks, frame_table(frame, columns[:_MOST_COLUMNS], _MOST_ROWS, where=_TABLE)]


def _groups(groups: xr.Dataset) -> list[Block]:
    """Return the view of a result of `by`."""
    keys = [str(dim) for dim in groups.dims if dim != "bin"]
    title, by_keys = base_name(str(groups.attrs.get("source", ""))), f"by {', '.join(keys)}"
    noun = "Groups of" if title else "Groups"
    if "bin" in groups.dims:
        return [Heading(title, noun, [f"{by_keys}: {groups.sizes['bin']} bins"])]
    frame = table(groups)
    counts = [name for name in ("tensors", *_COUNTS) if name in frame]
    columns = list(dict.fromkeys([*keys, *counts, *frame]))[:_MOST_COLUMNS]
    blocks: list[Block] = [
        Heading(title, noun, [f"{by_keys}: {counted(len(frame), 'group')}"]),
        frame_table(frame.reset_index(), columns, _MOST_ROWS, where=_TABLE, keys=keys),
    ]
    return [*blocks, *[Sentence("note", note) for note in group_notes(groups.attrs, keys)]]


def group_notes(attrs: Any, keys: Sequence[str]) -> list[str]:
    """Return which tensors are in no group, as sentences."""
    notes = []
    if "outside" in attrs:
        lacking = " or ".join(attrs.get("lacking", keys)) or "a value"
        notes.append(f"in no group, without {lacking}: {attrs['outside']}")
    return [*notes, *([attrs["unknown"]] if "unknown" in attrs else [])]


def frame_table(
    frame: pd.DataFrame,
    columns: Iterable[str],
    most: int | None = None,
    *,
    where: str = "",
    keys: Sequence[str] = (),
    wanted: Sequence[str] = (),
) -> Table:
    """Return the first rows of a table of tensors, or of groups by keys, as a block."""
    # `where` is the call that returns the other rows, and `wanted` lists columns to show rather
    # than others.
    top = frame if most is None else frame.iloc[:most]
    fields = [] if keys else [Field("tensor", "name")]
    cells: list[Sequence[Cell]] = [] if keys else [[str(name) or '""' for name in top.index]]
    drawn = next((name for name in _DRAWN if name in frame), "") if keys else ""
    for name in columns:
        values = top[name].tolist()
        if name in keys:
            is_word = bool(fields) or all(isinstance(value, int) for value in values)
            fields.append(Field(name, "word" if is_word else "name"))
            values = list(map(str, values))
        else:
            fields.append(Field(name, _KINDS.get(name, "number")))
            if name == "shape":
                values = [shape_text(shape) for shape in values]
        cells.append(values)
        if name == drawn:
            fields.append(Field("", "bar"))
            cells.append(_shares(values))
    omitted = more(len(frame) - len(top), where=where)
    hidden = len(set(map(str, frame)) - {field.title for field in fields}) if where else 0
    return Table(fields, list(zip(*cells, strict=True)), omitted, wanted=wanted, hidden=hidden)


def _shares(values: Sequence[float]) -> list[Cell]:
    """Return numbers as shares of the largest one."""
    largest = max([v for v in values if not isnan(v)], default=0.0)
    if not 0 < largest < float("inf"):
        return [None] * len(values)
    return [None if isnan(v) else Share(int(v / largest * _STEPS), _STEPS) for v in values]


def comparison_lines(frame: pd.DataFrame, most: int = MOST_LINES) -> list[ChangeLine]:
    """Summarise the table of a comparison in a few sentences, exceptions first."""
    with paused_collector():
        explained = "outcome" in frame
        rows = frame[~represented(frame)] if explained else frame
        missing: list[Any] = [float("nan")] * len(rows)
        sizes = rows["rel_l2"].tolist() if "rel_l2" in rows else missing
        spoilt = rows[[name for name in ("nan", "inf") if name in rows]].sum(axis=1) > 0
        statuses = rows["status"].astype(str).where(~spoilt, "not_finite").tolist()
        if not explained:
            kinds = ["explained" if status == "close" else status for status in statuses]
            causes = ["close" if status == "close" else "" for status in statuses]
            compared = list(map(TensorChange, rows.index, kinds, sizes, causes))
            return change_lines(compared, most)
        columns = [rows[name] for name in ("outcome", "cause", "offset", "scale", "heads")]
        compared = []
        for name, status, size, outcome, cause, *facts in zip(
            rows.index, statuses, sizes, *columns, strict=True
        ):
            kind, text = status, ""
            if outcome == "explained":
                kind, text = "explained", "" if cause == "equal" else cause_text(cause, *facts)
            elif outcome == "changed":
                # Equal tensors have changed only if an adapter should have changed them.
                kind = {"same": "not_merged", "not_finite": "not_finite"}.get(status, "changed")
                text = "" if cause == "unknown" else cause
                if status == "close":
                    kind, text = "explained", "close"
            compared.append(TensorChange(name, kind, size, text))
        return change_lines(compared, most)


def attribute_sentence(result: xr.Dataset, rest: str = '.attrs["attributes"]') -> str:
    """Summarise the attributes that differ in a comparison; empty if none do."""
    changes = list(map(str, result.attrs.get("attributes", ())))
    if not changes:
        return ""
    texts = [shortened(printable(change), _WIDEST_CHANGE) for change in changes[:_MOST_ATTRIBUTES]]
    verb = "attribute differs" if len(changes) == 1 else "attributes differ"
    texts += filter(None, [more(len(changes) - len(texts), where=rest)])
    return f"{len(changes):,} {verb}: {'; '.join(texts)}"


def cause_text(cause: str, offset: float, scale: float, heads: float) -> str:
    """Write the causes of a difference with their numbers; NaN for a missing one."""
    facts = [f"{offset:+.4g}"] if offset == offset else []  # noqa: PLR0124  NaN
    facts += [f"* {scale:.4g}"] if scale == scale else []  # noqa: PLR0124  NaN
    facts += [counted(int(heads), "head")] if heads == heads else []  # noqa: PLR0124  NaN
    return f"{cause} ({', '.join(facts)})" if facts else cause


def represented(frame: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows of an explained comparison the row of another name already covers."""
    # A matched pair of different names has two rows. The row of `a` represents both.
    is_of_b = frame["status"] == "only_b"
    partners = {name for names in frame["other_names"][~is_of_b] for name in names.split(", ")}
    return is_of_b & frame.index.isin(partners)


def _kind_of(result: xr.Dataset) -> str | None:
    axis = next((dim for dim in ("statistic", "bin") if dim in result.dims), None)
    variables = [v for name, v in result.variables.items() if name not in result.coords]
    if axis is None or axis not in result.coords or any(axis not in v.dims for v in variables):
        return None
    if axis == "bin":
        return "Histogram" if "bin_left" in result.coords else None
    names = result[axis].to_numpy().tolist()
    if "status" in names:
        return "Comparison"
    return "Spectrum" if {"spectral_norm", "stable_rank"} & set(names) else "Statistics"
