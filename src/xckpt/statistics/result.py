"""`stats`: the statistics of every tensor as one Dataset; `table`: as one DataFrame."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import shown
from xckpt.index import paused_collector
from xckpt.progress import Progress
from xckpt.statistics.along import describe_rows
from xckpt.statistics.comparison import ranked
from xckpt.statistics.describe import describe, statistic_names
from xckpt.statistics.entries import contents_of, member_names
from xckpt.statistics.layout import deferred, laid_out
from xckpt.statistics.passes import sketches
from xckpt.statistics.refine import Search, refine

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import pandas as pd
    import xarray as xr

    from xckpt.progress import ProgressOption
    from xckpt.statistics.entries import Contents, Entry
    from xckpt.statistics.passes import Member
    from xckpt.statistics.sketch import Sketch

__all__ = ["QUANTILES", "stats", "table", "tensor_names"]

#: Those that are given unless others are asked for.
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)

_WHOLE_NUMBERS = ("count", "nan", "inf", "zero")
# What has no meaning for the magnitudes of complex numbers.
_OF_REAL_NUMBERS = ("min", "max", "mean", "std", "skew", "kurtosis")


def stats(
    obj: Any,
    *,
    quantiles: Sequence[float] = QUANTILES,
    exact_quantiles: bool = False,
    dim: Hashable | Iterable[Hashable] | None = None,
    progress: ProgressOption = None,
    compute: bool = True,
    cache: bool = True,
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

    Returns
    -------
    xarray.Dataset
        Each variable with the dimension ``statistic`` first, then those that were not reduced.
        ``attrs["dead_rows"]`` of a variable is the number of its rows that are all zeros, for
        each tensor; a row is a slice along the axis that is stored slowest.

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
        If a quantile is not between 0 and 1, or a dimension is nowhere.

    Examples
    --------
    >>> st = xckpt.stats("m.zt")  # doctest: +SKIP
    >>> st["blocks.0.attn.w_qkv"].sel(statistic="std").item()  # doctest: +SKIP
    0.0199
    """
    for quantile in quantiles:
        if not 0.0 <= quantile <= 1.0:
            raise ValueError(f"a quantile is between 0 and 1, unlike {quantile}")
    contents = contents_of(obj)
    with paused_collector():
        entries = contents.entries(None if dim is None else _dimensions(dim))
    options = _Options(tuple(quantiles), exact_quantiles, progress, cache)
    found = _describe_all(entries, options) if compute else _deferred(entries, options)
    with paused_collector():
        return _dataset(entries, found, contents, options)


def _dimensions(dim: Hashable | Iterable[Hashable]) -> set[Hashable]:
    if isinstance(dim, str) or not isinstance(dim, Iterable):
        return {dim}
    return set(dim)


@dataclass(frozen=True, slots=True)
class _Options:
    """What is asked of all tensors."""

    quantiles: tuple[float, ...]
    exact: bool
    progress: ProgressOption
    cache: bool


@dataclass(frozen=True, slots=True)
class _Found:
    """The statistics of one variable, and how many rows of each tensor are zeros."""

    statistics: Any
    dead: tuple[int | None, ...]


def _describe_all(entries: Sequence[Entry], options: _Options) -> list[_Found]:
    """Scan all tensors."""
    members = [member for entry in entries for member in entry.members]
    described = _described_members(members, options)
    found, at = [], 0
    for entry in entries:
        if not entry.members:
            values = describe_rows(entry.variable, entry.dims, options.quantiles)
            found.append(_Found(values, ()))
            continue
        some = described[at : at + len(entry.members)]
        at += len(some)
        values = np.array([each for each, _ in some]).T.reshape(-1, *entry.shape)
        found.append(_Found(values, tuple(dead for _, dead in some)))
    return found


def _described_members(
    members: Sequence[Member], options: _Options
) -> list[tuple[list[float], int | None]]:
    """Return the statistics of each tensor, and how many of its rows are zeros."""
    searches: list[Any] = [None] * len(members)

    def finish(number: int, sketch: Sketch) -> tuple[list[float], int | None]:
        if options.exact:
            searches[number] = Search(sketch, options.quantiles)
        values = describe(sketch, options.quantiles)
        if getattr(members[number].reader, "complex", False):
            _blank_real(values)
        return values, sketch.dead if sketch.row else None

    with Progress(options.progress, "statistics") as progress:
        described = sketches(members, finish, progress=progress, cache=options.cache)
        if options.exact:
            refine(members, searches, progress)
    if options.exact:
        first = len(statistic_names(())) - 1
        for (values, _), search in zip(described, searches, strict=True):
            for at, quantile in enumerate(options.quantiles, first):
                values[at] = search.found.get(quantile, values[at])
    return described


def _blank_real(values: list[float]) -> None:
    """Leave out what only real numbers have."""
    names = statistic_names(())
    for name in _OF_REAL_NUMBERS:
        values[names.index(name)] = np.nan
    first = len(names) - 1
    values[first:] = [np.nan] * (len(values) - first)


def _statistics(entries: Sequence[Entry], options: _Options) -> list[Any]:
    return [found.statistics for found in _describe_all(entries, options)]


def _deferred(entries: Sequence[Entry], options: _Options) -> list[_Found]:
    """Return dask arrays that all come from one scan."""
    length = len(statistic_names(options.quantiles))
    shapes = [(length, *entry.shape) for entry in entries]
    return [_Found(array, ()) for array in deferred(_statistics, entries, options, shapes)]


def _dataset(
    entries: Sequence[Entry], found: Sequence[_Found], contents: Contents, options: _Options
) -> xr.Dataset:
    attrs: list[dict[str, Any]] = []
    for entry, each in zip(entries, found, strict=True):
        is_known = each.dead and None not in each.dead
        dead = list(each.dead) if entry.dims else next(iter(each.dead), None)
        attrs.append({"dead_rows": dead} if is_known else {})
    names = statistic_names(options.quantiles)
    return laid_out(names, entries, [each.statistics for each in found], attrs, contents)


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
        by ``rel_l2``.

    Raises
    ------
    ValueError
        If it has no dimension ``statistic``.

    Examples
    --------
    >>> table(xckpt.stats("m.zt")).nlargest(3, "absmax")  # doctest: +SKIP
    """
    import pandas as pd

    names = tensor_names(result)
    columns = result["statistic"].to_numpy().tolist()
    blocks = [
        np.asarray(variable.values).reshape(len(columns), -1).T
        for name, variable in _described(result)
    ]
    values = np.concatenate(blocks) if blocks else np.empty((0, len(columns)))
    frame = pd.DataFrame(values, pd.Index(names, name="tensor", dtype=object), columns)
    whole = [c for c in _WHOLE_NUMBERS if c in columns and frame[c].notna().all()]
    frame = frame.astype(dict.fromkeys(whole, np.int64))
    return ranked(frame) if "status" in frame else frame


def tensor_names(result: xr.Dataset) -> list[str]:
    """Name the tensors of a result, in the order of `table`."""
    coords = {name: result.variables[name] for name in result.coords}
    return [
        tensor
        for name, variable in _described(result)
        for tensor in member_names(name, variable, variable.dims[1:], coords)
    ]


def _described(result: xr.Dataset) -> list[tuple[Hashable, xr.Variable]]:
    """List the variables of a result, statistics first."""
    coords = set(result.coords)
    found = [(n, v) for n, v in result.variables.items() if n not in coords]
    axis = "bin" if "bin" in result.dims else "statistic"
    for name, variable in found:
        if axis not in variable.dims:
            raise ValueError(f"{shown(str(name))} has no dimension {axis!r}: not a result of stats")
    return [(n, v.transpose(axis, ...)) for n, v in found]
