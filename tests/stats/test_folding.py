"""Batch norms that an exporter folds into convolutions are named, and damage in them is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xckpt

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]
F32 = np.float32
LAYERS = 3


def network(*, has_bias: bool = False) -> Tensors:
    rng = np.random.default_rng(0)
    tensors: Tensors = {}
    for n, inputs in enumerate((3, 16, 16)):
        tensors[f"blocks.{n}.conv.weight"] = rng.normal(0, 0.1, (16, inputs, 3, 3)).astype(F32)
        if has_bias:
            tensors[f"blocks.{n}.conv.bias"] = rng.normal(0, 0.1, 16).astype(F32)
        tensors[f"blocks.{n}.bn.weight"] = rng.normal(1, 0.1, 16).astype(F32)
        tensors[f"blocks.{n}.bn.bias"] = rng.normal(0, 0.1, 16).astype(F32)
        tensors[f"blocks.{n}.bn.running_mean"] = rng.normal(0, 0.1, 16).astype(F32)
        tensors[f"blocks.{n}.bn.running_var"] = rng.uniform(0.5, 2, 16).astype(F32)
        tensors[f"blocks.{n}.bn.num_batches_tracked"] = np.array(100 + n)
    tensors["fc.weight"] = rng.normal(0, 0.1, (10, 16)).astype(F32)
    return tensors


def folded(tensors: Tensors, epsilon: float = 1e-5) -> Tensors:
    """Return the network as an exporter to ONNX folds it."""
    exported = {"fc.weight": tensors["fc.weight"]}
    for n in range(LAYERS):
        gain, shift, mean, variance = (
            tensors[f"blocks.{n}.bn.{leaf}"]
            for leaf in ("weight", "bias", "running_mean", "running_var")
        )
        scale = gain / np.sqrt(variance + F32(epsilon))
        bias = tensors.get(f"blocks.{n}.conv.bias", F32(0))
        weight = tensors[f"blocks.{n}.conv.weight"] * scale[:, None, None, None]
        exported[f"onnx::Conv_{2 * n + 90}"] = weight
        exported[f"onnx::Conv_{2 * n + 91}"] = shift + (bias - mean) * scale
    return exported


def compared(a: Tensors, b: Tensors) -> tuple[Any, str]:
    result = xckpt.compare(a, b, names="auto", explain=True, cache=False, progress=False)
    return xckpt.table(result), result.attrs["explanation"]


def row(table: Any, name: str) -> Any:
    """Return the row of a tensor of either side."""
    return table[(table.index == name) | (table.other_name == name)]


@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
def test_folded_norms_are_named(epsilon: float, has_bias: bool, is_turned: bool) -> None:
    ours = network(has_bias=has_bias)
    theirs = folded(ours, epsilon)
    table, sentence = compared(*((theirs, ours) if is_turned else (ours, theirs)))
    assert set(table.outcome) == {"explained"}, table.explanation.to_dict()
    assert sentence.startswith(f"all {len(theirs if is_turned else ours)} tensors are explained: ")
    assert table.cause["blocks.1.bn.running_var"] == "folded"
    [text] = row(table, "blocks.1.conv.weight").explanation
    assert (
        f"the batch norm 'blocks.1.bn' is folded into 'onnx::Conv_92' of {'ba'[is_turned]}" in text
    )


def test_names_may_stay() -> None:
    """The newer exporter to ONNX keeps the names of the weights."""
    ours = network()
    names = {f"onnx::Conv_{2 * n + 90}": f"blocks.{n}.conv.weight" for n in range(LAYERS)}
    names |= {f"onnx::Conv_{2 * n + 91}": f"blocks.{n}.conv.weight_bias" for n in range(LAYERS)}
    theirs = {names.get(name, name): values for name, values in folded(ours).items()}
    table, _ = compared(ours, theirs)
    assert set(table.outcome) == {"explained"}, table.explanation.to_dict()


@pytest.mark.parametrize("kind", ["element", "rows", "noise", "other layer"])
@pytest.mark.parametrize("name", ["onnx::Conv_92", "onnx::Conv_93"])
def test_damage_is_not_folding(kind: str, name: str) -> None:
    ours = network()
    theirs = folded(ours)
    values: Any = theirs[name].copy()
    if kind == "element":
        values.reshape(-1)[5] += 0.01
    elif kind == "rows":
        values[[2, 7]] = values[[7, 2]]
    elif kind == "noise":
        values += np.random.default_rng(1).normal(0, 1e-4, values.shape).astype(F32)
    else:
        values = theirs[{"onnx::Conv_92": "onnx::Conv_94", "onnx::Conv_93": "onnx::Conv_95"}[name]]
    table, sentence = compared(ours, theirs | {name: values})
    damaged = {*row(table, name).outcome, table.outcome["blocks.1.bn.running_var"]}
    assert "explained" not in damaged
    assert not sentence.startswith("all ")
    assert table.outcome["blocks.0.bn.running_var"] == "explained"


def test_a_new_network_has_equal_biases() -> None:
    ours = network()
    for name in ours:
        if name.endswith(("bn.bias", "running_mean")):
            ours[name] = np.zeros(16, F32)
    table, _ = compared(ours, folded(ours))
    assert set(table.outcome) == {"explained"}, table.explanation.to_dict()


def identities(tensors: Tensors, variance: float = 1) -> Tensors:
    """Return a network whose batch norms change nothing, or only by the epsilon."""
    values = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": variance}
    return {
        name: np.full(16, values[name.rpartition(".")[2]], F32)
        if ".bn." in name and array.ndim
        else array
        for name, array in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
def test_renamed_norms_that_change_nothing_are_not_folded(
    dtype: str, has_bias: bool, is_turned: bool
) -> None:
    ours = identities(network(has_bias=has_bias))
    theirs = {
        name.replace("blocks", "body.blocks"): values.astype(dtype) if values.ndim else values
        for name, values in ours.items()
    }
    sides = (theirs, ours) if is_turned else (ours, theirs)
    for names in (None, "auto"):
        result = xckpt.compare(*sides, names=names, explain=True, cache=False, progress=False)
        table = xckpt.table(result)
        assert not [name for name in table.index if "folded" in table.cause[name]]
        causes = {"equal", "renamed", "rounded", "renamed+rounded"}
        assert {*table.cause[table.index.str.contains("weight|running")]} <= causes


def test_norms_that_change_nothing_are_folded_if_the_other_side_lacks_them() -> None:
    ours = identities(network(), variance=1 - 1e-5)
    theirs = folded(ours)
    table = xckpt.table(xckpt.compare(ours, theirs, explain=True, cache=False, progress=False))
    np.testing.assert_array_equal(ours["blocks.1.conv.weight"], theirs["onnx::Conv_92"])
    assert set(table.outcome) == {"explained"}, table.explanation.to_dict()
    assert table.cause["blocks.1.bn.running_var"] == "folded"


@pytest.mark.parametrize("place", [None, (3, 5, 1, 1)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_outputs_of_transposed_convolutions_come_second(
    place: tuple[int, ...] | None, is_turned: bool
) -> None:
    ours = network()
    sides = [{n: x.swapaxes(0, 1).copy() if x.ndim > 2 else x for n, x in side.items()}
             for side in (ours, folded(ours))]  # fmt: skip
    if place is not None:
        sides[1]["onnx::Conv_92"][place] += 0.01
    table, _ = compared(*sides[:: -1 if is_turned else 1])
    wrong = table.index[table.outcome != "explained"]
    if place is None:
        assert not len(wrong), table.explanation.to_dict()
    else:
        assert len(row(table.loc[wrong], "onnx::Conv_92"))
        assert "blocks.1.bn.running_var" in wrong
