"""Fixtures that all tests share, and the golden files."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import dask
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fresh import FreshProcesses
from tests.golden.archives import golden_folder
from xckpt import formats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

# Machines that run tests are noisy: the time of one example means nothing. A change is tried on
# the same examples everywhere; `HYPOTHESIS_PROFILE=search` looks for new ones.
settings.register_profile("xckpt", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "xckpt")
settings.load_profile(_PROFILE)

# Tests write some hundred thousand small files: into memory, where there is room for them, since
# a disk takes longer for that than most tests for their work. The variable TMPDIR overrides this.
_MEMORY = Path("/dev/shm")  # noqa: S108  pytest makes a folder in it that nobody else can write to
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= 8 << 30:
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)  # of processes that are started too

# Files with expected values and malformed files, in a folder for each format.
GOLDEN = golden_folder()


@given(st.none())
def _register_generator(_: None) -> None:
    """Have hypothesis make its generator."""


def pytest_collection_finish() -> None:
    """Have the collector look no more at what was loaded and collected: all of it stays."""
    # The lowest version of hypothesis does not find the owner of a generator among frozen objects.
    _register_generator()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # and at the rest not after every few arrays


@pytest.fixture(autouse=True, scope="session")
def apart_from_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep headers of remote files out of the user's cache; wait for no network and no disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XCKPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        # No option shortens the pauses before repeated requests: hundreds of tests would wait.
        patch.setattr("xckpt.storage.requests._FIRST_PAUSE", 0.001)
        patch.setattr("os.fsync", _not_waiting)
        patch.setenv("COLUMNS", "120")  # whatever the terminal, or what xdist takes for one
        if _PROFILE == "xckpt" and find_spec("hypothesis.internal.conjecture.providers"):
            # It would draw constants of all loaded modules, and so depend on other tests.
            name = "hypothesis.internal.conjecture.providers.is_local_module_file"
            patch.setattr(name, lambda _: False, raising=False)
        yield


_fsync = os.fsync


def _not_waiting(fileno: int) -> None:
    """Replace `os.fsync`; tests of durability record the calls instead."""
    os.fstat(fileno)  # which refuses what is not open


@pytest.fixture
def to_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the disk as users do."""
    monkeypatch.setattr("os.fsync", _fsync)


@pytest.fixture
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of whose files the system keeps in memory what it likes to."""
    monkeypatch.setattr("os.fsync", _fsync)
    disk = "/var/tmp" if tempfile.gettempdir() == str(_MEMORY) else None  # noqa: S108  the same
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        yield Path(folder)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets seconds pass at once, for what is trusted for a while."""
    clock, shifts = time.monotonic, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock() + sum(shifts))
    return shifts.append


@pytest.fixture
def in_this_thread() -> Iterator[None]:
    """Compute thousands of small arrays without waking a thread for each of them."""
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture(scope="session")
def fresh() -> Iterator[FreshProcesses]:
    """Return what runs code in processes that have imported neither xckpt nor xarray nor dask."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    with FreshProcesses() as processes:
        yield processes


@pytest.fixture(scope="session")
def golden() -> Path:
    """Return the folder of golden files."""
    return GOLDEN


def golden_files(pattern: str, with_suffix: str | None = None) -> Sequence[Path]:
    """List golden files as parameters of a test; without any, raise.

    Only those in folders with the name of a format, and where a pattern is for all of them, of one
    that is written; with `with_suffix`, only those next to which a file with that suffix lies.
    """
    names = [
        name
        for name in formats.names()
        if not pattern.startswith("*") or formats.get(name).can.types
    ]
    paths = sorted(
        path
        for path in GOLDEN.glob(pattern)
        if path.relative_to(GOLDEN).parts[0] in names
        and (with_suffix is None or path.with_suffix(with_suffix).exists())
    )
    if not paths:
        raise FileNotFoundError(f"no golden file matches {pattern!r} in {GOLDEN}")
    return paths


def with_peak_memory(function: Callable[[], T]) -> tuple[T, int]:
    """Call a function; return its result, and the most bytes that were allocated meanwhile."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def calls_of(function: Callable[[], object], events: Sequence[str] = ("call",)) -> int:
    """Count the functions of Python, or others, that are called in this thread."""
    count = 0

    def profile(_frame: object, event: str, _value: object) -> None:
        nonlocal count
        count += event in events

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
