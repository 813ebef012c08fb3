"""Files that change while they are read: they are cut, replaced, overwritten, removed or damaged.

A file of three tensors (raw, with digests, compressed) is read, converted, described or compared,
and changed at a random read. Either all values are the values at the time of opening, or an error
names the file. Cached files are damaged, swapped or cut at any time: no result may change.

A process with open Datasets forks while its threads read them: the child must read the same values
without blocking. A worker of a cluster is killed during a computation, which must continue.

On Python 3.11 a fork while other threads compute, instead of reading, can hang in the child. Use
`multiprocessing.set_start_method("spawn")` there.
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


def _truncate(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def _replace(path: Path, random: Random) -> None:
    successor = path.with_name("next")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = random.randbytes(len(data) - len(data) // 2)
    successor.write_bytes(data)
    successor.replace(path)


def _overwrite(path: Path, random: Random) -> None:
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(random.randrange(size))
        file.write(random.randbytes(random.choice([1, 100, size // 2])))


def _grow(path: Path, random: Random) -> None:
    with path.open("ab") as file:
        file.write(random.randbytes(1000))


def _remove(path: Path, _: Random) -> None:
    path.unlink()


def _replace_with_folder(path: Path, _: Random) -> None:
    path.unlink()
    path.mkdir()


def _touch(path: Path, _: Random) -> None:
    os.utime(path, (0, 0))


_CHANGES: dict[str, Change] = {
    "cut short": _truncate,
    "replaced by another file": _replace,
    "overwritten in the middle": _overwrite,
    "grown": _grow,
    "removed": _remove,
    "replaced by a folder": _replace_with_folder,
    "given another modification time": _touch,
}


class _Hooked:
    """Replacement of `os.preadv` that counts reads of a file and changes it at one of them."""

    def __init__(self, path: Path, change: Callable[[], None]) -> None:
        self.path, self.change = path, change
        self.reads_left = 0
        self.inode = path.stat().st_ino
        self._preadv = os.preadv

    def __call__(self, fileno: int, buffers: Any, offset: int, *flags: int) -> int:
        if self.reads_left and os.fstat(fileno).st_ino == self.inode:
            self.reads_left -= 1
            if not self.reads_left:
                self.change()
        return self._preadv(fileno, buffers, offset, *flags)


def run(trial: Trial) -> Iterator[Tally]:
    """Try each change of a file, then forks, killed workers and damaged caches."""
    warnings.simplefilter("ignore", CheckpointWarning)
    warnings.simplefilter("ignore", RuntimeWarning)
    os.environ["XCKPT_CACHE_DIR"] = str(trial.folder / "cache")
    with dask.config.set(scheduler="sync"):
        if trial.only in _PROCESSES:
            yield _PROCESSES[trial.only](trial, trial.seconds)
            return
        originals = _prepare(trial.folder)
        for number, (title, change) in enumerate(_CHANGES.items()):
            if hasattr(os, "preadv"):
                seconds = max(1.0, trial.remaining * 0.6) / (len(_CHANGES) - number)
                yield _try_change(trial, originals, title, change, seconds)
        if hasattr(os, "fork"):
            yield _try_forks(trial, max(1.0, trial.remaining / 4))
            yield _kill_workers(trial, max(1.0, trial.remaining / 3))
        yield _try_cached_statistics(trial)
        yield _try_cached_headers(trial)


def _prepare(folder: Path) -> dict[str, tuple[Path, bytes]]:
    """Write a file of each kind, and read it in all ways once, which compiles the kernels."""
    originals = {}
    for kind in dict.fromkeys(kind for _, kind in uses.CASES):
        (folder / kind).mkdir()
        path = uses.write(folder / kind, kind)
        originals[kind] = path, path.read_bytes()
        shutil.copy(path, path.with_name("other" + path.suffix))
        for use in (use for use, use_kind in uses.CASES if use_kind == kind):
            use(path)
    return originals


def _try_change(
    trial: Trial,
    originals: dict[str, tuple[Path, bytes]],
    title: str,
    change: Change,
    seconds: float,
) -> Tally:
    random = trial.random("changing", title)
    start, cases, errors, failures = time.monotonic(), 0, 0, 0
    while cases < _MOST_CASES and time.monotonic() < start + seconds:
        use, kind = random.choice(uses.CASES)
        path, data = originals[kind]
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
            case = f"{use.__name__} {kind} {moment} {seed}".encode()
            trial.fail(f"changing {title}", {"case.txt": case, path.name: data}, error)
    summary = f"{errors:,} errors that name the file, otherwise right values"
    return Tally(title, cases, failures, time.monotonic() - start, summary)


def _read_while(
    path: Path, use: Callable[[Path], None], moment: int, change: Callable[[], None]
) -> bool:
    """Use a file that changes; return False if that raised an error that names the file."""
    hooked = _Hooked(path, change)
    hooked.reads_left = moment
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

# Time limit of a child or a computation, in seconds.
_PATIENCE = 60
_READERS = 4


def _try_forks(trial: Trial, seconds: float) -> Tally:
    """Fork while threads read; each child reads the open Datasets, and opens the files again."""
    folder, stopped = trial.folder / "forked", threading.Event()
    folder.mkdir()
    paths = []
    for kind in ("raw", "digest", "zstd"):
        (folder / kind).mkdir()
        paths.append(uses.write(folder / kind, kind))
    opened = [xr.open_dataset(path, verify=True) for path in paths]
    lazies = [
        (str(name), variable.data.dask.lazy)
        for ds in opened
        for name, variable in ds.variables.items()
    ]

    def read() -> None:
        # Not through dask: graphs have locks in Python 3.11, which a fork may copy while held.
        while not stopped.is_set():
            for name, lazy in lazies:
                _check_rows(lazy[3:9, :], uses.VALUES[name][3:9])

    start, cases, failures = time.monotonic(), 0, 0
    with ThreadPoolExecutor(_READERS) as pool:
        readers = [pool.submit(read) for _ in range(_READERS)]
        try:
            while not cases or time.monotonic() < start + seconds:
                cases += 1
                if errors := _errors_in_fork(lambda: _read_all(opened, paths)):
                    failures += 1
                    trial.fail("forked", {"case.txt": b"forked"}, errors)
        finally:
            stopped.set()
        for reader in readers:
            reader.result()
    for ds in opened:
        ds.close()
    summary = f"{_READERS} threads read meanwhile; all children read the same values"
    return Tally("forked", cases, failures, time.monotonic() - start, summary)


def _read_all(opened: list[xr.Dataset], paths: list[Path]) -> None:
    for ds in (*opened, *map(xr.open_dataset, paths)):
        for name, variable in ds.variables.items():
            _check_rows(variable.values, uses.VALUES[str(name)])


def _check_rows(actual: Any, expected: Any) -> None:
    if actual.tobytes() != expected.tobytes():
        raise AssertionError("wrong values")


def _errors_in_fork(work: Callable[[], None]) -> str:
    """Call a function in a forked child; return the traceback of its error, or an empty text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "multi-threaded, fork may deadlock"
        child = os.fork()
    if child == 0:
        signal.alarm(_PATIENCE)
        errors = ""
        try:
            work()
        except BaseException:  # noqa: BLE001  nobody else is there
            errors = traceback.format_exc()
        os.write(writer, errors.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as file:
        errors = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return errors if code == 0 else f"the child hangs, or was ended: {code}"


def slow_sum(block: Any) -> Any:
    """Return the sum of a block after a delay, during which the worker may be killed."""
    time.sleep(0.02)
    return block.sum(keepdims=True, dtype="f8")


def _slow_total(array: Any) -> Any:
    chunks = tuple([(1,) * len(sizes) for sizes in array.chunks])
    return array.map_blocks(slow_sum, chunks=chunks, dtype="f8").sum()


def _kill_workers(trial: Trial, seconds: float) -> Tally:
    """Kill a worker of a cluster at any moment of a computation."""
    distributed: Any = import_module("distributed")
    random, folder = trial.random("killed"), trial.folder / "killed"
    folder.mkdir()
    path = uses.write(folder, "digest")
    expected = {name: array.sum(dtype="f8") for name, array in uses.VALUES.items()}
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
            futures = client.compute([_slow_total(ds.variables[name].data) for name in expected])
            time.sleep(random.uniform(0, 0.5))
            os.kill(victim, signal.SIGKILL)
            try:
                distributed.wait(futures, timeout=_PATIENCE)
                np.testing.assert_allclose(client.gather(futures), [*expected.values()], 1e-12)
            except Exception as error:  # noqa: BLE001
                failures += 1
                trial.fail("killed", {"case.txt": b"killed"}, error)
        took = time.monotonic() - start
    return Tally("workers killed", cases, failures, took, "all sums are right")


_PROCESSES = {"forked": _try_forks, "killed": _kill_workers}


# --- caches ---------------------------------------------------------------------------------------


def _damage(folder: Path, random: Random) -> int:
    """Damage or remove every file of a cache; return the number of files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        kind, data = random.randrange(6), bytearray(path.read_bytes())
        if kind == 0 or not data:
            path.write_bytes(b"")
        elif kind == 1:
            path.write_bytes(data[: random.randrange(len(data))])
        elif kind == 2:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            path.write_bytes(data)
        elif kind == 3:
            path.write_bytes(random.choice(paths).read_bytes())
        elif kind == 4:
            path.write_bytes(random.randbytes(len(data)))
        else:
            path.unlink()
            path.mkdir()
    return len(paths)


def _try_cached_statistics(trial: Trial) -> Tally:
    random, folder = trial.random("statistics"), trial.folder / "kept"
    folder.mkdir()
    path = uses.write(folder, "digest")
    expected = xckpt.stats(str(path), cache=False, progress=False)

    def check() -> None:
        xr.testing.assert_identical(expected, xckpt.stats(str(path), progress=False))

    return _try_with_damage(trial, "cached statistics damaged", random, check)


def _try_cached_headers(trial: Trial) -> Tally:
    random, path = trial.random("headers"), trial.folder / "kept" / "m.zt"
    data = path.read_bytes()
    with LyingServer(data, files={"/m.zt": data}) as server:
        url = f"{server.url}/m.zt"
        expected = xckpt.read_index(url).tensors

        def check() -> None:
            if repr(xckpt.read_index(url).tensors) != repr(expected):
                raise AssertionError("another index")

        return _try_with_damage(trial, "cached headers damaged", random, check)


def _try_with_damage(trial: Trial, title: str, random: Random, check: Callable[[], None]) -> Tally:
    cache, files = trial.folder / "cache", 0
    start, cases, failures = time.monotonic(), 0, 0
    stop = start + max(1.0, trial.remaining / 2)
    while cases < _MOST_CASES and time.monotonic() < stop:
        cases += 1
        try:
            check()
        except Exception as error:  # noqa: BLE001
            failures += 1
            trial.fail(title, {"case.txt": title.encode()}, error)
        for path in cache.rglob("*"):  # folders that `_damage` made
            if path.is_dir() and not any(path.iterdir()) and path.parent != cache:
                path.rmdir()
        files += _damage(cache, random)
    summary = f"{files:,} files of the cache; results are the same"
    return Tally(title, cases, failures, time.monotonic() - start, summary)


def again(path: Path) -> None:
    """Repeat the case of a recorded failure."""
    from torture.trial import read_evidence

    files = read_evidence(path)
    case = files.pop("case.txt").decode()
    if case in _PROCESSES:  # the order of events is not reproducible
        from torture.trial import Trial

        with TemporaryDirectory() as scratch, dask.config.set(scheduler="sync"):
            trial = Trial(0, 60.0, Path(scratch), path.parent.parent, "torture.changing")
            if (tally := _PROCESSES[case](trial, 60.0)).failures:
                raise AssertionError(tally)
        return
    name, _, moment, seed = case.split()
    title = next(w for w in _CHANGES if path.name.startswith(f"changing-{w.replace(' ', '-')}-"))
    folder = path / "again"
    folder.mkdir(exist_ok=True)
    for label, data in files.items():
        target = folder / label
        for copy in (target, target.with_name("other" + target.suffix)):
            copy.write_bytes(data)
        change = partial(_CHANGES[title], target, Random(float(seed)))  # noqa: S311
        _read_while(target, getattr(uses, name), int(moment), change)
