"""Commands on a file of 7 MB, each in a process of its own: processor time and modules.

"No byte code" compiles every module of every package again, as containers do that set
PYTHONDONTWRITEBYTECODE. The first scan compiles the loops; later ones find them on the disk.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import xckpt
from benchmarks.measuring import Result, table

REPEATS = 5
#: From the command to the most processor seconds, with and without byte code.
COMMANDS = {
    "info": (0.4, 3),
    "stats": (1.0, 3),
    "compare": (1.0, 3),
    "verify": (0.6, 3),
    "manifest": (0.6, 3),
    "convert": (1.0, 3),
}
#: Commands of another package that do the same.
PEERS = {"info": "info", "stats": "stat"}
_MODULES = """
import sys
from xckpt.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(len(sys.modules), file=sys.stderr)
"""


def _write(path: Path, shift: float) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"model.layers.{n // 4}.{name}.weight": rng.standard_normal((192, 160), np.float32)
        + np.float32(shift)
        for n, name in enumerate(["q_proj", "k_proj", "v_proj", "o_proj"] * 14)
    }
    xckpt.save(arrays, path, progress=False)


def _processor_time(command: list[str], env: dict[str, str]) -> float:
    """Return the processor seconds of a process, with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603  our own
    # 1: the files differ, or something was found.
    if done.returncode not in {0, 1}:
        raise RuntimeError(f"{command}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run() -> list[Result]:
    """Measure all commands."""
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [str(folder / f"{n}.safetensors") for n in "ab"]
        for path, shift in zip(files, (0.0, 1e-3), strict=True):
            _write(Path(path), shift)
        env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HOME": name}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        bare = {**env, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(folder / "none")}
        for command, (most, most_bare) in COMMANDS.items():
            arguments = {
                "compare": files,
                "convert": [files[0], str(folder / "out.zt"), "--overwrite"],
            }.get(command, files[:1])
            ours = [sys.executable, "-m", "xckpt", command, *arguments]
            first = _processor_time(ours, env)
            seconds = min(_processor_time(ours, env) for _ in range(REPEATS))
            uncompiled = min(_processor_time(ours, bare) for _ in range(2))
            counted = [sys.executable, "-c", _MODULES, command, *arguments]
            done = subprocess.run(counted, env=env, capture_output=True, text=True, check=False)  # noqa: S603  our own
            modules = int(done.stderr.split()[-1])
            results += [
                Result(f"{command}, processor time", seconds * 1e3, "ms", f"{modules:,} modules",
                       most * 1e3),
                Result("the same, the first time", first * 1e3, "ms"),
                Result("the same, no byte code", uncompiled * 1e3, "ms", "", most_bare * 1e3),
            ]  # fmt: skip
            script = shutil.which("sft", path=str(Path(sys.executable).parent))
            if command in PEERS and script:
                theirs = [script, PEERS[command], files[0]]
                peer = min(_processor_time(theirs, env) for _ in range(REPEATS))
                context = f"sft {PEERS[command]}, {peer * 1e3:.0f} ms"
                results.append(Result("the same", seconds / peer, "x", context))
    return results


if __name__ == "__main__":
    print(table(run()))
