"""The structure of a model: roles, modules and axes of its tensors, and the evidence for them.

Formats hand over facts, and this room draws the conclusions, once for all others: `structure_of` an
Index, or a `Structure` of tensors from elsewhere. The room imports `index`, `errors` and
`formatting` only. Read `numbering` first, which takes names apart, then `roles` and `model`.
"""

from __future__ import annotations

from xckpt.structure.axes import Channels
from xckpt.structure.info import OF_TRAINING, PARAMETERS, Described, Evidence, Role, TensorInfo
from xckpt.structure.model import Structure, structure_of

__all__ = [
    "OF_TRAINING",
    "PARAMETERS",
    "Channels",
    "Described",
    "Evidence",
    "Role",
    "Structure",
    "TensorInfo",
    "structure_of",
]
