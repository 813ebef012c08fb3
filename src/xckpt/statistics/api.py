"""`stats`: the statistics of every tensor; `table`: in a DataFrame."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import shown
from xckpt.index import paused_collector
from xckpt.progress import Progress
from xckpt.statistics.accumulate import Sketch
from xckpt.statistics.channel_sketch import (
    OF_CHANNELS,
    ChannelSketch,
    channel_statistics,
    is_turned,
    width_of,
)
from xckpt.statistics.describe import (
    OF_REAL_NUMBERS,
    describe,
    describe_rows,
    statistic_names,
)
from xckpt.statistics.differences import STATUSES, ranked
from xckpt.statistics.entries import contents_of, deferred, laid, laid_out, member_names
from xckpt.statistics.explaining.wording import COLUMNS, TEXTS
from xckpt.statistics.plausible import are_statistics
from xckpt.statistics.refine import refine, wanted_of
from xckpt.statistics.results import rows_of
from xckpt.statistics.scan import gather, kept

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    import pandas as pd
    import xarray as xr

    from xckpt.progress import ProgressOption
    from xckpt.statistics.entries import Describable, Described
    from xckpt.statistics.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]

#: Those that are given unless others are asked for.
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)

# Shown of a result at a glance, of a comparison or of statistics.
_SHOWN = (
    *("status", "cause", "count", "equal_fraction", "nan", "inf"),
    *("max_abs", "rmse", "rel_l2", "cosine"),
    *("sqnr_db", "min", "max", "mean", "std"),
)
_MOST_ROWS = 10
_WIDEST_NAME = 48

# Statuses of tensors that are on both sides.
_ON_BOTH_SIDES = [STATUSES.index(status) for status in ("same", "changed", "shape")]
# Attributes of a comparison that a table has as columns, and what stands for one that is not there.
_PARTNERS = ("other_name", "matched_by")
_STATED = dict.fromkeys(_PARTNERS, "") | {key: "" if key in TEXTS else np.nan for key in COLUMNS}
_WHOLE_NUMBERS = ("count", "nan", "inf", "zero")


def stats(
    obj: Describable,
    *,
    quantiles: Sequence[float] = QUANTILES,
    exact_quantiles: bool = False,
    channels: bool = False,
    dim: Hashable | Iterable[Hashable] | None = None,
    progress: ProgressOption = None,
    compute: bool = True,
    cache: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> xr.Dataset:
    """Compute the statistics of every tensor, in one pass over all bytes and bounded memory.

    It runs on the threads of this machine (dask's ``num_workers``, else as many as it has), or on
    the cluster of an active `distributed.Client`. The results are the same to the last bit.

    Parameters
    ----------
    obj : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        What to describe. Element types are those that are stored: bfloat16 and float8 are never
        converted; quantised tensors are described as the numbers they stand for.
    quantiles : sequence of float
        Between 0 and 1; the statistic ``q0.5`` is the median.
    exact_quantiles : bool
        Whether to find the quantiles of float32, float64 and integers of 32 and 64 bits exactly,
        by one to four more passes. Else they are within 2**-8 of the element, relative to it.
        Those of smaller types are always exact.
    channels : bool
        Whether to look at every row and column as well, in the same pass: statistics such as
        ``dead_columns`` and ``outlier_columns``, which `findings` needs.
    dim : hashable or iterable of hashable, optional
        Dimensions to reduce; by default all but those along which tensors are stacked. Variables
        without any of them are left out.
    progress : bool or callable, optional
        Whether to show a bar; by default one appears in a terminal or notebook if it takes more
        than a moment. A function is called as ``f(done, total)``, with bytes: `done` never
        decreases, and `total` grows where more turns out to be needed, as for exact quantiles.
    compute : bool
        False gives dask arrays: the pass is made once they are computed.
    cache : bool
        Whether to keep what was found of unchanged files in the user's cache, so that a second
        call reads nothing and an interrupted one goes on (``XCKPT_CACHE_DIR`` says where).
    storage_options : dict, optional
        For fsspec, where `obj` is a URL.

    Returns
    -------
    xarray.Dataset
        Each variable with the dimension ``statistic`` first, then those that were not reduced.
        ``attrs["dead_rows"]`` of a variable is the number of its rows that are all zeros, for
        each tensor; a row is a slice along the axis that is stored slowest. Members that an outer
        join of layers left empty are not counted: all of their statistics are NaN, and a table
        does not have them.

        ============================  =========================================================
        ``count``                     number of elements
        ``nan``, ``inf``, ``zero``    how many of them are NaN, infinite, zero
        ``min``, ``max``, ``absmax``  of the finite elements, as is all that follows
        ``mean``, ``std``             the latter of the population (``ddof=0``)
        ``rms``, ``l2``               root of the mean, and of the sum, of the squares
        ``skew``, ``kurtosis``        standardised; the kurtosis of a normal distribution is 0
        ``q0.001`` to ``q0.999``      as numpy.quantile(method="nearest")
        ``unique``                    distinct values, NaN left out, of types of 8 and 16 bits
        ============================  =========================================================

    Raises
    ------
    CheckpointError
        If a tensor cannot be read.
    ValueError
        If a quantile is not between 0 and 1, a dimension is nowhere, or `channels` are asked for
        along a dimension.

    Examples
    --------
    >>> st = xckpt.stats("m.zt")  # doctest: +SKIP
    >>> st["blocks.0.attn.w_qkv"].sel(statistic="std").item()  # doctest: +SKIP
    0.0199
    """
    quantiles = _checked_quantiles(quantiles)
    if channels and dim is not None:
        raise ValueError("channels=True describes whole tensors: leave out dim=")
    contents = contents_of(obj, storage_options)
    if dim is not None:
        dim = set(dim) if isinstance(dim, Iterable) and not isinstance(dim, str) else {dim}
    with paused_collector():
        entries = contents.entries(dim)
    names = [*statistic_names(quantiles), *(OF_CHANNELS if channels else ())]
    find = partial(
        _describe_all,
        quantiles=quantiles,
        exact=exact_quantiles,
        channels=channels,
        progress=progress,
        cache=cache,
    )
    attrs: list[dict[str, Any]] = [_stored_as(entry) if channels else {} for entry in entries]
    if compute:
        found, every = find(entries)
        for attr, entry, dead in zip(attrs, entries, every, strict=True):
            if dead and None not in dead:
                attr["dead_rows"] = dead if entry.dims else dead[0]
    else:
        shapes = [(len(names), *entry.shape) for entry in entries]
        found = deferred(partial(_statistics, find), entries, shapes)
    with paused_collector():
        return laid_out(names, entries, found, attrs, contents)


def _stored_as(entry: Described) -> dict[str, Any]:
    """Say what the tensors of a variable are, for findings."""
    dtype = entry.variable.encoding.get("stored_dtype", entry.variable.dtype)
    shapes = [list(reader.array.shape) for reader in entry.readers[:1]]
    return {"dtype": str(dtype), "shape": shapes[0] if shapes else []}


def known_stats(obj: Any) -> xr.Dataset | None:
    """Return the statistics of an object if an earlier scan kept them; no data are read."""
    readers = [reader for entry in contents_of(obj).entries() for reader in entry.readers]
    return stats(obj) if all(kept(readers, Sketch)) else None


def _checked_quantiles(quantiles: Any) -> tuple[float, ...]:
    if isinstance(quantiles, str) or not isinstance(quantiles, Iterable):
        raise TypeError(
            f"quantiles are a sequence of numbers such as [0.05, 0.5], not {quantiles!r}"
        )
    checked = []
    for quantile in quantiles:
        if not isinstance(quantile, float | int | np.number) or isinstance(quantile, bool):
            raise TypeError(f"a quantile is a number between 0 and 1, unlike {quantile!r}")
        if not 0.0 <= quantile <= 1.0:
            raise ValueError(f"a quantile is between 0 and 1, unlike {quantile}")
        checked.append(float(quantile))
    return tuple(checked)


def _statistics(find: Callable[..., Any], entries: Sequence[Described]) -> list[Any]:
    """Leave out how many rows are zeros, which has no place in a dask array."""
    found: list[Any] = find(entries)[0]
    return found


def _describe_all(
    entries: Sequence[Described],
    *,
    quantiles: tuple[float, ...],
    exact: bool,
    channels: bool,
    progress: ProgressOption,
    cache: bool,
) -> tuple[list[Array], list[list[int | None]]]:
    """Return the statistics of each variable, and how many rows of its tensors are zeros."""
    readers = [reader for entry in entries for reader in entry.readers]
    names = statistic_names(quantiles)
    about: tuple[Any, ...] = ("statistics", names, quantiles, exact)
    more = OF_CHANNELS if channels else ()
    with Progress(progress, "statistics") as bar:
        rows = rows_of(
            readers,
            (*about, more) if more else about,
            len(names) + len(more) + 1,
            lambda some: _describe_tensors(
                [readers[number] for number in some],
                quantiles,
                bar,
                exact=exact,
                channels=channels,
                cache=cache,
            ),
            are_plausible=partial(are_statistics, quantiles=quantiles, more=more),
            enabled=cache,
        )
    dead = [None if isnan(number) else int(number) for number in rows[:, -1].tolist()]
    values = rows[:, :-1]
    tables = {
        at: describe_rows(entry.variable, entry.dims, quantiles)
        for at, entry in enumerate(entries)
        if not entry.readers
    }
    found, every = [], []
    stop = 0
    with paused_collector():
        for at, entry in enumerate(entries):
            start, stop = stop, stop + len(entry.readers)
            some = dead[start:stop]
            if at in tables:
                found.append(tables[at])
            elif entry.dims:
                found.append(laid(values[start:stop], entry.shape, entry.gone))
            else:
                found.append(values[start])
            if entry.absent is not None and entry.gone is not None:
                some = _at_places(some, entry.gone)
                # But for `count` and `nan`, the first two, statistics are of the finite elements.
                found[-1][:2] -= entry.absent
                found[-1][:, entry.gone] = np.nan
            every.append(some)
    return found, every


def _at_places(dead: list[int | None], gone: Array) -> list[int | None]:
    """Put how many rows of tensors are zeros at their places; no rows of absent ones are."""
    each = iter(dead)
    return [0 if is_gone else next(each) for is_gone in gone.ravel()] if dead else []


def _describe_tensors(
    readers: Sequence[Reader],
    quantiles: tuple[float, ...],
    bar: Progress,
    *,
    exact: bool,
    channels: bool,
    cache: bool,
) -> list[list[float]]:
    """Return the statistics of each tensor, and how many of its rows are zeros; NaN if unknown."""
    wanted: list[Any] = [()] * len(readers)
    first, std_at = len(statistic_names(())) - 1, statistic_names(()).index("std")
    operation = ChannelSketch if channels else Sketch
    widths = [width_of(reader) for reader in readers] if channels else None

    def finish(number: int, sketch: Sketch) -> list[float]:
        if exact and not readers[number].complex:
            wanted[number] = wanted_of(sketch, quantiles)
        values = describe(sketch, quantiles)
        if readers[number].complex:
            names = statistic_names(())
            for name in OF_REAL_NUMBERS:
                values[names.index(name)] = np.nan
            values[first:] = [np.nan] * (len(values) - first)
        if isinstance(sketch, ChannelSketch):
            std = values[std_at]
            values += channel_statistics(sketch, std, turned=is_turned(readers[number]))
        return [*values, sketch.rows.dead if sketch.rows.length else np.nan]

    described = gather(
        readers, operation, finish, bar, arguments=widths, cache=cache, stretched=True
    )
    if exact:
        refined = refine(readers, wanted, bar)
        for values, found in zip(described, refined, strict=True):
            for at, quantile in enumerate(quantiles, first):
                values[at] = found.get(quantile, values[at])
    return described


def table(result: xr.Dataset) -> pd.DataFrame:
    """Lay statistics out with one row for each tensor.

    Parameters
    ----------
    result : xarray.Dataset
        As `stats` or `compare` gives it, or parts of that.

    Returns
    -------
    pandas.DataFrame
        The index ``tensor`` has the names of the tensors in the file, also of those that are
        stacked; there is one column for each statistic. Of a comparison, what changed most comes
        first: tensors that cannot be compared, those that differ by NaN or infinities, and others
        by ``rel_l2``. One that was explained has the columns ``cause``, ``explanation``,
        ``verified``, ``offset``, ``scale``, ``rank``, ``heads`` and ``other_names`` as well.

    Raises
    ------
    ValueError
        If it has no dimension ``statistic``.

    Examples
    --------
    >>> table(xckpt.stats("m.zt")).nlargest(3, "absmax")  # doctest: +SKIP
    """
    import pandas as pd

    with paused_collector():
        names, values = tensor_rows(result)
        columns = result["statistic"].to_numpy().tolist()
    frame = pd.DataFrame(values, pd.Index(names, name="tensor", dtype=object), columns)
    whole = [c for c in _WHOLE_NUMBERS if c in columns and frame[c].notna().all()]
    frame = frame.astype(dict.fromkeys(whole, np.int64))
    stated = {key for variable in result.variables.values() for key in variable.attrs}
    wanted = [*_PARTNERS, *(COLUMNS if "cause" in stated else ())]
    is_said = not stated.isdisjoint(wanted)
    said = said_of_tensors(result, {key: _STATED[key] for key in wanted}) if is_said else {}
    for key in _PARTNERS:
        if any(said.get(key, ())):
            frame[key] = said[key]
    if "cause" in said:
        frame.insert(1, "cause", said["cause"])
        for key in COLUMNS[1:]:
            frame[key] = said[key]
        frame["verified"] = frame["verified"] == 1
    return ranked(frame) if "status" in frame else frame


def channel_values(result: xr.Dataset, statistic: str) -> dict[str, Array]:
    """Return a statistic of the channels of each tensor of a comparison, by name."""
    at = result["statistic"].to_numpy().tolist().index(statistic)
    coords = {name: result.variables[name] for name in result.coords}
    found: dict[str, Array] = {}
    for name, variable in _described(result):
        record = variable.encoding.get("stack")
        along = tuple([dim for dim in variable.dims if record and dim in record.dims])
        names = member_names(name, variable, along, coords)
        rows = variable.transpose("statistic", *along, ...)[at].to_numpy().reshape(len(names), -1)
        pairs = zip(names, rows, strict=True)
        found |= {each: row for each, row in pairs if each is not None}
    return found


def matched_names(result: xr.Dataset) -> dict[str, str]:
    """Return the names of tensors of `a` that a comparison found in `b`, and their names there."""
    stacks = [(v.dims[1:], v.encoding.get("stack")) for _, v in _described(result)]
    if any(set(dims) - set(record.dims if record else ()) for dims, record in stacks):
        raise ValueError("names are of a comparison of whole tensors, without dim=")
    names, values = tensor_rows(result)
    at = result["statistic"].to_numpy().tolist().index("status")
    others = said_of_tensors(result, {"other_name": None})["other_name"]
    return {
        name: name if other is None else other
        for name, other, status in zip(names, others, values[:, at], strict=True)
        if status in _ON_BOTH_SIDES
    }


def tensor_names(result: xr.Dataset) -> list[str]:
    """Name the tensors of a result, in the order of `table`."""
    return [name for _, names in named_tensors(result) for name in names if name is not None]


def tensor_rows(result: xr.Dataset) -> tuple[list[str], Array]:
    """Return the names of the tensors of a result, and a row for each: its statistics or bins."""
    found: list[str] = []
    blocks = [np.empty((0, result.sizes.get("bin", result.sizes.get("statistic", 0))))]
    for variable, names in named_tensors(result):
        rows = np.asarray(variable.values).reshape(variable.shape[0], -1).T
        there = [name for name in names if name is not None]
        kept = rows if len(there) == len(names) else rows[[name is not None for name in names]]
        found += there
        blocks.append(kept)
    return found, np.concatenate(blocks if len(blocks) == 1 else blocks[1:])


def named_tensors(result: xr.Dataset) -> Iterator[tuple[xr.Variable, list[str | None]]]:
    """Name the tensors of each variable of a result, None where they are absent."""
    coords = {name: result.variables[name] for name in result.coords}
    for name, variable in _described(result):
        yield variable, member_names(name, variable, variable.dims[1:], coords)


def result_text(result: xr.Dataset) -> str | None:
    """Write what a result is, and its first rows; None for anything else."""
    kind = _kind_of(result)
    if kind is None:
        return None
    from xckpt.notebook.formatting import base_name, counted, printable, shortened

    files = [result.attrs.get("source"), result.attrs.get("compared_with")]
    of = " with ".join(base_name(str(file)) for file in files if file)
    head = f"<{' of '.join(filter(None, (kind, of)))}>  {{}}"
    names = tensor_names(result)
    tensors = counted(len(names), "tensor")
    if kind == "Histogram":
        return head.format(f"{tensors} · {result.sizes['bin']} bins")
    if any(hasattr(variable._data, "dask") for variable, _ in named_tensors(result)):  # noqa: SLF001
        return head.format(f"{tensors} · not computed yet")
    frame = table(result)
    fact = f"{len(result['statistic'])} statistics"
    if "status" in frame:
        counts = frame["status"].value_counts()
        fact = ", ".join(f"{n:,} {status}" for status, n in counts.items() if n) or "none in common"
    shown_columns = [name for name in _SHOWN if name in frame] or list(frame)[: len(_SHOWN)]
    top = frame[shown_columns].head(_MOST_ROWS).rename_axis(None)
    top.index = top.index.map(lambda name: shortened(printable(name), _WIDEST_NAME))
    said = result.attrs.get("explanation")
    text = top.to_string(float_format=lambda x: f"{x:.4g}") if len(top) else ""
    more = f"… {len(frame) - len(top):,} more: .ckpt.table()" if len(frame) > len(top) else ""
    # Names from files are in it.
    said = said and printable(str(said))
    return "\n".join(filter(None, (head.format(f"{tensors}: {fact}"), said, text, more)))


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


def _described(result: xr.Dataset) -> list[tuple[Hashable, xr.Variable]]:
    """List the variables of a result, statistics first."""
    coords = set(result.coords)
    found = [(n, v) for n, v in result.variables.items() if n not in coords]
    axis = "bin" if "bin" in result.dims else "statistic"
    for name, variable in found:
        if axis not in variable.dims:
            reason = f"{shown(str(name))} has no dimension {axis!r}: not a result of stats"
            raise ValueError(f"{reason}. Of a checkpoint: ds.ckpt.stats().ckpt.table()")
    # To transpose takes longer than all else that is done with a variable.
    return [(n, v if v.dims[0] == axis else v.transpose(axis, ...)) for n, v in found]


def said_of_tensors(result: xr.Dataset, unknown: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what attributes say of each tensor: they have a list, or one value of one tensor.

    `unknown` has the attributes, and what stands for one that is not there.
    """
    found: dict[str, list[Any]] = {key: [] for key in unknown}
    for variable, names in named_tensors(result):
        for key, nothing in unknown.items():
            stated = variable.attrs.get(key, ())
            stated = [stated] if isinstance(stated, str) else np.atleast_1d(stated).tolist()
            known = stated if len(stated) == len(names) else [nothing] * len(names)
            found[key] += [
                each for each, name in zip(known, names, strict=True) if name is not None
            ]
    return found
