"""Compiled loops over codes: out of the words that several share, and into numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from xckpt.arrays.compiling import compiled

_TILE = 64


@compiled
def unpack_pieces(  # noqa: C901, PLR0912, PLR0917  loops of one purpose; no keywords
    words: Any, pieces: Any, step: int, first: int, add: int, mask: int, out: Any
) -> None:
    """Put codes together from lines of words that lie next to each other."""
    # `words` has the axes line, word, line next to it, and byte of the word. `pieces` has for each
    # code of a period, and each piece of a code: word, byte, shift to the right, mask, and shift to
    # the left. A period has `step` words; the first line begins with its code `first`. `add` is
    # added to codes, within `mask`.
    outer, count, inner = out.shape
    period, most = pieces.shape[:2]
    for line in range(outer):
        for code in range(period):
            # The first and the last period may lack some codes.
            begin = code - first if code >= first else code - first + period
            for piece in range(most):
                word, byte, right, bits, left = pieces[code, piece]
                word += 0 if code >= first else step
                if not bits:
                    continue
                if inner == 1 and not piece and not left:
                    source, target = words[line, word::step, 0, byte], out[line, begin::period, 0]
                    for at in range(len(target)):
                        target[at] = source[at] >> right & bits
                    continue
                for at in range(begin, count, period):
                    source, target = words[line, word, :, byte], out[line, at]
                    if piece:
                        for i in range(inner):
                            target[i] |= (source[i] >> right & bits) << left
                    else:
                        for i in range(inner):
                            target[i] = (source[i] >> right & bits) << left
                    word += step
            if add:
                for at in range(begin, count, period):
                    for i in range(inner):
                        out[line, at, i] = (out[line, at, i] + add) & mask


@compiled
def turn(codes: Any, out: Any) -> None:
    """Copy the transpose in tiles, because neighbours in one array are far apart in the other."""
    rows, columns = codes.shape
    tile = np.empty((_TILE, _TILE), np.uint8)
    for top in range(0, rows, _TILE):
        height = min(_TILE, rows - top)
        for left in range(0, columns, _TILE):
            width = min(_TILE, columns - left)
            for row in range(height):
                for column in range(width):
                    tile[row, column] = codes[top + row, left + column]
            for column in range(width):
                for row in range(height):
                    out[left + column, top + row] = tile[row, column]


@compiled
def scale_codes(  # noqa: PLR0917
    codes: Any,
    table: Any,
    zeros: Any,
    scales: Any,
    biases: Any,
    rows: Any,
    starts: Any,
    groups: Any,
    out: Any,
) -> None:
    """Compute ``(table[code] - zero) * scale + bias`` for lines of codes."""
    # `rows` has the row of each line in the grids. `starts` has the starts of runs of positions
    # that share a column of the grids, and the end; `groups` has these columns. Grids of zero
    # points and of biases may be empty.
    count = codes.shape[1]
    for line in range(codes.shape[0]):
        row = rows[line]
        if len(groups) == count:
            for at in range(count):
                group = groups[at]
                number = table[codes[line, at]]
                if zeros.size:
                    number -= zeros[row, group]
                number *= scales[row, group]
                out[line, at] = number + biases[row, group] if biases.size else number
            continue
        for run in range(len(groups)):
            group = groups[run]
            scale = scales[row, group]
            zero = zeros[row, group] if zeros.size else np.float32(0)
            for at in range(starts[run], starts[run + 1]):
                out[line, at] = (table[codes[line, at]] - zero) * scale
            if biases.size:
                bias = biases[row, group]
                for at in range(starts[run], starts[run + 1]):
                    out[line, at] += bias
