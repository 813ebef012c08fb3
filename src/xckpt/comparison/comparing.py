"""`compare`: what differs between the tensors of two checkpoints, of whatever formats."""

from __future__ import annotations

from functools import partial
from math import isnan, nan, prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from xckpt.comparison.cells import (
    CELL_NBYTES,
    Channels,
    grid_of,
    measures_of,
    pair_in_order,
    wanted_lengths,
)
from xckpt.comparison.matching import matched
from xckpt.comparison.measures import MEASURES, Comparison, measures
from xckpt.comparison.pairs import ChunkedPair, PairReader, SameBytes, stored_pair
from xckpt.errors import locating, shown, warn
from xckpt.index import paused_collector
from xckpt.labels.filters import suggest_filters
from xckpt.progress import Progress
from xckpt.scan.entries import Described, contents_of_all, deferred, entries_of, laid, laid_out
from xckpt.scan.scanning import gather
from xckpt.scan.statistics_cache import rows_of
from xckpt.statistics.codes import OF_CODES, use_of_codes
from xckpt.statistics.tables import STATUSES
from xckpt.storage.limits import require_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.comparison.cells import ChannelGrid, Reduced
    from xckpt.comparison.pairs import Match
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.labels import TensorFilter
    from xckpt.labels.renaming import Renaming
    from xckpt.progress import ProgressOption
    from xckpt.scan.entries import Describable
    from xckpt.typing import Dataset


def compare(
    a: Describable,
    b: Describable,
    *,
    names: Renaming | Literal["auto"] | None = None,
    tensors: TensorFilter | None = None,
    dim: Reduced | None = None,
    codes: bool = False,
    explain: bool = False,
    progress: ProgressOption = None,
    compute: bool = True,
    cache: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> Dataset:
    """Compare the tensors of two checkpoints by their names, in one pass over both.

    Formats, element types, memory orders, layouts and stacking may differ: numbers are compared.
    It runs where `stats` does, in bounded memory, and gives the same bits whatever the chunks and
    the number of threads.

    Parameters
    ----------
    a, b : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        What to compare; `a` is what differences are relative to. Two DataArrays are compared with
        each other whatever their names are.
    names : "auto", mapping, callable, or pair of a regular expression and its replacement, optional
        From the name of a tensor of `a` to the name in `b`; a mapping need not have those that
        stay the same, a pair is used as by `re.sub`. With ``"auto"`` tensors that have no
        namesake are matched by their content, which reads them once more, and then by names that
        projects are known to give: see Notes.
    tensors : str, iterable of str, re.Pattern or callable, optional
        Compare only these: a glob of whole names, several, a regular expression that is searched
        for, or a function from a name to a bool.
    dim : str, int, iterable of these, or mapping of these to int, optional
        Dimensions to reduce, by name or position (-1 is the last one), for one value at each
        place along the others: ``dim=-1`` for one value for each output channel of PyTorch's
        linear layers. A mapping says how many neighbours are reduced to one value: ``{-1: 128}``
        for groups of 128. By default all of a tensor; tensors without any of them are left out.
    codes : bool
        Whether to count the codes of tensors of `b` that are quantised, by another pass over them,
        for the statistics ``saturated`` and ``unused``.
    explain : bool
        Whether to find out why tensors differ: rounded, transposed, renamed, quantised, ... It
        takes one or two more passes over the tensors that differ. The result has
        ``attrs["explanation"]``, a sentence about all tensors, exceptions first; each variable has
        the attributes below, lists where it is stacked, and a table has columns of them.
    progress : bool or callable, optional
        As for `stats`; bytes are those of both.
    compute : bool
        False gives dask arrays: the pass is made once they are computed.
    cache : bool
        Whether to keep what was found of two unchanged files in the user's cache, so that a second
        call reads nothing; not with `dim`.
    storage_options : dict, optional
        For fsspec, where `a` or `b` is a URL.

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
        ``sqnr_db``         signal to quantisation noise in decibels: 10 log10 of the sum of the
                            squares of `a` over that of the squared differences
        ``nmse``            the inverse ratio, which is the square of ``rel_l2``
        ``saturated``       with `codes`: part of the codes of `b` that are at the ends of their
                            range; NaN where there are none, or in GGUF's blocks of other than 4
                            or 8 bits
        ``unused``          with `codes`: part of the values of a code that never occur
        ==================  ====================================================================

        With `names`, the attributes ``other_name`` and ``matched_by`` of a variable have the name
        in `b`, empty if there is none, and the rule; of stacked tensors a list. A table has them
        as columns, and ``found.ckpt.names`` is a mapping to use again.

        Tensors that are the same have 1, 0, 0, 0, 0, 0, 1, infinity, 0 after the count; where
        there is nothing finite on both sides, all from ``max_abs`` on are NaN. Differences of
        complex numbers are magnitudes.

        With `explain` there are also:

        ====================  ==================================================================
        ``outcome``           ``explained``: one tensor follows from the other by admitted
                              causes, verified on every element; ``changed``: it differs;
                              ``unmatched``: one side has it alone
        ``cause``             one of ``equal, renamed, transposed, rope_permuted, fused, split,
                              padded, rounded, quantised, offset, scaled``, which explain (the
                              last two where the architecture is known for it), ``misplaced,
                              rows_permuted, cut, pruned, low_rank, changed``, which do not, and
                              ``only_a, only_b``; or several joined by ``+``
        ``explanation``       a sentence with numbers
        ``verified``          whether the tensor is explained
        ``offset, scale``     the number that was added, or multiplied by
        ``rank, heads``       of a low-rank update, and of a permutation for rotary embeddings
        ``other_names``       the tensors on the other side, where their names differ
        ====================  ==================================================================

    Raises
    ------
    CheckpointError
        If a tensor cannot be read.
    ValueError
        If two tensors of `b` have one name, the regular expression is none, a mapping has a name
        that no tensor of `a` has, no tensor has a dimension `dim`, or `codes` or `explain` comes
        with `dim` or ``compute=False``.
    TypeError
        If an argument is none of these.

    Warns
    -----
    CheckpointWarning
        If no tensor of `a` has the name of one of `b`.

    Notes
    -----
    The rules of ``names="auto"``, in their order. Those of content hold for tensors that are not
    constant, and only if one tensor of either side is meant:

    ==============  ============================================================================
    ``name``        equal names
    ``values``      equal numbers in the same order, whatever their type
    ``transposed``  one is the transpose of the other
    ``rows``        equal rows, or columns, in another order, transposed or not
    ``elements``    equal numbers in any order, in any shape
    ``burn``        ``gamma`` and ``beta`` for ``weight`` and ``bias``
    ``prefix``      one has ``module.``, ``_orig_mod.``, ``model.`` or ``transformer.`` in front
    ``gptrs``       the names of gpt.rs for those of GPT-2 and of Llama
    ``gguf``        those of the package `gguf`, where it is installed
    ``values``      constants, and equal tensors of which there are as many on either side
    ``alike``       nearly the same numbers: rounded or quantised, transposed or permuted or not
    ==============  ============================================================================

    Examples
    --------
    >>> found = xckpt.compare("base.safetensors", "tuned.zt")  # doctest: +SKIP
    >>> found.ckpt.table().query("status == 'changed'").head(3)  # doctest: +SKIP
    """
    if (codes or explain) and (dim is not None or not compute):
        which = "codes" if codes else "explain"
        raise ValueError(f"{which}=True is of whole tensors, now: leave out dim and compute=False")
    ours, theirs = contents_of_all([a, b], storage_options)
    with paused_collector():
        sides = entries_of(ours), entries_of(theirs)
    if isinstance(a, xr.DataArray) and isinstance(b, xr.DataArray) and names is None:
        both = ([reader.name for entry in side for reader in entry.readers] for side in sides)
        names = dict(zip(*both, strict=False))
    entries, rows, progress = matched(*sides, names, tensors, progress)
    _warn_of_no_match(sides, rows, names, tensors, explain=explain)
    inputs = [(some, each.shape, each.gone) for some, each in zip(rows, entries, strict=True)]
    find: Any = partial(_compare_all, progress=progress, cache=cache)
    if dim is not None:
        entries, rows, inputs = _along(dim, entries, rows)
        find = partial(_compare_channels, progress=progress)
    shapes = [(len(MEASURES), *entry.shape) for entry in entries]
    values = find(inputs) if compute else deferred(find, inputs, shapes)
    attrs = _attrs_of(entries, rows, has_names=names is not None)
    said = {}
    if explain:
        said = _explained(entries, rows, values, attrs, sides=(ours, theirs), progress=progress)
    statistics: tuple[str, ...] = MEASURES
    if codes:
        statistics += OF_CODES
        values = _with_codes(inputs, values, progress, cache=cache)
    found = laid_out(statistics, entries, values, attrs, ours)
    found.attrs |= {"status": list(STATUSES), **said}
    if theirs.source:
        found.attrs["compared_with"] = theirs.source
    return found


def _warn_of_no_match(
    sides: Sequence[Sequence[Described]],
    rows: Sequence[Sequence[Match]],
    names: Any,
    tensors: TensorFilter | None,
    *,
    explain: bool,
) -> None:
    """Warn where there is nothing to compare; an explanation says by itself if names differ."""
    statuses = {row.status for some in rows for row in some if row.is_chosen}
    if not rows and tensors is not None:
        every = [reader.name for side in sides for entry in side for reader in entry.readers]
        text = f"tensors={tensors!r} matches no tensor of a or b{suggest_filters(every, tensors)}"
    elif explain or statuses != {"only_a", "only_b"}:
        return
    elif names == "auto":
        text = "no tensor of a was found in b, neither by its name nor by its content"
    else:
        text = (
            "no tensor of a has the name of one of b: names='auto' finds, and names= says, which "
            "belong together"
        )
    warn(text)


def _explained(
    entries: Sequence[Described],
    rows: Sequence[Sequence[Match]],
    values: Sequence[Any],
    attrs: Sequence[dict[str, Any]],
    *,
    sides: Sequence[OpenTensors],
    progress: ProgressOption,
) -> dict[str, str]:
    """Put explanations into the attributes of variables; return the sentence about all."""
    from xckpt.comparison.explaining import Architecture, Case, explain, explained_attrs, sentence

    cases = []
    for entry, some, measured in zip(entries, rows, values, strict=True):
        table = measured.reshape(len(MEASURES), -1).T
        there = table if entry.gone is None else table[~entry.gone.ravel()]
        for row, numbers in zip(some, there.tolist(), strict=True):
            status = "" if isnan(numbers[0]) else STATUSES[int(numbers[0])]
            known = dict(zip(MEASURES, numbers, strict=True))
            cases.append(Case(row, status, known))

    def measure(pairs: Sequence[PairReader | ChunkedPair]) -> list[dict[str, float]]:
        rows = compare_pairs(pairs, progress=False, cache=False)
        return [dict(zip(MEASURES, row, strict=True)) for row in rows]

    names = (name for case in cases for name in (case.match.name, case.other_name))
    architecture = Architecture([side.attrs for side in sides], names)
    explanations = explain(cases, architecture, measure, progress)
    left = iter(explanations)
    for entry, some, attr in zip(entries, rows, attrs, strict=True):
        of_entry = _at_places(entry, [next(left) for _ in some])
        attr.update(explained_attrs(of_entry, is_stacked=bool(entry.dims)))
    return {"explanation": sentence(cases, explanations)}


def _compare_all(
    inputs: Sequence[tuple[Sequence[Match], tuple[int, ...], Any]],
    *,
    progress: ProgressOption,
    cache: bool,
) -> list[Any]:
    """Compare all pairs; return the array of each variable, laid out as is given with it."""
    pairs = [row.pair for rows, _, _ in inputs for row in rows if row.pair is not None]
    found = iter(compare_pairs(pairs, progress=progress, cache=cache))
    values = []
    for rows, shape, gone in inputs:
        table = [_unread(row) if row.pair is None else next(found) for row in rows]
        measured = np.array(table, np.float64).reshape(len(rows), len(MEASURES))
        values.append(laid(measured, shape, gone))
    return values


def _with_codes(
    inputs: Sequence[tuple[Sequence[Match], tuple[int, ...], Any]],
    values: Sequence[Any],
    progress: ProgressOption,
    *,
    cache: bool,
) -> list[Any]:
    """Add what is said of the codes of `b`."""
    readers = [row.both[1] for rows, _, _ in inputs for row in rows if row.both]
    # A function is told of one pass: of that over both.
    with Progress(False if callable(progress) else progress, "codes") as bar:
        found = iter(use_of_codes(readers, bar, cache=cache))
    wider = []
    for (rows, shape, gone), measured in zip(inputs, values, strict=True):
        table = [next(found) if row.both else [nan] * len(OF_CODES) for row in rows]
        more = np.array(table, np.float64).reshape(len(rows), len(OF_CODES))
        wider.append(np.concatenate([measured, laid(more, shape, gone)]))
    return wider


def compare_pairs(
    pairs: Sequence[PairReader | ChunkedPair], *, progress: ProgressOption, cache: bool
) -> list[list[float]]:
    """Return the measures of each pair of tensors."""
    with Progress(progress, "comparison") as bar:

        def find(numbers: list[int]) -> list[list[float]]:
            some = [pairs[number] for number in numbers]
            same = partial(_with_same_bytes, some, bar)
            return gather(some, Comparison, finish, bar, cache=cache, shortcut=same)

        def finish(_: int, found: Comparison) -> list[float]:
            return measures(found)

        about = ("comparison", *MEASURES)
        width = len(MEASURES)
        rows = rows_of(pairs, about, width, find, enabled=cache)
    found: list[list[float]] = rows.tolist()
    return found


def _with_same_bytes(
    pairs: Sequence[PairReader | ChunkedPair], bar: Progress, numbers: list[int]
) -> Iterator[tuple[int, Comparison]]:
    """Find tensors with the same bytes among those that would have to be decoded."""
    stored = {n: pair for n in numbers if (pair := stored_pair(pairs[n])) is not None}
    if not stored:
        return
    alike = gather(list(stored.values()), SameBytes, lambda _, each: each.are_same, bar)
    for number, are_same in zip(stored, alike, strict=True):
        if are_same:
            found = Comparison.begin(pairs[number], None)
            found.imply(found.size)
            yield number, found


# --- channels and blocks -------------------------------------------------------------------------


def _along(
    dim: Reduced, entries: Sequence[Described], rows: Sequence[list[Match]]
) -> tuple[list[Described], list[list[Match]], list[Any]]:
    """Choose the variables that have some of the dimensions, and lay their channels out."""
    lengths = wanted_lengths(dim, entries)
    found: list[Described] = []
    kept: list[list[Match]] = []
    inputs: list[Any] = []
    for entry, some in zip(entries, rows, strict=True):
        grid = grid_of(entry, lengths)
        is_alone = not any(row.pair for row in some)
        if grid is None and not is_alone:
            continue
        if any(each.array.dtype.kind == "c" for row in some for each in row.both or ()):
            text = f"{shown(str(entry.name))} has complex numbers, which are compared as a whole"
            warn(text)
            continue
        inputs.append((some, entry.shape, entry.gone, None if is_alone else grid))
        kept.append(some)
        if grid is None or is_alone:
            found.append(entry)
            continue
        with locating(tensor=str(entry.name)):
            cells = prod((*entry.shape, *grid.extents))
            require_memory(cells * CELL_NBYTES, "Compare fewer of its channels at once")
        shape = (*entry.shape, *grid.extents)
        found.append(entry._replace(dims=(*entry.dims, *grid.dims), shape=shape))
    return found, kept, inputs


def _compare_channels(
    inputs: Sequence[tuple[Sequence[Match], tuple[int, ...], Any, ChannelGrid | None]],
    *,
    progress: ProgressOption,
) -> list[Any]:
    """Compare all pairs by channels; return the array of each variable."""
    pairs, grids = [], []
    for rows, _, _, grid in inputs:
        for row in rows:
            if row.both is not None and grid is not None:
                pairs.append(pair_in_order(*row.both, row.name))
                grids.append(grid)
    with Progress(progress, "comparison") as bar:
        found = iter(
            gather(
                pairs,
                Channels,
                lambda _, each: measures_of(each.table()).reshape(-1),
                bar,
                arguments=grids,
            )
        )
    values = []
    for rows, shape, gone, grid in inputs:
        cells = prod(grid.extents) if grid else 1
        table = [
            np.tile(_unread(row), cells) if row.both is None or grid is None else next(found)
            for row in rows
        ]
        measured = np.array(table, np.float64).reshape(len(rows), cells * len(MEASURES))
        cube = laid(measured, shape, gone).reshape(cells, len(MEASURES), *shape)
        extents = grid.extents if grid else ()
        values.append(np.moveaxis(cube, 0, -1).reshape(len(MEASURES), *shape, *extents))
    return values


def _attrs_of(
    entries: Sequence[Described], rows: Sequence[Sequence[Match]], *, has_names: bool
) -> list[dict[str, Any]]:
    """Say in attributes what numbers cannot: shapes that differ, and other names."""
    texts = ["; ".join(f"{row.name}: {row.shapes}" for row in some if row.shapes) for some in rows]
    attrs: list[dict[str, Any]] = [{"shapes": text} if text else {} for text in texts]
    for attr, entry, some in zip(attrs, entries, rows, strict=True) if has_names else ():
        found = _at_places(entry, [row.partner for row in some])
        # One text, or one for each place of a stack.
        for place, key in enumerate(("other_name", "matched_by")):
            told = [partner[place] if partner else "" for partner in found]
            attr[key] = told if entry.dims else told[0]
    return attrs


def _at_places(entry: Described, found: Sequence[Any]) -> Sequence[Any]:
    """Return what was found of the tensors of a variable by places; None where one is gone."""
    if entry.gone is None:
        return found
    each = iter(found)
    return [None if is_gone else next(each) for is_gone in entry.gone.ravel()]


# --- measures ------------------------------------------------------------------------------------


def _unread(row: Match) -> list[float]:
    """Return the statistics of what is not compared: a status and a count, or nothing at all."""
    known: dict[str, float] = {}
    if row.status:
        known = {"status": STATUSES.index(row.status), "count": row.size}
    return [known.get(measure, nan) for measure in MEASURES]
