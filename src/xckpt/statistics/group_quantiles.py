"""Quantiles of groups of tensors, from the counts of bit patterns that `stats` cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.streams import ChunkedStream
from xckpt.scan.scanning import load_cached
from xckpt.statistics.counts import Sketch
from xckpt.statistics.describe import Spectrum, ranks_of, replace_ends, spectrum

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xckpt.arrays.kinds import Kind
    from xckpt.arrays.streams import ElementStream
    from xckpt.typing import Array


class CachedTensor(NamedTuple):
    """A tensor whose sketch may be in the cache: the attributes of its reader that name it."""

    kind: Kind
    size: int
    whole: bool
    identity: tuple[Any, ...]


def cached_tensors(readers: Iterable[ElementStream]) -> dict[str, CachedTensor]:
    """Return the tensors of real numbers that the cache can identify, by name."""
    return {
        r.name: CachedTensor(r.kind, r.size, r.whole or isinstance(r, ChunkedStream), r.identity)
        for r in readers
        if r.identity is not None and not r.complex
    }


def group_quantiles(tensors: Sequence[CachedTensor | None], numbers: Array, levels: Array) -> Array:
    """Return the quantiles of the elements of each group, NaN if counts of a tensor are missing."""
    # `numbers` has the group of each tensor. Rows are in ascending order of the groups. Elements of
    # more than 16 bits are rounded, as in `stats`.
    present, groups = np.unique(numbers, return_inverse=True)
    quantiles = np.full((len(present), len(levels)), np.nan)
    remaining = np.bincount(groups)
    # Group by group, because the counts of all tensors may not fit in memory.
    order = [n for n in np.argsort(groups, kind="stable").tolist() if tensors[n] is not None]
    sketches: dict[int, dict[str, Sketch]] = {}  # of incomplete groups, by kind

    def add(position: int, sketch: Sketch) -> None:
        group = int(groups[order[position]])
        for incomplete in [number for number in sketches if number != group]:
            del sketches[incomplete]
        total = sketches.setdefault(group, {}).setdefault(sketch.kind.name, sketch)
        if total is not sketch:
            total.merge_counts(sketch)
        remaining[group] -= 1
        if not remaining[group]:
            spectra = map(spectrum, sketches.pop(group).values())
            quantiles[group] = _quantiles([part for part in spectra if len(part.codes)], levels)

    load_cached([tensors[n] for n in order], Sketch, add)
    return quantiles


def _quantiles(spectra: list[Spectrum], levels: Array) -> Array:
    """Return the quantiles of several distributions together; NaN without elements."""
    if not spectra:
        return np.full(len(levels), np.nan)
    of_parts = [part.values() for part in spectra]
    values, counts = np.concatenate(of_parts), np.concatenate([part.counts for part in spectra])
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(counts[order])
    ranks = ranks_of(ends[-1:], levels)
    quantiles = values[order][ends.searchsorted(ranks, side="right")]
    # The extremes of rounded elements are known exactly; for other kinds they are infinite here.
    low = min(v.min() if np.isinf(p.low) else p.low for p, v in zip(spectra, of_parts, strict=True))
    high = max(
        v.max() if np.isinf(p.high) else p.high for p, v in zip(spectra, of_parts, strict=True)
    )
    table = replace_ends(quantiles, ranks, ends[-1:] - 1, np.array([low]), np.array([high]))
    row: Array = table[0]
    return row
