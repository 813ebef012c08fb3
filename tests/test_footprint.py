"""The size of a model: as stored, on disk, in other precisions, and of a mixture's active part."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import GOLDEN
from tests.documented import write_pickle
from tests.formats.gguf_files import gguf_file, text
from xckpt.cli import main
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS, CHOSEN, LAYERS = 8, 2, 3


def zeros(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(shape, np.float32)


def write_model(path: Path) -> dict[str, int]:
    """Write a model in training; return the numbers of elements by group."""
    tensors = {
        "wte.weight": zeros(64, 32),
        "h.0.fc.weight": zeros(32, 128).astype(np.float16),
        "h.0.bn.running_mean": zeros(32),
        "optimizer.state.wte.weight.exp_avg": zeros(64, 32),
    }
    xckpt.save(tensors, path)
    return {"parameters": 64 * 32 + 32 * 128, "buffers": 32, "optimizer state": 64 * 32}


def write_mixture(folder: Path, config: Any) -> Path:
    """Write a mixture of experts with a shared one, and its config."""
    tensors = {"embed.weight": zeros(64, 16)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.mlp"
        tensors[f"{block}.gate.weight"] = zeros(EXPERTS, 16)
        tensors[f"{block}.shared_experts.up_proj.weight"] = zeros(48, 16)
        for expert in range(EXPERTS):
            tensors[f"{block}.experts.{expert}.up_proj.weight"] = zeros(24, 16)
    xckpt.save(tensors, folder / "model.safetensors")
    if config is not None:
        content = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(content)
    return folder / "model.safetensors"


ALL = 64 * 16 + LAYERS * (EXPERTS * 16 + 48 * 16 + EXPERTS * 24 * 16)
ACTIVE = ALL - LAYERS * (EXPERTS - CHOSEN) * 24 * 16
CONFIG = {"n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN}


def test_parameters_are_counted_without_buffers_and_optimizer_state(tmp_path: Path) -> None:
    sizes = write_model(tmp_path / "m.safetensors")
    footprint = xckpt.open(tmp_path / "m.safetensors").ckpt.footprint()
    parameters = sizes["parameters"]
    assert footprint["parameters"] == parameters
    elements = footprint["group_elements"].to_series().to_dict()
    assert elements == sizes
    assert footprint["nbytes"] == footprint["group_nbytes"].sum()
    assert footprint["file_nbytes"] == (tmp_path / "m.safetensors").stat().st_size
    in_precisions = footprint["precision_nbytes"].to_series().to_dict()
    bits = {"float32": 32, "bfloat16": 16, "int8": 8.5, "int4": 4.5}
    assert in_precisions == {name: parameters * n / 8 for name, n in bits.items()}
    assert footprint["precision_bits"].to_series().to_dict() == bits
    by_scheme = footprint["scheme_parameters"].to_series().to_dict()
    assert by_scheme == {"float32": 64 * 32, "float16": 32 * 128}
    assert footprint["scheme_bits"].to_series().to_dict() == {"float32": 32, "float16": 16}


def test_blocks_that_are_not_full_take_all_their_bytes(tmp_path: Path) -> None:
    xckpt.save({"w": zeros(3)}, tmp_path / "m.safetensors")
    sizes = xckpt.open(tmp_path / "m.safetensors").ckpt.footprint()["precision_nbytes"]
    assert sizes.to_series().to_dict() == {"float32": 12, "bfloat16": 6, "int8": 4, "int4": 2}


def test_trees_stacks_and_selections_have_the_footprint_of_their_tensors(tmp_path: Path) -> None:
    path = write_mixture(tmp_path, CONFIG)
    whole = xckpt.open(path).ckpt.footprint()
    tree = xr.open_datatree(path, engine="safetensors").ckpt.footprint()
    xr.testing.assert_identical(tree, whole)
    xr.testing.assert_identical(xckpt.open(path, stack=True).ckpt.footprint(), whole)
    layer = xckpt.open(path, stack=True).ckpt.sel(layers=0).ckpt.footprint()
    experts = LAYERS * EXPERTS * 24 * 16
    assert layer["parameters"] == (ALL - 64 * 16) // LAYERS
    assert layer["active_parameters"] == layer["parameters"] - experts // LAYERS * 6 // 8


def test_tied_tensors_count_once(tmp_path: Path) -> None:
    write_pickle(tmp_path)
    footprint = xckpt.open(tmp_path / "model.pt").ckpt.footprint()
    assert footprint["scheme_parameters"].sel(scheme="float32") == 6
    assert footprint["group_elements"].sel(group="parameters") == footprint["parameters"]


def test_objects_in_memory_have_no_size_on_disk() -> None:
    footprint = xckpt.open({"w": zeros(4, 8)}).ckpt.footprint()
    assert footprint["parameters"] == 32
    assert "file_nbytes" not in footprint


def test_shards_add_up(tmp_path: Path) -> None:
    write_model(tmp_path / "m.safetensors")
    ds = xckpt.open(tmp_path / "m.safetensors")
    (tmp_path / "shards").mkdir()
    ds.ckpt.save(tmp_path / "shards" / "model.safetensors", max_shard_size=9000)
    footprint = xckpt.open(tmp_path / "shards").ckpt.footprint()
    files = (tmp_path / "shards").glob("*.safetensors")
    assert footprint["file_nbytes"] == sum(file.stat().st_size for file in files)


class TestExperts:
    @pytest.mark.parametrize(
        "config",
        [
            CONFIG,
            {"text_config": {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}},
            {"num_local_experts": EXPERTS, "experts_per_token": CHOSEN},
            {"ffn_config": {"moe_num_experts": EXPERTS, "moe_top_k": CHOSEN}},
        ],
    )
    def test_active_parameters_follow_from_the_config(self, config: Any, tmp_path: Path) -> None:
        footprint = xckpt.open(write_mixture(tmp_path, config)).ckpt.footprint()
        assert footprint["parameters"] == ALL
        assert footprint["active_parameters"] == ACTIVE
        assert footprint["experts"] == EXPERTS
        assert footprint["experts_per_token"] == CHOSEN

    @pytest.mark.parametrize(
        "config",
        [
            None,
            {},
            {"num_experts": EXPERTS},
            {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS + 1},
            {"num_experts": EXPERTS - 1, "num_experts_per_tok": 1},
            {"num_experts": float(EXPERTS), "num_experts_per_tok": True},
            {"num_experts": 10**30, "num_experts_per_tok": 10**29},
        ],
    )
    def test_nothing_is_guessed_without_fitting_numbers(self, config: Any, tmp_path: Path) -> None:
        footprint = xckpt.open(write_mixture(tmp_path, config)).ckpt.footprint()
        assert footprint["parameters"] == ALL
        assert "active_parameters" not in footprint

    def test_a_config_that_is_not_json_is_ignored_with_a_warning(self, tmp_path: Path) -> None:
        ds = xckpt.open(write_mixture(tmp_path, "{"))
        with pytest.warns(CheckpointWarning, match=r"config\.json is ignored"):
            assert "active_parameters" not in ds.ckpt.footprint()

    def test_fused_experts_of_gguf(self, tmp_path: Path) -> None:
        attrs = {
            "general.architecture": text("qwen3moe"),
            "qwen3moe.expert_count": struct.pack("<II", 4, EXPERTS),
            "qwen3moe.expert_used_count": struct.pack("<II", 4, CHOSEN),
        }
        # Extents of GGUF begin with the fastest one. Type 8 is Q8_0: 34 bytes for 32 elements.
        dense, experts = 32 * 16, 32 * 4 * EXPERTS
        tensors = [
            ("token_embd.weight", (32, 16), 0, 0),
            ("blk.0.ffn_up_exps.weight", (32, 4, EXPERTS), 8, 4 * dense),
        ]
        data = bytes(4 * dense + experts // 32 * 34)
        (tmp_path / "m.gguf").write_bytes(gguf_file(attrs, tensors, data))
        footprint = xckpt.open(tmp_path / "m.gguf").ckpt.footprint()
        assert footprint["active_parameters"] == dense + experts * CHOSEN // EXPERTS
        assert footprint["scheme_bits"].sel(scheme="q8_0") == 8.5


class TestQuantizedModels:
    @pytest.mark.parametrize(
        ("model", "scheme"),
        [
            ("gptq_4bit_v1_sym", "gptq 4-bit, group 32"),
            ("awq_gemm_group32", "awq 4-bit, group 32"),
            ("bnb_nf4_nested", "bitsandbytes 4-bit, group 64"),
            ("fp8_block_deepseek_shards", "fp8 float8_e4m3fn, blocks of 128x128"),
            ("fp8_tensor_scalar", "fp8 float8_e4m3fn, per tensor"),
            ("ct_pack_int4_channel_asym", "compressed-tensors 4-bit, per channel"),
            ("mlx_6bit", "mlx 6-bit, group 64"),
            ("fp8_names_only_config_without", "float8_e4m3fn, blocks of 128x128"),
        ],
    )
    @pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
    def test_schemes_and_the_unquantised_rest_are_listed(self, model: str, scheme: str) -> None:
        path = GOLDEN / "hf-quantized" / model
        ds = xckpt.open(path)
        footprint = ds.ckpt.footprint()
        parameters = footprint["scheme_parameters"].to_series().to_dict()
        assert scheme in parameters
        plain = sum(n for name, n in parameters.items() if name in {"bfloat16", "float16"})
        assert 0 < plain < footprint["parameters"] == sum(parameters.values())
        assert scheme in repr(ds.ckpt)
        assert scheme in repr(xckpt.read_index(path))
        assert "float32" not in parameters
        stacked = xckpt.open(path, stack=True).ckpt.footprint()
        assert stacked["scheme_parameters"].to_series().to_dict() == parameters


class TestSummary:
    LINE = "parameters as float32 4.0 MiB, bfloat16 2.0 MiB, int8 1.1 MiB, int4 576.0 KiB"

    def test_a_large_model_has_one_line(self, tmp_path: Path, capsys: Any) -> None:
        xckpt.save({"w": zeros(1024, 1024)}, tmp_path / "m.safetensors")
        ds = xckpt.open(tmp_path / "m.safetensors")
        assert ds.ckpt.footprint().attrs["footprint"] == self.LINE
        assert repr(ds.ckpt).count(self.LINE) == 1
        assert ds.ckpt._repr_html_().count(self.LINE) == 1
        assert main(["info", str(tmp_path / "m.safetensors")]) == 0
        assert capsys.readouterr().out.count(self.LINE) == 1

    def test_info_as_json_has_all_sizes(self, tmp_path: Path, capsys: Any) -> None:
        path = write_mixture(tmp_path, CONFIG)
        assert main(["info", "--json", str(path)]) == 0
        footprint = json.loads(capsys.readouterr().out)["footprint"]
        assert footprint["parameters"] == ALL
        assert footprint["active_parameters"] == ACTIVE
        assert footprint["experts"] == {"chosen": CHOSEN, "total": EXPERTS}
        assert footprint["precisions"]["bfloat16"] == 2 * ALL
        assert footprint["schemes"]["float32"]["nbytes"] == 4 * ALL


def test_a_footprint_shows_its_sizes(tmp_path: Path) -> None:
    rows = {f"layers.{n}.w": np.ones((64, 64), "f4") for n in range(4)}
    xckpt.save(rows | {"bn.running_mean": np.ones(64, "f4")}, tmp_path / "m.npz")
    footprint = xckpt.open(tmp_path / "m.npz").ckpt.footprint()
    text = repr(footprint.ckpt)
    assert text.startswith("<Footprint of m.npz>  16.4 K parameters · 64.3 KiB of tensors · ")
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}
    assert lines["bfloat16"] == ["16", "32.0", "KiB", "██████"]
    assert lines["buffers"][:2] == ["1", "64"]
    assert "bfloat16" in footprint.ckpt._repr_html_()
    assert "precision" not in repr(footprint[["parameters"]].ckpt).split(">")[0]
