"""``ds.ckpt.by_base_id`` and ``ds.ckpt.param_key``."""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.formats.gptrs_files import indexed_file, record
from tests.formats.ztensor_files import dense_v1, v1_file
from xckpt.identity import base_id, param_key, stable_id

if TYPE_CHECKING:
    from pathlib import Path

ARRAYS = {
    "a.w": np.arange(6, dtype="<f4").reshape(2, 3),
    "a.b": np.arange(3, dtype="<i4"),
    "lm_head": np.arange(4, dtype="<f4"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of gpt.rs."""
    path = tmp_path / "model.bin"
    path.write_bytes(indexed_file([record(name, array) for name, array in ARRAYS.items()]))
    return path


@pytest.fixture(params=[xr.open_dataset, xr.open_datatree])
def opened(request: pytest.FixtureRequest, path: Path) -> Any:
    return request.param(path, engine="gptrs")


# --- by id ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARRAYS)
def test_a_tensor_by_its_id(opened: Any, name: str) -> None:
    number = base_id(name)
    text = f"{number:032x}"
    for spelling in (number, np.array([number], object)[0], number.to_bytes(16, "little"), text):
        variable = opened.ckpt.by_base_id(spelling)
        assert isinstance(variable, xr.DataArray)
        assert variable.attrs["base_id"] == text
        leaf = name.rpartition(".")[2]
        assert variable.name == (name if isinstance(opened, xr.Dataset) else leaf)
        np.testing.assert_array_equal(variable, ARRAYS[name])
    assert opened.ckpt.by_base_id(text.upper()).attrs["base_id"] == text


def test_unknown_ids_raise(opened: Any) -> None:
    with pytest.raises(KeyError, match=f"no tensor here has the base id {base_id('x'):032x}"):
        opened.ckpt.by_base_id(base_id("x"))
    for wrong in (b"", bytes(15), "a.w", "0x" + "0" * 30, "0" * 31, -1, 2**128):
        with pytest.raises(ValueError, match="a base id"):
            opened.ckpt.by_base_id(wrong)
    with pytest.raises(TypeError):
        opened.ckpt.by_base_id(1.5)


def test_a_file_without_ids() -> None:
    ds = xr.open_dataset(v1_file({"w": dense_v1(bytes(4), [1], "float32")}), engine="ztensor")
    with pytest.raises(KeyError):
        ds.ckpt.by_base_id(base_id("w"))


def test_many_tensors() -> None:
    """It must not take time for each variable as ``ds[name]`` does, neither once nor for each."""
    names = [f"blocks.{i}.w" for i in range(3000)]
    data = indexed_file([record(name, np.zeros(1, "<f4")) for name in names])
    ds = xr.open_dataset(data, engine="gptrs")
    start = time.process_time()
    keys = {ds.ckpt.param_key(name) for name in names}
    assert ds.ckpt.by_base_id(base_id(names[-1])).name == names[-1]
    assert time.process_time() - start < 1
    assert len(keys) == 3000


# --- stable ids -----------------------------------------------------------------------------------


def test_keys_are_derived_from_namespace_and_name(opened: Any) -> None:
    namespace = opened.encoding["namespace"]
    for name in ARRAYS:
        assert opened.ckpt.param_key(name) == param_key(namespace, base_id(name))


def test_every_opening_has_a_namespace_of_its_own(path: Path) -> None:
    first, second = (xr.open_dataset(path, engine="gptrs") for _ in range(2))
    tree = xr.open_datatree(path, engine="gptrs")
    assert len({opened.ckpt.param_key("a.w") for opened in (first, second, tree)}) == 3
    assert first.encoding["namespace"] < second.encoding["namespace"]


def test_copies_keep_the_namespace(opened: Any) -> None:
    key = opened.ckpt.param_key("a.w")
    assert pickle.loads(pickle.dumps(opened)).ckpt.param_key("a.w") == key
    assert opened.copy().ckpt.param_key("a.w") == key
    assert opened.load().ckpt.param_key("a.w") == key


def test_a_part_of_a_checkpoint(path: Path) -> None:
    ds = xr.open_dataset(path, engine="gptrs")
    part = ds[["a.w"]]
    assert part.ckpt.param_key("a.w") == ds.ckpt.param_key("a.w")
    with pytest.raises(KeyError):
        part.ckpt.param_key("a.b")
    tree = xr.open_datatree(path, engine="gptrs")
    assert tree["a"].ckpt.param_key("a.w") == tree.ckpt.param_key("a.w")


def test_unknown_names(opened: Any) -> None:
    with pytest.raises(KeyError, match=r"no tensor 'lm_hed' among 3; similar names: 'lm_head'"):
        opened.ckpt.param_key("lm_hed")
    with pytest.raises(KeyError, match="no tensor 3 among 3"):
        opened.ckpt.param_key(3)


@pytest.mark.parametrize("name", ["w", "poids.été", "權重", ""])
def test_tensors_of_every_format_have_keys(name: str) -> None:
    data = v1_file({name: dense_v1(bytes(4), [1], "float32")})
    ds = xr.open_dataset(data, engine="ztensor")
    assert ds.ckpt.param_key(name) == stable_id(ds.encoding["namespace"], name)


def test_parts_have_keys_of_their_own(golden: Path) -> None:
    path = golden / "ztensor" / "v1_sparse_csr.zt"
    ds = xr.open_dataset(path, engine="ztensor", decode=False)
    part = next(str(name) for name in ds.variables if str(name).endswith(":values"))
    assert ds.ckpt.param_key(part) != ds.ckpt.param_key(part.removesuffix(":values"))


def test_objects_that_were_not_opened_from_a_file() -> None:
    with pytest.raises(ValueError, match="was not opened from a checkpoint"):
        xr.Dataset({"w": ("x", [1.0])}).ckpt.param_key("w")
