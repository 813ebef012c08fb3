"""Names of initialisers say nothing: a graph with other names has the same roles and findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.formats.onnx_files import initializer, model, node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Graph = tuple[dict[str, Any], list[tuple[str, list[str], list[str]]]]
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.normal(0.1, 0.05, shape).astype("f4")


def convolutions() -> Graph:
    tensors: dict[str, Any] = {}
    nodes = []
    for layer in range(5):
        names = [f"conv{layer}.weight", f"conv{layer}.bias"]
        tensors |= dict(zip(names, (normal(16, 16, 3, 3), normal(16)), strict=True))
        nodes.append(("Conv", [f"x{layer}", *names], [f"x{layer + 1}"]))
    tensors["conv3.weight"][[2, 5]] = 0
    return tensors, nodes


def batch_norms() -> Graph:
    words = ("weight", "bias", "running_mean", "running_var")
    tensors = {f"bn{n}.{word}": 1 + normal(16) for n in range(4) for word in words}
    nodes = [
        ("BatchNormalization", [f"x{n}", *[f"bn{n}.{word}" for word in words]], [f"x{n + 1}"])
        for n in range(4)
    ]
    tensors["bn2.running_var"][3] = -1
    return tensors, nodes


def attention() -> Graph:
    tensors: dict[str, Any] = {}
    nodes: list[tuple[str, list[str], list[str]]] = []
    for name in ("query", "key", "value", "out"):
        tensors |= {f"{name}.weight": normal(32, 32), f"{name}.bias": normal(32)}
        nodes += [
            ("MatMul", ["x", f"{name}.weight"], [f"{name}.y"]),
            ("Add", [f"{name}.y", f"{name}.bias"], [f"{name}.z"]),
        ]
    tensors |= {"ln.weight": 1 + normal(32), "ln.bias": normal(32)}
    nodes.append(("LayerNormalization", ["x", "ln.weight", "ln.bias"], ["n"]))
    return tensors, nodes


def embedding() -> Graph:
    tensors = {"embedding.weight": normal(50, 16), "head.weight": normal(16, 50)}
    tensors["embedding.weight"][7] = np.nan
    nodes = [("Gather", ["embedding.weight", "ids"], ["x"]), ("MatMul", ["x", "head.weight"], [])]
    return tensors, nodes


def recurrent() -> Graph:
    shapes = {"W": (2, 64, 16), "R": (2, 64, 16), "B": (2, 128)}
    tensors = {name: normal(*shape) for name, shape in shapes.items()}
    return tensors, [("LSTM", ["x", *tensors], ["y"])]


def dynamic_int8() -> Graph:
    tensors: dict[str, Any] = {}
    nodes: list[tuple[str, list[str], list[str]]] = []
    for n in range(4):
        tensors |= {
            f"w{n}_quantized": RNG.integers(-90, 90, (64, 64)).astype("i1"),
            f"w{n}_zero_point": np.int8(0),
            f"w{n}_scale": np.float32(0.01 * n),
        }
        inputs = ["xq", f"w{n}_quantized", "xz", f"w{n}_zero_point"]
        nodes += [
            ("DynamicQuantizeLinear", [f"x{n}"], ["xq", "xs", "xz"]),
            ("MatMulInteger", inputs, [f"y{n}"]),
            ("Mul", ["xs", f"w{n}_scale"], [f"s{n}"]),
        ]
    return tensors, nodes


def static_int8() -> Graph:
    tensors = {
        "w": RNG.integers(-90, 90, (64, 64)).astype("i1"),
        "s": np.float32(0.01),
        "z": np.int8(0),
    }
    return tensors, [("DequantizeLinear", [*tensors], ["v"]), ("MatMul", ["x", "v"], ["y"])]


def settings() -> Graph:
    tensors = {
        "size": np.array([1, 2, 3], "i8"),
        "scales": np.ones(4, "f4"),
        "low": np.float32(0),
        "high": np.float32(np.nan),
        "epsilon": np.float32(1e-5),
        "w": normal(32, 32),
    }
    nodes = [
        ("Reshape", ["x", "size"], ["a"]),
        ("Resize", ["a", "", "scales"], ["b"]),
        ("Clip", ["b", "low", "high"], ["c"]),
        ("Add", ["c", "epsilon"], ["d"]),
        ("MatMul", ["d", "w"], ["e"]),
    ]
    return tensors, nodes


def transposed() -> Graph:
    tensors = {"fc.weight": normal(8, 32), "fc.bias": normal(8)}
    return tensors, [("Gemm", ["x", *tensors], ["y"])]


def casts() -> Graph:
    tensors = {"w": normal(64, 64), "b": normal(64)}
    nodes = [("Cast", ["w"], ["wf"]), ("Cast", ["b"], ["bf"]), ("Gemm", ["x", "wf", "bf"], ["y"])]
    return tensors, nodes


GRAPHS = [
    *(convolutions, batch_norms, attention, embedding, recurrent),
    *(dynamic_int8, static_int8, settings, transposed, casts),
]
DECOYS = ("t", "optimizer.state.exp_avg.", "running_mean_")


def facts(path: Path, graph: Graph, prefix: str | None) -> Any:
    tensors, nodes = graph
    names = {n: n if prefix is None else f"{prefix}{at}" for at, n in enumerate(tensors)}
    path.write_bytes(
        model(
            *(initializer(names[name], values) for name, values in tensors.items()),
            nodes=tuple(
                node(operator, [names.get(name, name) for name in inputs], outputs)
                for operator, inputs, outputs in nodes
            ),
        )
    )
    table = xckpt.open(path).ckpt.structure()
    findings = xckpt.findings(path, progress=False)
    places = {name: at for at, name in enumerate(names.values())}
    return (
        table[["role", "module_type", "axes"]].to_numpy().tolist(),
        int(xckpt.open(path).ckpt.footprint()["parameters"]),
        sorted(zip(map(places.get, findings["tensor"]), findings["rule"], strict=True)),
    )


@pytest.mark.parametrize("graph", GRAPHS, ids=[graph.__name__ for graph in GRAPHS])
def test_other_names_change_nothing(graph: Callable[[], Graph], tmp_path: Path) -> None:
    made = graph()
    plain = facts(tmp_path / "m.onnx", made, None)
    for prefix in DECOYS:
        assert facts(tmp_path / "decoy.onnx", made, prefix) == plain, prefix


def test_arguments_of_operators_may_be_nan(tmp_path: Path) -> None:
    assert facts(tmp_path / "m.onnx", settings(), None)[2] == []
