"""Which tensors are codes: the weights that they stand for are products with a scale next to them.

Where a format says how its codes are decoded, tensors have the numbers of the weights. Other files
only have a second tensor with a name that says it: ``w.weight`` of 8 bits and ``w.weight_scale``.
The numbers of such codes say nothing of the weights, so that nobody should take them for these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.elements import ELEMENT_TYPES
from xckpt.labels import scales_of_codes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xckpt.notebook.folding import Family, Row

__all__ = ["CODES", "mark_codes", "marked"]

#: What `Row.storage` and patterns call them.
CODES = "codes"


def marked(rows: Sequence[Row]) -> list[Row]:
    """Say of tensors that are codes how they are stored."""
    codes = scales_of_codes({row.name: row.dtype for row in rows})
    if not codes:
        return list(rows)
    return [
        row._replace(storage=_storage(row.storage)) if row.name in codes else row for row in rows
    ]


def mark_codes(families: Iterable[Family]) -> None:
    """Say the same of families, in no time: there are few of them."""
    templates: dict[str, list[Family]] = {}
    for family in families:
        name = ".".join(["0" if part is None else part for part in family.template])
        templates.setdefault(name, []).append(family)
    # Of some names there are several types, as where the first layers are not quantised.
    smallest = {name: min(some, key=_bits).dtype for name, some in templates.items()}
    for name, scale in scales_of_codes(smallest).items():
        scales = [each.indices for each in templates[scale]]
        there = [frozenset().union(*found) for found in zip(*scales, strict=False)]
        for family in templates[name]:
            covered = all(here <= all_ for here, all_ in zip(family.indices, there, strict=False))
            if covered and scales_of_codes({name: family.dtype, scale: smallest[scale]}):
                family.storage = _storage(family.storage)


def _bits(family: Family) -> int:
    element = ELEMENT_TYPES.get(family.dtype)
    return 64 if element is None else element.bits


def _storage(storage: str) -> str:
    return storage if CODES in storage.split() else f"{CODES} {storage}".rstrip()
