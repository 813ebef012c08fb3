"""Damages of stored tensors, and functions that draw a damage of any kind.

A damage of numbers is done to the first model before it is converted, or to the second one before
it is stored. Every damage is done to copies, which are compared at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from torture.explaining.conversions import Slip, Target, slot
from torture.explaining.elements import ONE, two
from torture.explaining.exchanges import MANY
from torture.explaining.models import F32, Array, Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torture.explaining.storing import Stored

    Rng = np.random.Generator
    Numbers = dict[str, Array]
    Change = Callable[[Stored, Rng], bool]

EMBEDDING = re.compile(r".*(embed|wte|shared\.|lm_head|token_embd|tok_embeddings)")
#: Smallest number of siblings that show how one of them should be.
SIBLINGS = 4
# Smallest number of siblings of which two may suffer the same mistake.
_FOR_TWO = 6
#: Kinds that only siblings show.
AMONG_SIBLINGS = {"transposed, unlike its siblings"}
_FOR_VOCABULARIES = {"vocabulary cut off"}
_FOR_NORMS = {"1 added"}


@dataclass
class Damage:
    """A damage that was drawn: its kind, and where it was done."""

    kind: str
    stage: str
    names: set[str] = field(default_factory=set)
    slip: Slip | None = None


# --- stored tensors -------------------------------------------------------------------------------
# Each function changes one stored tensor in place, and returns whether it fits.

STORED: dict[str, Change] = {}


def stored(kind: str) -> Callable[[Change], Change]:
    """Register a damage of stored tensors."""

    def register(change: Change) -> Change:
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
    values = np.ascontiguousarray(x.target.values, F32)
    bits = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)
    if np.array_equal(bits, values):  # they need no rounding
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
    return _exchange(x, rng, slice(2))


@stored("two blocks exchanged")
def _exchange_blocks(x: Stored, rng: Rng) -> bool:
    return _exchange(x, rng, slice(None))


def _exchange(x: Stored, rng: Rng, part: slice) -> bool:
    """Exchange the same bytes of two blocks."""
    blocks = _block_bytes(x)
    if blocks is None or len(blocks) < 2:
        return False
    first, second = two(len(blocks), rng)
    blocks[[first, second], part] = blocks[[second, first], part]
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
    return sum(slot(sibling) == place and values.shape == tensors[name].shape
               for sibling, values in tensors.items())  # fmt: skip


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
    """Draw a mistake in one step of one or two tensors, which most siblings did not suffer."""
    groups: dict[tuple[str, str, str], list[Slip]] = {}
    for slip in slips:
        groups.setdefault((slip.step, slip.mistake, slot(slip.origins[0])), []).append(slip)
    by_mistake: dict[str, list[list[Slip]]] = {}
    for (_, mistake, _), members in groups.items():
        if len(members) >= SIBLINGS:
            by_mistake.setdefault(mistake, []).append(members)
    if not by_mistake:
        return None
    mistakes = sorted(by_mistake)
    groups_of_mistake = by_mistake[mistakes[rng.integers(len(mistakes))]]
    members = groups_of_mistake[rng.integers(len(groups_of_mistake))]
    count = 2 if len(members) >= _FOR_TWO and rng.random() < 0.3 else 1
    chosen = [members[index] for index in rng.choice(len(members), count, replace=False)]
    origins = tuple(origin for slip in chosen for origin in slip.origins)
    return Slip(chosen[0].step, chosen[0].mistake, origins)


def damage_stored(kind: str, tensors: list[Stored], rng: Rng) -> set[str]:
    """Damage a stored tensor in place, and return its name."""
    for index in rng.permutation(len(tensors))[:30]:
        tensor = tensors[index]
        if tensor.data.size < 8:
            continue
        before = tensor.data
        tensor.data = before.copy()
        if STORED[kind](tensor, rng):
            return {tensor.target.name}
        tensor.data = before
    return set()


def damage_made(kind: str, targets: list[Target], sizes: Sizes, rng: Rng) -> set[str]:
    """Damage tensors of the second model before they are stored."""
    numbers = {tensor.name: tensor.values for tensor in targets if not tensor.is_free}
    names = damage_numbers(kind, numbers, sizes, rng)
    for tensor in targets:
        if tensor.name in names:
            tensor.values = numbers[tensor.name]
    return names
