"""Where and how a checkpoint is written: what all ways of writing have in common."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from xckpt import formats
from xckpt.errors import CheckpointError
from xckpt.storage import is_remote, local_path
from xckpt.storage.siblings import components
from xckpt.storage.sink import Sink
from xckpt.storage.upload import UploadSink
from xckpt.writing.casting import check_cast
from xckpt.writing.executor import Job
from xckpt.writing.fitting import fit
from xckpt.writing.requests import Requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from xckpt.formats import Format
    from xckpt.plan import Plan
    from xckpt.storage import Source
    from xckpt.writing.casting import Cast
    from xckpt.writing.entries import Contents
    from xckpt.writing.fitting import Notes
    from xckpt.writing.items import Item

__all__ = ["Destination"]


@dataclass(frozen=True, slots=True)
class Destination:
    """A file that is to be written.

    Parameters
    ----------
    path : str
        A path or URL.
    writer : Format
        Its format.
    requests : Requests
        How tensors are stored.
    cast : {"exact", "allow", "never"}
        What conversions may lose.
    overwrite : bool
        Whether a file may be replaced.
    storage_options : dict or None
        For fsspec.
    format_options : mapping
        Of the format's own.
    """

    path: str
    writer: Format
    requests: Requests
    cast: Cast
    overwrite: bool
    storage_options: dict[str, Any] | None
    format_options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        engine: str | None,
        *,
        encoding: Mapping[str, Mapping[str, Any]] | None,
        cast: Cast,
        overwrite: bool,
        storage_options: dict[str, Any] | None,
        format_options: Mapping[str, Any],
    ) -> Self:
        """Check what a user asked for."""
        check_cast(cast)
        target = os.fspath(path)
        writer = formats.writable(engine or _format_of(target))
        for option in format_options:
            if option not in writer.write_options:
                raise TypeError(_unknown(option, writer))
        return cls(
            target if is_remote(target) else local_path(target),
            writer,
            Requests(encoding),
            cast,
            overwrite,
            storage_options,
            format_options,
        )

    def job(
        self,
        contents: Contents,
        notes: Notes,
        plan: Callable[..., Plan] | None = None,
        *,
        before: Item | None = None,
        sources: Iterable[Source] = (),
    ) -> Job:
        """Lay the file out; nothing is written yet."""
        try:
            fitted = fit(contents, self.writer, self.requests, self.cast, notes)
            index = replace(fitted.index, source=self.path)
            planned = (plan or self.writer.plan)(index, **self.format_options)
            sink = partial(_open_sink, self.path, self.overwrite, self.storage_options)
            label = os.path.basename(self.path)  # noqa: PTH119  it may be a URL
            replaced = self._replaced(sources, planned) if self.overwrite else []
            return Job(planned, fitted, self.cast, sink, label, before=before, replaced=replaced)
        except CheckpointError as error:
            raise error.located(path=self.path) from error.__cause__

    def _replaced(self, sources: Iterable[Source], plan: Plan) -> list[Source]:
        paths = [self.path, *(_companion(self.path, name) for name in plan.companions)]
        targets = {_resolved(path) for path in paths}
        return [source for source in sources if _resolved(source.name) in targets]

    def open_sink(self) -> Sink:
        """Begin the file."""
        return _open_sink(self.path, self.overwrite, self.storage_options)


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
