"""Power failures at every moment of a save, a conversion and an append.

Each operation is recorded once: after every call, the contents of the folder, and the part of them
that `fsync` made durable. Then a power failure is simulated after every call. A file then has its
contents at the last `fsync`, or those written since, or sectors of both, or only the beginning
followed by zeros. A folder has the names of its last `fsync` and any subset of the later changes,
in any order. Each such disk is opened and loaded; for each set of names, a checkpoint is saved to
it once more. After the call has returned, only the new checkpoint is allowed.
"""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import closing
from itertools import chain, combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import dask

from torture.calls import CHANGING, watched
from torture.checkpoints import Broken, cases, lay_out
from torture.trial import Tally, left

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from torture.calls import Call
    from torture.checkpoints import Case
    from torture.trial import Trial

__all__ = ["again", "run"]

_SECTOR = 512
#: Of so many changes of names since the last `fsync` of the folder, any may be on the disk: all
#: choices are tried; of more, so many.
_MOST_SUBSETS = 64
_TORN = 4

Names = dict[str, int]
# A change of a folder: what each name that it concerns stands for then, None for nothing.
Change = dict[str, int | None]


class Moment(NamedTuple):
    """What the disk may have after a call.

    `durable` are the names at the last `fsync` of the folder, and `changes` what was done to them
    since. Files are by number; `synced` has what was brought to the disk, `written` all.
    """

    durable: Names
    changes: tuple[Change, ...]
    synced: dict[int, bytes]
    written: dict[int, bytes]


class _Recorder:
    """Watches calls, and notes what the disk may have after each."""

    def __init__(self, folder: Path) -> None:
        self.moments: list[Moment] = []
        self._folder = folder
        self._held: dict[int, BinaryIO] = {}  # open, so that no other file gets their numbers
        names, written = self._look()
        self._names = names
        self._note(Moment(names, (), written, written))

    def close(self) -> None:
        """Let go of all files."""
        for file in self._held.values():
            file.close()

    def _look(self) -> tuple[Names, dict[int, bytes]]:
        names: Names = {}
        contents: dict[int, bytes] = {}
        for path in self._folder.iterdir():
            number = path.stat().st_ino
            names[path.name] = number
            if number not in self._held:
                self._held[number] = path.open("rb", buffering=0)
            if number not in contents:
                contents[number] = path.read_bytes()
        return names, contents

    def _note(self, moment: Moment) -> None:
        self.moments.append(moment)

    def __call__(self, call: Call) -> Any:
        if call.name not in CHANGING:
            return call.make()
        if call.name == "fsync":
            status = os.fstat(call.args[0])
            done = call.make()
            self._synced(status)
        else:
            done = call.make()
            self._changed()
        return done

    def _changed(self) -> None:
        last = self.moments[-1]
        names, contents = self._look()
        change: Change = {
            name: names.get(name)
            for name in names.keys() | self._names.keys()
            if names.get(name) != self._names.get(name)
        }
        self._names = names
        changes = (*last.changes, change) if change else last.changes
        # What lost its last name may still be what the disk has under one.
        self._note(last._replace(changes=changes, written=last.written | contents))

    def _synced(self, status: os.stat_result) -> None:
        self._changed()  # through memory maps
        last = self.moments.pop()
        if stat.S_ISDIR(status.st_mode):
            self._note(last._replace(durable=self._names, changes=()))
        else:
            number = status.st_ino
            has = {number: last.written[number]} if number in last.written else {}
            self._note(last._replace(synced=last.synced | has))


def run(trial: Trial) -> Iterator[Tally]:
    """Record everything that is written, and let the power fail at every point of it."""
    with dask.config.set(scheduler="sync"):
        every = cases(trial.folder, trial.only)
        by_what: dict[str, list[Case]] = {}
        for case in every:
            by_what.setdefault(_what(case), []).append(case)
        for what, some in by_what.items():
            start, failures = time.monotonic(), trial.failures
            count = points = opened = late = 0
            for case in some:
                if trial.remaining < 0:
                    late += 1
                    continue
                moments = _recorded(case, trial.folder)
                points += len(moments)
                disks, differing = _replayed(case, trial, moments)
                count, opened = count + disks, opened + differing
            seconds = time.monotonic() - start
            said = f"disks after each of {points} calls; {opened} distinct disks opened"
            said += f"; no time for {late} of {len(some)} kinds" if late else ""
            yield Tally(what, count, trial.failures - failures, seconds, said)


def _what(case: Case) -> str:
    return case.name.partition(" ")[0] + (" with shards" if "shards" in case.name else "")


def again(path: Path) -> None:
    """Open the disk of a failure once more."""
    name, returned, content = json.loads(left(path)["disk.json"])
    with TemporaryDirectory() as folder, dask.config.set(scheduler="sync"):
        root = Path(folder)
        (case,) = cases(root, name)
        disk = {file: bytes.fromhex(data) for file, data in content.items()}
        _check(case, root, disk, returned=returned, saving=True)


def _recorded(case: Case, root: Path) -> list[Moment]:
    folder = case.begin(root)
    with closing(_Recorder(folder)) as recorder, watched(root, recorder):
        case.run(folder)
    return recorder.moments


def _replayed(case: Case, trial: Trial, moments: list[Moment]) -> tuple[int, int]:
    """Open all disks that there may be, each once; return how many, and how many differ."""
    rng, count = trial.random(case.name), 0
    seen: set[object] = set()
    kinds: set[object] = set()
    for at, moment in enumerate(moments):
        returned = at == len(moments) - 1
        for disk in _disks(moment, rng):
            count += 1
            # What is in files that nobody opens does not matter.
            key = returned, frozenset((n, d) for n, d in disk.items() if not n.startswith("."))
            kind = frozenset(disk)
            if key in seen and kind in kinds:
                continue
            try:
                _check(case, trial.folder, disk, returned=returned, saving=kind not in kinds)
                seen.add(key)
                kinds.add(kind)
            except Exception as error:  # noqa: BLE001  any is what is looked for
                content = {name: data.hex() for name, data in disk.items()}
                data = json.dumps([case.name, returned, content]).encode()
                trial.fail(f"power {case.name}", {"disk.json": data}, error)
    return count, len(seen)


def _check(case: Case, root: Path, disk: dict[str, bytes], *, returned: bool, saving: bool) -> None:
    folder = root / "m"
    lay_out(folder, disk)
    state = case.state(folder)
    if returned and state != "new":
        raise Broken("it had returned, and the old one is back")
    if saving:
        case.next_save(folder)


def _disks(moment: Moment, rng: random.Random) -> Iterator[dict[str, bytes]]:
    """Make what the disk may have when the power fails at a moment."""
    for names in _folders(moment, rng):
        loose = [n for n in {*names.values()} if moment.synced.get(n) != moment.written[n]]
        for how in range(2 + _TORN if loose else 1):
            has = {n: _torn(moment, n, how, rng) for n in names.values()}
            yield {name: has[number] for name, number in names.items()}


def _folders(moment: Moment, rng: random.Random) -> Iterator[Names]:
    changes = moment.changes
    every = chain.from_iterable(
        combinations(range(len(changes)), count) for count in range(len(changes) + 1)
    )
    if 1 << len(changes) > _MOST_SUBSETS:
        some = (
            tuple(n for n in range(len(changes)) if rng.random() < share)
            for share in (0.1, 0.5, 0.9)
            for _ in range(_MOST_SUBSETS // 4)
        )
        # Those that end somewhere are what a journal leaves.
        every = chain((tuple(range(end)) for end in range(len(changes) + 1)), some)
    for chosen in every:
        names = dict(moment.durable)
        for number in chosen:
            for name, file in changes[number].items():
                if file is None:
                    names.pop(name, None)
                else:
                    names[name] = file
        yield names


def _torn(moment: Moment, number: int, how: int, rng: random.Random) -> bytes:
    """Return what the disk has of a file: the old, the new, or some of both."""
    old, new = moment.synced.get(number, b""), moment.written[number]
    if old == new or how == 1:
        return new
    if how == 0:
        return old
    if how == 2:
        cut = rng.randrange(len(new) + 1)
        return new[:cut] + bytes(len(new) - cut)
    size = rng.choice((len(old), len(new)))
    sectors = [
        rng.choice((old, new))[at : at + _SECTOR].ljust(_SECTOR, b"\0")
        for at in range(0, size, _SECTOR)
    ]
    return b"".join(sectors)[:size]
