"""`stats`: the statistics of every tensor."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from xckpt.index import paused_collector
from xckpt.options import ScanOptions, takes
from xckpt.progress import Progress
from xckpt.scan.entries import contents_of, deferred, entries_of, filter_of, laid, laid_out
from xckpt.scan.scanning import gather, load_cached
from xckpt.scan.statistics_cache import open_rows
from xckpt.statistics.channel_sketches import ChannelSketch, channel_statistics, width_of
from xckpt.statistics.counts import Sketch
from xckpt.statistics.definitions import (
    FIRST_QUANTILE,
    STATISTICS,
    of_real_numbers,
    statistic_names,
)
from xckpt.statistics.describe import describe_all
from xckpt.statistics.exact_quantiles import refine, targets_of
from xckpt.statistics.grouping import cached_tensors
from xckpt.statistics.rows import describe_rows

if TYPE_CHECKING:
    import xarray as xr

    from xckpt.arrays.streams import ElementStream
    from xckpt.labels import TensorFilter
    from xckpt.progress import ProgressOption
    from xckpt.scan.entries import Describable, Entry
    from xckpt.structure import Structure
    from xckpt.typing import Array, Dataset

# Codes of the sketches that are described together; so many fit in the second-level cache.
_CODES_AT_ONCE = 1 << 16

#: Default quantiles.
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


@takes(ScanOptions)
def stats(
    obj: Describable,
    tensors: TensorFilter | None = None,
    *,
    quantiles: Sequence[float] = QUANTILES,
    exact_quantiles: bool = False,
    channels: bool = False,
    dim: Hashable | Iterable[Hashable] | None = None,
    compute: bool = True,
    **options: Unpack[ScanOptions],
) -> Dataset:
    """Compute the statistics of every tensor, in one pass over all bytes and bounded memory.

    The pass runs in threads on this machine (dask's ``num_workers``, by default one for each core),
    or on the cluster of an active `distributed.Client`. Both return the same bits.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        Tensors to describe, in their stored element types: bfloat16 and float8 are not converted
        first. Quantised tensors are decoded. A mapping has arrays by name, such as the state dict
        of a PyTorch module.
    channels : bool
        Also compute statistics of rows and columns, such as ``dead_columns`` and
        ``outlier_columns``, in the same pass; `findings` needs them.
    dim : str, int, or iterable of these, optional
        Dimensions to reduce, by name or position (-1 is the last one); by default all but the
        dimensions along which tensors are stacked. Variables without any of them are omitted.
    compute : bool
        If False, return dask arrays, which run the pass when they are computed.

    Returns
    -------
    xarray.Dataset
        Each variable with the dimension ``statistic`` first, then the dimensions that were not
        reduced. ``attrs["dead_rows"]`` of a variable is the number of rows that are all zeros, for
        each tensor; a row is a slice along the axis that is stored slowest. The statistics of
        members that an outer join of layers left empty are NaN, and a table omits these members.

        {statistics}
        - ``q0.001`` to ``q0.999``: quantiles, as numpy.quantile(method="nearest")

    Raises
    ------
    CheckpointError
        If a tensor cannot be read.
    ValueError
        If a quantile is not between 0 and 1, no variable has a dimension of `dim`, or `channels` is
        combined with `dim`.

    Examples
    --------
    >>> st = xckpt.stats("m.zt")
    >>> st["model.layers.0.mlp.up_proj.weight"].sel(statistic="std").item()
    0.0196...
    """
    quantiles = _checked_quantiles(quantiles)
    if channels and dim is not None:
        raise ValueError("channels=True describes whole tensors: leave out dim=")
    contents = contents_of(obj, options["storage_options"])
    if dim is not None:
        dim = set(dim) if isinstance(dim, Iterable) and not isinstance(dim, str) else {dim}
    request = _Request(quantiles, exact_quantiles, channels, options["cache"])
    progress = options["progress"]
    with paused_collector():
        entries = entries_of(contents, dim, chosen=filter_of(tensors, options, contents))
        attrs: list[dict[str, Any]] = [_stored_as(entry) if channels else {} for entry in entries]
        if channels:
            _add_channels(entries, contents.structure)
    if compute:
        descriptions = _describe_all(entries, request, progress)
        values: list[Any] = [description.values for description in descriptions]
        for attr, entry, description in zip(attrs, entries, descriptions, strict=True):
            dead = description.dead_rows
            if dead and None not in dead:
                attr["dead_rows"] = dead if entry.dims else dead[0]
    else:
        shapes = [(len(request.names), *entry.shape) for entry in entries]
        find = partial(_values_of_all, request=request, progress=progress)
        values = deferred(find, entries, shapes)
    with paused_collector():
        result = laid_out(request.names, entries, values, attrs, contents)
        if compute and request.cache:
            streams = (stream for entry in entries for stream in entry.streams)
            result.encoding["counts"] = cached_tensors(streams)  # for quantiles of groups
        return result


stats.__doc__ = (stats.__doc__ or "").replace(
    "{statistics}",
    "\n        ".join([f"- ``{s.name}``: {s.description}" for s in STATISTICS if not s.channels]),
)


class _Request(NamedTuple):
    """The statistics to compute."""

    quantiles: tuple[float, ...]
    exact: bool
    channels: bool
    cache: bool

    @property
    def names(self) -> list[str]:
        """Names of all statistics, in order."""
        return statistic_names(self.quantiles, channels=self.channels)

    @property
    def width(self) -> int:
        """Length of the row of a tensor: its statistics, and last its dead rows or NaN."""
        return len(self.names) + 1


def _stored_as(entry: Entry) -> dict[str, Any]:
    """Return the stored dtype and the shape of the tensors of a variable, for findings."""
    dtype = entry.variable.encoding.get("stored_dtype", entry.variable.dtype)
    return {
        "dtype": str(dtype),
        "shape": list(entry.streams[0].array.shape) if entry.streams else [],
    }


def _add_channels(entries: Sequence[Entry], structure: Structure) -> None:
    """Set the axes of the channels of each tensor."""
    for entry in entries:
        for stream in entry.streams:
            if stream.name in structure:
                stream.channels = structure.channels(stream.name)


def known_stats(obj: Any) -> xr.Dataset | None:
    """Return the statistics of an object from the cache, without reading data; None if missing."""
    streams = [stream for entry in entries_of(contents_of(obj)) for stream in entry.streams]
    return stats(obj) if all(load_cached(streams, Sketch)) else None


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


class _Description(NamedTuple):
    """The statistics of a variable, and the number of dead rows of each of its tensors."""

    values: Array
    dead_rows: list[int | None]  # None if unknown


def _values_of_all(
    entries: Sequence[Entry], request: _Request, progress: ProgressOption
) -> list[Array]:
    """Return the statistics of each variable."""
    return [description.values for description in _describe_all(entries, request, progress)]


def _describe_all(
    entries: Sequence[Entry], request: _Request, progress: ProgressOption
) -> list[_Description]:
    """Return the statistics of each variable."""
    streams = [stream for entry in entries for stream in entry.streams]
    cache_key = ("statistics", *request.names, request.quantiles, request.exact)
    of_short_rows = [entry for entry in entries if not entry.streams]
    tables: Iterable[Array] = ()
    with Progress(progress, "statistics") as bar:
        with open_rows(streams, cache_key, request.width, enabled=request.cache) as rows:
            rows.add(_describe_tensors([streams[n] for n in rows.missing], request, bar))
        if of_short_rows:
            tables = describe_rows(of_short_rows, request.quantiles, bar)
    dead = [None if isnan(number) else int(number) for number in rows.values[:, -1].tolist()]
    values = rows.values[:, :-1]
    described = iter(tables)
    results: list[_Description] = []
    stop = 0
    with paused_collector():
        for entry in entries:
            start, stop = stop, stop + len(entry.streams)
            entry_dead = dead[start:stop]
            if not entry.streams:
                result = next(described)
            elif entry.dims:
                result = laid(values[start:stop], entry.shape, entry.gone)
            else:
                result = values[start]
            if entry.absent is not None and entry.gone is not None:
                remaining = iter(entry_dead)
                places = entry.gone.ravel() if entry_dead else ()
                entry_dead = [0 if is_gone else next(remaining) for is_gone in places]
                # Absent tensors are filled with NaN, which other statistics ignore; see `Elements`.
                result[[request.names.index(name) for name in ("count", "nan")]] -= entry.absent
                result[:, entry.gone] = np.nan
            results.append(_Description(result, entry_dead))
    return results


def _describe_tensors(streams: Sequence[ElementStream], request: _Request, bar: Progress) -> Array:
    """Return a row of statistics for each tensor, and last its number of dead rows or NaN."""
    targets: list[Any] = [()] * len(streams)
    rows = np.full((len(streams), request.width), np.nan)
    operation = ChannelSketch if request.channels else Sketch
    widths = [width_of(stream) for stream in streams] if request.channels else None
    waiting: dict[int, Sketch] = {}
    codes = 0

    def describe_waiting() -> None:
        if not waiting:
            return
        _fill_rows(rows, waiting, streams, request)
        for tensor, inexact in _inexact_quantiles(waiting, rows, request).items():
            if not streams[tensor].complex:
                targets[tensor] = targets_of(waiting[tensor], inexact)
        waiting.clear()

    def finish(tensor: int, sketch: Sketch) -> None:
        nonlocal codes
        waiting[tensor] = sketch
        codes += len(sketch.codes)
        if codes > _CODES_AT_ONCE:
            describe_waiting()
            codes = 0

    gather(streams, operation, finish, bar, arguments=widths, cache=request.cache, stretched=True)
    describe_waiting()
    if any(targets):
        refined = refine(streams, targets, bar)
        for row, exact in zip(rows, refined, strict=True):
            for column, quantile in enumerate(request.quantiles, FIRST_QUANTILE):
                row[column] = exact.get(quantile, row[column])
    return rows


def _inexact_quantiles(
    sketches: Mapping[int, Sketch], rows: Array, request: _Request
) -> dict[int, Sequence[float]]:
    """Return the quantiles that need another pass, by position of the tensor."""
    if request.exact:
        return dict.fromkeys(sketches, request.quantiles)
    tensors, levels = list(sketches), np.array(request.quantiles, np.float64)
    sizes = np.abs(rows[tensors, FIRST_QUANTILE : FIRST_QUANTILE + len(levels)])
    # A sketch has seven bits of the fraction of a number, but fewer of a subnormal number.
    normal = np.array([sketch.kind.smallest_normal for sketch in sketches.values()])
    is_between = (levels > 0) & (levels < 1)  # the ends are exact
    subnormal = (sizes > 0) & (sizes < normal[:, None]) & is_between
    positions = np.flatnonzero(subnormal.any(axis=1)).tolist()
    return {tensors[position]: levels[subnormal[position]].tolist() for position in positions}


def _fill_rows(
    rows: Array,
    sketches: Mapping[int, Sketch],
    streams: Sequence[ElementStream],
    request: _Request,
) -> None:
    """Fill the rows of tensors whose sketches are complete."""
    described = describe_all(list(sketches.values()), request.quantiles, channels=request.channels)
    is_real = of_real_numbers(request.quantiles, channels=request.channels)
    for row, (tensor, sketch) in zip(described, sketches.items(), strict=True):
        rows[tensor, : len(row)] = (
            np.where(is_real, np.nan, row) if streams[tensor].complex else row
        )
        if isinstance(sketch, ChannelSketch):
            std = float(row[request.names.index("std")])
            rows[tensor, len(row) : -1] = channel_statistics(sketch, std, streams[tensor])
        if sketch.rows.length:
            rows[tensor, -1] = sketch.rows.dead
