"""Stacked objects are saved as the flat files that they came from."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.writing.saved import ENGINES, OPTIONS, assert_same_bits
from xckpt import CheckpointError, CheckpointWarning, read_index
from xckpt.errors import UnsupportedError
from xckpt.writing import save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYERS, EXPERTS = 5, 3


def model(engine: str, tmp_path: Path) -> Path:
    """Write numbered modules in two levels, others beside them, dims and attributes."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            arrays[f"layers.{layer}.experts.{expert}.w"] = (("o", "i"), rng.random((4, 6), "f4"))
        arrays[f"layers.{layer}.norm"] = ("i", rng.random(6, "f4"))
    arrays["embed"] = (("v", "i"), rng.random((9, 6), "f4"))
    path = tmp_path / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        ds = xr.Dataset(arrays, attrs={"licence": "MIT"})
        save(ds, path, engine, **OPTIONS.get(engine, {}))
    return path


def saved(obj: Any, path: Path, engine: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        save(obj, path, engine, overwrite=True, **OPTIONS.get(engine, {}))
    return path.read_bytes()


def forms(path: Path, engine: str) -> dict[str, Any]:
    flat = xr.open_dataset(path, engine=engine)
    tree = xr.open_datatree(path, engine=engine)
    return {
        "opened": xr.open_dataset(path, engine=engine, stack=True),
        "one level": xr.open_dataset(path, engine=engine, stack=["experts"]),
        "later": flat.ckpt.stack(),
        "copied": flat.ckpt.stack().copy(),
        "tree": xr.open_datatree(path, engine=engine, stack=True),
        "tree later": tree.ckpt.stack(),
        "loaded": xr.open_dataset(path, engine=engine, stack=True).load(),
    }


FORMS = ["opened", "one level", "later", "copied", "tree", "tree later", "loaded"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
def test_bytes_equal_those_of_the_flat_object(engine: str, form: str, tmp_path: Path) -> None:
    path = model(engine, tmp_path)
    assert set(forms(path, engine)) == set(FORMS)
    stacked = forms(path, engine)[form]
    again = saved(stacked, tmp_path / "again", engine)
    # A tree is in the order of its nodes.
    open_flat = xr.open_datatree if form == "tree later" else xr.open_dataset
    assert again == saved(open_flat(path, engine=engine), tmp_path / "flat", engine)


@pytest.mark.parametrize("path", golden_files("*/*", with_suffix=".expected.json"))
def test_golden_files(path: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        engine = read_index(path).format
        flat = xr.open_dataset(path, engine=engine)
        stacked = xr.open_dataset(path, engine=engine, stack=True)
    try:
        expected = saved(flat, tmp_path / "flat", engine)
    except (CheckpointError, ValueError) as error:
        with pytest.raises(type(error)):
            saved(stacked, tmp_path / "again", engine)
        return
    assert saved(stacked, tmp_path / "again", engine) == expected


SELECTIONS: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "slice": lambda ds: ds.isel(layers=slice(1, 3)),
    "one": lambda ds: ds.isel(layers=2),
    "label": lambda ds: ds.sel(experts=1),
    "step": lambda ds: ds.isel(experts=slice(None, None, 2)),
    "both": lambda ds: ds.isel(layers=slice(2, None)).isel(experts=0),
    "transposed": lambda ds: ds.transpose("experts", ...),
    "picked": lambda ds: ds.isel(layers=[3, 1]),
    "reversed": lambda ds: ds.isel(layers=slice(None, None, -1)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_selections_save_only_selected_tensors(engine: str, selection: str, tmp_path: Path) -> None:
    path = model(engine, tmp_path)
    stacked = SELECTIONS[selection](xr.open_dataset(path, engine=engine, stack=True))
    names = list(stacked.ckpt.unstack().data_vars)
    assert 0 < len(names) <= LAYERS * (EXPERTS + 1) + 1
    flat = xr.open_dataset(path, engine=engine)[names]
    again = saved(stacked, tmp_path / "again", engine)
    assert again == saved(flat, tmp_path / "flat", engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_computed_values_are_those_of_the_flat_object(engine: str, tmp_path: Path) -> None:
    path = model(engine, tmp_path)
    with xr.set_options(keep_attrs=True):
        for compute in COMPUTATIONS.values():
            stacked = compute(xr.open_dataset(path, engine=engine, stack=True))
            tree = compute(xr.open_datatree(path, engine=engine, stack=True))
            flat = compute(xr.open_dataset(path, engine=engine))
            names = [name for name in flat.variables if _is_left(str(name), stacked)]
            for obj in (stacked, tree):
                saved(obj, tmp_path / "again", engine)
                ds = xr.open_dataset(tmp_path / "again", engine=engine)
                assert set(ds.variables) == set(names)
                for name in names:
                    assert_same_bits(ds[name].values, flat.variables[name].values)


def _is_left(name: str, stacked: xr.Dataset) -> bool:
    layers = np.atleast_1d(stacked.layers.values).tolist()
    return not name.startswith("layers.") or int(name.split(".")[1]) in layers


def _negated(obj: Any) -> Any:
    return -obj


def _some_layers(obj: Any) -> Any:
    return obj.isel(layers=slice(1, 4)) if "layers" in obj.dims else obj


COMPUTATIONS: dict[str, Callable[[Any], Any]] = {
    "product": lambda obj: obj * 2,
    "difference": lambda obj: obj - obj * 0.5,
    "map": lambda obj: _each(obj, _negated),
    "selection": lambda obj: _each(obj, _some_layers) + 1,
    "selection later": lambda obj: _each(obj + 1, _some_layers),
    "one": lambda obj: _each(obj * 2, lambda ds: ds.isel(layers=2) if "layers" in ds.dims else ds),
}


def _each(obj: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to a Dataset, or to each of a tree."""
    return obj.map_over_datasets(function) if isinstance(obj, xr.DataTree) else function(obj)


def test_reductions_along_modules_are_new_tensors(tmp_path: Path) -> None:
    path = model("safetensors", tmp_path)
    stacked = xr.open_dataset(path, engine="safetensors", stack=True)
    saved(stacked.mean("layers"), tmp_path / "again", "safetensors")
    ds = xr.open_dataset(tmp_path / "again", engine="safetensors")
    assert {"layers.experts.w", "layers.norm", "embed", "experts"} == set(ds.variables)
    assert ds["layers.experts.w"].shape == (EXPERTS, 4, 6)
    assert ds["experts"].values.tolist() == list(range(EXPERTS))


@pytest.mark.parametrize("select", [None, "slice", "one", "label", "step", "both"], ids=str)
def test_unmodified_tensors_are_copied_as_stored(select: str | None, tmp_path: Path) -> None:
    """Even NaN of any bits, which would not survive decoding."""
    codes = np.arange(64, dtype="u1").reshape(8, 8)
    values = codes.view(ml_dtypes.float8_e4m3fn)
    arrays = {f"layers.{i}.experts.{j}.w": (("o", "i"), values) for i in range(4) for j in range(3)}
    packed = {"*.experts.1.w": {"compression": "zstd-seekable", "digest": "xxh3"}}
    save(xr.Dataset(arrays), tmp_path / "m.zt", encoding=packed, version="2")
    stacked = xr.open_dataset(tmp_path / "m.zt", engine="ztensor", stack=True)
    if select is not None:
        stacked = SELECTIONS[select](stacked)
    save(stacked, tmp_path / "again.zt", version="2")
    before, after = read_index(tmp_path / "m.zt"), read_index(tmp_path / "again.zt")
    assert len(after.tensors) == len(stacked.ckpt.unstack().data_vars)
    for name, tensor in after.tensors.items():
        old, new = before.tensors[name].parts["data"], tensor.parts["data"]
        assert (new.dtype, new.encoding, new.digest) == (old.dtype, old.encoding, old.digest)
        stored = [
            (tmp_path / name).read_bytes()[part.offset :][: part.nbytes]
            for name, part in (("m.zt", old), ("again.zt", new))
        ]
        assert stored[0] == stored[1]


MOVED: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "3,0,1": lambda ds: ds.isel(layers=[3, 0, 1]),
    "3,2,1,0": lambda ds: ds.isel(layers=slice(None, None, -1)),
    "3,1": lambda ds: ds.isel(layers=[0, 1, 3]).isel(layers=[2, 1]),
    "1,1,0,2,3": lambda ds: ds.isel(layers=[1, 1, 0, 2, 3]),
    "2,0": lambda ds: ds.isel(layers=np.array([True, False, True, False]))[{"layers": [1, 0]}],
    "1,2": lambda ds: ds.isel(layers=slice(1, None)).isel(layers=[0, 1], experts=[0, 2]),
}


@pytest.mark.parametrize("order", MOVED)
@pytest.mark.parametrize("later", [False, True])
def test_moved_layers_are_copied_as_stored(order: str, later: bool, tmp_path: Path) -> None:
    """Even NaN of any bits, which would not survive decoding."""
    codes = np.arange(256, dtype="u1").reshape(4, 8, 8)
    values = codes.view(ml_dtypes.float8_e4m3fn)
    arrays = {
        f"layers.{i}.experts.{j}.w": (("o", "i"), np.roll(values[i], j))
        for i in range(4)
        for j in range(3)
    }
    save(xr.Dataset(arrays), tmp_path / "m.zt", version="2")
    ds = xckpt.open(tmp_path / "m.zt", stack=not later)
    ds = ds.ckpt.stack() if later else ds
    layers = [*map(int, order.split(","))]
    moved = MOVED[order](ds).assign_coords(layers=range(len(layers)))
    save(moved, tmp_path / "again.zt", version="2")
    index = read_index(tmp_path / "again.zt")
    data = (tmp_path / "again.zt").read_bytes()
    experts = moved["experts"].values.tolist()
    assert len(index.tensors) == len(experts) * len(layers)
    for number, layer in enumerate(layers):
        for expert in experts:
            tensor = index.tensors[f"layers.{number}.experts.{expert}.w"]
            part = tensor.parts["data"]
            assert part.dtype == "float8_e4m3fn"
            stored = data[part.offset :][: part.nbytes]
            assert stored == np.roll(codes[layer], expert).tobytes()


def test_renamed_dimensions_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = model("safetensors", tmp_path)
    stacked = xr.open_dataset(path, engine="safetensors", stack=True)
    with pytest.raises((ValueError, UnsupportedError), match="unstack before"):
        save(stacked.rename(layers="depth"), tmp_path / "again.safetensors")
    assert not (tmp_path / "again.safetensors").exists()


def test_thousands_of_members_take_no_longer_than_flat_tensors(tmp_path: Path) -> None:
    """A quadratic step would take a minute; the measured time is a fifth of a second."""
    arrays = {
        f"layers.{i // 8}.experts.{i % 8}.w": ("i", np.full(16, i, "f4")) for i in range(2000)
    }
    save(xr.Dataset(arrays), tmp_path / "m.safetensors")
    seconds = {}
    for stack in (False, True):
        times = []
        for _ in range(3):
            ds = xr.open_dataset(tmp_path / "m.safetensors", stack=stack)
            start = time.perf_counter()
            save(ds, tmp_path / "again.safetensors", overwrite=True)
            times.append(time.perf_counter() - start)
        seconds[stack] = min(times)
        again = (tmp_path / "again.safetensors").read_bytes()
        assert again == (tmp_path / "m.safetensors").read_bytes()
    assert seconds[True] < 5 * seconds[False] + 0.5


def test_repeated_layers_have_the_type_of_the_others(tmp_path: Path) -> None:
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(3)]
    tensors = {name: np.full((4, 8), n, ml_dtypes.bfloat16) for n, name in enumerate(names)}
    xckpt.save(tensors, tmp_path / "base.safetensors")
    ds = xckpt.open(tmp_path / "base.safetensors", stack=True)
    deeper = ds.isel(layers=[0, 1, 1, 2]).assign_coords(layers=range(4))
    deeper.ckpt.save(tmp_path / "deeper.safetensors")
    index = xckpt.read_index(tmp_path / "deeper.safetensors")
    assert {tensor.dtype for tensor in index.tensors.values()} == {"bfloat16"}
    assert {tensor.dims for tensor in index.tensors.values()} == {None}
    again = xckpt.open(tmp_path / "deeper.safetensors", stack=True)
    assert again["layers"].values.tolist() == [0, 1, 2, 3]
    assert again["model.layers.mlp.up_proj.weight"][:, 0, 0].values.tolist() == [0, 1, 1, 2]


QUERY, KEY, HEAD = "bert.layer.{}.query.bias", "bert.layer.{}.key.bias", "bert.head.weight"


def numbers_of(path: Path) -> dict[str, list[float]]:
    return {str(n): v.values.ravel().tolist() for n, v in xckpt.open(path).data_vars.items()}


@pytest.mark.filterwarnings("ignore:.*tensors that shared their bytes")
class TestRenaming:
    """The name of a variable decides over the names that its tensors had when it was opened."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        tensors: dict[str, Any] = {HEAD: np.full((2, 4), 7, "f4")}
        for n in range(3):
            tensors[QUERY.format(n)] = np.full(4, n, "f4")
            tensors[KEY.format(n)] = np.full(4, 10 + n, "f4")
        (tmp_path / "run").mkdir()
        for step in range(1, 4):
            values = {name: value + 100 * step for name, value in tensors.items()}
            xckpt.save(values, tmp_path / "run" / f"step_{step}.safetensors")
        xckpt.save(tensors, tmp_path / "m.safetensors")
        return tmp_path

    @staticmethod
    def saved(ds: xr.Dataset, path: Path) -> dict[str, list[float]]:
        ds.ckpt.save(path / "again.safetensors", overwrite=True)
        again = numbers_of(path / "again.safetensors")
        assert again == {n: v.values.ravel().tolist() for n, v in ds.ckpt.unstack().items()}
        return again

    @pytest.mark.parametrize("change", [lambda ds: ds, lambda ds: ds * 1, lambda ds: ds.load()])
    @pytest.mark.parametrize("kind", ["plain", "stack", "step", "stack of a step"])
    def test_new_names_are_those_in_the_file(self, path: Path, kind: str, change: Any) -> None:
        stack = "stack" in kind
        if "step" in kind:
            ds = xckpt.open_steps(path / "run", stack=stack).sel(step=2)
            expected = numbers_of(path / "run" / "step_2.safetensors")
        else:
            ds = xckpt.open(path / "m.safetensors", stack=stack)
            expected = numbers_of(path / "m.safetensors")
        ds = change(ds)
        renamed = ds.rename({name: str(name).removeprefix("bert.") for name in ds})
        again = self.saved(renamed, path)
        assert again == {n.removeprefix("bert."): values for n, values in expected.items()}

    @pytest.mark.parametrize("kind", ["stack", "step"])
    def test_tensors_change_places(self, path: Path, kind: str) -> None:
        ds = xckpt.open(path / "m.safetensors", stack=True)
        query, key = "bert.layer.query.bias", "bert.layer.key.bias"
        if kind == "step":
            ds = xckpt.open_steps(path / "run").sel(step=2)
            query, key = QUERY.format(1), KEY.format(1)
        before = self.saved(ds, path)
        after = self.saved(ds.rename({query: key, key: query}), path)
        assert after[KEY.format(1)] == before[QUERY.format(1)]
        assert after[QUERY.format(1)] == before[KEY.format(1)]
        copied = self.saved(ds.assign({key: ds[query]}), path)
        assert copied == before | {KEY.format(n): before[QUERY.format(n)] for n in range(3)} or (
            copied == before | {key: before[query]}
        )

    def test_a_tensor_of_a_step_takes_the_place_of_another(self, path: Path) -> None:
        step = xckpt.open_steps(path / "run").sel(step=3)
        base = xckpt.open(path / "m.safetensors").drop_vars(QUERY.format(0))
        again = self.saved(base.assign({KEY.format(0): step[QUERY.format(0)]}), path)
        assert QUERY.format(0) not in again
        assert again[KEY.format(0)] == [300.0] * 4
        head = xr.Dataset({"my.head": step[HEAD]})
        assert self.saved(head, path) == {"my.head": [307.0] * 8}

    def test_copies_have_names_of_their_own(self, path: Path) -> None:
        step = xckpt.open_steps(path / "run").sel(step=1)
        step["head2"] = step[HEAD]
        again = self.saved(step, path)
        assert again["head2"] == again[HEAD]

    def test_a_run_has_the_steps_before_new_names(self, path: Path) -> None:
        run = xckpt.open_steps(path / "run", stack=True)
        again = self.saved(run.rename({n: str(n).removeprefix("bert.") for n in run}), path)
        assert again["step.2.layer.1.key.bias"] == [211.0] * 4
        assert not any("bert" in name for name in again)

    def test_other_words_keep_the_numbers(self, path: Path) -> None:
        ds = xckpt.open(path / "m.safetensors", stack=True)
        again = self.saved(ds.rename({"bert.layer.key.bias": "h.k.bias"}), path)
        assert [name for name in again if "k.bias" in name] == [f"h.{n}.k.bias" for n in range(3)]

    def test_the_mean_of_experts_keeps_the_layers(self, path: Path) -> None:
        stacked = xr.open_dataset(model("safetensors", path), engine="safetensors", stack=True)
        mean = stacked.mean("experts")
        again = self.saved(mean, path)
        assert again.keys() == {
            *("embed", *(f"layers.{n}.norm" for n in range(LAYERS))),
            *(f"layers.{n}.experts.w" for n in range(LAYERS)),
        }

    def test_a_name_without_a_place_for_numbers_is_one_tensor_with_a_warning(
        self, path: Path
    ) -> None:
        ds = xckpt.open(path / "m.safetensors", stack=True)
        renamed = ds.rename({"bert.layer.key.bias": "k"})
        with pytest.warns(CheckpointWarning, match=r"no place for their numbers .*: 'k'"):
            renamed.ckpt.save(path / "again.safetensors")
        assert xckpt.open(path / "again.safetensors")["k"].shape == (3, 4)
        one = self.saved(renamed.isel(layer=1), path)
        assert one["k"] == [11.0] * 4
