"""Look for the numbers of tensors in other places, orders and tensors, by their hashes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.explaining.fingerprints import (
    Transform,
    fingerprints,
    is_complex,
)
from xckpt.statistics.explaining.relations import FRACTION_BITS, INEXACT, scales_between, spacing_of
from xckpt.statistics.explaining.wording import Explanation, heads_of, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from xckpt.progress import Progress
    from xckpt.statistics.explaining.fingerprints import Fingerprint
    from xckpt.statistics.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]
Prints = dict[int, "Fingerprint"]

# Tensors that one may be compared with, beyond that of its name.
_MOST_CANDIDATES = 16
_MOST_JOINT = 4096
# Sizes of heads that are tried first: rows that are alike may fit several.
_USUAL_HEADS = (128, 64, 256, 80, 96, 32, 16)
_SMALLEST_HEAD = 4
# Bits of a float32 that numbers of these types do not have.
_LOST = {"bfloat16": 0xFFFF, "float16": 0x1FFF}


class Search:
    """What is not in its place, by the numbers of cases; both sides of those of one name."""

    def __init__(
        self, readers: Mapping[int, tuple[Reader | None, Reader | None]], bar: Progress
    ) -> None:
        self.sides: tuple[dict[int, Reader], dict[int, Reader]] = ({}, {})
        for n, both in readers.items():
            for side, reader in zip(self.sides, both, strict=True):
                if reader is not None and reader.size and not is_complex(reader):
                    side[n] = reader
        self.bar = bar
        self.found: tuple[dict[int, Explanation], dict[int, Explanation]] = ({}, {})

    def run(self) -> dict[int, Explanation]:
        """Return what was found of either side; of those of one name, what is said of `a`."""
        if all(self.sides):
            ours, theirs = self._hash(0, self.sides[0]), self._hash(1, self.sides[1])
            self._match(ours, theirs, {})
            self._rounded(ours, theirs)
            self._moved(ours, theirs)
            # Those of one name have nothing to do with each other.
            left = self._left(0, ours), self._left(1, theirs)
            self._match_others(*left, {}, _whole)
        only_b = {n: one for n, one in self.found[1].items() if n not in self.sides[0]}
        return only_b | self.found[0]

    def _hash(
        self,
        side: int,
        readers: Mapping[int, Reader],
        by: Mapping[int, Transform] | None = None,
    ) -> Prints:
        """Hash tensors of one side, as they are or transformed."""
        transforms = [by[n] for n in readers] if by else None
        made = fingerprints(
            list(readers.values()), transforms=transforms, columns=True, progress=self.bar
        )
        return {n: one for n, one in zip(readers, made, strict=True) if one is not None}

    def _left(self, side: int, prints: Mapping[int, Fingerprint]) -> Prints:
        return {n: one for n, one in prints.items() if n not in self.found[side]}

    def _alone(self, ours: Prints, theirs: Prints) -> tuple[Prints, Prints]:
        """Return those that are left and have no tensor of their name on the other side."""
        mine, other = self._left(0, ours), self._left(1, theirs)
        return (
            {n: one for n, one in mine.items() if n not in self.sides[1]},
            {n: one for n, one in other.items() if n not in self.sides[0]},
        )

    # --- as the numbers are ---------------------------------------------------------------------

    def _match(self, ours: Prints, theirs: Prints, by: Mapping[int, Explanation]) -> None:
        """Match hashes of tensors; `by` says what was done with the numbers of some of `a`."""
        ours, theirs = self._left(0, ours), self._left(1, theirs)
        for n in ours.keys() & theirs.keys():
            placed = _placement(ours[n], theirs[n])
            if placed is not None:
                self._say(n, n, placed, by.get(n))
        self._match_others(*self._alone(ours, theirs), by, _whole)
        some = next(iter(by.values()), None)
        self._join(self._left(1, theirs), self._left(0, ours), 1, some)
        self._join(self._left(0, ours), self._left(1, theirs), 0, some)
        self._match_others(*self._alone(ours, theirs), by, _beginning)

    def _match_others(
        self,
        ours: Prints,
        theirs: Prints,
        by: Mapping[int, Explanation],
        keys: Callable[[Fingerprint], Iterable[Any]],
    ) -> None:
        """Find the numbers of tensors under other names."""
        known: dict[Any, list[int]] = defaultdict(list)
        for m, other in theirs.items():
            if not _is_constant(other) or m not in self.sides[0]:
                for key in keys(other):
                    known[key].append(m)
        for n, one in ours.items():
            if _is_constant(one) and n in self.sides[1]:
                continue
            candidates = dict.fromkeys(m for key in keys(one) for m in known.get(key, ()))
            free = [m for m in candidates if m not in self.found[1]]
            for m in [*free, *candidates][:_MOST_CANDIDATES]:
                placed = _placement(one, theirs[m])
                if placed is not None:
                    self._say(n, m, placed, by.get(n))
                    break

    def _say(self, n: int, m: int, placed: Explanation, before: Explanation | None) -> None:
        causes, done = placed.causes, placed.text
        if before is not None:
            causes = (*before.causes, *causes)
            done = " and ".join(filter(None, (before.text, done)))
        after = f" after {done}" if done else ""
        one = replace(before or placed, causes=causes, heads=placed.heads)
        if n == m:
            text = f"equal{after}" if after else "equal, but the shapes differ"
            one = replace(one, causes=causes or ("equal",), text=text)
            self.found[0][n] = self.found[1][n] = one
            return
        for side, number, other in ((0, n, m), (1, m, n)):
            name = self.sides[1 - side][other].name
            text = f"equal to {quoted([name])} of {'ab'[1 - side]}{after}"
            named = replace(one, causes=("renamed", *causes), text=text, other_names=(name,))
            self.found[side].setdefault(number, named)

    def _join(self, wholes: Prints, parts: Prints, side: int, before: Explanation | None) -> None:
        """Find tensors of one side that are made of several of the other."""
        ours, theirs = self.sides[side], self.sides[1 - side]
        alone = {n: one for n, one in parts.items() if n not in ours and one.count > 1}
        if not 1 < len(alone) <= _MOST_JOINT:
            return
        starts = {
            kind: np.array(
                [h[0] if (h := getattr(one, kind)) is not None else 0 for one in alone.values()],
                np.uint64,
            )
            for kind in ("rows", "columns")
        }
        numbers = np.array(list(alone))
        for m, whole in wholes.items():
            near = np.zeros(len(numbers), np.bool_)
            for kind in ("rows", "columns"):
                hashes = getattr(whole, kind)
                if hashes is not None:
                    # numpy 2.0 cannot make a table of numbers over 2**63; it sorts them instead.
                    near |= np.isin(starts["rows"], hashes, kind="sort")
                    near |= np.isin(starts["columns"], hashes, kind="sort")
            some = {
                str(n): alone[n] for n in numbers[near].tolist() if n not in self.found[1 - side]
            }
            made = _joint(whole, some) if len(some) > 1 else None
            if made is None:
                continue
            members = [int(each) for each in made.other_names]
            cause = "fused" if side else "split"
            causes = (before.causes if before else ()) + (cause, *made.causes)
            names = tuple(theirs[n].name for n in members)
            base = before or Explanation((), "")
            after = f", after {before.text}" if before else ""
            text = f"{quoted(names)} of {'ab'[1 - side]}, {made.text}{after}"
            self.found[side][m] = replace(base, causes=causes, text=text, other_names=names)
            name = ours[m].name
            text = f"part of {quoted([name])} of {'ab'[side]}, {made.text}{after}"
            for n in members:
                one = replace(base, causes=causes, text=text, other_names=(name,))
                self.found[1 - side][n] = one

    # --- as they are once they are transformed ------------------------------------------------

    def _rounded(self, ours: Prints, theirs: Prints) -> None:
        """Look for numbers of one side among those of the other that were rounded."""
        for side, fine, coarse in ((0, ours, theirs), (1, theirs, ours)):
            types = {
                t
                for m, one in self._left(1 - side, coarse).items()
                for t in _types(self.sides[1 - side][m], one)
            }
            for chain in sorted(types):
                transform = Transform(types=chain)
                targets = {
                    m: one
                    for m, one in self._left(1 - side, coarse).items()
                    if chain in _types(self.sides[1 - side][m], one)
                }
                some = {
                    n: self.sides[side][n]
                    for n, one in self._left(side, fine).items()
                    if self._may_become(side, n, one, transform, targets)
                }
                if not some:
                    continue
                prints = self._hash(side, some, dict.fromkeys(some, transform))
                text = f"rounding {'ab'[side]} to {' and then to '.join(chain)}"
                done = Explanation(("rounded",), text)
                if side:
                    self._match(targets, prints, dict.fromkeys(targets, done))
                else:
                    self._match(prints, targets, dict.fromkeys(some, done))

    def _may_become(
        self, side: int, n: int, one: Fingerprint, transform: Transform, targets: Prints
    ) -> bool:
        kind = one.kind.name
        bits = FRACTION_BITS.get(kind, 0)
        if bits <= min(FRACTION_BITS[name] for name in transform.types):
            return False
        if any(not one.bits & _LOST.get(name, -1) for name in transform.types):
            return False  # nothing would be rounded
        with np.errstate(all="ignore"):
            low, high = transform(np.array([one.low, one.high])).tolist()
        is_alone = n not in self.sides[1 - side]
        for m, other in targets.items():
            if other.count == one.count:
                if other.low == low and other.high == high:
                    return True
            elif m == n or (is_alone and m not in self.sides[side]):
                small, large = (other, (low, high)) if other.count < one.count else (None, None)
                if small is not None and large is not None:
                    if large[0] <= small.low and small.high <= large[1]:
                        return True
                elif other.low <= low and high <= other.high:
                    return True
        return False

    def _moved(self, ours: Prints, theirs: Prints) -> None:
        """Look for numbers to which one was added, or which were multiplied by one."""
        left, others = self._left(0, ours), self._left(1, theirs)
        sizes: dict[int, list[int]] = defaultdict(list)
        for m, other in others.items():
            sizes[other.count].append(m)
        wanted: dict[int, list[Transform]] = {}
        for n, one in left.items():
            if one.kind.name in INEXACT or _is_constant(one):
                continue
            first = [n] if n in others and others[n].count == one.count else []
            for m in [*first, *sizes[one.count][:_MOST_CANDIDATES]]:
                transforms = _affine(one, others[m])
                if transforms:
                    wanted[n] = transforms
                    break
        for attempt in range(3):
            some = {
                n: each[attempt]
                for n, each in wanted.items()
                if attempt < len(each) and n not in self.found[0]
            }
            if not some:
                return
            prints = self._hash(0, {n: self.sides[0][n] for n in some}, some)
            before = {n: _moved_by(t, left[n].kind.name) for n, t in some.items()}
            for n, one in prints.items():
                same_size = {m: others[m] for m in sizes[one.count]}
                self._match({n: one}, same_size, {n: before[n]})


def _whole(one: Fingerprint) -> Iterable[Any]:
    """Return what tensors with the same numbers have in common."""
    contents = ("contents", one.contents)
    return (contents, ("elements", one.elements)) if one.elements else (contents,)


def _beginning(one: Fingerprint) -> Iterable[Any]:
    """Return what a tensor has in common with its beginning."""
    return ((int(one.rows[0]), one.shape[1]),) if one.rows is not None and one.rows[0] else ()


def _is_constant(one: Fingerprint) -> bool:
    return not one.low < one.high


def _types(reader: Reader, one: Fingerprint) -> set[tuple[str, ...]]:
    """Return the types that the numbers of a tensor may have been rounded to."""
    own = reader.kind.name
    found: set[tuple[str, ...]] = set()
    if own in FRACTION_BITS and FRACTION_BITS[own] < 23:
        found.add((own,))
    if own == "float32":
        found.add((own,))
        found.update((name,) for name, lost in _LOST.items() if not one.bits & lost)
    return found


def _affine(a: Fingerprint, b: Fingerprint) -> list[Transform]:
    """Return what may lead from the extremes of one tensor to those of another."""
    own = b.kind.name
    types: tuple[str, ...] = ("float32", own) if own in FRACTION_BITS else ("float32",)
    if own == "float64":
        types = ()
    x, y = np.array([a.low, a.high]), np.array([b.low, b.high])
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return []
    spacing = spacing_of(y, own)
    tried = []
    difference = y - x
    if abs(difference[0] - difference[1]) <= 2 * spacing.max():
        middle = float(difference[int(np.argmin(np.abs(y)))])
        found = [round(middle, digits) for digits in range(9)] + [middle]
        tried += [Transform(1.0, c, types) for c in dict.fromkeys(found) if c]
    for first, second in (x, x[::-1]):
        if not first or not second:
            continue
        ratios = y / np.array([first, second])
        errors = spacing / 2 / np.abs([first, second])
        low, high = float(np.max(ratios - errors)), float(np.min(ratios + errors))
        if low <= high:
            tried += [Transform(s, 0.0, types) for s in scales_between(low, high)]
    with np.errstate(all="ignore"):
        return [t for t in tried if np.array_equal(np.sort(t(x)), y)]


def _moved_by(transform: Transform, kind: str) -> Explanation:
    causes = ["offset" if transform.offset else "scaled"]
    done = f"multiplying by {transform.scale:.9g}"
    if transform.offset:
        done = f"adding {transform.offset:.9g}"
    last = transform.types[-1] if transform.types else kind
    if FRACTION_BITS.get(last, 99) < FRACTION_BITS.get(kind, 0):
        causes.append("rounded")
        done += f", rounding to {last}"
    return Explanation(
        tuple(causes),
        done,
        offset=transform.offset or None,
        scale=transform.scale if transform.scale != 1.0 else None,
    )


# --- how one tensor is placed in another, by hashes: no element is read again -------------------


def _placement(a: Fingerprint, b: Fingerprint) -> Explanation | None:
    """Find how all numbers of two tensors belong together; None if they do not."""
    if a.contents == b.contents:
        return Explanation((), "")
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


def _transposed(a: Fingerprint, b: Fingerprint) -> Explanation | None:
    if a.columns is None or b.columns is None or a.rows is None or b.rows is None:
        return None
    if np.array_equal(a.columns, b.rows):
        return Explanation(("transposed",), "transposing")
    found = _permuted(a.columns, b.rows) or _permuted(a.rows, b.columns)
    if found is None:
        return None
    causes = ("transposed", *found.causes)
    return Explanation(causes, f"transposing and {found.text}", heads=found.heads)


def _permuted(a: Array, b: Array) -> Explanation | None:
    if len(a) != len(b):
        return None
    # So many rows may be of heads of these sizes, usual ones first.
    sizes = [size for size in range(_SMALLEST_HEAD, len(a) + 1, 2) if len(a) % size == 0]
    for size in dict.fromkeys([*(size for size in _USUAL_HEADS if size in sizes), *sizes]):
        heads = len(a) // size
        # Where the rows of the halves of each head are once these are interleaved.
        order = np.arange(len(a)).reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)
        for halves, pairs, text in ((a, b, "halves interleaved"), (b, a, "interleaving undone")):
            if halves[order[1]] == pairs[1] and np.array_equal(halves[order], pairs):
                told = f"permuting rows as for rotary embeddings ({heads_of(heads)}, {text})"
                return Explanation(("rope_permuted",), told, heads=heads)
    if not np.array_equal(np.sort(a), np.sort(b)):
        return None
    moved = int(np.count_nonzero(a != b))
    return Explanation(("rows_permuted",), f"permuting rows ({moved:,} of {len(a):,} moved)")


def _extended(a: Fingerprint, b: Fingerprint) -> Explanation | None:
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
    elif (
        small.shape[0] == large.shape[0]
        and small.columns is not None
        and large.columns is not None
        and np.array_equal(small.columns, large.columns[: small.shape[1]])
    ):
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
    return Explanation((cause,), f"{verb} {what} {'of zeros' if is_zero else 'that are not zeros'}")


# --- how several tensors are put together -------------------------------------------------------


def _joint(whole: Fingerprint, parts: Mapping[str, Fingerprint]) -> Explanation | None:
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
            return Explanation(causes, f"one after the other along the {along}", other_names=found)
        found = _in_any_order(hashes, fitting)
        if found is not None:
            text = f"with {along} in another order"
            return Explanation((*causes, "rows_permuted"), text, other_names=found)
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
