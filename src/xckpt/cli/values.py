"""The commands for values: ``xckpt stats``, ``spectrum``, ``compare`` and ``report``."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from xckpt.cli.common import (
    FileInput,
    calls_for_action,
    complain,
    json_rows,
    print_blocks,
    print_document,
    renaming,
    require_columns,
    require_rules,
    usage_errors,
)
from xckpt.cli.groups import grouped_table, print_groups
from xckpt.cli.options import command
from xckpt.options import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import xarray as xr

    from xckpt.datasets.tensors import OpenTensors

__all__ = ["compare", "report", "spectrum", "stats"]

_FACTS = ("dtype", "shape", "nbytes")
_STATISTICS = ("dtype", "shape", "mean", "std", "min", "max", "nan", "inf", "zero")
#: Columns that a narrow terminal shows rather than others.
_MAIN_STATISTICS, _MAIN_MEASURES = ("mean", "std", "nan", "inf"), ("status", "rel_l2")
_MAIN_OF_EXPLAINED = ("rel_l2", "cause", "explanation")
_MEASURES = ("status", "equal_fraction", "max_abs", "rmse", "rel_l2", "cosine")
_EXPLAINED = ("outcome", "cause", "rel_l2", "explanation")
_MOST_ROWS = 20
_WORDS = {
    "changed": "changed",
    "close": "close",
    "only_a": "only in A",
    "only_b": "only in B",
    "shape": "of another shape",
    "unreadable": "unreadable",
}

# --- stats ---------------------------------------------------------------------------------------


_AS_CSV = (
    "--json > new.json writes a document; "
    "in Python: xckpt.stats({file}).ckpt.table().to_csv('new.csv')"
)


@command(
    "ignore columns sort ascending limit by dim no-cache progress json",
    **dict.fromkeys(("csv", "format", "output"), _AS_CSV),
)
@click.argument("file")
@click.option("--findings", "only_findings", is_flag=True, help="Print only suspicious values.")
@click.option(
    "--quantile",
    "quantiles",
    type=click.FloatRange(0, 1),
    multiple=True,
    help=f"{text_of('quantiles')} May be repeated.",
)
@click.option(
    "--exact-quantiles",
    is_flag=True,
    help=text_of("exact_quantiles"),
)
def stats(
    file: str,
    reading: FileInput,
    *,
    only_findings: bool,
    ignore: tuple[str, ...],
    columns: list[str] | None,
    sort: str | None,
    ascending: bool | None,
    limit: int | None,
    dims: dict[str | int, int | None] | None,
    quantiles: tuple[float, ...],
    exact_quantiles: bool,
    keys: list[str] | None,
    as_json: bool,
) -> int:
    """Print statistics of every tensor in FILE, computed in one pass.

    With --findings, print suspicious values instead: NaN, dead rows and heads, copied layers,
    saturated codes, ...; the exit status is 1 if any finding is an error or a warning. With --json,
    print both, with all columns. With --by, print a row for each layer, role, ... instead; with
    --findings, their numbers. In a terminal the table has twenty rows, unless --limit states
    another number.
    """
    from xckpt.statistics import QUANTILES, statistic_names, table
    from xckpt.statistics import stats as compute
    from xckpt.statistics.tables import arranged

    facts = () if dims else _FACTS
    existing = [*facts, *statistic_names(quantiles or QUANTILES)]
    default = [name for name in _STATISTICS if name in existing]
    requested = [name for name in statistic_names(quantiles) if name not in statistic_names(())]
    of_columns = None if sort in (keys or ()) else sort
    chosen = _chosen(columns or default, existing, of_columns, *requested)
    most_wanted = [sort or "", *_MAIN_STATISTICS]
    order: dict[str, Any] = {"sort": sort, "ascending": ascending, "limit": limit}
    require_rules(ignore)
    if dims and (only_findings or keys):
        raise click.UsageError("--findings and --by are of whole tensors: leave --dim out")
    tensors = reading.contents(file, keys or ())
    document: dict[str, Any] = {"source": _source(file, tensors), "format": tensors.format}
    options: dict[str, Any] = {
        **reading.scanning,
        "exact_quantiles": exact_quantiles,
        "quantiles": quantiles or QUANTILES,
    }
    findings_frame = None
    if only_findings:
        from xckpt.health import examine

        result, findings_frame = examine(tensors, ignore=ignore, **options)
    else:
        with usage_errors():
            result = compute(tensors, **options, dim=list(dims) if dims else None)
    status = int(findings_frame is not None and calls_for_action(findings_frame))
    if keys:
        groups = grouped_table(result if findings_frame is None else findings_frame, keys, order)
        listed, preferred = (list(groups), []) if only_findings else (chosen, most_wanted)
        print_groups(groups, listed, document if as_json else None, preferred)
        return status
    frame = table(result) if dims else _with_facts(table(result), tensors)
    if as_json:
        from xckpt.health import findings

        document |= {"tensors": json_rows(arranged(frame, **order))}
        if findings_frame is None and not dims:
            findings_frame = findings(result, ignore=ignore)
        records = [] if findings_frame is None else findings_frame.to_dict("records")
        print_document({**document, "findings": records})
    elif findings_frame is None:
        _print_statistics(frame, chosen, order, most_wanted)
    else:
        from xckpt.health import findings_blocks

        if findings_frame.empty:
            complain("no findings")
        print_blocks(findings_blocks(findings_frame.head(limit)))
    return status


def _chosen(columns: Sequence[str], existing: Sequence[str], *extra: str | None) -> list[str]:
    """Return the columns to print, including the `extra` ones, such as the column to sort by."""
    from xckpt.statistics.tables import NAMES_OF_ROWS

    chosen = list(existing) if list(columns) == ["all"] else list(columns)
    chosen = [name for name in chosen if name not in NAMES_OF_ROWS]
    names = [name for name in extra if name is not None and name not in NAMES_OF_ROWS]
    chosen += [name for name in names if name not in chosen]
    require_columns(chosen, existing)  # before the pass, which may take an hour
    return chosen


def _source(file: str, tensors: OpenTensors) -> str:
    """Return the name of a file, or the argument for the several files of a run."""
    index = tensors.index
    return file if index is None else index.source


def _with_facts(frame: pd.DataFrame, opened: OpenTensors) -> pd.DataFrame:
    """Insert the types, shapes and sizes of tensors before their statistics."""
    import pandas as pd

    # The variables of a tensor without values have names like name:part.
    stated = {} if opened.index is None else opened.index.tensors
    tensors = [stated.get(name) or stated.get(name.rpartition(":")[0]) for name in frame.index]
    facts = pd.DataFrame(
        {
            "dtype": [tensor.dtype if tensor else "" for tensor in tensors],
            "shape": [tensor.shape if tensor else () for tensor in tensors],
            "nbytes": [tensor.nbytes if tensor else 0 for tensor in tensors],
        },
        frame.index,
    )
    return pd.concat([facts, frame], axis="columns")


def _print_statistics(
    frame: pd.DataFrame, chosen: list[str], order: dict[str, Any], most_wanted: Sequence[str]
) -> None:
    from xckpt.statistics import frame_table
    from xckpt.statistics.tables import arranged

    limit, count = order["limit"], len(frame)
    frame = arranged(frame, **order | {"limit": _row_limit(limit)})
    print_blocks([frame_table(frame, chosen, wanted=most_wanted)])
    if limit is None and len(frame) < count:
        complain(f"the first {len(frame)} of {count:,} tensors; --limit {count} prints all")


def _row_limit(limit: int | None) -> int | None:
    """Return the number of rows to print; in a terminal twenty unless the user states another."""
    return _MOST_ROWS if limit is None and sys.stdout.isatty() else limit


# --- spectrum ------------------------------------------------------------------------------------


@command("columns sort ascending limit by no-cache progress json")
@click.argument("file")
@click.option("--minus", metavar="FILE", help="Analyse the differences from this checkpoint.")
def spectrum(
    file: str,
    reading: FileInput,
    *,
    minus: str | None,
    columns: list[str] | None,
    sort: str | None,
    ascending: bool | None,
    limit: int | None,
    keys: list[str] | None,
    as_json: bool,
) -> int:
    """Print ranks, norms, condition, alpha of every matrix in FILE.

    They follow from the singular values. A convolution counts as a matrix of out rows and in *
    kernel columns. Matrices with more than 2**27 elements, usually embeddings, are left out unless
    --tensors selects them. With --by, print a row for each layer, role, ... instead.
    """
    from xckpt.statistics import OF_MATRICES, table
    from xckpt.statistics import spectrum as compute
    from xckpt.statistics.tables import arranged

    chosen = _chosen(
        columns or OF_MATRICES, OF_MATRICES, None if sort in {*_FACTS, *(keys or ())} else sort
    )
    order: dict[str, Any] = {"sort": sort, "ascending": ascending, "limit": limit}
    tensors = reading.contents(file, keys or ())
    result = compute(
        tensors,
        **reading.selection,
        **reading.scanning,
        minus=None if minus is None else reading.contents(minus),
        statistics=chosen,
    )
    document: dict[str, Any] = {"source": _source(file, tensors)}
    if keys:
        groups = grouped_table(result, keys, order)
        print_groups(groups, chosen, document if as_json else None, [sort or ""])
        return 0
    frame = _with_facts(table(result), tensors)
    if as_json:
        print_document({**document, "tensors": json_rows(arranged(frame, **order))})
    else:
        _print_statistics(frame, ["dtype", "shape", *chosen], order, [sort or "", *chosen])
    return 0


# --- compare -------------------------------------------------------------------------------------


@command("columns sort ascending limit names rename dim by no-cache progress json")
@click.argument("a")
@click.argument("b")
@click.option("--all", "everything", is_flag=True, help="Also list equal tensors.")
@click.option("--explain", is_flag=True, help=text_of("explain"))
@click.option(
    "--adapter",
    metavar="PATH",
    help="Verify that B is A with this adapter, such as LoRA, merged into it. Implies --explain.",
)
@click.option(
    "--codes",
    is_flag=True,
    help="Also examine codes and scales of the quantised tensors of B: saturated, clipped, ...",
)
@click.option(
    "--write-names", metavar="FILE", help="Write the matched names of A and B to a JSON file."
)
@click.option(
    "--fail-above",
    "bounds",
    multiple=True,
    metavar="MEASURE=VALUE",
    help="Tensors that differ by at most this, such as rel_l2=1e-3, are close, and no failure. May "
    "be repeated.",
)
@click.option("--ignore-attrs", is_flag=True, help="Compare numbers only, and no attributes.")
def compare(
    a: str,
    b: str,
    reading: FileInput,
    *,
    everything: bool,
    explain: bool,
    adapter: str | None,
    columns: list[str] | None,
    sort: str | None,
    ascending: bool | None,
    limit: int | None,
    rename: tuple[tuple[str, str], ...],
    names: str | None,
    dims: dict[str | int, int | None] | None,
    codes: bool,
    write_names: str | None,
    bounds: tuple[str, ...],
    ignore_attrs: bool,
    keys: list[str] | None,
    as_json: bool,
) -> int:
    """Print how much the tensors of A and B differ.

    Formats and element types may differ, since values are compared: a tensor equals a copy of it in
    a larger type. The exit status is 1 if there is any difference, in attributes too. With
    --explain, print a summary, the unexplained tensors, and patterns of the explained ones:
    rounded, transposed, renamed, ... The exit status is then 0 if every tensor is explained. With
    --json, list all tensors.
    With --by, print a row for each layer, role, ... instead.

    More than twelve differences are also summarised in sentences: which modules changed, and by how
    much. In a terminal the table then has twenty rows, unless --limit states another number.
    """
    from xckpt.comparison import compare as compute
    from xckpt.labels.filters import suggest_filters
    from xckpt.statistics import (
        OF_CODES,
        attribute_sentence,
        comparison_lines,
        matched_names,
        table,
    )
    from xckpt.statistics.tables import arranged
    from xckpt.storage import write_file

    explain = explain or adapter is not None
    matching = renaming(rename, names)
    of_tensors = {"--adapter": adapter, "--explain": explain, "--codes": codes, "--by": keys}
    _require_whole_tensors(dims, {**of_tensors, "--write-names": write_names})
    if keys and explain:
        raise click.UsageError("--explain describes single tensors: leave --by out")
    of_columns = None if sort in (keys or ()) else sort
    chosen = _compared(columns, of_columns, codes=codes, explain=explain)
    if write_names is not None and os.path.lexists(write_names):  # before the pass
        raise click.UsageError(f"{write_names} already exists")
    both = replace(reading, tensors=(), exclude=(), only=None)
    ours, theirs = both.contents(a), both.contents(b)
    with usage_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tensors=.* matches no tensor of a or b")  # see below
        result = compute(
            ours,
            theirs,
            names=matching,
            **reading.selection,
            dim=dims,
            codes=codes,
            explain=explain,
            adapter=adapter,
            fail_above=_bounds(bounds),
            ignore_attrs=ignore_attrs,
            **reading.scanning,
            storage_options=reading.storage_options,
        )
    frame = table(result)
    most_wanted = [sort or "", *(_MAIN_OF_EXPLAINED if explain else _MAIN_MEASURES), *OF_CODES]
    if write_names is not None:
        text = json.dumps(matched_names(result), indent=1) + "\n"
        write_file(write_names, text.encode("ascii"))
    if frame.empty and reading.tensors:
        hint = suggest_filters([*ours.names, *theirs.names], list(reading.tensors))
        raise click.UsageError(f"--tensors matches no tensor in {a} or {b}{hint}")
    frame = arranged(frame, sort=sort, ascending=ascending)
    is_good, conclusion = _conclusion(result, frame, has_bounds=bool(bounds))
    sentences = [] if dims else [str(line) for line in comparison_lines(frame)]
    if keys:
        norms = _stats_for_groups(frame, ours, reading)
        order: dict[str, Any] = {"sort": sort, "ascending": ascending, "limit": limit}
        groups = grouped_table(result, keys, order, stats=norms)
        document = {"a": a, "b": b, **conclusion} if as_json else None
        listed = ["changed", "only_a", "only_b", *chosen]
        print_groups(groups, listed, document, ["changed", *most_wanted])
    elif as_json:
        rows = json_rows(frame)
        print_document({"a": a, "b": b, **conclusion, "summary": sentences, "tensors": rows})
    else:
        unit = "channels" if dims else "tensors"
        show = _TableOptions(unit, chosen, most_wanted, _row_limit(limit), everything=everything)
        _print_differences(frame, result.attrs.get("explanation"), sentences, show)
        if sentence := attribute_sentence(result, "--json lists all"):
            complain(sentence)
    return int(not is_good)


def _conclusion(
    result: xr.Dataset, frame: pd.DataFrame, *, has_bounds: bool
) -> tuple[bool, dict[str, Any]]:
    """Return whether a comparison succeeds, and what the JSON document states about all of it."""
    is_same, is_good = frame["status"] == "same", frame["status"].isin(["same", "close"])
    conclusion: dict[str, Any] = {"same": bool(is_same.all())}
    if has_bounds:
        conclusion["close"] = bool(is_good.all())
    if "outcome" in frame:
        is_explained = frame["outcome"] == "explained"
        is_good = is_explained | (frame["status"] == "close")
        sentence = result.attrs["explanation"]
        conclusion |= {"explained": bool(is_explained.all()), "explanation": sentence}
    changes = result.encoding.get("attributes", ())
    conclusion["attributes"] = [change.as_json() for change in changes]
    return bool(is_good.all()) and not changes, conclusion


class _TableOptions(NamedTuple):
    """The rows and the columns of a comparison to print."""

    unit: str  # of a row: tensors, or channels
    columns: list[str]
    most_wanted: list[str]  # of the columns, if the terminal is narrow
    limit: int | None  # of the rows
    everything: bool  # whether equal tensors are rows


def _print_differences(
    frame: pd.DataFrame, explanation: str | None, sentences: Sequence[str], show: _TableOptions
) -> None:
    """Print sentences about many differences, then a table of them."""
    from xckpt.notebook.changes import FEW_TENSORS
    from xckpt.notebook.documents import Sentence

    is_explained = "outcome" in frame
    is_listed = frame["outcome"] != "explained" if is_explained else frame["status"] != "same"
    blocks = [] if explanation is None else [Sentence("lead", explanation)]
    if is_listed.sum() > FEW_TENSORS:
        blocks += [Sentence("", sentence) for sentence in sentences]
    print_blocks(blocks)
    print_frame = _print_explanations if is_explained else _print_comparison
    print_frame(frame, show)


def _bounds(texts: Sequence[str]) -> dict[str, float]:
    """Parse --fail-above: measures with their bounds."""
    bounds: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            bounds[name.strip()] = float(value)
        except ValueError:
            reason = f"{value!r} is not a number" if equals else "it takes MEASURE=VALUE"
            message = f"--fail-above {text}: {reason}, such as rel_l2=1e-3"
            raise click.UsageError(message) from None
    return bounds


def _require_whole_tensors(dims: object, options: dict[str, Any]) -> None:
    """Raise an error in usage if --dim is combined with an option for whole tensors."""
    used = [option for option, value in options.items() if value]
    if dims and used:
        raise click.UsageError(f"{used[0]} is of whole tensors: leave --dim out")


def _compared(
    columns: Sequence[str] | None, sort: str | None, *, codes: bool, explain: bool
) -> list[str]:
    """Return the columns of a comparison to print."""
    from xckpt.comparison import MEASURES
    from xckpt.statistics import OF_CODES
    from xckpt.statistics.tables import EXPLANATION_COLUMNS as COLUMNS

    more = OF_CODES if codes else ()
    columns = columns or (_EXPLAINED if explain else _MEASURES)
    chosen = _chosen(columns, [*MEASURES, *more, *(COLUMNS if explain else ())], *more, sort)
    return list(dict.fromkeys([*([] if explain else ["status"]), *chosen]))


def _stats_for_groups(
    frame: pd.DataFrame, ours: OpenTensors, reading: FileInput
) -> xr.Dataset | None:
    """Return statistics with the norms of equal tensors, if groups of a comparison need them."""
    from xckpt.statistics import stats as compute_stats

    # The comparison may have skipped the values of equal tensors.
    needs_norms = {"same", "changed"} <= set(frame["status"])
    return compute_stats(ours, **reading.scanning) if needs_norms else None


def _print_explanations(frame: pd.DataFrame, show: _TableOptions) -> None:
    """Print the unexplained tensors, then patterns of the names of the explained ones."""
    from xckpt.notebook.documents import Field, Table
    from xckpt.notebook.folding import fold
    from xckpt.statistics import represented
    from xckpt.tensor_rows import Row

    is_good = frame["outcome"] == "explained"
    exceptions, explained = frame[~is_good], frame[is_good]
    is_represented = represented(frame)
    exceptions = exceptions[~is_represented[~is_good]]
    if not exceptions.empty:
        _print_rows(exceptions, show)
    rows = [
        Row(f"{name} -> {partner}" if partner else name, cause, (), 0)
        for name, cause, partner, is_partner in zip(
            explained.index,
            explained["cause"],
            explained["other_names"],
            is_represented[is_good],
            strict=True,
        )
        if not is_partner and (show.everything or cause != "equal")
    ]
    if rows:
        fields = [Field("explained", "name"), Field("tensors", "count"), Field("cause", "word")]
        patterns = fold(rows)[: show.limit]
        print_blocks([Table(fields, [(p.text, p.count, p.dtype) for p in patterns])])
    is_equal = is_good & (frame["cause"] == "equal")
    counts = Counter(frame["outcome"].mask(is_equal, "equal")[~is_represented])
    kinds = ("unreadable", "changed", "unmatched", "explained", "equal")
    facts = [f"{counts[kind]:,} {kind}" for kind in kinds if counts[kind]]
    complain(f"{sum(counts.values()):,} tensors: {', '.join(facts) or 'none'}")


def _print_comparison(frame: pd.DataFrame, show: _TableOptions) -> None:
    """Print the rows of tensors that differ, and the number of all rows by status."""
    listed = frame if show.everything else frame[frame["status"] != "same"]
    if not listed.empty:
        _print_rows(listed, show)
    counts = Counter(frame["status"])
    facts = [f"{counts[kind]:,} {word}" for kind, word in _WORDS.items() if counts[kind]]
    unit = show.unit if len(frame) != 1 else show.unit.removesuffix("s")
    complain(f"{len(frame):,} {unit}: {', '.join(facts) or 'all are the same'}")


def _print_rows(listed: pd.DataFrame, show: _TableOptions) -> None:
    from xckpt.statistics import frame_table

    print_blocks([frame_table(listed.head(show.limit), show.columns, wanted=show.most_wanted)])


# --- report --------------------------------------------------------------------------------------


@command("names overwrite no-cache progress")
@click.argument("file")
@click.argument("other", required=False)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="PATH",
    help="The new file: HTML if it ends in .html, Markdown if it ends in .md.",
)
@click.option("--no-explain", is_flag=True, help="Do not explain why tensors differ.")
def report(
    file: str,
    other: str | None,
    reading: FileInput,
    *,
    output: str,
    names: str | None,
    no_explain: bool,
    overwrite: bool,
) -> int:
    """Write a report on FILE, or on its differences from OTHER.

    The report is a self-contained document without scripts. For one file it has a summary, the
    findings, and statistics along the layers; for two files the changes, their causes and sizes,
    and the most changed tensors.
    """
    from xckpt.accessor.reporting import document_kind

    with usage_errors(output=output):
        document_kind(output)
        reading.dataset(file).ckpt.report(
            output,
            None if other is None else reading.dataset(other),
            names=renaming((), names),
            explain=not no_explain,
            overwrite=overwrite,
            **reading.scanning,
            storage_options=reading.storage_options,
        )
    complain(f"wrote {output}")
    return 0
