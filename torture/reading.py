"""Damaged files, made from golden files and generated ones by changing structures and bytes.

"index" reads the header from memory. "values" opens accepted files, and some of the refused ones,
as a Dataset and computes all values. "ways" opens a file as an Index, a Dataset and a tree, decoded
and as stored, computes statistics and verifies it: all must agree on which tensors are readable.
Where numpy or the packages safetensors, ztensor and gguf read a file too, the values must be equal.
Only documented errors are allowed, which name the file, in bounded time and memory. Bytes that are
changed under a digest ("digests") must never be returned as values.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import resource
import signal
import time
import warnings
from collections import defaultdict
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import dask

from tests.contracts.declared import assert_told
from tests.contracts.every import declared
from tests.sources import CountingSource
from torture import ways
from torture.lines import Lines
from torture.mutating import Mutator
from torture.seeds import Files, seeds
from torture.trial import Tally, left, place
from torture.ways import BROKEN, Disagreement
from xckpt import formats
from xckpt.errors import CheckpointError, CheckpointWarning, locating
from xckpt.storage.source import components

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torture.trial import Trial
    from xckpt.index import Index
    from xckpt.storage import Source

    Check = Callable[[Files, Path], Any]

# Of so many headers that are read, the values of one are; of so many of these, in all ways.
_HEADERS_EACH, _WAYS_EACH, _DIGESTS_EACH = 20, 3, 4
_MOST_FILES = 2000
# What one small file may take: seconds of this process, for its header and for all of it; bytes.
_MOST_SECONDS, _PATIENCE, _MOST_NBYTES = 1.0, 5.0, 64 << 20
_SMALL = 2048
# What a file was before bytes under a digest were changed, in what a failure leaves.
_BEFORE = "before"


class _Memory(CountingSource):
    """Files in memory, in one folder."""

    def __init__(self, files: Files, name: str | None = None) -> None:
        main = next(iter(files)) if name is None else name
        super().__init__(files[main], f"/memory/{main}")
        self.files = files

    def sibling(self, name: str) -> Source:
        if "/".join(components(name)) not in self.files:
            raise FileNotFoundError(name)
        return _Memory(self.files, name)


class TooMuchError(Exception):
    """An input took more time or memory than it may."""


@dataclass
class _Counts:
    """Cases and seconds of one kind."""

    cases: int = 0
    failures: int = 0
    seconds: float = 0.0


@dataclass
class _Campaign:
    """The files of one format that reach different lines, and what came of trying them."""

    trial: Trial
    name: str
    lines: Lines
    counts: dict[str, _Counts] = field(default_factory=lambda: defaultdict(_Counts))
    refused: int = 0

    def __post_init__(self) -> None:
        self.random = self.trial.random("reading", self.name)
        self.mutator = Mutator(self.random)
        self.files = seeds(self.name)
        self.known = len(self.files)
        self.guarded = [found for each in self.files if (found := ways.digested(each))]
        self.now = _Current(self.trial, self.name)
        for files in self.files[:4]:  # what is loaded and compiled on the way is not theirs
            with suppress(*BROKEN):
                check_ways(files, self.trial.folder)

    def run(self, seconds: float) -> None:
        """Try files for a time; the same ones in the same order for a seed."""
        stop, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < stop:
            rounds += 1
            tried = [self.try_index() for _ in range(_HEADERS_EACH)]
            accepted, files = tried[-1]
            if accepted or rounds % 4 == 0:
                self.attempt("values", files, read_values, _PATIENCE)
                if rounds % _WAYS_EACH == 0:
                    self.attempt("ways", files, check_ways, _PATIENCE)
            if self.guarded and rounds % _DIGESTS_EACH == 0:
                self.try_digest(self.random.choice(self.guarded))

    def try_index(self) -> tuple[bool, Files]:
        """Change a file and read its header; return whether it was accepted."""
        files, reached, accepted = self.mutated(), len(self.lines), False

        def check(files: Files, _: Path) -> None:
            nonlocal accepted
            with self.lines.watched():
                accepted = check_index(files, self.lines)

        self.attempt("index", files, check, _MOST_SECONDS)
        self.refused += not accepted
        if len(self.lines) > reached and len(self.files) < _MOST_FILES:
            self.files.append(files)
        return accepted, files

    def try_digest(self, guarded: ways.Digested) -> None:
        """Change bytes under a digest."""
        changed = ways.flipped(guarded, self.random) | {_BEFORE: next(iter(guarded.files.values()))}
        self.attempt("digests", changed, lambda files, _: guarded.check(files), _PATIENCE)

    def mutated(self) -> Files:
        """Change one of the files of a known case; mostly the first one."""
        random = self.random
        recent = self.files[max(self.known, len(self.files) - 50) :]
        main, files = "", Files()
        while not main:
            files = random.choice(recent if recent and random.random() < 0.4 else self.files)
            name = next(iter(files))
            main = name if random.random() < _SMALL / (_SMALL + len(files[name])) else ""
        name = main if random.random() < 0.8 else random.choice([*files])
        return {**files, name: self.mutator.mutated(files[name])}

    def attempt(self, what: str, files: Files, check: Check, patience: float) -> None:
        """Try one case, and keep it if it breaks a promise."""
        start, counts = time.perf_counter(), self.counts[what]
        counts.cases += 1
        self.now.show(files)
        try:
            try:
                with bounded(patience):
                    check(files, self.trial.folder)
            except TooMuchError:  # kernels are compiled when they are first used
                with bounded(patience):
                    check(files, self.trial.folder)
        except BROKEN as error:
            counts.failures += 1
            label = f"{self.name} {what}"
            if not self.trial.is_known(label, error):
                files = self.smallest(check, files, error)
            self.trial.fail(label, files, error)
        counts.seconds += time.perf_counter() - start

    def smallest(self, check: Check, files: Files, error: BaseException) -> Files:
        """Leave out what does not matter to a failure, for as long as that takes little time."""
        if isinstance(error, TooMuchError):
            return files
        where, stop = place(error), time.monotonic() + 2
        main = next(iter(files))
        width = len(files[main]) // 2
        while width and time.monotonic() < stop:
            at = 0
            while at < len(files[main]) and time.monotonic() < stop:
                data = files[main]
                fewer = {**files, main: data[:at] + data[at + width :]}
                try:
                    check(fewer, self.trial.folder)
                except BROKEN as other:
                    if place(other) == where:
                        files = fewer
                        continue
                at += width
            width //= 2
        return files

    def tallies(self) -> Iterator[Tally]:
        """Return the rows of the table."""
        share = self.refused / max(1, self.counts["index"].cases)
        new = len(self.files) - self.known
        said = {
            "index": f"{self.known} files, {new} more for new lines; {share:.0%} refused",
            "digests": f"of {len(self.guarded)} files",
        }
        for what, counts in sorted(self.counts.items(), key=lambda each: -each[1].cases):
            cases, failures, seconds = counts.cases, counts.failures, counts.seconds
            yield Tally(f"{self.name}: {what}", cases, failures, seconds, said.get(what, ""))


class _Current:
    """What is being tried, in a file that is still there if the process dies of it."""

    def __init__(self, trial: Trial, name: str) -> None:
        folder = trial.kept / trial.part.rpartition(".")[2]
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"running-{name}-{os.getpid()}"
        self._file = self.path.open("w+b")
        self._file.truncate(1 << 20)
        self._map = mmap.mmap(self._file.fileno(), 1 << 20)

    def show(self, files: Files) -> None:
        data = next(iter(files.values()))[: (1 << 20) - 8]
        self._map[: 8 + len(data)] = len(data).to_bytes(8, "little") + data

    def close(self) -> None:
        self._map.close()
        self._file.close()
        self.path.unlink()


@contextmanager
def bounded(patience: float) -> Iterator[None]:
    """Raise an error for what takes too long, or too much memory."""
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    signal.setitimer(signal.ITIMER_REAL, 10 + 4 * patience)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.process_time() - start
    if seconds > patience:
        raise TooMuchError(f"{seconds:.1f} seconds")
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    if more > _MOST_NBYTES:
        raise TooMuchError(f"{more} bytes more")


def _alarmed(*_: Any) -> None:
    raise TooMuchError("it does not end")


# --- what is tried --------------------------------------------------------------------------------


def check_index(files: Files, lines: Lines | None = None) -> bool:
    """Read a header as opening does; return whether it was accepted."""
    source = _Memory(files)
    largest = max(map(len, files.values()))
    told = None
    try:
        with locating(path=source.name):
            found = formats.detect(source)
            told = declared(found.name)
            index = found.read(source)
    except CheckpointError as error:
        if lines is not None:
            lines.came_through(error)
        # What is of no format breaks no rule of one.
        if told is not None:
            assert_told(error, largest, offset=told.tells_offsets and len(files) == 1)
        ways.check_named(error)
        return False
    _check_places(index, largest)
    if not source.size % 16:
        again: Index = pickle.loads(pickle.dumps(index))  # noqa: S301  our own
        if repr((again.tensors, again.attrs)) != repr((index.tensors, index.attrs)):
            raise Disagreement("it does not pickle")
    return True


def _check_places(index: Index, largest: int) -> None:
    """Check that all parts are in the file, and that problems say where they are."""
    for tensor in index.tensors.values():
        if tensor.problem is not None:
            assert_told(tensor.problem, largest)
        for part in tensor.parts.values():
            elsewhere = part.shard is not None or part.inline is not None
            inside = 0 <= part.offset <= part.offset + part.nbytes <= index.nbytes
            if not (elsewhere or inside or tensor.problem):
                raise Disagreement(f"not in the file: {part}")


@contextmanager
def placed(files: Files, folder: Path) -> Iterator[Any]:
    """Return bytes, or the path of files that need each other."""
    if len(files) == 1:
        yield next(iter(files.values()))
        return
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    try:
        yield str(folder / next(iter(files)))
    finally:
        for name in files:
            (folder / name).unlink()


def read_values(files: Files, folder: Path) -> None:
    """Open a file, and compute its values."""
    with placed(files, folder) as obj:
        ways.values_of(obj)


def check_ways(files: Files, folder: Path) -> None:
    """Read all of a file in all ways, and compare with who else can read it."""
    with placed(files, folder) as obj:
        values = ways.agreement(obj)
    if values is not None and len(files) == 1:
        ways.unlike_others(next(iter(files.values())), values)


def run(trial: Trial) -> Iterator[Tally]:
    """Try files of each format for the same time."""
    warnings.simplefilter("ignore", CheckpointWarning)
    warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, of numbers that are anything
    signal.signal(signal.SIGALRM, _alarmed)
    names = [trial.only] if trial.only else formats.names()
    with dask.config.set({"scheduler": "sync", "xckpt.memory-limit": "256 MiB"}):
        for number, name in enumerate(names):
            # Lines of its own, so that its files do not depend on how long others took.
            with closing(Lines()) as lines:
                campaign = _Campaign(trial, name, lines)
                gc.collect()
                gc.freeze()
                campaign.run(max(9.0, trial.remaining) / (len(names) - number))
            campaign.now.close()
            yield from campaign.tallies()


def again(path: Path) -> None:
    """Read what a failure left: a folder, or the file that was read when the process died."""
    warnings.simplefilter("ignore", CheckpointWarning)
    if path.is_dir():
        files = left(path)
    else:
        data = path.read_bytes()
        files = {"m": data[8 : 8 + int.from_bytes(data[:8], "little")]}
    with dask.config.set(scheduler="sync"), TemporaryDirectory() as folder:
        before = files.pop(_BEFORE, None)
        guarded = None if before is None else ways.digested({"m": before})
        if guarded is not None:
            guarded.check(files)
        check_index(files)
        check_ways(files, Path(folder))
