"""Errors for files of other kinds name the kind and a remedy."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import zipfile
from typing import TYPE_CHECKING

import pytest
import xarray as xr

import xckpt
from tests.contracts.every import declared
from xckpt import FormatError, formats

if TYPE_CHECKING:
    from pathlib import Path


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return file.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
FILES = {
    "Git LFS": (LFS, "git lfs pull"),
    "GGJT": (b"tjgg\x03\0\0\0" + bytes(32), "llama.cpp"),
    "pickle": (pickle.dumps({"w": [1.0]}), "savez"),
    "zip": (zipped("readme.txt"), "Extract"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(64) + b"_NCProperties", "h5netcdf"),
    "web page": (b"\n<!DOCTYPE html><html>404</html>", "Download"),
    "index of shards": (b'{"metadata": {}, "weight_map": {"w": "a"}}', ".index.json"),
    "JSON": (b'{"hidden_size": 64}', "configuration"),
    "gzip": (gzip.compress(b"x" * 100), "Decompress"),
    "empty": (b"", "copying"),
}


@pytest.mark.parametrize("kind", FILES)
def test_errors_name_the_content_and_a_remedy(kind: str, tmp_path: Path) -> None:
    content, advice = FILES[kind]
    path = tmp_path / "model"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=kind) as caught:
        xckpt.read_index(path)
    assert advice in str(caught.value.hint)
    assert str(path) in str(caught.value)
    for engine in formats.names():
        with pytest.raises(xckpt.CheckpointError, match=re.escape(str(path))):
            xr.open_dataset(path, engine=engine)


@pytest.mark.parametrize("format", formats.names())
def test_errors_name_another_engine_of_the_package(format: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(next(iter(declared(format).small_files().values())))
    for engine in formats.names():
        if engine == format:
            continue
        with pytest.raises(xckpt.CheckpointError) as caught:
            xr.open_dataset(path, engine=engine)
        assert f"engine={format!r}" in str(caught.value)
