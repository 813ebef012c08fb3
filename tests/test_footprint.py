"""The size of a model: as stored, on disk, in other precisions, and of a mixture's active part."""

from __future__ import annotations

import json
import re
import struct
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.cached_models import EMBEDDINGS, MODELS, decoder, nbytes
from tests.conftest import GOLDEN
from tests.documented import write_pickle
from tests.formats.gguf_files import gguf_file, listed, text
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

    @pytest.mark.parametrize(
        "model",
        [
            *("ct_mixed_precision", "gptq_dynamic_overrides", "mlx_mixed_modes"),  # mixed bits
            *("gptq_3bit_v1_asym", "gptq_p_5bit", "mlx_6bit", "mlx_names_only"),  # odd ones
            *("ct_config_in_text_config", "ct_pack_int3_padded", "ct_nvfp4", "ct_mxfp4"),
            *("awq_gemm_names_only", "bnb_nf4_nested", "mxfp4_gpt_oss", "modelopt_nvfp4"),
        ],
    )
    @pytest.mark.parametrize("decode", [True, False])
    @pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
    def test_packed_parameters_count_as_their_weights(self, model: str, *, decode: bool) -> None:
        path = GOLDEN / "hf-quantized" / model
        weights = json.loads((path / "expected.json").read_text())["tensors"]
        # Biases may be part of a layer with quantised weights.
        plain = sum(
            tensor.size
            for tensor in xckpt.read_index(path).tensors.values()
            if tensor.layout == "dense" and re.fullmatch(r".*[._](weight|bias|sinks)", tensor.name)
        )
        expected = sum(prod(weight["shape"]) for weight in weights.values())
        footprint = xckpt.open(path, decode=decode).ckpt.footprint()
        assert footprint["parameters"] == expected + plain


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


def in_memory(config: Any, tensors: Any = None) -> xr.Dataset:
    kind = (config or {}).get("model_type", "")
    embedding = EMBEDDINGS.get(kind, "model.embed_tokens.weight")
    ds: xr.Dataset = xckpt.open(tensors or {embedding: zeros(64, 32)})
    return ds.assign_attrs(config=config)


def gguf_with(path: Path, architecture: str, **keys: Any) -> Path:
    """Write a GGUF file with keys of an architecture: numbers, and lists of them."""
    attrs = {"general.architecture": text(architecture)}
    for key, value in keys.items():
        is_list = isinstance(value, list)
        numbers = [struct.pack("<I", number) for number in (value if is_list else [value])]
        data = listed(4, numbers) if is_list else struct.pack("<I", 4) + numbers[0]
        attrs[f"{architecture}.{key.replace('__', '.')}"] = data
    path.write_bytes(gguf_file(attrs, [("token_embd.weight", (32, 4), 0, 0)], bytes(512)))
    return path


class TestCache:
    """The state that a model keeps of its tokens."""

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize(("context", "batch"), [(100, 1), (8192, 4)])
    def test_published_configs(self, name: str, context: int, batch: int) -> None:
        model = MODELS[name]
        footprint = in_memory(model.config).ckpt.footprint(
            context=context, batch=batch, cache_dtype="float16"
        )
        assert footprint["cache_nbytes"].sum() == nbytes(model, context, batch)
        total = footprint["weights_nbytes"] + footprint["cache_nbytes"].sum()
        assert footprint["total_nbytes"] == total
        expected = footprint["precision_nbytes"] + footprint["cache_nbytes"].sum()
        assert footprint["precision_total"].equals(expected)

    def test_the_config_next_to_a_file_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        model = MODELS["Llama 3.1 8B"]
        xckpt.save({"model.embed_tokens.weight": zeros(64, 32)}, path)
        (tmp_path / "config.json").write_text(json.dumps(model.config))
        for footprint in (
            xckpt.footprint(path, context=100),
            xckpt.footprint(tmp_path, context=100),
            xckpt.open(path).ckpt.footprint(context=100),
        ):
            assert footprint["cache_nbytes"].sum() == nbytes(model, 100, 1)
            assert footprint.attrs["cache_dtype"] == "bfloat16"
        assert "cache_nbytes" not in xckpt.footprint(path)

    def test_types_of_the_cache(self) -> None:
        ds = in_memory(MODELS["Jamba v0.1"].config)
        model = MODELS["Jamba v0.1"]
        for dtype, itemsize in {"fp8_e4m3": 1, "bf16": 2, "float32": 4}.items():
            footprint = ds.ckpt.footprint(context=64, cache_dtype=dtype)
            assert footprint["cache_nbytes"].sum() == nbytes(model, 64, 1, itemsize)
        llama = in_memory(MODELS["Llama 2 7B"].config)
        sizes = [
            int(llama.ckpt.footprint(context=64, cache_dtype=dtype)["cache_nbytes"].sum())
            for dtype in ("float32", "int8", "int4")
        ]
        assert sizes == [sizes[0], sizes[0] * 8.5 / 32, sizes[0] * 4.5 / 32]

    def test_widths_that_the_config_leaves_out_are_those_of_the_tensors(self) -> None:
        config = decoder("gemma3_text", 64, 2, 4, 96, sliding_window=8)
        del config["num_attention_heads"]
        tensors = {"model.embed_tokens.weight": zeros(32000, 64), "model.norm.weight": zeros(64)}
        for n in range(2):
            block = f"model.layers.{n}"
            shapes = {"q": (96, 64), "k": (48, 64), "v": (48, 64), "o": (64, 96)}
            for key, shape in shapes.items():
                tensors[f"{block}.self_attn.{key}_proj.weight"] = zeros(*shape)
            for key, shape in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
                tensors[f"{block}.mlp.{key}_proj.weight"] = zeros(*shape)
            norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
            tensors |= {f"{block}.{norm}_layernorm.weight": zeros(64) for norm in norms}
        ds = in_memory(config, tensors)
        footprint = ds.ckpt.footprint(context=100)
        assert footprint["cache_elements"].to_series().to_dict() == {"sliding window": 2 * 96 * 8}

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (None, "no config states the sizes"),
            ({}, "no model_type"),
            ({"model_type": "llama"}, "number of layers"),
            (decoder("gemma3_text", 64, 2, 4, 96), "heads of keys and values"),
            (decoder("new", 64, 2, 4, 96, num_key_value_heads=2, sliding_window=8), "the window"),
            (decoder("new", 64, 2, 4, 96, mamba_d_state=2), "layers that have attention"),
            (decoder("new", 64, 2, 4, 96, layer_types=["full_attention", "odd"]), "kind 'odd'"),
            (decoder("new", 64, 2, 4, 96, layer_types=["full_attention"]), "kinds of 1 of 2"),
            (decoder("new", 65, 2, 4, 96, num_key_value_heads=2), "size of a head"),
            (decoder("mamba", 64, 2, 4, 96), "sizes of the recurrent layers"),
            (decoder("bert", 64, 2, 4, 96, architectures=["BertModel"]), "BertModel"),
            (decoder("t5", 64, 2, 4, 96, is_encoder_decoder=True), "encoder"),
            (decoder("llama", 64, 10**30, 4, 96), "number of layers"),
            (decoder("llama", 64, 2.0, 4, 96), "number of layers"),
            (decoder("llama", 64, 2, 4.0, 96), "heads of keys and values"),
            (decoder("jamba", 64, 2, 4, 96, attn_layer_period=-1, mamba_d_conv=1), "attention"),
            (decoder("llama", 64, 2, [4], 96, num_key_value_heads=[4]), "heads"),
        ],
    )
    def test_what_the_config_does_not_state_is_unknown(self, config: Any, reason: str) -> None:
        footprint = in_memory(config).ckpt.footprint(context=100, fits="24GiB")
        assert re.search(reason, footprint.attrs["unknown"])
        assert not {"cache_nbytes", "total_nbytes", "precision_total"} & set(footprint)
        assert footprint["fits"] == "unknown"
        assert footprint.attrs["unknown"] in repr(footprint.ckpt)
        assert in_memory(config).ckpt.footprint(context=100, fits=1)["fits"] == "no"

    def test_the_config_of_another_model(self) -> None:
        config = decoder("llama", 64, 2, 4, 96)
        tensors = {f"encoder.{n}.conv_{k}.kernel": zeros(4, 4) for n in range(9) for k in "ab"}
        footprint = in_memory(config, tensors).ckpt.footprint(context=9)
        assert "another model" in footprint.attrs["unknown"]

    @pytest.mark.parametrize(
        ("architecture", "keys", "elements"),
        [
            ("llama", {"attention__head_count_kv": 2}, 4 * 2 * 2 * 8 * 100),
            ("gemma2", {"attention__head_count_kv": 2, "attention__sliding_window": 10},
             2 * 2 * 2 * 8 * (100 + 10)),
            ("gemma3", {"attention__head_count_kv": 1, "attention__key_length": 16,
                        "attention__value_length": 12, "attention__sliding_window": 10},
             4 * (16 + 12) * 10),
            ("deepseek2", {"attention__head_count_kv": 1, "attention__kv_lora_rank": 20,
                           "attention__key_length_mla": 9, "rope__dimension_count": 6},
             4 * (20 + 6) * 100),
            ("deepseek2", {"attention__head_count_kv": 4, "attention__kv_lora_rank": 20,
                           "attention__key_length": 9, "attention__value_length": 7},
             4 * 4 * (9 + 7) * 100),
            ("jamba", {"attention__head_count_kv": [0, 0, 2, 0], "ssm__conv_kernel": 4,
                       "ssm__inner_size": 64, "ssm__state_size": 16},
             2 * 2 * 8 * 100 + 3 * (3 * 64 + 16 * 64)),
            ("granitehybrid", {"attention__head_count_kv": [0, 2, 0, 0], "ssm__conv_kernel": 4,
                               "ssm__inner_size": 64, "ssm__state_size": 16,
                               "ssm__group_count": 1},
             2 * 2 * 8 * 100 + 3 * (3 * (64 + 32) + 16 * 64)),
            ("mamba", {"ssm__conv_kernel": 4, "ssm__inner_size": 64, "ssm__state_size": 16},
             4 * (3 * 64 + 16 * 64)),
            ("lfm2", {"attention__head_count_kv": [0, 0, 2, 0], "shortconv__l_cache": 3},
             2 * 2 * 8 * 100 + 3 * 2 * 32),
        ],
    )  # fmt: skip
    def test_keys_of_gguf(
        self, architecture: str, keys: Any, elements: int, tmp_path: Path
    ) -> None:
        sizes = {"block_count": 4, "embedding_length": 32, "attention__head_count": 4}
        path = gguf_with(tmp_path / "m.gguf", architecture, **sizes, **keys)
        footprint = xckpt.footprint(path, context=100)
        assert footprint["cache_elements"].sum() == elements
        assert footprint.attrs["cache_dtype"] == "float16"

    def test_an_encoder_in_gguf_is_unknown(self, tmp_path: Path) -> None:
        path = gguf_with(tmp_path / "m.gguf", "nomic-bert", block_count=2)
        assert "nomic-bert" in xckpt.footprint(path, context=9).attrs["unknown"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"context": 0}, "context must be a number from 1"),
            ({"context": True}, "context must be"),
            ({"context": 8, "batch": -1}, "batch must be"),
            ({"context": 8, "cache_dtype": "float17"}, "not an element type"),
            ({"fits": "much"}, "fits must be"),
        ],
    )
    def test_invalid_options(self, options: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            in_memory(MODELS["gpt2"].config).ckpt.footprint(**options)


class TestFitting:
    """Whether a model fits into memory."""

    def test_weights_and_cache_have_to_fit(self, tmp_path: Path, capsys: Any) -> None:
        path = tmp_path / "model.safetensors"
        name = "model.embed_tokens.weight"
        moment = f"optimizer.state.{name}.exp_avg"
        xckpt.save({name: zeros(1024, 256), moment: zeros(1024, 256)}, path)
        (tmp_path / "config.json").write_text(json.dumps(decoder("llama", 64, 2, 4, 96)))
        cache = 2 * 2 * 64 * 1024 * 2
        options = ["--context", "512", "--batch", "2", "--fits", str(2**20 + cache)]
        assert main(["footprint", str(path), *options]) == 0
        out = capsys.readouterr().out
        assert "weights and cache as stored take 1.5 MiB" in out
        assert "fits 1.5 MiB" in out
        options[-1] = str(2**20 + cache - 1)
        assert main(["footprint", "--json", str(path), *options]) == 1
        document = json.loads(capsys.readouterr().out)
        assert document["fits"] == "no"
        assert document["precision_fits"]["bfloat16"] == "yes"
        assert document["cache_nbytes"] == {"full attention": cache}
        assert document["total_nbytes"] == 2**20 + cache

    def test_weights_alone(self, tmp_path: Path, capsys: Any) -> None:
        xckpt.save({"w": zeros(1024)}, tmp_path / "m.npz")
        assert main(["footprint", str(tmp_path / "m.npz"), "--fits", "4KiB"]) == 0
        out = capsys.readouterr().out
        assert "fits 4KiB" in out
        assert "without cache, activations" in out
        assert main(["footprint", str(tmp_path / "m.npz"), "--fits", "4095B"]) == 1

    def test_an_unknown_cache_is_no_result(self, tmp_path: Path, capsys: Any) -> None:
        xckpt.save({"w": zeros(1024)}, tmp_path / "m.npz")
        options = ["--context", "9", "--fits", "1GiB"]
        assert main(["footprint", str(tmp_path / "m.npz"), *options]) == 2
        assert "unknown" in capsys.readouterr().out
