"""Compiled loops of the explanations: hashes, rounding, and how many pairs a relation holds for.

As in `xckpt.statistics.kernels` a loop has one purpose, so that LLVM vectorises it, and goes over
as few elements as stay in the cache.
"""

# min and max are compiled anew for each type.
# ruff: noqa: FURB136

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xckpt.arrays.compiling import compiled, within

# Elements whose hashes are in the cache, next to the weights and sums of their columns.
_PIECE = 1024
_MAGNITUDE, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC00000)

# --- hashes --------------------------------------------------------------------------------------


@within
def _weight(number: Any) -> Any:
    """Return an odd number for a row or column: the next ones of splitmix64."""
    x = (np.uint64(number) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@compiled
def weigh(weights: Any) -> None:
    """Write the weights of columns."""
    for column in range(weights.size):
        weights[column] = _weight(column)


@within
def _mix(words: Any, hashes: Any) -> None:
    """Hash words one by one: no two have one hash, and it has bits everywhere."""
    for i in range(words.size):
        h = np.uint64(words[i]) * np.uint64(0xD6E8FEB86659FD93)
        hashes[i] = h ^ (h >> np.uint64(32))


@within
def _mix_float32(words: Any, hashes: Any) -> None:
    for i in range(words.size):
        word = np.uint32(words[i])
        magnitude = word & _MAGNITUDE
        word = np.uint32(0) if magnitude == 0 else word
        word = _NAN if magnitude > _INFINITY else word
        h = np.uint64(word) * np.uint64(0xD6E8FEB86659FD93)
        hashes[i] = h ^ (h >> np.uint64(32))


@within
def _add_all(words: Any, hashes: Any, tally: Any) -> None:
    total, bits = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        total += hashes[i]
        bits |= np.uint64(words[i])
    tally[1] += total
    tally[2] |= bits


@within
def _product(hashes: Any, weights: Any) -> Any:
    total = np.uint64(0)
    for i in range(hashes.size):
        total += hashes[i] * weights[i]
    return total


@within
def _add(hashes: Any, factor: Any, sums: Any) -> None:
    for i in range(hashes.size):
        sums[i] += factor * hashes[i]


@compiled
def hash_rows(  # noqa: PLR0917
    words: Any, weights: Any, row: Any, column: Any, sums: Any, columns: Any, tally: Any
) -> None:
    """Add up hashes of a run of elements, which begins in a row and a column.

    The tally has those of all at their places, of all in any order, and all bits that are set.
    """
    memory = np.empty(_PIECE, np.uint64)
    line = 0
    for start in range(0, words.size, _PIECE):
        piece = words[start : start + _PIECE]
        hashes = memory[: piece.size]
        if words.itemsize == 4:
            _mix_float32(piece, hashes)
        else:
            _mix(piece, hashes)
        _add_all(piece, hashes, tally)
        at = 0
        while at < piece.size:
            stop = min(piece.size, at + weights.size - column)
            part = hashes[at:stop]
            sums[line] += _product(part, weights[column : column + part.size])
            if columns.size:
                factor = _weight(row + np.uint64(line))
                _add(part, factor, columns[column : column + part.size])
            column += part.size
            at = stop
            if column == weights.size:
                line += 1
                column = 0
    for line in range(sums.size):
        # Another weight, or a square matrix would have the hash of its transpose.
        tally[0] += _weight(row + np.uint64(line) + np.uint64(1 << 48)) * sums[line]


# --- pairs ---------------------------------------------------------------------------------------


@compiled
def move(x: Any, scale: Any, offset: Any, out: Any) -> None:
    """Multiply and add in float64, and round to float32."""
    for i in range(x.size):
        out[i] = np.float32(np.float64(x[i]) * scale + offset)


@compiled
def round_bfloat16(x: Any, out: Any) -> None:
    """Round float32, as patterns, to the nearest bfloat16; those halfway between two to even."""
    for i in range(x.size):
        bits = x[i]
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = (bits + half) & np.uint32(0xFFFF0000)
        out[i] = _NAN if bits & _MAGNITUDE > _INFINITY else rounded


@compiled
def round_small(  # noqa: PLR0917
    x: Any, scale: Any, smallest: Any, largest: Any, beyond: Any, out: Any
) -> None:
    """Round float32 to the nearest number of a type of few digits; what is beyond the largest too.

    The scale is 1.5 times the unit in the last place of float32 over that of the type.
    """
    highest = np.float32(2.0**64)
    bits = np.empty(_PIECE, np.uint32)
    unit = bits.view(np.float32)
    for start in range(0, x.size, _PIECE):
        part, to = x[start : start + _PIECE], out[start : start + _PIECE]
        patterns = part.view(np.uint32)
        for i in range(part.size):
            bits[i] = patterns[i] & _INFINITY
        for i in range(part.size):
            # The digits of the sum of a number and a much larger one are those of the type.
            power = unit[i] if unit[i] > smallest else smallest
            power = power if power < highest else highest  # or the sum is infinite
            large = power * scale
            rounded = (part[i] + large) - large
            rounded = beyond if rounded > largest else rounded
            to[i] = -beyond if rounded < -largest else rounded


@compiled
def count_same(x: Any, y: Any) -> Any:
    """Count pairs that are equal or both NaN, those others where `y` is 0, and zeros of `y`."""
    same: Any = 0
    masked: Any = 0
    zeros: Any = 0
    for start in range(0, x.size, _PIECE):
        a, b = x[start : start + _PIECE], y[start : start + _PIECE]
        equal, nothing = np.int32(0), np.int32(0)
        for i in range(a.size):
            equal = np.int32(equal + np.int32(a[i] == b[i]))
        for i in range(a.size):
            nothing = np.int32(nothing + np.int32(b[i] == 0))
        same += equal
        zeros += nothing
        if equal < a.size:
            for i in range(a.size):
                if a[i] != b[i]:
                    same += math.isnan(a[i]) and math.isnan(b[i])
                    masked += b[i] == 0
    return same, masked, zeros


# --- levels --------------------------------------------------------------------------------------

_LANES = 8
_MOST_LEVELS = 256


@within
def _count_off(x: Any, y: Any, low: Any, unit: Any, noise: Any) -> Any:
    """Count numbers whose level is not one of those of a unit, and those that are not near it."""
    per_unit = 1.0 / unit
    uneven, near = max(0.02, 4 * noise * per_unit), unit * 0.502 + noise
    off, far = np.int32(0), np.int32(0)
    for i in range(x.size):
        steps = (np.float64(y[i]) - low) * per_unit
        off = np.int32(off + np.int32(not abs(steps - np.rint(steps)) <= uneven))
    for i in range(x.size):
        error = abs(np.float64(x[i]) - np.float64(y[i]))
        far = np.int32(far + np.int32(not error <= near))
    return off, far


@within
def _smallest_gap(y: Any, noise: Any, ordered: Any) -> Any:
    """Return the smallest distance between numbers that is more than noise."""
    count = 0
    for i in range(y.size):
        value = np.float64(y[i])
        at = count
        while at > 0 and ordered[at - 1] > value:
            at -= 1
        if at > 0 and ordered[at - 1] == value:
            continue
        for k in range(count, at, -1):
            ordered[k] = ordered[k - 1]
        ordered[at] = value
        count += 1
    gap = math.inf
    for k in range(1, count):
        distance = ordered[k] - ordered[k - 1]
        if noise < distance < gap:
            gap = distance
    return gap


@within
def _extremes(y: Any, lows: Any, highs: Any) -> Any:
    whole = y.size // _LANES * _LANES
    for j in range(_LANES):
        lows[j] = highs[j] = np.float64(y[0])
    for row in range(0, whole, _LANES):
        for j in range(_LANES):
            value = np.float64(y[row + j])
            lows[j] = value if value < lows[j] else lows[j]
            highs[j] = value if value > highs[j] else highs[j]
    for i in range(whole, y.size):
        value = np.float64(y[i])
        lows[0] = value if value < lows[0] else lows[0]
        highs[0] = value if value > highs[0] else highs[0]
    for j in range(1, _LANES):
        lows[0] = lows[j] if lows[j] < lows[0] else lows[0]
        highs[0] = highs[j] if highs[j] > highs[0] else highs[0]
    return lows[0], highs[0]


@compiled
def count_levels(x: Any, y: Any, block: Any, spacing: Any) -> Any:  # noqa: C901  one of three ways
    """Count pairs where `y` is the nearest of the evenly spaced levels of its block to `x`.

    The levels are stored with a relative spacing. They are so few that they can be codes,
    and so far apart that rounding is not what makes them.
    """
    held = 0
    lows, highs, ordered = np.empty(_LANES), np.empty(_LANES), np.empty(block)
    steps_of_span, steps_of_top = 0.0, 0.0
    for start in range(0, x.size, block):
        a, b = x[start : start + block], y[start : start + block]
        if a.size == 1:
            held += 1  # one number is a level
            continue
        low, high = _extremes(b, lows, highs)
        span, top = high - low, max(abs(low), abs(high))
        if not span < math.inf:
            continue
        if span == 0:
            for i in range(a.size):
                held += a[i] == b[i]
            continue
        noise = top * spacing
        # The block before tells how many levels there may be: from end to end, or from zero.
        is_found = False
        for guess in (steps_of_span, np.rint(span * steps_of_top / top)):
            unit = span / guess if 0 < guess < _MOST_LEVELS else 0.0
            if not is_found and noise < unit / 8:
                off, far = _count_off(a, b, low, unit, noise)
                is_found = off == 0 and far == 0
        if is_found:
            held += a.size
            continue
        gap = _smallest_gap(b, noise, ordered)
        best = 0
        for parts in (1, 2, 3):
            # Of the whole span, where what was rounded off matters least.
            steps = np.rint(span * parts / gap)
            if not 0 < steps < _MOST_LEVELS or best == a.size:
                continue
            unit = span / steps
            off, far = _count_off(a, b, low, unit, noise)
            if off == 0 and noise < unit / 8 and a.size - far > best:
                best = a.size - far
                steps_of_span, steps_of_top = steps, np.rint(top / unit)
        held += best
    return held
