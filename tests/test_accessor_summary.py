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
        html = obj.ckpt._repr_html_()
        assert choice in html
        assert html.count(".ckpt.sel(") == 1
        chosen = obj.ckpt.sel(layers=4, experts=1).ckpt
        assert "1 tensor" in repr(chosen)
    fewer = flat.ckpt.stack().ckpt.sel(layers=[1, 2, 3, 4, 5])
    assert "  layers {2..5} (dimension layers_2): mlp.experts\n" in repr(fewer.ckpt)


@pytest.fixture
def unet(tmp_path: Path) -> xr.Dataset:
    """Write the names of a network with blocks of four widths, as those of diffusers are."""
    widths = (4, 8, 16, 16)
    shapes: dict[str, tuple[int, ...]] = {}
    for side, order in (("down", widths), ("up", widths[::-1])):
        for block, width in enumerate(order):
            for number in range(2 if side == "down" else 3):
                inside = f"{side}_blocks.{block}"
                shapes[f"{inside}.resnets.{number}.conv2.weight"] = (width, width, 3, 3)
                attention = f"{inside}.attentions.{number}.transformer_blocks.0"
                shapes[f"{attention}.attn1.to_q.weight"] = (width, width)
                shapes[f"{attention}.attn1.to_out.0.bias"] = (width,)
    np.savez(tmp_path / "unet.npz", **{n: np.ones(s, "f4") for n, s in shapes.items()})  # type: ignore[arg-type]
    return xr.open_dataset(tmp_path / "unet.npz", engine="npz", stack=True)


def test_blocks_of_several_widths_have_few_dimensions(unet: xr.Dataset) -> None:
    stacked = {name: v.dims[: v.ndim - 4] for name, v in unet.items() if "conv2" in str(name)}
    assert stacked == {
        "down_blocks.0.resnets.conv2.weight": ("resnets_1",),
        "down_blocks.1.resnets.conv2.weight": ("resnets_1",),
        "down_blocks.resnets.conv2.weight": ("down_blocks", "resnets_1"),
        "up_blocks.resnets.conv2.weight": ("up_blocks", "resnets"),
        "up_blocks.2.resnets.conv2.weight": ("resnets",),
        "up_blocks.3.resnets.conv2.weight": ("resnets",),
    }
    attention = "up_blocks.attentions.transformer_blocks.0.attn1.to_out.0.bias"
    assert unet[attention].dims == ("up_blocks", "attentions", "d16")
    assert set(unet.indexes) == {
        *("down_blocks", "up_blocks", "resnets", "resnets_1", "attentions", "attentions_1")
    }
    lines = [line.strip() for line in repr(unet.ckpt).splitlines() if "_blocks {" in line]
    assert "down_blocks {0,1}: resnets, attentions" in lines
    assert "up_blocks {0,1} (dimension up_blocks): resnets, attentions" in lines
    assert len(unet.ckpt.sel(down_blocks=0).data_vars) == 3
    assert unet.ckpt.sel(down_blocks=3, resnets=1)["down_blocks.resnets.conv2.weight"].ndim == 4


def test_an_index_shows_itself_in_a_notebook(tmp_path: Path) -> None:
    index = xckpt.read_index(write_checkpoint(tmp_path / "m.zt", layers=3, width=64))
    assert "35 tensors" in index._repr_html_()


def test_other_objects_say_so_in_html() -> None:
    assert "&lt;Checkpoint: none&gt;" in xr.Dataset().ckpt._repr_html_()


class TestOneArray:
    @pytest.fixture
    def ds(self, tmp_path: Path) -> xr.Dataset:
        path = write_checkpoint(tmp_path / "m.zt", layers=3, width=64)
        return xr.open_dataset(path, engine="ztensor", stack=True)

    def test_it_shows_its_tensors(self, ds: xr.Dataset) -> None:
        name = next(str(n) for n, v in ds.data_vars.items() if "layers" in v.dims and v.ndim > 2)
        text = repr(ds[name].ckpt)
        assert text.startswith("<Checkpoint m.zt>")
        assert "3 tensors" in text
        assert "<" in ds[name].ckpt._repr_html_()
        assert ds[name].ckpt.summary("dtype")["tensors"].tolist() == [3]

    def test_it_gives_what_the_dataset_gives_for_it(self, ds: xr.Dataset, tmp_path: Path) -> None:
        name = next(str(n) for n, v in ds.data_vars.items() if "layers" in v.dims and v.ndim > 2)
        array = ds[name]
        found = array.ckpt.stats(progress=False)
        xr.testing.assert_identical(found[name], ds.ckpt.stats(progress=False)[name])
        assert len(array.ckpt.findings()) == len(ds[[name]].ckpt.findings())
        assert list(array.ckpt.histogram(5, progress=False)) == [name]
        member = name.replace("layers.", "layers.1.")
        xr.testing.assert_identical(array.ckpt[member], ds.ckpt[member])
        assert array.ckpt.sel(layers=1)[name].ndim == array.ndim - 1
        assert list(array.ckpt.unstack()) == [name.replace("rs.", f"rs.{i}.") for i in range(3)]
        assert (array * 2).ckpt.compare(array).ckpt.table()["status"].eq("changed").any()
        array.ckpt.save(tmp_path / "one.zt")
        assert set(xr.open_dataset(tmp_path / "one.zt").variables) == set(array.ckpt.unstack())

    def test_others_say_what_they_are_not(self, ds: xr.Dataset) -> None:
        name = next(iter(ds.data_vars))
        assert "this DataArray was not opened" in repr((ds[name] * 2).ckpt)
        assert "this DataArray was not opened" in repr(xr.DataArray([1.0]).ckpt)
        assert repr(ds["layers"].ckpt)
        assert xr.DataArray([1.0, 3.0]).ckpt.stats()["data"].sel(statistic="mean") == 2


class TestResults:
    @pytest.fixture
    def ds(self) -> xr.Dataset:
        rng = np.random.default_rng(0)
        return xr.Dataset({f"h.{i}.w": ("x", rng.random(8)) for i in range(20)})

    def test_statistics(self, ds: xr.Dataset) -> None:
        found = ds.ckpt.stats()
        head, columns, *rows, more = repr(found.ckpt).split("\n")
        assert head == "<Statistics>  20 tensors: 23 statistics"
        assert columns.split() == ["count", "nan", "inf", "min", "max", "mean", "std"]
        assert rows[0].split()[:2] == ["h.0.w", "8"]
        assert more == "… 10 more: .ckpt.table()"
        assert "Statistics" in found.ckpt._repr_html_()
        assert "Statistics" in repr(found["h.0.w"].ckpt)
        assert found.ckpt.findings().equals(ds.ckpt.findings())

    def test_a_comparison(self, ds: xr.Dataset, tmp_path: Path) -> None:
        paths = [tmp_path / "a.zt", tmp_path / "b.safetensors"]
        xckpt.save(ds, paths[0])
        xckpt.save(ds.assign({"h.3.w": ds["h.3.w"] + 1}).drop_vars("h.0.w"), paths[1])
        text = repr(xckpt.compare(*paths).ckpt)
        assert text.startswith("<Comparison of a.zt with b.safetensors>  20 tensors: ")
        assert "18 same, 1 changed, 1 only_a" in text.split("\n")[0]
        assert text.split("\n")[2].startswith("h.0.w")
        assert "not computed yet" in repr(xckpt.compare(*paths, compute=False).ckpt)

    def test_a_histogram(self, ds: xr.Dataset) -> None:
        assert repr(ds.ckpt.histogram(5).ckpt) == "<Histogram>  20 tensors · 5 bins"

    def test_names_cannot_do_harm(self) -> None:
        ds = xr.Dataset({"\x1b[2J<b>": ("x", [1.0, 2.0])})
        found = ds.ckpt.stats().ckpt
        assert "\x1b" not in repr(found)
        assert "<b>" not in found._repr_html_()

    def test_others_with_such_dimensions(self) -> None:
        for ds in (xr.Dataset({"a": ("bin", [1])}), xr.Dataset({"a": ("statistic", [1])})):
            assert "not opened from a checkpoint" in repr(ds.ckpt)
