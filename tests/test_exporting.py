"""``to_netcdf`` and ``to_zarr`` of opened objects: same values, and no silent loss."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr
import zstandard

from tests.exported import WRITERS, assert_same_values, written
from tests.formats.burnpack_files import burnpack, quantized
from tests.formats.safetensors_files import entry, safetensors_file
from tests.formats.ztensor_files import dense_v1, v1_file
from xckpt.errors import CheckpointWarning
from xckpt.sample import write_checkpoint
from xckpt.writing import save

if TYPE_CHECKING:
    from pathlib import Path

# Whatever the writers of xarray, its coders or the libraries below them take from an encoding.
_KEYS = """
    dtype units calendar _FillValue missing_value scale_factor add_offset _Unsigned _Encoding
    coordinates bounds grid_mapping climatology geometry node_coordinates node_count
    part_node_count interior_ring cell_measures formula_terms ancillary_variables quality_variable
    char_dim_name unlimited_dims
    zlib szip bzip2 blosc zstd complevel fletcher32 contiguous chunksizes shuffle compression
    compression_opts significant_digits least_significant_digit quantize_mode blosc_shuffle
    szip_coding szip_pixels_per_block endian original_shape
    chunks shards compressor compressors filters serializer fill_value cache_metadata
    write_empty_chunks chunk_key_encoding order object_codec dimension_separator dimension_names
    attributes config overwrite shape name data storage_options zarr_format
    source preferred_chunks
"""
XARRAY_KEYS = frozenset(_KEYS.split())
# These mean the same to us.
SHARED_KEYS = {"source", "preferred_chunks", "original_shape"}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with layers, several element types, zstd, int8 with scales, sparse tensors."""
    return write_checkpoint(tmp_path_factory.mktemp("sample") / "s.zt", layers=3, width=32)


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> str:
    """A library that writes files for xarray."""
    return str(request.param)


# --- encoding ------------------------------------------------------------------------------------


def keys_of(*objects: Any) -> set[str]:
    """Collect the keys in the encodings of objects and of their variables."""
    names: set[str] = set()
    for obj in objects:
        for node in obj.subtree if isinstance(obj, xr.DataTree) else [obj]:
            names.update(node.encoding)
            names.update(key for v in node.variables.values() for key in v.encoding)
    return names


def test_no_key_of_an_encoding_is_a_request_to_a_writer_of_xarray(sample: Path) -> None:
    matrix = xr.Dataset({"w": (("a", "b"), np.ones((2, 3), np.float32))})
    model = sample.with_suffix(".primitiv")
    with pytest.warns(CheckpointWarning, match="names of dimensions without a place"):
        save(matrix, model, overwrite=True)
    keys = keys_of(
        xr.open_dataset(sample),
        xr.open_dataset(sample, decode=False),
        xr.open_dataset(sample, stack=True),
        xr.open_dataset(sample).ckpt.stack(),
        xr.open_datatree(sample, stack=True),
        xr.open_dataset(sample, stack=True).ckpt.stats(),
        xr.open_dataset(burnpack({"w": quantized((2,), bytes(6))}), decode=False),
        xr.open_dataset(model),
    )
    stored = {"stored_dtype", "stored_compression", "stored_order"}
    assert keys >= {"tensor", "layout", "parts", "part", "stack", *stored, *SHARED_KEYS}
    assert keys & XARRAY_KEYS == SHARED_KEYS


@pytest.mark.parametrize("stack", [False, True])
def test_an_encoding_can_be_copied_and_pickled(sample: Path, stack: bool) -> None:
    ds = xr.open_dataset(sample, stack=stack)
    for copied in (ds.copy(deep=True), copy.deepcopy(ds), pickle.loads(pickle.dumps(ds))):
        assert copied.encoding == ds.encoding
        for name, variable in ds.variables.items():
            assert copied.variables[name].encoding.keys() == variable.encoding.keys()


# --- what xarray can write as it is --------------------------------------------------------------


def test_quantised_values_are_not_rounded(tmp_path: Path, writer: str) -> None:
    codes = np.array([-7, 3, 64, 113], "i1").tobytes() + np.float32(0.04).tobytes()
    ds = xr.open_dataset(burnpack({"w": quantized((4,), codes)}), engine="burnpack")
    assert ds["w"].encoding["stored_dtype"] == np.int8
    reopened = written(ds, tmp_path / "m", writer)
    np.testing.assert_allclose(reopened["w"], [-0.28, 0.12, 2.56, 4.52], rtol=1e-6)


@pytest.mark.parametrize(
    ("spelled", "dtype", "bits"),
    [
        ("F16", "float16", 16),
        ("BF16", "bfloat16", 16),
        ("F8_E4M3", "float8_e4m3fn", 8),
        ("F8_E5M2", "float8_e5m2", 8),
    ],
)
def test_decoded_values_are_written_as_shown(
    spelled: str, dtype: str, bits: int, tmp_path: Path, writer: str
) -> None:
    codes = np.arange(2**bits, dtype=f"<u{bits // 8}").tobytes()
    header = {"w": entry(spelled, [2**bits], 0, len(codes))}
    ds = xr.open_dataset(safetensors_file(header, codes), engine="safetensors")
    assert ds["w"].encoding["stored_dtype"] == dtype
    assert_same_values(written(ds, tmp_path / "m", writer)["w"].variable, ds["w"].variable)


def test_compressed_tensors(tmp_path: Path, writer: str) -> None:
    values = np.arange(1000, dtype="<f4")
    packed = zstandard.compress(values.tobytes())
    tensor = dense_v1(packed, [1000], "float32", encoding="zstd", uncompressed_length=4000)
    ds = xr.open_dataset(v1_file({"w": tensor}), engine="ztensor")
    assert ds["w"].encoding["stored_compression"] == "zstd"
    np.testing.assert_array_equal(written(ds, tmp_path / "m", writer)["w"], values)


@pytest.mark.parametrize("stack", [False, True])
def test_a_sample_as_a_dataset_and_as_a_tree(
    sample: Path, tmp_path: Path, writer: str, stack: bool
) -> None:
    with dask.config.set({"array.chunk-size": "2 kB"}):
        ds = xr.open_dataset(sample, stack=stack)
        tree = xr.open_datatree(sample, stack=stack)
    reopened = written(ds, tmp_path / "d", writer)
    assert set(reopened.variables) == set(ds.variables)
    for name, variable in ds.variables.items():
        assert_same_values(reopened.variables[name], variable)
    again = written(tree, tmp_path / "t", writer)
    assert set(again.groups) == set(tree.groups)
    for node in tree.subtree:
        for name, variable in node.to_dataset(inherit=False).variables.items():
            assert_same_values(again[node.path].variables[name], variable)


def test_statistics(sample: Path, tmp_path: Path, writer: str) -> None:
    stats = xr.open_dataset(sample, stack=True).ckpt.stats()
    reopened = written(stats, tmp_path / "s", writer)
    xr.testing.assert_equal(reopened, stats)


# --- and our own writer --------------------------------------------------------------------------


def test_our_writer_copies_stored_tensors(sample: Path, tmp_path: Path) -> None:
    # Quantised weights that are computed are written dense, with a warning.
    ds = xr.open_dataset(sample, tensors=lambda name: "down_proj" not in name)
    before = {name: str(v.encoding["stored_dtype"]) for name, v in ds.variables.items()}
    assert "bfloat16" in before.values()
    for obj in (ds, ds.load()):
        save(obj, tmp_path / "again.zt", overwrite=True)
        again = xr.open_dataset(tmp_path / "again.zt")
        assert {n: str(v.encoding["stored_dtype"]) for n, v in again.variables.items()} == before


def test_an_encoding_that_xarray_would_obey_is_no_request_to_our_writer(tmp_path: Path) -> None:
    """Datasets from netCDF are written as in memory; requests of the user are obeyed."""
    values = np.array([0.5, 1.5, 2.5], np.float32)
    packed = {"dtype": "int16", "scale_factor": 0.5, "_FillValue": -1, "zlib": True}
    xr.Dataset({"w": ("x", values)}).to_netcdf(
        tmp_path / "m.nc", engine="h5netcdf", encoding={"w": packed}
    )
    with xr.open_dataset(tmp_path / "m.nc", engine="h5netcdf") as ds:
        assert ds["w"].encoding["dtype"] == np.int16
        save(ds, tmp_path / "m.zt")
        save(ds, tmp_path / "b.zt", encoding={"w": {"dtype": "bfloat16"}})
    assert xr.open_dataset(tmp_path / "m.zt")["w"].encoding["stored_dtype"] == ds["w"].dtype
    assert xr.open_dataset(tmp_path / "b.zt")["w"].encoding["stored_dtype"] == "bfloat16"
    np.testing.assert_array_equal(xr.open_dataset(tmp_path / "b.zt")["w"], values)
