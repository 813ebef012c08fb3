"""Count, mean and central moments of a sequence, and how to merge two of them.

Reference: Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979); Pébay, "Formulas for robust, one-pass parallel computation of covariances and
arbitrary-order statistical moments" (SAND2008-6212), for the third and the fourth.
"""

from __future__ import annotations

import math

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
