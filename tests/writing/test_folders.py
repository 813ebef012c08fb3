"""A folder as the target of `save` and `convert`: the file, its shards, and what describes it."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.cli import main
from xckpt.errors import CheckpointWarning

CONFIG = {"model_type": "llama", "torch_dtype": "float32", "auto_map": {"AutoModel": "modeling.X"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    tensors = {f"layers.{n}.w": np.full((8, 8), 1.0 + n, np.float32) for n in range(3)}
    xckpt.save(tensors, "base/model.safetensors")
    Path("base/config.json").write_text(json.dumps(CONFIG))
    Path("base/tokenizer.json").write_text("{}")
    Path("base/modeling.py").write_text("raise SystemExit")


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def config(folder: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    return document


@pytest.mark.parametrize(
    "write",
    [
        lambda: xckpt.convert("base", "out/"),
        lambda: xckpt.convert("base/model.safetensors", dst="out/"),
        lambda: xckpt.open("base").ckpt.save("out/"),
        lambda: xckpt.save(xckpt.open("base"), Path("out")),
        lambda: main(["convert", "base", "out/"]),
    ],
    ids=["convert", "convert a file", "save", "save into an existing folder", "command"],
)
def test_a_folder_gets_one_file_and_what_describes_it_without_code(
    write: Any, request: pytest.FixtureRequest
) -> None:
    if "existing" in request.node.name:
        Path("out").mkdir()
    write()
    assert names("out") == ["config.json", "model.safetensors", "tokenizer.json"]
    assert "auto_map" not in config("out")
    assert xckpt.manifest("out") == xckpt.manifest("base")


def test_shards_have_an_index_and_the_configuration_the_new_dtype() -> None:
    xckpt.convert("base", "out/", max_shard_size=300, dtype="float16")
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert [n for n in names("out") if n.startswith("model")] == [
        *shards,
        "model.safetensors.index.json",
    ]
    assert config("out")["torch_dtype"] == "float16"
    assert xckpt.compare("base", "out").ckpt.table()["status"].tolist() == ["same"] * 3


def test_decoded_weights_have_no_configuration_of_quantisation() -> None:
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    Path("base/config.json").write_text(json.dumps(CONFIG | quantised))
    codes = np.eye(8, dtype=ml_dtypes.float8_e4m3fn)
    tensors = {"layers.0.weight": codes, "layers.0.weight_scale_inv": np.full((1, 1), 2, "f4")}
    xckpt.save(tensors, "base/model.safetensors", overwrite=True)
    xckpt.convert("base", "same/")
    assert "quantization_config" in config("same")
    xckpt.convert("base", "out/", encoding={"*": {"layout": "dense"}})
    assert list(xckpt.open("out")) == ["layers.0.weight"]
    assert "quantization_config" not in config("out")


def test_a_selection_is_no_whole_model_and_an_error_leaves_no_folder() -> None:
    with pytest.warns(CheckpointWarning, match=r"lacks 2 of its 3 tensors.*'config\.json'"):
        xckpt.convert("base", "part/", tensors="layers.0.*")
    assert names("part") == ["model.safetensors"]
    with pytest.raises(ValueError, match="matches none of the 3 tensors"):
        xckpt.convert("base", "out/", tensors="gone")
    assert not Path("out").exists()
    xckpt.convert("base", "out/")
    with pytest.raises(FileExistsError):
        xckpt.convert("base", "out/")


@pytest.mark.parametrize("name", ["out", "out/31"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_name_without_an_ending_is_a_folder(kind: Any, name: str) -> None:
    xckpt.open("base").ckpt.save(kind(name))
    xckpt.convert("base", kind(f"{name}-2"))
    assert main(["convert", "base", f"{name}-3"]) == 0
    for folder in (name, f"{name}-2", f"{name}-3"):
        assert "config.json" in names(folder)
    xckpt.open("base").ckpt.save(kind("file"), engine="safetensors")
    assert Path("file").is_file()


@pytest.mark.parametrize("name", ["llama-3.1", "out/7b.v2"])
def test_a_name_with_an_unknown_ending_may_be_a_folder(name: str) -> None:
    with pytest.raises(ValueError, match=rf"a folder as target ends in a slash: '{name}/'"):
        xckpt.open("base").ckpt.save(Path(name))
    xckpt.open("base").ckpt.save(f"{name}/")
    assert "config.json" in names(name)


def test_a_refused_overwrite_warns_of_nothing() -> None:
    xckpt.convert("base", "out/", max_shard_size=300)
    before = names("out")
    with pytest.raises(FileExistsError, match="overwrite=True replaces it"):
        (xckpt.open("base") + 1).ckpt.save("out/", max_shard_size=600)
    assert names("out") == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
def test_shards_of_another_model_are_refused(
    has_index: bool, overwrite: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    xckpt.convert("base", "out/", max_shard_size=300)
    if not has_index:
        Path("out/model.safetensors.index.json").unlink()
    before = names("out")
    changed = xckpt.open("base") + 1
    text = r"model-00001-of-00003\.safetensors.*another folder.*remove them only once .*complete"
    with pytest.raises(ValueError, match=text):
        changed.ckpt.save("out/", overwrite=overwrite)
    assert main(["convert", "base", "out", *(["--overwrite"] if overwrite else [])]) == 2
    assert "model-00001-of-00003.safetensors" in capsys.readouterr().err
    assert names("out") == before


# --- results --------------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 4,
    "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    **{f"self_attn.{name}_proj": (8, 8) for name in "qkvo"},
    **{f"mlp.{name}_proj": (16, 8) for name in ("gate", "up")},
    "mlp.down_proj": (8, 16), "input_layernorm": (8,), "post_attention_layernorm": (8,),
}  # fmt: skip
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
NORM = "model.norm.weight"


def llama(seed: int, layers: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes: dict[str, Any] = {HEAD: (32, 8), TABLE: (32, 8), "model.norm.weight": (8,)}
    for n in range(layers):
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in SHAPES.items()}
    return {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def write_model(folder: str, seed: int, **config: Any) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    xckpt.save(llama(seed), f"{folder}/model.safetensors")
    Path(folder, "config.json").write_text(json.dumps(LLAMA | config))
    Path(folder, "tokenizer.json").write_text("{}")
    Path(folder, "generation_config.json").write_text("{}")


@pytest.fixture
def models() -> None:
    for seed, name in enumerate(("a", "b", "run/checkpoint-1", "run/checkpoint-2")):
        write_model(name, seed)
    for name in ("lora", "lora-2"):
        factors: dict[str, Any] = {}
        for n in range(3):
            module = f"base_model.model.model.layers.{n}.self_attn.q_proj"
            factors |= {f"{module}.lora_A.weight": np.ones((2, 8), "f4")}
            factors |= {f"{module}.lora_B.weight": np.ones((8, 2), "f4")}
        Path(name).mkdir()
        xckpt.save(factors, f"{name}/adapter_model.safetensors")
        adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
        Path(name, "adapter_config.json").write_text(json.dumps(adapter))


def both() -> tuple[xr.Dataset, xr.Dataset]:
    return xckpt.open("a"), xckpt.open("b")


def total() -> xr.Dataset:
    a, b = both()
    return a + b


def saved_and_opened(ds: xr.Dataset, path: str) -> xr.Dataset:
    Path("other").mkdir()
    ds.ckpt.save(f"other/{path}")
    return xckpt.open(f"other/{path}")


def grown(weight: xr.DataArray, count: int) -> xr.DataArray:
    row = weight.mean("vocab").expand_dims(vocab=count)
    return xr.concat([weight, row], "vocab").transpose(*weight.dims)


def with_layers(numbers: list[int]) -> xr.Dataset:
    """Return the model with these layers in this order, numbered from 0 on."""
    ds = xckpt.open("a")
    variables = {name: ds[name] for name in (HEAD, TABLE, "model.norm.weight")}
    for new, old in enumerate(numbers):
        for name in SHAPES:
            old_name = f"model.layers.{old}.{name}.weight"
            variables[f"model.layers.{new}.{name}.weight"] = ds[old_name]
    return ds.drop_vars(list(ds)).assign(variables)


RESULTS: dict[str, Any] = {
    "mean": lambda: total() / 2,
    "weights": lambda: 0.3 * both()[0] + 0.7 * both()[1],
    "mean of concat": lambda: xr.concat(both(), "model").mean("model"),
    "task vector": lambda: both()[0].ckpt.merge(both()[1] - both()[0], scale=0.5),
    "adapter": lambda: xckpt.open("a").ckpt.merge("lora"),
    "adapter and mean": lambda: (total() / 2).ckpt.merge("lora"),
    "step": lambda: xckpt.open_steps("run").sel(step=2),
    "mean of steps": lambda: xckpt.open_steps("run").mean("step"),
    "assigned": lambda: both()[0].assign(both()[1].ckpt.find("*.mlp.*").data_vars),
    "function": lambda: both()[0].map(lambda tensor: tensor * 2),
    "loaded": lambda: xckpt.open("a").load(),
    "stacked": lambda: xckpt.open("a", stack=True) * 2,
    "pickled": lambda: pickle.loads(pickle.dumps(total())),
    "of merge": lambda: xr.merge([both()[0]]),
}


CERTAIN: dict[str, tuple[Any, dict[str, int]]] = {
    "fewer layers": (lambda: with_layers([0, 2]), {"num_hidden_layers": 2}),
    "more layers": (lambda: with_layers([0, 1, 1, 2]), {"num_hidden_layers": 4}),
    "more tokens": (
        lambda: both()[0].drop_vars([HEAD, TABLE]).assign(
            {name: grown(both()[0][name], 4) for name in (HEAD, TABLE)}
        ),
        {"vocab_size": 36},
    ),
    "narrower": (lambda: both()[0].isel(ff=slice(12)), {"intermediate_size": 12}),
}  # fmt: skip


PROBLEMS: dict[str, tuple[Any, str]] = {
    "layers with gaps": (
        lambda: both()[0].drop_vars(
            [name for name in both()[0] if ".layers.1." in str(name)]
        ),
        r"num_hidden_layers 3: the tensors have layers 0, 2",
    ),
    "one table grown": (
        lambda: both()[0].drop_vars(HEAD).assign(
            {HEAD: grown(both()[0][HEAD], 4).rename(vocab="rows")}
        ),
        r"vocab_size 32: the tensors have 32 and 36",
    ),
    "fewer heads": (
        lambda: both()[0].isel({"head*key": slice(4), "head*value": slice(4)}),
        r"num_attention_heads 2 and head_dim 4: the tensors have 4 instead of 8",
    ),
    "fewer heads of keys": (
        lambda: both()[0].isel({"head_kv*key": slice(4), "head_kv*value": slice(4)}),
        r"num_key_value_heads 2 and head_dim 4: the tensors have 4 instead of 8",
    ),
    "narrower everywhere": (
        lambda: both()[0].isel(embd=slice(4)), r"hidden_size 8: the tensors have 4",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("models")
class TestResults:
    """A result has the files that describe its sources, as far as they hold for its tensors."""

    @pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
    def test_a_result_that_the_config_fits_has_it(self, make: Any) -> None:
        make().ckpt.save("out/")
        described = ["config.json", "generation_config.json", "model.safetensors"]
        assert names("out") == [*described, "tokenizer.json"]
        assert config("out") == LLAMA
        assert xckpt.open("out").ckpt.structure().index.size == len(llama(0))

    @pytest.mark.filterwarnings("ignore:.*not the mean of their updates")
    @pytest.mark.parametrize("shards", [{}, {"max_shard_size": "1kB"}])
    def test_adapters_have_their_config_and_name(self, shards: dict[str, Any]) -> None:
        mean = (xckpt.open("lora") + xckpt.open("lora-2")) / 2
        mean.ckpt.save("out/", **shards)
        assert "adapter_config.json" in names("out")
        assert names("out")[1].startswith("adapter_model")
        assert len(xckpt.open("out").ckpt.adapters()) == 3
        xckpt.open("a").ckpt.merge("out").ckpt.save("merged/")
        assert "adapter_config.json" not in names("merged")

    @pytest.mark.parametrize(
        "make",
        [
            lambda: xckpt.open("lora/").compute(),
            lambda: xckpt.open("lora").load(),
            lambda: saved_and_opened(xckpt.open("lora"), "lora.zt"),
            lambda: saved_and_opened(xckpt.open("lora"), "lora.zt").compute(),
        ],
        ids=["computed", "loaded", "zt", "zt in memory"],
    )
    @pytest.mark.filterwarnings("ignore:.*from the attributes")
    def test_a_config_of_an_adapter_names_the_file(self, make: Any) -> None:
        make().ckpt.save("out/")
        assert names("out") == ["adapter_config.json", "adapter_model.safetensors"]

    def test_a_model_of_diffusers_in_memory_keeps_its_name(self) -> None:
        Path("a/model.safetensors").rename("a/diffusion_pytorch_model.safetensors")
        xckpt.open("a").compute().ckpt.save("out/")
        assert "diffusion_pytorch_model.safetensors" in names("out")

    def test_updates_are_no_adapter(self) -> None:
        xckpt.open("lora").ckpt.updates().ckpt.save("out/")
        assert names("out") == ["model.safetensors"]

    @pytest.mark.parametrize(("make", "sizes"), CERTAIN.values(), ids=CERTAIN)
    def test_sizes_that_the_tensors_determine_are_corrected(self, make: Any, sizes: Any) -> None:
        ((key, value),) = sizes.items()
        with pytest.warns(CheckpointWarning, match=rf"{key}: {value} \(was {LLAMA[key]}\)"):
            make().ckpt.save("out/")
        assert config("out") == LLAMA | sizes
        assert "tokenizer.json" in names("out")

    @pytest.mark.parametrize("of_encoder", ["num_layers", "encoder_layers"])
    @pytest.mark.parametrize("counts", [(2, 3), (3, 3)])
    def test_encoder_and_decoder_have_their_own_numbers_of_layers(
        self, of_encoder: str, counts: tuple[int, int]
    ) -> None:
        of_model = {"num_layers": counts[0], "num_decoder_layers": counts[1]}
        stated = of_model | {of_encoder: counts[0]}
        tensors = {
            f"{side}.block.{n}.layer.0.SelfAttention.{p}.weight": np.ones((8, 8), "f4")
            for side, count in zip(("encoder", "decoder"), counts, strict=True)
            for n in range(count)
            for p in "qkvo"
        }
        Path("t5").mkdir()
        xckpt.save(tensors, "t5/model.safetensors")
        Path("t5/config.json").write_text(json.dumps({"model_type": "t5", "d_model": 8, **stated}))
        ds = xckpt.open("t5")
        for side, key in (("encoder", of_encoder), ("decoder", "num_decoder_layers")):
            last = stated[key] - 1
            shorter = ds.drop_vars([n for n in ds if str(n).startswith(f"{side}.block.{last}.")])
            with pytest.warns(CheckpointWarning, match=rf"'{key}: {last} \(was {last + 1}\)'"):
                shorter.ckpt.save(f"{side}/")
            assert config(side) == config("t5") | {key: last}

    def test_kinds_of_layers_are_as_many_as_layers(self) -> None:
        for kinds in (["full"] * 3, ["full", "sliding", "full"]):
            Path("a/config.json").write_text(json.dumps(LLAMA | {"layer_types": kinds}))
            with pytest.warns(CheckpointWarning, match="num_hidden_layers"):
                with_layers([0, 1]).ckpt.save(f"out-{len(set(kinds))}/")
        assert config("out-1")["layer_types"] == ["full"] * 2
        assert config("out-2")["layer_types"] == ["full", "sliding"]

    @pytest.mark.parametrize(
        "move",
        [
            lambda: xckpt.open("a", stack=True).isel(layers=[1, 0, 2]),
            lambda: (xckpt.open("a", stack=True) * 2).isel(layers=[1, 0, 2]),
            lambda: with_layers([1, 0, 2]),
            lambda: with_layers([1, 0, 2]) * 2,
            lambda: xckpt.open("a", stack=True).roll(layers=-1).isel(layers=[0, 2, 1]),
            lambda: xckpt.open("a", stack=True).isel(layers=[1, 0, 2]).compute(),
            lambda: xckpt.open("a", stack=True).load().isel(layers=[1, 0, 2]),
            lambda: with_layers([1, 0, 2]).persist(),
            lambda: xr.concat(
                [xckpt.open("a", stack=True).isel(layers=numbers) for numbers in ([1], [0, 2])],
                "layers",
                data_vars="minimal",
                coords="minimal",
                compat="override",
            ),
        ],
        ids=[
            "stacked",
            "stacked and scaled",
            "renamed",
            "scaled",
            "rolled",
            "computed",
            "loaded",
            "persisted",
            "concatenated",
        ],
    )
    def test_layers_that_move_between_kinds_take_theirs_along(self, move: Any) -> None:
        kinds = ["full", "sliding", "full"]
        Path("a/config.json").write_text(json.dumps(LLAMA | {"layer_types": kinds}))
        text = "new values.*'layer_types: values of the layers that the tensors come from'"
        ds = move()
        ds = ds.assign_coords(layers=range(3)) if "layers" in ds.dims else ds
        with pytest.warns(CheckpointWarning, match=text):
            ds.ckpt.save("out/")
        assert config("out") == LLAMA | {"layer_types": ["sliding", "full", "full"]}
        with_layers([2, 1, 0]).ckpt.save("same/")  # of equal kinds
        with_layers([2, 1, 0]).compute().ckpt.save("in-memory/")
        assert config("in-memory")["layer_types"] == kinds
        a, b = (xckpt.open(name, stack=True) for name in "ab")
        ((a + b) / 2).ckpt.save("mean/")
        edited = LLAMA | {"layer_types": ["full", "full", "sliding"]}
        ds.assign_attrs(config=edited).ckpt.save("edited/")
        assert "config.json" in names("same")
        assert "config.json" in names("mean")
        assert config("edited") == edited

    @pytest.mark.parametrize("chosen", [[0, 2], [1, 2], [2, 0], [0, 1, 1, 2], [0, 1, 0, 2, 1]])
    @pytest.mark.parametrize("is_nested", [False, True])
    @pytest.mark.parametrize(
        "make",
        [
            with_layers,
            lambda chosen: with_layers(chosen) * 2,
            lambda chosen: with_layers(chosen).compute(),
            lambda chosen: xckpt.open("a", stack=True).isel(layers=chosen),
            lambda chosen: xckpt.open("a", stack=True).isel(layers=chosen) / 2,
        ],
        ids=["renamed", "scaled", "in memory", "stacked", "stacked and scaled"],
    )
    def test_chosen_layers_have_their_values(
        self, make: Any, chosen: list[int], is_nested: bool
    ) -> None:
        by_layer: dict[str, list[Any]] = {
            "layer_types": ["x", "y", "z"],
            "no_rope_layers": [1, 1, 0],
        }

        def stated(layers: list[int]) -> dict[str, Any]:
            lists = {key: [values[n] for n in layers] for key, values in by_layer.items()}
            new = LLAMA | lists | {"num_hidden_layers": len(layers)}
            return {"model_type": "gemma3", "text_config": new} if is_nested else new

        Path("a/config.json").write_text(json.dumps(stated([0, 1, 2])))
        ds = make(chosen)
        if "layers" in ds.dims:
            ds = ds.assign_coords(layers=range(len(chosen)))
        with pytest.warns(CheckpointWarning, match="'(text_config.)?layer_types: values of"):
            ds.ckpt.save("out/")
        assert config("out") == stated(chosen)

    def test_values_of_layers_follow_beside_other_edits(self) -> None:
        stated = LLAMA | {"layer_types": ["x", "y", "z"]}
        new = {"layer_types": ["x", "z"], "num_hidden_layers": 2, "rope_theta": 5e5}
        Path("a/config.json").write_text(json.dumps(stated))
        ds = with_layers([0, 2])
        edited = stated | {"rope_theta": 5e5}
        for n, edit in enumerate((edited, edited | {"num_hidden_layers": 2})):
            with pytest.warns(CheckpointWarning, match="layer_types: values of"):
                ds.assign_attrs(config=edit).ckpt.save(f"{n}/")
            assert config(str(n)) == stated | new
            assert ds.attrs["config"]["layer_types"] == ["x", "y", "z"]

    @pytest.mark.parametrize("is_same", [True, False])
    @pytest.mark.parametrize("how", ["renamed", "scaled", "concatenated"])
    def test_layers_of_two_models_of_one_config_have_its_values(
        self, how: str, is_same: bool
    ) -> None:
        for name, last in {"a": "z", "b": "z" if is_same else "x"}.items():
            stated = LLAMA | {"layer_types": ["x", "y", last]}
            Path(name, "config.json").write_text(json.dumps(stated))
        ds: Any
        if how == "concatenated":
            a, b = (xckpt.open(name, stack=True) for name in "ab")
            layers = [name for name in a if "layers" in a[name].dims]
            more = xr.concat([a[layers], b[layers].isel(layers=[1, 2])], "layers")
            ds = a.drop_vars([*layers, "layers"], errors="ignore")
            ds = ds.assign(more.assign_coords(layers=range(5)).data_vars)
        else:
            b = xckpt.open("b") * 2 if how == "scaled" else xckpt.open("b")
            ds = with_layers([0, 1, 2])
            for new, old in ((3, 1), (4, 2)):
                for name in SHAPES:
                    old_name = f"model.layers.{old}.{name}.weight"
                    ds[f"model.layers.{new}.{name}.weight"] = b[old_name]
        is_certain = is_same and how != "renamed"
        text = "layer_types: values of" if is_certain else "values of 'layer_types' .* not certain"
        with pytest.warns(CheckpointWarning, match=text):
            ds.ckpt.save("out/")
        assert ("config.json" in names("out")) is is_certain
        if is_certain:
            assert config("out")["layer_types"] == ["x", "y", "z", "y", "z"]

    def test_a_mean_of_layers_of_two_kinds_has_a_stated_one(self) -> None:
        stated = LLAMA | {"layer_types": ["full", "sliding", "full"]}
        Path("a/config.json").write_text(json.dumps(stated))
        a = with_layers([0, 1])
        last = {name: str(name).replace(".1.", ".2.") for name in a if ".1." in str(name)}
        mean = {name: (a[name] + xckpt.open("a")[last[name]]) / 2 for name in last}
        text = (
            "num_hidden_layers 3: the tensors have 2 layers, .*values of 'layer_types'.*not certain"
            r""" \(state num_hidden_layers and 'layer_types' in attrs\["config"\]\)"""
        )
        with pytest.warns(CheckpointWarning, match=text):
            a.assign(mean).ckpt.save("out/")
        assert "config.json" not in names("out")
        new = stated | {"num_hidden_layers": 2, "layer_types": ["full", "full"]}
        a.assign(mean).assign_attrs(config=new).ckpt.save("stated/")
        assert config("stated") == new

    def test_a_layer_of_parts_of_two_kinds_has_an_edited_one(self) -> None:
        stated = LLAMA | {"layer_types": ["full", "sliding", "full"]}
        Path("a/config.json").write_text(json.dumps(stated))
        a = xckpt.open("a")
        part = {n: a[str(n).replace(".0.", ".1.")] for n in a if ".0.self_attn" in str(n)}
        text = r"come from several layers.*edit 'layer_types' in attrs\[\"config\"\], or copy"
        with pytest.warns(CheckpointWarning, match=text):
            a.assign(part).ckpt.save("out/")
        assert "config.json" not in names("out")
        new = stated | {"layer_types": ["sliding", "sliding", "full"]}
        a.assign(part).assign_attrs(config=new).ckpt.save("edited/")
        assert config("edited") == new

    def test_layers_of_another_kind_lack_the_tensors_of_their_number(self) -> None:
        layer = "model.layers.{}.{}.weight".format
        kinds = ["linear", "linear", "full", "linear", "full"]
        modules = {"linear": "linear_attn.out_proj", "full": "self_attn.o_proj"}
        shapes: dict[str, tuple[int, ...]] = {
            layer(n, name): shape
            for n, kind in enumerate(kinds)
            for name, shape in {modules[kind]: (8, 8), "mlp.up_proj": (16, 8)}.items()
        }
        stated = {"model_type": "qwen3_next", "num_hidden_layers": 5, "layer_types": kinds}
        TestSizesOfParts.write(stated, shapes)
        ds = xckpt.open("base")

        def chosen(layers: list[int]) -> xr.Dataset:
            starts = {f"model.layers.{old}.": f"model.layers.{n}." for n, old in enumerate(layers)}
            new = {
                str(n).replace(old, starts[old]): ds[n]
                for old in starts
                for n in ds
                if old in str(n)
            }
            return ds.drop_vars(list(ds)).assign(new)

        with pytest.warns(CheckpointWarning) as caught:
            chosen([1, 2, 3, 4]).ckpt.save("out/")
        assert config("out") == stated | {"num_hidden_layers": 4, "layer_types": kinds[1:]}
        assert not any("lacks" in str(warning.message) for warning in caught)
        part = chosen([1, 2, 3, 4]).drop_vars(layer(0, "mlp.up_proj"))
        with pytest.warns(CheckpointWarning, match=r"lacks 1 of its 10.*layers\.0\.mlp\.up_proj"):
            part.ckpt.save("part/")

    def test_layers_of_other_widths_keep_them(self) -> None:
        widths = [16, 32, 16]
        stated = {"model_type": "openelm", "num_hidden_layers": 3, "intermediate_size": widths}
        layer = "model.layers.{}.mlp.up_proj.weight".format
        TestSizesOfParts.write(stated, {layer(n): (width, 8) for n, width in enumerate(widths)})
        ds = xckpt.open("base")
        cut = ds.drop_vars(list(ds)).assign({layer(n): ds[layer(n + 1)] for n in range(2)})
        for n, model in enumerate((cut, cut * 2)):
            with pytest.warns(CheckpointWarning, match="intermediate_size: values of"):
                model.ckpt.save(f"{n}/")
            assert config(str(n)) == stated | {
                "num_hidden_layers": 2,
                "intermediate_size": [32, 16],
            }

    def test_values_of_layers_in_attributes_follow(self) -> None:
        stated = LLAMA | {"layer_types": ["x", "y", "z"]}
        Path("a/config.json").write_text(json.dumps(stated))
        xckpt.open("a").ckpt.save("old.zt")
        a = xckpt.open("old.zt", stack=True)
        with pytest.warns(
            CheckpointWarning, match="attributes have new values.*layer_types: values"
        ):
            a.isel(layers=[0, 2]).assign_coords(layers=range(2)).ckpt.save("new.zt")
        new = stated | {"num_hidden_layers": 2, "layer_types": ["x", "z"]}
        assert xckpt.open("new.zt").attrs["config"] == new
        with pytest.warns(CheckpointWarning, match="layer_types: values"):
            a.isel(layers=[0, 2]).assign_coords(layers=range(2)).ckpt.save("out/")
        assert config("out") == new

    @pytest.mark.parametrize(("make", "text"), PROBLEMS.values(), ids=PROBLEMS)
    def test_a_config_that_does_not_fit_is_left_out(self, make: Any, text: str) -> None:
        with pytest.warns(CheckpointWarning, match=f"not copied from a/, as .*{text}"):
            make().ckpt.save("out/")
        assert names("out") == ["model.safetensors", "tokenizer.json"]

    def test_a_part_of_a_model_is_no_model(self) -> None:
        part = xckpt.open("a").ckpt.find("*.self_attn.*")
        with pytest.warns(CheckpointWarning, match=r"lacks 18 of its 30 tensors.*'config\.json'"):
            part.ckpt.save("out/")
        assert names("out") == ["model.safetensors"]
        new_head = xr.DataArray(np.ones((2, 8), "f4"), dims=("label", "embd"))
        other = xckpt.open("a").drop_vars(HEAD).assign({"score.weight": new_head})
        with pytest.warns(CheckpointWarning, match=r"lacks 1 of its 30 tensors: 'lm_head\.weight'"):
            other.ckpt.save("other/")
        assert names("other") == ["model.safetensors"]

    def test_a_part_of_a_model_without_its_prefix_is_no_model(self) -> None:
        a = xckpt.open("a")
        part = a.rename({name: str(name).removeprefix("model.") for name in a}).drop_vars(HEAD)
        for prefix in ("layers", "lm_head"):
            left = part.drop_vars(
                [name for name in part if str(name).startswith(prefix)], errors="ignore"
            )
            with pytest.warns(
                CheckpointWarning, match=r"lacks .* of its 30 tensors.*'config\.json'"
            ):
                left.ckpt.save(f"{prefix}/")
            assert names(prefix) == ["model.safetensors"]

    def test_tensors_of_names_that_the_model_lacks_are_named(self) -> None:
        a, b = both()
        wrong = {"model.layers.0.mlp.upproj.weight": b[f"{UP}.weight"]}
        text = r"tensors that a/ lacks, .*: 'model\.layers\.0\.mlp\.upproj\.weight'$"
        with pytest.warns(CheckpointWarning, match=text):
            a.assign(wrong).ckpt.save("out/")
        assert "config.json" in names("out")

    def test_a_tied_head_is_not_missing(self) -> None:
        Path("a/config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))
        xckpt.open("a").drop_vars(HEAD).ckpt.save("out/")
        assert "config.json" in names("out")

    @pytest.mark.parametrize("kind", ["new", "replaced", "computed", "of another model"])
    def test_a_head_of_its_own_is_no_longer_tied(self, kind: str) -> None:
        Path("a/config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))
        a, b = both()
        if kind == "new":
            a.drop_vars(HEAD).ckpt.save("a/model.safetensors", overwrite=True)
            a = xckpt.open("a")
        elif kind == "computed":
            a, b = (a + b) / 2, 3 * a - b
        head = xr.DataArray(np.ones((32, 8), "f4"), dims=a[TABLE].dims)
        value = head if kind in {"new", "replaced"} else b[HEAD]
        with pytest.warns(CheckpointWarning) as record:
            a.assign({HEAD: value}).ckpt.save("out/")
        text = str(record[0].message)
        assert "tie_word_embeddings: False (was True)" in text
        assert "libraries ignore" not in text
        assert config("out")["tie_word_embeddings"] is False

    def test_a_head_of_its_own_is_no_longer_tied_by_default(self) -> None:
        Path("a/config.json").write_text(
            json.dumps({key: LLAMA[key] for key in LLAMA if key != "tie_word_embeddings"})
        )
        xckpt.open("a").drop_vars(HEAD).ckpt.save("a/model.safetensors", overwrite=True)
        a = xckpt.open("a")
        with pytest.warns(CheckpointWarning, match="tie_word_embeddings: False"):
            a.assign({HEAD: 2 * a[TABLE]}).ckpt.save("out/")
        assert config("out")["tie_word_embeddings"] is False

    @pytest.mark.parametrize("stated", [{}, {"tie_word_embeddings": True}])
    def test_a_head_without_a_table_of_tokens_is_not_tied(self, stated: dict[str, Any]) -> None:
        ctc = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "hidden_size": 8}
        layers = [f"wav2vec2.encoder.layers.{n}.attention.k_proj.weight" for n in (0, 1)]
        tensors: dict[str, tuple[int, ...]] = dict.fromkeys(layers, (8, 8))
        tensors |= {HEAD: (32, 8), "lm_head.bias": (32,)}
        arrays = {name: np.ones(shape, "f4") for name, shape in tensors.items()}
        xckpt.save(arrays, "a/model.safetensors", overwrite=True)
        Path("a/config.json").write_text(json.dumps(ctc | stated))
        a = xckpt.open("a")
        a.ckpt.save("same/")
        a.assign({HEAD: 2 * a[HEAD]}).ckpt.save("out/")
        assert config("out") == config("same") == ctc | stated
        with pytest.warns(CheckpointWarning, match=r"lacks 1 of its 4 tensors: 'lm_head\.weight"):
            a.drop_vars(HEAD).ckpt.save("part/")

    def test_a_head_that_is_computed_as_the_table_stays_tied(self) -> None:
        for name in "ab":
            Path(name, "config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))
        xckpt.open("a").ckpt.save("same/")
        (total() / 2).ckpt.save("out/")
        assert config("out") == config("same") == LLAMA | {"tie_word_embeddings": True}

    @pytest.mark.parametrize(
        "load",
        [
            lambda ds: ds.compute(),
            lambda ds: ds.persist(),
            lambda ds: pickle.loads(pickle.dumps(ds.compute())),
            lambda ds: saved_and_opened(ds, "out.zt"),
            lambda ds: xr.Dataset(
                {n: v.drop_attrs() for n, v in ds.compute().items()},
                attrs={"config": json.dumps(ds.attrs["config"])},
            ),
        ],
        ids=["compute", "persist", "pickle", "zt", "plain"],
    )
    def test_the_config_of_a_result_in_memory_comes_from_its_attributes(self, load: Any) -> None:
        mean = load(total() / 2)
        text = r"written from the attributes, without tokenizer.*: 'config\.json'"
        with pytest.warns(CheckpointWarning, match=text):
            mean.ckpt.save("out/")
        assert names("out") == ["config.json", "model.safetensors"]
        assert config("out") == LLAMA

    @pytest.mark.parametrize(
        "load",
        [
            lambda: xckpt.open("a").load(),
            lambda: xckpt.open("a").compute(),
            lambda: xckpt.open("a").persist(),
            lambda: xckpt.open("a", chunks=None).load(),
            lambda: xckpt.open("a", stack=True).load(),
        ],
        ids=["load", "compute", "persist", "no chunks", "stack"],
    )
    def test_a_model_in_memory_that_an_adapter_changes_has_its_config(self, load: Any) -> None:
        merged = load().ckpt.merge("lora").ckpt.merge(xckpt.open("lora-2"))
        text = r"written from the attributes, without tokenizer.*: 'config\.json'"
        with pytest.warns(CheckpointWarning, match=text):
            merged.ckpt.save("out/")
        assert names("out") == ["config.json", "model.safetensors"]
        assert config("out") == LLAMA

    def test_a_model_in_memory_may_be_changed_as_a_whole(self) -> None:
        queries = xckpt.open("a").ckpt.find("*q_proj*").load()
        with pytest.warns(CheckpointWarning, match=r"written from the attributes.*'config\.json'"):
            queries.ckpt.merge("lora").ckpt.save("out/")

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: with_layers([0, 2]), "num_hidden_layers 3: the tensors have 2"),
            (lambda: both()[0].isel(vocab=slice(30)), "vocab_size 32: the tensors have 30"),
            (
                lambda: both()[0].isel({"head*key": slice(4), "head*value": slice(4)}),
                "num_attention_heads 2 and head_dim 4: the tensors have 4 instead of 8",
            ),
        ],
        ids=["layers", "vocabulary", "heads"],
    )
    def test_a_config_in_attributes_is_compared_with_the_tensors(
        self, make: Any, text: str
    ) -> None:
        with pytest.warns(CheckpointWarning, match=f"not written, as {text}.*'config\\.json'"):
            ((make() + make()) / 2).compute().ckpt.save("out/")
        assert names("out") == ["model.safetensors"]

    def test_a_config_in_attributes_is_compared_with_the_labels(self) -> None:
        model = {name: value for name, value in llama(0).items() if name != HEAD}
        xckpt.save(
            model | {"score.weight": np.ones((2, 8), "f4")}, "a/model.safetensors", overwrite=True
        )
        labels = {"id2label": {"0": "no", "1": "yes"}}
        Path("a/config.json").write_text(json.dumps(LLAMA | labels))
        mean = ((xckpt.open("a") + xckpt.open("a")) / 2).compute()
        with pytest.warns(CheckpointWarning, match=r"only its sizes were compared.*'config\.json'"):
            mean.ckpt.save("out/")
        assert config("out") == LLAMA | labels
        more = mean.drop_vars("score.weight").assign(
            {"score.weight": (("label", "embd"), np.ones((3, 8), "f4"))}
        )
        with pytest.warns(
            CheckpointWarning, match=r"not written, as id2label 2: the classifier has 3 rows"
        ):
            more.ckpt.save("more/")
        assert names("more") == ["model.safetensors"]

    @pytest.mark.parametrize("kind", ["zarr", "netcdf"])
    @pytest.mark.filterwarnings("ignore:Consolidated metadata", "ignore:.*became JSON text")
    def test_a_stack_whose_record_is_lost_has_no_config(self, kind: str) -> None:
        plain = xckpt.open("a", stack=True).ckpt.plain()
        engine: Any = pytest.importorskip({"netcdf": "h5netcdf"}.get(kind, kind)).__name__
        if kind == "zarr":
            plain.to_zarr("stacked")
        else:
            plain.to_netcdf("stacked", engine=engine)
        stored = xr.open_dataset("stacked", engine=engine, chunks={})
        text = r"not written, as num_hidden_layers 3: no tensor has the name of a layer.*unstack"
        with pytest.warns(CheckpointWarning, match=text):
            stored.ckpt.save("out/")
        assert names("out") == ["model.safetensors"]
        with pytest.warns(CheckpointWarning, match="no record of the stack along 'layers'"):
            stored.ckpt.unstack()

    def test_a_model_without_any_config_is_a_warning(self) -> None:
        xckpt.save(llama(0), "plain.zt")
        for source in ("plain.zt", llama(0)):
            text = r"no config\.json or tokenizer.*copy those of the model"
            with pytest.warns(CheckpointWarning, match=text):
                xckpt.open(source).ckpt.save("out/", overwrite=True)
        assert names("out") == ["model.safetensors"]

    def test_adapters_of_other_scales_are_named(self) -> None:
        stated = json.loads(Path("lora-2/adapter_config.json").read_text())
        stated |= {"lora_alpha": 8, "use_rslora": True}
        Path("lora-2/adapter_config.json").write_text(json.dumps(stated))
        text = r"as if all had the scale of lora/.*'lora-2/: lora_alpha 8, not 4; use_rslora True"
        with pytest.warns(CheckpointWarning, match=text):
            ((xckpt.open("lora") + xckpt.open("lora-2")) / 2).ckpt.save("out/")

    @pytest.mark.parametrize(
        ("change", "rank"),
        [
            (lambda a, b: xr.concat([a, b], "rank"), 4),
            (lambda a, b: xr.concat([a, b], "rank").compute(), 4),
            (lambda a, _: a.isel(rank=slice(1)), 1),
        ],
        ids=["concatenated", "in memory", "cut"],
    )
    def test_a_config_of_another_rank_is_left_out(self, change: Any, rank: int) -> None:
        ds = change(xckpt.open("lora"), xckpt.open("lora-2"))
        text = rf"as r 2: the tensors have {rank}: 'adapter_config\.json'"
        with pytest.warns(CheckpointWarning, match=text) as warnings:
            ds.ckpt.save("out/")
        assert names("out") == ["adapter_model.safetensors"]
        assert not any("averaged" in str(warning.message) for warning in warnings)

    def test_edits_of_the_config_of_an_adapter_are_written(self) -> None:
        adapter = xckpt.open("lora")
        new = adapter.attrs["adapter_config"] | {"lora_alpha": 8, "base_model_name_or_path": "me/b"}
        adapter.assign_attrs(adapter_config=new).ckpt.save("out/")
        assert json.loads(Path("out/adapter_config.json").read_text()) == new
        xckpt.convert("lora", "converted/", set_attrs={"adapter_config": new})
        assert json.loads(Path("converted/adapter_config.json").read_text()) == new

    def test_the_config_of_a_part_of_an_adapter_is_written_if_it_is_edited(self) -> None:
        adapter = xckpt.open("lora", tensors="*layers.0.*")
        text = r"""lacks 4 of its 6 .* \(state "target_modules" .* in attrs\["adapter_config"\]"""
        with pytest.warns(CheckpointWarning, match=text):
            adapter.ckpt.save("out/")
        assert names("out") == ["adapter_model.safetensors"]
        new = adapter.attrs["adapter_config"] | {"target_modules": ["layers.0.self_attn.q_proj"]}
        adapter.assign_attrs(adapter_config=new).ckpt.save("out/", overwrite=True)
        assert json.loads(Path("out/adapter_config.json").read_text()) == new

    def test_the_config_of_a_new_rank_is_written(self) -> None:
        a, b = xckpt.open("lora"), xckpt.open("lora-2")
        config = a.attrs["adapter_config"] | {"r": 4, "lora_alpha": 8}
        xr.concat([a, b], "rank").assign_attrs(adapter_config=config).ckpt.save("out/")
        assert json.loads(Path("out/adapter_config.json").read_text()) == config

    def test_an_adapter_in_memory_has_its_name_and_config(self) -> None:
        with pytest.warns(CheckpointWarning, match=r"attributes.*'adapter_config\.json'"):
            ((xckpt.open("lora") + xckpt.open("lora-2")) / 2).compute().ckpt.save("out/")
        assert names("out") == ["adapter_config.json", "adapter_model.safetensors"]

    def test_values_of_configs_that_contradict_are_named(self) -> None:
        configs: dict[str, dict[str, Any]] = {
            "a": {"rope_theta": 1e4},
            "b": {"num_attention_heads": 4, "rope_theta": 1e6, "transformers_version": "5"},
        }
        for name, values in configs.items():
            Path(name, "config.json").write_text(json.dumps(LLAMA | values))
        text = (
            r"from a/, .*: 'b/ num_attention_heads 4 \(2\)', 'b/ rope_theta 1000000.0 \(10000.0\)'$"
        )
        with pytest.warns(CheckpointWarning, match=text):
            (total() / 2).ckpt.save("out/")
        assert config("out") == LLAMA | {"rope_theta": 1e4}
        Path("b/config.json").write_text(Path("a/config.json").read_text())
        Path("b/tokenizer.json").write_text("[]")
        with pytest.warns(CheckpointWarning, match=r"'b/ another tokenizer\.json'$"):
            (total() / 2).ckpt.save("other/")

    def test_a_tokenizer_of_more_tokens_is_left_out(self) -> None:
        with pytest.warns(CheckpointWarning, match=r"fewer rows: 'tokenizer\.json'"):
            xckpt.open("a").isel(vocab=slice(30)).ckpt.save("out/")
        assert config("out") == LLAMA | {"vocab_size": 30}
        assert "tokenizer.json" not in names("out")

    @pytest.mark.parametrize(
        "order",
        [
            lambda ds: ds.isel(vocab=slice(None, None, -1)),
            lambda ds: ds.isel(vocab=list(np.roll(np.arange(32), 3))),
            lambda ds: ds.isel(vocab=np.arange(32)[::-1]) * 2,
            lambda ds: (ds * 2).assign_coords(vocab=np.arange(32)[::-1]).sortby("vocab"),
        ],
        ids=["backwards", "list", "before a product", "sorted"],
    )
    def test_a_tokenizer_of_another_order_is_left_out(self, order: Any) -> None:
        ds = xckpt.open("a")
        with pytest.warns(CheckpointWarning, match=r"vocabulary are in another.*tokenizer\.json"):
            order(ds).drop_vars("vocab", errors="ignore").ckpt.save("out/")
        assert "tokenizer.json" not in names("out")
        assert config("out") == LLAMA
        ds.isel(vocab=np.arange(32)).ckpt.save("same/")
        assert "tokenizer.json" in names("same")
        with pytest.warns(CheckpointWarning, match="vocab_size"):  # rows of new tokens are copies
            ds.drop_vars([HEAD, TABLE]).assign(
                {n: xr.concat([ds[n], ds[n].isel(vocab=[5, 3])], "vocab") for n in (HEAD, TABLE)}
            ).ckpt.save("more/")
        assert "tokenizer.json" in names("more")

    @pytest.mark.parametrize(
        "move",
        [
            lambda ds: ds.roll(vocab=1),
            lambda ds: ds.shift(vocab=1, fill_value=0),
            lambda ds: ds.drop_isel(vocab=[7]).pad(vocab=(0, 1)),
            lambda ds: ds.pad(vocab=(4, 0), constant_values=0),
            lambda ds: xr.concat(
                [ds.isel(vocab=slice(10, None)), ds.isel(vocab=slice(10))],
                "vocab", data_vars="minimal",
            ),
            lambda ds: (ds.roll(vocab=2) + xckpt.open("b")) / 2,
            lambda ds: ds.map(lambda tensor: xr.apply_ufunc(
                lambda block: block[..., ::-1], tensor, dask="parallelized",
                input_core_dims=[["vocab"]], output_core_dims=[["vocab"]],
                output_dtypes=[tensor.dtype],
            ).transpose(*tensor.dims) if "vocab" in tensor.dims else tensor),
        ],
        ids=["roll", "shift", "drop", "pad", "concat", "mean", "function"],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:.*NaN, unlike the sources")
    def test_a_tokenizer_of_moved_rows_is_left_out(self, move: Any) -> None:
        with pytest.warns(CheckpointWarning, match=r"vocabulary are in another.*tokenizer\.json"):
            move(xckpt.open("a")).ckpt.save("out/")
        assert "tokenizer.json" not in names("out")

    @pytest.mark.parametrize(
        "load",
        [
            lambda ds, move: move(ds).compute(),
            lambda ds, move: move(ds).persist(),
            lambda ds, move: move(ds.load()),
            lambda ds, move: move(ds.persist()),
        ],
        ids=["compute", "persist", "load before", "persist before"],
    )
    def test_a_tokenizer_of_rows_that_moved_in_memory_is_left_out(self, load: Any) -> None:
        tokens = {"bos_token_id": 1, "eos_token_id": 9}
        Path("a/config.json").write_text(json.dumps(LLAMA | tokens))
        order = [0, 1, *range(31, 1, -1)]
        text = r"vocabulary are in another.*'tokenizer\.json'.*rows moved.*'eos_token_id: 9'"
        with pytest.warns(CheckpointWarning, match=text):
            load(xckpt.open("a"), lambda ds: ds.isel(vocab=order)).ckpt.save("out/")
        assert "tokenizer.json" not in names("out")
        cut = [0, 1, 2, *range(5, 32)]
        text = r"fewer rows: 'tokenizer\.json'.*rows moved.*'eos_token_id: 9'"
        with pytest.warns(CheckpointWarning, match=text):
            load(xckpt.open("a"), lambda ds: ds.isel(vocab=cut)).ckpt.save("cut/")
        load(xckpt.open("a"), lambda ds: ds.isel(vocab=list(range(32)))).ckpt.save("same/")
        assert "tokenizer.json" in names("same")

    @pytest.mark.parametrize(
        "change",
        [
            lambda ds: ds * 2,
            lambda ds: ds.assign({TABLE: ds[TABLE].clip(-1, 1)}),
            lambda ds: ds.assign({TABLE: 0 * ds[TABLE]}),
            lambda ds: ds.pad(vocab=(0, 2), mode="edge"),
        ],
        ids=["scaled", "clipped", "zeros", "more"],
    )
    @pytest.mark.filterwarnings("ignore:.*vocab_size")
    def test_a_tokenizer_of_rows_in_memory_in_their_places_is_kept(self, change: Any) -> None:
        new = change(xckpt.open("a").load())
        new[TABLE][3] = new[TABLE][5]  # a token begins as another one
        new.ckpt.save("out/")
        assert "tokenizer.json" in names("out")

    @pytest.mark.parametrize(
        "change",
        [
            lambda a, b: (a + b - 2 * a.mean()).fillna(0),
            lambda a, b: a / np.sqrt((b**2).sum(skipna=False)),
            lambda a, b: a.where(abs(b) > 1, 0),
            lambda a, b: xr.concat([a, b], "model").mean("model"),
            lambda a, b: a.ckpt.merge((b - a).isel(embd=slice(None, None, -1))),
            lambda a, b: (a - b).clip(-1, 1) + a,
        ],
        ids=["centred", "norm", "where", "mean", "backwards", "clip"],
    )
    def test_a_tokenizer_of_rows_in_their_places_is_kept(self, change: Any) -> None:
        change(*both()).ckpt.save("out/")
        assert "tokenizer.json" in names("out")

    @pytest.mark.parametrize("how", ["save", "convert", "computed"])
    def test_attributes_state_the_type_that_is_written(self, how: str) -> None:
        config = LLAMA | {"dtype": "float32", "text_config": {"torch_dtype": "float32"}}
        a = xckpt.open("a").assign_attrs(config=config)
        a.ckpt.save("one.safetensors")
        assert xckpt.open("one.safetensors").attrs["config"] == config
        half: dict[str, Any] = {"dtype": "bfloat16", "cast": "allow", "overwrite": True}
        if how == "convert":
            xckpt.convert("one.safetensors", "half.safetensors", **half)
        else:
            (a if how == "save" else (a + a) / 2).ckpt.save("half.safetensors", **half)
        assert xckpt.open("half.safetensors").attrs["config"]["dtype"] == "bfloat16"

    def test_tensors_of_another_type_than_the_config_are_named(self) -> None:
        Path("a/config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float32"}))
        ds = xckpt.open("a")
        head = ds[HEAD].astype("float64")
        with pytest.warns(CheckpointWarning, match=f"than float32 of config.*'{HEAD} float64'"):
            ds.assign({HEAD: head}).ckpt.save("out/")
        half = ds.map(lambda tensor: tensor.astype("float16"))
        half.ckpt.save("half/")
        assert config("half")["torch_dtype"] == "float16"

    def test_results_of_shards_have_their_own_size(self) -> None:
        for name in "ab":
            xckpt.open(name).ckpt.save(f"shards-{name}/", max_shard_size="1kB")
        a, b = xckpt.open("shards-a/"), xckpt.open("shards-b/")
        size = a.attrs["total_size"]
        ((a + b) / 2).ckpt.save("out/", max_shard_size="1kB")
        assert xckpt.open("out/").attrs["total_size"] == size
        options: Any = {"dtype": "float16", "cast": "allow"}
        ((a + b) / 2).ckpt.save("half/", max_shard_size="1kB", **options)
        assert xckpt.open("half/").attrs["total_size"] == size // 2

    def test_numbers_of_tokens_without_a_row_are_named(self) -> None:
        tokens = {"bos_token_id": 1, "eos_token_id": [2, 31], "pad_token_id": 30}
        Path("a/config.json").write_text(json.dumps(LLAMA | tokens))
        text = r"no row: 'eos_token_id: 31', 'pad_token_id: 30'"
        with pytest.warns(CheckpointWarning, match=text):
            xckpt.open("a").isel(vocab=slice(30)).ckpt.save("out/")
        assert config("out") == LLAMA | tokens | {"vocab_size": 30}

    def test_numbers_of_tokens_without_a_row_are_named_beside_edits(self) -> None:
        tokens = {"bos_token_id": 1, "pad_token_id": 31}
        Path("a/config.json").write_text(json.dumps(LLAMA | tokens))
        Path("a/generation_config.json").write_text(json.dumps({"eos_token_id": [2, 30]}))
        a = xckpt.open("a")
        cut = a.isel(vocab=slice(30)).assign_attrs(config=LLAMA | tokens | {"vocab_size": 30})
        with pytest.warns(CheckpointWarning) as caught:
            cut.ckpt.save("out/")
        assert "config.json names tokens that have no row: 'pad_token_id: 31'" in str(
            caught[0].message
        )
        assert "generation_config.json names tokens that have no row: 'eos_token_id: 30'" in str(
            caught[0].message
        )
        text = r"config.json names tokens that have no row: 'pad_token_id: 32'"
        with pytest.warns(CheckpointWarning, match=text):
            a.assign_attrs(config=LLAMA | {"pad_token_id": 32}).ckpt.save("edited/")
        with pytest.warns(CheckpointWarning, match=r"attributes names? tokens.*pad_token_id: 31'"):
            a.isel(vocab=slice(30)).ckpt.save("out.zt")

    @pytest.mark.parametrize(
        ("move", "moved"),
        [
            (lambda ds: ds.isel(vocab=[0, 2, 1, *range(5, 32)]), (1, 2, 7)),
            (lambda ds: ds.isel(vocab=[0, 1, 2, *range(4, 32)]), (7,)),
            (lambda ds: ds.isel(vocab=slice(1, None)), (1, 2, 7)),
            (lambda ds: ds.isel(vocab=[0, 1, 3, 2, *range(4, 32)]) * 2, (2,)),
            (lambda ds: ds.pad(vocab=(4, 0), constant_values=0), (1, 2, 7)),
            (lambda ds: (ds.roll(vocab=2) + xckpt.open("b")) / 2, (1, 2, 7)),
            (lambda ds: xr.concat(
                [ds.isel(vocab=slice(5)), ds.isel(vocab=slice(6, None))],
                "vocab", data_vars="minimal",
            ), (7,)),
            (lambda ds: ds.isel(vocab=list(range(30))), ()),
            (lambda ds: ds * 2, ()),
        ],
        ids=["list", "trimmed", "slice", "scaled", "pad", "mean", "concat", "cut", "in place"],
    )  # fmt: skip
    @pytest.mark.parametrize("has_tokenizer", [True, False])
    @pytest.mark.filterwarnings("ignore:.*NaN, unlike the sources")
    def test_numbers_of_tokens_whose_rows_moved_are_named(
        self, move: Any, moved: tuple[int, ...], has_tokenizer: bool
    ) -> None:
        tokens = {"bos_token_id": 1, "eos_token_id": [2, 7]}
        Path("a/config.json").write_text(json.dumps(LLAMA | tokens))
        Path("a/generation_config.json").write_text(json.dumps({"pad_token_id": 7}))
        if not has_tokenizer:
            Path("a/tokenizer.json").unlink()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            move(xckpt.open("a")).ckpt.save("out/")
        text = "; ".join([str(warning.message) for warning in caught])
        keys = {1: "bos_token_id", 2: "eos_token_id", 7: "eos_token_id"}
        named = ", ".join([f"'{keys[number]}: {number}'" for number in moved])
        change = "names tokens whose rows moved (state their new numbers in attrs"
        assert (f"config.json {change}['config']): {named}" in text) == bool(moved)
        assert (change in text) == bool(moved)
        line = f"generation_config.json {change}['generation_config']): 'pad_token_id: 7'"
        assert (line in text) == (7 in moved)

    def test_edited_numbers_of_tokens_are_those_of_the_new_rows(self) -> None:
        tokens = {"bos_token_id": 1, "eos_token_id": 5}
        Path("a/config.json").write_text(json.dumps(LLAMA | tokens))
        ds = xckpt.open("a").isel(vocab=[5, 1, 2, 3, 4, *range(6, 32)])
        ds.attrs["config"]["eos_token_id"] = 0
        with pytest.warns(CheckpointWarning) as caught:
            ds.ckpt.save("out/")
        assert not any("whose rows moved" in str(warning.message) for warning in caught)
        assert config("out")["eos_token_id"] == 0

    def test_an_adapter_that_sets_most_tensors_is_not_the_origin(self) -> None:
        saved = {
            f"base_model.model.{name}": value
            for name, value in llama(7).items()
            if name != NORM and "q_proj" not in name
        }
        saved |= {str(name): lora.values for name, lora in xckpt.open("lora").items()}
        xckpt.save(saved, "lora/adapter_model.safetensors", overwrite=True)
        merged = xckpt.open("a").ckpt.merge("lora")
        np.testing.assert_array_equal(merged[HEAD], saved[f"base_model.model.{HEAD}"])
        merged.ckpt.save("out/")
        described = ["config.json", "generation_config.json", "model.safetensors"]
        assert names("out") == [*described, "tokenizer.json"]

    def test_names_without_a_usual_prefix_keep_the_config(self) -> None:
        xckpt.convert("a", "out/", names=lambda name: name.removeprefix("model."))
        assert config("out") == LLAMA

    @pytest.mark.parametrize("how", ["convert", "rename"])
    def test_another_prefix_does_not_fit_the_config(self, how: str) -> None:
        a = xckpt.open("a")
        new = {name: str(name).replace("model.", "transformer.", 1) for name in a}
        write: dict[str, Any] = {
            "convert": lambda: xckpt.convert("a", "out/", names=[(r"^model\.", "transformer.")]),
            "rename": lambda: a.rename(new).ckpt.save("out/"),
        }
        with pytest.warns(CheckpointWarning, match=r"no tensor has the name .* any more: 'config"):
            write[how]()
        assert names("out") == ["model.safetensors", "tokenizer.json"]

    @pytest.mark.parametrize("old", ["", "model.norm"])
    def test_other_names_do_not_fit_the_config(self, old: str) -> None:
        with pytest.warns(CheckpointWarning, match=r"no tensor has the name .* any more: 'config"):
            xckpt.convert("a", "out/", names=lambda name: name.replace(old, f"base.{old}", 1))
        assert names("out") == ["model.safetensors", "tokenizer.json"]

    def test_overwriting_replaces_the_config(self) -> None:
        (total() / 2).ckpt.save("out/")
        with pytest.warns(CheckpointWarning, match="num_hidden_layers: 2"):
            with_layers([0, 2]).ckpt.save("out/", overwrite=True)
        assert config("out")["num_hidden_layers"] == 2
        with pytest.warns(CheckpointWarning, match="num_hidden_layers: 2"):
            with_layers([0, 2]).ckpt.save("a/", overwrite=True)
        assert config("a")["num_hidden_layers"] == 2

    def test_an_existing_config_stays_and_no_warning_claims_otherwise(self) -> None:
        Path("out").mkdir()
        Path("out/config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 4}))
        Path("out/tokenizer.json").write_text("[]")
        with pytest.warns(CheckpointWarning) as caught:
            (total() / 2).ckpt.save("out/")
        (text,) = [str(warning.message) for warning in caught]
        assert "overwrite=True" in text
        assert "'num_hidden_layers: 4, not 3': 'config.json'" in text
        assert "differs from that of the tensors: 'tokenizer.json'" in text
        assert config("out")["num_hidden_layers"] == 4
        for folder, layers in (("other", 4), ("right", 2)):
            Path(folder).mkdir()
            value = json.dumps(LLAMA | {"num_hidden_layers": layers}, indent=layers)
            Path(folder, "config.json").write_text(value)
        with pytest.warns(CheckpointWarning, match="'num_hidden_layers: 4, not 2'") as caught:
            with_layers([0, 2]).ckpt.save("other/")
        assert "new values" not in str(caught[0].message)
        with_layers([0, 2]).ckpt.save("right/")

    def test_a_config_that_stays_beside_other_tensors_is_named(self) -> None:
        make, text = PROBLEMS["layers with gaps"]
        with pytest.warns(CheckpointWarning, match=rf"{text}.*may not fit: 'config\.json'"):
            make().ckpt.save("a/", overwrite=True)
        assert config("a") == LLAMA

    def test_a_deferred_result_has_the_files_after_it_is_computed(self) -> None:
        later = (total() / 2).ckpt.save("out/", compute=False)
        assert names("out") == []
        later.compute()
        assert config("out") == LLAMA

    @pytest.mark.parametrize(
        "config",
        [
            {"num_hidden_layers": 1 << 60, "vocab_size": 1 << 60},
            {"num_hidden_layers": -3, "vocab_size": [32], "text_config": 5},
            {"text_config": {"num_hidden_layers": "3", "hidden_size": 1 << 900}},
        ],
    )
    def test_a_config_of_odd_values_is_copied(self, config: dict[str, Any]) -> None:
        Path("a/config.json").write_text(json.dumps(LLAMA | config))
        (xckpt.open("a") * 2).ckpt.save("out/")
        assert json.loads(Path("out/config.json").read_text()) == LLAMA | config

    @pytest.mark.filterwarnings("ignore")
    def test_transformers_and_peft_load_the_folders(self) -> None:
        torch: Any = pytest.importorskip("torch")
        transformers: Any = pytest.importorskip("transformers")
        peft: Any = pytest.importorskip("peft")
        Path("a/tokenizer.json").unlink()
        Path("a/generation_config.json").unlink()
        results = {
            "mean": total() / 2,
            "step": xckpt.open_steps("run").sel(step=2),
            "fewer": with_layers([0, 2]),
            "narrow": both()[0].isel(ff=slice(12)),
            "tokens": CERTAIN["more tokens"][0](),
        }
        for name, result in results.items():
            result.ckpt.save(f"{name}/")
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                name, output_loading_info=True
            )
            assert not any(report.values()), report
            assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
        ((xckpt.open("lora") + xckpt.open("lora-2")) / 2).ckpt.save("out/")
        base = transformers.AutoModelForCausalLM.from_pretrained("a")
        merged = peft.PeftModel.from_pretrained(base, "out").merge_and_unload().state_dict()
        for key, array in xckpt.open("a").ckpt.merge("out").items():
            np.testing.assert_allclose(merged[key].numpy(), array.values, atol=1e-5)


class TestNamesInStateDicts:
    """Names below a key of a torch checkpoint are no names of the model, as a warning says."""

    @pytest.mark.parametrize("key", ["state_dict", "model_state_dict"])
    @pytest.mark.parametrize("target", ["new.safetensors", "new/"])
    def test_are_named_with_the_calls_that_remove_the_key(self, target: str, key: str) -> None:
        ds = xckpt.open({f"{key}.{name}": array for name, array in llama(0).items()})
        text = rf"key that load_state_dict.*ds\.rename.*names=.*: '{key}\.'"
        with pytest.warns(CheckpointWarning, match=text):
            ds.ckpt.save(target)
        xckpt.save(ds.rename({n: str(n).split(".", 1)[1] for n in ds}), "renamed.safetensors")
        xckpt.convert(target, "converted.safetensors", names=("^[^.]*[.]", ""))
        for path in ("renamed.safetensors", "converted.safetensors"):
            assert xckpt.open(path).keys() == llama(0).keys()

    @pytest.mark.parametrize("change", [lambda ds: ds, lambda ds: ds * 2], ids=["read", "scaled"])
    def test_after_renaming_a_config_that_is_stated_as_a_whole_holds(self, change: Any) -> None:
        prefix = "state_dict.model."
        tensors = {"step": np.ones(1)} | {prefix + n: array for n, array in llama(0).items()}
        xckpt.save(tensors, "last.safetensors")
        ds = xckpt.open("last.safetensors")
        ds = ds.drop_vars("step")
        ds = change(ds.rename({name: str(name).removeprefix(prefix) for name in ds}))
        text = r"written from the attributes.*only its sizes were compared.*: 'config\.json'"
        with pytest.warns(CheckpointWarning, match=text):
            ds.assign_attrs(config=LLAMA).ckpt.save("out/")
        assert config("out") == LLAMA
        base = LLAMA | {"architectures": ["LlamaModel"]}
        with pytest.warns(CheckpointWarning, match=text):
            ds.drop_vars(HEAD).assign_attrs(config=base).ckpt.save("base-model/")
        assert config("base-model") == base
        wrong = LLAMA | {"vocab_size": 33}
        with pytest.warns(CheckpointWarning, match="not written, as vocab_size 33: .* have 32"):
            ds.assign_attrs(config=wrong).ckpt.save("wrong/")
        assert names("wrong") == ["model.safetensors"]

    def test_with_other_tensors_are_as_in_the_checkpoint(self) -> None:
        tensors = {"state_dict.w": np.ones(3), "optimizer.state.0.exp_avg": np.ones(3)}
        xckpt.save(tensors, "new.safetensors")
        assert set(xckpt.open("new.safetensors")) == set(tensors)


# --- quantised models -----------------------------------------------------------------------------

QUANTIZED: dict[str, Any] = {
    "fp8": (
        "weight_scale_inv",
        {"weight_block_size": [8, 8], "modules_to_not_convert": ["lm_head"]},
        "modules_to_not_convert",
    ),
    "fbgemm_fp8": (
        "weight_scale",
        {"modules_to_not_convert": ["lm_head"]},
        "modules_to_not_convert",
    ),
    "bitsandbytes": (
        "SCB",
        {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
        "llm_int8_skip_modules",
    ),
    "compressed-tensors": (
        "weight_scale",
        {
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                }
            },
            "ignore": ["lm_head"],
        },
        "ignore",
    ),
}
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(params=QUANTIZED)
def quantized(request: pytest.FixtureRequest) -> tuple[xr.Dataset, str]:
    """Return a quantised model, and the key of the modules that are not."""
    scale, declared, key = QUANTIZED[request.param]
    tensors = llama(0)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        if request.param == "fp8":
            tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
            tensors[name.removesuffix("weight") + scale] = np.full(
                (rows // 8, columns // 8), 2, "f4"
            )
        else:
            code = ml_dtypes.float8_e4m3fn if request.param == "fbgemm_fp8" else "i1"
            tensors[name] = (tensors[name] * 9).astype(code)
            tensors[name.removesuffix("weight") + scale] = np.full((rows, 1), 0.5, "f4")
            if request.param == "bitsandbytes":
                tensors[f"{name}_format"] = np.zeros((), "u1")
    write_model("q", 0, quantization_config={"quant_method": request.param, **declared})
    xckpt.save(tensors, "q/model.safetensors", overwrite=True)
    ds = xckpt.open("q")
    assert ds[f"{UP}.weight"].dtype.kind not in "iu"
    return ds, key


class TestQuantizedModels:
    """The config declares the quantisation of weights that are written as codes, and no other."""

    def test_codes_that_are_written_stay_declared(self, quantized: tuple[xr.Dataset, str]) -> None:
        ds, _ = quantized
        rows = {name: grown(ds[name], 4) for name in (HEAD, TABLE)}
        layer = [name for name in ds if ".layers.2." in str(name)]
        for folder, edited in {
            "fewer": ds.drop_vars(layer),
            "norm": ds.assign({NORM: ds[NORM] * 2}),
            "tokens": ds.drop_vars([HEAD, TABLE]).assign(rows),
        }.items():
            if folder == "norm":
                edited.ckpt.save("norm/")
            else:
                with pytest.warns(CheckpointWarning, match="num_hidden_layers: 2|vocab_size: 36"):
                    edited.ckpt.save(f"{folder}/")
            assert config(folder)["quantization_config"] == config("q")["quantization_config"]
            saved = xckpt.open(folder)
            assert set(saved) == set(edited)
            for name in saved:
                np.testing.assert_array_equal(saved[name], edited[name])

    def test_moved_layers_keep_their_codes(self, quantized: tuple[xr.Dataset, str]) -> None:
        ds = quantized[0].ckpt.stack()
        ds.isel(layers=[2, 1, 0]).assign_coords(layers=range(3)).ckpt.save("moved/")
        same = xckpt.open("moved", stack=True).isel(layers=[2, 1, 0])
        same.assign_coords(layers=range(3)).ckpt.save("again/")
        assert config("moved")["quantization_config"] == config("q")["quantization_config"]
        before, after = (
            xckpt.read_index(f"{folder}/model.safetensors") for folder in ("q", "again")
        )
        assert {n: t.dtype for n, t in before.tensors.items()} == {
            n: t.dtype for n, t in after.tensors.items()
        }
        assert not xckpt.compare("q", "again").ckpt.table()["status"].ne("same").any()
        moved = xckpt.open("moved")[f"{UP}.weight"]
        np.testing.assert_array_equal(moved, ds["model.layers.mlp.up_proj.weight"][2])

    def test_weights_that_became_dense_are_excluded(
        self, quantized: tuple[xr.Dataset, str]
    ) -> None:
        ds, key = quantized
        edited = ds.assign({f"{UP}.weight": ds[f"{UP}.weight"] * 2})
        with pytest.warns(CheckpointWarning, match=rf"quantization_config\.{key}: 1 more module"):
            edited.ckpt.save("out/")
        assert f"{UP}.weight_format" not in xckpt.open("out", decode=False)
        before = config("q")["quantization_config"]
        assert config("out")["quantization_config"] == before | {key: [*before[key], UP]}
        np.testing.assert_array_equal(xckpt.open("out")[f"{UP}.weight"], edited[f"{UP}.weight"])

    @pytest.mark.parametrize("is_tied", [False, True])
    @pytest.mark.parametrize("stated", [{}, {"modules": None}])
    def test_a_new_list_has_all_dense_modules_as_it_replaces_a_default(
        self, quantized: tuple[xr.Dataset, str], stated: dict[str, Any], is_tied: bool
    ) -> None:
        _, key = quantized
        declared = {k: v for k, v in config("q")["quantization_config"].items() if k != key}
        declared |= dict.fromkeys([key] if stated else [])
        tied = LLAMA | {"tie_word_embeddings": is_tied, "quantization_config": declared}
        Path("q/config.json").write_text(json.dumps(tied))
        if is_tied:
            xckpt.open("q", decode=False).drop_vars(HEAD).ckpt.save("tied.safetensors")
            Path("tied.safetensors").replace("q/model.safetensors")
        ds = xckpt.open("q")
        edited = ds.assign({f"{UP}.weight": ds[f"{UP}.weight"] * 2})
        text = rf"quantization_config\.{key}: 3 modules \(was not stated\)"
        with pytest.warns(CheckpointWarning, match=text):
            edited.ckpt.save("out/")
        listed = config("out")["quantization_config"][key]
        assert sorted(listed) == ["lm_head", "model.embed_tokens", UP]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*no longer declared")
            again = xckpt.open("out")
            again.assign({f"{UP}.weight": again[f"{UP}.weight"] * 2}).ckpt.save("again/")
        assert config("again") == config("out")

    @pytest.mark.parametrize(
        ("quantized", "dtype"), [("fp8", "bfloat16"), ("fp8", "float16")], indirect=["quantized"]
    )
    def test_a_merge_rounds_dense_weights_to_the_stated_type(
        self, quantized: tuple[xr.Dataset, str], dtype: str
    ) -> None:
        stated = config("q") | {"torch_dtype": dtype}
        Path("q/config.json").write_text(json.dumps(stated))
        ds, name = xckpt.open("q"), f"{UP}.weight"
        change = xr.full_like(ds[[name]].compute(), 0.1234567)
        merged = ds.ckpt.merge(change).ckpt.merge(change, scale=0.5)
        with pytest.warns(CheckpointWarning, match="no longer declared as quantised") as records:
            merged.ckpt.save("out/")
        assert "of another type" not in str(records[0].message)
        saved = xckpt.open("out", decode=False)[name]
        once = (ds[name] + change[name]).astype(dtype).astype("float32")
        np.testing.assert_array_equal(saved, (once + 0.5 * change[name]).astype(dtype))
        assert saved.dtype == dtype
        wide = {name: {"dtype": "float32"}}
        with pytest.warns(CheckpointWarning, match="of another type"):
            merged.ckpt.save("wide/", encoding=wide, cast="allow")
        total = ds[name] + change[name] + np.float32(0.5) * change[name]
        np.testing.assert_array_equal(xckpt.open("wide")[name], total)
        Path("q/config.json").write_text(json.dumps(stated | {"torch_dtype": "float32"}))
        unstated = xckpt.open("q").ckpt.merge(change)
        with pytest.warns(CheckpointWarning, match="no longer declared as quantised"):
            unstated.ckpt.save("unstated/")
        np.testing.assert_array_equal(xckpt.open("unstated")[name], ds[name] + change[name])

    def test_a_model_of_codes_keeps_its_type(self, quantized: tuple[xr.Dataset, str]) -> None:
        stated = json.loads(Path("q/config.json").read_text()) | {"dtype": "float16"}
        Path("q/config.json").write_text(json.dumps(stated))
        ds = xckpt.open("q")
        changed = [n for n in ds if ".layers.0." in str(n) and str(n).endswith(".weight")]
        is_kept = config("q")["quantization_config"]["quant_method"] == "bitsandbytes"
        use = "does not convert them to, beside bitsandbytes" if is_kept else "converts them to"
        remedy = r"encoding=\{name: \{'dtype': 'float16'\}\}, cast='allow' writes float16"
        edited = ds.assign({name: ds[name] * 2 for name in changed})
        text = f"of another type than float16 of config.json, which transformers {use} "
        with pytest.warns(CheckpointWarning, match=rf"{text}\({remedy}.*down_proj\.weight float32"):
            edited.ckpt.save("out/")
        assert config("out")["dtype"] == "float16"
        encoding = {str(name): {"dtype": "float16"} for name in changed}
        with pytest.warns(CheckpointWarning, match="no longer declared") as records:
            edited.ckpt.save("half/", encoding=encoding, cast="allow")
        assert "of another type" not in str(records[0].message)
        with pytest.warns(CheckpointWarning, match="no longer declared as quantised"):
            (ds * 2).ckpt.save("dense/")
        assert config("dense")["dtype"] == "float32"

    def test_dense_weights_have_no_declaration(self, quantized: tuple[xr.Dataset, str]) -> None:
        text = "values were computed are written dense, and no longer declared as quantised: .model"
        with pytest.warns(CheckpointWarning, match=text):
            (quantized[0] * 2).ckpt.save("out/")
        assert "quantization_config" not in config("out")

    def test_a_config_that_cannot_exclude_modules_is_left_out(
        self, quantized: tuple[xr.Dataset, str]
    ) -> None:
        ds, key = quantized
        declared = config("q")["quantization_config"] | {key: "lm_head"}
        Path("q/config.json").write_text(json.dumps(LLAMA | {"quantization_config": declared}))
        edited = ds.assign({f"{UP}.weight": ds[f"{UP}.weight"] * 2})
        text = r"no place for weights that are dense \(encoding=.*'dense'.*\): 'model"
        with pytest.warns(CheckpointWarning, match=text):
            edited.ckpt.save("out/")
        assert "config.json" not in names("out")
        with pytest.warns(CheckpointWarning, match="no longer declared as quantised"):
            edited.ckpt.save("dense/", encoding={"*": {"layout": "dense"}})
        assert "quantization_config" not in config("dense")
        np.testing.assert_array_equal(xckpt.open("dense")[f"{UP}.weight"], edited[f"{UP}.weight"])


TOWERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "t5": (
        {"model_type": "t5", "num_layers": 3, "num_decoder_layers": 3},
        [f"{side}.block.{{}}.layer.0.SelfAttention.q.weight" for side in ("encoder", "decoder")],
    ),
    "whisper": (
        {"model_type": "whisper", "encoder_layers": 3, "decoder_layers": 3},
        [f"model.{side}.layers.{{}}.self_attn.q_proj.weight" for side in ("encoder", "decoder")],
    ),
    "distilbert": (
        {"model_type": "distilbert", "n_layers": 3},
        ["distilbert.transformer.layer.{}.attention.q_lin.weight"],
    ),
    "clip": (
        {
            "model_type": "clip",
            "text_config": {"num_hidden_layers": 3},
            "vision_config": {"num_hidden_layers": 3},
        },
        [f"{t}_model.encoder.layers.{{}}.self_attn.q_proj.weight" for t in ("text", "vision")],
    ),
}


VIT = {"model_type": "vit", "image_size": 8, "patch_size": 2, "num_channels": 3, "hidden_size": 8}
PATCHES, PLACES = "embeddings.patch_embeddings.projection.weight", "embeddings.position_embeddings"
OF_VIT = {PATCHES: (8, 3, 2, 2), PLACES: (1, 17, 8)}
CLIP = {
    "model_type": "clip", "projection_dim": 6,
    "text_config": {"hidden_size": 8, "max_position_embeddings": 7, "projection_dim": 6},
    "vision_config": {"hidden_size": 8, "image_size": 8, "patch_size": 2},
}  # fmt: skip
OF_CLIP = {
    "text_projection.weight": (6, 8), "visual_projection.weight": (6, 8),
    "text_model.embeddings.position_embedding.weight": (7, 8),
    "vision_model.embeddings.position_embedding.weight": (17, 8),
}  # fmt: skip
LARGER = {"hidden_size": 8, "image_size": 16, "patch_size": 2}
HEADS = {
    "model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
OF_HEADS = {f"model.layers.0.self_attn.{name}_proj.weight": (8, 16) for name in "kv"}
BERT = {"model_type": "bert", "hidden_size": 8, "type_vocab_size": 2}
TYPES = "bert.embeddings.token_type_embeddings.weight"
UNET = {"_class_name": "UNet2DConditionModel", "in_channels": 4, "block_out_channels": [8, 16]}
OF_UNET = {
    "conv_in.weight": (8, 4, 3, 3), "down_blocks.0.resnets.0.conv1.weight": (8, 8, 3, 3),
    "down_blocks.1.resnets.0.conv1.weight": (16, 8, 3, 3),
    "mid_block.resnets.0.conv1.weight": (16, 16, 3, 3),
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "d_model": 6, "max_source_positions": 12, "max_target_positions": 9,
    "num_mel_bins": 5,
}  # fmt: skip
OF_WHISPER = {
    "model.encoder.embed_positions.weight": (12, 6),
    "model.decoder.embed_positions.weight": (9, 6),
    "model.encoder.conv1.weight": (6, 5, 3),
}
BART = {"model_type": "bart", "d_model": 6, "max_position_embeddings": 9}
OF_BART = {f"model.{part}.embed_positions.weight": (11, 6) for part in ("encoder", "decoder")}
#: A config, the shapes of tensors, and an edit of the config that contradicts them.
WRONG: dict[str, tuple[dict[str, Any], Any, dict[str, Any], str]] = {
    "patch": (VIT, OF_VIT, {"patch_size": 4}, "patch_size 4: the tensors have 2.*"),
    "image": (
        VIT, OF_VIT, {"image_size": 16},
        "image_size 16 and patch_size 2: the tensors have 17 instead of 65",
    ),
    "channels": (VIT, OF_VIT, {"num_channels": 1}, "num_channels 1: the tensors have 3"),
    "image of a tower": (
        CLIP, OF_CLIP, {"vision_config": LARGER},
        r"vision_config\.image_size 16 and vision_config\.patch_size 2: .* 17 instead of 65",
    ),
    "projection": (CLIP, OF_CLIP, {"projection_dim": 4}, "projection_dim 4: the tensors have 6"),
    "heads": (
        HEADS, OF_HEADS, {"num_key_value_heads": 4},
        "num_key_value_heads 4 and .*: the tensors have 8 instead of 16",
    ),
    "types": (BERT, {TYPES: (2, 8)}, {"type_vocab_size": 1}, "type_vocab_size 1: .* have 2"),
    "widths": (
        UNET, OF_UNET, {"block_out_channels": [8, 32]},
        r"block_out_channels \[8, 32\]: the tensors have 16 instead of 32",
    ),
    "inputs": (UNET, OF_UNET, {"in_channels": 9}, "in_channels 9: the tensors have 4"),
    "positions of the source": (
        WHISPER, OF_WHISPER, {"max_source_positions": 8}, "max_source_positions 8: .* have 12",
    ),
}  # fmt: skip
#: A config, the shapes of tensors, and an edit of the config with the shapes of new tensors.
RIGHT: dict[str, tuple[dict[str, Any], Any, dict[str, Any], Any]] = {
    "image": (VIT, OF_VIT, {"image_size": 16}, {PLACES: (1, 65, 8)}),
    "patch": (VIT, OF_VIT, {"patch_size": 4}, {PATCHES: (8, 3, 4, 4), PLACES: (1, 5, 8)}),
    "channels": (VIT, OF_VIT, {"num_channels": 1}, {PATCHES: (8, 1, 2, 2)}),
    "image of a tower": (
        CLIP, OF_CLIP, {"vision_config": LARGER},
        {"vision_model.embeddings.position_embedding.weight": (65, 8)},
    ),
    "projection": (
        CLIP, OF_CLIP, {"projection_dim": 4},
        {f"{kind}_projection.weight": (4, 8) for kind in ("text", "visual")},
    ),
    "heads": (HEADS, OF_HEADS, {"num_key_value_heads": 1}, dict.fromkeys(OF_HEADS, (4, 16))),
    "types": (BERT, {TYPES: (2, 8)}, {"type_vocab_size": 1}, {TYPES: (1, 8)}),
    "inputs": (UNET, OF_UNET, {"in_channels": 9}, {"conv_in.weight": (8, 9, 3, 3)}),
    "positions of the source": (
        WHISPER, OF_WHISPER, {"max_source_positions": 8},
        {"model.encoder.embed_positions.weight": (8, 6)},
    ),
    "positions of the target": (
        WHISPER, OF_WHISPER, {"max_target_positions": 5},
        {"model.decoder.embed_positions.weight": (5, 6)},
    ),
    "bins": (
        WHISPER, OF_WHISPER, {"num_mel_bins": 4}, {"model.encoder.conv1.weight": (6, 4, 3)}
    ),
    "positions beside others": (
        BART, OF_BART, {"max_position_embeddings": 5}, dict.fromkeys(OF_BART, (7, 6)),
    ),
}  # fmt: skip


def swapped(ds: xr.Dataset) -> xr.Dataset:
    """Return a mixture with its first two experts in the place of each other."""
    other = {"experts.0.": "experts.1.", "experts.1.": "experts.0."}
    new = {
        str(name): str(name).replace(old, other[old])
        for name in ds
        for old in other
        if old in str(name)
    }
    return ds.assign({new[name]: ds[name] for name in new})


class TestSizesOfParts:
    """A size is corrected by the tensors that its key is about, and by all of them."""

    @staticmethod
    def write(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        rng = np.random.default_rng(0)
        tensors = {name: rng.random(shape, "f4") for name, shape in shapes.items()}
        xckpt.save(tensors, "base/model.safetensors", overwrite=True)
        Path("base/config.json").write_text(json.dumps(config))
        Path("base/tokenizer.json").unlink()

    @pytest.mark.parametrize(("stated", "stacks"), TOWERS.values(), ids=TOWERS)
    def test_layers_are_corrected_in_all_towers(
        self, stated: dict[str, Any], stacks: list[str]
    ) -> None:
        self.write(stated, {stack.format(n): (8, 8) for stack in stacks for n in range(3)})
        ds = xckpt.open("base")
        with pytest.warns(CheckpointWarning, match=r"2 \(was 3\)"):
            ds.drop_vars([stack.format(2) for stack in stacks]).ckpt.save("out/")
        assert config("out") == json.loads(json.dumps(stated).replace("3", "2"))

    @pytest.mark.parametrize(("stated", "stacks"), TOWERS.values(), ids=TOWERS)
    def test_layers_of_one_tower_leave_the_others(
        self, stated: dict[str, Any], stacks: list[str]
    ) -> None:
        self.write(stated, {stack.format(n): (8, 8) for stack in stacks for n in range(3)})
        ds = xckpt.open("base")
        with pytest.warns(CheckpointWarning, match=r"2 \(was 3\)"):
            ds.drop_vars([stacks[-1].format(2)]).ckpt.save("out/")
        assert json.dumps(config("out")).count("3") == len(stacks) - 1

    @pytest.mark.parametrize(("stated", "stacks"), TOWERS.values(), ids=TOWERS)
    def test_layers_of_one_tower_are_renumbered_as_the_warning_says(
        self, stated: dict[str, Any], stacks: list[str]
    ) -> None:
        self.write(stated, {stack.format(n): (8, 8) for stack in stacks for n in range(3)})
        ds = xckpt.open("base").drop_vars([stacks[-1].format(1)])
        with pytest.warns(CheckpointWarning, match="layers 0, 2") as record:
            ds.ckpt.save("gap/")
        advice = re.search(r"opened with stack=(.+?), (ds\..+) renumbers", str(record[0].message))
        assert advice is not None
        stacked = ds.ckpt.stack(ast.literal_eval(advice[1]))
        with pytest.warns(CheckpointWarning, match=r"2 \(was 3\)"):
            eval(advice[2], {"ds": stacked}).ckpt.save("out/")  # noqa: S307  our message
        assert json.dumps(config("out")).count("3") == len(stacks) - 1

    @pytest.mark.parametrize(("stated", "stacks"), TOWERS.values(), ids=TOWERS)
    def test_edited_numbers_of_layers_are_those_of_the_tensors(
        self, stated: dict[str, Any], stacks: list[str]
    ) -> None:
        self.write(stated, {stack.format(n): (8, 8) for stack in stacks for n in range(3)})
        ds, text = xckpt.open("base"), json.dumps(stated)
        edited = json.loads("4".join(text.rsplit("3", 1)))
        key = text.rsplit('"', 2)[1]
        with pytest.warns(CheckpointWarning, match=f"{key} 4: the tensors have 3: 'config"):
            ds.assign_attrs(config=edited).ckpt.save("out/")
        assert names_without_config("out")
        edited = json.loads("2".join(text.rsplit("3", 1)))
        shorter = ds.drop_vars([stacks[-1].format(2)])
        shorter.assign_attrs(config=edited).ckpt.save("shorter/")
        assert config("shorter") == edited

    def towers(self) -> tuple[xr.Dataset, dict[str, Any]]:
        """Return CLIP with a narrower vision tower of another file, and its config."""
        text = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
        vision = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 3}
        stated = {"model_type": "clip", "projection_dim": 6, "text_config": text}

        def shapes(tower: str, layers: int, width: int) -> dict[str, tuple[int, ...]]:
            stem = f"{tower}_model.encoder.layers.{{}}.{{}}_proj.weight"
            modules = [f"self_attn.{kind}" for kind in ("q", "k", "v", "out")]
            names = [stem.format(n, module) for n in range(layers) for module in modules]
            widths: dict[str, tuple[int, ...]] = {
                f"{tower}_model.final_layer_norm.weight": (width,)
            }
            projection = {"text": "text", "vision": "visual"}[tower]
            widths |= {f"{projection}_projection.weight": (6, width)}
            return {**dict.fromkeys(names, (width, width)), **widths}

        self.write(stated | {"vision_config": text}, shapes("text", 2, 8) | shapes("vision", 2, 8))
        rng = np.random.default_rng(1)
        Path("tower").mkdir()
        other = {name: rng.random(s, "f4") for name, s in shapes("vision", 3, 4).items()}
        xckpt.save(other, "tower/model.safetensors")
        Path("tower/config.json").write_text(json.dumps({"model_type": "clip_vision"} | vision))
        ds, tower = xckpt.open("base"), xckpt.open("tower")
        ds = ds.drop_vars([name for name in ds if str(name).startswith("vis")])
        ds = ds.assign(tower.rename({dim: f"vision.{dim}" for dim in tower.dims}).data_vars)
        return ds, stated | {"vision_config": vision}

    @pytest.mark.parametrize(
        "load",
        [
            lambda ds: ds,
            lambda ds: ds.compute(),
            lambda ds: ds.drop_encoding(),
            lambda ds: ds.drop_encoding().compute(),
        ],
        ids=["lazy", "computed", "no encoding", "in memory"],
    )
    @pytest.mark.filterwarnings("ignore:.*from the attributes", "ignore:.*have other values")
    def test_sizes_of_towers_are_those_of_their_tensors(self, load: Any) -> None:
        ds, stated = self.towers()
        load(ds.assign_attrs(config=stated)).ckpt.save("out/")
        assert config("out") == stated
        wide = stated["vision_config"] | {"hidden_size": 8}
        with pytest.warns(CheckpointWarning, match=r"vision_config\.hidden_size 8: .* have 4"):
            load(ds.assign_attrs(config=stated | {"vision_config": wide})).ckpt.save("wrong/")
        assert names_without_config("wrong")

    @pytest.mark.filterwarnings("ignore:.*from the attributes", "ignore:.*have other values")
    def test_parts_of_a_composed_model_have_sizes_of_their_own(self) -> None:
        stated = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1}
        stem = "encoder.layer.0.attention.attention.query.weight"
        self.write(stated, OF_VIT | {stem: (8, 8)})
        decoder = {"model_type": "gpt2", "n_embd": 6, "n_positions": 9, "n_layer": 2}
        shapes = {"transformer.wte.weight": (20, 6), "transformer.wpe.weight": (9, 6)}
        shapes |= {f"transformer.h.{n}.attn.c_attn.weight": (6, 18) for n in range(2)}
        Path("gpt2").mkdir()
        tensors = {name: np.ones(shape, "f4") for name, shape in shapes.items()}
        xckpt.save(tensors, "gpt2/model.safetensors")
        Path("gpt2/config.json").write_text(json.dumps(decoder))
        first, second = xckpt.open("base"), xckpt.open("gpt2")
        first = first.rename({name: f"encoder.{name}" for name in first})
        first = first.rename({dim: f"v_{dim}" for dim in first.dims})
        second = second.rename({name: f"decoder.{name}" for name in second})
        whole = {"model_type": "encoder-decoder", "encoder": stated, "decoder": decoder}
        both = first.assign(second.data_vars)
        for n, ds in enumerate((both, both.drop_encoding(), both.compute())):
            ds.assign_attrs(config=whole).ckpt.save(f"{n}/")
            assert config(str(n)) == whole

    def test_edited_labels_are_those_of_the_classifier(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {
            "bert.encoder.layer.0.attention.self.query.weight": (8, 8),
            "classifier.weight": (3, 8),
            "classifier.bias": (3,),
        }
        stated: dict[str, Any] = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2}
        labels = {
            "id2label": dict(zip("012", "abc", strict=True)),
            "label2id": {"a": 0, "b": 1, "c": 2},
        }
        self.write(stated | labels, shapes)
        ds = xckpt.open("base")
        edits: tuple[dict[str, Any], ...] = ({"id2label": {"0": "a", "1": "b"}}, {"num_labels": 4})
        for n, edit in enumerate(edits):
            ((key, value),) = edit.items()
            count = value if isinstance(value, int) else len(value)
            with pytest.warns(CheckpointWarning, match=f"{key} {count}: the classifier has 3 rows"):
                ds.assign_attrs(config=stated | labels | edit).ckpt.save(f"{n}/")
            assert names_without_config(str(n))
        renamed = {"id2label": dict(zip("012", "xyz", strict=True))}
        ds.assign_attrs(config=stated | labels | renamed).ckpt.save("renamed/")
        both = renamed | {"label2id": {"x": 0, "y": 1, "z": 2}}
        assert config("renamed") == stated | both
        ds.assign_attrs(config=stated | both).ckpt.save("both/")
        assert config("both") == stated | both
        ds.assign_attrs(config=stated | labels | {"label2id": both["label2id"]}).ckpt.save("named/")
        assert config("named") == stated | both
        contradiction: dict[str, Any] = {
            "id2label": both["id2label"],
            "label2id": {"x": 1, "y": 0, "z": 2},
        }
        twice: dict[str, Any] = {"id2label": {"0": "x", "1": "x", "2": "y"}}
        for n, edit in enumerate((contradiction, twice)):
            with pytest.warns(CheckpointWarning, match="an edit contradicts"):
                ds.assign_attrs(config=stated | labels | edit).ckpt.save(f"contradicted-{n}/")

    def test_classes_in_sections_of_timm_are_those_of_the_classifier(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {
            "layer1.0.conv1.weight": (8, 3, 3, 3),
            "fc.weight": (5, 8),
            "fc.bias": (5,),
        }

        def stated(*counts: int) -> dict[str, Any]:
            names = ("model_args", "pretrained_cfg")
            model, *sections = [{"num_classes": count} for count in counts]
            return {"architecture": "resnet10t"} | model | dict(zip(names, sections, strict=True))

        self.write(stated(5, 5, 5), shapes)
        ds = xckpt.open("base").drop_vars(["fc.weight", "fc.bias"])
        new = xr.DataArray(np.zeros((4, 8), "f4"), dims=("label", "in_8"))
        ds = ds.assign({"fc.weight": new, "fc.bias": new[:, 0]})
        text = r"'model_args.num_classes: 4 \(was 5\)', 'pretrained_cfg.num_classes: 4 \(was 5\)'"
        with pytest.warns(CheckpointWarning, match=f"config.json has new values.*{text}"):
            ds.assign_attrs(config=stated(4, 5, 5)).ckpt.save("out/")
        assert config("out") == stated(4, 4, 4)
        ds.assign_attrs(config=stated(4, 4, 4)).ckpt.save("all/")
        assert config("all") == stated(4, 4, 4)
        wrong = stated(4, 3, 5)
        text = "model_args.num_classes 3: the classifier has 4 rows"
        for n, model in enumerate((ds, ds.compute(), ds.drop_encoding().compute())):
            with pytest.warns(CheckpointWarning, match=text):
                model.assign_attrs(config=wrong).ckpt.save(f"{n}/")
            assert names_without_config(str(n))

    @staticmethod
    def images(
        first: str, channels: int = 3, size: Any = 64, args: tuple[str, ...] = ("in_chans",)
    ) -> dict[str, Any]:
        """Return a config of timm."""
        square = [size, size] if isinstance(size, int) else size
        stated = {"in_chans": channels, "img_size": square, "depth": 2}
        return {
            "architecture": "vit_tiny_patch16_224",
            "model_args": {key: stated[key] for key in (*args, "depth")},
            "pretrained_cfg": {"input_size": [channels, *square], "first_conv": first},
        }

    @staticmethod
    def in_grey(ds: xr.Dataset, name: str) -> xr.Dataset:
        """Return a model whose first convolution reads one channel."""
        weight = ds[name]
        grey = weight.sum(str(weight.dims[1]), keepdims=True)
        return ds.drop_vars(name).assign({name: grey})

    @pytest.mark.parametrize("args", [("in_chans", "img_size"), ()])
    @pytest.mark.parametrize("edit", [None, "model_args", "pretrained_cfg", "both"])
    def test_channels_of_timm_are_those_of_the_first_convolution(
        self, args: tuple[str, ...], edit: str | None
    ) -> None:
        old, new = (self.images("stem.0", channels, args=args) for channels in (3, 1))
        self.write(old, {"stem.0.weight": (8, 3, 4, 4), "stem.1.weight": (8,), "fc.weight": (5, 8)})
        ds = self.in_grey(xckpt.open("base"), "stem.0.weight")
        stated = old | ({edit: new[edit]} if edit in new else {})
        ds = ds.assign_attrs(config=new if edit == "both" else stated)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            ds.ckpt.save("out/")
        assert config("out") == new
        texts = [str(warning.message) for warning in caught]
        is_corrected = any("pretrained_cfg.input_size: [1, 64, 64]" in text for text in texts)
        assert is_corrected == (edit not in {"pretrained_cfg", "both"})
        wrong = self.images("stem.0", 4)
        for n, model in enumerate((ds, ds.compute(), ds.drop_encoding().compute())):
            with pytest.warns(
                CheckpointWarning, match=r"model_args\.in_chans 4: the tensors have 1"
            ):
                model.assign_attrs(config=wrong).ckpt.save(f"{n}/")
            assert names_without_config(str(n))

    def test_another_first_convolution_of_timm_is_no_matter_of_channels(self) -> None:
        self.write(self.images("stem.0"), {"stem.0.weight": (8, 3, 4, 4), "fc.weight": (5, 8)})
        ds = xckpt.open("base")
        other = xr.DataArray(np.ones((8, 3, 3, 3), "f4"), dims=ds["stem.0.weight"].dims)
        with pytest.warns(CheckpointWarning, match=r"other shapes than before: 'stem\.0\.weight'"):
            ds.drop_vars("stem.0.weight").assign({"stem.0.weight": other}).ckpt.save("out/")
        assert names_without_config("out")

    @pytest.mark.parametrize("extra", [0, 1, 5])
    @pytest.mark.parametrize("args", [("img_size",), ()])
    @pytest.mark.parametrize("size", [96, [96, 128]])
    def test_a_stated_size_of_images_of_timm_is_that_of_the_positions(
        self, extra: int, args: tuple[str, ...], size: Any
    ) -> None:
        old, new = (self.images("patch_embed.proj", 3, n, args) for n in (64, size))
        shapes = {"patch_embed.proj.weight": (8, 3, 16, 16), "pos_embed": (1, 16 + extra, 8)}
        self.write(old, shapes)
        count = 36 if size == 96 else 48
        ds = xckpt.open("base")
        table = xr.DataArray(np.ones((1, count + extra, 8), "f4"), dims=ds["pos_embed"].dims)
        resized = ds.drop_vars("pos_embed").assign(pos_embed=table)
        text = r"other shapes than before: 'pos_embed' .*; see 'model_args.img_size'"
        with pytest.warns(CheckpointWarning, match=text):
            resized.assign_attrs(config=old | {"img_size": size}).ckpt.save("unstated/")
        assert names_without_config("unstated")
        resized.assign_attrs(config=new).ckpt.save("both/")
        assert config("both") == new
        text = r"input_size: \[3, 96, .*\(was \[3, 64, 64\]\)"
        stated = old["model_args"] | {"img_size": size}
        with pytest.warns(CheckpointWarning, match=text):
            resized.assign_attrs(config=old | {"model_args": stated}).ckpt.save("stated/")
        assert config("stated") == new | {"model_args": stated}
        for n, model in enumerate((ds, resized)):  # both have other numbers of positions
            wrong = old | {"model_args": old["model_args"] | {"img_size": [160, 160]}}
            with pytest.warns(CheckpointWarning, match=rf"have \d+ instead of {100 + extra}"):
                model.assign_attrs(config=wrong).ckpt.save(f"{n}/")
            assert names_without_config(str(n))

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
    def test_timm_loads_models_of_other_images(self, name: str) -> None:
        timm: Any = pytest.importorskip("timm")
        is_vit = name.startswith("vit")
        args = {"depth": 1, "embed_dim": 48, "num_heads": 3, "img_size": 64} if is_vit else {}
        model = timm.create_model(name, num_classes=7, **args)
        timm.models.save_for_hf(model, "timm", model_args=args, safe_serialization=True)
        first = "patch_embed.proj.weight" if is_vit else "conv1.0.weight"
        ds = self.in_grey(xckpt.open("timm"), first)
        if is_vit:
            positions = ("one", "pos", "embd"), np.zeros((1, 37, 48), "f4")
            ds = ds.drop_vars("pos_embed").assign(pos_embed=positions)
            ds.attrs["config"]["model_args"]["img_size"] = 96
        ds.ckpt.save("out/")
        loaded = timm.create_model("local-dir:out", pretrained=True).state_dict()
        assert loaded[first].shape[1] == 1
        np.testing.assert_array_equal(loaded[first].numpy(), ds[first].values)
        assert not is_vit or loaded["pos_embed"].shape == (1, 37, 48)

    def test_layers_that_xarray_filled_are_named_with_the_call_that_keeps_stacks_apart(
        self,
    ) -> None:
        stated = {"model_type": "bart", "encoder_layers": 3, "decoder_layers": 3, "d_model": 8}
        stacks = [f"model.{part}.layers.{{}}.fc1.weight" for part in ("encoder", "decoder")]
        self.write(stated, {stack.format(n): (16, 8) for stack in stacks for n in range(3)})
        ds = xckpt.open("base", stack=True)
        decoder = [name for name in ds if "decoder" in str(name)]
        part = ds[decoder].isel(layers=[0, 2])
        with pytest.warns(CheckpointWarning, match=r"128 .*NaN.*\(\.ckpt\.unstack\(\) of both"):
            ds.drop_vars(decoder).assign(part.data_vars).ckpt.save("filled/")
        part = part.assign_coords(layers=range(2)).ckpt.unstack()
        with pytest.warns(CheckpointWarning, match=r"'decoder_layers: 2 \(was 3\)'$"):
            ds.drop_vars(decoder).ckpt.unstack().assign(part.data_vars).ckpt.save("out/")

    def test_numbers_of_tokens_are_no_values_of_layers(self) -> None:
        stated = {"model_type": "whisper", "encoder_layers": 2, "begin_suppress_tokens": [220, 50]}
        stack = "model.encoder.layers.{}.self_attn.q_proj.weight"
        self.write(stated, {stack.format(n): (8, 8) for n in range(2)})
        with pytest.warns(CheckpointWarning, match=r"'encoder_layers: 1 \(was 2\)'"):
            xckpt.open("base").drop_vars(stack.format(1)).ckpt.save("out/")
        assert config("out") == {**stated, "encoder_layers": 1}

    @pytest.mark.parametrize("labels", [2, 3, 4])
    def test_labels_are_no_layers_and_no_heads(self, labels: int) -> None:
        """Their number may be that of another size."""
        sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 16}
        names = {str(n): f"LABEL_{n}" for n in range(labels)}
        layers = {f"bert.encoder.layer.{n}.attention.self.query.weight": (16, 16) for n in range(3)}
        head = {"classifier.weight": (labels, 16), "classifier.bias": (labels,)}
        self.write({"model_type": "bert", "id2label": names, **sizes}, layers | head)
        ds = xckpt.open("base")
        new = xr.DataArray(np.zeros((5, 16), "f4"), dims=ds["classifier.weight"].dims)
        ds = ds.drop_vars([*head]).assign({"classifier.weight": new, "classifier.bias": new[:, 0]})
        with pytest.warns(CheckpointWarning, match=r"classifier\.weight.*; see 'id2label'"):
            ds.ckpt.save("out/")
        assert names_without_config("out")

    def test_labels_that_the_old_config_leaves_out(self) -> None:
        """Of two labels transformers states nothing."""
        stated = {"model_type": "bert", "hidden_size": 16}
        layer = {"bert.encoder.layer.0.attention.self.query.weight": (16, 16)}
        self.write(stated, {**layer, "classifier.weight": (2, 16), "classifier.bias": (2,)})
        ds = xckpt.open("base")
        new = xr.DataArray(np.zeros((3, 16), "f4"), dims=ds["classifier.weight"].dims)
        head = {"classifier.weight": new, "classifier.bias": new[:, 0]}
        ds = ds.drop_vars([*head]).assign(head)
        with pytest.warns(CheckpointWarning, match=r"see 'id2label', 'label2id'"):
            ds.ckpt.save("out/")
        names = dict(zip("012", "abc", strict=True))
        numbers = {name: int(number) for number, name in names.items()}
        edited = {**ds.attrs["config"], "id2label": names, "label2id": numbers}
        ds.assign_attrs(config=edited).ckpt.save("out/", overwrite=True)
        assert config("out") == edited
        wrong = {**ds.attrs["config"], "id2label": {"0": "a"}}
        with pytest.warns(CheckpointWarning, match=r"not copied .* as "):
            ds.assign_attrs(config=wrong).ckpt.save("other/")
        assert names_without_config("other")

    @pytest.mark.parametrize(
        "move",
        [
            lambda ds: ds.isel(label=[2, 1, 0]),
            lambda ds: ds.isel(label=slice(None, None, -1)) * 2,
            lambda ds: ds.roll(label=1),
            lambda ds: ds.isel(label=[2, 1, 0]).compute(),
            lambda ds: ds.load().isel(label=[2, 1, 0]),
        ],
        ids=["list", "backwards", "roll", "computed", "loaded"],
    )
    def test_names_of_labels_in_another_order_are_left_out(self, move: Any) -> None:
        by_number = {str(n): name for n, name in enumerate("abc")}
        stated = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2}
        shapes: dict[str, tuple[int, ...]] = {
            "bert.encoder.layer.0.attention.self.query.weight": (8, 8),
            "classifier.weight": (3, 8),
            "classifier.bias": (3,),
        }
        self.write({**stated, "id2label": by_number}, shapes)
        ds = xckpt.open("base")
        text = "the labels are in another order than in 'id2label'"
        with pytest.warns(CheckpointWarning, match=text):
            move(ds).ckpt.save("out/")
        assert names_without_config("out")
        ds.isel(label=[0, 1, 2]).ckpt.save("same/")
        (ds * 2).ckpt.save("scaled/")
        edited = {**config("base"), "id2label": dict(zip("012", "cba", strict=True))}
        ds.isel(label=[2, 1, 0]).assign_attrs(config=edited).ckpt.save("edited/")
        assert all("config.json" in names(place) for place in ("same", "scaled", "edited"))

    def test_experts_that_are_gone_are_named_with_their_key(self) -> None:
        module = "model.layers.{}.block_sparse_moe"
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(2):
            shapes[f"{module.format(layer)}.gate.weight"] = (4, 8)
            for expert in range(4):
                shapes[f"{module.format(layer)}.experts.{expert}.w1.weight"] = (16, 8)
        sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "hidden_size": 8}
        self.write({"model_type": "mixtral", **sizes}, shapes)
        ds = xckpt.open("base")
        text = "num_local_experts 4: the tensors lack experts 2, 3"
        with pytest.warns(CheckpointWarning, match=f"not copied from base/, as {text}"):
            ds.drop_vars([n for n in ds if ".2.w1" in str(n) or ".3.w1" in str(n)]).ckpt.save(
                "out/"
            )
        assert names_without_config("out")

    def write_mixture(self, *, is_stacked: bool) -> list[str]:
        """Write a mixture of four experts in two layers; return the names of its routers."""
        shapes: dict[str, tuple[int, ...]] = {TABLE: (32, 8), NORM: (8,), HEAD: (32, 8)}
        for layer in range(2):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.{name}.weight": shape
                for name, shape in SHAPES.items()
                if "mlp" not in name
            }
            shapes[f"{prefix}.mlp.gate.weight"] = (4, 8)
            if is_stacked:
                shapes[f"{prefix}.mlp.experts.gate_up_proj"] = (4, 24, 8)
                shapes[f"{prefix}.mlp.experts.down_proj"] = (4, 8, 12)
                continue
            for expert in range(4):
                for name, shape in (("gate", (12, 8)), ("up", (12, 8)), ("down", (8, 12))):
                    shapes[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = shape
        sizes = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 12}
        self.write(LLAMA | {"model_type": "qwen3_moe", **sizes}, shapes)
        return [name for name in shapes if name.endswith("gate.weight")]

    @pytest.mark.parametrize(
        ("is_stacked", "move"),
        [
            (False, lambda ds: ds.isel(expert=[1, 0, 2, 3])),
            (False, lambda ds: ds.roll(expert=1)),
            (False, swapped),
            (False, lambda ds: swapped(ds) * 2),
            (True, lambda ds: ds.assign(ds.ckpt.find("*gate.weight").roll(expert=1).data_vars)),
            (True, lambda ds: ds.assign(ds.ckpt.find("*experts*").roll(expert=1).data_vars)),
        ],
        ids=["selected", "rolled", "renamed", "scaled", "routers", "experts"],
    )
    def test_routers_in_another_order_than_the_experts_are_named(
        self, is_stacked: bool, move: Any
    ) -> None:
        self.write_mixture(is_stacked=is_stacked)
        moved = move(xckpt.open("base"))
        text = r"routers that are in another order than the experts: 'model\.layers\.0\.mlp\.gate"
        for target in ("out/", "out.safetensors"):
            with pytest.warns(CheckpointWarning, match=text):
                moved.ckpt.save(target)

    @pytest.mark.parametrize("is_stacked", [False, True])
    def test_routers_that_move_with_the_experts_are_no_warning(self, is_stacked: bool) -> None:
        routers = self.write_mixture(is_stacked=is_stacked)
        ds = xckpt.open("base")
        moved: xr.Dataset = ds.isel(expert=[1, 0, 2, 3])
        if not is_stacked:
            moved = swapped(ds).assign({name: moved[name] for name in routers})
        for number, result in enumerate((ds * 2, (ds + ds) / 2, moved, moved * 2)):
            result.ckpt.save(f"{number}/")
            assert "config.json" in names(str(number))

    @pytest.mark.parametrize("make", [lambda ds: ds, lambda ds: ds * 2, lambda ds: (ds + ds) / 2])
    def test_stacks_of_experts_and_their_routers_move_together(self, make: Any) -> None:
        self.write_mixture(is_stacked=False)
        ds, order = make(xckpt.open("base", stack=True)), [3, 1, 0, 2]
        both = ds.isel(experts=order, expert=order).assign_coords(experts=range(4))
        both.ckpt.save("both/")
        text = "rows of routers that are in another order than the experts"
        for dim in ("experts", "expert"):
            one = ds.isel({dim: order}).assign_coords(experts=range(4))
            with pytest.warns(CheckpointWarning, match=text):
                one.ckpt.save(f"{dim}/")

    @pytest.mark.parametrize("chosen", [[0, 2], [2, 3], [3, 1], [1], [3, 0, 1]])
    @pytest.mark.parametrize("factor", [1, 2])
    def test_routers_of_some_experts_are_those_of_the_experts(
        self, chosen: list[int], factor: int
    ) -> None:
        routers = self.write_mixture(is_stacked=False)
        ds = xckpt.open("base") * factor if factor > 1 else xckpt.open("base")
        places = {f"experts.{old}.": f"experts.{new}." for new, old in enumerate(chosen)}
        experts = {
            str(name).replace(old, places[old]): ds[name]
            for name in ds
            for old in places
            if old in str(name)
        }
        rest = ds.drop_vars([name for name in ds if ".experts." in str(name)])
        edited = ds.attrs["config"] | {"num_experts": len(chosen)}
        result = rest.assign(experts).assign_attrs(config=edited)
        moved = result.drop_vars(routers).assign(
            {name: ds[name].isel(expert=chosen) for name in routers}
        )
        moved.ckpt.save("out/")
        assert config("out") == edited
        text = "rows of routers that are in another order than the experts"
        stay = result.drop_vars(routers).assign(
            {name: ds[name].isel(expert=slice(len(chosen))) for name in routers}
        )
        with pytest.warns(CheckpointWarning, match=text):
            stay.ckpt.save("wrong/")

    def test_an_edited_number_of_experts_is_that_of_all(self) -> None:
        self.write_mixture(is_stacked=False)
        edited = config("base") | {"num_experts": 2}
        with pytest.warns(CheckpointWarning, match="num_experts 2: the tensors have 2 and 4"):
            xckpt.open("base").isel(expert=slice(2)).assign_attrs(config=edited).ckpt.save("out/")
        assert names_without_config("out")

    def test_a_width_without_a_value_is_named(self) -> None:
        names = [f"transformer.h.{n}.mlp.c_fc.weight" for n in range(2)]
        layers: dict[str, tuple[int, ...]] = dict.fromkeys(names, (8, 32))
        self.write({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_inner": None}, layers)
        with pytest.warns(CheckpointWarning, match=r"other shapes than before.*; see 'n_inner'"):
            xckpt.open("base").isel(ff=slice(16)).ckpt.save("out/")
        assert names_without_config("out")

    @pytest.mark.parametrize(("stated", "shapes", "edit", "text"), WRONG.values(), ids=WRONG)
    def test_edited_sizes_of_single_tensors_are_those_of_the_tensors(
        self, stated: dict[str, Any], shapes: Any, edit: dict[str, Any], text: str
    ) -> None:
        self.write(stated, shapes)
        ds = xckpt.open("base")
        with pytest.warns(CheckpointWarning, match=f"not copied from base/, as {text}: 'config"):
            ds.assign_attrs(config=stated | edit).ckpt.save("out/")
        assert names_without_config("out")
        ds.assign_attrs(config=stated | {"rope_theta": 5}).ckpt.save("other/")
        assert config("other") == stated | {"rope_theta": 5}

    @pytest.mark.parametrize(
        ("stated", "name", "text"),
        [
            ({"num_channels": 1}, "embeddings.patch_embeddings.projection", "num_channels 1: .* 3"),
            ({"patch_size": 4}, "embeddings.patch_embeddings.projection", "patch_size 4: .* 8"),
            ({"type_vocab_size": 1}, "embeddings.token_type_embeddings", "type_vocab_size 1: .* 2"),
        ],
        ids=["channels", "patches", "types of tokens"],
    )
    def test_sizes_of_single_tensors_in_memory_are_those_of_the_config(
        self, stated: dict[str, Any], name: str, text: str
    ) -> None:
        shapes = {"patch_embeddings": (4, 3, 8, 8), "token_type_embeddings": (2, 4)}
        shape = next(shape for word, shape in shapes.items() if word in name)
        tensors = {f"{name}.weight": np.ones(shape, "f4"), "norm.weight": np.ones(4, "f4")}
        right = {"num_channels": 3, "patch_size": 8, "type_vocab_size": 2}
        model = xckpt.open(tensors).assign_attrs(config={"model_type": "vit"} | right | stated)
        with pytest.warns(CheckpointWarning, match=f"not written, as {text}: 'config.json'"):
            model.ckpt.save("out/")
        with pytest.warns(CheckpointWarning, match="written from the attributes"):
            model.assign_attrs(config=right).ckpt.save("right/")

    def test_a_size_of_a_single_tensor_is_named_with_its_key(self) -> None:
        self.write(WHISPER, OF_WHISPER)
        ds = xckpt.open("base")
        with pytest.warns(CheckpointWarning, match=r"\(5, 6\)\); see 'max_target_positions'"):
            ds.isel(context=slice(5)).ckpt.save("out/")

    @pytest.mark.parametrize("is_stated", [False, True])
    def test_heads_have_the_size_that_the_config_implies(self, is_stated: bool) -> None:
        stated = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4,
                  "num_key_value_heads": 2}  # fmt: skip
        module = "model.layers.0.self_attn.{}_proj.weight"
        extents = {"q": (16, 16), "k": (8, 16), "v": (8, 16), "o": (16, 16)}
        self.write(stated, {module.format(kind): shape for kind, shape in extents.items()})
        ds = xckpt.open("base")
        half, first = slice(8), slice(4)
        key, value = ("head*key", "head_kv*key"), ("head*value", "head_kv*value")
        parts = {dim: half if "kv" not in dim else first for dim in (*key, *value)}
        pruned = ds.isel({dim: part for dim, part in parts.items() if dim in ds.dims})
        edited = stated | {"num_attention_heads": 2, "num_key_value_heads": 1}
        if is_stated:
            edited["head_dim"] = 4
            pruned.assign_attrs(config=edited).ckpt.save("out/")
            assert config("out") == edited
            return
        text = r"num_attention_heads 2 and head_dim 8: .* have 8 instead of 16 \(state head_dim"
        with pytest.warns(CheckpointWarning, match=text):
            pruned.assign_attrs(config=edited).ckpt.save("out/")
        assert names_without_config("out")
        twice = {"num_attention_heads": 8, "num_key_value_heads": 4}
        ds.assign_attrs(config=stated | twice).ckpt.save("other/")
        assert config("other") == stated | twice

    @pytest.mark.parametrize(("stated", "shapes", "edit", "new"), RIGHT.values(), ids=RIGHT)
    def test_edited_sizes_that_new_tensors_have_are_written(
        self, stated: dict[str, Any], shapes: Any, edit: dict[str, Any], new: Any
    ) -> None:
        self.write(stated, shapes)
        ds = xckpt.open("base")
        other = {n: xr.DataArray(np.ones(s, "f4"), dims=ds[n].dims) for n, s in new.items()}
        ds = ds.drop_vars([*new]).assign(other)
        ds.assign_attrs(config=stated | edit).ckpt.save("out/")
        assert config("out") == stated | edit
        with pytest.warns(CheckpointWarning, match="not copied from base/"):
            ds.assign_attrs(config=stated).ckpt.save("unedited/")
        assert names_without_config("unedited")


def write_tokens(folder: str, count: int, eos: int, **files: str) -> None:
    """Write a tokenizer of so many tokens, and other files of it."""
    vocabulary = {f"t{number}": number for number in range(32)}
    added = [{"id": number, "content": f"t{number}"} for number in range(32, count)]
    document = {"model": {"vocab": vocabulary}, "added_tokens": added}
    Path(folder, "tokenizer.json").write_text(json.dumps(document))
    settings = {"eos_token": {"content": f"t{eos}"}, "pad_token": "t0"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        Path(folder, f"{name}.jinja").write_text(text)


def text_of(folder: str, name: str = "tokenizer.json") -> str:
    return Path(folder, name).read_text()


@pytest.mark.usefixtures("models")
class TestTokenizers:
    """The tokenizer is that of the source whose tokens the table has."""

    @pytest.fixture(autouse=True)
    def tokenizers(self, models: None) -> None:
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        for name in ("a", "b"):
            Path(name, "config.json").write_text(json.dumps(LLAMA | tokens))
            generation = tokens | {"eos_token_id": [2, 5], "top_k": 3}
            Path(name, "generation_config.json").write_text(json.dumps(generation))
            write_tokens(name, 32, eos=2)
        Path("a/added_tokens.json").write_text("{}")
        write_tokens("lora", 34, eos=33, chat_template="new")

    @staticmethod
    def train_tables(rows: int) -> None:
        factors = {str(name): lora.values for name, lora in xckpt.open("lora").items()}
        tables = {f"base_model.model.{name}": np.ones((rows, 8), "f4") for name in (HEAD, TABLE)}
        xckpt.save(factors | tables, "lora/adapter_model.safetensors", overwrite=True)

    @pytest.mark.parametrize(
        "options", [{}, {"max_shard_size": 2000}, {"dtype": "bf16"}], ids=["one", "shards", "bf16"]
    )
    @pytest.mark.parametrize("rows", [34, 64])
    def test_trained_tables_have_that_of_the_adapter(
        self, rows: int, options: dict[str, Any]
    ) -> None:
        self.train_tables(rows)
        with pytest.warns(CheckpointWarning, match=r"from lora/ with 34 tokens.*eos_token_id: 33"):
            xckpt.open("a").ckpt.merge("lora").ckpt.save("out/", cast="allow", **options)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert text_of("out", name) == text_of("lora", name)
        assert "added_tokens.json" not in names("out")
        numbers = {"bos_token_id": 1, "eos_token_id": 33, "pad_token_id": 0}
        assert config("out").items() >= (numbers | {"vocab_size": rows}).items()
        generation = numbers | {"eos_token_id": [33, 5], "top_k": 3}
        assert json.loads(text_of("out", "generation_config.json")) == generation

    @pytest.mark.parametrize("load", [xr.Dataset.load, xr.Dataset.compute, copy.deepcopy])
    def test_trained_tables_in_memory_have_that_of_the_adapter(self, load: Any) -> None:
        self.train_tables(34)
        merged = load(xckpt.open("a").load().ckpt.merge(xckpt.open("lora").load()))
        with pytest.warns(CheckpointWarning, match=r"from lora/ with 34 tokens"):
            merged.ckpt.save("out/")
        assert text_of("out") == text_of("lora")

    def test_edited_numbers_stay(self) -> None:
        self.train_tables(34)
        merged = xckpt.open("a").ckpt.merge("lora")
        merged.attrs["config"]["eos_token_id"] = 32
        with pytest.warns(CheckpointWarning, match="from lora/"):
            merged.ckpt.save("out/")
        assert config("out")["eos_token_id"] == 32

    def test_equal_tokens_are_those_of_the_base(self) -> None:
        write_tokens("lora", 32, eos=2, chat_template="new")
        self.train_tables(32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            xckpt.open("a").ckpt.merge("lora").ckpt.save("out/")
        assert "added_tokens.json" in names("out")
        assert "chat_template.jinja" not in names("out")

    def test_tables_of_another_model_have_its_tokenizer_and_numbers(self) -> None:
        write_tokens("b", 33, eos=4, chat_template="b")
        document = json.loads(text_of("b"))
        document["model"]["vocab"] = {f"b{number}": number for number in range(31)}
        document["added_tokens"] = []
        Path("b/tokenizer.json").write_text(json.dumps(document))
        Path("b/config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 4, "pad_token_id": 3}))
        a, b = both()
        text = (
            r"from b/ with 31 tokens, beside a table of 32 rows: 'tokenizer\.json'; config.json has"
        )
        with pytest.warns(CheckpointWarning, match=text):
            a.assign({name: b[name] for name in (HEAD, TABLE)}).ckpt.save("out/")
        assert text_of("out", "chat_template.jinja") == "b"
        assert config("out")["eos_token_id"] == 4
        assert config("out")["pad_token_id"] == 3

    def test_tokens_in_unused_rows_are_those_of_the_adapter(self) -> None:
        for name in ("a", "lora"):
            document = json.loads(text_of(name))
            count = 30 if name == "a" else 32
            document["model"]["vocab"] = {f"t{number}": number for number in range(count)}
            document["added_tokens"] = []
            Path(name, "tokenizer.json").write_text(json.dumps(document))
        module = "base_model.model.model.embed_tokens"
        factors = {str(name): lora.values for name, lora in xckpt.open("lora").items()}
        factors |= {f"{module}.lora_embedding_A": np.ones((2, 32), "f4")}
        factors |= {f"{module}.lora_embedding_B": np.ones((8, 2), "f4")}
        xckpt.save(factors, "lora/adapter_model.safetensors", overwrite=True)
        adapter = json.loads(text_of("lora", "adapter_config.json"))
        adapter["target_modules"] += ["embed_tokens"]
        Path("lora/adapter_config.json").write_text(json.dumps(adapter))
        with pytest.warns(CheckpointWarning, match="from lora/ with 32 tokens"):
            xckpt.open("a").ckpt.merge("lora").ckpt.save("out/")
        assert text_of("out") == text_of("lora")

    def test_numbers_of_tokens_and_rows_are_named_where_it_is_unclear(self) -> None:
        document = json.loads(text_of("b"))
        del document["model"]["vocab"]["t31"]
        Path("b/tokenizer.json").write_text(json.dumps(document))
        text = r"from a/ with 32 tokens, beside a table of 32 rows.*'b/ another.* of 31 tokens'"
        with pytest.warns(CheckpointWarning, match=text):
            (total() / 2).ckpt.save("out/")
        assert text_of("out") == text_of("a")

    @pytest.mark.parametrize("is_stated", [False, True])
    def test_edited_numbers_are_also_those_of_generation(self, is_stated: bool) -> None:
        ds = xckpt.open("a")
        order = ds.isel(vocab=[*range(10, 30), 0, 1, 2, 5])
        stated = {"config": ds.attrs["config"] | {"bos_token_id": 21, "pad_token_id": 20}}
        stated["config"]["eos_token_id"] = [22, 23]
        stated |= {"generation_config": {"eos_token_id": [22, 23]}} if is_stated else {}
        with pytest.warns(CheckpointWarning) as caught:
            order.assign_attrs(stated).ckpt.save("out/")
        text = str(caught[0].message)
        named = "generation_config.json names tokens whose rows moved (state their new numbers in"
        assert (f"{named} attrs['generation_config']): 'eos_token_id: 2'" in text) != is_stated
        assert "'config.json names" not in text
        generation = json.loads(text_of("out", "generation_config.json"))
        numbers = {"bos_token_id": 21, "pad_token_id": 20, "top_k": 3}
        assert generation == numbers | {"eos_token_id": [22, 23] if is_stated else [2, 5]}
        assert "generation_config" not in xckpt.open("out").attrs

    def test_a_stated_config_of_generation_needs_no_file(self) -> None:
        Path("a/generation_config.json").unlink()
        xckpt.open("a").assign_attrs(generation_config={"top_k": 5}).ckpt.save("out/")
        assert json.loads(text_of("out", "generation_config.json")) == {"top_k": 5}

    def test_the_only_tokenizer_is_that_of_the_part_with_tokens(self) -> None:
        Path("b/tokenizer.json").unlink()
        Path("b/tokenizer_config.json").unlink()
        xckpt.save(
            llama(1) | {"tower.weight": np.ones((8, 8), "f4")},
            "b/model.safetensors",
            overwrite=True,
        )
        a, b = both()
        with pytest.warns(CheckpointWarning) as caught:
            b.assign({TABLE: a[TABLE], "new.weight": b["tower.weight"]}).ckpt.save("out/")
        assert "tokenizer is from" not in str(caught[0].message)
        assert text_of("out") == text_of("a")

    def test_a_tower_without_tokens_has_no_tokenizer(self) -> None:
        tensors = {f"vision_model.{n}": v for n, v in llama(3).items() if n not in {HEAD, TABLE}}
        xckpt.save(llama(3) | tensors, "a/model.safetensors", overwrite=True)
        tower = xckpt.open("a", tensors="vision_model.*").assign_attrs(config={"model_type": "x"})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tower.ckpt.save("out/")
        assert names("out") == ["config.json", "generation_config.json", "model.safetensors"]


def names_without_config(folder: str) -> bool:
    return names(folder) == ["model.safetensors"]


@pytest.mark.usefixtures("models")
class TestEditedConfigs:
    """A config that was edited in the attributes is written, as far as the tensors agree."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: both()[0],
            lambda: both()[0] * 2,
            lambda: total() / 2,
            lambda: xckpt.open("a").compute(),
            lambda: xckpt.open_steps("run").sel(step=2),
        ],
        ids=["opened", "scaled", "mean", "loaded", "step"],
    )
    def test_new_values_are_written(self, make: Any) -> None:
        ds = make()
        edited = {**LLAMA, "rope_theta": 5e5, "id2label": {"0": "no"}}
        ds.assign_attrs(config=edited).ckpt.save("out/")
        assert config("out") == edited
        assert "tokenizer.json" in names("out")

    def test_values_are_edited_in_place_and_removed(self) -> None:
        ds = xckpt.open("a")
        ds.attrs["config"]["rope_theta"] = 5e5
        removed = next(key for key in LLAMA if key not in {"model_type", "vocab_size"})
        del ds.attrs["config"][removed]
        ds.ckpt.save("out/")
        assert config("out").keys() == LLAMA.keys() - {removed} | {"rope_theta"}

    def test_some_values_without_the_type_are_edits_of_the_others(self) -> None:
        stated = {"architectures": ["LlamaModel"], "use_cache": False}
        ds = xckpt.open("a").drop_vars(HEAD)
        ds.assign_attrs(config=stated).ckpt.save("out/")
        xckpt.convert("a", "new/", tensors="model.*", set_attrs={"config": stated})
        assert config("out") == config("new") == LLAMA | stated

    @pytest.mark.parametrize("is_whole", [False, True])
    def test_sections_without_their_type_are_edits_of_the_others(self, is_whole: bool) -> None:
        labels = {"0": "no", "1": "yes"}
        tower = {"model_type": "siglip_vision", "image_size": 8, "rope": {"base": 5, "factor": 2}}
        old = LLAMA | {"vision_config": tower, "id2label": labels, "other": {"a": 1, "b": 2}}
        Path("a/config.json").write_text(json.dumps(old))
        edit = {"vision_config": {"rope": {"factor": 4}}, "id2label": {"0": "x"}, "other": {"b": 3}}
        xckpt.open("a").assign_attrs(config=old | edit if is_whole else edit).ckpt.save("out/")
        new = {"vision_config": tower | {"rope": {"base": 5, "factor": 4}}, "id2label": {"0": "x"}}
        assert config("out") == old | new | {"other": {"b": 3} if is_whole else {"a": 1, "b": 3}}

    def test_attributes_with_paths_set_single_values(self) -> None:
        tower = {"model_type": "siglip_vision", "image_size": 8}
        old = LLAMA | {"vision_config": tower, "id2label": {"0": "no", "1": "yes"}}
        Path("a/config.json").write_text(json.dumps(old))
        paths = {"rope_theta": 5e5, "vision_config.act": "relu", "id2label.1": "maybe", "new.x": 1}
        attrs = {f"config.{path}": value for path, value in paths.items()}
        attrs |= {"generation_config.top_k": 7}
        xckpt.convert("a", "new/", set_attrs=attrs)
        xckpt.open("a").assign_attrs(attrs).ckpt.save("out/")
        options = [x for key, value in attrs.items() for x in ("--set", f"{key}={value}")]
        assert main(["convert", "a", "command/", *options]) == 0
        new = {"rope_theta": 5e5, "vision_config": tower | {"act": "relu"}, "new": {"x": 1}}
        for folder in ("new", "out", "command"):
            assert config(folder) == old | new | {"id2label": {"0": "no", "1": "maybe"}}
            assert json.loads(Path(folder, "generation_config.json").read_text()) == {"top_k": 7}
            assert "config.rope_theta" not in xckpt.read_index(folder).attrs

    def test_a_path_below_a_value_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"'config\.vocab_size\.x': vocab_size of config.json"):
            xckpt.convert("a", "out/", set_attrs={"config.vocab_size.x": 1})
        assert not Path("out").exists()

    def test_attributes_with_paths_that_the_file_has_are_its_own(self) -> None:
        tensors = {
            n: xr.DataArray(v, dims=[f"{n}{i}" for i in range(v.ndim)]) for n, v in llama(0).items()
        }
        xckpt.save(
            xr.Dataset(tensors, attrs={"config.rope_theta": 1.0}),
            "a/model.safetensors",
            overwrite=True,
        )
        xckpt.convert("a", "out/", set_attrs={"config.rope_theta": 2.0})
        assert config("out") == LLAMA
        assert xckpt.read_index("out").attrs["config.rope_theta"] == 2.0

    def test_attributes_with_names_of_values_are_named(self) -> None:
        text = r"stay \('config.num_attention_heads' sets one\): 'num_attention_heads'"
        with pytest.warns(CheckpointWarning, match=text):
            xckpt.convert("a", "out/", set_attrs={"num_attention_heads": 4})
        assert config("out") == LLAMA

    def test_parts_of_another_model_are_described_by_the_one_with_the_same_names(self) -> None:
        rest = {f"quantizer.{n}.weight": np.ones((8, 8), "f4") for n in range(3)}
        xckpt.save(llama(1) | rest, "b/model.safetensors", overwrite=True)
        Path("b/config.json").write_text(json.dumps(LLAMA | {"architectures": ["ForPreTraining"]}))
        Path("a/config.json").write_text(json.dumps(LLAMA | {"architectures": ["ForCTC"]}))
        a, b = both()
        with pytest.warns(CheckpointWarning, match=r"from a/, and others .*'b/ architectures'"):
            a.assign(b.ckpt.find("model.*").data_vars).ckpt.save("out/")
        assert config("out")["architectures"] == ["ForCTC"]

    @pytest.mark.parametrize("place", range(3))
    def test_edits_of_a_sum_are_those_of_the_config_that_it_has(self, place: int) -> None:
        configs = [LLAMA | {"rms_norm_eps": eps} for eps in (1e-5, 1e-6, 1e-7)]
        write_model("c", 7)
        for name, of_one in zip("abc", configs, strict=True):
            Path(name, "config.json").write_text(json.dumps(of_one))
        total = xckpt.open("a") + xckpt.open("b") + xckpt.open("c")
        with pytest.warns(CheckpointWarning, match=r"b/ rms_norm_eps.*c/ rms_norm_eps"):
            total.assign_attrs(config=configs[place] | {"use_cache": False}).ckpt.save("out/")
        assert config("out") == LLAMA | {"rms_norm_eps": 1e-5, "use_cache": False}

    def test_values_that_are_stated_are_those_of_no_source(self) -> None:
        Path("b/config.json").write_text(json.dumps(LLAMA | {"rms_norm_eps": 1e-7}))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            total().assign_attrs(config=LLAMA | {"rms_norm_eps": 1e-6}).ckpt.save("out/")
        assert config("out")["rms_norm_eps"] == 1e-6

    def test_attributes_of_a_conversion_are_written(self) -> None:
        xckpt.convert("a", "out/", set_attrs={"config": {**LLAMA, "rope_theta": 5e5}})
        assert config("out") == LLAMA | {"rope_theta": 5e5}

    @pytest.mark.parametrize("make", [lambda: both()[0], lambda: with_layers([0, 2])])
    def test_a_value_that_the_tensors_contradict_is_no_config(self, make: Any) -> None:
        edited = {**LLAMA, "num_hidden_layers": 7}
        with pytest.warns(
            CheckpointWarning, match="as num_hidden_layers 7: the tensors have [23].*config"
        ):
            make().assign_attrs(config=edited).ckpt.save("out/")
        assert "config.json" not in names("out")

    def test_another_class_has_another_head(self) -> None:
        base = xckpt.open("a")
        head = xr.DataArray(np.zeros((2, 8), "f4"), dims=("label", "embd"))
        classifier = base.drop_vars(HEAD).assign({"score.weight": head})
        with pytest.warns(CheckpointWarning, match=r"lacks 1 of its \d+ tensors: 'lm_head.weight'"):
            classifier.ckpt.save("plain/")
        classes = {"architectures": ["LlamaForSequenceClassification"]}
        labels = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
        edited = {**LLAMA, **classes, **labels}
        classifier.assign_attrs(config=edited).ckpt.save("out/")
        assert config("out") == edited
        with pytest.warns(CheckpointWarning, match=f"lacks 1 of its.*{NORM}"):
            classifier.drop_vars(NORM).assign_attrs(config=edited).ckpt.save("part/")
        assert "config.json" not in names("part")

    @pytest.mark.filterwarnings("error:.*libraries ignore")
    def test_another_class_has_other_tensors_in_all_layers(self) -> None:
        base = xckpt.open("a")
        zeros = xr.DataArray(np.zeros((8, 8), "f4"), dims=("row", "column"))
        names_by_layer = [f"model.layers.{n}.cross_attn.q_proj.weight" for n in range(3)]
        more = {"model.pooler.dense.weight": zeros} | dict.fromkeys(names_by_layer, zeros)
        edited = LLAMA | {"architectures": ["LlamaForSequenceClassification"]}
        model = base.drop_vars(HEAD).assign(more).assign_attrs(config=edited)
        model.ckpt.save("out/")
        assert config("out") == edited
        text = r"tensors that a/ lacks, .*: 'model\.layers\.0\.mlp\.upproj\.weight'$"
        with pytest.warns(CheckpointWarning, match=text):
            model.assign({"model.layers.0.mlp.upproj.weight": zeros}).ckpt.save("slip/")

    def test_tensors_that_an_edited_flag_is_about_are_expected(self) -> None:
        a = xckpt.open("a")
        bias = xr.DataArray(np.zeros(8, "f4"), dims="head*key")
        biases = {f"model.layers.{n}.self_attn.q_proj.bias": bias for n in range(3)}
        edited = LLAMA | {"attention_bias": True}
        a.assign(biases).assign_attrs(config=edited).ckpt.save("out/")
        assert config("out") == edited
        first = dict(list(biases.items())[:1])
        for n, (more, stated) in enumerate(((biases, LLAMA), (first, edited))):
            with pytest.warns(CheckpointWarning, match="tensors that a/ lacks, .*0.self_attn"):
                a.assign(more).assign_attrs(config=stated).ckpt.save(f"{n}/")

    @pytest.mark.parametrize("change", [lambda ds: ds, lambda ds: ds * 2], ids=["read", "scaled"])
    @pytest.mark.parametrize("path", ["a", "a/model.safetensors"])
    def test_a_head_that_is_stated_to_be_tied_may_be_dropped(self, change: Any, path: str) -> None:
        tied = LLAMA | {"tie_word_embeddings": True}
        ds = change(xckpt.open(path)).drop_vars(HEAD)
        ds.assign_attrs(config=tied).ckpt.save("out/")
        assert config("out") == tied
        assert {"tokenizer.json", "generation_config.json"} <= {*names("out")}
        text = rf"""lacks 1 of its 30 tensors: '{HEAD}' \(state "tie_word.* in attrs\["config"\]"""
        with pytest.warns(CheckpointWarning, match=text):
            ds.ckpt.save("untied/")
        assert names("untied") == ["model.safetensors"]
        with pytest.warns(CheckpointWarning, match=r"lacks 2 .*\(state \"architectures\" of"):
            ds.drop_vars(NORM).ckpt.save("untied/", overwrite=True)
        with pytest.warns(CheckpointWarning, match=rf"lacks 1 .*'{NORM}'"):
            ds.drop_vars(NORM).assign_attrs(config=tied).ckpt.save("part/")

    @pytest.mark.filterwarnings("ignore:.*from the attributes")
    def test_an_edited_config_in_attributes_of_a_file_is_that_of_other_tensors(self) -> None:
        xckpt.open("a").ckpt.save("a.zt")
        ds = xckpt.open("a.zt").drop_vars(HEAD)
        with pytest.warns(CheckpointWarning, match=f"lacks 1 of its 30 tensors: '{HEAD}'"):
            ds.ckpt.save("part/")
        tied: dict[str, Any] = {"tie_word_embeddings": True}
        for n, edit in enumerate((tied, {"architectures": ["LlamaModel"]})):
            for model in (ds, ds * 2):
                model.assign_attrs(config=LLAMA | edit).ckpt.save(f"{n}/", overwrite=True)
                assert config(str(n)) == LLAMA | edit

    def test_a_head_of_another_width_than_the_table_cannot_be_tied(self) -> None:
        tensors = llama(0) | {HEAD: np.ones((32, 4), "f4")}
        xckpt.save(tensors, "a/model.safetensors", overwrite=True)
        ds = xckpt.open("a").drop_vars(HEAD)
        for stated in (LLAMA, LLAMA | {"tie_word_embeddings": True}):
            with pytest.warns(CheckpointWarning, match=r'lacks 1 .*\(state "architectures" of'):
                ds.assign_attrs(config=stated).ckpt.save("out/", overwrite=True)
            assert names("out") == ["model.safetensors"]

    @pytest.mark.filterwarnings("error:.*libraries ignore")
    def test_a_head_that_is_stated_not_to_be_tied_is_expected(self) -> None:
        stated = LLAMA | {"tie_word_embeddings": True}
        Path("a/config.json").write_text(json.dumps(stated))
        xckpt.open("a").drop_vars(HEAD).ckpt.save("tied/")
        tied = xckpt.open("tied")
        ds = tied.assign({HEAD: tied[TABLE]})
        ds.assign_attrs(config=LLAMA).ckpt.save("out/")
        assert config("out") == LLAMA

    @pytest.mark.parametrize("load", [lambda ds: ds, lambda ds: ds.compute()])
    @pytest.mark.parametrize("chosen", [[0, 2], [1, 0, 2]], ids=["dropped", "moved"])
    def test_layers_of_another_kind_that_was_stated_have_other_tensors(
        self, load: Any, chosen: list[int]
    ) -> None:
        layer = "model.layers.{}.".format
        shapes: dict[str, tuple[int, ...]] = {}
        for n in range(3):
            experts = [f"mlp.experts.{e}.up_proj.weight" for e in range(2)]
            of_layer = ["mlp.up_proj.weight"] if n == 1 else [*experts, "mlp.gate.weight"]
            shapes |= {layer(n) + name: (2, 8) if "gate" in name else (8, 8) for name in of_layer}
            shapes[f"{layer(n)}input_layernorm.weight"] = (8,)
        stated = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 2}
        TestSizesOfParts.write(stated | {"mlp_only_layers": [1]}, shapes)
        ds = xckpt.open("base")
        new = xr.Dataset(attrs=ds.attrs).assign({
            layer(n) + str(name).removeprefix(layer(old)): ds[name]
            for n, old in enumerate(chosen)
            for name in ds
            if str(name).startswith(layer(old))
        })  # fmt: skip
        new.encoding = ds.encoding
        kinds = [chosen.index(1)] if 1 in chosen else []
        edited = stated | {"mlp_only_layers": kinds, "num_hidden_layers": len(chosen)}
        gone = r"'model\.layers\.1\.mlp\.up_proj\.weight'"
        text = (
            f"no longer have, as the edited 'mlp_only_layers' of config.json must state: .*{gone}"
        )
        with pytest.warns(CheckpointWarning, match=text):
            load(new).assign_attrs(config=edited).ckpt.save("out/")
        assert config("out") == edited
        part = new.drop_vars("model.layers.0.input_layernorm.weight")
        with pytest.warns(CheckpointWarning, match=r"lacks 1 of its .*0\.input_layernorm"):
            part.assign_attrs(config=edited).ckpt.save("part/")

    def test_another_type_of_model_has_other_tensors(self) -> None:
        a = xckpt.open("a")
        mlp = [f"model.layers.{n}.mlp." for n in range(3)]
        names_by_word = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        experts = {
            f"{start}experts.{n}.{new}.weight": a[f"{start}{old}.weight"]
            for start in mlp
            for old, new in names_by_word.items()
            for n in range(2)
        }
        routers = {f"{start}gate.weight": (("expert", "embd"), np.ones((2, 8))) for start in mlp}
        dense = [f"{start}{name}.weight" for start in mlp for name in names_by_word]
        mixture = a.drop_vars(dense).assign(experts).assign(routers)
        edited = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        mixture.assign_attrs(config=edited | {"num_local_experts": 2}).ckpt.save("out/")
        assert config("out") == edited | {"num_local_experts": 2}
        assert "tokenizer.json" in names("out")
        with pytest.warns(CheckpointWarning, match="num_local_experts 3: the tensors have 2"):
            mixture.assign_attrs(config=edited | {"num_local_experts": 3}).ckpt.save("wrong/")
        assert "config.json" not in names("wrong")

    def test_a_tensor_that_keeps_its_type_beside_another_one_of_the_config(self) -> None:
        write_model("c", 0, dtype="float32")
        encoding = {"*": {"dtype": "bfloat16"}, HEAD: {"dtype": "float32"}}
        text = rf"another type than bfloat16.*\(dtype='bfloat16', cast='allow' .*{HEAD} float32"
        with pytest.warns(CheckpointWarning, match=text):
            xckpt.open("c").ckpt.save("out/", encoding=encoding, cast="allow")
        assert config("out")["dtype"] == "bfloat16"

    def test_a_value_that_the_tensors_have_is_no_correction(self) -> None:
        edited = {**LLAMA, "num_hidden_layers": 2}
        with_layers([0, 2]).assign_attrs(config=edited).ckpt.save("out/")
        assert config("out") == edited

    def test_other_sizes_are_corrected_beside_it(self) -> None:
        edited = {**LLAMA, "rope_theta": 5e5}
        with pytest.warns(CheckpointWarning, match=r"num_hidden_layers: 2 \(was 3\)"):
            with_layers([0, 2]).assign_attrs(config=edited).ckpt.save("out/")
        assert config("out") == edited | {"num_hidden_layers": 2}

    def test_the_config_of_another_source_is_no_edit(self) -> None:
        Path("a/config.json").write_text(json.dumps(LLAMA | {"rope_theta": 5e5}))
        a, b = both()
        a.assign(b.ckpt.find("*layers*").data_vars).ckpt.save("out/")
        assert config("out") == LLAMA

    def test_a_file_that_changed_since_is_the_config(self) -> None:
        ds = xckpt.open("a")
        Path("a/config.json").write_text(json.dumps(LLAMA | {"rope_theta": 5e5}))
        ds.ckpt.save("out/")
        assert config("out") == LLAMA | {"rope_theta": 5e5}
        ds.assign_attrs(config=LLAMA | {"bos_token_id": 3}).ckpt.save("both/")
        assert config("both") == LLAMA | {"rope_theta": 5e5, "bos_token_id": 3}
