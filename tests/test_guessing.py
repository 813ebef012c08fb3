"""``xarray.open_dataset`` without ``engine=`` finds the right one, by content, or none."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from xckpt import backend, formats

if TYPE_CHECKING:
    from pathlib import Path

# Files that are no checkpoints, or those of another file: raw data, and shards without names.
OTHER_SUFFIXES = {".json", ".npz", ".txt", ".md", ".shard"}
FILES = [
    path
    for name in ("burnpack", "gptrs", "mlcp", "primitiv", "ztensor")
    for pattern in (f"{name}/*", f"{name}/ckpt/*", f"{name}/odd/*")
    for path in golden_files(pattern)
    if hasattr(path, "is_file") and path.is_file()
]
CHECKPOINTS = [
    path
    for path in FILES
    if path.name.endswith(".metadata.json")
    or (path.suffix not in OTHER_SUFFIXES and not path.name.startswith("bin_"))
] or golden_files("absent")
OTHERS = [path for path in FILES if path.suffix in OTHER_SUFFIXES - {".shard"}]
ENGINES = [
    engine()
    for engine in vars(backend).values()
    if isinstance(engine, type) and hasattr(engine, "format")
]


def format_of(path: Path) -> str:
    """Name the format by the folder that a golden file is in."""
    return path.parts[path.parts.index("golden") + 1]


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_checkpoint_opens_by_its_content(path: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xckpt.CheckpointWarning)
        ds = xr.open_dataset(path)
        assert ds.encoding["format"] == format_of(path)
        if path.suffix != ".json":  # one that needs its neighbours
            bare = tmp_path / "without_suffix"
            bare.symlink_to(path)
            assert xr.open_dataset(bare).encoding["format"] == format_of(path)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_one_engine_alone_takes_a_checkpoint(path: Path) -> None:
    takers = [engine.format for engine in ENGINES if engine.guess_can_open(path)]
    assert takers == [format_of(path)]


def test_there_is_an_engine_for_each_format() -> None:
    assert sorted(engine.format for engine in ENGINES) == sorted(formats.names())


def test_what_is_no_checkpoint_is_left_to_others() -> None:
    for path in OTHERS:
        if path.name.endswith(".metadata.json"):
            continue
        assert not [engine.format for engine in ENGINES if engine.guess_can_open(path)], path
