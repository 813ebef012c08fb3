"""Compiled loops of the explanations: hashes, rounding, and how many pairs a relation holds for.

As in `xckpt.statistics.kernels` a loop has one purpose, so that LLVM vectorises it, and goes over
as few elements as stay in the cache.
"""

# min and max are compiled anew for each type.

from __future__ import annotations

from typing import Any

import numpy as np

from xckpt.arrays.compiling import compiled, within

# Elements whose hashes are in the cache, next to the weights and sums of their columns.
_PIECE = 1024
_MAGNITUDE, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC00000)

# --- hashes --------------------------------------------------------------------------------------


@within
def _weight(number: Any) -> Any:
    """Return an odd number for a row or column: the next ones of splitmix64."""
    x = (np.uint64(number) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@compiled
def weigh(weights: Any) -> None:
    """Write the weights of columns."""
    for column in range(weights.size):
        weights[column] = _weight(column)


@within
def _mix(words: Any, hashes: Any) -> None:
    """Hash words one by one: no two have one hash, and it has bits everywhere."""
    for i in range(words.size):
        h = np.uint64(words[i]) * np.uint64(0xD6E8FEB86659FD93)
        hashes[i] = h ^ (h >> np.uint64(32))


@within
def _mix_float32(words: Any, hashes: Any) -> None:
    for i in range(words.size):
        word = np.uint32(words[i])
        magnitude = word & _MAGNITUDE
        word = np.uint32(0) if magnitude == 0 else word
        word = _NAN if magnitude > _INFINITY else word
        h = np.uint64(word) * np.uint64(0xD6E8FEB86659FD93)
        hashes[i] = h ^ (h >> np.uint64(32))


@within
def _bits(words: Any) -> Any:
    bits = np.uint64(0)
    for i in range(words.size):
        bits |= np.uint64(words[i])
    return bits


@within
def _total(hashes: Any) -> Any:
    total = np.uint64(0)
    for i in range(hashes.size):
        total += hashes[i]
    return total


@within
def _product(hashes: Any, weights: Any) -> Any:
    total = np.uint64(0)
    for i in range(hashes.size):
        total += hashes[i] * weights[i]
    return total


@within
def _add(hashes: Any, factor: Any, sums: Any) -> None:
    for i in range(hashes.size):
        sums[i] += factor * hashes[i]


@compiled
def hash_rows(  # noqa: PLR0917
    words: Any, weights: Any, row: Any, column: Any, sums: Any, columns: Any, tally: Any
) -> None:
    """Add up hashes of a run of elements, which begins in a row and a column.

    The tally has those of all at their places, of all in any order, and all bits that are set.
    """
    memory = np.empty(_PIECE, np.uint64)
    line = 0
    for start in range(0, words.size, _PIECE):
        piece = words[start : start + _PIECE]
        hashes = memory[: piece.size]
        if words.itemsize == 4:
            _mix_float32(piece, hashes)
        else:
            _mix(piece, hashes)
        tally[1] += _total(hashes)
        tally[2] |= _bits(piece)
        at = 0
        while at < piece.size:
            stop = min(piece.size, at + weights.size - column)
            part = hashes[at:stop]
            sums[line] += _product(part, weights[column : column + part.size])
            if columns.size:
                factor = _weight(row + np.uint64(line))
                _add(part, factor, columns[column : column + part.size])
            column += part.size
            at = stop
            if column == weights.size:
                line += 1
                column = 0
    for line in range(sums.size):
        # Another weight, or a square matrix would have the hash of its transpose.
        tally[0] += _weight(row + np.uint64(line) + np.uint64(1 << 48)) * sums[line]
