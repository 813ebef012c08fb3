"""Which rows of a tensor an adapter changes, and by which of its own rows.

Most adapters have the rows of the tensor. The rows of an adapter may be in another order, as
llama.cpp permutes the heads of queries and keys; they may be some of the rows, if the tensor is
fused of several; or the tensor may have some of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from xckpt.comparison.arrangements import RopePermuted
from xckpt.errors import some

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.arrays.streams import ElementStream
    from xckpt.datasets.adapters import Adapter
    from xckpt.structure.counterparts import Counterpart
    from xckpt.typing import Array

    Shape = tuple[int, ...]

__all__ = ["AdaptedRows", "adapted_rows"]

_FEWEST_ROWS_OF_HEAD, _MOST_HEADS = 4, 1024


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """An adapter, and the rows of a tensor that it changes."""

    adapter: Adapter
    #: For each row of the tensor, the row of the adapter; negative for rows that it leaves.
    rows: Array | None = None
    #: Rows of the adapter in the orders that heads may have.
    orders: tuple[Array, ...] = ()
    #: Slot of the adapter, if the tensor is fused of several.
    slot: str = ""
    #: Why the change cannot be verified.
    problem: str = ""


def adapted_rows(
    adapter: Adapter,
    counterpart: Counterpart,
    streams: tuple[ElementStream, ElementStream],
    extents: Mapping[str, int],
) -> AdaptedRows:
    """Return the rows of a tensor that an adapter changes.

    `streams` has the tensor of both sides, and `extents` the numbers of the rows of all tensors.
    """
    ours, theirs = streams
    if adapter.is_turned(tuple(ours.array.shape), counterpart):
        adapter = adapter.turned()
    # An embedding that was saved as a whole may have been resized.
    shape = tuple((theirs if adapter.kind == "saved" else ours).array.shape)
    count = adapter.shape[0] if adapter.shape else 1
    heads = _numbers_of_heads(count, counterpart)
    problem = (
        # The scale of LoRA may follow from the merged model.
        (adapter.note if adapter.kind != "lora" else "")
        or counterpart.problem
        or _problem_of_rows(adapter, counterpart, shape, heads)
        or _problem_of_split(counterpart, count, extents)
        or _problem_of_extents(adapter, counterpart, shape)
    )
    if problem:
        return AdaptedRows(adapter, problem=problem)
    rows = _rows(adapter, counterpart, count, shape, extents)
    if not heads:
        return AdaptedRows(adapter, rows, slot=counterpart.slot)
    orders = [RopePermuted(0, n, counterpart.is_undone).positions(count) for n in heads]
    if rows is None:
        rows = np.arange(count)
    orders = [np.where(rows < 0, rows, order[rows]) for order in orders]
    first = orders[0] if counterpart.is_permuted else rows
    return AdaptedRows(adapter, first, tuple(orders), counterpart.slot)


def _rows(
    adapter: Adapter,
    counterpart: Counterpart,
    count: int,
    shape: Shape,
    extents: Mapping[str, int],
) -> Array | None:
    """Return the row of the adapter for each row of the tensor; None if they are the same."""
    number, names = counterpart.split
    if names:
        start = sum([extents[name] for name in names[:number]])
        return np.arange(start, start + extents[names[number]])
    positions: Array | None = None
    if adapter.kind == "rows":
        positions = np.array(adapter.rows)
    elif counterpart.slot and count != shape[0]:
        positions = np.arange(count) + _start(counterpart.slot, count, shape[0])
    if positions is None:
        return None
    rows = np.full(shape[0], -1)
    rows[positions] = np.arange(count)
    return rows


def _start(slot: str, count: int, total: int) -> int:
    """Return the first row of a part of a fused tensor."""
    # Keys and values have equally many rows, and so have a gate and its partner.
    starts = {"key": total - 2 * count, "value": total - count, "up": total - count}
    return starts.get(slot.rpartition(".")[2], 0)


def _numbers_of_heads(count: int, counterpart: Counterpart) -> list[int]:
    """Return the numbers of heads that rows in another order may have."""
    if counterpart.is_permuted is False:
        return []
    most = min(count // _FEWEST_ROWS_OF_HEAD, _MOST_HEADS)
    numbers = [counterpart.heads] if counterpart.heads else range(1, most + 1)
    return [number for number in numbers if count % (2 * number) == 0]


# --- problems -------------------------------------------------------------------------------------


def _problem_of_rows(
    adapter: Adapter, counterpart: Counterpart, shape: Shape, heads: list[int]
) -> str:
    """Return why the rows of an adapter cannot be found in a tensor."""
    is_by_rows = bool(counterpart.slot or counterpart.split[1] or heads)
    if is_by_rows and adapter.out_axis:
        return "its outputs are columns, and those of the tensor are other rows"
    if counterpart.is_permuted and not heads:
        return f"its {adapter.shape[:1]} rows are not heads with an even number of rows"
    if counterpart.slot and adapter.kind == "saved":
        return f"the adapter replaces {counterpart.slot}, which is a part of the tensor"
    if adapter.kind == "rows" and shape and max(adapter.rows) >= shape[0]:
        return f"it changes row {max(adapter.rows):,} of {shape[0]:,}"
    return ""


def _problem_of_split(counterpart: Counterpart, count: int, extents: Mapping[str, int]) -> str:
    """Return why a fused adapter does not have the rows of its parts."""
    names = counterpart.split[1]
    total = sum([extents.get(name, 0) for name in names])
    if names and total != count:
        return f"its update has {count:,} rows, but {some(names)} have {total:,}"
    return ""


def _problem_of_extents(adapter: Adapter, counterpart: Counterpart, shape: Shape) -> str:
    """Return why an update does not have the extents of a tensor; empty if it has them."""
    matrix = _matrix(shape)
    update = _matrix(adapter.shape)
    if adapter.kind == "ia3" and matrix and not counterpart.slot:
        fits = update in {(matrix[0], 1), (1, prod(matrix[1:]))}
    elif counterpart.slot:
        start = _start(counterpart.slot, *update[:1], *matrix[:1]) if update and matrix else -1
        is_half = counterpart.slot.startswith("ffn.") and matrix[:1] != update[:1]
        fits = start >= 0 and (not is_half or matrix[0] == 2 * update[0])
        fits = fits and update[0] <= matrix[0] and update[1:] in {matrix[1:], (1,)}
    elif counterpart.split[1] or adapter.kind == "rows":
        fits = update[1:] == matrix[1:]
    else:
        fits = update == matrix
    return "" if fits else f"its update has the shape {list(adapter.shape)}"


def _matrix(shape: Shape) -> Shape:
    """Return the extents of a tensor as a matrix, in which a convolution has a row per output."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else shape
