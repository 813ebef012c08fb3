"""Check a release before it is one: ``make release-check``.

Builds both archives from what is checked out, checks their metadata and files, and installs the
wheel into two empty environments outside of the checkout, with the lowest and with the newest
dependencies. In each, the examples of the README, every engine and the commands are run
(`torture.installed`). Needs Python, git and an index of packages.
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

from tests.formats import torch_files

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
# What every archive of the source has to have: with it, tests can be run and a wheel be made.
_IN_SOURCE = (
    *("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "src/xckpt/__init__.py"),
    *("tests/conftest.py", "docs/index.md", "environment.yml", "PKG-INFO", "Makefile"),
    *("benchmarks/__init__.py", "torture/__init__.py"),
)
_EXTRAS = ("plot", "widgets")


def main() -> None:
    """Check everything, and print what was done; an error ends it."""
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
    _solve_environment()


def run(*command: object, **options: Any) -> str:
    """Run a command, and return what it prints; if it fails, that is what the error says."""
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


def said_by(wheel: Path) -> PathDistribution:
    """Return what a wheel says of itself."""
    with zipfile.ZipFile(wheel) as file:
        (about,) = {name.partition("/")[0] for name in file.namelist() if ".dist-info/" in name}
    return PathDistribution(zipfile.Path(wheel, f"{about}/"))


def check_metadata(wheel: Path) -> None:
    """Compare what a wheel says of itself with the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    said = said_by(wheel)
    version = re.search(
        r'__version__ = "(.*)"', (ROOT / "src/xckpt/__init__.py").read_text("utf-8")
    )
    wanted = {
        "Name": project["name"],
        "Version": None if version is None else version[1],
        "Requires-Python": project["requires-python"],
        "License-Expression": project["license"],
        "Description-Content-Type": "text/markdown",
        "Summary": project["description"],
    }
    _compare("metadata", {key: said.metadata[key] for key in wanted}, wanted)
    points = {(each.group, each.name): each.value for each in said.entry_points}
    declared = {("console_scripts", name): value for name, value in project["scripts"].items()}
    for group, each in project["entry-points"].items():
        declared |= {(group, name): value for name, value in each.items()}
    _compare("entry points", points, declared)
    _compare("dependencies", len(requirements(wheel)), len(project["dependencies"]))
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    heading = "Unreleased" if "dev" in said.version else said.version
    if not re.search(rf"^## .*{re.escape(heading)}", changes, re.MULTILINE):
        sys.exit(f"CHANGELOG.md has no section {heading}")
    links = re.findall(r"\]\((?!https?://|#)(.*?)\)", (ROOT / "README.md").read_text("utf-8"))
    print(f"metadata: as in pyproject.toml, {len(points)} entry points, version {said.version}")
    if links:
        print(f"note: {len(links)} links of the README are relative, and lead nowhere on an index")


def requirements(wheel: Path, extras: Sequence[str] = ()) -> list[str]:
    """List what a wheel needs, and what some extras of it need."""
    every = said_by(wheel).requires or []
    return [
        line
        for line in every
        if "extra ==" not in line or any(f"extra == '{each}'" in line for each in extras)
    ]


def check_files(wheel: Path, source: Path) -> None:
    """Check that the archives have the files that are checked in, all of them and no others."""
    tracked = set(run("git", "ls-files", "src/xckpt", cwd=ROOT).split())
    with zipfile.ZipFile(wheel) as file:
        names = {f"src/{name}" for name in file.namelist() if name.startswith("xckpt/")}
        licences = [name for name in file.namelist() if name.endswith("licenses/LICENSE")]
    _compare("files of the wheel", names, tracked)
    if not licences:
        sys.exit("the wheel has no LICENSE")
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in (*_IN_SOURCE, *tracked) if name not in inside]
    if missing:
        sys.exit(f"the archive of the source lacks {missing}")
    print(f"files: {len(names)} in the wheel, as they are checked in; {len(inside)} in the source")


def _compare(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        both = isinstance(found, set) and isinstance(wanted, set)
        differ = found ^ wanted if both else f"{found}, not {wanted}"
        sys.exit(f"{what}: {differ}")


def _check_installed(uv: Path, wheel: Path, folder: Path, resolution: str) -> None:
    run(uv, "venv", "--quiet", "--python", sys.executable, folder)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = f"xckpt[{','.join(_EXTRAS)}] @ {wheel.as_uri()}"
    # What the wheel needs is named as well: only what is named has the lowest versions.
    needed = [line.partition(";")[0].strip() for line in requirements(wheel, _EXTRAS)]
    run(
        *(uv, "pip", "install", "--quiet", "--python", python, "--resolution", resolution),
        *(wanted, *needed),
    )
    work = folder / "work"
    work.mkdir()
    values = np.arange(6, dtype="f4").reshape(2, 3)
    (work / "model.pt").write_bytes(torch_files.checkpoint({"w": values}))
    for path in (ROOT / "README.md", ROOT / "torture" / "installed.py"):
        shutil.copy(path, work)
    known = {
        name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in os.environ
    }
    told = run(
        *(python, "-I", "installed.py", "README.md", "model.pt"),
        cwd=work,
        env=known | {"MPLBACKEND": "agg", "XCKPT_CACHE_DIR": os.fspath(work / "cache")},
    )
    print(
        f"with the {resolution.partition('-')[0]} versions:\n"
        + re.sub("(?m)^", "  ", told.rstrip())
    )


def _solve_environment() -> None:
    """Solve environment.yml, if there is a client of conda."""
    path = ROOT / "environment.yml"
    for client, *how in (
        ("micromamba", "create", "--yes", "--name", "xckpt-release", "--dry-run", "--file"),
        ("mamba", "env", "create", "--dry-run", "--file"),
        ("conda", "env", "create", "--dry-run", "--file"),
    ):
        if shutil.which(client):
            run(client, *how, path)
            print(f"environment.yml: solved by {client}")
            return
    print("environment.yml: not solved, as there is no micromamba, mamba or conda here")


if __name__ == "__main__":
    main()
