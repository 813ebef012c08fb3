"""Tensors that are open as their parts are saved as the tensors that they are."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sparse
import xarray as xr

from tests.conftest import golden_files
from tests.writing.saved import assert_same_bits
from xckpt import CheckpointError, CheckpointWarning, read_index
from xckpt.writing import save

if TYPE_CHECKING:
    from pathlib import Path

PARTS = [
    path
    for path in golden_files("*/*", with_suffix=".expected.json")
    if any(
        word in str(path) for word in ("sparse", "quant", "layouts", "objects", "unknown_format")
    )
]
OPTIONS: dict[str, dict[str, Any]] = {"ztensor": {"version": "2"}}


def saved(obj: Any, path: Path, engine: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        save(obj, path, engine, overwrite=True, **OPTIONS.get(engine, {}))
    return path.read_bytes()


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("stack", [False, True])
def test_golden_files_open_as_parts_are_saved_whole(
    path: Path, stack: bool, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        index = read_index(path)
        whole = xr.open_dataset(path, engine=index.format)
        parts = xr.open_dataset(path, engine=index.format, decode=False, stack=stack)
    layouts = {tensor.layout for tensor in index.tensors.values()}
    try:
        expected = saved(whole, tmp_path / "whole", index.format)
    except CheckpointError as error:
        with pytest.raises(type(error)):
            saved(parts, tmp_path / "parts", index.format)
        return
    assert saved(parts, tmp_path / "parts", index.format) == expected
    after = read_index(tmp_path / "parts")
    assert {tensor.layout for tensor in after.tensors.values()} == layouts
    assert set(after.tensors) == set(index.tensors)


def test_such_files_were_found() -> None:
    layouts = {tensor.layout for path in PARTS for tensor in _quietly(path).tensors.values()}
    assert layouts >= {"sparse_csr", "sparse_coo", "quantized", "structural"}


def _quietly(path: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        return read_index(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with sparse tensors that have axes, attributes and compressed parts."""
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 3, (20, 30)).astype("f4")
    cube = rng.integers(0, 2, (4, 5, 6)).astype("i2")
    ds = xr.Dataset(
        {
            "a.csr": (("out", "in"), sparse.COO.from_numpy(dense), {"note": "x"}),
            "coo": (("i", "j", "k"), sparse.COO.from_numpy(cube)),
            "w": ("out", rng.random(20)),
        }
    )
    encoding = {"*": {"digest": "sha256", "compression": "zstd-seekable"}, "w": {"digest": "xxh3"}}
    save(ds, tmp_path / "m.zt", encoding=encoding, version="2")
    return tmp_path / "m.zt"


def opened(path: Path, **options: Any) -> xr.Dataset:
    return xr.open_dataset(path, engine="ztensor", **options)


def test_bytes_axes_attributes_and_compression_come_back(model: Path, tmp_path: Path) -> None:
    parts = opened(model, decode=False)
    assert {"a.csr:values", "a.csr:indptr", "coo:coords"} <= set(parts.variables)
    assert saved(parts, tmp_path / "again.zt", "ztensor") == model.read_bytes()
    assert saved(parts.copy(deep=True), tmp_path / "again.zt", "ztensor") == model.read_bytes()
    tree = xr.open_datatree(model, engine="ztensor", decode=False)
    assert saved(tree, tmp_path / "again.zt", "ztensor") == model.read_bytes()


def test_all_parts_may_be_renamed_alike(model: Path, tmp_path: Path) -> None:
    parts = opened(model, decode=False)
    new = {n: str(n).replace("coo:", "other:") for n in parts.variables if "coo:" in str(n)}
    saved(parts.rename(new), tmp_path / "again.zt", "ztensor")
    index = read_index(tmp_path / "again.zt")
    assert set(index.tensors) == {"a.csr", "other", "w"}
    assert index.tensors["other"].layout == "sparse_coo"
    found = opened(tmp_path / "again.zt")["other"]
    assert_same_bits(found.values, opened(model)["coo"].values)


def test_parts_that_are_no_whole_tensor_are_tensors(model: Path, tmp_path: Path) -> None:
    parts = opened(model, decode=False)
    for changed, left in [
        (parts.drop_vars("coo:coords"), {"coo:values"}),
        (parts.assign({"coo:values": parts["coo:values"] * 2}), {"coo:values", "coo:coords"}),
        (parts.rename({"coo:values": "v"}), {"v", "coo:coords"}),
        (parts.isel({parts["coo:coords"].dims[1]: slice(3)}), {"coo:values", "coo:coords"}),
    ]:
        saved(changed, tmp_path / "again.zt", "ztensor")
        index = read_index(tmp_path / "again.zt")
        assert set(index.tensors) == {"a.csr", "w", *left}
        assert {index.tensors[name].layout for name in left} == {"dense"}


def test_equal_parts_of_two_files_are_two_tensors(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.zt"
    other.write_bytes(model.read_bytes())
    names = {"values", "coords"}
    first = opened(model, decode=False)[[f"coo:{role}" for role in names]]
    second = opened(other, decode=False)[[f"coo:{role}" for role in names]]
    second = second.rename({f"coo:{role}": f"second:{role}" for role in names})
    saved(first.merge(second), tmp_path / "both.zt", "ztensor")
    assert set(read_index(tmp_path / "both.zt").tensors) == {"coo", "second"}
