"""A training run as one Dataset."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.test_stacking import moe, zt
from xckpt.arrays.stacked import StackedArray
from xckpt.errors import CheckpointWarning
from xckpt.opening.steps import open_steps
from xckpt.writing.saving import save

if TYPE_CHECKING:
    from pathlib import Path

STEPS = (9, 10, 100)


def run(folder: Path, form: str = "step-{}.zt") -> list[Path]:
    """Write checkpoints whose values grow by the number of the step."""
    paths = [folder / form.format(step) for step in STEPS]
    for path, step in zip(paths, STEPS, strict=True):
        path.parent.mkdir(exist_ok=True)
        arrays = {name: values + step for name, values in moe().items()}
        path.write_bytes(zt(arrays, {"loss": 1 / step, "license": "MIT", "notes": [step]}))
    return paths


def opened(*args: Any, **options: Any) -> xr.Dataset:
    with pytest.warns(CheckpointWarning, match="'notes'"):
        return open_steps(*args, **options)


@pytest.mark.parametrize(
    "form", ["step-{}.zt", "step{:07d}.zt", "checkpoint-{}/model-7.zt", "v2-epoch-{}-final.zt"]
)
def test_steps_are_a_dimension(tmp_path: Path, form: str) -> None:
    run(tmp_path, form)
    ds = opened(str(tmp_path / form.replace("{:07d}", "*").replace("{}", "*")))
    assert ds.indexes["step"].tolist() == list(STEPS)
    assert list(ds.data_vars) == list(moe())
    for name, values in moe().items():
        assert ds.variables[name].dims[0] == "step"
        expected = np.stack([values + step for step in STEPS])
        np.testing.assert_array_equal(ds.variables[name], expected)
    assert ds.attrs == {"license": "MIT"}
    np.testing.assert_array_equal(ds["loss"], [1 / step for step in STEPS])
    assert ds["loss"].dims == ("step",)


def test_steps_equal_a_concatenation_by_xarray(tmp_path: Path) -> None:
    paths = run(tmp_path)
    theirs = xr.open_mfdataset(
        paths, engine="ztensor", combine="nested", concat_dim="step", combine_attrs="drop_conflicts"
    )
    ours = opened(paths)
    xr.testing.assert_equal(theirs, ours.drop_vars(["step", "loss"]))
    assert [v.dims for v in theirs.variables.values()] == [
        ours.variables[name].dims for name in theirs.variables
    ]
    theirs.close()
    ours.close()


def test_layers_are_dimensions_after_the_steps(tmp_path: Path) -> None:
    paths = run(tmp_path)
    ds = opened(paths, stack=True)
    experts = ds["layers.experts.w"]
    assert experts.dims[:3] == ("step", "layers_2", "experts")
    lazy = experts.data.dask.lazy
    assert isinstance(lazy, StackedArray)
    assert lazy.grid == (3, 2, 3)
    member = experts.sel(step=10, layers_2=3, experts=1)
    np.testing.assert_array_equal(member, moe()["layers.3.experts.1.w"] + 10)
    assert len(dict(member.data.dask)) == 1
    only = opened(paths, stack="experts")
    assert only["layers.3.experts.w"].dims[:2] == ("step", "experts")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(ds))["embed"], ds["embed"])


def test_unstacking_gives_every_tensor_of_every_step(tmp_path: Path) -> None:
    flat = opened(run(tmp_path), stack=True).ckpt.unstack()
    assert len(flat.data_vars) == 3 * len(moe())
    np.testing.assert_array_equal(flat["step.100.embed"], moe()["embed"] + 100)


def test_options_are_those_of_the_engine(tmp_path: Path) -> None:
    paths = run(tmp_path)
    names = {"embed": ("vocab", "hidden"), "layers.*.norm": ("hidden",)}
    ds = opened(paths, "ztensor", tensors=["embed", "*.norm"], dims=names, dim="t")
    assert ds["embed"].dims == ("t", "vocab", "hidden")
    assert ds["layers.1.norm"].dims == ("t", "hidden")
    assert len(ds.data_vars) == 5
    assert "embed" not in opened(paths, drop_variables="embed")
    with pytest.raises(TypeError, match="no option"):
        open_steps(paths, tensor="embed")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="did you mean 'ztensor'"):
        open_steps(paths, "zt")


def test_steps_can_be_given(tmp_path: Path) -> None:
    paths = run(tmp_path)
    ds = opened(paths, step=[3, 1, 2])
    assert ds.indexes["step"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(ds["embed"].sel(step=3), moe()["embed"] + 9)
    for wrong in ([1, 2], [1, 1, 2], [-1, 0, 1]):
        with pytest.raises(ValueError, match="step"):
            open_steps(paths, step=wrong)
    with pytest.raises(ValueError, match="has no step; pass step="):
        open_steps([paths[0].rename(tmp_path / "last.zt")])


def test_a_single_step_is_a_dimension(tmp_path: Path) -> None:
    ds = open_steps(run(tmp_path)[1], stack=True)
    assert ds["layers.experts.w"].dims[:3] == ("step", "layers_2", "experts")
    assert ds.indexes["step"].tolist() == [10]


def test_steps_with_different_tensors(tmp_path: Path) -> None:
    for step, arrays in enumerate(
        ({"a": np.ones(3, "<f4"), "b": np.ones(3, "<f4"), "c": np.ones(3, "<f4")},
         {"a": np.ones(3, "<f4"), "b": np.ones(4, "<f4"), "d": np.ones(3, "<f4")})
    ):  # fmt: skip
        (tmp_path / f"step-{step}.zt").write_bytes(zt(arrays))
    pattern = str(tmp_path / "step-*.zt")
    with pytest.raises(ValueError, match=r"'b' has another shape.*'c' is not in.*'d' is in"):
        open_steps(pattern)
    with pytest.warns(CheckpointWarning, match="left out"):
        ds = open_steps(pattern, join="inner")
    assert list(ds.data_vars) == ["a"]
    with pytest.raises(ValueError, match="join='outer'"):
        open_steps(pattern, join="outer")  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("number", [1, 2])
def test_a_truncated_step_is_named(tmp_path: Path, number: int) -> None:
    for step in (1, 2):
        save({"a": np.ones(300), "b": np.ones(300)}, tmp_path / f"{step}.safetensors")
    path = tmp_path / f"{number}.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    text = rf"'b' cannot be read in .*{number}\.safetensors \(the file ends at .*may be truncated"
    with pytest.raises(ValueError, match=text):
        open_steps(str(tmp_path / "*.safetensors"))


def test_a_tensor_named_like_the_dimension(tmp_path: Path) -> None:
    for step in (1, 2):
        values = {"step": np.full((), step, "<f4"), "w": np.ones(2, "<f4")}
        (tmp_path / f"{step}.zt").write_bytes(zt(values))
    ds = open_steps(str(tmp_path / "*.zt"))
    np.testing.assert_array_equal(ds["step.step"], [1, 2])
    assert ds.indexes["step"].tolist() == [1, 2]


@pytest.mark.parametrize("dim", ["", "a.b", "7"])
def test_invalid_names_of_the_dimension(tmp_path: Path, dim: str) -> None:
    with pytest.raises(ValueError, match="dim="):
        open_steps(run(tmp_path), dim=dim)
