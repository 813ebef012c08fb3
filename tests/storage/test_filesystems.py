from __future__ import annotations

import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import fsspec
import numpy as np
import pytest

from xckpt.errors import FileChangedError, FormatError, UnsupportedError
from xckpt.storage import is_remote, open_source
from xckpt.storage.remote import sibling_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATA = np.random.default_rng(0).bytes(100_000)


@pytest.fixture
def memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    folder = f"/{uuid4().hex}"
    fs.pipe(f"{folder}/m.zt", DATA)
    yield f"memory:/{folder}"
    if fs.exists(folder):
        fs.rm(folder, recursive=True)


def test_reads_return_the_bytes(memory: str) -> None:
    source = open_source(f"{memory}/m.zt")
    assert (source.size, source.name) == (100_000, f"{memory}/m.zt")
    for offset, nbytes in ((0, 0), (99_999, 1), (5, 20_000), (0, 100_000)):
        for get in (source.read, source.view):
            assert get(offset, nbytes) == DATA[offset : offset + nbytes]
    with pytest.raises(FormatError):
        source.read(99_999, 2)


def test_missing_files_and_folders_are_errors(memory: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.zt"):
        open_source(f"{memory}/none.zt")
    with pytest.raises(IsADirectoryError, match=memory):
        open_source(memory)
    with pytest.raises(ValueError, match="unheard-of"):
        open_source("unheard-of://m.zt")


def test_pickles_by_reference(memory: str) -> None:
    source = open_source(f"{memory}/m.zt", storage_options={"skip_instance_cache": True})
    pickled = pickle.dumps(source)
    copy = pickle.loads(pickled)
    assert len(pickled) < 1000
    assert copy == source
    assert copy.storage_options == {"skip_instance_cache": True}
    assert copy.read(5, 5) == DATA[5:10]


def test_a_changed_file_is_an_error(memory: str) -> None:
    fs = fsspec.filesystem("memory")
    source = open_source(f"{memory}/m.zt")
    assert source.read(0, 5) == DATA[:5]
    fs.pipe(f"{memory}/m.zt", DATA[::-1])
    for changed in (source, pickle.loads(pickle.dumps(source))):
        with pytest.raises(FileChangedError, match="again"):
            changed.read(0, 5)
    source = open_source(f"{memory}/m.zt")
    fs.rm(f"{memory}/m.zt")
    with pytest.raises(FileChangedError, match="no longer there"):
        source.read(0, 5)


class ScriptedFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system with the sizes, versions and data that a test sets for the class."""

    protocol = "scripted"
    current_info: ClassVar[dict[str, Any]]
    data: ClassVar[bytes]
    info_calls = 0
    fetched: ClassVar[list[tuple[int, int]]]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        type(self).info_calls += 1
        return self.current_info

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.fetched.append((start, end))
        return self.data[start:end]


@pytest.fixture
def filesystem() -> type[ScriptedFileSystem]:
    class OfThisTest(ScriptedFileSystem):
        current_info: ClassVar = {"size": 10, "type": "file", "ETag": "a"}
        data = bytes(range(10))
        fetched: ClassVar = []

    fsspec.register_implementation("scripted", OfThisTest, clobber=True)
    return OfThisTest


def test_the_version_is_not_checked_with_each_read(
    filesystem: type[ScriptedFileSystem], later: Callable[[float], None]
) -> None:
    source = open_source("scripted://" + uuid4().hex)
    for _ in range(20):
        source.read(0, 5)
    assert filesystem.info_calls == 1
    later(20)
    for _ in range(20):
        source.read(0, 5)
    assert filesystem.info_calls == 2
    later(20)
    filesystem.current_info = {"size": 10, "type": "file", "ETag": "b"}
    with pytest.raises(FileChangedError):
        source.read(0, 5)


COPIED = """
import pickle, sys, fsspec
from xckpt.errors import FileChangedError

class ScriptedFileSystem(fsspec.AbstractFileSystem):
    def info(self, path): return {"size": 10, "type": "file", "ETag": "b"}
    def cat_file(self, path, start, end): return bytes(end - start)

fsspec.register_implementation("scripted", ScriptedFileSystem)
try: pickle.loads(bytes.fromhex(sys.argv[1])).read(0, 5)
except FileChangedError: print("changed")
"""


@pytest.mark.usefixtures("filesystem")
def test_a_copy_in_another_process_checks_once() -> None:
    pickled = pickle.dumps(open_source("scripted://" + uuid4().hex))
    command = [sys.executable, "-c", COPIED, pickled.hex()]
    run = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert run.stdout == "changed\n"


def test_a_blocking_file_system_is_a_time_out(
    filesystem: type[ScriptedFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Event()
    monkeypatch.setattr(filesystem, "info", lambda *_: ended.wait(60))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"scripted://m\.zt"):
        open_source("scripted://m.zt", storage_options={"xckpt": {"timeout": 0.2}})
    assert time.monotonic() - start < 5
    ended.set()


@pytest.mark.parametrize("error", [ValueError("no number"), IndexError("no range"), KeyError("x")])
def test_errors_of_file_systems_name_the_file(
    filesystem: type[ScriptedFileSystem], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    source = open_source("scripted://" + uuid4().hex)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    for name in ("cat_file", "info"):
        monkeypatch.setattr(filesystem, name, fail)
    for call in (lambda: source.read(0, 5), lambda: open_source(source.name)):
        with pytest.raises(OSError, match="scripted://") as caught:
            call()
        assert not isinstance(caught.value, FileNotFoundError | ValueError)


@pytest.mark.parametrize("size", [1 << 63, 10**30])
def test_an_invalid_size_is_an_error(filesystem: type[ScriptedFileSystem], size: int) -> None:
    filesystem.current_info["size"] = size
    with pytest.raises(UnsupportedError, match="size"):
        open_source("scripted://m.zt")


def test_a_short_answer_is_an_error(filesystem: type[ScriptedFileSystem]) -> None:
    source = open_source("scripted://" + uuid4().hex)
    filesystem.data = filesystem.data[:7]
    with pytest.raises(OSError, match="asked for 5 bytes at 5, got 2") as caught:
        source.read(5, 5)
    assert not isinstance(caught.value, FileChangedError)
    filesystem.current_info = {"size": 7, "type": "file", "ETag": "b"}
    with pytest.raises(FileChangedError):
        source.read(5, 5)


@pytest.mark.parametrize("size", [None, -1, 3.5, "10"])
def test_an_unknown_size_is_an_error(filesystem: type[ScriptedFileSystem], size: object) -> None:
    filesystem.current_info["size"] = size
    with pytest.raises(UnsupportedError, match="size"):
        open_source("scripted://m.zt")


def test_ranges_are_merged_and_read_at_the_same_time(
    filesystem: type[ScriptedFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source("scripted://" + uuid4().hex)
    monkeypatch.setattr(type(source), "worth_skipping", 1)
    pieces = source.read_ranges([(8, 2), (0, 1), (2, 1)])
    assert [bytes(piece) for piece in pieces] == [b"\x08\x09", b"\x00", b"\x02"]
    assert sorted(filesystem.fetched) == [(0, 3), (8, 10)]


def test_a_file_system_without_range_reads(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/m.zt", DATA)
        archive.writestr("in/n.zt", b"other")
    source = open_source(f"zip://in/m.zt::{(tmp_path / 'a.zip').as_uri()}")
    with ThreadPoolExecutor(4) as threads:
        got = threads.map(lambda offset: bytes(source.read(offset, 1000)), range(0, 99_000, 1000))
    assert b"".join(got) == DATA[:99_000]
    assert bytes(source.sibling("n.zt").read(0, 5)) == b"other"
    with pytest.raises(FileNotFoundError):
        source.sibling("none.zt")


def test_siblings(memory: str) -> None:
    fsspec.filesystem("memory").pipe(f"{memory}/blobs/n.zt", b"other")
    source = open_source(f"{memory}/m.zt")
    assert bytes(source.sibling("blobs/n.zt").read(0, 5)) == b"other"
    with pytest.raises(FormatError):
        source.sibling("../n.zt")


@pytest.mark.parametrize(
    ("url", "sibling"),
    [
        ("s3://bucket/a/m.zt", "s3://bucket/a/n o.zt"),
        ("memory://m.zt", "memory://n o.zt"),
        ("https://h/a/m.zt?token=a/b", "https://h/a/n%20o.zt?token=a/b"),
        ("simplecache::s3://bucket/m.zt", "simplecache::s3://bucket/n o.zt"),
        ("zip://a/m.zt::s3://bucket/x.zip", "zip://a/n o.zt::s3://bucket/x.zip"),
    ],
)
def test_urls_of_siblings(url: str, sibling: str) -> None:
    assert sibling_url(url, ["n o.zt"]) == sibling


def test_urls_are_recognised() -> None:
    assert all(map(is_remote, ["https://h/m.zt", "simplecache::s3://b/m.zt", "memory://m.zt"]))
    paths = ["m.zt", "/a/m.zt", "C:\\m.zt", "C:/m.zt", "file:///m.zt", "FILE:///m.zt", "a:b", ""]
    assert not any(map(is_remote, [*paths, Path("s3://b/m.zt"), b"s3://"]))


@pytest.mark.parametrize("url", ["s3://b/m.zt", "https://h/m.zt", "gs://b/m.zt", "az://c/m.zt"])
def test_a_missing_package_is_named_with_its_extra(url: str) -> None:
    code = (
        "import sys; from xckpt.storage import open_source\n"
        "sys.modules['obstore'] = None\n"
        "try: open_source(sys.argv[1])\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, url], capture_output=True, text=True, check=True
    )
    assert "pip install 'xckpt[remote]'" in run.stdout
    assert url in run.stdout


def test_a_missing_package_of_another_protocol_is_named() -> None:
    with pytest.raises(ImportError, match=r"sftp://h/m.zt.*paramiko"):
        open_source("sftp://h/m.zt")
