"""Private parts of dask: arrays without their constructor, graphs made later, tasks as objects."""

from __future__ import annotations

import sys
from functools import cache
from operator import getitem
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import numpy as np
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from xckpt.upstream import IS_PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    import dask.array as da

# `dask.array` takes half a second to load, which only dask arrays need.
try:
    from dask._task_spec import DataNode, Task
except ImportError:  # then tasks are tuples
    DataNode = Task = None  # type: ignore[assignment,misc]

HAS_TASKS = not IS_PLAIN and Task is not None


def is_dask_array(array: Any) -> TypeGuard[da.Array]:
    """Return whether an object is a dask array."""
    core = sys.modules.get("dask.array.core")  # without the module, there are no dask arrays
    return core is not None and isinstance(array, getattr(core, "Array", ()))


def _make_directly(graph: Any, name: str, chunks: Any, meta: Any, shape: tuple[int, ...]) -> Any:
    """Return an array, of chunks and meta that are right by construction."""
    # A subclass with another constructor does not help: xarray refuses to mix it with other
    # dask arrays (namedarray.parallelcompat).
    import dask.array as da

    array = object.__new__(da.Array)
    array.dask = graph
    array._name = name
    array._chunks = chunks
    array._meta = meta
    # Cached properties of Array, which xarray asks for a dozen times while it builds a Dataset.
    array.__dict__["shape"] = shape
    array.__dict__["ndim"] = len(shape)
    return array


@cache
def is_fast() -> bool:
    """Return whether arrays can be made directly: dask makes the same ones."""
    if not HAS_TASKS:
        return False
    import dask.array as da

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


def make_array(graph: Any, name: str, chunks: Any, meta: Any, shape: tuple[int, ...]) -> da.Array:
    """Return a dask array of a graph."""
    if is_fast():
        array: da.Array = _make_directly(graph, name, chunks, meta, shape)
        return array
    import dask.array as da

    return da.Array(graph, name, chunks, meta=meta)


class LateGraph(HighLevelGraph):
    """A graph of one layer, made at first access, which saves nine objects per tensor."""

    def __init__(self) -> None:
        if not is_fast():
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

    if HAS_TASKS:
        # Layer.__init__ looks for annotations in the configuration each time.
        annotations = None
        collection_annotations = None
        # Layer looks for them by making all tasks.
        has_legacy_tasks: ClassVar[bool] = False

    def __init__(self) -> None:
        if not HAS_TASKS:
            super().__init__()


def read_task(key: tuple[Any, ...], array: Any, index: tuple[Any, ...]) -> Any:
    """Return the task that selects of an array."""
    if not HAS_TASKS:
        return (getitem, array, index)
    from dask.array.core import getter

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
