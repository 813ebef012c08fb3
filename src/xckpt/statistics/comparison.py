"""What is known of some pairs of elements: small, mergeable, and made of plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.kinds import kind_named
from xckpt.statistics.moments import LEAF, MergeTree, runs

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

__all__ = [
    "MEASURES",
    "STATUSES",
    "Comparison",
    "ComparisonSum",
    "Sides",
    "Sums",
    "folded",
    "measures",
    "packed",
    "ranked",
    "unpacked",
]

Array = np.ndarray[Any, np.dtype[Any]]

#: What may be said of a tensor as a whole; the statistic ``status`` is the position here.
STATUSES = ("same", "changed", "only_a", "only_b", "shape")

#: The statistics of a comparison, in the order that `measures` gives them in.
MEASURES = (
    *("status", "count", "equal_fraction", "nan", "inf"),
    *("max_abs", "rmse", "rel_l2", "cosine"),
)

#: Sums of the squares of the differences, of those of both sides, and of the products, and the
#: power of two that the elements were divided by.
Sums = tuple[float, float, float, float, float]

# What counts as the larger change, last.
_SEVERITY = ("same", "changed", "only_b", "only_a", "shape")

_EMPTY: Sums = (0.0, 0.0, 0.0, 0.0, 0.0)
_COUNTS = ("count", "equal", "finite", "nan", "inf")


@dataclass(frozen=True, slots=True)
class Sides:
    """What the elements of a pair of tensors are.

    Parameters
    ----------
    first, second : str
        Names of kinds, or ``"complex128"``.
    sparse : bool
        Whether pairs of zeros are left out.
    """

    first: str
    second: str
    sparse: bool = False

    @property
    def wide(self) -> type[np.float32 | np.float64] | None:
        """The float that has all values of both sides; None if there is none."""
        names = {self.first, self.second}
        if names & {"int64", "uint64", "complex128"}:
            return None
        narrow = all(name == "float32" or kind_named(name).exact for name in names)
        return np.float32 if narrow else np.float64


@dataclass(slots=True)
class Comparison:
    """What is known of some pairs of elements.

    Parameters
    ----------
    count : int
        Number of pairs.
    equal : int
        Of one number, or both NaN.
    finite : int
        Both finite: what the other fields but the next two are about.
    nan, inf : int
        Pairs that are not equal because of a NaN, or else of an infinity.
    largest : float
        The largest difference.
    nodes : tuple of ((int, int), Sums)
        Of the tree of sums; see `MergeTree`.
    pieces : tuple of (int, array, array)
        Positions and elements of both sides, of leaves that are not complete.
    """

    count: int = 0
    equal: int = 0
    finite: int = 0
    nan: int = 0
    inf: int = 0
    largest: float = 0.0
    nodes: tuple[tuple[tuple[int, int], Sums], ...] = ()
    pieces: tuple[tuple[int, Array, Array], ...] = ()

    def imply(self, count: int) -> None:
        """Add pairs of zeros that neither side stores."""
        self.count += count
        self.equal += count
        self.finite += count

    def sums(self) -> Sums:
        """Return the sums over all pairs, once they are all there."""
        tree = SumTree()
        tree.update(self.nodes)
        return tree.total()


class SumTree(MergeTree[Sums]):
    """The tree of sums."""

    __slots__ = ()

    empty = _EMPTY

    @staticmethod
    def merged(a: Any, b: Any) -> Any:
        """Return the sums over two sequences one after the other."""
        return _merged(a, b)


def folded(first: int, nodes: Array) -> Iterable[tuple[tuple[int, int], Sums]]:
    """Merge neighbouring leaves as far as they make nodes of the tree."""
    is_scaled = bool(nodes[:, 4].any())
    for level, number in runs(first, len(nodes)):
        start = (number << level) - first
        some = nodes[start : start + (1 << level)]
        while len(some) > 1 and not is_scaled:
            some = some[0::2] + some[1::2]
        rows: list[Any] = [tuple(row) for row in some.tolist()]
        while len(rows) > 1:
            rows = [_merged(rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
        yield (level, number), rows[0]


def _merged(a: Sums, b: Sums) -> Sums:
    if a[4] != b[4]:
        # Sums of zeros have no power of two of their own.
        if not any(a[:4]):
            return b
        if not any(b[:4]):
            return a
        common = max(a[4], b[4])
        a, b = _brought(a, common), _brought(b, common)
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4]


def _brought(a: Sums, exponent: float) -> Sums:
    shift = int(2 * (a[4] - exponent))
    d, x, y, p = (math.ldexp(number, shift) for number in a[:4])
    return d, x, y, p, exponent


class ComparisonSum:
    """Merges what is known of all parts of one pair of tensors, in whatever order they come.

    Parameters
    ----------
    sides : Sides
        What the elements of both are.
    size : int
        Number of pairs.
    """

    __slots__ = ("_pieces", "_total", "_tree", "sides", "size")

    def __init__(self, sides: Sides, size: int) -> None:
        self.sides = sides
        self.size = size
        self._tree = SumTree()
        self._pieces: dict[int, list[tuple[int, Array, Array]]] = {}
        self._total = Comparison()

    @property
    def is_complete(self) -> bool:
        """Whether all pairs were added."""
        return self._total.count >= self.size

    def add(self, part: Comparison) -> None:
        """Add what is known of some more pairs."""
        total = self._total
        total.count += part.count
        self._add(part)
        for piece in part.pieces:
            self._add_piece(piece)

    def result(self) -> Comparison:
        """Return what is known of all pairs that were added."""
        self._total.nodes = tuple(self._tree.nodes.items())
        return self._total

    def _add(self, part: Comparison) -> None:
        total = self._total
        total.equal += part.equal
        total.finite += part.finite
        total.nan += part.nan
        total.inf += part.inf
        total.largest = max(total.largest, part.largest)
        self._tree.update(part.nodes)

    def _add_piece(self, piece: tuple[int, Array, Array]) -> None:
        leaf = piece[0] // LEAF
        pieces = self._pieces.setdefault(leaf, [])
        pieces.append(piece)
        if sum(len(a) for _, a, _ in pieces) < min(LEAF, self.size - leaf * LEAF):
            return
        from xckpt.statistics.pair_blocks import Comparer

        ordered = sorted(self._pieces.pop(leaf), key=_position)
        comparer = Comparer(self.sides, self.size)
        first, second = (np.concatenate([each[side] for each in ordered]) for side in (1, 2))
        comparer.update(leaf * LEAF, {"a": first, "b": second})
        self._add(comparer.result())


def _position(piece: tuple[int, Array, Array]) -> int:
    return piece[0]


def measures(found: Comparison) -> list[float]:
    """Compute all statistics of a pair of tensors of one shape."""
    if found.equal == found.count:
        return [0.0, found.count, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    head = [1.0, found.count, found.equal / found.count, found.nan, found.inf]
    if not found.finite:
        return [*head, math.nan, math.nan, math.nan, math.nan]
    d, a, b, product, exponent = found.sums()
    rmse = _scaled(math.sqrt(d / found.finite), int(exponent))
    return [*head, found.largest, rmse, _relative(d, a), _cosine(d, a, b, product)]


def _relative(difference: float, squares: float) -> float:
    if squares:
        return math.sqrt(difference / squares)
    return math.inf if difference else 0.0


def _cosine(difference: float, a: float, b: float, product: float) -> float:
    if not difference:
        return 1.0
    if not (a and b):
        return math.nan
    return max(-1.0, min(1.0, product / (math.sqrt(a) * math.sqrt(b))))


def _scaled(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


def ranked(frame: pd.DataFrame) -> pd.DataFrame:
    """Name what is said of tensors, and sort them."""
    import pandas as pd

    frame = frame[frame["status"].notna()]
    codes = frame["status"].to_numpy(np.int64)
    severity = np.array([_SEVERITY.index(status) for status in STATUSES])
    keys: dict[str, Any] = {"severity": severity[codes]}
    if {"nan", "inf", "count"} <= set(frame.columns):
        keys["spoilt"] = ((frame["nan"] + frame["inf"]) / frame["count"]).to_numpy()
    keys |= {name: frame[name].to_numpy() for name in ("rel_l2", "max_abs") if name in frame}
    # By position: nothing keeps two tensors from having one name.
    order = pd.DataFrame(keys).sort_values(list(keys), ascending=False, kind="stable").index
    names = pd.Categorical.from_codes(codes, list(STATUSES))
    return frame.assign(status=names).iloc[order]


def packed(found: Comparison) -> bytes:
    """Return bytes that `unpacked` makes the same of; pieces of leaves are left out."""
    import msgpack

    counts = [str(getattr(found, name)) for name in _COUNTS]
    data: bytes = msgpack.packb([counts, found.largest, [[*at, *node] for at, node in found.nodes]])
    return data


def unpacked(data: bytes) -> Comparison:
    """Return what `packed` was given."""
    import msgpack

    counts, largest, nodes = msgpack.unpackb(data)
    # As text: msgpack has no large integers, and what is no text is none of them.
    numbers: dict[str, Any] = {
        name: int(count, 10) for name, count in zip(_COUNTS, counts, strict=True)
    }
    tree = tuple(((int(n[0]), int(n[1])), (n[2], n[3], n[4], n[5], n[6])) for n in nodes)
    return Comparison(**numbers, largest=float(largest), nodes=tree)
