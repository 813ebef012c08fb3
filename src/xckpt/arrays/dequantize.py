"""Compiled loops from blocks of quantised elements to float32, one for each type of blocks.

A kernel decodes `blocks`, one in each row of bytes, to the rows of `out`. All arithmetic is in
float32, in the order of the parentheses and never fused, so that the bits are those of ggml.
`halves` are the values of all float16 by their two bytes as the file has them, so that another byte
order is another table. `grid` is the code book of types that have one.

Loops over the codes of a block have a length that LLVM does not know: it would unroll a short one,
and then no longer vectorise it.

Where elements are looked up in a code book, eight at a time are put as bytes into `stage`; a
second loop, which LLVM vectorises, multiplies them by their scale.

References: ggml-quants.c and ggml-common.h of github.com/ggml-org/ggml at d99724f, under the MIT
licence, copyright (c) 2023-2026 The ggml authors; the code books in ``grids.npz`` are theirs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.compiling import compiled, inlined

if TYPE_CHECKING:
    from collections.abc import Callable

    from xckpt.typing import Array

__all__ = ["decode"]

# Eight bytes, each 255 if its bit is set in the index, else 0; then the same for seven bits, with
# their parity as the eighth.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS = (_BITS * np.uint8(255)).view(np.uint64).ravel()
_EVEN_SIGNS = _SIGNS[np.arange(128) | (_BITS[:128].sum(1) & 1).astype(np.int64) << 7]
_ONES = np.uint64(0x0101010101010101)

_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# Twice the values of 4-bit floats, with 0 instead of -0.
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_E8M0 = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
# Unsigned float8 with four bits of an exponent, halved; 0x7F is 0.
_CODES = np.arange(256) & 127
_UE4M3 = np.where(
    _CODES >> 3 > 0,
    np.ldexp(1 + (_CODES & 7) / 8, (_CODES >> 3) - 8),
    np.ldexp((_CODES & 7) / 8.0, -7),
).astype(np.float32)
_UE4M3[0x7F] = 0
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


@cache
def _halves(byteorder: str) -> Array:
    """Return all values of float16, by their two bytes read as a little-endian integer."""
    codes = np.arange(1 << 16, dtype="<u2" if byteorder == "little" else ">u2")
    table = np.empty(1 << 16, np.float32)
    table[codes.view("<u2")] = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    return table


@cache
def _grid(name: str) -> Array:
    """Return the code book of a type, with a row in each integer; empty for other types."""
    book = {"iq1_m": "iq1_s"}.get(name, name)
    with np.load(Path(__file__).with_name("grids.npz")) as books:
        rows = books[book] if book in books else np.empty((0, 8), np.int8)
    if book == "iq1_s":  # in eighths, with an eighth added, then with one taken off
        rows = np.concatenate([8 * rows + 1, 8 * rows - 1]).astype(np.int8)
    return rows.view(f"u{rows.shape[1]}").ravel().astype(np.uint64)


def decode(name: str, blocks: Array, out: Array, byteorder: str = "little") -> None:
    """Decode blocks of a type, one in each row, to the rows of `out`."""
    _KERNELS[name](blocks, out, _halves(byteorder), _grid(name))


_KERNELS: dict[str, Any] = {}


def _kernel(function: Callable[..., None]) -> Any:
    """Compile the loop of the type that it is called like."""
    _KERNELS[function.__name__] = compiled(function)
    return _KERNELS[function.__name__]


@inlined
def _half(b: Any, at: Any, halves: Any) -> Any:
    return halves[np.int64(b[at]) | np.int64(b[at + 1]) << 8]


@inlined
def _u16(b: Any, at: Any) -> Any:
    return np.uint32(b[at]) | np.uint32(b[at + 1]) << 8


@inlined
def _u32(b: Any, at: Any) -> Any:
    low = np.uint32(b[at]) | np.uint32(b[at + 1]) << 8
    return np.uint32(low | np.uint32(b[at + 2]) << 16 | np.uint32(b[at + 3]) << 24)


@inlined
def _signed(values: Any, negative: Any) -> Any:
    """Negate the bytes of eight that a mask selects."""
    return (values ^ negative) + (negative & _ONES)


@inlined
def _scaled(scale: Any, codes: Any, out: Any) -> None:
    for j in range(out.size):
        out[j] = scale * np.float32(codes[j])


@inlined
def _looked_up(scale: Any, q: Any, values: Any, out: Any) -> None:
    """Look up 4-bit codes: the low halves of all bytes, then the high ones."""
    for j in range(q.size):
        out[j] = scale * values[q[j] & 15]
        out[q.size + j] = scale * values[q[j] >> 4]


@_kernel
def q4_0(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d, q = _half(b, 0, halves), b[2:]
        for j in range(q.size):
            o[j] = d * np.float32(np.int32(q[j] & 15) - 8)
            o[q.size + j] = d * np.float32(np.int32(q[j] >> 4) - 8)


@_kernel
def q4_1(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d, m, q = _half(b, 0, halves), _half(b, 2, halves), b[4:]
        for j in range(q.size):
            o[j] = d * np.float32(q[j] & 15) + m
            o[q.size + j] = d * np.float32(q[j] >> 4) + m


@_kernel
def q5_0(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d, high, q = _half(b, 0, halves), _u32(b, 2), b[6:]
        for j in range(16):
            low, up = q[j] & 15 | (high >> j & 1) << 4, q[j] >> 4 | (high >> j + 16 & 1) << 4
            o[j] = d * np.float32(np.int32(low) - 16)
            o[16 + j] = d * np.float32(np.int32(up) - 16)


@_kernel
def q5_1(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d, m, high, q = _half(b, 0, halves), _half(b, 2, halves), _u32(b, 4), b[8:]
        for j in range(16):
            low, up = q[j] & 15 | (high >> j & 1) << 4, q[j] >> 4 | (high >> j + 16 & 1) << 4
            o[j] = d * np.float32(np.int32(low)) + m
            o[16 + j] = d * np.float32(np.int32(up)) + m


@_kernel
def q8_0(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b = blocks[i]
        _scaled(_half(b, 0, halves), b[2:].view(np.int8), out[i])


@_kernel
def q8_1(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b = blocks[i]
        _scaled(_half(b, 0, halves), b[4:].view(np.int8), out[i])


@_kernel
def q8_k(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b = blocks[i]
        _scaled(_u32(b, 0).view(np.float32), b[4:260].view(np.int8), out[i])


@_kernel
def q2_k(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d, m = _half(b, 80, halves), _half(b, 82, halves)
        for k in range(16):
            scale, least = d * np.float32(b[k] & 15), m * np.float32(b[k] >> 4)
            at, shift = 16 + k // 8 * 32 + k % 2 * 16, k % 8 // 2 * 2
            q, p = b[at : at + 16], o[16 * k : 16 * k + 16]
            for j in range(p.size):
                p[j] = scale * np.float32(q[j] >> shift & 3) - least


@_kernel
def q3_k(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 108, halves)
        for k in range(16):
            low = np.int64(b[96 + k] & 15 if k < 8 else np.int64(b[88 + k]) >> 4)
            scale = d * np.float32(np.int32(low | (b[104 + k % 4] >> k // 4 * 2 & 3) << 4) - 32)
            at, shift, bit = 32 + k // 8 * 32 + k % 2 * 16, k % 8 // 2 * 2, k // 2
            q, high = b[at : at + 16], b[k % 2 * 16 : k % 2 * 16 + 16]
            p = o[16 * k : 16 * k + 16]
            for j in range(p.size):
                code = np.int32(q[j] >> shift & 3) + np.int32((high[j] >> bit & 1) << 2)
                p[j] = scale * np.float32(code - 4)


@inlined
def _k_scales(b: Any, s: Any, d: Any, m: Any) -> Any:
    """Return the scale and the least value of a sub-block of Q4_K and Q5_K."""
    if s < 4:
        scale, least = b[4 + s] & 63, b[8 + s] & 63
    else:
        scale = b[8 + s] & 15 | np.int64(b[s]) >> 6 << 4
        least = np.int64(b[8 + s]) >> 4 | np.int64(b[4 + s]) >> 6 << 4
    return d * np.float32(scale), m * np.float32(least)


@_kernel
def q4_k(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d, m = _half(b, 0, halves), _half(b, 2, halves)
        for s in range(8):
            scale, least = _k_scales(b, s, d, m)
            at, shift = 16 + s // 2 * 32, s % 2 * 4
            q, p = b[at : at + 32], o[32 * s : 32 * s + 32]
            for j in range(p.size):
                p[j] = scale * np.float32(q[j] >> shift & 15) - least


@_kernel
def q5_k(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d, m = _half(b, 0, halves), _half(b, 2, halves)
        high = b[16:48]
        for s in range(8):
            scale, least = _k_scales(b, s, d, m)
            at, shift = 48 + s // 2 * 32, s % 2 * 4
            q, p = b[at : at + 32], o[32 * s : 32 * s + 32]
            for j in range(p.size):
                code = q[j] >> shift & 15 | (high[j] >> s & 1) << 4
                p[j] = scale * np.float32(code) - least


@_kernel
def q6_k(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 208, halves)
        for k in range(16):
            scale = d * np.float32(np.int8(b[192 + k]))
            h, r, odd = k // 8, k % 8 // 2, k % 2 * 16
            low, up = 64 * h + r % 2 * 32 + odd, 128 + 32 * h + odd
            q, high, p = b[low : low + 16], b[up : up + 16], o[16 * k : 16 * k + 16]
            for j in range(p.size):
                code = q[j] >> r // 2 * 4 & 15 | (high[j] >> 2 * r & 3) << 4
                p[j] = scale * np.float32(np.int32(code) - 32)


@_kernel
def tq1_0(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 52, halves)
        at = 0
        for start, count, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
            for n in range(digits):
                q, p = b[start : start + count], o[at : at + count]
                for j in range(p.size):
                    code = np.uint16(np.uint8(q[j] * _POWERS_OF_3[n])) * np.uint16(3) >> 8
                    p[j] = d * np.float32(np.int32(code) - 1)
                at += count


@_kernel
def tq2_0(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 64, halves)
        for s in range(8):
            q, p = b[s // 4 * 32 : s // 4 * 32 + 32], o[32 * s : 32 * s + 32]
            for j in range(p.size):
                p[j] = d * np.float32(np.int32(q[j] >> s % 4 * 2 & 3) - 1)


@_kernel
def q1_0(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 0, halves)
        for k in range(16):
            for j in range(8):
                o[8 * k + j] = d if b[2 + k] >> j & 1 else -d


@_kernel
def q2_0(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 0, halves)
        for k in range(16):
            for j in range(4):
                o[4 * k + j] = np.float32(np.int32(b[2 + k] >> 2 * j & 3) - 1) * d


@_kernel
def mxfp4(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b = blocks[i]
        _looked_up(_E8M0[b[0]], b[1:], _FP4, out[i])


@_kernel
def nvfp4(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        for k in range(4):
            _looked_up(_UE4M3[b[k]], b[4 + 8 * k : 12 + 8 * k], _FP4, o[16 * k : 16 * k + 16])


@_kernel
def iq4_nl(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b = blocks[i]
        _looked_up(_half(b, 0, halves), b[2:], _IQ4, out[i])


@_kernel
def iq4_xs(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d, high = _half(b, 0, halves), _u16(b, 2)
        for s in range(8):
            code = b[4 + s // 2] >> s % 2 * 4 & 15 | (high >> 2 * s & 3) << 4
            scale = d * np.float32(np.int32(code) - 32)
            _looked_up(scale, b[8 + 16 * s : 24 + 16 * s], _IQ4, o[32 * s : 32 * s + 32])


@_kernel
def iq2_xxs(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    stage = np.empty(4, np.uint64)
    codes = stage.view(np.int8)
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 0, halves)
        for s in range(8):
            word = _u32(b, 6 + 8 * s)
            for g in range(4):
                signs = _EVEN_SIGNS[word >> 7 * g & 127]
                stage[g] = _signed(grid[b[2 + 8 * s + g]], signs)
            scale = (d * (np.float32(0.5) + np.float32(word >> 28))) * np.float32(0.25)
            _scaled(scale, codes, o[32 * s : 32 * s + 32])


@_kernel
def iq2_xs(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    stage = np.empty(2, np.uint64)
    codes = stage.view(np.int8)
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 0, halves)
        for k in range(16):
            for g in range(2):
                word = _u16(b, 2 + 4 * k + 2 * g)
                stage[g] = _signed(grid[word & 511], _EVEN_SIGNS[word >> 9])
            code = b[66 + k // 2] >> k % 2 * 4 & 15
            scale = (d * (np.float32(0.5) + np.float32(code))) * np.float32(0.25)
            _scaled(scale, codes, o[16 * k : 16 * k + 16])


@_kernel
def iq2_s(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    stage = np.empty(2, np.uint64)
    codes = stage.view(np.int8)
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 0, halves)
        for k in range(16):
            for g in range(2):
                at = np.int64(b[2 + 2 * k + g])
                at |= np.int64(b[66 + k // 2]) << 8 - 2 * (k % 2 * 2 + g) & 0x300
                stage[g] = _signed(grid[at], _SIGNS[b[34 + 2 * k + g]])
            code = b[74 + k // 2] >> k % 2 * 4 & 15
            scale = (d * (np.float32(0.5) + np.float32(code))) * np.float32(0.25)
            _scaled(scale, codes, o[16 * k : 16 * k + 16])


@_kernel
def iq3_xxs(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    stage = np.empty(4, np.uint64)
    codes = stage.view(np.int8)
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 0, halves)
        for s in range(8):
            word = _u32(b, 66 + 4 * s)
            for g in range(4):
                at = 2 + 8 * s + 2 * g
                values = grid[b[at]] | grid[b[at + 1]] << np.uint64(32)
                stage[g] = _signed(values, _EVEN_SIGNS[word >> 7 * g & 127])
            scale = (d * (np.float32(0.5) + np.float32(word >> 28))) * np.float32(0.5)
            _scaled(scale, codes, o[32 * s : 32 * s + 32])


@_kernel
def iq3_s(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    stage = np.empty(4, np.uint64)
    codes = stage.view(np.int8)
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 0, halves)
        for s in range(8):
            high = np.int64(b[66 + s])
            for g in range(4):
                at = 2 + 8 * s + 2 * g
                first = np.int64(b[at]) | (high >> 2 * g & 1) << 8
                second = np.int64(b[at + 1]) | (high >> 2 * g + 1 & 1) << 8
                values = grid[first] | grid[second] << np.uint64(32)
                stage[g] = _signed(values, _SIGNS[b[74 + 4 * s + g]])
            scale = d * np.float32(1 + 2 * (b[106 + s // 2] >> s % 2 * 4 & 15))
            _scaled(scale, codes, o[32 * s : 32 * s + 32])


@_kernel
def iq1_s(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    stage = np.empty(4, np.uint64)
    codes = stage.view(np.int8)
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = _half(b, 0, halves)
        for s in range(8):
            high = _u16(b, 34 + 2 * s)
            for g in range(4):
                at = b[2 + 4 * s + g] | (high >> 3 * g & 7) << 8 | (high >> 15) << 11
                stage[g] = grid[at]
            scale, p = d * np.float32(2 * (high >> 12 & 7) + 1), o[32 * s : 32 * s + 32]
            for j in range(p.size):
                p[j] = scale * (np.float32(codes[j]) * np.float32(0.125))


@_kernel
def iq1_m(blocks: Any, out: Any, halves: Any, grid: Any) -> None:
    stage = np.empty(2, np.uint64)
    codes = stage.view(np.int8)
    for i in range(blocks.shape[0]):
        b, o = blocks[i], out[i]
        d = halves[b[49] >> 4 | b[51] & 0xF0 | (b[53] & 0xF0) << 4 | (b[55] & 0xF0) << 8]
        for k in range(16):
            for g in range(2):
                high = np.int64(b[32 + k]) >> 4 * g & 15
                stage[g] = grid[np.int64(b[2 * k + g]) | (high & 7) << 8 | (high >> 3) << 11]
            code = _u16(b, 48 + k // 4 * 2) >> k % 4 * 3 & 7
            scale, p = d * np.float32(2 * code + 1), o[16 * k : 16 * k + 16]
            for j in range(p.size):
                p[j] = scale * (np.float32(codes[j]) * np.float32(0.125))
