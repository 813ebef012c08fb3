"""`compare(explain=True)` of models and the GGUF files that a converter made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import xckpt
from tests.stats.conversions import Conversion, converted, model, write_gguf, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

CONVERSIONS = [
    *("llama-F16", "llama-Q8_0", "llama-Q4_0", "llama-Q4_K", "mistral-BF16", "mistral-Q6_K"),
    *("qwen2-Q8_0", "qwen2-Q5_K", "qwen3-F16", "qwen3-Q4_0", "gemma-BF16", "gemma2-Q8_0"),
    *("gemma2-Q2_K", "mixtral-Q8_0", "mixtral-Q3_K", "qwen3moe-Q4_K"),
]
_OF_TYPES = {"F16": "rounded", "BF16": "rounded"}


def explained(a: Path, b: Path) -> tuple[pd.DataFrame, str]:
    result = xckpt.compare(a, b, explain=True, cache=False)
    return xckpt.table(result), result.attrs["explanation"]


def wanted_causes(conversion: Conversion, new: str, kind: str) -> set[str]:
    """Return the causes of a tensor in GGUF."""
    values, origins = conversion.tensors[new], conversion.origins[new]
    causes = {"fused" if len(origins) > 1 else "renamed"}
    if origins[0] in conversion.heads:
        causes.add("rope_permuted")
    if values.ndim > 1 and "ffn_gate_inp" not in new:
        causes.add(_OF_TYPES.get(kind, "quantised"))
    return causes


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_every_tensor_is_explained_and_a_damaged_one_is_named(
    conversion: str, tmp_path: Path
) -> None:
    architecture, _, kind = conversion.partition("-")
    ours = model(architecture)
    result = converted(architecture, ours)
    path = write_safetensors(tmp_path / "hf.safetensors", ours)
    table, sentence = explained(
        path, write_gguf(tmp_path / "m.gguf", architecture, result.tensors, kind)
    )
    assert set(table["outcome"]) == {"explained"}, table[["cause", "explanation"]].to_string()
    assert table["verified"].all()
    assert sentence.startswith(f"all {len(ours)} tensors are explained: ")
    for new, origins in result.origins.items():
        causes = wanted_causes(result, new, kind)
        if architecture.startswith("gemma") and new.endswith("norm.weight"):
            causes.add("offset")
            assert table.loc[new, "offset"] == 1
        assert set(table.loc[new, "cause"].split("+")) == causes
        assert table.loc[new, "other_names"] == ", ".join(origins)
        for name in origins:
            assert table.loc[name, "other_names"] == new
            assert set(table.loc[name, "cause"].split("+")) == causes
    heads = table["heads"].dropna()
    assert {name: heads[name] for name in result.heads} == result.heads
    if kind not in _OF_TYPES:
        texts = table["explanation"][table["cause"].str.contains("quantised")]
        assert texts.str.contains(" dB").all()
    # One row of one tensor is of another model.
    damaged = next(
        n for n in reversed(result.tensors) if result.tensors[n].ndim > 1 and "blk.1" in n
    )
    rng = np.random.default_rng(1)
    values = result.tensors[damaged].copy()
    rows = values.reshape(-1, values.shape[-1])
    rows[3] = rng.standard_normal(rows.shape[1]) * np.abs(rows).max()
    broken = result.tensors | {damaged: values}
    table, sentence = explained(path, write_gguf(tmp_path / "d.gguf", architecture, broken, kind))
    different = table.index[table["outcome"] != "explained"]
    assert damaged in different
    assert set(different) <= {damaged, *result.origins[damaged]}
    assert sentence.startswith(f"1 of {len(ours)} tensors differs: ")
    assert not table.loc[damaged, "verified"]


def test_name_and_content_together_identify_changes(tmp_path: Path) -> None:
    """Noise in one tensor, and rows overwritten in another, in a model with names of GGUF."""
    ours = model("llama")
    conversion = converted("llama", ours)
    rng = np.random.default_rng(2)
    noise, rows = "blk.0.ffn_up.weight", "blk.1.attn_output.weight"
    broken = dict(conversion.tensors)
    broken[noise] = np.asarray(rng.standard_normal(broken[noise].shape, np.float32)) / 20
    broken[rows] = broken[rows].copy()
    broken[rows][:7] = rng.standard_normal((7, broken[rows].shape[1]))
    a = write_safetensors(tmp_path / "hf.safetensors", ours)
    b = write_gguf(tmp_path / "m.gguf", "llama", broken, "F32")
    for names in (None, "auto"):
        result = xckpt.compare(a, b, names=names, explain=True, cache=False)
        table = xckpt.table(result)
        expected = {origin for name in (noise, rows) for origin in conversion.origins[name]}
        flagged = table.query("cause == 'unknown' or not verified").index
        assert set(flagged) - {noise, rows} == expected
        assert result.attrs["explanation"].startswith(
            f"2 of {len(ours)} tensors differ: 'model.layers."
        )
        assert set(table.loc[list(expected), "outcome"]) == {"changed"}
        assert not table.loc[list(expected), "verified"].any()


@pytest.mark.parametrize("are_renamed", [False, True])
def test_exchanged_layers_are_a_fault(tmp_path: Path, *, are_renamed: bool) -> None:
    ours = model("qwen2")
    names = {
        n: n.replace("layers.0", "layers.X").replace("layers.1", "layers.0").replace("layers.X",
        "layers.1") for n in ours
    }  # fmt: skip
    swapped = {name: ours[source] for name, source in names.items()}
    a = write_safetensors(tmp_path / "a.safetensors", ours)
    if are_renamed:
        b = write_gguf(tmp_path / "b.gguf", "qwen2", converted("qwen2", swapped).tensors, "Q8_0")
    else:
        b = write_safetensors(tmp_path / "b.safetensors", swapped)
    table, sentence = explained(a, b)
    moved = [name for name in ours if "layers" in name]
    assert set(table.loc[moved, "outcome"]) == {"changed"}
    assert set(table.loc[moved, "cause"]) == {"misplaced"}
    assert sentence.startswith(f"{len(moved)} of {len(ours)} tensors differ: ")
    name = "model.layers.0.mlp.up_proj.weight"
    partner = "blk.1.ffn_up.weight" if are_renamed else "model.layers.1.mlp.up_proj.weight"
    assert f"its numbers are those of '{partner}' of b" in table.loc[name, "explanation"]


def test_exchanged_roles_are_a_fault(tmp_path: Path) -> None:
    """A converter that takes keys for values does so in every layer."""
    ours = model("qwen3")
    theirs = converted("qwen3", ours).tensors
    for layer in range(2):
        k, v = f"blk.{layer}.attn_k.weight", f"blk.{layer}.attn_v.weight"
        theirs[k], theirs[v] = theirs[v], theirs[k]
    a = write_safetensors(tmp_path / "a.safetensors", ours)
    table, _ = explained(a, write_gguf(tmp_path / "b.gguf", "qwen3", theirs, "F16"))
    wrong = table.index[table["outcome"] != "explained"]
    assert set(wrong) == {
        name for name in table.index for role in ("k_proj", "v_proj", "attn_k.", "attn_v.")
        if role in name
    }  # fmt: skip


def test_exchanged_experts_are_a_fault(tmp_path: Path) -> None:
    ours = model("mixtral")
    theirs = converted("mixtral", ours).tensors
    name = "blk.1.ffn_gate_exps.weight"
    theirs[name] = theirs[name][[0, 2, 1]]
    a = write_safetensors(tmp_path / "a.safetensors", ours)
    table, sentence = explained(a, write_gguf(tmp_path / "b.gguf", "mixtral", theirs, "Q8_0"))
    assert table.loc[name, "outcome"] == "changed"
    assert "not in the order of its siblings" in table.loc[name, "explanation"]
    assert "tensors differ" in sentence


class TestOffset:
    """Explains norms of architectures that are known for it, and nothing else."""

    @pytest.mark.parametrize(
        ("architecture", "outcome"), [("gemma", "explained"), ("llama", "changed")]
    )
    def test_norm_offset_is_explained(
        self, tmp_path: Path, architecture: str, outcome: str
    ) -> None:
        ours = model("gemma")
        name = "output_norm.weight"
        theirs = converted("gemma", ours).tensors
        b = write_gguf(tmp_path / "b.gguf", architecture, theirs, "F32")
        table, _ = explained(write_safetensors(tmp_path / "a.safetensors", ours), b)
        assert table.loc[name, "outcome"] == outcome
        assert table.loc[name, "offset"] == 1
        assert table.loc["token_embd.weight", "outcome"] == "explained"

    @pytest.mark.parametrize(
        ("architecture", "outcome"), [("llama", "changed"), ("gemma2", "explained")]
    )
    def test_norm_offset_needs_names_of_such_a_model(self, architecture: str, outcome: str) -> None:
        names = ["self_attn.q_proj", "input_layernorm", "post_attention_layernorm"]
        if architecture == "gemma2":
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        rng = np.random.default_rng(0)
        ours = {
            f"model.layers.{layer}.{n}.weight": rng.standard_normal(
                (64, 64) if "proj" in n else 64
            ).astype(np.float32)
            for layer in range(3)
            for n in names
        }
        name = "model.layers.0.input_layernorm.weight"
        theirs = ours | {name: ours[name] + np.float32(1)}
        table = xckpt.table(xckpt.compare(ours, theirs, explain=True))
        assert table.loc[name, "outcome"] == outcome
        assert table.loc[name, "cause"] == "offset"


class TestAmbiguity:
    """Is no explanation."""

    def test_tied_weights(self) -> None:
        rng = np.random.default_rng(0)
        weight, unrelated = rng.standard_normal((2, 30, 16)).astype(np.float32)
        tied = {"embed.weight": weight, "head.weight": weight, "x.weight": unrelated}
        result = xckpt.compare(tied, tied, explain=True)
        assert set(xckpt.table(result)["outcome"]) == {"explained"}
        swapped = tied | {"head.weight": unrelated, "x.weight": weight}
        table = xckpt.table(xckpt.compare(tied, swapped, explain=True))
        assert table["outcome"].to_dict() == {
            "embed.weight": "explained", "head.weight": "changed", "x.weight": "changed",
        }  # fmt: skip

    def test_norms_of_ones(self) -> None:
        norms = {f"layers.{n}.norm.weight": np.ones(16, np.float32) for n in range(4)}
        renamed = {f"blk.{n}.ln.weight": np.ones(16, np.float32) for n in range(4)}
        table = xckpt.table(xckpt.compare(norms, renamed, explain=True))
        assert set(table["outcome"]) == {"explained"}
        damaged = renamed | {"blk.2.ln.weight": np.linspace(0, 3, 16, dtype=np.float32)}
        table = xckpt.table(xckpt.compare(norms, damaged, explain=True))
        assert table.loc["blk.2.ln.weight", "outcome"] != "explained"
        assert not table["verified"].all()

    def test_tensors_too_small_to_identify(self) -> None:
        a = {"scale": np.array([0.5], np.float32), "bias": np.array([2.0], np.float32)}
        b = {"gain": np.array([0.5], np.float32), "step": np.array([7.0], np.float32)}
        table = xckpt.table(xckpt.compare(a, b, explain=True))
        assert not table.loc[["bias", "step"], "verified"].any()

    def test_infinities_from_rounding(self) -> None:
        values = np.linspace(1, 1e5, 64, dtype=np.float32)
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        table = xckpt.table(xckpt.compare({"w": values}, {"w": half}, explain=True))
        assert table.loc["w", "outcome"] == "changed"
