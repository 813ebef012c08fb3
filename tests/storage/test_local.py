from __future__ import annotations

import gc
import mmap
import os
import pickle
import subprocess
import sys
import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from xckpt.errors import FileChangedError, FormatError, UnsupportedError
from xckpt.storage import Source, is_mapped, local, open_source, release

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
def test_reads_and_views_are_the_bytes(source: Source, offset: int, nbytes: int) -> None:
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


def test_a_read_is_memory_of_its_own(source: Source, path: Path) -> None:
    got = source.read(10, 10)
    got[0] = 0
    assert path.read_bytes() == DATA
    assert not is_mapped(got)


def test_a_view_of_a_map_is_no_copy(path: Path) -> None:
    view = open_source(path).view(0, 1 << 20)
    assert view.readonly
    assert is_mapped(view)
    assert is_mapped(view[5:])
    array = np.frombuffer(view, "u4")
    assert is_mapped(array[3:].reshape(-1, 1).T)
    assert not is_mapped(array + 1)
    assert not is_mapped(open_source(path, mmap=False).view(0, 10))
    assert not is_mapped(b"")
    assert not is_mapped(None)


def test_ranges_of_a_map_are_views(path: Path) -> None:
    pieces = open_source(path).read_ranges([(500_000, 10), (0, 20)])
    assert [bytes(piece) for piece in pieces] == [DATA[500_000:500_010], DATA[:20]]
    assert all(map(is_mapped, pieces))


def test_what_is_missing_or_no_file(tmp_path: Path) -> None:
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
    sources = [open_source(each) for each in ("m.zt", "~/m.zt", "./x/../m.zt", path.as_uri())]
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
    other = path.with_suffix(".new")
    other.write_bytes(DATA[::-1])
    os.utime(other, ns=(time, time))
    other.replace(path)


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
    whole = local.Descriptor.read_into

    def read_while_it_changes(self: local.Descriptor, memory: memoryview, offset: int) -> int:
        rewrite(path, DATA[::-1])
        return whole(self, memory, offset)

    monkeypatch.setattr(local.Descriptor, "read_into", read_while_it_changes)
    with pytest.raises(FileChangedError, match="written"):
        source.read(0, 10)


def test_a_file_replaced_between_the_check_and_the_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(path)
    source.close()
    replace(path)
    monkeypatch.setattr(local.LocalSource, "_check_unchanged", lambda _: None)
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
    view = open_source(path).view(10, 20)
    assert view == DATA[10:30]
    assert not is_mapped(view)


def test_views_outlive_closing_and_eviction(path: Path, tmp_path: Path) -> None:
    source = open_source(path)
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
        source = open_source(folder / f"{number}.bin")
        assert source.read(0, 4) == source.view(0, 4) == number.to_bytes(4, "little")
        sources.append(source)
    return sources


def count_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc/self/fd to count")
def test_open_descriptors_are_bounded(tmp_path: Path) -> None:
    before = count_descriptors()
    sources = fill_the_pool(tmp_path)
    assert count_descriptors() <= before + local._pool.limit
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
    source = open_source(path, mmap=False)
    source.view(0, 100)
    pickled = pickle.dumps(source)
    assert len(pickled) < 400 + len(source.name)
    copy = pickle.loads(pickled)
    assert copy == source
    assert hash(copy) == hash(source)
    assert (copy.size, copy.identity, copy.mmap) == (source.size, source.identity, False)
    assert copy.read(0, 10) == DATA[:10]


def read_middle(source: Source) -> bytes:
    return bytes(source.read(1000, 100)) + bytes(source.view(5000, 100))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_another_process_reads_a_pickled_source(path: Path, method: str) -> None:
    if method == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    source = open_source(path)
    read_middle(source)
    with get_context(method).Pool(1) as workers:
        assert workers.apply(read_middle, (source,)) == DATA[1000:1100] + DATA[5000:5100]


def test_siblings(path: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b.zt").write_bytes(b"other")
    source = open_source(path, mmap=False)
    other = source.sibling("blobs/b.zt")
    assert bytes(other.view(0, 5)) == b"other"
    assert not is_mapped(other.view(0, 5))
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


RESIDENT = """
import sys
import numpy as np
from xckpt.storage import open_source, release

def mapped_kib():
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) for line in status if line.startswith("RssFile"))

view = open_source(sys.argv[1]).view(100, (64 << 20) - 200)
before = mapped_kib()
array = np.frombuffer(view, "u1")
total = int(array.sum())
used = mapped_kib()
release(array.reshape(2, -1).T)
after = mapped_kib()
assert int(array.sum()) == total
print(used - before, after - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to look at memory")
def test_release_drops_resident_pages(tmp_path: Path) -> None:
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20) * 64)
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-c", RESIDENT, str(path)], capture_output=True, text=True, check=True
    )
    used, after = map(int, run.stdout.split())
    assert used > 60 << 10
    assert after < 4 << 10


def test_release_of_what_is_not_mapped_does_nothing(path: Path) -> None:
    for view in (np.zeros(5), memoryview(b"123"), open_source(path).view(0, 0)):
        release(view)
    array = np.frombuffer(open_source(path).view(5, 10), "u1")
    release(array)
    release(array[:0])
    release(array[::-1])
    assert array.tobytes() == DATA[5:15]


def test_release_keeps_what_was_written_to_a_private_map(path: Path) -> None:
    array = np.memmap(path, mode="c")
    array[:] = 7
    release(array)
    assert (array == 7).all()
