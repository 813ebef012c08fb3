"""Calls of a user with a type checker: checked by mypy with all other files, never run.

``assert_type`` states the type of a result, and ``type: ignore`` marks a mistake; mypy complains if
the ignored call is valid.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type, cast

import numpy as np
import pandas as pd
import xarray as xr

import xckpt
from xckpt.accessor import CheckpointAccessor
from xckpt.datasets.stacking import stack_modules
from xckpt.datasets.tensors import find
from xckpt.plots import Plots
from xckpt.typing import DataArray, Dataset, DataTree
from xckpt.writing import Conversion, Report


def saved(ds: xr.Dataset, tree: xr.DataTree, path: Path, *, compute: bool) -> None:
    xckpt.save(ds, path)
    xckpt.save(tree, path, compute=compute)
    xckpt.save(tree, path, compute=False).compute()
    xckpt.save(ds["w"], "m.zt", encoding={"*": {"dtype": "bf16"}}, version="2", alignment=4096)
    xckpt.save(ds, "m.safetensors", max_shard_size="5GB", overwrite=True)
    xckpt.save(ds, path, max_shard_sise="5GB")  # type: ignore[call-arg]
    xckpt.save(ds, path, version=2)  # type: ignore[arg-type]
    xckpt.save(ds, path, cast="round")  # type: ignore[arg-type]
    xckpt.save({"w": np.zeros(3)}, path)
    xckpt.save([np.zeros(3)], path)  # type: ignore[arg-type]
    xckpt.append(ds, path, replace=True)


def converted(path: Path) -> None:
    done = xckpt.convert(path, "m.safetensors", tensors="*.w", max_shard_size=10**9)
    assert_type(done, Conversion)
    assert_type([(recast.stored, recast.exact) for recast in done.recasts], list[tuple[str, bool]])
    xckpt.convert(["a.safetensors", "b.safetensors"], "m.zt", storage_options={"anon": True})
    xckpt.convert(path, "m.zt", tensors=3)  # type: ignore[arg-type]
    assert_type(xckpt.verify(path, "ztensor", tensors=["*.w"]), Report)
    assert_type(xckpt.verify(b"PK").ok, bool)


def described(ds: xr.Dataset, tree: xr.DataTree, index: xckpt.Index) -> None:
    for obj in (ds, tree, index, ds["w"], "m.zt", Path("m.zt"), b"ZTEN1000"):
        assert_type(xckpt.stats(obj, quantiles=[0.5], dim="layers"), Dataset)
    assert_type(xckpt.histogram(ds, "*.w", bins=np.linspace(-1, 1), scale="linear"), Dataset)
    assert_type(xckpt.compare(tree, "m.zt", names={"a": "b"}), Dataset)
    assert_type(xckpt.spectrum("m.zt", "*.w", minus=ds), Dataset)
    xckpt.compare({"w": np.zeros(3)}, "m.zt")
    xckpt.stats(3)  # type: ignore[arg-type]
    xckpt.stats(ds, quantile=[0.5])  # type: ignore[call-arg]
    xckpt.histogram(ds, scale="log")  # type: ignore[arg-type]
    xckpt.compare(ds)  # type: ignore[call-arg]


def indexed() -> None:
    index = xckpt.read_index("s3://bucket/m.zt", storage_options={"anon": True})
    assert_type(index["lm_head"], xckpt.Tensor)
    assert_type(index["lm_head"].shape, tuple[int, ...])
    assert_type(sum(tensor.nbytes for tensor in index.values()), int)
    assert_type([name for name, tensor in index.items() if tensor.ndim == 2], list[str])


def chosen(ds: xr.Dataset, tree: xr.DataTree) -> None:
    """A Dataset of a Dataset, a tree of a tree."""
    assert_type(find(ds, "*.w", dtype="bf16", min_bytes="1 MiB"), xr.Dataset)
    assert_type(find(tree, dtype=[np.float32, "f16"]), xr.DataTree)
    assert_type(stack_modules(tree, "layers"), xr.DataTree)
    of_ds, of_tree = CheckpointAccessor(ds), CheckpointAccessor(tree)
    assert_type(of_ds.find("*.w"), xr.Dataset)
    assert_type(CheckpointAccessor(ds["w"]).find("*.w"), Dataset)
    assert_type(of_ds.stack(join="outer"), xr.Dataset)  # noqa: PD013
    assert_type(of_ds.unstack(), xr.Dataset)  # noqa: PD010
    assert_type(of_tree.find("*.w"), xr.DataTree)
    assert_type(of_tree.sel(layers=[0, 1]), xr.DataTree)
    assert_type(of_tree.isel(layers=-1), xr.DataTree)
    assert_type(of_ds["w"], DataArray)
    assert_type(of_tree.stats(exact_quantiles=True), Dataset)
    assert_type(of_tree.compare("m.zt", tensors="*.w"), Dataset)
    assert_type(of_ds.histogram(bins=100, scale="symlog", cache=False), Dataset)
    of_ds.save("m.zt", compute=False).compute()
    assert_type(of_ds.findings(), pd.DataFrame)
    of_ds.save("m.zt", overwite=True)  # type: ignore[call-arg]
    of_ds.histogram(bin=3)  # type: ignore[call-arg]


def opened(path: Path) -> None:
    """Results of xckpt have a typed accessor, and so have results of xarray operations on them."""
    ds = xckpt.open(path, tensors=["*.w"], stack="layers", storage_options=None, chunks={})
    assert_type(ds, Dataset)
    assert_type(xckpt.open({"w": np.zeros(3)}), Dataset)
    assert_type(ds.ckpt, CheckpointAccessor[Dataset])
    assert_type(ds.ckpt.find("*.q_proj.*").ckpt.stats().ckpt.table(), pd.DataFrame)
    assert_type(ds.isel(layers=0).ckpt.findings(), pd.DataFrame)
    assert_type(ds[["a", "b"]].ckpt.plot, Plots)
    assert_type(ds["w"], DataArray)
    assert_type(ds["w"].ckpt.stats(), Dataset)
    assert_type(ds.ckpt["w"].mean().ckpt.stats(), Dataset)
    assert_type(xckpt.open_steps("run/*.zt").ckpt.sel(layers=0), Dataset)
    assert_type(xckpt.join_optimizer(ds, ds).ckpt.format, str | None)
    xckpt.report(ds, "m.html", "other.zt", names="auto")
    xckpt.open(path, tensor="*.w")  # type: ignore[call-arg]
    xckpt.open(path, stack=3)  # type: ignore[arg-type]
    ds.ckpt.stat()  # type: ignore[attr-defined]
    ds.ckpt.plot.hist()  # type: ignore[attr-defined]
    xckpt.load(path)  # type: ignore[attr-defined]


def opened_by_xarray(path: Path) -> None:
    """A Dataset that xarray opened has a typed accessor after a cast."""
    ds = cast("Dataset", xr.open_dataset(path))
    assert_type(ds.ckpt.stats(), Dataset)
    tree = cast("DataTree", xr.open_datatree(path))
    assert_type(tree.ckpt.find("*.w").ckpt.unstack(), DataTree)  # noqa: PD010
    as_xarray: list[xr.Dataset] = [xckpt.stats(ds)]
    assert_type(CheckpointAccessor(as_xarray[0]), CheckpointAccessor[xr.Dataset])
