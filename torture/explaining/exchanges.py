"""Damages between tensors: exchanged, copied, mixed and stale ones.

Each function changes a mapping of float32 copies and returns their names.
`MANY` has them by what they do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from torture.explaining.elements import noise, two
from torture.explaining.models import F32, Array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Rng = np.random.Generator
    Numbers = dict[str, Array]
    Change = Callable[[Numbers, Rng], set[str]]

_LAYER = re.compile(r"(?:^|[./])(?:layers?|h|blocks?|blk|encoder_layer)[._](\d+)[./]")

MANY: dict[str, Change] = {}


def many(kind: str) -> Callable[[Change], Change]:
    """Register a damage between tensors."""

    def register(change: Change) -> Change:
        MANY[kind] = change
        return change

    return register


def _union(sets: Iterable[set[str]]) -> set[str]:
    return {name for names in sets for name in names}


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
    first, second = two(len(names), rng)
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
    first, second = two(len(numbers), rng)
    return chosen, numbers[first], numbers[second]


@many("two layers exchanged")
def _exchange_layers(x: Numbers, rng: Rng) -> set[str]:
    places, first, second = _of_stack(x, rng)
    return _union(_exchange(x, names[first], names[second]) for names in places)


def _replace(x: Numbers, name: str, values: Array) -> set[str]:
    if x[name].shape != values.shape or np.array_equal(x[name], values):
        return set()
    x[name] = values.copy()
    return {name}


@many("copied layer")
def _copy_layer(x: Numbers, rng: Rng) -> set[str]:
    places, first, second = _of_stack(x, rng)
    return _union(_replace(x, names[first], x[names[second]]) for names in places)


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
    share = float(rng.choice([0.02, 0.2]))
    changed = [names[first] for names in places]
    return _union(_replace(x, name, x[name] + noise(x[name], share, rng)) for name in changed)


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
    first, second = two(len(numbers), rng)
    return ([name for name in x if name.startswith(f"{base}{numbers[first]}.")],
            [name for name in x if name.startswith(f"{base}{numbers[second]}.")])  # fmt: skip


@many("two experts exchanged")
def _exchange_experts(x: Numbers, rng: Rng) -> set[str]:
    firsts, seconds = _expert_names(x, rng)
    return _union(_exchange(x, a, b) for a, b in zip(firsts, seconds, strict=True))


@many("one expert is another")
def _copy_expert(x: Numbers, rng: Rng) -> set[str]:
    firsts, seconds = _expert_names(x, rng)
    return _union(_replace(x, a, x[b]) for a, b in zip(firsts, seconds, strict=True))


@many("stale expert")
def _stale_expert(x: Numbers, rng: Rng) -> set[str]:
    names, _ = _expert_names(x, rng)
    return _union(_replace(x, name, x[name] + noise(x[name], 0.2, rng)) for name in names)


@many("expert of zeros")
def _zero_expert(x: Numbers, rng: Rng) -> set[str]:
    names, _ = _expert_names(x, rng)
    return _union(_replace(x, name, np.zeros_like(x[name])) for name in names)


@many("one projection of two layers exchanged")
def _exchange_one_expert(x: Numbers, rng: Rng) -> set[str]:
    """Exchange one projection of two experts, or else of two layers."""
    firsts, seconds = _expert_names(x, rng)
    if firsts:
        index = int(rng.integers(len(firsts)))
        return _exchange(x, firsts[index], seconds[index])
    places, first, second = _of_stack(x, rng)
    matrices = [names for names in places if x[names[first]].ndim > 1]
    return _exchange(x, matrices[0][first], matrices[0][second]) if matrices else set()


@many("half of a copied tensor")
def _copy_half(x: Numbers, rng: Rng) -> set[str]:
    places, first, second = _of_stack(x, rng)
    if not places:
        return set()
    names = places[rng.integers(len(places))]
    new, other = x[names[first]].copy(), x[names[second]]
    if new.shape != other.shape or len(new) < 2:
        return set()
    new[len(new) // 2 :] = other[len(new) // 2 :]
    return _replace(x, names[first], new)


@many("bias or norm of the neighbour")
def _neighbour(x: Numbers, rng: Rng) -> set[str]:
    vectors = [name for name, values in x.items() if values.ndim == 1]
    for name in rng.permutation(vectors)[:8]:
        neighbours = [n for n in vectors if n != name and x[n].shape == x[name].shape
                  and n.rpartition(".")[2] == name.rpartition(".")[2]]  # fmt: skip
        if neighbours:
            return _replace(x, str(name), x[neighbours[rng.integers(len(neighbours))]])
    return set()


@many("+1 on every norm")
def _raise_all(x: Numbers, _: Rng) -> set[str]:
    names = [n for n in x if re.search(r"(norm\w*|ln_\w)\.weight$", n) and x[n].ndim == 1]
    return _union(_replace(x, name, x[name] + F32(1)) for name in names)
