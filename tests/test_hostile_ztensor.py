"""Damaged files, opened and computed: an error of ours or values, never anything else."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
import xarray as xr
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.formats.ztensor_files import (
    dense_v1,
    dense_v2,
    dense_v12,
    stored,
    v0_file,
    v1_file,
    v2_file,
    v12_file,
)


def dense_csr_and_zstd() -> dict[str, bytes]:
    """Make a small file of each version, with compressed and sparse tensors where it has them."""
    data = np.arange(6, dtype="<f4").tobytes()
    packed = zstandard.compress(data)
    entry = {"name": "w", "dtype": "float32", "shape": [2, 3], "layout": "dense"}
    components = {
        "values": stored(data[:8]),
        "indices": stored(np.array([1, 2], "<u8").tobytes()),
        "indptr": stored(np.array([0, 1, 2], "<u8").tobytes()),
    }
    csr = {"dtype": "float32", "shape": [2, 3], "format": "sparse_csr", "components": components}
    return {
        "0.1": v0_file({**entry, "data": stored(data, encoding="raw")}),
        "1.0": v1_file(
            {
                "w": dense_v1(data, [2, 3], "float32"),
                "s": csr,
                "z": dense_v1(packed, [2, 3], "float32", encoding="zstd"),
            }
        ),
        "1.2": v12_file({"w": dense_v12(data, [2, 3], "f32")}),
        "2": v2_file({"w": dense_v2(data, [2, 3], "f32")}),
    }


FILES = dense_csr_and_zstd()


def survives(data: bytes) -> None:
    """Open and compute, tolerating only errors of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xckpt.CheckpointWarning)
        with contextlib.suppress(xckpt.CheckpointError):
            ds = xr.open_dataset(data, engine="ztensor", verify=True)
            # Compute small tensors only: a size that fits the file may still be huge when sparse.
            small = [name for name, v in ds.variables.items() if v.nbytes < 1 << 20]
            ds[small].compute(scheduler="sync")


@pytest.mark.parametrize("version", FILES)
def test_truncated_at_every_byte(version: str) -> None:
    data = FILES[version]
    for length in range(0, len(data), max(1, len(data) // 2000)):
        if (version, length) == ("0.1", 16):
            continue  # a head and eight zeros are a file without tensors
        with pytest.raises(xckpt.CheckpointError):
            xr.open_dataset(data[:length], engine="ztensor")


@pytest.mark.parametrize("version", FILES)
@given(data=st.data())
def test_any_byte_changed(version: str, data: st.DataObject) -> None:
    content = bytearray(FILES[version])
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= data.draw(st.integers(1, 255))
    survives(bytes(content))


@pytest.mark.parametrize("version", ["0.1", "1.0", "1.2"])
def test_every_bit_of_the_manifest_flipped(version: str) -> None:
    content = FILES[version]
    start = content.index(b"name") if version == "0.1" else content.index(b"version")
    for position in range(start, len(content)):
        for bit in (0, 3, 7):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            survives(bytes(changed))
