"""``xckpt stats``: statistics of every tensor, and what looks wrong in them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import click

from xckpt.cli.files import Reading, json_option, reading_options
from xckpt.cli.output import (
    Column,
    complain,
    figure,
    is_terminal,
    json_rows,
    print_document,
    print_table,
    require_columns,
)

if TYPE_CHECKING:
    import pandas as pd

    from xckpt.index import Index

__all__ = ["stats"]

_NAMES = ("name", "tensor")
_FACTS = ("dtype", "shape", "nbytes")
_TEXTS = ("dtype", "shape")
_SHOWN = "dtype,shape,mean,std,min,max,nan,inf,zero"
_CALLS_FOR_ACTION = ("error", "warning")
_SEVERITY = {"error": "bold red", "warning": "yellow", "info": "dim"}


@click.command
@click.argument("file")
@click.option(
    "--findings", "only_findings", is_flag=True, help="What looks wrong, and nothing else."
)
@click.option("--columns", default=_SHOWN, show_default=True, metavar="A,B,...", help="Or: all.")
@click.option(
    "--sort", metavar="COLUMN", help="Largest first, names from A to Z; by default as in FILE."
)
@click.option("--ascending", is_flag=True, help="With --sort: the other way round.")
@click.option("--limit", type=click.IntRange(min=1), help="So many rows at most.")
@click.option(
    "--quantile",
    "quantiles",
    type=click.FloatRange(0, 1),
    multiple=True,
    help="In place of those that are given by default; may be repeated.",
)
@click.option("--exact-quantiles", is_flag=True, help="Of large types too, by more passes.")
@click.option("--no-cache", is_flag=True, help="Neither use nor keep earlier results.")
@reading_options
@json_option
def stats(
    file: str,
    reading: Reading,
    *,
    only_findings: bool,
    columns: str,
    sort: str | None,
    ascending: bool,
    limit: int | None,
    quantiles: tuple[float, ...],
    exact_quantiles: bool,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Show statistics of every tensor of FILE, from one pass over it.

    With --findings, tensors with NaN or infinities, of zeros only, of one value, with rows of
    zeros, or with outliers; the exit status is 1 then if there are any but harmless ones. With
    --json both, with all columns.
    """
    from xckpt.statistics import QUANTILES, findings, table
    from xckpt.statistics import stats as compute
    from xckpt.statistics.describe import statistic_names

    known = [*_FACTS, *statistic_names(quantiles or QUANTILES)]
    chosen = known if columns == "all" else [column.strip() for column in columns.split(",")]
    # Before the pass, which may take an hour.
    require_columns([*chosen, *([sort] if sort and sort not in _NAMES else [])], known)
    index = reading.index(file)
    result = compute(
        reading.dataset(file),
        exact_quantiles=exact_quantiles,
        progress=is_terminal(),
        cache=not no_cache,
        quantiles=quantiles or QUANTILES,
    )
    found = findings(result)
    frame = _arranged(_with_facts(table(result), index), sort, ascending=ascending).head(limit)
    if as_json:
        print_document(_document(index, frame, found))
    elif only_findings:
        _print_findings(found.head(limit))
    else:
        _print_statistics(frame, chosen)
    if only_findings:
        return int(found["severity"].isin(_CALLS_FOR_ACTION).any())
    return 0


def _with_facts(frame: pd.DataFrame, index: Index) -> pd.DataFrame:
    """Put what the file says of tensors before their statistics."""
    import pandas as pd

    # Parts of tensors that have no values of their own are called name:part.
    tensors = [
        index.tensors.get(name) or index.tensors.get(name.rpartition(":")[0])
        for name in frame.index
    ]
    facts = pd.DataFrame(
        {
            "dtype": [tensor.dtype if tensor else "" for tensor in tensors],
            "shape": [tensor.shape if tensor else () for tensor in tensors],
            "nbytes": [tensor.nbytes if tensor else 0 for tensor in tensors],
        },
        frame.index,
    )
    return pd.concat([facts, frame], axis="columns")


def _arranged(frame: pd.DataFrame, sort: str | None, *, ascending: bool) -> pd.DataFrame:
    if sort is None:
        return frame
    if sort in _NAMES:
        return frame.sort_index(ascending=not ascending)
    key = (lambda shapes: shapes.map(prod)) if sort == "shape" else None
    return frame.sort_values(sort, ascending=ascending, kind="stable", key=key)


def _print_statistics(frame: pd.DataFrame, chosen: list[str]) -> None:
    head = [Column("tensor")]
    texts = [frame.index.tolist()]
    for column in chosen:
        values = frame[column].tolist()
        if column == "dtype":
            texts.append(values)
        elif column == "shape":
            texts.append(["×".join(map(str, shape)) for shape in values])
        else:
            texts.append([figure(value) for value in values])
        head.append(Column(column, right=column not in _TEXTS))
    print_table(head, list(zip(*texts, strict=True)))


def _print_findings(found: pd.DataFrame) -> None:
    if found.empty:
        complain("no findings")
        return
    head = [Column("tensor"), Column("severity", styles=_SEVERITY), Column("rule")]
    rows = [
        (row.tensor, row.severity, row.rule, figure(row.value))
        for row in found.itertuples(index=False)
    ]
    print_table([*head, Column("value", right=True)], rows)


def _document(index: Index, frame: pd.DataFrame, found: pd.DataFrame) -> dict[str, Any]:
    return {
        "source": index.source,
        "format": index.format,
        "tensors": json_rows(frame),
        "findings": found.to_dict("records"),
    }
