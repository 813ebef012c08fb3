"""Bytes in: local files, URLs, file objects and bytes as sources; encodings and digests."""

from __future__ import annotations

import os
from pathlib import Path
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

#: What URLs of the Hugging Face Hub begin with.
HUB_SCHEME = "hf://"

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.storage.sink import Sink

__all__ = [
    "HUB_SCHEME",
    "Source",
    "is_mapped",
    "is_remote",
    "list_folder",
    "local_path",
    "new_file",
    "open_source",
    "pinned_url",
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
    if obj.startswith(HUB_SCHEME):
        from xckpt.storage.hub import HubSource

        return HubSource(obj, storage_options, first=first)
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


def list_folder(
    path: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Path | Source]] | None:
    """Return the name of a folder and its files by name; None where it is not one, or not listed.

    Folders are those of this machine, and of the Hub, where a repository is one.
    """
    if path.startswith(HUB_SCHEME):
        from xckpt.storage.hub import list_hub_folder

        return list_hub_folder(path, storage_options)
    folder = Path(local_path(path))
    if is_remote(path) or not folder.is_dir():
        return None
    return str(folder), {each.name: each for each in folder.iterdir() if each.is_file()}


def pinned_url(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return a URL that means the same from now on, where there is such a one: of the Hub."""
    if not url.startswith(HUB_SCHEME):
        return url
    from xckpt.storage.hub import pinned

    return pinned(url, storage_options)


def is_remote(obj: object) -> bool:
    """Return whether something is a URL that is opened through fsspec."""
    return isinstance(obj, str) and is_url(obj) and not is_file_url(obj)
