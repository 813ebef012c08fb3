"""Reading into existing memory, from every kind of source."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from xckpt.errors import FileChangedError, FormatError
from xckpt.storage import open_source

if TYPE_CHECKING:
    from pathlib import Path

DATA = bytes(range(256)) * 40


@pytest.mark.parametrize("kind", ["path", "no maps", "bytes", "object"])
def test_read_into_fills_exactly_the_given_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    location: Any = {"bytes": DATA, "object": io.BytesIO(DATA)}.get(kind, path)
    source = open_source(location, mmap=kind != "no maps")
    buffer = np.full(1000, 255, np.uint8)
    source.read_into([77], buffer[10:500].data)
    assert buffer[10:500].tobytes() == DATA[77:567]
    assert (buffer[:10] == 255).all()
    assert (buffer[500:] == 255).all()
    with pytest.raises(FormatError):
        source.read_into([len(DATA) - 5], buffer.data)


def test_a_file_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    source = open_source(path)
    path.write_bytes(DATA[:100])
    with pytest.raises(FileChangedError):
        source.read_into([0], memoryview(bytearray(200)))
