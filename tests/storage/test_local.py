from __future__ import annotations

import errno
import gc
import mmap
import os
import pickle
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import pytest

from xckpt.errors import FileChangedError, FormatError, UnsupportedError
from xckpt.storage import Source, is_mapped, local, local_path, open_source
from xckpt.storage.limits import most_open
from xckpt.storage.source import empty_array

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = np.random.default_rng(0).bytes(1 << 20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.zt"
    path.write_bytes(DATA)
    return path


def rewrite(path: Path, data: bytes) -> None:
    """Write in place, as another program does some time later."""
    path.write_bytes(data)
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))


@pytest.fixture(params=["mapped", "read", "without preadv"])
def source(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Source:
    if request.param == "without preadv":
        monkeypatch.delattr(os, "preadv", raising=False)
    return open_source(path, mmap=request.param == "mapped")


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 0), (0, 1), (5, 1000), (0, 1 << 20), ((1 << 20) - 1, 1), (1 << 20, 0)],
)
def test_reads_and_views_return_the_bytes(source: Source, offset: int, nbytes: int) -> None:
    for get in (source.read, source.view):
        got = get(offset, nbytes)
        assert isinstance(got, memoryview)
        assert (got.format, got.ndim) == ("B", 1)
        assert got == DATA[offset : offset + nbytes]


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, (1 << 20) + 1), (1 << 20, 1), (-1, 1), (5, -1), (0, 1 << 62), (2**64, 1)],
)
def test_ranges_outside_are_refused_before_allocating(
    source: Source, offset: int, nbytes: int
) -> None:
    for get in (source.read, source.view):
        with pytest.raises(FormatError) as caught:
            get(offset, nbytes)
        assert (caught.value.offset, caught.value.path) == (offset, source.name)


def test_reads_do_not_share_memory(source: Source, path: Path) -> None:
    got = source.read(10, 10)
    got[0] = 0
    assert path.read_bytes() == DATA
    assert not is_mapped(got)


@pytest.mark.parametrize("nbytes", [4 << 20, 8 << 20, (64 << 20) - 7])
def test_large_memory_begins_with_a_huge_page(nbytes: int) -> None:
    memory = empty_array(nbytes)
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % (2 << 20) == 0
    assert memory.flags.writeable


@pytest.mark.parametrize("nbytes", [0, 1, (2 << 20) + 1, (5 << 20) + 1])
def test_memory_that_would_half_fill_a_huge_page_is_no_larger(nbytes: int) -> None:
    memory = empty_array(nbytes)
    assert memory.nbytes == nbytes
    assert memory.base is None


def test_a_view_of_a_map_is_no_copy(path: Path) -> None:
    view = open_source(path, mmap=True).view(0, 1 << 20)
    assert view.readonly
    assert is_mapped(view)
    assert is_mapped(view[5:])
    array = np.frombuffer(view, "u4")
    assert is_mapped(array[3:].reshape(-1, 1).T)
    assert not is_mapped(array + 1)
    assert not is_mapped(open_source(path).view(0, 10))
    assert not is_mapped(b"")
    assert not is_mapped(None)


def test_ranges_of_a_map_are_views(path: Path) -> None:
    pieces = open_source(path, mmap=True).read_ranges([(500_000, 10), (0, 20)])
    assert [bytes(piece) for piece in pieces] == [DATA[500_000:500_010], DATA[:20]]
    assert all(map(is_mapped, pieces))


def test_missing_files_and_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.zt"):
        open_source(tmp_path / "none.zt")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        open_source(tmp_path)
    (tmp_path / "f").touch()
    with pytest.raises(NotADirectoryError):
        open_source(tmp_path / "f" / "m.zt")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may read all files"
)
def test_without_permission(path: Path) -> None:
    path.chmod(0)
    with pytest.raises(PermissionError):
        open_source(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this system")
def test_disk_errors_name_an_open_file_and_are_ignored_on_close(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing_once_closed(fileno: int) -> None:
        close(fileno)
        failing()

    close = os.close
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing_once_closed)
        file = local.OpenFile(str(path))
        del file  # an error could not be caught here
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing)
        with pytest.raises(OSError, match="Input/output") as caught:
            local.LocalSource(str(path))
    assert caught.value.filename == str(path)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsupportedError, match="regular"):
        open_source(tmp_path / "pipe")


@pytest.mark.parametrize("mapped", [True, False])
def test_an_empty_file(tmp_path: Path, mapped: bool) -> None:
    (tmp_path / "empty").touch()
    source = open_source(tmp_path / "empty", mmap=mapped)
    assert source.size == 0
    assert bytes(source.read(0, 0)) == bytes(source.view(0, 0)) == b""
    with pytest.raises(FormatError):
        source.view(0, 1)


def test_paths_are_absolute_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("HOME", str(path.parent))
    monkeypatch.setenv("USERPROFILE", str(path.parent))
    sources = [
        open_source(spelling) for spelling in ("m.zt", "~/m.zt", "./x/../m.zt", path.as_uri())
    ]
    monkeypatch.chdir(Path(path.anchor))
    for source in sources:
        assert source.name == str(path)
        assert source.read(0, 4) == DATA[:4]
    assert len(set(sources)) == 1


def test_a_file_url_with_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "a b#c%d?ü.zt"
    path.write_bytes(b"1234")
    assert bytes(open_source(path.as_uri()).read(0, 4)) == b"1234"
    with pytest.raises(ValueError, match="elsewhere"):
        open_source("file://elsewhere/m.zt")


def write_in_place(path: Path) -> None:
    rewrite(path, DATA[::-1])


def grow(path: Path) -> None:
    rewrite(path, DATA + b"x")


def cut_short(path: Path) -> None:
    rewrite(path, DATA[:-1])


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    """Put another file of the same size and time there."""
    time = path.stat().st_mtime_ns
    replacement = path.with_suffix(".new")
    replacement.write_bytes(DATA[::-1])
    os.utime(replacement, ns=(time, time))
    replacement.replace(path)


@pytest.mark.parametrize("change", [write_in_place, grow, cut_short, delete, replace])
@pytest.mark.parametrize("used", [True, False], ids=["used before", "first use"])
def test_a_changed_file_is_an_error(
    source: Source,
    path: Path,
    change: object,
    used: bool,
) -> None:
    if used:
        source.view(0, 10)
        source.read(0, 10)
    else:
        source.close()
    assert callable(change)
    change(path)
    for get in (source.read, source.view, pickle.loads(pickle.dumps(source)).read):
        with pytest.raises(FileChangedError, match="changed") as caught:
            get(0, 10)
        assert caught.value.path == str(path)
        assert "again" in str(caught.value)
    if path.exists():
        assert open_source(path).view(0, 10) == path.read_bytes()[:10]


def test_a_change_during_a_read_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(path)
    read_into = local.OpenFile.read_into

    def read_while_it_changes(self: local.OpenFile, memory: memoryview, offset: int) -> int:
        rewrite(path, DATA[::-1])
        return read_into(self, memory, offset)

    monkeypatch.setattr(local.OpenFile, "read_into", read_while_it_changes)
    with pytest.raises(FileChangedError, match="written"):
        source.read(0, 10)


class TestLongReads:
    """Long reads are divided among threads, and are one read all the same."""

    @pytest.fixture
    def long(self, tmp_path: Path) -> Path:
        path = tmp_path / "long.zt"
        path.write_bytes(DATA * 70)
        return path

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 70 << 20), (12345, (50 << 20) + 1)])
    def test_all_bytes_are_in_their_places(self, long: Path, offset: int, nbytes: int) -> None:
        assert open_source(long).read(offset, nbytes) == (DATA * 70)[offset : offset + nbytes]

    def test_a_file_cut_while_it_is_open_is_an_error(self, long: Path) -> None:
        source = open_source(long)
        os.truncate(long, 40 << 20)
        with pytest.raises(FileChangedError):
            source.read(0, 64 << 20)

    def test_blocks_are_those_of_the_file(self, long: Path) -> None:
        memory = memoryview(bytearray(3 << 20))
        blocks = [bytes(b) for b in open_source(long).blocks_in(memory, 5, 10 << 20)]
        assert b"".join(blocks) == (DATA * 11)[5 : 5 + (10 << 20)]

    def test_a_file_that_changes_between_blocks_is_an_error(self, long: Path) -> None:
        blocks = open_source(long).blocks_in(memoryview(bytearray(4 << 20)), 0, 12 << 20)
        next(blocks)
        rewrite(long, DATA[::-1] * 70)
        with pytest.raises(FileChangedError, match="written"):
            list(blocks)


def test_a_file_replaced_between_the_check_and_the_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(path)
    source.close()
    replace(path)
    monkeypatch.setattr(local.LocalSource, "check", lambda *_: None)
    for get in (source.read, source.view):
        with pytest.raises(FileChangedError):
            get(0, 10)


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "preadv"):
        pytest.skip("no preadv on this system")
    preadv = os.preadv

    def some(fileno: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fileno, [buffers[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", some)
    assert open_source(path).read(100, 100_000) == DATA[100:100_100]


def test_a_file_system_without_maps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMap(mmap.mmap):
        def __new__(cls, *_: object, **__: object) -> Self:
            raise OSError(19, "No such device")

    monkeypatch.setattr(mmap, "mmap", NoMap)
    view = open_source(path, mmap=True).view(10, 20)
    assert view == DATA[10:30]
    assert not is_mapped(view)


def test_views_outlive_closing_and_eviction(path: Path, tmp_path: Path) -> None:
    source = open_source(path, mmap=True)
    view = source.view(0, 1 << 20)
    source.close()
    fill_the_pool(tmp_path)
    gc.collect()
    assert view == DATA
    assert source.view(5, 5) == DATA[5:10]


def fill_the_pool(folder: Path, count: int = 200) -> list[Source]:
    sources = []
    for number in range(count):
        (folder / f"{number}.bin").write_bytes(number.to_bytes(4, "little"))
        source = open_source(folder / f"{number}.bin", mmap=number % 2 == 0)
        assert source.read(0, 4) == source.view(0, 4) == number.to_bytes(4, "little")
        sources.append(source)
    return sources


def count_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc/self/fd to count")
def test_open_descriptors_are_bounded(tmp_path: Path) -> None:
    before = count_descriptors()
    sources = fill_the_pool(tmp_path)
    assert count_descriptors() <= before + most_open()
    for number, source in enumerate(sources):
        assert source.read(0, 4) == number.to_bytes(4, "little")
    for source in sources:
        source.close()
    gc.collect()
    assert count_descriptors() <= before


def test_threads_read_one_file(source: Source) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for offset in rng.integers(0, len(DATA) - 5000, 200).tolist():
            get = source.view if offset % 2 else source.read
            if get(offset, 5000) != DATA[offset : offset + 5000]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_pickles_by_reference(path: Path) -> None:
    source = open_source(path, mmap=True)
    source.view(0, 100)
    pickled = pickle.dumps(source)
    assert len(pickled) < 400 + len(source.name)
    copy = pickle.loads(pickled)
    assert copy == source
    assert hash(copy) == hash(source)
    assert (copy.size, copy.identity, copy.mmap) == (source.size, source.identity, True)
    assert copy.read(0, 10) == DATA[:10]


def read_middle(source: Source) -> bytes:
    return bytes(source.read(1000, 100)) + bytes(source.view(5000, 100))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_another_process_reads_a_pickled_source(path: Path, method: str) -> None:
    if method == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    source = open_source(path, mmap=True)
    read_middle(source)
    with get_context(method).Pool(1) as workers:
        assert workers.apply(read_middle, (source,)) == DATA[1000:1100] + DATA[5000:5100]


def test_siblings(path: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b.zt").write_bytes(b"other")
    source = open_source(path, mmap=True)
    sibling = source.sibling("blobs/b.zt")
    assert bytes(sibling.view(0, 5)) == b"other"
    assert is_mapped(sibling.view(0, 5))
    with pytest.raises(FileNotFoundError):
        source.sibling("c.zt")
    with pytest.raises(FormatError):
        source.sibling("../m.zt")


def test_siblings_of_a_link_are_beside_the_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "m.zt"
    try:
        link.symlink_to(path)
    except OSError:
        pytest.skip("no symbolic links on this system")
    (tmp_path / "snapshot" / "n.zt").write_bytes(b"beside")
    assert bytes(open_source(link).sibling("n.zt").read(0, 6)) == b"beside"


def put_back(path: Path, change: Callable[[], object]) -> None:
    """Change a file, and give it the times that it had."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    change()
    os.utime(path, ns=times)


def write_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"!")


# The clock of a file system ticks some times in a hundredth of a second.
TICK = 0.05


@pytest.mark.skipif(sys.platform == "win32", reason="no time of change on this system")
@pytest.mark.parametrize("used", [True, False], ids=["used before", "first use"])
def test_a_file_that_was_written_with_its_time_put_back(
    source: Source, path: Path, used: bool
) -> None:
    if used:
        source.read(0, 10)
    else:
        source.close()
    time.sleep(TICK)
    put_back(path, lambda: write_a_byte(path))
    assert open_source(path) != source
    for get in (source.read, source.view, pickle.loads(pickle.dumps(source)).read):
        with pytest.raises(FileChangedError, match="written"):
            get(0, 10)


@pytest.mark.skipif(sys.platform == "win32", reason="no time of change on this system")
def test_an_open_file_object_that_was_written_with_its_time_put_back(path: Path) -> None:
    with path.open("rb") as file:
        source = open_source(file)
        time.sleep(TICK)
        put_back(path, lambda: write_a_byte(path))
        with pytest.raises(FileChangedError, match=r"byte 600: the file changed"):
            source.read(600, 10)


def change_permissions(path: Path) -> None:
    path.chmod(0o600 if path.stat().st_mode & 0o077 else 0o644)


def add_a_name(path: Path) -> None:
    path.with_name(f"link {path.stat().st_nlink}").hardlink_to(path)


@pytest.mark.skipif(sys.platform == "win32", reason="no time of change on this system")
@pytest.mark.parametrize("change", [change_permissions, add_a_name])
def test_names_and_permissions_are_no_change(
    source: Source, path: Path, change: Callable[[Path], None]
) -> None:
    with path.open("rb") as file:
        of_object = open_source(file)
        for _ in range(2):
            time.sleep(TICK)
            change(path)
            copy = pickle.loads(pickle.dumps(source))
            for get in (copy.read, source.read, source.view, of_object.read):
                assert get(0, 10) == DATA[:10]
            source.close()
        time.sleep(TICK)
        put_back(path, lambda: write_a_byte(path))
        for get in (source.read, source.view, of_object.read):
            with pytest.raises(FileChangedError):
                get(0, 10)


def failing(monkeypatch: pytest.MonkeyPatch, numbers: list[int]) -> None:
    """Let reads fail with these errors, one after another."""
    if not hasattr(os, "preadv"):
        pytest.skip("no preadv on this system")
    preadv = os.preadv

    def read(fileno: int, buffers: list[memoryview], offset: int) -> int:
        if numbers:
            number = numbers.pop(0)
            raise OSError(number, os.strerror(number))
        return preadv(fileno, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)


def test_an_error_of_the_system_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(path)
    failing(monkeypatch, [errno.EIO])
    with pytest.raises(OSError, match=r"reading 100 bytes at 7") as caught:
        source.read(7, 100)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert source.read(7, 100) == DATA[7:107]


def test_a_stale_file_handle_is_reopened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(path)
    failing(monkeypatch, [errno.ESTALE])
    assert source.read(7, 100) == DATA[7:107]
    failing(monkeypatch, [errno.ESTALE, errno.ESTALE])
    with pytest.raises(OSError, match=r"m\.zt") as caught:
        source.read(7, 100)
    assert caught.value.errno == errno.ESTALE
    failing(monkeypatch, [errno.ESTALE])
    replace(path)
    with pytest.raises(FileChangedError, match="replaced"):
        source.read(7, 100)


def test_ranges_and_blocks_equal_single_reads(source: Source) -> None:
    offsets = [(1 << 20) - 10, 0, 500, 501, 0]
    memory = np.zeros(50, np.uint8)
    source.read_into(offsets, memory.data)
    assert memory.tobytes() == b"".join(DATA[at : at + 10] for at in offsets)
    for nbytes in (1, 1000, 1 << 20):
        blocks = [bytes(block) for block in source.blocks(7, 2500, nbytes)]
        assert b"".join(blocks) == DATA[7:2507]
        assert {len(block) for block in blocks[:-1]} <= {nbytes}
    assert list(source.blocks(7, 0)) == []
    with pytest.raises(FormatError):
        source.read_into([0, 1 << 20], memory.data[:20])
    with pytest.raises(FormatError):
        next(iter(source.blocks(7, 1 << 62)))


def test_blocks_of_a_file_are_the_same_memory(path: Path) -> None:
    places = {
        np.frombuffer(block, "u1").ctypes.data for block in open_source(path).blocks(0, 50, 9)
    }
    assert len(places) == 1


def test_a_tilde_is_a_home_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert local_path("~/m.zt") == str(tmp_path / "home" / "m.zt")
    assert local_path("~no one at all.zt") == str(tmp_path / "~no one at all.zt")
    assert local_path("x/~/m.zt") == str(tmp_path / "x" / "~" / "m.zt")
    assert local_path((tmp_path / "~").as_uri()) == str(tmp_path / "~")
    pwd = pytest.importorskip("pwd")
    user = pwd.getpwuid(os.getuid())
    assert local_path(f"~{user.pw_name}/m.zt") == str(Path(user.pw_dir, "m.zt"))


@pytest.mark.parametrize("location", ["a\0b", "file:///a%00b", "~\0/m.zt"])
def test_a_null_character_is_an_error(location: str) -> None:
    for use in (open_source, local_path):
        with pytest.raises(ValueError, match=r"the path '.*0.*' has a null character"):
            use(location)
