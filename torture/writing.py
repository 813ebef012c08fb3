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
from torture.trial import Tally, left
from xckpt.errors import CheckpointError, CheckpointWarning
from xckpt.storage.partial import PARTIAL_SUFFIX

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from torture.trial import Trial

__all__ = ["again", "run"]

#: What share of the time each kind of trouble has.
_SHARES = {"killed": 0.4, "fault": 0.3, "full": 0.1, "vanished": 0.1, "interrupted": 0.1}
_SAID = {
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
# Network file systems may say that something failed which the server has done.
_DONE = {"close", "fsync", "link", "rename", "replace", "unlink"}


class Trouble(NamedTuple):
    """What happens to a writer.

    Parameters
    ----------
    kind : str
        One of the kinds above.
    case : str
        Name of the case.
    number : int
        At which call it happens; of ``full``, how many bytes there is room for.
    call : str
        Only calls of this name are counted; all that change something where it is empty.
    how : str
        An error and when it comes (``"EIO once"``), or how a folder vanishes, or a kill comes.
    """

    kind: str
    case: str
    number: int
    call: str = ""
    how: str = ""


def run(trial: Trial) -> Iterator[Tally]:
    """Give the writers all the trouble there is time for."""
    import dask.threaded  # once, and not in each child

    with dask.config.set(scheduler="sync"):
        every = cases(trial.folder, trial.only)
        calls = {case.name: _calls(case, trial.folder) for case in every}
        gc.collect()
        gc.freeze()
        for kind, share in _SHARES.items():
            until = time.monotonic() + share * trial.seconds
            yield from _all(trial, kind, every, calls, until)


def again(path: Path) -> None:
    """Make the trouble of a failure once more."""
    trouble = Trouble(*json.loads(left(path)["trouble.json"]))
    with TemporaryDirectory() as name, dask.config.set(scheduler="sync"):
        root = Path(name)
        (case,) = cases(root, trouble.case)
        _try(case, root, trouble)


def _all(
    trial: Trial, kind: str, every: list[Case], calls: dict[str, list[str]], until: float
) -> Iterator[Tally]:
    by_name = {case.name: case for case in every}
    rng = trial.random(kind)
    count, failures = Counter[str](), Counter[str]()
    seconds: dict[str, float] = defaultdict(float)
    planned: list[Trouble] = []
    while time.monotonic() < until:
        # All of them in some order, then all of them in another one.
        planned = planned or _planned(kind, calls, rng)
        trouble = planned.pop()
        what = f"{trouble.kind}: {trouble.case.partition(' ')[0]}"
        start = time.monotonic()
        try:
            happened = _try(by_name[trouble.case], trial.folder, trouble)
        except Exception as error:  # noqa: BLE001  any is what is looked for
            happened = True
            failures[what] += 1
            told = {"trouble.json": json.dumps(trouble).encode()}
            trial.fail(what.replace(":", ""), told, error)
        seconds[what] += time.monotonic() - start
        count[what] += happened
    for what in sorted(count):
        yield Tally(what, count[what], failures[what], seconds[what], _SAID[kind])


def _calls(case: Case, root: Path) -> list[str]:
    """List the calls that a case makes when nothing happens."""
    seen: list[str] = []

    def count(call: Call) -> Any:
        seen.append(call.name)
        return call.make()

    folder = case.begin(root)
    with watched(root, count):
        case.run(folder)
    return seen


def _planned(kind: str, calls: dict[str, list[str]], rng: random.Random) -> list[Trouble]:
    """List all troubles of a kind, in some order."""
    found = []
    for case, seen in calls.items():
        changing = sum(name in CHANGING for name in seen)
        if kind == "killed":
            found += [Trouble(kind, case, number) for number in range(changing)]
            writes = range(seen.count("pwrite"))
            found += [Trouble(kind, case, number, "pwrite", "torn") for number in writes]
            moments = range(changing // 2)
            found += [Trouble(kind, case, rng.randrange(1000), "", "timed") for _ in moments]
        elif kind == "fault":
            found += [
                Trouble(kind, case, number, name, f"{error} {when}")
                for name, times in Counter(seen).items()
                for number in range(times)
                for error in _ERRORS[name]
                for when in ("once", "always", *(("done",) if name in _DONE else ()))
            ]
        elif kind == "full":
            found += [Trouble(kind, case, rng.randrange(60_000)) for _ in range(4)]
        else:
            hows = ("moved", "removed", "replaced") if kind == "vanished" else ("",)
            numbers = range(changing)
            found += [Trouble(kind, case, number, "", how) for number in numbers for how in hows]
    rng.shuffle(found)
    return found


def _try(case: Case, root: Path, trouble: Trouble) -> bool:
    """Make trouble while a case is written; return whether there was any, raise what it broke."""
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
    """Write in another process, which ends at a moment."""
    ahead = trouble.number

    def dying(call: Call) -> Any:
        nonlocal ahead
        if call.name in CHANGING and trouble.call in {"", call.name} and trouble.how != "timed":
            ahead -= 1
            if ahead < 0:
                if trouble.how == "torn":
                    fileno, data, offset = call.args
                    os.write(_at(fileno, offset), bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return call.make()

    child = os.fork()
    if child == 0:
        signal.alarm(_LONGEST)
        with _ending(), threads(), watched(root, dying):
            case.run(folder)
    if trouble.how == "timed":
        time.sleep(0.03 * trouble.number / 1000)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in {0, -signal.SIGKILL}:
        raise Broken("the writer hangs" if code == -signal.SIGALRM else f"it ended with {code}")
    return code != 0


def _at(fileno: int, offset: int) -> int:
    os.lseek(fileno, offset, os.SEEK_SET)
    return fileno


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """End this process with the block, without anything that its parent is to do."""
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
    """Write while calls fail, and hold what happens to what is promised."""
    observer, happened = _failing(trouble)
    before = Counter(_open_for_writing(root))
    text = _error_of(case, root, folder, observer)
    if not happened():
        return False
    if still := Counter(_open_for_writing(root)) - before:
        raise Broken(f"descriptors stay open: {[*still]}; {text}")
    state = case.state(folder)
    if text is None and state != "new":
        raise Broken("there was no error, and it is the old one")
    # What failed although it was done, and Ctrl-C, may be told when the new one is there.
    may_be_new = trouble.kind == "interrupted" or "done" in trouble.how
    if text is not None and state != "old" and not may_be_new:
        raise Broken(f"it is the new one, and there was an error: {text}")
    # Whoever removes a file can be interrupted as well: the next save does it.
    there = left_over(folder) if trouble.kind != "interrupted" else []
    if text is not None:  # whether another writer has the lock is not known after an error
        there = [name for name in there if not name.endswith("-lock")]
    # A save that was disturbed after the switch says so, and its files keep these names.
    main = case.path(folder).read_bytes() if state == "new" else b""
    there = [name for name in there if name.encode() not in main]
    if there and trouble.call != "unlink" and "always" not in trouble.how:
        raise Broken(f"it leaves {there} after {text}")
    return True


def _error_of(case: Case, root: Path, folder: Path, observer: Callable[[Call], Any]) -> str | None:
    """Write while somebody watches, and return the error; it names a file as users know it."""
    try:
        with _no_surprises(), watched(root, observer):
            case.write(folder, overwrite=case.overwrites)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except (OSError, CheckpointError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        return None
    known = {case.target, "source.zt", *case.old, *case.new}
    if not any(name in text for name in known):
        raise Broken(f"the error does not name the file: {text}")
    if PARTIAL_SUFFIX in text:
        raise Broken(f"the error names a temporary file: {text}")
    return text


def _failing(trouble: Trouble) -> tuple[Callable[[Call], Any], Callable[[], bool]]:
    """Return what makes the calls, and whether one has failed."""
    if trouble.kind == "full":
        return _full(trouble.number)
    ahead, happened = trouble.number, False
    name, _, when = trouble.how.partition(" ")
    watching = {trouble.call} if trouble.call else {*CHANGING}

    def make(call: Call) -> Any:
        nonlocal ahead, happened
        if call.name not in watching:
            return call.make()
        ahead -= 1
        if ahead >= 0 or (ahead < -1 and when != "always"):
            return call.make()
        happened = True
        # A descriptor is closed, whatever closing it says.
        if when == "done" or call.name == "close":
            call.make()
        if trouble.kind == "interrupted":
            raise KeyboardInterrupt
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number), *_path(call))

    return make, lambda: happened


def _path(call: Call) -> tuple[str, ...]:
    """Return the file that the operating system would name."""
    paths = [os.fspath(arg) for arg in call.args if isinstance(arg, str | os.PathLike)]
    return () if not paths else (paths[0],)


def _full(room: int) -> tuple[Callable[[Call], Any], Callable[[], bool]]:
    """Make all writes as if there were only so much space."""
    happened = False

    def make(call: Call) -> Any:
        nonlocal room, happened
        if call.name not in {"pwrite", "posix_fallocate", "copy_file_range"}:
            return call.make()
        wanted = len(call.args[1]) if call.name == "pwrite" else call.args[2]
        if wanted <= room:
            done = call.make()
            room -= wanted
            return done
        happened = True
        if call.name == "pwrite" and room:  # as much as there is room for
            fileno, data, offset = call.args
            done = os.write(_at(fileno, offset), memoryview(data)[:room])
            room = 0
            return done
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return make, lambda: happened


def _open_for_writing(root: Path) -> list[str]:
    """List the files of a folder that this process can write to, where the system says so."""
    found = []
    for link in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # the descriptor that lists them
            name = os.readlink(link)  # noqa: PTH115  the name may have a suffix
            flags = int(Path("/proc/self/fdinfo", link.name).read_text().split()[3], 8)
            if name.startswith(os.fspath(root)) and flags & (os.O_WRONLY | os.O_RDWR):
                found.append(name)
    return found


@contextlib.contextmanager
def _no_surprises() -> Iterator[None]:
    """Make errors of what nobody sees, and warnings that are not ours, errors of this process."""
    seen: list[str] = []

    def see(raised: Any) -> None:
        if raised.exc_type is not KeyboardInterrupt:
            seen.append(repr(raised.exc_value))

    hook, sys.unraisablehook = sys.unraisablehook, see
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", CheckpointWarning)
            yield
    finally:
        sys.unraisablehook = hook
    if seen:
        raise Broken(f"an error that nobody sees: {seen[0]}")


# --- folders that vanish --------------------------------------------------------------------------


def _vanish(case: Case, root: Path, folder: Path, trouble: Trouble) -> bool:
    """Write into a folder that is not there any more, from some call on."""
    ahead, moved = trouble.number, root / "moved"

    def make(call: Call) -> Any:
        nonlocal ahead
        if call.name in CHANGING:
            ahead -= 1
            if ahead == -1:
                folder.rename(moved)
                if trouble.how == "replaced":
                    folder.mkdir()
                if trouble.how == "removed":
                    shutil.rmtree(moved)
        return call.make()

    try:
        _error_of(case, root, folder, make)
        if ahead >= 0:
            return False
        if trouble.how == "removed":
            case.begin(root)  # what was there is gone with the folder
            return True
        state, there = case.state(moved), sorted(files(folder))
        # Before there was a file with a temporary name, everything may go to the other folder.
        if there and (there != sorted(case.new) or state != "old"):
            raise Broken(f"the folder that took its place has {there}; the other is {state}")
    finally:
        if moved.exists():
            shutil.rmtree(folder, ignore_errors=True)
            moved.rename(folder)
    return True
