"""Pairs of checkpoints with every difference that `compare` explains, and the expected causes."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

#: Causes of changed tensors: they describe a difference, and explain nothing.
DESCRIBING = frozenset(
    ["offset", "scaled", "rows_permuted", "cut", "pruned", "low_rank", "unknown"]
)
BF16 = ml_dtypes.bfloat16
ROUNDED = {"bfloat16": BF16, "float16": np.float16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


class Made(NamedTuple):
    """The tensors of both sides, and the cause and the parameters of each."""

    a: dict[str, Array]
    b: dict[str, Array]
    causes: dict[str, str]
    parameters: dict[str, dict[str, Any]]


def outcome_of(name: str, cause: str) -> str:
    """Return the outcome of a tensor with a cause."""
    causes = set(cause.split("+"))
    if causes & {"only_a", "only_b"}:
        return "unmatched"
    is_new = name.endswith("padded.new")  # its new rows are not zeros
    return "changed" if causes & DESCRIBING or is_new else "explained"


def rope(rows: Array, heads: int) -> Array:
    """Permute rows as `permute` of the converters from Hugging Face to GGUF does."""
    length = rows.shape[0] // heads // 2
    split = rows.reshape(heads, 2, length, *rows.shape[1:])
    permuted: Array = split.swapaxes(1, 2).reshape(rows.shape)
    return permuted


def quantized(values: Array, *, levels: int, block: int, symmetric: bool) -> Array:
    """Round to the nearest of evenly spaced levels in blocks."""
    blocks = values.reshape(-1, block)
    if symmetric:
        step = np.abs(blocks).max(axis=1, keepdims=True) / (levels // 2)
        restored = np.rint(blocks / step) * step
    else:
        low = blocks.min(axis=1, keepdims=True)
        step = (blocks.max(axis=1, keepdims=True) - low) / (levels - 1)
        restored = np.rint((blocks - low) / step) * step + low
    rounded: Array = restored.astype(np.float32).reshape(values.shape)
    return rounded


def made(rows: int, columns: int, seed: int) -> Made:  # noqa: C901, PLR0915  a long list
    """Make a tensor for each cause, and for pairs of causes."""
    rng = np.random.default_rng(seed)

    def new(*shape: int) -> Array:
        return rng.standard_normal(shape or (rows, columns)).astype(np.float32)

    def bf(values: Array) -> Array:
        return values.astype(BF16)

    model = Made({}, {}, {}, {})

    def add(name: str, a: Array | None, b: Array | None, cause: str, **parameters: Any) -> None:
        if a is not None:
            model.a[name] = a
        if b is not None:
            model.b[name] = np.ascontiguousarray(b)
        model.causes[name] = cause
        model.parameters[name] = parameters

    def rename(cause: str, a: Array, b: Array, **parameters: Any) -> None:
        name = f"renamed_{cause}" + (".q_proj" if "rope" in cause else "")
        causes = f"renamed+{cause}" if cause else "renamed"
        add(f"{name}.a", a, None, causes, other_names=f"{name}.b", **parameters)
        add(f"{name}.b", None, b, causes, other_names=f"{name}.a", **parameters)

    order = rng.permutation(rows)
    mask = rng.random((rows, columns)) < 0.5
    f32 = np.float32
    x = new()
    add("equal", x, x, "equal")
    add("wider", bf(x), bf(x).astype(f32), "equal")
    for name, dtype in ROUNDED.items():
        add(f"rounded.{name}", x, x.astype(dtype), "rounded")
        add(f"rounded.{name}.back", x.astype(dtype), x, "rounded")
        add(f"through.{name}", x, x.astype(dtype).astype(f32), "rounded")
    x = new()
    add("offset", x, x + f32(1), "offset", offset=1.0)
    add("offset.odd", x, x + f32(0.1234567), "offset", offset=float(f32(0.1234567)))
    add("offset.bf16", bf(x), bf(bf(x).astype(f32) + f32(1)), "offset", offset=1.0)
    add("offset.norm", x[0], x[0] + f32(1), "offset", offset=1.0)
    add("offset.rounded", x, bf(x + f32(1)), "offset+rounded", offset=1.0)
    add("offset.pruned", x, np.where(mask, 0, x + f32(2)).astype(f32), "offset+pruned", offset=2.0)
    add("scaled", x, x * f32(0.3), "scaled", scale=float(f32(0.3)))
    add("scaled.half", x, x * f32(0.5), "scaled", scale=0.5)
    add("scaled.back", x, -x, "scaled", scale=-1.0)
    add("scaled.rounded", x, bf(x * f32(0.3)), "scaled+rounded")
    add("scaled.pruned", x, np.where(mask, 0, x * f32(2)).astype(f32), "scaled+pruned", scale=2.0)
    add("pruned", x, np.where(mask, 0, x).astype(f32), "pruned")
    add("pruned.rounded", x, bf(np.where(mask, 0, x)), "pruned+rounded")
    x = new()
    add("transposed", x, x.T, "transposed")
    square = new(rows, rows)
    add("transposed.square", square, square.T, "transposed")
    add("transposed.rounded", x, bf(x.T), "transposed+rounded")
    add("transposed.rounded.back", bf(x.T), x, "transposed+rounded")
    add("transposed.offset", x, x.T + f32(1), "transposed+offset", offset=1.0)
    add("transposed.scaled", x, x.T * f32(0.25), "transposed+scaled", scale=0.25)
    add("transposed.permuted", x, x[order].T, "transposed+rows_permuted")
    add("transposed.rope.q_proj", x, rope(x, 2).T, "transposed+rope_permuted", heads=2)
    add("permuted", x, x[order], "rows_permuted")
    add("permuted.rounded", x, x[order].astype(np.float16), "rows_permuted+rounded")
    add("permuted.offset", x, x[order] + f32(1), "rows_permuted+offset", offset=1.0)
    add("permuted.scaled", x, x[order] * f32(8), "rows_permuted+scaled", scale=8.0)
    for heads in (1, 2, 4):
        add(f"rope.{heads}.q_proj", x, rope(x, heads), "rope_permuted", heads=heads)
        add(f"rope.{heads}.back.q_proj", rope(x, heads), x, "rope_permuted", heads=heads)
    add("rope.bias.q_proj", x[:, 0].copy(), rope(x[:, 0].copy(), 2), "rope_permuted", heads=2)
    add("rope.rounded.q_proj", x, bf(rope(x, 2)), "rope_permuted+rounded", heads=2)
    add(
        "rope.scaled.q_proj",
        x,
        rope(x, 2) * f32(0.125),
        "rope_permuted+scaled",
        heads=2,
        scale=0.125,
    )
    x = new()
    add("padded", x, np.pad(x, ((0, 5), (0, 0))), "padded")
    add("padded.columns", x, np.pad(x, ((0, 0), (0, 3))), "padded")
    add("padded.both", x, np.pad(x, ((0, 2), (0, 3))), "padded")
    add("padded.new", x, np.concatenate([x, new(4, columns)]), "padded")
    add("padded.rounded", x, bf(np.pad(x, ((0, 5), (0, 0)))), "padded+rounded")
    add("cut", x, x[:-3], "cut")
    add("cut.columns", x, x[:, :-3], "cut")
    add("cut.rounded", x, x[:-3].astype(np.float16), "cut+rounded")
    x = new()
    update = (new(rows, 2) @ new(2, columns)) * f32(0.05)
    add("low_rank", x, x + update, "low_rank", rank=2)
    coarse = quantized(x, levels=16, block=32, symmetric=False)
    add("quantised", x, coarse, "quantised")
    add("quantised.8", x, quantized(x, levels=255, block=64, symmetric=True), "quantised")
    add("quantised.f16", x, coarse.astype(np.float16), "quantised")
    add("quantised.back", coarse, x, "quantised")
    add("changed", x, new(), "unknown")
    add("changed.bf16", x, bf(new()), "unknown")
    add("changed.tuned", x, x + f32(0.01) * new(), "unknown")
    add("changed.norm", 1 + f32(0.1) * x[0], 1 + f32(0.1) * x[1], "unknown")
    add("changed.one", x[0, :1].copy(), x[1, :1].copy(), "unknown")
    add("changed.shape", new(3, 5), new(7, 11), "unknown")
    add("only_a", new(rows + 1, 3), None, "only_a")
    add("only_b", None, new(rows + 2, 3), "only_b")

    def join(name: str, cause: str, parts: list[Array], fused: Array) -> None:
        names = [f"{name}.{number}" for number in range(len(parts))]
        for part_name, part in zip(names, parts, strict=True):
            add(part_name, part, None, cause, other_names=f"{name}.whole")
        add(f"{name}.whole", None, fused, cause, other_names=", ".join(names))

    parts = [new(), new(rows // 2, columns), new(rows // 2, columns)]
    join("fused", "fused", parts, np.concatenate(parts))
    parts = [new() for _ in range(2)]
    join("fused.columns", "fused", parts, np.concatenate(parts, axis=1))
    parts = [new() for _ in range(3)]
    join("fused.transposed", "fused+transposed", parts, np.concatenate(parts).T)
    parts = [new() for _ in range(2)]
    join("fused.rounded", "fused+rounded", parts, bf(np.concatenate(parts)))
    parts = [new() for _ in range(3)]
    join("fused.stacked", "fused", parts, np.stack(parts))
    parts = [new() for _ in range(2)]
    add("split.whole", np.concatenate(parts), None, "split", other_names="split.0, split.1")
    for number, part in enumerate(parts):
        add(f"split.{number}", None, part, "split", other_names="split.whole")

    rename("", *[new()] * 2)
    x = new()
    rename("rounded", x, bf(x))
    x = new(columns + 7)
    rename("offset", x, x + f32(1), offset=1.0)
    x = new()
    rename("scaled", x, x * f32(3), scale=3.0)
    x = new()
    rename("transposed", x, x.T)
    x = new()
    rename("transposed+rounded", x, bf(x.T))
    x = new()
    rename("rows_permuted", x, x[order])
    x = new()
    rename("rope_permuted", x, rope(x, 4), heads=4)
    x = new()
    rename("padded", x, np.pad(x, ((0, 9), (0, 0))))
    x = new()
    rename("cut", x, x[:-9])
    x = new()
    rename("pruned", x, np.where(mask, 0, x).astype(f32))
    x = new()
    rename("low_rank", x, x + update, rank=2)
    x = new()
    rename("quantised", x, quantized(x, levels=16, block=32, symmetric=False))
    return model
