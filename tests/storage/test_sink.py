"""New files are complete or absent despite other writers, with the metadata of ordinary files."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from xckpt.errors import CheckpointWarning, FileChangedError, UnsupportedError
from xckpt.storage.local import LocalSource
from xckpt.storage.partial import PARTIAL_SUFFIX, alone
from xckpt.storage.sink import Sink, publish
from xckpt.storage.uploads import UploadSink

pytestmark = pytest.mark.usefixtures("to_the_disk")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def written(target: Path, data: bytes, *, overwrite: bool = False) -> None:
    sink = Sink(target, overwrite=overwrite)
    sink.write(data, 0)
    sink.commit()


def test_nothing_is_there_before_commit(tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    sink = Sink(target)
    sink.resize(5)
    sink.write(b"ab", 3)
    assert not target.exists()
    sink.write(memoryview(b"xyz"), 0)
    sink.commit()
    assert target.read_bytes() == b"xyzab"
    assert names(tmp_path) == ["m.zt"]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="there is nothing to tell the disk by")
def test_the_disk_begins_before_the_last_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advices = []

    def advise(_: int, offset: int, nbytes: int, advice: int) -> None:
        advices.append((offset, nbytes, advice))
        raise OSError(errno.EINVAL, "this file system takes no advice")

    monkeypatch.setattr(os, "posix_fadvise", advise)
    data = os.urandom(3 << 20)
    sink = Sink(tmp_path / "m.zt")
    sink.write(b"few", len(data))
    sink.write(data, 0)
    assert advices == [(0, len(data), os.POSIX_FADV_DONTNEED)]
    sink.commit()
    assert (tmp_path / "m.zt").read_bytes() == data + b"few"


@pytest.mark.parametrize("overwrite", [True, False])
def test_abort_leaves_what_was_there(tmp_path: Path, *, overwrite: bool) -> None:
    target = tmp_path / "m.zt"
    if overwrite:
        target.write_bytes(b"old")
    sink = Sink(target, overwrite=overwrite)
    sink.write(b"new bytes", 0)
    sink.abort()
    sink.abort()
    assert names(tmp_path) == (["m.zt"] if overwrite else [])
    assert not overwrite or target.read_bytes() == b"old"


def test_a_garbage_collected_sink_removes_its_file(tmp_path: Path) -> None:
    Sink(tmp_path / "m.zt").write(b"new", 0)
    gc.collect()
    assert names(tmp_path) == []


def test_an_error_in_a_with_block_aborts(tmp_path: Path) -> None:
    def interrupted() -> None:
        with Sink(tmp_path / "m.zt") as sink:
            sink.write(b"new", 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


def test_an_existing_file_is_refused_at_the_start(tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    target.write_bytes(b"old")
    with pytest.raises(FileExistsError, match=r"overwrite=True.*m\.zt"):
        Sink(target)
    assert names(tmp_path) == ["m.zt"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_created_meanwhile_is_refused_at_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool
) -> None:
    if not links:

        def no_links(*_: object) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", no_links)
    target = tmp_path / "m.zt"
    sink = Sink(target)
    sink.write(b"new", 0)
    target.write_bytes(b"somebody else's")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sink.commit()
    assert target.read_bytes() == b"somebody else's"
    assert names(tmp_path) == ["m.zt"]
    target.unlink()
    written(target, b"new")
    assert target.read_bytes() == b"new"


def test_permissions_of_a_new_file_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        written(tmp_path / "m.zt", b"new")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "m.zt").stat().st_mode) == 0o640


def test_permissions_of_a_replaced_file_are_kept_also_while_writing(tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    target.write_bytes(b"old")
    target.chmod(0o600)
    sink = Sink(target, overwrite=True)
    assert stat.S_IMODE(Path(sink.path).stat().st_mode) == 0o600
    sink.commit()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_through_a_link_the_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "m.zt", tmp_path / "link.zt"
    target.write_bytes(b"old")
    link.symlink_to("real/m.zt")
    written(link, b"new", overwrite=True)
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["link.zt", "real"]


def test_only_files_can_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        Sink(tmp_path, overwrite=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsupportedError, match="regular file"):
        Sink(tmp_path / "pipe", overwrite=True)
    with pytest.raises(FileNotFoundError):
        Sink(tmp_path / "absent" / "m.zt")


def test_a_folder_that_is_missing_or_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "absent" / "m.zt"
    with pytest.raises(FileNotFoundError, match="make the folder first") as missing:
        Sink(absent)
    assert missing.value.filename == str(absent)
    assert PARTIAL_SUFFIX not in str(missing.value)
    link = tmp_path / "link.zt"
    link.symlink_to("absent/m.zt")
    with pytest.raises(FileNotFoundError) as missing:
        Sink(link)
    assert missing.value.filename == str(link)

    def read_only(*_: object) -> int:
        raise OSError(number, os.strerror(number), "a temporary name")

    for number in (errno.EACCES, errno.EROFS):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", read_only)
            with pytest.raises(OSError, match="save to another one") as refused:
                Sink(tmp_path / "m.zt")
        assert refused.value.errno == number
        assert refused.value.filename == str(tmp_path / "m.zt")
        assert isinstance(refused.value.__cause__, OSError)


def test_a_name_that_begins_like_a_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("~backup.zt"), b"new")
    assert names(tmp_path) == ["~backup.zt"]


def test_names_that_are_as_long_as_can_be(tmp_path: Path) -> None:
    target = tmp_path / ("ü" * 127)
    written(target, b"new")
    assert target.read_bytes() == b"new"


def test_leftovers_are_removed_and_files_in_use_are_not(tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    mine = Sink(target)
    leftover = tmp_path / f".m.zt.0badcafe{PARTIAL_SUFFIX}"
    unrelated = [f".m.zt.b.0badcafe{PARTIAL_SUFFIX}", f"m.zt.0badcafe{PARTIAL_SUFFIX}", ".m.zt.swp"]
    for name in (leftover.name, *unrelated):
        (tmp_path / name).write_bytes(b"partial")
    with Sink(target) as second:
        assert sorted(names(tmp_path)) == sorted(
            [Path(p.path).name for p in (mine, second)] + unrelated
        )
    mine.commit()
    assert names(tmp_path) == sorted(["m.zt", *unrelated])


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that others do not notice")
def test_a_file_that_another_writer_is_about_to_remove_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked for left-overs between the two calls that make and lock ours."""
    import fcntl

    open_, locked = os.open, dict[str, int]()

    def opened(path: Any, flags: int, mode: int = 0o777) -> int:
        fileno = open_(path, flags, mode)
        if str(path).endswith(PARTIAL_SUFFIX) and not locked:
            locked[str(path)] = open_(path, os.O_RDWR)
            fcntl.flock(locked[str(path)], fcntl.LOCK_EX)
        return fileno

    monkeypatch.setattr(os, "open", opened)
    with Sink(tmp_path / "m.zt") as sink:
        for path, fileno in locked.items():
            Path(path).unlink(missing_ok=True)
            os.close(fileno)
        sink.write(b"new", 0)
        sink.commit()
    assert (tmp_path / "m.zt").read_bytes() == b"new"
    assert names(tmp_path) == ["m.zt"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that others do not notice")
def test_a_leftover_link_is_removed_when_appending(tmp_path: Path) -> None:
    """The old writer was killed between `link` and `unlink`; the new one has locked the file."""
    import fcntl

    target = tmp_path / "m.zt"
    target.write_bytes(b"old")
    os.link(target, tmp_path / f".m.zt.0badcafe{PARTIAL_SUFFIX}")
    with target.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        written(target, b"longer", overwrite=True)
    assert names(tmp_path) == ["m.zt"]


FAILING: dict[str, tuple[str, bool]] = {
    "the temporary name stays": ("unlink", False),
    "the file was renamed, and the server says it was not": ("link", True),
    "the other one too": ("replace", True),
    "closing it fails": ("close", True),
}


@pytest.mark.parametrize(("call", "is_done"), FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("overwrite", [True, False])
def test_no_error_is_raised_when_the_new_file_is_there(
    call: str, is_done: bool, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, real = tmp_path / "m.zt", getattr(os, call)
    if overwrite:
        target.write_bytes(b"old")
    sink = Sink(target, overwrite=overwrite)
    sink.write(b"new", 0)

    def failing(*args: Any) -> None:
        if is_done:
            real(*args)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, failing)
    sink.commit()
    monkeypatch.undo()
    assert target.read_bytes() == b"new"
    written(target, b"newer", overwrite=True)
    assert names(tmp_path) == ["m.zt"]


def test_a_failed_check_for_an_existing_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Sink(tmp_path / "m.zt") as sink:
        assert not sink.is_taken()
        monkeypatch.setattr(os, "lstat", failing)
        monkeypatch.setattr(Path, "lstat", failing)
        with pytest.raises(OSError, match=r"m\.zt"):
            sink.is_taken()


def test_ctrl_c_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    target = str(tmp_path / "m.zt")
    locked = alone(target)
    locked.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            locked.__exit__(None, None, None)
    assert _is_free(Path(target))


def test_a_killed_writer_leaves_a_file_that_the_next_one_removes(tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    target.write_bytes(b"old")
    code = (
        "import sys, time; from xckpt.storage.sink import Sink\n"
        "sink = Sink(sys.argv[1], overwrite=True); sink.write(b'new', 0)\n"
        "print('written', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:  # noqa: S603  our own code
        assert writer.stdout is not None
        writer.stdout.readline()
        with Sink(target, overwrite=True):
            assert len(names(tmp_path)) == 3
        writer.send_signal(signal.SIGKILL)
    assert len(names(tmp_path)) == 2
    assert target.read_bytes() == b"old"
    written(target, b"new", overwrite=True)
    assert names(tmp_path) == ["m.zt"]


def test_a_forked_child_does_not_remove_the_file(tmp_path: Path) -> None:
    sink = Sink(tmp_path / "m.zt")
    sink.write(b"new", 0)
    child = multiprocessing.get_context("fork").Process(target=sink.abort)
    child.start()
    child.join()
    sink.commit()
    assert (tmp_path / "m.zt").read_bytes() == b"new"


def test_a_pickled_sink_writes_to_the_same_file_and_does_not_own_it(tmp_path: Path) -> None:
    sink = Sink(tmp_path / "m.zt")
    sink.resize(6)
    copy = pickle.loads(pickle.dumps(sink))
    copy.write(b"def", 3)
    copy.abort()
    sink.write(b"abc", 0)
    sink.commit()
    assert (tmp_path / "m.zt").read_bytes() == b"abcdef"


def test_an_error_of_the_disk_names_the_target(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        sink = Sink(tmp_path / "m.zt")
        with pytest.raises(OSError, match=r"m\.zt") as caught:
            sink.write(bytes(2 << 20), 0)
        sink.abort()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert caught.value.errno == errno.EFBIG
    assert names(tmp_path) == []


def test_many_writers_at_once_each_leave_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    code = (
        "import sys; from xckpt.storage.sink import Sink\n"
        "for _ in range(50):\n"
        "    sink = Sink(sys.argv[1], overwrite=True)\n"
        "    sink.write(sys.argv[2].encode() * 100_000, 0); sink.commit()\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, target, letter])  # noqa: S603  our own code
        for letter in "ab"
    ]
    deadline = time.monotonic() + 60
    while any(writer.poll() is None for writer in writers) and time.monotonic() < deadline:
        if target.exists():
            assert len(set(target.read_bytes())) == 1
    assert [writer.wait() for writer in writers] == [0, 0]
    assert names(tmp_path) == ["m.zt"]


def test_a_folder_that_is_not_synced_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is complete; an error would mean the opposite."""
    fsync, folders = os.fsync, list[int]()

    def failing(fileno: int) -> None:
        if stat.S_ISDIR(os.fstat(fileno).st_mode):
            folders.append(fileno)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fileno)

    monkeypatch.setattr(os, "fsync", failing)
    target = tmp_path / "m.zt"
    for data in (b"new", b"newer"):
        message = r"m\.zt: the new file is complete and in place.*Input/output.*power failure"
        with pytest.warns(CheckpointWarning, match=message):
            written(target, data, overwrite=data == b"newer")
        assert target.read_bytes() == data
    assert len(folders) == 2, "once for each file"
    assert names(tmp_path) == ["m.zt"]
    assert _is_free(target)


def _is_free(target: Path) -> bool:
    with alone(str(target)):
        return True


LOCKING = """
import sys, time
from xckpt.storage.partial import alone
with alone(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that others do not notice")
def test_names_change_one_after_another_and_a_killed_writer_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m.zt"
    command = [sys.executable, "-c", LOCKING, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:  # noqa: S603  our own code
        assert writer.stdout is not None
        writer.stdout.readline()
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: 1000 * clock())
        with pytest.raises(BlockingIOError, match=r"another process.* for 60 seconds") as caught:
            written(target, b"new")
        assert caught.value.filename == str(target)
        written(tmp_path / "other.zt", b"new")
        monkeypatch.undo()
        threading.Timer(0.2, writer.kill).start()
        written(target, b"new")
    assert names(tmp_path) == ["m.zt", "other.zt"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that others do not notice")
def test_a_waiting_writer_does_not_use_a_removed_lock(tmp_path: Path) -> None:
    target, inside = tmp_path / "m.zt", [0]
    most: list[int] = []

    def enter() -> None:
        for _ in range(50):
            with alone(str(target)):
                inside[0] += 1
                most.append(inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(most), max(most)) == (200, 1)
    assert names(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that others do not notice")
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    written(tmp_path / "m.zt", b"new")
    assert names(tmp_path) == ["m.zt"]


def test_a_file_that_another_writer_replaced_stays(tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    target.write_bytes(b"old")
    for replacement in (b"other", b"dlo"):
        source = LocalSource(str(target))
        with Sink(target, overwrite=True) as sink:
            sink.write(b"new", 0)
            written(target, replacement, overwrite=True)
            with pytest.raises(FileChangedError, match=r"m\.zt"):
                publish(sink, replaced=[source])
        assert target.read_bytes() == replacement
    assert names(tmp_path) == ["m.zt"]


def test_an_upload_follows_no_link_and_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(b"old")
    victim.chmod(0o666)
    planted = ("upload-{}", "xckpt-upload", ".xckpt-upload.0badcafe.xckpt-partial")
    for name in planted:
        (tmp_path / "tmp" / name.format(os.getpid())).symlink_to(victim)
    tokens = iter(["0badcafe", "cafe0bad"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(tokens))
    with UploadSink("memory://uploads/m.zt") as sink:
        sink.write(b"new", 0)
        assert Path(sink.path).parent == tmp_path / "tmp"
        assert stat.S_IMODE(Path(sink.path).stat().st_mode) == 0o600
    assert victim.read_bytes() == b"old"
    assert names(tmp_path) == ["tmp", "victim"]
    assert len(names(tmp_path / "tmp")) == len(planted), "what was planted, and nothing else"


class OfALibraryError(Exception):
    """An error that a file system of fsspec may raise."""


def test_an_upload_that_fails_leaves_nothing_and_names_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise error

    url = "memory://uploads/m.zt"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fsspec.filesystem("memory"), "put_file", refused)
    for error, kind in (
        (PermissionError("no"), PermissionError),
        (OfALibraryError("cut"), OSError),
        (RuntimeError("a bug"), RuntimeError),
    ):
        with UploadSink(url) as sink, pytest.raises(kind, match=str(error)) as caught:
            sink.commit()
        assert getattr(caught.value, "filename", url) == url
        assert error in {caught.value, caught.value.__cause__, _cause(caught.value.__cause__)}
    assert names(tmp_path) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="TMPDIR names another folder") as missing:
        UploadSink(url)
    assert missing.value.filename == url


def _cause(error: BaseException | None) -> BaseException | None:
    return None if error is None else error.__cause__


def test_upload() -> None:
    memory = fsspec.filesystem("memory")
    sink = UploadSink("memory://uploads/m.zt")
    sink.write(b"new", 0)
    assert not memory.exists("/uploads/m.zt")
    sink.commit()
    assert memory.cat("/uploads/m.zt") == b"new"
    assert not Path(sink.path).exists()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        UploadSink("memory://uploads/m.zt")
    with UploadSink("memory://uploads/m.zt", overwrite=True) as aborted:
        aborted.write(b"other", 0)
    assert memory.cat("/uploads/m.zt") == b"new"
    memory.rm("/uploads", recursive=True)
