"""Bytes in: local files, URLs, file objects and bytes as sources; encodings and digests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from xckpt.storage.ahead import reading_ahead
from xckpt.storage.local import (
    BytesSource,
    FileObjectSource,
    LocalSource,
    is_file_url,
    is_mapped,
    local_path,
)
from xckpt.storage.remote import FsspecSource, is_url
from xckpt.storage.source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.storage.sink import Sink

__all__ = [
    "Source",
    "is_mapped",
    "is_remote",
    "local_path",
    "new_file",
    "open_source",
    "reading_ahead",
]


def open_source(
    obj: Any,
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = False,
    first: int = 0,
) -> Source:
    """Open whatever holds the bytes of a file."""
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
    if not is_remote(obj):
        return LocalSource(obj, mmap=mmap)
    is_web = obj.startswith(("http://", "https://"))
    if not is_web and ("::" in obj or not obj.startswith(("s3://", "s3a://"))):
        return FsspecSource(obj, storage_options, first=first)
    from xckpt.storage.web import HttpSource, S3Source

    return (HttpSource if is_web else S3Source)(obj, storage_options, first=first)


def new_file(
    path: str, *, overwrite: bool = False, storage_options: Mapping[str, Any] | None = None
) -> Sink:
    """Begin a file, which is complete under its name or not there."""
    from xckpt.storage.sink import Sink, UploadSink

    if is_remote(path):
        return UploadSink(path, overwrite=overwrite, storage_options=storage_options)
    return Sink(path, overwrite=overwrite)


def is_remote(obj: object) -> bool:
    """Return whether something is a URL that is opened through fsspec."""
    return isinstance(obj, str) and is_url(obj) and not is_file_url(obj)
