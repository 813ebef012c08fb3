"""A new file behind a URL: written to a local temporary file first, and uploaded whole."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import TYPE_CHECKING, Any

from xckpt.storage.sink import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["UploadSink"]


class UploadSink(Sink):
    """A file of any file system that fsspec can write to.

    Stores of objects show an object when it is complete; of other file systems a reader may see
    the file grow while it is uploaded.

    Parameters
    ----------
    url : str
        Where the file is to be.
    overwrite : bool
        Whether a file may be replaced.
    storage_options : mapping, optional
        For fsspec.

    Raises
    ------
    FileExistsError
        If there is a file, and it may not be replaced.
    ImportError
        If a package for this kind of URL is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        from fsspec.core import url_to_fs

        self.url = url
        self._filesystem, self._remote = url_to_fs(url, **(storage_options or {}))
        self._refuse_existing(overwrite=overwrite)
        folder = tempfile.gettempdir()
        super().__init__(os.path.join(folder, f"upload-{os.getpid()}"), overwrite=True)  # noqa: PTH118
        self.overwrite = overwrite

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{self.url}: what is uploaded is written by one machine; save to a shared folder, "
            "or without a cluster"
        )

    def _refuse_existing(self, *, overwrite: bool) -> None:
        if not overwrite and self._filesystem.exists(self._remote):
            text = f"{os.strerror(errno.EEXIST)} (overwrite=True replaces it)"
            raise FileExistsError(errno.EEXIST, text, self.url)

    def _remove(self) -> None:
        if self._filesystem.exists(self._remote):
            self._filesystem.rm_file(self._remote)

    def _publish(self) -> None:
        """Upload the file."""
        self._refuse_existing(overwrite=self.overwrite)
        self._filesystem.put_file(self.path, self._remote)
