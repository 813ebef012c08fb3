"""``ds.ckpt.report(path)``: a checkpoint, or the differences between two, as a document."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections import Counter
from contextlib import nullcontext
from functools import partial
from io import BytesIO, StringIO
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.errors import shown
from xckpt.formatting import counted
from xckpt.notebook.documents import Field, Heading, Picture, Sentence, Table, cell_text, more
from xckpt.notebook.folding import fold_names
from xckpt.notebook.html import to_page
from xckpt.notebook.markdown import to_markdown
from xckpt.notebook.views import summary_blocks
from xckpt.plots.axes import INK, styled
from xckpt.plots.series import Series, groups_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.datasets.tensors import DescribedTensors
    from xckpt.notebook.documents import Block, Cell
    from xckpt.notebook.summary import Summary
    from xckpt.structure import Structure

_SUFFIXES = {
    **dict.fromkeys((".html", ".htm"), "html"),
    **dict.fromkeys((".md", ".markdown"), "markdown"),
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
_TEXT_COLUMNS = ("name_b", "status", "outcome", "cause", "explanation")
_EMPTY = ("", "-")


def document_kind(path: str | os.PathLike[str]) -> str:
    """Return the kind of document that the suffix of a file name selects: html or markdown."""
    suffix = os.path.splitext(os.fsdecode(path).partition("?")[0])[1].lower()  # noqa: PTH122  URL
    if suffix not in _SUFFIXES:
        expected = ", ".join(_SUFFIXES)
        raise ValueError(f"a report ends in one of {expected}, unlike {shown(os.fsdecode(path))}")
    return _SUFFIXES[suffix]


def result_error(result: xr.Dataset, path: str | os.PathLike[str]) -> ValueError:
    """Return the error of a report on a result, with the call for the checkpoints behind it."""
    sources = [result.attrs.get(key) for key in ("source", "compared_with")]
    first, *second = [shown(str(source)) for source in sources if source] or ["checkpoint"]
    call = f"xckpt.report({', '.join([first, shown(os.fsdecode(path)), *second])})"
    return ValueError(f"a report describes checkpoints, and this is a result about them: {call}")


def render(kind: str, blocks: Sequence[Block]) -> bytes:
    """Return the bytes of a complete document, which begins with its title."""
    from importlib.metadata import version

    blocks = [*blocks, Sentence("hint", f"Made by xckpt {version('xckpt')}.")]
    text = to_page(blocks) if kind == "html" else to_markdown(blocks)
    return text.encode("utf-8")


# --- one checkpoint ------------------------------------------------------------------------------


def checkpoint_blocks(
    summary: Summary, stats: xr.Dataset, draw: Callable[..., Axes]
) -> list[Block]:
    """Return a summary, findings, and trends, which `draw(statistic, stats=stats)` draws."""
    from xckpt.statistics import table

    findings = summary.findings or ()
    listing: Block = Sentence("", "Nothing looks wrong.")
    if findings:
        fields = [
            Field("severity", "status"),
            Field("rule", "word"),
            Field("tensors", "count"),
            Field("which", "name"),
            Field("value", "number", 3),
            Field("explanation"),
        ]
        rows = [
            (f.severity, f.rule, f.pattern.count, f.pattern.text, f.value, f.explanation)
            for f in findings[:_MOST_FINDINGS]
        ]
        listing = _table(fields, rows, more(len(findings) - len(rows), "finding"))
    frame, origin = table(stats), stats.encoding.get("origin")
    return [
        Heading(summary.title or "Checkpoint", level=1),
        *summary_blocks(summary),
        Heading("Findings"),
        listing,
        *_trend_blocks(frame, _TRENDS, partial(draw, stats=stats), origin),
    ]


# --- comparisons ---------------------------------------------------------------------------------


def comparison_blocks(
    summaries: Sequence[Summary], comparison: xr.Dataset, draw: Callable[..., Axes]
) -> list[Block]:
    """Return the differences between two checkpoints, the largest ones, and both summaries."""
    from xckpt.statistics import comparison_lines, count_statuses, table

    frame = table(comparison)
    names = {"a": summaries[0].title or "the first", "b": summaries[1].title or "the second"}
    parts = ", ".join(count_statuses(frame, **names).values())
    number = f"{counted(len(frame), 'tensor')}: {parts or 'none in common'}."
    blocks: list[Block] = [
        Heading(f"{names['a']} compared with {names['b']}", level=1),
        Sentence("", number),
    ]
    if sentence := comparison.attrs.get("explanation"):
        blocks.append(Sentence("", str(sentence)))
    lines = comparison_lines(frame)
    if len(lines) > 1:
        fields = [Field("tensors", "name"), Field("difference"), Field("number", "word")]
        rows = [(line.subject, line.predicate, line.number.strip(" ()")) for line in lines]
        blocks.append(_table(fields, rows))
    if hint := comparison.attrs.get("hint"):
        blocks.append(Sentence("hint", str(hint)))
    if attributes := comparison.attrs.get("attributes", ()):
        omitted = more(len(attributes) - _MOST_CHANGES, "attribute")
        items = [[change] for change in attributes[:_MOST_CHANGES]]
        blocks += [Heading("Attributes"), Table([Field("attributes that differ")], items, omitted)]
    if "cause" in frame:
        pairs = zip(frame["outcome"], frame["cause"], strict=True)
        causes = Counter((str(outcome), str(cause)) for outcome, cause in pairs)
        fields = [Field("outcome", "word"), Field("cause", "word"), Field("tensors", "count")]
        cells = [(*pair, count) for pair, count in causes.most_common(_MOST_CHANGES)]
        blocks += [Heading("Causes"), Table(fields, cells)]
    # Explained differences are not listed.
    is_equal = frame["status"] == "same"
    is_settled = frame["outcome"] == "explained" if "outcome" in frame else is_equal
    # The lines above name the tensors of one side.
    is_on_both = ~frame["status"].isin(["only_a", "only_b"])
    different = frame[is_on_both & ~is_settled]
    blocks.append(Heading("What changed most"))
    if different.empty:
        if not is_on_both.any():
            text = "no tensor is in both"
        elif not is_settled.all():
            text = "tensors in both are equal or explained"
        else:
            text = "all elements are equal" if is_equal.all() else "every tensor is explained"
        blocks.append(Sentence("", f"Nothing: {text}."))
    else:
        blocks.append(_changes(different))
        origin = comparison.encoding.get("origin")
        blocks += _trend_blocks(different, ("rel_l2",), partial(draw, stats=comparison), origin)
    for summary, name in zip(summaries, names.values(), strict=True):
        blocks += [Heading(name), *summary_blocks(summary)]
    return blocks


def _changes(frame: pd.DataFrame) -> Table:
    from xckpt.statistics import frame_table

    texts = [name for name in _TEXT_COLUMNS if name in frame]
    cells = frame[texts].astype(str)
    # Some columns repeat the one before, such as the outcome of tensors that changed.
    repeated = {name for above, name in pairwise(texts) if cells[name].equals(cells[above])}
    columns = [name for name in texts if name not in repeated]
    largest = frame_table(frame, [*columns, *_MEASURES], _MOST_CHANGES)
    omitted = more(len(frame) - len(largest.rows), "tensor")
    return _table(largest.fields, largest.rows, omitted)


# --- along layers --------------------------------------------------------------------------------


class _Trend(NamedTuple):
    """A statistic of tensors along numbered modules."""

    pattern: str
    layer_count: int
    several: str  # modules numbered inside a layer: "experts"
    # Medians of the first layer, of a middle one and of the last layer.
    first: float
    median: float
    last: float
    # Values of single tensors, with their places.
    lowest: tuple[float, str]
    highest: tuple[float, str]


def _trend_blocks(
    frame: pd.DataFrame,
    statistics: Iterable[str],
    draw: Callable[..., Axes],
    origin: DescribedTensors | None,
) -> Iterator[Block]:
    """Yield statistics along numbered modules, each as a picture and a table."""
    from xckpt.statistics.grouping import structure_of_names

    columns = [column for column in statistics if column in frame]
    structure = structure_of_names(map(str, frame.index), origin)
    trends = {column: _trends(frame[column], structure) for column in columns}
    if not any(trends.values()):
        return
    yield Heading("Along the layers")
    for column, rows in trends.items():
        caption = f"{column} of every tensor along the layers"
        yield Picture(partial(_picture, partial(draw, column)), caption)
        several = " and ".join(dict.fromkeys(row.several for row in rows if row.several))
        if several:
            sentence = f"First, median and last layer: median over {several}"
            yield Sentence("", f"{sentence}. Lowest and highest: single tensors.")
        fields = [Field(f"{column} of tensors", "name"), Field("layers", "count")]
        fields += [Field(word, "number", 3) for word in ("first", "median", "last")]
        for word in ("lowest", "highest"):
            fields += [Field(word, "number", 3), Field("in", "word")]
        cells = [
            (r.pattern, r.layer_count, r.first, r.median, r.last, *r.lowest, *r.highest)
            for r in rows[:_MOST_TRENDS]
        ]
        yield Table(fields, cells, more(len(rows) - len(cells), "pattern"))


def _trends(column: pd.Series[Any], structure: Structure) -> list[_Trend]:
    """Return a trend for each kind of tensor that several layers have."""
    values = dict(zip(map(str, column.index), column.to_numpy(np.float64).tolist(), strict=True))
    trends = []
    for group in groups_of({name: structure.parse(name) for name in values}):
        layers: dict[int, list[str]] = {}
        for name, parsed in group.names.items():
            if parsed.indices and not np.isnan(values[name]):
                layers.setdefault(int(parsed.indices[0]), []).append(name)
        if len(layers) < _FEWEST_LAYERS:
            continue
        medians = [float(np.median([values[n] for n in layers[layer]])) for layer in sorted(layers)]
        ordered = sorted(chain(*layers.values()), key=values.__getitem__)
        lowest, highest = ordered[0], ordered[-1]
        series = Series.of("", [group])
        trends.append(
            _Trend(
                pattern=fold_names(group.names)[0],
                layer_count=len(layers),
                several=group.names[lowest].modules[-1] if len(ordered) > len(layers) else "",
                first=medians[0],
                median=float(np.median(medians)),
                last=medians[-1],
                lowest=(values[lowest], series.place(lowest)),
                highest=(values[highest], series.place(highest)),
            )
        )
    return trends


def _picture(draw: Callable[[], Axes]) -> str:
    """Return a picture as HTML: lines, or pixels if the lines are too many bytes; else nothing."""
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
            markup = "".join(lines.getvalue().partition("<svg")[1:])
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


def _table(fields: Sequence[Field], rows: Sequence[Sequence[Cell]], omitted: str = "") -> Table:
    """Return a table without empty columns."""
    used = [
        n
        for n in range(len(fields))
        if any(cell_text(row[n], fields[n]) not in _EMPTY for row in rows)
    ]
    return Table([fields[n] for n in used], [[row[n] for n in used] for row in rows], omitted)
