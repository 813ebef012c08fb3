"""`save`, `convert` and `append`: an xarray object or a checkpoint becomes a file of a format.

What `append` adds lies after the end of the old file (`Format.append`), but a file that grows in
place cannot be read while it does, nor after a crash. So the old bytes are the first item of a new
file, which is written and renamed like any other. The kernel copies them; where the file system
can share blocks between files (Btrfs, XFS, bcachefs, NFS 4.2, SMB) they are not copied at all.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import xarray as xr

from xckpt import formats
from xckpt.arrays import read_later
from xckpt.arrays.parts import part_readers
from xckpt.datasets.mappings import as_dataset
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, CheckpointWarning, UnsupportedError, locating, shown
from xckpt.formatting import binary_size, counted
from xckpt.index import paused_collector
from xckpt.labels.filters import select_or_raise
from xckpt.labels.renaming import new_names
from xckpt.opening import open_index
from xckpt.opening.sharding import INDEX_SUFFIX
from xckpt.storage import is_remote, local_path
from xckpt.storage.local import LocalSource, OpenFile
from xckpt.storage.source import ShardedSource, files_of, sources_of
from xckpt.writing.casting import holds
from xckpt.writing.data import Gathered, dense_values, stored_payload
from xckpt.writing.fitting import TENSOR_OPTIONS, Fitting, Requests
from xckpt.writing.gathering import gather, source_files
from xckpt.writing.job import Target, WriteJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Unpack

    from dask.delayed import Delayed

    from xckpt.formats import FormatOptions
    from xckpt.index import Index, Tensor
    from xckpt.labels import TensorFilter
    from xckpt.labels.renaming import Renaming
    from xckpt.opening import OpenPath
    from xckpt.progress import ProgressOption
    from xckpt.storage import Source
    from xckpt.writing.casting import Cast

    Writable = xr.Dataset | xr.DataTree | xr.DataArray | Mapping[str, Any]

__all__ = ["Conversion", "Recast", "append", "convert", "save", "writer_of"]

# Those that all formats have.
_OPTIONS = (
    *("encoding", "cast", "compute", "overwrite", "progress", "storage_options"),
    *("tensors", "names", "verify", "source_engine"),
)


def save(
    obj: Writable,
    path: str | PathLike[str],
    engine: str | None = None,
    *,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    cast: Cast = "exact",
    compute: bool = True,
    overwrite: bool = False,
    progress: ProgressOption = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Unpack[FormatOptions],
) -> Any:  # a Delayed or None, which depends on the value of `compute`
    """Write a Dataset, DataTree, DataArray or mapping of arrays, without loading it into memory.

    The file is complete under its name, or not there: it is written next to its place and renamed,
    so that after an error, Ctrl-C or a full disk an old file is as it was. What xckpt opened and
    nobody touched is copied as it is stored; what was computed is converted back to the element
    type that it was stored with.

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree, xarray.DataArray, or mapping of str to array
        Its variables become tensors, and so do coordinates with numbers.
    path : str or os.PathLike
        The new file, a path or an fsspec URL.
    engine : str, optional
        Name of the format; by default the one that the ending of `path` belongs to.
    encoding : mapping of str to mapping, optional
        How tensors are stored: globs of names to ``compression`` (``"zstd"``,
        ``"zstd-seekable"`` or None), ``level`` (1 to 22), ``digest`` (``"crc32c"``,
        ``"sha256"``, ... or None), ``dtype``, and ``layout`` (``"dense"`` for the values of
        sparse and quantised tensors). Later globs have the last word.
    cast : {"exact", "allow", "never"}
        How much a change of element type may lose: nothing, bit for bit (exact), or precision
        (allow). With ``"never"`` a type or layout that the format does not have is an error.
    compute : bool, default True
        False returns a `dask.delayed.Delayed` that writes when it is computed.
    overwrite : bool, default False
        Whether an existing file is replaced.
    progress : bool or callable, optional
        As for `xckpt.stats`.
    storage_options : dict, optional
        For fsspec, where `path` is a URL.
    **format_options
        Options of the format itself.

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
        If something is not written, or is written in another form; it says what.

    Examples
    --------
    >>> xckpt.save(ds, "m.zt", encoding={"*": {"compression": "zstd"}})  # doctest: +SKIP
    >>> xckpt.save(ds.astype("float16"), "half.safetensors")  # doctest: +SKIP
    """
    obj = as_dataset(obj)
    fitting = Fitting(writer_of(path, engine, format_options), Requests(encoding), cast)
    format = fitting.writer.name
    gathered = gather(obj, fitting.changes, format)
    job = _write_job(
        gathered,
        fitting,
        _target(path, overwrite=overwrite, storage_options=storage_options),
        format_options,
        sources=source_files(gathered.payloads),
        before=partial(_opened_as, obj, format),
    )
    if compute:
        job.run(progress)
        return None
    job.target.check()  # errors of the target are raised now
    delayed: Delayed = job.delayed()
    return delayed


def _opened_as(obj: Any, format: str) -> Index | None:
    """Return the index of the file that an object was opened from, if that is of a format."""
    whole = obj.root if isinstance(obj, xr.DataTree) else obj
    if whole.encoding.get("format") != format:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            source, index = open_index(whole.encoding["source"], format)
    except (LookupError, OSError, ValueError, CheckpointError):  # it is gone, or needs options
        return None
    source.close()
    return index


def convert(
    src: OpenPath,
    dst: str | PathLike[str],
    engine: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    names: Renaming | None = None,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    cast: Cast = "exact",
    overwrite: bool = False,
    progress: ProgressOption = None,
    verify: bool | None = None,
    source_engine: str | None = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Unpack[FormatOptions],
) -> Conversion:
    """Write a checkpoint in another format, or anew in its own.

    Values are copied as they are stored wherever the new format stores them so: nothing is loaded
    into memory, and digests that the old file states are checked on the way. Names, element
    types, memory order, names of axes, compression, digests and attributes are kept as far as the
    new format has them; anything that it cannot hold is reported in one warning.

    Parameters
    ----------
    src : str, os.PathLike, bytes or binary file object
        The checkpoint, as `xckpt.read_index` takes it.
    dst : str or os.PathLike
        The new file, a path or an fsspec URL.
    engine : str, optional
        Name of the new format; by default the one that the ending of `dst` belongs to.
    tensors : str, iterable of str, re.Pattern or callable, optional
        Which tensors, by their old names, as ``xr.open_dataset(..., tensors=)`` takes it; by
        default all.
    names : mapping, callable, or pair of a regular expression and its replacement, optional
        From old names to new ones, such as ``found.ckpt.names`` of a comparison; a mapping need not
        have those that stay the same, a pair is used as by `re.sub`. Values are copied all the
        same.
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
    source_engine : str, optional
        Name of the format of the old file; by default it is detected from the content.
    storage_options : dict, optional
        For fsspec, of both files.
    **format_options
        Options of the new format itself.

    Returns
    -------
    Conversion
        What was written, and which element types changed.

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
    ValueError
        If no tensor matches `tensors`, or `names` has a name that no tensor has, or gives two
        tensors one name.

    Warns
    -----
    CheckpointWarning
        If something is not written, or is written in another form; it says what.

    Examples
    --------
    >>> xckpt.convert("model.bpk", "model.zt")  # doctest: +SKIP
    """
    fitting = Fitting(writer_of(dst, engine, format_options), Requests(encoding), cast)
    target = _target(dst, overwrite=overwrite, storage_options=storage_options)
    source, index = open_index(src, source_engine, storage_options=storage_options)
    with closing(source), locating(path=source.name):
        with paused_collector():
            sources = sources_of(source, index.shards)
            new = new_names(index.tensors, names)
            chosen = _chosen(index, tensors, new)
            payloads = [
                stored_payload(
                    tensor,
                    part_readers(tensor, sources, verify=verify),
                    dense_values(tensor, sources, verify=verify),
                )
                for tensor in chosen
            ]
            gathered = Gathered(
                payloads,
                read_later(index.attrs, sources),
                index.arrangement.renamed(new),
                index.attr_types,
            )
            same = index if index.format == fitting.writer.name else None
            job = _write_job(
                gathered,
                fitting,
                target,
                format_options,
                sources=files_of(source),
                before=lambda: same,
            )
        nbytes = job.run(progress)
    recasts = tuple(
        Recast(*types, count, exact=cast != "allow" or holds(*reversed(types)))
        for types, count in fitting.changes.recast.items()
    )
    before = sum([tensor.nbytes for tensor in chosen])
    count = len(job.tensors)
    return Conversion(job.target.path, fitting.writer.name, count, nbytes, before, recasts)


def _chosen(index: Index, tensors: TensorFilter | None, new: Mapping[str, str]) -> list[Tensor]:
    """Return the tensors that are written, under their new names."""
    chosen = {name: new[name] for name in select_or_raise(index.tensors, tensors)}
    new_names(chosen, chosen, unique=True)
    found = []
    for old, name in chosen.items():
        before = after = index.tensors[old]
        if name != old:
            after = replace(before.named(name), path=None)
        if before.stored is not None and after.stored is None:
            stored = ", ".join([shown(each.name) for each in before.stored.values()])
            raise ValueError(
                f"names gives {shown(old)} the name {shown(name)}, but it is stored as {stored}: "
                "the new name must end as the old one"
            )
        found.append(after)
    return found


def append(
    obj: Writable,
    path: str | PathLike[str],
    *,
    replace: bool = False,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    cast: Cast = "exact",
    progress: ProgressOption = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Unpack[FormatOptions],
) -> None:
    """Add the tensors of a Dataset, DataTree or DataArray to a checkpoint.

    Nothing that is in the file is read or written anew. The longer file is complete under its
    name, or the old one is as it was: it is written next to it and renamed. It begins with the
    bytes of the old file, which the kernel copies, or shares where the file system can (see below).

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree, xarray.DataArray, or mapping of str to array
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
        Options of the format itself.

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
        If something is not written, or is written in another form; it says what.

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
    obj = as_dataset(obj)
    source, index = open_index(path, storage_options=storage_options, whole=False)
    try:
        writer = writer_of(path, index.format, format_options)
        fitting = Fitting(writer, Requests(encoding), cast)
        if isinstance(source, ShardedSource):
            reason, hint = "several files are one checkpoint here", "Append to one of them"
            raise UnsupportedError(reason, rule="Append", hint=hint)
        job = _write_job(
            gather(obj, fitting.changes),
            fitting,
            _target(path, overwrite=True, storage_options=storage_options),
            format_options,
            sources=[source],
            before=partial(_opened_as, obj, index.format),
            grown=source,
            replace=replace,
        )
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

    descriptor = OpenFile(source.name)
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


# --- where to, and as what ------------------------------------------------------------------------


def writer_of(
    path: str | PathLike[str],
    engine: str | None = None,
    format_options: Mapping[str, Any] | None = None,
) -> formats.Format:
    """Return the format of a new file; raise if it lacks one of the options."""
    writer = formats.writable(engine or _format_of(os.fspath(path)))
    known = tuple(writer.write_options)
    for option in format_options or {}:
        if option not in known:
            similar = get_close_matches(option, (*_OPTIONS, *known), n=1)
            hint = f"it has {', '.join(known) or 'none'}"
            if option in TENSOR_OPTIONS:
                hint = f"tensors have it: encoding={{'*': {{{option!r}: ...}}}}"
            elif similar:
                hint = f"did you mean {similar[0]!r}?"
            raise TypeError(f"format {writer.name!r} has no option {option!r} for writing; {hint}")
    return writer


def _target(
    path: str | PathLike[str], *, overwrite: bool, storage_options: dict[str, Any] | None
) -> Target:
    target = os.fspath(path)
    target = target if is_remote(target) else local_path(target)
    return Target(target, overwrite, storage_options)


def _write_job(
    gathered: Gathered,
    fitting: Fitting,
    target: Target,
    format_options: Mapping[str, Any],
    *,
    sources: Iterable[Source],
    before: Callable[[], Index | None],
    grown: Source | None = None,
    replace: bool = False,
) -> WriteJob:
    """Lay out a file, and warn of changes; nothing is written yet.

    `before` returns the index of the file that is written anew, if it has the same format. `grown`
    is the file that is added to, and `replace` is whether tensors of it are replaced.
    """
    path, writer = target.path, fitting.writer
    try:
        draft, payloads = fitting.draft(gathered, path)
        make_plan = writer.plan
        if grown is not None:
            make_plan = partial(writer.append, grown, replace=replace)
        plan = make_plan(draft, **format_options)
        for loss, names in plan.losses.items():
            for name in names:
                fitting.changes.add(loss, name)
        fitting.tell_stated(draft, plan, given=format_options, before=before, grown=grown)
        label = os.path.basename(path)  # noqa: PTH119  it may be a URL
        paths = [path, *map(target.companion, plan.companions)]
        superseded = None
        if plan.suffix:
            target.check()  # an existing file is an error, though it is not written
            superseded = label if target.overwrite else None
            target = target._replace(path=path + plan.suffix)
            paths.append(target.path)
        elif not is_remote(path) and os.path.lexists(path + INDEX_SUFFIX):
            what = "readers may prefer what is next to it; remove it"
            fitting.changes.add(what, label + INDEX_SUFFIX)
        overwritten = {_resolved(name) for name in paths if target.overwrite}
        job = WriteJob(
            plan,
            payloads,
            fitting.cast,
            target,
            label,
            grown=grown,
            replaced=[source for source in sources if _resolved(source.name) in overwritten],
            superseded=superseded,
        )
    except CheckpointError as error:
        raise error.located(path=path) from error.__cause__
    fitting.changes.warn(target.path)
    return job


def _resolved(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(os.path.expanduser(path))  # noqa: PTH111


def _format_of(path: str) -> str:
    """Find the format that a file name ends like."""
    name = path.partition("?")[0].lower() if is_remote(path) else path.lower()
    is_index = name.endswith(INDEX_SUFFIX)
    name = name.removesuffix(INDEX_SUFFIX)
    named = [known for known in formats.names() if name.endswith(formats.suffixes(known))]
    every = [formats.get(known) for known in named]
    found = {
        each.name: suffix
        for each in every
        if each.can.types and (not is_index or "max_shard_size" in each.write_options)
        for suffix in each.suffixes
        if name.endswith(suffix)
    }
    if len(found) > 1:
        own = {each.name: each.own_suffixes for each in every}
        found = {each: s for each, s in found.items() if s in own[each]} or found
    shared = [s for each in every for s in each.shared_suffixes]
    # Of one word, like .bin: who writes it may mean the format of another program.
    is_common = any(s in shared and s.count(".") == 1 for s in found.values())
    if len(found) == 1 and not is_common:
        return next(iter(found))
    for each in every:
        if not found and name.endswith(each.own_suffixes):
            formats.writable(each.name)  # says which formats are
    hint, engines = "", ", ".join(map(repr, found))
    if not found:
        known = [each for each in map(formats.get, formats.names()) if each.can.types]
        suffixes = [suffix for each in known for suffix in each.suffixes]
        ending = os.path.splitext(name)[1]  # noqa: PTH122
        for alike in get_close_matches(ending, suffixes, n=1, cutoff=0.88):
            hint = f" (did you mean {alike!r}?)"
        engines = ", ".join(repr(each.name) for each in known)
    which = "several programs use" if found else "no format that is written has"
    raise ValueError(
        f"{which} the ending of {os.path.basename(path)!r}{hint}; pass engine=, one of {engines}"  # noqa: PTH119
    )


# --- what a conversion did ------------------------------------------------------------------------


class Recast(NamedTuple):
    """Tensors that a conversion wrote in another element type.

    Parameters
    ----------
    stored, written : str
        Element types in the old and in the new file.
    tensors : int
        How many.
    exact : bool
        Whether no value changed: the new type has all values of the old one, or each was checked.
        Else they were rounded, as ``cast="allow"`` asked for.
    """

    stored: str
    written: str
    tensors: int
    exact: bool

    def __str__(self) -> str:
        wide, narrow = ELEMENT_TYPES[self.written].bits, ELEMENT_TYPES[self.stored].bits
        size = f"{max(wide, narrow) / min(wide, narrow):.1f} x"
        size = "of the same size" if wide == narrow else size
        size += " larger" if wide > narrow else " smaller" if wide < narrow else ""
        exact = "exact" if self.exact else "rounded"
        tensors = counted(self.tensors, f"{self.stored} tensor")
        return f"{tensors} written as {self.written} ({exact}), {size}"


@dataclass(frozen=True, slots=True, repr=False)
class Conversion:
    """What `convert` wrote.

    Parameters
    ----------
    path : str
        The new file; of several, the one to open.
    format : str
        Its format.
    tensors : int
        How many it has.
    nbytes : int
        Size of the new file, or of all new files, in bytes.
    source_nbytes : int
        Stored size of the tensors in the old file, in bytes.
    recasts : tuple of Recast
        Which element types changed.
    """

    path: str
    format: str
    tensors: int
    nbytes: int
    source_nbytes: int
    recasts: tuple[Recast, ...]

    @property
    def exact(self) -> bool:
        """Whether no value was rounded."""
        return all(recast.exact for recast in self.recasts)

    def __repr__(self) -> str:
        size = f"{binary_size(self.nbytes)}, was {binary_size(self.source_nbytes)}"
        head = f"{self.path}: {self.format}, {counted(self.tensors, 'tensor')}, {size}"
        return "\n".join([head, *(f"  {recast}" for recast in self.recasts)])
