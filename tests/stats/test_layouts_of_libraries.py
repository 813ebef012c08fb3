"""Layouts that libraries make of their own models are explained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.stats.test_layouts import explained

if TYPE_CHECKING:
    from pathlib import Path

Tensors = dict[str, Any]
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mixtral", {"num_local_experts": 4}),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}),
    ],
)
def test_experts_of_transformers(name: str, options: dict[str, int], tmp_path: Path) -> None:
    # A model has stacked experts in memory, and saves them one by one.
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.05)
    model.save_pretrained(tmp_path)
    state = {n: values.detach().numpy() for n, values in model.state_dict().items()}
    table = explained(tmp_path, state)
    assert set(table.outcome) == {"explained"}, table.explanation.to_dict()
    assert table.cause.eq("fused").sum() == 3 * (4 * 3 + 2)
    stacked = next(n for n in state if n.endswith("layers.1.mlp.experts.gate_up_proj"))
    state[stacked] = state[stacked][[1, 0, 2, 3]]
    table = explained(tmp_path, state)
    assert table.outcome[stacked] == "changed"
    # Two experts, each with a gate and an up projection.
    assert table.outcome.eq("changed").sum() == 5


def test_attention_of_flax() -> None:
    jax = pytest.importorskip("jax")
    linen = pytest.importorskip("flax.linen")
    traverse = pytest.importorskip("flax.traverse_util")
    ours: Tensors = {}
    theirs: Tensors = {}
    for layer in range(3):
        module = linen.MultiHeadDotProductAttention(num_heads=4, qkv_features=64)
        key = jax.random.key(layer)
        variables = module.init(key, np.ones((1, 5, 48), np.float32))
        for path, value in traverse.flatten_dict(variables["params"], sep="/").items():
            values = jax.random.normal(key, value.shape) * 0.05
            theirs[f"params/layers_{layer}/attention/{path}"] = np.asarray(values)
    for name, values in theirs.items():
        plain = name.removeprefix("params/").replace("layers_", "layers.").replace("/", ".")
        if name.endswith("/kernel"):
            last = values.shape[-1] if "/out/" in name else 64
            values = np.ascontiguousarray(values.reshape(-1, last).T)  # noqa: PLW2901
        ours[plain.replace(".kernel", ".weight")] = values.ravel() if ".bias" in plain else values
    table = explained(ours, theirs)
    assert set(table.outcome) == {"explained"}, table.explanation.to_dict()
