"""Bytes in: local files, URLs, file objects and bytes as sources; encodings and digests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from xckpt.storage.local import LocalSource, is_file_url, is_mapped, local_path
from xckpt.storage.memory import BytesSource, FileObjectSource
from xckpt.storage.remote import FsspecSource, is_url
from xckpt.storage.source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Source", "is_mapped", "is_remote", "local_path", "open_source"]


def open_source(
    obj: Any,
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = False,
    first: int = 0,
) -> Source:
    """Open whatever holds the bytes of a file.

    Parameters
    ----------
    obj : str, os.PathLike, bytes, bytearray, memoryview or binary file object
        A path, a ``file://`` or other URL of fsspec, the bytes themselves, or an open file.
    storage_options : mapping, optional
        For fsspec; local paths need none.
    mmap : bool
        Whether views of a local file are of a memory map; see `LocalSource`.
    first : int
        Bytes of the beginning of a remote file that are read at once, where that saves a request.

    Returns
    -------
    Source
        Its size and identity are known; nothing is read yet.

    Raises
    ------
    OSError
        If it cannot be opened: `FileNotFoundError`, `IsADirectoryError`, `PermissionError`.
    TypeError
        If it is something else, or a file in text mode.
    ValueError
        If it is not a path that a file can have.
    ImportError
        If a package for this kind of URL is not installed.
    UnsupportedError
        If it is a pipe or a device, or of unknown size.

    Examples
    --------
    >>> source = open_source(b"ZTEN1000")
    >>> bytes(source.read(4, 4))
    b'1000'
    """
    if isinstance(obj, bytes | bytearray | memoryview):
        return BytesSource(obj)
    if isinstance(obj, os.PathLike):
        obj = os.fsdecode(obj)
    elif hasattr(obj, "read"):
        return FileObjectSource(obj)
    if not isinstance(obj, str):
        raise TypeError(
            f"expected a path, a URL, bytes or an open binary file, got {type(obj).__name__}"
        )
    if is_remote(obj):
        return _open_url(obj, storage_options, first)
    return LocalSource(obj, mmap=mmap)


def is_remote(obj: object) -> bool:
    """Tell whether something is a URL that is opened through fsspec.

    Parameters
    ----------
    obj : object
        What a user gave as a file.

    Returns
    -------
    bool
        False for paths and ``file://`` URLs, and for all that is no text.

    Examples
    --------
    >>> is_remote("s3://bucket/m.zt"), is_remote("file:///m.zt"), is_remote("m.zt")
    (True, False, False)
    """
    return isinstance(obj, str) and is_url(obj) and not is_file_url(obj)


def _open_url(url: str, storage_options: Mapping[str, Any] | None, first: int) -> Source:
    if url.startswith(("http://", "https://")):
        from xckpt.storage.web import HttpSource

        return HttpSource(url, storage_options, first=first)
    if url.startswith(("s3://", "s3a://")) and "::" not in url:
        from xckpt.storage.s3 import S3Source

        return S3Source(url, storage_options, first=first)
    return FsspecSource(url, storage_options, first=first)
