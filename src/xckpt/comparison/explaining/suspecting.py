"""The relations that a sample of two tensors suggests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from xckpt.comparison.explaining.causes import LIKELY, Elementwise
from xckpt.comparison.explaining.quantised_causes import (
    Quantised,
    WithinScales,
    suspect_levels,
    suspect_quantised,
)

if TYPE_CHECKING:
    from xckpt.comparison.explaining.causes import Relation, SampledPairs
    from xckpt.typing import Array

# Elements of a first sample that rules relations out, and relations to test on the whole sample.
_FEW = 2048
_TRIED = 8
# Elements of the sample whose correlation is computed.
_CORRELATED = 4096
# Below this correlation, one side is not a quantised copy of the other.
_RELATED = 0.5
# The least number of distinct values that shows a type other than the stored one.
_FEWEST_VALUES = 3


def suspect(
    sample: SampledPairs, graded: SampledPairs | None = None, offset: float | None = None
) -> tuple[Relation, ...]:
    """Return the relations that hold for the whole sample, or else one that holds for most of it.

    `graded` is the sample with the distances that the stored scales of one side allow. `offset` is
    the number that the architecture is known to add to this tensor.
    """
    thinned = slice(None, None, max(1, len(sample.x) // _FEW))
    thin = replace(sample, x=sample.x[thinned].copy(), y=sample.y[thinned].copy())
    with np.errstate(all="ignore"):
        shares = [*Elementwise.suspected(thin)]
        if not any(share == 1.0 for share, _ in shares):
            shares += [(share, replace(relation, backwards=True))
                       for share, relation in Elementwise.suspected(thin.reverse)]  # fmt: skip
        shares = [(share, relation) for share, relation in shares if _is_shown(relation, thin)]
        certain = [relation for share, relation in shares if share == 1.0][:_TRIED]
        certain = [entry for entry in certain
                   if entry.count_in(sample.x, sample.y) == len(sample.x)]  # fmt: skip
        plain = [entry for entry in certain if not entry.masked]
        if plain:
            # Elements outside the sample may have been set to zero.
            return *plain, *(replace(relation, masked=True) for relation in plain)
        is_related = not correlation(thin.x, thin.y) < _RELATED
        quantised = suspect_quantised(sample, graded, offset) if is_related else None
        if quantised is not None and _is_shown(quantised, sample):
            return (quantised,)
        levels = suspect_levels(sample)
        if levels is not None and not _is_shown(levels[1], sample):
            levels = None
        if is_related and levels is not None and levels[0] == 1.0:
            return (levels[1],)
        if certain:
            return (certain[0],)
        equal = float(np.mean(thin.x == thin.y))
        best: Relation | None
        share, best = max(shares, key=lambda entry: entry[0], default=(0.0, None))
        if levels is not None and levels[0] > share:
            share, best = levels
    if best is None or share < LIKELY or share < (1 + equal) / 2:
        return ()
    return (best,)


def _is_shown(relation: Relation, sample: SampledPairs) -> bool:
    """Return whether types or varied numbers support a relation; a constant fits any type."""
    side = sample.reverse if relation.backwards else sample
    is_stated = False
    if isinstance(relation, Elementwise):
        is_stated = {"float32", "float64", side.kinds[1]}.issuperset(relation.transform.types)
    elif isinstance(relation, Quantised):
        before = relation.before
        is_in_blocks = relation.scheme == side.blocks[1] or isinstance(relation, WithinScales)
        is_stated = is_in_blocks and not before.scheme and not before.transform.types
    return is_stated or len(np.unique(side.y)) >= _FEWEST_VALUES


def correlation(x: Array, y: Array) -> float:
    """Estimate the correlation of two vectors from a few pairs; NaN if one side is constant."""
    few = slice(None, None, max(1, len(x) // _CORRELATED))
    x, y = x[few], y[few]
    both = np.isfinite(x) & np.isfinite(y)
    u, v = x[both].astype(np.float64), y[both].astype(np.float64)
    if len(u) < 2:
        return float("nan")
    with np.errstate(all="ignore"):
        u -= u.mean()
        v -= v.mean()
        return float(np.vdot(u, v) / np.sqrt(np.vdot(u, u) * np.vdot(v, v)))
