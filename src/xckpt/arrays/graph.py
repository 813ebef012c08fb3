"""Lazy arrays as dask arrays: one task per chunk, and a graph that is made when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
from dask._task_spec import DataNode, Task, TaskRef
from dask.array.core import finalize, getter
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from xckpt.storage import is_mapped, release

if TYPE_CHECKING:
    from xckpt.arrays.chunks import Chunks
    from xckpt.arrays.lazy import LazyArray

__all__ = ["TensorArray"]


class TensorArray(da.Array):  # type: ignore[misc]
    """A dask array over a `LazyArray`.

    It differs from ``dask.array.from_array(lazy, ...)`` in three ways. Its graph is made on first
    use: 90,000 arrays that are only listed cost nothing. It pickles as the lazy array, not as a
    graph. And when it is computed whole, the result is memory of its own: the chunks themselves
    are views of the file's memory map, which copies nothing in a reduction but would leave a
    computed array read-only and at the mercy of whoever writes to the file.

    Parameters
    ----------
    lazy : LazyArray
        The array in the file.
    name : str
        Name of the dask array: equal names must mean equal values.
    chunks : tuple of tuple of int
        In dask's form.
    meta : array
        An empty array of the kind of the chunks.

    Examples
    --------
    >>> ds["lm_head"].data  # doctest: +SKIP
    dask.array<lm_head-1f0c, shape=(4096, 32000), dtype=float32, chunksize=(1024, 32000), ...>
    """

    __slots__ = ("_graph", "lazy")

    # The attributes that dask.array.Array.__new__ sets. Calling it costs 40 microseconds, most of
    # an open: it normalises chunks and meta that are right by construction here.
    def __new__(cls, lazy: LazyArray, name: str, chunks: Chunks, meta: Any) -> TensorArray:
        self = object.__new__(cls)
        self.lazy = lazy
        self._graph = None
        self._name = name
        self._chunks = chunks
        self._meta = meta
        return self

    @property
    def dask(self) -> HighLevelGraph:
        """The graph, made on first use."""
        if self._graph is None:
            tasks = dict(_tasks(self.lazy, self._name, self._chunks))
            self._graph = HighLevelGraph(
                {self._name: MaterializedLayer(tasks)}, {self._name: set()}
            )
        return self._graph

    @dask.setter
    def dask(self, graph: HighLevelGraph) -> None:
        # Assigning to a dask array (x[0] = 1) replaces its graph in place.
        self._graph = graph
        self.lazy = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.lazy is None:
            return super().__reduce__()
        return TensorArray, (self.lazy, self._name, self._chunks, self._meta)

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return _gathered, (self.shape, self._chunks)


def _tasks(lazy: LazyArray, name: str, chunks: Chunks) -> Iterator[tuple[Any, Any]]:
    """Make the tasks of all chunks.

    They are getters on a node of its own because that is what lets dask fuse a later slice into
    the read (dask.array.optimization._optimize_slices).
    """
    original = f"original-{name}"
    yield original, DataNode(original, lazy)
    reference = TaskRef(original)
    for position, index in zip(
        product(*(range(len(sizes)) for sizes in chunks)), product(*_slices(chunks)), strict=True
    ):
        key = (name, *position)
        yield key, Task(key, getter, reference, index, False, None)


def _slices(chunks: Chunks) -> list[list[slice]]:
    along = []
    for sizes in chunks:
        stops = np.cumsum(sizes).tolist()
        along.append([slice(b - n, b) for n, b in zip(sizes, stops, strict=True)])
    return along


def _gathered(results: Any, shape: tuple[int, ...], chunks: Chunks) -> Any:
    """Join computed chunks into memory of its own."""
    first = results
    while isinstance(first, list | tuple):
        first = first[0]
    if is_mapped(first):
        return _copied(results, first, shape, chunks)
    if isinstance(first, np.ndarray) and first.shape == shape and first.flags.writeable:
        # Made for this result alone; dask's finalize would copy it once more.
        return first
    return finalize(results)


def _copied(results: Any, first: Any, shape: tuple[int, ...], chunks: Chunks) -> Any:
    """Copy chunks that are views of a memory map, and drop the mapped pages behind them.

    Dropping them keeps the peak of resident memory at the size of the result, where a copy from
    a map would otherwise double it.
    """
    order = "F" if first.flags.f_contiguous and not first.flags.c_contiguous else "C"
    whole = np.empty(shape, first.dtype, order)
    positions = product(*(range(len(sizes)) for sizes in chunks))
    for position, index in zip(positions, product(*_slices(chunks)), strict=True):
        block = results
        for step in position:
            block = block[step]
        block = block[0] if isinstance(block, list | tuple) else block
        whole[index] = block
        release(block)
    return whole
