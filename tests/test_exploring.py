"""Tensors of an open object one by one: names, code and statistics."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats import mlcp_files, primitiv_files
from tests.notebook.views import View
from xckpt.accessor.exploring import compute, explore, histogram
from xckpt.datasets.tensors import OpenTensors
from xckpt.errors import CheckpointWarning
from xckpt.health import findings
from xckpt.notebook.summary import index_summary
from xckpt.opening import open_index
from xckpt.sample import write_checkpoint
from xckpt.statistics import stats, table

if TYPE_CHECKING:
    from pathlib import Path

    from xckpt.tensor_rows import Row


OPENERS: dict[str, Any] = {
    "flat": lambda path: xr.open_dataset(path, engine="ztensor"),
    "stacked": lambda path: xr.open_dataset(path, engine="ztensor", stack=True),
    "parts": lambda path: xr.open_dataset(path, engine="ztensor", decode=False),
    "tree": lambda path: xr.open_datatree(path, engine="ztensor"),
    "stacked tree": lambda path: xr.open_datatree(path, engine="ztensor", stack=True),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("exploring") / "m.zt", layers=3, width=16)


@pytest.fixture(scope="module", params=OPENERS)
def obj(request: pytest.FixtureRequest, path: Path) -> Any:
    return OPENERS[request.param](path)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is computed out of the cache of the user."""
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path))


def ignore(*_: int) -> None:
    """Take a report."""


def test_rows_are_the_tensors(obj: Any, path: Path) -> None:
    rows = OpenTensors(obj).rows
    tensors = open_index(path, whole=not _has_parts(rows))[1].tensors
    full = [row for row in rows if ":" not in row.name]
    assert {row.name.partition(":")[0] for row in rows} == set(tensors)
    for row in full:
        tensor = tensors[row.name]
        header = (tensor.scheme or tensor.dtype, tensor.shape, tensor.nbytes)
        assert (row.dtype, row.shape, row.nbytes) == header or len(full) < len(rows)


def _has_parts(rows: list[Row]) -> bool:
    return any(row.name.endswith("_scale") for row in rows)


@pytest.mark.parametrize("kind", ["flat", "stacked", "stacked tree"])
def test_rows_are_in_the_order_in_which_they_were_saved(path: Path, kind: str) -> None:
    names = [row.name for row in OpenTensors(OPENERS[kind](path)).rows]
    index = xckpt.read_index(path)
    assert names == [name for name in index.arrangement.order if name in index]


def test_code_gives_the_tensor(obj: Any, path: Path) -> None:
    tensors = OpenTensors(obj)
    flat = xr.open_dataset(path, engine="ztensor", decode=not _has_parts(tensors.rows))
    for row in tensors.rows[::7]:
        variable = eval(tensors.code(row.name), {"ds": obj, "dt": obj})  # noqa: S307  our own code
        assert variable.shape == row.shape
        if row.name in flat.variables:
            np.testing.assert_array_equal(variable.values, flat[row.name].values)


def test_statistics_are_those_of_the_file(obj: Any) -> None:
    tensors = OpenTensors(obj)
    names = [row.name for row in tensors.rows]
    results = compute(tensors, names, ignore).statistics
    expected = table(stats(obj)).T.to_dict()
    assert results.keys() == expected.keys()
    for name, values in results.items():
        np.testing.assert_array_equal([*values.values()], [*expected[name].values()])


def test_findings_are_those_of_the_file(obj: Any) -> None:
    tensors = OpenTensors(obj)
    results = compute(tensors, [row.name for row in tensors.rows], ignore).findings
    expected = findings(stats(obj)).itertuples(index=False, name=None)
    assert sorted(map(tuple, results)) == sorted(expected)
    assert results


def test_computed_results_are_reused(path: Path) -> None:
    pytest.importorskip("anywidget")
    ds = xr.open_dataset(path, engine="ztensor", stack=True)
    view = View(ds.ckpt.explore())
    view.ask({"ask": "known"})
    assert not view.told
    expected = table(ds.ckpt.stats(progress=False))
    view = View(ds.ckpt.explore())
    view.ask({"ask": "known"})
    names, statistics = view.names(), view.statistics()
    assert len(statistics) == len(expected) == len(names)
    values = statistics[names.index("lm_head.weight")]
    std = values[view.state["_statistics"].index("std")]
    assert std == expected.loc["lm_head.weight", "std"]
    assert {names[row] for row, *_ in view.findings()} == set(ds.ckpt.findings()["tensor"])


def test_layers_ascend_whatever_their_order_in_the_file(tmp_path: Path) -> None:
    pytest.importorskip("anywidget")
    names = ["embed", *sorted(f"h.{n}.w" for n in range(12)), "norm"]
    np.savez(tmp_path / "m.npz", **{name: np.ones(1) for name in names})  # type: ignore[arg-type]
    explorer = xr.open_dataset(tmp_path / "m.npz", engine="npz").ckpt.explore()
    assert View(explorer).names() == ["embed", *(f"h.{n}.w" for n in range(12)), "norm"]


def test_codes_are_distinguished_from_weights(path: Path) -> None:
    pytest.importorskip("anywidget")
    view = View(xr.open_dataset(path, engine="ztensor", decode=False).ckpt.explore())
    codes = [n for n, is_one in zip(view.names(), view.state["_codes"], strict=True) if is_one]
    assert codes == [f"model.layers.{n}.mlp.down_proj.weight" for n in range(3)]


def test_a_histogram_counts_all_finite_elements(obj: Any) -> None:
    tensors = OpenTensors(obj)
    for row in tensors.rows[::5]:
        edges, counts = histogram(tensors, row.name, ignore)
        values = compute(tensors, [row.name], ignore).statistics[row.name]
        assert counts.sum() == values["count"] - values["nan"] - values["inf"]
        assert len(edges) == len(counts) + 1
        # One value alone is in the middle of all bins.
        bin_width = np.diff(edges).max()
        ends = [values["min"], values["max"]]
        # Bins end where counted bit patterns do, at a relative distance of 2**-8.
        slack = 0.5 if ends[0] == ends[1] else max(bin_width, max(map(abs, ends)) / 256)
        assert [edges[0], edges[-1]] == pytest.approx(ends, rel=0, abs=slack)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-128, 127), (5, 84), (-(2**31), 2**31 - 1)])
def test_bins_have_as_many_whole_numbers(low: int, high: int) -> None:
    values = np.unique(np.linspace(low, high, 3000).astype(np.int64))
    tensors = OpenTensors(xr.Dataset({"n": ("x", values)}))
    edges, counts = histogram(tensors, "n", ignore)
    assert counts.sum() == len(values)
    assert len(set(np.diff(edges))) == 1
    assert (edges % 1 == 0.5).all()
    assert len(counts) <= 80
    if high - low < 3000:
        assert len(set(counts[:-1])) <= 1


def test_computing_reports_and_can_be_stopped(path: Path) -> None:
    tensors = OpenTensors(xr.open_dataset(path, engine="ztensor"))

    def stop(*_: int) -> None:
        raise InterruptedError

    reports: list[tuple[int, int]] = []
    with pytest.raises(InterruptedError):
        compute(tensors, ["lm_head.weight"], stop)
    compute(tensors, ["model.norm.weight"], lambda *nbytes: reports.append(nbytes))
    nbytes = xckpt.read_index(path).tensors["model.norm.weight"].nbytes
    assert reports[-1] == (nbytes, nbytes)


def test_a_selection_has_fewer_tensors(path: Path) -> None:
    ds = xr.open_dataset(path, engine="ztensor", stack=True).isel(layers=[0, 2])
    tensors = OpenTensors(ds)
    names = [row.name for row in tensors.rows if "input_layernorm" in row.name]
    assert names == [f"model.layers.{n}.input_layernorm.weight" for n in (0, 2)]
    assert tensors.code(names[1]) == 'ds["model.layers.input_layernorm.weight"].sel(layers=2)'
    layer = OpenTensors(ds.isel(layers=1))
    assert layer.code(names[1]) == 'ds["model.layers.input_layernorm.weight"]'


def test_ambiguous_selections_show_the_variable(path: Path) -> None:
    ds = xr.open_dataset(path, engine="ztensor", stack=True).drop_vars("layers")
    names = [row.name for row in OpenTensors(ds).rows]
    assert "model.layers.input_layernorm.weight" in names


def test_text_variables_have_no_statistics() -> None:
    ds = xr.Dataset({"text": ("x", np.array(["a", "b"])), "n": ("x", np.arange(2.0))})
    assert list(compute(OpenTensors(ds), ["text", "n"], ignore).statistics) == ["n"]


@pytest.mark.parametrize("name", ["a'b", 'a"b', "a\\b", "a\u202eb\n", "\udc80", "a.b"])
def test_code_quotes_names_exactly(name: str) -> None:
    ds = xr.Dataset({name: ("x", np.arange(3.0))})
    code = OpenTensors(ds).code(name)
    assert code.isprintable()
    xr.testing.assert_identical(eval(code, {"ds": ds}), ds[name])  # noqa: S307  our own code


def test_without_anywidget_the_summary_is_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "xckpt.notebook.explorer", raising=False)
    summary = index_summary(xckpt.read_index(path))
    ds = xr.open_dataset(path, engine="ztensor")
    with pytest.warns(CheckpointWarning, match=r"pip install 'xckpt\[widgets\]'"):
        shown = explore(OpenTensors(ds), summary)
    assert repr(shown).startswith("<Checkpoint m.zt>")
    assert shown._repr_html_().startswith("<div")


def test_explore_gives_the_widget(path: Path) -> None:
    pytest.importorskip("anywidget")
    ds = xr.open_dataset(path, engine="ztensor", stack=True)
    explorer = explore(OpenTensors(ds), index_summary(xckpt.read_index(path)))
    view = View(explorer)
    explorer.selected = "model.norm.weight"
    view.done()
    values = view.statistics()[view.names().index("model.norm.weight")]
    mean = values[view.state["_statistics"].index("mean")]
    assert mean == pytest.approx(float(ds["model.norm.weight"].mean()), rel=1e-6)


def test_trees_whose_nodes_do_not_spell_the_names(tmp_path: Path) -> None:
    value = primitiv_files.parameter(primitiv_files.tensor(np.ones((2, 3), "f4")))
    keys = (["a", "b"], ["a.b"], ["a", "c.d:e"], ["f", ""])
    model = primitiv_files.model(*((key, value) for key in keys))
    shards = [[mlcp_files.tensor("a.w", np.full(2, rank, "f4"))] for rank in range(2)]
    contents = {
        "primitiv": primitiv_files.file(primitiv_files.MODEL, model),
        "mlcp": mlcp_files.checkpoint(shards, "inline"),
    }
    for engine, content in contents.items():
        path = tmp_path / engine
        path.write_bytes(content)
        tree = xr.open_datatree(path, engine=engine)
        tensors = OpenTensors(tree)
        assert {row.name for row in tensors.rows} == set(xckpt.read_index(path).tensors)
        flat = xr.open_dataset(path, engine=engine)
        for row in tensors.rows:
            variable = eval(tensors.code(row.name), {"dt": tree})  # noqa: S307  our own code
            np.testing.assert_array_equal(variable.values, flat[row.name].values)
