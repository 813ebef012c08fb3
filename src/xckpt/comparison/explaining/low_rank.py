"""Low-rank updates, such as merged LoRA adapters, and rows of zeros: descriptions of changes.

Random projections of the rows of the difference span its column space if its rank is low (Halko,
Martinsson and Tropp, SIAM Review 53, 217, 2011). A second pass measures the remainder outside that
span over all elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.lazy import dense_values as in_memory
from xckpt.comparison.explaining.outcome import Explanation
from xckpt.comparison.relations.causes import FRACTION_BITS, spacing_of
from xckpt.errors import locating
from xckpt.scan.cluster import send_out
from xckpt.statistics.spectra import blas_threads
from xckpt.storage.limits import cpu_count
from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.arrays.streams import ElementStream
    from xckpt.progress import Progress
    from xckpt.typing import Array

#: The least correlation of the sides of a low-rank update.
NEAR = 0.5
# Largest norm of the remainder, relative to the norm of the difference.
_REMAINDER = 1e-3
_HIGHEST = 64
_SMALLEST_SIDE = 8
_OVERSAMPLED = 16
# An update of rank r has to change more than this many times r rows and columns.
_WIDE = 2
# Rows and columns of the sample that decides whether a pass is worthwhile.
_TRIED_ROWS = 160
_TRIED_COLUMNS = 2048
_BLOCK_NBYTES = 8 << 20
# Largest projections in memory, and largest tensors among those that can only be read whole.
_LARGEST = 96 << 20
_LARGEST_WHOLE = 256 << 20


@dataclass(frozen=True, slots=True)
class _Update:
    """Two tensors of one shape to compare, as lazy arrays that a worker process can open."""

    name: str
    number: int
    a: Any
    b: Any
    kind: str
    nbytes: int

    def blocks(self, step: int) -> Iterator[tuple[int, Array, Array]]:
        """Yield the first row of each block, and the rows of both tensors as float matrices."""
        shape = self.b.shape
        inner = (slice(None),) * (len(shape) - 1)
        for start in range(0, shape[0], step):
            key = (slice(start, min(start + step, shape[0])), *inner)
            x, y = (in_memory(side[key]) for side in (self.a, self.b))
            # The rounding error of float32 is far below `_REMAINDER`.
            wide = np.float64 in {x.dtype.type, y.dtype.type}
            dtype = np.float64 if wide else np.float32
            x, y = (values.astype(dtype, copy=False) for values in (x, y))
            yield start, x.reshape(len(x), -1), y.reshape(len(y), -1)


def low_ranks(
    pairs: Mapping[int, tuple[ElementStream, ElementStream]], bar: Progress
) -> dict[int, Explanation]:
    """Explain the pairs whose difference has a low rank, by their numbers."""
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
    with Threads(cpu_count(), "xckpt-explain") as threads, blas_threads(1):
        for update, explanation in zip(
            local_updates, threads.map(_low_rank, local_updates), strict=True
        ):
            deliver(update, explanation)
    return explanations


def zero_rows(source: ElementStream, result: ElementStream) -> list[int]:
    """Return the rows that only became zeros in the result; none if other elements did, too."""
    count, columns = result.array.shape[0], prod(result.array.shape[1:])
    is_whole = source.whole or result.whole
    step = count if is_whole else max(1, _BLOCK_NBYTES // (8 * columns))
    inner = (slice(None),) * (len(result.array.shape) - 1)
    rows: list[int] = []
    for start in range(0, count, step):
        key = slice(start, min(start + step, count)), *inner
        x, y = (in_memory(side.array[key]) for side in (source, result))
        lost = ((x != 0) & (y == 0)).reshape(len(x), -1).any(axis=1)
        if np.any(y[lost] != 0):
            return []
        rows += (start + np.flatnonzero(lost)).tolist()
    return rows


def _low_rank(update: _Update) -> Explanation | None:
    with locating(tensor=update.name), np.errstate(all="ignore"):
        rows, columns = update.b.shape[0], prod(update.b.shape[1:])
        highest = min(_HIGHEST, min(rows, columns) // 4)
        _, x, y = next(update.blocks(min(rows, _TRIED_ROWS)))
        x, y = (values[:, :_TRIED_COLUMNS].astype(np.float64) for values in (x, y))
        rank, is_noisy = _rank_of(y - x, y, update.kind, min(highest, min(y.shape) // 2))
        size = (rows + columns) * (rank + _OVERSAMPLED) * 8
        if not rank or size > _LARGEST:
            return None
        return _verified(update, rank, is_noisy=is_noisy)


def _rank_of(difference: Array, values: Array, kind: str, highest: int) -> tuple[int, bool]:
    """Return the rank of sampled rows, 0 if it is not low; and whether rounding hides it partly."""
    if not np.isfinite(difference).all() or not difference.any():
        return 0, False
    wide = difference if difference.shape[0] < difference.shape[1] else difference.T
    squares = np.maximum(np.linalg.eigvalsh(wide @ wide.T)[::-1], 0.0)
    total = float(squares.sum())
    remainder = total - np.cumsum(squares)
    rank = int(np.argmax(remainder <= _REMAINDER**2 * total)) + 1
    if rank <= highest:
        return rank, False
    if kind not in FRACTION_BITS or FRACTION_BITS[kind] > 10:
        return 0, False
    noise = float(np.sum(np.square(spacing_of(values, kind)))) / 12
    rank = int(np.argmax(remainder <= 1.5 * noise)) + 1
    is_low = remainder[rank - 1] <= 1.5 * noise and rank <= highest
    # Noise adds about the same to each direction; a real update ends with a drop.
    gap = squares[rank - 1] > 4 * squares[min(rank, len(squares) - 1)]
    return (rank, True) if is_low and gap else (0, False)


def _spanned(update: _Update, projected: Array, step: int) -> tuple[Array, Array]:
    """Return an orthonormal basis of projected columns, and the difference in that basis."""
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
        differs = difference != 0
        lines += int(np.count_nonzero(differs.any(axis=1)))
        touched |= differs.any(axis=0)
        total += float(np.einsum("ij,ij->", difference, difference, dtype=np.float64))
        projected[start : start + len(y)] = difference @ directions
    # A few changed rows also have a low rank, without being an adapter.
    if not np.isfinite(total) or min(lines, int(touched.sum())) <= _WIDE * rank:
        return None
    span, inside = _spanned(update, projected, step)
    if is_noisy:
        # Project again on the directions of the update, which contain little rounding noise.
        for start, x, y in update.blocks(step):
            projected[start : start + len(y)] = (y - x) @ inside.T.astype(y.dtype)
        span, inside = _spanned(update, projected, step)
    u, values, v = np.linalg.svd(inside, full_matrices=False)
    remainder = np.maximum(total - np.cumsum(np.square(values)), 0.0) / total
    if not is_noisy:
        smallest_rank = int(np.argmax(remainder <= _REMAINDER**2)) + 1
        if remainder[smallest_rank - 1] > _REMAINDER**2:
            return None
        share = f"all but {np.sqrt(remainder[smallest_rank - 1]):.1g} of its norm"
        return Explanation(
            ("low_rank",), f"b - a has rank {smallest_rank} ({share})", rank=smallest_rank
        )
    span = span @ (u[:, :rank] * values[:rank])
    near_count = 0
    for start, x, y in update.blocks(step):
        space = spacing_of(np.maximum(np.abs(x), np.abs(y)), update.kind)
        expected = x + span[start : start + len(y)] @ v[:rank]
        near_count += int(np.count_nonzero(np.abs(y - expected) <= space))
    text = f"b is a and an update of rank {rank}, to one step of {update.kind}"
    share = near_count / (rows * columns)
    if share < 1:
        text += f" for {100 * share:.4g} % of the elements"
    causes = ("low_rank", "rounded")
    return Explanation(causes, text, holds=False, rank=rank) if share > 0.9 else None
