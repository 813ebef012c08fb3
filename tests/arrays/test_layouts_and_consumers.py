"""Every layout through every consumer of whole tensors: the same elements, bit for bit."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Opened = tuple[xr.Dataset, str, np.ndarray]

# Several blocks of every consumer, but for golden files.
VALUES = np.random.default_rng(0).standard_normal((1500, 2001), np.float32)
SPARSE = np.where(VALUES[:300, :400] > 1.5, VALUES[:300, :400], np.float32(0))


def stored(values: Any = VALUES, suffix: str = ".zt", **encoding: Any) -> Callable[[Path], Opened]:
    """Return a layout of files that xckpt writes."""

    def make(folder: Path) -> Opened:
        path = folder / f"old{suffix}"
        options: Any = {"version": "2"} if suffix == ".zt" else {}
        ds = xr.Dataset({"w": (("a", "b"), values)})
        xckpt.save(ds, path, encoding={"*": encoding}, **options)
        return xckpt.open(path), "w", values

    return make


def in_numpy_file(values: Any) -> Callable[[Path], Opened]:
    """Return a layout of ``.npz`` files, as numpy writes them."""

    def make(folder: Path) -> Opened:
        np.savez(folder / "old.npz", w=values)
        return xckpt.open(folder / "old.npz"), "w", np.ascontiguousarray(values, values.dtype.name)

    return make


def golden(file: str, name: str, key: str | None = None) -> Callable[[Path], Opened]:
    """Return a tensor of a golden file, with the values that its own library read."""

    def make(_: Path) -> Opened:
        path = GOLDEN / file
        stem = path.with_name(path.name.partition(".")[0])
        tensors = json.loads(stem.with_suffix(".expected.json").read_text("utf-8"))["tensors"]
        number = [tensor["name"] for tensor in tensors].index(name)
        with np.load(stem.with_suffix(".expected.npz")) as arrays:
            return xckpt.open(path)[[name]], name, arrays[key or f"t{number}"]

    return make


def in_memory(array: Any, expected: np.ndarray = VALUES) -> Callable[[Path], Opened]:
    """Return a layout of arrays that no file has."""
    return lambda _: (xr.Dataset({"w": (("a", "b"), array())}), "w", expected)


def of_dask(*chunks: int) -> Callable[[Path], Opened]:
    """Return a dask array in chunks."""
    import dask.array as da

    return in_memory(lambda: da.from_array(VALUES, chunks))


def of_sparse() -> Any:
    """Return an array of the package sparse."""
    return pytest.importorskip("sparse").COO.from_numpy(SPARSE)


def stacked(folder: Path) -> Opened:
    """Return two tensors as one variable, and the second of them."""
    layers = {f"h.{i}.w": (("a", "b"), VALUES[i::2]) for i in range(2)}
    xckpt.save(xr.Dataset(layers), folder / "old.zt")
    return xckpt.open(folder / "old.zt", stack=True), "h.1.w", VALUES[1::2]


def sliced(folder: Path) -> Opened:
    """Return a selection of a file."""
    ds, name, _ = stored()(folder)
    return ds.isel(a=slice(3, 1200), b=slice(1, None, 2)), name, VALUES[3:1200, 1::2]


def sparse_in_file(folder: Path) -> Opened:
    """Return a file of row pointers, columns and values."""
    xckpt.save(xr.Dataset({"w": (("a", "b"), of_sparse())}), folder / "old.zt")
    return xckpt.open(folder / "old.zt"), "w", SPARSE


LAYOUTS: dict[str, Callable[[Path], Opened]] = {
    "dense": stored(),
    "dense, digest": stored(digest="sha256"),
    "bool": stored(VALUES > 0),
    "complex": stored(VALUES[:, 1:].copy().view(np.complex64)),
    "Fortran": in_numpy_file(np.asfortranarray(VALUES)),
    "big-endian": in_numpy_file(VALUES.astype(">f4")),
    "big-endian, Fortran": in_numpy_file(np.asfortranarray(VALUES.astype(">f4"))),
    "strided": golden("torch/strided.pt", "permuted"),
    "chunked": golden("keras/chunked.weights.h5", "layers/dense/vars/0"),
    "zstd": stored(compression="zstd"),
    "zstd, digest": stored(compression="zstd", digest="crc32c"),
    "zstd-seekable": stored(compression="zstd-seekable"),
    "inline": golden("onnx/native_fields.onnx", "t.float16"),
    "GGUF blocks": golden("gguf/q2_0.gguf", "blk.0.q2_0"),
    "quantised": golden("torch/quantised.pt", "tensor.quint8", "t1d"),
    "sparse": sparse_in_file,
    "stacked": stacked,
    "sliced": sliced,
    "numpy": in_memory(lambda: VALUES),
    "numpy, Fortran": in_memory(lambda: np.asfortranarray(VALUES)),
    "dask in runs": of_dask(200, 2001),
    "dask in columns": of_dask(1500, 300),
    "dask in boxes": of_dask(700, 900),
    "sparse.COO": in_memory(of_sparse, SPARSE),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """An open object, the name of a tensor in it, and the expected values."""
    return LAYOUTS[request.param](tmp_path)


def assert_same(path: Path, name: str, expected: np.ndarray) -> None:
    values = xckpt.open(path)[name].values
    assert values.shape == expected.shape
    assert values.tobytes() == expected.astype(values.dtype).tobytes()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_save_writes_the_elements(layout: Opened, compression: str | None, tmp_path: Path) -> None:
    ds, name, expected = layout
    encoding = {"*": {"layout": "dense", "compression": compression}}
    xckpt.save(ds, tmp_path / "new.zt", encoding=encoding, version="2")
    assert_same(tmp_path / "new.zt", name, expected)


def in_memory_beside(layout: Opened, expected: np.ndarray) -> tuple[xr.Dataset, xr.Dataset]:
    """Return the tensor of a layout alone, and the expected values under its name."""
    ds, name, _ = layout
    alone = ds[[name]] if name in ds else ds.isel(h=1)
    (variable,) = alone.data_vars
    return alone, xr.Dataset({variable: (alone[variable].dims, expected)})


# Sums follow the order of elements in the file.
OTHER_ORDER = ("Fortran", "big-endian, Fortran", "sparse")


@pytest.mark.parametrize("kind", LAYOUTS)
def test_statistics_are_those_of_the_elements(kind: str, tmp_path: Path) -> None:
    layout = LAYOUTS[kind](tmp_path)
    alone, beside = in_memory_beside(layout, layout[2])
    rtol = 1e-12 if kind in OTHER_ORDER else 0
    statistics = xckpt.stats(alone, progress=False, cache=False)
    expected = xckpt.stats(beside, progress=False, cache=False)
    xr.testing.assert_allclose(statistics, expected, rtol=rtol, atol=0)
    (variable,) = alone.data_vars
    values = layout[2]
    if not np.iscomplexobj(values):
        exact = statistics[variable].sel(statistic=["min", "max", "zero"]).values
        assert exact.tolist() == [values.min(), values.max(), np.count_nonzero(values == 0)]


def test_exact_quantiles_are_those_of_the_elements(layout: Opened) -> None:
    alone, _ = in_memory_beside(layout, layout[2])
    (variable,) = alone.data_vars
    values = layout[2]
    if np.iscomplexobj(values):
        pytest.skip("complex numbers have no order")
    quantiles = xckpt.stats(
        alone, quantiles=[0.3], exact_quantiles=True, progress=False, cache=False
    )
    expected = np.quantile(values.astype(np.float64), 0.3, method="nearest")
    assert quantiles[variable].sel(statistic="q0.3").item() == expected


def test_a_histogram_counts_the_elements(layout: Opened) -> None:
    alone, beside = in_memory_beside(layout, layout[2])
    histogram = xckpt.histogram(alone, progress=False, cache=False)
    (variable,) = alone.data_vars
    assert histogram[variable].sum() == layout[2].size
    xr.testing.assert_equal(histogram, xckpt.histogram(beside, progress=False, cache=False))


@pytest.mark.parametrize("axis", [0, -1])
def test_rows_and_columns_are_those_of_the_elements(layout: Opened, axis: int) -> None:
    alone, _ = in_memory_beside(layout, layout[2])
    (variable,) = alone.data_vars
    values = layout[2]
    if np.iscomplexobj(values):
        pytest.skip("complex numbers have no order")
    rows = xckpt.stats(alone, dim=axis, progress=False, cache=False)[variable]
    extremes = rows.sel(statistic=["min", "max"]).transpose("statistic", ...)
    assert (extremes.values == [values.min(axis), values.max(axis)]).all()
    mean = rows.sel(statistic="mean").values
    np.testing.assert_allclose(mean, values.mean(axis, np.float64), rtol=1e-9, atol=1e-12)


def test_a_comparison_sees_one_element(layout: Opened) -> None:
    changed = layout[2].copy()
    changed.flat[-1] = 1 if changed.flat[-1] == 0 else 0
    for other, status in [(layout[2], "same"), (changed, "changed")]:
        alone, beside = in_memory_beside(layout, other)
        (variable,) = beside.data_vars
        beside = beside.rename({variable: layout[1]})  # a stack has the names of its tensors
        (row,) = xckpt.compare(alone, beside, progress=False, cache=False).ckpt.table().iloc
        assert row.status == status
        equal = (other == layout[2]).mean()
        assert row.equal_fraction == pytest.approx(equal, rel=1e-12)


def test_a_spectrum_is_that_of_the_elements(layout: Opened) -> None:
    alone, beside = in_memory_beside(layout, layout[2])
    if layout[2].ndim != 2 or layout[2].dtype.kind != "f":
        pytest.skip("no matrix of real numbers")
    spectrum = xckpt.spectrum(alone, progress=False, cache=False)
    xr.testing.assert_equal(spectrum, xckpt.spectrum(beside, progress=False, cache=False))
    (variable,) = alone.data_vars
    largest = np.linalg.norm(layout[2].astype(np.float64), 2)
    assert spectrum[variable].sel(statistic="spectral_norm") == pytest.approx(largest, rel=1e-6)


def file_of(ds: xr.Dataset, name: str, folder: Path) -> Any:
    """Return the file of an object, or a new one for a selection and an object in memory."""
    source = ds.encoding.get("source")
    if source is None or (name in ds and ds[name].shape != xckpt.open(source)[name].shape):
        source = folder / "first.zt"
        xckpt.save(ds, source, version="2")
    return source


def test_convert_writes_the_elements(layout: Opened, tmp_path: Path) -> None:
    ds, name, expected = layout
    dense: Any = {"*": {"layout": "dense"}}
    source = file_of(ds, name, tmp_path)
    xckpt.convert(source, tmp_path / "new.npz", encoding=dense, tensors=name)
    assert_same(tmp_path / "new.npz", name, expected)


def test_a_manifest_has_the_hash_of_the_elements(layout: Opened) -> None:
    ds, name, expected = layout
    entry = xckpt.manifest(ds)[name]
    assert entry.shape == expected.shape
    data = expected.astype(expected.dtype.newbyteorder("<")).tobytes()
    if entry.kind == "nonzero":
        coords = np.argwhere(expected).astype("<i8").tobytes()
        data = sha256(coords).digest() + sha256(expected[expected != 0].tobytes()).digest()
    assert entry.sha256 == sha256(data).hexdigest()


def test_verify_compares_a_file_with_the_manifest(layout: Opened, tmp_path: Path) -> None:
    ds, name, expected = layout
    before = xckpt.manifest(ds)
    source = file_of(ds, name, tmp_path)
    assert xckpt.verify(source, manifest=before, tensors=name).ok
    changed = expected.copy()
    changed.flat[-1] = 1 if expected.flat[-1] == 0 else 0
    dims = [f"dim_{axis}" for axis in range(changed.ndim)]
    xckpt.save(xr.Dataset({name: (dims, changed)}), tmp_path / "other.zt", version="2")
    report = xckpt.verify(tmp_path / "other.zt", manifest=before, tensors=name)
    assert [finding.rule for finding in report.findings] == ["ManifestElements"]
