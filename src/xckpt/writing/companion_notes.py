"""Notes on files beside tensors whose values hold for some of the sources only."""

from __future__ import annotations

import filecmp
from typing import TYPE_CHECKING

from xckpt.quantization.model import parse_json
from xckpt.structure.facts import DTYPE_KEYS
from xckpt.writing.origins import ADAPTER_CONFIG, CONFIG, GENERATION, Origin, is_readable, read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from xckpt.writing.tokenizers import ChosenTokenizer

_TOKENIZER = "tokenizer.json"
_OF_ATTRS = "written from the attributes, without tokenizer, as no files are beside the tensors"
_NOT_COMPARED = (
    "; only its sizes were compared, and tensors that the model lacks or misses are unknown"
)
_OTHER_VALUES = "what describes the model is from {}/, and others have other values"
# Values of a config that do not describe the computation.
_OF_FILES = frozenset(
    {*DTYPE_KEYS, "_name_or_path", "transformers_version", "auto_map", "quantization_config"}
)
_NO_EDIT = "attributes with the names of values in config.json, which stay ('config.{}' sets one)"
_OTHER_SCALES = (
    "factors of adapters are combined as if all had the scale of {}/ (base.ckpt.merge(adapter), "
    "called for each, uses their own)"
)
# Values of `adapter_config.json` that scale updates.
_SCALES = ("lora_alpha", "r", "use_rslora", "alpha_pattern", "rank_pattern")


def notes_of(
    origin: Origin,
    contents: Mapping[str, bytes | Path],
    files: Collection[str],
    tokenizer: ChosenTokenizer,
    *,
    is_compared: bool,
) -> Iterator[tuple[str, str]]:
    """Yield notes of configs that are from the attributes, or that hold for some sources only."""
    for name in contents:
        if name not in files and (name != GENERATION or origin.folder is None):
            yield _OF_ATTRS if is_compared or name != CONFIG else _OF_ATTRS + _NOT_COMPARED, name
    if origin.folder is None:
        return
    config = parse_json(content_bytes(contents[CONFIG])) if CONFIG in contents else {}
    for key in [key for key in origin.added if config.get(key, ...) != origin.added[key]]:
        if key in config:
            yield _NO_EDIT.format(key), key
    has_tokenizer = not tokenizer.tokenizer.files.keys().isdisjoint(contents)
    yield from (of_tokenizer := tokenizer.notes() if has_tokenizer else [])
    is_noted = bool(of_tokenizer) or tokenizer.is_of_another
    for name in (CONFIG, _TOKENIZER) if not is_noted else (CONFIG,):
        if name in contents and name in files:
            yield from _other_values(origin.folder / name, origin.others, contents[name])
    if ADAPTER_CONFIG in files:
        for text in _other_scales(origin.folder, origin.others):
            yield _OTHER_SCALES.format(origin.folder.name), text


def _other_values(
    path: Path, others: Iterable[Path], written: bytes | Path
) -> Iterator[tuple[str, str]]:
    """Yield notes of files of other checkpoints that contradict one that is written."""
    paths = [place / path.name for place in others if is_readable(place / path.name)]
    # Components of pipelines have equal names.
    is_clear = path.parent.name not in {other.parent.name for other in paths}

    def folder(file: Path) -> str:
        return file.parent.name if is_clear else "/".join(file.parent.parts[-2:])

    change = _OTHER_VALUES.format(folder(path))
    for other in paths:
        if path.name == CONFIG:
            config, of_other = (read_json(file) or {} for file in (path, other))
            new = parse_json(content_bytes(written))
            for key in [key for key in config if key in of_other and key not in _OF_FILES]:
                # Not edited, and not corrected.
                if new.get(key, ...) == config[key] != of_other[key]:
                    values = f" {of_other[key]} ({config[key]})"
                    is_plain = not isinstance(config[key], list | dict)
                    yield change, f"{folder(other)}/ {key}{values if is_plain else ''}"
        elif not filecmp.cmp(path, other, shallow=False):
            yield change, f"{folder(other)}/ another {path.name}"


def _other_scales(folder: Path, others: Iterable[Path]) -> Iterator[str]:
    """Yield the scales of other adapters that tensors are computed from, if they differ."""
    paths = [path for place in (folder, *others) if is_readable(path := place / ADAPTER_CONFIG)]
    config, *configs = [read_json(path) or {} for path in paths]
    for path, other in zip(paths[1:], configs, strict=True):
        keys = [key for key in _SCALES if other.get(key) != config.get(key)]
        if keys:
            values = [f"{key} {other.get(key)}, not {config.get(key)}" for key in keys]
            yield f"{path.parent.name}/: {'; '.join(values)}"


def content_bytes(content: bytes | Path) -> bytes:
    """Return the bytes of a file that is written, or of the one that is copied."""
    return content if isinstance(content, bytes) else content.read_bytes()
