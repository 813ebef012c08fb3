"""How the rows of tensors are arranged in others, by their hashes; no element is read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.explaining.wording import heads_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.statistics.explaining.fingerprints import Fingerprint

Array = np.ndarray[Any, np.dtype[Any]]

# Sizes of heads that are tried first: rows that are alike may fit several.
_USUAL_HEADS = (128, 64, 256, 80, 96, 32, 16)
_SMALLEST_HEAD = 4


@dataclass(frozen=True, slots=True)
class Placement:
    """How the numbers of one tensor are placed in another."""

    causes: tuple[str, ...] = ()
    text: str = ""
    heads: int | None = None


def placement(a: Fingerprint, b: Fingerprint) -> Placement | None:
    """Find how all numbers of two tensors belong together; None if they do not."""
    if a.contents == b.contents:
        return Placement()
    if a.elements == b.elements and a.count == b.count:
        if a.shape == b.shape:
            if a.rows is None or b.rows is None:
                return None
            is_square = a.shape[0] == a.shape[1]
            return _permuted(a.rows, b.rows) or (_transposed(a, b) if is_square else None)
        if a.shape == b.shape[::-1]:
            return _transposed(a, b)
        return None
    return _extended(a, b)


def _transposed(a: Fingerprint, b: Fingerprint) -> Placement | None:
    if a.columns is None or b.columns is None or a.rows is None or b.rows is None:
        return None
    if np.array_equal(a.columns, b.rows):
        return Placement(("transposed",), "transposing")
    found = _permuted(a.columns, b.rows) or _permuted(a.rows, b.columns)
    if found is None:
        return None
    return Placement(("transposed", *found.causes), f"transposing and {found.text}", found.heads)


def _permuted(a: Array, b: Array) -> Placement | None:
    if len(a) != len(b):
        return None
    for heads in _heads(len(a)):
        order = interleaved(len(a), heads)
        for halves, pairs, text in ((a, b, "halves interleaved"), (b, a, "interleaving undone")):
            if halves[order[1]] == pairs[1] and np.array_equal(halves[order], pairs):
                told = f"permuting rows as for rotary embeddings ({heads_of(heads)}, {text})"
                return Placement(("rope_permuted",), told, heads)
    if not np.array_equal(np.sort(a), np.sort(b)):
        return None
    moved = int(np.count_nonzero(a != b))
    return Placement(("rows_permuted",), f"permuting rows ({moved:,} of {len(a):,} moved)")


def _heads(rows: int) -> list[int]:
    """Return how many heads so many rows may be of."""
    sizes = [size for size in range(_SMALLEST_HEAD, rows + 1, 2) if rows % size == 0]
    usual = [size for size in _USUAL_HEADS if size in sizes]
    return [rows // size for size in dict.fromkeys([*usual, *sizes])]


def interleaved(rows: int, heads: int) -> Array:
    """Return where the rows of the halves of each head are once these are interleaved."""
    order: Array = np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
    return order


def _extended(a: Fingerprint, b: Fingerprint) -> Placement | None:
    """Find whether one of two tensors is the beginning of the other."""
    cause, small, large = ("padded", a, b) if a.count < b.count else ("cut", b, a)
    if small.rows is None or large.rows is None:
        return None
    if small.shape[0] > large.shape[0] or small.shape[1] > large.shape[1]:
        return None
    rows = small.shape[0]
    same_rows = np.array_equal(small.rows, large.rows[:rows])
    is_zero = small.elements == large.elements and not large.rows[rows:].any()
    if small.shape[1] == large.shape[1] and same_rows:
        what = f"{large.shape[0] - rows:,} rows"
    elif small.shape[0] == large.shape[0] and _same_columns(small, large):
        what = f"{large.shape[1] - small.shape[1]:,} columns"
    elif same_rows and is_zero:
        # Zeros change no hash, wherever they are: after each row, if the rows are the same.
        columns = large.shape[1] - small.shape[1]
        what = f"{large.shape[0] - rows:,} rows and {columns:,} columns"
    else:
        return None
    if small.shape[1] == large.shape[1] == 1:
        what = what.replace("rows", "elements")
    verb = "adding" if cause == "padded" else "cutting"
    return Placement((cause,), f"{verb} {what} {'of zeros' if is_zero else 'that are not zeros'}")


def _same_columns(small: Fingerprint, large: Fingerprint) -> bool:
    if small.columns is None or large.columns is None:
        return False
    return np.array_equal(small.columns, large.columns[: small.shape[1]])


# --- several tensors ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joint:
    """Of what a tensor is put together, in order."""

    parts: tuple[str, ...]
    causes: tuple[str, ...]
    text: str


def joint(whole: Fingerprint, parts: Mapping[str, Fingerprint]) -> Joint | None:
    """Find the tensors that one is made of: along its rows or columns, transposed or not."""
    for causes, along, own, of_parts in _WAYS:
        hashes: Array | None = getattr(whole, own)
        if hashes is None or len(hashes) < 2:
            continue
        width = whole.shape[1] if own == "rows" else whole.shape[0]
        fitting = {}
        for name, part in parts.items():
            rows: Array | None = getattr(part, of_parts)
            other = part.shape[1] if of_parts == "rows" else part.shape[0]
            if rows is not None and len(rows) < len(hashes) and other == width:
                fitting[name] = rows
        if len(fitting) < 2:
            continue
        found = _in_order(hashes, fitting)
        if found is not None:
            return Joint(found, causes, f"one after the other along the {along}")
        found = _in_any_order(hashes, fitting)
        if found is not None:
            return Joint(found, (*causes, "rows_permuted"), f"with {along} in another order")
    return None


_WAYS = (
    ((), "rows", "rows", "rows"),
    ((), "columns", "columns", "columns"),
    (("transposed",), "rows", "rows", "columns"),
    (("transposed",), "columns", "columns", "rows"),
)


def _in_order(hashes: Array, parts: Mapping[str, Array]) -> tuple[str, ...] | None:
    starting: dict[int, list[str]] = {}
    for name, rows in sorted(parts.items(), key=lambda part: -len(part[1])):
        starting.setdefault(int(rows[0]), []).append(name)
    found: list[str] = []
    at = 0
    while at < len(hashes):
        for name in starting.get(int(hashes[at]), ()):
            rows = parts[name]
            if name not in found and np.array_equal(rows, hashes[at : at + len(rows)]):
                found.append(name)
                at += len(rows)
                break
        else:
            return None
    return tuple(found)


def _in_any_order(hashes: Array, parts: Mapping[str, Array]) -> tuple[str, ...] | None:
    ordered = np.sort(hashes)
    found = []
    for name, rows in parts.items():
        at = np.searchsorted(ordered, rows)
        if rows.any() and np.all(ordered[np.minimum(at, len(ordered) - 1)] == rows):
            found.append(name)
    if len(found) < 2 or sum(len(parts[name]) for name in found) != len(hashes):
        return None
    together = np.sort(np.concatenate([parts[name] for name in found]))
    return tuple(found) if np.array_equal(together, ordered) else None
