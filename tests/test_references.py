"""References: a reader of zarr sees the same values as the engines."""

from __future__ import annotations

import json
import re
import warnings
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.formats.onnx_files import field, model, varint
from tests.formats.ztensor_files import dense_v1, v1_file
from tests.test_stacking import zt
from xckpt.errors import CheckpointWarning
from xckpt.opening import open_index
from xckpt.opening.references import references

if TYPE_CHECKING:
    from pathlib import Path

zarr = pytest.importorskip("zarr", reason="needs zarr: pip install zarr")

PATTERNS = (
    "ztensor/**/*.zt",
    "burnpack/*.bpk",
    "gptrs/*.bin",
    "mlcp/*.checkpoint",
    "mlcp/*.metadata.json",
    "primitiv/**/*.primitiv",
)
REFUSED = {"bad", "reject"}
# Names that any file system has.
PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
FILES = [
    path
    for pattern in PATTERNS
    for path in golden_files(pattern)
    if not REFUSED.intersection(path.parts)
]


def opened(refs: dict[str, Any], tmp_path: Path) -> xr.Dataset:
    (tmp_path / "refs.json").write_text(json.dumps(refs))
    options = {"fo": str(tmp_path / "refs.json")}
    return xr.open_dataset(
        "reference://",
        engine="zarr",
        backend_kwargs={"consolidated": False, "storage_options": options},
        mask_and_scale=False,
        chunks=None,
    )


@pytest.mark.parametrize("path", FILES, ids=str)
def test_references_to_raw_tensors_of_golden_files(path: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        _, index = open_index(path)
        refs = references(path)
        engine: Any = index.format
        ours = xr.open_dataset(path, engine=engine, decode=False)
    arrays = [key.removesuffix("/.zarray") for key in refs["refs"] if key.endswith("/.zarray")]
    # Omitted tensors have a kind that zarr lacks.
    for name, tensor in index.tensors.items():
        part = tensor.parts.get("data")
        if (
            (tensor.layout, tensor.problem) == ("dense", None)
            and part is not None
            and (part.encoding, part.shard) == (None, None)
            and part.dtype in {"float32", "float64", "int64", "uint8"}
        ):
            assert name in arrays or not PLAIN.fullmatch(name)
    group = zarr.open_group(_store(refs, tmp_path), mode="r")
    for name in arrays:
        values = np.asarray(group[name][...])
        expected = ours.variables[name].values
        np.testing.assert_array_equal(values, expected.astype(values.dtype), err_msg=name)
        assert values.dtype == expected.dtype.newbyteorder("=")


def _store(refs: dict[str, Any], tmp_path: Path) -> Any:
    from fsspec.implementations.reference import ReferenceFileSystem

    (tmp_path / "refs.json").write_text(json.dumps(refs))
    fs = ReferenceFileSystem(fo=str(tmp_path / "refs.json"), asynchronous=True)
    return zarr.storage.FsspecStore(fs, read_only=True, path="")


def test_xarray_opens_references_with_dimensions_and_attributes(tmp_path: Path) -> None:
    arrays = {"w": np.arange(48, dtype="<f4").reshape(12, 4), "n": np.array(7, "<i8")}
    (tmp_path / "m.zt").write_bytes(zt(arrays, {"license": "MIT"}))
    with dask.config.set({"array.chunk-size": "48B"}):
        refs = references(tmp_path / "m.zt", dims={"w": ("out", "in")})
    assert refs["version"] == 1
    assert [refs["refs"][f"w/{n}.0"][2] for n in range(4)] == [48] * 4
    ds = opened(refs, tmp_path)
    assert ds["w"].dims == ("out", "in")
    assert ds.attrs["license"] == "MIT"
    np.testing.assert_array_equal(ds["w"], arrays["w"])
    assert ds["n"].item() == 7


def test_indivisible_rows_are_not_padded_with_later_bytes(tmp_path: Path) -> None:
    values = np.arange(7 * 3, dtype="<f4").reshape(7, 3)
    (tmp_path / "m.zt").write_bytes(zt({"w": values, "behind": np.ones(64, "<f4")}))
    with dask.config.set({"array.chunk-size": "24B"}):
        refs = references(tmp_path / "m.zt", tensors="w")
    np.testing.assert_array_equal(opened(refs, tmp_path)["w"], values)


def test_a_value_in_the_header_is_one_chunk(tmp_path: Path) -> None:
    numbers = field(7, b"".join(map(varint, range(8))))
    tensor = field(1, 4) + field(1, 2) + field(2, 7) + field(8, "w") + numbers
    (tmp_path / "m.onnx").write_bytes(model(tensor))
    with dask.config.set({"array.chunk-size": "16B"}):
        refs = references(tmp_path / "m.onnx")
    ds = opened(refs, tmp_path)
    np.testing.assert_array_equal(ds["w"], np.arange(8).reshape(4, 2))


def test_element_types_that_zarr_lacks_are_omitted_with_a_warning(tmp_path: Path) -> None:
    data = v1_file(
        {"a": dense_v1(bytes(8), (4,), "bfloat16"), "b": dense_v1(bytes(8), (2,), "float32")}
    )
    (tmp_path / "m.zt").write_bytes(data)
    with pytest.warns(CheckpointWarning, match="no type for bfloat16: 'a'"):
        refs = references(tmp_path / "m.zt")
    assert "b/.zarray" in refs["refs"]
    assert "a/.zarray" not in refs["refs"]


def test_shards_are_referred_to_by_their_own_files(tmp_path: Path) -> None:
    (tmp_path / "m-1.zt").write_bytes(zt({"a": np.zeros(3, "<f4")}))
    (tmp_path / "m-2.zt").write_bytes(zt({"b": np.ones(3, "<f4")}))
    refs = references(str(tmp_path / "m-*.zt"))
    assert refs["refs"]["b/0"][0] == str(tmp_path / "m-2.zt")
    np.testing.assert_array_equal(opened(refs, tmp_path)["b"], np.ones(3))
    assert set(xckpt.read_index(tmp_path / "m-*.zt").tensors) == {"a", "b"}
