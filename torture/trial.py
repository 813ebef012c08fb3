"""What the parts share: a `Trial` each, tallies as rows of a table, and what a failure leaves.

A part is a module whose docstring is the text over its table, with::

    def run(trial: Trial) -> Iterator[Tally]: ...
    def again(path: Path) -> None: ...   # raise what was wrong with what a failure left

``python -m torture.trial MODULE SEED SECONDS MEMORY KEPT FD ONLY`` is the process that a part has
for itself: it writes its tallies as lines of JSON to the descriptor.
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

__all__ = ["Tally", "Trial", "left", "limit", "place"]

# Files of the same failure are alike: so many of them say what there is to say.
_MOST_KEPT = 5
# The names of the files that a failure left, in their order.
_ORDER = "files.json"


class Tally(NamedTuple):
    """One row of the table of a part.

    Parameters
    ----------
    what : str
        What was tried.
    cases, failures : int
        How often, and how often a promise was broken.
    seconds : float
        How long all of them took.
    said : str
        What happened, or what it was held to.
    """

    what: str
    cases: int
    failures: int
    seconds: float
    said: str = ""


@dataclass
class Trial:
    """What a part runs with.

    Parameters
    ----------
    seed : int
        Everything random follows from it: `random`.
    seconds : float
        How long the part is to take, about. What has a fixed number of cases may take less.
    folder : Path
        For scratch files; it is removed.
    kept : Path
        Where failures are left, in a folder of the part's name.
    part : str
        Name of the module.
    only : str
        What of the part is to run, such as one format; by default all of it.
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
        """Seconds that are left."""
        return self._start + self.seconds - time.monotonic()

    def random(self, *of: object) -> random.Random:
        """Return a generator whose numbers follow from the seed and what they are for."""
        return random.Random(repr((self.seed, *of)))  # noqa: S311  not a secret

    def is_known(self, what: str, error: BaseException | str) -> bool:
        """Whether enough is kept of this failure."""
        return self._kept.get(_kind(what, error), 0) >= _MOST_KEPT

    def fail(self, what: str, files: Mapping[str, bytes], error: BaseException | str) -> Path:
        """Leave what broke a promise, what was wrong, and the command that tries it again.

        It is a folder of files, the first of which is the one that matters: `left`.
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
                (path / name).write_bytes(data)
            (path / _ORDER).write_text(json.dumps([*files]), "utf-8")
            words = (sys.executable, "-m", "torture", "again", part, str(path))
            command = " ".join(map(shlex.quote, words))
            told = error if isinstance(error, str) else "".join(traceback.format_exception(error))
            text = f"{told.rstrip()}\n\nseed {self.seed}; again: {command}\n"
            (path / "error.txt").write_text(text, "utf-8", "backslashreplace")
            print(f"{self.part}: {what}: {_last_line(told)}\n  {command}", file=sys.stderr)
        return path


def left(path: Path) -> dict[str, bytes]:
    """Return the files that a failure left."""
    names = json.loads((path / _ORDER).read_text("utf-8"))
    return {name: (path / name).read_bytes() for name in names}


def place(error: BaseException) -> tuple[object, ...]:
    """Return where in the code something went wrong, and what it was raised from."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    here = (type(error).__name__, *[(frame.filename, frame.lineno) for frame in frames])
    return here if error.__context__ is None else (*here, *place(error.__context__))


def _kind(what: str, error: BaseException | str) -> str:
    """Tell failures apart: one place in the code is one, however many files lead there."""
    return what if isinstance(error, str) else f"{what} {place(error)}"


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2][:300]


def limit(memory: int, seconds: float) -> None:
    """Bound this process: memory, time of all cores, sizes of files; no dump if it dies."""
    try:
        import resource
    except ImportError:  # on Windows, where the parent's patience is the only bound
        return
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: int(8 * seconds) + 600,
        resource.RLIMIT_FSIZE: 1 << 30,
        resource.RLIMIT_CORE: 0,
    }
    for which, most in limits.items():
        with suppress(ValueError, OSError):  # less is allowed already
            resource.setrlimit(which, (most, resource.getrlimit(which)[1]))


def _main(module: str, *numbers: str) -> None:
    seed, seconds, memory, kept, fileno, only = numbers
    limit(int(memory), float(seconds))
    with TemporaryDirectory(prefix="torture") as folder, os.fdopen(int(fileno), "w") as told:
        part = import_module(module)
        trial = Trial(int(seed), float(seconds), Path(folder), Path(kept), module, only)
        tallies: Iterator[Tally] = part.run(trial)
        for tally in tallies:
            print(json.dumps(tally), file=told, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
