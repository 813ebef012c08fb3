"""Results as short texts and as HTML: a heading, then sentences or the first rows of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from xckpt.formatting import (
    base_name,
    counted,
    figure,
    line_width,
    printable,
    shortened,
    wrapped,
)
from xckpt.index import paused_collector
from xckpt.notebook.changes import FEW_TENSORS, MOST_LINES, TensorChange, change_lines
from xckpt.notebook.html import sentences as sentences_html
from xckpt.notebook.html import table as table_html
from xckpt.notebook.short_names import apart
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
    import pandas as pd
    import xarray as xr

    from xckpt.notebook.changes import ChangeLine

_MOST_ROWS, _MOST_COLUMNS = 10, 12
_MOST_LINES = 6  # of a heading or a conclusion
_MOST_ATTRIBUTES, _WIDEST_CHANGE = 3, 160
_TABLE = ".ckpt.table()"
_INDENT = "  "


class ResultView(NamedTuple):
    """A result as it is shown: lines for a large comparison, otherwise rows of the table."""

    # `heading` is printable; `conclusion` and `rows` may contain names from files.
    heading: str
    conclusion: str = ""
    lines: tuple[ChangeLine, ...] = ()
    rows: pd.DataFrame | None = None
    attributes: str = ""  # that differ; may contain names from files
    rest: str = ""  # the call that returns all tensors or groups

    @classmethod
    def of(cls, result: xr.Dataset) -> Self | None:
        """Return the view of a result; None for another Dataset."""
        if has_groups(result):
            return cls._of_groups(result)
        kind = _kind_of(result)
        if kind is None:
            return None
        files = [result.attrs.get("source"), result.attrs.get("compared_with")]
        file_names = " with ".join(base_name(str(file)) for file in files if file)
        head = f"<{' of '.join(filter(None, (kind, file_names)))}>  {{}}"
        names = tensor_names(result)
        tensors = counted(len(names), "tensor")
        if kind == "Histogram":
            return cls(head.format(f"{tensors} · {result.sizes['bin']} bins"))
        if any(hasattr(data_of(variable), "dask") for variable, _ in named_tensors(result)):
            return cls(head.format(f"{tensors} · not computed yet"))
        frame = table(result)
        fact = f"{len(result['statistic'])} statistics"
        if "status" in frame:
            counts = frame["status"].value_counts()
            statuses = [f"{count:,} {status}" for status, count in counts.items() if count]
            fact = ", ".join(statuses) or "none in common"
        heading = head.format(f"{tensors}: {fact}")
        conclusion = printable(str(result.attrs.get("explanation", "")))
        attributes = attribute_sentence(result)
        if "status" in frame and len(frame) > FEW_TENSORS and not has_channels(result):
            view = cls(heading, conclusion, attributes=attributes, rest=f"every tensor: {_TABLE}")
            more_lines = max(0, len(view._head_lines()) - 2)
            lines = comparison_lines(frame, MOST_LINES - more_lines)
            return view._replace(lines=tuple(lines))
        columns = [name for name in MAIN_COLUMNS if name in frame]
        columns = columns or list(frame)[: len(MAIN_COLUMNS)]
        return cls(heading, conclusion, (), frame[columns], attributes, _TABLE)

    @classmethod
    def _of_groups(cls, groups: xr.Dataset) -> Self:
        """Return the view of a result of `by`."""
        keys = [str(dim) for dim in groups.dims if dim != "bin"]
        of = " of ".join(["Groups", *map(base_name, filter(None, [groups.attrs.get("source")]))])
        heading = f"<{of}>  by {', '.join(map(printable, keys))}: {{}}"
        if "bin" in groups.dims:
            return cls(heading.format(f"{groups.sizes['bin']} bins"))
        frame = table(groups)
        frame.index = [
            " ".join(map(str, label if len(keys) > 1 else [label])) for label in frame.index
        ]
        return cls(heading.format(counted(len(frame), "group")), rows=frame, rest=_TABLE)

    def text(self) -> str:
        """Return the view as text."""
        width = line_width() - len(_INDENT)
        lines = [_INDENT + part for line in self.lines for part in wrapped(str(line), width, 2)]
        lines += [_INDENT + self.rest] if self.lines else [_row_text(self.rows), self._more()]
        return "\n".join(filter(None, (*self._head_lines(), *lines)))

    def html(self) -> str:
        """Return the view as HTML."""
        if self.rows is None:
            items = [(str(line), line.is_exception) for line in self.lines]
            notes = " ".join(filter(None, (self.conclusion, self.attributes)))
            return sentences_html(self.heading, notes, items, self.rest)
        top = self.rows.iloc[:_MOST_ROWS, :_MOST_COLUMNS]
        columns = [top[name].tolist() for name in top]
        texts = [[v if isinstance(v, str) else figure(v) for v in column] for column in columns]
        rows = list(zip(top.index.map(str), *texts, strict=True))
        below = filter(None, (self.conclusion, self.attributes, self._more()))
        return table_html(self.heading, ["", *top], rows, below)

    def _head_lines(self) -> list[str]:
        """Return the heading, the conclusion and the attributes as lines of text."""
        texts = (self.heading, self.conclusion, self.attributes)
        return [line for text in texts for line in wrapped(text, line_width(), _MOST_LINES, "")]

    def _more(self) -> str:
        """Return the number of rows that are not shown, with the call that returns all."""
        count = 0 if self.rows is None else len(self.rows) - _MOST_ROWS
        return f"… {count:,} more: {self.rest}" if count > 0 else ""


def _row_text(frame: pd.DataFrame | None) -> str:
    """Return the first rows as text, without the last columns if lines are too narrow."""
    if frame is None or frame.empty:
        return ""
    width = line_width()
    top = frame.head(_MOST_ROWS).rename_axis(None)
    top.index = apart(top.index.map(str).tolist(), width * 2 // 5)
    while True:
        text: str = top.to_string(float_format=lambda x: f"{x:.4g}")
        if text.find("\n") <= width or top.shape[1] <= 1:
            return text
        top = top.iloc[:, :-1]


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
                text = "" if cause == "changed" else cause
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
    more = len(changes) - len(texts)
    end = f"; … {more:,} more: {rest}" if more else ""
    return f"{len(changes):,} {verb}: {'; '.join(texts)}{end}"


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
