"""`by`: results merged by group; the measures of several pairs of tensors follow from sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xarray as xr

from xckpt.comparison.measure import MEASURES, PAIR_SUMS, measures_of
from xckpt.statistics import STATUSES, tensor_names
from xckpt.statistics.codes import MERGES as MERGES_OF_CODES
from xckpt.statistics.grouping import Merged, merged_by
from xckpt.statistics.tables import tensor_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xckpt.statistics.definitions import Groups
    from xckpt.typing import Array, Dataset

# Measures that need the sums of the pairs.
_OF_SUMS = ("rmse", "rel_l2", "cosine", "sqnr_db", "nmse")
# Statistics of each pair from which the measures of several pairs follow, besides the sums.
_NEEDED = ("status", "count", "equal_fraction", "nan", "inf", "max_abs")
_UNSAVED = "a saved or deferred comparison lacks the sums of the pairs; call compare() again"
_ONE_PAIR = "the measure describes a single pair of tensors"


def by(result: Any, *keys: str | Iterable[str], stats: xr.Dataset | None = None) -> Dataset:
    """Merge a result by layer, role or numbered module.

    The result is one of `stats`, `compare`, `histogram` or `spectrum`; `findings` has a method
    of the same name. The numbers of a group are those of all its elements together, computed
    from counts, moments and sums of squares; they are not averages over tensors. Those of
    several matrices are of the matrix with all of them along its diagonal. Tied copies count
    once.

    Parameters
    ----------
    *keys : str
    One or more of ``"layer"`` (the number of the outermost repeated module; its path if
    there are several stacks of layers), ``"role"`` (weights, moments of an optimizer, ...),
    ``"kind"`` (of the module: ``"linear"``, ``"norm"``, ...), ``"component"``
    (``"encoder"``, ``"optimizer"``, ...), ``"dtype"``, ``"module"`` (the name without
    numbers and without its last word), and the name of a numbered module, such as
    ``"expert"``.
    stats : xarray.Dataset, optional
    Statistics of the first side of a comparison. `compare` does not decode tensors with
    equal bytes. Groups of such tensors and changed ones need their norms, for ``rmse``,
    ``rel_l2``, ``cosine``, ``sqnr_db`` and ``nmse``; these are NaN without.

    Returns
    -------
    xarray.Dataset
    A variable for each statistic, along the keys, and ``tensors``, the number of tensors.
    Comparisons also have the number of tensors of each status. A histogram has ``count``.
    Quantiles follow from the counts of elements that `stats` cached for unchanged files.
    ``attrs["missing"]`` lists the statistics that do not follow from those of the tensors,
    with reasons; ``attrs["outside"]`` names tensors that have no number for a key, or no
    spectrum.

    Raises
    ------
    ValueError
    If no tensor has a key, or the result is not one of whole tensors.
    TypeError
    If the object is not such a result.

    Examples
    --------
    >>> ds.ckpt.stats().ckpt.by("layer", "role")["std"]
    >>> ds.ckpt.compare("tuned.zt").ckpt.by("layer")["rel_l2"].plot()
    """
    if isinstance(result, xr.DataTree) or not {"statistic", "bin"} & set(result.dims):
        raise TypeError("by() merges a result: call stats(), compare(), ... first")
    if "statistic" in result.dims and "status" in result["statistic"].to_numpy():
        return cast("Dataset", compared_by(result, keys, stats))
    if stats is not None:
        raise TypeError("stats= is for comparisons")
    return cast("Dataset", merged_by(result, keys))


def compared_by(
    result: xr.Dataset, keys: Sequence[str | Iterable[str]], stats: xr.Dataset | None = None
) -> xr.Dataset:
    """Return the measures of all elements of each group."""
    sums: dict[str, tuple[float, ...]] | None = result.encoding.get("sums")
    norms = {} if stats is None else _norms(stats)

    def extra(names: Sequence[str]) -> dict[str, Array]:
        if sums is None:
            return {}
        no_pair = (np.nan,) * len(PAIR_SUMS)
        table = np.array([sums.get(name, no_pair) for name in names]).reshape(-1, len(PAIR_SUMS))
        for row, name in zip(table, names, strict=True):
            # Tensors with the same bytes, whose elements were not decoded.
            if np.isnan(row[0]) and row[1] == 0 and name in norms:
                finite, l2 = norms[name]
                mantissa, exponent = np.frexp(l2)
                square = mantissa**2
                row[:] = finite, 0.0, square, square, square, exponent
        return dict(zip(PAIR_SUMS, table.T, strict=True))

    grouped = merged_by(result, keys, _merge, extra)
    unknown = [
        name
        for name in tensor_names(result)
        if sums and name in sums and np.isnan(sums[name][0]) and name not in norms
    ]
    if unknown and np.isnan(grouped["rel_l2"].where(grouped["changed"] > 0, 0.0)).any():
        grouped.attrs["unknown"] = (
            "measures relative to the elements are NaN in groups with tensors of equal bytes, "
            "which are not decoded; pass stats=, the statistics of the first side"
        )
    return grouped


def _norms(stats: xr.Dataset) -> dict[str, tuple[float, float]]:
    """Return the number of finite elements and the norm of each tensor."""
    names, rows = tensor_rows(stats)
    columns = dict(zip(stats["statistic"].to_numpy().tolist(), rows.T, strict=True))
    finite = columns["count"] - columns["nan"] - columns["inf"]
    return dict(zip(names, zip(finite.tolist(), columns["l2"].tolist(), strict=True), strict=True))


def _merge(groups: Groups, names: Sequence[str]) -> Merged:
    if unselected := [name for name in _NEEDED if name not in names]:
        raise ValueError(f"by() needs the statistics {', '.join(unselected)} of the comparison")
    status = groups["status"]
    columns = {
        text: groups.sum(status == code).astype(np.int64) for code, text in enumerate(STATUSES)
    }
    # Tensors of two shapes have measures if the relation between them is known.
    is_pair = ~np.isnan(groups["equal_fraction"])
    counts = {name: np.where(is_pair, groups[name], 0.0) for name in _NEEDED[1:]}
    count, nan, inf = (groups.sum(counts[name]) for name in ("count", "nan", "inf"))
    equal = groups.sum(np.rint(counts["equal_fraction"] * counts["count"]))
    # A pair without finite elements has no largest difference.
    largest = groups.highest(np.nan_to_num(counts["max_abs"], nan=0.0))
    missing = dict.fromkeys(set(names).difference(MEASURES, MERGES_OF_CODES), _ONE_PAIR)
    try:
        sums = {name: np.where(is_pair, groups[name], 0.0) for name in PAIR_SUMS}
    except KeyError:
        missing |= dict.fromkeys(_OF_SUMS, _UNSAVED)
        sums = {name: np.zeros(len(status)) for name in PAIR_SUMS} | {"finite": counts["count"]}
    exponent = groups.highest(np.where(sums["first"] + sums["second"] > 0, sums["exponent"], -2000))
    down = 2 * (sums["exponent"] - groups.spread(exponent)).astype(np.int64)
    squares = [groups.sum(np.ldexp(sums[name], down)) for name in PAIR_SUMS[1:5]]
    finite = groups.sum(sums["finite"])
    table = np.stack([count, equal, finite, nan, inf, *squares, largest])
    measures = measures_of(table.T, exponent.astype(np.int64))
    values = dict(zip(MEASURES, measures.T, strict=True))
    is_empty = groups.sum(is_pair) == 0
    for name in MEASURES[1:]:
        if name not in missing:
            absent = 0 if name == "count" else np.nan
            columns[name] = np.where(is_empty, absent, values[name])
    for name in MERGES_OF_CODES:
        if name in names:
            try:
                columns[name] = MERGES_OF_CODES[name](groups)
            except KeyError as error:
                missing[name] = f"it needs the statistic {error.args[0]}"
    return Merged(columns, missing)
