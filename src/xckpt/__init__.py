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
        PayloadMissingError,
        UnsupportedError,
    )
    from xckpt.index import Index, Part, Tensor
    from xckpt.opening import read_index
    from xckpt.optimizers import join_optimizer

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "FileChangedError",
    "FormatError",
    "Index",
    "IntegrityError",
    "Part",
    "PayloadMissingError",
    "Tensor",
    "UnsupportedError",
    "__version__",
    "join_optimizer",
    "read_index",
]

_HOME = {
    "CheckpointError": "xckpt.errors",
    "CheckpointWarning": "xckpt.errors",
    "FileChangedError": "xckpt.errors",
    "FormatError": "xckpt.errors",
    "Index": "xckpt.index",
    "IntegrityError": "xckpt.errors",
    "Part": "xckpt.index",
    "PayloadMissingError": "xckpt.errors",
    "Tensor": "xckpt.index",
    "UnsupportedError": "xckpt.errors",
    "join_optimizer": "xckpt.optimizers",
    "read_index": "xckpt.opening",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
