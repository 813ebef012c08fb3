"""A new file behind a URL: written to a local temporary file first, and uploaded whole."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from xckpt.storage.network import is_transient, own_options
from xckpt.storage.partial import create, remove_left_over
from xckpt.storage.sink import Place, Sink, exists

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["UploadSink"]


class UploadSink(Sink):
    """A file of any file system that fsspec can write to.

    Stores of objects show an object when it is complete; of other file systems a reader may see
    the file grow while it is uploaded.
    """

    def __init__(
        self,
        url: str,
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        from fsspec.core import url_to_fs

        self._filesystem, self._remote = url_to_fs(url, **own_options(storage_options)[0])
        self._options = storage_options
        self._alias: str | None = None
        self._is_there = False
        if not overwrite and self.is_taken():
            raise exists(url)
        # The target of temporary files only: their names cannot be guessed, and others cannot
        # read them.
        self.target = os.path.join(tempfile.gettempdir(), "xckpt-upload")  # noqa: PTH118
        with Place(self.target, url, is_upload=True).named():
            remove_left_over(self.target)
            self._own(url, *create(self.target, None, private=True), overwrite=overwrite)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{self.name}: what is uploaded is written by one machine; save to a shared folder, "
            "or without a cluster"
        )

    @property
    def place(self) -> Place:
        """Where the file is written before it is uploaded."""
        return Place(self.path, self.name, is_upload=True)

    def another(self) -> Sink:
        """Begin another temporary file for the same URL."""
        return UploadSink(self.name, overwrite=True, storage_options=self._options)

    # The steps of `publish`.

    @property
    def folders(self) -> set[str]:
        """None that have to be brought to a disk."""
        return set()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """There are no locks."""
        yield

    def is_taken(self) -> bool:
        """Whether there is a file; see `Sink.is_taken`."""
        found: bool = self._filesystem.exists(self._remote)
        return found

    def take_name(self) -> None:
        """Upload the file, or copy it there from its alias."""
        self._is_there = True
        if self._alias is not None:
            with suppress(NotImplementedError):
                self._transfer(self._filesystem.cp_file, self._alias)
                return
        self._transfer(self._filesystem.put_file, self.path)

    def has_name(self) -> bool:
        """Whether it was uploaded, or may have been."""
        return self._is_there

    def remove(self) -> None:
        """Remove what was uploaded."""
        self._filesystem.rm_file(self._remote)

    def add_alias(self, name: str) -> None:
        """Upload the file under another name in the same folder."""
        alias = self._next_to_remote(name)
        self._transfer(self._filesystem.put_file, self.path, alias)
        self._alias = alias

    def remove_alias(self, name: str) -> None:
        """Remove the other file."""
        self._filesystem.rm_file(self._next_to_remote(name))

    def remove_aliases(self, companions: Iterable[Sink]) -> None:
        """Nothing: whether others use them is not known, without locks."""

    def _next_to_remote(self, name: str) -> str:
        folder, slash, _ = str(self._remote).rpartition("/")
        return folder + slash + name.rpartition("/")[2]

    def _transfer(self, how: Any, start: str, end: str | None = None) -> None:
        """Copy or upload a file; errors of libraries become those of the operating system."""
        with Place(self.name, self.name).named():
            try:
                how(start, end or self._remote)
            except Exception as error:
                if isinstance(error, OSError) or not is_transient(error):
                    raise
                raise OSError(f"the upload failed: {error}") from error
