"""Results of statistics and comparisons: rows, names, tables, and the blocks that show them."""

from __future__ import annotations

from math import isnan, prod
from os import PathLike
from posixpath import dirname
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from xckpt.datasets.stack_records import stack_of
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import shown
from xckpt.formatting import base_name, counted, printable, shape_text, shortened
from xckpt.index import paused_collector
from xckpt.labels.filters import suggest_names, suggest_word
from xckpt.notebook.changes import FEW_TENSORS, MOST_LINES, ChangeLine, TensorChange, change_lines
from xckpt.notebook.documents import Block, Cell, Field, Heading, Sentence, Share, Table, more
from xckpt.options import TableOptions, takes
from xckpt.scan.entries import member_names
from xckpt.statistics.definitions import STATISTICS
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    import pandas as pd
    import xarray as xr

    from xckpt.structure import Structure
    from xckpt.typing import Array

#: Statuses of a pair of tensors; the statistic ``status`` is the position in this tuple.
STATUSES = ("same", "changed", "only_a", "only_b", "shape", "unreadable", "close")
#: Statuses in words, for two sides with names.
_STATUS_WORDS = {
    "same": "the same",
    "changed": "changed",
    "close": "close",
    "only_a": "only in {a}",
    "only_b": "only in {b}",
    "shape": "of another shape",
    "unreadable": "unreadable",
}
#: Columns of an explained comparison, and the columns among them that hold text.
EXPLANATION_COLUMNS = (
    "cause", "outcome", "explanation", "verified", "offset", "scale", "rank", "heads",
    "other_names",
)  # fmt: skip
EXPLANATION_TEXTS = frozenset({"cause", "outcome", "explanation", "other_names"})

# Statuses by the size of the change, largest last.
_SEVERITY = ("same", "close", "changed", "only_b", "only_a", "shape", "unreadable")
# Statuses of tensors that are on both sides.
_ON_BOTH_SIDES = [STATUSES.index(status) for status in ("same", "close", "changed", "shape")]
#: Rule of a match with a tensor of the other side that has a name of its own: not a renaming.
TIED = "tied"
# Attributes of a comparison that become columns of a table, with the values for missing ones.
_PARTNERS = ("other_name", "matched_by", "relation")
_IF_MISSING = dict.fromkeys(_PARTNERS, "") | {
    key: "" if key in EXPLANATION_TEXTS else np.nan for key in EXPLANATION_COLUMNS
}
#: Columns that views show, and that come first in tables.
MAIN_COLUMNS = (
    "status", "outcome", "cause", "nan", "inf", "rel_l2", "max_abs", "equal_fraction", "mean",
    "std", "min", "max", "rmse", "cosine", "sqnr_db", "count",
)  # fmt: skip
#: Columns that a table has if they are listed or sorted by.
FACTS = ("dtype", "shape", "nbytes")
#: Names of the index of a table, which also select the column of names in a command.
NAMES_OF_ROWS = ("name", "tensor")
# Measures that are larger for a smaller change.
_OF_LIKENESS = frozenset({"cosine", "equal_fraction", "sqnr_db"})
_WHOLE_NUMBERS = tuple(statistic.name for statistic in STATISTICS if statistic.whole)


@takes(
    TableOptions,
    by="groups have tables: xckpt.table(result.ckpt.by({value!r}))",
    tensors="select in the call that computes the result, or with .filter(like=...) of the table",
)
def table(
    result: xr.Dataset,
    columns: str | Iterable[str] | None = None,
    **options: Unpack[TableOptions],
) -> pd.DataFrame:
    """Lay a result out as a table, with one row for each tensor or group.

    Parameters
    ----------
    result : xarray.Dataset
        Result of `stats`, `spectrum`, `histogram` or `compare`, a selection from it, or its groups
        by layer, role, ... (``result.ckpt.by("layer")``).

    Returns
    -------
    pandas.DataFrame
        One column for each statistic, those that the result shows first; for a histogram, one for
        the left edge of each bin. Groups have their keys as the index. Otherwise the index
        ``tensor`` has the names of the tensors in the file, stacked tensors included. The rows of a
        comparison are sorted by the size of the change, largest first: tensors that cannot be
        compared, then tensors that differ by NaN or infinities, then others by ``rel_l2``. A
        comparison with ``explain=True`` also has the columns ``outcome``, ``cause``,
        ``explanation``, ``verified``, ``offset``, ``scale``, ``rank``, ``heads`` and
        ``other_names``.

    Raises
    ------
    TypeError
        If `result` is not a Dataset.
    ValueError
        If `result` is not a result, or a column does not exist.

    Examples
    --------
    >>> xckpt.table(xckpt.stats("m.zt"), ["std", "absmax"], sort="absmax", limit=3)
    """
    import xarray as xr

    argument: Any = result
    if not isinstance(argument, xr.Dataset):
        kind = type(argument).__name__
        text = f"table() takes the result of stats() or compare(), not this {kind}"
        is_path = isinstance(argument, str | PathLike)
        hint = f": xckpt.table(xckpt.stats({str(argument)!r}))" if is_path else ""
        raise TypeError(text + hint)
    frame = _group_frame(result) if has_groups(result) else _frame(result)
    names = {options.get("sort") or "", *([columns] if isinstance(columns, str) else columns or ())}
    origin = result.encoding.get("origin")
    if origin is not None and not has_groups(result):
        for fact in names.intersection(FACTS).difference(frame):
            frame[fact] = _facts(fact, frame.index, origin.structure)
    order = [] if "affected" in frame else [name for name in MAIN_COLUMNS if name in frame]
    order = ["tensors", *order] if "tensors" in frame else order
    if (sort := options.get("sort")) and sort in frame:  # where pandas always shows it
        order = list(dict.fromkeys([sort, *order]))
    frame = frame[[*order, *(name for name in frame if name not in order)]]
    return arranged(frame, columns, **options)


def arranged(
    frame: pd.DataFrame,
    columns: str | Iterable[str] | None = None,
    *,
    sort: str | None = None,
    ascending: bool | None = None,
    limit: int | None = None,
) -> pd.DataFrame:
    """Return rows and columns of a table as the options of `table` ask for."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit={limit}: expected a number of rows")
    if sort in {*NAMES_OF_ROWS, *frame.index.names} and sort not in frame:
        level = sort if sort in frame.index.names else None
        is_rising = ascending is not False
        frame = frame.sort_index(level=level, ascending=is_rising, kind="stable")
    elif sort is not None:
        _require_column(frame, sort)
        sizes = (lambda shapes: shapes.map(prod)) if sort == "shape" else None
        is_rising = sort in _OF_LIKENESS if ascending is None else ascending
        frame = frame.sort_values(sort, ascending=is_rising, kind="stable", key=sizes)
    if columns is not None:
        listed = [columns] if isinstance(columns, str) else list(columns)
        listed = list(frame) if listed == ["all"] else listed
        chosen = [name for name in listed if name not in NAMES_OF_ROWS]
        for name in chosen:
            _require_column(frame, name)
        frame = frame[chosen]
    return frame if limit is None else frame.head(limit)


def _facts(fact: str, names: Iterable[str], structure: Structure) -> list[Any]:
    """Return the stored type, shape or size of each tensor."""
    tensors = [structure.described(name) if name in structure else None for name in names]
    if fact == "dtype":
        return [tensor.dtype if tensor else "" for tensor in tensors]
    if fact == "shape":
        return [tensor.shape if tensor else () for tensor in tensors]
    return [
        prod(t.shape) * ELEMENT_TYPES[t.dtype].bits // 8 if t and t.dtype in ELEMENT_TYPES else 0
        for t in tensors
    ]


def column_meant(name: str) -> str:
    """Return the end of an error message about a column of another name; empty if unknown."""
    word = suggest_word(name, {"nbytes": "size bytes memory file_size"})
    return f"; did you mean {word!r}?" if word else ""


def _require_column(frame: pd.DataFrame, name: str) -> None:
    if name not in frame:
        hint = column_meant(name) or suggest_names(map(str, frame), name)
        hint = hint or f"; columns are {', '.join(map(str, frame))}"
        raise ValueError(f"there is no column {name!r}{hint}")


def has_groups(result: xr.Dataset) -> bool:
    """Return whether a Dataset is a result of `by`; selections and reductions keep its encoding."""
    dims = set(result.dims) - {"bin"}
    has_counts = "bin" in result.dims or "tensors" in result
    return bool(result.encoding.get("grouped")) and bool(dims) and has_counts


def _group_frame(groups: xr.Dataset) -> pd.DataFrame:
    """Return a row for each group that has tensors."""
    if "bin" in groups.dims:
        edges = groups["bin_left"].to_numpy()
        counts = groups["count"].assign_coords(bin=edges).to_series().unstack("bin")  # noqa: PD010
        frame: pd.DataFrame = counts[counts.sum(axis=1) > 0]
        return frame
    frame = groups.to_dataframe()
    return frame[frame["tensors"] > 0]


def _frame(result: xr.Dataset) -> pd.DataFrame:
    """Return a row for each tensor."""
    import pandas as pd

    with paused_collector():
        names, values = tensor_rows(result)
    if "bin" in result.dims:
        edges = pd.Index(result["bin_left"].to_numpy(), name="bin")
        return pd.DataFrame(values, pd.Index(names, name="tensor", dtype=object), edges)
    columns = result["statistic"].to_numpy().tolist()
    frame = pd.DataFrame(values, pd.Index(names, name="tensor", dtype=object), columns)
    if "count" in columns and "status" not in columns:  # without members of stacks not selected
        frame = frame[frame["count"].notna()]
    integers = [c for c in _WHOLE_NUMBERS if c in columns and frame[c].notna().all()]
    frame = frame.astype(dict.fromkeys(integers, np.int64))
    attrs = {key for variable in result.variables.values() for key in variable.attrs}
    is_explained = "cause" in attrs or "explanation" in result.attrs
    keys = [*_PARTNERS, *(EXPLANATION_COLUMNS if is_explained else ())]
    texts: dict[str, list[Any]] = {}
    if is_explained or not attrs.isdisjoint(keys):
        texts = tensor_attributes(result, {key: _IF_MISSING[key] for key in keys})
    for key in _PARTNERS:
        if any(texts.get(key, ())):
            frame[key] = texts[key]
    if "cause" in texts:
        frame.insert(1, "outcome", texts["outcome"])
        frame.insert(2, "cause", texts["cause"])
        for key in EXPLANATION_COLUMNS:
            if key not in {"outcome", "cause"}:
                frame[key] = texts[key]
        frame["verified"] = frame["verified"] == 1
    return _ranked(frame) if "status" in frame else frame


def _ranked(frame: pd.DataFrame) -> pd.DataFrame:
    """Replace the codes of statuses by their names, and sort tensors by the size of the change."""
    import pandas as pd

    frame = frame[frame["status"].notna()]
    codes = frame["status"].to_numpy(np.int64)
    severity = np.array([_SEVERITY.index(status) for status in STATUSES])
    keys: dict[str, Any] = {"severity": severity[codes]}
    if {"nan", "inf", "count"} <= set(frame.columns):
        keys["spoilt"] = ((frame["nan"] + frame["inf"]) / frame["count"]).to_numpy()
    keys |= {name: frame[name].to_numpy() for name in ("rel_l2", "max_abs") if name in frame}
    # Sort positions, because two tensors can have the same name.
    order = pd.DataFrame(keys).sort_values(list(keys), ascending=False, kind="stable").index
    names = pd.Categorical.from_codes(codes, list(STATUSES))
    return frame.assign(status=names).iloc[order]


def count_statuses(frame: pd.DataFrame, a: str, b: str) -> dict[str, str]:
    """Return the number of tensors with each status in words: ``3 only in a``."""
    counts = frame["status"].value_counts().to_dict()
    words = {status: text.format(a=a, b=b) for status, text in _STATUS_WORDS.items()}
    return {key: f"{counts[key]:,} {text}" for key, text in words.items() if counts.get(key)}


def channel_values(result: xr.Dataset, statistic: str) -> dict[str, Array]:
    """Return a statistic of the channels of each tensor of a comparison, by name."""
    position = result["statistic"].to_numpy().tolist().index(statistic)
    coords = {name: result.variables[name] for name in result.coords}
    values: dict[str, Array] = {}
    for name, variable in _described(result):
        record = stack_of(variable)
        along = tuple([dim for dim in variable.dims if record and dim in record.dims])
        names = _names(name, variable, along, coords)
        channels = variable.transpose("statistic", *along, ...)[position].to_numpy()
        pairs = zip(names, channels.reshape(len(names), -1), strict=True)
        values |= {tensor: row for tensor, row in pairs if tensor is not None}
    return values


def matched_names(result: xr.Dataset) -> dict[str, str]:
    """Return the names in `b` of the tensors of a comparison that both sides have, by name."""
    if has_channels(result):
        raise ValueError("names need a comparison of whole tensors, without dim=")
    names, values = tensor_rows(result)
    position = result["statistic"].to_numpy().tolist().index("status")
    attrs = tensor_attributes(result, {"other_name": None, "matched_by": None})
    columns = (names, attrs["other_name"], attrs["matched_by"], values[:, position])
    return {
        name: name if partner is None else partner
        for name, partner, rule, status in zip(*columns, strict=True)
        if status in _ON_BOTH_SIDES and rule != TIED
    }


def has_channels(result: xr.Dataset) -> bool:
    """Return whether a result has values for parts of tensors, computed with ``dim=``."""
    stacks = [(v.dims[1:], stack_of(v)) for _, v in _described(result)]
    return any(set(dims) - set(record.dims if record else ()) for dims, record in stacks)


def tensor_names(result: xr.Dataset) -> list[str]:
    """List the names of the tensors of a result, in its order."""
    return [name for _, names in named_tensors(result) for name in names if name is not None]


def tensor_rows(result: xr.Dataset) -> tuple[list[str], Array]:
    """Return the names of the tensors of a result, and one row of statistics or bins for each."""
    present_names: list[str] = []
    blocks = [np.empty((0, result.sizes.get("bin", result.sizes.get("statistic", 0))))]
    for variable, names in named_tensors(result):
        rows = np.asarray(variable.values).reshape(variable.shape[0], -1).T
        is_present = [name is not None for name in names]
        present_names += [name for name in names if name is not None]
        blocks.append(rows if all(is_present) else rows[is_present])
    return present_names, np.concatenate(blocks if len(blocks) == 1 else blocks[1:])


def named_tensors(result: xr.Dataset) -> Iterator[tuple[xr.Variable, list[str | None]]]:
    """Yield each variable of a result with the names of its tensors; None for absent ones."""
    coords = {name: result.variables[name] for name in result.coords}
    for name, variable in _described(result):
        yield variable, _names(name, variable, variable.dims[1:], coords)


def _names(
    name: Hashable,
    variable: xr.Variable,
    dims: tuple[Hashable, ...],
    coords: Mapping[Hashable, xr.Variable],
) -> list[str | None]:
    """Return the names of tensors; a variable has another name if two in `a` and `b` have one."""
    return member_names(variable.encoding.get("tensor", name), variable, dims, coords)


def _described(result: xr.Dataset) -> list[tuple[Hashable, xr.Variable]]:
    """List the variables of a result, statistics first."""
    coords = set(result.coords)
    variables = [(n, v) for n, v in result.variables.items() if n not in coords]
    axis = "bin" if "bin" in result.dims else "statistic"
    for name, variable in variables:
        if axis not in variable.dims:
            raise ValueError(
                f"{shown(str(name))} has no dimension {axis!r}: not a result of stats. Of a "
                "checkpoint, ds.ckpt.stats().ckpt.table() has statistics of each tensor, and "
                "ds.ckpt.structure() names and roles"
            )
    # Transpose only if necessary, because it takes longer than the rest of a call.
    return [(n, v if v.dims[0] == axis else v.transpose(axis, ...)) for n, v in variables]


def tensor_attributes(result: xr.Dataset, defaults: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return attributes of the tensors of a result, in order; `defaults` has the missing values."""
    # The attribute of a variable is a list, or a single value if it has one tensor.
    columns: dict[str, list[Any]] = {key: [] for key in defaults}
    for variable, names in named_tensors(result):
        for key, default in defaults.items():
            attr = variable.attrs.get(key, ())
            values = [attr] if isinstance(attr, str) else np.atleast_1d(attr).tolist()
            if len(values) != len(names):
                values = [default] * len(names)
            columns[key] += [
                value for value, name in zip(values, names, strict=True) if name is not None
            ]
    return columns


# --- blocks ---------------------------------------------------------------------------------------

_MOST_ROWS, _MOST_COLUMNS = 10, 12
_MOST_ATTRIBUTES, _WIDEST_CHANGE = 3, 160
_TABLE = ".ckpt.table()"
#: Kinds of columns other than numbers.
_KINDS = {
    **dict.fromkeys(("dtype", "shape", "outcome", "cause", "name_b", "other_names"), "word"),
    "status": "status",
    "explanation": "text",
}
#: Statistics of groups that have a bar, the first one that there is.
_DRAWN = ("rel_l2", "affected", "std", "spectral_norm")
_STEPS = 10**6  # of a bar
#: Numbers of tensors in a group that come first.
_COUNTS = ("affected", "changed", "only_a", "only_b")


def result_blocks(result: xr.Dataset) -> list[Block] | None:
    """Return the view of a result; None for another Dataset."""
    if has_groups(result):
        return _groups(result)
    kind = _kind_of(result)
    if kind is None:
        return None
    stated = [result.attrs.get("source"), result.attrs.get("compared_with")]
    files = [str(file).rstrip("/") for file in stated if file]
    names = [base_name(file) for file in files]
    if len(set(names)) < len(set(files)):
        names = [f"{base_name(dirname(file))}/{base_name(file)}" for file in files]
    title = " with ".join(names)
    noun = f"{kind} of" if title else kind
    unit = "channel" if has_channels(result) else "tensor"
    tensors = counted(len(tensor_names(result)), unit)
    if kind == "Histogram":
        return [Heading(title, noun, [tensors, f"{result.sizes['bin']} bins"])]
    if any(hasattr(data_of(variable), "dask") for variable, _ in named_tensors(result)):
        return [Heading(title, noun, [tensors, "not computed yet"])]
    frame = table(result)
    fact = f"{len(result['statistic'])} statistics"
    if "status" in frame:
        counts = frame["status"].value_counts()
        statuses = [f"{count:,} {status}" for status, count in counts.items() if count]
        fact = ", ".join(statuses) or "none in common"
    blocks: list[Block] = [Heading(title, noun, [f"{tensors}: {fact}"])]
    if conclusion := str(result.attrs.get("explanation", "")):
        blocks.append(Sentence("lead", conclusion))
    if attributes := attribute_sentence(result):
        blocks.append(Sentence("", attributes))
    hints = [Sentence("hint", hint)] if (hint := result.attrs.get("hint")) else []
    if "status" in frame and len(frame) > FEW_TENSORS and not has_channels(result):
        lines = comparison_lines(frame, MOST_LINES - 3 * len(blocks[1:] + hints))
        blocks += [Sentence("exception" if n.is_exception else "", str(n)) for n in lines]
        return [*blocks, *hints, Sentence("hint", f"every tensor: {_TABLE}")]
    columns = [name for name in MAIN_COLUMNS if name in frame] or list(frame)
    return [*blocks, frame_table(frame, columns[:_MOST_COLUMNS], _MOST_ROWS, where=_TABLE), *hints]


def _groups(groups: xr.Dataset) -> list[Block]:
    """Return the view of a result of `by`."""
    keys = [str(dim) for dim in groups.dims if dim != "bin"]
    title, by_keys = base_name(str(groups.attrs.get("source", ""))), f"by {', '.join(keys)}"
    noun = "Groups of" if title else "Groups"
    if "bin" in groups.dims:
        return [Heading(title, noun, [f"{by_keys}: {groups.sizes['bin']} bins"])]
    frame = table(groups)
    counts = [name for name in ("tensors", *_COUNTS) if name in frame]
    columns = list(dict.fromkeys([*keys, *counts, *frame]))[:_MOST_COLUMNS]
    blocks: list[Block] = [
        Heading(title, noun, [f"{by_keys}: {counted(len(frame), 'group')}"]),
        frame_table(frame.reset_index(), columns, _MOST_ROWS, where=_TABLE, keys=keys),
    ]
    return [*blocks, *[Sentence("note", note) for note in group_notes(groups.attrs, keys)]]


def group_notes(attrs: Any, keys: Sequence[str]) -> list[str]:
    """Return which tensors are in no group, as sentences."""
    notes = []
    if "outside" in attrs:
        lacking = " or ".join(attrs.get("lacking", keys)) or "a value"
        notes.append(f"in no group, without {lacking}: {attrs['outside']}")
    return [*notes, *([attrs["unknown"]] if "unknown" in attrs else [])]


def frame_table(
    frame: pd.DataFrame,
    columns: Iterable[str],
    most: int | None = None,
    *,
    where: str = "",
    keys: Sequence[str] = (),
    wanted: Sequence[str] = (),
) -> Table:
    """Return the first rows of a table of tensors, or of groups by keys, as a block."""
    # `where` is the call that returns the other rows, and `wanted` lists columns to show rather
    # than others.
    top = frame if most is None else frame.iloc[:most]
    fields = [] if keys else [Field("tensor", "name")]
    cells: list[Sequence[Cell]] = [] if keys else [[str(name) or '""' for name in top.index]]
    drawn = next((name for name in _DRAWN if name in frame), "") if keys else ""
    for name in columns:
        values = top[name].tolist()
        if name in keys:
            is_word = bool(fields) or all(isinstance(value, int) for value in values)
            fields.append(Field(name, "word" if is_word else "name"))
            values = list(map(str, values))
        else:
            fields.append(Field(name, _KINDS.get(name, "number")))
            if name == "shape":
                values = [shape_text(shape) for shape in values]
        cells.append(values)
        if name == drawn:
            fields.append(Field("", "bar"))
            cells.append(_shares(values))
    omitted = more(len(frame) - len(top), where=where)
    hidden = len(set(map(str, frame)) - {field.title for field in fields}) if where else 0
    return Table(fields, list(zip(*cells, strict=True)), omitted, wanted=wanted, hidden=hidden)


def _shares(values: Sequence[float]) -> list[Cell]:
    """Return numbers as shares of the largest one."""
    largest = max([v for v in values if not isnan(v)], default=0.0)
    if not 0 < largest < float("inf"):
        return [None] * len(values)
    return [None if isnan(v) else Share(int(v / largest * _STEPS), _STEPS) for v in values]


def comparison_lines(frame: pd.DataFrame, most: int = MOST_LINES) -> list[ChangeLine]:
    """Summarise the table of a comparison in a few sentences, exceptions first."""
    with paused_collector():
        explained = "outcome" in frame
        rows = frame[~represented(frame)] if explained else frame
        missing: list[Any] = [float("nan")] * len(rows)
        sizes = rows["rel_l2"].tolist() if "rel_l2" in rows else missing
        spoilt = rows[[name for name in ("nan", "inf") if name in rows]].sum(axis=1) > 0
        statuses = rows["status"].astype(str).where(~spoilt, "not_finite").tolist()
        if not explained:
            kinds = ["explained" if status == "close" else status for status in statuses]
            causes = ["close" if status == "close" else "" for status in statuses]
            compared = list(map(TensorChange, rows.index, kinds, sizes, causes))
            return change_lines(compared, most)
        columns = [rows[name] for name in ("outcome", "cause", "offset", "scale", "heads")]
        compared = []
        for name, status, size, outcome, cause, *facts in zip(
            rows.index, statuses, sizes, *columns, strict=True
        ):
            kind, text = status, ""
            if outcome == "explained":
                kind, text = "explained", "" if cause == "equal" else cause_text(cause, *facts)
            elif outcome == "changed":
                # Equal tensors have changed only if an adapter should have changed them.
                kind = {"same": "not_merged", "not_finite": "not_finite"}.get(status, "changed")
                text = "" if cause == "unknown" else cause
                if status == "close":
                    kind, text = "explained", "close"
                if status == "shape" and not size > 0:
                    kind = "shape"
            compared.append(TensorChange(name, kind, size, text))
        return change_lines(compared, most)


def attribute_sentence(result: xr.Dataset, rest: str = '.attrs["attributes"]') -> str:
    """Summarise the attributes that differ in a comparison; empty if none do."""
    changes = list(map(str, result.attrs.get("attributes", ())))
    if not changes:
        return ""
    texts = [shortened(printable(change), _WIDEST_CHANGE) for change in changes[:_MOST_ATTRIBUTES]]
    verb = "attribute differs" if len(changes) == 1 else "attributes differ"
    texts += filter(None, [more(len(changes) - len(texts), where=rest)])
    return f"{len(changes):,} {verb}: {'; '.join(texts)}"


def cause_text(cause: str, offset: float, scale: float, heads: float) -> str:
    """Write the causes of a difference with their numbers; NaN for a missing one."""
    facts = [f"{offset:+.4g}"] if offset == offset else []  # noqa: PLR0124  NaN
    facts += [f"* {scale:.4g}"] if scale == scale else []  # noqa: PLR0124  NaN
    facts += [counted(int(heads), "head")] if heads == heads else []  # noqa: PLR0124  NaN
    return f"{cause} ({', '.join(facts)})" if facts else cause


def represented(frame: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows of an explained comparison the row of another name already covers."""
    # A matched pair of different names has two rows. The row of `a` represents both.
    is_of_b = frame["status"] == "only_b"
    partners = {name for names in frame["other_names"][~is_of_b] for name in names.split(", ")}
    return is_of_b & frame.index.isin(partners)


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
