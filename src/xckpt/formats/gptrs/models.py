"""The configs of the models of gpt.rs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import UnsupportedError
from xckpt.formats import kit

if TYPE_CHECKING:
    from collections.abc import Mapping

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
