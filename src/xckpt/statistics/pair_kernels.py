"""Compiled loops over blocks of two tensors at once: what `kernels` is for one.

As there, each loop has one purpose, runs over a leaf of `LEAF` elements that stay in the L2 cache,
and adds in a fixed number of accumulators, so that all machines get the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xckpt.statistics.compiled import compiled
from xckpt.statistics.kernels import LANES
from xckpt.statistics.moments import LEAF

__all__ = ["SUMS", "TINY", "add_up", "compare_floats"]

#: Sums of a leaf: of the squares of the differences, of those of both sides, and of the products.
SUMS = 4
# Elements between looks at whether two leaves are still the same.
_STRIDE = 1024
#: A sum of squares below this may have lost much of what is in it.
TINY = 1e-250


@compiled
def _widen(bits: Any, table: Any, out: Any) -> None:
    """Make float32, as patterns, of 16 bits: by a table, or of the upper half of a float32."""
    if table.size:
        for i in range(bits.size):
            out[i] = table[bits[i]]
    else:
        for i in range(bits.size):
            out[i] = np.uint32(bits[i]) << np.uint32(16)


@compiled
def _alike(x: Any, y: Any) -> Any:
    """Return whether all elements are equal, and none is a NaN; looks no farther than it must."""
    for start in range(0, x.size, _STRIDE):
        a, b = x[start : start + _STRIDE], y[start : start + _STRIDE]
        different = np.int32(0)
        for i in range(a.size):
            different = np.int32(different + np.int32(a[i] != b[i]))
        if different:
            return False
    return True


@compiled
def _count_equal(x: Any, y: Any) -> Any:
    count = np.int32(0)
    for i in range(x.size):
        count = np.int32(count + np.int32(x[i] == y[i]))
    return count


@compiled
def _subtract(x: Any, y: Any, difference: Any) -> None:
    for i in range(x.size):
        difference[i] = np.float64(x[i]) - np.float64(y[i])


@compiled
def _all_finite(x: Any, y: Any) -> Any:
    """Return whether no element is infinite or a NaN."""
    count = np.int32(0)
    for i in range(x.size):
        # What is finite is zero times itself.
        count = np.int32(count + np.int32((x[i] - x[i]) + (y[i] - y[i]) == 0))
    return count == x.size


@compiled
def _take_finite(x: Any, y: Any, out: Any, tally: Any) -> Any:
    """Move pairs of finite elements to the front of `out`; count the others."""
    kept = 0
    for i in range(x.size):
        if math.isfinite(x[i]) and math.isfinite(y[i]):
            out[0, kept] = x[i]
            out[1, kept] = y[i]
            kept += 1
        elif x[i] == y[i] or (math.isnan(x[i]) and math.isnan(y[i])):
            tally[0] += 1
        elif math.isnan(x[i]) or math.isnan(y[i]):
            tally[2] += 1
        else:
            tally[3] += 1
    return kept


@compiled
def add_up(x: Any, y: Any, difference: Any, sums: Any) -> None:
    """Add up squares and products, and find the largest difference."""
    for j in range((SUMS + 1) * LANES):
        sums[j] = 0.0
    step = 2 * LANES
    whole = x.size // step * step
    for row in range(0, whole, step):
        for j in range(LANES):
            d, e = difference[row + j], difference[row + LANES + j]
            sums[j] += d * d + e * e
            sums[SUMS * LANES + j] = max(sums[SUMS * LANES + j], abs(d), abs(e))
        for j in range(LANES):
            a, b = np.float64(x[row + j]), np.float64(y[row + j])
            p, q = np.float64(x[row + LANES + j]), np.float64(y[row + LANES + j])
            sums[LANES + j] += a * a + p * p
            sums[2 * LANES + j] += b * b + q * q
            sums[3 * LANES + j] += a * b + p * q
    for i in range(whole, x.size):
        j = (i - whole) % LANES
        a, b, d = np.float64(x[i]), np.float64(y[i]), difference[i]
        sums[j] += d * d
        sums[LANES + j] += a * a
        sums[2 * LANES + j] += b * b
        sums[3 * LANES + j] += a * b
        sums[SUMS * LANES + j] = max(sums[SUMS * LANES + j], abs(d))
    width = LANES
    while width > 1:
        width //= 2
        for j in range(width):
            for k in range(SUMS):
                sums[k * LANES + j] += sums[k * LANES + width + j]
            largest = max(sums[SUMS * LANES + j], sums[SUMS * LANES + width + j])
            sums[SUMS * LANES + j] = largest


@compiled
def _add_squares(x: Any, sums: Any) -> None:
    """Add up the squares of one side as `add_up` does."""
    for j in range(LANES):
        sums[j] = 0.0
    step = 2 * LANES
    whole = x.size // step * step
    for row in range(0, whole, step):
        for j in range(LANES):
            a, p = np.float64(x[row + j]), np.float64(x[row + LANES + j])
            sums[j] += a * a + p * p
    for i in range(whole, x.size):
        a = np.float64(x[i])
        sums[(i - whole) % LANES] += a * a
    width = LANES
    while width > 1:
        width //= 2
        for j in range(width):
            sums[j] += sums[width + j]


@compiled
def _write(sums: Any, exponent: Any, node: Any) -> None:
    for k in range(SUMS):
        node[k] = sums[k * LANES]
    node[SUMS] = exponent


@compiled
def _floats(side: Any, start: Any, stop: Any) -> Any:
    wide, bits, table, scratch = side
    if wide.size:
        return wide[start:stop]
    _widen(bits[start:stop], table, scratch.view(np.uint32))
    return scratch[: stop - start]


@compiled
def compare_floats(first: Any, second: Any, out: Any) -> None:
    """Describe a block of pairs of floats."""
    nodes, tally, largest, difference, kept, sums = out
    size = max(first[0].size, first[1].size)
    for leaf in range((size + LEAF - 1) // LEAF):
        start, stop = leaf * LEAF, min(size, (leaf + 1) * LEAF)
        x = _floats(first, start, stop)
        y = _floats(second, start, stop)
        if _alike(x, y):
            _add_squares(x, sums)
            if sums[0] < math.inf and (x.itemsize == 4 or sums[0] > TINY):
                tally[0] += x.size
                tally[1] += x.size
                sums[LANES] = sums[2 * LANES] = sums[3 * LANES] = sums[0]
                sums[0] = 0.0
                _write(sums, 0, nodes[leaf])
                continue
        if not _all_finite(x, y):
            count = _take_finite(x, y, kept, tally)
            x, y = kept[0, :count], kept[1, :count]
        tally[0] += _count_equal(x, y)
        tally[1] += x.size
        _subtract(x, y, difference)
        add_up(x, y, difference, sums)
        largest[0] = max(largest[0], sums[SUMS * LANES])
        # Squares of float64 may leave the range: whoever calls this scales that leaf, as is rare.
        in_range = x.itemsize == 4 or TINY < sums[LANES] + sums[2 * LANES] < math.inf
        _write(sums, 0.0 if in_range else math.nan, nodes[leaf])
