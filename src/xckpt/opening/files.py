"""Which files are one checkpoint: one step decides, and one description is shown.

`files_of` turns a `Location` into `CheckpointFiles`: by a mark of a folder, an index of shards, a
single file, or the numbers and ranks in names. The description of present, missing and competing
files becomes `Index.checkpoint`; summaries, warnings, `verify`, ``info`` and errors show it.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt import formats
from xckpt.errors import CheckpointError, FormatError, MissingShardError, shown, some
from xckpt.formatting import natural_key
from xckpt.index import FileSet, is_file_name
from xckpt.opening.checkpoint import CheckpointFile, CheckpointFiles
from xckpt.opening.names import (
    DOWNLOADS,
    IN_PLACE,
    form_of,
    is_called_like_one,
    is_chunked,
    is_companion,
    is_index,
    is_unfinished,
    part_of,
    preference,
    preferred,
    rank_of,
    single_of,
)
from xckpt.opening.reading import (
    CONFIGS,
    configs_beside,
    names_in,
    parsed,
    read_shard_index,
    read_small,
)
from xckpt.storage import FolderListing, Location, Source, is_remote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Place = Location | Source

# Names of parts that are looked for because the names of others imply them.
_MOST_PARTS = 64
# Files with the name, or the number, of the newest step: DeepSpeed, Megatron-LM.
_LATEST = {"latest": "{}", "latest_checkpointed_iteration.txt": "iter_{:07}"}
_LONGEST_NAME = 255
# A config beside the weights: of transformers, peft, diffusers, Llama.
_CONFIGS = ("config.json", "adapter_config.json", "model_index.json", "params.json")
_CACHED_REPOSITORY = re.compile(r"(?:models|datasets|spaces)--.+")
# Words of ranks that mean nothing else, so that a gap in their numbers is a missing file.
_CERTAIN_RANK = re.compile(r"(?:mp|tp|pp|ep|cp)_rank", re.IGNORECASE)


class SeveralFilesError(IsADirectoryError):
    """A folder has several checkpoints; the caller must choose one."""


def files_of(location: Location, format: str | None = None) -> CheckpointFiles:
    """Return the files of the checkpoint at a location; `format` may choose in a folder."""
    if location.kind in {"list", "glob"}:
        return _files_of_several(location)
    listing = location.listing() if location.kind in {"folder", "hub"} else None
    place: Place = location
    if listing is None and location.kind in {"object", "url"} and not is_index(location.file_name):
        try:
            place = location.open()
        except IsADirectoryError:
            listing = location.listing()
            if listing is None:
                raise
    if listing is not None:
        return _files_in_folder(listing, format)
    if is_index(location.file_name):
        return indexed(location.open())
    name = place.name if isinstance(place, Source) else location.pinned().text
    files = listed_as("single", name, {name: place}, attrs=configs_beside(location, place))
    if location.kind != "file":
        return files
    marks = [suffix for suffix in DOWNLOADS if os.path.lexists(f"{location.path}{suffix}")]
    return _with_downloads(files, [f"{location.file_name}{suffix}" for suffix in marks])


def _with_downloads(files: CheckpointFiles, names: Sequence[str]) -> CheckpointFiles:
    """Add warnings about unfinished downloads of files that are opened."""
    if not names:
        return files
    texts = [
        f"the download of {shown(Path(name).stem)} did not end, by {shown(name)} beside it: "
        + ("its contents may have holes" if name.endswith(IN_PLACE) else "it may be an earlier one")
        + "; continue the download"
        for name in names
    ]
    holes = tuple([Path(name).stem for name in names if name.endswith(IN_PLACE)])
    return replace(files, warnings=(*files.warnings, *texts), incomplete=holes)


def set_of(source: Source, files: FileSet) -> CheckpointFiles:
    """Return the files of a checkpoint that one of them lists."""
    places: dict[str, Place] = {}
    for position, name in enumerate(files.names):
        try:
            places[name] = source if position == files.position else source.sibling(name)
        except FileNotFoundError:
            reason = f"{shown(name)}, one of the {len(files.names)} files of it, is missing"
            hint = "Put it next to the others, or open a list of the files that are there"
            at = files.offset
            raise MissingShardError(reason, path=source.name, offset=at, hint=hint) from None
        except CheckpointError as error:
            error.hint = "Rename the files, or open a list of them"
            raise error.located(path=source.name, offset=files.offset) from error.__cause__
    return listed_as("split", source.name, places)


def listed_as(by: Any, name: str, places: Mapping[str, Place], **facts: Any) -> CheckpointFiles:
    """Return files that are all present, with the numbers in their names."""
    files = []
    for path in places:
        part = part_of(file_name(path))
        rank = rank_of(file_name(path)) if by == "ranks" else None
        number, count = (None, None) if part is None else (part.number, part.total)
        files.append(CheckpointFile(path, number, count, "" if rank is None else rank.rank))
    if by == "single" and files[0].of not in {None, 1}:
        text = (
            f"part {files[0].number} of {files[0].of} of a checkpoint; its folder opens all parts"
        )
        facts["notes"] = (text,)
    return CheckpointFiles(name, tuple(files), by, places=places, **facts)


def file_name(path: str) -> str:
    """Return the name of the file at a path or URL."""
    return path.partition("?")[0].rstrip("/").rpartition("/")[2]


def _files_of_several(location: Location) -> CheckpointFiles:
    """Return the files of a list or a glob."""
    location = location.pinned()
    entries = location.expanded() if location.kind == "glob" else location.path
    places: dict[str, Place] = {}
    for entry in entries:
        path = entry.text if entry.text not in places else f"{entry.text} {len(places)}"
        places[path] = entry
    names = [entry.file_name for entry in entries]
    by = "ranks" if are_ranks(names) else location.kind
    files = listed_as(by, location.text, places)
    if location.kind == "list":
        return files
    groups = _groups_of(names)
    if len(groups) > 1 and any(group.by == "numbers" for group in groups):
        warning = f"the glob matches several checkpoints: {some([g.glob for g in groups], 'more')}"
        files = replace(files, warnings=(*files.warnings, warning))
    missing = _missing_parts(names)
    if not missing:
        return files
    text = f"{some(missing, 'parts')} of the same set, by the numbers in the names"
    warning = f"the glob does not match {text}: the checkpoint may be incomplete"
    return replace(files, missing=tuple(missing), warnings=(*files.warnings, warning))


def _missing_parts(names: Sequence[str]) -> list[str]:
    """Return the names that the numbers of others imply (``-of-00004``), at most a few."""
    numbers_by_family: dict[tuple[str, int, str], dict[int, str]] = {}
    for name in names:
        part = part_of(name)
        if part is not None:
            numbers_by_family.setdefault(part.family, {})[part.number] = name
    missing = []
    for (_, count, _), present in numbers_by_family.items():
        example = next(iter(present.values()))
        first = 0 if 0 in present else 1  # some writers count from 0
        absent = (n for n in range(first, count + first) if n not in present)
        missing += [_with_number(example, n) for n in islice(absent, _MOST_PARTS)]
    return missing


def _with_number(name: str, number: int) -> str:
    """Return the name of another part of the same set."""
    head, mark, tail = name.rpartition("-of-")
    stem = head.rstrip("0123456789")
    return f"{stem}{number:0{len(head) - len(stem)}}{mark}{tail}"


def indexed(source: Source) -> CheckpointFiles:
    """Return the files of an index of shards."""
    weight_map, metadata = read_shard_index(source)
    names = sorted(set(weight_map.values()), key=natural_key)
    places = {name: place for name in names if (place := _sibling(source, name)) is not None}
    if source in places.values():
        name = next(name for name, place in places.items() if place == source)
        reason = f"{shown(name)}, one of its files, is the index of shards itself"
        raise FormatError(reason, path=source.name, rule="ShardIndex")
    # Each may take a request.
    absent = [name for name in _missing_parts(names) if name not in places][:_MOST_PARTS]
    if source.is_free_to_check:  # see `sources_of`
        source.check()
    return replace(
        listed_as("index", source.name, dict.fromkeys(names, source)),
        missing=tuple([name for name in names if name not in places]),
        attrs=metadata,
        weight_map=weight_map,
        places=places,
        unlisted={name: part for name in absent if (part := _sibling(source, name)) is not None},
    )


def _sibling(source: Source, name: str) -> Source | None:
    """Open a file next to another one; None if it is missing."""
    try:
        return source.sibling(name)
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        raise error.located(path=source.name) from None


# --- folders --------------------------------------------------------------------------------------


class _FileGroup(NamedTuple):
    """Files, or folders of ranks, that are one checkpoint by their names."""

    by: Literal["single", "numbers", "ranks"]
    names: list[str]

    @property
    def glob(self) -> str:
        """A glob of the names, or the only name."""
        name = self.names[0]
        if len(self.names) == 1:
            return name
        if part_of(name) is None:
            return "*".join(form_of(name))
        end = name.lower().index("-of-")
        return f"{name[:end].rstrip('0123456789')}*{name[end:]}"


def _files_in_folder(listing: FolderListing, format: str | None = None) -> CheckpointFiles:
    """Return the files of the checkpoint in a folder; `format` may choose among several."""
    snapshot = _snapshot_of_cache(listing)
    if snapshot is not None:
        return _files_in_folder(snapshot, format)
    for mark in formats.folder_marks():
        place = listing.files.get(mark)
        if place is not None and (_is_certain(mark) or _is_recognized(place)):
            return listed_as("mark", listing.name, {place.text: place})
    return _FolderChoice(listing, format).choose()


def has_checkpoint(listing: FolderListing) -> bool:
    """Return whether a folder has files with names of checkpoints, whatever their contents."""
    marks = formats.folder_marks()
    return any(name in marks or is_called_like_one(name) for name in listing.files) or (
        are_ranks(list(listing.folders))
    )


def are_ranks(names: Sequence[str]) -> bool:
    """Return whether names list all ranks of one model; raise if one is missing."""
    ranks = [rank_of(name) for name in names]
    if len(names) < 2 or None in ranks:
        return False
    matches = [rank for rank in ranks if rank is not None]
    if len({rank.family for rank in matches}) > 1:
        return False
    numbers = {tuple(map(int, re.findall("[0-9]+", rank.rank))) for rank in matches}
    if len({len(number) for number in numbers}) > 1:
        return False
    sizes = [max(column) + 1 for column in zip(*numbers, strict=True)]
    if prod(sizes) > 4 * len(numbers):  # such as the ranks 8, 16 and 32 of adapters
        return False
    absent = [number for number in product(*map(range, sizes)) if number not in numbers]
    if not absent:
        return True
    is_certain = "consolidated" in matches[0].family or _CERTAIN_RANK.match(matches[0].rank)
    if is_certain:
        ranks_text = ", ".join(["_".join(map(str, number)) for number in absent[:5]])
        reason = f"of {prod(sizes)} ranks these are missing: {ranks_text}"
        raise MissingShardError(reason, hint="Or open a list of some files")
    return False


def _is_certain(mark: str) -> bool:
    """Return whether no other program writes a file of this name; "checkpoint" is a plain word."""
    return not mark.isalpha()


def _is_recognized(place: Location) -> bool:
    with closing(place.open()) as source, source.reading_header() as header:
        return formats.recognized(header) is not None


class _FolderChoice:
    """The files in a folder, sorted by what their names state."""

    def __init__(self, listing: FolderListing, format: str | None) -> None:
        self.listing, self.format = listing, format
        names = sorted(listing.files, key=natural_key)
        self.unfinished = [name for name in (*names, *listing.folders) if is_unfinished(name)]
        if not is_remote(listing.name):
            self.unfinished += unfinished_in(Path(listing.name))
        self.names = [n for n in names if not n.startswith(".") and not is_unfinished(n)]
        self.indexes = [name for name in self.names if is_index(name)]
        self.warnings: list[str] = []

    def choose(self) -> CheckpointFiles:
        """Return the files of the only checkpoint; raise unless there is exactly one."""
        usable, stale = self._by_index()
        # An index lists the files: the others are not opened, only compared by name.
        is_checkpoint = is_called_like_one if usable else self._is_checkpoint
        checkpoints = [n for n in self.names if not is_index(n) and is_checkpoint(n)]
        if not checkpoints:  # one that is damaged raises an error with advice
            checkpoints = [n for n in self.names if not is_index(n) and is_called_like_one(n)]
        if usable:
            files = self._single_or_indexed(*next(iter(usable.items())))
        else:
            group = self._group(checkpoints)
            if group is None:
                newest = self._newest()
                if newest is not None:
                    return _files_in_folder(newest, self.format)
            if stale and group is None:
                raise next(iter(stale.values()))
            if group is None:
                raise self._not_one(checkpoints)
            self.warnings += [
                f"the index {shown(name)} is ignored, because none of its files is here"
                for name in stale
            ]
            files = self._files_of(group)
        opened = set(_names_of(files))
        downloads = [name for name in self.unfinished if name.endswith(DOWNLOADS)]
        files = _with_downloads(files, [n for n in downloads if Path(n).stem in opened])
        chosen = opened.union(self.indexes)
        competing = (*[name for name in checkpoints if name not in chosen], *files.unlisted)
        self._warn(files, competing)
        config = self._config()
        return replace(
            files,
            name=self.listing.name,
            competing=competing,
            unfinished=tuple(self.unfinished),
            warnings=(*files.warnings, *self.warnings),
            attrs={**files.attrs, **config},
        )

    def _warn(self, files: CheckpointFiles, competing: Sequence[str]) -> None:
        """Warn about files that may be meant instead, and about reasons for missing ones."""
        # The files of a commit on the Hub belong together.
        models = [name for name in competing if preference(name) is not None]
        is_named = bool(self.warnings) or self.listing.name.startswith("hf://")
        if models and files.by == "single" and not is_named:
            opened = next(_names_of(files))
            self.warnings.append(
                f"{shown(opened)} is opened; {some(models, 'files')} in the same folder may differ"
            )
        latest = self._latest()
        if latest is not None:
            state = "not opened" if latest in self.listing.folders else "missing"
            self.warnings.append(f"the folder {shown(latest)}, the latest step, is {state}")
        broken = [name for name in files.missing if name in self.listing.broken_links]
        if broken:
            self.warnings.append(f"the links {some(broken, 'more')} lead to missing files")
        if files.missing and self.unfinished:
            text = f"{some(self.unfinished, 'files')}: a download did not end; repeat it"
            self.warnings.append(text)

    def _by_index(self) -> tuple[dict[str, CheckpointFiles], dict[str, CheckpointError]]:
        """Read the indexes; return usable ones, and an error for each one without files."""
        usable: dict[str, CheckpointFiles] = {}
        stale: dict[str, CheckpointError] = {}
        for name in self.indexes:
            try:
                files = indexed(self._location(name).open())
            except FormatError as error:
                stale[name] = error
                continue
            if files.places:
                usable[name] = files
                continue
            reason = f"all of its files are missing: {some(files.missing, 'files')}"
            hint = f"The folder has {some(self.names, 'files') or 'no files'}"
            stale[name] = MissingShardError(
                reason, path=self._location(name).text, rule="ShardIndex", hint=hint
            )
        return usable, stale

    def _single_or_indexed(self, index: str, files: CheckpointFiles) -> CheckpointFiles:
        """Return the single file next to an index if it has all of its tensors, else the shards."""
        singles = [single_of(index)]
        if singles == ["pytorch_model.bin"]:
            singles.insert(0, "model.safetensors")  # which transformers loads before
        listed = {file.path for file in files.files}
        for name in singles:
            if name not in self.names or name in listed or files.weight_map is None:
                continue
            missing = files.weight_map.keys() - names_in(self._location(name))
            if missing:
                self.warnings.append(
                    f"the files of {shown(index)} are opened, because {shown(name)} lacks "
                    f"{some(sorted(missing, key=natural_key))}; transformers loads {shown(name)}"
                )
                continue
            self.warnings.append(
                f"{shown(name)} is opened, as in transformers, and not the files of "
                f"{shown(index)}, which vLLM loads; to open those, open the index"
            )
            return self._files_of(_FileGroup("single", [name]))
        return files

    def _group(self, checkpoints: list[str]) -> _FileGroup | None:
        """Return the files that are the checkpoint; None without any, or if several may be."""
        groups = _groups_of(checkpoints)
        if self.format is not None:
            suffixes = formats.suffixes(self.format)
            groups = [g for g in groups if g.names[0].lower().endswith(suffixes)] or groups
        if any(config in self.listing.files for config in _CONFIGS):
            first = preferred([group.names[0] for group in groups])
            groups = [group for group in groups if group.names[0] == first] or groups
        groups = [group for group in groups if not is_companion(group.names[0])] or groups
        if not groups:
            folders = sorted(self.listing.folders, key=natural_key)
            ranks = [name for name in folders if rank_of(name) is not None]
            return _FileGroup("ranks", ranks) if are_ranks(ranks) else None
        return groups[0] if len(groups) == 1 else None

    def _files_of(self, group: _FileGroup) -> CheckpointFiles:
        missing = _missing_parts(group.names) if group.by == "numbers" else []
        if missing and formats.states_its_files(group.names[0]):
            group, missing = _FileGroup("single", group.names[:1]), []
        if missing:
            part = part_of(group.names[0])
            numbers = [str(p.number) for name in missing if (p := part_of(name)) is not None]
            count = 0 if part is None else part.total
            text = ", ".join(numbers[:5]) + (" and more" if len(numbers) > 5 else "")
            reason = f"of {count} shards these are missing: {text}"
            hint = "Or open a list of some files"
            if self.unfinished:
                hint = f"{some(self.unfinished, 'files')} did not arrive whole. {hint}"
            broken = [name for name in self.listing.broken_links if name in missing]
            if broken:
                hint = f"The files that the links {some(broken, 'more')} lead to are gone. {hint}"
            raise MissingShardError(reason, path=self.listing.name, hint=hint)
        places = [self._location(name) for name in group.names]
        by_text = {place.text: place for place in places}
        return listed_as(group.by, self.listing.name, by_text)

    def _location(self, name: str) -> Location:
        files, folders = self.listing.files, self.listing.folders
        return files[name] if name in files else folders[name]

    def _is_checkpoint(self, name: str) -> bool:
        location = self._location(name)
        # A part that is a Git LFS pointer raises an error with advice. Reading a remote file would
        # take a request.
        if part_of(name) is not None or not location.is_local:
            return is_called_like_one(name)
        with suppress(OSError), closing(location.open()) as source:
            return formats.recognized(source) is not None
        return False

    def _config(self) -> dict[str, Any]:
        """Return the contents of the configs of a model and of an adapter, by name."""
        files = [name for name in CONFIGS if name in self.listing.files]
        return parsed({name: self._location(name).open for name in files})

    def _latest(self) -> str | None:
        """Return the name of the folder of the newest step, which a file states."""
        for file, form in _LATEST.items():
            if file not in self.listing.files:
                continue
            with closing(self._location(file).open()) as source:
                too_long = source.size > _LONGEST_NAME
                name = "" if too_long else read_small(source).decode("utf-8", "replace").strip()
            if form != "{}" and name.isdecimal():
                name = form.format(int(name))
            if is_file_name(name):
                return name
        return None

    def _newest(self) -> FolderListing | None:
        """Return the folder of the newest step of a run; None without one."""
        folder = self.listing.folders.get(self._latest() or "")
        newest = None if folder is None else folder.listing()
        return newest if newest is not None and has_checkpoint(newest) else None

    def _foreign(self) -> FormatError | None:
        """Return the error of a folder of another kind, or of the only folder in it."""
        inner: FolderListing | None = None
        if not self.names and len(self.listing.folders) == 1:
            with suppress(OSError):
                inner = next(iter(self.listing.folders.values())).listing()
        for listing in filter(None, (self.listing, inner)):
            foreign = formats.foreign_folder(listing.name, listing.files, listing.folders)
            if foreign is not None:
                reason = f"the folder is {foreign.kind}"
                return FormatError(reason, path=listing.name, hint=foreign.advice)
        return None

    def _not_one(self, checkpoints: Sequence[str]) -> OSError | FormatError:
        """Return the error of a folder with no or several checkpoints among its files."""
        folder = self.listing.name
        foreign = None if checkpoints else self._foreign()
        if foreign is not None:
            return foreign
        groups = _groups_of(checkpoints)
        if not all(is_companion(group.names[0]) for group in groups):
            names = [group.glob for group in groups]
            reason = f"{len(groups)} checkpoints are in this folder, open one or a list: "
            return SeveralFilesError(errno.EISDIR, reason + some(names, ""), folder)
        reason = f"no checkpoint is in this folder; it has {some(self.names, '') or 'no files'}"
        latest = self._latest()
        if latest is not None and latest not in self.listing.folders:
            reason += f"; the folder {shown(latest)}, the latest step, is missing"
        if self.listing.folders:
            folders = sorted(self.listing.folders, key=natural_key)
            reason += f", and the folders {some(folders, '')}"
        if self.unfinished:
            reason += f"; {some(self.unfinished, 'more')}: a writer or a download did not end"
        if self.listing.broken_links:
            links = some(self.listing.broken_links, "more")
            reason += f"; the files that the links {links} lead to are missing"
        return IsADirectoryError(errno.EISDIR, reason, folder)


def _names_of(files: CheckpointFiles) -> Iterator[str]:
    for file in files.files:
        yield file.path.rstrip("/").rpartition("/")[2]


def _groups_of(names: Sequence[str]) -> list[_FileGroup]:
    """Group the files that are one checkpoint by their names."""
    groups: dict[tuple[Any, ...], _FileGroup] = {}
    for name in names:
        part, rank = part_of(name), rank_of(name)
        if is_chunked(name):
            group = groups.setdefault(("chunks",), _FileGroup("single", []))
        elif part is not None:
            group = groups.setdefault(("part", *part.family), _FileGroup("numbers", []))
        elif rank is not None:
            group = groups.setdefault(("rank", *rank.family), _FileGroup("ranks", []))
        else:
            group = groups.setdefault(("file", name), _FileGroup("single", []))
        group.names.append(name)
    whole: list[_FileGroup] = []
    for group in groups.values():
        if group.by != "ranks" or are_ranks(group.names):
            whole.append(group)
        else:
            whole += [_FileGroup("single", [name]) for name in group.names]
    return whole


def _snapshot_of_cache(listing: FolderListing) -> FolderListing | None:
    """Return the snapshot in a folder of the Hub's cache; None for other folders."""
    path = Path(listing.name)
    if path.name == "snapshots" and _CACHED_REPOSITORY.fullmatch(path.parent.name):
        snapshots, references = listing, path.parent / "refs"
    elif _CACHED_REPOSITORY.fullmatch(path.name) and "snapshots" in listing.folders:
        inner = listing.folders["snapshots"].listing()
        if inner is None:
            return None
        snapshots, references = inner, path / "refs"
    else:
        return None
    commits = list(snapshots.folders)
    with suppress(OSError, UnicodeDecodeError):
        main = (references / "main").read_text("ascii").strip()
        commits = [main] if main in commits else commits
    if len(commits) == 1:
        return snapshots.folders[commits[0]].listing()
    reason = "no snapshot is in this folder of the Hub's cache: the download did not end"
    if commits:
        reason = f"{len(commits)} snapshots are in this folder, open one: {some(commits, '')}"
    raise SeveralFilesError(errno.EISDIR, reason, listing.name)


def unfinished_in(folder: Path) -> list[str]:
    """Return unfinished downloads of the Hub's client into a local folder, or into its cache."""
    downloads = folder / ".cache" / "huggingface" / "download"
    if folder.parent.name == "snapshots":
        downloads = folder.parent.parent / "blobs"
    with suppress(OSError):
        return sorted([os.path.relpath(p, folder) for p in downloads.glob("**/*.incomplete")])
    return []
