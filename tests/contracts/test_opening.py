"""Opening from any location reads headers only and gives a light reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import xarray as xr

from tests.contracts.every import DECLARED
from tests.storage.web_server import WebServer
from xckpt import formats
from xckpt.testing import Opening

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.contracts.declared import Declared


SINGLE = [declared for declared in DECLARED if not declared.is_folder]


class TestOpening(Opening):
    tested = SINGLE


every_format = pytest.mark.parametrize("declared", SINGLE, ids=lambda declared: declared.name)


@pytest.fixture
def path(declared: Declared, tmp_path: Path) -> Path:
    """A file whose header is small beside its data."""
    path = tmp_path / f"m{formats.get(declared.name).suffixes[0]}"
    declared.large(path)
    return path


@pytest.fixture
def web(path: Path) -> Iterator[WebServer]:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'xckpt[remote]'")
    with WebServer(**{path.name: path.read_bytes()}) as web:
        yield web


@every_format
def test_whole_files_open_with_missing_raise(declared: Declared, path: Path) -> None:
    ds = xr.open_dataset(path, engine=declared.name, missing="raise")
    xr.testing.assert_identical(ds, xr.open_dataset(path, engine=declared.name))


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
