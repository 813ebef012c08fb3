"""A small model in the layout of Hugging Face, from which `llama.rs` made the Burnpack files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

LAYERS, WIDTH, INNER, KEYS, WORDS = 2, 16, 40, 8, 48


def tensors() -> dict[str, Array]:
    """Return all tensors, with distinct values between -1 and 1."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (WORDS, WIDTH)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{base}.{name}": (WIDTH,) for name in norms}
        for role in "qkvo":
            shapes[f"{base}.self_attn.{role}_proj"] = (KEYS if role in "kv" else WIDTH, WIDTH)
        shapes |= {f"{base}.mlp.{role}_proj": (INNER, WIDTH) for role in ("gate", "up")}
        shapes[f"{base}.mlp.down_proj"] = (WIDTH, INNER)
    shapes |= {"model.norm": (WIDTH,), "lm_head": (WORDS, WIDTH)}
    weights = {}
    at = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        codes = (np.arange(at, at + size) * 2654435761) % (1 << 24)
        weights[f"{name}.weight"] = (codes / (1 << 23) - 1).astype(np.float32).reshape(shape)
        at += size
    return weights


if __name__ == "__main__":
    from tests.stats.checkpoints import write

    write(Path(sys.argv[1]) / "llama.safetensors", tensors())
