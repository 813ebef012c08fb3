"""`compare`: what differs between the tensors of two checkpoints, of whatever formats."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.errors import CheckpointWarning, shown
from xckpt.labels.selection import select
from xckpt.opening import paused_collector
from xckpt.stats.comparison import (
    MEASURES,
    STATUSES,
    Comparison,
    ComparisonSum,
    measures,
    packed,
    unpacked,
)
from xckpt.stats.entries import Entry, contents_of
from xckpt.stats.layout import deferred, laid_out
from xckpt.stats.pair_blocks import ComparePass
from xckpt.stats.pairs import ChunkedPair, PairReader, pair_of, shape_of
from xckpt.stats.passes import Member, one_pass
from xckpt.stats.store import Store, open_stores

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from xckpt.labels import TensorFilter

__all__ = ["Renaming", "compare"]

#: How names of `a` become those of `b`.
Renaming = Mapping[str, str] | Callable[[str], str] | tuple[str | re.Pattern[str], str]


def compare(
    a: Any,
    b: Any,
    *,
    names: Renaming | None = None,
    tensors: TensorFilter | None = None,
    progress: bool | Callable[[int], object] | None = None,
    compute: bool = True,
    cache: bool = True,
) -> xr.Dataset:
    """Compare the tensors of two checkpoints by their names, in one pass over both.

    Formats, element types, memory orders, layouts and stacking may differ: numbers are compared.
    It runs where `stats` does, in bounded memory, and gives the same bits whatever the chunks and
    the number of threads.

    Parameters
    ----------
    a, b : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        What to compare; `a` is what differences are relative to. Two DataArrays are compared with
        each other whatever their names are.
    names : mapping, callable, or pair of a regular expression and its replacement, optional
        From the name of a tensor of `a` to the name in `b`; a mapping need not have those that
        stay the same, a pair is used as by `re.sub`.
    tensors : str, iterable of str, re.Pattern or callable, optional
        Compare only these: a glob of whole names, several, a regular expression that is searched
        for, or a function from a name to a bool.
    progress : bool or callable, optional
        Whether to show a bar, as for `stats`; bytes are those of both.
    compute : bool
        False gives dask arrays: the pass is made once they are computed.
    cache : bool
        Whether to keep what was found of two unchanged files in the user's cache, so that a second
        call reads nothing.

    Returns
    -------
    xarray.Dataset
        Each variable of `a` with the dimension ``statistic`` first, then those along which tensors
        are stacked; then a variable for each tensor that only `b` has. `xckpt.stats.table` lays it
        out with one row for each tensor, most changed first.

        ==================  ====================================================================
        ``status``          0 same, 1 changed, 2 only_a, 3 only_b, 4 shape (the shapes differ);
                            a table has the words. Tensors are the same if all elements are
                            equal, whatever their types.
        ``count``           number of elements
        ``equal_fraction``  part of the elements that are equal: of the same number (-0.0 is 0.0),
                            or both NaN
        ``nan``, ``inf``    how many elements are not equal because one of the two is NaN, or,
                            neither being NaN, because one is infinite
        ``max_abs``         largest difference, over all places where both are finite, as is all
                            that follows
        ``rmse``            root of the mean of the squared differences
        ``rel_l2``          root of the sum of the squared differences, divided by that of the
                            squares of `a`; infinite if all of `a` is zero
        ``cosine``          of the angle between both; NaN if one of them is zero
        ==================  ====================================================================

        Tensors that are the same have 1, 0, 0, 0, 0, 0, 0, 1 after the count; where there is
        nothing finite on both sides, the last four are NaN. Differences of complex numbers are
        magnitudes.

    Raises
    ------
    CheckpointError
        If a tensor cannot be read.
    ValueError
        If two tensors of `b` have one name, or the regular expression is none.
    TypeError
        If an argument is none of these.

    Warns
    -----
    CheckpointWarning
        If no tensor of `a` has the name of one of `b`.

    Examples
    --------
    >>> found = xckpt.compare("base.safetensors", "tuned.zt")  # doctest: +SKIP
    >>> found.ckpt.table().query("status == 'changed'").head(3)  # doctest: +SKIP
    """
    rename = _renaming(names)
    ours, theirs = contents_of(a), contents_of(b)
    with paused_collector():
        entries, others = ours.entries(), theirs.entries()
        if isinstance(a, xr.DataArray) and isinstance(b, xr.DataArray) and names is None:
            rename = _by_position(entries, others)
        entries, rows = _matched(entries, others, rename, tensors)
    _warn_if_strangers(rows)
    shapes = [(len(MEASURES), *entry.shape) for entry in entries]
    inputs, options = list(zip(rows, shapes, strict=True)), _Options(progress, cache)
    values = (
        _compare_all(inputs, options)
        if compute
        else deferred(_compare_all, inputs, options, shapes)
    )
    attrs = [{"shapes": text} if (text := _shapes(some)) else {} for some in rows]
    found = laid_out(MEASURES, entries, values, attrs, ours)
    found.attrs |= {"status": list(STATUSES)}
    if theirs.source:
        found.attrs["compared_with"] = theirs.source
    return found


# --- which tensors belong together ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor of either side, or a pair.

    Parameters
    ----------
    name : str
        Of the tensor, in `a` if it is there.
    known : list of float
        All measures, where nothing has to be read for them.
    pair : PairReader, ChunkedPair or None
        What has to be read.
    shapes : str
        Both, where they differ.
    """

    name: str
    known: list[float]
    pair: PairReader | ChunkedPair | None = None
    shapes: str = ""


def _renaming(names: Any) -> Callable[[str], str]:
    if names is None:
        return lambda name: name
    if isinstance(names, Mapping):
        return lambda name: names.get(name, name)
    if callable(names):
        renamed: Callable[[str], str] = names
        return renamed
    if isinstance(names, tuple | list) and len(names) == 2:
        pattern, replacement = names
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return lambda name: compiled.sub(replacement, name)
    raise TypeError(
        "names takes a mapping, a function of a name, or a pair of a regular expression and its "
        f"replacement, not {names!r}"
    )


def _by_position(entries: Sequence[Entry], others: Sequence[Entry]) -> Callable[[str], str]:
    pairs = [
        (ours.name, theirs.name)
        for entry, other in zip(entries, others, strict=False)
        for ours, theirs in zip(entry.members, other.members, strict=False)
    ]
    return _renaming(dict(pairs))


def _matched(
    entries: Sequence[Entry],
    others: Sequence[Entry],
    rename: Callable[[str], str],
    tensors: TensorFilter | None,
) -> tuple[list[Entry], list[list[_Row]]]:
    """Find pairs; give the variables of the result, and a row for each tensor of these."""
    theirs: dict[str, Member] = {}
    for member in (member for other in others for member in other.members):
        if theirs.setdefault(member.name, member) is not member:
            raise ValueError(f"two tensors of b are called {shown(member.name)}")
    ours = [member.name for entry in entries for member in entry.members]
    chosen = set(select([*ours, *theirs], tensors))
    found: list[Entry] = []
    rows: list[list[_Row]] = []
    used: set[str] = set()
    for entry in entries:
        partners = [rename(member.name) for member in entry.members]
        used.update(partners)
        if not any(member.name in chosen for member in entry.members):
            continue
        found.append(entry)
        rows.append(
            [
                _row(member, theirs.get(partner), member.name in chosen)
                for member, partner in zip(entry.members, partners, strict=True)
            ]
        )
    taken = {entry.name for entry in found}
    for name, member in theirs.items():
        if name not in used and name in chosen:
            found.append(_entry_of_b(member, taken))
            rows.append([_Row(name, _unread("only_b", member.reader.size))])
    return found, rows


def _row(ours: Member, theirs: Member | None, is_chosen: bool) -> _Row:  # noqa: FBT001  of a loop
    if not is_chosen:
        return _Row(ours.name, [nan] * len(MEASURES))
    if theirs is None:
        return _Row(ours.name, _unread("only_a", ours.reader.size))
    shape, other = shape_of(ours.reader), shape_of(theirs.reader)
    if shape != other:
        return _Row(ours.name, _unread("shape", prod(shape)), shapes=f"{shape} and {other}")
    return _Row(ours.name, [], pair_of(ours.reader, theirs.reader))


def _unread(status: str, count: int) -> list[float]:
    known: dict[str, float] = {"status": STATUSES.index(status), "count": count}
    return [known.get(measure, nan) for measure in MEASURES]


def _entry_of_b(member: Member, taken: set[Hashable]) -> Entry:
    """Give a tensor that only `b` has a variable of its own."""
    name = member.name
    while name in taken:
        name += " (b)"
    taken.add(name)
    variable = xr.Variable((), np.nan, encoding={"tensor": member.name})
    return Entry(name, (), (), (member,), variable)


def _shapes(rows: Sequence[_Row]) -> str:
    """Say which shapes differ."""
    return "; ".join(f"{row.name}: {row.shapes}" for row in rows if row.shapes)


def _warn_if_strangers(rows: Sequence[Sequence[_Row]]) -> None:
    statuses = {
        STATUSES[int(row.known[0])] for some in rows for row in some if row.known[:1] > [-1]
    }
    has_pairs = any(row.pair is not None for some in rows for row in some)
    if not has_pairs and statuses == {"only_a", "only_b"}:
        text = "no tensor of a has the name of one of b: names= says which belong together"
        warnings.warn(text, CheckpointWarning, stacklevel=3)


# --- the pass ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Options:
    """How tensors are read."""

    progress: bool | Callable[[int], object] | None
    cache: bool


class _ComparisonStore(Store):
    """Keeps comparisons, beside the sketches of the first of two files."""

    @staticmethod
    def _packed(kept: Any) -> bytes:
        return packed(kept)

    @staticmethod
    def _unpacked(data: bytes) -> Any:
        return unpacked(data)


def _compare_all(
    inputs: Sequence[tuple[Sequence[_Row], tuple[int, ...]]], options: _Options
) -> list[Any]:
    """Compare all pairs; give the array of each variable, of the shape that is given with it."""
    pairs = [row for rows, _ in inputs for row in rows if row.pair is not None]
    members = [Member(row.name, row.pair) for row in pairs if row.pair is not None]
    found = iter(_compare_members(members, options))
    values = []
    for rows, shape in inputs:
        table = [row.known if row.pair is None else next(found) for row in rows]
        values.append(np.array(table, np.float64).T.reshape(shape))
    return values


def _compare_members(members: Sequence[Member], options: _Options) -> list[list[float]]:
    results: list[Any] = [None] * len(members)
    totals: dict[int, ComparisonSum] = {}
    wanted: list[list[tuple[int, int]]] = []
    readers: list[Any] = [member.reader for member in members]
    with open_stores(readers, enabled=options.cache, kind=_ComparisonStore) as stores:

        def receive(number: int, _: int, part: Comparison) -> None:
            reader, store = readers[number], stores[number]
            total = totals.pop(number, None) or ComparisonSum(reader.sides, reader.size)
            total.add(part)
            if not total.is_complete:
                totals[number] = total
                return
            whole = total.result()
            results[number] = measures(whole)
            if store is not None:
                store.put((0, reader.size), whole)

        for number, (reader, store) in enumerate(zip(readers, stores, strict=True)):
            everything = (0, reader.size)
            kept = None if store is None else store.get(everything)
            results[number] = None if kept is None else measures(kept)
            wanted.append([everything] if kept is None else [])
        sides = [reader.sides for reader in readers]
        one_pass(members, ComparePass(), sides, receive, progress=options.progress, wanted=wanted)
    return results
