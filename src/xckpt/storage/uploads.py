"""New files on other file systems: written to a temporary file here, and uploaded when complete."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from xckpt.addresses import hiding
from xckpt.errors import UnsupportedError
from xckpt.interrupts import forget, uninterrupted
from xckpt.storage.objects import file_system
from xckpt.storage.partial import Place
from xckpt.storage.remote import as_os_error
from xckpt.storage.requests import TransientError
from xckpt.storage.sink import Sink, file_exists

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class UploadSink(Sink):
    """A file on any file system that fsspec can write to."""

    _is_upload = True

    def __init__(
        self,
        url: str,
        *,
        overwrite: bool = False,
        beside: Iterable[Sink] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if url.startswith("hf://"):
            hint = "Save it to a local file, and run `hf upload organisation/model FILE`"
            raise UnsupportedError("cannot write to the Hub", path=url, hint=hint)
        url = hiding(url)
        self._filesystem, self._remote = file_system(url, storage_options)
        self._options = storage_options
        self._alias: str | None = None
        self._is_there = False
        if not overwrite and self.is_taken():
            raise file_exists(url)
        # Temporary files go here: their names cannot be guessed, and other users cannot
        # read them.
        self.target = os.path.join(tempfile.gettempdir(), "xckpt-upload")  # noqa: PTH118
        try:
            with Place(self.target, url, is_upload=True).named():
                self._create(url, None, beside, overwrite=overwrite, private=True)
        except BaseException:
            self.abort()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{self.name}: only one machine can write a file that is uploaded; save to a shared "
            "folder, or without a cluster"
        )

    def another(self) -> Sink:
        """Create another temporary file for the same URL."""
        options = self._options
        return UploadSink(self.name, overwrite=True, beside=[self], storage_options=options)

    # The steps of `publish`.

    @property
    def folders(self) -> set[str]:
        """Empty: remote folders need no sync."""
        return set()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let an interrupt stop the uploads, or come too late; remote files have no locks."""
        with uninterrupted():
            yield
            forget(f"{self.name} is complete: Ctrl-C came too late")

    def is_taken(self) -> bool:
        """Return whether the file exists; see `Sink.is_taken`."""
        exists: bool = self._filesystem.exists(self._remote)
        return exists

    def take_name(self) -> None:
        """Upload the file, or copy it from its alias."""
        # Object stores show an object once it is complete; elsewhere, readers may see it grow.
        self._is_there = True
        if self._alias is not None:
            with suppress(NotImplementedError):
                self._transfer(self._filesystem.cp_file, self._alias)
                return
        self._transfer(self._filesystem.put_file, self.path)

    def has_name(self) -> bool:
        """Return whether an upload under this name has begun."""
        return self._is_there

    def remove(self) -> None:
        """Remove the uploaded file."""
        self._filesystem.rm_file(self._remote)

    def add_alias(self, name: str) -> None:
        """Upload the file under another name in the same folder."""
        alias = self._next_to(name)
        self._transfer(self._filesystem.put_file, self.path, alias)
        self._alias = alias

    def remove_alias(self, name: str) -> None:
        """Remove an alias, if it exists."""
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(self._next_to(name))

    def remove_aliases(self, companions: Iterable[Sink]) -> None:
        """Do nothing: without locks, other writers may still use them."""

    def _next_to(self, name: str) -> str:
        folder, slash, _ = str(self._remote).rpartition("/")
        return folder + slash + name.rpartition("/")[2]

    def _transfer(self, method: Any, origin: str, target: str | None = None) -> None:
        """Copy or upload a file, with errors of libraries converted to `OSError`."""
        with Place(self.name, self.name).named():
            try:
                method(origin, target or self._remote)
            except Exception as error:
                problem = as_os_error(error, self.name, "upload")
                if problem is error:
                    raise
                if isinstance(problem, TransientError):
                    problem = OSError(errno.EIO, str(problem), self.name)
                raise problem from error
