"""Systems that allow few threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import xckpt
from xckpt import threads as xckpt_threads
from xckpt.scan import scanning

if TYPE_CHECKING:
    from pathlib import Path

STATED = "can't start new thread"


@pytest.mark.parametrize("allowed", [1, 2])
def test_statistics_use_the_threads_they_get(
    allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]  # statistics of one file are cached
    for path in paths:
        np.savez(path, *(np.full(9000, number, "f4") for number in range(50)))
    monkeypatch.setattr(scanning, "_TASK_NBYTES", 40000)
    monkeypatch.setattr(scanning, "cpu_count", lambda: 8)
    expected = xckpt.open(paths[0]).ckpt.stats()
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if thread.name == "xckpt-stats-thread":
            if len(started) == allowed:
                raise RuntimeError(STATED)
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    found = xckpt.open(paths[1]).ckpt.stats()
    assert len(started) == allowed
    assert found.equals(expected)


def test_without_any_thread_the_reason_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError(STATED)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with (
        pytest.raises(RuntimeError, match=STATED),
        xckpt_threads.Threads(2, "none") as threads,
    ):
        threads.submit(len, "")
