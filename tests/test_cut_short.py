"""A file truncated by another program while it is read causes an error, never a crash."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.errors import CheckpointError, FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 512, 256
VALUES = {
    name: np.random.default_rng(number).random((ROWS, COLUMNS), np.float32) + 1
    for number, name in enumerate("abc")
}


def write(folder: Path, kind: str, repeat: int = 1) -> Path:
    """Write a checkpoint: raw, with digests, or compressed."""
    values = {name: np.tile(array, (repeat, 1)) for name, array in VALUES.items()}
    ds = xr.Dataset({name: ((f"{name}0", "x"), array) for name, array in values.items()})
    encoding = {"digest": {"digest": "crc32c"}, "zstd": {"compression": "zstd"}}.get(kind)
    path = folder / ("m.safetensors" if encoding is None else "m.zt")
    xckpt.save(ds, path, encoding=None if encoding is None else {"*": encoding})
    return path


def opened(path: Path) -> xr.Dataset:
    """Open a checkpoint by what it is."""
    engine = "ztensor" if path.suffix == ".zt" else "safetensors"
    ds: xr.Dataset = xr.open_dataset(path, engine=engine)
    return ds


def expected(array: xr.Variable, name: str) -> Any:
    """Give what a tensor must be, however often it is repeated."""
    return np.tile(VALUES[name], (array.shape[0] // ROWS, 1))


def compute(path: Path) -> None:
    """Read all values at once."""
    for name, array in opened(path).compute().variables.items():
        np.testing.assert_array_equal(array.values, expected(array, str(name)))


def values(path: Path) -> None:
    """Read the values of each tensor."""
    for name, array in opened(path).variables.items():
        np.testing.assert_array_equal(array.values, expected(array, str(name)))


def slices(path: Path) -> None:
    """Read rows and a column."""
    for name, array in opened(path).variables.items():
        values = expected(array, str(name))
        for row in range(0, array.shape[0], array.shape[0] // 16):
            np.testing.assert_array_equal(array[row].values, values[row])
        np.testing.assert_array_equal(array[:, 3].values, values[:, 3])


def total(path: Path) -> None:
    """Compute with values, lazily."""
    for name, array in opened(path).variables.items():
        exact = expected(array, str(name)).sum(dtype=np.float64)
        np.testing.assert_allclose(float(array.sum(dtype=np.float64)), exact, 1e-12)


def convert(path: Path) -> None:
    """Convert, with a new digest."""
    target = path.with_name("converted.zt")
    xckpt.convert(path, target, encoding={"*": {"digest": "xxh3"}}, overwrite=True)
    values(target)


def save(path: Path) -> None:
    """Save what was opened, with a new digest."""
    target = path.with_name("saved.zt")
    xckpt.save(opened(path), target, encoding={"*": {"digest": "xxh3"}}, overwrite=True)
    values(target)


def verify(path: Path) -> None:
    """Check digests and compressed streams."""
    report = xckpt.verify(path)
    if not report.ok:
        raise CheckpointError(repr(report))


def stats(path: Path) -> None:
    """Describe all values."""
    table = xckpt.stats(opened(path), cache=False, progress=False)
    if table.data_vars.keys() < VALUES.keys():  # it was cut before it was opened
        raise CheckpointError(f"{path}: tensors are left out, with a warning")
    for name, array in VALUES.items():
        mean = float(table[name].sel(statistic="mean"))
        np.testing.assert_allclose(mean, array.mean(dtype=np.float64), 1e-6)


def compare(path: Path) -> None:
    """Compare with an unchanged checkpoint."""
    second = path.with_name("other" + path.suffix)
    table = xckpt.compare(opened(path), opened(second), cache=False, progress=False)
    differences = [float(table[name].sel(statistic="max_abs")) for name in VALUES]
    if np.isnan(differences).any():  # it was cut before it was opened
        raise CheckpointError(f"{path}: tensors are not compared, with a warning")
    assert differences == [0, 0, 0]


CASES = [
    *((use, "raw") for use in (compute, values, slices, total, convert, save, stats, compare)),
    (verify, "digest"),
    *((use, "zstd") for use in (compute, slices, convert, verify, stats)),
]
IDS = [f"{use.__name__}-{kind}" for use, kind in CASES]


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="reads are counted at preadv")
@pytest.mark.parametrize(("use", "kind"), CASES, ids=IDS)
def test_the_file_is_cut_between_two_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], None], kind: str
) -> None:
    path = write(tmp_path, kind)
    shutil.copy(path, path.with_name("other" + path.suffix))
    data = path.read_bytes()
    preadv, count = os.preadv, [0]

    def cutting(fileno: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if os.path.samestat(os.fstat(fileno), path.stat()):
            count[0] -= 1
            if count[0] == 0:
                os.truncate(path, len(data) // 3)
        return preadv(fileno, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", cutting)
    errors = []
    for moment in (*range(1, 12), 20, 30, 60):
        path.write_bytes(data)
        count[0] = moment
        try:
            use(path)
        except (CheckpointError, OSError) as error:
            errors.append(str(error))
    assert errors
    assert all(str(path) in error for error in errors)


def test_the_error_names_file_tensor_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path, "raw")
    ds = opened(path)
    offset = ds["b"].encoding["offset"]
    os.truncate(path, offset + 5)
    for read in (lambda: ds["b"].values, lambda: ds["b"].sum().compute()):
        with pytest.raises(FileChangedError, match=rf"m\.safetensors: tensor 'b': byte {offset}: "):
            read()
    with pytest.raises(FileChangedError, match=r"m\.safetensors: tensor 'b': byte \d+: "):
        ds["b"][3].values  # noqa: B018


def test_files_are_mapped_only_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, "raw")
    plain, mapped = opened(path), xr.open_dataset(path, engine="safetensors", mmap=True)
    for ds, writeable in ((plain, True), (mapped, False)):
        (chunk,) = ds["a"].data.to_delayed().ravel()
        assert chunk.compute().flags.writeable is writeable
        assert ds["a"].values.flags.writeable


# What the operating system does to a process that looks at a memory map beyond the end of a file
# cannot be caught in that process. Moments are random: no trial may fail.
CHILD = """
import shutil, sys
from pathlib import Path
from tests import test_cut_short as cut

for line in sys.stdin:
    name, file = line.rstrip().split(" ", 1)
    path = Path(file)
    shutil.copy(path.with_name("whole"), path)
    print("reading", flush=True)
    try:
        getattr(cut, name)(path)
    except (cut.CheckpointError, OSError) as error:
        print("error" if file in str(error) else f"no file: {error!r}", flush=True)
    else:
        print("right", flush=True)
"""
TRIALS = 6


def test_a_cut_file_ends_no_process(tmp_path: Path) -> None:
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-W", "ignore", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    ) as process:
        stdin, answers = process.stdin, process.stdout
        assert stdin is not None
        assert answers is not None
        seconds = 0.0
        for kind in dict.fromkeys(kind for _, kind in CASES):
            (tmp_path / kind).mkdir()
            path = write(tmp_path / kind, kind, repeat=16)
            shutil.copy(path, path.with_name("other" + path.suffix))
            shutil.copy(path, path.with_name("whole"))
            for use in (use for use, case_kind in CASES if case_kind == kind):
                for trial in range(TRIALS):
                    stdin.write(f"{use.__name__} {path}\n")
                    stdin.flush()
                    assert answers.readline() == "reading\n", process.wait()
                    start = time.perf_counter()
                    if trial > 1:  # the first one imports and compiles, the second one is timed
                        time.sleep(random.uniform(0, seconds))  # noqa: S311
                        os.truncate(path, path.stat().st_size // 2)
                    answer = answers.readline()
                    seconds = time.perf_counter() - start
                    assert answer in ({"right\n", "error\n"} if trial > 1 else {"right\n"}), use
        stdin.close()
        assert process.wait() == 0
