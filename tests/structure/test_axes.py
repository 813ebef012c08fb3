"""Names of axes follow from facts: operators, classes, trees, sizes, modules of a format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats.burnpack_files import burnpack, dense
from tests.formats.flax_files import array, flax_file
from tests.formats.gguf_files import gguf_file, text
from tests.formats.gptrs_files import GPT
from tests.formats.onnx_files import field, initializer, model, node
from xckpt.structure import Described, Structure, structure_of
from xckpt.structure.facts import model_facts

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = ("height", "width", "in", "out")
FACTS: list[tuple[dict[str, Any], tuple[int, ...], tuple[str | None, ...]]] = [
    ({"uses": (("MatMul", 1, ()),), "orders": ("kept",)}, (4, 6), ("in", "out")),
    ({"uses": (("MatMul", 1, ()),), "orders": ("reversed",)}, (4, 6), ("out", "in")),
    ({"uses": (("MatMul", 1, ()),), "orders": (None,)}, (4, 6), (None, None)),
    ({"uses": (("Gemm", 1, ()),), "settings": ({"transB": 1},)}, (4, 6), ("out", "in")),
    ({"uses": (("Gemm", 1, ()),), "settings": ({},)}, (4, 6), ("in", "out")),
    ({"class": "conv2d", "variable": "kernel"}, (3, 3, 4, 6), KERNEL),
    ({"class": "conv2d", "variable": "kernel"}, (4, 6), (None, None)),
    ({"class": "dense", "variable": "kernel", "elements": 48}, (4, 6), (None, None)),
    ({"tree": ("a", "kernel")}, (3, 3, 4, 6), KERNEL),
    ({"class": "dense", "variable": "kernel", "axes": ("x", None)}, (4, 6), ("x", None)),
    ({"class": "dense", "variable": "kernel", "axes": ()}, (4, 6), (None, None)),
]


@pytest.mark.parametrize(("declared", "shape", "axes"), FACTS)
@pytest.mark.parametrize("name", ["t0", "running_mean", "optimizer.state.0.exp_avg"])
def test_facts_name_axes(declared: Any, shape: Any, axes: Any, name: str) -> None:
    structure = Structure([Described(name, "float32", shape, declared)])
    assert structure[name].axes == axes


GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 8,
    "llama.attention.head_count": 2,
    "llama.feed_forward_length": 12,
}
SIZES: list[tuple[dict[str, Any], str, tuple[int, ...], tuple[str | None, ...]]] = [
    (GGUF, "blk.3.ffn_up.weight", (12, 8), ("ff", "embd")),
    (GGUF, "blk.3.ffn_up.weight", (13, 8), (None, "embd")),
    (GGUF, "blk.3.attn_q.weight", (8, 8), ("head*key", "embd")),
    (GGUF, "other.ffn_up.weight", (12, 8), (None, None)),
    ({"kind": "gpt", "config": GPT}, "lm_head", (4, 7), ("embed_dim", "vocab_size")),
    ({"kind": "unknown", "config": GPT}, "lm_head", (4, 7), (None, None)),
]


@pytest.mark.parametrize(("attrs", "name", "shape", "axes"), SIZES)
def test_sizes_of_the_model_name_axes(attrs: Any, name: str, shape: Any, axes: Any) -> None:
    structure = Structure([Described(name, "float32", shape)], model_facts(attrs))
    info = structure[name]
    assert info.axes == axes
    assert any(e.reason == "sizes of the model" for e in info.evidence) == any(axes)


def test_modules_of_a_format_name_channels() -> None:
    """Burn's linear layers begin with their inputs; a bias tells which axis is which."""
    shapes = {"fc.weight": (4, 6), "fc.bias": (6,), "conv.weight": (8, 3, 3, 3), "conv.bias": (8,)}
    data = burnpack({name: dense(np.zeros(shape, "<f4")) for name, shape in shapes.items()})
    structure, shown = structure_of(xckpt.read_index(data)), _structure_in(xckpt.open(data))
    assert structure["fc.weight"].axes == ("in", "out")
    assert shown["fc.weight"] == "in, out"
    assert shown["conv.weight"] == "out, in, kernel_height, kernel_width"
    assert xckpt.open(data)["fc.weight"].dims == ("d4", "d6")


def _structure_in(ds: xr.Dataset) -> dict[str, str]:
    return dict(ds.ckpt.structure()["axes"])


def test_modules_of_flax_are_called_by_their_class() -> None:
    tree = {
        "params": {
            "Conv_0": {"kernel": array(np.zeros((3, 3, 4, 6), "f4"))},
            "LayerNorm_1": {"scale": array(np.zeros(6, "f4"))},
            "SelfAttention_0": {"query": {"kernel": array(np.zeros((6, 2, 3), "f4")),
                                          "bias": array(np.zeros((2, 3), "f4"))}},
        },
        "opt_state": {"0": {"mu": {"Conv_0": {"kernel": array(np.zeros((3, 3, 4, 6), "f4"))}}}},
    }  # fmt: skip
    structure = structure_of(xckpt.read_index(flax_file(tree)))
    conv = structure["params/Conv_0/kernel"]
    assert (conv.role, conv.module_type, conv.param) == ("weight", "convolution", "weight")
    norm = structure["params/LayerNorm_1/scale"]
    assert (norm.module_type, norm.param) == ("norm", "weight")
    query = structure["params/SelfAttention_0/query/kernel"]
    assert (query.module_type, query.axes) == ("linear", ("in", "heads", "head"))
    assert structure["opt_state/0/mu/Conv_0/kernel"].role == "moment"


# --- what is written -----------------------------------------------------------------------------


def graph() -> bytes:
    """Return two matrices, of which only the first can have its names in a flat Dataset."""
    tensors = {"a": np.ones((4, 6), "f4"), "b": np.ones((6, 5), "f4")}
    transposed = field(1, "transB") + field(3, 1)
    nodes = (node("MatMul", ["x", "a"], ["y"]), node("Gemm", ["y", "b"], ["z"], transposed))
    return model(*(initializer(n, v) for n, v in tensors.items()), nodes=nodes)


def test_copies_in_other_formats_state_all_names(tmp_path: Path) -> None:
    ds = xckpt.open(graph())
    assert (ds["a"].dims, ds["b"].dims) == (("in_4", "out"), ("out", "in"))
    ds.ckpt.save(tmp_path / "m.zt")
    copy = xckpt.read_index(tmp_path / "m.zt")
    assert (copy["a"].dims, copy["b"].dims) == (("in", "out"), ("out", "in"))
    assert xckpt.open(tmp_path / "m.zt")["a"].dims == ds["a"].dims


def test_copies_state_no_names_that_follow_again(tmp_path: Path) -> None:
    attrs = {
        "general.architecture": text("llama"),
        "llama.embedding_length": b"\4\0\0\0" + b"\x08\0\0\0",
    }
    data = gguf_file(attrs, [("output_norm.weight", [8], 0, 0)], bytes(32))
    ds = xckpt.open(data)
    assert ds["output_norm.weight"].dims == ("embd",)
    ds.ckpt.save(tmp_path / "m.gguf")
    assert b"xckpt.dims" not in (tmp_path / "m.gguf").read_bytes()
    assert xckpt.open(tmp_path / "m.gguf")["output_norm.weight"].dims == ("embd",)
    ds.ckpt.save(tmp_path / "m.zt")
    assert xckpt.read_index(tmp_path / "m.zt")["output_norm.weight"].dims is None
    assert xckpt.open(tmp_path / "m.zt")["output_norm.weight"].dims == ("embd",)


def test_computed_values_have_no_axes_but_their_own() -> None:
    """The facts of a file are about its values, not about sums or transposes of them."""
    with xr.set_options(keep_attrs=True):
        ds = (xckpt.open(graph()) * 2).rename({"in_4": "x", "out": "y"})
    assert _structure_in(ds)["a"] == ""
