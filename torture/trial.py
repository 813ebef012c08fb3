"""Shared types of the parts: trials, rows of tables, and records of failures.

A part is a module whose docstring is the text over its table, with::

    def run(trial: Trial) -> Iterator[Tally]: ...
    def again(path: Path) -> None: ...   # repeat a recorded failure, and raise its error

``python -m torture.trial MODULE SEED SECONDS MEMORY KEPT FD ONLY`` runs one part in this process
and writes its tallies as lines of JSON to the descriptor.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Tally", "Trial", "limit", "place", "read_evidence"]

# Largest number of records of the same failure.
_MOST_KEPT = 5
# File with the names of the files of a record, in order.
_ORDER = "files.json"


class Tally(NamedTuple):
    """A row of the table of a part.

    Parameters
    ----------
    what : str
        Name of the row.
    cases, failures : int
        Number of cases, and of those that broke a promise.
    seconds : float
        Duration of all cases.
    said : str
        Last column of the row: a summary or a condition.
    """

    what: str
    cases: int
    failures: int
    seconds: float
    said: str = ""


@dataclass
class Trial:
    """Settings of a run of one part, and the record of its failures.

    Parameters
    ----------
    seed : int
        Seed of all random numbers; see `random`.
    seconds : float
        Approximate duration. Parts with a fixed number of cases may take less.
    folder : Path
        Folder for scratch files, which is removed.
    kept : Path
        Folder for records of failures, with a folder for each part.
    part : str
        Name of the module.
    only : str
        Section of the part to run, such as a format; all by default.
    """

    seed: int
    seconds: float
    folder: Path
    kept: Path
    part: str = "torture"
    only: str = ""
    failures: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._kept: dict[str, int] = {}

    @property
    def remaining(self) -> float:
        """Remaining time in seconds."""
        return self._start + self.seconds - time.monotonic()

    def random(self, *purpose: object) -> random.Random:
        """Return a generator of random numbers, seeded by the seed and the purpose."""
        return random.Random(repr((self.seed, *purpose)))  # noqa: S311  not a secret

    def is_known(self, what: str, error: BaseException | str) -> bool:
        """Whether this failure has the largest number of records already."""
        return self._kept.get(_kind(what, error), 0) >= _MOST_KEPT

    def fail(self, what: str, files: Mapping[str, bytes], error: BaseException | str) -> Path:
        """Record a failure: its files, the error, and the command that repeats it.

        The record is a folder, which is returned. `read_evidence` reads its files; the first one
        is the file that was opened.
        """
        kind = _kind(what, error)
        self.failures += 1
        self._kept[kind] = self._kept.get(kind, 0) + 1
        digest = blake2b(repr(sorted(files.items())).encode(), digest_size=6).hexdigest()
        part = self.part.rpartition(".")[2]
        path = self.kept / part / f"{what.replace(' ', '-')}-{digest}"
        if self._kept[kind] <= _MOST_KEPT and not path.exists():
            path.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(data)
            (path / _ORDER).write_text(json.dumps([*files]), "utf-8")
            arguments = (sys.executable, "-m", "torture", "again", part, str(path))
            command = " ".join(map(shlex.quote, arguments))
            message = (
                error if isinstance(error, str) else "".join(traceback.format_exception(error))
            )
            text = f"{message.rstrip()}\n\nseed {self.seed}; again: {command}\n"
            (path / "error.txt").write_text(text, "utf-8", "backslashreplace")
            print(f"{self.part}: {what}: {_last_line(message)}\n  {command}", file=sys.stderr)
        return path


def read_evidence(path: Path) -> dict[str, bytes]:
    """Return the files of a recorded failure, by name and in order."""
    names = json.loads((path / _ORDER).read_text("utf-8"))
    return {name: (path / name).read_bytes() for name in names}


def place(error: BaseException) -> tuple[object, ...]:
    """Return the types and positions in the code of an error and of its contexts."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    location = (type(error).__name__, *[(frame.filename, frame.lineno) for frame in frames])
    return location if error.__context__ is None else (*location, *place(error.__context__))


def _kind(what: str, error: BaseException | str) -> str:
    """Return a key that failures with the same cause share: the place in the code."""
    return what if isinstance(error, str) else f"{what} {place(error)}"


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2][:300]


def limit(memory: int, seconds: float) -> None:
    """Limit memory, processor time and file sizes of this process, and disable core dumps."""
    try:
        import resource
    except ImportError:  # on Windows, where only the time limit of the parent applies
        return
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: int(8 * seconds) + 600,
        resource.RLIMIT_FSIZE: 1 << 30,
        resource.RLIMIT_CORE: 0,
    }
    for resource_kind, bound in limits.items():
        with suppress(ValueError, OSError):  # the limit is lower already
            resource.setrlimit(resource_kind, (bound, resource.getrlimit(resource_kind)[1]))


def _main(module: str, *numbers: str) -> None:
    seed, seconds, memory, failures, fileno, only = numbers
    limit(int(memory), float(seconds))
    with TemporaryDirectory(prefix="torture") as folder, os.fdopen(int(fileno), "w") as output:
        part = import_module(module)
        trial = Trial(int(seed), float(seconds), Path(folder), Path(failures), module, only)
        tallies: Iterator[Tally] = part.run(trial)
        for tally in tallies:
            print(json.dumps(tally), file=output, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
