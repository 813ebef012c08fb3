"""Checkpoints of several files: lists, globs, folders and ``*.index.json``, and merged indexes."""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, replace
from glob import glob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt import formats
from xckpt.errors import CheckpointError, FormatError, MissingShardError, shown, some
from xckpt.formats import chunks
from xckpt.formatting import natural_key
from xckpt.index import Arrangement, FileSet, Index, Shard, StoredList, Tensor, is_file_name
from xckpt.quantization.config import parse_json
from xckpt.storage import (
    Source,
    expand_url,
    is_remote,
    list_folder,
    local_path,
    open_source,
    pinned_url,
)
from xckpt.storage.source import ShardedSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "INDEX_SUFFIX",
    "FileList",
    "Opened",
    "SeveralFilesError",
    "labelled_attrs",
    "list_files",
    "list_set",
    "merge",
    "read_sibling",
]

INDEX_SUFFIX = ".index.json"
_LARGEST_INDEX = 256 << 20
_LARGEST_CONFIG = 16 << 20
# The file with the name of the folder of the newest step, and the longest such name.
_LATEST, _LONGEST_NAME = "latest", 255
# Names of the files of a model in Hugging Face's libraries.
_SHARD = re.compile(
    r"(?P<stem>.*?)-?(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})(?P<suffix>.*)", re.DOTALL
)


# Names of the files of ranks in torch.distributed.checkpoint.
_RANKED = re.compile(r"shard-[0-9]{1,9}-model-[0-9]{1,9}-of-[0-9]{1,9}\.safetensors")


class SeveralFilesError(IsADirectoryError):
    """A folder has several checkpoints; the caller must choose one."""


class FileList(NamedTuple):
    """The files of a checkpoint."""

    name: str  # for messages and ``encoding["source"]``
    files: dict[str, Any]  # to open, by their labels in messages; None for a missing file
    # Label of the file of each tensor; None to take all tensors of all files.
    weight_map: Mapping[str, str] | None = None
    attrs: Mapping[str, Any] = {}  # of the whole checkpoint
    problems: Mapping[str, CheckpointError] = {}  # of files that cannot be read, by label
    is_marked: bool = False  # whether the single file marks a folder, which is read as a whole


@dataclass(frozen=True, slots=True)
class Opened:
    """An open file of a checkpoint."""

    label: str  # in messages
    source: Source
    index: Index


def list_files(
    obj: Any, storage_options: Mapping[str, Any] | None = None, format: str | None = None
) -> FileList | None:
    """List the files of an object, None for a single file; `format` may choose in a folder."""
    if isinstance(obj, list | tuple):
        return _listed(obj, storage_options)
    if isinstance(obj, os.PathLike):
        obj = os.fsdecode(obj)
    if not isinstance(obj, str):
        return None
    if not obj:
        raise ValueError("the path is empty")
    if _is_glob(obj):
        paths = _expanded(obj, storage_options)
        name = pinned_url(_absolute(obj), storage_options)
        return FileList(name, {path: path for path in paths})
    folder = list_folder(obj, storage_options)
    if folder is not None:
        return _in_folder(*folder, format)
    if obj.partition("?")[0].lower().endswith(INDEX_SUFFIX):
        return _indexed(open_source(obj, storage_options=storage_options))
    return None


def list_set(source: Source, files: FileSet) -> FileList:
    """Return the files of a checkpoint that one of them lists."""
    siblings: dict[str, Any] = {}
    for position, name in enumerate(files.names):
        try:
            siblings[name] = source if position == files.position else source.sibling(name)
        except FileNotFoundError:
            reason = f"{shown(name)}, one of the {len(files.names)} files of it, is missing"
            hint = "Put it next to the others, or open a list of the files that are there"
            at = files.offset
            raise MissingShardError(reason, path=source.name, offset=at, hint=hint) from None
        except CheckpointError as error:
            error.hint = "Rename the files, or open a list of them"
            raise error.located(path=source.name, offset=files.offset) from error.__cause__
    return FileList(source.name, siblings)


def _in_folder(folder: str, files: Mapping[str, Path | Source], format: str | None) -> FileList:
    """Return the files of the checkpoint in a folder: by an index, a single file, or all shards."""

    def listed_as(names: Sequence[str], attrs: Mapping[str, Any]) -> FileList:
        chosen = [files[name] for name in names]
        labels = [file.name if isinstance(file, Source) else str(file) for file in chosen]
        return FileList(folder, dict(zip(labels, chosen, strict=True)), None, attrs)

    marked = [name for name in formats.folder_marks() if name in files]
    if marked:
        return listed_as(marked[:1], {})._replace(is_marked=True)
    names = [name for name in sorted(files, key=natural_key) if not name.startswith(".")]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    config = {}
    if "config.json" in files:
        with (
            suppress(FileNotFoundError, PermissionError, ValueError),
            closing(_opened(files["config.json"])) as source,
        ):
            config = {"config": parse_json(_read_small(source))}
    # A single index is complete: the other files are not opened.
    has_index = len(indexes) == 1
    others = [] if has_index else [name for name in names if name not in indexes]
    checkpoints = [name for name in others if _is_checkpoint(name, files[name])]
    if format is not None:
        suffixes = formats.suffixes(format)
        checkpoints = [n for n in checkpoints if n.lower().endswith(suffixes)] or checkpoints
    # Next to a config.json, the file "model" has the weights; other files belong to it.
    models = [name for name in checkpoints if Path(name).stem == "model"]
    if len(models) == 1 and "config.json" in files:
        checkpoints = models
    else:
        newest = _newest(folder, files)
        if newest is not None:
            return _in_folder(*newest, format)
    for name in indexes:
        listed = _indexed(_opened(files[name]))
        if has_index or any(checkpoint in listed.files for checkpoint in checkpoints):
            return listed._replace(name=folder, attrs={**listed.attrs, **config})
    if len(checkpoints) == 1 or _are_all_shards(folder, checkpoints):
        return listed_as(checkpoints, config)
    raise _not_one(folder, names, checkpoints)


def _not_one(folder: str, names: Sequence[str], checkpoints: Sequence[str]) -> OSError:
    """Return the error of a folder with no or several checkpoints among its files."""
    listing = some(checkpoints or names, "") or "no files"
    reason = f"no checkpoint is in this folder; it has {listing}"
    folders = [] if is_remote(folder) else [p.name for p in Path(folder).iterdir() if p.is_dir()]
    if folders and not checkpoints:
        folders = sorted(folders, key=natural_key)
        reason += f", and the folders {some(folders, '')}"
    if checkpoints:
        count = len(checkpoints)
        reason = f"{count} checkpoints are in this folder, open one or a list: {listing}"
        return SeveralFilesError(errno.EISDIR, reason, folder)
    return IsADirectoryError(errno.EISDIR, reason, folder)


def _newest(
    folder: str, files: Mapping[str, Path | Source]
) -> tuple[str, Mapping[str, Path | Source]] | None:
    """Return the folder of the newest step of a run, which a file names; None without one."""
    if _LATEST not in files:
        return None
    with closing(_opened(files[_LATEST])) as source:
        name = "" if source.size > _LONGEST_NAME else _read_small(source).decode("utf-8", "replace")
    name = name.strip()
    if not is_file_name(name):
        return None
    newest = list_folder(f"{folder}/{name}")
    is_marked = newest is not None and any(mark in newest[1] for mark in formats.folder_marks())
    return newest if is_marked else None


def _are_all_shards(folder: str, names: Sequence[str]) -> bool:
    """Return whether files are the shards of one checkpoint; raise if one is missing."""
    if len(names) > 1 and all(map(_RANKED.fullmatch, names)):
        return True  # ranks may lack numbers, and `merge` notices missing chunks
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    families = {(match["stem"], match["count"], match["suffix"]) for match in shards}
    if not len(names) == len(shards) > 1 or len(families) > 1:
        return False
    count = int(shards[0]["count"])
    numbers = {int(match["number"]) for match in shards}
    missing = list(islice((n for n in range(1, count + 1) if n not in numbers), 5))
    if missing:
        reason = f"of {count} shards these are missing: {', '.join(map(str, missing))}"
        raise MissingShardError(reason, path=folder, hint="Or open a list of some files")
    return True


def _opened(file: Path | Source) -> Source:
    return file if isinstance(file, Source) else open_source(file)


def _is_checkpoint(name: str, file: Path | Source) -> bool:
    if isinstance(file, Source):  # remote: reading the file would take a request
        return any(name.lower().endswith(formats.suffixes(f)) for f in formats.names())
    source = open_source(file)
    try:
        return formats.recognized(source) is not None
    except OSError:
        return False
    finally:
        source.close()


def read_sibling(source: Source, name: str) -> bytes | None:
    """Read a small file next to another one; None if it is missing. Raise if it is large."""
    try:
        sibling = source.sibling(name)
    except (OSError, CheckpointError):  # bytes have no folder
        return None
    with closing(sibling):
        return _read_small(sibling)


def _read_small(source: Source) -> bytes:
    if source.size > _LARGEST_CONFIG:
        raise ValueError(f"it has {source.size} bytes, more than {_LARGEST_CONFIG}")
    with source.reading_header() as header:
        return bytes(header.read(0, source.size))


def _listed(objects: Sequence[Any], storage_options: Mapping[str, Any] | None) -> FileList:
    files: dict[str, Any] = {}
    for obj in objects:
        text = os.fsdecode(obj) if isinstance(obj, os.PathLike) else obj
        is_glob = isinstance(text, str) and _is_glob(text)
        for file in _expanded(text, storage_options) if is_glob else [text]:
            label = _absolute(file) if isinstance(file, str) else f"<{type(file).__name__}>"
            if label in files and isinstance(file, str):
                raise ValueError(f"{label} is in the list twice")
            files[label if label not in files else f"{label} {len(files)}"] = file
    if not files:
        raise ValueError("the list of files is empty")
    first, *others = files
    return FileList(first if not others else f"{first} and {len(others)} more", files)


def _is_glob(path: str) -> bool:
    """Return whether a path is a glob; in a URL only a star is special."""
    if is_remote(path):
        return "*" in path
    return any(mark in path for mark in "*?[") and not os.path.lexists(_absolute(path))


def _absolute(path: str) -> str:
    return path if is_remote(path) else local_path(path)


def _expanded(pattern: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    remote = is_remote(pattern)
    paths = _glob_url(pattern, storage_options) if remote else glob(_absolute(pattern))  # noqa: PTH207
    if not paths:
        raise FileNotFoundError(f"no file matches {pattern}")
    return sorted(paths, key=natural_key)


def _glob_url(pattern: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Expand the glob in a URL; in a chained URL, the link that has a path."""
    links = pattern.split("::")
    at = next((i for i, link in enumerate(links) if "://" in link), len(links) - 1)
    links[at] = pinned_url(links[at], storage_options)
    options = dict(storage_options or {})
    if at:
        # fsspec expects the options of a link in a chain under its protocol.
        protocol = links[at].partition("://")[0]
        options = {**options, **options.pop(protocol, {})}
        options = {key: value for key, value in options.items() if key not in links[:at]}
    chain = "".join(f"::{link}" for link in links[at + 1 :])
    matches = expand_url(links[at], options, chain)
    return ["::".join([*links[:at], match, *links[at + 1 :]]) for match in matches]


def _indexed(source: Source) -> FileList:
    """Read an index of shards in the form of Hugging Face's libraries."""
    if source.size > _LARGEST_INDEX:
        reason = f"an index of shards has {source.size} bytes, more than {_LARGEST_INDEX}"
        raise FormatError(reason, path=source.name)
    try:
        with source.reading_header() as header:
            root = json.loads(bytes(header.read(0, source.size)))
    except (ValueError, RecursionError) as error:
        reason = f"an index of shards is not JSON: {error}"
        raise FormatError(reason, path=source.name, rule="ShardIndex") from error
    weight_map = root.get("weight_map") if isinstance(root, dict) else None
    if not isinstance(weight_map, dict) or {*map(type, weight_map.values())} - {str}:
        reason = "'weight_map' must map the names of tensors to the names of files"
        raise FormatError(reason, path=source.name, rule="ShardIndex")
    if not weight_map:
        reason, hint = "'weight_map' lists no tensors", "Write the index again"
        raise FormatError(reason, path=source.name, rule="ShardIndex", hint=hint)
    attrs = root.get("metadata")
    files: dict[str, Any] = {}
    for name in sorted(set(weight_map.values()), key=natural_key):
        try:
            files[name] = source.sibling(name)
        except FileNotFoundError:
            files[name] = None
        except CheckpointError as error:
            raise error.located(path=source.name) from None
        if files[name] == source:
            reason = f"{shown(name)}, one of its files, is the index of shards itself"
            raise FormatError(reason, path=source.name, rule="ShardIndex")
    if source.is_free_to_check:  # see `sources_of`
        source.check()
    return FileList(source.name, files, weight_map, attrs if isinstance(attrs, dict) else {})


def merge(listed: FileList, opened: Sequence[Opened]) -> tuple[Source, Index]:
    """Merge several files into one checkpoint."""
    warnings: list[str] = []
    tensors = _unreadable(listed)
    files: dict[str, Source] = {}
    shards: dict[str, Shard] = {}
    left_out: list[str] = []
    chunked: dict[str, list[Tensor]] = {}
    arrangement = Arrangement()
    for file in opened:
        arrangement = arrangement.grown(file.index.arrangement, ())
        files[file.label] = file.source
        shards[file.label] = Shard(file.source.size, None, (file.label,))
        for name, shard in file.index.shards.items():
            files[_within(file.label, name)] = file.source.shard(name, shard)
            shards[_within(file.label, name)] = shard
        for name, tensor in file.index.tensors.items():
            if listed.weight_map is not None and listed.weight_map.get(name) != file.label:
                left_out.append(name)
                continue
            if name not in tensors:
                tensors[name] = _relabelled(tensor, file)
            elif _is_chunk(tensor) and _is_chunk(tensors[name]):
                chunked.setdefault(name, [tensors[name]]).append(_relabelled(tensor, file))
            else:
                raise _twice(name, tensors[name], file)
        warnings += [f"{file.label}: {text}" for text in file.index.warnings]
    for name, label in (listed.weight_map or {}).items():
        if name not in tensors:
            reason = f"the index of shards lists this tensor in {shown(label)}, which lacks it"
            raise FormatError(reason, path=listed.name, tensor=name, rule="ShardIndex")
    tensors |= {name: _joined(name, parts, listed.name) for name, parts in chunked.items()}
    if left_out:
        warnings.append(f"not in the index of shards, and left out: {some(left_out)}")
    first = opened[0].index
    index = Index(
        first.format,
        ", ".join(dict.fromkeys(file.index.version for file in opened)),
        tensors,
        _merged_attrs(listed, opened, warnings),
        listed.name,
        sum(file.source.size for file in opened),
        shards,
        tuple(warnings),
        arrangement.of(tensors),
        {name: dtype for file in reversed(opened) for name, dtype in file.index.attr_types.items()},
    )
    return ShardedSource(listed.name, files), index


def labelled_attrs(opened: Opened) -> dict[str, Any]:
    """Return the attributes of a file, with references to its label."""
    return {
        name: replace(
            value, part=replace(value.part, shard=_within(opened.label, value.part.shard))
        )
        if isinstance(value, StoredList)
        else value
        for name, value in opened.index.attrs.items()
    }


def _relabelled(tensor: Tensor, file: Opened) -> Tensor:
    """Return a tensor of a file, with references to the label of the file."""
    label, problem = file.label, tensor.problem
    if problem is not None:
        problem = copy(problem).located(path=file.source.name)
    parts = {
        role: replace(part, shard=_within(label, part.shard)) for role, part in tensor.parts.items()
    }
    stored = tensor.stored
    if stored is not None:
        stored = {role: _relabelled(part, file) for role, part in stored.items()}
    return replace(tensor, parts=parts, stored=stored, problem=problem)


def _is_chunk(tensor: Tensor) -> bool:
    """Return whether a tensor is a chunk of a larger one."""
    return tensor.layout == "dense" and tensor.parts["data"].origin is not None


def _joined(name: str, tensors: Sequence[Tensor], path: str) -> Tensor:
    """Join the chunks of a tensor from several files."""
    by_origin = {tensor.parts["data"].origin or (): tensor for tensor in tensors}
    places = [(origin, tensor.shape) for origin, tensor in by_origin.items()]
    hint = "A file may be missing, or of another checkpoint"
    if len(by_origin) < len(tensors) or len({len(origin) for origin, _ in places}) > 1:
        reason = "several of its chunks begin at one place"
        raise FormatError(reason, path=path, tensor=name, rule="Chunks", hint=hint)
    ends = [[at + n for at, n in zip(*place, strict=True)] for place in places]
    size = tuple(map(max, zip(*ends, strict=True)))
    try:
        chunks.check_cover(name, size, places)
    except FormatError as error:
        error.hint = hint
        raise error.located(path=path, tensor=name) from error.__cause__
    return replace(chunks.joined(name, size, by_origin), attrs={})


def _within(label: str, shard: str | None) -> str:
    """Return the label of a shard that a file refers to."""
    return label if shard is None else f"{label}: {shard}"


def _unreadable(listed: FileList) -> dict[str, Tensor]:
    """Return placeholders for the tensors of missing or damaged files."""
    tensors: dict[str, Tensor] = {}
    for name, label in (listed.weight_map or {}).items():
        problem = listed.problems.get(label)
        if problem is not None:
            problem = copy(problem).located(tensor=name)
        elif listed.files[label] is None:
            problem = MissingShardError(
                f"the file {shown(label)} is missing",
                path=listed.name,
                tensor=name,
                hint="Put it next to the index of shards, and open that again",
            )
        else:
            continue
        tensors[name] = Tensor(name, "unknown", (), {}, problem=problem)
    return tensors


def _twice(name: str, before: Tensor, again: Opened) -> FormatError:
    first = next((part.shard for part in before.parts.values()), None)
    parts = again.index.tensors[name].parts.values()
    return FormatError(
        f"this tensor is in two files: {first} and {again.source.name}",
        path=again.source.name,
        offset=min([part.offset for part in parts], default=None),
        tensor=name,
        rule="DuplicateTensor",
        hint="Open them apart",
    )


def _merged_attrs(
    listed: FileList, opened: Sequence[Opened], warnings: list[str]
) -> dict[str, Any]:
    """Merge the attributes of all files; the first file wins if they differ."""
    merged = dict(listed.attrs)
    differing: dict[str, None] = {}
    for file in opened:
        # The files of a set differ in the attribute with their number.
        is_alone = file.index.files is None
        for key, value in labelled_attrs(file).items():
            first = merged.get(key, value)
            if is_alone and (type(first), first) != (type(value), value):
                differing[key] = None
            merged.setdefault(key, value)
    if differing:
        names = ", ".join(shown(str(key)) for key in differing)
        warnings.append(f"files disagree on the attributes {names}: the first one's are kept")
    return merged
