"""Layers in the configuration of a model: names of their variables, and code that Keras runs.

An object in a configuration has ``class_name``, ``module``, ``registered_name`` and ``config``.
Keras 3 looks up classes by their module, which versions before 3.9 import whatever it is; functions
are named in ``config`` if the class is ``function``. A ``Lambda`` layer has marshalled code of
Python, as ``__lambda__`` in Keras 3 and as a list in Keras 2. Custom objects have
``PACKAGE>NAME`` as ``registered_name``: the program that loads them must have registered them.

Specification: saving/serialization_lib.py and layers/core/lambda_layer.py of
github.com/keras-team/keras, 3.15.
"""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import shown
from xckpt.formats.pickles.executing import is_own

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.formats import kit
    from xckpt.index import Tensor

_WEIGHTS = ("kernel", "bias")
_SCALES = ("gamma", "beta")
_CELL = ("kernel", "recurrent_kernel", "bias")
_ROLES: dict[str, tuple[str, ...]] = {
    "dense": _WEIGHTS,
    "einsum_dense": _WEIGHTS,
    "embedding": ("embeddings",),
    "reversible_embedding": ("embeddings",),
    "batch_normalization": (*_SCALES, "moving_mean", "moving_variance"),
    "layer_normalization": _SCALES,
    "group_normalization": _SCALES,
    "normalization": ("mean", "variance", "count"),
    "rms_normalization": ("scale",),
    "p_re_lu": ("alpha",),
    "attention": ("scale",),
    "additive_attention": ("scale",),
    "cell": _CELL,
    **dict.fromkeys(("lstm_cell", "gru_cell", "lstm", "gru", "simple_rnn"), _CELL),
    "separable_conv1d": ("depthwise_kernel", "pointwise_kernel", "bias"),
    "separable_conv2d": ("depthwise_kernel", "pointwise_kernel", "bias"),
    **{f"conv{axes}d": _WEIGHTS for axes in (1, 2, 3)},
    **{f"conv{axes}d_transpose": _WEIGHTS for axes in (1, 2, 3)},
    **{f"depthwise_conv{axes}d": _WEIGHTS for axes in (1, 2)},
    **{f"{role}_dense": _WEIGHTS for role in ("query", "key", "value", "output")},
}
# Classes with an option that leaves out variables in the middle.
_WHOLE = {"batch_normalization": 4, "layer_normalization": 2, "group_normalization": 2}
_OPTIMIZER = ("iteration", "learning_rate")
_NUMBER = re.compile(r"_[0-9]+$")
# As Keras makes snake case of the name of a class.
_WORD, _CAMEL = re.compile(r"(.)([A-Z][a-z]+)"), re.compile(r"([a-z])([A-Z])")
# Fewest variables of a dense layer whose inputs are scaled to float8.
_FLOAT8_VARIABLES = 7
# Most variables of a dense layer with codes of 8 bits.
_INT8_VARIABLES = 3


# Variables of quantised layers by mode, in the order of the file; `bias` is optional, and so are
# the last two of `int4`.
_AMAX = ("inputs_scale", "inputs_amax_history", "kernel_scale", "kernel_amax_history")
_MODES: dict[str, tuple[str, ...]] = {
    "int8": ("kernel", "bias", "kernel_scale"),
    "int4": ("kernel", "bias", "kernel_scale", "kernel_zero", "g_idx"),
    "float8": (*_WEIGHTS, *_AMAX, "outputs_grad_scale", "outputs_grad_amax_history"),
    "gptq": ("bias", "quantized_kernel", "kernel_scale", "kernel_zero", "g_idx"),
    "awq": ("bias", "quantized_kernel", "kernel_scale", "kernel_zero", "awq_scales", "g_idx"),
}
_OF_EMBEDDINGS = ("embeddings", "embeddings_scale", "embeddings_zero", "g_idx")
_MODE = re.compile(r"(int8|int4|float8|gptq|awq)\b|^(int8|int4|float8|gptq|awq)[_/]")
_PACKED = frozenset({"kernel", "embeddings", "quantized_kernel"})


class _Layer(NamedTuple):
    """A layer, as a configuration states it."""

    kind: str  # class in snake case
    mode: str = ""  # of quantisation
    has_bias: bool | None = None


class Layers:
    """The classes and names of the layers in a file."""

    def __init__(self, groups: Mapping[tuple[str, ...], Mapping[str, Any]], config: Any) -> None:
        self._groups = groups
        self._layers: dict[str, _Layer] = {}
        stack = [config]
        while stack:
            value = stack.pop()
            if type(value) is dict:
                inner, kind = value.get("config"), value.get("class_name")
                if type(inner) is dict and type(inner.get("name")) is str and type(kind) is str:
                    self._layers.setdefault(inner["name"], _layer(kind, inner))
                stack += value.values()
            elif type(value) is list:
                stack += value

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return variables with the names of their layers and of themselves."""
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
        if group[-1:] == ["vars"]:
            name = self._groups.get((*group,), {}).get("name")
            owner = group[-2] if len(group) > 1 else ""
            kind = _NUMBER.sub("", owner)
            layer = self._layers.get(str(name), _Layer(kind))
            # Layers inside a layer have a path, but no configuration.
            layer = layer._replace(kind=kind) if "kernel" in _ROLES.get(kind, ()) else layer
            layer = _with_mode(layer, siblings)
            variable = _variable(layer, last, siblings)
            name = name if type(name) is str else None
        elif ":" in last or {"model_weights", "optimizer_weights"} & {*group[:1]}:
            name = self._layer_above(group)
            variable = last.partition(":")[0]
            layer = self._layers.get(name, _Layer(_NUMBER.sub("", name)))
            if variable not in _ROLES.get(layer.kind, ()) and group:
                inner = _NUMBER.sub("", group[-1])
                layer = layer._replace(kind=inner) if inner in _ROLES else layer
            if group[:1] == ["optimizer_weights"]:
                name, layer = None, _Layer("optimizer")
            name = name or None
        else:
            return tensor
        return _described(tensor, layer, name, variable)

    def _layer_above(self, group: Sequence[str]) -> str:
        """Return the name of the layer that owns a variable of Keras 2."""
        # Scopes inside of a layer repeat its name with a number: conv2d_1/conv2d_1_1/kernel:0.
        for word in reversed(group):
            if word in self._layers:
                return word
        if len(group) > 1 and _NUMBER.sub("", group[-1]) == group[-2]:
            return group[-2]
        return group[-1] if group else ""


def _layer(class_name: str, config: Mapping[str, Any]) -> _Layer:
    kind = _CAMEL.sub(r"\1_\2", _WORD.sub(r"\1_\2", class_name)).lower()
    policy = config.get("dtype")
    mode = ""
    if type(policy) is dict and type(policy.get("config")) is dict:
        inner = policy["config"]
        texts = [inner.get("mode"), inner.get("name"), policy.get("class_name")]
        match = next((m for text in texts if (m := _MODE.search(str(text).lower()))), None)
        mode = match[0].strip("_/") if match else ""
    has_bias = config.get("use_bias")
    if kind == "einsum_dense":
        has_bias = config.get("bias_axes") is not None
    return _Layer(kind, mode, has_bias if type(has_bias) is bool else None)


def _with_mode(layer: _Layer, siblings: Mapping[str, Tensor]) -> _Layer:
    """Return a layer with the mode of quantisation that its variables show, if none is stated."""
    first = siblings.get("0")
    is_dense = _ROLES.get(layer.kind) == _WEIGHTS and first is not None
    if layer.mode or not is_dense or first is None or "float" in first.dtype:
        return layer
    # Codes of 8 bits have a bias and scales next to them, packed ones also zero points and indices.
    return layer._replace(mode="int4" if len(siblings) > _INT8_VARIABLES else "int8")


def _described(tensor: Tensor, layer: _Layer, name: str | None, variable: str | None) -> Tensor:
    """Return a tensor with the facts about its layer."""
    attrs: dict[str, Any] = dict(tensor.attrs)
    declared: dict[str, Any] = {}
    if name is not None:
        attrs["layer"] = declared["layer"] = name
    if variable is None:
        return replace(tensor, attrs=attrs, declared=declared or None)
    attrs["variable"] = variable
    if layer.kind != "optimizer":
        declared |= {"class": layer.kind, "variable": variable}
    is_packed = layer.mode in {"int4", "gptq", "awq"} and variable in _PACKED
    if is_packed and tensor.dtype in {"int8", "uint8"}:
        declared["elements"] = 2 * tensor.size
    return replace(tensor, attrs=attrs, declared=declared or None)


def _variable(layer: _Layer, last: str, siblings: Mapping[str, Tensor]) -> str | None:
    """Return the name of a numbered variable, if the class of its layer is known."""
    if not last.isdecimal() or len(last) > 4:
        return None if last.isdecimal() else last
    number, kind = int(last), layer.kind
    if kind == "optimizer":
        return _OPTIMIZER[number] if number < len(_OPTIMIZER) else None
    names = _ROLES.get(kind, ())
    first = siblings.get("0")
    if names and (layer.mode or (first is not None and "float" not in first.dtype)):
        names = _quantised(layer, names, len(siblings))
    elif len(names) == 2 and layer.has_bias is None and len(siblings) >= _FLOAT8_VARIABLES:
        names = _quantised(layer._replace(mode="float8"), names, len(siblings))
    is_complete = len(siblings) == _WHOLE.get(kind, len(siblings))
    return names[number] if number < len(names) and is_complete else None


def _quantised(layer: _Layer, names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return the names of the variables of a quantised layer."""
    if names[0] == "embeddings":
        return _OF_EMBEDDINGS
    if names != _WEIGHTS:
        return names[:1]
    # Without a mode, the first variable has integers, whose scales always follow.
    variables = _MODES[layer.mode or "int4"]
    has_bias = layer.has_bias
    if has_bias is None:
        has_bias = count in ({8} if layer.mode == "float8" else {3, 5})
    return variables if has_bias else tuple([name for name in variables if name != "bias"])


# --- code in a configuration ----------------------------------------------------------------------

_KERAS = {"keras", "tf_keras", "keras_hub", "keras_cv", "keras_nlp", "tensorflow", "builtins"}
# Modules of Keras whose functions load files.
_TOOLS = ("keras.utils", "keras.saving", "keras.models", "keras.config", "keras.preprocessing")
# Keras loads its module with torch.load.
_PICKLED = "TorchModuleWrapper"
_BUILTINS = {"__import__", "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals"}
_BUILTINS |= {"input", "locals", "open", "setattr", "vars"}
_LONGEST = 100


def add_code(config: Any, notes: kit.Notes) -> None:
    """Add the code of a configuration to `notes`."""
    stack = [config]
    while stack:
        value = stack.pop()
        if type(value) is list:
            stack += value
        elif type(value) is dict:
            _add(value, notes)
            stack += value.values()


def _add(entry: dict[str, Any], notes: kit.Notes) -> None:
    kind, inner = entry.get("class_name"), entry.get("config")
    if type(kind) is not str:
        return
    module, registered = entry.get("module"), entry.get("registered_name")
    is_function = kind == "function"
    name = inner if is_function and type(inner) is str else kind
    options = inner if type(inner) is dict else {}
    if kind == "__lambda__":
        notes.executes.append("a lambda of Keras")
    elif kind == "Lambda" and type(options.get("function")) is list:
        layer = shown(str(options.get("name"))[:_LONGEST])
        notes.executes.append(f"a lambda of Keras, layer {layer}")
    elif kind == "Lambda" and type(options.get("module")) is str and is_own(options["module"]):
        # Keras 2 looks for the function in that module.
        function = str(options.get("function"))
        notes.executes.append(f"{options['module'][:_LONGEST]}.{function[:_LONGEST]}")
    elif kind == _PICKLED:
        notes.executes.append(f"the pickle in a {_PICKLED}")
    elif type(module) is str:
        text = f"{module[:_LONGEST]}.{name[:_LONGEST]}"
        if _is_run(module, name, is_function=is_function):
            notes.executes.append(text)
        elif module.partition(".")[0] not in _KERAS:
            notes.imports.append(text)
    if type(registered) is str and ">" in registered and module is None:
        notes.imports.append(registered[:_LONGEST])


def _is_run(module: str, name: str, *, is_function: bool) -> bool:
    """Return whether an object may run code or read files."""
    if module == "builtins":
        # Functions of Keras have this module, too.
        return name in _BUILTINS if is_function else hasattr(builtins, name)
    return is_own(module) or (is_function and module.startswith(_TOOLS))
