"""Tensor files of machine-learning frameworks as lazy, dask-backed xarray Datasets.

==================================  =============================================================
`open`, `open_steps`, `read_index`  open a checkpoint, the checkpoints of a run, or only a header
`stats`, `histogram`, `spectrum`    compute statistics of all tensors
`compare`, `findings`, `report`     explain differences, list signs of damage, write a report
`save`, `convert`, `append`         write
`verify`, `manifest`                check contents, or identify them
`footprint`                         compute what a model takes, and whether it fits
`extract_adapter`                   write a difference as an adapter; also `resize_adapter`
``ds.ckpt``                         a summary of an open Dataset, with these functions as methods
==================================  =============================================================

Opening needs no import of this package: ``xr.open_dataset("m.zt", engine="ztensor")``. Functions
are loaded on first use, so that ``import xckpt`` takes almost no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import lazy_loader

from xckpt.imports import watch_imports
from xckpt.registration import register_accessor

if TYPE_CHECKING:
    from xckpt.adapting import extract_adapter, resize_adapter
    from xckpt.comparison import compare
    from xckpt.entry import footprint, join_optimizer, open, report  # noqa: A004
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
    from xckpt.health import findings
    from xckpt.index import Index, Part, Tensor
    from xckpt.notebook.extension import load_ipython_extension as load_ipython_extension
    from xckpt.notebook.extension import unload_ipython_extension as unload_ipython_extension
    from xckpt.opening import read_index
    from xckpt.opening.references import references
    from xckpt.opening.steps import open_steps
    from xckpt.statistics import histogram, spectrum, stats, table
    from xckpt.writing import Manifest, append, convert, manifest, save, verify

__version__ = "0.3.0"

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "FileChangedError",
    "FormatError",
    "Index",
    "IntegrityError",
    "Manifest",
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
    "extract_adapter",
    "findings",
    "footprint",
    "histogram",
    "join_optimizer",
    "manifest",
    "open",
    "open_steps",
    "read_index",
    "references",
    "report",
    "resize_adapter",
    "save",
    "spectrum",
    "stats",
    "table",
    "verify",
]

_load, _, _lazy = lazy_loader.attach(
    __name__,
    submodules=["errors", "identity", "sample", "typing"],
    submod_attrs={
        "adapting": ["extract_adapter", "resize_adapter"],
        "comparison": ["compare"],
        "entry": ["footprint", "join_optimizer", "open", "report"],
        "errors": [
            "CheckpointError",
            "CheckpointWarning",
            "FileChangedError",
            "FormatError",
            "IntegrityError",
            "MissingShardError",
            "PayloadMissingError",
            "TooLargeError",
            "UnsupportedError",
        ],
        "health": ["findings"],
        "index": ["Index", "Part", "Tensor"],
        "notebook.extension": [
            "load_ipython_extension",
            "unload_ipython_extension",
        ],  # %load_ext xckpt
        "opening": ["read_index"],
        "opening.references": ["references"],
        "opening.steps": ["open_steps"],
        "statistics": ["histogram", "spectrum", "stats", "table"],
        "writing": ["Manifest", "append", "convert", "manifest", "save", "verify"],
    },
)

watch_imports()
register_accessor()

if not TYPE_CHECKING:  # or a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name in _lazy or name.startswith("_"):
            register_accessor()  # again, as another thread may have been loading xarray
            return _load(name)
        raise AttributeError(import_module("xckpt.entry").hint_for(name))


def __dir__() -> list[str]:
    return __all__
