"""Opening from any location reads headers only and gives a light reference."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

import dask
import fsspec
import pytest
import xarray as xr

from tests.contracts.declared import LARGE, Declared
from tests.contracts.every import DECLARED
from tests.sources import CountingSource
from tests.storage.web_server import WebServer
from xckpt import formats
from xckpt.opening import read_index

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SINGLE = [declared for declared in DECLARED if not declared.is_folder]
every_format = pytest.mark.parametrize("declared", SINGLE, ids=lambda declared: declared.name)


@pytest.fixture
def path(declared: Declared, tmp_path: Path) -> Path:
    """A file whose header is small beside its data."""
    path = tmp_path / f"m{formats.get(declared.name).suffixes[0]}"
    declared.large(path)
    return path


@every_format
def test_no_data_are_read_at_opening(declared: Declared, path: Path) -> None:
    """Only what no tensor occupies is looked at: without all data the index is the same."""
    data, index = bytearray(path.read_bytes()), read_index(path)
    for tensor in index.tensors.values():
        for part in tensor.parts.values():
            data[part.offset : part.offset + part.nbytes] = b"\xee" * part.nbytes
    source = CountingSource(bytes(data), index.source)
    again = formats.get(declared.name).read(source)
    assert (again.tensors, again.attrs) == (index.tensors, index.attrs)
    # A window or two of 64 KiB for each of the tensors, in whatever order they are.
    assert source.nbytes_read < 600_000


@pytest.fixture
def web(path: Path) -> Iterator[WebServer]:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'xckpt[remote]'")
    with WebServer(**{path.name: path.read_bytes()}) as web:
        yield web


@every_format
def test_headers_over_http_take_few_requests(
    declared: Declared, path: Path, web: WebServer
) -> None:
    local = xr.open_dataset(path, engine=declared.name)
    remote = xr.open_dataset(f"{web.url}/{path.name}", engine=declared.name)
    assert len(web.requests) <= 2 + len(local.variables)
    file_format, engine = formats.get(declared.name), xr.backends.list_engines()[declared.name]
    for suffix in file_format.suffixes:
        is_own = suffix not in file_format.shared_suffixes
        assert engine.guess_can_open(f"s3://bucket/m{suffix.upper()}?v=1") == is_own
    assert not engine.guess_can_open("s3://bucket/m.nc")
    xr.testing.assert_identical(remote.compute(), local.compute())


@every_format
def test_files_in_memory_and_on_other_file_systems(declared: Declared, path: Path) -> None:
    data, local = path.read_bytes(), xr.open_dataset(path, engine=declared.name).compute()
    fsspec.filesystem("memory").pipe(f"/contracts/{path.name}", data)
    for obj in (data, memoryview(data), f"memory://contracts/{path.name}", path.as_uri()):
        xr.testing.assert_identical(xr.open_dataset(obj, engine=declared.name).compute(), local)


@pytest.fixture(scope="module")
def another_process() -> Iterator[ProcessPoolExecutor]:
    """One for all formats: to start it and import everything takes seconds."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


@every_format
def test_datasets_pickle_by_reference(
    declared: Declared, path: Path, another_process: ProcessPoolExecutor
) -> None:
    ds = xr.open_dataset(path, engine=declared.name)
    pickled = pickle.dumps(ds)
    assert len(pickled) < 20_000
    xr.testing.assert_identical(pickle.loads(pickled).compute(), ds.compute())
    tasks = [task for v in ds.variables.values() for task in dict(v.data.dask).values()]
    assert max(len(pickle.dumps(task)) for task in tasks) < 1536
    with dask.config.set(scheduler="processes", pool=another_process):
        assert float(ds["large"][-1, -1]) == LARGE[-1, -1]
