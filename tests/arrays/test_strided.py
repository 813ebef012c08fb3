"""Selections of strided and blocked tensors equal those of numpy."""

from __future__ import annotations

import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr
from numpy.lib.stride_tricks import as_strided

from tests.formats import torch_files as files
from xckpt.index import runs_of

if TYPE_CHECKING:
    from pathlib import Path

# Offset, shape and strides of views of 400 elements.
VIEWS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "a column": (3, (20,), (20,)),
    "columns": (5, (19, 4), (20, 3)),
    "channels last": (0, (2, 5, 4, 10), (200, 1, 50, 5)),
    "turned": (0, (4, 5, 20), (1, 4, 20)),
    "a diagonal": (0, (20,), (21,)),
    "repeated": (7, (3, 4, 5), (0, 20, 0)),
    "overlapping": (0, (10, 6), (2, 1)),
    "one position": (9, (1, 3, 1), (777, 2, 5)),
}
KEYS: dict[str, Any] = {
    "all": (...,),
    "the last": (-1,),
    "a row": (slice(1, 2),),
    "every other": (slice(None, None, 2), ...),
    "backwards": (..., slice(None, None, -1)),
    "some": (np.array([0, 0]), ...),
    "of the last axis": (..., slice(0, 1)),
    "nothing": (slice(0, 0), ...),
}


@pytest.mark.parametrize(
    ("mmap", "method", "apart"),
    [
        *[(mmap, zipfile.ZIP_STORED, apart) for mmap in (True, False) for apart in (1, 10_000)],
        (False, zipfile.ZIP_DEFLATED, 1),
    ],
)
def test_selections_of_views(tmp_path: Path, mmap: bool, method: int, apart: int) -> None:
    """Views with gaps of some bytes, and of so many that they are not read."""
    stored = np.arange(400 * apart, dtype="f4")
    views = {
        label: (offset, shape, tuple(apart * step for step in strides))
        for label, (offset, shape, strides) in VIEWS.items()
    }
    value = {label: files.view(files.storage("0", stored.size), *v) for label, v in views.items()}
    path = tmp_path / "m.pt"
    path.write_bytes(files.archive(files.mapping(value), {"0": stored.tobytes()}, method=method))
    ds = xr.open_dataset(path, engine="torch", mmap=mmap)
    for label, (offset, shape, strides) in views.items():
        expected = as_strided(stored[offset:], shape, [4 * step for step in strides])
        for key in KEYS.values():
            np.testing.assert_array_equal(ds[label][key].values, expected[key])


def test_bytes_between_elements_are_released(tmp_path: Path) -> None:
    """A column takes the memory of a column, and chunks are cut where it is cheapest."""
    stored, length = files.storage("0", 1_000_000), 1000
    value = {
        "column": files.view(stored, 1, (length,), (length,)),
        "turned": files.view(stored, 0, (2, length // 2, length), (length, 2 * length, 1)),
    }
    path = tmp_path / "m.pt"
    path.write_bytes(files.archive(files.mapping(value), {"0": bytes(4_000_000)}))
    with dask.config.set({"array.chunk-size": "1MiB"}):
        ds = xr.open_dataset(path, engine="torch", mmap=False)
    assert ds["column"].encoding["stored_strides"] == (length,)
    base = ds["column"].values.base
    assert base is None or base.nbytes == 4 * length
    assert [len(sizes) for sizes in ds["turned"].data.chunks] == [1, 4, 1]


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4)])
def test_ranges_are_made_of_blocks(shape: tuple[int, ...]) -> None:
    flat = np.arange(int(np.prod(shape)))
    full = flat.reshape(shape)
    for start in range(flat.size):
        for stop in range(start + 1, flat.size + 1):
            results = [full[key].reshape(-1) for key in runs_of(shape, start, stop)]
            assert np.concatenate(results).tolist() == list(range(start, stop))


WHOLE = np.arange(7 * 9 * 2, dtype="f4").reshape(7, 9, 2)
CUTS = {
    "rows": [(0, 0, 0), (3, 0, 0)],
    "columns": [(0, 0, 0), (0, 4, 0), (0, 8, 0)],
    "a grid": [(0, 0, 0), (0, 5, 0), (4, 0, 0), (4, 5, 0)],
}


@pytest.fixture(params=CUTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    origins = CUTS[request.param]
    ends = [
        sorted({origin[axis] for origin in origins} | {n}) for axis, n in enumerate(WHOLE.shape)
    ]
    chunks: dict[tuple[int, ...], Any] = {}
    for origin in origins:
        stops = [next(end for end in ends[axis] if end > at) for axis, at in enumerate(origin)]
        block = WHOLE[tuple(slice(*stop) for stop in zip(origin, stops, strict=True))]
        chunks[origin] = np.asfortranarray(block) if sum(origin) % 2 else block.copy()
    single_chunk: dict[tuple[int, ...], Any] = {(0, 0, 0): WHOLE}
    arrays = files.distributed(
        {"w": chunks, "one": single_chunk}, {"w": WHOLE.shape, "one": WHOLE.shape}
    )
    for name, data in arrays.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("mmap", [True, False])
def test_selections_of_blocks(folder: Path, mmap: bool) -> None:
    ds = xr.open_dataset(folder, engine="torch", mmap=mmap)
    assert ds["w"].encoding["layout"] == "chunked"
    assert ds["one"].encoding["layout"] == "dense"
    keys = [*KEYS.values(), (5, 8), (slice(2, 6), np.array([8, 0, 4]), 1), (slice(5, 1, -2), 3)]
    for key in keys:
        for name in ("w", "one"):
            expected = xr.Variable(("a", "b", "c"), WHOLE)[key].values
            np.testing.assert_array_equal(ds[name][key].values, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(ds["w"].mean()) == WHOLE.mean()
