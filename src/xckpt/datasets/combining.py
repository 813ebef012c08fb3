"""`merge`: the tensors of a model, changed by an adapter or by updates.

All tensors of the model stay: those without a change as they are stored, the others as lazy sums
that are written in the type of the model.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import dask
import dask.array as da
import numpy as np
import xarray as xr

from xckpt.arrays.derived import checkpoints_in, is_computed, lazies_in, with_blocks, with_values
from xckpt.arrays.keys import normalize, result_shape
from xckpt.datasets.adapter_bases import fitted, match_bases, problem_of
from xckpt.datasets.adapter_updates import matrices_of, rotary_order, update_rows
from xckpt.datasets.adapters import Adapter, find_adapters
from xckpt.datasets.losses import NO_COMMON, losses
from xckpt.datasets.row_orders import other_orders
from xckpt.datasets.stacking import replace_tensors, unstack_modules
from xckpt.datasets.tensors import OpenTensors, flatten, split_step
from xckpt.datasets.tied_heads import are_equal, stored_twice, tied_update, untied_head
from xckpt.datasets.variables import mapped_arrays, require_positions
from xckpt.elements import HALF_FLOATS, stored_dtype
from xckpt.errors import UnsupportedError, shown, some, warn
from xckpt.formatting import base_name
from xckpt.structure.facts import declarations_in, model_facts, stated_dtype
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xckpt.datasets.tied_heads import UntiedHead

_SCALED = (
    "updates of an adapter are multiplied by {:g}, as arithmetic applies to each of their factors "
    "(base.ckpt.merge(adapter, scale=...) scales an update; "
    "x.assign((.5 * x.ckpt.find('*lora_B*')).data_vars) scales an adapter x, by one factor)"
)
_ADDED = (
    "factors of several adapters are added, whose products are not the sum of their updates "
    "(base.ckpt.merge(adapter, scale=...), called for each, adds them)"
)
_AVERAGED = (
    "factors of several adapters are averaged, whose products are not the mean of their updates "
    "(base.ckpt.merge(x, scale=.5).ckpt.merge(y, scale=.5) adds the mean of the updates, and "
    "xckpt.extract_adapter makes an adapter of the result)"
)
_TIED = (
    "{head!r} is tied to {table!r}, and changes with it, as by merge_and_unload of PEFT; unless "
    "ensure_weight_tying is set, the adapter was trained with the old head, which stays after "
    "base = base.assign({{{head!r}: base[{table!r}]}})"
)
_SCALED_ALONE = (
    "tensors that {} lacks stay multiplied by {:g} "
    "(a.ckpt.merge(b - a, scale=0.5) leaves those of a as they are)"
)
_OMITTED = (
    "target_modules or layers_to_transform in adapter_config.json leave out modules whose factors "
    "are in the file: {}; they are merged too, unlike by PEFT "
    "(adapter = adapter.ckpt.find(...) chooses factors)"
)
#: Parts that no scale multiplies, by the kind of adapter.
_UNSCALED = {
    "tensors of the adapter that replace tensors of the model, as modules_to_save do,": (
        "saved", "rows", "ia3",
    ),
    "norms that DoRA sets": ("dora",),
}  # fmt: skip
# Problems in a message.
_MOST_PROBLEMS = 3
_MOST_TRIED = 8
_ROUNDING = 1e-2  # of sums of ones in half precision
_LARGE = 0.25  # mean size of the elements of a tensor, relative to the model
#: A Dataset or a tree; functions return the type of their argument.
Obj = TypeVar("Obj", bound=xr.Dataset | xr.DataTree)


def merge(obj: Obj, changes: OpenTensors, adapters: Sequence[Adapter], scale: float | None) -> Obj:
    """Return a model with an adapter, or with updates if `adapters` is empty, added to it."""
    if not changes.rows:
        source = (
            f"{shown(changes.source)} has no tensors, as a pattern that matches none left them out"
        )
        raise ValueError(f"nothing to merge: {source if changes.source else NO_COMMON}")
    _warn_of_operands(OpenTensors(obj), changes)
    is_model = scale != 1 and not adapters and (changes.format is not None or _is_model(changes))
    if is_model and scale is None:
        raise _no_change(changes)
    adapters = adapters or _updates(changes)
    _check_supported(adapters, changes, scale)
    unstacked = unstack_modules(obj)
    variables = flatten(unstacked).variables
    model = OpenTensors(unstacked)
    shared = model.shared
    matches, missing, head = _matches(model, adapters, changes)
    tied = tied_update(model, matches)
    if tied is not None and not _ties_head(changes):
        warn(_TIED.format(head=tied.name, table=tied.table))
    if head is not None:
        variables[head.name] = _as_new(variables[head.table])
    matches = {name: _with_table(variables[name], of_one) for name, of_one in matches.items()}
    if is_model and _are_as_large(matches, variables, changes):
        raise _no_change(changes)
    _require_counterparts(adapters, matches, missing, changes)
    new = _new_tensors(adapters, missing, changes)
    missing = [name for name in missing if name not in new]
    if missing:
        warn(f"the model lacks tensors that are to be changed: {some(missing)}")
    if scale not in {None, 1.0}:
        _warn_of_unscaled(matches)
    _warn_of_scaled(variables, matches, changes)
    half = _half_type(model)
    merged = {
        name: _merged(name, _in_type(variables[name], half), of_tensor, changes, scale)
        if of_tensor
        else variables[name]
        for name, of_tensor in matches.items()
    }
    _require_resized(variables, merged)
    untied = {
        name: _untied(variable)
        for name, variable in variables.items()
        if shared.get(str(name)) in merged
    }
    tied_names = {} if model.structure.facts.is_untied else shared | stored_twice(model, matches)
    result = replace_tensors(obj, untied | _followers(tied_names, matches, merged) | merged | new)
    sources = dict.fromkeys([*model.merged, changes.source, *changes.origins(_MOST_TRIED)])
    # The graph of a result in memory no longer has these files.
    result.encoding = {**result.encoding, "merged": tuple(filter(None, sources))}
    return result


def _require_counterparts(
    adapters: Sequence[Adapter],
    matches: Mapping[str, Sequence[Adapter]],
    missing: Sequence[str],
    changes: OpenTensors,
) -> None:
    """Raise if the model lacks all changed tensors, or a parameter that the config names."""
    parameters = [a.base for a in adapters if a.is_parameter and a.base in missing]
    if parameters:
        raise UnsupportedError(
            f"the model has no known counterpart of {some(parameters, 'parameters')}",
            path=changes.source or None,
            rule="Adapter",
            hint="Merge the adapter with PEFT, into the model that it was trained on",
        )
    if not matches:
        raise ValueError(f"the model has none of the changed tensors: {some(missing)}")


def _require_resized(
    variables: Mapping[Any, xr.Variable], merged: Mapping[str, xr.Variable]
) -> None:
    """Raise if a tensor keeps the old size of a dimension that others have resized."""
    resized = [n for n, v in merged.items() if n in variables and v.shape != variables[n].shape]
    for name in resized:
        for dim, size in merged[name].sizes.items():
            sizes = {n: merged.get(str(n), v).sizes.get(dim, size) for n, v in variables.items()}
            if names := [str(n) for n in sizes if sizes[n] != size]:
                raise ValueError(
                    f"{shown(name)} gets {size:,} rows from the adapter, which has no such "
                    f"{some(names)} (add rows to these before)"
                )


def _with_table(variable: xr.Variable, adapters: list[Adapter]) -> list[Adapter]:
    """Return adapters after the resized table that the first one changes, if it has one."""
    first = adapters[0] if adapters else None
    if first is None or not (first.table and first.is_product and first.shape != variable.shape):
        return adapters
    table = replace(first, kind="saved", tensors={"value": first.table}, is_transposed=False)
    return [table, *adapters]


def _followers(
    shared: Mapping[str, str],
    matches: Mapping[str, Sequence[Adapter]],
    merged: Mapping[str, xr.Variable],
) -> dict[str, xr.Variable]:
    """Return the tensors that are one parameter with an updated tensor, as their bytes are shared.

    A tensor that an adapter saved as a whole is a parameter of its own.
    """
    followers: dict[str, xr.Variable] = {}
    for name, changes in matches.items():
        owner = shared.get(name, name)
        if changes and changes[-1].kind != "saved":
            twins = [owner, *(tied for tied, other in shared.items() if other == owner)]
            followers |= {twin: merged[name] for twin in twins if twin != name}
    return followers


def _ties_head(changes: OpenTensors) -> bool:
    """Return whether an adapter states that a tied head was trained with the embeddings."""
    config = changes.attrs.get("adapter_config")
    return isinstance(config, dict) and config.get("ensure_weight_tying") is True


def _warn_of_operands(model: OpenTensors, changes: OpenTensors) -> None:
    """Warn of tensors that changes lack, and of factors that arithmetic changed."""
    mapped = [entry for v in model.variables.values() for entry in mapped_arrays(v)]
    sources = {model.source, *model.origins(1), *[entry.opened.source for entry in mapped]}
    bases = set(map(base_name, sources))
    for loss in losses(changes):
        if loss.source not in bases:  # whose tensors stay
            warn(f"{loss}: {some(loss.names)}")
    for text, names in other_orders(changes).items():
        raise UnsupportedError(
            f"{text}: {some(names)}", path=changes.source or None, rule="Adapter"
        )
    for text, products in factor_changes(changes).items():
        warn(f"{text}: {some(products)}")


def _new_tensors(
    adapters: Sequence[Adapter], missing: Sequence[str], changes: OpenTensors
) -> dict[str, xr.Variable]:
    """Return the trained tensors that an adapter of the model adds to it, such as a classifier."""
    if any(adapter.is_product and adapter.base in missing for adapter in adapters):
        return {}  # of another model
    return {
        adapter.base: _as_new(changes.variable(adapter.tensors["value"]))
        for adapter in adapters
        if adapter.kind == "saved" and adapter.base in missing
    }


def _warn_of_scaled(
    variables: Mapping[Any, xr.Variable],
    matches: Mapping[str, Sequence[Adapter]],
    changes: OpenTensors,
) -> None:
    """Warn of tensors without a change in a model that is multiplied by a number."""
    if any(adapter.kind != "update" for of_one in matches.values() for adapter in of_one):
        return
    arrays = {name: data_of(v) for name, v in variables.items() if not matches.get(name)}
    arrays = {n: a for n, a in arrays.items() if a.dtype.kind == "f" and is_computed(a) and a.size}
    tried = sorted(arrays.values(), key=lambda array: array.size)[:_MOST_TRIED]
    with suppress(ArithmeticError, ValueError):  # of a function that does not take ones
        factors = _multiples(tried)
        factor = next((n for n in factors if not math.isclose(n, 1, rel_tol=_ROUNDING)), None)
        if factor is not None:
            source = shown(changes.source) if changes.source else "the other object"
            warn(f"{_SCALED_ALONE.format(source, factor)}: {some(list(map(str, arrays)))}")


def _warn_of_unscaled(matches: Mapping[str, Sequence[Adapter]]) -> None:
    """Warn of parts of adapters that no scale multiplies."""
    for text, kinds in _UNSCALED.items():
        names = [name for name, of_one in matches.items() if any(a.kind in kinds for a in of_one)]
        if names:
            warn(f"{text} have no scale, and are merged as a whole: {some(names)}")


def _matches(
    model: OpenTensors, adapters: Sequence[Adapter], changes: OpenTensors
) -> tuple[dict[str, list[Adapter]], list[str], UntiedHead | None]:
    """Return the changes by the names of their tensors in the model, and those that it lacks.

    A head that is no longer tied to the embeddings has its change, or none if it has their values.
    """
    shapes = {row.name: tuple(row.shape) for row in model.rows}
    # Updates have the names of tensors, and adapters the names of modules.
    matches = {a.base: [a] for a in adapters if a.kind == "update" and a.base in shapes}
    adapters = [adapter for adapter in adapters if adapter.base not in matches]
    types = model_facts(changes.attrs).types
    pairs, missing, heads = match_bases(adapters, model.structure, shapes, model.source, types)
    problems = {
        f"{name}: {problem}"
        for name, of_tensor in pairs.items()
        for adapter, counterpart in of_tensor
        if (problem := problem_of(adapter, counterpart))
    }
    if problems:
        reasons = "; ".join(sorted(problems)[:_MOST_PROBLEMS])
        hint = "Merge the adapter into the model that it was trained on, and convert the result"
        raise UnsupportedError(reasons, path=changes.source or None, rule="Adapter", hint=hint)
    for name, of_tensor in pairs.items():
        ordered = sorted(of_tensor, key=lambda pair: pair[1].is_tied)
        of_name = matches.get(name, []) + [
            fitted(adapter, shapes[name], counterpart) for adapter, counterpart in ordered
        ]
        if of_name[0].kind == "update":  # which has its own tensor, or is of a tied one
            update, *tied = of_name
            values = [changes.variable(a.tensors["value"]) for a in of_name]
            missing += [
                a.base
                for a, value in zip(tied, values[1:], strict=True)
                if not are_equal(values[0], value)
            ]
            of_name = [update]
        matches[name] = of_name
    head = untied_head(model, heads, matches, changes)
    if head is not None:
        matches[head.name] = [] if head.adapter is None else [head.adapter]
    return matches, [base for base in missing if base not in {a.base for a in heads}], head


def _no_change(changes: OpenTensors) -> ValueError:
    """Return the error of merging a model."""
    name = shown(changes.source) if changes.format is not None else "a sum of models"
    return ValueError(
        f"{name} has no tensors of an adapter. To add its tensors to those of the model, pass "
        "scale=1; (a + b) / 2 is the mean of two models, and b - a is a change: "
        "a.ckpt.merge(b - a, scale=0.5) goes half of the way from a to b"
    )


def _are_as_large(
    matches: Mapping[str, Sequence[Adapter]],
    model: Mapping[Any, xr.Variable],
    changes: OpenTensors,
) -> bool:
    """Return whether values are as large as in the model, which saved updates are not."""
    pairs = [
        (model[name], changes.variable(adapter.tensors["value"]))
        for name, of_tensor in matches.items()
        for adapter in of_tensor
    ]
    pairs = sorted(pairs, key=lambda pair: pair[0].size)[:_MOST_TRIED]
    means = [[abs(_wide(variable.data)).mean() for variable in pair] for pair in pairs]
    return bool(pairs) and all(new >= _LARGE * old for old, new in dask.compute(means)[0])


def _updates(changes: OpenTensors) -> list[Adapter]:
    """Return the tensors of an object as updates of tensors of the same names."""
    return [
        Adapter(row.name, "update", {"value": row.name}, tuple(row.shape), scale=1.0)
        for row in changes.rows
    ]


def _is_model(changes: OpenTensors) -> bool:
    """Return whether tensors are sums of models with factors that do not cancel, as in means."""
    names = {row.name for row in changes.rows}
    arrays = [data_of(variable) for variable in changes.variables.values()]
    sums = [array for array in arrays if len({*checkpoints_in(array)}) > 1]
    sums = sorted(sums, key=lambda array: array.size)[:_MOST_TRIED]
    origins = [
        o for array in sums for lazy in lazies_in(array).values() for o in lazy.tensor_origins
    ]
    if not sums or not names.issuperset(origin.tensor.name for origin in origins):
        return False
    # Changes of ones are zero. Some functions do not take ones, or make NaN of them.
    with suppress(ArithmeticError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        (numbers,) = dask.compute([_first(with_values(array, _ones)) for array in sums])
        return all(abs(number) > _ROUNDING for number in numbers)
    return False


def _ones(_: str, lazy: Any, index: Any) -> Any:
    return np.ones(result_shape(lazy.shape, normalize(index, lazy.shape)), lazy.dtype)


def _check_supported(
    adapters: Sequence[Adapter], changes: OpenTensors, scale: float | None
) -> None:
    """Raise if a change cannot be merged, and warn of factors that PEFT omits.

    A model with half of an adapter is never made.
    """
    notes = {a.note: a.base for a in adapters if a.kind == "unsupported"}
    if notes:
        reasons = "; ".join(notes)
        raise UnsupportedError(reasons, path=changes.source or None, rule="Adapter")
    unscaled = [a for a in adapters if a.is_product and a.scale is None]
    if unscaled and scale is None:
        bases = some([adapter.base for adapter in unscaled])
        raise ValueError(f"{bases}: {unscaled[0].note}; pass merge(..., scale=...)")
    partial = [
        a.base
        for a in adapters
        if a.kind == "update" and changes.variable(a.base).attrs.get("kind") == "dora"
    ]
    if partial:
        raise ValueError(
            f"{some(partial)}: DoRA sets norms after the update is added: pass the adapter itself, "
            "not its updates"
        )
    omitted = [adapter.base for adapter in adapters if adapter.is_omitted]
    if omitted:
        warn(_OMITTED.format(some(omitted)))


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of a tensor by an adapter."""

    adapter: Adapter
    tensors: OpenTensors
    scale: float | None
    dims: tuple[Any, ...]  # of the tensor

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Order of the axes of an update that has the dimensions of the tensor; None for others."""
        if self.adapter.kind != "update":
            return None
        dims = self.tensors.variable(self.adapter.tensors["value"]).dims
        is_named = len(set(dims)) == len(dims) and set(dims) == set(self.dims)
        return tuple(map(dims.index, self.dims)) if is_named else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the change, in the order of the axes of the tensor."""
        axes, shape = self.axes, self.adapter.shape
        return shape if axes is None else tuple([shape[axis] for axis in axes])

    @property
    def factor(self) -> float:
        """Factor of the change: the stated scale times the one that was passed."""
        stated = 1.0 if self.adapter.scale is None else self.adapter.scale
        return stated * (1.0 if self.scale is None else self.scale)

    @property
    def rows(self) -> Any:
        """Rows of the adapter in the order of the tensor."""
        adapter = self.adapter
        if adapter.part is not None:
            return adapter.part
        if not adapter.heads:
            return ...
        return rotary_order(adapter.shape[0], adapter.heads, is_undone=adapter.is_undone)

    def read(self, purpose: str) -> Any:
        """Return a tensor of the adapter."""
        return _wide(self.tensors.variable(self.adapter.tensors[purpose]).data)

    def apply(self, weight: Any) -> Any:
        """Return the merged tensor."""
        adapter, rows = self.adapter, self.rows
        if adapter.kind == "saved":
            return self.read("value")[rows]
        if adapter.kind in {"rows", "ia3"}:
            (value,) = map(self.read, adapter.tensors)
            if adapter.kind == "ia3":
                factors = value.reshape(adapter.shape)
                return weight * (factors[rows] if len(factors) > 1 else factors)
            return da.concatenate([weight, value])[_replaced(len(weight), adapter.rows)]
        if not adapter.is_product:
            value = self.read("value")
            value = (value if self.axes is None else value.transpose(self.axes))[rows]
            return weight + (value if self.factor == 1 else value * value.dtype.type(self.factor))
        matrices = matrices_of(adapter, self.tensors)
        if adapter.kind == "experts":  # with the chunks of the weight
            by_expert, outputs, inputs = weight.chunks
            left_factor = matrices["left"][:, adapter.part or slice(None)]
            matrices["left"] = left_factor.rechunk((by_expert, outputs, -1))
            matrices["right"] = matrices["right"].rechunk((by_expert, -1, inputs))
            rows = ...
        elif "left" in matrices:
            left_factor = matrices["left"][rows].rechunk({1: -1})
            # Rows as in the weight, so that its chunks stay whole.
            is_by_rows = all(len(sizes) == 1 for sizes in weight.chunks[1:])
            if is_by_rows and weight.ndim and left_factor.shape[0] == weight.shape[0]:
                left_factor = left_factor.rechunk((weight.chunks[0], -1))
            matrices["left"], rows = left_factor, ...
        update = update_rows(adapter.kind, matrices, rows)
        total = weight + (update * update.dtype.type(self.factor)).reshape(weight.shape)
        if adapter.kind != "dora":
            return total
        axes = tuple(axis for axis in range(total.ndim) if axis != adapter.out_axis)
        norms = da.sqrt(da.square(total).sum(axis=axes, keepdims=True))
        return total * (self.read("magnitude").reshape(norms.shape)[self.rows] / norms)


def factor_changes(tensors: OpenTensors) -> dict[str, list[str]]:
    """Return the bases of adapters whose products arithmetic changed, by how it did."""
    changes: dict[str, list[str]] = defaultdict(list)
    arrays = {name: data_of(variable) for name, variable in tensors.variables.items()}
    computed = {name: array for name, array in arrays.items() if is_computed(array)}
    with suppress(ArithmeticError, ValueError):  # of a function that does not take ones
        # A stack is a variable with the factors of several bases.
        factors = [
            (adapter.base, variable)
            for adapter in (find_adapters(tensors, None) if computed else ())
            for variable in tensors.variables_of(adapter.tensors.values())
            if adapter.is_product and variable in computed and computed[variable].size
        ]
        of_products = {variable: computed[variable] for _, variable in factors}
        numbers = dict(zip(of_products, _multiples(of_products.values()), strict=True))
        are_averaged = {variable: _differ(array) for variable, array in of_products.items()}
        scales: dict[str, list[float]] = defaultdict(list)
        averaged: Counter[str] = Counter()
        for base, variable in factors:
            averaged[base] += are_averaged[variable]
            if not math.isclose(numbers[variable], 1, rel_tol=_ROUNDING):
                scales[base].append(numbers[variable])
        is_sum = len(tensors.origins(_MOST_TRIED)) > 1
        by_base = {base: _AVERAGED for base, count in averaged.items() if count > 1} | {
            base: _ADDED if is_sum else _SCALED.format(math.prod(of_factors))
            for base, of_factors in scales.items()
            if len(of_factors) > 1
        }
        for base, change in by_base.items():
            changes[change].append(base)
    return changes


def _multiples(arrays: Iterable[Any]) -> list[float]:
    """Return the numbers that arithmetic multiplies arrays by, as arithmetic with ones shows."""
    (firsts,) = dask.compute([_first(with_blocks(array, np.ones_like)) for array in arrays])
    return [*map(float, firsts)]


def _differ(array: Any) -> bool:
    """Return whether an array is computed from different tensors of several checkpoints."""
    lazies = lazies_in(array)
    if len({*checkpoints_in(array)}) < 2:
        # Steps of a run are along the first axis.
        factors = [
            values
            for lazy in lazies.values()
            if lazy.ndim > array.ndim and len(_steps(lazy)) > 1
            for values in lazy[...]
        ]
    elif _is_of_one(array, lazies):
        return False
    else:
        factors = [lazy[...] for lazy in lazies.values()]
    return not all(np.array_equal(factors[0], factor) for factor in factors)


def _steps(lazy: Any) -> set[str]:
    """Return the steps of a training run that an array is read from."""
    steps = set()
    for origin in lazy.tensor_origins:
        stack = next(iter(origin.opened.stacks.values()), None) if origin.opened else None
        if stack is not None and stack.run:
            steps.add(split_step(origin.tensor.name, stack.run)[0])
    return steps


def _is_of_one(array: Any, lazies: Mapping[str, Any]) -> bool:
    """Return whether the first and last elements are of one checkpoint each, as after `concat`."""
    shares = [
        with_values(array, lambda name, *args, layer=layer: _ones(name, *args) * (name == layer))
        for layer in lazies
    ]
    ends = [[share[(end,) * share.ndim] for end in (0, -1)] for share in shares]
    with warnings.catch_warnings():  # of a division by zero
        warnings.simplefilter("ignore", RuntimeWarning)
        # One after another, as they have the same keys.
        corners = [dask.compute(of_share)[0] for of_share in ends]
    return all(
        sorted(corner) == [0] * (len(shares) - 1) + [1] for corner in zip(*corners, strict=True)
    )


def _first(array: Any) -> Any:
    return array[(0,) * array.ndim]


def _replaced(count: int, rows: Sequence[int]) -> list[int]:
    """Return the positions of rows, where those that follow replace some."""
    positions = list(range(count))
    for number, row in enumerate(rows):
        positions[row] = count + number
    return positions


def _merged(
    name: str,
    variable: xr.Variable,
    adapters: Sequence[Adapter],
    changes: OpenTensors,
    scale: float | None,
) -> xr.Variable:
    """Return a variable of the model with its changes, to be stored as it was."""
    shape, steps = variable.shape, []
    for adapter in adapters:
        if adapter.kind == "update":
            require_positions(variable, changes.variable(adapter.tensors["value"]))
        change = _Change(adapter, changes, scale, variable.dims)
        is_resized = adapter.kind == "saved" and adapter.shape[1:] == shape[1:]
        if change.shape != shape and not is_resized and adapter.kind not in {"rows", "ia3"}:
            raise ValueError(
                f"{shown(name)} has the shape {list(shape)}, and its change the shape "
                f"{list(change.shape)}"
            )
        shape = change.shape if is_resized else shape
        steps.append(change)
    before, array = unrounded(variable), _sum(variable.data, steps)
    encoding = {key: value for key, value in variable.encoding.items() if key != "shares"}
    if mapped_arrays(variable) and variable.dtype.kind in "fV":  # sums are wider
        encoding |= {"layout": "dense", "stored_dtype": variable.dtype}
    rounded = _rounded(array, encoding)
    total = array if before is None else _sum(before.total, steps)
    encoding["rounded"] = _Unrounded(rounded.name, array, total)
    return xr.Variable(variable.dims, rounded, variable.attrs, encoding)


def _half_type(model: OpenTensors) -> str:
    """Return the type that the config of a quantised model states; empty if it is not half."""
    config = model.structure.facts.config
    dtype = stated_dtype(config)
    return dtype if dtype in HALF_FLOATS and any(declarations_in(config)) else ""


def _in_type(variable: xr.Variable, dtype: str) -> xr.Variable:
    """Return a quantised variable that is stored dense, in a type, once it is changed."""
    if not dtype or variable.encoding.get("layout") != "quantized":
        return variable
    dense = _untied(variable, "parts", "scheme", "stored_as")
    stored = stored_dtype(dtype)
    nbytes = variable.size * stored.itemsize
    dense.encoding |= {"layout": "dense", "stored_dtype": stored, "nbytes": nbytes}
    return dense


def _sum(array: Any, changes: Iterable[_Change]) -> Any:
    """Return an array with several changes, before it is rounded."""
    array = _wide(array)
    for change in changes:
        array = change.apply(array)
    return array


class _Unrounded(NamedTuple):
    """Values of `merge` before they are rounded to the type of the model."""

    name: str  # of the rounded dask array, which shows that it is unchanged
    array: Any  # of this merge, which starts from the rounded values of the one before
    total: Any  # of this merge and all before, without rounding between them


def unrounded(variable: xr.Variable) -> _Unrounded | None:
    """Return the values of `merge` before they are rounded; None if the variable was changed."""
    values = variable.encoding.get("rounded")
    is_unchanged = isinstance(values, _Unrounded) and values.name == getattr(
        data_of(variable), "name", 0
    )
    return values if is_unchanged else None


def _wide(array: Any) -> Any:
    """Return an array in a type for sums: float32 for half precision, or float64 for integers."""
    lazy = da.asarray(array)
    if lazy.dtype.kind in "fc" and lazy.dtype.itemsize >= np.dtype("f4").itemsize:
        return lazy
    is_integer = lazy.dtype.kind in "iu" and lazy.dtype.itemsize >= np.dtype("i4").itemsize
    return lazy.astype(np.float64 if is_integer else np.float32)


def _rounded(array: Any, encoding: Mapping[Any, Any]) -> Any:
    """Round sums to the type that the tensor of the model is stored in, as libraries do."""
    stored = encoding.get("stored_dtype")
    if encoding.get("layout") not in {"dense", "chunked"} or not isinstance(stored, np.dtype):
        return array
    if stored == array.dtype or stored.kind in "iub":
        return array
    return array.map_blocks(_rounded_block, stored, dtype=array.dtype)


def _rounded_block(block: Any, stored: np.dtype[Any]) -> Any:
    with np.errstate(over="ignore"):  # writing counts these elements
        return block.astype(stored).astype(block.dtype)


def _untied(variable: xr.Variable, *others: str) -> xr.Variable:
    """Return a variable that does not share the bytes of another one."""
    left_out = {"shares", *others}
    copied = variable.copy(deep=False)
    copied.encoding = {k: value for k, value in variable.encoding.items() if k not in left_out}
    return copied


def _as_new(variable: xr.Variable) -> xr.Variable:
    """Return the variable of a new tensor with the values of another one."""
    return _untied(variable, "tensor", "path")
