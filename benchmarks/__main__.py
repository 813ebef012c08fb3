"""Run benchmarks and write their tables into the documentation: ``python -m benchmarks``."""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from benchmarks.measuring import table, write_section

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
NAMES = (
    "open",
    "stack",
    "slices",
    "read",
    "remote",
    "statistics",
    "gguf",
    "compare",
    "explain",
    "spectrum",
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
    """Run the named benchmarks, or all, and write their sections of the page."""
    for name in sys.argv[1:] or NAMES:
        module = import_module(f"benchmarks.{name}")
        title = (module.__doc__ or name).strip()
        lines = table(module.run())
        print(f"\n{title}\n\n{lines}", flush=True)
        write_down(name, f"## {name.capitalize()}\n\n{title}\n\n{lines}\n")
    return 0


def write_down(name: str, section: str) -> None:
    """Replace a section of the page."""
    versions = ", ".join(f"{package} {version(package)}" for package in COMPARED)
    ran = f"Python {platform.python_version()} on {platform.machine()}, {versions}.\n"
    write_section(PAGE, f"{HEAD}\n{ran}", NAMES, name, section)


if __name__ == "__main__":
    sys.exit(main())
