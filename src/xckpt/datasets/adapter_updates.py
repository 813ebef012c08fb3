"""Updates of adapters, which are added to the tensors of a base model, computed by rows.

The functions take arrays of numpy and of dask alike. An update is a matrix: a convolution has one
row for each output. Stacked experts have a matrix each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.keys import target_nbytes
from xckpt.datasets.mappings import as_dataset
from xckpt.errors import some, warn
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import dask.array as da
    import pandas as pd
    import xarray as xr

    from xckpt.datasets.adapters import Adapter
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.typing import Array

_NOT_ADDED = {
    "ia3": "(IA)³ multiplies the weights, and adds nothing",
    "rows": "trained rows replace those of the base model, and are not added",
}


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of a product, for functions that need not form it."""

    left: da.Array  # matrix of `rank` columns
    right: da.Array  # matrix of `rank` rows
    scale: float
    shape: tuple[int, ...]  # of the product; the axes after the first may be several
    product: str = ""  # name of the dask array of the product, which shows that it is unchanged
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float64))

    def arrays(self) -> tuple[Array, Array]:
        """Read both factors, as float64."""
        import dask

        left, right = dask.compute(self.left, self.right)
        return left.astype(np.float64), right.astype(np.float64)


def matrices_of(adapter: Adapter, tensors: OpenTensors) -> dict[str, da.Array]:
    """Return the matrices of an update by purpose, unread."""
    import dask.array as da

    matrices = {}
    for purpose, name in adapter.tensors.items():
        matrix = da.asarray(tensors.variable(name).data)
        if matrix.dtype not in {np.dtype("f4"), np.dtype("f8")}:
            matrix = matrix.astype(np.float32)
        if adapter.experts > 1:
            matrices[purpose] = _factor_of_experts(matrix, purpose, adapter)
            continue
        if adapter.is_transposed and purpose in {"left", "right"}:
            matrix = matrix.T
        # A convolution is a matrix with one row for each output.
        matrices[purpose] = matrix.reshape(len(matrix) if matrix.ndim else 1, -1)
    return matrices


def _factor_of_experts(factor: da.Array, purpose: str, adapter: Adapter) -> da.Array:
    """Return the factor of one expert as a matrix, or of all experts along the first axis."""
    experts, expert, rank = adapter.experts, adapter.expert, len(factor) // adapter.experts
    # PEFT has the factors A of the experts one below the other, and the columns of B by rank.
    if (purpose == "right") is not adapter.is_transposed:
        if expert is None:
            factor = factor.rechunk(-1).reshape(experts, rank, -1)
        else:
            factor = factor[expert * rank : (expert + 1) * rank]
    elif expert is None:
        factor = factor.rechunk(-1).reshape(len(factor), -1, experts).transpose(2, 0, 1)
    else:
        factor = factor[:, expert::experts]
    return factor.swapaxes(-1, -2) if adapter.is_transposed else factor


def update_rows(kind: str, matrices: Mapping[str, Any], rows: Any) -> Any:
    """Return rows of an update, without its scale; `rows` is a slice or has numbers of rows."""
    if kind == "loha":
        first = matrices["hada_w1_a"][rows] @ matrices["hada_w1_b"]
        return first * (matrices["hada_w2_a"][rows] @ matrices["hada_w2_b"])
    if kind == "lokr":
        first, second = (_whole(matrices, f"lokr_w{number}") for number in (1, 2))
        numbers = np.arange(len(first) * len(second))[rows]
        outer, inner = np.divmod(numbers, len(second))
        product = first[outer][:, :, None] * second[inner][:, None, :]
        return product.reshape(len(numbers), -1)
    if kind == "adalora":
        return matrices["lora_B"][rows] @ (matrices["lora_A"] * matrices["lora_E"])
    if kind == "experts":
        return matrices["left"][rows] @ matrices["right"][rows]
    return matrices["left"][rows] @ matrices["right"]


def _whole(matrices: Mapping[str, Any], name: str) -> Any:
    if name in matrices:
        return matrices[name]
    return matrices[f"{name}_a"] @ matrices[f"{name}_b"]


def rotary_order(count: int, heads: int, *, is_undone: bool) -> Array:
    """Return the old number of each row if the halves of heads alternate, or no longer do."""
    half = count // heads // 2
    head = (half, 2) if is_undone else (2, half)
    return np.arange(count).reshape(heads, *head).swapaxes(1, 2).reshape(-1)


def factors_of(adapter: Adapter, tensors: OpenTensors, scale: float) -> Factors:
    """Return the factors of an adapter, unread."""
    matrices = matrices_of(adapter, tensors)
    left, right = matrices["left"], matrices["right"]
    rows = max(1, target_nbytes() // (max(1, right.shape[1]) * left.dtype.itemsize))
    return Factors(left.rechunk((rows, -1)), right.rechunk(-1), scale, adapter.shape)


def factors_in(variable: xr.Variable) -> Factors | None:
    """Return the factors of a variable of `update_dataset` that is unchanged, or None."""
    factors = variable.encoding.get("factors")
    is_unchanged = isinstance(factors, Factors) and (
        getattr(data_of(variable), "name", None) == factors.product
    )
    return factors if is_unchanged else None


def adapter_table(adapters: Sequence[Adapter]) -> pd.DataFrame:
    """Return a table with one row for each adapter."""
    import pandas as pd

    columns = ("kind", "rank", "alpha", "scale", "shape", "note")
    rows = [[getattr(adapter, column) for column in columns] for adapter in adapters]
    index = pd.Index([adapter.base for adapter in adapters], name="base", dtype=object)
    frame = pd.DataFrame(rows, index, list(columns))
    frame["rank"] = frame["rank"].astype("Int64")
    return frame.astype({"alpha": float, "scale": float})


def update_dataset(
    adapters: Sequence[Adapter], tensors: OpenTensors, scale: float | None
) -> xr.Dataset:
    """Return the products of all adapters as lazy variables, by the names of their bases."""
    arrays: dict[str, da.Array] = {}
    factors: dict[str, Factors] = {}
    scales: dict[str, float] = {}
    left_out: dict[str, list[str]] = {}
    for adapter in adapters:
        factor = adapter.scale if adapter.scale is not None else scale
        if not adapter.is_product:
            reason = adapter.note if adapter.kind == "unsupported" else _NOT_ADDED.get(adapter.kind)
            if reason is not None:
                left_out.setdefault(reason, []).append(adapter.base)
        elif factor is None:
            reason = f"{adapter.note}; pass updates(scale=...)"
            left_out.setdefault(reason, []).append(adapter.base)
        else:
            if adapter.kind in {"lora", "dora"}:
                parts = factors_of(adapter, tensors, factor)
                factors[adapter.base] = parts
                product = parts.left @ parts.right
            else:
                product = update_rows(adapter.kind, matrices_of(adapter, tensors), slice(None))
            scales[adapter.base] = factor
            arrays[adapter.base] = (product * product.dtype.type(factor)).reshape(adapter.shape)
    for reason, bases in left_out.items():
        warn(f"no update of {some(bases, 'tensors')}: {reason}")
    dataset: xr.Dataset = as_dataset(arrays)
    by_base = {adapter.base: adapter for adapter in adapters}
    for base, factor in scales.items():
        variable, adapter = dataset.variables[base], by_base[base]
        rank = {} if adapter.rank is None else {"rank": adapter.rank}
        variable.attrs |= {"kind": adapter.kind, **rank, "scale": factor}
        if base in factors:
            variable.encoding["factors"] = replace(factors[base], product=arrays[base].name)
    return dataset
