"""Conclusions from the facts that a file states about a tensor.

`Tensor.declared` has facts, not conclusions; the rules are here, once for all formats:

================  ==================================================================================
fact              meaning
================  ==================================================================================
``uses``          operators of a graph that use the tensor: for each the name, the position among
                  the inputs, and the operators that compute the other inputs
``node``          name of the first of them, which often is the path of a module
``constant``      True for the value of a node, rather than an initializer
``attribute``     True for a tensor in an attribute of a node
``class``         class of the layer in snake case, such as ``"conv2d"`` or
                  ``"batch_normalization"``
``variable``      name of the variable in the layer, such as ``"kernel"``
``layer``         name of the layer
``orders``        for each of ``uses``, ``"kept"`` if the operator sees the axes of the tensor,
                  ``"reversed"`` if it sees them in reverse, else None
``settings``      for each of ``uses``, the attributes of the operator that are integers
``tree``          path of a leaf in a tree of Flax
``module_class``  class in the name of a module of Flax (``Dense_0``), in snake case
``elements``      number of elements before they are packed, for codes of less than a byte
``parameter_of``  what lists the tensor as a parameter: ``"optimizer"`` or ``"module"``
``buffer_of``     what lists it as a buffer, which is not trained: ``"module"``
``user``          fields that the user corrects, with their values
``axes``          names of the axes, such as ``("in", "out")``; empty if they are unknown
================  ==================================================================================
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.structure.info import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from xckpt.index import Tensor

    Use = tuple[str, int, tuple[str, ...]]


#: Names of the facts that formats can hand over.
FACTS = frozenset({
    "uses", "orders", "settings", "node", "constant", "attribute", "class", "variable", "layer",
    "elements", "tree", "module_class", "parameter_of", "buffer_of",
})  # fmt: skip


class Conclusion(NamedTuple):
    """Conclusions from the facts about a tensor."""

    #: None if the facts leave it open.
    role: Role | None = None
    module_type: str = ""
    param: str = ""
    #: The fact that decided.
    reason: str = ""


def conclude(
    declared: Mapping[str, Any],
    dtype: str,
    shape: tuple[int, ...],
    *,
    has_weights_in_nodes: bool = False,
) -> Conclusion:
    """Return what follows from the facts about a tensor."""
    # `has_weights_in_nodes` is true if values of nodes are weights in this file.
    if "uses" in declared:
        is_constant = bool(declared.get("constant")) and not has_weights_in_nodes
        return _from_uses(declared["uses"], dtype, shape, is_constant=is_constant)
    if declared.get("attribute"):
        return Conclusion(Role.CONSTANT, reason="attribute of a node")
    if "parameter_of" in declared and dtype in TRAINED:
        reason = f"parameter of the {declared['parameter_of']}"
        return Conclusion(Role.WEIGHT, reason=reason)
    if "class" in declared:
        return _from_class(declared["class"], declared.get("variable") or "", dtype)
    if "module_class" in declared:
        # The state of an optimizer is in modules of the same names.
        variable = declared["tree"][-1]
        return _from_class(declared["module_class"], variable, dtype)._replace(role=None)
    return Conclusion()


#: Element types of parameters that are not codes.
TRAINED = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128"})

# --- facts that objects keep ----------------------------------------------------------------------

_USED_BY = re.compile(r"(?P<node>.*): (?P<operator>\w+)\[(?P<position>[0-9]{1,4})\]", re.DOTALL)
_NUMBER = re.compile(r"_[0-9]+$")
# Names of axes from which channels follow.
_AXES = frozenset({"out", "in", "heads", "head", "multiplier", "directions", "layers"})


def facts_kept(attrs: Mapping[Any, Any], dims: Iterable[Any]) -> dict[str, Any] | None:
    """Return the facts that follow from the attributes and dimensions of a computed variable."""
    # Operations of xarray drop encodings and keep attributes, which `save` also writes.
    facts: dict[str, Any] = {}
    use = attrs.get("used_by")
    if isinstance(use, str) and (match := _USED_BY.fullmatch(use)):
        facts["uses"] = ((match["operator"], int(match["position"]), ()),)
        facts["node"] = match["node"]
    layer, variable = attrs.get("layer"), attrs.get("variable")
    if isinstance(layer, str) and isinstance(variable, str):
        facts |= {"layer": layer, "class": _NUMBER.sub("", layer), "variable": variable}
    axes = tuple([str(dim) for dim in dims])
    if not _AXES.isdisjoint(axes):
        facts["axes"] = axes
    elif facts:
        facts["axes"] = ()  # unknown: the values may have been computed along other axes
    return facts or None


def facts_of(tensor: Tensor) -> Mapping[str, Any] | None:
    """Return the facts that a file states about a tensor, also those that `save` made attributes.

    None without facts.
    """
    if tensor.declared is None and tensor.attrs:
        return facts_kept(tensor.attrs, tensor.dims or ()) or tensor.facts
    return tensor.facts


# --- operators of a graph ------------------------------------------------------------------------

# The inputs of each operator; the last letter counts for all further inputs in `_REPEATED`.
#   w weight   b bias   m running statistic   c codes   s scale or zero point of codes
#   k constant of the graph   e operand of arithmetic   g table to gather from   - anything else
_INPUTS = {
    **dict.fromkeys(("Conv", "ConvTranspose", "FusedConv", "NhwcConv", "DeformConv"), "-wb"),
    **dict.fromkeys(("MatMul", "FusedMatMul", "TransposeMatMul", "Einsum"), "ww"),
    **dict.fromkeys(("Gemm", "FusedGemm"), "wwb"),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), "-wwbkkkw"),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization", "InstanceNormalization"), "-wb"),
    **dict.fromkeys(("RMSNormalization", "SimplifiedLayerNormalization", "PRelu"), "-w"),
    **dict.fromkeys(("BiasGelu", "FastGelu"), "-b"),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), "ee"),
    **dict.fromkeys(("Max", "Min", "Sum", "Mean"), "kk"),
    **dict.fromkeys(("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"), "kk"),
    **dict.fromkeys(("And", "Or", "Xor", "Pow", "Mod", "BitShift", "Not"), "kk"),
    **dict.fromkeys(("Reshape", "Unsqueeze", "Squeeze", "Split", "TopK", "Trilu", "CumSum"), "-k"),
    **dict.fromkeys(("Upsample", "GatherND", "GatherElements", "Expand", "Tile", "Compress"), "-k"),
    **dict.fromkeys(("Slice", "Resize", "Pad", "Clip", "Dropout", "RotaryEmbedding"), "-kkkk"),
    **dict.fromkeys(("ScatterND", "ScatterElements", "NonMaxSuppression"), "-kkkk"),
    **dict.fromkeys(("STFT", "DFT"), "-kkk"),
    **dict.fromkeys(("Range", "OneHot", "MelWeightMatrix", "HannWindow", "If", "Loop"), "kkkkk"),
    **dict.fromkeys(("ConstantOfShape", "HammingWindow", "BlackmanWindow", "EyeLike"), "k"),
    **dict.fromkeys(("QLinearMatMul", "QLinearAdd", "QLinearMul"), "csscssss"),
    **dict.fromkeys(("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax"), "-ssss"),
    **dict.fromkeys(("QLinearAveragePool", "QLinearGlobalAveragePool"), "-ssss"),
    "Attention": "-wbk",
    "BatchNormalization": "-wbmm",
    "Concat": "tt",
    "ConvInteger": "-css",
    "DequantizeLinear": "css",
    "DynamicQuantizeLSTM": "-ccbkkkwssss",
    "DynamicQuantizeMatMul": "-cssb",
    "EmbedLayerNormalization": "kkwwwwbk",
    "Gather": "gk",
    "GatherBlockQuantized": "ckss",
    "GroupQueryAttention": "-----kkkk",
    "MatMulInteger": "ccss",
    "MatMulIntegerToFloat": "ccssssb",
    "MatMulNBits": "-csssb",
    "MultiHeadAttention": "---bk",
    "QAttention": "-cbsskss",
    "QEmbedLayerNormalization": "kkcccbbkssssssssss",
    "QGemm": "-sscssbss",
    "QLinearConv": "-sscssssb",
    "QuantizeLinear": "wss",
    "SkipLayerNormalization": "--wbb",
    "SkipSimplifiedLayerNormalization": "--wb",
    "Where": "kee",
}
_REPEATED = frozenset({"Max", "Min", "Sum", "Mean", "Concat", "Einsum", "If", "Loop"})
# Types of modules by words in the name of an operator.
_MODULES = (
    ("Normalization", "norm"),
    ("Conv", "convolution"),
    ("LSTM", "recurrent"),
    ("GRU", "recurrent"),
    ("RNN", "recurrent"),
    ("Attention", "attention"),
    ("Gather", "embedding"),
    ("Embed", "embedding"),
    ("MatMul", "linear"),
    ("Gemm", "linear"),
    ("Einsum", "linear"),
)
#: Operators whose result gets a bias.
PRODUCTS = re.compile(r"(Q?Linear)?\w*(MatMul|Gemm|Conv|Einsum)\w*")
# Operators that compute the scale of an activation.
_QUANTISERS = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
_ROLES = {
    "w": Role.WEIGHT,
    "b": Role.WEIGHT,
    "m": Role.STATISTIC,
    "c": Role.CODES,
    "s": Role.SCALE,
    "k": Role.CONSTANT,
}
# If a tensor has several uses, the first of these letters decides.
_RANK = "scmwbgetk-"
_INTEGER = re.compile(r"u?int[0-9]+|bool|string")


def _from_uses(
    uses: tuple[Use, ...], dtype: str, shape: tuple[int, ...], *, is_constant: bool
) -> Conclusion:
    letters = [(_letter(operator, position), operator, position, producers) for
               operator, position, producers in uses]  # fmt: skip
    letter, operator, position, producers = min(letters, key=lambda use: _RANK.index(use[0]))
    reason = f"{operator}[{position}]"
    module_type = next((kind for kind in map(_module_type, uses) if kind), "")
    size = prod(shape)
    is_integer = _INTEGER.fullmatch(dtype) is not None
    role = _ROLES.get(letter)
    if letter == "e":
        role = _operand_role(operator, producers, size, is_constant=is_constant or is_integer)
    elif letter == "t":
        role = Role.CONSTANT if is_integer or size <= 1 else None
    elif letter == "g":
        is_table = len(shape) > 1 and (
            not is_integer or dtype in {"int8", "uint8", "int4", "uint4"}
        )
        role = (Role.CODES if is_integer else Role.WEIGHT) if is_table else None
        role = Role.CONSTANT if role is None and is_integer else role
    elif letter in {"w", "b"} and is_integer:
        role = Role.CODES if letter == "b" else None
    elif letter == "c" and not (is_integer or dtype.startswith(("float4", "float6", "float8"))):
        role = Role.WEIGHT  # its values are decoded
    if role in {Role.CONSTANT, Role.SCALE, None}:
        module_type = ""
    param = {"b": "bias", "w": "weight", "c": "weight", "g": "weight"}.get(letter, "")
    if letter == "m":
        param = ("running_mean", "running_var")[position - _INPUTS[operator].index("m")]
    if letter == "e" and role is Role.WEIGHT:
        param = "bias" if operator == "Add" else "weight"
    return Conclusion(role, module_type, param, reason)


def _letter(operator: str, position: int) -> str:
    inputs = _INPUTS.get(operator)
    if inputs is None:
        # ReduceMean and others take their axes as a tensor.
        return "k" if operator.startswith(("Reduce", "ArgM")) and position else "-"
    if position < len(inputs):
        return inputs[position]
    return inputs[-1] if operator in _REPEATED else "-"


def _module_type(use: Use) -> str:
    operator, position, producers = use
    letter = _letter(operator, position)
    if letter == "e" and operator == "Add":
        operator = next(filter(PRODUCTS.fullmatch, producers), "")
    elif letter not in {"w", "b", "c", "m", "g"}:
        return ""
    return next((kind for word, kind in _MODULES if word in operator), "")


def _operand_role(
    operator: str, producers: tuple[str, ...], size: int, *, is_constant: bool
) -> Role | None:
    """Return the role of an operand of arithmetic."""
    if operator == "Mul" and not _QUANTISERS.isdisjoint(producers):
        return Role.SCALE  # of an activation times that of the weight
    if operator == "Add" and any(map(PRODUCTS.fullmatch, producers)):
        return Role.WEIGHT
    if is_constant or size <= 1 or (operator in {"Sub", "Div"} and "" in producers):
        return Role.CONSTANT
    return Role.WEIGHT if operator in {"Add", "Mul"} else None


# --- classes of layers ---------------------------------------------------------------------------

_STATISTICS = frozenset({"moving_mean", "moving_variance", "mean", "variance", "count"})
_OF_CODES = re.compile(r"\w+_(scale|zero|amax_history)|awq_scales|g_idx")
_OF_GENERATORS = re.compile(r"seed(_generator)?(_state)?")
_CLASSES = (
    ("norm", "norm"),
    ("conv", "convolution"),
    ("embed", "embedding"),
    ("attention", "attention"),
    ("lstm", "recurrent"),
    ("gru", "recurrent"),
    ("rnn", "recurrent"),
    ("cell", "recurrent"),
    ("dense", "linear"),
)
_PARAMS = {
    "gamma": "weight",
    "beta": "bias",
    "kernel": "weight",
    "embedding": "weight",
    "embeddings": "weight",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def _from_class(name: str, variable: str, dtype: str) -> Conclusion:
    module_type = next((kind for word, kind in _CLASSES if word in name), "")
    reason = f"{name}: {variable}" if variable else name
    is_gain = variable == "scale" and module_type == "norm"
    param = "weight" if is_gain else _PARAMS.get(variable, variable)
    role: Role | None = None
    if _OF_GENERATORS.fullmatch(variable) or name == "seed_generator":
        role = Role.STATE
    elif module_type == "norm" and variable in _STATISTICS:
        role = Role.STATISTIC
    elif _OF_CODES.fullmatch(variable):
        role = Role.SCALE
    elif name != "optimizer" and variable and module_type:
        is_code = _INTEGER.fullmatch(dtype) is not None or dtype.startswith("float8")
        role = Role.CODES if is_code else Role.WEIGHT
    return Conclusion(role, module_type, param, reason)


_LISTS = ("parameter_of", "buffer_of")


def describe_facts(declared: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts about a tensor as short texts."""
    for operator, position, _ in declared.get("uses", ()):
        yield f"{operator}[{position}]"
    for key in ("class", "variable", "layer", "node", *_LISTS, "module_class"):
        if declared.get(key):
            yield f"{key.replace('_', ' ')} {declared[key]}"
