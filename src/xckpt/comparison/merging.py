"""The measures of several pairs of tensors, from their sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xckpt.comparison.measure import MEASURES, PAIR_SUMS, measures_of
from xckpt.statistics import STATUSES, tensor_names
from xckpt.statistics.codes import MERGES as MERGES_OF_CODES
from xckpt.statistics.grouping import Merged, by
from xckpt.statistics.tables import tensor_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

    from xckpt.statistics.group_sums import Groups
    from xckpt.typing import Array

__all__ = ["compared_by"]

# Measures that need the sums of the pairs.
_OF_SUMS = ("rmse", "rel_l2", "cosine", "sqnr_db", "nmse")
# Statistics of each pair from which the measures of several pairs follow, besides the sums.
_NEEDED = ("status", "count", "equal_fraction", "nan", "inf", "max_abs")
_UNSAVED = "a saved or deferred comparison lacks the sums of the pairs; call compare() again"
_ONE_PAIR = "the measure describes a single pair of tensors"


def compared_by(
    result: xr.Dataset, keys: Sequence[str], stats: xr.Dataset | None = None
) -> xr.Dataset:
    """Return the measures of all elements of each group; see `CheckpointAccessor.by`."""
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

    grouped = by(result, keys, _merge, extra)
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
