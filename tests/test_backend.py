"""``xarray.open_dataset`` and its relatives, as users call them."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import fsspec
import numpy as np
import pytest
import xarray as xr
from dask.callbacks import Callback

import xckpt
from tests.formats.burnpack_files import burnpack
from tests.formats.ztensor_files import dense_v1, v1_file
from xckpt.backend import ZTensorBackend
from xckpt.sample import write_checkpoint

VALUES = {
    "emb.weight": np.arange(5000, dtype="<f4").reshape(50, 100),
    "layers.0.w": np.arange(12, dtype="<f8").reshape(3, 4),
    "layers.0.b": np.arange(3, dtype="<i2"),
    "layers.1.w": -np.arange(12, dtype="<f8").reshape(3, 4),
    "layers.1.b": np.arange(3, dtype="<i2"),
    "scale": np.array(2.5, "<f4"),
    "empty": np.zeros((0, 4), "<f4"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small checkpoint."""
    path = tmp_path / "m.zt"
    tensors = {name: dense(array) for name, array in VALUES.items()}
    path.write_bytes(v1_file(tensors, attributes={"license": "MIT"}))
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with layers, several element types, zstd and sparse tensors."""
    return write_checkpoint(tmp_path_factory.mktemp("sample") / "s.zt", layers=3, width=64)


def dense(array: np.ndarray) -> dict[str, Any]:
    """Describe an array for a file."""
    return dense_v1(array.tobytes(), array.shape, array.dtype.name)


def assert_values(ds: xr.Dataset) -> None:
    for name, array in VALUES.items():
        np.testing.assert_array_equal(ds.variables[name].values, array)


# --- what opening gives ---------------------------------------------------------------------------


def test_a_dataset_is_lazy_labelled_and_described(path: Path) -> None:
    ds = xr.open_dataset(path, engine="ztensor")
    assert list(ds.variables) == list(VALUES)
    assert ds.attrs["license"] == "MIT"
    assert ds.encoding == {
        "format": "ztensor",
        "namespace": ds.encoding["namespace"],
        "format_version": "1.0",
        "source": str(path),
        "file_nbytes": path.stat().st_size,
    }
    weight = ds["emb.weight"]
    assert weight.dims == ("d50", "d100")
    assert isinstance(weight.data, da.Array)
    stored = weight.encoding
    assert stored["stored_dtype"] == np.float32
    assert (stored["layout"], stored["nbytes"], stored["source"]) == ("dense", 20000, str(path))
    assert stored["preferred_chunks"] == {"d50": 50, "d100": 100}
    offset = stored["offset"]
    assert path.read_bytes()[offset : offset + 20000] == VALUES["emb.weight"].tobytes()
    assert "dask.array<chunksize=(50, 100)" in repr(ds)
    assert_values(ds)


def test_opening_reads_headers_only(path: Path) -> None:
    """Only what no tensor occupies may be read: all data are cut out and the file still opens."""
    index = xckpt.read_index(path)
    data = bytearray(path.read_bytes())
    for tensor in index.tensors.values():
        part = tensor.parts["data"]
        data[part.offset : part.offset + part.nbytes] = b"\xee" * part.nbytes
    ds = xr.open_dataset(bytes(data), engine="ztensor")
    assert repr(ds.variables).count("dask.array") == len(VALUES)
    assert repr(ds.ckpt)


@pytest.mark.filterwarnings("ignore:The specified chunks separate:UserWarning")
@pytest.mark.parametrize("chunks", [None, {}, "auto", 7, {"d50": 10}, -1])
def test_every_value_of_chunks(path: Path, chunks: Any) -> None:
    with dask.config.set({"array.chunk-size": "4000B"}):
        ds = xr.open_dataset(path, engine="ztensor", chunks=chunks)
        expected = {
            "None": (10,) * 5,
            "{}": (10,) * 5,
            "auto": (10,) * 5,
            "7": (7,) * 7 + (1,),
            "{'d50': 10}": (10,) * 5,
            "-1": (50,),
        }[str(chunks)]
        assert ds.chunks["d50"] == expected
        assert dask.is_dask_collection(ds)
        for computed in (ds.compute(), dask.compute(ds)[0], ds.copy().load()):
            assert isinstance(computed["emb.weight"].data, np.ndarray)
            assert_values(computed)


def test_load_dataset(path: Path) -> None:
    ds = xr.load_dataset(path, engine="ztensor")
    assert isinstance(ds["layers.0.w"].data, np.ndarray)
    assert_values(ds)
    ds["layers.0.w"][0, 0] = 7  # it is the user's own memory
    assert_values(xr.open_dataset(path, engine="ztensor"))


def test_loaded_arrays_do_not_follow_the_file(path: Path) -> None:
    ds = xr.open_dataset(path, engine="ztensor")
    row, full = ds["emb.weight"][3].compute(), ds.compute()
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    np.testing.assert_array_equal(row, VALUES["emb.weight"][3])
    assert_values(full)


def test_a_dataset_pickles_by_reference(sample: Path) -> None:
    ds = xr.open_dataset(sample, engine="ztensor")
    pickled = pickle.dumps(ds)
    assert len(pickled) < sample.stat().st_size / 10
    copy = pickle.loads(pickled)
    assert copy.chunks == ds.chunks
    xr.testing.assert_identical(copy.compute(), ds.compute())
    with dask.config.set(scheduler="processes"):
        name = "model.layers.0.mlp.up_proj.weight"
        assert float(ds[name].mean()) == float(ds[name].compute().mean())


def test_close(path: Path) -> None:
    ds = xr.open_dataset(path, engine="ztensor")
    ds["emb.weight"].compute()
    if DESCRIPTORS.is_dir():
        assert path in open_files()
    ds.close()
    assert path not in open_files()
    assert_values(ds)  # it opens the file again
    with xr.open_dataset(path, engine="ztensor") as again:
        assert_values(again)


DESCRIPTORS = Path("/proc/self/fd")


def open_files() -> set[Path]:
    """Return the files that this process has open, if the system lists them."""
    links = list(DESCRIPTORS.iterdir()) if DESCRIPTORS.is_dir() else []
    return {link.readlink() for link in links if link.is_symlink()}


# --- what can be opened ---------------------------------------------------------------------------


def test_without_an_engine(path: Path, tmp_path: Path) -> None:
    assert_values(xr.open_dataset(path))
    bare = shutil.copy(path, tmp_path / "without_suffix")
    assert_values(xr.open_dataset(bare))
    assert_values(xr.open_dataset(str(bare)))
    assert_values(xr.open_dataset(io.BytesIO(path.read_bytes())))
    unknown = tmp_path / "other.zt"
    unknown.write_bytes(b"\1\2something else, but long enough to be looked at\xff")
    with pytest.raises(ValueError, match="did not find a match"):
        xr.open_dataset(unknown)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Run `git lfs pull`"),
        (b"<!DOCTYPE html><html>404 not found</html>", "a web page"),
        (b"", "Writing or copying it may have failed"),
    ],
)
@pytest.mark.parametrize("suffix", [".zt", ".safetensors", ".gguf", ".pt"])
def test_a_misleading_suffix_is_an_error(
    tmp_path: Path, content: bytes, message: str, suffix: str
) -> None:
    wrong = tmp_path / f"m{suffix}"
    wrong.write_bytes(content)
    with pytest.raises(xckpt.FormatError, match=message):
        xr.open_dataset(wrong)
    wrong.rename(tmp_path / "m.json")
    with pytest.raises(ValueError, match="did not find a match"):
        xr.open_dataset(tmp_path / "m.json")


@pytest.mark.parametrize("options", [{}, {"engine": "ztensor"}])
def test_a_path_with_a_typo(path: Path, options: dict[str, Any]) -> None:
    for open_ in (xr.open_dataset, xr.open_datatree):
        with pytest.raises(FileNotFoundError, match=r"did you mean 'm\.zt'\?: .*/mm\.zt'"):
            open_(path.parent / "mm.zt", **options)
    for name in ("m.nc", "m.bin", "m"):
        assert not ZTensorBackend().guess_can_open(path.parent / name)
    with pytest.raises(FileNotFoundError):
        xr.open_dataset(path.parent / "nowhere" / "m.zt", engine="ztensor")


def test_guessing_leaves_a_file_object_where_it_was(path: Path) -> None:
    file = io.BytesIO(path.read_bytes())
    assert ZTensorBackend().guess_can_open(file)
    assert file.tell() == 0
    empty = path.parent / "empty"
    empty.mkdir()
    for nothing in (3, None, str(path) + ".absent", empty, b"", io.StringIO("text")):
        assert not ZTensorBackend().guess_can_open(nothing)
    assert ZTensorBackend().guess_can_open("s3://bucket/m.ZT?versionId=3")
    assert not ZTensorBackend().guess_can_open("s3://bucket/m.nc")


def test_every_kind_of_source(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    data = path.read_bytes()
    relative = xr.open_dataset("m.zt", engine="ztensor")
    monkeypatch.chdir("/")
    assert_values(relative)
    assert relative.encoding["source"] == str(path)
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/tests/m.zt", data)
    with path.open("rb") as file:
        sources: tuple[Any, ...] = (data, bytearray(data), memoryview(data), io.BytesIO(data), file)
        for source in sources:
            assert_values(xr.open_dataset(source, engine="ztensor"))
    assert_values(xr.open_dataset("memory://tests/m.zt", engine="ztensor"))
    assert_values(xr.open_dataset(path.as_uri(), engine="ztensor"))
    assert_values(xr.open_dataset(path, engine="ztensor", mmap=False))
    assert_values(xr.open_dataset(path, engine=ZTensorBackend))
    assert_values(xr.open_dataset(path, engine="ztensor", decode_cf=False))


def test_unreadable_files_raise_errors(path: Path, tmp_path: Path) -> None:
    def opening(obj: Any) -> xr.Dataset:
        return xr.open_dataset(obj, engine="ztensor")

    with pytest.raises(FileNotFoundError):
        opening(tmp_path / "absent.zt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="no checkpoint is in this folder"):
        opening(tmp_path / "folder")
    (tmp_path / "empty.zt").touch()
    with pytest.raises(xckpt.FormatError, match=r"empty\.zt"):
        opening(tmp_path / "empty.zt")
    with pytest.raises(TypeError):
        opening(io.StringIO("text"))
    with pytest.raises(TypeError):
        opening(3)
    with pytest.raises(xckpt.FormatError, match="GIF image"):
        opening(b"GIF89a" + bytes(100))
    if os.geteuid():
        path.chmod(0)
        with pytest.raises(PermissionError):
            opening(path)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "count"),
    [
        ("layers.*", 4),
        (["*.b", "scale"], 3),
        (re.compile(r"\.[wb]$"), 4),
        (str.isalpha, 2),
    ],
)
def test_selected_tensors_are_opened(path: Path, tensors: Any, count: int) -> None:
    assert len(xr.open_dataset(path, engine="ztensor", tensors=tensors).variables) == count


def test_a_filter_without_a_match_warns(path: Path) -> None:
    with pytest.warns(xckpt.CheckpointWarning, match=r"'layer.0.w' matches none.*'layers.0.w'"):
        ds = xr.open_dataset(path, engine="ztensor", tensors="layer.0.w")
    assert not ds.variables


def test_drop_variables(path: Path) -> None:
    ds = xr.open_dataset(path, engine="ztensor", drop_variables=["scale", "empty", "absent"])
    assert len(ds.variables) == len(VALUES) - 2
    ds = xr.open_dataset(path, engine="ztensor", drop_variables="scale")
    assert "scale" not in ds.variables


def test_dims(path: Path) -> None:
    ds = xr.open_dataset(path, engine="ztensor", dims={"*.w": ("out", "in"), "*.b": ("out",)})
    assert ds["layers.1.w"].dims == ("out", "in")
    assert (ds["layers.0.w"] * ds["layers.0.b"]).dims == ("out", "in")
    assert ds["emb.weight"].dims == ("d50", "d100")
    with pytest.raises(ValueError, match=r"'layers.0.w' has 2 axes"):
        xr.open_dataset(path, engine="ztensor", dims={"*.w": ("out",)})


def test_dims_without_a_matching_tensor_raise(path: Path) -> None:
    for stack in (False, True):
        with pytest.warns(xckpt.CheckpointWarning, match=r"dims\['emb.wieght'\].*'emb.weight'"):
            xr.open_dataset(path, engine="ztensor", dims={"emb.wieght": ("a", "b")}, stack=stack)
    with pytest.warns(xckpt.CheckpointWarning, match=r"dims\['none'\] matches no tensor"):
        xr.open_datatree(path, engine="ztensor", dims={"none": ("a",)})


def test_dimensions_never_share_a_name_with_variables() -> None:
    data = v1_file({"d3": dense(np.zeros(3, "<f4")), "x": dense(np.ones((3, 3), "<f4"))})
    ds = xr.open_dataset(data, engine="ztensor")
    assert not ds.indexes
    assert ds["d3"].dims == ("d3_1",)
    assert float(ds["x"].sum()) == 9


def test_unknown_keywords(path: Path) -> None:
    with pytest.raises(TypeError, match="no option 'tensor'; did you mean 'tensors'"):
        xr.open_dataset(path, engine="ztensor", tensor="*")
    with pytest.raises(TypeError, match="no option 'layout'"):
        xr.open_dataset(path, engine="ztensor", layout="aligned")


@pytest.mark.parametrize("keyword", ["decode", "sparse", "verify", "mmap"])
def test_switches_are_true_or_false(path: Path, keyword: str) -> None:
    with pytest.raises(TypeError, match=f"{keyword} is True or False, not 'no'"):
        xr.open_dataset(path, engine="ztensor", **{keyword: "no"})  # type: ignore[arg-type]


def test_stored_types(sample: Path) -> None:
    decoded = xr.open_dataset(sample, engine="ztensor")
    stored = xr.open_dataset(sample, engine="ztensor", decode=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert decoded[name].dtype == np.float32
    assert decoded[name].encoding["stored_dtype"] == stored[name].dtype == "bfloat16"
    np.testing.assert_array_equal(stored[name].astype("f4").values, decoded[name].values)
    sparse = "lm_head.delta"
    assert sparse not in stored.variables
    parts = {name for name in stored.variables if str(name).startswith(f"{sparse}:")}
    assert parts == {f"{sparse}:values", f"{sparse}:coords"}
    assert stored[f"{sparse}:coords"].encoding["part"] == "coords"
    assert decoded[sparse].encoding["layout"] == "sparse_coo"
    assert set(decoded[sparse].encoding["parts"]) == {"values", "coords"}


def test_parts_do_not_replace_tensors(golden: Path) -> None:
    """A tensor has its exact name, also where a part of another would be called that."""
    csr = xckpt.read_index(golden / "ztensor" / "v1_sparse_csr.zt")
    name = next(iter(csr.tensors))
    data = (golden / "ztensor" / "v1_sparse_csr.zt").read_bytes()
    assert f"{name}:values" in xr.open_dataset(data, engine="ztensor", decode=False).variables


# --- trees and several files ----------------------------------------------------------------------


def test_a_tree_has_modules(path: Path) -> None:
    tree = xr.open_datatree(path, engine="ztensor")
    assert tree.attrs["license"] == "MIT"
    assert set(tree.children) == {"emb", "layers"}
    assert set(tree["layers/0"].data_vars) == {"w", "b"}
    assert isinstance(tree["layers/1/w"].data, da.Array)
    np.testing.assert_array_equal(tree["layers/1/w"], VALUES["layers.1.w"])
    assert tree["layers/1/w"].encoding["tensor"] == "layers.1.w"
    loaded = tree.compute()
    assert isinstance(loaded["layers/1/w"].data, np.ndarray)
    tree.close()


class TestSmallValues:
    """The values of a row are read as they are, unless a scheduler was chosen."""

    @pytest.mark.parametrize("mmap", [False, True])
    @pytest.mark.parametrize("name", VALUES)
    def test_are_the_same_as_computed(self, path: Path, name: str, mmap: bool) -> None:
        ds = xr.open_dataset(path, engine="ztensor", mmap=mmap)
        for lazy in (ds[name], ds[name][..., :2] if ds[name].ndim else ds[name], ds[name].T):
            computed, values = lazy.compute(scheduler="sync").values, lazy.values
            np.testing.assert_array_equal(values, computed)
            assert (type(values), values.dtype) == (type(computed), computed.dtype)
            assert values.flags.writeable

    def test_without_a_graph(self, path: Path) -> None:
        ds = xr.open_dataset(path, engine="ztensor")
        done = []
        with Callback(posttask=lambda key, *_: done.append(key)):
            assert float(ds["emb.weight"][3, 7]) == 307
            np.testing.assert_array_equal(np.asarray(ds["emb.weight"][3]), np.arange(300, 400))
            assert not done
            with dask.config.set(scheduler="sync"):
                assert ds["emb.weight"][3].values[0] == 300
        assert len(done) == 1
        assert isinstance(ds["emb.weight"].data, da.Array)  # nothing is kept

    def test_errors_name_file_and_tensor(self, path: Path) -> None:
        ds = xr.open_dataset(path, engine="ztensor")
        path.write_bytes(b"another file")
        with pytest.raises(xckpt.FileChangedError, match=r"m\.zt"):
            _ = ds["emb.weight"][3].values

    def test_assigning(self, path: Path) -> None:
        ds = xr.open_dataset(path, engine="ztensor")
        ds["scale"].values = np.array(3, "f4")
        assert ds["scale"].values == 3


@pytest.mark.parametrize("chunks", [{}, "auto", -1])
def test_a_tree_with_chunks(path: Path, chunks: Any) -> None:
    tree = xr.open_datatree(path, engine="ztensor", chunks=chunks)
    np.testing.assert_array_equal(tree["layers/1/w"], VALUES["layers.1.w"])


def test_groups(path: Path) -> None:
    groups = xr.open_groups(path, engine="ztensor", tensors="layers.*")
    assert set(groups) == {"/", "/layers/0", "/layers/1"}
    assert groups["/"].attrs["license"] == "MIT"
    assert isinstance(groups["/layers/0"]["w"].data, da.Array)


def test_a_tree_of_hostile_names() -> None:
    names = ["a", "a.b", "a.b.c", "", ".", "..", "a..b", "x/y", "nul\0", "%", "d1", "q.d1"]
    data = v1_file({name: dense(np.full(1, i, "<f4")) for i, name in enumerate(names)})
    tree = xr.open_datatree(data, engine="ztensor")
    values = {
        variable.encoding["tensor"]: float(variable.values[0])
        for node in tree.subtree
        for variable in node.variables.values()
    }
    assert values == {name: float(i) for i, name in enumerate(names)}


@pytest.mark.parametrize("parallel", [False, True])
def test_several_files(tmp_path: Path, parallel: bool) -> None:
    for step in range(3):
        data = v1_file({"w": dense(np.full((2, 3), step, "<f4"))})
        (tmp_path / f"step{step}.zt").write_bytes(data)
    with xr.open_mfdataset(
        str(tmp_path / "step*.zt"),
        engine="ztensor",
        combine="nested",
        concat_dim="step",
        parallel=parallel,
    ) as ds:
        assert ds["w"].dims == ("step", "d2", "d3")
        np.testing.assert_array_equal(ds["w"].mean(("d2", "d3")), [0, 1, 2])


# --- changes and warnings -------------------------------------------------------------------------


def test_a_file_that_changed(path: Path, tmp_path: Path) -> None:
    ds = xr.open_dataset(path, engine="ztensor")
    replacement = tmp_path / "other.zt"
    replacement.write_bytes(path.read_bytes())
    replacement.replace(path)
    with pytest.raises(xckpt.FileChangedError, match=r"m\.zt"):
        ds["scale"].compute()


def test_warnings_point_at_the_file(golden: Path) -> None:
    path = golden / "ztensor" / "v1_unaligned.zt"
    with pytest.warns(xckpt.CheckpointWarning, match="v1_unaligned"):
        ds = xr.open_dataset(path, engine="ztensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ds.compute()


# --- the accessor ---------------------------------------------------------------------------------


def test_the_accessor_summarises(sample: Path) -> None:
    ds = xr.open_dataset(sample, engine="ztensor")
    index = xckpt.read_index(sample)
    header, facts = repr(ds.ckpt).splitlines()[:2]
    assert header.startswith("<Checkpoint s.zt>  names as in llama, ")
    assert facts.startswith("  ztensor 1.0 · ")
    assert [header, facts] == repr(index).splitlines()[:2]
    tree = xr.open_datatree(sample, engine="ztensor")
    assert repr(tree.ckpt).splitlines()[0] == header
    assert "model.layers.{0..2}" in repr(ds.ckpt)
    queries = ds[[name for name in ds.variables if str(name).endswith("q_proj.weight")]]
    assert "3 tensors" in repr(queries.ckpt)


def test_accessor_on_other_datasets() -> None:
    ds = xr.Dataset({"a": 1})
    assert ds.ckpt.format is None
    assert repr(ds.ckpt).startswith("<Checkpoint in memory>  1 tensor")
    assert "1 tensor" in repr(xr.DataTree(ds).ckpt)


def test_the_accessor_needs_no_import_of_xckpt(path: Path) -> None:
    code = f"import xarray as xr, sys\nprint(xr.open_dataset({str(path)!r}, engine='ztensor').ckpt)"
    done = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("<Checkpoint m.zt>")


def test_options_of_an_engine_change_task_names() -> None:
    """One file read in two ways has equal names, and must not share the names of its arrays."""
    entry = {"dtype": "F32", "shape": [2], "data": np.array([1, 2], "<f4").tobytes()}
    data = burnpack({"w": entry}) + bytes(256)
    by_layout = {
        layout: xr.open_dataset(data, engine="burnpack", layout=layout)["w"]
        for layout in ("aligned", "legacy")
    }
    aligned, legacy = by_layout["aligned"], by_layout["legacy"]
    assert aligned.data.name != legacy.data.name
    together = dask.compute(aligned, legacy)
    assert together[0].values.tolist() == [1, 2]
    assert together[1].values.tolist() == [0, 0]
