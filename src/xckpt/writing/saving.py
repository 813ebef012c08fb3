"""`save`, `convert` and `append`: write an xarray object or a checkpoint to a file.

`append` adds bytes after the end of the old file (`Format.append`). A file that grew in place would
be unreadable meanwhile, and after a crash. Instead, a new file is written and renamed like any
other, and starts with the old bytes. The kernel copies them, or shares their blocks between the
files if the file system supports it (Btrfs, XFS, bcachefs, NFS 4.2, SMB).
"""

from __future__ import annotations

import sys
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

from xckpt.arrays import ReadOptions, lazy_arrays, read_later
from xckpt.arrays.converted import Cast, holds
from xckpt.arrays.parts import part_readers
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, UnsupportedError, locating, shown
from xckpt.formatting import binary_size, counted
from xckpt.index import Index, Tensor, paused_collector
from xckpt.labels.filters import combined, select_or_raise
from xckpt.labels.renaming import Renaming, edited_attrs, new_names
from xckpt.notebook.documents import Block, Heading, Sentence
from xckpt.notebook.shown import Shown
from xckpt.opening import open_index
from xckpt.options import RENAMING, takes
from xckpt.storage.local import LocalSource, OpenFile
from xckpt.storage.source import ShardedSource, files_of, sources_of
from xckpt.structure import Structure, structure_of
from xckpt.structure.facts import model_facts
from xckpt.structure.info import Described
from xckpt.writing.companions import fit_attributes
from xckpt.writing.fitting import Fitting, Requests
from xckpt.writing.job import plan_job
from xckpt.writing.origins import without_lost_training
from xckpt.writing.payloads import Gathered, Payload, lazy_dask_array, source_files, stored_payload
from xckpt.writing.rehearsal import stated_before
from xckpt.writing.targets import Target, new_target, writer_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import xarray as xr
    from dask.delayed import Delayed

    from xckpt.formats import FormatOptions
    from xckpt.labels import TensorFilter
    from xckpt.opening import OpenPath
    from xckpt.progress import ProgressOption
    from xckpt.storage import Source

    Writable = xr.Dataset | xr.DataTree | xr.DataArray | Mapping[str, Any]


@takes()
def save(
    obj: Writable,
    path: str | PathLike[str],
    engine: str | None = None,
    *,
    dtype: str | None = None,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    cast: Cast = "exact",
    skip_unreadable: bool = False,
    compute: bool = True,
    overwrite: bool = False,
    progress: ProgressOption = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Unpack[FormatOptions],
) -> Any:  # a Delayed or None, which depends on the value of `compute`
    """Write a Dataset, DataTree, DataArray or mapping of arrays, without loading it into memory.

    The new file appears under its name only when it is complete: it is written next to its
    destination and renamed. After an error, Ctrl-C or a full disk, an old file is unchanged.
    Unchanged variables of an opened checkpoint are copied as stored. Values that were changed in
    place, or by ``merge``, are converted back to the element type that they were stored with.
    Results of arithmetic have the type of their values, float32 for half precision; counters and
    constants of integers stay integers.

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree, xarray.DataArray, or mapping of str to array
        Data to write. Variables become tensors, and so do coordinates with numbers.
    path : str or os.PathLike
        The new file, a path or an fsspec URL; or a folder, ``"out/"``, which gets
        ``model.safetensors``, and configuration and tokenizer of the source as far as they fit.
    engine : str, optional
        Name of the format; inferred from the suffix of `path` by default.
    dtype : str, optional
        Element type of all floats: ``"float32"``, ``"bf16"``, ... Integers keep their type, unless
        this is one of integers; ``encoding={"*": {"dtype": ...}}`` is the type of all tensors.
    encoding : mapping of str to mapping, optional
        Storage options by glob of tensor names: ``compression`` (``"zstd"``,
        ``"zstd-seekable"`` or None), ``level`` (1 to 22), ``digest`` (``"crc32c"``,
        ``"sha256"``, ... or None), ``dtype``, and ``layout`` (``"dense"`` for the values of
        sparse and quantised tensors). Later globs take precedence.
    cast : {"exact", "allow", "never"}
        Permitted changes of element type: lossless ones (``"exact"``), or also ones that lose
        precision (``"allow"``). With ``"never"`` an unsupported type or layout is an error.
    compute : bool, default True
        False returns a `dask.delayed.Delayed` that writes when it is computed.
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
        If another process changed a source file, including one that this save replaces.
    UnsupportedError
        If the format cannot represent part of the data, or a conversion would lose information.
    CheckpointError
        If tensors cannot be read.
    OSError
        If the file cannot be written.

    Warns
    -----
    CheckpointWarning
        If data is dropped or changes its form, such as finite values that become infinite; the
        warning lists the changes.

    Examples
    --------
    >>> xckpt.save(ds, "small.zt", encoding={"*": {"compression": "zstd"}})
    >>> xckpt.save(ds[["lm_head.weight"]].astype("float16"), "half.safetensors")
    """
    fitting = Fitting(
        writer_of(path, engine, format_options),
        Requests(encoding, dtype),
        cast,
        skip_unreadable=skip_unreadable,
    )
    from xckpt.writing.gathering import gather, note_losses, opened_as

    with new_target(path, engine, overwrite=overwrite, storage_options=storage_options) as target:
        note_losses(obj, fitting.changes, is_model=target.is_folder)
        format = fitting.writer.name
        gathered = without_lost_training(gather(obj, fitting, format))
        if not target.is_folder:
            gathered = fit_attributes(gathered, fitting.changes)
        job = plan_job(
            gathered,
            fitting,
            target,
            format_options,
            sources=source_files(gathered.payloads),
            before=partial(opened_as, obj, format),
        )
        if compute:
            job.run(progress)
            return None
        job.target.check()  # raise errors of the target now, not when the result is computed
        delayed: Delayed = job.delayed()
        return delayed


@takes(
    rename=RENAMING,
    attrs="did you mean 'set_attrs'?",
    metadata="did you mean 'set_attrs'?",
)
def convert(
    src: OpenPath,
    dst: str | PathLike[str],
    engine: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    names: Renaming | None = None,
    set_attrs: Mapping[str, Any] | None = None,
    unset_attrs: str | Iterable[str] | None = None,
    dtype: str | None = None,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    cast: Cast = "exact",
    skip_unreadable: bool = False,
    overwrite: bool = False,
    progress: ProgressOption = None,
    verify: bool | None = None,
    source_engine: str | None = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Unpack[FormatOptions],
) -> Conversion:
    """Write a checkpoint in another format, or rewrite it in its own.

    Values are copied as stored if the new format supports it, without loading them into memory.
    Digests in the old file are checked during the copy. Names, element types, memory order, names
    of axes, compression, digests and attributes are kept as far as the new format supports them;
    one warning lists everything else.

    Parameters
    ----------
    src : str, os.PathLike, bytes or binary file object
        The checkpoint, as for `xckpt.read_index`.
    dst : str or os.PathLike
        The new file, a path or an fsspec URL; or a folder, as for `xckpt.save`.
    engine : str, optional
        Name of the new format; inferred from the suffix of `dst` by default.
    names : mapping, callable, or pairs of regular expressions and replacements, optional
        New names by old names, such as ``result.ckpt.names`` of a comparison. A mapping may omit
        names that stay the same; pairs apply in order, as by `re.sub`. Values of renamed tensors
        are copied as well.
    set_attrs : mapping of str to value, optional
        Attributes of the new file to add or to replace. A number, a truth value or a list stays
        one, and a key of GGUF keeps its type if that holds the value.
    unset_attrs : str or iterable of str, optional
        Names of attributes to leave out.
    dtype : str, optional
        Element type of all floats, as for `xckpt.save`.
    encoding : mapping of str to mapping, optional
        Storage options by glob of tensor names, as for `xckpt.save`.
    cast : {"exact", "allow", "never"}
        Permitted changes of element type, as for `xckpt.save`.
    verify : bool, optional
        Check the digests of the old file, unless False.
    source_engine : str, optional
        Name of the format of the old file; detected from the content by default.
    **format_options
        Options of the new format itself.

    Returns
    -------
    Conversion
        The new file, its size, and the element types that changed.

    Raises
    ------
    FileExistsError
        If the new file exists and `overwrite` is false.
    FileChangedError
        If another process changed the old file during the conversion.
    IntegrityError
        If values do not match their digest in the old file.
    CheckpointError
        If tensors cannot be read.
    UnsupportedError
        If the new format cannot represent part of the data, or a conversion would lose
        information.
    OSError
        If a file cannot be read or written.
    ValueError
        If no tensor matches `tensors`, if `names` has an unknown name or gives two tensors the same
        name, or if an attribute to unset is missing or one to set is of another kind.

    Warns
    -----
    CheckpointWarning
        If data is dropped or changes its form; the warning lists the changes.

    Examples
    --------
    >>> done = xckpt.convert("model.bpk", "model.zt")
    >>> done = xckpt.convert("m.zt", "new.zt", names=("^lm_", ""), set_attrs={"licence": "MIT"})
    """
    fitting = Fitting(
        writer_of(dst, engine, format_options),
        Requests(encoding, dtype),
        cast,
        skip_unreadable=skip_unreadable,
    )
    source, index = open_index(
        src, source_engine, storage_options=storage_options, missing="ignore"
    )
    into = new_target(
        dst,
        engine,
        overwrite=overwrite,
        storage_options=storage_options,
    )
    with closing(source), into as target, locating(path=source.name):
        with paused_collector():
            chosen = combined(tensors, exclude, only, lambda: [structure_of(index)])
            renamed = new_names(index.tensors, names)
            selected = _select_tensors(index, chosen, renamed)
            readable = _readable_tensors(selected, fitting, source.name)
            sources = sources_of(source, index.shards)
            if names is not None:
                _note_orders(fitting, readable, renamed, index, source.name)
            gathered = Gathered(
                [_payload(tensor, sources, verify) for tensor in readable],
                edited_attrs(read_later(index.attrs, sources), set_attrs, unset_attrs),
                index.arrangement.renamed(renamed),
                index.attr_types,
                index.source,
            )
            job = plan_job(
                without_lost_training(gathered, index),
                fitting,
                target,
                format_options,
                sources=files_of(source),
                before=partial(stated_before, index, fitting.writer.name),
            )
        nbytes = job.run(progress)
    return Conversion(
        path=job.target.path,
        format=fitting.writer.name,
        tensors=len(job.tensors),
        nbytes=nbytes,
        # The sizes of whole files compare; a selection has no size in the old file.
        source_nbytes=index.nbytes if len(readable) == len(index.tensors) else None,
        recasts=_recasts_of(fitting),
    )


def _readable_tensors(selected: list[Tensor], fitting: Fitting, source: str) -> list[Tensor]:
    """Return the tensors that can be read; raise if there are others, unless they are left out."""
    fitting.changes.lost = {t.name: t.problem for t in selected if t.problem is not None}
    readable = [tensor for tensor in selected if tensor.problem is None]
    fitting.require_readable(len(readable), source)
    return readable


def _note_orders(
    fitting: Fitting,
    tensors: Sequence[Tensor],
    renamed: Mapping[str, str],
    index: Index,
    source: str,
) -> None:
    """Note the tensors whose new names stand for another order of their rows."""
    from xckpt.datasets.row_orders import renamed_orders

    facts = model_facts(index.attrs, format=index.format)
    structure = Structure([Described(t.name, t.dtype, t.shape) for t in tensors], facts)
    old_names = {new: old for old, new in renamed.items() if new in structure}
    for change, names in renamed_orders(structure, old_names, source).items():
        fitting.changes.add_all(change, names)


def _recasts_of(fitting: Fitting) -> tuple[Recast, ...]:
    """Return the changes of element types."""
    may_round = fitting.cast == "allow"
    return tuple([
        Recast(before, after, count, exact=not may_round or holds(after, before))
        for (before, after), count in fitting.changes.recast.items()
    ])  # fmt: skip


def _payload(
    tensor: Tensor,
    sources: Mapping[str | None, Source],
    verify: bool | None,  # noqa: FBT001  as an option of `convert`
) -> Payload:
    """Return a tensor to be written with its stored bytes, or as a dense dask array of values."""

    def values() -> Any:
        return lazy_dask_array(lazy_arrays(tensor, sources, ReadOptions(verify=verify))[None])

    return stored_payload(tensor, part_readers(tensor, sources, verify=verify), values)


def _select_tensors(
    index: Index, tensors: TensorFilter | None, renamed: Mapping[str, str]
) -> list[Tensor]:
    """Return the tensors to write, under their new names."""
    names = {old: renamed[old] for old in select_or_raise(index.tensors, tensors)}
    new_names(names, names, unique=True)
    selected = []
    for old, name in names.items():
        before = after = index.tensors[old]
        if name != old:
            after = replace(before.named(name), path=None)
        if before.stored is not None and after.stored is None:
            stored = ", ".join([shown(tensor.name) for tensor in before.stored.values()])
            raise ValueError(
                f"names gives {shown(old)} the name {shown(name)}, but it is stored as {stored}: "
                "the new name must end as the old one"
            )
        selected.append(after)
    return selected


@takes()
def append(
    obj: Writable,
    path: str | PathLike[str],
    *,
    replace: bool = False,
    encoding: Mapping[str, Mapping[str, Any]] | None = None,
    cast: Cast = "exact",
    skip_unreadable: bool = False,
    progress: ProgressOption = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Unpack[FormatOptions],
) -> None:
    """Add the tensors of a Dataset, DataTree or DataArray to a checkpoint.

    Tensors already in the file are neither parsed nor rewritten. The new file starts with the
    bytes of the old one, which the kernel copies, or shares if the file system supports it (see
    below). It is written next to the old file and renamed when it is complete, so that the old
    file is unchanged after an error.

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree, xarray.DataArray, or mapping of str to array
        Data to add, as for `xckpt.save`. Its attributes replace attributes of the file with the
        same name.
    path : str or os.PathLike
        An existing file of a format that supports appending: zTensor 1.0 or 2.
    replace : bool, default False
        Replace tensors with the same name. Their old bytes stay in the file until it is
        rewritten, such as by `xckpt.convert` of the file to itself.
    encoding : mapping of str to mapping, optional
        Storage options of the added tensors, as for `xckpt.save`.
    cast : {"exact", "allow", "never"}
        Permitted changes of element type, as for `xckpt.save`.
    **format_options
        Options of the format itself.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file has a tensor with the same name, and `replace` is false.
    UnsupportedError
        If the format does not support appending, or cannot represent part of the data.
    FileChangedError
        If another process changed the file in the meantime.
    BlockingIOError
        If another process is appending to the file.
    OSError
        If the file cannot be written.

    Warns
    -----
    CheckpointWarning
        If data is dropped or changes its form; the warning lists the changes.

    Notes
    -----
    On Btrfs, XFS, bcachefs and some network file systems the new file shares the blocks of the
    old one. Elsewhere (ext4, tmpfs) appending copies the old file once, and needs space for it.

    Examples
    --------
    >>> xckpt.append({"scale": np.ones(3)}, "m.zt")
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"expected a path or URL, got {type(path).__name__}")
    from xckpt.writing.gathering import gather, opened_as

    source, index = open_index(path, storage_options=storage_options, whole=False)
    try:
        writer = writer_of(path, index.format, format_options)
        fitting = Fitting(writer, Requests(encoding), cast, skip_unreadable=skip_unreadable)
        if isinstance(source, ShardedSource):
            reason, hint = "several files are one checkpoint here", "Append to one of them"
            raise UnsupportedError(reason, rule="Append", hint=hint)
        job = plan_job(
            gather(obj, fitting),
            fitting,
            Target.of(path, overwrite=True, storage_options=storage_options),
            format_options,
            sources=[source],
            before=partial(opened_as, obj, index.format),
            grown=source,
            replace=replace,
        )
        with _append_lock(source):
            job.run(progress)
    except CheckpointError as error:
        raise error.located(path=source.name) from error.__cause__
    finally:
        source.close()


@contextmanager
def _append_lock(source: Source) -> Iterator[None]:
    """Lock a local file against appends by other processes, which would be lost."""
    if not isinstance(source, LocalSource) or sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = None
    try:
        descriptor = OpenFile(source.name)
        try:
            fcntl.flock(descriptor.fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = "another process appends to this file"
            raise BlockingIOError(error.errno, text, source.name) from None
        except OSError:  # the file system has no locks
            pass
        source.check()  # the previous owner of the lock may have replaced the file
        yield
    finally:
        # Closing the file releases the lock, also if a notebook keeps the frames of an error.
        del descriptor


# --- results of a conversion ----------------------------------------------------------------------


class Recast(NamedTuple):
    """Tensors that a conversion wrote in another element type.

    Parameters
    ----------
    stored, written : str
        Element types in the old and in the new file.
    tensors : int
        Number of tensors.
    exact : bool
        True if no value changed: the new type has all values of the old one, or each value was
        checked. False if values may be rounded, which requires ``cast="allow"``.

    Examples
    --------
    >>> str(xckpt.writing.Recast("bfloat16", "float32", tensors=3, exact=True))
    '3 bfloat16 tensors written as float32 (exact), 2.0 x larger'
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
class Conversion(Shown):
    """Summary of a conversion, returned by `convert`.

    Parameters
    ----------
    path : str
        The new file, or the one to open if there are several.
    format : str
        Name of its format.
    tensors : int
        Number of tensors.
    nbytes : int
        Size of the new file, or of all new files, in bytes.
    source_nbytes : int or None
        Size of the old file, or of all old files, in bytes; None if only some of their tensors were
        written.
    recasts : tuple of Recast
        Changes of element types.

    Examples
    --------
    >>> done = xckpt.convert("model.bpk", "m.npz")
    >>> print(*done.recasts)
    36 bfloat16 tensors written as float32 (exact), 2.0 x larger
    """

    path: str
    format: str
    tensors: int
    nbytes: int
    source_nbytes: int | None
    recasts: tuple[Recast, ...]

    @property
    def exact(self) -> bool:
        """True if no value was rounded."""
        return all(recast.exact for recast in self.recasts)

    def _blocks(self) -> list[Block]:
        size = binary_size(self.nbytes)
        if self.source_nbytes is not None:
            size += f", was {binary_size(self.source_nbytes)}"
        facts = [self.format, counted(self.tensors, "tensor"), size]
        lines = [Sentence("", str(recast)) for recast in self.recasts]
        return [Heading(self.path, facts=facts), *lines]
