"""Local files that are about to be read: the kernel is advised to load the next bytes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from xckpt.errors import FileChangedError
from xckpt.storage import reading_ahead
from xckpt.storage.local import LocalSource

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
HELD = 64 * MIB


@pytest.fixture
def source(tmp_path: Path) -> LocalSource:
    path = tmp_path / "holes"
    with path.open("wb") as file:
        file.truncate(256 * MIB)
    return LocalSource(str(path))


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []

    def expect(_: LocalSource, offset: int, nbytes: int) -> None:
        assert nbytes
        ranges.append((offset, offset + nbytes))

    monkeypatch.setattr(LocalSource, "expect", expect)
    return ranges


def test_advice_stays_slightly_ahead_of_reading(
    source: LocalSource, advised: list[tuple[int, int]]
) -> None:
    memory = memoryview(bytearray(MIB))
    with reading_ahead((source, at, MIB) for at in range(0, 200 * MIB, MIB)):
        assert advised[-1][1] == HELD
        for at in range(0, 100 * MIB, MIB):
            source.read_into([at], memory)
            assert at + MIB <= advised[-1][1] <= at + HELD + 17 * MIB
    count = len(advised)
    source.read_into([100 * MIB], memory)
    assert len(advised) == count  # no reading was announced


def test_each_announced_byte_is_advised_once(
    source: LocalSource, advised: list[tuple[int, int]]
) -> None:
    announced = [(3, 20 * MIB), (100 * MIB, 50 * MIB), (90 * MIB, 5), (250 * MIB, 6 * MIB)]
    with reading_ahead([(source, *extent) for extent in announced]):
        for offset, nbytes in announced:
            source.read(offset, nbytes)
    starts = [(start, start + nbytes) for start, nbytes in announced]
    assert all(any(a <= start < stop <= b for a, b in starts) for start, stop in advised)
    assert sum(stop - start for start, stop in advised) == sum(nbytes for _, nbytes in announced)


def test_a_single_row_causes_no_advice(source: LocalSource, advised: list[tuple[int, int]]) -> None:
    with reading_ahead([(source, 5 * MIB, 4096)]):
        source.read(5 * MIB, 4096)
    assert advised == []


def test_advised_bytes_enter_the_page_cache(on_a_disk: Path) -> None:
    path = on_a_disk / "cold"
    path.write_bytes(os.urandom(3 * MIB))
    source = LocalSource(str(path))
    file = source.descriptor()
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("nothing can be asked for here")
    os.fsync(file.fileno)
    os.posix_fadvise(file.fileno, 0, 0, os.POSIX_FADV_DONTNEED)
    source.expect(0, 3 * MIB)
    deadline = time.monotonic() + 30
    while not all(is_cached(file.fileno, at) for at in range(0, 3 * MIB, 4096)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_cached(fileno: int, offset: int) -> bool:
    try:
        return os.preadv(fileno, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def test_a_missing_file_is_reported_by_the_read(source: LocalSource) -> None:
    source.close()
    os.truncate(source.name, 10)
    with reading_ahead([(source, 0, MIB), (source, MIB, MIB)]), pytest.raises(FileChangedError):
        source.read(0, MIB)
