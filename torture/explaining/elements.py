"""Damages of the numbers of one tensor.

Each function changes a float32 copy and returns the new values, or None if it does not fit the
tensor. `ONE` has them by what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from torture.explaining.conversions import interleaved
from torture.explaining.models import F32, Array, Sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    Rng = np.random.Generator
    Change = Callable[[Array, Sizes, Rng], Array | None]

ONE: dict[str, Change] = {}


def one(kind: str) -> Callable[[Change], Change]:
    """Register a damage of the numbers of one tensor."""

    def register(change: Change) -> Change:
        ONE[kind] = change
        return change

    return register


def spread(x: Array) -> float:
    """Return the standard deviation, or a small number for constants."""
    return float(x.std()) or 0.05


def noise(x: Array, share: float, rng: Rng) -> Array:
    """Return noise with a share of the spread of a tensor."""
    return np.asarray(share * spread(x) * rng.standard_normal(x.shape), F32)


def _rows(x: Array) -> Array | None:
    return x.reshape(len(x), -1) if x.ndim > 1 and len(x) > 1 else None


def two(count: int, rng: Rng) -> tuple[int, int]:
    """Draw two different numbers below a count."""
    first, second = rng.choice(count, 2, replace=False)
    return int(first), int(second)


@one("one large element")
def _large(x: Array, _: Sizes, rng: Rng) -> Array:
    x.reshape(-1)[rng.integers(x.size)] += F32(8 * np.abs(x).max() + spread(x))
    return x


@one("one small element")
def _small(x: Array, _: Sizes, rng: Rng) -> Array:
    x.reshape(-1)[rng.integers(x.size)] += F32(spread(x) * 10.0 ** rng.uniform(-3, -0.5))
    return x


@one("last element")
def _last(x: Array, _: Sizes, rng: Rng) -> Array:
    x.reshape(-1)[-1] += F32(spread(x) * rng.choice([0.01, 1, 5]))
    return x


@one("one zero")
def _zero(x: Array, _: Sizes, rng: Rng) -> Array:
    x.reshape(-1)[rng.integers(x.size)] = 0
    return x


@one("two elements exchanged")
def _exchange_elements(x: Array, _: Sizes, rng: Rng) -> Array:
    flat = x.reshape(-1)
    first, second = two(flat.size, rng)
    flat[[first, second]] = flat[[second, first]]
    return x


@one("row of noise")
def _row(x: Array, _: Sizes, rng: Rng) -> Array | None:
    rows = _rows(x)
    if rows is None:
        return None
    rows[rng.integers(len(rows))] = spread(x) * rng.standard_normal(rows.shape[1])
    return x


@one("column of noise")
def _column(x: Array, _: Sizes, rng: Rng) -> Array | None:
    rows = _rows(x)
    if rows is None:
        return None
    rows[:, rng.integers(rows.shape[1])] = spread(x) * rng.standard_normal(len(rows))
    return x


def _heads(x: Array, sizes: Sizes) -> Array | None:
    """Return the rows of a matrix as heads, if there are at least two."""
    if x.ndim != 2 or len(x) % sizes.head or len(x) < 2 * sizes.head:
        return None
    return x.reshape(-1, sizes.head, x.shape[1])


@one("head of noise")
def _head(x: Array, sizes: Sizes, rng: Rng) -> Array | None:
    heads = _heads(x, sizes)
    if heads is None:
        return None
    heads[rng.integers(len(heads))] = spread(x) * rng.standard_normal(heads.shape[1:])
    return x


@one("head of zeros")
def _zero_head(x: Array, sizes: Sizes, rng: Rng) -> Array | None:
    heads = _heads(x, sizes)
    if heads is None:
        return None
    heads[rng.integers(len(heads))] = 0
    return x


@one("signs of one head flipped")
def _negate_head(x: Array, sizes: Sizes, rng: Rng) -> Array | None:
    heads = _heads(x, sizes)
    if heads is None:
        return None
    heads[rng.integers(len(heads))] *= -1
    return x


@one("one head twice")
def _head_twice(x: Array, sizes: Sizes, rng: Rng) -> Array | None:
    heads = _heads(x, sizes)
    if heads is None:
        return None
    first, second = two(len(heads), rng)
    heads[first] = heads[second]
    return x


@one("two heads exchanged")
def _exchange_heads(x: Array, sizes: Sizes, rng: Rng) -> Array | None:
    heads = _heads(x, sizes)
    if heads is None:
        return None
    first, second = two(len(heads), rng)
    heads[[first, second]] = heads[[second, first]]
    return x


@one("heads moved on by one")
def _move_heads(x: Array, sizes: Sizes, _: Rng) -> Array | None:
    heads = _heads(x, sizes)
    return None if heads is None else np.roll(heads, 1, axis=0).reshape(x.shape)


@one("halves of each head exchanged")
def _exchange_halves(x: Array, sizes: Sizes, _: Rng) -> Array | None:
    heads = _heads(x, sizes)
    return None if heads is None else np.roll(heads, sizes.head // 2, axis=1).reshape(x.shape)


@one("halves of the rows exchanged")
def _exchange_both(x: Array, _: Sizes, __: Rng) -> Array | None:
    return None if len(x) % 2 or len(x) < 4 else np.roll(x, len(x) // 2, axis=0)


@one("gates exchanged")
def _gates(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if len(x) % 4 or x.ndim != 2 or len(x) < 8:
        return None
    quarters = x.reshape(4, len(x) // 4, -1)
    first, second = two(4, rng)
    quarters[[first, second]] = quarters[[second, first]]
    return x


@one("two rows exchanged")
def _exchange_rows(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if len(x) < 2:
        return None
    first, second = two(len(x), rng)
    x[[first, second]] = x[[second, first]]
    return x


@one("two columns exchanged")
def _exchange_columns(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if x.ndim < 2 or x.shape[-1] < 2:
        return None
    first, second = two(x.shape[-1], rng)
    x[..., [first, second]] = x[..., [second, first]]
    return x


@one("rows in any order")
def _shuffle(x: Array, _: Sizes, rng: Rng) -> Array | None:
    return None if len(x) < 4 else x[rng.permutation(len(x))]


@one("rows reversed")
def _reverse(x: Array, _: Sizes, __: Rng) -> Array | None:
    return None if len(x) < 2 else x[::-1].copy()


@one("rows shifted by one")
def _shift(x: Array, _: Sizes, rng: Rng) -> Array | None:
    return None if len(x) < 4 else np.roll(x, int(rng.choice([-1, 1])), axis=0)


@one("columns shifted by one")
def _shift_columns(x: Array, _: Sizes, __: Rng) -> Array | None:
    return None if x.ndim < 2 or x.shape[-1] < 2 else np.roll(x, 1, axis=-1)


@one("data shifted by one element")
def _shift_data(x: Array, _: Sizes, __: Rng) -> Array:
    return np.roll(x.reshape(-1), 1).reshape(x.shape)


@one("data in the order of Fortran")
def _fortran(x: Array, _: Sizes, __: Rng) -> Array | None:
    if x.ndim < 2 or len(set(x.shape)) < 2 or 1 in x.shape:
        return None
    return x.reshape(-1).reshape(x.shape, order="F").copy()


@one("interleaved as for rotary embeddings")
def _interleave(x: Array, sizes: Sizes, rng: Rng) -> Array | None:
    heads = int(rng.choice([1, sizes.heads, sizes.key_heads]))
    if x.ndim > 2 or len(x) % (4 * heads):
        return None
    return interleaved(x, heads).copy()


@one("interleaved twice")
def _interleave_twice(x: Array, sizes: Sizes, _: Rng) -> Array | None:
    if x.ndim != 2 or len(x) % (8 * sizes.heads):
        return None
    return interleaved(interleaved(x, sizes.heads), sizes.heads // 2).copy()


@one("transposed, unlike its siblings")
def _transpose(x: Array, _: Sizes, __: Rng) -> Array | None:
    return x.T.copy() if x.ndim == 2 and x.shape[0] == x.shape[1] else None


@one("one row twice")
def _row_twice(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if len(x) < 2:
        return None
    first, second = two(len(x), rng)
    x[first] = x[second]
    return x


@one("row of zeros")
def _zero_row(x: Array, _: Sizes, rng: Rng) -> Array | None:
    rows = _rows(x)
    if rows is None:
        return None
    rows[rng.integers(len(rows))] = 0
    return x


@one("column of zeros")
def _zero_column(x: Array, _: Sizes, rng: Rng) -> Array | None:
    rows = _rows(x)
    if rows is None:
        return None
    rows[:, rng.integers(rows.shape[1])] = 0
    return x


@one("hole of zeros")
def _hole(x: Array, _: Sizes, rng: Rng) -> Array:
    count = int(rng.integers(min(32, x.size), x.size + 1))
    start = int(rng.integers(x.size - count + 1))
    x.reshape(-1)[start : start + count] = 0
    return x


@one("second half never written")
def _half(x: Array, _: Sizes, __: Rng) -> Array:
    x.reshape(-1)[x.size // 2 :] = 0
    return x


@one("never written")
def _never(x: Array, _: Sizes, __: Rng) -> Array:
    return np.zeros_like(x)


@one("one constant")
def _constant(x: Array, _: Sizes, __: Rng) -> Array:
    return np.full_like(x, x.mean())


@one("a run of 32 scaled")
def _scale_run(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if x.size < 64:
        return None
    start = int(rng.integers(x.size // 32)) * 32
    x.reshape(-1)[start : start + 32] *= F32(rng.choice([0.5, 2]))
    return x


@one("smallest tenth set to zero")
def _prune(x: Array, _: Sizes, __: Rng) -> Array:
    x[np.abs(x) < np.quantile(np.abs(x), 0.1)] = 0
    return x


@one("signs flipped")
def _negate(x: Array, _: Sizes, __: Rng) -> Array:
    return -x


@one("signs of one row flipped")
def _negate_row(x: Array, _: Sizes, rng: Rng) -> Array:
    row = rng.integers(len(x))
    x[row] = -x[row]
    return x


@one("signs lost")
def _absolute(x: Array, _: Sizes, __: Rng) -> Array:
    return np.abs(x)


@one("scaled by 1.001")
def _scale(x: Array, _: Sizes, rng: Rng) -> Array:
    factor = 1 + 1e-3 * float(rng.choice([-1, 1]))
    return np.asarray(x * F32(factor), F32)


@one("scaled as attention is")
def _scale_head(x: Array, sizes: Sizes, rng: Rng) -> Array:
    factor = rng.choice([sizes.head**-0.5, 0.5, 2, sizes.width**0.5])
    return np.asarray(x * F32(factor), F32)


@one("one row scaled")
def _scale_row(x: Array, _: Sizes, rng: Rng) -> Array:
    x[rng.integers(len(x))] *= F32(1 + rng.choice([-0.1, 0.01, 0.1]))
    return x


@one("noise of 1e-3")
def _noise_3(x: Array, _: Sizes, rng: Rng) -> Array:
    return x + noise(x, 1e-3, rng)


@one("noise of 1e-6")
def _noise_6(x: Array, _: Sizes, rng: Rng) -> Array:
    return x + noise(x, 1e-6, rng)


@one("stale copy")
def _stale(x: Array, _: Sizes, rng: Rng) -> Array:
    return x + noise(x, float(rng.choice([0.03, 0.3])), rng)


@one("stale copy on a grid")
def _stale_on_grid(x: Array, _: Sizes, rng: Rng) -> Array:
    step = spread(x) / F32(rng.choice([8, 64, 512]))
    return np.asarray(np.rint((x + noise(x, 0.03, rng)) / step) * step, F32)


@one("rounded up to bfloat16")
def _round_up(x: Array, _: Sizes, __: Rng) -> Array:
    rounded = x.astype(ml_dtypes.bfloat16)
    up = np.nextafter(rounded, ml_dtypes.bfloat16(np.inf))
    return np.where(rounded.astype(F32) < x, up, rounded).astype(F32)


@one("initialised anew")
def _anew(x: Array, _: Sizes, rng: Rng) -> Array:
    return np.asarray(x.mean() + noise(x, 1.0, rng), F32)


@one("mean removed")
def _centre(x: Array, _: Sizes, __: Rng) -> Array:
    return np.asarray(x - x.mean(), F32)


@one("means of the rows removed")
def _centre_rows(x: Array, _: Sizes, __: Rng) -> Array | None:
    return x - x.mean(axis=-1, keepdims=True) if x.ndim > 1 and x.shape[-1] > 1 else None


@one("clipped")
def _clip(x: Array, _: Sizes, rng: Rng) -> Array:
    limit = rng.choice([1.5, 2.0, 2.5]) * spread(x)
    return np.clip(x, x.mean() - limit, x.mean() + limit).astype(F32)


@one("some rows rounded to float8")
def _round_rows(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if len(x) < 4:
        return None
    rows = slice(0, int(rng.integers(1, len(x) // 2 + 1)))
    x[rows] = x[rows].astype(ml_dtypes.float8_e4m3fn).astype(F32)
    return x


@one("1 added")
def _add_one(x: Array, _: Sizes, __: Rng) -> Array | None:
    return x + F32(1) if x.ndim == 1 else None


@one("update of low rank")
def _low_rank(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if x.ndim != 2 or min(x.shape) < 4:
        return None
    update = np.outer(rng.standard_normal(len(x)), rng.standard_normal(x.shape[1]))
    return x + (0.1 * spread(x) * update).astype(F32)


@one("vocabulary cut off")
def _cut_off(x: Array, _: Sizes, rng: Rng) -> Array | None:
    return x[: len(x) - int(rng.integers(1, 12))] if x.ndim == 2 and len(x) > 16 else None
