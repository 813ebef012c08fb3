"""A file whose download did not end is named when it is opened and verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt

if TYPE_CHECKING:
    from pathlib import Path

OTHERS = (".part", ".crdownload", ".incomplete", ".downloading")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    xckpt.save(xr.Dataset({"w": ("n", np.ones(4, "f4"))}), path)
    return path


@pytest.mark.parametrize("by", ["its path", "its folder"])
@pytest.mark.parametrize("suffix", [".aria2", *OTHERS])
def test_opening_warns_once(model: Path, suffix: str, by: str) -> None:
    model.with_name(model.name + suffix).write_bytes(b"\0\1")
    with pytest.warns(xckpt.CheckpointWarning, match="download of 'model.safetensors'") as caught:
        ds = xckpt.open(model if by == "its path" else model.parent)
    assert len(caught) == 1
    assert suffix in str(caught[0].message)
    assert ds["w"].values.tolist() == [1] * 4


@pytest.mark.parametrize("by", ["its path", "its folder"])
def test_a_download_into_the_file_itself_is_damage(model: Path, by: str) -> None:
    model.with_name("model.safetensors.aria2").write_bytes(b"\0\1")
    path = model if by == "its path" else model.parent
    report = xckpt.verify(path)
    assert report.status == "damaged"
    assert "may have holes" in str(report)


@pytest.mark.parametrize("suffix", OTHERS)
def test_a_download_beside_the_file_is_a_warning(model: Path, suffix: str) -> None:
    """These programs rename the download once it is whole: the file may be an earlier one."""
    model.with_name(model.name + suffix).write_bytes(b"\0\1")
    report = xckpt.verify(model)
    assert report.ok
    assert "did not end" in str(report)


def test_downloads_of_other_files_do_not_count(model: Path) -> None:
    model.with_name("other.safetensors.aria2").write_bytes(b"\0\1")
    model.with_name("model.aria2").write_bytes(b"\0\1")
    assert xckpt.read_index(model).warnings == ()
    assert xckpt.verify(model).findings == ()
