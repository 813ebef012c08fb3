"""Reading of single files: the header of a format, an index of shards, configs beside them.

Configs are files such as ``config.json`` and ``adapter_config.json``.
"""

from __future__ import annotations

import json
import os
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt import formats
from xckpt.errors import CheckpointError, FormatError, locating, warn
from xckpt.opening.names import is_called_like_one, is_companion, is_index, preference, preferred
from xckpt.quantization.model import parse_json
from xckpt.storage import Location, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from xckpt.formats.foreign import Foreign
    from xckpt.index import Index

    Place = Location | Source

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
        part = formats.cut_piece(reader, header)
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


# --- configs --------------------------------------------------------------------------------------

#: Files whose contents become attributes, named without ``.json``.
CONFIGS = ("config.json", "adapter_config.json")
_IN_MEMORY = "memory://"
# Names of the files of an adapter: of peft and of mlx-lm.
_ADAPTERS = ("adapter_model.", "adapters.")


def read_config(
    source: str,  # path or URL of a file or folder; empty for an object in memory
    attrs: Mapping[Any, Any],
    name: str = "config",  # without .json
    storage_options: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return a JSON object from the attributes or the file next to a checkpoint, or None."""
    # None if the file is missing or cannot be read; a warning if it is not a JSON object.
    content = attrs.get(name)
    if isinstance(content, dict):
        return content
    data: bytes | None = None
    try:
        if isinstance(content, str):  # some formats store all attributes as text
            data = content.encode("utf-8", "surrogatepass")
        elif source:
            location = Location.of(source, storage_options)
            try:
                with closing(location.open()) as file:
                    data = read_sibling(file, f"{name}.json")
            except IsADirectoryError:
                listing = location.listing()
                config = None if listing is None else listing.files.get(f"{name}.json")
                if config is None:
                    return None
                with closing(config.open()) as file:
                    data = read_small(file)
        return None if data is None else parse_json(data)
    except (OSError, CheckpointError):
        return None  # such as the name of an object in memory
    except ValueError as error:
        warn(f"{source}: {name}.json is ignored: {error}")
        return None


def adapter_in(obj: Any, storage_options: dict[str, Any] | None = None) -> Any:
    """Return the file of the adapter in a folder with its config; other objects unchanged."""
    if not isinstance(obj, str | os.PathLike):
        return obj
    location = Location.of(obj, storage_options)
    listing = location.listing() if location.kind in {"folder", "hub"} else None
    if listing is None or "adapter_config.json" not in listing.files:
        return obj
    name = preferred([n for n in listing.files if n.lower().startswith(_ADAPTERS)])
    return obj if name is None else listing.files[name].text


def configs_beside(location: Location, place: Location | Source) -> dict[str, Any]:
    """Return the contents of the configs in the folder of a file, if they are certainly its own."""
    # The names of files that libraries load, such as ``model.safetensors``, are certain, and so is
    # the only checkpoint in a folder.
    if location.kind == "file":
        # The file opens without a config that cannot be read.
        with suppress(OSError):
            folder = Path(location.path).parent
            paths = {name: str(folder / name) for name in CONFIGS if (folder / name).is_file()}
            if paths and (preference(location.file_name) or _is_alone(folder)):
                return parsed({n: Location("file", path, path).open for n, path in paths.items()})
        return {}
    # Elsewhere, two requests would take longer than opening the file.
    if isinstance(place, Location) or not location.text.startswith(_IN_MEMORY):
        return {}
    is_certain = preference(location.file_name) is not None
    return parsed({name: partial(place.sibling, name) for name in CONFIGS} if is_certain else {})


def _is_alone(folder: Path) -> bool:
    """Return whether a folder has a single file with a name of a checkpoint of a model."""
    names = [entry.name for entry in os.scandir(folder)]
    models = [n for n in names if is_called_like_one(n) and not (is_companion(n) or is_index(n))]
    return len(models) == 1


def parsed(configs: Mapping[str, Callable[[], Source]]) -> dict[str, Any]:
    """Return the contents of configs by their names without ``.json``; skip unreadable ones."""
    contents: dict[str, Any] = {}
    for name, opened in configs.items():
        with (
            suppress(FileNotFoundError, PermissionError, ValueError),
            closing(opened()) as source,
        ):
            contents[name.removesuffix(".json")] = parse_json(read_small(source))
    return contents


def attrs_with_config(
    names: Iterable[str] | None,  # None for any
    source: str,
    attrs: Mapping[Any, Any],
    storage_options: dict[str, Any] | None = None,
) -> Mapping[Any, Any]:
    """Return the attributes of a checkpoint, with its ``config.json`` if tensors are of experts."""
    if names is not None and ("config" in attrs or not any("experts" in name for name in names)):
        return attrs
    config = read_config(source, attrs, "config", storage_options)
    return attrs if config is None else {**attrs, "config": config}
