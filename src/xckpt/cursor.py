"""The fields of a file one after the other, each within bounds that are known before it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from xckpt.errors import FormatError

if TYPE_CHECKING:
    from struct import Struct

__all__ = ["Cursor"]

# Windows grow while a file is read through, and shrink where data are jumped over: of data as
# little as possible is read, and what a file claims to hold is read in pieces.
_SMALLEST_WINDOW, _LARGEST_WINDOW = 1 << 12, 1 << 20


class Bytes(Protocol):
    """What a cursor reads from."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Give exactly `nbytes` bytes."""


class Cursor:
    """Reads a file from some byte on, a window at a time.

    Parameters
    ----------
    source : object
        With ``size`` and ``read(offset, nbytes)``.
    at : int
        Where to begin.

    Attributes
    ----------
    at : int
        Offset of the next byte; it may be set.
    """

    __slots__ = ("_area", "_base", "_buffer", "_end", "_source", "_window", "at")

    def __init__(self, source: Bytes, at: int = 0) -> None:
        self._source = source
        self._buffer = b""
        self._base = at
        self._area = "the file"
        self._end = source.size
        self._window = _SMALLEST_WINDOW
        self.at = at

    @property
    def left(self) -> int:
        """How many bytes are left of the file, or of the area that was entered."""
        return self._end - self.at

    def enter(self, nbytes: int, area: str) -> None:
        """Stay within an area of the file that begins here.

        Parameters
        ----------
        nbytes : int
            Its size in bytes.
        area : str
            What it is, for messages.

        Raises
        ------
        FormatError
            If the file has fewer bytes (rule Truncated).
        """
        self._require(nbytes, area)
        self._area = area
        self._end = self.at + nbytes

    def take(self, nbytes: int, what: str) -> bytes:
        """Read the next bytes.

        Parameters
        ----------
        nbytes : int
            How many.
        what : str
            What they are, for messages.

        Returns
        -------
        bytes
            Exactly so many.

        Raises
        ------
        FormatError
            If fewer are left (rule Truncated); nothing is allocated then.
        """
        if nbytes > self._end - self.at:
            self._require(nbytes, what)
        start = self.at - self._base
        stop = start + nbytes
        if start < 0 or stop > len(self._buffer):
            start, stop = self._fill(nbytes)
        self.at += nbytes
        return self._buffer[start:stop]

    def _fill(self, nbytes: int) -> tuple[int, int]:
        """Move the window here, and return where the next bytes are in it."""
        is_next = self._base <= self.at <= self._base + len(self._buffer)
        self._window = min(2 * self._window, _LARGEST_WINDOW) if is_next else _SMALLEST_WINDOW
        size = max(nbytes, min(self._window, self.left))
        self._buffer = bytes(self._source.read(self.at, size))
        self._base = self.at
        return 0, nbytes

    def number(self, kind: Struct, what: str) -> int:
        """Read the next number.

        Parameters
        ----------
        kind : struct.Struct
            Of one integer.
        what : str
            What it is, for messages.

        Returns
        -------
        int
            The number.

        Raises
        ------
        FormatError
            If fewer bytes are left (rule Truncated).
        """
        found: int = kind.unpack(self.take(kind.size, what))[0]
        return found

    def skip(self, nbytes: int, what: str) -> None:
        """Go on behind the next bytes without reading them.

        Parameters
        ----------
        nbytes : int
            How many.
        what : str
            What they are, for messages.

        Raises
        ------
        FormatError
            If fewer are left (rule Truncated).
        """
        self._require(nbytes, what)
        self.at += nbytes

    def _require(self, nbytes: int, what: str) -> None:
        if nbytes > self.left:
            raise FormatError(
                f"{what}: {nbytes} bytes, but {self.left} are left of {self._area}",
                offset=self.at,
                rule="Truncated",
            )
