"""Warnings about filters that match no tensor in any of the files that one call opens."""

from __future__ import annotations

import sys
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, warn
from xckpt.labels.filters import has_match, no_match
from xckpt.opening import open_index

if TYPE_CHECKING:
    from xckpt.datasets.options import OpenOptions
    from xckpt.index import Index

__all__ = ["check_filters"]


def check_filters(path: Any, index: Index, options: OpenOptions) -> OpenOptions:
    """Warn if `tensors` match nothing in any file of the call; return options for this file."""
    # A glob may match the name of a stack instead of a tensor.
    globs = [] if options.stack or not options.dims else list(options.dims)
    selecting = [f for f in (options.tensors, options.exclude) if f is not None]
    filters = [*globs, *selecting]
    absent = [pattern for pattern in filters if not has_match(index.tensors, pattern)]
    if not absent:
        return options
    first, *others = _opened_together(path)
    # The first file warns on behalf of all.
    unmatched = absent if path == first else []
    names = list(index.tensors)
    for other in others:
        if not unmatched:
            break
        try:
            _, other_index = open_index(
                other, storage_options=options.storage_options, whole=options.decode, silent=True
            )
        except (OSError, ValueError, CheckpointError):
            continue  # opening that file raises its errors
        unmatched = [p for p in unmatched if not has_match(other_index.tensors, p)]
        names += other_index.tensors
    if options.tensors in unmatched and names:
        warn(f"{index.source}: {no_match(names, options.tensors)}")
    if options.exclude in unmatched and names:
        text = no_match(names, options.exclude).replace("tensors=", "exclude=", 1)
        warn(f"{index.source}: {text}")
    # A glob without a match raises a warning when axes are named: omit globs that match only
    # tensors of other files.
    dims = {
        glob: axes
        for glob, axes in options.globs_of_dims.items()
        if glob in unmatched or glob not in absent
    }
    return options.with_dims(dims)


def _opened_together(path: Any) -> list[Any]:
    """Return all paths of the `xarray.open_mfdataset` call that opens a path, or only the path."""
    # xarray does not pass the other paths to an engine, and may open each in a thread of a pool.
    for innermost in sys._current_frames().values():  # noqa: SLF001  documented
        for frame, _ in walk_stack(innermost):
            module = str(frame.f_globals.get("__name__"))
            if frame.f_code.co_name == "open_mfdataset" and module.startswith("xarray."):
                paths = frame.f_locals.get("paths1d")  # private: without it, every file warns
                if isinstance(paths, list) and path in paths:
                    return paths
    return [path]
