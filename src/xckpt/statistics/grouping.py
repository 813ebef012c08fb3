"""`by`: results of several tensors merged into results by layer, role, or numbered module.

The statistics of a group describe all its elements together. `definitions` states how statistics
merge, with the sums for that; `comparison.merging` states it for measures.
Quantiles follow from the counts of bit patterns that `stats` cached.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.streams import ChunkedStream, ElementStream
from xckpt.datasets.stack_records import stack_of
from xckpt.datasets.tensors import DescribedTensors, split_step
from xckpt.errors import shown, some
from xckpt.index import paused_collector
from xckpt.labels.filters import suggest_word
from xckpt.notebook.folding import ascending
from xckpt.scan.scanning import load_cached
from xckpt.statistics.counts import Sketch
from xckpt.statistics.definitions import STATISTICS, Groups
from xckpt.statistics.describe import Spectrum, ranks_of, replace_ends, spectrum
from xckpt.statistics.singular import MERGES as MERGES_OF_SPECTRA
from xckpt.statistics.singular import STATISTICS as OF_MATRICES
from xckpt.statistics.tables import named_tensors, tensor_rows
from xckpt.structure import Described, Role, Structure

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    import xarray as xr

    from xckpt.arrays.kinds import Kind
    from xckpt.typing import Array


# --- quantiles ------------------------------------------------------------------------------------


class CachedTensor(NamedTuple):
    """A tensor whose sketch may be in the cache: the attributes of its stream that name it."""

    kind: Kind
    size: int
    whole: bool
    identity: tuple[Any, ...]


def cached_tensors(streams: Iterable[ElementStream]) -> dict[str, CachedTensor]:
    """Return the tensors of real numbers that the cache can identify, by name."""
    return {
        r.name: CachedTensor(r.kind, r.size, r.whole or isinstance(r, ChunkedStream), r.identity)
        for r in streams
        if r.identity is not None and not r.complex
    }


def group_quantiles(tensors: Sequence[CachedTensor | None], numbers: Array, levels: Array) -> Array:
    """Return the quantiles of the elements of each group, NaN if counts of a tensor are missing."""
    # `numbers` has the group of each tensor. Rows are in ascending order of the groups. Elements of
    # more than 16 bits are rounded, as in `stats`.
    present, groups = np.unique(numbers, return_inverse=True)
    quantiles = np.full((len(present), len(levels)), np.nan)
    remaining = np.bincount(groups)
    # Group by group, because the counts of all tensors may not fit in memory.
    order = [n for n in np.argsort(groups, kind="stable").tolist() if tensors[n] is not None]
    sketches: dict[int, dict[str, Sketch]] = {}  # of incomplete groups, by kind

    def add(position: int, sketch: Sketch) -> None:
        group = int(groups[order[position]])
        for incomplete in [number for number in sketches if number != group]:
            del sketches[incomplete]
        total = sketches.setdefault(group, {}).setdefault(sketch.kind.name, sketch)
        if total is not sketch:
            total.merge_counts(sketch)
        remaining[group] -= 1
        if not remaining[group]:
            spectra = map(spectrum, sketches.pop(group).values())
            quantiles[group] = _quantiles([part for part in spectra if len(part.codes)], levels)

    load_cached([tensors[n] for n in order], Sketch, add)
    return quantiles


def _quantiles(spectra: list[Spectrum], levels: Array) -> Array:
    """Return the quantiles of several distributions together; NaN without elements."""
    if not spectra:
        return np.full(len(levels), np.nan)
    of_parts = [part.values() for part in spectra]
    values, counts = np.concatenate(of_parts), np.concatenate([part.counts for part in spectra])
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(counts[order])
    ranks = ranks_of(ends[-1:], levels)
    quantiles = values[order][ends.searchsorted(ranks, side="right")]
    # The extremes of rounded elements are known exactly; for other kinds they are infinite here.
    low = min(v.min() if np.isinf(p.low) else p.low for p, v in zip(spectra, of_parts, strict=True))
    high = max(
        v.max() if np.isinf(p.high) else p.high for p, v in zip(spectra, of_parts, strict=True)
    )
    table = replace_ends(quantiles, ranks, ends[-1:] - 1, np.array([low]), np.array([high]))
    row: Array = table[0]
    return row


# --- groups ---------------------------------------------------------------------------------------


_ROLES = [role.value for role in Role]
_NEVER = {
    "unique": "distinct values of several tensors do not follow from their numbers",
    "effective_rank": "it needs the singular values of all matrices",
    "alpha": "it needs the singular values of all matrices",
    "": "the statistic describes a single tensor",
}
_NO_COUNTS = (
    "quantiles follow from counts of the elements, which are in the cache for files that did not "
    "change since stats()"
)
_SOURCES = ("source", "compared_with")
_SAVED = "computed from a saved result: roles follow from names alone, and tied copies count"


class Merged(NamedTuple):
    """Numbers of groups by name, and the reasons why others are missing."""

    columns: dict[str, Array]
    missing: dict[str, str]


# --- merging -------------------------------------------------------------------------------------


def merge_statistics(
    groups: Groups, names: Sequence[str], quantiles: Callable[[Array], Array] | None = None
) -> Merged:
    """Merge the statistics of tensors that have these names, as their definitions state."""
    # `quantiles` returns the quantiles of all groups at levels, in a column for each level.
    merges = {statistic.name: statistic.merge for statistic in STATISTICS} | MERGES_OF_SPECTRA
    levels = [name for name in names if name.startswith("q") and name[1:2].isdigit()]
    columns: dict[str, Array] = {}
    missing = {}
    of_levels: dict[str, Array] = {}
    if levels and quantiles is not None:
        table = quantiles(np.array([float(name[1:]) for name in levels]))
        of_levels = dict(zip(levels, table.T, strict=True))
    for name in names:
        merge = merges.get(name)
        try:
            if name in of_levels:
                if np.isnan(of_levels[name][groups.all_finite > 0]).any():
                    missing[name] = _NO_COUNTS
                columns[name] = of_levels[name]
            elif merge is not None:
                columns[name] = merge(groups)
            else:
                missing[name] = _NO_COUNTS if name in levels else _NEVER.get(name, _NEVER[""])
        except KeyError as error:
            missing[name] = f"it needs the statistic {error.args[0]}"
    is_absent = {name: np.isnan(columns[name]).all() for name in missing if name in columns}
    columns = {name: column for name, column in columns.items() if not is_absent.get(name, False)}
    return Merged(columns, missing)


# --- keys ----------------------------------------------------------------------------------------


def list_keys(keys: Iterable[str | Iterable[str]]) -> list[str]:
    """Return the keys of groups, which may be texts separated by commas, or lists."""
    texts = (text for key in keys for text in ([key] if isinstance(key, str) else key))
    return [key.strip() for text in texts for key in text.split(",")]


def structure_of_names(names: Iterable[str], origin: DescribedTensors | None) -> Structure:
    """Return the structure of the tensors that a result describes."""
    known = origin.structure if origin is not None else Structure(())
    described = {name: known.described(name) for name in known}
    unknown = [name for name in names if name not in described]
    if not unknown:
        return known
    # Parts of a tensor have names like name:part. A matrix of floats stands for a tensor if only
    # its name is known.
    for name in unknown:
        owner = described.get(name.rpartition(":")[0], Described(name, "float32", (2, 2)))
        described[name] = owner._replace(name=name)
    return Structure(described.values(), known.facts)


def _labels(key: str, names: Sequence[str], structure: Structure) -> list[Any]:
    """Return the label of each tensor; None for an unlabelled tensor."""
    if key == "layer":
        labels = _layer_labels(names, structure)
    elif key in _KEYS:
        labels = [_KEYS[key](structure, name) or None for name in names]
    else:
        labels = []
        for parts in map(structure.parse, names):  # `expert`, `experts`, `local_experts`, ...
            numbers = [
                int(index)
                for module, index in zip(parts.modules, parts.indices, strict=True)
                if module in {key, f"{key}s"} or module.endswith((f"_{key}", f"_{key}s"))
            ]
            labels.append(numbers[0] if numbers else None)
    if all(label is None for label in labels):
        raise ValueError(_no_labels(key, names, structure))
    return labels


def _layer_labels(names: Sequence[str], structure: Structure) -> list[Any]:
    """Return the number of the layer of each tensor, or its path if there are several stacks."""
    paths = [structure.layer(name) for name in names]
    if structure.has_layers:
        return [path or None for path in paths]
    numbers = [parts.indices[:1] for parts in map(structure.parse, names)]
    stacks = {
        path.removesuffix(*number) for path, number in zip(paths, numbers, strict=True) if path
    }
    if len(stacks) > 1:  # for example an encoder and a decoder
        return [path or None for path in paths]
    return [int(*number) if number else None for number in numbers]


def _no_labels(key: str, names: Sequence[str], structure: Structure) -> str:
    """Explain why no tensor has a key."""
    modules = Counter(module for name in names for module in structure.parse(name).modules)
    modules.pop("layers", None)  # its key is "layer"
    keys = [*([] if key == "layer" else ["layer"]), *_KEYS, *modules]
    listed = f"keys are {', '.join(map(shown, keys))}"
    if key == "layer":
        return f"this model has no repeated layers; {listed}"
    if key == "component":
        return f"this model has a single component; {listed}"
    hint = suggest_word(key, {}, keys)
    listed = f"did you mean {hint!r}?" if hint else listed
    return f"no tensor has a number for {key!r} in its name; {listed}"


_KEYS: Mapping[str, Callable[[Structure, str], str]] = {
    "role": lambda structure, name: structure.roles[name].value,
    "module": Structure.bare_module,
    "kind": Structure.module_type,
    "component": Structure.component,
    "dtype": lambda structure, name: structure.described(name).dtype,
}


def _sorted(key: str, labels: Iterable[Any]) -> list[Any]:
    """Sort the labels of a key: numbers by size, roles as documented, names by their numbers."""
    distinct = list(dict.fromkeys(labels))
    if key == "role":
        return sorted(distinct, key=_ROLES.index)
    if all(isinstance(label, int) for label in distinct):
        return sorted(distinct)
    return [distinct[position] for position in ascending(distinct)]


# --- results -------------------------------------------------------------------------------------


def merged_by(
    result: xr.Dataset,
    keys: Sequence[str | Iterable[str]],
    merge: Callable[..., Merged] | None = None,
    extra: Callable[[Sequence[str]], dict[str, Array]] | None = None,
) -> xr.Dataset:
    """Return the statistics of all elements of each group; see `xckpt.comparison.by`."""
    # `merge` merges the columns of several tensors, by default as the statistics state; `extra`
    # returns columns besides the statistics, for the names of the tensors.
    for variable, _ in named_tensors(result):
        record = stack_of(variable)
        if set(variable.dims[1:]) - set(record.dims if record else ()):
            raise ValueError("by() merges statistics of whole tensors, computed without dim=")
    with paused_collector():
        names, rows = tensor_rows(result)
    origin = result.encoding.get("origin")
    if "bin" in result.dims:
        return _histogram(result, rows, place_tensors(names, keys, origin))
    has_values: Array | None = None
    statistics = result["statistic"].to_numpy().tolist()
    if set(OF_MATRICES) & set(statistics):  # without those that are not decomposed
        has_values = np.logical_not(np.isnan(rows).all(axis=1))
    elif "count" in statistics:  # without members of stacks that were not selected
        has_values = np.logical_not(np.isnan(rows[:, statistics.index("count")]))
    places = place_tensors(names, keys, origin, has_values)
    columns: dict[str, Array] = extra(places.names) if extra else {}
    columns |= dict(zip(statistics, rows[places.rows].T, strict=True))
    counts = result.encoding.get("counts")
    if merge is None:
        of_tensors = [counts.get(name) for name in places.names] if counts else []
        quantiles = partial(group_quantiles, of_tensors, places.groups) if counts else None
        merge = partial(merge_statistics, quantiles=quantiles)
    grouped = merge_columns(places, columns, partial(merge, names=statistics))
    return _with_origin(grouped, result)


class Places(NamedTuple):
    """Tensors in the groups that their keys make."""

    #: The tensors that have all keys, and their rows among all tensors.
    names: list[str]
    rows: list[int]
    #: Number of the group of each of them, on a grid along the labels of the keys.
    groups: Array
    labels: dict[str, list[Any]]
    #: Tensors that belong to no group, and the keys that some of them lack.
    outside: list[str]
    lacking: list[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the grid."""
        return tuple(map(len, self.labels.values()))

    def dataset(self, variables: Mapping[Any, Any], missing: Mapping[str, str]) -> xr.Dataset:
        """Return variables on the grid as a Dataset, with the reasons for missing ones."""
        import xarray as xr

        attrs: dict[Hashable, Any] = {}
        if self.outside:
            attrs = {"outside": some(self.outside), "lacking": self.lacking}
        if missing:
            reasons: dict[str, list[str]] = {}
            for name, reason in missing.items():
                reasons.setdefault(reason, []).append(name)
            attrs["missing"] = [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
        coords = {key: np.array(labels) for key, labels in self.labels.items()}
        grouped = xr.Dataset(variables, coords, attrs)
        grouped.encoding["grouped"] = True  # for its short text
        return grouped


def place_tensors(
    names: Sequence[str],
    keys: Sequence[str | Iterable[str]],
    origin: DescribedTensors | None,
    has_values: Array | None = None,
) -> Places:
    """Return the groups of tensors, without tied copies and tensors without values."""
    keys = list_keys(keys)
    if not keys or len(set(keys)) < len(keys):
        raise ValueError("by() takes different keys: 'layer', 'role', 'module', 'expert', ...")
    run = origin.run if origin else None
    with paused_collector():
        steps, plain = zip(*(split_step(name, run) for name in names), strict=True)
        structure = structure_of_names(plain, origin.of_one_step if origin else None)
        of_run = [int(step) if step else None for step in steps]
        labels = {k: of_run if k == run else _labels(k, plain, structure) for k in keys}
        has_label = np.array([None not in place for place in zip(*labels.values(), strict=True)])
        if has_values is not None:
            has_label &= has_values
        outside = [n for n, has in zip(names, has_label.tolist(), strict=True) if not has]
        shared, present = origin.shared if origin else {}, set(names)
        is_copy = [shared.get(name) in present for name in names]
        picked = np.flatnonzero(has_label & ~np.array(is_copy, np.bool_)).tolist()
        if not picked:
            raise ValueError(f"no tensor has all keys {', '.join(map(repr, keys))}")
        coords = {key: _sorted(key, (labels[key][n] for n in picked)) for key in keys}
        places = []
        for key, coord in coords.items():
            positions = {label: position for position, label in enumerate(coord)}
            places.append(np.array([positions[labels[key][n]] for n in picked], np.int64))
        groups = np.ravel_multi_index(tuple(places), tuple(map(len, coords.values())))
        lacking = [key for key, values in labels.items() if None in values]
        return Places([names[n] for n in picked], picked, groups, coords, outside, lacking)


def merge_columns(
    places: Places, columns: Mapping[str, Array], merge: Callable[[Groups], Merged]
) -> xr.Dataset:
    """Return the merged columns of each group, and its number of tensors."""
    groups = Groups(columns, places.groups)
    with np.errstate(all="ignore"):
        merged, missing = merge(groups)
    whole = {"tensors", *(s.name for s in STATISTICS if s.whole)}
    size = prod(places.shape)
    variables: dict[str, Any] = {}
    for name, values in {"tensors": groups.tensors, **merged}.items():
        is_whole = name in whole and bool(np.isfinite(values).all())
        is_whole |= values.dtype.kind == "i"
        grid = np.zeros(size, np.int64) if is_whole else np.full(size, np.nan)
        grid[groups.present] = values
        variables[name] = (tuple(places.labels), grid.reshape(places.shape))
    return places.dataset(variables, missing)


def _with_origin(grouped: xr.Dataset, result: xr.Dataset) -> xr.Dataset:
    """Add the attributes of the result that was merged."""
    attrs = {name: result.attrs[name] for name in _SOURCES if name in result.attrs}
    note = {} if "origin" in result.encoding else {"note": _SAVED}
    grouped.attrs = {**attrs, **note, **grouped.attrs}
    return grouped


def _histogram(result: xr.Dataset, rows: Array, places: Places) -> xr.Dataset:
    """Return the sums of the counts of each bin."""
    counts = np.zeros((prod(places.shape), rows.shape[1]), rows.dtype)
    np.add.at(counts, places.groups, rows[places.rows])
    variables = {"count": ((*places.labels, "bin"), counts.reshape(*places.shape, -1))}
    grouped = _with_origin(places.dataset(variables, {}), result)
    return grouped.assign_coords(
        {name: coord for name, coord in result.coords.items() if coord.dims == ("bin",)}
    )
