"""Opening: from paths, URLs, open files or bytes to a `Source` and an `Index`.

The room decides which files belong to a checkpoint and which format they have; it also opens
training runs and describes files for zarr. It may import `formats` (the registry), `storage`,
`datasets` and everything below them. Read `open_index` below first, then `files` for the files that
are one checkpoint, and `merging` for how they become one `Index`. `detection` answers other rooms
which format a file has.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import replace
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import xckpt.notebook  # noqa: F401  it registers the summary of an Index
from xckpt import formats
from xckpt.elements import nbytes_of
from xckpt.errors import (
    CheckpointError,
    FileChangedError,
    FormatError,
    MissingShardError,
    UnreadableWarning,
    unreadable_text,
    warn,
)
from xckpt.index import FileSet, Index, Tensor, paused_collector
from xckpt.labels.filters import correct, has_match, no_match, select
from xckpt.opening.files import file_name, files_of, set_of
from xckpt.opening.hints import advising
from xckpt.opening.merging import OpenFile, merge
from xckpt.opening.names import rank_of
from xckpt.opening.reading import open_place, read_file, read_sibling
from xckpt.quantization import assemble_weights, may_be_quantized, with_counts
from xckpt.quantization.model import find_declaration, parse_json
from xckpt.storage import Location, Source
from xckpt.storage.source import first_file, sources_of
from xckpt.structure.axes import name_modules_with

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from xckpt.datasets.options import OpenOptions
    from xckpt.labels import TensorFilter
    from xckpt.opening.checkpoint import CheckpointFile, CheckpointFiles
    from xckpt.opening.ranks import JoinRanks
    from xckpt.structure.axes import ModuleAxes

    Missing = Literal["warn", "raise", "ignore"]
    OpenPath = str | os.PathLike[str] | bytes | BinaryIO | Sequence[str | os.PathLike[str]]


def _module_axes(format: str) -> ModuleAxes | None:
    """Return the method of a format that names axes within modules; None if it names none."""
    file_format = formats.get(format) if format in formats.names() else None
    if file_format is None or type(file_format).module_axes is formats.Format.module_axes:
        return None
    return file_format.module_axes


name_modules_with(_module_axes)

_SHOWN_WARNINGS = 3
# Files whose headers are read in parallel.
_CONCURRENCY = 16


def read_index(path: OpenPath, *, storage_options: dict[str, Any] | None = None) -> Index:
    """Read the index of a checkpoint: its tensors, attributes, and byte ranges, but no data.

    Parameters
    ----------
    path : str, os.PathLike, bytes, binary file object, or list of these
        Path, URL, or content of the file. Several files, a glob or an index of shards
        (``*.index.json``) are one checkpoint.
    storage_options : dict, optional
        Credentials, time limits and other options of URLs, such as ``{"anon": True}``.

    Returns
    -------
    Index
        The index, in the same form for all formats.

    Raises
    ------
    OSError
        If the file cannot be opened.
    CheckpointError
        If the file is malformed or has an unknown format.

    Examples
    --------
    >>> index = xckpt.read_index("m.zt")
    >>> index["lm_head.weight"].dtype
    'float16'
    """
    return open_index(path, storage_options=storage_options)[1]


def open_with(
    options: OpenOptions,
    path: Any,
    format: str | None,
    *,
    counted: bool = False,
    silent: bool = False,
) -> tuple[Source, Index]:
    """Open a checkpoint for a Dataset; the index has the structure that the options state."""
    source, index = open_index(
        path,
        format,
        storage_options=options.storage_options,
        mmap=options.mmap,
        whole=options.decode,
        counted=counted,
        silent=silent,
        tensors=options.tensors,
        missing=options.missing,
        join_ranks=options.join_ranks,
        **options.format_options,
    )
    return source, index if options.structure is None else correct(index, options.structure)


def open_index(
    path: Any,
    format: str | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
    mmap: bool = False,
    whole: bool = True,
    counted: bool = False,
    silent: bool = False,
    tensors: TensorFilter | None = None,
    missing: Missing = "warn",
    join_ranks: JoinRanks = "auto",
    **format_options: Any,
) -> tuple[Source, Index]:
    """Open a checkpoint, read its index, and issue the warnings of the index unless `silent`.

    Quantised weights are listed as `whole` weights, or as their stored tensors; if `counted`, codes
    then declare their elements. `missing` is what to do about tensors among `tensors` that cannot
    be read: warn or raise, or nothing (``"ignore"``) if the caller reports them. `join_ranks` is
    whether ranks of one model become whole tensors; with ``"auto"`` a warning gives the reason if
    that is not known.
    """
    location = Location.of(path, storage_options)
    with advising(location):
        files = files_of(location, format)
        files, opened = open_each(files, format, format_options, mmap=mmap)
    source, index = _joined(files, opened, format_options)
    index = _with_ranks(index, files, opened, join_ranks)
    if index.shards and source.is_free_to_check:
        index = _without_missing_shards(source, index)
    if (whole or counted) and may_be_quantized(index):
        with paused_collector():
            assembled = _with_weights(source, index)
            # List weights instead of the tensors that store them.
            index = assembled if whole else with_counts(index, assembled)
    if not silent:
        for text in index.warnings[:_SHOWN_WARNINGS]:
            warn(f"{index.source}: {text}")
        more = len(index.warnings) - _SHOWN_WARNINGS
        if more > 0:
            text = f"{index.source}: {more} more warnings, listed in read_index(...).warnings"
            warn(text)
        if missing != "ignore":
            _report_unreadable(index, tensors, missing)
    return source, index


def open_each(
    files: CheckpointFiles,
    format: str | None,
    format_options: Mapping[str, Any],
    *,
    mmap: bool = False,
) -> tuple[CheckpointFiles, list[OpenFile]]:
    """Open the files of a checkpoint in parallel, and read their indexes."""
    is_marked = files.by == "mark"

    def open_file(file: CheckpointFile) -> OpenFile | CheckpointError:
        place = files.places[file.path]
        if file.rank:  # a file or a folder
            source, index = open_index(place, format, silent=True, whole=False, **format_options)
            return OpenFile(file.path, source, index, file.rank)
        source = open_place(place, mmap=mmap)
        try:
            index = read_file(source, format, format_options, is_marked=is_marked)
        except FileChangedError:
            raise
        except CheckpointError as error:
            return error.with_traceback(None)
        return OpenFile(file.path, source, index, file.rank)

    present = [file for file in files.files if file.path in files.places]
    if not present:
        raise MissingShardError("all of its files are missing", path=files.name)
    with paused_collector():
        if len(present) == 1:
            results = [open_file(present[0])]
        else:
            with ThreadPoolExecutor(min(len(present), _CONCURRENCY)) as threads:
                results = list(threads.map(open_file, present))
    readable = [result for result in results if isinstance(result, OpenFile)]
    problems = {
        file.path: result
        for file, result in zip(present, results, strict=True)
        if isinstance(result, CheckpointError)
    }
    # Omit damaged files if an index of shards has the names of their tensors.
    if problems and (files.weight_map is None or not readable):
        raise next(iter(problems.values()))
    for problem in problems.values():
        problem.hint = problem.hint or "Fetch this file again; the others can be read"
    described = [replace(file, problem=problems.get(file.path)) for file in files.files]
    return replace(files, files=tuple(described)), readable


def _joined(
    files: CheckpointFiles, opened: Sequence[OpenFile], format_options: Mapping[str, Any]
) -> tuple[Source, Index]:
    """Join the open files of a checkpoint; a single one may list others."""
    file = opened[0]
    if files.by == "single" and file.index.files is not None:
        return _open_set(file, file.index.files, format_options)
    if files.by != "single" or file.label != files.name:
        with paused_collector():
            return merge(files, opened)
    warnings = (*files.warnings, *file.index.warnings)
    index = replace(
        file.index,
        checkpoint=files.described(),
        warnings=warnings,
        attrs={**files.attrs, **file.index.attrs},
    )
    return file.source, index


def _open_set(
    first: OpenFile, file_set: FileSet, format_options: Mapping[str, Any]
) -> tuple[Source, Index]:
    """Open the other files of a checkpoint, which its first file lists."""
    files = set_of(first.source, file_set)
    label = file_set.names[file_set.position]
    others = tuple([file for file in files.files if file.path != label])
    try:
        _, opened = open_each(replace(files, files=others), first.index.format, format_options)
        opened.insert(file_set.position, replace(first, label=label))
        with paused_collector():
            source, index = merge(files, opened)
    except CheckpointError as error:
        hints = [error.hint, f"It is read with {first.source.name}"]
        error.hint = ". ".join(filter(None, hints))
        raise
    if file_set.count not in {None, len(index.tensors)}:
        reason = f"{len(index.tensors)} tensors are in all files, which say {file_set.count}"
        raise FormatError(reason, path=first.source.name, offset=file_set.offset, rule="Split")
    return source, index


def _with_ranks(
    index: Index, files: CheckpointFiles, opened: Sequence[OpenFile], join_ranks: JoinRanks
) -> Index:
    """Join the tensors of ranks; warn of the other ranks if a file of a folder is only one."""
    label = opened[0].label
    is_of_folder = files.by == "single" and files.name != label
    may_be_rank = is_of_folder and rank_of(file_name(label)) is not None
    if files.by != "ranks" and not may_be_rank:
        return index
    from xckpt.opening import ranks

    with paused_collector():
        if may_be_rank:
            return ranks.look_for_others(index, opened[0])
        return ranks.join_ranks(index, opened, join_ranks)


def _without_missing_shards(source: Source, index: Index) -> Index:
    """Mark tensors with parts in local files that are missing, or are not the expected ones."""
    missing: dict[str | None, CheckpointError] = {}
    for label, file in sources_of(source, index.shards).items():
        try:
            _ = file.file  # opens it
        except FileChangedError:
            raise
        except CheckpointError as error:
            missing[label] = error.with_traceback(None)
    if not missing:
        return index
    tensors = dict(index.tensors)
    for name, tensor in index.tensors.items():
        parts = [part for part in tensor.parts.values() if part.nbytes]
        label = next((part.shard for part in parts if part.shard in missing), None)
        if label is not None and tensor.problem is None:
            problem = copy(missing[label]).located(tensor=name)
            tensors[name] = replace(tensor, problem=problem)
    return replace(index, tensors=tensors)


def _with_weights(source: Source, index: Index) -> Index:
    """List quantised weights, described by a file next to the model."""
    first = first_file(source)

    def look(name: str) -> dict[str, Any] | None:
        attr = index.attrs.get(name)
        if isinstance(attr, dict):
            return attr
        content = read_sibling(first, f"{name}.json")
        # Some formats store all attributes as text.
        if content is None and isinstance(attr, str):
            content = attr.encode("utf-8", "surrogatepass")
        return None if content is None else parse_json(content)

    def read(tensors: Sequence[Tensor]) -> list[bytes]:
        from xckpt.arrays.parts import PartReader

        contents = dict.fromkeys([tensor.name for tensor in tensors], b"")
        by_source: dict[Source, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            part = tensor.parts["data"]
            size = nbytes_of(part.dtype, tensor.size)
            if part.inline is None and part.encoding is None:
                by_source[sources[part.shard]].append(tensor)
                continue
            with suppress(CheckpointError):  # unreadable tensors stay as stored
                data = PartReader(sources[part.shard], part).read(0, size, size)
                contents[tensor.name] = bytes(data)
        for file, batch in by_source.items():
            ranges = [(t.parts["data"].offset, t.parts["data"].nbytes) for t in batch]
            with suppress(CheckpointError), file.reading_header() as header:
                for tensor, data in zip(batch, header.read_ranges(ranges), strict=True):
                    contents[tensor.name] = bytes(data)
        return list(contents.values())

    sources = sources_of(source, index.shards)
    return assemble_weights(index, find_declaration(look), read)


def _report_unreadable(index: Index, tensors: TensorFilter | None, missing: Missing) -> None:
    """Warn of tensors that damage or missing files made unreadable, or raise the first error."""
    causes = index.unreadable()
    if causes and tensors is not None:
        causes = index.unreadable(select(index.tensors, tensors))
    damage = [cause for cause in causes if cause.is_damage]
    if damage and missing == "raise":
        first = damage[0]
        raise copy(first.error).located(path=index.source, tensor=first.tensors[0])
    if damage:
        warn(unreadable_text(index.source, damage, len(index.tensors)), UnreadableWarning)


# --- filters that match no tensor -----------------------------------------------------------------


def check_filters(path: Any, index: Index, options: OpenOptions) -> OpenOptions:
    """Warn if `tensors` match nothing in any file of the call; return options for this file."""
    # A glob may match the name of a stack instead of a tensor.
    globs = [] if options.stack or not options.dims else list(options.dims)
    selecting = [f for f in (options.tensors, options.exclude) if f is not None]
    filters = [*globs, *selecting]
    absent = [pattern for pattern in filters if not has_match(index.tensors, pattern)]
    if not absent:
        return options
    first, *others = _opened_together(path)
    # The first file warns on behalf of all.
    unmatched = absent if path == first else []
    names = list(index.tensors)
    for other in others:
        if not unmatched:
            break
        try:
            _, other_index = open_index(
                other, storage_options=options.storage_options, whole=options.decode, silent=True
            )
        except (OSError, ValueError, CheckpointError):
            continue  # opening that file raises its errors
        unmatched = [p for p in unmatched if not has_match(other_index.tensors, p)]
        names += other_index.tensors
    if options.tensors in unmatched and names:
        warn(f"{index.source}: {no_match(names, options.tensors)}")
    if options.exclude in unmatched and names:
        text = no_match(names, options.exclude).replace("tensors=", "exclude=", 1)
        warn(f"{index.source}: {text}")
    # A glob without a match raises a warning when axes are named: omit globs that match only
    # tensors of other files.
    dims = {
        glob: axes
        for glob, axes in options.globs_of_dims.items()
        if glob in unmatched or glob not in absent
    }
    return options.with_dims(dims)


def _opened_together(path: Any) -> list[Any]:
    """Return all paths of the `xarray.open_mfdataset` call that opens a path, or only the path."""
    # xarray does not pass the other paths to an engine, and may open each in a thread of a pool.
    for innermost in sys._current_frames().values():  # noqa: SLF001  documented
        for frame, _ in walk_stack(innermost):
            module = str(frame.f_globals.get("__name__"))
            if frame.f_code.co_name == "open_mfdataset" and module.startswith("xarray."):
                paths = frame.f_locals.get("paths1d")  # private: without it, every file warns
                if isinstance(paths, list) and path in paths:
                    return paths
    return [path]
