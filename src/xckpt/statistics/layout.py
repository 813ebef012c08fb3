"""How results are laid out: the variables of an object, with a dimension for what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import xarray as xr

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from xckpt.statistics.entries import Contents, Entry

__all__ = ["deferred", "laid_out"]


def deferred(
    find_all: Callable[..., list[Any]],
    inputs: Any,
    options: Any,
    shapes: Sequence[tuple[int, ...]],
) -> list[Any]:
    """Return dask arrays that all come from one call."""
    import dask.array as da
    from dask._task_spec import DataNode, Task, TaskRef
    from dask.highlevelgraph import HighLevelGraph

    scan = f"xckpt-stats-{uuid4().hex}"
    # As data: dask would look for tasks in every argument, down to the last tensor.
    node = DataNode(f"{scan}-inputs", inputs)
    task = Task(scan, find_all, TaskRef(node.key), options)
    shared: dict[str, Any] = {scan: {scan: task, node.key: node}}
    arrays = []
    for number, shape in enumerate(shapes):
        name = f"{scan}-{number}"
        key = (name, *([0] * len(shape)))
        layer: dict[Any, Any] = {key: Task(key, _chosen, TaskRef(scan), number)}
        graph = HighLevelGraph({**shared, name: layer}, {name: {scan}, scan: set()})
        chunks = tuple((size,) for size in shape)
        arrays.append(da.Array(graph, name, chunks, dtype=np.float64))
    return arrays


def _chosen(found: list[Any], number: int) -> Any:
    return found[number]


def laid_out(
    statistics: Sequence[str],
    entries: Sequence[Entry],
    values: Sequence[Any],
    attrs: Sequence[Mapping[str, Any]],
    contents: Contents,
) -> xr.Dataset:
    """Make the Dataset of results."""
    sizes: dict[Hashable, int] = {}
    variables: dict[Hashable, Any] = {}
    for entry, data, told in zip(entries, values, attrs, strict=True):
        renamed = tuple(
            _fitting(dim, n, sizes) for dim, n in zip(entry.dims, entry.shape, strict=True)
        )
        known = entry.variable.encoding
        encoding = {key: known[key] for key in ("tensor", "part", "stack") if key in known}
        variables[entry.name] = xr.Variable(("statistic", *renamed), data, told or None, encoding)
    coords: dict[Hashable, Any] = {"statistic": ("statistic", np.array(statistics, dtype=str))}
    coords |= {
        name: coord
        for name, coord in contents.coords.items()
        if coord.dims and all(sizes.get(d) == n for d, n in coord.sizes.items())
    }
    return xr.Dataset(variables, coords, {"source": contents.source} if contents.source else None)


def _fitting(dim: Hashable, size: int, sizes: dict[Hashable, int]) -> Hashable:
    """Return a dimension a name under which it has this size everywhere: nodes of a tree differ."""
    name, number = dim, 0
    while sizes.setdefault(name, size) != size:
        number += 1
        name = f"{dim}_{number}"
    return name
