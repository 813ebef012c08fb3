"""`by`: results of several tensors merged into results by layer, role, or numbered module.

The statistics of a group are those of all its elements together. `group_sums` has the sums from
which they follow; `definitions` states how statistics merge, `comparison.merging` how measures do.
"""

from __future__ import annotations

from collections import Counter
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
from xckpt.statistics.group_sums import Groups
from xckpt.statistics.tables import named_tensors, tensor_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    import xarray as xr

    from xckpt.datasets.tensors import DescribedTensors

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


def _labels(key: str, names: Sequence[str], origin: DescribedTensors | None) -> list[Any]:
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


def _role_labels(names: Sequence[str], origin: DescribedTensors | None) -> list[str]:
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
    origin: DescribedTensors | None = result.encoding.get("origin")
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


def _untied(names: Sequence[str], origin: DescribedTensors | None) -> Array:
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
