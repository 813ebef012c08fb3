"""Layouts of recurrent layers in graphs of ONNX, which join directions and reorder gates.

PyTorch has a weight and a bias for the inputs and for the hidden state of each layer and direction.
LSTM, GRU and RNN of ONNX have three tensors for a layer: `W` and `R`, with an axis for directions,
and `B` with the biases of both one after the other. The gates have another order.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING

from xckpt.comparison.arrangements import Cropped, Reshaped, Shape
from xckpt.comparison.layouts import Conversion, Piece

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.structure import Structure

__all__ = ["recurrent_joints"]

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
