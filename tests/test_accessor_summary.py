"""The summary of an object shows its findings after statistics were computed."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats import torch_files
from tests.notebook.views import View
from tests.stats.architectures import resnet
from xckpt.formatting import columns
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def test_findings_are_shown_after_they_are_computed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m.zt", layers=3, width=64)
    ds = xr.open_dataset(path, engine="ztensor")
    before, html = repr(ds.ckpt), ds.ckpt._repr_html_()
    findings = ds.ckpt.findings(stats=ds.ckpt.stats(progress=False))
    assert set(findings["rule"]) >= {"nan", "all_zero"}
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


def test_layers_of_different_kinds_are_listed_with_their_dimensions(mixture: Path) -> None:
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
    """Write a network with blocks of four widths, named as in diffusers."""
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
    assert "35 tensors" in str(index._repr_html_())


def test_other_objects_have_a_short_html() -> None:
    assert "Checkpoint: none" in xr.Dataset().ckpt._repr_html_()


def test_a_sum_without_common_names_has_none() -> None:
    a, b = (xckpt.open({name: np.ones(3, "f4")}) for name in ("module.w", "w"))
    text = "it has no tensors; arithmetic keeps only those whose names both sides have"
    assert text in " ".join(repr(((a + b) / 2).ckpt).split())
    with pytest.raises(ValueError, match=text):
        (a + b).ckpt.explore()


class TestDataArray:
    @pytest.fixture
    def ds(self, tmp_path: Path) -> xr.Dataset:
        path = write_checkpoint(tmp_path / "m.zt", layers=3, width=64)
        return xr.open_dataset(path, engine="ztensor", stack=True)

    def test_an_array_shows_its_tensors(self, ds: xr.Dataset) -> None:
        name = next(str(n) for n, v in ds.data_vars.items() if "layers" in v.dims and v.ndim > 2)
        text = repr(ds[name].ckpt)
        assert text.startswith("<Checkpoint m.zt>")
        assert "3 tensors" in text
        assert "<" in ds[name].ckpt._repr_html_()
        assert ds[name].ckpt.summary("dtype")["tensors"].tolist() == [3]

    def test_methods_of_an_array_equal_those_of_its_dataset(
        self, ds: xr.Dataset, tmp_path: Path
    ) -> None:
        name = next(str(n) for n, v in ds.data_vars.items() if "layers" in v.dims and v.ndim > 2)
        array = ds[name]
        stats = array.ckpt.stats(progress=False)
        xr.testing.assert_identical(stats[name], ds.ckpt.stats(progress=False)[name])
        assert len(array.ckpt.findings()) == len(ds[[name]].ckpt.findings())
        assert list(array.ckpt.histogram(bins=5, progress=False)) == [name]
        member = name.replace("layers.", "layers.1.")
        xr.testing.assert_identical(array.ckpt[member], ds.ckpt[member])
        assert array.ckpt.sel(layers=1)[name].ndim == array.ndim - 1
        assert list(array.ckpt.unstack()) == [name.replace("rs.", f"rs.{i}.") for i in range(3)]
        assert (array * 2).ckpt.compare(array).ckpt.table()["status"].eq("changed").any()
        array.ckpt.save(tmp_path / "one.zt")
        assert set(xr.open_dataset(tmp_path / "one.zt").variables) == set(array.ckpt.unstack())

    def test_computed_arrays_and_arrays_in_memory_have_a_summary(self, ds: xr.Dataset) -> None:
        name = next(iter(ds.data_vars))
        assert repr((ds[name] * 2).ckpt).startswith("<Checkpoint ")
        assert repr(xr.DataArray([1.0]).ckpt).startswith("<Checkpoint in memory>  1 tensor")
        assert repr(ds["layers"].ckpt)
        assert xr.DataArray([1.0, 3.0]).ckpt.stats()["data"].sel(statistic="mean") == 2


def in_header(obj: Any) -> str:
    return str(repr(obj).splitlines()[0].split(">  ")[1])


class TestFindings:
    """Findings are whole sentences in every display."""

    @pytest.fixture
    def ds(self, tmp_path: Path) -> xr.Dataset:
        values = np.random.default_rng(0).standard_normal((256, 256)).astype("f4")
        values[:, 85] *= 40
        tensors = {"layers.0.mlp.gate_proj.weight": values, "e\x1b": values * np.nan}
        np.savez(tmp_path / "m.npz", **tensors)  # type: ignore[arg-type]
        return xr.open_dataset(tmp_path / "m.npz", engine="npz")

    def test_in_a_notebook_and_a_terminal(self, ds: xr.Dataset) -> None:
        findings = ds.ckpt.findings()
        sentences = findings["explanation"].tolist()
        assert any("in column 85" in sentence and len(sentence) > 50 for sentence in sentences)
        for text in (
            findings._repr_html_(),
            repr(findings),
            findings[findings["value"] > 1]._repr_html_(),
        ):
            words = " ".join(text.split())  # a line of text may break within a sentence
            assert all(sentence in words for sentence in sentences)
            assert "\x1b" not in text
        assert pickle.loads(pickle.dumps(findings)).equals(findings)

    def test_in_the_explorer(self, ds: xr.Dataset) -> None:
        pytest.importorskip("anywidget")
        findings = ds.ckpt.findings()
        view = View(ds.ckpt.explore())
        view.ask({"ask": "known"})
        assert {finding[-1] for finding in view.findings()} == set(findings["explanation"])


class TestRoles:
    """Trainable parameters count once; buffers and optimizer state have separate lines."""

    def test_tied_tensors_count_once(self, tmp_path: Path) -> None:
        weights = {
            f"w{n}": torch_files.view(torch_files.storage(str(n), 600), 0, (20, 30), (30, 1))
            for n in (1, 2)
        }
        content = {
            f"{kind}.{name}": view for kind in ("model", "ema") for name, view in weights.items()
        }
        storages = {str(n): np.arange(600, dtype=np.float32).tobytes() for n in (1, 2)}
        path = tmp_path / "ema.pt"
        path.write_bytes(torch_files.archive(torch_files.mapping(content), storages))
        ds = xr.open_dataset(path)
        for obj in (xckpt.read_index(path), ds.ckpt, xr.open_datatree(path).ckpt):
            assert "4 tensors · 1.2 K params · 4.7 KiB" in in_header(obj)
            assert "note: 2 tensors share their bytes with another" in repr(obj)
            assert ["ema.w1", "20×30", "float32", "tied", "0", "B"] in [
                line.split()[:6] for line in repr(obj).splitlines()
            ]
        assert ds.ckpt.summary("role").loc["average", ["tensors", "nbytes"]].tolist() == [2, 0]
        assert ds.ckpt.summary("role").loc["weight", "parameters"] == 1200
        alone = ds.ckpt.find("ema.*").ckpt
        assert "2 tensors · 1.2 K params · 4.7 KiB" in in_header(alone)

    def test_tied_tensors_that_are_stacked(self, tmp_path: Path) -> None:
        views = {
            n: torch_files.view(torch_files.storage(str(n), 12), 0, (3, 4), (4, 1))
            for n in range(3)
        }
        content = {
            f"{kind}.layers.{n}.w": view for kind in ("model", "ema") for n, view in views.items()
        }
        storages = {str(n): np.arange(12, dtype=np.float32).tobytes() for n in range(3)}
        path = tmp_path / "ema.pt"
        path.write_bytes(torch_files.archive(torch_files.mapping(content), storages))
        flat = xr.open_dataset(path)
        stacked = xr.open_dataset(path, stack=True)
        for ds in (flat, stacked, flat.ckpt.stack(), stacked.ckpt.unstack()):
            assert "6 tensors · 36 params · 144 B" in in_header(ds.ckpt)

    def test_buffers_and_optimizers_have_lines(self, tmp_path: Path) -> None:
        tensors = {f"model.{name}": values for name, values in resnet((1, 1), 4).items()}
        trained = [n for n in tensors if n.endswith(("weight", "bias"))]
        for number, name in enumerate(trained):
            for field in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer.state.{number}.{field}"] = tensors[name] * 0
            tensors[f"optimizer.state.{number}.step"] = np.array(3, np.float32)
        np.savez(tmp_path / "m.npz", **tensors)  # type: ignore[arg-type]
        size = sum(tensors[name].size for name in trained)
        ds = xr.open_dataset(tmp_path / "m.npz", engine="npz")
        lines = [line.split() for line in repr(ds.ckpt).splitlines()]
        count = len(trained)
        assert f"{size / 1000:.1f} K parameters" in in_header(ds.ckpt)
        assert ["parameters", f"{count}", "tensors", f"{size / 1000:.1f}", "K", "elements"] in [
            line[:6] for line in lines
        ]
        assert ["buffers", "18", "tensors"] in [line[:3] for line in lines]
        assert ["optimizer", "state", f"{3 * count}", "tensors"] in [line[:4] for line in lines]
        html = ds.ckpt._repr_html_()
        assert "<b>optimizer state</b>" in html
        assert "<b>buffers</b> 18 tensors" in html
        table = ds.ckpt.summary("role")
        assert table["parameters"].to_dict() == {
            **dict.fromkeys(("moment", "statistic", "counter", "step"), 0),
            "weight": size,
        }
        assert ds.ckpt.summary("layer")["parameters"].sum() == size
        assert ds.ckpt.summary()["parameters"].sum() == size

    def test_weights_alone_have_no_such_lines(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path / "m.zt", layers=3, width=64)
        assert "parameters " not in repr(xckpt.read_index(path))

    def test_the_version_of_a_file_is_not_that_of_a_framework(self, tmp_path: Path) -> None:
        view = torch_files.view(torch_files.storage("0", 6), 0, (3, 2), (2, 1))
        (tmp_path / "m.pt").write_bytes(
            torch_files.archive(torch_files.mapping({"w": view}), {"0": bytes(24)})
        )
        assert in_header(xckpt.read_index(tmp_path / "m.pt")).startswith("torch file version 3 · ")


class TestSizes:
    """Sizes are those of the current variables, after any change to the Dataset."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        values = np.ones((8, 6), "f4")
        tensors = {"a": values, "b": values[:, :4], **{f"l.{n}.w": values for n in range(4)}}
        ds = xr.Dataset({n: ((f"r{v.shape[0]}", f"c{v.shape[1]}"), v) for n, v in tensors.items()})
        xckpt.save(ds, tmp_path / "m.zt", version="2")
        return tmp_path / "m.zt"

    @pytest.mark.parametrize("stack", [False, True])
    def test_summary_of_a_selection(self, path: Path, stack: bool) -> None:
        ds = xr.open_dataset(path, stack=stack)
        assert "6 tensors · 272 params · 1.1 KiB" in in_header(ds.ckpt)
        part = ds.isel(r8=slice(0, 2))
        assert "6 tensors · 68 params · 272 B" in in_header(part.ckpt)
        assert part.ckpt.summary("dtype")["nbytes"].tolist() == [272]
        assert "5 tensors · 240 params · 960 B" in in_header(ds.drop_vars("b").ckpt)
        if stack:
            layers = ds.isel(l=[1, 2], r8=slice(0, 4))
            assert "4 tensors · 88 params · 352 B" in in_header(layers.ckpt)
            assert "4 tensors · 88 params · 352 B" in in_header(layers.ckpt.unstack().ckpt)
            rows = layers.ckpt.unstack().isel(r8=0)
            assert "4 tensors · 22 params · 88 B" in in_header(rows.ckpt)

    def test_summary_of_several_checkpoints_in_one(self, path: Path) -> None:
        ds = xr.open_dataset(path)
        both = xr.concat([ds, ds], "run")
        assert "6 tensors · 544 params · 2.1 KiB" in in_header(both.ckpt)

    def test_selections_of_compressed_tensors_count_in_proportion(self, tmp_path: Path) -> None:
        values = np.random.default_rng(0).random((64, 64)).astype("f4")
        ds = xr.Dataset({"w": (("a", "b"), values)})
        xckpt.save(ds, tmp_path / "m.zt", encoding={"*": {"compression": "zstd"}}, version="2")
        ds = xr.open_dataset(tmp_path / "m.zt")
        full = ds.ckpt.summary("dtype")["nbytes"].item()
        half = ds.isel(a=slice(0, 32)).ckpt.summary("dtype")["nbytes"].item()
        assert half == -(-full // 2) < 64 * 64 * 2

    def test_summary_of_shards_that_xarray_joins(self, path: Path, tmp_path: Path) -> None:
        ds = xr.open_dataset(path)
        paths = [tmp_path / "s-1.zt", tmp_path / "s-2.zt"]
        xckpt.save(ds[["a", "b"]], paths[0])
        xckpt.save(ds.drop_vars(["a", "b"]), paths[1])
        joined = xr.open_mfdataset(paths, engine="ztensor", combine="by_coords")
        assert repr(joined.ckpt).startswith(
            "<Checkpoint s-1.zt and 1 other>  6 tensors · 272 params"
        )
        assert joined.ckpt.summary("dtype")["nbytes"].tolist() == [1088]
        assert "s-1.zt and 1 other" in joined.ckpt._repr_html_()


class TestResults:
    @pytest.fixture
    def ds(self) -> xr.Dataset:
        rng = np.random.default_rng(0)
        return xr.Dataset({f"h.{i}.w": ("x", rng.random(8)) for i in range(20)})

    def test_statistics(self, ds: xr.Dataset) -> None:
        stats = ds.ckpt.stats()
        head, titles, *rows, more = repr(stats.ckpt).split("\n")
        assert head.startswith("<Statistics>  20 tensors: ")
        assert titles.split() == ["tensor", "nan", "inf", "mean", "std", "min", "max", "count"]
        assert [rows[0].split()[place] for place in (0, 1, -1)] == ["h.0.w", "0", "8"]
        assert more == "  … 10 more: .ckpt.table()"
        assert "Statistics" in stats.ckpt._repr_html_()
        assert "Statistics" in repr(stats["h.0.w"].ckpt)
        assert stats.ckpt.findings().equals(ds.ckpt.findings())

    def test_files_of_one_name_are_told_apart_by_their_folders(
        self, ds: xr.Dataset, tmp_path: Path
    ) -> None:
        paths = [tmp_path / folder / "base.zt" for folder in ("x", "y")]
        for path in paths:
            path.parent.mkdir()
            xckpt.save(ds, path)
        title = "<Comparison of x/base.zt with y/base.zt>"
        assert repr(xckpt.compare(*paths).ckpt).startswith(title)

    def test_a_comparison(self, ds: xr.Dataset, tmp_path: Path) -> None:
        paths = [tmp_path / "a.zt", tmp_path / "b.safetensors"]
        xckpt.save(ds, paths[0])
        xckpt.save(ds.assign({"h.3.w": ds["h.3.w"] + 1}).drop_vars("h.0.w"), paths[1])
        text = repr(xckpt.compare(*paths).ckpt)
        assert text.startswith("<Comparison of a.zt with b.safetensors>  20 tensors: ")
        assert "18 same, 1 changed, 1 only_a" in text.split("\n")[0]
        lines = [line.strip() for line in text.split("\n")]
        assert lines[1] == "h.0.w is only in a"
        assert lines[2].startswith("h.3.w changed by")
        assert "not computed yet" in repr(xckpt.compare(*paths, compute=False).ckpt)

    def test_a_histogram(self, ds: xr.Dataset) -> None:
        assert repr(ds.ckpt.histogram(bins=5).ckpt) == "<Histogram>  20 tensors · 5 bins"

    def test_groups(self, ds: xr.Dataset) -> None:
        groups = ds.ckpt.stats().ckpt.by("h")
        head, titles, *rows, more = repr(groups.ckpt).split("\n")
        assert head == "<Groups>  by h: 20 groups"
        assert titles.split()[:4] == ["h", "tensors", "nan", "inf"]
        assert rows[3].split()[:3] == ["3", "1", "0"]
        assert more == "  … 10 more: .ckpt.table()"
        pairs = ds.ckpt.stats().ckpt.by("h", "role")
        assert repr(pairs.ckpt).split("\n")[2].split()[:2] == ["0", "weight"]
        counts = ds.ckpt.histogram(bins=5).ckpt.by("h")
        assert repr(counts.ckpt) == "<Groups>  by h: 5 bins"
        assert "note" not in counts.attrs
        for part in (groups[["std"]], groups.isel(h=0), groups.sum()):
            assert repr(part.ckpt).startswith("<Checkpoint in memory>")
        assert repr(counts.isel(h=0).ckpt).endswith("5 bins")

    @pytest.mark.parametrize("width", [80, 100, 300])
    def test_lines_fit_the_terminal(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        rng = np.random.default_rng(0)
        parts = ["self_attn.q_proj.weight", "mlp.experts.gate_up_proj.weight"]
        names = [f"model.language_model.layers.{n}.{part}" for n in range(20) for part in parts]
        a = {name: rng.standard_normal((32, 32)).astype("f4") for name in names}
        b = {name: values + rng.standard_normal(32).astype("f4") for name, values in a.items()}
        b[names[7]][0, :2] = np.nan
        paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
        for path, tensors in zip(paths, (a, b), strict=True):
            xckpt.save(tensors, path)
        ds = xckpt.open(paths[1])
        ds.ckpt.findings()
        shown = [
            *(ds, ds.ckpt.stats(), ds.ckpt.spectrum(), ds.ckpt.stats().ckpt.by("layer", "module")),
            *(xckpt.compare(*paths, explain=explain) for explain in (False, True)),
            xckpt.compare(*paths, tensors=names[:3], explain=True),
        ]
        for obj in shown:
            lines = repr(obj.ckpt).split("\n")
            assert len(lines) > 2
            assert max(map(columns, lines)) <= min(width, 120)

    def test_hostile_names_are_escaped(self) -> None:
        ds = xr.Dataset({"\x1b[2J<b>": ("x", [1.0, 2.0])})
        stats = ds.ckpt.stats().ckpt
        assert "\x1b" not in repr(stats)
        assert "[2J<b>" not in stats._repr_html_()

    def test_other_datasets_with_dimensions_of_results(self) -> None:
        for ds in (xr.Dataset({"a": ("bin", [1])}), xr.Dataset({"a": ("statistic", [1])})):
            assert repr(ds.ckpt).startswith("<Checkpoint in memory>  1 tensor")
