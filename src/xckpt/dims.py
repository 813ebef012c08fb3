"""Names of axes as one text, for formats that have room for texts but not for names of axes.

The text is JSON: names of tensors to a name for each axis, null where an axis has none. Tensors
without a named axis are left out::

    {"conv.weight":["out","in",null,null]}
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Tensor

__all__ = ["DIMS_KEY", "dims_text", "with_dims"]

# The attribute of a file that has the text.
DIMS_KEY = "xckpt.dims"


def dims_text(tensors: Mapping[str, Tensor]) -> str | None:
    """Write the names of axes of all tensors as one text.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        By name.

    Returns
    -------
    str or None
        The same for equal names, whatever the order of the tensors; None if no axis has a name.

    Examples
    --------
    >>> from xckpt.index import Tensor
    >>> dims_text({"w": Tensor("w", "float32", (2, 3), {}, dims=("row", None))})
    '{"w":["row",null]}'
    """
    named = {name: tensor.dims for name, tensor in tensors.items() if any(tensor.dims or ())}
    if not named:
        return None
    return json.dumps(named, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def with_dims(tensors: dict[str, Tensor], text: Any) -> dict[str, Tensor]:
    """Give tensors the names of axes that a file has for them.

    Parameters
    ----------
    tensors : dict of str to Tensor
        By name.
    text : object
        What the file has. Names of axes are no reason to refuse a file: whatever is malformed or
        does not fit a tensor is ignored.

    Returns
    -------
    dict of str to Tensor
        The same tensors in the same order, with `dims` where there are some.
    """
    named = _parsed(text)
    if not named:
        return tensors
    return {
        name: replace(tensor, dims=tuple(named[name]))
        if name in named and _fits(named[name], tensor)
        else tensor
        for name, tensor in tensors.items()
    }


def _parsed(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text) if type(text) is str else None
    except (ValueError, RecursionError):
        return {}
    return value if type(value) is dict else {}


def _fits(dims: Any, tensor: Tensor) -> bool:
    return type(dims) is list and len(dims) == tensor.ndim and all(map(_is_name, dims))


def _is_name(value: Any) -> bool:
    if type(value) is not str:
        return value is None
    # Lone surrogates, which JSON can spell, cannot be printed.
    return bool(value) and not any("\ud800" <= character <= "\udfff" for character in value)
