"""Elements as colours: the shown elements, and no others read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plots.pictures import legend_texts, notes
from tests.sources import CountingSource
from xckpt import formats
from xckpt.datasets.making import make_dataset
from xckpt.datasets.options import OpenOptions
from xckpt.plots import Plots
from xckpt.plots.heatmap import blocks_of, sampled

if TYPE_CHECKING:
    from pathlib import Path


def drawn(ax: Any) -> Any:
    (image,) = ax.get_images()
    return image.get_array()


def test_a_small_tensor_is_shown_whole(flat: xr.Dataset) -> None:
    ax = Plots(flat).heatmap("embed")
    assert (drawn(ax) == flat["embed"].values).all()
    assert (ax.get_ylabel(), ax.get_xlabel(), ax.get_title()) == ("d40", "e8", "embed")


def test_a_stacked_tensor_has_the_name_that_it_has_in_the_file(
    flat: xr.Dataset, stacked: xr.Dataset
) -> None:
    name = "m.layers.4.experts.1.up"
    assert (drawn(Plots(stacked).heatmap(name)) == drawn(Plots(flat).heatmap(name))).all()
    few = stacked.isel(layers=[1, 4])
    assert (drawn(Plots(few).heatmap(name)) == drawn(Plots(flat).heatmap(name))).all()
    full = drawn(Plots(stacked).heatmap("m.layers.attn.w"))
    assert full.shape == (6, 64)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
def test_each_block_shows_the_extreme_of_its_middle_row(
    nrows: int, ncolumns: int, rows: int, columns: int
) -> None:
    array = np.random.default_rng(0).normal(size=(nrows, ncolumns))
    values = sampled(array, rows, columns).values
    height, width = min(rows, nrows), min(columns, ncolumns)
    assert values.shape == (height, width)
    tops = [r * nrows // height for r in range(height + 1)]
    lefts = [c * ncolumns // width for c in range(width + 1)]
    for r in range(height):
        row = array[(tops[r] + tops[r + 1]) // 2]
        for c in range(width):
            block = row[lefts[c] : lefts[c + 1]]
            assert values[r, c] == block[np.abs(block).argmax()]


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))
def test_all_rows_show_the_extreme_of_each_block(
    nrows: int, ncolumns: int, columns: int, chunk: int
) -> None:
    array = np.random.default_rng(0).normal(size=(nrows, ncolumns)).astype(np.float32)
    array[nrows // 2] = 0
    lazy = da.from_array(array, chunks=(-(-nrows // chunk), -(-ncolumns // chunk)))
    for sample in (blocks_of(lazy, 7, columns), blocks_of(array, 7, columns)):
        height, width = min(7, nrows), min(columns, ncolumns)
        tops = [r * nrows // height for r in range(height + 1)]
        lefts = [c * ncolumns // width for c in range(width + 1)]
        for r, c in np.ndindex(height, width):
            block = array[tops[r] : tops[r + 1], lefts[c] : lefts[c + 1]].ravel()
            assert sample.values[r, c] == block[np.abs(block).argmax()]
        assert sample.dead.tolist() == [nrows // 2]


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5), (4, 3, 2, 70000)])
def test_all_rows_of_any_number_of_axes(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).normal(size=shape)
    lazy = da.from_array(array, chunks=2 if 0 < array.size < 100 else -1)
    sample = blocks_of(lazy, 100, 100)
    expected = array.reshape(sample.shape)
    assert abs(sample.values).max() == abs(array).max()
    if array.size < 100:
        assert (sample.values == expected).all()


def test_the_heatmap_states_which_part_was_read(flat: xr.Dataset) -> None:
    plots = Plots(flat)
    assert notes(plots.heatmap("embed")) == ""
    assert notes(plots.heatmap("embed", rows=10)) == "10 of 40 rows"
    assert notes(plots.heatmap("embed", rows=10, columns=4)) == (
        "10 of 40 rows, largest of each block"
    )
    assert notes(plots.heatmap("embed", columns=4)) == "all 40 rows, largest of each block"
    big = Plots(xr.Dataset({"w": (("a", "b"), np.ones((50_257, 2)))}))
    assert notes(big.heatmap("w")) == "256 of 50,257 rows"
    ax = big.heatmap("w", rows="all")
    assert notes(ax) == "all 50,257 rows, largest of each block"
    assert drawn(ax).shape == (256, 2)


def test_nan_and_dead_rows_are_marked() -> None:
    values = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
    values[[3, 500, 501, 502, 503], :] = 0
    values[700, 2] = np.nan
    ds = xr.Dataset({"w": (("a", "b"), values)})
    assert notes(ds.ckpt.plot.heatmap("w", rows=50)) == "50 of 1,000 rows"
    ds.ckpt.stats()
    ax = ds.ckpt.plot.heatmap("w", rows=50)
    assert notes(ax) == '50 of 1,000 rows · 1 NaN, 5 rows of zeros in all: rows="all" shows where'
    assert legend_texts(ax) == []
    ax = ds.ckpt.plot.heatmap("w", rows="all")
    assert notes(ax).endswith("1 NaN, 5 rows of zeros in all")
    assert legend_texts(ax) == ["NaN or infinite, in 1 block", "5 rows of zeros"]
    unknown, dead = (np.asarray(line.get_ydata()) for line in ax.get_lines())
    assert unknown == pytest.approx([700], abs=4)
    assert dead.tolist() == [3, 500, 501, 502, 503]
    ds["w"] = ds["w"] + 1  # no longer what the statistics are of
    assert notes(ds.ckpt.plot.heatmap("w", rows=50)) == "50 of 1,000 rows"


def test_many_dead_rows_share_marks() -> None:
    values = np.zeros((20_000, 2), np.float32)
    values[::5] = 1
    ax = Plots(xr.Dataset({"w": (("a", "b"), values)})).heatmap("w", rows="all")
    assert legend_texts(ax) == ["16,000 rows of zeros"]
    (line,) = ax.get_lines()
    assert 500 < np.size(line.get_ydata()) <= 1000


def test_codes_are_called_codes() -> None:
    codes = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    ds = xr.Dataset({"w": (("a", "b"), codes), "w_scale": ("a", np.ones(3))})
    ax = Plots(ds).heatmap("w")
    assert notes(ax) == "codes, whose scales are in w_scale"
    (bar,) = [axes for axes in ax.figure.axes if axes is not ax]
    assert bar.get_ylabel() == "code"


def test_outliers_along_a_column_are_not_missed() -> None:
    array = np.zeros((3000, 5000), np.float32)
    array[:, 1234] = -7
    values = sampled(array, 100, 100).values
    assert (values[:, 24] == -7).all()
    assert not np.delete(values, 24, axis=1).any()


def test_rows_that_are_not_shown_are_not_read(tmp_path: Path) -> None:
    from xckpt.writing import save

    array = np.random.default_rng(0).normal(size=(2000, 500)).astype(np.float32)
    save(xr.Dataset({"w": (("a", "b"), array)}), tmp_path / "m.zt")
    source = CountingSource((tmp_path / "m.zt").read_bytes())
    ds = make_dataset(source, formats.get("ztensor").read(source), OpenOptions())
    source.reads.clear()
    ax = Plots(ds).heatmap("w", rows=50)
    assert source.nbytes_read == 50 * 500 * 4
    (image,) = ax.get_images()
    assert list(image.get_extent()) == [-0.5, 499.5, 1999.5, -0.5]


@pytest.mark.parametrize("compression", ["zstd", "zstd-seekable"])
def test_tensors_without_random_access_are_decoded_once(compression: str, tmp_path: Path) -> None:
    from xckpt.writing import save

    array = np.random.default_rng(0).normal(size=(2000, 100)).astype(np.float32)
    path = tmp_path / "m.zt"
    version = "1.0" if compression == "zstd" else "2"
    ds = xr.Dataset({"w": (("a", "b"), array)})
    save(ds, path, encoding={"w": {"compression": compression}}, version=version)
    source = CountingSource(path.read_bytes())
    ds = make_dataset(source, formats.get("ztensor").read(source), OpenOptions())
    source.reads.clear()
    values = drawn(Plots(ds).heatmap("w", rows=40, columns=100))
    assert (values == array[25::50]).all()
    assert source.nbytes_read <= 1.1 * source.size


def test_long_rows_are_read_in_part() -> None:
    nelements, row = 0, np.arange(1 << 21, dtype="f4")

    class Array:
        shape = (30, 1 << 21)

        def __getitem__(self, key: tuple[Any, ...]) -> Any:
            nonlocal nelements
            part = np.broadcast_to(row, self.shape)[key]
            nelements += part.size
            return part

    values = sampled(Array(), 30, 20).values
    assert values.shape == (16, 20)
    assert 0 < nelements <= 1 << 24
    assert (np.diff(values) > 0).all()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), (1, 1)), ((7,), (1, 7)), ((2, 3, 5), (2, 15)), ((3, 2, 70000), (6, 70000))],
)
def test_any_number_of_axes(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    sample = sampled(array, 100, 100_000)
    assert sample.shape == expected
    assert (sample.values == array.reshape(expected)).all()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "complex64"])
def test_any_element_type(dtype: str) -> None:
    values = np.array([[0, 1], [1, 0]]).astype(dtype)
    ax = Plots(xr.Dataset({"w": (("a", "b"), values)})).heatmap("w")
    assert drawn(ax).tolist() == [[0, 1], [1, 0]]


def test_nonfinite_elements_are_visible() -> None:
    values = np.array([[np.nan, 1.0], [np.inf, -2.0]])
    ax = Plots(xr.Dataset({"w": (("a", "b"), values)})).heatmap("w")
    assert drawn(ax).mask.tolist() == [[True, False], [True, False]]
    assert legend_texts(ax) == ["NaN or infinite, in 2 blocks"]
    (image,) = ax.get_images()
    assert image.get_clim() == (-2, 2)


def test_robust_and_custom_colours(flat: xr.Dataset) -> None:
    full, robust = (
        Plots(flat).heatmap("embed", robust=robust).get_images()[0].get_clim()[1]
        for robust in (False, True)
    )
    assert robust < full
    image = Plots(flat).heatmap("embed", cmap="magma", vmin=-1, vmax=3).get_images()[0]
    assert (image.get_cmap().name, image.get_clim()) == ("magma", (-1, 3))


def test_tensors_that_cannot_be_drawn_are_errors(flat: xr.Dataset) -> None:
    with pytest.raises(KeyError, match=r"no tensor 'm\.layers\.0\.atn\.w' among 25; similar names"):
        Plots(flat).heatmap("m.layers.0.atn.w")
    with pytest.raises(ValueError, match="'w' has no elements"):
        Plots(xr.Dataset({"w": ("x", np.zeros(0))})).heatmap("w")
    with pytest.raises(ValueError, match="at least one row"):
        Plots(flat).heatmap("embed", rows=0)
