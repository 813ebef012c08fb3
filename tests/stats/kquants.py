"""Encoders of K-quants for tests: the scales span each group, and codes are the nearest ones.

The quantisers of ggml search for better scales. What their blocks mean is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32


def kquantized(values: Array, name: str) -> Array:
    """Return rows of blocks, as bytes, of a type such as ``"q4_k"``."""
    rows = np.ascontiguousarray(values, F32)
    blocks = ENCODERS[name](rows.reshape(-1, 256))
    return np.ascontiguousarray(blocks).reshape(*rows.shape[:-1], -1)


def _half(values: Array) -> tuple[Array, Array]:
    """Return float16 as bytes, and what they stand for."""
    halves = values.astype(np.float16)
    return halves.view(np.uint8).reshape(len(values), 2), halves.astype(F32)


def _nearest(x: Array, scale: Array, most: int, low: int = 0) -> Array:
    codes = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale != 0))
    return np.clip(codes, low, most).astype(np.int16)


def _affine(blocks: Array, group: int, most: int, bits: int) -> tuple[Any, ...]:
    """Return codes, and scales and minima of so many bits, with the float16 of each."""
    x = blocks.reshape(len(blocks), -1, group)
    low = np.minimum(x.min(axis=2), 0)
    step = (x.max(axis=2) - low) / most
    top = (1 << bits) - 1
    d, d_value = _half(step.max(axis=1, keepdims=True) / top)
    m, m_value = _half(-low.min(axis=1, keepdims=True) / top)
    scales = _nearest(step, np.broadcast_to(d_value, step.shape), top)
    minima = _nearest(-low, np.broadcast_to(m_value, step.shape), top)
    width = (d_value * scales)[..., None]
    shifted = x + (m_value * minima)[..., None]
    codes = _nearest(shifted, np.broadcast_to(width, x.shape), most)
    return codes.reshape(len(blocks), 256), scales, minima, d, m


def _symmetric(blocks: Array, half: int, top: int) -> tuple[Any, ...]:
    """Return codes around zero in groups of 16, and their scales."""
    x = blocks.reshape(len(blocks), 16, 16)
    step = np.abs(x).max(axis=2) / half
    d, d_value = _half(step.max(axis=1, keepdims=True) / top)
    scales = _nearest(step, np.broadcast_to(d_value, step.shape), top)
    width = (d_value * scales)[..., None]
    codes = _nearest(x, np.broadcast_to(width, x.shape), half - 1, -half)
    return codes.reshape(len(blocks), 256), scales, d


def _six_bits(scales: Array, minima: Array) -> Array:
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    return np.concatenate([first, second, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], axis=1)


def _pairs(codes: Array) -> Array:
    """Put the low four bits of codes into bytes: groups of 32, two in one run of bytes."""
    q = codes.reshape(-1, 4, 2, 32) & 15
    return (q[:, :, 0] | q[:, :, 1] << 4).astype(np.uint8).reshape(len(codes), 128)


def _quarters(codes: Array) -> Array:
    """Put two bits of codes into bytes: groups of 32, four in one run of bytes."""
    q = (codes & 3).reshape(-1, 2, 4, 32)
    shifts = (2 * np.arange(4)).reshape(1, 1, 4, 1)
    packed: Array = np.bitwise_or.reduce(q << shifts, axis=2).astype(np.uint8)
    return packed.reshape(len(codes), 64)


def _bits(codes: Array) -> Array:
    """Put one bit of codes into bytes: eight groups of 32 in one run of bytes."""
    q = (codes & 1).reshape(-1, 8, 32)
    packed: Array = np.bitwise_or.reduce(q << np.arange(8).reshape(1, 8, 1), axis=1)
    return packed.astype(np.uint8)


def _q2_k(blocks: Array) -> Array:
    codes, scales, minima, d, m = _affine(blocks, 16, 3, 4)
    both = (scales | minima << 4).astype(np.uint8)
    return np.concatenate([both, _quarters(codes), d, m], axis=1)


def _q3_k(blocks: Array) -> Array:
    codes, scales, d = _symmetric(blocks, 4, 31)
    codes, s = codes + 4, (scales + 32).astype(np.uint8)
    low = s[:, :8] & 15 | (s[:, 8:] & 15) << 4
    high = np.bitwise_or.reduce((s >> 4).reshape(-1, 4, 4) << (2 * np.arange(4))[:, None], axis=1)
    packed = np.concatenate([low, high.astype(np.uint8)], axis=1)
    return np.concatenate([_bits(codes >> 2), _quarters(codes), packed, d], axis=1)


def _q4_k(blocks: Array) -> Array:
    codes, scales, minima, d, m = _affine(blocks, 32, 15, 6)
    return np.concatenate([d, m, _six_bits(scales, minima), _pairs(codes)], axis=1)


def _q5_k(blocks: Array) -> Array:
    codes, scales, minima, d, m = _affine(blocks, 32, 31, 6)
    high = _bits(codes >> 4)
    return np.concatenate([d, m, _six_bits(scales, minima), high, _pairs(codes)], axis=1)


def _q6_k(blocks: Array) -> Array:
    codes, scales, d = _symmetric(blocks, 32, 127)
    q = (codes + 32).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).astype(np.uint8).reshape(-1, 128)
    shifts = (2 * np.arange(4)).reshape(1, 1, 4, 1)
    high = np.bitwise_or.reduce((q >> 4) << shifts, axis=2).astype(np.uint8).reshape(-1, 64)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), d], axis=1)


ENCODERS: dict[str, Callable[[Array], Array]] = {
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
