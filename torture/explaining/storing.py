"""Types of stored tensors, blocks of GGUF, and the errors that they allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from tests.stats.kquants import kquantized
from torture.explaining.conversions import Target, slot
from torture.explaining.models import F32, Array

if TYPE_CHECKING:
    from pathlib import Path

REPEATED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
#: K-quants with the elements of a group, and the steps between its smallest and largest number.
SEARCHED = {"Q2_K": (16, 3), "Q3_K": (16, 7), "Q4_K": (32, 15), "Q5_K": (32, 31), "Q6_K": (16, 63)}
_GGUF = ("F32", "F16", "BF16", *REPEATED, *SEARCHED)
_PLAIN = ("as it is", "as it is", "as it is", "bfloat16", "float16", "float8_e4m3fn",
          "bfloat16 in float32", "float16 in float32")  # fmt: skip
TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass(frozen=True)
class Store:
    """The usual type of a model, and another one for some places."""

    is_gguf: bool
    kind: str
    minor_kind: str
    #: Places of tensors that have the other type.
    places: frozenset[str] = frozenset()


@dataclass
class Stored:
    """A tensor as it is stored."""

    target: Target
    #: Values, or blocks as bytes.
    data: Array
    #: Type of GGUF with blocks; empty for plain values.
    blocks: str = ""

    @property
    def numbers(self) -> Array:
        """The numbers that are stored."""
        if not self.blocks:
            return self.data.astype(F32)
        from gguf import GGMLQuantizationType, quants

        return quants.dequantize(self.data, GGMLQuantizationType[self.blocks])


def draw_store(targets: list[Target], rng: np.random.Generator, *, is_gguf: bool, is_final: bool,
               is_wide: bool) -> Store:  # fmt: skip
    """Draw the types of a second model; a third of the mixtures have two."""
    places = sorted({slot(tensor.name) for tensor in targets})
    chosen = frozenset(place for place in places if rng.random() < 0.2)
    if is_final:
        return Store(is_gguf, "as it is", "as it is")
    if not is_gguf:
        kind = str(rng.choice(_PLAIN))
        return Store(is_gguf, kind, "as it is", chosen if rng.random() < 0.3 else frozenset())
    kinds = [*SEARCHED] if is_wide else [kind for kind in _GGUF if kind not in SEARCHED]
    kind, minor_kind = str(rng.choice(kinds)), str(rng.choice(["F16", "Q8_0", *kinds]))
    return Store(is_gguf, kind, minor_kind, chosen if rng.random() < 0.5 else frozenset())


def store(target: Target, types: Store) -> Stored:
    """Round or quantise a tensor."""
    kind = types.minor_kind if slot(target.name) in types.places else types.kind
    if types.is_gguf:
        return _in_gguf(target, kind)
    if kind == "as it is":
        return Stored(target, target.values.copy())
    name, _, container = kind.partition(" in ")
    with np.errstate(over="ignore"):
        rounded = target.values.astype(F32).astype(TYPES[name])
    return Stored(target, rounded.astype(F32) if container else rounded)


def _in_gguf(target: Target, kind: str) -> Stored:
    """Store norms and biases as float32, and rows that do not fill blocks in a larger type."""
    from gguf import GGMLQuantizationType, quants

    values = np.ascontiguousarray(target.values, F32)
    if values.ndim == 1 or "norm" in target.name or "ffn_gate_inp" in target.name or kind == "F32":
        return Stored(target, values)
    if kind in SEARCHED and values.shape[-1] % 256:
        kind = "Q8_0"
    if kind in REPEATED and values.shape[-1] % 32:
        kind = "F16"
    if kind in {"F16", "BF16"}:
        with np.errstate(over="ignore"):
            return Stored(target, values.astype(TYPES["float16" if kind == "F16" else "bfloat16"]))
    if not np.isfinite(values).all():
        values = np.nan_to_num(values, nan=0.0, posinf=1.0, neginf=-1.0)
    if kind in SEARCHED:
        return Stored(target, kquantized(values, kind.lower()), kind)
    return Stored(target, quants.quantize(values, GGMLQuantizationType[kind]), kind)


def allowance(tensor: Stored) -> Array | float:
    """Return by how much an element may differ without notice, from what the blocks state.

    It is more than the bound of the documentation, so that no damage at the limit is counted.
    """
    if tensor.blocks not in SEARCHED:
        return tensor.target.bound
    size, levels = SEARCHED[tensor.blocks]
    numbers = tensor.numbers
    groups = numbers.reshape(-1, 256 // size, size)
    if tensor.blocks in {"Q3_K", "Q6_K"}:
        spread = 2 * np.abs(groups).max(axis=2)
    else:
        spread = np.maximum(groups.max(axis=2), 0) - np.minimum(groups.min(axis=2), 0)
    step = spread / levels
    lost = step.max(axis=1, keepdims=True) * levels / (31 if tensor.blocks == "Q2_K" else 63)
    factor = 8 if tensor.blocks == "Q2_K" else 4
    bound = 1.5 * factor * (step + lost)
    return np.broadcast_to(bound[..., None], groups.shape).reshape(numbers.shape)


def write(tensors: list[Stored], architecture: str, folder: Path) -> dict[str, Array] | Path:
    """Return a mapping, or the path of a GGUF file if there is an architecture."""
    if not architecture:
        return {tensor.target.name: tensor.data for tensor in tensors}
    from gguf import GGMLQuantizationType, GGUFWriter

    path = folder / "b.gguf"
    writer = GGUFWriter(path, "clip" if architecture == "mmproj" else architecture)
    for tensor in tensors:
        name, data = tensor.target.name, tensor.data
        if tensor.blocks:
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[tensor.blocks])
        elif data.dtype == TYPES["bfloat16"]:
            bits = data.view(np.uint16).view(np.uint8).reshape(*data.shape[:-1], -1)
            writer.add_tensor(name, bits, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
