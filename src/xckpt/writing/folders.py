"""Folders as targets of `save` and `convert`: the name of the file, and the files next to it.

A folder gets ``model.safetensors``, or shards with their index, and the configuration and the
tokenizer of the source, as far as they still hold: without ``quantization_config`` where values
were decoded, with the element type of the new file, and without names of code, which is never
copied.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import signature
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xckpt import formats
from xckpt.elements import WIDE_FLOATS
from xckpt.errors import CheckpointError
from xckpt.index import Index
from xckpt.opening import open_index
from xckpt.storage import is_remote, local_path, new_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FOLDER_FORMAT", "InFolder", "into_folder", "is_folder"]

F = TypeVar("F", bound="Callable[..., Any]")

#: Format of the file in a folder, unless the caller names one.
FOLDER_FORMAT = "safetensors"
# Files of transformers that describe a model without its weights.
_COPIED = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "sentencepiece.bpe.model"),
)
_LARGEST_NBYTES = 256 << 20
_LARGEST_CONFIG_NBYTES = 16 << 20
_DTYPE_KEYS = ("dtype", "torch_dtype")


class InFolder(str):
    """Path of a new file whose folder gets the ``config.json`` of the source."""

    __slots__ = ()


def is_folder(path: Any) -> bool:
    """Return whether a target is a folder: it ends in a slash, or exists as one."""
    if not isinstance(path, str | os.PathLike):
        return False
    text = os.fspath(path)
    return text.endswith("/") or (not is_remote(text) and os.path.isdir(local_path(text)))  # noqa: PTH112


def into_folder(function: F) -> F:
    """Let a function whose second argument is the new file also write into a folder."""
    stated = signature(function)
    source_key, path_key, engine_key = list(stated.parameters)[:3]

    @wraps(function)
    def written(*args: Any, **keywords: Any) -> Any:
        try:
            arguments = stated.bind(*args, **keywords).arguments
        except TypeError:
            return function(*args, **keywords)  # which raises its error
        path = arguments[path_key]
        if not is_folder(path):
            return function(*args, **keywords)
        engine = arguments.get(engine_key) or FOLDER_FORMAT
        folder = os.fspath(path).rstrip("/")
        source = arguments[source_key]
        file = f"{folder}/model{formats.get(engine).suffixes[0]}"
        is_part = keywords.get("tensors") is not None or keywords.get("exclude") is not None
        is_whole = not is_part and keywords.get("compute", True) and not is_remote(folder)
        options = {k: v for k, v in keywords.items() if k not in (source_key, path_key, engine_key)}
        with _made(folder):
            result = function(source, InFolder(file) if is_whole else file, engine, **options)
        if is_whole:
            _copy_companions(source, Path(local_path(folder)))
        return result

    return written  # type: ignore[return-value]


@contextmanager
def _made(folder: str) -> Iterator[None]:
    """Make a local folder; remove it again after an error."""
    path = None if is_remote(folder) else Path(local_path(folder))
    is_new = path is not None and not path.exists()
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if path is not None and is_new:
            with suppress(OSError):
                path.rmdir()  # unless something is in it
        raise


def _copy_companions(source: Any, folder: Path) -> None:
    """Copy the files that describe a model from the folder of its source."""
    origin = source.source if isinstance(source, Index) else source
    encoding = getattr(source, "encoding", None)
    if isinstance(encoding, dict):
        origin = encoding.get("source")
    if not isinstance(origin, str | os.PathLike) or is_remote(os.fspath(origin)):
        return
    place = Path(local_path(os.fspath(origin)))
    old = place if place.is_dir() else place.parent
    if not old.is_dir() or old.resolve() == folder.resolve():
        return
    for name in _COPIED:
        with suppress(OSError, ValueError):  # missing, or not a file of this kind
            path, target = old / name, folder / name
            if not path.is_file() or target.exists() or path.stat().st_size > _LARGEST_NBYTES:
                continue
            if name in {"config.json", "tokenizer_config.json"}:
                _copy_config(path, target, place)
            else:
                shutil.copyfile(path, target)


def _copy_config(path: Path, target: Path, source: Path) -> None:
    """Copy a configuration without what does not hold for the new file."""
    if path.stat().st_size > _LARGEST_CONFIG_NBYTES:
        return
    config = json.loads(path.read_bytes())
    if not isinstance(config, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004
    config.pop("auto_map", None)  # names of code
    if path.name == "config.json":
        before, after = _stored(str(source)), _stored(str(target.parent))
        if not before.keys() <= after.keys():
            config.pop("quantization_config", None)
        sizes: Counter[str] = Counter()
        for dtype, count in after.values():
            if dtype in WIDE_FLOATS:
                sizes[dtype] += count
        for key in _DTYPE_KEYS:
            if key in config and sizes:
                config[key] = sizes.most_common(1)[0][0]
    with new_file(str(target)) as sink:
        sink.write(json.dumps(config, indent=2).encode("utf-8") + b"\n", 0)
        sink.commit()


def _stored(path: str) -> dict[str, tuple[str, int]]:
    """Return the element types and numbers of elements of the tensors that a checkpoint stores."""
    try:
        source, index = open_index(path, whole=False, silent=True, missing="ignore")
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    source.close()
    return {t.name: (t.dtype, prod(t.shape)) for t in index.tensors.values()}
