"""``xckpt compare``: how much the tensors of two files differ."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
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

__all__ = ["compare"]

_SHOWN = ("status", "equal_fraction", "max_abs", "rmse", "rel_l2", "cosine")
_STATUS = {"changed": "yellow", "only_a": "red", "only_b": "red", "shape": "bold red"}
_WORDS = {
    "changed": "changed",
    "only_a": "only in A",
    "only_b": "only in B",
    "shape": "of another shape",
}


@click.command
@click.argument("a")
@click.argument("b")
@click.option("--all", "everything", is_flag=True, help="Also list tensors that are the same.")
@click.option("--sort", metavar="COLUMN", help="Largest first; by default most changed first.")
@click.option("--limit", type=click.IntRange(min=1), help="So many rows at most.")
@click.option(
    "--rename",
    nargs=2,
    metavar="REGEX NEW",
    help="How names in A become names in B, as '^model\\.' ''.",
)
@click.option("--no-cache", is_flag=True, help="Neither use nor keep earlier results.")
@reading_options
@json_option
def compare(
    a: str,
    b: str,
    reading: Reading,
    *,
    everything: bool,
    sort: str | None,
    limit: int | None,
    rename: tuple[str, str] | None,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Say how much the tensors of A and B differ, whatever their formats and element types.

    Numbers are compared: a tensor and a copy of it in a larger type are the same. The exit status
    is 1 if there is any difference. With --json all tensors are listed.
    """
    from xckpt.statistics import compare as compute
    from xckpt.statistics import table
    from xckpt.statistics.comparison import MEASURES

    if rename is not None:
        _require_pattern(rename[0])
    require_columns([sort] if sort else [], MEASURES)
    both = replace(reading, tensors=())
    result = compute(
        both.dataset(a),
        both.dataset(b),
        names=rename,
        tensors=reading.wanted,
        progress=is_terminal(),
        cache=not no_cache,
    )
    frame = table(result)
    if frame.empty and reading.tensors:
        raise click.UsageError(f"--tensors matches no tensor of {a} or {b}")
    if sort is not None:
        frame = frame.sort_values(sort, ascending=False, kind="stable")
    different = frame[frame["status"] != "same"]
    if as_json:
        print_document(_document(a, b, frame, different.empty))
    else:
        _print((frame if everything else different).head(limit))
        complain(_summary(frame))
    return int(not different.empty)


def _require_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise click.UsageError(
            f"--rename: {pattern!r} is no regular expression: {error}"
        ) from error


def _print(frame: pd.DataFrame) -> None:
    if frame.empty:
        return
    columns = [frame[name].tolist() for name in _SHOWN]
    texts = [[v if isinstance(v, str) else figure(v) for v in column] for column in columns]
    head = [Column("tensor"), Column("status", styles=_STATUS)]
    head += [Column(name, right=True) for name in _SHOWN[1:]]
    print_table(head, list(zip(frame.index, *texts, strict=True)))


def _summary(frame: pd.DataFrame) -> str:
    counts = Counter(frame["status"])
    facts = [f"{counts[status]:,} {word}" for status, word in _WORDS.items() if counts[status]]
    return f"{len(frame):,} tensors: {', '.join(facts) or 'all are the same'}"


def _document(a: str, b: str, frame: pd.DataFrame, same: Any) -> dict[str, Any]:
    return {"a": a, "b": b, "same": bool(same), "tensors": json_rows(frame)}
