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
from torture.trial import Tally, read_evidence

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from torture.calls import Call
    from torture.checkpoints import Case
    from torture.trial import Trial

__all__ = ["again", "run"]

_SECTOR = 512
#: Largest number of subsets of the changes of names since the last `fsync` of the folder: all are
#: tried up to this number, and random ones beyond it.
_MOST_SUBSETS = 64
_TORN = 4

Names = dict[str, int]
# A change of a folder: the new file of each changed name, None for a removed name.
Change = dict[str, int | None]


class Moment(NamedTuple):
    """Possible contents of the disk after a call.

    `durable` has the names at the last `fsync` of the folder, and `changes` the later changes of
    them. Files are by number: `synced` has their contents at the last `fsync`, `written` all of it.
    """

    durable: Names
    changes: tuple[Change, ...]
    synced: dict[int, bytes]
    written: dict[int, bytes]


class _Recorder:
    """Observer of calls that records the possible contents of the disk after each."""

    def __init__(self, folder: Path) -> None:
        self.moments: list[Moment] = []
        self._folder = folder
        self._held: dict[int, BinaryIO] = {}  # open, so that no other file gets their numbers
        names, written = self._look()
        self._names = names
        self._note(Moment(names, (), written, written))

    def close(self) -> None:
        """Close all files."""
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
        # A file without a name may still have one on the disk.
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
    """Record every case, and simulate a power failure after each of its calls."""
    with dask.config.set(scheduler="sync"):
        all_cases = cases(trial.folder, trial.only)
        cases_by_row: dict[str, list[Case]] = {}
        for case in all_cases:
            cases_by_row.setdefault(_row_title(case), []).append(case)
        for row, row_cases in cases_by_row.items():
            start, failures = time.monotonic(), trial.failures
            count = points = opened = late = 0
            for case in row_cases:
                if trial.remaining < 0:
                    late += 1
                    continue
                moments = _record(case, trial.folder)
                points += len(moments)
                disks, differing = _replay(case, trial, moments)
                count, opened = count + disks, opened + differing
            seconds = time.monotonic() - start
            summary = f"disks after each of {points} calls; {opened} distinct disks opened"
            summary += f"; no time for {late} of {len(row_cases)} kinds" if late else ""
            yield Tally(row, count, trial.failures - failures, seconds, summary)


def _row_title(case: Case) -> str:
    return case.name.partition(" ")[0] + (" with shards" if "shards" in case.name else "")


def again(path: Path) -> None:
    """Open the disk of a recorded failure again."""
    name, returned, content = json.loads(read_evidence(path)["disk.json"])
    with TemporaryDirectory() as folder, dask.config.set(scheduler="sync"):
        root = Path(folder)
        (case,) = cases(root, name)
        disk = {file: bytes.fromhex(data) for file, data in content.items()}
        _check(case, root, disk, returned=returned, saving=True)


def _record(case: Case, root: Path) -> list[Moment]:
    folder = case.begin(root)
    with closing(_Recorder(folder)) as recorder, watched(root, recorder):
        case.run(folder)
    return recorder.moments


def _replay(case: Case, trial: Trial, moments: list[Moment]) -> tuple[int, int]:
    """Open every possible disk once; return the number of disks, and of distinct ones."""
    rng, count = trial.random(case.name), 0
    checked: set[object] = set()
    saved_kinds: set[object] = set()
    for position, moment in enumerate(moments):
        returned = position == len(moments) - 1
        for disk in _disks(moment, rng):
            count += 1
            # Hidden files are never opened, so their contents do not matter.
            key = returned, frozenset((n, d) for n, d in disk.items() if not n.startswith("."))
            kind = frozenset(disk)
            if key in checked and kind in saved_kinds:
                continue
            try:
                _check(case, trial.folder, disk, returned=returned, saving=kind not in saved_kinds)
                checked.add(key)
                saved_kinds.add(kind)
            except Exception as error:  # noqa: BLE001  any is what is looked for
                content = {name: data.hex() for name, data in disk.items()}
                data = json.dumps([case.name, returned, content]).encode()
                trial.fail(f"power {case.name}", {"disk.json": data}, error)
    return count, len(checked)


def _check(case: Case, root: Path, disk: dict[str, bytes], *, returned: bool, saving: bool) -> None:
    folder = root / "m"
    lay_out(folder, disk)
    state = case.state(folder)
    if returned and state != "new":
        raise Broken("it had returned, and the old one is back")
    if saving:
        case.next_save(folder)


def _disks(moment: Moment, rng: random.Random) -> Iterator[dict[str, bytes]]:
    """Yield the possible contents of the disk after a power failure at a moment."""
    for names in _folders(moment, rng):
        loose = [n for n in {*names.values()} if moment.synced.get(n) != moment.written[n]]
        for variant in range(2 + _TORN if loose else 1):
            contents = {n: _torn(moment, n, variant, rng) for n in names.values()}
            yield {name: contents[number] for name, number in names.items()}


def _folders(moment: Moment, rng: random.Random) -> Iterator[Names]:
    changes = moment.changes
    subsets = chain.from_iterable(
        combinations(range(len(changes)), count) for count in range(len(changes) + 1)
    )
    if 1 << len(changes) > _MOST_SUBSETS:
        random_subsets = (
            tuple(n for n in range(len(changes)) if rng.random() < share)
            for share in (0.1, 0.5, 0.9)
            for _ in range(_MOST_SUBSETS // 4)
        )
        # Prefixes of the changes are the states that a journal can leave.
        subsets = chain((tuple(range(end)) for end in range(len(changes) + 1)), random_subsets)
    for chosen in subsets:
        names = dict(moment.durable)
        for number in chosen:
            for name, file in changes[number].items():
                if file is None:
                    names.pop(name, None)
                else:
                    names[name] = file
        yield names


def _torn(moment: Moment, number: int, variant: int, rng: random.Random) -> bytes:
    """Return contents of a file after a power failure: old, new, cut, or sectors of both."""
    old, new = moment.synced.get(number, b""), moment.written[number]
    if old == new or variant == 1:
        return new
    if variant == 0:
        return old
    if variant == 2:
        cut = rng.randrange(len(new) + 1)
        return new[:cut] + bytes(len(new) - cut)
    size = rng.choice((len(old), len(new)))
    sectors = [
        rng.choice((old, new))[offset : offset + _SECTOR].ljust(_SECTOR, b"\0")
        for offset in range(0, size, _SECTOR)
    ]
    return b"".join(sectors)[:size]
