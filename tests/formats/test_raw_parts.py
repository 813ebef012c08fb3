"""One part of a file that was cut into several names the remedy: joining all parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import xckpt
from tests.formats import torch_files
from tests.formats.gguf_files import gguf_file
from tests.formats.safetensors_files import entry, safetensors_file

if TYPE_CHECKING:
    from pathlib import Path

DATA = np.arange(64, dtype="f4").tobytes()
FILES = {
    "gguf": gguf_file({}, [("v", [64], 0, 0), ("w", [64], 0, 256)], DATA + DATA),
    "safetensors": safetensors_file({"w": entry("F32", [64], 0, 256)}, DATA),
    "pt": torch_files.checkpoint({"w": np.arange(64, dtype="f4")}),
}
ENDINGS = (".part1of2", ".part1", ".partaa", "-split-a", "-split-aa", ".part-a")


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("number", [0, 1], ids=["first", "second"])
def test_each_part(kind: str, ending: str, number: int, tmp_path: Path) -> None:
    data = FILES[kind]
    at = len(data) - 100
    path = tmp_path / f"model.{kind}{ending}"
    path.write_bytes((data[:at], data[at:])[number])
    if kind != "pt" and not number:
        with pytest.warns(xckpt.CheckpointWarning, match=f"one part of 'model.{kind}'"):
            ds = xckpt.open(path)
        assert kind != "gguf" or ds["v"].values[63] == 63
        with pytest.raises(xckpt.FormatError) as caught:
            ds["w"].values  # noqa: B018
    else:
        with pytest.raises(xckpt.FormatError) as caught:
            xckpt.open(path)
    assert f"cat model.{kind}" in str(caught.value.hint)


@pytest.mark.parametrize("kind", FILES)
def test_a_whole_file_opens_by_any_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{kind}.001"
    path.write_bytes(FILES[kind])
    assert xckpt.open(path)["w"].values[63] == 63
