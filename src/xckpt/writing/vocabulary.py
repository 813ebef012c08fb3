"""Order of the rows of a vocabulary, which a tokenizer numbers, of labels, and of layers."""

from __future__ import annotations

import warnings
from collections import defaultdict
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain, islice
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.derived import is_computed, selections_in, with_values
from xckpt.arrays.graph import lazy_of
from xckpt.arrays.keys import compose, take, whole
from xckpt.arrays.lazy import LazyArray, SlicedArray, dense_values
from xckpt.arrays.moved_rows import are_moved, is_in_place
from xckpt.arrays.stacked import StackedArray
from xckpt.errors import CheckpointError
from xckpt.structure.numbering import number_in_place
from xckpt.upstream.dask_arrays import is_dask_array

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from xckpt.formats.plan import WantedTensor
    from xckpt.structure.model import Structure
    from xckpt.typing import Array

    Stored = Callable[[str], LazyArray | None]

_TABLES = frozenset({"token_embedding", "output"})
_ROWS = "vocab"
_EXPERT, _ROUTER = "expert", "router"
# Numbers of tokens whose rows are looked at.
_MOST_CHECKED = 32
# Of tables in memory: bytes that are joined or decoded, rows of a block that is read of the stored
# one, elements of a row that are looked up, places that are compared.
_MOST_JOINED, _ROWS_READ, _PREFIX, _MOST_PLACES = 256 << 20, 16, 16, 256
# Elements of a layer that stand for it.
_SAMPLED = 4096


def no_array(_: str) -> LazyArray | None:
    """Return None, as no stored tensor is known."""
    return None


def array_of(tensor: WantedTensor | None) -> Any:
    """Return the array whose values are written for a tensor; None if its parts are written."""
    return getattr(tensor, "data", {}).get("data")


def are_rows_moved(
    tensors: Iterable[WantedTensor],
    structure: Structure,
    rows: str = _ROWS,
    stored: Stored = no_array,
) -> bool:
    """Return whether rows of a table of tokens, or of labels, are those of others.

    `stored` makes the arrays of stored tensors, which tables in memory are compared with.
    """
    for tensor, array, axis in _tables(tensors, structure, rows):
        selected = _slice_of(array, axis)
        if selected is not None and (selected.start or selected.step not in {None, 1}):
            return True
        if axis is not None and (values := _in_memory(array)) is not None:
            if _are_rows_of_others(values, axis, stored(tensor.name)):
                return True
            continue
        if not hasattr(array, "dask"):
            continue
        if _are_selected(array, tensor.shape, rows):
            return True
        if is_computed(array) and axis is not None and array.size:
            return are_moved(array, axis)
    return False


def moved_tokens(
    tensors: Iterable[WantedTensor],
    structure: Structure,
    numbers: Collection[int],
    stored: Stored = no_array,
) -> frozenset[int]:
    """Return the numbers of tokens whose rows are not certain to be the old ones.

    The rows of a table are known to have moved, as by `are_rows_moved`.
    """
    for tensor, array, axis in _tables(tensors, structure):
        if axis is not None:
            distinct = sorted({n for n in numbers if n < tensor.shape[axis]})
            values, lazy = _in_memory(array), stored(tensor.name)
            is_in_order = (
                partial(_is_row_in_place, array, axis)
                if values is None
                else partial(_is_stored_row, values, axis, lazy)
            )
            return frozenset(distinct).difference(filter(is_in_order, distinct[:_MOST_CHECKED]))
    return frozenset()


def _is_row_in_place(array: Any, axis: int, row: int) -> bool:
    """Return whether a row of a table that is not in memory is the one that was there."""
    selected = _slice_of(array, axis)
    if selected is not None:
        return (selected.start or 0) + row * (selected.step or 1) == row
    return is_computed(array) and is_in_place(array, axis, row)


def _is_stored_row(values: Array, axis: int, stored: LazyArray | None, row: int) -> bool:
    """Return whether a row of a table in memory equals the stored row of its number."""
    if stored is None or row >= stored.shape[axis]:
        return False
    key = (slice(None),) * axis + (slice(row, row + 1),)
    with suppress(CheckpointError, OSError):
        return np.array_equal(values[key], dense_values(stored[key]).astype(values.dtype))
    return False


def _tables(
    tensors: Iterable[WantedTensor], structure: Structure, rows: str = _ROWS
) -> Iterator[tuple[WantedTensor, Any, int | None]]:
    """Yield the tables of tokens, or the tensors with such rows, and the axis of these."""
    for tensor in tensors:
        array: Any = array_of(tensor)
        info = structure[tensor.name]
        axes: list[str | None] = list(info.axes)
        if rows == _EXPERT and rows not in axes and structure.module_type(tensor.name) == _ROUTER:
            axes = [axis or rows for axis in axes]  # few experts leave the axis unnamed
        if info.slot in _TABLES if rows == _ROWS else rows in axes:
            yield tensor, array, axes.index(rows) if rows in axes else None


def is_table_of_tokens(structure: Structure, name: str) -> bool:
    """Return whether a tensor has rows for tokens: their table, or a head."""
    return structure.slot(name) in _TABLES


def has_table_of_tokens(structure: Structure) -> bool:
    """Return whether a tensor of a model has rows for tokens."""
    return any(is_table_of_tokens(structure, name) for name in structure)


def _slice_of(array: Any, axis: int | None) -> slice | None:
    """Return what an array that is not computed selects of the rows of a stored one."""
    lazy = array if isinstance(array, LazyArray) else lazy_of(array)
    if not isinstance(lazy, SlicedArray) or axis is None:
        return None
    return [part for part in lazy.key if isinstance(part, slice)][axis]


def moved_routers(
    tensors: Collection[WantedTensor],
    structure: Structure,
    stored: Mapping[str, Collection[str]],
) -> list[str]:
    """Return the routers of a mixture if their rows are in another order than its experts."""
    # `stored` has the names of the tensors that a tensor is read or may be computed from.
    routers = {t.name: t for t in tensors if structure.module_type(t.name) == _ROUTER}
    experts = {tensor.name: tensor for tensor in tensors if tensor.name not in routers}
    numbers = {
        name: number
        for name in experts
        if (number := dict(structure.indices(name)).get(_EXPERT)) is not None
    }
    old = {
        name: {source: number_in_place(source, name, number) for source in stored[name]}
        for name, number in numbers.items()
    }
    are_renumbered = any(
        numbers[name] not in before.values() and None not in before.values()
        for name, before in old.items()
        if before
    )
    # A tensor of a computed stack may depend on any member: look at the experts of one module.
    stacked = [name for name, before in old.items() if numbers[name] in before.values()]
    stacked = [name for name in stacked if len({*old[name].values()}) > 1]
    are_renumbered = are_renumbered or not all(
        is_computed_from(
            array_of(experts[name]),
            [source for source, number in old[name].items() if number == numbers[name]],
        )
        for name in stacked[:_MOST_CHECKED]
        if structure.slot(name) == structure.slot(stacked[0])
    )
    have_moved = are_renumbered or are_rows_moved(experts.values(), structure, _EXPERT)
    are_apart = have_moved != are_rows_moved(routers.values(), structure, _EXPERT)
    return [*routers] if are_apart else []


def is_computed_from(array: Any, names: Collection[str]) -> bool:
    """Return whether the first element of a computed array depends on tensors of these names."""

    def marks(_: str, lazy: LazyArray, key: Any) -> Array:
        base, within = lazy, whole(lazy.shape)
        if isinstance(lazy, SlicedArray):
            base, within = lazy.base, lazy.key
        grid = base.grid if isinstance(base, StackedArray) else ()
        is_marked = [origin.tensor.name in names for origin in base.tensor_origins]
        factors = np.ones(base.ndim * (1,), lazy.dtype)
        if len(is_marked) == prod(grid) and lazy.dtype.kind == "f":
            members = np.where(is_marked, np.nan, 1).astype(lazy.dtype)
            factors = members.reshape(*grid, *(base.ndim - len(grid)) * (1,))
        return np.array(take(np.broadcast_to(factors, base.shape), compose(within, key)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            marked = with_values(array, marks)[array.ndim * (0,)]
            return bool(np.isnan(np.asarray(marked.compute())))
        except (ArithmeticError, TypeError, ValueError):  # a function that does not take others
            return True


# --- tables and layers in memory ------------------------------------------------------------------


def _in_memory(array: Any) -> Array | None:
    """Return the values of an array in memory; None for others, and for large ones of dask."""
    if isinstance(array, np.ndarray):
        return array
    if not is_dask_array(array) or lazy_of(array) is not None or array.nbytes > _MOST_JOINED:
        return None
    is_persisted = all(isinstance(block, np.ndarray) for block in array.dask.values())
    return np.asarray(array) if is_persisted else None


def _are_rows_of_others(values: Array, axis: int, stored: LazyArray | None) -> bool:
    """Return whether rows of a stored table are elsewhere in one in memory, and not in place.

    A few blocks of rows are looked for.
    """
    if stored is None or not values.size or stored.ndim != values.ndim or _is_costly(stored, axis):
        return False
    old, new = ((*s[:axis], *s[axis + 1 :]) for s in (stored.shape, values.shape))
    if old != new:
        return False
    rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)

    def read(start: int, stop: int) -> Array:
        key = (slice(None),) * axis + (slice(start, stop),)
        block = np.moveaxis(dense_values(stored[key]), axis, 0)
        return block.reshape(stop - start, -1).astype(values.dtype)

    count = min(len(rows), stored.shape[axis])
    starts = sorted({0, count // 3, 2 * count // 3, max(0, count - _ROWS_READ)})
    with suppress(CheckpointError, OSError):
        for start in starts:
            block = read(start, min(start + _ROWS_READ, count))
            here = rows[start : start + len(block)]
            gone = block[[not np.array_equal(*pair) for pair in zip(block, here, strict=True)]]
            for place, row in _places_of(gone, rows):
                is_copy = place < stored.shape[axis] and np.array_equal(
                    read(place, place + 1)[0], row
                )
                if not is_copy:
                    return True
    return False


def _is_costly(stored: LazyArray, axis: int) -> bool:
    """Return whether blocks of rows cannot be read without reading much of a large table."""
    is_encoded = any(reader.part.encoding is not None for reader in stored.part_readers)
    return (axis > 0 or is_encoded) and stored.nbytes > _MOST_JOINED


def _places_of(chosen: Array, rows: Array) -> Iterator[tuple[int, Array]]:
    """Yield the places of chosen rows among others, each with the row."""
    by_prefix = {row[:_PREFIX].tobytes(): row for row in chosen}
    prefixes = (row.tobytes() for row in rows[:, :_PREFIX]) if by_prefix else ()
    places = ((n, by_prefix[prefix]) for n, prefix in enumerate(prefixes) if prefix in by_prefix)
    for place, row in islice(places, _MOST_PLACES):
        if np.array_equal(rows[place], row):
            yield place, row


def is_head_apart(tensors: Mapping[str, WantedTensor], structure: Structure) -> bool:
    """Return whether a head and a table of tokens have different values, unless they are large."""
    names = [structure.weight_of(slot) for slot in ("output", "token_embedding")]
    arrays: list[Any] = [array_of(tensors.get(name or "")) for name in names]
    if any(array is None or array.shape != arrays[0].shape for array in arrays):
        return False
    if any(not isinstance(a, np.ndarray) and a.nbytes > _MOST_JOINED for a in arrays):
        return False
    head, table = (dense_values(a[...]) for a in arrays)
    return not np.array_equal(head, table)


class LayersInMemory:
    """Tensors of layers in memory, and the stored tensors that they equal."""

    def __init__(self, structure: Structure, stored: Stored) -> None:
        self._structure, self._stored = structure, stored
        self._names: dict[Any, dict[bytes, list[str]]] = {}

    @cached_property
    def _siblings(self) -> dict[Any, list[str]]:
        siblings: dict[Any, list[str]] = defaultdict(list)
        for name in self._structure:
            key = self._structure.siblings_key(name)
            if len(key.indices) == 1:
                siblings[key.template].append(name)
        return siblings

    def names_of(self, name: str, array: Any) -> list[str]:
        """Return the name of the only stored tensor that a tensor in memory is equal to."""
        values, template = _in_memory(array), self._structure.siblings_key(name).template
        if values is None or not values.size or template not in self._siblings:
            return []
        if template not in self._names:
            self._names[template] = self._names_by_sample(template, values.dtype)
        names = self._names[template].get(_sample(values), [])
        return names if len(names) == 1 else []

    def _names_by_sample(self, template: Any, dtype: Any) -> dict[bytes, list[str]]:
        names: dict[bytes, list[str]] = defaultdict(list)
        for name in self._siblings[template]:
            lazy = self._stored(name)
            with suppress(CheckpointError, OSError):
                if lazy is not None and lazy.nbytes and not _is_costly(lazy, 0):
                    names[_sample(lazy, dtype)].append(name)
        return names


def _sample(array: Any, dtype: Any = None) -> bytes:
    """Return the shape and the first elements of an array."""
    key = (slice(1),) * (array.ndim - 1) + (slice(_SAMPLED),) * bool(array.ndim)
    values = dense_values(array[key])
    return repr(array.shape).encode() + values.astype(dtype or values.dtype).tobytes()


def _are_selected(array: Any, shape: Sequence[int], rows: str) -> bool:
    """Return whether rows were selected in another order."""
    for selection in chain.from_iterable(selections_in(array).values()):
        in_order = range(len(selection.positions))
        if selection.dim == rows and len(in_order) in shape:
            return not np.array_equal(selection.positions, in_order)
    return False
