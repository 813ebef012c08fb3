"""Progress has one meaning everywhere: ``f(done, total)``, in bytes, and one kind of bar."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.stats.checkpoints import settled
from xckpt.progress import Progress, report
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m.zt", layers=2, width=32)


def extra() -> xr.Dataset:
    return xr.Dataset({"extra": ("n", np.ones(1000, np.float32))})


CALLS: dict[str, Any] = {
    "stats": lambda path, progress: xckpt.stats(path, cache=False, progress=progress),
    "exact quantiles": lambda path, progress: xckpt.stats(
        path, cache=False, exact_quantiles=True, progress=progress
    ),
    "histogram": lambda path, progress: xckpt.histogram(path, cache=False, progress=progress),
    "compare": lambda path, progress: xckpt.compare(path, path, cache=False, progress=progress),
    "compare stored": lambda path, progress: xckpt.compare(
        xr.open_dataset(path), xr.open_dataset(path) * 1, cache=False, progress=progress
    ),
    "save": lambda path, progress: xckpt.save(
        xr.open_dataset(path) * 1, path.with_name("new.zt"), progress=progress
    ),
    "convert": lambda path, progress: xckpt.convert(
        path, path.with_name("new.safetensors"), progress=progress
    ),
    "append": lambda path, progress: xckpt.append(extra(), path, progress=progress),
    "verify": lambda path, progress: xckpt.verify(path, progress=progress),
}


@pytest.mark.filterwarnings("ignore::xckpt.errors.CheckpointWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_callback_gets_the_progress_and_the_total(
    path: Path, call: Callable[[Path, Any], object]
) -> None:
    calls: list[tuple[int, int]] = []
    call(path, lambda done, total: calls.append((done, total)))
    done, total = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert list(total) == sorted(total)
    assert all(a <= b for a, b in calls)
    assert done[-1] == total[-1] > 0


@pytest.mark.filterwarnings("ignore::xckpt.errors.CheckpointWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_bar_counts_bytes_with_their_unit(
    path: Path, call: Callable[[Path, Any], object], capsys: pytest.CaptureFixture[str]
) -> None:
    call(path, True)  # noqa: FBT003  as users give it
    assert "iB/s" in capsys.readouterr().err
    path.with_name("new.zt").unlink(missing_ok=True)
    path.with_name("new.safetensors").unlink(missing_ok=True)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_appears_only_in_long_interactive_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    streams = [_Terminal(), io.StringIO()]
    for stream in streams:
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(None, "counting", 10) as progress:
            progress.advance(10)
        assert stream.getvalue() == ""
        stop = time.monotonic() + 1  # twice as long as nothing is shown
        with Progress(None, "counting", 1 << 40) as progress:
            while "counting" not in stream.getvalue() and time.monotonic() < stop:
                progress.advance(1)
        assert ("counting" in stream.getvalue()) is stream.isatty()


def test_the_total_may_grow() -> None:
    calls: list[tuple[int, int]] = []
    with Progress(lambda done, total: calls.append((done, total)), "counting") as progress:
        for nbytes in (4, 2):
            progress.expect(nbytes)
            progress.advance(nbytes)
    assert calls == [(4, 4), (6, 6)]


def test_tasks_report_to_their_listener_by_name() -> None:
    calls: list[tuple[int, int]] = []
    with Progress(lambda done, total: calls.append((done, total)), "counting", 5) as progress:
        report(progress.name, 3)
    report(progress.name, 2)
    report("nobody", 1)
    assert calls == [(3, 5)]


def test_cached_results_are_complete_at_once(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, int]] = []
    settled(path)
    xckpt.stats(path, progress=False)
    xckpt.stats(path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 0)]
    xckpt.stats(path, progress=True)
    assert capsys.readouterr().err == ""
