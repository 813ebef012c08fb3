"""Background jobs: the newest one wins, and no thread is left behind."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING

from xckpt.notebook.explorer import Background

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = 20.0  # seconds after which a test has failed


def test_a_job_runs_in_another_thread() -> None:
    errors: list[Exception] = []
    background = Background(errors.append)
    let_go, done = Event(), []

    def job(check: Callable[..., None]) -> None:
        assert let_go.wait(LONG)
        check("any", "arguments")
        done.append(True)

    background.start(job)
    assert not background.wait(0.01)
    let_go.set()
    assert background.wait(LONG)
    assert done == [True]
    assert errors == []


def test_a_new_job_stops_the_one_before() -> None:
    errors: list[Exception] = []
    background = Background(errors.append)
    started, replaced, done = Event(), Event(), []

    def first(check: Callable[..., None]) -> None:
        started.set()
        assert replaced.wait(LONG)
        check()
        done.append("first")

    background.start(first)
    assert started.wait(LONG)
    background.start(lambda _: done.append("second"))
    replaced.set()
    assert background.wait(LONG)
    assert done == ["second"]
    assert errors == []


def test_a_job_can_be_cancelled() -> None:
    errors: list[Exception] = []
    background = Background(errors.append)
    cancelled, done = Event(), []

    def job(check: Callable[..., None]) -> None:
        assert cancelled.wait(LONG)
        check()
        done.append(True)

    background.start(job)
    background.cancel()
    cancelled.set()
    assert background.wait(LONG)
    assert done == []
    assert errors == []


def test_errors_are_passed_on_unless_the_job_was_cancelled() -> None:
    errors: list[Exception] = []
    background = Background(errors.append)
    cancelled = Event()

    def broken(_: object) -> None:
        assert cancelled.wait(LONG)
        raise OSError("the disk is gone")

    cancelled.set()
    background.start(broken)
    assert background.wait(LONG)
    assert [str(error) for error in errors] == ["the disk is gone"]
    cancelled.clear()
    background.start(broken)
    background.cancel()
    cancelled.set()
    assert background.wait(LONG)
    assert len(errors) == 1


def test_waiting_without_a_job_returns_at_once() -> None:
    assert Background(print).wait()
