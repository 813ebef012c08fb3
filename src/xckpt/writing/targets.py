"""Targets of `save` and `convert`: paths of new files with their formats, and folders.

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
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from xckpt import formats
from xckpt.elements import WIDE_FLOATS
from xckpt.errors import CheckpointError, some
from xckpt.index import Index
from xckpt.opening import open_index
from xckpt.opening.names import INDEX_SUFFIX
from xckpt.options import suggest_option
from xckpt.storage import is_remote, local_path, new_file
from xckpt.storage.source import components
from xckpt.writing.fitting import TENSOR_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xckpt.storage.sink import Sink

__all__ = ["Target", "into_folder", "writer_of"]

F = TypeVar("F", bound="Callable[..., Any]")

# Format of the file in a folder, unless the caller names one.
_FOLDER_FORMAT = "safetensors"
# Files of transformers that describe a model without its weights.
_COPIED = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "sentencepiece.bpe.model"),
)
# Options that all formats have.
_OPTIONS = (
    *("encoding", "cast", "compute", "overwrite", "progress", "storage_options"),
    *("tensors", "exclude", "only", "dtype", "names", "verify", "source_engine", "skip_unreadable"),
)
_LARGEST_NBYTES = 256 << 20
_LARGEST_CONFIG_NBYTES = 16 << 20
_DTYPE_KEYS = ("dtype", "torch_dtype")


class _InFolder(str):
    """Path of a new file whose folder gets the ``config.json`` of the source."""

    __slots__ = ()


class Target(NamedTuple):
    """The path of a new file, for any process."""

    path: str
    overwrite: bool
    storage_options: dict[str, Any] | None
    has_config: bool = False  # in a file next to it, instead of an attribute

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        storage_options: dict[str, Any] | None,
    ) -> Self:
        """Return the target for a path or URL."""
        target = os.fspath(path)
        target = target if is_remote(target) else local_path(target)
        return cls(target, overwrite, storage_options, has_config=isinstance(path, _InFolder))

    def companion(self, name: str) -> str:
        """Return the path of another file of the same checkpoint."""
        folder, slash, _ = self.path.rpartition("/")
        return folder + slash + "/".join(components(name))

    def open(self, name: str | None = None, *, beside: Sequence[Sink] = ()) -> Sink:
        """Begin the companion of that name, or the file itself for None."""
        return new_file(
            self.path if name is None else self.companion(name),
            overwrite=self.overwrite,
            storage_options=self.storage_options,
            beside=beside,
        )

    def check(self) -> None:
        """Raise the error that writing the file would begin with."""
        sink = self.open()
        try:
            sink.abort()
        finally:
            sink.abort()  # Ctrl-C may have come before the first call did anything


def writer_of(
    path: str | os.PathLike[str],
    engine: str | None = None,
    format_options: Mapping[str, Any] | None = None,
) -> formats.Format:
    """Return the format of a new file; raise `TypeError` for options that it does not have."""
    engine = engine or (_FOLDER_FORMAT if _is_folder(path) else _format_of(os.fspath(path)))
    writer = formats.writable(engine)
    supported = tuple(writer.write_options)
    for option in format_options or {}:
        if option not in supported:
            hint = suggest_option(option, (*supported, *_OPTIONS))
            if option in {"tensors", "exclude", "only"}:
                hint = f"select first: ds.ckpt.find({option}=...)"
            elif option in TENSOR_OPTIONS:
                hint = f"tensors have it: encoding={{'*': {{{option!r}: ...}}}}"
            elif "did you mean" not in hint:
                hint = f"it has {', '.join(supported) or 'none'}"
            raise TypeError(f"format {writer.name!r} has no option {option!r} for writing; {hint}")
    return writer


def _format_of(path: str) -> str:
    """Return the format that the suffix of a path belongs to; raise unless there is exactly one."""
    name = path.partition("?")[0].lower() if is_remote(path) else path.lower()
    is_index = name.endswith(INDEX_SUFFIX)
    name = name.removesuffix(INDEX_SUFFIX)
    engines = [engine for engine in formats.names() if name.endswith(formats.suffixes(engine))]
    candidates = [formats.get(engine) for engine in engines]
    matches = {
        format.name: suffix
        for format in candidates
        if format.can.types and (not is_index or "max_shard_size" in format.write_options)
        for suffix in format.suffixes
        if name.endswith(suffix)
    }
    if len(matches) > 1:  # a suffix that only one format uses takes precedence
        exclusive = {format.name: format.own_suffixes for format in candidates}
        matches = {
            engine: suffix for engine, suffix in matches.items() if suffix in exclusive[engine]
        } or matches
    shared = [suffix for format in candidates for suffix in format.shared_suffixes]
    # A shared suffix of one word, such as .bin, may be meant for another program's format.
    is_common = any(suffix in shared and suffix.count(".") == 1 for suffix in matches.values())
    if len(matches) == 1 and not is_common:
        return next(iter(matches))
    for format in candidates:
        if not matches and name.endswith(format.own_suffixes):
            formats.writable(format.name)  # raises an error that lists the writable formats
    hint, choices = "", ", ".join(map(repr, matches))
    if not matches:
        writable = [format for format in formats.loaded() if format.can.types]
        suffixes = [suffix for format in writable for suffix in format.suffixes]
        ending = os.path.splitext(name)[1]  # noqa: PTH122
        for similar in get_close_matches(ending, suffixes, n=1, cutoff=0.88):
            hint = f" (did you mean {similar!r}?)"
        choices = ", ".join(repr(format.name) for format in writable)
    problem = "several programs use" if matches else "no format that is written has"
    raise ValueError(
        f"{problem} the ending of {os.path.basename(path)!r}{hint}; pass engine=, one of {choices}"  # noqa: PTH119
    )


# --- folders --------------------------------------------------------------------------------------


def _is_folder(path: Any) -> bool:
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
        if not _is_folder(path):
            return function(*args, **keywords)
        engine = arguments.get(engine_key) or _FOLDER_FORMAT
        folder = os.fspath(path).rstrip("/")
        source = arguments[source_key]
        file = f"{folder}/model{formats.get(engine).suffixes[0]}"
        is_part = keywords.get("tensors") is not None or keywords.get("exclude") is not None
        is_whole = not is_part and keywords.get("compute", True) and not is_remote(folder)
        options = {k: v for k, v in keywords.items() if k not in (source_key, path_key, engine_key)}
        are_replaced = keywords.get("max_shard_size") is not None and keywords.get("overwrite")
        if not (are_replaced or is_remote(folder)):
            _require_no_shards(Path(local_path(folder)), Path(file))
        with _made(folder):
            result = function(source, _InFolder(file) if is_whole else file, engine, **options)
        if is_whole:
            _copy_companions(source, Path(local_path(folder)))
        return result

    return written  # type: ignore[return-value]


def _require_no_shards(folder: Path, file: Path) -> None:
    """Raise if a folder has shards, or their index, that readers would prefer to a new file."""
    shards = [*folder.glob(f"{file.stem}-*-of-*{file.suffix}"), folder / (file.name + INDEX_SUFFIX)]
    found = sorted(path.name for path in shards if path.exists())
    if found:
        # No `FileExistsError`: `overwrite` does not help.
        raise ValueError(
            f"{folder}/ has another checkpoint, which readers would prefer to {file.name}: "
            f"{some(found, 'files')}; choose another folder, or remove them first"
        )


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
