"""Configs next to a checkpoint, such as ``config.json`` and ``adapter_config.json``."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, warn
from xckpt.opening.names import preferred
from xckpt.opening.reading import read_sibling, read_small
from xckpt.quantization.config import parse_json
from xckpt.storage import Location

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["adapter_in", "attrs_with_config", "read_config"]

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


def attrs_with_config(
    names: Iterable[str],
    source: str,
    attrs: Mapping[Any, Any],
    storage_options: dict[str, Any] | None = None,
) -> Mapping[Any, Any]:
    """Return the attributes of a checkpoint, with its ``config.json`` if tensors are of experts."""
    if "config" in attrs or not any("experts" in name for name in names):
        return attrs
    config = read_config(source, attrs, "config", storage_options)
    return attrs if config is None else {**attrs, "config": config}
