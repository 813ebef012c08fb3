"""Little-endian fields of a file, one after the other, each within bounds that are known."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from xckpt.errors import FormatError

if TYPE_CHECKING:
    from xckpt.formats import Readable

__all__ = ["U32", "U64", "Cursor"]

U32, U64 = Struct("<I"), Struct("<Q")


class Cursor:
    """Reads a file from its start, a window at a time.

    Parameters
    ----------
    source : Readable
        The file.
    window : int
        How many bytes to read at once, where a field does not need more.
    """

    __slots__ = ("_area", "_base", "_buffer", "_end", "_source", "at", "window")

    def __init__(self, source: Readable, window: int) -> None:
        self._source = source
        self._buffer = b""
        self._base = 0
        self._area = "the file"
        self._end = source.size
        self.at = 0
        self.window = window

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
        size = max(nbytes, min(self.window, self.left))
        self._buffer = bytes(self._source.read(self.at, size))
        self._base = self.at
        return 0, nbytes

    def number(self, kind: Struct, what: str) -> int:
        """Read the next number.

        Parameters
        ----------
        kind : struct.Struct
            `U32` or `U64`.
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
