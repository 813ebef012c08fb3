"""Updates of low rank, as a LoRA adapter that was merged: they describe a changed tensor.

The rows of the difference are projected on random vectors, which span those of a matrix of low rank
(Halko, Martinsson and Tropp, SIAM Review 53, 217, 2011). The rest beside that span is measured over
all elements in a second pass.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.comparison.explaining.outcome import Explanation
from xckpt.comparison.explaining.rounding import FRACTION_BITS, spacing_of
from xckpt.errors import locating
from xckpt.scan.cluster import send_out
from xckpt.statistics.spectra import blas_threads, in_memory
from xckpt.storage.limits import cpu_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.progress import Progress
    from xckpt.scan.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]

# Norm of a difference beside its low rank, relative to the norm of the difference.
_LEFT = 1e-3
_HIGHEST = 64
_SMALLEST_SIDE = 8
_OVERSAMPLED = 16
# Rows, and columns, that differ for each one of the rank.
_WIDE = 2
# Rows and columns of a sample that decides whether a pass is worthwhile.
_TRIED_ROWS = 160
_TRIED_COLUMNS = 2048
_BLOCK_NBYTES = 8 << 20
# Projections of a side, in memory; tensors that can only be read whole.
_LARGEST = 96 << 20
_LARGEST_WHOLE = 256 << 20


@dataclass(frozen=True, slots=True)
class _Update:
    """Two tensors of one shape; pickles by reference."""

    name: str
    number: int
    a: Any
    b: Any
    kind: str
    nbytes: int

    def blocks(self, step: int) -> Iterator[tuple[int, Array, Array]]:
        """Return rows of both as floats, and where they begin."""
        shape = self.b.shape
        inner = (slice(None),) * (len(shape) - 1)
        for start in range(0, shape[0], step):
            key = (slice(start, min(start + step, shape[0])), *inner)
            x, y = (in_memory(side[key]) for side in (self.a, self.b))
            # The rounding of float32 is far below `_LEFT`.
            wide = np.float64 in {x.dtype.type, y.dtype.type}
            dtype = np.float64 if wide else np.float32
            x, y = (values.astype(dtype, copy=False) for values in (x, y))
            yield start, x.reshape(len(x), -1), y.reshape(len(y), -1)


def low_ranks(pairs: Mapping[int, tuple[Reader, Reader]], bar: Progress) -> dict[int, Explanation]:
    """Find the pairs whose difference has a low rank, one after the other."""
    updates = []
    for number, (a, b) in pairs.items():
        shape = b.array.shape
        if (
            len(shape) < 2
            or min(shape[0], prod(shape[1:])) < _SMALLEST_SIDE
            or {a.array.dtype.kind, b.array.dtype.kind} & set("biuc")
            or any(r.whole and r.size * r.kind.itemsize > _LARGEST_WHOLE for r in (a, b))
        ):
            continue
        x, y = (in_memory(r.array[...]) if r.whole else r.array for r in (a, b))
        updates.append(_Update(b.name, number, x, y, b.kind.name, a.nbytes + b.nbytes))
    explanations: dict[int, Explanation] = {}

    def deliver(update: Any, explanation: Explanation | None) -> None:
        if explanation is not None:
            explanations[update.number] = explanation
        bar.advance(update.nbytes)

    bar.expect(sum(update.nbytes for update in updates))
    local_updates = send_out(updates, _low_rank, deliver, lambda update: update.b)
    with ThreadPoolExecutor(cpu_count(), "xckpt-explain") as threads, blas_threads(1):
        for update, explanation in zip(
            local_updates, threads.map(_low_rank, local_updates), strict=True
        ):
            deliver(update, explanation)
    return explanations


def _low_rank(update: _Update) -> Explanation | None:
    with locating(tensor=update.name), np.errstate(all="ignore"):
        rows, columns = update.b.shape[0], prod(update.b.shape[1:])
        highest = min(_HIGHEST, min(rows, columns) // 4)
        _, x, y = next(update.blocks(min(rows, _TRIED_ROWS)))
        x, y = (each[:, :_TRIED_COLUMNS].astype(np.float64) for each in (x, y))
        rank, is_noisy = _rank_of(y - x, y, update.kind, min(highest, min(y.shape) // 2))
        size = (rows + columns) * (rank + _OVERSAMPLED) * 8
        if not rank or size > _LARGEST:
            return None
        return _verified(update, rank, is_noisy=is_noisy)


def _rank_of(difference: Array, values: Array, kind: str, highest: int) -> tuple[int, bool]:
    """Return the rank of some rows, 0 if it is not low; and whether rounding hides the rest."""
    if not np.isfinite(difference).all() or not difference.any():
        return 0, False
    wide = difference if difference.shape[0] < difference.shape[1] else difference.T
    squares = np.maximum(np.linalg.eigvalsh(wide @ wide.T)[::-1], 0.0)
    total = float(squares.sum())
    left = total - np.cumsum(squares)
    rank = int(np.argmax(left <= _LEFT**2 * total)) + 1
    if rank <= highest:
        return rank, False
    if kind not in FRACTION_BITS or FRACTION_BITS[kind] > 10:
        return 0, False
    noise = float(np.sum(np.square(spacing_of(values, kind)))) / 12
    rank = int(np.argmax(left <= 1.5 * noise)) + 1
    is_low = left[rank - 1] <= 1.5 * noise and rank <= highest
    # Where it is not noise that was added, the noise adds about the same to each direction.
    gap = squares[rank - 1] > 4 * squares[min(rank, len(squares) - 1)]
    return (rank, True) if is_low and gap else (0, False)


def _spanned(update: _Update, projected: Array, step: int) -> tuple[Array, Array]:
    """Return an orthonormal basis of some columns, and the difference in it."""
    span = np.linalg.qr(projected)[0]
    inside = np.zeros((span.shape[1], prod(update.b.shape[1:])))
    for start, x, y in update.blocks(step):
        inside += span[start : start + len(y)].T.astype(y.dtype) @ (y - x)
    return span, inside


def _verified(update: _Update, rank: int, *, is_noisy: bool) -> Explanation | None:
    rows, columns = update.b.shape[0], prod(update.b.shape[1:])
    step = max(1, _BLOCK_NBYTES // (8 * columns))
    width = min(rank + _OVERSAMPLED, rows, columns)
    projected = np.empty((rows, width))
    directions = np.random.default_rng(0).standard_normal((columns, width), np.float32)
    total, lines, touched = 0.0, 0, np.zeros(columns, np.bool_)
    for start, x, y in update.blocks(step):
        difference = y - x
        is_other = difference != 0
        lines += int(np.count_nonzero(is_other.any(axis=1)))
        touched |= is_other.any(axis=0)
        total += float(np.einsum("ij,ij->", difference, difference, dtype=np.float64))
        projected[start : start + len(y)] = difference @ directions
    # A few rows that changed have a low rank as well, but nobody made them so.
    if not np.isfinite(total) or min(lines, int(touched.sum())) <= _WIDE * rank:
        return None
    span, inside = _spanned(update, projected, step)
    if is_noisy:
        # Unlike random directions, the directions of the update hardly contain noise of rounding.
        for start, x, y in update.blocks(step):
            projected[start : start + len(y)] = (y - x) @ inside.T.astype(y.dtype)
        span, inside = _spanned(update, projected, step)
    u, values, v = np.linalg.svd(inside, full_matrices=False)
    left = np.maximum(total - np.cumsum(np.square(values)), 0.0) / total
    if not is_noisy:
        found = int(np.argmax(left <= _LEFT**2)) + 1
        if left[found - 1] > _LEFT**2:
            return None
        share = f"all but {np.sqrt(left[found - 1]):.1g} of its norm"
        return Explanation(("low_rank",), f"b - a has rank {found} ({share})", rank=found)
    span = span @ (u[:, :rank] * values[:rank])
    held = 0
    for start, x, y in update.blocks(step):
        space = spacing_of(np.maximum(np.abs(x), np.abs(y)), update.kind)
        made = x + span[start : start + len(y)] @ v[:rank]
        held += int(np.count_nonzero(np.abs(y - made) <= space))
    text = f"b is a and an update of rank {rank}, to one step of {update.kind}"
    share = held / (rows * columns)
    if share < 1:
        text += f" for {100 * share:.4g} % of the elements"
    causes = ("low_rank", "rounded")
    return Explanation(causes, text, holds=False, rank=rank) if share > 0.9 else None
