"""Codes of quantised weights: small integers and floats that mean nothing without their scales."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from xckpt.labels.numbering import split_leaf

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["scales_of_codes"]

# Element types that codes have, one by one or packed into words.
_CODES = re.compile(r"u?int(2|4|8|16|32)|float[468]_\w+")
# What the name of codes, or of zero points, may have where the name of their scales has not.
_ENDINGS = re.compile(r"(_packed|_blocks|_qdata|_zero_point|\._data|:data|:zero_points)$")
_SCALES = (
    *("_scale", "_scale_inv", "_scales", ".scale", "/scale", "._scale", ":scale", ":scales"),
    *(".absmax", "/absmax", "_absmax"),
)
# Scales of scales.
_GLOBAL_SCALES = ("_scale_2", "_global_scale", ":global")
# Of which a module has one, and what they scale then.
_SCALES_OF_A_MODULE = ("scales", "scale", "SCB", "scale_packed")
_SCALED = frozenset({"weight", "qweight", "qzeros", "kernel", "codes", "W_q"})


def scales_of_codes(dtypes: Mapping[str, str]) -> dict[str, str]:
    """Find the tensors that hold codes, because a tensor with their scales is next to them.

    Integers in the same module, such as shapes, zero points and indices of groups, say how the
    codes are to be read, and count as such.

    Parameters
    ----------
    dtypes : mapping of str to str
        The element type, as stored, of every tensor by its name.

    Returns
    -------
    dict of str to str
        The name of the scales, for each tensor of codes.

    Examples
    --------
    >>> scales_of_codes({"a.weight": "int8", "a.weight_scale": "float32", "a.bias": "float32"})
    {'a.weight': 'a.weight_scale'}
    """
    found = {}
    types = {dtype for dtype in set(dtypes.values()) if _CODES.fullmatch(dtype) is not None}
    for name, dtype in dtypes.items() if types else ():
        if dtype in types:
            scales = next((each for each in _candidates(name) if each in dtypes), None)
            if scales is not None:
                found[name] = scales
    modules = {split_leaf(name)[0]: scales for name, scales in found.items()}
    modules = {name: scales for name, scales in modules.items() if name} | found
    codes = dict(found)
    for name, dtype in dtypes.items() if codes else ():
        if dtype.lstrip("u").startswith("int") and name not in codes:
            # In the module of codes, or below them: ``weight.quant_state.bitsandbytes__nf4``.
            module = split_leaf(name)[0]
            scales = modules.get(module) or codes.get(split_leaf(module)[0])
            if scales is not None:
                found[name] = scales
    return found


def _candidates(name: str) -> Iterator[str]:
    """Spell the names that the scales of a tensor would have."""
    stem = _ENDINGS.sub("", name)
    for ending in _SCALES:
        yield stem + ending
    if stem.endswith("_scale"):
        for ending in _GLOBAL_SCALES:
            yield stem.removesuffix("_scale") + ending
    module, separator, leaf = split_leaf(stem)
    if leaf in _SCALED:
        for scales in _SCALES_OF_A_MODULE:
            yield module + separator + scales
