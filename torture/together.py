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
from torture.trial import Tally, left
from xckpt.errors import CheckpointWarning, FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torture.trial import Trial

__all__ = ["again", "play", "run"]

_TENSORS = 6
# Between two saves of one writer: readers that never come to an end see nothing. In seconds.
_PAUSE = 0.02
_GRACE = 45


class _Done(NamedTuple):
    """What one process did: how often, how often it was told to try again, and what broke."""

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
    """What several processes write, and what is opened meanwhile.

    ``write(path, number, times)`` is one of the writers, the `times`-th time.
    """

    name: str
    target: str
    engine: str
    write: Callable[[Path, int, int], Any]
    options: dict[str, Any]


def _saving(engine: str, **options: Any) -> Callable[[Path, int, int], Any]:
    def write(path: Path, number: int, _: int) -> None:
        xckpt.save(_dataset(float(number)), path, engine, overwrite=True, **options)

    return write


def _in_place(path: Path, number: int, times: int) -> None:
    """Save, and convert what anybody saved."""
    if number == 1:
        xckpt.save(_dataset(float(times % 7)), path, overwrite=True)
    else:
        compression = ("zstd", None)[times % 2]
        xckpt.convert(path, path, encoding={"*": {"compression": compression}}, overwrite=True)


def _appending(path: Path, number: int, times: int) -> None:
    xckpt.append(_dataset(1.0, f".{number}.{times}"), path)


_SHARDS: dict[str, Any] = {"max_shard_size": 6000}
SCENES = (
    Scene("save zt", "m.zt", "ztensor", _saving("ztensor"), {}),
    Scene("save npz", "m.npz", "npz", _saving("npz"), {}),
    Scene(
        *("save safetensors with shards", "m.safetensors", "safetensors"),
        *(_saving("safetensors", **_SHARDS), _SHARDS),
    ),
    Scene("save metadata.json with shards", "m.metadata.json", "mlcp", _saving("mlcp"), {}),
    Scene("save and convert in place", "m.zt", "ztensor", _in_place, {}),
    Scene("append", "m.zt", "ztensor", _appending, {}),
)


def run(trial: Trial) -> Iterator[Tally]:
    """Let two write and two read in every scene, each for its share of the time."""
    for scene in SCENES:
        if trial.only not in {"", scene.name}:
            continue
        start, failures = time.monotonic(), trial.failures
        seed = int(trial.random(scene.name).random() * 1e9)
        seconds = trial.seconds / len(SCENES)
        with TemporaryDirectory(dir=trial.folder) as folder:
            try:
                cases, said = play(scene, Path(folder), seconds, seed)
            except Exception as error:  # noqa: BLE001  any is what is looked for
                cases, said = 1, "see the failure"
                data = json.dumps([scene.name, seconds, seed]).encode()
                trial.fail(f"together {scene.name}", {"scene.json": data}, error)
        took = time.monotonic() - start
        yield Tally(scene.name, cases, trial.failures - failures, took, said)


def again(path: Path) -> None:
    """Play the scene of a failure again; who comes first is not in the seed."""
    name, seconds, seed = json.loads(left(path)["scene.json"])
    (scene,) = (each for each in SCENES if each.name == name)
    with TemporaryDirectory() as folder:
        play(scene, Path(folder), seconds, seed)


def play(scene: Scene, folder: Path, seconds: float, seed: int) -> tuple[int, str]:
    """Play a scene; return how often something was written or read, and what happened."""
    with warnings.catch_warnings(), dask.config.set(scheduler="sync"):  # forks have no threads
        warnings.simplefilter("ignore", CheckpointWarning)
        return _played(scene, folder, seconds, seed)


def _played(scene: Scene, folder: Path, seconds: float, seed: int) -> tuple[int, str]:
    path = folder / scene.target
    xckpt.save(_dataset(0.0), path, scene.engine, **scene.options)
    until = time.monotonic() + seconds
    writers = [_started(_write, scene, path, until, number) for number in (1, 2)]
    readers = [_started(_read, scene, _opened(path), until, seed + number) for number in (1, 2)]
    wrote, read = [_told(each) for each in writers], [_told(each) for each in readers]
    for each in (*wrote, *read):
        if each.broken:
            raise Broken(each.broken)
    if scene.write is _appending:
        names = {
            f"w{n}.{number}.{times}"
            for number, each in zip((1, 2), wrote, strict=True)
            for times in range(each.done)
            for n in range(_TENSORS)
        }
        lost = names - set(xckpt.read_index(path).tensors)
        if lost:
            raise Broken(f"appends that returned are not in the file: {sorted(lost)[:9]}")
    _load(scene, _opened(path))
    if there := left_over(folder):
        raise Broken(f"nobody was killed, and {there} is left over")
    saves, loads = sum(each.done for each in wrote), sum(each.done for each in read)
    refused = sum(each.refused for each in (*wrote, *read))
    said = f"{saves} written, {loads} read whole, {refused} errors that the file changed"
    return saves + loads, said


def _opened(path: Path) -> Path:
    index = path.with_name(f"{path.name}.index.json")
    return index if index.exists() else path


def _write(scene: Scene, path: Path, until: float, number: int) -> _Done:
    done = refused = 0
    while time.monotonic() < until:
        try:
            scene.write(path, number, done)
        except (FileChangedError, BlockingIOError):
            refused += 1
        else:
            done += 1
        time.sleep(_PAUSE)
    return _Done(done, refused)


def _read(scene: Scene, path: Path, until: float, _: int) -> _Done:
    done = refused = 0
    while time.monotonic() < until:
        try:
            _load(scene, path)
        except FileChangedError:
            refused += 1
        else:
            done += 1
    return _Done(done, refused)


def _load(scene: Scene, path: Path) -> None:
    """Load all of a checkpoint, and check that one writer wrote it."""
    with xr.open_dataset(path, engine=scene.engine) as ds:
        values = {float(v) for each in ds.variables.values() for v in np.unique(each.values)}
        count = len(ds.variables)
    if count % _TENSORS or (len(values) != 1 and scene.write is not _appending):
        raise Broken(f"a mixture: {count} tensors of {sorted(values)}")


def _started(
    work: Callable[[Scene, Path, float, int], _Done],
    scene: Scene, path: Path, until: float, number: int,
) -> int:  # fmt: skip
    """Begin to work in another process; return the descriptor that tells what it did."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return reader
    try:
        signal.alarm(int(until - time.monotonic()) + _GRACE)
        warnings.simplefilter("ignore", CheckpointWarning)
        with threads():
            told = work(scene, path, until, number)
    except BaseException:  # noqa: BLE001  nobody else is there
        told = _Done(0, 0, traceback.format_exc())
    with os.fdopen(writer, "w") as file:
        file.write(json.dumps(told))
    sys.stderr.flush()
    os._exit(0)


def _told(reader: int) -> _Done:
    with os.fdopen(reader) as file:
        text = file.read()
    os.wait()
    if not text:
        raise Broken("a process hangs, or was ended")
    return _Done(*json.loads(text))
