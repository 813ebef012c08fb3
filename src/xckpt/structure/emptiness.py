"""Checkpoints without contents: no tensors, or weights without elements.

Programs that shard weights over processes, such as DeepSpeed ZeRO-3, leave an array of shape
``[0]`` in the place of each weight. A checkpoint that is saved without gathering them opens like
any other.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from xckpt.structure.info import PARAMETERS, Role
from xckpt.structure.numbering import leaf_of, module_of, split_leaf

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
_NO_EXTENT = "an axis has the length 0, so that the weight has no elements"
_MATRICES = frozenset({"weight", "kernel"})


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
        matrices. A list without elements, such as the ids of removed rows, is not a fault, nor is
        the weight of a module that gets its weights from another one, as in e3nn: it stores a mask
        of its outputs.
    """
    shapes = {name: structure.described(name).shape for name in structure}
    empty = {name: shape for name, shape in shapes.items() if not prod(shape)}
    if not empty:
        return {}
    roles = structure.roles
    names = Counter(leaf_of(name) for name, shape in shapes.items() if prod(shape))
    masked = {
        module
        for name, role in roles.items()
        if role is Role.CONSTANT and (module := module_of(name))
    }
    reasons = {}
    for name, shape in empty.items():
        module, _, leaf = split_leaf(name)
        is_expected = names[leaf] or (leaf in _MATRICES and leaf != name)
        if roles[name] in PARAMETERS and is_expected and module not in masked:
            reasons[name] = _UNGATHERED if shape == (0,) else _NO_EXTENT
    return reasons
