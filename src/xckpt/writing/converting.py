"""Converting: a file becomes a file of another format, without an xarray object in between."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from xckpt.arrays import ReadOptions, lazy_arrays
from xckpt.arrays.parts import PartReader
from xckpt.errors import locating
from xckpt.index import paused_collector
from xckpt.labels import select
from xckpt.opening import open_index
from xckpt.storage.shard import files_of, sources_of
from xckpt.writing.destination import Destination
from xckpt.writing.entries import Contents, Entry, lazy_dask_array
from xckpt.writing.fitting import Notes
from xckpt.writing.stored import stored_entry

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from xckpt.index import Index, Tensor
    from xckpt.labels import TensorFilter
    from xckpt.progress import ProgressOption
    from xckpt.storage import Source
    from xckpt.writing.casting import Cast

__all__ = ["convert"]


def convert(
    src: Any,
    dst: str | os.PathLike[str],
    engine: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    cast: Cast = "exact",
    overwrite: bool = False,
    progress: ProgressOption = None,
    verify: bool | None = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Any,
) -> None:
    """Write a checkpoint in another format, or anew in its own.

    Values are copied as they are stored wherever the new format stores them so: nothing is loaded
    into memory, and digests that the old file states are checked on the way. Names, element
    types, memory order, names of axes, compression, digests and attributes are kept as far as the
    new format has them; what it has not is told in one warning.

    Parameters
    ----------
    src : str, os.PathLike, bytes or binary file object
        The checkpoint, as `xckpt.read_index` takes it.
    dst : str or os.PathLike
        Where to, a path or an fsspec URL.
    engine : str, optional
        Name of the new format; by default the ending of `dst` tells.
    tensors : str, iterable of str, re.Pattern or callable, optional
        Which tensors, as ``xr.open_dataset(..., tensors=)`` takes it; by default all.
    encoding : mapping of str to mapping, optional
        How tensors are stored, as `xckpt.save` takes it.
    cast : {"exact", "allow", "never"}
        What conversions of element types may lose, as `xckpt.save` takes it.
    overwrite : bool, default False
        Whether an existing file is replaced.
    progress : bool or callable, optional
        As `xckpt.save` takes it.
    verify : bool, optional
        False does not check the digests of the old file.
    storage_options : dict, optional
        For fsspec, of both files.
    **format_options
        Options of the new format's own.

    Raises
    ------
    FileExistsError
        If the new file exists and `overwrite` is false.
    FileChangedError
        If another process wrote the old file meanwhile, or the new one, where that is the same.
    IntegrityError
        If values are not those that the old file has a digest of.
    UnsupportedError
        If the new format cannot hold something, or a conversion would lose something.
    OSError
        If a file cannot be read or written.

    Warns
    -----
    CheckpointWarning
        Of what is not written, or in another form.

    Examples
    --------
    >>> xckpt.convert("model.bpk", "model.zt")  # doctest: +SKIP
    """
    destination = Destination.of(
        dst,
        engine,
        encoding=encoding,
        cast=cast,
        overwrite=overwrite,
        storage_options=storage_options,
        format_options=format_options,
    )
    source, index = open_index(src, storage_options=storage_options)
    notes = Notes()
    with closing(source), locating(path=source.name):
        with paused_collector():
            contents = _contents(source, index, tensors, ReadOptions(verify=verify))
            job = destination.job(contents, notes, sources=files_of(source))
        notes.warn(destination.path, stacklevel=2)
        job.run(progress)


def _contents(
    source: Source, index: Index, tensors: TensorFilter | None, options: ReadOptions
) -> Contents:
    sources = sources_of(source, index.shards)
    chosen = [index.tensors[name] for name in select(index.tensors, tensors)]
    return Contents([_entry(tensor, sources, options) for tensor in chosen], index.attrs)


def _entry(tensor: Tensor, sources: Mapping[str | None, Source], options: ReadOptions) -> Entry:
    readers = {
        role: PartReader(sources[part.shard], part, options.verify)
        for role, part in tensor.parts.items()
    }

    def values() -> Any:
        lazy = lazy_arrays(tensor, sources, options)[None]
        return lazy_dask_array(lazy)

    return stored_entry(tensor, readers, values)
