"""``compare(dim=)``: differences of each channel, row or block, against numpy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
import xckpt.accessor
from tests.stats.pairs import compared
from xckpt.comparison import MEASURES, compare
from xckpt.comparison.cells import Channels

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
AXES = ("x", "y", "z")


def pair(*shape: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(shape).astype(np.float32)
    return a, (a + rng.standard_normal(shape).astype(np.float32) / 16).astype(np.float16)


def as_dataset(values: Any) -> xr.Dataset:
    return xr.Dataset({"w": (AXES[: values.ndim], values)})


def check(result: xr.DataArray, a: Array, b: Array, blocks: dict[int, int]) -> None:
    """Compare with the reference, cell by cell; `blocks` has the cell length of each axis."""
    lengths = [blocks.get(axis, 1) for axis in range(a.ndim)]
    counts = [-(-size // length) for size, length in zip(a.shape, lengths, strict=True)]
    axes = [axis for axis in range(a.ndim) if lengths[axis] < a.shape[axis] or axis not in blocks]
    assert result.shape == (len(MEASURES), *(counts[axis] for axis in axes))
    for cell in np.ndindex(*counts):
        block = tuple(
            [slice(i * length, (i + 1) * length) for i, length in zip(cell, lengths, strict=True)]
        )
        expected = compared(a[block], b[block])
        position = tuple([cell[axis] for axis in axes])
        for number, measure in enumerate(MEASURES):
            np.testing.assert_allclose(
                result.values[(number, *position)],
                expected[measure],
                rtol=1e-9,
                atol=1e-9,
                err_msg=f"{measure} of {cell}",
            )


@pytest.mark.parametrize(
    ("dim", "blocks", "dims"),
    [
        (-1, {2: 9}, ("x", "y")),
        ("x", {0: 6}, ("y", "z")),
        (["y", "z"], {1: 7, 2: 9}, ("x",)),
        ({"z": 4}, {2: 4}, ("x", "y", "z_block")),
        ({-1: 2, "x": 4}, {2: 2, 0: 4}, ("x_block", "y", "z_block")),
        ({"y": 100}, {1: 7}, ("x", "y_block", "z")),
        ((0, 1, 2), {0: 6, 1: 7, 2: 9}, ()),
    ],
)
def test_axes_and_blocks(dim: Any, blocks: dict[int, int], dims: tuple[str, ...]) -> None:
    a, b = pair(6, 7, 9)
    b[1, 2] = a[1, 2] = 3
    b[2, 2, 2], a[3, 3, 3], b[4, 4, 4], a[4, 4, 5] = np.nan, np.inf, -np.inf, np.nan
    result = compare(as_dataset(a), as_dataset(b), dim=dim)["w"]
    assert result.dims == ("statistic", *dims)
    if "y_block" in dims:
        result = result.isel(y_block=0)
    check(result, a, b, blocks)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8", "int64", "bool", "float8_e4m3fn"])
def test_every_pair_of_element_types(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = (np.random.default_rng(n).integers(0, 2, (4, 5)).astype(kind) for n in (1, 2))
    check(compare(as_dataset(a), as_dataset(b), dim=1)["w"], a, b, {1: 5})


def test_results_are_identical_for_any_chunks_and_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channels, "leaf", 1 << 10)
    a, b = pair(60, 50, 4)
    arrays = {
        "a": (a, b),
        "rows": (da.from_array(a, chunks=(7, 50, 4)), b),
        "boxes": (a, da.from_array(b, chunks=(13, 9, 3))),
        "both": (da.from_array(a, chunks=20), da.from_array(b, chunks=(60, 11, 4))),
        "fortran": (np.asfortranarray(a), b),
    }
    first, second = (
        xr.Dataset({name: (AXES, sides[side]) for name, sides in arrays.items()}) for side in (0, 1)
    )
    for dim in (-1, 0, {1: 8}):
        result = compare(first, second, dim=dim)
        for name in arrays:
            np.testing.assert_array_equal(result[name], result["a"], err_msg=f"{name} {dim}")
    xckpt.save(as_dataset(a), tmp_path / "a.zt")
    xckpt.save(as_dataset(b), tmp_path / "b.safetensors")
    with dask.config.set(num_workers=4):
        stored = compare(tmp_path / "a.zt", tmp_path / "b.safetensors", dim=0)
    np.testing.assert_array_equal(stored["w"], compare(first, second, dim=0)["a"])


@pytest.mark.parametrize(("dim", "shape"), [(-1, (0,)), (0, (3,))])
def test_tensors_without_elements_have_as_many_channels_as_remain(
    dim: int, shape: tuple[int, ...]
) -> None:
    arrays = {"w": np.zeros((0, 3)), "v": np.ones((2, 3))}
    result = compare(arrays, arrays, dim=dim)
    assert result["w"].shape[1:] == shape
    assert (result["v"].sel(statistic="status") == 0).all()


def test_stacked_and_single_tensors(tmp_path: Path) -> None:
    layers = {f"layers.{n}.w": pair(5, 8, seed=n) for n in range(3)}
    first, second = (
        xr.Dataset({name: (("o", "i"), sides[side]) for name, sides in layers.items()})
        for side in (0, 1)
    )
    first["norm"], first["gone"] = ("o", np.ones(5)), ("i", np.ones(8))
    second["norm"] = ("o", np.ones(5))
    xckpt.save(second, tmp_path / "b.zt")
    result = compare(first.ckpt.stack(), tmp_path / "b.zt", dim="i")
    assert result["layers.w"].dims == ("statistic", "layers", "o")
    for n, (a, b) in enumerate(layers.values()):
        check(result["layers.w"].isel(layers=n), a, b, {1: 8})
    assert "norm" not in result
    frame = result.ckpt.table()
    counts = frame["status"].value_counts()
    assert (counts["changed"], counts["only_a"], counts.sum()) == (15, 1, 16)
    assert frame.index[1].startswith("layers.w[")
    with pytest.raises(ValueError, match="without dim="):
        _ = result.ckpt.names
    lazy = compare(first.ckpt.stack(), tmp_path / "b.zt", dim="i", compute=False)
    xr.testing.assert_equal(lazy.compute(), result)


def test_blocks_that_were_quantised(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    a, _ = pair(4, 128)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    a[2, 32:64] = 0
    writer.add_tensor("w", gguf.quants.quantize(a, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = compare(as_dataset(a), tmp_path / "q.gguf", dim={-1: 32})["w"]
    assert result.shape == (len(MEASURES), 4, 4)
    sqnr = result.sel(statistic="sqnr_db")
    assert np.isposinf(sqnr[2, 1])
    assert 40 < sqnr.where(np.isfinite(sqnr)).min() < sqnr.where(np.isfinite(sqnr)).max() < 60
    b = gguf.quants.dequantize(gguf.quants.quantize(a, kind), kind)
    check(result, a, b, {1: 32})


@pytest.mark.parametrize(
    ("dim", "error", "message"),
    [
        ("z", ValueError, "no variable has the dimension 'z'"),
        ("outt", ValueError, "similar names: 'out'"),
        ("layers", ValueError, "tensors are stacked along 'layers', and are compared one by one"),
        ({"in": 0}, ValueError, "a whole number of at least 1"),
        ({"in": "4"}, ValueError, "a whole number of at least 1"),
        (1.5, TypeError, "names and positions of dimensions, not 1.5"),
        ([None], TypeError, "names and positions of dimensions, not None"),
        (True, TypeError, "not True"),
    ],
)
def test_unknown_dimensions(dim: Any, error: type[Exception], message: str) -> None:
    ds = xr.Dataset({f"layers.{n}.w": (("out", "in"), np.ones((2, 3))) for n in range(2)})
    with pytest.raises(error, match=re.escape(message)):
        compare(ds.ckpt.stack(), ds, dim=dim)


def test_complex_numbers_are_left_out() -> None:
    ds = as_dataset(np.ones((2, 3), np.complex64))
    with pytest.warns(xckpt.CheckpointWarning, match="complex numbers"):
        assert not compare(ds, ds, dim=-1).data_vars


def test_more_channels_than_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xckpt.storage.limits.available_nbytes", lambda: 1 << 20)
    huge = da.zeros((1 << 22, 4), chunks=(1 << 20, 4))
    with pytest.raises(xckpt.TooLargeError, match="fewer of its channels"):
        compare(as_dataset(huge), as_dataset(huge), dim=-1, compute=False)


def test_the_view_along_an_axis_counts_channels() -> None:
    ds = xr.Dataset({"w": (("a", "b"), np.ones((3, 4), "f4"))})
    assert "4 channels: 23 statistics" in repr(xckpt.stats(ds, dim="a").ckpt)
    assert "1 tensor: 23 statistics" in repr(xckpt.stats(ds).ckpt)
