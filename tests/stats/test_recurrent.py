"""Recurrent layers in graphs of ONNX are explained, and damage in them is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import xckpt
from tests.formats.onnx_files import initializer, model, node

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]
HIDDEN, INPUTS, LAYERS = 8, 6, 2
GATES = {"LSTM": "ifgo", "GRU": "rzn", "RNN": "h"}
GATES_OF_ONNX = {"LSTM": "iofg", "GRU": "zrn", "RNN": "h"}


def network(operator: str, directions: int) -> Tensors:
    rng = np.random.default_rng(0)
    rows, tensors = len(GATES[operator]) * HIDDEN, {}
    for layer in range(LAYERS):
        inputs = HIDDEN * directions if layer else INPUTS
        for end in ("", "_reverse")[:directions]:
            shapes: dict[str, tuple[int, ...]] = {
                "weight_ih": (rows, inputs),
                "weight_hh": (rows, HIDDEN),
            }
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
            for kind, shape in shapes.items():
                name = f"rnn.{kind}_l{layer}{end}"
                tensors[name] = rng.normal(0, 0.1, shape).astype(np.float32)
    return tensors


def exported(operator: str, directions: int, tensors: Tensors) -> Tensors:
    """Return the tensors as `torch.onnx.export` stores them."""
    order = [GATES[operator].index(gate) for gate in GATES_OF_ONNX[operator]]

    def reordered(name: str) -> Array:
        gates = np.split(tensors[name], len(order))
        return np.concatenate([gates[n] for n in order])

    result = {}
    for layer in range(LAYERS):
        ends = [f"_l{layer}{end}" for end in ("", "_reverse")[:directions]]
        w, r = ([reordered(f"rnn.weight_{k}{end}") for end in ends] for k in ("ih", "hh"))
        b = [np.concatenate([reordered(f"rnn.bias_{k}{e}") for k in ("ih", "hh")]) for e in ends]
        for n, values in enumerate((b, w, r)):
            result[f"onnx::{operator}_{100 * (layer + 1) + n}"] = np.stack(values)
    return result


def write(path: Path, operator: str, tensors: Tensors) -> Path:
    names = list(tensors)
    nodes = [
        node(operator, [f"x{n}", names[n + 1], names[n + 2], names[n]], [f"y{n}"])
        for n in range(0, len(names), 3)
    ]
    path.write_bytes(model(*(initializer(n, v) for n, v in tensors.items()), nodes=tuple(nodes)))
    return path


def compared(a: Path, b: Path) -> tuple[Any, str]:
    result = xckpt.compare(a, b, names="auto", explain=True, cache=False, progress=False)
    return result.ckpt.table(), result.attrs["explanation"]


CASES = [("LSTM", 1), ("LSTM", 2), ("GRU", 1), ("GRU", 2), ("RNN", 2)]


@pytest.mark.parametrize(("operator", "directions"), CASES)
@pytest.mark.parametrize("is_turned", [False, True])
def test_layers_are_explained(
    operator: str, directions: int, is_turned: bool, tmp_path: Path
) -> None:
    tensors = network(operator, directions)
    save_file(tensors, tmp_path / "a.safetensors")
    graph = write(tmp_path / "b.onnx", operator, exported(operator, directions, tensors))
    table, sentence = compared(*[tmp_path / "a.safetensors", graph][:: -1 if is_turned else 1])
    assert set(table["outcome"]) == {"explained"}, table["explanation"].to_dict()
    assert sentence.startswith("all ")


@pytest.mark.parametrize(("operator", "directions"), CASES[:4])
@pytest.mark.parametrize("kind", ["gates", "element", "PyTorch's order"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_damage_is_not_explained(
    operator: str, directions: int, kind: str, place: int, tmp_path: Path
) -> None:
    tensors = network(operator, directions)
    save_file(tensors, tmp_path / "a.safetensors")
    theirs = exported(operator, directions, tensors)
    name = f"onnx::{operator}_{200 + place}"
    values = theirs[name].copy()
    if kind == "element":
        values[0, 3] += 0.01
    elif kind == "gates":
        values[0, :HIDDEN], values[0, HIDDEN : 2 * HIDDEN] = (
            values[0, HIDDEN : 2 * HIDDEN].copy(),
            values[0, :HIDDEN].copy(),
        )
    else:
        same = {"ifgo": "iofg", "rzn": "zrn"}[GATES[operator]]
        order = [same.index(gate) for gate in GATES[operator]]
        gates = np.split(values[0], len(order) * (1 if place else 2))
        values[0] = np.concatenate(
            [gates[k + n] for k in range(0, len(gates), len(order)) for n in order]
        )
    graph = write(tmp_path / "b.onnx", operator, theirs | {name: values})
    table, sentence = compared(tmp_path / "a.safetensors", graph)
    rows = table[(table.index == name) | (table.get("other_name", "") == name)]
    assert len(rows)
    assert "explained" not in set(rows["outcome"]), rows["explanation"].to_dict()
    assert not sentence.startswith("all ")


@pytest.mark.parametrize(("operator", "directions"), CASES)
@pytest.mark.parametrize("place", [0, 2])
def test_a_copy_of_another_layer_is_not_explained(
    operator: str, directions: int, place: int, tmp_path: Path
) -> None:
    tensors = network(operator, directions)
    save_file(tensors, tmp_path / "a.safetensors")
    theirs = exported(operator, directions, tensors)
    name, source = (f"onnx::{operator}_{layer}{place:02}" for layer in (2, 1))
    graph = write(tmp_path / "b.onnx", operator, theirs | {name: theirs[source]})
    table, sentence = compared(tmp_path / "a.safetensors", graph)
    rows = table[(table.index == name) | (table.get("other_name", "") == name)]
    assert "explained" not in set(rows["outcome"]), rows["explanation"].to_dict()
    assert not sentence.startswith("all ")


@pytest.mark.parametrize("zero", ["bias_ih", "bias_hh"])
@pytest.mark.parametrize("damage", ["", "an element", "a lost tensor", "not a number"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_second_bias_of_zeros_is_explained(zero: str, damage: str, is_turned: bool) -> None:
    """Libraries with one bias store the sum, and PyTorch has zeros for one of the two."""
    tensors = network("LSTM", 1)
    theirs = {}
    for layer in range(LAYERS):
        names = {kind: f"rnn.{kind}_l{layer}" for kind in ("weight_ih", "weight_hh")}
        bias = {"bias_ih": "bias_hh", "bias_hh": "bias_ih"}[zero]
        tensors[f"rnn.{zero}_l{layer}"][:] = 0
        theirs[f"lstm_{layer}/lstm_cell/kernel"] = tensors[names["weight_ih"]].T.copy()
        theirs[f"lstm_{layer}/lstm_cell/recurrent_kernel"] = tensors[names["weight_hh"]].T.copy()
        theirs[f"lstm_{layer}/lstm_cell/bias"] = tensors[f"rnn.{bias}_l{layer}"]
    name = f"rnn.{zero}_l1"
    if damage == "an element":
        tensors[name][5] = 1e-30
    elif damage == "not a number":
        tensors[name][5] = np.nan
    elif damage:
        theirs["lstm_1/lstm_cell/other"] = np.linspace(1, 2, 4 * HIDDEN, dtype=np.float32)
    sides = (theirs, tensors) if is_turned else (tensors, theirs)
    table = xckpt.compare(*sides, explain=True, cache=False).ckpt.table()
    assert (table.loc[name, "outcome"] == "explained") == (not damage)
    if not damage:
        assert set(table["outcome"]) == {"explained"}, table["explanation"].to_dict()
