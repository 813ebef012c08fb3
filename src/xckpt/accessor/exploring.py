"""``ds.ckpt.explore()``: the tensors of an open object and their statistics, for the explorer."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.datasets.stack_records import unstacked_encoding
from xckpt.datasets.variables import LazyVariable
from xckpt.errors import warn
from xckpt.notebook.folding import ascending, marked
from xckpt.notebook.shown import View
from xckpt.notebook.summary import KnownResults, Summary, TensorFinding
from xckpt.notebook.views import summary_blocks
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from xckpt.datasets.tensors import OpenTensors
    from xckpt.typing import Array

_BINS = 80


def explore(
    tensors: OpenTensors,
    summary: Summary,
    result: xr.Dataset | None = None,
    findings: Collection[TensorFinding] | None = None,
) -> Any:
    """Return the widget that explores an open object, with its statistics and findings, if any."""
    try:
        from xckpt.notebook.explorer import Explorer
    except ModuleNotFoundError as error:
        if error.name not in {"anywidget", "ipywidgets"}:
            raise
        text = "explore() needs anywidget: pip install 'xckpt[widgets]'; here is the summary"
        warn(text)
        return View(summary_blocks(summary))
    from xckpt.statistics import QUANTILES, statistic_names

    rows = marked(tensors.rows, tensors.structure)
    rows = [rows[at] for at in ascending([row.name for row in rows])]
    return Explorer(
        rows,
        summary=summary,
        statistics=statistic_names(QUANTILES),
        compute=partial(compute, tensors),
        computed=None if result is None else _computed(result, findings=findings),
        histogram=partial(histogram, tensors),
        code=tensors.code,
    )


def compute(
    tensors: OpenTensors, names: Sequence[str], report: Callable[[int, int], object]
) -> KnownResults:
    """Compute the statistics of tensors, as `xckpt.notebook.explorer.Compute`."""
    from xckpt.arrays.kinds import require_numbers
    from xckpt.statistics import stats

    numeric = []
    for name in names:
        with suppress(TypeError):
            require_numbers(tensors.variable(name).dtype)
            numeric.append(name)
    result = stats(_dataset(tensors, numeric), progress=report)
    for number, name in enumerate(numeric):  # findings compare tensors by their names
        result.variables[number].encoding["tensor"] = name
    return _computed(result, numeric)


def _computed(
    result: xr.Dataset,
    names: Sequence[str] | None = None,
    findings: Collection[TensorFinding] | None = None,
) -> KnownResults:
    """Return the statistics and findings of tensors, which `names` calls by their numbers."""
    from xckpt.health import findings as judge
    from xckpt.statistics import table

    frame = table(result)
    called = list(frame.index) if names is None else names
    values = dict(zip(called, frame.to_numpy(float).tolist(), strict=True))
    if findings is None:
        rows = judge(result).itertuples(index=False, name=None) if called else ()
        named = dict(zip(map(str, frame.index), called, strict=True))
        findings = [TensorFinding(named[str(tensor)], *more) for tensor, *more in rows]
    statistics = {name: dict(zip(frame, row, strict=True)) for name, row in values.items()}
    return KnownResults(statistics, findings)


def histogram(
    tensors: OpenTensors, name: str, report: Callable[[int, int], object]
) -> tuple[Array, Array]:
    """Count the elements of a tensor in bins, as `xckpt.notebook.explorer.Histogram`."""
    from xckpt.statistics import histogram as counted

    bins: int | Array = _BINS
    if tensors.variable(name).dtype.kind in "iu":
        statistics = compute(tensors, [name], report).statistics[name]
        low, high = statistics["min"], statistics["max"]
        # Cut between whole numbers, with equally many in each bin; otherwise some bins stick out.
        width = max(1, ceil((high - low + 1) / _BINS))
        count = ceil((high - low + 1) / width)
        bins = low - 0.5 + width * np.arange(count + 1.0)
    result = counted(_dataset(tensors, [name]), bins=bins, scale="linear", progress=report)
    left, right = (result[f"bin_{side}"].to_numpy() for side in ("left", "right"))
    return np.append(left, right[-1]), result.variables[0].to_numpy()


def _dataset(tensors: OpenTensors, names: Sequence[str]) -> xr.Dataset:
    """Put tensors in a Dataset by their numbers; nodes of a tree may not agree on sizes."""
    variables = {}
    for key, name in enumerate(names):
        variable = tensors.variable(name)
        dims = tuple([f"{key}_{axis}" for axis in range(variable.ndim)])
        data = data_of(variable)
        variables[key] = LazyVariable.of(dims, data, None, unstacked_encoding(variable))
    return xr.Dataset(variables)
