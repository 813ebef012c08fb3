"""`compare`: the differences between the tensors of two checkpoints of any formats."""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import nan, prod
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
import xarray as xr

from xckpt.comparison.attributes import attribute_changes, state_attributes
from xckpt.comparison.cells import CELL_NBYTES, Channels, grid_of, reduced_lengths
from xckpt.comparison.classify import Places
from xckpt.comparison.match import matched
from xckpt.comparison.measure import (
    MEASURES,
    PAIR_COLUMNS,
    PAIR_SUMS,
    bounded,
    checked_bounds,
    mark_close,
    measures_of,
    measures_of_pairs,
    summed,
)
from xckpt.comparison.pairs import Match, pair_of
from xckpt.comparison.relate import relate_known
from xckpt.comparison.variables import (
    ComparedVariable,
    add_attrs,
    by_variable,
    deferred_values,
    unread,
)
from xckpt.errors import locating, shown, warn
from xckpt.formatting import counted
from xckpt.index import paused_collector
from xckpt.labels.filters import suggest_filters
from xckpt.options import RENAMING, ScanOptions, renamed, takes
from xckpt.progress import Progress
from xckpt.scan.entries import (
    Entry,
    all_entries,
    contents_of_all,
    filter_of,
    laid_out,
    warn_of_unreadable,
)
from xckpt.scan.scanning import gather
from xckpt.statistics import OF_CODES
from xckpt.statistics.codes import clipping, gain_of, use_of_codes
from xckpt.statistics.tables import STATUSES
from xckpt.storage.limits import require_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xckpt.comparison.cells import Reduced
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.labels import TensorFilter
    from xckpt.labels.renaming import Renaming
    from xckpt.progress import ProgressOption
    from xckpt.scan.entries import Describable
    from xckpt.typing import Array, Dataset

# Fewer tensors with other names than this, or than this share of the pairs, may be another head.
_FEW_RENAMED, _RENAMED_SHARE = 5, 0.05


@renamed("other", "b")
@takes(
    ScanOptions,
    atol="did you mean fail_above={{'max_abs': {value!r}}}?",
    rename=RENAMING,
    rtol="did you mean fail_above={{'rel_l2': {value!r}}}?",
)
def compare(
    a: Describable,
    b: Describable,
    *,
    tensors: TensorFilter | None = None,
    names: Renaming | Literal["auto"] | None = None,
    dim: Reduced | None = None,
    codes: bool = False,
    explain: bool = False,
    adapter: Describable | None = None,
    fail_above: Mapping[str, float] | None = None,
    ignore_attrs: bool = False,
    compute: bool = True,
    **options: Unpack[ScanOptions],
) -> Dataset:
    """Compare the tensors of two checkpoints by name, in one pass over both.

    Formats, element types, memory orders, layouts and stacking may differ: numbers are compared.
    The comparison runs where `stats` does, in bounded memory. The result is bitwise the same for
    all chunks and numbers of threads.

    Parameters
    ----------
    a : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        Checkpoint to compare, the reference for relative differences. Two DataArrays are compared
        with each other even if their names differ.
    b : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        The other checkpoint.
    names : "auto", mapping, callable, or pairs of regular expressions and replacements, optional
        Names in `b` for the names in `a`. A mapping can omit names that stay the same; pairs are
        applied in order, as by `re.sub`. ``"auto"`` matches tensors without a namesake by content,
        which reads them once more, and then by naming conventions: see Notes.
    dim : str, int, iterable of these, or mapping of these to int, optional
        Dimensions to reduce, by name or position (-1 is the last one). The result has one value
        for each position along the other dimensions: ``dim=-1`` gives one value for each output
        channel of PyTorch's linear layers. A mapping gives the number of neighbours to reduce to
        one value: ``{-1: 128}`` for groups of 128. All dimensions by default. Tensors without
        these dimensions are omitted.
    codes : bool
        Examine the codes and scales of the quantised tensors of `b`, in two more passes, for the
        statistics from ``saturated`` to ``gain_db``.
    adapter : path, mapping, Index or xarray.Dataset, optional
        Adapter, such as LoRA: verify that `b` is `a` with the adapter merged into it. Implies
        `explain`. A tensor that the adapter changes is explained, with the cause ``merged``, if
        every element of `b` is within the rounding of ``a + scale * B @ A``. The scale is read from
        ``adapter_config.json`` next to the file, or from tensors ``alpha``; without it, the scale
        that fits is used and named. Names of other libraries and formats lead to the tensors of
        `a` by their places in the model.
    fail_above : mapping of str to float, optional
        Bounds of measures, such as ``{"rel_l2": 1e-3}``: a tensor that differs, but is within all
        of them, has the status ``close``. Measures are ``max_abs``, ``rmse``, ``rel_l2``, ``nmse``,
        and ``nan`` and ``inf``, whose bounds are 0 by default.
    ignore_attrs : bool
        Do not compare attributes: of the files, of ``config.json``, of tokenizers, of tensors.
    compute : bool
        If False, return dask arrays, which run the pass when they are computed.

    Returns
    -------
    xarray.Dataset
        Each variable of `a`, with the dimension ``statistic`` first and then the dimensions along
        which tensors are stacked; then a variable for each tensor that only `b` has. `xckpt.table`
        lays the result out with one row for each tensor, most changed first. If attributes differ,
        ``attrs["attributes"]`` has a sentence for each. ``attrs["hint"]`` is advice if tensors may
        have other names in `b`.

        ==================  ====================================================================
        ``status``          0 same, 1 changed, 2 only_a, 3 only_b, 4 shape (the shapes differ),
                            5 unreadable (in `a` or `b`), 6 close (see `fail_above`); a table has
                            the words. Tensors are the same if all elements are equal; their types
                            may differ.
        ``count``           number of elements
        ``equal_fraction``  fraction of the elements that are equal: the same number (-0.0 equals
                            0.0), or both NaN
        ``nan``, ``inf``    number of elements that differ because one side is NaN, or because one
                            side is infinite and neither is NaN
        ``max_abs``         largest difference between elements that are finite on both sides; the
                            statistics below are over the same elements
        ``rmse``            root of the mean of the squared differences
        ``rel_l2``          root of the sum of the squared differences, divided by the root of the
                            sum of the squares of `a`; infinite if all of `a` is zero
        ``cosine``          cosine of the angle between both; NaN if one of them is zero
        ``sqnr_db``         signal to quantisation noise in decibels: 10 log10 of the sum of the
                            squares of `a` over the sum of the squared differences
        ``nmse``            the inverse ratio, which is the square of ``rel_l2``
        ``saturated``       with `codes`: fraction of the codes of `b` at the ends of their range;
                            NaN without codes, and for GGUF's blocks of other than 4 or 8 bits
        ``unused``          with `codes`: fraction of the values of a code that never occur
        ``outliers``        with `codes`: elements of `a` beyond four times its root mean square
        ``clipped``         with `codes`: fraction of the outliers that `b` cut off: they are beyond
                            the end of the codes by more than half a step
        ``scales``          with `codes`: number of the scales of `b`
        ``scale_limits``    with `codes`: fraction of the scales that are zero, subnormal, the
                            largest number of their type, or not finite
        ``gain_db``         with `codes`: decibels that the sqnr of all tensors together would gain
                            if this tensor had one more bit
        ==================  ====================================================================

        With `names`, a variable has the attributes ``other_name``, its name in `b` (empty if it
        has no counterpart), and ``matched_by``, the rule; both are lists for stacked tensors.
        A table has them as columns, and ``result.ckpt.names`` is a mapping for later calls.
        So do variables if a file states that a tensor is tied to another one instead of storing
        it, as safetensors' ``save_model`` does: it is compared with that one, by the rule ``tied``.

        Tensors that are the same have 1, 0, 0, 0, 0, 0, 1, infinity, 0 after the count. If no
        element is finite on both sides, ``max_abs`` and all statistics after it are NaN.
        Differences of complex numbers are magnitudes.

        With `explain`, ``attrs["explanation"]`` is a sentence about all tensors, exceptions first,
        and variables also have the attributes below, as lists if they are stacked. They are columns
        of a table.

        ====================  ==================================================================
        ``outcome``           ``explained``: one tensor follows from the other by admitted
                              causes, verified on every element; ``changed``: it differs;
                              ``unmatched``: only one side has it; ``unreadable``: one side
                              cannot be read
        ``cause``             one of ``equal, renamed, tied, transposed, rope_permuted, fused,
                              split, padded, merged, folded, rounded, quantised, offset,
                              scaled``, which explain (the last two where the architecture is
                              known for it),
                              ``misplaced, rows_permuted, cut, pruned, low_rank, unknown``, which
                              do not, and ``only_a, only_b, unreadable``; or several joined by ``+``
        ``explanation``       a sentence with numbers
        ``verified``          whether the tensor is explained
        ``offset, scale``     the number that was added, and the factor
        ``rank, heads``       the rank of a low-rank update, and the heads of a permutation for
                              rotary embeddings
        ``other_names``       the tensors on the other side, if their names differ
        ====================  ==================================================================

    Raises
    ------
    CheckpointError
        If a tensor cannot be read.
    ValueError
        If two tensors of `b` have one name, the regular expression is invalid, a mapping has a
        name that no tensor of `a` has, no tensor has a dimension `dim`, or `codes` or `explain` is
        combined with `dim` or ``compute=False``. If `adapter` fits several tensors of `a`.
    TypeError
        If an argument has another type.
    UnsupportedError
        If `adapter` is of an unsupported method, such as OFT; the message names it.

    Warns
    -----
    CheckpointWarning
        If no tensor of `a` has the name of one of `b`.
    UnreadableWarning
        If tensors cannot be read, because a shard is missing or a file is damaged.

    Notes
    -----
    The rules of ``names="auto"``, in their order. Rules of content apply to tensors that are not
    constant, and only if exactly one tensor of each side fits:

    ==============  ============================================================================
    ``name``        equal names
    ``values``      equal numbers in the same order, whatever their type
    ``transposed``  one is the transpose of the other
    ``rows``        equal rows, or columns, in another order, transposed or not
    ``elements``    equal numbers in any order, in any shape
    ``burn``        ``gamma`` and ``beta`` for ``weight`` and ``bias``
    ``prefix``      one has ``module.``, ``_orig_mod.``, ``model.`` or ``transformer.`` in front
    ``gptrs``       gpt.rs's names for the tensors of GPT-2 and Llama
    ``gguf``        names of the package `gguf`, if it is installed
    ``alike``       nearly the same numbers: rounded or quantised, transposed or permuted or not
    ``siblings``    the name that the pairs so far lead to expect, whatever the numbers
    ``place``       the same place in the model, and the same shape
    ``values``      constants, and sets of equal tensors that are as large on both sides
    ``names``       constants whose names have more in common than any others
    ==============  ============================================================================

    Examples
    --------
    >>> result = xckpt.compare("base.safetensors", "tuned.zt")
    >>> result.ckpt.table().query("status == 'changed'").head(3)
    """
    explain = explain or adapter is not None
    bounds = checked_bounds(fail_above)
    if dim is not None or not compute:
        _require_no_whole_tensors(codes=codes, explain=explain, adapter=adapter)
    storage_options, cache = options["storage_options"], options["cache"]
    ours, theirs = contents_of_all([a, b], storage_options)
    sides = _entries_of(ours, theirs)
    if names is None:
        names = _names_of_arrays([a, b], sides)
    tensors = filter_of(tensors, options, ours, theirs)
    ties = [_ties(theirs, ours), _ties(ours, theirs)]
    places = Places(ours.structure, theirs.structure)
    entries, rows, progress = matched(
        *sides, names, tensors, progress=options["progress"], ties=ties, places=places
    )
    _warn_of_no_match(sides, rows, names, tensors, explain=explain)
    hint = "" if explain or names is not None else _hint_of_names(rows)
    rows = relate_known(rows, places, cache=cache)
    variables = [ComparedVariable(*of_one) for of_one in zip(entries, rows, strict=True)]
    sums: dict[str, tuple[float, ...]] = {}
    find: Any = partial(_compare_all, progress=progress, cache=cache, sums=sums)
    if dim is not None:
        variables = _along(dim, variables)
        find = partial(_compare_channels, progress=progress)
    if explain:
        from xckpt.comparison.explaining.results import add_links

        add_links(variables, places)
    values = (
        find(variables) if compute else deferred_values(partial(bounded, find, bounds), variables)
    )
    for variable, of_one in zip(variables, values, strict=True):
        variable.values = of_one
    add_attrs(variables, has_names=names is not None)
    summary = {}
    if explain:
        from xckpt.comparison.explaining.results import add_explanations
        from xckpt.comparison.merges import open_merges

        all_matches = [match for variable in variables for match in variable.matches]
        merges = open_merges(adapter, ours, theirs, all_matches, storage_options)
        summary = add_explanations(variables, places, sums, progress, merges)
    if compute:  # explanations take close tensors as changed
        mark_close([variable.values for variable in variables], bounds)
    statistics: tuple[str, ...] = MEASURES
    if codes:
        statistics += OF_CODES
        _add_codes(variables, sums, progress, cache=cache)
    result = laid_out(
        statistics,
        [variable.laid_entry for variable in variables],
        [variable.values for variable in variables],
        [variable.attrs for variable in variables],
        ours,
    )
    result.attrs |= {"status": list(STATUSES), **({"hint": hint} if hint else {}), **summary}
    if not ignore_attrs:
        matches = [variable.matches for variable in variables]
        state_attributes(result, attribute_changes(ours, theirs, matches))
    return _with_origins(result, sums, theirs)


def _ties(tensors: OpenTensors, model: OpenTensors) -> dict[Any, Any]:
    """Return the owners in a model of tied tensors that the model may lack, by name.

    The metadata of the model may name them, or the other side may have both in the same bytes.
    """
    return dict(model.attrs) | ({} if model.structure.facts.is_untied else tensors.shared)


def _require_no_whole_tensors(*, codes: bool, explain: bool, adapter: Any) -> None:
    """Raise if an option of whole tensors is combined with `dim` or ``compute=False``."""
    if codes or explain:
        keyword = "codes=True" if codes else "explain=True" if adapter is None else "adapter"
        raise ValueError(f"{keyword} needs whole tensors at once: leave out dim and compute=False")


def _entries_of(ours: OpenTensors, theirs: OpenTensors) -> tuple[list[Entry], list[Entry]]:
    """Return the variables of both sides, with a warning of tensors that cannot be read."""
    with paused_collector():
        sides = all_entries(ours), all_entries(theirs)
    warn_of_unreadable(ours, sides[0])
    if theirs.source != ours.source or not ours.source:
        warn_of_unreadable(theirs, sides[1])
    return sides


def _names_of_arrays(
    objects: Sequence[Any], sides: Sequence[Sequence[Entry]]
) -> dict[str, str] | None:
    """Return the names of two DataArrays, which are compared whatever these are; else None."""
    if not all(isinstance(obj, xr.DataArray) for obj in objects):
        return None
    both = ([stream.name for entry in side for stream in entry.streams] for side in sides)
    return dict(zip(*both, strict=False))


def _with_origins(
    result: Dataset, sums: dict[str, tuple[float, ...]], theirs: OpenTensors
) -> Dataset:
    """Add the sums that groups need, and the name of the other file, to a result."""
    if sums:
        result.encoding["sums"] = sums
    if theirs.source:
        result.attrs["compared_with"] = theirs.source
    return result


def _warn_of_no_match(
    sides: Sequence[Sequence[Entry]],
    rows: Sequence[Sequence[Match]],
    names: Any,
    tensors: TensorFilter | None,
    *,
    explain: bool,
) -> None:
    """Warn if no tensors can be compared; with `explain`, the explanation covers other names."""
    statuses = {row.status for matches in rows for row in matches if row.is_chosen}
    if not rows and tensors is not None:
        all_names = [stream.name for side in sides for entry in side for stream in entry.streams]
        text = (
            f"tensors={tensors!r} matches no tensor of a or b{suggest_filters(all_names, tensors)}"
        )
    elif explain or statuses != {"only_a", "only_b"}:
        return
    elif names == "auto":
        text = "no tensor of a was found in b, neither by its name nor by its content"
    else:
        text = (
            "no tensor of a has the name of one of b: use names='auto' to match them by content, "
            "or names= to list the pairs"
        )
    warn(text)


def _hint_of_names(rows: Iterable[Sequence[Match]]) -> str:
    """Return the advice for tensors that both sides seem to have under different names."""
    matches = [match for row in rows for match in row]
    ours, theirs = (
        Counter([stream.array.shape for stream in side])
        for side in (
            [match.ours for match in matches if match.status == "only_a" and match.ours],
            [match.theirs for match in matches if match.status == "only_b" and match.theirs],
        )
    )
    count = (ours & theirs).total()
    matched = sum([match.ours is not None and match.theirs is not None for match in matches])
    # A new head also has shapes of the old one.
    least = max(min(matched, _FEW_RENAMED), matched * _RENAMED_SHARE)
    if 2 * count <= min(ours.total(), theirs.total()) or count < least:
        return ""
    names = "another name" if count == 1 else "other names"
    return (
        f"{counted(count, 'tensor')} may have {names} in b (equal shapes): names='auto' matches "
        "them, explain=True also says why"
    )


def _compare_all(
    variables: Sequence[ComparedVariable],
    *,
    progress: ProgressOption,
    cache: bool,
    sums: dict[str, tuple[float, ...]],
) -> list[Array]:
    """Compare all pairs, add their `PAIR_SUMS` to `sums`, and return the values of variables.

    Links of the matches, if any, are examined at the same time.
    """
    measured = [match for v in variables for match in v.matches if match.measured is not None]
    pairs = [match.measured for match in measured if match.measured is not None]
    links = [
        link
        for v in variables
        for match, link in zip(v.matches, v.links, strict=False)
        if match.measured is not None
    ]
    find = None
    if links:
        from xckpt.comparison.relations.verification import compare_and_examine

        find = partial(compare_and_examine, pairs, links, cache=cache)
    table = summed(pairs, progress=progress, cache=cache, find=find)
    columns = [PAIR_COLUMNS.index(name) for name in PAIR_SUMS]
    names = [match.name for match in measured]
    sums |= zip(names, map(tuple, table[:, columns].tolist()), strict=True)
    measures = measures_of_pairs(table)
    for values, match in zip(measures, measured, strict=True):
        if match.steps:  # the status is about elements at their own positions
            values[0] = STATUSES.index(match.status or "changed")
    return by_variable(variables, measures, unread)


def _add_codes(
    variables: Sequence[ComparedVariable],
    sums: Mapping[str, tuple[float, ...]],
    progress: ProgressOption,
    *,
    cache: bool,
) -> None:
    """Append the statistics of the codes of `b` to the values of variables."""
    matches = [row for variable in variables for row in variable.matches if row.sides]
    pairs = [row.sides for row in matches if row.sides]
    table = np.array([sums[row.name] for row in matches]).reshape(-1, len(PAIR_SUMS))
    columns = dict(zip(PAIR_SUMS, table.T, strict=True))
    noise, exponent = columns["differences"], columns["exponent"]
    with np.errstate(all="ignore"):
        sizes = np.sqrt(columns["first"] / columns["finite"]) * np.exp2(exponent)
        largest = exponent.max(initial=-np.inf, where=noise > 0)
        squares = np.where(noise > 0, noise * np.exp2(2 * (exponent - largest)), 0.0)
        gains = gain_of(squares / max(squares.sum(), np.finfo(float).tiny))
    # A progress function follows only one pass, the comparison.
    with Progress(False if callable(progress) else progress, "codes") as bar:
        uses = use_of_codes([theirs for _, theirs in pairs], bar, cache=cache)
        clipped = clipping(pairs, sizes.tolist(), bar, cache=cache)
    code_columns = np.column_stack([uses, clipped, gains])
    of_codes = by_variable(variables, code_columns, lambda _: [nan] * len(OF_CODES))
    for variable, array in zip(variables, of_codes, strict=True):
        variable.values = np.concatenate([variable.values, array])


# --- channels and blocks -------------------------------------------------------------------------


def _along(dim: Reduced, variables: Sequence[ComparedVariable]) -> list[ComparedVariable]:
    """Select the variables that have any of the dimensions, and lay out their channels."""
    lengths = reduced_lengths(dim, [variable.entry for variable in variables])
    selected: list[ComparedVariable] = []
    for variable in variables:
        entry, matches = variable.entry, variable.matches
        is_alone = not any(match.measured for match in matches)
        variable.grid = None if is_alone else grid_of(entry, lengths)
        if variable.grid is None and not is_alone:
            continue
        streams = [stream for match in matches for stream in match.sides or ()]
        if any(stream.array.dtype.kind == "c" for stream in streams):
            text = f"{shown(str(entry.name))} has complex numbers, which are compared as a whole"
            warn(text)
            continue
        if variable.grid is not None:
            with locating(tensor=str(entry.name)):
                nbytes = prod(variable.shape) * CELL_NBYTES
                require_memory(nbytes, "Compare fewer of its channels at once")
        selected.append(variable)
    return selected


def _compare_channels(
    variables: Sequence[ComparedVariable], *, progress: ProgressOption
) -> list[Array]:
    """Compare all pairs by channels; return the values of variables."""
    pairs, grids = [], []
    for variable in variables:
        for row in variable.matches:
            sides = row.in_place_of_a
            if sides is not None and variable.grid is not None:
                pairs.append(pair_of(*sides, row.name))
                grids.append(variable.grid)
    with Progress(progress, "comparison") as bar:
        finish = lambda _, channels: measures_of(channels.table()).T.reshape(-1)  # noqa: E731
        statistics = gather(pairs, Channels, finish, bar, arguments=grids)
    return by_variable(variables, statistics, unread)
