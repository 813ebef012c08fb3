"""Names of axes that follow from the facts of a file, for tensors whose axes it does not name.

=======================  ===========================================================================
fact                     names
=======================  ===========================================================================
``uses``                 the inputs of an operator: ``out``, ``in``, ``height``, ``directions``
``class``, ``variable``  a variable of a layer of Keras
``tree``                 a leaf in a tree of Flax, if the leaves next to it agree
sizes of the model       tensors of GGUF and gpt.rs, by name, where an extent equals the size
=======================  ===========================================================================

Formats can also name axes within a module (`Format.module_axes`). These names are dimensions in
trees only, and evidence for channels everywhere.

`channels_by_axes` finds the axes of a weight that its outputs and its inputs run along.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from xckpt.structure.numbering import split_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.structure.facts import ModelFacts

    Axes = tuple[str | None, ...]
    Shape = tuple[int, ...]
    ModuleAxes = Callable[[Mapping[str, Shape]], Mapping[str, Axes]]


class _Tensor(Protocol):
    """A tensor of an `Index`, or a row of a listing."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def declared(self) -> Mapping[str, Any] | None: ...


# --- modules of a format -------------------------------------------------------------------------

_lookups: list[Callable[[str], ModuleAxes | None]] = []
# Words of formats for outputs and inputs.
_CHANNELS = {"d_output": "out", "channels_out": "out", "channels": "out"}
_CHANNELS |= {"d_input": "in", "channels_in": "in"}


def axes_in_modules(tensors: Iterable[_Tensor], facts: ModelFacts) -> dict[str, Axes]:
    """Return the channels of tensors that their format names the axes of, by their module."""
    name_axes = next((lookup(facts.format) for lookup in _lookups), None)
    if name_axes is None:
        return {}
    modules: dict[str, dict[str, tuple[str, Shape]]] = {}
    for tensor in tensors:
        module, _, leaf = split_leaf(tensor.name)
        modules.setdefault(module, {})[leaf] = tensor.name, tensor.shape
    return {
        leaves[leaf][0]: tuple([_CHANNELS.get(axis or "", axis) for axis in axes])
        for leaves in modules.values()
        for leaf, axes in name_axes({leaf: shape for leaf, (_, shape) in leaves.items()}).items()
    }


def name_modules_with(lookup: Callable[[str], ModuleAxes | None]) -> None:
    """Register the function that returns `Format.module_axes` by the name of the format."""
    # It is in a room that imports this one.
    _lookups[:] = [lookup]


# --- facts of tensors ----------------------------------------------------------------------------


def axes_by_facts(tensors: Iterable[_Tensor], facts: ModelFacts) -> dict[str, Axes]:
    """Return the names of the axes of each tensor that the facts name axes of."""
    model_axes = NamedAxes(facts) if facts.naming else None
    axes: dict[str, Axes] = {}
    leaves = []
    for tensor in tensors:
        declared = tensor.declared or {}
        if "axes" in declared:
            continue
        names = None
        if "uses" in declared:
            names = _by_uses(declared, len(tensor.shape))
        elif "class" in declared:
            names = _by_class(declared, len(tensor.shape))
        elif "tree" in declared:
            leaves.append(tensor)
        elif model_axes is not None:
            names = model_axes.of(tensor.name, tensor.shape)
        if names:
            axes[tensor.name] = names
    return axes | _in_trees(leaves) if leaves else axes


# --- operators of a graph ------------------------------------------------------------------------

_PLANES = ("depth", "height", "width")
_IN_OUT = ("in", "out")
# Inputs of operators, by their number of axes.
_OF_INPUTS: dict[tuple[str, int, int], Axes] = {
    ("Gemm", 2, 1): ("out",),
    ("MatMul", 0, 2): ("out", "in"),
    ("MatMul", 1, 2): _IN_OUT,
    ("MatMulInteger", 1, 2): _IN_OUT,
    ("MatMulIntegerToFloat", 1, 2): _IN_OUT,
    ("DynamicQuantizeMatMul", 1, 2): _IN_OUT,
    ("QLinearMatMul", 3, 2): _IN_OUT,
    ("Conv", 2, 1): ("out",),
    ("ConvTranspose", 2, 1): ("out",),
    **{
        (operator, position, 3): ("directions", "out", "in")
        for operator in ("LSTM", "GRU", "RNN")
        for position in (1, 2)
    },
    **{("DynamicQuantizeLSTM", position, 3): ("directions", "in", "out") for position in (1, 2)},
}
_KERNELS = {"Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3}


def _by_uses(declared: Mapping[str, Any], ndim: int) -> Axes | None:
    """Return the axes of a tensor by the operators that use it; None if they disagree."""
    uses = declared["uses"]
    orders = declared.get("orders") or ("kept",) * len(uses)
    settings: Sequence[Mapping[str, int]] = declared.get("settings") or ({},) * len(uses)
    # A tied embedding is gathered from, and transposed for the output: the first counts.
    for order in ("kept", "reversed"):
        axes = {
            _of_input(use, numbers, ndim)
            for use, numbers, use_order in zip(uses, settings, orders, strict=True)
            if use_order == order
        } - {None}
        if axes:
            names = axes.pop()
            is_certain = not axes and names is not None and (order == "kept" or ndim == 2)
            return names[:: 1 if order == "kept" else -1] if is_certain and names else None
    return None


def _of_input(
    use: tuple[str, int, Sequence[str]], numbers: Mapping[str, int], ndim: int
) -> Axes | None:
    operator, position, producers = use
    if operator == "Gemm" and position == 1 and ndim == 2:
        return ("out", "in") if numbers.get("transB") else _IN_OUT
    if operator == "Gather" and (position, ndim, numbers.get("axis", 0)) == (0, 2, 0):
        return _IN_OUT
    if operator == "Add" and ndim == 1:
        return ("out",) if "MatMul" in producers else None
    if _KERNELS.get(operator) == position and 3 <= ndim <= 5:
        channels = _IN_OUT if operator == "ConvTranspose" else ("out", "in")
        return channels + _PLANES[5 - ndim :]
    if operator.endswith("Normalization") and position and ndim == 1:
        return ("out",)
    return _OF_INPUTS.get((operator, position, ndim))


# --- classes of layers ---------------------------------------------------------------------------

_CELLS = ("cell", "lstm_cell", "gru_cell", "lstm", "gru", "simple_rnn")
_PROJECTIONS = ("query", "key", "value")
_OF_VARIABLES: dict[tuple[str, str], Axes] = {
    ("dense", "kernel"): _IN_OUT,
    ("embedding", "embeddings"): _IN_OUT,
    ("reversible_embedding", "embeddings"): _IN_OUT,
    **{(cell, name): _IN_OUT for cell in _CELLS for name in ("kernel", "recurrent_kernel")},
    **{(f"conv{n}d", "kernel"): (*_PLANES[-n:], "in", "out") for n in (1, 2, 3)},
    **{(f"conv{n}d_transpose", "kernel"): (*_PLANES[-n:], "out", "in") for n in (1, 2, 3)},
    **{(f"depthwise_conv{n}d", "kernel"): (*_PLANES[-n:], "in", "multiplier") for n in (1, 2)},
    **{
        (f"separable_conv{n}d", "depthwise_kernel"): (*_PLANES[-n:], "in", "multiplier")
        for n in (1, 2)
    },
    **{(f"separable_conv{n}d", "pointwise_kernel"): (*_PLANES[-n:], *_IN_OUT) for n in (1, 2)},
    **{(f"{role}_dense", "kernel"): ("in", "heads", "head") for role in _PROJECTIONS},
    ("output_dense", "kernel"): ("heads", "head", "out"),
}
_ALONG_OUT = frozenset({"bias", "scale", "alpha", "kernel_scale", "gamma", "beta"})
_ALONG_OUT |= {"moving_mean", "moving_variance"}
# Classes with variables along their outputs, besides those above.
_WITH_OUTPUTS = frozenset({kind for kind, _ in _OF_VARIABLES} | {"einsum_dense", "p_re_lu"})
_WITH_OUTPUTS |= {"batch_normalization", "layer_normalization", "group_normalization"}
_WITH_OUTPUTS |= {"rms_normalization", "normalization", "attention", "additive_attention"}


def _by_class(declared: Mapping[str, Any], ndim: int) -> Axes | None:
    """Return the axes of a variable of a layer; packed codes have other axes than the kernel."""
    kind, variable = declared["class"], declared.get("variable", "")
    names = _OF_VARIABLES.get((kind, variable))
    if names is None and variable in _ALONG_OUT and kind in _WITH_OUTPUTS:
        names = ("out",)
    is_fitting = names is not None and len(names) == ndim and "elements" not in declared
    return names if is_fitting else None


# --- trees of Flax -------------------------------------------------------------------------------

_OF_LEAVES: dict[tuple[str, int], Axes] = {
    ("kernel", 2): _IN_OUT,
    ("kernel", 4): ("height", "width", "in", "out"),
    ("kernel", 5): (*_PLANES, "in", "out"),
    ("embedding", 2): _IN_OUT,
    ("lora_a", 2): ("in", "rank"),
    ("lora_b", 2): ("rank", "out"),
    **{(leaf, 1): ("out",) for leaf in ("scale", "bias", "mean", "var")},
}


def _in_trees(tensors: Sequence[_Tensor]) -> dict[str, Axes]:
    """Return the axes of leaves by their names and ranks, where their neighbours agree."""
    shapes = {(tensor.declared or {})["tree"]: tensor.shape for tensor in tensors}
    # A training state with an axis for devices has it in all tensors.
    if any(path[-1] == "step" and shape for path, shape in shapes.items()):
        return {}
    axes = {path: _of_leaf(path, shape, shapes) for path, shape in shapes.items()}
    # If `nn.scan` repeats a module, its neighbours have as many layers.
    layers = {path[:-2]: shapes[path][0] for path, names in axes.items() if names[:1] == _LAYERS}
    axes_by_name = {}
    for tensor in tensors:
        path = (tensor.declared or {})["tree"]
        names, shape = axes[path], tensor.shape
        is_vector = len(shape) == 2 and (path[-1], 1) in _OF_LEAVES
        if is_vector and layers.get(path[:-2]) == shape[0]:
            names = ("layers", "out")
        if names:
            axes_by_name[tensor.name] = names
    return axes_by_name


_LAYERS = ("layers",)


def _of_leaf(path: Sequence[str], shape: Shape, shapes: Mapping[Any, Shape]) -> Axes:
    """Return the names of the axes of a leaf, none if they are not certain."""
    *module, leaf = path
    if leaf != "kernel" or len(shape) != 3:
        return _OF_LEAVES.get((leaf, len(shape)), ())
    bias = shapes.get((*module, "bias"))
    if module[-1:] == ["out"] and (*module[:-1], "query", "kernel") in shapes:
        return ("heads", "head", "out")
    if module and module[-1] in _PROJECTIONS:
        return ("in", "heads", "head") if bias == shape[1:] else ()
    if bias is None or bias == shape[2:]:
        return ("width", "in", "out")
    return ("layers", "in", "out") if bias == (shape[0], shape[2]) else ()


# --- channels -------------------------------------------------------------------------------------

# A projection to heads has two axes of outputs.
_HEADS = ("heads", "head")
# Axes of several matrices in one tensor.
_SEVERAL = frozenset({"directions", "layers", "experts", "expert"})
_TORCH_KERNEL = re.compile(r"(^|[./])(weight|weight_v)$")
_CONV = re.compile(r"conv|proj_in|patch_embed", re.IGNORECASE)


class Channels(NamedTuple):
    """The axes of a tensor that its rows and its columns run along; others are within a channel."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    #: Whether rows are known to be output channels, and columns input channels.
    are_known: bool = False


def channels_by_axes(axes: Sequence[str | None]) -> Channels | None:
    """Return the channels of a weight by the names of its axes; None if the names are unknown."""
    place = {name: position for position, name in enumerate(axes) if name is not None}
    heads = tuple([place[name] for name in _HEADS if name in place])
    several = tuple([place[name] for name in axes if name in _SEVERAL])
    if "out" in place and ("in" in place or heads):
        columns = (place["in"],) if "in" in place else heads
        return Channels((*several, place["out"]), columns, are_known=True)
    if "in" in place and heads:
        return Channels(heads, (place["in"],), are_known=True)
    if "in" in place and "multiplier" in place:  # a kernel for each channel
        return Channels((place["in"], place["multiplier"]), (), are_known=True)
    return None


def channels_of_family(axes: Sequence[str | None], outputs: int, inputs: int) -> Channels:
    """Return the channels of a weight whose family states its outputs and inputs."""
    several = [position for position, name in enumerate(axes) if name in _SEVERAL]
    return Channels((*several, outputs), (inputs,), are_known=True)


def channels_by_name(name: str, ndim: int) -> Channels | None:
    """Return the channels of a kernel of PyTorch, which begins with its outputs."""
    is_kernel = ndim in {4, 5} or (ndim == 3 and _CONV.search(name) is not None)
    if is_kernel and _TORCH_KERNEL.search(name):
        return Channels((0,), (1,), are_known=True)
    return None


# --- sizes of the model ---------------------------------------------------------------------------

# Names never follow from sizes alone, since sizes collide. ``a*b`` is the product of two sizes,
# ``a/2`` the half of one.

_LARGEST = 1 << 62


class NamedAxes:
    """The axes of the tensors of one model, by their names and the sizes of the model."""

    def __init__(self, facts: ModelFacts) -> None:
        self._of: dict[tuple[str, Shape], Axes | None] = {}
        self._model = _Gguf(facts) if facts.naming == "gguf" else _GptRs(facts)

    def of(self, name: str, shape: Shape) -> Axes | None:
        """Return the names of the axes whose extents are sizes of the model; None without names."""
        key = self._model.form(name), shape
        if key not in self._of:
            axes, sizes = self._model.axes(key[0])
            fitting = axes is not None and len(axes) == len(shape)
            names = [
                axis if axis is not None and sizes.get(axis) == extent else None
                for axis, extent in zip(axes or (), shape, strict=False)
            ]
            self._of[key] = tuple(names) if fitting and any(names) else None
        return self._of[key]


# --- GGUF ----------------------------------------------------------------------------------------

# Names of axes by the name of a tensor, without its block and `.weight`.
_Q, _K, _V, _O = "head*key", "head_kv*key", "head_kv*value", "head*value"
_OF_STEMS: dict[str, Axes] = {
    "token_embd": ("vocab", "embd"),
    "output": ("vocab", "embd"),
    "position_embd": ("context", "embd"),
    "rope_freqs": ("rope/2",),
    "attn_q": (_Q, "embd"),
    "attn_k": (_K, "embd"),
    "attn_v": (_V, "embd"),
    "attn_qkv": ("qkv", "embd"),
    "attn_output": ("embd", _O),
    "attn_q_norm": ("key",),
    "attn_k_norm": ("key",),
    "attn_q_a": ("q_lora", "embd"),
    "attn_q_b": (_Q, "q_lora"),
    "attn_kv_a_mqa": ("kv_lora+rope", "embd"),
    "attn_k_b": ("head", "kv_lora", None),
    "attn_v_b": ("head", "value", "kv_lora"),
    "ffn_gate": ("ff", "embd"),
    "ffn_up": ("ff", "embd"),
    "ffn_down": ("embd", "ff"),
    "ffn_gate_inp": ("expert", "embd"),
    "ffn_gate_exps": ("expert", "ff_exp", "embd"),
    "ffn_up_exps": ("expert", "ff_exp", "embd"),
    "ffn_down_exps": ("expert", "embd", "ff_exp"),
    "ffn_gate_shexp": ("ff_shexp", "embd"),
    "ffn_up_shexp": ("ff_shexp", "embd"),
    "ffn_down_shexp": ("embd", "ff_shexp"),
    "ssm_in": (None, "embd"),
    "ssm_conv1d": ("inner", "conv"),
    "ssm_x": ("dt+2*state", "inner"),
    "ssm_dt": ("inner", "dt"),
    "ssm_a": ("inner", "state"),
    "ssm_out": ("embd", "inner"),
}
_NORMS = frozenset(["attn_q_a_norm", "attn_kv_a_norm", "ssm_norm", "ssm_dt_norm"])
_NAME = re.compile(r"(?:blk\.(?P<layer>[0-9]{1,6})\.)?(?P<stem>[a-z0-9_]+)\.(?P<kind>weight|bias)")
_BLOCK = re.compile(r"(?<=^blk\.)[0-9]{1,6}(?=\.)")


class _Gguf:
    """Tensors by the names of llama.cpp; sizes can differ from layer to layer."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._sizes_by_layer: dict[int | None, dict[str, int]] = {}

    def form(self, name: str) -> str:
        """Return what tensors with the same axes have in common."""
        return name if self._facts.by_layer else _BLOCK.sub("0", name)

    def axes(self, form: str) -> tuple[Axes | None, Mapping[str, int]]:
        """Return the axes of a tensor, and the sizes of its layer."""
        match = _NAME.fullmatch(form)
        if match is None:
            return None, {}
        layer, stem, kind = match.groups()
        axes = _OF_STEMS.get(stem)
        if axes is None:
            axes = ("embd",) if stem.endswith("_norm") and stem not in _NORMS else None
        elif kind == "bias":
            axes = axes[:1]
        number = int(layer) if layer and self._facts.by_layer else None
        if number not in self._sizes_by_layer:
            self._sizes_by_layer[number] = self._sizes(number)
        return axes, self._sizes_by_layer[number]

    def _sizes(self, layer: int | None) -> dict[str, int]:
        sizes = dict(self._facts.sizes)
        for axis, by_layer in self._facts.by_layer.items():
            size = by_layer[layer] if layer is not None and layer < len(by_layer) else None
            if type(size) is int and size > 0:
                sizes[axis] = size
        head, embd = sizes.get("head", 0), sizes.get("embd", 0)
        if head:
            sizes.setdefault("head_kv", head)
            sizes.setdefault("key", embd // head)
            sizes.setdefault("value", embd // head)
        get = sizes.get
        head_kv, key, value = get("head_kv", 0), get("key", 0), get("value", 0)
        sizes.setdefault("ff_exp", get("ff", 0))
        return sizes | {
            _Q: head * key,
            _K: head_kv * key,
            _V: head_kv * value,
            _O: head * value,
            "qkv": (head + head_kv) * key + head_kv * value,
            "rope/2": get("rope", 0) // 2,
            "kv_lora+rope": get("kv_lora", 0) + get("rope", 0),
            "dt+2*state": get("dt", 0) + 2 * get("state", 0),
        }


# --- gpt.rs --------------------------------------------------------------------------------------

# Axes by kind and name of the tensor, where "*" is the number of a block. The number is not checked
# against the config, because unused tensors have the same axes. The weights of transformers are
# [in, out]; the classifiers of vision models are [out, in]. The channels and kernels of
# convolutions have no names, because they differ from layer to layer.
_TRANSFORMER: Mapping[str, Axes] = {
    "tok_embeddings.weight": ("vocab_size", "embed_dim"),
    "blocks.*.attention.w_qkv": ("embed_dim", "qkv_dim"),
    "blocks.*.attention.w_out": ("attn_dim", "embed_dim"),
    "lm_head": ("embed_dim", "vocab_size"),
}
_OF_KINDS: Mapping[str, Mapping[str, Axes]] = {
    "gpt": {
        **_TRANSFORMER,
        "pos_embeddings": ("context_length", "embed_dim"),
        "blocks.*.attention.b_qkv": ("qkv_dim",),
        "blocks.*.attention.b_out": ("embed_dim",),
        "blocks.*.feed_forward.w_in": ("embed_dim", "mlp_hidden_dim"),
        "blocks.*.feed_forward.b_in": ("mlp_hidden_dim",),
        "blocks.*.feed_forward.w_out": ("mlp_hidden_dim", "embed_dim"),
        "blocks.*.feed_forward.b_out": ("embed_dim",),
        **{
            f"{norm}.{kind}": ("embed_dim",)
            for norm in ("blocks.*.ln_1", "blocks.*.ln_2", "final_ln")
            for kind in ("gamma", "beta")
        },
    },
    "ministral": {
        **_TRANSFORMER,
        "blocks.*.feed_forward.w_gate": ("embed_dim", "mlp_hidden_dim"),
        "blocks.*.feed_forward.w_up": ("embed_dim", "mlp_hidden_dim"),
        "blocks.*.feed_forward.w_down": ("mlp_hidden_dim", "embed_dim"),
        "blocks.*.norm_1.gamma": ("embed_dim",),
        "blocks.*.norm_2.gamma": ("embed_dim",),
        "final_norm.gamma": ("embed_dim",),
    },
    "resnet34": {"fc.weight": ("num_classes", "in_features"), "fc.bias": ("num_classes",)},
    "mobilenet_v2": {
        "classifier.weight": ("num_classes", "in_features"),
        "classifier.bias": ("num_classes",),
    },
}
# Sizes by kind and name of an axis: a sum of products of numbers and keys of the config.
_SUMS: Mapping[str, Mapping[str, str]] = {
    "gpt": {
        "vocab_size": "vocab_size",
        "context_length": "context_length",
        "embed_dim": "embed_dim",
        "attn_dim": "embed_dim",
        "qkv_dim": "3 * embed_dim",
        "mlp_hidden_dim": "embed_dim * mlp_ratio",
    },
    "ministral": {
        "vocab_size": "vocab_size",
        "embed_dim": "embed_dim",
        "attn_dim": "num_heads * head_dim",
        "qkv_dim": "num_heads * head_dim + 2 * num_kv_heads * head_dim",
        "mlp_hidden_dim": "mlp_hidden_dim",
    },
    "resnet34": {"num_classes": "num_classes", "in_features": "512"},
    "mobilenet_v2": {"num_classes": "num_classes", "in_features": "1280"},
}
# Optional keys by kind, with the keys whose quotient is their default.
_QUOTIENTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "ministral": {"head_dim": ("embed_dim", "num_heads")}
}
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")


class _GptRs:
    """Tensors by the names of gpt.rs."""

    def __init__(self, facts: ModelFacts) -> None:
        self._axes = _OF_KINDS.get(facts.family, {})
        self._sizes = _sizes_of_kind(facts.family, facts.config)

    def form(self, name: str) -> str:
        """Return what tensors with the same axes have in common."""
        return _NUMBER.sub("*", name)

    def axes(self, form: str) -> tuple[Axes | None, Mapping[str, int]]:
        """Return the axes of a tensor, and the sizes of the model."""
        return self._axes.get(form), self._sizes


def _sizes_of_kind(kind: str, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of each axis that the config determines."""
    counts = {key: n for key, n in config.items() if type(n) is int and 0 < n <= _LARGEST}
    for key, (dividend, divisor) in _QUOTIENTS.get(kind, {}).items():
        if config.get(key) is None and {dividend, divisor} <= counts.keys():
            quotient, remainder = divmod(counts[dividend], counts[divisor])
            if quotient and not remainder:
                counts[key] = quotient
    sizes = {}
    for name, text in _SUMS.get(kind, {}).items():
        terms = [
            [int(word) if word.isdigit() else counts.get(word) for word in term.split(" * ")]
            for term in text.split(" + ")
        ]
        products = [prod([factor for factor in term if factor is not None]) for term in terms]
        if not any(None in term for term in terms):
            sizes[name] = sum(products)
    return sizes
