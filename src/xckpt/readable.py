"""What a format needs of a file."""

from __future__ import annotations

from typing import Protocol


class Readable(Protocol):
    """A file that a format can read."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return exactly `nbytes` bytes; raise `FormatError` if the range exceeds the file."""

    def sibling(self, name: str) -> Readable:
        """Open a file in the same folder, or raise `FileNotFoundError`."""

    def folders(self) -> tuple[str, ...]:
        """Return the names of the folders next to the file; none if they cannot be listed."""
