"""Saved values are read back bit for bit, whatever the kind of array."""

from __future__ import annotations

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import xarray as xr

import xckpt
from tests.writing.saved import ENGINES, OPTIONS, assert_same_bits, clean, writable_types
from xckpt import CheckpointWarning, FileChangedError, UnsupportedError, formats, read_index
from xckpt.elements import stored_dtype
from xckpt.labels import AxisNamer
from xckpt.writing import save

if TYPE_CHECKING:
    from pathlib import Path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dataset(**arrays: Any) -> xr.Dataset:
    """Make a Dataset of arrays whose axes have no names."""
    return xr.Dataset(
        {
            name: xr.Variable(AxisNamer().name_axes(name, array.shape), array)
            for name, array in arrays.items()
        }
    )


# --- every format gives back what it was given ----------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_every_type_of_a_format(engine: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    saved = {}
    for name in writable_types(engine):
        codes = clean(rng.integers(0, 256, 64, np.uint8), name)
        saved[f"t.{name}"] = codes.view(stored_dtype(name)).reshape(2, -1)
    options = OPTIONS.get(engine, {})
    save(dataset(**saved), tmp_path / "m", engine, **options)
    stored = xr.open_dataset(tmp_path / "m", engine=engine, decode=False)
    for name, array in saved.items():
        assert_same_bits(stored[name].values, array)
    # Opened, untouched or loaded, it is written as it was stored.
    for number, load in enumerate([False, True]):
        opened = xr.open_dataset(tmp_path / "m", engine=engine)
        if load:
            opened.load()
        save(opened, tmp_path / f"again{number}", engine, **options)
        again = xr.open_dataset(tmp_path / f"again{number}", engine=engine, decode=False)
        assert set(again.variables) == set(saved)
        for variable in again.variables:
            assert_same_bits(again[variable].values, saved[str(variable)])


@pytest.mark.filterwarnings("ignore:.*without a place:xckpt.CheckpointWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_trees_are_saved_under_flat_names(engine: str, tmp_path: Path) -> None:
    w = np.arange(6, dtype="f4").reshape(2, 3)
    nodes = {"/a/b": xr.Dataset({"w": (("o", "i"), w)}), "/": xr.Dataset({"v": ("n", w[0])})}
    save(xr.DataTree.from_dict(nodes), tmp_path / "m", engine)
    ds = xr.open_dataset(tmp_path / "m", engine=engine)
    assert set(ds.variables) == {"a.b.w", "v"}
    assert ds["a.b.w"].values.tolist() == w.tolist()
    tree = xr.open_datatree(tmp_path / "m", engine=engine)
    save(tree, tmp_path / "again", engine)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "m").read_bytes()


# --- safetensors: equal to what the package writes ------------------------------------------


def test_bytes_equal_those_of_the_package(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    saved = {
        f"{name}.{i}": rng.integers(0, 2, 24, np.uint8).view(stored_dtype(name)).reshape(shape)
        for name in writable_types("safetensors")
        if name != "float4_e2m1fn"
        for i, shape in enumerate([(-1,), (1, -1)])
    }
    saved |= {"scalar": np.array(2.5), "none": np.zeros((3, 0), "f4"), 'ü"\x01': np.zeros(2, "?")}
    safetensors.numpy.save_file(saved, tmp_path / "theirs", {"format": "pt"})
    # Another order of the variables would be stored too.
    ds = dataset(**{name: saved[name] for name in read_index(tmp_path / "theirs").tensors})
    ds.attrs = {"format": "pt"}
    save(ds, tmp_path / "ours", "safetensors")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_contents_that_safetensors_lacks(tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    for ds, message in [
        (dataset(__metadata__=np.zeros(2)), r"'__metadata__'.*\[Name\]"),
        (dataset(odd=np.zeros(3, ml_dtypes.float4_e2m1fn)), r"'odd': 12 bits.*\[MisalignedSlice\]"),
        (dataset(c=np.zeros(2, "c16")), r"'c': complex128 .*\[Dtype\]"),
        (dataset(w=np.zeros(2)).assign_attrs(x=object()), r"'x' cannot be converted to JSON"),
    ]:
        with pytest.raises(UnsupportedError, match=message):
            save(ds, target)
    assert names(tmp_path) == []


def test_attributes_other_than_text_become_json(tmp_path: Path) -> None:
    ds = dataset(w=np.zeros(2)).assign_attrs(n=np.int64(3), sizes=[1, 2], text="ü")
    save(ds, tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as theirs:
        texts = theirs.metadata()
    assert texts.items() >= {"n": "3", "sizes": "[1, 2]", "text": "ü"}.items()
    # Which of them are JSON is kept.
    attrs = {"format": "pt", "n": 3, "sizes": [1, 2], "text": "ü"}
    assert read_index(tmp_path / "m.safetensors").attrs == attrs


def test_names_of_axes_are_kept_and_sizes_are_no_names(tmp_path: Path) -> None:
    ds = xr.Dataset({"w": (("out", "in"), np.zeros((2, 3))), "b": ("d3", np.zeros(3))})
    save(ds, tmp_path / "m.safetensors")
    assert read_index(tmp_path / "m.safetensors").tensors["w"].dims == ("out", "in")
    assert xr.open_dataset(tmp_path / "m.safetensors")["w"].dims == ("out", "in")
    save(ds[["b"]], tmp_path / "b.safetensors")
    assert read_index(tmp_path / "b.safetensors").tensors["b"].dims is None
    assert b"xckpt" not in (tmp_path / "b.safetensors").read_bytes()


# --- conversions ----------------------------------------------------------------------------


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """A file of bfloat16 tensors."""
    path = tmp_path / "halves.safetensors"
    codes = np.arange(2**16, dtype="u2").reshape(256, 256)
    save(dataset(w=codes.view(ml_dtypes.bfloat16)).assign_attrs(format="pt"), path)
    return path


def test_computed_values_are_written_as_they_were_stored(halves: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    for changed in (
        xr.open_dataset(halves).load(),
        xr.open_dataset(halves).chunk({"d256_1": 7}),
        xr.open_dataset(halves).isel(d256_1=slice(None)),
    ):
        save(changed, again, overwrite=True)
        assert again.read_bytes() == halves.read_bytes()
    save(xr.open_dataset(halves).isel(d256_1=[3, 5]), again, overwrite=True)
    stored = xr.open_dataset(again, decode=False)["w"].values
    assert_same_bits(stored, xr.open_dataset(halves, decode=False)["w"].values[[3, 5]])


def test_changed_values_that_do_not_fit_are_an_error_and_leave_nothing(
    halves: Path, tmp_path: Path
) -> None:
    ds = xr.open_dataset(halves).load()
    ds["w"].values[2, 1] = 1.0000001
    target = tmp_path / "new.safetensors"
    target.write_bytes(b"old")
    with pytest.raises(UnsupportedError, match=r"'w': element \[2, 1\] is 1\.0000001.*drop_encod"):
        save(ds, target, overwrite=True)
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["halves.safetensors", "new.safetensors"]
    save(ds, target, overwrite=True, cast="allow")
    assert xr.open_dataset(target)["w"].values[2, 1] == 1
    save(ds.drop_encoding(), target, overwrite=True)
    assert xr.open_dataset(target)["w"].encoding["stored_dtype"] == np.float32


def test_an_element_type_can_be_requested(tmp_path: Path) -> None:
    ds = dataset(a=np.arange(6.0), b=np.arange(3.0) + 0.1, c=np.arange(3))
    target = tmp_path / "m.safetensors"
    expected: dict[str, Any] = {"*": {"dtype": "float32"}, "b": {"dtype": np.float64}}
    save(ds, target, encoding=expected)
    dtypes = {name: t.dtype for name, t in read_index(target).tensors.items()}
    assert dtypes == {"a": "float32", "b": "float64", "c": "float32"}
    with pytest.raises(UnsupportedError, match=r"'b': element \[0\] is 0\.1"):
        save(ds, target, encoding={"b": {"dtype": "float16"}}, overwrite=True)
    save(ds, target, encoding={"b": {"dtype": "float16"}}, overwrite=True, cast="allow")
    with pytest.raises(UnsupportedError, match="float64"):
        save(ds, tmp_path / "p", "primitiv", cast="never")


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ({"w": {"compresion": "zstd"}}, "did you mean 'compression'"),
        ({"w": {"dtype": "float31"}}, "'float31' is not an element type"),
        ({"w": {"level": 0}}, "level 0 is not in 1 to 22"),
        ({"W": {"dtype": "float32"}}, "'W' matches no tensor"),
        ({"w": {"layout": "sparse"}}, "'dense'"),
    ],
)
def test_wrong_requests(encoding: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        save(dataset(w=np.zeros(3)), tmp_path / "m.zt", encoding=encoding)


def test_unsupported_contents_are_errors_before_writing(tmp_path: Path) -> None:
    ds = dataset(w=np.zeros(3))
    for expected in ({"compression": "zstd"}, {"digest": "sha256"}):
        with pytest.raises(UnsupportedError, match=r"'w'.*has none"):
            save(ds, tmp_path / "m.safetensors", encoding={"w": expected})
    with pytest.raises(TypeError, match=r"'safetensors' has no option 'version'"):
        save(ds, tmp_path / "m.safetensors", version="2")
    with pytest.raises(TypeError, match=r"did you mean 'version'"):
        save(ds, tmp_path / "m.zt", verson="2")  # type: ignore[call-arg]
    assert names(tmp_path) == []


# --- dask -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("chunks", [(1, 1), (7, 1), (3, 50), (100, 3), (33, 2000), (100, 1999)])
def test_chunks_of_any_shape(chunks: tuple[int, int], order: str, tmp_path: Path) -> None:
    values = np.arange(100 * 2000, dtype="f4").reshape(100, 2000)[
        :, : 2000 if min(chunks) > 1 else 9
    ]
    engine = "safetensors" if order == "C" else "primitiv"
    save(dataset(w=da.from_array(values, chunks=chunks)), tmp_path / "m", engine)
    assert np.array_equal(xr.open_dataset(tmp_path / "m", engine=engine)["w"].values, values)


def test_chunks_of_any_shape_before_compressed_parts(tmp_path: Path) -> None:
    """The size of the file is not known then, but columns go through a map of it."""
    values = np.arange(3000.0).reshape(1000, 3)
    ds = dataset(a=da.from_array(values, chunks=(1000, 1)), z=values)
    save(ds, tmp_path / "m.zt", encoding={"z": {"compression": "zstd"}})
    opened = xr.open_dataset(tmp_path / "m.zt", engine="ztensor")
    assert np.array_equal(opened["a"].values, values)
    assert np.array_equal(opened["z"].values, values)


def test_shared_intermediate_results_are_computed_once(tmp_path: Path) -> None:
    calls = []

    def slow() -> np.ndarray:
        calls.append(1)
        return np.ones(10)

    shared = da.from_delayed(dask.delayed(slow, pure=True)(), (10,), "f8")
    ds = dataset(a=shared + da.zeros(10, chunks=2), b=shared * da.ones((3, 10), chunks=1))
    save(ds, tmp_path / "m.safetensors")
    assert len(calls) == 1


def test_compute_false_writes_when_it_is_computed(tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    w = da.arange(12, chunks=5)
    later = save(dataset(w=w, v=np.zeros(3)), target, compute=False)
    assert names(tmp_path) == []
    assert dask.compute(later) == (None,)
    assert names(tmp_path) == ["m.safetensors"]
    assert xr.open_dataset(target)["w"].values.tolist() == list(range(12))
    with pytest.raises(FileExistsError):
        save(dataset(w=w), target, compute=False)
    with pytest.raises(FileExistsError):
        later.compute()


def test_compute_false_that_fails_leaves_nothing(tmp_path: Path) -> None:
    bad = da.map_blocks(_fail, da.ones(4, chunks=1), dtype="f8", meta=np.empty(0))
    later = save(dataset(w=bad), tmp_path / "m.safetensors", compute=False)
    # Other tasks may fail while dask raises: their tracebacks hold the file until collected.
    with (
        ThreadPoolExecutor(4) as pool,
        dask.config.set(pool=pool),
        pytest.raises(RuntimeError, match="no such luck"),
    ):
        later.compute()
    del later
    gc.collect()
    assert names(tmp_path) == []


def _fail(_: np.ndarray) -> np.ndarray:
    raise RuntimeError("no such luck")


@pytest.mark.parametrize("compression", [None, "zstd", "zstd-seekable"])
def test_an_error_in_a_chunk_leaves_the_old_file(compression: str | None, tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    target.write_bytes(b"old")
    bad = da.map_blocks(_fail, da.ones(4, chunks=1), dtype="f8", meta=np.empty(0))
    options: dict[str, Any] = {"encoding": {"*": {"compression": compression}}, "version": "2"}
    with pytest.raises(RuntimeError, match="no such luck"):
        save(dataset(w=bad, v=np.zeros(3)), target, overwrite=True, **options)
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["m.zt"]


def test_unknown_chunk_sizes_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    x = da.arange(10, chunks=5)
    with pytest.raises((UnsupportedError, ValueError), match="chunk"):
        save(xr.Dataset({"w": ("n", x[x > 3])}), tmp_path / "m.safetensors")


# --- files ----------------------------------------------------------------------------------


def test_over_the_file_that_it_was_opened_from(halves: Path) -> None:
    before = halves.read_bytes()
    ds = xr.open_dataset(halves)
    ds["v"] = ("n", np.zeros(3))
    save(ds, halves, overwrite=True)
    assert set(read_index(halves).tensors) == {"w", "v"}
    with pytest.raises(FileChangedError):
        ds["w"].compute()
    save(xr.open_dataset(halves).drop_vars("v"), halves, overwrite=True)
    assert halves.read_bytes() == before


def test_overwriting_needs_permission(tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    save(dataset(w=np.zeros(3)), target)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(dataset(w=np.ones(3)), target)
    assert xr.open_dataset(target)["w"].values.tolist() == [0, 0, 0]


def test_the_suffix_decides_the_format(tmp_path: Path) -> None:
    ds = dataset(w=np.zeros((2, 3), "f4"))
    for engine in ENGINES:
        suffix = formats.get(engine).suffixes[0]
        try:
            save(ds, tmp_path / f"m{suffix}")
        except ValueError as error:
            assert "several programs" in str(error)  # noqa: PT017
            continue
        assert read_index(tmp_path / f"m{suffix}").format == engine
    with pytest.raises(ValueError, match=r"has the ending of 'm\.txt'; pass engine=") as caught:
        save(ds, tmp_path / "m.txt")
    assert "'torch'" not in str(caught.value)
    with pytest.raises(ValueError, match=r"did you mean '\.safetensors'"):
        save(ds, tmp_path / "m.safetensor")
    with pytest.raises(
        ValueError, match="format 'torch' is read-only; writable formats are: burnpack"
    ):
        save(ds, tmp_path / "m.pt")
    text = r"several programs use .*'pytorch_model\.bin' \('torch' is only read; .*\.safetensors"
    with pytest.raises(ValueError, match=text):
        save(ds, tmp_path / "pytorch_model.bin")
    save(ds, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").is_file()


def test_encodings_of_tensors_are_not_options_of_a_format(tmp_path: Path) -> None:
    ds = dataset(w=np.zeros((2, 3), "f4"))
    with pytest.raises(TypeError, match=r"tensors have it: encoding=\{'\*': \{'compression': "):
        save(ds, tmp_path / "m.zt", compression="zstd")  # type: ignore[call-arg]


def test_a_url(tmp_path: Path) -> None:
    ds = dataset(w=np.arange(3.0))
    save(ds, "memory://saved/m.safetensors")
    opened = xr.open_dataset("memory://saved/m.safetensors", engine="safetensors")
    assert opened["w"].values.tolist() == [0, 1, 2]
    save(ds, (tmp_path / "m.safetensors").as_uri())
    assert names(tmp_path) == ["m.safetensors"]


# --- what else is in a Dataset --------------------------------------------------------------


def test_numeric_coordinates_are_tensors_and_others_warn(tmp_path: Path) -> None:
    ds = dataset(w=np.zeros(3)).rename(d3="n")
    ds = ds.assign_coords(n=[1, 2, 3], name=("n", ["a", "b", "c"]), scale=2.0)
    with pytest.warns(CheckpointWarning, match="coordinates without numbers.*'name'"):
        save(ds, tmp_path / "m.safetensors")
    assert set(read_index(tmp_path / "m.safetensors").tensors) == {"w", "n", "scale"}


@pytest.mark.parametrize("values", [["a", "b"], np.array([0, 1], "M8[s]"), [None, {}]])
def test_variables_without_numbers_are_errors(values: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'w':.*holds numbers \[Dtype\]"):
        save(xr.Dataset({"w": ("n", values)}), tmp_path / "m.safetensors")


def test_only_xarray_objects_and_mappings(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a mapping of names to arrays, got ndarray"):
        save(np.zeros(3), tmp_path / "m.safetensors")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\.rename"):
        save(xr.DataArray(np.zeros(3)), tmp_path / "m.safetensors")
    with pytest.raises(TypeError, match="names of tensors are text"):
        save(xr.Dataset({5: ("n", [1])}), tmp_path / "m.safetensors")
    save(xr.DataArray(np.zeros(3), name="w"), tmp_path / "m.safetensors")


def test_lazy_variables_of_other_engines_are_not_loaded_into_the_dataset(tmp_path: Path) -> None:
    dataset(w=np.arange(12.0).reshape(3, 4)).to_netcdf(tmp_path / "m.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "m.nc", engine="h5netcdf") as ds:
        save(ds, tmp_path / "m.safetensors")
        assert not ds["w"].variable._in_memory
    assert xr.open_dataset(tmp_path / "m.safetensors")["w"].values.sum() == 66


def test_progress_reports_all_bytes(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    ds = dataset(w=np.zeros(2**21), lazy=da.zeros(1000, chunks=100), small=np.zeros(3, "i1"))
    save(ds, tmp_path / "m.safetensors", progress=lambda done, total: reports.append((done, total)))
    raw = sum(v.nbytes for v in ds.variables.values())
    assert len(reports) > 3
    assert {total for _, total in reports} == {reports[-1][0]}
    assert reports[-1][0] >= raw


def test_a_bar_is_shown_on_request(tmp_path: Path, capsys: Any) -> None:
    save(dataset(w=np.zeros(3)), tmp_path / "a.safetensors", progress=True)
    assert "a.safetensors: 100%" in capsys.readouterr().err
    save(dataset(w=np.zeros(3)), tmp_path / "b.safetensors")
    assert capsys.readouterr().err == ""


def test_thousands_of_small_tensors_are_few_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xckpt.storage.sink import Sink

    many = {f"t{i}": np.full(i % 7 + 1, i, "i4") for i in range(5000)}
    writes: list[int] = []
    write = Sink.write

    def counted(sink: Sink, data: Any, offset: int) -> None:
        writes.append(offset)
        write(sink, data, offset)

    monkeypatch.setattr(Sink, "write", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dataset(**many), tmp_path / "m.safetensors")
    assert len(writes) < 10
    ds = xr.open_dataset(tmp_path / "m.safetensors")
    assert all((ds.variables[name].values == array).all() for name, array in many.items())


def test_a_tilde_without_a_home_is_part_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(dataset(a=np.arange(3.0)), "~no one.zt")
    xckpt.append(dataset(b=np.arange(4.0)), "~no one.zt")
    xckpt.convert("~no one.zt", "~copy.metadata.json", "mlcp")
    assert {"~no one.zt", "~copy.metadata.json"} <= set(names(tmp_path))
    paths: list[Any] = ["~no one.zt", "~copy.metadata.json", "~no*.zt", ["~no one.zt"]]
    for path in paths:
        np.testing.assert_array_equal(xr.open_dataset(path)["b"].values, np.arange(4.0))
    assert xckpt.verify("~no one.zt").ok


def test_a_tilde_is_expanded_to_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    save(dataset(a=np.arange(3.0)), "~/m.zt")
    assert names(tmp_path) == ["m.zt"]
    np.testing.assert_array_equal(xr.open_dataset("~/m.zt", engine="ztensor")["a"], np.arange(3.0))


@pytest.mark.parametrize("path", ["a\0b.zt", "a\0*.zt"])
def test_a_path_with_a_null_character(path: str) -> None:
    for use in (read_index, xckpt.verify, lambda path: save(dataset(), path, "ztensor")):
        with pytest.raises(ValueError, match="null character"):
            use(path)
