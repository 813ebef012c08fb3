"""The garbage collector pauses while a large file is opened; new objects are old afterwards."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from xckpt.index import paused_collector

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    was_frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert gc.isenabled()
    yield
    (gc.freeze if was_frozen else gc.unfreeze)()


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


@pytest.mark.usefixtures("nothing_frozen")
class TestPausedCollector:
    def test_many_objects_are_not_traversed(self) -> None:
        before = collections()
        with paused_collector():
            lists: list[list[int]] = [[] for _ in range(150_000)]
        assert collections() == before
        old = {id(tracked) for tracked in gc.get_objects(generation=2)}
        assert id(lists[0]) in old
        assert id(lists[-1]) in old
        assert gc.isenabled()
        assert not gc.get_freeze_count()

    def test_the_last_pause_ends_it(self) -> None:
        with paused_collector():
            with paused_collector():
                pass
            assert not gc.isenabled()
        assert gc.isenabled()

    def test_few_objects_stay_young(self) -> None:
        with paused_collector():
            lists: list[list[int]] = [[] for _ in range(1000)]
        assert not any(obj is lists for obj in gc.get_objects(generation=2))

    def test_frozen_objects_stay_frozen(self) -> None:
        frozen: list[int] = []
        gc.freeze()
        with paused_collector():
            lists: list[list[int]] = [[] for _ in range(150_000)]
        assert lists
        assert not any(obj is frozen for obj in gc.get_objects())  # frozen objects are left out
