"""Run benchmarks and write their tables into the documentation: ``python -m benchmarks``."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.history import record
from benchmarks.measuring import table, write_section

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HISTORY = Path(__file__).parent / "history.json"
NAMES = (
    "commands",
    "open",
    "formats",
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
    "combine",
    "explorer",
    "cluster",
    "lock",
    "cores",
    "scale",
)
COMPARED = (
    "xckpt",
    "xarray",
    "dask",
    "numpy",
    "ztensor",
    "safetensors",
    "zarr",
    "h5netcdf",
    "polars",
    "sft-cli",
)
COMPARED_IF_INSTALLED = ("flax", "h5py", "onnx", "tensorstore", "torch")

HEAD = """\
# Benchmarks

Written by `make bench`. Each figure was measured in the same run as what it is compared with;
on a busy machine times vary by half, ratios by less. A ratio of 2 × takes twice the time of what
stands next to it.

The shortest of several times counts. Calls below 10 ms are measured in loops of 0.2 s or more, so
that the caches of the processor are warm, as in a loop of a user. Files are in the page cache
unless the row says "cold". Commands are processes of their own; their processor time includes
the start of Python.
"""


def main() -> int:
    """Run the named benchmarks, or all, and write their sections of the page."""
    for name in sys.argv[1:] or NAMES:
        module = import_module(f"benchmarks.{name}")
        title = (module.__doc__ or name).strip()
        results = module.run()
        print(f"\n{title}\n\n{table(results)}", flush=True)
        lines = table(results, bounds=False)
        for change in record(HISTORY, version("xckpt"), name, results):
            print(change, flush=True)
        write_down(name, f"## {name.capitalize()}\n\n{title}\n\n{lines}\n")
    return 0


def write_down(name: str, section: str) -> None:
    """Replace a section of the page."""
    versions = ", ".join(_versions())
    ran = f"Python {platform.python_version()} on {platform.machine()}, {versions}.\n"
    write_section(PAGE, f"{HEAD}\n{ran}", NAMES, name, section)


def _versions() -> Iterator[str]:
    """Return the versions of compared packages."""
    for package in (*COMPARED, *COMPARED_IF_INSTALLED):
        with suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"


if __name__ == "__main__":
    sys.exit(main())
