"""Singular values of matrices that need not fit in memory, and statistics of them.

One pass over blocks of rows sums up the inner products of the columns (the Gram matrix of the
shorter side) in float64. Its eigenvalues are the squares of the singular values. Rounding hides
values below about 1e-4 of the largest, so another pass projects the rows on the directions of the
hidden values, where the largest value is smaller and hides less.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from xckpt.arrays.kinds import Kind
    from xckpt.statistics.definitions import Groups
    from xckpt.typing import Array

#: Statistics of a matrix, in order.
STATISTICS = (
    "spectral_norm",
    "frobenius",
    "stable_rank",
    "effective_rank",
    "rank",
    "condition",
    "alpha",
    "noise_floor",
)
#: Statistics of several matrices as the blocks of a block-diagonal matrix, which has all of their
#: singular values. Only the rank is the sum of theirs, with the floor of each.
MERGES: dict[str, Callable[[Groups], Array]] = {
    "spectral_norm": lambda g: g.highest(g["spectral_norm"]),
    "frobenius": lambda g: g.norm("frobenius"),
    "stable_rank": lambda g: (g.norm("frobenius") / g.highest(g["spectral_norm"])) ** 2,
    "rank": lambda g: g.total("rank"),
    "condition": lambda g: (
        g.highest(g["spectral_norm"]) / -g.highest(-g["spectral_norm"] / g["condition"])
    ),
    "noise_floor": lambda g: g.highest(g["noise_floor"]),
}
#: Singular values below this share of the largest are reported as NaN.
FLOOR = 1e-9

# Largest relative error of the values above the floor.
_ACCURACY = 1e-6
_EPSILON = float(np.finfo(np.float64).eps)
# Largest error of an eigenvalue, in roundings of the largest eigenvalue.
_ROUNDINGS = 60
_HIDDEN = _ROUNDINGS * _EPSILON / (2 * _ACCURACY)
# Columns whose products are summed up at once.
_PANEL = 512
# Range of a sum of squares that has neither overflowed nor lost precision.
_SQUARES = 1e-200, 1e300
# With fewer columns, computing all values takes no longer.
_FEWEST_FOR_LANCZOS = 64
# Columns for each that is iterated, with which all eigenvectors take longer, and most iterations.
_WORTH_ITERATING, _MOST_ITERATIONS = 8, 6
# Largest singular values: columns of a block beyond their number, and at most; columns of all
# blocks, in blocks and in singular values. With more, all values are as quick.
_MORE_DIRECTIONS, _MOST_DIRECTIONS, _MOST_BLOCKS, _MOST_TIMES = 16, 64, 16, 4
# They are tested whenever the columns have grown this much, until their sum lacks no more than this
# share of all squares.
_GROWTH, _MISSING = 1.25, 1e-6
# Largest matrix that is kept in memory as float32, and the range of its sum of squares.
_KEPT_NBYTES = 256 << 20
_SQUARES_OF_SINGLE = 1e-20, 1e20
# Mask of the exponent of a float64, and length of the fraction of a float16.
_EXPONENT = np.uint64(0x7FF0000000000000)
_FRACTION_OF_HALF = 10
# Elements whose rounding is estimated at once.
_NOISE_ELEMENTS = 1 << 15
# The least number of elements in a tail.
_FEWEST_IN_TAIL = 2


def singular_values(blocks: Callable[[], Iterable[Array]], threads: int = 1) -> Array:
    """Return all singular values of a matrix, largest first; NaN for values below the floor."""
    # `blocks` returns an iterator over blocks of rows, and is called for each pass. The matrix has
    # at least as many rows as columns. All values are NaN if any element is not finite.
    scale = 1.0
    gram = _gram(blocks, scale, threads)
    if not _SQUARES[0] < np.trace(gram).real < _SQUARES[1]:
        scale = max((float(np.abs(block).max(initial=0)) for block in blocks()), default=0.0)
        if scale == 0 or not np.isfinite(scale):
            return np.full(len(gram), scale * 0)
        gram = _gram(blocks, scale, threads)
    values = np.full(len(gram), np.nan)
    basis: Array | None = None
    done = 0
    while True:
        # scipy would hold the interpreter's lock for as long as it computes.
        squares: Array = np.linalg.eigvalsh(gram)[::-1]
        largest = squares[0] if basis is None else values[0] ** 2
        count = int(np.count_nonzero(squares > max(_HIDDEN * squares[0], FLOOR**2 * largest)))
        values[done : done + count] = np.sqrt(squares[:count])
        done += count
        if not count or done == len(values):
            return values * scale
        directions = _hidden_directions(gram, squares[0], len(gram) - count)
        basis = directions if basis is None else basis @ directions
        gram = _gram(blocks, scale, threads, basis)


def _hidden_directions(gram: Array, largest: float, count: int) -> Array:
    """Return the eigenvectors of the smallest eigenvalues, which are below the hidden share."""
    # Inverse iteration takes a fraction of the time that all eigenvectors do. With a smaller shift,
    # solutions would be too inexact for vectors as good as those of LAPACK.
    size, width = len(gram), 2 * count + _MORE_DIRECTIONS
    if _WORTH_ITERATING * width <= size:
        shifted = gram + _HIDDEN / 8 * largest * np.eye(size)
        vectors = np.random.default_rng(0).standard_normal((size, width))
        for _ in range(_MOST_ITERATIONS):
            basis = np.linalg.qr(np.linalg.solve(shifted, vectors))[0]
            squares, turned = np.linalg.eigh(basis.conj().T @ gram @ basis)
            vectors = basis @ turned
            hidden: Array = vectors[:, :count]
            residuals = np.linalg.norm(gram @ hidden - hidden * squares[:count], axis=0)
            if residuals.max() <= _ROUNDINGS / 4 * _EPSILON * largest:
                return hidden
    smallest: Array = np.linalg.eigh(gram)[1][:, :count]
    return smallest


def values_of_product(left: Array, right: Array, scale: float) -> Array:
    """Return the singular values of ``scale * left @ right``, largest first, without forming it."""
    # Values below the floor are NaN, and all beyond the rank of the factors.
    values = np.full(min(len(left), right.shape[1]), np.nan)
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return values
    # The factors of QR with orthonormal columns do not change singular values.
    inner = np.linalg.qr(left)[1] @ np.linalg.qr(right.T)[1].T
    product_values = np.linalg.svd(scale * inner, compute_uv=False)[: len(values)]
    is_above = product_values > FLOOR * product_values[0]
    if not is_above.any():  # all are zero
        return np.zeros_like(values)
    values[: np.count_nonzero(is_above)] = product_values[is_above]
    return values


class Factorized(NamedTuple):
    """Two factors, whose product is the best approximation of a matrix, and its squares."""

    left: Array
    right: Array
    #: Sum of the squares of the matrix, and of the values that the factors have.
    total: float
    kept: float
    #: Whether values above the rounding are left out.
    is_cut: bool = False
    rank: int = 0

    @property
    def energy(self) -> float:
        """Share of the squares that the factors have."""
        return min(1.0, self.kept / self.total) if self.total > 0 else 1.0

    def turned(self) -> Factorized:
        """Return the factors of the transposed matrix."""
        return self._replace(left=self.right.T, right=self.left.T)


def best_factors(
    blocks: Callable[[], Iterable[Array]],
    noise: RoundingNoise,
    choose: Callable[[Array, float], int],
    most: int,
    threads: int = 1,
) -> Factorized:
    """Return factors with at most `most` of the largest singular values above the rounding.

    `choose` returns the number of values, given their squares and the sum of all squares. The first
    pass over the blocks completes `noise`.
    """
    rows = _Rows(blocks)
    total = rows.total
    if not _SQUARES[0] < total < _SQUARES[1]:
        nothing = np.zeros((0, 0))
        return Factorized(nothing, nothing, 0.0 if total <= _SQUARES[0] else math.nan, 0.0)
    squared = noise.floor() ** 2
    floor = squared if squared == squared else 0.0  # noqa: PLR0124  unknown rounding
    largest = _largest_values(rows, lambda squares: choose(squares, total), most, floor)
    if largest is None:
        squares, vectors = np.linalg.eigh(_gram(blocks, 1.0, threads))
        largest = squares[::-1], vectors[:, ::-1]
    squares, vectors = largest
    # One more than `most` shows whether others are left out.
    is_above = squares[: most + 1] > max(floor, _HIDDEN * squares[0])
    available = squares[: max(1, np.count_nonzero(is_above))]
    rank = choose(available, total)
    basis = vectors[:, :rank]
    projected = np.concatenate([(_wide(block) @ basis).astype(np.float32) for block in blocks()])
    norms = np.sqrt(np.square(projected, dtype=np.float64).sum(axis=0))
    balance = np.sqrt(np.where(norms > 0, norms, 1))
    return Factorized(
        projected / balance.astype(np.float32),
        (basis * balance).T.astype(np.float32),
        total,
        float(np.square(norms).sum()),
        rank < len(available),
        rank,
    )


class _Rows:
    """A matrix for products in float32, kept in memory unless it is large."""

    def __init__(self, blocks: Callable[[], Iterable[Array]]) -> None:
        self._read = blocks
        self._kept: list[Array] | None = []
        #: Sum of the squares.
        self.total = 0.0
        self.shape = 0, 0
        for block in blocks():
            rows = _wide(block)
            self.total += float(np.vdot(rows, rows).real)
            self.shape = self.shape[0] + len(rows), rows.shape[1]
            if 4 * math.prod(self.shape) > _KEPT_NBYTES:
                self._kept = None
            if self._kept is not None:
                with np.errstate(over="ignore"):
                    self._kept.append(_narrow(rows))

    @property
    def is_in_range(self) -> bool:
        """Whether products in float32 neither overflow nor lose precision."""
        return _SQUARES_OF_SINGLE[0] < self.total < _SQUARES_OF_SINGLE[1]

    def _blocks(self) -> Iterable[Array]:
        return map(_narrow, self._read()) if self._kept is None else self._kept

    def times(self, vectors: Array) -> Array:
        """Return the product of the matrix and some columns."""
        narrow = _narrow(vectors)
        return _wide(np.concatenate([block @ narrow for block in self._blocks()]))

    def transposed_times(self, vectors: Array) -> Array:
        """Return the product of the adjoint matrix and some columns."""
        narrow, first = _narrow(vectors), 0
        product = np.zeros((self.shape[1], vectors.shape[1]), vectors.dtype)
        for block in self._blocks():
            product += block.conj().T @ narrow[first : first + len(block)]
            first += len(block)
        return product


def _largest_values(
    rows: _Rows, choose_count: Callable[[Array], int], most: int, floor: float
) -> tuple[Array, Array] | None:
    """Return squares of the largest singular values, and their right vectors.

    Those beyond the count, or below the floor, are inexact. Return None if all are as quick.
    """
    # Block Golub-Kahan bidiagonalisation with full orthogonalisation: Golub, Luk and Overton, A
    # block Lanczos method for computing the singular values of a matrix, ACM TOMS 7, 149 (1981).
    columns = rows.shape[1]
    width = min(most + _MORE_DIRECTIONS, _MOST_DIRECTIONS)
    highest = min(columns // 2, max(_MOST_BLOCKS * width, _MOST_TIMES * most))
    if 2 * width > highest or not rows.is_in_range:
        return None
    rng = np.random.default_rng(0)
    start = rng.standard_normal((columns, width))
    right_basis, left_basis, image = (
        np.zeros((size, 0)) for size in (columns, rows.shape[0], columns)
    )
    inner = np.zeros((0, 0))
    tested = 0
    for size in range(width, highest + 1, width):
        right_basis, _ = _extended(right_basis, start)
        left_basis, column = _extended(left_basis, rows.times(right_basis[:, -width:]))
        inner = np.hstack([np.pad(inner, ((0, width), (0, 0))), column])
        image = np.hstack([image, rows.transposed_times(left_basis[:, -width:])])
        if size > width and size >= _GROWTH * tested:
            tested = size
            u, values, v = np.linalg.svd(inner)
            squares, vectors = np.square(values), right_basis @ v.conj().T
            residuals = np.linalg.norm(image @ u - vectors * values, axis=0) * values
            is_rounding = squares + residuals < max(2 * floor, _HIDDEN * squares[0])
            above = int(np.argmax(is_rounding)) if is_rounding.any() else size
            count = min(choose_count(squares), above)
            if count < size and _error_of_sum(squares, residuals, count) <= _MISSING * rows.total:
                return squares, vectors
        # Where the matrix has no more directions, any others do.
        length = np.linalg.norm(image[:, -width:]) / math.sqrt(columns)
        start = image[:, -width:] + _EPSILON * length * rng.standard_normal((columns, width))
    return None


def _extended(basis: Array, vectors: Array) -> tuple[Array, Array]:
    """Return a basis with the directions of more vectors, and the coordinates of these vectors."""
    added = vectors
    for _ in range(3):  # once leaves rounding, and twice does not suffice if little else is left
        added = np.linalg.qr(added - basis @ (basis.conj().T @ added))[0]
    extended = np.hstack([basis, added])
    return extended, extended.conj().T @ vectors


def _error_of_sum(squares: Array, residuals: Array, count: int) -> float:
    """Estimate what the sum of the first squares lacks, given the residuals of their vectors."""
    # Parlett, The symmetric eigenvalue problem, theorem 11.7.1.
    gaps = np.maximum(squares[:count] - squares[count], np.finfo(np.float64).tiny)
    return float(np.minimum(residuals[:count], np.square(residuals[:count]) / gaps).sum())


def factors_of_product(
    left: Array, right: Array, scale: float, choose: Callable[[Array, float], int]
) -> Factorized:
    """Return factors with the largest singular values of ``scale * left @ right``."""
    bases, inner = zip(*map(np.linalg.qr, (left, right.T)), strict=True)
    u, values, v = np.linalg.svd(scale * inner[0] @ inner[1].T, full_matrices=False)
    squares = np.square(values)
    total = float(squares.sum())
    rank = max(1, choose(squares, total))
    root = np.sqrt(values[:rank])
    return Factorized(
        bases[0] @ (u[:, :rank] * root),
        (root[:, None] * v[:rank]) @ bases[1].T,
        total,
        float(squares[:rank].sum()),
        rank < len(values),
        rank,
    )


def _gram(
    blocks: Callable[[], Iterable[Array]], scale: float, threads: int, basis: Array | None = None
) -> Array:
    """Return the sum of the outer products of the rows."""
    total: Array | None = None
    with Threads(threads, "xckpt-products") as pool:
        for block in blocks():
            rows = _wide(block)
            if scale != 1:
                rows /= scale
            if basis is not None:
                rows = rows @ basis
            if total is None:
                total = np.zeros((rows.shape[1],) * 2, rows.dtype)
            # Panels have one size, so that sums are the same on any number of threads.
            add = partial(_add_products, total, rows)
            firsts = range(0, rows.shape[1], _PANEL)
            for future in [pool.submit(add, first) for first in firsts] if threads > 1 else ():
                future.result()
            for first in firsts if threads == 1 else ():
                add(first)
    if total is None:
        return np.zeros((0, 0))
    lower = np.tril(total, -1)
    return np.tril(total) + lower.conj().T


def _add_products(total: Array, rows: Array, first: int) -> None:
    """Add the products of some columns with these and all later ones, the lower triangle."""
    panel = rows[:, first : first + _PANEL]
    with np.errstate(over="ignore", invalid="ignore"):
        target = total[first:, first : first + _PANEL]
        np.add(target, rows[:, first:].conj().T @ panel, out=target)


def describe_largest(blocks: Callable[[], Iterable[Array]], columns: int) -> list[float]:
    """Return the statistics that follow from the largest singular value and the sum of squares."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = sum((float(np.vdot(block, block).real) for block in map(_wide, blocks())), 0.0)
    if columns < _FEWEST_FOR_LANCZOS or not _SQUARES[0] < total < _SQUARES[1]:
        values = singular_values(blocks)
        return describe_values(values, (columns, columns), _EPSILON)
    from scipy.sparse.linalg import LinearOperator, eigsh  # type: ignore[import-untyped]

    dtype = next(iter(blocks())).dtype

    def product(vector: Array) -> Array:
        image = np.zeros(columns, np.result_type(dtype, np.float64))
        for block in map(_wide, blocks()):
            image += block.conj().T @ (block @ vector.reshape(-1))
        return image

    operator = LinearOperator((columns, columns), matvec=product, dtype=np.result_type(dtype, "f8"))
    start = np.random.default_rng(0).standard_normal(columns)
    square = eigsh(operator, k=1, v0=start, tol=1e-9, return_eigenvectors=False)
    largest = float(np.sqrt(square.real[0]))
    unknown = [np.nan] * (len(STATISTICS) - 3)
    return [largest, float(np.sqrt(total)), total / largest**2, *unknown]


def _wide(block: Array) -> Array:
    return block.astype(np.complex128 if block.dtype.kind == "c" else np.float64)


def _narrow(block: Array) -> Array:
    return block.astype(np.complex64 if block.dtype.kind == "c" else np.float32)


def describe_values(
    values: Array, shape: tuple[int, int], epsilon: float, noise: float = 0.0
) -> list[float]:
    """Compute `STATISTICS`, in order, from singular values; NaN if unknown or without meaning."""
    # Values are largest first, NaN below the floor; NaN counts as zero, except for the condition.
    # `shape` has rows and columns, `epsilon` is the relative rounding of the element type, `noise`
    # the largest singular value that rounding explains, or NaN if that is unknown.
    if np.isnan(values[0]):
        return [np.nan] * len(STATISTICS)
    positive = values[values > 0]
    if not len(positive):
        return [0.0, 0.0, np.nan, np.nan, 0.0, np.nan, np.nan, noise]
    largest = float(positive[0])
    share = positive / largest
    squares = float(np.sum(np.square(share)))
    floor = max(max(shape) * epsilon * largest, noise) if noise == noise else np.nan  # noqa: PLR0124
    rank = float(np.count_nonzero(positive > floor))
    # Without noise, all values count.
    weights = positive[positive > noise] / np.sum(positive[positive > noise])
    effective = float(np.exp(-np.sum(weights * np.log(weights)))) if len(weights) else np.nan
    condition = largest / float(values[-1]) if values[-1] > 0 else np.inf
    if np.isnan(values[-1]) or values[-1] < noise:
        condition = np.nan
    if np.isnan(noise):
        rank = effective = condition = np.nan
    alpha = power_law(np.square(share))[0]
    norm = largest * np.sqrt(squares)
    return [largest, norm, squares, effective, rank, condition, alpha, floor]


class RoundingNoise:
    """Bound on the singular values that rounding to the stored types adds to a difference."""

    # The error of each element is assumed to be independent and uniform over the distance to the
    # next number. The largest singular value of such errors is about the square root of the largest
    # variance of a row plus the square root of the largest variance of a column (Latała, "Some
    # estimates of norms of random matrices", Proc. AMS 133, 2005).

    # A kind is None if the rounding is unknown, as for quantised matrices.
    def __init__(self, kinds: Sequence[Kind | None]) -> None:
        self.sides = [None if kind is None else _RoundingSums(kind) for kind in kinds]
        self.is_complete = False

    def add(self, blocks: Sequence[Array]) -> None:
        """Add a block of rows of each matrix."""
        for side, block in zip(self.sides, blocks, strict=True):
            if side is not None:
                side.add(block)

    def floor(self) -> float:
        """Return the bound, once all rows were added; NaN if it is unknown."""
        rows, columns, largest = np.zeros(1), np.zeros(1), 0.0
        for side in self.sides:
            if side is None:
                return np.nan
            variance = side.unit**2 / 12
            rows = rows + variance * np.concatenate(side.rows)
            columns = columns + variance * side.columns
            largest += variance * side.largest
        spread = np.sqrt(largest * np.log(len(rows) + len(columns)))
        return float(np.sqrt(rows.max()) + np.sqrt(columns.max()) + spread)


class _RoundingSums:
    """Sums over rows and columns of the squared power of two at or below each element."""

    def __init__(self, kind: Kind) -> None:
        import ml_dtypes

        finfo: Any = ml_dtypes.finfo  # untyped
        info = finfo(kind.dtype)
        self._fraction = int(info.nmant)
        self._least = float(info.smallest_normal)
        self._is_wide = kind.name in {"float32", "float64"}
        self._bits = 0
        self.rows: list[Array] = []
        self.columns = np.zeros(1)
        self.largest = 0.0

    def add(self, block: Array) -> None:
        """Add a block of rows."""
        step = max(1, _NOISE_ELEMENTS // max(1, block.shape[1]))
        for first in range(0, len(block), step):  # in the caches of the processor
            numbers = _wide(block[first : first + step])
            if numbers.dtype.kind == "c":  # the errors of both parts add up
                self.add_numbers(np.stack([numbers.real, numbers.imag]))
            else:
                self.add_numbers(numbers[None])

    def add_numbers(self, parts: Array) -> None:
        """Add the parts of a block of rows, along the first axis."""
        patterns = np.ascontiguousarray(parts).view(np.uint64)
        if self._is_wide:
            self._bits |= int(np.bitwise_or.reduce(patterns, axis=None))
        powers = np.maximum((patterns & _EXPONENT).view(np.float64), self._least)
        squares = np.square(powers, out=powers).sum(axis=0)
        self.rows.append(squares.sum(axis=1))
        self.columns = self.columns + squares.sum(axis=0)
        self.largest = max(self.largest, float(squares.max()))

    @property
    def unit(self) -> float:
        """Distance between two neighbouring numbers from 1 to 2."""
        fraction = self._fraction
        if self._is_wide:  # the numbers may have come from a smaller type
            lowest = (self._bits & -self._bits).bit_length() - 1 if self._bits else 52
            used = max(52 - lowest, 0)
            fraction = min(fraction, used) if used <= _FRACTION_OF_HALF else fraction
        return float(2.0**-fraction)


def power_law(values: Array) -> tuple[float, float]:
    """Fit a power law to the tail of positive numbers; return its exponent and the tail's start."""
    # The exponent is the maximum-likelihood estimate. The start of the tail minimises the
    # Kolmogorov-Smirnov distance between the tail and the law: Clauset, Shalizi and Newman,
    # Power-law distributions in empirical data, SIAM Review 51, 661 (2009), equations 3.1 and 3.9.
    ordered = np.sort(values)
    if len(ordered) <= _FEWEST_IN_TAIL:
        return np.nan, np.nan
    logs = np.log(ordered)
    # Lengths of all tails, and the sums of the logarithms in them.
    counts = np.arange(len(logs), 0, -1)
    sums = np.cumsum(logs[::-1])[::-1]
    spread = sums - counts * logs
    first = np.flatnonzero(np.diff(logs, prepend=-np.inf) > 0)  # starts, without duplicates
    first = first[(counts[first] >= _FEWEST_IN_TAIL) & (spread[first] > 0)]
    if not len(first):
        return np.nan, np.nan
    slopes = counts[first] / spread[first]  # alpha - 1
    distances = [
        np.abs(
            -np.expm1(-slope * (logs[start:] - logs[start]))
            - np.arange(counts[start]) / counts[start]
        ).max()
        for start, slope in zip(first.tolist(), slopes.tolist(), strict=True)
    ]
    best = int(np.argmin(distances))
    return 1 + float(slopes[best]), float(ordered[first[best]])
