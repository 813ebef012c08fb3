"""Which tensors are codes: the weights that they stand for are products with a scale next to them.

Where a format says how its codes are decoded, tensors have the numbers of the weights. Other files
only have a second tensor with a name that says it: ``w.weight`` of 8 bits and ``w.weight_scale``.
The numbers of such codes say nothing of the weights, so that nobody should take them for these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.elements import ELEMENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from xckpt.notebook.folding import Family, Row

__all__ = ["CODES", "mark_codes", "marked"]

#: What `Row.storage` and patterns call them.
CODES = "codes"

_MOST_BITS_OF_FLOATS = 8
# What a scale is called next to its codes: compressed-tensors, ModelOpt, DeepSeek (inverse), EETQ,
# bitsandbytes, and the parts that ``decode=False`` shows.
_SUFFIXES = ("_scale", "_scale_inv", "_scales", ".scale", ".absmax")
# And in their module, of leaves with these names: GPTQ, AWQ, MLX, LLM.int8.
_LEAVES = frozenset({"weight", "qweight", "qzeros", "weight_packed"})
_IN_MODULE = ("weight_scale", "weight_scale_inv", "scales", "scale", "SCB")
_BLOCKS = "_blocks"  # of gpt-oss


def marked(rows: Sequence[Row]) -> list[Row]:
    """Say of tensors that are codes how they are stored."""
    names = {row.name for row in rows}
    return [
        row._replace(storage=_storage(row.storage))
        if _may_be_codes(row.dtype) and not names.isdisjoint(_scales_of(row.name))
        else row
        for row in rows
    ]


def mark_codes(families: Iterable[Family]) -> None:
    """Say the same of families, in no time: there are few of them."""
    templates: dict[str, list[Family]] = {}
    for family in families:
        name = ".".join(["0" if part is None else part for part in family.template])
        templates.setdefault(name, []).append(family)
    for name, some in templates.items():
        scales = [each.indices for scale in _scales_of(name) for each in templates.get(scale, ())]
        there = [frozenset().union(*found) for found in zip(*scales, strict=False)]
        for family in some if scales else ():
            covered = all(here <= all_ for here, all_ in zip(family.indices, there, strict=False))
            if _may_be_codes(family.dtype) and covered:
                family.storage = _storage(family.storage)


def _storage(storage: str) -> str:
    return storage if CODES in storage.split() else f"{CODES} {storage}".rstrip()


def _may_be_codes(dtype: str) -> bool:
    element = ELEMENT_TYPES.get(dtype)
    if element is None or element.kind not in {"integer", "float"}:
        return False
    return element.kind == "integer" or element.bits <= _MOST_BITS_OF_FLOATS


def _scales_of(name: str) -> Iterator[str]:
    """Return what the scales of a tensor may be called."""
    yield from [name + suffix for suffix in _SUFFIXES]
    whole, colon, _ = name.rpartition(":")
    if colon:  # its own name among these says nothing
        yield from {f"{whole}:scale", f"{whole}:scales"} - {name}
    stem, dot, leaf = name.rpartition(".")
    if leaf in _LEAVES:
        yield from [f"{stem}{dot}{scale}" for scale in _IN_MODULE if scale != leaf]
    if leaf.endswith(_BLOCKS):
        yield name.removesuffix(_BLOCKS) + "_scales"
