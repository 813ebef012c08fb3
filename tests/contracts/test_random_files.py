"""All entry points of the package recognise a file alike, even a damaged one."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.formats.random_files import FILES
from tests.sources import CountingSource
from xckpt import formats


@pytest.mark.parametrize("engine", sorted(FILES))
@given(data=st.data())
def test_only_one_format_recognises_a_file(engine: str, data: st.DataObject) -> None:
    name, content = next(iter(data.draw(FILES[engine]).items()))
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            at = data.draw(st.integers(0, min(len(damaged), 600) - 1))
            stop = at + data.draw(st.integers(0, 2))
            damaged[at:stop] = data.draw(st.binary(max_size=2))
    head, size = bytes(damaged[: formats.HEAD_BYTES]), len(damaged)
    knowing = [n for n in formats.names() if formats.get(n).detect(head, size, name)]
    reading = []
    for format_name in formats.names():
        with contextlib.suppress(xckpt.CheckpointError):
            reading.append(
                formats.get(format_name).read(CountingSource(bytes(damaged), name)).format
            )
    assert set(reading) <= set(knowing)
    assert len(knowing) <= 1
