from __future__ import annotations

import errno
import gc
import os
import threading
import weakref

import pytest

from xckpt.storage.limits import Pool


class Thing:
    pass


def test_the_least_recently_used_is_closed() -> None:
    pool: Pool[Thing] = Pool(limit=2)
    a, b = pool.get("a", Thing), weakref.ref(pool.get("b", Thing))
    pool.get("a", Thing)
    pool.get("c", Thing)
    gc.collect()
    assert len(pool) == 2
    assert pool.get("a", Thing) is a
    assert b() is None


def test_entries_in_use_outlive_eviction() -> None:
    pool: Pool[Thing] = Pool(limit=1)
    used = pool.get("a", Thing)
    pool.get("b", Thing)
    assert isinstance(used, Thing)
    assert pool.get("a", Thing) is not used


def test_entries_of_different_sizes() -> None:
    pool: Pool[bytes] = Pool(10, len)
    for key, size in {"a": 4, "b": 4, "c": 3}.items():
        pool.get(key, lambda size=size: bytes(size))  # type: ignore[misc]
    assert len(pool) == 2
    assert pool.get("b", bytes) == bytes(4)
    pool.discard("c")
    pool.get("d", lambda: bytes(6))
    assert len(pool) == 2
    # An entry larger than the pool is not held, and evicts all others.
    assert len(pool.get("e", lambda: bytes(11))) == 11
    assert len(pool) == 0
    pool.get("f", lambda: bytes(10))
    assert len(pool) == 1


def test_an_error_on_opening_leaves_nothing() -> None:
    pool: Pool[Thing] = Pool()
    with pytest.raises(ZeroDivisionError):
        pool.get("a", lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert len(pool) == 0
    pool.discard("a")


def test_threads_that_open_at_the_same_time_get_the_same() -> None:
    pool: Pool[Thing] = Pool()
    together = threading.Barrier(8)
    got: list[Thing] = []

    def slow() -> Thing:
        together.wait(10)  # all eight are opening
        return Thing()

    threads = [threading.Thread(target=lambda: got.append(pool.get("a", slow))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(map(id, got))) == 1


def test_opening_an_entry_does_not_block_others() -> None:
    pool: Pool[Thing] = Pool()

    def opener() -> Thing:
        thread = threading.Thread(target=pool.get, args=("b", Thing))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        return Thing()

    pool.get("a", opener)
    assert len(pool) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_starts_empty_and_waits_for_no_lock() -> None:
    pool: Pool[Thing] = Pool()
    pool.get("a", Thing)
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            locked.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(10)
    child = os.fork()
    if child == 0:
        count = len(pool)
        pool.get("b", Thing)
        os._exit(count)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    thread.join()
    assert len(pool) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_idle_files_are_closed_at_the_descriptor_limit(number: int) -> None:
    pool: Pool[Thing] = Pool()
    used, idle = pool.get("used", Thing), weakref.ref(pool.get("idle", Thing))

    def opener() -> Thing:
        if len(pool) or idle() is not None:
            raise OSError(number, os.strerror(number))
        return Thing()

    opened = pool.get("a", opener)
    assert len(pool) == 1
    assert pool.get("a", Thing) is opened
    assert isinstance(used, Thing)


def test_other_errors_are_errors_at_once() -> None:
    pool: Pool[Thing] = Pool()
    pool.get("kept", Thing)

    def opener() -> Thing:
        raise FileNotFoundError(errno.ENOENT, "no such file")

    with pytest.raises(FileNotFoundError):
        pool.get("a", opener)
    assert len(pool) == 1
