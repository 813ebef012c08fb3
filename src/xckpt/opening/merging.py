"""Several open files as one: their tensors under one `Index`, and contradictions between them."""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FormatError, MissingShardError, shown, some
from xckpt.formats import chunks
from xckpt.index import Arrangement, Index, Shard, StoredList, Tensor
from xckpt.opening.names import steps_of
from xckpt.opening.reading import names_in
from xckpt.storage.source import ShardedSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.opening.checkpoint import CheckpointFiles
    from xckpt.storage import Source


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file of a checkpoint."""

    label: str  # in messages
    source: Source
    index: Index
    rank: str = ""  # a prefix of the names of its tensors


def merge(files: CheckpointFiles, opened: Sequence[OpenFile]) -> tuple[Source, Index]:
    """Merge several files into one checkpoint."""
    warnings = list(files.warnings)
    sources: dict[str, Source] = {}
    shards: dict[str, Shard] = {}
    arrangement = Arrangement()
    merged = _MergedTensors(files)
    for file in opened:
        arrangement = arrangement.grown(file.index.arrangement, ())
        if not isinstance(file.source, ShardedSource):
            sources[file.label] = file.source
            shards[file.label] = Shard(file.source.size, None, (file.label,))
        for name, shard in file.index.shards.items():
            sources[_within(file.label, name)] = file.source.shard(name, shard)
            shards[_within(file.label, name)] = shard
        merged.add(file)
        warnings += [f"{file.label}: {text}" for text in file.index.warnings]
    tensors = merged.tensors()
    warnings += merged.warnings()
    first = opened[0].index
    index = Index(
        first.format,
        ", ".join(dict.fromkeys(file.index.version for file in opened)),
        tensors,
        _merged_attrs(files, opened, warnings),
        files.name,
        sum(file.source.size for file in opened),
        shards,
        tuple(warnings),
        arrangement.of(tensors),
        {name: dtype for file in reversed(opened) for name, dtype in file.index.attr_types.items()},
        executes=tuple(dict.fromkeys(name for file in opened for name in file.index.executes)),
        imports=tuple(dict.fromkeys(name for file in opened for name in file.index.imports)),
    )
    duplicates = {name: tuple(labels) for name, labels in merged.duplicates.items()}
    notes = (*files.notes, *_size_notes(index, files.attrs.get("total_size")))
    checkpoint = replace(files.described(), notes=notes, duplicates=duplicates)
    return ShardedSource(files.name, sources), replace(index, checkpoint=checkpoint)


class _MergedTensors:
    """The tensors of several files, and how the index of shards disagrees with them."""

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self.tensors_by_name: dict[str, Tensor] = {}
        #: Copies of tensors that do not count, by the labels of their files.
        self.duplicates: dict[str, list[str]] = defaultdict(list)
        self._chunked: dict[str, list[Tensor]] = {}
        self._unlisted: dict[str, list[str]] = defaultdict(list)  # by file
        self._moved: dict[tuple[str, str], list[str]] = defaultdict(list)  # by both files
        self._copies: dict[str, tuple[str, Tensor]] = {}

    def add(self, file: OpenFile) -> None:
        """Add the tensors of a file."""
        weight_map = self.files.weight_map
        tensors, prefix = self.tensors_by_name, f"{file.rank}." if file.rank else ""
        for name_in_file, tensor in file.index.tensors.items():
            name = prefix + name_in_file
            if weight_map is not None and weight_map.get(name) != file.label:
                self._add_unlisted(name, tensor, file)
                continue
            labelled = _relabelled(tensor, file)
            if prefix:
                path = None if tensor.path is None else (file.rank, *tensor.path)
                labelled = replace(labelled.named(name), path=path)
            if name not in tensors:
                tensors[name] = labelled
            elif _is_chunk(tensor) and _is_chunk(tensors[name]):
                self._chunked.setdefault(name, [tensors[name]]).append(labelled)
            else:
                raise _twice(name, tensors[name], file, self.files)

    def _add_unlisted(self, name: str, tensor: Tensor, file: OpenFile) -> None:
        """Add a tensor that the index has elsewhere, or not at all; libraries load such tensors."""
        if name in self._copies:
            self.duplicates[name].append(file.label)
        else:
            self._copies[name] = file.label, _relabelled(tensor, file)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors; tensors of missing or damaged files raise an error when computed."""
        tensors, weight_map = self.tensors_by_name, self.files.weight_map or {}
        for name, (label, tensor) in self._copies.items():
            if name in tensors:
                self.duplicates[name].insert(0, label)
                continue
            tensors[name] = tensor
            if name in weight_map:
                self._moved[weight_map[name], label].append(name)
            else:
                self._unlisted[label].append(name)
        tensors |= {
            name: Tensor(name, "unknown", (), {}, problem=self._problem(name, label))
            for name, label in weight_map.items()
            if name not in tensors
        }
        tensors |= {n: _joined(n, parts, self.files.name) for n, parts in self._chunked.items()}
        return tensors

    def _problem(self, name: str, label: str) -> CheckpointError:
        """Return the error of a tensor that no open file has."""
        problem = self.files.problems.get(label)
        if problem is not None:
            return copy(problem).located(tensor=name)
        if label in self.files.missing:
            return MissingShardError(
                f"the file {shown(label)} is missing",
                path=self.files.name,
                tensor=name,
                hint="Put it next to the index of shards, and open that again",
            )
        hint = "The index and the files may be of different versions: fetch both again"
        for other, names in self._names_in_unlisted_parts.items():
            if name in names:
                hint = f"{shown(other)}, which the index does not list, has it. {hint}"
        return FormatError(
            f"the index of shards lists it in {shown(label)}, which lacks it",
            path=self.files.name,
            tensor=name,
            rule="ShardIndex",
            hint=hint,
        )

    @cached_property
    def _names_in_unlisted_parts(self) -> dict[str, set[str]]:
        return {label: names_in(place) for label, place in self.files.unlisted.items()}

    def warnings(self) -> list[str]:
        """Return a sentence for each cause of a disagreement."""
        texts = []
        for (stated, actual), names in self._moved.items():
            text = f"the index lists {some(names)} in {shown(stated)}, but it is in {shown(actual)}"
            texts.append(f"{text}, from where it is opened")
        for label, names in self._unlisted.items():
            text = f"not in the index of shards, but in {shown(label)}, and opened: {some(names)}"
            texts.append(text)
        for label, names in self._names_by_duplicate().items():
            counts = self.files.weight_map and "; the file that the index names counts"
            texts.append(f"{shown(label)} has another copy of {some(names)}{counts or ''}")
        return texts

    def _names_by_duplicate(self) -> dict[str, list[str]]:
        names_by_label = defaultdict(list)
        for name, labels in self.duplicates.items():
            for label in labels:
                names_by_label[label].append(name)
        return names_by_label


def _size_notes(index: Index, stated: Any) -> list[str]:
    """Report a total size in the index of shards that is not the size of the tensors."""
    tensors = index.tensors.values()
    if type(stated) is not int or any(tensor.problem is not None for tensor in tensors):
        return []
    nbytes = sum([tensor.nbytes for tensor in tensors])
    # Some writers count tied tensors once.
    if stated == nbytes or stated == nbytes - sum([index[name].nbytes for name in index.shared]):
        return []
    return [f"the index states {stated:,} bytes as total_size, but its tensors have {nbytes:,}"]


def labelled_attrs(opened: OpenFile) -> dict[str, Any]:
    """Return the attributes of a file, with references to its label."""
    return {
        name: replace(
            value, part=replace(value.part, shard=_within(opened.label, value.part.shard))
        )
        if isinstance(value, StoredList)
        else value
        for name, value in opened.index.attrs.items()
    }


def _relabelled(tensor: Tensor, file: OpenFile) -> Tensor:
    """Return a tensor of a file, with references to the label of the file."""
    label, problem = file.label, tensor.problem
    if problem is not None:
        problem = copy(problem).located(path=file.source.name)
    parts = {
        role: replace(part, shard=_within(label, part.shard)) for role, part in tensor.parts.items()
    }
    stored = tensor.stored
    if stored is not None:
        stored = {role: _relabelled(part, file) for role, part in stored.items()}
    return replace(tensor, parts=parts, stored=stored, problem=problem)


def _is_chunk(tensor: Tensor) -> bool:
    """Return whether a tensor is a chunk of a larger one."""
    return tensor.layout == "dense" and tensor.parts["data"].origin is not None


def _joined(name: str, tensors: Sequence[Tensor], path: str) -> Tensor:
    """Join the chunks of a tensor from several files."""
    by_origin = {tensor.parts["data"].origin or (): tensor for tensor in tensors}
    places = [(origin, tensor.shape) for origin, tensor in by_origin.items()]
    hint = "A file may be missing, or of another checkpoint"
    if len(by_origin) < len(tensors) or len({len(origin) for origin, _ in places}) > 1:
        reason = "several of its chunks begin at one place"
        raise FormatError(reason, path=path, tensor=name, rule="Chunks", hint=hint)
    ends = [[at + n for at, n in zip(*place, strict=True)] for place in places]
    size = tuple(map(max, zip(*ends, strict=True)))
    try:
        chunks.check_cover(name, size, places)
    except FormatError as error:
        error.hint = hint
        raise error.located(path=path, tensor=name) from error.__cause__
    return replace(chunks.joined(name, size, by_origin), attrs={})


def _within(label: str, shard: str | None) -> str:
    """Return the label of a shard that a file refers to."""
    return label if shard is None else f"{label}: {shard}"


def _twice(name: str, before: Tensor, again: OpenFile, files: CheckpointFiles) -> FormatError:
    first = next((part.shard for part in before.parts.values()), None)
    parts = again.index.tensors[name].parts.values()
    hint = "Open them apart"
    if steps_of([file.path for file in files.files]) is not None:
        paths = shown(files.name) if files.by == "glob" else "[...]"
        hint = f"xckpt.open_steps({paths}) opens them as the steps of a run"
    return FormatError(
        f"this tensor is in two files: {first} and {again.source.name}",
        path=again.source.name,
        offset=min([part.offset for part in parts], default=None),
        tensor=name,
        rule="DuplicateTensor",
        hint=hint,
    )


def _merged_attrs(
    files: CheckpointFiles, opened: Sequence[OpenFile], warnings: list[str]
) -> dict[str, Any]:
    """Merge the attributes of all files; the first file wins if they differ."""
    merged = dict(files.attrs)
    differing: dict[str, None] = {}
    for file in opened:
        # The files of a set differ in the attribute with their number.
        is_alone = file.index.files is None
        for key, value in labelled_attrs(file).items():
            first = merged.get(key, value)
            if is_alone and (type(first), first) != (type(value), value):
                differing[key] = None
            merged.setdefault(key, value)
    # The arguments of a training contain the number of the rank.
    if differing and files.by != "ranks":
        names = ", ".join(shown(str(key)) for key in differing)
        warnings.append(f"files disagree on the attributes {names}: the first one's are kept")
    return merged
