"""Compiled loops over blocks of elements.

A loop with one purpose is vectorised by LLVM; several in one body are not, and take ten times as
long, unless they are written as vectors. They run one after another on leaves of `LEAF` elements,
which stay in the L2 cache.

Floating-point sums are never reassociated: they are kept in `LANES` accumulators, a vector
operation whatever the width of the machine's vectors is. So all machines get the same bits.

Elements of 8 and 16 bits are only counted by their bit patterns.

The first use of a type shall not take long. Each function is optimised again within whatever calls
it, so calls are nested but once, and what is called in one place is inlined. Each access to an
array costs about a millisecond of compiling, each loop that is vectorised ten.
"""

# min and max are compiled anew for each type, and take longer than what they are called in.
# ruff: noqa: FURB136

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from xckpt.arrays.compiling import compiled, generated, inlined, within
from xckpt.statistics import moments
from xckpt.statistics.moments import LEAF

LANES = 256
#: Rows of lanes that are added before they reach the accumulators.
ROWS = 4
#: Lanes that are added at a time: their sums are a line of the cache.
WIDTH = 8
#: One row of lanes in so many is enough to find where the elements of a leaf are about.
SAMPLED = 8
#: Counters that are looked through together, or not at all: two to this power.
PAGE_BITS = 6
PAGE = 1 << PAGE_BITS
_ONE = np.uint32(1)
# Elements between looks at whether all are still the same.
_STRIDE = 1024


# numba looks at the time of this file only to tell whether what it keeps is still right: whoever
# changes `moments.merged` touches this file as well.
_merged = inlined(moments.merged)


@within
def _are_equal(bits: Any) -> Any:
    """Return whether all patterns are the same; looks no farther than it must."""
    for start in range(0, bits.size, _STRIDE):
        part = bits[start : start + _STRIDE]
        different = part[0] ^ bits[0]
        for i in range(part.size):
            different |= part[i] ^ bits[0]
        if different:
            return False
    return True


class _Vectors:
    """Writes operations on vectors of elements, and on counters, for LLVM."""

    word = ir.IntType(64)
    doubles = ir.VectorType(ir.DoubleType(), WIDTH)

    def __init__(self, builder: Any, element: Any, bits: int) -> None:
        self.builder = builder
        self.bits = bits
        self.floats = ir.VectorType(element, WIDTH)
        self.patterns = ir.VectorType(ir.IntType(bits), WIDTH)

    def place(self, base: Any, index: Any, more: int, kind: Any) -> Any:
        """Return the address of what begins at an element of an array."""
        builder = self.builder
        address = builder.gep(base, [builder.add(index, self.word(more))])
        return builder.bitcast(address, kind.as_pointer())

    def repeated(self, scalar: Any, kind: Any) -> Any:
        """Return a vector of one number."""
        single = self.builder.insert_element(kind(ir.Undefined), scalar, self.word(0))
        first = ir.VectorType(ir.IntType(32), WIDTH)(None)
        return self.builder.shuffle_vector(single, single, first)

    def powers(self, places: Any, center: Any) -> Any:
        """Return the sums of powers of some vectors, and their patterns."""
        builder = self.builder
        rows = [builder.load(each, align=self.bits // 8) for each in places]
        wide = rows if self.bits == 64 else [builder.fpext(row, self.doubles) for row in rows]
        first = [builder.fsub(row, center) for row in wide]
        second = [builder.fmul(d, d) for d in first]
        third = [builder.fmul(d, dd) for d, dd in zip(first, second, strict=True)]
        fourth = [builder.fmul(dd, dd) for dd in second]
        sums = [
            builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
            for a, b, c, d in (first, second, third, fourth)
        ]
        return sums, [builder.bitcast(row, self.patterns) for row in rows]

    def count(self, elements: Any, index: Any, shift: Any, tables: Any) -> None:
        """Count the codes of as many elements as a vector has, in two tables by turns."""
        builder = self.builder
        for k in range(0, WIDTH, 64 // self.bits):
            # Two float32 are one word.
            pair = builder.load(self.place(elements, index, k, self.word), align=self.bits // 8)
            codes = [builder.lshr(builder.and_(pair, self.word((1 << self.bits) - 1)), shift)]
            if self.bits == 32:
                codes.append(builder.lshr(pair, builder.add(shift, self.word(32))))
            for n, code in enumerate(codes):
                counter = builder.gep(tables[(k + n) % 2], [code])
                builder.store(builder.add(builder.load(counter), ir.IntType(32)(1)), counter)

    def farther(self, n: int, a: Any, b: Any) -> Any:
        """Return the larger with a sign, the larger without, or the smaller without."""
        compare = self.builder.icmp_unsigned if n else self.builder.icmp_signed
        return self.builder.select(compare("<" if n == 2 else ">", a, b), a, b)


@generated
def _total(_: Any, lanes: Any, first: Any) -> Any:
    """Return the sum of as many lanes: the upper half is added to the lower, again and again."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        base = context.make_array(lanes)(context, builder, args[0]).data
        to = _Vectors(builder, ir.DoubleType(), 64)
        places = [to.place(base, args[1], lane, to.doubles) for lane in range(0, LANES, WIDTH)]
        halves = [builder.load(each, align=8) for each in places]
        while len(halves) > 1:
            middle = len(halves) // 2
            both = zip(halves[:middle], halves[middle:], strict=True)
            halves = [builder.fadd(lower, upper) for lower, upper in both]
        vector, width = halves[0], WIDTH
        while width > 1:
            width //= 2
            order = ir.VectorType(ir.IntType(32), WIDTH)(
                [(k + width) % WIDTH for k in range(WIDTH)]
            )
            vector = builder.fadd(vector, builder.shuffle_vector(vector, vector, order))
        return builder.extract_element(vector, to.word(0))

    return types.float64(lanes, first), generate


@generated
def _sample(_: Any, x: Any, rows: Any, lanes: Any) -> Any:
    """Add up rows of lanes, one in so many of a leaf."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        elements, sums = (
            context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 2)
        )
        bits = x.dtype.bitwidth
        to = _Vectors(builder, context.get_data_type(x.dtype), bits)
        with cgutils.for_range(builder, to.word(LANES // WIDTH)) as step:
            lane = builder.mul(step.index, to.word(WIDTH))
            total = cgutils.alloca_once_value(builder, to.doubles(None))
            builder.store(to.doubles(None), total)
            with cgutils.for_range(builder, args[1]) as row:
                at = builder.add(lane, builder.mul(row.index, to.word(SAMPLED * LANES)))
                floats = builder.load(to.place(elements, at, 0, to.floats), align=bits // 8)
                wide = floats if bits == 64 else builder.fpext(floats, to.doubles)
                builder.store(builder.fadd(builder.load(total), wide), total)
            place = to.place(sums, lane, 0, to.doubles)
            builder.store(builder.load(total), place, align=8)
        return context.get_dummy_value()

    return types.none(x, rows, lanes), generate


@within
def _center(x: Any, is_constant: Any, sums: Any) -> Any:
    """Return the element that all are, or else a number not far from their mean."""
    if is_constant:
        return np.float64(x[0])
    if x.size < LANES:
        total = np.float64(0.0)
        for i in range(x.size):
            total += x[i]
        return total / x.size
    # Within three standard deviations of the mean.
    rows = (x.size - LANES) // (SAMPLED * LANES) + 1
    _sample(x, rows, sums)
    return _total(sums, 0) / (rows * LANES)


@generated
def _add_groups(  # noqa: PLR0917
    _: Any, x: Any, groups: Any, center: Any, sums: Any, shift: Any, one: Any, other: Any
) -> Any:
    """Add the first four powers of the distances from a number, of whole groups of rows.

    Unless the tables are None, count the codes of these elements as well, and return three of them
    as patterns: the largest with a sign, and the largest and the smallest without.

    LLVM makes vectors of loops of one purpose only. But arithmetic costs next to nothing where it
    is mixed with counting, which waits for memory. There are two tables because what was counted
    just now is still on its way.
    """
    bits = x.dtype.bitwidth
    integers = [types.Integer.from_bitwidth(bits, signed=n == 0) for n in range(3)]
    result = types.none if one == types.none else types.Tuple(integers)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, groups, center, _, shift, _, _ = args
        elements, lanes, *tables = (
            context.make_array(each)(context, builder, arg).data
            for each, arg in zip(signature.args, args, strict=True)
            if isinstance(each, types.Array)
        )
        to = _Vectors(builder, context.get_data_type(x.dtype), bits)
        cgutils.memset(builder, lanes, to.word(4 * LANES * 8), 0)
        center, extremes = to.repeated(center, to.doubles), []
        if tables:
            shift = builder.zext(shift, to.word) if bits < 64 else shift
            first = to.place(elements, to.word(0), 0, ir.IntType(bits))
            start = to.repeated(builder.load(first), to.patterns)
            extremes = [cgutils.alloca_once_value(builder, start) for _ in range(3)]
        with (
            cgutils.for_range(builder, groups) as group,
            cgutils.for_range(builder, to.word(LANES // WIDTH)) as step,
        ):
            row = builder.mul(group.index, to.word(ROWS * LANES))
            lane = builder.mul(step.index, to.word(WIDTH))
            first, next_codes = (
                builder.add(row, lane),
                builder.add(row, builder.mul(lane, to.word(ROWS))),
            )
            places = [to.place(elements, first, k * LANES, to.floats) for k in range(ROWS)]
            powers, patterns = to.powers(places, center)
            for n, power in enumerate(powers):
                total = to.place(lanes, lane, n * LANES, to.doubles)
                builder.store(builder.fadd(builder.load(total, align=8), power), total, align=8)
                # Mixed finely, or else neither has anything to do while the other is at work.
                if tables:
                    to.count(elements, builder.add(next_codes, to.word(n * WIDTH)), shift, tables)
            for n, kept in enumerate(extremes):
                for each in patterns:
                    builder.store(to.farther(n, builder.load(kept), each), kept)
        if not tables:
            return context.get_dummy_value()
        found = []
        for n, kept in enumerate(extremes):
            vector = builder.load(kept)
            each = [builder.extract_element(vector, to.word(k)) for k in range(WIDTH)]
            found.append(reduce(partial(to.farther, n), each))
        return context.make_tuple(builder, signature.return_type, found)

    return result(x, groups, center, sums, shift, one, other), generate


@within
def _describe(x: Any, center: Any, sums: Any, node: Any) -> None:
    """Write count, mean in two parts and central sums of powers; see `moments.Moments`.

    The powers of whole groups of rows are in `sums` already.
    """
    size = x.size
    last = size // (ROWS * LANES) * ROWS * LANES
    for i in range(last, size):
        j = (i - last) & (LANES - 1)
        a = np.float64(x[i]) - center
        aa = a * a
        sums[j] += a
        sums[LANES + j] += aa
        sums[2 * LANES + j] += a * aa
        sums[3 * LANES + j] += aa * aa
    s1, s2 = _total(sums, 0), _total(sums, LANES)
    s3, s4 = _total(sums, 2 * LANES), _total(sums, 3 * LANES)
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


@within
def _count(bits: Any, how: Any, tables: Any) -> Any:
    """Count the upper bits of each element of a leaf; return whether any has the code of a zero.

    It is their number, or twice that where there is no minus zero.
    """
    shift, minus = how
    # Two tables by turns: what was counted just now is still on its way to memory.
    one, other, pages = tables
    before = one[0] + other[0] + one[minus] + other[minus]
    if bits.size == LEAF:
        for i in range(0, LEAF, 4):
            one[bits[i] >> shift] += _ONE
            other[bits[i + 1] >> shift] += _ONE
            one[bits[i + 2] >> shift] += _ONE
            other[bits[i + 3] >> shift] += _ONE
        for i in range(pages.size):
            pages[i] = True
    else:
        for i in range(bits.size):
            code = bits[i] >> shift
            one[code] += _ONE
            pages[code >> PAGE_BITS] = True
    return one[0] + other[0] + one[minus] + other[minus] - before


@compiled
def count_codes(bits: Any, how: Any, tables: Any, zeros: Any) -> None:
    """Count the codes of a block in two tables; mark the pages they are on.

    `zeros` gets, of each leaf, what `_count` returns.
    """
    for leaf in range((bits.size + LEAF - 1) // LEAF):
        zeros[leaf] = _count(bits[leaf * LEAF : (leaf + 1) * LEAF], how, tables)


@compiled
def drain(one: Any, other: Any, pages: Any, codes: Any, counts: Any) -> Any:
    """Move what was counted out of the tables: codes, ascending, and how often each occurs."""
    found = 0
    for page in range(pages.size):
        if pages[page]:
            pages[page] = False
            for code in range(page * PAGE, (page + 1) * PAGE):
                count = one[code] + other[code]
                if count:
                    codes[found] = code
                    counts[found] = count
                    one[code] = 0
                    other[code] = 0
                    found += 1
    return found


@compiled
def describe_floats(x: Any, unsigned: Any, how: Any, tables: Any, out: Any) -> Any:
    """Describe a block of float32 or float64, and count its codes as `count_codes` does.

    A count of -1 is of a leaf that needs another look: some element is not finite, or fourth powers
    leave the range of float64. Returns how many these are.
    """
    (shift, minus), magnitude, least, most, infinity = how
    one, other, pages = tables
    zeros, nodes, extremes, sums = out
    rare = 0
    for leaf in range((x.size + LEAF - 1) // LEAF):
        values = x[leaf * LEAF : (leaf + 1) * LEAF]
        bits = unsigned[leaf * LEAF : (leaf + 1) * LEAF]
        before = one[0] + other[0] + one[minus] + other[minus]
        center = _center(values, _are_equal(bits), sums)
        groups = values.size // (ROWS * LANES)
        top, farthest, nearest = _add_groups(values, groups, center, sums, shift, one, other)
        for i in range(groups * ROWS * LANES, values.size):
            one[bits[i] >> shift] += _ONE
            key = extremes.dtype.type(bits[i])
            top = key if key > top else top
            farthest = bits[i] if bits[i] > farthest else farthest
            nearest = bits[i] if bits[i] < nearest else nearest
        if values.size == LEAF:
            for i in range(pages.size):
                pages[i] = True
        else:
            for i in range(values.size):
                pages[(bits[i] >> shift) >> PAGE_BITS] = True
        zeros[leaf] = one[0] + other[0] + one[minus] + other[minus] - before
        # Keys are integers in the order of the floats. Without a sign, the largest pattern is that
        # of the float farthest below zero, if there is one.
        low, end = extremes.dtype.type(farthest), extremes.dtype.type(nearest)
        low, high = (low ^ magnitude if low < 0 else end), (top if top >= 0 else end ^ magnitude)
        largest = high if high > ~low else ~low
        if largest < infinity:
            extremes[0] = low if low < extremes[0] else extremes[0]
            extremes[1] = high if high > extremes[1] else extremes[1]
        if largest >= most or 0 < largest < least:
            nodes[leaf, 0] = -1.0
            rare += 1
        else:
            _describe(values, center, sums, nodes[leaf])
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
        _add_groups(floats, floats.size // (ROWS * LANES), center, sums, 0, None, None)
        _describe(floats, center, sums, nodes[leaf])
        _move(nodes[leaf], low)


@inlined
def _move(node: Any, low: Any) -> None:
    """Add an integer to the mean of a leaf, with all its bits."""
    upper = np.float64(low >> np.uint64(32)) * 4294967296.0
    lower = np.float64(np.uint64(low) & np.uint64(0xFFFFFFFF))
    total = upper + lower
    rest = lower - (total - upper)
    high = total + node[1]
    back = high - total
    rest += (total - (high - back)) + (node[1] - back)
    node[1] = high
    node[2] += rest


# --- merging, rows, intervals -------------------------------------------------------------------


@compiled
def find_zeros(  # noqa: PLR0917
    bits: Any, magnitude: Any, start: Any, length: Any, zeros: Any, alive: Any
) -> Any:
    """Count the zeros of each leaf that may have some; return how many of all are negative.

    Marked are rows of a length, if that is not 0, in which there is an element other than zero.
    """
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
    at = 0
    while at < bits.size:
        row, column = (start + at) // length, (start + at) % length
        stop = min(bits.size, at + length - column)
        # In pieces that stay in the cache.
        for piece in range(at, stop, LEAF):
            part = bits[piece : min(stop, piece + LEAF)]
            begin = column + piece - at
            _raise(columns[begin : begin + part.size], part, magnitude)
            rows[row - first] = max(rows[row - first], _largest(part, magnitude))
        at = stop


@compiled
def fold(nodes: Any, count: Any) -> None:
    """Merge neighbours until one node is left, in the first row; `count` is a power of two.

    All have elements, and one power of two: see `moments.merge`.
    """
    while count > 1:
        count //= 2
        for i in range(count):
            a, b, c = nodes[2 * i], nodes[2 * i + 1], nodes[i]
            c[0], c[1], c[2], c[3], c[4], c[5] = _merged(
                a[0], a[1], a[2], a[3], a[4], a[5], b[0], b[1], b[2], b[3], b[4], b[5]
            )


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
