"""Arrays that are computed from lazy arrays: their sources, their selections, and other results.

The graph of an array shows its tensors, the positions that it selects from them, and whether they
were combined. The same computation can begin with other arrays.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from itertools import chain, islice
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import numpy as np
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from xckpt.arrays.graph import TensorLayer, is_stored, lazy_of, slices_of, tensor_array
from xckpt.arrays.lazy import LazyArray
from xckpt.upstream.dask_arrays import is_dask_array

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    import dask.array as da

    from xckpt.arrays.lazy import Opened

# Annotation of the layers of a graph.
_SELECTIONS = "xckpt_selections"
# Layers that xarray makes before an operation: other axes, and the same values.
_SHAPING = ("getitem-", "transpose-", "rechunk-")
# Size of the chunks of layers that nothing reads.
_UNREAD_NBYTES = 1 << 20


def lazies_in(array: Any) -> dict[str, LazyArray]:
    """Return the lazy arrays that an array is or is computed from, by the names of their layers."""
    lazy = lazy_of(array)
    if lazy is not None:
        return {array.name: lazy}
    layers = array.dask.layers if is_dask_array(array) else {}
    return {n: layer.lazy for n, layer in layers.items() if isinstance(layer, TensorLayer)}


def lazies_of_payload(array: Any) -> list[LazyArray]:
    """Return the lazy arrays that the data of a new tensor are, or are computed from."""
    return [array] if isinstance(array, LazyArray) else [*lazies_in(array).values()]


def is_computed(array: Any) -> bool:
    """Return whether an array is computed from lazy arrays, and is none itself."""
    return lazy_of(array) is None and bool(lazies_in(array))


def is_combined(array: Any) -> bool:
    """Return whether a step of an array's graph has several arrays, stored or computed."""
    is_graph = is_dask_array(array) and lazy_of(array) is None
    dependencies = array.dask.dependencies if is_graph else {}
    return any(len(before) > 1 for before in dependencies.values())


def _opened_in(array: Any) -> list[Opened]:
    origins = [o for lazy in lazies_in(array).values() for o in islice(lazy.tensor_origins, 1)]
    return [origin.opened for origin in origins if origin.opened is not None]


def checkpoints_in(array: Any) -> list[str]:
    """Return the checkpoints that an array is or is computed from, while it is lazy."""
    return [opened.source for opened in _opened_in(array)]


def stacks_in(array: Any) -> list[Mapping[str, Any]]:
    """Return the records of the stacks of these checkpoints."""
    return [opened.stacks for opened in _opened_in(array)]


# --- selections -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # dask compares annotations
class Selection:
    """Positions along a dimension, of a layer that selects them."""

    dim: str
    size: int  # before
    positions: Any
    is_aligned: bool  # with another object, and not by the user

    @property
    def left_out(self) -> list[int]:
        """The other positions."""
        is_left_out = np.ones(self.size, bool)
        is_left_out[self.positions] = False
        return np.flatnonzero(is_left_out).tolist()


@contextmanager
def noting(selections: list[Selection]) -> Iterator[None]:
    """Note selections in the layers that are made meanwhile."""
    with dask.annotate(**{_SELECTIONS: selections}) if selections else nullcontext():
        yield


def selections_in(array: Any) -> dict[str, list[Selection]]:
    """Return the noted selections in the graph of an array, by layer."""
    layers = array.dask.layers if is_dask_array(array) and lazy_of(array) is None else {}
    notes = {name: getattr(layer, "annotations", None) or {} for name, layer in layers.items()}
    return {name: note[_SELECTIONS] for name, note in notes.items() if _SELECTIONS in note}


class Selected(NamedTuple):
    """A stored array, and the positions along its dimensions that another array has of it."""

    array: da.Array
    positions: dict[str, Any]


def selected_in(array: Any) -> Selected | None:
    """Return what an array selects by positions from a stored array; None for other arrays."""
    selections, name = selections_in(array), getattr(array, "name", "")
    positions: dict[str, Any] = {}
    noted: list[Selection] = []
    while name in selections:
        if selections[name] != noted:  # one selection may make several layers
            noted = selections[name]
            for chosen in noted:
                after = positions.get(chosen.dim, slice(None))
                positions[chosen.dim] = np.asarray(chosen.positions)[after]
        name, *operands = array.dask.dependencies[name]
        if operands:
            return None
    layer = array.dask.layers[name] if positions else None
    if not isinstance(layer, TensorLayer):
        return None
    meta = layer.lazy.empty((0,) * layer.lazy.ndim)
    return Selected(tensor_array(layer.lazy, name, layer.chunks, meta), positions)


def _alignments(array: Any) -> Iterator[tuple[Selection, AbstractSet[str]]]:
    """Yield the alignments that left out positions, and the layers before and with each."""
    for name, selections in selections_in(array).items():
        for selection in selections:
            if selection.is_aligned and selection.left_out:
                yield selection, array.dask.cull_layers([name]).layers.keys()


def left_out_of(array: Any) -> list[Selection]:
    """Return the alignments that left out parts of all lazy arrays that an array is made of."""
    lazies = lazies_in(array).keys()
    return [
        selection
        for selection, layers in _alignments(array)
        # `xr.align` itself makes the last layer.
        if array.name not in layers and lazies <= layers
    ]


def repeats_left_out_of(array: Any) -> Iterator[tuple[LazyArray, Selection, list[int]]]:
    """Yield lazy arrays with selections that repeat parts of them, and the parts left out since.

    Alignment left out these parts, which are numbers of positions of the selection.
    """
    selections, lazies = selections_in(array), lazies_in(array)
    for alignment, layers in _alignments(array):
        aligned = [lazy for name, lazy in lazies.items() if name in layers]
        for chosen in chain.from_iterable(selections[n] for n in layers & selections.keys()):
            if chosen is alignment:
                continue
            positions = np.asarray(chosen.positions)
            is_same = chosen.dim == alignment.dim and positions.size == alignment.size
            is_repeated = is_same and len({*positions.tolist()}) < positions.size
            if is_repeated and len(aligned) == 1:
                yield aligned[0], chosen, alignment.left_out


# --- axes -----------------------------------------------------------------------------------------


def is_broadcast(array: Any, sources: Collection[str]) -> bool:
    """Return whether an operation gave axes to all that is computed from layers of lazy arrays."""
    layers = array.dask.layers if is_computed(array) else {}
    axes: dict[str, int] = {}  # number of them, before a layer adds some for broadcasting
    for name in TopologicalSorter(array.dask.dependencies if layers else {}).static_order():
        layer = layers[name]
        before = [axes[n] for n in array.dask.dependencies[name] if n in axes]
        ndim = _ndim(name, layer) if before or name in sources else None
        if ndim is None:
            continue
        if name.startswith(_SHAPING):
            ndim = min(ndim, *before)
        elif before and isinstance(layer, Blockwise) and not layer.new_axes and ndim > max(before):
            return True
        axes[name] = ndim
    return False


def _ndim(name: str, layer: Layer) -> int | None:
    """Return the number of axes of the array of a layer; None if its keys do not show it."""
    if isinstance(layer, Blockwise):
        return len(layer.output_indices)
    keys = (key for key in layer.get_output_keys() if isinstance(key, tuple) and key[0] == name)
    key = next(keys, None)
    return None if key is None else len(key) - 1


# --- the same computation of other arrays ---------------------------------------------------------


def reopened(array: da.Array, separate: Callable[[Opened], Opened]) -> da.Array:
    """Return an array that knows other tensors as those that were opened with its own."""
    before = lazies_in(array)
    lazies = {name: lazy.reopened(separate) for name, lazy in before.items()}
    if all(lazies[name] is before[name] for name in before):
        return array
    if is_stored(array):
        return tensor_array(lazies[array.name], array.name, array.chunks, array._meta)  # noqa: SLF001
    return _with_layers(
        array,
        {n: TensorLayer(lazy, n, array.dask.layers[n].chunks) for n, lazy in lazies.items()},
    )


def with_sources(array: Any, operands: Iterable[Any]) -> Any:
    """Return a result that knows of each operand whether its tensors were stacked."""
    before = lazies_in(array)
    # Stacked or not, arrays of one file have the same names, and the graph keeps one of them.
    hidden = {
        f"{name}-other": lazy
        for operand in operands
        for name, lazy in lazies_in(operand).items()
        if name in before
        and lazy is not before[name]
        and _has_stacks(lazy) != _has_stacks(before[name])
    }
    if not hidden:
        return array
    # Nothing reads these layers.
    return _with_layers(
        array,
        {
            name: TensorLayer(lazy, name, lazy.chunks(_UNREAD_NBYTES))
            for name, lazy in hidden.items()
        },
    )


def _has_stacks(lazy: LazyArray) -> bool:
    return any(o.opened and o.opened.stacks for o in islice(lazy.tensor_origins, 1))


def with_blocks(array: da.Array, change: Callable[[Any], Any]) -> da.Array:
    """Return the array that is computed from changed blocks of the lazy arrays."""
    layers: dict[str, Layer] = {}
    dependencies: dict[str, AbstractSet[str]] = {}
    for name, layer in array.dask.layers.items():
        if isinstance(layer, TensorLayer):
            read = f"{name}-unchanged"
            layers[read] = TensorLayer(layer.lazy, read, layer.chunks)
            positions = [key[1:] for key in layer.get_output_keys()]
            tasks = {(name, *position): (change, (read, *position)) for position in positions}
            layers[name] = MaterializedLayer(tasks)
            dependencies[name] = {read}
    return _with_layers(array, layers, dependencies)


def with_values(array: da.Array, values: Callable[[str, LazyArray, Any], Any]) -> da.Array:
    """Return the array that is computed from other blocks of the lazy arrays; none is read."""
    layers: dict[str, Layer] = {}
    for name, layer in array.dask.layers.items():
        if isinstance(layer, TensorLayer):
            slices = slices_of(layer.chunks)
            tasks = {
                key: (partial(values, name, layer.lazy, tuple(map(getitem, slices, key[1:]))),)
                for key in layer.get_output_keys()
            }
            layers[name] = MaterializedLayer(tasks)
    return _with_layers(array, layers)


def _with_layers(
    array: da.Array,
    layers: Mapping[str, Layer],
    dependencies: Mapping[str, AbstractSet[str]] | None = None,
) -> da.Array:
    """Return an array whose graph has other or more layers; new ones depend on none by default."""
    import dask.array as da

    before = {**dict.fromkeys(layers, frozenset[str]()), **array.dask.dependencies}
    graph = HighLevelGraph({**array.dask.layers, **layers}, before | dict(dependencies or {}))
    return da.Array(graph, array.name, array.chunks, meta=array._meta)  # noqa: SLF001
