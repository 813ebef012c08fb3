"""Passes that explain known conversions: layouts that the places of tensors admit; folded norms.

`layouts` and `division` suggest layouts. Here each piece is verified on every element.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.lazy import dense_values
from xckpt.comparison.arrangements import Cropped, Reshaped, Shape, Step, arranged, read_box, undone
from xckpt.comparison.division import divisions
from xckpt.comparison.explaining.outcome import (
    ALONE,
    SIDES,
    Explanation,
    Share,
    SideTensor,
    both,
    of_joint,
    quoted,
    related,
    tensors_of,
    unlike,
)
from xckpt.comparison.layouts import Conversion, Layouts, Piece
from xckpt.comparison.names import spelled
from xckpt.comparison.relations.causes import FRACTION_BITS
from xckpt.comparison.relations.verification import Attempt, Link, Side, examine_in_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from xckpt.comparison.explaining.work import Explanations, Work
    from xckpt.structure import Structure
    from xckpt.typing import Array

# The most layouts to verify for a tensor.
_MOST_TRIED = 24


def converted(work: Work) -> Explanations:
    """Explain tensors in the layouts of known conversions."""
    layouts = Layouts(work.places.structures)
    explanations = _pairs(work, layouts)
    for side in (1, 0):
        numbers = [n for n in work.open if n not in explanations]
        wholes = tensors_of(work.cases, numbers, side, {ALONE[side], "shape"})
        parts = tensors_of(work.cases, numbers, 1 - side, {ALONE[1 - side]})
        explanations |= _recurrent(work, wholes, numbers, side)
        if wholes and parts:
            shapes = _shapes(wholes)
            fused = partial(_fused, layouts, side, shapes)
            joints = divisions(_arrays(wholes), _arrays(parts), fused)
            joints |= layouts.joints(side, shapes, _shapes(parts))
            for attempt in _verified(work, joints.values(), wholes, parts, side):
                described = _described(work, attempt, wholes, parts, side)
                if attempt.holds:
                    explanations |= described
                elif attempt.held * 2 >= len(attempt.links):
                    work.partly_held.append(described)
    return explanations


def _recurrent(
    work: Work, wholes: Mapping[str, SideTensor], numbers: Sequence[int], side: int
) -> Explanations:
    """Explain recurrent layers of a graph; pairs by name are verified as a whole."""
    parts = tensors_of(work.cases, numbers, 1 - side, {ALONE[1 - side], "shape"})
    graph, module = work.places.structures[side], work.places.structures[1 - side]
    joints = recurrent_joints(graph, _shapes(wholes), module, _shapes(parts))
    explanations: Explanations = {}
    for attempt in _verified(work, joints.values(), wholes, parts, side) if joints else ():
        described = _described(work, attempt, wholes, parts, side)
        names = {name for piece in attempt.suggestion.pieces for name in piece[:2]}
        matches = [work.cases[n].match for n in described]
        pairs = [{x.name for x in (m.ours, m.theirs) if x is not None} for m in matches]
        if attempt.holds and all(pair <= names for pair in pairs):
            explanations |= described
    return explanations


def partly_converted(work: Work) -> Explanations:
    """Describe known conversions with pieces that differ, unless a search explains them."""
    for described in work.partly_held:
        earlier = [work.explanations[n] for n in described if n in work.explanations]
        if not any(explanation.verified for explanation in earlier):
            work.explanations |= described
    return {}


def _fused(layouts: Layouts, side: int, shapes: Mapping[str, Shape], name: str) -> list[int]:
    return layouts.fused_rows(side, name, shapes[name])


def _shapes(tensors: Mapping[str, SideTensor]) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _arrays(tensors: Mapping[str, SideTensor]) -> dict[str, Any]:
    return {name: tensor.stream.array for name, tensor in tensors.items()}


def _pairs(work: Work, layouts: Layouts) -> Explanations:
    """Explain pairs of tensors, by name or by their places."""
    alone = [tensors_of(work.cases, work.open, side, {ALONE[side]}) for side in (0, 1)]
    suggestions = layouts.pairs(_shapes(alone[0]), _shapes(alone[1]))
    for n in work.open:
        case = work.cases[n]
        ours, theirs = case.match.ours, case.match.theirs
        if case.status in {"changed", "shape"} and ours is not None and theirs is not None:
            both_shapes = tuple(ours.array.shape), tuple(theirs.array.shape)
            chains = layouts.chains(ours.name, theirs.name, both_shapes)
            if chains and not work.is_aligned(n):
                alone[0][ours.name] = SideTensor(n, ours)
                alone[1][theirs.name] = SideTensor(n, theirs)
                suggestions.append((ours.name, theirs.name, chains))
    conversions = [
        [Conversion((Piece(a, b, steps),), key=(steps,)) for steps in chains]
        for a, b, chains in suggestions
    ]
    explanations: Explanations = {}
    for conversion, [link] in _verified(work, conversions, alone[0], alone[1], 0):
        if link.relation is not None:
            [piece] = conversion.pieces
            a, b = alone[0][piece.whole], alone[1][piece.part]
            explanation = related(work.places, link, link.relation, piece.steps)
            same = {a.number: explanation}
            explanations |= same if a.number == b.number else both(a, b, explanation)
    return work.settled(explanations)


def _verified(
    work: Work,
    suggestions: Iterable[Sequence[Conversion]],
    wholes: Mapping[str, SideTensor],
    parts: Mapping[str, SideTensor],
    side: int,
) -> Iterable[Attempt[Conversion]]:
    """Return the best conversion of each suggestion, after verifying them in turn."""

    def links_of(conversion: Conversion) -> list[Link]:
        return [_link(work, piece, wholes, parts, side) for piece in conversion.pieces]

    limited = {n: conversions[:_MOST_TRIED] for n, conversions in enumerate(suggestions)}
    return examine_in_turn(limited, links_of, work.bar, attrgetter("key")).values()


def _link(
    work: Work,
    piece: Piece,
    wholes: Mapping[str, SideTensor],
    parts: Mapping[str, SideTensor],
    side: int,
) -> Link:
    """Return a link between the elements of a piece in both tensors, readable in either order."""
    combined, part = wholes[piece.whole].stream, parts[piece.part].stream
    view = arranged(combined.array, piece.steps)
    run = _run_of(tuple(combined.array.shape), piece.steps)
    of_part = arranged(part.array, piece.of_part)
    run_of_part = _run_of(tuple(part.array.shape), piece.of_part)
    orders = [(Side(view, combined, run), Side(of_part, part, run_of_part))]
    cut = max([n for n, step in enumerate(piece.steps, 1) if isinstance(step, Cropped)], default=0)
    back = undone(of_part, piece.steps[cut:])
    if back is not None and cut < len(piece.steps):
        place = arranged(combined.array, piece.steps[:cut])
        run = _run_of(tuple(combined.array.shape), piece.steps[:cut])
        orders.append((Side(place, combined, run), Side.of(back, part)))
    names = (piece.whole, piece.part)
    if side:
        orders, names = [order[::-1] for order in orders], names[::-1]
    return Link(names, orders, work.places.offset(names))


def _run_of(shape: tuple[int, ...], steps: Sequence[Step]) -> int | None:
    """Return the first position of the elements after some steps if they are contiguous."""
    start = 0
    for step in steps:
        if isinstance(step, Cropped):
            sizes = list(zip(step.after, shape, strict=True))
            first = next((n for n, (extent, _) in enumerate(sizes) if extent > 1), len(sizes))
            if any(extent != n for extent, n in sizes[first + 1 :]):
                return None
            start += sum([at * prod(shape[n + 1 :]) for n, at in enumerate(step.start)])
        elif not isinstance(step, Reshaped):
            return None
        shape = step.shape(shape)
    return start


def _described(
    work: Work,
    attempt: Attempt[Conversion],
    wholes: Mapping[str, SideTensor],
    parts: Mapping[str, SideTensor],
    side: int,
) -> Explanations:
    """Explain the tensors of a conversion; a piece that does not hold is a change."""
    conversion = attempt.suggestion
    shares = []
    for piece, link in zip(conversion.pieces, attempt.links, strict=True):
        steps = [step for step in piece.steps if step.cause == "transposed"]
        explanation = related(work.places, link, link.relation, steps) if link.relation else None
        problem = "" if explanation else unlike(link)
        tensors = wholes[piece.whole], parts[piece.part]
        shares.append(Share(*tensors, explanation, problem, spelled(piece.part).template))
    causes = ("regrouped",) if conversion.is_regrouped else ()
    return of_joint(
        shares,
        conversion.words,
        side,
        is_in_order=conversion.is_in_order,
        is_pair=len({piece.part for piece in conversion.pieces}) == 1,
        causes=causes,
    )


# --- recurrent layers of ONNX ---------------------------------------------------------------------

# PyTorch has a weight and a bias for the inputs and for the hidden state of each layer and
# direction. LSTM, GRU and RNN of ONNX have three tensors for a layer: `W` and `R`, with an axis for
# directions, and `B` with the biases of both. The gates have another order.

#: The places in PyTorch of the gates of an operator, in the order of ONNX.
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
# Parts of the inputs of an operator.
_INPUTS = {1: ("weight_ih",), 2: ("weight_hh",), 3: ("bias_ih", "bias_hh")}
_KINDS = frozenset(chain.from_iterable(_INPUTS.values()))
_WORDS = "with gates in another order"

#: Names of the tensors of a layer, by their kinds, for each direction.
_Layer = dict[tuple[str, bool], str]


def recurrent_joints(
    graph: Structure, wholes: Mapping[str, Shape], module: Structure, parts: Mapping[str, Shape]
) -> dict[str, list[Conversion]]:
    """Return ways to compose tensors of a graph of tensors of PyTorch, by their names."""
    inputs = {name: entry for name in wholes if (entry := _input(graph, name)) is not None}
    layers = _layers(module, parts) if inputs else []
    joints = {}
    for name, entry in inputs.items():
        shape = wholes[name]
        pieces = (_pieces(name, shape, entry, x, parts) for x in layers)
        conversions = [
            Conversion(tuple(of_layer), _WORDS, is_regrouped=True, key=entry)
            for of_layer in pieces
            if of_layer
        ]
        if conversions:
            joints[name] = conversions
    return joints


def _input(graph: Structure, name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the operator that a tensor is an input of, and its kinds; None for other tensors."""
    declared = graph.described(name).declared if name in graph else None
    for operator, position, *_ in (declared or {}).get("uses", ()):
        if operator in _GATES and position in _INPUTS:
            return operator, _INPUTS[position]
    return None


def _layers(module: Structure, parts: Mapping[str, Shape]) -> list[_Layer]:
    """Return the layers of recurrent modules."""
    layers: dict[tuple[str, str], _Layer] = defaultdict(dict)
    for name in parts:
        param = module.param(name) if name in module else ""
        words = param.split("_")
        kind = "_".join(words[:2])
        if kind in _KINDS:
            layer = words[2] if len(words) > 2 else ""
            layers[name.removesuffix(param), layer][kind, words[-1] == "reverse"] = name
    return list(layers.values())


def _pieces(
    whole: str,
    shape: Shape,
    entry: tuple[str, tuple[str, ...]],
    layer: _Layer,
    parts: Mapping[str, Shape],
) -> list[Piece]:
    """Return the pieces of a whole in a layer; empty if they do not fit."""
    gates, kinds = _GATES[entry[0]], entry[1]
    if len(shape) < 2 or shape[0] > 2:
        return []
    width = shape[1] // (len(gates) * len(kinds))
    size = (width, *shape[2:])
    pieces = []
    for direction in range(shape[0]):
        for n, kind in enumerate(kinds):
            part = layer.get((kind, bool(direction)), "")
            if parts.get(part) != (width * len(gates), *shape[2:]):
                return []
            for k, gate in enumerate(gates):
                zeros = (0,) * len(shape[2:])
                start = (direction, (n * len(gates) + k) * width, *zeros)
                box = Cropped(start, (1, *size))
                gate_of_part = Cropped((gate * width, *zeros), size)
                pieces.append(Piece(whole, part, (box, Reshaped(box.after, size)), (gate_of_part,)))
    return pieces if width * len(gates) * len(kinds) == shape[1] else []


# --- folded norms ---------------------------------------------------------------------------------

# A network in evaluation mode scales each output of a convolution, or of a linear layer, and adds a
# number. Exporters to ONNX and TensorRT, and `torch.nn.utils.fuse_conv_bn_weights`, store
#
#     weight * scale  and  shift + (bias - mean) * scale,   where  scale = gain / sqrt(var + eps)
#
# in place of both layers. Sums of rows suggest the tensors that belong together; each element is
# then computed, and compared to within the errors of its arithmetic.

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
        fits = [t for t in weights if len(norm.mean) in t.shape[:2] and t.name not in used]
        nearest = sorted(fits, key=lambda t: abs(positions[t.name] - place))[:_MOST_LAYERS]
        for weight in nearest:
            bias = by_name.get(weight.name.removesuffix("weight") + "bias")
            bias = bias if bias is not None and bias.shape == norm.mean.shape else None
            targets = list(free.values())
            # The outputs of a transposed convolution are its second axis.
            axes = [n for n in range(2 if len(weight.shape) > 2 else 1)
                    if weight.shape[n] == len(norm.mean)]  # fmt: skip
            folds = (_fold(norm, weight, bias, targets, sums, axis=axis) for axis in axes)
            fold = next(filter(None, folds), None)
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
    sums: Callable[[SideTensor, int], Array],
    *,
    axis: int,
) -> _Fold | None:
    """Return the fold of a norm into a layer; None if no tensors of the other side have it."""
    channels = len(norm.mean)
    shapes = [t for t in theirs if t.shape == weight.shape]
    vectors = [t for t in theirs if t.shape == (channels,)]
    if not shapes or not vectors:
        return None
    expected = sums(weight, axis) * norm.scale(_EPSILONS[0])
    is_renamed = any(_are_near(norm.variance, norm.variance, _values(t), t) for t in vectors)
    likely = {}
    for target in shapes:
        distance = _distance(expected, sums(target, axis))
        if distance < _NEAR:
            likely[target.name] = distance, target
    old_bias = 0.0 * norm.mean if bias is None else _values(bias)
    folds = []
    for _, target in sorted(likely.values(), key=lambda entry: entry[0])[:_MOST_TARGETS]:
        # A norm that changes nothing is not folded if the other side has it, too.
        unscaled = _blocks(weight, target, np.ones(channels), axis)
        if is_renamed and all(_are_near(*rows) for rows in unscaled):
            continue
        for epsilon in _EPSILONS:
            scale = norm.scale(epsilon)
            if not all(_are_near(*rows) for rows in _blocks(weight, target, scale, axis)):
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


def _row_sums(tensor: SideTensor, axis: int) -> Array:
    """Return the sums of a tensor along an axis."""
    sums = [rows.sum(axis=1) for _, rows in _rows(tensor, axis)]
    return np.concatenate(sums)


def _distance(first: Array, second: Array) -> float:
    size = float(np.linalg.norm(first) + np.linalg.norm(second))
    return float(np.linalg.norm(first - second)) / size if size > 0 else 1.0


def _rows(tensor: SideTensor, axis: int = 0) -> Iterator[tuple[slice, Array]]:
    """Yield blocks of the rows of a tensor, which lie along an axis, as matrices."""
    rows = tensor.shape[axis]
    inner = tensor.stream.size // rows
    step = max(_BLOCK_NBYTES // (8 * max(inner, 1)), 1)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        box = tuple([part if k == axis else slice(0, n) for k, n in enumerate(tensor.shape)])
        values: Array = dense_values(read_box(tensor.stream.array, box)).astype(np.float64)
        yield part, np.moveaxis(values, axis, 0).reshape(part.stop - part.start, -1)


def _blocks(
    weight: SideTensor, target: SideTensor, scale: Array, axis: int
) -> Iterator[tuple[Array, Array, Array, SideTensor]]:
    for (part, old), (_, new) in zip(_rows(weight, axis), _rows(target, axis), strict=True):
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
