"""Run all benchmarks and write their tables into the documentation: ``python -m benchmarks``."""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from benchmarks.measuring import table

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
NAMES = (
    "open",
    "stack",
    "slices",
    "read",
    "statistics",
    "compare",
    "writing",
    "explorer",
    "cluster",
    "scale",
)
COMPARED = ("xckpt", "xarray", "dask", "numpy", "ztensor", "safetensors", "zarr", "h5netcdf")

HEAD = """\
# Benchmarks

Written by `make bench`. Each figure was measured in the same run as what it is compared with;
on a busy machine times vary by half, ratios by less. "bound" is what the project promises.
"""


def main() -> int:
    """Run what the command line names, or everything; only everything is written down."""
    chosen = sys.argv[1:] or NAMES
    sections = []
    for name in chosen:
        module = import_module(f"benchmarks.{name}")
        title = (module.__doc__ or name).strip()
        lines = table(module.run())
        print(f"\n{title}\n\n{lines}", flush=True)
        sections.append(f"## {name.capitalize()}\n\n{title}\n\n{lines}\n")
    if tuple(chosen) == NAMES:
        versions = ", ".join(f"{package} {version(package)}" for package in COMPARED)
        ran = f"Python {platform.python_version()} on {platform.machine()}, {versions}.\n"
        PAGE.write_text("\n".join([HEAD, ran, *sections]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
