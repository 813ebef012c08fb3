"""Where and how a checkpoint is written: what all ways of writing have in common."""

from __future__ import annotations

import os
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from xckpt import formats
from xckpt.errors import CheckpointError
from xckpt.storage import is_remote, local_path
from xckpt.storage.siblings import components
from xckpt.storage.sink import Sink
from xckpt.storage.upload import UploadSink
from xckpt.writing.casting import check_cast
from xckpt.writing.fitting import Requests, fit
from xckpt.writing.job import WriteJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.formats import Format
    from xckpt.plan import Plan
    from xckpt.storage import Source
    from xckpt.writing.casting import Cast
    from xckpt.writing.data import Payload
    from xckpt.writing.fitting import Changes
    from xckpt.writing.streaming import Item

__all__ = ["Destination"]


class Destination:
    """A file that is to be written, and what a user asked for; parameters are those of `save`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        engine: str | None = None,
        *,
        encoding: Mapping[str, Mapping[str, Any]] | None = None,
        cast: Cast = "exact",
        overwrite: bool = False,
        storage_options: dict[str, Any] | None = None,
        format_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_cast(cast)
        target = os.fspath(path)
        self.writer = formats.writable(engine or _format_of(target))
        self._options = format_options or {}
        for option in self._options:
            if option not in self.writer.write_options:
                raise TypeError(_unknown(option, self.writer))
        self.path = target if is_remote(target) else local_path(target)
        self._requests = Requests(encoding)
        self._cast = cast
        self._overwrite = overwrite
        #: ``open_sink(name)`` begins the companion of that name, or the file itself for None.
        self.open_sink = partial(_open_sink, self.path, overwrite, storage_options)

    def job(
        self,
        payloads: Sequence[Payload],
        attrs: Mapping[str, Any],
        changes: Changes,
        *,
        sources: Iterable[Source],
        plan: Callable[..., Plan] | None = None,
        before: Item | None = None,
    ) -> WriteJob:
        """Lay the file out; nothing is written yet."""
        try:
            index, fitted = fit(
                payloads,
                attrs,
                writer=self.writer,
                requests=self._requests,
                cast=self._cast,
                changes=changes,
            )
            planned = (plan or self.writer.plan)(replace(index, source=self.path), **self._options)
            replaced = []
            if self._overwrite:
                paths = [self.path, *(_companion(self.path, name) for name in planned.companions)]
                targets = {_resolved(path) for path in paths}
                replaced = [each for each in sources if _resolved(each.name) in targets]
            label = os.path.basename(self.path)  # noqa: PTH119  it may be a URL
            return WriteJob(
                planned, fitted, self._cast, self.open_sink, label, before=before, replaced=replaced
            )
        except CheckpointError as error:
            raise error.located(path=self.path) from error.__cause__


def _open_sink(
    path: str,
    overwrite: bool,  # noqa: FBT001  by position, for partial
    storage_options: dict[str, Any] | None,
    companion: str | None = None,
) -> Sink:
    if companion is not None:
        path = _companion(path, companion)
    if is_remote(path):
        return UploadSink(path, overwrite=overwrite, storage_options=storage_options)
    return Sink(path, overwrite=overwrite)


def _companion(path: str, name: str) -> str:
    folder, slash, _ = path.rpartition("/")
    return folder + slash + "/".join(components(name))


def _resolved(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(os.path.expanduser(path))  # noqa: PTH111


def _format_of(path: str) -> str:
    """Find the format that a file name ends like."""
    name = path.partition("?")[0].lower() if is_remote(path) else path.lower()
    every = [formats.get(known) for known in formats.names()]
    found = {
        each.name: suffix
        for each in every
        if each.can.types
        for suffix in each.suffixes
        if name.endswith(suffix)
    }
    if len(found) > 1:
        shared = {each.name: each.shared_suffixes for each in every}
        found = {each: s for each, s in found.items() if s not in shared[each]} or found
    if len(found) == 1:
        return next(iter(found))
    which = "several formats have" if found else "no format has"
    engines = ", ".join(map(repr, found or formats.names()))
    raise ValueError(
        f"{which} the ending of {os.path.basename(path)!r}; pass engine=, one of {engines}"  # noqa: PTH119
    )


def _unknown(option: str, writer: Format) -> str:
    known = (
        *("encoding", "cast", "compute", "overwrite", "progress", "storage_options"),
        *writer.write_options,
    )
    alike = get_close_matches(option, known, n=1)
    has = ", ".join(writer.write_options) or "none"
    hint = f"did you mean {alike[0]!r}?" if alike else f"it has {has}"
    return f"format {writer.name!r} has no option {option!r} for writing; {hint}"
