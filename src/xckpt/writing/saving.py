"""`save`, `convert` and `append`: an xarray object or a checkpoint becomes a file of a format.

What `append` adds lies after the end of the old file (`Format.append`), but a file that grows in
place cannot be read while it does, nor after a crash. So the old bytes are the first item of a new
file, which is written and renamed like any other. The kernel copies them; where the file system
can share blocks between files (Btrfs, XFS, bcachefs, NFS 4.2, SMB) they are not copied at all.
"""

from __future__ import annotations

import sys
from contextlib import closing, contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from xckpt.arrays import ReadOptions, lazy_arrays
from xckpt.arrays.parts import PartReader
from xckpt.errors import CheckpointError, UnsupportedError, locating
from xckpt.index import Part
from xckpt.labels import select
from xckpt.opening import open_index, paused_collector
from xckpt.storage.local import Descriptor, LocalSource
from xckpt.storage.shard import ShardedSource, files_of, sources_of
from xckpt.writing.data import StoredData, lazy_dask_array
from xckpt.writing.destination import Destination
from xckpt.writing.fitting import Changes
from xckpt.writing.gathering import gather, source_files, stored_payload
from xckpt.writing.streaming import item_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.index import Tensor
    from xckpt.labels import TensorFilter
    from xckpt.progress import ProgressOption
    from xckpt.storage import Source
    from xckpt.writing.casting import Cast
    from xckpt.writing.data import Payload

__all__ = ["append", "convert", "save"]


def save(
    obj: Any,
    path: str | PathLike[str],
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
    destination = Destination(
        path,
        engine,
        encoding=encoding,
        cast=cast,
        overwrite=overwrite,
        storage_options=storage_options,
        format_options=format_options,
    )
    changes = Changes()
    payloads, attrs = gather(obj, changes, destination.writer.name)
    job = destination.job(payloads, attrs, changes, sources=source_files(payloads))
    changes.warn(destination.path, stacklevel=2)
    if compute:
        job.run(progress)
        return None
    destination.open_sink().abort()  # what cannot be written is said now
    return job.delayed()


def convert(
    src: Any,
    dst: str | PathLike[str],
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
    destination = Destination(
        dst,
        engine,
        encoding=encoding,
        cast=cast,
        overwrite=overwrite,
        storage_options=storage_options,
        format_options=format_options,
    )
    source, index = open_index(src, storage_options=storage_options)
    changes = Changes()
    with closing(source), locating(path=source.name):
        with paused_collector():
            sources = sources_of(source, index.shards)
            chosen = [index.tensors[name] for name in select(index.tensors, tensors)]
            payloads = [_payload(tensor, sources, ReadOptions(verify=verify)) for tensor in chosen]
            job = destination.job(payloads, index.attrs, changes, sources=files_of(source))
        changes.warn(destination.path, stacklevel=2)
        job.run(progress)


def _payload(tensor: Tensor, sources: Mapping[str | None, Source], options: ReadOptions) -> Payload:
    readers = {
        role: PartReader(sources[part.shard], part, options.verify)
        for role, part in tensor.parts.items()
    }

    def values() -> Any:
        return lazy_dask_array(lazy_arrays(tensor, sources, options)[None])

    return stored_payload(tensor, readers, values)


def append(
    obj: Any,
    path: str | PathLike[str],
    *,
    replace: bool = False,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    cast: Cast = "exact",
    progress: ProgressOption = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Any,
) -> None:
    """Add the tensors of a Dataset, DataTree or DataArray to a checkpoint.

    Nothing that is in the file is read or written anew. The longer file is complete under its
    name, or the old one is as it was: it is written beside it and renamed. Its first part is the
    old file, which the kernel copies, or shares where the file system can (see the notes).

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree or xarray.DataArray
        What is added; see `xckpt.save`. Attributes of it replace those of the same name that the
        file has.
    path : str or os.PathLike
        A file that is there, of a format that lets files grow: zTensor 1.0 or 2.
    replace : bool, default False
        Whether tensors replace those of the same name. The bytes of these stay in the file;
        `xckpt.convert` of the file to itself leaves them out.
    encoding : mapping of str to mapping, optional
        How the added tensors are stored, as `xckpt.save` takes it.
    cast : {"exact", "allow", "never"}
        What conversions may lose, as `xckpt.save` takes it.
    progress : bool or callable, optional
        As `xckpt.save` takes it; the old file counts.
    storage_options : dict, optional
        For fsspec, where `path` is a URL: the file is downloaded, and the longer one uploaded.
    **format_options
        Options of the format's own.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file has a tensor of the same name, and `replace` is false.
    UnsupportedError
        If files of this format do not grow, or cannot hold something.
    FileChangedError
        If another process wrote the file meanwhile.
    BlockingIOError
        If another process appends to it.
    OSError
        If the file cannot be written.

    Warns
    -----
    CheckpointWarning
        Of what is not written, or in another form.

    Notes
    -----
    On Btrfs, XFS, bcachefs and some network file systems the new file shares the blocks of the
    old one. Elsewhere (ext4, tmpfs) appending copies the old file once, and needs space for that.

    Examples
    --------
    >>> xckpt.append(ds[["lm_head.weight"]], "model.zt")  # doctest: +SKIP
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"expected a path or URL, got {type(path).__name__}")
    source, index = open_index(path, storage_options=storage_options)
    try:
        destination = Destination(
            path,
            index.format,
            encoding=encoding,
            cast=cast,
            overwrite=True,
            storage_options=storage_options,
            format_options=format_options,
        )
        if isinstance(source, ShardedSource):
            reason, hint = "several files are one checkpoint here", "Append to one of them"
            raise UnsupportedError(reason, rule="Append", hint=hint)
        plan = partial(destination.writer.append, source, replace=replace)
        changes = Changes()
        payloads, attrs = gather(obj, changes)
        whole = Part("uint8", (source.size,), 0, source.size)
        before = item_at(0, StoredData(PartReader(source, whole), source.size, (source.size,)))
        job = destination.job(payloads, attrs, changes, sources=[source], plan=plan, before=before)
        changes.warn(destination.path, stacklevel=2)
        with _alone(source):
            job.run(progress)
    except CheckpointError as error:
        raise error.located(path=source.name) from error.__cause__
    finally:
        source.close()


@contextmanager
def _alone(source: Source) -> Iterator[None]:
    """Keep others from appending to the same file: one of the two would be lost."""
    if not isinstance(source, LocalSource) or sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = Descriptor(source.name)
    try:
        fcntl.flock(descriptor.fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        text = "another process appends to this file"
        raise BlockingIOError(error.errno, text, source.name) from None
    except OSError:  # the file system has no locks
        pass
    source.check()  # who had the lock before may have replaced the file
    try:
        yield
    finally:
        del descriptor  # which closes it, and that unlocks
