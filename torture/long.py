"""Long runs: memory and descriptors do not grow, and 64 threads read the same values as one.

Files are opened, read and closed repeatedly; five hundred Datasets are open at once in a process
with a limit of 256 descriptors; and 64 threads read slices and whole tensors while others open and
close the same files. Memory is measured for the process, after the first tenth of the run.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import xarray as xr

import xckpt
from torture.trial import Tally
from xckpt import formats
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torture.trial import Trial

_CYCLES, _DATASETS, _THREADS = 10_000, 500, 64
_DESCRIPTORS = 256
# Permitted growth of memory in bytes: allocators keep a part of the freed memory.
_MOST_GROWTH = 8 << 20

VALUES = {f"layers.{n}.w": np.arange(n, n + 600, dtype="f4").reshape(20, 30) for n in range(4)}


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def write(folder: Path) -> list[tuple[str, Path]]:
    """Write the same tensors in each format that has a writer; return engines and paths."""
    ds = xr.Dataset({name: (("out", "in"), array) for name, array in VALUES.items()})
    paths = []
    for name in formats.names():
        if formats.get(name).can.types:
            path = folder / f"m{formats.get(name).suffixes[0]}"
            if path.exists():
                path = path.with_name(f"{name}{path.suffix}")
            xckpt.save(ds, path, name, progress=False)
            paths.append((name, path))
    return paths


def _check(ds: xr.Dataset, name: str) -> None:
    if ds[name].values.tobytes() != VALUES[name].tobytes():
        raise AssertionError(f"wrong values of {name!r}")


def run(trial: Trial) -> Iterator[Tally]:
    """Run the three tests with a low limit of descriptors."""
    warnings.simplefilter("ignore", CheckpointWarning)
    files = write(trial.folder)
    if not Path("/proc/self/fd").exists():
        return
    _limit_descriptors()
    seconds = trial.seconds
    with dask.config.set(scheduler="sync"):
        yield _try_cycles(trial, files, 0.5 * seconds)
        yield _try_at_once(trial, files)
        yield _try_threads(trial, files, 0.4 * seconds)


def _limit_descriptors() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, hard))


def _try_cycles(trial: Trial, files: list[tuple[str, Path]], seconds: float) -> Tally:
    start, cases, failures = time.monotonic(), 0, trial.failures
    resident = descriptors = 0
    for number in range(_CYCLES):
        if time.monotonic() > start + seconds:
            break
        engine, path = files[number % len(files)]
        with xr.open_dataset(path, engine=engine) as ds:
            _check(ds, f"layers.{number % 4}.w")
        cases += 1
        # The first tenth fills caches.
        if not resident and (cases >= _CYCLES // 10 or time.monotonic() > start + seconds / 4):
            resident, descriptors = _resident(), _open_files()
    growth, opened = _resident() - resident, _open_files() - descriptors
    if growth > _MOST_GROWTH or opened > 0:
        problem = f"{growth} bytes and {opened} descriptors more after {cases} cycles"
        trial.fail("cycles", {"case.txt": b"cycles"}, problem)
    summary = f"{max(0, growth) / 1024:,.0f} KiB and {max(0, opened)} descriptors more at the end"
    broken, took = trial.failures - failures, time.monotonic() - start
    return Tally("open, read and close", cases, broken, took, summary)


def _try_at_once(trial: Trial, files: list[tuple[str, Path]]) -> Tally:
    start, failures = time.monotonic(), trial.failures
    before, opened_before = _resident(), _open_files()
    datasets = []
    for number in range(_DATASETS):
        engine, path = files[number % len(files)]
        copy = path.with_name(f"{number}-{path.name}")
        copy.write_bytes(path.read_bytes())
        datasets.append(xr.open_dataset(copy, engine=engine))
    for number, ds in enumerate(datasets):
        _check(ds, f"layers.{number % 4}.w")
    growth, opened = _resident() - before, _open_files() - opened_before
    for ds in datasets:
        ds.close()
    datasets.clear()
    remaining = _open_files() - opened_before
    if opened > _DESCRIPTORS // 4 + 8 or remaining > 0:
        problem = f"{opened} descriptors for {_DATASETS} Datasets, {remaining} of them left"
        trial.fail("at once", {"case.txt": b"at once"}, problem)
    each = f"{growth / _DATASETS / 1024:,.0f} KiB each"
    summary = f"{each}, {opened} descriptors in total, {remaining} left"
    broken, took = trial.failures - failures, time.monotonic() - start
    return Tally("Datasets open at once", _DATASETS, broken, took, summary)


def _try_threads(trial: Trial, files: list[tuple[str, Path]], seconds: float) -> Tally:
    start, failures = time.monotonic(), trial.failures
    stop = start + min(60.0, max(1.0, seconds))
    shared = [xr.open_dataset(path, engine=engine) for engine, path in files]
    counts, lock = [0], threading.Lock()

    def work(number: int) -> None:
        random: Any = trial.random("threads", number)
        while time.monotonic() < stop:
            position = random.randrange(len(files))
            name = random.choice([*VALUES])
            engine, path = files[position]
            if random.random() < 0.3:
                with xr.open_dataset(path, engine=engine) as ds:
                    _check(ds, name)
            else:
                row = random.randrange(20)
                row_values = shared[position][name][row].values
                if row_values.tobytes() != VALUES[name][row].tobytes():
                    raise AssertionError(f"wrong values of row {row} of {name!r}")
            with lock:
                counts[0] += 1

    with ThreadPoolExecutor(_THREADS) as pool:
        for future in [pool.submit(work, number) for number in range(_THREADS)]:
            try:
                future.result()
            except Exception as error:  # noqa: BLE001  any is what is looked for
                trial.fail("threads", {"case.txt": b"threads"}, error)
    broken, took = trial.failures - failures, time.monotonic() - start
    summary = f"{_THREADS} threads, all values right"
    return Tally("reads by threads", counts[0], broken, took, summary)


def again(path: Path) -> None:
    """Run all tests again for a minute, because the order of events is not reproducible."""
    from torture.trial import Trial

    with TemporaryDirectory() as folder:
        trial = Trial(0, 60.0, Path(folder), path.parent.parent, "torture.long")
        broken = [tally for tally in run(trial) if tally.failures]
    if broken:
        raise AssertionError(broken)
