"""The pass that explains folded norms: batch norms multiplied into the convolution before them.

A network in evaluation mode scales each output of a convolution, or of a linear layer, and adds a
number. Exporters to ONNX and TensorRT, and `torch.nn.utils.fuse_conv_bn_weights`, store

    weight * scale  and  shift + (bias - mean) * scale,   where  scale = gain / sqrt(var + eps)

in place of both layers. Sums of rows suggest the tensors that belong together; each element is then
computed, and compared to within the errors of its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xckpt.arrays.lazy import dense_values
from xckpt.comparison.arrangements import read_box
from xckpt.comparison.explaining.outcome import (
    ALONE,
    SIDES,
    Explanation,
    SideTensor,
    quoted,
    tensors_of,
)
from xckpt.comparison.relations.rounding import FRACTION_BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xckpt.comparison.explaining.passes import Explanations, Work
    from xckpt.typing import Array

# Last words of the tensors of a batch norm, for its variance, mean, gain and shift.
_LEAVES = (
    ("running_var", "running_mean", "weight", "bias"),
    ("moving_variance", "moving_mean", "gamma", "beta"),
    ("running_var", "running_mean", "gamma", "beta"),
)
_COUNTER = "num_batches_tracked"
# The numbers that libraries add to a variance, the usual one first.
_EPSILONS = (1e-5, 1e-3, 1e-6, 1e-4, 1e-12)
# Layers before a norm, and tensors of the other side, that are tried.
_MOST_LAYERS, _MOST_TARGETS = 8, 4
# Largest error, relative to the factors and summands: a few roundings to float32.
_TOLERANCE = 2.0**-20
# Largest error of sums that suggest a pair: the rows of half-precision numbers.
_NEAR = 0.02
_LARGEST_NORM = 1 << 16
_SMALLEST_HALF = 2.0**-25  # half a step between subnormal numbers of float16
_BLOCK_NBYTES = 8 << 20


@dataclass(frozen=True)
class _Norm:
    """A batch norm: its tensors, its factors and summands, for each usual epsilon."""

    name: str
    tensors: tuple[SideTensor, ...]
    variance: Array
    mean: Array
    gain: Array
    shift: Array

    def scale(self, epsilon: float) -> Array:
        scale: Array = self.gain / np.sqrt(self.variance + epsilon)
        return scale


class _Fold(NamedTuple):
    """A layer and a norm of one side that two tensors of the other side combine."""

    norm: _Norm
    weight: SideTensor
    bias: SideTensor | None
    new_weight: SideTensor
    new_bias: SideTensor


def folded(work: Work) -> Explanations:
    """Explain batch norms of one side that are folded into layers of the other side."""
    explanations: Explanations = {}
    for side in (0, 1):
        ours, theirs = _open(work, side), _open(work, 1 - side)
        alone = {t.name: t for t in ours if work.cases[t.number].status == ALONE[side]}
        norms = list(_norms({t.name: t for t in ours}, alone))
        if norms:
            folds = list(_folds(norms, ours, theirs))
            explanations |= _explained(work, folds, side)
    return explanations


def _open(work: Work, side: int) -> list[SideTensor]:
    """Return the unexplained tensors of a side with floating-point numbers, in their order."""
    tensors = tensors_of(work.cases, work.open, side, {"changed", "shape", ALONE[side]}).values()
    return [t for t in tensors if t.stream.array.dtype.name in FRACTION_BITS and t.stream.size]


def _norms(tensors: Mapping[str, SideTensor], alone: Mapping[str, SideTensor]) -> Iterator[_Norm]:
    """Yield the batch norms whose variances only one side has."""
    for name, tensor in alone.items():
        for variance, *leaves in _LEAVES:
            stem = name.removesuffix(variance)
            if stem == name or len(tensor.shape) != 1 or tensor.stream.size > _LARGEST_NORM:
                continue
            members = [tensors.get(stem + leaf) for leaf in leaves]
            shapes = {member.shape for member in members if member is not None}
            if members[0] is None or shapes != {tensor.shape}:
                continue
            mean, gain, shift = (None if t is None else _values(t) for t in members)
            ones = np.ones(tensor.shape)
            yield _Norm(
                stem.rstrip("./"),
                (tensor, *[t for t in members if t is not None]),
                _values(tensor),
                0 * ones if mean is None else mean,
                ones if gain is None else gain,
                0 * ones if shift is None else shift,
            )
            break


def _values(tensor: SideTensor) -> Array:
    return next(values for _, values in _rows(tensor))[:, 0]


def _folds(
    norms: Sequence[_Norm], ours: Sequence[SideTensor], theirs: Sequence[SideTensor]
) -> Iterator[_Fold]:
    """Yield the folds that hold for every element."""
    positions = {tensor.name: n for n, tensor in enumerate(ours)}
    weights = [t for t in ours if len(t.shape) > 1]
    by_name = {tensor.name: tensor for tensor in ours}
    free = {tensor.name: tensor for tensor in theirs}
    used: set[str] = set()
    sums = lru_cache(maxsize=None)(_row_sums)
    for norm in norms:
        place = positions[norm.tensors[0].name]
        fits = [t for t in weights if t.shape[0] == len(norm.mean) and t.name not in used]
        nearest = sorted(fits, key=lambda t: abs(positions[t.name] - place))[:_MOST_LAYERS]
        for weight in nearest:
            bias = by_name.get(weight.name.removesuffix("weight") + "bias")
            bias = bias if bias is not None and bias.shape == norm.mean.shape else None
            fold = _fold(norm, weight, bias, list(free.values()), sums)
            if fold is not None:
                used.add(weight.name)
                del free[fold.new_weight.name], free[fold.new_bias.name]
                yield fold
                break


def _fold(
    norm: _Norm,
    weight: SideTensor,
    bias: SideTensor | None,
    theirs: Sequence[SideTensor],
    sums: Callable[[SideTensor], Array],
) -> _Fold | None:
    """Return the fold of a norm into a layer; None if no tensors of the other side have it."""
    channels = len(norm.mean)
    shapes = [t for t in theirs if t.shape == weight.shape]
    vectors = [t for t in theirs if t.shape == (channels,)]
    if not shapes or not vectors:
        return None
    expected = sums(weight) * norm.scale(_EPSILONS[0])
    likely = {}
    for target in shapes:
        distance = _distance(expected, sums(target))
        if distance < _NEAR:
            likely[target.name] = distance, target
    old_bias = 0.0 * norm.mean if bias is None else _values(bias)
    folds = []
    for _, target in sorted(likely.values(), key=lambda entry: entry[0])[:_MOST_TARGETS]:
        for epsilon in _EPSILONS:
            scale = norm.scale(epsilon)
            if not all(_are_near(*rows) for rows in _blocks(weight, target, scale)):
                continue
            added = norm.shift + (old_bias - norm.mean) * scale
            size = np.abs(norm.shift) + (np.abs(old_bias) + np.abs(norm.mean)) * np.abs(scale)
            folds += [
                _Fold(norm, weight, bias, target, vector)
                for vector in vectors
                if _are_near(added, size, _values(vector), vector)
            ]
    # Which of several copies belongs to the norm is unknown, unless they are constants.
    is_constant = bool(folds) and not np.ptp(_values(folds[0].new_bias))
    is_certain = len(folds) == 1 or (is_constant and len({f.new_weight for f in folds}) == 1)
    return folds[0] if is_certain else None


def _row_sums(tensor: SideTensor) -> Array:
    """Return the sum of each row of a tensor."""
    sums = [rows.sum(axis=1) for _, rows in _rows(tensor)]
    return np.concatenate(sums)


def _distance(first: Array, second: Array) -> float:
    size = float(np.linalg.norm(first) + np.linalg.norm(second))
    return float(np.linalg.norm(first - second)) / size if size > 0 else 1.0


def _rows(tensor: SideTensor) -> Iterator[tuple[slice, Array]]:
    """Yield blocks of rows of a tensor as matrices."""
    rows, inner = tensor.shape[0], prod(tensor.shape[1:])
    step = max(_BLOCK_NBYTES // (8 * max(inner, 1)), 1)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        box = (part, *[slice(0, n) for n in tensor.shape[1:]])
        values: Array = dense_values(read_box(tensor.stream.array, box)).astype(np.float64)
        yield part, values.reshape(len(values), -1)


def _blocks(
    weight: SideTensor, target: SideTensor, scale: Array
) -> Iterator[tuple[Array, Array, Array, SideTensor]]:
    for (part, old), (_, new) in zip(_rows(weight), _rows(target), strict=True):
        expected = old * scale[part, None]
        yield expected, np.abs(expected), new, target


def _are_near(expected: Array, size: Array, values: Array, tensor: SideTensor) -> bool:
    """Return whether numbers are those expected, to within the errors of their arithmetic."""
    bits = FRACTION_BITS[tensor.stream.array.dtype.name]
    bound = _TOLERANCE * size + 2.0 ** -(min(bits, 23) + 1) * np.abs(expected)
    bound += _SMALLEST_HALF if bits == FRACTION_BITS["float16"] else 0.0
    return bool(np.all(np.abs(values - expected) <= bound))


def _explained(work: Work, folds: Sequence[_Fold], side: int) -> Explanations:
    """Explain the tensors of folds; a pair of names only if both tensors are part of folds."""
    texts: dict[int, dict[str, str]] = {}
    partners: dict[int, dict[str, None]] = {}
    for fold in folds:
        olds = [t for t in (fold.weight, fold.bias, *fold.norm.tensors) if t is not None]
        head = f"the batch norm {fold.norm.name!r}"
        for tensor in olds:
            target = fold.new_weight if tensor is fold.weight else fold.new_bias
            text = f"{head} is folded into {quoted([target.name])} of {SIDES[1 - side]}"
            texts.setdefault(tensor.number, {})[tensor.name] = text
            partners.setdefault(tensor.number, {})[target.name] = None
        for tensor, layer in ((fold.new_weight, fold.weight), (fold.new_bias, fold.bias)):
            names = [t.name for t in (layer, *fold.norm.tensors) if t is not None]
            text = f"{head} of {SIDES[side]} is folded into it"
            texts.setdefault(tensor.number, {})[tensor.name] = text
            partners.setdefault(tensor.number, {}).update(dict.fromkeys(names))
    explanations: Explanations = {}
    norms = {fold.norm.name: fold.new_bias.name for fold in folds}
    for n in work.alone(side):
        # A counter is for training only.
        name = work.cases[n].match.name
        stem = name.removesuffix(_COUNTER).rstrip("./")
        if stem in norms and name.endswith(_COUNTER):
            text = f"counter of the batch norm {stem!r}, which is folded into {norms[stem]!r}"
            explanations[n] = Explanation(("folded",), text, other_names=(norms[stem],))
    for n, of_names in texts.items():
        match = work.cases[n].match
        pair = {stream.name for stream in (match.ours, match.theirs) if stream is not None}
        if pair <= of_names.keys():
            text = "; ".join(dict.fromkeys(of_names.values()))
            explanations[n] = Explanation(("folded",), text, other_names=tuple(partners[n]))
    return explanations
