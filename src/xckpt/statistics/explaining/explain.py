"""Find why tensors differ: cheap tests first, and nothing is said for sure before all is read."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isnan, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import locating
from xckpt.progress import Progress
from xckpt.statistics.cluster import send_out
from xckpt.statistics.explaining.fingerprints import Transform
from xckpt.statistics.explaining.relations import (
    FRACTION_BITS,
    INEXACT,
    LIKELY,
    Evidence,
    Relation,
    correlation,
    levels,
    likely,
    sample,
    spacing_of,
)
from xckpt.statistics.explaining.search import Search
from xckpt.statistics.explaining.wording import Case, Explanation, changed, quoted, related
from xckpt.statistics.pairs import pair_of
from xckpt.statistics.scan import gather
from xckpt.statistics.spectra import blas_threads, in_memory
from xckpt.storage.limits import cpu_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.progress import ProgressOption
    from xckpt.statistics.pairs import ChunkedPair, PairReader
    from xckpt.statistics.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]

# From here on two tensors have their elements in the same places.
_ALIGNED = 0.5
_ALIKE = 0.9
# Of what is compared to find out which tensors are alike: elements, and tensors of one shape.
_HEAD = 1024
_MOST_ALIKE = 2048
# Statuses of what only `a`, and what only `b` has.
_ALONE = ("only_a", "only_b")
# Of a shape: tied weights are few.
_MOST_OWNERS = 8


def explain(cases: Sequence[Case], progress: ProgressOption) -> list[Explanation | None]:
    """Explain each of the differences; None for those that were not compared."""
    found: list[Explanation | None] = []
    for case in cases:
        same = Explanation(("equal",), f"all {case.measures['count']:,.0f} elements are equal")
        found.append(same if case.status == "same" else None)
    with Progress(progress, "explanation") as bar:
        left = [n for n, case in enumerate(cases) if case.status not in {"same", ""}]
        pairs = {n: pair for n in left if (pair := cases[n].match.pair) is not None}
        told, alike = _aligned(pairs, bar)
        facts = {n: one for n, one in told.items() if one.verified}
        # Where rows moved, as many may have stayed: heads that changed places.
        turned = [n for n in left if n not in facts and alike.get(n, 0.0) < _ALIKE]
        search = Search({n: (cases[n].match.ours, cases[n].match.theirs) for n in turned}, bar)
        facts |= search.run()
        # What is left over on both sides, and alike.
        renamed = _alike(cases, [n for n in turned if n not in facts])
        new, _ = _aligned({n: pair for n, (_, pair, _) in renamed.items()}, bar)
        aligned = [n for n in pairs if n not in facts and n not in told]
        ranked = {n: n for n in aligned if alike[n] >= _ALIGNED}
        ranked |= {n: other for n, (other, _, _) in renamed.items() if n not in new}
        sides = {
            n: (a, b)
            for n, other in ranked.items()
            if (a := cases[n].match.ours) is not None
            and (b := cases[other].match.theirs) is not None
        }
        for n, low in _low_ranks(sides, bar).items():
            (new if n in renamed else facts)[n] = low
        for n, (other, _, alike_by) in renamed.items():
            related = new.get(n)
            if alike_by >= _ALIKE or (related is not None and related.verified):
                facts |= _renamed(cases, n, other, related)
        alone = [n for n in left if cases[n].status in _ALONE and n not in facts and n not in told]
        told |= _tied(cases, alone, bar)
    for n in left:
        case = cases[n]
        said = facts.get(n) or told.get(n)
        if said is None and case.status in _ALONE:
            said = Explanation((case.status,), "nothing on the other side has its name or numbers")
        found[n] = said or changed(case.measures, case.match.shapes)
    for n, (case, one) in enumerate(zip(cases, found, strict=True)):
        if one and case.other_name and not one.other_names:
            # It was compared under another name.
            causes = ("renamed", *(cause for cause in one.causes if cause != "equal"))
            text = f"{quoted([case.other_name])} of b; {one.text}"
            found[n] = replace(one, causes=causes, text=text, other_names=(case.other_name,))
    return found


def _aligned(
    pairs: Mapping[int, PairReader | ChunkedPair], bar: Progress
) -> tuple[dict[int, Explanation], dict[int, float]]:
    """Say what holds element by element; and how much the elements in one place are alike."""
    numbers = [n for n, p in pairs.items() if p.size and not INEXACT & set(p.kinds)]
    with ThreadPoolExecutor(cpu_count(), "xckpt-explain") as threads:
        looks = dict(zip(numbers, threads.map(_look, [pairs[n] for n in numbers]), strict=True))
    tested = {n: pairs[n] for n in numbers if looks[n][0]}
    found = {}
    for n, one in _evidence(tested, [looks[n][0] for n in tested], bar):
        held = one.held.tolist()
        best = max(range(len(held)), key=lambda at: (held[at], -at))
        if held[best] >= LIKELY * one.count:
            relation = one.relations[best]
            found[n] = related(relation, one.count, held[best], one.zeros)
    return found, {n: looks[n][1] for n in numbers} | {n: 1.0 for n in pairs if n not in looks}


def _evidence(
    pairs: Mapping[int, PairReader | ChunkedPair],
    relations: Sequence[tuple[Relation, ...]],
    bar: Progress,
) -> Iterator[tuple[int, Evidence]]:
    """Count for how many elements of each pair its relations hold."""
    found = gather(list(pairs.values()), Evidence, lambda _, one: one, bar, arguments=relations)
    return zip(pairs, found, strict=True)


def _look(pair: PairReader | ChunkedPair) -> tuple[tuple[Relation, ...], float]:
    """Return what may hold, from a few elements, and their correlation."""
    x, y = sample(pair)
    relations = likely(x, y, pair.kinds)
    alike = correlation(x, y)
    if isnan(alike):
        alike = 1.0 if relations else 0.0
    if not relations and alike >= _ALIKE:
        found = levels(x, y, pair.kinds)
        relations = (found,) if found else ()
    return relations, alike


def _alike(
    cases: Sequence[Case], left: Sequence[int]
) -> dict[int, tuple[int, PairReader | ChunkedPair, float]]:
    """Find tensors of one shape that only one side has, whose first elements are alike."""
    groups: dict[tuple[int, ...], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for n in left:
        reader = cases[n].alone
        if reader is not None and reader.size > 1:
            groups[reader.array.shape][cases[n].status == "only_b"].append(n)
    found = {}
    for ours, theirs in groups.values():
        if not ours or not theirs or len(ours) + len(theirs) > _MOST_ALIKE:
            continue
        first = _heads([cases[n].match.ours for n in ours])
        second = _heads([cases[n].match.theirs for n in theirs])
        table = first @ second.T
        for at, n in enumerate(ours):
            to = int(np.argmax(table[at]))
            a, b = cases[n].match.ours, cases[theirs[to]].match.theirs
            is_best = table[at, to] >= _ALIGNED and int(np.argmax(table[:, to])) == at
            if is_best and a is not None and b is not None:
                found[n] = theirs[to], pair_of(a, b, a.name), float(table[at, to])
    return found


def _tied(cases: Sequence[Case], alone: Sequence[int], bar: Progress) -> dict[int, Explanation]:
    """Say what is equal to a tensor of its own side that has a partner, as tied weights are."""
    owners: dict[tuple[str, tuple[int, ...]], list[Reader]] = defaultdict(list)
    for n in set(range(len(cases))).difference(alone):
        match = cases[n].match
        for status, reader in zip(_ALONE, (match.ours, match.theirs), strict=True):
            if reader is not None and reader.size > 1:
                owners[status, reader.array.shape].append(reader)
    pairs, names = {}, {}
    for n in alone:
        reader = cases[n].alone
        if reader is None:
            continue
        some = owners.get((cases[n].status, reader.array.shape), ())
        for owner in some if len(some) <= _MOST_OWNERS else ():
            pair = pair_of(owner, reader)
            x, y = sample(pair)
            if np.array_equal(x, y) and x.min() < x.max():
                pairs[n], names[n] = pair, quoted([owner.name])
                break
    equal = (Relation(Transform()),)
    told = {}
    for n, one in _evidence(pairs, [equal] * len(pairs), bar):
        if one.held[0] == one.count:
            status = cases[n].status
            text = f"its numbers are those of {names[n]} of {status[-1]}"
            told[n] = Explanation((status,), text)
    return told


def _heads(readers: Sequence[Reader | None]) -> Array:
    """Return the first elements of tensors, standardised."""
    rows = []
    for reader in readers:
        if reader is None:
            continue
        x, _ = sample(pair_of(reader, reader))
        head = np.nan_to_num(x[:_HEAD].astype(np.float64), posinf=0.0, neginf=0.0)
        head -= head.mean()
        norm = np.linalg.norm(head)
        rows.append(head / norm if norm else head)
    return np.array(rows)


def _renamed(
    cases: Sequence[Case],
    n: int,
    other: int,
    one: Explanation | None,
) -> dict[int, Explanation]:
    """Say of two tensors of different names what relates them."""
    names = cases[n].match.name, cases[other].match.name
    if one is None:
        one = Explanation(("changed",), "the first elements are alike", verified=False)
    told = {}
    for number, name, side in ((n, names[1], "b"), (other, names[0], "a")):
        text = f"{quoted([name])} of {side}"
        told[number] = replace(one.after(("renamed",), text), other_names=(name,))
    return told


# --- updates of low rank ------------------------------------------------------------------------

# What was added to a matrix has a low rank where it is a LoRA adapter that was merged. The rows are
# projected on random vectors, which span those of a matrix of low rank (Halko, Martinsson and
# Tropp, SIAM Review 53, 217, 2011). What is left beside that span is measured over all elements in
# a second pass.

# What is left of a difference beside its rank, relative to its norm.
_LEFT = 1e-3
_HIGHEST = 64
_SMALLEST_SIDE = 8
_OVERSAMPLED = 16
# Rows, and columns, that differ for each one of the rank.
_WIDE = 2
# Rows and columns that say whether it is worth a pass.
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
            # What is lost in float32 is far below `_LEFT`.
            wide = np.float64 in {x.dtype.type, y.dtype.type}
            x, y = (each.astype(np.float64 if wide else np.float32, copy=False) for each in (x, y))
            yield start, x.reshape(len(x), -1), y.reshape(len(y), -1)


def _low_ranks(pairs: Mapping[int, tuple[Reader, Reader]], bar: Progress) -> dict[int, Explanation]:
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
    found: dict[int, Explanation] = {}

    def deliver(update: Any, one: Explanation | None) -> None:
        if one is not None:
            found[update.number] = one
        bar.advance(update.nbytes)

    bar.expect(sum(update.nbytes for update in updates))
    here = send_out(updates, _low_rank, deliver, lambda update: update.b)
    with ThreadPoolExecutor(cpu_count(), "xckpt-explain") as threads, blas_threads(1):
        for update, one in zip(here, threads.map(_low_rank, here), strict=True):
            deliver(update, one)
    return found


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
        # Random directions lead into the noise of rounding, too; those that were found, hardly.
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
    return Explanation(causes, text, share == 1.0, rank=rank) if share > 0.9 else None
