"""First steps of a user, run with the installed package.

``python -I installed.py README ENGINE=FILE ...`` is run outside of the checkout, by an interpreter
that has the wheel and its dependencies. The files are for engines that cannot write. It prints each
step, and stops at the first error.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

# A placeholder of the README, and the local file that replaces it.
_BUCKET = '"s3://bucket/m.zt", storage_options={"anon": True}'
_INSTEAD = '"file://" + os.path.abspath("m.zt")'
_COMMANDS = (
    *("--version", "info m.zt", "stats m.zt --limit 3", "verify m.zt", "spectrum m.zt --limit 1"),
    *("convert m.zt from-shell.npz", "compare m.zt new.safetensors --limit 3"),
)


def main(readme: str, *read_only: str) -> None:
    """Check the installed package: its location, the README, every engine, the commands."""
    import xckpt
    from xckpt.sample import write_checkpoint

    place = Path(xckpt.__file__)
    if not place.is_relative_to(sysconfig.get_path("purelib")):
        raise RuntimeError(f"not what was installed: {place}")
    distribution = importlib.metadata.distribution("xckpt")
    if distribution.version != xckpt.__version__:
        raise RuntimeError(f"{distribution.version} is not {xckpt.__version__}")
    write_checkpoint("m.zt", layers=3, width=64)
    warnings.filterwarnings("error", category=DeprecationWarning, module="xckpt")
    warnings.filterwarnings("ignore", category=xckpt.CheckpointWarning)
    lines = _session(Path(readme).read_text("utf-8"))
    print(f"README: {lines} statements ran")
    paths = dict(argument.split("=", 1) for argument in read_only)
    print(f"engines: {', '.join(_engines(distribution, paths))} opened by their entry points")
    for command in _COMMANDS:
        program = Path(sysconfig.get_path("scripts"), "xckpt")
        done = subprocess.run([program, *command.split()], check=False, capture_output=True)  # noqa: S603  ours
        if done.returncode not in {0, 1}:  # 1 reports differences or faults
            raise RuntimeError(f"xckpt {command}: {done.stderr.decode()}")
    print(f"commands: {len(_COMMANDS)} ran")
    bounds = _at_lower_bound(distribution)
    print(f"dependencies: {len(bounds)} of their lowest series: {', '.join(bounds)}")


def _session(text: str) -> int:
    """Run the Python blocks of a README as one session; return the number of statements."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"os": os}
    body = ast.parse("".join(blocks).replace(_BUCKET, _INSTEAD)).body
    for node in body:
        source = ast.unparse(node)
        if isinstance(node, ast.Expr):
            repr(eval(source, names))  # noqa: S307  our own text
        else:
            exec(source, names)  # noqa: S102  the same
    return len(body)


def _engines(distribution: importlib.metadata.Distribution, read_only: dict[str, str]) -> list[str]:
    """Open a file with every engine, by name and by detection; return the names."""
    import numpy as np
    import xarray as xr

    import xckpt
    from xckpt import formats

    values = np.arange(6, dtype="f4").reshape(2, 3)
    names = [
        candidate.name
        for candidate in distribution.entry_points
        if candidate.group == "xarray.backends"
    ]
    for name in names:
        form = formats.get(name)
        path = read_only.get(name, "")
        if form.can.types:
            suffix = next(
                candidate for candidate in form.suffixes if candidate not in form.shared_suffixes
            )
            path = f"engine{suffix}"
            xckpt.save(xr.Dataset({"w": (("out", "in"), values)}), path, name)
        for engine in (name, None):
            with xr.open_dataset(path, engine=engine) as ds:
                (array,) = ds.data_vars.values()
                if not np.array_equal(array.values, values):
                    raise RuntimeError(f"{name}: {array.values}")
        with xr.open_datatree(path, engine=name) as tree:
            tree.load()
    return sorted(names)


def _at_lower_bound(distribution: importlib.metadata.Distribution) -> list[str]:
    """List the dependencies that are installed in their lowest permitted version."""
    dependencies = []
    for line in distribution.requires or ():
        match = re.match(r"([\w.-]+)(?:\[.*?\])?>=([\d.]+)$", line)
        if match is not None:
            version = importlib.metadata.version(match[1])
            parts = [part.rstrip("0") for part in (f"{match[2]}.", f"{version}.")]
            if parts[1].startswith(parts[0]):
                dependencies.append(f"{match[1]} {version}")
    return dependencies


if __name__ == "__main__":
    main(*sys.argv[1:])
