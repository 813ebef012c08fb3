"""From paths, URLs, open files or bytes to a `Source` and an `Index`."""

from __future__ import annotations

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xckpt import formats
from xckpt.errors import CheckpointWarning, MissingShardError, locating
from xckpt.sharding import FileList, Opened, list_files, merge
from xckpt.storage import Source, is_remote, open_source
from xckpt.storage.header import FIRST_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.index import Index

__all__ = [
    "format_of",
    "is_format",
    "open_each",
    "open_index",
    "paused_collector",
    "read_index",
    "warn_of",
]

_SHOWN_WARNINGS = 3
# Files whose headers are read at a time.
_CONCURRENCY = 16


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
    mmap: bool = False,
    **format_options: Any,
) -> tuple[Source, Index]:
    """Open a checkpoint and read its index.

    Parameters
    ----------
    obj : str, os.PathLike, bytes, binary file object, or list of these
        A path, an fsspec URL, or the bytes themselves; several of them, a glob or an index of
        shards (``*.index.json``) are one checkpoint.
    format : str, optional
        Name of the format; by default the content tells.
    storage_options : dict, optional
        For fsspec.
    mmap : bool
        Whether raw data of local files are mapped into memory instead of read.
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
    listed = list_files(obj, storage_options)
    if listed is None:
        source = open_source(obj, storage_options=storage_options, mmap=mmap, first=FIRST_NBYTES)
        with paused_collector():
            index = _read(source, format, format_options)
    else:
        opened = open_each(listed, format, storage_options, format_options, mmap=mmap)
        with paused_collector():
            source, index = merge(listed, opened)
    warn_of(index)
    return source, index


def open_each(
    listed: FileList,
    format: str | None,
    storage_options: dict[str, Any] | None,
    format_options: Mapping[str, Any],
    *,
    mmap: bool = False,
) -> list[Opened]:
    """Open the files of a checkpoint, several at a time, and read their indexes.

    Parameters
    ----------
    listed : FileList
        Which.
    format, storage_options, format_options, mmap
        As in `open_index`.

    Returns
    -------
    list of Opened
        Those that are there, in their order.

    Raises
    ------
    OSError
        If one cannot be opened; `MissingShardError` if none is there.
    CheckpointError
        If one is malformed or of another format.
    """

    def opened(file: tuple[str, Any]) -> Opened:
        label, obj = file
        if isinstance(obj, Source):
            source = obj
        else:
            source = open_source(
                obj, storage_options=storage_options, mmap=mmap, first=FIRST_NBYTES
            )
        return Opened(label, source, _read(source, format, format_options))

    there = [(label, obj) for label, obj in listed.files.items() if obj is not None]
    if not there:
        raise MissingShardError("none of its files is there", path=listed.name)
    with paused_collector(), ThreadPoolExecutor(min(len(there), _CONCURRENCY)) as threads:
        return list(threads.map(opened, there))


def _read(source: Source, format: str | None, format_options: Mapping[str, Any]) -> Index:
    with locating(path=source.name), source.reading_header() as header:
        found = formats.detect(header) if format is None else formats.get(format)
        return found.read(header, **format_options)


def read_index(path: Any, *, storage_options: dict[str, Any] | None = None) -> Index:
    """Read what a checkpoint holds: tensors, attributes, and where every byte is; no data.

    Parameters
    ----------
    path : str, os.PathLike, bytes, binary file object, or list of these
        A path, an fsspec URL, or the bytes themselves; several of them, a glob or an index of
        shards (``*.index.json``) are one checkpoint.
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


def format_of(obj: Any, storage_options: dict[str, Any] | None = None) -> str:
    """Find the format of a checkpoint by its content.

    Parameters
    ----------
    obj : str, os.PathLike, bytes, binary file object, or list of these
        As given to `open_index`.
    storage_options : dict, optional
        For fsspec.

    Returns
    -------
    str
        Name of the format, of the first where there are several files.

    Raises
    ------
    OSError
        If the file cannot be opened.
    FormatError
        If no format knows it.
    """
    listed = list_files(obj, storage_options)
    if listed is not None:
        obj = next(file for file in listed.files.values() if file is not None)
    source = obj if isinstance(obj, Source) else open_source(obj, storage_options=storage_options)
    return formats.detect(source).name


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
    wanted = formats.get(format)
    if is_remote(obj):
        own = tuple(each for each in wanted.suffixes if each not in wanted.shared_suffixes)
        return str(obj).partition("?")[0].lower().endswith(own)
    try:
        listed = list_files(obj)
        if listed is not None:
            obj = next(file for file in listed.files.values() if file is not None)
        source = obj if isinstance(obj, Source) else open_source(obj)
        head = bytes(source.read(0, min(formats.HEAD_BYTES, source.size)))
    except PermissionError:
        raise
    except (OSError, TypeError, ValueError, StopIteration):
        return False
    return wanted.detect(head, source.size, source.name)


def warn_of(index: Index) -> None:
    """Warn of what the specification of a file lets pass.

    Parameters
    ----------
    index : Index
        Of the file.

    Warns
    -----
    CheckpointWarning
        Of the first few.
    """
    for text in index.warnings[:_SHOWN_WARNINGS]:
        warnings.warn(f"{index.source}: {text}", CheckpointWarning, stacklevel=4)
    more = len(index.warnings) - _SHOWN_WARNINGS
    if more > 0:
        text = f"{index.source}: {more} more warnings, listed in read_index(...).warnings"
        warnings.warn(text, CheckpointWarning, stacklevel=4)
