"""The tensors of a base model that an adapter changes, and the change in their order of axes.

A model may have the experts of a tensor one by one, or in another order of axes: the change that
`match_bases` returns is the one of its tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from xckpt.datasets.adapter_methods import FLAT_PREFIX
from xckpt.datasets.adapters import PART_OF_PIPELINE
from xckpt.structure.counterparts import PIPELINE_PARTS, Counterparts, Requested, part_of_pipeline

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from xckpt.datasets.adapters import Adapter
    from xckpt.structure import Structure
    from xckpt.structure.counterparts import Counterpart


class BaseMatches(NamedTuple):
    """Adapters and the tensors of a base model."""

    #: By the names of the tensors in the model.
    matches: dict[str, list[tuple[Adapter, Counterpart]]]
    #: Tensors that the model lacks, and that are not in another part of the pipeline.
    missing: list[str]
    #: Trained heads among them that the model has tied to its embeddings.
    heads: list[Adapter]


def match_bases(
    adapters: Sequence[Adapter],
    structure: Structure,
    names: Collection[str],
    source: str = "",
    types: Sequence[str] = (),
) -> BaseMatches:
    """Find the tensors of adapters in a base model.

    The folder in `source` may name the part of a pipeline that the model is, and `types` has the
    types of the model that the adapter states.

    Raises
    ------
    ValueError
        If an adapter fits several tensors, or several adapters fit one.
    """
    folder = source.replace("\\", "/").split("/")[-2:]
    counterparts = Counterparts(structure, names, part_of_pipeline(folder), types)
    requests = [_requested(adapter) for adapter in adapters]
    lists = counterparts.find(requests)
    matches: dict[str, list[tuple[Adapter, Counterpart]]] = {}
    missing, heads = [], []
    elsewhere = _other_parts(counterparts, requests, lists)
    with_adapters = {c.name for of_adapter in lists for c in of_adapter if not c.is_tied}
    for adapter, request, of_adapter in zip(adapters, requests, lists, strict=True):
        # A head that was trained and saved as a whole is no longer tied.
        used = [c for c in of_adapter if not c.is_tied or adapter.kind != "saved"]
        for counterpart in used:
            is_twin = counterpart.is_tied and counterpart.name in with_adapters
            if not is_twin or adapter.is_product or adapter.kind == "update":
                expert = counterpart.expert
                change = adapter if expert is None else adapter.of_expert(expert)
                matches.setdefault(counterpart.name, []).append((change, counterpart))
        if of_adapter and not used:
            heads.append(adapter)
        if not used and not adapter.is_optional and request.part not in elsewhere:
            missing.append(adapter.base)
    return BaseMatches(_turned_experts(matches, structure), missing, heads)


def _other_parts(
    counterparts: Counterparts, requests: Sequence[Requested], lists: Sequence[list[Counterpart]]
) -> set[str]:
    """Return the parts of a pipeline that an adapter changes, and that the model is not.

    Empty if the adapter changes several parts of the model, or states no part for a change.
    """
    changed = {request.part for request, names in zip(requests, lists, strict=True) if names}
    stated = {request.part for request in requests} - changed - {""}
    if not stated or len(changed) != 1 or "" in changed:
        return set()
    parts = {counterparts.part_of(name) for name in counterparts.names}
    is_text = "" in parts and "text" in changed.pop()  # any of several text encoders
    return {part for part in stated - parts if not (is_text and "text" in part)}


def _turned_experts(
    matches: dict[str, list[tuple[Adapter, Counterpart]]], structure: Structure
) -> dict[str, list[tuple[Adapter, Counterpart]]]:
    """Give changes of stacked experts the order of axes of their tensors.

    The shapes decide. Square matrices have the order that all other tensors have.
    """
    orders: dict[str, bool | None] = {}
    for name, changes in matches.items():
        shape = tuple(structure.described(name).shape)
        for adapter, _ in changes:
            if adapter.kind == "experts" and sorted(shape) == sorted(adapter.shape):
                is_square = shape[1] == shape[2]
                orders[name] = None if is_square else adapter.turned().shape == shape
    stated = {order for order in orders.values() if order is not None}
    order_of_squares = stated.pop() if len(stated) == 1 else None
    for name, order in orders.items():
        is_turned = order_of_squares if order is None else order
        matches[name] = [
            _in_order(adapter, counterpart, is_turned=is_turned)
            for adapter, counterpart in matches[name]
        ]
    return matches


def _in_order(
    adapter: Adapter, counterpart: Counterpart, *, is_turned: bool | None
) -> tuple[Adapter, Counterpart]:
    """Return the change of stacked experts with the order of axes of a tensor of the model."""
    if adapter.kind != "experts":
        return adapter, counterpart
    if is_turned is None and counterpart.outputs != 1:
        problem = "its experts are square matrices, whose order of axes is unknown"
        return adapter, counterpart._replace(problem=problem)
    return (adapter.turned() if is_turned else adapter), counterpart


def _requested(adapter: Adapter) -> Requested:
    """Return the tensor that an adapter changes, as the adapter names it."""
    base = adapter.base
    is_flat = FLAT_PREFIX.match(base) is not None
    match = PART_OF_PIPELINE.match(base)
    part = "" if match is None else PIPELINE_PARTS[match[1] or match[2]]
    prefix = match[0] if match else "lycoris_" if is_flat else ""
    path, param = base.removeprefix(prefix), "weight"
    if not is_flat:
        path, _, param = path.rpartition(".")
    return Requested(path, param, part, prefix, is_flat, adapter.shape)


def fitted(adapter: Adapter, shape: tuple[int, ...], counterpart: Counterpart) -> Adapter:
    """Return an adapter with the axes, and the order of rows, of a tensor of the model."""
    if adapter.is_turned(shape, counterpart):
        return adapter.turned()
    if counterpart.is_permuted:
        return replace(adapter, heads=counterpart.heads, is_undone=counterpart.is_undone)
    number, names = counterpart.split
    if names:
        *stack, rows, columns = adapter.shape
        count = rows // len(names)
        part = slice(number * count, (number + 1) * count)
        return replace(adapter, part=part, shape=(*stack, count, columns))
    return adapter


def problem_of(adapter: Adapter, counterpart: Counterpart) -> str:
    """Return why the rows of an adapter are not known in a tensor; empty if they are."""
    if counterpart.problem:
        return counterpart.problem
    if counterpart.is_permuted is None:
        return "the model may have the rows of its heads in another order than the adapter"
    if counterpart.is_permuted:
        problem = "the model has the rows of its heads in another order than the adapter"
        if not counterpart.heads:
            return f"{problem}, and states no number of heads"
        rows = adapter.shape[0] if adapter.shape else 0
        if adapter.out_axis or rows % (2 * counterpart.heads):
            return f"{problem}, whose update has {rows:,} rows"
    parts = len(counterpart.split[1])
    is_divided = adapter.experts > 1 and parts and adapter.shape[-2] % parts == 0
    if counterpart.slot or (parts and not is_divided):
        return "the model fuses other tensors than the adapter"
    return ""
