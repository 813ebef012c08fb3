"""Lazy arrays as dask arrays: one task per chunk, made on demand.

dask's local schedulers know all tasks and their order before the first one runs, so remote files
are read ahead of the tasks. A worker of a cluster gets one task at a time, and reads ahead within a
chunk.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import accumulate, chain, pairwise, product, starmap
from math import prod
from typing import TYPE_CHECKING, Any, cast

import dask
import numpy as np
from dask.callbacks import Callback
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from xckpt.arrays.keys import AxisKey, Chunks, cut_chunks
from xckpt.arrays.lazy import LazyArray, SlicedArray
from xckpt.errors import locating
from xckpt.storage import reading_ahead
from xckpt.storage.limits import UNCHECKED_NBYTES, require_memory
from xckpt.upstream.dask_arrays import (
    LateGraph,
    LightLayer,
    arguments_within,
    call_task,
    is_dask_array,
    is_fast,
    make_array,
    read_task,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    import dask.array as da

    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

# Largest array, in bytes, for which dask takes longer than the read.
_SMALL = 1 << 20


def tensor_array(lazy: LazyArray, name: str, chunks: Chunks, meta: Any) -> da.Array:
    """Make a dask array over a lazy array."""
    array: Any = make_array(TensorGraph(lazy, name, chunks), name, chunks, meta, lazy.shape)
    # Set on the instance, because arrays that are derived from it must not have them.
    array.__dask_postcompute__ = partial(_postcompute, lazy, chunks)
    if is_fast():
        array.__dask_optimize__ = _optimize_stored
    return cast("da.Array", array)


def is_stored(array: Any) -> bool:
    """Return whether an object is an unchanged array of `tensor_array`."""
    return lazy_of(array) is not None


def lazy_of(array: Any) -> LazyArray | None:
    """Return the lazy array of an unchanged array of `tensor_array`; None for other arrays."""
    graph = array.dask if is_dask_array(array) else None
    return graph.lazy if isinstance(graph, TensorGraph) and graph.name == array.name else None


def slice_stored(array: da.Array, key: tuple[AxisKey, ...]) -> da.Array:
    """Return a selection of a stored array as a stored array."""
    graph = array.dask
    lazy = graph.lazy.sliced(key)
    if lazy is graph.lazy:
        return array
    identity = repr((graph.name, key)).encode("utf-8", "surrogatepass")
    name = f"{lazy.name}-{blake2b(identity, digest_size=16).hexdigest()}"
    chunks = cut_chunks(array.chunks, key)
    return tensor_array(lazy, name, chunks, lazy.empty((0,) * lazy.ndim))


def read_small(array: Any) -> Array | None:
    """Return the values of a small stored array; None if dask has to compute it."""
    # dask takes a millisecond for a graph of one task, 20 times as long as reading a row.
    lazy = lazy_of(array)
    if lazy is None or lazy.nbytes > _SMALL or any(len(sizes) != 1 for sizes in array.chunks):
        return None
    is_dense = isinstance(array._meta, np.ndarray)  # noqa: SLF001
    has_scheduler = dask.config.get("scheduler", None) is not None or active_client() is not None
    if has_scheduler or not is_dense:
        return None
    values = np.asarray(lazy[...])
    # A view of a mapped file is read-only, and a slice may be a view of more than it shows.
    is_own = values.flags.writeable and not isinstance(lazy, SlicedArray)
    return values if is_own else values.copy()


def active_client() -> Any:
    """Return the client of the cluster that dask computes on, or None."""
    # The choices of `dask.base.get_scheduler`, which imports distributed.
    scheduler = dask.config.get("scheduler", None)
    scheduler = getattr(scheduler, "__self__", scheduler)  # client.get
    if "Client" in type(scheduler).__name__:
        return scheduler
    is_default = scheduler is None or str(scheduler).lower() in {"distributed", "dask.distributed"}
    if not is_default:
        return None
    # While another thread imports the package, the client does not exist yet.
    default_client = getattr(sys.modules.get("distributed"), "default_client", None)
    with suppress(ValueError):
        return None if default_client is None else default_client()
    return None


# --- graphs ---------------------------------------------------------------------------------------


class TensorGraph(LateGraph):
    """The graph of an array; its layer is made at first access."""

    def __init__(self, lazy: LazyArray, name: str, chunks: Chunks) -> None:
        self.lazy = lazy  # the array in the file
        self.name = name  # of the dask array
        self.chunks = chunks
        super().__init__()

    def _only_layer(self) -> tuple[str, TensorLayer]:
        return self.name, TensorLayer(self.lazy, self.name, self.chunks)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorGraph, (self.lazy, self.name, self.chunks)

    def copy(self) -> HighLevelGraph:
        """Return the graph for computing the whole array."""
        name, layer = self._only_layer()
        if is_fast() and len(layer) > 1 and _is_dense(self.lazy):
            layer.result = _Result(self.lazy)
        return HighLevelGraph({name: layer}, {name: set()})


class TensorLayer(LightLayer):
    """The tasks of an array: getters of chunks."""

    def __init__(self, lazy: LazyArray, name: str, chunks: Chunks) -> None:
        super().__init__()
        self.lazy = lazy
        self.name = name
        self.chunks = chunks
        # Memory for all chunks if the whole array is computed; None in other processes.
        self.result: _Result | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorLayer, (self.lazy, self.name, self.chunks)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, tuple) or len(key) != len(self.chunks) + 1 or key[0] != self.name:
            raise KeyError(key)
        try:
            along = zip(slices_of(self.chunks), key[1:], strict=True)
            index = tuple(slices[position] for slices, position in along)
        except (IndexError, TypeError):
            raise KeyError(key) from None
        if self.lazy.source.is_far:
            # For each computation, because dask unregisters callbacks when the first of two
            # computations at the same time ends (`dask.callbacks.local_callbacks`).
            _reading_ahead.register()
        if self.result is not None:
            return call_task(key, _read_into, self.lazy, self.result, key, index)
        # Tasks for workers should be small, and a stack of 15,000 tensors is megabytes. In this
        # form dask fuses a later slice into the read (`dask.array.optimization._optimize_slices`),
        # so that a row of a tensor reads a row.
        return read_task(key, *self.lazy.narrowed(index))

    def __iter__(self) -> Iterator[Any]:
        yield from self.get_output_keys()

    def __len__(self) -> int:
        return prod(len(sizes) for sizes in self.chunks)

    def is_materialized(self) -> bool:
        """Return False: tasks are made on demand."""
        return False

    def get_output_keys(self) -> AbstractSet[Any]:
        """Return the keys of all chunks."""
        positions = product(*(range(len(sizes)) for sizes in self.chunks))
        return {(self.name, *position) for position in positions}

    def cull(
        self, keys: set[Any], all_hlg_keys: Collection[Any]
    ) -> tuple[Layer, Mapping[Any, set[Any]]]:
        """Make only the tasks of selected chunks."""
        # `keys` has the keys of all layers.
        candidates = keys if len(keys) < len(self) else self.get_output_keys()
        tasks = {key: self[key] for key in candidates if key in keys and key in self}
        return MaterializedLayer(tasks), {key: set() for key in tasks}


@lru_cache(maxsize=4096)
def slices_of(chunks: Chunks) -> tuple[tuple[slice, ...], ...]:
    """Return the slice of each chunk along each axis."""
    bounds = [pairwise(accumulate(sizes, initial=0)) for sizes in chunks]
    return tuple([tuple(starmap(slice, along)) for along in bounds])


def _dask_array() -> type[da.Array]:
    import dask.array as da

    return da.Array


class _OptimizeStored:
    """Optimization of a graph of stored arrays: one task for an array of one chunk."""

    # dask's own takes time quadratic in the number of arrays that are computed together, because it
    # passes the keys of all layers to each layer. Graphs with other layers are left to dask.
    def __call__(self, graph: HighLevelGraph, keys: Any, **options: Any) -> Any:
        requested = set(flatten([keys]))
        tasks: dict[Any, Any] = {}
        reads: dict[Any, TensorLayer] = {}
        is_ours = dask.config.get("optimization.fuse.active") is not False
        for layer in graph.layers.values():
            if isinstance(layer, TensorLayer):
                reads |= dict.fromkeys(layer.get_output_keys(), layer)
            elif isinstance(layer, MaterializedLayer) and layer.mapping.keys() <= requested:
                tasks |= layer.mapping
            else:
                is_ours = False
                break
        used = Counter(k for t in tasks.values() for k in getattr(t, "dependencies", [None]))
        if not is_ours or not used.keys() <= reads.keys():
            return _dask_array().__dask_optimize__(graph, keys, **options)
        for key, task in tasks.items():
            if len(task.dependencies) == 1:
                (read,) = task.dependencies
                if used[read] == 1 and read not in requested:
                    tasks[key] = task.substitute({read: reads.pop(read)[read]})
        needed = {key: layer for key, layer in reads.items() if key in used or key in requested}
        return tasks | {key: layer[key] for key, layer in needed.items()}

    # dask optimizes arrays together if their functions are equal. Stored and computed arrays of one
    # computation then share their reads.
    def __eq__(self, other: object) -> bool:
        return other is self or other is _dask_array().__dask_optimize__

    def __hash__(self) -> int:
        return hash(_dask_array().__dask_optimize__)

    def __reduce__(self) -> str:
        return "_optimize_stored"


_optimize_stored = _OptimizeStored()


# --- results --------------------------------------------------------------------------------------


class _Result:
    """Memory of a whole array, for its chunks: joining them later would take twice the memory."""

    def __init__(self, lazy: LazyArray) -> None:
        self._lazy = lazy
        self._lock = threading.Lock()
        self._whole: Any = None
        self._filled: set[Any] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # another process has none

    def place(self, key: Any, index: tuple[slice, ...]) -> Any:
        """Return the memory of a chunk; the caller fills it."""
        with self._lock:
            array = None if self._whole is None else self._whole()
            # A graph may be computed again, even at the same time: a chunk that has been read
            # before then begins new memory, and `_gathered` joins chunks of different memories.
            if array is None or key in self._filled:
                array = self._lazy.allocate()
                self._whole = weakref.ref(array)  # its chunks keep it alive
                self._filled.clear()
            self._filled.add(key)
        return array[index]


def _read_into(lazy: LazyArray, result: _Result | None, key: Any, index: tuple[slice, ...]) -> Any:
    """Read a chunk into its place."""
    if result is None:
        return lazy[index]
    block = result.place(key, index)
    lazy.read_into(block, index)
    return block


def _postcompute(lazy: LazyArray, chunks: Chunks) -> tuple[Any, tuple[Any, ...]]:
    """Return how to join chunks; raise before the first is computed if memory cannot hold all."""
    # On a cluster, chunks may stay on the workers.
    is_large = lazy.nbytes >= UNCHECKED_NBYTES and _is_dense(lazy)
    if is_large and active_client() is None:
        with locating(path=lazy.source.name, tensor=lazy.name):
            require_memory(lazy.nbytes, lazy.advice)
    # The chunks of a slice may be views of more than they show.
    if not is_fast() or isinstance(lazy, SlicedArray):
        return _finalized, ()
    return _gathered, (chunks,)


def _is_dense(lazy: LazyArray) -> bool:
    return isinstance(lazy.empty((0,) * lazy.ndim), np.ndarray)


def _gathered(results: Any, chunks: Chunks) -> Any:
    """Join computed chunks into one array, which no other result shares."""
    blocks = list(flatten(results, container=(list, tuple)))
    shape = tuple(map(sum, chunks))
    # An array that all chunks are views of belongs to this result; a memory map is read-only.
    memory = blocks[0] if len(blocks) == 1 else getattr(blocks[0], "base", None)
    if (
        isinstance(memory, np.ndarray)
        and memory.shape == shape
        and memory.flags.writeable
        and all(block is memory or block.base is memory for block in blocks)
    ):
        return memory
    return _finalized(results)


def _finalized(results: Any) -> Any:
    """Join computed chunks as dask does."""
    join, options = _dask_array().__dask_postcompute__(cast("da.Array", None))
    return join(results, *options)


# --- reading ahead --------------------------------------------------------------------------------


class _ReadingAhead(Callback):
    """Reads ahead while a graph is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._under_way: dict[int, ExitStack] = {}

    def _start_state(self, graph: Mapping[Any, Any], state: Mapping[str, Any]) -> None:
        ranges = {key: list(_ranges(graph[key])) for key in state["ready"]}
        if not any(state["dependents"].values()):
            # dask's order is random then. In the order of files, near ranges share requests.
            state["ready"].sort(key=lambda key: _first_place(ranges[key]), reverse=True)
        keys = state["ready"][::-1]  # dask runs the last one first
        stack = ExitStack()
        stack.enter_context(reading_ahead(chain.from_iterable(ranges[key] for key in keys)))
        self._under_way[id(state)] = stack

    def _finish(self, _: Mapping[Any, Any], state: Mapping[str, Any], is_failed: bool) -> None:  # noqa: FBT001  dask's
        stack = self._under_way.pop(id(state), None)
        if stack is not None:
            # Tasks that are still running after an error or Ctrl-C have to end.
            error = CancelledError() if is_failed else None
            with suppress(CancelledError):
                stack.__exit__(type(error) if error else None, error, None)


_reading_ahead = _ReadingAhead()


def _first_place(ranges: list[Range]) -> tuple[str, int]:
    """Return the name of the file and the offset of the first of some ranges."""
    return (ranges[0][0].name, ranges[0][1]) if ranges else ("", 0)


def _ranges(task: Any) -> Iterator[Range]:
    """Return the byte ranges of files that a task reads."""
    for arguments in arguments_within(task):
        lazy = next((value for value in arguments if isinstance(value, LazyArray)), None)
        # The last tuple is the index.
        index = next((value for value in reversed(arguments) if isinstance(value, tuple)), None)
        if lazy is not None and index is not None:
            with suppress(IndexError, TypeError):  # computing it raises them
                yield from lazy.ranges(index)
