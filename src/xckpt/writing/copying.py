"""Bytes of a local file copied by the operating system, holes as holes."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from xckpt.storage.local import Descriptor, LocalSource, file_identity

if TYPE_CHECKING:
    from xckpt.storage import Source
    from xckpt.storage.sink import Sink

__all__ = ["Copier"]

_CANNOT = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
_STEP = 16 << 20


class Copier:
    """Copies ranges of files into a sink.

    Parameters
    ----------
    sink : Sink
        Of which nothing has been written to where a copy goes.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._opened: dict[Source, Descriptor] = {}
        self._lock = threading.Lock()
        self._by_system = hasattr(os, "copy_file_range")

    def copy(self, source: Source, start: int, offset: int, nbytes: int) -> None:
        """Copy a range of bytes.

        Parameters
        ----------
        source : Source
            Of any kind.
        start : int
            First byte in it.
        offset : int
            Where it goes.
        nbytes : int
            How many bytes.

        Raises
        ------
        FileChangedError
            If the source is no longer the file that was opened.
        OSError
            If they cannot be written.
        """
        descriptor = self._descriptor(source)
        done = 0
        while done < nbytes:
            count = min(_STEP, nbytes - done)
            if descriptor is not None:
                hole = _hole(descriptor.fileno, start + done, nbytes - done)
                if hole:
                    done += hole
                    continue
                count = self._copied(descriptor, start + done, offset + done, count)
            if descriptor is None or count == 0:
                count = min(_STEP, nbytes - done)
                self._sink.write(source.read(start + done, count), offset + done)
            done += count
        source.view(start, 0)  # checks that the file is still the same

    def _descriptor(self, source: Source) -> Descriptor | None:
        if not isinstance(source, LocalSource):
            return None
        with self._lock:
            if source not in self._opened:
                source.view(0, 0)
                descriptor = Descriptor(source.name)
                if file_identity(os.fstat(descriptor.fileno)) != source.identity:
                    source.view(0, 0)  # says how it changed
                    return None
                self._opened[source] = descriptor
            return self._opened[source]

    def _copied(self, descriptor: Descriptor, start: int, offset: int, nbytes: int) -> int:
        """Copy within the kernel, and give how much was; 0 where it cannot."""
        if not self._by_system:
            return 0
        try:
            return os.copy_file_range(descriptor.fileno, self._sink.fileno, nbytes, start, offset)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            self._by_system = False
            return 0


def _hole(fileno: int, start: int, nbytes: int) -> int:
    """Give how many bytes from here on are in a hole."""
    if not hasattr(os, "SEEK_DATA"):
        return 0
    try:
        data = os.lseek(fileno, start, os.SEEK_DATA)
    except OSError as error:
        return nbytes if error.errno == errno.ENXIO else 0
    return min(nbytes, data - start)
