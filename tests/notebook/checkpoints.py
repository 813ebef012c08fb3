"""Rows of tensors with the names and shapes of well-known models."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from xckpt.elements import nbytes_of
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Iterator


def row(name: str, dtype: str, *shape: int, storage: str = "") -> Row:
    return Row(name, dtype, shape, nbytes_of(dtype, prod(shape)), storage)


def gpt2(layers: int = 12, width: int = 768) -> Iterator[Row]:
    yield row("wte.weight", "float32", 50257, width)
    yield row("wpe.weight", "float32", 1024, width)
    for layer in range(layers):
        for norm in ("ln_1", "ln_2"):
            yield row(f"h.{layer}.{norm}.weight", "float32", width)
            yield row(f"h.{layer}.{norm}.bias", "float32", width)
        for name, inputs, outputs in (
            ("attn.c_attn", 1, 3),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 1, 4),
            ("mlp.c_proj", 4, 1),
        ):
            yield row(f"h.{layer}.{name}.weight", "float32", inputs * width, outputs * width)
            yield row(f"h.{layer}.{name}.bias", "float32", outputs * width)
    yield row("ln_f.weight", "float32", width)
    yield row("ln_f.bias", "float32", width)


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3)) -> Iterator[Row]:
    yield row("conv1.weight", "float32", 64, 3, 7, 7)
    yield from _batch_norm("bn1", 64)
    for stage, count in enumerate(blocks, 1):
        width = 32 << stage
        for block in range(count):
            path = f"layer{stage}.{block}"
            inputs = 4 * width if block else max(64, 2 * width)
            for number, (fan_in, fan_out, kernel) in enumerate(
                [(inputs, width, 1), (width, width, 3), (width, 4 * width, 1)], 1
            ):
                yield row(f"{path}.conv{number}.weight", "float32", fan_out, fan_in, kernel, kernel)
                yield from _batch_norm(f"{path}.bn{number}", fan_out)
            if block == 0:
                yield row(f"{path}.downsample.0.weight", "float32", 4 * width, inputs, 1, 1)
                yield from _batch_norm(f"{path}.downsample.1", 4 * width)
    yield row("fc.weight", "float32", 1000, 2048)
    yield row("fc.bias", "float32", 1000)


def _batch_norm(path: str, channels: int) -> Iterator[Row]:
    for leaf in ("weight", "bias", "running_mean", "running_var"):
        yield row(f"{path}.{leaf}", "float32", channels)
    yield row(f"{path}.num_batches_tracked", "int64")


def mixture_of_experts(layers: int = 64, experts: int = 64, dense: int = 0) -> Iterator[Row]:
    """Give a decoder whose first `dense` layers have no experts."""
    yield row("model.embed_tokens.weight", "bfloat16", 151936, 5120)
    for layer in range(layers):
        path = f"model.layers.{layer}"
        for role, outputs in (("q", 8192), ("k", 1024), ("v", 1024), ("o", 8192)):
            yield row(f"{path}.self_attn.{role}_proj.weight", "bfloat16", 5120, outputs)
        for role in ("q", "k"):
            yield row(f"{path}.self_attn.{role}_norm.weight", "float32", 128)
        if layer < dense:
            yield from _feed_forward(f"{path}.mlp", 5120, 27392)
        else:
            yield row(f"{path}.mlp.gate.weight", "bfloat16", experts, 5120)
            for expert in range(experts):
                yield from _feed_forward(f"{path}.mlp.experts.{expert}", 5120, 1536)
        yield row(f"{path}.input_layernorm.weight", "float32", 5120)
        yield row(f"{path}.post_attention_layernorm.weight", "float32", 5120)
    yield row("model.norm.weight", "float32", 5120)
    yield row("lm_head.weight", "bfloat16", 151936, 5120)


def _feed_forward(path: str, width: int, hidden: int) -> Iterator[Row]:
    for role in ("gate", "up", "down"):
        yield row(f"{path}.{role}_proj.weight", "float8_e4m3fn", width, hidden)
        yield row(f"{path}.{role}_proj.weight_scale", "float32", width // 128, hidden // 128)
