"""Bytes: sources to read, sinks to write, encodings and digests.

`open_source` turns a path, a URL, an open file or bytes into a `Source`; `new_file` begins a
`Sink`, whose file appears under its name when it is complete. The room may import `errors`,
`interrupts` and the modules next to them; it knows nothing of tensors. Read `source` first: `local`
and `objects` implement it. `sink` writes files of this machine, `uploads` those of others.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from xckpt.addresses import real
from xckpt.storage.local import (
    BytesSource,
    FileObjectSource,
    LocalSource,
    is_file_url,
    is_mapped,
    local_path,
)
from xckpt.storage.prefetch import reading_ahead
from xckpt.storage.source import Source
from xckpt.storage.stores import store_kind

# At least two letters, because "C:" is a drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(://|::)")
# Pages of the Hub for a repository, a folder or a file, as a browser shows them.
_HUB_PAGE = re.compile(
    r"https://(?:huggingface\.co|hf\.co)/(?P<repo>(?:(?:datasets|spaces)/)?[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob)/(?P<revision>[^/?#]+)(?P<path>/[^?#]*)?)?/?(?:[?#].*)?"
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.storage.sink import Sink

__all__ = [
    "Source",
    "expand_url",
    "hub_url",
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
) -> Source:
    """Open a path, a URL, bytes or an open binary file as a source."""
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
    obj = real(obj)
    on_hub = hub_url(obj)
    if on_hub is not None:
        from xckpt.storage.hub import HubSource

        return HubSource(on_hub, storage_options)
    if store_kind(obj) is None:
        from xckpt.storage.filesystems import FsspecSource

        return FsspecSource(obj, storage_options)
    from xckpt.storage.objects import ObjectSource

    return ObjectSource(obj, storage_options)


def new_file(
    path: str,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    beside: Iterable[Sink] = (),
) -> Sink:
    """Begin a file that appears under its name only when it is complete."""
    # `beside` has the other files of the same checkpoint; they share locks, so that few are open.
    from xckpt.storage.sink import Sink

    if is_remote(path):
        from xckpt.storage.uploads import UploadSink

        return UploadSink(path, overwrite=overwrite, beside=beside, storage_options=storage_options)
    return Sink(path, overwrite=overwrite, beside=beside)


def list_folder(
    path: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Path | Source]] | None:
    """Return the name of a folder, or repository, and its files by name; None for other places."""
    on_hub = hub_url(path)
    if on_hub is not None:
        from xckpt.storage.hub import list_hub_folder

        return list_hub_folder(on_hub, storage_options)
    folder = Path(local_path(path))
    if is_remote(path) or not folder.is_dir():
        return None
    return str(folder), {file.name: file for file in folder.iterdir() if file.is_file()}


def expand_url(
    pattern: str, storage_options: Mapping[str, Any] | None, chain: str = ""
) -> list[str]:
    """Return the URLs of files that match a glob; `chain` is the remainder of a chained URL."""
    if pattern.startswith("hf://"):
        from xckpt.storage.hub import glob_hub

        return glob_hub(pattern, storage_options)
    from xckpt.storage.filesystems import file_system

    fs, path = file_system(real(pattern) + chain, storage_options)
    scheme = pattern.partition("://")[0]
    return [match if "://" in match else f"{scheme}://{match}" for match in fs.glob(path)]


def pinned_url(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return a URL whose content cannot change: on the Hub with its commit, else unchanged."""
    on_hub = hub_url(url)
    if on_hub is None:
        return url
    from xckpt.storage.hub import pinned

    return pinned(on_hub, storage_options)


def hub_url(obj: object) -> str | None:
    """Return the hf:// URL of a file, folder or page of the Hub; None for anything else."""
    if not isinstance(obj, str):
        return None
    if obj.startswith("hf://"):
        return obj
    page = _HUB_PAGE.fullmatch(obj)
    if page is None:
        return None
    return f"hf://{page['repo']}@{page['revision'] or 'main'}{unquote(page['path'] or '')}"


def is_remote(obj: object) -> bool:
    """Return whether an object is a URL of another machine or file system."""
    return isinstance(obj, str) and _URL.match(obj) is not None and not is_file_url(obj)
