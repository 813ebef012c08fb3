"""`compare`: what differs between the tensors of two checkpoints, of whatever formats."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.errors import CheckpointWarning
from xckpt.index import paused_collector
from xckpt.progress import Progress
from xckpt.statistics.comparison import (
    MEASURES,
    STATUSES,
    Comparison,
    ComparisonSum,
    measures,
    packed,
    unpacked,
)
from xckpt.statistics.entries import contents_of
from xckpt.statistics.layout import deferred, laid_out
from xckpt.statistics.matching import (
    Renaming,
    Row,
    by_position,
    differing_shapes,
    have_no_names_in_common,
    matched,
    renaming,
)
from xckpt.statistics.passes import Member, one_pass
from xckpt.statistics.plausible import require_comparison
from xckpt.statistics.store import Store, open_stores
from xckpt.statistics.stored import BytesPass, stored_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xckpt.labels import TensorFilter
    from xckpt.progress import ProgressOption
    from xckpt.statistics.comparison import Sides
    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.pair_blocks import Comparer
    from xckpt.statistics.workspace import Workspace

__all__ = ["compare"]


def compare(
    a: Any,
    b: Any,
    *,
    names: Renaming | None = None,
    tensors: TensorFilter | None = None,
    progress: ProgressOption = None,
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
        As for `stats`; bytes are those of both.
    compute : bool
        False gives dask arrays: the pass is made once they are computed.
    cache : bool
        Whether to keep what was found of two unchanged files in the user's cache, so that a second
        call reads nothing.

    Returns
    -------
    xarray.Dataset
        Each variable of `a` with the dimension ``statistic`` first, then those along which tensors
        are stacked; then a variable for each tensor that only `b` has. `xckpt.table` lays it
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

        Tensors that are the same have 1, 0, 0, 0, 0, 0, 1 after the count; where there is
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
    rename = renaming(names)
    ours, theirs = contents_of(a), contents_of(b)
    with paused_collector():
        entries, others = ours.entries(), theirs.entries()
        if isinstance(a, xr.DataArray) and isinstance(b, xr.DataArray) and names is None:
            rename = by_position(entries, others)
        entries, rows = matched(entries, others, rename, tensors)
    if have_no_names_in_common(rows):
        text = "no tensor of a has the name of one of b: names= says which belong together"
        warnings.warn(text, CheckpointWarning, stacklevel=2)
    shapes = [(len(MEASURES), *entry.shape) for entry in entries]
    inputs, options = list(zip(rows, shapes, strict=True)), _Options(progress, cache)
    values = (
        _compare_all(inputs, options)
        if compute
        else deferred(_compare_all, inputs, options, shapes)
    )
    attrs = [{"shapes": text} if (text := differing_shapes(some)) else {} for some in rows]
    found = laid_out(MEASURES, entries, values, attrs, ours)
    found.attrs |= {"status": list(STATUSES)}
    if theirs.source:
        found.attrs["compared_with"] = theirs.source
    return found


@dataclass(frozen=True, slots=True)
class _Options:
    """How tensors are read."""

    progress: ProgressOption
    cache: bool


class ComparePass:
    """The operation that compares; its argument are the `Sides`."""

    def start(
        self, kind: Kind, size: int, row: int, argument: Sides, workspace: Workspace
    ) -> Comparer:
        """Begin with some pairs of elements."""
        from xckpt.statistics.pair_blocks import Comparer

        return Comparer(argument, size)


class _ComparisonStore(Store):
    """Keeps comparisons, beside the sketches of the first of two files."""

    @staticmethod
    def _packed(kept: Any) -> bytes:
        return packed(kept)

    @staticmethod
    def _unpacked(data: bytes) -> Any:
        return unpacked(data)

    @staticmethod
    def require(kept: Any, reader: Any, stretch: tuple[int, int]) -> None:
        """Raise an error if this cannot be what was kept of a pair of tensors."""
        require_comparison(kept, reader, stretch)


def _compare_all(
    inputs: Sequence[tuple[Sequence[Row], tuple[int, ...]]], options: _Options
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
    with (
        Progress(options.progress, "comparison") as progress,
        open_stores(readers, enabled=options.cache, kind=_ComparisonStore) as stores,
    ):

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
        _compare_bytes(members, wanted, receive, progress)
        sides = [reader.sides for reader in readers]
        one_pass(members, ComparePass(), sides, receive, progress=progress, wanted=wanted)
    return results


def _compare_bytes(
    members: Sequence[Member],
    wanted: Sequence[list[tuple[int, int]]],
    receive: Callable[[int, int, Comparison], None],
    progress: Progress,
) -> None:
    """Find tensors with the same bytes among those that would have to be decoded."""
    pairs = {number: stored_pair(member.reader) for number, member in enumerate(members)}
    stored = [
        (number, Member(members[number].name, pair))
        for number, pair in pairs.items()
        if pair is not None and wanted[number]
    ]
    if not stored:
        return
    found = [Comparison() for _ in stored]

    def add(number: int, _: int, part: Comparison) -> None:
        found[number].count += part.count
        found[number].equal += part.equal

    nothing = [None] * len(stored)
    readers = [member for _, member in stored]
    one_pass(readers, BytesPass(), nothing, add, progress=progress)
    for (number, _), each in zip(stored, found, strict=True):
        if each.equal == each.count:
            same = Comparison()
            same.imply(members[number].reader.size)
            wanted[number].clear()
            receive(number, 0, same)
