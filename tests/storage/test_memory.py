from __future__ import annotations

import gzip
import io
import os
import pickle
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from xckpt.errors import FileChangedError, FormatError, UnsupportedError
from xckpt.storage import Source, is_mapped, is_remote, open_source

if TYPE_CHECKING:
    from pathlib import Path

DATA = np.random.default_rng(0).bytes(100_000)


class OnlyRead:
    """The least that a file object has; it gives less than asked for."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.seek, self.tell, self.seekable = self._file.seek, self._file.tell, lambda: True

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, 1000))


@pytest.fixture(
    params=["bytes", "bytearray", "memoryview", "BytesIO", "file", "raw", "gzip", "fsspec", "least"]
)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    path = tmp_path / "m.zt"
    path.write_bytes(DATA)
    match request.param:
        case "bytes":
            return open_source(DATA)
        case "bytearray":
            return open_source(bytearray(DATA))
        case "memoryview":
            return open_source(np.frombuffer(DATA, "f4").reshape(-1, 10).data)
        case "BytesIO":
            return open_source(io.BytesIO(DATA))
        case "least":
            return open_source(OnlyRead(DATA))
    return open_source(request.getfixturevalue(f"{request.param}_file"))


@pytest.fixture
def file_file(tmp_path: Path) -> Any:
    with (tmp_path / "m.zt").open("rb") as file:
        yield file


@pytest.fixture
def raw_file(tmp_path: Path) -> Any:
    with (tmp_path / "m.zt").open("rb", buffering=0) as file:
        yield file


@pytest.fixture
def gzip_file(tmp_path: Path) -> Any:
    with gzip.open(tmp_path / "m.gz", "wb") as file:
        file.write(DATA)
    with gzip.open(tmp_path / "m.gz") as file:
        yield file


@pytest.fixture
def fsspec_file() -> Any:
    import fsspec

    with fsspec.open("memory://test_memory/m.zt", "wb") as file:
        file.write(DATA)
    with fsspec.open("memory://test_memory/m.zt", "rb") as file:
        yield file


def test_reads_return_the_bytes(source: Source) -> None:
    assert source.size == len(DATA)
    for offset, nbytes in ((0, 0), (99_999, 1), (5, 20_000), (0, 100_000), (7, 1)):
        for get in (source.read, source.view):
            got = get(offset, nbytes)
            assert (got.format, got.ndim) == ("B", 1)
            assert got == DATA[offset : offset + nbytes]
            assert not is_mapped(got)


def test_ranges_outside_are_refused(source: Source) -> None:
    for offset, nbytes in ((0, 100_001), (-1, 1), (5, -1), (1 << 64, 1)):
        for get in (source.read, source.view):
            with pytest.raises(FormatError):
                get(offset, nbytes)


def test_reads_do_not_share_memory(source: Source) -> None:
    source.read(0, 10)[:] = bytes(10)
    assert source.read(0, 10) == DATA[:10]


def test_threads_take_turns(source: Source) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        offsets = np.random.default_rng(seed).integers(0, 99_000, 20).tolist()
        wrong.extend(a for a in offsets if source.read(a, 1000) != DATA[a : a + 1000])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_equal_bytes_are_equal_sources() -> None:
    assert open_source(DATA) == open_source(bytearray(DATA))
    assert open_source(DATA) != open_source(DATA[:-1] + b"x")
    assert open_source(DATA) != open_source(io.BytesIO(DATA))
    assert open_source(io.BytesIO(DATA)) != open_source(io.BytesIO(DATA))


def test_bytes_are_viewed_not_copied() -> None:
    view = open_source(DATA).view(10, 20)
    assert view.obj is DATA
    assert view.readonly


def test_empty_bytes() -> None:
    for source in (open_source(b""), open_source(io.BytesIO())):
        assert source.size == 0
        assert len(source.read(0, 0)) == 0


@pytest.mark.parametrize("make", [open_source, lambda data: open_source(io.BytesIO(data))])
def test_sources_in_memory_pickle_with_their_contents(make: Any) -> None:
    source = make(DATA)
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source
    assert copy.read(5, 10) == DATA[5:15]


def test_an_open_file_does_not_pickle(file_file_on_disk: Any) -> None:
    source = open_source(file_file_on_disk)
    with pytest.raises(TypeError, match="path or URL"):
        pickle.dumps(source)


@pytest.fixture
def file_file_on_disk(tmp_path: Path) -> Any:
    (tmp_path / "m.zt").write_bytes(DATA)
    with (tmp_path / "m.zt").open("rb") as file:
        yield file


def test_the_position_of_a_file_object_is_unchanged(file_file_on_disk: Any) -> None:
    file_file_on_disk.seek(77)
    source = open_source(file_file_on_disk)
    assert file_file_on_disk.tell() == 77
    assert source.read(5, 10) == DATA[5:15]
    assert file_file_on_disk.tell() == 77


def test_a_file_that_changes(file_file_on_disk: Any, tmp_path: Path) -> None:
    source = open_source(file_file_on_disk)
    source.read(0, 10)
    os.utime(tmp_path / "m.zt", ns=(1, 1))
    with pytest.raises(FileChangedError):
        source.read(0, 10)


def test_a_buffer_that_shrinks() -> None:
    file = io.BytesIO(DATA)
    source = open_source(file)
    file.truncate(1000)
    assert source.read(0, 1000) == DATA[:1000]
    with pytest.raises(FileChangedError):
        source.read(0, 1001)
    assert file.tell() == 0


def test_unusable_file_objects(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text("abc")
    with path.open() as text, pytest.raises(TypeError, match="'rb'"):
        open_source(text)
    with pytest.raises(TypeError, match="'rb'"):
        open_source(io.StringIO("abc"))
    with path.open("ab") as output, pytest.raises(OSError, match="read"):
        open_source(output)
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe, pytest.raises(TypeError, match="seek"):
        open_source(pipe)
    with path.open("rb") as closed:
        pass
    with pytest.raises(ValueError, match="closed"):
        open_source(closed)


@pytest.mark.parametrize("obj", [None, 5, ["a.zt"], object()])
def test_objects_that_are_not_files(obj: object) -> None:
    with pytest.raises(TypeError, match=type(obj).__name__):
        open_source(obj)
    assert not is_remote(obj)


def test_names_in_messages(file_file_on_disk: Any, tmp_path: Path, fsspec_file: Any) -> None:
    assert open_source(DATA).name == "<bytes>"
    assert open_source(io.BytesIO()).name == "<BytesIO>"
    assert open_source(file_file_on_disk).name == str(tmp_path / "m.zt")
    assert open_source(fsspec_file).name.endswith("test_memory/m.zt")
    with tempfile.TemporaryFile() as file:
        assert isinstance(open_source(file).name, str)


def test_siblings(file_file_on_disk: Any, tmp_path: Path, fsspec_file: Any) -> None:
    (tmp_path / "n.zt").write_bytes(b"other")
    assert bytes(open_source(file_file_on_disk).sibling("n.zt").read(0, 5)) == b"other"
    for alone in (DATA, io.BytesIO(DATA), fsspec_file):
        with pytest.raises(UnsupportedError, match=r"n\.zt"):
            open_source(alone).sibling("n.zt")
