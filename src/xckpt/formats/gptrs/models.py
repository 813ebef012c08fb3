"""The models of gpt.rs: their configs, and the names of axes that follow from them.

An axis gets its name only if its extent is the size in the config; names are never derived from
sizes alone, since sizes collide. The weights of transformers are ``[in, out]``; the classifiers of
vision models are ``[out, in]``. The channels and kernels of convolutions have no names, because
they differ from layer to layer.
"""

from __future__ import annotations

import json
import re
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import UnsupportedError
from xckpt.formats import kit

if TYPE_CHECKING:
    from collections.abc import Mapping

_Names = tuple[str | None, ...]

# Axes by kind and name of the tensor, where "*" is the number of a block. The number is not checked
# against the config, because unused tensors have the same axes.
_TRANSFORMER: Mapping[str, _Names] = {
    "tok_embeddings.weight": ("vocab_size", "embed_dim"),
    "blocks.*.attention.w_qkv": ("embed_dim", "qkv_dim"),
    "blocks.*.attention.w_out": ("attn_dim", "embed_dim"),
    "lm_head": ("embed_dim", "vocab_size"),
}
_AXES: Mapping[str, Mapping[str, _Names]] = {
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
_SIZES: Mapping[str, Mapping[str, str]] = {
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


class ModelAxes:
    """Names the axes of tensors of one model, whose config may have any keys and values."""

    __slots__ = ("_axes", "_known", "_sizes")

    def __init__(self, kind: str | None, config: Any) -> None:
        self._axes = _AXES.get(kind or "", {})
        self._sizes = _sizes(kind or "", config)
        self._known: dict[tuple[str, tuple[int, ...]], _Names | None] = {}

    def of(self, name: str, shape: tuple[int, ...]) -> _Names | None:
        """Name the axes whose size is the one in the config; None if no axis gets a name."""
        if not self._axes:
            return None
        key = _NUMBER.sub("*", name), shape
        if key not in self._known:
            self._known[key] = self._fitting(*key)
        return self._known[key]

    def _fitting(self, pattern: str, shape: tuple[int, ...]) -> _Names | None:
        names = self._axes.get(pattern, ())
        if len(names) != len(shape):
            return None
        fitting = tuple(
            name if name is not None and self._sizes.get(name) == size else None
            for name, size in zip(names, shape, strict=True)
        )
        return fitting if any(fitting) else None


def _sizes(kind: str, config: Any) -> dict[str, int | None]:
    """Compute the size of each axis; None where the config does not determine it."""
    entries = config.items() if type(config) is dict else ()
    counts = {key: n for key, n in entries if type(n) is int and 0 < n <= kit.LARGEST}
    for key, (dividend, divisor) in _QUOTIENTS.get(kind, {}).items():
        if (
            type(config) is dict
            and config.get(key) is None
            and {dividend, divisor} <= counts.keys()
        ):
            quotient, remainder = divmod(counts[dividend], counts[divisor])
            if quotient and not remainder:
                counts[key] = quotient
    sizes: dict[str, int | None] = {}
    for name, text in _SIZES.get(kind, {}).items():
        terms = [
            [
                int(factor) if factor.isdigit() else counts.get(factor)
                for factor in term.split(" * ")
            ]
            for term in text.split(" + ")
        ]
        products = [prod(factor for factor in term if factor is not None) for term in terms]
        sizes[name] = None if any(None in term for term in terms) else sum(products)
    return sizes


# --- configs --------------------------------------------------------------------------------------

LARGEST_CONFIG = 1 << 26

# The limit of serde_json, which the reference reader uses.
_DEEPEST = 127
_COUNTS = 1 << 64

_GPT_COUNTS = ("vocab_size", "context_length", "embed_dim", "num_layers", "num_heads", "mlp_ratio")
_STREAMING_COUNTS = (
    "device_budget_bytes",
    "cache_budget_cap_bytes",
    "prefetch_layers",
    "small_param_persist_threshold",
)


class ModelConfig(NamedTuple):
    """A parsed config: kind and config of the model, and attributes of the file."""

    kind: str | None
    config: Any
    attrs: dict[str, Any]
    warnings: tuple[str, ...] = ()


def parse_config(data: bytes, offset: int) -> ModelConfig:
    """Parse a config; other JSON gives a warning, because the tensors are readable without it."""
    value = _strict(data, offset)
    if type(value) is dict and type(value.get("kind")) is str:
        config = value.setdefault("config", None)
        return ModelConfig(value["kind"], config, value)
    if _is_gpt_config(value):
        return ModelConfig("gpt", value, {"kind": "gpt", "config": value})
    warning = (
        "the config has no kind of model and is not the bare config of a gpt: gpt.rs refuses it"
    )
    return ModelConfig(None, value, {"config": value}, (warning,))


def _strict(data: bytes, offset: int | None = None) -> Any:
    return kit.decode_json(
        data,
        "the config",
        deepest=_DEEPEST,
        rule="ConfigJson",
        offset=offset,
        repeated=lambda _key: None,
    )


def _is_gpt_config(value: Any) -> bool:
    """Return whether gpt.rs reads this as a config of its GPT; it ignores other keys."""
    if type(value) is not dict or type(value.get("dropout")) not in {int, float}:
        return False
    counts = [value.get(key) for key in _GPT_COUNTS]
    if not all(type(count) is int and 0 <= count < _COUNTS for count in counts):
        return False
    return _are_overrides(value.get("functional_overrides", {}))


def _are_overrides(value: Any) -> bool:
    return type(value) is dict and all(map(_is_policy, value.values()))


def _is_policy(value: Any) -> bool:
    """Return whether this is a policy: ``""``, ``force=<impl>``, ``benchmark[(cache=N)]``."""
    if type(value) is not str:
        return False
    text = value.strip()
    if not text or text.startswith("force=") or text.lower() == "benchmark":
        return True
    if not (text.startswith("benchmark(") and text.endswith(")")):
        return False
    options = [option.strip() for option in text[len("benchmark(") : -1].split(",")]
    sizes = [_CACHE_SIZE.fullmatch(option) for option in options if option]
    return all(size is not None and 0 < int(size[1]) < _COUNTS for size in sizes)


_CACHE_SIZE = re.compile(r"cache=\+?0*([0-9]{1,20})")


def write_config(kind: str, config: Any, more: Mapping[str, Any]) -> bytes:
    """Write a config as gpt.rs's exporter does: compact, in ASCII, keys as they are."""
    value = {"kind": kind, "config": config, **more}
    if "runtime" in more and not _is_runtime(more["runtime"]):
        reason = "the attribute runtime is not a runtime config that gpt.rs accepts"
        raise UnsupportedError(reason, rule="ConfigRuntime", hint="Correct it, or remove it")
    try:
        return _reversible_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedError(
            f"kind and config cannot be written as JSON: {error}",
            rule="ConfigJson",
            hint="Use dicts with text as keys, lists, texts, finite numbers, booleans and None",
        ) from error


def _reversible_json(value: Any) -> bytes:
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > LARGEST_CONFIG:
        raise ValueError(f"{len(data)} bytes are more than {LARGEST_CONFIG}")
    # Keys that are numbers become texts, and tuples lists.
    if _strict(data) != value:
        raise ValueError("it would read back as a different value")
    return data


def _is_runtime(value: Any) -> bool:
    """Return whether gpt.rs accepts this as a runtime config; it ignores unknown keys."""
    if type(value) is not dict or not _are_overrides(value.get("functional_overrides", {})):
        return False
    streaming = value.get("weight_streaming", {})
    if type(streaming) is not dict or type(streaming.get("enabled", False)) is not bool:
        return False
    counts = [streaming.get(key) for key in _STREAMING_COUNTS]
    percent = streaming.get("device_weights_percent")
    is_part = percent is None or (type(percent) in {int, float} and 0 <= percent <= 1)
    return is_part and all(
        count is None or (type(count) is int and 0 <= count < _COUNTS) for count in counts
    )
