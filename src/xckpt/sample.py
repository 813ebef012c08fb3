"""A realistic sample checkpoint: a small decoder as a zTensor 1.0 file.

It has what real checkpoints have and a reader must cope with: repeated modules, mixed element
types, an int8 projection with scales, zstd streams, sparse updates, and digests. Its numbers hold
something to find: spreads that drift with depth, a channel of outliers, a few NaNs, a bias that
was never trained.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.elements import stored_dtype

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["write_checkpoint"]

_VOCABULARY_PER_WIDTH = 16
_HEADS_PER_KEY_HEAD = 4
_INIT_STD = 0.02


class _SampleTensor(NamedTuple):
    """One tensor of the model and the distribution its elements are drawn from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    layout: str = "dense"
    nans: int = 0
    outlier_column: int | None = None


def write_checkpoint(
    path: str | os.PathLike[str], *, layers: int = 12, width: int = 1024, seed: int = 0
) -> Path:
    """Write a decoder's checkpoint, about 300 MB by default.

    Parameters
    ----------
    path : str or os.PathLike
        Where the file goes; an existing one is replaced.
    layers : int, default 12
        Number of decoder layers.
    width : int, default 1024
        Size of the hidden state: a multiple of 4, at least 8.
    seed : int, default 0
        Seed of the random numbers: equal arguments make equal files.

    Returns
    -------
    pathlib.Path
        Where the file is.
    """
    import xarray as xr

    from xckpt.writing import save

    if layers < 1:
        raise ValueError(f"layers must be at least 1, not {layers}")
    if width < 2 * _HEADS_PER_KEY_HEAD or width % _HEADS_PER_KEY_HEAD:
        raise ValueError(f"width must be a multiple of 4 and at least 8, not {width}")
    variables = {}
    for number, weight in enumerate(_weights(layers, width)):
        # A seed of its own for each tensor: adding one leaves the others as they are.
        for name, array in _arrays(weight, [seed, number]):
            # Such names of dimensions stand for none.
            dims = [f"d{size}_{axis}" for axis, size in enumerate(array.shape)]
            variables[name] = xr.Variable(dims, array, encoding={"layout": weight.layout})
    attrs = {
        "license": "CC0-1.0",
        "description": "Random numbers in the shape of a decoder, to try tools on",
        "framework": "PyTorch",
        "model_name": f"sample-decoder-{layers}x{width}",
        "generator": "xckpt sample",
    }
    compressed = {"compression": "zstd", "level": 1}
    encoding: dict[str, dict[str, Any]] = {"*": {"digest": "crc32c"}}
    encoding |= {f"*.{name}_proj.weight": compressed for name in ("k", "v", "down")}
    save(xr.Dataset(variables, attrs=attrs), path, "ztensor", encoding=encoding, overwrite=True)
    return Path(path)


def _weights(layers: int, width: int) -> Iterator[_SampleTensor]:
    vocabulary = (_VOCABULARY_PER_WIDTH * width, width)
    yield _SampleTensor("model.embed_tokens.weight", "float16", vocabulary, _INIT_STD)
    yield _SampleTensor(
        "model.embed_tokens.delta", "float32", vocabulary, 1e-3, layout="sparse_csr"
    )
    for layer in range(layers):
        yield from _layer_weights(layer, layers, width)
    yield _SampleTensor("model.norm.weight", "float32", (width,), 0.2, mean=2.5)
    yield _SampleTensor("lm_head.weight", "float16", vocabulary, _INIT_STD)
    yield _SampleTensor("lm_head.delta", "float32", vocabulary, 1e-3, layout="sparse_coo")


def _layer_weights(layer: int, layers: int, width: int) -> Iterator[_SampleTensor]:
    """Return one decoder layer: queries and keys spread with depth, outputs shrink, norms grow."""
    depth = layer / layers
    keys = width // _HEADS_PER_KEY_HEAD
    hidden = 11 * width // 4
    spread = _INIT_STD * (1 + depth)
    residual = _INIT_STD / sqrt(2 * layers)
    untrained = layer == layers // 3
    broken = layer == layers // 2

    def weight(
        name: str, dtype: str, shape: tuple[int, ...], std: float, **more: Any
    ) -> _SampleTensor:
        return _SampleTensor(f"model.layers.{layer}.{name}", dtype, shape, std, **more)

    yield weight("input_layernorm.weight", "float32", (width,), 0.05, mean=0.4 + depth)
    yield weight("self_attn.q_proj.weight", "bfloat16", (width, width), spread)
    yield weight("self_attn.q_proj.bias", "float32", (width,), 0.0 if untrained else 0.1)
    yield weight("self_attn.k_proj.weight", "bfloat16", (keys, width), spread)
    yield weight("self_attn.v_proj.weight", "bfloat16", (keys, width), _INIT_STD)
    yield weight("self_attn.o_proj.weight", "bfloat16", (width, width), residual)
    yield weight("post_attention_layernorm.weight", "float32", (width,), 0.05, mean=0.6 + depth)
    yield weight(
        "mlp.gate_proj.weight", "bfloat16", (hidden, width), _INIT_STD, outlier_column=width // 3
    )
    yield weight("mlp.up_proj.weight", "bfloat16", (hidden, width), _INIT_STD, nans=7 * broken)
    yield weight("mlp.down_proj.weight", "int8", (width, hidden), residual)


def _arrays(weight: _SampleTensor, seed: list[int]) -> Iterator[tuple[str, Any]]:
    """Make the arrays of a tensor; dense ones are drawn when they are written."""
    import dask.array as da
    from dask import delayed

    if weight.layout != "dense":
        # An update of few rows, as fine-tuning leaves it; every touched row has all columns.
        rng, values = np.random.default_rng(seed), np.zeros(weight.shape, np.float32)
        rows = np.sort(rng.choice(len(values), max(1, len(values) // 64), replace=False))
        values[rows] = _draw(weight, rng, (rows.size, weight.shape[1]))
        yield weight.name, values
        return
    drawn = delayed(_draw)(weight, seed, weight.shape)
    if weight.dtype == "int8":
        codes, scales = delayed(_quantized, nout=2)(drawn)
        yield weight.name, da.from_delayed(codes, weight.shape, "int8")
        yield f"{weight.name}_scale", da.from_delayed(scales, (weight.shape[0], 1), "float32")
    else:
        dtype = stored_dtype(weight.dtype)
        yield weight.name, da.from_delayed(drawn.astype(dtype), weight.shape, dtype)


def _draw(
    weight: _SampleTensor, seed: list[int] | np.random.Generator, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape, np.float32)
    values *= np.float32(weight.std)
    values += np.float32(weight.mean)
    if weight.outlier_column is not None:
        values[:, weight.outlier_column] *= 20
    if weight.nans:
        values.reshape(-1)[rng.choice(values.size, weight.nans, replace=False)] = np.nan
    return values


def _quantized(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round to int8 with one scale for each row."""
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(values / scales).astype(np.int8), scales
