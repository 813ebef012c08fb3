"""Models of Hugging Face, and the GGUF files that llama.cpp's converter makes of them.

Names are those of the package `gguf`; this module repeats the changes to the numbers: rows of
queries and keys are permuted for some architectures, experts are stacked, 1 is added to norms of
Gemma, and matrices are quantised.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.stats.causes import rope
from tests.stats.kquants import ENCODERS, kquantized

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32

LAYERS, WIDTH, INNER, HEADS, KEY_HEADS, EXPERTS = 2, 256, 256, 4, 2, 3
HEAD = 16
# Names of architectures in GGUF.
_IN_GGUF = {"mistral": "llama", "mixtral": "llama"}
_PERMUTED = ("llama", "mistral", "mixtral")
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.*)\.weight")


def model(architecture: str, seed: int = 0) -> dict[str, Array]:
    """Return the tensors of a small model."""
    rng = np.random.default_rng(seed)
    centre = 0.0 if architecture.startswith("gemma") else 1.0
    tensors: dict[str, Array] = {}

    def add(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = (0.05 * rng.standard_normal(shape)).astype(F32)

    def add_norm(name: str, width: int = WIDTH) -> None:
        tensors[f"{name}.weight"] = (centre + 0.1 * rng.standard_normal(width)).astype(F32)

    add("model.embed_tokens", 80, WIDTH)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        for role, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
            add(f"{base}.self_attn.{role}_proj", heads * HEAD, WIDTH)
            if architecture == "qwen2":
                bias = 0.05 * rng.standard_normal(heads * HEAD)
                tensors[f"{base}.self_attn.{role}_proj.bias"] = bias.astype(F32)
        add(f"{base}.self_attn.o_proj", 64, WIDTH)
        if architecture.startswith("qwen3"):
            for role in "qk":
                add_norm(f"{base}.self_attn.{role}_norm", HEAD)
        _add_feed_forward(architecture, base, add)
        add_norm(f"{base}.input_layernorm")
        add_norm(f"{base}.post_attention_layernorm")
        if architecture == "gemma2":
            add_norm(f"{base}.pre_feedforward_layernorm")
            add_norm(f"{base}.post_feedforward_layernorm")
    add_norm("model.norm")
    if not architecture.startswith("gemma"):
        add("lm_head", 80, WIDTH)
    return tensors


def _add_feed_forward(architecture: str, base: str, add: Any) -> None:
    if architecture == "mixtral":
        add(f"{base}.block_sparse_moe.gate", EXPERTS, WIDTH)
        names = [f"block_sparse_moe.experts.{e}.{w}" for e in range(EXPERTS) for w in
                 ("w1", "w2", "w3")]  # fmt: skip
    elif architecture == "qwen3moe":
        add(f"{base}.mlp.gate", EXPERTS, WIDTH)
        names = [f"mlp.experts.{e}.{w}_proj" for e in range(EXPERTS) for w in
                 ("gate", "up", "down")]  # fmt: skip
    else:
        names = [f"mlp.{w}_proj" for w in ("gate", "up", "down")]
    for name in names:
        add(f"{base}.{name}", 32, INNER)


@dataclass
class Conversion:
    """The result of converting a model."""

    #: Tensors in GGUF by name, and the names of their origins in the model.
    tensors: dict[str, Array]
    origins: dict[str, list[str]]
    #: By tensor of the model: how many heads its rows are permuted for.
    heads: dict[str, int]


def converted(architecture: str, tensors: dict[str, Array]) -> Conversion:
    """Do what llama.cpp's converter does to names and numbers."""
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(_architecture(gguf, architecture), LAYERS)
    conversion = Conversion({}, {}, {})
    experts: dict[str, list[str]] = {}
    for name, original in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            experts.setdefault(f"{expert[1]}.{expert[3]}.weight", []).append(name)
            continue
        new, values = names.get_name(name, try_suffixes=(".weight", ".bias")), original
        if architecture in _PERMUTED and re.search(r"\.[qk]_proj\.", name):
            conversion.heads[name] = HEADS if ".q_proj." in name else KEY_HEADS
            values = rope(values, conversion.heads[name])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + F32(1)
        conversion.tensors[new], conversion.origins[new] = values, [name]
    for role, members in experts.items():
        new = names.get_name(role, try_suffixes=(".weight",))
        conversion.tensors[new] = np.stack([tensors[member] for member in members])
        conversion.origins[new] = members
    return conversion


def _architecture(gguf: Any, architecture: str) -> Any:
    return gguf.MODEL_ARCH[_IN_GGUF.get(architecture, architecture).upper()]


def write_gguf(path: Path, architecture: str, tensors: dict[str, Array], kind: str) -> Path:
    """Write matrices as a type, and norms and routers as float32."""
    gguf = pytest.importorskip("gguf")
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_architecture(gguf, architecture)])
    for name, values in tensors.items():
        is_plain = values.ndim == 1 or "norm" in name or "ffn_gate_inp" in name or kind == "F32"
        if is_plain:
            writer.add_tensor(name, values.astype(F32))
        elif kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        elif kind.lower() in ENCODERS:
            writer.add_tensor(name, kquantized(values, kind.lower()), raw_dtype=types[kind])
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, types[kind]),
                              raw_dtype=types[kind])  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_safetensors(path: Path, tensors: dict[str, Array]) -> Path:
    """Write a model."""
    save_file(tensors, path)
    return path
