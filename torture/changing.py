"""Files that change while they are read: they are cut, replaced, overwritten, removed or damaged.

A file of three tensors (raw, with digests, compressed) is read, converted, described or compared,
and changed at a random read. Either all values are the values at the time of opening, or an error
names the file. Cached files are damaged, swapped or cut at any time: no result may change.

A process with open Datasets forks while its threads read them: the child must read the same values
without blocking. A worker of a cluster is killed during a computation, which must continue.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import xarray as xr

import xckpt
from tests import test_cut_short as uses
from torture.lying import LyingServer
from torture.trial import Tally
from xckpt.errors import CheckpointError, CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torture.trial import Trial

    Change = Callable[[Path, Random], None]

_MOST_CASES = 100_000


def _cut(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def _replaced(path: Path, random: Random) -> None:
    other = path.with_name("next")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = random.randbytes(len(data) - len(data) // 2)
    other.write_bytes(data)
    other.replace(path)


def _written(path: Path, random: Random) -> None:
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(random.randrange(size))
        file.write(random.randbytes(random.choice([1, 100, size // 2])))


def _grown(path: Path, random: Random) -> None:
    with path.open("ab") as file:
        file.write(random.randbytes(1000))


def _removed(path: Path, _: Random) -> None:
    path.unlink()


def _a_folder(path: Path, _: Random) -> None:
    path.unlink()
    path.mkdir()


def _touched(path: Path, _: Random) -> None:
    os.utime(path, (0, 0))


_CHANGES: dict[str, Change] = {
    "cut short": _cut,
    "replaced by another file": _replaced,
    "overwritten in the middle": _written,
    "grown": _grown,
    "removed": _removed,
    "replaced by a folder": _a_folder,
    "given another modification time": _touched,
}


class _Hooked:
    """Counts reads of a file, and at one of them lets something happen."""

    def __init__(self, path: Path, change: Callable[[], None]) -> None:
        self.path, self.change = path, change
        self.left = 0
        self.inode = path.stat().st_ino
        self._preadv = os.preadv

    def __call__(self, fileno: int, buffers: Any, offset: int, *flags: int) -> int:
        if self.left and os.fstat(fileno).st_ino == self.inode:
            self.left -= 1
            if not self.left:
                self.change()
        return self._preadv(fileno, buffers, offset, *flags)


def run(trial: Trial) -> Iterator[Tally]:
    """Try each change by turns, then caches."""
    warnings.simplefilter("ignore", CheckpointWarning)
    warnings.simplefilter("ignore", RuntimeWarning)
    os.environ["XCKPT_CACHE_DIR"] = str(trial.folder / "cache")
    with dask.config.set(scheduler="sync"):
        if trial.only in _PROCESSES:
            yield _PROCESSES[trial.only](trial, trial.seconds)
            return
        whole = _prepared(trial.folder)
        for number, (what, change) in enumerate(_CHANGES.items()):
            if hasattr(os, "preadv"):
                left = max(1.0, trial.remaining * 0.6) / (len(_CHANGES) - number)
                yield _changed(trial, whole, what, change, left)
        if hasattr(os, "fork"):
            yield _forked(trial, max(1.0, trial.remaining / 4))
            yield _killed(trial, max(1.0, trial.remaining / 3))
        yield _damaged_statistics(trial)
        yield _damaged_headers(trial)


def _prepared(folder: Path) -> dict[str, tuple[Path, bytes]]:
    """Write a file of each kind, and read it in all ways: kernels are compiled by first uses."""
    whole = {}
    for kind in dict.fromkeys(kind for _, kind in uses.CASES):
        (folder / kind).mkdir()
        path = uses.write(folder / kind, kind)
        whole[kind] = path, path.read_bytes()
        shutil.copy(path, path.with_name("other" + path.suffix))
        for use in (use for use, of in uses.CASES if of == kind):
            use(path)
    return whole


def _changed(
    trial: Trial, whole: dict[str, tuple[Path, bytes]], what: str, change: Change, seconds: float
) -> Tally:
    random = trial.random("changing", what)
    start, cases, errors, failures = time.monotonic(), 0, 0, 0
    while cases < _MOST_CASES and time.monotonic() < start + seconds:
        use, kind = random.choice(uses.CASES)
        path, data = whole[kind]
        if path.is_dir():
            path.rmdir()
        path.write_bytes(data)
        moment, seed = random.choice([1, 2, 3, 4, 5, 8, 12, 20]), random.random()
        cases += 1
        try:
            changing = partial(change, path, Random(seed))  # noqa: S311
            errors += not _read_while(path, use, moment, changing)
        except Exception as error:  # noqa: BLE001  any is what is looked for
            failures += 1
            told = f"{use.__name__} {kind} {moment} {seed}".encode()
            trial.fail(f"changing {what}", {"case.txt": told, path.name: data}, error)
    said = f"{errors:,} errors that name the file, otherwise right values"
    return Tally(what, cases, failures, time.monotonic() - start, said)


def _read_while(
    path: Path, use: Callable[[Path], None], moment: int, change: Callable[[], None]
) -> bool:
    """Use a file that changes; return whether all values were right."""
    hooked = _Hooked(path, change)
    hooked.left = moment
    preadv = os.preadv
    os.preadv = hooked
    try:
        use(path)
    except (CheckpointError, OSError) as error:
        if str(path) not in str(error):
            raise AssertionError(f"the file is not in: {error}") from error
        return False
    finally:
        os.preadv = preadv
    return True


# --- processes ------------------------------------------------------------------------------------

# Of a child or of a computation, until it is said to hang. In seconds.
_PATIENCE = 60
_READERS = 4


def _forked(trial: Trial, seconds: float) -> Tally:
    """Fork while threads read; each child reads what is open, and opens it again."""
    folder, stopped = trial.folder / "forked", threading.Event()
    folder.mkdir()
    paths = []
    for kind in ("raw", "digest", "zstd"):
        (folder / kind).mkdir()
        paths.append(uses.write(folder / kind, kind))
    opened = [xr.open_dataset(path, verify=True) for path in paths]
    lazies = [
        (str(name), each.data.dask.lazy) for ds in opened for name, each in ds.variables.items()
    ]

    def read() -> None:
        # Not by graphs: Python 3.11 has locks of its own in them, which a fork copies.
        while not stopped.is_set():
            for name, lazy in lazies:
                _check_rows(lazy[3:9, :], uses.VALUES[name][3:9])

    start, cases, failures = time.monotonic(), 0, 0
    with ThreadPoolExecutor(_READERS) as pool:
        readers = [pool.submit(read) for _ in range(_READERS)]
        try:
            while not cases or time.monotonic() < start + seconds:
                cases += 1
                if told := _told_by_a_fork(lambda: _read_all(opened, paths)):
                    failures += 1
                    trial.fail("forked", {"case.txt": b"forked"}, told)
        finally:
            stopped.set()
        for reader in readers:
            reader.result()
    for ds in opened:
        ds.close()
    said = f"{_READERS} threads read meanwhile; all children read the same values"
    return Tally("forked", cases, failures, time.monotonic() - start, said)


def _read_all(opened: list[xr.Dataset], paths: list[Path]) -> None:
    for ds in (*opened, *map(xr.open_dataset, paths)):
        for name, variable in ds.variables.items():
            _check_rows(variable.values, uses.VALUES[str(name)])


def _check_rows(found: Any, wanted: Any) -> None:
    if found.tobytes() != wanted.tobytes():
        raise AssertionError("wrong values")


def _told_by_a_fork(work: Callable[[], None]) -> str:
    """Work in a child; return what went wrong there."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that a fork does not have
        child = os.fork()
    if child == 0:
        signal.alarm(_PATIENCE)
        told = ""
        try:
            work()
        except BaseException:  # noqa: BLE001  nobody else is there
            told = traceback.format_exc()
        os.write(writer, told.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as file:
        told = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return told if code == 0 else f"the child hangs, or was ended: {code}"


def slow_sum(block: Any) -> Any:
    """Return the sum of a block, after a while in which a worker may die."""
    time.sleep(0.02)
    return block.sum(keepdims=True, dtype="f8")


def _slow_total(array: Any) -> Any:
    chunks = tuple([(1,) * len(sizes) for sizes in array.chunks])
    return array.map_blocks(slow_sum, chunks=chunks, dtype="f8").sum()


def _killed(trial: Trial, seconds: float) -> Tally:
    """Kill a worker of a cluster at any moment of a computation."""
    distributed: Any = import_module("distributed")
    random, folder = trial.random("killed"), trial.folder / "killed"
    folder.mkdir()
    path = uses.write(folder, "digest")
    wanted = {name: array.sum(dtype="f8") for name, array in uses.VALUES.items()}
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "processes": True}
    with (
        dask.config.set({"distributed.worker.memory.terminate": False}),
        distributed.LocalCluster(dashboard_address=":0", silence_logs=50, **options) as cluster,
        distributed.Client(cluster) as client,
        dask.config.set({"array.chunk-size": "16KiB"}),
        xr.open_dataset(path, verify=True) as ds,
    ):
        start, cases, failures = time.monotonic(), 0, 0
        while not cases or time.monotonic() < start + seconds:
            cases += 1
            client.wait_for_workers(2, timeout=_PATIENCE)
            victim = random.choice(sorted(client.run(os.getpid).values()))
            futures = client.compute([_slow_total(ds.variables[name].data) for name in wanted])
            time.sleep(random.uniform(0, 0.5))
            os.kill(victim, signal.SIGKILL)
            try:
                distributed.wait(futures, timeout=_PATIENCE)
                np.testing.assert_allclose(client.gather(futures), [*wanted.values()], 1e-12)
            except Exception as error:  # noqa: BLE001
                failures += 1
                trial.fail("killed", {"case.txt": b"killed"}, error)
        took = time.monotonic() - start
    return Tally("workers killed", cases, failures, took, "all sums are right")


_PROCESSES = {"forked": _forked, "killed": _killed}


# --- caches ---------------------------------------------------------------------------------------


def _damage(folder: Path, random: Random) -> int:
    """Damage what is kept in a cache; return how many files there were."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in found:
        how, data = random.randrange(6), bytearray(path.read_bytes())
        if how == 0 or not data:
            path.write_bytes(b"")
        elif how == 1:
            path.write_bytes(data[: random.randrange(len(data))])
        elif how == 2:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            path.write_bytes(data)
        elif how == 3:
            path.write_bytes(random.choice(found).read_bytes())
        elif how == 4:
            path.write_bytes(random.randbytes(len(data)))
        else:
            path.unlink()
            path.mkdir()
    return len(found)


def _damaged_statistics(trial: Trial) -> Tally:
    random, folder = trial.random("statistics"), trial.folder / "kept"
    folder.mkdir()
    path = uses.write(folder, "digest")
    wanted = xckpt.stats(str(path), cache=False, progress=False)

    def check() -> None:
        xr.testing.assert_identical(wanted, xckpt.stats(str(path), progress=False))

    return _with_damage(trial, "cached statistics damaged", random, check)


def _damaged_headers(trial: Trial) -> Tally:
    random, path = trial.random("headers"), trial.folder / "kept" / "m.zt"
    data = path.read_bytes()
    with LyingServer(data, files={"/m.zt": data}) as server:
        url = f"{server.url}/m.zt"
        wanted = xckpt.read_index(url).tensors

        def check() -> None:
            if repr(xckpt.read_index(url).tensors) != repr(wanted):
                raise AssertionError("another index")

        return _with_damage(trial, "cached headers damaged", random, check)


def _with_damage(trial: Trial, what: str, random: Random, check: Callable[[], None]) -> Tally:
    cache, files = trial.folder / "cache", 0
    start, cases, failures = time.monotonic(), 0, 0
    stop = start + max(1.0, trial.remaining / 2)
    while cases < _MOST_CASES and time.monotonic() < stop:
        cases += 1
        try:
            check()
        except Exception as error:  # noqa: BLE001
            failures += 1
            trial.fail(what, {"case.txt": what.encode()}, error)
        for each in cache.rglob("*"):  # what was made a folder is one no longer
            if each.is_dir() and not any(each.iterdir()) and each.parent != cache:
                each.rmdir()
        files += _damage(cache, random)
    said = f"{files:,} files of the cache; results are the same"
    return Tally(what, cases, failures, time.monotonic() - start, said)


def again(path: Path) -> None:
    """Try again what a failure left."""
    from torture.trial import left

    files = left(path)
    case = files.pop("case.txt").decode()
    if case in _PROCESSES:  # what happens depends on what else runs
        from torture.trial import Trial

        with TemporaryDirectory() as scratch, dask.config.set(scheduler="sync"):
            trial = Trial(0, 60.0, Path(scratch), path.parent.parent, "torture.changing")
            if (tally := _PROCESSES[case](trial, 60.0)).failures:
                raise AssertionError(tally)
        return
    name, _, moment, seed = case.split()
    what = next(w for w in _CHANGES if path.name.startswith(f"changing-{w.replace(' ', '-')}-"))
    folder = path / "again"
    folder.mkdir(exist_ok=True)
    for label, data in files.items():
        target = folder / label
        for each in (target, target.with_name("other" + target.suffix)):
            each.write_bytes(data)
        change = partial(_CHANGES[what], target, Random(float(seed)))  # noqa: S311
        _read_while(target, getattr(uses, name), int(moment), change)
