"""`findings`: what in the statistics of a checkpoint calls for attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xckpt.statistics.result import table, tensor_names

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["EXPLODING", "findings"]

#: Largest magnitude in standard deviations from which a tensor is said to explode. Of a billion
#: normally distributed elements the largest is at about 6; trained weights reach some tens.
EXPLODING = 100.0

_COLUMNS = ("tensor", "rule", "value", "severity")
_SEVERITIES = ("error", "warning", "info")


class _Rule(NamedTuple):
    name: str
    severity: str
    where: np.ndarray[tuple[int], np.dtype[np.bool_]]
    measured: np.ndarray[tuple[int], np.dtype[np.float64]]


def findings(result: xr.Dataset) -> pd.DataFrame:
    """List the tensors that look wrong.

    ==============  ============================================  ========  ===================
    rule            holds for tensors                             severity  value
    ==============  ============================================  ========  ===================
    ``nan``         with NaN                                      error     how many
    ``inf``         with infinities                               error     how many
    ``all_zero``    of nothing but zeros, two elements or more    warning   number of elements
    ``constant``    of one other value, two elements or more      info      the value
    ``exploding``   whose ``absmax`` is more than 100 ``std``     warning   ``absmax / std``
    ``dead_rows``   of other values, with rows of zeros           warning   number of such rows
    ==============  ============================================  ========  ===================

    Parameters
    ----------
    result : xarray.Dataset
        As `stats` gives it.

    Returns
    -------
    pandas.DataFrame
        With the columns ``tensor, rule, value, severity``; errors first, then warnings, each in
        the order of the tensors.

    Raises
    ------
    ValueError
        If statistics that the rules need are not in it.

    Examples
    --------
    >>> findings(xckpt.stats("m.zt"))  # doctest: +SKIP
       tensor       rule   value severity
    0  blocks.3.w    nan     1.0    error
    """
    import pandas as pd

    frame = table(result)
    missing = {"count", "nan", "inf", "zero", "min", "max", "absmax", "std"} - set(frame)
    if missing:
        raise ValueError(f"findings need the statistics {', '.join(sorted(missing))}")
    rows = []
    for rule in _rules(frame, _dead_rows(result)):
        rows += [
            (frame.index[at], rule.name, float(rule.measured[at]), rule.severity)
            for at in np.flatnonzero(rule.where)
        ]
    order = {name: number for number, name in enumerate(_SEVERITIES)}
    position = {name: number for number, name in reversed(list(enumerate(frame.index)))}
    rows.sort(key=lambda row: (order[row[3]], position[row[0]]))
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def _rules(frame: pd.DataFrame, dead: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[_Rule]:
    columns = {name: frame[name].to_numpy(np.float64) for name in frame}
    count, low, high, std = (columns[name] for name in ("count", "min", "max", "std"))
    zeros = (columns["zero"] == count) & (count > 1)
    one_value = (low == high) & (count > 1) & ~zeros
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = columns["absmax"] / std
    return [
        _Rule("nan", "error", columns["nan"] > 0, columns["nan"]),
        _Rule("inf", "error", columns["inf"] > 0, columns["inf"]),
        _Rule("all_zero", "warning", zeros, count),
        _Rule("constant", "info", one_value, low),
        # Not of few elements with a mean: 100 and 101 do not explode.
        _Rule("exploding", "warning", (std > 0) & (ratio > EXPLODING) & _centred(columns), ratio),
        _Rule("dead_rows", "warning", (dead > 0) & ~zeros, dead),
    ]


def _centred(
    columns: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]],
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return where the elements are about zero, rather than close together far from it."""
    if "mean" not in columns:
        return np.ones(len(columns["std"]), np.bool_)
    return np.abs(columns["mean"]) < columns["absmax"] / 2


def _dead_rows(result: xr.Dataset) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the number of dead rows of each tensor, in the order of `table`; NaN if unknown."""
    counts: list[float] = []
    coords = set(result.coords)
    for name, variable in result.variables.items():
        if name in coords:
            continue
        size = variable.size // variable.sizes["statistic"]
        stated = np.atleast_1d(np.asarray(variable.attrs.get("dead_rows", ()), np.float64))
        counts += stated.tolist() if len(stated) == size else [np.nan] * size
    if len(counts) != len(tensor_names(result)):
        raise ValueError("not a result of stats")
    return np.array(counts)
