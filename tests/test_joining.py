"""``join="outer"``: one dimension for a module; absent members are neither read nor counted."""

from __future__ import annotations

import pickle
from itertools import product
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.sources import CountingSource
from tests.test_stacking import DENSE, EXPERTS, LAYERS, moe, zt
from xckpt import formats
from xckpt.accessor.exploring import compute
from xckpt.datasets.making import make_dataset
from xckpt.datasets.options import OpenOptions
from xckpt.datasets.stacking import NumberSet, number_sets
from xckpt.datasets.tensors import OpenTensors
from xckpt.statistics import tensor_rows

if TYPE_CHECKING:
    from pathlib import Path

ARRAYS = moe()
# Large enough for separate chunks.
LARGE: dict[str, Any] = {
    f"h.{i}.e.{e}.w": np.full((600, 600), i, "<f4") for i, e in product((1, 2), range(2))
}
LARGE |= {f"h.{i}.norm": np.full(4, i, "<f4") for i in range(3)}


def joined(arrays: dict[str, np.ndarray] = ARRAYS, **options: Any) -> Any:
    return xr.open_dataset(zt(arrays), engine="ztensor", stack=True, join="outer", **options)


class TestOneDimension:
    def test_numbers_of_each_module(self) -> None:
        ds = joined()
        assert set(ds.dims) == {"layers", "experts", "d4", "d5", "d6", "d7"}
        assert ds["layers.norm"].dims == ("layers", "d4")
        assert ds["layers.mlp.w"].dims == ("layers", "d4", "d6")
        assert ds["layers.experts.w"].dims == ("layers", "experts", "d4", "d5")
        assert ds.indexes["layers"].tolist() == list(range(LAYERS))

    def test_members_are_at_their_positions_and_gaps_are_nan(self) -> None:
        ds = joined()
        for layer in range(LAYERS):
            selected = ds.sel(layers=layer)
            w = ARRAYS.get(f"layers.{layer}.mlp.w", np.full((4, 6), np.nan))
            np.testing.assert_array_equal(selected["layers.mlp.w"], w)
            for e in range(EXPERTS):
                w = ARRAYS.get(f"layers.{layer}.experts.{e}.w", np.full((4, 5), np.nan))
                np.testing.assert_array_equal(selected["layers.experts.w"].sel(experts=e), w)
        np.testing.assert_array_equal(
            ds["layers.mlp.w"].mean(("d4", "d6")).isnull(), np.arange(LAYERS) >= DENSE
        )

    def test_modules_at_different_paths_are_different(self) -> None:
        sizes = {"encoder.layers": 4, "decoder.layers": 2}
        ds = joined({f"{m}.{i}.w": np.ones(3, "<f4") for m, n in sizes.items() for i in range(n)})
        assert ds["encoder.layers.w"].dims == ("layers", "d3")
        assert ds["decoder.layers.w"].dims == ("layers_1", "d3")

    def test_in_a_tree(self) -> None:
        dt = xr.open_datatree(zt(ARRAYS), engine="ztensor", stack=True, join="outer")
        for node, leaf in (("layers", "norm"), ("layers/mlp", "w"), ("layers/experts", "w")):
            assert dt[node][leaf].dims[0] == "layers"
            assert dt[node].sizes["layers"] == LAYERS

    @pytest.mark.parametrize("dtype", ["i4", "bool", "u1"])
    def test_types_without_nan_stay_separate(self, dtype: str) -> None:
        arrays = {f"h.{i}.ids": np.ones(3, dtype) for i in (1, 2)}
        arrays |= {f"h.{i}.w": np.ones(3, "<f4") for i in range(3)}
        ds = joined(arrays)
        assert ds["h.ids"].dims == ("h_1", "d3")
        assert ds["h.ids"].dtype == dtype
        assert ds.indexes["h_1"].tolist() == [1, 2]

    def test_stored_types_that_have_nan(self) -> None:
        import ml_dtypes

        arrays = {f"h.{i}.n": np.ones(3, "<f4") for i in range(3)}
        arrays |= {f"h.{i}.w": np.ones((2, 2), ml_dtypes.bfloat16) for i in (1, 2)}
        for decode, dtype in ((True, np.float32), (False, ml_dtypes.bfloat16)):
            variable = joined(arrays, decode=decode)["h.w"]
            assert variable.dtype == dtype
            absent = np.isnan(variable.values.astype("f4")).all((1, 2))
            assert absent.tolist() == [True, False, False]

    def test_numbers_of_other_datasets(self) -> None:
        arrays = {f"h.{i}.w": ("x", np.arange(3.0) + i) for i in (1, 2)}
        arrays |= {f"h.{i}.n": ("x", np.arange(3.0) + i) for i in range(3)}
        expected = [[np.nan] * 3, [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]
        for ds in (xr.Dataset(arrays), xr.Dataset(arrays).chunk({"x": 2})):
            stacked = ds.ckpt.stack(join="outer")
            assert stacked["h.w"].chunks is None or stacked["h.w"].chunksizes["x"] == (2, 1)
            np.testing.assert_array_equal(stacked["h.w"], expected)
            xr.testing.assert_identical(stacked.ckpt.unstack(), ds)

    def test_sparse_arrays_stay_separate(self) -> None:
        sparse = pytest.importorskip("sparse")
        coo = sparse.COO.from_numpy(np.eye(3))
        arrays: dict[str, Any] = {f"h.{i}.w": (("x", "y"), coo) for i in (1, 2)}
        arrays |= {f"h.{i}.n": ("x", np.zeros(3)) for i in range(3)}
        ds = xr.Dataset(arrays)
        for dataset in (ds, ds.chunk()):
            assert dataset.ckpt.stack(join="outer")["h.w"].dims == ("h_1", "x", "y")

    def test_attributes_that_differ(self) -> None:
        attrs = {"unit": "m", "id": "a", "scale": 0.5, "number": 3}
        arrays: dict[str, Any] = {f"h.{i}.n": ("x", np.zeros(2)) for i in range(3)}
        for i in (1, 2):
            differing = {"id": f"a{i}", "scale": i / 2, "number": i}
            arrays[f"h.{i}.w"] = ("x", np.zeros(2), attrs | differing)
        ds = xr.Dataset(arrays)
        stacked = ds.ckpt.stack(join="outer")
        assert stacked["h.w"].attrs == {"unit": "m"}
        assert stacked["h.w:id"].values.tolist() == ["", "a1", "a2"]
        np.testing.assert_array_equal(stacked["h.w:scale"], [np.nan, 0.5, 1.0])
        assert stacked.encoding["dropped_attrs"] == {"h.w": ["number"]}
        xr.testing.assert_identical(stacked.ckpt.unstack(), ds)

    def test_far_apart_numbers_do_not_make_a_huge_grid(self) -> None:
        arrays = {f"a.{i}.b.{i}.w": np.ones(1, "<f4") for i in range(300)}
        ds = joined(arrays)
        assert sum(v.size for v in ds.data_vars.values()) <= 64 * 300
        assert set(ds.ckpt.unstack().data_vars) == set(arrays)

    @pytest.mark.parametrize("stack", [True, False])
    def test_only_two_joins(self, stack: bool) -> None:
        wrong: Any
        for wrong in ("inner", "left", True, None):
            with pytest.raises(ValueError, match="expected 'exact' or 'outer'"):
                xr.open_dataset(zt(ARRAYS), engine="ztensor", stack=stack, join=wrong)
            with pytest.raises(ValueError, match="expected 'exact' or 'outer'"):
                xckpt.open(ARRAYS, stack=stack, join=wrong)
            with pytest.raises(ValueError, match="expected 'exact' or 'outer'"):
                xr.open_dataset(zt(ARRAYS), engine="ztensor").ckpt.stack(join=wrong)


class TestAbsentMembers:
    @pytest.mark.parametrize("arrays", [ARRAYS, LARGE], ids=["shared chunks", "own chunks"])
    def test_absent_members_are_not_read(self, arrays: dict[str, np.ndarray]) -> None:
        source = CountingSource(zt(arrays))
        index = formats.get("ztensor").read(source)
        source.reads.clear()
        ds = make_dataset(source, index, OpenOptions(stack=True, join="outer"))
        assert not source.reads
        name, top, inner = ("h.e.w", "h", "e")
        if arrays is ARRAYS:
            name, top, inner = ("layers.experts.w", "layers", "experts")
        assert ds[name].isel({top: 0}).isnull().all().compute()
        assert not source.reads
        member = ds[name].isel({top: -1, inner: 1}).compute()
        assert source.nbytes_read == member.nbytes
        source.reads.clear()
        ds.compute()
        assert source.nbytes_read == sum(array.nbytes for array in arrays.values())

    def test_the_task_of_an_absent_chunk_needs_no_file(self) -> None:
        lazy = joined(LARGE)["h.e.w"].isel(h=[0])
        assert lazy.chunks == ((1,), (1, 1), (600,), (600,))
        graph = dict(dask.optimize(lazy.data)[0].dask)
        assert len(pickle.dumps(graph)) < 5000
        again = pickle.loads(pickle.dumps(lazy))
        assert again.isnull().all().compute()


class TestStatistics:
    @pytest.mark.parametrize("form", ["lazy", "loaded", "computed", "tree"])
    def test_absent_members_have_no_statistics(self, form: str) -> None:
        flat = xr.open_dataset(zt(ARRAYS), engine="ztensor")
        obj: Any = joined()
        if form == "tree":
            obj = xr.open_datatree(zt(ARRAYS), engine="ztensor", stack=True, join="outer")
        elif form == "loaded":
            obj = obj.load()
        elif form == "computed":
            obj, flat = obj * 2, flat * 2
        stats = obj.ckpt.stats()
        table, expected = (statistics.ckpt.table() for statistics in (stats, flat.ckpt.stats()))
        assert table.sort_index().equals(expected.sort_index())
        assert obj.ckpt.findings().empty
        counts = obj.ckpt.histogram(7)
        name = "layers.experts.w" if "layers.experts.w" in counts else "layers/experts/w"
        assert counts[name].dims == ("bin", "layers", "experts")
        counted = np.where(np.arange(LAYERS) < DENSE, 0, EXPERTS * 20)
        np.testing.assert_array_equal(counts[name].sum(("bin", "experts")), counted)
        assert stats[name].sel(statistic="count").isnull().sum() == DENSE * EXPERTS

    def test_numbers_of_rows_with_absent_members(self) -> None:
        ds = joined()
        stats = ds[["layers.mlp.w"]].ckpt.stats(dim=["layers", "d4"])["layers.mlp.w"]
        values = np.stack([ARRAYS[f"layers.{i}.mlp.w"] for i in range(DENSE)])
        for statistic, expected in {
            "count": np.full(6, values[..., 0].size),
            "nan": np.zeros(6),
            "mean": values.mean((0, 1)),
            "min": values.min((0, 1)),
        }.items():
            np.testing.assert_allclose(stats.sel(statistic=statistic), expected)
        by_layer = ds[["layers.mlp.w"]].ckpt.stats(dim=["d4", "d6"])["layers.mlp.w"]
        assert by_layer.sel(layers=3).isnull().all()
        assert by_layer.sel(layers=0, statistic="nan") == 0

    def test_cached_results_are_reused(self, tmp_path: Path) -> None:
        joined().ckpt.save(path := tmp_path / "m.zt")
        flat = xr.open_dataset(path, engine="ztensor")
        stacked: Any = xr.open_dataset(path, engine="ztensor", stack=True, join="outer")
        for call in ("stats", "histogram", "spectrum"):
            first, again = (getattr(ds.ckpt, call)() for ds in (flat, stacked))
            names, rows = tensor_rows(first)
            cached = dict(zip(*tensor_rows(again), strict=True))
            assert cached.keys() == set(names)
            for name, row in zip(names, rows, strict=True):
                np.testing.assert_array_equal(cached[name], row)

    def test_nan_of_the_file_is_counted(self) -> None:
        arrays = {name: array.copy() for name, array in ARRAYS.items()}
        arrays["layers.3.experts.1.w"][1, 2:4] = np.nan
        ds = joined(arrays)
        (findings,) = ds.ckpt.findings().itertuples(index=False)
        assert tuple(findings)[:3] == ("layers.3.experts.1.w", "nan", 2.0)

    def test_comparisons(self) -> None:
        changed = {name: array.copy() for name, array in ARRAYS.items()}
        changed["layers.2.experts.0.w"] += 1
        del changed["layers.1.mlp.w"]
        exact = xr.open_dataset(zt(changed), engine="ztensor", stack=True)
        for second in (exact, joined(changed)):
            table = joined().ckpt.compare(second).ckpt.table()
            assert len(table) == len(ARRAYS)
            status = table["status"].astype(str)
            assert status[status != "same"].to_dict() == {
                "layers.1.mlp.w": "only_a",
                "layers.2.experts.0.w": "changed",
            }

    @pytest.mark.parametrize("values", [False, True])
    def test_singular_values(self, values: bool) -> None:
        ds = joined()
        spectrum = xckpt.spectrum(ds, progress=False, values=values)
        name = "layers.experts.w"
        member = xckpt.spectrum(ds.ckpt["layers.3.experts.1.w"], progress=False, values=values)
        (expected,) = member.values()
        at = spectrum[name].sel(layers=3, experts=1)
        np.testing.assert_array_equal(at.to_numpy(), expected.to_numpy())
        assert spectrum[name].sel(layers=0).isnull().all()
        if not values:
            assert repr(spectrum.ckpt).startswith("<Spectrum of <bytes>>  9 tensors: 8 statistics")
            assert len(spectrum.ckpt.table()) == 9

    def test_a_layer_without_experts(self) -> None:
        stats = joined().isel(layers=[0]).ckpt.stats()
        assert set(stats.data_vars) == {"embed", "layers.norm", "layers.mlp.w"}


class TestOtherOperations:
    @pytest.mark.parametrize("form", ["opened", "later", "computed", "loaded", "tree"])
    def test_saving_omits_absent_members(self, form: str, tmp_path: Path) -> None:
        path = tmp_path / "m.zt"
        flat = xr.open_dataset(zt(ARRAYS), engine="ztensor")
        forms: dict[str, Any] = {
            "opened": joined,
            "later": lambda: flat.ckpt.stack(join="outer"),
            "computed": lambda: joined() * 2,
            "loaded": lambda: joined().load(),
            "tree": lambda: xr.open_datatree(
                zt(ARRAYS), engine="ztensor", stack=True, join="outer"
            ),
        }
        obj = forms[form]()
        obj.ckpt.save(path)
        saved = xr.open_dataset(path)
        assert set(saved.variables) == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(saved[name], array * (2 if form == "computed" else 1))

    def test_filled_in_places_are_not_tensors(self) -> None:
        ds = joined().fillna(0.0)
        assert "layers.0.experts.1.w" not in ds.ckpt.stats().ckpt.table().index

    def test_absent_members_have_no_name(self) -> None:
        ds = joined()
        with pytest.raises(KeyError, match=r"no tensor 'layers\.0\.experts\.1\.w'"):
            ds.ckpt["layers.0.experts.1.w"]
        assert {row.name for row in OpenTensors(ds).rows} == set(ARRAYS)
        assert f"{len(ARRAYS)} tensors" in repr(ds.ckpt)
        assert "{2,3}" in repr(ds.ckpt)  # the layers that have experts
        assert ds.ckpt.summary("dtype")["nbytes"].sum() == sum(a.nbytes for a in ARRAYS.values())

    def test_selections_unstack_to_present_members(self) -> None:
        ds = joined()
        assert set(ds.sel(layers=[3, 0]).ckpt.unstack().data_vars) == {
            name for name in ARRAYS if name.startswith(("layers.0.", "layers.3.", "embed"))
        }
        assert not set(ds.sel(layers=0, experts=1)[["layers.experts.w"]].ckpt.unstack())

    def test_other_numbers_are_an_error(self, tmp_path: Path) -> None:
        ds = joined()
        ds["layers"] = np.arange(10, 10 + LAYERS)
        with pytest.raises(ValueError, match="unstack before the coordinates are changed"):
            ds.ckpt.unstack()
        with pytest.raises(ValueError, match="unstack before the coordinates are changed"):
            ds.ckpt.save(tmp_path / "m.zt")

    def test_pictures(self) -> None:
        pytest.importorskip("matplotlib").use("Agg")
        from matplotlib import pyplot as plt

        plot = joined().ckpt.plot
        lines = plot.layers("std", "*.experts.*").get_lines()
        assert lines[0].get_xdata().tolist() == list(range(DENSE, LAYERS))
        plot.histogram()
        plot.heatmap("layers.experts.w")
        plot.heatmap("layers.3.experts.1.w")
        array = joined()["layers.norm"]
        assert array.sel(layers=1).ckpt.plot.heatmap().has_data()
        with pytest.raises(ValueError, match="there are 4 tensors"):
            array.ckpt.plot.heatmap()
        plt.close("all")

    def test_the_explorer_lists_present_members(self) -> None:
        tensors = OpenTensors(joined())
        names = [row.name for row in tensors.rows]
        results = compute(tensors, names, lambda *_: None)
        assert {name: statistics["count"] for name, statistics in results.statistics.items()} == {
            name: array.size for name, array in ARRAYS.items()
        }


class TestNumberSets:
    NORM, DENSE_, MOE = "layers.norm", "layers.mlp.w", "layers.experts.w"

    @pytest.mark.parametrize("join", ["exact", "outer", None])
    def test_sets_of_layers(self, join: Any) -> None:
        ds = xr.open_dataset(
            zt(ARRAYS), engine="ztensor", stack=join is not None, join=join or "exact"
        )
        dims: list[str | None] = ["layers", "layers_1", "layers_2"]
        if join != "exact":
            dims = [join and "layers"] * 3
        sets = number_sets(ds)
        assert sets == [
            NumberSet("layers", (0, 1, 2, 3), dims[0], (self.NORM,)),
            NumberSet("layers", (0, 1), dims[1], (self.DENSE_,)),
            NumberSet("layers", (2, 3), dims[2], (self.MOE,)),
            NumberSet("layers.experts", (0, 1, 2), join and "experts", (self.MOE,)),
        ]
        table = ds.ckpt.modules()
        assert table["numbers"].tolist() == ["{0..3}", "{0,1}", "{2,3}", "{0..2}"]
        assert table["dim"].tolist() == [layers.dim or "" for layers in sets]

    def test_numbers_of_a_part_and_of_a_tree(self) -> None:
        ds = xr.open_dataset(zt(ARRAYS), engine="ztensor", stack="experts")
        selected = number_sets(ds.ckpt.sel(layers=[1, 2]))
        assert {(layers.module, layers.numbers) for layers in selected} == {
            ("layers", (1, 2)),
            ("layers", (1,)),
            ("layers", (2,)),
            ("layers.experts", (0, 1, 2)),
        }
        dt = xr.open_datatree(zt(ARRAYS), engine="ztensor", stack=True)
        assert number_sets(dt) == number_sets(xr.open_dataset(zt(ARRAYS), stack=True))
        assert number_sets(xr.Dataset({"a": 1})) == []
        pairs = xr.Dataset(dict.fromkeys(("0.w", "1.w", "a.0.5.w", "a.1.5.w"), 1))
        assert [(pair.module, pair.numbers) for pair in number_sets(pairs)] == [
            ("index", (0, 1)),
            ("a", (0, 1)),
        ]
