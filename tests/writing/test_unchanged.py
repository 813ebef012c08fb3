"""Unmodified objects are written as they were stored, as `convert` writes them."""

from __future__ import annotations

import pickle
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import xckpt
from tests.conftest import GOLDEN
from tests.formats.random_files import FILES
from tests.writing.attributes import MOVED
from tests.writing.saved import NO_SCALARS, OPTIONS
from xckpt import CheckpointError, CheckpointWarning, formats, read_index
from xckpt.formats.kit import DIMS_KEY
from xckpt.writing import convert, save
from xckpt.writing.fitting import choose_type

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from xckpt.index import Index, Tensor

WAYS: dict[str, Callable[[Path, str], Any]] = {
    "dataset": lambda path, engine: xr.open_dataset(path, engine=engine),
    "parts": lambda path, engine: xr.open_dataset(path, engine=engine, decode=False),
    "tree": lambda path, engine: xr.open_datatree(path, engine=engine),
    "tree of parts": lambda path, engine: xr.open_datatree(path, engine=engine, decode=False),
    "stacked": lambda path, engine: xr.open_dataset(path, engine=engine, stack=True),
    "stacked parts": lambda path, engine: xr.open_dataset(
        path, engine=engine, stack=True, decode=False
    ),
    "stacked tree": lambda path, engine: xr.open_datatree(path, engine=engine, stack=True),
    "stacked later": lambda path, engine: xr.open_dataset(path, engine=engine).ckpt.stack(),
    "tree stacked later": lambda path, engine: xr.open_datatree(path, engine=engine).ckpt.stack(),
    "unstacked": lambda path, engine: xr.open_dataset(
        path, engine=engine, stack=True
    ).ckpt.unstack(),
    "copied": lambda path, engine: xr.open_dataset(path, engine=engine).copy(deep=True),
    "pickled": lambda path, engine: pickle.loads(
        pickle.dumps(xr.open_dataset(path, engine=engine))
    ),
}
# Only the variable remembers how it was stored; computed values of others are dense.
COMPUTED: dict[str, Callable[[Path, str], Any]] = {
    "loaded": lambda path, engine: xr.open_dataset(path, engine=engine).load(),
    "loaded tree": lambda path, engine: xr.open_datatree(path, engine=engine).load(),
    "chunked": lambda path, engine: xr.open_dataset(path, engine=engine, chunks="auto").chunk(),
}
DENSE = {"gptrs", "mlcp", "primitiv", "safetensors"}
# Fields that are made anew in a checkpoint of MLCP.
ANEW = {
    *("payload", "metadata_json", "shards", "tensorInfos"),
    *("sharding", "shardingStrategy", "format", DIMS_KEY),
}


def written(write: Callable[[Path], object], path: Path) -> dict[str, bytes] | str:
    """Write a checkpoint to a new folder; return its files, or the error."""
    path.parent.mkdir()
    try:
        write(path)
    except CheckpointError as error:
        return f"{type(error).__name__} {error.rule}"
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


def check(source: Path, engine: str, folder: Path) -> None:
    """Save a file in all ways, and compare what was written with what it was made of."""
    options = OPTIONS.get(engine, {})
    if engine == "burnpack" and "0.20" in source.name:
        options = {"dialect": "0.20"}
    target = folder / "converted" / source.name
    expected = written(lambda path: convert(source, path, engine, **options), target)
    openers = WAYS | (COMPUTED if engine in DENSE else {})
    for number, (label, open_as) in enumerate(openers.items()):
        reopened = written(
            lambda path, open_as=open_as: save(open_as(source, engine), path, engine, **options),  # type: ignore[misc]
            folder / str(number) / source.name,
        )
        assert reopened == expected, label
    if isinstance(expected, dict):
        assert described(read_index(target)) == described(read_index(source))


def described(index: Index) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give all that a copy has in common with a file, wherever their bytes are."""
    tensors = {
        name: (
            _dtype(tensor, index.format),
            (tensor.shape or (1,)) if index.format in NO_SCALARS else tensor.shape,
            tensor.layout,
            tensor.order,
            tensor.dims if any(tensor.dims or ()) else None,
            tensor.path,
            tensor.quantization,
            set(tensor.parts),
            _plain(tensor.attrs, MOVED),
        )
        for name, tensor in index.tensors.items()
    }
    attrs = dict(index.attrs)
    if index.format != "mlcp":
        return tensors, _plain(attrs)
    custom = attrs.pop("customFields", None) or {}
    return tensors, _plain(attrs, ANEW) | _plain(custom, ANEW)


def _dtype(tensor: Tensor, format: str) -> str:
    # Manifests lack tensors that are shown as parts, or have a meaningless entry.
    if tensor.layout == "structural":
        return ""
    return choose_type(tensor.dtype, formats.get(format).can.types, "exact", tensor=tensor.name)


def _plain(attrs: Mapping[str, Any], anew: Container[str] = ()) -> dict[str, str]:
    """Give attributes so that NaN equals itself."""
    return {key: repr(value) for key, value in attrs.items() if key not in anew}


@pytest.mark.usefixtures("in_this_thread")
@pytest.mark.parametrize("engine", sorted(FILES))
@settings(max_examples=25)
@given(data=st.data())
def test_random_files(engine: str, data: st.DataObject) -> None:
    files = data.draw(FILES[engine])
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        source = Path(folder) / "source"
        source.mkdir()
        for name, content in files.items():
            (source / name).write_bytes(content)
        check(source / next(iter(files)), engine, Path(folder))


SOURCES = [
    path
    for engine in FILES
    for folder in ("", "ckpt/", "odd/")
    for path in sorted(GOLDEN.glob(f"{engine}/{folder}*"))
    if path.is_file() and not path.name.startswith("bin_")
    if path.suffix not in {".json", ".npz", ".txt", ".md", ".shard"}
    or path.name.endswith(".metadata.json")
]


@pytest.mark.usefixtures("in_this_thread")
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_golden_files(path: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        check(path, read_index(path).format, tmp_path)


def test_copies_that_the_user_made_are_no_shared_bytes(tmp_path: Path) -> None:
    weights = {name: np.full((4, 4), n, "f4") for n, name in enumerate(("table", "head", "q"))}
    xckpt.save(weights, tmp_path / "m.safetensors")
    ds = xckpt.open(tmp_path / "m.safetensors")
    tied = ds.assign({"head": ds["table"]})
    tied["q"] = tied["table"]
    xckpt.save(tied, tmp_path / "tied.safetensors")
    again = xckpt.open(tmp_path / "tied.safetensors")
    assert [again[name].values.max() for name in weights] == [0, 0, 0]
