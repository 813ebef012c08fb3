"""Draw a pair of models, convert the first one, and damage what is converted.

The conversion is made twice, with the same random numbers: as it should be, and with the damage.
Tensors that differ are damaged. Differences that a conversion could have made are
left out of the counts: below the bound of a quantiser, or if the first model is exactly the second
one rounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np

from torture.explaining import decoders, frameworks
from torture.explaining.conversions import CONVERTERS, Conversion, Converter, Slip, Target
from torture.explaining.damages import (
    AMONG_SIBLINGS,
    EMBEDDING,
    KINDS,
    MISSING,
    SIBLINGS,
    SLIPPED,
    STORED,
    Damage,
    damage_made,
    damage_numbers,
    damage_stored,
    draw_slip,
)
from torture.explaining.elements import ONE
from torture.explaining.exchanges import MANY
from torture.explaining.models import F32, Array, Model, draw_model
from torture.explaining.storing import REPEATED, TYPES, Store, Stored, allowance, draw_store, store

#: All converters, in an order that does not depend on imports.
NAMES = sorted(CONVERTERS)
_SHARE_OF_DAMAGED = 0.75
_SHARE_OF_REVERSED = 0.15
#: Further steps of a chain: prefixes, another suffix, zeros under the vocabulary.
_PADDED = "padded"
_STEPS = ("module.", "_orig_mod.", "model.", "net.", ".w", _PADDED)
#: If more elements than this share differ a little, a first model of a coarse type may be a copy.
_FEW = 0.5
#: Relative errors of float32 arithmetic, as the documentation states.
_TIE = 2.0**-20
#: Converters with numbers for names: exchanged tensors only have their names in another order.
_ANONYMOUS = {"onnx": "onnx::", "keras numbered convolutions": "", "pipeline stages": ""}
_QUERIES = re.compile(r".*([qk]_proj|query|key|wq|wk|attn_[qk]|\.[qk])\b")
#: Kinds that are another order of parts, if the tensor has parts.
_OF_PARTS = ("halves of the rows exchanged", "gates exchanged", "rows shifted by one")
_INTERLEAVED = ("interleaved as for rotary embeddings", "interleaved twice")
_MODULES = (decoders, frameworks)  # their converters are registered


@dataclass
class Pair:
    """Two models, with the conversion and the damage between them."""

    converter: Converter
    model: Model
    store: Store
    tensors: list[Stored]
    chain: list[str]
    damage: Damage | None
    #: Names of damaged tensors of the second model, and of tensors of the first one that are lost.
    damaged: set[str] = field(default_factory=set)
    #: Names of tensors of the first model whose numbers are not in the second one any more.
    hurt: set[str] = field(default_factory=set)
    #: Names that are not judged, because they differ too little.
    unclear: set[str] = field(default_factory=set)
    #: Names of undamaged tensors in layouts that are searched, and in others.
    searched: set[str] = field(default_factory=set)
    unsearched: set[str] = field(default_factory=set)
    adapter: dict[str, Array] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Whether the second model is given first.
    is_reversed: bool = False

    @property
    def kind(self) -> str:
        """The kind of damage, and the mistake of a step."""
        if self.damage is None:
            return "none"
        slip = self.damage.slip
        return f"step: {slip.mistake}" if slip else self.damage.kind

    def __str__(self) -> str:
        store = self.store.kind + (f"/{self.store.minor_kind}" if self.store.places else "")
        damage = f"{self.kind} ({self.damage.stage})" if self.damage else "none"
        layers = self.model.sizes.layers
        chain = "".join(f" + {step}" for step in [*self.chain, *["reversed"] * self.is_reversed])
        model = f"[{self.model.family}, {layers} layers, {store}{chain}]"
        return f"{self.converter.name} {model}: {damage}"


def _convert(
    seed: list[int], converter: Converter, model: Model, slip: Slip | None = None
) -> Conversion:
    conversion = Conversion(model, np.random.default_rng([*seed, 1]), slip, converter.is_apart)
    converter.convert(conversion)
    return conversion


def _chained(conversion: Conversion, steps: list[str]) -> list[Target]:
    """Add further steps to a conversion, such as prefixes."""
    targets = conversion.targets
    for step in steps:
        for tensor in targets:
            if step.endswith("."):
                tensor.name = step + tensor.name
            elif step.startswith("."):
                tensor.name = re.sub(r"\.weight$", step, tensor.name)
            elif EMBEDDING.match(tensor.name) and tensor.values.ndim == 2:
                rows = -len(tensor.values) % 64
                tensor.values = np.pad(tensor.values, ((0, rows), (0, 0)))
    return targets


def draw_pair(seed: list[int]) -> Pair:
    """Return the pair with this seed and number."""
    rng = np.random.default_rng(seed)
    converter = CONVERTERS[NAMES[rng.integers(len(NAMES))]]
    family = converter.families[rng.integers(len(converter.families))]
    is_wide = bool(converter.architecture) and rng.random() < 0.4
    model = draw_model(family, rng, is_wide=is_wide)
    if converter.prepare is not None:
        converter.prepare(model)
    conversion = _convert(seed, converter, model)
    can_chain = not converter.architecture and rng.random() < 0.25
    chain = [str(rng.choice(_STEPS))] if can_chain and not conversion.adapter else []
    targets = _chained(conversion, chain)
    is_file = bool(converter.architecture)
    types = draw_store(targets, rng, is_gguf=is_file, is_final=converter.is_final, is_wide=is_wide)
    tensors = [store(tensor, types) for tensor in targets]
    pair = Pair(converter, model, types, tensors, chain, None, adapter=conversion.adapter)
    is_padded = _PADDED in [*chain, converter.name.split()[0]]
    can_reverse = types.kind == "as it is" and not (is_file or pair.adapter or is_padded)
    pair.is_reversed = bool(rng.random() < _SHARE_OF_REVERSED) and can_reverse
    clean = {tensor.target.name: tensor for tensor in pair.tensors}
    if rng.random() < _SHARE_OF_DAMAGED:
        for kind in rng.permutation(KINDS)[:12]:
            damaged = _damaged(str(kind), pair, conversion, seed, rng)
            if damaged is None:
                continue
            pair.damage, pair.tensors, changed = damaged
            _judge_damage(pair, clean, changed)
            if pair.damaged:
                break
            pair.damage, pair.tensors = None, tensors
            pair.hurt, pair.unclear = set(), set()
    _list_undamaged(pair, conversion)
    return pair


def _damaged(
    kind: str, pair: Pair, conversion: Conversion, seed: list[int], rng: np.random.Generator
) -> tuple[Damage, list[Stored], set[str]] | None:
    """Convert and store again with a damage; return it with the names of the changed origins."""
    model, converter, sizes = pair.model, pair.converter, pair.model.sizes
    if kind in {"+1 on every norm", "1 added"} and model.family.startswith("gemma"):
        return None
    if kind == SLIPPED:
        slip = draw_slip(conversion.slips, rng)
        if slip is None:
            return None
        again = _chained(_convert(seed, converter, model, slip), pair.chain)
        origins = set(slip.origins)
        damage = Damage(kind, "step", origins, slip)
        return damage, [store(tensor, pair.store) for tensor in again], origins
    if kind == MISSING:
        if not pair.tensors:
            return None
        index = int(rng.integers(len(pair.tensors)))
        name = pair.tensors[index].target.name
        remaining = pair.tensors[:index] + pair.tensors[index + 1 :]
        return Damage(kind, "stored", {name}), remaining, set()
    is_early = kind not in STORED and bool(rng.random() < 0.5)
    if is_early:
        damaged_model = replace(model, tensors=dict(model.tensors))
        changed = damage_numbers(kind, damaged_model.tensors, sizes, rng)
        if not changed:
            return None
        try:
            again = _chained(_convert(seed, converter, damaged_model), pair.chain)
        except ValueError:  # the shape does not fit any more
            return None
        return Damage(kind, "source", changed), [store(t, pair.store) for t in again], changed
    again = _chained(_convert(seed, converter, model), pair.chain)
    if kind in ONE or kind in MANY:
        names = damage_made(kind, again, sizes, rng)
        tensors = [store(tensor, pair.store) for tensor in again]
        stage = "made"
    else:
        tensors = [store(tensor, pair.store) for tensor in again]
        names = damage_stored(kind, tensors, rng)
        stage = "stored"
    return (Damage(kind, stage, names), tensors, set()) if names else None


def _judge_damage(pair: Pair, clean: dict[str, Stored], changed: set[str]) -> None:
    """List the tensors that differ from the right conversion, and the unclear ones."""
    damaged = {tensor.target.name: tensor for tensor in pair.tensors}
    prefix = _ANONYMOUS.get(pair.converter.name)
    is_anonymous = prefix is not None and pair.kind in MANY
    for name, right in clean.items():
        if name not in damaged:
            pair.damaged.add(name)
            pair.hurt |= set(right.target.origins)
            continue
        wrong = damaged[name]
        same = wrong.data.dtype == right.data.dtype and wrong.data.shape == right.data.shape
        if same and wrong.data.tobytes() == right.data.tobytes():
            continue
        numbers, expected = wrong.numbers, right.numbers
        if numbers.shape == expected.shape and np.array_equal(numbers, expected, equal_nan=True):
            continue
        if right.target.is_free or not _can_tell(pair, wrong, right, numbers, expected) or (
            is_anonymous and (prefix or "") in name
        ):  # fmt: skip
            pair.unclear.add(name)
            continue
        pair.damaged.add(name)
        pair.hurt |= set(right.target.origins) & changed
        if len(right.target.origins) == 1:
            pair.hurt |= set(right.target.origins)


def _can_tell(pair: Pair, wrong: Stored, right: Stored, numbers: Array, expected: Array) -> bool:
    """Return whether a difference is more than a conversion may do."""
    if numbers.shape != expected.shape:
        origin = pair.model.tensors[right.target.origins[0]]
        is_step = pair.damage is not None and pair.damage.stage == "step"
        return is_step or not _is_padded(numbers, expected[: len(origin)])
    names = [right.target.name, *right.target.origins]
    needs_siblings = (
        pair.kind in AMONG_SIBLINGS
        or (pair.kind in _INTERLEAVED and any(map(_QUERIES.match, names)))
        or (pair.kind in _OF_PARTS and len(right.target.origins) > 1)
    )
    if needs_siblings and pair.model.sizes.layers < SIBLINGS:
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        bound = allowance(wrong)
        intended = right.target.values.astype(F32)
        if np.any(bound) and not (~(np.abs(numbers - intended) <= bound)).any():
            return False
        if wrong.blocks in REPEATED and _are_ties(wrong, right, numbers, expected):
            return False
        if not wrong.blocks and any(
            np.array_equal(wrong.data, intended.astype(dtype).astype(wrong.data.dtype))
            for dtype in TYPES.values()
        ):  # as if rounded twice
            return False
        difference = np.abs(numbers - expected)
        share = np.count_nonzero(difference) / numbers.size
        if pair.model.tensors and share > _FEW:
            origin = pair.model.tensors[right.target.origins[0]]
            coarse = origin.dtype
            if coarse != F32 and np.array_equal(numbers.astype(coarse), intended.astype(coarse)):
                return False
            if "dequantised" in pair.converter.name and numbers.shape[-1] % 32 == 0:
                blocks = np.abs(expected).reshape(-1, 32).max(axis=1)
                if (difference.reshape(-1, 32).max(axis=1) <= 0.55 * blocks / 8).all():
                    return False
    return True


def _are_ties(wrong: Stored, right: Stored, numbers: Array, expected: Array) -> bool:
    """Return whether codes differ only where the errors of float32 may decide."""
    types = Store(is_gguf=True, kind=wrong.blocks, minor_kind=wrong.blocks)
    values = right.target.values.astype(F32)
    for factor in (1 - _TIE, 1 + _TIE):
        near = store(replace(right.target, values=values * F32(factor)), types).numbers
        numbers = np.where(numbers == near, expected, numbers)
    return np.array_equal(numbers, expected)


def _is_padded(numbers: Array, origin: Array) -> bool:
    """Return whether a matrix is another one with rows of zeros at its end."""
    rows = len(origin)
    if numbers.ndim != origin.ndim or np.count_nonzero(numbers[rows:]):
        return False
    return np.array_equal(numbers[:rows], origin)


def _list_undamaged(pair: Pair, conversion: Conversion) -> None:
    """List the names of both sides that no damage touches."""
    bad = pair.damaged | pair.unclear
    touched: set[str] = set()
    fed: dict[str, bool] = {}
    for tensor in conversion.targets:
        pair.origins[tensor.name] = tensor.origins
        if tensor.name in bad or tensor.is_free:
            touched |= set(tensor.origins)
        for origin in tensor.origins:
            fed[origin] = fed.get(origin, False) or tensor.is_apart
    for tensor in conversion.targets:
        is_constant = np.ptp(tensor.values.astype(F32)) == 0 and tensor.name not in tensor.origins
        for origin in tensor.origins:
            fed[origin] |= is_constant and not pair.converter.architecture
        if not tensor.is_free and tensor.name not in bad and not set(tensor.origins) & touched:
            is_apart = tensor.is_apart or fed[tensor.origins[0]]
            (pair.unsearched if is_apart else pair.searched).add(tensor.name)
    for name, is_apart in fed.items():
        if name not in touched and name not in bad:
            (pair.unsearched if is_apart else pair.searched).add(name)
    pair.unsearched |= conversion.tied - touched
    pair.searched -= pair.unsearched
