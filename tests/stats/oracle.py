"""A slow check of explanations of two tensors, and pairs to explain."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tests.stats.causes import quantized, rope

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, np.dtype[Any]]

TYPES = {
    name: np.dtype(getattr(ml_dtypes, name, getattr(np, name, None)))
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32")
}
_ROUNDED = {**TYPES, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def is_so(row: pd.Series, a: Array, b: Array) -> bool:
    """Return whether a statement of fact about two tensors holds."""
    causes = set(row["cause"].split("+")) - {"renamed"}
    if row["explanation"].startswith(("a is", "equal after rounding b")):
        a, b = b, a
    x, y = _floats(a), _floats(b)
    if "unknown" in causes:
        return not np.array_equal(x, y, equal_nan=True)
    if "quantised" in causes:
        (block,) = re.findall(r"blocks of (\d+)", row["explanation"])
        return _is_quantised(x, y, int(block))
    if "low_rank" in causes:
        return _has_rank(x, y, int(row["rank"]), near="rounded" in causes)
    with np.errstate(all="ignore"):
        z = x * row["scale"] if "scaled" in causes else x
        z = z + row["offset"] if "offset" in causes else z
        if "offset" in causes or "scaled" in causes:
            z = z if b.dtype == np.float64 else z.astype(np.float32)
        types = re.findall("float8_e4m3fn|float8_e5m2|bfloat16|float\\d+", row["explanation"])
        for dtype in [_ROUNDED[name] for name in types] or [b.dtype]:
            z = z.astype(dtype) if types or "offset" in causes or "scaled" in causes else z
        z = z.astype(np.float64)
    candidates = _arranged(z, y, causes, row)
    return any(_equal(candidate, y, pruned="pruned" in causes) for candidate in candidates)


def _arranged(z: Array, y: Array, causes: set[str], row: pd.Series) -> list[Array]:
    """Return the possible arrangements of numbers for the explained causes."""
    if "transposed" in causes:
        z = z.T
    if z.ndim == 3:  # rows run along the last axis
        z, y = (u.reshape(-1, u.shape[-1] if u.ndim > 1 else 1) for u in (z, y))
    if "rope_permuted" in causes:
        heads = int(row["heads"])
        pairs = [(z, y), (y, z), (z.T, y.T), (y.T, z.T)]
        fitting = [pair for pair in pairs if len(pair[0]) % (2 * heads) == 0]
        return [y for u, v in fitting if _equal(rope(u, heads), v, pruned=False)]
    if "rows_permuted" in causes:
        same = np.array_equal(_sorted(z), _sorted(y), equal_nan=True)
        same = same or np.array_equal(_sorted(z.T), _sorted(y.T), equal_nan=True)
        return [y] if same else []
    if "padded" in causes or "cut" in causes:
        small, large = (z, y) if "padded" in causes else (y, z)
        if small.ndim == 1 < large.ndim:  # each element is a row
            small = small[:, None]
        if 3 in {small.ndim, large.ndim}:  # rows run along the last axis
            small, large = (side.reshape(-1, side.shape[-1]) for side in (small, large))
        same = _equal(large[tuple(slice(0, size) for size in small.shape)], small, pruned=False)
        explanation = row["explanation"]
        if "of zeros" in explanation:
            same &= np.count_nonzero(large) == np.count_nonzero(small)
        return [y] if same else []
    return [z]


def _sorted(rows: Array) -> Array:
    rows = rows.reshape(len(rows), -1) + 0.0
    ordered: Array = rows[np.lexsort(rows.T)]
    return ordered


def _equal(z: Array, y: Array, *, pruned: bool) -> bool:
    if z.shape != y.shape:
        return z.size == y.size and _equal(z.reshape(-1), y.reshape(-1), pruned=pruned)
    same = (z == y) | (np.isnan(z) & np.isnan(y))
    return bool((same | (y == 0) if pruned else same).all())


def _is_quantised(x: Array, y: Array, block: int) -> bool:
    """Return whether no number is farther from its level than half of the smallest step."""
    u, v = x.reshape(-1), y.reshape(-1)
    for at in range(0, len(u), block):
        levels = np.unique(v[at : at + block])
        error = np.abs(u[at : at + block] - v[at : at + block]).max()
        span = float(levels[-1] - levels[0]) if len(levels) > 1 else 0.0
        if len(levels) > 1 and error > 0.51 * np.diff(levels).min() + 1e-3 * span:
            return False
        if len(levels) == 1 and error and len(u[at : at + block]) > 1:
            return False
    return True


def _has_rank(x: Array, y: Array, rank: int, *, near: bool) -> bool:
    difference = (y - x).reshape(len(y), -1)
    values = np.linalg.svd(difference, compute_uv=False)
    residual = np.sqrt(np.sum(values[rank:] ** 2) / np.sum(values**2))
    return bool(residual <= (0.7 if near else 2e-3))


def _floats(values: Array) -> Array:
    floats: Array = values.astype(np.float64)
    return floats


# --- pairs ------------------------------------------------------------------------------------


def random_pair(rng: np.random.Generator) -> tuple[Array, Array]:
    """Return two tensors: unrelated, or one made of the other, spoilt perhaps."""
    shape = tuple(int(n) for n in rng.integers(1, 13, rng.integers(0, 4)))
    if rng.random() < 0.3:
        shape = (int(rng.choice([8, 16, 24])), int(rng.choice([8, 12, 32])))
    a = _numbers(rng, shape)
    b = a.astype(np.float32) if rng.random() < 0.6 else _numbers(rng, shape).astype(np.float32)
    for _ in range(rng.integers(0, 3)):
        b = _STEPS[rng.integers(len(_STEPS))](rng, b)
    if b.size and rng.random() < 0.3:
        place = rng.integers(b.size)
        b = b.copy()
        b.reshape(-1)[place] = rng.choice([0.0, 1.0, -3.0, np.nan, np.inf, b.reshape(-1)[0]])
    return a, np.ascontiguousarray(_cast(rng, b))


def _numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    kind = rng.integers(5)
    values = np.asarray(rng.standard_normal(shape))
    if kind == 1:
        values = np.round(values)
    elif kind == 2:
        values = np.abs(np.round(values * 2))
    elif kind == 3:
        values = np.where(rng.random(shape) < 0.7, 0, values)
    elif kind == 4:
        values = np.full(shape, rng.choice([0.0, 1.0, -2.5]))
    return _cast(rng, values)


def _cast(rng: np.random.Generator, values: Array) -> Array:
    names = list(TYPES)
    dtype = TYPES["float32"] if rng.random() < 0.6 else TYPES[names[rng.integers(len(names))]]
    with np.errstate(all="ignore"):
        if dtype.kind in "iu":
            values = np.clip(np.nan_to_num(values), 0, 100)
        cast: Array = values.astype(dtype)
    return cast


def _pruned(rng: np.random.Generator, x: Array) -> Array:
    return np.where(rng.random(x.shape) < 0.4, np.float32(0), x)


def _updated(rng: np.random.Generator, x: Array) -> Array:
    if not x.size:
        return x
    flat = x.reshape(len(x), -1) if x.ndim else x.reshape(1, 1)
    update = rng.standard_normal((flat.shape[0], 1)) @ rng.standard_normal((1, flat.shape[1]))
    return (flat + update.astype(np.float32)).reshape(x.shape)


def _permuted(rng: np.random.Generator, x: Array) -> Array:
    return x[rng.permutation(len(x))] if x.ndim else x


def _rope(rng: np.random.Generator, x: Array) -> Array:  # noqa: ARG001
    return rope(x, 2) if x.ndim and len(x) % 4 == 0 and len(x) else x


def _extended(rng: np.random.Generator, x: Array) -> Array:
    new = rng.choice([0.0, 1.0])
    return np.concatenate([x, np.full((2, *x.shape[1:]), new, x.dtype)]) if x.ndim else x


def _coarse(rng: np.random.Generator, x: Array) -> Array:  # noqa: ARG001
    return quantized(x, levels=8, block=x.size, symmetric=False) if x.size and np.ptp(x) > 0 else x


_STEPS = (
    lambda rng, x: x + np.float32(rng.choice([1.0, -0.5, 0.1])),
    lambda rng, x: x * np.float32(rng.choice([2.0, -1.0, 0.3])),
    lambda rng, x: x.astype(ml_dtypes.bfloat16).astype(np.float32),  # noqa: ARG005
    lambda rng, x: x.T,  # noqa: ARG005
    _pruned,
    _updated,
    _permuted,
    _rope,
    _extended,
    lambda rng, x: x[:-1] if x.ndim else x,  # noqa: ARG005
    _coarse,
)
