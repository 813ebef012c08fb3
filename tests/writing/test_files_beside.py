"""Files beside a model that follow from its modules, its images and its class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.formats import torch_files
from tests.writing.test_folders import LLAMA, config, llama, names
from xckpt import CheckpointWarning

LIBRARY = "sentence_transformers.models"
SETTINGS = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(folder: str, tensors: Any, **files: Any) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    xckpt.save(tensors, f"{folder}/model.safetensors")
    for name, document in files.items():
        Path(folder, f"{name}.json").write_text(json.dumps(document))


class TestModulesOfSentenceTransformers:
    """Modules that follow a model are copied, or named if they have tensors."""

    @staticmethod
    def write_models(types: list[str], paths: list[str], dense: bool) -> None:
        for seed, name in enumerate("ab"):
            modules = [
                {"idx": n, "path": p, "type": t}
                for n, (p, t) in enumerate(zip(paths, types, strict=True))
            ]
            settings = {key.removesuffix(".json"): {"max_seq_length": 32} for key in SETTINGS}
            write(name, llama(seed), config=LLAMA, **settings | {"modules": modules})
            Path(name, "1_Pooling").mkdir()
            Path(name, "1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
            if dense:
                write(
                    f"{name}/2_Dense",
                    {"linear.weight": np.full((4, 8), seed, "f4")},
                    config={"in_features": 8},
                )

    def test_a_mean_has_all_modules(self) -> None:
        types = [f"{LIBRARY}.{name}" for name in ("Transformer", "Pooling", "Dense")]
        self.write_models(types, ["", "1_Pooling", "2_Dense"], dense=True)
        a, b = xckpt.open("a"), xckpt.open("b")
        text = r"modules that were not opened \(open, combine and save each, .*: 'a/2_Dense'$"
        with pytest.warns(CheckpointWarning, match=text):
            ((a + b) / 2).ckpt.save("mean/")
        assert set(names("mean")) == {"1_Pooling", "config.json", "model.safetensors", *SETTINGS}
        assert names("mean/1_Pooling") == ["config.json"]
        a, b = xckpt.open("a/2_Dense"), xckpt.open("b/2_Dense")
        ((a + b) / 2).ckpt.save("mean/2_Dense/")
        assert config("mean/2_Dense") == {"in_features": 8}
        np.testing.assert_array_equal(xckpt.open("mean/2_Dense")["linear.weight"], 0.5)

    @pytest.mark.parametrize("write_copy", ["convert", "save"])
    def test_modules_without_tensors_are_copied(self, write_copy: str) -> None:
        types = [f"{LIBRARY}.Transformer", f"{LIBRARY}.Pooling"]
        self.write_models(types, ["", "1_Pooling"], dense=False)
        if write_copy == "convert":
            xckpt.convert("a", "out/")
        else:
            xckpt.open("a").ckpt.save("out/")
        assert names("out/1_Pooling") == ["config.json"]

    @pytest.mark.parametrize(
        ("types", "paths"),
        [
            ([f"{LIBRARY}.Transformer", "custom.Pooling"], ["", "1_Pooling"]),
            ([f"{LIBRARY}.Transformer", f"{LIBRARY}.Pooling"], ["", "../b/1_Pooling"]),
            ([f"{LIBRARY}.Transformer", f"{LIBRARY}.Pooling"], ["", "/etc"]),
            ([f"{LIBRARY}.Transformer", f"{LIBRARY}.Pooling"], ["", ".."]),
        ],
    )
    def test_code_and_other_folders_are_not_copied(
        self, types: list[str], paths: list[str]
    ) -> None:
        self.write_models(types, paths, dense=False)
        xckpt.open("a").ckpt.save("out/")
        assert names("out") == ["config.json", "model.safetensors"]

    @pytest.mark.parametrize("content", ["{}", "[1]", "[[]]", '[{"path": 1}]', "[" * 9999, "]"])
    def test_odd_lists_are_not_copied(self, content: str) -> None:
        write("a", llama(0), config=LLAMA)
        Path("a/modules.json").write_text(content)
        xckpt.open("a").ckpt.save("out/")
        assert names("out") == ["config.json", "model.safetensors"]


class TestProcessingOfImages:
    """Images get the size that an edited config states."""

    SIZES = (
        ({"height": 8, "width": 8}, {"height": 16, "width": 16}),
        ({"shortest_edge": 10}, {"shortest_edge": 20}),
        (8, 16),
    )

    @pytest.mark.parametrize(("before", "after"), SIZES)
    @pytest.mark.parametrize("is_tower", [False, True])
    def test_sizes_follow(self, before: Any, after: Any, is_tower: bool) -> None:
        model: dict[str, Any] = {"image_size": 8, "patch_size": 2, "hidden_size": 8}
        stated = {"vision_config": model} if is_tower else {"model_type": "vit", **model}
        processing = {"size": before, "crop_size": 8, "image_mean": [0.5], "do_resize": True}
        place = "vision_model.embeddings.position_embedding.weight"
        place = place if is_tower else "embeddings.position_embeddings"
        shape = (17, 8) if is_tower else (1, 17, 8)
        inner = {"image_processor": processing, "processor_class": "P"}
        write(
            "a",
            {place: np.ones(shape, "f4"), "norm.weight": np.ones(8, "f4")},
            config=stated,
            preprocessor_config=processing,
            processor_config=inner,
        )
        ds = xckpt.open("a")
        larger = {**ds, place: (ds[place].dims, np.ones((*shape[:-2], 65, 8), "f4"))}
        size = model | {"image_size": 16}
        edited = {"vision_config": size} if is_tower else stated | size
        new = ds.drop_vars(place).assign({place: larger[place]}).assign_attrs(config=edited)
        with pytest.warns(CheckpointWarning, match=r"preprocessor_config\.json has new values"):
            new.ckpt.save("out/")
        expected = processing | {"size": after, "crop_size": 16}
        assert json.loads(Path("out/preprocessor_config.json").read_text()) == expected
        nested = json.loads(Path("out/processor_config.json").read_text())
        assert nested == inner | {"image_processor": expected}

    @pytest.mark.parametrize("is_inner", [False, True])
    def test_values_of_channels_that_are_gone_are_named(self, is_inner: bool) -> None:
        stated: dict[str, Any] = {"model_type": "vit", "num_channels": 3, "patch_size": 2}
        place = "embeddings.patch_embeddings.projection.weight"
        processing: dict[str, Any] = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5]}
        processing = {"image_processor": processing} if is_inner else processing
        tensors = {place: np.ones((8, 3, 2, 2), "f4"), "norm.weight": np.ones(8, "f4")}
        write("a", tensors, config=stated, preprocessor_config=processing)
        ds = xckpt.open("a")
        grey = ds[place].isel({ds[place].dims[1]: [0]})
        new = ds.drop_vars(place).assign({place: grey.rename({grey.dims[1]: "grey"})})
        text = r"no longer have.*'preprocessor_config\.json: image_mean'$"
        with pytest.warns(CheckpointWarning, match=text):
            new.assign_attrs(config={"num_channels": 1}).ckpt.save("out/")

    def test_the_part_that_reads_images_has_the_processing(self) -> None:
        language = {"model_type": "text", "hidden_size": 8}
        write("text", {f"t.{n}.weight": np.ones((8, 8), "f4") for n in range(3)}, config=language)
        vision: dict[str, Any] = {"model_type": "vit", "hidden_size": 8}
        processing = {"size": {"height": 8, "width": 8}}
        tensors = {"v.weight": np.ones((8, 8), "f4")}
        write("image", tensors, config=vision, preprocessor_config=processing)
        text, image = (xckpt.open(name, dims="size") for name in ("text", "image"))
        whole = {"model_type": "both", "text_config": language, "vision_config": vision}
        text.assign(image.data_vars).assign_attrs(config=whole).ckpt.save("out/")
        assert json.loads(Path("out/preprocessor_config.json").read_text()) == processing

    def test_files_stay_without_another_size(self) -> None:
        processing = {"size": {"height": 8, "width": 8}}
        write("a", llama(0), config=LLAMA | {"image_size": 8}, preprocessor_config=processing)
        xckpt.open("a").ckpt.save("out/")
        assert (
            Path("out/preprocessor_config.json").read_bytes()
            == Path("a/preprocessor_config.json").read_bytes()
        )


def test_folders_of_the_same_name_are_told_apart() -> None:
    for name, value in (("base", 4), ("inpaint", 9)):
        stated = {"_class_name": "UNet", "sample_size": value}
        write(f"{name}/unet", {"w": np.full((8, 8), value, "f4")}, config=stated)
    a, b = xckpt.open("base/unet"), xckpt.open("inpaint/unet")
    text = r"is from base/unet/, and others .*: 'inpaint/unet/ sample_size 9 \(4\)'"
    with pytest.warns(CheckpointWarning, match=text):
        ((a + b) / 2).ckpt.save("out/")


class TestHeadsOfAnotherClass:
    """The head of a class that the user states may have names like those of the old one."""

    @pytest.mark.parametrize("shape", [(8, 8), (4, 8)])
    @pytest.mark.parametrize("rest", ["dense.weight", "weight"])
    def test_the_config_is_written(self, rest: str, shape: tuple[int, int]) -> None:
        tensors = llama(0)
        head = {f"lm_head.{rest}": np.ones((8, 8), "f4")}
        write("a", {n: v for n, v in tensors.items() if n != "lm_head.weight"} | head, config=LLAMA)
        stated = LLAMA | {"architectures": ["LlamaForSequenceClassification"]}
        new = {f"classifier.{rest}": (("class", "embd_in"), np.ones(shape, "f4"))}
        ds = xckpt.open("a").drop_vars(list(head)).assign(new).assign_attrs(config=stated)
        ds.ckpt.save("out/")
        assert config("out") == stated

    def test_a_body_of_other_names_is_named(self) -> None:
        write("a", llama(0), config=LLAMA)
        ds = xckpt.open("a")
        ds = ds.rename({name: str(name).replace("model.", "base.", 1) for name in ds})
        stated = LLAMA | {"architectures": ["LlamaForSequenceClassification"]}
        with pytest.warns(CheckpointWarning, match="no tensor has the name .* any more"):
            ds.assign_attrs(config=stated).ckpt.save("out/")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "llama.", ""])
@pytest.mark.parametrize("is_edited", [False, True])
def test_a_second_tensor_of_another_prefix_is_named(prefix: str, is_edited: bool) -> None:
    write("a", llama(0), config=LLAMA)
    ds = xckpt.open("a")
    norm = "model.norm.weight"
    second = f"{prefix}{norm}" if prefix else norm.removeprefix("model.")
    new = ds.assign({second: ds[norm] * 2})
    stated = LLAMA | ({"architectures": ["LlamaForSequenceClassification"]} if is_edited else {})
    with pytest.warns(CheckpointWarning, match=f"libraries take one of both: '{second}'"):
        new.assign_attrs(config=stated).ckpt.save("out/")


def test_a_tensor_is_not_missing_if_its_twin_is_there() -> None:
    weight = np.arange(256, dtype="f4").reshape(32, 8)
    table = torch_files.view(torch_files.storage("0", 256), 0, (32, 8), (8, 1))
    value: dict[str, Any] = {
        "model.embed_tokens.weight": table,
        "encoder.embed_tokens.weight": table,
    }
    rest = {n: v for n, v in llama(0).items() if n != "model.embed_tokens.weight"}
    Path("a").mkdir()
    storages = {str(n): v.tobytes() for n, v in enumerate([weight, *rest.values()])}
    value |= {name: torch_files.whole(str(n), v) for n, (name, v) in enumerate(rest.items(), 1)}
    Path("a/pytorch_model.bin").write_bytes(
        torch_files.archive(torch_files.mapping(value), storages)
    )
    Path("a/config.json").write_text(json.dumps(LLAMA))
    write("b", llama(1), config=LLAMA)
    a, b = xckpt.open("a"), xckpt.open("b")
    with pytest.warns(CheckpointWarning, match=r"1 of .* tensors of a missing"):
        ((a + b) / 2).ckpt.save("mean/")
    assert config("mean") == LLAMA
