"""Pairs of models of which one was made of the other, explained with the truth known.

Models are like GPT-2, Llama, Gemma, Mixtral and ViT, with tiny widths. Each pair is made by a chain
of one to four transformations, drawn uniformly from all causes that `compare(explain=True)` admits,
on random subsets of the tensors. Every second pair is damaged: noise, a row, an element, a bit,
zeroed bytes, a NaN, two exchanged rows, tensors or layers, a stale tensor. A damaged tensor that is
called explained, or that is not named, is a failure; so is less than 98 % of the undamaged tensors
explained.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import xckpt
from tests.stats.kquants import kquantized
from torture.trial import Tally, read_evidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torture.trial import Trial

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32
ENOUGH = 0.98
_EXPERTS = 3
# Shares of models whose norms and biases are constants, and whose output is their embedding.
_FRESH, _TIED = 0.15, 0.25
# The share of damaged models in which two tensors were exchanged before all else.
_EARLY = 0.15
_FIRST_LAYER = re.compile(r"\.0\.")
_TYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@dataclass
class Made:
    """A tensor of the second model."""

    name: str
    values: Array
    #: Names of the tensors of the first model from which it was derived.
    origins: tuple[str, ...]
    #: Transformations that were applied, in order.
    steps: tuple[str, ...] = ()
    #: GGUF block type to store it in; empty to store plain values.
    stored: str = ""


@dataclass
class Pair:
    """Two models, with the transformations and damage between them."""

    family: str
    a: dict[str, Array]
    b: list[Made]
    chain: list[str] = field(default_factory=list)
    damage: str = ""
    #: Names of damaged tensors of the second model.
    damaged: set[str] = field(default_factory=set)
    #: Names of tensors of the first model that were exchanged before the chain.
    early: set[str] = field(default_factory=set)


# --- models ---------------------------------------------------------------------------------------


def make_model(family: str, rng: np.random.Generator) -> dict[str, Array]:
    """Return the tensors of a tiny model; some are untrained, and some have tied weights."""
    tensors = {name: values.astype(F32) for name, values in _FAMILIES[family](rng)}
    if rng.random() < _FRESH:
        for name, values in tensors.items():
            if values.ndim == 1:
                is_norm = name.endswith("weight")
                tensors[name] = np.full_like(values, np.rint(values.mean()) if is_norm else 0)
    embedding = "model.embed_tokens.weight"
    if "lm_head.weight" in tensors and rng.random() < _TIED:
        tensors["lm_head.weight"] = tensors[embedding].copy()
    return tensors


def _norm(rng: np.random.Generator, width: int, centre: float = 1.0) -> Array:
    return centre + 0.1 * rng.standard_normal(width)


def _weight(rng: np.random.Generator, *shape: int) -> Array:
    return 0.05 * rng.standard_normal(shape)


def _llama(
    rng: np.random.Generator, *, centre: float = 1.0, experts: int = 0, extra: bool = False
) -> Iterator[tuple[str, Array]]:
    width, inner, keys = 256, 256, int(rng.choice([16, 32]))
    layers, heads = int(rng.integers(2, 4)), 32
    yield "model.embed_tokens.weight", _weight(rng, int(rng.integers(20, 60)), width)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for role, rows in (("q", heads), ("k", keys), ("v", keys)):
            yield f"{base}.self_attn.{role}_proj.weight", _weight(rng, rows, width)
        yield f"{base}.self_attn.o_proj.weight", _weight(rng, heads, width)
        if experts:
            yield f"{base}.block_sparse_moe.gate.weight", _weight(rng, experts, width)
            for expert in range(experts):
                for role in ("w1", "w2", "w3"):
                    name = f"{base}.block_sparse_moe.experts.{expert}.{role}.weight"
                    yield name, _weight(rng, 16, inner)
        else:
            for role in ("gate", "up", "down"):
                yield f"{base}.mlp.{role}_proj.weight", _weight(rng, 24, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}.{name}.weight", _norm(rng, 64, centre)
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm") if extra else ():
            yield f"{base}.{name}.weight", _norm(rng, 64, centre)
    yield "model.norm.weight", _norm(rng, 64, centre)
    if not extra:
        yield "lm_head.weight", _weight(rng, int(rng.integers(20, 60)), width)


def _gpt2(rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    width, layers = 64, int(rng.integers(2, 4))
    yield "wte.weight", _weight(rng, int(rng.integers(40, 90)), width)
    yield "wpe.weight", _weight(rng, 32, width)
    for layer in range(layers):
        base = f"h.{layer}"
        shapes = {"attn.c_attn": (width, 96), "attn.c_proj": (32, width), "mlp.c_fc": (width, 128)}
        for name, shape in (shapes | {"mlp.c_proj": (128, width)}).items():
            yield f"{base}.{name}.weight", _weight(rng, *shape)
            yield f"{base}.{name}.bias", _weight(rng, shape[1])
        for name in ("ln_1", "ln_2"):
            yield f"{base}.{name}.weight", _norm(rng, width)
            yield f"{base}.{name}.bias", _weight(rng, width)
    yield "ln_f.weight", _norm(rng, width)
    yield "ln_f.bias", _weight(rng, width)


def _vit(rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    width, layers = 64, int(rng.integers(2, 4))
    yield "cls_token", _weight(rng, 1, 1, width)
    yield "pos_embed", _weight(rng, 1, 17, width)
    yield "patch_embed.proj.weight", _weight(rng, width, 3, 4, 4)
    yield "patch_embed.proj.bias", _weight(rng, width)
    for layer in range(layers):
        base = f"blocks.{layer}"
        for name, shape in (("attn.query", (32, width)), ("attn.key", (32, width)),
                            ("attn.value", (32, width)), ("attn.proj", (width, 32)),
                            ("mlp.fc1", (128, width)), ("mlp.fc2", (width, 128))):  # fmt: skip
            yield f"{base}.{name}.weight", _weight(rng, *shape)
            yield f"{base}.{name}.bias", _weight(rng, shape[0])
        for name in ("norm1", "norm2"):
            yield f"{base}.{name}.weight", _norm(rng, width)
            yield f"{base}.{name}.bias", _weight(rng, width)
    yield "norm.weight", _norm(rng, width)
    yield "head.weight", _weight(rng, 10, width)


_FAMILIES: dict[str, Callable[[np.random.Generator], Iterator[tuple[str, Array]]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "gemma": lambda rng: _llama(rng, centre=0.0, extra=True),
    "mixtral": lambda rng: _llama(rng, experts=_EXPERTS),
    "vit": _vit,
}


# --- transformations ------------------------------------------------------------------------------


def _subset(rng: np.random.Generator, items: list[Any]) -> list[Any]:
    """Return a random subset of items, with at least one of them."""
    if not items:
        return []
    chosen = rng.random(len(items)) < rng.uniform(0.2, 1.0)
    chosen[rng.integers(len(items))] = True
    return [item for item, is_in in zip(items, chosen, strict=True) if is_in]


def _replacing(*pairs: tuple[str, str]) -> Callable[[str], str]:
    def rule(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return rule


_RULES: tuple[Callable[[str], str], ...] = (
    lambda name: f"module.{name}",
    lambda name: name.removesuffix(".weight") + ".kernel" if name.endswith("weight") else name,
    _replacing(("layers.", "blk."), ("h.", "layer."), ("blocks.", "encoder.")),
    _replacing(("self_attn.", "attn_"), ("_proj", ""), ("mlp.", "ffn_")),
    _replacing(("model.", ""), ("attn.", "attention."), ("norm", "layer_norm")),
)


def renamed(pair: Pair, rng: np.random.Generator) -> None:
    """Rename a subset of the tensors by one rule."""
    rule = _RULES[rng.integers(len(_RULES))]
    used_names = {tensor.name for tensor in pair.b} | set(pair.a)
    for tensor in _subset(rng, pair.b):
        new = rule(tensor.name)
        if new not in used_names:
            tensor.name = new
            used_names.add(new)


def transposed(pair: Pair, rng: np.random.Generator) -> None:
    """Transpose a subset of the matrices."""
    for tensor in _subset(rng, [m for m in pair.b if m.values.ndim == 2]):
        tensor.values = np.ascontiguousarray(tensor.values.T)
        tensor.steps += ("transposed",)


def rope_permuted(pair: Pair, rng: np.random.Generator) -> None:
    """Interleave the halves of the heads of a subset of the tensors, or undo it."""
    heads, is_undone = int(rng.choice([1, 2, 4])), bool(rng.random() < 0.3)
    fitting = [m for m in pair.b if m.values.ndim <= 2 and m.values.shape[0] % (4 * heads) == 0]
    for tensor in _subset(rng, fitting):
        rows = tensor.values
        split = (rows.shape[0] // heads // 2, 2) if is_undone else (2, rows.shape[0] // heads // 2)
        parts = rows.reshape(heads, *split, *rows.shape[1:])
        tensor.values = np.ascontiguousarray(parts.swapaxes(1, 2).reshape(rows.shape))
        tensor.steps += ("rope_permuted",)


_ROLES = (
    (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (("gate_proj", "up_proj"), "gate_up_proj"),
    (("query", "key", "value"), "qkv"),
)


def _fusible_groups(pair: Pair) -> Iterator[tuple[str, list[Made]]]:
    """Yield groups of tensors that can be fused, with the name of the fused tensor."""
    by_name = {tensor.name: tensor for tensor in pair.b}
    for roles, fused_role in _ROLES:
        for name in [name for name in by_name if roles[0] in name]:
            names = [name.replace(roles[0], role) for role in roles]
            if all(part_name in by_name for part_name in names):
                yield (
                    name.replace(roles[0], fused_role),
                    [by_name[part_name] for part_name in names],
                )
    experts: dict[str, list[Made]] = defaultdict(list)
    for name, tensor in by_name.items():
        head, _, tail = name.partition(".experts.")
        if tail[:1].isdigit():
            experts[f"{head}.experts.{tail.partition('.')[2]}"].append(tensor)
    yield from ((name, tensors) for name, tensors in experts.items() if len(tensors) == _EXPERTS)


def _join(values: list[Array], *, is_stack: bool) -> Array | None:
    """Join tensors along their rows or columns, or stack them; None if they do not fit."""
    if is_stack:
        return np.stack(values) if len({v.shape for v in values}) == 1 else None
    for axis in range(values[0].ndim):
        other_shapes = {v.shape[:axis] + v.shape[axis + 1 :] for v in values}
        if len(other_shapes) == 1 and len({v.ndim for v in values}) == 1:
            return np.concatenate(values, axis)
    return None


def fused(pair: Pair, rng: np.random.Generator) -> None:
    """Join queries, keys and values, gates, or experts."""
    for name, parts in _subset(rng, list(_fusible_groups(pair))):
        joined = _join([part.values for part in parts], is_stack=".experts." in name)
        is_cut = any("split" in part.steps or part not in pair.b for part in parts)
        if joined is None or is_cut:
            continue
        origins = tuple(dict.fromkeys(origin for part in parts for origin in part.origins))
        steps = tuple(step for part in parts for step in part.steps)
        pair.b = [tensor for tensor in pair.b if tensor not in parts]
        pair.b.append(Made(name, joined, origins, (*steps, "fused")))


def split(pair: Pair, rng: np.random.Generator) -> None:
    """Cut a subset of the matrices into two or three."""
    count = int(rng.choice([2, 3]))
    fitting = [m for m in pair.b if m.values.ndim == 2 and m.values.shape[0] % count == 0
               and m.values.shape[0] >= 8 * count and not {"fused", "split"} & set(m.steps)
               and m.values.shape[0] <= 256]  # fmt: skip
    for tensor in _subset(rng, fitting)[:8]:
        for number, part in enumerate(np.split(tensor.values, count)):
            stem, _, leaf = tensor.name.rpartition(".")
            name = f"{stem}.part.{number}.{leaf}"
            pair.b.append(Made(name, part.copy(), tensor.origins, (*tensor.steps, "split")))
        pair.b = [other for other in pair.b if other is not tensor]


def rounded(pair: Pair, rng: np.random.Generator) -> None:
    """Round a subset of the tensors to another type, and store them in it or in their own."""
    name = str(rng.choice(list(_TYPES)))
    keeps_type = bool(rng.random() < 0.5)
    for tensor in _subset(rng, [m for m in pair.b if m.values.dtype != ml_dtypes.float8_e4m3fn]):
        new = tensor.values.astype(F32).astype(_TYPES[name])
        tensor.values = new.astype(tensor.values.dtype) if keeps_type else new
        tensor.steps += ("rounded",)


def quantised(pair: Pair, rng: np.random.Generator) -> None:
    """Quantise a subset of the matrices in blocks; K-quants are final."""
    from gguf import GGMLQuantizationType, quants

    kind = str(rng.choice(_BLOCKS))
    size = 256 if kind.endswith("K") else 32
    fitting = [m for m in pair.b if m.values.ndim >= 2 and m.values.shape[-1] % size == 0
               and not m.stored and m.values.dtype != ml_dtypes.float8_e4m3fn]  # fmt: skip
    for tensor in _subset(rng, fitting):
        if size == 256:
            tensor.stored = kind
        else:
            data = quants.quantize(tensor.values.astype(F32), GGMLQuantizationType[kind])
            tensor.values = quants.dequantize(data, GGMLQuantizationType[kind])
        tensor.steps += ("quantised",)


def padded(pair: Pair, rng: np.random.Generator) -> None:
    """Append rows of zeros to a subset of the matrices, as to a vocabulary."""
    extra_rows = int(rng.integers(1, 9))
    for tensor in _subset(rng, [m for m in pair.b if m.values.ndim == 2]):
        tensor.values = np.pad(tensor.values.astype(F32), ((0, extra_rows), (0, 0))).astype(
            tensor.values.dtype
        )
        tensor.steps += ("padded",)


def offset(pair: Pair, rng: np.random.Generator) -> None:
    """Add 1 to the norms of a model like Gemma."""
    norms = [m for m in pair.b if "norm" in m.name and not m.steps and m.values.ndim == 1
             and m.name.endswith(".weight")]  # fmt: skip
    for tensor in _subset(rng, norms):
        tensor.values = (tensor.values + F32(1)).astype(F32)
        tensor.steps += ("offset",)


STEPS = (renamed, transposed, rope_permuted, fused, split, rounded, quantised, padded, offset)


# --- damage ---------------------------------------------------------------------------------------


def _are_equal(pair: Pair, first: Made, second: Made) -> bool:
    """Whether two tensors, or their originals, are equal; exchanging equal ones is no damage."""
    origins = [[pair.a[origin] for origin in tensor.origins] for tensor in (first, second)]
    if np.array_equal(first.values, second.values) or len(origins[0]) != len(origins[1]):
        return bool(np.array_equal(first.values, second.values))
    return all(np.array_equal(x, y) for x, y in zip(*origins, strict=True))


def swapped(pair: Pair, rng: np.random.Generator) -> None:
    """Exchange two tensors of one shape before all transformations."""
    for _ in range(8):
        tensor = pair.b[rng.integers(len(pair.b))]
        candidates = [partner for partner in pair.b if partner.values.shape == tensor.values.shape
                  and not np.array_equal(partner.values, tensor.values)]  # fmt: skip
        if candidates:
            partner = candidates[rng.integers(len(candidates))]
            tensor.values, partner.values = partner.values, tensor.values
            pair.damage = "swapped at first"
            pair.early = {tensor.origins[0], partner.origins[0]}
            return


def _exchange_layers(pair: Pair) -> None:
    """Exchange the first two layers."""
    by_name = {tensor.name: tensor for tensor in pair.b}
    for tensor in pair.b:
        partner = by_name.get(_FIRST_LAYER.sub(".1.", tensor.name, count=1))
        if (
            partner is not None
            and partner is not tensor
            and partner.values.shape == tensor.values.shape
            and (partner.stored, partner.values.dtype) == (tensor.stored, tensor.values.dtype)
            and not _are_equal(pair, partner, tensor)
        ):
            tensor.values, partner.values = partner.values, tensor.values
            pair.damaged |= {tensor.name, partner.name}


def _flip_bit(pair: Pair, tensor: Made, rng: np.random.Generator) -> None:
    """Flip one bit of an element, unless the number stays the same or blocks would hide it."""
    patterns = tensor.values.copy().view(f"u{tensor.values.itemsize}").reshape(-1)
    bit = int(rng.integers(8 * tensor.values.itemsize))
    patterns[rng.integers(patterns.size)] ^= patterns.dtype.type(1 << bit)
    new = patterns.view(tensor.values.dtype).reshape(tensor.values.shape)
    if not tensor.stored and not np.array_equal(new.astype(F32), tensor.values.astype(F32)):
        tensor.values = new
        pair.damaged.add(tensor.name)


def _replace_with_noise(values: Array, spread: float, rng: np.random.Generator) -> Array:
    noisy: Array = values.mean() + spread * rng.standard_normal(values.shape)
    return noisy


def _replace_row(values: Array, spread: float, rng: np.random.Generator) -> Array:
    rows = values.reshape(len(values), -1)
    noise = 2 * spread * rng.standard_normal(rows.shape[1])
    row = int(rng.integers(len(rows)))
    rows[row] = rows.mean() + noise + spread
    return values


def _replace_element(values: Array, spread: float, rng: np.random.Generator) -> Array:
    values.reshape(-1)[rng.integers(values.size)] += 12 * (np.abs(values).max() + spread)
    return values


def _zero_run(values: Array, _: float, rng: np.random.Generator) -> Array | None:
    count = int(rng.integers(32, values.size + 1))
    start = int(rng.integers(values.size - count + 1))
    run = values.reshape(-1)[start : start + count]
    if np.count_nonzero(run) < 24:
        return None
    run[:] = 0
    return values


def _exchange_rows(values: Array, spread: float, rng: np.random.Generator) -> Array | None:
    first, second = rng.integers(len(values), size=2)
    values[[first, second]] = values[[second, first]]
    return values if np.abs(values[first] - values[second]).max() >= spread else None


def _set_nan(values: Array, _: float, rng: np.random.Generator) -> Array:
    values.reshape(-1)[rng.integers(values.size)] = np.nan
    return values


def _drift(values: Array, spread: float, rng: np.random.Generator) -> Array:
    stale: Array = values + 0.3 * spread * rng.standard_normal(values.shape)
    return stale


#: Functions that return the damaged values of a tensor, or None if the damage is too small.
_DAMAGE: dict[str, Callable[[Array, float, np.random.Generator], Array | None]] = {
    "noise": _replace_with_noise,
    "row": _replace_row,
    "element": _replace_element,
    "zeroed": _zero_run,
    "rows": _exchange_rows,
    "not a number": _set_nan,
    "stale": _drift,
}
_KINDS = (*_DAMAGE, "swapped", "layers", "bit")


def _swap_late(pair: Pair, tensor: Made, rng: np.random.Generator) -> None:
    """Exchange a tensor with another of the same shape."""
    candidates = [m for m in pair.b if m is not tensor and m.values.shape == tensor.values.shape
              and m.values.size >= 64 and not _are_equal(pair, m, tensor)
              and (m.stored, m.values.dtype) == (tensor.stored, tensor.values.dtype)]  # fmt: skip
    if candidates:
        partner = candidates[rng.integers(len(candidates))]
        tensor.values, partner.values = partner.values, tensor.values
        pair.damaged |= {tensor.name, partner.name}


def damaged(pair: Pair, rng: np.random.Generator) -> None:
    """Damage a tensor, or exchange several, by more than any quantiser would."""
    kind = str(rng.choice(_KINDS))
    large = [m for m in pair.b if m.values.size >= 64]
    tensor = large[rng.integers(len(large))]
    if kind == "layers":
        _exchange_layers(pair)
    elif kind == "swapped":
        _swap_late(pair, tensor, rng)
    elif kind == "bit":
        _flip_bit(pair, tensor, rng)
    else:
        values = tensor.values.astype(F32)
        new = _DAMAGE[kind](values, float(values.std()) or 1.0, rng)
        if new is not None and (np.isfinite(new).all() or not tensor.stored):
            new = new.astype(tensor.values.dtype)
            if not np.array_equal(new.astype(F32), tensor.values.astype(F32)):
                tensor.values = new
                pair.damaged.add(tensor.name)
    pair.damage = kind if pair.damaged else ""


# --- one pair -------------------------------------------------------------------------------------


def draw_pair(rng: np.random.Generator, *, is_damaged: bool) -> Pair:
    """Return a random pair."""
    chain = [STEPS[n] for n in rng.integers(len(STEPS), size=rng.integers(1, 5))]
    family = "gemma" if offset in chain else str(rng.choice([*_FAMILIES]))
    a = make_model(family, rng)
    pair = Pair(family, a, [Made(name, values.copy(), (name,)) for name, values in a.items()])
    if is_damaged and rng.random() < _EARLY:
        swapped(pair, rng)
    for step in chain:
        stored = [tensor for tensor in pair.b if tensor.stored]
        pair.b = [tensor for tensor in pair.b if not tensor.stored]
        step(pair, rng)
        pair.b += stored
        pair.chain.append(step.__name__)
    if pair.early:
        pair.damaged = {tensor.name for tensor in pair.b if set(tensor.origins) & pair.early}
    elif is_damaged:
        damaged(pair, rng)
    return pair


def materialise(pair: Pair, folder: Path) -> Any:
    """Return the second model: a mapping, or a GGUF file if it has blocks."""
    if not any(tensor.stored for tensor in pair.b):
        return {tensor.name: tensor.values for tensor in pair.b}
    from gguf import GGMLQuantizationType, GGUFWriter

    path = folder / "b.gguf"
    writer = GGUFWriter(path, "gemma2" if pair.family == "gemma" else "llama")
    for tensor in pair.b:
        values = np.ascontiguousarray(tensor.values)
        if tensor.stored:
            blocks = kquantized(values.astype(F32), tensor.stored.lower())
            writer.add_tensor(tensor.name, blocks, raw_dtype=GGMLQuantizationType[tensor.stored])
        elif values.dtype == ml_dtypes.bfloat16:
            writer.add_tensor(
                tensor.name, values.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16
            )
        else:
            plain = values if values.dtype == np.float16 else values.astype(F32)
            writer.add_tensor(tensor.name, plain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass
class Verdict:
    """The false claims about a pair, and the number of explained tensors."""

    false: list[str]
    unnamed: list[str]
    explained: int
    undamaged: int
    open: list[str]


def judge(pair: Pair, folder: Path) -> Verdict:
    """Compare a pair, and check the outcome against the known damage."""
    comparison = xckpt.compare(
        pair.a, materialise(pair, folder), explain=True, cache=False, progress=False
    )
    table = xckpt.table(comparison)
    outcomes = table["outcome"].to_dict()
    touched = {o for tensor in pair.b if tensor.name in pair.damaged for o in tensor.origins}
    claims = {
        name: set(other_names.split(", "))
        for name, other_names in table["other_names"].to_dict().items()
        if outcomes[name] == "explained" and other_names
    }
    false = [name for name in pair.damaged if outcomes.get(name) == "explained"]
    # Tensors of `a` that are claimed to equal a damaged tensor.
    false += [
        name
        for name, other_names in claims.items()
        if name in pair.a and other_names & pair.damaged
        and not any("fused" in tensor.steps for tensor in pair.b if tensor.name in other_names)
    ]  # fmt: skip
    unnamed = [name for name in pair.damaged if outcomes.get(name) in {None, "explained"}]
    rows = {tensor.name for tensor in pair.b if not set(tensor.origins) & touched}
    rows |= set(pair.a) - touched
    explained = sum(outcomes.get(name) == "explained" for name in rows)
    return Verdict(false, unnamed, explained, len(rows),
                   [name for name in rows if outcomes.get(name) != "explained"])  # fmt: skip


def run(trial: Trial) -> Iterator[Tally]:
    """Compare random pairs until the time is over."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    start = time.monotonic()
    number = failures = 0
    while trial.remaining > 0:
        seed = [trial.seed % (1 << 32), number]
        rng = np.random.default_rng(seed)
        pair = draw_pair(rng, is_damaged=number % 2 == 1)
        case = {"seed": seed, "chain": pair.chain, "family": pair.family, "damage": pair.damage}
        verdict = judge(pair, trial.folder)
        wrong = [*verdict.false, *verdict.unnamed]
        if wrong:
            failures += 1
            trial.fail(
                "a false claim", {"pair.json": json.dumps(case).encode()}, f"{case}: {wrong}"
            )
        chain = {f"with {step}" for step in pair.chain}
        length = f"{len(pair.chain)} transformations"
        for key in chain | {length, f"damage: {pair.damage or 'none'}", "all"}:
            counts[key].update(
                pairs=1,
                false=bool(verdict.false),
                unnamed=bool(verdict.unnamed),
                explained=verdict.explained,
                undamaged=verdict.undamaged,
            )
        number += 1
    seconds = time.monotonic() - start
    for key, count in sorted(counts.items(), key=lambda item: (item[0] != "all", item[0])):
        share = count["explained"] / max(1, count["undamaged"])
        summary = f"{100 * share:.2f} % of {count['undamaged']:,} undamaged tensors explained"
        is_short = key == "all" and count["pairs"] >= 100 and share < ENOUGH
        yield Tally(key, count["pairs"], max(count["false"], count["unnamed"]) + is_short,
                    seconds if key == "all" else 0.0, summary)  # fmt: skip


def again(path: Path) -> None:
    """Compare the pair of a recorded failure again, and raise if a claim is still false."""
    from pathlib import Path as Folder
    from tempfile import TemporaryDirectory

    case = json.loads(read_evidence(path)["pair.json"])
    rng = np.random.default_rng(case["seed"])
    pair = draw_pair(rng, is_damaged=case["seed"][1] % 2 == 1)
    with TemporaryDirectory() as folder:
        verdict = judge(pair, Folder(folder))
    if verdict.false or verdict.unnamed:
        raise AssertionError(f"{case}: {[*verdict.false, *verdict.unnamed]}")
