"""A realistic sample checkpoint: a small decoder as a zTensor 1.0 file.

It has what real checkpoints have and a reader must cope with: repeated modules, mixed element
types, an int8 projection with scales, zstd streams without a content size, sparse updates, and
digests. Its numbers hold something to find: spreads that drift with depth, a channel of
outliers, a few NaNs, a bias that was never trained.

::

    "ZTEN1000" | zeros to 64 | blob | zeros to 64 | blob | ... | CBOR manifest | its size, u64 LE
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from xckpt.dtypes import stored_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

__all__ = ["write_checkpoint"]

Array = Any  # an array of any element type, those of ml_dtypes included

_MAGIC = b"ZTEN1000"
_ALIGNMENT = 64
_VOCABULARY_PER_WIDTH = 16
_HEADS_PER_KEY_HEAD = 4
_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class _Weight:
    """One tensor of the model and the distribution its elements are drawn from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    layout: str = "dense"
    zstd: bool = False
    nans: int = 0
    outlier_column: int | None = None


def write_checkpoint(
    path: str | os.PathLike[str], *, layers: int = 12, width: int = 1024, seed: int = 0
) -> Path:
    """Write a decoder's checkpoint, about 300 MB by default."""
    if layers < 1:
        raise ValueError(f"layers must be at least 1, not {layers}")
    if width < 2 * _HEADS_PER_KEY_HEAD or width % _HEADS_PER_KEY_HEAD:
        raise ValueError(f"width must be a multiple of 4 and at least 8, not {width}")
    path = Path(path)
    attributes = {
        "license": "CC0-1.0",
        "description": "Random numbers in the shape of a decoder, to try tools on",
        "framework": "PyTorch",
        "model_name": f"sample-decoder-{layers}x{width}",
    }
    with _replacing(path) as file:
        _write_container(file, _model(layers, width, seed), attributes)
    return path


def _model(layers: int, width: int, seed: int) -> Iterator[tuple[str, _Stored]]:
    """Draw the tensors of the model one after another."""
    for number, weight in enumerate(_weights(layers, width)):
        # A generator of its own for each tensor: adding one leaves the others as they are.
        rng = np.random.default_rng([seed, number])
        yield from _stored(weight, rng)


# --- the model -----------------------------------------------------------------------------------


def _weights(layers: int, width: int) -> Iterator[_Weight]:
    vocabulary = (_VOCABULARY_PER_WIDTH * width, width)
    yield _Weight("model.embed_tokens.weight", "float16", vocabulary, _INIT_STD)
    yield _Weight("model.embed_tokens.delta", "float32", vocabulary, 1e-3, layout="sparse_csr")
    for layer in range(layers):
        yield from _layer_weights(layer, layers, width)
    yield _Weight("model.norm.weight", "float32", (width,), 0.2, mean=2.5)
    yield _Weight("lm_head.weight", "float16", vocabulary, _INIT_STD)
    yield _Weight("lm_head.delta", "float32", vocabulary, 1e-3, layout="sparse_coo")


def _layer_weights(layer: int, layers: int, width: int) -> Iterator[_Weight]:
    """Return one decoder layer: queries and keys spread with depth, outputs shrink, norms grow."""
    depth = layer / layers
    keys = width // _HEADS_PER_KEY_HEAD
    hidden = 11 * width // 4
    spread = _INIT_STD * (1 + depth)
    residual = _INIT_STD / sqrt(2 * layers)
    untrained = layer == layers // 3
    broken = layer == layers // 2

    def weight(name: str, dtype: str, shape: tuple[int, ...], std: float, **more: Any) -> _Weight:
        return _Weight(f"model.layers.{layer}.{name}", dtype, shape, std, **more)

    yield weight("input_layernorm.weight", "float32", (width,), 0.05, mean=0.4 + depth)
    yield weight("self_attn.q_proj.weight", "bfloat16", (width, width), spread)
    yield weight("self_attn.q_proj.bias", "float32", (width,), 0.0 if untrained else 0.1)
    yield weight("self_attn.k_proj.weight", "bfloat16", (keys, width), spread, zstd=True)
    yield weight("self_attn.v_proj.weight", "bfloat16", (keys, width), _INIT_STD, zstd=True)
    yield weight("self_attn.o_proj.weight", "bfloat16", (width, width), residual)
    yield weight("post_attention_layernorm.weight", "float32", (width,), 0.05, mean=0.6 + depth)
    yield weight(
        "mlp.gate_proj.weight", "bfloat16", (hidden, width), _INIT_STD, outlier_column=width // 3
    )
    yield weight("mlp.up_proj.weight", "bfloat16", (hidden, width), _INIT_STD, nans=7 * broken)
    yield weight("mlp.down_proj.weight", "int8", (width, hidden), residual, zstd=True)


def _draw(weight: _Weight, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    values = rng.standard_normal(shape, np.float32)
    values *= np.float32(weight.std)
    values += np.float32(weight.mean)
    if weight.outlier_column is not None:
        values[:, weight.outlier_column] *= 20
    if weight.nans:
        values.reshape(-1)[rng.choice(values.size, weight.nans, replace=False)] = np.nan
    return values


# --- tensors to parts ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as it is stored: its parts by role, in the order of the file."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    parts: Mapping[str, Array]
    zstd: bool = False


def _stored(weight: _Weight, rng: np.random.Generator) -> Iterator[tuple[str, _Stored]]:
    if weight.layout != "dense":
        yield weight.name, _sparse(weight, rng)
        return
    values = _draw(weight, weight.shape, rng)
    if weight.dtype == "int8":
        codes, scales = _quantized(values)
        yield weight.name, _dense(codes, "int8", zstd=weight.zstd)
        yield f"{weight.name}_scale", _dense(scales, "float32")
    else:
        yield weight.name, _dense(values, weight.dtype, zstd=weight.zstd)


def _dense(values: Array, dtype: str, *, zstd: bool = False) -> _Stored:
    data = values.astype(stored_dtype(dtype), copy=False)
    return _Stored(dtype, values.shape, "dense", {"data": data}, zstd)


def _quantized(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round to int8 with one scale for each row."""
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(values / scales).astype(np.int8), scales


def _sparse(weight: _Weight, rng: np.random.Generator) -> _Stored:
    """Draw an update of few rows, as fine-tuning leaves it; every touched row has all columns."""
    nrows, ncols = weight.shape
    rows = np.sort(rng.choice(nrows, max(1, nrows // 64), replace=False))
    values = _draw(weight, (rows.size * ncols,), rng)
    columns = np.tile(np.arange(ncols, dtype="<u8"), rows.size)
    if weight.layout == "sparse_coo":
        coords = np.concatenate([np.repeat(rows, ncols).astype("<u8"), columns])
        parts = {"values": values, "coords": coords}
    else:
        counts = np.zeros(nrows + 1, "<u8")
        counts[rows + 1] = ncols
        parts = {"values": values, "indices": columns, "indptr": np.cumsum(counts, dtype="<u8")}
    return _Stored(weight.dtype, weight.shape, weight.layout, parts)


# --- parts to bytes ------------------------------------------------------------------------------


def _write_container(
    file: BinaryIO, tensors: Iterator[tuple[str, _Stored]], attributes: Mapping[str, Any]
) -> None:
    import cbor2

    file.write(_MAGIC)
    manifest = {
        "version": "1.0",
        "generator": "xckpt sample",
        "attributes": dict(attributes),
        "tensors": {name: _write_tensor(file, tensor) for name, tensor in tensors},
    }
    encoded = cbor2.dumps(manifest)
    file.write(encoded)
    file.write(len(encoded).to_bytes(8, "little"))


def _write_tensor(file: BinaryIO, tensor: _Stored) -> dict[str, Any]:
    """Write the parts of a tensor and return its entry in the manifest."""
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "format": tensor.layout,
        "components": {
            role: _write_blob(file, array, zstd=tensor.zstd) for role, array in tensor.parts.items()
        },
    }


def _write_blob(file: BinaryIO, array: Array, *, zstd: bool) -> dict[str, Any]:
    """Write one blob at the next multiple of 64 and return its component in the manifest."""
    import google_crc32c

    size = array.dtype.itemsize
    data = array.view(f"u{size}").astype(f"<u{size}", copy=False).tobytes()
    if zstd:
        import zstandard

        # Real writers stream, and a stream does not know its size when it writes the header.
        data = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(data)
    file.write(bytes(-file.tell() % _ALIGNMENT))
    component: dict[str, Any] = {"offset": file.tell(), "length": len(data)}
    if zstd:
        component["encoding"] = "zstd"
    component["digest"] = f"crc32c:0x{google_crc32c.value(data):08X}"
    file.write(data)
    return component


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path` that takes its place when all is written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
