"""A folder as the target of `save` and `convert`: the file, its shards, and what describes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import xckpt
from xckpt.cli import main

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
    xckpt.convert("base", "part/", tensors="layers.0.*")
    assert names("part") == ["model.safetensors"]
    with pytest.raises(ValueError, match="matches none of the 3 tensors"):
        xckpt.convert("base", "out/", tensors="gone")
    assert not Path("out").exists()
    xckpt.convert("base", "out/")
    with pytest.raises(FileExistsError):
        xckpt.convert("base", "out/")


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
    with pytest.raises(ValueError, match=r"model-00001-of-00003\.safetensors.*remove them"):
        changed.ckpt.save("out/", overwrite=overwrite)
    assert main(["convert", "base", "out", *(["--overwrite"] if overwrite else [])]) == 2
    assert "model-00001-of-00003.safetensors" in capsys.readouterr().err
    assert names("out") == before
