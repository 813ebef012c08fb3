"""The summary of an object shows what its statistics found, once there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xarray as xr

import xckpt
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def test_findings_are_shown_once_they_are_known(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m.zt", layers=3, width=64)
    ds = xr.open_dataset(path, engine="ztensor")
    before, html = repr(ds.ckpt), ds.ckpt._repr_html_()
    found = ds.ckpt.findings(ds.ckpt.stats(progress=False))
    assert set(found["rule"]) >= {"nan", "all_zero"}
    assert "nan" not in before
    assert "nan" in repr(ds.ckpt)
    assert "nan" in ds.ckpt._repr_html_()
    assert "nan" not in html
    assert "nan" not in repr(xr.open_dataset(path, engine="ztensor").ckpt)


def test_an_index_shows_itself_in_a_notebook(tmp_path: Path) -> None:
    index = xckpt.read_index(write_checkpoint(tmp_path / "m.zt", layers=3, width=64))
    assert "38 tensors" in index._repr_html_()


def test_other_objects_say_so_in_html() -> None:
    assert "&lt;Checkpoint: none&gt;" in xr.Dataset().ckpt._repr_html_()
