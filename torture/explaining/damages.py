"""Kinds of damage: to the numbers of one tensor, between tensors, in one step, and to what is stored.

A damage of numbers is done to the first model before it is converted, or to the second one before
it is stored. Every damage is done to a copy: what differs at the end was damaged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from torture.explaining.conversions import Made, Slip, interleaved, slot
from torture.explaining.models import F32, Array, Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torture.explaining.storing import Stored

Rng = np.random.Generator
Numbers = dict[str, Array]
EMBEDDING = re.compile(r".*(embed|wte|shared\.|lm_head|token_embd|tok_embeddings)")
_LAYER = re.compile(r"(?:^|[./])(?:layers?|h|blocks?|blk|encoder_layer)[._](\d+)[./]")
#: Fewest siblings of which one can be told to be unlike the others.
SIBLINGS = 4


@dataclass
class Damage:
    """A damage that was drawn: its kind, and where it was done."""

    kind: str
    stage: str
    names: set[str] = field(default_factory=set)
    slip: Slip | None = None


# --- the numbers of one tensor --------------------------------------------------------------------
# Each function changes a float32 copy and returns it, or None if it does not fit the tensor.

_Change = "Callable[[Array, Sizes, Rng], Array | None]"
ONE: dict[str, Callable[[Array, Sizes, Rng], Array | None]] = {}
#: Kinds that change all of a tensor in a way that needs siblings to tell.
AMONG_SIBLINGS = {"transposed, unlike its siblings"}


def one(
    kind: str,
) -> Callable[[Callable[[Array, Sizes, Rng], Array | None]], Callable[[Array, Sizes, Rng], Array | None]]:  # fmt: skip
    """Register a damage of the numbers of one tensor."""

    def register(
        change: Callable[[Array, Sizes, Rng], Array | None],
    ) -> Callable[[Array, Sizes, Rng], Array | None]:
        ONE[kind] = change
        return change

    return register


def _spread(x: Array) -> float:
    return float(x.std()) or 0.05


def _rows(x: Array) -> Array | None:
    return x.reshape(len(x), -1) if x.ndim > 1 and len(x) > 1 else None


def _two(count: int, rng: Rng) -> tuple[int, int]:
    first, second = rng.choice(count, 2, replace=False)
    return int(first), int(second)


@one("one large element")
def _large(x: Array, _: Sizes, rng: Rng) -> Array:
    x.reshape(-1)[rng.integers(x.size)] += F32(8 * np.abs(x).max() + _spread(x))
    return x


@one("one small element")
def _small(x: Array, _: Sizes, rng: Rng) -> Array:
    x.reshape(-1)[rng.integers(x.size)] += F32(_spread(x) * 10.0 ** rng.uniform(-3, -0.5))
    return x


@one("last element")
def _last(x: Array, _: Sizes, rng: Rng) -> Array:
    x.reshape(-1)[-1] += F32(_spread(x) * rng.choice([0.01, 1, 5]))
    return x


@one("one zero")
def _zero(x: Array, _: Sizes, rng: Rng) -> Array:
    x.reshape(-1)[rng.integers(x.size)] = 0
    return x


@one("two elements exchanged")
def _exchange_elements(x: Array, _: Sizes, rng: Rng) -> Array:
    flat = x.reshape(-1)
    first, second = _two(flat.size, rng)
    flat[[first, second]] = flat[[second, first]]
    return x


@one("row of noise")
def _row(x: Array, _: Sizes, rng: Rng) -> Array | None:
    rows = _rows(x)
    if rows is None:
        return None
    rows[rng.integers(len(rows))] = _spread(x) * rng.standard_normal(rows.shape[1])
    return x


@one("column of noise")
def _column(x: Array, _: Sizes, rng: Rng) -> Array | None:
    rows = _rows(x)
    if rows is None:
        return None
    rows[:, rng.integers(rows.shape[1])] = _spread(x) * rng.standard_normal(len(rows))
    return x


def _heads(x: Array, sizes: Sizes) -> Array | None:
    """Return the rows of a matrix as heads, if there are at least two."""
    if x.ndim != 2 or len(x) % sizes.head or len(x) < 2 * sizes.head:
        return None
    return x.reshape(-1, sizes.head, x.shape[1])


@one("head of noise")
def _head(x: Array, sizes: Sizes, rng: Rng) -> Array | None:
    heads = _heads(x, sizes)
    if heads is None:
        return None
    heads[rng.integers(len(heads))] = _spread(x) * rng.standard_normal(heads.shape[1:])
    return x


@one("two heads exchanged")
def _exchange_heads(x: Array, sizes: Sizes, rng: Rng) -> Array | None:
    heads = _heads(x, sizes)
    if heads is None:
        return None
    first, second = _two(len(heads), rng)
    heads[[first, second]] = heads[[second, first]]
    return x


@one("heads moved on by one")
def _move_heads(x: Array, sizes: Sizes, _: Rng) -> Array | None:
    heads = _heads(x, sizes)
    return None if heads is None else np.roll(heads, 1, axis=0).reshape(x.shape)


@one("halves of each head exchanged")
def _exchange_halves(x: Array, sizes: Sizes, _: Rng) -> Array | None:
    heads = _heads(x, sizes)
    return None if heads is None else np.roll(heads, sizes.head // 2, axis=1).reshape(x.shape)


@one("halves of the rows exchanged")
def _exchange_both(x: Array, _: Sizes, __: Rng) -> Array | None:
    return None if len(x) % 2 or len(x) < 4 else np.roll(x, len(x) // 2, axis=0)


@one("gates exchanged")
def _gates(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if len(x) % 4 or x.ndim != 2 or len(x) < 8:
        return None
    quarters = x.reshape(4, len(x) // 4, -1)
    first, second = _two(4, rng)
    quarters[[first, second]] = quarters[[second, first]]
    return x


@one("two rows exchanged")
def _exchange_rows(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if len(x) < 2:
        return None
    first, second = _two(len(x), rng)
    x[[first, second]] = x[[second, first]]
    return x


@one("two columns exchanged")
def _exchange_columns(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if x.ndim < 2 or x.shape[-1] < 2:
        return None
    first, second = _two(x.shape[-1], rng)
    x[..., [first, second]] = x[..., [second, first]]
    return x


@one("rows in any order")
def _shuffle(x: Array, _: Sizes, rng: Rng) -> Array | None:
    return None if len(x) < 4 else x[rng.permutation(len(x))]


@one("rows reversed")
def _reverse(x: Array, _: Sizes, __: Rng) -> Array | None:
    return None if len(x) < 2 else x[::-1].copy()


@one("rows shifted by one")
def _shift(x: Array, _: Sizes, rng: Rng) -> Array | None:
    return None if len(x) < 4 else np.roll(x, int(rng.choice([-1, 1])), axis=0)


@one("columns shifted by one")
def _shift_columns(x: Array, _: Sizes, __: Rng) -> Array | None:
    return None if x.ndim < 2 or x.shape[-1] < 2 else np.roll(x, 1, axis=-1)


@one("data shifted by one element")
def _shift_data(x: Array, _: Sizes, __: Rng) -> Array:
    return np.roll(x.reshape(-1), 1).reshape(x.shape)


@one("data in the order of Fortran")
def _fortran(x: Array, _: Sizes, __: Rng) -> Array | None:
    if x.ndim < 2 or len(set(x.shape)) < 2 or 1 in x.shape:
        return None
    return x.reshape(-1).reshape(x.shape, order="F").copy()


@one("interleaved as for rotary embeddings")
def _interleave(x: Array, sizes: Sizes, rng: Rng) -> Array | None:
    heads = int(rng.choice([1, sizes.heads, sizes.key_heads]))
    if x.ndim > 2 or len(x) % (4 * heads):
        return None
    return interleaved(x, heads).copy()


@one("interleaved twice")
def _interleave_twice(x: Array, sizes: Sizes, _: Rng) -> Array | None:
    if x.ndim != 2 or len(x) % (8 * sizes.heads):
        return None
    return interleaved(interleaved(x, sizes.heads), sizes.heads // 2).copy()


@one("transposed, unlike its siblings")
def _transpose(x: Array, _: Sizes, __: Rng) -> Array | None:
    return x.T.copy() if x.ndim == 2 and x.shape[0] == x.shape[1] else None


@one("one row twice")
def _row_twice(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if len(x) < 2:
        return None
    first, second = _two(len(x), rng)
    x[first] = x[second]
    return x


@one("row of zeros")
def _zero_row(x: Array, _: Sizes, rng: Rng) -> Array | None:
    rows = _rows(x)
    if rows is None:
        return None
    rows[rng.integers(len(rows))] = 0
    return x


@one("column of zeros")
def _zero_column(x: Array, _: Sizes, rng: Rng) -> Array | None:
    rows = _rows(x)
    if rows is None:
        return None
    rows[:, rng.integers(rows.shape[1])] = 0
    return x


@one("hole of zeros")
def _hole(x: Array, _: Sizes, rng: Rng) -> Array:
    count = int(rng.integers(min(32, x.size), x.size + 1))
    start = int(rng.integers(x.size - count + 1))
    x.reshape(-1)[start : start + count] = 0
    return x


@one("second half never written")
def _half(x: Array, _: Sizes, __: Rng) -> Array:
    x.reshape(-1)[x.size // 2 :] = 0
    return x


@one("smallest tenth set to zero")
def _prune(x: Array, _: Sizes, __: Rng) -> Array:
    x[np.abs(x) < np.quantile(np.abs(x), 0.1)] = 0
    return x


@one("signs flipped")
def _negate(x: Array, _: Sizes, __: Rng) -> Array:
    return -x


@one("signs of one row flipped")
def _negate_row(x: Array, _: Sizes, rng: Rng) -> Array:
    row = rng.integers(len(x))
    x[row] = -x[row]
    return x


@one("signs lost")
def _absolute(x: Array, _: Sizes, __: Rng) -> Array:
    return np.abs(x)


@one("scaled by 1.001")
def _scale(x: Array, _: Sizes, rng: Rng) -> Array:
    return x * F32(1 + 1e-3 * rng.choice([-1, 1]))


@one("scaled as attention is")
def _scale_head(x: Array, sizes: Sizes, rng: Rng) -> Array:
    return x * F32(rng.choice([sizes.head**-0.5, 0.5, 2, sizes.width**0.5]))


@one("one row scaled")
def _scale_row(x: Array, _: Sizes, rng: Rng) -> Array:
    x[rng.integers(len(x))] *= F32(1 + rng.choice([-0.1, 0.01, 0.1]))
    return x


@one("noise of 1e-3")
def _noise_3(x: Array, _: Sizes, rng: Rng) -> Array:
    return x + (1e-3 * _spread(x) * rng.standard_normal(x.shape)).astype(F32)


@one("noise of 1e-6")
def _noise_6(x: Array, _: Sizes, rng: Rng) -> Array:
    return x + (1e-6 * _spread(x) * rng.standard_normal(x.shape)).astype(F32)


@one("stale copy")
def _stale(x: Array, _: Sizes, rng: Rng) -> Array:
    return x + (rng.choice([0.03, 0.3]) * _spread(x) * rng.standard_normal(x.shape)).astype(F32)


@one("initialised anew")
def _anew(x: Array, _: Sizes, rng: Rng) -> Array:
    return (x.mean() + _spread(x) * rng.standard_normal(x.shape)).astype(F32)


@one("mean removed")
def _centre(x: Array, _: Sizes, __: Rng) -> Array:
    return x - x.mean()


@one("means of the rows removed")
def _centre_rows(x: Array, _: Sizes, __: Rng) -> Array | None:
    return x - x.mean(axis=-1, keepdims=True) if x.ndim > 1 and x.shape[-1] > 1 else None


@one("clipped")
def _clip(x: Array, _: Sizes, rng: Rng) -> Array:
    limit = rng.choice([1.5, 2.0, 2.5]) * _spread(x)
    return np.clip(x, x.mean() - limit, x.mean() + limit).astype(F32)


@one("some rows rounded to float8")
def _round_rows(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if len(x) < 4:
        return None
    rows = slice(0, int(rng.integers(1, len(x) // 2 + 1)))
    x[rows] = x[rows].astype(ml_dtypes.float8_e4m3fn).astype(F32)
    return x


@one("1 added")
def _add_one(x: Array, _: Sizes, __: Rng) -> Array | None:
    return x + F32(1) if x.ndim == 1 else None


@one("update of low rank")
def _low_rank(x: Array, _: Sizes, rng: Rng) -> Array | None:
    if x.ndim != 2 or min(x.shape) < 4:
        return None
    update = np.outer(rng.standard_normal(len(x)), rng.standard_normal(x.shape[1]))
    return x + (0.1 * _spread(x) * update).astype(F32)


@one("vocabulary cut off")
def _cut_off(x: Array, _: Sizes, rng: Rng) -> Array | None:
    return x[: len(x) - int(rng.integers(1, 12))] if x.ndim == 2 and len(x) > 16 else None


_FOR_VOCABULARIES = {"vocabulary cut off"}
_FOR_NORMS = {"1 added"}


# --- between tensors ------------------------------------------------------------------------------
# Each function changes a mapping of float32 copies and returns the names of what it changed.

MANY: dict[str, Callable[[Numbers, Rng], set[str]]] = {}


def many(
    kind: str,
) -> Callable[[Callable[[Numbers, Rng], set[str]]], Callable[[Numbers, Rng], set[str]]]:
    """Register a damage between tensors."""

    def register(change: Callable[[Numbers, Rng], set[str]]) -> Callable[[Numbers, Rng], set[str]]:
        MANY[kind] = change
        return change

    return register


def _exchange(x: Numbers, first: str, second: str) -> set[str]:
    if x[first].shape != x[second].shape or np.array_equal(x[first], x[second]):
        return set()
    x[first], x[second] = x[second], x[first]
    return {first, second}


_PAIRS = (("q_proj", "k_proj"), ("gate_proj", "up_proj"), ("v_proj", "o_proj"), ("w1", "w3"),
          ("query", "key"), ("k_proj", "v_proj"), ("key", "value"), ("wi_0", "wi_1"),
          ("norm1", "norm2"), ("ln_1", "ln_2"), ("conv1", "conv2"), ("bn1", "bn2"),
          ("input_layernorm", "post_attention_layernorm"), (".q.", ".k."),
          ("layernorm_before", "layernorm_after"), ("running_mean", "bias"),
          ("weight_hh", "weight_ih"), ("fc1.bias", "fc2.bias"))  # fmt: skip


@many("roles exchanged")
def _exchange_roles(x: Numbers, rng: Rng) -> set[str]:
    for index in rng.permutation(len(_PAIRS)):
        first, second = _PAIRS[index]
        names = [name for name in x if first in name and name.replace(first, second) in x]
        for name in rng.permutation(names)[:3]:
            names_changed = _exchange(x, str(name), str(name).replace(first, second))
            if names_changed:
                return names_changed
    return set()


def _layers(x: Numbers) -> dict[str, dict[int, str]]:
    """Return the names of the tensors of each place, by the number of their layer."""
    by_place: dict[str, dict[int, str]] = {}
    for name in x:
        match = _LAYER.search(name)
        if match:
            place = name[: match.start(1)] + "#" + name[match.end(1) :]
            by_place.setdefault(place, {})[int(match[1])] = name
    return {place: names for place, names in by_place.items() if len(names) > 1}


@many("tensors of two layers exchanged")
def _exchange_siblings(x: Numbers, rng: Rng) -> set[str]:
    places = _layers(x)
    if not places:
        return set()
    names = [*places.values()][rng.integers(len(places))]
    first, second = _two(len(names), rng)
    ordered = [*names.values()]
    return _exchange(x, ordered[first], ordered[second])


def _of_stack(x: Numbers, rng: Rng) -> tuple[list[dict[int, str]], int, int]:
    """Return the places of one stack of layers, and two of its numbers."""
    places = _layers(x)
    if not places:
        return [], 0, 0
    stacks = sorted({place.partition("#")[0] for place in places})
    stack = stacks[rng.integers(len(stacks))]
    chosen = [names for place, names in places.items() if place.partition("#")[0] == stack]
    numbers = sorted(set.intersection(*[set(names) for names in chosen]))
    if len(numbers) < 2:
        return [], 0, 0
    first, second = _two(len(numbers), rng)
    return chosen, numbers[first], numbers[second]


@many("two layers exchanged")
def _exchange_layers(x: Numbers, rng: Rng) -> set[str]:
    places, first, second = _of_stack(x, rng)
    return set().union(*[_exchange(x, names[first], names[second]) for names in places])


def _replace(x: Numbers, name: str, values: Array) -> set[str]:
    if x[name].shape != values.shape or np.array_equal(x[name], values):
        return set()
    x[name] = values.copy()
    return {name}


@many("copied layer")
def _copy_layer(x: Numbers, rng: Rng) -> set[str]:
    places, first, second = _of_stack(x, rng)
    return set().union(*[_replace(x, names[first], x[names[second]]) for names in places])


@many("copied tensor")
def _copy_tensor(x: Numbers, rng: Rng) -> set[str]:
    places, first, second = _of_stack(x, rng)
    if not places:
        return set()
    names = places[rng.integers(len(places))]
    return _replace(x, names[first], x[names[second]])


@many("mean of two layers")
def _mix_layers(x: Numbers, rng: Rng) -> set[str]:
    places, first, second = _of_stack(x, rng)
    if not places:
        return set()
    names = places[rng.integers(len(places))]
    if x[names[first]].shape != x[names[second]].shape:
        return set()
    return _replace(x, names[first], (x[names[first]] + x[names[second]]) / F32(2))


@many("stale layer")
def _stale_layer(x: Numbers, rng: Rng) -> set[str]:
    places, first, _ = _of_stack(x, rng)
    share = rng.choice([0.02, 0.2])
    return set().union(*[
        _replace(x, names[first], x[names[first]] + (share * _spread(x[names[first]])
                 * rng.standard_normal(x[names[first]].shape)).astype(F32))
        for names in places
    ])  # fmt: skip


@many("layers moved on by one")
def _move_layers(x: Numbers, _: Rng) -> set[str]:
    changed: set[str] = set()
    for names in _layers(x).values():
        values = [x[name] for name in names.values()]
        if len({v.shape for v in values}) == 1:
            for name, new in zip(names.values(), values[1:] + values[:1], strict=True):
                changed |= _replace(x, name, new)
    return changed


_EXPERT = re.compile(r"(.*experts\.)(\d+)(\..*)")


def _expert_names(x: Numbers, rng: Rng) -> tuple[list[str], list[str]]:
    """Return the names of two experts of one layer."""
    bases = sorted({match[1] for match in map(_EXPERT.fullmatch, x) if match})
    if not bases:
        return [], []
    base = bases[rng.integers(len(bases))]
    numbers = sorted(
        {match[2] for match in map(_EXPERT.fullmatch, x) if match and match[1] == base}
    )
    first, second = _two(len(numbers), rng)
    return ([name for name in x if name.startswith(f"{base}{numbers[first]}.")],
            [name for name in x if name.startswith(f"{base}{numbers[second]}.")])  # fmt: skip


@many("two experts exchanged")
def _exchange_experts(x: Numbers, rng: Rng) -> set[str]:
    firsts, seconds = _expert_names(x, rng)
    return set().union(*[_exchange(x, a, b) for a, b in zip(firsts, seconds, strict=True)])


@many("one expert is another")
def _copy_expert(x: Numbers, rng: Rng) -> set[str]:
    firsts, seconds = _expert_names(x, rng)
    return set().union(*[_replace(x, a, x[b]) for a, b in zip(firsts, seconds, strict=True)])


@many("stale expert")
def _stale_expert(x: Numbers, rng: Rng) -> set[str]:
    names, _ = _expert_names(x, rng)
    return set().union(*[
        _replace(x, n, x[n] + (0.2 * _spread(x[n]) * rng.standard_normal(x[n].shape)).astype(F32))
        for n in names
    ])  # fmt: skip


@many("expert of zeros")
def _zero_expert(x: Numbers, rng: Rng) -> set[str]:
    names, _ = _expert_names(x, rng)
    return set().union(*[_replace(x, name, np.zeros_like(x[name])) for name in names])


@many("bias or norm of the neighbour")
def _neighbour(x: Numbers, rng: Rng) -> set[str]:
    vectors = [name for name, values in x.items() if values.ndim == 1]
    for name in rng.permutation(vectors)[:8]:
        others = [n for n in vectors if n != name and x[n].shape == x[name].shape
                  and n.rpartition(".")[2] == name.rpartition(".")[2]]  # fmt: skip
        if others:
            return _replace(x, str(name), x[others[rng.integers(len(others))]])
    return set()


@many("+1 on every norm")
def _raise_all(x: Numbers, _: Rng) -> set[str]:
    names = [n for n in x if re.search(r"(norm\w*|ln_\w)\.weight$", n) and x[n].ndim == 1]
    return set().union(*[_replace(x, name, x[name] + F32(1)) for name in names])


# --- what is stored -------------------------------------------------------------------------------
# Each function changes one stored tensor in place, and returns whether it fits.

STORED: dict[str, Callable[[Stored, Rng], bool]] = {}


def stored(
    kind: str,
) -> Callable[[Callable[[Stored, Rng], bool]], Callable[[Stored, Rng], bool]]:
    """Register a damage of what is stored."""

    def register(change: Callable[[Stored, Rng], bool]) -> Callable[[Stored, Rng], bool]:
        STORED[kind] = change
        return change

    return register


@stored("one bit")
def _bit(x: Stored, rng: Rng) -> bool:
    data = x.data.view(np.uint8).reshape(-1)
    data[rng.integers(data.size)] ^= np.uint8(1 << int(rng.integers(8)))
    return bool(np.isfinite(x.numbers).all()) or not x.blocks


def _patterns(x: Stored) -> Array:
    patterns: Array = x.data.view(f"u{x.data.itemsize}").reshape(-1)
    return patterns


@stored("one unit in the last place")
def _ulp(x: Stored, rng: Rng) -> bool:
    if x.blocks:
        return False
    patterns = _patterns(x)
    patterns[rng.integers(patterns.size)] ^= patterns.dtype.type(1)
    return True


@stored("low bits")
def _low_bits(x: Stored, rng: Rng) -> bool:
    if x.blocks:
        return False
    patterns = _patterns(x)
    count = int(rng.integers(1, patterns.size + 1)) if rng.random() < 0.5 else patterns.size
    chosen = rng.choice(patterns.size, count, replace=False)
    patterns[chosen] ^= rng.integers(0, 4, count).astype(patterns.dtype)
    return True


@stored("cut off instead of rounded")
def _truncate(x: Stored, _: Rng) -> bool:
    if x.blocks or x.data.dtype not in {np.dtype(F32), np.dtype(ml_dtypes.bfloat16)}:
        return False
    values = np.ascontiguousarray(x.made.values, F32)
    bits = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)
    if np.array_equal(bits, values):  # nothing was to be rounded
        return False
    x.data = bits.reshape(values.shape).astype(x.data.dtype)
    return True


@stored("not a number")
def _nan(x: Stored, rng: Rng) -> bool:
    if not x.blocks:
        x.data.reshape(-1)[rng.integers(x.data.size)] = np.nan
    return not x.blocks


@stored("infinity")
def _infinity(x: Stored, rng: Rng) -> bool:
    if x.blocks or x.data.dtype.name.startswith("float8"):
        return False
    x.data.reshape(-1)[rng.integers(x.data.size)] = rng.choice([-1, 1]) * np.inf
    return True


@stored("bytes of the elements exchanged")
def _swap_bytes(x: Stored, _: Rng) -> bool:
    if x.blocks or x.data.itemsize < 2:
        return False
    x.data = x.data.view(f"u{x.data.itemsize}").byteswap().view(x.data.dtype)
    return True


def _block_bytes(x: Stored) -> Array | None:
    """Return the blocks of a GGUF type whose first two bytes are a scale."""
    sizes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176}
    return x.data.reshape(-1, sizes[x.blocks]) if x.blocks in sizes else None


@stored("scale of a block")
def _scale_block(x: Stored, rng: Rng) -> bool:
    blocks = _block_bytes(x)
    if blocks is None:
        return False
    block = blocks[rng.integers(len(blocks))]
    scale = block[:2].view(np.float16).copy() * np.float16(rng.choice([0.5, 0.9, 2, 4]))
    block[:2] = scale.view(np.uint8)
    return True


@stored("scales of two blocks exchanged")
def _exchange_scales(x: Stored, rng: Rng) -> bool:
    blocks = _block_bytes(x)
    if blocks is None or len(blocks) < 2:
        return False
    first, second = _two(len(blocks), rng)
    blocks[[first, second], :2] = blocks[[second, first], :2]
    return True


@stored("two blocks exchanged")
def _exchange_blocks(x: Stored, rng: Rng) -> bool:
    blocks = _block_bytes(x)
    if blocks is None or len(blocks) < 2:
        return False
    first, second = _two(len(blocks), rng)
    blocks[[first, second]] = blocks[[second, first]]
    return True


@stored("quantised with a wrong scale")
def _scale_all(x: Stored, rng: Rng) -> bool:
    blocks = _block_bytes(x)
    if blocks is None:
        return False
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16)
    blocks[:, :2] = (scales * np.float16(rng.choice([0.95, 1.05, 1.5]))).view(np.uint8)
    return True


@stored("one code")
def _code(x: Stored, rng: Rng) -> bool:
    blocks = _block_bytes(x)
    if blocks is None:
        return False
    block = blocks[rng.integers(len(blocks))]
    position = int(rng.integers(len(block) // 2, len(block)))
    block[position] ^= np.uint8(1 << int(rng.integers(8)))
    return True


MISSING = "tensor missing"
SLIPPED = "a step done wrong"

KINDS = (*ONE, *MANY, *STORED, MISSING, SLIPPED, SLIPPED, SLIPPED)


# --- where it is done -----------------------------------------------------------------------------


def siblings(name: str, tensors: dict[str, Array]) -> int:
    """Return the number of tensors that share the place and shape of one."""
    place = slot(name)
    return sum(slot(other) == place and values.shape == tensors[name].shape
               for other, values in tensors.items())  # fmt: skip


def damage_numbers(kind: str, numbers: Numbers, sizes: Sizes, rng: Rng) -> set[str]:
    """Damage copies of some tensors in place, and return their names."""
    if kind in MANY:
        return MANY[kind](_Copies(numbers), rng)
    for name in _candidates(kind, numbers, rng):
        values = numbers[name]
        new = ONE[kind](values.astype(F32), sizes, rng)
        if new is None:
            continue
        with np.errstate(over="ignore"):
            new = np.ascontiguousarray(new).astype(values.dtype)
        if new.shape != values.shape or not np.array_equal(new.astype(F32), values.astype(F32)):
            numbers[name] = new
            return {name}
    return set()


class _Copies(dict[str, Array]):
    """Float32 copies of tensors, whose changes are kept in their own types."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__({name: values.astype(F32) for name, values in numbers.items()})
        self._numbers = numbers

    def __setitem__(self, name: str, values: Array) -> None:
        super().__setitem__(name, values)
        self._numbers[name] = values.astype(self._numbers[name].dtype)


def _candidates(kind: str, numbers: Numbers, rng: Rng) -> Iterator[str]:
    names = [str(name) for name in rng.permutation([n for n, x in numbers.items() if x.size >= 8])]
    for name in names[:40]:
        if kind in _FOR_VOCABULARIES and not EMBEDDING.match(name):
            continue
        if kind in _FOR_NORMS and not re.search(r"norm|ln_|bn\d", name):
            continue
        if kind in AMONG_SIBLINGS and siblings(name, numbers) < SIBLINGS:
            continue
        yield name


def draw_slip(slips: list[Slip], rng: Rng) -> Slip | None:
    """Draw a mistake in one step that at least three siblings of its tensor did not suffer."""
    groups: dict[tuple[str, str, str], list[Slip]] = {}
    for slip in slips:
        groups.setdefault((slip.step, slip.mistake, slot(slip.origin)), []).append(slip)
    by_mistake: dict[str, list[Slip]] = {}
    for (_, mistake, _), members in groups.items():
        if len(members) >= SIBLINGS:
            by_mistake.setdefault(mistake, []).extend(members)
    if not by_mistake:
        return None
    mistakes = sorted(by_mistake)
    chosen = by_mistake[mistakes[rng.integers(len(mistakes))]]
    return chosen[rng.integers(len(chosen))]


def damage_stored(kind: str, tensors: list[Stored], rng: Rng) -> set[str]:
    """Damage a stored tensor in place, and return its name."""
    for index in rng.permutation(len(tensors))[:30]:
        tensor = tensors[index]
        if tensor.data.size < 8:
            continue
        before = tensor.data
        tensor.data = before.copy()
        if STORED[kind](tensor, rng):
            return {tensor.made.name}
        tensor.data = before
    return set()


def damage_made(kind: str, made: list[Made], sizes: Sizes, rng: Rng) -> set[str]:
    """Damage tensors of the second model before they are stored."""
    numbers = {tensor.name: tensor.values for tensor in made if not tensor.is_free}
    names = damage_numbers(kind, numbers, sizes, rng)
    for tensor in made:
        if tensor.name in names:
            tensor.values = numbers[tensor.name]
    return names
