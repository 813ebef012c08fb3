"""`by`: results of several tensors merged into results by layer, role, or numbered module.

The statistics of a group are those of all its elements together. `Groups` has the sums from which
they follow; `definitions` states how each statistic merges, `comparison.merging` how measures do.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.datasets.stack_records import stack_of
from xckpt.errors import shown, some
from xckpt.index import paused_collector
from xckpt.labels.filters import suggest_word
from xckpt.labels.numbering import drop_indices, parse_name, split_leaf
from xckpt.labels.roles import Role, roles_of
from xckpt.notebook.folding import ascending
from xckpt.statistics.definitions import STATISTICS
from xckpt.statistics.tables import named_tensors, tensor_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    import xarray as xr

    from xckpt.datasets.tensors import Origin

Array = np.ndarray[Any, np.dtype[Any]]

_ROLES = [role.value for role in Role]
_NEVER = {
    "unique": "distinct values of several tensors do not follow from their numbers",
    "quantile": "quantiles of several tensors do not follow from their quantiles",
    "": "the statistic describes a single tensor",
}
_SAVED = "computed from a saved result: roles follow from names alone, and tied copies count"


class Merged(NamedTuple):
    """Numbers of groups by name, and the reasons why others are missing."""

    columns: dict[str, Array]
    missing: dict[str, str]


# --- merging -------------------------------------------------------------------------------------


class Groups:
    """Tensors in groups, and the statistics of all finite elements of each group.

    Parameters
    ----------
    columns : mapping of str to array
        Statistics by name, with a number for each tensor.
    numbers : array of int
        Group of each tensor.
    """

    def __init__(self, columns: Mapping[str, Array], numbers: Array) -> None:
        order = np.argsort(numbers, kind="stable")
        self._order = order
        self._columns = columns
        #: The groups that have tensors, and the number of tensors of each.
        self.present, self._starts, self.tensors = np.unique(
            numbers[order], return_index=True, return_counts=True
        )
        self._owner = np.repeat(np.arange(len(self.present)), self.tensors)

    def __getitem__(self, name: str) -> Array:
        """Return a statistic of the tensors, sorted by group; raise `KeyError` if it is missing."""
        return self._columns[name][self._order]

    def sum(self, values: Array) -> Array:
        """Return the sum over each group of numbers in the order of the groups."""
        # Extended precision, because numpy adds up segments one number after another.
        total: Array = np.add.reduceat(values, self._starts, dtype=np.longdouble)
        return total.astype(np.float64)

    def total(self, name: str) -> Array:
        """Return the sum of a statistic over the tensors of each group."""
        return self.sum(self[name])

    def spread(self, values: Array) -> Array:
        """Return the number of its group for each tensor."""
        spread: Array = values[self._owner]
        return spread

    def highest(self, values: Array) -> Array:
        """Return the largest of the numbers of each group."""
        highest: Array = np.maximum.reduceat(values, self._starts)
        return highest

    def least(self, name: str) -> Array:
        """Return the smallest of a statistic over the tensors with finite elements."""
        return -self._extreme(-self[name])

    def largest(self, name: str) -> Array:
        """Return the largest of a statistic over the tensors with finite elements."""
        return self._extreme(self[name])

    def _extreme(self, values: Array) -> Array:
        highest = self.highest(np.where(self.finite > 0, values, -np.inf))
        return np.where(self.all_finite > 0, highest, np.nan)

    @cached_property
    def finite(self) -> Array:
        """Number of finite elements of each tensor."""
        return self["count"] - self["nan"] - self["inf"]

    @cached_property
    def all_finite(self) -> Array:
        """Number of finite elements of each group."""
        return self.sum(self.finite)

    @cached_property
    def mean(self) -> Array:
        """Mean of each group."""
        means = self._of_finite("mean")
        low, high = self.least("mean"), self.largest("mean")
        # A share of the elements, because a sum of all of them may overflow.
        return np.where(low == high, low, self.sum(self._share * means))

    @cached_property
    def std(self) -> Array:
        """Standard deviation of each group."""
        std: Array = np.ldexp(np.sqrt(self._central[0]), self._exponent)
        return std

    @property
    def rms(self) -> Array:
        """Root of the mean square of each group."""
        return self._root("rms", self._share)

    @property
    def l2(self) -> Array:
        """Root of the sum of the squares of each group; zero without finite elements."""
        return np.where(self.all_finite > 0, self._root("l2", np.ones(len(self.finite))), 0.0)

    @property
    def skew(self) -> Array:
        """Standardised third moment of each group."""
        variance, third, _ = self._central
        return np.where(variance > 0, third / variance**1.5, np.nan)

    @property
    def kurtosis(self) -> Array:
        """Excess kurtosis of each group."""
        variance, _, fourth = self._central
        return np.where(variance > 0, fourth / variance**2 - 3.0, np.nan)

    @cached_property
    def _share(self) -> Array:
        """Part of the finite elements of its group that each tensor has; NaN without any."""
        share: Array = self.finite / self.spread(self.all_finite)
        return share

    def _of_finite(self, name: str) -> Array:
        """Return a statistic of the tensors, zero for tensors without finite elements."""
        return np.where(self.finite > 0, self[name], 0.0)

    @cached_property
    def _exponent(self) -> Array:
        """Exponent of a power of two near the elements, so that fourth powers stay in range."""
        sizes = np.maximum(np.abs(self._of_finite("mean")), self._of_finite("std"))
        return np.frexp(self.highest(sizes))[1]

    @cached_property
    def _central(self) -> tuple[Array, Array, Array]:
        """Central moments of each group, from those of its tensors around the common mean."""
        down = -self.spread(self._exponent)
        std = np.ldexp(self._of_finite("std"), down)
        # Halves, because a difference of large numbers may overflow.
        half = self._of_finite("mean") / 2 - self.spread(self.mean) / 2
        shift = np.where(self.finite > 0, np.ldexp(half, down + 1), 0.0)
        variance = std**2
        second = self.sum(self._share * (variance + shift**2))
        third, fourth = np.full_like(second, np.nan), np.full_like(second, np.nan)
        if {"skew", "kurtosis"} <= set(self._columns):
            is_spread = (self.finite > 0) & (std > 0)
            cubes = np.where(is_spread, std**3 * self["skew"], 0.0)
            fourths = np.where(is_spread, variance**2 * (self["kurtosis"] + 3.0), 0.0)
            third = self.sum(self._share * (cubes + 3 * shift * variance + shift**3))
            terms = fourths + 4 * shift * cubes + 6 * shift**2 * variance + shift**4
            fourth = self.sum(self._share * terms)
        return second, third, fourth

    def _root(self, name: str, weights: Array) -> Array:
        """Return the root of the weighted sum of the squares of a statistic."""
        values = self._of_finite(name)
        exponent = np.frexp(self.highest(values))[1]
        squares = np.ldexp(values, -self.spread(exponent)) ** 2
        root: Array = np.ldexp(np.sqrt(self.sum(weights * squares)), exponent)
        return root


def merge_statistics(groups: Groups, names: Sequence[str]) -> Merged:
    """Merge the statistics of tensors that have these names, as their definitions state."""
    merges = {statistic.name: statistic.merge for statistic in STATISTICS}
    columns, missing = {}, {}
    for name in names:
        merge = merges.get(name)
        if merge is None:
            kind = "quantile" if name.startswith("q") and name[1:2].isdigit() else name
            missing[name] = _NEVER.get(kind, _NEVER[""])
            continue
        try:
            columns[name] = merge(groups)
        except KeyError as error:
            missing[name] = f"it needs the statistic {error.args[0]}"
    return Merged(columns, missing)


# --- keys ----------------------------------------------------------------------------------------


def _labels(key: str, names: Sequence[str], origin: Origin | None) -> list[Any]:
    """Return the label of each tensor; None for a tensor that has none."""
    if key == "role":
        return _role_labels(names, origin)
    if key == "module":
        return [drop_indices(parse_name(split_leaf(name)[0]).template) for name in names]
    parsed = [parse_name(name) for name in names]
    if key == "layer":
        paths = [parts.outermost for parts in parsed]
        stacks = {path.removesuffix(parts.indices[0])
                  for path, parts in zip(paths, parsed, strict=True) if path}  # fmt: skip
        if len(stacks) > 1:  # for example an encoder and a decoder
            return [path or None for path in paths]
        labels: list[Any] = [int(parts.indices[0]) if parts.indices else None for parts in parsed]
    else:
        labels = [_number_of(key, parts.modules, parts.indices) for parts in parsed]
    if all(label is None for label in labels):
        modules = Counter(module for parts in parsed for module in parts.modules)
        keys = ["layer", "role", "module", *modules]
        hint = suggest_word(key, {}, keys)
        listed = f"did you mean {hint!r}?" if hint else f"keys are {', '.join(map(shown, keys))}"
        raise ValueError(f"no tensor has a number for {key!r} in its name; {listed}")
    return labels


def _number_of(key: str, modules: Sequence[str], indices: Sequence[str]) -> int | None:
    """Return the index of a module called ``expert``, ``experts``, ``local_experts``, ..."""
    for module, index in zip(modules, indices, strict=True):
        if module in {key, f"{key}s"} or module.endswith((f"_{key}", f"_{key}s")):
            return int(index)
    return None


def _role_labels(names: Sequence[str], origin: Origin | None) -> list[str]:
    """Return the role of each tensor, from all tensors of the checkpoint if these are known."""
    tensors = {tensor[0]: tensor for tensor in (origin.tensors if origin else ())}
    # Parts of a tensor have names like name:part.
    owners = [name if name in tensors else name.rpartition(":")[0] for name in names]
    owners = [
        owner if owner in tensors else name for owner, name in zip(owners, names, strict=True)
    ]
    # A matrix of floats stands for a tensor of which only the name is known.
    unknown = [(name, "float32", (2, 2)) for name in owners if name not in tensors]
    roles = roles_of([*tensors.values(), *unknown])
    return [roles[name].value for name in owners]


def _sorted(key: str, labels: Iterable[Any]) -> list[Any]:
    """Sort the labels of a key: numbers by size, roles as documented, names by their numbers."""
    distinct = list(dict.fromkeys(labels))
    if key == "role":
        return sorted(distinct, key=_ROLES.index)
    if all(isinstance(label, int) for label in distinct):
        return sorted(distinct)
    return [distinct[position] for position in ascending(distinct)]


# --- results -------------------------------------------------------------------------------------


def by(
    result: xr.Dataset,
    keys: Sequence[str],
    merge: Callable[[Groups, Sequence[str]], Merged] = merge_statistics,
    extra: Callable[[Sequence[str]], dict[str, Array]] | None = None,
) -> xr.Dataset:
    """Return the statistics of all elements of each group; see `CheckpointAccessor.by`.

    Parameters
    ----------
    result : xarray.Dataset
        Statistics, measures or a histogram of whole tensors.
    keys : sequence of str
        Keys of the groups, which become dimensions.
    merge : callable, optional
        Merges the columns of several tensors.
    extra : callable, optional
        Returns columns besides the statistics, for the names of the tensors.
    """
    if not keys or len(set(keys)) < len(keys):
        raise ValueError("by() takes different keys: 'layer', 'role', 'module', 'expert', ...")
    for variable, _ in named_tensors(result):
        record = stack_of(variable)
        if set(variable.dims[1:]) - set(record.dims if record else ()):
            raise ValueError("by() merges statistics of whole tensors, computed without dim=")
    origin: Origin | None = result.encoding.get("origin")
    with paused_collector():
        names, rows = tensor_rows(result)
        is_chosen = _untied(names, origin)
        labels = {key: _labels(key, names, origin) for key in keys}
        has_label = np.array([None not in place for place in zip(*labels.values(), strict=True)])
        outside = [n for n, has in zip(names, has_label.tolist(), strict=True) if not has]
        picked = np.flatnonzero(is_chosen & has_label).tolist()
        coords = {key: _sorted(key, (labels[key][n] for n in picked)) for key in keys}
        shape = tuple(map(len, coords.values()))
        places = []
        for key, coord in coords.items():
            positions = {label: position for position, label in enumerate(coord)}
            places.append([positions[labels[key][n]] for n in picked])
        picked_names = [names[n] for n in picked]
    if not picked:
        raise ValueError(f"no tensor has all keys {', '.join(map(repr, keys))}")
    columns: dict[str, Array] = extra(picked_names) if extra else {}
    groups_of = np.ravel_multi_index(tuple(np.array(p, np.int64) for p in places), shape)
    if "bin" in result.dims:
        return _histogram(result, rows[picked], groups_of, coords, outside)
    statistics = result["statistic"].to_numpy().tolist()
    columns |= dict(zip(statistics, rows[picked].T, strict=True))
    groups = Groups(columns, groups_of)
    with np.errstate(all="ignore"):
        merged, missing = merge(groups, statistics)
    whole = {"tensors", *(s.name for s in STATISTICS if s.whole)}
    variables: dict[str, Any] = {}
    for name, values in {"tensors": groups.tensors, **merged}.items():
        is_whole = name in whole and bool(np.isfinite(values).all())
        is_whole |= values.dtype.kind == "i"
        grid = np.zeros(prod(shape), np.int64) if is_whole else np.full(prod(shape), np.nan)
        grid[groups.present] = values
        variables[name] = (tuple(keys), grid.reshape(shape))
    return _dataset(variables, coords, outside, missing, result)


def _untied(names: Sequence[str], origin: Origin | None) -> Array:
    """Return which tensors count: all but copies of tensors that are there, too."""
    shared = origin.shared if origin else {}
    present = set(names)
    return np.array([shared.get(name, "") not in present for name in names], np.bool_)


def _histogram(
    result: xr.Dataset,
    rows: Array,
    numbers: Array,
    coords: Mapping[str, Sequence[Any]],
    outside: Sequence[str],
) -> xr.Dataset:
    """Return the sums of the counts of each bin."""
    shape = tuple(map(len, coords.values()))
    counts = np.zeros((prod(shape), rows.shape[1]), rows.dtype)
    np.add.at(counts, numbers, rows)
    variables = {"count": ((*coords, "bin"), counts.reshape(*shape, -1))}
    grouped = _dataset(variables, coords, outside, {}, result)
    return grouped.assign_coords(
        {name: coord for name, coord in result.coords.items() if coord.dims == ("bin",)}
    )


def _dataset(
    variables: Mapping[Any, Any],
    coords: Mapping[str, Sequence[Any]],
    outside: Sequence[str],
    missing: Mapping[str, str],
    result: xr.Dataset,
) -> xr.Dataset:
    import xarray as xr

    attrs: dict[Hashable, Any] = {
        name: result.attrs[name] for name in ("source", "compared_with") if name in result.attrs
    }
    if "origin" not in result.encoding:
        attrs["note"] = _SAVED
    if outside:
        attrs["outside"] = some(list(outside))
    if missing:
        reasons: dict[str, list[str]] = {}
        for name, reason in missing.items():
            reasons.setdefault(reason, []).append(name)
        attrs["missing"] = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return xr.Dataset(variables, {key: np.array(labels) for key, labels in coords.items()}, attrs)
