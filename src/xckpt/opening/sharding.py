"""Several files as one checkpoint: lists, globs, folders, ``*.index.json``; indexes as one."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import defaultdict
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from glob import glob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt import formats
from xckpt.errors import CheckpointError, FormatError, MissingShardError, shown, some
from xckpt.formats import chunks
from xckpt.index import Arrangement, FileSet, Index, Shard, StoredList, Tensor
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
    "natural_key",
    "read_sibling",
]

INDEX_SUFFIX = ".index.json"
_LARGEST_INDEX = 256 << 20
_LARGEST_CONFIG = 16 << 20
# As Hugging Face's libraries name the files of a model.
_SHARD = re.compile(
    r"(?P<stem>.*?)-?(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})(?P<suffix>.*)", re.DOTALL
)


# As torch.distributed.checkpoint names the files of each rank.
_RANKED = re.compile(r"shard-[0-9]{1,9}-model-[0-9]{1,9}-of-[0-9]{1,9}\.safetensors")


class SeveralFilesError(IsADirectoryError):
    """A folder has several checkpoints, of which one is to be chosen."""


class FileList(NamedTuple):
    """The files of a checkpoint.

    Parameters
    ----------
    name : str
        What they are called together, for messages and ``encoding["source"]``.
    files : dict of str to object
        What is to be opened, by the name that messages use; None is a file that is not there.
    weight_map : mapping of str to str, or None
        By tensor, the file that it is in; None where all tensors of all files count.
    attrs : mapping
        What is said of all files together.
    problems : mapping of str to CheckpointError
        By name, why files that are there cannot be read, where the others can.
    """

    name: str
    files: dict[str, Any]
    weight_map: Mapping[str, str] | None = None
    attrs: Mapping[str, Any] = {}
    problems: Mapping[str, CheckpointError] = {}


@dataclass(frozen=True, slots=True)
class Opened:
    """One of the files.

    Parameters
    ----------
    label : str
        What it is called among the others.
    source : Source
        Its bytes.
    index : Index
        What it holds.
    """

    label: str
    source: Source
    index: Index


def list_files(
    obj: Any, storage_options: Mapping[str, Any] | None = None, format: str | None = None
) -> FileList | None:
    """Find out whether something is several files; of those in a folder, `format` may choose."""
    if isinstance(obj, list | tuple):
        return _listed(obj, storage_options)
    if isinstance(obj, os.PathLike):
        obj = os.fsdecode(obj)
    if not isinstance(obj, str):
        return None
    if not obj:
        raise ValueError("the path is empty")
    if _is_glob(obj):
        found = _expanded(obj, storage_options)
        name = pinned_url(_absolute(obj), storage_options)
        return FileList(name, {path: path for path in found})
    folder = list_folder(obj, storage_options)
    if folder is not None:
        return _in_folder(*folder, format)
    if obj.partition("?")[0].lower().endswith(INDEX_SUFFIX):
        return _indexed(open_source(obj, storage_options=storage_options))
    return None


def list_set(source: Source, files: FileSet) -> FileList:
    """List the files that one of them says it belongs to."""
    found: dict[str, Any] = {}
    for position, name in enumerate(files.names):
        try:
            found[name] = source if position == files.position else source.sibling(name)
        except FileNotFoundError:
            reason = f"{shown(name)}, one of the {len(files.names)} files of it, is missing"
            hint = "Put it next to the others, or open a list of the files that are there"
            at = files.offset
            raise MissingShardError(reason, path=source.name, offset=at, hint=hint) from None
        except CheckpointError as error:
            error.hint = "Rename the files, or open a list of them"
            raise error.located(path=source.name, offset=files.offset) from error.__cause__
    return FileList(source.name, found)


def _in_folder(folder: str, files: Mapping[str, Path | Source], format: str | None) -> FileList:
    """Find the checkpoint in a folder: an index of shards, one file, or all shards of one."""

    def listed_as(names: Sequence[str], attrs: Mapping[str, Any]) -> FileList:
        chosen = [files[name] for name in names]
        labels = [file.name if isinstance(file, Source) else str(file) for file in chosen]
        return FileList(folder, dict(zip(labels, chosen, strict=True)), None, attrs)

    marked = [name for name in formats.folder_marks() if name in files]
    if marked:
        return listed_as(marked[:1], {})
    names = [name for name in sorted(files, key=natural_key) if not name.startswith(".")]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    config = _config(files["config.json"]) if "config.json" in files else {}
    # An index that is alone says all; nothing else is looked into then.
    one = len(indexes) == 1
    found = [] if one else [n for n in names if n not in indexes and _is_checkpoint(n, files[n])]
    if format is not None:
        endings = formats.suffixes(format)
        found = [name for name in found if name.lower().endswith(endings)] or found
    # Where a model says what it is, its weights are called that; others go with it.
    models = [name for name in found if Path(name).stem == "model"]
    if len(models) == 1 and "config.json" in files:
        found = models
    for name in indexes:
        listed = _indexed(_opened(files[name]))
        if one or any(each in listed.files for each in found):
            return listed._replace(name=folder, attrs={**listed.attrs, **config})
    if len(found) == 1 or _are_all_shards(folder, found):
        return listed_as(found, config)
    there = found or names
    names_there = some(there, "") or "no files"
    reason = f"no checkpoint is in this folder; it has {names_there}"
    if found:
        reason = f"{len(found)} checkpoints are in this folder, open one or a list: {names_there}"
        raise SeveralFilesError(errno.EISDIR, reason, folder)
    raise IsADirectoryError(errno.EISDIR, reason, folder)


def _are_all_shards(folder: str, names: Sequence[str]) -> bool:
    """Return whether files are the shards of one checkpoint, of which none may be missing."""
    if len(names) > 1 and all(map(_RANKED.fullmatch, names)):
        return True  # a rank need not have all numbers; chunks that are missing are noticed
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
    if isinstance(file, Source):  # on another machine: looking into each takes requests
        return any(name.lower().endswith(formats.suffixes(each)) for each in formats.names())
    source = open_source(file)
    try:
        return formats.recognized(source) is not None
    except OSError:
        return False
    finally:
        source.close()


def read_sibling(source: Source, name: str) -> bytes | None:
    """Read a small file next to another one; None if there is none, `ValueError` if it is large."""
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


def _config(file: Path | Source) -> dict[str, Any]:
    """Return what a model says of itself next to its weights, as an attribute."""
    try:
        with closing(_opened(file)) as source:
            return {"config": parse_json(_read_small(source))}
    except (FileNotFoundError, PermissionError, ValueError):
        return {}


def natural_key(text: str) -> tuple[Any, ...]:
    """Return a key that sorts numbers in texts by their values."""
    parts = re.split(r"([0-9]+)", text)
    return tuple([(int(p), p) if at % 2 else (-1, p) for at, p in enumerate(parts)])


def _listed(objects: Sequence[Any], storage_options: Mapping[str, Any] | None) -> FileList:
    files: dict[str, Any] = {}
    for obj in objects:
        text = os.fsdecode(obj) if isinstance(obj, os.PathLike) else obj
        is_glob = isinstance(text, str) and _is_glob(text)
        for each in _expanded(text, storage_options) if is_glob else [text]:
            label = _absolute(each) if isinstance(each, str) else f"<{type(each).__name__}>"
            if label in files and isinstance(each, str):
                raise ValueError(f"{label} is there twice")
            files[label if label not in files else f"{label} {len(files)}"] = each
    if not files:
        raise ValueError("a list of no files")
    first, *others = files
    return FileList(first if not others else f"{first} and {len(others)} more", files)


def _is_glob(path: str) -> bool:
    """Return whether a path is a glob; of a URL, only a star counts: others have other meanings."""
    if is_remote(path):
        return "*" in path
    return any(mark in path for mark in "*?[") and not os.path.lexists(_absolute(path))


def _absolute(path: str) -> str:
    return path if is_remote(path) else local_path(path)


def _expanded(pattern: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    remote = is_remote(pattern)
    found = _glob_url(pattern, storage_options) if remote else glob(_absolute(pattern))  # noqa: PTH207
    if not found:
        raise FileNotFoundError(f"no file matches {pattern}")
    return sorted(found, key=natural_key)


def _glob_url(pattern: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Expand the glob in a URL, of a chained one in the link that has a path."""
    links = pattern.split("::")
    at = next((i for i, link in enumerate(links) if "://" in link), len(links) - 1)
    links[at] = pinned_url(links[at], storage_options)
    options = dict(storage_options or {})
    if at:
        # As fsspec has it, the options of a link in a chain are under its protocol.
        protocol = links[at].partition("://")[0]
        options = {**options, **options.pop(protocol, {})}
        options = {key: value for key, value in options.items() if key not in links[:at]}
    chain = "".join(f"::{link}" for link in links[at + 1 :])
    matches = expand_url(links[at], options, chain)
    return ["::".join([*links[:at], match, *links[at + 1 :]]) for match in matches]


def _indexed(source: Source) -> FileList:
    """Read an index of shards, as Hugging Face's libraries write it."""
    if source.size > _LARGEST_INDEX:
        reason = f"an index of shards has {source.size} bytes, more than {_LARGEST_INDEX}"
        raise FormatError(reason, path=source.name)
    try:
        with source.reading_header() as header:
            root = json.loads(bytes(header.read(0, source.size)))
    except (ValueError, RecursionError) as error:
        reason = f"an index of shards is no JSON: {error}"
        raise FormatError(reason, path=source.name, rule="ShardIndex") from error
    weight_map = root.get("weight_map") if isinstance(root, dict) else None
    if not isinstance(weight_map, dict) or {*map(type, weight_map.values())} - {str}:
        reason = "'weight_map' must map the names of tensors to the names of files"
        raise FormatError(reason, path=source.name, rule="ShardIndex")
    attrs = root.get("metadata")
    files: dict[str, Any] = {}
    for name in sorted(set(weight_map.values()), key=natural_key):
        try:
            files[name] = source.sibling(name)
        except FileNotFoundError:
            files[name] = None
        except CheckpointError as error:
            raise error.located(path=source.name) from None
    if source.is_free_to_check:  # see `sources_of`
        source.check()
    return FileList(source.name, files, weight_map, attrs if isinstance(attrs, dict) else {})


def merge(listed: FileList, opened: Sequence[Opened]) -> tuple[Source, Index]:
    """Make one checkpoint of several files."""
    warnings: list[str] = []
    tensors = _unreadable(listed, warnings)
    files: dict[str, Source] = {}
    shards: dict[str, Shard] = {}
    left_out: list[str] = []
    chunked: dict[str, list[Tensor]] = {}
    arrangement = Arrangement()
    for each in opened:
        arrangement = arrangement.grown(each.index.arrangement, ())
        files[each.label] = each.source
        shards[each.label] = Shard(each.source.size, None, (each.label,))
        for name, shard in each.index.shards.items():
            files[_within(each.label, name)] = each.source.shard(name, shard)
            shards[_within(each.label, name)] = shard
        for name, tensor in each.index.tensors.items():
            if listed.weight_map is not None and listed.weight_map.get(name) != each.label:
                left_out.append(name)
                continue
            if name not in tensors:
                tensors[name] = _relabelled(tensor, each.label)
            elif _is_chunk(tensor) and _is_chunk(tensors[name]):
                chunked.setdefault(name, [tensors[name]]).append(_relabelled(tensor, each.label))
            else:
                raise _twice(name, tensors[name], each)
        warnings += [f"{each.label}: {text}" for text in each.index.warnings]
    for name, label in (listed.weight_map or {}).items():
        if name not in tensors:
            reason = f"the index of shards says that {shown(label)} has this tensor, and it has not"
            raise FormatError(reason, path=listed.name, tensor=name, rule="ShardIndex")
    tensors |= {name: _joined(name, parts, listed.name) for name, parts in chunked.items()}
    if left_out:
        warnings.append(f"not in the index of shards, and left out: {some(left_out)}")
    first = opened[0].index
    index = Index(
        first.format,
        ", ".join(dict.fromkeys(each.index.version for each in opened)),
        tensors,
        _merged_attrs(listed, opened, warnings),
        listed.name,
        sum(each.source.size for each in opened),
        shards,
        tuple(warnings),
        arrangement.of(tensors),
        {name: dtype for each in reversed(opened) for name, dtype in each.index.attr_types.items()},
    )
    return ShardedSource(listed.name, files), index


def labelled_attrs(opened: Opened) -> dict[str, Any]:
    """Return the attributes of a file as those of a checkpoint that has it among others."""
    return {
        name: replace(
            value, part=replace(value.part, shard=_within(opened.label, value.part.shard))
        )
        if isinstance(value, StoredList)
        else value
        for name, value in opened.index.attrs.items()
    }


def _relabelled(tensor: Tensor, label: str) -> Tensor:
    """Return a tensor of a file as one of a checkpoint that has this file among others."""
    parts = {
        role: replace(part, shard=_within(label, part.shard)) for role, part in tensor.parts.items()
    }
    stored = tensor.stored
    if stored is not None:
        stored = {role: _relabelled(each, label) for role, each in stored.items()}
    return replace(tensor, parts=parts, stored=stored)


def _is_chunk(tensor: Tensor) -> bool:
    """Return whether a tensor states its place in a larger one."""
    return tensor.layout == "dense" and tensor.parts["data"].origin is not None


def _joined(name: str, tensors: Sequence[Tensor], path: str) -> Tensor:
    """Return the tensor that chunks in several files make."""
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
    """Name a file that a file refers to."""
    return label if shard is None else f"{label}: {shard}"


def _unreadable(listed: FileList, warnings: list[str]) -> dict[str, Tensor]:
    """List the tensors of files that are missing or damaged: only their names are known."""
    tensors: dict[str, Tensor] = {}
    lost: dict[str, list[str]] = defaultdict(list)
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
        lost[label].append(name)
    for label, names in lost.items():
        if label in listed.problems:
            reason = listed.problems[label].reason
            warnings.append(f"{shown(label)} cannot be read, nor can {some(names)}: {reason}")
        else:
            warnings.append(f"{shown(label)} is missing, and with it {some(names)}")
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
    """Join attributes; where files disagree, the first that says something is right."""
    merged = dict(listed.attrs)
    differing: dict[str, None] = {}
    for each in opened:
        # Files that know each other say which of them they are.
        is_alone = each.index.files is None
        for key, value in labelled_attrs(each).items():
            known = merged.get(key, value)
            if is_alone and (type(known), known) != (type(value), value):
                differing[key] = None
            merged.setdefault(key, value)
    if differing:
        names = ", ".join(shown(str(key)) for key in differing)
        warnings.append(f"files disagree on the attributes {names}: the first one's are kept")
    return merged
