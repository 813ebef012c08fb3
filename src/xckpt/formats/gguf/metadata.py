"""Metadata of GGUF: types of values, their encoding, and names of axes that follow from them."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

from xckpt.formats import kit
from xckpt.index import StoredList

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# --- types, and writing ---------------------------------------------------------------------------

BOOL, TEXT, LIST = 7, 8, 9
DEEPEST = 16  # levels of lists
NUMBERS = {0: ("uint8", "B"), 1: ("int8", "b"), 2: ("uint16", "H"), 3: ("int16", "h")}
NUMBERS |= {4: ("uint32", "I"), 5: ("int32", "i"), 6: ("float32", "f"), 7: ("bool", "B")}
NUMBERS |= {10: ("uint64", "Q"), 11: ("int64", "q"), 12: ("float64", "d")}
_CODES = {dtype: (kind, code) for kind, (dtype, code) in NUMBERS.items()}


def default_type(values: Sequence[Any], *, in_list: bool) -> str | None:
    """Return the type that numbers are written with by default; None if they are not numbers."""
    kinds = {*map(type, values)}
    types: tuple[str, ...]
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        types = ("int32", "uint32", "int64", "uint64")
        types = types if in_list else ("uint32", "int32", "uint64", "int64")
    elif kinds <= {int, float} and values:
        types = ("float32", "float64")
    else:
        return None if values else "int32"
    return next((dtype for dtype in types if _packed(dtype, values) is not None), None)


def _packed(dtype: str, values: Sequence[Any]) -> bytes | None:
    """Return the bytes of numbers as a type; None if the type does not hold their values."""
    layout = struct.Struct(f"<{len(values)}{_CODES[dtype][1]}")
    try:
        data = layout.pack(*values)
    except (struct.error, OverflowError):
        return None
    if dtype == "float32":
        pairs = zip(layout.unpack(data), values, strict=True)
        if any(a != b and (a == a or b == b) for a, b in pairs):  # noqa: PLR0124  NaN
            return None
    return data


def entry(key: str, value: Any, dtype: str | None) -> bytes:
    """Encode an attribute, with its former type `dtype` if that still holds its value."""
    name = kit.check_text("the attribute", key).encode()
    body = None if kit.is_deeper(value, DEEPEST) else _encoded(value, dtype)
    if body is None:
        body = _encoded(kit.check_text("an attribute", kit.as_text(key, value)), None) or b""
    return struct.pack("<Q", len(name)) + name + body


def _encoded(value: Any, dtype: str | None) -> bytes | None:
    """Return a value with its type; None if GGUF has no such type."""
    if _is_text(value):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, bool | int | float):
        chosen, data = _as_numbers([value], dtype, in_list=False)
        return None if data is None else struct.pack("<I", _CODES[chosen][0]) + data
    if not isinstance(value, list | tuple):
        return None
    if all(map(_is_text, value)) and (value or dtype == "text"):
        head = struct.pack("<IIQ", LIST, TEXT, len(value))
        return head + b"".join([_text(text) for text in value])
    chosen, data = _as_numbers(value, dtype, in_list=True)
    if data is None:
        return None
    return struct.pack("<IIQ", LIST, _CODES[chosen][0], len(value)) + data


def _as_numbers(
    values: Sequence[Any], dtype: str | None, *, in_list: bool
) -> tuple[str, bytes | None]:
    """Return a type and the bytes of numbers: their former type `dtype` if it still holds them."""
    kinds = {*map(type, values)}
    if not kinds <= {bool, int, float} or (bool in kinds and len(kinds) > 1):
        return "", None
    is_same = (dtype == "bool") == (kinds == {bool}) or not values
    if dtype in _CODES and is_same and (float in kinds) <= dtype.startswith("float"):
        data = _packed(dtype, values)
        if data is not None:
            return dtype, data
    chosen = default_type(values, in_list=in_list)
    return ("", None) if chosen is None else (chosen, _packed(chosen, values))


def _is_text(value: Any) -> bool:
    """Return whether a value is a text, or bytes that a reader would not decode as UTF-8."""
    if not isinstance(value, bytes):
        return isinstance(value, str)
    try:
        value.decode()
    except UnicodeDecodeError:
        return True
    return False


def _text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else kit.check_text("an attribute", value).encode()
    return struct.pack("<Q", len(data)) + data


# --- names of axes --------------------------------------------------------------------------------

# Names of axes by the name of a tensor, without its block and `.weight`. An axis gets its name if
# its extent equals the size in the metadata; `a*b` is the product of two sizes.
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
    """The names and sizes of axes, from the metadata of a model."""

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        architecture = attrs.get("general.architecture")
        stated = {axis: attrs.get(f"{architecture}.{key}") for axis, key in _SIZES.items()}
        tokens = attrs.get("tokenizer.ggml.tokens")
        if stated["vocab"] is None and isinstance(tokens, list | StoredList):
            stated["vocab"] = len(tokens)
        self._stated = {axis: value for axis, value in stated.items() if value is not None}
        self._by_layer = any(type(value) is list for value in self._stated.values())
        self._sizes_by_layer: dict[int | None, dict[str, int]] = {}

    def dims(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
        """Return the names of a tensor's axes if their extents match the sizes of the model."""
        match = None if not self._stated else _NAME.fullmatch(name)
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
        number = int(layer) if layer and self._by_layer else None
        if number not in self._sizes_by_layer:
            self._sizes_by_layer[number] = self._sizes(number)
        sizes = self._sizes_by_layer[number]
        dims = [a if a and sizes.get(a) == n else None for a, n in zip(axes, shape, strict=True)]
        return tuple(dims) if any(dims) else None

    def _sizes(self, layer: int | None) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for axis, value in self._stated.items():
            size = value
            if type(value) is list and layer is not None and layer < len(value):
                size = value[layer]
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
