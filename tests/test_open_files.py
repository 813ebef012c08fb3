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


@pytest.mark.parametrize("other_files", ["alone", "held"])
def test_more_checkpoints_than_descriptors(tmp_path: Path, other_files: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), other_files]
    run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert run.stdout == "done\n", run.stderr
