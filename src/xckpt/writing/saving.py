"""Saving: an xarray object becomes a file of a format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.writing.contents import read_contents, read_sources
from xckpt.writing.destination import Destination
from xckpt.writing.fitting import Notes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from xckpt.progress import ProgressOption
    from xckpt.writing.casting import Cast

__all__ = ["save"]


def save(
    obj: Any,
    path: str | os.PathLike[str],
    engine: str | None = None,
    *,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    cast: Cast = "exact",
    compute: bool = True,
    overwrite: bool = False,
    progress: ProgressOption = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Any,
) -> Any:
    """Write a Dataset, DataTree or DataArray to a checkpoint, without loading it into memory.

    The file is complete under its name, or not there: it is written beside it and renamed, so
    that after an error, Ctrl-C or a full disk an old file is as it was. What was opened by us and
    not touched is copied as it is stored; what was computed is converted back to the element type
    that it was stored with.

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree or xarray.DataArray
        Its variables become tensors, and so do coordinates with numbers.
    path : str or os.PathLike
        Where to, a path or an fsspec URL.
    engine : str, optional
        Name of the format; by default the ending of `path` tells.
    encoding : mapping of str to mapping, optional
        How tensors are stored: globs of names to ``compression`` (``"zstd"``,
        ``"zstd-seekable"`` or None), ``level`` (1 to 22), ``digest`` (``"crc32c"``,
        ``"sha256"``, ... or None), ``dtype``, and ``layout`` (``"dense"`` for the values of
        sparse and quantised tensors). Later globs have the last word.
    cast : {"exact", "allow", "never"}
        What conversions of element types may lose: nothing, bit for bit; or precision. With
        ``"never"`` a type or layout that the format does not have is an error.
    compute : bool, default True
        False gives a `dask.delayed.Delayed` that writes when it is computed.
    overwrite : bool, default False
        Whether an existing file is replaced.
    progress : bool or callable, optional
        As for `xckpt.stats`.
    storage_options : dict, optional
        For fsspec, where `path` is a URL.
    **format_options
        Options of the format's own.

    Returns
    -------
    dask.delayed.Delayed or None
        Only if `compute` is false.

    Raises
    ------
    FileExistsError
        If the file exists and `overwrite` is false.
    FileChangedError
        If another process wrote a file that is read, also while it is replaced by this save.
    UnsupportedError
        If the format cannot hold something, or a conversion would lose something.
    OSError
        If the file cannot be written.

    Warns
    -----
    CheckpointWarning
        Of what is not written, or in another form.

    Examples
    --------
    >>> xckpt.save(ds, "m.zt", encoding={"*": {"compression": "zstd"}})  # doctest: +SKIP
    >>> xckpt.save(ds.astype("float16"), "half.safetensors")  # doctest: +SKIP
    """
    destination = Destination.of(
        path,
        engine,
        encoding=encoding,
        cast=cast,
        overwrite=overwrite,
        storage_options=storage_options,
        format_options=format_options,
    )
    notes = Notes()
    contents = read_contents(obj, notes, destination.writer.name)
    job = destination.job(contents, notes, sources=read_sources(contents))
    notes.warn(destination.path, stacklevel=2)
    if compute:
        job.run(progress)
        return None
    destination.open_sink().abort()  # what cannot be written is said now
    return job.delayed()
