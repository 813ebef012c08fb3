"""Every object that holds tensors has every view: summary, statistics, findings, report, copy."""

from __future__ import annotations

import json
import operator
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.documented import write_models
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Q = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)]
HEAD = "lm_head.weight"
NAMES = [*Q, "model.norm.weight", HEAD]


def tensors_of(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"model.norm.weight": (8,), "lm_head.weight": (12, 8)}
    return {name: rng.normal(size=shapes.get(name, (8, 8))).astype("f4") for name in NAMES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models, a run and an adapter."""
    path = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b", "c")):
        xckpt.save(tensors_of(seed), path / f"{name}.safetensors")
    for step in (100, 200, 300):
        xckpt.save(tensors_of(step), path / f"step-{step}.safetensors")
    rng, factors = np.random.default_rng(9), {}
    for name in Q:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        factors[f"{module}.lora_A.weight"] = rng.normal(size=(2, 8)).astype("f4")
        factors[f"{module}.lora_B.weight"] = rng.normal(size=(8, 2)).astype("f4")
    (path / "lora").mkdir()
    xckpt.save(factors, path / "lora/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (path / "lora/adapter_config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what netCDF lacks
        plain = xckpt.open(path / "a.safetensors").ckpt.plain()
        plain.to_netcdf(path / "a.nc", engine="h5netcdf")
        plain.to_zarr(path / "a.zarr", consolidated=False)
    return path


def run_of(folder: Path) -> xr.Dataset:
    return xckpt.open_steps(str(folder / "step-*.safetensors"))


def both(folder: Path) -> tuple[xr.Dataset, xr.Dataset]:
    return xckpt.open(folder / "a.safetensors"), xckpt.open(folder / "b.safetensors")


def in_parts(folder: Path) -> xr.Dataset:
    a, b = both(folder)
    return xr.merge([a[Q], b.drop_vars(Q)])


def longer(folder: Path) -> xr.Dataset:
    ds = both(folder)[0]
    return ds.drop_vars(HEAD).assign({HEAD: xr.concat([ds[HEAD], ds[HEAD]], "d12")})


# Objects with the names of their tensors.
OBJECTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "opened": (lambda f: xckpt.open(f / "a.safetensors"), NAMES),
    "stacked": (lambda f: xckpt.open(f / "a.safetensors", stack=True), NAMES),
    "tree": (lambda f: xr.open_datatree(f / "a.safetensors", engine="safetensors"), NAMES),
    "sliced": (lambda f: both(f)[0].isel({both(f)[0][Q[0]].dims[0]: slice(2, 6)}), NAMES),
    "one row": (lambda f: both(f)[0][Q[0]][3], Q[:1]),
    "selected": (lambda f: both(f)[0].ckpt.find("*.q_proj.*"), Q),
    "one tensor": (lambda f: both(f)[0][Q[0]], Q[:1]),
    "arithmetic of one": (lambda f: both(f)[0] * 2, NAMES),
    "arithmetic of two": (lambda f: 0.5 * sum(both(f)), NAMES),
    "arithmetic of stacks": (lambda f: xckpt.open(f / "a.safetensors", stack=True) * 2, NAMES),
    "arithmetic of a tensor": (lambda f: both(f)[0][Q[0]] + both(f)[1][Q[0]], Q[:1]),
    "merged adapter": (lambda f: both(f)[0].ckpt.merge(f / "lora"), NAMES),
    "updates": (lambda f: xckpt.open(f / "lora").ckpt.updates(), Q),
    "step": (lambda f: run_of(f).sel(step=200), NAMES),
    "step by position": (lambda f: run_of(f).isel(step=-1), NAMES),
    "step without coordinate": (lambda f: run_of(f).sel(step=200, drop=True), NAMES),
    "between steps": (lambda f: run_of(f).interp(step=150), NAMES),
    "mean of a run": (lambda f: run_of(f).mean("step"), NAMES),
    "mean of the last steps": (lambda f: run_of(f).isel(step=slice(-2, None)).mean("step"), NAMES),
    "median of a run": (lambda f: run_of(f).median("step"), NAMES),
    "quantile of a run": (lambda f: run_of(f).quantile(0.5, "step"), NAMES),
    "step with a metric": (
        lambda f: run_of(f).assign_coords(loss=("step", [3.0, 2.0, 1.0])).sel(step=200),
        NAMES,
    ),
    "rolling mean": (lambda f: run_of(f).rolling(step=2).mean().isel(step=-1), NAMES),
    "state dict": (lambda _: xckpt.open(tensors_of(0)), NAMES),
    "nested state dict": (
        lambda _: xckpt.open({"model": {"norm": {"weight": np.ones(3, "f4")}}}),
        ["model.norm.weight"],
    ),
    "xr.merge": (in_parts, NAMES),
    "assigned": (lambda f: both(f)[0].assign({Q[0]: both(f)[1][Q[0]] * 2}), NAMES),
    "mean of concat": (lambda f: xr.concat(both(f), "model").mean("model"), NAMES),
    "quantile of concat": (lambda f: xr.concat(both(f), "model").quantile(0.5, "model"), NAMES),
    "concat": (lambda f: xr.concat(both(f), "model"), NAMES),
    "grown": (lambda f: both(f)[0].pad(d12=(0, 4), constant_values=0), NAMES),
    "replaced by a longer one": (longer, NAMES),
    "loaded": (lambda f: both(f)[0].load(), NAMES),
    "loaded arithmetic": (lambda f: (both(f)[0] + both(f)[1]).load(), NAMES),
    "pickled": (lambda f: pickle.loads(pickle.dumps(both(f)[0])), NAMES),
    "pickled arithmetic": (lambda f: pickle.loads(pickle.dumps(sum(both(f)))), NAMES),
    "function": (lambda f: both(f)[0].map(np.abs), NAMES),
    "other type": (lambda f: both(f)[0].astype("float64"), NAMES),
    "from netCDF": (lambda f: xr.open_dataset(f / "a.nc", engine="h5netcdf"), NAMES),
    "from zarr": (lambda f: xr.open_zarr(f / "a.zarr", consolidated=False), NAMES),
}
MODELS = pytest.mark.parametrize(("make", "names"), OBJECTS.values(), ids=OBJECTS)


@MODELS
def test_the_summary_counts_the_tensors(
    make: Callable[[Path], Any], names: list[str], folder: Path
) -> None:
    obj = make(folder)
    text = repr(obj.ckpt)
    count = f"{len(names)} tensor" + ("s" if len(names) > 1 else "")
    assert count in text.splitlines()[0]
    assert "not opened" not in text
    assert "none" not in text.splitlines()[0]
    assert count in obj.ckpt._repr_html_()
    assert obj.ckpt.summary()["tensors"].sum() == len(names)


@MODELS
def test_statistics_name_the_tensors(
    make: Callable[[Path], Any], names: list[str], folder: Path
) -> None:
    table = make(folder).ckpt.stats(progress=False).ckpt.table()
    assert sorted(table.index) == sorted(names)
    assert table["count"].gt(0).all()


@MODELS
def test_findings_are_those_of_the_tensors(
    make: Callable[[Path], Any], names: list[str], folder: Path
) -> None:
    obj = make(folder)
    findings = obj.ckpt.findings(progress=False)
    assert set(findings["tensor"]) <= set(names)
    assert "finding" in repr(obj.ckpt)


@MODELS
def test_the_explorer_lists_the_tensors(
    make: Callable[[Path], Any], names: list[str], folder: Path
) -> None:
    pytest.importorskip("anywidget")
    explorer = make(folder).ckpt.explore()
    explorer.selected = names[0]
    assert explorer.selected == names[0]


@MODELS
def test_the_report_has_the_tensors(
    make: Callable[[Path], Any], names: list[str], folder: Path, tmp_path: Path
) -> None:
    make(folder).ckpt.report(tmp_path / "report.md", progress=False)
    assert f"{len(names)} tensor" in (tmp_path / "report.md").read_text()


@MODELS
def test_a_copy_has_the_names_of_the_model(
    make: Callable[[Path], Any], names: list[str], folder: Path, tmp_path: Path
) -> None:
    obj = make(folder)
    obj.ckpt.save(tmp_path / "copy.safetensors", cast="allow")
    copy = xckpt.open(tmp_path / "copy.safetensors")
    assert sorted(map(str, copy.variables)) == sorted(names)
    table = obj.ckpt.compare(copy, progress=False).ckpt.table()
    assert set(table["status"]) == {"same"}


@pytest.mark.parametrize("derive", [lambda ds: ds, lambda ds: ds * 2, lambda ds: ds + ds, abs])
def test_the_size_of_a_result_does_not_depend_on_stacking(
    derive: Callable[[xr.Dataset], xr.Dataset], folder: Path
) -> None:
    path = folder / "a.safetensors"
    sizes = [
        derive(xckpt.open(path, stack=stack)).ckpt.summary()["nbytes"].sum()
        for stack in (False, True)
    ]
    assert sizes == [sum(array.nbytes for array in tensors_of(0).values())] * 2
    run = run_of(folder)
    assert derive(run).ckpt.summary("dtype")["nbytes"].sum() == 3 * sizes[0]


@pytest.mark.parametrize(
    "derive",
    [
        lambda ds: ds,
        lambda ds: ds.rename(embd="hidden"),
        lambda ds: xr.concat([ds, ds], "model"),
        lambda ds: ds.pad(vocab=(0, 4), constant_values=0),
        lambda ds: ds.assign({HEAD: xr.concat([ds[HEAD]] * 2, "vocab").rename(vocab="label")}),
        lambda ds: ds.assign({HEAD: ds[HEAD].rename(vocab="label").assign_attrs(note="new")}),
    ],
    ids=["all", "renamed", "concatenated", "padded", "replaced", "another axis"],
)
def test_names_of_axes_and_attributes_return(
    derive: Callable[[xr.Dataset], xr.Dataset], tmp_path: Path
) -> None:
    write_models(tmp_path)
    ds = derive(xckpt.open(tmp_path / "base.safetensors"))
    ds.ckpt.save(tmp_path / "copy.safetensors")
    copy = xckpt.open(tmp_path / "copy.safetensors")
    for name, variable in ds.variables.items():
        assert copy[name].dims == variable.dims
        assert copy[name].attrs == variable.attrs


def test_steps_are_interpolated_in_their_type(folder: Path, tmp_path: Path) -> None:
    between = run_of(folder).interp(step=170)
    between.ckpt.save(tmp_path / "between.safetensors")
    copy = xckpt.open(tmp_path / "between.safetensors")
    assert between[HEAD].dtype == copy[HEAD].dtype == np.float32
    np.testing.assert_array_equal(copy[HEAD], between[HEAD].values.astype("f4"))


def test_a_row_of_the_table_of_a_run_says_how_to_select_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no metrics, and no trainer_state"):
        run_of(folder).ckpt.summary()["loss"]
    for step, loss in ((100, 3.0), (200, 2.0), (300, 1.0)):
        ds = xr.Dataset({"w": ("x", np.ones(3, "f4"))}, attrs={"loss": loss})
        xckpt.save(ds, tmp_path / f"step-{step}.zt")
    table = xckpt.open_steps(str(tmp_path / "step-*.zt")).ckpt.summary()
    with pytest.raises(KeyError, match=r"columns are steps: \.loc\[\('metric', 'loss'\)\]"):
        table["loss"]
    assert table.loc["metric", "loss"].tolist() == [3, 2, 1]
    with pytest.raises(KeyError, match="the metrics are loss"):
        table["los"]
    assert table[200].iloc[0] == 2


def test_a_result_names_the_files_that_it_is_computed_from(folder: Path) -> None:
    a, b = both(folder)
    first_line = repr((a + b).ckpt).splitlines()[0]
    assert first_line.startswith("<Checkpoint computed from a.safetensors and 1 other>")
    assert repr((a + b).load().ckpt).startswith("<Checkpoint in memory>")


def test_an_object_without_tensors_says_how_to_open_one() -> None:
    assert "xckpt.open(path) opens one" in repr(xr.Dataset().ckpt)
    with pytest.raises(ValueError, match="not opened from a checkpoint"):
        xr.Dataset().ckpt.explore()


def test_several_steps_are_saved_with_their_steps(folder: Path, tmp_path: Path) -> None:
    run_of(folder).sel(step=[100, 200]).ckpt.save(tmp_path / "run.safetensors")
    names = set(map(str, xckpt.open(tmp_path / "run.safetensors").variables))
    assert {f"step.{step}.{name}" for step in (100, 200) for name in NAMES} <= names


def test_concatenated_models_are_saved_as_arrays(folder: Path, tmp_path: Path) -> None:
    both_models = xr.concat(both(folder), "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        both_models.ckpt.save(tmp_path / "both.safetensors")
    copy = xckpt.open(tmp_path / "both.safetensors")
    assert copy[Q[0]].shape == (2, 8, 8)


def test_a_listing_of_modules_says_how_to_compute(folder: Path) -> None:
    tree: Any = xckpt.open(next(folder.rglob("*.safetensors"))).ckpt.tree()
    operators: list[Callable[[Any, Any], Any]] = [operator.add, operator.sub, operator.truediv]
    for compute in operators:
        with pytest.raises(TypeError, match=r"has no values: .*xr\.open_datatree"):
            compute(tree, tree)
    with pytest.raises(TypeError, match="has no values"):
        2 * tree


V = [name.replace("q_proj", "v_proj") for name in Q]
STACKS = "model.layers.self_attn.q_proj.weight", "model.layers.self_attn.v_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def two_per_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two matrices in each layer, and a table of the shape of the head."""
    rng = np.random.default_rng(5)
    shapes = {"model.norm.weight": (8,), HEAD: (12, 8), EMBED: (12, 8)}
    names = [EMBED, *Q, *V, "model.norm.weight", HEAD]
    tensors = {name: rng.normal(size=shapes.get(name, (8, 8))).astype("f4") for name in names}
    tensors[Q[2]][1, 1] = np.nan  # a finding
    path = tmp_path_factory.mktemp("names") / "a.safetensors"
    xckpt.save(tensors, path)
    return path


def reversed_layers(ds: xr.Dataset) -> xr.Dataset:
    pairs = [*zip(Q, Q[::-1], strict=True), *zip(V, V[::-1], strict=True)]
    return ds.assign({name: ds[other] for name, other in pairs})


def with_prefix(ds: xr.Dataset, start: str = "wrapped.") -> xr.Dataset:
    return ds.rename({name: f"{start}{name}" for name in ds.data_vars})


def in_place(ds: xr.Dataset) -> xr.Dataset:
    ds[Q[0]] = ds[Q[1]]
    return ds


def renumbered(ds: xr.Dataset) -> xr.Dataset:
    return ds.isel(layers=[2, 1, 0]).assign_coords(layers=[0, 1, 2])


def moved(tree: Any, places: dict[str, str]) -> Any:
    """Return a tree with the variables of other places."""
    tree, nodes = tree.copy(), {}
    for to, source in places.items():
        nodes[to.replace(".", "/")] = tree[source.replace(".", "/")].variable
    for to, variable in nodes.items():
        tree[to] = variable
    return tree


def tree_of(change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    return lambda path: change(xr.open_datatree(path, engine="safetensors"))


def flat_of(change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    return lambda path: change(xckpt.open(path))


def stacked_of(change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    return lambda path: change(xckpt.open(path, stack=True))


MOVED: dict[str, Callable[[Path], Any]] = {
    "renamed": flat_of(lambda ds: ds.rename({"model.norm.weight": "model.final_norm.weight"})),
    "swapped": flat_of(lambda ds: ds.rename({Q[0]: Q[2], Q[2]: Q[0]})),
    "assigned": flat_of(lambda ds: ds.assign({Q[0]: ds[Q[2]], Q[2]: ds[Q[0]]})),
    "assigned in place": flat_of(in_place),
    "duplicated": flat_of(lambda ds: ds.assign({HEAD: ds[EMBED]})),
    "with another layer": flat_of(
        lambda ds: ds.assign({n.replace(".2.", ".3."): ds[n] for n in (Q[2], V[2])})
    ),
    "with a prefix": flat_of(with_prefix),
    "without a prefix": flat_of(
        lambda ds: ds.rename({str(name): str(name).removeprefix("model.") for name in ds})
    ),
    "reversed": flat_of(reversed_layers),
    "sliced and swapped": flat_of(
        lambda ds: ds.rename({Q[0]: Q[2], Q[2]: Q[0]}).isel({ds[Q[0]].dims[0]: slice(2, 6)})
    ),
    "reversed and stacked": flat_of(lambda ds: reversed_layers(ds).ckpt.stack()),
    "stacks renamed": stacked_of(lambda ds: ds.rename({s: f"wrapped.{s}" for s in STACKS})),
    "stacks swapped": stacked_of(
        lambda ds: ds.rename(dict(zip(STACKS, STACKS[::-1], strict=True)))
    ),
    "stacks duplicated": stacked_of(lambda ds: ds.assign({STACKS[1]: ds[STACKS[0]]})),
    "stacks renumbered": stacked_of(renumbered),
    "stacks counted from one": stacked_of(lambda ds: ds.assign_coords(layers=[1, 2, 3])),
    "a layer of the stacks": stacked_of(lambda ds: ds.isel(layers=2)),
    "layers of renamed stacks": stacked_of(
        lambda ds: ds.rename({s: f"wrapped.{s}" for s in STACKS}).isel(layers=[2, 0])
    ),
    "renumbered and unstacked": stacked_of(lambda ds: renumbered(ds).ckpt.unstack()),
    "swapped in a tree": tree_of(lambda dt: moved(dt, {Q[0]: Q[2], Q[2]: Q[0]})),
    "duplicated in a tree": tree_of(lambda dt: moved(dt, {HEAD: EMBED})),
    "layers reversed in a tree": tree_of(
        lambda dt: moved(dt, dict(zip([*Q, *V], [*Q[::-1], *V[::-1]], strict=True)))
    ),
    "a tree below a node": tree_of(lambda dt: xr.DataTree(children={"wrapped": dt})),
}


def rows(table: Any) -> Any:
    """Return a table in the order of its rows' names."""
    return table.sort_index().round(6)


def findings_of(obj: Any) -> list[Any]:
    """Return the findings, without those on bytes of a file that variables have in common."""
    frame = xckpt.findings(obj)[["tensor", "rule", "explanation"]]
    is_other = ~frame["rule"].isin(["tied", "copied_layer"])
    return sorted(map(tuple, frame[is_other].to_numpy().tolist()))


def footprint_of(obj: Any) -> Any:
    """Return the sizes, without that of the file."""
    return xckpt.footprint(obj).drop_attrs().drop_vars("file_nbytes", errors="ignore").to_dict()


def chart_of(obj: Any) -> list[str] | str:
    """Return the texts of a chart, or why there is none."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    try:
        figure = obj.ckpt.plot.layers("mean").figure
    except ValueError as error:
        return str(error)
    texts = sorted({text.get_text() for text in figure.findobj(pyplot.Text)})
    pyplot.close(figure)
    return texts


VIEWS: dict[str, Callable[[Any, Any], Any]] = {
    "stats": lambda obj, _: rows(xckpt.stats(obj).ckpt.table()),
    "some stats": lambda obj, _: rows(xckpt.stats(obj, "*q_proj*").ckpt.table()),
    "by layer": lambda obj, _: rows(xckpt.stats(obj).ckpt.by("layer").to_dataframe()),
    "by role": lambda obj, _: rows(xckpt.stats(obj).ckpt.by("role").to_dataframe()),
    "histogram": lambda obj, _: rows(xckpt.histogram(obj, bins=4).ckpt.table()),
    "spectrum": lambda obj, _: rows(xckpt.spectrum(obj).ckpt.table()),
    "findings": lambda obj, _: findings_of(obj),
    # The user may name axes, too: those of a variable stay.
    "structure": lambda obj, _: rows(obj.ckpt.structure().drop(columns="axes")),
    "summary": lambda obj, _: rows(obj.ckpt.summary()),
    "chart": lambda obj, _: chart_of(obj),
    "manifest": lambda obj, _: str(xckpt.manifest(obj)),
    "footprint": lambda obj, _: footprint_of(obj),
    "compare": lambda obj, base: rows(xckpt.compare(base, obj).ckpt.table()),
    "compare the other way": lambda obj, base: rows(xckpt.compare(obj, base).ckpt.table()),
    "matched by content": lambda obj, base: rows(
        xckpt.compare(base, obj, names="auto").ckpt.table()
    ),
}


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("make", MOVED.values(), ids=MOVED)
class TestTensorsAreCalledAsTheirVariables:
    """Every view of variables that were renamed or assigned is that of their saved file."""

    def saved(self, obj: Any, folder: Path) -> Any:
        obj.ckpt.save(folder / "saved.safetensors")
        return xckpt.open(folder / "saved.safetensors")

    @pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
    def test_every_view_has_the_names_of_the_saved_file(
        self,
        make: Callable[[Path], Any],
        view: Callable[[Any, Any], Any],
        two_per_layer: Path,
        tmp_path: Path,
    ) -> None:
        obj, base = make(two_per_layer), xckpt.open(two_per_layer)
        seen, expected = view(obj, base), view(self.saved(obj, tmp_path), base)
        if hasattr(seen, "compare"):
            assert seen.index.tolist() == expected.index.tolist()
            common = seen.columns.intersection(expected.columns)
            assert seen[common].astype(str).to_dict() == expected[common].astype(str).to_dict()
        else:
            assert seen == expected

    def test_it_is_equal_to_its_saved_file(
        self, make: Callable[[Path], Any], two_per_layer: Path, tmp_path: Path
    ) -> None:
        obj = make(two_per_layer)
        saved = self.saved(obj, tmp_path)
        for pair in ((obj, saved), (saved, obj)):
            assert set(xckpt.compare(*pair).ckpt.table()["status"]) == {"same"}
