"""``xckpt stats``, ``spectrum``, ``compare``, ``report``: what values are, and how they differ."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import click

from xckpt.cli.common import (
    Column,
    FileInput,
    calls_for_action,
    complain,
    ignore_option,
    is_terminal,
    json_option,
    json_rows,
    print_document,
    print_findings,
    print_table,
    print_text,
    read_names,
    reading_options,
    reading_options_beside_output,
    require_columns,
    require_rules,
    usage_errors,
)
from xckpt.formatting import figure, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from xckpt.index import Index

__all__ = ["compare", "report", "spectrum", "stats"]

_NAMES = ("name", "tensor")
_FACTS = ("dtype", "shape", "nbytes")
_TEXTS = ("dtype", "shape")
_STATISTICS = "dtype,shape,mean,std,min,max,nan,inf,zero"
_MEASURES = ("status", "equal_fraction", "max_abs", "rmse", "rel_l2", "cosine")
_EXPLAINED = ("outcome", "cause", "rel_l2", "explanation")
_WORDY = ("status", "outcome", "cause", "explanation", "other_names")
_STATUS = {"changed": "yellow", "only_a": "red", "only_b": "red", "shape": "bold red"}
_WORDS = {
    "changed": "changed",
    "only_a": "only in A",
    "only_b": "only in B",
    "shape": "of another shape",
}

_limit_option = click.option(
    "--limit", type=click.IntRange(min=1), help="Print at most this many rows."
)
_cache_option = click.option(
    "--no-cache", is_flag=True, help="Neither use nor store cached results."
)


def _order_options(command: Any) -> Any:
    command = click.option("--ascending", is_flag=True, help="Reverse the order of --sort.")(
        _limit_option(command)
    )
    text = "Largest first, names from A to Z; by default in file order."
    return click.option("--sort", metavar="COLUMN", help=text)(command)


# --- stats ---------------------------------------------------------------------------------------


@click.command
@click.argument("file")
@click.option("--findings", "only_findings", is_flag=True, help="Print only what looks wrong.")
@ignore_option
@click.option(
    "--columns",
    default=_STATISTICS,
    show_default=True,
    metavar="A,B,...",
    help="Columns to print, or all.",
)
@_order_options
@click.option(
    "--quantile",
    "quantiles",
    type=click.FloatRange(0, 1),
    multiple=True,
    help="Compute this quantile instead of the default ones. May be repeated.",
)
@click.option(
    "--exact-quantiles",
    is_flag=True,
    help="Compute exact quantiles for 32- and 64-bit types (needs extra passes).",
)
@_cache_option
@reading_options
@json_option
def stats(
    file: str,
    reading: FileInput,
    *,
    only_findings: bool,
    ignore: tuple[str, ...],
    columns: str,
    sort: str | None,
    ascending: bool,
    limit: int | None,
    quantiles: tuple[float, ...],
    exact_quantiles: bool,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Print statistics of every tensor in FILE, computed in one pass.

    With --findings, print what looks wrong with tensors instead: NaN, dead rows and heads, copied
    layers, saturated codes, ...; the exit status is 1 if any of that is more than information. With
    --json, print both, with all columns.
    """
    from xckpt.health import examine, findings
    from xckpt.statistics import QUANTILES, statistic_names, table
    from xckpt.statistics import stats as compute

    known = [*_FACTS, *statistic_names(quantiles or QUANTILES)]
    chosen = _chosen(columns, known, None if sort in _NAMES else sort)
    require_rules(ignore)
    index = reading.index(file)
    options: dict[str, Any] = {
        "exact_quantiles": exact_quantiles,
        "progress": is_terminal(),
        "cache": not no_cache,
        "quantiles": quantiles or QUANTILES,
    }
    if only_findings:
        result, found = examine(reading.dataset(file), ignore=ignore, **options)
    else:
        result = compute(reading.dataset(file), **options)
        found = findings(result, ignore=ignore)
    frame = _arranged(_with_facts(table(result), index), sort, ascending=ascending).head(limit)
    if as_json:
        print_document(_stats_document(index, frame, found))
    elif only_findings and found.empty:
        complain("no findings")
    elif only_findings:
        print_findings(found.head(limit))
    else:
        _print_statistics(frame, chosen)
    return int(only_findings and calls_for_action(found))


def _chosen(columns: str, known: Sequence[str], *also: str | None) -> list[str]:
    """Return the columns to print; what rows are sorted by is seen."""
    chosen = list(known) if columns == "all" else [each.strip() for each in columns.split(",")]
    chosen += [each for each in also if each is not None and each not in chosen]
    require_columns(chosen, known)  # before the pass, which may take an hour
    return chosen


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


def _stats_document(index: Index, frame: pd.DataFrame, found: pd.DataFrame) -> dict[str, Any]:
    return {
        "source": index.source,
        "format": index.format,
        "tensors": json_rows(frame),
        "findings": found.to_dict("records"),
    }


# --- spectrum ------------------------------------------------------------------------------------


@click.command
@click.argument("file")
@click.option("--minus", metavar="FILE", help="Describe the differences to this checkpoint.")
@click.option(
    "--columns", default="all", metavar="A,B,...", help="Columns to print; by default all."
)
@_order_options
@_cache_option
@reading_options
@json_option
def spectrum(
    file: str,
    reading: FileInput,
    *,
    minus: str | None,
    columns: str,
    sort: str | None,
    ascending: bool,
    limit: int | None,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Print what the singular values of every matrix in FILE say: ranks, norms, condition, alpha.

    A convolution counts as a matrix of out rows and in * kernel columns. Matrices of more than
    2**27 elements, embeddings mostly, are left out unless --tensors names them.
    """
    from xckpt.statistics import OF_MATRICES, table
    from xckpt.statistics import spectrum as compute

    is_shown = sort in {*_NAMES, *_FACTS}
    chosen = _chosen(columns, OF_MATRICES, None if is_shown else sort)
    index = reading.index(file)
    result = compute(
        reading.dataset(file),
        reading.wanted,
        minus=None if minus is None else reading.dataset(minus),
        statistics=chosen,
        progress=is_terminal(),
        cache=not no_cache,
    )
    frame = _arranged(_with_facts(table(result), index), sort, ascending=ascending).head(limit)
    if as_json:
        print_document({"source": index.source, "tensors": json_rows(frame)})
    else:
        _print_statistics(frame, ["dtype", "shape", *chosen])
    return 0


# --- compare -------------------------------------------------------------------------------------


@click.command
@click.argument("a")
@click.argument("b")
@click.option("--all", "everything", is_flag=True, help="Also list tensors that are equal.")
@click.option("--explain", is_flag=True, help="Also find out why tensors differ.")
@click.option(
    "--columns",
    default=",".join(_MEASURES),
    show_default=True,
    metavar="A,B,...",
    help="Columns to print, or all.",
)
@click.option("--sort", metavar="COLUMN", help="Largest first; by default the most changed first.")
@_limit_option
@click.option(
    "--rename",
    nargs=2,
    metavar="REGEX NEW",
    help="How names in A become names in B, such as '^model\\.' ''.",
)
@click.option(
    "--names",
    metavar="auto|FILE",
    help="Match tensors by content and known names, or by a JSON object of names in A with names "
    "in B.",
)
@click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="DIM[:N]",
    help="Reduce this dimension only, a name or a position such as -1 for the last one, or N "
    "neighbours at a time: one row for each channel or block. May be repeated.",
)
@click.option(
    "--codes",
    is_flag=True,
    help="Count the codes of quantised tensors of B: columns saturated and unused.",
)
@click.option(
    "--write-names", metavar="FILE", help="Write which names of A and B belong together, as JSON."
)
@_cache_option
@reading_options
@json_option
def compare(
    a: str,
    b: str,
    reading: FileInput,
    *,
    everything: bool,
    explain: bool,
    columns: str,
    sort: str | None,
    limit: int | None,
    rename: tuple[str, str] | None,
    names: str | None,
    dims: tuple[str, ...],
    codes: bool,
    write_names: str | None,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Print how much the tensors of A and B differ.

    Their formats and element types may differ. Values are compared: a tensor equals a copy of it in
    a larger type. The exit status is 1 if there is any difference. With --explain, first comes a
    sentence about all tensors, then those that are not explained, then patterns of those that
    are: rounded, transposed, renamed, ... The exit status is 0 if every tensor is explained. With
    --json, all tensors are listed.
    """
    from xckpt.comparison import compare as compute
    from xckpt.statistics import matched_names, table

    matching = _matching(rename, names)
    if dims and (write_names is not None or explain or codes):
        option = "--explain" if explain else "--codes" if codes else "--write-names"
        raise click.UsageError(f"{option} is of whole tensors: leave --dim out")
    chosen = _compared(columns, sort, codes=codes, explain=explain)
    if write_names is not None and os.path.lexists(write_names):  # said before the pass
        raise click.UsageError(f"{write_names} already exists")
    both = replace(reading, tensors=())
    ours, theirs = both.dataset(a), both.dataset(b)
    with usage_errors():
        result = compute(
            ours,
            theirs,
            names=matching,
            tensors=reading.wanted,
            dim=_lengths(dims) or None,
            codes=codes,
            explain=explain,
            progress=is_terminal(),
            cache=not no_cache,
        )
    frame = table(result)
    if write_names is not None:
        _write_names(write_names, matched_names(result))
    if frame.empty and reading.tensors:
        raise click.UsageError(f"--tensors matches no tensor in {a} or {b}")
    if sort is not None:
        frame = frame.sort_values(sort, ascending=False, kind="stable")
    different = frame[frame["status"] != "same"]
    is_good = bool(different.empty)
    about: dict[str, Any] = {"same": is_good}
    if explain:
        is_good = bool((frame["outcome"] == "explained").all())
        about |= {"explained": is_good, "explanation": result.attrs["explanation"]}
    if as_json:
        print_document({"a": a, "b": b, **about, "tensors": json_rows(frame)})
    elif explain:
        print_text(printable(str(about["explanation"])))
        _print_explanations(frame, chosen, limit, everything=everything)
    else:
        listed = (frame if everything else different).head(limit)
        _print_comparison(frame, listed, chosen, "channels" if dims else "tensors")
    return int(not is_good)


def _compared(columns: str, sort: str | None, *, codes: bool, explain: bool) -> list[str]:
    """Return the columns of a comparison to print."""
    from xckpt.comparison import MEASURES
    from xckpt.statistics import OF_CODES
    from xckpt.statistics.tables import EXPLANATION_COLUMNS as COLUMNS

    more = OF_CODES if codes else ()
    if columns == ",".join(_MEASURES) and explain:
        columns = ",".join(_EXPLAINED)
    chosen = _chosen(columns, [*MEASURES, *more, *(COLUMNS if explain else ())], *more, sort)
    return list(dict.fromkeys([*([] if explain else ["status"]), *chosen]))


def _write_names(path: str, names: dict[str, str]) -> None:
    from xckpt.storage import new_file

    with new_file(path) as sink:
        sink.write(json.dumps(names, indent=1).encode("ascii") + b"\n", 0)
        sink.commit()


def _matching(rename: tuple[str, str] | None, names: str | None) -> Any:
    """Return how names in A become names in B."""
    if names is not None:
        if rename is not None:
            raise click.UsageError("--rename and --names exclude each other")
        return names if names == "auto" else read_names(names)
    if rename is not None:
        try:
            re.compile(rename[0])
        except re.error as error:
            message = f"--rename: {rename[0]!r} is not a regular expression: {error}"
            raise click.UsageError(message) from error
    return rename


def _lengths(dims: tuple[str, ...]) -> Any:
    """Return what --dim says: dimensions, or neighbours along each."""
    found: dict[str | int, int | None] = {}
    for text in dims:
        name, colon, length = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "")
        key = int(name) if re.fullmatch(r"-?\d+", name) else name
        found[key] = int(length) if colon else None
    return found


def _print_explanations(
    frame: pd.DataFrame, chosen: list[str], limit: int | None, *, everything: bool
) -> None:
    """Print tensors that are not explained, then patterns of the names of those that are."""
    from xckpt.notebook.folding import fold
    from xckpt.tensor_rows import Row

    is_good = frame["outcome"] == "explained"
    exceptions, explained = frame[~is_good], frame[is_good]
    # A pair has a row of each of its names: that of A stands for both.
    partners = {
        other
        for others in frame["other_names"][frame["status"] != "only_b"]
        for other in others.split(", ")
    }
    is_told = (frame["status"] == "only_b") & frame.index.isin(partners)
    exceptions = exceptions[~is_told[~is_good]]
    if not exceptions.empty:
        _print_rows(exceptions.head(limit), chosen)
    rows = [
        Row(f"{name} -> {other}" if other else name, cause, (), 0)
        for name, cause, other, is_partner in zip(
            explained.index,
            explained["cause"],
            explained["other_names"],
            is_told[is_good],
            strict=True,
        )
        if not is_partner and (everything or cause != "equal")
    ]
    if rows:
        patterns = fold(rows)[:limit]
        cells = [(each.text, f"{each.count:,}", each.dtype) for each in patterns]
        print_table([Column("explained"), Column("tensors", right=True), Column("cause")], cells)
    counts = Counter(frame["outcome"][~is_told])
    facts = [f"{counts[kind]:,} {kind}" for kind in ("changed", "unmatched", "explained")
             if counts[kind]]  # fmt: skip
    complain(f"{sum(counts.values()):,} tensors: {', '.join(facts) or 'none'}")


def _print_comparison(
    frame: pd.DataFrame, listed: pd.DataFrame, chosen: list[str], what: str
) -> None:
    """Print the rows that are listed, and how many there are in all."""
    if not listed.empty:
        _print_rows(listed, chosen)
    counts = Counter(frame["status"])
    facts = [f"{counts[kind]:,} {word}" for kind, word in _WORDS.items() if counts[kind]]
    complain(f"{len(frame):,} {what}: {', '.join(facts) or 'all are the same'}")


def _print_rows(listed: pd.DataFrame, chosen: list[str]) -> None:
    columns = [listed[name].tolist() for name in chosen]
    texts = [[v if isinstance(v, str) else figure(v) for v in column] for column in columns]
    head = [Column("tensor")]
    head += [Column(name, name not in _WORDY, _STATUS) for name in chosen]
    print_table(head, list(zip(listed.index, *texts, strict=True)))


# --- report --------------------------------------------------------------------------------------


@click.command
@click.argument("file")
@click.argument("other", required=False)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="PATH",
    help="The new file: HTML if it ends in .html, Markdown if it ends in .md.",
)
@click.option(
    "--names",
    metavar="auto|FILE",
    help="Match tensors by content and known names, or by a JSON object of names in FILE with "
    "names in OTHER.",
)
@click.option("--no-explain", is_flag=True, help="Do not find out why tensors differ.")
@click.option("--overwrite", is_flag=True, help="Replace the new file if it exists.")
@_cache_option
@reading_options_beside_output
def report(
    file: str,
    other: str | None,
    reading: FileInput,
    *,
    output: str,
    names: str | None,
    no_explain: bool,
    overwrite: bool,
    no_cache: bool,
) -> int:
    """Write a report on FILE, or on what is between FILE and OTHER.

    It holds all that it shows and runs nothing: a summary, what looks wrong, and how statistics go
    along the layers; of two files, what changed, why, how much, and what changed most.
    """
    from xckpt.accessor.reporting import document_for

    with usage_errors(output=output):
        document_for(output)
        reading.dataset(file).ckpt.report(
            output,
            None if other is None else reading.dataset(other),
            names=_matching(None, names),
            explain=not no_explain,
            overwrite=overwrite,
            progress=is_terminal(),
            cache=not no_cache,
            storage_options=reading.storage_options,
        )
    return 0
