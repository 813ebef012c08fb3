"""A result by tensors: as a table, as rows, by name, and at a glance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.datasets.stack_records import stack_of
from xckpt.errors import shown
from xckpt.index import paused_collector
from xckpt.scan.entries import member_names
from xckpt.statistics.definitions import STATISTICS
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    import pandas as pd
    import xarray as xr

Array = np.ndarray[Any, np.dtype[Any]]

#: Statuses of a pair of tensors; the statistic ``status`` is the position in this tuple.
STATUSES = ("same", "changed", "only_a", "only_b", "shape")
#: Columns of a comparison that explain, and those of them that are texts.
EXPLANATION_COLUMNS = (
    *("cause", "outcome", "explanation", "verified", "offset", "scale", "rank", "heads"),
    "other_names",
)
EXPLANATION_TEXTS = frozenset({"cause", "outcome", "explanation", "other_names"})

# Statuses by the size of the change, largest last.
_SEVERITY = ("same", "changed", "only_b", "only_a", "shape")
# Shown of a result at a glance, of a comparison or of statistics.
_SHOWN = (
    *("status", "outcome", "cause", "count", "equal_fraction", "nan", "inf"),
    *("max_abs", "rmse", "rel_l2", "cosine"),
    *("sqnr_db", "min", "max", "mean", "std"),
)
_MOST_ROWS = 10
_WIDEST_NAME = 48

# Statuses of tensors that are on both sides.
_ON_BOTH_SIDES = [STATUSES.index(status) for status in ("same", "changed", "shape")]
# Attributes of a comparison that a table has as columns, and what stands for one that is not there.
_PARTNERS = ("other_name", "matched_by")
_STATED = dict.fromkeys(_PARTNERS, "") | {
    key: "" if key in EXPLANATION_TEXTS else np.nan for key in EXPLANATION_COLUMNS
}
_WHOLE_NUMBERS = tuple(statistic.name for statistic in STATISTICS if statistic.whole)


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
        by ``rel_l2``. One with ``explain=True`` has the columns ``outcome``, ``cause``,
        ``explanation``, ``verified``, ``offset``, ``scale``, ``rank``, ``heads`` and
        ``other_names`` as well.

    Raises
    ------
    TypeError
        If it is not a Dataset.
    ValueError
        If it is not the result of `stats`, `spectrum` or `compare`.

    Examples
    --------
    >>> table(xckpt.stats("m.zt")).nlargest(3, "absmax")  # doctest: +SKIP
    """
    import pandas as pd
    import xarray as xr

    given: Any = result
    if not isinstance(given, xr.Dataset):
        text = "table() takes the result of stats() or compare(), not this"
        raise TypeError(f"{text} {type(given).__name__}")
    with paused_collector():
        names, values = tensor_rows(result)
        columns = result["statistic"].to_numpy().tolist()
    frame = pd.DataFrame(values, pd.Index(names, name="tensor", dtype=object), columns)
    whole = [c for c in _WHOLE_NUMBERS if c in columns and frame[c].notna().all()]
    frame = frame.astype(dict.fromkeys(whole, np.int64))
    stated = {key for variable in result.variables.values() for key in variable.attrs}
    wanted = [*_PARTNERS, *(EXPLANATION_COLUMNS if "cause" in stated else ())]
    is_said = not stated.isdisjoint(wanted)
    said = said_of_tensors(result, {key: _STATED[key] for key in wanted}) if is_said else {}
    for key in _PARTNERS:
        if any(said.get(key, ())):
            frame[key] = said[key]
    if "cause" in said:
        frame.insert(1, "outcome", said["outcome"])
        frame.insert(2, "cause", said["cause"])
        for key in EXPLANATION_COLUMNS:
            if key not in {"outcome", "cause"}:
                frame[key] = said[key]
        frame["verified"] = frame["verified"] == 1
    return _ranked(frame) if "status" in frame else frame


def _ranked(frame: pd.DataFrame) -> pd.DataFrame:
    """Name what is said of tensors, and sort them."""
    import pandas as pd

    frame = frame[frame["status"].notna()]
    codes = frame["status"].to_numpy(np.int64)
    severity = np.array([_SEVERITY.index(status) for status in STATUSES])
    keys: dict[str, Any] = {"severity": severity[codes]}
    if {"nan", "inf", "count"} <= set(frame.columns):
        keys["spoilt"] = ((frame["nan"] + frame["inf"]) / frame["count"]).to_numpy()
    keys |= {name: frame[name].to_numpy() for name in ("rel_l2", "max_abs") if name in frame}
    # By position: nothing keeps two tensors from having one name.
    order = pd.DataFrame(keys).sort_values(list(keys), ascending=False, kind="stable").index
    names = pd.Categorical.from_codes(codes, list(STATUSES))
    return frame.assign(status=names).iloc[order]


def channel_values(result: xr.Dataset, statistic: str) -> dict[str, Array]:
    """Return a statistic of the channels of each tensor of a comparison, by name."""
    at = result["statistic"].to_numpy().tolist().index(statistic)
    coords = {name: result.variables[name] for name in result.coords}
    found: dict[str, Array] = {}
    for name, variable in _described(result):
        record = stack_of(variable)
        along = tuple([dim for dim in variable.dims if record and dim in record.dims])
        names = member_names(name, variable, along, coords)
        rows = variable.transpose("statistic", *along, ...)[at].to_numpy().reshape(len(names), -1)
        pairs = zip(names, rows, strict=True)
        found |= {each: row for each, row in pairs if each is not None}
    return found


def matched_names(result: xr.Dataset) -> dict[str, str]:
    """Return the names of tensors of `a` that a comparison found in `b`, and their names there."""
    stacks = [(v.dims[1:], stack_of(v)) for _, v in _described(result)]
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
    from xckpt.formatting import base_name, counted, printable, shortened

    files = [result.attrs.get("source"), result.attrs.get("compared_with")]
    of = " with ".join(base_name(str(file)) for file in files if file)
    head = f"<{' of '.join(filter(None, (kind, of)))}>  {{}}"
    names = tensor_names(result)
    tensors = counted(len(names), "tensor")
    if kind == "Histogram":
        return head.format(f"{tensors} · {result.sizes['bin']} bins")
    if any(hasattr(data_of(variable), "dask") for variable, _ in named_tensors(result)):
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
