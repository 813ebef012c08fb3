"""``ds.ckpt.report(path)``: a checkpoint, or what is between two, as a document to keep or send."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections import Counter
from functools import partial
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import shown
from xckpt.notebook.documents import Field, HtmlDocument, MarkdownDocument
from xckpt.notebook.folding import Row, fold
from xckpt.notebook.formatting import counted, figure
from xckpt.plots.series import groups_of, numbers_of
from xckpt.plots.theme import INK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.notebook.documents import Document
    from xckpt.notebook.summary import Summary

__all__ = ["describe", "document_for", "finish", "relate"]

_DOCUMENTS = {
    **dict.fromkeys((".html", ".htm"), HtmlDocument),
    **dict.fromkeys((".md", ".markdown"), MarkdownDocument),
}
_MOST_FINDINGS = 100
_MOST_TRENDS = 60
_MOST_CHANGES = 100
_FEWEST_LAYERS = 3
_LARGEST_DRAWING = 200 << 10
_TRENDS = ("std", "absmax")
# A page of HTML knows them.
_NAMESPACES = re.compile(r' xmlns(:\w+)?="[^"]*"')
_MEASURES = ("rel_l2", "max_abs", "cosine", "equal_fraction")
# What a comparison may say of a tensor.
_SAID = (
    *(Field("name_b", "name"), Field("status"), Field("outcome"), Field("cause")),
    Field("explanation"),
)
_WORDS = {
    "same": "the same",
    "changed": "changed",
    "only_a": "only in {a}",
    "only_b": "only in {b}",
    "shape": "of another shape",
}


def document_for(path: str | os.PathLike[str]) -> Document:
    """Begin a document of the kind that a file name ends like."""
    suffix = os.path.splitext(os.fsdecode(path).partition("?")[0])[1].lower()  # noqa: PTH122  URL
    if suffix not in _DOCUMENTS:
        expected = ", ".join(_DOCUMENTS)
        raise ValueError(f"a report ends in one of {expected}, unlike {shown(os.fsdecode(path))}")
    return _DOCUMENTS[suffix]()


def finish(document: Document) -> bytes:
    """Return a document as it is written."""
    from importlib.metadata import version

    document.paragraph(f"Made by xckpt {version('xckpt')}.")
    return document.finish().encode("utf-8")


# --- one checkpoint ------------------------------------------------------------------------------


def describe(
    document: Document, summary: Summary, stats: xr.Dataset, draw: Callable[..., Axes]
) -> None:
    """Write what a checkpoint holds, what looks wrong, and how layers differ."""
    from xckpt.statistics import table

    document.title = summary.title or "Checkpoint"
    document.summary(summary)
    document.heading("Findings")
    _add_findings(document, summary)
    _add_trends(document, table(stats), _TRENDS, partial(draw, stats=stats))


def _add_findings(document: Document, summary: Summary) -> None:
    findings = summary.findings or ()
    if not findings:
        document.paragraph("Nothing looks wrong.")
        return
    fields = [
        *(Field("severity"), Field("rule"), Field("tensors", "number"), Field("which", "name")),
        *(Field("value", "number"), Field("explanation")),
    ]
    rows = [
        (
            *(each.severity, each.rule, f"{each.pattern.count:,}", each.pattern.text),
            *(figure(each.value), getattr(each, "explanation", "")),
        )
        for each in findings[:_MOST_FINDINGS]
    ]
    _add_table(document, fields, rows)
    _add_rest(document, len(findings) - len(rows), "finding")


# --- two of them ---------------------------------------------------------------------------------


def relate(
    document: Document,
    summaries: Sequence[Summary],
    found: xr.Dataset,
    draw: Callable[..., Axes],
) -> None:
    """Write what two checkpoints hold, what changed, and what changed most."""
    from xckpt.statistics import table

    frame = table(found)
    names = {"a": summaries[0].title or "the first", "b": summaries[1].title or "the second"}
    document.title = f"{names['a']} compared with {names['b']}"
    counts = Counter(frame["status"])
    facts = [
        f"{counts[key]:,} {word.format(**names)}" for key, word in _WORDS.items() if counts[key]
    ]
    document.paragraph(f"{counted(len(frame), 'tensor')}: {', '.join(facts) or 'none in common'}.")
    if sentence := found.attrs.get("explanation"):
        document.paragraph(str(sentence))
    if "cause" in frame:
        document.heading("Causes")
        pairs = zip(frame["outcome"], frame["cause"], strict=True)
        causes = Counter((str(outcome), str(cause)) for outcome, cause in pairs)
        rows = [(*each, f"{count:,}") for each, count in causes.most_common(_MOST_CHANGES)]
        fields = [Field("outcome"), Field("cause"), Field("tensors", "number")]
        document.table(fields, rows)
    # An explanation says what is in order.
    is_explained = "outcome" in frame
    different = frame[
        frame["outcome"] != "explained" if is_explained else frame["status"] != "same"
    ]
    document.heading("What changed most")
    if different.empty:
        is_equal = bool((frame["status"] == "same").all())
        text = "all elements are equal" if is_equal else "every tensor is explained"
        document.paragraph(f"Nothing: {text}.")
    else:
        _add_changes(document, different)
        _add_trends(document, different, ("rel_l2",), partial(draw, stats=found))
    for summary, name in zip(summaries, names.values(), strict=True):
        document.heading(name)
        document.summary(summary)


def _add_changes(document: Document, frame: pd.DataFrame) -> None:
    some = frame.head(_MOST_CHANGES)
    fields = [Field("tensor", "name")]
    fields += [each for each in _SAID if each.title in frame]
    columns = [some[field.title].astype(str) for field in fields[1:]]
    fields += [Field(column, "number") for column in _MEASURES]
    columns += [some[column].map(figure) for column in _MEASURES]
    rows = list(zip(some.index, *columns, strict=True))
    _add_table(document, fields, rows)
    _add_rest(document, len(frame) - len(some), "tensor")


# --- along layers --------------------------------------------------------------------------------


def _add_trends(
    document: Document,
    frame: pd.DataFrame,
    statistics: Iterable[str],
    draw: Callable[..., Axes],
) -> None:
    """Add how statistics go along numbered modules, as pictures and as a table."""
    columns = [column for column in statistics if column in frame]
    rows, count = _trends(frame, columns)
    if not rows:
        return
    document.heading("Along the layers")
    for column in columns if isinstance(document, HtmlDocument) else ():
        if markup := _picture(partial(draw, column)):
            document.picture(markup, f"{column} of every tensor along the layers")
    words = ("first", "median", "last", "lowest", "highest")
    fields = [Field("tensors", "name"), Field("layers", "number")]
    fields += [Field(f"{column}, {word}", "number") for column in columns for word in words]
    document.table(fields, rows)
    _add_rest(document, count - len(rows), "pattern")


def _trends(frame: pd.DataFrame, columns: Sequence[str]) -> tuple[list[tuple[str, ...]], int]:
    """Return a row for each kind of tensor that several layers have, and how many there are."""
    at = {name: row for row, name in enumerate(frame.index)}
    values = {column: frame[column].to_numpy(np.float64) for column in columns}
    rows: list[tuple[str, ...]] = []
    count = 0
    for group in groups_of(map(str, frame.index)):
        layers: dict[int, list[int]] = {}
        for name in group.names:
            number = next(reversed(numbers_of(name).values()), None)
            if number is not None and name in at:
                layers.setdefault(number, []).append(at[name])
        members = [row for some in layers.values() for row in some]
        is_known = any(not np.isnan(each[members]).all() for each in values.values())
        if len(layers) < _FEWEST_LAYERS or not is_known:
            continue
        count += 1
        if len(rows) == _MOST_TRENDS:
            continue
        row = [fold(Row(name, "", (), 0) for name in group.names)[0].text, f"{len(layers):,}"]
        numbers = np.array(sorted(layers))
        for column in columns:
            along = np.array([_median(values[column][layers[number]]) for number in numbers])
            row += _trend(numbers, along)
        rows.append(tuple(row))
    return rows, count


def _median(values: Any) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else np.nan


def _trend(numbers: Any, along: Any) -> list[str]:
    """Write the first, median and last value, and the lowest and highest with their layers."""
    found = [figure(along[0]), figure(_median(along)), figure(along[-1])]
    if np.isnan(along).all():
        return [*found, "-", "-"]
    extremes = [int(np.nanargmin(along)), int(np.nanargmax(along))]
    return [*found, *(f"{figure(along[n])} at {numbers[n]}" for n in extremes)]


def _picture(draw: Callable[[], Axes]) -> str:
    """Return a picture as HTML: lines, or pixels where these are fewer bytes; else nothing."""
    try:
        import matplotlib as mpl
    except ImportError:
        return ""
    from matplotlib import pyplot as plt

    # Text stays text, and the same values are the same file.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "xckpt", "path.simplify": True}
    with mpl.rc_context(style), plt.ioff():
        try:
            drawing: Any = draw().get_figure(root=True)
        except ValueError:  # nothing in it can be drawn
            return ""
        try:
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            lines = StringIO()
            drawing.savefig(lines, format="svg", metadata=nothing)
            # Without the prologue, which names a file elsewhere.
            markup = re.sub(r"\A.*?(?=<svg)", "", lines.getvalue(), flags=re.DOTALL)
            # In the colour of the text around it, be it dark or light.
            markup = _NAMESPACES.sub("", markup).replace(INK, "currentColor")
            if len(markup) <= _LARGEST_DRAWING:
                return markup
            pixels = BytesIO()
            drawing.savefig(pixels, format="png", dpi=110, metadata={"Software": None})
            encoded = b64encode(pixels.getvalue()).decode()
            return f'<img src="data:image/png;base64,{encoded}" alt="">'
        finally:
            plt.close(drawing)


def _add_table(document: Document, fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
    """Add a table without the columns that have nothing."""
    kept = [n for n in range(len(fields)) if any(row[n] not in {"", "-"} for row in rows)]
    document.table([fields[n] for n in kept], [[row[n] for n in kept] for row in rows])


def _add_rest(document: Document, count: int, noun: str) -> None:
    if count > 0:
        document.paragraph(f"… and {counted(count, f'more {noun}')}.")
