"""The golden files come with the repository, and are unpacked once, completely and safely."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard

from tests.conftest import GOLDEN, golden_files
from tests.golden.archives import HERE, golden_folder, pack, unpack, unpacked
from xckpt import formats

if TYPE_CHECKING:
    from collections.abc import Callable

UNPACKED_BY_ANOTHER = """
import sys
from pathlib import Path
from tests.golden.archives import unpacked
print(unpacked(Path(sys.argv[1]), Path(sys.argv[2])))
"""
FILES = {"one/a.bin": b"a" * 1000, "one/bad/.b": b"b", "two/c": b""}


def write(folder: Path) -> None:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by path, without the stamp in its root."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.parent != folder)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    write(tmp_path / "source")
    (tmp_path / "archives").mkdir()
    for name in ("one", "two"):
        pack(tmp_path / "source" / name, tmp_path / "archives" / f"{name}.tar.zst")
    return tmp_path / "archives"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


class TestTheRepositoryHasTheFiles:
    def test_archives_are_those_of_formats_and_models(self) -> None:
        names = {path.name.removesuffix(".tar.zst") for path in HERE.glob("*.tar.zst")}
        # These two are written by their own libraries while the tests run.
        assert names == {*formats.names(), "hf-quantized"} - {"npz", "safetensors"}

    def test_the_description_names_every_archive(self) -> None:
        text = (HERE / "README.md").read_text("utf-8")
        for path in HERE.glob("*.tar.zst"):
            assert f"## {path.name.removesuffix('.tar.zst')}\n" in text

    @pytest.mark.skipif("XCKPT_GOLDEN" in os.environ, reason="other files are tested")
    def test_an_archive_can_be_made_again_from_its_contents(self, tmp_path: Path) -> None:
        pack(GOLDEN / "mlcp", tmp_path / "mlcp.tar.zst")
        again, stored = (
            zstandard.decompress(path.read_bytes())
            for path in (tmp_path / "mlcp.tar.zst", HERE / "mlcp.tar.zst")
        )
        assert again == stored

    def test_a_pattern_without_files_is_an_error(self) -> None:
        with pytest.raises(FileNotFoundError, match=r"no golden file matches 'ztensor/\*absent'"):
            golden_files("ztensor/*absent")

    def test_parameters_without_files_are_an_error(self, request: pytest.FixtureRequest) -> None:
        assert request.config.getini("empty_parameter_set_mark") == "fail_at_collect"

    def test_a_variable_names_another_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XCKPT_GOLDEN", str(tmp_path))
        assert golden_folder() == tmp_path
        monkeypatch.setenv("XCKPT_GOLDEN", str(tmp_path / "absent"))
        with pytest.raises(NotADirectoryError, match=r"XCKPT_GOLDEN is .*absent"):
            golden_folder()


class TestUnpacking:
    def test_contents_come_back(self, archives: Path, cache: Path) -> None:
        assert contents(unpacked(archives, cache)) == FILES

    def test_archives_that_were_unpacked_before_are_not_unpacked_again(
        self, archives: Path, cache: Path
    ) -> None:
        folder = unpacked(archives, cache)
        before = (folder / "one" / "a.bin").stat()
        assert unpacked(archives, cache) == folder
        assert (folder / "one" / "a.bin").stat() == before

    def test_other_archives_have_another_folder(self, archives: Path, cache: Path) -> None:
        first = unpacked(archives, cache)
        (archives.with_name("source") / "two" / "c").write_bytes(b"new")
        pack(archives.with_name("source") / "two", archives / "two.tar.zst")
        second = unpacked(archives, cache)
        assert contents(first) == FILES
        assert contents(second) == FILES | {"two/c": b"new"}

    @pytest.mark.parametrize(
        "change",
        [
            lambda folder: (folder / "one" / "a.bin").write_bytes(b"changed"),
            lambda folder: (folder / "one" / "a.bin").unlink(),
            lambda folder: (folder / "one" / "new").touch(),
            lambda folder: (folder / ".unpacked").unlink(),
        ],
        ids=["changed", "missing", "new", "incomplete"],
    )
    def test_a_folder_that_was_changed_is_replaced(
        self, archives: Path, cache: Path, change: Callable[[Path], object]
    ) -> None:
        folder = unpacked(archives, cache)
        time.sleep(0.02)  # the resolution of times of files
        change(folder)
        assert unpacked(archives, cache) == folder
        assert contents(folder) == FILES
        assert list(cache.iterdir()) == [folder]

    def test_processes_that_start_together_share_a_folder(
        self, archives: Path, cache: Path
    ) -> None:
        command = [sys.executable, "-c", UNPACKED_BY_ANOTHER, str(archives), str(cache)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603
            for _ in range(4)
        ]
        folders = {process.communicate()[0].strip() for process in processes}
        assert folders == {str(unpacked(archives, cache))}
        assert [path.name for path in cache.iterdir()] == [Path(*folders).name]
        assert contents(Path(*folders)) == FILES

    def test_folders_that_nobody_used_for_days_are_removed(
        self, archives: Path, cache: Path
    ) -> None:
        for name, days in (("old", 8), ("recent", 1)):
            (cache / name).mkdir()
            os.utime(cache / name, (0, time.time() - days * 24 * 3600))
        folder = unpacked(archives, cache)
        assert set(cache.iterdir()) == {folder, cache / "recent"}


class TestSafety:
    @pytest.mark.parametrize(
        "name", ["../x", "/x", "x", "two/x", "one/../../x", "one/..\\x", "C:/x", "one\\x"]
    )
    def test_an_entry_outside_of_the_folder_of_the_format_is_refused(
        self, name: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=r"one\.tar\.zst: .* is not in the folder 'one'"):
            self._unpack(tarfile.TarInfo(name), tmp_path)
        assert not (tmp_path / "x").exists()

    @pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
    def test_links_and_devices_are_refused(self, kind: bytes, tmp_path: Path) -> None:
        entry = tarfile.TarInfo("one/x")
        entry.type, entry.linkname = kind, "/etc/passwd"
        with pytest.raises(ValueError, match="'one/x' is neither a file nor a folder"):
            self._unpack(entry, tmp_path)

    def _unpack(self, entry: tarfile.TarInfo, folder: Path) -> None:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as entries:
            parent = tarfile.TarInfo("one")
            parent.type = tarfile.DIRTYPE
            entries.addfile(parent)
            entries.addfile(entry)
        archive = folder / "one.tar.zst"
        archive.write_bytes(zstandard.compress(data.getvalue()))
        (folder / "unpacked").mkdir()
        unpack(archive, folder / "unpacked")


class TestPacking:
    def test_times_and_modes_do_not_change_an_archive(self, archives: Path, tmp_path: Path) -> None:
        write(tmp_path / "again")
        path = tmp_path / "again" / "one" / "a.bin"
        path.chmod(0o444)
        os.utime(path, (1, 1))
        pack(tmp_path / "again" / "one", tmp_path / "one.tar.zst")
        assert (tmp_path / "one.tar.zst").read_bytes() == (archives / "one.tar.zst").read_bytes()

    @pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
    def test_links_are_refused(self, tmp_path: Path) -> None:
        write(tmp_path)
        (tmp_path / "one" / "link").symlink_to("a.bin")
        with pytest.raises(ValueError, match="link is neither a file nor a folder"):
            pack(tmp_path / "one", tmp_path / "one.tar.zst")
