"""Exact quantiles of 32- and 64-bit elements, which a sketch knows only approximately.

The counts of a sketch give the code of the element at a quantile, and its rank among the elements
with that code. Each pass counts the elements of the code by the next sixteen bits: one pass for
float32, at most four for 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from xckpt.arrays.kinds import prepared
from xckpt.scan.scanning import Accumulator, gather
from xckpt.statistics import block_loops
from xckpt.statistics.counts import codes_of
from xckpt.statistics.describe import rank, spectrum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.arrays.kinds import Kind
    from xckpt.arrays.streams import ElementStream
    from xckpt.progress import Progress
    from xckpt.statistics.counts import Sketch
    from xckpt.typing import Array

_BUCKET_BITS = 16


def refine(
    streams: Sequence[ElementStream],
    targets_by_tensor: Sequence[list[_QuantileTarget]],
    progress: Progress,
) -> list[dict[float, float]]:
    """Return the exact quantiles of each tensor, by quantile; the targets are from `targets_of`."""
    results: list[dict[float, float]] = [{} for _ in streams]
    remaining = {n: list(targets) for n, targets in enumerate(targets_by_tensor)}

    def narrow(tensor: int, buckets: _Buckets) -> None:
        for target, counts in zip(remaining[tensor], buckets.dense(), strict=True):
            target.narrow(counts)

    while True:
        for tensor, targets in remaining.items():
            kind = streams[tensor].kind
            results[tensor] |= {
                target.quantile: _element(kind, target.low)
                for target in targets
                if target.low == target.high
            }
            remaining[tensor] = [target for target in targets if target.low != target.high]
        remaining = {tensor: targets for tensor, targets in remaining.items() if targets}
        if not remaining:
            return results
        numbers = list(remaining)
        gather(
            [streams[n] for n in numbers],
            _Buckets,
            lambda position, buckets, numbers=numbers: narrow(numbers[position], buckets),  # type: ignore[misc]
            progress,
            arguments=[remaining[n] for n in numbers],
        )


def targets_of(sketch: Sketch, quantiles: Sequence[float]) -> list[_QuantileTarget]:
    """Return the targets for the quantiles that a sketch knows only approximately."""
    kind = sketch.kind
    distribution = spectrum(sketch)
    if kind.exact or not len(distribution.counts):
        return []
    cumulated = np.cumsum(distribution.counts)
    targets = []
    for quantile in quantiles:
        element_rank = rank(int(cumulated[-1]), quantile)
        position = int(np.searchsorted(cumulated, element_rank, side="right"))
        code = int(distribution.codes[position])
        if code < 0:
            zero = int(keys_of(kind, np.zeros(1, kind.dtype))[0])
            targets.append(_QuantileTarget(quantile, code, zero, zero, 0))
            continue
        low, high = _keys(kind, code)
        before = int(cumulated[position - 1]) if position else 0
        targets.append(_QuantileTarget(quantile, code, low, high, element_rank - before))
    return targets


@dataclass(slots=True)
class _QuantileTarget:
    """The element at a quantile: its code, and its rank in an interval of keys."""

    quantile: float
    code: int
    low: int
    high: int
    rank: int

    @property
    def shift(self) -> int:
        """Number of low bits of the distance from `low` that the next pass ignores."""
        return max(0, (self.high - self.low).bit_length() - _BUCKET_BITS)

    def narrow(self, counts: Array) -> None:
        """Reduce the interval to the bucket that has the element."""
        cumulated = np.cumsum(counts)
        bucket = int(np.searchsorted(cumulated, self.rank, side="right"))
        self.rank -= int(cumulated[bucket - 1]) if bucket else 0
        shift = self.shift
        low = self.low + (bucket << shift)
        self.low, self.high = low, min(self.high, low + (1 << shift) - 1)


class _Buckets(Accumulator):
    """Counts of the elements of a tensor in the intervals of its targets, by bucket."""

    def __init__(self, kind: Kind, targets: list[_QuantileTarget]) -> None:
        self.kind = kind
        self.targets = targets
        self.count = 0
        #: A row for each interval; None after `close`, which moves the occupied buckets to `few`.
        self.counts: Array | None = None
        self.few: list[tuple[Array, Array]] = []

    @classmethod
    def begin(cls, stream: ElementStream, argument: list[_QuantileTarget]) -> _Buckets:
        """Return empty counts for a tensor."""
        return cls(stream.kind, argument)

    def update(self, start: int, *columns: Array) -> None:
        """Add elements."""
        values = prepared(columns[0], self.kind)
        slots = np.zeros(1 << self.kind.code_bits, np.bool_)
        slots[[target.code for target in self.targets]] = True
        bounds = [(target.code, target.low, target.high) for target in self.targets]
        intervals = np.ascontiguousarray(np.array(bounds, np.uint64).T)
        shifts = np.array([target.shift for target in self.targets], np.uint64)
        self.count += len(values)
        codes = codes_of(self.kind, values)
        selected = slots[codes]
        codes, keys = codes[selected], keys_of(self.kind, values[selected])
        block_loops.narrow(keys, codes, intervals, shifts, self.dense())

    def dense(self) -> Array:
        """Return the counts of all buckets."""
        if self.counts is None:
            self.counts = np.zeros((len(self.targets), 1 << _BUCKET_BITS), np.int64)
            for row, (buckets, counts) in zip(self.counts, self.few, strict=False):
                row[buckets] = counts
            self.few = []
        return self.counts

    def close(self) -> Self:
        """Keep only the occupied buckets, which are small to send."""
        occupied = [np.flatnonzero(row) for row in self.dense()]
        self.few = [
            (buckets, row[buckets]) for row, buckets in zip(self.dense(), occupied, strict=True)
        ]
        self.counts = None
        return self

    def merge(self, other: _Buckets) -> None:
        """Add the counts of other elements of the tensor."""
        self.count += other.count
        for row, (buckets, counts) in zip(self.dense(), other.few, strict=True):
            row[buckets] += counts


def _keys(kind: Kind, code: int) -> tuple[int, int]:
    """Return the first and the last key of the elements with a code, except zeros."""
    if kind.integer:
        ends = np.array([code, code + 1], np.uint64) << np.uint64(64 - kind.code_bits)
        low, high = sorted(int(end) for end in ends.view(np.float64).tolist())
        offset = 0 if kind.dtype.kind == "u" else 1 << (kind.bits - 1)
        # Large integers are rounded to float64 before they are counted, and may change their code.
        slack = max(1, (high - low) >> 8)
        low, high = low - slack, high + slack
        return max(0, low + offset), min((1 << kind.bits) - 1, high + offset)
    low_bits = kind.bits - kind.code_bits
    low, high = code << low_bits, ((code + 1) << low_bits) - 1
    sign = 1 << (kind.bits - 1)
    if code << low_bits & sign:
        all_bits = (1 << kind.bits) - 1
        return high ^ all_bits, (low ^ all_bits) - (low == sign)
    return (low ^ sign) + (low == 0), high ^ sign


def keys_of(kind: Kind, values: Array) -> Array:
    """Return unsigned integers that sort like the elements, for a kind that is not exact."""
    bits = values.view(kind.unsigned).astype(np.uint64)
    if kind.dtype.kind == "u":
        return bits
    sign = np.uint64(1 << (kind.bits - 1))
    if kind.integer:
        return bits ^ sign
    all_bits = np.uint64((1 << kind.bits) - 1)
    return np.where(bits & sign, bits ^ all_bits, bits ^ sign)


def _element(kind: Kind, key: int) -> float:
    """Return the element with a key."""
    sign = 1 << (kind.bits - 1)
    if kind.integer:
        return float(key if kind.dtype.kind == "u" else key - sign)
    pattern = key ^ sign if key & sign else key ^ ((1 << kind.bits) - 1)
    return float(np.array([pattern], np.uint64).astype(kind.unsigned).view(kind.dtype)[0])
