"""Evenly spaced levels in blocks: floats that were quantised and decoded again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xckpt.arrays.compiling import compiled, inlined, within

# Codes of at most eight bits.
_MOST_LEVELS = 256


@inlined
def _smallest_gap(y: Any, noise: Any, ordered: Any) -> Any:
    """Return the smallest distance between numbers that exceeds the noise."""
    count = 0
    for i in range(y.size):
        value = y[i]
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
def _count_off(x: Any, y: Any, low: Any, unit: Any, noise: Any) -> Any:
    """Count the `y` that are not whole units above `low`, and the `x` far from their `y`."""
    per_unit = 1.0 / unit
    uneven, near = max(0.02, 4 * noise * per_unit), unit * 0.502 + noise
    off, far = np.int32(0), np.int32(0)
    for i in range(x.size):
        steps = (y[i] - low) * per_unit
        off = np.int32(off + np.int32(not abs(steps - np.rint(steps)) <= uneven))
    for i in range(x.size):
        error = abs(x[i] - y[i])
        far = np.int32(far + np.int32(not error <= near))
    return off, far


@compiled
def count_levels(x: Any, y: Any, block: Any, spacing: Any) -> Any:  # noqa: C901  one of three ways
    """Count pairs where `y` is the nearest of the evenly spaced levels of its block to `x`.

    `spacing` is the relative rounding error of stored levels. Levels have to be few enough for
    codes, and so far apart that rounding alone cannot produce them.
    """
    matches = 0
    ordered = np.empty(block)
    steps_of_span, steps_of_top = 0.0, 0.0
    for start in range(0, x.size, block):
        a, b = x[start : start + block], y[start : start + block]
        if a.size == 1:
            matches += 1  # one number is a level
            continue
        low = high = b[0]
        for i in range(b.size):
            # These comparisons skip NaN.
            low = b[i] if b[i] < low else low  # noqa: FURB136
            high = b[i] if b[i] > high else high  # noqa: FURB136
        span, top = high - low, max(abs(low), abs(high))
        if not span < math.inf:
            continue
        if span == 0:
            for i in range(a.size):
                matches += a[i] == b[i]
            continue
        noise = top * spacing
        # Try the number of levels of the previous block, over the span or from zero, first.
        is_level = False
        for guess in (steps_of_span, np.rint(span * steps_of_top / top)):
            unit = span / guess if 0 < guess < _MOST_LEVELS else 0.0
            if not is_level and noise < unit / 8:
                off, far = _count_off(a, b, low, unit, noise)
                is_level = off == 0 and far == 0
        if is_level:
            matches += a.size
            continue
        gap = _smallest_gap(b, noise, ordered)
        best = 0
        for parts in (1, 2, 3):
            # Divide the whole span, which rounding changes least.
            steps = np.rint(span * parts / gap)
            if not 0 < steps < _MOST_LEVELS or best == a.size:
                continue
            unit = span / steps
            off, far = _count_off(a, b, low, unit, noise)
            if off == 0 and noise < unit / 8 and a.size - far > best:
                best = a.size - far
                steps_of_span, steps_of_top = steps, np.rint(top / unit)
        matches += best
    return matches
