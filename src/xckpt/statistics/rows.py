"""How many rows of a tensor are all zeros, found while its elements pass by once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RowCount"]


class RowCount:
    """Counts rows without any element but zeros; those that were seen in part wait for the rest.

    Parameters
    ----------
    length : int
        Elements in a row.
    """

    __slots__ = ("dead", "length", "open")

    def __init__(self, length: int) -> None:
        self.length = length
        self.dead = 0
        #: By number of the row: how many of its elements were seen, whether one was not zero.
        self.open: dict[int, tuple[int, bool]] = {}

    def add(self, start: int, count: int, alive: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Add a run of elements."""
        first, last = start // self.length, (start + count - 1) // self.length
        if first == last:
            self._see(first, count, alive=bool(alive[0]))
            return
        self._see(first, (first + 1) * self.length - start, alive=bool(alive[0]))
        self._see(last, start + count - last * self.length, alive=bool(alive[-1]))
        self.dead += len(alive) - 2 - int(np.count_nonzero(alive[1:-1]))

    def add_alive(self, start: int, count: int) -> None:
        """Add a run of elements none of which is zero."""
        first, last = start // self.length, (start + count - 1) // self.length
        if first == last:
            self._see(first, count, alive=True)
        else:
            self._see(first, (first + 1) * self.length - start, alive=True)
            self._see(last, start + count - last * self.length, alive=True)

    def update(self, dead: int, unfinished: Mapping[int, tuple[int, bool]]) -> None:
        """Add what another count found in other elements of the same tensor."""
        self.dead += dead
        for row, (seen, alive) in unfinished.items():
            self._see(row, seen, alive=alive)

    def _see(self, row: int, count: int, *, alive: bool) -> None:
        seen, before = self.open.pop(row, (0, False))
        if seen + count < self.length:
            self.open[row] = (seen + count, alive or before)
        elif not (alive or before):
            self.dead += 1
