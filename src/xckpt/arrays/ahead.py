"""Remote files are read ahead of the tasks of a graph, on dask's own schedulers.

These do one task after the other, and tell before the first which ones there are, in which order.
A worker of a cluster is told of one task at a time; it reads ahead within a chunk.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dask._task_spec import DataNode, Task
from dask.callbacks import Callback

from xckpt.arrays.lazy import LazyArray
from xckpt.storage import reading_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.storage.ahead import Range

__all__ = ["ReadingAhead"]


class ReadingAhead(Callback):
    """Reads ahead for as long as a graph is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._under_way: dict[int, ExitStack] = {}

    def _start_state(self, graph: Mapping[Any, Any], state: Mapping[str, Any]) -> None:
        ready: list[Any] = state["ready"]  # the last one is done first
        reads = {key: found for key in reversed(ready) if (found := list(_ranges(graph[key])))}
        # Results are kept to the end in whatever order they come; dask has them in none.
        dependents, dependencies = state["dependents"], state["dependencies"]

        def is_result(key: Any) -> bool:
            # Or another name for one.
            return all(dependencies[n] == {key} and not dependents[n] for n in dependents[key])

        ends = [key for key in reads if is_result(key)]
        in_file = iter(sorted(ends, key=lambda key: (reads[key][0][0].name, reads[key][0][1])))
        are_ends = set(ends)
        order = [next(in_file) if key in are_ends else key for key in reversed(ready)]
        ready[:] = order[::-1]
        stack = ExitStack()
        stack.enter_context(reading_ahead(each for key in order for each in reads.get(key, ())))
        self._under_way[id(state)] = stack

    def _finish(self, _: Mapping[Any, Any], state: Mapping[str, Any], __: bool) -> None:  # noqa: FBT001  dask's
        stack = self._under_way.pop(id(state), None)
        if stack is not None:
            stack.close()


def _ranges(task: Any) -> Iterator[Range]:
    """Return what a task, or those that were joined in it, read of files."""
    if not isinstance(task, Task):
        return
    lazy, index = None, None
    for argument in task.args:
        if isinstance(argument, dict):
            for inner in argument.values():
                yield from _ranges(inner)
        elif isinstance(argument, Task):
            yield from _ranges(argument)
        elif isinstance(argument, DataNode) and isinstance(argument.value, LazyArray):
            lazy = argument.value
        elif isinstance(argument, tuple) and lazy is not None:
            index = argument  # of the getters of `xckpt.arrays.graph`, the last tuple
    if lazy is not None and index is not None:
        try:
            yield from lazy.ranges(index)
        except (IndexError, TypeError):  # computing it tells
            return
