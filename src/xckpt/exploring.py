"""``ds.ckpt.explore()``: the tensors of an open object and their statistics, for the explorer."""

from __future__ import annotations

import warnings
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from xckpt.errors import CheckpointWarning
from xckpt.notebook.folding import Row
from xckpt.notebook.summary import storage_words
from xckpt.opening import paused_collector
from xckpt.stacking import member_names, member_variables
from xckpt.tensors import flatten, tensor_name
from xckpt.variables import LazyVariable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xckpt.notebook.summary import Summary

__all__ = ["OpenTensors", "StaticSummary", "explore"]

_BINS = 80


class StaticSummary:
    """A summary that shows itself in a notebook and a terminal.

    Parameters
    ----------
    summary : Summary
        What to show.
    """

    def __init__(self, summary: Summary) -> None:
        self._summary = summary

    def __repr__(self) -> str:
        from xckpt.notebook.text import render

        return render(self._summary)

    def _repr_html_(self) -> str:
        from xckpt.notebook.html import render

        return render(self._summary)


def explore(tensors: OpenTensors, summary: Summary) -> Any:
    """Make the widget that explores an open object."""
    try:
        from xckpt.notebook.explorer import Explorer
    except ModuleNotFoundError as error:
        if error.name not in {"anywidget", "ipywidgets"}:
            raise
        text = "explore() needs anywidget: pip install 'xckpt[widgets]'; here is the summary"
        warnings.warn(text, CheckpointWarning, stacklevel=3)
        return StaticSummary(summary)
    from xckpt.statistics.describe import statistic_names
    from xckpt.statistics.result import QUANTILES

    return Explorer(
        tensors.rows,
        summary=summary,
        statistics=statistic_names(QUANTILES),
        compute=tensors.compute,
        histogram=tensors.histogram,
        code=tensors.code,
    )


class _Home(NamedTuple):
    """The variable that has a tensor, and where in it."""

    variable: str
    place: Mapping[str, int]  # along stacked dimensions; none where it is the variable


class OpenTensors:
    """The tensors of an open Dataset or tree one by one, also those that are stacked.

    Parameters
    ----------
    obj : xarray.Dataset or xarray.DataTree
        Whose variables have the names of tensors.
    """

    def __init__(self, obj: xr.Dataset | xr.DataTree) -> None:
        self._obj = obj
        self._flat = flatten(obj)
        self._indexes = {path: self._flat.indexes(path) for path in self._flat.coords}
        self._homes: dict[str, _Home] = {}
        self._shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}  # by dimensions
        # The tensors of the stacked variable that was asked for last.
        self._members: tuple[str, dict[str, xr.Variable]] = ("", {})
        #: What the summary and the explorer know of each tensor, in file order where it is known.
        with paused_collector():
            self.rows = list(self._rows())
        order = {name: at for at, name in enumerate(obj.encoding.get("flat_order", ()))}
        if order:
            self.rows.sort(key=lambda row: order.get(row.name, len(order)))

    @property
    def dims(self) -> dict[str, int]:
        """The dimensions of all variables and their sizes; where these differ, one of them."""
        return {
            str(dim): size
            for dims, shape in self._shapes.items()
            for dim, size in zip(dims, shape, strict=True)
        }

    def variable(self, name: str) -> xr.Variable:
        """Return a tensor as a variable of its own."""
        if name not in self._homes:
            return self._flat.variables[name]
        home = self._homes[name]
        stacked, members = self._members
        if stacked != home.variable:
            members = self._members_of(home.variable)
            self._members = (home.variable, members)
        return members[name]

    def code(self, name: str) -> str:
        """Write the expression that gives a tensor, of an object called ``ds`` or ``dt``."""
        home = self._homes.get(name, _Home(name, {}))
        variable, obj = home.variable, "ds"
        if isinstance(self._obj, xr.DataTree):
            variable, obj = self._path(variable), "dt"
        index = [
            f"{dim}={at}" if dim.isidentifier() else f"**{{{_literal(dim)}: {at}}}"
            for dim, at in home.place.items()
        ]
        selection = f".sel({', '.join(index)})" if index else ""
        return f"{obj}[{_literal(variable)}]{selection}"

    def compute(
        self, names: Sequence[str], report: Callable[[int, int], object]
    ) -> dict[str, dict[str, float]]:
        """Compute the statistics of tensors, as `xckpt.notebook.explorer.Compute`."""
        from xckpt.statistics.result import stats

        numeric = [name for name in names if _has_numbers(self.variable(name))]
        result = stats(self._dataset(numeric), progress=report)
        statistics = result["statistic"].to_numpy().tolist()
        return {
            name: dict(zip(statistics, result.variables[key].values.tolist(), strict=True))
            for key, name in enumerate(numeric)
        }

    def histogram(
        self, name: str, report: Callable[[int, int], object]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Count the elements of a tensor in bins, as `xckpt.notebook.explorer.Histogram`."""
        from xckpt.statistics import histogram

        bins: int | np.ndarray[Any, Any] = _BINS
        if self.variable(name).dtype.kind in "iu":
            bins = _whole_edges(self.compute([name], report)[name])
        result = histogram(self._dataset([name]), bins, "linear", progress=report)
        left, right = (result[f"bin_{side}"].to_numpy() for side in ("left", "right"))
        return np.append(left, right[-1]), result.variables[0].to_numpy()

    def _rows(self) -> Iterator[Row]:
        """List the tensors of all variables; this runs 100,000 times where nothing is stacked."""
        known: dict[Any, str] = {}
        for name, variable in self._flat.variables.items():
            encoding = variable.encoding
            shape = self._shapes[variable.dims] = variable.shape
            # Asking the variable takes ten times as long.
            told = "stored_dtype" in encoding
            dtype: Any = encoding["stored_dtype"] if told else variable.dtype
            nbytes: int = encoding["nbytes"] if "nbytes" in encoding else variable.nbytes  # noqa: SIM401
            if dtype not in known:
                known[dtype] = str(dtype)
            storage = "" if _is_plain(encoding) else _storage(encoding)
            row = Row(str(name), known[dtype], shape, nbytes, prod(shape), storage)
            if "stack" in encoding:
                yield from self._unstacked(row, variable)
            else:
                yield row

    def _unstacked(self, row: Row, variable: xr.Variable) -> Iterator[Row]:
        """Note and list the tensors that are stacked in a variable."""
        homes = dict(self._stacked(row.name, variable))
        if not homes:
            yield row
            return
        stack = variable.encoding["stack"]
        sizes = zip(variable.dims, variable.shape, strict=True)
        shape = tuple([size for dim, size in sizes if dim not in stack["dims"]])
        nbytes, size = row.nbytes // len(stack["members"]), prod(shape)
        for member, home in homes.items():
            if member not in self._homes and member not in self._flat.variables:
                self._homes[member] = home
                yield Row(member, row.dtype, shape, nbytes, size, row.storage)

    def _stacked(self, name: str, variable: xr.Variable) -> Iterator[tuple[str, _Home]]:
        """Find the tensors of a stacked variable; none where it cannot be told which are left."""
        indexes = self._indexes_of(name)
        try:
            members = member_names(name, variable, indexes)
        except ValueError:
            return
        dims = [dim for dim in variable.encoding["stack"]["dims"] if dim in variable.dims]
        places = np.ndindex(*(variable.sizes[dim] for dim in dims))
        along = [indexes[dim].values.tolist() for dim in dims]
        for member, place in zip(members, places, strict=True):
            index = {d: each[at] for d, each, at in zip(dims, along, place, strict=True)}
            yield member, _Home(name, index)

    def _members_of(self, name: str) -> dict[str, xr.Variable]:
        return member_variables(name, self._flat.variables[name], self._indexes_of(name))

    def _indexes_of(self, name: str) -> Mapping[Any, xr.Variable]:
        return self._indexes[self._flat.nodes[name]]

    def _path(self, name: str) -> str:
        """Return the path of a variable in the tree."""
        node = self._flat.nodes[name]
        leaves = self._obj.root[node].variables if node != "/" else self._obj.root.variables
        leaf = next(leaf for leaf, v in leaves.items() if tensor_name(node, str(leaf), v) == name)
        return f"{node.rstrip('/')}/{leaf}"

    def _dataset(self, names: Sequence[str]) -> xr.Dataset:
        """Put tensors in a Dataset by their numbers; nodes of a tree may not agree on sizes."""
        variables = {}
        for key, name in enumerate(names):
            variable = self.variable(name)
            dims = tuple([f"{key}_{axis}" for axis in range(variable.ndim)])
            data = variable._data  # noqa: SLF001  `data` would load what is not dask's
            encoding = {k: v for k, v in variable.encoding.items() if k != "stack"}
            variables[key] = LazyVariable.of(dims, data, None, encoding)
        return xr.Dataset(variables)


def _whole_edges(statistics: Mapping[str, float]) -> np.ndarray[Any, Any]:
    """Cut between whole numbers, as many in each bin: else some bins stick out."""
    low, high = statistics["min"], statistics["max"]
    width = max(1, ceil((high - low + 1) / _BINS))
    count = ceil((high - low + 1) / width)
    return low - 0.5 + width * np.arange(count + 1.0)


def _has_numbers(variable: xr.Variable) -> bool:
    from xckpt.statistics.kinds import require_numbers

    try:
        require_numbers(variable.dtype)
    except TypeError:
        return False
    return True


def _is_plain(encoding: Mapping[Any, Any]) -> bool:
    dense = encoding.get("layout") in {None, "dense"} and encoding.get("stored_compression") is None
    return dense and "parts" not in encoding


def _storage(encoding: Mapping[Any, Any]) -> str:
    if "part" in encoding:
        return storage_words("dense", [encoding.get("stored_compression")])
    parts = encoding.get("parts", {"data": encoding}).values()
    return storage_words(
        encoding.get("layout", "dense"), [p.get("stored_compression") for p in parts]
    )


def _literal(text: str) -> str:
    plain = text.isprintable() and not set(text) & {'"', "\\"}
    return f'"{text}"' if plain else repr(text)
