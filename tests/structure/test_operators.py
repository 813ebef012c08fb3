"""What a tensor of a graph is follows from the operators that use it, not from its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.formats.onnx_files import field, initializer, model, node
from tests.sources import CountingSource
from xckpt import formats
from xckpt.structure import PARAMETERS, Structure, structure_of

INT8, UINT8, FLOAT, INT64 = (np.ones((8, 8), t) for t in ("i1", "u1", "f4", "i8"))
VECTOR, SCALAR = np.ones(8, "f4"), np.float32(1)


def structure(tensors: dict[str, Any], *nodes: bytes) -> Structure:
    data = model(*(initializer(name, v) for name, v in tensors.items()), nodes=nodes)
    return structure_of(formats.get("onnx").read(CountingSource(data, "m.onnx")))


def named(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{number}": values for number, values in enumerate(tensors.values())}


# Operators with their inputs, and the roles of those that are tensors of the file.
QUANTISED: dict[str, tuple[list[Any], list[str]]] = {
    "MatMulInteger": (["x", INT8, "x_zp", np.int8(0)], ["codes", "scale"]),
    "ConvInteger": (["x", INT8, "x_zp", np.int8(0)], ["codes", "scale"]),
    "DequantizeLinear": ([INT8, SCALAR, np.int8(0)], ["codes", "scale", "scale"]),
    "QuantizeLinear": (["x", SCALAR, np.uint8(0)], ["scale", "scale"]),
    "QLinearConv": (
        ["x", SCALAR, np.uint8(0), INT8, VECTOR, np.zeros(8, "i1"), SCALAR, np.uint8(0), VECTOR],
        ["scale", "scale", "codes", "scale", "scale", "scale", "scale", "weight"],
    ),
    "QLinearMatMul": (
        ["x", SCALAR, np.uint8(0), INT8, VECTOR, np.zeros(8, "i1"), SCALAR, np.uint8(0)],
        ["scale", "scale", "codes", "scale", "scale", "scale", "scale"],
    ),
    "DynamicQuantizeLSTM": (
        ["x", INT8, INT8, FLOAT, "", "", "", "", VECTOR, np.zeros(2, "i1"), VECTOR, np.zeros(2)],
        ["codes", "codes", "weight", "scale", "scale", "scale", "scale"],
    ),
    "MatMulNBits": (["x", UINT8, VECTOR, UINT8], ["codes", "scale", "scale"]),
    "BatchNormalization": (
        ["x", VECTOR, VECTOR, VECTOR, VECTOR],
        ["weight", "weight", "statistic", "statistic"],
    ),
    "Gather": ([UINT8, "ids"], ["codes"]),
}


@pytest.mark.parametrize("operator", QUANTISED)
@pytest.mark.parametrize("prefix", ["t", "running_mean_", "layers.0.weight_scale"])
def test_roles_follow_from_the_operator(operator: str, prefix: str) -> None:
    inputs, roles = QUANTISED[operator]
    names = [i if isinstance(i, str) else f"{prefix}{n}" for n, i in enumerate(inputs)]
    tensors = {n: i for n, i in zip(names, inputs, strict=True) if not isinstance(i, str)}
    result = structure(tensors, node(operator, names, ["y"]))
    assert [role.value for role in result.roles.values()] == roles


CONSTANTS: dict[str, tuple[list[Any], list[int]]] = {
    "Resize": (["x", "", VECTOR], [2]),
    "Max": (["x", SCALAR], [1]),
    "Where": (["c", "x", SCALAR], [2]),
    "Pad": (["x", INT64, SCALAR], [1, 2]),
    "Clip": (["x", SCALAR, SCALAR], [1, 2]),
    "Pow": (["x", SCALAR], [1]),
    "Reshape": (["x", INT64], [1]),
    "Slice": (["x", INT64, INT64, INT64], [1, 2, 3]),
    "ReduceMean": (["x", INT64], [1]),
    "Add": (["x", SCALAR], [1]),
    "Div": (["x", VECTOR], [1]),
    "Gather": ([INT64, "x"], [0]),
}


@pytest.mark.parametrize("operator", CONSTANTS)
def test_inputs_that_are_settings_are_constants(operator: str) -> None:
    inputs, places = CONSTANTS[operator]
    names = [i if isinstance(i, str) else f"w{n}.weight" for n, i in enumerate(inputs)]
    tensors = {names[place]: inputs[place] for place in places}
    result = structure(tensors, node(operator, names, ["y"]))
    assert {role.value for role in result.roles.values()} == {"constant"}


def test_a_bias_is_recognised_by_the_product_that_it_is_added_to() -> None:
    tensors = {"a": FLOAT, "b": np.ones(1, "f4"), "c": np.ones(1, "f4")}
    nodes = (
        node("MatMul", ["x", "a"], ["y"]),
        node("Add", ["y", "b"], ["z"]),
        node("Add", ["z", "c"], ["out"]),
    )
    result = structure(tensors, *nodes)
    assert [role.value for role in result.roles.values()] == ["weight", "weight", "constant"]
    assert (result["b"].param, result["b"].module_type) == ("bias", "linear")


def test_a_scale_may_be_multiplied_with_that_of_the_activation() -> None:
    nodes = (
        node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
        node("MatMulInteger", ["xq", "q", "xz", "z"], ["yq"]),
        node("Mul", ["xs", "s"], ["ys"]),
    )
    tensors = {"q": INT8, "z": np.int8(0), "s": np.float32(0.01)}
    roles = structure(tensors, *nodes).roles
    assert [role.value for role in roles.values()] == ["codes", "scale", "scale"]


def test_codes_have_the_module_of_the_weight_that_they_become() -> None:
    nodes = (
        node("DequantizeLinear", ["q", "s"], ["w"]),
        node("Transpose", ["w"], ["wt"]),
        node("MatMul", ["x", "wt"], ["y"]),
    )
    result = structure({"q": INT8, "s": SCALAR}, *nodes)
    assert (result["q"].role.value, result["q"].module_type) == ("codes", "linear")
    assert result["q"].axes == ("out", "in")
    assert result["s"].role.value == "scale"


def test_packed_codes_count_as_the_parameters_that_they_hold() -> None:
    attributes = [field(1, key) + field(3, n) for key, n in (("K", 64), ("N", 8))]
    nodes = (node("MatMulNBits", ["x", "b", "s"], ["y"], *attributes),)
    result = structure({"b": np.ones((8, 4, 8), "u1"), "s": VECTOR}, *nodes)
    assert result.packed == {"b": 512}


def test_decoys_in_names_change_nothing() -> None:
    tensors = {"conv.weight": np.ones((4, 2, 3, 3), "f4"), "conv.bias": np.ones(4, "f4")}
    inputs = ["x", *tensors]
    plain = structure(tensors, node("Conv", inputs, ["y"]))
    for prefix in ("t", "optimizer.state.", "x_zero_point", "exp_avg"):
        decoys = named(prefix, tensors)
        other = structure(decoys, node("Conv", ["x", *decoys], ["y"]))
        assert list(other.roles.values()) == list(plain.roles.values())
        assert [other[name].axes for name in other] == [plain[name].axes for name in plain]
        assert PARAMETERS.issuperset(other.roles.values())


@pytest.mark.parametrize("name", ["stft.forward_basis_buffer", "mel_scale.fb", "x.window"])
def test_fixed_transforms_are_constants_although_they_are_kernels(name: str) -> None:
    result = structure({name: np.ones((4, 1, 8), "f4")}, node("Conv", ["x", name], ["y"]))
    assert result.roles[name].value == "constant" or name == "mel_scale.fb"


def test_every_decision_has_its_source() -> None:
    result = structure({"w": FLOAT}, node("MatMul", ["x", "w"], ["y"]))
    first, *others = result["w"].evidence
    assert (first.source, first.field, first.reason) == ("file", "role", "MatMul[1]")
    assert {evidence.source for evidence in others} == {"file", "convention"}
