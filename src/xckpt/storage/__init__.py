"""Bytes: sources to read, sinks to write, encodings and digests.

`Location` classifies an address once, and opens it as a `Source`; `new_file` begins a `Sink`, whose
file appears under its name when it is complete. The room may import `errors`, `interrupts` and the
modules next to them; it knows nothing of tensors. Read `location` and `source` first: `local` and
`objects` implement sources, and `remote` those of fsspec. `sink` writes files of this machine,
`uploads` those of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.storage.local import is_mapped, local_path
from xckpt.storage.location import FolderListing, Location, hub_url, is_remote
from xckpt.storage.prefetch import reading_ahead
from xckpt.storage.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.storage.sink import Sink

__all__ = [
    "FolderListing",
    "Location",
    "Source",
    "hub_url",
    "is_mapped",
    "is_remote",
    "local_path",
    "new_file",
    "open_source",
    "reading_ahead",
    "write_file",
]


def open_source(
    obj: Any,
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = False,
) -> Source:
    """Open a path, a URL, bytes or an open binary file as a source."""
    return Location.of(obj, storage_options).open(mmap=mmap)


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


def write_file(
    path: str,
    data: bytes,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a small file, which appears under its name when it is complete."""
    with new_file(path, overwrite=overwrite, storage_options=storage_options) as sink:
        sink.write(data, 0)
        sink.commit()
