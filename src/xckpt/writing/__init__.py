"""Writing: `save`, `convert` and `append` make files, `verify` checks them.

::

    saving      an xarray object  ┐
    appending   an object, a file ├> entries -> fitting -> the format's plan -> executor -> files
    converting  an index          ┘

``contents`` lists what is to be written of an xarray object. ``fitting`` brings it into a form
that the format has. ``executor`` computes dask arrays straight into their places (``regions``)
and streams everything else (``streaming``). ``plain`` makes an object of what xarray itself can
write to netCDF and zarr, whose rules are in ``holding``.
"""

from __future__ import annotations

from xckpt.writing.appending import append
from xckpt.writing.converting import convert
from xckpt.writing.saving import save
from xckpt.writing.verifying import Finding, Report, verify

__all__ = ["Finding", "Report", "append", "convert", "save", "verify"]
