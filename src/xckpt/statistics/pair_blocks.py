"""Blocks of pairs of elements to what is known of them."""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics import pair_kernels
from xckpt.statistics.blocks import prepared
from xckpt.statistics.comparison import Comparison, SumTree, folded
from xckpt.statistics.kernels import LANES
from xckpt.statistics.kinds import kind_named
from xckpt.statistics.moments import LEAF
from xckpt.statistics.pair_kernels import SUMS, TINY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.statistics.comparison import Sides

__all__ = ["Comparer"]

Array = np.ndarray[Any, np.dtype[Any]]

# Integers up to this are float64.
_WHOLE = 1 << 53
_LOWER_BITS = 0x7FF

_thread = threading.local()


class Comparer:
    """Compares a run of pairs, block by block.

    Parameters
    ----------
    sides : Sides
        What the elements are.
    size : int
        Number of pairs in the whole tensor.
    """

    def __init__(self, sides: Sides, size: int) -> None:
        self._sides = sides
        self._size = size
        self._compare = _compare_exactly if sides.wide is None else _compare_floats
        self._tree = SumTree()
        self._pieces: list[tuple[int, Array, Array]] = []
        self._found = Comparison()

    def update(self, start: int, values: Mapping[str, Array] | Array) -> None:
        """Add pairs."""
        a, b = values["a"], values["b"]
        stop = start + len(a)
        self._found.count += len(a)
        # Whole leaves; the last one of the tensor is whole as well.
        first = min(-(-start // LEAF) * LEAF, stop)
        last = stop if stop == self._size else max(first, stop // LEAF * LEAF)
        for low, high in ((start, first), (last, stop)):
            if low < high:
                part = slice(low - start, high - start)
                self._pieces.append((low, a[part].copy(), b[part].copy()))
        if first < last:
            part = slice(first - start, last - start)
            with np.errstate(invalid="ignore", over="ignore"):  # signalling NaN, infinities
                nodes = self._compare(self._sides, a[part], b[part], self._found)
            for (level, number), node in folded(first // LEAF, nodes):
                self._tree.add(level, number, node)

    def result(self, implied: int = 0) -> Comparison:
        """Return what was found."""
        found = self._found
        if self._sides.sparse:
            implied = self._size - found.count
        found.imply(implied)
        found.nodes, found.pieces = tuple(self._tree.nodes.items()), tuple(self._pieces)
        return found


def _compare_floats(sides: Sides, a: Array, b: Array, found: Comparison) -> Array:
    """Compare whole leaves; give the sums of each."""
    memory = _memory(np.dtype(sides.wide))
    first, second = memory.side(0, a, sides.first), memory.side(1, b, sides.second)
    nodes = np.empty((-(-len(a) // LEAF), SUMS + 1))
    tally, largest = np.zeros(4, np.int64), np.zeros(1)
    pair_kernels.compare_floats(first, second, (nodes, tally, largest, *memory.out))
    equal, finite, nan, inf = tally.tolist()
    found.equal += equal
    found.finite += finite
    found.nan += nan
    found.inf += inf
    found.largest = max(found.largest, float(largest[0]))
    for leaf in np.flatnonzero(np.isnan(nodes[:, SUMS])).tolist():
        x, y = (side[0][leaf * LEAF : (leaf + 1) * LEAF] for side in (first, second))
        both = np.isfinite(x) & np.isfinite(y)
        nodes[leaf] = _scaled_sums(x[both], y[both])
    return nodes


class _Memory:
    """Memory that a thread uses for one leaf after another."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.nothing = np.empty(0, dtype), np.empty(0, np.uint16), np.empty(0, np.uint32)
        self.widened = np.empty(LEAF, dtype), np.empty(LEAF, dtype)
        kept, sums = np.empty((2, LEAF), dtype), np.empty((SUMS + 1) * LANES)
        self.out = (np.empty(LEAF), kept, sums)

    def side(self, number: int, values: Array, name: str) -> tuple[Array, ...]:
        """Return one side as the kernel wants it."""
        kind = kind_named(name)
        values = prepared(values, kind)
        wide, bits, table = self.nothing
        if not kind.exact:
            wide = values if values.dtype == self.dtype else values.astype(self.dtype)
        elif self.dtype == np.float64:
            wide = kind.values[values]
        else:
            # One type of patterns, so that there is one kernel to compile.
            bits = values if values.dtype == np.uint16 else values.astype(np.uint16)
            table = table if name == "bfloat16" else _table(name)
        return wide, bits, table, self.widened[number]


def _memory(dtype: np.dtype[Any]) -> _Memory:
    memories: dict[str, Any] = _thread.__dict__
    if dtype.name not in memories:
        memories[dtype.name] = _Memory(dtype)
    memory: _Memory = memories[dtype.name]
    return memory


@cache
def _table(name: str) -> Array:
    """Return the float32, as patterns, that the codes of an exact kind stand for."""
    patterns: Array = kind_named(name).values.astype(np.float32).view(np.uint32)
    return patterns


def _compare_exactly(sides: Sides, a: Array, b: Array, found: Comparison) -> Array:
    """Compare whole leaves of integers of 64 bits, or of complex numbers, with whatever else."""
    compare = _compare_complex if "complex128" in {sides.first, sides.second} else _compare_whole
    rows = [
        compare(a[at : at + LEAF], b[at : at + LEAF], sides, found) for at in range(0, len(a), LEAF)
    ]
    return np.array(rows)


def _compare_whole(a: Array, b: Array, sides: Sides, found: Comparison) -> list[float]:
    x, x_rest = _in_two_parts(a, sides.first)
    y, y_rest = _in_two_parts(b, sides.second)
    both = np.isfinite(x) & np.isfinite(y)
    found.nan += int(np.count_nonzero(np.isnan(x) | np.isnan(y)))
    found.inf += int(np.count_nonzero(np.isinf(x) | np.isinf(y)))
    if not both.all():
        x, x_rest, y, y_rest = x[both], x_rest[both], y[both], y_rest[both]
    # Exact where it is not large: see `_in_two_parts`.
    difference = (x - y) + (x_rest - y_rest)
    found.equal += int(np.count_nonzero(difference == 0))
    found.finite += len(x)
    found.largest = max(found.largest, float(np.abs(difference).max(initial=0.0)))
    return _sums(x, y, difference)


def _in_two_parts(values: Array, name: str) -> tuple[Array, Array]:
    """Return two float64 for each element, whose sum it is exactly."""
    kind = kind_named(name)
    values = prepared(values, kind)
    if name not in {"int64", "uint64"}:
        wide = kind.values[values] if kind.exact else values.astype(np.float64)
        return wide, np.zeros(len(wide))
    lower = values & values.dtype.type(_LOWER_BITS)
    lower[(values <= _WHOLE) & (values >= (-_WHOLE if kind.dtype.kind == "i" else 0))] = 0
    return (values - lower).astype(np.float64), lower.astype(np.float64)


def _compare_complex(a: Array, b: Array, sides: Sides, found: Comparison) -> list[float]:
    """Compare complex numbers: a difference is the magnitude of one, sums are over both parts."""
    x, y = _complex(a, sides.first), _complex(b, sides.second)
    both = np.isfinite(x) & np.isfinite(y)
    ours, theirs = np.isnan(x), np.isnan(y)
    equal = (x == y) | (ours & theirs)
    found.equal += int(np.count_nonzero(equal))
    found.nan += int(np.count_nonzero(~both & ~equal & (ours | theirs)))
    found.inf += int(np.count_nonzero(~both & ~equal & ~(ours | theirs)))
    found.finite += int(np.count_nonzero(both))
    x, y = x[both], y[both]
    difference = x - y
    found.largest = max(found.largest, float(np.abs(difference).max(initial=0.0)))
    return _sums(x.view(np.float64), y.view(np.float64), difference.view(np.float64))


def _complex(values: Array, name: str) -> Array:
    if name == "complex128":
        return values.astype(np.complex128)
    first, second = _in_two_parts(values, name)
    return (first + second).astype(np.complex128)


def _sums(x: Array, y: Array, difference: Array) -> list[float]:
    lanes = np.empty((SUMS + 1) * LANES)
    pair_kernels.add_up(x, y, difference, lanes)
    found: list[float] = lanes[: SUMS * LANES : LANES].tolist()
    if not TINY < found[1] + found[2] < math.inf:
        return _scaled_sums(x, y)
    return [*found, 0.0]


def _scaled_sums(x: Array, y: Array) -> list[float]:
    """Add up squares that leave the range of float64: those of elements divided by one number."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    largest = max(np.abs(x).max(initial=0.0), np.abs(y).max(initial=0.0))
    # Few different ones, so that leaves seldom have to be brought to a common one.
    exponent = 256 * ((math.frexp(largest)[1] + 128) // 256) if largest else 0
    x, y = np.ldexp(x, -exponent), np.ldexp(y, -exponent)
    lanes = np.empty((SUMS + 1) * LANES)
    pair_kernels.add_up(x, y, x - y, lanes)
    return [*lanes[: SUMS * LANES : LANES].tolist(), float(exponent)]
