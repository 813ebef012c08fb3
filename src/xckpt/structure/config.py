"""The config of a model, as files state it: its type, and its sizes."""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The end of the name of a class, after the type of the model: LlamaForCausalLM, CLIPTextModel.
_SUFFIX = re.compile(r"(For[A-Z]|LMHead|Model|WithProjection).*")
_SEPARATORS = str.maketrans("", "", "_-")


def config_in(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the config of a model in the attributes of its file; empty without one.

    Keys of GGUF lose the name of the architecture: ``embedding_length``.
    """
    config = attrs.get("config")
    if isinstance(config, dict):
        return config
    architecture = attrs.get("general.architecture")
    if not isinstance(architecture, str):
        return {}
    start = f"{architecture}."
    sizes = {
        key.removeprefix(start): value
        for key, value in attrs.items()
        if type(value) is int and key.startswith(start)
    }
    tokens = attrs.get("tokenizer.ggml.tokens")
    if "vocab_size" not in sizes and isinstance(tokens, Sized):
        sizes["vocab_size"] = len(tokens)
    return {"model_type": architecture, **sizes}


def types_in(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of models that a config states: of the whole, then of its parts."""
    for part in (config, *config.values()):
        if not isinstance(part, dict):
            continue
        for key in ("model_type", "_class_name", "architecture"):
            if isinstance(part.get(key), str):
                yield part[key]
        architectures = part.get("architectures")
        if isinstance(architectures, list) and "model_type" not in part:
            yield from (_SUFFIX.sub("", name) for name in architectures if isinstance(name, str))


def normalise(model_type: str) -> str:
    """Return a type in small letters only: ``gptneox`` for ``gpt_neox`` and ``GPTNeoXModel``."""
    return _SUFFIX.sub("", model_type).translate(_SEPARATORS).lower()
