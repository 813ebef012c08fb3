"""Configs next to a checkpoint, such as ``config.json`` and ``adapter_config.json``."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, warn
from xckpt.opening.sharding import read_sibling
from xckpt.quantization.config import parse_json
from xckpt.storage import open_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["attrs_with_config", "read_config"]


def read_config(
    source: str,
    attrs: Mapping[Any, Any],
    name: str = "config",
    storage_options: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return a config from the attributes of a checkpoint, or from the file next to it.

    Parameters
    ----------
    source : str
        Path or URL of a file or folder; empty for an object in memory.
    attrs : mapping
        Attributes of the checkpoint.
    name : str
        Name of the config, without ``.json``.
    storage_options : dict, optional
        Options for the storage of a URL.

    Returns
    -------
    dict or None
        None if the file is missing or cannot be read.

    Raises
    ------
    ValueError
        If the config is not a JSON object.
    """
    content = attrs.get(name)
    if isinstance(content, dict):
        return content
    if isinstance(content, str):  # some formats store all attributes as text
        return parse_json(content.encode("utf-8", "surrogatepass"))
    if not source:
        return None
    try:
        with closing(open_source(source, storage_options=storage_options)) as file:
            data = read_sibling(file, f"{name}.json")
    except (OSError, CheckpointError):
        return None
    return None if data is None else parse_json(data)


def attrs_with_config(
    names: Iterable[str],
    source: str,
    attrs: Mapping[Any, Any],
    storage_options: dict[str, Any] | None = None,
) -> Mapping[Any, Any]:
    """Return the attributes of a checkpoint, with its ``config.json`` if tensors are of experts."""
    if "config" in attrs or not any("experts" in name for name in names):
        return attrs
    try:
        config = read_config(source, attrs, "config", storage_options)
    except ValueError as error:
        warn(f"{source}: config.json is ignored: {error}")
        config = None
    return attrs if config is None else {**attrs, "config": config}
