"""Names of axes from the config of a gpt.rs checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.conftest import golden_files
from tests.contracts.declared import golden_json
from tests.formats.gptrs_files import GPT, indexed_file, record, tagged
from tests.sources import CountingSource
from xckpt import formats
from xckpt.structure.dims import axes_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


gptrs = formats.get("gptrs")


def dims_of(config: bytes, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    records = [record(name, np.zeros(shape, "<f4")) for name, shape in shapes.items()]
    index = gptrs.read(CountingSource(indexed_file(records, config)))
    return {name: axes_of(index).get(name) for name in index}


GPT_AXES = {
    "tok_embeddings.weight": {"vocab_size": 7, "embed_dim": 4},
    "pos_embeddings": {"context_length": 5, "embed_dim": 4},
    "blocks.0.attention.w_qkv": {"embed_dim": 4, "qkv_dim": 12},
    "blocks.0.attention.b_qkv": {"qkv_dim": 12},
    "blocks.10.attention.w_out": {"attn_dim": 4, "embed_dim": 4},
    "blocks.0.attention.b_out": {"embed_dim": 4},
    "blocks.0.feed_forward.w_in": {"embed_dim": 4, "mlp_hidden_dim": 12},
    "blocks.0.feed_forward.b_in": {"mlp_hidden_dim": 12},
    "blocks.0.feed_forward.w_out": {"mlp_hidden_dim": 12, "embed_dim": 4},
    "blocks.0.feed_forward.b_out": {"embed_dim": 4},
    **{
        f"{norm}.{leaf}": {"embed_dim": 4}
        for norm in ("blocks.0.ln_1", "blocks.0.ln_2", "final_ln")
        for leaf in ("gamma", "beta")
    },
    "lm_head": {"embed_dim": 4, "vocab_size": 7},
}
MINISTRAL = {
    "vocab_size": 7,
    "embed_dim": 6,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 4,
    "mlp_hidden_dim": 20,
}
MINISTRAL_AXES = {
    "tok_embeddings.weight": {"vocab_size": 7, "embed_dim": 6},
    "blocks.0.attention.w_qkv": {"embed_dim": 6, "qkv_dim": 20},
    "blocks.0.attention.w_out": {"attn_dim": 12, "embed_dim": 6},
    "blocks.0.feed_forward.w_gate": {"embed_dim": 6, "mlp_hidden_dim": 20},
    "blocks.0.feed_forward.w_up": {"embed_dim": 6, "mlp_hidden_dim": 20},
    "blocks.0.feed_forward.w_down": {"mlp_hidden_dim": 20, "embed_dim": 6},
    "blocks.0.norm_1.gamma": {"embed_dim": 6},
    "blocks.0.norm_2.gamma": {"embed_dim": 6},
    "final_norm.gamma": {"embed_dim": 6},
    "lm_head": {"embed_dim": 6, "vocab_size": 7},
}


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (tagged("gpt", GPT), GPT_AXES),
        (json.dumps(GPT).encode(), GPT_AXES),
        (tagged("ministral", MINISTRAL), MINISTRAL_AXES),
        (
            tagged("resnet34", {"num_classes": 6}),
            {"fc.weight": {"num_classes": 6, "in_features": 512}, "fc.bias": {"num_classes": 6}},
        ),
        (
            tagged("mobilenet_v2", {"num_classes": 6}),
            {
                "classifier.weight": {"num_classes": 6, "in_features": 1280},
                "classifier.bias": {"num_classes": 6},
            },
        ),
    ],
)
def test_axes_of_each_kind(config: bytes, axes: dict[str, dict[str, int]]) -> None:
    shapes = {name: tuple(sizes.values()) for name, sizes in axes.items()}
    assert dims_of(config, shapes) == {name: tuple(sizes) for name, sizes in axes.items()}


@pytest.mark.parametrize("head_dim", [None, "absent"])
def test_heads_split_the_embedding_by_default(head_dim: str | None) -> None:
    config = {**MINISTRAL, "head_dim": head_dim}
    if head_dim is not None:
        del config["head_dim"]
    shapes = {"blocks.0.attention.w_qkv": (6, 10), "blocks.0.attention.w_out": (6, 6)}
    assert list(dims_of(tagged("ministral", config), shapes).values()) == [
        ("embed_dim", "qkv_dim"),
        ("attn_dim", "embed_dim"),
    ]
    config["num_heads"] = 4
    assert dims_of(tagged("ministral", config), shapes) == {
        "blocks.0.attention.w_qkv": ("embed_dim", None),
        "blocks.0.attention.w_out": (None, "embed_dim"),
    }


def test_sizes_that_disagree_with_the_config() -> None:
    shapes = {
        "tok_embeddings.weight": (7, 5),
        "lm_head": (4, 4),
        "pos_embeddings": (4, 5),  # transposed: sizes that belong to the other axis
        "final_ln.gamma": (1, 4),
        "final_ln.beta": (),
        "blocks.x.ln_1.gamma": (4,),
        "blocks.0.ln_1.gamma.m": (4,),
        "unknown": (4, 7),
    }
    dims = dims_of(tagged("gpt", GPT), shapes)
    assert dims.pop("tok_embeddings.weight") == ("vocab_size", None)
    assert dims.pop("lm_head") == ("embed_dim", None)
    assert set(dims.values()) == {None}


@pytest.mark.parametrize("value", [None, "4", 4.0, True, 0, -4, 2**70, [4], {}])
def test_invalid_sizes_are_ignored(value: Any) -> None:
    shapes = {"lm_head": (4, 7), "final_ln.gamma": (1,), "final_ln.beta": (0,)}
    dims = dims_of(tagged("gpt", {**GPT, "embed_dim": value}), shapes)
    assert dims == {"lm_head": (None, "vocab_size"), "final_ln.gamma": None, "final_ln.beta": None}


@pytest.mark.parametrize("config", [None, [], 3, "x", {}])
@pytest.mark.parametrize("kind", ["gpt", "ministral", "resnet34", "llama", ""])
def test_configs_without_sizes(kind: str, config: Any) -> None:
    shapes = {"lm_head": (4, 7), "fc.bias": (4,)}
    assert set(dims_of(tagged(kind, config), shapes).values()) == {None}


def test_convolutions_have_no_names() -> None:
    shapes = {"conv1.weight": (64, 3, 7, 7), "layer1.0.conv1.bias": (64,)}
    assert set(dims_of(tagged("resnet34", {"num_classes": 64}), shapes).values()) == {None}


# Channels and kernels differ from layer to layer, and the classifier of the golden resnet34 has
# fewer inputs than a resnet34.
UNNAMED = {"out_channels", "in_channels", "kernel_h", "kernel_w", "in_features"}


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("path", golden_files("gptrs/*.bin"), ids=lambda path: path.stem)
def test_golden_files(path: Path) -> None:
    ds = xr.open_dataset(path)
    for entry in golden_json(path)["entries"]:
        dims = ds.variables[entry["name"]].dims
        expected = entry.get("suggested_axes") or [None] * len(dims)
        if entry["name"].endswith(".attention.w_out"):
            expected = ["attn_dim", "embed_dim"]
        for dim, size, name in zip(dims, entry["dims"], expected, strict=True):
            if name is None or name in UNNAMED:
                assert str(dim).partition("_")[0] == f"d{size}"
            else:
                assert dim == name
