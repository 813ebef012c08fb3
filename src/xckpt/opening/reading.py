"""Reading of single files: the header of a format, an index of shards, small files beside them."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt import formats
from xckpt.errors import CheckpointError, FormatError, locating
from xckpt.storage import Location, Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.formats.foreign import Foreign
    from xckpt.index import Index

    Place = Location | Source

__all__ = [
    "ShardIndex",
    "names_in",
    "open_place",
    "read_file",
    "read_shard_index",
    "read_sibling",
    "read_small",
]

_LARGEST_INDEX = 256 << 20
_LARGEST_CONFIG = 16 << 20


class ShardIndex(NamedTuple):
    """An index of shards in the form of Hugging Face's libraries."""

    weight_map: dict[str, str]  # file of each tensor
    metadata: dict[str, Any]


def open_place(place: Place, *, mmap: bool = False) -> Source:
    """Open a file, unless it is open."""
    return place if isinstance(place, Source) else place.open(mmap=mmap)


def read_file(
    source: Source,
    format: str | None,
    format_options: Mapping[str, Any],
    *,
    is_marked: bool = False,
) -> Index:
    """Read the header of one file, or of the folder that it marks."""
    with locating(path=source.name), source.reading_header() as header:
        reader = formats.detect(header) if format is None else formats.get(format)
        part = formats.raw_part(reader, header)
        try:
            read = reader.read_folder if is_marked else reader.read
            index = read(header, **format_options)
        except FormatError as error:
            if format is not None:
                formats.advise(error, format, header)
            error.hint = error.hint if part is None else part.advice
            raise
    if part is not None:
        _advise_to_join(index, part)
    return index


def _advise_to_join(index: Index, part: Foreign) -> None:
    """State the remedy for the tensors that a part of a cut file lacks."""
    for tensor in index.tensors.values():
        if isinstance(tensor.problem, FormatError):
            tensor.problem.hint = f"It is {part.kind}. {part.advice}"


def names_in(place: Place) -> set[str]:
    """Return the names of the tensors in a file; none if it cannot be read."""
    try:
        with closing(open_place(place)) as source:
            return set(read_file(source, None, {}).tensors)
    except (OSError, CheckpointError):
        return set()


def read_sibling(source: Source, name: str) -> bytes | None:
    """Read a small file next to another one; None if it is missing. Raise if it is large."""
    try:
        sibling = source.sibling(name)
    except (OSError, CheckpointError):  # bytes have no folder
        return None
    with closing(sibling):
        return read_small(sibling)


def read_small(source: Source) -> bytes:
    """Read a whole file, such as a config; raise ValueError if it is large."""
    if source.size > _LARGEST_CONFIG:
        raise ValueError(f"it has {source.size} bytes, more than {_LARGEST_CONFIG}")
    with source.reading_header() as header:
        return bytes(header.read(0, source.size))


def read_shard_index(source: Source) -> ShardIndex:
    """Read an index of shards; raise `FormatError` if it is malformed or empty."""
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
        reason, hint = "the index of shards lists no tensors", "Its writer may have failed"
        raise FormatError(reason, path=source.name, rule="ShardIndex", hint=hint)
    metadata = root.get("metadata")
    weight_map = {name: file.removeprefix("./") for name, file in weight_map.items()}
    return ShardIndex(weight_map, metadata if isinstance(metadata, dict) else {})
