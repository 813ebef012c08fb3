"""The parameters that an optimizer lists by name, as facts about the tensors of the model.

Optimizers list them in ``param_groups``: as ``params`` (FSDP), as ``param_names`` (since PyTorch
2.6), or as the keys of the groups and of ``state`` (flattened by DCP). Lists of numbers name no
tensor. The names may lack the first words of the tensors in the file, such as ``model.``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from xckpt.index import Tensor

_GROUPS = re.compile(r"(?P<optimizer>(?:.+\.)?)param_groups\.(?P<key>.+)", re.DOTALL)
_LIST = re.compile(r"[0-9]+\.param(?:s|_names)(?:\.[0-9]+)?")
# Words that wrappers of modules insert in names.
_WRAPPER = re.compile(
    r"(?<![^.])(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\."
)
# First words of the names of a model, in a file that also has the state of its training.
_ABOVE = frozenset({"model", "module", "state_dict", "model_state_dict", "app.model", "net"})
_MOST_TRIED = 100


def with_parameters(tensors: dict[str, Tensor], attrs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors, those in the lists of an optimizer with the fact that they are there."""
    listed: dict[str, None] = {}
    optimizers: dict[str, None] = {}
    for key, value in attrs.items():
        match = _GROUPS.fullmatch(key) if "param_groups." in key else None
        if match is None:
            continue
        optimizers[match["optimizer"]] = None
        if _LIST.fullmatch(match["key"]):
            values = value if isinstance(value, list) else [value]
            listed |= dict.fromkeys([name for name in values if isinstance(name, str)])
        else:
            listed[match["key"].rpartition(".")[0]] = None
    if not optimizers:
        return tensors
    states = tuple([f"{optimizer}state." for optimizer in optimizers])
    prefixes = tuple(optimizer for optimizer in optimizers if optimizer) or states
    model = {}
    for name in tensors:
        if name.startswith(states):
            start = next(len(state) for state in states if name.startswith(state))
            listed[name[start:].rpartition(".")[0]] = None
        elif not name.startswith(prefixes):
            model[_WRAPPER.sub("", name)] = name
    names = [_WRAPPER.sub("", name) for name in listed if name and not name.isdecimal()]
    above = _words_above(names, model)
    declared = dict(tensors)
    for name in names:
        owner = model.get(above + name)
        if owner is not None:
            facts = {**(tensors[owner].declared or {}), "parameter_of": "optimizer"}
            declared[owner] = replace(tensors[owner], declared=facts)
    return declared


def _words_above(names: Iterable[str], model: Collection[str]) -> str:
    """Return the first words that the tensors of the model have, and the names in lists lack."""
    for name in [*names][:_MOST_TRIED]:
        if name in model:
            return ""
        ending = f".{name}"
        for tensor in model:
            if tensor.endswith(ending) and tensor.removesuffix(ending) in _ABOVE:
                return tensor.removesuffix(name)
    return ""
