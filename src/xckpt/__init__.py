"""Tensor files of machine-learning frameworks as lazy, dask-backed xarray Datasets.

Opening needs no import of this package: ``xr.open_dataset("m.zt", engine="ztensor")``. What is
here is loaded on first use, so that ``import xckpt`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xckpt.errors import (
        CheckpointError,
        CheckpointWarning,
        FileChangedError,
        FormatError,
        IntegrityError,
        MissingShardError,
        PayloadMissingError,
        TooLargeError,
        UnsupportedError,
    )
    from xckpt.index import Index, Part, Tensor
    from xckpt.opening import read_index
    from xckpt.optimizers import join_optimizer
    from xckpt.references import references
    from xckpt.stats import compare, findings, histogram, stats, table
    from xckpt.steps import open_steps
    from xckpt.writing import append, convert, save, verify

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "FileChangedError",
    "FormatError",
    "Index",
    "IntegrityError",
    "MissingShardError",
    "Part",
    "PayloadMissingError",
    "Tensor",
    "TooLargeError",
    "UnsupportedError",
    "__version__",
    "append",
    "compare",
    "convert",
    "findings",
    "histogram",
    "join_optimizer",
    "open_steps",
    "read_index",
    "references",
    "save",
    "stats",
    "table",
    "verify",
]

_HOME = {
    "CheckpointError": "xckpt.errors",
    "CheckpointWarning": "xckpt.errors",
    "FileChangedError": "xckpt.errors",
    "FormatError": "xckpt.errors",
    "Index": "xckpt.index",
    "IntegrityError": "xckpt.errors",
    "MissingShardError": "xckpt.errors",
    "Part": "xckpt.index",
    "PayloadMissingError": "xckpt.errors",
    "Tensor": "xckpt.index",
    "TooLargeError": "xckpt.errors",
    "UnsupportedError": "xckpt.errors",
    "append": "xckpt.writing",
    "compare": "xckpt.stats",
    "convert": "xckpt.writing",
    "findings": "xckpt.stats",
    "histogram": "xckpt.stats",
    "join_optimizer": "xckpt.optimizers",
    # %load_ext xckpt
    "load_ipython_extension": "xckpt.notebook.extension",
    "open_steps": "xckpt.steps",
    "read_index": "xckpt.opening",
    "references": "xckpt.references",
    "save": "xckpt.writing",
    "table": "xckpt.stats",
    "unload_ipython_extension": "xckpt.notebook.extension",
    "verify": "xckpt.writing",
}


def __getattr__(name: str) -> object:
    if name == "stats":
        # The module of that name can be called, and is the function for all purposes.
        return import_module("xckpt.stats")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
