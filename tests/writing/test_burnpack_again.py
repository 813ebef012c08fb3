"""Burnpack files that Burn itself would write are rewritten byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files

if TYPE_CHECKING:
    from pathlib import Path

FILES = golden_files("burnpack/*.bpk")
# Forms that Burn reads but does not write: other orders and layouts, or more bytes.
OTHERS = {"boundary_legacy_0", "cbor_reordered", "legacy_0.19", "trailing_bytes"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rewritten_files_are_identical(path: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dialect": "0.20"} if "0.20" in path.stem else {}
    xckpt.convert(path, tmp_path / "converted.bpk", **options)
    xckpt.save(xr.open_dataset(path), tmp_path / "saved.bpk", **options)
    for name in ("converted.bpk", "saved.bpk"):
        same = (tmp_path / name).read_bytes() == path.read_bytes()
        assert same == (path.stem not in OTHERS)
