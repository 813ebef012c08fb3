"""Killed writers, full disks and clusters leave the old file or the new one."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr

from tests.writing.killed import kill_at_random_moments
from xckpt.storage.partial import PARTIAL_SUFFIX
from xckpt.storage.sink import Sink
from xckpt.writing import convert, save

ROUNDS = 50

WRITER = """
ds = xr.Dataset({
    "lazy": (("a", "b"), da.ones((512, 4096), chunks=(64, 1000)) * float(sys.argv[2])),
    "array": ("n", np.full(1 << 20, float(sys.argv[2]))),
})
while True:
    save(ds, sys.argv[1], overwrite=True, version="2", encoding={"array": {"digest": "sha256"}})
"""


def values(path: Path) -> set[float]:
    with xr.open_dataset(path, engine="ztensor", verify=True) as ds:
        return {float(v) for name in ds.variables for v in np.unique(ds[name].values)}


@pytest.mark.slow
def test_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    save(xr.Dataset({"w": ("n", np.zeros(3))}), target)
    states: set[float] = set()

    def check(number: int) -> None:
        reopened = values(target)
        assert len(reopened) == 1, f"a mixture of {reopened}"
        assert reopened <= {float(n) for n in range(number + 1)}
        states.update(reopened)
        leftovers = [path for path in tmp_path.iterdir() if path.name.endswith(PARTIAL_SUFFIX)]
        assert len(leftovers) <= 1, "the next writer removes what is left over"

    kill_at_random_moments(WRITER, target, rounds=ROUNDS, seconds=0.2, check=check, states=states)
    save(xr.Dataset({"w": ("n", np.zeros(3))}), target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.zt"]


def test_ctrl_c_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    target.write_bytes(b"old")

    def interrupt(done: int, _: int) -> None:
        if done > 1 << 20:
            raise KeyboardInterrupt

    ds = xr.Dataset(
        {"w": ("n", np.zeros(1 << 22)), "lazy": ("m", da.zeros(1 << 20, chunks=1 << 16))}
    )
    with pytest.raises(KeyboardInterrupt):
        save(ds, target, overwrite=True, progress=interrupt)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("kind", ["numpy", "dask", "columns", "compressed", "convert"])
def test_a_disk_that_is_full_leaves_the_old_file(kind: str, tmp_path: Path) -> None:
    """A limit to the size of files makes writes fail where the disk would."""
    target, source = tmp_path / "m.zt", tmp_path / "source.zt"
    noise = np.random.default_rng(0).random((512, 1024))
    save(xr.Dataset({"w": (("a", "b"), noise)}), source)
    target.write_bytes(b"old")
    lazy = da.from_array(noise, chunks=(512, 3) if kind == "columns" else 64)
    data = noise if kind == "numpy" else lazy
    encoding = {"*": {"compression": "zstd"}} if kind == "compressed" else {}

    def write() -> None:
        if kind == "convert":
            convert(source, target, overwrite=True)
        else:
            ds = xr.Dataset({"w": (("a", "b"), data)})
            save(ds, target, overwrite=True, encoding=encoding)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"File too large|No space") as caught:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert caught.value.filename == str(target)
    assert isinstance(caught.value.__cause__, OSError)
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.zt", "source.zt"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("kind", ["numpy", "dask", "delayed"])
def test_an_error_while_writing_names_the_file_as_the_user_does(
    kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    data = np.ones(4) if kind == "numpy" else da.ones(4, chunks=2)
    ds = xr.Dataset({"w": ("n", data)})
    later = save(ds, tmp_path / "m.zt", compute=False)
    write = later.compute if kind == "delayed" else lambda: save(ds, tmp_path / "m.zt")
    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        write()
    assert caught.value.errno == number
    assert caught.value.filename == str(tmp_path / "m.zt")
    assert ("free some space" in str(caught.value)) == (number == errno.ENOSPC)


@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_a_damaged_temporary_file_is_an_error_with_the_path(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed tensors are computed into a separate file first."""

    def touched(sink: Sink) -> Sink:
        spool = another(sink)
        if damage == "gone":
            Path(spool.path).unlink()
        monkeypatch.setattr(Sink, "resize", lambda *_: None)  # the file keeps its size
        return spool

    another = Sink.another
    monkeypatch.setattr(Sink, "another", touched)
    ds = xr.Dataset({"w": ("n", da.zeros(4096, chunks=1024))})
    if damage == "cut short":
        monkeypatch.setattr("xckpt.writing.computed.write_at", lambda *_: None)
    with pytest.raises(OSError, match=r"m\.zt'?$") as caught:
        save(ds, tmp_path / "m.zt", encoding={"*": {"compression": "zstd"}})
    assert PARTIAL_SUFFIX not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


FILLER = """
import sys
from pathlib import Path
import numpy as np, dask.array as da, xarray as xr
from xckpt.writing import append, convert, save

folder = Path(sys.argv[1])
target = folder / "m.zt"
save(xr.Dataset({"w": ("n", np.zeros(1000))}), target)
before = target.read_bytes()
noise = np.random.default_rng(0).random((1024, 1024))

def attempts():
    for data in (noise, da.from_array(noise, chunks=(1024, 2)), da.from_array(noise)):
        ds = xr.Dataset({"v": (("a", "b"), data)})
        for compression in (None, "zstd"):
            encoding = {"*": {"compression": compression}}
            yield lambda: save(ds, target, overwrite=True, encoding=encoding)
            yield lambda: append(ds, target, encoding=encoding)
    for encoding in ({}, {"*": {"compression": "zstd"}}):
        yield lambda: convert(sys.argv[2], target, overwrite=True, encoding=encoding)

for count, attempt in enumerate(attempts(), 1):
    try:
        attempt()
    except OSError as error:
        assert "No space left on device" in str(error), error
        assert error.filename == str(target), error
    else:
        raise AssertionError("8 MiB found space in 4")
    assert target.read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["m.zt"]
print(count, "intact")
"""

# A file system for the processes that it starts, gone with them; needs no superuser
# where namespaces of users are allowed.
MOUNT = 'mount -t tmpfs -o size=4m tmpfs "$1" && shift && exec "$@"'


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such namespaces")
def test_a_full_file_system(tmp_path: Path) -> None:
    source = tmp_path / "source.zt"
    save(xr.Dataset({"w": ("n", np.random.default_rng(0).random(1 << 20))}), source)
    folder = tmp_path / "small"
    folder.mkdir()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mounted = ["unshare", *user, "--mount", "sh", "-c", MOUNT, "sh", str(folder)]
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)  # noqa: S603  our own
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted: {error}")
    filler = [*mounted, sys.executable, "-c", FILLER, str(folder), str(source)]
    done = subprocess.run(filler, check=False, capture_output=True, text=True)  # noqa: S603
    assert done.stdout == "14 intact\n", done.stderr


@pytest.mark.slow
def test_workers_of_a_cluster_write(tmp_path: Path) -> None:
    distributed: Any = pytest.importorskip("distributed")
    noise = np.random.default_rng(0).random((300, 200))
    options: dict[str, Any] = {
        "version": "2",
        "encoding": {"packed": {"compression": "zstd-seekable"}},
    }

    def writer(block: np.ndarray) -> np.ndarray:
        assert os.getpid() != client_pid
        return block

    client_pid = os.getpid()
    lazy = da.from_array(noise, chunks=(70, 90)).map_blocks(
        writer, dtype="f8", meta=np.empty((0, 0))
    )
    ds = xr.Dataset({"w": (("a", "b"), lazy), "packed": (("a", "b"), lazy), "v": ("n", noise[0])})
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", processes=True
        ) as cluster,
        distributed.Client(cluster),
    ):
        save(ds, tmp_path / "m.zt", **options)
        later = save(ds, tmp_path / "later.zt", compute=False, **options)
        later.compute()
        del later
        failing = lazy.map_blocks(_fail, dtype="f8", meta=np.empty((0, 0)))
        with pytest.raises(RuntimeError, match="no such luck"):
            save(ds.assign(w=(("a", "b"), failing)), tmp_path / "failed.zt", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later.zt", "m.zt"]
    for name in ("m.zt", "later.zt"):
        reopened = xr.open_dataset(tmp_path / name, engine="ztensor", verify=True)
        assert np.array_equal(reopened["w"].values, noise)
        assert np.array_equal(reopened["packed"].values, noise)
        assert np.array_equal(reopened["v"].values, noise[0])


def _fail(_: np.ndarray) -> np.ndarray:
    raise RuntimeError("no such luck")
