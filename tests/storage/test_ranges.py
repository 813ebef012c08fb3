from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sources import CountingSource
from xckpt.errors import FormatError

DATA = bytes(i * 7 % 251 for i in range(1000))
RANGES = st.lists(
    st.tuples(st.integers(0, 900), st.integers(0, 100)),
    max_size=20,
)


class Skipping(CountingSource):
    """Bytes of which some are cheaper to read than to skip."""

    def __init__(self, gap: int, data: bytes = DATA) -> None:
        super().__init__(data)
        self.gap = gap

    @property
    def worth_skipping(self) -> int:
        return self.gap


@given(RANGES, st.integers(1, 200))
def test_ranges_come_in_the_requested_order(ranges: list[tuple[int, int]], gap: int) -> None:
    source = Skipping(gap)
    pieces = source.read_ranges(ranges)
    assert [bytes(piece) for piece in pieces] == [DATA[a : a + n] for a, n in ranges]


@given(RANGES, st.integers(1, 200))
def test_merged_ranges_are_disjoint_and_ordered(ranges: list[tuple[int, int]], gap: int) -> None:
    reading = Skipping(gap)
    reading.read_ranges(ranges)
    assert all(b - (a + n) > gap for (a, n), (b, _) in pairwise(reading.reads))
    assert len(reading.reads) <= len(ranges)


def test_near_ranges_are_one_request() -> None:
    source = Skipping(5)
    source.read_ranges([(100, 10), (0, 10), (115, 10), (5, 10)])
    assert source.reads == [(0, 15), (100, 25)]


def test_merged_ranges_have_a_maximum_size() -> None:
    source = Skipping(1, bytes(110 << 20))
    ranges = [(0, 60 << 20), (60 << 20, 4097), (70 << 20, 4096), ((70 << 20) + 10, 5)]
    ranges.insert(2, ((60 << 20) + 4097, 9 << 20))
    pieces = source.read_ranges(ranges)
    assert [len(piece) for piece in pieces] == [nbytes for _, nbytes in ranges]
    assert source.reads == [(0, (60 << 20) + 4097), *ranges[2:4]]


def test_an_invalid_range_reads_nothing() -> None:
    source = CountingSource(DATA)
    with pytest.raises(FormatError, match="1000"):
        source.read_ranges([(0, 10), (995, 10)])
    assert source.reads == []
