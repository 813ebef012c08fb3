"""Exact quantiles: the element of a certain rank, found by further passes over the elements.

The counts of a sketch tell which code the element has, and its rank among those with the same
code. A pass counts the elements of that code by the next sixteen bits, and so on: one pass for
float32, at most four for 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from xckpt.scan.accumulators import Accumulator
from xckpt.scan.scanning import gather
from xckpt.statistics import block_loops
from xckpt.statistics.counts import codes_of, prepared
from xckpt.statistics.describe import rank, spectrum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.progress import Progress
    from xckpt.scan.kinds import Kind
    from xckpt.scan.readers import Reader
    from xckpt.statistics.counts import Sketch

Array = np.ndarray[Any, np.dtype[Any]]

_BUCKET_BITS = 16


@dataclass(slots=True)
class _Wanted:
    """An element that is looked for: the rank it has in an interval of keys."""

    quantile: float
    code: int
    low: int
    high: int
    rank: int

    @property
    def shift(self) -> int:
        """Bits of a distance from `low` that one pass does not tell apart."""
        return max(0, (self.high - self.low).bit_length() - _BUCKET_BITS)

    def narrow(self, counts: Array) -> None:
        """Go on in the bucket that has the element."""
        cumulated = np.cumsum(counts)
        bucket = int(np.searchsorted(cumulated, self.rank, side="right"))
        self.rank -= int(cumulated[bucket - 1]) if bucket else 0
        shift = self.shift
        low = self.low + (bucket << shift)
        self.low, self.high = low, min(self.high, low + (1 << shift) - 1)


class _Buckets(Accumulator):
    """Counts the elements of some intervals of a tensor, by buckets."""

    def __init__(self, kind: Kind, wanted: list[_Wanted]) -> None:
        self.kind = kind
        self.wanted = wanted
        self.count = 0
        #: One row for each interval; while they are on the way, only those that are not empty.
        self.counts: Array | None = None
        self.few: list[tuple[Array, Array]] = []

    @classmethod
    def begin(cls, reader: Reader, argument: list[_Wanted]) -> _Buckets:
        """Return one for elements of a tensor."""
        return cls(reader.kind, argument)

    def update(self, start: int, values: Array) -> None:
        """Add elements."""
        values = prepared(values, self.kind)
        slots = np.zeros(1 << self.kind.code_bits, np.bool_)
        slots[[each.code for each in self.wanted]] = True
        bounds = [(each.code, each.low, each.high) for each in self.wanted]
        intervals = np.ascontiguousarray(np.array(bounds, np.uint64).T)
        shifts = np.array([each.shift for each in self.wanted], np.uint64)
        codes, keys = codes_of(self.kind, values), keys_of(self.kind, values)
        block_loops.narrow(keys, codes, slots, intervals, shifts, self.dense())
        self.count += len(values)

    def dense(self) -> Array:
        """Return the counts of all buckets."""
        if self.counts is None:
            self.counts = np.zeros((len(self.wanted), 1 << _BUCKET_BITS), np.int64)
            for row, (where, counts) in zip(self.counts, self.few, strict=False):
                row[where] = counts
            self.few = []
        return self.counts

    def close(self) -> Self:
        """Keep only buckets that are not empty."""
        rows = [np.flatnonzero(row) for row in self.dense()]
        self.few = [(where, row[where]) for row, where in zip(self.dense(), rows, strict=True)]
        self.counts = None
        return self

    def merge(self, other: _Buckets) -> None:
        """Add what another one found in other elements."""
        self.count += other.count
        for row, (where, counts) in zip(self.dense(), other.few, strict=True):
            row[where] += counts


def refine(
    readers: Sequence[Reader],
    wanted: Sequence[list[_Wanted]],
    progress: Progress,
) -> list[dict[float, float]]:
    """Return quantiles of each tensor without the error that those of a sketch have."""
    found: list[dict[float, float]] = [{} for _ in readers]
    left = {n: list(some) for n, some in enumerate(wanted)}

    def narrow(number: int, buckets: _Buckets) -> None:
        for each, counts in zip(left[number], buckets.dense(), strict=True):
            each.narrow(counts)

    while True:
        for number, some in left.items():
            kind = readers[number].kind
            found[number] |= {
                each.quantile: _value(kind, each.low) for each in some if each.low == each.high
            }
            left[number] = [each for each in some if each.low != each.high]
        left = {number: some for number, some in left.items() if some}
        if not left:
            return found
        numbers = list(left)
        gather(
            [readers[n] for n in numbers],
            _Buckets,
            lambda at, buckets, numbers=numbers: narrow(numbers[at], buckets),  # type: ignore[misc]
            progress,
            arguments=[left[n] for n in numbers],
        )


def wanted_of(sketch: Sketch, quantiles: Sequence[float]) -> list[_Wanted]:
    """Return the elements to look for in a tensor whose quantiles are not known exactly."""
    kind = sketch.kind
    ranks = spectrum(sketch)
    if kind.exact or not len(ranks.counts):
        return []
    cumulated = np.cumsum(ranks.counts)
    wanted = []
    for quantile in quantiles:
        at = rank(int(cumulated[-1]), quantile)
        where = int(np.searchsorted(cumulated, at, side="right"))
        code = int(ranks.codes[where])
        if code < 0:
            zero = int(keys_of(kind, np.zeros(1, kind.dtype))[0])
            wanted.append(_Wanted(quantile, code, zero, zero, 0))
            continue
        low, high = _keys(kind, code)
        before = int(cumulated[where - 1]) if where else 0
        wanted.append(_Wanted(quantile, code, low, high, at - before))
    return wanted


def _keys(kind: Kind, code: int) -> tuple[int, int]:
    """Return the first and the last key of the elements with a code, zeros left out."""
    if kind.integer:
        ends = np.array([code, code + 1], np.uint64) << np.uint64(64 - kind.code_bits)
        low, high = sorted(int(end) for end in ends.view(np.float64).tolist())
        offset = 0 if kind.dtype.kind == "u" else 1 << (kind.bits - 1)
        # Large integers are rounded to float64 before they are counted, perhaps to the next code.
        slack = max(1, (high - low) >> 8)
        low, high = low - slack, high + slack
        return max(0, low + offset), min((1 << kind.bits) - 1, high + offset)
    rest = kind.bits - kind.code_bits
    low, high = code << rest, ((code + 1) << rest) - 1
    sign = 1 << (kind.bits - 1)
    if code << rest & sign:
        every = (1 << kind.bits) - 1
        return high ^ every, (low ^ every) - (low == sign)
    return (low ^ sign) + (low == 0), high ^ sign


def keys_of(kind: Kind, values: Array) -> Array:
    """Return integers in the order of the elements, of a kind that is not exact."""
    bits = values.view(kind.unsigned).astype(np.uint64)
    if kind.dtype.kind == "u":
        return bits
    sign = np.uint64(1 << (kind.bits - 1))
    if kind.integer:
        return bits ^ sign
    every = np.uint64((1 << kind.bits) - 1)
    return np.where(bits & sign, bits ^ every, bits ^ sign)


def _value(kind: Kind, key: int) -> float:
    sign = 1 << (kind.bits - 1)
    if kind.integer:
        return float(key if kind.dtype.kind == "u" else key - sign)
    pattern = key ^ sign if key & sign else key ^ ((1 << kind.bits) - 1)
    return float(np.array([pattern], np.uint64).astype(kind.unsigned).view(kind.dtype)[0])
