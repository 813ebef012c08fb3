"""Targets of `save` and `convert`: paths of new files with their formats, and folders.

A folder gets ``model.safetensors``, or shards with their index, and the files of
`xckpt.writing.companions`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from xckpt import formats
from xckpt.errors import some
from xckpt.opening.names import INDEX_SUFFIX
from xckpt.options import suggest_option
from xckpt.storage import is_remote, local_path, new_file
from xckpt.storage.source import components
from xckpt.writing.fitting import TENSOR_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from xckpt.storage.sink import Sink

# Format of the file in a folder, unless the caller names one.
_FOLDER_FORMAT = "safetensors"
# Options that all formats have.
_OPTIONS = (
    "encoding", "cast", "compute", "overwrite", "progress", "storage_options", "tensors", "exclude",
    "only", "dtype", "names", "verify", "source_engine", "skip_unreadable",
)  # fmt: skip


class Target(NamedTuple):
    """The path of a new file, for any process."""

    path: str
    overwrite: bool
    storage_options: dict[str, Any] | None
    is_folder: bool = False  # which gets the files that describe the model, too

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        storage_options: dict[str, Any] | None,
    ) -> Self:
        """Return the target for the path or URL of a file."""
        target = os.fspath(path)
        target = target if is_remote(target) else local_path(target)
        return cls(target, overwrite, storage_options)

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

    def in_folder(self, stem: str) -> Self:
        """Return the target for a file of another name with the same suffix."""
        folder, slash, name = self.path.rpartition("/")
        return self._replace(path=f"{folder}{slash}{stem}{name[name.index('.') :]}")

    def require_no_shards(self) -> None:
        """Raise if there are shards, or their index, that readers would prefer to the file."""
        if is_remote(self.path):
            return
        file = Path(self.path)
        names = self._shards_and(Path(self.path + INDEX_SUFFIX))
        if names:
            # No `FileExistsError`: `overwrite` does not help.
            raise ValueError(
                f"{file.parent}/ has another checkpoint, which readers would prefer to "
                f"{file.name}: {some(names, 'files')}; save into another folder, and "
                "remove them only once the new file is complete, as it may be computed from them"
            )

    def other_shards(self, names: Collection[str]) -> list[str]:
        """Return the shards in the folder that a new file with these shards leaves there."""
        if not names or is_remote(self.path):
            return []
        return [name for name in self._shards_and() if name not in names]

    def _shards_and(self, *paths: Path) -> list[str]:
        """Return the names of existing shards and of other existing files, in order."""
        file = Path(self.path.removesuffix(INDEX_SUFFIX))
        shards = file.parent.glob(f"{escape(file.stem)}-*-of-*{escape(file.suffix)}")
        with suppress(OSError):  # opening the file raises the error with its name
            return sorted([path.name for path in (*shards, *paths) if path.exists()])
        return []

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
    engine = engine or (_FOLDER_FORMAT if _is_folder(path, None) else _format_of(path))
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


def _format_of(target: str | os.PathLike[str]) -> str:
    """Return the format that the suffix of a path belongs to; raise unless there is exactly one."""
    path = os.fspath(target)
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
    ending = os.path.splitext(name)[1]  # noqa: PTH122
    if not matches:
        writable = [format for format in formats.loaded() if format.can.types]
        suffixes = [suffix for format in writable for suffix in format.suffixes]
        for similar in get_close_matches(ending, suffixes, n=1, cutoff=0.88):
            hint = f" (did you mean {similar!r}?)"
        choices = ", ".join(repr(format.name) for format in writable)
    if not (matches or hint or ending[1:].isalpha()):
        hint = f" (a folder as target ends in a slash: {path + '/'!r})"
    readers = [format.name for format in candidates if not format.can.types]
    if matches and readers:
        hint = f" ({some(readers)} is only read; its libraries load .safetensors)"
    problem = "several programs use" if matches else "no format that is written has"
    raise ValueError(
        f"{problem} the ending of {os.path.basename(path)!r}{hint}; pass engine=, one of {choices}"  # noqa: PTH119
    )


# --- folders --------------------------------------------------------------------------------------


def _is_folder(path: Any, engine: str | None) -> bool:
    """Return whether a target is a folder: it ends in a slash, exists as one, or has no ending."""
    if not isinstance(path, str | os.PathLike):
        return False
    text = os.fspath(path)
    if text.endswith("/") or (not is_remote(text) and os.path.isdir(local_path(text))):  # noqa: PTH112
        return True
    is_file = engine is not None or is_remote(text) or os.path.lexists(local_path(text))
    return not is_file and "." not in os.path.basename(text)  # noqa: PTH119


@contextmanager
def new_target(
    path: str | os.PathLike[str],
    engine: str | None,
    *,
    overwrite: bool,
    storage_options: dict[str, Any] | None,
) -> Iterator[Target]:
    """Return the target for a path or URL of a file, or of a folder, which is made if missing.

    A folder gets the files that describe the model, as far as they hold for its tensors.
    """
    if not _is_folder(path, engine):
        yield Target.of(path, overwrite=overwrite, storage_options=storage_options)
        return
    folder = os.fspath(path).rstrip("/")
    file = f"{folder}/model{formats.get(engine or _FOLDER_FORMAT).suffixes[0]}"
    target = Target.of(file, overwrite=overwrite, storage_options=storage_options)
    with made_folder(folder):
        yield target._replace(is_folder=not is_remote(folder))


@contextmanager
def made_folder(folder: str) -> Iterator[None]:
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
