"""Several writers at once, and readers while they write.

Readers load the whole checkpoint: either all of it is from one writer, or an error states that the
file changed. At the end, the file has every append that returned, and no leftovers remain.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import numpy as np
import xarray as xr

import xckpt
from torture.checkpoints import Broken, left_over, threads
from torture.trial import Tally, read_evidence
from xckpt.errors import CheckpointWarning, FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torture.trial import Trial

__all__ = ["again", "play", "run"]

_TENSORS = 6
# Pause between two saves of a writer, in seconds, so that readers can finish.
_PAUSE = 0.02
_GRACE = 45


class _Result(NamedTuple):
    """Result of a process: completed calls, calls to try again, and a traceback if it failed."""

    done: int
    refused: int
    broken: str = ""


def _dataset(value: float, suffix: str = "") -> xr.Dataset:
    arrays = {f"w{n}{suffix}": np.full((16, 40 + n), value, "f4") for n in range(_TENSORS)}
    return xr.Dataset(
        {
            name: ([f"{name}o", f"{name}i"], array, {"rank": n % 3})
            for n, (name, array) in enumerate(arrays.items())
        }
    )


class Scene(NamedTuple):
    """A way to write a checkpoint repeatedly from several processes.

    ``write(path, number, times)`` makes the `times`-th save of writer `number`.
    """

    name: str
    target: str
    engine: str
    write: Callable[[Path, int, int], Any]
    options: dict[str, Any]


def _saver(engine: str, **options: Any) -> Callable[[Path, int, int], Any]:
    def write(path: Path, number: int, _: int) -> None:
        xckpt.save(_dataset(float(number)), path, engine, overwrite=True, **options)

    return write


def _save_or_convert(path: Path, number: int, times: int) -> None:
    """Save as writer 1; convert the file in place as writer 2."""
    if number == 1:
        xckpt.save(_dataset(float(times % 7)), path, overwrite=True)
    else:
        compression = ("zstd", None)[times % 2]
        xckpt.convert(path, path, encoding={"*": {"compression": compression}}, overwrite=True)


def _append(path: Path, number: int, times: int) -> None:
    xckpt.append(_dataset(1.0, f".{number}.{times}"), path)


_SHARDS: dict[str, Any] = {"max_shard_size": 6000}
SCENES = (
    Scene("save zt", "m.zt", "ztensor", _saver("ztensor"), {}),
    Scene("save npz", "m.npz", "npz", _saver("npz"), {}),
    Scene(
        *("save safetensors with shards", "m.safetensors", "safetensors"),
        *(_saver("safetensors", **_SHARDS), _SHARDS),
    ),
    Scene("save metadata.json with shards", "m.metadata.json", "mlcp", _saver("mlcp"), {}),
    Scene("save and convert in place", "m.zt", "ztensor", _save_or_convert, {}),
    Scene("append", "m.zt", "ztensor", _append, {}),
)


def run(trial: Trial) -> Iterator[Tally]:
    """Run two writers and two readers in every scene, for an equal share of the time."""
    for scene in SCENES:
        if trial.only not in {"", scene.name}:
            continue
        start, failures = time.monotonic(), trial.failures
        seed = int(trial.random(scene.name).random() * 1e9)
        seconds = trial.seconds / len(SCENES)
        with TemporaryDirectory(dir=trial.folder) as folder:
            try:
                cases, summary = play(scene, Path(folder), seconds, seed)
            except Exception as error:  # noqa: BLE001  any is what is looked for
                cases, summary = 1, "see the failure"
                data = json.dumps([scene.name, seconds, seed]).encode()
                trial.fail(f"together {scene.name}", {"scene.json": data}, error)
        took = time.monotonic() - start
        yield Tally(scene.name, cases, trial.failures - failures, took, summary)


def again(path: Path) -> None:
    """Play the scene of a recorded failure again; the order of events is not reproducible."""
    name, seconds, seed = json.loads(read_evidence(path)["scene.json"])
    (scene,) = (candidate for candidate in SCENES if candidate.name == name)
    with TemporaryDirectory() as folder:
        play(scene, Path(folder), seconds, seed)


def play(scene: Scene, folder: Path, seconds: float, seed: int) -> tuple[int, str]:
    """Play a scene; return the number of saves and loads, and a summary."""
    with warnings.catch_warnings(), dask.config.set(scheduler="sync"):  # forks have no threads
        warnings.simplefilter("ignore", CheckpointWarning)
        return _play(scene, folder, seconds, seed)


def _play(scene: Scene, folder: Path, seconds: float, seed: int) -> tuple[int, str]:
    path = folder / scene.target
    xckpt.save(_dataset(0.0), path, scene.engine, **scene.options)
    until = time.monotonic() + seconds
    writers = [_start_process(_write, scene, path, until, number) for number in (1, 2)]
    readers = [
        _start_process(_read, scene, _path_to_open(path), until, seed + number) for number in (1, 2)
    ]
    written, loaded = (
        [_result_of(result) for result in writers],
        [_result_of(result) for result in readers],
    )
    for result in (*written, *loaded):
        if result.broken:
            raise Broken(result.broken)
    if scene.write is _append:
        names = {
            f"w{n}.{number}.{times}"
            for number, result in zip((1, 2), written, strict=True)
            for times in range(result.done)
            for n in range(_TENSORS)
        }
        lost = names - set(xckpt.read_index(path).tensors)
        if lost:
            raise Broken(f"appends that returned are not in the file: {sorted(lost)[:9]}")
    _load(scene, _path_to_open(path))
    if leftovers := left_over(folder):
        raise Broken(f"nobody was killed, and {leftovers} is left over")
    saves, loads = sum(result.done for result in written), sum(result.done for result in loaded)
    refused = sum(result.refused for result in (*written, *loaded))
    summary = f"{saves} written, {loads} read whole, {refused} errors that the file changed"
    return saves + loads, summary


def _path_to_open(path: Path) -> Path:
    index = path.with_name(f"{path.name}.index.json")
    return index if index.exists() else path


def _write(scene: Scene, path: Path, until: float, number: int) -> _Result:
    done = refused = 0
    while time.monotonic() < until:
        try:
            scene.write(path, number, done)
        except (FileChangedError, BlockingIOError):
            refused += 1
        else:
            done += 1
        time.sleep(_PAUSE)
    return _Result(done, refused)


def _read(scene: Scene, path: Path, until: float, _: int) -> _Result:
    done = refused = 0
    while time.monotonic() < until:
        try:
            _load(scene, path)
        except FileChangedError:
            refused += 1
        else:
            done += 1
    return _Result(done, refused)


def _load(scene: Scene, path: Path) -> None:
    """Load a checkpoint, and check that all values are from one save."""
    with xr.open_dataset(path, engine=scene.engine) as ds:
        values = {
            float(v) for variable in ds.variables.values() for v in np.unique(variable.values)
        }
        count = len(ds.variables)
    if count % _TENSORS or (len(values) != 1 and scene.write is not _append):
        raise Broken(f"a mixture: {count} tensors of {sorted(values)}")


def _start_process(
    work: Callable[[Scene, Path, float, int], _Result],
    scene: Scene, path: Path, until: float, number: int,
) -> int:  # fmt: skip
    """Start a child process; return the descriptor of a pipe with its result."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return reader
    try:
        signal.alarm(int(until - time.monotonic()) + _GRACE)
        warnings.simplefilter("ignore", CheckpointWarning)
        with threads():
            result = work(scene, path, until, number)
    except BaseException:  # noqa: BLE001  nobody else is there
        result = _Result(0, 0, traceback.format_exc())
    with os.fdopen(writer, "w") as file:
        file.write(json.dumps(result))
    sys.stderr.flush()
    os._exit(0)


def _result_of(reader: int) -> _Result:
    with os.fdopen(reader) as file:
        text = file.read()
    os.wait()
    if not text:
        raise Broken("a process hangs, or was ended")
    return _Result(*json.loads(text))
