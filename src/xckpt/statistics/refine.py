"""Exact quantiles: the element of a certain rank, found by further passes over the elements.

The counts of a sketch tell which code the element has, and its rank among those with the same
code. A pass counts the elements of that code by the next sixteen bits, and so on: one pass for
float32, at most four for 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.describe import rank, spectrum
from xckpt.statistics.kinds import kind_named
from xckpt.statistics.passes import one_pass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.progress import Progress
    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.passes import Member
    from xckpt.statistics.sketch import Sketch
    from xckpt.statistics.workspace import Workspace

__all__ = ["Search", "refine"]

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


class _NarrowPass:
    """The operation that counts the elements of intervals."""

    def start(
        self, kind: Kind, size: int, row: int, argument: list[_Wanted], workspace: Workspace
    ) -> _Counter:
        """Begin with some elements of a tensor."""
        return _Counter(kind, argument)


class _Counter:
    """Counts the elements of some intervals of a tensor, by buckets."""

    def __init__(self, kind: Kind, wanted: list[_Wanted]) -> None:
        self.kind = kind
        self.slots = np.zeros(1 << kind.code_bits, np.bool_)
        self.slots[[each.code for each in wanted]] = True
        bounds = [(each.code, each.low, each.high) for each in wanted]
        self.intervals = np.ascontiguousarray(np.array(bounds, np.uint64).T)
        self.shifts = np.array([each.shift for each in wanted], np.uint64)
        self.counts = np.zeros((len(wanted), 1 << _BUCKET_BITS), np.int64)
        self.seen = 0

    def update(self, start: int, values: Array) -> None:
        """Add elements."""
        from xckpt.statistics.blocks import codes_of, keys_of, prepared
        from xckpt.statistics.compiled import narrow

        self.seen += len(values)
        values = prepared(values, self.kind)
        codes, keys = codes_of(self.kind, values), keys_of(self.kind, values)
        narrow(keys, codes, self.slots, self.intervals, self.shifts, self.counts)

    def result(self, implied: int = 0) -> tuple[int, list[tuple[Array, Array]]]:
        """Return how many elements there were, and the buckets that are not empty."""
        found = []
        for counts in self.counts:
            buckets = np.flatnonzero(counts)
            found.append((buckets, counts[buckets]))
        return self.seen + implied, found


class Search:
    """Looks for elements of one tensor, pass by pass.

    Parameters
    ----------
    sketch : Sketch
        Of the tensor.
    quantiles : sequence of float
        Between 0 and 1.
    """

    __slots__ = ("_counts", "_missing", "found", "kind", "size", "wanted")

    def __init__(self, sketch: Sketch, quantiles: Sequence[float]) -> None:
        self.kind = kind_named(sketch.kind)
        self.size = sketch.count
        self.found: dict[float, float] = {}
        self.wanted = _wanted(sketch, quantiles, self.found)
        self._missing = self.size
        self._counts: Array | None = None

    def add(self, part: tuple[int, list[tuple[Array, Array]]]) -> None:
        """Add what was counted in a part of the tensor; go on after the last one."""
        seen, buckets = part
        if self._counts is None:
            self._counts = np.zeros((len(self.wanted), 1 << _BUCKET_BITS), np.int64)
        for row, (where, counts) in enumerate(buckets):
            self._counts[row, where] += counts
        self._missing -= seen
        if self._missing == 0:
            self._narrow(self._counts)
            # Few tensors are open at a time, but all of them are kept until the next pass.
            self._missing, self._counts = self.size, None

    def _narrow(self, counted: Array) -> None:
        for each, counts in zip(self.wanted, counted, strict=True):
            each.narrow(counts)
            if each.low == each.high:
                self.found[each.quantile] = _value(self.kind, each.low)
        self.wanted = [each for each in self.wanted if each.low != each.high]


def refine(
    members: Sequence[Member],
    searches: Sequence[Search],
    progress: Progress,
) -> None:
    """Find quantiles without the error that those of a sketch have."""
    while True:
        left = [n for n, search in enumerate(searches) if search.wanted]
        if not left:
            return

        def receive(
            number: int, _: int, part: tuple[int, list[tuple[Array, Array]]], left: list[int] = left
        ) -> None:
            searches[left[number]].add(part)

        arguments = [searches[n].wanted for n in left]
        some = [members[n] for n in left]
        one_pass(some, _NarrowPass(), arguments, receive, progress=progress)


def _wanted(sketch: Sketch, quantiles: Sequence[float], found: dict[float, float]) -> list[_Wanted]:
    """Say what is to be looked for; what is known already goes into `found`."""
    kind = kind_named(sketch.kind)
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
            found[quantile] = 0.0
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


def _value(kind: Kind, key: int) -> float:
    sign = 1 << (kind.bits - 1)
    if kind.integer:
        return float(key if kind.dtype.kind == "u" else key - sign)
    pattern = key ^ sign if key & sign else key ^ ((1 << kind.bits) - 1)
    return float(np.array([pattern], np.uint64).astype(kind.unsigned).view(kind.dtype)[0])
