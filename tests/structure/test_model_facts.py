"""A config or the metadata of a file state the family, the sizes and the quantised modules."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from xckpt.structure import Described, Role, Structure, structure_of
from xckpt.structure.facts import model_facts

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
SIZES = {"embd": 64, "layer": 2, "head": 4, "head_kv": 2, "vocab": 100}
GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": [2, 2],
    "llama.vocab_size": 100,
}
STATED: list[tuple[dict[str, Any], str, dict[str, int]]] = [
    ({"config": LLAMA}, "llama", SIZES),
    ({"config": {"model_type": "gemma3", "text_config": LLAMA}}, "gemma3", SIZES),
    (GGUF, "llama", {name: size for name, size in SIZES.items() if name != "head_kv"}),
    (
        {"kind": "gpt", "config": {"embed_dim": 64, "num_layers": 2}},
        "gpt",
        {"embd": 64, "layer": 2},
    ),
    ({}, "", {}),
    ({"config": "not an object", "kind": 3}, "", {}),
    ({"config": {"model_type": ["llama"], "hidden_size": -1, "vocab_size": True}}, "", {}),
    ({"config": {"model_type": "x" * 10_000, "hidden_size": 1 << 80}}, "", {}),
]


@pytest.mark.parametrize(("attrs", "family", "sizes"), STATED)
def test_the_family_and_the_sizes_are_those_that_the_file_states(
    attrs: dict[str, Any], family: str, sizes: dict[str, int]
) -> None:
    structure = Structure([Described("w", "float32", (4, 3))], model_facts(attrs))
    assert (structure.family, dict(structure.sizes)) == (family, sizes)
    copy = pickle.loads(pickle.dumps(structure))
    assert (copy.family, dict(copy.sizes)) == (family, sizes)


def test_a_config_can_be_passed_with_the_index(tmp_path: Path) -> None:
    xckpt.save({"w": np.ones((4, 3), "f4")}, tmp_path / "m.zt")
    index = xckpt.read_index(tmp_path / "m.zt")
    assert structure_of(index).family == ""
    assert structure_of(index, LLAMA).family == "llama"
    assert structure_of(index).family == ""


def test_the_config_of_a_saved_file_is_found(tmp_path: Path) -> None:
    ds = xckpt.open({"w": np.ones((4, 3), "f4")}).assign_attrs(config=LLAMA)
    ds.ckpt.save(tmp_path / "m.zt")
    assert structure_of(xckpt.read_index(tmp_path / "m.zt")).sizes == SIZES


# --- quantisation --------------------------------------------------------------------------------

METHODS: list[tuple[dict[str, Any], dict[str, str], dict[str, Role]]] = [
    (
        {"quant_method": "gptq", "bits": 4},
        {"qweight": "int32", "qzeros": "int32", "scales": "float16", "bias": "float16"},
        {"qweight": Role.CODES, "qzeros": Role.SCALE, "scales": Role.SCALE, "bias": Role.WEIGHT},
    ),
    (
        {"quant_method": "fp8"},
        {"weight": "float8_e4m3fn", "input_scale": "float32", "k_scale": "float32"},
        {"weight": Role.CODES, "input_scale": Role.SCALE, "k_scale": Role.SCALE},
    ),
    (
        {"load_in_4bit": True},
        {"weight": "uint8", "weight.absmax": "uint8", "weight.quant_map": "float32"},
        {"weight": Role.CODES, "weight.absmax": Role.SCALE, "weight.quant_map": Role.SCALE},
    ),
]


def roles(config: dict[str, Any], dtypes: dict[str, str]) -> dict[str, Role]:
    facts = model_facts({"config": config})
    return Structure([Described(n, d, (8, 8)) for n, d in dtypes.items()], facts).roles


@pytest.mark.parametrize(("declaration", "dtypes", "expected"), METHODS)
def test_a_declared_method_decides_about_the_modules_with_codes(
    declaration: dict[str, Any], dtypes: dict[str, str], expected: dict[str, Role]
) -> None:
    config = {"quantization_config": declaration}
    names = {f"layers.0.q.{leaf}": dtype for leaf, dtype in dtypes.items()}
    assert roles(config, names) == {f"layers.0.q.{leaf}": role for leaf, role in expected.items()}


EXCLUDED = [
    ("modules_to_not_convert", ["lm_head"]),
    ("modules_to_not_convert", ["model.lm_head"]),
    ("ignored_layers", ["model"]),
    ("ignore", ["lm_head", "re:.*vision.*"]),
    ("llm_int8_skip_modules", ["lm_head"]),
]


@pytest.mark.parametrize(("key", "modules"), EXCLUDED)
def test_modules_that_are_not_converted_have_parameters(key: str, modules: list[str]) -> None:
    config = {"quantization_config": {"quant_method": "fp8", key: modules}}
    dtypes = {"model.lm_head.weight": "bfloat16", "model.lm_head.weight_scale": "bfloat16"}
    assert set(roles(config, dtypes).values()) == {Role.WEIGHT}
    assert roles({}, dtypes)["model.lm_head.weight_scale"] is Role.SCALE


def test_parameters_are_the_elements_of_packed_codes() -> None:
    facts = model_facts({"config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}})
    structure = Structure([Described("a.qweight", "int32", (8, 8))], facts)
    assert structure.packed == {"a.qweight": 512}


def test_the_reason_names_the_config() -> None:
    facts = model_facts({"config": {"quantization_config": {"quant_method": "awq", "bits": 4}}})
    structure = Structure([Described("a.weight", "int8", (8, 8))], facts)
    first = structure["a.weight"].evidence[0]
    assert (first.source, first.reason) == ("model", "config: quantised with awq")


def test_the_table_of_roles_of_a_folder_follows_the_config(tmp_path: Path) -> None:
    """Weights that cannot be decoded stay as stored, and are codes nevertheless."""
    config = {"model_type": "llama", "quantization_config": {"quant_method": "exotic"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    xckpt.save({"a.weight": np.ones((4, 3), "i1"), "a.bias": np.ones(4, "f4")}, path)
    with pytest.warns(xckpt.CheckpointWarning, match="method 'exotic' is unsupported"):
        ds = xckpt.open(path)
    assert dict(ds.ckpt.structure()["role"]) == {"a.weight": "codes", "a.bias": "weight"}


def test_many_excluded_names_take_little_time() -> None:
    names = [f"layers.{n}.x" for n in range(10_000)]
    config = {"quantization_config": {"quant_method": "fp8", "ignore": names}}
    dtypes = {f"{'a.' * 200}{n}.weight": "int8" for n in range(300)}
    assert set(roles(config, dtypes).values()) == {Role.CODES}
