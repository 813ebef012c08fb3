"""Small checkpoints with known values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]


def write(path: Path, tensors: dict[str, Array]) -> Path:
    """Write a safetensors file; element types are those that it knows."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)
    return path


def model(layers: int = 3, seed: int = 0) -> dict[str, Array]:
    """Give the tensors of a small model of repeated layers, of several element types."""
    import ml_dtypes

    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {"embed": rng.standard_normal((64, 32)).astype(np.float32)}
    for layer in range(layers):
        base = f"layers.{layer}"
        weight = rng.standard_normal((48, 32)) * (layer + 1)
        tensors[f"{base}.w"] = weight.astype(ml_dtypes.bfloat16)
        tensors[f"{base}.b"] = rng.standard_normal(48).astype(np.float16)
    tensors["steps"] = np.array(7, np.int64)
    tensors["mask"] = rng.random((5, 6)) < 0.5
    tensors["none"] = np.zeros((0, 4), np.float32)
    return tensors
