"""Formats of other packages: the documented example, and plug-ins that break the contract."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "xckpt-plain"


def run(path: Path, *command: str, cwd: Path | None = None) -> str:
    """Run Python with a folder of installed packages, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONWARNINGS": "default"}
    result = subprocess.run(  # noqa: S603
        [sys.executable, *command],
        capture_output=True,
        check=False,
        text=True,
        cwd=cwd,
        env=environment,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of the example without a network, and install it apart."""
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    command = [sys.executable, "-m", "pip", "install", *options]
    command += ["--target", str(target), str(EXAMPLE)]
    subprocess.run(command, check=True)  # noqa: S603
    return target


def test_documented_helpers_exist() -> None:
    text = (EXAMPLE.parents[1] / "adding-a-format.md").read_text("utf-8")
    for module, name in re.findall(r"`(kit|chunks|archive|plan)\.(\w+)`", text):
        assert hasattr(import_module(f"xckpt.formats.{module}"), name), name


def test_the_example_is_short() -> None:
    files = [*EXAMPLE.glob("*.toml"), *EXAMPLE.glob("*/*.py")]
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) < 120


def test_the_example_passes_the_suites(installed: Path, tmp_path: Path) -> None:
    tests = EXAMPLE / "tests"
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tests))
    out = run(installed, "-m", "pytest", *options, str(tests), cwd=tmp_path)
    assert " passed" in out


EVERYTHING = """
import sys
import numpy as np, xarray as xr, xckpt
assert "xckpt_plain" not in sys.modules
np.savez("m.npz", w=np.arange(6, dtype="f4").reshape(2, 3))
xckpt.open("m.npz")
assert "xckpt_plain" not in sys.modules  # until a file or a suffix needs it
xckpt.convert("m.npz", "m.plain")
xckpt.convert("m.plain", "again.npz")
for ds in (
    xckpt.open("m.plain"),
    xr.open_dataset("m.plain"),
    xr.open_dataset("m.plain", engine="plain"),
    xr.open_dataset(open("m.plain", "rb").read()),
    xckpt.open("again.npz"),
):
    assert ds["w"].values.tolist() == [[0, 1, 2], [3, 4, 5]]
assert xckpt.read_index("m.plain").format == "plain"
print(repr(xckpt.open("m.plain").ckpt))
print(float(xckpt.stats("m.plain")["w"].sel(statistic="max")))
print(xckpt.compare("m.npz", "m.plain").ckpt)
print(xckpt.verify("m.plain"))
print(xr.backends.list_engines()["plain"])
xr.open_datatree("m.plain", engine="plain")
try:
    xckpt.open("m.npz", engine="plane")
except ValueError as error:
    print(error)
"""


def test_everything_works_for_a_plug_in(installed: Path, tmp_path: Path) -> None:
    out = run(installed, "-c", EVERYTHING, cwd=tmp_path)
    assert "5.0" in out
    assert "structure intact" in out
    assert "Open plain tensors (.plain)" in out
    assert "did you mean 'plain'?" in out
    info = run(installed, "-m", "xckpt", "info", "m.plain", "--json", cwd=tmp_path)
    assert json.loads(info)["format"] == "plain"


BROKEN = {
    "absent": ("absent_module:Format", "No module named 'absent_module'"),
    "old": ("broken:Old", "contract 0, and xckpt has 1"),
    "other": ("broken:Other", "its name is 'another'"),
    "thing": ("broken:dict", "it is not a Format"),
    "npz": ("broken:Other", "xckpt has it"),
    "loud": ("broken:Loud", "cannot look at"),
}
MODULE = """
from xckpt.formats import Format

class Old(Format):
    name = "old"

class Other(Format):
    name, contract = "another", 1

class Loud(Format):
    name, contract, suffixes = "loud", 1, (".loud",)

    def detect(self, head, size, name):
        raise KeyError("loud")

dict = dict
"""
OPENING = """
import numpy as np, xckpt
np.savez("m.npz", w=np.ones(3))
xckpt.open("m.npz", engine="npz")
xckpt.convert("m.npz", "m.safetensors")
for name in ("m.npz", "m.safetensors"):
    with open(name, "rb") as file, open("m", "wb") as copy:
        copy.write(file.read())
    assert xckpt.open("m")["w"].values.tolist() == [1, 1, 1]
    assert xckpt.open(name)["w"].values.tolist() == [1, 1, 1]
try:
    xckpt.open("m.npz", engine="old")
except ImportError as error:
    print("raised:", error)
"""


def test_broken_plug_ins_warn_and_leave_the_others(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(MODULE)
    entries = "\n".join(f"{name} = {value}" for name, (value, _) in BROKEN.items())
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[xckpt.formats]\n{entries}\n")
    out = run(tmp_path, "-c", OPENING, cwd=tmp_path)
    for name, (_, reason) in BROKEN.items():
        assert repr(name) in out
        assert reason in out
    assert "raised: the format 'old'" in out
