"""Checkpoints of real sizes for benchmarks; their data are holes, so they take no disk."""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING

import cbor2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["mixture_of_experts", "write_ztensor"]


def mixture_of_experts(layers: int = 61, experts: int = 256) -> Iterator[tuple[str, list[int]]]:
    """Name the tensors of a model like DeepSeek-V3, with their shapes.

    The first three layers are dense, the others mixtures of experts; weights are 8-bit floats
    with a scale for each block of 128 x 128.
    """
    hidden, dense, moe = 7168, 18432, 2048
    yield "model.embed_tokens.weight", [129280, hidden]
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}.{norm}.weight", [hidden]
        attention = {
            "q_a_proj": [1536, hidden],
            "q_b_proj": [24576, 1536],
            "kv_a_proj_with_mqa": [576, hidden],
            "kv_b_proj": [32768, 512],
            "o_proj": [hidden, 16384],
        }
        for name, shape in attention.items():
            yield from _scaled(f"{base}.self_attn.{name}", shape)
        yield f"{base}.self_attn.q_a_layernorm.weight", [1536]
        yield f"{base}.self_attn.kv_a_layernorm.weight", [512]
        if layer < 3:
            yield from _mlp(f"{base}.mlp", hidden, dense)
            continue
        yield f"{base}.mlp.gate.weight", [experts, hidden]
        yield f"{base}.mlp.gate.e_score_correction_bias", [experts]
        for expert in range(experts):
            yield from _mlp(f"{base}.mlp.experts.{expert}", hidden, moe)
        yield from _mlp(f"{base}.mlp.shared_experts", hidden, moe)
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [129280, hidden]


def _mlp(base: str, hidden: int, inner: int) -> Iterator[tuple[str, list[int]]]:
    for name, shape in {
        "gate_proj": [inner, hidden],
        "up_proj": [inner, hidden],
        "down_proj": [hidden, inner],
    }.items():
        yield from _scaled(f"{base}.{name}", shape)


def _scaled(base: str, shape: list[int]) -> Iterator[tuple[str, list[int]]]:
    yield f"{base}.weight", shape
    yield f"{base}.weight_scale_inv", [-(-n // 128) for n in shape]


def write_ztensor(path: Path, tensors: dict[str, list[int]], dtype: str = "bfloat16") -> bytes:
    """Write a zTensor v1.0 file whose data are holes; return its manifest."""
    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    offset, described = 64, {}
    for name, shape in tensors.items():
        length = prod(shape) * itemsize
        described[name] = {
            "dtype": dtype,
            "shape": shape,
            "format": "dense",
            "components": {"data": {"offset": offset, "length": length}},
        }
        offset += -(-length // 64) * 64
    root = {"version": "1.0", "generator": "benchmark", "attributes": {}, "tensors": described}
    manifest: bytes = cbor2.dumps(root)
    with path.open("wb") as file:
        file.write(b"ZTEN1000")
        file.seek(offset)
        file.write(manifest + struct.pack("<Q", len(manifest)))
    return manifest
