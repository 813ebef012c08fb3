"""Files of sentence-transformers beside a model: its modules, such as the pooling of tokens."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from xckpt.quantization.model import parse_json
from xckpt.writing.origins import is_readable

_MODULES, _CONFIG = "modules.json", "config.json"
_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")
# Beginning of the names of the library's classes; others are code of a model.
_LIBRARY = "sentence_transformers."
_MOST_MODULES = 64
_DESCRIPTIONS = frozenset({".json", ".md", ".txt"})


class SentenceModules(NamedTuple):
    """Files that describe modules, by their names in the folder of a model."""

    files: dict[str, Path]
    #: Folders of modules that have tensors.
    with_tensors: list[str]


def sentence_modules(folder: Path) -> SentenceModules:
    """Return the modules that follow a model in a folder; none if they name code."""
    modules = _modules(folder / _MODULES)
    if not modules:
        return SentenceModules({}, [])
    files = {name: path for name in (_MODULES, *_SETTINGS) if is_readable(path := folder / name)}
    with_tensors = []
    for name in filter(None, modules):
        place = folder / name
        if any(path.suffix not in _DESCRIPTIONS for path in place.iterdir()):
            with_tensors.append(name)
        elif is_readable(path := place / _CONFIG):
            files[f"{name}/{_CONFIG}"] = path
    return SentenceModules(files, with_tensors)


def _modules(path: Path) -> list[str]:
    """Return the folders of modules, which is empty for the model itself."""
    with suppress(OSError, ValueError):
        if is_readable(path):
            listed: Any = parse_json(b'{"modules": ' + path.read_bytes() + b"}")["modules"]
            if isinstance(listed, list) and len(listed) <= _MOST_MODULES:
                folders = [_folder_of(module, path.parent) for module in listed]
                return [] if None in folders else [name for name in folders if name is not None]
    return []


def _folder_of(module: Any, parent: Path) -> str | None:
    """Return the folder of a module; None if its path leads elsewhere, or its class is code."""
    if not isinstance(module, dict):
        return None
    name, kind = module.get("path"), module.get("type")
    if not (isinstance(name, str) and isinstance(kind, str) and kind.startswith(_LIBRARY)):
        return None
    is_inside = Path(name).name == name != ".." and (parent / name).is_dir()
    return name if is_inside or not name else None
