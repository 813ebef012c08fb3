"""The commands for values: ``xckpt stats``, ``spectrum``, ``compare``, ``report``, ``extract``."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from xckpt.cli.common import (
    FileInput,
    calls_for_action,
    complain,
    json_rows,
    print_blocks,
    print_document,
    print_text,
    renaming,
    require_rules,
    usage_errors,
)
from xckpt.cli.options import command
from xckpt.formatting import counted, figure, printable
from xckpt.options import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd
    import xarray as xr

    from xckpt.cli.common import TableInput
    from xckpt.datasets.tensors import OpenTensors

_STATISTICS = ("dtype", "shape", "mean", "std", "min", "max", "nan", "inf", "zero")
#: Columns that a narrow terminal shows rather than others.
_MAIN_STATISTICS, _MAIN_MEASURES = ("mean", "std", "nan", "inf"), ("status", "rel_l2")
_MAIN_OF_EXPLAINED = ("rel_l2", "cause", "explanation")
_MEASURES = ("status", "equal_fraction", "max_abs", "rmse", "rel_l2", "cosine")
_EXPLAINED = ("outcome", "cause", "rel_l2", "explanation")
_OUTCOMES = ("unreadable", "changed", "unmatched", "explained", "equal")

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
@click.option("--exact-quantiles", is_flag=True, help=text_of("exact_quantiles"))
def stats(
    file: str,
    reading: FileInput,
    request: TableInput,
    *,
    only_findings: bool,
    ignore: tuple[str, ...],
    dims: dict[str | int, int | None] | None,
    quantiles: tuple[float, ...],
    exact_quantiles: bool,
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
    from xckpt.statistics.tables import FACTS

    computed = statistic_names(quantiles or QUANTILES)
    existing = computed if dims else [*FACTS, *computed]
    requested = [name for name in statistic_names(quantiles) if name not in statistic_names(())]
    columns = request.choose(existing, [n for n in _STATISTICS if n in existing], requested)
    require_rules(ignore)
    if dims and (only_findings or request.keys):
        raise click.UsageError("--findings and --by are of whole tensors: leave --dim out")
    tensors = reading.contents(file, request.keys)
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
    if request.keys:
        of_json = document if as_json else None
        if findings_frame is None:
            request.print_groups(result, columns, _MAIN_STATISTICS, of_json)
        else:
            request.print_groups(findings_frame, None, (), of_json)
        return status
    frame = table(result) if dims else _with_facts(table(result), tensors)
    if as_json:
        from xckpt.health import findings

        document["tensors"] = json_rows(request.arrange(frame, request.limit))
        if findings_frame is None and not dims:
            findings_frame = findings(result, ignore=ignore)
        records = [] if findings_frame is None else findings_frame.to_dict("records")
        print_document({**document, "findings": records})
    elif findings_frame is None:
        _print_statistics(frame, columns, request, _MAIN_STATISTICS)
    else:
        _print_findings(findings_frame, request.limit)
    return status


def _print_findings(findings: pd.DataFrame, limit: int | None) -> None:
    from xckpt.health import findings_blocks

    if findings.empty:
        complain("no findings")
    print_blocks(findings_blocks(findings.head(limit)))


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
    frame: pd.DataFrame, columns: Sequence[str], request: TableInput, preferred: Sequence[str]
) -> None:
    request.print(frame, columns, preferred)
    if request.limit is None and request.most is not None and len(frame) > request.most:
        count = len(frame)
        complain(f"the first {request.most} of {count:,} tensors; --limit {count} prints all")


# --- spectrum ------------------------------------------------------------------------------------


@command("columns sort ascending limit by no-cache progress json")
@click.argument("file")
@click.option("--minus", metavar="FILE", help="Analyse the differences from this checkpoint.")
def spectrum(
    file: str, reading: FileInput, request: TableInput, *, minus: str | None, as_json: bool
) -> int:
    """Print ranks, norms, condition, alpha of every matrix in FILE.

    They follow from the singular values. A convolution counts as a matrix of out rows and in *
    kernel columns. Matrices with more than 2**27 elements, usually embeddings, are left out unless
    --tensors selects them. With --by, print a row for each layer, role, ... instead.
    """
    from xckpt.statistics import OF_MATRICES, table
    from xckpt.statistics import spectrum as compute
    from xckpt.statistics.tables import FACTS

    columns = request.choose([*FACTS, *OF_MATRICES], OF_MATRICES)
    statistics = [name for name in columns if name not in FACTS]
    tensors = reading.contents(file, request.keys)
    result = compute(
        tensors,
        **reading.selection,
        **reading.scanning,
        minus=None if minus is None else reading.contents(minus),
        statistics=statistics,
    )
    document: dict[str, Any] = {"source": _source(file, tensors)}
    if request.keys:
        request.print_groups(result, statistics, (), document if as_json else None)
        return 0
    frame = _with_facts(table(result), tensors)
    if as_json:
        print_document({**document, "tensors": json_rows(request.arrange(frame, request.limit))})
    else:
        listed = list(dict.fromkeys(["dtype", "shape", *columns]))
        _print_statistics(frame, listed, request, statistics)
    return 0


# --- compare -------------------------------------------------------------------------------------


def _bounds(
    _context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, float]:
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
    multiple=True,
    metavar="MEASURE=VALUE",
    callback=_bounds,
    help="Tensors that differ by at most this, such as rel_l2=1e-3, are close, and no failure. May "
    "be repeated.",
)
@click.option("--ignore-attrs", is_flag=True, help="Compare numbers only, and no attributes.")
def compare(
    a: str,
    b: str,
    reading: FileInput,
    request: TableInput,
    *,
    everything: bool,
    rename: tuple[tuple[str, str], ...],
    names: str | None,
    dims: dict[str | int, int | None] | None,
    write_names: str | None,
    as_json: bool,
    **options: Any,
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
    from xckpt.statistics import OF_CODES, comparison_lines, matched_names, table
    from xckpt.statistics import stats as compute_stats
    from xckpt.storage import write_file

    matching = renaming(rename, names)
    explain = options["explain"] = options["explain"] or options["adapter"] is not None
    _check_request(request, dims, write_names, options)
    columns = _columns_of_comparison(request, explain=explain, codes=options["codes"])
    both = replace(reading, tensors=(), exclude=(), only=None)
    ours, theirs = both.contents(a), both.contents(b)
    with usage_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tensors=.* matches no tensor of a or b")  # see below
        result = compute(
            ours,
            theirs,
            names=matching,
            dim=dims,
            **options,
            **reading.selection,
            **reading.scanning,
            storage_options=reading.storage_options,
        )
    if write_names is not None:
        write_file(write_names, f"{json.dumps(matched_names(result), indent=1)}\n".encode("ascii"))
    frame = request.arrange(table(result))
    if frame.empty and reading.tensors:
        hint = suggest_filters([*ours.names, *theirs.names], list(reading.tensors))
        raise click.UsageError(f"--tensors matches no tensor in {a} or {b}{hint}")
    is_good, conclusion = _conclusion(result, frame, has_bounds=bool(options["fail_above"]))
    document = {"a": a, "b": b, **conclusion}
    sentences = [] if dims else [str(line) for line in comparison_lines(frame)]
    preferred = [*(_MAIN_OF_EXPLAINED if explain else _MAIN_MEASURES), *OF_CODES]
    if request.keys:
        # The comparison may have skipped the values of equal tensors, whose norms groups need.
        needs_norms = {"same", "changed"} <= set(frame["status"])
        norms = compute_stats(ours, **reading.scanning) if needs_norms else None
        request.print_groups(
            result,
            ["changed", "only_a", "only_b", *columns],
            ["changed", *preferred],
            document if as_json else None,
            stats=norms,
        )
    elif as_json:
        print_document({**document, "summary": sentences, "tensors": json_rows(frame)})
    else:
        _print_sentences(result, frame, sentences)
        _print_rows(frame, columns, request, preferred, everything=everything)
        _print_numbers(result, frame, "channel" if dims else "tensor")
    return int(not is_good)


def _check_request(
    request: TableInput, dims: Any, write_names: str | None, options: Mapping[str, Any]
) -> None:
    """Raise before the pass if options of a comparison exclude each other, or a file exists."""
    of_tensors = {"--adapter": options["adapter"], "--explain": options["explain"]}
    of_tensors |= {"--codes": options["codes"], "--by": request.keys, "--write-names": write_names}
    used = [option for option, value in of_tensors.items() if value]
    if dims and used:
        raise click.UsageError(f"{used[0]} is of whole tensors: leave --dim out")
    if request.keys and options["explain"]:
        raise click.UsageError("--explain describes single tensors: leave --by out")
    if write_names is not None and os.path.lexists(write_names):
        raise click.UsageError(f"{write_names} already exists")


def _columns_of_comparison(request: TableInput, *, explain: bool, codes: bool) -> list[str]:
    """Return the columns to print, with the status unless the outcome replaces it."""
    from xckpt.comparison import MEASURES
    from xckpt.statistics import EXPLANATION_COLUMNS, OF_CODES

    of_codes = OF_CODES if codes else ()
    if explain:
        existing = [*MEASURES, *of_codes, *EXPLANATION_COLUMNS]
        return request.choose(existing, _EXPLAINED, of_codes)
    columns = request.choose([*MEASURES, *of_codes], _MEASURES, of_codes)
    return list(dict.fromkeys(["status", *columns]))


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


def _is_exception(frame: pd.DataFrame) -> pd.Series[bool]:
    """Return which tensors differ without an explanation."""
    return frame["outcome"] != "explained" if "outcome" in frame else frame["status"] != "same"


def _print_sentences(result: xr.Dataset, frame: pd.DataFrame, sentences: Iterable[str]) -> None:
    from xckpt.notebook.changes import FEW_TENSORS
    from xckpt.notebook.documents import Sentence

    explanation = result.attrs.get("explanation")
    blocks = [] if explanation is None else [Sentence("lead", explanation)]
    if _is_exception(frame).sum() > FEW_TENSORS:
        blocks += [Sentence("", sentence) for sentence in sentences]
    print_blocks(blocks)


def _print_rows(
    frame: pd.DataFrame,
    columns: Sequence[str],
    request: TableInput,
    preferred: Sequence[str],
    *,
    everything: bool,
) -> None:
    """Print the tensors that differ, then patterns of the names of explained ones."""
    from xckpt.notebook.documents import Field, Table
    from xckpt.notebook.folding import fold
    from xckpt.statistics import represented
    from xckpt.tensor_rows import Row

    is_listed = _is_exception(frame)
    if "outcome" not in frame:
        listed = frame if everything else frame[is_listed]
        explained = frame[:0]
    else:
        is_partner = represented(frame)
        listed, explained = frame[is_listed & ~is_partner], frame[~(is_listed | is_partner)]
        if not everything:
            explained = explained[explained["cause"] != "equal"]
    if not listed.empty:
        request.print(listed, columns, preferred)
    if not explained.empty:
        triples = zip(explained.index, explained["cause"], explained["other_names"], strict=True)
        rows = [Row(f"{a} -> {b}" if b else a, cause, (), 0) for a, cause, b in triples]
        fields = [Field("explained", "name"), Field("tensors", "count"), Field("cause", "word")]
        patterns = fold(rows)[: request.most]
        print_blocks([Table(fields, [(p.text, p.count, p.dtype) for p in patterns])])


def _print_numbers(result: xr.Dataset, frame: pd.DataFrame, unit: str) -> None:
    """Print the number of tensors with each status or outcome, and of attributes that differ."""
    from xckpt.statistics import attribute_sentence, count_statuses, represented

    if "outcome" in frame:
        is_equal = (frame["outcome"] == "explained") & (frame["cause"] == "equal")
        counts = frame["outcome"].mask(is_equal, "equal")[~represented(frame)].value_counts()
        facts = [f"{counts[kind]:,} {kind}" for kind in _OUTCOMES if counts.get(kind)] or ["none"]
        number = counted(counts.sum(), unit)
    else:
        numbers = count_statuses(frame, "A", "B")
        facts = [text for status, text in numbers.items() if status != "same"]
        facts, number = facts or ["all are the same"], counted(len(frame), unit)
    complain(f"{number}: {', '.join(facts)}")
    if sentence := attribute_sentence(result, "--json lists all"):
        complain(sentence)
    if hint := result.attrs.get("hint"):
        complain(hint)


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


@command("overwrite progress json")
@click.argument("base")
@click.argument("tuned")
@click.argument("folder")
@click.option("--rank", type=int, metavar="N", help="Highest rank; 256 with --energy.")
@click.option(
    "--energy", type=float, metavar="SHARE", help="Share of the squares to keep, such as 0.99."
)
def extract(
    base: str,
    tuned: str,
    folder: str,
    reading: FileInput,
    *,
    rank: int | None,
    energy: float | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Write the changes from BASE to TUNED as a LoRA adapter.

    PEFT loads the FOLDER. Each linear weight that differs gets factors of the lowest rank that
    keeps the energy, or of at most the rank. It prints their ranks and energies.
    """
    from xckpt.adapting import extract_adapter

    files = FileInput(reading.engine, reading.storage_options)
    a, b = (file if files.engine is None else files.dataset(file) for file in (base, tuned))
    with usage_errors(output=folder):
        table = extract_adapter(
            a,
            b,
            folder,
            rank,
            energy=energy,
            **reading.selection,
            overwrite=overwrite,
            progress=reading.scanning["progress"],
            storage_options=reading.storage_options,
        )
    if as_json:
        print_document({"folder": folder, "tensors": json_rows(table)})
        return 0
    for name, row in table.iterrows():
        print_text(
            f"{printable(str(name))}: rank {row['rank']:.0f}, energy {figure(row['energy'])}"
        )
    return 0
