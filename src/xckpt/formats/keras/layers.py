"""Names and axes of the variables of layers, by the class of the layer."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Tensor

_WEIGHTS, _BIAS = ("kernel", "bias"), ("out",)
_SCALES = ("gamma", "beta")
_PLANES = ("depth", "height", "width")
_CELL = ("kernel", "recurrent_kernel", "bias")
_IN_OUT = ("in", "out")
_ROLES: dict[str, tuple[str, ...]] = {
    "dense": _WEIGHTS,
    "einsum_dense": _WEIGHTS,
    "embedding": ("embeddings",),
    "reversible_embedding": ("embeddings",),
    "batch_normalization": (*_SCALES, "moving_mean", "moving_variance"),
    "layer_normalization": _SCALES,
    "group_normalization": _SCALES,
    "cell": _CELL,
    "lstm_cell": _CELL,
    "gru_cell": _CELL,
    "separable_conv1d": ("depthwise_kernel", "pointwise_kernel", "bias"),
    "separable_conv2d": ("depthwise_kernel", "pointwise_kernel", "bias"),
    **{f"conv{axes}d": _WEIGHTS for axes in (1, 2, 3)},
    **{f"conv{axes}d_transpose": _WEIGHTS for axes in (1, 2, 3)},
    **{f"depthwise_conv{axes}d": _WEIGHTS for axes in (1, 2)},
    **{f"{role}_dense": _WEIGHTS for role in ("query", "key", "value", "output")},
}
# Names of axes by class, or by class and variable.
_AXES: dict[str, tuple[str, ...]] = {
    "dense kernel": _IN_OUT,
    "embedding embeddings": _IN_OUT,
    "reversible_embedding embeddings": _IN_OUT,
    **{
        f"{cell} {name}": _IN_OUT
        for cell in ("cell", "lstm_cell", "gru_cell")
        for name in _CELL[:2]
    },
    **{f"conv{n}d kernel": (*_PLANES[-n:], "in", "out") for n in (1, 2, 3)},
    **{f"conv{n}d_transpose kernel": (*_PLANES[-n:], "out", "in") for n in (1, 2, 3)},
    **{f"depthwise_conv{n}d kernel": (*_PLANES[-n:], "in", "multiplier") for n in (1, 2)},
    **{f"separable_conv{n}d depthwise_kernel": (*_PLANES[-n:], "in", "multiplier") for n in (1, 2)},
    **{f"separable_conv{n}d pointwise_kernel": (*_PLANES[-n:], "in", "out") for n in (1, 2)},
    **{f"{role}_dense kernel": ("in", "heads", "head") for role in ("query", "key", "value")},
    "output_dense kernel": ("heads", "head", "out"),
}
_ALONG_OUT = {"bias", *_SCALES, "moving_mean", "moving_variance"}
# Classes with an option that leaves out variables in the middle.
_WHOLE = {"batch_normalization": 4, "layer_normalization": 2, "group_normalization": 2}
_OPTIMIZER = ("iteration", "learning_rate")
_NUMBER = re.compile(r"_[0-9]+$")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])")


class Layers:
    """The classes and names of the layers in a file."""

    def __init__(self, groups: Mapping[tuple[str, ...], Mapping[str, Any]], config: Any) -> None:
        self._groups = groups
        self._classes: dict[str, str] = {}
        stack = [config]
        while stack:
            value = stack.pop()
            if type(value) is dict:
                inner, kind = value.get("config"), value.get("class_name")
                if type(inner) is dict and type(inner.get("name")) is str and type(kind) is str:
                    self._classes.setdefault(inner["name"], _CAMEL.sub("_", kind).lower())
                stack += value.values()
            elif type(value) is list:
                stack += value

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return variables with the names of their layers, of themselves, and of their axes."""
        siblings: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for tensor in tensors.values():
            *group, last = tensor.path or ("",)
            siblings.setdefault((*group,), {})[last] = tensor
        return {
            name: self._named(tensor, siblings[(tensor.path or ())[:-1]])
            for name, tensor in tensors.items()
        }

    def _named(self, tensor: Tensor, siblings: Mapping[str, Tensor]) -> Tensor:
        *group, last = tensor.path or ("",)
        attrs: dict[str, Any] = dict(tensor.attrs)
        if group[-1:] == ["vars"]:
            layer = self._groups.get((*group,), {}).get("name")
            owner = group[-2] if len(group) > 1 else ""
            kind = _NUMBER.sub("", owner)
            kind = kind if f"{kind} kernel" in _AXES else self._classes.get(str(layer), kind)
            variable = _variable(kind, last, siblings)
            if type(layer) is str:
                attrs["layer"] = layer
        elif ":" in last or {"model_weights", "optimizer_weights"} & {*group[:1]}:
            layer = group[-1] if group else ""
            variable = last.partition(":")[0]
            kind = self._classes.get(layer, _NUMBER.sub("", layer))
            if group[:1] != ["optimizer_weights"] and layer:
                attrs["layer"] = layer
        else:
            return tensor
        if variable is None:
            return replace(tensor, attrs=attrs)
        attrs["variable"] = variable
        dims = _AXES.get(f"{kind} {variable}")
        dims = _BIAS if dims is None and variable in _ALONG_OUT and kind in _ROLES else dims
        is_fitting = dims is not None and len(dims) == tensor.ndim and tensor.problem is None
        return replace(tensor, attrs=attrs, dims=dims if is_fitting else None)


def _variable(kind: str, last: str, siblings: Mapping[str, Tensor]) -> str | None:
    """Return the name of a numbered variable, if the class of its layer is known."""
    if not last.isdecimal() or len(last) > 4:
        return None if last.isdecimal() else last
    number = int(last)
    if kind == "optimizer":
        return _OPTIMIZER[number] if number < len(_OPTIMIZER) else None
    names = _ROLES.get(kind, ())
    if number >= len(names) or len(siblings) != _WHOLE.get(kind, len(siblings)):
        return None
    first = siblings.get("0")
    # The scales of quantised kernels take the place of a missing bias.
    is_code = first is not None and "float" not in first.dtype
    return names[number] if number == 0 or not is_code else None
