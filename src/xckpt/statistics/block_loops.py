"""Compiled loops over blocks of elements: counts, moments, zeros, channels, intervals.

Blocks are taken apart into leaves of `LEAF` elements, which stay in the L2 cache while one loop
after another runs over them. Several loops with one purpose each are faster than one with several,
because LLVM vectorises only the former; `vector_kernel` has the exception.

Floating-point sums are never reassociated: `LANES` accumulators are summed up in a fixed order. So
all machines compute the same bits. Elements of 8 and 16 bits are only counted.

The first use of a type has to compile its loops, and must not take long. Each function is optimised
once more within each of its callers, so calls are nested only once, and functions with one caller
are inlined. Each access to an array costs about a millisecond of compiling, each vectorised loop
ten.

References for merging moments: Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances" (1979); Pébay, "Formulas for robust, one-pass parallel computation
of covariances and arbitrary-order statistical moments" (SAND2008-6212), for the third and fourth.
"""

# numba compiles min and max anew for each type, which takes longer than the rest of a loop.
# ruff: noqa: FURB136

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xckpt.arrays.compiling import compiled, inlined, within
from xckpt.arrays.streams import LEAF
from xckpt.statistics.vector_kernel import (
    LANES,
    ROWS,
    PreferVectors,
    add_and_count,
    add_powers,
    count_patterns,
)

#: Every so many rows of lanes, one is used to estimate the mean of a leaf.
SAMPLED = 8
#: Counters that are drained together, or skipped together: two to this power.
PAGE_BITS = 6
PAGE = 1 << PAGE_BITS
_ONE = np.uint32(1)
# Elements that are compared before the result is looked at.
_STRIDE = 1024


# --- moments --------------------------------------------------------------------------------------

# numba compiles a cached function again when its own file changes, and ignores the files of the
# functions that it calls. Touch this file after a change of `vector_kernel`.

#: Number of elements; mean in two parts, because the difference of two large, nearly equal means
#: would lose its digits; sums of the second to fourth powers of the distances from the mean; and
#: exponent of the power of two by which the elements were divided.
Moments = tuple[float, float, float, float, float, float, float]

EMPTY: Moments = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def merge(a: Moments, b: Moments) -> Moments:
    """Return the moments of the concatenation of two sequences."""
    na, ha, la, a2, a3, a4, scale = a
    nb, hb, lb, b2, b3, b4, scale_b = b
    if na == 0.0:
        return b
    if nb == 0.0:
        return a
    if scale != scale_b and ha == la == a2 == 0.0:
        scale = scale_b  # zeros fit any power of two
    elif scale != scale_b and not hb == lb == b2 == 0.0:
        f = math.ldexp(1.0, -int(abs(scale - scale_b)))
        if scale < scale_b:
            ha, la, a2, a3, a4 = ha * f, la * f, a2 * f * f, a3 * f * f * f, a4 * f * f * f * f
            scale = scale_b
        else:
            hb, lb, b2, b3, b4 = hb * f, lb * f, b2 * f * f, b3 * f * f * f, b4 * f * f * f * f
    return *merged(na, ha, la, a2, a3, a4, nb, hb, lb, b2, b3, b4), scale


def merged(  # noqa: PLR0917
    na: float, ha: float, la: float, a2: float, a3: float, a4: float,
    nb: float, hb: float, lb: float, b2: float, b3: float, b4: float,
) -> tuple[float, float, float, float, float, float]:  # fmt: skip
    """Return the moments of two sequences that are not empty and have the same power of two."""
    n = na + nb
    ra, rb = na / n, nb / n
    delta = (hb - ha) + (lb - la)
    step = delta * delta * ra * rb
    lower = la + delta * rb
    high = ha + lower
    low = lower - (high - ha)
    m2 = a2 + b2 + step * n
    m3 = a3 + b3 + step * delta * (na - nb) + 3.0 * delta * (ra * b2 - rb * a2)
    m4 = (
        a4
        + b4
        + step * delta * delta * n * (ra * ra - ra * rb + rb * rb)
        + 6.0 * delta * delta * (ra * ra * b2 + rb * rb * a2)
        + 4.0 * delta * (ra * b3 - rb * a3)
    )
    return n, high, low, m2, m3, m4


_merged = inlined(merged)


@inlined
def _are_equal(bits: Any) -> Any:
    """Return whether all patterns are equal; stop soon after the first difference."""
    for start in range(0, bits.size, _STRIDE):
        part = bits[start : start + _STRIDE]
        different = part[0] ^ bits[0]
        for i in range(part.size):
            different |= part[i] ^ bits[0]
        if different:
            return False
    return True


@within
def _add_up(lanes: Any) -> Any:
    """Add up accumulators in the first of them: the upper half to the lower one, repeatedly."""
    width = LANES
    while width > 1:
        width //= 2
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
    return lanes[0]


@inlined
def _center(x: Any, is_constant: Any, sums: Any) -> Any:
    """Return the element of a constant leaf, or else a number close to the mean."""
    # Distances from it have small powers. Any number is correct; the mean of a sample is within
    # three standard deviations of the mean of all.
    if is_constant:
        return np.float64(x[0])
    if x.size < LANES:
        total = np.float64(0.0)
        for i in range(x.size):
            total += x[i]
        return total / x.size
    rows = (x.size - LANES) // (SAMPLED * LANES) + 1
    for lane in range(LANES):
        sums[lane] = x[lane]
    for row in range(1, rows):
        for lane in range(LANES):
            sums[lane] += x[row * SAMPLED * LANES + lane]
    return _add_up(sums[:LANES]) / (rows * LANES)


@inlined
def _describe(x: Any, center: Any, sums: Any, node: Any) -> None:
    """Write `Moments`, from the powers of distances from `center` in whole groups."""
    size = x.size
    last = size // (ROWS * LANES) * ROWS * LANES
    for i in range(last, size):
        lane = (i - last) & (LANES - 1)
        a = np.float64(x[i]) - center
        aa = a * a
        sums[lane] += a
        sums[LANES + lane] += aa
        sums[2 * LANES + lane] += a * aa
        sums[3 * LANES + lane] += aa * aa
    for first in range(0, 4 * LANES, LANES):
        _add_up(sums[first : first + LANES])
    s1, s2, s3, s4 = sums[0], sums[LANES], sums[2 * LANES], sums[3 * LANES]
    n = np.float64(size)
    m = s1 / n
    m2 = s2 - m * s1
    m4 = s4 - 4.0 * m * s3 + 6.0 * m * m * s2 - 3.0 * m * m * m * s1
    node[0] = n
    node[1] = center
    node[2] = m
    node[3] = m2 if m2 > 0.0 else 0.0
    node[4] = s3 - 3.0 * m * s2 + 2.0 * m * m * s1
    node[5] = m4 if m4 > 0.0 else 0.0
    node[6] = 0.0


@PreferVectors
@compiled
def describe_floats(  # noqa: PLR0917  compiled functions take no keywords
    x: Any, bits: Any, limits: Any, tables: Any, out: Any, plain: Any
) -> Any:
    """Describe and count a block of floats; return the number of leaves that need special care."""
    # Special care: an element is not finite, or fourth powers leave the range of float64. The node
    # of such a leaf gets a count of -1. The last entry of the numbers of zeros receives their sum.
    (shift, minus), magnitude, least, most, infinity = limits
    even, odd, pages = tables
    zeros, nodes, extremes, sums = out
    rare, total = 0, np.int64(0)
    for leaf in range((x.size + LEAF - 1) // LEAF):
        values = x[leaf * LEAF : (leaf + 1) * LEAF]
        patterns = bits[leaf * LEAF : (leaf + 1) * LEAF]
        before = even[0] + odd[0] + even[minus] + odd[minus]
        center = _center(values, _are_equal(patterns), sums)
        if plain is None:
            groups = values.size // (ROWS * LANES)
            ends = add_and_count(values, groups, center, sums, shift, even, odd, plain)
            counted = groups * ROWS * LANES
        else:
            add_powers(values, center, sums)
            ends = (patterns[0], patterns[0], patterns[0])
            counted = 0
        top, farthest, nearest = count_patterns(patterns, counted, shift, even, ends)
        if values.size == LEAF:
            for page in range(pages.size):
                pages[page] = True
        else:
            for i in range(values.size):
                pages[(patterns[i] >> shift) >> PAGE_BITS] = True
        zeros[leaf] = even[0] + odd[0] + even[minus] + odd[minus] - before
        total += zeros[leaf]
        # Keys are signed integers in the order of the floats. The largest unsigned pattern belongs
        # to the smallest float, if any is negative.
        first, last = extremes.dtype.type(nearest), extremes.dtype.type(top)
        low = extremes.dtype.type(farthest)
        low = low ^ magnitude if low < 0 else first
        high = last if last >= 0 else first ^ magnitude
        largest = high if high > ~low else ~low
        if largest < infinity:
            extremes[0] = low if low < extremes[0] else extremes[0]
            extremes[1] = high if high > extremes[1] else extremes[1]
        if largest >= most or 0 < largest < least:
            nodes[leaf, 0] = -1.0
            rare += 1
        else:
            _describe(values, center, sums, nodes[leaf])
    zeros[zeros.size - 1] = total
    return rare


@compiled
def describe_integers(x: Any, out: Any) -> None:
    """Describe a block of integers of 32 or 64 bits."""
    nodes, extremes, tally, part, sums = out
    for leaf in range((x.size + LEAF - 1) // LEAF):
        values = x[leaf * LEAF : (leaf + 1) * LEAF]
        low = high = values[0]
        for i in range(values.size):
            low = values[i] if values[i] < low else low
            high = values[i] if values[i] > high else high
        extremes[0] = low if low < extremes[0] else extremes[0]
        extremes[1] = high if high > extremes[1] else extremes[1]
        lower = np.int64(0)
        upper = np.int64(0)
        for i in range(values.size):
            wide = np.uint64(values[i])
            lower += np.int64(wide & np.uint64(0xFFFFFFFF))
            upper += np.int64(values[i] >> np.uint64(32))
        tally[0] += lower
        tally[1] += upper
        # Distances from the smallest are exact where the elements as float64 are not.
        for i in range(values.size):
            part[i] = np.float64(np.uint64(values[i]) - np.uint64(low))
        floats = part[: values.size]
        center = _center(floats, low == high, sums)
        add_powers(floats, center, sums)
        _describe(floats, center, sums, nodes[leaf])
        _move(nodes[leaf], low)


@inlined
def _move(node: Any, low: Any) -> None:
    """Add an integer to the mean of a leaf, with all its bits."""
    upper = np.float64(low >> np.uint64(32)) * 4294967296.0
    lower = np.float64(np.uint64(low) & np.uint64(0xFFFFFFFF))
    total = upper + lower
    error = lower - (total - upper)
    high = total + node[1]
    back = high - total
    error += (total - (high - back)) + (node[1] - back)
    node[1] = high
    node[2] += error


# --- counts ---------------------------------------------------------------------------------------


@within
def _count(bits: Any, layout: Any, tables: Any) -> Any:
    """Count the codes of a leaf; return the number of codes of zeros, or twice that."""
    # Twice for types without a negative zero, whose code is counted as both.
    shift, minus = layout
    # Two tables by turns, so that equal neighbours do not wait for the counter of each other.
    even, odd, pages = tables
    before = even[0] + odd[0] + even[minus] + odd[minus]
    if bits.size == LEAF:
        for i in range(0, LEAF, 4):
            even[bits[i] >> shift] += _ONE
            odd[bits[i + 1] >> shift] += _ONE
            even[bits[i + 2] >> shift] += _ONE
            odd[bits[i + 3] >> shift] += _ONE
        for i in range(pages.size):
            pages[i] = True
    else:
        for i in range(bits.size):
            code = bits[i] >> shift
            even[code] += _ONE
            pages[code >> PAGE_BITS] = True
    return even[0] + odd[0] + even[minus] + odd[minus] - before


@compiled
def count_codes(bits: Any, layout: Any, tables: Any, zeros: Any) -> None:
    """Count the codes of a block in two tables; mark the used pages, and count zeros by leaf."""
    # `layout` is the number of bits below a code, and the code of a negative zero, or 0. The last
    # entry of `zeros` receives their sum.
    total = np.int64(0)
    for leaf in range((bits.size + LEAF - 1) // LEAF):
        zeros[leaf] = _count(bits[leaf * LEAF : (leaf + 1) * LEAF], layout, tables)
        total += zeros[leaf]
    zeros[zeros.size - 1] = total


@compiled
def drain(even: Any, odd: Any, pages: Any, codes: Any, counts: Any) -> Any:
    """Move counts out of the tables, in ascending order of codes; return the number of codes."""
    number = 0
    for page in range(pages.size):
        if pages[page]:
            pages[page] = False
            for code in range(page * PAGE, (page + 1) * PAGE):
                count = even[code] + odd[code]
                if count:
                    codes[number] = code
                    counts[number] = count
                    even[code] = 0
                    odd[code] = 0
                    number += 1
    return number


# --- merging, rows, intervals -------------------------------------------------------------------


@compiled
def find_zeros(  # noqa: PLR0917
    bits: Any, magnitude: Any, start: Any, length: Any, zeros: Any, alive: Any
) -> Any:
    """Count the zeros of each leaf whose entry in `zeros` is not 0; return the negative ones."""
    # Unless `length` is 0, mark in `alive` the rows of this length that have an element other than
    # zero. `magnitude` is the mask of all bits but the sign.
    negative = np.int64(0)
    for leaf in range((bits.size + LEAF - 1) // LEAF):
        part = bits[leaf * LEAF : (leaf + 1) * LEAF]
        first, last = leaf * LEAF, leaf * LEAF + part.size
        if zeros[leaf]:
            count, positive = np.int32(0), np.int32(0)
            for i in range(part.size):
                count = np.int32(count + np.int32((part[i] & magnitude) == 0))
                positive = np.int32(positive + np.int32(part[i] == 0))
            zeros[leaf] = count
            negative += np.int64(count - positive)
        if not length:
            continue
        for row in range((start + first) // length, (start + last - 1) // length + 1):
            if zeros[leaf] == 0:
                alive[row] = True
            i, stop = row * length - start, (row + 1) * length - start
            i, stop = (i if i > first else first), (stop if stop < last else last)
            while not alive[row] and i < stop:
                alive[row] = (bits[i] & magnitude) != 0
                i += 1
    return negative


@inlined
def _largest(bits: Any, magnitude: Any) -> Any:
    largest = bits[0] & magnitude
    for i in range(bits.size):
        largest = max(largest, bits[i] & magnitude)
    return largest


@inlined
def _raise(largest: Any, bits: Any, magnitude: Any) -> None:
    for i in range(bits.size):
        largest[i] = max(largest[i], bits[i] & magnitude)


@compiled
def largest_of_channels(  # noqa: PLR0917
    bits: Any, magnitude: Any, start: Any, length: Any, columns: Any, rows: Any
) -> None:
    """Find the largest magnitude, as a pattern, in each column and in each row of a block."""
    first = start // length
    position = 0
    while position < bits.size:
        row, column = (start + position) // length, (start + position) % length
        stop = min(bits.size, position + length - column)
        # Pieces stay in the cache.
        for piece in range(position, stop, LEAF):
            part = bits[piece : min(stop, piece + LEAF)]
            begin = column + piece - position
            _raise(columns[begin : begin + part.size], part, magnitude)
            rows[row - first] = max(rows[row - first], _largest(part, magnitude))
        position = stop


@compiled
def fold(nodes: Any, count: Any) -> None:
    """Merge neighbours until the first row of `nodes` has the node of all."""
    # `count` is a power of two. All nodes have elements, and the same scale; see `merge`.
    while count > 1:
        count //= 2
        for i in range(count):
            a, b, c = nodes[2 * i], nodes[2 * i + 1], nodes[i]
            c[0], c[1], c[2], c[3], c[4], c[5] = _merged(
                a[0], a[1], a[2], a[3], a[4], a[5], b[0], b[1], b[2], b[3], b[4], b[5]
            )


@compiled
def narrow(keys: Any, codes: Any, intervals: Any, shifts: Any, out: Any) -> None:
    """Count the elements in each of the equal parts of some intervals, for exact quantiles."""
    for i in range(keys.size):
        for k in range(shifts.size):
            code, low, high = intervals[0, k], intervals[1, k], intervals[2, k]
            if codes[i] == code and low <= keys[i] <= high:
                out[k, (keys[i] - low) >> shifts[k]] += 1
