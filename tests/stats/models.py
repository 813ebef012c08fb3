"""Untrained models as frameworks initialise them, and files of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]


def llama(layers: int = 6, width: int = 64, dtype: Any = ml_dtypes.bfloat16) -> Tensors:
    """Return a decoder as Hugging Face makes it: normal weights of 0.02, norms of ones."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> Array:
        return (rng.standard_normal(shape) * 0.02).astype(dtype)

    norm = np.ones(width, dtype)
    tensors = {"model.embed_tokens.weight": normal(600, width)}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for name in "qkvo":
            tensors[f"{base}.self_attn.{name}_proj.weight"] = normal(width, width)
        for name in ("gate", "up"):
            tensors[f"{base}.mlp.{name}_proj.weight"] = normal(3 * width, width)
        tensors[f"{base}.mlp.down_proj.weight"] = normal(width, 3 * width)
        tensors[f"{base}.input_layernorm.weight"] = norm.copy()
        tensors[f"{base}.post_attention_layernorm.weight"] = norm.copy()
    return tensors | {"model.norm.weight": norm.copy(), "lm_head.weight": normal(600, width)}


def gpt2(layers: int = 6, width: int = 96) -> Tensors:
    """Return GPT-2: residual projections scaled by depth, zero biases, masks that are all alike."""
    rng = np.random.default_rng(2)

    def normal(*shape: int, std: float = 0.02) -> Array:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    residual = 0.02 / np.sqrt(2 * layers)
    tensors = {
        "transformer.wte.weight": normal(500, width),
        "transformer.wpe.weight": normal(64, width),
    }
    for layer in range(layers):
        base = f"transformer.h.{layer}"
        sizes = {
            "attn.c_attn": (width, 3 * width, 0.02),
            "attn.c_proj": (width, width, residual),
            "mlp.c_fc": (width, 4 * width, 0.02),
            "mlp.c_proj": (4 * width, width, residual),
        }
        for name, (rows, columns, std) in sizes.items():
            tensors[f"{base}.{name}.weight"] = normal(rows, columns, std=std)
            tensors[f"{base}.{name}.bias"] = np.zeros(columns, np.float32)
        tensors[f"{base}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
        tensors[f"{base}.attn.masked_bias"] = np.array(-1e4, np.float32)
        for name in ("ln_1", "ln_2"):
            tensors[f"{base}.{name}.weight"] = np.ones(width, np.float32)
            tensors[f"{base}.{name}.bias"] = np.zeros(width, np.float32)
    tensors["transformer.ln_f.weight"] = np.ones(width, np.float32)
    tensors["transformer.ln_f.bias"] = np.zeros(width, np.float32)
    return tensors


def torch_mixture(layers: int = 5, width: int = 64, experts: int = 8) -> Tensors:
    """Return a mixture of experts with torch's defaults: Kaiming uniform weights and biases.

    The embedding has a row of zeros for padding, low-rank adapters begin with zeros.
    """
    rng = np.random.default_rng(3)

    def linear(name: str, rows: int, *columns: int) -> Tensors:
        bound = 1 / np.sqrt(np.prod(columns))
        return {
            f"{name}.weight": rng.uniform(-bound, bound, (rows, *columns)).astype(np.float32),
            f"{name}.bias": rng.uniform(-bound, bound, rows).astype(np.float32),
        }

    embedding = rng.standard_normal((400, width)).astype(np.float32)
    embedding[0] = 0
    tensors = {"embeddings.word_embeddings.weight": embedding} | linear("stem.conv", 32, 3, 7, 7)
    gain, bias = np.ones(width, np.float32), np.zeros(width, np.float32)
    tensors |= {"final_norm_weight": gain, "final_norm_bias": bias}
    for layer in range(layers):
        base = f"layers.{layer}"
        tensors |= linear(f"{base}.attn.in_proj", 3 * width, width)
        tensors |= linear(f"{base}.attn.out_proj", width, width)
        tensors |= linear(f"{base}.moe.gate", experts, width)
        for expert in range(experts):
            tensors |= linear(f"{base}.moe.experts.{expert}.up", width, width)
        tensors[f"{base}.attn.lora_A.weight"] = rng.uniform(-0.1, 0.1, (4, width)).astype(
            np.float32
        )
        tensors[f"{base}.attn.lora_B.weight"] = np.zeros((width, 4), np.float32)
        for name, value in {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}.items():
            tensors[f"{base}.bn.{name}"] = np.full(width, value, np.float32)
        tensors[f"{base}.bn.num_batches_tracked"] = np.array(0, np.int64)
    return tensors


FRESH: tuple[Callable[[], Tensors], ...] = (llama, gpt2, torch_mixture)


def quantised(layers: int = 3, width: int = 256) -> Tensors:
    """Return int8 codes with a scale for each row, and float8 ones with a scale for each tensor."""
    rng = np.random.default_rng(4)
    tensors: Tensors = {}
    for layer in range(layers):
        weight = rng.standard_normal((width, width)) * 0.02
        scale = np.abs(weight).max(axis=1, keepdims=True) / 127
        name = f"layers.{layer}.up.weight"
        tensors[name] = np.rint(weight / scale).astype(np.int8)
        tensors[f"{name}_scale"] = scale.astype(np.float32)
        name = f"layers.{layer}.down.weight"
        scale = np.abs(weight).max() / 448
        tensors[name] = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale"] = np.array([scale], np.float32)
    return tensors
