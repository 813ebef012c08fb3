"""Writing: `save`, `convert` and `append` make files, `manifest` and `verify` check them.

::

    save     an xarray object  ┐
    append   an object, a file ├> payloads -> fitting -> the format's plan -> job -> files
    convert  an index          ┘

``gathering`` lists what is to be written of an xarray object, as tensors with their bytes
(``data``). ``fitting`` brings them into a form that the format has, and asks what a reader would
say of it; ``casting`` converts values. ``job`` computes dask arrays straight into their places and
streams everything else.
``contents`` hashes what is in tensors, whatever their files, and
``manifests`` keeps that as JSON. ``plain`` makes an object of what xarray itself can write to
netCDF and zarr.
"""

from __future__ import annotations

from xckpt.formats import FormatOptions
from xckpt.writing.contents import TensorDigest
from xckpt.writing.manifests import Manifest, manifest
from xckpt.writing.saving import Conversion, Recast, append, convert, save
from xckpt.writing.verifying import Finding, Report, verify

__all__ = [
    "Conversion",
    "Finding",
    "FormatOptions",
    "Manifest",
    "Recast",
    "Report",
    "TensorDigest",
    "append",
    "convert",
    "manifest",
    "save",
    "verify",
]
