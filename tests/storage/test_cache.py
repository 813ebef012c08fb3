"""Where caches lie, and who may read and write them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.storage import cache

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path / "cache"))
    found = cache.folder("kind-1")
    assert found is not None
    return found


def test_the_folder_of_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XCKPT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder("stats-1") == tmp_path / "xckpt" / "stats-1"


def test_nothing_is_kept_where_the_folder_is_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XCKPT_CACHE_DIR", "")
    assert cache.folder("stats-1") is None
    path = tmp_path / "m.zt"
    xckpt.save(xr.Dataset({"w": ("x", np.arange(9.0))}), path, progress=False)
    os.utime(path, (1, 1))
    xckpt.stats(path, progress=False)
    assert [each.name for each in tmp_path.iterdir()] == ["m.zt"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no HOME")
def test_without_a_home_nothing_is_kept_and_nothing_fails(tmp_path: Path) -> None:
    path = tmp_path / "m.zt"
    xckpt.save(xr.Dataset({"w": ("x", np.arange(9.0))}), path, progress=False)
    code = """
import os, pwd, sys
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
import xckpt
from xckpt.storage import cache
assert cache.folder("stats-1") is None
print(float(xckpt.stats(sys.argv[1], progress=False)["w"].sel(statistic="mean")))
"""
    left_out = {"HOME", "XDG_CACHE_HOME", "XCKPT_CACHE_DIR"}
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, str(path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "4.0", done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["m.zt"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no modes")
class TestOnlyTheOwner:
    def test_may_look_into_what_is_kept(self, folder: Path) -> None:
        assert cache.write(folder / "a", b"kept")
        assert [each.stat().st_mode & 0o777 for each in (folder, folder / "a")] == [0o700, 0o600]
        assert cache.read(folder / "a", 4) == b"kept"

    def test_may_write_what_is_read(self, folder: Path) -> None:
        cache.write(folder / "a", b"kept")
        (folder / "a").chmod(0o622)
        assert cache.read(folder / "a", 4) is None
        (folder / "a").chmod(0o600)
        folder.chmod(0o777)
        assert cache.read(folder / "a", 4) is None
        assert not cache.write(folder / "b", b"new")

    def test_reads_no_links_and_nothing_too_long(self, folder: Path) -> None:
        cache.write(folder / "a", b"kept")
        (folder / "link").symlink_to(folder / "a")
        assert cache.read(folder / "link", 4) is None
        assert cache.read(folder / "a", 3) is None


def test_what_was_used_least_recently_makes_room(folder: Path) -> None:
    for number, name in enumerate("abc"):
        cache.write(folder / name, b"xxxx")
        os.utime(folder / name, (number, number))
    cache.make_room(folder, 8)
    assert sorted(each.name for each in folder.iterdir()) == ["b", "c"]
