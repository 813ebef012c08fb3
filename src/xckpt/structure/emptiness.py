"""Checkpoints without contents: no tensors, or weights without elements.

Programs that shard weights over processes, such as DeepSpeed ZeRO-3, leave an array of shape
``[0]`` in the place of each weight. A checkpoint that is saved without gathering them opens like
any other.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from xckpt.structure.info import PARAMETERS

if TYPE_CHECKING:
    from xckpt.structure.model import Structure

__all__ = ["NO_TENSORS", "empty_weights"]

#: Reason why a checkpoint without tensors is a fault.
NO_TENSORS = (
    "there are no tensors: the state dict may have been empty when it was saved, as on a process "
    "without weights, or saving may have been interrupted"
)
_UNGATHERED = (
    "it has no elements: the weight may not have been gathered from the processes of ZeRO-3 or "
    "FSDP before it was saved"
)
_NO_EXTENT = "an axis has the length 0, unlike in other weights of this name"
_MATRICES = frozenset({"weight", "kernel"})
_SEPARATORS = re.compile(r"[./]")


def empty_weights(structure: Structure) -> dict[str, str]:
    """Return weights without elements that should have some, each with the likely reason.

    Parameters
    ----------
    structure : Structure
        All tensors of a checkpoint.

    Returns
    -------
    dict of str to str
        Weights without elements, if others of the same name have elements, or the name is one of
        matrices. A list without elements, such as the ids of removed rows, is not a fault.
    """
    shapes = {name: structure.described(name).shape for name in structure}
    empty = {name: shape for name, shape in shapes.items() if not prod(shape)}
    if not empty:
        return {}
    roles = structure.roles
    leaves = Counter(_leaf(name) for name, shape in shapes.items() if prod(shape))
    reasons = {}
    # Some modules have weights without elements by design, beside many matrices that have them.
    siblings = {structure.siblings_key(name).template for name in shapes.keys() - empty.keys()}
    matrices = sum([prod(shape) > 0 and len(shape) > 1 for shape in shapes.values()])
    for name, shape in empty.items():
        if len(empty) < matrices and structure.siblings_key(name).template not in siblings:
            continue
        leaf = _leaf(name)
        is_expected = leaves[leaf] or (leaf in _MATRICES and leaf != name)
        if roles.get(name) in PARAMETERS and is_expected:
            reasons[name] = _UNGATHERED if shape == (0,) else _NO_EXTENT
    return reasons


def _leaf(name: str) -> str:
    """Return the name of a tensor in its module."""
    return _SEPARATORS.split(name)[-1]
