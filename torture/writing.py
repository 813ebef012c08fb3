"""Writers that are killed or interrupted, disks that fail or are full, folders that vanish.

After each case, the target must be the old checkpoint or the new one: it is compared byte by byte
with both, or opened and loaded. With an error, which names the file, it is the old one; without,
the new one. Leftovers are gone after the next save.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import dask

from torture.calls import CHANGING, Call, watched
from torture.checkpoints import Broken, Case, cases, files, left_over, threads
from torture.trial import Tally, read_evidence
from xckpt.errors import CheckpointError, CheckpointWarning
from xckpt.storage.partial import PARTIAL_SUFFIX

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from torture.trial import Trial

__all__ = ["again", "run"]

#: Share of the time for each kind of trouble.
_SHARES = {"killed": 0.4, "fault": 0.3, "full": 0.1, "vanished": 0.1, "interrupted": 0.1}
_DESCRIPTIONS = {
    "killed": "SIGKILL at a call, in the middle of a write, or at any moment",
    "fault": "a call fails: once, from then on, or although it was done",
    "full": "the disk is full after a number of bytes",
    "vanished": "the folder is moved or removed, at any call",
    "interrupted": "Ctrl-C, at any call",
}
# A writer takes milliseconds; one that hangs is ended.
_LONGEST = 60

_WRITE = ("EIO", "ENOSPC", "EDQUOT")
_ERRORS = {
    "open": ("EIO", "EMFILE", "ENOSPC", "EACCES"),
    "close": _WRITE,
    "pwrite": _WRITE,
    "ftruncate": ("EIO", "EFBIG"),
    "posix_fallocate": ("ENOSPC", "EOPNOTSUPP"),
    "copy_file_range": ("EIO", "ENOSPC", "EXDEV"),
    "fsync": _WRITE,
    "fchmod": ("EIO", "EPERM"),
    "fchown": ("EPERM",),
    "link": ("EIO", "EPERM", "EMLINK"),
    "rename": ("EIO", "ENOSPC", "EACCES"),
    "replace": ("EIO", "ENOSPC", "EACCES"),
    "unlink": ("EIO", "EACCES"),
    "stat": ("EIO", "ESTALE"),
    "lstat": ("EIO",),
    "fstat": ("EIO",),
    "lseek": ("EIO",),
    "preadv": ("EIO", "ESTALE"),
    "scandir": ("EIO", "EACCES"),
    "flock": ("ENOLCK", "EIO"),
}
# Network file systems may report a failure although the server completed the operation.
_DONE = {"close", "fsync", "link", "rename", "replace", "unlink"}


class Trouble(NamedTuple):
    """A disturbance of a writer.

    Parameters
    ----------
    kind : str
        A key of `_SHARES`.
    case : str
        Name of the case.
    number : int
        Index of the call at which it happens; for ``full``, the free space in bytes.
    call : str
        Name of the calls to count; empty for all calls that change files.
    how : str
        An error and its repetition (``"EIO once"``), how the folder vanishes, or how the kill
        happens.
    """

    kind: str
    case: str
    number: int
    call: str = ""
    how: str = ""


def run(trial: Trial) -> Iterator[Tally]:
    """Disturb the writers in each way until the time is over."""
    import dask.threaded  # once, and not in each child

    with dask.config.set(scheduler="sync"):
        all_cases = cases(trial.folder, trial.only)
        calls = {case.name: _list_calls(case, trial.folder) for case in all_cases}
        gc.collect()
        gc.freeze()
        for kind, share in _SHARES.items():
            until = time.monotonic() + share * trial.seconds
            yield from _try_all(trial, kind, all_cases, calls, until)


def again(path: Path) -> None:
    """Repeat the disturbance of a recorded failure."""
    trouble = Trouble(*json.loads(read_evidence(path)["trouble.json"]))
    with TemporaryDirectory() as name, dask.config.set(scheduler="sync"):
        root = Path(name)
        (case,) = cases(root, trouble.case)
        _try(case, root, trouble)


def _try_all(
    trial: Trial, kind: str, all_cases: list[Case], calls: dict[str, list[str]], until: float
) -> Iterator[Tally]:
    by_name = {case.name: case for case in all_cases}
    rng = trial.random(kind)
    count, failures = Counter[str](), Counter[str]()
    seconds: dict[str, float] = defaultdict(float)
    planned: list[Trouble] = []
    while time.monotonic() < until:
        # Every disturbance once in a random order, then again in another order.
        planned = planned or _plan(kind, calls, rng)
        trouble = planned.pop()
        row = f"{trouble.kind}: {trouble.case.partition(' ')[0]}"
        start = time.monotonic()
        try:
            happened = _try(by_name[trouble.case], trial.folder, trouble)
        except Exception as error:  # noqa: BLE001  any is what is looked for
            happened = True
            failures[row] += 1
            record = {"trouble.json": json.dumps(trouble).encode()}
            trial.fail(row.replace(":", ""), record, error)
        seconds[row] += time.monotonic() - start
        count[row] += happened
    for row in sorted(count):
        yield Tally(row, count[row], failures[row], seconds[row], _DESCRIPTIONS[kind])


def _list_calls(case: Case, root: Path) -> list[str]:
    """List the calls that a case makes without a disturbance."""
    names: list[str] = []

    def count(call: Call) -> Any:
        names.append(call.name)
        return call.make()

    folder = case.begin(root)
    with watched(root, count):
        case.run(folder)
    return names


def _plan(kind: str, calls: dict[str, list[str]], rng: random.Random) -> list[Trouble]:
    """List all disturbances of a kind, in random order."""
    troubles = []
    for case, call_names in calls.items():
        changing = sum(name in CHANGING for name in call_names)
        if kind == "killed":
            troubles += [Trouble(kind, case, number) for number in range(changing)]
            writes = range(call_names.count("pwrite"))
            troubles += [Trouble(kind, case, number, "pwrite", "torn") for number in writes]
            moments = range(changing // 2)
            troubles += [Trouble(kind, case, rng.randrange(1000), "", "timed") for _ in moments]
        elif kind == "fault":
            troubles += [
                Trouble(kind, case, number, name, f"{error} {when}")
                for name, times in Counter(call_names).items()
                for number in range(times)
                for error in _ERRORS[name]
                for when in ("once", "always", *(("done",) if name in _DONE else ()))
            ]
        elif kind == "full":
            troubles += [Trouble(kind, case, rng.randrange(60_000)) for _ in range(4)]
        else:
            variants = ("moved", "removed", "replaced") if kind == "vanished" else ("",)
            numbers = range(changing)
            troubles += [
                Trouble(kind, case, number, "", variant)
                for number in numbers
                for variant in variants
            ]
    rng.shuffle(troubles)
    return troubles


def _try(case: Case, root: Path, trouble: Trouble) -> bool:
    """Disturb a case while it is written; return whether the disturbance occurred.

    Raises if the files are not as promised afterwards.
    """
    folder = case.begin(root)
    if trouble.kind == "killed":
        happened = _kill(case, root, folder, trouble)
        case.state(folder)
    elif trouble.kind == "vanished":
        happened = _vanish(case, root, folder, trouble)
    else:
        happened = _fail(case, root, folder, trouble)
    if happened:
        case.next_save(folder)
    return happened


# --- kills ----------------------------------------------------------------------------------------


def _kill(case: Case, root: Path, folder: Path, trouble: Trouble) -> bool:
    """Write in a child process that is killed; return whether it was."""
    calls_left = trouble.number

    def dying(call: Call) -> Any:
        nonlocal calls_left
        if call.name in CHANGING and trouble.call in {"", call.name} and trouble.how != "timed":
            calls_left -= 1
            if calls_left < 0:
                if trouble.how == "torn":
                    fileno, data, offset = call.args
                    os.write(_seek(fileno, offset), bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return call.make()

    child = os.fork()
    if child == 0:
        signal.alarm(_LONGEST)
        with _exit_after(), threads(), watched(root, dying):
            case.run(folder)
    if trouble.how == "timed":
        time.sleep(0.03 * trouble.number / 1000)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in {0, -signal.SIGKILL}:
        raise Broken("the writer hangs" if code == -signal.SIGALRM else f"it ended with {code}")
    return code != 0


def _seek(fileno: int, offset: int) -> int:
    os.lseek(fileno, offset, os.SEEK_SET)
    return fileno


@contextlib.contextmanager
def _exit_after() -> Iterator[None]:
    """Exit this process after the block, without the cleanup that belongs to its parent."""
    code = 1
    try:
        yield
        code = 0
    except BaseException:  # noqa: BLE001  nobody else is there
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


# --- faults ---------------------------------------------------------------------------------------


def _fail(case: Case, root: Path, folder: Path, trouble: Trouble) -> bool:
    """Write while calls fail, and check the outcome; return whether a call failed."""
    observer, happened = _make_failing(trouble)
    before = Counter(_open_for_writing(root))
    text = _error_of(case, root, folder, observer)
    if not happened():
        return False
    if still := Counter(_open_for_writing(root)) - before:
        raise Broken(f"descriptors stay open: {[*still]}; {text}")
    state = case.state(folder)
    if text is None and state != "new":
        raise Broken("there was no error, and it is the old one")
    # After Ctrl-C, and if a call failed although it was done, the new file may be in place.
    may_be_new = trouble.kind == "interrupted" or "done" in trouble.how
    if text is not None and state != "old" and not may_be_new:
        raise Broken(f"it is the new one, and there was an error: {text}")
    # Ctrl-C may also interrupt the cleanup, which the next save completes.
    leftovers = left_over(folder) if trouble.kind != "interrupted" else []
    if text is not None:  # after an error another writer may have the lock
        leftovers = [name for name in leftovers if not name.endswith("-lock")]
    # After a failure during the switch, the main file refers to its shards by these names.
    main = case.path(folder).read_bytes() if state == "new" else b""
    leftovers = [name for name in leftovers if name.encode() not in main]
    if leftovers and trouble.call != "unlink" and "always" not in trouble.how:
        raise Broken(f"it leaves {leftovers} after {text}")
    return True


def _error_of(case: Case, root: Path, folder: Path, observer: Callable[[Call], Any]) -> str | None:
    """Write under an observer; return the error, which has to name a file of the user."""
    try:
        with _no_surprises(), watched(root, observer):
            case.write(folder, overwrite=case.overwrites)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except (OSError, CheckpointError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        return None
    known_names = {case.target, "source.zt", *case.old, *case.new}
    if not any(name in text for name in known_names):
        raise Broken(f"the error does not name the file: {text}")
    if PARTIAL_SUFFIX in text:
        raise Broken(f"the error names a temporary file: {text}")
    return text


def _make_failing(trouble: Trouble) -> tuple[Callable[[Call], Any], Callable[[], bool]]:
    """Return an observer that makes calls fail, and a function that returns whether one failed."""
    if trouble.kind == "full":
        return _make_full(trouble.number)
    calls_left, happened = trouble.number, False
    name, _, repetition = trouble.how.partition(" ")
    watching = {trouble.call} if trouble.call else {*CHANGING}

    def make(call: Call) -> Any:
        nonlocal calls_left, happened
        if call.name not in watching:
            return call.make()
        calls_left -= 1
        if calls_left >= 0 or (calls_left < -1 and repetition != "always"):
            return call.make()
        happened = True
        # `close` releases the descriptor even if it fails.
        if repetition == "done" or call.name == "close":
            call.make()
        if trouble.kind == "interrupted":
            raise KeyboardInterrupt
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number), *_path(call))

    return make, lambda: happened


def _path(call: Call) -> tuple[str, ...]:
    """Return the path that the error of the operating system would have, if any."""
    paths = [os.fspath(arg) for arg in call.args if isinstance(arg, str | os.PathLike)]
    return () if not paths else (paths[0],)


def _make_full(room: int) -> tuple[Callable[[Call], Any], Callable[[], bool]]:
    """Return an observer that fails writes beyond so many bytes, and whether it did."""
    happened = False

    def make(call: Call) -> Any:
        nonlocal room, happened
        if call.name not in {"pwrite", "posix_fallocate", "copy_file_range"}:
            return call.make()
        nbytes = len(call.args[1]) if call.name == "pwrite" else call.args[2]
        if nbytes <= room:
            done = call.make()
            room -= nbytes
            return done
        happened = True
        if call.name == "pwrite" and room:  # as much as there is room for
            fileno, data, offset = call.args
            done = os.write(_seek(fileno, offset), memoryview(data)[:room])
            room = 0
            return done
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return make, lambda: happened


def _open_for_writing(root: Path) -> list[str]:
    """List the files of a folder that this process has open for writing; empty except on Linux."""
    names = []
    for link in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # the descriptor that lists them
            name = os.readlink(link)  # noqa: PTH115  the name may have a suffix
            flags = int(Path("/proc/self/fdinfo", link.name).read_text().split()[3], 8)
            if name.startswith(os.fspath(root)) and flags & (os.O_WRONLY | os.O_RDWR):
                names.append(name)
    return names


@contextlib.contextmanager
def _no_surprises() -> Iterator[None]:
    """Turn unraisable errors, and all warnings but `CheckpointWarning`, into errors."""
    errors: list[str] = []

    def record(raised: Any) -> None:
        if raised.exc_type is not KeyboardInterrupt:
            errors.append(repr(raised.exc_value))

    hook, sys.unraisablehook = sys.unraisablehook, record
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", CheckpointWarning)
            yield
    finally:
        sys.unraisablehook = hook
    if errors:
        raise Broken(f"an error that nobody sees: {errors[0]}")


# --- folders that vanish --------------------------------------------------------------------------


def _vanish(case: Case, root: Path, folder: Path, trouble: Trouble) -> bool:
    """Write into a folder that vanishes at a call; return whether it did."""
    calls_left, moved = trouble.number, root / "moved"

    def make(call: Call) -> Any:
        nonlocal calls_left
        if call.name in CHANGING:
            calls_left -= 1
            if calls_left == -1:
                folder.rename(moved)
                if trouble.how == "replaced":
                    folder.mkdir()
                if trouble.how == "removed":
                    shutil.rmtree(moved)
        return call.make()

    try:
        _error_of(case, root, folder, make)
        if calls_left >= 0:
            return False
        if trouble.how == "removed":
            case.begin(root)  # restore the old files
            return True
        state, names = case.state(moved), sorted(files(folder))
        # If the folder vanished before the temporary file was made, all of it is in the new folder.
        if names and (names != sorted(case.new) or state != "old"):
            raise Broken(f"the folder that took its place has {names}; the other is {state}")
    finally:
        if moved.exists():
            shutil.rmtree(folder, ignore_errors=True)
            moved.rename(folder)
    return True
