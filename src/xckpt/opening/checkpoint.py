"""The description of a checkpoint: its files, missing ones, and others in the same folder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from xckpt.errors import CheckpointError, some

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file of a checkpoint.

    Parameters
    ----------
    path : str
        Path, URL, or the name that the index of shards uses; its label in messages and in
        ``encoding["shard"]``.
    number, of : int or None
        Its number in the set of files, and their count, if its name states them.
    rank : str
        Rank of a model that is split over several, such as ``"mp_rank_00"``; a prefix of the names
        of its tensors.
    problem : CheckpointError or None
        Error of opening it, if the other files can be opened.
    """

    path: str
    number: int | None = None
    of: int | None = None
    rank: str = ""
    problem: CheckpointError | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files that are one checkpoint, and what else is in their folder.

    Parameters
    ----------
    name : str
        Path or URL of the checkpoint, for messages and for ``encoding["source"]``.
    files : tuple of CheckpointFile
        Its files, in the order in which they are merged.
    by : str
        What decides that they belong together: ``"single"``, a ``"list"`` or ``"glob"`` of the
        user, an ``"index"`` of shards, ``"numbers"`` or ``"ranks"`` in their names, a ``"mark"`` of
        a folder that is read as a whole, or a ``"split"`` file that lists the others.
    missing : tuple of str
        Files that the index or the numbers name, and that are missing.
    competing : tuple of str
        Other files with tensors in the folder, which are not opened.
    unfinished : tuple of str
        Temporary files and folders of writers or downloads that did not end.
    incomplete : tuple of str
        Files whose contents may have holes, because a download into them did not end.
    notes : tuple of str
        Facts that change no value, such as a wrong ``total_size``.
    duplicates : mapping of str to tuple of str
        Files with a copy of a tensor that does not count, by the name of the tensor.
    joined_along : str
        Family whose axes state how ranks are joined; empty if they are not.
    copies : tuple of tuple of str
        Names, with the ranks side by side, of tensors that have to be equal; the first one counts.
    warnings : tuple of str
        Irregularities that change what is opened.
    attrs : mapping
        Attributes of the whole checkpoint.
    weight_map : mapping of str to str, or None
        File of each tensor, by an index of shards; None to take all tensors of all files.
    places : mapping of str to Location or Source
        Where to open the files, by path; missing ones have no place.
    unlisted : mapping of str to Source
        Parts that are present, and that the index does not list.
    """

    name: str
    files: tuple[CheckpointFile, ...]
    by: Literal["single", "list", "glob", "index", "numbers", "ranks", "mark", "split"]
    missing: tuple[str, ...] = ()
    competing: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    duplicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined_along: str = ""
    copies: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    weight_map: Mapping[str, str] | None = field(default=None, repr=False)
    # A `Location` or `Source` each; the Index, which has a description, knows neither.
    places: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    unlisted: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def facts(self) -> tuple[str, ...]:
        """Sentences about the files beyond the warnings, for summaries and reports."""
        facts = []
        if self.competing:
            facts.append(f"not opened, from the same folder: {some(self.competing, 'files')}")
        if self.unfinished:
            facts.append(
                f"{some(self.unfinished, 'more')} in the same folder: a writer or a download did "
                "not end"
            )
        return (*facts, *self.notes)

    @property
    def problems(self) -> dict[str, CheckpointError]:
        """Errors of the files that cannot be opened, by path."""
        return {file.path: file.problem for file in self.files if file.problem is not None}

    def document(self) -> dict[str, Any]:
        """Return the description for JSON."""
        files = [
            {
                "path": file.path,
                "number": file.number,
                "of": file.of,
                "rank": file.rank or None,
                "problem": None if file.problem is None else file.problem.reason,
            }
            for file in self.files
        ]
        return {
            "by": self.by,
            "files": files,
            "joined_along": self.joined_along or None,
            "missing": list(self.missing),
            "competing": list(self.competing),
            "unfinished": list(self.unfinished),
            "incomplete": list(self.incomplete),
            "notes": list(self.notes),
        }

    def described(self) -> CheckpointFiles:
        """Return the description alone, which is small and pickles."""
        return replace(self, attrs={}, weight_map=None, places={}, unlisted={}, warnings=())
