"""``ds.ckpt.report(path)``: a checkpoint, or the differences between two, as a document."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections import Counter
from contextlib import nullcontext
from functools import partial
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.errors import shown
from xckpt.formatting import counted
from xckpt.notebook.documents import Field, HtmlDocument, MarkdownDocument
from xckpt.notebook.folding import fold
from xckpt.plots.series import Series, groups_of, numbers_of
from xckpt.plots.theme import INK, styled
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.datasets.tensors import DescribedTensors
    from xckpt.notebook.documents import Document
    from xckpt.notebook.summary import Summary
    from xckpt.structure import Structure

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
# HTML needs no declarations of these.
_NAMESPACES = re.compile(r' xmlns(:\w+)?="[^"]*"')
_MEASURES = ("rel_l2", "max_abs", "cosine", "equal_fraction")
# Columns of a comparison that are text.
_TEXT_FIELDS = (
    *(Field("name_b", "name"), Field("status"), Field("outcome"), Field("cause")),
    Field("explanation"),
)
_WORDS = {
    "same": "the same",
    "changed": "changed",
    "close": "close",
    "only_a": "only in {a}",
    "only_b": "only in {b}",
    "shape": "of another shape",
    "unreadable": "unreadable",
}


def document_for(path: str | os.PathLike[str]) -> Document:
    """Return an empty document of the kind that the suffix of a file name selects."""
    suffix = os.path.splitext(os.fsdecode(path).partition("?")[0])[1].lower()  # noqa: PTH122  URL
    if suffix not in _DOCUMENTS:
        expected = ", ".join(_DOCUMENTS)
        raise ValueError(f"a report ends in one of {expected}, unlike {shown(os.fsdecode(path))}")
    return _DOCUMENTS[suffix]()


def finish(document: Document) -> bytes:
    """Return the bytes of a complete document."""
    from importlib.metadata import version

    document.paragraph(f"Made by xckpt {version('xckpt')}.")
    return document.finish().encode("utf-8")


# --- one checkpoint ------------------------------------------------------------------------------


def describe(
    document: Document, summary: Summary, stats: xr.Dataset, draw: Callable[..., Axes]
) -> None:
    """Write the summary of a checkpoint, its findings, and trends along the layers."""
    from xckpt.statistics import table

    document.title = summary.title or "Checkpoint"
    document.summary(summary)
    document.heading("Findings")
    findings = summary.findings or ()
    if findings:
        fields = [
            *(Field("severity"), Field("rule"), Field("tensors", "number"), Field("which", "name")),
            *(Field("value", "number"), Field("explanation")),
        ]
        rows = [
            (
                *(finding.severity, finding.rule),
                *(f"{finding.pattern.count:,}", finding.pattern.text),
                *(_short(finding.value), getattr(finding, "explanation", "")),
            )
            for finding in findings[:_MOST_FINDINGS]
        ]
        _add_table(document, fields, rows)
        _add_rest(document, len(findings) - len(rows), "finding")
    else:
        document.paragraph("Nothing looks wrong.")
    frame, origin = table(stats), stats.encoding.get("origin")
    _add_trends(document, frame, _TRENDS, partial(draw, stats=stats), origin)


# --- comparisons ---------------------------------------------------------------------------------


def relate(
    document: Document,
    summaries: Sequence[Summary],
    comparison: xr.Dataset,
    draw: Callable[..., Axes],
) -> None:
    """Write the differences between two checkpoints, the largest ones, and both summaries."""
    from xckpt.statistics import comparison_lines, table

    frame = table(comparison)
    names = {"a": summaries[0].title or "the first", "b": summaries[1].title or "the second"}
    document.title = f"{names['a']} compared with {names['b']}"
    counts = Counter(frame["status"])
    parts = [
        f"{counts[key]:,} {word.format(**names)}" for key, word in _WORDS.items() if counts[key]
    ]
    document.paragraph(f"{counted(len(frame), 'tensor')}: {', '.join(parts) or 'none in common'}.")
    if sentence := comparison.attrs.get("explanation"):
        document.paragraph(str(sentence))
    if attributes := comparison.attrs.get("attributes", ()):
        document.heading("Attributes")
        _add_table(
            document, [Field("attributes that differ")], [[t] for t in attributes[:_MOST_CHANGES]]
        )
        _add_rest(document, len(attributes) - _MOST_CHANGES, "attribute")
    lines = comparison_lines(frame)
    if len(lines) > 1:
        fields = [Field("tensors", "name"), Field("difference"), Field("number")]
        rows = [(line.subject, line.predicate, line.number.strip(" ()")) for line in lines]
        _add_table(document, fields, rows)
    if "cause" in frame:
        document.heading("Causes")
        pairs = zip(frame["outcome"], frame["cause"], strict=True)
        causes = Counter((str(outcome), str(cause)) for outcome, cause in pairs)
        rows = [(*pair, f"{count:,}") for pair, count in causes.most_common(_MOST_CHANGES)]
        fields = [Field("outcome"), Field("cause"), Field("tensors", "number")]
        document.table(fields, rows)
    # Explained differences are not listed.
    is_explained = "outcome" in frame
    different = frame[
        frame["outcome"] != "explained" if is_explained else frame["status"] != "same"
    ]
    # The lines above name the tensors of one side.
    on_both = different[~different["status"].isin(["only_a", "only_b"])]
    document.heading("What changed most")
    if different.empty:
        is_equal = bool((frame["status"] == "same").all())
        text = "all elements are equal" if is_equal else "every tensor is explained"
        document.paragraph(f"Nothing: {text}.")
    else:
        _add_changes(document, on_both)
        origin = comparison.encoding.get("origin")
        _add_trends(document, on_both, ("rel_l2",), partial(draw, stats=comparison), origin)
    for summary, name in zip(summaries, names.values(), strict=True):
        document.heading(name)
        document.summary(summary)


def _add_changes(document: Document, frame: pd.DataFrame) -> None:
    largest = frame.head(_MOST_CHANGES)
    fields = [Field("tensor", "name")]
    fields += [field for field in _TEXT_FIELDS if field.title in frame]
    columns = [largest[field.title].astype(str) for field in fields[1:]]
    fields += [Field(column, "number") for column in _MEASURES]
    columns += [largest[column].map(_short) for column in _MEASURES]
    rows = list(zip(largest.index, *columns, strict=True))
    _add_table(document, fields, rows)
    _add_rest(document, len(frame) - len(largest), "tensor")


# --- along layers --------------------------------------------------------------------------------


class _Trend(NamedTuple):
    """A statistic of tensors along numbered modules."""

    pattern: str
    layers: int
    several: str  # modules numbered inside a layer: "experts"
    first: float  # the medians of the first, of a middle and of the last layer
    median: float
    last: float
    lowest: tuple[float, str]  # of single tensors, with their places
    highest: tuple[float, str]


def _add_trends(
    document: Document,
    frame: pd.DataFrame,
    statistics: Iterable[str],
    draw: Callable[..., Axes],
    origin: DescribedTensors | None,
) -> None:
    """Add statistics along numbered modules, each as a picture and a table."""
    from xckpt.statistics.grouping import structure_of_names

    columns = [column for column in statistics if column in frame]
    structure = structure_of_names(map(str, frame.index), origin)
    trends = {column: _trends(frame[column], structure) for column in columns}
    if not any(trends.values()):
        return
    document.heading("Along the layers")
    for column, rows in trends.items():
        if isinstance(document, HtmlDocument) and (markup := _picture(partial(draw, column))):
            document.picture(markup, f"{column} of every tensor along the layers")
        several = " and ".join(dict.fromkeys(row.several for row in rows if row.several))
        if several:
            sentence = f"First, median and last layer: median over {several}"
            document.paragraph(f"{sentence}. Lowest and highest: single tensors.")
        fields = [Field(f"{column} of tensors", "name"), Field("layers", "number")]
        fields += [Field(word, "number") for word in ("first", "median", "last")]
        fields += [Field("lowest", "number"), Field("in"), Field("highest", "number"), Field("in")]
        cells = [
            (
                *(row.pattern, f"{row.layers:,}"),
                *map(_short, (row.first, row.median, row.last)),
                *(_short(row.lowest[0]), row.lowest[1]),
                *(_short(row.highest[0]), row.highest[1]),
            )
            for row in rows[:_MOST_TRENDS]
        ]
        document.table(fields, cells)
        _add_rest(document, len(rows) - len(cells), "pattern")


def _trends(values: pd.Series[Any], structure: Structure) -> list[_Trend]:
    """Return a trend for each kind of tensor that several layers have."""
    known = dict(zip(map(str, values.index), values.to_numpy(np.float64).tolist(), strict=True))
    trends = []
    for group in groups_of({name: structure.parse(name) for name in known}):
        layers: dict[int, list[str]] = {}
        for name in group.names:
            number = next(reversed(numbers_of(group.names[name]).values()), None)
            if number is not None and not np.isnan(known[name]):
                layers.setdefault(number, []).append(name)
        if len(layers) < _FEWEST_LAYERS:
            continue
        medians = [float(np.median([known[n] for n in layers[at]])) for at in sorted(layers)]
        every = sorted([name for names in layers.values() for name in names], key=known.__getitem__)
        series = Series.of("", [group])
        is_several = len(every) > len(layers)
        trends.append(
            _Trend(
                fold(Row(name, "", (), 0) for name in group.names)[0].text,
                len(layers),
                group.names[every[0]].modules[-1] if is_several else "",
                medians[0],
                float(np.median(medians)),
                medians[-1],
                *((known[name], series.place(name)) for name in (every[0], every[-1])),
            )
        )
    return trends


def _short(value: float) -> str:
    """Write a number with three significant digits."""
    return "-" if np.isnan(value) else f"{value:.3g}"


def _picture(draw: Callable[[], Axes]) -> str:
    """Return a picture as HTML: lines, or pixels where these are fewer bytes; else nothing."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        return ""

    # Text stays text, and the same values are the same file.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "xckpt", "path.simplify": True}
    # No windows. A backend that is not loaded yet becomes interactive with the first figure, and
    # `ioff` would undo that.
    quiet: Any = plt.ioff if plt.isinteractive() else nullcontext
    with styled(style), quiet():
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
    """Add a table without empty columns."""
    used = [n for n in range(len(fields)) if any(row[n] not in {"", "-"} for row in rows)]
    document.table([fields[n] for n in used], [[row[n] for n in used] for row in rows])


def _add_rest(document: Document, count: int, noun: str) -> None:
    if count > 0:
        document.paragraph(f"… and {counted(count, f'more {noun}')}.")
