"""Compiled loops over pairs of elements, which add up their differences."""

# numba compiles min and max anew for each type, which takes longer than compiling their callers.

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xckpt.arrays.compiling import compiled
from xckpt.arrays.streams import LEAF
from xckpt.statistics.vector_kernel import LANES

#: Number of sums of a leaf of pairs: the squares of the differences, the squares of each side, and
#: the products.
SUMS = 4
#: A sum of squares below this may have lost much of its precision to underflow.
TINY = 1e-250
# Number of elements to compare before checking whether two leaves are still the same.
_STRIDE = 1024


@compiled
def _widen(bits: Any, table: Any, out: Any) -> None:
    """Widen 16 bits to the patterns of float32, by a table or as the upper half of a float32."""
    if table.size:
        for i in range(bits.size):
            out[i] = table[bits[i]]
    else:
        for i in range(bits.size):
            out[i] = np.uint32(bits[i]) << np.uint32(16)


@compiled
def _are_equal(x: Any, y: Any) -> Any:
    """Return whether all elements are equal and not NaN; stop soon after the first difference."""
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
        # A finite number minus itself is zero; an infinity or NaN gives NaN.
        count = np.int32(count + np.int32((x[i] - x[i]) + (y[i] - y[i]) == 0))
    return count == x.size


@compiled
def _take_finite_pairs(x: Any, y: Any, out: Any, tally: Any) -> Any:
    """Copy pairs of finite elements to the front of `out`, tally the others; return the count."""
    count = 0
    for i in range(x.size):
        if math.isfinite(x[i]) and math.isfinite(y[i]):
            out[0, count] = x[i]
            out[1, count] = y[i]
            count += 1
        elif x[i] == y[i] or (math.isnan(x[i]) and math.isnan(y[i])):
            tally[0] += 1
        elif math.isnan(x[i]) or math.isnan(y[i]):
            tally[2] += 1
        else:
            tally[3] += 1
    return count


@compiled
def add_up(x: Any, y: Any, difference: Any, sums: Any) -> None:
    """Add up squares and products, and find the largest difference."""
    for j in range((SUMS + 1) * LANES):
        sums[j] = 0.0
    step = 2 * LANES
    aligned_size = x.size // step * step
    for row in range(0, aligned_size, step):
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
    for i in range(aligned_size, x.size):
        j = (i - aligned_size) % LANES
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
    """Add up the squares of one side, in the same order as `add_up`."""
    for j in range(LANES):
        sums[j] = 0.0
    step = 2 * LANES
    aligned_size = x.size // step * step
    for row in range(0, aligned_size, step):
        for j in range(LANES):
            a, p = np.float64(x[row + j]), np.float64(x[row + LANES + j])
            sums[j] += a * a + p * p
    for i in range(aligned_size, x.size):
        a = np.float64(x[i])
        sums[(i - aligned_size) % LANES] += a * a
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
def compare_floats(first: Any, second: Any, out: Any) -> Any:
    """Compare a block of pairs of floats; `out` receives the sums of each leaf and tallies them.

    Returns the number of leaves whose squares leave the range of float64, which have NaN.
    """
    nodes, tally, difference, finite_pairs, sums = out
    rare = 0
    size = max(first[0].size, first[1].size)
    for leaf in range((size + LEAF - 1) // LEAF):
        start, stop = leaf * LEAF, min(size, (leaf + 1) * LEAF)
        x = _floats(first, start, stop)
        y = _floats(second, start, stop)
        if _are_equal(x, y):
            _add_squares(x, sums)
            if sums[0] < math.inf and (x.itemsize == 4 or sums[0] > TINY):
                tally[0] += x.size
                tally[1] += x.size
                sums[LANES] = sums[2 * LANES] = sums[3 * LANES] = sums[0]
                sums[0] = 0.0
                _write(sums, 0, nodes[leaf])
                continue
        if not _all_finite(x, y):
            count = _take_finite_pairs(x, y, finite_pairs, tally)
            x, y = finite_pairs[0, :count], finite_pairs[1, :count]
        tally[0] += _count_equal(x, y)
        tally[1] += x.size
        _subtract(x, y, difference)
        add_up(x, y, difference, sums)
        tally[4] = max(tally[4], sums[SUMS * LANES])
        # Squares of float64 may leave the range. The caller recomputes these rare leaves, scaled.
        in_range = x.itemsize == 4 or TINY < sums[LANES] + sums[2 * LANES] < math.inf
        _write(sums, 0.0 if in_range else math.nan, nodes[leaf])
        rare += not in_range
    return rare


@compiled
def fold_sums(nodes: Any, count: Any) -> None:
    """Add neighbours until the first row of `nodes` has the sums of all, a power of two."""
    while count > 1:
        count //= 2
        for i in range(count):
            for k in range(SUMS):
                nodes[i, k] = nodes[2 * i, k] + nodes[2 * i + 1, k]


@compiled
def compare_cells(  # noqa: PLR0917
    x: Any, y: Any, along: Any, size: Any, block: Any, bases: Any, table: Any
) -> None:
    """Add up pairs by cells of lines of equal size; the first line starts at element `along`."""
    start = 0
    for line in range(bases.size):
        while start < x.size and along < size:
            cell = along // block
            stop = min(x.size, start + min(size, (cell + 1) * block) - along)
            equal, finite, nan, inf = 0, 0, 0, 0
            noise, first, second, product, largest = 0.0, 0.0, 0.0, 0.0, 0.0
            for k in range(start, stop):
                a, b = np.float64(x[k]), np.float64(y[k])
                if math.isfinite(a) and math.isfinite(b):
                    d = a - b
                    equal += d == 0
                    finite += 1
                    noise += d * d
                    first += a * a
                    second += b * b
                    product += a * b
                    largest = max(largest, abs(d))
                elif a == b or (math.isnan(a) and math.isnan(b)):
                    equal += 1
                elif math.isnan(a) or math.isnan(b):
                    nan += 1
                else:
                    inf += 1
            row = table[bases[line] + cell]
            row[0] += stop - start
            row[1] += equal
            row[2] += finite
            row[3] += nan
            row[4] += inf
            row[5] += noise
            row[6] += first
            row[7] += second
            row[8] += product
            row[9] = max(row[9], largest)
            along += stop - start
            start = stop
        along = 0
