"""`findings`: what a specialist would point out in the statistics of tensors, as rules.

A rule looks at the table of all tensors and says of which it holds, with a number and a sentence.
Many rules compare a tensor with its siblings, which are those whose names differ in numbers only:
so a bias that is zero is nothing in a new model, and something if those of all other layers are
not. Which tensors are equal is suspected because of their statistics, and then read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.index import paused_collector
from xckpt.labels.selection import select, similar
from xckpt.notebook.formatting import binary_size, counted
from xckpt.statistics.api import QUANTILES, stats
from xckpt.statistics.channels import OUTLYING
from xckpt.statistics.code_ranges import decoded_codes, judge, plain_codes
from xckpt.statistics.entries import contents_of
from xckpt.statistics.equals import equal_tensors
from xckpt.statistics.measured import Measured
from xckpt.statistics.runs import run_dim, run_findings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pandas as pd

    from xckpt.progress import ProgressOption
    from xckpt.statistics.entries import Describable
    from xckpt.statistics.measured import Found

Array = np.ndarray[Any, np.dtype[Any]]

#: Every rule, and how severe it is that it holds.
RULES: dict[str, str] = {
    "nan": "error",
    "inf": "error",
    "all_zero": "warning",
    "constant": "info",
    "exploding": "warning",
    "dead_rows": "warning",
    "dead_columns": "warning",
    "dead_heads": "warning",
    "dead_experts": "warning",
    "zero_centred_norm": "warning",
    "negative_norm": "info",
    "unlike_layer": "warning",
    "outlier_channels": "info",
    "subnormal": "warning",
    "wide_type": "info",
    "mixed_types": "warning",
    "narrow_codes": "info",
    "saturated_codes": "warning",
    "tied": "info",
    "duplicated": "info",
    "copied_layer": "warning",
    "identical_step": "warning",
    "unlike_step": "warning",
    "stopped": "warning",
}
_SEVERITIES = ("error", "warning", "info")
_COLUMNS = ("tensor", "rule", "value", "severity", "explanation")
_NEEDED = {"count", "nan", "inf", "zero", "min", "max", "absmax", "std"}

#: Largest magnitude in standard deviations from which a tensor is said to explode. Of a billion
#: normally distributed elements the largest is at about 6; trained weights reach some tens.
EXPLODING = 100.0
#: Distance of a layer from its neighbours, in robust standard deviations of all layers.
UNLIKE = 6.0
# Layers below which there is no trend, and what is taken for the least spread of one: 5 %.
_FEWEST_LAYERS = 5
_LEAST_SPREAD = 0.05
#: Share of elements that are subnormal.
SUBNORMAL = 0.1
# Part of the channels that are few.
_FEW_CHANNELS = 0.01
# Distance of weights that are centred on 0 from 0, and of those that are centred on 1 from 1.
_NEAR_ZERO, _NEAR_ONE = 0.25, (0.5, 2.0)
# With fewer of them, a norm is compared with all others.
_FEWEST_SIBLINGS = 4
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Types that hold all numbers of a larger one if so many of its lowest bits are always zero.
_FEWEST_ELEMENTS = 64
_SPARE = {"float32": (16, 23, "bfloat16"), "float64": (29, 52, "float32")}

# What vectors of zeros or ones are called in a new model, and matrices of zeros.
_INITIAL = re.compile(r"(^|_)(weight|bias|gamma|beta|scale|shift|mean|var|norm|ln|g|b|D)$")
_INITIAL_MATRIX = re.compile(r"lora_[bB]\b")
_EMBEDDING = re.compile(r"emb|wte|wpe|(^|\.)shared\.", re.IGNORECASE)
_NORM = re.compile(
    r"(norm\w*|(^|[._])(ln|bn)(_?\w+)?)([._]\d+)?(\.(weight|gamma|scale|g))?$", re.IGNORECASE
)
_NO_GAIN = re.compile(r"(bias|beta|shift|mean|var|_b)$", re.IGNORECASE)
_ROUTER = re.compile(r"(^|[._])(router|gate|wg|ffn_gate_inp)([._]\w+)?$")
_HEADS = re.compile(r"attn|attention|[qkvo]_proj|query|key|value|qkv|\bw[qkvo]\b", re.IGNORECASE)


def findings(
    obj: Describable,
    *,
    ignore: str | Iterable[str] | None = None,
    progress: ProgressOption = None,
    cache: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """List what looks wrong with tensors, or what is worth knowing of them.

    ``docs/how-to/health-check.md`` has a table of all rules with their thresholds. What is found
    is a reason to look, and not always a fault.

    Parameters
    ----------
    obj : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        What to look at: its tensors are read once, as `stats` does it with ``channels=True``, and
        those that seem to be equal once more. Of a Dataset of `open_steps`, steps are also
        compared with each other. Of the result of `stats`, what follows from that alone; nothing
        is read then.
    ignore : str or iterable of str, optional
        What not to list: a rule such as ``"constant"``, or a rule, a colon and a glob of tensors,
        ``"dead_rows:*.delta"``; ``"*"`` stands for all rules.
    progress : bool or callable, optional
        As for `stats`.
    cache : bool
        As for `stats`.
    storage_options : dict, optional
        For fsspec, where `obj` is a URL.

    Returns
    -------
    pandas.DataFrame
        With the columns ``tensor, rule, value, severity, explanation``; errors first, then
        warnings, each in the order of the tensors. A step of a run counts as a tensor.

    Raises
    ------
    ValueError
        If there is no such rule, or statistics that the rules need are missing.
    TypeError
        If `ignore` is not a text, or several.
    CheckpointError
        If a tensor cannot be read.

    Examples
    --------
    >>> xckpt.findings("m.zt", ignore=["constant", "dead_rows:*.delta"])  # doctest: +SKIP
       tensor       rule   value severity                explanation
    0  blocks.3.w    nan     1.0    error  1 of 4,096 elements is NaN
    """
    ignored = ignored_rules(ignore)
    if isinstance(obj, xr.Dataset) and "statistic" in obj.dims:
        return _frame(_judged(Measured.of(obj)), ignored)
    return examine(
        obj, ignore=ignore, progress=progress, cache=cache, storage_options=storage_options
    )[1]


def examine(
    obj: Any,
    *,
    ignore: str | Iterable[str] | None = None,
    quantiles: Sequence[float] = QUANTILES,
    exact_quantiles: bool = False,
    progress: ProgressOption = None,
    cache: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> tuple[xr.Dataset, pd.DataFrame]:
    """Return statistics, and what is found with them in the object."""
    ignored = ignored_rules(ignore)
    subject: Any = contents_of(obj, storage_options)  # so that a file is opened once
    result = stats(
        subject,
        quantiles=quantiles,
        exact_quantiles=exact_quantiles,
        channels=True,
        progress=progress,
        cache=cache,
    )
    with paused_collector():
        readers = [reader for entry in subject.entries() for reader in entry.readers]
    measured = Measured.of(result, run_dim(subject.coords))
    found = _judged(measured)
    for codes in decoded_codes(readers, progress=progress, cache=cache):
        found += judge(measured, codes)
    if measured.run is None:
        found += equal_tensors(measured, readers, progress=progress, cache=cache)
    else:
        found += run_findings(measured, readers, progress=progress, cache=cache)
    return result, _frame(found, ignored)


def _judged(measured: Measured) -> list[Found]:
    missing = _NEEDED - set(measured.columns)
    if missing:
        raise ValueError(f"findings need the statistics {', '.join(sorted(missing))}")
    with np.errstate(all="ignore"):
        return [found for rule in _EACH for found in rule(measured)]


def _frame(found: Sequence[Found], ignored: Sequence[tuple[str, str | None]]) -> pd.DataFrame:
    """Sort what was found, and leave out what nobody wants to know."""
    import pandas as pd

    for rule, glob in ignored:
        some = [each for each in found if rule in {each.rule, "*"}]
        names = {each.name for each in some}
        gone = names if glob is None else set(select(names, glob))
        found = [each for each in found if rule not in {each.rule, "*"} or each.name not in gone]
    order = list(RULES)
    rows = [
        (_SEVERITIES.index(RULES[each.rule]), each.at, order.index(each.rule), each)
        for each in found
    ]
    rows.sort(key=lambda row: row[:3])
    table = [
        (each.name, each.rule, float(each.value), RULES[each.rule], each.explanation)
        for *_, each in rows
    ]
    return pd.DataFrame(table, columns=list(_COLUMNS))


def ignored_rules(ignore: Any) -> list[tuple[str, str | None]]:
    """Return the rules that are not to be listed, each perhaps with a glob of tensors."""
    texts = [ignore] if isinstance(ignore, str) else [] if ignore is None else ignore
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping):
        texts = [texts]
    found: list[tuple[str, str | None]] = []
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(
                f"ignore takes rules such as 'constant' or 'dead_rows:*.delta', not {text!r}"
            )
        rule, colon, glob = text.partition(":")
        if rule not in {*RULES, "*"}:
            known = similar(RULES, rule) or f"; rules are {', '.join(RULES)}"
            raise ValueError(f"ignore={text!r}: there is no such rule{known}")
        found.append((rule, glob if colon else None))
    return found


# --- elements ------------------------------------------------------------------------------------


def _not_finite(measured: Measured) -> Iterator[Found]:
    for rule, words in (("nan", "NaN"), ("inf", "infinite")):
        for at in np.flatnonzero(measured[rule] > 0):
            value = measured[rule][at]
            yield measured.found(at, rule, value, f"{measured.part(at, value, 'element')} {words}")


def _constants(measured: Measured) -> Iterator[Found]:
    count, low = measured["count"], measured["min"]
    one_value = (low == measured["max"]) & (count > 1) & (measured["nan"] + measured["inf"] == 0)
    if not one_value.any():
        return
    for siblings in measured.families.values():
        same = [at for at in siblings if one_value[at]]
        others = len(siblings) - len(same)
        # Few of many, such as the bias of one layer, are not as they were made.
        is_usual = 2 * len(same) > len(siblings) and len({low[at] for at in same}) == 1
        for at in same:
            name = measured.dotted[at]
            is_initial = low[at] == 0 and _INITIAL_MATRIX.search(name)
            if low[at] in {0, 1} and measured.is_vector(at):
                is_initial = is_initial or _INITIAL.search(name.rpartition(".")[2])
            if is_usual and is_initial:
                continue
            what = f"all {count[at]:,.0f} elements are {low[at]:.6g}"
            if others:
                what += f", unlike those of {counted(others, 'sibling')}"
            if low[at] == 0:
                yield measured.found(at, "all_zero", count[at], what)
            else:
                yield measured.found(at, "constant", low[at], what)


def _exploding(measured: Measured) -> Iterator[Found]:
    std, largest = measured["std"], measured["absmax"]
    ratio = largest / std
    # Not of few elements with a mean, rather than about zero: 100 and 101 do not explode.
    centred = np.abs(measured["mean"]) < largest / 2
    known = ~np.isnan(measured["mean"])
    for at in np.flatnonzero((std > 0) & (ratio > EXPLODING) & (centred | ~known)):
        what = f"the largest magnitude, {largest[at]:.3g}, is {ratio[at]:,.0f} standard deviations"
        yield measured.found(at, "exploding", ratio[at], what)


def _subnormal(measured: Measured) -> Iterator[Found]:
    share = measured["subnormal"] / measured["count"]
    for at in np.flatnonzero(share > SUBNORMAL):
        what = f"{share[at]:.0%} of the elements are subnormal: few of their digits are left"
        yield measured.found(at, "subnormal", share[at], what)


# --- rows and columns ----------------------------------------------------------------------------


def _dead_channels(measured: Measured) -> Iterator[Found]:
    alive = measured["zero"] < measured["count"]
    for rule, word in (("dead_rows", "row"), ("dead_columns", "column")):
        for at in np.flatnonzero((measured[rule] > 0) & alive):
            value, name = measured[rule][at], measured.dotted[at]
            if rule == "dead_rows" and value == 1 and _EMBEDDING.search(name):
                continue  # of the token that stands for none
            shape, block = measured.shapes[at], measured["dead_block"][at]
            if word == "row" and (
                (len(shape) == 3 and "expert" in name) or _is_router(measured, at)
            ):
                what = f"{value:,.0f} of {counted(shape[0], 'expert')} has nothing but zeros"
                yield measured.found(at, "dead_experts", value, what)
                continue
            total = shape[0] if shape and word == "row" else shape[-1] if len(shape) == 2 else 0
            of = f" of {total:,}" if total else ""
            what = f"{value:,.0f}{of} {word if value == 1 else word + 's'} of zeros"
            if block > 1 and _HEADS.search(name) and value % block == 0:
                what += f": as many as {counted(int(value // block), 'head')} of {block:.0f}"
                yield measured.found(at, "dead_heads", value // block, what)
            else:
                yield measured.found(at, rule, value, what)


def _idle_experts(measured: Measured) -> Iterator[Found]:
    for at in np.flatnonzero(measured["faint_rows"] > 0):
        if _is_router(measured, at):
            value, first = measured["faint_rows"][at], measured["faint_row"][at]
            what = (
                f"{value:,.0f} of {counted(measured.shapes[at][0], 'expert')} "
                f"{'has' if value == 1 else 'have'} a row of the router near zero, "
                f"first expert {first:.0f}"
            )
            yield measured.found(at, "dead_experts", value, what)


def _is_router(measured: Measured, at: Any) -> bool:
    shape, name = measured.shapes[at], measured.dotted[at]
    module = name.removesuffix(".weight").removesuffix(".kernel")
    is_named = _ROUTER.search(module) is not None and not module.endswith("_proj")
    return is_named and len(shape) == 2 and 2 <= shape[0] < shape[1]


def _outlier_channels(measured: Measured) -> Iterator[Found]:
    rows, columns = measured["outlier_rows"], measured["outlier_columns"]
    ratio = measured["absmax"] / measured["std"]
    for at in np.flatnonzero((rows > 0) & (columns > 0)):
        shape = measured.shapes[at]
        totals = (shape[0], int(np.prod(shape[1:])))
        each = (columns[at], "column", totals[1]), (rows[at], "row", totals[0])
        number, word, total = min(each)
        if number <= max(1, _FEW_CHANNELS * total):
            where = measured[f"top_{word}"][at]
            what = (
                f"{counted(int(number), word)} of {total:,} "
                f"{'has' if number == 1 else 'have'} elements beyond {OUTLYING:g} standard "
                f"deviations, up to {ratio[at]:.0f} in {word} {where:.0f}"
            )
            yield measured.found(at, "outlier_channels", ratio[at], what)


# --- siblings ------------------------------------------------------------------------------------


def _norms(measured: Measured) -> Iterator[Found]:
    every = [
        at
        for at, name in enumerate(measured.dotted)
        if measured.is_vector(at)
        and _NORM.search(name)
        and not (_NO_GAIN.search(name) or np.isnan(measured["mean"][at]))
    ]
    mean, std, low, high = (measured[each] for each in ("mean", "std", "min", "max"))
    # The mean of a norm in the middle: of those that are siblings, and of all in a step.
    groups: dict[Any, list[int]] = {}
    for at in every:
        for key in (measured.family_of(at), measured.step_of(at)):
            groups.setdefault(key, []).append(at)
    centers = {key: float(np.median(mean[some])) for key, some in groups.items()}
    for at in every:
        key = measured.family_of(at)
        if len(groups[key]) < _FEWEST_SIBLINGS:
            key = measured.step_of(at)
        others = len(groups[key]) - 1
        if others < 2 or not _NEAR_ONE[0] <= centers[key] <= _NEAR_ONE[1]:
            continue
        of = f"those of {others} like it on {centers[key]:.2g}"
        is_zero = low[at] == high[at] == 0
        if is_zero or abs(mean[at]) <= min(_NEAR_ZERO, std[at]):
            what = f"its weights are centred on {mean[at]:.2g}, {of}: is 1 missing?"
            yield measured.found(at, "zero_centred_norm", mean[at], what)
        elif low[at] < 0:
            what = f"its smallest weight is {low[at]:.3g}; it is centred on {mean[at]:.2g}, {of}"
            yield measured.found(at, "negative_norm", low[at], what)


def _unlike_layers(measured: Measured) -> Iterator[Found]:
    rms, count = measured["rms"], measured["count"]
    for siblings in measured.series():
        there = [at for at in siblings if rms[at] > 0 and np.isfinite(rms[at])]
        if len(there) < _FEWEST_LAYERS:
            continue
        noise = np.log2(1 + 1 / np.sqrt(2 * count[there].min()))
        spread = max(noise, np.log2(1 + _LEAST_SPREAD))
        far = measured.unlike(np.log2(rms[there]), spread, UNLIKE)[1:-1]
        # Where there are several, it is how the model is built.
        if 0 < np.count_nonzero(far) <= max(1, len(there) // 16):
            for place in (np.flatnonzero(far) + 1).tolist():
                at, distance = there[place], abs(far[place - 1])
                near = np.median(
                    rms[[each for each in there[max(0, place - 2) : place + 3] if each != at]]
                )
                what = (
                    f"its root mean square, {rms[at]:.3g}, is {rms[at] / near:.2g} times that of "
                    f"the layers next to it: {distance:.0f} robust standard deviations"
                )
                yield measured.found(at, "unlike_layer", distance, what)


# --- element types -------------------------------------------------------------------------------


def _wide_types(measured: Measured) -> Iterator[Found]:
    spare = measured["spare_bits"]
    for at in np.flatnonzero(spare > 0):
        least, most, type_name = _SPARE.get(measured.dtypes[at], (1, 0, ""))
        if least <= spare[at] < most and measured["count"][at] >= _FEWEST_ELEMENTS:
            half = binary_size(int(measured["count"][at]) * (4 if least == 29 else 2))
            what = f"every value of this {measured.dtypes[at]} is a {type_name}: {half} would do"
            yield measured.found(at, "wide_type", spare[at], what)


def _mixed_types(measured: Measured) -> Iterator[Found]:
    dtypes, shapes = measured.dtypes, measured.shapes
    for siblings in measured.families.values():
        kinds = [dtypes[at] for at in siblings]
        if len(set(kinds)) < 2 or not set(kinds) <= set(_FLOATS):
            continue
        usual = max(dict.fromkeys(kinds), key=kinds.count)
        others = kinds.count(usual)
        alike = {shapes[at] for at in siblings if dtypes[at] == usual}
        for at in siblings:
            if dtypes[at] != usual and shapes[at] in alike:
                what = (
                    f"it is {dtypes[at]}, and {others} of its {len(siblings) - 1} siblings {usual}"
                )
                yield measured.found(at, "mixed_types", others, what)


_EACH: tuple[Callable[[Measured], Iterator[Found]], ...] = (
    *(_not_finite, _constants, _exploding, _subnormal),
    *(_dead_channels, _idle_experts, _outlier_channels),
    *(_norms, _unlike_layers),
    *(_wide_types, _mixed_types),
    lambda measured: (one for each in plain_codes(measured) for one in judge(measured, each)),
)
