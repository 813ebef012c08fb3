"""From paths, URLs, open files or bytes to a `Source` and an `Index`."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from xckpt import formats
from xckpt.errors import CheckpointWarning, FormatError, MissingShardError, locating
from xckpt.index import paused_collector
from xckpt.sharding import FileList, Opened, list_files, merge
from xckpt.storage import Source, is_remote, open_source
from xckpt.storage.header import FIRST_NBYTES

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO

    from xckpt.index import Index

    OpenPath = str | os.PathLike[str] | bytes | BinaryIO | Sequence[str | os.PathLike[str]]

__all__ = [
    "format_of",
    "is_format",
    "open_each",
    "open_index",
    "read_index",
    "warn_of",
]

_SHOWN_WARNINGS = 3
# Files whose headers are read at a time.
_CONCURRENCY = 16


def open_index(
    obj: Any,
    format: str | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
    mmap: bool = False,
    **format_options: Any,
) -> tuple[Source, Index]:
    """Open a checkpoint and read its index."""
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
    """Open the files of a checkpoint, several at a time, and read their indexes."""

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
        if format is None:
            return formats.detect(header).read(header, **format_options)
        try:
            return formats.get(format).read(header, **format_options)
        except FormatError as error:
            formats.advise(error, format, header)
            raise


def read_index(path: OpenPath, *, storage_options: dict[str, Any] | None = None) -> Index:
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
    >>> index["lm_head"].shape  # doctest: +SKIP
    (32000, 4096)
    """
    return open_index(path, storage_options=storage_options)[1]


def format_of(obj: Any, storage_options: dict[str, Any] | None = None) -> str:
    """Find the format of a checkpoint by its content."""
    listed = list_files(obj, storage_options)
    if listed is not None:
        obj = next((file for file in listed.files.values() if file is not None), None)
        if obj is None:
            raise MissingShardError("none of its files is there", path=listed.name)
    source = obj if isinstance(obj, Source) else open_source(obj, storage_options=storage_options)
    return formats.detect(source).name


def is_format(obj: Any, format: str) -> bool:
    """Return whether something is a checkpoint of a format, without an error if it is nothing."""
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
    """Warn of what the specification of a file lets pass."""
    for text in index.warnings[:_SHOWN_WARNINGS]:
        warnings.warn(f"{index.source}: {text}", CheckpointWarning, stacklevel=4)
    more = len(index.warnings) - _SHOWN_WARNINGS
    if more > 0:
        text = f"{index.source}: {more} more warnings, listed in read_index(...).warnings"
        warnings.warn(text, CheckpointWarning, stacklevel=4)
