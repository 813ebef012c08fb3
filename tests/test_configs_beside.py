"""A file has the attributes of its folder, from configs that are certainly its own."""

from __future__ import annotations

import errno
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.structure import named_models as named
from tests.structure.named_models import shapes_of

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 48}
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}


def tensors() -> dict[str, Any]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes_of(named.LLAMA).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model and its config."""
    xckpt.save(tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


class TestLocalFiles:
    def test_have_the_attributes_of_their_folder(self, folder: Path) -> None:
        index = xckpt.read_index(folder / "model.safetensors")
        assert index.attrs == xckpt.read_index(folder).attrs == {"format": "pt", "config": CONFIG}
        assert "LlamaForCausalLM" in repr(index)

    def test_whatever_the_name_of_the_only_one(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "my model.safetensors")
        (folder / "optimizer.pt").write_bytes(b"state")
        index = xckpt.read_index(folder / "my model.safetensors")
        assert index.attrs == {"format": "pt", "config": CONFIG}

    def test_have_none_beside_another_model(self, folder: Path) -> None:
        shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
        assert xckpt.read_index(folder / "other.safetensors").attrs == {"format": "pt"}
        assert xckpt.read_index(folder / "model.safetensors").attrs == {
            "format": "pt",
            "config": CONFIG,
        }

    def test_of_a_set_have_the_config_of_the_model(self, folder: Path) -> None:
        name = "model-00001-of-00002.safetensors"
        (folder / "model.safetensors").rename(folder / name)
        shutil.copy(folder / name, folder / "model-00002-of-00002.safetensors")
        assert xckpt.read_index(folder / name).attrs == {"format": "pt", "config": CONFIG}

    def test_of_an_adapter_have_its_config(self, tmp_path: Path) -> None:
        factors = {"h.0.q.lora_A.weight": np.zeros((4, 9)), "h.0.q.lora_B.weight": np.zeros((9, 4))}
        xckpt.save(factors, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
        index = xckpt.read_index(tmp_path / "adapter_model.safetensors")
        assert index.attrs == xckpt.read_index(tmp_path).attrs == {"adapter_config": ADAPTER}
        assert "LoRA adapter for org/base, rank 4" in repr(index)

    def test_state_what_they_state_themselves(self, folder: Path) -> None:
        own = {"model_type": "mistral"}
        xckpt.save(
            xr.Dataset({"w": ("x", np.zeros(3))}, attrs={"config": own}), folder / "model.zt"
        )
        assert xckpt.read_index(folder / "model.zt").attrs["config"] == own

    @pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"null"])
    def test_open_with_a_config_that_is_damaged(self, folder: Path, content: bytes) -> None:
        (folder / "config.json").write_bytes(content)
        assert xckpt.read_index(folder / "model.safetensors").attrs == {"format": "pt"}

    def test_open_with_a_config_that_cannot_be_read(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stat = os.stat

        def failing(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if str(path).endswith("config.json"):
                raise OSError(errno.EIO, "Input/output error", str(path))
            return stat(path, *args, **options)

        monkeypatch.setattr(os, "stat", failing)
        assert xckpt.read_index(folder / "model.safetensors").attrs == {"format": "pt"}

    def test_behind_a_link_have_the_config_beside_the_link(self, folder: Path) -> None:
        # As in the cache of the Hub: snapshots have links to files that are named by their content.
        blobs, snapshot = folder / "blobs", folder / "snapshots" / "0123"
        blobs.mkdir()
        snapshot.mkdir(parents=True)
        for name in ("model.safetensors", "config.json"):
            (folder / name).rename(blobs / f"{name}-blob")
            (snapshot / name).symlink_to(blobs / f"{name}-blob")
        index = xckpt.read_index(snapshot / "model.safetensors")
        assert index.attrs == {"format": "pt", "config": CONFIG}


def test_a_config_of_another_model_changes_no_names_of_dimensions(folder: Path) -> None:
    alone = xckpt.open(folder / "model.safetensors")
    config = {"model_type": "whisper", "d_model": 48, "vocab_size": 331}
    (folder / "config.json").write_text(json.dumps(config))
    beside = xckpt.open(folder / "model.safetensors")
    assert beside["model.norm.weight"].dims == alone["model.norm.weight"].dims
    assert "names unlike whisper, the type in its config" in repr(beside.ckpt)


class TestFilesInMemory:
    def test_have_the_config_beside_them(self, folder: Path) -> None:
        fs = fsspec.filesystem("memory")
        try:
            for name in ("model.safetensors", "config.json"):
                fs.pipe_file(f"/beside/{name}", (folder / name).read_bytes())
            fs.pipe_file("/beside/other.safetensors", (folder / "model.safetensors").read_bytes())
            index = xckpt.read_index("memory://beside/model.safetensors")
            assert index.attrs == {"format": "pt", "config": CONFIG}
            assert xckpt.read_index("memory://beside/other.safetensors").attrs == {"format": "pt"}
        finally:
            fs.rm("/beside", recursive=True)
