"""The config of a checkpoint: strict JSON, and what it says of the model; read and written."""

from __future__ import annotations

import json
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import FormatError, UnsupportedError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LARGEST_CONFIG", "ModelConfig", "parse_config", "write_config"]

LARGEST_CONFIG = 1 << 26

# As serde_json, which the reference reader uses.
_DEEPEST = 127
_COUNTS = 1 << 64

_GPT_COUNTS = (
    "vocab_size",
    "context_length",
    "embed_dim",
    "num_layers",
    "num_heads",
    "mlp_ratio",
)
_STREAMING_COUNTS = (
    "device_budget_bytes",
    "cache_budget_cap_bytes",
    "prefetch_layers",
    "small_param_persist_threshold",
)


class ModelConfig(NamedTuple):
    """What a config says.

    Parameters
    ----------
    kind : str or None
        Kind of the model; None where nothing tells.
    config : object
        What belongs to that kind.
    attrs : dict
        All of it, as attributes of the file.
    warning : str or None
        What a user should know.
    """

    kind: str | None
    config: Any
    attrs: dict[str, Any]
    warning: str | None = None


def parse_config(data: bytes, offset: int) -> ModelConfig:
    """Read a config.

    Tagged ones are ``{"kind": text, "config": anything, "runtime": anything}``. Those of the
    first weeks are the bare config of a gpt. Whatever else is JSON is kept with a warning: the
    tensors can be read without it.

    Parameters
    ----------
    data : bytes
        The config.
    offset : int
        Where it is in the file, for messages.

    Returns
    -------
    ModelConfig
        What it says.

    Raises
    ------
    FormatError
        If it is not one JSON value in UTF-8 (rule ConfigJson).
    """
    try:
        value = _strict_json(data)
    # UnicodeDecodeError and JSONDecodeError are ValueErrors.
    except (ValueError, RecursionError) as error:
        reason = shown(str(error))[1:-1]
        raise FormatError(
            f"the config is not JSON: {reason}", offset=offset, rule="ConfigJson"
        ) from error
    if type(value) is dict and type(value.get("kind")) is str:
        config = value.setdefault("config", None)
        return ModelConfig(value["kind"], config, value)
    if _is_gpt_config(value):
        return ModelConfig("gpt", value, {"kind": "gpt", "config": value})
    warning = "the config has no kind of model and is no bare config of a gpt: gpt.rs refuses it"
    return ModelConfig(None, value, {"config": value}, warning)


def _strict_json(data: bytes) -> Any:
    """Decode what serde_json decodes; json alone lets more pass."""
    text = data.decode("utf-8")
    value = json.loads(text, parse_constant=_refused, parse_float=_finite)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates cannot be encoded
    if _is_deeper(value, _DEEPEST):
        raise ValueError(f"nested more than {_DEEPEST} deep")
    return value


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"the number {text[:20]} is out of range")
    return number


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if type(item) in {dict, list}]
        if not containers:
            return False
        level = [
            item
            for container in containers
            for item in (container.values() if type(container) is dict else container)
        ]
    return True


def _is_gpt_config(value: Any) -> bool:
    """Tell whether gpt.rs reads this as a config of its GPT; what else it has does not matter."""
    if type(value) is not dict or type(value.get("dropout")) not in {int, float}:
        return False
    counts = [value.get(key) for key in _GPT_COUNTS]
    if not all(type(count) is int and 0 <= count < _COUNTS for count in counts):
        return False
    return _are_overrides(value.get("functional_overrides", {}))


def _are_overrides(value: Any) -> bool:
    return type(value) is dict and all(map(_is_policy, value.values()))


def _is_policy(value: Any) -> bool:
    """Tell whether this is a policy: ``""``, ``force=<impl>``, ``benchmark[(cache=N)]``."""
    if type(value) is not str:
        return False
    text = value.strip()
    if not text or text.startswith("force=") or text.lower() == "benchmark":
        return True
    if not (text.startswith("benchmark(") and text.endswith(")")):
        return False
    options = (option.strip() for option in text[len("benchmark(") : -1].split(","))
    return all(map(_is_cache_size, filter(None, options)))


def _is_cache_size(option: str) -> bool:
    digits = option.removeprefix("cache=").removeprefix("+")
    is_number = option.startswith("cache=") and digits.isascii() and digits.isdigit()
    return is_number and len(digits.lstrip("0")) <= 20 and 0 < int(digits) < _COUNTS


def write_config(kind: str, config: Any, more: Mapping[str, Any]) -> bytes:
    """Write a config as gpt.rs's exporter does: compact, in ASCII, keys as they are.

    Parameters
    ----------
    kind : str
        Kind of the model.
    config : object
        What belongs to that kind, any JSON.
    more : mapping
        What stands beside these: ``runtime``, and what gpt.rs ignores.

    Returns
    -------
    bytes
        JSON.

    Raises
    ------
    UnsupportedError
        If it cannot be JSON that comes back as it is (rule ConfigJson), or gpt.rs would refuse
        the runtime (ConfigRuntime).
    """
    value = {"kind": kind, "config": config, **more}
    if "runtime" in more and not _is_runtime(more["runtime"]):
        reason = "the attribute runtime is not a runtime config that gpt.rs takes"
        raise UnsupportedError(reason, rule="ConfigRuntime", hint="Correct it, or remove it")
    try:
        return _json_that_comes_back(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedError(
            f"kind and config cannot be written as JSON: {error}",
            rule="ConfigJson",
            hint="It takes dicts with text as keys, lists, texts, finite numbers, booleans, None",
        ) from error


def _json_that_comes_back(value: Any) -> bytes:
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > LARGEST_CONFIG:
        raise ValueError(f"{len(data)} bytes are more than {LARGEST_CONFIG}")
    # Keys that are numbers become texts, and tuples lists.
    if _strict_json(data) != value:
        raise ValueError("something else would come back")
    return data


def _is_runtime(value: Any) -> bool:
    """Tell whether gpt.rs takes this as a runtime config; it ignores keys that it does not know."""
    if type(value) is not dict or not _are_overrides(value.get("functional_overrides", {})):
        return False
    streaming = value.get("weight_streaming", {})
    if type(streaming) is not dict or type(streaming.get("enabled", False)) is not bool:
        return False
    counts = [streaming.get(key) for key in _STREAMING_COUNTS]
    return type(streaming.get("device_weights_percent")) in {int, float, type(None)} and all(
        count is None or (type(count) is int and 0 <= count < _COUNTS) for count in counts
    )
