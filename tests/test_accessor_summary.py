"""The summary of an object shows what its statistics found, once there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def test_findings_are_shown_once_they_are_known(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m.zt", layers=3, width=64)
    ds = xr.open_dataset(path, engine="ztensor")
    before, html = repr(ds.ckpt), ds.ckpt._repr_html_()
    found = ds.ckpt.findings(ds.ckpt.stats(progress=False))
    assert set(found["rule"]) >= {"nan", "all_zero"}
    assert "nan" not in before
    assert "nan" in repr(ds.ckpt)
    assert "nan" in ds.ckpt._repr_html_()
    assert "nan" not in html
    assert "nan" not in repr(xr.open_dataset(path, engine="ztensor").ckpt)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a mixture of experts whose first two layers of six are dense."""
    tensors: dict[str, Any] = {}
    for layer in range(6):
        base = f"model.layers.{layer}"
        tensors[f"{base}.self_attn.q_proj.weight"] = np.ones((4, 4), "f4")
        mlps = [f"{base}.mlp"] if layer < 2 else [f"{base}.mlp.experts.{n}" for n in range(3)]
        tensors |= {f"{mlp}.up_proj.weight": np.ones((2, 4), "f4") for mlp in mlps}
    path = tmp_path_factory.mktemp("moe") / "moe.npz"
    np.savez(path, **tensors)
    return path


def test_layers_that_are_not_alike_are_told_with_their_dimensions(mixture: Path) -> None:
    flat = xr.open_dataset(mixture, engine="npz")
    assert "  layers {2..5}: mlp.experts\n" in repr(flat.ckpt)
    for obj, name in (
        (flat.ckpt.stack(), "ds"),
        (xr.open_datatree(mixture, engine="npz", stack=True), "dt"),
    ):
        text = repr(obj.ckpt)
        assert "  layers {0..5} (dimension layers): self_attn\n" in text
        assert "  layers {0,1} (dimension layers_1): mlp.up_proj\n" in text
        assert "  layers {2..5} (dimension layers_2): mlp.experts\n" in text
        choice = f"{name}.ckpt.sel(layers=4, experts=1)"
        assert f"  choose with {choice}, whatever the dimensions are called\n" in text
        assert choice in obj.ckpt._repr_html_()
        chosen = obj.ckpt.sel(layers=4, experts=1).ckpt
        assert "1 tensor" in repr(chosen)
    fewer = flat.ckpt.stack().ckpt.sel(layers=[1, 2, 3, 4, 5])
    assert "  layers {2..5} (dimension layers_2): mlp.experts\n" in repr(fewer.ckpt)


def test_an_index_shows_itself_in_a_notebook(tmp_path: Path) -> None:
    index = xckpt.read_index(write_checkpoint(tmp_path / "m.zt", layers=3, width=64))
    assert "38 tensors" in index._repr_html_()


def test_other_objects_say_so_in_html() -> None:
    assert "&lt;Checkpoint: none&gt;" in xr.Dataset().ckpt._repr_html_()
