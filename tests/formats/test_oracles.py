"""Flax and onnx read the same values: ``pip install --editable '.[test,oracles]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.conftest import golden_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tree by their joined paths."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(tree, np.ndarray):
        yield "/".join(path) or "tensor", tree


@pytest.mark.parametrize("path", golden_files("flax/*.msgpack"), ids=lambda path: path.stem)
def test_flax_restores_the_same_values(path: Path) -> None:
    serialization = pytest.importorskip("flax.serialization")
    try:
        expected = dict(leaves(serialization.msgpack_restore(path.read_bytes())))
        ds = xckpt.open(path, decode=False)
    except (xckpt.FormatError, TypeError):
        pytest.skip("one of the two refuses it")
    except xckpt.CheckpointWarning:
        pytest.skip("something in it is left out")
    for name, values in expected.items():
        if values.dtype.name == str(ds.variables[name].dtype) and path.stem != "dtype_aliases":
            assert ds.variables[name].values.tobytes() == values.tobytes()


@pytest.mark.parametrize("path", golden_files("onnx/*.onnx"), ids=lambda path: path.stem)
def test_onnx_reads_the_same_values(path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = pytest.importorskip("onnx.numpy_helper")
    ds = xckpt.open(path, decode=False)
    for tensor in onnx.load(path).graph.initializer:
        if tensor.data_type != onnx.TensorProto.STRING and not tensor.HasField("segment"):
            assert ds[tensor.name].values.tobytes() == helper.to_array(tensor).tobytes()
