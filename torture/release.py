"""Check a release before it is one: ``make release-check``.

Builds both archives from what is checked out, checks their metadata and files, and installs the
wheel into two empty environments outside of the checkout, with the lowest and with the newest
dependencies. In each, the examples of the README, every engine and the commands are run
(`torture.installed`). The command also runs without an installation, in an empty home. Needs
Python, git and an index of packages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.contracts.keras import archive, hdf5
from tests.formats import flax_files, onnx_files, orbax_files, torch_files

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
# Required files of a source archive, to run the tests and build a wheel from it.
_IN_SOURCE = (
    *("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "src/xckpt/__init__.py"),
    *("tests/conftest.py", "docs/index.md", "environment.yml", "PKG-INFO", "Makefile"),
    *("benchmarks/__init__.py", "torture/__init__.py"),
)
_EXTRAS = ("plot", "sparse", "widgets")


def main() -> None:
    """Build and check a release, and print each step; exit at the first error."""
    with TemporaryDirectory(prefix="xckpt-release") as name:
        folder = Path(name)
        tools = _environment(folder / "tools")
        run(tools / "python", "-m", "pip", "--quiet", "install", "uv", "twine")
        uv = tools / "uv"
        run(uv, "build", "--quiet", "--out-dir", folder / "dist", ROOT)
        (source,), (wheel,) = ([*(folder / "dist").glob(end)] for end in ("*.tar.gz", "*.whl"))
        print(f"built {source.name} and {wheel.name}, which is made from it")
        run(tools / "twine", "check", "--strict", source, wheel)
        check_metadata(wheel)
        check_files(wheel, source)
        for resolution in ("lowest-direct", "highest"):
            _check_installed(uv, wheel, folder / resolution, resolution)
        _check_run_without_install(uv, wheel, folder / "lowest-direct" / "work")
    _solve_environment()


def run(*command: object, **options: Any) -> str:
    """Run a command and return its output; exit with the output if it fails."""
    words = [os.fspath(word) if isinstance(word, Path) else str(word) for word in command]
    done: Any = subprocess.run(  # noqa: S603  our own
        words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}")
    return str(done.stdout)


def _environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def read_distribution(wheel: Path) -> PathDistribution:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        (folder,) = {name.partition("/")[0] for name in file.namelist() if ".dist-info/" in name}
    return PathDistribution(zipfile.Path(wheel, f"{folder}/"))


def check_metadata(wheel: Path) -> None:
    """Compare the metadata of a wheel with pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    distribution = read_distribution(wheel)
    version = re.search(
        r'__version__ = "(.*)"', (ROOT / "src/xckpt/__init__.py").read_text("utf-8")
    )
    expected = {
        "Name": project["name"],
        "Version": None if version is None else version[1],
        "Requires-Python": project["requires-python"],
        "License-Expression": project["license"],
        "Description-Content-Type": "text/markdown",
        "Summary": project["description"],
    }
    _compare("metadata", {key: distribution.metadata[key] for key in expected}, expected)
    points = {(entries.group, entries.name): entries.value for entries in distribution.entry_points}
    declared = {("console_scripts", name): value for name, value in project["scripts"].items()}
    for group, entries in project["entry-points"].items():
        declared |= {(group, name): value for name, value in entries.items()}
    _compare("entry points", points, declared)
    _compare("dependencies", len(requirements(wheel)), len(project["dependencies"]))
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    heading = "Unreleased" if "dev" in distribution.version else distribution.version
    if not re.search(rf"^## .*{re.escape(heading)}", changes, re.MULTILINE):
        sys.exit(f"CHANGELOG.md has no section {heading}")
    links = re.findall(r"\]\((?!https?://|#)(.*?)\)", (ROOT / "README.md").read_text("utf-8"))
    print(
        f"metadata: as in pyproject.toml, {len(points)} entry points, "
        f"version {distribution.version}"
    )
    if links:
        print(f"note: {len(links)} links of the README are relative, and lead nowhere on an index")


def requirements(wheel: Path, extras: Sequence[str] = ()) -> list[str]:
    """List the requirements of a wheel, with those of the extras."""
    all_requirements = read_distribution(wheel).requires or []
    return [
        line
        for line in all_requirements
        if "extra ==" not in line or any(f"extra == '{extra}'" in line for extra in extras)
    ]


def check_files(wheel: Path, source: Path) -> None:
    """Check that the archives have exactly the files that are checked in."""
    tracked = set(run("git", "ls-files", "src/xckpt", cwd=ROOT).split())
    golden = set(run("git", "ls-files", "tests/golden", cwd=ROOT).split())
    with zipfile.ZipFile(wheel) as file:
        names = {f"src/{name}" for name in file.namelist() if name.startswith("xckpt/")}
        licences = [name for name in file.namelist() if name.endswith("licenses/LICENSE")]
    _compare("files of the wheel", names, tracked)
    if not licences:
        sys.exit("the wheel has no LICENSE")
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in (*_IN_SOURCE, *tracked, *golden) if name not in inside]
    if missing:
        sys.exit(f"the archive of the source lacks {missing}")
    print(f"files: {len(names)} in the wheel, as they are checked in; {len(inside)} in the source")


def _compare(subject: str, actual: Any, expected: Any) -> None:
    if actual != expected:
        both = isinstance(actual, set) and isinstance(expected, set)
        differ = actual ^ expected if both else f"{actual}, not {expected}"
        sys.exit(f"{subject}: {differ}")


def _check_installed(uv: Path, wheel: Path, folder: Path, resolution: str) -> None:
    run(uv, "venv", "--quiet", "--python", sys.executable, folder)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wheel_requirement = f"xckpt[{','.join(_EXTRAS)}] @ {wheel.as_uri()}"
    # "lowest-direct" only applies to named packages, so the dependencies are named as well.
    dependencies = [line.partition(";")[0].strip() for line in requirements(wheel, _EXTRAS)]
    run(
        *(uv, "pip", "install", "--quiet", "--python", python, "--resolution", resolution),
        # The lowest versions that have wheels: builds of older ones fail on a newer Python.
        *("--only-binary", ":all:"),
        *(wheel_requirement, *dependencies),
    )
    work = folder / "work"
    work.mkdir()
    paths = write_read_only(work, np.arange(6, dtype="f4").reshape(2, 3))
    for path in (ROOT / "README.md", ROOT / "torture" / "installed.py"):
        shutil.copy(path, work)
    environment = {
        name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in os.environ
    }
    output = run(
        *(python, "-I", "installed.py", "README.md"),
        *(f"{engine}={path.relative_to(work)}" for engine, path in paths.items()),
        cwd=work,
        env=environment | {"MPLBACKEND": "agg", "XCKPT_CACHE_DIR": os.fspath(work / "cache")},
    )
    print(
        f"with the {resolution.partition('-')[0]} versions:\n"
        + re.sub("(?m)^", "  ", output.rstrip())
    )


def _check_run_without_install(uv: Path, wheel: Path, work: Path) -> None:
    """Run the command as ``uvx xckpt`` does, in an empty home."""
    home = work / "home"
    home.mkdir()
    cache = run(uv, "cache", "dir").strip()
    homes = {name: os.fspath(home) for name in ("HOME", "USERPROFILE")}
    environment = os.environ | homes | {"UV_CACHE_DIR": cache}
    for words in (["--help"], ["info", "m.zt"]):
        command = (uv, "tool", "run", "--quiet", "--python", sys.executable, "--from", wheel)
        if not run(*command, "xckpt", *words, cwd=work, env=environment):
            sys.exit(f"xckpt {' '.join(words)} prints nothing")
    print("uvx: runs the command in an empty home")


def write_read_only(folder: Path, values: np.ndarray[Any, Any]) -> dict[str, Path]:
    """Write a file with one tensor for each engine that cannot write; return their paths."""
    contents = {
        "flax": flax_files.flax_file({"w": flax_files.array(values)}),
        "keras": archive(hdf5({"layers/dense/vars/0": values})),
        "onnx": onnx_files.model(onnx_files.initializer("w", values)),
        "torch": torch_files.checkpoint({"w": values}),
    }
    suffixes = {"flax": ".msgpack", "keras": ".keras", "onnx": ".onnx", "torch": ".pt"}
    paths = {}
    for engine, data in contents.items():
        paths[engine] = folder / f"model{suffixes[engine]}"
        paths[engine].write_bytes(data)
    return paths | {"orbax": orbax_files.write(folder / "orbax", {"w": values}).parent}


def _solve_environment() -> None:
    """Solve environment.yml, if a client of conda is installed."""
    path = ROOT / "environment.yml"
    for client, *arguments in (
        ("micromamba", "create", "--yes", "--name", "xckpt-release", "--dry-run", "--file"),
        ("mamba", "env", "create", "--dry-run", "--file"),
        ("conda", "env", "create", "--dry-run", "--file"),
    ):
        if shutil.which(client):
            run(client, *arguments, path)
            print(f"environment.yml: solved by {client}")
            return
    print("environment.yml: not solved, as there is no micromamba, mamba or conda here")


if __name__ == "__main__":
    main()
