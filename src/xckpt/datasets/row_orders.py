"""Queries and keys whose sources have the rows of each head in another order.

llama.cpp and Meta alternate the halves of the heads that rotary embeddings turn. A new name
changes no rows: a tensor of GGUF under a name of Hugging Face has others than the name stands for.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from xckpt.arrays.derived import lazies_in
from xckpt.arrays.graph import lazy_of
from xckpt.arrays.moved_rows import are_moved
from xckpt.formatting import base_name
from xckpt.structure.counterparts import Counterparts, Requested
from xckpt.upstream.dask_arrays import is_dask_array
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import xarray as xr

    from xckpt.datasets.tensors import OpenTensors
    from xckpt.structure import Structure
    from xckpt.typing import Array

_OTHER_ORDER = (
    "rows of heads {} in the order of {}, which is another one than that of these names, as "
    "llama.cpp and Meta permute queries and keys ((a / 2).ckpt.merge(b / 2, scale=1) with the "
    "names of both files is a mean in the order of a; transformers reads GGUF with gguf_file=)"
)


def other_orders(tensors: OpenTensors) -> dict[str, list[str]]:
    """Return the tensors whose sources have their rows in another order, by what to do."""
    changed = {n: value for n, value in tensors.variables.items() if not _is_stored(n, value)}
    names = {row.name for row in tensors.rows} if changed else set()
    renamed = [
        variable
        for variable, value in changed.items()
        if any(name not in names for name, _ in _sources(value))
    ]
    if not renamed:
        return {}
    counterparts = Counterparts(tensors.structure, names)
    by_text: dict[str, list[str]] = defaultdict(list)
    are_in_place: dict[str, bool] = {}
    for name in [name for name in names if not tensors.variables_of([name]).isdisjoint(renamed)]:
        variable = tensors.variable(name)
        for stored, source in _sources(variable):
            text = _other_order(counterparts, name, stored, source)
            slot = tensors.structure.slot(name)
            if text and slot not in are_in_place:
                # A user, or `merge`, may have put the rows in order.
                are_in_place[slot] = not are_moved(data_of(variable), 0, _second)
            if text and are_in_place[slot]:
                by_text[text].append(name)
    return {text: sorted(set(of_text)) for text, of_text in by_text.items()}


def renamed_orders(
    structure: Structure, old_names: Mapping[str, str], source: str
) -> dict[str, list[str]]:
    """Return the tensors of a file whose new names stand for another order, by what to do."""
    counterparts = Counterparts(structure, old_names)
    by_text: dict[str, list[str]] = defaultdict(list)
    for name, old in old_names.items():
        if name != old and (text := _other_order(counterparts, name, old, source)):
            by_text[text].append(name)
    return by_text


def _other_order(counterparts: Counterparts, name: str, stored: str, source: str) -> str:
    """Describe that a name stands for another order than that of a source; empty if it does not."""
    path, _, param = stored.rpartition(".")
    is_permuted = counterparts.is_permuted(name, Requested(path, param))
    verb = "are" if is_permuted else "may be"
    return "" if is_permuted is False else _OTHER_ORDER.format(verb, base_name(source))


def _second(count: int) -> list[Array]:
    """Mark the row that has another place in every other order of the rows of heads."""
    return [np.arange(count) == 1]


def _is_stored(name: str, variable: xr.Variable) -> bool:
    """Return whether a variable is a tensor of its name as it was opened."""
    return variable.encoding.get("tensor") == name and lazy_of(data_of(variable)) is not None


def _sources(variable: xr.Variable) -> Iterator[tuple[str, str]]:
    """Yield the stored tensors that a variable is or is computed from, with their checkpoints."""
    array = data_of(variable)
    for lazy in lazies_in(array).values() if is_dask_array(array) else ():
        for origin in lazy.tensor_origins:
            if origin.opened is not None and len(origin.tensor.shape) <= array.ndim:
                yield origin.tensor.name, origin.opened.source
