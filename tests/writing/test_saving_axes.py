"""Names of axes that could not be shown are written as stored, unless changed."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.formats import primitiv_files as files
from tests.formats.burnpack_files import burnpack, dense
from tests.writing.saved import ENGINES, OPTIONS
from xckpt import CheckpointWarning, read_index
from xckpt.writing import convert, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHT = np.arange(6, dtype="f4").reshape(2, 3)


def batched(batch: int) -> bytes:
    values = np.arange(2 * 3 * batch, dtype="f4").reshape(2, 3, batch)
    return files.tensor(values, batched=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with statistics of different batches, and with a parameter called ``batch``."""
    plain = files.tensor(WEIGHT)
    content = files.model(
        (["batch"], files.parameter(plain, ("s", batched(4)))),
        (["w"], files.parameter(plain, ("s", batched(5)), ("t", batched(7)))),
    )
    path = tmp_path / "m.model"
    path.write_bytes(files.file(files.MODEL, content))
    return path


CHANGES: dict[str, Callable[[xr.Dataset], Any]] = {
    "nothing": lambda ds: ds,
    "loaded": lambda ds: ds.load(),
    "computed": lambda ds: ds.compute(),
    "chunked": lambda ds: ds.chunk(dict.fromkeys(ds.dims, 1)),
    "some": lambda ds: ds[["w", "w:s", "w:t", "batch", "batch:s"]],
    "attributes": lambda ds: ds.assign_attrs(more="x"),
    "sliced by nothing": lambda ds: ds.isel(dict.fromkeys(ds.dims, slice(None))),
    "values": lambda ds: ds.assign({"w": ds["w"].copy(data=WEIGHT * 2)}),
}


@pytest.mark.filterwarnings("ignore:.*without a place. 'more'")
@pytest.mark.parametrize("change", CHANGES)
def test_batches_whose_axis_name_is_taken(change: str, model: Path, tmp_path: Path) -> None:
    ds = xr.open_dataset(model, engine="primitiv")
    assert "batch" not in ds.dims  # it is a variable
    save(CHANGES[change](ds), tmp_path / "new.model", "primitiv")
    before, after = read_index(model).tensors, read_index(tmp_path / "new.model").tensors
    assert {n: (t.shape, t.dims) for n, t in after.items()} == {
        name: (tensor.shape, tensor.dims) for name, tensor in before.items()
    }
    if change != "values":
        assert (tmp_path / "new.model").read_bytes() == model.read_bytes()


def test_a_renamed_batch_is_an_ordinary_axis(model: Path, tmp_path: Path) -> None:
    ds = xr.open_dataset(model, engine="primitiv")
    first, second = ds["w:s"].dims[-1], ds["w:t"].dims[-1]
    with pytest.warns(CheckpointWarning, match="dimensions without a place: 'w:s'$"):
        save(ds.rename({first: "time"}), tmp_path / "new.model", "primitiv")
    tensors = read_index(tmp_path / "new.model").tensors
    assert (tensors["w:s"].shape, tensors["w:s"].dims) == ((2, 3, 5), None)
    assert (tensors["w:t"].shape, tensors["w:t"].dims) == ((2, 3, 7), (None, None, "batch"))
    assert second in ds.dims


def test_names_of_the_caller_win(model: Path, tmp_path: Path) -> None:
    dims = {"w:s": (None, None, "time"), "w": ("out", "in")}
    ds = xr.open_dataset(model, engine="primitiv", dims=dims)
    save(ds, tmp_path / "new.zt")
    tensors = read_index(tmp_path / "new.zt").tensors
    assert {name: tensor.dims for name, tensor in tensors.items() if tensor.dims} == {
        "batch:s": (None, None, "batch"),
        "w": ("out", "in"),
        "w:s": (None, None, "time"),
        "w:t": (None, None, "batch"),
    }


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"primitiv"}))
def test_names_with_two_sizes_or_of_a_variable(engine: str, tmp_path: Path) -> None:
    options = OPTIONS.get(engine, {}) | ({"kind": "custom"} if engine == "gptrs" else {})
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    nodes = {
        "/": xr.Dataset({"x": ("n", WEIGHT[0])}),
        "/a": xr.Dataset({"w": (("row", "d2"), WEIGHT)}),
        "/b": xr.Dataset({"w": (("row", "x"), WEIGHT.T)}),
    }
    save(xr.DataTree.from_dict(nodes), first, engine, **options)
    expected = {name: tensor.dims for name, tensor in read_index(first).tensors.items()}
    assert expected["a.w"] == ("row", "d2")  # it does not stand for its size
    assert expected["b.w"] == ("row", "x")
    ds = xr.open_dataset(first, engine=engine)
    assert sum("row" in variable.dims for variable in ds.variables.values()) == 1
    assert "x" not in ds.dims
    for form in (ds, ds.copy(deep=True), xr.open_dataset(first, engine=engine).load()):
        save(form, second, engine, overwrite=True, **options)
        assert second.read_bytes() == first.read_bytes()
    convert(first, third, engine, **options)
    assert third.read_bytes() == first.read_bytes()


def test_names_of_axes_that_reading_does_not_infer_are_written(tmp_path: Path) -> None:
    path = tmp_path / "m.bpk"
    tensors = {"fc.weight": dense(np.ones((4, 3), "f4")), "fc.bias": dense(np.ones(3, "f4"))}
    path.write_bytes(burnpack(tensors))
    tree = xr.open_datatree(path, engine="burnpack")
    assert tree["fc"].to_dataset()["weight"].dims == ("d_input", "d_output")
    save(tree, tmp_path / "same.bpk")
    assert (tmp_path / "same.bpk").read_bytes() == path.read_bytes()
    save(tree, tmp_path / "other.zt")
    index = read_index(tmp_path / "other.zt").tensors
    assert index["fc.weight"].dims == ("d_input", "d_output")
    renamed = xr.map_over_datasets(lambda ds: ds.rename(d_input="in") if ds else ds, tree)
    renamed.encoding = tree.encoding
    save(renamed, tmp_path / "renamed.bpk")
    assert read_index(tmp_path / "renamed.bpk").tensors["fc.weight"].dims == ("in", None)


LOST = {
    "w": (("out", "in"), (2, 3)),
    "column": ((None, None), (3, 1)),
    "one": ((None,), (1,)),
    "scalar": ((), ()),
    ".a": ((None,), (2,)),
    "x:y": ((None,), (2,)),
    "100%": ((None,), (2,)),
}
DIMS, SCALARS = "names of dimensions without a place", "scalars that get an axis of length 1"
ONES, NAMES = "axes of length 1 at the end", "names that will read differently"


@pytest.mark.parametrize(
    ("engine", "options", "losses"),
    [
        ("gptrs", {"container": "tensors"}, {DIMS: ["w"], SCALARS: ["scalar"]}),
        ("gptrs", {"container": "checkpoint", "kind": "gpt"}, {SCALARS: ["scalar"]}),
        ("primitiv", {}, {DIMS: ["w"], ONES: ["column", "one"], NAMES: ["100%", "x:y"]}),
        ("safetensors", {}, {}),
        ("gguf", {}, {}),
    ],
)
def test_one_warning_lists_the_losses(
    engine: str, options: dict[str, Any], losses: dict[str, list[str]], tmp_path: Path
) -> None:
    ds = xr.Dataset()
    for name, (dims, shape) in LOST.items():
        shown = [dim or f"d{size}" for dim, size in zip(dims, shape, strict=True)]
        ds[name] = xr.Variable(shown, np.ones(shape, "f4"), encoding={"layout": "dense"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(ds, tmp_path / "m", engine, **options)
    assert len(caught) == bool(losses)
    text = "".join(str(warning.message) for warning in caught)
    for loss, names in losses.items():
        assert re.search(rf"{loss}[^;]*: {', '.join(map(repr, names))}(;|$)", text)
    reopened = xr.open_dataset(tmp_path / "m", engine=engine)
    assert ".a" in reopened
    lost = {name for names in losses.values() for name in names}
    for name in LOST.keys() - lost:
        assert (reopened[name].dims, reopened[name].shape) == (ds[name].dims, ds[name].shape)
    for name in lost & set(reopened):
        assert (reopened[name].dims, reopened[name].shape) != (ds[name].dims, ds[name].shape)


def test_a_single_array_has_no_names_of_dimensions(tmp_path: Path) -> None:
    ds = xr.Dataset({"arr_0": (("out", "in"), np.ones((2, 3)))})
    with pytest.warns(CheckpointWarning, match=f"{DIMS}: 'arr_0'$"):
        save(ds, tmp_path / "m.npy")
