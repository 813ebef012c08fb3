"""Many checkpoints at once, in a process with few file descriptors."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("resource")

COUNT = 100
SCRIPT = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np, xarray as xr, xckpt

folder = sys.argv[1]
paths = [f"{{folder}}/step-{{n}}.safetensors" for n in range({COUNT})]
for number, path in enumerate(paths):
    xckpt.save(xr.Dataset({{"w": ("x", np.full(10, number))}}), path)
held = [open(paths[0]) for _ in range(20)] if sys.argv[2] == "held" else []
opened = [xr.open_dataset(path, engine="safetensors") for path in paths]
assert [int(ds["w"][3]) for ds in opened] == list(range({COUNT}))
steps = xckpt.open_steps(paths)
np.testing.assert_array_equal(steps["w"][:, 0].values, range({COUNT}))
np.testing.assert_array_equal(steps.compute()["w"][:, 9].values, range({COUNT}))
xckpt.save(steps, f"{{folder}}/all.zt")
parts = [f"{{folder}}/part-{{n}}.safetensors" for n in range({COUNT})]
for number, path in enumerate(parts):
    xckpt.save(xr.Dataset({{f"w{{number}}": ("x", np.full(1 << 18, number))}}), path)
xckpt.convert(parts, f"{{folder}}/one.zt")
assert xckpt.verify(f"{{folder}}/one.zt").ok
print("done")
"""


EXHAUSTED = """
import os, resource, sys
import numpy as np, xckpt

xckpt.save({"w": np.ones(3)}, sys.argv[1])
xckpt.open(sys.argv[1]).close()  # imports need descriptors as well
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
try:
    xckpt.open(sys.argv[1])
except OSError as error:
    print(error)
"""
CLOSED = """
import gc, os, sys
import numpy as np, xckpt

def held():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link)]

path = sys.argv[1]
xckpt.save({"w": np.ones((3, 3), np.float32)}, path)
quiet = {"cache": False, "progress": False}
for call in (xckpt.stats, xckpt.histogram, xckpt.spectrum, xckpt.findings):
    result = call(path, **quiet)
    gc.collect()
    print(call.__name__, path in held())
result = xckpt.compare(path, path, **quiet)
gc.collect()
print("compare", path in held())
ds = xckpt.open(path).load()
ds.close()
print("close", path in held())
"""


def run_alone(code: str, *arguments: str) -> str:
    """Run code in a process of its own, and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603


def test_without_descriptors_the_error_names_the_remedy(tmp_path: Path) -> None:
    path = str(tmp_path / "m.zt")
    text = run_alone(EXHAUSTED, path)
    assert "Too many open files" in text
    assert "ulimit -n" in text
    assert path in text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_files_of_paths_are_closed_after_a_call(tmp_path: Path) -> None:
    lines = run_alone(CLOSED, str(tmp_path / "m.zt")).splitlines()
    assert [line.split()[1] for line in lines] == ["False"] * 6, lines


@pytest.mark.parametrize("other_files", ["alone", "held"])
def test_more_checkpoints_than_descriptors(tmp_path: Path, other_files: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), other_files]
    run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert run.stdout == "done\n", run.stderr
