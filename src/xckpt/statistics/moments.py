"""Count, mean and central moments of a sequence, and those of two sequences together.

Reference: Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979); Pébay, "Formulas for robust, one-pass parallel computation of covariances and
arbitrary-order statistical moments" (SAND2008-6212), for the third and the fourth.
"""

from __future__ import annotations

import math

#: Number of elements; their mean in two parts, because the difference of two means that are
#: large and nearly equal would lose its digits; sums of the second to the fourth powers of the
#: distances from it; and the power of two that the elements were divided by.
Moments = tuple[float, float, float, float, float, float, float]

EMPTY: Moments = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def merge(a: Moments, b: Moments) -> Moments:
    """Return the moments of two sequences one after the other."""
    na, ha, la, a2, a3, a4, scale = a
    nb, hb, lb, b2, b3, b4, other = b
    if na == 0.0:
        return b
    if nb == 0.0:
        return a
    if scale != other and ha == la == a2 == 0.0:
        scale = other  # zeros have no power of two of their own
    elif scale != other and not hb == lb == b2 == 0.0:
        f = math.ldexp(1.0, -int(abs(scale - other)))
        if scale < other:
            ha, la, a2, a3, a4 = ha * f, la * f, a2 * f * f, a3 * f * f * f, a4 * f * f * f * f
            scale = other
        else:
            hb, lb, b2, b3, b4 = hb * f, lb * f, b2 * f * f, b3 * f * f * f, b4 * f * f * f * f
    return *merged(na, ha, la, a2, a3, a4, nb, hb, lb, b2, b3, b4), scale


def merged(  # noqa: PLR0917
    na: float, ha: float, la: float, a2: float, a3: float, a4: float,
    nb: float, hb: float, lb: float, b2: float, b3: float, b4: float,
) -> tuple[float, float, float, float, float, float]:  # fmt: skip
    """Return the moments of two sequences, both with elements, divided by one number."""
    n = na + nb
    ra, rb = na / n, nb / n
    delta = (hb - ha) + (lb - la)
    step = delta * delta * ra * rb
    rest = la + delta * rb
    high = ha + rest
    low = rest - (high - ha)
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
