"""Arguments are checked before reading; paths may be URLs with options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import xarray as xr

import xckpt
from tests.stats.checkpoints import model, settled, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return settled(write(tmp_path / "m.safetensors", model()))


@pytest.mark.parametrize(
    ("call", "options", "error", "match"),
    [
        ("stats", {"quantiles": 0.5}, TypeError, "quantiles are a sequence"),
        ("stats", {"quantiles": "0.5"}, TypeError, "quantiles are a sequence"),
        ("stats", {"quantiles": ["0.5"]}, TypeError, "a quantile is a number"),
        ("stats", {"quantiles": [True]}, TypeError, "a quantile is a number"),
        ("stats", {"quantiles": [50]}, ValueError, "between 0 and 1, unlike 50"),
        ("stats", {"quantiles": [float("nan")]}, ValueError, "between 0 and 1"),
        (
            "stats",
            {"dim": "d33"},
            ValueError,
            r"the dimension 'd33'; similar.*'d32'",
        ),
        ("histogram", {"bins": 0}, ValueError, "at least one bin"),
        ("histogram", {"bins": 10.5}, TypeError, "number of bins or a sequence of their edges"),
        ("histogram", {"bins": "ten"}, TypeError, "number of bins or a sequence of their edges"),
        ("histogram", {"bins": [1, 1]}, ValueError, "ascend"),
        ("histogram", {"bins": [[1, 2], [3, 4]]}, ValueError, "ascend"),
        ("histogram", {"scale": "log"}, ValueError, "'symlog' or 'linear', not 'log'"),
        ("compare", {"names": "x"}, TypeError, "names takes"),
        ("compare", {"names": ("(", "x")}, ValueError, "regular expression"),
        ("compare", {"tensors": 3}, TypeError, "tensors takes"),
    ],
)
def test_mistakes_raise_before_reading(
    path: Path, read: list[int], call: str, options: Any, error: type[Exception], match: str
) -> None:
    arguments = (path,) if call == "compare" else ()
    with pytest.raises(error, match=match):
        getattr(xckpt, call)(path, *arguments, **options)
    assert read == []


def test_a_filter_that_compares_nothing_warns(path: Path) -> None:
    with pytest.warns(xckpt.CheckpointWarning, match=r"matches no tensor.*similar names: 'embed'"):
        assert not xckpt.compare(path, path, tensors="embd").data_vars


def test_urls_with_options(path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/calls/m.safetensors", path.read_bytes())
    url, options = (
        "simplecache::memory://calls/m.safetensors",
        {"memory": {"skip_instance_cache": True}},
    )
    remote = xckpt.stats(url, storage_options=options)
    assert remote.drop_attrs().identical(xckpt.stats(path).drop_attrs())
    assert xckpt.histogram(url, bins=5, storage_options=options).sizes["bin"] == 5
    same = xckpt.compare(url, path, storage_options=options)
    assert set(same.ckpt.table()["status"]) == {"same"}
    with xr.open_dataset(path, engine="safetensors") as ds:
        assert xckpt.compare(ds, url, storage_options=options).data_vars
        with pytest.raises(TypeError, match=r"pass them to xr\.open_dataset"):
            xckpt.stats(ds, storage_options=options)
        with pytest.raises(TypeError, match=r"pass them to xr\.open_dataset"):
            xckpt.compare(ds, ds, storage_options=options)
