"""`stats`: the statistics of every tensor."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.index import paused_collector
from xckpt.progress import Progress
from xckpt.scan.entries import contents_of, deferred, entries_of, laid, laid_out
from xckpt.scan.scanning import gather, load_cached
from xckpt.scan.statistics_cache import rows_of
from xckpt.statistics.channel_sketches import (
    ChannelSketch,
    channel_statistics,
    is_turned,
    width_of,
)
from xckpt.statistics.counts import Sketch
from xckpt.statistics.definitions import (
    FIRST_QUANTILE,
    STATISTICS,
    of_real_numbers,
    statistic_names,
)
from xckpt.statistics.describe import describe_all
from xckpt.statistics.refine import refine, wanted_of
from xckpt.statistics.rows import describe_rows

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import xarray as xr

    from xckpt.progress import ProgressOption
    from xckpt.scan.entries import Describable, Described
    from xckpt.scan.readers import Reader
    from xckpt.typing import Dataset

Array = np.ndarray[Any, np.dtype[Any]]

# Of sketches that are described together: few enough to stay in the second-level cache.
_CODES_AT_ONCE = 1 << 16

#: Default quantiles.
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


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
) -> Dataset:
    """Compute the statistics of every tensor, in one pass over all bytes and bounded memory.

    It runs on the threads of this machine (dask's ``num_workers``, else as many as it has), or on
    the cluster of an active `distributed.Client`. The results are the same to the last bit.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        What to describe. Element types are those that are stored: bfloat16 and float8 are never
        converted; quantised tensors are described as the numbers they stand for. A mapping has
        arrays by name, such as the state dict of a PyTorch module.
    quantiles : sequence of float
        Between 0 and 1; the statistic ``q0.5`` is the median.
    exact_quantiles : bool
        Whether to find the quantiles of float32, float64 and integers of 32 and 64 bits exactly,
        by one to four more passes. Else they are within 2**-8 of the element, relative to it,
        and exact where they are subnormal.
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

        {statistics}
        - ``q0.001`` to ``q0.999``: quantiles, as numpy.quantile(method="nearest")

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
    options = _StatsOptions(quantiles, exact_quantiles, channels, cache)
    with paused_collector():
        entries = entries_of(contents, dim)
        attrs: list[dict[str, Any]] = [_stored_as(entry) if channels else {} for entry in entries]
    if compute:
        found, every = _describe_all(entries, options, progress)
        for attr, entry, dead in zip(attrs, entries, every, strict=True):
            if dead and None not in dead:
                attr["dead_rows"] = dead if entry.dims else dead[0]
    else:
        shapes = [(len(options.names), *entry.shape) for entry in entries]
        find = partial(_statistics, options=options, progress=progress)
        found = deferred(find, entries, shapes)
    with paused_collector():
        return laid_out(options.names, entries, found, attrs, contents)


stats.__doc__ = (stats.__doc__ or "").replace(
    "{statistics}",
    "\n        ".join([f"- ``{s.name}``: {s.description}" for s in STATISTICS if not s.channels]),
)


class _StatsOptions(NamedTuple):
    """Options of `stats`."""

    quantiles: tuple[float, ...]
    exact: bool
    channels: bool
    cache: bool

    @property
    def names(self) -> list[str]:
        """All statistics, in their order."""
        return statistic_names(self.quantiles, channels=self.channels)


def _stored_as(entry: Described) -> dict[str, Any]:
    """Return the stored dtype and the shape of the tensors of a variable, for findings."""
    dtype = entry.variable.encoding.get("stored_dtype", entry.variable.dtype)
    shapes = [list(reader.array.shape) for reader in entry.readers[:1]]
    return {"dtype": str(dtype), "shape": shapes[0] if shapes else []}


def known_stats(obj: Any) -> xr.Dataset | None:
    """Return the statistics of an object if an earlier scan kept them; no data are read."""
    readers = [reader for entry in entries_of(contents_of(obj)) for reader in entry.readers]
    return stats(obj) if all(load_cached(readers, Sketch)) else None


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


def _statistics(
    entries: Sequence[Described], options: _StatsOptions, progress: ProgressOption
) -> list[Array]:
    """Leave out how many rows are zeros, which has no place in a dask array."""
    return _describe_all(entries, options, progress)[0]


def _describe_all(
    entries: Sequence[Described], options: _StatsOptions, progress: ProgressOption
) -> tuple[list[Array], list[list[int | None]]]:
    """Return the statistics of each variable, and how many rows of its tensors are zeros."""
    readers = [reader for entry in entries for reader in entry.readers]
    quantiles = options.quantiles
    about = ("statistics", *options.names, quantiles, options.exact)
    with Progress(progress, "statistics") as bar:
        rows = rows_of(
            readers,
            about,
            len(options.names) + 1,
            lambda some: _describe_tensors([readers[number] for number in some], options, bar),
            enabled=options.cache,
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
                # Absent tensors are filled with NaN; other statistics ignore these elements.
                found[-1][[options.names.index(name) for name in ("count", "nan")]] -= entry.absent
                found[-1][:, entry.gone] = np.nan
            every.append(some)
    return found, every


def _at_places(dead: list[int | None], gone: Array) -> list[int | None]:
    """Put how many rows of tensors are zeros at their places; no rows of absent ones are."""
    each = iter(dead)
    return [0 if is_gone else next(each) for is_gone in gone.ravel()] if dead else []


def _describe_tensors(readers: Sequence[Reader], options: _StatsOptions, bar: Progress) -> Array:
    """Return the statistics of each tensor, and how many of its rows are zeros; NaN if unknown."""
    wanted: list[Any] = [()] * len(readers)
    rows = np.full((len(readers), len(options.names) + 1), np.nan)
    operation = ChannelSketch if options.channels else Sketch
    widths = [width_of(reader) for reader in readers] if options.channels else None
    waiting: dict[int, Sketch] = {}
    codes = 0

    def describe_waiting() -> None:
        if not waiting:
            return
        _describe_some(waiting, readers, options, rows)
        for number, quantiles in _inexact_quantiles(waiting, rows, options):
            if not readers[number].complex:
                wanted[number] = wanted_of(waiting[number], quantiles)
        waiting.clear()

    def finish(number: int, sketch: Sketch) -> None:
        nonlocal codes
        waiting[number] = sketch
        codes += len(sketch.codes)
        if codes > _CODES_AT_ONCE:
            describe_waiting()
            codes = 0

    gather(readers, operation, finish, bar, arguments=widths, cache=options.cache, stretched=True)
    describe_waiting()
    if any(wanted):
        refined = refine(readers, wanted, bar)
        for values, known in zip(rows, refined, strict=True):
            for at, quantile in enumerate(options.quantiles, FIRST_QUANTILE):
                values[at] = known.get(quantile, values[at])
    return rows


def _inexact_quantiles(
    sketches: Mapping[int, Sketch], rows: Array, options: _StatsOptions
) -> list[tuple[int, Sequence[float]]]:
    """Return the numbers of tensors with the quantiles that another pass has to find.

    A sketch knows seven bits of the fraction of a number, but fewer of a subnormal one.
    """
    if options.exact:
        return [(number, options.quantiles) for number in sketches]
    numbers = list(sketches)
    end = FIRST_QUANTILE + len(options.quantiles)
    sizes = np.abs(rows[numbers, FIRST_QUANTILE:end])
    normal = np.array([sketch.kind.smallest_normal for sketch in sketches.values()])
    is_between = np.array([0 < quantile < 1 for quantile in options.quantiles], np.bool_)
    is_subnormal = (sizes > 0) & (sizes < normal[:, None]) & is_between  # the ends are exact
    return [
        (
            numbers[at],
            [q for q, inexact in zip(options.quantiles, is_subnormal[at], strict=True) if inexact],
        )
        for at in np.flatnonzero(is_subnormal.any(axis=1)).tolist()
    ]


def _describe_some(
    sketches: Mapping[int, Sketch], readers: Sequence[Reader], options: _StatsOptions, rows: Array
) -> None:
    """Write the rows of tensors whose sketches are complete."""
    described = describe_all(list(sketches.values()), options.quantiles, channels=options.channels)
    is_real = of_real_numbers(options.quantiles, channels=options.channels)
    for row, (number, sketch) in zip(described, sketches.items(), strict=True):
        rows[number, : len(row)] = (
            np.where(is_real, np.nan, row) if readers[number].complex else row
        )
        if isinstance(sketch, ChannelSketch):
            std, turned = float(row[options.names.index("std")]), is_turned(readers[number])
            rows[number, len(row) : -1] = channel_statistics(sketch, std, turned=turned)
        if sketch.rows.length:
            rows[number, -1] = sketch.rows.dead
