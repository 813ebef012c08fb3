"""Promises about installing and importing: names, dependencies, entry points, costs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]

CONDA_NAMES = {
    "dask": "dask-core",
    "matplotlib": "matplotlib-base",
    "msgpack": "msgpack-python",
    "playwright": "playwright-python",
    "xxhash": "python-xxhash",
}
ONLY_FOR_DEVELOPERS = {"bench", "docs", "lint", "oracles", "testing"}
DEPRECATED_EXTRAS = {"http", "hub", "s3"}
HEAVY = {"dask", "fsspec", "ipywidgets", "ml_dtypes", "numba", "obstore", "sparse", "zstandard"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


# --- dependencies --------------------------------------------------------------------------------


def split(requirement: str) -> tuple[str, str]:
    """Split ``name[extra] >=1.2; marker`` into the name and its bound with the marker."""
    match = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?\s*([^\s;]*(?:; .*)?)", requirement)
    assert match is not None, requirement
    return match[1], match[2]


def python_requirements(project: dict[str, Any]) -> Iterator[str]:
    yield from project["dependencies"]
    for extra, requirements in project["optional-dependencies"].items():
        if extra not in ONLY_FOR_DEVELOPERS:
            yield from requirements


def conda_requirements() -> Iterator[str]:
    """Return the list items of environment.yml that have a bound, for conda and for pip."""
    lines = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()
    for line in lines:
        item = re.match(r"\s+- ([^#]*>=[^#]*)", line)
        if item is not None:
            yield item[1].strip()


def test_environment_and_pyproject_agree(project: dict[str, Any]) -> None:
    expected = {"python": project["requires-python"]}
    for requirement in python_requirements(project):
        name, bound = split(requirement)
        if name != project["name"]:
            expected[CONDA_NAMES.get(name, name)] = bound
    assert dict(map(split, conda_requirements())) == expected


def test_every_dependency_has_a_lower_bound_and_no_upper_one(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *(r for extra in extras for r in extra)]:
        name, bound = split(requirement)
        if name != project["name"]:
            assert re.fullmatch(r">=[\d.]+(; .*)?", bound), requirement


def test_the_extra_all_has_every_extra_of_users(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    users = sorted(extras.keys() - ONLY_FOR_DEVELOPERS - DEPRECATED_EXTRAS - {"all", "test"})
    assert extras["all"] == [f"{project['name']}[{','.join(users)}]"]


def test_deprecated_extras_install_their_successor(project: dict[str, Any]) -> None:
    for name in DEPRECATED_EXTRAS:
        assert project["optional-dependencies"][name] == ["xckpt[remote]"]


# --- entry points --------------------------------------------------------------------------------


def ours(group: str) -> list[EntryPoint]:
    return [e for e in entry_points(group=group) if e.value.startswith("xckpt.")]


def test_installed_entry_points_are_those_of_pyproject(project: dict[str, Any]) -> None:
    engines = {e.name: e.value for e in ours("xarray.backends")}
    assert engines == project["entry-points"]["xarray.backends"]
    scripts = {e.name: e.value for e in ours("console_scripts")}
    assert scripts == project["scripts"]


@pytest.mark.parametrize("group", ["xarray.backends", "console_scripts"])
def test_entry_points_load(group: str) -> None:
    points = ours(group)
    assert points
    for point in points:
        assert callable(point.load())


def test_xarray_lists_the_engines(project: dict[str, Any]) -> None:
    import xarray as xr

    engines = xr.backends.list_engines()
    for name in project["entry-points"]["xarray.backends"]:
        assert name in engines
        assert engines[name].description


# --- public names --------------------------------------------------------------------------------


def test_public_names() -> None:
    assert xckpt.__all__ == sorted(xckpt.__all__)
    assert xckpt.__all__ == [
        "CheckpointError",
        "CheckpointWarning",
        "FileChangedError",
        "FormatError",
        "Index",
        "IntegrityError",
        "Manifest",
        "MissingShardError",
        "Part",
        "PayloadMissingError",
        "Tensor",
        "TooLargeError",
        "UnsupportedError",
        "__version__",
        "append",
        "compare",
        "convert",
        "extract_adapter",
        "findings",
        "footprint",
        "histogram",
        "join_optimizer",
        "manifest",
        "open",
        "open_steps",
        "read_index",
        "references",
        "report",
        "resize_adapter",
        "save",
        "spectrum",
        "stats",
        "table",
        "verify",
    ]


def test_every_public_name_exists_and_is_listed() -> None:
    for name in xckpt.__all__:
        assert getattr(xckpt, name) is not None
        assert name in dir(xckpt)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'raed_index'; did you mean xckpt\.read_index\?"):
        _ = xckpt.raed_index  # type: ignore[attr-defined]


def test_the_package_is_typed() -> None:
    assert (Path(xckpt.__file__).parent / "py.typed").exists()


# --- cost of importing ---------------------------------------------------------------------------


def import_times(statement: str) -> dict[str, float]:
    """Run a statement in a new process and return what each import took, in milliseconds.

    Each time includes the imports of the module.
    """
    done = subprocess.run(  # noqa: S603  our own interpreter and statement
        [sys.executable, "-X", "importtime", "-c", statement],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = re.findall(r"import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)", done.stderr)
    return {name: int(microseconds) / 1000 for microseconds, name in rows}


def roots(modules: dict[str, float]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_importing_adds_little_time() -> None:
    def shares() -> tuple[float, float]:
        seconds = import_times("import xarray, xarray.backends; import xckpt, xckpt.backend")
        return seconds["xckpt"] / seconds["xarray"], seconds["xckpt.backend"] / seconds["xarray"]

    # A busy machine is asked again.
    assert any(max(shares()) < 0.05 for _ in range(3))


def test_the_package_imports_nothing_heavy() -> None:
    assert not roots(import_times("import xckpt")) & {"numpy", "xarray", *HEAVY}


@pytest.mark.parametrize("command", ["info", "verify", "manifest", "convert"])
def test_commands_on_bytes_import_no_arrays(command: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    xckpt.save({"w": np.ones((2, 3), "f4")}, path)
    arguments = [command, str(path), *([str(tmp_path / "m.zt")] if command == "convert" else [])]
    code = f"from xckpt.cli import main; assert main({arguments}) == 0"
    assert not import_times(code).keys() & {"dask.array", "xarray", "pandas", "numba", "scipy"}


def test_objects_in_memory_have_the_accessor() -> None:
    # No engine of ours is ever loaded here.
    code = "import xarray as xr, xckpt; xr.Dataset({'a': 1}).ckpt; xr.DataTree().ckpt"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  our own interpreter


def test_the_engines_import_nothing_heavy() -> None:
    # The imports of xarray depend on its version, so only the difference counts.
    without = import_times("import xarray, xarray.backends")
    added = import_times("import xarray, xarray.backends; import xckpt.backend")
    assert "xckpt.backend" in added
    assert not roots({n: t for n, t in added.items() if n not in without}) & HEAVY
