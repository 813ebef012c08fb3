"""Names of the axes of a model's tensors, from what its metadata say of their sizes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from xckpt.index import StoredList

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AxisSizes"]

# By the name of a tensor without its block and without `.weight`. An axis has a name if it has the
# size that the metadata say; `a*b` is a product of two.
_Q, _K, _V, _O = "head*key", "head_kv*key", "head_kv*value", "head*value"
_AXES = {
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
_SIZES = {
    "embd": "embedding_length",
    "ff": "feed_forward_length",
    "vocab": "vocab_size",
    "context": "context_length",
    "head": "attention.head_count",
    "head_kv": "attention.head_count_kv",
    "key": "attention.key_length",
    "value": "attention.value_length",
    "q_lora": "attention.q_lora_rank",
    "kv_lora": "attention.kv_lora_rank",
    "expert": "expert_count",
    "ff_exp": "expert_feed_forward_length",
    "ff_shexp": "expert_shared_feed_forward_length",
    "rope": "rope.dimension_count",
    "conv": "ssm.conv_kernel",
    "inner": "ssm.inner_size",
    "state": "ssm.state_size",
    "dt": "ssm.time_step_rank",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>[0-9]{1,6})\.)?(?P<stem>[a-z0-9_]+)\.(?P<kind>weight|bias)")


class AxisSizes:
    """What the axes of a model's tensors are called, and how long they are."""

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        of = attrs.get("general.architecture")
        found = {axis: attrs.get(f"{of}.{key}") for axis, key in _SIZES.items()}
        tokens = attrs.get("tokenizer.ggml.tokens")
        if found["vocab"] is None and isinstance(tokens, list | StoredList):
            found["vocab"] = len(tokens)
        self._stated = {axis: value for axis, value in found.items() if value is not None}
        self._by_layer = any(type(value) is list for value in self._stated.values())
        self._known: dict[int | None, dict[str, int]] = {}
        self._is_empty = not self._stated

    def dims(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
        """Name the axes of a tensor whose sizes are those of the model."""
        match = None if self._is_empty else _NAME.fullmatch(name)
        if match is None:
            return None
        layer, stem, kind = match.groups()
        axes = _AXES.get(stem)
        if axes is None:
            if not stem.endswith("_norm") or stem in _NORMS:
                return None
            axes = ("embd",)
        elif kind == "bias":
            axes = axes[:1]
        if len(axes) != len(shape):
            return None
        sizes = self._of_layer(int(layer) if layer and self._by_layer else None)
        named = [a if a and sizes.get(a) == n else None for a, n in zip(axes, shape, strict=True)]
        return tuple(named) if any(named) else None

    def _of_layer(self, layer: int | None) -> dict[str, int]:
        if layer not in self._known:
            self._known[layer] = self._sizes(layer)
        return self._known[layer]

    def _sizes(self, layer: int | None) -> dict[str, int]:
        found: dict[str, int] = {}
        for axis, value in self._stated.items():
            size = value
            if type(value) is list and layer is not None and layer < len(value):
                size = value[layer]
            if type(size) is int and size > 0:
                found[axis] = size
        head, embd = found.get("head", 0), found.get("embd", 0)
        if head:
            found.setdefault("head_kv", head)
            found.setdefault("key", embd // head)
            found.setdefault("value", embd // head)
        of = found.get
        head_kv, key, value = of("head_kv", 0), of("key", 0), of("value", 0)
        found.setdefault("ff_exp", of("ff", 0))
        return found | {
            _Q: head * key,
            _K: head_kv * key,
            _V: head_kv * value,
            _O: head * value,
            "qkv": (head + head_kv) * key + head_kv * value,
            "rope/2": of("rope", 0) // 2,
            "kv_lora+rope": of("kv_lora", 0) + of("rope", 0),
            "dt+2*state": of("dt", 0) + 2 * of("state", 0),
        }
