"""From a path, URL, open file or bytes to its `Source` and `Index`."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xckpt import formats
from xckpt.errors import CheckpointError, CheckpointWarning
from xckpt.storage import is_remote, open_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.index import Index
    from xckpt.storage import Source

__all__ = ["is_format", "open_index", "paused_collector", "read_index"]

_SHOWN_WARNINGS = 3


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the cyclic garbage collector out while many objects are made.

    An index of 90,000 tensors is half a million objects that all stay alive; walking them again
    and again as they accumulate takes as long as making them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def open_index(
    obj: Any,
    format: str | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
    mmap: bool = True,
    **format_options: Any,
) -> tuple[Source, Index]:
    """Open a checkpoint and read its index.

    Parameters
    ----------
    obj : str, os.PathLike, bytes or binary file object
        A path, an fsspec URL, or the bytes themselves.
    format : str, optional
        Name of the format; by default the content tells.
    storage_options : dict, optional
        For fsspec.
    mmap : bool
        Whether a local file may be mapped into memory.
    **format_options
        Options of the format's own.

    Returns
    -------
    source : Source
        The file.
    index : Index
        What it holds.

    Raises
    ------
    OSError
        If the file cannot be opened.
    CheckpointError
        If it is malformed, not of the format, or of no format that is known.

    Warns
    -----
    CheckpointWarning
        Of what the format's specification lets pass.
    """
    source = open_source(obj, storage_options=storage_options, mmap=mmap)
    try:
        module = formats.detect(source) if format is None else formats.get(format)
        with paused_collector():
            index = module.read(source, **format_options)
    except CheckpointError as error:
        error.located(path=source.name)
        raise
    _warn(index)
    return source, index


def read_index(path: Any, *, storage_options: dict[str, Any] | None = None) -> Index:
    """Read what a checkpoint holds: tensors, attributes, and where every byte is; no data.

    Parameters
    ----------
    path : str, os.PathLike, bytes or binary file object
        A path, an fsspec URL, or the bytes themselves.
    storage_options : dict, optional
        For fsspec.

    Returns
    -------
    Index
        Of whatever format the content is.

    Raises
    ------
    OSError
        If the file cannot be opened.
    CheckpointError
        If it is malformed, or of no format that is known.

    Examples
    --------
    >>> index = xckpt.read_index("m.zt")  # doctest: +SKIP
    >>> index.tensors["lm_head"].shape  # doctest: +SKIP
    (32000, 4096)
    """
    return open_index(path, storage_options=storage_options)[1]


def is_format(obj: Any, format: str) -> bool:
    """Tell whether something is a checkpoint of a format, without an error if it is nothing.

    Parameters
    ----------
    obj : str, os.PathLike, bytes or binary file object
        As given to ``xarray.open_dataset``. A file object is left where it was.
    format : str
        Name of the format.

    Returns
    -------
    bool
        By content; for a remote URL by a suffix of the format's own, which costs no request.

    Raises
    ------
    PermissionError
        If the file is there but may not be read.
    """
    module = formats.get(format)
    if is_remote(obj):
        shared = getattr(module, "SHARED_SUFFIXES", ())
        own = tuple(suffix for suffix in module.SUFFIXES if suffix not in shared)
        return str(obj).partition("?")[0].lower().endswith(own)
    try:
        source = open_source(obj)
        head = bytes(source.read(0, min(formats.HEAD_BYTES, source.size)))
    except PermissionError:
        raise
    except (OSError, TypeError, ValueError):
        return False
    return module.detect(head, source.size, source.name)


def _warn(index: Index) -> None:
    for text in index.warnings[:_SHOWN_WARNINGS]:
        warnings.warn(f"{index.source}: {text}", CheckpointWarning, stacklevel=4)
    more = len(index.warnings) - _SHOWN_WARNINGS
    if more > 0:
        text = f"{index.source}: {more} more warnings, listed in read_index(...).warnings"
        warnings.warn(text, CheckpointWarning, stacklevel=4)
