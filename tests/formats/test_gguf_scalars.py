"""GGUF files of tensors without axes are read by the reader of llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

import xckpt
from xckpt import formats
from xckpt.elements import stored_dtype

if TYPE_CHECKING:
    from pathlib import Path

TYPES = formats.get("gguf").can.types
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (2, 0), (2, 3), (2, 1, 3, 5))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*TYPES, "float8_e8m0fnu", "bool"])
def test_gguf_reads_every_type_and_rank(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.ones(shape, "f4").astype(stored_dtype(dtype))
    xckpt.save({"x": values, "after": np.full(3, 7, "f4")}, tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert tuple(map(int, tensors["x"].shape)) == shape[::-1]
    assert tensors["after"].data.tolist() == [7, 7, 7]
    saved = xckpt.open(tmp_path / "m.gguf")["x"]
    np.testing.assert_array_equal(saved.values, values.astype(saved.dtype))


def test_a_bfloat16_without_axes_becomes_float32(tmp_path: Path) -> None:
    """gguf takes the bytes of BF16 along the last axis, and fails without one."""
    scalar = np.asarray(3, stored_dtype("bfloat16"))
    xckpt.save({"x": scalar}, tmp_path / "m.gguf")
    saved = xckpt.open(tmp_path / "m.gguf")["x"]
    assert saved.encoding["stored_dtype"] == "float32"
    assert saved.values == 3
    with pytest.raises(xckpt.UnsupportedError, match=r"astype"):
        xckpt.save({"x": scalar}, tmp_path / "n.gguf", cast="never")
