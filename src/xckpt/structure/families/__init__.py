"""Families of architectures: the place of a tensor in its model, by its name.

`family_of` chooses a family, by the type that the file states or by the names alone, and
`Family.describe` returns the place of a tensor. The knowledge is data, a text file for each family
in the folder ``tables``, of which only those are read that may fit; `tables` describes their lines.
"""

from __future__ import annotations

from xckpt.structure.families.choosing import family_of, has_table, under_other_modules
from xckpt.structure.families.family import Family, Place

__all__ = ["Family", "Place", "family_of", "has_table", "under_other_modules"]
