"""Modules work in any order of imports, and every result has ``.ckpt``."""

from __future__ import annotations

import pickle
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.accessor import CheckpointAccessor

if TYPE_CHECKING:
    from tests.fresh import FreshProcesses

SHAPES = {"embed": (4, 3), "h.0.w": (3, 3), "h.1.w": (3, 3)}

# One for each public function and each attribute of the accessor: an expression in a session that
# has imported xckpt alone. Where `xr` is used, xarray is imported after it.
FUNCTIONS = {
    "append": "xckpt.append({'new': [one]}, 'm.zt')",
    "compare": "xckpt.compare('m.npz', {'embed': one})",
    "convert": "xckpt.convert('m.npz', 'new.safetensors')",
    "extract_adapter": "xckpt.extract_adapter({'l.weight': one}, {'l.weight': one + 1}, 'new', 1,"
    " overwrite=True)",
    "findings": "xckpt.findings('m.npz')",
    "footprint": "xckpt.footprint('m.npz', context=10)",
    "histogram": "xckpt.histogram('m.npz', bins=10)",
    "join_optimizer": "xckpt.join_optimizer(xckpt.open('m.npz'), xckpt.open('optimizer.npz'))",
    "manifest": "xckpt.manifest('m.npz')",
    "open": "xckpt.open('m.npz')",
    "open_steps": "xckpt.open_steps('step-*.npz')",
    "read_index": "xckpt.read_index('m.npz')",
    "references": "xckpt.references('m.npz')",
    "report": "xckpt.report('m.npz', 'm.md')",
    "resize_adapter": "xckpt.resize_adapter('adapter', 'smaller', 1, overwrite=True)",
    "save": "xckpt.save({'w': one}, 'new.npz')",
    "spectrum": "xckpt.spectrum('m.npz')",
    "stats": "xckpt.stats('m.npz')",
    "table": "xckpt.table(xckpt.stats('m.npz'))",
    "verify": "xckpt.verify('m.npz')",
}
ATTRIBUTES = {
    "adapters": "ds.ckpt.adapters()",
    "by": "ds.ckpt.stats().ckpt.by('layer')",
    "by_base_id": "ds.ckpt.param_key('embed')",
    "compare": "ds.ckpt.compare('m.npz')",
    "explore": "ds.ckpt.explore()",
    "find": "ds.ckpt.find('h.*')",
    "findings": "ds.ckpt.findings()",
    "footprint": "ds.ckpt.footprint()",
    "structure": "ds.ckpt.structure()",
    "format": "ds.ckpt.format",
    "histogram": "ds.ckpt.histogram(bins=10)",
    "isel": "ds.ckpt.isel(h=0)",
    "manifest": "ds.ckpt.manifest()",
    "merge": "ds.ckpt.merge({'embed': ds['embed'].values})",
    "modules": "ds.ckpt.modules()",
    "names": "ds.ckpt.compare('m.npz').ckpt.names",
    "param_key": "ds.ckpt.param_key('embed')",
    "plain": "ds.ckpt.plain()",
    "plot": "ds.ckpt.plot.histogram('embed')",
    "report": "ds.ckpt.report('new.md')",
    "save": "ds.ckpt.save('other.npz')",
    "sel": "ds.ckpt.sel(h=1)",
    "spectrum": "ds.ckpt.spectrum()",
    "stack": "ds.ckpt.stack()",
    "stats": "ds.ckpt.stats()",
    "summary": "ds.ckpt.summary()",
    "table": "ds.ckpt.stats().ckpt.table()",
    "tree": "ds.ckpt.tree()",
    "unstack": "ds.ckpt.stack().ckpt.unstack()",
    "updates": "ds.ckpt.updates()",
}
OTHERS = {
    "a tensor": "xckpt.open('m.npz')['embed']",
    "a tensor by name": "xckpt.open('m.npz').ckpt['h.0.w']",
    "a Dataset in memory": "xr.Dataset({'w': ('x', [1.0])})",
    "an array in memory": "xr.DataArray([1.0], name='w')",
    "a tree in memory": "xr.DataTree(xr.Dataset({'w': ('x', [1.0])}))",
    "statistics in netCDF": "xr.open_dataset('stats.nc', engine='h5netcdf')",
    "statistics in netCDF, guessed": "xr.open_dataset('stats.nc')",
    "a pickle": "pickle.loads(Path('ds.pickle').read_bytes())",
    "open_dataset": "xr.open_dataset('m.npz')",
    "open_dataset with an engine": "xr.open_dataset('m.npz', engine='npz')",
    "open_datatree": "xr.open_datatree('m.npz')",
    "open_mfdataset": "xr.open_mfdataset(['m.npz'], engine='npz')",
}
CODE = """
import pickle
from pathlib import Path
if "xr" in {code!r}:
    import xarray as xr
if "one" in {code!r}:
    import numpy as np
    one = np.ones((4, 3))
result = {code}
if type(result).__module__.startswith("xarray"):
    assert type(result.ckpt).__name__ == "CheckpointAccessor"
    assert repr(result.ckpt)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imports")
    arrays = {name: np.ones(shape, "f4") for name, shape in SHAPES.items()}
    for name in ("m.npz", "m.zt", "step-1.npz", "step-2.npz"):
        xckpt.save(arrays, folder / name)
    moments = {f"state.{name}.exp_avg": array for name, array in arrays.items()}
    xckpt.save(moments, folder / "optimizer.npz")
    xckpt.stats(arrays).to_netcdf(folder / "stats.nc", engine="h5netcdf")
    tuned = {"l.weight": np.eye(4, dtype="f4")}
    xckpt.extract_adapter({"l.weight": np.ones((4, 4), "f4")}, tuned, folder / "adapter", 2)
    ds = xr.open_dataset(folder / "m.npz").load()
    (folder / "ds.pickle").write_bytes(pickle.dumps(ds))
    return folder


def test_every_public_function_and_attribute_is_tried() -> None:
    functions = [name for name in xckpt.__all__ if name.islower() and name != "__version__"]
    assert sorted(FUNCTIONS) == functions
    assert sorted(ATTRIBUTES) == sorted(
        name for name in vars(CheckpointAccessor) if not name.startswith("_")
    )


@pytest.mark.parametrize(
    ("checks", "before"),
    [
        (FUNCTIONS, "import xckpt"),
        (ATTRIBUTES, "import xckpt; ds = xckpt.open('m.npz')"),
        (OTHERS, "import xckpt"),
    ],
    ids=["functions", "attributes", "others"],
)
def test_importing_xckpt_alone(
    checks: dict[str, str], before: str, folder: Path, fresh: FreshProcesses
) -> None:
    """Each order runs in a new process."""
    pieces = {name: CODE.format(code=code) for name, code in checks.items()}
    assert fresh.run(pieces, folder, before) == {}


def test_modules_import_in_every_order(folder: Path, fresh: FreshProcesses) -> None:
    """All in one process for each order of imports."""
    checks = [*FUNCTIONS.values(), *ATTRIBUTES.values(), *OTHERS.values()]
    pieces = {}
    for order in permutations(["xckpt", "xarray", "dask"]):
        before = "".join(f"import {name}\n" for name in order)
        before += "assert xarray.Dataset().ckpt and xarray.DataTree().ckpt\n"
        before += "ds = xckpt.open('m.npz')"
        pieces[before] = "\n".join([before, *(CODE.format(code=code) for code in checks)])
    assert fresh.run(pieces, folder) == {}


def test_a_module_that_imports_xarray_may_be_the_first(folder: Path, fresh: FreshProcesses) -> None:
    """The accessor is loaded with xarray, while the module that imports xarray is incomplete."""
    root = Path(xckpt.__file__).parent
    paths = [path for room in ("accessor", "upstream") for path in root.glob(f"{room}/*.py")]
    names = [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in paths]
    assert "xckpt.upstream.xarray_variables" in names
    pieces = {name: f"import {name}, xarray; xarray.Dataset().ckpt" for name in names}
    assert fresh.run(pieces, folder) == {}


def test_xarray_alone_needs_no_import_of_xckpt(folder: Path, fresh: FreshProcesses) -> None:
    codes = [code for code in OTHERS.values() if code.startswith("xr.open") and "npz" in code]
    pieces = {code: f"import xarray as xr\nassert repr({code}.ckpt)" for code in codes}
    assert len(pieces) == 4
    assert fresh.run(pieces, folder) == {}


def test_xarray_is_unchanged_by_the_import(folder: Path, fresh: FreshProcesses) -> None:
    """Its loader, its source and its resources can be asked for, and it can be loaded again."""
    code = """
import importlib, inspect, sys
from importlib.resources import files
import xckpt
finders = list(sys.meta_path)
assert importlib.util.find_spec("xarray") is not None
import xarray
assert "register_dataset_accessor" in inspect.getsource(xarray)
assert type(xarray.__spec__.loader).__name__ == "SourceFileLoader"
assert files("xarray").joinpath("py.typed").is_file()
assert sys.meta_path == finders
importlib.reload(xarray)
importlib.reload(xckpt)
assert sys.meta_path == finders
assert xarray.Dataset().ckpt
"""
    assert fresh.run({"code": code}, folder) == {}


def test_without_xarray_the_error_is_pythons_own(folder: Path, fresh: FreshProcesses) -> None:
    code = """
import sys, xckpt
sys.path[:] = []
sys.path_importer_cache.clear()
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f)]
try:
    import xarray
except ModuleNotFoundError as error:
    assert error.name == "xarray"
else:
    raise AssertionError
"""
    assert fresh.run({"code": code}, folder) == {}


def test_several_threads_import_at_once(folder: Path, fresh: FreshProcesses) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from threading import Barrier
names = ["xckpt", "xarray", "xckpt.backend", "xckpt.statistics", "dask"] * 2
barrier = Barrier(len(names))
def load(name):
    barrier.wait()
    return import_module(name)
with ThreadPoolExecutor(len(names)) as threads:
    list(threads.map(load, names))
import xarray, xckpt
assert xckpt.stats
assert xarray.Dataset().ckpt
"""
    assert fresh.run({str(n): code for n in range(3)}, folder) == {}
