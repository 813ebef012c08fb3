"""The elements of a tensor as a flat sequence, read block by block in the order they are stored.

A reader pickles by reference, so that a task on another machine opens the file itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from xckpt.statistics.chunked import ChunkedTensor
    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.workspace import Workspace

__all__ = ["Reader", "share"]


class Reader(ABC):
    """A tensor as a flat sequence.

    Attributes
    ----------
    kind : Kind
        Of the elements that `blocks` gives.
    size : int
        Number of elements, implied zeros of a sparse tensor included.
    nbytes : int
        What there is to read, for the progress.
    row : int
        Elements in a row, which is a slice along the axis that is stored slowest; 0 where there
        is but one axis.
    whole : bool
        Whether reading a part costs as much as reading all.
    local : bool
        Whether the elements are in the memory of this process.
    place : tuple of (str, int)
        File and offset, to read in this order.
    identity : tuple or None
        What it depends on but for the file; None where it has none that lasts.
    """

    kind: Kind
    size: int
    nbytes: int
    row: int
    whole = False
    local = False
    place: tuple[str, int] = ("", 0)
    identity: tuple[Any, ...] | None = None

    @abstractmethod
    def blocks(
        self, start: int, stop: int, workspace: Workspace
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Read some of the elements."""


def share(tensor: Reader | ChunkedTensor, start: int, stop: int) -> int:
    """Return how many of the bytes of a tensor a range of its elements counts for."""
    if not tensor.size:
        return tensor.nbytes
    return tensor.nbytes * stop // tensor.size - tensor.nbytes * start // tensor.size
