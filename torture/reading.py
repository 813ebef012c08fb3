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
from torture.trial import Tally, place, read_evidence
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

# Headers for each file whose values are read; such files for each that is read in all ways; files
# for each with changes under a digest.
_HEADERS_EACH, _WAYS_EACH, _DIGESTS_EACH = 20, 3, 4
_MOST_FILES = 2000
# Limits for a small file: processor time for its header and for all of it, in seconds; memory.
_MOST_SECONDS, _PATIENCE, _MOST_NBYTES = 1.0, 5.0, 64 << 20
_SMALL = 2048
# Name of the unchanged file in the record of a failure of "digests".
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
    """An input exceeded a limit of time or memory."""


@dataclass
class _Counts:
    """Cases, failures and seconds of a row."""

    cases: int = 0
    failures: int = 0
    seconds: float = 0.0


@dataclass
class _Campaign:
    """The files of a format that reach different lines, and the counts of its rows."""

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
        self.guarded = [
            guarded for seed_files in self.files if (guarded := ways.digested(seed_files))
        ]
        self.now = _Current(self.trial, self.name)
        for files in self.files[:4]:  # imports and compilation would count as theirs
            with suppress(*BROKEN):
                check_ways(files, self.trial.folder)

    def run(self, seconds: float) -> None:
        """Try files for a time, in an order that follows from the seed."""
        stop, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < stop:
            rounds += 1
            outcomes = [self.try_index() for _ in range(_HEADERS_EACH)]
            accepted, files = outcomes[-1]
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
        """Return an earlier case with one file changed, mostly the first."""
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
        """Try a case, and record it if it breaks a promise."""
        start, counts = time.perf_counter(), self.counts[what]
        counts.cases += 1
        self.now.show(files)
        try:
            try:
                with bounded(patience):
                    check(files, self.trial.folder)
            except TooMuchError:  # the first use of a kernel compiles it
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
        """Remove bytes that do not change the failure, for at most two seconds."""
        if isinstance(error, TooMuchError):
            return files
        origin, stop = place(error), time.monotonic() + 2
        main = next(iter(files))
        width = len(files[main]) // 2
        while width and time.monotonic() < stop:
            position = 0
            while position < len(files[main]) and time.monotonic() < stop:
                data = files[main]
                fewer = {**files, main: data[:position] + data[position + width :]}
                try:
                    check(fewer, self.trial.folder)
                except BROKEN as repeated:
                    if place(repeated) == origin:
                        files = fewer
                        continue
                position += width
            width //= 2
        return files

    def tallies(self) -> Iterator[Tally]:
        """Return the rows of the table."""
        share = self.refused / max(1, self.counts["index"].cases)
        added = len(self.files) - self.known
        summaries = {
            "index": f"{self.known} files, {added} more for new lines; {share:.0%} refused",
            "digests": f"of {len(self.guarded)} files",
        }
        for kind, counts in sorted(self.counts.items(), key=lambda item: -item[1].cases):
            cases, failures, seconds = counts.cases, counts.failures, counts.seconds
            yield Tally(f"{self.name}: {kind}", cases, failures, seconds, summaries.get(kind, ""))


class _Current:
    """The current case, in a file that remains if the process dies."""

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
    """Raise an error if the block exceeds a limit of time or memory."""
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
    declaration = None
    try:
        with locating(path=source.name):
            format_ = formats.detect(source)
            declaration = declared(format_.name)
            index = format_.read(source)
    except CheckpointError as error:
        if lines is not None:
            lines.came_through(error)
        # Bytes of an unknown format break no rule of a format.
        if declaration is not None:
            assert_told(error, largest, offset=declaration.tells_offsets and len(files) == 1)
        ways.check_named(error)
        return False
    _check_places(index, largest)
    if not source.size % 16:
        again: Index = pickle.loads(pickle.dumps(index))  # noqa: S301  our own
        if repr((again.tensors, again.attrs)) != repr((index.tensors, index.attrs)):
            raise Disagreement("it does not pickle")
    return True


def _check_places(index: Index, largest: int) -> None:
    """Check that all parts are inside the file, and that problems have a position."""
    for tensor in index.tensors.values():
        if tensor.problem is not None:
            assert_told(tensor.problem, largest)
        for part in tensor.parts.values():
            elsewhere = part.shard is not None or part.inline is not None
            # The end of a file may be missing; an empty tensor lacks nothing.
            end = part.offset + part.nbytes if part.nbytes else 0
            inside = part.offset >= 0 <= part.nbytes and end <= index.nbytes
            if not (elsewhere or inside or tensor.problem):
                raise Disagreement(f"not in the file: {part}")


@contextmanager
def placed(files: Files, folder: Path) -> Iterator[Any]:
    """Yield the bytes of a single file, or the path of the first of several files."""
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
    """Read a file in all ways, and compare the values with other implementations."""
    with placed(files, folder) as obj:
        values = ways.agreement(obj)
    if values is not None and len(files) == 1:
        ways.unlike_others(next(iter(files.values())), values)


def run(trial: Trial) -> Iterator[Tally]:
    """Try the files of each format for an equal time."""
    warnings.simplefilter("ignore", CheckpointWarning)
    warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, because the numbers are random
    signal.signal(signal.SIGALRM, _alarmed)
    names = [trial.only] if trial.only else formats.names()
    with dask.config.set({"scheduler": "sync", "xckpt.memory-limit": "256 MiB"}):
        for number, name in enumerate(names):
            # Separate lines, so that the files of a format do not depend on other formats.
            with closing(Lines()) as lines:
                campaign = _Campaign(trial, name, lines)
                gc.collect()
                gc.freeze()
                campaign.run(max(9.0, trial.remaining) / (len(names) - number))
            campaign.now.close()
            yield from campaign.tallies()


def again(path: Path) -> None:
    """Repeat a recorded failure, or read the file during which the process died."""
    warnings.simplefilter("ignore", CheckpointWarning)
    if path.is_dir():
        files = read_evidence(path)
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
