"""How loops are compiled, and those that are not about one type: merging, rows, intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba

from xckpt.statistics import moments

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compiled", "fold", "inlined", "mark_rows", "merge", "narrow"]

LEAF = moments.LEAF


def compiled(function: Callable[..., Any]) -> Any:
    """Compile when first called, for the types that it is called with, and keep it on disk."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # there is no folder that a cache can be written to
        return numba.njit(nogil=True)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Make a function a part of the compiled ones that call it, which saves a compilation."""
    return numba.njit(nogil=True, inline="always")(function)


# numba looks at the time of this file only to tell whether what it keeps is still right: whoever
# changes `moments.merge` touches this file as well.
merge = compiled(moments.merge)


@compiled
def mark_rows(  # noqa: PLR0917
    bits: Any, magnitude: Any, start: Any, length: Any, zeros: Any, alive: Any
) -> None:
    """Mark the rows in which a block has an element other than zero."""
    for leaf in range((bits.size + LEAF - 1) // LEAF):
        first, last = leaf * LEAF, min(bits.size, (leaf + 1) * LEAF)
        for row in range((start + first) // length, (start + last - 1) // length + 1):
            if zeros[leaf] == 0:
                alive[row] = True
            i = max(first, row * length - start)
            stop = min(last, (row + 1) * length - start)
            while not alive[row] and i < stop:
                alive[row] = (bits[i] & magnitude) != 0
                i += 1


@compiled
def fold(nodes: Any, count: Any) -> None:
    """Merge neighbours until one node is left, in the first row; `count` is a power of two."""
    while count > 1:
        count //= 2
        for i in range(count):
            a = nodes[2 * i]
            b = nodes[2 * i + 1]
            merged = merge(
                (a[0], a[1], a[2], a[3], a[4], a[5], a[6]),
                (b[0], b[1], b[2], b[3], b[4], b[5], b[6]),
            )
            for j in range(7):
                nodes[i, j] = merged[j]


@compiled
def narrow(  # noqa: PLR0917
    keys: Any, codes: Any, slots: Any, intervals: Any, shifts: Any, out: Any
) -> None:
    """Count elements by where in certain intervals they are, for exact quantiles."""
    for i in range(keys.size):
        if slots[codes[i]]:
            for k in range(shifts.size):
                code, low, high = intervals[0, k], intervals[1, k], intervals[2, k]
                if codes[i] == code and low <= keys[i] <= high:
                    out[k, (keys[i] - low) >> shifts[k]] += 1
