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
