"""Heads that are tied to the table of tokens, and that an adapter unties.

PEFT trains a copy of a module in ``modules_to_save``. A model whose head is tied to its embeddings
has no tensor of the head, but the merged model has one: the trained head, or the old values if only
the table was trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import dask.array as da

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import xarray as xr

    from xckpt.datasets.adapters import Adapter
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.structure import Structure

_HEAD, _TABLE = "output", "token_embedding"


class UntiedHead(NamedTuple):
    """A head that the model has after a merge, and did not have before."""

    name: str
    table: str  # name of the embeddings
    adapter: Adapter | None  # that has its values; None for the old ones of the embeddings


def untied_head(
    model: OpenTensors,
    heads: Sequence[Adapter],
    matches: Mapping[str, Sequence[Adapter]],
    changes: OpenTensors,
) -> UntiedHead | None:
    """Return the head that an adapter unties from the embeddings, as PEFT does.

    `heads` has the trained heads that the model lacks, and `matches` the changes by tensor.
    """
    structure = model.structure
    saved = {name: a for name, of_name in matches.items() for a in of_name if a.kind == "saved"}
    table = _tied_table(structure) if heads or saved else None
    if table is None or structure.models is None:
        return None
    name = structure.models.name_beside(table, _HEAD) or next((a.base for a in heads), None)
    if name is None:
        return None
    before, trained = model.variable(table), saved.get(table)
    if heads:
        after = changes.variable(trained.tensors["value"]) if trained else before
        is_same = are_equal(after, changes.variable(heads[0].tensors["value"]))
        return None if is_same else UntiedHead(name, table, heads[0])
    has_old = trained is not None and trained.shape == before.shape
    return UntiedHead(name, table, None) if has_old and structure.facts.states_head else None


def tied_update(model: OpenTensors, matches: Mapping[str, Sequence[Adapter]]) -> UntiedHead | None:
    """Return the head that changes with the update of the embeddings that it is tied to."""
    structure = model.structure
    updated = {name: a for name, of_name in matches.items() for a in of_name if a.is_product}
    table = _tied_table(structure) if updated and structure.facts.states_head else None
    if table not in updated or structure.models is None:
        return None
    name = structure.models.name_beside(table, _HEAD)
    return None if name is None else UntiedHead(name, table, updated[table])


def _tied_table(structure: Structure) -> str | None:
    """Return the embeddings of a model that lacks a head."""
    if structure.models is None or structure.facts.is_untied:
        return None
    return structure.weight_of(_TABLE) if structure.weight_of(_HEAD) is None else None


def stored_twice(model: OpenTensors, changed: Collection[str]) -> dict[str, str]:
    """Return a tied head that is stored beside the embeddings, with the name of these.

    The values of both are compared, if one of them is to be changed.
    """
    head, table = model.structure.weight_of(_HEAD), model.structure.weight_of(_TABLE)
    if head is None or table is None or {head, table}.isdisjoint(changed):
        return {}
    is_tied = model.structure.facts.config.get("tie_word_embeddings") is True
    if not is_tied or not are_equal(model.variable(head), model.variable(table)):
        return {}
    return {head: table}


def are_equal(a: xr.Variable, b: xr.Variable) -> bool:
    """Return whether two tensors have the same values."""
    first, second = da.asarray(a.data), da.asarray(b.data)
    return first.shape == second.shape and bool((first == second).all().compute())
