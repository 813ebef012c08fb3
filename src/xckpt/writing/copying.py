"""Bytes of a local file copied by the operating system, holes as holes."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from xckpt.storage.local import LocalSource

if TYPE_CHECKING:
    from xckpt.storage import Source
    from xckpt.storage.local import Descriptor
    from xckpt.storage.sink import Sink

__all__ = ["Copier"]

# Where the kernel cannot copy, or cannot say which of the two files is at fault.
_CANNOT = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
_CANNOT |= {errno.EIO, errno.ESTALE}
# At a time, so that Ctrl-C and errors of other threads need not wait for long.
_STEP = 16 << 20


class Copier:
    """Copies ranges of files into a sink, to where nothing has been written yet."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._by_system = hasattr(os, "copy_file_range")

    def copy(self, source: Source, start: int, offset: int, nbytes: int) -> None:
        """Copy `nbytes` from `start` of a source to `offset` of the sink."""
        descriptor = source.descriptor() if isinstance(source, LocalSource) else None
        done = 0
        while done < nbytes:
            hole, count = _extent(descriptor, start + done, nbytes - done)
            done += hole
            if count:
                copied = self._copied(descriptor, start + done, offset + done, count)
                if not copied:
                    self._sink.write(source.read(start + done, count), offset + done)
                done += copied or count
        source.view(start, 0)  # checks that the file is still the same

    def _copied(self, descriptor: Descriptor | None, start: int, offset: int, nbytes: int) -> int:
        """Copy within the kernel, and give how much was; 0 where it cannot."""
        if descriptor is None or not self._by_system:
            return 0
        try:
            with self._sink.place.named():
                return os.copy_file_range(
                    descriptor.fileno, self._sink.fileno, nbytes, start, offset
                )
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            self._by_system = False
            return 0


def _extent(descriptor: Descriptor | None, start: int, nbytes: int) -> tuple[int, int]:
    """Return how many bytes from here on are in a hole, and how many after it are to be copied."""
    if descriptor is None or not hasattr(os, "SEEK_DATA"):
        return 0, min(_STEP, nbytes)
    try:
        data = os.lseek(descriptor.fileno, start, os.SEEK_DATA)
        stop = os.lseek(descriptor.fileno, data, os.SEEK_HOLE)
    except OSError as error:
        # There is nothing but a hole, or the file system cannot tell.
        return (nbytes, 0) if error.errno == errno.ENXIO else (0, min(_STEP, nbytes))
    hole = min(nbytes, data - start)
    return hole, min(_STEP, nbytes - hole, stop - data)
