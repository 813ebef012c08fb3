"""Private parts of dask: arrays without their constructor, graphs made later, tasks as objects."""

from __future__ import annotations

from operator import getitem
from typing import TYPE_CHECKING, Any, ClassVar

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from xckpt.upstream import IS_PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

try:
    from dask._task_spec import DataNode, Task
    from dask.array.core import getter
except ImportError:  # then tasks are tuples
    DataNode = Task = getter = None  # type: ignore[assignment,misc]


def _make_directly(graph: Any, name: str, chunks: Any, meta: Any, shape: tuple[int, ...]) -> Any:
    """Return an array, of chunks and meta that are right by construction."""
    # A subclass with another constructor does not help: xarray refuses to mix it with other
    # dask arrays (namedarray.parallelcompat).
    array = object.__new__(da.Array)
    array.dask = graph
    array._name = name
    array._chunks = chunks
    array._meta = meta
    # Cached properties of Array, which xarray asks for a dozen times while it builds a Dataset.
    array.__dict__["shape"] = shape
    array.__dict__["ndim"] = len(shape)
    return array


def _is_known_dask() -> bool:
    """Return whether an array that is made directly is the one that dask makes."""
    if Task is None or getter is None:
        return False
    meta = np.empty((0,), "f4")
    graph = HighLevelGraph({"a": MaterializedLayer({("a", 0): meta})}, {"a": set()})
    try:
        ours = _make_directly(graph, "a", ((2,),), meta, (2,))
        theirs = da.Array(graph, "a", ((2,),), meta=meta)
        return (
            set(vars(graph)) == {"layers", "dependencies", "key_dependencies"}
            and (ours.chunks, ours.dtype, ours.name) == (theirs.chunks, theirs.dtype, theirs.name)
            and ours.__dask_keys__() == theirs.__dask_keys__()
            and set(vars(theirs)) <= set(vars(ours))
        )
    except (AttributeError, TypeError):
        return False


IS_FAST = not IS_PLAIN and _is_known_dask()


def make_array(graph: Any, name: str, chunks: Any, meta: Any, shape: tuple[int, ...]) -> da.Array:
    """Return a dask array of a graph."""
    if IS_FAST:
        array: da.Array = _make_directly(graph, name, chunks, meta, shape)
        return array
    return da.Array(graph, name, chunks, meta=meta)


class LateGraph(HighLevelGraph):
    """A graph of one layer, made at first access, which saves nine objects per tensor."""

    def __init__(self) -> None:
        if not IS_FAST:
            name, layer = self._only_layer()
            super().__init__({name: layer}, {name: set()})

    def __getattr__(self, attribute: str) -> Any:
        # Called for what is not there yet: the attributes that HighLevelGraph.__init__ sets.
        if attribute not in {"layers", "dependencies", "key_dependencies"}:
            raise AttributeError(attribute)
        name, layer = self._only_layer()
        super().__init__({name: layer}, {name: set()})
        return self.__dict__[attribute]

    def _only_layer(self) -> tuple[str, Layer]:
        raise NotImplementedError


class LightLayer(Layer):
    """A layer without annotations, whose tasks are not made to look for old ones."""

    if IS_FAST:
        # Layer.__init__ looks for annotations in the configuration each time.
        annotations = None
        collection_annotations = None
        # Layer looks for them by making all tasks.
        has_legacy_tasks: ClassVar[bool] = False

    def __init__(self) -> None:
        if not IS_FAST:
            super().__init__()


def read_task(key: tuple[Any, ...], array: Any, index: tuple[Any, ...]) -> Any:
    """Return the task that selects of an array."""
    if not IS_FAST:
        return (getitem, array, index)
    # A node, because dask asks what is indexed for its key. asarray and lock of the getter are
    # positional, or dask does not see that it is one, and does not join later slices with it.
    return Task(key, getter, DataNode(key[0], array), index, False, None)  # noqa: FBT003


def call_task(key: tuple[Any, ...], function: Any, array: Any, *arguments: Any) -> Any:
    """Return the task that calls a function of an array and of other data."""
    return Task(key, function, DataNode(key[0], array), *arguments)


def arguments_within(task: Any) -> Iterator[list[Any]]:
    """Return the arguments of each of the tasks that were joined in a task."""
    if Task is None or not isinstance(task, Task):
        return
    data = []
    for argument in task.args:
        inner = argument.values() if isinstance(argument, dict) else [argument]
        for part in inner:
            yield from arguments_within(part)
        data.append(argument.value if isinstance(argument, DataNode) else argument)
    yield data


def reorder(state: Mapping[str, Any], keys: list[Any]) -> None:
    """Do tasks that depend on nothing in this order."""
    if IS_FAST:
        state["ready"][:] = keys[::-1]  # the last one is done first
