"""Location of the caches, and permissions to read and write them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.storage.web_server import WebServer
from tests.test_stacking import zt
from xckpt.scan import statistics_cache
from xckpt.storage import cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path / "cache"))
    path = cache.folder("kind-1")
    assert path is not None
    return path


def test_the_folder_of_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XCKPT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder("statistics") == tmp_path / "xckpt" / "statistics"


@pytest.fixture
def web(checkpoint: Path) -> Iterator[WebServer]:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'xckpt[remote]'")
    # So many that opening takes several requests, which is when the header is kept.
    many = {f"t{n}": np.full((2, 2), n, "<f4") for n in range(2000)}
    served = {"m.zt": checkpoint.read_bytes(), "many.zt": zt(many | {"w": np.arange(9.0)})}
    with WebServer(**served) as server:
        yield server


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a checkpoint that looks as if it had been there for a while."""
    path = tmp_path / "m.zt"
    xckpt.save(xr.Dataset({"w": ("x", np.arange(9.0))}), path, progress=False)
    os.utime(path, (1, 1))
    return path


def mean(path: Path | str) -> tuple[float, bool]:
    """Return a mean, and whether bytes were read for it."""
    reports: list[int] = []
    statistics = xckpt.stats(path, progress=lambda done, _: reports.append(done))
    return float(statistics["w"].sel(statistic="mean")), any(reports)


def test_an_empty_folder_option_disables_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path, web: WebServer
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XCKPT_CACHE_DIR", "")
    assert cache.folder("statistics") is None
    for path in (checkpoint, f"{web.url}/m.zt"):
        for _ in range(2):
            assert mean(path) == (4.0, True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.zt"]
    xr.open_dataset(f"{web.url}/many.zt", engine="ztensor")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.zt"]
    # Where there is a folder, both keep something.
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path / "cache"))
    xr.open_dataset(f"{web.url}/many.zt", engine="ztensor")
    mean(f"{web.url}/m.zt")
    assert mean(f"{web.url}/m.zt") == (4.0, False)
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {"headers", "statistics"}


@pytest.mark.skipif(sys.platform == "win32", reason="has no HOME")
def test_without_a_home_the_cache_is_disabled(
    tmp_path: Path, checkpoint: Path, web: WebServer
) -> None:
    code = """
import os, pwd, sys
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
import xckpt
from xckpt.storage import cache
assert cache.folder("statistics") is None
for path in sys.argv[1:]:
    print(float(xckpt.stats(path, progress=False)["w"].sel(statistic="mean")))
"""
    left_out = {"HOME", "XDG_CACHE_HOME", "XCKPT_CACHE_DIR"}
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, str(checkpoint), f"{web.url}/m.zt"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["4.0", "4.0"], done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.zt"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no modes")
class TestOwner:
    def test_only_the_owner_can_read_the_cache(self, folder: Path) -> None:
        assert cache.write(folder / "a", b"kept")
        assert [entry.stat().st_mode & 0o777 for entry in (folder, folder / "a")] == [0o700, 0o600]
        assert cache.read(folder / "a", 4) == b"kept"

    def test_files_that_others_can_write_are_ignored(self, folder: Path) -> None:
        cache.write(folder / "a", b"kept")
        (folder / "a").chmod(0o622)
        assert cache.read(folder / "a", 4) is None
        (folder / "a").chmod(0o600)
        folder.chmod(0o777)
        assert cache.read(folder / "a", 4) is None
        assert not cache.write(folder / "b", b"new")

    def test_links_and_long_files_are_ignored(self, folder: Path) -> None:
        cache.write(folder / "a", b"kept")
        (folder / "link").symlink_to(folder / "a")
        assert cache.read(folder / "link", 4) is None
        assert cache.read(folder / "a", 3) is None


@pytest.mark.skipif(sys.platform == "win32", reason="has no modes")
class TestCachedStatistics:
    @pytest.fixture
    def stored(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Path:
        monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path / "cache"))
        assert [mean(checkpoint), mean(checkpoint)] == [(4.0, True), (4.0, False)]
        (path,) = (tmp_path / "cache" / statistics_cache.FOLDER).iterdir()
        return path

    def test_statistics_of_another_user_are_neither_read_nor_changed(
        self, stored: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = stored.read_bytes()
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        assert [mean(checkpoint), mean(checkpoint)] == [(4.0, True), (4.0, False)]  # from memory
        assert [entry.read_bytes() for entry in stored.parent.iterdir()] == [data]

    def test_statistics_in_a_shared_folder_are_neither_read_nor_changed(
        self, stored: Path, checkpoint: Path
    ) -> None:
        data = stored.read_bytes()
        stored.parent.chmod(0o770)
        assert [mean(checkpoint), mean(checkpoint)] == [(4.0, True), (4.0, False)]  # from memory
        assert stored.read_bytes() == data
        stored.parent.chmod(0o700)
        assert mean(checkpoint) == (4.0, False)

    def test_behind_a_link_are_not_read_and_the_link_is_replaced(
        self, stored: Path, checkpoint: Path, tmp_path: Path
    ) -> None:
        target = stored.rename(tmp_path / "target")
        data = target.read_bytes()
        stored.symlink_to(target)
        assert mean(checkpoint) == (4.0, True)
        assert target.read_bytes() == data
        assert not stored.is_symlink()
        assert mean(checkpoint) == (4.0, False)

    def test_may_be_in_a_linked_folder_of_the_user(
        self, stored: Path, checkpoint: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "cache").rename(tmp_path / "elsewhere")
        (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
        assert stored.exists()
        assert mean(checkpoint) == (4.0, False)

    @pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
    def test_are_private_whatever_the_umask_is(
        self, mask: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path / "new" / "cache"))
        before = os.umask(mask)
        try:
            assert [mean(checkpoint), mean(checkpoint)] == [(4.0, True), (4.0, False)]
        finally:
            os.umask(before)
        for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_least_recently_used_entry_is_evicted(folder: Path) -> None:
    for number, name in enumerate("abc"):
        cache.write(folder / name, b"xxxx")
        os.utime(folder / name, (number, number))
    cache.make_room(folder, 8)
    assert sorted(entry.name for entry in folder.iterdir()) == ["b", "c"]
