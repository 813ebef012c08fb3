"""Statistics, comparisons, conversions and verification of URLs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import xarray as xr

import xckpt
from tests.storage.web_server import WebServer
from xckpt.cli import main
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m.zt", layers=2, width=64)


@pytest.fixture
def url(path: Path) -> Iterator[str]:
    with WebServer(**{"m.zt": path.read_bytes()}) as web:
        yield f"{web.url}/m.zt"


def test_remote_statistics_equal_local_ones(path: Path, url: str) -> None:
    remote = xckpt.stats(url, progress=False)
    xr.testing.assert_equal(remote, xckpt.stats(path, progress=False))
    assert set(xckpt.histogram(url, progress=False)) == set(remote)


def test_remote_comparison_equals_the_local_one(path: Path, url: str) -> None:
    table = xckpt.compare(path, url, progress=False).ckpt.table()
    assert set(table["status"]) == {"same"}


def test_remote_files_are_converted_and_verified(path: Path, url: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.zt"
    xckpt.convert(url, copy, progress=False)
    assert xckpt.verify(url, progress=False).ok
    xr.testing.assert_equal(
        xr.open_dataset(copy, engine="ztensor"), xr.open_dataset(path, engine="ztensor")
    )


def test_manifests_of_remote_files(path: Path, url: str) -> None:
    manifest = xckpt.manifest(url, progress=False)
    assert manifest == xckpt.manifest(path, progress=False)
    assert xckpt.verify(url, manifest=manifest, progress=False).ok


@pytest.mark.parametrize("command", ["info", "stats", "verify"])
def test_remote_files_on_the_command_line(
    command: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, url, "--json"]) == 0
    assert "m.zt" in capsys.readouterr().out
