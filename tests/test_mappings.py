"""A mapping of names to arrays is accepted wherever a Dataset is."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt

if TYPE_CHECKING:
    from pathlib import Path

ARRAYS = {
    "embed": np.arange(12, dtype="f4").reshape(4, 3),
    "h.0.w": np.linspace(-1, 1, 9).reshape(3, 3),
    "h.0.b": np.zeros(3, "i8"),
}
DS = xr.Dataset({n: ([f"d{s}_{i}" for i, s in enumerate(a.shape)], a) for n, a in ARRAYS.items()})


class DType:
    """The type of a tensor, as a library of another kind than numpy has it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"faketorch.{self.name}"


class Tensor:
    """A tensor that hands itself to numpy as PyTorch's do: not of bfloat16, not with gradients."""

    def __init__(self, array: Any, *, grad: bool = False, device: str = "cpu") -> None:
        self._array, self._grad, self.device = array, grad, device
        self.dtype, self.shape = DType(array.dtype.name), array.shape

    def detach(self) -> Tensor:
        return Tensor(self._array, device=self.device)

    def cpu(self) -> Tensor:
        return Tensor(self._array, grad=self._grad)

    def view(self, dtype: DType) -> Tensor:
        return Tensor(self._array.view(dtype.name), grad=self._grad, device=self.device)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        if self._grad or self.device != "cpu" or self._array.dtype.isbuiltin != 1:
            raise TypeError("not an array of numpy")
        array: np.ndarray[Any, Any] = self._array
        return array


class WithDlpack:
    """An array that has no other protocol."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.dtype, self.shape = array.dtype, array.shape

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("faketorch")
    for bits in (8, 16):
        setattr(module, f"int{bits}", DType(f"int{bits}"))
    monkeypatch.setitem(sys.modules, "faketorch", module)
    monkeypatch.setattr(DType, "__module__", "faketorch")


KINDS: dict[str, Any] = {
    "numpy": ARRAYS,
    "tensors": {n: Tensor(a, grad=True, device="cuda") for n, a in ARRAYS.items()},
    "dlpack": {n: WithDlpack(a) for n, a in ARRAYS.items()},
    "dask": {n: da.from_array(a) for n, a in ARRAYS.items()},
    "variables": dict(DS.variables),
    "DataArrays": {n: DS[n] for n in ARRAYS},
    "nested": {"embed": ARRAYS["embed"], "h": [{"w": ARRAYS["h.0.w"], "b": ARRAYS["h.0.b"]}]},
}


@pytest.mark.parametrize("mapping", KINDS.values(), ids=KINDS)
def test_a_mapping_is_described_as_a_dataset(mapping: Any) -> None:
    expected = xckpt.stats(DS).ckpt.table()
    assert xckpt.stats(mapping).ckpt.table().equals(expected)


def test_every_function_accepts_a_mapping(tmp_path: Path) -> None:
    changed = {**ARRAYS, "embed": ARRAYS["embed"] + 1}
    path = tmp_path / "m.npz"
    xckpt.save(ARRAYS, path)
    assert set(xckpt.compare(ARRAYS, path).ckpt.table()["status"]) == {"same"}
    assert list(xckpt.compare(path, changed).ckpt.table()["status"]) == ["changed", "same", "same"]
    assert xckpt.histogram(ARRAYS).identical(xckpt.histogram(DS))
    assert xckpt.spectrum(ARRAYS, minus=changed).identical(xckpt.spectrum(DS, minus=changed))
    assert xckpt.findings(ARRAYS).equals(xckpt.findings(DS))
    assert xckpt.manifest(ARRAYS) == xckpt.manifest(path) == xckpt.manifest(DS)
    xckpt.save(ARRAYS, tmp_path / "m.zt")
    xckpt.append({"new": np.ones(3)}, tmp_path / "m.zt")
    assert set(xckpt.read_index(tmp_path / "m.zt")) == {*ARRAYS, "new"}
    DS.ckpt.report(tmp_path / "other.md", changed)
    assert "embed" in (tmp_path / "other.md").read_text()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_element_types_that_numpy_lacks(name: str, tmp_path: Path) -> None:
    array = np.linspace(-2, 2, 64).astype(getattr(ml_dtypes, name)).reshape(4, 16)
    mapping = {"w": Tensor(array, grad=True)}
    xckpt.save(mapping, tmp_path / "m.safetensors")
    index = xckpt.read_index(tmp_path / "m.safetensors")
    assert index["w"].dtype == name
    assert set(xckpt.compare(mapping, tmp_path / "m.safetensors").ckpt.table()["status"]) == {
        "same"
    }
    expected = xckpt.stats(tmp_path / "m.safetensors", cache=False).ckpt.table()
    assert xckpt.stats(mapping).ckpt.table().equals(expected)


def test_the_state_of_an_optimizer(tmp_path: Path) -> None:
    state = {
        "model": {"w": np.ones((2, 2))},
        "optimizer": {
            "state": {0: {"step": np.float32(3), "exp_avg": np.ones((2, 2))}},
            "param_groups": [{"lr": 0.1, "params": [0], "name": None}],
        },
        "epoch": 3,
    }
    xckpt.save(state, tmp_path / "m.npz")
    names = ["model.w", "optimizer.state.0.step", "optimizer.state.0.exp_avg"]
    assert list(xckpt.read_index(tmp_path / "m.npz")) == names
    xckpt.save(state, tmp_path / "m.zt")
    attrs = xckpt.read_index(tmp_path / "m.zt").attrs
    assert attrs["epoch"] == 3
    assert attrs["optimizer.param_groups.0.lr"] == 0.1


def test_values_that_are_not_arrays_are_left_out_with_a_warning() -> None:
    with pytest.warns(xckpt.CheckpointWarning, match="'hook' of the mapping left out: neither"):
        assert len(xckpt.stats({**ARRAYS, "hook": print}).data_vars) == 3


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (SimpleNamespace(state_dict=dict), r"pass its state_dict\(\)"),
        (np.ones(3), "a mapping of names to arrays"),
        ({"a": print}, "its values are of type builtin_function"),
        ({"a": {"b": "text"}}, "its values are of type dict"),
        ({"w": Tensor(np.ones(3, "M8[s]"), device="meta")}, None),
    ],
)
def test_other_objects_are_type_errors(obj: Any, message: str | None) -> None:
    with pytest.raises(TypeError, match=message):
        xckpt.stats(obj)


def test_mappings_that_cannot_be_datasets() -> None:
    with pytest.raises(ValueError, match=r"two arrays are called 'a\.b'"):
        xckpt.stats({"a.b": np.ones(3), "a": {"b": np.ones(3)}})
    endless: dict[str, Any] = {"w": np.ones(3)}
    endless["self"] = endless
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        xckpt.stats(endless)
    with pytest.raises(TypeError, match=r"'w' is a .*Broken that numpy cannot read: out of memory"):
        xckpt.stats({"w": Broken(np.ones(3))})


class Broken(Tensor):
    def detach(self) -> Tensor:
        raise RuntimeError("out of memory")
