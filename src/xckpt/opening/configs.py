"""Configs next to a checkpoint, such as ``config.json`` and ``adapter_config.json``."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, warn
from xckpt.opening.names import (
    is_called_like_one,
    is_companion,
    is_index,
    preference,
    preferred,
)
from xckpt.opening.reading import read_sibling, read_small
from xckpt.quantization.model import parse_json
from xckpt.storage import Location, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "CONFIGS",
    "adapter_in",
    "attrs_with_config",
    "configs_beside",
    "parsed",
    "read_config",
]

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
    """Return the contents of the configs in the folder of a file, if they are certainly its own.

    The names of files that libraries load, such as ``model.safetensors``, are certain, and so is
    the only checkpoint in a folder.
    """
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
