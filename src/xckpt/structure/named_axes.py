"""Names of axes of models whose metadata state the sizes: GGUF and gpt.rs.

An axis gets its name only if its extent equals the stated size; names are never derived from sizes
alone, since sizes collide. ``a*b`` is the product of two sizes, ``a/2`` the half of one.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.structure.facts import ModelFacts

    Axes = tuple[str | None, ...]
    Shape = tuple[int, ...]

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
#: Kinds of models of gpt.rs whose axes have names.
KINDS = frozenset(_OF_KINDS)


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
