"""Writing: `save`, `convert` and `append` make files, `manifest` and `verify` check them.

::

    save     an xarray object  ┐
    append   an object, a file ├> payloads -> fitting -> the format's plan -> job -> files
    convert  an index          ┘

``gathering`` lists the tensors of an xarray object, with the streams of their bytes
(`xckpt.arrays.converted`); ``sparse_parts`` takes sparse arrays apart. ``fitting`` brings them into
a form that the format has, and finds attributes that a reader would not return. ``targets`` has
the paths of new files, with their formats and folders. ``job`` plans the files, ``computed``
computes dask arrays straight into their places, and ``streaming`` writes all other parts.
``contents`` hashes tensors, whatever their files, and ``manifests`` stores the digests as JSON.
``plain`` makes a Dataset that xarray itself can write to netCDF and zarr.

May import formats (the registry and `formats.plan`), opening, datasets and all below them; neither
scan nor statistics. Read ``saving`` first, which has the public functions, and then ``job``.

On its way into a new file, a `Tensor` of an index becomes a `Payload` (a `WantedTensor` with the
arrays of its parts), the format places each part (`PlannedPart`), the job adds its bytes
(`ByteStream`), and writing returns its place (`Written`).
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
