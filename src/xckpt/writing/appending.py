"""Appending: a file that grows, while the old one can be read until the new one takes its place.

What is added lies behind the end of the old file (`plan_append` of the format), but a file that
grows in place cannot be read while it does, nor after a crash. So the old bytes are the first item
of a new file, which is written and renamed like any other. The kernel copies them; where the file
system can share blocks between files (Btrfs, XFS, bcachefs, NFS 4.2, SMB) they are not copied at
all.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from xckpt.arrays.parts import PartReader
from xckpt.errors import CheckpointError, UnsupportedError
from xckpt.index import Part
from xckpt.opening import open_index
from xckpt.plan import Extent
from xckpt.storage.local import Descriptor, LocalSource
from xckpt.storage.shard import ShardedSource
from xckpt.writing.contents import read_contents
from xckpt.writing.destination import Destination
from xckpt.writing.fitting import Notes
from xckpt.writing.items import LITERAL, Item
from xckpt.writing.stored_data import StoredData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from xckpt.formats import Format
    from xckpt.plan import Plan
    from xckpt.progress import ProgressOption
    from xckpt.storage import Source
    from xckpt.writing.casting import Cast

__all__ = ["append"]


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
        destination = Destination.of(
            path,
            index.format,
            encoding=encoding,
            cast=cast,
            overwrite=True,
            storage_options=storage_options,
            format_options=format_options,
        )
        plan = partial(_appending(destination.writer, source), source, replace=replace)
        notes = Notes()
        contents = read_contents(obj, notes)
        job = destination.job(contents, notes, plan, before=_whole(source), sources=[source])
        notes.warn(destination.path, stacklevel=2)
        with _alone(source):
            job.run(progress)
    except CheckpointError as error:
        raise error.located(path=source.name) from error.__cause__
    finally:
        source.close()


def _appending(writer: Format, source: Source) -> Callable[..., Plan]:
    if isinstance(source, ShardedSource):
        reason, hint = "several files are one checkpoint here", "Append to one of them"
        raise UnsupportedError(reason, rule="Append", hint=hint)
    return writer.append


def _whole(source: Source) -> Item:
    """Return all bytes of a file as what comes before all else."""
    part = Part("uint8", (source.size,), 0, source.size)
    return Item(Extent(*LITERAL, part, 0), StoredData(PartReader(source, part), source.size))


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
